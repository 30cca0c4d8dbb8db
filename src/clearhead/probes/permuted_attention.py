"""Permutation: the weights of a row shuffled over the keys that it sees, a hundred times (Jain & Wallace, 2019).

    Δ = median over draws of TVD(ŷ(A), ŷ(πA)),     TVD(p, q) = ½ Σ_o |p_o − q_o|

held against the largest weight of the row that is read (mean over heads). Random numbers belong to the input: they do
not depend on the batch that it is in.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.interventions.attention_patch import Visible, Weights
from clearhead.probes.base import Batch, Probed, Progress, Scope, Short, scope_of, shortens
from clearhead.probes.divergences import total_variation
from clearhead.probes.probe_result import ProbeResult, findings

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: How many inputs share a pass, and how many draws of one input.
INPUTS, DRAWS = 32, 25

MEANINGS = {
    "median TVD": "how far the answer moves: 0 not at all, 1 to another with certainty",
    "largest weight": "of the row that is read, mean over heads",
    "flips": "share of draws that change the predicted class",
}


def permutation(
    ex: "Explainer",
    inputs: Any,
    scope: str = "S1",
    *,
    layer: int | None = None,
    heads: Sequence[int] | None = None,
    draws: int = 100,
    keep: bool = False,
    shared: bool = False,
    frozen: bool = False,
    seed: int = 0,
    target: Any = None,
    candidates: Sequence[str | int] | None = None,
    by_head: bool = False,
    progress: Progress = False,
) -> ProbeResult:
    """Shuffle attention over the keys that it sees, and measure how far the answer moves.

    keep: leave the weights on special tokens and on the query itself where they are
    shared: one permutation for all heads, and not one for each
    frozen: pin the attention of later layers to what it was
    candidates: compare the probabilities of these labels (or masked words) among themselves, and not of all
    by_head: measure every head of every layer by itself, too (all its rows), as a table
    """
    if draws < 1:
        raise InputError(f"draws={draws}: it must be at least 1")
    reach, probed = scope_of(scope, layer, heads), Probed(ex, inputs, target, candidates)
    probed.check(reach)
    shuffling = Shuffling(draws, keep, shared, seed)
    lines: list[dict[str, Any]] = [{}] * len(probed.samples)
    short = shortens(probed) and reach.name == "S1"
    for places, batch in probed.batches(INPUTS, progress):
        found = _in_last_row(batch, shuffling, reach) if short else _in_whole(batch, shuffling, reach, frozen)
        for place, line in zip(places, found, strict=True):
            lines[place] = line
    settings = {"scope": str(reach), "draws": draws, "keep": keep, "shared": shared, "frozen": frozen, "seed": seed}
    tables = {"median TVD by layer and head": _by_head(probed, shuffling, frozen)} if by_head else {}
    shown = findings(lines, MEANINGS)
    return ProbeResult("permutation", probed.subject.name, settings, lines, shown, _says(reach), tables)


class Shuffling:
    """How weights are shuffled."""

    def __init__(self, draws: int, keep: bool, shared: bool, seed: int) -> None:
        self.draws, self.keep, self.shared, self.seed = draws, keep, shared, seed

    def parts(self) -> list[range]:
        """The draws, a few at a time."""
        return [range(start, min(start + DRAWS, self.draws)) for start in range(0, self.draws, DRAWS)]

    def noise(
        self, seed: int, part: range, layer: int, heads: int, rows: int, width: int
    ) -> Float[Tensor, "draw head row key"]:
        """Random numbers for a part of the draws in one layer of one input, which `seed` belongs to."""
        own = (seed + 1_000_003 * part.start + 7919 * layer) % 2**63
        generator = torch.Generator().manual_seed(own)
        shape = (len(part), 1 if self.shared else heads, rows, width)
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def movable(
        self, visible: Bool[Tensor, "*row key"], special: Bool[Tensor, "*#row key"], itself: Bool[Tensor, "*#row key"]
    ) -> Bool[Tensor, "*row key"]:
        return visible & ~special & ~itself if self.keep else visible


def shuffled(
    weights: Float[Tensor, "*row key"], movable: Bool[Tensor, "*#row key"], noise: Float[Tensor, "*#row key"]
) -> Float[Tensor, "*row key"]:
    """Weights at movable keys in the order of the noise; all others stay where they are.

    >>> everywhere = torch.tensor([True, True, False, True])
    >>> shuffled(torch.tensor([0.1, 0.2, 0.3, 0.4]), everywhere, torch.tensor([0.9, 0.1, 0.0, 0.5]))
    tensor([0.2000, 0.4000, 0.3000, 0.1000])
    """
    movable, noise = movable.expand(weights.shape), noise.expand(weights.shape)
    after = 2 + torch.arange(weights.shape[-1], dtype=noise.dtype, device=noise.device)
    places = (~movable).to(torch.uint8).argsort(dim=-1, stable=True)
    drawn = torch.where(movable, noise, after).argsort(dim=-1)
    return torch.empty_like(weights).scatter(-1, places, weights.gather(-1, drawn))


def _in_last_row(batch: Batch, shuffling: Shuffling, scope: Scope) -> list[dict[str, Any]]:
    """Everything below the last layer once, of the last layer the row that is read."""
    short = Short(batch)
    heads, top = short.attention.shape[1], batch.probed.layers - 1
    chosen = list(range(heads) if scope.heads is None else scope.heads)
    own = short.attention.cpu()
    weights = own[:, None].repeat(1, shuffling.draws, 1, 1)
    for i, (sample, length) in enumerate(zip(batch.samples, batch.lengths, strict=True)):
        itself = torch.arange(length) == short.rows[i]
        movable = shuffling.movable(short.visible[i, :length].cpu(), batch.special[i, :length], itself)
        seed = sample.seed(shuffling.seed)
        noise = [shuffling.noise(seed, part, top, heads, 1, length)[:, :, 0] for part in shuffling.parts()]
        moved = shuffled(weights[i, :, :, :length], movable, torch.cat(noise))
        weights[i, :, chosen, :length] = moved[:, chosen]
    with torch.no_grad():
        found = short.answers(weights.to(short.attention))
    largest = own.mean(1).amax(-1)
    return [_line(batch, i, short.clean[i], found[i], float(largest[i])) for i in range(len(found))]


def _in_whole(batch: Batch, shuffling: Shuffling, scope: Scope, frozen: bool) -> list[dict[str, Any]]:
    """The whole model once for each draw, a few draws of one input at a time."""
    lines = []
    for i in range(len(batch.samples)):
        one = Batch(batch.probed, [batch.samples[i]])
        found = [_drawn(one.repeated(len(part)), part, shuffling, scope, frozen) for part in shuffling.parts()]
        lines.append(_line(one, 0, one.probabilities[0], torch.cat(found), one.largest(scope)))
    return lines


def _by_head(probed: Probed, shuffling: Shuffling, frozen: bool) -> list[list[float]]:
    """The median of each head, mean over inputs."""
    batches = [batch for _, batch in probed.batches(INPUTS)]

    def mean(scope: Scope) -> float:
        lines = [line for batch in batches for line in _in_whole(batch, shuffling, scope, frozen)]
        return sum(line["median TVD"] for line in lines) / len(lines)

    return [[mean(Scope("S3", layer, (head,))) for head in range(probed.heads)] for layer in range(probed.layers)]


def _drawn(batch: Batch, part: range, shuffling: Shuffling, scope: Scope, frozen: bool) -> Float[Tensor, "draw label"]:
    seed, length = batch.samples[0].seed(shuffling.seed), batch.lengths[0]

    def weights(attention: Weights, visible: Visible, layer: int) -> Weights:
        heads, rows = attention.shape[1], 1 if scope.only_row else attention.shape[2]
        noise = shuffling.noise(seed, part, layer, heads, rows, length)
        itself = torch.zeros(1, length) if batch.probed.pools else torch.eye(length)
        movable = shuffling.movable(visible.cpu(), batch.special[:1, None, None], itself.bool())
        return shuffled(attention, movable.to(attention.device), noise.to(attention.device))

    with torch.no_grad():
        return batch.under(weights, scope, frozen)


def _line(
    batch: Batch, i: int, clean: Float[Tensor, "label"], drawn: Float[Tensor, "draw label"], largest: float
) -> dict[str, Any]:
    moved = total_variation(drawn, clean, batch.probed.multi_label)
    best = int(clean.argmax())
    return {
        "input": batch.name(i),
        "prediction": batch.probed.label(clean),
        "median TVD": float(moved.median()),
        "largest weight": largest,
        "flips": float((drawn.argmax(-1) != best).double().mean()),
    }


def _says(scope: Scope) -> str:
    bypass = " The residual stream goes past attention, so that a small change is no proof that it is idle."
    return (
        f"Weights were shuffled at scope {scope} and everything else was kept. Where the answer hardly moves although "
        "one weight is large, the answer does not hang on which units that row attends to; where it moves, it does."
        f"{bypass if scope.only_row else ''} It tests this trained computation with weights that it never made, and "
        "says nothing about weights that other training would have given it."
    )
