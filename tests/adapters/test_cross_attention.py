"""Models whose streams look at each other: LXMERT against its authors' numbers, and LXMERT, BLIP and BridgeTower
against slow twins and the laws."""

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
#: The authors' name of each method, and ours with its options.
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


def applying(ex: clearhead.Explainer) -> list[str]:
    """Those that ask for hundreds of passes are in test_hiding_streams.py, where they are given fewer."""
    many = ("shap", "kernel-shap", "lime")
    return [line.name for line in ex.methods() if line.applies and line.name not in many]


# -- LXMERT, as its authors have it


@cache
def arrays(model: str) -> dict[str, np.ndarray]:
    with np.load(DATA / model / "arrays.npz") as file:
        return {key.removeprefix(f"{model}/cases/"): file[key] for key in file.files}


@cache
def published(model: str) -> clearhead.Explainer:
    folder = DATA / model
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["hf_class"])
    made = cls.from_pretrained(
        None,
        config=cls.config_class.from_pretrained(folder),
        state_dict=load_file(folder / "weights.safetensors"),
        dtype=torch.float64,
    )
    return clearhead.load(made.eval())


def given(case: str) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "visual_feats", "visual_pos")
    return {name: torch.as_tensor(arrays("lxmert")[f"{case}/{name}"]) for name in names}


@pytest.mark.parametrize("model", ["lxmert", "visual_bert"])
def test_copies_are_the_originals(model: str) -> None:
    if not ORIGINALS.is_dir():
        pytest.skip(f"{ORIGINALS} is absent: only the copies are here")
    for name in ("config.json", "weights.safetensors"):
        assert (DATA / model / name).read_bytes() == (ORIGINALS / model / name).read_bytes()
    with np.load(ORIGINALS / model / "cases.npz") as file:
        for key, copied in arrays(model).items():
            np.testing.assert_array_equal(copied, file[key], err_msg=key)


@CASES
@pytest.mark.parametrize("theirs", METHODS)
def test_lxmert_gives_the_authors_scores(case: str, which: str, theirs: str) -> None:
    index = int(arrays("lxmert")[f"{case}/{which}/target"])
    target = None if which == "pred" else index
    e = published("lxmert").explain(given(case), METHODS[theirs], target=target, profile="mm_lxmert")
    assert e.target["index"] == index
    for stream, matrix in (("text", "R_t_t"), ("regions", "R_t_i")):
        assert gap(e[stream].scores, arrays("lxmert")[f"{case}/{which}/{theirs}/{matrix}"][0]) < 1e-10


def test_both_cases_in_one_padded_batch_give_the_authors_scores() -> None:
    """Rows of padding are zero, and would make NaN of everything if the authors' division saw them."""
    both = published("lxmert").explain([given("case0"), given("case1")], "generic", profile="mm_lxmert")
    for case, e in zip(("case0", "case1"), both, strict=True):
        for stream, matrix in (("text", "R_t_t"), ("regions", "R_t_i")):
            assert gap(e[stream].scores, arrays("lxmert")[f"{case}/pred/ours/{matrix}"][0]) < 1e-10


def test_the_calls_of_one_shared_module_are_told_apart() -> None:
    index = int(arrays("lxmert")["case0/pred/target"])
    tape = published("lxmert").record(given("case0"), ("attention", "attention_gradient"), target=index)
    short = {"text": "t", "regions": "i"}
    names = ["l0", "l1", "r0", "r1", *(f"x{k}_{way}" for k in range(3) for way in ("t_i", "i_t", "t_t", "i_i"))]
    assert len(tape.calls) == len(names)
    for name, call in zip(names, tape.calls, strict=True):
        if name[0] == "x":
            assert name[3:] == f"{short[call.query_stream]}_{short[call.key_stream]}"
        else:
            assert call.query_stream == call.key_stream == ("text" if name[0] == "l" else "regions")
        assert gap(call.attention, arrays("lxmert")[f"case0/rec/{name}/attn"]) < 1e-10
        expected = arrays("lxmert").get(f"case0/pred/rec/{name}/attn_grad", np.zeros(call.attention.shape))
        assert gap(call.attention_gradient, expected) < 1e-10, name
    pairs = [(call.query_stream, call.key_stream, call.layer) for call in tape.calls]
    assert len(set(pairs)) == len(pairs)


def test_a_row_without_relevance_is_nan_to_the_authors_and_nothing_to_us() -> None:
    """A word that is hidden has no relevance, so the authors divide by zero."""
    inputs = given("case0") | {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}
    ex = published("lxmert")
    assert np.isnan(ex.explain(inputs, profile="mm_lxmert")["regions"].scores).all()
    assert np.isfinite(ex.explain(inputs)["regions"].scores).all()


def test_what_no_row_reads_may_be_nan() -> None:
    """Authors leave out what the regions see of the text in the last block: there, nothing reads it any more."""
    ex, inputs = clearhead.load(joint_models.lxmert(layers=(2, 1, 1))), given("case0")
    inputs = {**inputs, "visual_feats": inputs["visual_feats"][..., : joint_models.FEATURES]}
    inputs["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1]])  # a row of R̂_tt is zero
    exact = {name: part.double() if part.is_floating_point() else part for name, part in inputs.items()}
    looks = replica.watch(ex.adapter.model, exact, lambda output: logits_of(output)[0, 1])
    steps = steps_of("lxmert", looks)
    expected = replica.generic(steps, {"text": 5, "regions": 4})["text", "text"][0]
    e = ex.explain(inputs, target=1, profile="mm_lxmert")
    assert np.isnan(e["regions"].scores).all()
    assert gap(e["text"].scores[1:], expected[1:]) < 1e-10 and e["text"].scores[0] == 0


@pytest.mark.parametrize("size", [1.0, 1e-20])
def test_what_is_lost_beside_the_identity_is_lost_to_the_authors_alone(size: float) -> None:
    """They gather R and subtract the identity: what rounding has taken from its diagonal stays away."""
    ex, one = joint_models.explainer("lxmert"), joint_models.inputs("lxmert")[0]
    looks = replica.watch(
        ex.adapter.model, joint_models.model_inputs("lxmert", one), lambda output: size * logits_of(output)[0, 1]
    )
    steps = steps_of("lxmert", looks)
    lengths = {look.looks: len(look.attention[0]) for step in steps for look in step}
    expected = replica.generic(steps, lengths)["text", "regions"][0]
    target = lambda output: size * logits_of(output)[:, 1]  # noqa: E731
    assert gap(ex.explain(**one, target=target, profile="mm_lxmert")["regions"].scores, expected) < 1e-9
    ours = gap(ex.explain(**one, target=target)["regions"].scores, expected)
    assert ours < 1e-9 if size == 1 else ours > 1e-3


# -- slow twins


def steps_of(name: str, looks: list[replica.Look]) -> list[list[replica.Look]]:
    """Whose queries look at whose keys in each call, said by hand, and what happens at once."""
    text, other = ("text", "text"), {"lxmert": "regions"}.get(name, "image")
    own, there, back = (other, other), ("text", other), (other, "text")
    towers = [("text", "text", True)], [("image", "image", True)]
    ways = {
        # two layers of language, one of regions, then those in which they meet: over, back, and each at itself
        "lxmert": [[text], [text], [own], *([[there, back], [text], [own]] * ((len(looks) - 3) // 4))],
        # two layers of the picture; in each of the text, at itself and at the picture
        "blip": [[own], [own], *([[text], [there]] * 2)],
        # two layers of each tower; a layer of both, in which each looks at what goes into the other's half; once more
        "bridge_tower": [
            *(towers[:1] * 2),
            *(towers[1:] * 2),
            *([[text, there, own, back], *towers] * 2)[:-2],
        ],
    }[name]
    waiting = iter(looks)
    return [
        [replica.Look(one.module, one.attention, one.gradient, *way) for way in step for one in [next(waiting)]]
        for step in ways
    ]


def logits_of(output: Any) -> torch.Tensor:
    names = ("question_answering_score", "itm_score", "logits")
    return next(part for part in (getattr(output, name, None) for name in names) if part is not None)


def read(name: str, matrices: Mapping[tuple[str, str], np.ndarray], stream: str) -> np.ndarray:
    """The first row of the text; in BridgeTower half of it, and half of the picture's."""
    if name != "bridge_tower":
        return matrices["text", stream][0]
    return (matrices["text", stream][0] + matrices["image", stream][0]) / 2


@FAMILIES
def test_methods_are_their_slow_twins(name: str) -> None:
    ex, other = joint_models.explainer(name), "regions" if name == "lxmert" else "image"
    flat = Method("generic", normalise=False)
    methods = ["generic", flat, "rollout", "attention", "attention-gradcam"]
    batch = ex.explain(**joint_models.together(joint_models.inputs(name)), method=methods, target=1)
    for place, one in enumerate(joint_models.inputs(name)):
        inputs = joint_models.model_inputs(name, one)
        looks = replica.watch(ex.adapter.model, inputs, lambda output: logits_of(output)[0, 1])
        steps = steps_of(name, looks)
        lengths = {look.looks: len(look.attention[0]) for step in steps for look in step}
        last = {(look.looks, look.seen): look for step in steps for look in step}
        expected = {
            "generic": replica.generic(steps, lengths),
            str(flat): replica.generic(steps, lengths, normalise=False),
            "rollout": replica.rollout(steps, lengths),
            "attention": {pair: look.attention.mean(0) for pair, look in last.items()},
            "attention-gradcam": {pair: replica.gradcam(look) for pair, look in last.items()},
        }
        for method, matrices in expected.items():
            e = batch[method][place]
            for stream in ("text", other):
                assert gap(e[stream].scores, read(name, matrices, stream)) < 1e-9, method


def joined(look: replica.Look, fusion: str) -> replica.Look:
    """Heads joined before the clamp, as one head."""
    apart = look.attention.mean(0), look.gradient.mean(0)
    product = (look.attention * look.gradient).mean(0)
    attention, gradient = apart if fusion == "separate-means" else (product, np.ones_like(product))
    return replica.Look(look.module, attention[None], gradient[None], look.looks, look.seen)


@pytest.mark.parametrize("name", ["lxmert", "blip"])
def test_heads_joined_in_another_order(name: str) -> None:
    ex, other = joint_models.explainer(name), "regions" if name == "lxmert" else "image"
    given = joint_models.inputs(name)[0]
    looks = replica.watch(
        ex.adapter.model, joint_models.model_inputs(name, given), lambda output: logits_of(output)[0, 1]
    )
    usual = ex.explain(**given, target=1)
    for fusion in ("mean-clamp", "separate-means"):
        e = ex.explain(**given, method=Method("generic", fusion=fusion), target=1)
        steps = [[joined(look, fusion) for look in step] for step in steps_of(name, looks)]
        matrices = replica.generic(steps, {look.looks: len(look.attention[0]) for step in steps for look in step})
        for stream in ("text", other):
            assert gap(e[stream].scores, matrices["text", stream][0]) < 1e-9, fusion
        assert gap(e[other].scores, usual[other].scores) > 0.01


# -- the laws


@FAMILIES
def test_recorded_logits_are_the_models_own(name: str) -> None:
    model, _ = joint_models.MAKERS[name]()
    ex = joint_models.explainer(name)
    for one in joint_models.inputs(name):
        with torch.no_grad():
            real = logits_of(model(**joint_models.model_inputs(name, one)))
        tape = ex.record(**one, requires="attention")
        assert gap(tape.logits, real) < 1e-9


@FAMILIES
def test_batched_is_single_in_any_order(name: str) -> None:
    ex, many = joint_models.explainer(name), joint_models.inputs(name)
    methods = applying(ex)
    assert {"attention", "attention-gradcam", "saliency", "input-x-gradient"} <= set(methods)
    single = [ex.explain(**one, method=methods) for one in many]
    for order in ([0, 1, 2], [2, 0, 1]):
        batch = ex.explain(**joint_models.together([many[i] for i in order]), method=methods)
        for method in methods:
            for e, i in zip(batch[method], order, strict=True):
                for part, alone in zip(e, single[i][method], strict=True):
                    assert part.tokens == alone.tokens
                    assert gap(part.scores, alone.scores) < amplified(method, 1e-9), (method, part.stream)


@FAMILIES
def test_padding_that_was_given_changes_nothing(name: str) -> None:
    ex, one = joint_models.explainer(name), joint_models.inputs(name)[0]
    inputs = joint_models.model_inputs(name, one)
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
    methods = applying(ex)
    for method, e in ex.explain(padded, method=methods).items():
        for part, other in zip(e, ex.explain(inputs, method=method), strict=True):
            assert part.tokens == other.tokens
            assert gap(part.scores, other.scores) < amplified(method, 1e-9), method


@FAMILIES
def test_the_users_model_is_untouched(name: str) -> None:
    model, processor = joint_models.MAKERS[name]()
    tokenizer = getattr(processor, "tokenizer", processor)
    model.train()
    before = model_snapshot.of_model(model) | {"tokenizer": model_snapshot.of_processor(tokenizer)}
    ex = clearhead.load(model, processor)
    ex.explain(**joint_models.inputs(name)[0], method=applying(ex))
    with pytest.raises(RuntimeError, match="on purpose"):
        ex.explain(**joint_models.inputs(name)[0], method="attention-gradcam", target=_raises)
    assert (
        model_snapshot.changes(
            before, model_snapshot.of_model(model) | {"tokenizer": model_snapshot.of_processor(tokenizer)}
        )
        == []
    )


def _raises(output: Any) -> Any:
    raise RuntimeError("on purpose")


# -- targets and read-outs


def test_an_encoder_takes_a_function_that_reads_the_first_token() -> None:
    ex = clearhead.load(joint_models.lxmert("LxmertModel"))
    one = joint_models.inputs("lxmert")[0]
    e = ex.explain(**one, target=lambda output: output.pooled_output[:, 3])
    assert e.certificate["readout_checked"] and e["regions"].scores.max() > 0
    with pytest.raises(UnsupportedError, match="depends on rows"):
        ex.explain(**one, target=lambda output: output.pooled_output[:, 3] + output.language_output[:, 2, 0])
    with pytest.raises(UnsupportedError, match="depends on rows"):  # no row of the regions is read
        ex.explain(**one, target=lambda output: output.pooled_output[:, 3] + output.vision_output[:, 0, 0])
    with pytest.raises(InputError, match="no classes"):
        ex.explain(**one)


def test_answers_are_named_where_the_configuration_names_them() -> None:
    one = joint_models.inputs("lxmert")[0]
    assert joint_models.explainer("lxmert").explain(**one, target="answer 2").target["index"] == 2
    names = dict(enumerate(["red", "blue", "yes", "no"]))
    ex = clearhead.load(joint_models.lxmert(id2label=names))
    assert ex.labels == names
    assert ex.explain(**one, target=clearhead.Contrast("red", "no")).target["name"] == "red − no"


def test_matching_heads_say_match_or_not() -> None:
    for name in ("blip", "bridge_tower"):
        e = joint_models.explainer(name).explain(**joint_models.inputs(name)[0], method="attention", target="match")
        assert e.target["index"] == 1 and e["image"].units.grid == (4, 4) and e["image"].tokens[0] == "[CLS]"


def test_raw_attention_of_bridge_tower_is_that_of_both_rows_that_are_read() -> None:
    e = joint_models.explainer("bridge_tower").explain(**joint_models.inputs("bridge_tower")[0], method="attention")
    assert e["text"].scores.sum() + e["image"].scores.sum() == pytest.approx(2)


@pytest.mark.parametrize("name", ["lxmert", "blip"])
def test_methods_without_a_rule_for_streams_refuse(name: str) -> None:
    with pytest.raises(UnsupportedError, match="streams look at each other"):
        joint_models.explainer(name).explain(**joint_models.inputs(name)[0], method="grad-sam")


@pytest.mark.parametrize(
    ("cls", "why"),
    [("BlipForQuestionAnswering", "no scores of the words"), ("BridgeTowerForContrastiveLearning", "compares three")],
)
def test_classes_that_are_not_explained_say_why(cls: str, why: str) -> None:
    make = joint_models.blip if cls.startswith("Blip") else joint_models.bridge_tower
    with pytest.raises(UnsupportedError, match=why):
        clearhead.load(make(cls))
    with pytest.raises(UnsupportedError, match="explain its encoder"):
        clearhead.load(joint_models.lxmert("LxmertForPreTraining"))


def test_a_picture_of_another_size_reads_positions_in_between() -> None:
    ex = joint_models.explainer("blip")
    pixels = torch.linspace(-2, 2, 3 * 24 * 40, dtype=torch.float64).sin().reshape(1, 3, 24, 40)
    inputs = {"input_ids": torch.tensor([[2, 9, 8, 3]]), "pixel_values": pixels}
    e = ex.explain(inputs, method="attention")
    assert e["image"].units.grid == (3, 5)
    with torch.no_grad():
        real = ex.adapter.model(**inputs, interpolate_pos_encoding=True).itm_score
    assert gap(ex.record(inputs, "attention").logits, real) < 1e-9


# -- regions


def test_boxes_in_pixels_and_as_fractions_are_the_same() -> None:
    ex, (features, boxes) = joint_models.explainer("lxmert"), joint_models.regions(3)
    picture = joint_models.picture(size=(20, 50))
    pixels = boxes * [50, 20, 50, 20]
    one = ex.explain(text="So boring!", regions=(features, boxes))
    for regions, more in (((features, pixels, (20, 50)), {}), ((features, pixels), {"image": picture})):
        other = ex.explain(text="So boring!", regions=regions, **more)
        assert gap(other["regions"].scores, one["regions"].scores) < 1e-9
        assert gap(other["regions"].units.boxes, boxes) < 1e-6
    assert one["regions"].tokens == ["region 0", "region 1", "region 2"] and one["regions"].units.kind == "region"
    assert one["regions"].image is None and np.array_equal(other["regions"].image, picture)


def test_a_detector_makes_regions_of_a_picture() -> None:
    def halves(picture: Any) -> tuple[Any, Any]:
        """A toy: the left and the right half, told by their mean colours."""
        wide, high = picture.size
        boxes = [[0, 0, wide // 2, high], [wide // 2, 0, wide, high]]
        parts = [np.asarray(picture.crop(box), dtype=float).reshape(-1, 3) / 255 for box in boxes]
        return np.stack([np.concatenate([part.mean(0), part.std(0)]) for part in parts]), boxes

    model, tokenizer = joint_models.lxmert()
    picture = joint_models.picture(size=(16, 40))
    e = clearhead.load(model, tokenizer, detector=halves).explain(text="So boring!", image=picture)
    assert e["regions"].units.boxes == ((0, 0, 0.5, 1), (0.5, 0, 1, 1))
    assert np.array_equal(e["regions"].image, picture)
    with pytest.raises(InputError, match=r"load\(…, detector=f\)"):
        clearhead.load(model, tokenizer).explain(text="So boring!", image=picture)
    with pytest.raises(InputError, match="leave out detector="):
        clearhead.load(*joint_models.blip(), detector=halves)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"text": "So boring!"}, "a text alone"),
        ({"regions": joint_models.regions(2)}, "only regions"),
        ({"text": "So boring!", "regions": [1]}, r"must be \(features, boxes\)"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 9, 9]])}, "in pixels"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 9, 9]], (4, 4))}, "beyond the picture"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0.5, 0, 0.1, 1]])}, "end before they begin"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], [[0, 0, 1, 1]] * 2)}, "each of the 1 regions"),
        ({"text": "So boring!", "regions": ([[1.0] * 5], [[0, 0, 1, 1]])}, "takes 6 features"),
        ({"text": "So boring!", "regions": ([[float("nan")] * 6], [[0, 0, 1, 1]])}, "not finite"),
        ({"text": "So boring!", "regions": ([1.0] * 6, [[0, 0, 1, 1]])}, "region × number"),
        ({"text": "So boring!", "regions": ([[1.0] * 6], None)}, "reads where regions lie"),
        ({"text": 7, "regions": joint_models.regions(2)}, "must be a text"),
        ({"text": " ", "regions": joint_models.regions(2)}, "empty"),
        ({"inputs": "So boring!"}, "each by name"),
        ({"inputs": {"input_ids": [[2, 3]]}}, "need input_ids and visual_feats"),
        ({"inputs": {"input_ids": [[2, 3]], "visual_feats": torch.zeros(1, 2, 6)}}, "need visual_pos"),
        (
            {"inputs": {"input_ids": [[2]], "visual_feats": torch.zeros(1, 2, 5), "visual_pos": torch.zeros(1, 2, 4)}},
            "batch × region × 6",
        ),
        (
            {"inputs": {"input_ids": [[2]], "visual_feats": torch.zeros(1, 2, 6), "visual_pos": torch.zeros(1, 3, 4)}},
            "must have the 2 regions",
        ),
    ],
)
def test_bad_input_gives_one_clear_message(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        joint_models.explainer("lxmert").explain(**given)


def test_a_saved_explanation_of_regions_opens_again(tmp_path: Path) -> None:
    e = joint_models.explainer("lxmert").explain(**joint_models.inputs("lxmert")[0], image=joint_models.picture())
    assert clearhead.load_explanation(e.save(tmp_path / "e.safetensors")) == e
