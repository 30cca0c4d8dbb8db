"""Base class of DeepLIFT methods: they compare an input with a reference input, operation by operation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods.base import AttributionMethod

#: Where multipliers come from: clearhead's rules with stabilised or closed forms, or captum's code.
MultiplierSource = Literal["steady", "plain", "captum"]


@dataclass(frozen=True)
class ReferenceInput:
    """One reference input.

    Attributes:
        baseline: The baseline by name; None for the default of the model.
        sample_index: Number of the random reference, if it is a random one.
    """

    baseline: str | None = None
    sample_index: int | None = None


@dataclass
class ReferenceResult:
    """Result for one reference.

    Attributes:
        reference: The reference.
        input_delta: x − x′ for each unit, by stream.
        multipliers: The multipliers of each unit, by stream.
        target_value: y(x′).
    """

    reference: ReferenceInput
    input_delta: "dict[str, Float[Tensor, 'batch unit feature']]"
    multipliers: "dict[str, Float[Tensor, 'batch unit feature']]"
    target_value: Float[Tensor, "batch"]


class ReferenceMethod(AttributionMethod):
    """Base class of methods with `pass_type=PassType.REFERENCE`.

    Attributes:
        steady: Whether softmax and norms use stabilised multipliers where input and reference are far apart
            (`backward_rules/deeplift.py`).
        captum: Whether captum's code computes the multipliers; it has no rules for softmax and norms.
        attributed_total: Sum of the scores of this stream; over all streams the sums should add to y(x) − base value.
        base_value: The target at the reference, or its mean over the references.
    """

    steady: bool = True
    captum: bool = False
    attributed_total: Float[Tensor, "batch"]
    base_value: Float[Tensor, "batch"]

    @property
    def multiplier_source(self) -> MultiplierSource:
        """Where multipliers come from with these options."""
        if self.captum and not self.steady:
            raise InputError(
                "steady=False selects clearhead's closed forms for softmax and norms; captum=True has no rules for "
                "them: leave out one of the two"
            )
        if self.captum:
            return "captum"
        return "steady" if self.steady else "plain"

    def iter_references(self) -> Iterable[ReferenceInput]:
        """Return the references that the input is compared with."""
        raise NotImplementedError

    def on_reference(self, result: ReferenceResult) -> None:
        """Process the result of one reference."""
        raise NotImplementedError
