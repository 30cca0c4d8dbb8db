"""Sentences with a class: SST-2 and four older sets (movie reviews, subjectivity, TREC questions, product reviews)."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.data.registry import Reader, choose, files_there, lines, missing, register
from clearhead.errors import InputError

Row = tuple[str, str, int | None]
POLARITY = ("negative", "positive")
#: The six classes of TREC in the order of their numbers in TREC.*.all.
TREC = ("DESC", "ENTY", "ABBR", "HUM", "LOC", "NUM")


def example(row: Row) -> Example:
    return Example(*row)


@register(
    "sst2",
    licence="SST terms (Stanford Sentiment Treebank, Socher et al. 2013): research use",
    get="https://dl.fbaipublicfiles.com/glue/data/SST-2.zip (train.tsv, dev.tsv), or read('hub:stanfordnlp/sst2')",
    folders=("sst2", "SST-2", "glue_data/SST-2", "GLUE/SST-2"),
    marks=("train.tsv", "dev.tsv", "test_official_dev.tsv"),
)
def sst2(reader: Reader, folder: Path, split: str | None) -> DataSet:
    """GLUE's files, or the split of its training set that keeps GLUE's dev set as the test."""
    names = [("test", "test_official_dev.tsv"), ("validation", "dev.tsv"), ("train", "train.tsv"), ("test", "test.tsv")]
    there = files_there(folder, names)
    split = choose(reader.name, split, list(there))
    rows = partial(_table, there[split], split)
    return DataSet("sst2", split, reader.licence, POLARITY, rows, example, tuple(there))


def _table(path: Path, split: str) -> list[Row]:
    """Quotation marks are part of the sentences, so this is no CSV. GLUE's own test set has no labels."""
    header, *body = [line.rstrip("\r").split("\t") for line in lines(path)]
    if "sentence" not in header:
        raise InputError(f"{str(path)!r} has no column 'sentence', but {header}: is it SST-2 as GLUE gives it?")
    text, label = header.index("sentence"), header.index("label") if "label" in header else None
    rows: list[Row] = []
    for number, cells in enumerate(body, 1):
        if len(cells) != len(header):
            raise InputError(f"{str(path)!r}, row {number}: {len(cells)} cells instead of {len(header)}")
        rows.append((f"{split}-{number:06d}", cells[text].strip(), None if label is None else int(cells[label])))
    return rows


def _classic(
    reader: Reader,
    folder: Path,
    split: str | None,
    labels: tuple[str, ...],
    numbered: Mapping[str, str],
    by_class: Sequence[Mapping[str, str]] = (),
) -> DataSet:
    """One file whose lines begin with a number, or the original's one file a class."""
    whole = files_there(folder, list(numbered.items()))
    apart = next((names for names in by_class if all((folder / name).is_file() for name in names)), None)
    if not whole and apart is None:
        raise missing(reader, " and ".join(by_class[0]) if by_class else ", ".join(numbered.values()), [folder])
    there = list(whole) or ["all"]
    split = choose(reader.name, split, there)
    if whole:
        rows = partial(_numbered, whole[split], split, labels)
    else:
        assert apart is not None
        rows = partial(_by_class, folder, {name: labels.index(label) for name, label in apart.items()}, split)
    return DataSet(reader.name, split, reader.licence, labels, rows, example, tuple(there))


def _numbered(path: Path, split: str, labels: tuple[str, ...]) -> list[Row]:
    """`3 Who was Galileo ?`, or as TREC has it `HUM:desc Who was Galileo ?`."""
    rows: list[Row] = []
    for number, line in enumerate(lines(path), 1):
        first, _, text = line.strip().partition(" ")
        first = first.partition(":")[0]
        label = labels.index(first) if first in labels else int(first) if first.isdigit() else -1
        if not 0 <= label < len(labels):
            raise InputError(f"{str(path)!r}, line {number}: expected a label and a sentence, not {line[:60]!r}")
        if text.strip():  # custrev.all has lines with a label alone
            rows.append((f"{split}-{number:06d}", text.strip(), label))
    return rows


def _by_class(folder: Path, files: Mapping[str, int], split: str) -> list[Row]:
    found = [(line.strip(), label) for name, label in files.items() for line in lines(folder / name)]
    return [(f"{split}-{number:06d}", text, label) for number, (text, label) in enumerate(found, 1)]


@register(
    "rt-polarity",
    licence="Cornell movie-review data (Pang and Lee 2005): research use",
    get="https://www.cs.cornell.edu/people/pabo/movie-review-data/rt-polaritydata.tar.gz",
    folders=("sentences", "rt-polaritydata", "rt-polarity"),
    marks=("rt-polarity.all", "rt-polarity.neg"),
)
def rt_polarity(reader: Reader, folder: Path, split: str | None) -> DataSet:
    files = {"rt-polarity.neg": "negative", "rt-polarity.pos": "positive"}
    return _classic(reader, folder, split, POLARITY, {"all": "rt-polarity.all"}, [files])


@register(
    "custrev",
    licence="Customer reviews (Hu and Liu 2004): research use",
    get="SentEval's data/downstream/CR (custrev.pos, custrev.neg)",
    folders=("sentences", "CR", "custrev"),
    marks=("custrev.all", "custrev.neg"),
)
def custrev(reader: Reader, folder: Path, split: str | None) -> DataSet:
    files = {"custrev.neg": "negative", "custrev.pos": "positive"}
    return _classic(reader, folder, split, POLARITY, {"all": "custrev.all"}, [files])


@register(
    "subj",
    licence="Cornell movie-review data (Pang and Lee 2004): research use",
    get="https://www.cs.cornell.edu/people/pabo/movie-review-data/rotten_imdb.tar.gz",
    folders=("sentences", "rotten_imdb", "SUBJ", "subj"),
    marks=("subj.all", "quote.tok.gt9.5000", "subj.subjective"),
)
def subj(reader: Reader, folder: Path, split: str | None) -> DataSet:
    cornell = {"quote.tok.gt9.5000": "subjective", "plot.tok.gt9.5000": "objective"}
    senteval = {"subj.subjective": "subjective", "subj.objective": "objective"}
    return _classic(reader, folder, split, ("subjective", "objective"), {"all": "subj.all"}, [cornell, senteval])


@register(
    "trec",
    licence="TREC question classification (Li and Roth 2002): research use",
    get="https://cogcomp.seas.upenn.edu/Data/QA/QC (train_5500.label, TREC_10.label), or read('hub:CogComp/trec')",
    folders=("sentences", "TREC", "trec"),
    marks=("TREC.test.all", "TREC.train.all", "TREC_10.label", "train_5500.label"),
)
def trec(reader: Reader, folder: Path, split: str | None) -> DataSet:
    shared = files_there(folder, [("test", "TREC.test.all"), ("train", "TREC.train.all")])
    names = shared or files_there(folder, [("test", "TREC_10.label"), ("train", "train_5500.label")])
    return _classic(reader, folder, split, TREC, {split: path.name for split, path in names.items()})
