"""Path methods equal the authors' outputs (`tests/data/parity/paths.npz`), share passes, and restore the model."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import Method
from clearhead.capture.recorder import Recorder
from clearhead.methods._path import compute_quadrature
from tests import models
from tests.adapters import test_dual_encoder as clips
from tests.methods import replica_comparison
from tests.methods import test_parity as parity

CASES = pytest.mark.parametrize(("case", "which"), parity.CASES)


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(parity.DATA / "paths.npz") as file:
        return {name: file[name] for name in file.files}


def theirs(*path: str) -> np.ndarray:
    folders = {
        "bert": "bert_beyond/cases",
        "vit": "vit_beyond/cases_softmax32",
        "mm": "vit_chefer/cases_softmax32",
        "clip": "clip/cases_softmax32",
        "captum": "captum_shap/cases",
    }
    return arrays()["/".join((folders[path[0]], *path[1:]))]


def test_copied_files_equal_original_fixtures() -> None:
    if not parity.ORIGINALS.is_dir():
        pytest.skip(f"{parity.ORIGINALS} is absent: only the copies are available")
    for key, copied in arrays().items():
        folder, file, inside = key.split("/", 2)
        np.testing.assert_array_equal(copied, np.load(parity.ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


@CASES
class TestAuthors:
    @pytest.mark.parametrize("steps", [20, 5])
    def test_bert_beyond_intuition_equals_authors(self, case: str, which: str, steps: int) -> None:
        for profile, method, name in (
            ("bi_bert_h", "beyond-intuition-head", "generate_ours"),
            ("bi_bert_c", "beyond-intuition-token", "generate_ours_c"),
        ):
            e = parity.bert(case, which, Method(method, steps=steps), profile=profile)
            assert (
                replica_comparison.gap(e.scores, theirs("bert", case, which, f"{name}_steps{steps}")[0]) < parity.BERT
            )

    def test_bert_generic_equals_authors(self, case: str, which: str) -> None:
        e = parity.bert(case, which, "generic", profile="bi_bert_h")
        assert replica_comparison.gap(e.scores, theirs("bert", case, which, "generate_genattr")[0]) < parity.BERT

    @pytest.mark.parametrize("start", [1, 2])
    def test_vit_beyond_intuition_equals_authors(self, case: str, which: str, start: int) -> None:
        layers = (start - 1, None)
        for profile, method, name in (
            ("bi_vit_h", "beyond-intuition-head", f"ours_start{start}_steps20"),
            ("bi_vit_c", "beyond-intuition-token", f"ours_c_start{start}_steps20"),
            ("bi_ga", "generic", f"genattr_start{start}"),
        ):
            e = parity.vit(case, which, method, profile=profile, layers=layers)
            assert np.isnan(e.scores[0])
            assert replica_comparison.gap(e.scores[1:], theirs("vit", case, which, name)[0]) < parity.VIT, name

    def test_vit_dino_profile_and_perception_equal_authors(self, case: str, which: str) -> None:
        for name, method in (("ours", "beyond-intuition-head"), ("ours_c", "beyond-intuition-token")):
            e = parity.vit(case, which, method, profile="bi_vit_dino", layers=(0, None))
            assert (
                replica_comparison.gap(e.scores[1:], theirs("vit", case, which, f"{name}_dino_start1_steps20")[0])
                < parity.VIT
            )
            e = parity.vit(case, which, Method(method, feedback="none"), layers=(0, None))
            assert (
                replica_comparison.gap(e.scores[1:], theirs("vit", case, which, f"{name}_ssl_start1")[0]) < parity.VIT
            )

    @pytest.mark.parametrize("start", [1, 2])
    def test_mean_pooled_vit_equals_authors(self, case: str, which: str, start: int) -> None:
        """Every row is multiplied by its own feedback before rows are averaged."""
        pixels = torch.as_tensor(parity.arrays("vit")[f"vit_chefer/cases_softmax32/{case}/pixel_values"])
        index = int(theirs("vit", case, which, "mae", "target"))
        for name, method in (
            (f"ours_start{start}_steps20", "beyond-intuition-head"),
            (f"ours_c_start{start}_steps20", "beyond-intuition-token"),
            (f"genattr_start{start}", "generic"),
        ):
            e = load_mean_pooled_vit().explain(
                {"pixel_values": pixels},
                method,
                target=None if which == "pred" else index,
                profile="bi_vit_mae",
                layers=(start - 1, None),
            )
            assert e.target["index"] == index
            assert replica_comparison.gap(e.scores[1:], theirs("vit", case, which, "mae", name)[0]) < parity.VIT, name

    def test_mean_pooled_vit_perception_equals_authors(self, case: str, which: str) -> None:
        if not parity.ORIGINALS.is_dir():
            pytest.skip(f"{parity.ORIGINALS} is absent: these arrays are not copied")
        expected = np.load(parity.ORIGINALS / "vit_beyond" / "cases_softmax32.npz")
        pixels = {"pixel_values": torch.as_tensor(expected[f"{case}/pixel_values"])}
        for name, method in (("ours", "beyond-intuition-head"), ("ours_c", "beyond-intuition-token")):
            target = int(expected[f"{case}/{which}/mae/target"])
            e = load_mean_pooled_vit().explain(pixels, Method(method, feedback="none"), target=target, layers=(0, None))
            assert (
                replica_comparison.gap(e.scores[1:], expected[f"{case}/{which}/mae/{name}_ssl_start1"][0]) < parity.VIT
            )

    def test_vit_generic_equals_authors(self, case: str, which: str) -> None:
        e = parity.vit(case, which, "generic", profile="mm_vit")
        assert np.isnan(e.scores[0])
        assert replica_comparison.gap(e.scores[1:], theirs("mm", case, which, "mm_generate_relevance")) < parity.VIT

    def test_integrated_gradients_equal_captum(self, case: str, which: str) -> None:
        for name, options in (
            ("integrated_gradients", {"baseline": "pad"}),
            ("integrated_gradients_trapezoid", {"baseline": "pad", "rule": "riemann-trapezoid"}),
            ("integrated_gradients_zero_baseline", {"baseline": "zero"}),
        ):
            ex = load_bert_with_special_tokens()
            index = int(parity.theirs("bert", "bert_recorded", case, which, "target"))
            method = Method("integrated-gradients", **options)
            e = ex.explain(parity.bert_inputs(case), method, target=index, profile="captum")
            # captum rounds its quadrature weights to float32
            assert replica_comparison.gap(e.scores, theirs("captum", case, which, name)[0].sum(-1)) < 1e-6, name


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize(("last", "layers"), [(-1, (0, None)), (1, (2, None))])
def test_clip_scores_equal_authors(case: str, last: int, layers: tuple[int, None]) -> None:
    """One image with each text; the authors' scores are those of the image tower."""
    for profile, method, name in (
        ("bi_clip_h", "beyond-intuition-head", f"generate_ours_numlayers{last}_index{{}}"),
        ("bi_clip_c", "beyond-intuition-token", f"generate_ours_c_numlayers{last}"),
        ("bi_clip_c", "generic", f"generate_generic_attribution_numlayers{last}"),
    ):
        results = clips.listed(clips.published().explain(clips.pairs(case), method, profile=profile, layers=layers))
        for i, e in enumerate(results):
            expected = theirs("clip", case, "beyond", name.format(i))
            expected = expected[0] if len(expected) == 1 else expected[i]
            assert replica_comparison.gap(e["image"].scores[1:], expected) < parity.VIT, name
            assert np.isnan(e["image"].scores[0]) and np.nansum(e["text"].scores) == pytest.approx(1)


@cache
def load_bert_with_special_tokens() -> clearhead.Explainer:
    """Load the BERT of the fixtures with special token ids, which baselines keep."""
    parity.explainer.cache_clear()
    ex = parity.explainer("bert")
    parity.explainer.cache_clear()
    ex.adapter.tokenizer_wrapper.special_ids |= {2, 3}
    return ex


@cache
def load_mean_pooled_vit() -> clearhead.Explainer:
    """Load the ViT of the fixtures with a head that reads the mean of the patches, before the norm."""
    parity.explainer.cache_clear()
    model = parity.explainer("vit").adapter.model
    parity.explainer.cache_clear()

    class MeanPooledForImageClassification(type(model)):  # type: ignore[misc]
        def forward(self, pixel_values: Tensor, **options: Any) -> Any:
            states = self.vit(pixel_values, **options).last_hidden_state
            return SimpleNamespace(logits=self.classifier(self.norm(states[:, 1:].mean(1))))

    model.norm, model.vit.layernorm = model.vit.layernorm, nn.Identity()
    model.__class__ = MeanPooledForImageClassification
    return clearhead.load(model, readout="patches")


def test_padding_changes_scores_only_with_the_authors_profile() -> None:
    """The authors' head weights include padding in the map; without their profile padding is ignored."""
    inputs = parity.bert_inputs("case0")
    padded = {
        "input_ids": nn.functional.pad(inputs["input_ids"], (0, 3)),
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (0, 3)),
    }
    ex, method = parity.explainer("bert"), "beyond-intuition-head"
    with_padding = ex.explain(padded, method, profile="bi_bert_h", layers=(0, None))
    without_padding = ex.explain(inputs, method, profile="bi_bert_h", layers=(0, None))
    assert len(with_padding) == len(without_padding) + 3 and not with_padding.scores[-3:].any()
    assert replica_comparison.gap(with_padding.scores[:-3], without_padding.scores) > 1e-6
    padded_scores, unpadded_scores = (
        ex.explain(model_inputs, method, layers=(0, None)) for model_inputs in (padded, inputs)
    )
    np.testing.assert_allclose(padded_scores.scores, unpadded_scores.scores, rtol=1e-12)


def test_quadrature_rules_integrate_polynomials() -> None:
    for rule, degree in (("gauss-legendre", 9), ("riemann-middle", 1), ("riemann-trapezoid", 1)):
        points = compute_quadrature(rule, 5)
        assert sum(weight for _, weight in points) == pytest.approx(1)
        assert sum(weight * point**degree for point, weight in points) == pytest.approx(1 / (degree + 1))
    for rule in ("riemann-left", "riemann-right"):
        assert sum(weight * point for point, weight in compute_quadrature(rule, 1000)) == pytest.approx(0.5, abs=1e-3)


def test_methods_share_path_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Path points are evaluated once: three methods with the same feedback need as many passes as one."""
    ex, path_passes = models.explainer("bert/classify"), []
    run = Recorder.run

    def count_runs(self: Recorder, *args: Any, **options: Any) -> Any:
        path_passes.append(options.get("vectors") is not None)
        return run(self, *args, **options)

    monkeypatch.setattr(Recorder, "run", count_runs)
    monkeypatch.setattr("clearhead.engine.passes.path.MAX_PATH_ROWS", 1)
    raw = models.TEXTS[0]
    results = ex.explain(raw, ["tam", "beyond-intuition-head", "beyond-intuition-token"])
    assert sum(path_passes) == 20
    for method, e in results.items():
        np.testing.assert_array_equal(e.scores, ex.explain(raw, method).scores)


def test_callable_target_runs_one_point_per_pass() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    sizes = []

    def select_second_logit(output: Any) -> Tensor:
        sizes.append(len(output.logits))
        return output.logits[:, 1]

    from_callable, from_label = (
        ex.explain(text, "integrated-gradients", target=target).scores for target in (select_second_logit, 1)
    )
    assert set(sizes) == {1}
    assert replica_comparison.gap(from_callable, from_label) < 1e-12


def test_model_weights_and_hooks_are_unchanged() -> None:
    model, tokenizer = models.text_model("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    methods = ["integrated-gradients", "gradient-shap", "smoothgrad", "tam", "beyond-intuition-token"]
    clearhead.load((model, tokenizer)).explain(models.TEXTS[0], methods)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
