"""Backward pass of one attention call with a row push: cached tiles against the same formulas through torch.compile.

    python benchmarks/compiled_tiles.py [--tokens 512 2048] [--repeats 30]

The compiler gets the form that suits it best: all heads at once, and one function for reductions and gradients. Runs
alternate; times are medians. Each process pays the compilation time once for each shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.kernels.cpu import CPUKernel

NUM_HEADS, HEAD_DIM = 12, 64


def compute_backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, readout_row: Tensor
) -> tuple[Tensor, ...]:
    scale = HEAD_DIM**-0.5
    attention, slope = (query @ key.mT * scale).softmax(-1), gradient @ value.mT
    product = attention * slope
    steep = attention * (slope - product.sum(-1, keepdim=True)) * scale
    push = readout_row[:, None] @ product.clamp(min=0) / NUM_HEADS
    return steep @ key, (query.mT @ steep).mT, (gradient.mT @ attention).mT, push


def make_call(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """What cached tiles ask of a call without a mask."""
    tokens = query.shape[2]
    return SimpleNamespace(
        query=query,
        key=key,
        value=value,
        scaling=HEAD_DIM**-0.5,
        causal=False,
        meta_attention=torch.empty(1, NUM_HEADS, tokens, tokens, device="meta"),
        tiling=SimpleNamespace(tile_rows=None),
        compute_additive_mask=lambda *ranges: None,
        compute_has_visible_key=lambda *ranges: None,
        find_key_span=lambda rows: slice(0, tokens),
    )


def time_run(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def compare_runtimes(tokens: int, repeats: int) -> None:
    query, key, value, gradient = (torch.randn(1, tokens, NUM_HEADS, HEAD_DIM).transpose(1, 2) for _ in range(4))
    row = torch.rand(1, 1, tokens)
    call, compiled = make_call(query, key, value), torch.compile(compute_backward, dynamic=False)

    def tiles() -> tuple[Tensor, ...]:
        gradients, sums = CPUKernel().backward(call, gradient.transpose(1, 2), [MapReduction("positive", row)])
        return *gradients, *sums

    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "cached tiles": tiles,
        "compiled": lambda: compiled(query, key, value, gradient, row),
        "as it stands": lambda: compute_backward(query, key, value, gradient, row),
    }
    first = {name: time_run(run) for name, run in ways.items()}
    for part, other in zip(ways["cached tiles"](), ways["compiled"](), strict=True):
        assert (part - other).abs().max() <= 1e-4 * other.abs().max()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            times[name].append(time_run(run))
    for name, each in times.items():
        print(
            f"{tokens:,} tokens  {name:13} {statistics.median(each):8.1f} ms   first {first[name]:8.0f} ms", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=30)
    asked = parser.parse_args()
    for tokens in asked.tokens:
        compare_runtimes(tokens, asked.repeats)


if __name__ == "__main__":
    main()
