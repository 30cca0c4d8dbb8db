"""Methods on paths where there is more than one sequence and one target: decoders, encoder–decoders, two streams."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clearhead
from clearhead import GeneratedToken, Method
from tests import dual_models, joint_models, vision_language_models
from tests.adapters import test_decoder as decoders
from tests.adapters import test_encoder_decoder as encoder_decoders

#: Few steps: the laws hold for any number of them.
METHODS = [
    Method("integrated-gradients", steps=3),
    Method("gradient-shap", samples=2, noise=0.1),
    Method("smoothgrad", samples=2),
    Method("layer-conductance", steps=2),
    Method("beyond-intuition-head", steps=2),
    Method("beyond-intuition-token", steps=2),
    Method("tam", steps=2),
]
#: Words and pixels are there wherever these are asked about.
ON_INPUTS = {"integrated-gradients", "gradient-shap", "smoothgrad"}
ANSWER = (40, 50, 60)


def applying(ex: clearhead.Explainer) -> list[Method]:
    lines = {line.name: line for line in ex.methods()}
    for name in ON_INPUTS:
        assert lines[name].applies, lines[name].why_not
    for method in METHODS:
        line = lines[method.name]
        assert line.applies or len(line.why_not.split()) > 8, f"not a reason: {line.why_not!r}"
    return [method for method in METHODS if lines[method.name].applies]


def alike(one: Any, other: Any, within: float, what: Any) -> None:
    assert one.streams == other.streams
    for stream in one.streams:
        for part in ("scores", "matrix"):
            mine, yours = getattr(one[stream], part), getattr(other[stream], part)
            assert (mine is None) == (yours is None)
            if mine is not None:
                size = max(np.abs(yours).max(), 1e-3)
                assert np.isfinite(mine).all() and np.abs(mine - yours).max() <= within * size, (what, stream, part)
        bases = [e[stream].base_value for e in (one, other)]
        assert bases[0] == bases[1] or (np.isfinite(bases).all() and abs(bases[0] - bases[1]) <= within * 10), what
    gaps = [e.certificate.get("checks", {}) for e in (one, other)]
    assert gaps[0].keys() == gaps[1].keys() and all(np.isfinite([*gap.values()]).all() for gap in gaps), what


def together_and_alone(ex: clearhead.Explainer, many: list[dict[str, Any]], within: float, **how: Any) -> None:
    """One batch, one at a time, and one at a time with a longer neighbour are the same."""
    methods = applying(ex)
    names = many[0].keys()
    batch = ex.explain(**{name: [one[name] for one in many] for name in names}, method=methods, **how)
    for i, one in enumerate(many):
        for method, e in ex.explain(**one, method=methods, **how).items():
            alike(batch[method][i], e, within, (method, i))


def steps_together_and_alone(explain: Callable[..., Any], methods: list[Method], count: int, within: float) -> None:
    together = explain(methods, None)
    assert count > 1 and methods
    for step in range(count):
        for method, alone in explain(methods, GeneratedToken(step)).items():
            for stream in alone.streams:
                found, expected = together[method][stream].matrix[step], alone[stream].scores
                size = max(np.abs(expected).max(), 1e-3)
                assert np.abs(found - expected).max() <= within * size, (method, stream, step)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2"])
def test_decoders(family: str) -> None:
    ex = decoders.explainer(family)
    within = 1e-9 if family == "gpt2" else 1e-4
    methods = applying(ex)
    together = ex.explain(decoders.PROMPTS, methods, answer=decoders.ANSWERS)
    for i, (prompt, answer) in enumerate(zip(decoders.PROMPTS, decoders.ANSWERS, strict=True)):
        for method, e in ex.explain(prompt, methods, answer=answer).items():
            alike(together[method][i], e, within, (method, i))
    prompt, answer = decoders.PROMPTS[1], decoders.ANSWERS[1]
    count = len(ex.explain(prompt, "random", answer=answer).steps)

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(prompt, methods, answer=answer, target=target)

    steps_together_and_alone(explain, methods, count, within)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoders(family: str) -> None:
    ex = encoder_decoders.explainer(family)
    within = 1e-9 if family == "bart" else 1e-4
    methods = applying(ex)
    sources, answers = encoder_decoders.SOURCES, encoder_decoders.ANSWERS
    together = ex.explain(sources, methods, answer=answers)
    for i, (source, answer) in enumerate(zip(sources, answers, strict=True)):
        for method, e in ex.explain(source, methods, answer=answer).items():
            alike(together[method][i], e, within, (method, i))

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(sources[0], methods, answer=answers[0], target=target)

    count = len(ex.explain(sources[0], "generic", answer=answers[0])["source"].steps)
    steps_together_and_alone(explain, methods, count, within)


@pytest.mark.parametrize("kind", ["llava", "gemma3", "qwen2", "idefics3"])
def test_image_text_decoders(kind: str) -> None:
    ex, tiny = vision_language_models.explainer(kind), vision_language_models
    methods, many = applying(ex), [tiny.inputs(kind, which) for which in range(3)]
    single = [ex.explain(one, methods, answer=ANSWER) for one in many]
    batch = ex.explain(many[::-1], methods, answer=ANSWER)
    for i, one in enumerate(single):
        for method, e in one.items():
            alike(batch[method][2 - i], e, 1e-4, (method, i))

    def explain(methods: Any, target: Any) -> Any:
        return ex.explain(many[0], methods, answer=ANSWER, target=target)

    steps_together_and_alone(explain, methods, len(ANSWER), 1e-4)


@pytest.mark.parametrize("name", ["clip", "siglip2"])
def test_dual_encoders(name: str) -> None:
    pairs = zip(dual_models.TEXTS, dual_models.pictures(), strict=True)
    many = [{"text": text, "image": picture} for text, picture in pairs]
    together_and_alone(dual_models.explainer(name), many, 1e-4)


@pytest.mark.parametrize("name", ["lxmert", "visual_bert", "vilt", "blip"])
def test_texts_beside_pictures(name: str) -> None:
    together_and_alone(joint_models.explainer(name), joint_models.inputs(name), 1e-4)
