"""Memory and time of `generic` on zoo:recall-4k, materialised attention against tiles, each in a separate process.

    python benchmarks/streaming_memory.py [TOKENS …]

The peak is the memory of the process in excess of that with the model loaded and one short text explained.
"""

import json
import resource
import subprocess
import sys
import time

DEFAULT_LENGTHS = (512, 1024, 2048, 4096)


def get_peak_rss_mib() -> float:
    """The most memory that this process has taken so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_memory(tokens: int, kernel: str) -> dict[str, float]:
    import clearhead
    from clearhead_zoo.tasks import recall

    ex = clearhead.load("zoo:recall-4k")
    ex.explain(recall.make_examples(1, seed=1, pairs=3)[0].text, kernel=kernel)
    before, start = get_peak_rss_mib(), time.perf_counter()
    example = recall.make_examples(1, seed=2, pairs=recall.compute_max_pairs(tokens))[0]
    found = ex.explain(example.text, kernel=kernel)
    seconds = time.perf_counter() - start
    assert found.certificate["kernel"].startswith(kernel), found.certificate
    return {"tokens": len(found.tokens), "peak MiB": get_peak_rss_mib() - before, "seconds": seconds}


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--one":
        print(json.dumps(measure_memory(int(sys.argv[2]), sys.argv[3])))
        return
    for tokens in map(int, sys.argv[1:] or DEFAULT_LENGTHS):
        for kernel in ("materialised", "streaming"):
            command = [sys.executable, __file__, "--one", str(tokens), kernel]
            done = subprocess.run(command, capture_output=True, text=True)
            line = done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"failed: {done.stderr[-200:]}"
            print(f"{kernel:13} {line}", flush=True)


if __name__ == "__main__":
    main()
