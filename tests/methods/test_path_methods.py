"""Paths: the passes they share, the authors' numbers along them (`tests/data/parity/paths.npz`), what they leave."""

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


def test_copies_are_the_originals() -> None:
    if not parity.ORIGINALS.is_dir():
        pytest.skip(f"{parity.ORIGINALS} is absent: only the copies are here")
    for key, copied in arrays().items():
        folder, file, inside = key.split("/", 2)
        np.testing.assert_array_equal(copied, np.load(parity.ORIGINALS / folder / f"{file}.npz")[inside], err_msg=key)


@CASES
class TestAuthors:
    @pytest.mark.parametrize("steps", [20, 5])
    def test_beyond_intuition_on_bert(self, case: str, which: str, steps: int) -> None:
        for profile, method, name in (
            ("bi_bert_h", "beyond-intuition-head", "generate_ours"),
            ("bi_bert_c", "beyond-intuition-token", "generate_ours_c"),
        ):
            e = parity.bert(case, which, Method(method, steps=steps), profile=profile)
            assert (
                replica_comparison.gap(e.scores, theirs("bert", case, which, f"{name}_steps{steps}")[0]) < parity.BERT
            )

    def test_generic_on_bert(self, case: str, which: str) -> None:
        e = parity.bert(case, which, "generic", profile="bi_bert_h")
        assert replica_comparison.gap(e.scores, theirs("bert", case, which, "generate_genattr")[0]) < parity.BERT

    @pytest.mark.parametrize("start", [1, 2])
    def test_beyond_intuition_on_a_vit(self, case: str, which: str, start: int) -> None:
        layers = (start - 1, None)
        for profile, method, name in (
            ("bi_vit_h", "beyond-intuition-head", f"ours_start{start}_steps20"),
            ("bi_vit_c", "beyond-intuition-token", f"ours_c_start{start}_steps20"),
            ("bi_ga", "generic", f"genattr_start{start}"),
        ):
            e = parity.vit(case, which, method, profile=profile, layers=layers)
            assert np.isnan(e.scores[0])
            assert replica_comparison.gap(e.scores[1:], theirs("vit", case, which, name)[0]) < parity.VIT, name

    def test_the_other_forms_on_a_vit(self, case: str, which: str) -> None:
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
    def test_a_vit_that_averages_its_patches(self, case: str, which: str, start: int) -> None:
        """Every row is multiplied with its own feedback before rows are averaged."""
        pixels = torch.as_tensor(parity.arrays("vit")[f"vit_chefer/cases_softmax32/{case}/pixel_values"])
        index = int(theirs("vit", case, which, "mae", "target"))
        for name, method in (
            (f"ours_start{start}_steps20", "beyond-intuition-head"),
            (f"ours_c_start{start}_steps20", "beyond-intuition-token"),
            (f"genattr_start{start}", "generic"),
        ):
            e = averaging().explain(
                {"pixel_values": pixels},
                method,
                target=None if which == "pred" else index,
                profile="bi_vit_mae",
                layers=(start - 1, None),
            )
            assert e.target["index"] == index
            assert replica_comparison.gap(e.scores[1:], theirs("vit", case, which, "mae", name)[0]) < parity.VIT, name

    def test_perception_alone_of_averaged_patches(self, case: str, which: str) -> None:
        if not parity.ORIGINALS.is_dir():
            pytest.skip(f"{parity.ORIGINALS} is absent: these figures are there alone")
        known = np.load(parity.ORIGINALS / "vit_beyond" / "cases_softmax32.npz")
        pixels = {"pixel_values": torch.as_tensor(known[f"{case}/pixel_values"])}
        for name, method in (("ours", "beyond-intuition-head"), ("ours_c", "beyond-intuition-token")):
            target = int(known[f"{case}/{which}/mae/target"])
            e = averaging().explain(pixels, Method(method, feedback="none"), target=target, layers=(0, None))
            assert replica_comparison.gap(e.scores[1:], known[f"{case}/{which}/mae/{name}_ssl_start1"][0]) < parity.VIT

    def test_generic_on_a_vit(self, case: str, which: str) -> None:
        e = parity.vit(case, which, "generic", profile="mm_vit")
        assert np.isnan(e.scores[0])
        assert replica_comparison.gap(e.scores[1:], theirs("mm", case, which, "mm_generate_relevance")) < parity.VIT

    def test_integrated_gradients_of_captum(self, case: str, which: str) -> None:
        for name, options in (
            ("integrated_gradients", {"baseline": "pad"}),
            ("integrated_gradients_trapezoid", {"baseline": "pad", "rule": "riemann-trapezoid"}),
            ("integrated_gradients_zero_baseline", {"baseline": "zero"}),
        ):
            ex = framed()
            index = int(parity.theirs("bert", "bert_recorded", case, which, "target"))
            method = Method("integrated-gradients", **options)
            e = ex.explain(parity.bert_inputs(case), method, target=index, profile="captum")
            # captum rounds its weights to float32
            assert replica_comparison.gap(e.scores, theirs("captum", case, which, name)[0].sum(-1)) < 1e-6, name


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize(("last", "layers"), [(-1, (0, None)), (1, (2, None))])
def test_authors_on_clip(case: str, last: int, layers: tuple[int, None]) -> None:
    """The picture beside each text; theirs are those of the picture's tower."""
    for profile, method, name in (
        ("bi_clip_h", "beyond-intuition-head", f"generate_ours_numlayers{last}_index{{}}"),
        ("bi_clip_c", "beyond-intuition-token", f"generate_ours_c_numlayers{last}"),
        ("bi_clip_c", "generic", f"generate_generic_attribution_numlayers{last}"),
    ):
        found = clips.listed(clips.published().explain(clips.pairs(case), method, profile=profile, layers=layers))
        for i, e in enumerate(found):
            expected = theirs("clip", case, "beyond", name.format(i))
            expected = expected[0] if len(expected) == 1 else expected[i]
            assert replica_comparison.gap(e["image"].scores[1:], expected) < parity.VIT, name
            assert np.isnan(e["image"].scores[0]) and np.nansum(e["text"].scores) == pytest.approx(1)


@cache
def framed() -> clearhead.Explainer:
    """The BERT of the fixtures, told which tokens frame a text: these stay in a baseline."""
    parity.explainer.cache_clear()
    ex = parity.explainer("bert")
    parity.explainer.cache_clear()
    ex.adapter.tokenizer_wrapper.special_ids |= {2, 3}
    return ex


@cache
def averaging() -> clearhead.Explainer:
    """The same weights under a head that reads the mean of the patches, before the norm."""
    parity.explainer.cache_clear()
    plain = parity.explainer("vit").adapter.model
    parity.explainer.cache_clear()

    class MeanPooledForImageClassification(type(plain)):  # type: ignore[misc]
        def forward(self, pixel_values: Tensor, **how: Any) -> Any:
            states = self.vit(pixel_values, **how).last_hidden_state
            return SimpleNamespace(logits=self.classifier(self.norm(states[:, 1:].mean(1))))

    plain.norm, plain.vit.layernorm = plain.vit.layernorm, nn.Identity()
    plain.__class__ = MeanPooledForImageClassification
    return clearhead.load(plain, readout="patches")


def test_padding_is_part_of_the_authors_maps() -> None:
    """Their head weights are taken over the whole map, padding included; ours are not."""
    inputs = parity.bert_inputs("case0")
    padded = {
        "input_ids": nn.functional.pad(inputs["input_ids"], (0, 3)),
        "attention_mask": nn.functional.pad(inputs["attention_mask"], (0, 3)),
    }
    ex, method = parity.explainer("bert"), "beyond-intuition-head"
    with_it = ex.explain(padded, method, profile="bi_bert_h", layers=(0, None))
    without = ex.explain(inputs, method, profile="bi_bert_h", layers=(0, None))
    assert len(with_it) == len(without) + 3 and not with_it.scores[-3:].any()
    assert replica_comparison.gap(with_it.scores[:-3], without.scores) > 1e-6
    plain, cut = (ex.explain(given, method, layers=(0, None)) for given in (padded, inputs))
    np.testing.assert_allclose(plain.scores, cut.scores, rtol=1e-12)


def test_quadrature_integrates() -> None:
    for rule, degree in (("gauss-legendre", 9), ("riemann-middle", 1), ("riemann-trapezoid", 1)):
        points = compute_quadrature(rule, 5)
        assert sum(weight for _, weight in points) == pytest.approx(1)
        assert sum(weight * place**degree for place, weight in points) == pytest.approx(1 / (degree + 1))
    for rule in ("riemann-left", "riemann-right"):
        assert sum(weight * place for place, weight in compute_quadrature(rule, 1000)) == pytest.approx(0.5, abs=1e-3)


def test_points_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that want the same points run once: three with one feedback cost as many passes as one."""
    ex, counted = models.explainer("bert/classify"), []
    run = Recorder.run

    def counting(self: Recorder, *args: Any, **how: Any) -> Any:
        counted.append(how.get("vectors") is not None)
        return run(self, *args, **how)

    monkeypatch.setattr(Recorder, "run", counting)
    monkeypatch.setattr("clearhead.engine.passes.path.MAX_PATH_ROWS", 1)
    raw = models.TEXTS[0]
    together = ex.explain(raw, ["tam", "beyond-intuition-head", "beyond-intuition-token"])
    assert sum(counted) == 20
    for method, e in together.items():
        np.testing.assert_array_equal(e.scores, ex.explain(raw, method).scores)


def test_a_target_of_ones_own_runs_point_by_point() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    sizes = []

    def second(output: Any) -> Tensor:
        sizes.append(len(output.logits))
        return output.logits[:, 1]

    own, label = (ex.explain(text, "integrated-gradients", target=target).scores for target in (second, 1))
    assert set(sizes) == {1}
    assert replica_comparison.gap(own, label) < 1e-12


def test_nothing_of_the_model_is_changed() -> None:
    model, tokenizer = models.text_model("bert")
    before = {name: part.clone() for name, part in model.state_dict().items()}
    methods = ["integrated-gradients", "gradient-shap", "smoothgrad", "tam", "beyond-intuition-token"]
    clearhead.load((model, tokenizer)).explain(models.TEXTS[0], methods)
    assert all(torch.equal(part, before[name]) for name, part in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
