"""Golden scores: what every method and every profile computes on every golden model.

A case is one call of `Explainer.explain`, named by the public name of its method: `generic`, `generic@all-rows` with
options, `te_vit_eval:rollout` with a profile. Its arrays are keyed `case/input/stream/array`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import clearhead
from tests.golden.models import GOLDEN_MODELS, get_explainer

METHODS = (
    "attcat",
    "attention",
    "attention-gradcam",
    "attention-gradient",
    "attention-x-gradient",
    "attn-lrp",
    "beyond-intuition-head",
    "beyond-intuition-token",
    "calibrated",
    "cat",
    "cp-lrp",
    "deeplift",
    "deeplift-shap",
    "ensemble",
    "flow",
    "generic",
    "gim",
    "grad-sam",
    "gradient-shap",
    "input-x-gradient",
    "integrated-gradients",
    "kernel-shap",
    "layer-conductance",
    "libragrad",
    "lime",
    "lrp",
    "occlusion",
    "pa-lrp",
    "partial-lrp",
    "position",
    "random",
    "rollout",
    "saliency",
    "shap",
    "smoothgrad",
    "tam",
    "transformer-attribution",
    "value-zeroing",
)
#: Options that keep the number of passes small.
BUDGETS: dict[str, dict[str, int]] = {
    **{name: {"evaluations": 100} for name in ("kernel-shap", "lime", "shap")},
    "calibrated": {"evaluations": 24},
    **{name: {"samples": 3} for name in ("deeplift-shap", "gradient-shap", "smoothgrad")},
    **{name: {"steps": 3} for name in ("integrated-gradients", "layer-conductance", "tam")},
    **{name: {"steps": 3} for name in ("beyond-intuition-head", "beyond-intuition-token")},
}
#: Methods whose scores are a sum over heads, so that contributions per head are requested.
PER_HEAD = (
    *("attcat", "attention", "attention-gradient", "attention-x-gradient", "generic", "grad-sam", "partial-lrp"),
    "transformer-attribution",
)
_PREFIXED = ("attention", "attention-gradcam", "rollout")
_MM_METHODS = ("generic", *_PREFIXED, "partial-lrp", "transformer-attribution")
_BI_METHODS = ("transformer-attribution", "partial-lrp", *_PREFIXED)
#: The profiles with golden scores on each model, and their methods.
PROFILES: dict[str, dict[str, tuple[str, ...]]] = {
    "bert-classifier": {
        "attcat_paper": ("attcat",),
        "bi_bert_c": ("beyond-intuition-token", "generic", *_BI_METHODS),
        "bi_bert_h": ("beyond-intuition-head", "generic", *_BI_METHODS),
        "bi_ga": ("generic",),
        "captum": ("saliency", "input-x-gradient", "integrated-gradients", "layer-conductance", "deeplift"),
        "lxt": ("attn-lrp",),
        "gradsam_lecture": ("grad-sam",),
        "idl_bt": ("beyond-intuition-head", "beyond-intuition-token"),
        "idl_ga": ("generic",),
        "shap_lecture": ("shap",),
        "te_bert_eraser": (*_BI_METHODS, "lrp"),
        "te_bert_notebook": ("transformer-attribution",),
    },
    "bert-masked-lm": {"attcat_paper": ("attcat",), "gender_mlm": ("attcat", "attention", "cat")},
    "bert-question-answering": {"attcat_paper": ("attcat",)},
    "vit-classifier": {"captum": ("deeplift-shap", "integrated-gradients", "saliency")},
    "vit-12-layers": {
        "bi_ga": ("generic",),
        "bi_vit_c": ("beyond-intuition-token", *_BI_METHODS),
        "bi_vit_c_depth_scaled": ("beyond-intuition-token",),
        "bi_vit_h": ("beyond-intuition-head", *_BI_METHODS),
        "bi_vit_h_depth_scaled": ("beyond-intuition-head",),
        "idl_bt": ("beyond-intuition-head", "beyond-intuition-token"),
        "idl_ga": ("generic",),
        "mm_vit": ("generic",),
        "tam": ("tam",),
        "tam_depth_scaled": ("tam",),
        "te_vit_eval": (*_BI_METHODS, "lrp"),
        "te_vit_notebook": ("transformer-attribution",),
    },
    "beit-12-layers": {
        "bi_vit_mae": ("beyond-intuition-head", "beyond-intuition-token", "generic", *_BI_METHODS),
        "bi_vit_mae_depth_scaled": ("beyond-intuition-head", "beyond-intuition-token"),
    },
    "dinov2-12-layers": {
        "bi_vit_dino": ("beyond-intuition-head", "beyond-intuition-token"),
        "bi_vit_dino_depth_scaled": ("beyond-intuition-head", "beyond-intuition-token"),
    },
    "clip": {
        "bi_clip_c": ("beyond-intuition-token", "generic", *_PREFIXED),
        "bi_clip_h": ("beyond-intuition-head", "generic", *_PREFIXED),
        "mm_clip": ("generic",),
    },
    "lxmert": {"mm_lxmert": _MM_METHODS},
    "visual-bert": {"mm_visualbert": _MM_METHODS},
    "detr": {"mm_detr": _MM_METHODS},
}
#: Models that have golden scores of profiles only.
PROFILES_ONLY = ("vit-12-layers", "beit-12-layers", "dinov2-12-layers")


@dataclass(frozen=True)
class Case:
    """One call of `Explainer.explain`: a method with its options, and further arguments."""

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


_ALL_ROWS = {"rows": "all"}
_LATE_LAYERS = {"layers": (1, None)}
_TWO_HEADS = {"heads": (0, 2), "layers": (None, None)}
#: Options that a renamed or moved code path could lose, each on a model that supports it.
VARIANTS: dict[str, dict[str, Case]] = {
    "bert-classifier": {
        **{
            f"{method}@{name}": Case(method, {**BUDGETS.get(method, {}), **options})
            for name, options in (("all-rows", _ALL_ROWS), ("late-layers", _LATE_LAYERS), ("two-heads", _TWO_HEADS))
            for method in (*_MM_METHODS, "attention-x-gradient", "beyond-intuition-head", "flow", "tam")
        },
        "attcat@row": Case("attcat", {"weights": "row"}),
        "beyond-intuition-head@gradient": Case("beyond-intuition-head", {"steps": 3, "feedback": "gradient"}),
        "beyond-intuition-head@uniform": Case("beyond-intuition-head", {"steps": 3, "perception": "uniform"}),
        "beyond-intuition-token@smoothed": Case("beyond-intuition-token", {"steps": 3, "feedback": "smoothed"}),
        "deeplift@zero-baseline": Case("deeplift", {"baseline": "zero"}),
        "generic@unaggregated": Case("generic", {"aggregate": False}),
        "generic@relevance": Case("generic", {"lrp": True}),
        "grad-sam@received": Case("grad-sam", {"received": True}),
        "integrated-gradients@riemann": Case("integrated-gradients", {"steps": 3, "rule": "riemann-middle"}),
        "kernel-shap@words": Case("kernel-shap", {"evaluations": 100, "unit": "word"}),
        "lrp@positions": Case("lrp", {"positions": True}),
        "lrp@original-rules": Case("lrp", {"rules": "orig"}),
        "occlusion@window": Case("occlusion", {"window": 2}),
        "shap@present": Case("shap", {"evaluations": 100, "context": "present"}),
        "smoothgrad@absolute": Case("smoothgrad", {"samples": 3, "reduce": "abs"}),
        "transformer-attribution@normalised": Case("transformer-attribution", {"normalise": True}),
        # The same scores through other code paths: streamed attention, activation checkpointing, small batches.
        "generic@tiles": Case("generic", arguments={"kernel": "tiles"}),
        "rollout@checkpoint": Case("rollout", arguments={"checkpoint": True}),
        "integrated-gradients@memory": Case("integrated-gradients", {"steps": 3}, {"memory": "1MiB"}),
        "saliency@contrast": Case("saliency", arguments={"target": clearhead.Contrast(0, 2)}),
        "generic@label": Case("generic", arguments={"target": 0}),
        "generic@probability": Case("generic", arguments={"scale": "probability"}),
        "input-x-gradient@log-odds": Case("input-x-gradient", arguments={"scale": "log-odds"}),
        "generic@text-pair": Case("generic", arguments={"inputs": ("I like the movie.", "She hates the book")}),
        "generic@truncated": Case("generic", arguments={"max_length": 8}),
    },
    "bert-masked-lm": {"generic@word": Case("generic", arguments={"target": clearhead.MaskedToken("book")})},
    "bert-token-labels": {"generic@one-label": Case("generic", arguments={"target": clearhead.TokenLabel(2, 1)})},
    "vit-classifier": {
        "generic@tiles": Case("generic", arguments={"kernel": "tiles"}),
        "rollout@all-rows": Case("rollout", _ALL_ROWS),
    },
    "gpt2": {
        "generic@tiles": Case("generic", arguments={"kernel": "tiles"}),
        "generic@first-token": Case("generic", arguments={"target": clearhead.GeneratedToken(0)}),
        "saliency@generated": Case(
            "saliency", arguments={"answer": None, "target": clearhead.GeneratedToken(), "max_new_tokens": 3}
        ),
    },
    "llama": {
        "saliency@generated": Case("saliency", arguments={"target": clearhead.GeneratedToken(), "max_new_tokens": 3}),
    },
    "bart": {
        "generic@tiles": Case("generic", arguments={"kernel": "tiles"}),
        "saliency@generated": Case(
            "saliency", arguments={"answer": None, "target": clearhead.GeneratedToken(), "max_new_tokens": 3}
        ),
    },
    "clip": {"generic@logit": Case("generic", arguments={"scale": "logit"})},
    "detr": {"generic@one-query": Case("generic", arguments={"target": clearhead.DetectionQuery(2)})},
}


def list_cases(model_name: str) -> dict[str, Case]:
    """Return the cases of a golden model by name, without building it."""
    cases: dict[str, Case] = {}
    if model_name not in PROFILES_ONLY:
        for method in METHODS:
            cases[method] = Case(method, BUDGETS.get(method, {}), {"per": "head"} if method in PER_HEAD else {})
    cases |= VARIANTS.get(model_name, {})
    for profile, methods in PROFILES.get(model_name, {}).items():
        for method in methods:
            cases[f"{profile}:{method}"] = Case(method, arguments={"profile": profile})
    return cases


def compute_case(model_name: str, case_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of one case by key; for a method that does not apply, a marker that it is rejected."""
    case = list_cases(model_name)[case_name]
    arguments = {**GOLDEN_MODELS[model_name].arguments(), **case.arguments}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small budgets
        try:
            result = get_explainer(model_name).explain(
                **arguments, method=clearhead.Method(case.method, **case.options)
            )
        except clearhead.UnsupportedError:
            return {f"{case_name}/refused": np.array([True])}
    explanations = result if isinstance(result, list) else [result]
    arrays: dict[str, np.ndarray] = {}
    for index, explanation in enumerate(explanations):
        for stream in explanation.streams:
            arrays |= {
                f"{case_name}/{index}/{stream}/{name}": array
                for name, array in _list_arrays(explanation[stream]).items()
            }
        for name, mapping in (("target", explanation.target), ("prediction", explanation.prediction)):
            values: list[float] = []
            indices: list[int] = []
            _collect_numbers(mapping, values, indices)
            arrays[f"{case_name}/{index}/{name}/values"] = np.array(values, dtype=np.float64)
            arrays[f"{case_name}/{index}/{name}/indices"] = np.array(indices, dtype=np.int64)
    return arrays


def compute_golden_scores(model_name: str) -> dict[str, np.ndarray]:
    """Return the arrays of all cases of a golden model."""
    arrays: dict[str, np.ndarray] = {}
    for case_name in list_cases(model_name):
        arrays |= compute_case(model_name, case_name)
    return arrays


def compute_tolerance(model_name: str, case_name: str) -> float:
    """Return how far scores may be from the golden ones, relative to the largest of them."""
    amplification = clearhead.Method(list_cases(model_name)[case_name].method).declaration.rounding_amplification
    return max(GOLDEN_MODELS[model_name].tolerance, 1e-9 * amplification)


def _list_arrays(explanation: clearhead.Explanation) -> dict[str, np.ndarray]:
    arrays = {
        "scores": explanation.scores,
        "matrix": explanation.matrix,
        "per_layer": explanation.per_layer,
        "per_head": explanation.per_head,
        "factors": explanation.factors,
        "base_value": explanation.base_value,
        "intervals": explanation.intervals,
    }
    return {name: np.atleast_1d(array) for name, array in arrays.items() if array is not None}


def _collect_numbers(entry: Any, values: list[float], indices: list[int]) -> None:
    """Append the numbers of a description in their order, independent of its keys."""
    if isinstance(entry, Mapping):
        for inner in entry.values():
            _collect_numbers(inner, values, indices)
    elif isinstance(entry, list | tuple):
        for inner in entry:
            _collect_numbers(inner, values, indices)
    elif isinstance(entry, float):
        values.append(entry)
    elif isinstance(entry, int) and not isinstance(entry, bool):
        indices.append(entry)
