"""Dual encoders: CLIP compared with published scores, CLIP and SigLIP compared with a slow replica, the invariants for
every family, read-out positions of the towers, contrasts between texts, and the scales of a similarity."""

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
IMAGES = dual_models.pictures()
#: These towers compute their softmax in float32 even in a float64 model.
TOLERANCE = 1e-6


def list_applicable_methods(ex: clearhead.Explainer) -> list[str]:
    return [line.name for line in ex.methods() if line.applies]


def assert_streams_close(actual: Any, expected: Any) -> None:
    """Assert that two explanations are equal up to rounding in every stream."""
    assert actual.streams == expected.streams
    for stream in actual.streams:
        assert_close(actual[stream], expected[stream])


def assert_close(actual: Any, expected: Any) -> None:
    within = amplified(expected.provenance["method"], 10 * TOLERANCE)
    assert_alike(actual, expected, within, float(np.abs(expected.scores).max()))


# -- compared with the published scores


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(DATA / "arrays.npz") as file:
        return {key.removeprefix("clip/cases_softmax32/"): file[key] for key in file.files}


@cache
def published() -> clearhead.Explainer:
    config = transformers.CLIPConfig.from_pretrained(DATA)
    weights = load_file(DATA / "weights.safetensors")
    model = transformers.CLIPModel.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float64)
    return clearhead.load(model.eval())


def pairs(case: str) -> dict[str, torch.Tensor]:
    """Each text with the image: the authors repeat the image and explain the diagonal of the logits."""
    ids, pixels = (torch.as_tensor(arrays()[f"{case}/{name}"]) for name in ("input_ids", "pixel_values"))
    return {"input_ids": ids, "pixel_values": pixels.repeat(len(ids), 1, 1, 1)}


def listed(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def test_stored_fixtures_equal_the_originals() -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies can be used")
    for name in ("config.json", "weights.safetensors"):
        assert (DATA / name).read_bytes() == (ORIGINALS / name).read_bytes()
    with np.load(ORIGINALS / "cases_softmax32.npz") as originals:
        for key, copied in arrays().items():
            np.testing.assert_array_equal(copied, originals[key], err_msg=key)


@CASES
@pytest.mark.parametrize(("start", "layers"), [(-1, None), (0, (0, None)), (1, (1, None))])
def test_generic_equals_authors_clip_scores(case: str, start: int, layers: Any) -> None:
    for i, e in enumerate(listed(published().explain(pairs(case), profile="mm_clip", layers=layers))):
        image, text = (arrays()[f"{case}/chefer/interpret_start{start}/{stream}"][i] for stream in ("image", "text"))
        assert np.isnan(e["image"].scores[0]) and gap(e["image"].scores[1:], image) < TOLERANCE
        end = int(arrays()[f"{case}/input_ids"][i].argmax())
        row = text[end, 1:end]
        assert len(e["text"]) == end + 1 and np.isnan(e["text"].scores[[0, end]]).all()
        assert gap(e["text"].scores[1:end], row / row.sum()) < TOLERANCE
        assert e.target["scale"] == "logit" and e.provenance["profile"] == "mm_clip"
        assert e.target["value"] == pytest.approx(arrays()[f"{case}/logits_per_image"][0, i])


@CASES
def test_image_attention_and_rollout_equal_authors_scores(case: str) -> None:
    results = published().explain(pairs(case), ["attention", "rollout"])
    for method, theirs in (("attention", "generate_raw_attention"), ("rollout", "generate_rollout_start0")):
        ours = listed(results[method])[0]["image"].scores[1:]
        assert gap(ours, arrays()[f"{case}/beyond/{theirs}"][0]) < TOLERANCE


def test_method_missing_from_profile_raises() -> None:
    with pytest.raises(InputError, match="mm_clip has no settings for rollout"):
        published().explain(pairs("case0"), "rollout", profile="mm_clip")


# -- compared with a slow replica


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_generic_equals_slow_replica(name: str) -> None:
    ex = dual_models.explainer(name)
    e = ex.explain(text=TEXTS[0], image=IMAGES[0], method="generic")
    batch = ex.adapter.collate(ex.adapter.make_samples(NamedInputs(TEXTS[0], IMAGES[0]), InputOptions()))
    cosine, maps = replica.maps_of(ex.adapter.model, dict(batch))
    assert e.target == {"kind": "similarity", "name": TEXTS[0], "scale": "cosine", "value": pytest.approx(cosine)}
    text = replica.relevance(maps["text"])[-1]
    text[-1] -= 1
    assert gap(e["text"].scores, text) < 10 * TOLERANCE
    if name == "siglip":
        image = replica.pooled_relevance(maps["probe"][0], maps["image"])[0]
    else:
        image = replica.relevance(maps["image"])[0]
        image[0] -= 1
    assert gap(e["image"].scores, image) < 10 * TOLERANCE


# -- invariants


@FAMILIES
def test_batch_equals_single_in_any_order(name: str) -> None:
    ex = dual_models.explainer(name)
    methods = list_applicable_methods(ex)
    assert {"generic", "attention", "rollout", "saliency", "input-x-gradient", "attention-gradcam"} <= set(methods)
    few = with_few(methods)
    together = ex.explain(text=TEXTS, image=IMAGES, method=few)
    reversed_order = ex.explain(text=TEXTS[::-1], image=IMAGES[::-1], method=few)
    for i, (text, image) in enumerate(zip(TEXTS, IMAGES, strict=True)):
        alone = ex.explain(text=text, image=image, method=few)
        for method in map(str, few):
            assert_streams_close(together[method][i], alone[method])
            assert_streams_close(reversed_order[method][-1 - i], alone[method])
        assert alone["generic"].certificate["capture_error"] < TOLERANCE
        assert alone["generic"].certificate["readout_checked"]


@pytest.mark.parametrize("name", ["clip", "metaclip_2", "altclip", "chinese_clip", "vision_text"])
def test_padding_does_not_change_scores(name: str) -> None:
    ex = dual_models.explainer(name)
    processor = dual_models.processor(name)
    pixels = processor.image_processor(IMAGES, return_tensors="pt")["pixel_values"].double()
    tokens = processor.tokenizer(TEXTS, padding="max_length", max_length=40, return_tensors="pt")
    tokens = {key: values for key, values in tokens.items() if ex.adapter.forward_accepts(key)}
    alone = ex.explain(text=TEXTS, image=IMAGES, method="generic")
    with torch.no_grad():  # padding does not change the logits of the model
        real = ex.adapter.model(**tokens, pixel_values=pixels)
    cosines = (real.text_embeds * real.image_embeds).sum(-1)
    for e, expected, cosine in zip(
        ex.explain({**tokens, "pixel_values": pixels}, method="generic"), alone, cosines, strict=True
    ):
        assert e.target["value"] == pytest.approx(float(cosine), abs=1e-6)
        for stream in ("text", "image"):
            assert gap(e[stream].scores, expected[stream].scores) < 10 * TOLERANCE


@FAMILIES
def test_model_and_tokenizer_are_unchanged(name: str) -> None:
    model, processor = dual_models.model(name), dual_models.processor(name)
    before = model_snapshot.of_model(model), model_snapshot.of_processor(processor.tokenizer)
    ex = clearhead.load(model, processor)
    ex.explain(text=TEXTS[0], image=IMAGES[0], method=["generic", "saliency"], target=Contrast(None, "the book"))
    with pytest.raises(InputError):
        ex.explain(text=TEXTS[0], image=IMAGES[0], target="a label", method="generic")
    assert not model_snapshot.changes(before[0], model_snapshot.of_model(model))
    assert not model_snapshot.changes(before[1], model_snapshot.of_processor(processor.tokenizer))


def test_all_pairs_of_texts_and_images_equal_single_pairs() -> None:
    ex = dual_models.explainer("clip")
    grid = list(itertools.product(TEXTS, IMAGES[:2]))
    texts, images = (list(part) for part in zip(*grid, strict=True))
    every = ex.explain(text=texts, image=images, method="generic")
    with torch.no_grad():
        both = dual_models.processor("clip")(text=TEXTS, images=IMAGES[:2], return_tensors="pt", padding=True)
        both.pop("token_type_ids", None)
        real = ex.adapter.model(**{**both, "pixel_values": both["pixel_values"].double()})
    cosines = (real.text_embeds @ real.image_embeds.T).flatten()
    assert gap([e.target["value"] for e in every], cosines) < TOLERANCE
    for e, (text, image) in zip(every, grid, strict=True):
        assert_streams_close(e, ex.explain(text=text, image=image, method="generic"))
    row = ex.explain(text=TEXTS, image=IMAGES[0], method="generic")  # one image is paired with each text
    assert [e.target["value"] for e in row] == pytest.approx([e.target["value"] for e in every[::2]])


# -- read-out positions of the towers


def test_clip_ignores_tokens_after_end_of_text() -> None:
    """Later tokens have no effect, so they are no units; texts that differ only there have equal explanations."""
    ex = dual_models.explainer("clip")
    end = ex.adapter.text_tower.model.config.eos_token_id
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    short = ex.explain({"input_ids": torch.tensor([[2, 9, 8, end]]), "pixel_values": pixels}, method="generic")
    long = ex.explain(
        {"input_ids": torch.tensor([[2, 9, 8, end, 7, end, 11]]), "pixel_values": pixels}, method="generic"
    )
    assert long["text"].tokens[-1] == "[SEP]" and len(long["text"]) == 4
    assert_streams_close(long, short)
    with pytest.raises(InputError, match="no end-of-text token"):
        ex.explain({"input_ids": torch.tensor([[2, 9, 8]]), "pixel_values": pixels}, method="generic")


def test_legacy_clip_config_reads_out_at_highest_token_id() -> None:
    model = dual_models.model("clip", text={"eos_token_id": 2})
    ex = clearhead.load(model)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = torch.tensor([[2, 9, 8, 60, 0, 0], [2, 60, 0, 0, 0, 0]])
    both = ex.explain({"input_ids": ids, "pixel_values": pixels}, method="generic")
    assert [len(e["text"]) for e in both] == [4, 2] and both[0].certificate["readout_checked"]
    with torch.no_grad():
        real = model(input_ids=ids, pixel_values=pixels)
    assert gap([e.target["value"] for e in both], (real.text_embeds * real.image_embeds).sum(-1)) < TOLERANCE


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
def test_siglip_texts_are_padded_to_fixed_length(name: str) -> None:
    ex = dual_models.explainer(name)
    e = ex.explain(text=TEXTS[0], image=IMAGES[0], method="generic")
    assert len(e["text"]) == 24 and e["text"].tokens[-1] == "<pad>" and e["text"].units.special[-1]
    assert e.streams == ("text", "image") and e.certificate["readout"] == "last position; probe"
    processor = dual_models.processor(name)
    tokens = processor.tokenizer(TEXTS[0], padding="max_length", max_length=24, return_tensors="pt")
    pixels = processor.image_processor(IMAGES[0], return_tensors="pt")
    pixels = {**pixels, "pixel_values": pixels["pixel_values"].double()}
    tokens.pop("token_type_ids", None)
    with torch.no_grad():
        real = ex.adapter.model(**tokens, **pixels)
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)
    assert_streams_close(ex.explain({**tokens, **pixels}, method="generic"), e)
    short = [{"input_ids": torch.tensor([[5, 6, 7][:count]]), **pixels} for count in (2, 3)]
    assert len(ex.explain(short[0], method="generic")["text"]) == 2  # given token ids are not padded
    with pytest.raises(InputError, match=r"the same length, not \[2, 3\]"):
        ex.explain(short, method="generic")


def test_siglip_attends_to_padding_without_attention_mask() -> None:
    """The published tokenizers return no attention mask."""
    processor = dual_models.processor("siglip")
    processor.tokenizer = copy.deepcopy(processor.tokenizer)
    processor.tokenizer.model_input_names = ["input_ids"]
    ex = clearhead.load(dual_models.model("siglip"), processor)
    e = ex.explain(text=TEXTS[0], image=IMAGES[0], method="generic")
    ids = processor.tokenizer(TEXTS[0], padding="max_length", max_length=24, return_tensors="pt")
    pixels = processor.image_processor(IMAGES[0], return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        real = ex.adapter.model(**ids, pixel_values=pixels)
    assert list(ids) == ["input_ids"]
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)
    assert (e["text"].scores[10:] > 0).any(), "padding must be attended to"


def test_siglip2_supports_non_square_images() -> None:
    ex = dual_models.explainer("siglip2")
    wide = np.random.default_rng(1).integers(0, 256, (12, 30, 3), dtype=np.uint8)
    features = dual_models.processor("siglip2").image_processor(wide, return_tensors="pt")
    rows, columns = features["spatial_shapes"][0].tolist()
    assert rows < columns and rows * columns < features["pixel_values"].shape[1], "some patches must be padding"
    e, square = ex.explain(text=TEXTS[:2], image=[wide, IMAGES[0]], method="generic")
    assert e["image"].units.grid == (rows, columns) and square["image"].units.grid == (4, 4)
    assert e["image"].image.shape == (rows * 4, columns * 4, 3)
    tokens = ex.adapter.text_tower.collate(ex.adapter.text_tower.make_samples(TEXTS[0], InputOptions()))
    with torch.no_grad():
        real = ex.adapter.model(**tokens, **{**features, "pixel_values": features["pixel_values"].double()})
    assert e.target["value"] == pytest.approx(float((real.text_embeds * real.image_embeds).sum()), abs=1e-6)


def test_methods_without_pooling_query_rule_raise() -> None:
    ex = dual_models.explainer("siglip")
    for method in ("grad-sam", "cat", "attcat"):
        with pytest.raises(UnsupportedError, match="for which the method has no rule"):
            ex.explain(text=TEXTS[0], image=IMAGES[0], method=method)
    with pytest.raises(UnsupportedError, match="rows='all' needs streams that attend only to themselves"):
        ex.explain(text=TEXTS[0], image=IMAGES[0], rows="all", method="generic")
    assert (
        dual_models.explainer("clip")
        .explain(text=TEXTS[0], image=IMAGES[0], rows="all", method="generic")["image"]
        .matrix.ndim
        == 2
    )


def test_siglip_attention_scores_sum_to_one() -> None:
    e = dual_models.explainer("siglip").explain(text=TEXTS[0], image=IMAGES[0], method="attention")
    assert e["image"].scores.sum() == pytest.approx(1) and e["text"].scores.sum() == pytest.approx(1)


def test_other_image_size_requires_position_interpolation() -> None:
    pixels = torch.randn(1, 3, 16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = {"input_ids": torch.tensor([[2, 9, 8, 3]]), "pixel_values": pixels}
    assert dual_models.explainer("clip").explain(inputs, method="generic")["image"].units.grid == (4, 6)
    with pytest.raises(InputError, match="takes images of 16 × 16 pixels, not 16 × 24"):
        dual_models.explainer("vision_text").explain(
            inputs, method="generic"
        )  # it does not support interpolated positions


# -- the target


@FAMILIES
def test_contrast_between_texts_equals_similarity_difference(name: str) -> None:
    ex = dual_models.explainer(name)
    pair, foil = {"text": TEXTS[0], "image": IMAGES[0]}, "the book is long"
    methods = ["input-x-gradient", "generic"]
    contrasts = ex.explain(**pair, method=methods, target=Contrast(None, foil))
    similarities, foil_similarities = (
        ex.explain(**pair, method=methods),
        ex.explain(text=foil, image=IMAGES[0], method=methods),
    )
    target = contrasts["generic"].target
    assert "held constant" in target["note"] and "note" not in similarities["generic"].target
    assert target["kind"] == "contrast" and target["against"] == foil and target["name"] == f"{TEXTS[0]} − {foil}"
    difference = similarities["generic"].target["value"] - foil_similarities["generic"].target["value"]
    assert target["value"] == pytest.approx(difference, abs=1e-6)
    assert contrasts["generic"].prediction["value"] == pytest.approx(similarities["generic"].target["value"])
    for method in methods:  # the other text is held fixed, so the scores of this text do not change
        assert gap(contrasts[method]["text"].scores, similarities[method]["text"].scores) < 10 * TOLERANCE
    linear = similarities["input-x-gradient"]["image"].scores - foil_similarities["input-x-gradient"]["image"].scores
    assert gap(contrasts["input-x-gradient"]["image"].scores, linear) < 100 * TOLERANCE
    mixed = ex.explain(
        text=[TEXTS[0], TEXTS[1]], image=IMAGES[:2], target=[Contrast(TEXTS[0], foil), None], method="generic"
    )
    assert_streams_close(mixed[0], contrasts["generic"])
    assert_streams_close(mixed[1], ex.explain(text=TEXTS[1], image=IMAGES[1], method="generic"))


def test_similarity_scales_are_cosine_and_logit() -> None:
    ex = dual_models.explainer("siglip")
    model = ex.adapter.model
    arguments = {"text": TEXTS[0], "image": IMAGES[0], "method": "input-x-gradient"}
    cosine, logit = ex.explain(**arguments), ex.explain(**arguments, scale="logit")
    scale, bias = float(model.logit_scale.detach().exp()), float(model.logit_bias.detach())
    assert cosine.target["scale"] == "cosine" and logit.target["scale"] == "logit"
    assert logit.target["value"] == pytest.approx(scale * cosine.target["value"] + bias)
    assert gap(logit["image"].scores, scale * cosine["image"].scores) < TOLERANCE
    with pytest.raises(InputError, match=r"unknown scale 'probability'.*cosine, logit"):
        ex.explain(**arguments, scale="probability")
    with pytest.raises(InputError, match=r"unknown scale 'cosine'.*logit, probability, log-odds"):
        clearhead.load(*models.text_model("bert")).explain("so boring", scale="cosine", method="generic")


def test_target_function_of_logits_equals_logit_scale() -> None:
    ex = dual_models.explainer("clip")
    arguments = {"text": TEXTS, "image": IMAGES}
    by_function = ex.explain(
        **arguments, target=lambda output: output.logits_per_text.diagonal(), batch_size=3, method="generic"
    )
    for e, by_scale in zip(
        by_function, ex.explain(**arguments, scale="logit", batch_size=3, method="generic"), strict=True
    ):
        assert e.certificate["readout_checked"] and e.prediction == {}
        assert gap(e["image"].scores, by_scale["image"].scores) < TOLERANCE


def test_contrast_tape_has_two_logits() -> None:
    tape = dual_models.explainer("clip").record(
        text=TEXTS[0], image=IMAGES[0], requires="attention_gradient", target=Contrast(None, "the book")
    )
    assert [call.query_stream for call in tape.calls] == ["image"] * 2 + ["text"] * 3
    assert tape.logits.shape == (1, 2) and tape.value == pytest.approx(tape.logits[:, 0] - tape.logits[:, 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": "a dog"}, r"explain\(text=…, image=…\); missing: image="),
        ({"image": IMAGES[0]}, "missing: text="),
        ({"text": ("a dog", "a cat"), "image": IMAGES[0]}, r"Contrast\(None, other\)"),
        ({"text": " ", "image": IMAGES[0]}, "the text is empty"),
        ({"text": "a [SEP] dog", "image": IMAGES[0]}, "contains an end-of-text token"),
        ({"text": "a dog", "image": 3}, "expected an image"),
        ({"text": "a dog", "image": IMAGES[0], "target": 1}, "measures the similarity of two inputs"),
        ({"text": "a dog", "image": IMAGES[0], "target": Contrast("a bird", "a cat")}, "leave out target="),
        (
            {"text": "a dog", "image": IMAGES[0], "target": Contrast(None, "a dog")},
            "cannot contrast .a dog. with itself",
        ),
        ({"text": "a dog", "image": IMAGES[0], "target": Contrast(None, "")}, "contrast with is empty"),
        ({"inputs": "a dog"}, "each passed by name"),
        ({"text": ["a dog", "a cat"], "image": IMAGES[:3]}, "add the missing inputs"),
        ({"text": "a dog", "image": IMAGES[0], "tokens": ["a"]}, "tokens= names the units of model inputs"),
        ({"inputs": {"input_ids": [[2, 9, 3]]}}, "model inputs must contain pixel_values"),
        ({"inputs": {"pixel_values": torch.zeros(1, 3, 16, 16)}}, "either input_ids or inputs_embeds"),
        (
            {"inputs": {"input_ids": [[2, 9, 3]], "pixel_values": torch.zeros(2, 3, 16, 16)}},
            r"1 texts and 2 inputs for image=",
        ),
        (
            {"inputs": {"input_ids": [[2, 9, 3]], "pixel_values": torch.zeros(1, 3, 16, 16), "length": [3]}},
            "does not take length",
        ),
    ],
)
def test_invalid_input_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        dual_models.explainer("clip").explain(**arguments, method="generic")
    assert "\n" not in str(raised.value)


def test_missing_processors_raise() -> None:
    model = dual_models.model("clip")
    with pytest.raises(InputError, match="was loaded without a tokenizer"):
        clearhead.load(model).explain(text="a dog", image=IMAGES[0], method="generic")
    with pytest.raises(InputError, match="was loaded without an image processor"):
        clearhead.load(model, models.tokenizer("wordpiece")).explain(text="a dog", image=IMAGES[0], method="generic")
    with pytest.raises(InputError, match="leave out readout="):
        clearhead.load(model, readout="mean")


def test_unsupported_dual_encoders_raise_with_reason() -> None:
    text = dual_models.text_config("wordpiece")
    stages = {"depths": [1, 1], "num_group_tokens": [4, 0], "num_output_groups": [4, 0], "image_size": 16}
    vision = {**stages, "patch_size": 4, "hidden_size": 32, "num_attention_heads": 4}
    group = transformers.GroupViTConfig(text_config=text, vision_config=vision)
    with pytest.raises(UnsupportedError, match=r"GroupViTModel cannot be explained: .*discrete choices"):
        clearhead.load(transformers.GroupViTModel(group))
    parts = transformers.SwinConfig(embed_dim=16, depths=[1], num_heads=[2]), transformers.BertConfig(**text)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*parts)
    with pytest.raises(UnsupportedError, match="SwinModel attends within windows or on shrinking grids"):
        clearhead.load(transformers.VisionTextDualEncoderModel(config))


def test_load_from_folder_with_processor(tmp_path: Path) -> None:
    dual_models.model("clip", torch.float32).save_pretrained(tmp_path)
    image_processor = transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    settings = json.loads(image_processor.to_json_string()) | {"processor_class": "CLIPProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    models.tokenizer("wordpiece").save_pretrained(tmp_path)
    e = clearhead.load(str(tmp_path)).explain(text="So boring!", image=IMAGES[0], method="generic")
    assert e.streams == ("text", "image") and e["image"].heat_map().shape == (4, 4)
    assert e["text"].words().tokens[1:-1] == ["So", "boring", "!"]
    assert e.target["scale"] == "cosine" and e.prediction["label"] == "similarity"
    e.save(tmp_path / "why.safetensors")
    assert clearhead.load_explanation(tmp_path / "why.safetensors") == e


# -- audio


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_clap_explains_text_given_audio() -> None:
    """The audio tower of CLAP attends in shifted windows: the text is explained, given the audio."""
    extractor = transformers.ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=8000,
        max_length_s=1,
        fft_window_size=256,
        hop_length=128,
        truncation="rand_trunc",
    )
    model, tokenizer = dual_models.clap(), models.tokenizer("bytes")
    ex = clearhead.load(model, transformers.ClapProcessor(extractor, tokenizer))
    generator = np.random.default_rng(2)
    waveforms = [generator.normal(size=6000).astype(np.float32) for _ in TEXTS]
    methods = list_applicable_methods(ex)
    assert "generic" in methods and "attcat" in methods
    few = with_few(methods)
    together = ex.explain(text=TEXTS, audio=waveforms, method=few)
    for i, (text, audio) in enumerate(zip(TEXTS, waveforms, strict=True)):
        for method, alone in ex.explain(text=text, audio=audio, method=few).items():
            assert alone.stream == "text" and alone.target["scale"] == "cosine"
            assert_close(together[method][i], alone)
    contrast = ex.explain(
        text=TEXTS[0], audio=waveforms[0], target=Contrast(None, TEXTS[2]), scale="logit", method="generic"
    )
    features = extractor(waveforms[0], sampling_rate=8000, return_tensors="pt")
    words = tokenizer([TEXTS[0], TEXTS[2]], padding=True, return_tensors="pt")
    with torch.no_grad():
        real = model(**words, input_features=features["input_features"].double(), is_longer=features["is_longer"])
    assert contrast.target["value"] == pytest.approx(float(real.logits_per_audio[0] @ torch.tensor([1.0, -1]).double()))
    with pytest.raises(InputError, match="would crop longer audio at random: shorten it"):
        ex.explain(text=TEXTS[0], audio=np.zeros(9000, dtype=np.float32), method="generic")


# -- the vision tower alone, as a classifier


@pytest.mark.parametrize(("name", "special_tokens"), [("CLIP", 1), ("MetaClip2", 1), ("Siglip", 0)])
def test_vision_tower_classifier_batch_equals_single(name: str, special_tokens: int) -> None:
    vision = {**dual_models._VISION, "num_hidden_layers": 3}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=dual_models.text_config("wordpiece"), num_labels=3
    )
    model = dual_models.build_model(getattr(transformers, f"{name}ForImageClassification"), config)
    ex = clearhead.load(model, transformers.ViTImageProcessor(size={"height": 16, "width": 16}))
    methods = list_applicable_methods(ex)
    assert {"generic", "grad-sam", "attcat", "rollout"} <= set(methods)
    together = ex.explain(IMAGES, method=methods)
    for i, image in enumerate(IMAGES):
        for method, alone in ex.explain(image, method=methods).items():
            assert_close(together[method][i], alone)
    assert len(alone) == 16 + special_tokens and alone.units.grid == (4, 4)
    assert alone.certificate["readout"] == "patches" and together["generic"][0].certificate["readout_checked"]
    pixels = ex.adapter.processor(IMAGES[0], return_tensors="pt")["pixel_values"].double()
    with torch.no_grad():
        logits = model(pixels).logits[0]
    assert together["generic"][0].target["value"] == pytest.approx(float(logits.max()), abs=1e-6)
