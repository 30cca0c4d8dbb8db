"""Which row speaks for a target is checked for every target, and the certificate says so only where it was seen."""

import pytest
import torch
import transformers

import clearhead
from tests.models import TEXTS, explainer, text_model, tokenizer


def third(output: object) -> torch.Tensor:
    return output.last_hidden_state[:, 3, 0]


def mean(output: object) -> torch.Tensor:
    return output.last_hidden_state.mean((1, 2))


@pytest.fixture
def encoder() -> torch.nn.Module:
    model, _ = text_model("bert", "Model")
    return model


@pytest.mark.parametrize("target", [third, mean])
def test_a_function_of_other_rows_is_refused(encoder: torch.nn.Module, target: object) -> None:
    ex = clearhead.load(encoder, tokenizer("wordpiece"))
    with pytest.raises(clearhead.UnsupportedError, match="depends on rows"):
        ex.explain(TEXTS[0], target=target)


def test_a_row_by_its_number(encoder: torch.nn.Module) -> None:
    e = clearhead.load(encoder, tokenizer("wordpiece"), readout=3).explain(TEXTS[0], target=third)
    assert e.certificate["readout"] == 3 and e.certificate["readout_checked"]
    whole = clearhead.load(encoder, tokenizer("wordpiece"), readout=3).explain(TEXTS[0], target=third, rows="all")
    assert e.scores == pytest.approx(whole.matrix[3])


def test_each_function_is_checked_by_itself() -> None:
    ex = explainer("bert/classify")
    assert ex.explain(TEXTS[0]).certificate["readout_checked"]
    hidden = []
    ex.adapter.model.bert.encoder.register_forward_hook(lambda *args: hidden.append(args[-1].last_hidden_state))
    with pytest.raises(clearhead.UnsupportedError, match="depends on rows"):
        ex.explain(TEXTS[0], target=lambda output: hidden[-1][:, 2, 0])


def test_nothing_seen_is_not_called_checked() -> None:
    model, tok = text_model("bert")
    torch.nn.init.zeros_(model.classifier.weight)
    e = clearhead.load(model, tok).explain(TEXTS[0])
    assert not e.certificate["readout_checked"] and not e.scores.any()


def test_targets_need_not_be_hashable() -> None:
    class Own(dict):
        def __call__(self, output: transformers.utils.ModelOutput) -> torch.Tensor:
            return output.logits[:, 1]

    ex = explainer("bert/classify")
    assert ex.explain(TEXTS[0], target=Own()).scores == pytest.approx(ex.explain(TEXTS[0], target=1).scores)
