"""Gradients that a model cuts off, and those that it passes over a step on purpose."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from clearhead.capture.checks.detached_gradients import detaches_gradients

WAYS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "nothing is detached": (lambda x: x.square(), False),
    "a factor is detached": (lambda x: x * x.detach(), True),
    "all of it is detached": (lambda x: x.detach().square() + 0 * x, True),
    "rounded, and passed over (straight through)": (lambda x: x + ((10 * x).round() / 10 - x).detach(), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_cut_off_is_made_whole_and_what_is_passed_over_stays(way: str) -> None:
    made, cut = WAYS[way]

    def forward(inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        x = inputs["x"].clone().requires_grad_()
        return made(x), [], {"x": x}

    assert detaches_gradients(forward, {"x": torch.linspace(0.3, 1.7, 5)}, lambda output: output) == cut
