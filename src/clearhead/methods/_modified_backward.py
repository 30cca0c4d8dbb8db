"""What methods of the kind "rules" have in common."""

from typing import ClassVar

from clearhead.backward_rules.base import Family
from clearhead.methods.base import AcrossFold, Fold

PATENTS = (
    "Others claim patents on layer-wise relevance propagation: the documentation of LXT, an implementation of AttnLRP, "
    "says that LRP is patented, and free of charge for personal and scientific use only. The licence of clearhead is "
    "about its code, and grants no rights that others hold."
)


class ByRules:
    """What a pass under rules asks of a method."""

    #: Whether it is handed the ordinary gradient of the same calls, too, which costs another pass.
    beside: ClassVar[bool] = False

    @property
    def family(self) -> Family:
        """The rules, with these options."""
        raise NotImplementedError


class UnderRules(ByRules, Fold):
    """A fold over a pass under rules: `call.relevance` and `tape.input_gradient` are what arrives under them."""


class UnderRulesAcross(ByRules, AcrossFold):
    """The same where streams look at each other."""
