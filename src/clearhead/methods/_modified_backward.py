"""Base classes of methods that modify the backward pass by propagation rules (LRP, AttnLRP)."""

from typing import ClassVar

from clearhead.backward_rules.base import RuleSet
from clearhead.methods.base import AttributionMethod, CrossStreamMethod

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


class CrossStreamModifiedBackwardMethod(ModifiedBackwardMixin, CrossStreamMethod):
    """Base class of the variants of these methods for models whose streams attend to each other."""
