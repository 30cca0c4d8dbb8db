"""The method that `explain` uses by default for a kind of model, and the measurements behind the choice."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

import numpy as np

from clearhead.adapters.base import ModelAdapter
from clearhead.adapters.decoder import CausalLMAdapter
from clearhead.adapters.detection import BaseDetectionAdapter
from clearhead.adapters.encoder_decoder import EncoderDecoderAdapter
from clearhead.adapters.image import ImageAdapter
from clearhead.adapters.text import TextAdapter
from clearhead.adapters.text_with_visual import TextWithVisualAdapter
from clearhead.engine.attention_mode import MAX_FULL_LENGTH, compute_max_length
from clearhead.engine.capabilities import ModelCapabilities
from clearhead.errors import UnsupportedError
from clearhead.methods.base import METHOD_REGISTRY, Method
from clearhead.sample import Sample

#: The method with the best mean over the known-answer models (docs/known-answers.md).
RECOMMENDED_METHOD = "ensemble"
#: For inputs whose full attention maps, which DeepLIFT SHAP needs, would not fit into memory.
RECOMMENDED_METHOD_FOR_LONG_INPUTS = "saliency"
#: Where neither has gradients to work with (quantised models), in this order.
FALLBACK_METHODS = ("shap", "occlusion", "attention")
#: Kinds of models, by their adapters, with the known-answer columns (task/stream) of models of that kind. The first
#: adapter class that fits decides.
MODEL_KINDS: tuple[tuple[type[ModelAdapter], str, tuple[str, ...]], ...] = (
    (CausalLMAdapter, "decoder", ("recall/text",)),
    (EncoderDecoderAdapter, "encoder–decoder", ("spell/source",)),
    (BaseDetectionAdapter, "object detector", ("shapes-detr/image",)),
    (
        TextWithVisualAdapter,
        "text and image",
        ("shapes-vqa/text", "shapes-vqa/regions", "shapes-vilt/text", "shapes-vilt/image"),
    ),
    (ImageAdapter, "image encoder", ("pets-hans/image",)),
    (TextAdapter, "text encoder", ("logic/text",)),
)


@dataclass(frozen=True)
class Recommendation:
    """The method that `explain` uses by default, and why. Prints as a sentence.

    Attributes:
        method: Name of the method.
        reason: Why it is recommended for this model and input.
        model_kind: The kind of model that the figures are from.
        figures: Mean average precision of the recommended method and of others on the known-answer models of that
            kind, best first.
    """

    method: str
    reason: str
    model_kind: str
    figures: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Format method and reason as one sentence."""
        return f"{self.method}: {self.reason}"


def recommend_method(capabilities: ModelCapabilities, samples: Sequence[Sample]) -> Recommendation:
    """Recommend a method for these inputs of a model.

    Args:
        capabilities: What is known about the model, after its self-test.
        samples: The inputs; the longest decides.

    Returns:
        The method with its reason and the figures that it is based on.

    Raises:
        UnsupportedError: No method applies to the model.
    """
    kind, columns = _find_model_kind(capabilities.adapter)
    figures = _compute_figures(columns)
    length = compute_max_length(samples)
    if length > MAX_FULL_LENGTH:
        preferred = RECOMMENDED_METHOD_FOR_LONG_INPUTS
        reason = f"the input has {length:,} units, too many for the full attention maps that {RECOMMENDED_METHOD} needs"
    else:
        preferred = RECOMMENDED_METHOD
        reason = _format_evidence(preferred, kind, figures)
    why_not = capabilities.find_unsupported_reason(Method(preferred))
    if why_not is None:
        return Recommendation(preferred, reason, kind, figures)
    for name in FALLBACK_METHODS:
        if capabilities.find_unsupported_reason(Method(name)) is None:
            return Recommendation(name, f"{preferred} does not apply ({why_not})", kind, figures)
    raise UnsupportedError(f"no method applies to {capabilities.adapter.name}: {preferred}: {why_not}")


def _find_model_kind(adapter: ModelAdapter) -> tuple[str, tuple[str, ...]]:
    """The kind of a model and its columns; all columns for models without a known-answer model of their kind."""
    for adapter_class, kind, columns in MODEL_KINDS:
        if isinstance(adapter, adapter_class):
            return kind, columns
    return "any kind", tuple(column for _, _, columns in MODEL_KINDS for column in columns)


@cache
def _read_evidence() -> dict[str, dict[str, float]]:
    """Mean average precision by column and method, written by `make known-answers`."""
    content = json.loads((files("clearhead.engine") / "known_answers.json").read_text(encoding="utf-8"))
    columns: dict[str, dict[str, float]] = content["columns"]
    return columns


def _compute_figures(columns: Sequence[str]) -> dict[str, float]:
    """The mean over columns of each method that is measured on all of them, best first."""
    evidence = _read_evidence()
    means = {
        name: float(np.mean([evidence[column][name] for column in columns]))
        for name in METHOD_REGISTRY
        if all(name in evidence.get(column, ()) for column in columns)
    }
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _format_evidence(method: str, kind: str, figures: Mapping[str, float]) -> str:
    """A sentence with the figure of the method, that of `generic`, and the expected figure of random scores."""
    compared = ", ".join(f"{name} {figures[name]:.2f}" for name in ("generic", "random") if name in figures)
    models = "all known-answer models" if kind == "any kind" else f"known-answer models of this kind ({kind})"
    return f"average precision {figures[method]:.2f} on {models}; {compared}"
