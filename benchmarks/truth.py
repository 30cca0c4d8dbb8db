"""Which methods find the ground-truth evidence? The zoo's known-answer models, every method, with intervals.

    python benchmarks/truth.py [--models logic,recall] [--methods generic,grad-sam | all] [--without flow] [--count 100]
        [--figures "minimal average precision"] [--json truth.json] [--device cuda]

Prints one table per figure: methods × models, mean [95 % interval] · rank. A range of ranks is a tie: these methods
cannot be distinguished on these examples (paired t tests corrected for skewness, Holm's correction). "–": does not
apply or failed; the reasons are listed below. `random` and `position` are in every table.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import clearhead
from clearhead.bench.chunk_explanations import add_controls, explain_examples, split_applicable
from clearhead.bench.data import load_benchmark_dataset
from clearhead.bench.data.zoo_tasks import ZOO_TASKS
from clearhead.bench.protocols.base import Measurement
from clearhead.bench.protocols.known_evidence import RANKING_METRICS, KnownEvidence
from clearhead.bench.tables import build_columns, render_markdown_table
from clearhead.methods.base import METHOD_REGISTRY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(ZOO_TASKS))
    parser.add_argument("--methods", default="all")
    parser.add_argument("--without", default="", help="methods to skip, separated by commas")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="index of the first example, so that several processes can share the work",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="dtype of the weights; default: as stored, float32 on a CPU")
    parser.add_argument("--by", default="score")
    parser.add_argument(
        "--figures", default="minimal precision,minimal average precision,sufficient average precision,minimal rank"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = sorted(METHOD_REGISTRY) if arguments.methods == "all" else arguments.methods.split(",")
    names = [name for name in names if name not in arguments.without.split(",")]
    protocol = KnownEvidence(by=arguments.by)
    measured, refused = {}, {}
    for model in arguments.models.split(","):
        started = time.perf_counter()
        ex = clearhead.load(f"zoo:{model}", device=arguments.device, dtype=arguments.dtype)
        methods, refused[model] = split_applicable(ex, add_controls(names))
        examples = list(load_benchmark_dataset("known", task=model, count=arguments.count))[arguments.first :]
        measured[model] = []
        for method in methods:  # one at a time: a method that fails or is slow is seen by name
            began = time.perf_counter()
            own = explain_examples(ex, examples, [method], protocol)
            if own.failure_reasons:
                refused[model] |= own.failure_reasons
                print(f"{model}: {method} failed: {own.failure_reasons[str(method)]}", file=sys.stderr)
                continue
            measured[model] += protocol.measure(ex, examples, own.by_method)
            if arguments.json:
                write_measurements(arguments.json, protocol, measured, describe_device(ex))
            print(f"{model}: {method} {time.perf_counter() - began:.1f} s", file=sys.stderr)
        print(f"{model}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    print(f"protocol truth, settings {protocol.hash}: {json.dumps(protocol.settings)}")
    for figure in arguments.figures.split(","):
        table = [
            c
            for model in measured
            for c in build_columns(model, measured[model], figure, refused[model], protocol.get_bounds(figure))
        ]
        smaller = figure in protocol.smaller_is_better_metrics
        print(
            f"\n## {figure} ({'smaller' if smaller else 'larger'} is better)\n\n{render_markdown_table(table, smaller)}"
        )
    print("\n## Not measured\n")
    for model, reasons in refused.items():
        for method, reason in reasons.items():
            print(f"- {model}, {method}: {reason}")


def describe_device(explainer: clearhead.Explainer) -> str:
    """Where it ran, and in what: on a GPU models are in the format of their weights, unless another is asked for."""
    kind = explainer.adapter.device.type
    device = torch.cuda.get_device_name(explainer.adapter.device) if kind == "cuda" else f"a {kind.upper()}"
    return f"{device}, {str(explainer.adapter.dtype).removeprefix('torch.')}"


def write_measurements(
    path: Path, protocol: KnownEvidence, measurements_by_model: dict[str, list[Measurement]], device: str
) -> None:
    """All that was measured so far: a run that is stopped keeps it."""
    rows = [{"model": model, **vars(one)} for model, own in measurements_by_model.items() for one in own]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": protocol.settings, "figures": RANKING_METRICS, "where": device, "rows": rows}
    path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
