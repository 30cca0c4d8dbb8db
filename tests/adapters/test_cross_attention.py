"""Models with cross-attention between streams: LXMERT compared with its authors' scores; LXMERT, BLIP and BridgeTower
compared with slow replicas and checked for the invariants."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import clearhead
from clearhead import InputError, Method, UnsupportedError
from tests import joint_models
from tests.invariants import model_snapshot
from tests.invariants.cases import amplified
from tests.replicas import co_attention as replica

DATA = Path(__file__).parents[1] / "data" / "parity"
ORIGINALS = Path(__file__).parents[3] / "shared" / "fixtures"
CASES = pytest.mark.parametrize(("case", "which"), [(c, w) for c in ("case0", "case1") for w in ("pred", "alt")])
NAMES = ("lxmert", "blip", "bridge_tower")
FAMILIES = pytest.mark.parametrize("name", NAMES)
#: The authors' name of each method → the name here, with its options.
METHODS = {
    "ours": "generic",
    "ours_nonorm": Method("generic", normalise=False),
    "ours_noself10": Method("generic", within=False),
    "ours_no_agg_nonorm": Method("generic", aggregate=False, normalise=False),
    "raw_attn": "attention",
    "rollout": "rollout",
    "gradcam": "attention-gradcam",
}


def gap(ours: Any, theirs: Any) -> float:
    """The largest deviation, relative to the largest value; NaN where, and only where, it is expected."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    largest = np.nanmax(np.abs(theirs), initial=0)
    return float(np.nanmax(np.abs(ours - theirs), initial=0) / (largest or 1))


def list_applicable_methods(ex: clearhead.Explainer) -> list[str]:
    """The methods that apply, except those with hundreds of passes (see perturbation/test_multi_stream.py)."""
    many = ("shap", "kernel-shap", "lime")
    return [line.name for line in ex.methods() if line.applies and line.name not in many]


# -- LXMERT compared with its authors' scores


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "arrays.npz") as file:
        return {key.removeprefix(f"{model}/cases/"): file[key] for key in file.files}


@cache
def published(model: str) -> clearhead.Explainer:
    folder = DATA / model
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["hf_class"])
    model_instance = cls.from_pretrained(
        None,
        config=cls.config_class.from_pretrained(folder),
        state_dict=load_file(folder / "weights.safetensors"),
        dtype=torch.float64,
    )
    return clearhead.load(model_instance.eval())


def given(case: str) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "visual_feats", "visual_pos")
    return {name: torch.as_tensor(arrays("lxmert")[f"{case}/{name}"]) for name in names}


@pytest.mark.parametrize("model", ["lxmert", "visual_bert"])
def test_stored_fixtures_equal_the_originals(model: str) -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies can be used")
    for name in ("config.json", "weights.safetensors"):
        assert (DATA / model / name).read_bytes() == (ORIGINALS / model / name).read_bytes()
    with np.load(ORIGINALS / model / "cases.npz") as file:
        for key, copied in arrays(model).items():
            np.testing.assert_array_equal(copied, file[key], err_msg=key)


@CASES
@pytest.mark.parametrize("theirs", METHODS)
def test_lxmert_scores_equal_authors_scores(case: str, which: str, theirs: str) -> None:
    index = int(arrays("lxmert")[f"{case}/{which}/target"])
    target = None if which == "pred" else index
    e = published("lxmert").explain(given(case), METHODS[theirs], target=target, profile="mm_lxmert")
    assert e.target["index"] == index
    for stream, matrix in (("text", "R_t_t"), ("regions", "R_t_i")):
        assert gap(e[stream].scores, arrays("lxmert")[f"{case}/{which}/{theirs}/{matrix}"][0]) < 1e-10


def test_padded_batch_equals_authors_scores() -> None:
    """Rows of padding are zero: the authors' division would turn all scores into NaN if it included them."""
    both = published("lxmert").explain([given("case0"), given("case1")], "generic", profile="mm_lxmert")
    for case, e in zip(("case0", "case1"), both, strict=True):
        for stream, matrix in (("text", "R_t_t"), ("regions", "R_t_i")):
            assert gap(e[stream].scores, arrays("lxmert")[f"{case}/pred/ours/{matrix}"][0]) < 1e-10


def test_calls_of_a_shared_attention_module_are_recorded_separately() -> None:
    index = int(arrays("lxmert")["case0/pred/target"])
    tape = published("lxmert").record(given("case0"), ("attention", "attention_gradient"), target=index)
    stream_letters = {"text": "t", "regions": "i"}
    names = [
        "l0",
        "l1",
        "r0",
        "r1",
        *(f"x{k}_{direction}" for k in range(3) for direction in ("t_i", "i_t", "t_t", "i_i")),
    ]
    assert len(tape.calls) == len(names)
    for name, call in zip(names, tape.calls, strict=True):
        if name[0] == "x":
            assert name[3:] == f"{stream_letters[call.query_stream]}_{stream_letters[call.key_stream]}"
        else:
            assert call.query_stream == call.key_stream == ("text" if name[0] == "l" else "regions")
        assert gap(call.attention, arrays("lxmert")[f"case0/rec/{name}/attn"]) < 1e-10
        expected = arrays("lxmert").get(f"case0/pred/rec/{name}/attn_grad", np.zeros(call.attention.shape))
        assert gap(call.attention_gradient, expected) < 1e-10, name
    pairs = [(call.query_stream, call.key_stream, call.layer) for call in tape.calls]
    assert len(set(pairs)) == len(pairs)


def test_row_without_relevance_is_nan_in_authors_profile_only() -> None:
    """A masked token has no relevance, so the authors' code divides by zero."""
    inputs = given("case0") | {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}
    ex = published("lxmert")
    assert np.isnan(ex.explain(inputs, profile="mm_lxmert")["regions"].scores).all()
    assert np.isfinite(ex.explain(inputs, method="generic")["regions"].scores).all()


def test_nan_region_scores_do_not_spread_to_the_text() -> None:
    """The authors skip the attention from regions to text in the last block, whose result no output depends on."""
    ex, inputs = clearhead.load(joint_models.lxmert(layers=(2, 1, 1))), given("case0")
    inputs = {**inputs, "visual_feats": inputs["visual_feats"][..., : joint_models.FEATURES]}
    inputs["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1]])  # a row of R̂_tt is zero
    exact = {name: part.double() if part.is_floating_point() else part for name, part in inputs.items()}
    calls = replica.watch(ex.adapter.model, exact, lambda output: logits_of(output)[0, 1])
    steps = group_calls_by_step("lxmert", calls)
    expected = replica.generic(steps, {"text": 5, "regions": 4})["text", "text"][0]
    e = ex.explain(inputs, target=1, profile="mm_lxmert")
    assert np.isnan(e["regions"].scores).all()
    assert gap(e["text"].scores[1:], expected[1:]) < 1e-10 and e["text"].scores[0] == 0


@pytest.mark.parametrize("size", [1.0, 1e-20])
def test_small_relevance_is_rounded_away_in_authors_profile_only(size: float) -> None:
    """The authors add R to the identity and subtract it at the end: relevance that rounding drops next to 1 is lost."""
    ex, example = joint_models.explainer("lxmert"), joint_models.inputs("lxmert")[0]
    calls = replica.watch(
        ex.adapter.model, joint_models.model_inputs("lxmert", example), lambda output: size * logits_of(output)[0, 1]
    )
    steps = group_calls_by_step("lxmert", calls)
    lengths = {call.looks: len(call.attention[0]) for step in steps for call in step}
    expected = replica.generic(steps, lengths)["text", "regions"][0]
    target = lambda output: size * logits_of(output)[:, 1]  # noqa: E731
    assert gap(ex.explain(**example, target=target, profile="mm_lxmert")["regions"].scores, expected) < 1e-9
    ours = gap(ex.explain(**example, target=target, method="generic")["regions"].scores, expected)
    assert ours < 1e-9 if size == 1 else ours > 1e-3


# -- slow replicas


def group_calls_by_step(name: str, calls: list[replica.Look]) -> list[list[replica.Look]]:
    """Group the calls by the step that computes them, with query and key stream of each call written out by hand."""
    text, other = ("text", "text"), {"lxmert": "regions"}.get(name, "image")
    within_other, text_to_other, other_to_text = (other, other), ("text", other), (other, "text")
    towers = [("text", "text", True)], [("image", "image", True)]
    steps = {
        # two text layers, one region layer, then cross-modal layers: text to regions, back, and each to itself
        "lxmert": [
            *([text], [text], [within_other]),
            *([[text_to_other, other_to_text], [text], [within_other]] * ((len(calls) - 3) // 4)),
        ],
        # two image layers; each text layer attends to the text and to the image
        "blip": [[within_other], [within_other], *([[text], [text_to_other]] * 2)],
        # two layers of each tower, then two cross-modal layers, in which each stream attends to the input of the other
        "bridge_tower": [
            *(towers[:1] * 2),
            *(towers[1:] * 2),
            *([[text, text_to_other, within_other, other_to_text], *towers] * 2)[:-2],
        ],
    }[name]
    calls_in_order = iter(calls)
    return [
        [replica.Look(c.module, c.attention, c.gradient, *streams) for streams in step for c in [next(calls_in_order)]]
        for step in steps
    ]


def logits_of(output: Any) -> torch.Tensor:
    names = ("question_answering_score", "itm_score", "logits")
    return next(logits for logits in (getattr(output, name, None) for name in names) if logits is not None)


def get_readout_scores(name: str, matrices: Mapping[tuple[str, str], np.ndarray], stream: str) -> np.ndarray:
    """The row of the first text token; in BridgeTower its mean with the row of the first image token."""
    if name != "bridge_tower":
        return matrices["text", stream][0]
    return (matrices["text", stream][0] + matrices["image", stream][0]) / 2


@FAMILIES
def test_methods_equal_slow_replicas(name: str) -> None:
    ex, other = joint_models.explainer(name), "regions" if name == "lxmert" else "image"
    flat = Method("generic", normalise=False)
    methods = ["generic", flat, "rollout", "attention", "attention-gradcam"]
    batch = ex.explain(**joint_models.together(joint_models.inputs(name)), method=methods, target=1)
    for place, example in enumerate(joint_models.inputs(name)):
        inputs = joint_models.model_inputs(name, example)
        calls = replica.watch(ex.adapter.model, inputs, lambda output: logits_of(output)[0, 1])
        steps = group_calls_by_step(name, calls)
        lengths = {call.looks: len(call.attention[0]) for step in steps for call in step}
        last = {(call.looks, call.seen): call for step in steps for call in step}
        expected = {
            "generic": replica.generic(steps, lengths),
            str(flat): replica.generic(steps, lengths, normalise=False),
            "rollout": replica.rollout(steps, lengths),
            "attention": {pair: call.attention.mean(0) for pair, call in last.items()},
            "attention-gradcam": {pair: replica.gradcam(call) for pair, call in last.items()},
        }
        for method, matrices in expected.items():
            e = batch[method][place]
            for stream in ("text", other):
                assert gap(e[stream].scores, get_readout_scores(name, matrices, stream)) < 1e-9, method


def average_heads(call: replica.Look, fusion: str) -> replica.Look:
    """Average the heads before the clamp, as one head."""
    apart = call.attention.mean(0), call.gradient.mean(0)
    product = (call.attention * call.gradient).mean(0)
    attention, gradient = apart if fusion == "separate-means" else (product, np.ones_like(product))
    return replica.Look(call.module, attention[None], gradient[None], call.looks, call.seen)


@pytest.mark.parametrize("name", ["lxmert", "blip"])
def test_generic_head_fusion_options_equal_replica(name: str) -> None:
    ex, other = joint_models.explainer(name), "regions" if name == "lxmert" else "image"
    given = joint_models.inputs(name)[0]
    calls = replica.watch(
        ex.adapter.model, joint_models.model_inputs(name, given), lambda output: logits_of(output)[0, 1]
    )
    usual = ex.explain(**given, target=1, method="generic")
    for fusion in ("mean-clamp", "separate-means"):
        e = ex.explain(**given, method=Method("generic", fusion=fusion), target=1)
        steps = [[average_heads(call, fusion) for call in step] for step in group_calls_by_step(name, calls)]
        matrices = replica.generic(steps, {call.looks: len(call.attention[0]) for step in steps for call in step})
        for stream in ("text", other):
            assert gap(e[stream].scores, matrices["text", stream][0]) < 1e-9, fusion
        assert gap(e[other].scores, usual[other].scores) > 0.01


# -- invariants


@FAMILIES
def test_recorded_logits_equal_model_logits(name: str) -> None:
    model, _ = joint_models.MAKERS[name]()
    ex = joint_models.explainer(name)
    for example in joint_models.inputs(name):
        with torch.no_grad():
            real = logits_of(model(**joint_models.model_inputs(name, example)))
        tape = ex.record(**example, requires="attention")
        assert gap(tape.logits, real) < 1e-9


@FAMILIES
def test_batch_equals_single_in_any_order(name: str) -> None:
    ex, many = joint_models.explainer(name), joint_models.inputs(name)
    methods = list_applicable_methods(ex)
    assert {"attention", "attention-gradcam", "saliency", "input-x-gradient"} <= set(methods)
    single = [ex.explain(**example, method=methods) for example in many]
    for order in ([0, 1, 2], [2, 0, 1]):
        batch = ex.explain(**joint_models.together([many[i] for i in order]), method=methods)
        for method in methods:
            for e, i in zip(batch[method], order, strict=True):
                for part, alone in zip(e, single[i][method], strict=True):
                    assert part.tokens == alone.tokens
                    assert gap(part.scores, alone.scores) < amplified(method, 1e-9), (method, part.stream)


@FAMILIES
def test_masked_padding_does_not_change_scores(name: str) -> None:
    ex, example = joint_models.explainer(name), joint_models.inputs(name)[0]
    inputs = joint_models.model_inputs(name, example)
    pad = 1 if name == "bridge_tower" else 0
    padded = {
        key: torch.nn.functional.pad(part, (0, 2), value=pad if key == "input_ids" else 0) if part.dim() == 2 else part
        for key, part in inputs.items()
    }
    if name == "lxmert":
        padded["visual_attention_mask"] = torch.tensor([[1, 1, 1, 1, 0]])
        for key in ("visual_feats", "visual_pos"):
            padded[key] = torch.nn.functional.pad(inputs[key], (0, 0, 0, 1))
    with torch.no_grad():
        assert gap(logits_of(ex.adapter.model(**padded)), logits_of(ex.adapter.model(**inputs))) < 1e-9
    methods = list_applicable_methods(ex)
    for method, e in ex.explain(padded, method=methods).items():
        for part, other in zip(e, ex.explain(inputs, method=method), strict=True):
            assert part.tokens == other.tokens
            assert gap(part.scores, other.scores) < amplified(method, 1e-9), method


@FAMILIES
def test_model_and_tokenizer_are_unchanged(name: str) -> None:
    model, processor = joint_models.MAKERS[name]()
    tokenizer = getattr(processor, "tokenizer", processor)
    model.train()
    before = model_snapshot.of_model(model) | {"tokenizer": model_snapshot.of_processor(tokenizer)}
    ex = clearhead.load(model, processor)
    ex.explain(**joint_models.inputs(name)[0], method=list_applicable_methods(ex))
    with pytest.raises(RuntimeError, match="on purpose"):
        ex.explain(**joint_models.inputs(name)[0], method="attention-gradcam", target=raise_error)
    assert (
        model_snapshot.changes(
            before, model_snapshot.of_model(model) | {"tokenizer": model_snapshot.of_processor(tokenizer)}
        )
        == []
    )


def raise_error(output: Any) -> Any:
    raise RuntimeError("on purpose")


# -- targets and read-outs


def test_bare_encoder_requires_target_function_of_first_token() -> None:
    ex = clearhead.load(joint_models.lxmert("LxmertModel"))
    example = joint_models.inputs("lxmert")[0]
    e = ex.explain(**example, target=lambda output: output.pooled_output[:, 3], method="generic")
    assert e.certificate["readout_checked"] and e["regions"].scores.max() > 0
    with pytest.raises(UnsupportedError, match="depends on rows"):
        ex.explain(
            **example,
            target=lambda output: output.pooled_output[:, 3] + output.language_output[:, 2, 0],
            method="generic",
        )
    with pytest.raises(UnsupportedError, match="depends on rows"):  # the regions have no read-out position
        ex.explain(
            **example,
            target=lambda output: output.pooled_output[:, 3] + output.vision_output[:, 0, 0],
            method="generic",
        )
    with pytest.raises(InputError, match="no classes"):
        ex.explain(**example, method="generic")


def test_label_names_come_from_the_config() -> None:
    example = joint_models.inputs("lxmert")[0]
    assert joint_models.explainer("lxmert").explain(**example, target="answer 2", method="generic").target["index"] == 2
    names = dict(enumerate(["red", "blue", "yes", "no"]))
    ex = clearhead.load(joint_models.lxmert(id2label=names))
    assert ex.labels == names
    assert ex.explain(**example, target=clearhead.Contrast("red", "no"), method="generic").target["name"] == "red − no"


def test_matching_heads_accept_target_match() -> None:
    for name in ("blip", "bridge_tower"):
        e = joint_models.explainer(name).explain(**joint_models.inputs(name)[0], method="attention", target="match")
        assert e.target["index"] == 1 and e["image"].units.grid == (4, 4) and e["image"].tokens[0] == "[CLS]"


def test_bridge_tower_attention_sums_both_readout_rows() -> None:
    e = joint_models.explainer("bridge_tower").explain(**joint_models.inputs("bridge_tower")[0], method="attention")
    assert e["text"].scores.sum() + e["image"].scores.sum() == pytest.approx(2)


@pytest.mark.parametrize("name", ["lxmert", "blip"])
def test_methods_without_cross_attention_rule_raise(name: str) -> None:
    with pytest.raises(UnsupportedError, match="attend to each other"):
        joint_models.explainer(name).explain(**joint_models.inputs(name)[0], method="grad-sam")


@pytest.mark.parametrize(
    ("cls", "why"),
    [("BlipForQuestionAnswering", "no logits of the tokens"), ("BridgeTowerForContrastiveLearning", "compares three")],
)
def test_unsupported_classes_raise_with_reason(cls: str, why: str) -> None:
    make = joint_models.blip if cls.startswith("Blip") else joint_models.bridge_tower
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(make(cls))
    with pytest.raises(UnsupportedError, match="explain its encoder"):
        clearhead.load(joint_models.lxmert("LxmertForPreTraining"))


def test_blip_interpolates_positions_for_other_image_sizes() -> None:
    ex = joint_models.explainer("blip")
    pixels = torch.linspace(-2, 2, 3 * 24 * 40, dtype=torch.float64).sin().reshape(1, 3, 24, 40)
    inputs = {"input_ids": torch.tensor([[2, 9, 8, 3]]), "pixel_values": pixels}
    e = ex.explain(inputs, method="attention")
    assert e["image"].units.grid == (3, 5)
    with torch.no_grad():
        real = ex.adapter.model(**inputs, interpolate_pos_encoding=True).itm_score
    assert gap(ex.record(inputs, "attention").logits, real) < 1e-9


# -- regions


def test_pixel_boxes_equal_fractional_boxes() -> None:
    ex, (features, boxes) = joint_models.explainer("lxmert"), joint_models.regions(3)
    image = joint_models.make_image(size=(20, 50))
    pixels = boxes * [50, 20, 50, 20]
    from_fractions = ex.explain(text="So boring!", regions=(features, boxes), method="generic")
    for regions, image_argument in (((features, pixels, (20, 50)), {}), ((features, pixels), {"image": image})):
        from_pixels = ex.explain(text="So boring!", regions=regions, **image_argument, method="generic")
        assert gap(from_pixels["regions"].scores, from_fractions["regions"].scores) < 1e-9
        assert gap(from_pixels["regions"].units.boxes, boxes) < 1e-6
    assert (
        from_fractions["regions"].tokens == ["region 0", "region 1", "region 2"]
        and from_fractions["regions"].units.kind == "region"
    )
    assert from_fractions["regions"].image is None and np.array_equal(from_pixels["regions"].image, image)


def test_detector_extracts_regions_from_the_image() -> None:
    def detect_halves(image: Any) -> tuple[Any, Any]:
        """A toy detector: the left and the right half, with mean and deviation of the colours as features."""
        wide, high = image.size
        boxes = [[0, 0, wide // 2, high], [wide // 2, 0, wide, high]]
        parts = [np.asarray(image.crop(box), dtype=float).reshape(-1, 3) / 255 for box in boxes]
        return np.stack([np.concatenate([part.mean(0), part.std(0)]) for part in parts]), boxes

    model, tokenizer = joint_models.lxmert()
    image = joint_models.make_image(size=(16, 40))
    e = clearhead.load(model, tokenizer, detector=detect_halves).explain(
        text="So boring!", image=image, method="generic"
    )
    assert e["regions"].units.boxes == ((0, 0, 0.5, 1), (0.5, 0, 1, 1))
    assert np.array_equal(e["regions"].image, image)
    with pytest.raises(InputError, match=r"load\(…, detector=f\)"):
        clearhead.load(model, tokenizer).explain(text="So boring!", image=image, method="generic")
    with pytest.raises(InputError, match="leave out detector="):
        clearhead.load(*joint_models.blip(), detector=detect_halves)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"text": "So boring!"}, "only a text"),
        ({"regions": joint_models.regions(2)}, "only regions"),
        ({"text": "So boring!", "regions": [1]}, r"must be \(features, boxes\)"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 9, 9]])}, "in pixels"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 9, 9]], (4, 4))}, "beyond the image"),
        (
            {"text": "So boring!", "regions": ([[1.0] * 6], [[0.5, 0, 0.1, 1]])},
            "right < left or bottom < top",
        ),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 1, 1]] * 2)}, "each of the 1 regions"),
        ({"text": "So boring!", "regions": ([[1.0] * 5], [[0, 0, 1, 1]])}, "takes 6 features"),
        ({"text": "So boring!", "regions": ([[float("nan")] * 6], [[0, 0, 1, 1]])}, "not finite"),
        ({"text": "So boring!", "regions": ([1.0] * 6, [[0, 0, 1, 1]])}, "one row of numbers per region"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], None)}, "uses the positions of regions"),
        ({"text": 7, "regions": joint_models.regions(2)}, "must be a text"),
        ({"text": " ", "regions": joint_models.regions(2)}, "empty"),
        ({"inputs": "So boring!"}, "each passed by name"),
        ({"inputs": {"input_ids": [[2, 3]]}}, "must contain input_ids and visual_feats"),
        ({"inputs": {"input_ids": [[2, 3]], "visual_feats": torch.zeros(1, 2, 6)}}, "must contain visual_pos"),
        (
            {"inputs": {"input_ids": [[2]], "visual_feats": torch.zeros(1, 2, 5), "visual_pos": torch.zeros(1, 2, 4)}},
            "batch × region × 6",
        ),
        (
            {"inputs": {"input_ids": [[2]], "visual_feats": torch.zeros(1, 2, 6), "visual_pos": torch.zeros(1, 3, 4)}},
            "for each of the 2 regions",
        ),
    ],
)
def test_invalid_input_raises(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        joint_models.explainer("lxmert").explain(**given, method="generic")


def test_region_explanation_survives_save_and_load(tmp_path: Path) -> None:
    e = joint_models.explainer("lxmert").explain(
        **joint_models.inputs("lxmert")[0], image=joint_models.make_image(), method="generic"
    )
    assert clearhead.load_explanation(e.save(tmp_path / "e.safetensors")) == e
