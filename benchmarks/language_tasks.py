"""Do methods find the word that decides the output of a language model? Three tasks with marked words, on any decoder.

    python benchmarks/language_tasks.py --model FOLDER_OR_GGUF --store FILE.jsonl [--task needle] [--methods a,b]
        [--first N] [--results FILE.json]

Results are appended to the store as they come; a second call continues. `--results` writes the summary of the
store, which `language_tasks_page.py` turns into docs/language-tasks.md.

Tasks (each prompt has exactly one marked word; the files were committed before any method was run on them):

- factual: `factual_prompts.json`, 30 short prompts. Explained is the first token of the answer. Marked is the word that
  decides it: with another word there, another answer is right.
- subject-verb: `subject_verb.json`, 240 sentence beginnings before a verb, in pairs that differ only in the number of
  the head noun. Explained are the log-odds of the right form of the verb against the wrong one. Marked is the head
  noun: grammar says that it alone decides.
- needle: `needle.json`, 120 passages with one sentence that states a fact, and a question. Explained is the first token
  of the answer. Marked is the value of the fact.

What counts:

- The units are words; scores of tokens are added up. Words of the answer, punctuation and special tokens are no
  candidates. Scores are signed: the highest counts, not the largest magnitude.
- Average precision (AP): with one marked word, 1 / rank of the marked word. Words with an equal score rank above it.
- Top two: the rank is 1 or 2.
- Drop: the explained value, as a log-probability or log-odds, minus the same after the word with the highest score is
  removed. For comparison, the marked word is removed, and random candidates (the mean of two).
- Words of the question count as candidates in AP and in the top two, although they are necessary for the answer. For
  needle there is also the AP among the words of the passage alone, and only these are removed. Scores of words
  are also added up to the sentences of the passage: is the needle the highest, and how large is the drop when the
  highest sentence, the needle, or random sentences are removed?
- Every figure is given for all prompts and for those that the model solves: its most probable token is the answer, or,
  for subject-verb, the right form is more probable in both sentences of the pair.
- Intervals are 95 % (`clearhead.stats.compute_mean_interval`); the pairs of subject-verb are groups.
- Slow methods run on the first prompts only. The order of the files is random, so these are a random sample.

The gold words say what decides the answer for a reader. A model may use other words, so no method need reach 1.
"""

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch

import clearhead
from clearhead.adapters import InputOptions
from clearhead.data.atomic_file import atomic_write
from clearhead.stats import RATE_BOUNDS, compute_mean_interval, compute_rank_ranges

FOLDER = Path(__file__).parent
TASK_FILES = {"factual": "factual_prompts.json", "subject-verb": "subject_verb.json", "needle": "needle.json"}
DEFAULT_METHODS = (
    "ensemble,deeplift-shap,attn-lrp,saliency,input-x-gradient,integrated-gradients,generic,rollout,occlusion,position,"
    "random"
)
#: Options that differ from the defaults, to save time.
METHOD_OPTIONS: dict[str, dict[str, Any]] = {"integrated-gradients": {"steps": 20}}
NUM_RANDOM_REMOVALS = 2
#: Number of prompts that are explained together, where they have the same token to explain against.
CHUNK_SIZES = {"factual": 6, "subject-verb": 24, "needle": 1}
#: In the store, the name of the rows that belong to no method.
CONTROLS = "controls"
#: Measured values, and the bounds of those that have bounds.
METHOD_FIELDS = {
    "average_precision": RATE_BOUNDS,
    "is_among_top_two": RATE_BOUNDS,
    "top_word_drop": None,
    "passage_average_precision": RATE_BOUNDS,
    "is_needle_top_sentence": RATE_BOUNDS,
    "top_sentence_drop": None,
}
CONTROL_FIELDS = {
    "value": None,
    "is_solved": RATE_BOUNDS,
    "marked_word_drop": None,
    "random_word_drop": None,
    "needle_sentence_drop": None,
    "random_sentence_drop": None,
}
Prompt = dict[str, Any]
Row = dict[str, Any]
Span = tuple[int, int]


def load_decoder(name: str) -> clearhead.Explainer:
    """Load a decoder; a GGUF file through transformers, which needs the package gguf."""
    if not name.endswith(".gguf"):
        return clearhead.load(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = os.path.split(name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return clearhead.load((model, AutoTokenizer.from_pretrained(folder, gguf_file=file)))


def read_prompts(task: str) -> list[Prompt]:
    """Read the prompts of a task."""
    prompts: list[Prompt] = json.loads((FOLDER / TASK_FILES[task]).read_text("utf-8"))["prompts"]
    return prompts


def find_word_spans(text: str, end: int | None = None) -> list[Span]:
    """Find the words of a text up to an offset, without punctuation, as pairs of offsets."""
    return [match.span() for match in re.finditer(r"\w+", text[:end])]


def find_sentence_spans(passage: str) -> list[Span]:
    """Find the sentences of a passage, which end with a full stop."""
    return [match.span() for match in re.finditer(r"\w[^.]*\.", passage)]


def remove_span(text: str, span: Span) -> str:
    """Remove a word or sentence, and the space after it, or before it if none follows.

    >>> remove_span("The capital of France is", (15, 21)), remove_span("An apple.", (3, 8))
    ('The capital of is', 'An.')
    """
    start, end = span
    if text[end : end + 1] == " ":
        end += 1
    elif text[start - 1 : start] == " ":
        start -= 1
    return text[:start] + text[end:]


def read_first_token(explainer: clearhead.Explainer, text: str) -> int:
    """Return the first token id of an answer."""
    return int(explainer.adapter.processor(text, add_special_tokens=False)["input_ids"][0])


class RemovalValues:
    """The explained value of a prompt, for its text and for texts with parts removed; each computed once."""

    def __init__(self, explainer: clearhead.Explainer, prompt: Prompt) -> None:
        self.explainer, self.prompt = explainer, prompt
        self.answer_id = read_first_token(explainer, prompt["answer"])
        self.against_id = read_first_token(explainer, prompt["against"]) if "against" in prompt else None
        self.log_probabilities: dict[str, torch.Tensor] = {}

    def compute_log_probabilities(self, text: str) -> torch.Tensor:
        """Return the log-probabilities of the token after a text."""
        if text not in self.log_probabilities:
            adapter = self.explainer.adapter
            (sample,) = adapter.make_samples(text, InputOptions(continuation=self.prompt["answer"]))
            ids = sample.inputs["input_ids"][None, : -len(sample.continuation_ids)]
            with torch.no_grad():
                self.log_probabilities[text] = adapter.model(input_ids=ids).logits[0, -1].float().log_softmax(-1)
        return self.log_probabilities[text]

    def compute_value(self, text: str) -> float:
        """Return the log-probability of the answer, or the log-odds against the other form, after a text."""
        log_probabilities = self.compute_log_probabilities(text)
        value = float(log_probabilities[self.answer_id])
        return value if self.against_id is None else value - float(log_probabilities[self.against_id])

    def compute_drop(self, span: Span) -> float:
        """Return by how much the value drops when a word or sentence is removed."""
        text = self.prompt["text"]
        return self.compute_value(text) - self.compute_value(remove_span(text, span))

    def is_answer_preferred(self) -> bool:
        """Whether the most probable token is the answer, or the right form is more probable than the other."""
        if self.against_id is not None:
            return self.compute_value(self.prompt["text"]) > 0
        return int(self.compute_log_probabilities(self.prompt["text"]).argmax()) == self.answer_id


def find_marked_span(prompt: Prompt) -> Span:
    """Find the marked word, which occurs once."""
    (span,) = [(a, b) for a, b in find_word_spans(prompt["text"]) if prompt["text"][a:b] == prompt["marked"]]
    return span


def measure_controls(values: RemovalValues, index: int) -> Row:
    """Measure what does not depend on a method: the model's output, and the drops of marked and random units."""
    prompt, rng = values.prompt, random.Random(index)
    marked = find_marked_span(prompt)
    words = [span for span in find_word_spans(prompt["text"], prompt.get("passage_length")) if span != marked]
    controls = {
        "value": values.compute_value(prompt["text"]),
        "is_preferred": values.is_answer_preferred(),
        "marked_word_drop": values.compute_drop(marked),
        "random_word_drop": compute_mean_drop(values, rng.sample(words, min(NUM_RANDOM_REMOVALS, len(words)))),
    }
    if "needle" in prompt:
        sentences = find_sentence_spans(prompt["text"][: prompt["passage_length"]])
        others = [span for span in sentences if not contains(span, marked)]
        (needle,) = [span for span in sentences if contains(span, marked)]
        controls["needle_sentence_drop"] = values.compute_drop(needle)
        controls["random_sentence_drop"] = compute_mean_drop(values, rng.sample(others, NUM_RANDOM_REMOVALS))
    return controls


def compute_mean_drop(values: RemovalValues, spans: list[Span]) -> float:
    """Return the mean drop of several removals, each alone."""
    return float(np.mean([values.compute_drop(span) for span in spans]))


def contains(span: Span, word: Span) -> bool:
    """Whether a span contains a word."""
    return span[0] <= word[0] and word[1] <= span[1]


def sum_scores(e: clearhead.Explanation, spans: list[Span]) -> list[float]:
    """Add up the scores of the prompt's tokens by spans; a token belongs to the span that contains its last character.

    The offsets of a token may contain the space before it.
    """
    assert e.units.offsets is not None and e.units.segments is not None
    ends = [
        end - 1 if segment == 0 and end > start else -1
        for (start, end), segment in zip(e.units.offsets, e.units.segments, strict=True)
    ]
    return [
        float(sum(score for score, end in zip(e.scores, ends, strict=True) if start <= end < stop))
        for start, stop in spans
    ]


def rank_unit(scores: list[float], index: int) -> int:
    """Return the rank of one unit by its score; units with an equal score rank above it."""
    return sum(score >= scores[index] for score in scores)


def measure_method(e: clearhead.Explanation, values: RemovalValues) -> Row:
    """Compare the scores of one method with the marked word."""
    prompt = values.prompt
    marked = find_marked_span(prompt)
    words = find_word_spans(prompt["text"])
    scores = sum_scores(e, words)
    rank = rank_unit(scores, words.index(marked))
    passage_words = find_word_spans(prompt["text"], prompt.get("passage_length"))
    top_word = passage_words[int(np.argmax(scores[: len(passage_words)]))]
    row = {
        "average_precision": 1 / rank,
        "is_among_top_two": rank <= 2,
        "top_word": prompt["text"][slice(*top_word)],
        "top_word_drop": values.compute_drop(top_word),
    }
    if "needle" in prompt:
        sentences = find_sentence_spans(prompt["text"][: prompt["passage_length"]])
        sentence_scores = sum_scores(e, sentences)
        (needle_index,) = [index for index, span in enumerate(sentences) if contains(span, marked)]
        row["passage_average_precision"] = 1 / rank_unit(scores[: len(passage_words)], words.index(marked))
        row["is_needle_top_sentence"] = rank_unit(sentence_scores, needle_index) == 1
        row["top_sentence_drop"] = values.compute_drop(sentences[int(np.argmax(sentence_scores))])
    return row


def read_store(store: Path) -> list[Row]:
    """Read the rows of earlier calls. A last line without an end is left out: the call was killed while writing it."""
    if not store.exists():
        return []
    return [json.loads(line) for line in store.read_text("utf-8").splitlines(keepends=True) if line.endswith("\n")]


def open_run(store: Path, model: str) -> None:
    """Note the run in the store, and remove a line that an earlier run could not finish.

    Raises:
        SystemExit: The store has results of another model.
    """
    rows = read_store(store)
    others = {row["run"]["model"] for row in rows if "run" in row} - {model}
    if others:
        raise SystemExit(f"{store} has results of {', '.join(sorted(others))}: use another --store for {model}")
    lines = [json.dumps(row) + "\n" for row in [*rows, {"run": {"model": model, **describe_run()}}]]
    with atomic_write(store) as path:
        path.write_text("".join(lines), encoding="utf-8")


def run_task(explainer: clearhead.Explainer, task: str, methods: list[str], first: int | None, store: Path) -> None:
    """Run methods on the prompts of a task, and append the results that the store does not have."""
    stored = {(row["prompt"], row["method"]) for row in read_store(store) if row.get("task") == task}
    prompts = read_prompts(task)[:first]
    for start in range(0, len(prompts), CHUNK_SIZES[task]):
        started = time.monotonic()
        groups: dict[tuple[int | None, tuple[str, ...]], dict[int, RemovalValues]] = {}
        for index in range(start, min(start + CHUNK_SIZES[task], len(prompts))):
            missing = tuple(method for method in [CONTROLS, *methods] if (index, method) not in stored)
            values = RemovalValues(explainer, prompts[index])
            groups.setdefault((values.against_id, missing), {})[index] = values
        for (_, missing), group in groups.items():
            rows = measure_group(explainer, group, missing)
            with store.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps({"task": task, **row}) + "\n")
        if any(missing for _, missing in groups):
            print(f"{task}, prompts from {start}: {time.monotonic() - started:.1f} s", flush=True)


def measure_group(
    explainer: clearhead.Explainer, group: dict[int, RemovalValues], methods: tuple[str, ...]
) -> list[Row]:
    """Measure methods, and controls, on prompts that have the same second token to explain against."""
    rows = []
    if CONTROLS in methods:
        for index, values in group.items():
            rows.append({"prompt": index, "method": CONTROLS, **measure_controls(values, index)})
    names = [method for method in methods if method != CONTROLS]
    if names:
        all_values = list(group.values())
        explanations = explainer.explain(
            [values.prompt["text"] for values in all_values],
            [clearhead.Method(name, **METHOD_OPTIONS.get(name, {})) for name in names],
            answer=[values.prompt["answer"] for values in all_values],
            target=clearhead.GeneratedToken(0, against=all_values[0].against_id),
        )
        for name, method_explanations in zip(names, explanations.values(), strict=True):
            for (index, values), e in zip(group.items(), method_explanations, strict=True):
                assert e.target["index"] == values.answer_id
                rows.append({"prompt": index, "method": name, **measure_method(e, values)})
    return rows


def describe_run() -> Row:
    """Describe this call: date, commit, machine, versions, command."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=True)
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "machine": ", ".join([cpu[1] if cpu else platform.machine(), f"{torch.get_num_threads()} thread", *versions]),
        "command": " ".join(["python", "benchmarks/language_tasks.py", *sys.argv[1:]]),
    }


def find_solved_prompts(task: str, controls: dict[int, Row]) -> dict[int, bool]:
    """Find the prompts that the model solves; a pair only if both of its sentences are right."""
    prompts, solved = read_prompts(task), {index: row["is_preferred"] for index, row in controls.items()}
    if task != "subject-verb":
        return solved
    wrong_pairs = {prompts[index]["pair"] for index, is_right in solved.items() if not is_right}
    complete = {index for index in solved if index ^ 1 in solved}  # the sentences of a pair follow each other
    return {index: index in complete and prompts[index]["pair"] not in wrong_pairs for index in solved}


def summarise_field(task: str, field: str, values: dict[int, float]) -> Row | None:
    """Compute the mean of a field over prompts with its interval; None where the task does not have the field."""
    if not values:
        return None
    prompts = read_prompts(task)
    groups = np.array([prompts[index].get("pair", index) for index in values])
    bounds = {**METHOD_FIELDS, **CONTROL_FIELDS}[field]
    interval = compute_mean_interval(np.array([*values.values()], dtype=float), bounds=bounds, groups=groups)
    bounds_or_none = (interval.low, interval.high) if interval.has_bounds else (None, None)
    return {"mean": interval.mean, "low": bounds_or_none[0], "high": bounds_or_none[1], "n": interval.count}


def summarise_task(task: str, rows: list[Row]) -> Row:
    """Compute the figures of all methods on a task, on all prompts and on those that the model solves."""
    by_method: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.get("task") == task:
            by_method.setdefault(row["method"], {})[row["prompt"]] = row
    controls = by_method.pop(CONTROLS)
    solved = find_solved_prompts(task, controls)
    controls = {index: {**row, "is_solved": solved[index]} for index, row in controls.items()}
    summary: Row = {"num_prompts": len(read_prompts(task))}
    for subset in ("all", "solved"):
        kept = {index for index in controls if subset == "all" or solved[index]}
        figures: Row = {"controls": summarise_rows(task, CONTROL_FIELDS, controls, kept), "methods": {}}
        for method in sorted(by_method):
            figures["methods"][method] = summarise_rows(task, METHOD_FIELDS, by_method[method], kept)
        precisions = {
            method: np.array([method_rows.get(index, {}).get("average_precision", np.nan) for index in sorted(kept)])
            for method, method_rows in by_method.items()
        }
        figures["ranks"] = compute_rank_ranges(average_pairs(task, precisions, sorted(kept)))
        summary[subset] = figures
    return summary


def average_pairs(task: str, values_by_method: dict[str, np.ndarray], indices: Sequence[int]) -> dict[str, np.ndarray]:
    """Average the values of the two prompts of a pair, which are no independent evidence; NaN if one is missing."""
    prompts = read_prompts(task)
    groups = [prompts[index].get("pair", index) for index in indices]
    _, group_of_prompt = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group_of_prompt)
    return {method: np.bincount(group_of_prompt, weights=values) / sizes for method, values in values_by_method.items()}


def summarise_rows(task: str, fields: dict[str, Any], rows: dict[int, Row], kept: set[int]) -> Row:
    """Compute the mean of each field over some of the prompts."""
    figures = {}
    for field in fields:
        values = {index: row[field] for index, row in sorted(rows.items()) if index in kept and field in row}
        figures[field] = summarise_field(task, field, values)
    return {field: figure for field, figure in figures.items() if figure is not None}


def write_results(store: Path, model: str, file: Path) -> None:
    """Write the summary of a store, and the values of every prompt, to a JSON file."""
    rows = read_store(store)
    tasks = [task for task in TASK_FILES if any(row.get("task") == task for row in rows)]
    results = {
        "model": model,
        "runs": [row["run"] for row in rows if "run" in row],
        "summary": {task: summarise_task(task, rows) for task in tasks},
        "rows": [round_values(row) for row in rows if "method" in row],
    }
    lines = json.dumps({**results, "rows": []}, indent=1, ensure_ascii=False).removesuffix("[]\n}")
    rows_text = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in results["rows"])
    file.write_text(f"{lines}[\n{rows_text}\n ]\n}}\n", encoding="utf-8")


def round_values(row: Row) -> Row:
    """Round the values of a row to four digits after the point."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or hub name of a decoder")
    parser.add_argument("--store", type=Path, required=True, help="JSON lines; results are appended")
    parser.add_argument("--task", choices=TASK_FILES, action="append", help="default: all tasks")
    parser.add_argument(
        "--methods", default=DEFAULT_METHODS, help="methods, separated by commas; none: only the controls"
    )
    parser.add_argument("--first", type=int, help="number of prompts of each task; default: all")
    parser.add_argument("--results", type=Path, help="write the summary of the store to this file")
    options = parser.parse_args()
    methods = [] if options.methods == "none" else options.methods.split(",")
    if options.first != 0:
        torch.set_num_threads(1)
        explainer = load_decoder(options.model)
        open_run(options.store, Path(options.model).name)
        for task in options.task or TASK_FILES:
            run_task(explainer, task, methods, options.first, options.store)
    if options.results is not None:
        write_results(options.store, Path(options.model).name, options.results)


if __name__ == "__main__":
    main()
