"""Rules of layer-wise relevance propagation (LRP) as in Transformer-Explainability.

Relevance takes the path of the gradient, starting with R = 1 at the target. Only activating contributions count (α = 1,
β = 0). There are two variants: "ours", the authors' own, and "orig", which they compare with:

    Linear        S = R / (W⁺x⁺ + W⁻x⁻),  R_x = x⁺ ⊙ W⁺ᵀS + x⁻ ⊙ W⁻ᵀS;    orig: one denominator for each of the two
                  terms, so that relevance doubles at every linear map
    Add a + b     S = R / (a + b),  R_a = a ⊙ S,  R_b = b ⊙ S;    ours then scales both, so that ΣR_a : ΣR_b =
                  |Σ a⊙S| : |Σ b⊙S| and together they are ΣR
    product XY    S = R / XY,  R_X = X ⊙ SYᵀ / 2,  R_Y = Y ⊙ XᵀS / 2
    norms, activations, softmax, dropout          identity
    convolution of an image     z^B, with the minimum and the maximum of each image as bounds; any other as Linear
                  (the authors use orig's rule in both variants)
    x used by several operations                  x ⊙ Σ_i R_i / x: the sum, and zero where x is zero

Divisions have the authors' stabiliser. Sums run over each sample; the authors' run over the whole batch.

Where a sum a + b almost cancels, R_a and R_b are large and depend on the last bits of a and b; so does the sign of
ΣR_a, and with it the sign of all of R_a. In float32, scores of the zoo's BERT (sentiment, 24 texts) were off by 0.003
(median) to 0.7 of the largest, and those of a batch differed from single ones by up to 0.2. Therefore all passes run in
float64 (`float64_mode.py`), whatever the model's dtype: there, the two differ by 1e-9.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import MissingRuleError, RuleSet, apply_with_rule, unbroadcast

STABILISER_EPS = 1e-9
LRPVariant = Literal["ours", "orig"]


def divide_stabilised(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide with the authors' stabiliser, which is always positive; the result is zero where the denominator is."""
    stabilised = denominator + STABILISER_EPS
    stabilised = torch.where(stabilised == 0, STABILISER_EPS, stabilised)
    return torch.where(denominator == 0, 0.0, numerator / stabilised)


def multiply_where_nonzero(x: Tensor, factor: Tensor) -> Tensor:
    """x ⊙ factor, and zero where the factor is zero, even if x is −∞ (masks)."""
    return torch.where(factor == 0, 0.0, x * factor)


@dataclass
class TensorUses:
    """How many operations use a tensor.

    Query, key and value are one linear map in the authors' ViT. In their BERT they are three, whose branches are merged
    into one branch of the layer's input.

    Attributes:
        num_linear: Number of linear maps that use it.
        num_other: Number of other operations that use it.
    """

    num_linear: int = 0
    num_other: int = 0

    @property
    def has_several_branches(self) -> bool:
        """Whether relevance arrives from several operations; all linear maps count as one."""
        return self.num_other > 1 or (self.num_other == 1 and self.num_linear > 0)

    @property
    def has_nested_branches(self) -> bool:
        """Whether several linear maps share the tensor with another operation."""
        return self.num_linear > 1 and self.num_other > 0


@dataclass(frozen=True)
class LRPRules(RuleSet):
    """LRP with α = 1, β = 0 for transformers.

    Attributes:
        variant: "ours" or "orig" (see above).
        positions_take_relevance: Whether constants that are added to hidden states (position embeddings) receive their
            contribution to the relevance.
        mask_takes_relevance: Whether constants that are added to attention scores (masks) receive theirs; a mask of
            zeros is then added where the model has none, as in the authors' BERT. Otherwise masks receive none, not
            even the 1e-9 of the stabiliser where they mask nothing.
        conserves_linear: Whether the relevance in front of a linear map is scaled to the sum behind it, as in the
            authors' DETR.
        repeats_mean_relevance: Whether each averaged value receives all of the relevance of a mean, as in
            transformerinterp's MAE: the sum grows by the number of values.
        name: The name of the rule set in messages.
        splits_maps: See `RuleSet`: the rules depend on the signs of weights, so LoRA layers must be merged first.
        needs_float64: See `RuleSet`: sums that almost cancel are denominators.
    """

    variant: LRPVariant = "ours"
    positions_take_relevance: bool = True
    mask_takes_relevance: bool = False
    conserves_linear: bool = False
    repeats_mean_relevance: bool = False

    name: ClassVar[str] = "relevance propagation"
    #: The rules depend on the signs of weights, and divide at sums.
    splits_maps: ClassVar[bool] = True
    #: Sums that almost cancel are denominators: 1e-7 of an activation may become all of a score.
    needs_float64: ClassVar[bool] = True

    @property
    def conserves_sum(self) -> bool:
        """True for "ours": its sums are rescaled to ΣR (`_rescale_branches`), those of "orig" are not."""
        return self.variant == "ours"

    def make_probe_variant(self) -> RuleSet:
        """Return the same rules as a `DuplicateBatchProbe`, which checks every sum."""
        return DuplicateBatchProbe(
            self.variant,
            self.positions_take_relevance,
            self.mask_takes_relevance,
            self.conserves_linear,
            self.repeats_mean_relevance,
        )

    def on_use(self, x: Tensor, tensor_uses: WeakTensorKeyDictionary, operation: str) -> None:
        """Count a use of x; on the first use, hook x so that the relevance of all its uses is combined."""
        if x not in tensor_uses:
            tensor_uses[x] = TensorUses()
            if not isinstance(x, nn.Parameter):  # relevance of a weight is not used, and a hook would stay on it
                _hook_branches(x.detach(), x, tensor_uses[x])
        uses = tensor_uses[x]
        if operation == "linear":
            uses.num_linear += 1
        else:
            uses.num_other += 1

    def on_branch(self, x: Tensor, tensor_uses: WeakTensorKeyDictionary) -> Tensor:
        """Return x; the relevance of each of several linear branches becomes x ⊙ R / x (`TensorUses`)."""
        uses = tensor_uses[x]

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            return (_combine_branches(r, x),) if uses.has_nested_branches else (r,)

        return apply_with_rule(lambda x: x.view_as(x), rule, x)

    def on_index(self, x: Tensor) -> Tensor:
        """Return x; its relevance becomes x ⊙ R / x, which is zero where x is zero."""
        return apply_with_rule(lambda x: x.view_as(x), lambda r, x: (_combine_branches(r, x),), x)

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        """α = 1 rule (`_propagate_alpha1_beta0`); `conserves_linear` rescales R_x per sample to ΣR."""

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            to_x = self._propagate_alpha1_beta0(r, x, lambda x, w: x @ w.mT, lambda s, w: s @ w, weight.to(x))
            if self.conserves_linear:
                to_x = _scale_per_sample(to_x, divide_stabilised(r.flatten(1).sum(1), to_x.flatten(1).sum(1)))
            return (to_x,)

        return apply_with_rule(apply, rule, x)

    def convolution(
        self, apply: Callable[[Tensor], Tensor], convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        """z^B rule for images (three channels), with each image's minimum and maximum; else α = 1 rule."""

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            def back(s: Tensor, w: Tensor) -> Tensor:
                return _compute_vjp(lambda x: convolve(x, w), x)[1](s)[0]

            if x.shape[1] != 3:  # not an image; the authors use orig's rule in both variants, where relevance doubles
                return (self._propagate_alpha1_beta0(r, x, convolve, back, weight.to(x)),)
            image_axes = tuple(range(1, x.dim()))
            low = x.amin(image_axes, keepdim=True).expand_as(x)
            high = x.amax(image_axes, keepdim=True).expand_as(x)
            w = weight.to(x)
            w_plus = w.clamp(min=0)
            w_minus = w.clamp(max=0)
            s = r / (convolve(x, w) - convolve(low, w_plus) - convolve(high, w_minus) + STABILISER_EPS)
            return (x * back(s, w) - low * back(s, w_plus) - high * back(s, w_minus),)

        return apply_with_rule(apply, rule, x)

    def _propagate_alpha1_beta0(
        self,
        r: Tensor,
        x: Tensor,
        forward: Callable[[Tensor, Tensor], Tensor],
        back: Callable[[Tensor, Tensor], Tensor],
        weight: Tensor,
    ) -> Tensor:
        """The α = 1 rule: positive inputs through positive weights, negative through negative."""
        x_plus = x.clamp(min=0)
        x_minus = x.clamp(max=0)
        w_plus = weight.clamp(min=0)
        w_minus = weight.clamp(max=0)
        z_plus = forward(x_plus, w_plus)
        z_minus = forward(x_minus, w_minus)
        if self.variant == "ours":
            z_plus = z_minus = z_plus + z_minus
        to_x_plus = x_plus * back(divide_stabilised(r, z_plus), w_plus)
        return to_x_plus + x_minus * back(divide_stabilised(r, z_minus), w_minus)

    def add(self, a: Tensor, b: Tensor, batch_size: int, in_place: bool = False) -> Tensor:
        """S = R / (a + b), R_a = a ⊙ S, rescaled in "ours"; a constant without relevance leaves R to the other."""
        has_constant = not all(tensor.requires_grad and not _is_parameter_view(tensor) for tensor in (a, b))

        def rule(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            # Hidden states have three axes, attention scores four.
            constant_takes_relevance = self.positions_take_relevance if r.dim() == 3 else self.mask_takes_relevance
            if has_constant and not constant_takes_relevance:
                return unbroadcast(r, a), unbroadcast(r, b)
            s = divide_stabilised(r, a + b)
            to_a = multiply_where_nonzero(a, s)
            to_b = multiply_where_nonzero(b, s)
            if self.variant == "ours":
                to_a, to_b = self._rescale_branches(r, to_a, to_b, batch_size)
            return unbroadcast(to_a, a), unbroadcast(to_b, b)

        rule.adds = True  # type: ignore[attr-defined]
        compute = (lambda a, b: a.add_(b)) if in_place else (lambda a, b: a + b)
        return apply_with_rule(compute, rule, a, b, in_place=in_place)

    def _rescale_branches(self, r: Tensor, to_a: Tensor, to_b: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """Scale the relevance of both terms of a sum, so that their sums share ΣR as |Σ R_a| : |Σ R_b|."""
        sum_r, sum_a, sum_b = (_sum_per_sample(relevance, batch_size) for relevance in (r, to_a, to_b))
        magnitude = sum_a.abs() + sum_b.abs()
        factor_a = divide_stabilised(divide_stabilised(sum_a.abs(), magnitude) * sum_r, sum_a)
        factor_b = divide_stabilised(divide_stabilised(sum_b.abs(), magnitude) * sum_r, sum_b)
        return _scale_per_sample(to_a, factor_a), _scale_per_sample(to_b, factor_b)

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        """S = R / z, R_a = a ⊙ (∂z/∂a)ᵀS / 2 and R_b = b ⊙ (∂z/∂b)ᵀS / 2."""

        def rule(r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            z, back = _compute_vjp(apply, a, b)
            to_a, to_b = back(divide_stabilised(r, z))
            return a * to_a / 2, b * to_b / 2

        return apply_with_rule(apply, rule, a, b)

    def linear_map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """R_x = x ⊙ Jᵀ(R / z) for z = Jx; half of it with `conserves_linear`."""

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            z, back = _compute_vjp(apply, x)
            to_x = x * back(divide_stabilised(r, z))[0]
            # The attention of a detector's first layer gets half of the relevance, too, though its values are constant.
            return (to_x / 2,) if self.conserves_linear else (to_x,)

        return apply_with_rule(apply, rule, x)

    def mean(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """R_x = x ⊙ R / Σx; with `repeats_mean_relevance`, each averaged value receives all of R."""
        if not self.repeats_mean_relevance:
            return self.linear_map(apply, x)

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            return (_compute_vjp(apply, x)[1](r)[0] * (x.numel() / r.numel()),)

        return apply_with_rule(apply, rule, x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """R_x = R, and zero where the factor is zero."""

        def rule(r: Tensor, x: Tensor) -> tuple[Tensor]:
            return (unbroadcast(torch.where(factor == 0, 0.0, r), x),)

        return apply_with_rule(apply, rule, x)

    def _apply_identity_rule(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute the operation with R_x = R."""
        return apply_with_rule(apply, lambda r, x: (r,), x)

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """R_x = R."""
        return self._apply_identity_rule(apply, x)

    def norm(
        self,
        apply: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor | None,
        num_axes: int,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        """R_x = R: neither the scale nor the weight changes relevance."""
        return self._apply_identity_rule(apply, x)

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, axis: int, batch_size: int) -> Tensor:
        """R_x = R; with `mask_takes_relevance`, a mask of zeros is added first if the model added none."""
        previous_rule = getattr(x.grad_fn, "rule", None)
        if self.mask_takes_relevance and not getattr(previous_rule, "adds", False):
            x = self.add(x, torch.zeros_like(x), batch_size)
        return self._apply_identity_rule(apply, x)


@dataclass(frozen=True)
class DuplicateBatchProbe(LRPRules):
    """The same rules for a batch that holds one sample twice: finds sums where samples are not along the first axis.

    Attributes:
        mixed_shapes: The shapes of the sums that differ between the two copies.
    """

    mixed_shapes: list[tuple[int, ...]] = field(default_factory=list, compare=False)

    def add(self, a: Tensor, b: Tensor, batch_size: int, in_place: bool = False) -> Tensor:
        """Compute a + b; the shape is noted if the two halves of the result differ."""
        output = super().add(a, b, batch_size, in_place)
        if not _has_equal_halves(output.detach()):
            self.mixed_shapes.append(tuple(output.shape))
        return output

    @property
    def is_batch_safe(self) -> bool:
        """Whether every sum had equal halves; always true for "orig", which sums over no sample."""
        return self.variant == "orig" or not self.mixed_shapes  # "ours" sums over samples


def _has_equal_halves(batch: Tensor) -> bool:
    """Whether the two halves along the first axis are close; False if its length is odd."""
    if not batch.dim() or len(batch) % 2:
        return False
    first_half, second_half = batch.unflatten(0, (2, -1))
    return torch.allclose(first_half, second_half, equal_nan=True)


def _hook_branches(values: Tensor, x: Tensor, uses: TensorUses) -> None:
    """Combine the relevance that several operations return to x; `values` is x outside the graph."""
    x.register_hook(lambda r: _combine_branches(r, values) if uses.has_several_branches else r)


def _compute_vjp(
    apply: Callable[..., Tensor], *inputs: Tensor
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Return the output of an operation, and the function that multiplies a vector with its Jacobian."""
    output, back = torch.func.vjp(apply, *inputs)[:2]
    return output, back


def _combine_branches(r: Tensor, x: Tensor) -> Tensor:
    """x ⊙ Σ R_i / x, where r is the sum of the relevance of several operations: zero where x is zero."""
    return x * divide_stabilised(r, x)


def _is_parameter_view(x: Tensor) -> bool:
    """Whether x is a parameter, possibly viewed or expanded, as the queries of a detector are."""
    node = x.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", x if x.is_leaf else None), nn.Parameter)


def _sum_per_sample(tensor: Tensor, batch_size: int) -> Tensor:
    """Sum a tensor over each sample; the windows of one sample are contiguous along the first axis."""
    if tensor.numel() % batch_size or (tensor.dim() and tensor.shape[0] % batch_size):
        raise MissingRuleError(
            f"an addition of shape {tuple(tensor.shape)} does not separate the {batch_size} samples on its first axis"
        )
    return tensor.reshape(batch_size, -1).sum(1)


def _scale_per_sample(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply each sample with its own factor."""
    return (tensor.reshape(len(factor), -1) * factor[:, None]).reshape(tensor.shape)
