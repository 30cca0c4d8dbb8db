"""Image–text decoders: image tokens in the text, the pixels of each of them, and every token of a continuation."""

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
#: One kind of each layout, for tests that need many passes.
FEW = pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "qwen2", "idefics3", "pixtral"])
CONTINUATION = (40, 50, 60)
#: Softmax and norms are computed in float32 in any dtype.
TOLERANCE = 1e-6


def list_methods(ex: clearhead.Explainer) -> list[clearhead.Method]:
    """The methods that apply, with few steps: these tests hold for any number of steps."""
    return cases.with_few(line.name for line in ex.methods() if line.applies)


def assert_equal(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    assert actual.keys() == expected.keys() != set()
    for method in actual:
        for stream in actual[method].streams:
            a, b = actual[method][stream], expected[method][stream]
            assert a.tokens == b.tokens
            size = max(np.abs(a.scores).max(), 1e-9)
            assert np.abs(a.scores - b.scores).max() <= tolerance * max(size, 1), (method, stream)
            if a.matrix is not None:
                assert np.abs(a.matrix - b.matrix).max() <= tolerance * max(size, 1), (method, stream)


# -- Recorded passes equal the model


@KINDS
def test_next_token_equals_model_output(kind: str) -> None:
    model_inputs, ex = tiny.inputs(kind), tiny.explainer(kind)
    with torch.no_grad():
        logits = tiny.model(kind)(**tiny.prepare_model_inputs(kind, model_inputs)).logits[0, -1]
    e = ex.explain(model_inputs, method="generic")
    assert e.target["index"] == int(logits.argmax())
    assert e.target["value"] == pytest.approx(float(logits.max()), abs=1e-5)
    assert e.certificate["capture_error"] < TOLERANCE and e.certificate["readout_checked"]
    count = int((model_inputs["input_ids"] == tiny.get_image_token_id()).sum())
    assert e.streams == ("text", "image") and len(e["image"]) == count
    assert len(e["text"]) == model_inputs["input_ids"].shape[1] - count
    assert e["text"].scores.any() and e["image"].scores.any()


@KINDS
def test_methods_apply_except_perturbation_and_unmapped_pixels(kind: str) -> None:
    lines = tiny.explainer(kind).methods()
    rejected = {line.name: line.why_not for line in lines if not line.applies}
    # image patches cannot be removed like words
    for name in ("shap", "kernel-shap", "calibrated", "lime", "occlusion"):
        assert "(text, image) together is not supported" in rejected.pop(name)
    if kind != "idefics2":
        assert "there are several inputs (input_ids, pixel_values), and position embeddings cannot" in rejected.pop(
            "pa-lrp"
        )
    of_pixels = {line.name for line in lines if "inputs" in METHOD_REGISTRY[line.name].declaration.requires}
    assert rejected.keys() == (of_pixels if kind == "idefics2" else set())


@KINDS
def test_generation_equals_greedy_loop_without_kv_cache(kind: str) -> None:
    model_inputs, token_ids = tiny.inputs(kind), []
    for _ in range(3):
        extended = tiny.append_tokens(kind, model_inputs, token_ids) if token_ids else model_inputs
        with torch.no_grad():
            token_ids.append(int(tiny.model(kind)(**tiny.prepare_model_inputs(kind, extended)).logits[0, -1].argmax()))
    e = tiny.explainer(kind).explain(model_inputs, target=GeneratedToken(), max_new_tokens=3, method="generic")
    assert [step["index"] for step in e.target["steps"]] == token_ids
    assert e["image"].matrix.shape == (3, len(e["image"])) and e["text"].matrix.shape[0] == 3


@FEW
def test_continuation_logits_equal_model_logits(kind: str) -> None:
    model_inputs = tiny.inputs(kind)
    with torch.no_grad():
        logits = tiny.model(kind)(
            **tiny.prepare_model_inputs(kind, tiny.append_tokens(kind, model_inputs, CONTINUATION))
        ).logits[0]
    e = tiny.explainer(kind).explain(model_inputs, answer=CONTINUATION, method="generic")
    row = model_inputs["input_ids"].shape[1] - 1
    expected = [float(logits[row + k, token_id]) for k, token_id in enumerate(CONTINUATION)]
    assert [step["value"] for step in e.target["steps"]] == pytest.approx(expected, abs=1e-5)


# -- Pixels of the image tokens


@pytest.mark.parametrize("kind", [kind for kind in tiny.KINDS if kind != "idefics2"])
def test_image_token_depends_only_on_its_pixels(kind: str) -> None:
    """Without attention in the tower, the vector of an image token depends on the pixels of its patch alone."""
    model = copy.deepcopy(tiny.model(kind))
    adapter = clearhead.load(model).adapter
    for name, module in model.named_modules():
        if not name.startswith(adapter.decoder_module_name) and re.search(
            r"(attn|attention)\.(o_|out_)?proj(ection_layer)?$", name
        ):
            for parameter in module.parameters():
                parameter.data.zero_()
    (sample,) = adapter.make_samples(tiny.inputs(kind), InputOptions())
    batch, embeddings = adapter.collate_inputs([sample]), []
    model.get_decoder().register_forward_pre_hook(
        lambda m, a, k: embeddings.append(k["inputs_embeds"]), with_kwargs=True
    )
    pixels = batch["pixel_values"] = batch["pixel_values"].requires_grad_()
    model(**batch)
    units, positions = sample.axes["joint"].unit_groups[1], sample.axes["joint"].indices[1]
    for k, position in enumerate(positions):
        (gradient,) = torch.autograd.grad(embeddings[0][0, position].square().sum(), pixels, retain_graph=True)
        by_unit = adapter.image_token_layout.group_pixels_by_unit(gradient, units, 1)[0]
        units_with_gradient = by_unit.abs().sum(-1).nonzero().flatten().tolist()
        assert units_with_gradient == ([] if units.special[k] else [k]), units.names[k]


def test_image_is_reconstructed_from_patch_rows() -> None:
    """The patch rows of Qwen-VL are arranged by the position of their pixels."""
    image = tiny.make_image(size=(16, 32))
    e = clearhead.load(tiny.model("qwen2"), tiny.processor("qwen2")).explain(
        text="Look <image> at", image=image, method="generic"
    )
    assert e["image"].units.grid == (2, 4)
    assert np.abs(e.image.astype(int) - image).max() <= 1


@pytest.mark.parametrize("kind", ["llava", "qwen2", "paligemma"])
def test_saliency_equals_embedding_and_pixel_gradients(kind: str) -> None:
    model_inputs, model = tiny.inputs(kind), tiny.model(kind)
    float64_inputs = tiny.prepare_model_inputs(kind, model_inputs)
    float64_inputs["pixel_values"].requires_grad_()
    leaves: list[Any] = []

    def make_leaf(module: Any, args: Any, output: Any) -> Any:
        leaves.append(output.detach().requires_grad_())
        return leaves[0]

    handle = model.get_input_embeddings().register_forward_hook(make_leaf)
    value = model(**float64_inputs).logits[0, -1].max()
    handle.remove()
    text_gradient, pixel_gradient = torch.autograd.grad(value, [leaves[0], float64_inputs["pixel_values"]])
    e = tiny.explainer(kind).explain(model_inputs, "saliency")
    text = text_gradient[0].norm(dim=-1)[model_inputs["input_ids"][0] != tiny.get_image_token_id()]
    if kind == "qwen2":
        patches = pixel_gradient.reshape(8, -1).norm(dim=-1)
    else:
        patches = pixel_gradient[0].unfold(1, 4, 4).unfold(2, 4, 4).square().sum((0, 3, 4)).sqrt().flatten()
    assert e["text"].scores == pytest.approx(text.numpy(), rel=1e-5)
    assert e["image"].scores == pytest.approx(patches.numpy(), rel=1e-5)


# -- Slow replica of Generic Attention


def compute_generic_replica(row: int, token_id: int, model_inputs: dict[str, torch.Tensor]) -> np.ndarray:
    """R = I; R ← R + E_h[(A ⊙ ∂y/∂A)⁺] R over the layers of the decoder; the row of the token without the identity."""
    eager_model = copy.deepcopy(tiny.model("llava"))
    eager_model.set_attn_implementation("eager")
    attention_maps: list[Any] = []
    for layer in eager_model.model.language_model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: attention_maps.append(output[1]))
    logits = eager_model(**tiny.prepare_model_inputs("llava", model_inputs)).logits
    gradients = torch.autograd.grad(logits[0, row, token_id], attention_maps)
    size = model_inputs["input_ids"].shape[1]
    relevance = np.eye(size)
    for attention, gradient in zip(
        [attention_map.detach() for attention_map in attention_maps], gradients, strict=True
    ):
        heads = attention.shape[1]
        mean = np.zeros((size, size))
        for head in range(heads):
            for i in range(size):
                for j in range(size):
                    mean[i, j] += max(float(attention[0, head, i, j] * gradient[0, head, i, j]), 0) / heads
        relevance = relevance + mean @ relevance
    return (relevance - np.eye(size))[row]


def test_generic_equals_slow_replica() -> None:
    model_inputs = tiny.inputs("llava", 1)
    extended = tiny.append_tokens("llava", model_inputs, CONTINUATION)
    e = tiny.explainer("llava").explain(model_inputs, answer=CONTINUATION, method="generic")
    is_image_token = (extended["input_ids"][0] == tiny.get_image_token_id()).numpy()
    first = model_inputs["input_ids"].shape[1] - 1
    for step, token_id in enumerate(CONTINUATION):
        expected = compute_generic_replica(first + step, token_id, extended)
        assert e["image"].matrix[step] == pytest.approx(expected[is_image_token], rel=1e-4, abs=1e-7)
        assert e["text"].matrix[step] == pytest.approx(expected[~is_image_token], rel=1e-4, abs=1e-7)


# -- Invariants


@FEW
def test_batched_steps_equal_single_steps(kind: str) -> None:
    ex, model_inputs = tiny.explainer(kind), tiny.inputs(kind)
    batched = ex.explain(model_inputs, list_methods(ex), answer=CONTINUATION)
    for step in range(len(CONTINUATION)):
        alone = ex.explain(model_inputs, list_methods(ex), answer=CONTINUATION, target=GeneratedToken(step))
        for method, e in batched.items():
            for stream in e.streams:
                actual, expected = e[stream].matrix[step], alone[method][stream].scores
                assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6), (method, stream, step)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2", "idefics3", "pixtral"])
def test_step_equals_next_token_of_longer_prompt(kind: str) -> None:
    """Without PaliGemma: its prompt has bidirectional attention, so a longer prompt changes all of its states."""
    ex, model_inputs = tiny.explainer(kind), tiny.inputs(kind)
    single_step = ex.explain(model_inputs, list_methods(ex), answer=CONTINUATION, target=GeneratedToken(2))
    longer = ex.explain(
        tiny.append_tokens(kind, model_inputs, CONTINUATION[:2]), list_methods(ex), target=CONTINUATION[2]
    )
    for method, e in single_step.items():
        if e.provenance["method"] in ("gradient-shap", "smoothgrad"):
            continue  # their random numbers depend on the prompt
        assert e["image"].scores == pytest.approx(longer[method]["image"].scores, rel=1e-5, abs=1e-6)
        assert e["text"].scores[:-1] == pytest.approx(longer[method]["text"].scores, rel=1e-5, abs=1e-6)


@FEW
def test_batch_equals_single_in_any_order(kind: str) -> None:
    """Texts of different lengths, with images at different positions."""
    ex, examples = tiny.explainer(kind), [tiny.inputs(kind, which) for which in range(3)]
    single = [ex.explain(example, list_methods(ex), answer=CONTINUATION) for example in examples]
    for order in ([0, 1, 2], [2, 0, 1]):
        batched = ex.explain([examples[i] for i in order], list_methods(ex), answer=CONTINUATION)
        for index, i in enumerate(order):
            assert_equal({m: explanations[index] for m, explanations in batched.items()}, single[i], 1e-5)


@FEW
@pytest.mark.parametrize("side", ["left", "right"])
def test_masked_padding_is_removed(kind: str, side: str) -> None:
    ex, examples = tiny.explainer(kind), [tiny.inputs(kind, which) for which in range(2)]
    longest = max(example["input_ids"].shape[1] for example in examples)

    def pad_row(row: torch.Tensor, value: int) -> torch.Tensor:
        missing = longest - row.shape[1]
        return torch.nn.functional.pad(row, (missing, 0) if side == "left" else (0, missing), value=value)

    sequence_names = [name for name in ("input_ids", "token_type_ids") if name in examples[0]]
    pad_id = tiny.tokenizer().pad_token_id
    batch = {
        name: torch.cat([pad_row(example[name], pad_id if name == "input_ids" else 0) for example in examples])
        for name in sequence_names
    }
    batch["attention_mask"] = torch.cat([pad_row(torch.ones_like(example["input_ids"]), 0) for example in examples])
    batch |= {
        name: torch.cat([example[name] for example in examples]) for name in examples[0] if name not in sequence_names
    }
    padded = ex.explain(batch, list_methods(ex))
    for i, example in enumerate(examples):
        assert_equal(
            {m: explanations[i] for m, explanations in padded.items()}, ex.explain(example, list_methods(ex)), 1e-5
        )


@FEW
def test_model_is_unchanged(kind: str) -> None:
    model = copy.deepcopy(tiny.model(kind))
    before = model_snapshot.of_model(model)
    ex = clearhead.load(model, tiny.tokenizer())
    ex.explain(tiny.inputs(kind), list_methods(ex), target=GeneratedToken(), max_new_tokens=2)
    assert model_snapshot.changes(before, model_snapshot.of_model(model)) == []


def test_paligemma_prefix_is_bidirectional_and_continuation_causal() -> None:
    model_inputs, ex = tiny.inputs("paligemma"), tiny.explainer("paligemma")
    tape = ex.record(model_inputs, "attention", answer=CONTINUATION, target=GeneratedToken(2))
    length = model_inputs["input_ids"].shape[1]
    for call in tape.calls:
        assert call.attention is not None
        assert (call.attention[0, :, :length, :length] > 0).all()
        assert not call.attention[0, :, :length, length:].any()
        assert not call.attention[0].triu(1)[:, length:].any()


def test_only_decoder_attention_is_recorded() -> None:
    for kind in ("llava", "qwen2", "idefics2"):
        ex = tiny.explainer(kind)
        tape = ex.record(tiny.inputs(kind), "attention")
        assert len(tape.calls) == 3
        assert {(call.query_stream, call.key_stream) for call in tape.calls} == {("joint", "joint")}


# -- Raw texts and images


@pytest.mark.parametrize("kind", ["llava", "paligemma", "gemma3", "qwen2", "idefics3"])
def test_text_and_image_equal_processor_outputs(kind: str) -> None:
    processor, image = tiny.processor(kind), tiny.make_image()
    ex = clearhead.load(tiny.model(kind), processor)
    text = {"paligemma": "<image>I like", "gemma3": "I like <boi> the"}.get(kind, "I like <image> the")
    processed = processor(text=[text], images=[image], return_tensors="pt")
    processed = {
        name: part
        for name, part in processed.items()
        if name in ("input_ids", "token_type_ids", *ex.adapter.image_token_layout.input_names)
    }
    if kind != "paligemma":  # the test tokenizer appends an end token, which a prompt does not have
        processed = {
            name: part[:, :-1] if part.shape == processed["input_ids"].shape else part
            for name, part in processed.items()
        }
    ours, theirs = ex.explain(text=text, image=image, method="generic"), ex.explain(processed, method="generic")
    assert ours["text"].tokens == theirs["text"].tokens
    assert ours["image"].scores == pytest.approx(theirs["image"].scores)
    assert ours.image is not None and ours["image"].heat_map().shape == ours["image"].units.grid
    assert [name for name, _ in ours.words()["text"].top(20)]


def test_paligemma_image_token_in_text_is_optional() -> None:
    ex, image = clearhead.load(tiny.model("paligemma"), tiny.processor("paligemma")), tiny.make_image()
    with_token, without_token = (
        ex.explain(text=text, image=image, method="generic") for text in ("<image>I like", "I like")
    )
    assert with_token["text"].tokens == without_token["text"].tokens
    assert with_token["text"].scores == pytest.approx(without_token["text"].scores)


def test_images_of_different_sizes_are_explained_in_one_call() -> None:
    ex = clearhead.load(tiny.model("qwen2"), tiny.processor("qwen2"))
    images = [tiny.make_image(size=size) for size in ((16, 32), (24, 16))]
    explanations = ex.explain(text=["I <image> like", "So <image> boring"], image=images, method="generic")
    assert [e["image"].units.grid for e in explanations] == [(2, 4), (3, 2)]


def test_load_from_folder_with_processor(tmp_path: Path) -> None:
    tiny.model("llava", torch.float32).save_pretrained(tmp_path)
    tiny.processor("llava").save_pretrained(tmp_path)
    e = clearhead.load(tmp_path).explain(
        text="I like <image> the", image=tiny.make_image(), answer=", it is", method="generic"
    )
    ex = clearhead.load(tiny.model("llava"), tiny.processor("llava"))
    expected = ex.explain(text="I like <image> the", image=tiny.make_image(), answer=", it is", method="generic")
    assert e["image"].matrix == pytest.approx(expected["image"].matrix, rel=1e-3, abs=1e-5)


def test_chat_prompt_has_one_bos_token_and_one_image() -> None:
    ex, image = clearhead.load(tiny.model("llava"), tiny.processor("llava")), tiny.make_image()
    text_chat = [{"role": "user", "content": "I like it"}]
    image_chat = [{"role": "user", "content": [{"type": "image", "url": "…"}, {"type": "text", "text": "I like it"}]}]
    from_text, from_parts = (
        ex.explain(text=text_chat, image=image, method="generic"),
        ex.explain(text=image_chat, image=image, method="generic"),
    )
    assert from_text["text"].tokens == from_parts["text"].tokens
    assert from_text["text"].tokens.count("<s>") == 1 and "</s>" not in from_text["text"].tokens
    assert "".join(from_text["text"].tokens).endswith("said:") and len(from_text["image"]) == 16
    assert text_chat == [{"role": "user", "content": "I like it"}]
    several = ex.explain(text=text_chat, image=[image, tiny.make_image(1)], method="generic")
    assert len(several) == 2 and several[0]["image"].scores == pytest.approx(from_text["image"].scores)


def test_continuation_is_tokenised_after_the_prompt() -> None:
    ex, image = clearhead.load(tiny.model("llava"), tiny.processor("llava")), tiny.make_image()
    e = ex.explain(text="I like <image> the movie", image=image, answer=", it is", method="generic")
    token_ids = tiny.tokenizer()(" the movie, it is", add_special_tokens=False)["input_ids"]
    assert [step["index"] for step in e.target["steps"]] == token_ids[-len(e.steps) :]
    assert e["image"].matrix.shape == (len(e.steps), 16)
    assert e.words()["text"].tokens[-3:] == [",", "it", "is"]


def test_contrast_equals_difference_of_next_token_logits() -> None:
    ex, model_inputs = tiny.explainer("llava"), tiny.inputs("llava")
    a, b = (ex.explain(model_inputs, target=token_id, method="generic").target["value"] for token_id in (40, 50))
    assert ex.explain(model_inputs, target=clearhead.Contrast(40, 50), method="generic").target[
        "value"
    ] == pytest.approx(a - b)


def test_target_function_equals_token_target() -> None:
    ex, model_inputs = tiny.explainer("qwen2"), tiny.inputs("qwen2")
    by_function = ex.explain(model_inputs, target=lambda output: output.logits[:, -1, 40], method="generic")
    assert by_function["image"].scores == pytest.approx(
        ex.explain(model_inputs, target=40, method="generic")["image"].scores
    )


def test_perceiver_queries_are_numbered_and_have_no_heat_map() -> None:
    e = tiny.explainer("idefics2").explain(tiny.inputs("idefics2"), method="generic")
    assert e["image"].tokens[:2] == ["query 0", "query 1"] and e["image"].units.boxes is None
    with pytest.raises(InputError, match="are not on a grid"):
        e["image"].heat_map()
    with pytest.raises(UnsupportedError, match="learned queries, each of which attends to the whole image"):
        tiny.explainer("idefics2").explain(tiny.inputs("idefics2"), "saliency")


# -- Invalid and unsupported inputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": None}, "must contain input_ids and pixel_values"),
        ({"input_ids": torch.tensor([[3, 4, 5]])}, "does not mark the position of the image"),
        ({"input_ids": torch.tensor([[3, *[tiny.get_image_token_id()] * 9, 5]])}, "4 × 4 patches, but the text has 9"),
        ({"input_ids": torch.tensor([[tiny.get_image_token_id()] * 16])}, "an image, but no text"),
        ({"input_ids": torch.tensor([3, 4, 5])}, "must be batch × token"),
        ({"pixel_values": torch.zeros(2, 3, 16, 16)}, "one image for each of 1 texts"),
        ({"pixel_values": torch.zeros(1, 3, 20, 20)}, r"images of \(16, 16\) pixels"),
        ({"pixel_values": torch.zeros(1, 1, 16, 16)}, "batch × 3 × height × width"),
        ({"position_ids": torch.arange(3)[None]}, "leave out position_ids"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "leave out inputs_embeds"),
    ],
)
def test_invalid_model_inputs_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.explainer("llava").explain({**tiny.inputs("llava"), **change}, method="generic")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2", {"image_grid_thw": None}, "must contain image_grid_thw"),
        ("qwen2", {"image_grid_thw": torch.tensor([[2, 4, 4]])}, "time steps: videos"),
        ("qwen2", {"image_grid_thw": torch.tensor([[1, 4, 4]])}, "patch × value"),
        ("idefics3", {"pixel_values": torch.ones(1, 3, 3, 16, 16)}, "do_image_splitting"),
        ("idefics3", {"pixel_values": torch.zeros(1, 1, 3, 16, 16)}, "zero everywhere"),
        ("pixtral", {"image_sizes": None}, "must contain image_sizes"),
        ("paligemma", {"token_type_ids": None}, "must contain token_type_ids"),
        ("internvl", {"pixel_values": torch.ones(3, 3, 16, 16)}, "crop_to_patches"),
    ],
)
def test_invalid_layout_inputs_raise(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny.explainer(kind).explain({**tiny.inputs(kind), **change}, method="generic")


def test_invalid_text_and_image_calls_raise() -> None:
    ex = clearhead.load(tiny.model("llava"), tiny.processor("llava"))
    for arguments in ({"text": "I like <image>"}, {"image": tiny.make_image()}, {"inputs": "I like"}):
        with pytest.raises(InputError, match="a text and an image, each passed by name"):
            ex.explain(**arguments, method="generic")
    with pytest.raises(InputError, match=r"the position of the image.*<image>"):
        ex.explain(text="I like", image=tiny.make_image(), method="generic")
    with pytest.raises(InputError, match="was loaded without a processor"):
        tiny.explainer("llava").explain(text="I like <image>", image=tiny.make_image(), method="generic")
    with pytest.raises(InputError, match="not truncated"):
        ex.explain(text="I like <image>", image=tiny.make_image(), max_length=5, method="generic")
    with pytest.raises(InputError, match="contains the image token"):
        ex.explain(
            text="I like <image>", image=tiny.make_image(), answer=(tiny.get_image_token_id(),), method="generic"
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [("LlavaNext", "tiles"), ("Mllama", "cross-attention"), ("Blip2", "Q-Former"), ("Emu3", "codebook")],
)
def test_unsupported_layouts_raise_with_reason(name: str, reason: str) -> None:
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    model = cls.__new__(cls)  # it is rejected by its class alone
    torch.nn.Module.__init__(model)
    model.config, model.weight = transformers.PretrainedConfig(), torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(UnsupportedError, match=reason):
        clearhead.load(model)
