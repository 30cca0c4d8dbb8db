"""Readers of published bias datasets, as sentence templates: CrowS-Pairs, WinoBias and Winogender, from local files.

Each returns sentences with a mask where the two versions of a sentence differ, and the two words at that position.

    crows_pairs   the more and the less stereotypical sentence (Nangia et al. 2020); the word of the former comes first
    winobias      the stereotypical and the other pronoun of a sentence (Zhao et al. 2018); filler: the referent
    winogender    the masculine and the feminine pronoun (Rudinger et al. 2018); filler: the referent
"""

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from clearhead.errors import InputError, unknown_value_error
from clearhead.studies.gender.templates import BiasTemplate

_WORD_PATTERN = re.compile(r"\w+(?:['’]\w+)*")


def find_differing_words(first_sentence: str, second_sentence: str) -> list[tuple[re.Match[str], str]]:
    """Find the words in which two sentences of equal word count differ, ignoring case.

    Returns:
        The match in the first sentence and the word of the second; empty if the word counts differ.

    Example:
        >>> differing = find_differing_words("He left his hat.", "She left her hat.")
        >>> [(match.group(), word) for match, word in differing]
        [('He', 'She'), ('his', 'her')]
    """
    first_matches = list(_WORD_PATTERN.finditer(first_sentence))
    second_words = _WORD_PATTERN.findall(second_sentence)
    if len(first_matches) != len(second_words):
        return []
    pairs = zip(first_matches, second_words, strict=True)
    return [(match, word) for match, word in pairs if match.group().casefold() != word.casefold()]


def make_masked_template(
    first_sentence: str, second_sentence: str, mask_token: str, filler: str | None = None, max_differences: int = 2
) -> BiasTemplate | None:
    """Mask the first sentence where the two differ; None if they differ nowhere or in too many words.

    Args:
        first_sentence: Sentence to mask.
        second_sentence: Its other version.
        mask_token: Text of the model's mask token.
        filler: Word that the sentence is about.
        max_differences: Largest number of differing words.
    """
    differing_words = find_differing_words(first_sentence, second_sentence)
    if not 1 <= len(differing_words) <= max_differences:
        return None
    text = first_sentence
    for match, _ in reversed(differing_words):
        text = text[: match.start()] + mask_token + text[match.end() :]
    match, word = differing_words[0]
    return BiasTemplate(text, filler, compared_words=(match.group().casefold(), word.casefold()))


def read_crows_pairs(path: str | Path, mask_token: str, bias_type: str | None = "gender") -> list[BiasTemplate]:
    """Read `crows_pairs_anonymized.csv`: the pairs of one bias type that differ in at most two words.

    Args:
        path: The file.
        mask_token: Text of the model's mask token.
        bias_type: Bias type to keep; None keeps all.

    Raises:
        InputError: A column is missing, the bias type is unknown, or no pair is usable.
    """
    rows = list(_read_table(Path(path), ",", ("sent_more", "sent_less", "bias_type")))
    bias_types = sorted({row["bias_type"] for row in rows})
    if bias_type is not None and bias_type not in bias_types:
        raise unknown_value_error("bias type", bias_type, bias_types)
    templates = [
        make_masked_template(row["sent_more"], row["sent_less"], mask_token)
        for row in rows
        if bias_type in (None, row["bias_type"])
    ]
    return _check_not_empty(templates, path)


def read_winobias(path: str | Path, mask_token: str) -> list[BiasTemplate]:
    """Read a `pro_stereotyped_type….txt.…` file together with its `anti_stereotyped_…` twin in the same folder.

    Raises:
        InputError: The file name is not one of WinoBias, the twin is missing, or no pair of sentences is usable.
    """
    path = Path(path)
    twin_path = path.with_name(path.name.replace("pro_stereotyped", "anti_stereotyped"))
    if twin_path == path:
        raise InputError(f"{path.name!r} is not a WinoBias file: the names of these files begin with pro_stereotyped_")
    pro_lines = _read_numbered_lines(path)
    anti_lines = _read_numbered_lines(twin_path)
    templates = []
    for pro_line, anti_line in zip(pro_lines, anti_lines, strict=False):
        people = [words for words in re.findall(r"\[([^\]]+)\]", pro_line) if words.casefold().startswith("the ")]
        pro_sentence, anti_sentence = (re.sub(r"[\[\]]", "", line) for line in (pro_line, anti_line))
        referent = people[0].split(maxsplit=1)[1] if people else None
        templates.append(make_masked_template(pro_sentence, anti_sentence, mask_token, referent, max_differences=1))
    return _check_not_empty(templates, path)


def read_winogender(path: str | Path, mask_token: str) -> list[BiasTemplate]:
    """Read `all_sentences.tsv`: the sentences with a named participant, once each.

    The filler is the referent of the pronoun: the participant if the sentence id has the answer 1, else the occupation.

    Raises:
        InputError: A column is missing, or no pair of sentences is usable.
    """
    sentences = {}
    for row in _read_table(Path(path), "\t", ("sentid", "sentence")):
        occupation, participant, answer, gender, *_ = row["sentid"].split(".")
        sentences[occupation, participant, answer, gender] = row["sentence"]
    templates = []
    for (occupation, participant, answer, gender), sentence in sentences.items():
        twin = sentences.get((occupation, participant, answer, "female"))
        if gender != "male" or twin is None or participant == "someone":
            continue
        referent = participant if answer == "1" else occupation
        templates.append(make_masked_template(sentence, twin, mask_token, referent, max_differences=1))
    return _check_not_empty(templates, path)


BIAS_DATASET_READERS: dict[str, Callable[[str | Path, str], list[BiasTemplate]]] = {
    "crows-pairs": read_crows_pairs,
    "winobias": read_winobias,
    "winogender": read_winogender,
}


def read_bias_dataset(name: str, path: str | Path, mask_token: str) -> list[BiasTemplate]:
    """Read a bias dataset by name.

    Args:
        name: Key of `BIAS_DATASET_READERS`.
        path: The dataset's file.
        mask_token: Text of the model's mask token.

    Returns:
        One template per sentence.

    Raises:
        InputError: The name is unknown, or the file is missing or cannot be read as that dataset.
    """
    if name not in BIAS_DATASET_READERS:
        raise unknown_value_error("bias dataset", name, BIAS_DATASET_READERS)
    if not Path(path).is_file():
        raise InputError(f"there is no file {str(path)!r} of {name}")
    try:
        return BIAS_DATASET_READERS[name](path, mask_token)
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r} cannot be read as {name} ({error})") from None


def _check_not_empty(templates: list[BiasTemplate | None], path: str | Path) -> list[BiasTemplate]:
    """Drop None and duplicates, and check that a template remains."""
    unique = list(dict.fromkeys(template for template in templates if template is not None))
    if not unique:
        raise InputError(f"{str(path)!r} has no two sentences that differ in one or two words")
    return unique


def _read_table(path: Path, separator: str, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """Yield the rows of a delimited file with a header; a missing column raises `InputError`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=separator)
        missing = [column for column in columns if column not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{str(path)!r} has no column {missing[0]!r}: it has {', '.join(reader.fieldnames or ())}")
        yield from reader


def _read_numbered_lines(path: Path) -> list[str]:
    """Read the non-empty lines, without their leading numbers."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}, which has the other version of each sentence")
    return [re.sub(r"^\d+\s+", "", line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
