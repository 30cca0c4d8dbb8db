"""Streaming passes: concatenated tiles equal the materialised maps, for every kind of mask and attention."""

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
from clearhead.capture.session import ModelSession
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
#: The kind of attention that each model covers, its class and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bidirectional": ("BertForSequenceClassification", _SMALL),
    "causal": (
        "GPT2LMHeadModel",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "grouped heads": ("LlamaForCausalLM", _SMALL),
    "sliding window": ("MistralForCausalLM", _SMALL),
    "bidirectional window": (
        "ModernBertForSequenceClassification",
        {**_SMALL, "local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1},
    ),
    "soft cap": ("Gemma2ForCausalLM", {**_SMALL, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "sinks": (
        "GptOssForCausalLM",
        {**_SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
    "encoder-decoder": ("BartForConditionalGeneration", _BART),
    "position bias": ("T5ForConditionalGeneration", _T5),
}
#: Those whose attention torch's SDPA kernels do not support.
EAGER_ONLY = ("soft cap", "sinks")
CASES = [(name, own) for name in MODELS for own in ("eager", "sdpa") if own == "eager" or name not in EAGER_ONLY]
REQUIREMENTS = ("attention_gradient", "block_input_gradient", "input_gradient")


def make_model(name: str, implementation: str, dtype: torch.dtype) -> Any:
    if name == "position bias":
        models.skip_if_not_yet("t5")
    if name == "bidirectional window":
        models.skip_if_not_yet("modernbert")
    cls, settings = MODELS[name]
    model_class = getattr(transformers, cls)
    torch.manual_seed(5)
    model = model_class(model_class.config_class(**settings)).to(dtype).eval()
    model.config._attn_implementation_internal = implementation
    return model


@cache
def make_recorder(name: str, implementation: str, dtype: torch.dtype) -> Recorder:
    model = make_model(name, implementation, dtype)

    def streams(module: str, index: int) -> tuple[str, str]:
        """The decoder attends to itself or, in cross-attention, to the source."""
        query_stream = "text" if "decoder" in module and name in ("encoder-decoder", "position bias") else "source"
        is_cross_attention = "encoder_attn" in module or "EncDec" in module
        return query_stream, "source" if is_cross_attention else query_stream

    found = Recorder(ModelSession(model), streams)
    # kernels differ in what a fully masked row attends to, so the self-test runs on a sample without such a row
    found.run_self_test({key: tensor[:1] for key, tensor in make_batch(name).items()})
    return found


def make_batch(name: str) -> dict[str, torch.Tensor]:
    """A text of nine tokens and one of six, padded on the right (on the left for grouped heads)."""
    ids = torch.arange(18).reshape(2, 9) * 7 % 37 + 2
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, slice(0, 3) if name == "grouped heads" else slice(6, 9)] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if name in ("encoder-decoder", "position bias"):
        inputs["decoder_input_ids"] = torch.tensor([[2, 5, 9, 11], [2, 30, 21, 4]])
    return inputs


def target_logit(output: Any) -> torch.Tensor:
    logits = output.logits
    return logits[:, 1] if logits.dim() == 2 else logits[:, 3, 7] + logits[:, -4, 5]


class TileCollector:
    """Collects the tiles of each call and concatenates them."""

    def __init__(self) -> None:
        self.tiles: dict[tuple[str, int], list[AttentionCall]] = {}
        self.order: list[tuple[str, int]] = []
        self.query_indices: dict[tuple[str, int], list[int]] = {}

    def fold(self, call: AttentionCall, queries: slice, sweep: int) -> None:
        key = (call.module, sweep)
        self.tiles.setdefault(key, []).append(call)
        self.query_indices.setdefault(key, []).extend(range(queries.start, queries.stop))

    def full_map(self, call: AttentionCall, field: str, sweep: int = 0) -> torch.Tensor:
        return torch.cat([getattr(tile, field) for tile in self.tiles[call.module, sweep]], dim=2)


def record_streamed(name: str, implementation: str, dtype: torch.dtype, **options: Any) -> tuple[TileCollector, Tape]:
    collector = TileCollector()
    tiling = TilingConfig(collector.fold, **options)
    return collector, make_recorder(name, implementation, dtype).record(
        make_batch(name), target_logit, REQUIREMENTS, tiling=tiling
    )


def token_cells(name: str, call: AttentionCall) -> torch.Tensor:
    """1 at the cells of a map whose query and key are both tokens, 0 at padding: a fully masked row is arbitrary."""
    all_tokens = torch.ones(2, 4)
    is_token = {"source": make_batch(name)["attention_mask"], "text": all_tokens}
    return (is_token[call.query_stream][:, None, :, None] * is_token[call.key_stream][:, None, None]).double()


@cache
def record_materialised(name: str, implementation: str, dtype: torch.dtype) -> Tape:
    return make_recorder(name, implementation, dtype).record(make_batch(name), target_logit, REQUIREMENTS)


def is_close(actual: torch.Tensor, expected: torch.Tensor, name: str, implementation: str, dtype: torch.dtype) -> bool:
    # some models' eager softmax and norms compute in float32 whatever their dtype
    is_float32 = dtype == torch.float32 or name not in ("bidirectional", "causal", "encoder-decoder", "position bias")
    return bool(
        (actual - expected).abs().max() <= (1e-5 if is_float32 else 1e-12) * expected.abs().max().clamp(min=1e-30)
    )


@pytest.mark.parametrize(
    ("name", "implementation", "rows"),
    [*((*case, 4) for case in CASES), ("bidirectional", "sdpa", 1), ("bidirectional", "sdpa", None)],
)
def test_concatenated_tiles_equal_materialised_maps(name: str, implementation: str, rows: int | None) -> None:
    dtype = torch.float64
    collector, tape = record_streamed(name, implementation, dtype, tile_rows=rows, needs_masked_gradients=True)
    expected = record_materialised(name, implementation, dtype)
    assert [call.module for call in tape.calls] == [call.module for call in expected.calls]
    for streamed_call, call in zip(tape.calls, expected.calls, strict=True):
        assert streamed_call.attention is None and streamed_call.attention_gradient is None
        attention, gradient = collector.full_map(call, "attention"), collector.full_map(call, "attention_gradient")
        assert collector.query_indices[call.module, 0] == list(range(attention.shape[2]))
        mask = token_cells(name, call)
        assert is_close(attention * mask, call.attention * mask, name, implementation, dtype)
        assert is_close(gradient * mask, call.attention_gradient * mask, name, implementation, dtype)
        assert is_close(streamed_call.block_input_gradient, call.block_input_gradient, name, implementation, dtype)
    assert is_close(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, implementation, dtype)
    assert torch.allclose(tape.value, expected.value, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "implementation"), [("bidirectional", "sdpa"), ("sliding window", "sdpa"), ("soft cap", "eager")]
)
def test_float32_tiles_equal_materialised_gradients(name: str, implementation: str) -> None:
    collector, _ = record_streamed(name, implementation, torch.float32, tile_rows=4, needs_masked_gradients=True)
    for call in record_materialised(name, implementation, torch.float32).calls:
        gradient, mask = collector.full_map(call, "attention_gradient"), token_cells(name, call)
        assert is_close(gradient * mask, call.attention_gradient * mask, name, implementation, torch.float32)


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_skipping_fully_masked_keys_preserves_products_and_gradients(name: str, implementation: str) -> None:
    """Where attention is masked, its product with the gradient is zero with or without those keys."""
    collector, tape = record_streamed(name, implementation, torch.float64, tile_rows=3)
    expected = record_materialised(name, implementation, torch.float64)
    for call in expected.calls:
        product = collector.full_map(call, "attention") * collector.full_map(call, "attention_gradient")
        assert is_close(product, call.attention * call.attention_gradient, name, implementation, torch.float64)
    assert is_close(
        tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, implementation, torch.float64
    )


def test_every_sweep_visits_the_same_tiles() -> None:
    collector, _ = record_streamed(
        "bidirectional", "sdpa", torch.float64, tile_rows=4, tile_passes=2, needs_masked_gradients=True
    )
    for call in record_materialised("bidirectional", "sdpa", torch.float64).calls:
        for field in ("attention", "attention_gradient"):
            assert torch.equal(collector.full_map(call, field, 0), collector.full_map(call, field, 1))


def test_calls_are_visited_last_to_first_after_their_tiles() -> None:
    events: list[str] = []
    tiling = TilingConfig(lambda call, queries, sweep: events.append(f"tile of {call.layer}"), tile_rows=5)
    make_recorder("bidirectional", "sdpa", torch.float64).run(
        make_batch("bidirectional"),
        target_logit,
        REQUIREMENTS,
        lambda call: events.append(f"call {call.layer}"),
        tiling=tiling,
    )
    assert events == ["tile of 1", "tile of 1", "call 1", "tile of 0", "tile of 0", "call 0"]


def test_tiles_without_gradients_run_under_no_grad() -> None:
    collector = TileCollector()
    recorder = make_recorder("bidirectional", "sdpa", torch.float64)
    with torch.no_grad():
        recorder.run(
            make_batch("bidirectional"),
            target_logit,
            ["attention"],
            tiling=TilingConfig(collector.fold, tile_rows=4, needs_masked_gradients=True),
        )
    for call in record_materialised("bidirectional", "sdpa", torch.float64).calls:
        assert collector.full_map(call, "attention").shape == call.attention.shape
        assert all(tile.attention_gradient is None for tile in collector.tiles[call.module, 0])


@pytest.mark.parametrize(("name", "implementation"), [*CASES, ("bidirectional", "kernel"), ("grouped heads", "kernel")])
def test_checkpointed_layers_give_the_same_gradients(name: str, implementation: str) -> None:
    """The gradients of the layers' inputs and of the embeddings, from streaming passes."""
    dtype, kernel = torch.float64, WholeMaps() if implementation == "kernel" else None
    implementation = "sdpa" if kernel else implementation
    _, tape = record_streamed(
        name, implementation, dtype, tile_rows=4, needs_masked_gradients=True, checkpoint_layers=True, kernel=kernel
    )
    _, expected = record_streamed(name, implementation, dtype, tile_rows=4, needs_masked_gradients=True, kernel=kernel)
    for actual, call in zip(tape.calls, expected.calls, strict=True):
        assert actual.module == call.module
        assert is_close(actual.block_input_gradient, call.block_input_gradient, name, implementation, dtype)
    assert is_close(tape.input_gradient["input_ids"], expected.input_gradient["input_ids"], name, implementation, dtype)


@pytest.mark.parametrize(("checkpoint", "alive"), [(True, [1, 1]), (False, [2, 1])])
def test_checkpointing_keeps_queries_of_one_layer_alive(
    checkpoint: bool, alive: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the backward pass reaches a layer only its own queries are alive; without checkpoints, those below, too."""
    queries: list[StorageWeakRef] = []
    original_forward, alive_counts = TiledAttention.forward, []

    def track_query(call: TiledAttention, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        queries.append(StorageWeakRef(query.untyped_storage()))
        return original_forward(call, query, *others)

    def count_alive(call: AttentionCall) -> list[MapReduction]:
        alive_counts.append(sum(not query.expired() for query in queries))
        return []

    monkeypatch.setattr(TiledAttention, "forward", track_query)
    tiling = TilingConfig(kernel=WholeMaps(), request_reductions=count_alive, checkpoint_layers=checkpoint)
    make_recorder("grouped heads", "sdpa", torch.float64).run(
        make_batch("grouped heads"), target_logit, REQUIREMENTS, tiling=tiling
    )
    assert alive_counts == alive
    assert tiling.kernel_log.name == "streaming: whole maps" + (", layers computed twice" if checkpoint else "")


def test_unsupported_call_falls_back_to_torch_tiles() -> None:
    tiling = TilingConfig(kernel=WholeMaps())
    make_recorder("sinks", "eager", torch.float64).run(make_batch("sinks"), target_logit, REQUIREMENTS, tiling=tiling)
    assert tiling.kernel_log.name == "streaming: torch tiles"


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_bfloat16_tile_reductions_and_gradients_match_float64(width: int) -> None:
    """Queries, keys, values and ∂y/∂output in bfloat16: reductions equal those in float64 of the same tensors."""
    torch.manual_seed(width)
    query, key, value, gradient = (torch.randn(1, heads, 40, width, dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    module = make_recorder("grouped heads", "sdpa", torch.float64).model.get_submodule("model.layers.0.self_attn")
    rows = torch.rand(1, 1, 40)
    reductions: list[torch.Tensor] = []

    def fold(queries: slice, attention: torch.Tensor, attention_gradient: torch.Tensor | None) -> None:
        tensor = AttentionCall(0, "", attention=attention, attention_gradient=attention_gradient)
        reductions.append(MapReduction("positive", rows).reduce_tile(tensor, queries, 40))

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
        tensor.double() for tensor in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), gradient)
    )
    scores = (q @ k.mT * width**-0.5).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf)
    maps = (scores.softmax(-1) * (g @ v.mT)).clamp(min=0)
    expected = rows.double()[:, None] @ maps / 4
    assert sum(reductions).dtype == torch.float32
    assert (sum(reductions) - expected).abs().max() <= 1e-5 * expected.abs().max()
    dv = (scores.softmax(-1).mT @ g).unflatten(1, (2, 2)).sum(2)
    assert gradients is not None and gradients[2].dtype == torch.bfloat16
    assert (gradients[2] - dv).abs().max() <= 1e-2 * dv.abs().max()
