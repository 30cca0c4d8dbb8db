"""What is random about a path: drawn for each example by itself, so that batch, padding and chunk change nothing.

The key of an example is the seed and the content that all its targets share: of words that are said one after another,
what was there before the first."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.methods._path import PathPoint


class PathSampler:
    """Random numbers for one batch: α, one of several baselines, noise."""

    def __init__(self, batch: TargetBatch, inputs: Mapping[str, Tensor], token_inputs: Sequence[str]) -> None:
        self.batch, self.inputs, self.num_samples = batch, inputs, batch.num_samples
        self.token_inputs = [leaf for leaf in inputs if leaf in token_inputs or leaf == "inputs_embeds"]
        self.root_samples = [batch.adapter.truncate_to_shared_prefix(sample) for sample in batch.samples]
        self.seeds = [root.derive_seed(batch.seed) for root in self.root_samples]

    def sample_alpha(self, point: PathPoint) -> Float[Tensor, "batch"]:
        """α, uniform on 0…1."""
        return torch.tensor(
            [self._make_generator(i, point).uniform() for i in range(self.num_samples)], dtype=torch.float64
        )

    def sample_baseline_index(self, count: int, point: PathPoint) -> Int[Tensor, "batch"]:
        return torch.tensor([int(self._make_generator(i, point, 1).integers(count)) for i in range(self.num_samples)])

    def sample_noise(self, point: PathPoint, leaf: str) -> Tensor:
        """ε of one leaf, in the shape that each example's part of it has by itself; padding gets none."""
        whole, number = torch.zeros_like(self.inputs[leaf]), list(self.inputs).index(leaf)
        for i, own in enumerate(self._split_rows(leaf, whole)):
            shape = self._get_noise_shape(leaf, i, own)
            drawn = torch.tensor(self._make_generator(i, point, 2 + number).standard_normal(shape)).to(own)
            within = own.reshape(own.shape[own.dim() - len(shape) :])  # without axes of one choice or picture
            within[tuple(slice(length) for length in shape)] = drawn * self._compute_noise_scale(point, leaf, i).to(
                drawn
            )
        return whole

    def expand_to_rows(self, values: Float[Tensor, "batch"], leaf: str) -> Tensor:
        """One number per example, to be multiplied with all that is the example's."""
        like = self.inputs[leaf]
        rows = values.to(like.device)[self.find_sample_of_row(leaf)]
        return rows.to(like).reshape(-1, *(1,) * (like.dim() - 1))

    def find_sample_of_row(self, leaf: str) -> Int[Tensor, "row"]:
        """The example that each row of a leaf belongs to: some pictures lie in many rows, one after another."""
        counts = [1] * self.num_samples if len(self.inputs[leaf]) == self.num_samples else self._count_rows(leaf)
        return torch.arange(self.num_samples).repeat_interleave(torch.tensor(counts)).to(self.inputs[leaf].device)

    def _make_generator(self, i: int, point: PathPoint, what: int = 0) -> np.random.Generator:
        return np.random.default_rng([self.seeds[i], point.sample_index or 0, what])

    def _count_rows(self, leaf: str) -> list[int]:
        counts = [len(sample.inputs[leaf]) for sample in self.batch.samples]
        if sum(counts) != len(self.inputs[leaf]):
            raise InputError(f"{leaf} of this model cannot be split by input: path methods require batch_size=1")
        return counts

    def _split_rows(self, leaf: str, whole: Tensor) -> list[Tensor]:
        """Each example's rows, as views."""
        if len(whole) == self.num_samples:
            return list(whole)
        return list(whole.split(self._count_rows(leaf)))

    def _get_noise_shape(self, leaf: str, i: int, part: Tensor) -> tuple[int, ...]:
        given = self.batch.samples[i].inputs.get(leaf)
        if given is None:
            return tuple(part.shape)
        return (
            (*given.shape, part.shape[-1])
            if leaf in self.token_inputs and leaf != "inputs_embeds"
            else tuple(given.shape)
        )

    def _compute_noise_scale(self, point: PathPoint, leaf: str, i: int) -> Float[Tensor, ""]:
        """σ: as it was given, or as a share of how far the example's numbers lie apart; of words, their lengths."""
        sigma = torch.tensor(float(point.noise_std), dtype=torch.float64)
        if point.noise_relative_to == "units":
            return sigma
        if leaf not in self.token_inputs:
            return sigma * _compute_value_range(self._split_rows(leaf, self.inputs[leaf])[i])
        # all words together: before the first word is said, a prefix is one token, which has no range
        lengths = [self._compute_embedding_norms(one, i) for one in self.token_inputs]
        return sigma * _compute_value_range(torch.cat(lengths))

    def _compute_embedding_norms(self, leaf: str, i: int) -> Float[Tensor, "word"]:
        vectors = self.inputs[leaf][i].flatten(0, -2)
        given = self.root_samples[i].inputs.get(leaf)
        return (vectors if given is None else vectors[: len(given)]).norm(dim=-1)


def _compute_value_range(numbers: Tensor) -> Float[Tensor, ""]:
    """Largest minus smallest; of one number alone, its size."""
    low, high = numbers.min().double(), numbers.max().double()
    return high - low if high > low else high.abs()
