"""Names, folders or objects → an `Explainer`. Safetensors only, no remote code."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from clearhead.errors import InputError, Refusal
from clearhead.explainer import Explainer
from clearhead.subjects import subject_for

#: The heads that clearhead explains, by the ending of a model's class name, and the auto class that opens them.
AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForImageClassificationWithTeacher": "AutoModelForImageClassification",
}


def load(
    model: Any,
    processor: Any = None,
    *,
    readout: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
) -> Explainer:
    """An `Explainer` for a zoo model ("zoo:sentiment"), a folder, a hub name, a model, (model, processor) or a pipeline.

    device: where to put the model (a model given as an object stays where it is unless this is given)
    dtype: as in transformers; by default half-precision weights are widened to float32 on a CPU
    readout: which row speaks for the target, where clearhead does not know the architecture
    """
    if isinstance(model, str | Path):
        model, opened = _open(str(model), dtype, revision)
        processor = processor or opened
        model = model.to(device or "cpu")
    else:
        model, processor = _unwrapped(model, processor)
        if device is not None:
            model = model.to(device)
        if dtype is not None:
            model = model.to(_as_dtype(dtype))
    return Explainer(subject_for(model, processor, readout))


def models() -> dict[str, dict[str, Any]]:
    """The zoo's models and their cards; empty where `clearhead-zoo` is not installed."""
    if find_spec("clearhead_zoo") is None:
        return {}
    import clearhead_zoo

    return {name: clearhead_zoo.card(name) for name in clearhead_zoo.names()}


def _open(name: str, dtype: str | torch.dtype | None, revision: str | None) -> tuple[Any, Any]:
    import transformers

    place = _zoo_path(name.removeprefix("zoo:")) if name.startswith("zoo:") else name
    try:
        config = transformers.AutoConfig.from_pretrained(place, revision=revision)
    except (OSError, ValueError) as problem:
        raise InputError(
            f"cannot open {name!r} as a model: {_first_line(problem)} Give a zoo model (clearhead models lists them), "
            "a folder written by save_pretrained, or a hub name"
        ) from None
    architecture = (getattr(config, "architectures", None) or ["?"])[0]
    auto = next((auto for ending, auto in AUTO_CLASSES.items() if architecture.endswith(ending)), None)
    if auto is None:
        accepted = ", ".join(f"*{ending}" for ending in AUTO_CLASSES)
        raise Refusal(f"{name} is a {architecture}; by name clearhead opens {accepted}. Load others as objects")
    try:
        opener = getattr(transformers, architecture, None) or getattr(transformers, auto)
        model = opener.from_pretrained(place, config=config, revision=revision, use_safetensors=True, dtype="auto")
    except (OSError, ValueError) as problem:
        raise InputError(
            f"cannot load the weights of {name!r}: {_first_line(problem)} Only safetensors are opened, since pickled "
            "weights can run code; convert them with transformers' save_pretrained"
        ) from None
    wide = torch.float32 if model.dtype in (torch.float16, torch.bfloat16) else model.dtype
    return model.to(_as_dtype(dtype) if dtype is not None else wide).eval(), _open_processor(place, auto, revision)


def _open_processor(place: str, auto: str, revision: str | None) -> Any:
    import transformers

    opener = transformers.AutoImageProcessor if "Image" in auto else transformers.AutoTokenizer
    try:
        return opener.from_pretrained(place, revision=revision)
    except (OSError, ValueError) as problem:
        kind = "image processor" if "Image" in auto else "tokenizer"
        raise InputError(f"the model is there, but its {kind} is not: {_first_line(problem)}") from None


def _unwrapped(model: Any, processor: Any) -> tuple[nn.Module, Any]:
    """A model and its processor out of a pair or a pipeline."""
    if isinstance(model, tuple):
        if len(model) != 2:
            raise InputError(f"expected (model, processor), but got a tuple of {len(model)}")
        model, processor = model
    if hasattr(model, "model") and hasattr(model, "preprocess"):  # a transformers pipeline
        pipeline = model
        model = pipeline.model
        parts = [getattr(pipeline, kind, None) for kind in ("tokenizer", "image_processor", "processor")]
        processor = processor or next((part for part in parts if part is not None), None)
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise InputError(
            f"cannot explain a {type(model).__name__}: give a name, a folder, a transformers model, "
            "(model, processor) or a pipeline"
        )
    return model, processor


def _zoo_path(name: str) -> str:
    if find_spec("clearhead_zoo") is None:
        raise InputError(f"zoo:{name} needs the zoo: pip install clearhead-zoo")
    import clearhead_zoo

    try:
        return str(clearhead_zoo.path(name))
    except (KeyError, ValueError) as problem:
        raise InputError(str(problem.args[0])) from None


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype={dtype!r} is not known: say float32, float64, float16 or bfloat16")
    return found


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(problem).__name__
