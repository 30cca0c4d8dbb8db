"""References: what an input is held against, operation by operation, and what a method is shown then."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from clearhead.methods.base import Fold


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

    #: Whether captum's own code computes the multipliers.
    captum: bool = False
    #: What the scores of this axis add up to; those of all axes together should be y(x) − the base value.
    explained: Float[Tensor, "batch"]
    base_value: Float[Tensor, "batch"]

    def references(self) -> Iterable[Reference]:
        """What the input is to be held against."""
        raise NotImplementedError

    def at(self, held: Held) -> None:
        """Fold one reference into the state."""
        raise NotImplementedError
