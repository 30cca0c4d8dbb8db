"""A model without a direction: the direction removed in every layer, hard debiasing, conceptor negation.

All three are a linear map of the states of a layer, h ← P h:
    a direction, or several: P = I − Σ q qᵀ (DensRay's, or the principal components of word pairs: "hard debiasing",
        Bolukbasi et al. 2016, here for states of layers)
    conceptor negation (Liu et al. 2018): P = I − R (R + α⁻² I)⁻¹ with R = E[x xᵀ] of both sets' vectors; soft: what
        these vectors have in common is damped the more, the more of them lies there
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.concepts.densray import Vectors, placed, top, two_sets
from clearhead.concepts.directions import Direction
from clearhead.concepts.layer_hooks import Act, acting, layer_number, sites
from clearhead.errors import InputError
from clearhead.explainer import Explainer

Map = Float[Tensor, "model model"]


def hard_direction(
    first: Vectors,
    second: Vectors,
    *,
    dimensions: int = 1,
    names: tuple[str, str] = ("first", "second"),
) -> Direction:
    """The principal components of pairs, each pair about its own middle: the i-th of one set goes with the i-th."""
    first, second = two_sets(first, second, names)
    if len(first) != len(second):
        raise InputError(f"hard debiasing takes pairs, but the sets hold {len(first)} and {len(second)} vectors")
    half = (first.double() - second.double()) / 2  # both members lie this far from the middle of their pair
    values, q = top(half.T @ half / len(half), dimensions)
    return placed(q, values, first, second, names, {"method": "hard"})


def without(direction: Direction) -> Map:
    """I − Σ q qᵀ, over all dimensions of the direction."""
    q = direction.q
    return torch.eye(q.shape[1], dtype=q.dtype, device=q.device) - q.T @ q


def conceptor_negation(first: Vectors, second: Vectors, aperture: float = 2.0) -> Map:
    """I − C of the conceptor C of both sets together."""
    if aperture <= 0:
        raise InputError(f"aperture={aperture}: it must be greater than 0")
    first, second = two_sets(first, second, ("first", "second"))
    every = torch.cat([first, second]).double()
    r = every.T @ every / len(every)
    one = torch.eye(len(r), dtype=r.dtype, device=r.device)
    return one - torch.linalg.solve(r + one / aperture**2, r).mT  # both are functions of R, so they commute


@contextmanager
def removed(
    ex: Explainer, maps: Mapping[int, Direction | Map], stream: str | None = None, share: float = 1.0
) -> Iterator[None]:
    """Inside the `with`, every pass of the model (in this thread) goes without: layer k of `maps` is h^k.

    share: how much of it is removed; 1 for all
    """
    there = sites(ex, stream)
    acts = {there[layer_number(layer, len(there) - 1)]: _act(one, share) for layer, one in maps.items()}
    with ex.recorder.lock, acting(ex.subject.model, acts):
        yield


def _act(one: Direction | Map, share: float) -> Act:
    p = without(one) if isinstance(one, Direction) else one
    gone = share * (torch.eye(len(p), dtype=p.dtype, device=p.device) - p)

    def act(states: Any) -> Any:
        if states.shape[-1] != len(gone):
            raise InputError(
                f"what is to be removed is {len(gone)} wide, but the layer's states are {states.shape[-1]}"
            )
        return states - states @ gone.mT.to(states)

    return act
