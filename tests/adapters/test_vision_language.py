"""Image–text decoders: the picture's tokens in the text, whose pixels they are, and every word of an answer."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import GeneratedToken, InputError, UnsupportedError
from clearhead.adapters.base import InputOptions
from clearhead.methods import METHOD_REGISTRY
from tests import vision_language_models as tiny
from tests.invariants import cases, model_snapshot

KINDS = pytest.mark.parametrize("kind", tiny.KINDS)
#: One of each layout; laws that cost many passes are tried on these.
FEW = pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "qwen2", "idefics3", "pixtral"])
ANSWER = (40, 50, 60)
#: Softmax and norms are computed in float32, whatever the model's dtype.
CLOSE = 1e-6


def methods(ex: clearhead.Explainer) -> list[clearhead.Method]:
    """All that apply, with few steps: what is said here holds for any number of them."""
    return cases.with_few(line.name for line in ex.methods() if line.applies)


def same(one: Any, two: Any, tolerance: float = CLOSE) -> None:
    assert one.keys() == two.keys() != set()
    for method in one:
        for stream in one[method].streams:
            a, b = one[method][stream], two[method][stream]
            assert a.tokens == b.tokens
            size = max(np.abs(a.scores).max(), 1e-9)
            assert np.abs(a.scores - b.scores).max() <= tolerance * max(size, 1), (method, stream)
            if a.matrix is not None:
                assert np.abs(a.matrix - b.matrix).max() <= tolerance * max(size, 1), (method, stream)


# -- What is recorded is what the model does


@KINDS
def test_the_next_word_is_the_untouched_models(kind: str) -> None:
    given, ex = tiny.inputs(kind), tiny.explainer(kind)
    with torch.no_grad():
        logits = tiny.model(kind)(**tiny.called(kind, given)).logits[0, -1]
    e = ex.explain(given)
    assert e.target["index"] == int(logits.argmax())
    assert e.target["value"] == pytest.approx(float(logits.max()), abs=1e-5)
    assert e.certificate["capture_error"] < CLOSE and e.certificate["readout_checked"]
    count = int((given["input_ids"] == tiny.image_id()).sum())
    assert e.streams == ("text", "image") and len(e["image"]) == count
    assert len(e["text"]) == given["input_ids"].shape[1] - count
    assert e["text"].scores.any() and e["image"].scores.any()


@KINDS
def test_all_methods_apply_but_where_a_token_has_no_pixels(kind: str) -> None:
    lines = tiny.explainer(kind).methods()
    refused = {line.name: line.why_not for line in lines if not line.applies}
    for name in ("shap", "kernel-shap", "lime", "occlusion"):  # a picture of many patches is no input of words
        assert "(text, image) together is not supported" in refused.pop(name)
    of_pixels = {line.name for line in lines if "inputs" in METHOD_REGISTRY[line.name].declaration.requires}
    assert refused.keys() == (of_pixels if kind == "idefics2" else set())


@KINDS
def test_generated_words_are_those_of_a_loop_without_a_cache(kind: str) -> None:
    given, words = tiny.inputs(kind), []
    for _ in range(3):
        grown = tiny.answered(kind, given, words) if words else given
        with torch.no_grad():
            words.append(int(tiny.model(kind)(**tiny.called(kind, grown)).logits[0, -1].argmax()))
    e = tiny.explainer(kind).explain(given, target=GeneratedToken(), max_new_tokens=3)
    assert [step["index"] for step in e.target["steps"]] == words
    assert e["image"].matrix.shape == (3, len(e["image"])) and e["text"].matrix.shape[0] == 3


@FEW
def test_logits_of_an_answer_are_the_untouched_models(kind: str) -> None:
    given = tiny.inputs(kind)
    with torch.no_grad():
        logits = tiny.model(kind)(**tiny.called(kind, tiny.answered(kind, given, ANSWER))).logits[0]
    e = tiny.explainer(kind).explain(given, answer=ANSWER)
    row = given["input_ids"].shape[1] - 1
    expected = [float(logits[row + k, word]) for k, word in enumerate(ANSWER)]
    assert [step["value"] for step in e.target["steps"]] == pytest.approx(expected, abs=1e-5)


# -- Whose pixels a token stands for


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind != "idefics2"])
def test_a_token_stands_for_its_pixels_alone(kind: str) -> None:
    """Without attention in the tower a placeholder's vector depends on the pixels of its own square and no others."""
    model = copy.deepcopy(tiny.model(kind))
    subject = clearhead.load(model).adapter
    for name, module in model.named_modules():
        if not name.startswith(subject.decoder_module_name) and re.search(
            r"(attn|attention)\.(o_|out_)?proj(ection_layer)?$", name
        ):
            for parameter in module.parameters():
                parameter.data.zero_()
    (sample,) = subject.make_samples(tiny.inputs(kind), InputOptions())
    batch, seen = subject.collate_inputs([sample]), []
    model.get_decoder().register_forward_pre_hook(lambda m, a, k: seen.append(k["inputs_embeds"]), with_kwargs=True)
    pixels = batch["pixel_values"] = batch["pixel_values"].requires_grad_()
    model(**batch)
    units, at = sample.axes["joint"].unit_groups[1], sample.axes["joint"].indices[1]
    for k, place in enumerate(at):
        (gradient,) = torch.autograd.grad(seen[0][0, place].square().sum(), pixels, retain_graph=True)
        own = subject.image_token_layout.group_pixels_by_unit(gradient, units, 1)[0]
        found = own.abs().sum(-1).nonzero().flatten().tolist()
        assert found == ([] if units.special[k] else [k]), units.names[k]


def test_the_picture_of_rows_is_put_together_again() -> None:
    """A patch of Qwen-VL's rows has its box where its pixels are."""
    shown = tiny.picture(size=(16, 32))
    e = clearhead.load(tiny.model("qwen2"), tiny.processor("qwen2")).explain(text="Look <image> at", image=shown)
    assert e["image"].units.grid == (2, 4)
    assert np.abs(e.image.astype(int) - shown).max() <= 1


@pytest.mark.parametrize("kind", ["llava", "qwen2", "paligemma"])
def test_input_gradients_are_those_of_words_and_pixels(kind: str) -> None:
    given, model = tiny.inputs(kind), tiny.model(kind)
    exact = tiny.called(kind, given)
    exact["pixel_values"].requires_grad_()
    held: list[Any] = []

    def hold(module: Any, args: Any, output: Any) -> Any:
        held.append(output.detach().requires_grad_())
        return held[0]

    handle = model.get_input_embeddings().register_forward_hook(hold)
    value = model(**exact).logits[0, -1].max()
    handle.remove()
    words, pixels = torch.autograd.grad(value, [held[0], exact["pixel_values"]])
    e = tiny.explainer(kind).explain(given, "saliency")
    text = words[0].norm(dim=-1)[given["input_ids"][0] != tiny.image_id()]
    if kind == "qwen2":
        patches = pixels.reshape(8, -1).norm(dim=-1)
    else:
        patches = pixels[0].unfold(1, 4, 4).unfold(2, 4, 4).square().sum((0, 3, 4)).sqrt().flatten()
    assert e["text"].scores == pytest.approx(text.numpy(), rel=1e-5)
    assert e["image"].scores == pytest.approx(patches.numpy(), rel=1e-5)


# -- Generic Attention, slowly


def slow_generic(row: int, word: int, given: dict[str, torch.Tensor]) -> np.ndarray:
    """R = I; R ← R + E_h[(A ⊙ ∂y/∂A)⁺] R, layer by layer of the decoder alone; the row of the word, less identity."""
    twin = copy.deepcopy(tiny.model("llava"))
    twin.set_attn_implementation("eager")
    held: list[Any] = []
    for layer in twin.model.language_model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: held.append(output[1]))
    logits = twin(**tiny.called("llava", given)).logits
    gradients = torch.autograd.grad(logits[0, row, word], held)
    size = given["input_ids"].shape[1]
    relevance = np.eye(size)
    for attention, gradient in zip([map.detach() for map in held], gradients, strict=True):
        heads = attention.shape[1]
        mean = np.zeros((size, size))
        for head in range(heads):
            for i in range(size):
                for j in range(size):
                    mean[i, j] += max(float(attention[0, head, i, j] * gradient[0, head, i, j]), 0) / heads
        relevance = relevance + mean @ relevance
    return (relevance - np.eye(size))[row]


def test_generic_equals_a_slow_replica() -> None:
    given = tiny.inputs("llava", 1)
    whole = tiny.answered("llava", given, ANSWER)
    e = tiny.explainer("llava").explain(given, answer=ANSWER)
    holds = (whole["input_ids"][0] == tiny.image_id()).numpy()
    first = given["input_ids"].shape[1] - 1
    for step, word in enumerate(ANSWER):
        expected = slow_generic(first + step, word, whole)
        assert e["image"].matrix[step] == pytest.approx(expected[holds], rel=1e-4, abs=1e-7)
        assert e["text"].matrix[step] == pytest.approx(expected[~holds], rel=1e-4, abs=1e-7)


# -- Laws


@FEW
def test_all_steps_together_are_each_step_alone(kind: str) -> None:
    ex, given = tiny.explainer(kind), tiny.inputs(kind)
    every = ex.explain(given, methods(ex), answer=ANSWER)
    for step in range(len(ANSWER)):
        alone = ex.explain(given, methods(ex), answer=ANSWER, target=GeneratedToken(step))
        for method, e in every.items():
            for stream in e.streams:
                found, expected = e[stream].matrix[step], alone[method][stream].scores
                assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), (method, stream, step)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2", "idefics3", "pixtral"])
def test_a_step_alone_is_the_next_word_of_a_longer_prompt(kind: str) -> None:
    """Not PaliGemma's: its prompt looks at itself both ways, so a longer one is another one."""
    ex, given = tiny.explainer(kind), tiny.inputs(kind)
    one = ex.explain(given, methods(ex), answer=ANSWER, target=GeneratedToken(2))
    longer = ex.explain(tiny.answered(kind, given, ANSWER[:2]), methods(ex), target=ANSWER[2])
    for method, e in one.items():
        if e.provenance["method"] in ("gradient-shap", "smoothgrad"):
            continue  # another prompt, other random numbers
        assert e["image"].scores == pytest.approx(longer[method]["image"].scores, rel=1e-5, abs=1e-6)
        assert e["text"].scores[:-1] == pytest.approx(longer[method]["text"].scores, rel=1e-5, abs=1e-6)


@FEW
def test_batched_is_single_in_any_order(kind: str) -> None:
    """Texts of different lengths, and pictures at different places in them."""
    ex, many = tiny.explainer(kind), [tiny.inputs(kind, which) for which in range(3)]
    single = [ex.explain(one, methods(ex), answer=ANSWER) for one in many]
    for order in ([0, 1, 2], [2, 0, 1]):
        batched = ex.explain([many[i] for i in order], methods(ex), answer=ANSWER)
        for place, i in enumerate(order):
            same({m: found[place] for m, found in batched.items()}, single[i], 1e-5)


@FEW
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_around_a_prompt_is_cut_off(kind: str, side: str) -> None:
    ex, many = tiny.explainer(kind), [tiny.inputs(kind, which) for which in range(2)]
    longest = max(one["input_ids"].shape[1] for one in many)

    def filled(row: torch.Tensor, value: int) -> torch.Tensor:
        room = longest - row.shape[1]
        return torch.nn.functional.pad(row, (room, 0) if side == "left" else (0, room), value=value)

    along = [name for name in ("input_ids", "token_type_ids") if name in many[0]]
    pad = tiny.tokenizer().pad_token_id
    batch = {name: torch.cat([filled(one[name], pad if name == "input_ids" else 0) for one in many]) for name in along}
    batch["attention_mask"] = torch.cat([filled(torch.ones_like(one["input_ids"]), 0) for one in many])
    batch |= {name: torch.cat([one[name] for one in many]) for name in many[0] if name not in along}
    padded = ex.explain(batch, methods(ex))
    for i, one in enumerate(many):
        same({m: found[i] for m, found in padded.items()}, ex.explain(one, methods(ex)), 1e-5)


@FEW
def test_the_model_is_left_as_it_was(kind: str) -> None:
    model = copy.deepcopy(tiny.model(kind))
    before = model_snapshot.of_model(model)
    ex = clearhead.load(model, tiny.tokenizer())
    ex.explain(tiny.inputs(kind), methods(ex), target=GeneratedToken(), max_new_tokens=2)
    assert model_snapshot.changes(before, model_snapshot.of_model(model)) == []


def test_the_prefix_of_paligemma_looks_both_ways_and_its_answer_back() -> None:
    given, ex = tiny.inputs("paligemma"), tiny.explainer("paligemma")
    tape = ex.record(given, "attention", answer=ANSWER, target=GeneratedToken(2))
    length = given["input_ids"].shape[1]
    for call in tape.calls:
        assert call.attention is not None
        assert (call.attention[0, :, :length, :length] > 0).all()
        assert not call.attention[0, :, :length, length:].any()
        assert not call.attention[0].triu(1)[:, length:].any()


def test_only_the_decoders_calls_are_recorded() -> None:
    for kind in ("llava", "qwen2", "idefics2"):
        ex = tiny.explainer(kind)
        tape = ex.record(tiny.inputs(kind), "attention")
        assert len(tape.calls) == 3
        assert {(call.query_stream, call.key_stream) for call in tape.calls} == {("joint", "joint")}


# -- Texts and pictures as people give them


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "qwen2", "idefics3"])
def test_a_text_and_a_picture_are_what_the_processor_makes_of_them(kind: str) -> None:
    processor, shown = tiny.processor(kind), tiny.picture()
    ex = clearhead.load(tiny.model(kind), processor)
    text = {"paligemma": "<image>I like", "gemma3": "I like <boi> the"}.get(kind, "I like <image> the")
    made = processor(text=[text], images=[shown], return_tensors="pt")
    made = {
        name: part
        for name, part in made.items()
        if name in ("input_ids", "token_type_ids", *ex.adapter.image_token_layout.input_names)
    }
    if kind != "paligemma":  # the tokenizer of these tests ends every text, and a prompt is to be continued
        made = {name: part[:, :-1] if part.shape == made["input_ids"].shape else part for name, part in made.items()}
    ours, theirs = ex.explain(text=text, image=shown), ex.explain(made)
    assert ours["text"].tokens == theirs["text"].tokens
    assert ours["image"].scores == pytest.approx(theirs["image"].scores)
    assert ours.image is not None and ours["image"].heat_map().shape == ours["image"].units.grid
    assert [name for name, _ in ours.words()["text"].top(20)]


def test_paligemma_puts_the_picture_first_itself() -> None:
    ex, shown = clearhead.load(tiny.model("paligemma"), tiny.processor("paligemma")), tiny.picture()
    with_it, without = (ex.explain(text=text, image=shown) for text in ("<image>I like", "I like"))
    assert with_it["text"].tokens == without["text"].tokens
    assert with_it["text"].scores == pytest.approx(without["text"].scores)


def test_pictures_of_different_sizes_are_explained_in_one_call() -> None:
    ex = clearhead.load(tiny.model("qwen2"), tiny.processor("qwen2"))
    shown = [tiny.picture(size=size) for size in ((16, 32), (24, 16))]
    found = ex.explain(text=["I <image> like", "So <image> boring"], image=shown)
    assert [e["image"].units.grid for e in found] == [(2, 4), (3, 2)]


def test_a_folder_with_its_processor_is_opened(tmp_path: Path) -> None:
    tiny.model("llava", torch.float32).save_pretrained(tmp_path)
    tiny.processor("llava").save_pretrained(tmp_path)
    e = clearhead.load(tmp_path).explain(text="I like <image> the", image=tiny.picture(), answer=", it is")
    exact = clearhead.load(tiny.model("llava"), tiny.processor("llava"))
    twin = exact.explain(text="I like <image> the", image=tiny.picture(), answer=", it is")
    assert e["image"].matrix == pytest.approx(twin["image"].matrix, rel=1e-3, abs=1e-5)


def test_a_conversation_has_one_start_and_one_picture() -> None:
    ex, shown = clearhead.load(tiny.model("llava"), tiny.processor("llava")), tiny.picture()
    asked = [{"role": "user", "content": "I like it"}]
    placed = [{"role": "user", "content": [{"type": "image", "url": "…"}, {"type": "text", "text": "I like it"}]}]
    one, two = ex.explain(text=asked, image=shown), ex.explain(text=placed, image=shown)
    assert one["text"].tokens == two["text"].tokens
    assert one["text"].tokens.count("<s>") == 1 and "</s>" not in one["text"].tokens
    assert "".join(one["text"].tokens).endswith("said:") and len(one["image"]) == 16
    assert asked == [{"role": "user", "content": "I like it"}]
    several = ex.explain(text=asked, image=[shown, tiny.picture(1)])
    assert len(several) == 2 and several[0]["image"].scores == pytest.approx(one["image"].scores)


def test_an_answer_goes_on_where_the_prompt_ends() -> None:
    ex, shown = clearhead.load(tiny.model("llava"), tiny.processor("llava")), tiny.picture()
    e = ex.explain(text="I like <image> the movie", image=shown, answer=", it is")
    whole = tiny.tokenizer()(" the movie, it is", add_special_tokens=False)["input_ids"]
    assert [step["index"] for step in e.target["steps"]] == whole[-len(e.steps) :]
    assert e["image"].matrix.shape == (len(e.steps), 16)
    assert e.words()["text"].tokens[-3:] == [",", "it", "is"]


def test_a_contrast_and_a_word_are_about_the_next_word() -> None:
    ex, given = tiny.explainer("llava"), tiny.inputs("llava")
    a, b = (ex.explain(given, target=word).target["value"] for word in (40, 50))
    assert ex.explain(given, target=clearhead.Contrast(40, 50)).target["value"] == pytest.approx(a - b)


def test_a_function_of_the_output_is_explained() -> None:
    ex, given = tiny.explainer("qwen2"), tiny.inputs("qwen2")
    own = ex.explain(given, target=lambda output: output.logits[:, -1, 40])
    assert own["image"].scores == pytest.approx(ex.explain(given, target=40)["image"].scores)


def test_queries_of_a_perceiver_have_numbers_and_no_map() -> None:
    e = tiny.explainer("idefics2").explain(tiny.inputs("idefics2"))
    assert e["image"].tokens[:2] == ["query 0", "query 1"] and e["image"].units.boxes is None
    with pytest.raises(InputError, match="lie on no grid"):
        e["image"].heat_map()
    with pytest.raises(UnsupportedError, match="none has a place"):
        tiny.explainer("idefics2").explain(tiny.inputs("idefics2"), "saliency")


# -- What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": None}, "need input_ids and pixel_values"),
        ({"input_ids": torch.tensor([[3, 4, 5]])}, "does not say where the picture stands"),
        ({"input_ids": torch.tensor([[3, *[tiny.image_id()] * 9, 5]])}, "4 × 4 patches, but the text has 9"),
        ({"input_ids": torch.tensor([[tiny.image_id()] * 16])}, "no text beside the picture"),
        ({"input_ids": torch.tensor([3, 4, 5])}, "must be batch × token"),
        ({"pixel_values": torch.zeros(2, 3, 16, 16)}, "one picture for each of 1 texts"),
        ({"pixel_values": torch.zeros(1, 3, 20, 20)}, r"pictures of \(16, 16\) pixels"),
        ({"pixel_values": torch.zeros(1, 1, 16, 16)}, "batch × 3 × height × width"),
        ({"position_ids": torch.arange(3)[None]}, "leave out position_ids"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "leave out inputs_embeds"),
    ],
)
def test_what_is_given_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.explainer("llava").explain({**tiny.inputs("llava"), **change})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2", {"image_grid_thw": None}, "need image_grid_thw"),
        ("qwen2", {"image_grid_thw": torch.tensor([[2, 4, 4]])}, "points in time"),
        ("qwen2", {"image_grid_thw": torch.tensor([[1, 4, 4]])}, "patch × number"),
        ("idefics3", {"pixel_values": torch.ones(1, 3, 3, 16, 16)}, "do_image_splitting"),
        ("idefics3", {"pixel_values": torch.zeros(1, 1, 3, 16, 16)}, "zero everywhere"),
        ("pixtral", {"image_sizes": None}, "need image_sizes"),
        ("paligemma", {"token_type_ids": None}, "need token_type_ids"),
        ("internvl", {"pixel_values": torch.ones(3, 3, 16, 16)}, "crop_to_patches"),
    ],
)
def test_each_layout_checks_its_picture(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.explainer(kind).explain({**tiny.inputs(kind), **change})


def test_both_are_asked_for() -> None:
    ex = clearhead.load(tiny.model("llava"), tiny.processor("llava"))
    for given in ({"text": "I like <image>"}, {"image": tiny.picture()}, {"inputs": "I like"}):
        with pytest.raises(InputError, match="a text and a picture, each by name"):
            ex.explain(**given)
    with pytest.raises(InputError, match=r"where the picture stands.*<image>"):
        ex.explain(text="I like", image=tiny.picture())
    with pytest.raises(InputError, match="came without a processor"):
        tiny.explainer("llava").explain(text="I like <image>", image=tiny.picture())
    with pytest.raises(InputError, match="not truncated"):
        ex.explain(text="I like <image>", image=tiny.picture(), max_length=5)
    with pytest.raises(InputError, match="stands for a picture"):
        ex.explain(text="I like <image>", image=tiny.picture(), answer=(tiny.image_id(),))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("LlavaNext", "tiles"), ("Mllama", "cross-attention"), ("Blip2", "Q-Former"), ("Emu3", "code book")],
)
def test_other_layouts_are_refused_with_the_reason(name: str, reason: str) -> None:
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    bare = cls.__new__(cls)  # it is refused by its class, before anything of it is looked at
    torch.nn.Module.__init__(bare)
    bare.config, bare.weight = transformers.PretrainedConfig(), torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match=reason):
        clearhead.load(bare)
