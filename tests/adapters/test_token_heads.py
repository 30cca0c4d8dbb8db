"""Heads that predict at a token position (labels, answer spans), and multiple-choice models."""

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


def get_tolerance(name: str) -> float:
    return 1e-5 if name in ("modernbert", "deberta") else 1e-9


def gap(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


def encode(ex: clearhead.Explainer, *texts: str) -> dict[str, Tensor]:
    return dict(ex.adapter.processor(*texts, return_tensors="pt"))


@pytest.mark.parametrize(("name", "head"), CASES)
class TestInvariants:
    def test_batch_equals_single(self, name: str, head: str) -> None:
        ex, batch = explainer(name, head), TEXTS[head]
        names = [line.name for line in ex.methods() if line.applies and line.name in METHODS]
        assert {"generic", "rollout", "saliency"} <= set(names)
        together, backwards = ex.explain(batch, names), ex.explain(batch[::-1], names)
        for i, text in enumerate(batch):
            for method, alone in ex.explain(text, names).items():
                for batched in (together[method][i], backwards[method][2 - i]):
                    assert batched.target["name"] == alone.target["name"]
                    assert gap(batched.scores, alone.scores) < get_tolerance(name), (method, text)
                    assert batched.steps == alone.steps
                    if alone.steps is not None:
                        assert gap(batched.matrix, alone.matrix) < get_tolerance(name), (method, text)

    def test_recorded_logits_are_exact_and_model_is_unchanged(self, name: str, head: str) -> None:
        ex, text = explainer(name, head), TEXTS[head][0]
        before = model_snapshot.of_model(ex.adapter.model)
        e = ex.explain(text, method="generic")
        assert e.certificate["capture_error"] < get_tolerance(name) and e.certificate["readout_checked"]
        with pytest.raises(InputError):
            ex.explain(text, target=DetectionQuery(3), method="generic")
        assert model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model)) == []

    def test_probabilities_do_not_depend_on_padding(self, name: str, head: str) -> None:
        ex, batch = explainer(name, head), TEXTS[head]
        together = ex.explain(batch, "saliency", scale="probability")
        for text, e in zip(batch, together, strict=True):
            alone = ex.explain(text, "saliency", scale="probability")
            assert alone.target["value"] == pytest.approx(e.target["value"], rel=get_tolerance(name))
            assert gap(e.scores, alone.scores) < get_tolerance(name)


class TestTokenLabels:
    HEAD = "ForTokenClassification"
    TEXT = "She hates the book because it isn't good"

    @pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
    @pytest.mark.parametrize("position", [1, 4])
    def test_token_label_scores_equal_replicas(self, name: str, position: int) -> None:
        ex = explainer(name, self.HEAD)
        inputs = {"input_ids": encode(ex, self.TEXT)["input_ids"]}
        pass_record = plain_pass.watch(ex.adapter.model, inputs, lambda output: output.logits[0, position, 2])
        row = np.eye(pass_record.units)[position]
        results = ex.explain(self.TEXT, ["generic", "rollout", "attention-gradcam"], TokenLabel(position, "LOC"))
        for replica in (generic, rollout, attention_gradcam):
            method = replica.__name__.split(".")[-1].replace("_", "-")
            assert gap(results[method].scores, replica.scores(pass_record, row)) < 1e-9, method

    def test_default_targets_are_all_labelled_tokens(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encode(ex, self.TEXT)).logits[0]
        names = ex.adapter.processor.convert_ids_to_tokens(encode(ex, self.TEXT)["input_ids"][0])
        labels = logits.argmax(-1).tolist()
        positions = [i for i, label in enumerate(labels) if label != 0 and names[i] not in ("[CLS]", "[SEP]")]
        assert len(positions) > 1
        e = ex.explain(self.TEXT, method="generic")
        assert [step["position"] for step in e.target["steps"]] == positions
        assert [step["index"] for step in e.target["steps"]] == [labels[i] for i in positions]
        assert e.steps == tuple(f"{LABELS['id2label'][labels[i]]} ({names[i]})" for i in positions)
        for k, i in enumerate(positions):
            alone = ex.explain(self.TEXT, target=TokenLabel(i), method="generic")
            assert alone.target["index"] == labels[i] and alone.target["token"] == names[i]
            assert gap(e.matrix[k], alone.scores) < 1e-9

    def test_without_labelled_tokens_most_probable_label_is_explained(self) -> None:
        ex = clearhead.load(models.text_model("bert", self.HEAD, **LABELS))
        bias = ex.adapter.model.classifier.bias.detach()
        bias[0] += 100
        p = ex.adapter.model(**encode(ex, self.TEXT)).logits[0].softmax(-1)[1:-1, 1:].detach()
        e = ex.explain(self.TEXT, "saliency")
        assert e.steps is None and e.prediction["label"] == "O"
        assert (e.target["position"] - 1) * 2 + e.target["index"] - 1 == int(p.argmax())

    def test_label_target_selects_all_tokens_with_that_label(self) -> None:
        ex = explainer("bert", self.HEAD)
        steps = ex.explain(self.TEXT, "saliency").target["steps"]
        for name in {step["label"] for step in steps}:
            target = ex.explain(self.TEXT, "saliency", name).target
            positions = [step["position"] for step in target.get("steps", [target])]
            assert positions == [step["position"] for step in steps if step["label"] == name]

    def test_token_label_accepts_word_or_negative_index(self) -> None:
        ex = explainer("bert", self.HEAD)
        e = ex.explain(self.TEXT, "saliency", TokenLabel("because", "PER"))
        assert e.words().tokens[e.units.find_parents("word")[e.target["position"]]] == "because"
        assert ex.explain(self.TEXT, "saliency", TokenLabel(-2)).target["position"] == len(e) - 2

    def test_token_label_contrast_equals_logit_difference(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encode(ex, self.TEXT)).logits[0, 3].detach()
        e = ex.explain(self.TEXT, "saliency", TokenLabel(3, "PER", "LOC"))
        assert e.target["value"] == pytest.approx(float(logits[1] - logits[2])) and e.target["kind"] == "contrast"

    def test_target_function_requires_readout_position(self) -> None:
        model, tokenizer = models.text_model("bert", self.HEAD, **LABELS)

        def get_third_logit(output: Any) -> Tensor:
            return output.logits[:, 3, 1]

        with pytest.raises(UnsupportedError, match="depends on rows 3"):
            clearhead.load(model, tokenizer).explain(self.TEXT, target=get_third_logit, method="generic")
        e = clearhead.load(model, tokenizer, readout=3).explain(self.TEXT, target=get_third_logit, method="generic")
        assert (
            gap(
                e.scores,
                explainer("bert", self.HEAD).explain(self.TEXT, target=TokenLabel(3, 1), method="generic").scores,
            )
            < 1e-9
        )

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            (TokenLabel(40), "token 40 does not exist"),
            (TokenLabel("doctor"), "'doctor' must name one word of the text, but it does not occur"),
            (TokenLabel(2, "ORG"), "label 'ORG'"),
            (MaskedToken("it"), "not a target of BertForTokenClassification"),
            (AnswerSpan("start"), "not a target of BertForTokenClassification"),
        ],
    )
    def test_invalid_token_targets_raise(self, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(self.TEXT, target=target, method="generic")

    def test_ambiguous_word_raises(self) -> None:
        with pytest.raises(InputError, match="occurs several times: choose one occurrence"):
            explainer("bert", self.HEAD).explain("it is it", target=TokenLabel("it"), method="generic")

    def test_decoder_token_labels_use_only_preceding_tokens(self) -> None:
        tokenizer = models.tokenizer("bytes")
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": len(tokenizer)}
        torch.manual_seed(0)
        config = transformers.GPT2Config(**sizes, **LABELS, initializer_range=0.3)
        model = transformers.GPT2ForTokenClassification(config).double().eval()
        ex = clearhead.load(model, tokenizer)
        e, later = ex.explain([self.TEXT, "So boring!"], target=[TokenLabel(4, 1), TokenLabel(2, 1)], method="generic")
        assert e.scores[:4].max() > 0 and not e.scores[5:].any()
        assert gap(later.scores, ex.explain("So boring!", target=TokenLabel(2, 1), method="generic").scores) < 1e-9


class TestAnswerSpans:
    HEAD = "ForQuestionAnswering"

    def test_default_span_maximises_start_plus_end_logits(self) -> None:
        ex = explainer("bert", self.HEAD)
        output = ex.adapter.model(**encode(ex, *QUESTION))
        start, end = (part[0].detach().numpy() for part in (output.start_logits, output.end_logits))
        e = ex.explain(QUESTION, method="generic")
        content_positions = [
            i for i, (s, special) in enumerate(zip(e.units.segments, e.units.special, strict=True)) if s and not special
        ]
        spans = {(i, j): start[i] + end[j] for i in content_positions for j in content_positions if i <= j < i + 30}
        i, j = max(spans, key=spans.__getitem__)
        assert [step["index"] for step in e.target["steps"]] == [i, j]
        assert e.target["value"] == pytest.approx(spans[i, j])
        assert [step["position"] for step in e.target["steps"]] == ["start", "end"]
        text = QUESTION[1][e.units.offsets[i][0] : e.units.offsets[j][1]]
        assert all(step["answer"] == text for step in e.target["steps"])
        assert all(step["found"] == (spans[i, j] > start[0] + end[0]) for step in e.target["steps"])

    @pytest.mark.parametrize("name", ["bert", "distilbert"])
    def test_span_scores_equal_replica(self, name: str) -> None:
        ex = explainer(name, self.HEAD)
        e = ex.explain(QUESTION, method="generic")
        inputs = {k: v for k, v in encode(ex, *QUESTION).items() if k == "input_ids" or name == "bert"}
        for k, which in enumerate(("start", "end")):
            position = e.target["steps"][k]["index"]

            def value(output: Any, which: str = which, position: int = position) -> Tensor:
                output.logits = output.start_logits  # which the replica pass requires
                return getattr(output, f"{which}_logits")[0, position]

            pass_record = plain_pass.watch(ex.adapter.model, inputs, value)
            assert gap(e.matrix[k], generic.scores(pass_record, np.eye(pass_record.units)[position])) < 1e-9
            assert gap(e.matrix[k], ex.explain(QUESTION, target=AnswerSpan(which), method="generic").scores) < 1e-9
        assert gap(e.matrix.sum(0), e.scores) < 1e-9

    def test_answer_span_accepts_text_or_token_index(self) -> None:
        ex = explainer("bert", self.HEAD)
        e = ex.explain(QUESTION, "saliency", AnswerSpan(label="the book"))
        first, last = (step["index"] for step in e.target["steps"])
        start, stop = e.units.offsets[first][0], e.units.offsets[last][1]
        assert QUESTION[1][start:stop] == "the book"
        assert ex.explain(QUESTION, "saliency", "the book").target == e.target
        assert ex.explain(QUESTION, "saliency", AnswerSpan("end", 9)).target["index"] == 9

    def test_answer_span_contrast_equals_logit_difference(self) -> None:
        ex = explainer("bert", self.HEAD)
        logits = ex.adapter.model(**encode(ex, *QUESTION)).start_logits[0].detach()
        e = ex.explain(QUESTION, "generic", AnswerSpan("start", 9, 12))
        assert e.target["value"] == pytest.approx(float(logits[9] - logits[12])) and e.certificate["readout_checked"]

    def test_question_model_inputs_equal_raw_text(self) -> None:
        ex = explainer("bert", self.HEAD)
        e, again = ex.explain(QUESTION, "generic"), ex.explain(encode(ex, *QUESTION), "generic")
        assert gap(again.matrix, e.matrix) < 1e-9

    @pytest.mark.parametrize(
        ("raw_input", "target", "message"),
        [
            ("She hates the book", None, r"\(question, text\), but got one text"),
            (QUESTION, AnswerSpan("middle"), "not 'middle'"),
            (QUESTION, AnswerSpan("start", "the doctor"), "does not occur in the text"),
            (QUESTION, AnswerSpan("start", 99), "token 99 does not exist"),
            (QUESTION, Contrast("book", "long"), "a contrast needs a position"),
            (QUESTION, TokenLabel(2), "not a target of BertForQuestionAnswering"),
        ],
    )
    def test_invalid_questions_raise(self, raw_input: Any, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(raw_input, target=target, method="generic")


class TestChoices:
    HEAD = "ForMultipleChoice"
    EXAMPLE = ("She", ["hates the book because it is boring", "like", "is confused"])

    def logits(self, ex: clearhead.Explainer) -> Tensor:
        prompt, choices = self.EXAMPLE
        encoding = ex.adapter.processor([prompt] * 3, choices, return_tensors="pt", padding=True)
        return ex.adapter.model(**{k: v[None] for k, v in encoding.items()}).logits[0].detach()

    @pytest.mark.parametrize("name", ["bert", "electra"])
    def test_default_target_is_the_highest_scoring_choice(self, name: str) -> None:
        ex = explainer(name, self.HEAD)
        real = self.logits(ex)
        e = ex.explain(self.EXAMPLE, method="generic")
        assert e.target["index"] == int(real.argmax()) and e.target["value"] == pytest.approx(float(real.max()))
        assert e.units.texts == (self.EXAMPLE[0], self.EXAMPLE[1][e.target["index"]])
        assert [row["logit"] for row in e.prediction["top"]] == pytest.approx(sorted(real.tolist(), reverse=True))
        assert e.prediction["probability"] == pytest.approx(float(real.softmax(-1).max()))

    def test_choice_scores_equal_replica(self) -> None:
        ex = explainer("bert", self.HEAD)
        for i, choice in enumerate(self.EXAMPLE[1]):
            e = ex.explain(self.EXAMPLE, target=i, method="generic")
            pass_record = plain_pass.watch(
                SingleChoiceWrapper(ex.adapter.model), encode(ex, self.EXAMPLE[0], choice), lambda o: o.logits[0, 0]
            )
            assert e.units.texts[1] == choice and e.target["name"] == f"choice {i}"
            assert gap(e.scores, generic.scores(pass_record, np.eye(pass_record.units)[0])) < 1e-9

    def test_choice_model_inputs_equal_raw_text(self) -> None:
        ex = explainer("bert", self.HEAD)
        prompt, choices = self.EXAMPLE
        encoding = ex.adapter.processor([prompt] * 3, choices, return_tensors="pt", padding=True)
        e = ex.explain({k: v[None] for k, v in encoding.items()}, method="generic")
        assert gap(e.scores, ex.explain(self.EXAMPLE, method="generic").scores) < 1e-9
        with pytest.raises(InputError, match="batch × choice × token"):
            ex.explain(dict(encoding), method="generic")

    def test_last_token_summary_batch_equals_single(self) -> None:
        tokenizer = models.tokenizer("wordpiece")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        torch.manual_seed(0)
        config = transformers.RoFormerConfig(**sizes, vocab_size=len(tokenizer), initializer_range=0.3, pad_token_id=0)
        ex = clearhead.load(transformers.RoFormerForMultipleChoice(config).double().eval(), tokenizer)
        batch = TEXTS[self.HEAD]
        for raw_input, e in zip(batch, ex.explain(batch, method="generic"), strict=True):
            assert e.certificate["readout"] == "last" and e.certificate["readout_checked"]
            assert gap(e.scores, ex.explain(raw_input, method="generic").scores) < 1e-9

    def test_other_choices_are_held_fixed_in_probabilities_and_contrasts(self) -> None:
        ex = explainer("bert", self.HEAD)
        real = self.logits(ex)
        p = float(real.softmax(-1)[1])
        e = ex.explain(self.EXAMPLE, "input-x-gradient", 1, scale="probability")
        assert e.target["value"] == pytest.approx(p)
        plain = ex.explain(self.EXAMPLE, "input-x-gradient", 1)
        assert gap(e.scores, plain.scores * p * (1 - p)) < 1e-9
        e = ex.explain(self.EXAMPLE, "input-x-gradient", Contrast(1, 0))
        assert e.target["value"] == pytest.approx(float(real[1] - real[0])) and gap(e.scores, plain.scores) < 1e-9

    @pytest.mark.parametrize(
        ("raw_input", "target", "message"),
        [
            ("She", None, r"\(text, \[choice, choice, …\]\)"),
            (("She", "hates"), None, r"\(text, \[choice"),
            (("She", []), None, "the list of choices is empty"),
            (EXAMPLE, 3, "choice 3 does not exist: there are 3"),
            (EXAMPLE, "like", "choice 'like' does not exist: use its index"),
            (EXAMPLE, TokenLabel(1), "pass the index of a choice"),
        ],
    )
    def test_invalid_choices_raise(self, raw_input: Any, target: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer("bert", self.HEAD).explain(raw_input, target=target, method="generic")


class SingleChoiceWrapper(torch.nn.Module):
    """A multiple-choice model that is called with one choice, like a text classifier."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> Any:
        choice_inputs = {k: v[:, None] if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return self.model(inputs_embeds=inputs_embeds[:, None], **choice_inputs)


class TestOtherHeads:
    def test_document_image_models_raise(self) -> None:
        tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.LayoutLMv3Config(
            **tiny, vocab_size=50, coordinate_size=2, shape_size=4, input_size=32, patch_size=16
        )
        for head in ("TokenClassification", "QuestionAnswering"):
            with pytest.raises(UnsupportedError, match="takes inputs other than text"):
                clearhead.load(getattr(transformers, f"LayoutLMv3For{head}")(config))

    def test_question_head_without_start_and_end_logits_raises(self) -> None:
        config = transformers.XLMConfig(vocab_size=50, emb_dim=16, n_layers=1, n_heads=2)
        ex = clearhead.load(transformers.XLMForQuestionAnswering(config).eval())
        with pytest.raises(UnsupportedError, match="does not score every start and end"):
            ex.explain({"input_ids": torch.arange(5)[None]}, method="generic")

    def test_layer_option_is_applied(self) -> None:
        e = explainer("bert", "ForQuestionAnswering").explain(QUESTION, Method("generic", layers=(1, None)))
        assert e.provenance["layers"] == [1, 3]
