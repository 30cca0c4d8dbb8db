"""A running average of a model's weights: what is evaluated, kept and shipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Exponential moving average of a model's floating-point parameters and buffers.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = Average(model, horizon=1)
    >>> _ = nn.init.constant_(model.weight, 3.0)
    >>> average.update()
    >>> float(average.tensors["weight"])
    3.0
    """

    def __init__(self, model: nn.Module, horizon: int = 500) -> None:
        self.model = model
        self.horizon = horizon
        self.updates = 0
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._live()}

    def _live(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model. Early on the horizon is short, so the random start is forgotten."""
        self.updates += 1
        weight = 1.0 / min(self.horizon, 1 + self.updates // 10)
        torch._foreach_lerp_(list(self.tensors.values()), [tensor for _, tensor in self._live()], weight)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a stored average: both the model and the average become it."""
        self.model.load_state_dict(dict(tensors), strict=False)
        for name, tensor in self._live():
            self.tensors[name].copy_(tensor)

    @contextmanager
    def applied(self) -> Iterator[nn.Module]:
        """Inside the block the model carries the averaged weights and is in evaluation mode."""
        live = {name: tensor.detach().clone() for name, tensor in self._live()}
        was_training = self.model.training
        try:
            self.model.load_state_dict(self.tensors, strict=False)
            yield self.model.eval()
        finally:
            self.model.load_state_dict(live, strict=False)
            self.model.train(was_training)
