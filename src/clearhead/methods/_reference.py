"""References: what an input is held against, operation by operation, and what a method is shown then."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods.base import Fold

#: Whose multipliers: by our rules, steadied or as they are, or by captum's own code.
Multipliers = Literal["steady", "plain", "captum"]


@dataclass(frozen=True)
class Reference:
    """One reference: a baseline by name (None for the one that is safe for the model), or the `draw`-th random one."""

    baseline: str | None = None
    draw: int | None = None


@dataclass
class Held:
    """What one reference shows: the way from it to the input, the multipliers, and the target's value there."""

    reference: Reference
    way: "dict[str, Float[Tensor, 'batch unit feature']]"
    multipliers: "dict[str, Float[Tensor, 'batch unit feature']]"
    value: Float[Tensor, "batch"]


class ReferenceFold(Fold):
    """Base of every method of the kind "reference"."""

    #: Whether softmax and norms whose sides are far apart have steadied multipliers (`backward_rules/deeplift.py`).
    steady: bool = True
    #: Whether captum's own code computes the multipliers, which has no rule that could be steadied.
    captum: bool = False
    #: What the scores of this axis add up to; those of all axes together should be y(x) − the base value.
    explained: Float[Tensor, "batch"]
    base_value: Float[Tensor, "batch"]

    @property
    def multipliers(self) -> Multipliers:
        if self.captum and not self.steady:
            raise InputError(
                "steady=False is of our rules; captum has none for softmax and norms: leave one of the two"
            )
        return "captum" if self.captum else "steady" if self.steady else "plain"

    def references(self) -> Iterable[Reference]:
        """What the input is to be held against."""
        raise NotImplementedError

    def at(self, held: Held) -> None:
        """Fold one reference into the state."""
        raise NotImplementedError
