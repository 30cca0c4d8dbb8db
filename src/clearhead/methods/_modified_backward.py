"""Base classes of methods that modify the backward pass by propagation rules (LRP, AttnLRP)."""

from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from clearhead.backward_rules.base import RuleSet
from clearhead.capture.tape import Tape
from clearhead.methods.base import AttributionMethod, CrossStreamMethod, MethodScores

LRP_PATENT_NOTE = (
    "Others claim patents on layer-wise relevance propagation: the documentation of LXT, an implementation of AttnLRP, "
    "states that LRP is patented, and free of charge for personal and scientific use only. The licence of clearhead "
    "covers its code and grants no rights that others hold."
)


class ModifiedBackwardMixin:
    """Interface between a method and the modified backward pass."""

    #: Whether the method also needs the standard gradient of the same calls, which costs another pass.
    needs_standard_gradient: ClassVar[bool] = False

    @property
    def rule_set(self) -> RuleSet:
        """The propagation rules to use with these options."""
        raise NotImplementedError


class ModifiedBackwardMethod(ModifiedBackwardMixin, AttributionMethod):
    """Base class of methods that read a modified backward pass.

    `call.relevance` and `tape.input_gradient` hold the relevance that the rules propagate to attention and inputs.
    """


class ModifiedGradientMethod(ModifiedBackwardMethod):
    """Base class of methods that multiply inputs with a modified gradient."""

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r_i = Σ_k x_ik · g_ik with the modified gradient g."""
        assert tape.inputs is not None and tape.input_gradient is not None
        stream = self.unit_context.stream
        return MethodScores((tape.inputs[stream] * tape.input_gradient[stream]).sum(-1)[:, None])


class BaselineDifferenceMethod(ModifiedBackwardMethod):
    """Base class of methods that multiply the difference from a baseline with a modified gradient.

    The model is not run at the baseline.

    Attributes:
        baseline: The baseline x′ by name; None for the default of the model.
        input_delta: x − x′ of each unit, which the pass sets.
    """

    baseline: str | None = None
    input_delta: Float[Tensor, "batch unit feature"]

    def compute_scores(self, tape: Tape) -> MethodScores:
        """r_i = Σ_k (x_ik − x′_ik) · g_ik with the modified gradient g."""
        assert tape.input_gradient is not None
        return MethodScores((self.input_delta * tape.input_gradient[self.unit_context.stream]).sum(-1)[:, None])


class CrossStreamModifiedBackwardMethod(ModifiedBackwardMixin, CrossStreamMethod):
    """Base class of the variants of these methods for models whose streams attend to each other."""
