"""Detection of detached gradients; straight-through estimators do not count."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.capture.checks.detached_gradients import detaches_gradients

CASES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing is detached": (lambda x: x.square(), False),
    "a factor is detached": (lambda x: x * x.detach(), True),
    "all of it is detached": (lambda x: x.detach().square() + 0 * x, True),
    "rounded, straight through": (lambda x: x + ((10 * x).round() / 10 - x).detach(), False),
}


@pytest.mark.parametrize("case", CASES)
def test_detached_gradients_are_detected_but_straight_through_is_not(case: str) -> None:
    function, is_detached = CASES[case]

    def forward(inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        x = inputs["x"].clone().requires_grad_()
        return function(x), [], {"x": x}

    assert detaches_gradients(forward, {"x": torch.linspace(0.3, 1.7, 5)}, lambda output: output) == is_detached
