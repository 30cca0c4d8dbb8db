"""Check (j): batch equals single, and methods that share a pass do not affect each other."""

import numpy as np
import pytest

import clearhead
from clearhead.methods import METHOD_REGISTRY, PassType
from tests import models
from tests.methods import replica_comparison

#: Every method with different settings, so that a change of a shared call by one method would show in another.
METHODS = [
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


def test_all_single_pass_methods_are_covered() -> None:
    tape_methods = {name for name, cls in METHOD_REGISTRY.items() if cls.declaration.pass_type is PassType.TAPE}
    assert {method.name for method in METHODS} == tape_methods


@pytest.mark.parametrize("subject", ["bert/classify", "deberta/mask", "dinov2/image"])
def test_batch_equals_single(subject: str) -> None:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)
    batch = ex.explain(raw, METHODS)
    for method in METHODS:
        for inputs, batched in zip(raw, batch[str(method)], strict=True):
            single = ex.explain(inputs, method)
            assert replica_comparison.gap(batched.scores, single.scores) < 1e-11, str(method)
            for name in ("matrix", "per_layer"):
                if getattr(single, name) is not None:
                    assert replica_comparison.gap(getattr(batched, name), getattr(single, name)) < 1e-11, (
                        str(method),
                        name,
                    )


def test_order_of_inputs_does_not_change_scores() -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    forward, reversed_order = ex.explain(raw, METHODS), ex.explain(raw[::-1], METHODS)
    for method in map(str, METHODS):
        for first, second in zip(forward[method], reversed_order[method][::-1], strict=True):
            np.testing.assert_allclose(first.scores, second.scores, rtol=1e-9, atol=1e-14, err_msg=method)
