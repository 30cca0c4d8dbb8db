"""Exponential moving average of a model's weights, which is evaluated and saved in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ExponentialMovingAverage:
    """Exponential moving average of a model's floating-point parameters and buffers.

    Attributes:
        model: The model.
        horizon: Number of updates over which the average extends.
        num_updates: Number of updates so far.
        tensors: The averaged tensors by name.

    Args:
        model: The model; only floating-point parameters and buffers are averaged.
        horizon: Number of updates over which the average extends.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = ExponentialMovingAverage(model, horizon=1)
        >>> _ = nn.init.constant_(model.weight, 3.0)
        >>> average.update()
        >>> float(average.tensors["weight"])
        3.0
    """

    def __init__(self, model: nn.Module, horizon: int = 500) -> None:
        self.model = model
        self.horizon = horizon
        self.num_updates = 0
        self.tensors = {name: tensor.detach().clone() for name, tensor in self._get_model_tensors()}

    def _get_model_tensors(self) -> list[tuple[str, Tensor]]:
        """List the floating-point parameters and buffers; integer buffers are not averaged."""
        return [(name, tensor) for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model. The horizon is short at first, so that the random start is forgotten."""
        self.num_updates += 1
        weight = 1.0 / min(self.horizon, 1 + self.num_updates // 10)
        torch._foreach_lerp_(list(self.tensors.values()), [tensor for _, tensor in self._get_model_tensors()], weight)

    @torch.no_grad()
    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Load a stored average into both the model and the average, to continue training.

        Args:
            tensors: The stored tensors by name.
        """
        self.model.load_state_dict(dict(tensors), strict=False)
        for name, tensor in self._get_model_tensors():
            self.tensors[name].copy_(tensor)

    @contextmanager
    def averaged_weights(self) -> Iterator[nn.Module]:
        """Use the averaged weights inside the block, with the model in evaluation mode.

        Yields:
            The model.
        """
        current = {name: tensor.detach().clone() for name, tensor in self._get_model_tensors()}
        was_training = self.model.training
        try:
            self.model.load_state_dict(self.tensors, strict=False)
            yield self.model.eval()
        finally:
            self.model.load_state_dict(current, strict=False)
            self.model.train(was_training)
