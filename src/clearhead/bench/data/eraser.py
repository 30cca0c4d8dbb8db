"""ERASER: documents with human rationales, in one layout for all its tasks (DeYoung et al. 2020).

    TASK/{train,val,test}.jsonl                     annotation_id, classification, query, docids, evidences
    TASK/docs/…, TASK/docs.zip or TASK/docs.jsonl   the documents, in tokens separated by spaces and line ends

`evidences` lists groups of token spans; each group is sufficient by itself.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.evidence import CharSpan
from clearhead.bench.data.registry import (
    DatasetSpec,
    choose_split,
    find_split_files,
    missing_files_error,
    register_dataset,
)
from clearhead.errors import InputError
from clearhead.units import Span

#: Classes of each task, in the order of their indices.
ERASER_TASK_LABELS: dict[str, tuple[str, ...]] = {
    "movies": ("NEG", "POS"),
    "boolq": ("False", "True"),
    "multirc": ("False", "True"),
    "fever": ("REFUTES", "SUPPORTS"),
    "cose": ("A", "B", "C", "D", "E"),
    "esnli": ("contradiction", "entailment", "neutral"),
    "evidence_inference": ("significantly decreased", "no significant difference", "significantly increased"),
}
_TOKEN_PATTERN = re.compile(r"[^ ]+")
_SPLIT_FILES = [("test", "test.jsonl"), ("validation", "val.jsonl"), ("train", "train.jsonl")]


def _open_eraser(task: str, spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open one split of a task, with documents from a folder, a zip file or docs.jsonl."""
    files = find_split_files(folder, _SPLIT_FILES)
    split = choose_split(spec.name, split, list(files))
    documents = next((folder / name for name in ("docs", "docs.zip", "docs.jsonl") if (folder / name).exists()), None)
    if documents is None:
        raise missing_files_error(spec, "docs, docs.zip or docs.jsonl", [folder])
    labels = ERASER_TASK_LABELS[task]
    load_rows = partial(_read_annotations, files, split, labels)
    make_example = partial(_make_example, documents, task)
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, make_example, tuple(files))


for _task in ERASER_TASK_LABELS:
    register_dataset(
        f"eraser-{_task.replace('_', '-')}",
        licence="ERASER terms (DeYoung et al. 2020): research use, and the terms of the source of each task",
        download_hint=f"https://www.eraserbenchmark.com/zipped/{_task}.tar.gz",
        folder_names=(f"eraser-{_task.replace('_', '-')}", _task, f"eraser/{_task}", f"data/{_task}"),
        marker_files=("val.jsonl", "test.jsonl", "train.jsonl"),
    )(partial(_open_eraser, _task))


def _read_annotations(files: Mapping[str, Path], split: str, labels: Sequence[str]) -> list[tuple[dict[str, Any], int]]:
    """Read the rows of a split; train excludes held-out rows (movies' train.jsonl repeats all validation reviews)."""
    rows = _read_jsonl(files[split])
    if split == "train":
        held_out = {
            row["annotation_id"] for name, path in files.items() if name != "train" for row in _read_jsonl(path)
        }
        rows = [row for row in rows if row["annotation_id"] not in held_out]
    for row in rows:
        if row["classification"] not in labels:
            raise InputError(f"{str(files[split])!r}: {row['classification']!r} is not one of {', '.join(labels)}")
    return [(row, labels.index(row["classification"])) for row in rows]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; blank lines are skipped."""
    try:
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except ValueError as problem:
        raise InputError(f"{str(path)!r} is not JSON with one row per line ({problem})") from None


def _make_example(documents: Path, task: str, row: tuple[dict[str, Any], int]) -> Example:
    """Join documents and query to one input (premise and hypothesis stay a pair), with spans of characters."""
    annotation, label = row
    ids = _list_document_ids(annotation, documents)
    texts = [_read_document(documents, name) for name in ids]
    raw_input: str | tuple[str, ...]
    if ids[0].endswith("_premise") and len(ids) == 2:
        raw_input = tuple(texts)
        origins = {name: (segment, 0) for segment, name in enumerate(ids)}
    else:
        starts = [sum(len(text) + 1 for text in texts[:index]) for index in range(len(texts))]
        raw_input = "\n".join(texts)
        document_segment = 0
        query = str(annotation.get("query") or "").strip()
        if query and task != "movies":  # the query of movies is the same for all reviews
            raw_input = (query, raw_input)
            document_segment = 1
        origins = {name: (document_segment, start) for name, start in zip(ids, starts, strict=True)}
    tokens = {name: find_token_spans(text) for name, text in zip(ids, texts, strict=True)}
    groups = ([span for span in group if not _is_empty_span(span)] for group in annotation["evidences"])
    evidence = tuple(tuple(_to_char_span(span, tokens, origins) for span in group) for group in groups if group)
    return Example(annotation["annotation_id"], raw_input, label, evidence or None)


def _list_document_ids(annotation: Mapping[str, Any], documents: Path) -> list[str]:
    """List the documents of a row; the premise before the hypothesis."""
    ids = annotation.get("docids") or [span["docid"] for group in annotation["evidences"] for span in group]
    annotation_id = str(annotation["annotation_id"])
    if not ids:
        ids = [annotation_id] if _has_document(documents, annotation_id) else [annotation_id.partition(":")[0]]
    return sorted(dict.fromkeys(map(str, ids)), key=lambda name: (name.endswith("_hypothesis"),))


def find_token_spans(document: str) -> list[Span]:
    """Return the spans of ERASER's tokens: separated by spaces, in lines stripped of white space.

    >>> [("so  bad .\\nreally"[a:b]) for a, b in find_token_spans("so  bad .\\nreally")]
    ['so', 'bad', '.', 'really']
    """
    spans: list[Span] = []
    for line in re.finditer(r"[^\n]+", document):
        start = line.end() - len(line.group().lstrip())
        spans += [match.span() for match in _TOKEN_PATTERN.finditer(document, start, start + len(line.group().strip()))]
    return spans


def _is_empty_span(span: Mapping[str, Any]) -> bool:
    """Return True for spans without tokens, which movies' test set contains and the benchmark's own scorer ignores."""
    return bool(span["start_token"] == span["end_token"])


def _to_char_span(
    span: Mapping[str, Any], tokens: Mapping[str, Sequence[Span]], origins: Mapping[str, tuple[int, int]]
) -> CharSpan:
    """Convert a token span; `origins` maps a document to its segment and its start there."""
    name = str(span["docid"])
    first = span["start_token"]
    stop = span["end_token"]
    if name not in tokens or not 0 <= first < stop <= len(tokens[name]):
        raise InputError(f"evidence from token {first} to {stop} of the document {name!r}: there are no such tokens")
    segment, start = origins[name]
    return CharSpan(start + tokens[name][first][0], start + tokens[name][stop - 1][1], segment)


def _has_document(documents: Path, name: str) -> bool:
    """Check whether a document exists, in the folder or in the packed file."""
    if documents.is_dir():
        return (documents / name).is_file()
    return name in _open_documents(str(documents), os.getpid())[1]


def _read_document(documents: Path, name: str) -> str:
    """Read the text of a document, or raise `InputError` if it is missing; files get Unix line ends."""
    if not _has_document(documents, name):
        raise InputError(
            f"there is no document {name!r} in {str(documents)!r}: check that it has been unpacked completely"
        )
    if documents.is_dir():
        content = (documents / name).read_bytes()
    else:
        archive, entries = _open_documents(str(documents), os.getpid())
        if archive is None:
            return entries[name]
        content = archive.read(entries[name])
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


@lru_cache(maxsize=4)
def _open_documents(path: str, process: int) -> tuple[ZipFile | None, dict[str, str]]:
    """Open an archive with the path of each document in it, or read all documents of a docs.jsonl.

    `process` is part of the cache key, because a forked process must not share the parent's file handle.
    """
    if path.endswith(".jsonl"):
        return None, {row["docid"]: row["document"] for row in _read_jsonl(Path(path))}
    archive = ZipFile(path)
    return archive, {name.partition("docs/")[2] or name: name for name in archive.namelist() if name[-1] != "/"}
