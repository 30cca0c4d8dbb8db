"""One attention call on its way back, with a row pushed: cached tiles against the same formulas through torch.compile.

    python benchmarks/compiled_tiles.py [--tokens 512 2048] [--repeats 30]

The compiler is given what suits it: all heads at once, and one function for sums and gradients. Runs alternate; times
are medians. What it takes to compile is paid by each process, for each shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from clearhead.capture.attention.reductions import Reduce
from clearhead.capture.kernels.cpu import CachedTiles

HEADS, WIDTH = 12, 64


def formulas(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, row: Tensor) -> tuple[Tensor, ...]:
    scale = WIDTH**-0.5
    attention, slope = (query @ key.mT * scale).softmax(-1), gradient @ value.mT
    product = attention * slope
    steep = attention * (slope - product.sum(-1, keepdim=True)) * scale
    push = row[:, None] @ product.clamp(min=0) / HEADS
    return steep @ key, (query.mT @ steep).mT, (gradient.mT @ attention).mT, push


def call_of(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """What cached tiles ask of a call without a mask."""
    tokens = query.shape[2]
    outline = torch.empty(1, HEADS, tokens, tokens, device="meta")
    none = {name: lambda *places: None for name in ("seen", "added")}
    how = {"scaling": WIDTH**-0.5, "causal": False, "outline": outline, "tiles": SimpleNamespace(rows=None), **none}
    return SimpleNamespace(query=query, key=key, value=value, span=lambda rows: slice(0, tokens), **how)


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def measure(tokens: int, repeats: int) -> None:
    query, key, value, gradient = (torch.randn(1, tokens, HEADS, WIDTH).transpose(1, 2) for _ in range(4))
    row = torch.rand(1, 1, tokens)
    call, compiled = call_of(query, key, value), torch.compile(formulas, dynamic=False)

    def tiles() -> tuple[Tensor, ...]:
        gradients, sums = CachedTiles().backward(call, gradient.transpose(1, 2), [Reduce("positive", row)])
        return *gradients, *sums

    ways: dict[str, Callable[[], tuple[Tensor, ...]]] = {
        "cached tiles": tiles,
        "compiled": lambda: compiled(query, key, value, gradient, row),
        "as it stands": lambda: formulas(query, key, value, gradient, row),
    }
    first = {name: timed(run) for name, run in ways.items()}
    for part, other in zip(ways["cached tiles"](), ways["compiled"](), strict=True):
        assert (part - other).abs().max() <= 1e-4 * other.abs().max()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            times[name].append(timed(run))
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
        measure(tokens, asked.repeats)


if __name__ == "__main__":
    main()
