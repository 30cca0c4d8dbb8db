"""Attention and attribution of a code model by syntax class, relative to chance level.

For head h of layer l, an input of N tokens of which n_c are of class c:

    received_c = (N / n_c) · (1/N) Σ_q Σ_{k ∈ c} A_{q,k}          1 for uniform attention
    paid_{b,c} = (N / n_c) · (1/n_b) Σ_{q ∈ b} Σ_{k ∈ c} A_{q,k}  attention of rows of class b to class c
    attributed_c = (N / n_c) · Σ_{i ∈ c} |a_i| / Σ_i |a_i|        1 for equal scores

The factor N / n_c corrects for class frequency and input length. There is one value per input, not per token, because
tokens of one input are not independent. Special tokens form a separate class; without them
(`include_special=False`) only the rows of the remaining tokens are used, renormalised over those tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from clearhead.adapters.base import InputOptions
from clearhead.adapters.generation import GenerativeAdapter, PromptSample
from clearhead.concepts.hidden_states import read_samples
from clearhead.engine.batching import with_progress
from clearhead.errors import InputError
from clearhead.explainer import Explainer, MethodLike
from clearhead.methods.base import Method
from clearhead.studies.code.syntax import SYNTAX_PARTS, TOKEN_CLASSES, align_syntax
from clearhead.studies.code.tasks import CodeQuestion
from clearhead.targets import GeneratedToken, TargetLike

Progress = bool | Callable[[list[Any]], Iterable[Any]]


@dataclass(frozen=True, eq=False)
class CodeAttention:
    """Attention, attribution and predictions of a model on questions about code, by syntax class.

    Values are NaN where an input has no token of a class.

    Attributes:
        model: Name of the model.
        grouping: "class" (token classes) or "part" (syntactic constructs).
        classes: Names along the class axes: those that occur in at least one input.
        received_attention: Attention that each class receives, as a multiple of uniform attention.
        paid_attention: Attention that rows of one class (`by`) pay to each class, mean over heads, in the same unit.
        token_counts: Number of tokens of each class.
        is_correct: Whether the prediction is the expected answer.
        confidence: Probability of the prediction (for a translation, the geometric mean over its tokens).
        predictions: Predicted token, label or translation.
        question_types: Class of the masked token; empty where the task has no types.
        function_ids: Index of the function that each question is about.
        attributions: Method name → share of |score| by class, as a multiple of equal scores.
    """

    model: str
    grouping: str
    classes: tuple[str, ...]
    received_attention: Float[np.ndarray, "question layer head class"]
    paid_attention: Float[np.ndarray, "question layer by class"]
    token_counts: Int[np.ndarray, "question class"]
    is_correct: Bool[np.ndarray, " question"]
    confidence: Float[np.ndarray, " question"]
    predictions: tuple[str, ...]
    question_types: tuple[str, ...]
    function_ids: Int[np.ndarray, " question"]
    attributions: dict[str, Float[np.ndarray, "question class"]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.is_correct)

    @property
    def has_distinct_functions(self) -> bool:
        """Whether no two questions are about the same function."""
        return len(np.unique(self.function_ids)) == len(self)

    @property
    def lengths(self) -> Int[np.ndarray, " question"]:
        """Number of counted tokens of each input."""
        return np.asarray(self.token_counts.sum(1))

    @property
    def class_frequencies(self) -> Float[np.ndarray, " class"]:
        """Share of each class among the tokens of all inputs."""
        return np.asarray(self.token_counts.sum(0) / self.token_counts.sum())

    def select_classes(self, classes: Sequence[str]) -> CodeAttention:
        """Return the measurements restricted to `classes`, in that order.

        Args:
            classes: Names out of `self.classes`.

        Returns:
            New measurements of the same questions.

        Raises:
            ValueError: A name is not among `self.classes`.
        """
        class_indices = [self.classes.index(name) for name in classes]
        return CodeAttention(
            self.model,
            self.grouping,
            tuple(classes),
            self.received_attention[..., class_indices],
            self.paid_attention[..., class_indices, :][..., class_indices],
            self.token_counts[:, class_indices],
            self.is_correct,
            self.confidence,
            self.predictions,
            self.question_types,
            self.function_ids,
            {name: lifts[:, class_indices] for name, lifts in self.attributions.items()},
        )


def measure_code_attention(
    explainer: Explainer,
    questions: Sequence[CodeQuestion],
    grouping: str = "class",
    methods: Sequence[MethodLike] = (),
    include_special: bool = True,
    progress: Progress = False,
) -> CodeAttention:
    """Run every question once and relate attention, attribution and prediction to the syntax of the input.

    Args:
        explainer: Explainer of a masked language model, a classifier or an encoder–decoder model.
        questions: At least one question.
        grouping: "class" (identifier, keyword …) or "part" (declaration, condition …).
        methods: Registered attribution methods to run; none by default.
        include_special: Whether special tokens count as a class; otherwise they are excluded.
        progress: Whether to show a progress bar, or a function that wraps the sequence.

    Raises:
        InputError: There are no questions.
    """
    return measure_by_groupings(explainer, questions, (grouping,), methods, include_special, progress)[0]


def measure_by_groupings(
    explainer: Explainer,
    questions: Sequence[CodeQuestion],
    groupings: Sequence[str] = ("class", "part"),
    methods: Sequence[MethodLike] = (),
    include_special: bool = True,
    progress: Progress = False,
) -> list[CodeAttention]:
    """Measure like `measure_code_attention`, by several groupings of the tokens, with the same model passes.

    Returns:
        One set of measurements per grouping.
    """
    if not questions:
        raise InputError("no question was given")
    accumulators = [_AttentionAccumulator(grouping, include_special, methods) for grouping in groupings]
    answers = []
    for (question,) in with_progress([[question] for question in questions], progress):
        answer = answer_question(explainer, question)
        scores = compute_attributions(explainer, question, answer, methods)
        token_syntax = align_syntax(answer.units, question.parsed_sources)
        for accumulator in accumulators:
            accumulator.add(token_syntax.get_labels(accumulator.grouping), answer.attention, scores)
        answers.append(replace(answer, attention=answer.attention[:0]))  # the maps are large and no longer needed
    return [accumulator.build(explainer.adapter.name, questions, answers) for accumulator in accumulators]


def compute_received_attention(
    explainer: Explainer,
    questions: Sequence[CodeQuestion],
    classes: Sequence[str],
    include_special: bool = True,
    progress: Progress = False,
) -> Float[np.ndarray, "question layer head class"]:
    """Compute received attention by token class, without predictions.

    Works for models that cannot answer the questions, such as a pretrained encoder without a head.

    Args:
        explainer: Explainer of any model that takes the inputs of the questions.
        questions: Questions whose inputs are run.
        classes: Token classes along the last axis.
        include_special: Whether special tokens count as a class; otherwise they are excluded.
        progress: Whether to show a progress bar, or a function that wraps the sequence.

    Returns:
        Received attention as a multiple of uniform attention; NaN where an input has no token of a class.
    """
    lifts = []
    for (question,) in with_progress([[question] for question in questions], progress):
        (sample,) = read_samples(explainer, question.raw_input)
        batch = explainer.adapter.collate([sample])
        leaves = explainer.adapter.find_grad_input_names(batch)
        tape = explainer.recorder.record(batch, lambda output: torch.zeros(1), ("attention",), leaves=leaves)
        units = sample.axes[explainer.adapter.stream].unit_groups[0]
        token_classes = np.array(align_syntax(units, question.parsed_sources).token_classes)
        class_mask = np.array([token_classes == name for name in classes])
        attention = _stack_self_attention(tape, sample)
        lifts.append(compute_received_lift(attention, class_mask, include_special=include_special))
    return np.stack(lifts)


class _AttentionAccumulator:
    """Collects the measurements of one grouping, question by question."""

    def __init__(self, grouping: str, include_special: bool, methods: Sequence[MethodLike]) -> None:
        all_classes = TOKEN_CLASSES if grouping == "class" else SYNTAX_PARTS
        self.grouping = grouping
        self.include_special = include_special
        self.class_names = tuple(name for name in all_classes if include_special or name != "special")
        self.received_attention: list[np.ndarray] = []
        self.paid_attention: list[np.ndarray] = []
        self.token_counts: list[np.ndarray] = []
        self.attributions: dict[str, list[np.ndarray]] = {str(method): [] for method in methods}

    def add(self, labels: Sequence[str], attention: np.ndarray, scores: Mapping[str, np.ndarray]) -> None:
        """Add one input: `labels` holds the class of each token, `scores` the token scores by method."""
        class_mask = np.array([np.array(labels) == name for name in self.class_names])
        special = self.include_special
        self.received_attention.append(compute_received_lift(attention, class_mask, include_special=special))
        self.paid_attention.append(compute_paid_lift(attention, class_mask, include_special=special))
        self.token_counts.append(class_mask.sum(1))
        for name, method_scores in scores.items():
            self.attributions[name].append(compute_attribution_lift(method_scores, class_mask))

    def build(self, model: str, questions: Sequence[CodeQuestion], answers: Sequence[CodeAnswer]) -> CodeAttention:
        """Stack the measurements, without the classes that occur in no input."""
        occurs = np.asarray(self.token_counts).sum(0) > 0
        return CodeAttention(
            model=model,
            grouping=self.grouping,
            classes=tuple(name for name, is_present in zip(self.class_names, occurs, strict=True) if is_present),
            received_attention=np.stack(self.received_attention)[..., occurs],
            paid_attention=np.stack(self.paid_attention)[..., occurs, :][..., occurs],
            token_counts=np.stack(self.token_counts)[:, occurs],
            is_correct=np.array([answer.is_correct for answer in answers]),
            confidence=np.array([answer.confidence for answer in answers]),
            predictions=tuple(answer.prediction for answer in answers),
            question_types=tuple(question.question_type for question in questions),
            function_ids=get_function_ids(questions),
            attributions={name: np.stack(lifts)[:, occurs] for name, lifts in self.attributions.items()},
        )


def get_function_ids(questions: Sequence[CodeQuestion]) -> Int[np.ndarray, " question"]:
    """Number the functions of the questions; equal for questions about the same function.

    Returns:
        Consecutive integers; questions without a function id get a number of their own.
    """
    ids = [
        -1 - index if question.function_id is None else question.function_id for index, question in enumerate(questions)
    ]
    return np.asarray(np.unique(np.array(ids), return_inverse=True)[1])


# -- formulas


def _divide_by_frequency(mass: np.ndarray, class_mask: Bool[np.ndarray, "class token"]) -> np.ndarray:
    """Divide the mass of each class by its share of the tokens; NaN for classes without tokens."""
    count = class_mask.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(count > 0, mass * (count.sum() / np.maximum(count, 1)), np.nan))


def _restrict_to_classes(
    attention: np.ndarray, class_mask: np.ndarray, include_special: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Restrict attention to tokens that belong to a class, rows renormalised to one.

    Returns:
        The attention, and a mask of the rows to average over.
    """
    has_class = class_mask.any(0)
    all_rows = np.ones(attention.shape[-2], dtype=bool)
    if include_special or has_class.all():
        return attention, all_rows
    is_square = attention.shape[-1] == attention.shape[-2]
    rows = np.asarray(has_class) if is_square else all_rows
    masked = np.asarray(attention * has_class)
    return masked / np.maximum(masked.sum(-1, keepdims=True), 1e-12), rows


def compute_received_lift(
    attention: Float[np.ndarray, "layer head query key"],
    class_mask: Bool[np.ndarray, "class key"],
    include_special: bool = True,
) -> Float[np.ndarray, "layer head class"]:
    """Compute the attention that each class receives; 1 for uniform attention.

    Args:
        attention: Attention probabilities of one input.
        class_mask: Membership of the tokens in the classes.
        include_special: Whether tokens without a class keep their rows and columns.

    Returns:
        The mean over rows of the attention mass on each class, divided by its share of the tokens.
    """
    restricted, rows = _restrict_to_classes(attention, class_mask, include_special)
    return _divide_by_frequency(restricted[..., rows, :].mean(-2) @ class_mask.T, class_mask)


def compute_paid_lift(
    attention: Float[np.ndarray, "layer head token token"],
    class_mask: Bool[np.ndarray, "class token"],
    include_special: bool = True,
) -> Float[np.ndarray, "layer by class"]:
    """Compute the attention of rows of one class to each class, mean over heads; NaN where either has no token.

    Args:
        attention: Attention probabilities of one input.
        class_mask: Membership of the tokens in the classes.
        include_special: Whether tokens without a class keep their rows and columns.
    """
    restricted, _ = _restrict_to_classes(attention, class_mask, include_special)
    head_mean = restricted.mean(1)
    count = np.maximum(class_mask.sum(1), 1)
    row_means = (class_mask / count[:, None]) @ head_mean
    lifts = _divide_by_frequency(row_means @ class_mask.T, class_mask)
    return np.asarray(np.where(class_mask.sum(1)[:, None] > 0, lifts, np.nan))


def compute_attribution_lift(
    scores: Float[np.ndarray, " token"], class_mask: Bool[np.ndarray, "class token"]
) -> Float[np.ndarray, " class"]:
    """Compute the share of |score| that each class holds; 1 for equal scores.

    Args:
        scores: Attribution of each token.
        class_mask: Membership of the tokens in the classes.
    """
    magnitudes = np.abs(scores) * class_mask.any(0)
    return _divide_by_frequency(class_mask @ magnitudes / max(float(magnitudes.sum()), 1e-300), class_mask)


# -- model passes


@dataclass(frozen=True)
class CodeAnswer:
    """Prediction of a model on one question.

    Attributes:
        units: Units of the input.
        attention: Self-attention of the layers that read the input.
        prediction: Label, token or translation that the model predicts.
        is_correct: Whether that is the expected answer.
        confidence: Probability of the prediction.
        generated_ids: Ids of the generated tokens; empty for models that do not generate.
    """

    units: Any
    attention: Float[np.ndarray, "layer head query key"]
    prediction: str
    is_correct: bool
    confidence: float
    generated_ids: tuple[int, ...] = ()


def answer_question(explainer: Explainer, question: CodeQuestion) -> CodeAnswer:
    """Run the model on one question and record its attention and prediction."""
    adapter = explainer.adapter
    if isinstance(adapter, GenerativeAdapter):
        return _answer_by_generation(explainer, question)
    tape = explainer.record(question.raw_input, ("attention",))
    assert tape.logits is not None
    probabilities = tape.logits[0].float().softmax(-1)
    best_index = int(probabilities.argmax())
    (sample,) = adapter.make_samples(question.raw_input, InputOptions())
    return CodeAnswer(
        units=sample.units,
        attention=_stack_self_attention(tape, sample),
        prediction=adapter.label_name(best_index),
        is_correct=best_index == adapter.label_index(question.expected_answer),
        confidence=float(probabilities[best_index]),
    )


def _stack_self_attention(tape: Any, sample: Any) -> Float[np.ndarray, "layer head query key"]:
    """Stack the self-attention of the sample's first stream over the layers."""
    stream = next(iter(sample.axes))
    self_attention_calls = [call for call in tape.calls if (call.query_stream, call.key_stream) == (stream, stream)]
    return np.stack([call.attention[0].double().cpu().numpy() for call in self_attention_calls])


def _answer_by_generation(explainer: Explainer, question: CodeQuestion, max_new_tokens: int = 400) -> CodeAnswer:
    """Generate the output, score its tokens with one more pass, and record the attention on the input."""
    adapter: Any = explainer.adapter
    (sample,) = adapter.make_samples(question.raw_input, InputOptions())
    generated_ids = tuple(int(token_id) for token_id in adapter.generate_ids(sample, max_new_tokens))
    full_sample: PromptSample = adapter.append_continuation(sample, generated_ids)
    continuation_ids = full_sample.continuation_ids
    output = adapter.session.forward(adapter.collate([full_sample]))
    log_probabilities = output.logits[0].float().log_softmax(-1)
    rows = torch.arange(len(continuation_ids)) + full_sample.first_predicting_row
    token_log_probabilities = log_probabilities[rows, torch.tensor(continuation_ids)]
    tape = explainer.record(question.raw_input, ("attention",), GeneratedToken(0), answer=list(generated_ids))
    output_text = adapter.processor.decode(list(continuation_ids), skip_special_tokens=True).strip()
    return CodeAnswer(
        units=sample.axes[adapter.stream].unit_groups[0],
        attention=_stack_self_attention(tape, sample),
        prediction=output_text,
        is_correct=output_text == str(question.expected_answer).strip(),
        confidence=float(token_log_probabilities.mean().exp()) if len(token_log_probabilities) else 0.0,
        generated_ids=generated_ids,
    )


def compute_attributions(
    explainer: Explainer, question: CodeQuestion, answer: CodeAnswer, methods: Sequence[MethodLike]
) -> dict[str, Float[np.ndarray, " token"]]:
    """Compute the scores of the input's units by each method, with the prediction as the target.

    Args:
        explainer: Explainer of the model that gave the answer.
        question: Question whose input is explained.
        answer: Prediction of the model; generated tokens become the target continuation.
        methods: Attribution methods; none gives an empty dict.

    Returns:
        Method name → scores in float64.
    """
    if not methods:
        return {}
    input_options: dict[str, Any] = {}
    target: TargetLike = None
    if answer.generated_ids:
        input_options = {"answer": list(answer.generated_ids)}
        target = GeneratedToken()
    instances = {str(method): method if isinstance(method, Method) else Method(method) for method in methods}
    explanations = explainer.explain(question.raw_input, list(instances.values()), target, **input_options)
    stream = answer.units.stream
    input_explanations = {
        name: explanation[stream] if len(explanation.streams) > 1 else explanation
        for name, explanation in explanations.items()
    }
    return {
        name: np.asarray(input_explanations[str(method)].scores, dtype=np.float64) for name, method in instances.items()
    }
