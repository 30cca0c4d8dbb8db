"""What methods of the kind "rules" have in common."""

from typing import ClassVar

from clearhead.methods.base import AcrossFold, Fold
from clearhead.rules.family import Family

PATENTS = "Others claim patents on layer-wise relevance propagation: whether your use is allowed is yours to find out."


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
