"""Sentence classification: SST-2 and four older sets (movie reviews, subjectivity, TREC questions, product reviews)."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.data.registry import (
    DatasetSpec,
    choose_split,
    find_split_files,
    missing_files_error,
    read_lines,
    register_dataset,
)
from clearhead.errors import InputError

#: Id, sentence and label.
SentenceRow = tuple[str, str, int | None]
POLARITY_LABELS = ("negative", "positive")
#: The six classes of TREC in the order of their numbers in TREC.*.all.
TREC_LABELS = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")


def make_sentence_example(row: SentenceRow) -> Example:
    """Create the example of one sentence."""
    return Example(*row)


@register_dataset(
    "sst2",
    licence="SST terms (Stanford Sentiment Treebank, Socher et al. 2013): research use",
    download_hint="https://dl.fbaipublicfiles.com/glue/data/SST-2.zip (train.tsv, dev.tsv), or "
    "load_benchmark_dataset('hub:stanfordnlp/sst2')",
    folder_names=("sst2", "SST-2", "glue_data/SST-2", "GLUE/SST-2"),
    marker_files=("train.tsv", "dev.tsv", "test_official_dev.tsv"),
)
def open_sst2(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open GLUE's files, or the split of the training set that uses GLUE's dev set as the test set."""
    candidates = [
        ("test", "test_official_dev.tsv"),
        ("validation", "dev.tsv"),
        ("train", "train.tsv"),
        ("test", "test.tsv"),
    ]
    files = find_split_files(folder, candidates)
    split = choose_split(spec.name, split, list(files))
    load_rows = partial(_read_glue_table, files[split], split)
    return BenchmarkDataset(
        "sst2", split, spec.licence, POLARITY_LABELS, load_rows, make_sentence_example, tuple(files)
    )


def _read_glue_table(path: Path, split: str) -> list[SentenceRow]:
    """Read a tab-separated file, where quotation marks belong to the sentences; GLUE's test set has no labels."""
    header, *body = [line.rstrip("\r").split("\t") for line in read_lines(path)]
    if "sentence" not in header:
        raise InputError(
            f"{str(path)!r} has no column 'sentence', but {header}: check that it is the SST-2 file of GLUE"
        )
    text_column = header.index("sentence")
    label_column = header.index("label") if "label" in header else None
    rows: list[SentenceRow] = []
    for number, cells in enumerate(body, 1):
        if len(cells) != len(header):
            raise InputError(f"{str(path)!r}, row {number}: {len(cells)} cells instead of {len(header)}")
        label = None if label_column is None else int(cells[label_column])
        rows.append((f"{split}-{number:06d}", cells[text_column].strip(), label))
    return rows


def _open_sentence_files(
    spec: DatasetSpec,
    folder: Path,
    split: str | None,
    labels: tuple[str, ...],
    labelled_files: Mapping[str, str],
    class_file_sets: Sequence[Mapping[str, str]] = (),
) -> BenchmarkDataset:
    """Open files whose lines begin with a label (split → file), or the original's one file per class (file → label)."""
    split_files = find_split_files(folder, list(labelled_files.items()))
    class_files = next((files for files in class_file_sets if all((folder / name).is_file() for name in files)), None)
    if not split_files and class_files is None:
        missing_names = " and ".join(class_file_sets[0]) if class_file_sets else ", ".join(labelled_files.values())
        raise missing_files_error(spec, missing_names, [folder])
    splits = list(split_files) or ["all"]
    split = choose_split(spec.name, split, splits)
    if split_files:
        load_rows = partial(_read_labelled_lines, split_files[split], split, labels)
    else:
        assert class_files is not None
        label_by_file = {name: labels.index(label) for name, label in class_files.items()}
        load_rows = partial(_read_class_files, folder, label_by_file, split)
    return BenchmarkDataset(spec.name, split, spec.licence, labels, load_rows, make_sentence_example, tuple(splits))


def _read_labelled_lines(path: Path, split: str, labels: tuple[str, ...]) -> list[SentenceRow]:
    """Read lines such as `3 Who was Galileo ?`, or in TREC's format `HUM:desc Who was Galileo ?`."""
    rows: list[SentenceRow] = []
    for number, line in enumerate(read_lines(path), 1):
        prefix, _, text = line.strip().partition(" ")
        prefix = prefix.partition(":")[0]
        label = -1
        if prefix in labels:
            label = labels.index(prefix)
        elif prefix.isdigit():
            label = int(prefix)
        if not 0 <= label < len(labels):
            raise InputError(f"{str(path)!r}, line {number}: expected a label and a sentence, not {line[:60]!r}")
        if text.strip():  # custrev.all has lines that consist of a label only
            rows.append((f"{split}-{number:06d}", text.strip(), label))
    return rows


def _read_class_files(folder: Path, files: Mapping[str, int], split: str) -> list[SentenceRow]:
    """Read one file per class, one sentence per line, as (id, sentence, label); ids count through all files."""
    sentences = [(line.strip(), label) for name, label in files.items() for line in read_lines(folder / name)]
    return [(f"{split}-{number:06d}", text, label) for number, (text, label) in enumerate(sentences, 1)]


@register_dataset(
    "rt-polarity",
    licence="Cornell movie-review data (Pang and Lee 2005): research use",
    download_hint="https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz",
    folder_names=("sentences", "rt-polaritydata", "rt-polarity"),
    marker_files=("rt-polarity.all", "rt-polarity.neg"),
)
def open_rt_polarity(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open rt-polarity: movie-review sentences, negative or positive."""
    files = {"rt-polarity.neg": "negative", "rt-polarity.pos": "positive"}
    return _open_sentence_files(spec, folder, split, POLARITY_LABELS, {"all": "rt-polarity.all"}, [files])


@register_dataset(
    "custrev",
    licence="Customer reviews (Hu and Liu 2004): research use",
    download_hint="SentEval's data/downstream/CR (custrev.pos, custrev.neg)",
    folder_names=("sentences", "CR", "custrev"),
    marker_files=("custrev.all", "custrev.neg"),
)
def open_custrev(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open the customer reviews: negative or positive."""
    files = {"custrev.neg": "negative", "custrev.pos": "positive"}
    return _open_sentence_files(spec, folder, split, POLARITY_LABELS, {"all": "custrev.all"}, [files])


@register_dataset(
    "subj",
    licence="Cornell movie-review data (Pang and Lee 2004): research use",
    download_hint="https://www.cs.cornell.edu/people/pabo/movie-review-data/rotten_imdb.tar.gz",
    folder_names=("sentences", "rotten_imdb", "SUBJ", "subj"),
    marker_files=("subj.all", "quote.tok.gt9.5000", "subj.subjective"),
)
def open_subj(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open the subjectivity data: sentences of reviews (subjective) and of plot summaries (objective)."""
    cornell = {"quote.tok.gt9.5000": "subjective", "plot.tok.gt9.5000": "objective"}
    senteval = {"subj.subjective": "subjective", "subj.objective": "objective"}
    return _open_sentence_files(
        spec, folder, split, ("subjective", "objective"), {"all": "subj.all"}, [cornell, senteval]
    )


@register_dataset(
    "trec",
    licence="TREC question classification (Li and Roth 2002): research use",
    download_hint="https://cogcomp.seas.upenn.edu/Data/QA/QC (train_5500.label, TREC_10.label), or "
    "load_benchmark_dataset('hub:CogComp/trec')",
    folder_names=("sentences", "TREC", "trec"),
    marker_files=("TREC.test.all", "TREC.train.all", "TREC_10.label", "train_5500.label"),
)
def open_trec(spec: DatasetSpec, folder: Path, split: str | None) -> BenchmarkDataset:
    """Open TREC: questions with one of six answer types."""
    shared = find_split_files(folder, [("test", "TREC.test.all"), ("train", "TREC.train.all")])
    files = shared or find_split_files(folder, [("test", "TREC_10.label"), ("train", "train_5500.label")])
    return _open_sentence_files(spec, folder, split, TREC_LABELS, {name: path.name for name, path in files.items()})
