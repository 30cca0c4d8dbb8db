"""Half precision: tensors are handed over in float32, sums run in float32, and the picture stays the same."""

import numpy as np
import pytest
import torch

from clearhead.recording.tape import Ask
from tests import models

SUBJECTS = ["bert/classify", "roberta/mask", "deberta/classify", "vit/image"]
#: Far less wild than the tests' usual weights: what half precision does to those says nothing about recording.
GENTLE = {"initializer_range": 0.1}


def half(subject, dtype):
    """The same weights, rounded."""
    wide = models.explainer(subject, torch.float32, **GENTLE)
    narrow = models.explainer(subject, torch.float32, **GENTLE)
    narrow.subject.model.to(dtype)
    with torch.no_grad():
        for mine, yours in zip(wide.subject.model.parameters(), narrow.subject.model.parameters(), strict=True):
            mine.copy_(yours.float())
    return wide, narrow


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_recorded_in_float32(subject, dtype):
    _, ex = half(subject, dtype)
    returned = subject.startswith("deberta")
    asks = [ask for ask in Ask.__args__ if not (returned and ask in ("values", "output_projection"))]
    tape = ex.record(models.inputs(subject), asks)
    assert ex.subject.model.dtype == dtype
    for call in tape.calls:
        assert {part.dtype for _, part in call.tensors()} == {torch.float32}
    (inputs,), (gradient,) = tape.inputs.values(), tape.input_gradient.values()
    assert inputs.dtype == gradient.dtype == tape.value.dtype == torch.float32
    assert ex.explain(models.inputs(subject)[0]).certificate["dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 0.12), (torch.float16, 0.02)], ids=str)
def test_scores_are_near_those_of_float32(subject, dtype, within):
    wide, narrow = half(subject, dtype)
    label = wide.explain(models.inputs(subject)[0], method="random").target["index"]
    methods = ["generic", "rollout", "grad-sam", "attention"]
    exact = wide.explain(models.inputs(subject), method=methods, target=label)
    rough = narrow.explain(models.inputs(subject), method=methods, target=label)
    for method in methods:
        for one, other in zip(rough[method], exact[method], strict=True):
            assert one.scores.dtype == np.float32
            gap = np.abs(one.scores - other.scores).max() / np.abs(other.scores).max()
            assert 0 < gap <= within, f"{method}: {gap:.3f}"
