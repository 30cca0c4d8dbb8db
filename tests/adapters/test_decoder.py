"""Decoders: every step of an answer, explained together, is what a pass over the words before it alone would say."""

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
from clearhead.methods import METHOD_REGISTRY
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
            "attn_implementation": "eager",  # sdpa knows no soft cap: transformers 5.0 left it out, later ones refuse
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
#: Every method that reads a tape, and its slow twin on one pass.
TWINS = {
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


def reading_a_tape(ex: clearhead.Explainer) -> list[str]:
    """The methods that apply and are handed one tape: what is said here is about the passes that they share."""
    return [
        line.name
        for line in ex.methods()
        if line.applies and METHOD_REGISTRY[line.name].declaration.pass_type == "tape"
    ]


def twin(method: str, seen: Seen) -> np.ndarray:
    """The scores as the slow twin has them; the last row is read."""
    known = {"readout": np.eye(seen.units)[-1], "patch": 0, "before": 0}
    function = TWINS[method].scores
    return function(seen, **{key: known[key] for key in inspect.signature(function).parameters if key in known})


class Wide(TorchFunctionMode):
    """Lets a model that computes softmax, norms and positions in float32, whatever its dtype, compute them in float64.

    So that what is left between two ways is the ways' own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        narrow = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.cumsum)
        if kwargs.get("dtype") is torch.float32 and func in narrow:
            kwargs["dtype"] = torch.float64
        if func is torch.Tensor.float:  # positions, too, which are whole numbers before they are turned
            return args[0].double()
        narrows = func in (torch.Tensor.to, torch.Tensor.type) and torch.float32 in (*args[1:], *kwargs.values())
        if narrows and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)


def made(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    settings = {key: value for key, value in {**settings, **more}.items() if value is not None}
    torch.manual_seed(7)
    model = cls(cls.config_class(**settings)).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):  # the grouped one knows no float64
        model.set_experts_implementation("eager")
    return model


@cache
def explainer(family: str = "gpt2") -> clearhead.Explainer:
    return clearhead.load(made(family), WORDS)


def ids_of(prompt: str, answer: str, ex: clearhead.Explainer | None = None) -> tuple[torch.Tensor, int]:
    """Prompt and answer as the model reads them, and how many of the tokens are the answer's."""
    (sample,) = (ex or explainer()).adapter.make_samples(prompt, InputOptions(continuation=answer))
    return sample.inputs["input_ids"], len(sample.continuation_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_together_are_steps_alone(family):
    """The slow twin makes one growing pass a word; clearhead one pass for a batch of texts of different lengths."""
    ex = explainer(family)
    with Wide():
        results = ex.explain(PROMPTS, list(TWINS), answer=ANSWERS)
        for i, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            ids, count = ids_of(prompt, answer, ex)
            for step in range(count):
                length = len(ids) - count + step
                word = int(ids[length])
                seen = watch(ex.adapter.model, {"input_ids": ids[None, :length]}, lambda o, w=word: o.logits[0, -1, w])
                for method in TWINS:
                    e, expected = results[method][i], twin(method, seen)
                    size = np.abs(e.matrix).max()
                    assert np.abs(e.matrix[step, :length] - expected).max() <= 1e-9 * size, (method, step)
                    assert not e.matrix[step, length:].any(), "words that come later have no say"
                    assert e.target["steps"][step]["index"] == word


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bloom"])
def test_batched_is_single_for_every_method(family):
    ex = explainer(family)
    methods = reading_a_tape(ex)
    assert set(TWINS) <= set(methods)
    with Wide():
        together = ex.explain(PROMPTS[::-1], methods, answer=ANSWERS[::-1])
        for prompt, answer, place in zip(PROMPTS, ANSWERS, (2, 1, 0), strict=True):
            for method, e in ex.explain(prompt, methods, answer=answer).items():
                other = together[method][place]
                assert other.tokens == e.tokens and other.steps == e.steps
                assert np.abs(other.matrix - e.matrix).max() <= 1e-9 * max(np.abs(e.matrix).max(), 1e-300), method
                assert np.allclose(e.scores, e.matrix.sum(0), rtol=1e-12)


def test_every_method_explains_a_step_together_as_alone():
    """Also those that have no slow twin here, random numbers among them."""
    ex = explainer()
    methods = reading_a_tape(ex)
    together = ex.explain(PROMPTS[2], methods, answer=ANSWERS[2])
    ids, count = ids_of(PROMPTS[2], ANSWERS[2])
    for step in (0, count - 1):
        before = ids[None, : len(ids) - count + step]
        given = {"input_ids": before, "attention_mask": torch.ones_like(before)}
        for method, alone in ex.explain(given, methods, int(ids[step - count])).items():
            row, size = together[method].matrix[step], np.abs(alone.scores).max()
            assert np.abs(row[: len(alone)] - alone.scores).max() <= 1e-9 * size, method
            assert not row[len(alone) :].any(), method


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logits_are_real(family):
    certificate = explainer(family).explain(PROMPTS[0]).certificate
    assert certificate["capture_error"] <= 1e-6 and certificate["readout_checked"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_how_many_steps_go_together_does_not_matter(size, monkeypatch):
    ex = explainer()
    whole = ex.explain(PROMPTS, ["generic", "attention-gradcam", "random", "position"], answer=ANSWERS)
    monkeypatch.setattr(type(ex.adapter), "choose_targets_per_pass", lambda self, samples: size)
    parts = ex.explain(PROMPTS, ["generic", "attention-gradcam", "random", "position"], answer=ANSWERS)
    for method in whole:
        for one, other in zip(whole[method], parts[method], strict=True):
            assert np.allclose(one.matrix, other.matrix, rtol=1e-9, atol=1e-12)


def test_an_operation_that_cannot_be_batched_gets_one_backward_pass_a_step():
    class Twice(torch.autograd.Function):  # says nothing about how it is batched
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
    together = ex.explain(PROMPTS[0], answer=ANSWERS[0])
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    for step in range(count):
        alone = ex.explain(
            {"input_ids": ids[None, : len(ids) - count + step]}, target=int(ids[len(ids) - count + step])
        )
        assert np.allclose(together.matrix[step, : len(alone)], alone.scores, rtol=1e-9)


def test_the_next_word_is_explained_by_default():
    ex = explainer()
    e = ex.explain(PROMPTS[0])
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    logits = ex.adapter.model(input_ids=ids).logits[0, -1]
    assert e.matrix is None and e.tokens[0] == "<s>" and e.tokens[-1] == "ie"  # the end token of the tokenizer is gone
    assert e.target["index"] == int(logits.argmax()) == e.prediction["index"]
    assert np.isclose(e.target["value"], float(logits.max().detach()))
    word = WORDS.convert_ids_to_tokens(7)
    assert ex.explain(PROMPTS[0], target=word).target["index"] == 7
    contrast = ex.explain(PROMPTS[0], target=Contrast(7, 9)).target
    assert np.isclose(contrast["value"], float((logits[7] - logits[9]).detach()))


def test_generated_words_are_the_greedy_ones():
    ex = explainer()
    e = ex.explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=5)
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    said = ex.adapter.model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :].tolist()
    assert [step["index"] for step in e.target["steps"]] == said
    assert e.tokens[ids.shape[1] :] == WORDS.convert_ids_to_tokens(said)
    assert e.matrix.shape == (5, len(e)) and e.target["name"] == " ".join(e.steps)
    third = ex.explain(PROMPTS[0], target=GeneratedToken(2))
    assert np.allclose(third.scores, e.matrix[2][: len(third)]) and third.target["place"] == 2
    assert np.allclose(ex.explain(PROMPTS[0], target=GeneratedToken(-1), max_new_tokens=5).scores, e.matrix[4])
    foil = ex.explain(PROMPTS[0], target=GeneratedToken(2, 11, against=12)).target
    assert foil["name"] == f"{ex.adapter.label_name(11)} − {ex.adapter.label_name(12)}"


def test_the_end_of_an_answer_is_no_word_of_it():
    model = made("gpt2")
    ids = torch.tensor([[0, *WORDS(PROMPTS[0], add_special_tokens=False)["input_ids"]]])
    said = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = [said[2], 328]
    ex = clearhead.load(model, WORDS)
    assert len(ex.explain(PROMPTS[0], target=GeneratedToken()).steps) == said.index(said[2])
    # what would come after the answer can be asked about all the same
    after = ex.explain(PROMPTS[0], target=GeneratedToken(said.index(said[2])))
    assert after.target["index"] == said[2]
    model.generation_config.eos_token_id = said[0]
    with pytest.raises(InputError, match="ends its answer before the first word"):
        ex.explain(PROMPTS[0], target=GeneratedToken())


def test_an_answer_is_a_text_or_ids():
    ex = explainer()
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    text = ex.explain(PROMPTS[0], answer=ANSWERS[0])
    for given in (ids[-count:], tuple(ids[-count:].tolist()), ids[-count:].numpy()):
        assert np.array_equal(ex.explain(PROMPTS[0], answer=given).matrix, text.matrix)
    assert text.units.texts == (PROMPTS[0], ANSWERS[0])
    words = text.words()
    assert words.tokens == ["<s>", "I", "like", "the", "movie", "and", "the", "book"]
    assert words.matrix.shape == (count, 8)
    assert text.step(1).target["index"] == int(ids[-count + 1])
    one = ex.explain(PROMPTS[0], answer=ANSWERS[0], target=GeneratedToken(1, against=5), scale="probability")
    assert one.matrix is None and one.target["against"] == ex.adapter.label_name(5)


def test_words_said_in_pieces_of_characters_have_their_places():
    ex = explainer()
    said = WORDS("naïve 😀", add_special_tokens=False)["input_ids"]
    e = ex.explain({"input_ids": torch.tensor([[0, 40, 41]])}, answer=(*said, 300))
    assert e.units.offsets is None or e.words().matrix.shape[0] == len(said) + 1
    sample = ex.adapter.make_samples("I like", InputOptions(continuation=tuple(said)))[0]
    assert sample.units.texts == ("I like", "naïve 😀")


def test_every_row_and_shares_of_layers_reach_over_the_whole_text():
    ex = explainer()
    e = ex.explain(PROMPTS[0], "generic", GeneratedToken(1), answer=ANSWERS[0], rows="all", per=None)
    length = len(ex.adapter.make_samples(PROMPTS[0], InputOptions(continuation=ANSWERS[0]))[0].units)
    assert e.matrix.shape == (length, length)
    shares = ex.explain(PROMPTS[0], "generic", GeneratedToken(1), answer=ANSWERS[0], per="head")
    assert shares.per_layer.shape == (3, length) and shares.per_head.shape == (3, 4, length)
    assert np.allclose(shares.per_head.sum((0, 1)), shares.scores) and np.allclose(e.scores, shares.scores)
    with pytest.raises(InputError, match="rows='all' is for one target"):
        ex.explain(PROMPTS[0], answer=ANSWERS[0], rows="all")


def test_padding_on_either_side_is_none():
    """Where positions are relative: rotary ones."""
    ex = explainer("llama")
    ids, _ = ids_of(PROMPTS[0], ANSWERS[0], ex)
    plain = ex.explain({"input_ids": ids[None]}, ["generic", "attention-gradcam", "random"])
    ones, pad = torch.ones(1, len(ids), dtype=torch.long), torch.full((1, 3), 1)
    none = torch.zeros_like(pad)
    for parts, mask in (((pad, ids[None]), (none, ones)), ((ids[None], pad), (ones, none))):
        given = {"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(mask, 1)}
        padded = ex.explain(given, ["generic", "attention-gradcam"])
        for method, e in padded.items():
            assert e.tokens == plain[method].tokens and np.array_equal(e.scores, plain[method].scores)
    mask = ones.clone()
    mask[0, 2] = 0
    with pytest.raises(InputError, match="hides tokens inside"):
        ex.explain({"input_ids": ids[None], "attention_mask": mask})


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


def positioned(family: str, dtype: torch.dtype = torch.float32) -> Any:
    name, settings = POSITIONS[family]
    cls = getattr(transformers, name)
    torch.manual_seed(7)
    return cls(cls.config_class(**settings)).to(dtype).eval()


@pytest.mark.parametrize("family", POSITIONS)
def test_left_padded_inputs_are_explained_as_the_model_computes_them(family: str) -> None:
    """The number explained, and its gradient at the tokens, are those of a plain pass over the padded inputs."""
    model = positioned(family)
    explanation = clearhead.load(model).explain(PADDED, "input-x-gradient")
    starts: list[torch.Tensor] = []

    def start(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        starts.append(output.detach().requires_grad_())
        return starts[0].clone()

    with remove_hooks_on_exit([model.get_input_embeddings().register_forward_hook(start)]):
        top = model(**PADDED).logits[0, -1].max()
    (gradient,) = torch.autograd.grad(top, starts)
    expected = (gradient * starts[0]).sum(-1)[0, 3:].detach().numpy()
    assert explanation.target["value"] == pytest.approx(top.item(), rel=1e-5)
    assert len(explanation) == 8
    assert np.abs(explanation.scores - expected).max() <= 1e-4 * np.abs(expected).max()


def test_left_padding_is_explained_in_half_precision() -> None:
    """Rounding may be larger than what positions change: the nearer of the two ways is the right one."""
    model = positioned("gpt2", torch.bfloat16)
    explanation = clearhead.load(model).explain(PADDED)
    assert explanation.target["value"] == model(**PADDED).logits[0, -1].max().item()


def test_an_answer_after_left_padding_goes_on_where_the_prompt_ends() -> None:
    model = positioned("gpt2", torch.float64)
    explanation = clearhead.load(model).explain(PADDED, answer=[20, 21])
    ids = torch.cat([PADDED["input_ids"], torch.tensor([[20, 21]])], 1)
    mask = torch.cat([PADDED["attention_mask"], torch.ones(1, 2, dtype=torch.long)], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[0]
    expected = [logits[10, 20].item(), logits[11, 21].item()]
    assert [step["value"] for step in explanation.target["steps"]] == pytest.approx(expected, abs=1e-10)


def test_words_generated_after_left_padding_are_those_of_generate() -> None:
    """And so are their logits, which it has in float32: `generate` counts positions by the mask."""
    model = positioned("gpt2", torch.float64)
    explanation = clearhead.load(model).explain(PADDED, target=GeneratedToken(), max_new_tokens=3)
    with torch.no_grad():
        said = model.generate(
            **PADDED, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    steps = explanation.target["steps"]
    assert [step["index"] for step in steps] == said.sequences[0, 11:].tolist()
    expected = [logits.max().item() for logits in said.logits]
    assert [step["value"] for step in steps] == pytest.approx(expected, abs=1e-5)


def test_a_padded_batch_of_texts_is_explained_as_the_texts() -> None:
    ex = explainer()
    for together, prompt in zip(ex.explain(PROMPTS), PROMPTS, strict=True):
        alone = ex.explain(prompt)
        assert together.target["value"] == pytest.approx(alone.target["value"], abs=1e-10)
        assert np.allclose(together.scores, alone.scores)


def test_left_padding_that_no_positions_make_up_for_is_refused() -> None:
    """A model that takes no position_ids; a softmax of padding alone, which is NaN in float64."""

    class WithoutPositionIds(transformers.GPT2LMHeadModel):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    ex = clearhead.load(WithoutPositionIds(transformers.GPT2Config(**_GPT)).double().eval())
    with pytest.raises(InputError, match=r"other logits with the 3 padding tokens in front .*pad on the right"):
        ex.explain(PADDED)
    eager = clearhead.load(made("llama", attn_implementation="eager"))
    with pytest.raises(InputError, match="no finite logits with the 3 padding tokens"):
        eager.explain(PADDED)
    long = {name: torch.nn.functional.pad(part, (60, 0)) for name, part in PADDED.items()}
    with pytest.raises(InputError, match="71 tokens, 63 of them padding"):
        explainer().explain(long)


def test_a_function_of_the_output_sees_all_of_it():
    ex = explainer()
    mine = ex.explain(PROMPTS[0], target=lambda output: output.logits[:, -1, 7])
    assert np.array_equal(mine.scores, ex.explain(PROMPTS[0], target=7).scores)
    with pytest.raises(UnsupportedError, match="depends on rows"):
        clearhead.load(made("gpt2"), WORDS).explain(PROMPTS[0], target=lambda output: output.logits[:, 1, 7])


def test_embeddings_can_be_given_for_the_next_word_alone():
    ex = explainer()
    ids, _ = ids_of(PROMPTS[0], ANSWERS[0])
    vectors = ex.adapter.embeddings(ids)[None].detach()
    given = ex.explain({"inputs_embeds": vectors})
    assert np.allclose(given.scores, ex.explain({"input_ids": ids[None]}).scores, rtol=1e-9)
    with pytest.raises(InputError, match="input_ids"):
        ex.explain({"inputs_embeds": vectors}, target=GeneratedToken())
    with pytest.raises(InputError, match="input_ids"):
        ex.explain({"inputs_embeds": vectors}, answer=(5, 6))


def chatty() -> Any:
    tokenizer = models.tokenizer("bytes")
    twin = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    twin.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if not loop.last %}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}</s>assistant:{% endif %}"
    )
    return twin


def test_a_conversation_has_one_start_token():
    ex = clearhead.load(made("gpt2"), chatty())
    chat = [{"role": "user", "content": "I like the book"}]
    e = ex.explain(chat, answer=" so")
    assert e.tokens[0] == "<s>" and e.tokens.count("<s>") == 1
    assert e.units.special[0] and e.units.special[e.tokens.index("</s>")]
    rendered = ex.adapter.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert np.array_equal(ex.explain(rendered, answer=" so").scores, e.scores), "a rendered text is not begun twice"
    both = ex.explain([chat, [*chat, {"role": "assistant", "content": "So"}]])
    assert len(both) == 2 and both[1].tokens[-2:] == ["S", "o"]
    with pytest.raises(InputError, match="no chat template"):
        explainer().explain(chat)


def test_an_end_token_of_the_prompt_itself_stays():
    """Some conversations are rendered with an end token last: it is what makes the model answer."""
    ending = chatty()
    ending.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    ex = clearhead.load(made("gpt2"), ending)
    e = ex.explain([{"role": "user", "content": "I like"}])
    ids = ending("I like</s>", add_special_tokens=False)["input_ids"]
    assert e.tokens == ending.convert_ids_to_tokens(ids) and e.tokens[-1] == "</s>"
    logits = ex.adapter.model(input_ids=torch.tensor([ids])).logits[0, -1]
    assert np.isclose(e.target["value"], float(logits.max().detach()))
    # one that was typed stays, and the one that the tokenizer puts after it goes
    for prompt, ends in (("I like", 0), ("I like</s>", 1), ("I like</s></s>", 2)):
        tokens = explainer().explain(prompt).tokens
        assert tokens.count("</s>") == ends and tokens[0] == "<s>"
        assert explainer().explain(prompt, answer=" the").tokens == [*tokens, "Ġthe"]


def test_a_long_prompt_loses_its_beginning():
    ex = explainer()
    plain = ex.explain(PROMPTS[1])
    e = ex.explain(PROMPTS[1], max_length=6)  # one of them is the end token, which goes
    assert e.tokens == ["<s>", *plain.tokens[-4:]] and e.certificate["truncated_tokens"] > 0
    right = ex.explain(PROMPTS[1], max_length=6, truncation_side="right")
    assert right.tokens == plain.tokens[:5]


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        ("", {}, "the text is empty"),
        (("a", "b"), {}, "expected a prompt"),
        (3, {}, "expected a prompt"),
        ("I like", {"answer": ""}, "the answer is empty"),
        ("I like", {"answer": [[1.5]]}, "answer="),
        ("I like", {"answer": (1, 9999)}, "9999"),
        ("I like", {"answer": " it", "target": "it"}, "Generated"),
        ("I like", {"answer": " it", "target": GeneratedToken(9)}, "step 9 does not exist"),
        ("I like", {"target": clearhead.MaskedToken("it")}, "nothing that GPT2LMHeadModel says"),
        ("I like", {"target": clearhead.DetectionQuery(1)}, "nothing that GPT2LMHeadModel says"),
        ("I like", {"target": "incomprehensible"}, "is not one word"),
        ("I like", {"target": GeneratedToken(), "max_new_tokens": 0}, "max_new_tokens=0"),
        ("I like", {"answer": tuple(range(3, 90))}, "more than the model takes"),
        ({"input_ids": torch.zeros(1, 70, dtype=torch.long)}, {"target": GeneratedToken()}, "fills all 70 tokens"),
    ],
)
def test_bad_input_gets_one_clear_message(given, how, said):
    with pytest.raises(InputError, match=said):
        explainer().explain(given, **how)


def test_a_soft_cap_that_the_model_itself_leaves_out_is_refused():
    """What is recorded has the cap, so it would not be what the model does."""
    if not transformers.Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers does not run Gemma 2 under sdpa, which knows no soft cap")
    with pytest.raises(UnsupportedError, match=r"logits change by .* when its attention is recorded"):
        clearhead.load(made("gemma2", attn_implementation="sdpa"), WORDS).explain(PROMPTS[0])


def test_a_model_that_looks_ahead_is_refused():
    config = transformers.BertConfig(
        **{key: value for key, value in _BODY.items() if key not in ("head_dim", "num_key_value_heads")}
    )
    with pytest.raises(UnsupportedError, match="no decoder"):
        clearhead.load(transformers.BertLMHeadModel(config).eval(), WORDS).explain("I like")


def test_the_model_is_untouched():
    model = made("llama").train()
    model.generation_config.temperature = 0.7
    before, settings = model_snapshot.of_model(model), model.generation_config.to_dict()
    tokenizer_before = model_snapshot.of_processor(WORDS)
    ex = clearhead.load(model, WORDS)
    ex.explain(PROMPTS, ["generic", "saliency"], GeneratedToken(), max_new_tokens=3)
    with pytest.raises(InputError):
        ex.explain(PROMPTS[0], target=GeneratedToken(90))
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert not model_snapshot.changes(tokenizer_before, model_snapshot.of_processor(WORDS))
    assert model.generation_config.to_dict() == settings


_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def test_positions_that_depend_on_the_length_are_not_mixed():
    ex = clearhead.load(made("llama", rope_parameters=_DYNAMIC, max_position_embeddings=8), WORDS)
    assert ex.adapter.tokenizer_wrapper.max_positions == 16, "such positions are stretched"
    assert ex.adapter.choose_targets_per_pass(ex.adapter.make_samples(PROMPTS[0], InputOptions())) == 1
    ids, count = torch.arange(5, 17), 4
    with Wide():
        e = ex.explain({"input_ids": ids[None, :-count]}, answer=ids[-count:])
        for step in range(count):
            alone = ex.explain({"input_ids": ids[None, : len(ids) - count + step]}, target=int(ids[step - count]))
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
def test_a_longer_input_before_changes_nothing(family, rope, size):
    """A dynamic RoPE keeps the frequencies of the longest input so far: the model answers otherwise from then on.

    transformers 5.0 forgets only that it has them: it makes them anew for whatever is longer than its positions."""
    layers = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]} if family == "gemma3" else {}
    model = made(family, rope_parameters=rope, max_position_embeddings=size, **layers)
    ex, given = clearhead.load(model, WORDS), {"input_ids": torch.arange(5, 13)[None]}
    methods = ["generic", "integrated-gradients", "occlusion"]
    before, first = model_snapshot.of_model(model), ex.explain(given, methods, target=3)
    ex.explain({"input_ids": torch.arange(5, 17)[None]}, methods, GeneratedToken(), max_new_tokens=3)
    for method, again in ex.explain(given, methods, target=3).items():
        assert np.array_equal(again.scores, first[method].scores) and again.target == first[method].target
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    with torch.no_grad():
        assert float(model(**given).logits[0, -1, 3]) == pytest.approx(first["generic"].target["value"], rel=1e-5)


@pytest.mark.parametrize("head", ["CausalLM", "SequenceClassification"])
def test_inputs_do_not_mix_where_positions_depend_on_the_longest(head):
    cls = getattr(transformers, f"Phi3For{head}")
    rope = {**_LONG, "original_max_position_embeddings": 8}
    settings = {**_BODY, "rope_parameters": rope, "original_max_position_embeddings": 8}
    torch.manual_seed(0)
    ex = clearhead.load(cls(transformers.Phi3Config(**settings)).double().eval())
    short, long = {"input_ids": torch.arange(5, 10)[None]}, {"input_ids": torch.arange(5, 17)[None]}
    alone, batched = ex.explain(short, target=1), ex.explain([short, long], target=1)[0]
    assert np.array_equal(alone.scores, batched.scores) and alone.target == batched.target
    with pytest.raises(InputError, match="cannot share a batch"):
        ex.record([short, long], target=1)


def spread(words: str, folder: Any) -> Any:
    """A model whose words are in memory or on disk, and one of whose layers is on disk."""
    accelerate = pytest.importorskip("accelerate")
    place = {"model.embed_tokens": words, "model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    place |= {"model.layers.0": words, "model.layers.2": "cpu", "lm_head": "cpu"}
    return accelerate.dispatch_model(made("llama"), place, main_device="cpu", offload_dir=folder)


def test_words_that_are_on_disk_are_looked_up_where_accelerate_says(tmp_path):
    model = spread("disk", tmp_path)
    assert model.model.embed_tokens.weight.device.type == "meta"
    assert find_module_device(model) == find_module_device(model.model.embed_tokens) == torch.device("cpu")


@pytest.mark.parametrize("words", ["cpu", "disk"])
def test_a_model_that_is_spread_over_devices(words, tmp_path):
    given, methods = {"input_ids": torch.arange(5, 10)[None]}, ["generic", "integrated-gradients", "occlusion"]
    plain = clearhead.load(made("llama")).explain(given, method=methods)
    model = spread(words, tmp_path)
    ex = clearhead.load(model)
    for method, found in ex.explain(given, method=methods).items():
        assert np.allclose(found.scores, plain[method].scores, rtol=1e-9), method
    assert len(ex.explain(given, target=GeneratedToken(), max_new_tokens=2).steps) == 2
    with pytest.raises(InputError, match="distributed over devices"):
        clearhead.load(model, dtype="float32")


def test_a_quantised_model_stays_as_it_is():
    model = made("llama")
    model.is_quantized = True
    assert clearhead.load(model).adapter.model is model
    with pytest.raises(InputError, match="quantised and cannot be moved"):
        clearhead.load(model, dtype="float32")


def test_a_head_of_whole_numbers():
    """torch's own quantised layers have a function in the place of weights."""

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


@pytest.mark.filterwarnings("ignore")  # torch means to take it away
def test_dynamic_int8_is_refused_by_name():
    model = torch.ao.quantization.quantize_dynamic(made("llama", torch.float32), {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedError, match="dynamic int8 rounds"):
        clearhead.load(model, WORDS).explain("I like")


def test_one_list_of_ids_is_one_answer():
    ex = explainer()
    assert np.array_equal(ex.explain("I like", answer=[5, 6]).matrix, ex.explain("I like", answer=(5, 6)).matrix)
    with pytest.raises(InputError, match="one for each, a text or its token ids"):
        ex.explain("I like", answer=["a", "b"])


@pytest.mark.parametrize("setting", [{"num_return_sequences": 2}, {"penalty_alpha": 0.6}, {"stop_strings": ["zzz"]}])
def test_settings_of_generation_that_are_not_greedy(setting):
    model = made("gpt2")
    said = explainer().explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=2).steps
    for name, value in setting.items():
        setattr(model.generation_config, name, value)
    assert clearhead.load(model, WORDS).explain(PROMPTS[0], target=GeneratedToken(), max_new_tokens=2).steps == said


def test_settings_of_generation_that_cannot_be_met_are_said():
    model = made("gpt2")
    model.generation_config.stop_strings = ["zzz"]  # to find them needs a tokenizer
    with pytest.raises(InputError, match="generation_config"):
        clearhead.load(model).explain({"input_ids": torch.tensor([[5, 6]])}, target=GeneratedToken())


def test_weights_that_are_no_numbers_are_named():
    model = made("llama")
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(UnsupportedError, match="not finite"):
        clearhead.load(model, WORDS).explain("I like")


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ([{"role": "user"}], "message 0 of a conversation"),
        ([{"role": "user", "content": "I"}, {"role": "user", "content": None}], "message 1 of a conversation"),
        ({"role": "user", "content": "I"}, "a list of messages"),
        ([{"content": "I"}], "a list of messages"),
        ({"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[5, 6]])}, "leave out labels"),
    ],
)
def test_conversations_and_model_inputs_that_lack_something(chat, said):
    with pytest.raises(InputError, match=said):
        clearhead.load(made("gpt2"), chatty()).explain(chat)


def test_a_tape_of_one_step():
    ex = explainer()
    tape = ex.record(PROMPTS[0], "attention", GeneratedToken(1), answer=ANSWERS[0])
    assert len(tape.calls) == 3 and tape.logits.shape == (1, len(WORDS))
    steps = ex.record(PROMPTS[0], "attention_gradient", answer=ANSWERS[0])
    count = ids_of(PROMPTS[0], ANSWERS[0])[1]
    assert steps.calls[0].attention_gradient.shape[0] == count == len(steps.value)


@pytest.mark.parametrize(("target", "steps"), [(None, None), (GeneratedToken(0), [0]), (GeneratedToken(2), [2])])
def test_a_tape_reads_the_rows_that_speak(target, steps):
    ex = explainer()
    ids, count = ids_of(PROMPTS[0], ANSWERS[0])
    rows = [len(ids) - count - 1 + step for step in (range(count) if target is None else steps)]
    tape = ex.record(PROMPTS[0], "attention_gradient", target, answer=ANSWERS[0])
    with torch.no_grad():
        logits = ex.adapter.model(ids[None]).logits[0]
    assert torch.allclose(tape.logits, logits[rows], atol=1e-9)
    for row, gradient in zip(rows, tape.calls[-1].attention_gradient, strict=True):
        assert gradient.sum((0, 2)).nonzero().flatten().tolist() == [row]


def test_a_tape_of_the_next_word():
    ex = explainer()
    tape = ex.record(PROMPTS, "attention_gradient")
    assert tape.value.tolist() == pytest.approx([e.target["value"] for e in ex.explain(PROMPTS)], abs=1e-9)


@pytest.mark.parametrize("method", ["deeplift", "deeplift-shap"])
def test_captums_steps_together_are_steps_alone(method):
    ex, count = explainer(), ids_of(PROMPTS[0], ANSWERS[0])[1]
    how = {"answer": ANSWERS[0], "profile": "captum"}
    together = ex.explain(PROMPTS[0], method, **how).matrix
    for step in range(count):
        alone = ex.explain(PROMPTS[0], method, GeneratedToken(step), **how).scores
        assert np.abs(together[step, : len(alone)] - alone).max() <= 1e-9 * np.abs(alone).max()


def test_the_pair_behind_a_looked_up_value_is_found():
    """The zoo's model that looks up keys: the last map looks at the pair alone."""
    if "recall" not in clearhead.zoo_models():
        pytest.skip("zoo:recall has not landed")
    e = clearhead.load("zoo:recall").explain("k7 v2 k3 v9 k3 →", "attention")
    assert e.prediction["label"] == "v9" and {name for name, _ in e.top(2)} == {"k3", "v9"}
