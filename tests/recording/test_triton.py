"""The Triton kernels against the formula in float64, and whole explanations through them against whole maps.

On a machine with a GPU they are compiled (`make test-gpu`); elsewhere they are interpreted, in a process of its own,
because Triton decides that when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import models

pytest.importorskip("triton", reason="Triton is for Linux, and comes with torch for CUDA")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if COMPILED else "cpu"
here = pytest.mark.skipif(not (INTERPRETED or COMPILED), reason="in a process of its own, by test_interpreted")


@pytest.mark.skipif(INTERPRETED or COMPILED, reason="the tests below run in this process")
def test_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def fake(dtype=torch.float32, width=32, queries=8, keys=8, device="cpu", **changed):
    def some(length):
        return torch.zeros(1, 4, length, width, dtype=dtype, device=device)

    parts = {"query": some(queries), "key": some(keys), "value": some(keys), "saved": ()}
    how = {"causal": True, "mask": None, "more": {"scaling": 0.2, "softcap": None}, "scaling": 0.2}
    return SimpleNamespace(**{**parts, **how, "forward": print, **changed})


REFUSED = {
    "float64": {"dtype": torch.float64},
    "bfloat16 without a GPU, which the interpreter multiplies as integers": {"dtype": torch.bfloat16},
    "float32 heads that are too wide": {"width": 160},
    "eager attention alone is exact": {"forward": None},
    "a soft cap, which torch's kernels do not know": {"more": {"scaling": 0.2, "softcap": 30.0}},
    "sinks": {"more": {"s_aux": torch.zeros(4)}},
    "causal with a cache": {"queries": 5},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_to_tiles(why):
    from clearhead.recording.triton_kernel import TritonKernel

    assert TritonKernel().takes(fake(), ())
    assert not TritonKernel().takes(fake(**REFUSED[why]), ())


def test_many_rows_are_left_to_tiles():
    from clearhead.recording.reduce import Reduce
    from clearhead.recording.triton_kernel import TritonKernel

    few, many = (Reduce("attention", torch.zeros(1, count, 8)) for count in (30, 3000))
    assert TritonKernel().takes(fake(), [few]) and not TritonKernel().takes(fake(), [few, many])


@pytest.mark.parametrize("backend", ["FLASH", "CUDNN", "EFFICIENT"])
def test_torchs_kernels_are_called_as_they_want_it(backend):
    """Without numbers, and so without a GPU."""
    from clearhead.recording import triton_kernel

    call = fake(torch.float32 if backend == "EFFICIENT" else torch.bfloat16, device="meta")
    whole = (call.query, call.key, call.value)
    call.saved = triton_kernel._fused(getattr(triton_kernel, backend), *whole, True, 0.2)
    found = triton_kernel._gradients(call, call.query.transpose(1, 2))
    assert [part.shape for part in found] == [part.shape for part in whole]


def made(heads=2, shared=1, queries=21, keys=21, width=16, dtype=torch.float32, **how):
    from clearhead.recording.triton_sums import Blocks, Rebuilt

    def some(count, length):
        return torch.randn(2, length, count, width, device=DEVICE).to(dtype).transpose(1, 2)

    torch.manual_seed(0)
    parts = some(heads, queries), some(shared, keys), some(shared, keys), some(heads, queries)
    return Rebuilt(*parts, None, width**-0.5, blocks=Blocks(16, 16, 4, 1), **how)


def maps(call):
    """A and ∂y/∂A as the formulas have them."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (call.key, call.value))
    scores = call.query.double() @ key.mT * call.scale
    _, _, queries, keys = scores.shape
    for i in range(queries):
        for j in range(keys):
            last = i + keys - queries + call.ahead
            if (call.causal and j > last) or (call.window is not None and j <= last - call.window):
                scores[:, :, i, j] = -torch.inf
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask.double()
    return scores.softmax(-1).nan_to_num(0), call.gradient.double() @ value.mT


def padding(keys):
    return (torch.arange(keys, device=DEVICE) < torch.tensor([keys, keys - 4], device=DEVICE)[:, None])[:, None, None]


CALLS = {
    "whole, three heads share keys": lambda: made(heads=3),
    "causal": lambda: made(causal=True),
    "causal, half precision, odd width": lambda: made(causal=True, width=24, dtype=torch.float16),
    "causal, more keys than queries": lambda: made(queries=18, keys=37, causal=True),
    "window": lambda: made(queries=37, keys=37, causal=True, window=6),
    "window both ways": lambda: made(queries=37, keys=37, causal=True, window=9, ahead=4),
    "window both ways, wider than a block, padded": lambda: made(
        queries=53, keys=53, causal=True, window=39, ahead=19, mask=padding(53)
    ),
    "padded": lambda: made(mask=padding(21)),
    "causal, padded": lambda: made(causal=True, mask=padding(21)),
    "position bias": lambda: made(queries=9, keys=21, mask=torch.randn(1, 2, 9, 21, device=DEVICE)),
    "a sample that sees nothing": lambda: made(
        mask=padding(21) & torch.eye(2, device=DEVICE).bool()[:, :1, None, None]
    ),
}


def close(found, expected):
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-6 * float(expected.abs().max()))


@here
@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_sums_are_those_of_the_maps(name):
    call = CALLS[name]()
    attention, gradient = maps(call)
    call = call.with_lse()
    batch, _, queries, _ = call.shape
    weights = torch.rand(batch, 2, queries, device=DEVICE)
    weights[:, :, :3] = 0  # what has no weight is not looked at
    signed = weights[:, 0] - 0.5
    positive = (attention * gradient).clamp(min=0)
    close(call.over_queries(weights[:, 0], "positive"), torch.einsum("bi,bhij->bhj", weights[:, 0].double(), positive))
    close(call.over_queries(signed, "product"), torch.einsum("bi,bhij->bhj", signed.double(), attention * gradient))
    close(call.over_keys("positive"), positive.sum(-1))
    close(call.joined(weights, "attention"), weights.double() @ attention.mean(1))


@here
@pytest.mark.gpu
def test_chosen_heads():
    call = made(heads=4, shared=2, causal=True)
    attention, _ = maps(call)
    close(call.with_lse().of_heads([3, 0]).over_keys("attention"), attention[:, [3, 0]].sum(-1))


@here
@pytest.mark.gpu
def test_the_same_bytes_whatever_was_there_before():
    call = made(causal=True).with_lse()
    weights = torch.rand(2, 21, device=DEVICE)
    first = call.over_queries(weights, "positive")
    spoilt = [torch.full_like(first, torch.nan) for _ in range(8)]
    del spoilt  # what is allocated next lies where these were
    assert torch.equal(first, call.over_queries(weights, "positive"))


def decoder(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, **more)
    return LlamaForCausalLM(config).eval().to(DEVICE)


def windows():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, sliding_window=6)
    return MistralForCausalLM(config).eval().to(DEVICE)


def windows_both_ways():
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    models.skip_if_not_yet("modernbert")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")} | {"pad_token_id": 0}
    config = ModernBertConfig(**shape, **tokens, vocab_size=40, local_attention=8, global_attn_every_n_layers=2)
    return ModernBertForSequenceClassification(config).eval().to(DEVICE)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=40)).eval().to(DEVICE)


@here
@pytest.mark.gpu
@pytest.mark.parametrize(("model", "ahead", "window"), [(windows, 0, 6), (windows_both_ways, 4, 9)])
def test_windows_are_walked_along(model, ahead, window, monkeypatch):
    """The kernels are told how far a query looks back and ahead, in the place of a mask."""
    import clearhead
    from clearhead.recording import triton_kernel

    told = []
    real = triton_kernel.Rebuilt
    monkeypatch.setattr(triton_kernel, "Rebuilt", lambda *args, **how: told.append(how) or real(*args, **how))
    clearhead.load(model()).explain({"input_ids": torch.randint(5, 40, (1, 19)).to(DEVICE)}, kernel="triton")
    assert {"causal": True, "ahead": ahead, "window": window, "mask": None} in told


@here
@pytest.mark.gpu
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("model", [decoder, bert, windows, windows_both_ways])
def test_explanations_are_those_of_whole_maps(model, padded):
    """Batched and padded, one row and several, sums over queries and over keys, layers computed twice."""
    import clearhead

    ex = clearhead.load(model())
    methods = ["generic", "grad-sam", "attention", "rollout", clearhead.Method("grad-sam", received=True)]
    ids = torch.randint(5, 40, (2, 19))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 14:] = 0
    inputs = {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}
    found = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: triton, layers computed twice"
            size = abs(other.scores).max()
            assert size > 0 and abs(e.scores - other.scores).max() <= 1e-5 * size


def beyond_torchs_kernel(family):
    """Soft caps with windows and grouped heads (Gemma 2), and sinks with the same (gpt-oss)."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "pad_token_id": 0, "sliding_window": 6}
    own = {
        "Gemma2": {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16, "initializer_range": 0.3},
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.3},
    }
    config = getattr(transformers, f"{family}Config")(**shape, **own[family], attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(DEVICE)


@here
@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_what_torchs_kernel_cannot_make_is_made_of_tiles(family):
    """Triton is asked for, and the certificate says what ran."""
    import clearhead

    ex = clearhead.load(beyond_torchs_kernel(family))
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 14:] = 0
    inputs = {"input_ids": torch.randint(5, 40, (2, 19)).to(DEVICE), "attention_mask": mask.to(DEVICE)}
    methods = ["generic", "grad-sam", "rollout"]
    found = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
            assert abs(e.scores - other.scores).max() <= 1e-5 * abs(other.scores).max() > 0
