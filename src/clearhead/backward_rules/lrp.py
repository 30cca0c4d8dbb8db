"""Layer-wise relevance propagation as in Transformer-Explainability: relevance flows where gradients would.

The start is R = 1 at the target. Only what activates counts (α = 1, β = 0). Two families: "ours", the authors' own, and
"orig", which they compare with:

    Linear        S = R / (W⁺x⁺ + W⁻x⁻),  R_x = x⁺ ⊙ W⁺ᵀS + x⁻ ⊙ W⁻ᵀS;    orig: one denominator for each of the two
                  terms, so that relevance doubles at every linear map
    Add a + b     S = R / (a + b),  R_a = a ⊙ S,  R_b = b ⊙ S;    ours then scales both, so that ΣR_a : ΣR_b =
                  |Σ a⊙S| : |Σ b⊙S| and together they are ΣR
    product XY    S = R / XY,  R_X = X ⊙ SYᵀ / 2,  R_Y = Y ⊙ XᵀS / 2
    norms, activations, softmax, dropout          identity
    convolution of an image     z^B, with the least and the largest number of each image as bounds; any other as Linear
                  (the authors' is orig's in both families)
    x to several operations                       x ⊙ Σ_i R_i / x: the sum, but for what is zero

Divisions have the authors' stabiliser. Sums run over each sample; the authors' run over the whole batch.

A sum a + b that all but cancels leaves R_a and R_b that are large, and hang on the last bits of a and b; so does the
sign of ΣR_a, with which all of R_a turns. In float32, scores of the zoo's BERT (sentiment, 24 texts) were off by 0.003
(median) to 0.7 of the largest, and those of a batch differed from single ones by up to 0.2. So all passes are made in
float64 (`float64_mode.py`), whatever the model's format: there, the two differ by 1e-9.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import Family, NoRule, like, ruled

EPS = 1e-9
Variant = Literal["ours", "orig"]


def divided(a: Tensor, b: Tensor) -> Tensor:
    """a / b with the authors' stabiliser, whose sign is fixed, and nothing where b is zero."""
    below = b + EPS
    below = torch.where(below == 0, EPS, below)
    return torch.where(b == 0, 0.0, a / below)


def times(x: Tensor, s: Tensor) -> Tensor:
    """x ⊙ s, and nothing where s is zero: a mask may be −∞."""
    return torch.where(s == 0, 0.0, x * s)


@dataclass
class Uses:
    """How many operations use a tensor.

    Query, key and value are one linear map in the authors' ViT, and three in their BERT, where the three branches are
    one branch of what comes into the layer.
    """

    linear: int = 0
    other: int = 0

    @property
    def several(self) -> bool:
        return self.other > 1 or (self.other == 1 and self.linear > 0)

    @property
    def nested(self) -> bool:
        return self.linear > 1 and self.other > 0


@dataclass(frozen=True)
class Relevance(Family):
    """`positions` says whether constants that are added to units' vectors take their share of the relevance.

    Constants that are added to maps of attention take none: a mask, also where it hides nothing, would take its 1e-9.
    With `mask` it does, and is added also where there is none, as in the authors' BERT. With `kept`, what arrives in
    front of a linear map is scaled to the sum of what came to it, as in the authors' DETR. With `repeated`, all that
    arrives at a mean goes to each of what was averaged, as in transformerinterp's MAE: as many times too much.
    """

    variant: Variant = "ours"
    positions: bool = True
    mask: bool = False
    kept: bool = False
    repeated: bool = False

    name: ClassVar[str] = "relevance propagation"
    splits_maps: ClassVar[bool] = True  # it goes by the signs of weights, and divides at sums
    wide: ClassVar[bool] = True  # sums that all but cancel divide: what was 1e-7 of an activation may be all of a score

    @property
    def keeps_sums(self) -> bool:
        return self.variant == "ours"

    def twice(self) -> Family:
        return Twice(self.variant, self.positions, self.mask, self.kept, self.repeated)

    def used(self, x: Tensor, uses: WeakTensorKeyDictionary, operation: str) -> None:
        if x not in uses:
            mine, own = uses.setdefault(x, Uses()), x.detach()
            if not isinstance(x, nn.Parameter):  # what arrives at a weight is nobody's, and a hook would stay on it
                x.register_hook(lambda r: _cloned(r, own) if mine.several else r)
        uses[x].linear += operation == "linear"
        uses[x].other += operation != "linear"

    def branched(self, x: Tensor, uses: WeakTensorKeyDictionary) -> Tensor:
        mine = uses[x]
        return ruled(lambda x: x.view_as(x), lambda r, x: (_cloned(r, x) if mine.nested else r,), x)

    def picked(self, x: Tensor) -> Tensor:
        return ruled(lambda x: x.view_as(x), lambda r, x: (_cloned(r, x),), x)

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            found = self._activators(r, x, lambda x, w: x @ w.mT, lambda s, w: s @ w, weight.to(x))
            return (_scaled(found, divided(r.flatten(1).sum(1), found.flatten(1).sum(1))) if self.kept else found,)

        return ruled(apply, rule, x)

    def convolution(
        self, apply: Callable[[Tensor], Tensor], map: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            def back(s: Tensor, w: Tensor) -> Tensor:
                return _vjp(lambda x: map(x, w), x)[1](s)[0]

            if x.shape[1] != 3:  # no image; the authors' is that of orig in both families, where relevance doubles
                return (self._activators(r, x, map, back, weight.to(x)),)
            inside = tuple(range(1, x.dim()))
            low, high = x.amin(inside, keepdim=True).expand_as(x), x.amax(inside, keepdim=True).expand_as(x)
            whole = weight.to(x)
            more, less = whole.clamp(min=0), whole.clamp(max=0)
            s = r / (map(x, whole) - map(low, more) - map(high, less) + EPS)
            return (x * back(s, whole) - low * back(s, more) - high * back(s, less),)

        return ruled(apply, rule, x)

    def _activators(
        self,
        r: Tensor,
        x: Tensor,
        map: Callable[[Tensor, Tensor], Tensor],
        back: Callable[[Tensor, Tensor], Tensor],
        weight: Tensor,
    ) -> Tensor:
        """The α = 1 rule: positive inputs through positive weights, negative through negative."""
        pairs = ((x.clamp(min=0), weight.clamp(min=0)), (x.clamp(max=0), weight.clamp(max=0)))
        first, second = (map(part, w) for part, w in pairs)
        if self.variant == "ours":
            first = second = first + second
        return sum(part * back(divided(r, z), w) for (part, w), z in zip(pairs, (first, second), strict=True))  # type: ignore[return-value]

    def add(self, a: Tensor, b: Tensor, size: int, in_place: bool = False) -> Tensor:
        constant = not all(part.requires_grad and not _learned(part) for part in (a, b))

        def rule(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            if constant and not (self.positions if r.dim() == 3 else self.mask):  # units' vectors, or maps
                return like(r, a), like(r, b)
            s = divided(r, a + b)
            to_a, to_b = times(a, s), times(b, s)
            if self.variant == "ours":
                to_a, to_b = self._shared_out(r, to_a, to_b, size)
            return like(to_a, a), like(to_b, b)

        rule.adds = True  # type: ignore[attr-defined]
        compute = (lambda a, b: a.add_(b)) if in_place else (lambda a, b: a + b)
        return ruled(compute, rule, a, b, in_place=in_place)

    def _shared_out(self, r: Tensor, to_a: Tensor, to_b: Tensor, size: int) -> tuple[Tensor, Tensor]:
        whole, sum_a, sum_b = (_by_sample(part, size) for part in (r, to_a, to_b))
        both = sum_a.abs() + sum_b.abs()
        factor_a = divided(divided(sum_a.abs(), both) * whole, sum_a)
        factor_b = divided(divided(sum_b.abs(), both) * whole, sum_b)
        return _scaled(to_a, factor_a), _scaled(to_b, factor_b)

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        def rule(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            z, back = _vjp(apply, a, b)
            to_a, to_b = back(divided(r, z))
            return a * to_a / 2, b * to_b / 2

        return ruled(apply, rule, a, b)

    def map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            z, back = _vjp(apply, x)
            found = x * back(divided(r, z))[0]
            # The values in a detector's first layer are constant; its attention gets half all the same.
            return (found / 2 if self.kept else found,)

        return ruled(apply, rule, x)

    def mean(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.repeated:
            return self.map(apply, x)

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            return (_vjp(apply, x)[1](r)[0] * (x.numel() / r.numel()),)

        return ruled(apply, rule, x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            return (like(torch.where(factor == 0, 0.0, r), x),)

        return ruled(apply, rule, x)

    def _identity(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return ruled(apply, lambda r, x: (r,), x)

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self._identity(apply, x)

    def norm(
        self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, axes: int, eps: float, centred: bool
    ) -> Tensor:
        return self._identity(apply, x)

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
        added = getattr(x.grad_fn, "rule", None)
        if self.mask and not getattr(added, "adds", False):
            x = self.add(x, torch.zeros_like(x), size)
        return self._identity(apply, x)


@dataclass(frozen=True)
class Twice(Relevance):
    """The same rules on a batch of one sample twice, which tells where samples do not lie along the first axis."""

    mixed: list[tuple[int, ...]] = field(default_factory=list, compare=False)

    def add(self, a: Tensor, b: Tensor, size: int, in_place: bool = False) -> Tensor:
        output = super().add(a, b, size, in_place)
        if not _one_twice(output.detach()):
            self.mixed.append(tuple(output.shape))
        return output

    @property
    def keeps_apart(self) -> bool:
        return self.variant == "orig" or not self.mixed  # "ours" sums over samples


def _one_twice(batch: Tensor) -> bool:
    if not batch.dim() or len(batch) % 2:
        return False
    one, other = batch.unflatten(0, (2, -1))
    return torch.allclose(one, other, equal_nan=True)


def _vjp(apply: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """What an operation computes, and how an ordinary gradient goes back through it."""
    output, back = torch.func.vjp(apply, *inputs)[:2]
    return output, back


def _cloned(r: Tensor, x: Tensor) -> Tensor:
    """x ⊙ Σ R_i / x, for what came back from several operations together: nothing where x is zero."""
    return x * divided(r, x)


def _learned(x: Tensor) -> bool:
    """Whether it is a parameter, moved or repeated but not computed with, as a detector's queries are."""
    node = x.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", x if x.is_leaf else None), nn.Parameter)


def _by_sample(part: Tensor, size: int) -> Tensor:
    """The sum over each sample; parts of a sample (windows) lie one after the other along the first axis."""
    if part.numel() % size or (part.dim() and part.shape[0] % size):
        raise NoRule(f"an addition of shape {tuple(part.shape)} does not keep the {size} samples apart")
    return part.reshape(size, -1).sum(1)


def _scaled(part: Tensor, factor: Tensor) -> Tensor:
    return (part.reshape(len(factor), -1) * factor[:, None]).reshape(part.shape)
