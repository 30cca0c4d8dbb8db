"""Pictures: what stands before the patches, which rows are read, and a grid that comes from the model."""

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
PICTURE = inputs("vit/image")[0]


def noise(high: int, wide: int, count: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"pixel_values": torch.randn(count, 3, high, wide, generator=generator, dtype=torch.float64)}


@pytest.mark.parametrize("name", IMAGE)
def test_special_tokens_and_read_out(name: str) -> None:
    before, readout = READOUTS[name]
    method = "input-x-gradient" if readout is None else "generic"
    e = clearhead.load(*image_model(name)).explain(PICTURE, method)
    size = 8 if name == "swin" else 4
    assert e.units.grid == (size, size) and e.tokens[: len(before)] == before and len(e) == len(before) + size**2
    assert e.units.special == (True,) * len(before) + (False,) * size**2
    assert e.certificate["readout"] == readout and e.certificate["readout_checked"] == (readout is not None)
    assert e.image is not None and e.image.shape == (16, 16, 3) and e.heat_map().shape == (size, size)


@pytest.mark.parametrize("name", IMAGE)
@pytest.mark.parametrize("by", ["configuration", "interpolation"])
def test_pictures_that_are_not_square(name: str, by: str) -> None:
    settings = {"image_size": (16, 24)} if by == "configuration" else {}
    if by == "configuration" and name.startswith("dinov2"):
        with pytest.raises(UnsupportedError, match="keep it square"):
            clearhead.load(*image_model(name, **settings))
        return
    model, processor = image_model(name, **settings)
    ex = clearhead.load(model, processor)
    e = ex.explain(noise(16, 24), "input-x-gradient")
    rows, columns = (8, 12) if name == "swin" else (4, 6)
    assert e.units.grid == (rows, columns) and len(e) == len(READOUTS[name][0]) + rows * columns
    assert e.image is not None and e.image.shape == (16, 24, 3)
    if name != "swin":
        assert ex.explain(noise(16, 24), "generic").certificate["readout_checked"]
        assert len(ex.explain(noise(24, 16), "generic")) == len(e) if by == "interpolation" else True
    # The scores lie where the pixels are: a patch without light has no share in input times gradient.
    dark = noise(16, 24)
    dark["pixel_values"][:, :, : 16 // rows, -24 // columns :] = 0
    scores = ex.explain(dark, "input-x-gradient").heat_map()
    assert scores[0, -1] == 0 and (np.delete(scores.flatten(), columns - 1) != 0).all()


def test_a_picture_of_another_shape_with_as_many_patches() -> None:
    ex = clearhead.load(*image_model("vit"))
    wide = ex.explain(noise(8, 32), "generic")
    assert wide.units.grid == (2, 8) and wide.certificate["readout_checked"]


def test_pixels_beyond_the_last_patch_are_not_part_of_the_picture() -> None:
    e = clearhead.load(*image_model("vit")).explain(noise(18, 17), "input-x-gradient")
    assert e.units.grid == (4, 4) and e.image is not None and e.image.shape == (16, 16, 3)
    with pytest.raises(InputError, match="does not fall into patches"):
        clearhead.load(*image_model("swin")).explain(noise(17, 16), "input-x-gradient")


def test_pictures_of_several_sizes_in_one_list() -> None:
    ex = clearhead.load(*image_model("vit"))
    es = ex.explain([noise(16, 16, 2), noise(16, 24), PICTURE], "generic")
    assert [e.units.grid for e in es] == [(4, 4), (4, 4), (4, 6), (4, 4)]
    assert es[2].scores == pytest.approx(ex.explain(noise(16, 24)).scores, abs=1e-6)


@pytest.mark.parametrize("name", ["beit", "deit-distilled"])
def test_the_classifier_may_read_otherwise(name: str) -> None:
    if name == "beit":
        model, processor = image_model("beit", use_mean_pooling=False)
        assert clearhead.load(model, processor).explain(PICTURE).certificate["readout"] == "first"
    model, processor = image_model(name)
    for wrong in ("first", "mean"):
        with pytest.raises(UnsupportedError, match="say which is right"):
            clearhead.load(model, processor, readout=wrong).explain(PICTURE)


@pytest.mark.parametrize(
    ("cls", "config", "before", "readout"),
    [
        ("ViTMSNForImageClassification", "ViTMSNConfig", 1, "first"),
        ("IJepaForImageClassification", "IJepaConfig", 0, "patches"),
    ],
)
def test_architectures_without_an_entry_of_their_own(cls: str, config: str, before: int, readout: str) -> None:
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    made = getattr(transformers, config)(**settings, image_size=16, patch_size=4, num_labels=3)
    e = clearhead.load(getattr(transformers, cls)(made).double().eval()).explain(noise(16, 16))
    assert len(e) == before + 16 and e.certificate["readout"] == readout and e.certificate["readout_checked"]


def test_models_that_are_no_pictures_of_patches() -> None:
    resnet = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="ResNetForImageClassification"):
        clearhead.load(resnet).explain(noise(16, 16))
    convnext = transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, image_size=16, num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="without attention"):
        clearhead.load(convnext.double()).explain(noise(16, 16))
    gpt = transformers.ImageGPTForImageClassification(
        transformers.ImageGPTConfig(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=9, num_labels=3)
    )
    with pytest.raises(UnsupportedError, match="takes input_ids"):
        clearhead.load(gpt)


# --- ViT-MAE


def masked_autoencoder(cls: str = "ViTMAEModel") -> Any:
    torch.manual_seed(7)
    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    decoder = {f"decoder_{name}": value for name, value in settings.items()}
    config = transformers.ViTMAEConfig(**settings, **decoder, image_size=16, patch_size=4, initializer_range=0.3)
    return getattr(transformers, cls)(config).double().eval()


def pinned(count: int = 1) -> dict[str, torch.Tensor]:
    return {**noise(16, 16, count), "noise": torch.linspace(0, 1, 16, dtype=torch.float64).repeat(count, 1)}


def class_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[:, 0, 3]


def test_masked_autoencoders_are_refused_while_they_are_random() -> None:
    model = masked_autoencoder()
    with pytest.raises(UnsupportedError, match="at random"):
        clearhead.load(model).explain(pinned(), target=class_token)
    model.config.mask_ratio = 0.0
    shuffled = {**pinned(), "noise": torch.rand(1, 16)}
    for raw in (noise(16, 16), shuffled):
        with pytest.raises(UnsupportedError, match="increasing noise"):
            clearhead.load(model).explain(raw, target=class_token)
    with pytest.raises(InputError, match="has no classes"):
        clearhead.load(model).explain(pinned())
    with pytest.raises(UnsupportedError, match=r"load\(model.vit\)"):
        clearhead.load(masked_autoencoder("ViTMAEForPreTraining"))


def test_a_pinned_masked_autoencoder_is_explained() -> None:
    model = masked_autoencoder()
    model.config.mask_ratio = 0.0
    ex = clearhead.load(model)
    es = ex.explain(pinned(2), ["generic", "input-x-gradient"], target=class_token)
    again = ex.explain(pinned(2), ["generic", "input-x-gradient"], target=class_token)
    for method, both in es.items():
        for one, other in zip(both, again[method], strict=True):
            assert one.scores == pytest.approx(other.scores) and np.abs(one.scores).max() > 0
            assert one.units.grid == (4, 4) and one.tokens[0] == "[CLS]"
    # Patches keep their places: a dark patch has no share.
    dark = pinned()
    dark["pixel_values"][:, :, :4, 4:8] = 0
    scores = ex.explain(dark, "input-x-gradient", target=class_token).heat_map()
    assert scores[0, 1] == 0 and (scores != 0).sum() == 15
    by_patches = clearhead.load(model, readout="patches").explain(
        pinned(), target=lambda o: o.last_hidden_state[:, 1:, 3].mean(1)
    )
    assert by_patches.certificate["readout"] == "patches"
    assert any(line.applies for line in ex.methods())


# --- what a picture may be given as


def test_paths_arrays_and_pictures_are_the_same(tmp_path: Path) -> None:
    ex = clearhead.load(*image_model("vit"))
    path = tmp_path / "picture.png"
    Image.fromarray(PICTURE).save(path)
    expected = ex.explain(PICTURE).scores
    for raw in (path, str(path), Image.fromarray(PICTURE), Image.fromarray(PICTURE).convert("RGBA")):
        assert ex.explain(raw).scores == pytest.approx(expected)
    assert ex.explain(image=path).scores == pytest.approx(expected)
    assert ex.explain(PICTURE[..., 0]).units.grid == (4, 4)  # grey


def test_a_picture_is_turned_as_its_camera_says_however_it_comes(tmp_path: Path) -> None:
    path, picture = tmp_path / "turned.jpg", Image.fromarray(PICTURE)
    flags = Image.Exif()
    flags[0x0112] = 6
    picture.save(path, exif=flags, quality=100)
    ex = clearhead.load(*image_model("vit"))
    by_path, by_picture, flat = (ex.explain(raw).scores for raw in (path, Image.open(path), Image.open(path).copy()))
    assert by_picture.tolist() == by_path.tolist() == flat.tolist()
    assert by_path.tolist() != ex.explain(np.asarray(Image.open(path))).scores.tolist()


@pytest.mark.parametrize("kind", ["gif", "tiff", "webp", "png"])
def test_one_frame_of_several_is_said(kind: str, tmp_path: Path) -> None:
    ex, file = clearhead.load(image_model("vit")), tmp_path / f"many.{kind}"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as opened:
        for raw, name in ((file, str(file)), (opened, "the picture")):
            with pytest.warns(ClearheadWarning, match="has 3 frames, and the first alone is explained") as said:
                ex.explain(raw, ["generic", "occlusion"])
            assert len(said) == 1 and name in str(said[0].message)


@pytest.mark.parametrize("ending", ["gif", "tiff"])
@pytest.mark.filterwarnings("ignore")
def test_what_was_drawn_on_a_picture_stays_there(ending: str, tmp_path: Path) -> None:
    """Who counts the frames of an open picture goes on in its file, and comes back to what is there."""
    ex, file = clearhead.load(image_model("vit")), tmp_path / f"many.{ending}"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as opened:
        opened.paste(shades[2].convert(opened.mode).getpixel((0, 0)), (0, 0, 16, 16))
        first, second = (ex.explain(opened).image for _ in range(2))
        assert opened.tell() == 0 and (first == second).all()


def test_a_frame_that_was_sought_out_needs_no_words(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    ex, file = clearhead.load(image_model("vit")), tmp_path / "many.gif"
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(file, save_all=True, append_images=shades[1:])
    with Image.open(file) as sought:
        sought.seek(2)
        assert (ex.explain(sought).image == shades[2].getpixel((0, 0))).all()
    shades[0].save(tmp_path / "camera.jpg", "MPO", save_all=True, append_images=shades[1:])  # with previews beside it
    ex.explain(tmp_path / "camera.jpg")
    assert not [one for one in recwarn if issubclass(one.category, ClearheadWarning)]


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_is_damaged_beyond_its_first_frame_opens_as_before(tmp_path: Path) -> None:
    shades = [Image.new("RGB", (16, 16), (60 * i, 90, 120)) for i in range(3)]
    shades[0].save(tmp_path / "many.gif", save_all=True, append_images=shades[1:])
    whole = (tmp_path / "many.gif").read_bytes()
    with Image.open(tmp_path / "many.gif") as picture:
        picture.seek(1)
        second = picture.fp.tell()
    for length in range(second, len(whole)):
        (tmp_path / "cut.gif").write_bytes(whole[:length])
        assert open_image(tmp_path / "cut.gif").getpixel((0, 0)) == shades[0].getpixel((0, 0))


def test_the_picture_is_shown_as_the_model_saw_it() -> None:
    model, processor = image_model("vit")
    flat = np.full((20, 20, 3), (10, 120, 250), dtype=np.uint8)
    e = clearhead.load(model, processor).explain(flat)
    assert e.image is not None and np.abs(e.image.astype(int) - flat[:16, :16]).max() <= 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("nowhere.jpg", "there is no picture 'nowhere.jpg'"),
        (7, "expected a picture"),
        (np.zeros((4, 4, 3)), "must be uint8"),
        (np.zeros((4, 4, 7), dtype=np.uint8), "must be uint8, height × width × 3"),
        (np.zeros((0, 4, 3), dtype=np.uint8), "must be uint8"),
        (Image.fromarray(np.full((4, 4), 257 * 100, dtype=np.uint16)), "numbers larger than 255 .mode I;16"),
        (Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)), "numbers of any size .mode F"),
        ({}, "need pixel_values"),
        ({"pixel_values": torch.zeros(3, 16, 16)}, "batch × channel"),
        ({"pixel_values": torch.zeros(1, 1, 16, 16)}, "3 channels"),
        ({"pixel_values": torch.zeros(1, 3, 16, 16, dtype=torch.uint8)}, "real numbers"),
        ({"pixel_values": torch.zeros(1, 3, 3, 16)}, "does not fall into patches"),
        ({"pixel_values": torch.zeros(1, 3, 16, 16), "input_ids": torch.zeros(1, 3)}, "takes no input_ids"),
    ],
)
def test_what_is_no_picture(raw: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        clearhead.load(*image_model("vit")).explain(raw)


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "picture.jpg").write_text("hello")
    with pytest.raises(InputError, match="is not a picture that can be opened"):
        clearhead.load(*image_model("vit")).explain(tmp_path / "picture.jpg")
    with pytest.raises(InputError, match="without an image processor"):
        clearhead.load(image_model("vit")[0]).explain(PICTURE)
    with pytest.raises(InputError, match="tokens="):
        clearhead.load(*image_model("vit")).explain(PICTURE, tokens=["a"])
