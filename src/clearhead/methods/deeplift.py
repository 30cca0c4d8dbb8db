"""DeepLIFT: the difference between the input and a reference, propagated back operation by operation.

    r_i = Σ_k (x_ik − x′_ik) · m_ik          Σ_i r_i = y(x) − y(x′)

x_i is a token's word embedding, or the pixels of a patch; m are multipliers, chained like gradients. Each operation has
multipliers with Σ m · Δin = Δout, exactly: Δf/Δz for scalar functions, closed forms for products (attention, gated
units), quotients and norms, and for a softmax the mean of its Jacobian along the straight path between both logits
(`backward_rules/deeplift.py`, `path_softmax.py`). So the scores are complete on transformers, too; the certificate has
the remaining error (`completeness_gap`). The class is the one predicted at the input.

The softmax of attention that is almost 0 or 1 has a closed form that hides how it came to be: queries and keys get
almost nothing, though they decided what is attended to. Its mean Jacobian does not vanish there. The closed form is
`rules="stabilised"`. If the denominators of a softmax or the scales of a norm differ by more than e² between x and x′,
which is common, closed forms have large multipliers that must cancel, and float32 loses the scores in rounding. In
these places stabilised multipliers are used, which are complete and stay small; `rules="closed"` does without.

captum has rules for a few activation modules only and uses the gradient elsewhere, so that its scores are not complete:
`profile="captum"` gives them, with a warning. Baselines by name as in integrated gradients.
"""

from collections.abc import Iterable

from clearhead.backward_rules.deeplift import RuleForm
from clearhead.capture.tape import Tape
from clearhead.methods._reference import ReferenceInput, ReferenceMethod, ReferenceResult
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType


@register_method(
    "deeplift",
    pass_type=PassType.REFERENCE,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=2, backward=1, note="with propagation rules"),
    citation="Shrikumar, Greenside & Kundaje (2017), Learning important features through propagating activation "
    "differences, ICML",
    signed=True,
    target="any",
    measures="how the target changes from a baseline to the input, unit by unit; the scores add up to the change",
    misleads="the scores depend on the baseline, and those of units that only direct attention can cancel out",
    linear_in_target=True,
    axioms=("complete",),
)
class DeepLift(ReferenceMethod):
    """DeepLIFT with one reference.

    Attributes:
        baseline: The baseline x′ by name; None for the default of the model.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
        rules: The rules of softmax and norms: "path" averages the Jacobian of each softmax between the two inputs;
            "stabilised" has closed forms, stabilised where they are unstable; "closed" has the closed forms alone, and
            is not verified, because they amplify rounding errors without bound.
        captum: Whether captum's code computes the multipliers.
    """

    baseline: str | None = None
    reduce: VectorReduction = "sum"
    rules: RuleForm = compat_option("path")
    captum: bool = compat_option(False)

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum; norms and absolute values are not linear."""
        return self.reduce == "sum"

    def iter_references(self) -> Iterable[ReferenceInput]:
        """Return the one baseline x′."""
        return [ReferenceInput(self.baseline)]

    def on_reference(self, result: ReferenceResult) -> None:
        """Keep (x − x′) ⊙ m without padding, its sum for the completeness gap, and y(x′)."""
        stream = self.unit_context.stream
        self.delta_x_multipliers = (
            result.input_delta[stream] * result.multipliers[stream] * self.unit_context.valid_mask[..., None]
        )
        self.attributed_total = self.delta_x_multipliers.sum((1, 2))
        self.base_value = result.target_value

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Reduce (x − x′) ⊙ m to one score per unit; y(x′) is the base value."""
        return MethodScores(reduce_vectors(self.delta_x_multipliers, self.reduce)[:, None], base_value=self.base_value)
