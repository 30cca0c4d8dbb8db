"""Layers that are computed again on the way back leave nothing behind."""

import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead
from clearhead.recording.streaming import Streamed


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
