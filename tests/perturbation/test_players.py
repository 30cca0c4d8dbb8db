"""How units are taken away: what stays, what stands in their place, who plays; and what is evaluated together."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Method
from clearhead.adapters import InputOptions
from clearhead.perturbation.image_fill import make_black_image
from clearhead.perturbation.multi_stream import make_players
from tests import joint_models, models
from tests.methods import replica_comparison

TEXT = "She hates the book because it isn't good"


def sample(subject, raw):
    ex = replica_comparison.explainer(subject)
    return ex.adapter, ex.adapter.make_samples(raw, InputOptions())[0]


def someone(players, seed=0):
    return torch.rand(players.num_players, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("subject", ["bert/classify", "roberta/classify", "albert/classify"])
@pytest.mark.parametrize("replacement", ["mask", "pad", "unk"])
def test_tokens_are_replaced_and_special_ones_stay(subject: str, replacement: str) -> None:
    made, whole = sample(subject, TEXT)
    players = make_players(made, whole, None, replacement)
    token = getattr(made.processor, f"{replacement}_token_id")
    ids, none = whole.inputs["input_ids"], players.keep_only(torch.zeros(players.num_players, dtype=torch.bool))
    special = torch.tensor(whole.units.special)
    assert torch.equal(none.inputs["input_ids"][special], ids[special])
    assert (none.inputs["input_ids"][~special] == token).all()
    keep = someone(players)
    some = players.keep_only(keep).inputs["input_ids"]
    assert torch.equal(some[~special], torch.where(keep, ids[~special], token))
    assert torch.equal(players.keep_only(torch.ones_like(keep)).inputs["input_ids"], ids)


def test_deletion_equals_the_shortened_input() -> None:
    made, whole = sample("bert/classify", models.PAIR)
    players = make_players(made, whole, None, "delete")
    keep = someone(players)
    some = players.keep_only(keep)
    kept = (players.player_of_unit < 0) | keep[players.player_of_unit.clamp(min=0)]
    assert len(some.units) == int(kept.sum()) < len(whole.units)
    for name, part in some.inputs.items():
        assert torch.equal(part, whole.inputs[name][kept]), name
    batch = made.collate([some, whole])
    with torch.no_grad():
        together = made.model(**batch).logits[0]
        alone = made.model(**{name: part[None] for name, part in some.inputs.items()}).logits[0]
    assert replica_comparison.gap(together, alone) < 1e-10


@pytest.mark.parametrize("replacement", ["mask", "pad", "delete"])
def test_mask_to_fill_is_never_replaced(replacement: str) -> None:
    made, whole = sample("bert/mask", "She [MASK] the book [MASK] it")
    players = make_players(made, whole, None, replacement)
    none = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool))
    assert [int(none.inputs["input_ids"][i]) for i in none.mask_positions] == [made.mask_token_id, made.mask_token_id]
    e = replica_comparison.explainer("bert/mask").explain(
        "She [MASK] the book", Method("occlusion", replacement=replacement), target="the"
    )
    assert e.scores[e.tokens.index("[MASK]")] == 0 and np.abs(e.scores).max() > 0


def test_mask_to_fill_is_kept_at_all_levels() -> None:
    ex = replica_comparison.explainer("bert/mask")
    e = ex.explain("She [MASK] the book. It is boring.", Method("kernel-shap", unit="sentence"))
    assert e.base_value + e.scores.sum() == pytest.approx(e.target["value"], rel=1e-9)
    assert e.provenance["players"] == "sentence"


@pytest.mark.parametrize(("unit", "count"), [("token", None), ("word", 8), ("sentence", 1)])
def test_text_levels(unit: str, count: int | None) -> None:
    made, whole = sample("bert/classify", TEXT)
    players = make_players(made, whole, unit)
    assert players.num_players == (count or len(whole.units) - 2)
    scores = torch.arange(1, players.num_players + 1).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


def test_embeddings_as_input() -> None:
    """The mask's own vector stands in for them, so words and their vectors have the same scores."""
    ex = replica_comparison.explainer("bert/classify")
    ids = replica_comparison.SENTENCES[0]["input_ids"]
    vectors = ex.adapter.model.get_input_embeddings()(ids).detach()
    of_vectors = ex.explain({"inputs_embeds": vectors}, Method("occlusion", window=99), target=0)
    masked = ex.explain({"input_ids": torch.full_like(ids, ex.adapter.processor.mask_token_id)}, "random", target=0)
    lost = of_vectors.target["value"] - masked.target["value"]
    assert of_vectors.scores.sum() == pytest.approx(lost, rel=1e-9)


# Pictures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", ["vit/image", "dinov2-registers/image", "swin/image"])
@pytest.mark.parametrize("replacement", ["mean", "blur", "black"])
def test_patches_are_replaced(subject: str, replacement: str) -> None:
    made, whole = sample(subject, models.inputs(subject)[0])
    players = make_players(made, whole, None, replacement)
    pixels, (high, wide) = whole.inputs["pixel_values"], made.patch_size
    keep = torch.ones(players.num_players, dtype=torch.bool)
    keep[1] = False
    changed = (players.keep_only(keep).inputs["pixel_values"] != pixels).any(0)
    assert changed[:high, wide : 2 * wide].all() and int(changed.sum()) == high * wide
    assert torch.equal(players.keep_only(torch.ones_like(keep)).inputs["pixel_values"], pixels)
    gone = players.keep_only(torch.zeros_like(keep)).inputs["pixel_values"]
    if replacement == "mean":
        assert torch.allclose(gone, pixels.mean((1, 2), keepdim=True).expand_as(gone), atol=1e-6)
    elif replacement == "black":
        assert torch.allclose(gone, torch.full_like(gone, -1.0))  # (0 − 0.5) / 0.5
    else:
        assert gone.std() < pixels.std() / 3


def test_pixels_beyond_the_last_patch_are_unchanged() -> None:
    ex = replica_comparison.explainer("dinov2/image")
    pixels = torch.rand(1, 3, 18, 17, generator=torch.Generator().manual_seed(0)).double()
    e = ex.explain({"pixel_values": pixels}, "occlusion")
    assert len(e) == 17
    whole = ex.adapter.make_samples({"pixel_values": pixels}, InputOptions())[0]
    players = make_players(ex.adapter, whole)
    gone = players.keep_only(torch.zeros(players.num_players, dtype=torch.bool)).inputs["pixel_values"]
    assert torch.equal(gone[:, 16:], pixels[0, :, 16:]) and torch.equal(gone[:, :, 16:], pixels[0, :, :, 16:])


def test_superpixels_cover_the_image() -> None:
    pytest.importorskip("skimage")
    made, whole = sample("vit/image", models.inputs("vit/image")[1])
    players = make_players(made, whole, "superpixel")
    assert (players.player_of_pixel >= 0).all() and players.num_players > 16
    assert sorted(players.player_of_pixel.unique().tolist()) == list(range(players.num_players))
    scores = torch.rand(players.num_players).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


@pytest.mark.parametrize("size", [(48, 48), (33, 18)])
def test_noise_is_divided_along_a_grid(size: tuple[int, int]) -> None:
    """SLIC makes one piece of it, and LIME would have one player."""
    pytest.importorskip("skimage")
    made = replica_comparison.explainer("dinov2/image").adapter
    pixels = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0)).double()
    players = make_players(made, made.make_samples({"pixel_values": pixels}, InputOptions())[0], "superpixel")
    assert players.unit == "grid" and 40 <= players.num_players <= 60
    seen = players.player_of_pixel[: size[0] // 4 * 4, : size[1] // 4 * 4]
    sizes = torch.bincount(seen.flatten(), minlength=players.num_players)
    assert sizes.min() > 0 and sizes.sum() == (players.player_of_pixel >= 0).sum() == seen.numel()
    assert sizes.max() <= 4 * sizes.min()
    scores = torch.rand(players.num_players).double()
    assert float(players.spread_to_units(scores).sum()) == pytest.approx(float(scores.sum()))


def test_blur_and_black_equal_the_baselines() -> None:
    from clearhead.perturbation.image_fill import blur_image

    made, whole = sample("vit/image", models.inputs("vit/image")[0])
    pixels = whole.inputs["pixel_values"]
    gone = make_players(made, whole, None, "blur").keep_only(torch.zeros(16, dtype=torch.bool))
    assert torch.allclose(gone.inputs["pixel_values"], blur_image(pixels), atol=1e-5)


def test_black_uses_the_nested_image_processor() -> None:
    """That of a model of several streams has one for pictures; a tokenizer knows nothing of black."""
    pictures = SimpleNamespace(do_normalize=True, image_mean=[0.5, 0.25, 0.0], image_std=[0.5, 0.5, 1.0])
    made = make_black_image(SimpleNamespace(image_processor=pictures), torch.ones(3, 2, 2))
    assert made[:, 0, 0].tolist() == [-1.0, -0.5, 0.0]
    assert not make_black_image(SimpleNamespace(do_normalize=False), torch.ones(3, 2, 2)).any()
    for unknown in (None, models.tokenizer("wordpiece")):
        with pytest.raises(clearhead.InputError, match="pixel values of black are not known"):
            make_black_image(unknown, torch.ones(3, 2, 2))


# Targets, decoders, several targets -----------------------------------------------------------------------------------


def test_targets_share_forward_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a token classifier is its own game, but an altered input goes through the model once."""
    config = models.text_model("bert")[0].config
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config).double().eval()
    ex = clearhead.load(model, models.tokenizer("wordpiece"))
    e = ex.explain(TEXT, "occlusion")
    assert e.steps is not None and len(e.steps) > 1
    seen: list[tuple[int, ...]] = []
    forward = model.bert.forward

    def counted(input_ids=None, **more):
        seen.extend(map(tuple, input_ids.tolist()))
        return forward(input_ids=input_ids, **more)

    monkeypatch.setattr(model.bert, "forward", counted)
    again = ex.explain(TEXT, "occlusion")
    np.testing.assert_allclose(again.matrix, e.matrix, atol=1e-12)
    assert len(seen) <= len(set(seen)) + 2, "the whole input is also read to find the targets and the prediction"
    monkeypatch.undo()
    token = int(e.target["steps"][1]["place"])
    label = e.target["steps"][1]["label"]
    alone = ex.explain(TEXT, "occlusion", target=clearhead.TokenLabel(token, label))
    np.testing.assert_allclose(alone.scores, e.matrix[1], atol=1e-10)
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain(TEXT, Method("occlusion", replacement="delete"))


@pytest.mark.parametrize("method", ["occlusion", "kernel-shap", "shap", "lime"])
def test_decoders(method: str) -> None:
    """The next word; and each word of an answer, explained with what comes before it."""
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
    e = ex.explain({"input_ids": ids}, method)
    assert e.provenance["replacement"] == "eos"
    with torch.no_grad():
        whole = model(input_ids=ids).logits[0, -1]
        word, places = int(whole.argmax()), torch.arange(6)
        without = [model(input_ids=ids.index_fill(1, i, 2)).logits[0, -1, word] for i in places]
        lost = [float(whole[word] - part) for part in without]
        none = float(model(input_ids=torch.full_like(ids, 2)).logits[0, -1, word])
    if method == "occlusion":
        np.testing.assert_allclose(e.scores, lost, atol=1e-10)
    elif method != "lime":
        assert e.base_value == pytest.approx(none) and e.scores.sum() == pytest.approx(float(whole.max()) - none)
    answered = ex.explain({"input_ids": ids}, method, answer=[[7, 12]])
    assert answered.matrix.shape == (2, 8) and not answered.matrix[0, 6:].any()
    alone = ex.explain({"input_ids": ids}, method, target=7)
    np.testing.assert_allclose(answered.matrix[0, :6], alone.scores, atol=1e-8)


@pytest.mark.parametrize("pad", [None, 3])
def test_deletion_from_a_prompt(pad: int | None) -> None:
    """The next word after what is left, in batches of one length or padded; words of an answer stay where they are."""
    config = transformers.GPT2Config(
        vocab_size=330, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, pad_token_id=pad
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    ex, ids = clearhead.load(model), torch.tensor([5, 17, 45, 99, 8, 61])
    places = torch.arange(6)
    with torch.no_grad():
        whole = model(input_ids=ids[None]).logits[0, -1]

        def without(*gone: int) -> float:
            left = ids[~torch.isin(places, torch.tensor(gone))]
            return float(whole.max() - model(input_ids=left[None]).logits[0, -1, whole.argmax()])

        one, three = [without(i) for i in range(6)], [without(i, i + 1, i + 2) for i in range(4)]
    deleted = Method("occlusion", replacement="delete")
    e = ex.explain({"input_ids": ids[None]}, deleted)
    assert e.provenance["replacement"] == "delete"
    np.testing.assert_allclose(e.scores, one, atol=1e-10)
    wide = ex.explain({"input_ids": ids[None]}, Method("occlusion", replacement="delete", window=3))
    np.testing.assert_allclose(wide.scores[[0, 5]], np.array(three)[[0, 3]] / 3, atol=1e-10)
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain({"input_ids": ids[None]}, deleted, answer=[[7, 12]])
    with pytest.raises(clearhead.InputError, match="would move the tokens"):
        ex.explain({"input_ids": ids[None]}, deleted, target=lambda output: output.logits[:, -1, 4])
    with pytest.raises(clearhead.InputError, match="leaves nothing of the text"):
        ex.explain({"input_ids": ids[None]}, Method("kernel-shap", replacement="delete"))


def test_batches_without_harmful_padding() -> None:
    """ModernBERT's eager attention in float64 is NaN where padding sees nothing: inputs then go one by one."""
    ex = models.explainer("modernbert/classify")
    ex.adapter.model.set_attn_implementation("eager")
    found = ex.explain(models.TEXTS, Method("lime", evaluations=20))
    for e, text in zip(found, models.TEXTS, strict=True):
        np.testing.assert_allclose(e.scores, ex.explain(text, Method("lime", evaluations=20)).scores, atol=1e-6)


def test_nonfinite_targets_are_refused() -> None:
    def odd(output):
        return torch.where(output.logits[:, 0] == first, output.logits[:, 0], torch.inf)

    ex = replica_comparison.explainer("bert/classify")
    with torch.no_grad():
        first = ex.adapter.model(**ex.adapter.processor(TEXT, return_tensors="pt")).logits[0, 0]
    with pytest.raises(clearhead.InputError, match="no finite number when units are taken away"):
        ex.explain(TEXT, "occlusion", target=odd)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "options", "said"),
    [
        ("bert/classify", {"replacement": "blur"}, "unknown replacement in a text 'blur'"),
        ("vit/image", {"replacement": "mask"}, "unknown replacement in an image 'mask'"),
        ("bert/classify", {"unit": "patch"}, "unknown unit 'patch'"),
        ("vit/image", {"unit": "word"}, "unknown unit 'word'"),
        ("vit/image", {"unit": "superpixel", "window": 2}, "superpixels have no rows"),
        ("bert/mask", {"replacement": "written-mask"}, "is only for a single input"),
    ],
)
def test_bad_settings(subject: str, options: dict, said: str) -> None:
    if options.get("unit") == "superpixel":
        pytest.importorskip("skimage")
    with pytest.raises(clearhead.InputError, match=said):
        replica_comparison.explainer(subject).explain(models.inputs(subject)[0], Method("occlusion", **options))


def test_models_without_a_tokenizer() -> None:
    ex = clearhead.load(replica_comparison.explainer("bert/classify").adapter.model)
    assert ex.explain(replica_comparison.SENTENCES[0], "occlusion").provenance["replacement"] == "delete"
    with pytest.raises(clearhead.InputError, match="no such token of BertForSequenceClassification is known"):
        ex.explain(replica_comparison.SENTENCES[0], Method("occlusion", replacement="mask"))
    picture = clearhead.load(replica_comparison.explainer("vit/image").adapter.model)
    with pytest.raises(clearhead.InputError, match="pixel values of black are not known"):
        picture.explain(picture.adapter.make_example_input(), Method("occlusion", replacement="black"))


def test_unsupported_streams_are_refused() -> None:
    ex = joint_models.explainer("visual_bert")
    line = next(line for line in ex.methods() if line.name == "occlusion")
    assert not line.applies and "(text, regions) together is not supported" in line.why_not
