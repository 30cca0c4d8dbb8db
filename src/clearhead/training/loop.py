"""One training loop: a loss, some optimisers, a clock that says how far along we are, a running average."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.ema import Average


@dataclass
class Clock:
    """How far a run has come, counted in steps or, on a lent machine, in seconds.

    The first step costs no time: much of it is compilation.

    >>> clock = Clock(steps=4)
    >>> clock.tick(); clock.fraction
    0.25
    """

    steps: int | None = None
    seconds: float | None = None
    step: int = 0
    spent: float = 0.0
    _since: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"give either steps or seconds, not steps={self.steps}, seconds={self.seconds}")

    def tick(self) -> None:
        now = time.monotonic()
        self.spent += 0.0 if self._since is None else now - self._since
        self._since = now
        self.step += 1

    @property
    def fraction(self) -> float:
        done = self.step / self.steps if self.steps is not None else self.spent / (self.seconds or 1.0)
        return min(done, 1.0)


def ramp(fraction: float, warmup: float = 0.05) -> float:
    """The share of the peak learning rate: up linearly during `warmup`, then linearly down to zero.

    >>> ramp(0.05), ramp(1.0)
    (1.0, 0.0)
    """
    return fraction / warmup if fraction < warmup else (1.0 - fraction) / (1.0 - warmup)


def depth_groups(
    model: nn.Module, depth_of: Callable[[str], int], lr: float, decay: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups whose learning rate shrinks by `decay` for each step of depth below the top (depth 0).

    Vectors (biases, norms) get no weight decay: pulling them to zero does not regularise anything.
    """
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((depth_of(name), parameter.ndim > 1), []).append(parameter)
    return [
        {"params": parameters, "lr": lr * decay**depth, "weight_decay": weight_decay if is_matrix else 0.0}
        for (depth, is_matrix), parameters in groups.items()
    ]


def train(
    loss_of: Callable[[], Tensor],
    optimisers: Sequence[torch.optim.Optimizer],
    clock: Clock,
    average: Average,
    *,
    warmup: float = 0.05,
    clip: float | None = None,
    report_every: int = 100,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60.0,
    name: str = "train",
    stored: torch.dtype | None = torch.float16,
    progress: Callable[[Clock], None] | None = None,
) -> None:
    """Minimise `loss_of()` until the clock runs out. With a checkpoint path, a run that was cut goes on where it was.

    Only the averaged weights are stored (as `stored`), not the optimisers' state: small enough to travel between
    machines. `progress` is told of every step, and then nothing is printed.
    """
    say = _print if progress is None else _nothing
    if checkpoint is not None and checkpoint.exists():
        tensors, facts = load_checkpoint(checkpoint)
        average.load(tensors)
        clock.step, clock.spent = facts["step"], facts["spent"]
        say(f"{name}: going on from step {clock.step}")
    peaks = [[group["lr"] for group in optimiser.param_groups] for optimiser in optimisers]
    stored_at = clock.spent
    while clock.fraction < 1.0:
        share = ramp(clock.fraction, warmup)
        for optimiser, rates in zip(optimisers, peaks, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * share
        loss = loss_of()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(average.model.parameters(), clip)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        average.update()
        clock.tick()
        if clock.step % report_every == 0:
            # .item() waits for the device: without it the clock would run ahead of the work
            say(f"{name}: step {clock.step} {clock.spent:.0f} s {clock.fraction:.0%} loss {loss.item():.4f}")
        if progress is not None:
            progress(clock)
        if checkpoint is not None and clock.spent - stored_at > checkpoint_seconds:
            save_checkpoint(checkpoint, average.tensors, {"step": clock.step, "spent": clock.spent}, stored)
            stored_at = clock.spent
    say(f"{name}: {clock.step} steps in {clock.spent:.0f} s")
    if checkpoint is not None:
        save_checkpoint(checkpoint, average.tensors, {"step": clock.step, "spent": clock.spent}, stored)


def _print(line: str) -> None:
    print(line, flush=True)


def _nothing(line: str) -> None:
    pass
