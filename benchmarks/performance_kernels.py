"""The Triton kernels alone: error against float64 for every kind of mask, and time against flash attention.

    python benchmarks/performance_kernels.py [--json kernels.json] [--sweep]

The time is that of one layer's reductions, relative to flash attention's forward and backward of the same layer; and
that of our backward kernel, which also computes a row push, next to those of flash attention and cuDNN, which do not.
`--sweep` tries other block sizes. Needs a CUDA GPU; with TRITON_INTERPRET=1 the errors are checked on the CPU, on tiny
shapes.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.kernels.fused_sdpa import CUDNN, FLASH, FusedSDPA
from clearhead.capture.kernels.triton.backward import TritonBackward, get_launch_config
from clearhead.capture.kernels.triton.reductions import BlockConfig, TritonReducer

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
MAP_QUANTITIES = ("attention", "product", "positive")
#: own, other, warps, stages
SWEEP_BLOCK_SIZES = {
    64: """64 64 4 3, 128 64 4 2, 128 64 4 3, 128 64 4 4, 64 128 4 3, 128 128 8 2, 128 128 8 3, 128 64 8 3, 128 32 4 3,
        256 64 8 3, 64 128 8 3""",
    128: "64 64 4 2, 64 64 4 3, 128 64 8 2, 128 64 8 3, 128 128 8 2, 128 32 4 3, 64 128 8 2, 128 64 4 2",
}


def compute_reference_maps(call: TritonReducer) -> tuple[Tensor, Tensor]:
    """A and G in float64, as the formula has them."""
    assert call.value is not None and call.gradient is not None
    group = call.query.shape[1] // call.key.shape[1]
    query, gradient = call.query.double(), call.gradient.double()
    key, value = (part.double().repeat_interleave(group, 1) for part in (call.key, call.value))
    scores = query @ key.mT * call.scale
    queries, keys = scores.shape[2:]
    at_query = torch.arange(queries, device=scores.device)[:, None] + keys - queries
    at_key = torch.arange(keys, device=scores.device)
    if call.causal:
        scores = scores.masked_fill(at_key > at_query, -torch.inf)
    if call.window is not None:
        scores = scores.masked_fill(at_key <= at_query - call.window, -torch.inf)
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask.double()
    return scores.softmax(-1).nan_to_num(0), gradient @ value.mT


def iter_mask_cases(dtype: torch.dtype) -> Iterator[tuple[str, TritonReducer]]:
    """One call for each kind of mask, with lengths that fit no block."""
    torch.manual_seed(0)
    long = 40 if IS_INTERPRETED else 777

    def made(heads: int, shared: int, queries: int, keys: int, width: int, **how: Any) -> TritonReducer:
        def some(count: int, length: int) -> Tensor:
            return torch.randn(2, length, count, width, device=DEVICE).to(dtype).transpose(1, 2)

        blocks = BlockConfig(16, 16, 4, 1) if IS_INTERPRETED else None
        parts = (some(heads, queries), some(shared, keys), some(shared, keys), some(heads, queries))
        return TritonReducer(*parts, None, width**-0.5, blocks=blocks, **how)

    seen = torch.arange(long, device=DEVICE) < torch.tensor([long, long - 9], device=DEVICE)[:, None]
    yield "whole", made(2, 2, long, long, 64)
    yield "causal, grouped", made(4, 2, long, long, 64, causal=True)
    yield "cross", made(2, 2, long - 10, long, 64)
    yield "padded", made(2, 1, long, long, 64, mask=seen[:, None, None])
    yield "causal, padded", made(2, 1, long, long, 64, causal=True, mask=seen[:, None, None])
    yield "window", made(2, 1, long, long, 64, causal=True, window=long // 5)
    yield "bias", made(2, 2, long, long, 64, mask=torch.randn(1, 2, long, long, device=DEVICE))
    for width in () if IS_INTERPRETED else (16, 32, 80, 96, 128, 192, 256):
        yield f"causal, width {width}", made(2, 1, long, long, width, causal=True)


def iter_reductions(call: TritonReducer, quantity: Any, brief: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each sum as the kernel makes it, and as the formula has it; `brief`: only the one that most methods use."""
    attention, gradient = compute_reference_maps(call)
    call = call.with_computed_lse()
    cells = attention if quantity == "attention" else attention * gradient
    cells = cells.clamp(min=0) if quantity == "positive" else cells
    batch, _, queries, _ = call.map_shape
    one, many = torch.rand(batch, queries, device=DEVICE), torch.rand(batch, 3, queries, device=DEVICE)
    yield "row push", call.sum_over_queries(one, quantity), torch.einsum("bi,bhij->bhj", one.double(), cells)
    if not brief:
        yield "row sums", call.sum_over_keys(quantity), cells.sum(-1)
        yield "heads joined", call.sum_head_mean_over_queries(many, quantity), many.double() @ cells.mean(1)
    if quantity == "product":
        signed = torch.randn(batch, queries, device=DEVICE)
        yield "signed", call.sum_over_queries(signed, quantity), torch.einsum("bi,bhij->bhj", signed.double(), cells)


def measure_errors(add_row: Callable[[dict[str, Any]], None]) -> None:
    """bfloat16 with every mask (float16 where Triton is interpreted, which has no bfloat16), others with some."""
    half = torch.float16 if IS_INTERPRETED else torch.bfloat16
    wanted = [(half, name, call, "positive") for name, call in iter_mask_cases(half)]
    wanted += [
        (half, name, call, of)
        for of in MAP_QUANTITIES[:2]
        for name, call in iter_mask_cases(half)
        if name == "causal, grouped"
    ]
    for dtype in {torch.float32, torch.float16} - {half}:
        few = ("causal, grouped", "causal, width 128") if dtype == torch.float16 else ("causal, grouped", "padded")
        few = (*few, "causal, width 128") if dtype == torch.float32 else few
        wanted += [(dtype, name, call, "positive") for name, call in iter_mask_cases(dtype) if name in few]
    for dtype, name, call, of in wanted:
        row = {"what": "error", "mask": name, "dtype": str(dtype).removeprefix("torch."), "of": of}
        try:
            for which, found, expected in iter_reductions(call, of, brief="width" in name):
                row[which] = float((found - expected).norm() / expected.norm())
        except Exception as problem:  # shown in the table, so that the rest is still seen
            row["failed"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        add_row(row)


def time_milliseconds(run: Callable[[], Any], repeats: int = 5) -> float:
    run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def make_layer(
    tokens: int, width: int, heads: int = 32, num_key_value_heads: int = 8
) -> tuple[TritonReducer, dict[str, float | None]]:
    """One causal layer in bfloat16, and what torch's kernels take for it, and our backward with a row push."""

    def some(count: int) -> Tensor:
        return torch.randn(1, tokens, count, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    query, key, value, gradient = some(heads), some(num_key_value_heads), some(num_key_value_heads), some(heads)
    scale, weights = width**-0.5, torch.rand(1, tokens, device="cuda")
    flash, cudnn = (FusedSDPA(backend, scale, causal=True) for backend in (FLASH, CUDNN))
    saved = flash.forward(query, key, value)
    ours = TritonBackward(
        query, key, value, saved[0], gradient, saved[1], scale, True, get_launch_config(width, tokens)
    )
    times: dict[str, float | None] = {
        "flash forward ms": time_milliseconds(partial(flash.forward, query, key, value)),
        "flash backward ms": time_milliseconds(partial(flash.backward, gradient, query, key, value, saved)),
        "backward with row push ms": time_milliseconds(partial(ours, weights)),
    }
    try:
        its = cudnn.forward(query, key, value)
        times["cuDNN backward ms"] = time_milliseconds(partial(cudnn.backward, gradient, query, key, value, its))
    except RuntimeError as problem:  # not every build of torch has it for such shapes
        times["cuDNN backward ms"] = None
        print("cuDNN:", str(problem)[:100])
    return TritonReducer(query, key, value, gradient, saved[1], scale, causal=True), times


def measure_times(add_row: Callable[[dict[str, Any]], None], sweep: bool) -> None:
    for width, heads, shared in ((64, 32, 8), (128, 16, 4)):
        for tokens in (8192, 32768, 131072):
            call, torchs = make_layer(tokens, width, heads, shared)
            whole = (torchs["flash forward ms"] or 0) + (torchs["flash backward ms"] or 0)
            one = torch.rand(1, tokens, device="cuda") + 0.01
            tried: dict[str, BlockConfig | None] = {"chosen": None}
            if sweep and tokens == 32768:
                tried |= {text: BlockConfig(*map(int, text.split())) for text in SWEEP_BLOCK_SIZES[width].split(",")}
            for name, blocks in tried.items():
                here = replace(call, blocks=blocks)
                runs: dict[str, Callable[[], Any]] = {"row push": partial(here.sum_over_queries, one, "positive")}
                if name == "chosen":
                    runs["row sums"] = partial(here.sum_over_keys, "positive")
                if name == "chosen" and tokens == 8192:
                    many = torch.rand(1, 16, tokens, device="cuda")
                    runs["row push, signed"] = partial(here.sum_over_queries, one - 0.1, "positive")
                    runs["attention column sums"] = partial(here.sum_over_queries, one, "attention")
                    runs["16 rows of attention"] = partial(here.sum_head_mean_over_queries, many, "attention")
                row: dict[str, Any] = {"what": "time", "tokens": tokens, "width": width, "heads": heads, "blocks": name}
                row |= torchs
                for kind, run in runs.items():
                    try:
                        row[kind] = time_milliseconds(run, 3 if tokens > 100_000 else 5) / whole
                    except Exception as problem:  # a block size that the GPU has no room for
                        row[kind] = None
                        print(kind, name, str(problem)[:100])
                add_row(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true", help="try other block sizes at 32,768 tokens")
    parser.add_argument("--errors", action="store_true", help="no timings")
    parser.add_argument("--times", action="store_true", help="no errors")
    chosen = parser.parse_args()
    if not IS_INTERPRETED and not torch.cuda.is_available():
        sys.exit("no CUDA GPU is available: set TRITON_INTERPRET=1 to check the kernels on the CPU")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if chosen.json is not None:  # what is measured is kept, whatever comes after it
            chosen.json.write_text(json.dumps(rows, indent=1) + "\n")

    start = time.perf_counter()
    if not IS_INTERPRETED and not chosen.errors:
        measure_times(add, chosen.sweep)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if not chosen.times:
        measure_errors(add)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
