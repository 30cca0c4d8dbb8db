"""Write docs/performance.md and docs/performance.svg from the results of `performance.py` and `performance_kernels.py`.

python benchmarks/performance_page.py benchmarks/results/{cpu,h200,h200-methods,h200-kernels}.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

ResultRow = dict[str, Any]
DOCS_FOLDER = Path(__file__).parents[1] / "docs"
GENERIC_ROW = "clearhead generic"
#: Maximum memory of the longest input, relative to the plain pass.
MAX_MEMORY_RATIO = 1.2

#: The targets: part, tokens, batch, device → description.
REQUIREMENTS = {
    (
        "length",
        131_072,
        1,
        "cuda",
    ): "≤ 1.35 × plain in time, ≤ 1.2 × in memory; growth from 8,192 tokens like that of plain",
    ("short", 512, 1, "cpu"): "generic ≤ 1.1 × plain, all methods together ≤ 1.4 ×",
    ("short", 512, 8, "cpu"): "generic ≤ 1.15 × plain, all methods together ≤ 1.4 ×",
    ("throughput", 128, 16, "cpu"): "≥ 1.8 × the reference's throughput",
    ("throughput", 128, 64, "cuda"): "≥ 5 × the reference's throughput",
}

INTRODUCTION = """# Cost of explanations

Time and memory relative to a **plain** pass: a forward pass (the fastest of torch's attention kernels, frozen weights)
and the gradient of one logit with respect to the embeddings, with the same activation checkpointing (from 16,384
tokens). **Reference** is the reference implementation of Generic Attention, as in the published code: weight gradients
are computed, n × n matrices are stored and multiplied, one example after another. Models have random weights in the
shape of well-known ones; all sides of a ratio ran alternately in one process, and ratios are medians. Memory is the
peak in excess of the model itself.

Made from `benchmarks/results/` by `benchmarks/performance_page.py`; `make bench` and `make bench-gpu` write such files
(`benchmarks/performance.py`, `benchmarks/performance_kernels.py`).
"""

KERNELS_NOTE = """\
Time of one layer's reductions, as a fraction of flash attention's forward and backward (bfloat16, causal). *Backward
with row push* is clearhead's kernel: gradients and a row push from the same tiles, used from 2,048 tokens."""

METHODS_NOTE = """\
**Plain** is here as many forward passes and gradients of one logit as `ex.plan` lists for the method, on as many rows,
in batches of the same size, by the model's own attention. Other libraries ran in the same process, with as many rows
together; their ratio is to the same plain passes."""

FIRST_CALL_NOTE = """\
Each line is a process of its own: the seconds of the first explanation (`generic`) after the model was made, and of the
model's own first forward pass and gradient. The difference is what checking the model, importing and compiling takes;
it is logged as "checking the model" from one second on."""

TRAINED_MODEL_NOTE = """\
zoo:recall-4k at 4,096 tokens, whose attention is sharp: the largest difference of a score, relative to the largest
score, over eight lists. *Same pass*: from the same queries, keys, values and gradients, so that only reductions can
differ. *Two passes*: one streaming, one with materialised attention; the attention output is bitwise identical in both,
and in bfloat16 the gradients are the same. The difference from the model in float64 (with the same weights) is the
rounding of the model itself: materialised attention differs as much. For comparison: the attention that transformers
itself returns."""


def render_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def format_number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return text + unit


def describe_machine(machine: dict[str, Any]) -> str:
    versions = [f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "python") if name in machine]
    threads = f" ({machine['threads']} threads)" if machine["where"] == "cpu" else ""
    return f"{machine['device']}{threads}; {', '.join(versions)}; {machine['date']}"


def render_requirements(rows: list[ResultRow]) -> str:
    """Every target with its measurement."""
    lines = []
    for row in rows:
        if "bar" not in row or "failed" in row:
            continue
        what = f"{row['way']}, {row['model']}, {row['tokens']:,} tokens, batch {row['batch']}, {row['device']}"
        if row["part"] == "exact":
            found, bar, held = f"{row['error']:.1e}", f"≤ {row['bar']:.0e}", row["error"] <= row["bar"]
            what += f", {row['dtype']}" + (" against float64" if "against" not in row["way"] else "")
        elif row["part"] == "first":
            what = "first explanation, " + what
            found, bar, held = f"+ {row['added']:.1f} s", f"≤ plain + {row['bar']:.0f} s", row["added"] <= row["bar"]
        elif row["part"] == "throughput":
            found, bar = f"{1 / row['ratio']:.2f} ×", f"≥ {1 / row['bar']:.1f} × the reference's throughput"
            held = row["ratio"] <= row["bar"]
        else:
            found, bar, held = f"{row['ratio']:.2f} ×", f"≤ {row['bar']} × plain", row["ratio"] <= row["bar"]
        lines.append([what, bar, found, "yes" if held else "**no**"])
        if row["part"] == "length" and "memory ratio" in row:
            ratio = row["memory ratio"]
            lines.append(
                [
                    "its memory",
                    f"≤ {MAX_MEMORY_RATIO} × plain",
                    f"{ratio:.2f} ×",
                    "yes" if ratio <= MAX_MEMORY_RATIO else "**no**",
                ]
            )
    lines += compute_growth_rows(rows)
    there = {(row["part"], row["tokens"], row["batch"], row["device"]) for row in rows if "bar" in row}
    for (part, tokens, batch, device), bar in REQUIREMENTS.items():
        if (part, tokens, batch, device) not in there:
            lines.append([f"{part}, {tokens:,} tokens, batch {batch}, {device}", bar, "not measured", "–"])
    return render_table(["measurement", "target", "measured", "met"], lines)


def compute_growth_rows(rows: list[ResultRow]) -> list[list[str]]:
    """The ratio of the times at 131,072 and 8,192 tokens, compared with the plain pass (flash attention)."""
    seconds = {
        (row["way"], row["tokens"]): row["seconds"] for row in rows if row["part"] == "length" and "seconds" in row
    }
    ends = [(way, 8192) in seconds and (way, 131_072) in seconds for way in ("plain", GENERIC_ROW)]
    if not all(ends):
        return []
    own, flash = (seconds[way, 131_072] / seconds[way, 8192] for way in (GENERIC_ROW, "plain"))
    held = "yes" if own <= 1.2 * flash else "**no**"
    return [["growth from 8,192 to 131,072 tokens", "like the plain pass", f"{own:.0f} × against {flash:.0f} ×", held]]


def render_measurements(rows: list[ResultRow], part: str) -> str:
    lines = []
    own = (row for row in rows if row["part"] == part)
    for row in sorted(own, key=lambda row: (row["device"], row["tokens"], row["batch"])):
        start = [row["device"], row["model"], f"{row['tokens']:,}", str(row["batch"]), row["way"]]
        if "failed" in row:
            lines.append([*start, "–", "–", "–", f"failed: {row['failed'][:60]}"])
            continue
        spread = f" ({row['least']:.2f} to {row['most']:.2f})" if row.get("least") != row.get("most") else ""
        lines.append(
            [
                *start,
                format_number(row["seconds"], " s"),
                format_number(row.get("ratio")) + spread,
                format_number(row["GiB"], " GiB"),
                row.get("kernel", ""),
            ]
        )
    ratio = "× the reference" if part == "throughput" else "× plain"
    seconds = "time per input" if part == "throughput" else "time"
    return render_table(
        ["device", "model", "tokens", "batch", "implementation", seconds, ratio, "peak memory", "kernel"], lines
    )


def render_methods(rows: list[ResultRow]) -> str:
    """The cost of each method against the passes of its plan, one line per model and method, beside other libraries."""
    groups: dict[tuple[Any, ...], list[ResultRow]] = {}
    for row in rows:
        if row["part"] == "methods":
            key = tuple(row[name] for name in ("device", "model", "tokens", "batch", "method", "passes"))
            groups.setdefault(key, []).append(row)
    lines = []
    for (device, model, tokens, batch, method, passes), (plain, *others) in groups.items():
        lines += [
            [
                device,
                f"{model}, {batch} × {tokens:,}",
                row["way"].removeprefix("clearhead "),
                passes if row["way"] == f"clearhead {method}" else "",
                format_number(plain.get("seconds"), " s"),
                row["failed"][:60] if "failed" in row else format_number(row["seconds"], " s"),
                "–" if "failed" in row else f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
                format_number(row.get("memory ratio")),
            ]
            for row in others
        ]
    head = ["device", "model, inputs × tokens", "implementation", "passes", "plain", "time", "× plain", "× its memory"]
    return render_table(head, lines)


def render_first_calls(rows: list[ResultRow]) -> str:
    """The first explanation of a process, beside the model's own first pass in another one."""
    lines = [
        [
            row["device"],
            row["model"],
            f"{row['tokens']:,}",
            row["way"],
            format_number(row["seconds"], " s"),
            format_number(row.get("added"), " s"),
        ]
        for row in rows
        if row["part"] == "first"
    ]
    return render_table(["device", "model", "tokens", "implementation", "time", "more than plain"], lines)


def render_errors_by_method(rows: list[ResultRow]) -> str:
    """The errors of each method on a trained model, one line per comparison."""
    methods = list(rows[0]["by method"])
    lines = [
        [
            row["device"],
            row["dtype"],
            row["way"].split(", ", 2)[2],
            *(f"{row['by method'][one]:.1e}" if one in row["by method"] else "–" for one in methods),
        ]
        for row in rows
    ]
    return render_table(["device", "dtype", "comparison", *methods], lines)


def render_kernels(rows: list[ResultRow]) -> str:
    """Times of one layer's reductions relative to flash attention, backward passes, and errors against float64."""
    torchs = ["flash forward", "flash backward", "cuDNN backward", "backward with row push"]
    kinds = ["row push", "row sums", "attention column sums", "16 rows of attention"]
    times = [
        [
            f"{row['tokens']:,}",
            f"{row['heads']} × {row['width']}",
            *(format_number(row.get(f"{name} ms"), " ms") for name in torchs),
            *(format_number(row.get(kind)) for kind in kinds),
        ]
        for row in rows
        if row["what"] == "time" and row["blocks"] == "chosen"
    ]
    sums = ["row push", "row sums", "heads joined", "signed"]
    errors = [
        [r["mask"], r["dtype"], r["of"], *(f"{r[one]:.1e}" if one in r else r.get("failed", "") for one in sums)]
        for r in rows
        if r["what"] == "error"
    ]
    first = render_table(["tokens", "heads × width", *torchs, *kinds], times)
    return (
        first
        + "\nRelative error against float64 with the same inputs:\n\n"
        + render_table(["mask", "dtype", "of", *sums], errors)
    )


def plot_seconds_by_length(rows: list[ResultRow], path: Path) -> None:
    """Seconds against tokens, one line per implementation."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "clearhead", "font.size": 9}
    devices = sorted({row["device"] for row in rows}, reverse=True)
    figure, axes = pyplot.subplots(1, len(devices), figsize=(5.5 * len(devices), 4), squeeze=False)
    for axis, device in zip(axes[0], devices, strict=True):
        here = [row for row in rows if row["device"] == device and "seconds" in row]
        for way in dict.fromkeys(row["way"] for row in here):
            points = sorted((row["tokens"], row["seconds"]) for row in here if row["way"] == way)
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=way)
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds", title=f"{here[0]['model']}, {device}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=DOCS_FOLDER, help="output folder")
    chosen = parser.parse_args()
    rows: list[ResultRow] = []
    alone: list[ResultRow] = []
    machines: dict[str, str] = {}
    notes: list[str] = []
    for file in chosen.files:
        found = json.loads(file.read_text())
        if isinstance(found, list):
            alone += found
        else:
            rows += found["rows"]
            notes += found.get("notes", [])  # written by hand
            where = found["rows"][0]["device"]
            machines.setdefault(where, describe_machine(found["machine"] | {"where": where}))
    page = [INTRODUCTION, *(f"- **{device}**: {text}" for device, text in machines.items()), ""]
    page += ["## Targets and measurements", "", render_requirements(rows)]
    page += ["## Notes on these runs", "", *(f"- {note}" for note in notes), ""] if notes else []
    titles = {
        "length": "Cost by input length",
        "windows": "Sliding windows",
        "sources": "Encoder–decoders",
        "short": "Short inputs",
        "throughput": "Batch throughput",
    }
    for part, title in titles.items():
        if any(row["part"] == part for row in rows):
            page += [f"## {title}", "", render_measurements(rows, part)]
            page += ["![seconds against tokens](performance.svg)", ""] if part == "length" else []
    if any(row["part"] == "methods" for row in rows):
        page += ["## Every method against the passes of its plan", "", METHODS_NOTE, "", render_methods(rows)]
    if any(row["part"] == "first" for row in rows):
        page += ["## The first explanation of a process", "", FIRST_CALL_NOTE, "", render_first_calls(rows)]
    trained = [row for row in rows if "by method" in row]
    if trained:
        page += ["## Numerical error on a trained model", "", TRAINED_MODEL_NOTE, "", render_errors_by_method(trained)]
    if alone:
        page += ["## The kernels alone", ""]
        page += [KERNELS_NOTE, ""]
        page += [render_kernels(alone)]
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "performance.md").write_text("\n".join(page).rstrip() + "\n")
    long = [row for row in rows if row["part"] == "length"]
    if long:
        plot_seconds_by_length(long, chosen.out / "performance.svg")


if __name__ == "__main__":
    main()
