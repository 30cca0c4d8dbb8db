"""A generic training loop with a step or time budget, weight averaging and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.ema import ExponentialMovingAverage


@dataclass
class TrainingBudget:
    """Progress of a run towards a budget of steps or, on rented machines, of seconds.

    The first step costs no time, because much of it is compilation.

    Attributes:
        total_steps: The budget in steps; give either this or `total_seconds`.
        total_seconds: The budget in seconds.
        step: Number of completed steps.
        elapsed_seconds: Time since the first step.

    Example:
        >>> budget = TrainingBudget(total_steps=4)
        >>> budget.record_step()
        >>> budget.fraction
        0.25
    """

    total_steps: int | None = None
    total_seconds: float | None = None
    step: int = 0
    elapsed_seconds: float = 0.0
    _last_tick: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.total_steps is None) == (self.total_seconds is None):
            raise ValueError(
                f"pass either total_steps or total_seconds, not total_steps={self.total_steps}, "
                f"total_seconds={self.total_seconds}"
            )

    def record_step(self) -> None:
        """Count a completed step and its time."""
        tick = time.monotonic()
        if self._last_tick is not None:
            self.elapsed_seconds += tick - self._last_tick
        self._last_tick = tick
        self.step += 1

    @property
    def fraction(self) -> float:
        """The completed fraction of the budget, from 0 to 1 (never above)."""
        if self.total_steps is not None:
            return min(self.step / self.total_steps, 1.0)
        return min(self.elapsed_seconds / (self.total_seconds or 1.0), 1.0)


def compute_warmup_decay(fraction: float, warmup_fraction: float = 0.05) -> float:
    """Compute the learning-rate factor at a point of the run: linear warm-up, then linear decay to zero.

    Args:
        fraction: Completed fraction of the run.
        warmup_fraction: The fraction of the run for warm-up.

    Returns:
        The factor of the peak learning rate.

    Example:
        >>> compute_warmup_decay(0.05), compute_warmup_decay(1.0)
        (1.0, 0.0)
    """
    if fraction < warmup_fraction:
        return fraction / warmup_fraction
    return (1.0 - fraction) / (1.0 - warmup_fraction)


def build_layerwise_lr_groups(
    model: nn.Module, get_depth: Callable[[str], int], lr: float, decay: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Build optimiser parameter groups with layer-wise learning-rate decay.

    Vectors (biases, norms) get no weight decay, because shrinking them does not regularise.

    Args:
        model: The model.
        get_depth: Returns the depth of a parameter by its name, 0 for the top.
        lr: Learning rate of depth 0.
        decay: Factor of the learning rate per depth.
        weight_decay: Weight decay of matrices.

    Returns:
        The groups.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((get_depth(name), parameter.ndim > 1), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * decay**depth, "weight_decay": weight_decay if is_matrix else 0.0}
        for (depth, is_matrix), parameters in groups.items()
    ]


def train(
    compute_loss: Callable[[], Tensor],
    optimisers: Sequence[torch.optim.Optimizer],
    budget: TrainingBudget,
    weight_average: ExponentialMovingAverage,
    *,
    warmup_fraction: float = 0.05,
    max_grad_norm: float | None = None,
    report_every: int = 100,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    name: str = "train",
    checkpoint_dtype: torch.dtype | None = torch.float16,
    progress: Callable[[TrainingBudget], None] | None = None,
) -> None:
    """Minimise a loss until the budget is used up.

    Checkpoints hold only the averaged weights, not the state of the optimisers, so that they are small enough to be
    moved between machines.

    Args:
        compute_loss: Computes the loss of the next batch.
        optimisers: The optimisers; their learning rates are the peaks of the schedule.
        budget: The budget in steps or seconds.
        weight_average: The moving average of the model's weights.
        warmup_fraction: The fraction of the run for warm-up.
        max_grad_norm: Gradients are clipped to this norm. Default: no clipping.
        report_every: Number of steps between printed lines.
        checkpoint: File for checkpoints. If it exists, the run resumes from it.
        checkpoint_seconds: Seconds between checkpoints.
        name: Name of the run in printed lines.
        checkpoint_dtype: The dtype of stored weights.
        progress: Called after every step, in place of printing.
    """
    report = _print_line if progress is None else _ignore_line
    if checkpoint is not None and checkpoint.exists():
        tensors, metadata = load_checkpoint(checkpoint)
        weight_average.load_weights(tensors)
        budget.step = metadata["step"]
        budget.elapsed_seconds = metadata["spent"]
        report(f"{name}: resuming from step {budget.step}")
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    last_checkpoint = budget.elapsed_seconds
    while budget.fraction < 1.0:
        lr_factor = compute_warmup_decay(budget.fraction, warmup_fraction)
        for optimiser, rates in zip(optimisers, peaks, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * lr_factor
        loss = compute_loss()
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(weight_average.model.parameters(), max_grad_norm)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        weight_average.update()
        budget.record_step()
        if budget.step % report_every == 0:
            # .item() waits for the device: without it, Python would run ahead and the measured time be too short
            elapsed = f"{budget.elapsed_seconds:.0f} s {budget.fraction:.0%}"
            report(f"{name}: step {budget.step} {elapsed} loss {loss.item():.4f}")
        if progress is not None:
            progress(budget)
        if checkpoint is not None and budget.elapsed_seconds - last_checkpoint > checkpoint_seconds:
            _save_progress(checkpoint, weight_average, budget, checkpoint_dtype)
            last_checkpoint = budget.elapsed_seconds
    report(f"{name}: {budget.step} steps in {budget.elapsed_seconds:.0f} s")
    if checkpoint is not None:
        _save_progress(checkpoint, weight_average, budget, checkpoint_dtype)


def _save_progress(
    checkpoint: Path, weight_average: ExponentialMovingAverage, budget: TrainingBudget, dtype: torch.dtype | None
) -> None:
    """Save the averaged weights, with the steps and seconds that are spent, to resume from."""
    metadata = {"step": budget.step, "spent": budget.elapsed_seconds}
    save_checkpoint(checkpoint, weight_average.tensors, metadata, dtype)


def _print_line(line: str) -> None:
    """Print a line and flush it, so that logs of long runs are up to date."""
    print(line, flush=True)


def _ignore_line(line: str) -> None:
    """Print nothing; the caller's `progress` reports instead."""
