"""Sanity: does an explanation move when it must, and stay when it must?

Parameter randomisation: from the head down, blocks get weights drawn anew (normal, with the mean and spread that each
tensor had; one block at a time with `cascade=False`), and the explanation of the same class is compared with the
original: Spearman's rho, and the structural similarity of heat maps. An explanation that stays alike does not depend
on what was learned. The reference is `random`, drawn anew at each step.

Label randomisation: the same model trained on permuted labels explains the same class of the same input; what both show
alike was not learned from the labels.

Input invariance: a constant is added to all pixels and taken back in the bias of the patches' projection. The model
computes what it did before; the explanation must not move.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

import clearhead
from clearhead.adapters.base import How
from clearhead.bench.chunk_explanations import given, method_of, seed_of
from clearhead.bench.data import Example
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, register
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer


def blocks(model: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """The parameters by block, from the head down to the embeddings; shared ones go with the lowest that has them."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    order: dict[str, list[nn.Parameter]] = {}
    behind = "embeddings"
    for name, parameter in model.named_parameters():
        home = next((one for one in outer if name.startswith(f"{one}.")), None)
        if home is None:
            order.setdefault(behind, []).append(parameter)
        else:
            number = name.removeprefix(f"{home}.").split(".")[0]
            order.setdefault(f"{home}.{number}", []).append(parameter)
            behind = "head"
    return list(reversed(order.items()))


@contextmanager
def drawn_anew(model: nn.Module, parameters: Sequence[nn.Parameter], seed: int) -> Iterator[None]:
    """These weights drawn anew inside the block, and as they were after it."""
    before = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in parameters:
                values = parameter.detach().double()
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                spread = values.std() if values.numel() > 1 else values.new_zeros(())
                parameter.copy_((values.mean() + spread * noise.to(values.device)).to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


@register("randomisation")
@dataclass(frozen=True)
class Randomisation(Protocol):
    """Parameter randomisation; `steps` at most so many blocks, from the head down (None: all)."""

    headline: ClassVar[tuple[str, ...]] = ("rho",)

    explained: Explained = "predicted"
    cascade: bool = True
    steps: int | None = None

    def smaller(self, figure: str, part: str) -> bool:
        return True

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        # the class of the trained model, whatever the randomised one predicts
        targets = _held(examples, next(iter(explanations.values())))
        every = blocks(ex.subject.model)[: self.steps]
        found: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        for step in range(len(every)):
            changed = [
                parameter for _, own in (every[: step + 1] if self.cascade else [every[step]]) for parameter in own
            ]
            seed = _seed(self.seed, step if not self.cascade else 0)
            with drawn_anew(ex.subject.model, changed, seed):
                again = self._explained(ex, examples, explanations, targets, step)
            for method, own in explanations.items():
                for place, (one, other) in enumerate(zip(own, again[method], strict=True)):
                    for stream, part in one.parts.items():
                        if len(part.units.drop_special()) > 1:
                            found.setdefault((method, place, stream), []).append(alike(part, other[stream]))
        return [
            Measurement(examples[place].id, method, stream, _means(pairs), _curves(pairs))
            for (method, place, stream), pairs in found.items()
        ]

    def _explained(
        self, ex: "Explainer", examples: Sequence[Example], explanations: Explanations, targets: list[Any], step: int
    ) -> dict[str, Any]:
        methods, seed = [method_of(name) for name in explanations], seed_of(explanations)
        made: dict[str, Any] = ex.explain(**given(examples), method=methods, target=targets, seed=seed)
        if "random" in explanations:  # it knows no weights: drawn anew, it shows what chance gives
            made |= ex.explain(**given(examples), method=["random"], target=targets, seed=seed + self.seed + step + 1)
        return made


def _seed(*key: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")


def _held(examples: Sequence[Example], explanations: Sequence[Any]) -> list[Any]:
    """What was explained of each, by number: not whatever a changed model would predict."""
    return [
        example.target if example.target is not None else int(one.target["index"])
        for example, one in zip(examples, explanations, strict=True)
    ]


def alike(one: Any, other: Any) -> tuple[float, float]:
    """Spearman's rho of the scores (0 where one is flat), and the structural similarity of heat maps (else NaN)."""
    from scipy.stats import spearmanr

    kept = one.units.drop_special()
    a, b = (np.nan_to_num(part.scores[kept].astype(float)) for part in (one, other))
    rho = float(spearmanr(a, b).statistic) if np.ptp(a) > 0 and np.ptp(b) > 0 else 0.0
    similar = structural_similarity(one.heat_map(), other.heat_map()) if one.units.grid is not None else float("nan")
    return rho, similar


def structural_similarity(
    one: Float[np.ndarray, "row column"], other: Float[np.ndarray, "row column"], window: int = 5
) -> float:
    """SSIM of two maps, each scaled to 0 … 1: the mean over all windows (Wang et al. 2004, uniform windows).

    >>> round(structural_similarity(np.eye(6), np.eye(6)), 6)
    1.0
    """
    a, b = (_scaled(np.nan_to_num(part)) for part in (one, other))
    size = min(window, *a.shape)
    views = [np.lib.stride_tricks.sliding_window_view(part, (size, size)) for part in (a, b)]
    means = [part.mean((2, 3)) for part in views]
    variances = [part.var((2, 3), ddof=1) if size > 1 else 0 * part.mean((2, 3)) for part in views]
    count = size * size
    both = ((views[0] * views[1]).mean((2, 3)) - means[0] * means[1]) * count / max(1, count - 1)
    small, little = 0.01**2, 0.03**2
    above = (2 * means[0] * means[1] + small) * (2 * both + little)
    below = (means[0] ** 2 + means[1] ** 2 + small) * (variances[0] + variances[1] + little)
    return float((above / below).mean())


def _scaled(part: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "row column"]:
    span = part.max() - part.min()
    return np.asarray((part - part.min()) / span if span else np.zeros_like(part), dtype=float)


def _means(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    rho, similar = zip(*pairs, strict=True)
    figures = {"rho": float(np.mean(rho)), "absolute rho": float(np.mean(np.abs(rho))), "last rho": float(rho[-1])}
    return figures | ({} if np.isnan(similar).any() else {"ssim": float(np.mean(similar))})


def _curves(pairs: Sequence[tuple[float, float]]) -> dict[str, tuple[float, ...]]:
    rho, similar = zip(*pairs, strict=True)
    return {"rho": tuple(rho)} | ({} if np.isnan(similar).any() else {"ssim": tuple(similar)})


@register("label-randomisation")
@dataclass(frozen=True)
class LabelRandomisation(Protocol):
    """`other` names the model that was trained on permuted labels: as `clearhead.load` takes it."""

    headline: ClassVar[tuple[str, ...]] = ("rho",)

    explained: Explained = "predicted"
    other: str = ""

    def check(self) -> None:
        super().check()
        if not self.other:
            raise InputError("label-randomisation needs the model trained on permuted labels: other=NAME")

    def smaller(self, figure: str, part: str) -> bool:
        return True

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        self.check()
        second = clearhead.load(self.other)
        targets = _held(examples, next(iter(explanations.values())))
        methods = [method_of(name) for name in explanations]
        again = second.explain(**given(examples), method=methods, target=targets, seed=seed_of(explanations))
        made = []
        for method, own in explanations.items():
            for example, one, another in zip(examples, own, again[method], strict=True):
                for stream, part in one.parts.items():
                    if len(part.units.drop_special()) > 1:
                        pairs = [alike(part, another[stream])]
                        made.append(Measurement(example.id, method, stream, _means(pairs)))
        return made


@register("input-invariance")
@dataclass(frozen=True)
class InputInvariance(Protocol):
    """`moved` is the largest change of a score, as a share of the largest score; 0 is right."""

    headline: ClassVar[tuple[str, ...]] = ("moved",)

    explained: Explained = "predicted"
    constant: float = 0.5

    def smaller(self, figure: str, part: str) -> bool:
        return figure == "moved"

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        subject = ex.subject
        samples = [subject.samples(example.input, How())[0] for example in examples]
        targets = _held(examples, next(iter(explanations.values())))
        made = []
        methods, seed = [method_of(name) for name in explanations], seed_of(explanations)
        with shifted(subject.model, self.constant):
            again = [
                ex.explain(
                    {"pixel_values": sample.inputs["pixel_values"][None] + self.constant}, methods, target, seed=seed
                )
                for sample, target in zip(samples, targets, strict=True)
            ]
        for method, own in explanations.items():
            for example, one, other in zip(examples, own, again, strict=True):
                a, b = (np.nan_to_num(part.scores.astype(float)) for part in (one, other[method]))
                largest = float(np.abs(a).max()) or 1.0
                figures = {"moved": float(np.abs(a - b).max() / largest), "rho": alike(one, other[method])[0]}
                made.append(Measurement(example.id, method, one.stream, figures))
        return made


@contextmanager
def shifted(model: nn.Module, constant: float) -> Iterator[None]:
    """The bias of the first projection of pixels takes a constant back that is added to all of them."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    padding = None if first is None else first.padding
    if first is None or first.bias is None or padding not in ((0, 0), "valid"):
        raise InputError("input-invariance is for pictures whose patches are projected with a bias and no padding")
    before = first.bias.detach().clone()
    try:
        with torch.no_grad():
            first.bias -= constant * first.weight.sum((1, 2, 3))
        yield
    finally:
        with torch.no_grad():
            first.bias.copy_(before)
