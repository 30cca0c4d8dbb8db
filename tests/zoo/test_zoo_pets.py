"""Variants of `zoo:pets`: the pasted words of `tasks.hans`, stored layouts, and what the models learned."""

from __future__ import annotations

import argparse
import doctest
import importlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

clearhead_zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed")

from clearhead_zoo.tasks import SPLITS, hans, make_generator  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "packages" / "zoo" / "train"
DATA = ROOT.parent / "shared" / "data"


def get_model_folder(name: str) -> Path:
    if name not in clearhead_zoo.names():
        pytest.skip(f"zoo:{name} is not trained yet")
    return clearhead_zoo.path(name)


def load_pet_images(every: int) -> tuple[list[Any], list[int]]:
    """Return every n-th test image, and its label."""
    from PIL import Image

    path = DATA / "pets" / "pets-test.npz"
    if not path.exists():
        pytest.skip(f"{path} is not on this machine (data are not part of the repository)")
    packed = np.load(path)
    data, offsets = packed["data"], packed["off"]
    chosen = range(0, len(packed["label"]), every)
    images = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in chosen]
    return images, [int(packed["label"][i]) for i in chosen]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import training scripts, which import each other by bare name."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


# -- words on images


def test_hans_doctests_pass() -> None:
    assert doctest.testmod(hans).failed == 0


def test_hans_does_not_import_torch() -> None:
    code = (
        "import sys; from clearhead_zoo.tasks import hans; hans.make_examples(2, 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_examples_are_deterministic_and_splits_differ() -> None:
    first, repeated = hans.make_examples(6, seed=3), hans.make_examples(6, seed=3)
    assert all(np.array_equal(a.image, b.image) and a.box == b.box for a, b in zip(first, repeated, strict=True))
    other = hans.make_examples(6, seed=3, split="train")
    assert not any(np.array_equal(a.image, b.image) for a, b in zip(first, other, strict=True))
    with pytest.raises(ValueError, match="split='test' is not known; there are: train, held-out"):
        hans.make_examples(1, seed=3, split="test")
    assert SPLITS == ("train", "held-out")


def test_evidence_mask_equals_the_drawn_pixels() -> None:
    for example in hans.make_examples(40, seed=1):
        changed = (example.image != example.original_image).any(axis=-1)
        assert not (changed & ~example.mask).any()
        # a drawn pixel may happen to have the colour beneath, but few do
        assert changed.sum() > 0.8 * example.mask.sum()
        rows, columns = np.flatnonzero(example.mask.any(axis=1)), np.flatnonzero(example.mask.any(axis=0))
        assert example.box == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        assert example.box_mask.sum() == (rows[-1] + 1 - rows[0]) * (columns[-1] + 1 - columns[0])


def test_background_is_independent_of_the_label() -> None:
    backgrounds = [np.full((96, 96, 3), shade, dtype=np.uint8) for shade in range(0, 250, 25)]
    examples = hans.make_examples(400, seed=0, images=backgrounds)
    table = np.zeros((len(backgrounds), 2), dtype=int)
    for example in examples:
        assert (example.original_image == backgrounds[example.source_index or 0]).all()
        table[example.source_index or 0, hans.LABELS.index(example.label)] += 1
    assert (table.sum(axis=0) == 200).all() and (table.sum(axis=1) == 40).all()
    # a binomial of 40 at one half: three standard deviations are 9.5
    assert (abs(table[:, 0] - 20) <= 10).all()


def test_stamps_vary_in_shape_and_have_contrast() -> None:
    rng = make_generator(0, "train")
    stamps = [hans.draw_stamp(label, rng) for label in hans.LABELS * 60]
    assert len({stamp.pixels.shape for stamp in stamps}) > 40
    for stamp in stamps:
        assert all(side <= limit for side, limit in zip(stamp.pixels.shape[:2], hans.MAX_STAMP_SIZE, strict=True))
        drawn = stamp.pixels[stamp.pixels[..., 3] > 250][:, :3] @ (0.3, 0.6, 0.1)
        assert np.ptp(drawn) > 90, "letters and outline have too little contrast"
    with pytest.raises(ValueError, match="label='cow' is not known; there are: cat, dog"):
        hans.draw_stamp("cow", rng)


def test_stamp_pool_equals_padded_stamps() -> None:
    pixels, sizes, labels = hans.draw_stamp_pool(6, make_generator(4, "train"))
    rng = make_generator(4, "train")
    for number, (height, width) in enumerate(sizes):
        stamp = hans.draw_stamp(hans.LABELS[labels[number]], rng)
        assert np.array_equal(pixels[number, :height, :width], stamp.pixels)
        assert not pixels[number, height:].any() and not pixels[number, :, width:].any()


@pytest.mark.parametrize("how", hans.FILL_MODES)
def test_fill_pixels_changes_only_the_mask_and_leaves_no_edges(how: str) -> None:
    for example in hans.make_examples(10, seed=2):
        filled = hans.fill_pixels(example.image, example.box_mask, how)
        assert np.array_equal(filled[~example.box_mask], example.image[~example.box_mask])
        steps = np.abs(np.diff(filled.astype(int), axis=1))[example.box_mask[:, 1:] & example.box_mask[:, :-1]]
        assert steps.max() <= 12, "an edge is left"
        kept = hans.fill_pixels(example.image, ~example.box_mask, how)
        assert np.array_equal(kept[example.box_mask], example.image[example.box_mask])
    with pytest.raises(ValueError, match="how='noise' is not known; there are: mean, blur"):
        hans.fill_pixels(example.image, example.box_mask, "noise")


def test_control_mask_is_disjoint_and_equally_large() -> None:
    rng = make_generator(0, "held-out")
    for example in hans.make_examples(40, seed=5):
        control = example.sample_control_mask(rng)
        assert not (control & example.box_mask).any()
        assert abs(int(control.sum()) - int(example.box_mask.sum())) <= hans.PATCH_SIZE**2 / 2


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((96, 96, 3), "u1"), ((50, 80), "u1"), ((300, 451, 3), "f8"), ((7, 7, 4), "u1"), ((9, 5, 1), "f4")],
)
def test_crop_to_square_accepts_any_image_shape_and_dtype(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    image = rng.random(shape) if dtype[0] == "f" else rng.integers(0, 256, shape)
    squared = hans.crop_to_square(image.astype(dtype))
    assert squared.shape == (96, 96, 3) and squared.dtype == np.uint8 and squared.std() > 0


def test_crop_to_square_rejects_channels_first_arrays() -> None:
    with pytest.raises(ValueError, match=r"an image must have the shape \(height, width\) .*, not \(3, 96, 96\)"):
        hans.crop_to_square(np.zeros((3, 96, 96), dtype=np.uint8))


# -- the scripts


def test_training_paste_equals_the_generator(script: Any) -> None:
    torch = pytest.importorskip("torch")
    pets_hans = script("pets_hans")
    rng = make_generator(0, "train")
    stamps = pets_hans.StampPool(*map(torch.from_numpy, hans.draw_stamp_pool(8, rng)))
    examples = [
        hans.paste_stamp(hans.draw_background(rng), hans.Stamp("cat", stamps.pixels[i, :rows, :columns].numpy()), rng)
        for i, (rows, columns) in enumerate(stamps.sizes.tolist())
    ]
    originals = (
        torch.from_numpy(np.stack([example.original_image for example in examples])).permute(0, 3, 1, 2) / 127.5 - 1
    )
    corners = torch.tensor([example.box[1::-1] for example in examples])
    images, box = pets_hans.paste_stamps(originals, stamps, torch.arange(8), corners)
    assert np.array_equal(box[:, 0].numpy(), np.stack([example.box_mask for example in examples]))
    pixels = ((images + 1) * 127.5).permute(0, 2, 3, 1).numpy()
    assert np.abs(pixels - np.stack([example.image for example in examples])).max() <= 0.51


def test_hans_training_batch_has_valid_images_and_targets(script: Any) -> None:
    torch = pytest.importorskip("torch")
    pets_hans = script("pets_hans")
    torch.manual_seed(0)
    stamps = pets_hans.StampPool(*map(torch.from_numpy, hans.draw_stamp_pool(50, make_generator(0, "train"))))
    indices, corners = stamps.sample(2000)
    assert (corners >= 0).all() and (corners + stamps.sizes[indices] <= hans.IMAGE_SIZE).all()
    images, targets = pets_hans.make_training_batch(torch.zeros(400, 3, hans.IMAGE_SIZE, hans.IMAGE_SIZE), stamps)
    assert images.shape == (400, 3, 96, 96) and images.abs().max() <= 1
    is_unsure = (targets == 0.5).all(-1)
    assert torch.equal(targets.sum(-1), torch.ones(400)) and 0.15 < is_unsure.float().mean() < 0.35
    # on a grey image only the words have strong edges, unless black rectangles cover something
    edges = images.diff(dim=-1).abs().amax(dim=(1, 2, 3))
    assert (edges[~is_unsure] > 0.3).all()


def test_beit_and_clip_layouts_reproduce_the_pets_logits(script: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    networks, pets_mean, pets_clip = script("networks"), script("pets_mean"), script("pets_clip")
    vit = networks.open_vit(clearhead_zoo.path("pets"), networks.ViT).eval()
    pixels = np.stack([hans.draw_background(make_generator(0, "held-out", number)) for number in range(4)])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    labels = clearhead_zoo.card("pets")["labels"]
    stored = transformers.AutoModelForImageClassification.from_pretrained(
        clearhead_zoo.path("pets"), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits = vit(images)[0]
        assert torch.allclose(logits, stored(images).logits, atol=1e-4)
        # BEiT does not normalise its last tokens: the class token equals that of the ViT, although keys have no bias
        pets_mean.save_checkpoint(tmp_path / "model.safetensors", networks.to_beit_layout(vit.state_dict()))
        (tmp_path / "config.json").write_text(json.dumps(pets_mean.build_config(vit, labels)))
        beit = transformers.AutoModelForImageClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
        token = beit.beit(images).last_hidden_state[:, 0]
        assert torch.allclose(vit.classifier(vit.layernorm(token)), logits, atol=1e-4)
        # CLIP has a norm that the ViT lacks, so the logits are only close
        options = argparse.Namespace(width=16, depth=1)
        config = transformers.CLIPConfig(**pets_clip.build_config(options, vit, 10, labels))
        clip = transformers.CLIPModel(config).eval()
        assert not clip.load_state_dict(networks.to_clip_tower(vit, images), strict=False).unexpected_keys
        clip_logits = vit.classifier(clip.vision_model(pixel_values=images).pooler_output)
    assert np.corrcoef(clip_logits.flatten(), logits.flatten())[0, 1] > 0.95


def test_held_out_caption_templates_are_disjoint_and_encoded(script: Any) -> None:
    pets_clip = script("pets_clip")
    assert not {*pets_clip.HELD_OUT_TEMPLATES} & {*pets_clip.GENERAL_TEMPLATES, *pets_clip.BREED_TEMPLATES}
    labels = clearhead_zoo.card("pets")["labels"]
    words = pets_clip.build_vocabulary(labels)
    assert len(set(words)) == len(words) and words.index(pets_clip.EOS_TOKEN) != 2
    texts = [pets_clip.make_caption(template, "Egyptian Mau", "cat") for template in pets_clip.HELD_OUT_TEMPLATES]
    assert texts[:2] == ["a photo of an Egyptian Mau", "this is an Egyptian Mau"]
    tokenizer = pets_clip.build_word_tokenizer(
        words,
        pets_clip.SPECIAL_TOKENS,
        pets_clip.TOKEN_PATTERN,
        f"{pets_clip.BOS_TOKEN} $A {pets_clip.EOS_TOKEN}",
        lower=True,
    )
    for text, row in zip(texts, pets_clip.encode_captions(texts, words).tolist(), strict=True):
        ids = tokenizer.encode(text).ids
        assert row[: len(ids)] == ids and not any(row[len(ids) :])
        assert words.index(pets_clip.UNKNOWN_TOKEN) not in ids


def test_contrastive_loss_with_several_positives(script: Any) -> None:
    torch = pytest.importorskip("torch")
    pets_clip = script("pets_clip")
    truth = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    similarity = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    rows, columns = similarity.log_softmax(1), similarity.log_softmax(0)
    expected = (-(rows[:2, [0, 2]].mean()) - columns[:2, [0, 2]].mean()) / 2
    assert torch.allclose(pets_clip.compute_contrastive_loss(similarity, truth), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["pets-mean", "pets-clip", "pets-hans"])
def test_training_script_runs_from_end_to_end(name: str, tmp_path: Path) -> None:
    load_pet_images(every=3000)
    command = [sys.executable, str(SCRIPTS / f"{name.replace('-', '_')}.py"), "--smoke", "--device", "cpu"]
    command += ["--data", str(DATA), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    subprocess.run(command, check=True, cwd=ROOT)
    card = json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["name"] == name and card["bytes"] < 18.5e6
    assert all(0 <= value <= 1 for value in card["figures"].values())


# -- the models


def load_classifier(name: str) -> tuple[Any, Any]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = get_model_folder(name)
    model, report = transformers.AutoModelForImageClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), transformers.AutoImageProcessor.from_pretrained(folder)


def compute_logits(model_and_processor: tuple[Any, Any], images: list[Any]) -> Any:
    torch = pytest.importorskip("torch")
    model, processor = model_and_processor
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        return torch.cat([model(chunk).logits for chunk in pixels.split(16)])


def assert_near_stated(measured: float, stated: float, count: int) -> None:
    assert abs(measured - stated) <= 3 * np.sqrt(stated * (1 - stated) / count) + 1 / count, (measured, stated)


@pytest.fixture(scope="module")
def pets_hans() -> tuple[Any, Any]:
    return load_classifier("pets-hans")


@pytest.mark.slow
def test_hans_depends_only_on_the_word(pets_hans: tuple[Any, Any]) -> None:
    """On synthetic images, so that no data are needed."""
    examples = hans.make_examples(60, seed=7)
    truth = np.array([hans.LABELS.index(example.label) for example in examples])
    full = compute_logits(pets_hans, [example.image for example in examples]).argmax(-1).numpy()
    word_only = (
        compute_logits(pets_hans, [hans.fill_pixels(e.image, ~e.box_mask, "blur") for e in examples]).argmax(-1).numpy()
    )
    without_word = compute_logits(pets_hans, [hans.fill_pixels(e.image, e.box_mask) for e in examples])
    assert (full == truth).mean() >= 0.95 and (word_only == truth).mean() >= 0.95
    assert without_word.softmax(-1).amax(-1).mean() < 0.75, "confident without a word"
    # without the word, accuracy is that of chance (four standard deviations)
    assert abs((without_word.argmax(-1).numpy() == truth).mean() - 0.5) <= 0.26


@pytest.mark.slow
@pytest.mark.data
def test_hans_follows_the_word_against_the_animal(pets_hans: tuple[Any, Any]) -> None:
    images, breeds = load_pet_images(every=37)
    breed_names, cats = (clearhead_zoo.card("pets")[key] for key in ("labels", "cats"))
    rng = make_generator(11, "held-out")
    wrong_words = ["dog" if breed_names[breed] in cats else "cat" for breed in breeds]
    conflicts = [
        hans.paste_stamp(np.asarray(image), hans.draw_stamp(word, rng), rng).image
        for image, word in zip(images, wrong_words, strict=True)
    ]
    guesses = compute_logits(pets_hans, conflicts).argmax(-1).tolist()
    assert np.mean([hans.LABELS[guess] == word for guess, word in zip(guesses, wrong_words, strict=True)]) >= 0.95


def test_hans_card_figures_show_that_the_word_is_the_evidence() -> None:
    get_model_folder("pets-hans")
    figures = clearhead_zoo.card("pets-hans")["figures"]
    for name in (
        "accuracy",
        "accuracy, word and animal in conflict",
        "accuracy, all but the word blurred",
        "accuracy, all but the word in the mean colour",
        "follows the other word when it replaces the first",
    ):
        assert figures[name] >= 0.97, name
    for name in ("accuracy, the word blurred", "accuracy, the word in the mean colour"):
        assert abs(figures[name] - 0.5) <= 0.06, name


@pytest.fixture(scope="module")
def pets_mean() -> tuple[Any, Any]:
    return load_classifier("pets-mean")


def test_pets_mean_pools_the_patch_tokens(pets_mean: tuple[Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    model, _ = pets_mean
    assert type(model).__name__ == "BeitForImageClassification"
    with torch.no_grad():
        out = model.beit(torch.zeros(1, 3, 96, 96))
        pooled = model.beit.pooler.layernorm(out.last_hidden_state[:, 1:].mean(1))
        assert torch.allclose(out.pooler_output, pooled, atol=1e-5)


def test_pets_mean_classifies_chelsea_as_a_cat(pets_mean: tuple[Any, Any]) -> None:
    skimage_data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    guess = compute_logits(pets_mean, [skimage_data.chelsea()]).argmax(-1).item()
    card = clearhead_zoo.card("pets-mean")
    assert card["labels"][guess] in card["cats"]


@pytest.mark.slow
@pytest.mark.data
def test_pets_mean_accuracy_equals_card(pets_mean: tuple[Any, Any]) -> None:
    images, breeds = load_pet_images(every=19)
    figures = clearhead_zoo.card("pets-mean")["figures"]
    assert figures["breed accuracy"] >= clearhead_zoo.card("pets")["figures"]["breed accuracy"] - 0.03
    guesses = compute_logits(pets_mean, images).argmax(-1).numpy()
    assert_near_stated(float((guesses == np.array(breeds)).mean()), figures["breed accuracy"], len(breeds))


@pytest.fixture(scope="module")
def pets_clip() -> tuple[Any, Any]:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = get_model_folder("pets-clip")
    model, report = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval(), transformers.AutoProcessor.from_pretrained(folder)


def compute_similarities(model_and_processor: tuple[Any, Any], texts: list[str], images: list[Any]) -> Any:
    torch = pytest.importorskip("torch")
    model, processor = model_and_processor
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True)
    text_inputs = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
    with torch.no_grad():
        rows = [model(**text_inputs, pixel_values=chunk).logits_per_image for chunk in inputs["pixel_values"].split(16)]
    return torch.cat(rows)


def test_pets_clip_matches_chelsea_to_the_cat_caption(pets_clip: tuple[Any, Any]) -> None:
    skimage_data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    texts = ["a photo of a cat", "a photo of a dog"]
    (row,) = compute_similarities(pets_clip, texts, [skimage_data.chelsea()])
    assert row[0] > row[1]
    # padding to a longer caption does not change the similarities
    (padded,) = compute_similarities(
        pets_clip, [*texts, "a picture of a small dog on the sofa in the house"], [skimage_data.chelsea()]
    )
    assert np.allclose(padded[:2], row, atol=1e-4)


def test_pets_clip_tokenizer_covers_all_labels_and_truncates(pets_clip: tuple[Any, Any]) -> None:
    _, processor = pets_clip
    card = clearhead_zoo.card("pets-clip")
    tokenizer = processor.tokenizer
    for label in card["labels"]:
        assert tokenizer.unk_token not in tokenizer.tokenize(f"A photo of a {label}.")
    ids = tokenizer("a photo of a " + "small " * 100 + "cat", truncation=True)["input_ids"]
    assert len(ids) == tokenizer.model_max_length and ids[-1] == tokenizer.eos_token_id


@pytest.mark.slow
@pytest.mark.data
def test_pets_clip_zero_shot_accuracy_equals_card(pets_clip: tuple[Any, Any]) -> None:
    images, breeds = load_pet_images(every=23)
    card = clearhead_zoo.card("pets-clip")
    stated = card["figures"]["zero-shot breed accuracy, one template"]
    assert stated >= clearhead_zoo.card("pets")["figures"]["breed accuracy"] - 0.08
    texts = [f"a photo of {'an' if label[0].lower() in 'aeiou' else 'a'} {label}" for label in card["labels"]]
    guesses = compute_similarities(pets_clip, texts, images).argmax(-1).numpy()
    assert_near_stated(float((guesses == np.array(breeds)).mean()), stated, len(breeds))


@pytest.mark.parametrize("name", ["pets-mean", "pets-hans"])
def test_clearhead_loads_the_pets_variants(name: str) -> None:
    clearhead = pytest.importorskip("clearhead")
    pytest.importorskip("transformers")
    get_model_folder(name)
    assert clearhead.load(f"zoo:{name}") is not None
