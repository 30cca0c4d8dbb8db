"""What recording costs: explanations against a plain forward and input-gradient backward of the same batch.

A 12-layer, 768-wide BERT with random weights at 512 tokens. Plain means SDPA, frozen weights, the gradient of one logit
with respect to the word embeddings. Runs alternate, so that a busy machine slows both sides; ratios are medians of
pairs. Memory is the peak over what the model itself takes.

    python benchmarks/attention_overhead.py [--batch 1 8] [--tokens 512] [--repeats 5]
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import BertConfig, BertForSequenceClassification

import clearhead

EVERYTHING = [
    "attention",
    "rollout",
    "attention-gradcam",
    "generic",
    "grad-sam",
    "cat",
    "attcat",
    "saliency",
    "input-x-gradient",
]


def plain(model: BertForSequenceClassification, batch: dict[str, torch.Tensor]) -> None:
    vectors = model.bert.embeddings.word_embeddings(batch["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=vectors, attention_mask=batch["attention_mask"]).logits
    torch.autograd.grad(logits.max(-1).values.sum(), vectors)


def peak_memory(run: Callable[[], None]) -> float:
    """GiB of resident memory at the peak of one run, over what was there before it (Linux; else NaN)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")

    def read(name: str) -> float:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 2**20

    ctypes.CDLL(None).malloc_trim(0)  # hand back what earlier runs left in the allocator
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = read("VmRSS")
    run()
    return read("VmHWM") - before


def measure(batch_size: int, tokens: int, repeats: int) -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(attn_implementation="sdpa")).eval().requires_grad_(False)
    ids = torch.randint(1000, 30000, (batch_size, tokens))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ex = clearhead.load(model)
    runs: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(model, batch),
        "generic": lambda: ex.explain(batch, "generic", batch_size=batch_size),
        f"all {len(EVERYTHING)} methods": lambda: ex.explain(batch, EVERYTHING, batch_size=batch_size),
    }
    for run in runs.values():
        run()  # warm up; the recorder's self-test happens here
    memory = {name: peak_memory(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    for name in runs:
        ratios = [own / base for own, base in zip(seconds[name], seconds["plain"], strict=True)]
        print(
            f"batch {batch_size}, {tokens} tokens  {name:16}  ratio {statistics.median(ratios):5.2f}"
            f"  (from {min(ratios):.2f} to {max(ratios):.2f})  {statistics.median(seconds[name]):7.2f} s"
            f"  peak +{memory[name]:.2f} GiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    for batch_size in chosen.batch:
        measure(batch_size, chosen.tokens, chosen.repeats)


if __name__ == "__main__":
    main()
