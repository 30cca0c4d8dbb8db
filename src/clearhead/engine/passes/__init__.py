"""How the model is run for methods: one strategy per pass type, and the clean pass that several of them share."""

from clearhead.engine.passes.base import PassStrategy
from clearhead.engine.passes.clean import TapeStrategy
from clearhead.engine.passes.intervention import InterventionStrategy
from clearhead.engine.passes.modified_backward import ModifiedBackwardStrategy
from clearhead.engine.passes.path import PathStrategy
from clearhead.engine.passes.perturbation import PerturbationStrategy
from clearhead.engine.passes.reference import ReferenceStrategy
from clearhead.methods.pass_type import PassType

#: The strategy of each pass type.
STRATEGIES: dict[PassType, PassStrategy] = {
    strategy.pass_type: strategy
    for strategy in (
        TapeStrategy(),
        PathStrategy(),
        ModifiedBackwardStrategy(),
        ReferenceStrategy(),
        InterventionStrategy(),
        PerturbationStrategy(),
    )
}
