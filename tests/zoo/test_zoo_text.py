"""Text models based on MiniLM: reduced vocabularies, data splits, training scripts, and shipped models."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from clearhead.bench.data import load_benchmark_dataset  # noqa: E402
from clearhead.training import load_checkpoint  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"
DATA = ROOT.parent / "shared" / "data"
WORDS = "a the film plot is was good bad great dull very not what who where king queen he she of france ."
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import training scripts, which import each other by bare name, and unload them afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in set(sys.modules) - before:
        if (SCRIPTS / f"{name}.py").exists():
            del sys.modules[name]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny BERT whose vocabulary has placeholders, words and letters."""
    from tokenizers import BertWordPieceTokenizer

    folder = tmp_path_factory.mktemp("base")
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, "[unused0]", "[unused1]", *letters, *(f"##{letter}" for letter in letters), *WORDS.split()[1:]]
    pieces = list(dict.fromkeys([*pieces, "."]))
    BertWordPieceTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}).save(
        str(folder / "tokenizer.json")
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=512,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of synthetic texts in the layouts of the real data."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)

    def sentence(size: int) -> str:
        return " ".join([*rng.choice(WORDS.split()[:-1], size), "."])

    def table(name: str, count: int) -> None:
        lines = [f"{sentence(int(rng.integers(3, 16)))} {name}{index}\t{index % 2}" for index in range(count)]
        (folder / "sst2" / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")

    def numbered(name: str, count: int, labels: int) -> None:
        lines = [f"{index % labels} {sentence(9)} {name[:4]}{index}" for index in range(count)]
        (folder / "sentences" / name).write_text("\n".join(lines) + "\n")

    for subfolder in ("sst2", "sentences", "eraser-movies", "text"):
        (folder / subfolder).mkdir()
    table("train", 800)
    table("dev", 120)
    table("test_official_dev", 40)
    for name in ("rt-polarity.all", "subj.all", "custrev.all"):
        numbered(name, 900 if name.startswith("rt") else 60, 2)
    numbered("TREC.train.all", 400, 6)
    numbered("TREC.test.all", 40, 6)
    with zipfile.ZipFile(folder / "eraser-movies" / "docs.zip", "w") as archive:
        for split, count in (("train", 160), ("val", 40), ("test", 10)):
            rows = []
            for index in range(count):
                name = f"{split}{index}.txt"
                archive.writestr(f"docs/{name}", "\n".join(sentence(12) for _ in range(6)))
                evidence = {"docid": name, "start_token": 3, "end_token": 9}
                row = {"annotation_id": name, "classification": ("NEG", "POS")[index % 2], "docids": None}
                rows.append(json.dumps({**row, "evidences": [[evidence]]}))
            (folder / "eraser-movies" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    for name in ("brown", "abc", "state_union", "inaugural", "wikitext-2-valid", "wikitext-2-test"):
        (folder / "text" / f"{name}.txt").write_text("\n".join(sentence(20) for _ in range(2000)) + "\n")
    return folder


# -- vocabulary and batches


def test_reduced_vocabulary_keeps_embeddings_and_splits_other_words(script: Any, base: Path, tmp_path: Path) -> None:
    encoders = script("encoders")
    ranked = encoders.rank_pieces(base, ["the film was good .", "the plot was good .", "the film was dull ."])
    assert set(SPECIAL) <= set(ranked[:58]) and ranked.index("good") < ranked.index("plot") < ranked.index("great")
    kept = ranked[: ranked.index("plot")]
    small = encoders.write_reduced_model(base, tmp_path / "small", kept, max_tokens=64)
    before, after = encoders.read_vocabulary(base), encoders.read_vocabulary(small)
    assert sorted(after.values()) == list(range(len(kept))) and set(after) == set(kept)
    old, new = (load_checkpoint(folder / "model.safetensors")[0] for folder in (base, small))
    for piece in ("good", "[MASK]", "##q"):
        assert torch.equal(
            old[encoders.WORD_EMBEDDINGS_NAME][before[piece]].half(),
            new[encoders.WORD_EMBEDDINGS_NAME][after[piece]].half(),
        )
    assert new[encoders.POSITION_EMBEDDINGS_NAME].shape[0] == 64
    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    assert tokenizer.model_max_length == 64
    assert tokenizer.tokenize("good plot") == ["good", "p", "##l", "##o", "##t"]
    assert tokenizer("good")["input_ids"] == [after["[CLS]"], after["good"], after["[SEP]"]]


def test_encoding_with_fewer_pieces_keeps_the_ids(script: Any, base: Path) -> None:
    encoders = script("encoders")
    number = encoders.read_vocabulary(base)
    fewer = [piece for piece in number if piece != "film"]
    default, coarse = (encoders.encode_texts(base, ["good film"], 16, pieces=pieces)[0].ids for pieces in (None, fewer))
    expected_pieces = ["[CLS]", "good", "f", "##i", "##l", "##m", "[SEP]"]
    assert default == [number[piece] for piece in ("[CLS]", "good", "film", "[SEP]")]
    assert coarse == [number[piece] for piece in expected_pieces]
    left = encoders.encode_texts(base, ["good bad film"], 4, side="left")[0].ids
    assert left == [number[piece] for piece in ("[CLS]", "bad", "film", "[SEP]")]


def test_epoch_has_every_text_once_in_batches_of_bounded_size(script: Any) -> None:
    encoders = script("encoders")
    lengths = np.random.default_rng(1).integers(2, 60, 700).tolist()
    epoch = encoders.make_epoch(lengths, 16, 256, torch.Generator().manual_seed(0))
    assert sorted(index for batch in epoch for index in batch) == list(range(700))
    for batch in epoch:
        assert len(batch) <= 16 and len(batch) * max(lengths[index] for index in batch) <= 256


def test_texts_are_padded_to_the_longest_of_the_batch(script: Any) -> None:
    texts = script("encoders").PaddedTexts([[2, 5, 3], [2, 3], [2, 5, 6, 7, 3]], torch.device("cpu"))
    batch = texts.collate([1, 0])
    assert batch["input_ids"].tolist() == [[2, 3, 0], [2, 5, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_word_states_are_the_mean_over_their_pieces(script: Any, base: Path) -> None:
    encoders = script("encoders")
    fewer = [piece for piece in encoders.read_vocabulary(base) if piece != "film"]
    texts = ["good film .", "dull"]
    for pieces, spans in ((None, [(0, 1), (1, 2), (2, 3), (3, 4)]), (fewer, [(0, 1), (1, 2), (2, 6), (6, 7)])):
        word_texts = encoders.PaddedWordTexts(
            encoders.encode_texts(base, texts, 16, pieces=pieces), torch.device("cpu")
        )
        assert word_texts.max_words == [4, 2]
        states = torch.randn(2, word_texts.ids.shape[1], 3)
        means, is_word = word_texts.average_by_word(states, [0, 1], 4)
        expected = torch.stack([states[0, start:stop].mean(0) for start, stop in spans])
        torch.testing.assert_close(means[0], expected)
        assert is_word.tolist() == [[True] * 4, [True, True, False, False]]


def test_training_budget_ends_by_steps_or_seconds(script: Any) -> None:
    make_budget = script("encoders").make_training_budget
    by_steps = make_budget(max_seconds=1000.0, max_steps=2)
    by_steps.record_step()
    assert by_steps.fraction == 0.5
    by_seconds = make_budget(max_seconds=10.0, max_steps=1000)
    by_seconds.elapsed_seconds = 20.0
    assert by_seconds.fraction == 1.0
    assert make_budget(max_seconds=None, max_steps=4).fraction == 0.0


# -- what is held out


def test_held_out_filter_equals_its_definition(script: Any) -> None:
    """Reference: compare with every held-out sentence."""
    movies = script("movies")
    rng = np.random.default_rng(2)
    words = [f"w{index}" for index in range(40)]
    held_out_sentences = [" ".join(rng.choice(words, rng.integers(2, 14))) for _ in range(60)]
    held_out_filter = movies.HeldOutFilter(held_out_sentences)

    def is_similar_by_definition(text: str) -> bool:
        bag = set(text.split())
        for other in held_out_sentences:
            if other.replace(" ", "") == text.replace(" ", ""):
                return True
            words = set(other.split())
            if min(len(bag), len(words)) > 4 and len(bag & words) > 0.7 * min(len(bag), len(words)):
                return True
        return False

    texts = [" ".join(rng.choice(words, rng.integers(2, 20))) for _ in range(300)] + held_out_sentences
    results = [held_out_filter.contains_similar(text) for text in texts]
    assert results == [is_similar_by_definition(text) for text in texts]
    assert 60 < sum(results) < 340


def test_sentiment_training_data_exclude_dev_test_and_held_out(script: Any, data: Path) -> None:
    movies = script("movies")
    parts = movies.read_sentiment(data, held_out=50, seed=0)
    assert len(parts.sentences) == 50 and parts.examples and parts.unlabelled
    test = [text for text, _ in movies.read_labelled("sst2", "test", data)]
    training_texts = {
        movies.normalise_letters(text) for text in [*(text for text, _ in parts.examples), *parts.unlabelled]
    }
    assert not training_texts & {movies.normalise_letters(text) for text in test}
    assert not training_texts & {movies.normalise_letters(text) for text, _ in [*parts.dev, *parts.sentences]}
    held_out_filter = movies.HeldOutFilter(text for text, _ in parts.sentences)
    assert not any(held_out_filter.contains_similar(text) for text, _ in parts.examples)
    # only training reviews are read
    assert all(review.label in (0, 1) and len(review.passages) == 1 for review in movies.read_reviews(data, "train"))


def test_topic_questions_are_in_one_split_only(script: Any) -> None:
    examples = [(f"What is {index % 60} ?", index % 6) for index in range(120)]
    train, dev = script("topics").split_examples(examples, 20, seed=0)
    assert len(dev) == 20 and not {text for text, _ in train} & {text for text, _ in dev}


def test_windows_cover_both_ends_and_keep_the_label_of_the_review(script: Any) -> None:
    rationale = script("rationale")
    review = script("movies").Review(" ".join(f"w{index}" for index in range(900)), 1, ())
    windows = rationale.make_windows([review], seed=0)
    assert {label for _, label in windows} == {1}
    assert windows[0][0].split() == review.words[: rationale.LONG_WINDOW_WORDS]
    assert windows[1][0].split() == review.words[-rationale.LONG_WINDOW_WORDS :]
    assert all(text in review.text for text, _ in windows)


# -- masking


def test_masking_skips_special_tokens_and_masks_the_stated_fraction(script: Any) -> None:
    masked = script("masked")
    sampler = object.__new__(masked.MaskedWindowSampler)
    sampler.special_ids, sampler.mask_id, sampler.vocab_size = torch.tensor([0, 2, 3]), 4, 50
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (64, 128))
    ids[:, 0], ids[:, 100], ids[:, 101:] = 2, 3, 0
    shown, chosen = sampler.mask_ids(ids)
    assert not chosen[:, 0].any() and not chosen[:, 100:].any()
    assert torch.equal(shown[~chosen], ids[~chosen])
    assert abs(chosen[:, 1:100].float().mean() - masked.MASK_FRACTION) < 0.01
    assert abs((shown[chosen] == 4).float().mean() - 0.8) < 0.03


def test_wikitext_marks_become_plain_text(script: Any) -> None:
    plain = script("masked").clean_line
    assert plain(" = = Early <unk> = = ") == "Early [UNK]"
    assert plain(" a guest @-@ starring role , 1 @,@ 200 seen 4 @.@ 5 ") == "a guest-starring role , 1,200 seen 4.5"


# -- the scripts, and the shipped models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sentiment", "topics", "rationale", "masked"])
def test_training_script_runs_from_end_to_end(name: str, base: Path, data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--smoke", "--device", "cpu", "--data", str(data)]
    command += ["--base", str(base), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    if name != "masked":
        command += ["--pieces", "70"]
    subprocess.run(command, check=True, cwd=ROOT)
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert card["name"] == name and list(config["label2id"]) == card["labels"]
    assert config["max_position_embeddings"] == (128 if name == "topics" else 512)
    assert_all_weights_used(tmp_path / "out", config["architectures"][0])


def assert_all_weights_used(folder: Path, kind: str) -> None:
    _, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


def load_shipped_model(name: str, kind: str) -> tuple[Any, Any]:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    folder = clearhead_zoo.path(name)
    assert_all_weights_used(folder, kind)
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def load_test_data(name: str) -> Any:
    if not DATA.exists():
        pytest.skip(f"{DATA} is not on this machine (data are not part of the repository)")
    return load_benchmark_dataset(name, "test", DATA)


@torch.no_grad()
def predict_labels(model: Any, tokenizer: Any, texts: list[str]) -> list[int]:
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    guesses = [0] * len(texts)
    for start in range(0, len(order), 32):
        chosen = order[start : start + 32]
        inputs = tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True, truncation=True)
        for index, guess in zip(chosen, model(**inputs).logits.argmax(-1).tolist(), strict=True):
            guesses[index] = guess
    return guesses


def test_shipped_topics_classifies_simple_questions() -> None:
    model, tokenizer = load_shipped_model("topics", "BertForSequenceClassification")
    label_by_question = {
        "Who wrote Hamlet ?": "human",
        "Where is the Eiffel Tower ?": "location",
        "How many legs does a spider have ?": "number",
        "What does NASA stand for ?": "abbreviation",
        "What is an atom ?": "description",
    }
    guesses = predict_labels(model, tokenizer, list(label_by_question))
    assert [model.config.id2label[guess] for guess in guesses] == list(label_by_question.values())


@pytest.mark.slow
def test_shipped_topics_accuracy_equals_card() -> None:
    model, tokenizer = load_shipped_model("topics", "BertForSequenceClassification")
    examples = list(load_test_data("trec"))
    guesses = predict_labels(model, tokenizer, [example.input for example in examples])
    accuracy = float(np.mean([guess == example.label for guess, example in zip(guesses, examples, strict=True)]))
    assert accuracy >= 0.95
    assert accuracy == pytest.approx(clearhead_zoo.card("topics")["figures"]["accuracy"], abs=0.004)


@pytest.mark.slow
def test_shipped_rationale_accuracy_equals_card() -> None:
    model, tokenizer = load_shipped_model("rationale", "BertForSequenceClassification")
    stated = clearhead_zoo.card("rationale")["figures"]["accuracy"]
    assert stated >= 0.85
    examples = list(load_test_data("eraser-movies")[::5])
    guesses = predict_labels(model, tokenizer, [example.input for example in examples])
    accuracy = np.mean([guess == example.label for guess, example in zip(guesses, examples, strict=True)])
    assert abs(accuracy - stated) <= 3 * np.sqrt(stated * (1 - stated) / len(examples))


@torch.no_grad()
def compute_logit_margin(model: Any, tokenizer: Any, sentence: str, likely: str, other: str) -> float:
    inputs = tokenizer(sentence, return_tensors="pt")
    logits = model(**inputs).logits[0, inputs["input_ids"][0].tolist().index(tokenizer.mask_token_id)]
    return float(logits[tokenizer.convert_tokens_to_ids(likely)] - logits[tokenizer.convert_tokens_to_ids(other)])


def test_shipped_masked_prefers_he_for_the_king_of_france() -> None:
    model, tokenizer = load_shipped_model("masked", "BertForMaskedLM")
    margin = compute_logit_margin(model, tokenizer, "[MASK] is the king of france .", "he", "she")
    assert margin > 0
    stated = clearhead_zoo.card("masked")["figures"]["he over she, king of france (logits)"]
    assert margin == pytest.approx(stated, abs=0.05)


def test_shipped_masked_predicts_words_from_their_context() -> None:
    model, tokenizer = load_shipped_model("masked", "BertForMaskedLM")
    assert compute_logit_margin(model, tokenizer, "the capital [MASK] of the country", "city", "and") > 0
    assert compute_logit_margin(model, tokenizer, "he walked to [MASK] house .", "the", "walked") > 0
    pieces = tokenizer.get_vocab()
    assert len(pieces) == 29_528 and not any(piece.startswith("[unused") for piece in pieces)


@pytest.mark.slow
def test_shipped_masked_perplexity_is_near_the_card(script: Any) -> None:
    model, tokenizer = load_shipped_model("masked", "BertForMaskedLM")
    load_test_data("trec")
    masked = script("masked")
    folder = clearhead_zoo.path("masked")
    blocks = masked.read_blocks(DATA / "text" / "wikitext-2-test.txt")[::18]
    texts = masked.split_into_windows(folder, masked.encode_blocks(folder, blocks), torch.device("cpu"))
    loss, _ = masked.compute_masked_loss(model, texts, torch.tensor(tokenizer.all_special_ids), tokenizer.mask_token_id)
    stated = clearhead_zoo.card("masked")["figures"]["perplexity, WikiText-2 test"]
    assert 0.7 < loss.exp().item() / stated < 1.4
