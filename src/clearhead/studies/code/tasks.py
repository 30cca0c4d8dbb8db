"""Questions for code models: masked tokens, function clones, and translations between languages.

Each question keeps the parse of the unmasked text: a masked text may not parse, so classes are determined before the
mask is inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clearhead.adapters.base import InputOptions
from clearhead.adapters.masked_lm import MaskedLMAdapter
from clearhead.concepts.word_pairs import group_joined_pairs
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.studies.code.syntax import ParsedSource, align_syntax, parse_source

#: Classes that are never masked: predicting a comment or an indentation requires little knowledge of the program.
EXCLUDED_CLASSES = ("comment", "layout", "special", "mask")


@dataclass(frozen=True)
class CodeQuestion:
    """One input with the parse of its texts and the expected answer.

    Attributes:
        raw_input: Text or pair of texts.
        parsed_sources: Parse of each text.
        expected_answer: Id of the masked token, label of a pair, or text of a translation.
        question_type: Class of the masked token; empty where the task has no types.
        function_id: Index of the function that the question is about. Questions about one function are not independent
            of each other; None if the question shares its function with no other.
    """

    raw_input: str | tuple[str, str]
    parsed_sources: tuple[ParsedSource, ...]
    expected_answer: int | str
    question_type: str = ""
    function_id: int | None = None


def make_cloze_questions(
    explainer: Explainer,
    texts: Sequence[str],
    language: str,
    tokens_per_text: int = 1,
    seed: int = 0,
    max_tokens: int = 256,
) -> list[CodeQuestion]:
    """Make masked-token questions: random code tokens of each function, one masked at a time.

    Functions that do not parse, are truncated or have more than `max_tokens` tokens are skipped.

    Args:
        explainer: Explainer of a masked language model.
        texts: Source code of the functions.
        language: Language name or alias.
        tokens_per_text: Number of tokens to mask in each function, drawn among those that are neither comment nor
            layout.
        seed: Seed of the draws.
        max_tokens: Longest function, in tokens.

    Returns:
        The questions, in the order of the functions.

    Raises:
        InputError: The model is not a masked language model, the language is unknown, or no function is usable.
    """
    adapter = explainer.adapter
    if not isinstance(adapter, MaskedLMAdapter) or adapter.processor is None:
        raise InputError(f"{adapter.name} is not a masked language model with a tokenizer: load one, such as zoo:code")
    rng = np.random.default_rng(seed)
    questions: list[CodeQuestion] = []
    for text_index, text in enumerate(texts):
        source = parse_source(text, language)
        if source.has_errors:
            continue
        encoded = adapter.tokenizer_wrapper.encode_texts((text,), InputOptions())
        token_ids = encoded.inputs["input_ids"].tolist()
        units = encoded.units
        token_classes = align_syntax(units, [source]).token_classes
        candidates = [index for index, name in enumerate(token_classes) if name not in EXCLUDED_CLASSES]
        if len(token_ids) > max_tokens or encoded.num_truncated or not candidates:
            continue
        for index in rng.choice(candidates, size=min(tokens_per_text, len(candidates)), replace=False):
            start, stop = _strip_span(text, *units.offsets[index])  # type: ignore[index]
            masked = source.mask_span(start, stop, adapter.processor.mask_token)
            questions.append(
                CodeQuestion(masked.text, (masked,), int(token_ids[index]), token_classes[index], text_index)
            )
    return _check_not_empty(questions, f"{len(texts)} texts", language)


def make_clone_questions(
    texts: Sequence[tuple[str, str]],
    labels: Sequence[str],
    languages: tuple[str, str],
    function_names: Sequence[tuple[str, str]] | None = None,
) -> list[CodeQuestion]:
    """Make clone-detection questions: whether two functions compute the same.

    Pairs with a text that does not parse are skipped. Pairs that share a function, directly or through other pairs, get
    the same `function_id`.

    Args:
        texts: Pairs of functions.
        labels: Expected label of each pair.
        languages: Languages of the first and the second function.
        function_names: Names of the functions of each pair, where several texts are variants of one function; if
            omitted, each text is a function.

    Returns:
        The questions, in the order of the pairs.

    Raises:
        InputError: The lengths differ, a language is unknown, or no pair parses.
    """
    if len(texts) != len(labels):
        raise InputError(f"{len(texts)} pairs have {len(labels)} labels: pass one for each")
    names = texts if function_names is None else function_names
    if len(texts) != len(names):
        raise InputError(f"{len(texts)} pairs have {len(names)} pairs of function names: pass one for each")
    function_ids = _number_joined_functions(names)
    questions = []
    for pair, label, (first_name, _) in zip(texts, labels, names, strict=True):
        first, second = pair
        sources = (parse_source(first, languages[0]), parse_source(second, languages[1]))
        if not any(source.has_errors for source in sources):
            questions.append(CodeQuestion((first, second), sources, label, function_id=function_ids[first_name]))
    return _check_not_empty(questions, f"{len(texts)} pairs", " and ".join(dict.fromkeys(languages)))


def make_translation_questions(
    texts: Sequence[str], expected_texts: Sequence[str], language: str
) -> list[CodeQuestion]:
    """Make translation questions from functions and their translations; functions that do not parse are skipped.

    Args:
        texts: Source code of the functions.
        expected_texts: Reference translation of each function.
        language: Language of `texts`.

    Returns:
        The questions, in the order of the functions.

    Raises:
        InputError: The lengths differ, the language is unknown, or no function parses.
    """
    if len(texts) != len(expected_texts):
        raise InputError(f"{len(texts)} functions have {len(expected_texts)} translations: pass one for each")
    questions = []
    for text, expected_text in zip(texts, expected_texts, strict=True):
        source = parse_source(text, language)
        if not source.has_errors:
            questions.append(CodeQuestion(source.text, (source,), expected_text))
    return _check_not_empty(questions, f"{len(texts)} functions", language)


def _number_joined_functions(names: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Map each function name (or text) to a number that is equal for functions joined by pairs."""
    groups = group_joined_pairs(names)
    group_ids = {name: index for index, name in enumerate(dict.fromkeys(groups.values()))}
    return {name: group_ids[group] for name, group in groups.items()}


def _check_not_empty(questions: list[CodeQuestion], description: str, language: str) -> list[CodeQuestion]:
    """Return the questions, or raise `InputError` if every text was dropped."""
    if not questions:
        raise InputError(f"none of {description} can be used: they cannot be parsed as {language}, or are too long")
    return questions


def _strip_span(text: str, start: int, stop: int) -> tuple[int, int]:
    """Shrink a span by the white space at its ends."""
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), stop - (len(piece) - len(piece.rstrip()))
