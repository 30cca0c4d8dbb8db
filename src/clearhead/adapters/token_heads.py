"""Adapters for text models with a prediction per token: token classification, and answer spans in a context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, Readout, register_adapter, unwrap_base_model
from clearhead.adapters.text import TextAdapter
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import AnswerSpan, MaskedToken, PositionTarget, Target, TokenLabel, describe_spec
from clearhead.units import Units

#: Inputs of models that see more than a text.
_VISUAL_INPUT_NAMES = ("pixel_values", "visual_feats", "visual_embeds", "image", "images")
#: How many tokens an answer may have (as in the evaluation of SQuAD).
MAX_ANSWER_TOKENS = 30


class TextHeadAdapter(TextAdapter):
    """A text model that can be asked what it says before it is explained."""

    def __post_init__(self) -> None:
        seen = [name for name in _VISUAL_INPUT_NAMES if self.forward_accepts(name)]
        if seen:
            name = type(unwrap_base_model(self.model)).__name__
            raise UnsupportedError(
                f"{name} takes inputs other than text ({', '.join(seen)}), which is not supported yet"
            )
        super().__post_init__()


class TokenHeadAdapter(TextHeadAdapter):
    """What heads at places share: a row of its own for each target."""

    target_class: ClassVar[type[PositionTarget]]

    def choose_default_readout(self) -> Readout | None:
        return "token"

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """The row of the token; a function of the output may read any of them."""
        if self.readout != "token":
            return super().find_readout_rows(sample, target)
        if target.function is not None:
            return dict.fromkeys(range(len(sample.units)), 1 / len(sample.units))
        return {self.find_readout_row(sample, target): 1.0}

    def find_readout_row(self, sample: Sample, target: Target) -> int:
        """The place of the token that the target is read at."""
        raise NotImplementedError

    def check_target_type(self, target: Target) -> None:
        wanted = target.spec
        if isinstance(wanted, MaskedToken) or (
            isinstance(wanted, PositionTarget) and not isinstance(wanted, self.target_class)
        ):
            raise InputError(
                f"{describe_spec(wanted)} is not a target of {type(self.model).__name__}: pass "
                f"clearhead.{self.target_class.__name__}(…)"
            )


@register_adapter
class TokenClassificationAdapter(TokenHeadAdapter):
    """A label for each token: names, parts of speech. By default every token that has a label other than "O"."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForTokenClassification",)
    target_class = TokenLabel

    @property
    def outside_label_index(self) -> int:
        """The label of tokens that have none: "O", or else the first."""
        return next((index for index, name in self.labels.items() if name.upper() == "O"), 0)

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        if target.function is not None:
            return [target]
        self.check_target_type(target)
        if target.position is not None:
            return [target.at_position(_find_token_index(sample.units, target.position), TokenLabel)]
        wanted = target.at_position(0, TokenLabel).spec
        assert isinstance(wanted, TokenLabel)
        tokens = self._select_labelled_tokens(sample, None if wanted.label is None else self.label_index(wanted.label))
        return [Target(TokenLabel(i, wanted.label or label, wanted.against), target.scale) for i, label in tokens]

    def _select_labelled_tokens(self, sample: Sample, wanted: int | None) -> list[tuple[int, int]]:
        """Every token that has a label (or the one that is asked for); where none has, the likeliest."""
        logits = self.session.forward(self.collate([sample])).logits[0]
        inside = torch.tensor([not special for special in sample.units.special], device=logits.device)
        if not inside.any():
            raise InputError("all tokens are special tokens: choose one with target=clearhead.TokenLabel(0)")
        labels = logits.argmax(-1)
        chosen = inside & ((labels != self.outside_label_index) if wanted is None else (labels == wanted))
        if chosen.any():
            return [(int(i), int(labels[i])) for i in chosen.nonzero().flatten()]
        p = logits.log_softmax(-1).masked_fill(~inside[:, None], -torch.inf)
        others = [
            label
            for label in range(p.shape[1])
            if (label == wanted if wanted is not None else label != self.outside_label_index)
        ]
        best = int(p[:, others].argmax())
        return [(best // len(others), others[best % len(others)])]

    def find_readout_row(self, sample: Sample, target: Target) -> int:
        assert isinstance(target.position, int)
        return target.position

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        places = [
            0 if target.function is not None else self.find_readout_row(sample, target)
            for sample, target in zip(samples, targets, strict=True)
        ]
        return output.logits[torch.arange(len(places)) % len(output.logits), places]

    def extend_target_description(self, sample: Sample, target: Target, description: dict[str, Any]) -> dict[str, Any]:
        """With the token, so that steps can be told apart."""
        if target.function is not None:
            return description
        token = sample.units.names[self.find_readout_row(sample, target)]
        return description | {
            "name": f"{description['name']} ({token})",
            "label": self.label_name(description["index"]),
            "token": token,
        }


@dataclass
class QASample(Sample):
    """A question with the text that answers it; `span` is where the model finds the answer."""

    answer_span: tuple[int, int] = (0, 0)
    has_answer: bool = True


@register_adapter
class QuestionAnsweringAdapter(TokenHeadAdapter):
    """Where in a text the answer to a question starts and ends: both by default, as two steps.

    The answer is the span of the text with the largest sum of both scores, at most `LONGEST_ANSWER` tokens long;
    whether the model would rather give none (the score of the first token) is said beside it.
    """

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForQuestionAnswering", "ForQuestionAnsweringSimple")
    target_class = AnswerSpan

    def __post_init__(self) -> None:
        super().__post_init__()
        self.labels, self.multi_label = {}, False

    @property
    def is_regression(self) -> bool:
        return False

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, str):
            raise InputError(
                "expected a question and the text that contains its answer, (question, text), but got one text"
            )
        return super().make_samples(raw, options)

    def make_example_input(self) -> Any:
        return super().make_example_input() if self.processor is None else ("a question", "a small example")

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        """With the answer that the model finds."""
        output = self.session.forward(self.collate([sample]))
        if getattr(output, "start_logits", None) is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} does not score every start and end position: it cannot be explained"
            )
        start, end = output.start_logits[0], output.end_logits[0]
        inside = torch.tensor(_mark_context_tokens(sample.units), device=start.device)
        spans = (start[:, None] + end).masked_fill(~inside[:, None] | ~inside, -torch.inf)
        spans = spans.masked_fill(torch.ones_like(spans).triu().tril(MAX_ANSWER_TOKENS - 1) == 0, -torch.inf)
        first, last = divmod(int(spans.argmax()), len(start))
        found = bool(spans.max() > start[0] + end[0]) or bool(inside[0])
        return QASample(sample.inputs, sample.axes, sample.num_truncated, answer_span=(first, last), has_answer=found)

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        if target.function is not None:
            return [target]
        self.check_target_type(target)
        wanted = target.at_position("both", AnswerSpan).spec
        assert isinstance(wanted, AnswerSpan) and isinstance(sample, QASample)
        if wanted.against is not None and target.position is None:
            raise InputError("a contrast needs a position: use clearhead.AnswerSpan('start', token, against), or 'end'")
        places = ("start", "end") if target.position is None else (target.position,)
        if places[0] not in ("start", "end"):
            raise InputError(f"the position in an answer span must be 'start' or 'end', not {target.position!r}")
        own = sample.answer_span if wanted.label is None else _find_answer_span(sample.units, wanted.label)
        against = None if wanted.against is None else _find_answer_span(sample.units, wanted.against)
        which = {"start": 0, "end": 1}
        return [
            Target(AnswerSpan(p, own[which[p]], None if against is None else against[which[p]]), target.scale)
            for p in places
            if isinstance(p, str)
        ]

    def find_readout_row(self, sample: Sample, target: Target) -> int:
        assert isinstance(target.spec, AnswerSpan) and isinstance(target.spec.label, int)
        return target.spec.label

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        """A contrast of two places reads both."""
        read = super().find_readout_rows(sample, target)
        if (
            self.readout != "token"
            or not isinstance(target.spec, AnswerSpan)
            or not isinstance(target.spec.against, int)
        ):
            return read
        return dict.fromkeys({*read, target.spec.against}, 0.5)

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        """The classes are the tokens; padding is none of them."""
        size, rows = len(output.start_logits), []
        for i, (sample, target) in enumerate(zip(samples, targets, strict=True)):
            logits = output.end_logits if target.position == "end" else output.start_logits
            beyond = torch.arange(logits.shape[1], device=logits.device) >= len(sample.units)
            rows.append(logits[i % size].masked_fill(beyond, -torch.inf))
        return torch.stack(rows)

    def extend_target_description(self, sample: Sample, target: Target, description: dict[str, Any]) -> dict[str, Any]:
        if target.function is not None:
            return description
        assert isinstance(sample, QASample)
        names, place = sample.units.names, self.find_readout_row(sample, target)
        name = names[place]
        if isinstance(target.spec, AnswerSpan) and isinstance(target.spec.against, int):
            name = f"{name} − {names[target.spec.against]}"
        answer = {"answer": _extract_span_text(sample.units, *sample.answer_span), "found": sample.has_answer}
        return description | {"name": f"{target.position}: {name}", "token": names[place], **answer}

    def label_index(self, label: str | int) -> int:
        return int(label)

    def label_name(self, index: int) -> str:
        return f"token {index}"


def _find_token_index(units: Units, place: int | str) -> int:
    """A token by number, or by the word that it starts."""
    if isinstance(place, int):
        if not -len(units) <= place < len(units):
            raise InputError(f"token {place} does not exist: the text has {len(units)} tokens, counted from 0")
        return place % len(units)
    words, parents = units.merge("word")
    fits = [i for i, name in enumerate(words.names) if name == place and not words.special[i]]
    fits = fits or [i for i, name in enumerate(words.names) if name.casefold() == place.casefold()]
    firsts = [int((parents == i).nonzero()[0][0]) for i in fits]
    if len(firsts) != 1:
        where = ", ".join(map(str, firsts))
        found = (
            f"occurs several times: choose one occurrence, as in TokenLabel({firsts[0]}) … (tokens {where})"
            if firsts
            else "does not occur in the text"
        )
        raise InputError(f"{place!r} must name one word of the text, but it {found}")
    return firsts[0]


def _mark_context_tokens(units: Units) -> list[bool]:
    """Which tokens belong to the text that answers: the second of two, or all that are not special."""
    inside = [not special for special in units.special]
    if units.segments is None or len(units.texts) < 2:
        return inside
    return [here and segment == 1 for here, segment in zip(inside, units.segments, strict=True)]


def _find_answer_span(units: Units, label: str | int) -> tuple[int, int]:
    """The first and the last token of an answer, given by the number of a token or in words."""
    if isinstance(label, int):
        if not 0 <= label < len(units):
            raise InputError(f"token {label} does not exist: the text has {len(units)} tokens, counted from 0")
        return label, label
    if units.offsets is None or len(units.texts) < 2:
        raise InputError("an answer given as words requires the text: pass (question, text), or the index of a token")
    start = units.texts[1].find(label)
    inside = [i for i, here in enumerate(_mark_context_tokens(units)) if here]
    within = [i for i in inside if units.offsets[i][0] < start + len(label) and units.offsets[i][1] > start]
    if start < 0 or not within:
        raise InputError(f"{label!r} does not occur in the text: pass words of the text, or the index of a token")
    return within[0], within[-1]


def _extract_span_text(units: Units, first: int, last: int) -> str:
    if units.offsets is None or not units.texts:
        return " ".join(units.names[first : last + 1])
    segment = 0 if units.segments is None else units.segments[first]
    return units.texts[segment][units.offsets[first][0] : units.offsets[last][1]]
