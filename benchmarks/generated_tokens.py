"""Cost of explaining every generated token: all together, against one growing pass per token. The scores are the same.

A 24-layer decoder with random weights and GPT-2's vocabulary generates 64 tokens after a prompt of 64. One growing pass
per token is what a user writes with transformers: eager attention, frozen weights, the returned attention, the gradient
of the token's logit with respect to it, and Generic Attention on both. The second comparison is clearhead, one token at
a time: it computes no logits that are not needed, so only forward passes are saved. Runs alternate, so that a busy
machine slows all sides; ratios are medians. One thread, so that the work is measured and not its parallelisation.

    python benchmarks/generated_tokens.py [--width 256] [--prompt 64] [--words 64] [--repeats 3]
        [--threads 1] [--device cpu]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import copy

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import clearhead

ScoreRows = list[np.ndarray]
MAX_RELATIVE_DIFFERENCE = 1e-4  # how far two ways may differ, relative to the largest score


def make_decoder(width: int, device: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50257,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=24,
        num_attention_heads=max(1, width // 64),
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config).to(device).eval().requires_grad_(False)


def explain_by_growing_passes(model: LlamaForCausalLM, prompt: Tensor, continuation: Tensor) -> ScoreRows:
    """Generic Attention of each word, from a pass over all that comes before it."""
    rows = []
    for step, word in enumerate(continuation):
        ids = torch.cat([prompt, continuation[:step]])[None]
        vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
        output = model(inputs_embeds=vectors, output_attentions=True, use_cache=False)
        gradients = torch.autograd.grad(output.logits[0, -1, word], output.attentions)
        row = torch.zeros(1, ids.shape[1], device=ids.device)
        row[0, -1] = 1
        scores = torch.zeros_like(row)
        for attention, gradient in zip(output.attentions[::-1], gradients[::-1], strict=True):
            added = row @ (attention.detach() * gradient)[0].clamp(min=0).mean(0)
            row, scores = row + added, scores + added
        rows.append(scores[0].cpu().numpy())
    return rows


def explain_one_token_at_a_time(explainer: clearhead.Explainer, prompt: Tensor, continuation: Tensor) -> ScoreRows:
    return [
        explainer.explain({"input_ids": torch.cat([prompt, continuation[:step]])[None]}, target=int(word)).scores
        for step, word in enumerate(continuation)
    ]


def explain_all_tokens(explainer: clearhead.Explainer, prompt: Tensor, continuation: Tensor) -> ScoreRows:
    matrix = explainer.explain({"input_ids": prompt[None]}, answer=continuation).matrix
    return [row[: len(prompt) + step] for step, row in enumerate(matrix)]


def time_run(run: Callable[[], ScoreRows], device: str) -> tuple[float, ScoreRows]:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    rows = run()
    wait()
    return time.perf_counter() - start, rows


def compare_runtimes(width: int, prompt_length: int, num_tokens: int, repeats: int, device: str) -> None:
    model = make_decoder(width, device)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    said = torch.randint(1000, 50000, (prompt_length + num_tokens,), device=device)
    ex = clearhead.load(model)
    parts = said[:prompt_length], said[prompt_length:]
    runs: dict[str, Callable[[], ScoreRows]] = {
        "together": lambda: explain_all_tokens(ex, *parts),
        "one growing pass a word": lambda: explain_by_growing_passes(eager, *parts),
        "clearhead, one word at a time": lambda: explain_one_token_at_a_time(ex, *parts),
    }
    explain_all_tokens(ex, parts[0], parts[1][:8])  # warm up; the recorder's self-test happens here
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, ScoreRows] = {}
    for _ in range(repeats):
        for name, run in runs.items():
            spent, results[name] = time_run(run, device)
            seconds[name].append(spent)
    for name in list(runs)[1:]:
        ratios = [own / other for own, other in zip(seconds["together"], seconds[name], strict=True)]
        pairs = zip(results["together"], results[name], strict=True)
        gap = max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)
        print(
            f"{num_tokens} tokens after {prompt_length}, 24 layers of {width}: together / {name:30} ratio "
            f"{statistics.median(ratios):5.2f}  (from {min(ratios):.2f} to {max(ratios):.2f})  "
            f"{statistics.median(seconds['together']):7.2f} s / {statistics.median(seconds[name]):.2f} s  largest "
            f"difference {gap:.0e}",
            flush=True,
        )
        if not gap <= MAX_RELATIVE_DIFFERENCE:
            raise SystemExit(f"together and {name} differ by {gap:.0e}, more than {MAX_RELATIVE_DIFFERENCE:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--words", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    for width in chosen.width:
        compare_runtimes(width, chosen.prompt, chosen.words, chosen.repeats, chosen.device)


if __name__ == "__main__":
    main()
