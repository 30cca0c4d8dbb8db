"""`PassType`: the kinds of passes that methods declare. Each has a strategy in `engine/passes`, which runs it."""

from enum import Enum


class PassType(Enum):
    """How the model must be run for a method.

    Attributes:
        TAPE: One forward pass, and one backward pass if gradients are required.
        PATH: Passes at points between a baseline and the input, or at noisy inputs.
        MODIFIED_BACKWARD: A backward pass under propagation rules.
        REFERENCE: A pass at the input and one at each reference input, compared operation by operation.
        INTERVENTION: A forward pass in which layers are run again with parts of them replaced.
        PERTURBATION: Forward passes with parts of the input masked.
        COMBINED: No passes of its own, but those of the methods that it combines.
    """

    TAPE = "tape"
    PATH = "path"
    MODIFIED_BACKWARD = "modified backward"
    REFERENCE = "reference"
    INTERVENTION = "intervention"
    PERTURBATION = "perturbation"
    COMBINED = "combined"

    @property
    def materialises_attention(self) -> bool:
        """Whether attention is computed by eager operations, which rules and interventions can replace."""
        return self in (PassType.MODIFIED_BACKWARD, PassType.REFERENCE, PassType.INTERVENTION)
