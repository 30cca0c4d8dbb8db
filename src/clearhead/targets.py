"""Targets: the scalar functions of a model's output that are explained.

`Predicted`, `Label`, `Contrast` and `MaskedToken` name classes; `GeneratedToken`, `DetectionQuery`, `TokenLabel` and
`AnswerSpan` also name a position of the output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.errors import InputError, unknown_value_error

Scale = Literal["logit", "probability", "log-odds", "cosine"]
#: Scales of class scores. The similarity of two inputs is measured as a cosine, or as a logit computed from it.
CLASS_SCALES = ("logit", "probability", "log-odds")
SCALES = (*CLASS_SCALES, "cosine")


class LabelLookup(Protocol):
    """The label functions of a model adapter that targets need.

    Attributes:
        multi_label: Whether each class has its own probability (sigmoid), or all of them sum to one (softmax).
    """

    multi_label: bool

    @property
    def masked(self) -> bool:
        """Whether the labels are tokens at a masked position."""
        ...

    def label_index(self, label: str | int) -> int:
        """Return the class index of a label name or index.

        Args:
            label: Name of the class, or its index as an integer or in digits.

        Returns:
            The index, from 0.

        Raises:
            InputError: If there is no such class.

        Example:
            >>> ex.adapter.label_index("positive")  # "POSITIVE" in the configuration  # doctest: +SKIP
            1
        """
        ...

    def label_name(self, index: int) -> str:
        """Return the name of a class.

        Args:
            index: Index of the class.

        Returns:
            Its name; the index in digits for a class without a name.

        Example:
            >>> ex.adapter.label_name(1)  # doctest: +SKIP
            'POSITIVE'
        """
        ...


@dataclass(frozen=True)
class Predicted:
    """Target: the class with the highest probability (the default).

    Example:
        >>> ex.explain("A wonderful film", target=Predicted())  # doctest: +SKIP
    """


@dataclass(frozen=True)
class Label:
    """Target: a class by name or index. A plain string or integer as `target=` means the same.

    Attributes:
        label: Name or index of the class.

    Example:
        >>> ex.explain("A wonderful film", target=Label("positive"))  # doctest: +SKIP
    """

    label: str | int


@dataclass(frozen=True)
class Contrast:
    """Target: the difference between two classes or tokens, which explains why the model predicts `a` and not `b`.

    The value depends on the scale; z are the logits and p the probabilities:

    - "logit": z_a − z_b.
    - "probability": p_a − p_b.
    - "log-odds": the log-odds of `a` against `b`, ignoring all other classes. Where classes exclude one another
      (softmax), this is log(p_a / p_b). Where each class has its own probability (sigmoid, multi-label models), it is
      log(p_a (1 − p_b) / (p_b (1 − p_a))), the odds that `a` is present and `b` is not, against the reverse. Both
      equal z_a − z_b. It is not the difference of the log-odds of the two classes, log(p / (1 − p)), which for two
      classes is twice as large.

    Attributes:
        a: Name or index of the first class, or None for the predicted one.
        b: Name or index of the second class.
        mask_index: Which masked position, where a text has several; negative values count from the end.

    Example:
        >>> ex.explain("A wonderful film", target=Contrast("positive", "negative"))  # doctest: +SKIP
    """

    a: str | int | None
    b: str | int
    mask_index: int | None = None


@dataclass(frozen=True)
class MaskedToken:
    """Target: a token at a masked position of a masked language model.

    A token name means the token after a space ("he" is RoBERTa's "Ġhe"); a token inside a word has its own name
    ("##ing").

    Attributes:
        token: Name or id of the token, or None for the predicted one.
        mask_index: Which masked position, where a text has several; negative values count from the end.

    Example:
        >>> ex.explain("Paris is the [MASK] of France", target=MaskedToken("capital"))  # doctest: +SKIP
    """

    token: str | int | None = None
    mask_index: int = 0


@dataclass(frozen=True)
class PositionTarget:
    """Base of targets at one position of an output that has many, such as a generated token.

    Attributes:
        position: Index or name of the position, or None for all positions.
        label: Name or index of the class or token, or None for the predicted one.
        against: A second class; the target is then the difference of the two.
        target_type: The "kind" of the target's description.
        noun: What a position is called in messages.
    """

    position: int | str | None = None
    label: str | int | None = None
    against: str | int | None = None

    target_type: ClassVar[str] = "label"
    noun: ClassVar[str] = "position"


class GeneratedToken(PositionTarget):
    """Target: one token of a generated or given continuation.

    Attributes:
        position: Index of the token in the continuation, from 0, or None for all tokens.
        label: Name or id of the token to explain there, or None for the generated one.
        against: A second token; the target is then the difference of the two.

    Example:
        >>> ex.explain("Paris is the capital of", target=GeneratedToken(0))  # doctest: +SKIP
    """

    target_type = "generated_token"
    noun = "generated token"


class DetectionQuery(PositionTarget):
    """Target: one object query of a detector.

    Attributes:
        position: Index of the query, or None for every detected object.
        label: Name or index of the class, or None for the predicted one.
        against: A second class; the target is then the difference of the two.

    Example:
        >>> ex.explain(image="cats.jpg", target=DetectionQuery(3, "cat"))  # doctest: +SKIP
    """

    target_type = "detection"
    noun = "object query"


class TokenLabel(PositionTarget):
    """Target: the label of one token of a token classifier.

    Attributes:
        position: Index of the token, or None for every token with a label.
        label: Name or index of the label, or None for the predicted one.
        against: A second label; the target is then the difference of the two.

    Example:
        >>> ex.explain("Angela lives in Berlin", target=TokenLabel(4, "B-LOC"))  # doctest: +SKIP
    """

    target_type = "token_label"
    noun = "label of token"


class AnswerSpan(PositionTarget):
    """Target: the start or end of the answer of an extractive question-answering model.

    Attributes:
        position: "start", "end", or None for both.
        label: Index of the token to explain, or None for the predicted one.
        against: A second token; the target is then the difference of the two.

    Example:
        >>> ex.explain(("Who is in Berlin?", "Angela is in Berlin."), target=AnswerSpan("start"))  # doctest: +SKIP
    """

    target_type = "answer"
    noun = "answer position"


TargetLike = Predicted | Label | Contrast | MaskedToken | PositionTarget | str | int | Callable[[Any], Tensor] | None


def describe_spec(spec: Any) -> str:
    """Return a target as it is named in error messages of Python and of the command line.

    Args:
        spec: The target as given by the caller.

    Returns:
        A noun phrase without class names.

    Example:
        >>> describe_spec(GeneratedToken(2)), describe_spec(Contrast("cat", "dog"))
        ('the generated token 2', "the contrast of 'cat' and 'dog'")
    """
    match spec:
        case PositionTarget(None):
            return f"every {spec.noun}"
        case PositionTarget(position):
            return f"the {spec.noun} {position}"
        case MaskedToken(None):
            return "the masked token"
        case MaskedToken(token):
            return f"the masked token {token!r}"
        case Contrast(None, b):
            return f"the contrast of the prediction and {b!r}"
        case Contrast(a, b):
            return f"the contrast of {a!r} and {b!r}"
        case Label(label):
            return f"the label {label!r}"
        case Predicted():
            return "the prediction"
    return repr(spec)


@dataclass(frozen=True)
class Target:
    """A validated target with its scale; computes the value that is explained.

    Attributes:
        spec: The target as given by the caller.
        scale: "logit", "probability", "log-odds" or "cosine".
    """

    spec: Predicted | Label | Contrast | MaskedToken | PositionTarget | Callable[[Any], Tensor]
    scale: Scale = "logit"

    @property
    def function(self) -> Callable[[Any], Tensor] | None:
        """The function of the model output, if the target is one."""
        if callable(self.spec):
            return self.spec
        return None

    @property
    def mask_index(self) -> int | None:
        """Which masked position is explained, where a text has several."""
        if isinstance(self.spec, MaskedToken | Contrast):
            return self.spec.mask_index
        return None

    @property
    def position(self) -> int | str | None:
        """The position in an output that has many."""
        if isinstance(self.spec, PositionTarget):
            return self.spec.position
        return None

    def at_position(self, position: int | str, target_class: type[PositionTarget]) -> "Target":
        """Return the same target at one position of the output.

        Args:
            position: Index or name of the position.
            target_class: The type of position that the model has.

        Returns:
            A new target; a function or masked token is returned unchanged.

        Example:
            >>> make_target("B-LOC").at_position(4, TokenLabel).spec
            TokenLabel(position=4, label='B-LOC', against=None)
        """
        match self.spec:
            case PositionTarget(_, label, against):
                return Target(target_class(position, label, against), self.scale)
            case Label(label):
                return Target(target_class(position, label), self.scale)
            case Contrast(a, b):
                return Target(target_class(position, a, b), self.scale)
            case Predicted():
                return Target(target_class(position), self.scale)
            case _:
                return self

    def find_classes(self, scores: Float[Tensor, "label"], labels: LabelLookup) -> tuple[int, int | None]:
        """Return the index of the explained class, and of the class that it is contrasted with.

        Args:
            scores: The logits of one sample.
            labels: Looks up class names, usually the model adapter.

        Returns:
            The two indices; the second is None unless the target is a contrast.

        Raises:
            InputError: If a label does not exist, has no score, or is contrasted with itself.

        Example:
            >>> target = make_target(Contrast("positive", "negative"))
            >>> target.find_classes(torch.tensor([3.0, 0.0]), ex.adapter)  # doctest: +SKIP
            (1, 0)
        """

        def find_index(label: str | int | None) -> int:
            if label is None:
                return int(scores.argmax())
            try:
                index = labels.label_index(label)
            except InputError:
                number = int(label) if str(label).isdigit() else -1
                if number not in range(len(scores)) or labels.label_name(number) != str(number):
                    raise
                return number  # a class without a name
            if index >= len(scores):
                source = "its tokenizer" if labels.masked else "its configuration (config.id2label)"
                raise InputError(
                    f"label {label!r} has no score: the model outputs {len(scores)} scores, but {source} names more "
                    "labels"
                )
            return index

        match self.spec:
            case Label(label) | MaskedToken(label) | PositionTarget(_, label, None):
                return find_index(label), None
            case Contrast(a, b) | PositionTarget(_, a, b):
                first = find_index(a)
                second = find_index(b)
                if first == second:
                    raise InputError(
                        f"cannot contrast {labels.label_name(second)!r} with itself: use two different labels"
                    )
                return first, second
            case _:
                return find_index(None), None

    def with_fixed_classes(self, scores: Float[Tensor, "label"], labels: LabelLookup) -> "Target":
        """Fix the classes found on this input, to explain other inputs for which the prediction may differ.

        Args:
            scores: The logits of one sample.
            labels: Looks up class names.

        Returns:
            A target with fixed classes; a function is returned unchanged.

        Raises:
            InputError: If a label does not exist, has no score, or is contrasted with itself.

        Example:
            >>> target = make_target(None).with_fixed_classes(torch.tensor([0.1, 2.0]), ex.adapter)  # doctest: +SKIP
            >>> target.find_classes(torch.tensor([3.0, 0.0]), ex.adapter)  # doctest: +SKIP
            (1, None)
        """
        if self.function is not None:
            return self
        return FixedClassTarget(self.spec, self.scale, self.find_classes(scores, labels))

    def compute_value(self, scores: Float[Tensor, "label"], labels: LabelLookup) -> Float[Tensor, ""]:
        """Compute the target's value for one sample.

        Args:
            scores: The logits of the sample.
            labels: Looks up class names.

        Returns:
            A scalar that depends differentiably on the logits.

        Raises:
            InputError: If a label does not exist, has no score, or is contrasted with itself.

        Example:
            >>> make_target(None, "probability").compute_value(torch.tensor([0.0, 0.0]), ex.adapter)  # doctest: +SKIP
            tensor(0.5000)
        """
        return compute_class_target_values(
            scores[None], [self.find_classes(scores, labels)], self.scale, labels.multi_label
        )[0]

    def describe(
        self, scores: Float[Tensor, "label"] | None, labels: LabelLookup, value: float, num_masks: int = 0
    ) -> dict[str, Any]:
        """Return the description of the target for `Explanation.target`.

        Args:
            scores: The logits of the sample, if the model has classes.
            labels: Looks up class names.
            value: The computed value of the target.
            num_masks: Number of masked positions, from whose end a negative `mask_index` counts.

        Returns:
            A dict with "kind", "name", "scale", "value" and, depending on the target, "index", "against", "position"
            and "mask".

        Example:
            >>> make_target(len).describe(None, labels=None, value=3.0)  # a function, called `len`
            {'kind': 'callable', 'name': 'len', 'scale': 'as_returned', 'value': 3.0}
        """
        if callable(self.spec) or scores is None:
            name = getattr(self.spec, "__name__", type(self.spec).__name__)
            return {"kind": "callable", "name": name, "scale": "as_returned", "value": value}
        a, b = self.find_classes(scores, labels)
        description = {"kind": self._describe_type(labels.masked), "name": labels.label_name(a), "index": a}
        if b is not None:
            description["name"] = f"{labels.label_name(a)} − {labels.label_name(b)}"
            description["against"] = labels.label_name(b)
        if self.position is not None:
            description["position"] = self.position
        if labels.masked:
            mask_index = self.mask_index or 0
            if mask_index < 0:
                mask_index += num_masks
            description["mask"] = mask_index
        return description | {"scale": self.scale, "value": value}

    def _describe_type(self, masked: bool) -> str:
        """Return the "kind" of the target's description; position targets name their own."""
        match self.spec:
            case PositionTarget(_, _, None):
                return self.spec.target_type
            case Contrast() | PositionTarget():
                return "contrast"
            case Predicted() | MaskedToken(None):
                return "predicted"
            case _:
                return "masked_token" if masked else "label"


@dataclass(frozen=True)
class FixedClassTarget(Target):
    """A target with fixed classes, so that perturbed or similar inputs are explained for the same prediction.

    Attributes:
        fixed_classes: Index of the explained class, and of the one that it is contrasted with, or None.

    Example:
        >>> FixedClassTarget(Predicted(), "logit", (1, None)).find_classes(torch.tensor([3.0, 0.0]), labels=None)
        (1, None)
    """

    fixed_classes: tuple[int, int | None] = (0, None)

    def find_classes(self, scores: Float[Tensor, "label"], labels: LabelLookup) -> tuple[int, int | None]:
        """Return the fixed classes, whatever the scores.

        Args:
            scores: The logits of one sample; not used.
            labels: Not used.

        Returns:
            Index of the explained class, and of the one that it is contrasted with, or None.
        """
        return self.fixed_classes


def make_target(spec: TargetLike, scale: str = "logit") -> Target:
    """Convert the value of `target=` to a `Target`.

    Args:
        spec: A label, a class index, a target class, a function of the model output, or None for the prediction.
        scale: The scale of the target's value.

    Returns:
        The target.

    Raises:
        InputError: If the value is not a target, or the scale is unknown.

    Example:
        >>> make_target("NEGATIVE").spec
        Label(label='NEGATIVE')
    """
    if scale not in SCALES:
        raise unknown_value_error("scale", scale, SCALES)
    if spec is None:
        return Target(Predicted(), scale)  # type: ignore[arg-type]
    if isinstance(spec, Integral) and not isinstance(spec, bool):  # includes numpy integers
        return Target(Label(int(spec)), scale)
    if isinstance(spec, str):
        return Target(Label(spec), scale)  # type: ignore[arg-type]
    if isinstance(spec, Predicted | Label | Contrast | MaskedToken | PositionTarget) or (
        callable(spec) and not isinstance(spec, type)
    ):
        return Target(spec, scale)  # type: ignore[arg-type]
    raise InputError(
        f"target={spec!r} is not a target: pass a label, an index, clearhead.Contrast(a, b), "
        "clearhead.MaskedToken(token, mask_index), clearhead.GeneratedToken(step) or a function of the model's output"
    )


def compute_probabilities(scores: Float[Tensor, "label"], multi_label: bool) -> Float[Tensor, "label"]:
    """Convert logits to probabilities: sigmoid for multi-label models, softmax otherwise.

    Args:
        scores: The logits, classes last.
        multi_label: Whether each class has its own probability.

    Returns:
        Probabilities of the same shape.

    Example:
        >>> compute_probabilities(torch.zeros(4), multi_label=False)
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
        >>> compute_probabilities(torch.zeros(4), multi_label=True)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if multi_label:
        return scores.sigmoid()
    return scores.softmax(-1)


def compute_class_target_values(
    scores: Float[Tensor, "batch label"], classes: Sequence[tuple[int, int | None]], scale: str, multi_label: bool
) -> Float[Tensor, "batch"]:
    """Compute the target value of each sample of a batch.

    Args:
        scores: The logits.
        classes: For each sample, the explained class and the one that it is contrasted with, if any.
        scale: "logit", "probability" or "log-odds". See `Contrast` for their meaning for two classes.
        multi_label: Whether each class has its own probability (sigmoid), or all of them sum to one (softmax).

    Returns:
        One value per sample.

    Example:
        >>> scores = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> compute_class_target_values(scores, [(0, 1), (2, None)], "logit", multi_label=False)
        tensor([2., 0.])
    """
    if scale == "probability":
        scores = compute_probabilities(scores, multi_label)
    index = torch.tensor([[a, a if b is None else b] for a, b in classes], device=scores.device)
    is_contrast = torch.tensor([b is not None for _, b in classes], device=scores.device)
    if scale == "log-odds" and not multi_label:
        values = _compute_log_odds(scores, index[:, :1])
    else:  # the log-odds of a sigmoid are its logit
        values = _gather_class_scores(scores, index[:, :1])
    if any(b is not None for _, b in classes):
        # the log-odds of one softmax class against one other are the difference of their logits
        differences = _gather_class_scores(scores, index[:, :1]) - _gather_class_scores(scores, index[:, 1:])
        values = torch.where(is_contrast, differences, values)
    return values


def _gather_class_scores(scores: Float[Tensor, "batch label"], index: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch"]:
    """Return the score of one class per sample."""
    return scores.gather(1, index)[:, 0]


def _compute_log_odds(scores: Float[Tensor, "batch label"], index: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch"]:
    """log p − log(1 − p) of one class of a softmax, without computing p."""
    return _gather_class_scores(scores, index) - scores.scatter(1, index, -torch.inf).logsumexp(-1)
