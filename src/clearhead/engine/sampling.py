"""Random numbers of path methods, drawn per example, so that batch, padding and chunks change nothing.

They are keyed by the seed and the content that all targets of an example share: for the generated tokens of a prompt,
the prompt.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError
from clearhead.methods._path import PathPoint


class PathSampler:
    """Draws α, the index of a baseline, and noise for one batch.

    Args:
        batch: The batch.
        inputs: Input vectors by leaf.
        token_inputs: The leaves that are embeddings of tokens.
    """

    def __init__(self, batch: TargetBatch, inputs: Mapping[str, Tensor], token_inputs: Sequence[str]) -> None:
        self.batch = batch
        self.inputs = inputs
        self.num_samples = batch.num_samples
        self.token_inputs = [leaf for leaf in inputs if leaf in token_inputs or leaf == "inputs_embeds"]
        self.root_samples = [batch.adapter.truncate_to_shared_prefix(sample) for sample in batch.samples]
        self.seeds = [root.derive_seed(batch.seed) for root in self.root_samples]

    def sample_alpha(self, point: PathPoint) -> Float[Tensor, "batch"]:
        """Draw α of each example, uniform on 0…1."""
        return torch.tensor(
            [self._make_generator(i, point).uniform() for i in range(self.num_samples)], dtype=torch.float64
        )

    def sample_baseline_index(self, count: int, point: PathPoint) -> Int[Tensor, "batch"]:
        """Draw the index of one of `count` baselines for each example."""
        return torch.tensor([int(self._make_generator(i, point, 1).integers(count)) for i in range(self.num_samples)])

    def sample_noise(self, point: PathPoint, leaf: str) -> Tensor:
        """Draw ε of one leaf, in the shape that each example has without padding; padding gets zero."""
        noise = torch.zeros_like(self.inputs[leaf])
        stream_index = 2 + list(self.inputs).index(leaf)
        for i, sample_noise in enumerate(self._split_rows(leaf, noise)):
            shape = self._get_noise_shape(leaf, i, sample_noise)
            drawn = torch.tensor(self._make_generator(i, point, stream_index).standard_normal(shape)).to(sample_noise)
            scale = self._compute_noise_scale(point, leaf, i).to(drawn)
            # a view without leading axes of size one (a single choice or image)
            unpadded = sample_noise.reshape(sample_noise.shape[sample_noise.dim() - len(shape) :])
            unpadded[tuple(slice(length) for length in shape)] = drawn * scale
        return noise

    def expand_to_rows(self, values: Float[Tensor, "batch"], leaf: str) -> Tensor:
        """Expand one number per example to the rows of a leaf, in a shape that broadcasts."""
        leaf_input = self.inputs[leaf]
        rows = values.to(leaf_input.device)[self.find_sample_of_row(leaf)]
        return rows.to(leaf_input).reshape(-1, *(1,) * (leaf_input.dim() - 1))

    def find_sample_of_row(self, leaf: str) -> Int[Tensor, "row"]:
        """Return the example that each row of a leaf belongs to; some images take several consecutive rows."""
        counts = [1] * self.num_samples if len(self.inputs[leaf]) == self.num_samples else self._count_rows(leaf)
        return torch.arange(self.num_samples).repeat_interleave(torch.tensor(counts)).to(self.inputs[leaf].device)

    def _make_generator(self, i: int, point: PathPoint, stream_index: int = 0) -> np.random.Generator:
        """The generator of one example, point and quantity: 0 for α, 1 for baselines, then one for each leaf."""
        return np.random.default_rng([self.seeds[i], point.sample_index or 0, stream_index])

    def _count_rows(self, leaf: str) -> list[int]:
        counts = [len(sample.inputs[leaf]) for sample in self.batch.samples]
        if sum(counts) != len(self.inputs[leaf]):
            raise InputError(f"{leaf} of this model cannot be split by input: path methods require batch_size=1")
        return counts

    def _split_rows(self, leaf: str, rows: Tensor) -> list[Tensor]:
        """The rows of each example, as views."""
        if len(rows) == self.num_samples:
            return list(rows)
        return list(rows.split(self._count_rows(leaf)))

    def _get_noise_shape(self, leaf: str, i: int, sample_vectors: Tensor) -> tuple[int, ...]:
        """The shape of an example's vectors without padding."""
        sample_input = self.batch.samples[i].inputs.get(leaf)
        if sample_input is None:
            return tuple(sample_vectors.shape)
        if leaf in self.token_inputs and leaf != "inputs_embeds":
            return (*sample_input.shape, sample_vectors.shape[-1])
        return tuple(sample_input.shape)

    def _compute_noise_scale(self, point: PathPoint, leaf: str, i: int) -> Float[Tensor, ""]:
        """σ: absolute, or relative to the range of the example's values (of tokens, of their embedding norms)."""
        sigma = torch.tensor(float(point.noise_std), dtype=torch.float64)
        if point.noise_relative_to == "units":
            return sigma
        if leaf not in self.token_inputs:
            return sigma * _compute_value_range(self._split_rows(leaf, self.inputs[leaf])[i])
        # all token leaves together: the decoder prefix of a first generated token is one token, which has no range
        norms = [self._compute_embedding_norms(token_leaf, i) for token_leaf in self.token_inputs]
        return sigma * _compute_value_range(torch.cat(norms))

    def _compute_embedding_norms(self, leaf: str, i: int) -> Float[Tensor, "token"]:
        vectors = self.inputs[leaf][i].flatten(0, -2)
        sample_input = self.root_samples[i].inputs.get(leaf)
        return (vectors if sample_input is None else vectors[: len(sample_input)]).norm(dim=-1)


def _compute_value_range(values: Tensor) -> Float[Tensor, ""]:
    """Largest minus smallest value; the absolute value if all are equal."""
    low = values.min().double()
    high = values.max().double()
    return high - low if high > low else high.abs()
