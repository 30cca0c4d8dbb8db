"""Random control: uniform random scores, keyed by the seed and the content of the input.

Every method must do better than this control.
"""

import torch

from clearhead.capture.tape import Tape
from clearhead.methods.base import AttributionMethod, MethodScores, register_method
from clearhead.methods.cost import Cost


@register_method(
    "random",
    family="control",
    cost=Cost(forward=1),
    citation="–",
    signed=False,
    target="none",
    measures="nothing: random scores, as a control",
    misleads="a method that does no better than this control has found no evidence",
    model_agnostic=True,
)
class RandomControl(AttributionMethod):
    """Uniform random scores."""

    def compute_scores(self, tape: Tape) -> MethodScores:
        """Draw the scores of each sample from a generator with the sample's seed."""
        scores = torch.zeros(self.unit_context.valid_mask.shape, dtype=self.unit_context.readout.dtype)
        lengths = self.unit_context.lengths.tolist()
        for sample_index, (seed, length) in enumerate(zip(self.unit_context.seeds, lengths, strict=True)):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.rand(length, generator=generator, dtype=torch.float64)
            scores[sample_index, self.unit_context.valid_mask[sample_index].cpu()] = noise.to(scores.dtype)
        return MethodScores(scores[:, None].to(self.unit_context.readout.device))
