"""Streaming passes release their memory, with and without activation checkpointing, also when they raise."""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef

import clearhead
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.tape import AttentionCall
from clearhead.methods.generic import GenericAttention
from clearhead.methods.generic_cross_attention import CrossStreamGenericAttention
from tests.capture.attention.test_tiled import REQUIREMENTS, make_batch, make_model, make_recorder, target_logit


def live_tiled_calls() -> list[TiledAttention]:
    return [value for value in gc.get_objects() if type(value) is TiledAttention]


def decoder() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=30, pad_token_id=0)).eval()
    return model, {"input_ids": torch.randint(5, 30, (1, 12))}


def encoder_decoder() -> tuple[Any, dict[str, torch.Tensor]]:
    """A model whose attention calls are reduced after the pass (deferred)."""
    decoder_ids = torch.tensor([[2, 5, 9, 11]])
    return make_model("encoder-decoder", "sdpa", torch.float32), decoder()[1] | {"decoder_input_ids": decoder_ids}


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_streaming_pass_frees_tiled_calls_without_garbage_collection(
    make: Callable[[], tuple[Any, dict[str, torch.Tensor]]], checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference cycles would keep each layer's queries, keys and values alive until garbage collection; of several
    passes, those of one are alive at a time."""
    model, inputs = make()
    model.config.decoder_start_token_id = 2
    ex = clearhead.load(model)
    options = {"method": ["generic", "rollout"], "kernel": "streaming", "checkpoint": checkpoint}
    two_samples = {name: tensor.repeat(2, 1) for name, tensor in inputs.items()}
    ex.explain(two_samples, **options, batch_size=1)
    gc.collect()
    gc.disable()
    alive_before = live_tiled_calls()  # by earlier tests, whose caught exceptions may keep them alive
    alive_at_start, run = [], ex.recorder.run

    def count_alive(*args: Any, **kwargs: Any) -> Any:
        alive_at_start.append(len(live_tiled_calls()))
        return run(*args, **kwargs)

    monkeypatch.setattr(ex.recorder, "run", count_alive)
    try:
        ex.explain(two_samples, **options, batch_size=1)
        assert len(live_tiled_calls()) == len(alive_before)
        assert len(alive_at_start) >= 2 and set(alive_at_start) == {len(alive_before)}
        for method in (GenericAttention, CrossStreamGenericAttention):
            monkeypatch.setattr(method, "compute_scores", raise_broken)
        with suppress(Broken):
            ex.explain(inputs, **options)
        assert len(live_tiled_calls()) == len(alive_before)
    finally:
        gc.enable()


class Broken(Exception):
    pass


def raise_broken(*args: object) -> None:
    raise Broken


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("where", ["forward", "target", "fold", "recompute"])
def test_failed_streaming_pass_frees_queries(where: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The autograd graph and the attention calls refer to each other, which no garbage collector can see."""
    queries: list[StorageWeakRef] = []
    original_forward, name = TiledAttention.forward, "grouped heads"
    recorder = make_recorder(name, "sdpa", torch.float64)
    runs = 0

    def track_query(call: TiledAttention, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        queries.append(StorageWeakRef(query.untyped_storage()))
        return original_forward(call, query, *others)

    def fold(call: AttentionCall, rows: slice, sweep: int) -> None:
        if where == "fold" and call.layer == 0:
            raise Broken

    def second_run(*args: object) -> None:
        nonlocal runs
        runs += 1
        if where == "forward" or (where == "recompute" and runs == 2):
            raise Broken

    if where == "recompute" and not checkpoint:
        pytest.skip("no layer is recomputed")
    monkeypatch.setattr(TiledAttention, "forward", track_query)
    handle = recorder.model.model.layers[1].mlp.register_forward_pre_hook(second_run)
    gc.disable()
    try:
        target, tiling = (
            raise_broken if where == "target" else target_logit,
            TilingConfig(fold, checkpoint_layers=checkpoint),
        )
        with pytest.raises(Broken):
            recorder.run(make_batch(name), target, REQUIREMENTS, tiling=tiling)
        gc.collect()  # the exception and its frames form a cycle that Python collects
        assert queries and all(query.expired() for query in queries)
    finally:
        handle.remove()
        gc.enable()
