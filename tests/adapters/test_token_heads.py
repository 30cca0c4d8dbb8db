"""Heads that answer at a place of the text, and models that choose between texts."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import clearhead
from clearhead import (
    AnswerSpan,
    Contrast,
    DetectionQuery,
    InputError,
    MaskedToken,
    Method,
    TokenLabel,
    UnsupportedError,
)
from tests import models
from tests.invariants import model_snapshot
from tests.replicas import attention_gradcam, generic, plain_pass, rollout

HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
LABELS = {"id2label": {0: "O", 1: "PER", 2: "LOC"}}
TEXTS = {
    "ForTokenClassification": ["I like the movie.", "She hates the book because it isn't good", "So boring!"],
    "ForQuestionAnswering": [
        ("What is boring?", "She hates the book because it is so long"),
        ("You look?", "I like the movie, it is a wonderful film."),
        ("Who?", "The doctor"),
    ],
    "ForMultipleChoice": [
        ("I like the movie", ["it is wonderful and moving", "boring"]),
        ("She", ["hates the book because it is boring", "like", "is confused"]),
        ("So boring!", ["You look", "the author isn't here"]),
    ],
}
CASES = [(name, head) for head in HEADS for name in ("bert", "roberta", "deberta")]
CASES += [("modernbert", "ForTokenClassification"), ("distilbert", "ForQuestionAnswering")]
CASES += [("electra", "ForMultipleChoice"), ("albert", "ForTokenClassification")]
METHODS = ("generic", "attention", "rollout", "attention-gradcam", "grad-sam", "attcat", "saliency", "input-x-gradient")
QUESTION = ("What is boring?", "She hates the book because it is so long")


@cache
def explainer(name: str, head: str) -> clearhead.Explainer:
    more: dict[str, Any] = {"ForTokenClassification": LABELS, "ForQuestionAnswering": {"num_labels": 2}}.get(head, {})
    return clearhead.load(models.text_model(name, head, **more))


def close(name: str) -> float:
    return 1e-5 if name in ("modernbert", "deberta") else 1e-9


def gap(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def encoded(ex: clearhead.Explainer, *texts: str) -> dict[str, Tensor]:
    return dict(ex.adapter.processor(*texts, return_tensors="pt"))


@pytest.mark.parametrize(("name", "head"), CASES)
class TestLaws:
    def test_batched_is_single(self, name: str, head: str) -> None:
        ex, batch = explainer(name, head), TEXTS[head]
        names = [line.name for line in ex.methods() if line.applies and line.name in METHODS]
        assert {"generic", "rollout", "saliency"} <= set(names)
        together, backwards = ex.explain(batch, names), ex.explain(batch[::-1], names)
        for i, text in enumerate(batch):
            for method, alone in ex.explain(text, names).items():
                for one in (together[method][i], backwards[method][2 - i]):
                    assert one.target["name"] == alone.target["name"]
                    assert gap(one.scores, alone.scores) < close(name), (method, text)
                    assert one.steps == alone.steps
                    if alone.steps is not None:
                        assert gap(one.matrix, alone.matrix) < close(name), (method, text)

    def test_recorded_is_real_and_the_model_untouched(self, name: str, head: str) -> None:
        ex, text = explainer(name, head), TEXTS[head][0]
        before = model_snapshot.of_model(ex.adapter.model)
        e = ex.explain(text)
        assert e.certificate["capture_error"] < close(name) and e.certificate["readout_checked"]
        with pytest.raises(InputError):
            ex.explain(text, target=DetectionQuery(3))
        assert model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model)) == []

    def test_probabilities_do_not_depend_on_padding(self, name: str, head: str) -> None:
        ex, batch = explainer(name, head), TEXTS[head]
        together = ex.explain(batch, "saliency", scale="probability")
        for text, e in zip(batch, together, strict=True):
            alone = ex.explain(text, "saliency", scale="probability")
            assert alone.target["value"] == pytest.approx(e.target["value"], rel=close(name))
            assert gap(e.scores, alone.scores) < close(name)


class TestTokenLabels:
    HEAD = "ForTokenClassification"
    TEXT = "She hates the book because it isn't good"

    @pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
    @pytest.mark.parametrize("place", [1, 4])
    def test_against_the_replicas(self, name: str, place: int) -> None:
        ex = explainer(name, self.HEAD)
        inputs = {"input_ids": encoded(ex, self.TEXT)["input_ids"]}
        seen = plain_pass.watch(ex.adapter.model, inputs, lambda output: output.logits[0, place, 2])
        row = np.eye(seen.units)[place]
        found = ex.explain(self.TEXT, ["generic", "rollout", "attention-gradcam"], TokenLabel(place, "LOC"))
        for replica in (generic, rollout, attention_gradcam):
            method = replica.__name__.split(".")[-1].replace("_", "-")
            assert gap(found[method].scores, replica.scores(seen, row)) < 1e-9, method

    def test_every_token_that_has_a_label(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encoded(ex, self.TEXT)).logits[0]
        names = ex.adapter.processor.convert_ids_to_tokens(encoded(ex, self.TEXT)["input_ids"][0])
        labels = logits.argmax(-1).tolist()
        places = [i for i, label in enumerate(labels) if label != 0 and names[i] not in ("[CLS]", "[SEP]")]
        assert len(places) > 1
        e = ex.explain(self.TEXT)
        assert [step["place"] for step in e.target["steps"]] == places
        assert [step["index"] for step in e.target["steps"]] == [labels[i] for i in places]
        assert e.steps == tuple(f"{LABELS['id2label'][labels[i]]} ({names[i]})" for i in places)
        for k, i in enumerate(places):
            alone = ex.explain(self.TEXT, target=TokenLabel(i))
            assert alone.target["index"] == labels[i] and alone.target["token"] == names[i]
            assert gap(e.matrix[k], alone.scores) < 1e-9

    def test_where_no_token_has_a_label_the_likeliest_is_taken(self) -> None:
        ex = clearhead.load(models.text_model("bert", self.HEAD, **LABELS))
        bias = ex.adapter.model.classifier.bias.detach()
        bias[0] += 100
        p = ex.adapter.model(**encoded(ex, self.TEXT)).logits[0].softmax(-1)[1:-1, 1:].detach()
        e = ex.explain(self.TEXT, "saliency")
        assert e.steps is None and e.prediction["label"] == "O"
        assert (e.target["place"] - 1) * 2 + e.target["index"] - 1 == int(p.argmax())

    def test_a_label_is_every_token_that_has_it(self) -> None:
        ex = explainer("bert", self.HEAD)
        steps = ex.explain(self.TEXT, "saliency").target["steps"]
        for name in {step["label"] for step in steps}:
            target = ex.explain(self.TEXT, "saliency", name).target
            found = [step["place"] for step in target.get("steps", [target])]
            assert found == [step["place"] for step in steps if step["label"] == name]

    def test_a_token_by_its_word(self) -> None:
        ex = explainer("bert", self.HEAD)
        e = ex.explain(self.TEXT, "saliency", TokenLabel("because", "PER"))
        assert e.words().tokens[e.units.find_parents("word")[e.target["place"]]] == "because"
        assert ex.explain(self.TEXT, "saliency", TokenLabel(-2)).target["place"] == len(e) - 2

    def test_contrasts(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encoded(ex, self.TEXT)).logits[0, 3].detach()
        e = ex.explain(self.TEXT, "saliency", TokenLabel(3, "PER", "LOC"))
        assert e.target["value"] == pytest.approx(float(logits[1] - logits[2])) and e.target["kind"] == "contrast"

    def test_a_function_names_its_row(self) -> None:
        model, tokenizer = models.text_model("bert", self.HEAD, **LABELS)

        def third(output: Any) -> Tensor:
            return output.logits[:, 3, 1]

        with pytest.raises(UnsupportedError, match="depends on rows 3"):
            clearhead.load(model, tokenizer).explain(self.TEXT, target=third)
        e = clearhead.load(model, tokenizer, readout=3).explain(self.TEXT, target=third)
        assert gap(e.scores, explainer("bert", self.HEAD).explain(self.TEXT, target=TokenLabel(3, 1)).scores) < 1e-9

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (TokenLabel(40), "token 40 does not exist"),
            (TokenLabel("doctor"), "'doctor' is to name one word of the text, but is not in it"),
            (TokenLabel(2, "ORG"), "label 'ORG'"),
            (MaskedToken("it"), "no target of BertForTokenClassification"),
            (AnswerSpan("start"), "no target of BertForTokenClassification"),
        ],
    )
    def test_bad_targets(self, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(self.TEXT, target=target)

    def test_a_word_that_stands_twice(self) -> None:
        with pytest.raises(InputError, match="stands at several places, say which"):
            explainer("bert", self.HEAD).explain("it is it", target=TokenLabel("it"))

    def test_decoders_read_the_token_too(self) -> None:
        tokenizer = models.tokenizer("bytes")
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": len(tokenizer)}
        torch.manual_seed(0)
        config = transformers.GPT2Config(**sizes, **LABELS, initializer_range=0.3)
        model = transformers.GPT2ForTokenClassification(config).double().eval()
        ex = clearhead.load(model, tokenizer)
        e, later = ex.explain([self.TEXT, "So boring!"], target=[TokenLabel(4, 1), TokenLabel(2, 1)])
        assert e.scores[:4].max() > 0 and not e.scores[5:].any()
        assert gap(later.scores, ex.explain("So boring!", target=TokenLabel(2, 1)).scores) < 1e-9


class TestAnswers:
    HEAD = "ForQuestionAnswering"

    def test_the_span_is_the_best_in_the_text(self) -> None:
        ex = explainer("bert", self.HEAD)
        output = ex.adapter.model(**encoded(ex, *QUESTION))
        start, end = (part[0].detach().numpy() for part in (output.start_logits, output.end_logits))
        e = ex.explain(QUESTION)
        inside = [
            i for i, (s, special) in enumerate(zip(e.units.segments, e.units.special, strict=True)) if s and not special
        ]
        spans = {(i, j): start[i] + end[j] for i in inside for j in inside if i <= j < i + 30}
        i, j = max(spans, key=spans.__getitem__)
        assert [step["index"] for step in e.target["steps"]] == [i, j]
        assert e.target["value"] == pytest.approx(spans[i, j])
        assert [step["place"] for step in e.target["steps"]] == ["start", "end"]
        text = QUESTION[1][e.units.offsets[i][0] : e.units.offsets[j][1]]
        assert all(step["answer"] == text for step in e.target["steps"])
        assert all(step["found"] == (spans[i, j] > start[0] + end[0]) for step in e.target["steps"])

    @pytest.mark.parametrize("name", ["bert", "distilbert"])
    def test_against_the_replica(self, name: str) -> None:
        ex = explainer(name, self.HEAD)
        e = ex.explain(QUESTION)
        inputs = {k: v for k, v in encoded(ex, *QUESTION).items() if k == "input_ids" or name == "bert"}
        for k, which in enumerate(("start", "end")):
            place = e.target["steps"][k]["index"]

            def value(output: Any, which: str = which, place: int = place) -> Tensor:
                output.logits = output.start_logits  # what the replica keeps
                return getattr(output, f"{which}_logits")[0, place]

            seen = plain_pass.watch(ex.adapter.model, inputs, value)
            assert gap(e.matrix[k], generic.scores(seen, np.eye(seen.units)[place])) < 1e-9
            assert gap(e.matrix[k], ex.explain(QUESTION, target=AnswerSpan(which)).scores) < 1e-9
        assert gap(e.matrix.sum(0), e.scores) < 1e-9

    def test_another_answer_in_words_or_by_number(self) -> None:
        ex = explainer("bert", self.HEAD)
        e = ex.explain(QUESTION, "saliency", AnswerSpan(label="the book"))
        first, last = (step["index"] for step in e.target["steps"])
        start, stop = e.units.offsets[first][0], e.units.offsets[last][1]
        assert QUESTION[1][start:stop] == "the book"
        assert ex.explain(QUESTION, "saliency", "the book").target == e.target
        assert ex.explain(QUESTION, "saliency", AnswerSpan("end", 9)).target["index"] == 9

    def test_contrasts(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encoded(ex, *QUESTION)).start_logits[0].detach()
        e = ex.explain(QUESTION, "generic", AnswerSpan("start", 9, 12))
        assert e.target["value"] == pytest.approx(float(logits[9] - logits[12])) and e.certificate["readout_checked"]

    def test_model_inputs(self) -> None:
        ex = explainer("bert", self.HEAD)
        e, again = ex.explain(QUESTION, "generic"), ex.explain(encoded(ex, *QUESTION), "generic")
        assert gap(again.matrix, e.matrix) < 1e-9

    @pytest.mark.parametrize(
        ("given", "target", "message"),
        [
            ("She hates the book", None, r"\(question, text\), but got one text"),
            (QUESTION, AnswerSpan("middle"), "no 'middle'"),
            (QUESTION, AnswerSpan("start", "the doctor"), "does not stand in the text"),
            (QUESTION, AnswerSpan("start", 99), "token 99 does not exist"),
            (QUESTION, Contrast("book", "long"), "a contrast needs its place"),
            (QUESTION, TokenLabel(2), "no target of BertForQuestionAnswering"),
        ],
    )
    def test_bad_input(self, given: Any, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(given, target=target)


class TestChoices:
    HEAD = "ForMultipleChoice"
    GIVEN = ("She", ["hates the book because it is boring", "like", "is confused"])

    def logits(self, ex: clearhead.Explainer) -> Tensor:
        prompt, choices = self.GIVEN
        made = ex.adapter.processor([prompt] * 3, choices, return_tensors="pt", padding=True)
        return ex.adapter.model(**{k: v[None] for k, v in made.items()}).logits[0].detach()

    @pytest.mark.parametrize("name", ["bert", "electra"])
    def test_the_chosen_one(self, name: str) -> None:
        ex = explainer(name, self.HEAD)
        real = self.logits(ex)
        e = ex.explain(self.GIVEN)
        assert e.target["index"] == int(real.argmax()) and e.target["value"] == pytest.approx(float(real.max()))
        assert e.units.texts == (self.GIVEN[0], self.GIVEN[1][e.target["index"]])
        assert [row["logit"] for row in e.prediction["top"]] == pytest.approx(sorted(real.tolist(), reverse=True))
        assert e.prediction["probability"] == pytest.approx(float(real.softmax(-1).max()))

    def test_each_choice_against_the_replica(self) -> None:
        ex = explainer("bert", self.HEAD)
        for i, choice in enumerate(self.GIVEN[1]):
            e = ex.explain(self.GIVEN, target=i)
            twin = plain_pass.watch(
                _Flat(ex.adapter.model), encoded(ex, self.GIVEN[0], choice), lambda o: o.logits[0, 0]
            )
            assert e.units.texts[1] == choice and e.target["name"] == f"choice {i}"
            assert gap(e.scores, generic.scores(twin, np.eye(twin.units)[0])) < 1e-9

    def test_model_inputs(self) -> None:
        ex = explainer("bert", self.HEAD)
        prompt, choices = self.GIVEN
        made = ex.adapter.processor([prompt] * 3, choices, return_tensors="pt", padding=True)
        e = ex.explain({k: v[None] for k, v in made.items()})
        assert gap(e.scores, ex.explain(self.GIVEN).scores) < 1e-9
        with pytest.raises(InputError, match="batch × choice × token"):
            ex.explain(dict(made))

    def test_a_summary_by_the_last_token(self) -> None:
        tokenizer = models.tokenizer("wordpiece")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        torch.manual_seed(0)
        config = transformers.RoFormerConfig(**sizes, vocab_size=len(tokenizer), initializer_range=0.3, pad_token_id=0)
        ex = clearhead.load(transformers.RoFormerForMultipleChoice(config).double().eval(), tokenizer)
        batch = TEXTS[self.HEAD]
        for given, e in zip(batch, ex.explain(batch), strict=True):
            assert e.certificate["readout"] == "last" and e.certificate["readout_checked"]
            assert gap(e.scores, ex.explain(given).scores) < 1e-9

    def test_probabilities_and_contrasts_hold_the_others_fixed(self) -> None:
        ex = explainer("bert", self.HEAD)
        real = self.logits(ex)
        p = float(real.softmax(-1)[1])
        e = ex.explain(self.GIVEN, "input-x-gradient", 1, scale="probability")
        assert e.target["value"] == pytest.approx(p)
        plain = ex.explain(self.GIVEN, "input-x-gradient", 1)
        assert gap(e.scores, plain.scores * p * (1 - p)) < 1e-9
        e = ex.explain(self.GIVEN, "input-x-gradient", Contrast(1, 0))
        assert e.target["value"] == pytest.approx(float(real[1] - real[0])) and gap(e.scores, plain.scores) < 1e-9

    @pytest.mark.parametrize(
        ("given", "target", "message"),
        [
            ("She", None, r"\(text, \[choice, choice, …\]\)"),
            (("She", "hates"), None, r"\(text, \[choice"),
            (("She", []), None, "the list of choices is empty"),
            (GIVEN, 3, "choice 3 does not exist: there are 3"),
            (GIVEN, "like", "choice 'like' does not exist: give its number"),
            (GIVEN, TokenLabel(1), "give the number of a choice"),
        ],
    )
    def test_bad_input(self, given: Any, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(given, target=target)


class _Flat(torch.nn.Module):
    """A model of choices, called with one of them as if it were a text."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, inputs_embeds: Tensor, **more: Any) -> Any:
        parts = {k: v[:, None] if isinstance(v, Tensor) else v for k, v in more.items()}
        return self.model(inputs_embeds=inputs_embeds[:, None], **parts)


class TestOthers:
    def test_models_that_see_pictures_are_not_taken_for_texts(self) -> None:
        tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.LayoutLMv3Config(
            **tiny, vocab_size=50, coordinate_size=2, shape_size=4, input_size=32, patch_size=16
        )
        for head in ("TokenClassification", "QuestionAnswering"):
            with pytest.raises(UnsupportedError, match="reads more than a text"):
                clearhead.load(getattr(transformers, f"LayoutLMv3For{head}")(config))

    def test_what_scores_no_places_is_refused(self) -> None:
        config = transformers.XLMConfig(vocab_size=50, emb_dim=16, n_layers=1, n_heads=2)
        ex = clearhead.load(transformers.XLMForQuestionAnswering(config).eval())
        with pytest.raises(UnsupportedError, match="does not score every start and end"):
            ex.explain({"input_ids": torch.arange(5)[None]})

    def test_options_still_hold(self) -> None:
        e = explainer("bert", "ForQuestionAnswering").explain(QUESTION, Method("generic", layers=(1, None)))
        assert e.provenance["layers"] == [1, 3]
