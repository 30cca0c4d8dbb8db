"""The profiles `attcat_paper` and `gender_mlm` equal the authors' scores and the reference implementation."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import InputError, Method
from tests import models
from tests.methods import replica_comparison
from tests.methods import test_parity as parity
from tests.replicas import attcat, attention, cat
from tests.replicas.plain_pass import Seen, watch

QUESTION = ("What is boring?", "She hates the book because it is so long")


def theirs(case: str, which: str) -> np.ndarray:
    return parity.theirs("bert", "attcat", case, which, "attcat_specialmasked")


@pytest.mark.parametrize(("case", "which"), parity.CASES)
def test_scores_equal_authors(case: str, which: str) -> None:
    """The class of `pred` is not given: it is the class predicted for the text with all its tokens."""
    e = parity.bert(case, which, "attcat", profile="attcat_paper")
    assert parity.gap(e.scores, theirs(case, which)) < parity.BERT
    assert e.scores[0] == e.scores[-1] == 0 and e.units.special[0] and e.units.special[-1]


def test_given_attention_mask_is_kept() -> None:
    """If the authors' mask is given, no further tokens are masked."""
    inputs = parity.bert_inputs("case0")
    masked_inputs = mask_positions(inputs, [0, 5])
    index = int(parity.theirs("bert", "bert_recorded", "case0", "alt", "target"))
    e = parity.explainer("bert").explain(masked_inputs, "attcat", target=index, profile="attcat_paper")
    assert parity.gap(e.scores, theirs("case0", "alt")) < parity.BERT


def test_padded_batch_equals_authors() -> None:
    inputs = [parity.bert_inputs("case0"), parity.bert_inputs("case1")]
    results = parity.explainer("bert").explain(inputs, "attcat", profile="attcat_paper")
    for e, case in zip(results, ("case0", "case1"), strict=True):
        # clearhead pads the shorter input; the authors' input has no padding
        assert parity.gap(e.scores, theirs(case, "pred")) < parity.BERT


def mask_positions(inputs: dict[str, Tensor], positions: list[int]) -> dict[str, Tensor]:
    mask = inputs["attention_mask"].clone()
    mask[:, positions] = 0
    return {**inputs, "attention_mask": mask}


def test_given_padding_is_part_of_the_attention_maps() -> None:
    """Given padding is kept, and its rows count in the mean over queries."""
    ex, inputs = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    padded = {name: torch.nn.functional.pad(tensor, (0, 3)) for name, tensor in inputs.items()}
    e = ex.explain(padded, "attcat", target=1, profile="attcat_paper")
    seen = watch(ex.adapter.model, mask_positions(padded, [0, 9]), lambda output: output.logits[0, 1])
    assert len(e) == 13 and not e.scores[10:].any()
    assert replica_comparison.gap(e.scores, attcat.scores(seen, np.eye(13)[0])) < 1e-12
    unpadded = ex.explain(inputs, "attcat", target=1, profile="attcat_paper")
    assert replica_comparison.gap(unpadded.scores, e.scores[:10]) > 0.05


def test_both_separators_of_a_text_pair_have_zero_scores() -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain(models.PAIR, "attcat", profile="attcat_paper")
    assert [e.tokens[i] for i in np.flatnonzero(e.scores == 0)] == ["[CLS]", "[SEP]", "[SEP]"]


@cache
def load_question_answering() -> clearhead.Explainer:
    return clearhead.load(models.text_model("bert", "ForQuestionAnswering", num_labels=2))


@pytest.mark.parametrize("absolute", [False, True])
def test_answer_span_has_separate_start_and_end_scores(absolute: bool) -> None:
    ex = load_question_answering()
    e = ex.explain(QUESTION, Method("attcat", absolute=absolute), profile="attcat_paper")
    inputs = dict(ex.adapter.processor(*QUESTION, return_tensors="pt"))
    special = ex.adapter.processor.get_special_tokens_mask(inputs["input_ids"][0], already_has_special_tokens=True)
    inputs = mask_positions(inputs, np.flatnonzero(special).tolist())
    rows = []
    for name in ("start_logits", "end_logits"):
        seen = watch(SingleLogitsModel(ex.adapter.model), inputs, lambda output, name=name: getattr(output, name).max())
        rows.append(attcat.scores(seen, np.zeros(seen.units)))
    expected = np.abs(rows) if absolute else np.array(rows)
    assert replica_comparison.gap(e.matrix, expected) < 1e-10
    assert replica_comparison.gap(e.scores, expected.sum(0)) < 1e-10
    assert [step["position"] for step in e.target["steps"]] == ["start", "end"]


def test_answer_span_without_profile_is_the_sum_of_start_and_end() -> None:
    ex = load_question_answering()
    for method in ("cat", "attcat"):
        e = ex.explain(QUESTION, method)
        starts, ends = (
            ex.explain(QUESTION, method, clearhead.AnswerSpan(position)).scores for position in ("start", "end")
        )
        assert replica_comparison.gap(e.scores, starts + ends) < 1e-12


class SingleLogitsModel(torch.nn.Module):
    """Adds `logits`, which the replica records, to the output of a question-answering model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output["logits"] = output.start_logits
        return output

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()


def record_masked_pass(text: str) -> tuple[Seen, np.ndarray, int]:
    """Record a pass with [CLS] and [SEP] masked, for the most probable token; return it, its read-out and the token."""
    ex = replica_comparison.explainer("bert/mask")
    inputs = dict(ex.adapter.processor(text, return_tensors="pt"))
    position = replica_comparison.find_masked_position("bert/mask", inputs)
    inputs = mask_positions(inputs, [0, inputs["input_ids"].shape[1] - 1])
    seen = watch(ex.adapter.model, inputs, lambda output: output.logits[0, position].max())
    return seen, np.eye(seen.units)[position], int(seen.logits[position].argmax())


@pytest.mark.parametrize("text", ["[MASK] hates the book.", "[MASK] is so boring", "I like the [MASK]."])
def test_gender_mlm_scores_equal_reference(text: str) -> None:
    seen, row, token_id = record_masked_pass(text)
    results = replica_comparison.explainer("bert/mask").explain(
        text, ["attcat", "cat", "attention"], profile="gender_mlm"
    )
    for e in results.values():
        assert list(np.flatnonzero(np.isnan(e.scores))) == [0, len(e) - 1]
        assert e.target["index"] == token_id and e.tokens[int(row.argmax())] == "[MASK]"
    expected_by_layer = {
        "attcat": attcat.contributions(seen, row, weights="row").sum(1),
        "cat": cat.contributions(seen, row).sum(1),
        "attention": attention.contributions(seen, row, layers=range(3)).sum(1),
    }
    for name, by_layer in expected_by_layer.items():
        assert replica_comparison.gap(results[name].scores[1:-1], by_layer.sum(0)[1:-1]) < 1e-10, name
        assert replica_comparison.gap(results[name].per_layer[:, 1:-1], by_layer[:, 1:-1]) < 1e-10, name


@pytest.mark.parametrize("text", ["[MASK] hates the book.", "I like the [MASK]."])
def test_attcat_of_a_masked_token_uses_the_attention_of_its_row(text: str) -> None:
    """The target token is predicted for the text with all its tokens, like the class of a sentence."""
    ex = replica_comparison.explainer("bert/mask")
    inputs = dict(ex.adapter.processor(text, return_tensors="pt"))
    position, last = replica_comparison.find_masked_position("bert/mask", inputs), inputs["input_ids"].shape[1] - 1
    with torch.no_grad():
        token_id = int(ex.adapter.model(**inputs).logits[0, position].argmax())
    seen = watch(
        ex.adapter.model, mask_positions(inputs, [0, last]), lambda output: output.logits[0, position, token_id]
    )
    e = ex.explain(text, "attcat", profile="attcat_paper")
    assert e.target["index"] == token_id
    assert (
        replica_comparison.gap(
            e.scores, attcat.contributions(seen, np.eye(seen.units)[position], weights="row").sum((0, 1))
        )
        < 1e-10
    )
    received = ex.explain(text, Method("attcat", weights="received"), profile="attcat_paper")
    assert replica_comparison.gap(received.scores, e.scores) > 0.01


def test_gender_mlm_profile_differs_from_the_default() -> None:
    """The default does not mask special tokens, so its scores differ."""
    text = "[MASK] hates the book."
    ex = replica_comparison.explainer("bert/mask")
    default = ex.explain(text, Method("attcat", weights="row")).scores
    assert replica_comparison.gap(ex.explain(text, "attcat", profile="gender_mlm").scores[1:-1], default[1:-1]) > 0.01


def test_unsupported_inputs_and_methods_are_rejected() -> None:
    embeddings = {"inputs_embeds": torch.ones(1, 4, 32, dtype=torch.float64)}
    with pytest.raises(InputError, match=r"masks \[CLS\] and \[SEP\] of a text"):
        replica_comparison.explainer("bert/classify").explain(embeddings, "attcat", profile="attcat_paper")
    with pytest.raises(InputError, match="the text has no other tokens"):
        replica_comparison.explainer("bert/classify").explain(
            {"input_ids": torch.tensor([[2, 3]])}, "attcat", profile="attcat_paper"
        )
    with pytest.raises(InputError, match="has no settings for rollout: it has settings for attcat"):
        replica_comparison.explainer("bert/classify").explain("So boring!", "rollout", profile="attcat_paper")
