"""Random scores: the reference that every method must beat. Keyed by the seed and the content of the input."""

import torch

from clearhead.capture.tape import Tape
from clearhead.methods.base import Fold, Scores, register


@register(
    "random",
    family="control",
    cost="one forward",
    citation="–",
    signed=False,
    target="none",
    model_agnostic=True,
)
class Random(Fold):
    def finish(self, tape: Tape) -> Scores:
        scores = torch.zeros(self.frame.valid.shape, dtype=self.frame.readout.dtype)
        for place, (seed, length) in enumerate(zip(self.frame.seeds, self.frame.lengths.tolist(), strict=True)):
            generator = torch.Generator().manual_seed(seed)
            noise = torch.rand(length, generator=generator, dtype=torch.float64)
            scores[place, self.frame.valid[place].cpu()] = noise.to(scores.dtype)
        return Scores(scores[:, None].to(self.frame.readout.device))
