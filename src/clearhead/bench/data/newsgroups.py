"""20 newsgroups: the folders of 20news-bydate, or scikit-learn's copy."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.registry import DatasetSpec, choose_split, register_dataset
from clearhead.errors import InputError, unknown_value_error

POST_PARTS = ("headers", "footers", "quotes")
_SPLITS = ("test", "train")


@register_dataset(
    "20newsgroups",
    licence="20 newsgroups (Lang 1995): public posts, research use",
    download_hint="https://ndownloader.figshare.com/files/5975967 (20news-bydate.tar.gz), unpacked; "
    "or, with a network, sklearn.datasets.fetch_20newsgroups(subset='all')",
    folder_names=("20newsgroups", "20news-bydate", "20news"),
    marker_files=("20news-bydate-test/*", "20news-bydate-train/*"),
    requires_folder=False,
)
def open_newsgroups(
    spec: DatasetSpec, folder: Path | None, split: str | None, remove: Sequence[str] = POST_PARTS
) -> BenchmarkDataset:
    """Open 20 newsgroups without the parts of a post named in `remove`, which reveal its group."""
    for part_name in remove:
        if part_name not in POST_PARTS:
            raise unknown_value_error("part of a post", part_name, POST_PARTS)
    splits = list(_SPLITS)
    if folder is not None:
        splits = [name for name in _SPLITS if (folder / f"20news-bydate-{name}").is_dir()]
    split = choose_split(spec.name, split, splits)
    load_rows = partial(_fetch_posts, spec, split)
    if folder is not None:
        load_rows = partial(_list_posts, folder / f"20news-bydate-{split}")
    make_example = partial(_make_example, tuple(remove))
    return BenchmarkDataset(spec.name, split, spec.licence, NEWSGROUP_NAMES, load_rows, make_example, tuple(splits))


def _list_posts(folder: Path) -> list[tuple[str, int, Any]]:
    """List the files of all group folders as sorted (id, label, path); a folder that is no newsgroup is refused."""
    files = [(group, file) for group in sorted(folder.iterdir()) if group.is_dir() for file in group.iterdir()]
    unknown_groups = sorted({group.name for group, _ in files} - set(NEWSGROUP_NAMES))
    if unknown_groups:
        raise unknown_value_error("newsgroup", unknown_groups[0], NEWSGROUP_NAMES)
    return sorted((f"{group.name}/{file.name}", NEWSGROUP_NAMES.index(group.name), file) for group, file in files)


def _fetch_posts(spec: DatasetSpec, split: str) -> list[tuple[str, int, Any]]:
    """Get a split from scikit-learn, which downloads it if needed, as sorted (id, label, text)."""
    from sklearn.datasets import fetch_20newsgroups

    try:
        fetched = fetch_20newsgroups(subset=split, shuffle=False)
    except OSError as problem:
        raise InputError(f"{spec.name} could not be fetched ({problem}). How to get it: {spec.download_hint}") from None
    ids = ["/".join(Path(name).parts[-2:]) for name in fetched.filenames]
    labels = [NEWSGROUP_NAMES.index(fetched.target_names[target]) for target in fetched.target]
    return sorted(zip(ids, labels, fetched.data, strict=True))


def _make_example(remove: tuple[str, ...], row: tuple[str, int, Any]) -> Example:
    """Create an example from a post (a Latin-1 file or its text), without the parts named in `remove`."""
    name, label, post = row
    if isinstance(post, Path):
        post = post.read_bytes().decode("latin-1")
    return Example(name, strip_post(post, remove), label)


def strip_post(post: str, remove: Sequence[str]) -> str:
    """Strip headers, quotes or signature from a post, by scikit-learn's rules.

    >>> strip_post("From: a\\nSubject: b\\n\\nA wrote:\\n> what?\\nThis.", ("headers", "quotes"))
    'This.'
    """
    from sklearn.datasets import _twenty_newsgroups as rules

    for part_name in POST_PARTS:
        if part_name in remove:
            name = {"headers": "header", "footers": "footer", "quotes": "quoting"}[part_name]
            post = getattr(rules, f"strip_newsgroup_{name}")(post)
    return post


NEWSGROUP_NAMES = (
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
