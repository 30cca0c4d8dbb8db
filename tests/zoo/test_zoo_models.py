"""Zoo models as shipped: complete, loadable, and as accurate as their cards state."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LECTURE_SENTENCES = {
    "I like the movie": "POSITIVE",
    "I cannot wait for next time": "POSITIVE",
    "She hates the book": "NEGATIVE",
    "This is so boring": "NEGATIVE",
    "You look extremely confused": "NEGATIVE",
}
MAX_BYTES = {
    "code": 8e6,
    "code-clone": 8e6,
    "code-translate": 9e6,
    "counting": 4e6,
    "logic": 1e6,
    "masked": 45e6,
    "negation": 3e6,
    "pets": 20e6,
    "pets-clip": 18.5e6,
    "pets-hans": 20e6,
    "pets-mean": 20e6,
    "rationale": 30e6,
    "recall": 3e6,
    "recall-4k": 3e6,
    "sentiment": 30e6,
    "shapes-detr": 6e6,
    "shapes-vqa": 4e6,
    "shapes-vilt": 5e6,
    "signs": 4e6,
    "spell": 5e6,
    "topics": 25e6,
    "two-hop": 3e6,
}
#: All of them together: the first fifteen within 220 MB, the three code models, and small models with known evidence.
MAX_TOTAL_BYTES = 250e6


def data_file(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not on this machine (data are not part of the repository)")
    return DATA / name


@pytest.fixture(scope="module")
def sentiment() -> tuple[Any, Any]:
    folder = clearhead_zoo.path("sentiment")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def pets() -> tuple[Any, Any]:
    folder = clearhead_zoo.path("pets")
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoImageProcessor.from_pretrained(folder)


@torch.no_grad()
def predict_text_labels(sentiment: tuple[Any, Any], texts: list[str]) -> list[str]:
    model, tokenizer = sentiment
    # batches of similar lengths need little padding
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    labels = [""] * len(texts)
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        inputs = tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True)
        for index, guess in zip(chosen, model(**inputs).logits.argmax(-1).tolist(), strict=True):
            labels[index] = model.config.id2label[guess]
    return labels


@torch.no_grad()
def predict_breeds(pets: tuple[Any, Any], images: list[Any]) -> list[str]:
    model, processor = pets
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    guesses = torch.cat([model(chunk).logits.argmax(-1) for chunk in pixels.split(32)]).tolist()
    return [model.config.id2label[guess] for guess in guesses]


@pytest.mark.parametrize("name", clearhead_zoo.names())
def test_files_match_the_checksums_of_the_card(name: str) -> None:
    """Equal checksums mean that the figures of the card still hold; `make test-slow` measures them."""
    excluded = {"card.json", "README.md"}
    files = {path.name: path.read_bytes() for path in clearhead_zoo.path(name).iterdir() if path.name not in excluded}
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    stated = clearhead_zoo.card(name)["sha256"]
    changed = sorted(file for file in digests.keys() | stated.keys() if digests.get(file) != stated.get(file))
    assert changed == [], (
        f"{name}: {', '.join(changed)} changed since the figures of the card were measured: run the training script, "
        f"or, where `make test-slow` still passes, python packages/zoo/train/cards.py {clearhead_zoo.path(name)}"
    )


def test_cards_script_updates_only_the_checksums(tmp_path: Path) -> None:
    """The script to run after a file changed; nothing else of the card changes."""
    folder = shutil.copytree(clearhead_zoo.path("logic"), tmp_path / "logic")
    before = clearhead_zoo.card("logic")
    content = (folder / "tokenizer_config.json").read_bytes() + b"\n"
    (folder / "tokenizer_config.json").write_bytes(content)
    script = Path(__file__).parents[2] / "packages" / "zoo" / "train" / "cards.py"
    subprocess.run([sys.executable, script, folder], check=True)
    after = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(content).hexdigest()
    assert digest != before["sha256"]["tokenizer_config.json"]
    assert after == {**before, "sha256": {**before["sha256"], "tokenizer_config.json": digest}}


@pytest.mark.parametrize("name", clearhead_zoo.names())
def test_weights_are_small_and_in_half_precision(name: str) -> None:
    content = (clearhead_zoo.path(name) / "model.safetensors").read_bytes()
    card = clearhead_zoo.card(name)
    assert len(content) == card["bytes"]
    assert card["bytes"] <= MAX_BYTES[name]
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {"F16"}


@pytest.mark.parametrize("name", clearhead_zoo.names())
def test_card_has_all_required_fields(name: str) -> None:
    card = clearhead_zoo.card(name)
    for key in ("task", "licence", "data", "figures", "parameters", "labels", "use", "command"):
        assert card[key], key
    config = json.loads((clearhead_zoo.path(name) / "config.json").read_text())
    assert [config["id2label"][str(index)] for index in range(len(card["labels"]))] == card["labels"]
    assert not list(clearhead_zoo.path(name).glob("*.bin")), "pickles do not belong in the zoo"


def test_total_size_of_the_zoo_is_bounded() -> None:
    assert sum(clearhead_zoo.card(name)["bytes"] for name in clearhead_zoo.names()) <= MAX_TOTAL_BYTES


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(LookupError, match="did you mean 'sentiment'"):
        clearhead_zoo.path("sentimental")
    with pytest.raises(LookupError, match="Available models: "):
        clearhead_zoo.card("zebra")


def test_checkpoint_has_no_missing_or_unused_weights(sentiment: tuple[Any, Any], pets: tuple[Any, Any]) -> None:
    for name, model_class in (
        ("sentiment", transformers.AutoModelForSequenceClassification),
        ("pets", transformers.AutoModelForImageClassification),
    ):
        _, report = model_class.from_pretrained(clearhead_zoo.path(name), output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report


@pytest.mark.parametrize(("text", "label"), LECTURE_SENTENCES.items())
def test_sentiment_classifies_the_lecture_sentences(sentiment: tuple[Any, Any], text: str, label: str) -> None:
    assert predict_text_labels(sentiment, [text]) == [label]


def test_sentiment_tokenizer_splits_rare_words_without_unk(sentiment: tuple[Any, Any]) -> None:
    _, tokenizer = sentiment
    tokens = tokenizer.tokenize("Zyzzyva's unputdownable quixotry, 42 %!")
    assert tokenizer.unk_token not in tokens
    assert "".join(token.removeprefix("##") for token in tokens) == "zyzzyva'sunputdownablequixotry,42%!"


@pytest.mark.slow
def test_sentiment_accuracy_equals_card(sentiment: tuple[Any, Any]) -> None:
    with data_file("sst2/test_official_dev.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    truth = [("NEGATIVE", "POSITIVE")[int(label)] for _, label in rows]
    guesses = predict_text_labels(sentiment, [text.strip() for text, _ in rows])
    accuracy = float(np.mean([guess == label for guess, label in zip(guesses, truth, strict=True)]))
    assert accuracy >= 0.90
    # a few sentences are so close to the decision boundary that another kernel may flip them
    assert accuracy == pytest.approx(
        clearhead_zoo.card("sentiment")["figures"]["accuracy, test_official_dev.tsv"], abs=0.004
    )


def test_pets_classifies_chelsea_as_a_cat(pets: tuple[Any, Any]) -> None:
    skimage_data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    from PIL import Image

    (breed,) = predict_breeds(pets, [Image.fromarray(skimage_data.chelsea())])
    assert breed in clearhead_zoo.card("pets")["cats"]


@pytest.mark.slow
def test_pets_accuracy_equals_card(pets: tuple[Any, Any]) -> None:
    from PIL import Image

    packed = np.load(data_file("pets/pets-test.npz"))
    chosen = np.arange(0, len(packed["label"]), 9)
    data, offsets = packed["data"], packed["off"]
    images = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in chosen]
    card = clearhead_zoo.card("pets")
    guesses = predict_breeds(pets, images)
    truth = [card["labels"][packed["label"][index]] for index in chosen]
    breed = np.mean([guess == label for guess, label in zip(guesses, truth, strict=True)])
    species = np.mean(
        [(guess in card["cats"]) == (label in card["cats"]) for guess, label in zip(guesses, truth, strict=True)]
    )
    # every ninth image: within three standard errors of the figure for all images
    for measured, name in ((breed, "breed accuracy"), (species, "species accuracy")):
        stated = card["figures"][name]
        assert abs(measured - stated) <= 3 * np.sqrt(stated * (1 - stated) / len(chosen)), (name, measured, stated)
