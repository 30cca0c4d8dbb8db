"""What a family of rules says: for each kind of operation, how relevance goes from what comes out to what goes in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.errors import Refusal


class NoRule(Refusal):
    """An operation that a family of rules does not know."""


@contextmanager
def in_place_has_no_rule() -> Iterator[None]:
    """Torch refuses to change in place what a rule keeps: such an operation has none."""
    try:
        yield
    except RuntimeError as problem:
        if "inplace" not in str(problem):
            raise
        raise NoRule("an operation in place changes what a rule needs afterwards") from problem


#: What arrives at the output, and the inputs → what each input gets (None for nothing).
Rule = Callable[..., tuple[Tensor | None, ...]]


class Ruled(torch.autograd.Function):
    """An operation whose backward pass is a rule. What it needs of its inputs is saved as torch saves it, so that an
    input which is changed in place later on is noticed."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], rule: Rule, in_place: bool, *inputs: Tensor) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(*(inputs[0].clone(), *inputs[1:]) if in_place else inputs)
        output = compute(*inputs)
        if in_place:
            ctx.mark_dirty(inputs[0])
        return output

    @staticmethod
    def backward(ctx: Any, *relevance: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.rule(*relevance, *ctx.saved_tensors))


def ruled(compute: Callable[..., Tensor], rule: Rule, *inputs: Tensor, in_place: bool = False) -> Tensor:
    """`compute(*inputs)`, differentiated by `rule`."""
    output: Tensor = Ruled.apply(compute, rule, in_place, *inputs)
    return output


def active(part: Any) -> bool:
    """Whether it depends on the input."""
    return isinstance(part, Tensor) and part.requires_grad


def flat(parts: Any) -> Iterator[Any]:
    """What is in the arguments or outputs of an operation, lists and dictionaries taken apart."""
    if isinstance(parts, tuple | list):
        for part in parts:
            yield from flat(part)
    elif isinstance(parts, dict):
        yield from flat(list(parts.values()))
    else:
        yield parts


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Sum what was broadcast, so that `part` gets the shape of `whole`."""
    return part if part.shape == whole.shape else part.sum_to_size(whole.shape)


class Family:
    """One family of rules; a kind of operation that it leaves out has no rule, and is refused.

    Each method computes one kind of operation and gives its output the rule. `apply` is the operation itself; `size`
    is the number of samples, which lie along the first axis of every tensor.
    """

    name: ClassVar[str]
    #: Whether it amplifies rounding, so that its passes are made in float64, whatever format the model has.
    wide: ClassVar[bool] = False
    #: Whether it gives two linear maps that are added other relevance than the one map that they make together.
    splits_maps: ClassVar[bool] = False
    #: Operations beside `MOVES` that it leaves as they are.
    ordinary: ClassVar[frozenset[str]] = frozenset()

    def twice(self) -> "Family":
        """The same rules, to try a model with on a batch of one sample twice."""
        return self

    @property
    def keeps_sums(self) -> bool:
        """Whether parts are scaled so that their sum is that of what came: of a sum of zero, nothing is left."""
        return False

    @property
    def keeps_apart(self) -> bool:
        """Whether, after such a trial, samples of a batch are known not to mix."""
        return True

    def used(self, x: Tensor, uses: WeakTensorKeyDictionary, operation: str) -> None:
        """An operation is about to use x; `uses` is a place to remember that in, for the time of the pass."""

    def branched(self, x: Tensor, uses: WeakTensorKeyDictionary) -> Tensor:
        """x on its way to one of several linear maps."""
        return x

    def picked(self, x: Tensor) -> Tensor:
        """What was picked out of a larger tensor."""
        return x

    def linear(self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
        """x Wᵀ, and a bias that takes no part."""
        raise NotImplementedError

    def convolution(
        self, apply: Callable[[Tensor], Tensor], map: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor
    ) -> Tensor:
        """A convolution; `map` is the same one with weights of one's choice, and without bias."""
        raise NotImplementedError

    def add(self, a: Tensor, b: Tensor, size: int, in_place: bool = False) -> Tensor:
        """a + b, of which one may be constant."""
        raise NotImplementedError

    def product(self, apply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
        """What is linear in a and linear in b, both of which depend on the input: attention, gates."""
        raise NotImplementedError

    def map(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What is linear in x: a sum, a product with a constant matrix."""
        raise NotImplementedError

    def mean(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A mean along some axes, which is linear."""
        return self.map(apply, x)

    def scale(self, apply: Callable[[Tensor], Tensor], x: Tensor, factor: Tensor) -> Tensor:
        """What multiplies each number of x by a constant."""
        raise NotImplementedError

    def activation(self, apply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of each number by itself."""
        raise NotImplementedError

    def norm(
        self, apply: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor | None, axes: int, eps: float, centred: bool
    ) -> Tensor:
        """A layer norm (`centred`) or a root-mean-square norm over the last `axes` axes."""
        raise NotImplementedError

    def softmax(self, apply: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
        raise NotImplementedError
