"""Target values, compared with hand-computed values."""

from typing import Any

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Contrast, InputError, Label, MaskedToken, Predicted
from clearhead.targets import compute_probabilities, make_target
from tests.models import TEXTS, explainer, text_model


class Classes:
    """Labels without a model."""

    def __init__(self, multi_label: bool = False, masked: bool = False) -> None:
        self.multi_label = multi_label
        self.masked = masked

    def label_index(self, label: str | int) -> int:
        return int(label)

    def label_name(self, index: int) -> str:
        return f"class {index}"


SCORES = torch.tensor([1.0, 3.0, -0.5, 0.25], dtype=torch.float64)
P = (SCORES.exp() / SCORES.exp().sum()).tolist()
S = (1 / (1 + (-SCORES).exp())).tolist()


@pytest.mark.parametrize(
    ("target", "scale", "multi", "expected"),
    [
        (None, "logit", False, 3.0),
        (2, "logit", False, -0.5),
        ("0", "logit", False, 1.0),
        (Contrast(0, 2), "logit", False, 1.5),
        (Contrast(None, 0), "logit", False, 2.0),
        (None, "probability", False, P[1]),
        (Label(3), "probability", False, P[3]),
        (Contrast(0, 3), "probability", False, P[0] - P[3]),
        (None, "log-odds", False, np.log(P[1] / (1 - P[1]))),
        (0, "log-odds", False, np.log(P[0] / (1 - P[0]))),
        (Contrast(0, 1), "log-odds", False, np.log(P[0] / P[1])),
        (Contrast(None, 2), "log-odds", False, np.log(P[1] / P[2])),
        (2, "probability", True, S[2]),
        (2, "log-odds", True, -0.5),
        (Contrast(0, 2), "probability", True, S[0] - S[2]),
        (Contrast(0, 2), "log-odds", True, np.log(S[0] * (1 - S[2]) / (S[2] * (1 - S[0])))),
        (MaskedToken(2), "probability", False, P[2]),
        (MaskedToken(), "logit", False, 3.0),
    ],
)
def test_target_values_equal_formulas(target: Any, scale: str, multi: bool, expected: float) -> None:
    value = make_target(target, scale).compute_value(SCORES, Classes(multi))
    assert float(value) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("p", "a", "b", "expected"),
    [
        ([0.75, 0.25], 0, 1, 1.0986122886681098),  # ln 3
        ([0.75, 0.25], 1, 0, -1.0986122886681098),
        ([0.5, 0.3, 0.2], 0, 1, 0.5108256237659907),  # ln 5/3
        ([0.5, 0.3, 0.2], 0, 2, 0.9162907318741551),  # ln 5/2
        ([0.5, 0.3, 0.2], 2, 1, -0.4054651081081644),  # ln 2/3
    ],
)
def test_log_odds_of_a_contrast_is_the_log_ratio_of_probabilities(
    p: list[float], a: int, b: int, expected: float
) -> None:
    scores = torch.tensor(p, dtype=torch.float64).log() + 7  # logits are defined up to a constant
    assert float(make_target(Contrast(a, b), "log-odds").compute_value(scores, Classes())) == pytest.approx(
        expected, abs=1e-12
    )


def test_log_odds_of_two_classes_equal_the_contrast() -> None:
    """With two classes, the log-odds of one class against the other are the log-odds of that class."""
    ex = explainer("bert/classify", num_labels=2)
    contrast, label = (
        ex.explain(TEXTS[0], "input-x-gradient", target=target, scale="log-odds") for target in (Contrast(1, 0), 1)
    )
    p = {line["index"]: line["probability"] for line in contrast.prediction["top"]}
    assert contrast.target["value"] == pytest.approx(np.log(p[1] / p[0]), abs=1e-12)
    assert label.target["value"] == pytest.approx(contrast.target["value"], abs=1e-12)
    assert contrast.scores == pytest.approx(label.scores, abs=1e-12) and np.abs(label.scores).max() > 1e-3


def test_log_odds_batch_of_labels_and_contrasts_equals_single() -> None:
    ex = explainer("bert/classify")
    targets = [0, Contrast(2, 1), None]
    for e, text, target in zip(
        ex.explain(TEXTS, target=targets, scale="log-odds", method="generic"), TEXTS, targets, strict=True
    ):
        alone = ex.explain(text, target=target, scale="log-odds", method="generic")
        assert e.target["value"] == pytest.approx(alone.target["value"], abs=1e-12)
        p = {line["index"]: line["probability"] for line in e.prediction["top"]}
        index = e.target["index"]
        odds = p[2] / p[1] if isinstance(target, Contrast) else p[index] / (1 - p[index])
        assert e.target["value"] == pytest.approx(np.log(odds), abs=1e-12)


def test_log_odds_of_one_sigmoid_equal_the_logit_of_its_probability() -> None:
    ex = explainer("bert/classify", num_labels=1, problem_type="multi_label_classification")
    e = ex.explain(TEXTS[0], scale="log-odds", method="generic")
    p = e.prediction["probability"]
    assert e.target["value"] == pytest.approx(np.log(p / (1 - p)), abs=1e-12)
    with pytest.raises(InputError, match="label 1 does not exist: the model has 1 labels"):
        ex.explain(TEXTS[0], target=Contrast(0, 1), scale="log-odds", method="generic")


def test_log_odds_of_a_contrast_do_not_overflow() -> None:
    scores = torch.tensor([900.0, -900.0, 0.0], dtype=torch.float64, requires_grad=True)
    value = make_target(Contrast(0, 1), "log-odds").compute_value(scores, Classes())
    (gradient,) = torch.autograd.grad(value, scores)
    assert float(value.detach()) == 1800.0 and gradient.tolist() == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("scale", ["logit", "probability", "log-odds"])
@pytest.mark.parametrize("target", [None, 2, Contrast(0, 3)])
@pytest.mark.parametrize("multi", [False, True])
def test_target_gradients_equal_finite_differences(target: Any, scale: str, multi: bool) -> None:
    resolved_target, labels = make_target(target, scale), Classes(multi)
    assert torch.autograd.gradcheck(
        lambda scores: resolved_target.compute_value(scores, labels), SCORES.clone().requires_grad_()
    )


def test_log_odds_do_not_overflow() -> None:
    scores = torch.tensor([200.0, 0.0], dtype=torch.float64)
    assert float(make_target(0, "log-odds").compute_value(scores, Classes())) == pytest.approx(200.0)
    assert compute_probabilities(scores, False).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("scale", ["logit", "probability", "log-odds"])
def test_input_gradients_equal_finite_differences(scale: str) -> None:
    model, _ = text_model("bert")
    embeds = torch.randn(1, 4, 32, dtype=torch.float64)
    step = torch.randn_like(embeds)
    ex = clearhead.load(model)
    tape = ex.record({"inputs_embeds": embeds}, ("inputs", "input_gradient"), Contrast(0, 2), scale=scale)
    assert tape.input_gradient is not None
    gradient = tape.input_gradient["text"]

    def value(at: torch.Tensor) -> float:
        tape = ex.record({"inputs_embeds": at}, ("inputs",), Contrast(0, 2), scale=scale)
        assert tape.value is not None
        return float(tape.value)

    slope = (value(embeds + 1e-5 * step) - value(embeds - 1e-5 * step)) / 2e-5
    assert slope == pytest.approx(float((gradient * step).sum()), rel=1e-6)


def test_labels_are_selected_by_name_index_or_digits() -> None:
    ex = explainer("bert/classify", id2label={0: "bad", 1: "Good", 2: "good"})
    by_name = [
        ex.explain(TEXTS[0], target=name, method="generic").target["index"] for name in ("BAD", "Good", "good", "2", 0)
    ]
    assert by_name == [0, 1, 2, 2, 0]
    with pytest.raises(InputError, match=r"2 labels are named 'GOOD': choose one by its index .1, 2"):
        ex.explain(TEXTS[0], target="GOOD", method="generic")
    assert ex.explain(TEXTS[0], target=np.int64(2), method="generic").target["index"] == 2
    assert ex.explain(TEXTS[0], method="generic").target["kind"] == "predicted"
    assert (
        ex.explain(TEXTS[0], target=Predicted(), method="generic").target["name"]
        == ex.explain(TEXTS[0], method="generic").prediction["label"]
    )


def test_a_list_of_targets_is_one_per_input() -> None:
    ex = explainer("bert/classify")
    es = ex.explain(TEXTS, target=[0, Contrast(2, 1), None], method="generic")
    assert [e.target["kind"] for e in es] == ["label", "contrast", "predicted"]
    assert es[1].target["name"] == "LABEL_2 − LABEL_1" and es[1].target["against"] == "LABEL_1"
    assert es[1].scores == pytest.approx(ex.explain(TEXTS[1], target=Contrast(2, 1), method="generic").scores)
    with pytest.raises(InputError, match="2 targets for 3 inputs"):
        ex.explain(TEXTS, target=[0, 1], method="generic")


def test_target_function_equals_contrast() -> None:
    ex = explainer("bert/classify")

    def spread(output: Any) -> torch.Tensor:
        return output.logits[:, 0] - output.logits[:, 1]

    es = ex.explain(TEXTS, "input-x-gradient", target=spread)
    same = ex.explain(TEXTS, "input-x-gradient", target=Contrast(0, 1))
    for by_function, by_contrast in zip(es, same, strict=True):
        assert by_function.scores == pytest.approx(by_contrast.scores)
        assert by_function.target == {
            **by_function.target,
            "kind": "callable",
            "name": "spread",
            "scale": "as_returned",
        }
        assert by_function.target["value"] == pytest.approx(by_contrast.target["value"])
        assert by_function.prediction == by_contrast.prediction
    with pytest.raises(InputError, match=r"one number per sample, \(1,\), but returned \(1, 3\)"):
        ex.explain(TEXTS[0], target=lambda output: output.logits, method="generic")
    with pytest.raises(InputError, match="returned float"):
        ex.explain(TEXTS[0], target=lambda output: 1.0, method="generic")


@pytest.mark.parametrize(
    ("target", "scale", "message"),
    [
        ("goood", "logit", "unknown label 'goood': did you mean 'good'"),
        (7, "logit", "label 7 does not exist: the model has 3 labels"),
        ("-1", "logit", "label -1 does not exist"),
        (True, "logit", "is not a target"),
        (1.5, "logit", "is not a target"),
        (Contrast, "logit", "is not a target"),
        (MaskedToken("it"), "logit", "does not predict masked tokens"),
        (Contrast(0, 1, mask_index=1), "logit", "does not predict masked tokens"),
        (Contrast(0, "bad"), "logit", "with itself"),
        (None, "odds", "unknown scale 'odds': did you mean 'log-odds'"),
    ],
)
def test_invalid_targets_raise(target: Any, scale: str, message: str) -> None:
    ex = explainer("bert/classify", id2label={0: "bad", 1: "neutral", 2: "good"})
    with pytest.raises(InputError, match=message):
        ex.explain(TEXTS[0], target=target, scale=scale, method="generic")


def test_label_names_set_after_loading_are_used() -> None:
    model, tok = text_model("bert")
    ex = clearhead.load(model, tok)
    model.config.id2label = {"0": "bad", "1": "neutral", "2": "good"}  # JSON keys are strings
    assert ex.labels == {0: "bad", 1: "neutral", 2: "good"}
    assert ex.explain(TEXTS[0], target="neutral", method="generic").target["index"] == 1
    model.config.id2label = {0: "bad", 1: "neutral", 2: "good"}
    model.config.id2label[1] = "so-so"
    e = ex.explain(TEXTS[0], target="so-so", method="generic")
    assert e.target["name"] == "so-so" and "so-so" in [label["label"] for label in e.prediction["top"]]


@pytest.mark.parametrize("names", [{0: "bad", 2: "good"}, {0: "bad", 1: "neutral"}, {}])
def test_unnamed_classes_are_named_by_index(names: dict[int, str]) -> None:
    model, tok = text_model("bert")
    named_ex = clearhead.load(model, tok)
    expected = [named_ex.explain(TEXTS[0], target=index, method="generic") for index in range(3)]
    model.config.id2label = names
    ex = clearhead.load(model, tok)
    for index, e in enumerate(expected):
        unnamed_e = ex.explain(TEXTS[0], target=index, method="generic")
        assert unnamed_e.target["name"] == names.get(index, str(index)) and (unnamed_e.scores == e.scores).all()
    with pytest.raises(InputError, match="label 3 does not exist"):
        ex.explain(TEXTS[0], target=3, method="generic")


def test_digits_select_an_unnamed_class() -> None:
    model, tok = text_model("bert")
    model.config.id2label = {0: "bad", 2: "good"}
    assert clearhead.load(model, tok).explain(TEXTS[0], target="1", method="generic").target["index"] == 1
    model.config.id2label = {0: "bad", 1: "2"}
    ex = clearhead.load(model, tok)
    assert [
        ex.explain(TEXTS[0], target=label, method="generic").target["index"] for label in ("2", 2, np.int64(2))
    ] == [1, 2, 2]
    model.config.id2label = {0: "bad", 1: "neutral", "1": "fair"}
    assert [ex.explain(TEXTS[0], target=label, method="generic").target["index"] for label in ("fair", "2")] == [1, 2]


@pytest.mark.parametrize("target", ["more", 3, Contrast("more", 0)])
def test_label_without_a_score_raises(target: Any) -> None:
    ex = explainer("bert/classify")
    ex.adapter.model.config.id2label = {0: "bad", 1: "neutral", 2: "good", 3: "more"}
    with pytest.raises(InputError, match="has no score: the model outputs 3 scores, but its configuration"):
        ex.explain(TEXTS[0], target=target, method="generic")


@pytest.mark.parametrize(
    ("target", "kind", "mask"),
    [
        (None, "predicted", 0),
        (MaskedToken(mask_index=1), "predicted", 1),
        (MaskedToken(2, mask_index=1), "masked_token", 1),
        (MaskedToken(0, mask_index=-1), "masked_token", 2),
        (2, "masked_token", 0),
        (Contrast(0, 2, mask_index=1), "contrast", 1),
    ],
)
def test_description_includes_the_mask_index(target: Any, kind: str, mask: int) -> None:
    description = make_target(target).describe(SCORES, Classes(masked=True), 0.0, num_masks=3)
    assert (description["kind"], description["mask"]) == (kind, mask)
    assert "mask" not in make_target(0).describe(SCORES, Classes(), 0.0)


@pytest.mark.parametrize(
    "target", [MaskedToken(mask_index=1), MaskedToken("the", mask_index=1), Contrast("the", "is", mask_index=1)]
)
def test_explained_mask_is_displayed(target: Any) -> None:
    import jsonschema

    from clearhead.render import text_labels
    from tests.explanation.test_explanation import SCHEMA

    e = explainer("bert/mask").explain("I [MASK] the [MASK].", target=target, method="generic")
    assert e.target["mask"] == 1 and text_labels.format_target_line(e).endswith("at mask 1")
    jsonschema.validate(e.to_dict(), SCHEMA)
