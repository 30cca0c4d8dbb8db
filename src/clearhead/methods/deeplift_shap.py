"""DeepLIFT SHAP: the mean of DeepLIFT over a distribution of references.

    r_i = E_x′ Σ_k (x_ik − x′_ik) · m_ik(x, x′)          Σ_i r_i = y(x) − E_x′ y(x′)

The references are the `baselines` (by name, as in integrated gradients) and the `examples` (texts, or paths of images,
whose vectors replace those of the input), each once. Without either, `samples` references are drawn at random: texts
with every token drawn from the vocabulary and special tokens unchanged; images of a single colour, that of one of their
pixels; for other inputs, the default baseline. Random numbers are keyed by seed and content, those of a token by the
tokens up to it. The multipliers are complete (see `deeplift`, also for `rules`), so the scores are complete for any
distribution.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from clearhead.backward_rules.deeplift import RuleForm
from clearhead.capture.tape import Tape
from clearhead.methods._path import build_baseline_names, check_step_count
from clearhead.methods._reference import ReferenceInput, ReferenceMethod, ReferenceResult
from clearhead.methods.base import MethodScores, compat_option, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.input_x_gradient import VectorReduction, reduce_vectors
from clearhead.methods.pass_type import PassType


@register_method(
    "deeplift-shap",
    pass_type=PassType.REFERENCE,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=9, backward=8, note="with propagation rules (one of each per sample, and one forward)"),
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions, NeurIPS; multipliers as in "
    "Shrikumar, Greenside & Kundaje (2017), ICML",
    signed=True,
    target="any",
    measures="how the target changes, on average, from random references to the input, unit by unit",
    misleads="few random references make the scores noisy where units interact",
    linear_in_target=True,
    axioms=("complete",),
)
class DeepLiftShap(ReferenceMethod):
    """Mean of DeepLIFT over several references.

    Attributes:
        samples: Number of random references, if neither baselines nor examples are given.
        baselines: Baselines by name; None for the default (see the module).
        examples: Other inputs (texts, or paths of images) to use as baselines.
        reduce: How vectors become scores: signed sum, Euclidean norm, or sum of absolute values.
        rules: The rules of softmax and norms: "path" averages the Jacobian of each softmax between the two inputs;
            "stabilised" has closed forms, stabilised where they are unstable; "closed" has the closed forms alone, and
            is not verified, because they amplify rounding errors without bound.
        captum: Whether captum's code computes the multipliers.
    """

    samples: int = 8
    baselines: str | tuple[str, ...] | None = None
    examples: str | tuple[str, ...] = ()
    reduce: VectorReduction = "sum"
    rules: RuleForm = compat_option("path")
    captum: bool = compat_option(False)

    @classmethod
    def get_cost(cls, options: Mapping[str, Any]) -> Cost:
        """Return the clean pass, and one forward and one backward pass for each reference."""
        baseline_names = build_baseline_names(options.get("baselines"), options.get("examples", ()))
        num_references = len(set(baseline_names)) or int(options.get("samples", cls.samples))
        return replace(cls.declaration.cost, forward=1 + num_references, backward=num_references)

    @property
    def linear_in_target(self) -> bool:
        """True for the signed sum; norms and absolute values are not linear."""
        return self.reduce == "sum"

    def setup(self) -> None:
        check_step_count(self.samples, name="samples")
        self.baseline_names = build_baseline_names(self.baselines, self.examples)
        self.delta_x_multipliers: list[torch.Tensor] = []
        self.reference_values: list[torch.Tensor] = []

    def iter_references(self) -> Iterable[ReferenceInput]:
        """Return the named baselines and the examples, or else `samples` random references."""
        if self.baseline_names:
            return [ReferenceInput(name) for name in self.baseline_names]
        return [ReferenceInput(sample_index=draw) for draw in range(self.samples)]

    def on_reference(self, result: ReferenceResult) -> None:
        """Keep (x − x′) ⊙ m without padding, and y(x′), of one reference."""
        stream = self.unit_context.stream
        self.delta_x_multipliers.append(
            result.input_delta[stream] * result.multipliers[stream] * self.unit_context.valid_mask[..., None]
        )
        self.reference_values.append(result.target_value)

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Average over the references, and then reduce vectors to scores."""
        product = torch.stack(self.delta_x_multipliers).mean(0)
        self.attributed_total = product.sum((1, 2))
        self.base_value = torch.stack(self.reference_values).mean(0)
        return MethodScores(reduce_vectors(product, self.reduce)[:, None], base_value=self.base_value)
