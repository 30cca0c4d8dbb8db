"""What a run is: which model, data, methods and protocols, cut into chunks that are always the same.

A chunk is the smallest thing that is computed and stored. Which examples share one is fixed by the data alone (of each
window of consecutive examples those of like length), so that a longer run finds the chunks of a shorter one, and what
is computed in a chunk does not depend on where a run was stopped.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

import numpy as np

from clearhead.bench.data import DataSet, Example, Mask, read
from clearhead.bench.data.mosaic import mosaics
from clearhead.bench.protocols.base import PROTOCOLS, Protocol, protocol
from clearhead.bench.protocols.presets import PUBLISHED
from clearhead.bench.zero_shot import TEMPLATE
from clearhead.errors import InputError, unknown

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: So many mosaics are made where no limit is given.
MOSAICS = 200
#: The name of a label that has none.
_NUMBER = re.compile(r"(label)?[ _-]?\d+", re.IGNORECASE)
#: So many chunks of consecutive examples are sorted by length among themselves.
WINDOW = 16


@dataclass(frozen=True)
class Job:
    """What is to be measured, in words: plain data, that a worker in another process can be handed.

    protocols: by name; `settings` are theirs, by name, too. chunk: examples of a chunk. template: the captions of
    classes, for a dual encoder. keep: explanations are stored, too. dtype: as in `load`; what a GPU takes as stored, in
    half precision, is another model than the widened one of a CPU, and its rows have another hash.
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
    device: str | None = None
    dtype: str | None = None
    template: str = TEMPLATE
    keep: bool = False

    def made_protocols(self) -> dict[str, Protocol]:
        strange = [name for name in self.settings if name not in self.protocols]
        if strange:
            raise InputError(f"settings of {', '.join(strange)}, which is none of the protocols of this run")
        if not self.protocols:
            raise InputError(f"no protocol was given: there are {', '.join(protocol_names())}")
        made = {name: named(name, **self.settings.get(name, {})) for name in dict.fromkeys(self.protocols)}
        names: dict[str, str] = {}
        for name, own in made.items():
            own.check()
            if own.hash in names:
                raise InputError(f"{names[own.hash]} and {name} measure the same, by the same settings: ask for one")
            names[own.hash] = name
        return made

    def opened(self) -> DataSet:
        name, _, task = self.data.partition(":")
        if name == "mosaic":
            return mosaics(replace(self, data=task, limit=None).opened(), self.limit or MOSAICS, self.seed)
        options = dict(self.options)
        if name == "known":
            options |= {"task": task} if task else {}
            if self.limit is not None and self.indices is None:  # else they are chosen among more
                options.setdefault("count", self.limit)
        elif name == "coco" and task:
            options["each"] = task.removesuffix("s")
        data = read(name if name in ("known", "coco") else self.data, self.split, self.root, **options)
        if self.indices is not None:
            data = data.select(self.indices)
        return data if self.limit is None else data[: self.limit]


def protocol_names() -> list[str]:
    return [*sorted(PROTOCOLS), *PUBLISHED]


def named(name: str, **settings: Any) -> Protocol:
    """A protocol by its name, or published settings by theirs.

    >>> named("te-images").fills
    ('black',)
    """
    if name in PUBLISHED:
        return replace(PUBLISHED[name], **settings)
    if name not in PROTOCOLS:
        raise unknown("protocol", name, protocol_names())
    return protocol(name, **settings)


@dataclass(frozen=True)
class Task:
    """One chunk: the places of its examples in the data, and for each protocol the methods that are still missing."""

    key: str
    places: tuple[int, ...]
    missing: tuple[tuple[str, tuple[str, ...]], ...]


def chunks(data: DataSet, size: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """The places of each chunk's examples, and one word for their content."""
    if size < 1:
        raise InputError(f"chunk={size}: it must be at least 1")
    seen: set[str] = set()
    for start in range(0, len(data), size * WINDOW):
        window = range(start, min(start + size * WINDOW, len(data)))
        about = {place: _about(data, place) for place in window}
        for name, _ in (own for _, own in about.values()):
            if name in seen:
                raise InputError(f"two examples of {data.name} are called {name!r}: by their names they are told apart")
            seen.add(name)
        order = sorted(window, key=lambda place: (about[place][0], place))
        for first in range(0, len(order), size):
            places = tuple(order[first : first + size])
            said = json.dumps([about[place][1] for place in places])
            yield places, hashlib.sha256(said.encode()).hexdigest()[:16]


def _about(data: DataSet, place: int) -> tuple[int, list[str]]:
    """How long an example is (pictures are all alike), and what tells it from others."""
    example = data[place]
    digest = hashlib.sha256()
    _add(digest, [example.input, example.label, example.answer, str(example.target)])
    texts = example.input if isinstance(example.input, tuple) else (example.input,)
    return sum(len(text) for text in texts if isinstance(text, str)), [example.id, digest.hexdigest()]


def _add(digest: Any, part: Any) -> None:
    if isinstance(part, Mapping):
        for name in sorted(part):
            _add(digest, name)
            _add(digest, part[name])
    elif isinstance(part, list | tuple):
        for one in part:
            _add(digest, one)
    elif hasattr(part, "tobytes"):
        array = np.asarray(part)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    else:
        digest.update(f"{part!r}\0".encode())


def base_key(model: str, content: str, versions: str, job: Job) -> str:
    """One word for everything that a chunk's figures depend on, but its methods and protocols."""
    own = [] if job.template == TEMPLATE else [job.template]
    said = json.dumps([model, content, versions, job.batch_size, job.seed, *own])
    return hashlib.sha256(said.encode()).hexdigest()[:24]


def aligned(example: Example, data: DataSet, ex: "Explainer") -> Example:
    """The example with its label as the model numbers it: by name, or by number where they share no name but the count.

    Where some names are shared, numbers could put two labels under one class; where both have names and those of the
    data are numbered by the alphabet, good under NEGATIVE. Masks of objects have their own labels.
    """
    if example.target is not None or not data.labels:
        return example
    known = {name.casefold(): index for index, name in ex.labels.items()}
    told = not data.by_alphabet or all(map(_NUMBER.fullmatch, known))
    numbered = told and len(known) == len(data.labels) and not any(name.casefold() in known for name in data.labels)

    def own(label: Any) -> int | None:
        found = known.get(data.label_name(label).casefold(), label if numbered else None)
        return found if isinstance(label, int) else label

    def marked(piece: Any) -> Any:
        return replace(piece, label=own(piece.label)) if isinstance(piece, Mask) and piece.label is not None else piece

    evidence = None if example.evidence is None else tuple(tuple(map(marked, one)) for one in example.evidence)
    return replace(example, label=own(example.label), evidence=evidence)


def setting(text: str) -> tuple[str, str, Any]:
    """A setting as it is typed: protocol, name and value. Values of a tuple are parted by commas.

    >>> setting("perturb-text.fills=mask,delete")
    ('perturb-text', 'fills', ('mask', 'delete'))
    >>> setting("truth.seed=3")
    ('truth', 'seed', 3)
    """
    where, equals, value = text.partition("=")
    name, _, what = where.rpartition(".")
    if not equals or not name or not what:
        raise InputError(f"{text!r} is no setting: write PROTOCOL.NAME=VALUE, as perturb-text.fills=mask,delete")
    accepted = {one.name: one.type for one in fields(named(name))}
    if what not in accepted:
        raise unknown(f"setting of {name}", what, list(accepted))
    made, kind = _value(value), accepted[what]
    if not _fits(made, kind):
        made = tuple(_value(part.strip()) for part in value.split(",") if part.strip())
    if not _fits(made, kind):
        raise InputError(f"{text!r}: {what} of {name} takes {_in_words(kind)}")
    return name, what, made


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a setting's type; a whole number is a number, and true is none."""
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        many = isinstance(value, tuple) and (Ellipsis in inner or len(value) == len(inner))
        return many and all(_fits(one, inner[0]) for one in value)
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _in_words(kind: Any) -> str:
    """
    >>> _in_words(tuple[float, ...]), _in_words(int | None)
    ('a number, or several parted by commas', 'a whole number or none')
    """
    if get_origin(kind) is tuple:
        return f"{_in_words(get_args(kind)[0])}, or several parted by commas"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", NoneType: "none"}
    return words.get(kind, str(kind))


def _value(text: str) -> Any:
    """A number, true, false or none; anything else is a word."""
    try:
        return json.loads({"none": "null"}.get(text.lower(), text.lower()))
    except ValueError:
        return text
