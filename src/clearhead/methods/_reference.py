"""Base class of DeepLIFT methods: they compare an input with a reference input, operation by operation."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.deeplift import RuleForm
from clearhead.errors import InputError
from clearhead.methods.base import AttributionMethod

#: Where multipliers come from: clearhead's rules in one of their forms, or captum's code.
MultiplierSource = RuleForm | Literal["captum"]


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
        rules: The form of the rules of softmax and norms (`backward_rules/deeplift.py`).
        captum: Whether captum's code computes the multipliers; it has no rules for softmax and norms.
        attributed_total: Sum of the scores of this stream; over all streams the sums should add to y(x) − base value.
        base_value: The target at the reference, or its mean over the references.
    """

    rules: RuleForm = "path"
    captum: bool = False
    attributed_total: Float[Tensor, "batch"]
    base_value: Float[Tensor, "batch"]

    @property
    def multiplier_source(self) -> MultiplierSource:
        """Where multipliers come from with these options."""
        if self.captum and self.rules != "path":
            raise InputError(
                f"rules={self.rules!r} selects clearhead's rules of softmax and norms; captum=True has no rules for "
                "them: leave out one of the two"
            )
        return "captum" if self.captum else self.rules

    def iter_references(self) -> Iterable[ReferenceInput]:
        """Return the references that the input is compared with.

        Returns:
            The references in the order of evaluation.
        """
        raise NotImplementedError

    def on_reference(self, result: ReferenceResult) -> None:
        """Process the result of one reference.

        Args:
            result: Multipliers and input vectors of one reference, in the order of `iter_references`.
        """
        raise NotImplementedError
