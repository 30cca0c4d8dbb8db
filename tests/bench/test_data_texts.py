"""Readers of text datasets, on tiny files of every layout."""

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clearhead.bench.data import (
    DATASET_REGISTRY,
    BenchmarkDataset,
    CharSpan,
    DatasetSpec,
    Example,
    load_benchmark_dataset,
    register_dataset,
)
from clearhead.bench.data.eraser import find_token_spans
from clearhead.bench.data.hub import _load_hub_splits
from clearhead.bench.data.newsgroups import NEWSGROUP_NAMES
from clearhead.errors import InputError


def write(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))


def test_sst2_reads_its_three_splits(tmp_path: Path) -> None:
    for name in ("train", "dev", "test_official_dev"):
        write(tmp_path / "sst2" / f"{name}.tsv", f'sentence\tlabel\na "{name}" film \t1\nso bad\t0\n')
    data = load_benchmark_dataset("sst2", root=tmp_path)
    assert data.split == "test" and data.splits == ("test", "validation", "train") and data.labels[1] == "positive"
    assert data[0].input == 'a "test_official_dev" film' and (data[0].label, data[1].label) == (1, 0)
    assert data.with_split("dev")[0].input == 'a "dev" film' and data.with_split("train").split == "train"


def test_sst2_reads_glue_layout(tmp_path: Path) -> None:
    write(tmp_path / "glue_data" / "SST-2" / "dev.tsv", "sentence\tlabel\r\ngood\t1\r\n")
    write(tmp_path / "glue_data" / "SST-2" / "test.tsv", "index\tsentence\n0\tunknown fate\n")
    assert [e.input for e in load_benchmark_dataset("sst2", root=tmp_path)] == ["good"] and load_benchmark_dataset(
        "sst2", root=tmp_path
    )[0].label == 1
    hidden = load_benchmark_dataset("sst2", "test", root=tmp_path)[0]
    assert hidden.label is None and hidden.input == "unknown fate" and hidden.id == "test-000001"


def test_malformed_table_raises_with_row(tmp_path: Path) -> None:
    write(tmp_path / "dev.tsv", "sentence\tlabel\ngood\n")
    with pytest.raises(InputError, match=r"dev.tsv', row 1: 1 cells instead of 2"):
        len(load_benchmark_dataset("sst2", root=tmp_path))
    write(tmp_path / "dev.tsv", "phrase\tlabel\ngood\t1\n")
    with pytest.raises(InputError, match="no column 'sentence'"):
        len(load_benchmark_dataset("sst2", root=tmp_path))


def test_numbered_sentence_files_are_read(tmp_path: Path) -> None:
    write(tmp_path / "sentences" / "rt-polarity.all", "0 clich\u00e9s \u2026 pile up . \n1 a gem .\n", "cp1252")
    data = load_benchmark_dataset("rt-polarity", root=tmp_path)
    assert [e.input for e in data] == ["clichés … pile up .", "a gem ."] and [e.label for e in data] == [0, 1]
    write(tmp_path / "sentences" / "TREC.test.all", "3 Who was Galileo ?\n")
    assert (
        load_benchmark_dataset("trec", root=tmp_path).label_name(load_benchmark_dataset("trec", root=tmp_path)[0].label)
        == "HUM"
    )
    write(tmp_path / "sentences" / "custrev.all", "0 \n1 works well\n")
    assert [(e.id, e.input) for e in load_benchmark_dataset("custrev", root=tmp_path)] == [("all-000002", "works well")]
    write(tmp_path / "sentences" / "subj.all", "2 what\n")
    with pytest.raises(InputError, match="line 1: expected a label"):
        len(load_benchmark_dataset("subj", root=tmp_path))


def test_original_sentence_set_layouts_are_read(tmp_path: Path) -> None:
    write(tmp_path / "rt-polaritydata" / "rt-polarity.pos", "a gem .\n")
    write(tmp_path / "rt-polaritydata" / "rt-polarity.neg", "silly\ntedious\n")
    assert [e.label for e in load_benchmark_dataset("rt-polarity", root=tmp_path)] == [0, 0, 1]
    write(tmp_path / "rotten_imdb" / "quote.tok.gt9.5000", "a gem\n")
    write(tmp_path / "rotten_imdb" / "plot.tok.gt9.5000", "he leaves\n")
    data = load_benchmark_dataset("subj", root=tmp_path)
    assert [data.label_name(e.label) for e in data] == ["subjective", "objective"]
    write(tmp_path / "TREC" / "TREC_10.label", "NUM:dist How far is it ?\n")
    assert (
        load_benchmark_dataset("trec", root=tmp_path)[0].label,
        load_benchmark_dataset("trec", root=tmp_path)[0].input,
    ) == (5, "How far is it ?")
    write(tmp_path / "CR" / "custrev.pos", "fine\n")
    write(tmp_path / "CR" / "custrev.neg", "")
    assert [e.label for e in load_benchmark_dataset("custrev", root=tmp_path)] == [1]


def eraser_row(name: str, groups: list[list[tuple[str, int, int]]], label: str = "NEG", **fields: Any) -> str:
    evidences = [[{"docid": d, "start_token": a, "end_token": b, "text": ""} for d, a, b in g] for g in groups]
    return json.dumps({"annotation_id": name, "classification": label, "evidences": evidences, **fields}) + "\n"


@pytest.mark.parametrize("layout", ["docs", "docs.zip", "docs.jsonl"])
def test_eraser_movies_layouts_give_evidence_and_disjoint_splits(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "movies"
    documents = {"a.txt": "so  bad .\nreally , so bad", "b.txt": "good", "c.txt": "fine"}
    if layout == "docs":
        for name, text in documents.items():
            write(folder / "docs" / name, text)
    elif layout == "docs.zip":
        folder.mkdir()
        with ZipFile(folder / "docs.zip", "w") as archive:
            for name, text in documents.items():
                archive.writestr(f"docs/{name}", text)
    else:
        write(folder / layout, "".join(json.dumps({"docid": d, "document": t}) + "\n" for d, t in documents.items()))
    groups = [[("a.txt", 0, 2), ("a.txt", 3, 4), ("a.txt", 5, 5)], [("a.txt", 5, 7)], [("a.txt", 9, 9)]]
    held_out = eraser_row("a.txt", groups, query="What?")
    write(folder / "val.jsonl", held_out)
    write(
        folder / "train.jsonl",
        held_out + eraser_row("b.txt", [], "POS") + eraser_row("c.txt", [[("c.txt", 0, 1)]], "POS"),
    )
    data = load_benchmark_dataset("eraser-movies", "val", root=tmp_path)
    example = data[0]
    assert example.evidence is not None and (len(data), example.label) == (1, 0)
    evidence_texts = [[example.input[p.start : p.stop] for p in alternative] for alternative in example.evidence]  # type: ignore[union-attr]
    assert evidence_texts == [["so  bad", "really"], ["so bad"]]
    train = data.with_split("train")
    assert [e.id for e in train] == ["b.txt", "c.txt"] and train[0].evidence is None
    assert [e.input for e in pickle.loads(pickle.dumps(train))] == ["good", "fine"]


@given(st.text(alphabet=" \n\tab.\xa0", max_size=30))
def test_eraser_token_spans_equal_original_reader(document: str) -> None:
    expected = [token for line in document.split("\n") for token in line.strip().split(" ") if token]
    assert [document[start:stop] for start, stop in find_token_spans(document)] == expected


def test_eraser_tasks_with_query_or_two_documents_give_pairs(tmp_path: Path) -> None:
    write(tmp_path / "boolq" / "docs" / "d1", "one two")
    write(tmp_path / "boolq" / "docs" / "d2", "three four")
    line = eraser_row("q:1", [[("d2", 1, 2)]], "True", query="is it ?", docids=["d1", "d2"])
    write(tmp_path / "boolq" / "test.jsonl", line)
    example = load_benchmark_dataset("eraser-boolq", root=tmp_path)[0]
    assert example.input == ("is it ?", "one two\nthree four")
    assert example.evidence == ((CharSpan(14, 18, segment=1),),) and example.label == 1
    write(tmp_path / "esnli" / "docs.jsonl", '{"docid": "x_hypothesis", "document": "He sleeps"}\n')
    with (tmp_path / "esnli" / "docs.jsonl").open("a") as file:
        file.write('{"docid": "x_premise", "document": "A man sleeps"}\n')
    line = eraser_row("x", [[("x_hypothesis", 1, 2)]], "entailment", docids=["x_hypothesis", "x_premise"], query="")
    write(tmp_path / "esnli" / "test.jsonl", line)
    example = load_benchmark_dataset("eraser-esnli", root=tmp_path)[0]
    assert example.input == ("A man sleeps", "He sleeps") and example.evidence == ((CharSpan(3, 9, segment=1),),)


def test_malformed_eraser_data_raises(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", eraser_row("a", [[("a", 0, 9)]]) + eraser_row("b", []))
    with pytest.raises(InputError, match=r"found no docs, docs.zip or docs.jsonl .*movies.tar.gz"):
        load_benchmark_dataset("eraser-movies", root=tmp_path)
    write(tmp_path / "docs" / "a", "one")
    data = load_benchmark_dataset("eraser-movies", root=tmp_path)
    with pytest.raises(InputError, match="from token 0 to 9"):
        data[0]
    with pytest.raises(InputError, match="no document 'b'"):
        data[1]
    write(tmp_path / "test.jsonl", eraser_row("a", [], "MAYBE"))
    with pytest.raises(InputError, match="'MAYBE' is not one of NEG, POS"):
        len(load_benchmark_dataset("eraser-movies", root=tmp_path))
    write(tmp_path / "test.jsonl", "{oops")
    with pytest.raises(InputError, match="not JSON"):
        len(load_benchmark_dataset("eraser-movies", root=tmp_path))


POST = "From: me\nSubject: bikes\n\nYou wrote:\n> what\nI ride.\n"


def test_newsgroups_from_folders_equal_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for group, number in (("rec.motorcycles", "104"), ("alt.atheism", "2"), ("alt.atheism", "10")):
        write(tmp_path / "20news-bydate" / "20news-bydate-test" / group / number, POST + number)
    data = load_benchmark_dataset("20newsgroups", root=tmp_path)
    assert [e.id for e in data] == ["alt.atheism/10", "alt.atheism/2", "rec.motorcycles/104"]
    assert data[2].label == NEWSGROUP_NAMES.index("rec.motorcycles") and data[2].input == "I ride.\n104"
    assert pickle.loads(pickle.dumps(data))[0].id == "alt.atheism/10"
    assert load_benchmark_dataset("20newsgroups", root=tmp_path, remove=())[0].input.startswith("From: me")
    with pytest.raises(InputError, match="unknown part of a post 'header'"):
        load_benchmark_dataset("20newsgroups", root=tmp_path, remove=("header",))

    def fetch(subset: str, shuffle: bool) -> Any:
        ids = [e.id for e in data][::-1]
        names = sorted({name.split("/")[0] for name in ids})
        return SimpleNamespace(
            filenames=[f"/home/x/{subset}/{name}" for name in ids],
            target_names=names,
            target=[names.index(name.split("/")[0]) for name in ids],
            data=[POST + name.split("/")[1] for name in ids],
        )

    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", fetch)
    assert [(e.id, e.input, e.label) for e in load_benchmark_dataset("20newsgroups", "test")] == [
        (e.id, e.input, e.label) for e in data
    ]


def test_newsgroups_without_network_raises_with_download_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(**_: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("sklearn.datasets.fetch_20newsgroups", offline)
    data = load_benchmark_dataset("20newsgroups", root=tmp_path)
    with pytest.raises(InputError, match=r"could not be fetched \(Name or service not known\). How to get it: https"):
        len(data)


class FakeDataset(list[dict[str, Any]]):
    """A minimal `datasets.Dataset`."""

    def __init__(self, rows: list[dict[str, Any]], names: list[str] | None = None, licence: str = "") -> None:
        super().__init__(rows)
        self.column_names = list(rows[0])
        self.features = {name: SimpleNamespace(names=names if name == "label" else None) for name in rows[0]}
        self.info = SimpleNamespace(license=licence)

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    splits_by_name: dict[str, Any] = {}

    def load_dataset(name: str, config: str | None = None, revision: str | None = None) -> Any:
        if name not in splits_by_name:
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nand more")
        return splits_by_name[name]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    _load_hub_splits.cache_clear()
    return splits_by_name


def test_hub_datasets_select_columns_and_labels(hub: dict[str, Any]) -> None:
    rows = [{"sentence": "good", "label": 1, "idx": 0}, {"sentence": "who knows", "label": -1, "idx": 1}]
    hub["o/sst2"] = {"train": FakeDataset(rows), "validation": FakeDataset(rows, ["neg", "pos"], "MIT")}
    data = load_benchmark_dataset("hub:o/sst2")
    assert (data.split, data.splits, data.licence) == ("validation", ("validation", "train"), "MIT")
    assert [(e.input, e.label) for e in data] == [("good", 1), ("who knows", None)] and data.labels == ("neg", "pos")
    assert data.with_split("train").licence == "see https://huggingface.co/datasets/o/sst2"
    hub["o/nli"] = {"test": FakeDataset([{"premise": "a", "hypothesis": "b", "label": "yes"}])}
    assert (load_benchmark_dataset("hub:o/nli")[0].input, load_benchmark_dataset("hub:o/nli").labels) == (
        ("a", "b"),
        ("yes",),
    )
    hub["o/odd"] = {"test": FakeDataset([{"body": "a", "kind": "x"}, {"body": "b", "kind": "w"}])}
    with pytest.raises(InputError, match=r"columns body, kind: choose those to explain with columns="):
        load_benchmark_dataset("hub:o/odd")
    hub["o/odd"]["train"] = FakeDataset([{"body": "c", "kind": "a"}])
    assert load_benchmark_dataset("hub:o/odd", columns=["body"], label_column="kind").labels == ("a", "w", "x")
    assert [e.label for e in load_benchmark_dataset("hub:o/odd", columns=["body"], label_column="kind")] == [2, 1]
    with pytest.raises(InputError, match="did you mean 'body'"):
        load_benchmark_dataset("hub:o/odd", columns=["bod"])


def test_hub_dataset_without_network_or_package_raises(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"hub:o/x cannot be loaded \(Couldn't reach 'o/x' on the Hub\). How to get"):
        load_benchmark_dataset("hub:o/x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        load_benchmark_dataset("hub:o/x")


def test_csv_table_is_read_as_dataset(tmp_path: Path) -> None:
    write(tmp_path / "mine.csv", 'text,stars\n"good, really",5\nbad,1\nbetter,10\n,1\n')
    data = load_benchmark_dataset(str(tmp_path / "mine.csv"), label_column="stars")
    assert data.labels == ("1", "5", "10") and [e.label for e in data[:3]] == [1, 0, 2]
    assert data[0].input == "good, really"
    with pytest.raises(InputError, match="row 000004: the text is empty"):
        data[3]
    assert load_benchmark_dataset(str(tmp_path / "mine.csv"))[1].label is None


def test_missing_dataset_raises_with_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    with pytest.raises(InputError, match="did you mean 'sst2'"):
        load_benchmark_dataset("sst-2")
    with pytest.raises(InputError, match=r"the folder of sst2 is not known: .*root=.*CLEARHEAD_DATA.*glue"):
        load_benchmark_dataset("sst2")
    names = sorted(name for name, reader in DATASET_REGISTRY.items() if reader.requires_folder and reader.folder_names)
    assert len(names) == 18
    for name in names:
        with pytest.raises(InputError) as error:
            load_benchmark_dataset(name, root=tmp_path)
        message = str(error.value)
        assert (
            message.startswith(f"{name}: found no ")
            and str(tmp_path) in message
            and DATASET_REGISTRY[name].download_hint in message
        )
        assert DATASET_REGISTRY[name].licence
    write(tmp_path / "dev.tsv", "sentence\tlabel\ngood\t1\n")
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path))
    assert len(load_benchmark_dataset("sst2")) == 1
    with pytest.raises(InputError, match=r"sst2: unknown split 'train'. Accepted: validation"):
        load_benchmark_dataset("sst2", "train")
    for name in ("hub:", "sst2:train"):
        with pytest.raises(InputError, match="unknown data set"):
            load_benchmark_dataset(name)
    with pytest.raises(InputError, match="there is no file or folder 'no/such/path'"):
        load_benchmark_dataset("no/such/path")
    with pytest.raises(InputError, match="unknown option of pets 'labels': did you mean 'label'"):
        load_benchmark_dataset("pets", labels="species")


def test_custom_dataset_can_be_registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("clearhead.bench.data.registry.DATASET_REGISTRY", dict(DATASET_REGISTRY))

    @register_dataset(
        "haiku", licence="CC0", download_hint="write some", folder_names=["haiku"], marker_files=["*.txt"]
    )
    def haiku(reader: DatasetSpec, folder: Path, split: str | None, season: str = "autumn") -> BenchmarkDataset:
        rows = sorted(folder.glob("*.txt"))
        return BenchmarkDataset(
            reader.name, "all", reader.licence, (season,), lambda: rows, lambda p: Example(p.stem, p.name, 0)
        )

    write(tmp_path / "haiku" / "frog.txt", "old pond")
    assert [e.id for e in load_benchmark_dataset("haiku", root=tmp_path)] == ["frog"]
    assert load_benchmark_dataset("haiku", root=tmp_path, season="spring").with_split("all").labels == ("spring",)
