"""clearhead: which parts of the input made a Transformer say that – and how do we know?

>>> import clearhead
>>> ex = clearhead.load("zoo:sentiment")                                # doctest: +SKIP
>>> ex.explain("You look extremely confused")                           # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead.aggregation import aggregate, to_frame
    from clearhead.comparison import Comparison, compare
    from clearhead.converting import Conversion, convert
    from clearhead.errors import ClearheadError, InputError, Refusal
    from clearhead.explainer import Explainer
    from clearhead.explanation import Explanation, from_dict
    from clearhead.explanation import load as open_explanation
    from clearhead.joint import JointExplanation
    from clearhead.lecturing import Lecture, lecture
    from clearhead.loading import load
    from clearhead.methods import Fold, Method, Scores, register
    from clearhead.recording.own import register_attention
    from clearhead.recording.tape import Call, Tape
    from clearhead.show.html import report
    from clearhead.subjects import Subject, register_subject
    from clearhead.subjects.own_pictures import Pictures
    from clearhead.subjects.own_tokens import Tokens
    from clearhead.targets import Answer, Contrast, Generated, Label, MaskedWord, Predicted, Query, TokenLabel
    from clearhead.units import Units
    from clearhead.verifying import Verification, verify
    from clearhead.zoo import models

# Each name and the module that it comes from: nothing heavy is imported before it is used.
_WHERE = {
    "aggregate": "aggregation",
    "to_frame": "aggregation",
    "Comparison": "comparison",
    "compare": "comparison",
    "Conversion": "converting",
    "convert": "converting",
    "ClearheadError": "errors",
    "InputError": "errors",
    "Refusal": "errors",
    "Explainer": "explainer",
    "Explanation": "explanation",
    "from_dict": "explanation",
    "open_explanation": "explanation:load",
    "load": "loading",
    "models": "zoo",
    "Fold": "methods",
    "Method": "methods",
    "Scores": "methods",
    "register": "methods",
    "register_attention": "recording.own",
    "JointExplanation": "joint",
    "Lecture": "lecturing",
    "lecture": "lecturing",
    "Call": "recording.tape",
    "Tape": "recording.tape",
    "report": "show.html",
    "Pictures": "subjects.own_pictures",
    "Tokens": "subjects.own_tokens",
    "Subject": "subjects",
    "register_subject": "subjects",
    "Answer": "targets",
    "Contrast": "targets",
    "Generated": "targets",
    "Label": "targets",
    "MaskedWord": "targets",
    "Predicted": "targets",
    "Query": "targets",
    "TokenLabel": "targets",
    "Units": "units",
    "Verification": "verifying",
    "verify": "verifying",
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
