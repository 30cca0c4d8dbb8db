"""Write docs/language-tasks.md from the results of `language_tasks.py --results`.

python benchmarks/language_tasks_page.py benchmarks/results/language-tasks.json
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from language_tasks import DEFAULT_METHODS, METHOD_OPTIONS

PAGE_PATH = Path(__file__).parents[1] / "docs" / "language-tasks.md"
Results = dict[str, Any]

INTRODUCTION_TEMPLATE = """# Tasks for language models

Does a method find the word that decides the output of a language model? Three tasks, on {model}. Each prompt has one
marked word:

- **factual**: “The capital of France is”. Explained is the first token of the answer, “ Paris”; marked is the word that
  decides it, “France”.
- **subject-verb**: “The keys to the old cabinet”. Explained are the log-odds of the right form of the verb, “ are”,
  against the other, “ is”; marked is the head noun, “keys”. Sentences come in pairs that differ in its number.
- **needle**: 10 to 22 unrelated sentences, one that states a fact, “Maria moved to Dublin last year.”, and a question.
  Explained is the first token of the answer, “ Dublin”; marked is this word in the passage. The other words of the fact
  are not marked: the question repeats them, and another value would change the answer.

Prompts, marked words and protocol were committed before any method was run on them; of some prompts, the model's
prediction had been seen (`benchmarks/factual_prompts.json`, `subject_verb.json`, `needle.json`; the grammars are in
`benchmarks/language_task_prompts.py`, the protocol in `benchmarks/language_tasks.py`). The scores of tokens are added
up to words. Scores are signed, and the highest counts.

- **AP**: average precision of the marked word among all words of the prompt, 1 / rank.
- **AP, solved**: the same for prompts that the model solves. Its most probable token is the answer; for subject-verb,
  the right form is more probable in both sentences of the pair.
- **Top two**: how often the marked word has one of the two highest scores.
- **Drop**: by how much the explained log-probability or log-odds falls when the word with the highest score is removed.
- **n**: number of prompts. Slow methods run on the first prompts only; the order of the new files is random.
- **Rank**: range of ranks by AP that paired tests cannot distinguish (`clearhead.stats.compute_rank_ranges`); a
  pair of sentences counts once.

Brackets are 95 % intervals. The marked word is what decides the answer for a reader. A model may use other words as
well, and the drop also counts words whose removal makes the text unusual.
"""
TASK_NOTES = {
    "factual": "Short prompts: a method that ranks at random often has the marked word among the top two.",
    "subject-verb": "The second noun has the other number in one sentence of each pair. The head noun is the second "
    "word of most sentences, so `position`, which prefers the first words, often has it among the top two.",
    "needle": "Words of the question count as candidates, although no answer is possible without them. Only words and "
    "sentences of the passage are removed. **AP, passage** is the average precision among the words of the passage; "
    "**needle first**: how often the sum of the scores is highest for the sentence with the fact; **drop, sentence**: "
    "when the sentence with the highest sum is removed.",
}
COLUMNS = {
    "AP": ("all", "average_precision"),
    "AP, solved": ("solved", "average_precision"),
    "top two": ("all", "is_among_top_two"),
    "drop": ("all", "top_word_drop"),
}
NEEDLE_COLUMNS = {
    "AP, passage": ("all", "passage_average_precision"),
    "needle first": ("all", "is_needle_top_sentence"),
    "drop, sentence": ("all", "top_sentence_drop"),
}
CONTROL_NAMES = {
    "marked_word_drop": "the marked word",
    "random_word_drop": "another word",
    "needle_sentence_drop": "the needle",
    "random_sentence_drop": "another sentence",
}


def render_page(results: Results) -> str:
    """Return the page as Markdown."""
    sections = [INTRODUCTION_TEMPLATE.format(model=results["model"].removesuffix(".gguf"))]
    sections += [render_task(task, summary) for task, summary in results["summary"].items()]
    changed = [
        f"`{name}` with {value} {option}"
        for name, options in METHOD_OPTIONS.items()
        for option, value in options.items()
    ]
    machines = sorted({run["machine"] for run in results["runs"]})
    commands = sorted({re.sub(r"(?<= )/\S*/", "", run["command"]) for run in results["runs"]})
    dates = sorted(run["date"] for run in results["runs"])
    commits = sorted({run["commit"][:8] for run in results["runs"]})
    sections.append(
        f"## How it was measured\n\n{'; '.join(machines)}; {dates[0]} to {dates[-1]}; commits {', '.join(commits)}. "
        f"Methods have their default options, {', '.join(changed)}. Commands (a later call continues a store):\n\n"
        "```console\n"
        + "\n".join(f"$ {command}" for command in commands)
        + "\n```\n\nMade from `benchmarks/results/language-tasks.json`, which has the values of every prompt, by "
        "`benchmarks/language_tasks_page.py`.\n"
    )
    return "\n".join(sections)


def render_task(task: str, summary: Results) -> str:
    """Return the section of a task: the model's output, what removals do, and the table of methods."""
    columns = COLUMNS | (NEEDLE_COLUMNS if task == "needle" else {})
    controls = summary["all"]["controls"]
    solved = controls["is_solved"]
    drops = [
        f"{format_interval(controls[field])} for {name}" for field, name in CONTROL_NAMES.items() if field in controls
    ]
    lines = [
        f"## {task}",
        "",
        f"{TASK_NOTES[task]} The model solves {solved['mean']:.0%} of {solved['n']} prompts (of "
        f"{summary['num_prompts']} in the file). Removal lowers the explained value by {', '.join(drops)}.",
        "",
        f"| method | n | rank | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 3) + "|",
    ]
    methods = summary["all"]["methods"]
    for method in sorted(methods, key=lambda name: -methods[name]["average_precision"]["mean"]):
        cells = [format_interval(summary[subset]["methods"][method].get(field)) for subset, field in columns.values()]
        count = methods[method]["average_precision"]["n"]
        lines.append(f"| `{method}` | {count} | {summary['all']['ranks'][method]} | {' | '.join(cells)} |")
    absent = [f"`{name}`" for name in DEFAULT_METHODS.split(",") if name not in methods]
    if absent:
        lines += ["", f"Not measured on this task: {', '.join(absent)}."]
    return "\n".join([*lines, ""])


def format_interval(figure: Results | None) -> str:
    """Format a mean and its interval."""
    if figure is None:
        return "–"
    if figure["low"] is None:
        return f"{figure['mean']:.2f}"
    return f"{figure['mean']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    PAGE_PATH.write_text(render_page(json.loads(parser.parse_args().file.read_text("utf-8"))), encoding="utf-8")
    print(PAGE_PATH)


if __name__ == "__main__":
    main()
