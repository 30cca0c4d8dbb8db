"""Specification of a benchmark run (model, data, methods, protocols), and its division into chunks of examples.

A chunk is the smallest unit that is computed and stored. Its examples are determined by the data alone: examples of
similar length, from a window of consecutive examples. A longer run therefore reuses the chunks of a shorter one, and
the results of a chunk do not depend on where a run was interrupted.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import numpy as np

from clearhead.bench.data import BenchmarkDataset, EvidenceMask, Example, load_benchmark_dataset
from clearhead.bench.data.mosaic import make_mosaics
from clearhead.bench.protocols.base import PROTOCOL_REGISTRY, BenchmarkProtocol, make_protocol
from clearhead.bench.protocols.presets import PROTOCOL_PRESETS
from clearhead.bench.zero_shot import DEFAULT_CAPTION_TEMPLATE
from clearhead.errors import InputError, unknown_value_error

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: So many mosaics are made where no limit is given.
DEFAULT_NUM_MOSAICS = 200
#: The name of a label that has none.
_UNNAMED_LABEL_PATTERN = re.compile(r"(label)?[ _-]?\d+", re.IGNORECASE)
#: So many chunks of consecutive examples are sorted by length among themselves.
CHUNKS_PER_WINDOW = 16


@dataclass(frozen=True)
class BenchmarkJob:
    """A benchmark run as plain data, which can be sent to a worker in another process.

    Attributes:
        model: A name that `clearhead.load` takes.
        data: Name of a data set, or "mosaic:NAME" for mosaics of its images.
        methods: The methods to measure, with options as text.
        protocols: Names of protocols and presets.
        settings: Settings of each protocol by name; the others have their defaults.
        split: Split of the data; None for its default.
        root: Folder of data that is not downloaded.
        options: Options of the data set's reader.
        limit: Number of examples, from the first; None for all.
        indices: Indices of the examples to use; None for all.
        chunk: Number of examples that are computed and stored together.
        batch_size: Maximum number of inputs per batch.
        seed: Seed of methods and protocols.
        device: As in `clearhead.load`.
        dtype: As in `clearhead.load`. A model in half precision counts as another model than its float32 version.
        revision: As in `clearhead.load`.
        template: Template of captions, for the zero-shot classes of dual encoders.
        keep: Whether explanations are stored, too.
    """

    model: str
    data: str
    methods: tuple[str, ...]
    protocols: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    split: str | None = None
    root: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int | None = None
    indices: tuple[int, ...] | None = None
    chunk: int = 16
    batch_size: int = 8
    seed: int = 0
    device: str | None = "auto"
    dtype: str | None = None
    revision: str | None = None
    template: str = DEFAULT_CAPTION_TEMPLATE
    keep: bool = False

    def build_protocols(self) -> dict[str, BenchmarkProtocol]:
        """Build the protocols of the run with their settings, and check them.

        Returns:
            Protocols by name, in the order given; a name that is given twice occurs once.

        Raises:
            InputError: If there is no protocol, settings belong to another one, or two protocols measure the same.
        """
        strange = [name for name in self.settings if name not in self.protocols]
        if strange:
            raise InputError(f"settings for {', '.join(strange)}, but this run has no such protocol")
        if not self.protocols:
            raise InputError(f"no protocol was given. Accepted: {', '.join(list_protocol_names())}")
        made = {name: get_protocol(name, **self.settings.get(name, {})) for name in dict.fromkeys(self.protocols)}
        names: dict[str, str] = {}
        for name, own in made.items():
            own.check_settings()
            if own.hash in names:
                raise InputError(
                    f"{names[own.hash]} and {name} are the same measurement with the same settings: choose one"
                )
            names[own.hash] = name
        return made

    def open_dataset(self) -> BenchmarkDataset:
        """Open the data set with the selected examples; no image is opened yet.

        Returns:
            The examples of `indices`, of which `limit` remain.

        Raises:
            InputError: If the data set or an index does not exist.
        """
        name, _, mosaic_source = self.data.partition(":")
        if name == "mosaic":
            return make_mosaics(
                replace(self, data=mosaic_source, limit=None).open_dataset(),
                self.limit or DEFAULT_NUM_MOSAICS,
                self.seed,
            )
        options = dict(self.options)
        if name == "known" and self.limit is not None and self.indices is None:  # indices select among more examples
            options.setdefault("count", self.limit)
        data = load_benchmark_dataset(self.data, self.split, self.root, **options)
        if self.indices is not None:
            data = data.select(self.indices)
        return data if self.limit is None else data[: self.limit]


def list_protocol_names() -> list[str]:
    """List the names that `protocols=` accepts.

    Returns:
        The registered protocols in alphabetical order, then the presets, which are published settings of them.
    """
    return [*sorted(PROTOCOL_REGISTRY), *PROTOCOL_PRESETS]


def get_protocol(name: str, **settings: Any) -> BenchmarkProtocol:
    """Return a protocol by name, or a preset, which has published settings.

    Args:
        name: A name that `list_protocol_names` lists.
        **settings: Settings that differ from the defaults, or from those of the preset.

    Returns:
        The protocol.

    Raises:
        InputError: If there is no such protocol.

    Example:
        >>> get_protocol("te-images").fills
        ('black',)
    """
    if name in PROTOCOL_PRESETS:
        return replace(PROTOCOL_PRESETS[name], **settings)
    if name not in PROTOCOL_REGISTRY:
        raise unknown_value_error("protocol", name, list_protocol_names())
    return make_protocol(name, **settings)


@dataclass(frozen=True)
class ChunkTask:
    """The work on one chunk of examples.

    Attributes:
        chunk_key: Hash that identifies the chunk in the results.
        example_indices: Indices of the examples in the data set.
        missing_methods_by_settings: For each protocol, the methods without a result, as pairs.
    """

    chunk_key: str
    example_indices: tuple[int, ...]
    missing_methods_by_settings: tuple[tuple[str, tuple[str, ...]], ...]


def iter_chunks(dataset: BenchmarkDataset, chunk_size: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield the example indices of each chunk, and a digest of their content."""
    if chunk_size < 1:
        raise InputError(f"chunk={chunk_size} is not valid: it must be at least 1")
    seen: set[str] = set()
    for start in range(0, len(dataset), chunk_size * CHUNKS_PER_WINDOW):
        window = range(start, min(start + chunk_size * CHUNKS_PER_WINDOW, len(dataset)))
        about = {place: _fingerprint_example(dataset, place) for place in window}
        for name, _ in (own for _, own in about.values()):
            if name in seen:
                raise InputError(
                    f"two examples of {dataset.name} are named {name!r}: the names of examples must be unique"
                )
            seen.add(name)
        order = sorted(window, key=lambda place: (about[place][0], place))
        for first in range(0, len(order), chunk_size):
            places = tuple(order[first : first + chunk_size])
            said = json.dumps([about[place][1] for place in places])
            yield places, hashlib.sha256(said.encode()).hexdigest()[:16]


def _fingerprint_example(data: BenchmarkDataset, place: int) -> tuple[int, list[str]]:
    """How long an example is (pictures are all alike), and what tells it from others."""
    example = data[place]
    digest = hashlib.sha256()
    _update_digest(digest, [example.input, example.label, example.continuation, str(example.target)])
    texts = example.input if isinstance(example.input, tuple) else (example.input,)
    return sum(len(text) for text in texts if isinstance(text, str)), [example.id, digest.hexdigest()]


def _update_digest(digest: Any, part: Any) -> None:
    if isinstance(part, Mapping):
        for name in sorted(part):
            _update_digest(digest, name)
            _update_digest(digest, part[name])
    elif isinstance(part, list | tuple):
        for one in part:
            _update_digest(digest, one)
    elif hasattr(part, "tobytes"):
        array = np.asarray(part)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        digest.update(f"{part!r}\0".encode())


def compute_chunk_key(model_digest: str, content_digest: str, versions: str, job: BenchmarkJob) -> str:
    """One word for everything that a chunk's figures depend on, but its methods and protocols."""
    own = [] if job.template == DEFAULT_CAPTION_TEMPLATE else [job.template]
    said = json.dumps([model_digest, content_digest, versions, job.batch_size, job.seed, *own])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def align_label(example: Example, dataset: BenchmarkDataset, explainer: "Explainer") -> Example:
    """The example with its label as the model numbers it: by name, or by number where they share no name but the count.

    Where some names are shared, numbers could put two labels under one class; where both have names and those of the
    data are numbered by the alphabet, good under NEGATIVE. Masks of objects have their own labels.
    """
    if example.target is not None or not dataset.labels:
        return example
    known = {name.casefold(): index for index, name in explainer.labels.items()}
    told = not dataset.label_ids_are_arbitrary or all(map(_UNNAMED_LABEL_PATTERN.fullmatch, known))
    numbered = (
        told and len(known) == len(dataset.labels) and not any(name.casefold() in known for name in dataset.labels)
    )

    def own(label: Any) -> int | None:
        found = known.get(dataset.label_name(label).casefold(), label if numbered else None)
        return found if isinstance(label, int) else label

    def marked(piece: Any) -> Any:
        return (
            replace(piece, label=own(piece.label))
            if isinstance(piece, EvidenceMask) and piece.label is not None
            else piece
        )

    evidence = None if example.evidence is None else tuple(tuple(map(marked, one)) for one in example.evidence)
    return replace(example, label=own(example.label), evidence=evidence)


def parse_setting(text: str) -> tuple[str, str, Any]:
    """Parse a setting of the command line, PROTOCOL.NAME=VALUE. The values of a tuple are separated by commas.

    Args:
        text: The setting as typed.

    Returns:
        Name of the protocol, name of the setting, and its value in the declared type.

    Raises:
        InputError: If the text has another form, or the protocol has no such setting or accepts no such value.

    Example:
        >>> parse_setting("perturb-text.fills=mask,delete")
        ('perturb-text', 'fills', ('mask', 'delete'))
        >>> parse_setting("truth.seed=3")
        ('truth', 'seed', 3)
    """
    where, equals, value = text.partition("=")
    name, _, what = where.rpartition(".")
    if not equals or not name or not what:
        raise InputError(f"{text!r} is not a setting: write PROTOCOL.NAME=VALUE, as in perturb-text.fills=mask,delete")
    accepted = {one.name: one.type for one in fields(get_protocol(name))}
    if what not in accepted:
        raise unknown_value_error(f"setting of {name}", what, list(accepted))
    made, kind = _parse_value(value), accepted[what]
    if not _matches_type(made, kind):
        made = tuple(_parse_value(part.strip()) for part in value.split(",") if part.strip())
    if not _matches_type(made, kind):
        raise InputError(f"{text!r}: {what} of {name} takes {_describe_type(kind)}")
    return name, what, made


def _matches_type(value: Any, kind: Any) -> bool:
    """Whether a value is of a setting's type; a whole number is a number, and true is none."""
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        many = isinstance(value, tuple) and (Ellipsis in inner or len(value) == len(inner))
        return many and all(_matches_type(one, inner[0]) for one in value)
    if get_origin(kind) in (Union, UnionType):
        return any(_matches_type(value, one) for one in get_args(kind))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _describe_type(kind: Any) -> str:
    """
    >>> _describe_type(tuple[float, ...]), _describe_type(int | None)
    ('a number, or several separated by commas', 'a whole number or none')
    """
    if get_origin(kind) is tuple:
        return f"{_describe_type(get_args(kind)[0])}, or several separated by commas"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_describe_type, get_args(kind)))
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", NoneType: "none"}
    return words.get(kind, str(kind))


def _parse_value(text: str) -> Any:
    """A number, true, false or none; anything else is a word."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text
