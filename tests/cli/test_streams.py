"""Several streams and several steps on the command line: what is typed, what is shown, what is refused."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from scipy.io import wavfile

import clearhead as ch
from tests import dual_models, models
from tests.cli.conftest import Clearhead
from tests.render import example_results

TEXT = "I like the movie."


def wav2vec() -> Any:
    """A tiny classifier of sounds with its feature extractor."""
    torch.manual_seed(7)
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_kernel=(10, 8),
        conv_stride=(5, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        num_labels=3,
    )
    return transformers.Wav2Vec2ForSequenceClassification(config).eval(), transformers.Wav2Vec2FeatureExtractor()


MAKERS: dict[str, Callable[[], Any]] = {
    "clip": lambda: (dual_models.model("clip", torch.float32), dual_models.processor("clip")),
    "decoder": lambda: example_results.decoder(torch.float32),
    "bart": lambda: example_results.bart(torch.float32),
    "detr": lambda: example_results.detector(torch.float32),
    "tagger": lambda: models.text_model("bert", "ForTokenClassification", torch.float32),
    "reader": lambda: models.text_model("bert", "ForQuestionAnswering", torch.float32, num_labels=2),
    "encoder": lambda: models.text_model("bert", "Model", torch.float32),
    "wav2vec": wav2vec,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model in a folder, by name."""
    place = tmp_path_factory.mktemp("streams")

    def saved(name: str) -> Path:
        if not (place / name).exists():
            for part in MAKERS[name]():
                part.save_pretrained(place / name)
        return place / name

    return saved


Folder = Callable[[str], Path]


@pytest.fixture
def dog(tmp_path: Path) -> Path:
    Image.fromarray(example_results.picture()).save(tmp_path / "dog.png")
    return tmp_path / "dog.png"


@pytest.fixture
def bark(tmp_path: Path) -> Path:
    wave = np.sin(np.linspace(0, 40, 2000) ** 2)
    wavfile.write(tmp_path / "bark.wav", 16_000, (wave * 32_000).astype(np.int16))
    return tmp_path / "bark.wav"


def same(said: dict[str, Any], expected: Any) -> None:
    again = ch.from_dict(said)
    assert again.streams == expected.streams and again.steps == expected.steps
    assert again.target["name"] == expected.target["name"]
    for stream, part in expected.by_stream.items():
        np.testing.assert_allclose(again[stream].scores, part.scores, rtol=1e-3, atol=1e-5)


def test_a_text_and_a_picture_by_name(clearhead: Clearhead, folder: Folder, dog: Path, tmp_path: Path) -> None:
    model, page, kept = folder("clip"), tmp_path / "out.html", tmp_path / "why.safetensors"
    command = ("explain", "--model", model, "--text", TEXT, "--image", dog)
    said = clearhead(*command, "--html", page, "--save", kept)
    assert said.code == 0 and "text" in said.out and "image" in said.out and said.out.count("cosine with") == 1
    expected = ch.load(model).explain(text=TEXT, image=dog)
    same(clearhead(*command, "--json").json, expected)
    assert page.read_text("utf-8").count('class="ch-plain"') == 1
    assert clearhead("show", kept).out == said.out
    assert clearhead("show", kept, "--words").code == 0
    same(clearhead("show", kept, "--json").json, expected)
    # what has no name is what is missing
    same(clearhead("explain", TEXT, "--model", model, "--image", dog, "--json").json, expected)
    same(clearhead("explain", dog, "--model", model, "--text", TEXT, "--json").json, expected)


def test_many_texts_and_one_picture(clearhead: Clearhead, folder: Folder, dog: Path, tmp_path: Path) -> None:
    command = ("explain", "-m", folder("clip"), "--text", TEXT, "--text", "So boring!", "--image", dog)
    said = clearhead(*command, "--json").json
    assert [one["parts"]["text"]["units"]["texts"] for one in said] == [[TEXT], ["So boring!"]]
    clearhead(*command, "--save", tmp_path / "kept")
    told = clearhead("show", tmp_path / "kept", "--json").json
    assert {row["name"] for row in told["generic"]["rows"]} >= {"movie", "boring"}


def test_a_contrast_of_texts_and_a_profile(clearhead: Clearhead, folder: Folder, dog: Path) -> None:
    command = ("explain", "-m", folder("clip"), "--text", TEXT, "--image", dog, "--json")
    ex, given = ch.load(folder("clip")), {"text": TEXT, "image": dog}
    same(clearhead(*command, "--against", "a book").json, ex.explain(**given, target=ch.Contrast(None, "a book")))
    same(clearhead(*command, "--scale", "logit").json, ex.explain(**given, scale="logit"))
    profiled = clearhead(*command, "--profile", "mm_clip").json["parts"]["text"]
    assert profiled["provenance"]["profile"] == "mm_clip" and profiled["target"]["scale"] == "logit"


def test_comparison_of_streams(clearhead: Clearhead, folder: Folder, dog: Path, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    command = ("compare", "--text", TEXT, "--image", dog, "-m", folder("clip"), "--methods", "generic,rollout")
    said = clearhead(*command, "--html", page, "--json")
    assert said.json["agreement"]["values"].keys() == {"text", "image"} and "<html" in page.read_text("utf-8")
    assert "rollout" in clearhead(*command).out


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), {}),
        (("--target", "the"), {"target": "the"}),
        (("--target", "the", "--against", "it"), {"target": ch.Contrast("the", "it")}),
        (("--answer", " It is boring"), {"answer": " It is boring"}),
        (("--answer", " It is boring", "--step", "1"), {"answer": " It is boring", "target": ch.GeneratedToken(1)}),
        (
            ("--answer", " It is", "--target", "step 1 = the"),
            {"answer": " It is", "target": ch.GeneratedToken(1, "the")},
        ),
        (
            ("--answer", " It is", "--step", 1, "--target", "the", "--against", "it"),
            {"answer": " It is", "target": ch.GeneratedToken(1, "the", "it")},
        ),
        (("--max-new-tokens", 3), {"target": ch.GeneratedToken(), "max_new_tokens": 3}),
        (("--target", "every step", "--max-new-tokens", 2), {"target": ch.GeneratedToken(), "max_new_tokens": 2}),
        (("--target", "step -1", "--answer", " It is"), {"answer": " It is", "target": ch.GeneratedToken(-1)}),
    ],
)
def test_what_a_language_model_says(
    clearhead: Clearhead, folder: Folder, options: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    said = clearhead("explain", TEXT, "-m", folder("decoder"), "--json", *options)
    same(said.json, ch.load(folder("decoder")).explain(TEXT, **arguments))


def test_a_matrix_in_the_terminal(clearhead: Clearhead, folder: Folder) -> None:
    said = clearhead("explain", TEXT, "-m", folder("bart"), "--answer", "She hates it")
    expected = ch.load(folder("bart")).explain(TEXT, answer="She hates it")
    assert said.code == 0 and said.out.count("Step by step") == 2
    assert all(step in said.out for step in expected.steps)


def test_objects_by_query(clearhead: Clearhead, folder: Folder, dog: Path) -> None:
    command, ex = ("explain", dog, "-m", folder("detr"), "--json"), ch.load(folder("detr"))
    same(clearhead(*command, "--target", "query 2").json, ex.explain(dog, target=ch.DetectionQuery(2)))
    same(clearhead(*command, "--target", "query 2 = star").json, ex.explain(dog, target=ch.DetectionQuery(2, "star")))
    assert clearhead("explain", "--image", dog, "-m", folder("detr")).code == 0


def test_tokens_and_answers_in_a_text(clearhead: Clearhead, folder: Folder) -> None:
    tagger, reader = ch.load(folder("tagger")), ch.load(folder("reader"))
    tag, read = ("explain", TEXT, "-m", folder("tagger"), "--json"), ("explain", TEXT, "-m", folder("reader"), "--json")
    same(
        clearhead(*tag, "--target", "token 2 = LABEL_1").json, tagger.explain(TEXT, target=ch.TokenLabel(2, "LABEL_1"))
    )
    same(clearhead(*tag, "--target", "token movie").json, tagger.explain(TEXT, target=ch.TokenLabel("movie")))
    same(clearhead(*tag).json, tagger.explain(TEXT))
    pair = (TEXT, "She hates the book")
    same(clearhead(*read, "--pair", pair[1]).json, reader.explain(pair))
    said = clearhead(*read, "--pair", pair[1], "--target", "answer start").json
    same(said, reader.explain(pair, target=ch.AnswerSpan("start")))


def test_why_two_texts_are_alike(clearhead: Clearhead, folder: Folder) -> None:
    similarity = ("--task", "similarity", "--readout", "mean", "--pair", "She hates the book", "--json")
    said = clearhead("explain", TEXT, "-m", folder("encoder"), *similarity)
    ex = ch.load(folder("encoder"), task="similarity", readout="mean")
    same(said.json, ex.explain((TEXT, "She hates the book")))


def test_sounds(clearhead: Clearhead, folder: Folder, bark: Path, tmp_path: Path) -> None:
    model = folder("wav2vec")
    rate, wave = wavfile.read(bark)
    expected = ch.load(model).explain((wave.astype(np.float32) / 2**15, rate))
    assert expected.units.kind == "frame"
    for given in ((bark,), ("--audio", bark)):
        same(clearhead("explain", *given, "-m", model, "--json").json, expected)
    stereo = tmp_path / "stereo.wav"
    wavfile.write(stereo, 16_000, np.stack([wave, wave], axis=1))
    mixed = clearhead("explain", stereo, "-m", model, "--json")
    same(mixed.json, expected)
    assert "stereo.wav' has 2 channels; their mean is explained" in mixed.err
    assert expected.tokens[-1] in clearhead("explain", bark, "-m", model, "--html", tmp_path / "x.html").out


def test_a_table_of_texts_and_pictures(clearhead: Clearhead, folder: Folder, dog: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "pairs.csv", tmp_path / "out"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [("text", "picture"), (TEXT, "dog.png"), ("So boring!", "lost.png"), (" ", "dog.png")]
        )
    said = clearhead("explain", table, "-m", folder("clip"), "--image-column", "picture", "--out", out)
    assert said.code == 3 and "2 rows of 3 could not be explained" in said.err
    with (out / "index.csv").open(encoding="utf-8") as file:
        (line,) = csv.DictReader(file)
    same(ch.load_explanation(out / line["file"]).to_dict(), ch.load(folder("clip")).explain(text=TEXT, image=dog))
    assert line["target"] == TEXT and line["top"]
    problems = (out / "errors.csv").read_text("utf-8")
    assert "there is no picture" in problems and "the text is empty" in problems


def test_ready_examples_of_the_zoo(clearhead: Clearhead, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("clearhead_zoo")
    from clearhead_zoo import examples

    for name in examples.list_models_with_examples():
        one, again, other = (examples.make_example_input(name, number) for number in (3, 3, 4))
        assert one.keys() <= {"text", "image", "regions"}
        told = [(given.get("text"), np.asarray(given.get("image", 0)).tobytes()) for given in (one, again, other)]
        assert told[0] == told[1] != told[2]
    load, detr = ch.load, folder("detr")
    monkeypatch.setattr(ch, "load", lambda name, **how: load(detr, **how), raising=False)
    said = clearhead("explain", "-m", "zoo:shapes-detr", "--example", 3, "--target", "query 1", "--json")
    same(
        said.json,
        load(detr).explain(examples.make_example_input("shapes-detr", 3)["image"], target=ch.DetectionQuery(1)),
    )


@pytest.mark.parametrize(
    ("name", "given", "drawn"),
    [
        ("spell", ("cat",), ('"corner":"step"',)),  # letters × phonemes
        ("recall", ("k7 v2 k3 v9 k3 →",), ('"shape":"text"',)),
        ("shapes-vqa", ("--example", 3), ('"shape":"boxes"',)),
        ("shapes-vilt", ("--example", 3), ('"shape":"grid"', '"shape":"text"')),
        ("pets-clip", ("--text", "a dog", "--image", "DOG"), ('"shape":"grid"',)),
        ("shapes-detr", ("--example", 3), ('"shape":"grid"', '"box":[')),
    ],
)
def test_one_command_explains_a_model_of_the_zoo_with_a_picture(
    name: str, given: tuple[Any, ...], drawn: tuple[str, ...], clearhead: Clearhead, dog: Path, tmp_path: Path
) -> None:
    if name not in ch.zoo_models():
        pytest.skip(f"zoo:{name} is not installed")
    page = tmp_path / "why.html"
    said = clearhead("explain", "-m", f"zoo:{name}", *(dog if one == "DOG" else one for one in given), "--html", page)
    assert said.code == 0, said.err
    told = page.read_text("utf-8")
    assert all(kind in told for kind in drawn)


Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("clip", (), "nothing to explain"),
        ("clip", (TEXT,), "takes text and image: give each of them once, --text … --image …"),
        ("clip", (TEXT, "--text", "and", "--image", "DOG"), "give each of them once"),
        ("clip", ("--text", TEXT), "missing: image="),
        ("clip", ("--text", TEXT, "--image", "lost.png"), "there is no image 'lost.png'"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--audio", "BARK"), "leave out --audio"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--target", "step 1"), "measures how alike two inputs are"),
        ("clip", ("--text", "a", "--text", "b", "--image", *["DOG", "--image"] * 2, "DOG"), "2 times --text"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--profile", "mm_clp"), "did you mean 'mm_clip'?"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--scale", "odds"), "unknown scale 'odds'"),
        ("decoder", ("--text", TEXT, "--image", "DOG"), "takes text: leave out --image"),
        ("decoder", ("DOG",), "takes texts, but"),
        ("decoder", ("BARK",), "is an audio file"),
        ("decoder", (TEXT, "--target", "step 1", "--step", "2"), "both name a position"),
        ("decoder", (TEXT, "--target", "step 1", "--mask", "2"), "--mask selects a masked token"),
        ("decoder", (TEXT, "--step", "9", "--answer", " It is"), "step 9 does not exist"),
        ("decoder", (TEXT, "--answer", ""), "the answer is empty"),
        ("decoder", (TEXT, "--max-new-tokens", "0"), "--max-new-tokens"),
        ("detr", ("DOG", "--target", "query 9"), "query 9 does not exist"),
        ("detr", ("DOG", "--pair", TEXT), "--pair is for models that take two texts"),
        ("detr", (TEXT,), "takes images"),
        ("wav2vec", (TEXT,), "takes audio"),
        ("wav2vec", ("--audio", "lost.wav"), "there is no audio file 'lost.wav'"),
        ("wav2vec", ("--audio", "DOG"), "is not a readable audio file"),
        ("tagger", (TEXT, "--target", "token 99"), "token 99 does not exist"),
        ("tagger", (TEXT, "--target", "query 1"), "is no target of BertForTokenClassification"),
        ("bert", (TEXT, "--target", "step 1"), "gives one answer as a whole"),
        ("bert", (TEXT, "--example", "3"), "--example is an input itself"),
        ("bert", ("--example", "3"), "--example is for models of the zoo"),
        ("bert", ("--text", TEXT, "--image-column", "picture"), "--image-column is for data"),
    ],
)
def test_what_does_not_go_together(
    refused: Refused, folder: Folder, bert: Path, dog: Path, bark: Path, model: str, options: tuple[str, ...], says: str
) -> None:
    given = [{"DOG": str(dog), "BARK": str(bark)}.get(option, option) for option in options]
    place = bert if model == "bert" else folder(model)
    assert says in refused("explain", *given, "-m", place)
    if "--image-column" not in options:
        assert says in refused("compare", *given, "-m", place) or len(options) == 1


def test_data_and_streams_that_do_not_go_together(
    refused: Refused, folder: Folder, bert: Path, dog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,picture\nhello,dog.png\n")
    run = ("explain", "a.csv", "--out", "results")
    assert "name its column of images with --image-column" in refused(*run, "-m", folder("clip"))
    assert "leave out --image-column" in refused(*run, "-m", bert, "--image-column", "picture")
    assert "unknown column 'image'" in refused(*run, "-m", folder("clip"), "--image-column", "image")
    assert "--text is for single inputs" in refused(*run, "-m", bert, "--text", TEXT)
    assert "no model of the zoo takes audio" in refused("explain", "--audio", dog)
    assert not (tmp_path / "results").exists()
