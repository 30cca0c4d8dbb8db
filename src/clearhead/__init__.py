"""clearhead: which parts of the input made a Transformer say that – and how do we know?

>>> import clearhead
>>> ex = clearhead.load("zoo:sentiment")                                # doctest: +SKIP
>>> ex.explain("You look extremely confused")                           # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead.adapters import Subject, register_subject
    from clearhead.adapters.custom.images import Pictures
    from clearhead.adapters.custom.tokens import Tokens
    from clearhead.capture.sources.custom_modules import register_attention
    from clearhead.capture.tape import Call, Tape
    from clearhead.errors import ClearheadError, InputError, Refusal
    from clearhead.explainer import Explainer
    from clearhead.explanation.aggregation import aggregate, to_frame
    from clearhead.explanation.comparison import Comparison, compare
    from clearhead.explanation.explanation import Explanation, from_dict
    from clearhead.explanation.explanation import load as open_explanation
    from clearhead.explanation.multi_stream import JointExplanation
    from clearhead.loader import load
    from clearhead.methods import Fold, Method, Scores, register
    from clearhead.render.html import report
    from clearhead.studies.checkpoints import Conversion, convert
    from clearhead.studies.lecture import Lecture, lecture
    from clearhead.targets import Answer, Contrast, Generated, Label, MaskedWord, Predicted, Query, TokenLabel
    from clearhead.units import Units
    from clearhead.verification import Verification, verify
    from clearhead.zoo import models

# Each name and the module that it comes from: nothing heavy is imported before it is used.
_WHERE = {
    "aggregate": "explanation.aggregation",
    "to_frame": "explanation.aggregation",
    "Comparison": "explanation.comparison",
    "compare": "explanation.comparison",
    "Conversion": "studies.checkpoints",
    "convert": "studies.checkpoints",
    "ClearheadError": "errors",
    "InputError": "errors",
    "Refusal": "errors",
    "Explainer": "explainer",
    "Explanation": "explanation.explanation",
    "from_dict": "explanation.explanation",
    "open_explanation": "explanation.explanation:load",
    "load": "loader",
    "models": "zoo",
    "Fold": "methods",
    "Method": "methods",
    "Scores": "methods",
    "register": "methods",
    "register_attention": "capture.sources.custom_modules",
    "JointExplanation": "explanation.multi_stream",
    "Lecture": "studies.lecture",
    "lecture": "studies.lecture",
    "Call": "capture.tape",
    "Tape": "capture.tape",
    "report": "render.html",
    "Pictures": "adapters.custom.images",
    "Tokens": "adapters.custom.tokens",
    "Subject": "adapters",
    "register_subject": "adapters",
    "Answer": "targets",
    "Contrast": "targets",
    "Generated": "targets",
    "Label": "targets",
    "MaskedWord": "targets",
    "Predicted": "targets",
    "Query": "targets",
    "TokenLabel": "targets",
    "Units": "units",
    "Verification": "verification",
    "verify": "verification",
}

__all__ = [
    "Answer",
    "Call",
    "ClearheadError",
    "Comparison",
    "Contrast",
    "Conversion",
    "Explainer",
    "Explanation",
    "Fold",
    "Generated",
    "InputError",
    "JointExplanation",
    "Label",
    "Lecture",
    "MaskedWord",
    "Method",
    "Pictures",
    "Predicted",
    "Query",
    "Refusal",
    "Scores",
    "Subject",
    "Tape",
    "TokenLabel",
    "Tokens",
    "Units",
    "Verification",
    "aggregate",
    "compare",
    "convert",
    "from_dict",
    "lecture",
    "load",
    "models",
    "open_explanation",
    "register",
    "register_attention",
    "register_subject",
    "report",
    "to_frame",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'clearhead' has no attribute {name!r}")
    module, _, other = _WHERE[name].partition(":")
    return getattr(import_module(f"clearhead.{module}"), other or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
