"""Run time of 100 permutations of 1,000 sentences at scope S1, where all but the read-out row is computed once.

    python benchmarks/permutations.py [--sentences 1000] [--draws 100] [--limit 30] [--data ../shared/data/sst2]

The sentences are those of GLUE's SST-2 development set, and the first of its training set, if the folder exists;
otherwise random words of the same lengths. Fails if it takes longer than the limit in seconds (0 for none).
"""

import argparse
import csv
import os
import random
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

import clearhead
from clearhead import probes

SAMPLE_WORDS = (
    "a",
    "the",
    "film",
    "is",
    "not",
    "very",
    "good",
    "bad",
    "boring",
    "wonderful",
    "story",
    "and",
    "but",
    "funny",
)


def load_sentences(folder: Path, count: int) -> list[str]:
    found: list[str] = []
    for name in ("test_official_dev.tsv", "train.tsv"):
        if (folder / name).is_file():
            with (folder / name).open(encoding="utf-8", newline="") as file:
                found += [
                    row["sentence"].strip() for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
                ]
    if len(found) >= count:
        return found[:count]
    rng = random.Random(0)
    return [" ".join(rng.choices(SAMPLE_WORDS, k=rng.randint(5, 35))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--limit", type=float, default=30)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sst2"))
    arguments = parser.parse_args()
    ex, texts = clearhead.load("zoo:sentiment"), load_sentences(arguments.data, arguments.sentences)
    probes.run_permutation_probe(ex, texts[:2], draws=2)  # the self-test is not what is measured
    began, worked = time.perf_counter(), time.process_time()
    found = probes.run_permutation_probe(ex, texts, draws=arguments.draws)
    took, spent = time.perf_counter() - began, time.process_time() - worked
    median = found.get_column("median TVD").mean()
    print(f"{len(texts)} sentences × {arguments.draws} permutations at scope S1, mean median TVD {median:.4f}")
    print(f"{took:.1f} s, {spent:.1f} s of which are computation, {torch.get_num_threads()} threads")
    # on a machine that others use, too, waiting for them does not count
    if arguments.limit and min(took, spent) > arguments.limit:
        sys.exit(f"slower than the limit of {arguments.limit:.0f} s")


if __name__ == "__main__":
    main()
