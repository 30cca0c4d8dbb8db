"""The table in docs/architectures.md, written anew: `make architectures`.

    python -m tests.architectures.table [--workers 2] [--cache FILE] [--again OUTCOME …]

What is in the cache, a file of one line a class, is not tried again.
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
from tests.architectures.tiny_models import MOST_WEIGHTS, build, classes
from tests.architectures.trial import WORKS, Outcome, tried

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

#: How a class can turn out, and what that means.
MEANINGS = {
    "interface": "works: its attention is recorded through transformers' attention interface",
    "returned": "works: its attention modules ignore the interface, and return their probabilities",
    "registered": "works: its attention modules are torch's own, and known to clearhead",
    "gradients": "gradient methods work, those that read attention are refused",
    "refused": "refused, with a reason",
    "not built": "could not be built tiny, or does not run without what is not installed here: not known",
    "fails": "wrong, or breaks",
}

_HEAD = """\
# Architectures: what was tried, and how it turned out

Every class of transformers {version} that has a head known to clearhead was built tiny ({millions} million weights at
most, random, so that attention is far from uniform, in float64), and explained by every method that needs one pass and
applies. A class works if

- the answer with recording on is the untouched model's, and is among the numbers that come out of it;
- small steps of the input change the answer of the untouched model by as much as the gradient says;
- a unit of the input that moves changes its own row of what goes into the first layer (where convolutions or a tower
  have not mixed most rows by then);
- two inputs that share a batch, of different lengths where the model takes them, get the scores that each gets alone;
- scores are finite, not all zero, and the model is afterwards as it was before.

{types} model types were tried ({classes} classes); in {working} of them at least one class works{failing}. Written by
`make architectures`, checked by `make test-slow`.

| outcome | classes | model types | what it means |
| --- | ---: | ---: | --- |
{counts}

"Padding changes the model's own answer" is the model's doing: inputs of one length were compared then.

Heads go by the mappings of transformers; a class that is in none of them goes by its own name.

| model type | outcome | heads | why |
| --- | --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Row:
    """One class: its model type, its head, how it turned out and why."""

    name: str
    kind: str
    head: str
    how: str
    why: str


def row_of(name: str, head: str) -> Row:
    """Try one class."""
    transformers.logging.set_verbosity_error()
    cls = getattr(transformers, name)
    if find_adapter_class([parent.__name__ for parent in cls.__mro__]) is None:
        outcome = Outcome("refused", "no subject stands for this class")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = tried(partial(build, name))
    return Row(name, cls.config_class.model_type, head, outcome.how, short(outcome.why, name))


def short(why: str, name: str) -> str:
    """A reason without what is the same in many, and without figures that differ from machine to machine."""
    why = why.removeprefix("generic cannot explain ").removeprefix("saliency cannot explain ")
    why = re.sub(f"^{name}( cannot be explained)?: ", "", why)
    why = re.sub(rf"\b(in|of) {name}\b", "", why)
    why = re.sub(rf"\b{name}(\.\w+)?\b", "it", why)
    why = re.sub(r" \((relative|from -?\d)[^)]*\)| by \d[\d.]*e[-+]\d+| were recorded: .*", "", why)
    why = re.sub(r"ImportError: \w+ requires the (\w+) library.*", r"it needs \1, which is not installed here", why)
    why = " ".join(why.replace("|", "/").split())
    return why if len(why) <= 200 else f"{why[:197].rsplit(' ', 1)[0]} …"


def written(rows: Sequence[Row]) -> str:
    """The page."""
    works = {row.kind for row in rows if row.how in WORKS}
    failing = any(row.how == "fails" for row in rows)
    return _HEAD.format(
        version=transformers.__version__,
        millions=MOST_WEIGHTS // 10**6,
        types=len({row.kind for row in rows}),
        classes=len(rows),
        working=len(works),
        failing="" if failing else ", and none is wrong",
        counts="\n".join(_counts(rows)),
        rows="\n".join(lines(rows)),
    )


def _counts(rows: Sequence[Row]) -> Iterator[str]:
    for how, meaning in MEANINGS.items():
        own = [row for row in rows if row.how == how]
        yield f"| {how} | {len(own)} | {len({row.kind for row in own})} | {meaning} |"


def lines(rows: Iterable[Row]) -> list[str]:
    """The heads of one model type that turn out alike share a line."""
    heads: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        heads.setdefault((row.kind, list(MEANINGS).index(row.how), row.why), []).append(row.head)
    return [
        f"| `{kind}` | {list(MEANINGS)[how]} | {', '.join(sorted(alike))} | {why} |"
        for (kind, how, why), alike in sorted(heads.items())
    ]


def committed() -> dict[tuple[str, str], tuple[str, str]]:
    """What the page says: (model type, head) → (outcome, why)."""
    cells = [
        [cell.strip() for cell in line.strip("|\n ").split(" | ")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    return {
        (kind.strip("`"), head): (how, why[0].strip("| ") if why else "")
        for kind, how, heads, *why in cells
        for head in heads.split(", ")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="how many processes try classes")
    parser.add_argument("--cache", type=Path, help="a file that remembers classes between runs")
    parser.add_argument(
        "--again", nargs="*", default=(), help="outcomes, model types or classes to try again all the same"
    )
    given = parser.parse_args(arguments)
    known = _read(given.cache, given.again)
    waiting = [(name, head) for name, head in classes() if name not in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, context) as pool:
        for place, row in enumerate(pool.map(row_of, *zip(*waiting, strict=True)) if waiting else (), 1):
            known[row.name] = row
            print(f"{place}/{len(waiting)} {row.name}: {row.how} {row.why}", file=sys.stderr, flush=True)
            if given.cache is not None:
                with given.cache.open("a", encoding="utf-8") as cache:
                    cache.write(json.dumps(asdict(row)) + "\n")
    PAGE.write_text(written([known[name] for name, _ in classes()]), encoding="utf-8")


def _read(cache: Path | None, again: Iterable[str]) -> dict[str, Row]:
    if cache is None or not cache.exists():
        return {}
    rows = [Row(**json.loads(line)) for line in cache.read_text(encoding="utf-8").splitlines()]
    latest = {row.name: row for row in rows}
    return {name: row for name, row in latest.items() if not {row.how, row.kind, name} & set(again)}


if __name__ == "__main__":
    main()
