"""Sanity checks: does an explanation change when the model changes, and stay when it must?

Parameter randomisation: from the head downwards, the weights of one block after the other are re-initialised (normally
distributed, with each tensor's mean and standard deviation; one block at a time with `cascade=False`), and the
explanation of the same class is compared with the original: Spearman's rho, and the structural similarity (SSIM) of
heat maps. An explanation that stays similar does not depend on the learned weights. The control is `random`, redrawn at
each step.

Label randomisation: the same model trained on permuted labels explains the same class of the same input; whatever both
explanations share was not learned from the labels.

Input invariance: a constant is added to all pixels and subtracted again in the bias of the patch projection. The model
computes the same function, so the explanation must not change.
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
from clearhead.adapters.base import InputOptions
from clearhead.bench.chunk_explanations import build_explain_kwargs, get_explanation_seed, parse_method
from clearhead.bench.data import Example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    register_protocol,
)
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer


def list_parameter_blocks(model: nn.Module) -> list[tuple[str, list[nn.Parameter]]]:
    """List the parameters by block, from the head down to the embeddings; shared ones belong to the lowest block."""
    layer_lists = [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    outer_lists = [name for name in layer_lists if not any(name.startswith(f"{outer}.") for outer in layer_lists)]
    blocks: dict[str, list[nn.Parameter]] = {}
    block_outside_lists = "embeddings"
    for name, parameter in model.named_parameters():
        layer_list = next((prefix for prefix in outer_lists if name.startswith(f"{prefix}.")), None)
        if layer_list is None:
            blocks.setdefault(block_outside_lists, []).append(parameter)
        else:
            layer_index = name.removeprefix(f"{layer_list}.").split(".")[0]
            blocks.setdefault(f"{layer_list}.{layer_index}", []).append(parameter)
            block_outside_lists = "head"
    return list(reversed(blocks.items()))


@contextmanager
def reinitialised_parameters(model: nn.Module, parameters: Sequence[nn.Parameter], seed: int) -> Iterator[None]:
    """Context manager that re-initialises these parameters and restores them on exit."""
    originals = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in parameters:
                values = parameter.detach().double()
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                std = values.std() if values.numel() > 1 else values.new_zeros(())
                parameter.copy_((values.mean() + std * noise.to(values.device)).to(parameter))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_(original)


@register_protocol("randomisation")
@dataclass(frozen=True)
class ParameterRandomisation(BenchmarkProtocol):
    """Similarity of explanations before and after parameter randomisation.

    Attributes:
        cascade: Whether blocks stay random once they were randomised; otherwise one block at a time is random.
        steps: Maximum number of blocks; None for all.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("rho",)

    explained: ExplainedClass = "predicted"
    cascade: bool = True
    steps: int | None = None

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return True: the explanation of a randomised model should differ."""
        return True

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Measure the similarity after each randomised block, on each stream with at least two content units."""
        # the class predicted by the trained model, whatever the randomised model predicts
        targets = _fix_targets(examples, next(iter(explanations.values())))
        blocks = list_parameter_blocks(explainer.adapter.model)[: self.steps]
        similarities: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        for step in range(len(blocks)):
            randomised_blocks = [blocks[step]]
            seed_key = step
            if self.cascade:
                randomised_blocks = blocks[: step + 1]
                seed_key = 0
            parameters = [parameter for _, block_parameters in randomised_blocks for parameter in block_parameters]
            with reinitialised_parameters(explainer.adapter.model, parameters, _derive_seed(self.seed, seed_key)):
                new_explanations = self._explain_randomised(explainer, examples, explanations, targets, step)
            for method, method_explanations in explanations.items():
                pairs = zip(method_explanations, new_explanations[method], strict=True)
                for index, (original, randomised) in enumerate(pairs):
                    for stream, stream_explanation in original.by_stream.items():
                        if len(stream_explanation.units.content_indices()) > 1:
                            similarities.setdefault((method, index, stream), []).append(
                                compute_explanation_similarity(stream_explanation, randomised[stream])
                            )
        return [
            Measurement(
                examples[index].id, method, stream, _average_similarities(pairs), _build_similarity_curves(pairs)
            )
            for (method, index, stream), pairs in similarities.items()
        ]

    def _explain_randomised(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        targets: list[Any],
        step: int,
    ) -> dict[str, Any]:
        """Explain with the current weights and the old seed; `random` is redrawn, as the chance level."""
        explain_kwargs = build_explain_kwargs(examples)
        methods = [parse_method(name) for name in explanations]
        seed = get_explanation_seed(explanations)
        new_explanations: dict[str, Any] = explainer.explain(
            **explain_kwargs, method=methods, target=targets, seed=seed
        )
        if "random" in explanations:  # it does not depend on weights: redrawn, it gives the chance level
            random_seed = seed + self.seed + step + 1
            new_explanations |= explainer.explain(**explain_kwargs, method=["random"], target=targets, seed=random_seed)
        return new_explanations


def _derive_seed(*key: Any) -> int:
    """Derive a seed of 56 bits from the SHA-256 hash of the key."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")


def _fix_targets(examples: Sequence[Example], explanations: Sequence[Any]) -> list[Any]:
    """Return the class index that was explained for each example, independent of later changes to the model."""
    return [
        example.target if example.target is not None else int(explanation.target["index"])
        for example, explanation in zip(examples, explanations, strict=True)
    ]


def compute_explanation_similarity(first: Any, second: Any) -> tuple[float, float]:
    """Compute Spearman's rho of the scores (0 where one is constant) and the SSIM of heat maps (NaN without a grid)."""
    from scipy.stats import spearmanr

    content = first.units.content_indices()
    a, b = (np.nan_to_num(explanation.scores[content].astype(float)) for explanation in (first, second))
    rho = 0.0
    if np.ptp(a) > 0 and np.ptp(b) > 0:
        rho = float(spearmanr(a, b).statistic)
    ssim = float("nan")
    if first.units.grid is not None:
        ssim = compute_ssim(first.heat_map(), second.heat_map())
    return rho, ssim


def compute_ssim(
    first: Float[np.ndarray, "row column"], second: Float[np.ndarray, "row column"], window: int = 5
) -> float:
    """Compute the SSIM of two maps, each scaled to 0 … 1: mean over all uniform windows (Wang et al. 2004).

    >>> round(compute_ssim(np.eye(6), np.eye(6)), 6)
    1.0
    """
    a, b = (_scale_min_max(np.nan_to_num(heat_map)) for heat_map in (first, second))
    size = min(window, *a.shape)
    windows = [np.lib.stride_tricks.sliding_window_view(heat_map, (size, size)) for heat_map in (a, b)]
    means = [view.mean((2, 3)) for view in windows]
    if size > 1:
        variances = [view.var((2, 3), ddof=1) for view in windows]
    else:
        variances = [0 * view.mean((2, 3)) for view in windows]
    count = size * size
    covariance = ((windows[0] * windows[1]).mean((2, 3)) - means[0] * means[1]) * count / max(1, count - 1)
    c1 = 0.01**2
    c2 = 0.03**2
    numerator = (2 * means[0] * means[1] + c1) * (2 * covariance + c2)
    denominator = (means[0] ** 2 + means[1] ** 2 + c1) * (variances[0] + variances[1] + c2)
    return float((numerator / denominator).mean())


def _scale_min_max(values: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "row column"]:
    """Scale values to the range 0 to 1; constant values become 0."""
    span = values.max() - values.min()
    if not span:
        return np.asarray(np.zeros_like(values), dtype=float)
    return np.asarray((values - values.min()) / span, dtype=float)


def _average_similarities(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Average ρ, |ρ| and SSIM over the steps, and return the last ρ; SSIM is left out if it is undefined."""
    rho, ssim = zip(*pairs, strict=True)
    metrics = {"rho": float(np.mean(rho)), "absolute rho": float(np.mean(np.abs(rho))), "last rho": float(rho[-1])}
    if not np.isnan(ssim).any():
        metrics["ssim"] = float(np.mean(ssim))
    return metrics


def _build_similarity_curves(pairs: Sequence[tuple[float, float]]) -> dict[str, tuple[float, ...]]:
    """Return ρ and SSIM step by step; SSIM is left out if it is undefined at any step."""
    rho, ssim = zip(*pairs, strict=True)
    curves = {"rho": tuple(rho)}
    if not np.isnan(ssim).any():
        curves["ssim"] = tuple(ssim)
    return curves


@register_protocol("label-randomisation")
@dataclass(frozen=True)
class LabelRandomisation(BenchmarkProtocol):
    """Similarity to the explanations of a model trained on permuted labels.

    Attributes:
        other: Name of that model, as `clearhead.load` accepts it.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("rho",)

    explained: ExplainedClass = "predicted"
    other: str = ""

    def check_settings(self) -> None:
        """Check the settings of all protocols, and that `other` names a model."""
        super().check_settings()
        if not self.other:
            raise InputError("label-randomisation needs the model trained on permuted labels: other=NAME")

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return True: the explanation of a model trained on permuted labels should differ."""
        return True

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Explain the same classes with the other model and measure the similarity."""
        self.check_settings()
        other_explainer = clearhead.load(self.other)
        targets = _fix_targets(examples, next(iter(explanations.values())))
        other_explanations = other_explainer.explain(
            **build_explain_kwargs(examples),
            method=[parse_method(name) for name in explanations],
            target=targets,
            seed=get_explanation_seed(explanations),
        )
        measurements = []
        for method, method_explanations in explanations.items():
            pairs = zip(examples, method_explanations, other_explanations[method], strict=True)
            for example, explanation, other_explanation in pairs:
                for stream, stream_explanation in explanation.by_stream.items():
                    if len(stream_explanation.units.content_indices()) > 1:
                        similarity = compute_explanation_similarity(stream_explanation, other_explanation[stream])
                        metrics = _average_similarities([similarity])
                        measurements.append(Measurement(example.id, method, stream, metrics))
        return measurements


@register_protocol("input-invariance")
@dataclass(frozen=True)
class InputInvariance(BenchmarkProtocol):
    """Change of scores under a constant input shift that the model's bias compensates.

    `moved` is the largest change of a score relative to the largest score; 0 is correct.

    Attributes:
        constant: What is added to all pixel values.
    """

    headline_metrics: ClassVar[tuple[str, ...]] = ("moved",)

    explained: ExplainedClass = "predicted"
    constant: float = 0.5

    def is_smaller_better(self, metric: str, part_name: str) -> bool:
        """Return True for `moved`, False for `rho`."""
        return metric == "moved"

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Explain the shifted images with the shifted model and compare the scores."""
        adapter = explainer.adapter
        samples = [adapter.make_samples(example.input, InputOptions())[0] for example in examples]
        targets = _fix_targets(examples, next(iter(explanations.values())))
        methods = [parse_method(name) for name in explanations]
        seed = get_explanation_seed(explanations)
        with shifted_input_bias(adapter.model, self.constant):
            shifted_explanations = [
                explainer.explain(
                    {"pixel_values": sample.inputs["pixel_values"][None] + self.constant}, methods, target, seed=seed
                )
                for sample, target in zip(samples, targets, strict=True)
            ]
        measurements = []
        for method, method_explanations in explanations.items():
            triples = zip(examples, method_explanations, shifted_explanations, strict=True)
            for example, explanation, shifted_by_method in triples:
                shifted = shifted_by_method[method]
                a, b = (np.nan_to_num(scores.astype(float)) for scores in (explanation.scores, shifted.scores))
                largest = float(np.abs(a).max()) or 1.0
                metrics = {
                    "moved": float(np.abs(a - b).max() / largest),
                    "rho": compute_explanation_similarity(explanation, shifted)[0],
                }
                measurements.append(Measurement(example.id, method, explanation.stream, metrics))
        return measurements


@contextmanager
def shifted_input_bias(model: nn.Module, constant: float) -> Iterator[None]:
    """Context manager: the bias of the patch projection compensates a constant added to all pixels."""
    projection = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if projection is None or projection.bias is None or projection.padding not in ((0, 0), "valid"):
        raise InputError("input-invariance needs an image model whose patch projection has a bias and no padding")
    original_bias = projection.bias.detach().clone()
    try:
        with torch.no_grad():
            projection.bias -= constant * projection.weight.sum((1, 2, 3))
        yield
    finally:
        with torch.no_grad():
            projection.bias.copy_(original_bias)
