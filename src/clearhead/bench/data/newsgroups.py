"""20 newsgroups: the folders of 20news-bydate, or scikit-learn's copy of them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.registry import Reader, choose, register
from clearhead.errors import InputError, unknown

PARTS = ("headers", "footers", "quotes")
_SPLITS = ("test", "train")


@register(
    "20newsgroups",
    licence="20 newsgroups (Lang 1995): public posts, research use",
    get="https://ndownloader.figshare.com/files/5975967 (20news-bydate.tar.gz), unpacked; or, with a network, "
    "sklearn.datasets.fetch_20newsgroups(subset='all')",
    folders=("20newsgroups", "20news-bydate", "20news"),
    marks=("20news-bydate-test/*", "20news-bydate-train/*"),
    must_exist=False,
)
def newsgroups(reader: Reader, folder: Path | None, split: str | None, remove: Sequence[str] = PARTS) -> DataSet:
    """`remove` are the parts of a post that are left out: they betray its group."""
    for part in remove:
        if part not in PARTS:
            raise unknown("part of a post", part, PARTS)
    there = _SPLITS if folder is None else [s for s in _SPLITS if (folder / f"20news-bydate-{s}").is_dir()]
    split = choose(reader.name, split, there)
    rows = partial(_fetched, reader, split) if folder is None else partial(_posts, folder / f"20news-bydate-{split}")
    make = partial(_example, tuple(remove))
    return DataSet(reader.name, split, reader.licence, GROUPS, rows, make, tuple(there))


def _posts(folder: Path) -> list[tuple[str, int, Any]]:
    files = [(group, file) for group in sorted(folder.iterdir()) if group.is_dir() for file in group.iterdir()]
    strange = sorted({group.name for group, _ in files} - set(GROUPS))
    if strange:
        raise unknown("newsgroup", strange[0], GROUPS)
    return sorted((f"{group.name}/{file.name}", GROUPS.index(group.name), file) for group, file in files)


def _fetched(reader: Reader, split: str) -> list[tuple[str, int, Any]]:
    from sklearn.datasets import fetch_20newsgroups

    try:
        fetched = fetch_20newsgroups(subset=split, shuffle=False)
    except OSError as problem:
        raise InputError(f"{reader.name} could not be fetched ({problem}). How to get it: {reader.get}") from None
    ids = ["/".join(Path(name).parts[-2:]) for name in fetched.filenames]
    labels = [GROUPS.index(fetched.target_names[place]) for place in fetched.target]
    return sorted(zip(ids, labels, fetched.data, strict=True))


def _example(remove: tuple[str, ...], row: tuple[str, int, Any]) -> Example:
    name, label, post = row
    text = post.read_bytes().decode("latin-1") if isinstance(post, Path) else post
    return Example(name, stripped(text, remove), label)


def stripped(post: str, remove: Sequence[str]) -> str:
    """A post without its headers, quotes or signature, by scikit-learn's rules.

    >>> stripped("From: a\\nSubject: b\\n\\nA wrote:\\n> what?\\nThis.", ("headers", "quotes"))
    'This.'
    """
    from sklearn.datasets import _twenty_newsgroups as rules

    for part in PARTS:
        if part in remove:
            name = {"headers": "header", "footers": "footer", "quotes": "quoting"}[part]
            post = getattr(rules, f"strip_newsgroup_{name}")(post)
    return post


GROUPS = (
    "alt.atheism",
    "comp.graphics",
    "comp.os.ms-windows.misc",
    "comp.sys.ibm.pc.hardware",
    "comp.sys.mac.hardware",
    "comp.windows.x",
    "misc.forsale",
    "rec.autos",
    "rec.motorcycles",
    "rec.sport.baseball",
    "rec.sport.hockey",
    "sci.crypt",
    "sci.electronics",
    "sci.med",
    "sci.space",
    "soc.religion.christian",
    "talk.politics.guns",
    "talk.politics.mideast",
    "talk.politics.misc",
    "talk.religion.misc",
)
