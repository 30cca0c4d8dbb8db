"""Remove directions from the states of layers: projection, principal components of pairs, conceptor negation.

All three are a linear map of the states of a layer, h ← P h:
    a direction, or several: P = I − Σ q qᵀ (DensRay's, or the principal components of word pairs: "hard debiasing",
        Bolukbasi et al. 2016, here for states of layers)
    conceptor negation (Liu et al. 2018): P = I − R (R + α⁻² I)⁻¹ with R = E[x xᵀ] of both sets' vectors; a soft
        projection that damps each component in proportion to the variance of these vectors along it
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.concepts.densray import Vectors, build_direction, compute_top_eigenvectors, validate_two_sets
from clearhead.concepts.directions import Direction, LayerIndex
from clearhead.concepts.layer_hooks import (
    StateHook,
    find_hook_points,
    get_hook_point_index,
    hooked_layers,
    resolve_layer_index,
)
from clearhead.errors import InputError
from clearhead.explainer import Explainer

ProjectionMatrix = Float[Tensor, "model model"]


def fit_pca_direction(
    first: Vectors,
    second: Vectors,
    *,
    dimensions: int = 1,
    names: tuple[str, str] = ("first", "second"),
) -> Direction:
    """Fit the principal components of centred pairs (hard debiasing).

    Args:
        first: Vectors of the first class.
        second: Vectors of the second class; the i-th is the partner of the i-th of `first`.
        dimensions: Number of components to keep.
        names: Names of the two classes.

    Returns:
        The direction, oriented and centred on the two classes.

    Raises:
        InputError: The sets are of different sizes or widths, empty, or not finite.
    """
    first, second = validate_two_sets(first, second, names)
    if len(first) != len(second):
        raise InputError(f"hard debiasing takes pairs, but the sets contain {len(first)} and {len(second)} vectors")
    half = (first.double() - second.double()) / 2  # the distance of both members from the middle of their pair
    values, q = compute_top_eigenvectors(half.T @ half / len(half), dimensions)
    return build_direction(q, values, first, second, names, {"method": "hard"})


def compute_removal_projection(direction: Direction) -> ProjectionMatrix:
    """Compute I − Σ q qᵀ over all dimensions of the direction."""
    q = direction.q
    return torch.eye(q.shape[1], dtype=q.dtype, device=q.device) - q.T @ q


def compute_conceptor_negation(first: Vectors, second: Vectors, aperture: float = 2.0) -> ProjectionMatrix:
    """Compute the conceptor negation I − C of both sets together.

    Args:
        first: Vectors of the first class.
        second: Vectors of the second class.
        aperture: α; larger values remove more.

    Returns:
        The projection matrix.

    Raises:
        InputError: The aperture is not positive, or the sets are invalid.
    """
    if aperture <= 0:
        raise InputError(f"aperture={aperture} is not valid: it must be greater than 0")
    first, second = validate_two_sets(first, second, ("first", "second"))
    vectors = torch.cat([first, second]).double()
    r = vectors.T @ vectors / len(vectors)
    identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
    return identity - torch.linalg.solve(r + identity / aperture**2, r).mT  # both are functions of R, so they commute


@contextmanager
def ablated_directions(
    explainer: Explainer,
    projections: Mapping[LayerIndex, Direction | ProjectionMatrix],
    stream: str | None = None,
    fraction: float = 1.0,
) -> Iterator[None]:
    """Inside the `with`, remove directions from the hidden states in every pass of the model (in this thread).

    Args:
        explainer: Explainer of the model.
        projections: Direction or projection matrix by layer.
        stream: Stream whose layers are changed; default: the adapter's main stream.
        fraction: Fraction that is removed; 1 removes the direction completely.

    Yields:
        Nothing: the `with` contains the passes; other threads wait.

    Raises:
        InputError: A layer does not exist, or the widths do not fit.
    """
    hook_points = find_hook_points(explainer, stream)
    state_hooks = {}
    for layer, projection in projections.items():
        layer_index = resolve_layer_index(layer, len(hook_points) - 1)
        state_hooks[hook_points[get_hook_point_index(layer_index)]] = _make_removal_hook(projection, fraction)
    with explainer.adapter.session.lock, hooked_layers(explainer.adapter.model, state_hooks):
        yield


def _make_removal_hook(projection: Direction | ProjectionMatrix, fraction: float) -> StateHook:
    """Make a hook that replaces states h by h − fraction · (I − P) h."""
    p = compute_removal_projection(projection) if isinstance(projection, Direction) else projection
    removed = fraction * (torch.eye(len(p), dtype=p.dtype, device=p.device) - p)

    def remove(states: Any) -> Any:
        if states.shape[-1] != len(removed):
            raise InputError(
                f"the direction to remove has {len(removed)} features, but the states of the layer have "
                f"{states.shape[-1]}"
            )
        return states - states @ removed.mT.to(states)

    return remove
