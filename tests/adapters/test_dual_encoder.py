"""Dual encoders: CLIP against its explainers' published numbers, CLIP and SigLIP against a slow twin, the laws for
every family, where each tower is read, what a pair is held against, and the scale of a similarity."""

import copy
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import clearhead
from clearhead import Contrast, InputError, UnsupportedError
from clearhead.adapters.base import InputOptions, NamedInputs
from tests import dual_models, models
from tests.dual_models import NAMES, TEXTS
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified, assert_alike, gap, with_few
from tests.replicas import dual_encoder as replica

DATA = Path(__file__).parents[1] / "data" / "parity" / "clip"
ORIGINALS = Path(__file__).parents[3] / "shared" / "fixtures" / "clip"
FAMILIES = pytest.mark.parametrize("name", NAMES)
CASES = pytest.mark.parametrize("case", ["case0", "case1"])
PICTURES = dual_models.pictures()
#: These towers' softmax is float32's even in a float64 model.
WITHIN = 1e-6


def applying(ex: clearhead.Explainer) -> list[str]:
    return [line.name for line in ex.methods() if line.applies]


def assert_same(one: Any, other: Any) -> None:
    """Two joint explanations are the same up to rounding, stream by stream."""
    assert one.streams == other.streams
    for stream in one.streams:
        assert_close(one[stream], other[stream])


def assert_close(one: Any, other: Any) -> None:
    within = amplified(other.provenance["method"], 10 * WITHIN)
    assert_alike(one, other, within, float(np.abs(other.scores).max()))


# -- as published


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(DATA / "arrays.npz") as file:
        return {key.removeprefix("clip/cases_softmax32/"): file[key] for key in file.files}


@cache
def published() -> clearhead.Explainer:
    config = transformers.CLIPConfig.from_pretrained(DATA)
    weights = load_file(DATA / "weights.safetensors")
    made = transformers.CLIPModel.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float64)
    return clearhead.load(made.eval())


def pairs(case: str) -> dict[str, torch.Tensor]:
    """Each text beside the picture: theirs is repeated, and the diagonal explained."""
    ids, pixels = (torch.as_tensor(arrays()[f"{case}/{name}"]) for name in ("input_ids", "pixel_values"))
    return {"input_ids": ids, "pixel_values": pixels.repeat(len(ids), 1, 1, 1)}


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def test_copies_are_the_originals() -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are here")
    for name in ("config.json", "weights.safetensors"):
        assert (DATA / name).read_bytes() == (ORIGINALS / name).read_bytes()
    with np.load(ORIGINALS / "cases_softmax32.npz") as originals:
        for key, copied in arrays().items():
            np.testing.assert_array_equal(copied, originals[key], err_msg=key)


@CASES
@pytest.mark.parametrize(("start", "layers"), [(-1, None), (0, (0, None)), (1, (1, None))])
def test_generic_as_its_authors_explain_clip(case: str, start: int, layers: Any) -> None:
    for i, e in enumerate(listed(published().explain(pairs(case), profile="mm_clip", layers=layers))):
        image, text = (arrays()[f"{case}/chefer/interpret_start{start}/{stream}"][i] for stream in ("image", "text"))
        assert np.isnan(e["image"].scores[0]) and gap(e["image"].scores[1:], image) < WITHIN
        end = int(arrays()[f"{case}/input_ids"][i].argmax())
        row = text[end, 1:end]
        assert len(e["text"]) == end + 1 and np.isnan(e["text"].scores[[0, end]]).all()
        assert gap(e["text"].scores[1:end], row / row.sum()) < WITHIN
        assert e.target["scale"] == "logit" and e.provenance["profile"] == "mm_clip"
        assert e.target["value"] == pytest.approx(arrays()[f"{case}/logits_per_image"][0, i])


@CASES
def test_attention_and_rollout_of_the_picture(case: str) -> None:
    found = published().explain(pairs(case), ["attention", "rollout"])
    for method, theirs in (("attention", "generate_raw_attention"), ("rollout", "generate_rollout_start0")):
        ours = listed(found[method])[0]["image"].scores[1:]
        assert gap(ours, arrays()[f"{case}/beyond/{theirs}"][0]) < WITHIN


def test_what_the_profile_does_not_name() -> None:
    with pytest.raises(InputError, match="mm_clip has no settings for rollout"):
        published().explain(pairs("case0"), "rollout", profile="mm_clip")


# -- against a slow twin


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_generic_is_the_slow_twins(name: str) -> None:
    ex = dual_models.explainer(name)
    e = ex.explain(text=TEXTS[0], image=PICTURES[0])
    batch = ex.adapter.collate(ex.adapter.make_samples(NamedInputs(TEXTS[0], PICTURES[0]), InputOptions()))
    cosine, maps = replica.maps_of(ex.adapter.model, dict(batch))
    assert e.target == {"kind": "similarity", "name": TEXTS[0], "scale": "cosine", "value": pytest.approx(cosine)}
    text = replica.relevance(maps["text"])[-1]
    text[-1] -= 1
    assert gap(e["text"].scores, text) < 10 * WITHIN
    if name == "siglip":
        image = replica.pooled_relevance(maps["probe"][0], maps["image"])[0]
    else:
        image = replica.relevance(maps["image"])[0]
        image[0] -= 1
    assert gap(e["image"].scores, image) < 10 * WITHIN


# -- laws


@FAMILIES
def test_batched_is_single_in_any_order(name: str) -> None:
    ex = dual_models.explainer(name)
    methods = applying(ex)
    assert {"generic", "attention", "rollout", "saliency", "input-x-gradient", "attention-gradcam"} <= set(methods)
    few = with_few(methods)
    together = ex.explain(text=TEXTS, image=PICTURES, method=few)
    turned = ex.explain(text=TEXTS[::-1], image=PICTURES[::-1], method=few)
    for i, (text, picture) in enumerate(zip(TEXTS, PICTURES, strict=True)):
        alone = ex.explain(text=text, image=picture, method=few)
        for method in map(str, few):
            assert_same(together[method][i], alone[method])
            assert_same(turned[method][-1 - i], alone[method])
        assert alone["generic"].certificate["capture_error"] < WITHIN
        assert alone["generic"].certificate["readout_checked"]


@pytest.mark.parametrize("name", ["clip", "metaclip_2", "altclip", "chinese_clip", "vision_text"])
def test_padded_is_unpadded(name: str) -> None:
    ex = dual_models.explainer(name)
    processor = dual_models.processor(name)
    pixels = processor.image_processor(PICTURES, return_tensors="pt")["pixel_values"].double()
    words = processor.tokenizer(TEXTS, padding="max_length", max_length=40, return_tensors="pt")
    words = {key: part for key, part in words.items() if ex.adapter.forward_accepts(key)}
    alone = ex.explain(text=TEXTS, image=PICTURES)
    with torch.no_grad():  # the model's own answers have it
        real = ex.adapter.model(**words, pixel_values=pixels)
    cosines = (real.text_embeds * real.image_embeds).sum(-1)
    for e, one, cosine in zip(ex.explain({**words, "pixel_values": pixels}), alone, cosines, strict=True):
        assert e.target["value"] == pytest.approx(float(cosine), abs=1e-6)
        for stream in ("text", "image"):
            assert gap(e[stream].scores, one[stream].scores) < 10 * WITHIN


@FAMILIES
def test_the_model_is_left_as_it_was(name: str) -> None:
    model, processor = dual_models.model(name), dual_models.processor(name)
    before = model_snapshot.of_model(model), model_snapshot.of_processor(processor.tokenizer)
    ex = clearhead.load(model, processor)
    ex.explain(text=TEXTS[0], image=PICTURES[0], method=["generic", "saliency"], target=Contrast(None, "the book"))
    with pytest.raises(InputError):
        ex.explain(text=TEXTS[0], image=PICTURES[0], target="a label")
    assert not model_snapshot.changes(before[0], model_snapshot.of_model(model))
    assert not model_snapshot.changes(before[1], model_snapshot.of_processor(processor.tokenizer))


def test_many_texts_and_many_pictures_are_every_pair() -> None:
    ex = dual_models.explainer("clip")
    grid = list(itertools.product(TEXTS, PICTURES[:2]))
    texts, images = (list(part) for part in zip(*grid, strict=True))
    every = ex.explain(text=texts, image=images)
    with torch.no_grad():
        both = dual_models.processor("clip")(text=TEXTS, images=PICTURES[:2], return_tensors="pt", padding=True)
        both.pop("token_type_ids", None)
        real = ex.adapter.model(**{**both, "pixel_values": both["pixel_values"].double()})
    cosines = (real.text_embeds @ real.image_embeds.T).flatten()
    assert gap([e.target["value"] for e in every], cosines) < WITHIN
    for e, (text, image) in zip(every, grid, strict=True):
        assert_same(e, ex.explain(text=text, image=image))
    row = ex.explain(text=TEXTS, image=PICTURES[0])  # one picture goes with each text
    assert [e.target["value"] for e in row] == pytest.approx([e.target["value"] for e in every[::2]])


# -- where the towers are read


def test_clip_is_read_at_the_end_of_the_text() -> None:
    """What comes after reaches nothing, so it is no unit; two texts that differ there alone are explained alike."""
    ex = dual_models.explainer("clip")
    end = ex.adapter.text_tower.model.config.eos_token_id
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = ex.explain({"input_ids": torch.tensor([[2, 9, 8, end]]), "pixel_values": pixels})
    two = ex.explain({"input_ids": torch.tensor([[2, 9, 8, end, 7, end, 11]]), "pixel_values": pixels})
    assert two["text"].tokens[-1] == "[SEP]" and len(two["text"]) == 4
    assert_same(two, one)
    with pytest.raises(InputError, match="no end-of-text token"):
        ex.explain({"input_ids": torch.tensor([[2, 9, 8]]), "pixel_values": pixels})


def test_old_files_of_clip_are_read_at_the_highest_number() -> None:
    model = dual_models.model("clip", text={"eos_token_id": 2})
    ex = clearhead.load(model)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[2, 9, 8, 60, 0, 0], [2, 60, 0, 0, 0, 0]])
    both = ex.explain({"input_ids": ids, "pixel_values": pixels})
    assert [len(e["text"]) for e in both] == [4, 2] and both[0].certificate["readout_checked"]
    with torch.no_grad():
        real = model(input_ids=ids, pixel_values=pixels)
    assert gap([e.target["value"] for e in both], (real.text_embeds * real.image_embeds).sum(-1)) < WITHIN


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
def test_siglip_reads_texts_of_one_length(name: str) -> None:
    ex = dual_models.explainer(name)
    e = ex.explain(text=TEXTS[0], image=PICTURES[0])
    assert len(e["text"]) == 24 and e["text"].tokens[-1] == "<pad>" and e["text"].units.special[-1]
    assert e.streams == ("text", "image") and e.certificate["readout"] == "last position; probe"
    processor = dual_models.processor(name)
    words = processor.tokenizer(TEXTS[0], padding="max_length", max_length=24, return_tensors="pt")
    pixels = processor.image_processor(PICTURES[0], return_tensors="pt")
    pixels = {**pixels, "pixel_values": pixels["pixel_values"].double()}
    words.pop("token_type_ids", None)
    with torch.no_grad():
        real = ex.adapter.model(**words, **pixels)
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)
    assert_same(ex.explain({**words, **pixels}), e)
    short = [{"input_ids": torch.tensor([[5, 6, 7][:count]]), **pixels} for count in (2, 3)]
    assert len(ex.explain(short[0])["text"]) == 2  # given numbers stay as they are
    with pytest.raises(InputError, match=r"equally long, not \[2, 3\]"):
        ex.explain(short)


def test_siglip_sees_its_padding_where_its_tokenizer_masks_none() -> None:
    """As the published tokenizers do."""
    processor = dual_models.processor("siglip")
    processor.tokenizer = copy.deepcopy(processor.tokenizer)
    processor.tokenizer.model_input_names = ["input_ids"]
    ex = clearhead.load(dual_models.model("siglip"), processor)
    e = ex.explain(text=TEXTS[0], image=PICTURES[0])
    ids = processor.tokenizer(TEXTS[0], padding="max_length", max_length=24, return_tensors="pt")
    pixels = processor.image_processor(PICTURES[0], return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        real = ex.adapter.model(**ids, pixel_values=pixels)
    assert list(ids) == ["input_ids"]
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)
    assert (e["text"].scores[10:] > 0).any(), "padding is looked at"


def test_siglip_2_takes_pictures_of_any_shape() -> None:
    ex = dual_models.explainer("siglip2")
    wide = np.random.default_rng(1).integers(0, 256, (12, 30, 3), dtype=np.uint8)
    made = dual_models.processor("siglip2").image_processor(wide, return_tensors="pt")
    rows, columns = made["spatial_shapes"][0].tolist()
    assert rows < columns and rows * columns < made["pixel_values"].shape[1], "some of it is padding"
    e, square = ex.explain(text=TEXTS[:2], image=[wide, PICTURES[0]])
    assert e["image"].units.grid == (rows, columns) and square["image"].units.grid == (4, 4)
    assert e["image"].image.shape == (rows * 4, columns * 4, 3)
    words = ex.adapter.text_tower.collate(ex.adapter.text_tower.make_samples(TEXTS[0], InputOptions()))
    with torch.no_grad():
        real = ex.adapter.model(**words, **{**made, "pixel_values": made["pixel_values"].double()})
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)


def test_methods_without_a_rule_for_a_query_that_pools_refuse() -> None:
    ex = dual_models.explainer("siglip")
    for method in ("grad-sam", "cat", "attcat"):
        with pytest.raises(UnsupportedError, match="which it has no rule for"):
            ex.explain(text=TEXTS[0], image=PICTURES[0], method=method)
    with pytest.raises(UnsupportedError, match="rows='all' is for streams that look at themselves alone"):
        ex.explain(text=TEXTS[0], image=PICTURES[0], rows="all")
    assert dual_models.explainer("clip").explain(text=TEXTS[0], image=PICTURES[0], rows="all")["image"].matrix.ndim == 2


def test_raw_attention_of_siglip_is_that_of_the_query_that_pools() -> None:
    e = dual_models.explainer("siglip").explain(text=TEXTS[0], image=PICTURES[0], method="attention")
    assert e["image"].scores.sum() == pytest.approx(1) and e["text"].scores.sum() == pytest.approx(1)


def test_a_picture_of_another_size() -> None:
    pixels = torch.randn(1, 3, 16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = {"input_ids": torch.tensor([[2, 9, 8, 3]]), "pixel_values": pixels}
    assert dual_models.explainer("clip").explain(inputs)["image"].units.grid == (4, 6)
    with pytest.raises(InputError, match="takes pictures of 16 × 16 pixels, not 16 × 24"):
        dual_models.explainer("vision_text").explain(inputs)  # which does not pass on that positions be interpolated


# -- the target


@FAMILIES
def test_one_text_against_another(name: str) -> None:
    ex = dual_models.explainer(name)
    given, foil = {"text": TEXTS[0], "image": PICTURES[0]}, "the book is long"
    methods = ["input-x-gradient", "generic"]
    held = ex.explain(**given, method=methods, target=Contrast(None, foil))
    own, other = ex.explain(**given, method=methods), ex.explain(text=foil, image=PICTURES[0], method=methods)
    target = held["generic"].target
    assert "held fixed" in target["note"] and "note" not in own["generic"].target
    assert target["kind"] == "contrast" and target["against"] == foil and target["name"] == f"{TEXTS[0]} − {foil}"
    difference = own["generic"].target["value"] - other["generic"].target["value"]
    assert target["value"] == pytest.approx(difference, abs=1e-6)
    assert held["generic"].prediction["value"] == pytest.approx(own["generic"].target["value"])
    for method in methods:  # the other text is held fixed, so the units of this one say what they said before
        assert gap(held[method]["text"].scores, own[method]["text"].scores) < 10 * WITHIN
    linear = own["input-x-gradient"]["image"].scores - other["input-x-gradient"]["image"].scores
    assert gap(held["input-x-gradient"]["image"].scores, linear) < 100 * WITHIN
    mixed = ex.explain(text=[TEXTS[0], TEXTS[1]], image=PICTURES[:2], target=[Contrast(TEXTS[0], foil), None])
    assert_same(mixed[0], held["generic"])
    assert_same(mixed[1], ex.explain(text=TEXTS[1], image=PICTURES[1]))


def test_the_scale_of_a_similarity() -> None:
    ex = dual_models.explainer("siglip")
    model = ex.adapter.model
    given = {"text": TEXTS[0], "image": PICTURES[0], "method": "input-x-gradient"}
    cosine, logit = ex.explain(**given), ex.explain(**given, scale="logit")
    scale, bias = float(model.logit_scale.detach().exp()), float(model.logit_bias.detach())
    assert cosine.target["scale"] == "cosine" and logit.target["scale"] == "logit"
    assert logit.target["value"] == pytest.approx(scale * cosine.target["value"] + bias)
    assert gap(logit["image"].scores, scale * cosine["image"].scores) < WITHIN
    with pytest.raises(InputError, match=r"unknown scale 'probability'.*cosine, logit"):
        ex.explain(**given, scale="probability")
    with pytest.raises(InputError, match=r"unknown scale 'cosine'.*logit, probability, log-odds"):
        clearhead.load(*models.text_model("bert")).explain("so boring", scale="cosine")


def test_a_function_of_the_output() -> None:
    ex = dual_models.explainer("clip")
    given = {"text": TEXTS, "image": PICTURES}
    own = ex.explain(**given, target=lambda output: output.logits_per_text.diagonal(), batch_size=3)
    for e, same in zip(own, ex.explain(**given, scale="logit", batch_size=3), strict=True):
        assert e.certificate["readout_checked"] and e.prediction == {}
        assert gap(e["image"].scores, same["image"].scores) < WITHIN


def test_the_tape_of_a_contrast() -> None:
    tape = dual_models.explainer("clip").record(
        text=TEXTS[0], image=PICTURES[0], requires="attention_gradient", target=Contrast(None, "the book")
    )
    assert [call.query_stream for call in tape.calls] == ["image"] * 2 + ["text"] * 3
    assert tape.logits.shape == (1, 2) and tape.value == pytest.approx(tape.logits[:, 0] - tape.logits[:, 1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "a dog"}, r"explain\(text=…, image=…\); missing: image="),
        ({"image": PICTURES[0]}, "missing: text="),
        ({"text": ("a dog", "a cat"), "image": PICTURES[0]}, r"Contrast\(None, other\)"),
        ({"text": " ", "image": PICTURES[0]}, "the text is empty"),
        ({"text": "a [SEP] dog", "image": PICTURES[0]}, "an end-of-text token inside the text"),
        ({"text": "a dog", "image": 3}, "expected a picture"),
        ({"text": "a dog", "image": PICTURES[0], "target": 1}, "measures how alike two inputs are"),
        ({"text": "a dog", "image": PICTURES[0], "target": Contrast("a bird", "a cat")}, "leave target= out"),
        ({"text": "a dog", "image": PICTURES[0], "target": Contrast(None, "a dog")}, "with itself explains nothing"),
        ({"text": "a dog", "image": PICTURES[0], "target": Contrast(None, "")}, "hold against is empty"),
        ({"inputs": "a dog"}, "each by name"),
        ({"text": ["a dog", "a cat"], "image": PICTURES[:3]}, "give every pair"),
        ({"text": "a dog", "image": PICTURES[0], "tokens": ["a"]}, "tokens= names the units of model inputs"),
        ({"inputs": {"input_ids": [[2, 9, 3]]}}, "model inputs need pixel_values"),
        ({"inputs": {"pixel_values": torch.zeros(1, 3, 16, 16)}}, "either input_ids or inputs_embeds"),
        (
            {"inputs": {"input_ids": [[2, 9, 3]], "pixel_values": torch.zeros(2, 3, 16, 16)}},
            r"1 texts and 2 inputs of the other kind \(image\)",
        ),
        (
            {"inputs": {"input_ids": [[2, 9, 3]], "pixel_values": torch.zeros(1, 3, 16, 16), "length": [3]}},
            "takes no length",
        ),
    ],
)
def test_bad_input(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as said:
        dual_models.explainer("clip").explain(**given)
    assert "\n" not in str(said.value)


def test_processors_that_are_not_there() -> None:
    model = dual_models.model("clip")
    with pytest.raises(InputError, match="came without a tokenizer"):
        clearhead.load(model).explain(text="a dog", image=PICTURES[0])
    with pytest.raises(InputError, match="came without an image processor"):
        clearhead.load(model, models.tokenizer("wordpiece")).explain(text="a dog", image=PICTURES[0])
    with pytest.raises(InputError, match="leave readout= out"):
        clearhead.load(model, readout="mean")


def test_dual_encoders_that_cannot_be_explained_say_why() -> None:
    text = dual_models.text_config("wordpiece")
    stages = {"depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 0], "image_size": 16}
    vision = {**stages, "patch_size": 4, "hidden_size": 32, "num_attention_heads": 4}
    group = transformers.GroupViTConfig(text_config=text, vision_config=vision)
    with pytest.raises(UnsupportedError, match=r"GroupViTModel cannot be explained: .*hard choices"):
        clearhead.load(transformers.GroupViTModel(group))
    parts = transformers.SwinConfig(embed_dim=16, depths=[1], num_heads=[2]), transformers.BertConfig(**text)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*parts)
    with pytest.raises(UnsupportedError, match="SwinModel is no picture tower whose attention covers the picture"):
        clearhead.load(transformers.VisionTextDualEncoderModel(config))


def test_one_call_from_a_folder(tmp_path: Path) -> None:
    dual_models.model("clip", torch.float32).save_pretrained(tmp_path)
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    settings = json.loads(pictures.to_json_string()) | {"processor_class": "CLIPProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    models.tokenizer("wordpiece").save_pretrained(tmp_path)
    e = clearhead.load(str(tmp_path)).explain(text="So boring!", image=PICTURES[0])
    assert e.streams == ("text", "image") and e["image"].heat_map().shape == (4, 4)
    assert e["text"].words().tokens[1:-1] == ["So", "boring", "!"]
    assert e.target["scale"] == "cosine" and e.prediction["label"] == "similarity"
    e.save(tmp_path / "why.safetensors")
    assert clearhead.load_explanation(tmp_path / "why.safetensors") == e


# -- sounds


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_the_text_beside_a_sound() -> None:
    """CLAP's sounds go through shifted windows: the text is explained, given the sound."""
    sounds = transformers.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=8000,
        max_length_s=1,
        fft_window_size=256,
        hop_length=128,
        truncation="rand_trunc",
    )
    model, tokenizer = dual_models.clap(), models.tokenizer("bytes")
    ex = clearhead.load(model, transformers.ClapProcessor(sounds, tokenizer))
    generator = np.random.default_rng(2)
    heard = [generator.normal(size=6000).astype(np.float32) for _ in TEXTS]
    methods = applying(ex)
    assert "generic" in methods and "attcat" in methods
    few = with_few(methods)
    together = ex.explain(text=TEXTS, audio=heard, method=few)
    for i, (text, sound) in enumerate(zip(TEXTS, heard, strict=True)):
        for method, alone in ex.explain(text=text, audio=sound, method=few).items():
            assert alone.stream == "text" and alone.target["scale"] == "cosine"
            assert_close(together[method][i], alone)
    held = ex.explain(text=TEXTS[0], audio=heard[0], target=Contrast(None, TEXTS[2]), scale="logit")
    made = sounds(heard[0], sampling_rate=8000, return_tensors="pt")
    words = tokenizer([TEXTS[0], TEXTS[2]], padding=True, return_tensors="pt")
    with torch.no_grad():
        real = model(**words, input_features=made["input_features"].double(), is_longer=made["is_longer"])
    assert held.target["value"] == pytest.approx(float(real.logits_per_audio[0] @ torch.tensor([1.0, -1]).double()))
    with pytest.raises(InputError, match="would be taken at random: cut it"):
        ex.explain(text=TEXTS[0], audio=np.zeros(9000, dtype=np.float32))


# -- the picture half alone, as a classifier


@pytest.mark.parametrize(("name", "before"), [("CLIP", 1), ("MetaClip2", 1), ("Siglip", 0)])
def test_the_picture_half_as_a_classifier(name: str, before: int) -> None:
    vision = {**dual_models._VISION, "num_hidden_layers": 3}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=dual_models.text_config("wordpiece"), num_labels=3
    )
    model = dual_models.fresh(getattr(transformers, f"{name}ForImageClassification"), config)
    ex = clearhead.load(model, transformers.ViTImageProcessor(size={"height": 16, "width": 16}))
    methods = applying(ex)
    assert {"generic", "grad-sam", "attcat", "rollout"} <= set(methods)
    together = ex.explain(PICTURES, method=methods)
    for i, picture in enumerate(PICTURES):
        for method, alone in ex.explain(picture, method=methods).items():
            assert_close(together[method][i], alone)
    assert len(alone) == 16 + before and alone.units.grid == (4, 4)
    assert alone.certificate["readout"] == "patches" and together["generic"][0].certificate["readout_checked"]
    pixels = ex.adapter.processor(PICTURES[0], return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        logits = model(pixels).logits[0]
    assert together["generic"][0].target["value"] == pytest.approx(float(logits.max()), abs=1e-6)
