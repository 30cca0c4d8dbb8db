"""Ensemble: DeepLIFT SHAP (how much) and gradient length (where it can matter), scaled to the same size and added.

    r_i = d_i / rms(d) + s_i / rms(s)          rms(x) = √ mean_j x_j², over all units

d are the signed, complete scores of `deeplift-shap`, whose softmaxes have their mean Jacobian: how the target changes
from random inputs to this one. s are the lengths of the gradients of `saliency`. The two fail in different places.
Signed differences cancel where a unit steers attention (the words of a question, the key of a look-up); gradients
cannot tell how much a unit adds, and vanish where the output is saturated. On the known-answer models of the zoo the
sum finds the evidence better than any method of up to ten passes (`docs/known-answers.md`).

A score says how much a unit matters in units of an average one: about 1 is average, 0 nothing. A negative score means
that the unit counts against the target more than the target can respond to it. The sum of the scores has no meaning;
`e.components["deeplift-shap"]` has the signed scores that add up to the change of the target.

Combining explanations was studied by Rieger & Hansen (2020), A simple defense against adversarial attacks on heatmap
explanations, WHI, and Decker et al. (2024), Provably better explanations with optimized aggregation of feature
attributions, ICML. The mean over all streams of a model sets the size, so that scores of texts and images can be
compared.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.methods._combined import CombinedMethod, StreamScores
from clearhead.methods.base import Method, register_method
from clearhead.methods.cost import Cost
from clearhead.methods.pass_type import PassType


@register_method(
    "ensemble",
    pass_type=PassType.COMBINED,
    family="gradient",
    requires=("inputs", "input_gradient"),
    cost=Cost(forward=10, backward=9),
    citation="clearhead (2026), the sum of DeepLIFT SHAP and saliency; on combining: Decker et al. (2024), ICML",
    signed=True,
    target="any",
    rounding_amplification=10.0,  # errors are relative to the root mean square, which is less than the largest score
    measures="the contribution of each unit and the sensitivity of the target to it, combined in one score",
    misleads="the sum of the scores has no meaning, and units that count against the target may have scores near zero",
)
class Ensemble(CombinedMethod):
    """Sum of `deeplift-shap` and `saliency`, each divided by its root mean square."""

    @classmethod
    def get_components(cls, options: Mapping[str, Any]) -> tuple[Method, ...]:
        """Return DeepLIFT SHAP and saliency with their defaults."""
        return Method("deeplift-shap"), Method("saliency")

    @classmethod
    def combine(
        cls, component_scores: Mapping[str, StreamScores], valid_masks: Mapping[str, Bool[Tensor, "batch unit"]]
    ) -> dict[str, Float[Tensor, "batch row unit"]]:
        """Add up the components, each divided by its root mean square over the units of all streams."""
        totals: dict[str, Float[Tensor, "batch row unit"]] = {}
        for stream_scores in component_scores.values():
            rms = _compute_rms(stream_scores, valid_masks)
            for stream, scores in stream_scores.items():
                totals[stream] = totals.get(stream, 0) + scores / rms
        return totals


def _compute_rms(
    stream_scores: StreamScores, valid_masks: Mapping[str, Bool[Tensor, "batch unit"]]
) -> Float[Tensor, "batch row 1"]:
    """The root mean square over the units of all streams; the smallest number where all scores are zero."""
    squares = torch.cat([scores.square() * valid_masks[s][:, None] for s, scores in stream_scores.items()], dim=-1)
    count = torch.cat([valid_masks[stream] for stream in stream_scores], dim=-1).sum(-1)
    mean = squares.sum(-1, keepdim=True) / count[:, None, None]
    return mean.sqrt().clamp(min=torch.finfo(mean.dtype).tiny)
