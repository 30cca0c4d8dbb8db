"""Masking and deletion of tokens, words or sentences of a text.

`mask`, `pad`, `unk`, `eos` and `bos` replace each masked token by that special token. `delete` removes it.
`written-mask` and `written-pad` write the special token into the text and tokenize it again, as the shap package does
(the rest of a word may then become another token). Special tokens always stay, and so does a mask token to be filled.
Tokens of a prompt can be deleted if the next token is explained, which then follows the shortened prompt.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import find_module_device
from clearhead.adapters.generation import PromptSample
from clearhead.errors import InputError, unknown_value_error
from clearhead.perturbation.hierarchy import Hierarchy, build_text_hierarchy, get_unit_texts
from clearhead.perturbation.players import MaskablePlayers, make_membership_mask, pack_bits
from clearhead.sample import Sample
from clearhead.units import TEXT_LEVELS, UnitAxis, Units, build_numbered_units

SPECIAL_TOKEN_REPLACEMENTS = ("mask", "pad", "unk", "eos", "bos")
WRITTEN_REPLACEMENTS = {"written-mask": "mask", "written-pad": "pad"}
TEXT_REPLACEMENTS = (*SPECIAL_TOKEN_REPLACEMENTS, "delete", *WRITTEN_REPLACEMENTS)
#: The read-out of models that read a text at its end-of-text token (CLIP).
END_OF_TEXT = "end of text"


@dataclass
class TextPlayers(MaskablePlayers):
    """The tokens, words or sentences of a text as players.

    Attributes:
        adapter: The model's adapter, or the reader of the stream.
        sample: The unmasked sample.
        units: The tokens.
        unit: "token", "word" or "sentence".
        replacement: What masked tokens are replaced by.

    Args:
        adapter: The model's adapter, or the reader of the stream.
        sample: The unmasked sample.
        units: The tokens.
        unit: "token", "word" or "sentence".
        replacement: What masked tokens are replaced by; None for the default of the tokenizer.

    Raises:
        InputError: If an option is unknown or impossible for this tokenizer, or every token is special.
    """

    adapter: Any
    sample: Sample
    units: Units
    unit: str
    replacement: str

    def __init__(self, adapter: Any, sample: Sample, units: Units, unit: str, replacement: str | None) -> None:
        self.adapter = adapter
        self.sample = sample
        self.units = units
        self.unit = unit
        if unit not in TEXT_LEVELS:
            raise unknown_value_error("unit", unit, TEXT_LEVELS)
        self.merged_units, parents = units.merge(unit)
        self.merged_unit_of_unit = torch.as_tensor(parents)
        is_fixed = self._find_fixed_units()
        _, players = torch.unique(self.merged_unit_of_unit[~is_fixed], return_inverse=True)
        self.player_of_unit = torch.full((len(units),), -1)
        self.player_of_unit[~is_fixed] = players
        self.num_players = int(self.player_of_unit.max()) + 1
        if not self.num_players:
            raise InputError("nothing in this text can be masked: every token is special")
        if replacement is None:
            self.replacement = self._choose_default_replacement()
        else:
            self.replacement = self._validate_replacement(replacement)
        self.cache_key = (self.replacement,)

    def _find_fixed_units(self) -> Bool[Tensor, "unit"]:
        """Return which units are never masked: special tokens, by name or id, and mask tokens to be filled."""
        is_fixed = torch.tensor(self.units.special)
        if "input_ids" in self.sample.inputs:
            special_ids = torch.tensor(sorted(self.adapter.tokenizer_wrapper.special_ids), dtype=torch.long)
            is_fixed |= torch.isin(self.sample.inputs["input_ids"].cpu(), special_ids)
        is_fixed[list(self.sample.mask_positions)] = True
        return is_fixed

    def _find_replacement_id(self, replacement: str) -> int | None:
        """Return the id of a special token, or None if the tokenizer does not have it."""
        if replacement == "mask":
            mask_id: int | None = getattr(self.adapter, "mask_token_id", None)
            if mask_id is not None:
                return mask_id
        return self.adapter.tokenizer_wrapper.get_special_token_id(replacement)

    def _choose_default_replacement(self) -> str:
        """Choose the mask token, or the first available of unk, eos, bos and pad, or deletion."""
        has_tokenizer = self.adapter.tokenizer_wrapper.tokenizer is not None
        if self._find_replacement_id("mask") is None and not has_tokenizer and self._can_delete_units():
            return "delete"
        unusable = {*self._find_readout_token_ids(), None}
        for replacement in ("mask", "unk", "eos", "bos", "pad"):
            if self._find_replacement_id(replacement) not in unusable:
                return replacement
        return self._validate_replacement("delete")

    def _find_readout_token_ids(self) -> set[int | None]:
        """Return the tokens that determine the read-out position: as replacements they would move it."""
        config = getattr(self.adapter.model, "config", None)
        readout = self.adapter.readout
        if readout == "last":
            return {getattr(self.adapter.tokenizer_wrapper.config, "pad_token_id", None)}
        if readout == END_OF_TEXT:
            highest_id = None
            if self.adapter.eos_is_highest_id:
                highest_id = getattr(config, "vocab_size", 0) - 1
            return {getattr(config, "eos_token_id", None), highest_id}
        return set()

    def _can_delete_units(self) -> bool:
        """Whether the target refers to no position of the text, except for mask tokens, whose positions are tracked."""
        # adapters of token labels and answer spans have a target_class, text towers a model_type
        refers_to_positions = hasattr(self.adapter, "target_class") or hasattr(self.adapter, "model_type")
        return type(self.sample) is Sample and not refers_to_positions

    def _is_next_token_target(self) -> bool:
        """Whether the target is only the token after a prompt, which is read at the last position of any length."""
        last = len(self.units) - 1
        return (
            type(self.sample) is PromptSample
            and self.sample.first_predicting_row == last
            and self.sample.logit_rows == (last,)
        )

    def _validate_replacement(self, replacement: str) -> str:
        """Check that a replacement suits the target, the input and the tokenizer, and return it."""
        name = self.adapter.model_class_name
        if replacement not in TEXT_REPLACEMENTS:
            raise unknown_value_error("replacement in a text", replacement, TEXT_REPLACEMENTS)
        is_special_token = replacement in SPECIAL_TOKEN_REPLACEMENTS
        can_delete = self._can_delete_units() or (replacement == "delete" and self._is_next_token_target())
        if not is_special_token and not can_delete:
            raise InputError(
                f"replacement={replacement!r} would move the tokens that the target of {name} refers to: choose "
                "another of " + ", ".join(SPECIAL_TOKEN_REPLACEMENTS)
            )
        if replacement in WRITTEN_REPLACEMENTS and (
            self.units.offsets is None or len(self.units.texts) != 1 or self.sample.mask_positions
        ):
            raise InputError(f"replacement={replacement!r} is only for a single input given as a text, without masks")
        if is_special_token and self._find_replacement_id(replacement) is None:
            raise InputError(
                f"replacement={replacement!r}, but no such token of {name} is known: load its tokenizer together with "
                "the model, or choose another of " + ", ".join(TEXT_REPLACEMENTS)
            )
        if (
            is_special_token
            and self.adapter.readout == END_OF_TEXT
            and self._find_replacement_id(replacement) in self._find_readout_token_ids()
        ):
            raise InputError(
                f"replacement={replacement!r} is the end-of-text token, which is the read-out position of {name}: "
                "choose another"
            )
        return replacement

    def expand_to_units(self, keep: Bool[Tensor, "*coalition player"]) -> Bool[Tensor, "*coalition unit"]:
        """Convert masks of players to masks of units; fixed units are always kept.

        Args:
            keep: Which players are kept, for one or several coalitions.

        Returns:
            Which units are kept.
        """
        return (self.player_of_unit < 0) | keep[..., self.player_of_unit.clamp(min=0)]

    def compute_mask_keys(self, keep: Bool[Tensor, "coalition player"]) -> list[bytes]:
        """Return the mask of the tokens, packed into bytes, for each coalition."""
        return pack_bits(self.expand_to_units(keep))

    def count_units(self, keep: Bool[Tensor, "coalition player"]) -> list[int]:
        """Return the number of kept units if masked ones are deleted, else that of all units."""
        if self.replacement == "delete":
            return self.expand_to_units(keep).sum(1).tolist()
        return [len(self.units)] * len(keep)

    def keep_only(self, keep: Bool[Tensor, "player"]) -> Sample:
        """Return the sample with the tokens of all other players replaced or deleted."""
        kept = self.expand_to_units(keep)
        if self.replacement == "delete":
            return self._delete_units(kept)
        if self.replacement in WRITTEN_REPLACEMENTS:
            return self._retokenize(kept)
        token_id = self._find_replacement_id(self.replacement) or 0
        inputs = dict(self.sample.inputs)
        if "input_ids" in inputs:
            inputs["input_ids"] = inputs["input_ids"].masked_fill(~kept.to(inputs["input_ids"].device), token_id)
        else:
            vectors = inputs["inputs_embeds"]
            embeddings = self.adapter.embeddings
            with torch.no_grad():
                token_ids = torch.tensor([[token_id]], device=find_module_device(embeddings))
                replacement_vector = embeddings(token_ids)[0].to(vectors)
            inputs["inputs_embeds"] = torch.where(kept.to(vectors.device)[:, None], vectors, replacement_vector)
        return replace(self.sample, inputs=inputs)

    def _delete_units(self, kept: Bool[Tensor, "unit"]) -> Sample:
        """Return the sample without masked units."""
        indices = kept.nonzero().flatten().tolist()
        if not indices:
            raise InputError(
                "replacement='delete' removes the whole text, but a model cannot process an empty text: choose another "
                "of " + ", ".join(SPECIAL_TOKEN_REPLACEMENTS)
            )
        inputs = {}
        for name, tensor in self.sample.inputs.items():
            if tensor.shape[:1] != (len(self.units),):
                inputs[name] = tensor
            elif name == "position_ids":  # positions of the shortened text
                inputs[name] = tensor[: len(indices)]
            else:
                inputs[name] = tensor[indices]
        axes = {stream: UnitAxis.concat(_select_units(self.units, indices)) for stream in self.sample.axes}
        mask_positions = tuple(indices.index(position) for position in self.sample.mask_positions)
        shortened = replace(self.sample, inputs=inputs, axes=axes, mask_positions=mask_positions)
        if not isinstance(shortened, PromptSample):
            return shortened
        last = len(indices) - 1
        return replace(shortened, first_predicting_row=last, logit_rows=(last,))

    def _retokenize(self, kept: Bool[Tensor, "unit"]) -> Sample:
        """Write the special token into the text in place of masked units and tokenize it again."""
        token = getattr(self.adapter.tokenizer_wrapper.tokenizer, f"{WRITTEN_REPLACEMENTS[self.replacement]}_token")
        texts = [
            text if is_kept else f" {token}" for text, is_kept in zip(get_unit_texts(self.units), kept, strict=True)
        ]
        encoding = self.adapter.tokenizer_wrapper.call_tokenizer(
            "__call__", " ".join("".join(texts).split()), verbose=False
        )
        num_tokens = len(encoding["input_ids"])
        return replace(
            self.sample,
            inputs={name: torch.as_tensor(encoding[name]) for name in self.sample.inputs},
            axes={s: UnitAxis.concat(build_numbered_units(num_tokens, s)) for s in self.sample.axes},
        )

    def spread_to_units(self, scores: Float[Tensor, "player"]) -> Float[Tensor, "unit"]:
        """Divide each player's score equally among its tokens; fixed tokens get zero."""
        sizes = torch.bincount(self.player_of_unit[self.player_of_unit >= 0], minlength=self.num_players)
        return (scores / sizes)[self.player_of_unit.clamp(min=0)].masked_fill(self.player_of_unit < 0, 0)

    def add_up_units(self, unit_scores: Float[Tensor, "unit"]) -> Float[Tensor, "player"]:
        """Add up the scores of the tokens of each player."""
        is_player = self.player_of_unit >= 0
        scores = unit_scores.new_zeros(self.num_players)
        return scores.index_add_(0, self.player_of_unit[is_player], unit_scores[is_player])

    def spread_fixed_leaves(self, leaf_scores: Float[Tensor, "leaf"]) -> Float[Tensor, "unit"]:
        """Divide the score of each merged unit equally among its tokens."""
        return (leaf_scores / torch.bincount(self.merged_unit_of_unit))[self.merged_unit_of_unit]

    def build_hierarchy(self) -> Hierarchy:
        """Build the tree of words or tokens; fixed ones are leaves without a player."""
        player_of_merged_unit = [
            int(self.player_of_unit[self.merged_unit_of_unit == i].max()) for i in range(len(self.merged_units))
        ]
        return build_text_hierarchy(self.merged_units, player_of_merged_unit)

    def make_windows(self, size: int) -> Bool[Tensor, "window player"]:
        """Return all runs of `size` neighbouring players without a fixed token between them."""
        first_units = [int((self.player_of_unit == player).nonzero()[0]) for player in range(self.num_players)]
        fixed_counts = (self.player_of_unit < 0).cumsum(0)
        run_of_player = fixed_counts[first_units]  # players between the same fixed tokens form a run
        windows = []
        for run in run_of_player.unique().tolist():
            players = (run_of_player == run).nonzero().flatten().tolist()
            width = min(size, len(players))
            windows += [players[start : start + width] for start in range(len(players) - width + 1)]
        return make_membership_mask(windows, self.num_players)


def _select_units(units: Units, indices: list[int]) -> Units:
    """Return the units at these indices."""

    def select(values: tuple[Any, ...] | None) -> Any:
        if values is None:
            return None
        return tuple(values[i] for i in indices)

    return replace(
        units,
        names=select(units.names),
        special=select(units.special),
        segments=select(units.segments),
        offsets=select(units.offsets),
    )
