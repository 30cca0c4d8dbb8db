"""Check (j): a batch of one equals each element of a larger one; methods sharing a pass do not disturb each other."""

import numpy as np
import pytest

import clearhead
from clearhead.methods import METHOD_REGISTRY
from tests import models
from tests.methods import replica_comparison

#: Every method with other settings than its neighbours, so that what one does to a shared call would show in another.
TOGETHER = [
    clearhead.Method("attention", layers=(0, 2), heads=[2]),
    clearhead.Method("rollout", layers=(1, None)),
    clearhead.Method("flow", heads=[1, 2]),
    clearhead.Method("attention-gradcam", rows="all"),
    clearhead.Method("attention-gradient", heads=[1]),
    clearhead.Method("attention-x-gradient", layers=(0, 2)),
    clearhead.Method("generic"),
    clearhead.Method("generic", fusion="separate-means"),
    clearhead.Method("generic", layers=(0, 1), rows="all"),
    clearhead.Method("grad-sam", heads=[0, 3]),
    clearhead.Method("grad-sam", received=True),
    clearhead.Method("cat", layers=(-2, None)),
    clearhead.Method("attcat", weights="row"),
    clearhead.Method("saliency", reduce="abs"),
    clearhead.Method("input-x-gradient"),
    clearhead.Method("random"),
    clearhead.Method("position"),
]


def test_all_methods_are_here() -> None:
    of_one_tape = {name for name, cls in METHOD_REGISTRY.items() if cls.declaration.pass_type == "tape"}
    assert {method.name for method in TOGETHER} == of_one_tape


@pytest.mark.parametrize("subject", ["bert/classify", "deberta/mask", "dinov2/image"])
def test_one_equals_each_of_many(subject: str) -> None:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)
    many = ex.explain(raw, TOGETHER)
    for method in TOGETHER:
        for inputs, of_many in zip(raw, many[str(method)], strict=True):
            alone = ex.explain(inputs, method)
            assert replica_comparison.gap(of_many.scores, alone.scores) < 1e-11, str(method)
            for part in ("matrix", "per_layer"):
                if getattr(alone, part) is not None:
                    assert replica_comparison.gap(getattr(of_many, part), getattr(alone, part)) < 1e-11, (
                        str(method),
                        part,
                    )


def test_order_does_not_matter() -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    there, back = ex.explain(raw, TOGETHER), ex.explain(raw[::-1], TOGETHER)
    for method in map(str, TOGETHER):
        for one, other in zip(there[method], back[method][::-1], strict=True):
            np.testing.assert_allclose(one.scores, other.scores, rtol=1e-9, atol=1e-14, err_msg=method)
