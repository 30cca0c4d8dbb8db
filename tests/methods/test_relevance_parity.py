"""Relevance propagation with its profiles equals Transformer-Explainability's code (tests/data/parity)."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import Method
from tests.methods import replica_comparison
from tests.methods import test_parity as parity
from tests.methods.relevance_models import InputDtypeSoftmax
from tests.methods.test_parity import CASES, DATA, ORIGINALS, explainer, zero_class_token
from tests.replicas import lrp, partial_lrp, relevance
from tests.replicas import transformer_attribution as attribution

#: Relative to the maximum, in float64.
FLOAT64_TOLERANCE = 1e-6
#: The authors' arrays were computed with AVX2; other processors round a float32 softmax differently in the last bit,
#: and relevance propagation amplifies the difference (the float32 noise of the authors' code is up to 5e-3).
FLOAT32_TOLERANCE = 1e-6 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 1e-3
#: ViT's softmax in float64 as in the authors' code, and in float32 as in transformers.
SOFTMAX_CASES = [("cases", FLOAT64_TOLERANCE), ("cases_softmax32", FLOAT32_TOLERANCE)]


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "relevance.npz") as file:
        return {name: file[name] for name in file.files}


def test_copied_files_equal_original_fixtures() -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are available")
    for model in ("bert", "vit"):
        for key, copied in arrays(model).items():
            folder, file, inside = key.split("/", 2)
            np.testing.assert_array_equal(copied, np.load(ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


@cache
def originals(folder: str, file: str) -> dict[str, np.ndarray]:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: these arrays of {folder} are not copied")
    with np.load(ORIGINALS / folder / f"{file}.npz") as arrays_of_case:
        return {name: arrays_of_case[name] for name in arrays_of_case.files}


def bert_inputs(case: str) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask")
    return {name: torch.as_tensor(arrays("bert")[f"bert_chefer/cases/{case}/{name}"]) for name in names}


@pytest.mark.parametrize(("case", "which"), CASES)
class TestBert:
    def theirs(self, case: str, which: str, name: str) -> np.ndarray:
        return arrays("bert")[f"bert_chefer/cases/{case}/{which}/{name}"]

    def ours(self, case: str, which: str, method: Any, profile: str = "te_bert_eraser", **how: Any) -> np.ndarray:
        index = int(self.theirs(case, which, "target"))
        target = None if which == "pred" else index
        e = explainer("bert").explain(bert_inputs(case), method, target=target, profile=profile, **how)
        assert e.target["index"] == index
        return e.scores

    def test_bert_transformer_attribution_equals_authors(self, case: str, which: str) -> None:
        """The default is the last layer alone, as in the authors' pipeline."""
        last = self.ours(case, which, "transformer-attribution")
        assert replica_comparison.gap(last, self.theirs(case, which, "generate_LRP_start2")[0]) < FLOAT64_TOLERANCE
        for start in (0, 1):
            ours = self.ours(case, which, "transformer-attribution", layers=(start, None))
            assert (
                replica_comparison.gap(ours, self.theirs(case, which, f"generate_LRP_start{start}")[0])
                < FLOAT64_TOLERANCE
            )

    def test_bert_transformer_attribution_of_the_notebook_equals_authors(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "transformer-attribution", "te_bert_notebook")
        theirs = self.theirs(case, which, "generate_LRP_start0")[0]
        assert replica_comparison.gap(ours, (theirs - theirs.min()) / (theirs.max() - theirs.min())) < FLOAT64_TOLERANCE

    def test_bert_transformer_attribution_with_orig_rules_equals_authors(self, case: str, which: str) -> None:
        ours = self.ours(case, which, Method("transformer-attribution", rules="orig"), layers=(0, None))
        assert (
            replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_start0_origlrp")[0]) < FLOAT64_TOLERANCE
        )

    def test_bert_partial_lrp_equals_authors(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "partial-lrp")
        assert (
            replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_last_layer_orig")[0])
            < FLOAT64_TOLERANCE
        )
        ours = self.ours(case, which, Method("partial-lrp", rules="ours"))
        assert (
            replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_last_layer_ours")[0])
            < FLOAT64_TOLERANCE
        )

    def test_bert_lrp_equals_authors(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "lrp")
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_full_lrp_orig")[0]) < FLOAT64_TOLERANCE
        ours = self.ours(case, which, Method("lrp", rules="ours"))
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_full_lrp_ours")[0]) < FLOAT64_TOLERANCE

    def test_bert_attention_rollout_and_gradcam_equal_authors(self, case: str, which: str) -> None:
        array_names = {
            "attention": "generate_attn_last_layer",
            "rollout": "generate_rollout_start0",
            "attention-gradcam": "generate_attn_gradcam",
        }
        for method, name in array_names.items():
            assert replica_comparison.gap(self.ours(case, which, method), self.theirs(case, which, name)[0]) < 1e-9

    def test_reference_relevance_of_bert_maps_equals_authors(self, case: str, which: str) -> None:
        """The replica, including the mask, equals the authors' P_b of each layer."""
        inputs, index = bert_inputs(case), int(self.theirs(case, which, "target"))
        for variant in ("ours", "orig"):
            ids, mask = inputs["input_ids"][0].tolist(), inputs["attention_mask"][0].tolist()
            record = relevance.bert(explainer("bert").adapter.model, ids, index, variant, mask)
            theirs = arrays("bert")[f"bert_recorded/cases/{case}/{which}/attn_cam_{variant}"]
            for layer, maps in enumerate(record.maps):
                assert replica_comparison.gap(maps, theirs[layer, 0]) < 1e-9


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("case", ["case0", "case1"])
def test_padded_inputs_with_profile_equal_reference(case: str, padding: int) -> None:
    """Padding stays and is part of the maps; the expected scores come from the replica, which is tested above."""
    unpadded = bert_inputs(case)
    inputs = {name: torch.nn.functional.pad(tensor, (0, padding)) for name, tensor in unpadded.items()}
    ex, units = explainer("bert"), inputs["input_ids"].shape[1]
    methods = ["transformer-attribution", "partial-lrp", "lrp"]
    results = ex.explain(inputs, methods, target=1, profile="te_bert_eraser")
    gradients = ex.record(unpadded, "attention_gradient", target=1).calls
    padded_gradients = np.zeros((3, 4, units, units))
    for call in gradients:
        padded_gradients[call.layer, :, : units - padding, : units - padding] = call.attention_gradient[0]
    model, ids, mask = ex.adapter.model, *(inputs[name][0].tolist() for name in ("input_ids", "attention_mask"))
    readout = np.eye(units)[0]
    records = {variant: relevance.bert(model, ids, 1, variant, mask) for variant in ("ours", "orig")}
    expected = {
        "transformer-attribution": attribution.scores(records["ours"], padded_gradients, readout, [2], normalise=True),
        "partial-lrp": zero_class_token(partial_lrp.scores(records["orig"], readout)),
        "lrp": zero_class_token(lrp.scores(records["orig"])),
    }
    expected["transformer-attribution"][0] = expected["transformer-attribution"].min()
    for method in methods:
        assert len(results[method]) == units
        assert replica_comparison.gap(results[method].scores, expected[method]) < FLOAT64_TOLERANCE, method


@pytest.mark.parametrize(("file", "tolerance"), SOFTMAX_CASES)
@pytest.mark.parametrize(("case", "which"), CASES)
class TestViT:
    """The authors' scores leave out [CLS]: the scores of the patches are compared."""

    def theirs(self, file: str, case: str, which: str, name: str) -> np.ndarray:
        return arrays("vit")[f"vit_chefer/{file}/{case}/{which}/{name}"]

    def ours(self, file: str, case: str, which: str, method: Any, profile: str = "te_vit_eval") -> np.ndarray:
        pixels = torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])
        index = int(self.theirs(file, case, which, "target"))

        def explain() -> clearhead.Explanation:
            return explainer("vit").explain({"pixel_values": pixels}, method, target=index, profile=profile)

        if file == "cases_softmax32":
            return explain().scores[1:]
        with InputDtypeSoftmax():
            return explain().scores[1:]

    @pytest.mark.parametrize(
        ("method", "profile", "name"),
        [
            (Method("transformer-attribution"), "te_vit_eval", "LRP_ours/transformer_attribution_start1"),
            (Method("transformer-attribution"), "te_vit_notebook", "LRP_ours/transformer_attribution_start0"),
            (Method("transformer-attribution", rules="orig"), "te_vit_eval", "LRP_orig/grad_start1"),
            (Method("partial-lrp"), "te_vit_eval", "LRP_orig/last_layer"),
            (Method("partial-lrp", rules="ours"), "te_vit_eval", "LRP_ours/last_layer"),
            (Method("partial-lrp", layers=(1, 2)), "te_vit_eval", "LRP_orig/second_layer"),
            (Method("rollout"), "te_vit_eval", "rollout_start1"),
            (Method("transformer-attribution"), "bi_vit_h", "LRP_ours/transformer_attribution_start1"),
            (Method("partial-lrp"), "bi_vit_c", "LRP_ours/last_layer"),
        ],
        ids=str,
    )
    def test_vit_profiles_equal_authors(
        self, case: str, which: str, file: str, tolerance: float, method: Method, profile: str, name: str
    ) -> None:
        theirs = self.theirs(file, case, which, name).reshape(-1)
        assert replica_comparison.gap(self.ours(file, case, which, method, profile), theirs) < tolerance

    @pytest.mark.parametrize("rules", ["orig", "ours"])
    def test_vit_lrp_equals_authors(self, case: str, which: str, file: str, tolerance: float, rules: str) -> None:
        """The authors' scores are a map of pixels; the score of a patch is the sum of its pixels."""
        pixels = self.theirs(file, case, which, f"LRP_{rules}/full")[0]
        patches = pixels.reshape(4, 8, 4, 8).sum((1, 3)).reshape(-1)
        assert replica_comparison.gap(self.ours(file, case, which, Method("lrp", rules=rules)), patches) < tolerance


@pytest.mark.parametrize(("case", "which"), CASES)
@pytest.mark.parametrize("rules", ["ours", "orig"])
@pytest.mark.parametrize(("name", "layers"), [("last_layer", (-1, None)), ("second_layer", (1, 2))])
def test_single_layer_attribution_equals_authors_ablation(
    case: str, which: str, rules: str, name: str, layers: tuple[int, int | None]
) -> None:
    """Partial LRP times the gradient equals Transformer Attribution of a single layer."""
    arrays_of_vit = originals("vit_chefer", "cases")
    pixels, index = torch.as_tensor(arrays_of_vit[f"{case}/pixel_values"]), int(arrays_of_vit[f"{case}/{which}/target"])
    method = Method("transformer-attribution", rules=rules, layers=layers)
    with InputDtypeSoftmax():
        e = explainer("vit").explain({"pixel_values": pixels}, method, target=index)
    assert (
        replica_comparison.gap(e.scores[1:], arrays_of_vit[f"{case}/{which}/LRP_{rules}/{name}_ablation"].reshape(-1))
        < FLOAT64_TOLERANCE
    )


@cache
def load_normed_mean_pooled_vit() -> clearhead.Explainer:
    """Load the ViT of the fixtures with a head that reads the mean of the normed patches, as in transformerinterp."""
    parity.explainer.cache_clear()
    model = parity.explainer("vit").adapter.model
    parity.explainer.cache_clear()

    class NormedMeanForImageClassification(type(model)):  # type: ignore[misc]
        def forward(self, pixel_values: Tensor, **options: Any) -> Any:
            states = self.vit(pixel_values, **options).last_hidden_state
            return SimpleNamespace(logits=self.classifier(states[:, 1:].mean(1)))

    model.__class__ = NormedMeanForImageClassification
    return clearhead.load(model, readout="patches")


#: Transformer Attribution of a single layer, which the authors call an ablation.
LAST_LAYER_ATTRIBUTION = Method("transformer-attribution", repeated=True, layers=(-1, None))


@pytest.mark.parametrize(("case", "which"), CASES)
class TestMeanPooledViT:
    """transformerinterp's MAE: each patch gets all the relevance of the mean of the patches."""

    def theirs(self, file: str, case: str, which: str, name: str) -> np.ndarray:
        return originals("vit_beyond", file)[f"{case}/{which}/mae/LRP_ours/{name}"].reshape(-1)

    @pytest.mark.parametrize(("file", "tolerance"), SOFTMAX_CASES)
    @pytest.mark.parametrize(
        ("method", "profile", "name"),
        [
            (Method("transformer-attribution", layers=(0, None)), "bi_vit_mae", "transformer_attribution_start0"),
            (Method("partial-lrp"), "bi_vit_mae", "last_layer"),
            (LAST_LAYER_ATTRIBUTION, None, "last_layer_ablation"),
        ],
        ids=str,
    )
    def test_mean_pooled_vit_profiles_equal_authors(
        self, case: str, which: str, file: str, tolerance: float, method: Method, profile: str | None, name: str
    ) -> None:
        theirs, (index,) = (self.theirs(file, case, which, array_name) for array_name in (name, "target"))
        inputs = {"pixel_values": torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])}

        def explain() -> clearhead.Explanation:
            return load_normed_mean_pooled_vit().explain(inputs, method, target=int(index), profile=profile)

        if file == "cases_softmax32":
            assert replica_comparison.gap(explain().scores[1:], theirs) < tolerance
        else:
            with InputDtypeSoftmax():
                assert replica_comparison.gap(explain().scores[1:], theirs) < tolerance

    def test_reference_relevance_of_mean_pooled_vit_equals_authors(self, case: str, which: str) -> None:
        """The replica equals the authors' product of all maps, read at the class token."""
        index = int(self.theirs("cases", case, which, "target")[0])
        record = walk_mean_pooled_vit(case, index)
        rows = np.eye(17)[0]
        for maps in reversed(record.maps):
            rows = rows + rows @ np.maximum(maps, 0).mean(0)
        assert replica_comparison.gap(rows[1:], self.theirs("cases", case, which, "rollout_start0")) < 1e-9


def walk_mean_pooled_vit(case: str, index: int) -> relevance.RelevanceRecord:
    pixels = arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"][0].astype(float)
    return relevance.vit(load_normed_mean_pooled_vit().adapter.model, pixels, index, "ours", averaged=True)


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("index", range(5))
def test_mean_pooled_vit_equals_reference_implementation(case: str, index: int) -> None:
    inputs = {"pixel_values": torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])}
    mean = np.append(0, np.full(16, 1 / 16))
    with InputDtypeSoftmax():
        results = load_normed_mean_pooled_vit().explain(
            inputs, ["transformer-attribution", "partial-lrp"], index, profile="bi_vit_mae"
        )
        tape = load_normed_mean_pooled_vit().record(inputs, "attention_gradient", target=index)
    gradients = np.stack([call.attention_gradient[0] for call in tape.calls])
    record = walk_mean_pooled_vit(case, index)
    expected = attribution.scores(record, gradients, mean, [1, 2]) + mean
    assert replica_comparison.gap(results["transformer-attribution"].scores[1:], expected[1:]) < FLOAT64_TOLERANCE
    assert (
        replica_comparison.gap(results["partial-lrp"].scores[1:], partial_lrp.scores(record, mean)[1:])
        < FLOAT64_TOLERANCE
    )
    assert all(np.isnan(e.scores[0]) for e in results.values())


def test_batch_equals_authors() -> None:
    """Sums run over each sample; the authors' sums over the batch would mix the samples."""
    inputs = [bert_inputs("case0"), bert_inputs("case1")]
    for method, name in (
        (Method("lrp", rules="ours"), "generate_full_lrp_ours"),
        (Method("partial-lrp", rules="ours"), "generate_LRP_last_layer_ours"),
    ):
        results = explainer("bert").explain(inputs, method)
        for position, case in enumerate(("case0", "case1")):
            theirs = arrays("bert")[f"bert_chefer/cases/{case}/pred/{name}"][0]
            # the authors add a mask, which takes 1e-9 of the relevance
            assert replica_comparison.gap(zero_class_token(results[position].scores), theirs) < 1e-6
