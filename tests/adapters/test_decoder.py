"""Decoders: every step of a continuation, explained in one pass, equals a pass over the tokens before it."""

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode

import clearhead
from clearhead import Contrast, GeneratedToken, InputError, UnsupportedError
from clearhead.adapters import InputOptions
from clearhead.adapters.base import find_module_device
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.methods import METHOD_REGISTRY, PassType
from tests import models
from tests.invariants import model_snapshot
from tests.replicas import (
    attcat,
    attention,
    attention_gradcam,
    cat,
    generic,
    grad_sam,
    input_x_gradient,
    rollout,
    saliency,
)
from tests.replicas.plain_pass import Seen, watch

WORDS = models.tokenizer("bytes")
_IDS = {"vocab_size": len(WORDS), "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_BODY = {
    **_IDS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "initializer_range": 0.3,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT = {**_IDS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 70, "initializer_range": 0.3}
#: Class and settings: grouped heads, sliding windows, soft caps, attention sinks, mixtures of experts, biases for
#: positions.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "llama": ("LlamaForCausalLM", _BODY),
    "mistral": ("MistralForCausalLM", {**_BODY, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {**_BODY, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", _BODY),
    "gemma2": (
        "Gemma2ForCausalLM",
        {
            **_BODY,
            "sliding_window": 4,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 5.0,
            "attn_implementation": "eager",  # sdpa has no soft cap: transformers 5.0 ignored it, later versions raise
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**_BODY, "sliding_window": 4}),
    "phi": ("PhiForCausalLM", {**_BODY, "num_key_value_heads": 4}),
    "olmo": ("OlmoForCausalLM", _BODY),
    "mixtral": ("MixtralForCausalLM", {**_BODY, **_EXPERTS}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_BODY, **_EXPERTS}),
    "gpt-oss": ("GptOssForCausalLM", {**_BODY, **_EXPERTS, "sliding_window": 4, "rope_parameters": None}),
    "bloom": ("BloomForCausalLM", {**_IDS, "hidden_size": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.3}),
}
PROMPTS = ["I like the movie", "She hates the book because", "So"]
ANSWERS = [" and the book", " it is long", " boring!"]
#: Methods that are computed from a tape, with their slow replica on one pass.
REPLICAS = {
    "generic": generic,
    "rollout": rollout,
    "attention": attention,
    "attention-gradcam": attention_gradcam,
    "grad-sam": grad_sam,
    "cat": cat,
    "attcat": attcat,
    "saliency": saliency,
    "input-x-gradient": input_x_gradient,
}


def list_tape_methods(ex: clearhead.Explainer) -> list[str]:
    """List the methods that apply and are computed from a tape, which they can share."""
    return [
        line.name
        for line in ex.methods()
        if line.applies and METHOD_REGISTRY[line.name].declaration.pass_type is PassType.TAPE
    ]


def compute_replica_scores(method: str, pass_record: Seen) -> np.ndarray:
    """Compute the scores with the slow replica, read out at the last position."""
    available = {"readout": np.eye(pass_record.units)[-1], "patch": 0, "before": 0}
    function = REPLICAS[method].scores
    return function(
        pass_record, **{key: available[key] for key in inspect.signature(function).parameters if key in available}
    )


class Wide(TorchFunctionMode):
    """Make models compute in float64 the softmax, norms and positions that they compute in float32 in any dtype.

    Differences between two computations are then not due to rounding inside the model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        narrow = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.cumsum)
        if kwargs.get("dtype") is torch.float32 and func in narrow:
            kwargs["dtype"] = torch.float64
        if func is torch.Tensor.float:  # positions are integers before the rotary embedding
            return args[0].double()
        narrows = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in (*args[1:], *kwargs.values())
        if narrows and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)


def made(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    settings = {key: value for key, value in {**settings, **overrides}.items() if value is not None}
    torch.manual_seed(7)
    model = cls(cls.config_class(**settings)).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):  # the grouped implementation does not support float64
        model.set_experts_implementation("eager")
    return model


@cache
def explainer(family: str = "gpt2") -> clearhead.Explainer:
    return clearhead.load(made(family), WORDS)


def ids_of(prompt: str, answer: str, ex: clearhead.Explainer | None = None) -> tuple[torch.Tensor, int]:
    """The token ids of prompt and continuation, and how many of them belong to the continuation."""
    (sample,) = (ex or explainer()).adapter.make_samples(prompt, InputOptions(continuation=answer))
    return sample.inputs["input_ids"], len(sample.continuation_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_steps_equal_single_step_replicas(family):
    """The replica makes one pass per token over a growing prefix; clearhead one pass for a batch of all texts."""
    ex = explainer(family)
    with Wide():
        results = ex.explain(PROMPTS, list(REPLICAS), answer=ANSWERS)
        for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            ids, count = ids_of(prompt, answer, ex)
            for step in range(count):
                length = len(ids) - count + step
                token_id = int(ids[length])
                pass_record = watch(
                    ex.adapter.model, {"input_ids": ids[None, :length]}, lambda o, k=token_id: o.logits[0, -1, k]
                )
                for method in REPLICAS:
                    e, expected = results[method][i], compute_replica_scores(method, pass_record)
                    size = np.abs(e.matrix).max()
                    assert np.abs(e.matrix[step, :length] - expected).max() <= 1e-9 * size, (method, step)
                    assert not e.matrix[step, length:].any(), "later tokens must have no score"
                    assert e.target["steps"][step]["index"] == token_id


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bloom"])
def test_batch_equals_single_for_every_method(family):
    ex = explainer(family)
    methods = list_tape_methods(ex)
    assert set(REPLICAS) <= set(methods)
    with Wide():
        together = ex.explain(PROMPTS[::-1], methods, answer=ANSWERS[::-1])
        for prompt, answer, index in zip(PROMPTS, ANSWERS, (2, 1, 0), strict=True):
            for method, e in ex.explain(prompt, methods, answer=answer).items():
                other = together[method][index]
                assert other.tokens == e.tokens and other.steps == e.steps
                assert np.abs(other.matrix - e.matrix).max() <= 1e-9 * max(np.abs(e.matrix).max(), 1e-300), method
                assert np.allclose(e.scores, e.matrix.sum(0), rtol=1e-12)


def test_batched_steps_equal_single_steps_for_every_method():
    """Includes methods without a replica here, such as random scores."""
    ex = explainer()
    methods = list_tape_methods(ex)
    together = ex.explain(PROMPTS[2], methods, answer=ANSWERS[2])
    ids, count = ids_of(PROMPTS[2], ANSWERS[2])
    for step in (0, count - 1):
        prefix = ids[None, : len(ids) - count + step]
        prefix_inputs = {"input_ids": prefix, "attention_mask": torch.ones_like(prefix)}
        for method, alone in ex.explain(prefix_inputs, methods, int(ids[step - count])).items():
            row, size = together[method].matrix[step], np.abs(alone.scores).max()
            assert np.abs(row[: len(alone)] - alone.scores).max() <= 1e-9 * size, method
            assert not row[len(alone) :].any(), method


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logits_equal_model_logits(family):
    certificate = explainer(family).explain(PROMPTS[0], method="generic").certificate
    assert certificate["capture_error"] <= 1e-6 and certificate["readout_checked"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_scores_do_not_depend_on_steps_per_pass(size, monkeypatch):
    ex = explainer()
    default = ex.explain(PROMPTS, ["generic", "attention-gradcam", "random", "position"], answer=ANSWERS)
    monkeypatch.setattr(type(ex.adapter), "choose_targets_per_pass", lambda self, samples: size)
    limited = ex.explain(PROMPTS, ["generic", "attention-gradcam", "random", "position"], answer=ANSWERS)
    for method in default:
        for e, limited_e in zip(default[method], limited[method], strict=True):
            assert np.allclose(e.matrix, limited_e.matrix, rtol=1e-9, atol=1e-12)


def test_ops_without_vmap_fall_back_to_one_backward_pass_per_step():
    class Twice(torch.autograd.Function):  # without a vmap rule
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            return torch.from_numpy(2 * g.numpy())

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return Twice.apply(x)

    model = made("gpt2")
    for block in model.transformer.h:
        block.mlp.dropout = Doubled()
    ex = clearhead.load(model, WORDS)
    together = ex.explain(PROMPTS[0], answer=ANSWERS[0], method="generic")
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    for step in range(count):
        alone = ex.explain(
            {"input_ids": ids[None, : len(ids) - count + step]},
            target=int(ids[len(ids) - count + step]),
            method="generic",
        )
        assert np.allclose(together.matrix[step, : len(alone)], alone.scores, rtol=1e-9)


def test_default_target_is_the_next_token():
    ex = explainer()
    e = ex.explain(PROMPTS[0], method="generic")
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    logits = ex.adapter.model(input_ids=ids).logits[0, -1]
    assert (
        e.matrix is None and e.tokens[0] == "<s>" and e.tokens[-1] == "ie"
    )  # the end token of the tokenizer is removed
    assert e.target["index"] == int(logits.argmax()) == e.prediction["index"]
    assert np.isclose(e.target["value"], float(logits.max().detach()))
    token = WORDS.convert_ids_to_tokens(7)
    assert ex.explain(PROMPTS[0], target=token, method="generic").target["index"] == 7
    contrast = ex.explain(PROMPTS[0], target=Contrast(7, 9), method="generic").target
    assert np.isclose(contrast["value"], float((logits[7] - logits[9]).detach()))


def test_generated_tokens_equal_greedy_generate():
    ex = explainer()
    e = ex.explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=5, method="generic")
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    generated_ids = ex.adapter.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    assert [step["index"] for step in e.target["steps"]] == generated_ids
    assert e.tokens[ids.shape[1] :] == WORDS.convert_ids_to_tokens(generated_ids)
    assert e.matrix.shape == (5, len(e)) and e.target["name"] == " ".join(e.steps)
    third = ex.explain(PROMPTS[0], target=GeneratedToken(2), method="generic")
    assert np.allclose(third.scores, e.matrix[2][: len(third)]) and third.target["position"] == 2
    assert np.allclose(
        ex.explain(PROMPTS[0], target=GeneratedToken(-1), max_new_tokens=5, method="generic").scores, e.matrix[4]
    )
    foil = ex.explain(PROMPTS[0], target=GeneratedToken(2, 11, against=12), method="generic").target
    assert foil["name"] == f"{ex.adapter.label_name(11)} − {ex.adapter.label_name(12)}"


def test_end_token_is_not_a_generated_step():
    model = made("gpt2")
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    generated_ids = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = [generated_ids[2], 328]
    ex = clearhead.load(model, WORDS)
    assert len(ex.explain(PROMPTS[0], target=GeneratedToken(), method="generic").steps) == generated_ids.index(
        generated_ids[2]
    )
    # the end token can still be the target
    after = ex.explain(PROMPTS[0], target=GeneratedToken(generated_ids.index(generated_ids[2])), method="generic")
    assert after.target["index"] == generated_ids[2]
    model.generation_config.eos_token_id = generated_ids[0]
    with pytest.raises(InputError, match="generates an empty output"):
        ex.explain(PROMPTS[0], target=GeneratedToken(), method="generic")


def test_continuation_accepts_text_or_token_ids():
    ex = explainer()
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    text = ex.explain(PROMPTS[0], answer=ANSWERS[0], method="generic")
    for token_ids in (ids[-count:], tuple(ids[-count:].tolist()), ids[-count:].numpy()):
        assert np.array_equal(ex.explain(PROMPTS[0], answer=token_ids, method="generic").matrix, text.matrix)
    assert text.units.texts == (PROMPTS[0], ANSWERS[0])
    words = text.words()
    assert words.tokens == ["<s>", "I", "like", "the", "movie", "and", "the", "book"]
    assert words.matrix.shape == (count, 8)
    assert text.step(1).target["index"] == int(ids[-count + 1])
    step_explanation = ex.explain(
        PROMPTS[0], answer=ANSWERS[0], target=GeneratedToken(1, against=5), scale="probability", method="generic"
    )
    assert step_explanation.matrix is None and step_explanation.target["against"] == ex.adapter.label_name(5)


def test_byte_level_continuation_decodes_to_its_text():
    ex = explainer()
    continuation_ids = WORDS("naïve 😀", add_special_tokens=False)["input_ids"]
    e = ex.explain({"input_ids": torch.tensor([[0, 40, 41]])}, answer=(*continuation_ids, 300), method="generic")
    assert e.units.offsets is None or e.words().matrix.shape[0] == len(continuation_ids) + 1
    sample = ex.adapter.make_samples("I like", InputOptions(continuation=tuple(continuation_ids)))[0]
    assert sample.units.texts == ("I like", "naïve 😀")


def test_all_rows_and_layer_scores_cover_prompt_and_continuation():
    ex = explainer()
    e = ex.explain(PROMPTS[0], "generic", GeneratedToken(1), answer=ANSWERS[0], rows="all", per=None)
    length = len(ex.adapter.make_samples(PROMPTS[0], InputOptions(continuation=ANSWERS[0]))[0].units)
    assert e.matrix.shape == (length, length)
    per_head = ex.explain(PROMPTS[0], "generic", GeneratedToken(1), answer=ANSWERS[0], per="head")
    assert per_head.per_layer.shape == (3, length) and per_head.per_head.shape == (3, 4, length)
    assert np.allclose(per_head.per_head.sum((0, 1)), per_head.scores) and np.allclose(e.scores, per_head.scores)
    with pytest.raises(InputError, match="rows='all' needs a single target"):
        ex.explain(PROMPTS[0], answer=ANSWERS[0], rows="all", method="generic")


def test_masked_padding_on_either_side_is_removed():
    """With relative (rotary) positions."""
    ex = explainer("llama")
    ids, _ = ids_of(PROMPTS[0], ANSWERS[0], ex)
    plain = ex.explain({"input_ids": ids[None]}, ["generic", "attention-gradcam", "random"])
    ones, pad = torch.ones(1, len(ids), dtype=torch.long), torch.full((1, 3), 1)
    zeros = torch.zeros_like(pad)
    for parts, mask in (((pad, ids[None]), (zeros, ones)), ((ids[None], pad), (ones, zeros))):
        padded_inputs = {"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(mask, 1)}
        padded = ex.explain(padded_inputs, ["generic", "attention-gradcam"])
        for method, e in padded.items():
            assert e.tokens == plain[method].tokens and np.array_equal(e.scores, plain[method].scores)
    mask = ones.clone()
    mask[0, 2] = 0
    with pytest.raises(InputError, match="excludes tokens inside"):
        ex.explain({"input_ids": ids[None], "attention_mask": mask}, method="generic")


_STATES = {**_BODY, "num_heads": 4, "num_layers": 3, "ffn_dim": 48, "init_std": 0.3}
#: Class and settings of further decoders: positions in a learned table, from the mask, sinusoids, rotary ones, biases.
POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neo": ("GPTNeoForCausalLM", {**_STATES, "attention_types": [[["global"], 3]]}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", _GPT),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", _GPT),
    "biogpt": ("BioGptForCausalLM", _STATES),
    "opt": ("OPTForCausalLM", {**_STATES, "word_embed_proj_dim": 32}),
    "xglm": ("XGLMForCausalLM", {**_STATES, "d_model": 32, "attention_heads": 4}),
    "codegen": ("CodeGenForCausalLM", {**_GPT, "rotary_dim": 4, "n_ctx": 70}),
    "mpt": ("MptForCausalLM", {**_IDS, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 70}),
    **{name: FAMILIES[name] for name in ("gpt2", "llama", "gemma2", "bloom")},
}
PADDED = {
    "input_ids": torch.tensor([[1, 1, 1, *range(10, 18)]]),
    "attention_mask": torch.tensor([[0, 0, 0, *[1] * 8]]),
}


def make_positional_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    name, settings = POSITIONS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(7)
    return cls(cls.config_class(**settings)).to(dtype).eval()


@pytest.mark.parametrize("family", POSITIONS)
def test_left_padded_explanation_equals_model_output_and_gradient(family: str) -> None:
    """The target value and its gradient at the tokens equal those of a plain pass over the padded inputs."""
    model = make_positional_model(family)
    explanation = clearhead.load(model).explain(PADDED, "input-x-gradient")
    leaves: list[torch.Tensor] = []

    def make_leaf(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[0].clone()

    with remove_hooks_on_exit([model.get_input_embeddings().register_forward_hook(make_leaf)]):
        top = model(**PADDED).logits[0, -1].max()
    (gradient,) = torch.autograd.grad(top, leaves)
    expected = (gradient * leaves[0]).sum(-1)[0, 3:].detach().numpy()
    assert explanation.target["value"] == pytest.approx(top.item(), rel=1e-5)
    assert len(explanation) == 8
    assert np.abs(explanation.scores - expected).max() <= 1e-4 * np.abs(expected).max()


def test_left_padded_value_equals_model_output_in_bfloat16() -> None:
    """Rounding can exceed the effect of the positions: the closer of the two position schemes must be chosen."""
    model = make_positional_model("gpt2", torch.bfloat16)
    explanation = clearhead.load(model).explain(PADDED, method="generic")
    assert explanation.target["value"] == model(**PADDED).logits[0, -1].max().item()


def test_continuation_after_left_padding_equals_model_logits() -> None:
    model = make_positional_model("gpt2", torch.float64)
    explanation = clearhead.load(model).explain(PADDED, answer=[20, 21], method="generic")
    ids = torch.cat([PADDED["input_ids"], torch.tensor([[20, 21]])], 1)
    mask = torch.cat([PADDED["attention_mask"], torch.ones(1, 2, dtype=torch.long)], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[0]
    expected = [logits[10, 20].item(), logits[11, 21].item()]
    assert [step["value"] for step in explanation.target["steps"]] == pytest.approx(expected, abs=1e-10)


def test_generation_after_left_padding_equals_generate() -> None:
    """Tokens and logits are equal (`generate` returns float32 logits): `generate` derives positions from the mask."""
    model = make_positional_model("gpt2", torch.float64)
    explanation = clearhead.load(model).explain(PADDED, target=GeneratedToken(), max_new_tokens=3, method="generic")
    with torch.no_grad():
        generated = model.generate(
            **PADDED, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    steps = explanation.target["steps"]
    assert [step["index"] for step in steps] == generated.sequences[0, 11:].tolist()
    expected = [logits.max().item() for logits in generated.logits]
    assert [step["value"] for step in steps] == pytest.approx(expected, abs=1e-5)


def test_padded_text_batch_equals_single_texts() -> None:
    ex = explainer()
    for together, prompt in zip(ex.explain(PROMPTS, method="generic"), PROMPTS, strict=True):
        alone = ex.explain(prompt, method="generic")
        assert together.target["value"] == pytest.approx(alone.target["value"], abs=1e-10)
        assert np.allclose(together.scores, alone.scores)


def test_left_padding_that_changes_logits_raises() -> None:
    """A model without position_ids; a softmax over padding alone, which is NaN in float64; too much padding."""

    class WithoutPositionIds(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    ex = clearhead.load(WithoutPositionIds(transformers.GPT2Config(**_GPT)).double().eval())
    with pytest.raises(InputError, match=r"different logits with the 3 padding tokens before .*pad on the right"):
        ex.explain(PADDED, method="generic")
    eager = clearhead.load(made("llama", attn_implementation="eager"))
    with pytest.raises(InputError, match="logits that are not finite with the 3 padding tokens"):
        eager.explain(PADDED, method="generic")
    long = {name: torch.nn.functional.pad(part, (60, 0)) for name, part in PADDED.items()}
    with pytest.raises(InputError, match=r"71 tokens \(the first 63 are padding\)"):
        explainer().explain(long, method="generic")


def test_target_function_receives_logits_of_all_positions():
    ex = explainer()
    by_function = ex.explain(PROMPTS[0], target=lambda output: output.logits[:, -1, 7], method="generic")
    assert np.array_equal(by_function.scores, ex.explain(PROMPTS[0], target=7, method="generic").scores)
    with pytest.raises(UnsupportedError, match="depends on rows"):
        clearhead.load(made("gpt2"), WORDS).explain(
            PROMPTS[0], target=lambda output: output.logits[:, 1, 7], method="generic"
        )


def test_inputs_embeds_support_next_token_target_only():
    ex = explainer()
    ids, _ = ids_of(PROMPTS[0], ANSWERS[0])
    vectors = ex.adapter.embeddings(ids)[None].detach()
    by_embeddings = ex.explain({"inputs_embeds": vectors}, method="generic")
    assert np.allclose(by_embeddings.scores, ex.explain({"input_ids": ids[None]}, method="generic").scores, rtol=1e-9)
    with pytest.raises(InputError, match="input_ids"):
        ex.explain({"inputs_embeds": vectors}, target=GeneratedToken(), method="generic")
    with pytest.raises(InputError, match="input_ids"):
        ex.explain({"inputs_embeds": vectors}, answer=(5, 6), method="generic")


def make_chat_tokenizer() -> Any:
    tokenizer = models.tokenizer("bytes")
    chat_tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    chat_tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if not loop.last %}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}</s>assistant:{% endif %}"
    )
    return chat_tokenizer


def test_chat_prompt_has_one_bos_token():
    ex = clearhead.load(made("gpt2"), make_chat_tokenizer())
    chat = [{"role": "user", "content": "I like the book"}]
    e = ex.explain(chat, answer=" so", method="generic")
    assert e.tokens[0] == "<s>" and e.tokens.count("<s>") == 1
    assert e.units.special[0] and e.units.special[e.tokens.index("</s>")]
    rendered = ex.adapter.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert np.array_equal(ex.explain(rendered, answer=" so", method="generic").scores, e.scores), (
        "a rendered text must not get a second start token"
    )
    both = ex.explain([chat, [*chat, {"role": "assistant", "content": "So"}]], method="generic")
    assert len(both) == 2 and both[1].tokens[-2:] == ["S", "o"]
    with pytest.raises(InputError, match="no chat template"):
        explainer().explain(chat, method="generic")


def test_eos_token_in_the_prompt_is_kept():
    """Some chat templates end with an end token, after which the model starts its reply."""
    ending = make_chat_tokenizer()
    ending.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    ex = clearhead.load(made("gpt2"), ending)
    e = ex.explain([{"role": "user", "content": "I like"}], method="generic")
    ids = ending("I like</s>", add_special_tokens=False)["input_ids"]
    assert e.tokens == ending.convert_ids_to_tokens(ids) and e.tokens[-1] == "</s>"
    logits = ex.adapter.model(input_ids=torch.tensor([ids])).logits[0, -1]
    assert np.isclose(e.target["value"], float(logits.max().detach()))
    # an end token in the text is kept, the one that the tokenizer appends is removed
    for prompt, ends in (("I like", 0), ("I like</s>", 1), ("I like</s></s>", 2)):
        tokens = explainer().explain(prompt, method="generic").tokens
        assert tokens.count("</s>") == ends and tokens[0] == "<s>"
        assert explainer().explain(prompt, answer=" the", method="generic").tokens == [*tokens, "Ġthe"]


def test_long_prompt_is_truncated_from_the_left():
    ex = explainer()
    plain = ex.explain(PROMPTS[1], method="generic")
    e = ex.explain(PROMPTS[1], max_length=6, method="generic")  # one of them is the end token, which is removed
    assert e.tokens == ["<s>", *plain.tokens[-4:]] and e.certificate["truncated_tokens"] > 0
    right = ex.explain(PROMPTS[1], max_length=6, truncation_side="right", method="generic")
    assert right.tokens == plain.tokens[:5]


@pytest.mark.parametrize(
    ("raw_input", "options", "message"),
    [
        ("", {}, "the text is empty"),
        (("a", "b"), {}, "expected a prompt"),
        (3, {}, "expected a prompt"),
        ("I like", {"answer": ""}, "answer= is empty"),
        ("I like", {"answer": [[1.5]]}, "answer="),
        ("I like", {"answer": (1, 9999)}, "9999"),
        ("I like", {"answer": " it", "target": "it"}, "Generated"),
        ("I like", {"answer": " it", "target": GeneratedToken(9)}, "step 9 does not exist"),
        ("I like", {"target": clearhead.MaskedToken("it")}, "not an output of GPT2LMHeadModel"),
        ("I like", {"target": clearhead.DetectionQuery(1)}, "not an output of GPT2LMHeadModel"),
        ("I like", {"target": "incomprehensible"}, "is not a single token"),
        ("I like", {"target": GeneratedToken(), "max_new_tokens": 0}, "max_new_tokens=0"),
        ("I like", {"answer": tuple(range(3, 90))}, "more than the model's maximum"),
        ({"input_ids": torch.zeros(1, 70, dtype=torch.long)}, {"target": GeneratedToken()}, "already has 70 tokens"),
    ],
)
def test_invalid_input_raises(raw_input, options, message):
    with pytest.raises(InputError, match=message):
        explainer().explain(raw_input, **options)


def test_soft_cap_ignored_by_sdpa_raises():
    """The recorded attention has the soft cap, so its logits would differ from those of the model."""
    if not transformers.Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers does not run Gemma 2 under sdpa, which has no soft cap")
    with pytest.raises(UnsupportedError, match=r"logits change by .* when its attention is recorded"):
        clearhead.load(made("gemma2", attn_implementation="sdpa"), WORDS).explain(PROMPTS[0], method="generic")


def test_bidirectional_model_raises():
    config = transformers.BertConfig(
        **{key: value for key, value in _BODY.items() if key not in ("head_dim", "num_key_value_heads")}
    )
    with pytest.raises(UnsupportedError, match="not a decoder"):
        clearhead.load(transformers.BertLMHeadModel(config).eval(), WORDS).explain("I like", method="generic")


def test_model_tokenizer_and_generation_config_are_unchanged():
    model = made("llama").train()
    model.generation_config.temperature = 0.7
    before, settings = model_snapshot.of_model(model), model.generation_config.to_dict()
    tokenizer_before = model_snapshot.of_processor(WORDS)
    ex = clearhead.load(model, WORDS)
    ex.explain(PROMPTS, ["generic", "saliency"], GeneratedToken(), max_new_tokens=3)
    with pytest.raises(InputError):
        ex.explain(PROMPTS[0], target=GeneratedToken(90), method="generic")
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert not model_snapshot.changes(tokenizer_before, model_snapshot.of_processor(WORDS))
    assert model.generation_config.to_dict() == settings


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def test_dynamic_rope_steps_equal_single_steps():
    ex = clearhead.load(made("llama", rope_parameters=_DYNAMIC, max_position_embeddings=8), WORDS)
    assert ex.adapter.tokenizer_wrapper.max_positions == 16, "dynamic RoPE extends the positions"
    assert ex.adapter.choose_targets_per_pass(ex.adapter.make_samples(PROMPTS[0], InputOptions())) == 1
    ids, count = torch.arange(5, 17), 4
    with Wide():
        e = ex.explain({"input_ids": ids[None, :-count]}, answer=ids[-count:], method="generic")
        for step in range(count):
            alone = ex.explain(
                {"input_ids": ids[None, : len(ids) - count + step]}, target=int(ids[step - count]), method="generic"
            )
            assert np.allclose(e.matrix[step, : len(alone)], alone.scores, rtol=1e-9)


_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0, 5.0, 6.0, 7.0]}
_BY_LAYER = {"full_attention": _DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("family", "rope", "size"),
    [
        ("llama", _DYNAMIC, 8),
        ("llama", {**_LONG, "original_max_position_embeddings": 8}, 70),
        ("gemma3", _BY_LAYER, 8),
    ],
)
def test_longer_previous_input_does_not_change_scores(family, rope, size):
    """A dynamic RoPE keeps the frequencies of the longest input so far, which changes the outputs from then on.

    transformers 5.0 recomputes them for every input that is longer than its positions.
    """
    layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]} if family == "gemma3" else {}
    model = made(family, rope_parameters=rope, max_position_embeddings=size, **layers)
    ex, raw_input = clearhead.load(model, WORDS), {"input_ids": torch.arange(5, 13)[None]}
    methods = ["generic", "integrated-gradients", "occlusion"]
    before, first = model_snapshot.of_model(model), ex.explain(raw_input, methods, target=3)
    ex.explain({"input_ids": torch.arange(5, 17)[None]}, methods, GeneratedToken(), max_new_tokens=3)
    for method, e in ex.explain(raw_input, methods, target=3).items():
        assert np.array_equal(e.scores, first[method].scores) and e.target == first[method].target
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    with torch.no_grad():
        assert float(model(**raw_input).logits[0, -1, 3]) == pytest.approx(first["generic"].target["value"], rel=1e-5)


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_longrope_inputs_of_different_lengths_do_not_share_a_batch(head):
    cls = getattr(transformers, f"Phi3For{head}")
    rope = {**_LONG, "original_max_position_embeddings": 8}
    settings = {**_BODY, "rope_parameters": rope, "original_max_position_embeddings": 8}
    torch.manual_seed(0)
    ex = clearhead.load(cls(transformers.Phi3Config(**settings)).double().eval())
    short, long = {"input_ids": torch.arange(5, 10)[None]}, {"input_ids": torch.arange(5, 17)[None]}
    alone, batched = (
        ex.explain(short, target=1, method="generic"),
        ex.explain([short, long], target=1, method="generic")[0],
    )
    assert np.array_equal(alone.scores, batched.scores) and alone.target == batched.target
    with pytest.raises(InputError, match="cannot share a batch"):
        ex.record([short, long], target=1)


def dispatch_model(embedding_device: str, folder: Any) -> Any:
    """Dispatch a model with accelerate: its embeddings in memory or on disk, and one of its layers on disk."""
    accelerate = pytest.importorskip("accelerate")
    device_map = {
        "model.embed_tokens": embedding_device,
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    device_map |= {"model.layers.0": embedding_device, "model.layers.2": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(made("llama"), device_map, main_device="cpu", offload_dir=folder)


def test_offloaded_embeddings_report_accelerate_device(tmp_path):
    model = dispatch_model("disk", tmp_path)
    assert model.model.embed_tokens.weight.device.type == "meta"
    assert find_module_device(model) == find_module_device(model.model.embed_tokens) == torch.device("cpu")


@pytest.mark.parametrize("embedding_device", ["cpu", "disk"])
def test_dispatched_model_equals_single_device_model(embedding_device, tmp_path):
    raw_input, methods = {"input_ids": torch.arange(5, 10)[None]}, ["generic", "integrated-gradients", "occlusion"]
    plain = clearhead.load(made("llama")).explain(raw_input, method=methods)
    model = dispatch_model(embedding_device, tmp_path)
    ex = clearhead.load(model)
    for method, e in ex.explain(raw_input, method=methods).items():
        assert np.allclose(e.scores, plain[method].scores, rtol=1e-9), method
    assert len(ex.explain(raw_input, target=GeneratedToken(), max_new_tokens=2, method="generic").steps) == 2
    with pytest.raises(InputError, match="distributed over devices"):
        clearhead.load(model, dtype="float32")


def test_quantised_model_is_not_copied_or_converted():
    model = made("llama")
    model.is_quantized = True
    assert clearhead.load(model).adapter.model is model
    with pytest.raises(InputError, match="quantised and cannot be moved"):
        clearhead.load(model, dtype="float32")


def test_vocab_size_is_read_from_packed_quantised_head():
    """Quantised layers of torch have a method called weight instead of a parameter."""

    class Packed(torch.nn.Linear):
        pass

    model = made("llama")
    head = Packed(32, len(WORDS), bias=False).double()
    values = head.weight.detach()
    del head.weight
    head.weight = lambda: values
    head.forward = lambda x: x @ values.mT
    model.lm_head = head
    assert clearhead.load(model, WORDS).adapter.vocab_size == len(WORDS)


@pytest.mark.filterwarnings("ignore")  # torch has deprecated it
def test_dynamic_int8_quantisation_raises():
    model = torch.ao.quantization.quantize_dynamic(made("llama", torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedError, match="dynamic int8 quantisation rounds"):
        clearhead.load(model, WORDS).explain("I like", method="generic")


def test_list_of_token_ids_is_one_continuation():
    ex = explainer()
    assert np.array_equal(
        ex.explain("I like", answer=[5, 6], method="generic").matrix,
        ex.explain("I like", answer=(5, 6), method="generic").matrix,
    )
    with pytest.raises(InputError, match="one for each, a text or its token ids"):
        ex.explain("I like", answer=["a", "b"], method="generic")


@pytest.mark.parametrize("setting", [{"num_return_sequences": 2}, {"penalty_alpha": 0.6}, {"stop_strings": ["zzz"]}])
def test_non_greedy_generation_config_is_ignored(setting):
    model = made("gpt2")
    expected = explainer().explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=2, method="generic").steps
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    assert (
        clearhead.load(model, WORDS)
        .explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=2, method="generic")
        .steps
        == expected
    )


def test_unusable_generation_config_raises():
    model = made("gpt2")
    model.generation_config.stop_strings = ["zzz"]  # stop strings need a tokenizer
    with pytest.raises(InputError, match="generation_config"):
        clearhead.load(model).explain({"input_ids": torch.tensor([[5, 6]])}, target=GeneratedToken(), method="generic")


def test_nonfinite_weights_raise():
    model = made("llama")
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(UnsupportedError, match="not finite"):
        clearhead.load(model, WORDS).explain("I like", method="generic")


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user"}], "message 0 of a conversation"),
        ([{"role": "user", "content": "I"}, {"role": "user", "content": None}], "message 1 of a conversation"),
        ({"role": "user", "content": "I"}, "a list of messages"),
        ([{"content": "I"}], "a list of messages"),
        ({"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])}, "leave out labels"),
    ],
)
def test_incomplete_chats_and_model_inputs_raise(chat, message):
    with pytest.raises(InputError, match=message):
        clearhead.load(made("gpt2"), make_chat_tokenizer()).explain(chat, method="generic")


def test_tape_batch_axis_counts_explained_steps():
    ex = explainer()
    tape = ex.record(PROMPTS[0], "attention", GeneratedToken(1), answer=ANSWERS[0])
    assert len(tape.calls) == 3 and tape.logits.shape == (1, len(WORDS))
    steps = ex.record(PROMPTS[0], "attention_gradient", answer=ANSWERS[0])
    count = ids_of(PROMPTS[0], ANSWERS[0])[1]
    assert steps.calls[0].attention_gradient.shape[0] == count == len(steps.value)


@pytest.mark.parametrize(("target", "steps"), [(None, None), (GeneratedToken(0), [0]), (GeneratedToken(2), [2])])
def test_tape_gradients_are_at_the_readout_positions(target, steps):
    ex = explainer()
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    rows = [len(ids) - count - 1 + step for step in (range(count) if target is None else steps)]
    tape = ex.record(PROMPTS[0], "attention_gradient", target, answer=ANSWERS[0])
    with torch.no_grad():
        logits = ex.adapter.model(ids[None]).logits[0]
    assert torch.allclose(tape.logits, logits[rows], atol=1e-9)
    for row, gradient in zip(rows, tape.calls[-1].attention_gradient, strict=True):
        assert gradient.sum((0, 2)).nonzero().flatten().tolist() == [row]


def test_tape_values_equal_explanation_target_values():
    ex = explainer()
    tape = ex.record(PROMPTS, "attention_gradient")
    assert tape.value.tolist() == pytest.approx(
        [e.target["value"] for e in ex.explain(PROMPTS, method="generic")], abs=1e-9
    )


@pytest.mark.parametrize("method", ["deeplift", "deeplift-shap"])
def test_captum_profile_batched_steps_equal_single_steps(method):
    ex, count = explainer(), ids_of(PROMPTS[0], ANSWERS[0])[1]
    options = {"answer": ANSWERS[0], "profile": "captum"}
    together = ex.explain(PROMPTS[0], method, **options).matrix
    for step in range(count):
        alone = ex.explain(PROMPTS[0], method, GeneratedToken(step), **options).scores
        assert np.abs(together[step, : len(alone)] - alone).max() <= 1e-9 * np.abs(alone).max()


def test_recall_model_attends_to_the_queried_pair():
    """The last attention layer of the zoo's key–value recall model attends to the queried pair alone."""
    if "recall" not in clearhead.zoo_models():
        pytest.skip("zoo:recall has not landed")
    e = clearhead.load("zoo:recall").explain("k7 v2 k3 v9 k3 →", "attention")
    assert e.prediction["label"] == "v9" and {name for name, _ in e.top(2)} == {"k3", "v9"}
