"""Write the table in docs/architectures.md: `make architectures`.

    python -m tests.architectures.table [--workers 2] [--cache FILE] [--again OUTCOME …]

Classes in the cache, a file with one line per class, are not tried again.
"""

import argparse
import json
import multiprocessing
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import transformers

from clearhead.adapters.base import find_adapter_class
from tests.architectures.tiny_models import MAX_WEIGHTS, build, list_classes
from tests.architectures.trial import WORKS, Outcome, try_build_and_explain

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

#: Status of a class, and its meaning.
MEANINGS = {
    "interface": "works: its attention is recorded through transformers' attention interface",
    "returned": "works: its attention modules ignore the interface and return their attention weights",
    "registered": "works: its attention modules are those of torch, which are registered",
    "gradients": "gradient methods work, methods that use attention are refused",
    "refused": "refused, with a reason",
    "not built": "not known: no tiny configuration could be built, or it needs packages that are not installed here",
    "fails": "wrong results or an error",
}

_HEAD = """\
# Architectures: tested model classes

Every class of transformers {version} with a supported task head was instantiated with a tiny random configuration (at
most {millions} million weights, in float64, so that attention is far from uniform), and explained by every one-pass
method that applies. A class works if

- the output with recording is that of the untouched model, and the explained value is part of it;
- small steps of the input change the output of the untouched model by as much as the gradient predicts;
- a change of an input unit changes its own row of the input of the first layer (unless convolutions or an encoder
  have already mixed most rows);
- two inputs in one batch, of different lengths where the model allows it, get the same scores as each gets alone;
- scores are finite and not all zero, and the model is unchanged afterwards.

{types} model types were tested ({classes} classes); in {working} of them at least one class works{failing}. Written by
`make architectures`, checked by `make test-slow`.

| outcome | classes | model types | meaning |
| --- | ---: | ---: | --- |
{counts}

"Padding changes the model's own answer" describes the model itself: inputs of equal length were compared then.

Heads are named by the mappings of transformers; a class in none of them is listed by its own name.

| model type | outcome | heads | reason |
| --- | --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Row:
    """One class: its model type, its head, its status and the reason for it."""

    name: str
    model_type: str
    head: str
    status: str
    reason: str


def try_class(name: str, head: str) -> Row:
    """Try one class of transformers and return its row."""
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    if find_adapter_class([parent.__name__ for parent in cls.__mro__]) is None:
        outcome = Outcome("refused", "this task head is not supported yet")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = try_build_and_explain(partial(build, name))
    return Row(name, cls.config_class.model_type, head, outcome.status, shorten_reason(outcome.reason, name))


def shorten_reason(reason: str, name: str) -> str:
    """Shorten a reason: remove repeated phrases, and figures that differ between machines."""
    reason = reason.removeprefix("generic cannot explain ").removeprefix("saliency cannot explain ")
    reason = re.sub(f"^{name}( cannot be explained)?: ", "", reason)
    reason = re.sub(rf"\b(in|of) {name}\b", "", reason)
    reason = re.sub(rf"\b{name}(\.\w+)?\b", "it", reason)
    reason = re.sub(r" \((relative|from -?\d)[^)]*\)| by \d[\d.]*e[-+]\d+| were recorded: .*", "", reason)
    reason = re.sub(
        r"ImportError: \w+ requires the (\w+) library.*", r"it needs \1, which is not installed here", reason
    )
    reason = " ".join(reason.replace("|", "/").split())
    return reason if len(reason) <= 200 else f"{reason[:197].rsplit(' ', 1)[0]} …"


def render_page(rows: Sequence[Row]) -> str:
    """Render docs/architectures.md."""
    works = {row.model_type for row in rows if row.status in WORKS}
    failing = any(row.status == "fails" for row in rows)
    return _HEAD.format(
        version=transformers.__version__,
        millions=MAX_WEIGHTS // 10**6,
        types=len({row.model_type for row in rows}),
        classes=len(rows),
        working=len(works),
        failing="" if failing else ", and none is wrong",
        counts="\n".join(render_counts(rows)),
        rows="\n".join(render_rows(rows)),
    )


def render_counts(rows: Sequence[Row]) -> Iterator[str]:
    for status, meaning in MEANINGS.items():
        matching = [row for row in rows if row.status == status]
        yield f"| {status} | {len(matching)} | {len({row.model_type for row in matching})} | {meaning} |"


def render_rows(rows: Iterable[Row]) -> list[str]:
    """Render the table rows: heads of one model type with the same outcome share a row."""
    heads: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        heads.setdefault((row.model_type, list(MEANINGS).index(row.status), row.reason), []).append(row.head)
    return [
        f"| `{model_type}` | {list(MEANINGS)[status]} | {', '.join(sorted(names))} | {reason} |"
        for (model_type, status, reason), names in sorted(heads.items())
    ]


def read_page() -> dict[tuple[str, str], tuple[str, str]]:
    """Read the page: (model type, head) → (status, reason)."""
    cells = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {
        (model_type.strip("`"), head): (status, reason[0].strip("| ") if reason else "")
        for model_type, status, heads, *reason in cells
        for head in heads.split(", ")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--cache", type=Path, help="file that stores results between runs")
    parser.add_argument("--again", nargs="*", default=(), help="outcomes, model types or classes to try again")
    options = parser.parse_args(arguments)
    rows = read_cache(options.cache, options.again)
    remaining = [(name, head) for name, head in list_classes() if name not in rows]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, context) as pool:
        for number, row in enumerate(pool.map(try_class, *zip(*remaining, strict=True)) if remaining else (), 1):
            rows[row.name] = row
            print(f"{number}/{len(remaining)} {row.name}: {row.status} {row.reason}", file=sys.stderr, flush=True)
            if options.cache is not None:
                with options.cache.open("a", encoding="utf-8") as cache:
                    cache.write(json.dumps(asdict(row)) + "\n")
    PAGE.write_text(render_page([rows[name] for name, _ in list_classes()]), encoding="utf-8")


def read_cache(cache: Path | None, again: Iterable[str]) -> dict[str, Row]:
    if cache is None or not cache.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in cache.read_text(encoding="utf-8").splitlines()]
    latest = {row.name: row for row in rows}
    return {name: row for name, row in latest.items() if not {row.status, row.model_type, name} & set(again)}


if __name__ == "__main__":
    main()
