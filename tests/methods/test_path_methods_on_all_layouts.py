"""Path methods with several targets or streams: decoders, encoder–decoders, image-text models; batch equals single."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead
from clearhead import GeneratedToken, Method
from tests import dual_models, joint_models, vision_language_models
from tests.adapters import test_decoder as decoders
from tests.adapters import test_encoder_decoder as encoder_decoders

#: Few steps: the properties hold for any number of steps.
METHODS = [
    Method("integrated-gradients", steps=3),
    Method("gradient-shap", samples=2, noise=0.1),
    Method("smoothgrad", samples=2),
    Method("layer-conductance", steps=2),
    Method("beyond-intuition-head", steps=2),
    Method("beyond-intuition-token", steps=2),
    Method("tam", steps=2),
]
#: Methods that need only the inputs, and so apply to every model.
INPUT_METHODS = {"integrated-gradients", "gradient-shap", "smoothgrad"}
CONTINUATION = (40, 50, 60)


def get_applicable_methods(ex: clearhead.Explainer) -> list[Method]:
    table = {row.name: row for row in ex.methods()}
    for name in INPUT_METHODS:
        assert table[name].applies, table[name].why_not
    for method in METHODS:
        row = table[method.name]
        assert row.applies or len(row.why_not.split()) > 8, f"not a reason: {row.why_not!r}"
    return [method for method in METHODS if table[method.name].applies]


def assert_explanations_close(actual: Any, expected: Any, tolerance: float, context: Any) -> None:
    assert actual.streams == expected.streams
    for stream in actual.streams:
        for name in ("scores", "matrix"):
            array, expected_array = getattr(actual[stream], name), getattr(expected[stream], name)
            assert (array is None) == (expected_array is None)
            if array is not None:
                size = max(np.abs(expected_array).max(), 1e-3)
                assert np.isfinite(array).all() and np.abs(array - expected_array).max() <= tolerance * size, (
                    context,
                    stream,
                    name,
                )
        bases = [e[stream].base_value for e in (actual, expected)]
        assert bases[0] == bases[1] or (np.isfinite(bases).all() and abs(bases[0] - bases[1]) <= tolerance * 10), (
            context
        )
    gaps = [e.certificate.get("checks", {}) for e in (actual, expected)]
    assert gaps[0].keys() == gaps[1].keys() and all(np.isfinite([*gap.values()]).all() for gap in gaps), context


def assert_batch_equals_single(
    ex: clearhead.Explainer, inputs: list[dict[str, Any]], tolerance: float, **options: Any
) -> None:
    """Assert that every input has the same scores in a padded batch and alone."""
    methods = get_applicable_methods(ex)
    names = inputs[0].keys()
    batch = ex.explain(
        **{name: [single_input[name] for single_input in inputs] for name in names}, method=methods, **options
    )
    for i, single_input in enumerate(inputs):
        for method, e in ex.explain(**single_input, method=methods, **options).items():
            assert_explanations_close(batch[method][i], e, tolerance, (method, i))


def assert_steps_equal_single(explain: Callable[..., Any], methods: list[Method], count: int, tolerance: float) -> None:
    all_steps = explain(methods, None)
    assert count > 1 and methods
    for step in range(count):
        for method, single_step in explain(methods, GeneratedToken(step)).items():
            for stream in single_step.streams:
                scores, expected = all_steps[method][stream].matrix[step], single_step[stream].scores
                size = max(np.abs(expected).max(), 1e-3)
                assert np.abs(scores - expected).max() <= tolerance * size, (method, stream, step)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_decoder_batch_and_steps_equal_single(family: str) -> None:
    ex = decoders.explainer(family)
    tolerance = 1e-9 if family == "gpt2" else 1e-4
    methods = get_applicable_methods(ex)
    batch = ex.explain(decoders.PROMPTS, methods, answer=decoders.ANSWERS)
    for i, (prompt, answer) in enumerate(zip(decoders.PROMPTS, decoders.ANSWERS, strict=True)):
        for method, e in ex.explain(prompt, methods, answer=answer).items():
            assert_explanations_close(batch[method][i], e, tolerance, (method, i))
    prompt, answer = decoders.PROMPTS[1], decoders.ANSWERS[1]
    count = len(ex.explain(prompt, "random", answer=answer).steps)

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(prompt, methods, answer=answer, target=target)

    assert_steps_equal_single(explain, methods, count, tolerance)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoder_batch_and_steps_equal_single(family: str) -> None:
    ex = encoder_decoders.explainer(family)
    tolerance = 1e-9 if family == "bart" else 1e-4
    methods = get_applicable_methods(ex)
    sources, answers = encoder_decoders.SOURCES, encoder_decoders.ANSWERS
    batch = ex.explain(sources, methods, answer=answers)
    for i, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        for method, e in ex.explain(source, methods, answer=answer).items():
            assert_explanations_close(batch[method][i], e, tolerance, (method, i))

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(sources[0], methods, answer=answers[0], target=target)

    count = len(ex.explain(sources[0], "generic", answer=answers[0])["source"].steps)
    assert_steps_equal_single(explain, methods, count, tolerance)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2", "idefics3"])
def test_image_text_decoder_batch_and_steps_equal_single(kind: str) -> None:
    ex, tiny = vision_language_models.explainer(kind), vision_language_models
    methods, inputs = get_applicable_methods(ex), [tiny.inputs(kind, which) for which in range(3)]
    single = [ex.explain(single_input, methods, answer=CONTINUATION) for single_input in inputs]
    batch = ex.explain(inputs[::-1], methods, answer=CONTINUATION)
    for i, explanations in enumerate(single):
        for method, e in explanations.items():
            assert_explanations_close(batch[method][2 - i], e, 1e-4, (method, i))

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(inputs[0], methods, answer=CONTINUATION, target=target)

    assert_steps_equal_single(explain, methods, len(CONTINUATION), 1e-4)


@pytest.mark.parametrize("name", ["clip", "siglip2"])
def test_dual_encoder_batch_equals_single(name: str) -> None:
    pairs = zip(dual_models.TEXTS, dual_models.pictures(), strict=True)
    inputs = [{"text": text, "image": image} for text, image in pairs]
    assert_batch_equals_single(dual_models.explainer(name), inputs, 1e-4)


@pytest.mark.parametrize("name", ["lxmert", "visual_bert", "vilt", "blip"])
def test_joint_model_batch_equals_single(name: str) -> None:
    assert_batch_equals_single(joint_models.explainer(name), joint_models.inputs(name), 1e-4)
