"""Multi-stream and multi-step explanations on the command line: options, output and errors."""

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


def make_audio_classifier() -> Any:
    """Make a tiny audio classifier with its feature extractor."""
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


MODEL_FACTORIES: dict[str, Callable[[], Any]] = {
    "clip": lambda: (dual_models.model("clip", torch.float32), dual_models.processor("clip")),
    "decoder": lambda: example_results.decoder(torch.float32),
    "bart": lambda: example_results.bart(torch.float32),
    "detr": lambda: example_results.detector(torch.float32),
    "tagger": lambda: models.text_model("bert", "ForTokenClassification", torch.float32),
    "reader": lambda: models.text_model("bert", "ForQuestionAnswering", torch.float32, num_labels=2),
    "encoder": lambda: models.text_model("bert", "Model", torch.float32),
    "wav2vec": make_audio_classifier,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny saved model by name."""
    root = tmp_path_factory.mktemp("streams")

    def save(name: str) -> Path:
        if not (root / name).exists():
            for component in MODEL_FACTORIES[name]():
                component.save_pretrained(root / name)
        return root / name

    return save


ModelFolder = Callable[[str], Path]


@pytest.fixture
def dog_image(tmp_path: Path) -> Path:
    Image.fromarray(example_results.picture()).save(tmp_path / "dog.png")
    return tmp_path / "dog.png"


@pytest.fixture
def bark_audio(tmp_path: Path) -> Path:
    wave = np.sin(np.linspace(0, 40, 2000) ** 2)
    wavfile.write(tmp_path / "bark.wav", 16_000, (wave * 32_000).astype(np.int16))
    return tmp_path / "bark.wav"


def assert_same_explanation(document: dict[str, Any], expected: Any) -> None:
    reloaded = ch.from_dict(document)
    assert reloaded.streams == expected.streams and reloaded.steps == expected.steps
    assert reloaded.target["name"] == expected.target["name"]
    for stream, explanation in expected.by_stream.items():
        np.testing.assert_allclose(reloaded[stream].scores, explanation.scores, rtol=1e-3, atol=1e-5)


def test_text_and_image_options_equal_python_api(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path, tmp_path: Path
) -> None:
    model, page, saved = model_folder("clip"), tmp_path / "out.html", tmp_path / "why.safetensors"
    command = ("explain", "--model", model, "--text", TEXT, "--image", dog_image)
    result = clearhead(*command, "--html", page, "--save", saved)
    assert result.code == 0 and "text" in result.out and "image" in result.out and result.out.count("cosine with") == 1
    expected = ch.load(model).explain(text=TEXT, image=dog_image)
    assert_same_explanation(clearhead(*command, "--json").json, expected)
    assert page.read_text("utf-8").count('class="ch-static"') == 1
    assert clearhead("show", saved).out == result.out
    assert clearhead("show", saved, "--words").code == 0
    assert_same_explanation(clearhead("show", saved, "--json").json, expected)
    # a positional input is the stream that no option gives
    assert_same_explanation(clearhead("explain", TEXT, "--model", model, "--image", dog_image, "--json").json, expected)
    assert_same_explanation(clearhead("explain", dog_image, "--model", model, "--text", TEXT, "--json").json, expected)


def test_several_texts_with_one_image_are_explained_and_aggregated(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path, tmp_path: Path
) -> None:
    command = ("explain", "-m", model_folder("clip"), "--text", TEXT, "--text", "So boring!", "--image", dog_image)
    documents = clearhead(*command, "--json").json
    assert [document["by_stream"]["text"]["units"]["texts"] for document in documents] == [[TEXT], ["So boring!"]]
    clearhead(*command, "--save", tmp_path / "kept")
    aggregated = clearhead("show", tmp_path / "kept", "--json").json
    assert {row["name"] for row in aggregated["ensemble"]["rows"]} >= {"movie", "boring"}


def test_contrast_scale_and_profile_apply_to_image_text_model(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path
) -> None:
    command = ("explain", "-m", model_folder("clip"), "--text", TEXT, "--image", dog_image, "--json")
    ex, inputs = ch.load(model_folder("clip")), {"text": TEXT, "image": dog_image}
    assert_same_explanation(
        clearhead(*command, "--against", "a book").json, ex.explain(**inputs, target=ch.Contrast(None, "a book"))
    )
    assert_same_explanation(clearhead(*command, "--scale", "logit").json, ex.explain(**inputs, scale="logit"))
    profiled = clearhead(*command, "--profile", "mm_clip").json["by_stream"]["text"]
    assert profiled["provenance"]["profile"] == "mm_clip" and profiled["target"]["scale"] == "logit"


def test_compare_reports_agreement_per_stream(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path, tmp_path: Path
) -> None:
    page = tmp_path / "compare.html"
    options = ("--text", TEXT, "--image", dog_image, "--methods", "generic,rollout")
    command = ("compare", *options, "-m", model_folder("clip"))
    result = clearhead(*command, "--html", page, "--json")
    assert result.json["agreement"]["values"].keys() == {"text", "image"} and "<html" in page.read_text("utf-8")
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
def test_language_model_options_equal_python_arguments(
    clearhead: Clearhead, model_folder: ModelFolder, options: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    result = clearhead("explain", TEXT, "-m", model_folder("decoder"), "--json", *options)
    assert_same_explanation(result.json, ch.load(model_folder("decoder")).explain(TEXT, **arguments))


def test_terminal_shows_step_matrix_of_both_streams(clearhead: Clearhead, model_folder: ModelFolder) -> None:
    result = clearhead("explain", TEXT, "-m", model_folder("bart"), "--answer", "She hates it")
    expected = ch.load(model_folder("bart")).explain(TEXT, answer="She hates it")
    assert result.code == 0 and result.out.count("Step by step") == 2
    assert all(step in result.out for step in expected.steps)


def test_detection_query_targets_equal_python_api(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path
) -> None:
    command, ex = ("explain", dog_image, "-m", model_folder("detr"), "--json"), ch.load(model_folder("detr"))
    assert_same_explanation(
        clearhead(*command, "--target", "query 2").json, ex.explain(dog_image, target=ch.DetectionQuery(2))
    )
    assert_same_explanation(
        clearhead(*command, "--target", "query 2 = star").json,
        ex.explain(dog_image, target=ch.DetectionQuery(2, "star")),
    )
    assert clearhead("explain", "--image", dog_image, "-m", model_folder("detr")).code == 0


def test_token_label_and_answer_span_targets_equal_python_api(clearhead: Clearhead, model_folder: ModelFolder) -> None:
    tagger, reader = ch.load(model_folder("tagger")), ch.load(model_folder("reader"))
    tag, read = (
        ("explain", TEXT, "-m", model_folder("tagger"), "--json"),
        ("explain", TEXT, "-m", model_folder("reader"), "--json"),
    )
    assert_same_explanation(
        clearhead(*tag, "--target", "token 2 = LABEL_1").json, tagger.explain(TEXT, target=ch.TokenLabel(2, "LABEL_1"))
    )
    assert_same_explanation(
        clearhead(*tag, "--target", "token movie").json, tagger.explain(TEXT, target=ch.TokenLabel("movie"))
    )
    assert_same_explanation(clearhead(*tag).json, tagger.explain(TEXT))
    pair = (TEXT, "She hates the book")
    assert_same_explanation(clearhead(*read, "--pair", pair[1]).json, reader.explain(pair))
    document = clearhead(*read, "--pair", pair[1], "--target", "answer start").json
    assert_same_explanation(document, reader.explain(pair, target=ch.AnswerSpan("start")))


def test_text_similarity_equals_python_api(clearhead: Clearhead, model_folder: ModelFolder) -> None:
    similarity = ("--task", "similarity", "--readout", "mean", "--pair", "She hates the book", "--json")
    result = clearhead("explain", TEXT, "-m", model_folder("encoder"), *similarity)
    ex = ch.load(model_folder("encoder"), task="similarity", readout="mean")
    assert_same_explanation(result.json, ex.explain((TEXT, "She hates the book")))


def test_audio_file_equals_waveform_and_stereo_is_averaged(
    clearhead: Clearhead, model_folder: ModelFolder, bark_audio: Path, tmp_path: Path
) -> None:
    model = model_folder("wav2vec")
    rate, wave = wavfile.read(bark_audio)
    expected = ch.load(model).explain((wave.astype(np.float32) / 2**15, rate))
    assert expected.units.kind == "frame"
    for arguments in ((bark_audio,), ("--audio", bark_audio)):
        assert_same_explanation(clearhead("explain", *arguments, "-m", model, "--json").json, expected)
    stereo = tmp_path / "stereo.wav"
    wavfile.write(stereo, 16_000, np.stack([wave, wave], axis=1))
    mixed = clearhead("explain", stereo, "-m", model, "--json")
    assert_same_explanation(mixed.json, expected)
    assert "stereo.wav' has 2 channels; their mean is explained" in mixed.err
    assert expected.tokens[-1] in clearhead("explain", bark_audio, "-m", model, "--html", tmp_path / "x.html").out


def test_table_with_image_column_writes_results_and_row_errors(
    clearhead: Clearhead, model_folder: ModelFolder, dog_image: Path, tmp_path: Path
) -> None:
    table, out = tmp_path / "pairs.csv", tmp_path / "out"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [("text", "picture"), (TEXT, "dog.png"), ("So boring!", "lost.png"), (" ", "dog.png")]
        )
    result = clearhead("explain", table, "-m", model_folder("clip"), "--image-column", "picture", "--out", out)
    assert result.code == 3 and "2 rows of 3 could not be explained" in result.err
    with (out / "index.csv").open(encoding="utf-8") as file:
        (line,) = csv.DictReader(file)
    assert_same_explanation(
        ch.load_explanation(out / line["file"]).to_dict(),
        ch.load(model_folder("clip")).explain(text=TEXT, image=dog_image),
    )
    assert line["target"] == TEXT and line["top"]
    problems = (out / "errors.csv").read_text("utf-8")
    assert "there is no image" in problems and "the text is empty" in problems


def test_zoo_examples_are_deterministic_and_explained_by_number(
    clearhead: Clearhead, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("clearhead_zoo")
    from clearhead_zoo import examples

    for name in examples.list_models_with_examples():
        example, repeated, next_example = (examples.make_example_input(name, number) for number in (3, 3, 4))
        assert example.keys() <= {"text", "image", "regions"}
        contents = [
            (inputs.get("text"), np.asarray(inputs.get("image", 0)).tobytes())
            for inputs in (example, repeated, next_example)
        ]
        assert contents[0] == contents[1] != contents[2]
    load, detr = ch.load, model_folder("detr")
    monkeypatch.setattr(ch, "load", lambda name, **options: load(detr, **options), raising=False)
    result = clearhead("explain", "-m", "zoo:shapes-detr", "--example", 3, "--target", "query 1", "--json")
    assert_same_explanation(
        result.json,
        load(detr).explain(examples.make_example_input("shapes-detr", 3)["image"], target=ch.DetectionQuery(1)),
    )


@pytest.mark.parametrize(
    ("name", "arguments", "fragments"),
    [
        ("spell", ("cat",), ('"row_axis":"step"',)),  # letters × phonemes
        ("recall", ("k7 v2 k3 v9 k3 →",), ('"layout":"text"',)),
        ("shapes-vqa", ("--example", 3), ('"layout":"boxes"',)),
        ("shapes-vilt", ("--example", 3), ('"layout":"grid"', '"layout":"text"')),
        ("pets-clip", ("--text", "a dog", "--image", "DOG"), ('"layout":"grid"',)),
        ("shapes-detr", ("--example", 3), ('"layout":"grid"', '"box":[')),
    ],
)
def test_one_command_writes_html_of_a_zoo_model(
    name: str,
    arguments: tuple[Any, ...],
    fragments: tuple[str, ...],
    clearhead: Clearhead,
    dog_image: Path,
    tmp_path: Path,
) -> None:
    if name not in ch.zoo_models():
        pytest.skip(f"zoo:{name} is not installed")
    page = tmp_path / "why.html"
    inputs = [dog_image if argument == "DOG" else argument for argument in arguments]
    result = clearhead("explain", "-m", f"zoo:{name}", *inputs, "--html", page)
    assert result.code == 0, result.err
    html = page.read_text("utf-8")
    assert all(fragment in html for fragment in fragments)


RunFailing = Callable[..., str]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("clip", (), "nothing to explain"),
        ("clip", (TEXT,), "takes text and image: pass each of them once, --text … --image …"),
        ("clip", (TEXT, "--text", "and", "--image", "DOG"), "pass each of them once"),
        ("clip", ("--text", TEXT), "missing: image="),
        ("clip", ("--text", TEXT, "--image", "lost.png"), "there is no image 'lost.png'"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--audio", "BARK"), "leave out --audio"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--target", "step 1"), "measures the similarity of two inputs"),
        ("clip", ("--text", "a", "--text", "b", "--image", *["DOG", "--image"] * 2, "DOG"), "2 for --text"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--profile", "mm_clp"), "did you mean 'mm_clip'?"),
        ("clip", ("--text", TEXT, "--image", "DOG", "--scale", "odds"), "unknown scale 'odds'"),
        ("decoder", ("--text", TEXT, "--image", "DOG"), "takes text: leave out --image"),
        ("decoder", ("DOG",), "takes texts, but"),
        ("decoder", ("BARK",), "is an audio file"),
        ("decoder", (TEXT, "--target", "step 1", "--step", "2"), "both select a position"),
        ("decoder", (TEXT, "--target", "step 1", "--mask", "2"), "--mask selects a masked token"),
        ("decoder", (TEXT, "--step", "9", "--answer", " It is"), "step 9 does not exist"),
        ("decoder", (TEXT, "--answer", ""), "answer= is empty"),
        ("decoder", (TEXT, "--max-new-tokens", "0"), "--max-new-tokens"),
        ("detr", ("DOG", "--target", "query 9"), "query 9 does not exist"),
        ("detr", ("DOG", "--pair", TEXT), "--pair is for models that take two texts"),
        ("detr", (TEXT,), "takes images"),
        ("wav2vec", (TEXT,), "takes audio"),
        ("wav2vec", ("--audio", "lost.wav"), "there is no audio file 'lost.wav'"),
        ("wav2vec", ("--audio", "DOG"), "is not a readable audio file"),
        ("tagger", (TEXT, "--target", "token 99"), "token 99 does not exist"),
        ("tagger", (TEXT, "--target", "query 1"), "is not a target of BertForTokenClassification"),
        ("bert", (TEXT, "--target", "step 1"), "makes one prediction per input"),
        ("bert", (TEXT, "--example", "3"), "--example already selects the input"),
        ("bert", ("--example", "3"), "--example applies only to models of the zoo"),
        ("bert", ("--text", TEXT, "--image-column", "picture"), "--image-column needs data"),
    ],
)
def test_incompatible_inputs_and_options_are_rejected(
    run_failing: RunFailing,
    model_folder: ModelFolder,
    bert: Path,
    dog_image: Path,
    bark_audio: Path,
    model: str,
    options: tuple[str, ...],
    message: str,
) -> None:
    arguments = [{"DOG": str(dog_image), "BARK": str(bark_audio)}.get(option, option) for option in options]
    path = bert if model == "bert" else model_folder(model)
    assert message in run_failing("explain", *arguments, "-m", path)
    if "--image-column" not in options:
        assert message in run_failing("compare", *arguments, "-m", path) or len(options) == 1


def test_incompatible_data_options_are_rejected(
    run_failing: RunFailing,
    model_folder: ModelFolder,
    bert: Path,
    dog_image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text,picture\nhello,dog.png\n")
    command = ("explain", "a.csv", "--out", "results")
    assert "specify its column of images with --image-column" in run_failing(*command, "-m", model_folder("clip"))
    assert "leave out --image-column" in run_failing(*command, "-m", bert, "--image-column", "picture")
    assert "unknown column 'image'" in run_failing(*command, "-m", model_folder("clip"), "--image-column", "image")
    assert "--text applies only to single inputs" in run_failing(*command, "-m", bert, "--text", TEXT)
    assert "there is no default model for audio" in run_failing("explain", "--audio", dog_image)
    assert not (tmp_path / "results").exists()
