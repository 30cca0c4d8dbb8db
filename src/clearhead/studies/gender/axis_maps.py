"""An axis such as gender, layer by layer and token by token, in a masked language model.

    DR^l_i     = (h^l_i·q_l − centre_l) / spread_l       which side of the axis token i is on after layer l
    CAT^l_i    = Σ_k (∂y/∂h^{l−1}_{i,k}) h^{l−1}_{i,k}    what the token, going into layer l, does for the masked word
    AttCAT^l_i = a^l_i CAT^l_i,  AttDR^l_i = a^l_i DR^l_i,  a^l_i = E_h A^l_{p,i}, p the masked position

Special tokens are seen by the model and left out of the result. Directions have a sign and a zero (`concepts.densray`),
so layers can be compared and added up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How
from clearhead.adapters.masked_lm import MaskedLanguageModel
from clearhead.concepts.directions import Directions
from clearhead.concepts.hidden_states import states_of
from clearhead.concepts.layer_hooks import own_calls
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import interval, paired
from clearhead.studies.gender.map_similarity import Similarity, similarity
from clearhead.targets import MaskedWord

Map = Float[np.ndarray, "layer token"]


@dataclass(frozen=True)
class Flow:
    """One sentence: layer × token maps of all quantities, without special tokens.

    The maps of a sentence without a mask that need one (`cat`, `attcat` and their products) are None, and its
    attention is the mean over all rows.
    """

    tokens: tuple[str, ...]
    dr: Map
    attention: Map
    cat: Map | None
    mask: int | None

    @property
    def attdr(self) -> Map:
        return self.attention * self.dr

    @property
    def attcat(self) -> Map | None:
        return None if self.cat is None else self.attention * self.cat

    @property
    def drcat(self) -> Map | None:
        return None if self.cat is None else self.dr * self.cat

    @property
    def dr_attcat(self) -> Map | None:
        return None if self.attcat is None else self.dr * self.attcat

    def of(self, name: str) -> Map:
        found = getattr(self, name)
        if found is None:
            raise InputError(f"{name} needs a masked position, and the sentence has none")
        return np.asarray(found)

    def with_sum(self, name: str) -> Map:
        """The map with the sum over layers as its last row, all of it divided by its Frobenius norm: for a picture."""
        whole = np.vstack([self.of(name), self.of(name).sum(0)])
        return whole / max(float(np.linalg.norm(whole)), 1e-300)


def flow(ex: Explainer, directions: Directions, text: str, word: str | None = None, mask: int = 0) -> Flow:
    """The maps of one sentence; `word` is what the mask is explained for (the predicted one, if left out)."""
    subject = masked_model(ex)
    layers = range(1, len(own_calls(ex)) + 1)
    missing = [layer for layer in layers if layer not in directions]
    if missing:
        raise InputError(f"there are no directions of layers {missing}: find them with axis_directions(ex, …)")
    if subject.processor.mask_token not in text:
        return _without_mask(ex, directions, text, layers)
    target = MaskedWord(word, mask)
    tape = ex.record(text, ("attention", "block_input_gradient", "hidden_state"), target)
    (sample,) = subject.samples(text, How())
    p = sample.masks[mask]
    inside = _inside(sample.units.special)
    states = [call.hidden_state for call in tape.calls]
    dr = _dr(directions, [part[0] for part in states if part is not None], inside)
    attention, cat = [], []
    for call in tape.calls:
        assert call.attention is not None and call.block_input is not None and call.block_input_gradient is not None
        attention.append(call.attention[0].mean(0)[p])
        cat.append((call.block_input[0] * call.block_input_gradient[0]).sum(-1))
    return Flow(
        tokens=tuple(sample.units.names[i] for i in inside),
        dr=dr,
        attention=_array(attention, inside),
        cat=_array(cat, inside),
        mask=inside.index(p),
    )


def _without_mask(ex: Explainer, directions: Directions, text: str, layers: Sequence[int]) -> Flow:
    (found,) = states_of(ex, [text], layers)
    subject, sample = masked_model(ex), found.sample
    batch = subject.collate([sample])
    tape = ex.recorder.record(batch, lambda output: torch.zeros(1), ("attention",), leaves=subject.leaves(batch))
    inside = _inside(sample.units.special)
    rows = [call.attention[0].mean(0).mean(0) for call in tape.calls if call.attention is not None]
    names = tuple(sample.units.names[i] for i in inside)
    return Flow(names, _dr(directions, [found.states[k] for k in layers], inside), _array(rows, inside), None, None)


def _dr(directions: Directions, states: Sequence[Tensor], inside: Sequence[int]) -> Map:
    return _array([directions[layer].score(part) for layer, part in enumerate(states, 1)], inside)


def _array(rows: Sequence[Tensor], inside: Sequence[int]) -> Map:
    return np.asarray(torch.stack([row[list(inside)].double().cpu() for row in rows]).numpy())


def _inside(special: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(special) if not flag]


def masked_model(ex: Explainer) -> MaskedLanguageModel:
    if not isinstance(ex.subject, MaskedLanguageModel) or ex.subject.processor is None:
        raise InputError(
            f"{ex.subject.name} is no masked language model with a tokenizer: load one, such as zoo:masked"
        )
    return ex.subject


def alike(flows: Sequence[Flow], place: int = 3) -> Similarity:
    """AttCAT against DR, summed over layers, with chance level and permutation test."""
    return similarity([one.of("attcat").sum(0) for one in flows], [one.dr.sum(0) for one in flows], place)


def filler_share(one: Flow, filler: str) -> tuple[float, bool]:
    """The share of the filler (all its pieces) in Σ|AttCAT| without the mask, and whether it is the largest word."""
    weights = np.abs(one.of("attcat").sum(0))
    weights = np.delete(weights, one.mask) if one.mask is not None else weights
    tokens = [token for i, token in enumerate(one.tokens) if i != one.mask]
    pieces = pieces_of(tokens, filler)
    if not pieces:
        raise InputError(f"the filler {filler!r} is not in the sentence: {' '.join(one.tokens)}")
    own = float(weights[pieces].sum())
    others = np.delete(weights, pieces)
    return own / max(float(weights.sum()), 1e-300), bool(own > others.max(initial=0))


def pieces_of(tokens: Sequence[str], filler: str) -> list[int]:
    """The run of tokens that spell the filler."""
    plain = [token.removeprefix("##").removeprefix("Ġ").removeprefix("▁").casefold() for token in tokens]
    wanted = filler.replace(" ", "").casefold()
    for start in range(len(plain)):
        for stop in range(start + 1, len(plain) + 1):
            if "".join(plain[start:stop]) == wanted:
                return list(range(start, stop))
    return []


def clearer(
    flows: Sequence[Flow],
    listed: Sequence[Sequence[int]],
    maps: Sequence[str] = ("attdr", "dr", "attention"),
    versions: int = 1,
) -> dict[str, Any]:
    """Does the first map rank the listed words of a sentence higher than the second? Reciprocal ranks, difference, p.

    The best-placed of the listed words counts. Further maps stand beside them: attention alone tells what AttDR owes to
    it. chance: the mean reciprocal rank of words in random order. Of sentences that come in several versions, one after
    the other, the mean over versions counts: a sentence and its counterfactual are not independent.
    """
    ranks = {
        name: np.reshape([_reciprocal(*pair, name) for pair in zip(flows, listed, strict=True)], (-1, versions)).mean(1)
        for name in maps
    }
    _, p, effect = paired(ranks[maps[0]], ranks[maps[1]])
    found: dict[str, Any] = {name: interval(values) for name, values in ranks.items()}
    by_chance = [chance_rank(len(one.tokens), len(own)) for one, own in zip(flows, listed, strict=True)]
    found |= {"difference": interval(ranks[maps[0]] - ranks[maps[1]]), "p": p, "effect": effect}
    return found | {"chance": float(np.mean(by_chance))}


def chance_rank(tokens: int, listed: int) -> float:
    """The mean of 1 / (rank of the best of the listed ones) over all orders.

    >>> chance_rank(2, 1), round(chance_rank(3, 1), 3), chance_rank(3, 3)
    (0.75, 0.611, 1.0)
    """
    free = tokens - listed
    below, found = 1.0, 0.0
    for rank in range(1, free + 2):  # P(best is at `rank`) = P(no listed one before) · P(a listed one here)
        here = listed / (tokens - rank + 1)
        found += below * here / rank
        below *= 1 - here
    return found


def _reciprocal(one: Flow, listed: Sequence[int], name: str) -> float:
    weights = np.abs(one.of(name).sum(0))
    best = max(weights[list(listed)])
    return 1 / (1 + int((weights > best).sum()))


def pair_score(one: Flow, first: int | Sequence[int], second: int | Sequence[int], name: str = "dr") -> float:
    """How far apart two words of a sentence lie on the axis, summed over layers; of several pieces, their mean."""
    sums = one.of(name).sum(0)
    return float(np.mean(sums[first]) - np.mean(sums[second]))
