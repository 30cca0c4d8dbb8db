"""Masking of units that are vectors in the model's input: the regions of an image, the steps of a time series.

`remove` removes the vectors, if the model takes any number of them. `mean` replaces each by the mean of all.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import unknown_value_error
from clearhead.perturbation.hierarchy import Hierarchy, build_spatial_hierarchy
from clearhead.perturbation.players import MaskablePlayers, make_membership_mask, pack_bits
from clearhead.sample import Sample
from clearhead.units import Units

FEATURE_REPLACEMENTS = ("remove", "mean")
#: An input that says which vectors the model attends to.
ATTENTION_MASK_SUFFIX = "attention_mask"


class FeaturePlayers(MaskablePlayers):
    """The units of an input of vectors as players.

    Attributes:
        player_of_unit: The player of each unit; −1 for special units, which always stay.
        input_names: The inputs with one row per unit; the first one holds the vectors.

    Args:
        sample: The input.
        units: The units, one per vector.
        input_names: The inputs with one row per unit, vectors first.
        replacement: "remove" or "mean"; None for "remove" if there is an attention mask among the inputs, else "mean".

    Raises:
        InputError: If the replacement is unknown or impossible.
    """

    def __init__(self, sample: Sample, units: Units, input_names: Sequence[str], replacement: str | None) -> None:
        self.sample = sample
        self.units = units
        self.input_names = list(input_names)
        self.unit = units.kind
        is_special = torch.tensor(units.special)
        self.player_of_unit = torch.where(is_special, -1, (~is_special).cumsum(0) - 1)
        self.num_players = int((~is_special).sum())
        replacements = FEATURE_REPLACEMENTS if self._can_remove else FEATURE_REPLACEMENTS[1:]
        self.replacement = replacement or replacements[0]
        if self.replacement not in replacements:
            raise unknown_value_error(f"replacement of a {units.kind}", self.replacement, replacements)
        self.cache_key = (self.replacement, units.kind)

    @property
    def _can_remove(self) -> bool:
        """Whether the model takes any number of vectors, with a mask of those that it attends to."""
        return any(name.endswith(ATTENTION_MASK_SUFFIX) for name in self.input_names)

    def _expand_to_units(self, keep: Bool[Tensor, "*coalition player"]) -> Bool[Tensor, "*coalition unit"]:
        return (self.player_of_unit < 0) | keep[..., self.player_of_unit.clamp(min=0)]

    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample without the vectors of all other players, or with the mean vector in their place.

        If every vector is removed, one of zeros is left, which attention masks out: models need at least one.
        """
        kept = self._expand_to_units(keep)
        rows = {name: self.sample.inputs[name] for name in self.input_names}
        if self.replacement == "remove":
            indices = kept.nonzero().flatten()
            if len(indices):
                rows = {name: tensor[indices] for name, tensor in rows.items()}
            else:
                rows = {name: torch.zeros_like(tensor[:1]) for name, tensor in rows.items()}
        else:
            vectors = rows[self.input_names[0]]
            mean = vectors.double().mean(0).to(vectors)
            rows[self.input_names[0]] = torch.where(kept.to(vectors.device)[:, None], vectors, mean)
        return replace(self.sample, inputs={**self.sample.inputs, **rows})

    def compute_mask_keys(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """Return the coalitions themselves as keys: each masks other vectors."""
        return pack_bits(keep)

    def count_units(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """Return the number of vectors that are left, if masked ones are removed."""
        if self.replacement == "remove":
            return self._expand_to_units(keep).sum(1).tolist()
        return [len(self.units)] * len(keep)

    def spread_to_units(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """Return the score of each unit's player; special units get zero."""
        return scores[self.player_of_unit.clamp(min=0)].masked_fill(self.player_of_unit < 0, 0)

    def spread_fixed_leaves(self, leaf_scores: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """Return zeros: every leaf is a player."""
        return torch.zeros(len(self.units), dtype=leaf_scores.dtype)

    def add_up_units(self, unit_scores: Float[Tensor, "unit"]) -> Float[Tensor, "player"]:
        """Return the scores of the units that are players."""
        return unit_scores[self.player_of_unit >= 0]

    def build_hierarchy(self) -> Hierarchy:
        """Halve the image along its longer side, by the centres of the regions; units without boxes by their order."""
        boxes = self.units.boxes or [None] * len(self.units)
        centroids = [
            (float(index), 0.0) if box is None else ((box[1] + box[3]) / 2, (box[0] + box[2]) / 2)
            for index, box in enumerate(boxes)
            if not self.units.special[index]
        ]
        return build_spatial_hierarchy(torch.tensor(centroids, dtype=torch.float64).numpy())

    def make_windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Return all runs of `size` units in their order."""
        width = min(size, self.num_players)
        starts = range(self.num_players - width + 1)
        return make_membership_mask([range(start, start + width) for start in starts], self.num_players)
