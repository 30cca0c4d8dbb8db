"""Groups samples into batches, and shows the progress over them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from clearhead.errors import InputError
from clearhead.sample import Sample


def iter_batch_indices(samples: Sequence[Sample], batch_size: int) -> Iterator[list[int]]:
    """Iterate over batches of sample indices, each of similar lengths, so that there is little padding.

    Images in a batch have the same size.

    Args:
        samples: The samples.
        batch_size: Largest number of samples per batch.

    Yields:
        Indices of the samples of one batch; every index occurs once.

    Raises:
        InputError: `batch_size` is smaller than 1.
    """
    if batch_size < 1:
        raise InputError(f"batch_size={batch_size} is not valid: it must be at least 1")

    def get_sort_key(index: int) -> tuple[Any, ...]:
        """Image sizes and batch key, names of the inputs, and lengths."""
        sample = samples[index]
        axes = sample.axes.values()
        pixel_shape = tuple(getattr(sample.inputs.get("pixel_values"), "shape", ()))
        grids = tuple(group.grid or () for axis in axes for group in axis.unit_groups)
        return ((pixel_shape, grids, sample.batch_key), tuple(sorted(sample.inputs)), [len(axis) for axis in axes])

    batch: list[int] = []
    for index in sorted(range(len(samples)), key=get_sort_key):
        if batch and (len(batch) == batch_size or get_sort_key(index)[:2] != get_sort_key(batch[0])[:2]):
            yield batch
            batch = []
        batch.append(index)
    yield batch


def with_progress(
    batches: list[Any], progress: bool | Callable[[list[Any]], Iterable[Any]], description: str = "explaining"
) -> Iterable[Any]:
    """Iterate over batches with a progress bar on stderr.

    Args:
        batches: The items to iterate over.
        progress: True for a progress bar, false for none, or a function that wraps the list.
        description: Text before the bar.

    Returns:
        An iterable of the batches; the list itself without progress.
    """
    if progress is True:
        from rich.console import Console
        from rich.progress import track

        return track(batches, description=description, console=Console(stderr=True), transient=True)
    if progress:
        return progress(batches)
    return batches
