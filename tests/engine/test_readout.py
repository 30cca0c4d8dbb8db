"""The read-out position is checked for every target; the certificate states it only if a gradient was found."""

import pytest
import torch
import transformers

import clearhead
from tests.models import TEXTS, explainer, text_model, tokenizer


def fourth_row(output: object) -> torch.Tensor:
    return output.last_hidden_state[:, 3, 0]


def mean_of_rows(output: object) -> torch.Tensor:
    return output.last_hidden_state.mean((1, 2))


@pytest.fixture
def encoder() -> torch.nn.Module:
    model, _ = text_model("bert", "Model")
    return model


@pytest.mark.parametrize("target", [fourth_row, mean_of_rows])
def test_target_outside_read_out_row_raises(encoder: torch.nn.Module, target: object) -> None:
    ex = clearhead.load(encoder, tokenizer("wordpiece"))
    with pytest.raises(clearhead.UnsupportedError, match="depends on rows"):
        ex.explain(TEXTS[0], target=target, method="generic")


def test_readout_accepts_row_index(encoder: torch.nn.Module) -> None:
    explanation = clearhead.load(encoder, tokenizer("wordpiece"), readout=3).explain(
        TEXTS[0], target=fourth_row, method="generic"
    )
    assert explanation.certificate["readout"] == 3 and explanation.certificate["readout_checked"]
    matrix_explanation = clearhead.load(encoder, tokenizer("wordpiece"), readout=3).explain(
        TEXTS[0], target=fourth_row, rows="all", method="generic"
    )
    assert explanation.scores == pytest.approx(matrix_explanation.matrix[3])


def test_each_target_function_is_checked_separately() -> None:
    ex = explainer("bert/classify")
    assert ex.explain(TEXTS[0], method="generic").certificate["readout_checked"]
    hidden = []
    ex.adapter.model.bert.encoder.register_forward_hook(lambda *args: hidden.append(args[-1].last_hidden_state))
    with pytest.raises(clearhead.UnsupportedError, match="depends on rows"):
        ex.explain(TEXTS[0], target=lambda output: hidden[-1][:, 2, 0], method="generic")


def test_zero_gradient_is_not_certified_as_checked() -> None:
    model, tok = text_model("bert")
    torch.nn.init.zeros_(model.classifier.weight)
    explanation = clearhead.load(model, tok).explain(TEXTS[0], method="generic")
    assert not explanation.certificate["readout_checked"] and not explanation.scores.any()


def test_target_may_be_unhashable() -> None:
    class DictTarget(dict):
        def __call__(self, output: transformers.utils.ModelOutput) -> torch.Tensor:
            return output.logits[:, 1]

    ex = explainer("bert/classify")
    assert ex.explain(TEXTS[0], target=DictTarget(), method="generic").scores == pytest.approx(
        ex.explain(TEXTS[0], target=1, method="generic").scores
    )
