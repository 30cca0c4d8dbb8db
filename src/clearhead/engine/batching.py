"""Which samples share a batch, and a bar that follows them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from clearhead.adapters.base import Sample
from clearhead.errors import InputError


def batches_of(samples: Sequence[Sample], size: int) -> Iterator[list[int]]:
    """Samples of like length together, so that little is padded; pictures of one size."""
    if size < 1:
        raise InputError(f"batch_size={size}: it must be at least 1")

    def shape(i: int) -> tuple[Any, ...]:
        axes = samples[i].axes.values()
        pixels = tuple(getattr(samples[i].inputs.get("pixel_values"), "shape", ()))
        grids = (pixels, tuple(part.grid or () for axis in axes for part in axis.parts), samples[i].alike)
        return (grids, tuple(sorted(samples[i].inputs)), [len(axis) for axis in axes])

    order = sorted(range(len(samples)), key=shape)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == size or shape(i)[:2] != shape(batch[0])[:2]):
            yield batch
            batch = []
        batch.append(i)
    yield batch


def followed(
    batches: list[Any], progress: bool | Callable[[list[Any]], Iterable[Any]], doing: str = "explaining"
) -> Iterable[Any]:
    if progress is True:
        from rich.console import Console
        from rich.progress import track

        return track(batches, description=doing, console=Console(stderr=True), transient=True)
    return progress(batches) if progress else batches
