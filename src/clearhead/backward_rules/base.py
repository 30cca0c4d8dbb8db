"""Base class of rule sets: for each kind of operation, how relevance propagates from its output to its inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.errors import UnsupportedError


class MissingRuleError(UnsupportedError):
    """An operation for which a rule set has no rule."""


@contextmanager
def translate_inplace_errors() -> Iterator[None]:
    """Turn torch's error about an in-place change of a saved tensor into a `MissingRuleError`.

    Yields:
        Nothing: the `with` contains the forward and backward pass.

    Raises:
        MissingRuleError: If an operation inside the `with` changes a tensor that a rule saved for the backward pass.
    """
    try:
        yield
    except RuntimeError as problem:
        if "inplace" not in str(problem):
            raise
        raise MissingRuleError(
            "an in-place operation changes a tensor that a rule needs in the backward pass"
        ) from problem


#: Relevance of the output, and the inputs → relevance of each input (None for an input that gets none).
BackwardRule = Callable[..., tuple[Tensor | None, ...]]


class RuleFunction(torch.autograd.Function):
    """An operation whose backward pass is a rule.

    The inputs are saved with `save_for_backward`, so torch notices when one of them is changed in place later.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], rule: BackwardRule, in_place: bool, *inputs: Tensor
    ) -> Tensor:
        """Run `compute`, and save its inputs for `rule`; of an in-place operation a copy of the first."""
        ctx.rule = rule
        ctx.save_for_backward(*(inputs[0].clone(), *inputs[1:]) if in_place else inputs)
        output = compute(*inputs)
        if in_place:
            ctx.mark_dirty(inputs[0])
        return output

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the rule to the incoming relevance and the saved inputs."""
        return (None, None, None, *ctx.rule(*relevance, *ctx.saved_tensors))


def apply_with_rule(
    operation: Callable[..., Tensor], rule: BackwardRule, *inputs: Tensor, in_place: bool = False
) -> Tensor:
    """Compute `operation(*inputs)` so that its backward pass is `rule`.

    Args:
        operation: The forward computation.
        rule: The backward computation: relevance of the output and the inputs → relevance of each input.
        *inputs: The tensors that `operation` and `rule` receive.
        in_place: Whether `operation` writes its result into the first input.
    """
    output: Tensor = RuleFunction.apply(operation, rule, in_place, *inputs)
    return output


def depends_on_input(value: Any) -> bool:
    """Whether a value is a tensor in the autograd graph, and so depends on the model's input."""
    return isinstance(value, Tensor) and value.requires_grad


def flatten_args(args: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dictionaries of arguments or outputs."""
    if isinstance(args, tuple | list):
        for item in args:
            yield from flatten_args(item)
    elif isinstance(args, dict):
        yield from flatten_args(list(args.values()))
    else:
        yield args


def unbroadcast(tensor: Tensor, reference: Tensor) -> Tensor:
    """Sum `tensor` over broadcast axes, so that it gets the shape of `reference`."""
    if tensor.shape == reference.shape:
        return tensor
    return tensor.sum_to_size(reference.shape)


class RuleSet:
    """Base class of a rule set: one method per kind of operation.

    Each method computes an operation of its kind and attaches the backward rule to the output. `apply` is the operation
    itself; `batch_size` is the number of samples, which lie along the first axis of every tensor. An operation whose
    kind a rule set does not override is not supported: a model that uses it cannot be explained.
    """

    name: ClassVar[str]
    #: Whether the rules amplify rounding errors, so that passes run in float64, whatever dtype the model has.
    needs_float64: ClassVar[bool] = False
    #: Whether relevance differs between a sum of two linear maps and the one linear map that equals it (LoRA).
    splits_maps: ClassVar[bool] = False
    #: Operations, in addition to `MOVEMENT_OPS`, that keep their ordinary gradient.
    unmodified_ops: ClassVar[frozenset[str]] = frozenset()

    def make_probe_variant(self) -> "RuleSet":
        """Return the rule set used to test a model on a batch that holds one sample twice.

        Returns:
            The rule set itself, unless a subclass can check more in such a batch.
        """
        return self

    @property
    def conserves_sum(self) -> bool:
        """Whether contributions are rescaled to the sum of the incoming relevance (a sum of zero leaves nothing)."""
        return False

    @property
    def is_batch_safe(self) -> bool:
        """Whether the test with the probe variant showed that samples of a batch do not mix."""
        return True

    def on_use(self, x: Tensor, tensor_uses: WeakTensorKeyDictionary, operation: str) -> None:
        """Record that an operation is about to use x; `tensor_uses` lives as long as the pass.

        Args:
            x: The tensor that is used.
            tensor_uses: What the rule set keeps about each tensor of the pass.
            operation: Name of the handler, such as "linear".
        """

    def on_branch(self, x: Tensor, tensor_uses: WeakTensorKeyDictionary) -> Tensor:
        """Return x as one of possibly several linear maps receives it.

        Args:
            x: The input of a linear map.
            tensor_uses: What the rule set keeps about each tensor of the pass.

        Returns:
            x, or a view of it whose backward pass combines the relevance of the branches.
        """
        return x

    def on_index(self, x: Tensor) -> Tensor:
        """Return x, which was indexed out of a larger tensor.

        Args:
            x: The indexed tensor.

        Returns:
            x, or a view of it with a rule for its backward pass.
        """
        return x

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        """Compute x Wᵀ + b; the bias receives no relevance.

        Args:
            apply: Computes the operation from x.
            x: The input.
            weight: W, output × input.

        Returns:
            The output of the operation, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def convolution(
        self, apply: Callable[[Tensor], Tensor], convolve: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        """Compute a convolution; `convolve` is the same one with weights as an argument, and without bias.

        Args:
            apply: Computes the operation from x.
            convolve: Computes it from x and weights, without bias.
            x: The input, batch × channel × positions.
            weight: The weights.

        Returns:
            The output of the operation, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def add(self, a: Tensor, b: Tensor, batch_size: int, in_place: bool = False) -> Tensor:
        """Compute a + b, of which one may be constant.

        Args:
            a: The first summand.
            b: The second summand.
            batch_size: Number of samples along the first axis.
            in_place: Whether the sum is written into a.

        Returns:
            The sum, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        """Compute a bilinear operation on two tensors that both depend on the input: attention, gates.

        Args:
            apply: Computes the operation from a and b.
            a: The first factor.
            b: The second factor.

        Returns:
            The product, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def linear_map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute an operation that is linear in x: a sum, a product with a constant matrix.

        Args:
            apply: Computes the operation from x.
            x: The input.

        Returns:
            The output of the operation, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def mean(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute a mean over some axes, which is a linear map.

        Args:
            apply: Computes the mean from x.
            x: The input.

        Returns:
            The mean, whose backward pass follows the rule.
        """
        return self.linear_map(apply, x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """Multiply x element by element with a constant.

        Args:
            apply: Computes the operation from x.
            x: The input.
            factor: The constant; broadcast to the shape of x.

        Returns:
            The product, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute an element-wise function.

        Args:
            apply: Computes the function from x.
            x: The input.

        Returns:
            The value of the function, whose backward pass follows the rule.

        Raises:
            MissingRuleError: If the rule set has no rule for this function.
        """
        raise NotImplementedError

    def norm(
        self,
        apply: Callable[[Tensor], Tensor],
        x: Tensor,
        weight: Tensor | None,
        num_axes: int,
        eps: float,
        is_centred: bool,
    ) -> Tensor:
        """Compute a layer norm (`is_centred`) or a root-mean-square norm over the last `num_axes` axes.

        Args:
            apply: Computes the norm from x.
            x: The input.
            weight: The learned scale, if there is one.
            num_axes: Number of axes over which statistics are taken, from the last.
            eps: What the norm adds to the variance.
            is_centred: Whether the mean is subtracted.

        Returns:
            The normalised tensor, whose backward pass follows the rule.
        """
        raise NotImplementedError

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, axis: int, batch_size: int) -> Tensor:
        """Compute a softmax over one axis.

        Args:
            apply: Computes the softmax from x.
            x: The logits.
            axis: The axis along which the result sums to 1.
            batch_size: Number of samples along the first axis.

        Returns:
            The softmax, whose backward pass follows the rule.
        """
        raise NotImplementedError
