"""`clearhead bias code`: attention and attribution of a code model by syntax class, related to its errors."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli import options as opt
from clearhead.cli import output as put
from clearhead.cli.input_sets import select_evenly
from clearhead.cli.inputs import load_explainer
from clearhead.data.sources import collect_raw_inputs, open_dataset, read_column, read_column_names, read_text
from clearhead.errors import InputError, unknown_value_error

if TYPE_CHECKING:
    from clearhead.explainer import Explainer
    from clearhead.studies.code.study import CodeStudy
    from clearhead.studies.code.tasks import CodeQuestion

CODE_EXAMPLES = (
    "clearhead bias code src/ --count 300 --html code.html",
    "clearhead bias code functions.txt --language java --methods saliency,integrated-gradients",
    "clearhead bias code pairs.tsv --task pairs --language java,csharp -m zoo:code-clone --compare-model zoo:code",
    "clearhead bias code java.txt --task translate --answers cs.txt --language java --model zoo:code-translate",
)
#: The default model of each task.
DEFAULT_MODELS_BY_TASK = {"cloze": "zoo:code", "pairs": "zoo:code-clone", "translate": "zoo:code-translate"}
#: Files with one function per line.
LINE_FILE_SUFFIXES = (".txt",)
#: The columns of a table of pairs: two functions, and whether they are clones.
PAIR_COLUMNS = ("first", "second", "label")


@opt.flatten_option_groups
def code(
    model_options: opt.CliModelOptions,
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE",
            help="Source files or folders of them; .txt files with one function per line; for --task pairs, a table "
            "(.tsv, .csv, .jsonl) with the columns first, second and label.",
            show_default=False,
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            metavar="cloze|pairs|translate",
            help="Task of the model: predict a masked token, detect clones, or translate functions.",
        ),
    ] = "cloze",
    language: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Language of the code: python, java, csharp, go, javascript, php or ruby; two names for pairs from "
            "different languages. "
            "Default: inferred from the file suffixes.",
        ),
    ] = None,
    answers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For --task translate: reference translations, one per line.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            metavar="NAME,…",
            help="Attribution methods to analyse by syntax class in addition to attention, separated by commas; may be "
            "repeated. To list all methods, run clearhead methods.",
        ),
    ] = None,
    compare_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Second model for comparison, with the same number of heads, such as the pretrained version of a "
            "fine-tuned model.",
        ),
    ] = None,
    count: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=4,
            help="Maximum number of examples (masked tokens, pairs or functions), taken at even intervals.",
        ),
    ] = 200,
    special: Annotated[
        bool,
        typer.Option(
            "--special/--no-special", metavar="", help="Include special tokens as attention queries and keys."
        ),
    ] = True,
    permutations: Annotated[
        int, typer.Option(metavar="N", min=99, help="Number of permutations per significance test.")
    ] = 2000,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    html: Annotated[str, typer.Option(metavar="FILE", help="Path of the HTML report.")] = "code.html",
    as_json: opt.JsonOption = False,
) -> None:
    """Analyse the attention and attributions of a code model by the syntactic class of its input tokens.

    tree-sitter assigns every token a class (identifier, keyword, operator …) and a syntactic context (declaration,
    condition, loop, call …). The weight of each class is reported relative to chance. The attention of each head is
    compared between wrong and correct predictions, and a classifier that detects wrong predictions is compared with
    the model's confidence as a baseline.
    """
    if task not in DEFAULT_MODELS_BY_TASK:
        raise unknown_value_error("task", task, DEFAULT_MODELS_BY_TASK)
    if (answers is not None) != (task == "translate"):
        raise InputError(
            "--answers FILE and --task translate must be used together: the file contains one reference translation "
            "per line"
        )
    put.check_output_paths(html)
    from clearhead.render.reports.code import write_code_report
    from clearhead.studies.code.study import run_code_study

    chosen_methods = opt.parse_method_options(methods, [])
    languages = _parse_languages(language)
    explainer = load_explainer(model_options.with_model(model_options.model or DEFAULT_MODELS_BY_TASK[task]))
    questions = _load_questions(explainer, task, sources, answers, languages, count, seed)
    compared_explainer = None
    if compare_model is not None:
        compared_explainer = load_explainer(replace(model_options, model=compare_model, revision=None))
    used_languages = dict.fromkeys(source.language for question in questions for source in question.parsed_sources)
    study = run_code_study(
        explainer,
        questions,
        chosen_methods,
        compared_explainer,
        special,
        permutations,
        seed,
        put.is_interactive(),
        task=task,
        language=", ".join(used_languages),
    )
    put.report_written(str(write_code_report(study, html)))
    if as_json:
        put.print_json(study.to_dict())
    else:
        _print_study(study)


def _print_study(study: "CodeStudy") -> None:
    """Print attention by class and one line each for accuracy, heads that differ, AUROC and what was skipped."""
    rows = [
        {name: _format_cell(value) for name, value in row.items()} for row in study.build_class_table(study.by_class)
    ]
    put.print_table(list(rows[0]), rows)
    print(f"accuracy: {study.accuracy} on {len(study.by_class)} questions")
    if study.attention_differences is not None:
        num_tested = study.attention_differences.num_tested
        print(f"wrong vs. correct predictions: {len(study.list_discoveries())} of {num_tested} head–class pairs differ")
    if study.detection is not None:
        scores = ", ".join(f"{name} {auroc}" for name, auroc in study.detection.auroc.items())
        print(f"detection of wrong predictions (AUROC): {scores}")
    if study.change is not None:
        num_significant = int(study.change.is_significant.sum())
        print(f"vs. {study.compared_model}: {num_significant} of {study.change.num_tested} head–class pairs differ")
    for reason in study.skipped_reasons:
        print(f"skipped: {reason}")


def _format_cell(value: Any) -> str:
    """Format a float with three decimals, and anything else with `str`."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _parse_languages(text: str | None) -> list[str]:
    """Split a list at commas and resolve each language name or alias."""
    from clearhead.studies.code.syntax import resolve_language

    return [resolve_language(name.strip()) for name in text.split(",")] if text else []


def _load_questions(
    explainer: "Explainer",
    task: str,
    sources: Sequence[Path],
    answers: Path | None,
    languages: list[str],
    count: int,
    seed: int,
) -> "list[CodeQuestion]":
    """Make at most `count` questions of a task (pairs, translations, masked tokens) that fits the model."""
    from clearhead.adapters.generation import GenerativeAdapter
    from clearhead.adapters.masked_lm import MaskedLMAdapter
    from clearhead.studies.code import tasks

    is_generative = isinstance(explainer.adapter, GenerativeAdapter)
    model_name = explainer.adapter.name
    if task == "pairs":
        if is_generative or isinstance(explainer.adapter, MaskedLMAdapter):
            raise InputError(f"{model_name} is not a classifier: --task pairs needs one, such as zoo:code-clone")
        if not languages:
            raise InputError("--task pairs needs --language, such as --language java,csharp")
        rows = select_evenly([row for path in sources for row in _read_pair_rows(path)], count)
        return tasks.make_clone_questions(
            [row[:2] for row in rows], [row[2] for row in rows], (languages[0], languages[-1])
        )
    if task == "translate":
        if not is_generative:
            raise InputError(
                f"{model_name} does not generate text: --task translate needs a model such as zoo:code-translate"
            )
        assert answers is not None
        if not languages:
            raise InputError("--task translate needs --language, the language of the functions to translate")
        functions = [line for path in sources for line in read_text(path).splitlines()]
        translations = read_text(answers).splitlines()
        if len(functions) != len(translations):
            raise InputError(
                f"there are {len(functions)} functions and {len(translations)} translations: both files need one per "
                "line"
            )
        pairs = select_evenly(list(zip(functions, translations, strict=True)), count)
        return tasks.make_translation_questions(
            [function for function, _ in pairs], [translation for _, translation in pairs], languages[0]
        )
    return _make_cloze_questions(explainer, sources, languages, count, seed)


def _make_cloze_questions(
    explainer: "Explainer", sources: Sequence[Path], languages: list[str], count: int, seed: int
) -> "list[CodeQuestion]":
    """Mask tokens of functions, the same number for each language."""
    from clearhead.studies.code import tasks

    by_language: dict[str, list[str]] = {}
    for path in sources:
        for name, texts in _read_functions(path, languages).items():
            by_language.setdefault(name, []).extend(texts)
    num_per_language = -(-count // len(by_language))
    num_functions = 0
    questions: list[CodeQuestion] = []
    for name, texts in by_language.items():
        num_per_function = -(-num_per_language // len(texts))
        language_questions = tasks.make_cloze_questions(
            explainer, select_evenly(texts, 2 * num_per_language), name, num_per_function, seed
        )
        # function ids start from zero in every language
        questions += [
            replace(question, function_id=(question.function_id or 0) + num_functions)
            for question in language_questions
        ]
        num_functions += len(texts)
    return select_evenly(questions, count)


def _read_functions(path: Path, languages: list[str]) -> dict[str, list[str]]:
    """Read functions by language from source files, or from .txt files with one function per line."""
    from clearhead.studies.code.syntax import LANGUAGE_BY_SUFFIX, extract_functions

    if not path.exists():
        raise InputError(f"there is no file or folder {str(path)!r}")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in LANGUAGE_BY_SUFFIX)
    by_language: dict[str, list[str]] = {}
    for file in files:
        name = languages[0] if languages else LANGUAGE_BY_SUFFIX.get(file.suffix, "")
        if not name:
            raise InputError(f"cannot infer the language of {str(file)!r}: specify it with --language")
        text = read_text(file)
        if file.suffix in LINE_FILE_SUFFIXES:
            functions = [line for line in text.splitlines() if line.strip()]
        else:
            functions = extract_functions(text, name)
        by_language.setdefault(name, []).extend(functions)
    if not any(by_language.values()):
        raise InputError(
            f"there are no functions in {str(path)!r}: use source files ({', '.join(LANGUAGE_BY_SUFFIX)}) or a .txt "
            "file with one function per line"
        )
    return {name: functions for name, functions in by_language.items() if functions}


def _read_pair_rows(path: Path) -> list[tuple[str, str, str]]:
    """Read a table of code pairs as (first, second, label)."""
    column_names = read_column_names(path)
    if not set(PAIR_COLUMNS) <= set(column_names):
        raise InputError(
            f"{str(path)!r} must have the columns {', '.join(PAIR_COLUMNS)}, but has "
            f"{', '.join(column_names) or 'none'}"
        )
    *text_columns, label_column = PAIR_COLUMNS
    pairs = collect_raw_inputs(path, open_dataset(path, *text_columns).iter_rows("text"))
    return [(*pair, str(label)) for pair, label in zip(pairs, read_column(path, label_column), strict=True)]
