"""Streaming passes: tiles put together are the maps that are recorded whole, for every kind of mask and attention."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.recorder import Recorder
from clearhead.capture.sources.attention_interface import find_eager_forward
from clearhead.capture.tape import AttentionCall, Tape
from tests import models
from tests.capture.reference_kernel import WholeMaps

_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "initializer_range": 0.3,
    "sliding_window": 4,
    "pad_token_id": 0,
}
_BART = {
    "vocab_size": 40,
    "d_model": 16,
    "init_std": 0.3,
    "pad_token_id": 0,
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in (("layers", 2), ("ffn_dim", 24))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
#: What each is here for, and its class and configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "both ways": ("BertForSequenceClassification", _SMALL),
    "causal": (
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "grouped heads": ("LlamaForCausalLM", _SMALL),
    "sliding window": ("MistralForCausalLM", _SMALL),
    "window both ways": (
        "ModernBertForSequenceClassification",
        {**_SMALL, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1},
    ),
    "soft cap": ("Gemma2ForCausalLM", {**_SMALL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "sinks": (
        "GptOssForCausalLM",
        {**_SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
    "across": ("BartForConditionalGeneration", _BART),
    "position bias": ("T5ForConditionalGeneration", _T5),
}
#: Those whose attention torch's kernel has no way to make.
EAGER_ONLY = ("soft cap", "sinks")
CASES = [(name, own) for name in MODELS for own in ("eager", "sdpa") if own == "eager" or name not in EAGER_ONLY]
ASKS = ("attention_gradient", "block_input_gradient", "input_gradient")


def model_of(name: str, own: str, dtype: torch.dtype) -> Any:
    if name == "position bias":
        models.skip_if_not_yet("t5")
    if name == "window both ways":
        models.skip_if_not_yet("modernbert")
    cls, settings = MODELS[name]
    model_class = getattr(transformers, cls)
    torch.manual_seed(5)
    model = model_class(model_class.config_class(**settings)).to(dtype).eval()
    model.config._attn_implementation_internal = own
    return model


@cache
def recorder(name: str, own: str, dtype: torch.dtype) -> Recorder:
    model = model_of(name, own, dtype)

    def streams(module: str, nth: int) -> tuple[str, str]:
        """The decoder looks at itself or, across, at the source."""
        looks = "text" if "decoder" in module and name in ("across", "position bias") else "source"
        across = "encoder_attn" in module or "EncDec" in module
        return looks, "source" if across else looks

    found = Recorder(model, streams)
    # kernels differ in what a row looks at that sees nothing, so the recorder is tested where there is no such row
    found.run_self_test({key: part[:1] for key, part in batch(name).items()})
    return found


def batch(name: str) -> dict[str, torch.Tensor]:
    """A text of nine words, and one of six with padding after it (before it, once)."""
    ids = torch.arange(18).reshape(2, 9) * 7 % 37 + 2
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 3) if name == "grouped heads" else slice(6, 9)] = 0
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if name in ("across", "position bias"):
        given["decoder_input_ids"] = torch.tensor([[2, 5, 9, 11], [2, 30, 21, 4]])
    return given


def value(output: Any) -> torch.Tensor:
    logits = output.logits
    return logits[:, 1] if logits.dim() == 2 else logits[:, 3, 7] + logits[:, -4, 5]


class Together:
    """Tiles of each call, put together again."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], list[AttentionCall]] = {}
        self.order: list[tuple[str, int]] = []
        self.places: dict[tuple[str, int], list[int]] = {}

    def fold(self, call: AttentionCall, queries: slice, sweep: int) -> None:
        key = (call.module, sweep)
        self.parts.setdefault(key, []).append(call)
        self.places.setdefault(key, []).extend(range(queries.start, queries.stop))

    def whole(self, call: AttentionCall, part: str, sweep: int = 0) -> torch.Tensor:
        return torch.cat([getattr(one, part) for one in self.parts[call.module, sweep]], dim=2)


def streamed(name: str, own: str, dtype: torch.dtype, **how: Any) -> tuple[Together, Tape]:
    together = Together()
    tiles = TilingConfig(together.fold, **how)
    return together, recorder(name, own, dtype).record(batch(name), value, ASKS, tiling=tiles)


def words(name: str, call: AttentionCall) -> torch.Tensor:
    """The cells of a map that belong to words: padding that sees nothing looks anywhere, and nobody reads that."""
    every = torch.ones(2, 4)
    seen = {"source": batch(name)["attention_mask"], "text": every}
    return (seen[call.query_stream][:, None, :, None] * seen[call.key_stream][:, None, None]).double()


@cache
def materialised(name: str, own: str, dtype: torch.dtype) -> Tape:
    return recorder(name, own, dtype).record(batch(name), value, ASKS)


def near(one: torch.Tensor, other: torch.Tensor, name: str, own: str, dtype: torch.dtype) -> bool:
    # some models' eager softmax and norms compute in float32 whatever their dtype
    narrow = dtype == torch.float32 or name not in ("both ways", "causal", "across", "position bias")
    return bool((one - other).abs().max() <= (1e-5 if narrow else 1e-12) * other.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("name", "own", "rows"), [*((*case, 4) for case in CASES), ("both ways", "sdpa", 1), ("both ways", "sdpa", None)]
)
def test_tiles_are_the_maps(name: str, own: str, rows: int | None) -> None:
    dtype = torch.float64
    together, tape = streamed(name, own, dtype, tile_rows=rows, needs_masked_gradients=True)
    expected = materialised(name, own, dtype)
    assert [call.module for call in tape.calls] == [call.module for call in expected.calls]
    for mine, call in zip(tape.calls, expected.calls, strict=True):
        assert mine.attention is None and mine.attention_gradient is None
        attention, gradient = together.whole(call, "attention"), together.whole(call, "attention_gradient")
        assert together.places[call.module, 0] == list(range(attention.shape[2]))
        kept = words(name, call)
        assert near(attention * kept, call.attention * kept, name, own, dtype)
        assert near(gradient * kept, call.attention_gradient * kept, name, own, dtype)
        assert near(mine.block_input_gradient, call.block_input_gradient, name, own, dtype)
    assert near(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, own, dtype)
    assert torch.allclose(tape.value, expected.value, rtol=1e-5)


@pytest.mark.parametrize(("name", "own"), [("both ways", "sdpa"), ("sliding window", "sdpa"), ("soft cap", "eager")])
def test_in_float32(name: str, own: str) -> None:
    together, _ = streamed(name, own, torch.float32, tile_rows=4, needs_masked_gradients=True)
    for call in materialised(name, own, torch.float32).calls:
        gradient, kept = together.whole(call, "attention_gradient"), words(name, call)
        assert near(gradient * kept, call.attention_gradient * kept, name, own, torch.float32)


@pytest.mark.parametrize(("name", "own"), CASES)
def test_keys_that_no_query_of_a_tile_sees_are_left_out(name: str, own: str) -> None:
    """Where attention is hidden its product with the gradient is zero either way."""
    together, tape = streamed(name, own, torch.float64, tile_rows=3)
    expected = materialised(name, own, torch.float64)
    for call in expected.calls:
        product = together.whole(call, "attention") * together.whole(call, "attention_gradient")
        assert near(product, call.attention * call.attention_gradient, name, own, torch.float64)
    assert near(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, own, torch.float64)


def test_every_sweep_sees_every_tile() -> None:
    together, _ = streamed("both ways", "sdpa", torch.float64, tile_rows=4, tile_passes=2, needs_masked_gradients=True)
    for call in materialised("both ways", "sdpa", torch.float64).calls:
        for part in ("attention", "attention_gradient"):
            assert torch.equal(together.whole(call, part, 0), together.whole(call, part, 1))


def test_calls_are_folded_from_the_last_to_the_first_and_then_handed_over() -> None:
    heard: list[str] = []
    tiles = TilingConfig(lambda call, queries, sweep: heard.append(f"tile of {call.layer}"), tile_rows=5)
    recorder("both ways", "sdpa", torch.float64).run(
        batch("both ways"), value, ASKS, lambda call: heard.append(f"call {call.layer}"), tiling=tiles
    )
    assert heard == ["tile of 1", "tile of 1", "call 1", "tile of 0", "tile of 0", "call 0"]


def test_attention_alone_needs_no_backward_pass() -> None:
    together = Together()
    record = recorder("both ways", "sdpa", torch.float64)
    with torch.no_grad():
        record.run(
            batch("both ways"),
            value,
            ["attention"],
            tiling=TilingConfig(together.fold, tile_rows=4, needs_masked_gradients=True),
        )
    for call in materialised("both ways", "sdpa", torch.float64).calls:
        assert together.whole(call, "attention").shape == call.attention.shape
        assert all(part.attention_gradient is None for part in together.parts[call.module, 0])


@pytest.mark.parametrize(("name", "own"), [*CASES, ("both ways", "kernel"), ("grouped heads", "kernel")])
def test_layers_computed_twice_are_the_same(name: str, own: str) -> None:
    """The gradients of layers' inputs and of the words, from tapes that were never whole."""
    dtype, kernel = torch.float64, WholeMaps() if own == "kernel" else None
    own = "sdpa" if kernel else own
    _, tape = streamed(
        name, own, dtype, tile_rows=4, needs_masked_gradients=True, checkpoint_layers=True, kernel=kernel
    )
    _, expected = streamed(name, own, dtype, tile_rows=4, needs_masked_gradients=True, kernel=kernel)
    for mine, call in zip(tape.calls, expected.calls, strict=True):
        assert mine.module == call.module
        assert near(mine.block_input_gradient, call.block_input_gradient, name, own, dtype)
    assert near(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, own, dtype)


@pytest.mark.parametrize(("checkpoint", "alive"), [(True, [1, 1]), (False, [2, 1])])
def test_memory_is_one_layers(checkpoint: bool, alive: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """When the backward pass comes to a layer only its own queries are there; without checkpoints, those below, too."""
    queries: list[StorageWeakRef] = []
    attend, seen = TiledAttention.forward, []

    def watched(call: TiledAttention, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        queries.append(StorageWeakRef(query.untyped_storage()))
        return attend(call, query, *others)

    def look(call: AttentionCall) -> list[MapReduction]:
        seen.append(sum(not one.expired() for one in queries))
        return []

    monkeypatch.setattr(TiledAttention, "forward", watched)
    tiles = TilingConfig(kernel=WholeMaps(), request_reductions=look, checkpoint_layers=checkpoint)
    recorder("grouped heads", "sdpa", torch.float64).run(batch("grouped heads"), value, ASKS, tiling=tiles)
    assert seen == alive
    assert tiles.kernel_log.name == "streaming: whole maps" + (", layers computed twice" if checkpoint else "")


def test_what_a_kernel_cannot_make_is_made_of_tiles() -> None:
    tiles = TilingConfig(kernel=WholeMaps())
    recorder("sinks", "eager", torch.float64).run(batch("sinks"), value, ASKS, tiling=tiles)
    assert tiles.kernel_log.name == "streaming: torch tiles"


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_half_precision_against_float64(width: int) -> None:
    """Queries, keys, values and ∂y/∂output in bfloat16: their sums are those of float64 on the same numbers."""
    torch.manual_seed(width)
    query, key, value, gradient = (torch.randn(1, heads, 40, width, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    module = recorder("grouped heads", "sdpa", torch.float64).model.get_submodule("model.layers.0.self_attn")
    rows = torch.rand(1, 1, 40)
    found: list[torch.Tensor] = []

    def fold(queries: slice, attention: torch.Tensor, slope: torch.Tensor | None) -> None:
        part = AttentionCall(0, "", attention=attention, attention_gradient=slope)
        found.append(MapReduction("positive", rows).reduce_tile(part, queries, 40))

    eager = find_eager_forward(module)
    call = TiledAttention(
        eager,
        transformers.AttentionInterface()["sdpa"],
        module,
        None,
        True,
        {"scaling": width**-0.5},
        TilingConfig(tile_rows=16),
    )
    call.forward(query, key, value)
    gradients = call.for_each_tile(gradient.transpose(1, 2), fold, with_gradients=True)
    q, k, v, g = (
        part.double() for part in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), gradient)
    )
    scores = (q @ k.mT * width**-0.5).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    maps = (scores.softmax(-1) * (g @ v.mT)).clamp(min=0)
    exact = rows.double()[:, None] @ maps / 4
    assert sum(found).dtype == torch.float32
    assert (sum(found) - exact).abs().max() <= 1e-5 * exact.abs().max()
    dv = (scores.softmax(-1).mT @ g).unflatten(1, (2, 2)).sum(2)
    assert gradients is not None and gradients[2].dtype == torch.bfloat16
    assert (gradients[2] - dv).abs().max() <= 1e-2 * dv.abs().max()
