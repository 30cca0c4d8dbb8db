"""Unmerged PEFT adapters: rule-based methods give the scores of the merged model and leave the model unchanged."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import clearhead
from clearhead import Method, UnsupportedError
from clearhead.backward_rules.mode import RuleMode
from clearhead.capture.session import remove_hooks_on_exit
from tests import models
from tests.adapters.test_decoder import WORDS, made
from tests.invariants import model_snapshot

peft = pytest.importorskip("peft")

#: Every rule-based method with each choice of rules, and input × gradient, which checks the start of the graph.
METHODS = [
    *(Method(name, rules="ours") for name in ("lrp", "partial-lrp", "transformer-attribution")),
    *(Method(name, rules="orig") for name in ("lrp", "partial-lrp", "transformer-attribution")),
    Method("lrp", positions=True),
    Method("transformer-attribution", normalise=True),
    *map(Method, ("attn-lrp", "cp-lrp", "pa-lrp", "libragrad", "gim", "deeplift", "deeplift-shap", "input-x-gradient")),
]
BERT = ["query", "key", "value", "dense"]


def load_model(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Any]:
    """A tiny model, its processor, and an input."""
    if name == "vit":
        return (*models.image_model(name, dtype), models.inputs("vit/image")[0])
    if name in ("llama", "gpt2"):
        return made(name, dtype), WORDS, "I like the movie"
    return (*models.text_model(name, dtype=dtype), models.TEXTS[1])


def randomise_adapters(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The model with random adapter weights: by default half of each adapter is zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.2)
    return model.to(dtype).eval()


def make_lora_model(
    name: str, target: list[str] | str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any, Any]:
    model, processor, raw = load_model(name, dtype)
    settings = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": target, **options}
    return randomise_adapters(peft.get_peft_model(model, peft.LoraConfig(**settings)), dtype), processor, raw


def assert_equals_merged(model: Any, processor: Any, raw: Any, methods: list[Method] = METHODS) -> None:
    merged = copy.deepcopy(model).merge_and_unload()
    before = model_snapshot.of_model(model)
    actual = clearhead.load(model, processor).explain(raw, methods)
    assert model_snapshot.changes(before, model_snapshot.of_model(model)) == []
    expected = clearhead.load(merged, processor).explain(raw, methods)
    for method, explanation in actual.items():
        scores = expected[method].scores
        assert np.abs(explanation.scores - scores).max() <= 1e-9 * np.abs(scores).max(), method


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        ("bert", ["query", "value"], {}),
        ("bert", BERT, {"use_rslora": True, "lora_bias": True}),
        ("bert", BERT, {"use_dora": True}),
        ("bert", ["query", "word_embeddings", "position_embeddings"], {}),
        ("bert", ["query"], {"trainable_token_indices": {"word_embeddings": [75, 95]}}),
        ("bert", ["query"], {"modules_to_save": ["classifier"]}),
        ("vit", "all-linear", {}),
        ("vit", ["projection"], {}),
        ("llama", "all-linear", {}),
        ("gpt2", ["c_attn", "c_proj", "c_fc"], {"fan_in_fan_out": True}),
    ],
)
def test_lora_scores_equal_merged_model(name: str, target: list[str] | str, options: dict[str, Any]) -> None:
    """Linear layers, GPT-2's transposed ones, the patch convolution, and embedding tables."""
    assert_equals_merged(*make_lora_model(name, target, **options))


def test_several_active_adapters_equal_merged_model() -> None:
    model, tokenizer, text = make_lora_model("bert", BERT)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["query", "key"]))
    model.add_adapter("idle", peft.LoraConfig(r=3, target_modules=["query", "key"]))
    model.base_model.set_adapter(["default", "second"])
    assert_equals_merged(randomise_adapters(model), tokenizer, text)


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
        lambda: peft.LoHaConfig(target_modules=BERT, r=2),
        lambda: peft.LoKrConfig(target_modules=BERT, r=2),
        lambda: peft.OFTConfig(target_modules=BERT, oft_block_size=4),
    ],
    ids=["ia3", "loha", "lokr", "oft"],
)
def test_other_adapter_types_equal_merged_model(config: Callable[[], Any]) -> None:
    model, tokenizer, text = load_model("bert")
    assert_equals_merged(randomise_adapters(peft.get_peft_model(model, config())), tokenizer, text, METHODS[:6])


def test_profiles_equal_merged_model() -> None:
    model, tokenizer, text = make_lora_model("bert", BERT)
    merged = copy.deepcopy(model).merge_and_unload()
    for profile in ("te_bert_notebook", "te_bert_eraser"):
        actual, expected = (
            clearhead.load(each, tokenizer).explain(text, "transformer-attribution", profile=profile).scores
            for each in (model, merged)
        )
        assert actual == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_adapters_are_merged_in_float32(dtype: torch.dtype) -> None:
    """Base and adapter weights are merged without rounding to half precision."""
    model, tokenizer, text = make_lora_model("bert", BERT, dtype)
    exact = copy.deepcopy(model).double()
    actual, expected = (
        clearhead.load(each, tokenizer).explain(text, "lrp", target=1).scores for each in (model, exact)
    )
    assert np.abs(actual - expected).max() <= 1e-3 * np.abs(expected).max()


def test_merged_and_disabled_adapters_are_respected() -> None:
    model, tokenizer, text = make_lora_model("bert", BERT)
    plain = clearhead.load(load_model("bert")[0], tokenizer).explain(text, "lrp").scores
    ex = clearhead.load(model, tokenizer)
    unmerged = ex.explain(text, "lrp").scores
    assert np.abs(unmerged - plain).max() > 1e-3
    with model.disable_adapter():
        assert np.array_equal(ex.explain(text, "lrp").scores, plain)
    model.merge_adapter()
    assert np.array_equal(ex.explain(text, "lrp").scores, unmerged)


def test_unmergeable_adapter_raises_until_disabled() -> None:
    """peft does not merge the bias of an adapter. Methods with linear rules need no merging."""
    model, tokenizer, text = make_lora_model("llama", ["q_proj", "v_proj"], lora_bias=True)
    ex = clearhead.load(model, tokenizer)
    why_not = {line.name: line.why_not for line in ex.methods()}
    assert "q_proj (lora.layer.Linear) cannot be merged into one linear map with the layer" in why_not["lrp"]
    assert not why_not["attn-lrp"] and not why_not["deeplift"]
    with pytest.raises(UnsupportedError, match=r"lrp cannot explain .* disable the adapters, or choose attn-lrp"):
        ex.explain(text, "lrp")
    with model.disable_adapter():
        assert np.abs(ex.explain(text, "lrp").scores).max() > 0


def test_offloaded_and_quantised_layers_raise() -> None:
    model, tokenizer, text = make_lora_model("bert", ["query"])
    ex = clearhead.load(model, tokenizer)
    ex.explain(text, "attention")
    layer = next(module for name, module in model.named_modules() if name.endswith("query"))
    weight = layer.base_layer.weight
    layer.base_layer.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match="its weights are quantised"):
        ex.explain(text, "lrp")
    layer.base_layer.weight = nn.Parameter(weight.to("meta"))
    with pytest.raises(UnsupportedError, match="its weights are offloaded"):
        ex.explain(text, "lrp")


def test_user_hooks_on_adapted_layers_still_run() -> None:
    """A hook that changes the output changes the explanation, too."""
    model, tokenizer, text = make_lora_model("bert", ["query", "value"])
    merged = copy.deepcopy(model).merge_and_unload()
    hook_calls = []

    def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        hook_calls.append(output.shape)
        return output + 0.5

    def explain_steered(each: Any) -> np.ndarray:
        layers = [submodule for name, submodule in each.named_modules() if name.endswith("value")]
        with remove_hooks_on_exit([layer.register_forward_hook(steer) for layer in layers]):
            return clearhead.load(each, tokenizer).explain(text, "lrp").scores

    scores = explain_steered(model)
    assert hook_calls
    assert scores == pytest.approx(explain_steered(merged), abs=1e-9)
    assert np.abs(scores - clearhead.load(model, tokenizer).explain(text, "lrp").scores).max() > 1e-6


def test_merging_does_not_affect_passes_of_other_threads() -> None:
    model, tokenizer, text = make_lora_model("bert", BERT)
    inputs = tokenizer(text, return_tensors="pt")
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    gradients: list[torch.Tensor] = []

    def differentiate() -> None:
        start = embeddings.clone().requires_grad_()
        output = model(inputs_embeds=start, attention_mask=inputs["attention_mask"])
        gradients.append(torch.autograd.grad(output.logits.sum(), start)[0])

    differentiate()

    def run_in_other_thread(module: nn.Module, args: Any) -> None:
        under_rules = any(isinstance(mode, RuleMode) for mode in _get_current_function_mode_stack())
        if under_rules and len(gradients) == 1:
            thread = threading.Thread(target=differentiate)
            thread.start()
            thread.join()

    with remove_hooks_on_exit([model.base_model.model.bert.encoder.register_forward_pre_hook(run_in_other_thread)]):
        clearhead.load(model, tokenizer).explain(text, "lrp")
    assert len(gradients) == 2 and torch.equal(*gradients)
