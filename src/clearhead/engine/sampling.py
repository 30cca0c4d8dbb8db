"""What is random about a path: drawn for each example by itself, so that batch, padding and chunk change nothing.

The key of an example is the seed and the content that all its targets share: of words that are said one after another,
what was there before the first."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError
from clearhead.methods._path import Point


class Draws:
    """Random numbers for one batch: α, one of several baselines, noise."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Tensor], words: Sequence[str]) -> None:
        self.plan, self.inputs, self.size = plan, inputs, plan.size
        self.words = [leaf for leaf in inputs if leaf in words or leaf == "inputs_embeds"]
        self.roots = [plan.subject.root(sample) for sample in plan.given]
        self.seeds = [root.seed(plan.seed) for root in self.roots]

    def along(self, point: Point) -> Float[Tensor, "batch"]:
        """α, uniform on 0…1."""
        return torch.tensor([self._of(i, point).uniform() for i in range(self.size)], dtype=torch.float64)

    def one_of(self, count: int, point: Point) -> Int[Tensor, "batch"]:
        return torch.tensor([int(self._of(i, point, 1).integers(count)) for i in range(self.size)])

    def noise(self, point: Point, leaf: str) -> Tensor:
        """ε of one leaf, in the shape that each example's part of it has by itself; padding gets none."""
        whole, number = torch.zeros_like(self.inputs[leaf]), list(self.inputs).index(leaf)
        for i, own in enumerate(self._parts(leaf, whole)):
            shape = self._shape(leaf, i, own)
            drawn = torch.tensor(self._of(i, point, 2 + number).standard_normal(shape)).to(own)
            within = own.reshape(own.shape[own.dim() - len(shape) :])  # without axes of one choice or picture
            within[tuple(slice(length) for length in shape)] = drawn * self._size(point, leaf, i).to(drawn)
        return whole

    def spread(self, numbers: Float[Tensor, "batch"], leaf: str) -> Tensor:
        """One number per example, to be multiplied with all that is the example's."""
        like = self.inputs[leaf]
        rows = numbers.to(like.device)[self.owners(leaf)]
        return rows.to(like).reshape(-1, *(1,) * (like.dim() - 1))

    def owners(self, leaf: str) -> Int[Tensor, "row"]:
        """The example that each row of a leaf belongs to: some pictures lie in many rows, one after another."""
        counts = [1] * self.size if len(self.inputs[leaf]) == self.size else self._counts(leaf)
        return torch.arange(self.size).repeat_interleave(torch.tensor(counts)).to(self.inputs[leaf].device)

    def _of(self, i: int, point: Point, what: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seeds[i], point.draw or 0, what])

    def _counts(self, leaf: str) -> list[int]:
        counts = [len(sample.inputs[leaf]) for sample in self.plan.given]
        if sum(counts) != len(self.inputs[leaf]):
            raise InputError(f"{leaf} of this model does not say whose its rows are: paths need batch_size=1")
        return counts

    def _parts(self, leaf: str, whole: Tensor) -> list[Tensor]:
        """Each example's rows, as views."""
        if len(whole) == self.size:
            return list(whole)
        return list(whole.split(self._counts(leaf)))

    def _shape(self, leaf: str, i: int, part: Tensor) -> tuple[int, ...]:
        given = self.plan.given[i].inputs.get(leaf)
        if given is None:
            return tuple(part.shape)
        return (*given.shape, part.shape[-1]) if leaf in self.words and leaf != "inputs_embeds" else tuple(given.shape)

    def _size(self, point: Point, leaf: str, i: int) -> Float[Tensor, ""]:
        """σ: as it was given, or as a share of how far the example's numbers lie apart; of words, their lengths."""
        sigma = torch.tensor(float(point.noise), dtype=torch.float64)
        if point.noise_of == "units":
            return sigma
        if leaf not in self.words:
            return sigma * _range(self._parts(leaf, self.inputs[leaf])[i])
        # all words together: before the first word is said, a prefix is one token, which has no range
        lengths = [self._lengths(one, i) for one in self.words]
        return sigma * _range(torch.cat(lengths))

    def _lengths(self, leaf: str, i: int) -> Float[Tensor, "word"]:
        vectors = self.inputs[leaf][i].flatten(0, -2)
        given = self.roots[i].inputs.get(leaf)
        return (vectors if given is None else vectors[: len(given)]).norm(dim=-1)


def _range(numbers: Tensor) -> Float[Tensor, ""]:
    """Largest minus smallest; of one number alone, its size."""
    low, high = numbers.min().double(), numbers.max().double()
    return high - low if high > low else high.abs()
