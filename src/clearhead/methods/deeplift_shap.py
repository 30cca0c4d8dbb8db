"""DeepLIFT SHAP: the mean of DeepLIFT over a distribution of references.

    r_i = E_x′ Σ_k (x_ik − x′_ik) · m_ik(x, x′)          Σ_i r_i = y(x) − E_x′ y(x′)

The distribution is that of the `baselines` (by name, as in integrated gradients) and `examples` (texts, or paths of
pictures, whose vectors take the place of the input's), each once. Without any it is `samples` random ones: texts with
every word drawn from the vocabulary, special tokens as they are; pictures of one colour, that of one of their own
pixels; for other inputs, the one baseline that is safe. Random numbers are keyed by seed and content, each word's by
the words up to it. The multipliers are complete (see `deeplift`, also for `steady`), so the scores add up for any
distribution.
"""

from collections.abc import Iterable

import torch

from clearhead.capture.tape import Tape
from clearhead.methods._path import counted, named
from clearhead.methods._reference import Held, Reference, ReferenceFold
from clearhead.methods.base import Scores, of_authors, register
from clearhead.methods.input_x_gradient import Reduce, reduced


@register(
    "deeplift-shap",
    kind="reference",
    family="gradient",
    asks=("inputs", "input_gradient"),
    cost="9 forward and 8 backward passes, under rules (one each a sample, and one forward)",
    citation="Lundberg & Lee (2017), A unified approach to interpreting model predictions, NeurIPS; multipliers as in "
    "Shrikumar, Greenside & Kundaje (2017), ICML",
    signed=True,
    target="any",
    linear_in_target=True,
    axioms=("complete",),
)
class DeepLiftShap(ReferenceFold):
    samples: int = 8
    baselines: str | tuple[str, ...] | None = None
    examples: str | tuple[str, ...] = ()
    reduce: Reduce = "sum"
    steady: bool = of_authors(True)  # the closed forms enlarge rounding without bound, so that no law could bind them
    captum: bool = of_authors(False)

    @property
    def linear_in_target(self) -> bool:
        return self.reduce == "sum"

    def begin(self) -> None:
        counted(self.samples, name="samples")
        self.among = named(self.baselines, self.examples)
        self.products: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def references(self) -> Iterable[Reference]:
        if self.among:
            return [Reference(name) for name in self.among]
        return [Reference(draw=draw) for draw in range(self.samples)]

    def at(self, held: Held) -> None:
        stream = self.frame.stream
        self.products.append(held.way[stream] * held.multipliers[stream] * self.frame.valid[..., None])
        self.values.append(held.value)

    def finish(self, tape: Tape) -> Scores:
        product = torch.stack(self.products).mean(0)
        self.explained, self.base_value = product.sum((1, 2)), torch.stack(self.values).mean(0)
        return Scores(reduced(product, self.reduce)[:, None], base_value=self.base_value)
