"""Streaming passes leave nothing behind, whether layers are computed again or not, and whether they come to an end."""

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
from tests.capture.attention.test_tiled import ASKS, batch, model_of, recorder, value


def streamed() -> list[TiledAttention]:
    return [part for part in gc.get_objects() if type(part) is TiledAttention]


def decoder() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, vocab_size=30, pad_token_id=0)).eval()
    return model, {"input_ids": torch.randint(5, 30, (1, 12))}


def encoder_decoder() -> tuple[Any, dict[str, torch.Tensor]]:
    """Whose calls are asked for sums after the pass."""
    answer = torch.tensor([[2, 5, 9, 11]])
    return model_of("across", "sdpa", torch.float32), decoder()[1] | {"decoder_input_ids": answer}


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("made", [decoder, encoder_decoder])
def test_nothing_waits_for_the_garbage_collector(
    made: Callable[[], tuple[Any, dict[str, torch.Tensor]]], checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What refers to itself in a circle would hold each layer's queries, keys and values until it comes; and of
    several passes, those of one are held at a time."""
    model, inputs = made()
    model.config.decoder_start_token_id = 2
    ex = clearhead.load(model)
    how = {"method": ["generic", "rollout"], "kernel": "streaming", "checkpoint": checkpoint}
    several = {name: part.repeat(2, 1) for name, part in inputs.items()}
    ex.explain(several, **how, batch_size=1)
    gc.collect()
    gc.disable()
    held = streamed()  # by tests before this one, which what they caught may keep alive
    beginning, run = [], ex.recorder.run

    def watched(*args: Any, **named: Any) -> Any:
        beginning.append(len(streamed()))
        return run(*args, **named)

    monkeypatch.setattr(ex.recorder, "run", watched)
    try:
        ex.explain(several, **how, batch_size=1)
        assert len(streamed()) == len(held)
        assert len(beginning) >= 2 and set(beginning) == {len(held)}
        for fold in (GenericAttention, CrossStreamGenericAttention):
            monkeypatch.setattr(fold, "compute_scores", breaks)
        with suppress(Broken):
            ex.explain(inputs, **how)
        assert len(streamed()) == len(held)
    finally:
        gc.enable()


class Broken(Exception):
    pass


def breaks(*args: object) -> None:
    raise Broken


@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("where", ["forward", "target", "fold", "again"])
def test_a_pass_that_breaks_off_leaves_nothing(where: str, checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph knows the calls and these know it: nothing would ever collect them."""
    queries: list[StorageWeakRef] = []
    attend, name = TiledAttention.forward, "grouped heads"
    record = recorder(name, "sdpa", torch.float64)
    runs = 0

    def watched(call: TiledAttention, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        queries.append(StorageWeakRef(query.untyped_storage()))
        return attend(call, query, *others)

    def fold(call: AttentionCall, rows: slice, sweep: int) -> None:
        if where == "fold" and call.layer == 0:
            raise Broken

    def second_run(*args: object) -> None:
        nonlocal runs
        runs += 1
        if where == "forward" or (where == "again" and runs == 2):
            raise Broken

    if where == "again" and not checkpoint:
        pytest.skip("no layer is computed again")
    monkeypatch.setattr(TiledAttention, "forward", watched)
    handle = record.model.model.layers[1].mlp.register_forward_pre_hook(second_run)
    gc.disable()
    try:
        target, tiles = breaks if where == "target" else value, TilingConfig(fold, checkpoint_layers=checkpoint)
        with pytest.raises(Broken):
            record.run(batch(name), target, ASKS, tiling=tiles)
        gc.collect()  # what was raised knows the frames, and they know it: Python sees that
        assert queries and all(one.expired() for one in queries)
    finally:
        handle.remove()
        gc.enable()
