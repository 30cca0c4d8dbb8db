"""Cost of SHAP on a 16-word sentence: clearhead's batches against the call in the lecture. The coalitions are the same.

The lecture passes the shap package a function that pads every text to the maximum length of the model, and the package
evaluates ten texts at a time. clearhead evaluates each coalition once, all of them together, at their own length. Both
explain the logit of class 1 of zoo:sentiment, with one context alone as in the lecture; with --both also with both
contexts, clearhead's default, with a budget that neither side reaches (minutes with the lecture's call). Runs
alternate, so that a busy machine slows both sides; ratios are medians. One thread, so that the work is measured and not
its parallelisation.

    python benchmarks/shap_batches.py [--repeats 3] [--threads 1] [--both]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

import clearhead

SENTENCE = "The plot is thin and far too long, but both leads are a pleasure to watch"
#: As many evaluations as it takes.
MAX_EVALUATIONS = 10**6


class CountingModel:
    """The lecture's function: texts → the logit of class 1, padded to the longest text that the model can read."""

    def __init__(self, ex: clearhead.Explainer) -> None:
        self.model, self.tokenizer = ex.adapter.model, ex.adapter.processor
        self.max_length = min(self.tokenizer.model_max_length, self.model.config.max_position_embeddings)
        self.num_texts = self.num_calls = 0

    def __call__(self, texts: np.ndarray) -> np.ndarray:
        self.num_texts, self.num_calls = self.num_texts + len(texts), self.num_calls + 1
        with torch.no_grad():
            read = self.tokenizer(
                [str(text) for text in texts], padding="max_length", max_length=self.max_length, return_tensors="pt"
            )
            return self.model(**read).logits[:, 1].numpy()


def time_run(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    values = run()
    return time.perf_counter() - start, values


def compare_runtimes(
    explainer: clearhead.Explainer, name: str, context: str, fixed_context: int | None, repeats: int
) -> None:
    import shap

    function = CountingModel(explainer)
    package = shap.Explainer(function, function.tokenizer)
    method = clearhead.Method("shap", replacement="written-mask", context=context, evaluations=MAX_EVALUATIONS)

    def theirs() -> np.ndarray:
        function.num_texts = function.num_calls = 0
        return package([SENTENCE], fixed_context=fixed_context, max_evals=MAX_EVALUATIONS, silent=True).values[0]

    def ours() -> np.ndarray:
        nonlocal e
        e = explainer.explain(SENTENCE, method, target=1)
        return e.scores

    e = explainer.explain(SENTENCE, method, target=1)  # warm up; the recorder's self-test happens here
    package(["So so"], fixed_context=fixed_context, silent=True)  # numba compiles here
    pairs = [(time_run(ours), time_run(theirs)) for _ in range(repeats)]
    ratios = [own[0] / other[0] for own, other in pairs]
    gap = max(float(np.abs(own[1] - other[1]).max()) for own, other in pairs)
    print(
        f"16 words, context {name:8} clearhead / lecture's call  ratio {statistics.median(ratios):6.3f}"
        f"  (from {min(ratios):.3f} to {max(ratios):.3f})"
        f"  {statistics.median(own[0] for own, _ in pairs):.2f} s / {statistics.median(o[0] for _, o in pairs):.2f} s"
        f"  {int(e.certificate['checks']['evaluations'])} coalitions, each once; there {function.num_texts} texts of "
        f"{function.max_length} tokens in {function.num_calls} calls  largest difference {gap:.0e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--both", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    transformers.logging.disable_progress_bar()
    assert len(SENTENCE.split()) == 16
    ex = clearhead.load("zoo:sentiment")
    compare_runtimes(ex, "lecture", "present", 1, chosen.repeats)
    if chosen.both:
        compare_runtimes(ex, "both", "both", None, 1)


if __name__ == "__main__":
    main()
