"""clearhead explains the predictions of Transformers: which units of the input a prediction depends on.

>>> import clearhead
>>> ex = clearhead.load("zoo:sentiment")  # doctest: +SKIP
>>> ex.explain("You look extremely confused").top(3)  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead.adapters import InputOptions, ModelAdapter, register_adapter
    from clearhead.adapters.custom.images import ImageReader
    from clearhead.adapters.custom.tokens import TokenReader
    from clearhead.capture.sources.custom_modules import register_attention
    from clearhead.capture.tape import AttentionCall, Tape
    from clearhead.engine.recommendation import RECOMMENDED_METHOD, Recommendation
    from clearhead.errors import ClearheadError, InputError, UnsupportedError
    from clearhead.explainer import Explainer
    from clearhead.explanation.aggregation import aggregate, to_frame
    from clearhead.explanation.comparison import Comparison, compare
    from clearhead.explanation.explanation import Explanation, from_dict, load_explanation
    from clearhead.explanation.multi_stream import MultiStreamExplanation
    from clearhead.loader import load
    from clearhead.methods import AttributionMethod, Cost, Method, MethodScores, PassType, register_method
    from clearhead.render.html import write_report
    from clearhead.request import ComputeOptions
    from clearhead.studies.checkpoints import ConversionResult, convert_checkpoint
    from clearhead.studies.lecture import LectureResult, run_lecture
    from clearhead.targets import (
        AnswerSpan,
        Contrast,
        DetectionQuery,
        GeneratedToken,
        Label,
        MaskedToken,
        Predicted,
        TokenLabel,
    )
    from clearhead.units import Units
    from clearhead.verification import Verification, verify
    from clearhead.zoo import zoo_models

# Public names and their modules. They are imported on first use, because torch and transformers load slowly.
_EXPORTS = {
    "aggregate": "explanation.aggregation",
    "AnswerSpan": "targets",
    "AttentionCall": "capture.tape",
    "AttributionMethod": "methods",
    "ClearheadError": "errors",
    "compare": "explanation.comparison",
    "Comparison": "explanation.comparison",
    "Contrast": "targets",
    "ComputeOptions": "request",
    "ConversionResult": "studies.checkpoints",
    "convert_checkpoint": "studies.checkpoints",
    "Cost": "methods",
    "DetectionQuery": "targets",
    "Explainer": "explainer",
    "Explanation": "explanation.explanation",
    "from_dict": "explanation.explanation",
    "GeneratedToken": "targets",
    "ImageReader": "adapters.custom.images",
    "InputError": "errors",
    "InputOptions": "adapters",
    "Label": "targets",
    "LectureResult": "studies.lecture",
    "load": "loader",
    "load_explanation": "explanation.explanation",
    "MaskedToken": "targets",
    "Method": "methods",
    "MethodScores": "methods",
    "ModelAdapter": "adapters",
    "MultiStreamExplanation": "explanation.multi_stream",
    "PassType": "methods",
    "Predicted": "targets",
    "register_adapter": "adapters",
    "register_attention": "capture.sources.custom_modules",
    "register_method": "methods",
    "RECOMMENDED_METHOD": "engine.recommendation",
    "Recommendation": "engine.recommendation",
    "run_lecture": "studies.lecture",
    "Tape": "capture.tape",
    "to_frame": "explanation.aggregation",
    "TokenLabel": "targets",
    "TokenReader": "adapters.custom.tokens",
    "Units": "units",
    "UnsupportedError": "errors",
    "Verification": "verification",
    "verify": "verification",
    "write_report": "render.html",
    "zoo_models": "zoo",
}

__all__ = [
    "RECOMMENDED_METHOD",
    "AnswerSpan",
    "AttentionCall",
    "AttributionMethod",
    "ClearheadError",
    "Comparison",
    "ComputeOptions",
    "Contrast",
    "ConversionResult",
    "Cost",
    "DetectionQuery",
    "Explainer",
    "Explanation",
    "GeneratedToken",
    "ImageReader",
    "InputError",
    "InputOptions",
    "Label",
    "LectureResult",
    "MaskedToken",
    "Method",
    "MethodScores",
    "ModelAdapter",
    "MultiStreamExplanation",
    "PassType",
    "Predicted",
    "Recommendation",
    "Tape",
    "TokenLabel",
    "TokenReader",
    "Units",
    "UnsupportedError",
    "Verification",
    "aggregate",
    "compare",
    "convert_checkpoint",
    "from_dict",
    "load",
    "load_explanation",
    "register_adapter",
    "register_attention",
    "register_method",
    "run_lecture",
    "to_frame",
    "verify",
    "write_report",
    "zoo_models",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    return getattr(import_module(f"clearhead.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
