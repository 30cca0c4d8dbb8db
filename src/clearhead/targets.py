"""The number being explained: a named scalar function of a model's output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError, unknown

Scale = Literal["logit", "probability", "log-odds", "cosine"]
#: What classes are measured on; the similarity of two inputs is a cosine, or a logit made from it.
CLASS_SCALES = ("logit", "probability", "log-odds")
SCALES = (*CLASS_SCALES, "cosine")


class Labels(Protocol):
    """What a target needs to know about a subject."""

    multi_label: bool

    @property
    def masked(self) -> bool:
        """Whether the labels are words at a masked position."""
        ...

    def label_index(self, label: str | int) -> int: ...
    def label_name(self, index: int) -> str: ...


@dataclass(frozen=True)
class Predicted:
    """The class that the model finds most likely (the default)."""


@dataclass(frozen=True)
class Label:
    """A class by name or index."""

    label: str | int


@dataclass(frozen=True)
class Contrast:
    """Why `a` and not `b`: the difference of two classes or words. `a` may be None, for the predicted one.

    The value depends on the scale; z are the logits and p the probabilities:

    - "logit": z_a − z_b.
    - "probability": p_a − p_b.
    - "log-odds": the log-odds of `a` against `b`, with all other classes left aside. Where classes exclude one another
      (softmax), this is log(p_a / p_b). Where each class has a probability of its own (sigmoid, multi-label models), it
      is log(p_a (1 − p_b) / (p_b (1 − p_a))), the odds that `a` is present and `b` is not, against the reverse. Both
      equal z_a − z_b. It is not the difference of the log-odds of the two classes, log(p / (1 − p)), which for two
      classes is twice as large.

    Where a text has several masked positions, `mask` says which is meant.
    """

    a: str | int | None
    b: str | int
    mask: int | None = None


@dataclass(frozen=True)
class MaskedWord:
    """A word at one of several masked positions; leave out the word for the predicted one.

    A word is what stands after a space ("he" is RoBERTa's "Ġhe"); a piece inside a word goes by its own name ("##ing").
    """

    word: str | int | None = None
    mask: int = 0


@dataclass(frozen=True)
class Placed:
    """A class or word at one place of an answer that has many; leave out the label for the predicted one.

    With `against`, why this label and not that one. Its kinds differ in what their places are.
    """

    place: int | str | None = None
    label: str | int | None = None
    against: str | int | None = None

    kind: ClassVar[str] = "label"


class Generated(Placed):
    """The word at one step of a generated or given answer, counted from 0; without a step, all of them."""

    kind = "generated word"


class Query(Placed):
    """One object query of a detector; without a number, every object that was found."""

    kind = "detection"


class TokenLabel(Placed):
    """The label of one token; without a token, of every token that has one."""

    kind = "token label"


class Answer(Placed):
    """The "start" or the "end" of an answer in a text; without a place, both."""

    kind = "answer"


TargetLike = Predicted | Label | Contrast | MaskedWord | Placed | str | int | Callable[[Any], Tensor] | None


@dataclass(frozen=True)
class Target:
    """A target made sure of: which classes, on which scale. `description` says what was really explained."""

    wanted: Predicted | Label | Contrast | MaskedWord | Placed | Callable[[Any], Tensor]
    scale: Scale = "logit"

    @property
    def custom(self) -> Callable[[Any], Tensor] | None:
        return self.wanted if callable(self.wanted) else None

    @property
    def mask(self) -> int | None:
        return self.wanted.mask if isinstance(self.wanted, MaskedWord | Contrast) else None

    @property
    def place(self) -> int | str | None:
        """Which place of an answer that has many."""
        return self.wanted.place if isinstance(self.wanted, Placed) else None

    def at(self, place: int | str, kind: type[Placed]) -> "Target":
        """The same target at one place."""
        match self.wanted:
            case Placed(_, label, against):
                return Target(kind(place, label, against), self.scale)
            case Label(label):
                return Target(kind(place, label), self.scale)
            case Contrast(a, b):
                return Target(kind(place, a, b), self.scale)
            case Predicted():
                return Target(kind(place), self.scale)
            case _:
                return self

    def classes(self, scores: Float[Tensor, "label"], labels: Labels) -> tuple[int, int | None]:
        """The class explained, and the one it is held against."""

        def index(label: str | int | None) -> int:
            if label is None:
                return int(scores.argmax())
            try:
                found = labels.label_index(label)
            except InputError:
                number = int(label) if str(label).isdigit() else -1
                if number not in range(len(scores)) or labels.label_name(number) != str(number):
                    raise
                return number  # a class that has no name
            if found >= len(scores):
                more = "its tokenizer knows more" if labels.masked else "its configuration (config.id2label) names more"
                raise InputError(f"label {label!r} has no score: the model has {len(scores)} labels, and {more}")
            return found

        match self.wanted:
            case Label(label):
                return index(label), None
            case MaskedWord(word):
                return index(word), None
            case Placed(_, label, None):
                return index(label), None
            case Contrast(a, b) | Placed(_, a, b):
                if index(a) == index(b):
                    raise InputError(f"a contrast of {labels.label_name(index(b))!r} with itself explains nothing")
                return index(a), index(b)
            case _:
                return index(None), None

    def pinned(self, scores: Float[Tensor, "label"], labels: Labels) -> "Target":
        """The same target with the classes that it has here, for other inputs: what is predicted there may differ."""
        return self if self.custom is not None else Pinned(self.wanted, self.scale, self.classes(scores, labels))

    def value(self, scores: Float[Tensor, "label"], labels: Labels) -> Float[Tensor, ""]:
        """The number for one sample."""
        return values_of(scores[None], [self.classes(scores, labels)], self.scale, labels.multi_label)[0]

    def description(
        self, scores: Float[Tensor, "label"] | None, labels: Labels, value: float, masks: int = 0
    ) -> dict[str, Any]:
        """What `Explanation.target` holds; `masks` is how many masked positions there are to count from the end of."""
        if callable(self.wanted) or scores is None:
            name = getattr(self.wanted, "__name__", type(self.wanted).__name__)
            return {"kind": "callable", "name": name, "scale": "as returned", "value": value}
        a, b = self.classes(scores, labels)
        said = {"kind": self._kind(labels.masked), "name": labels.label_name(a), "index": a}
        if b is not None:
            said |= {"name": f"{labels.label_name(a)} − {labels.label_name(b)}", "against": labels.label_name(b)}
        if self.place is not None:
            said["place"] = self.place
        if labels.masked:
            which = self.mask or 0
            said["mask"] = which + masks if which < 0 else which
        return said | {"scale": self.scale, "value": value}

    def _kind(self, masked: bool) -> str:
        match self.wanted:
            case Placed(_, _, None):
                return self.wanted.kind
            case Contrast() | Placed():
                return "contrast"
            case Predicted() | MaskedWord(None):
                return "predicted"
            case _:
                return "masked word" if masked else "label"


@dataclass(frozen=True)
class Pinned(Target):
    """A target whose classes were found on one input, for others like it: what is predicted there does not count."""

    found: tuple[int, int | None] = (0, None)

    def classes(self, scores: Float[Tensor, "label"], labels: Labels) -> tuple[int, int | None]:
        return self.found


def make_target(given: TargetLike, scale: str = "logit") -> Target:
    """Whatever the caller wrote, as a `Target`.

    >>> make_target("NEGATIVE").wanted
    Label(label='NEGATIVE')
    """
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    if given is None:
        return Target(Predicted(), scale)  # type: ignore[arg-type]
    if isinstance(given, Integral) and not isinstance(given, bool):  # numpy's whole numbers, too
        return Target(Label(int(given)), scale)
    if isinstance(given, str):
        return Target(Label(given), scale)  # type: ignore[arg-type]
    if isinstance(given, Predicted | Label | Contrast | MaskedWord | Placed) or (
        callable(given) and not isinstance(given, type)
    ):
        return Target(given, scale)  # type: ignore[arg-type]
    raise InputError(
        f"target={given!r} is no target: give a label, an index, clearhead.Contrast(a, b), "
        "clearhead.MaskedWord(word, mask), clearhead.Generated(step) or a function of the model's output"
    )


def probabilities(scores: Float[Tensor, "label"], multi_label: bool) -> Float[Tensor, "label"]:
    return scores.sigmoid() if multi_label else scores.softmax(-1)


def values_of(
    scores: Float[Tensor, "batch label"], classes: Sequence[tuple[int, int | None]], scale: str, multi_label: bool
) -> Float[Tensor, "batch"]:
    """The value of each sample's target on a scale.

    Args:
        scores: The logits.
        classes: For each sample, the class that is explained and the one that it is contrasted with, if any.
        scale: "logit", "probability" or "log-odds"; `Contrast` says what each means for two classes.
        multi_label: Whether each class has a probability of its own (sigmoid), or all of them sum to one (softmax).
    """
    if scale == "probability":
        scores = probabilities(scores, multi_label)
    index = torch.tensor([[a, a if b is None else b] for a, b in classes], device=scores.device)
    against = torch.tensor([b is not None for _, b in classes], device=scores.device)
    # a sigmoid's log-odds are its logit; so are those of one softmax class against another, but not against all others
    of_one_class = _log_odds if scale == "log-odds" and not multi_label else _at
    number = of_one_class(scores, index[:, :1])
    if any(b is not None for _, b in classes):
        number = torch.where(against, _at(scores, index[:, :1]) - _at(scores, index[:, 1:]), number)
    return number


def _at(scores: Float[Tensor, "batch label"], index: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch"]:
    return scores.gather(1, index)[:, 0]


def _log_odds(scores: Float[Tensor, "batch label"], index: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch"]:
    """log p − log(1 − p) of one class of a softmax, without computing p."""
    return _at(scores, index) - scores.scatter(1, index, -torch.inf).logsumexp(-1)
