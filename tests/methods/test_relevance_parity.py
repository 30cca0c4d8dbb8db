"""Relevance propagation against Transformer-Explainability's own numbers, by its profiles (tests/data/parity)."""

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
from tests.methods.relevance_models import Pure
from tests.methods.test_parity import CASES, DATA, ORIGINALS, explainer, without_class_token
from tests.replicas import lrp, partial_lrp, relevance
from tests.replicas import transformer_attribution as attribution

#: Of the maximum, in float64.
WITHIN = 1e-6
#: The authors' numbers were made where float32's softmax rounds as on AVX2; elsewhere its last bit is another, and
#: relevance propagation makes that larger (their own float32 noise is up to 5e-3).
SINGLE = 1e-6 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 1e-3
#: ViT's softmax as the authors have it (in float64), and as transformers has it.
SOFTMAX = [("cases", WITHIN), ("cases_softmax32", SINGLE)]


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "relevance.npz") as file:
        return {name: file[name] for name in file.files}


def test_copies_are_the_originals() -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are here")
    for model in ("bert", "vit"):
        for key, copied in arrays(model).items():
            folder, file, inside = key.split("/", 2)
            np.testing.assert_array_equal(copied, np.load(ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


@cache
def originals(folder: str, file: str) -> dict[str, np.ndarray]:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: these figures of {folder} are there alone")
    with np.load(ORIGINALS / folder / f"{file}.npz") as known:
        return {name: known[name] for name in known.files}


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

    def test_transformer_attribution(self, case: str, which: str) -> None:
        """The last layer alone by default, as in their pipeline."""
        last = self.ours(case, which, "transformer-attribution")
        assert replica_comparison.gap(last, self.theirs(case, which, "generate_LRP_start2")[0]) < WITHIN
        for start in (0, 1):
            ours = self.ours(case, which, "transformer-attribution", layers=(start, None))
            assert replica_comparison.gap(ours, self.theirs(case, which, f"generate_LRP_start{start}")[0]) < WITHIN

    def test_transformer_attribution_of_the_notebook(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "transformer-attribution", "te_bert_notebook")
        theirs = self.theirs(case, which, "generate_LRP_start0")[0]
        assert replica_comparison.gap(ours, (theirs - theirs.min()) / (theirs.max() - theirs.min())) < WITHIN

    def test_transformer_attribution_by_the_other_rules(self, case: str, which: str) -> None:
        ours = self.ours(case, which, Method("transformer-attribution", rules="orig"), layers=(0, None))
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_start0_origlrp")[0]) < WITHIN

    def test_partial_lrp(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "partial-lrp")
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_last_layer_orig")[0]) < WITHIN
        ours = self.ours(case, which, Method("partial-lrp", rules="ours"))
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_LRP_last_layer_ours")[0]) < WITHIN

    def test_lrp(self, case: str, which: str) -> None:
        ours = self.ours(case, which, "lrp")
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_full_lrp_orig")[0]) < WITHIN
        ours = self.ours(case, which, Method("lrp", rules="ours"))
        assert replica_comparison.gap(ours, self.theirs(case, which, "generate_full_lrp_ours")[0]) < WITHIN

    def test_baselines(self, case: str, which: str) -> None:
        known = {
            "attention": "generate_attn_last_layer",
            "rollout": "generate_rollout_start0",
            "attention-gradcam": "generate_attn_gradcam",
        }
        for method, name in known.items():
            assert replica_comparison.gap(self.ours(case, which, method), self.theirs(case, which, name)[0]) < 1e-9

    def test_relevance_of_every_map(self, case: str, which: str) -> None:
        """The replica walks as the authors do, mask included: what it is held to is their P_b of each layer."""
        inputs, index = bert_inputs(case), int(self.theirs(case, which, "target"))
        for variant in ("ours", "orig"):
            ids, mask = inputs["input_ids"][0].tolist(), inputs["attention_mask"][0].tolist()
            found = relevance.bert(explainer("bert").adapter.model, ids, index, variant, mask)
            theirs = arrays("bert")[f"bert_recorded/cases/{case}/{which}/attn_cam_{variant}"]
            for layer, maps in enumerate(found.maps):
                assert replica_comparison.gap(maps, theirs[layer, 0]) < 1e-9


@pytest.mark.parametrize("more", [1, 4])
@pytest.mark.parametrize("case", ["case0", "case1"])
def test_padded_inputs_as_the_authors_code_takes_them(case: str, more: int) -> None:
    """Padding stays, and is part of the maps: by the replica, which is held to the authors' numbers above."""
    plain = bert_inputs(case)
    inputs = {name: torch.nn.functional.pad(part, (0, more)) for name, part in plain.items()}
    ex, units = explainer("bert"), inputs["input_ids"].shape[1]
    methods = ["transformer-attribution", "partial-lrp", "lrp"]
    ours = ex.explain(inputs, methods, target=1, profile="te_bert_eraser")
    gradients = ex.record(plain, "attention_gradient", target=1).calls
    wide = np.zeros((3, 4, units, units))
    for call in gradients:
        wide[call.layer, :, : units - more, : units - more] = call.attention_gradient[0]
    model, ids, mask = ex.adapter.model, *(inputs[name][0].tolist() for name in ("input_ids", "attention_mask"))
    first = np.eye(units)[0]
    by = {variant: relevance.bert(model, ids, 1, variant, mask) for variant in ("ours", "orig")}
    expected = {
        "transformer-attribution": attribution.scores(by["ours"], wide, first, [2], normalise=True),
        "partial-lrp": without_class_token(partial_lrp.scores(by["orig"], first)),
        "lrp": without_class_token(lrp.scores(by["orig"])),
    }
    expected["transformer-attribution"][0] = expected["transformer-attribution"].min()
    for method in methods:
        assert len(ours[method]) == units
        assert replica_comparison.gap(ours[method].scores, expected[method]) < WITHIN, method


@pytest.mark.parametrize(("file", "within"), SOFTMAX)
@pytest.mark.parametrize(("case", "which"), CASES)
class TestViT:
    """Theirs have no [CLS]: the scores of the patches are compared."""

    def theirs(self, file: str, case: str, which: str, name: str) -> np.ndarray:
        return arrays("vit")[f"vit_chefer/{file}/{case}/{which}/{name}"]

    def ours(self, file: str, case: str, which: str, method: Any, profile: str = "te_vit_eval") -> np.ndarray:
        pixels = torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])
        index = int(self.theirs(file, case, which, "target"))

        def explain() -> clearhead.Explanation:
            return explainer("vit").explain({"pixel_values": pixels}, method, target=index, profile=profile)

        if file == "cases_softmax32":
            return explain().scores[1:]
        with Pure():
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
    def test_profiles(
        self, case: str, which: str, file: str, within: float, method: Method, profile: str, name: str
    ) -> None:
        theirs = self.theirs(file, case, which, name).reshape(-1)
        assert replica_comparison.gap(self.ours(file, case, which, method, profile), theirs) < within

    @pytest.mark.parametrize("rules", ["orig", "ours"])
    def test_lrp(self, case: str, which: str, file: str, within: float, rules: str) -> None:
        """Theirs is a map of pixels; a patch's score is the sum of its own."""
        pixels = self.theirs(file, case, which, f"LRP_{rules}/full")[0]
        patches = pixels.reshape(4, 8, 4, 8).sum((1, 3)).reshape(-1)
        assert replica_comparison.gap(self.ours(file, case, which, Method("lrp", rules=rules)), patches) < within


@pytest.mark.parametrize(("case", "which"), CASES)
@pytest.mark.parametrize("rules", ["ours", "orig"])
@pytest.mark.parametrize(("name", "layers"), [("last_layer", (-1, None)), ("second_layer", (1, 2))])
def test_ablations(case: str, which: str, rules: str, name: str, layers: tuple[int, int | None]) -> None:
    """Partial LRP times the gradient is Transformer Attribution of one layer by itself."""
    known = originals("vit_chefer", "cases")
    pixels, index = torch.as_tensor(known[f"{case}/pixel_values"]), int(known[f"{case}/{which}/target"])
    method = Method("transformer-attribution", rules=rules, layers=layers)
    with Pure():
        e = explainer("vit").explain({"pixel_values": pixels}, method, target=index)
    assert (
        replica_comparison.gap(e.scores[1:], known[f"{case}/{which}/LRP_{rules}/{name}_ablation"].reshape(-1)) < WITHIN
    )


@cache
def averaging() -> clearhead.Explainer:
    """The same weights under a head that reads the mean of the patches, after the norm: transformerinterp's own."""
    parity.explainer.cache_clear()
    plain = parity.explainer("vit").adapter.model
    parity.explainer.cache_clear()

    class NormedMeanForImageClassification(type(plain)):  # type: ignore[misc]
        def forward(self, pixel_values: Tensor, **how: Any) -> Any:
            states = self.vit(pixel_values, **how).last_hidden_state
            return SimpleNamespace(logits=self.classifier(states[:, 1:].mean(1)))

    plain.__class__ = NormedMeanForImageClassification
    return clearhead.load(plain, readout="patches")


#: Transformer Attribution of one layer by itself is what authors call an ablation.
OF_THE_LAST = Method("transformer-attribution", repeated=True, layers=(-1, None))


@pytest.mark.parametrize(("case", "which"), CASES)
class TestAveragedPatches:
    """transformerinterp's MAE, where each patch gets all the relevance of their mean."""

    def theirs(self, file: str, case: str, which: str, name: str) -> np.ndarray:
        return originals("vit_beyond", file)[f"{case}/{which}/mae/LRP_ours/{name}"].reshape(-1)

    @pytest.mark.parametrize(("file", "within"), SOFTMAX)
    @pytest.mark.parametrize(
        ("method", "profile", "name"),
        [
            (Method("transformer-attribution", layers=(0, None)), "bi_vit_mae", "transformer_attribution_start0"),
            (Method("partial-lrp"), "bi_vit_mae", "last_layer"),
            (OF_THE_LAST, None, "last_layer_ablation"),
        ],
        ids=str,
    )
    def test_profiles(
        self, case: str, which: str, file: str, within: float, method: Method, profile: str | None, name: str
    ) -> None:
        theirs, (index,) = (self.theirs(file, case, which, one) for one in (name, "target"))
        inputs = {"pixel_values": torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])}

        def explain() -> clearhead.Explanation:
            return averaging().explain(inputs, method, target=int(index), profile=profile)

        if file == "cases_softmax32":
            assert replica_comparison.gap(explain().scores[1:], theirs) < within
        else:
            with Pure():
                assert replica_comparison.gap(explain().scores[1:], theirs) < within

    def test_relevance_of_every_map(self, case: str, which: str) -> None:
        """The replica is held to their product of all maps, which reads the class token."""
        index = int(self.theirs("cases", case, which, "target")[0])
        found = walked_mean(case, index)
        rows = np.eye(17)[0]
        for maps in reversed(found.maps):
            rows = rows + rows @ np.maximum(maps, 0).mean(0)
        assert replica_comparison.gap(rows[1:], self.theirs("cases", case, which, "rollout_start0")) < 1e-9


def walked_mean(case: str, index: int) -> relevance.Found:
    pixels = arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"][0].astype(float)
    return relevance.vit(averaging().adapter.model, pixels, index, "ours", averaged=True)


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("index", range(5))
def test_averaged_patches_as_the_replica_walks_them(case: str, index: int) -> None:
    inputs = {"pixel_values": torch.as_tensor(arrays("vit")[f"vit_chefer/cases/{case}/pixel_values"])}
    mean = np.append(0, np.full(16, 1 / 16))
    with Pure():
        both = averaging().explain(inputs, ["transformer-attribution", "partial-lrp"], index, profile="bi_vit_mae")
        tape = averaging().record(inputs, "attention_gradient", target=index)
    gradients = np.stack([call.attention_gradient[0] for call in tape.calls])
    found = walked_mean(case, index)
    identity_kept = attribution.scores(found, gradients, mean, [1, 2]) + mean
    assert replica_comparison.gap(both["transformer-attribution"].scores[1:], identity_kept[1:]) < WITHIN
    assert replica_comparison.gap(both["partial-lrp"].scores[1:], partial_lrp.scores(found, mean)[1:]) < WITHIN
    assert all(np.isnan(e.scores[0]) for e in both.values())


def test_both_cases_in_one_batch() -> None:
    """Where the authors' sums over the whole batch would mix them."""
    both = [bert_inputs("case0"), bert_inputs("case1")]
    for method, name in (
        (Method("lrp", rules="ours"), "generate_full_lrp_ours"),
        (Method("partial-lrp", rules="ours"), "generate_LRP_last_layer_ours"),
    ):
        together = explainer("bert").explain(both, method)
        for place, case in enumerate(("case0", "case1")):
            theirs = arrays("bert")[f"bert_chefer/cases/{case}/pred/{name}"][0]
            # theirs has a mask that takes its 1e-9 of the relevance
            assert replica_comparison.gap(without_class_token(together[place].scores), theirs) < 1e-6
