"""Scores equal the outputs of the authors' code on tiny models (`tests/data/parity/README.md`).

The authors set [CLS] to zero, remove it, or scale a map to 0…1; the same is applied here to our scores, which clearhead
returns raw. The other settings of the authors are in their profiles, which test_profiles, test_path_methods,
test_attention_gradcam and test_relevance_parity compare.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import clearhead
from clearhead.capture.tape import AttentionCall, Tape
from clearhead.methods import METHOD_REGISTRY, UnitContext
from tests.methods.replica_comparison import gap

DATA = Path(__file__).parents[1] / "data" / "parity"
ORIGINALS = Path(__file__).parents[3] / "shared" / "fixtures"
CASES = [(case, which) for case in ("case0", "case1") for which in ("pred", "alt")]
#: Tolerances: BERT computes in float64 throughout; the ViT computes its softmax in float32.
BERT, VIT = 1e-10, 1e-6


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "arrays.npz") as file:
        return {name: file[name] for name in file.files}


@cache
def explainer(model: str) -> clearhead.Explainer:
    folder = DATA / model
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["hf_class"])
    loaded = cls.from_pretrained(
        None,
        config=cls.config_class.from_pretrained(folder),
        state_dict=load_file(folder / "weights.safetensors"),
        dtype=torch.float64,
        attn_implementation="eager",
    )
    return clearhead.load(loaded.eval())


def bert_inputs(case: str) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask")
    return {name: torch.as_tensor(arrays("bert")[f"bert_recorded/cases/{case}/{name}"]) for name in names}


def bert(case: str, which: str, method: Any, **how: Any) -> clearhead.Explanation:
    """Explain the same class as the authors; the predicted class is not given, but must be the same."""
    index = int(arrays("bert")[f"bert_recorded/cases/{case}/{which}/target"])
    e = explainer("bert").explain(bert_inputs(case), method, target=None if which == "pred" else index, **how)
    assert e.target["index"] == index
    return e


def vit(case: str, which: str, method: Any, **how: Any) -> clearhead.Explanation:
    pixels = torch.as_tensor(arrays("vit")[f"vit_chefer/cases_softmax32/{case}/pixel_values"])
    index = int(arrays("vit")[f"vit_chefer/cases_softmax32/{case}/{which}/target"])
    target = None if which == "pred" else index
    e = explainer("vit").explain({"pixel_values": pixels}, method, target=target, **how)
    assert e.target["index"] == index
    return e


def theirs(model: str, folder: str, *path: str) -> np.ndarray:
    file = "cases_softmax32" if model == "vit" else "cases"
    return arrays(model)["/".join((folder, file, *path))]


def zero_class_token(scores: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], scores[1:]])


def scale_to_unit_range(values: np.ndarray) -> np.ndarray:
    return (values - values.min()) / (values.max() - values.min())


def test_copied_files_equal_original_fixtures() -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are available")
    for model, folder in (("bert", "bert_recorded"), ("vit", "vit_chefer")):
        for name in ("config.json", "weights.safetensors"):
            assert (DATA / model / name).read_bytes() == (ORIGINALS / folder / name).read_bytes()
        for key, copied in arrays(model).items():
            folder, file, inside = key.split("/", 2)
            np.testing.assert_array_equal(copied, np.load(ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


def test_copied_files_are_smaller_than_3_mb() -> None:
    assert sum(file.stat().st_size for file in DATA.rglob("*") if file.is_file()) < 3_000_000


@pytest.mark.parametrize(("case", "which"), CASES)
class TestRecordedTensors:
    """The tape of one pass equals the tensors that the reference recorded."""

    def test_tape_equals_recorded_tensors(self, case: str, which: str) -> None:
        index = int(theirs("bert", "bert_recorded", case, which, "target"))
        quantities = ("attention", "attention_gradient", "block_input", "block_input_gradient")
        tape = explainer("bert").record(bert_inputs(case), quantities, target=index)
        recorded = {
            "attention": theirs("bert", "bert_recorded", case, "attn"),
            "attention_gradient": theirs("bert", "bert_recorded", case, which, "attn_grad"),
            "block_input": theirs("bert", "bert_recorded", case, "hidden"),
            "block_input_gradient": theirs("bert", "bert_recorded", case, which, "hidden_grad"),
        }
        assert len(tape.calls) == 3
        for call in tape.calls:
            for quantity, expected in recorded.items():
                assert gap(getattr(call, quantity), expected[call.layer]) < BERT, (call.layer, quantity)
        assert gap(tape.logits, theirs("bert", "bert_recorded", case, "logits")) < BERT


@pytest.mark.parametrize(("case", "which"), CASES)
class TestMethodsOnRecordedTensors:
    """Methods run on the recorded tensors of the reference: without a model, a recorder or an explainer."""

    def scores(self, case: str, which: str, method: str, layers: range = range(3), **options: Any) -> np.ndarray:
        names = ("attn", f"{which}/attn_grad", "hidden", f"{which}/hidden_grad")
        tensors = [torch.as_tensor(theirs("bert", "bert_recorded", case, name)) for name in names]
        units = tensors[0].shape[-1]
        readout = torch.zeros(1, 1, units, dtype=torch.float64)
        readout[0, 0, 0] = 1
        valid_mask = torch.ones(1, units, dtype=torch.bool)
        unit_context = UnitContext(readout, valid_mask, (0,), layers=layers)
        attribution = METHOD_REGISTRY[method](unit_context=unit_context, **options)
        for call in reversed(list(self.calls(tensors))):
            if call.layer in layers:
                attribution.process_call(call)
        return attribution.compute_scores(Tape()).scores[0, 0].numpy()

    def calls(self, tensors: list[Tensor]) -> Iterator[AttentionCall]:
        attention, attention_gradient, hidden, hidden_gradient = tensors
        for layer in range(len(attention)):
            yield AttentionCall(
                layer,
                module=f"layer.{layer}",
                attention=attention[layer],
                attention_gradient=attention_gradient[layer],
                block_input=hidden[layer],
                block_input_gradient=hidden_gradient[layer],
            )

    def test_attention_equals_authors(self, case: str, which: str) -> None:
        ours = zero_class_token(self.scores(case, which, "attention", range(2, 3)))
        assert gap(ours, theirs("bert", "bert_chefer", case, which, "generate_attn_last_layer")[0]) < BERT

    @pytest.mark.parametrize("start", [0, 1])
    def test_rollout_equals_authors(self, case: str, which: str, start: int) -> None:
        ours = zero_class_token(self.scores(case, which, "rollout", range(start, 3)))
        assert gap(ours, theirs("bert", "bert_chefer", case, which, f"generate_rollout_start{start}")[0]) < BERT

    def test_generic_equals_authors(self, case: str, which: str) -> None:
        ours = zero_class_token(self.scores(case, which, "generic", range(2, 3)))
        assert gap(ours, theirs("bert", "bert_beyond", case, which, "generate_genattr")[0]) < BERT

    def test_grad_sam_equals_authors(self, case: str, which: str) -> None:
        for received, name in ((False, "gradsam"), (True, "gradsam_keys")):
            ours = self.scores(case, which, "grad-sam", received=received)
            assert gap(ours, theirs("bert", "gradsam", case, which, name)) < BERT

    def test_cat_and_attcat_equal_authors(self, case: str, which: str) -> None:
        for method in ("cat", "attcat"):
            assert gap(self.scores(case, which, method), theirs("bert", "attcat", case, which, method)) < BERT


@pytest.mark.parametrize(("case", "which"), CASES)
class TestBert:
    def test_bert_generic_equals_authors(self, case: str, which: str) -> None:
        """Beyond Intuition's BERT runs Generic Attention on the last layer alone."""
        ours = zero_class_token(bert(case, which, "generic", layers=(-1, None)).scores)
        assert gap(ours, theirs("bert", "bert_beyond", case, which, "generate_genattr")[0]) < BERT

    def test_bert_grad_sam_equals_authors(self, case: str, which: str) -> None:
        for received, name in ((False, "gradsam"), (True, "gradsam_keys")):
            ours = bert(case, which, clearhead.Method("grad-sam", received=received)).scores
            assert gap(ours, theirs("bert", "gradsam", case, which, name)) < BERT

    def test_bert_cat_equals_authors(self, case: str, which: str) -> None:
        e = bert(case, which, "cat")
        assert gap(e.scores, theirs("bert", "attcat", case, which, "cat")) < BERT
        # The authors' array has one more row: the output of the last layer, which is left out of the sum.
        assert gap(e.per_layer, theirs("bert", "attcat", case, which, "cat_per_layer")[:3]) < BERT

    def test_bert_attcat_equals_authors(self, case: str, which: str) -> None:
        e = bert(case, which, "attcat")
        assert gap(e.scores, theirs("bert", "attcat", case, which, "attcat")) < BERT
        features = theirs("bert", "attcat", case, which, "cat_per_layer")[:3]
        assert gap(e.per_layer, features * theirs("bert", "attcat", case, which, "attn_weight_per_layer")) < BERT

    def test_bert_attcat_with_masked_special_tokens_equals_authors(self, case: str, which: str) -> None:
        """As in the authors' notebooks; the mask changes the logits, so the class is given."""
        inputs = bert_inputs(case)
        hidden = inputs["attention_mask"].clone()
        hidden[:, [0, -1]] = 0
        index = int(theirs("bert", "bert_recorded", case, which, "target"))
        e = explainer("bert").explain({**inputs, "attention_mask": hidden}, "attcat", target=index)
        assert gap(e.scores, theirs("bert", "attcat", case, which, "attcat_specialmasked")) < BERT

    def test_bert_saliency_equals_captum(self, case: str, which: str) -> None:
        gradient = theirs("bert", "captum_shap", case, which, "saliency_signed")[0]
        size = theirs("bert", "captum_shap", case, which, "saliency")[0]  # captum takes absolute values
        assert gap(bert(case, which, "saliency").scores, np.sqrt((gradient**2).sum(-1))) < BERT
        assert gap(bert(case, which, clearhead.Method("saliency", reduce="abs")).scores, size.sum(-1)) < BERT

    def test_bert_input_x_gradient_equals_captum(self, case: str, which: str) -> None:
        products = theirs("bert", "captum_shap", case, which, "input_x_gradient")[0]
        assert gap(bert(case, which, "input-x-gradient").scores, products.sum(-1)) < BERT
        ours = bert(case, which, clearhead.Method("input-x-gradient", reduce="l2")).scores
        assert gap(ours, np.linalg.norm(products, axis=-1)) < BERT


def test_both_cases_in_one_padded_batch() -> None:
    """Inputs of six and nine tokens in one padded batch, all methods in one pass."""
    inputs = [bert_inputs("case0"), bert_inputs("case1")]
    generic_of_last_layer = clearhead.Method("generic", layers=(-1, None))
    results = explainer("bert").explain(inputs, ["attcat", "grad-sam", "rollout", generic_of_last_layer])
    for position, case in enumerate(("case0", "case1")):
        expected_scores = {
            "attcat": theirs("bert", "attcat", case, "pred", "attcat"),
            "grad-sam": theirs("bert", "gradsam", case, "pred", "gradsam"),
            "rollout": theirs("bert", "bert_chefer", case, "pred", "generate_rollout_start0")[0],
            str(generic_of_last_layer): theirs("bert", "bert_beyond", case, "pred", "generate_genattr")[0],
        }
        for method, expected in expected_scores.items():
            ours = results[method][position].scores
            ours = zero_class_token(ours) if expected[0] == 0 else ours
            assert gap(ours, expected) < BERT, (case, method)


@pytest.mark.parametrize(("case", "which"), CASES)
class TestViT:
    """The authors' scores leave out [CLS]: the scores of the patches are compared."""

    def test_vit_attention_equals_authors(self, case: str, which: str) -> None:
        ours = vit(case, which, "attention").scores[1:]
        assert gap(ours, theirs("vit", "vit_chefer", case, which, "LRP_ours", "last_layer_attn")) < VIT
        assert gap(scale_to_unit_range(ours).reshape(4, 4), theirs("vit", "vit_beyond", case, which, "attn_last")) < VIT

    @pytest.mark.parametrize("folder", ["vit_chefer", "vit_beyond"])
    @pytest.mark.parametrize("start", [0, 1])
    def test_vit_rollout_equals_authors(self, case: str, which: str, start: int, folder: str) -> None:
        ours = vit(case, which, "rollout", layers=(start, None)).scores[1:]
        assert gap(ours, theirs("vit", folder, case, which, f"rollout_start{start}")[0]) < VIT

    @pytest.mark.parametrize("start", [0, 1])
    def test_vit_rollout_read_at_the_patches_equals_authors(self, case: str, which: str, start: int) -> None:
        """The mean-pooled variant: the mean of the rows of the patches. Rollout does not depend on the read-out."""
        matrix = vit(case, which, "rollout", layers=(start, None), rows="all").matrix
        expected = theirs("vit", "vit_beyond", case, which, "mae", f"rollout_start{start}")[0]
        assert gap(matrix[1:, 1:].mean(0), expected) < VIT

    def test_vit_generic_equals_authors(self, case: str, which: str) -> None:
        ours = vit(case, which, "generic").scores[1:]
        assert gap(ours, theirs("vit", "vit_chefer", case, which, "mm_generate_relevance")) < VIT
        mean_before_clamp = theirs("vit", "vit_beyond", case, which, "genattr_start1")[0]
        assert gap(ours, mean_before_clamp) > 0.01, "another fusion of heads must give another explanation"
