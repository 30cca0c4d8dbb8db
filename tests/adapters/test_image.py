"""Image classifiers: special tokens before the patches, read-out positions, and the patch grid of the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import clearhead
from clearhead import InputError, UnsupportedError
from clearhead.adapters.readers.image import open_image
from clearhead.errors import ClearheadWarning
from tests.models import IMAGE, image_model, inputs

READOUTS = {
    "vit": (["[CLS]"], "first"),
    "deit": (["[CLS]", "[DIST]"], "first"),
    "deit-distilled": (["[CLS]", "[DIST]"], "first two"),
    "dinov2": (["[CLS]"], "first + patches"),
    "dinov2-registers": (["[CLS]", "[REG0]", "[REG1]", "[REG2]", "[REG3]"], "first + patches"),
    "beit": (["[CLS]"], "patches"),
    "swin": ([], None),
}
IMAGE_ARRAY = inputs("vit/image")[0]


def make_pixel_values(height: int, width: int, count: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"pixel_values": torch.randn(count, 3, height, width, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("name", IMAGE)
def test_special_tokens_and_readout_per_architecture(name: str) -> None:
    special_tokens, readout = READOUTS[name]
    method = "input-x-gradient" if readout is None else "generic"
    e = clearhead.load(*image_model(name)).explain(IMAGE_ARRAY, method)
    size = 8 if name == "swin" else 4
    assert (
        e.units.grid == (size, size)
        and e.tokens[: len(special_tokens)] == special_tokens
        and len(e) == len(special_tokens) + size**2
    )
    assert e.units.special == (True,) * len(special_tokens) + (False,) * size**2
    assert e.certificate["readout"] == readout and e.certificate["readout_checked"] == (readout is not None)
    assert e.image is not None and e.image.shape == (16, 16, 3) and e.heat_map().shape == (size, size)


@pytest.mark.parametrize("name", IMAGE)
@pytest.mark.parametrize("by", ["configuration", "interpolation"])
def test_non_square_images_keep_the_patch_grid(name: str, by: str) -> None:
    settings = {"image_size": (16, 24)} if by == "configuration" else {}
    if by == "configuration" and name.startswith("dinov2"):
        with pytest.raises(UnsupportedError, match="set a square image_size"):
            clearhead.load(*image_model(name, **settings))
        return
    model, processor = image_model(name, **settings)
    ex = clearhead.load(model, processor)
    e = ex.explain(make_pixel_values(16, 24), "input-x-gradient")
    rows, columns = (8, 12) if name == "swin" else (4, 6)
    assert e.units.grid == (rows, columns) and len(e) == len(READOUTS[name][0]) + rows * columns
    assert e.image is not None and e.image.shape == (16, 24, 3)
    if name != "swin":
        assert ex.explain(make_pixel_values(16, 24), "generic").certificate["readout_checked"]
        assert len(ex.explain(make_pixel_values(24, 16), "generic")) == len(e) if by == "interpolation" else True
    # Scores are at the place of the pixels: input times gradient is zero for a black patch.
    black = make_pixel_values(16, 24)
    black["pixel_values"][:, :, : 16 // rows, -24 // columns :] = 0
    scores = ex.explain(black, "input-x-gradient").heat_map()
    assert scores[0, -1] == 0 and (np.delete(scores.flatten(), columns - 1) != 0).all()


def test_other_aspect_ratio_with_same_patch_count_is_supported() -> None:
    ex = clearhead.load(*image_model("vit"))
    e = ex.explain(make_pixel_values(8, 32), "generic")
    assert e.units.grid == (2, 8) and e.certificate["readout_checked"]


def test_pixels_beyond_the_last_patch_are_cropped() -> None:
    e = clearhead.load(*image_model("vit")).explain(make_pixel_values(18, 17), "input-x-gradient")
    assert e.units.grid == (4, 4) and e.image is not None and e.image.shape == (16, 16, 3)
    with pytest.raises(InputError, match="cannot be divided into patches"):
        clearhead.load(*image_model("swin")).explain(make_pixel_values(17, 16), "input-x-gradient")


def test_list_of_images_of_different_sizes_equals_single_images() -> None:
    ex = clearhead.load(*image_model("vit"))
    es = ex.explain([make_pixel_values(16, 16, 2), make_pixel_values(16, 24), IMAGE_ARRAY], "generic")
    assert [e.units.grid for e in es] == [(4, 4), (4, 4), (4, 6), (4, 4)]
    assert es[2].scores == pytest.approx(ex.explain(make_pixel_values(16, 24), method="generic").scores, abs=1e-6)


@pytest.mark.parametrize("name", ["beit", "deit-distilled"])
def test_readout_follows_the_classifier_and_wrong_readout_raises(name: str) -> None:
    if name == "beit":
        model, processor = image_model("beit", use_mean_pooling=False)
        assert clearhead.load(model, processor).explain(IMAGE_ARRAY, method="generic").certificate["readout"] == "first"
    model, processor = image_model(name)
    for wrong in ("first", "mean"):
        with pytest.raises(UnsupportedError, match="choose the correct read-out"):
            clearhead.load(model, processor, readout=wrong).explain(IMAGE_ARRAY, method="generic")


@pytest.mark.parametrize(
    ("cls", "config", "special_tokens", "readout"),
    [
        ("ViTMSNForImageClassification", "ViTMSNConfig", 1, "first"),
        ("IJepaForImageClassification", "IJepaConfig", 0, "patches"),
    ],
)
def test_unlisted_architectures_infer_special_tokens_and_readout(
    cls: str, config: str, special_tokens: int, readout: str
) -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model_config = getattr(transformers, config)(**settings, image_size=16, patch_size=4, num_labels=3)
    e = clearhead.load(getattr(transformers, cls)(model_config).double().eval()).explain(
        make_pixel_values(16, 16), method="generic"
    )
    assert len(e) == special_tokens + 16 and e.certificate["readout"] == readout and e.certificate["readout_checked"]


def test_image_models_without_patches_raise() -> None:
    resnet = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="ResNetForImageClassification"):
        clearhead.load(resnet).explain(make_pixel_values(16, 16), method="generic")
    convnext = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, image_size=16, num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="without attention"):
        clearhead.load(convnext.double()).explain(make_pixel_values(16, 16), method="generic")
    gpt = transformers.ImageGPTForImageClassification(
        transformers.ImageGPTConfig(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=9, num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="takes input_ids"):
        clearhead.load(gpt)


# --- ViT-MAE


def make_masked_autoencoder(cls: str = "ViTMAEModel") -> Any:
    torch.manual_seed(7)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    decoder = {f"decoder_{name}": value for name, value in settings.items()}
    config = transformers.ViTMAEConfig(**settings, **decoder, image_size=16, patch_size=4, initializer_range=0.3)
    return getattr(transformers, cls)(config).double().eval()


def make_ordered_inputs(count: int = 1) -> dict[str, torch.Tensor]:
    return {**make_pixel_values(16, 16, count), "noise": torch.linspace(0, 1, 16, dtype=torch.float64).repeat(count, 1)}


def get_class_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[:, 0, 3]


def test_masked_autoencoder_with_random_masking_raises() -> None:
    model = make_masked_autoencoder()
    with pytest.raises(UnsupportedError, match="at random"):
        clearhead.load(model).explain(make_ordered_inputs(), target=get_class_token, method="generic")
    model.config.mask_ratio = 0.0
    shuffled = {**make_ordered_inputs(), "noise": torch.rand(1, 16)}
    for raw in (make_pixel_values(16, 16), shuffled):
        with pytest.raises(UnsupportedError, match="increasing noise"):
            clearhead.load(model).explain(raw, target=get_class_token, method="generic")
    with pytest.raises(InputError, match="has no classes"):
        clearhead.load(model).explain(make_ordered_inputs(), method="generic")
    with pytest.raises(UnsupportedError, match=r"load\(model.vit\)"):
        clearhead.load(make_masked_autoencoder("ViTMAEForPreTraining"))


def test_masked_autoencoder_with_fixed_order_is_deterministic() -> None:
    model = make_masked_autoencoder()
    model.config.mask_ratio = 0.0
    ex = clearhead.load(model)
    es = ex.explain(make_ordered_inputs(2), ["generic", "input-x-gradient"], target=get_class_token)
    again = ex.explain(make_ordered_inputs(2), ["generic", "input-x-gradient"], target=get_class_token)
    for method, both in es.items():
        for first, second in zip(both, again[method], strict=True):
            assert first.scores == pytest.approx(second.scores) and np.abs(first.scores).max() > 0
            assert first.units.grid == (4, 4) and first.tokens[0] == "[CLS]"
    # Patches keep their positions: a black patch has no score.
    black = make_ordered_inputs()
    black["pixel_values"][:, :, :4, 4:8] = 0
    scores = ex.explain(black, "input-x-gradient", target=get_class_token).heat_map()
    assert scores[0, 1] == 0 and (scores != 0).sum() == 15
    by_patches = clearhead.load(model, readout="patches").explain(
        make_ordered_inputs(), target=lambda o: o.last_hidden_state[:, 1:, 3].mean(1), method="generic"
    )
    assert by_patches.certificate["readout"] == "patches"
    assert any(line.applies for line in ex.methods())


# --- forms of image input


def test_paths_arrays_and_pil_images_are_equal(tmp_path: Path) -> None:
    ex = clearhead.load(*image_model("vit"))
    path = tmp_path / "image.png"
    Image.fromarray(IMAGE_ARRAY).save(path)
    expected = ex.explain(IMAGE_ARRAY, method="generic").scores
    for raw in (path, str(path), Image.fromarray(IMAGE_ARRAY), Image.fromarray(IMAGE_ARRAY).convert("RGBA")):
        assert ex.explain(raw, method="generic").scores == pytest.approx(expected)
    assert ex.explain(image=path, method="generic").scores == pytest.approx(expected)
    assert ex.explain(IMAGE_ARRAY[..., 0], method="generic").units.grid == (4, 4)  # grey


def test_exif_orientation_is_applied_to_paths_and_pil_images(tmp_path: Path) -> None:
    path, image = tmp_path / "turned.jpg", Image.fromarray(IMAGE_ARRAY)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path, exif=exif, quality=100)
    ex = clearhead.load(*image_model("vit"))
    by_path, by_image, by_copy = (
        ex.explain(raw, method="generic").scores for raw in (path, Image.open(path), Image.open(path).copy())
    )
    assert by_image.tolist() == by_path.tolist() == by_copy.tolist()
    assert by_path.tolist() != ex.explain(np.asarray(Image.open(path)), method="generic").scores.tolist()


@pytest.mark.parametrize("kind", ["gif", "tiff", "webp", "png"])
def test_multi_frame_image_warns_once(kind: str, tmp_path: Path) -> None:
    ex, file = clearhead.load(image_model("vit")), tmp_path / f"many.{kind}"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as opened:
        for raw, name in ((file, str(file)), (opened, "the image")):
            with pytest.warns(ClearheadWarning, match="has 3 frames, and only the first is explained") as warnings:
                ex.explain(raw, ["generic", "occlusion"])
            assert len(warnings) == 1 and name in str(warnings[0].message)


@pytest.mark.parametrize("ending", ["gif", "tiff"])
@pytest.mark.filterwarnings("ignore")
def test_edits_to_an_open_pil_image_are_kept(ending: str, tmp_path: Path) -> None:
    """Counting the frames of an open image seeks in its file, which must not discard edits."""
    ex, file = clearhead.load(image_model("vit")), tmp_path / f"many.{ending}"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as image:
        image.paste(shades[2].convert(image.mode).getpixel((0, 0)), (0, 0, 16, 16))
        first, second = (ex.explain(image, method="generic").image for _ in range(2))
        assert image.tell() == 0 and (first == second).all()


def test_selected_frame_does_not_warn(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ex, file = clearhead.load(image_model("vit")), tmp_path / "many.gif"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as image:
        image.seek(2)
        assert (ex.explain(image, method="generic").image == shades[2].getpixel((0, 0))).all()
    shades[0].save(
        tmp_path / "camera.jpg", "MPO", save_all=True, append_images=shades[1:]
    )  # MPO: a photo with previews
    ex.explain(tmp_path / "camera.jpg", method="generic")
    assert not [warning for warning in recwarn if issubclass(warning.category, ClearheadWarning)]


@pytest.mark.filterwarnings("ignore")
def test_file_damaged_after_first_frame_opens(tmp_path: Path) -> None:
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(tmp_path / "many.gif", save_all=True, append_images=shades[1:])
    content = (tmp_path / "many.gif").read_bytes()
    with Image.open(tmp_path / "many.gif") as image:
        image.seek(1)
        second_frame = image.fp.tell()
    for length in range(second_frame, len(content)):
        (tmp_path / "cut.gif").write_bytes(content[:length])
        assert open_image(tmp_path / "cut.gif").getpixel((0, 0)) == shades[0].getpixel((0, 0))


def test_explanation_image_equals_model_input() -> None:
    model, processor = image_model("vit")
    flat = np.full((20, 20, 3), (10, 120, 250), dtype=np.uint8)
    e = clearhead.load(model, processor).explain(flat, method="generic")
    assert e.image is not None and np.abs(e.image.astype(int) - flat[:16, :16]).max() <= 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("nowhere.jpg", "there is no image 'nowhere.jpg'"),
        (7, "expected an image"),
        (np.zeros((4, 4, 3)), "must be uint8"),
        (np.zeros((4, 4, 7), dtype=np.uint8), "must be uint8, height × width × 3"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "must be uint8"),
        (Image.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16)), "pixel values larger than 255 .mode I;16"),
        (Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)), "pixel values without a fixed range .mode F"),
        ({}, "must contain pixel_values"),
        ({"pixel_values": torch.zeros(3, 16, 16)}, "batch × channel"),
        ({"pixel_values": torch.zeros(1, 1, 16, 16)}, "3 channels"),
        ({"pixel_values": torch.zeros(1, 3, 16, 16, dtype=torch.uint8)}, "real numbers"),
        ({"pixel_values": torch.zeros(1, 3, 3, 16)}, "cannot be divided into patches"),
        ({"pixel_values": torch.zeros(1, 3, 16, 16), "input_ids": torch.zeros(1, 3)}, "does not take input_ids"),
    ],
)
def test_invalid_images_raise(raw: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clearhead.load(*image_model("vit")).explain(raw, method="generic")


def test_unreadable_file_missing_processor_and_tokens_raise(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_text("hello")
    with pytest.raises(InputError, match="cannot be opened as an image"):
        clearhead.load(*image_model("vit")).explain(tmp_path / "image.jpg", method="generic")
    with pytest.raises(InputError, match="without an image processor"):
        clearhead.load(image_model("vit")[0]).explain(IMAGE_ARRAY, method="generic")
    with pytest.raises(InputError, match="tokens="):
        clearhead.load(*image_model("vit")).explain(IMAGE_ARRAY, tokens=["a"], method="generic")
