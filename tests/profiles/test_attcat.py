"""The profiles `attcat_paper` and `gender_mlm`, against the authors' figures and against the replica."""

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
def test_the_authors_figures(case: str, which: str) -> None:
    """The class of `pred` is found, not told: that of the text with all its tokens."""
    e = parity.bert(case, which, "attcat", profile="attcat_paper")
    assert parity.gap(e.scores, theirs(case, which)) < parity.BERT
    assert e.scores[0] == e.scores[-1] == 0 and e.units.special[0] and e.units.special[-1]


def test_what_is_hidden_already_stays_hidden() -> None:
    """Where the mask that authors pass is given, nothing more is hidden."""
    inputs = parity.bert_inputs("case0")
    given = hidden(inputs, [0, 5])
    index = int(parity.theirs("bert", "bert_recorded", "case0", "alt", "target"))
    e = parity.explainer("bert").explain(given, "attcat", target=index, profile="attcat_paper")
    assert parity.gap(e.scores, theirs("case0", "alt")) < parity.BERT


def test_the_authors_figures_in_one_batch() -> None:
    both = [parity.bert_inputs("case0"), parity.bert_inputs("case1")]
    found = parity.explainer("bert").explain(both, "attcat", profile="attcat_paper")
    for e, case in zip(found, ("case0", "case1"), strict=True):
        # the shorter is padded in a batch by our own hand: that is no padding of theirs
        assert parity.gap(e.scores, theirs(case, "pred")) < parity.BERT


def hidden(inputs: dict[str, Tensor], places: list[int]) -> dict[str, Tensor]:
    mask = inputs["attention_mask"].clone()
    mask[:, places] = 0
    return {**inputs, "attention_mask": mask}


def test_padding_is_part_of_the_maps() -> None:
    """Given padding stays, and the mean over those who look counts it."""
    ex, given = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    padded = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in given.items()}
    e = ex.explain(padded, "attcat", target=1, profile="attcat_paper")
    seen = watch(ex.adapter.model, hidden(padded, [0, 9]), lambda output: output.logits[0, 1])
    assert len(e) == 13 and not e.scores[10:].any()
    assert replica_comparison.gap(e.scores, attcat.scores(seen, np.eye(13)[0])) < 1e-12
    short = ex.explain(given, "attcat", target=1, profile="attcat_paper")
    assert replica_comparison.gap(short.scores, e.scores[:10]) > 0.05


def test_both_separators_of_a_pair_are_hidden() -> None:
    ex = replica_comparison.explainer("bert/classify")
    e = ex.explain(models.PAIR, "attcat", profile="attcat_paper")
    assert [e.tokens[i] for i in np.flatnonzero(e.scores == 0)] == ["[CLS]", "[SEP]", "[SEP]"]


@cache
def answering() -> clearhead.Explainer:
    return clearhead.load(models.text_model("bert", "ForQuestionAnswering", num_labels=2))


@pytest.mark.parametrize("absolute", [False, True])
def test_the_start_and_the_end_of_an_answer(absolute: bool) -> None:
    ex = answering()
    e = ex.explain(QUESTION, Method("attcat", absolute=absolute), profile="attcat_paper")
    inputs = dict(ex.adapter.processor(*QUESTION, return_tensors="pt"))
    special = ex.adapter.processor.get_special_tokens_mask(inputs["input_ids"][0], already_has_special_tokens=True)
    inputs = hidden(inputs, np.flatnonzero(special).tolist())
    rows = []
    for which in ("start_logits", "end_logits"):
        seen = watch(Scored(ex.adapter.model), inputs, lambda output, which=which: getattr(output, which).max())
        rows.append(attcat.scores(seen, np.zeros(seen.units)))
    wanted = np.abs(rows) if absolute else np.array(rows)
    assert replica_comparison.gap(e.matrix, wanted) < 1e-10
    assert replica_comparison.gap(e.scores, wanted.sum(0)) < 1e-10
    assert [step["place"] for step in e.target["steps"]] == ["start", "end"]


def test_without_a_profile_the_answer_is_one_span() -> None:
    ex = answering()
    for method in ("cat", "attcat"):
        e = ex.explain(QUESTION, method)
        starts, ends = (ex.explain(QUESTION, method, clearhead.AnswerSpan(place)).scores for place in ("start", "end"))
        assert replica_comparison.gap(e.scores, starts + ends) < 1e-12


class Scored(torch.nn.Module):
    """A model of two rows of scores that answers as one: `logits` is what the replica records beside."""

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


def masked(text: str) -> tuple[Seen, np.ndarray, int]:
    """One pass with [CLS] and [SEP] hidden, from the likeliest word of the vocabulary, and the row of the mask."""
    ex = replica_comparison.explainer("bert/mask")
    inputs = dict(ex.adapter.processor(text, return_tensors="pt"))
    place = replica_comparison.masked_position("bert/mask", inputs)
    inputs = hidden(inputs, [0, inputs["input_ids"].shape[1] - 1])
    seen = watch(ex.adapter.model, inputs, lambda output: output.logits[0, place].max())
    return seen, np.eye(seen.units)[place], int(seen.logits[place].argmax())


@pytest.mark.parametrize("text", ["[MASK] hates the book.", "[MASK] is so boring", "I like the [MASK]."])
def test_the_masked_word(text: str) -> None:
    seen, row, word = masked(text)
    found = replica_comparison.explainer("bert/mask").explain(
        text, ["attcat", "cat", "attention"], profile="gender_mlm"
    )
    for e in found.values():
        assert list(np.flatnonzero(np.isnan(e.scores))) == [0, len(e) - 1]
        assert e.target["index"] == word and e.tokens[int(row.argmax())] == "[MASK]"
    known = {
        "attcat": attcat.shares(seen, row, weights="row").sum(1),
        "cat": cat.shares(seen, row).sum(1),
        "attention": attention.shares(seen, row, layers=range(3)).sum(1),
    }
    for name, by_layer in known.items():
        assert replica_comparison.gap(found[name].scores[1:-1], by_layer.sum(0)[1:-1]) < 1e-10, name
        assert replica_comparison.gap(found[name].per_layer[:, 1:-1], by_layer[:, 1:-1]) < 1e-10, name


@pytest.mark.parametrize("text", ["[MASK] hates the book.", "I like the [MASK]."])
def test_the_authors_weigh_by_what_a_masked_word_looks_at(text: str) -> None:
    """The word is that of the text with all its tokens, as the class of a sentence is."""
    ex = replica_comparison.explainer("bert/mask")
    inputs = dict(ex.adapter.processor(text, return_tensors="pt"))
    place, last = replica_comparison.masked_position("bert/mask", inputs), inputs["input_ids"].shape[1] - 1
    with torch.no_grad():
        word = int(ex.adapter.model(**inputs).logits[0, place].argmax())
    seen = watch(ex.adapter.model, hidden(inputs, [0, last]), lambda output: output.logits[0, place, word])
    e = ex.explain(text, "attcat", profile="attcat_paper")
    assert e.target["index"] == word
    assert (
        replica_comparison.gap(e.scores, attcat.shares(seen, np.eye(seen.units)[place], weights="row").sum((0, 1)))
        < 1e-10
    )
    received = ex.explain(text, Method("attcat", weights="received"), profile="attcat_paper")
    assert replica_comparison.gap(received.scores, e.scores) > 0.01


def test_hidden_words_say_something_else() -> None:
    """The profile is another explanation than the default, which leaves special tokens where they are."""
    text = "[MASK] hates the book."
    ex = replica_comparison.explainer("bert/mask")
    usual = ex.explain(text, Method("attcat", weights="row")).scores
    assert replica_comparison.gap(ex.explain(text, "attcat", profile="gender_mlm").scores[1:-1], usual[1:-1]) > 0.01


def test_what_has_no_words_is_refused() -> None:
    vectors = {"inputs_embeds": torch.ones(1, 4, 32, dtype=torch.float64)}
    with pytest.raises(InputError, match=r"hides \[CLS\] and \[SEP\] of a text"):
        replica_comparison.explainer("bert/classify").explain(vectors, "attcat", profile="attcat_paper")
    with pytest.raises(InputError, match="the text has no other tokens"):
        replica_comparison.explainer("bert/classify").explain(
            {"input_ids": torch.tensor([[2, 3]])}, "attcat", profile="attcat_paper"
        )
    with pytest.raises(InputError, match="has no settings for rollout: it has settings for attcat"):
        replica_comparison.explainer("bert/classify").explain("So boring!", "rollout", profile="attcat_paper")
