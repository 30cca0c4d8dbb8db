"""ERASER: documents with human rationales, one layout for all its tasks (DeYoung et al. 2020).

    TASK/{train,val,test}.jsonl                     annotation_id, classification, query, docids, evidences
    TASK/docs/…, TASK/docs.zip or TASK/docs.jsonl   the documents, in tokens parted by blanks and line ends

`evidences` lists groups, each of them enough by itself, as spans of a document's tokens.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.evidence import Characters
from clearhead.bench.data.registry import Reader, choose, files_there, missing, register
from clearhead.errors import InputError
from clearhead.units import Span

#: The classes of each task, in the order of their indices.
TASKS: dict[str, tuple[str, ...]] = {
    "movies": ("NEG", "POS"),
    "boolq": ("False", "True"),
    "multirc": ("False", "True"),
    "fever": ("REFUTES", "SUPPORTS"),
    "cose": ("A", "B", "C", "D", "E"),
    "esnli": ("contradiction", "entailment", "neutral"),
    "evidence_inference": ("significantly decreased", "no significant difference", "significantly increased"),
}
_TOKEN = re.compile(r"[^ ]+")
_FILES = [("test", "test.jsonl"), ("validation", "val.jsonl"), ("train", "train.jsonl")]


def _eraser(task: str, reader: Reader, folder: Path, split: str | None) -> DataSet:
    there = files_there(folder, _FILES)
    split = choose(reader.name, split, list(there))
    documents = next((folder / name for name in ("docs", "docs.zip", "docs.jsonl") if (folder / name).exists()), None)
    if documents is None:
        raise missing(reader, "docs, docs.zip or docs.jsonl", [folder])
    labels = TASKS[task]
    rows = partial(_annotations, there, split, labels)
    return DataSet(reader.name, split, reader.licence, labels, rows, partial(_example, documents, task), tuple(there))


for _task in TASKS:
    register(
        f"eraser-{_task.replace('_', '-')}",
        licence="ERASER terms (DeYoung et al. 2020): research use, and the terms of the source of each task",
        get=f"https://www.eraserbenchmark.com/zipped/{_task}.tar.gz",
        folders=(f"eraser-{_task.replace('_', '-')}", _task, f"eraser/{_task}", f"data/{_task}"),
        marks=("val.jsonl", "test.jsonl", "train.jsonl"),
    )(partial(_eraser, _task))


def _annotations(there: Mapping[str, Path], split: str, labels: Sequence[str]) -> list[tuple[dict[str, Any], int]]:
    """The rows of a split. movies' train.jsonl holds every validation review: no training row is held out elsewhere."""
    rows = _jsonl(there[split])
    if split == "train":
        kept = (row for other in there if other != "train" for row in _jsonl(there[other]))
        held_out = {row["annotation_id"] for row in kept}
        rows = [row for row in rows if row["annotation_id"] not in held_out]
    for row in rows:
        if row["classification"] not in labels:
            raise InputError(f"{str(there[split])!r}: {row['classification']!r} is none of {', '.join(labels)}")
    return [(row, labels.index(row["classification"])) for row in rows]


def _jsonl(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except ValueError as problem:
        raise InputError(f"{str(path)!r} is not JSON, a row a line ({problem})") from None


def _example(documents: Path, task: str, row: tuple[dict[str, Any], int]) -> Example:
    annotation, label = row
    ids = _ids(annotation, documents)
    texts = [_document(documents, name) for name in ids]
    if ids[0].endswith("_premise") and len(ids) == 2:
        raw: str | tuple[str, ...] = tuple(texts)
        places = {name: (segment, 0) for segment, name in enumerate(ids)}
    else:
        query = "" if task == "movies" else str(annotation.get("query") or "").strip()  # movies asks the same of all
        starts = [sum(len(text) + 1 for text in texts[:place]) for place in range(len(texts))]
        raw = (query, "\n".join(texts)) if query else "\n".join(texts)
        places = {name: (int(bool(query)), start) for name, start in zip(ids, starts, strict=True)}
    tokens = {name: token_spans(text) for name, text in zip(ids, texts, strict=True)}
    groups = ([piece for piece in group if not _empty(piece)] for group in annotation["evidences"])
    sets = tuple(tuple(_characters(piece, tokens, places) for piece in group) for group in groups if group)
    return Example(annotation["annotation_id"], raw, label, sets or None)


def _ids(annotation: Mapping[str, Any], documents: Path) -> list[str]:
    """Which documents a row is about; the premise before the hypothesis."""
    named = annotation.get("docids") or [piece["docid"] for group in annotation["evidences"] for piece in group]
    own = str(annotation["annotation_id"])
    if not named:
        named = [own] if _has(documents, own) else [own.partition(":")[0]]
    return sorted(dict.fromkeys(map(str, named)), key=lambda name: (name.endswith("_hypothesis"),))


def token_spans(document: str) -> list[Span]:
    """Where ERASER's tokens lie: what stands between blanks, in lines without the white space around them.

    >>> [("so  bad .\\nreally"[a:b]) for a, b in token_spans("so  bad .\\nreally")]
    ['so', 'bad', '.', 'really']
    """
    spans: list[Span] = []
    for line in re.finditer(r"[^\n]+", document):
        start = line.end() - len(line.group().lstrip())
        spans += [match.span() for match in _TOKEN.finditer(document, start, start + len(line.group().strip()))]
    return spans


def _empty(piece: Mapping[str, Any]) -> bool:
    """movies' test set has spans of no tokens, which the benchmark's own scorer counts as nothing."""
    return bool(piece["start_token"] == piece["end_token"])


def _characters(
    piece: Mapping[str, Any], tokens: Mapping[str, Sequence[Span]], places: Mapping[str, tuple[int, int]]
) -> Characters:
    name, first, stop = str(piece["docid"]), piece["start_token"], piece["end_token"]
    if name not in tokens or not 0 <= first < stop <= len(tokens[name]):
        raise InputError(f"evidence from token {first} to {stop} of the document {name!r}: there is none such")
    segment, start = places[name]
    return Characters(start + tokens[name][first][0], start + tokens[name][stop - 1][1], segment)


def _has(documents: Path, name: str) -> bool:
    if documents.is_dir():
        return (documents / name).is_file()
    return name in _opened(str(documents), os.getpid())[1]


def _document(documents: Path, name: str) -> str:
    if not _has(documents, name):
        raise InputError(f"there is no document {name!r} in {str(documents)!r}: is it unpacked completely?")
    if documents.is_dir():
        content = (documents / name).read_bytes()
    else:
        archive, names = _opened(str(documents), os.getpid())
        if archive is None:
            return names[name]
        content = archive.read(names[name])
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


@lru_cache(maxsize=4)
def _opened(path: str, process: int) -> tuple[ZipFile | None, dict[str, str]]:
    """An archive and its documents' names in it, or all documents of a docs.jsonl. Forked processes open it anew."""
    if path.endswith(".jsonl"):
        return None, {row["docid"]: row["document"] for row in _jsonl(Path(path))}
    archive = ZipFile(path)
    return archive, {name.partition("docs/")[2] or name: name for name in archive.namelist() if name[-1] != "/"}
