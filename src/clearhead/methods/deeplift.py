"""DeepLIFT: the difference between the input and a reference, carried back operation by operation.

    r_i = Σ_k (x_ik − x′_ik) · m_ik          Σ_i r_i = y(x) − y(x′)

x_i is a token's word embedding, or the pixels of a patch; m are multipliers, chained as gradients are. Each operation
has some with Σ m · Δin = Δout, exactly: Δf/Δz for functions of one number, and closed forms for products (attention,
gated units), quotients, softmax and norms (`backward_rules/deeplift.py`). So the scores add up on transformers, too;
how far they are from it (`completeness_gap`) is in the certificate. The class is the one that is predicted at the
input.

Where the sums of a softmax or the scales of a norm differ by more than e² between x and x′, as they do in ordinary
models, the closed forms have multipliers that must cancel, and float32 loses the scores in them. There the default
takes other ones, complete too, that stay small: its scores are not those of the closed forms, which `steady=False`
gives.

captum has a rule for a few activation modules alone and takes the plain gradient of all else, so that its scores do
not add up: `profile="captum"` gives them, and warns. Baselines by name as in integrated gradients.
"""

from collections.abc import Iterable

from clearhead.capture.tape import Tape
from clearhead.methods._reference import Held, Reference, ReferenceFold
from clearhead.methods.base import Scores, of_authors, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "deeplift",
    kind="reference",
    family="gradient",
    asks=("inputs", "input_gradient"),
    cost="two forward and one backward, under rules",
    citation="Shrikumar, Greenside & Kundaje (2017), Learning important features through propagating activation "
    "differences, ICML",
    signed=True,
    target="any",
    linear_in_target=True,
    axioms=("complete",),
)
class DeepLift(ReferenceFold):
    baseline: str | None = None
    reduce: Reduce = "sum"
    steady: bool = of_authors(True)  # the closed forms enlarge rounding without bound, so that no law could bind them
    captum: bool = of_authors(False)

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"

    def references(self) -> Iterable[Reference]:
        return [Reference(self.baseline)]

    def at(self, held: Held) -> None:
        stream = self.frame.stream
        self.product = held.way[stream] * held.multipliers[stream] * self.frame.valid[..., None]
        self.explained, self.base_value = self.product.sum((1, 2)), held.value

    def finish(self, tape: Tape) -> Scores:
        return Scores(reduced(self.product, self.reduce)[:, None], base_value=self.base_value)
