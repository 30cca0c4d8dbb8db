"""Players of perturbation methods: replacement of units, levels, and batched evaluation of altered inputs."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Method
from clearhead.adapters import InputOptions
from clearhead.adapters.base import NamedInputs
from clearhead.perturbation.image_fill import make_black_image
from clearhead.perturbation.multi_stream import make_players
from tests import joint_models, models, vision_language_models
from tests.methods import replica_comparison

TEXT = "She hates the book because it isn't good"


def load_sample(subject, raw):
    ex = replica_comparison.explainer(subject)
    return ex.adapter, ex.adapter.make_samples(raw, InputOptions())[0]


def random_subset(players, seed=0):
    return torch.rand(players.num_players, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/classify", "albert/classify"])
@pytest.mark.parametrize("replacement", ["mask", "pad", "unk"])
def test_tokens_are_replaced_and_special_tokens_are_kept(subject: str, replacement: str) -> None:
    adapter, sample = load_sample(subject, TEXT)
    players = make_players(adapter, sample, None, replacement)
    token = getattr(adapter.processor, f"{replacement}_token_id")
    ids, all_masked = sample.inputs["input_ids"], players.keep_only(torch.zeros(players.num_players, dtype=torch.bool))
    special = torch.tensor(sample.units.special)
    assert torch.equal(all_masked.inputs["input_ids"][special], ids[special])
    assert (all_masked.inputs["input_ids"][~special] == token).all()
    keep = random_subset(players)
    masked_ids = players.keep_only(keep).inputs["input_ids"]
    assert torch.equal(masked_ids[~special], torch.where(keep, ids[~special], token))
    assert torch.equal(players.keep_only(torch.ones_like(keep)).inputs["input_ids"], ids)


def test_deletion_equals_the_shortened_input() -> None:
    adapter, sample = load_sample("bert/classify", models.PAIR)
    players = make_players(adapter, sample, None, "delete")
    keep = random_subset(players)
    shortened = players.keep_only(keep)
    kept = (players.player_of_unit < 0) | keep[players.player_of_unit.clamp(min=0)]
    assert len(shortened.units) == int(kept.sum()) < len(sample.units)
    for name, tensor in shortened.inputs.items():
        assert torch.equal(tensor, sample.inputs[name][kept]), name
    batch = adapter.collate([shortened, sample])
    with torch.no_grad():
        batched = adapter.model(**batch).logits[0]
        single = adapter.model(**{name: tensor[None] for name, tensor in shortened.inputs.items()}).logits[0]
    assert replica_comparison.gap(batched, single) < 1e-10


@pytest.mark.parametrize("replacement", ["mask", "pad", "delete"])
def test_mask_to_fill_is_never_replaced(replacement: str) -> None:
    adapter, sample = load_sample("bert/mask", "She [MASK] the book [MASK] it")
    players = make_players(adapter, sample, None, replacement)
    all_masked = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool))
    assert [int(all_masked.inputs["input_ids"][i]) for i in all_masked.mask_positions] == [
        adapter.mask_token_id,
        adapter.mask_token_id,
    ]
    explanation = replica_comparison.explainer("bert/mask").explain(
        "She [MASK] the book", Method("occlusion", replacement=replacement), target="the"
    )
    assert explanation.scores[explanation.tokens.index("[MASK]")] == 0 and np.abs(explanation.scores).max() > 0


def test_mask_to_fill_is_kept_at_all_levels() -> None:
    ex = replica_comparison.explainer("bert/mask")
    explanation = ex.explain("She [MASK] the book. It is boring.", Method("kernel-shap", unit="sentence"))
    assert explanation.base_value + explanation.scores.sum() == pytest.approx(explanation.target["value"], rel=1e-9)
    assert explanation.provenance["players"] == "sentence"


@pytest.mark.parametrize(("unit", "count"), [("token", None), ("word", 8), ("sentence", 1)])
def test_text_units_define_players(unit: str, count: int | None) -> None:
    adapter, sample = load_sample("bert/classify", TEXT)
    players = make_players(adapter, sample, unit)
    assert players.num_players == (count or len(sample.units) - 2)
    scores = torch.arange(1, players.num_players + 1).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


def test_embeddings_are_replaced_by_mask_embedding() -> None:
    """Masked embeddings are replaced by the embedding of the mask token, so the scores equal those of tokens."""
    ex = replica_comparison.explainer("bert/classify")
    ids = replica_comparison.SENTENCES[0]["input_ids"]
    embeddings = ex.adapter.model.get_input_embeddings()(ids).detach()
    explanation = ex.explain({"inputs_embeds": embeddings}, Method("occlusion", window=99), target=0)
    masked = ex.explain({"input_ids": torch.full_like(ids, ex.adapter.processor.mask_token_id)}, "random", target=0)
    loss = explanation.target["value"] - masked.target["value"]
    assert explanation.scores.sum() == pytest.approx(loss, rel=1e-9)


# Images ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["vit/image", "dinov2-registers/image", "swin/image"])
@pytest.mark.parametrize("replacement", ["mean", "blur", "black"])
def test_patches_are_replaced(subject: str, replacement: str) -> None:
    adapter, sample = load_sample(subject, models.inputs(subject)[0])
    players = make_players(adapter, sample, None, replacement)
    pixels, (height, width) = sample.inputs["pixel_values"], adapter.patch_size
    keep = torch.ones(players.num_players, dtype=torch.bool)
    keep[1] = False
    changed = (players.keep_only(keep).inputs["pixel_values"] != pixels).any(0)
    assert changed[:height, width : 2 * width].all() and int(changed.sum()) == height * width
    assert torch.equal(players.keep_only(torch.ones_like(keep)).inputs["pixel_values"], pixels)
    replaced = players.keep_only(torch.zeros_like(keep)).inputs["pixel_values"]
    if replacement == "mean":
        assert torch.allclose(replaced, pixels.mean((1, 2), keepdim=True).expand_as(replaced), atol=1e-6)
    elif replacement == "black":
        assert torch.allclose(replaced, torch.full_like(replaced, -1.0))  # (0 − 0.5) / 0.5
    else:
        assert replaced.std() < pixels.std() / 3


def test_pixels_beyond_the_last_patch_are_unchanged() -> None:
    ex = replica_comparison.explainer("dinov2/image")
    pixels = torch.rand(1, 3, 18, 17, generator=torch.Generator().manual_seed(0)).double()
    explanation = ex.explain({"pixel_values": pixels}, "occlusion")
    assert len(explanation) == 17
    sample = ex.adapter.make_samples({"pixel_values": pixels}, InputOptions())[0]
    players = make_players(ex.adapter, sample)
    replaced = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool)).inputs["pixel_values"]
    assert torch.equal(replaced[:, 16:], pixels[0, :, 16:]) and torch.equal(replaced[:, :, 16:], pixels[0, :, :, 16:])


def test_superpixels_cover_the_image() -> None:
    pytest.importorskip("skimage")
    adapter, sample = load_sample("vit/image", models.inputs("vit/image")[1])
    players = make_players(adapter, sample, "superpixel")
    assert (players.player_of_pixel >= 0).all() and players.num_players > 16
    assert sorted(players.player_of_pixel.unique().tolist()) == list(range(players.num_players))
    scores = torch.rand(players.num_players).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


@pytest.mark.parametrize("size", [(48, 48), (33, 18)])
def test_noise_image_falls_back_to_grid(size: tuple[int, int]) -> None:
    """SLIC gives one superpixel for noise, so that LIME would have one player."""
    pytest.importorskip("skimage")
    adapter = replica_comparison.explainer("dinov2/image").adapter
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    players = make_players(adapter, adapter.make_samples({"pixel_values": pixels}, InputOptions())[0], "superpixel")
    assert players.unit == "grid" and 40 <= players.num_players <= 60
    player_map = players.player_of_pixel[: size[0] // 4 * 4, : size[1] // 4 * 4]
    sizes = torch.bincount(player_map.flatten(), minlength=players.num_players)
    assert sizes.min() > 0 and sizes.sum() == (players.player_of_pixel >= 0).sum() == player_map.numel()
    assert sizes.max() <= 4 * sizes.min()
    scores = torch.rand(players.num_players).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


def test_blur_replacement_equals_blur_baseline() -> None:
    from clearhead.perturbation.image_fill import blur_image

    adapter, sample = load_sample("vit/image", models.inputs("vit/image")[0])
    pixels = sample.inputs["pixel_values"]
    blurred = make_players(adapter, sample, None, "blur").keep_only(torch.zeros(16, dtype=torch.bool))
    assert torch.allclose(blurred.inputs["pixel_values"], blur_image(pixels), atol=1e-5)


def test_black_uses_the_nested_image_processor() -> None:
    """A multimodal processor contains an image processor; a tokenizer has no pixel value for black."""
    image_processor = SimpleNamespace(do_normalize=True, image_mean=[0.5, 0.25, 0.0], image_std=[0.5, 0.5, 1.0])
    black = make_black_image(SimpleNamespace(image_processor=image_processor), torch.ones(3, 2, 2))
    assert black[:, 0, 0].tolist() == [-1.0, -0.5, 0.0]
    assert not make_black_image(SimpleNamespace(do_normalize=False), torch.ones(3, 2, 2)).any()
    for unknown in (None, models.tokenizer("wordpiece")):
        with pytest.raises(clearhead.InputError, match="pixel values of black are not known"):
            make_black_image(unknown, torch.ones(3, 2, 2))


# Targets, decoders, several targets -----------------------------------------------------------------------------------


def test_targets_share_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a token classifier is a separate target, but an altered input runs through the model once."""
    config = models.text_model("bert")[0].config
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config).double().eval()
    ex = clearhead.load(model, models.tokenizer("wordpiece"))
    explanation = ex.explain(TEXT, "occlusion")
    assert explanation.steps is not None and len(explanation.steps) > 1
    inputs_seen: list[tuple[int, ...]] = []
    forward = model.bert.forward

    def record_inputs(input_ids=None, **kwargs):
        inputs_seen.extend(map(tuple, input_ids.tolist()))
        return forward(input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model.bert, "forward", record_inputs)
    repeated = ex.explain(TEXT, "occlusion")
    np.testing.assert_allclose(repeated.matrix, explanation.matrix, atol=1e-12)
    assert len(inputs_seen) <= len(set(inputs_seen)) + 2, "the full input also runs for the targets and the prediction"
    monkeypatch.undo()
    token = int(explanation.target["steps"][1]["position"])
    label = explanation.target["steps"][1]["label"]
    single = ex.explain(TEXT, "occlusion", target=clearhead.TokenLabel(token, label))
    np.testing.assert_allclose(single.scores, explanation.matrix[1], atol=1e-10)
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain(TEXT, Method("occlusion", replacement="delete"))


@pytest.mark.parametrize("method", ["occlusion", "kernel-shap", "shap", "lime"])
def test_decoder_scores_of_next_token_and_continuation(method: str) -> None:
    """The next token, and each token of a given continuation, explained by the tokens before it."""
    config = transformers.GPT2Config(
        vocab_size=330,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ex = clearhead.load(model)
    ids = torch.tensor([[5, 17, 45, 99, 8, 61]])
    explanation = ex.explain({"input_ids": ids}, method)
    assert explanation.provenance["replacement"] == "eos"
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1]
        token, positions = int(logits.argmax()), torch.arange(6)
        without = [model(input_ids=ids.index_fill(1, i, 2)).logits[0, -1, token] for i in positions]
        losses = [float(logits[token] - masked_logit) for masked_logit in without]
        base_value = float(model(input_ids=torch.full_like(ids, 2)).logits[0, -1, token])
    if method == "occlusion":
        np.testing.assert_allclose(explanation.scores, losses, atol=1e-10)
    elif method != "lime":
        assert explanation.base_value == pytest.approx(base_value) and explanation.scores.sum() == pytest.approx(
            float(logits.max()) - base_value
        )
    continuation = ex.explain({"input_ids": ids}, method, answer=[[7, 12]])
    assert continuation.matrix.shape == (2, 8) and not continuation.matrix[0, 6:].any()
    single = ex.explain({"input_ids": ids}, method, target=7)
    np.testing.assert_allclose(continuation.matrix[0, :6], single.scores, atol=1e-8)


@pytest.mark.parametrize("pad", [None, 3])
def test_deletion_of_prompt_tokens_equals_shortened_prompt(pad: int | None) -> None:
    """The next token after the remaining ones, in batches with and without padding; fixed positions raise."""
    config = transformers.GPT2Config(
        vocab_size=330, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, pad_token_id=pad
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ex, ids = clearhead.load(model), torch.tensor([5, 17, 45, 99, 8, 61])
    positions = torch.arange(6)
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, -1]

        def without(*deleted_positions: int) -> float:
            remaining = ids[~torch.isin(positions, torch.tensor(deleted_positions))]
            return float(logits.max() - model(input_ids=remaining[None]).logits[0, -1, logits.argmax()])

        single_losses, window_losses = [without(i) for i in range(6)], [without(i, i + 1, i + 2) for i in range(4)]
    deleted = Method("occlusion", replacement="delete")
    explanation = ex.explain({"input_ids": ids[None]}, deleted)
    assert explanation.provenance["replacement"] == "delete"
    np.testing.assert_allclose(explanation.scores, single_losses, atol=1e-10)
    windowed = ex.explain({"input_ids": ids[None]}, Method("occlusion", replacement="delete", window=3))
    np.testing.assert_allclose(windowed.scores[[0, 5]], np.array(window_losses)[[0, 3]] / 3, atol=1e-10)
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain({"input_ids": ids[None]}, deleted, answer=[[7, 12]])
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain({"input_ids": ids[None]}, deleted, target=lambda output: output.logits[:, -1, 4])
    with pytest.raises(clearhead.InputError, match="removes the whole text"):
        ex.explain({"input_ids": ids[None]}, Method("kernel-shap", replacement="delete"))


def test_nan_from_padding_falls_back_to_single_inputs() -> None:
    """ModernBERT's eager attention in float64 is NaN at fully masked padding rows, so inputs run one by one."""
    ex = models.explainer("modernbert/classify")
    ex.adapter.model.set_attn_implementation("eager")
    batched = ex.explain(models.TEXTS, Method("lime", evaluations=20))
    for explanation, text in zip(batched, models.TEXTS, strict=True):
        np.testing.assert_allclose(
            explanation.scores, ex.explain(text, Method("lime", evaluations=20)).scores, atol=1e-6
        )


def test_nonfinite_target_raises() -> None:
    def infinite_if_changed(output):
        return torch.where(output.logits[:, 0] == first, output.logits[:, 0], torch.inf)

    ex = replica_comparison.explainer("bert/classify")
    with torch.no_grad():
        first = ex.adapter.model(**ex.adapter.processor(TEXT, return_tensors="pt")).logits[0, 0]
    with pytest.raises(clearhead.InputError, match="not finite when units are removed"):
        ex.explain(TEXT, "occlusion", target=infinite_if_changed)


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        ("bert/classify", {"replacement": "blur"}, "unknown replacement in a text 'blur'"),
        ("vit/image", {"replacement": "mask"}, "unknown replacement in an image 'mask'"),
        ("bert/classify", {"unit": "patch"}, "unknown unit 'patch'"),
        ("vit/image", {"unit": "word"}, "unknown unit 'word'"),
        ("vit/image", {"unit": "superpixel", "window": 2}, "superpixels have no rows"),
        ("bert/mask", {"replacement": "written-mask"}, "is only for a single input"),
    ],
)
def test_invalid_options_raise(subject: str, options: dict, message: str) -> None:
    if options.get("unit") == "superpixel":
        pytest.importorskip("skimage")
    with pytest.raises(clearhead.InputError, match=message):
        replica_comparison.explainer(subject).explain(models.inputs(subject)[0], Method("occlusion", **options))


def test_model_without_tokenizer_deletes_tokens_and_rejects_mask() -> None:
    ex = clearhead.load(replica_comparison.explainer("bert/classify").adapter.model)
    assert ex.explain(replica_comparison.SENTENCES[0], "occlusion").provenance["replacement"] == "delete"
    with pytest.raises(clearhead.InputError, match="no such token of BertForSequenceClassification is known"):
        ex.explain(replica_comparison.SENTENCES[0], Method("occlusion", replacement="mask"))
    vision = clearhead.load(replica_comparison.explainer("vit/image").adapter.model)
    with pytest.raises(clearhead.InputError, match="pixel values of black are not known"):
        vision.explain(vision.adapter.make_example_input(), Method("occlusion", replacement="black"))


def test_unsupported_streams_are_listed_with_reason() -> None:
    ex = vision_language_models.explainer("llava")
    line = next(line for line in ex.methods() if line.name == "occlusion")
    assert not line.applies and "(text, image) together is not supported" in line.why_not


@pytest.mark.parametrize(
    ("subject", "unit"), [("bert/classify", "token"), ("bert/classify", "word"), ("vit/image", "superpixel")]
)
def test_scores_of_units_are_added_up_to_players(subject: str, unit: str) -> None:
    """No part of a score gets lost, except for units that are never masked; spreading it again keeps the sum."""
    adapter, sample = load_sample(subject, models.inputs(subject)[0])
    players = make_players(adapter, sample, unit)
    (name,) = sample.axes
    scores = torch.rand(len(sample.units) + 3, generator=torch.Generator().manual_seed(0)).double()  # with padding
    totals = players.add_up_axes({name: scores})
    content = torch.tensor(sample.units.content_indices())
    assert float(totals.sum()) == pytest.approx(float(scores[content].sum()))
    assert float(players.spread_to_units(totals).sum()) == pytest.approx(float(totals.sum()))
    ones = players.add_up_axes({name: torch.ones_like(scores)})
    if unit == "token":
        assert torch.equal(totals, scores[content]) and torch.equal(ones, torch.ones_like(ones))


def test_scores_of_several_streams_are_added_up_to_players() -> None:
    ex, raw = joint_models.explainer("vilt"), joint_models.inputs("vilt")[0]
    e = ex.explain(**raw, method=Method("calibrated", evaluations=16, tolerance=0.0, prior="input-x-gradient"))
    sample = ex.adapter.make_samples(NamedInputs(**raw), InputOptions())[0]
    players = make_players(ex.adapter, sample)
    assert e["text"].intervals is not None and e["image"].intervals.shape == (len(e["image"]), 2)
    scores = {name: torch.zeros(len(axis)).double() for name, axis in sample.axes.items()}
    for part, (_, axis_name, indices) in zip(e, players.stream_locations, strict=True):
        scores[axis_name][list(indices)] = torch.as_tensor(part.components["input-x-gradient"]).double()
    content = [part.components["input-x-gradient"][part.units.content_indices()] for part in e]
    np.testing.assert_allclose(players.add_up_axes(scores), np.concatenate(content), atol=1e-9)
