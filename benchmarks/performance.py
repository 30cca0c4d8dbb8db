"""Cost of an explanation: clearhead, the lower bound, the reference implementation and other libraries in one process.

    python benchmarks/performance.py [--device cuda] [--parts short throughput length …] [--json FILE]

The lower bound ("plain") is a forward pass (SDPA, frozen weights) and the gradient of one logit with respect to the
embeddings, with the same activation checkpointing. Runs alternate, so that a busy machine slows all sides; ratios are
medians of pairs. Memory is the peak in excess of the model itself. Models have random weights in the shape of
well-known ones. `python benchmarks/performance_page.py FILE …` writes docs/performance.md from such files.

    short       BERT-base at 128 and 512 tokens: generic, and all attention and gradient methods together
    throughput  BERT-base, a whole batch against the reference implementation, which takes one example after another
    length      a decoder in the shape of Llama-3.2-1B on a GPU (a small one on a CPU), up to 131,072 tokens
    windows     the same with a sliding window
    sources     one generated token of an encoder–decoder in the shape of BART-base, sources up to 32,768 tokens
    exact       scores in the model's own dtype against float64, materialised attention against streaming
    methods     every method against the passes that its plan lists (performance_methods.py)
    first       the first explanation in a fresh process
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers
from performance_methods import measure_first_call, measure_methods
from performance_recall import measure_tiling_errors
from performance_ways import LIBRARY_BASELINES, is_installed, run_plain_gradient, run_reference_generic_attention
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    MistralForCausalLM,
)

import clearhead
from clearhead import GeneratedToken

COMPARED_METHODS = ["attention", "rollout", "attention-gradcam", "generic", "grad-sam", "cat", "attcat"]
COMPARED_METHODS += ["saliency", "input-x-gradient"]
#: From this length on layers are recomputed one at a time, in clearhead and in the plain pass.
MIN_CHECKPOINT_LENGTH = 16_384
Runnable = Callable[[], Any]


class PerformanceBenchmark:
    """Measures ways in turn and keeps the rows."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.device: str = chosen.device
        self.path: Path | None = chosen.json
        self.repeats: int = chosen.repeats
        self.deadline = time.time() + 60 * chosen.minutes
        self.lengths: list[int] = chosen.lengths
        self.models: list[str] = chosen.models
        self.methods: list[str] = chosen.methods
        self.steps: int | None = chosen.steps
        path = self.path
        self.rows: list[dict[str, Any]] = []
        before = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.notes = before.get("notes", [])
        if self.notes:
            print(f"{path} has hand-written notes: they are kept, and may be out of date", flush=True)

    def compare(
        self,
        part: str,
        metadata: dict[str, Any],
        runs: dict[str, Runnable],
        max_ratios: dict[str, float],
        divide_by: int = 1,
        is_long: bool = False,
        max_seconds: float | None = None,
    ) -> None:
        """Time implementations in turn, and add one row for each.

        Args:
            part: The part of the benchmark.
            metadata: Further columns of the rows.
            runs: The implementations by name; the times of all are divided by that of the first.
            max_ratios: Largest accepted ratios by name.
            divide_by: Number by which seconds are divided.
            is_long: Whether to run once or twice, without warming up.
            max_seconds: Fewer repeats where all of them would take longer; the row says how many.
        """
        if time.time() > self.deadline:
            print(f"no time left for {part} {metadata}", flush=True)
            return
        peaks, failed, kernels, first = {}, {}, {}, {}
        for name, run in runs.items():
            try:
                if not is_long and name not in LIBRARY_BASELINES:
                    run()  # compiles, tests itself, fills caches
                start = time.perf_counter()
                peaks[name], made = self.measure_peak_memory(run)
                first[name] = time.perf_counter() - start
                kernels[name] = getattr(made, "certificate", {}).get("kernel")
            except Exception as problem:  # out of memory, or whatever another library raises: part of the result
                failed[name] = f"{type(problem).__name__}: {str(problem)[:120]}"
                self.free_memory()
        alive = {name: run for name, run in runs.items() if name not in failed}
        seconds: dict[str, list[float]] = {name: [] for name in alive}
        repeats = min(self.repeats, 2) if is_long else self.repeats
        if max_seconds is not None:
            repeats = max(1, min(repeats, int(max_seconds / max(1e-6, sum(first[name] for name in alive)))))
        for _ in range(repeats):
            if time.time() > self.deadline and all(seconds.values()):
                break
            for name, run in alive.items():
                seconds[name].append(
                    first[name] if name in LIBRARY_BASELINES else self.time_run(run)
                )  # others take long: once
        base = next(iter(runs))
        for name in runs:
            row: dict[str, Any] = {"part": part, **metadata, "device": self.device, "way": name}
            if name in failed:
                row["failed"] = failed[name]
            else:
                beside = base in seconds and len(runs) > 1
                ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)] if beside else []
                row |= {"seconds": statistics.median(seconds[name]) / divide_by, "GiB": peaks[name]}
                row |= {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)} if ratios else {}
                row |= {"memory ratio": peaks[name] / peaks[base]} if beside and peaks[base] > 0.01 else {}
                row |= {"repeats": len(seconds[name])} if len(seconds[name]) < self.repeats else {}
            if kernels.get(name):
                row["kernel"] = kernels[name]
            if name in max_ratios:
                row["bar"] = max_ratios[name]
            self.add_row(row)

    def add_row(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if self.path is not None:  # what is measured is kept, whatever comes after it
            self.path.parent.mkdir(parents=True, exist_ok=True)
            found = {"machine": describe_machine(self.device), "rows": self.rows}
            found |= {"notes": self.notes} if self.notes else {}
            self.path.write_text(json.dumps(found, indent=1) + "\n")

    def free_memory(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)

    def time_run(self, run: Runnable) -> float:
        gc.collect()
        start = time.perf_counter()
        run()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def measure_peak_memory(self, run: Runnable) -> tuple[float, Any]:
        """GiB at the peak of one run, over what was there before it, and what it made."""
        self.free_memory()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = run()
            return (torch.cuda.max_memory_allocated() - before) / 2**30, made
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (Linux)
        before = read_proc_status_gib("VmRSS")
        made = run()
        return read_proc_status_gib("VmHWM") - before, made


def read_proc_status_gib(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 2**20


def describe_machine(device: str) -> dict[str, Any]:
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else get_processor_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "clearhead": clearhead.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    if device == "cuda":
        import triton

        about |= {"triton": triton.__version__, "cuda": torch.version.cuda}
    return about


def get_processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def make_bert(device: str, layers: int = 12) -> Any:
    torch.manual_seed(0)
    config = BertConfig(attn_implementation="sdpa", num_hidden_layers=layers)
    return BertForSequenceClassification(config).eval().requires_grad_(False).to(device)


def make_decoder(device: str, tiny: bool = False, window: int | None = None) -> Any:
    """In the shape of Llama-3.2-1B on a GPU; on a CPU with four narrow layers. With a window it is a Mistral."""
    torch.manual_seed(0)
    large = device == "cuda" and not tiny
    shape: dict[str, int] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_000}
    if not large:
        shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}
    how = {"max_position_embeddings": 131_072, "attn_implementation": "sdpa", "pad_token_id": 0}
    kind = LlamaForCausalLM if window is None else MistralForCausalLM
    config = kind.config_class(**shape, **how, **({} if window is None else {"sliding_window": window}))
    dtype = torch.bfloat16 if large else torch.float32
    with torch.device(device):
        return kind._from_config(config, dtype=dtype).eval().requires_grad_(False)


def make_encoder_decoder(device: str, tokens: int, tiny: bool) -> Any:
    """In half precision on a GPU."""
    torch.manual_seed(0)
    shape = {"max_position_embeddings": tokens, "decoder_start_token_id": 2, "attn_implementation": "sdpa"}
    sizes = {"layers": 2 if tiny else 6, "ffn_dim": 256 if tiny else 3072, "attention_heads": 4 if tiny else 12}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    config = BartConfig(**shape, **sides, d_model=64 if tiny else 768, vocab_size=1000)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return BartForConditionalGeneration._from_config(config, dtype=dtype).eval().requires_grad_(False)


def make_random_ids(model: Any, batch: int, tokens: int) -> Tensor:
    torch.manual_seed(tokens)
    return torch.randint(5, model.config.vocab_size, (batch, tokens), device=model.device)


def explain_ids(explainer: Any, ids: Tensor, method: Any = "generic", **options: Any) -> Any:
    return explainer.explain({"input_ids": ids}, method, batch_size=len(ids), **options)


def make_library_runs(model: Any, ids: Tensor, tokens: int) -> dict[str, Runnable]:
    """Other libraries, where they are installed and can do so many tokens."""
    runs: dict[str, Runnable] = {}
    for name, (package, limit, way) in LIBRARY_BASELINES.items():
        if not is_installed(package):
            print(f"{name}: skipped, since {package} is not installed", flush=True)
        elif tokens <= limit:
            runs[name] = partial(way, model, ids)
    return runs


def measure_short_inputs(bench: PerformanceBenchmark, quick: bool) -> None:
    model = make_bert(bench.device, 2 if quick else 12)
    ex = clearhead.load(model)
    for tokens, batch in ((128, 1), (128, 8), (512, 1), (512, 8)):
        ids = make_random_ids(model, batch, tokens)
        runs: dict[str, Runnable] = {
            "plain": partial(run_plain_gradient, model, ids),
            "clearhead generic": partial(explain_ids, ex, ids),
            f"clearhead, all {len(COMPARED_METHODS)} methods": partial(explain_ids, ex, ids, COMPARED_METHODS),
        }
        bars = {}
        if tokens == 512 and bench.device == "cpu":
            bars = dict(zip(list(runs)[1:], (1.1 if batch == 1 else 1.15, 1.4), strict=True))
        if batch == 1 and not quick:
            runs |= make_library_runs(model, ids, tokens)
        bench.compare("short", {"model": "BERT-base", "tokens": tokens, "batch": batch}, runs, bars)


def measure_throughput(bench: PerformanceBenchmark, quick: bool) -> None:
    model = make_bert(bench.device, 2 if quick else 12)
    ex = clearhead.load(model)
    batch, bar = (16, 1 / 1.8) if bench.device == "cpu" else (64, 1 / 5)
    for tokens in (128,) if bench.device == "cpu" else (128, 512):
        ids = make_random_ids(model, batch, tokens)
        runs: dict[str, Runnable] = {
            "reference": partial(run_reference_generic_attention, model, ids),
            "plain": partial(run_plain_gradient, model, ids),
            "clearhead generic": partial(explain_ids, ex, ids),
        }
        about = {"model": "BERT-base", "tokens": tokens, "batch": batch}
        bench.compare("throughput", about, runs, {"clearhead generic": bar}, divide_by=batch)


def measure_length(bench: PerformanceBenchmark, quick: bool) -> None:
    model = make_decoder(bench.device, quick)
    ex = clearhead.load(model)
    explain_ids(ex, make_random_ids(model, 1, 16))  # the recorder tests itself, on a short input
    large = bench.device == "cuda"
    for tokens in bench.lengths or ((131_072, 32_768, 8192, 2048, 512, 128) if large else (128, 512, 2048, 4096)):
        ids = make_random_ids(model, 1, tokens)
        one_at_a_time = tokens >= MIN_CHECKPOINT_LENGTH
        runs: dict[str, Runnable] = {"plain": partial(run_plain_gradient, model, ids, one_at_a_time)}
        runs["clearhead generic"] = partial(explain_ids, ex, ids)
        if tokens <= (8192 if large else 2048):
            runs["reference"] = partial(run_reference_generic_attention, model, ids)
        runs |= make_library_runs(model, ids, tokens) if tokens <= 2048 else {}
        bars = {"clearhead generic": 1.35} if tokens == 131_072 else {}
        name = "Llama-3.2-1B" if large and not quick else "small Llama"
        about = {"model": name, "tokens": tokens, "batch": 1}
        bench.compare("length", about, runs, bars, is_long=tokens > 30_000)


def measure_sliding_windows(bench: PerformanceBenchmark, quick: bool) -> None:
    """The plain pass builds a mask of tokens × tokens, and is left out where that would be 16 GiB."""
    large = bench.device == "cuda" and not quick
    window = 4096 if large else 64
    model = make_decoder(bench.device, quick, window)
    ex = clearhead.load(model)
    explain_ids(ex, make_random_ids(model, 1, 16))
    for tokens in (32_768, 131_072) if large else (256, 512):
        ids = make_random_ids(model, 1, tokens)
        runs: dict[str, Runnable] = (
            {"plain": partial(run_plain_gradient, model, ids, tokens >= MIN_CHECKPOINT_LENGTH)}
            if tokens < 40_000
            else {}
        )
        runs["clearhead generic"] = partial(explain_ids, ex, ids, kernel="streaming")
        about = {"model": f"{'1B' if large else 'small'} Mistral, window {window:,}", "tokens": tokens, "batch": 1}
        bench.compare("windows", about, runs, {}, is_long=tokens > 30_000)


def measure_encoder_decoder(bench: PerformanceBenchmark, quick: bool) -> None:
    """The last of sixteen tokens; there are rows for the source and for the decoder prefix."""
    large = bench.device == "cuda" and not quick
    lengths = (32_768, 8192, 2048) if large else (256, 512) if quick else (512, 2048)
    model = make_encoder_decoder(bench.device, max(lengths), quick)
    ex = clearhead.load(model)
    answer = make_random_ids(model, 1, 16)
    target = GeneratedToken(len(answer[0]) - 2)
    for tokens in lengths:
        ids = make_random_ids(model, 1, tokens)
        given = {"input_ids": ids, "decoder_input_ids": answer}
        before = {"decoder_input_ids": answer[:, :-1]}
        runs: dict[str, Runnable] = {
            "plain": partial(run_plain_gradient, model, ids, tokens >= MIN_CHECKPOINT_LENGTH, **before),
            "clearhead generic": partial(ex.explain, given, "generic", target=target),
        }
        about = {"model": "small BART" if quick else "BART-base", "tokens": tokens, "batch": 1}
        bench.compare("sources", about, runs, {}, is_long=tokens > 30_000)


def measure_exactness(bench: PerformanceBenchmark, quick: bool) -> None:
    """Compare with float64 and the same weights. The target is fixed, since rounding may change the prediction."""
    for dtype in (torch.float32, torch.bfloat16) if bench.device == "cuda" else (torch.float32,):
        model = make_decoder(bench.device, tiny=True).to(dtype)
        ids = make_random_ids(model, 1, 512 if quick else 1024)
        found = {
            kernel: explain_ids(clearhead.load(model), ids, kernel=kernel, target=7)
            for kernel in ("materialised", "streaming")
        }
        truth = torch.tensor(explain_ids(clearhead.load(model.double()), ids, kernel="materialised", target=7).scores)
        for kernel, e in found.items():
            error = float((torch.tensor(e.scores) - truth).norm() / truth.norm())
            about = {"model": "small Llama", "tokens": ids.shape[1], "batch": 1, "dtype": str(dtype)[6:]}
            row = {"part": "exact", **about, "device": bench.device, "way": f"clearhead generic, {kernel}"}
            row["kernel"] = e.certificate["kernel"]
            bench.add_row({**row, "error": error, "bar": 1e-2 if dtype == torch.bfloat16 else 1e-5})
    for row in measure_tiling_errors(bench.device, 512 if quick else 4096):
        bench.add_row(row)


MEASUREMENTS = {
    **{
        "short": measure_short_inputs,
        "throughput": measure_throughput,
        "length": measure_length,
        "windows": measure_sliding_windows,
    },
    **{"sources": measure_encoder_decoder, "exact": measure_exactness},
    **{"methods": measure_methods, "first": measure_first_call},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--parts", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    parser.add_argument("--json", type=Path, help="output file for the rows, written as they are measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[], help="lengths of the part `length`; default: all")
    parser.add_argument(
        "--models", nargs="+", default=[], help="models of the parts `methods` and `first`; default: all"
    )
    parser.add_argument("--methods", nargs="+", default=[], help="methods of the part `methods`; default: all")
    parser.add_argument("--steps", type=int, help="steps of the path methods of the part `methods`; default: their own")
    parser.add_argument("--repeats", type=int, default=11, help="repeats of each implementation, alternating")
    parser.add_argument("--minutes", type=float, default=60, help="start no measurement after this time")
    parser.add_argument("--flash", action="store_true", help="use torch's flash attention instead of cuDNN's")
    parser.add_argument("--quick", action="store_true", help="smoke test with tiny models")
    chosen = parser.parse_args()
    bench = PerformanceBenchmark(chosen)
    torch.backends.cuda.enable_cudnn_sdp(not chosen.flash)
    for part in chosen.parts:
        MEASUREMENTS[part](bench, chosen.quick)
        bench.free_memory()


if __name__ == "__main__":
    main()
