"""Integrated gradients equal their reference implementation and captum; baselines; the certificate."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, replica_inputs
from tests.replicas import integrated_gradients as replica

CAPTUM = {"gauss-legendre": "gausslegendre"} | {
    f"riemann-{side}": f"riemann_{side}" for side in ("left", "middle", "right", "trapezoid")
}


def explain_inputs(subject: str, **options: Any) -> list[clearhead.Explanation]:
    method = Method("integrated-gradients", **options)
    return replica_comparison.explainer(subject).explain(models.inputs(subject), method, batch_size=3)


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "deberta/classify", "modernbert/mask"])
def test_text_scores_equal_reference_implementation(subject: str) -> None:
    for e, case in zip(
        explain_inputs(subject, steps=8, baseline="mean"), replica_inputs.make_cases(subject), strict=True
    ):
        expected = replica.scores(
            case.evaluator, replica_inputs.compute_mean_baseline(subject, case), **case.patch_layout, steps=8
        )
        assert replica_comparison.gap(e.scores, expected) < max(replica_inputs.get_tolerance(subject), 1e-9)


@pytest.mark.parametrize("subject", ["vit/image", "dinov2/image", "swin/image"])
def test_image_scores_equal_reference_implementation(subject: str) -> None:
    for e, case in zip(explain_inputs(subject, steps=6), replica_inputs.make_cases(subject), strict=True):
        expected = replica.scores(case.evaluator, np.zeros_like(case.evaluator.x), **case.patch_layout, steps=6)
        assert replica_comparison.gap(e.scores, expected) < 1e-5


@pytest.mark.parametrize("reduce", ["sum", "l2", "abs"])
@pytest.mark.parametrize("rule", CAPTUM)
def test_quadrature_rules_and_reductions_equal_reference(rule: str, reduce: str) -> None:
    case = replica_inputs.make_cases("bert/classify")[2]
    e = explain_inputs("bert/classify", steps=5, rule=rule, reduce=reduce, baseline="zero")[2]
    zero = np.zeros_like(case.evaluator.x)
    expected = replica.scores(case.evaluator, zero, **case.patch_layout, steps=5, rule=rule, reduce=reduce)
    assert replica_comparison.gap(e.scores, expected) < 1e-9


@pytest.mark.parametrize("rule", CAPTUM)
@pytest.mark.parametrize("subject", ["bert/classify", "vit/image"])
def test_equals_captum(subject: str, rule: str) -> None:
    """With the same rule and steps; captum's quadrature weights are float32, which limits the agreement."""
    from captum.attr import IntegratedGradients

    ex = replica_comparison.explainer(subject)
    for raw, case in zip(models.inputs(subject), replica_inputs.make_cases(subject), strict=True):
        e = ex.explain(raw, Method("integrated-gradients", rule=rule, baseline="zero"), profile="captum")
        label, mask = e.target["index"], case.evaluator.inputs

        def forward(x: torch.Tensor, mask: Any = mask) -> torch.Tensor:
            name = "pixel_values" if "attention_mask" not in mask else "inputs_embeds"
            rest = {key: part.expand(len(x), -1) for key, part in mask.items()}
            return ex.adapter.model(**{name: x}, **rest).logits

        x = torch.tensor(case.evaluator.x)
        attributions = IntegratedGradients(forward).attribute(
            x, torch.zeros_like(x), target=label, n_steps=50, method=CAPTUM[rule]
        )
        expected = replica.per_unit(attributions.detach().numpy(), **case.patch_layout, reduce="sum")
        assert replica_comparison.gap(e.scores, expected) < (5e-8 if subject == "bert/classify" else 1e-5)


def test_default_target_is_the_class_predicted_for_the_input() -> None:
    for subject in ("bert/classify", "vit/image"):
        ex = replica_comparison.explainer(subject)
        for raw in models.inputs(subject):
            default = ex.explain(raw, "integrated-gradients")
            explicit = ex.explain(raw, "integrated-gradients", target=default.target["index"])
            np.testing.assert_array_equal(default.scores, explicit.scores)


def test_scores_are_complete_and_the_certificate_measures_the_gap() -> None:
    few, many = (explain_inputs("bert/classify", steps=steps) for steps in (4, 200))
    for rough, fine in zip(few, many, strict=True):
        checks = fine.certificate["checks"]
        assert fine.base_value + fine.scores.sum() == pytest.approx(fine.target["value"], abs=1e-9)
        assert checks["completeness_gap"] < 1e-9 and checks["step_doubling_error"] < 1e-9
        rough_checks = rough.certificate["checks"]
        assert rough_checks["completeness_gap"] == pytest.approx(
            abs(rough.base_value + rough.scores.sum() - rough.target["value"]) / np.abs(rough.scores).max(), rel=1e-6
        )
        assert rough_checks["step_doubling_error"] > 1e-4
    # the number of steps cannot be halved
    assert set(explain_inputs("bert/classify", steps=1)[0].certificate["checks"]) == {"completeness_gap"}


def test_batched_path_points_equal_single_points(monkeypatch: pytest.MonkeyPatch) -> None:
    all_batched = explain_inputs("bert/classify", steps=9)
    monkeypatch.setattr("clearhead.engine.passes.path.MAX_PATH_ROWS", 1)
    for batched, single in zip(all_batched, explain_inputs("bert/classify", steps=9), strict=True):
        assert replica_comparison.gap(batched.scores, single.scores) < 1e-12


@pytest.mark.parametrize("name", ["pad", "mask", "mean", "zero"])
def test_text_baselines_have_the_expected_base_value(name: str) -> None:
    model, tokenizer = models.text_model("bert")
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.pad_token_id] = 0.2  # nonzero, as in trained models
    table = model.get_input_embeddings().weight.detach().numpy()
    ex, text = clearhead.load((model, tokenizer)), models.TEXTS[0]
    method = Method("integrated-gradients", baseline=name)
    e = ex.explain(text, method)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    vector = {
        "pad": table[tokenizer.pad_token_id],
        "mask": table[tokenizer.mask_token_id],
        "mean": table.mean(0),
        "zero": np.zeros(32),
    }[name]
    baseline = np.broadcast_to(vector, (1, len(e), 32)).copy()
    if name != "zero":  # special tokens at the start and the end are kept
        baseline[:, [0, -1]] = table[ids[0, [0, -1]]]
        assert not e.scores[[0, -1]].any()
    with torch.no_grad():
        value = model(inputs_embeds=torch.tensor(baseline)).logits[0, e.target["index"]]
    assert e.base_value == pytest.approx(float(value), abs=1e-10)
    if name == "pad":
        np.testing.assert_array_equal(ex.explain(text, "integrated-gradients").scores, e.scores)


@pytest.mark.parametrize("name", ["zero", "black", "mean", "blur"])
def test_image_baselines_have_the_expected_base_value(name: str) -> None:
    ex, raw = replica_comparison.explainer("vit/image"), models.inputs("vit/image")[0]
    e = ex.explain(raw, Method("integrated-gradients", baseline=name, steps=2))
    x = torch.tensor(replica_inputs.make_cases("vit/image")[0].evaluator.x)
    baseline = {
        "zero": torch.zeros_like(x),
        "black": replica_comparison.model_inputs("vit/image", np.zeros_like(raw))["pixel_values"],
        "mean": x.mean((2, 3), keepdim=True).expand_as(x),
        "blur": _blur(x),
    }[name]
    with torch.no_grad():
        value = ex.adapter.model(pixel_values=baseline).logits[0, e.target["index"]]
    assert e.base_value == pytest.approx(float(value), abs=1e-5)


def _blur(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    kernel = torch.tensor([[np.exp(-((i - j) ** 2) / (2 * (size / 8) ** 2)) for j in range(size)] for i in range(size)])
    kernel = kernel / kernel.sum(1, keepdim=True)
    return torch.einsum("ij,bcjk,lk->bcil", kernel, x, kernel)


def test_unknown_baselines_and_zero_steps_are_rejected() -> None:
    text, image = (replica_comparison.explainer(subject) for subject in ("bert/classify", "vit/image"))
    with pytest.raises(clearhead.InputError, match=r"baseline='black' is not recognised: .*pad, mask, mean, zero"):
        text.explain(models.TEXTS[0], Method("integrated-gradients", baseline="black"))
    with pytest.raises(clearhead.InputError, match=r"baseline='pad' is not recognised: .*zero, black, mean, blur"):
        image.explain(models.inputs("vit/image")[0], Method("integrated-gradients", baseline="pad"))
    without_processor = clearhead.load(image.adapter.model)
    with pytest.raises(clearhead.InputError, match="without the image processor"):
        without_processor.explain(
            without_processor.adapter.make_example_input(), Method("integrated-gradients", baseline="black")
        )
    with pytest.raises(clearhead.InputError, match="steps=0 is not valid"):
        text.explain(models.TEXTS[0], Method("integrated-gradients", steps=0))


def test_zero_baseline_is_rejected_with_rms_norm() -> None:
    """RMSNorm discards the length of a vector, so the path from zero does not converge; the default baseline does."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_labels=3,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    ex = clearhead.load(transformers.LlamaForSequenceClassification(config).double().eval())
    inputs = {"input_ids": torch.tensor([[5, 9, 30, 12]])}
    with pytest.raises(clearhead.UnsupportedError, match=r"LlamaRMSNorm.*discards the length.*baseline='zero'.*'mean'"):
        ex.explain(inputs, Method("integrated-gradients", baseline="zero"))
    e = ex.explain(inputs, Method("integrated-gradients", steps=200))
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], abs=1e-3)


def test_zero_baseline_is_rejected_if_a_norm_reads_embeddings_without_positions() -> None:
    """Rotary positions are not added to embeddings: ModernBERT's LayerNorm gets a multiple of the token embedding."""
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_labels=3,
        pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ex = clearhead.load(transformers.ModernBertForSequenceClassification(config).eval())
    for name in ("integrated-gradients", "deeplift"):
        with pytest.raises(
            clearhead.UnsupportedError, match=r"LayerNorm.*embeddings without positions.*baseline='zero'"
        ):
            ex.explain({"input_ids": torch.tensor([[1, 9, 30, 2]])}, Method(name, baseline="zero"))
    assert explain_inputs("bert/classify", steps=1, baseline="zero")


def test_multiple_targets_equal_single_targets() -> None:
    """The start and the end of an answer span: each row of the matrix equals the scores of one target."""
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=2,
        initializer_range=0.3,
    )  # fmt: skip
    ex = clearhead.load(transformers.BertForQuestionAnswering(config).double().eval())
    raws = [{"input_ids": torch.tensor([ids])} for ids in ([5, 9, 30], [7, 8, 11, 6, 3])]
    methods = ["integrated-gradients", "gradient-shap", "beyond-intuition-head", "tam"]
    results = ex.explain(raws, methods, target=clearhead.AnswerSpan())
    for method in methods:
        for raw, e in zip(raws, results[method], strict=True):
            for position, row in zip(("start", "end"), e.matrix, strict=True):
                single = ex.explain(raw, method, target=clearhead.AnswerSpan(position))
                assert replica_comparison.gap(row, single.scores) < 1e-9, method
