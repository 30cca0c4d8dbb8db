"""Layer × token maps of an axis such as gender in a masked language model.

    DR^l_i     = (h^{l+1}_i·q_l − centre_l) / spread_l   side of the axis on which token i lies after layer l
    CAT^l_i    = Σ_k (∂y/∂h^l_{i,k}) h^l_{i,k}            gradient × input of layer l, for the logit of the masked word
    AttCAT^l_i = a^l_i CAT^l_i,  AttDR^l_i = a^l_i DR^l_i,  a^l_i = E_h A^l_{p,i}, p the masked position

Layers are counted from 0; h^l is the input of layer l and h^{l+1} its output.

Special tokens are part of the model's input and excluded from the maps. Directions have a sign and a zero
(`concepts.densray`), so layers can be compared and summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions
from clearhead.adapters.masked_lm import MaskedLMAdapter
from clearhead.concepts.directions import Directions
from clearhead.concepts.hidden_states import compute_layer_states
from clearhead.concepts.layer_hooks import find_self_attention_calls
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import compare_paired, compute_mean_interval
from clearhead.studies.gender.map_similarity import ProfileSimilarity, compute_profile_similarity
from clearhead.targets import MaskedToken

LayerTokenMap = Float[np.ndarray, "layer token"]


@dataclass(frozen=True)
class AxisMaps:
    """Layer × token maps of one sentence, without special tokens.

    Without a masked position, the maps that need one (`cat`, `attcat` and their products) are None, and `attention` is
    the mean over all rows.

    Attributes:
        tokens: Tokens of the sentence.
        dr: Signed distance from the centre of the axis, in units of its spread.
        attention: Attention of the masked position to each token, mean over heads.
        cat: Gradient × input of each layer, for the logit of the masked word.
        mask_index: Index of the mask in `tokens`.
    """

    tokens: tuple[str, ...]
    dr: LayerTokenMap
    attention: LayerTokenMap
    cat: LayerTokenMap | None
    mask_index: int | None

    @property
    def attdr(self) -> LayerTokenMap:
        """Attention × DR."""
        return self.attention * self.dr

    @property
    def attcat(self) -> LayerTokenMap | None:
        """Attention × CAT."""
        return None if self.cat is None else self.attention * self.cat

    @property
    def drcat(self) -> LayerTokenMap | None:
        """DR × CAT."""
        return None if self.cat is None else self.dr * self.cat

    @property
    def dr_attcat(self) -> LayerTokenMap | None:
        """DR × attention × CAT; None without a masked position."""
        return None if self.attcat is None else self.dr * self.attcat

    def get_map(self, name: str) -> LayerTokenMap:
        """Return a map by its name.

        Args:
            name: "dr", "attention", "cat", "attdr", "attcat", "drcat" or "dr_attcat".

        Returns:
            One value per layer and token.

        Raises:
            InputError: The map needs a masked position and the sentence has none.
        """
        values = getattr(self, name)
        if values is None:
            raise InputError(f"{name} requires a masked position, but the sentence has none")
        return np.asarray(values)

    def build_map_with_sum(self, name: str) -> LayerTokenMap:
        """Return the map with its sum over layers as the last row, divided by the Frobenius norm, for plotting.

        Args:
            name: As in `get_map`.

        Returns:
            One row more than layers, with Frobenius norm 1 (zeros stay zero).
        """
        rows = np.vstack([self.get_map(name), self.get_map(name).sum(0)])
        return rows / max(float(np.linalg.norm(rows)), 1e-300)


def compute_axis_maps(
    explainer: Explainer, directions: Directions, text: str, token: str | None = None, mask_index: int = 0
) -> AxisMaps:
    """Compute layer × token maps of a sentence: scores on the axis, attention from the mask, gradient × input.

    Args:
        explainer: Explainer of a masked language model.
        directions: Directions of the axis for every layer.
        text: Sentence, with the model's mask token or without one.
        token: Word whose logit at the mask is explained; the predicted one by default.
        mask_index: Which of several masks to explain.

    Raises:
        InputError: The model is not a masked language model, or a layer has no direction.
    """
    adapter = get_masked_lm_adapter(explainer)
    layers = range(len(find_self_attention_calls(explainer)))
    missing = [layer for layer in layers if layer not in directions]
    if missing:
        raise InputError(
            f"there are no directions for layers {missing}: compute them with fit_axis_directions(explainer, …)"
        )
    if adapter.processor.mask_token not in text:
        return _compute_maps_without_mask(explainer, directions, text, layers)
    target = MaskedToken(token, mask_index)
    tape = explainer.record(text, ("attention", "block_input_gradient", "hidden_state"), target)
    (sample,) = adapter.make_samples(text, InputOptions())
    mask_position = sample.mask_positions[mask_index]
    content_indices = _find_content_indices(sample.units.special)
    states = [call.hidden_state for call in tape.calls]
    dr = _compute_direction_scores(directions, [state[0] for state in states if state is not None], content_indices)
    attention = []
    cat = []
    for call in tape.calls:
        assert call.attention is not None and call.block_input is not None and call.block_input_gradient is not None
        attention.append(call.attention[0].mean(0)[mask_position])
        cat.append((call.block_input[0] * call.block_input_gradient[0]).sum(-1))
    return AxisMaps(
        tokens=tuple(sample.units.names[index] for index in content_indices),
        dr=dr,
        attention=_to_array(attention, content_indices),
        cat=_to_array(cat, content_indices),
        mask_index=content_indices.index(mask_position),
    )


def _compute_maps_without_mask(
    explainer: Explainer, directions: Directions, text: str, layers: Sequence[int]
) -> AxisMaps:
    """Compute DR and attention maps of a text without a mask; CAT needs a masked token and is None."""
    (layer_states,) = compute_layer_states(explainer, [text], layers)
    adapter = get_masked_lm_adapter(explainer)
    sample = layer_states.sample
    batch = adapter.collate([sample])
    tape = explainer.recorder.record(
        batch, lambda output: torch.zeros(1), ("attention",), leaves=adapter.find_grad_input_names(batch)
    )
    content_indices = _find_content_indices(sample.units.special)
    attention = [call.attention[0].mean(0).mean(0) for call in tape.calls if call.attention is not None]
    states = [layer_states.states[layer] for layer in layers]
    return AxisMaps(
        tokens=tuple(sample.units.names[index] for index in content_indices),
        dr=_compute_direction_scores(directions, states, content_indices),
        attention=_to_array(attention, content_indices),
        cat=None,
        mask_index=None,
    )


def _compute_direction_scores(
    directions: Directions, states: Sequence[Tensor], content_indices: Sequence[int]
) -> LayerTokenMap:
    """Project the outputs of layers 0, 1 … onto the directions of those layers."""
    scores = [directions[layer].compute_score(state) for layer, state in enumerate(states)]
    return _to_array(scores, content_indices)


def _to_array(rows: Sequence[Tensor], content_indices: Sequence[int]) -> LayerTokenMap:
    """Stack one row per layer, restricted to these tokens, as float64."""
    return np.asarray(torch.stack([row[list(content_indices)].double().cpu() for row in rows]).numpy())


def _find_content_indices(special: Sequence[bool]) -> list[int]:
    """Return the indices of the tokens that are not special."""
    return [index for index, is_special in enumerate(special) if not is_special]


def get_masked_lm_adapter(explainer: Explainer) -> MaskedLMAdapter:
    """Return the explainer's adapter, checked to be a masked language model with a tokenizer.

    Raises:
        InputError: The model is not a masked language model, or has no tokenizer.
    """
    if not isinstance(explainer.adapter, MaskedLMAdapter) or explainer.adapter.processor is None:
        raise InputError(
            f"{explainer.adapter.name} is not a masked language model with a tokenizer: load one, such as zoo:masked"
        )
    return explainer.adapter


def compute_map_similarity(axis_maps: Sequence[AxisMaps], position: int = 3) -> ProfileSimilarity:
    """Compare AttCAT with DR, summed over layers, with chance level and permutation test.

    Args:
        axis_maps: Maps of sentences with a mask.
        position: Token that the haversine distance compares, next to the first one.
    """
    attcat_profiles = [maps.get_map("attcat").sum(0) for maps in axis_maps]
    dr_profiles = [maps.dr.sum(0) for maps in axis_maps]
    return compute_profile_similarity(attcat_profiles, dr_profiles, position)


def compute_filler_contribution(axis_maps: AxisMaps, filler: str) -> tuple[float, bool]:
    """Compute the contribution of the filler word to Σ|AttCAT|, without the mask.

    Returns:
        The share of the filler (all its subword tokens), and whether it exceeds every other token.

    Raises:
        InputError: The filler is not in the sentence.
    """
    weights = np.abs(axis_maps.get_map("attcat").sum(0))
    if axis_maps.mask_index is not None:
        weights = np.delete(weights, axis_maps.mask_index)
    tokens = [token for index, token in enumerate(axis_maps.tokens) if index != axis_maps.mask_index]
    filler_indices = find_word_pieces(tokens, filler)
    if not filler_indices:
        raise InputError(f"the filler {filler!r} is not in the sentence: {' '.join(axis_maps.tokens)}")
    filler_weight = float(weights[filler_indices].sum())
    other_weights = np.delete(weights, filler_indices)
    share = filler_weight / max(float(weights.sum()), 1e-300)
    return share, bool(filler_weight > other_weights.max(initial=0))


def find_word_pieces(tokens: Sequence[str], word: str) -> list[int]:
    """Find the first run of subword tokens that spell the word, ignoring case; empty if there is none."""
    spellings = [token.removeprefix("##").removeprefix("Ġ").removeprefix("▁").casefold() for token in tokens]
    spelled_word = word.replace(" ", "").casefold()
    for start in range(len(spellings)):
        for stop in range(start + 1, len(spellings) + 1):
            if "".join(spellings[start:stop]) == spelled_word:
                return list(range(start, stop))
    return []


def compare_rankings(
    axis_maps: Sequence[AxisMaps],
    listed_indices: Sequence[Sequence[int]],
    map_names: Sequence[str] = ("attdr", "dr", "attention"),
    num_versions: int = 1,
) -> dict[str, Any]:
    """Test whether the first map ranks the listed words of a sentence higher than the second.

    The measure is the reciprocal rank of the best-ranked listed word. Further maps are reported for comparison:
    attention alone shows how much of AttDR is due to attention.

    Args:
        axis_maps: Maps of the sentences.
        listed_indices: Token indices of the listed words of each sentence.
        map_names: Maps to rank by; the first two are compared.
        num_versions: Number of consecutive sentences that are versions of one; their mean counts as one observation,
            because a sentence and its counterfactual are not independent.

    Returns:
        Mean reciprocal rank by map; "difference", "p" and "effect" of the paired test; "chance", the mean reciprocal
        rank of words in random order.
    """
    ranks: dict[str, np.ndarray] = {}
    for name in map_names:
        reciprocals = [
            _compute_reciprocal_rank(maps, listed, name) for maps, listed in zip(axis_maps, listed_indices, strict=True)
        ]
        ranks[name] = np.reshape(reciprocals, (-1, num_versions)).mean(1)
    _, p_value, effect = compare_paired(ranks[map_names[0]], ranks[map_names[1]])
    chance_ranks = [
        compute_chance_rank(len(maps.tokens), len(listed))
        for maps, listed in zip(axis_maps, listed_indices, strict=True)
    ]
    return {
        **{name: compute_mean_interval(values) for name, values in ranks.items()},
        "difference": compute_mean_interval(ranks[map_names[0]] - ranks[map_names[1]]),
        "p": p_value,
        "effect": effect,
        "chance": float(np.mean(chance_ranks)),
    }


def compute_chance_rank(num_tokens: int, num_listed: int) -> float:
    """Compute the expected reciprocal rank of the best-ranked listed token over all orders of the tokens.

    >>> compute_chance_rank(2, 1), round(compute_chance_rank(3, 1), 3), compute_chance_rank(3, 3)
    (0.75, 0.611, 1.0)
    """
    num_unlisted = num_tokens - num_listed
    none_so_far = 1.0  # P(no listed token among the ranks so far)
    expected = 0.0
    for rank in range(1, num_unlisted + 2):
        listed_at_rank = num_listed / (num_tokens - rank + 1)
        expected += none_so_far * listed_at_rank / rank
        none_so_far *= 1 - listed_at_rank
    return expected


def _compute_reciprocal_rank(axis_maps: AxisMaps, listed: Sequence[int], name: str) -> float:
    """Return 1 / rank of the best listed token by its absolute score summed over layers."""
    weights = np.abs(axis_maps.get_map(name).sum(0))
    best = max(weights[list(listed)])
    return 1 / (1 + int((weights > best).sum()))


def compute_pair_difference(
    axis_maps: AxisMaps, first: int | Sequence[int], second: int | Sequence[int], map_name: str = "dr"
) -> float:
    """Compute the difference of two words along the axis, summed over layers.

    Args:
        axis_maps: Maps of the sentence.
        first: Token index of the first word; several indices are averaged.
        second: Token index of the second word.
        map_name: Map to read.
    """
    sums = axis_maps.get_map(map_name).sum(0)
    return float(np.mean(sums[first]) - np.mean(sums[second]))
