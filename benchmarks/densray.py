"""Run time of DensRay: plain differences (means and covariances) and normalised ones (all pairs).

    python benchmarks/densray.py [--width 768] [--plain 50000] [--pairs 10000] [--device cpu]
    python benchmarks/densray.py --device cuda --pairs 50000

The vectors are random, half of them of each class; the figures are for one layer of a model. Both wall time and
processor time over all cores are reported: on a busy machine wall time says little.
"""

import argparse
import json
import time

import torch

from clearhead.concepts.densray import fit_densray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--plain", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    for normalise, count in ((False, arguments.plain), (True, arguments.pairs)):
        first, second = (torch.randn(count // 2, arguments.width, generator=generator) for _ in range(2))
        first, second = first.to(arguments.device), (second + 0.1).to(arguments.device)
        fit_densray(first[:1000], second[:1000], normalise=normalise)  # the first call also loads what is needed
        started, worked = time.perf_counter(), time.process_time()
        direction = fit_densray(first, second, normalise=normalise)
        float(direction.q[0, 0])  # a device has finished when its result is here
        seconds, cpu = time.perf_counter() - started, time.process_time() - worked
        about = {"normalise": normalise, "vectors": count, "width": arguments.width, "device": arguments.device}
        print(json.dumps({**about, "seconds": round(seconds, 2), "CPU seconds": round(cpu, 2)}), flush=True)


if __name__ == "__main__":
    main()
