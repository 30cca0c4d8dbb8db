"""The number of passes of typical calls: forward calls of the model, gradients, and materialised attention maps."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from tests.golden.models import GOLDEN_MODELS, build_model, load_explainer
from tests.golden.scores import BUDGETS, METHODS

_TEXT = "She hates the book because it isn't good"


@dataclass(frozen=True)
class Call:
    """Arguments of `Explainer.explain` on one golden model; methods with their options."""

    model_name: str
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


CALLS: dict[str, Call] = {
    "one text, default method": Call("bert-classifier", arguments={"inputs": _TEXT}),
    "eight texts, default method": Call(
        "bert-classifier", arguments={"inputs": [f"{_TEXT} {'so ' * count}" for count in range(8)]}
    ),
    "tape, path and rules together": Call(
        "bert-classifier",
        {"generic": {}, "integrated-gradients": {"steps": 3}, "attn-lrp": {}},
        {"inputs": _TEXT},
    ),
    "integrated gradients, 20 steps": Call(
        "bert-classifier", {"integrated-gradients": {"steps": 20}}, {"inputs": _TEXT}
    ),
    "shap, 200 evaluations": Call("bert-classifier", {"shap": {"evaluations": 200}}, {"inputs": _TEXT}),
    "streamed attention": Call("bert-classifier", {"generic": {}}, {"inputs": _TEXT, "kernel": "tiles"}),
    "small memory budget": Call(
        "bert-classifier", {"integrated-gradients": {"steps": 20}}, {"inputs": [_TEXT] * 8, "memory": "1MiB"}
    ),
    "decoder, given tokens": Call("gpt2", {"generic": {}}, {"inputs": "She hates", "answer": " it is long"}),
    "decoder, generated tokens": Call(
        "gpt2", {"generic": {}}, {"inputs": "She hates", "target": clearhead.GeneratedToken(), "max_new_tokens": 3}
    ),
    "encoder-decoder, given tokens": Call("bart", {"generic": {}}, {"inputs": "I like it", "answer": "and the book"}),
    "dual encoder": Call("clip"),
    "co-attention": Call("lxmert"),
    "detection": Call("detr"),
    "vision-language decoder": Call("llava"),
    "own module": Call("own-vit"),
}


@dataclass
class PassCounts:
    """Calls of the model, samples in them, calls of `autograd.grad`, and materialised attention maps of one sample."""

    forward: int = 0
    samples: int = 0
    backward: int = 0
    maps: int = 0


#: A softmax over more entries than this is taken over a vocabulary.
_MOST_KEYS = 100
_SOFTMAXES = (torch.ops.aten.softmax, torch.ops.aten._softmax, torch.ops.aten._safe_softmax)


class _MapCounter(TorchDispatchMode):
    """Counts the attention maps (head × query × key of one sample) whose softmax is materialised."""

    def __init__(self, counts: PassCounts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_softmax = func.overloadpacket in _SOFTMAXES
        if is_softmax and output.dim() >= 3 and output.shape[-1] <= _MOST_KEYS:
            self.counts.maps += output.shape[:-3].numel()
        return output


@contextmanager
def count_passes(model: nn.Module) -> Iterator[PassCounts]:
    """Count the passes of a model inside the `with`."""
    counts = PassCounts()
    compute_gradients = torch.autograd.grad

    def count_forward(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)]
        counts.forward += 1
        counts.samples += len(tensors[0])

    def count_backward(*arguments: Any, **keywords: Any) -> Any:
        counts.backward += 1
        return compute_gradients(*arguments, **keywords)

    handle = model.register_forward_pre_hook(count_forward, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch, _MapCounter(counts):
        patch.setattr(torch.autograd, "grad", count_backward)
        try:
            yield counts
        finally:
            handle.remove()


def count_call(name: str) -> dict[str, dict[str, int]]:
    """Count the passes of a call: the first one, which includes the recorder's self-test, and a second one."""
    call = CALLS[name]
    model, *processor = build_model(call.model_name)
    explainer = load_explainer(call.model_name, model, *processor)
    arguments = call.arguments or GOLDEN_MODELS[call.model_name].arguments()
    if call.methods:
        methods = [clearhead.Method(method, **options) for method, options in call.methods.items()]
        arguments = {**arguments, "method": methods}
    counts = {}
    for time in ("first", "again"):
        with count_passes(model) as counted:
            explainer.explain(**arguments)
        counts[f"{name}/{time}"] = vars(counted)
    return counts


def count_methods() -> dict[str, dict[str, int]]:
    """Count the passes of each method for one text, after the recorder's self-test."""
    model, *processor = build_model("bert-classifier")
    explainer = load_explainer("bert-classifier", model, *processor)
    counts = {}
    for name in METHODS:
        method = clearhead.Method(name, **BUDGETS.get(name, {}))
        explainer.explain(_TEXT, method)
        with count_passes(model) as counted:
            explainer.explain(_TEXT, method)
        counts[f"one text, {name}"] = vars(counted)
    return counts


def compute_pass_counts() -> dict[str, dict[str, int]]:
    """Count the passes of all calls and methods."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small budgets
        return count_methods() | {key: counts for name in CALLS for key, counts in count_call(name).items()}
