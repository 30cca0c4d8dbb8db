"""Base class of methods that combine the scores of other methods."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.methods.base import AttributionMethod, Method

#: Scores by stream.
StreamScores = Mapping[str, Float[Tensor, "batch row unit"]]


class CombinedMethod(AttributionMethod):
    """Base class of methods with `pass_type=PassType.COMBINED`.

    The components are run as if they had been requested in the same call. One that does not apply to a model is left
    out, and the provenance says so.
    """

    @classmethod
    def get_components(cls, options: Mapping[str, Any]) -> tuple[Method, ...]:
        """Return the methods whose scores are combined with these options.

        Args:
            options: The options that were set; those not listed have their defaults.

        Returns:
            At least two methods, in the order in which their scores are stored.
        """
        raise NotImplementedError

    @classmethod
    def combine(
        cls, component_scores: Mapping[str, StreamScores], valid_masks: Mapping[str, Bool[Tensor, "batch unit"]]
    ) -> dict[str, Float[Tensor, "batch row unit"]]:
        """Return the combined scores of each stream.

        Args:
            component_scores: The scores of each component that applies, by the name of its method.
            valid_masks: For each stream, the units that are not padding.

        Returns:
            Scores by stream, zero for padding.
        """
        raise NotImplementedError
