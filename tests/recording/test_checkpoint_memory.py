"""Streaming passes leave nothing behind, whether layers are computed again or not, and whether they come to an end."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead
from clearhead.recording.streaming import Streamed
from clearhead.recording.tape import Call
from clearhead.recording.tiles import Tiles
from tests.recording.test_streaming import ASKS, batch, recorder, value


def streamed() -> list[Streamed]:
    return [part for part in gc.get_objects() if type(part) is Streamed]


def test_nothing_waits_for_the_garbage_collector():
    """What refers to itself in a circle would hold each layer's queries, keys and values until it comes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ex = clearhead.load(LlamaForCausalLM(LlamaConfig(**shape, vocab_size=30, pad_token_id=0)).eval())
    inputs = {"input_ids": torch.randint(5, 30, (1, 12))}
    ex.explain(inputs, kernel="streaming", checkpoint=True)
    gc.collect()
    gc.disable()
    held = streamed()  # by tests before this one, which what they caught may keep alive
    try:
        ex.explain(inputs, kernel="streaming", checkpoint=True)
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
    attend, name = Streamed.attend, "grouped heads"
    record = recorder(name, "sdpa", torch.float64)
    runs = 0

    def watched(call: Streamed, query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        queries.append(StorageWeakRef(query.untyped_storage()))
        return attend(call, query, *others)

    def fold(call: Call, rows: slice, sweep: int) -> None:
        if where == "fold" and call.layer == 0:
            raise Broken

    def second_run(*args: object) -> None:
        nonlocal runs
        runs += 1
        if where == "forward" or (where == "again" and runs == 2):
            raise Broken

    if where == "again" and not checkpoint:
        pytest.skip("no layer is computed again")
    monkeypatch.setattr(Streamed, "attend", watched)
    handle = record.model.model.layers[1].mlp.register_forward_pre_hook(second_run)
    gc.disable()
    try:
        target, tiles = breaks if where == "target" else value, Tiles(fold, checkpoint=checkpoint)
        with pytest.raises(Broken):
            record.run(batch(name), target, ASKS, tiles=tiles)
        gc.collect()  # what was raised knows the frames, and they know it: Python sees that
        assert queries and all(one.expired() for one in queries)
    finally:
        handle.remove()
        gc.enable()
