"""Names, folders or objects → an `Explainer`. Safetensors only, no remote code."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from clearhead import zoo
from clearhead.adapters.base import Subject, kind_of, subject_for, what_is_explained
from clearhead.adapters.custom.base import Reader
from clearhead.errors import InputError, Refusal
from clearhead.explainer import Explainer

#: The number formats in which a model can be run and differentiated.
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NAMED = "float32, float64, float16 or bfloat16"

#: What transformers raises for files that are missing, damaged or in need of another package.
_PROBLEMS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def load(
    model: Any,
    processor: Any = None,
    *,
    readout: str | int | None = None,
    task: str | None = None,
    detector: Callable[[Any], tuple[Any, Any]] | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    compiled: bool = False,
) -> Explainer:
    """An `Explainer` for a zoo model ("zoo:sentiment"), a folder, a hub name, a model, (model, processor), a pipeline.

    A module of your own comes with a reader in place of a processor: `Tokens` or `Pictures` (docs/own-models.md).

    device: where to put the model; a model given as an object stays where it is, and a copy of it is moved
    dtype: as in transformers ("auto": as stored); by default a file's half-precision weights are widened on a CPU
    readout: which row speaks for the target, where clearhead does not know the architecture
    task: "similarity" for a bare text encoder that tells how alike two texts are (readout= says how it is pooled)
    detector: finds the regions of a picture, for models that read regions (LXMERT, VisualBERT): a function from a PIL
    picture to features (region × feature) and boxes (region × 4: left, top, right, bottom, in pixels or as fractions)
    compiled: whether passes that nobody records (those of shap, kernel-shap, lime and occlusion) go through
    torch.compile, which takes a while the first time; recorded passes never do, since hooks, and attention that is
    listened to, are Python in the middle of the model
    """
    place = None if device is None else _as_device(device)
    kind = None if dtype in (None, "auto") else _as_dtype(dtype)
    called = str(model) if isinstance(model, str | Path) else ""
    if isinstance(model, str | Path):
        model, processor = _open(str(model), revision, processor, task)
        place = place or torch.device("cpu")
        half = model.dtype in (torch.float16, torch.bfloat16)
        if kind is None and dtype is None and half and place.type == "cpu":
            kind = torch.float32
        if not _stays(model, device, dtype):
            model = model.to(place, kind or model.dtype)
        model = model.eval()
    else:
        model, processor = _unwrapped(model, processor)
        at, now = _place_of(model)
        moved = place is not None and not str(at).startswith(str(place))
        changed = moved or kind not in (None, now)  # otherwise the caller's own model stays where and as it is
        if changed and not _stays(model, device, dtype):
            model = copy.deepcopy(model).to(place or at, kind or now)
    if isinstance(processor, Reader):
        subject: Subject = processor.subject(model, processor, readout, called)
    else:
        subject = subject_for(model, processor, readout, called, detector, task)
    if detector is not None and "regions" not in subject.takes:
        raise InputError(f"{subject.name} takes {' and '.join(subject.takes)}, no regions: a detector is of no use")
    subject.check_answers()
    subject.compiled = compiled
    return Explainer(subject)


def _open(name: str, revision: str | None, processor: Any, task: str | None = None) -> tuple[Any, Any]:
    import transformers

    place = zoo.path(name.removeprefix("zoo:")) if name.startswith("zoo:") else name
    _check_place(name, place, revision)
    try:
        # Looked at as plain data first: to open a configuration can be to run the code that it names.
        told, _ = transformers.PretrainedConfig.get_config_dict(place, revision=revision)
        if told.get("auto_map"):
            raise Refusal(
                f"{name!r} brings code of its own (auto_map in its config.json), which clearhead never runs: if you "
                "trust it, load it with transformers yourself and give (model, processor)"
            )
        if not told.get("model_type"):
            raise ValueError("it has no config.json that names a kind of model.")
        config = transformers.AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
        for one in (config, *vars(config).values()):
            if isinstance(one, transformers.PretrainedConfig):
                one.return_dict = True  # a file may ask for bare tuples, and this model is ours
    except _PROBLEMS as problem:
        if (Path(place) / "adapter_config.json").is_file():
            raise InputError(f"{name!r} holds adapters: load them onto their model with peft and give that") from None
        raise InputError(
            f"cannot open {name!r} as a model: {_first_line(problem)} Give a zoo model (clearhead models lists them), "
            "a folder written by save_pretrained, or a hub name"
        ) from None
    architecture = (getattr(config, "architectures", None) or ["model of unknown architecture"])[0]
    opener = getattr(transformers, architecture, None)
    kind = None if opener is None else kind_of([cls.__name__ for cls in opener.__mro__], task)
    if opener is None or kind is None:
        raise Refusal(
            f"{name} is a {architecture}, which clearhead does not know how to explain: {what_is_explained()}"
        )
    try:
        how = {"config": config, "revision": revision, "use_safetensors": True, "dtype": "auto"}
        model, report = opener.from_pretrained(place, output_loading_info=True, trust_remote_code=False, **how)
    except _PROBLEMS as problem:
        raise InputError(
            f"cannot load the weights of {name!r}: {_first_line(problem)} Only safetensors are opened, since pickled "
            "weights can run code; convert them with clearhead convert, or transformers' save_pretrained"
        ) from None
    if report["missing_keys"]:  # transformers fills them in at random
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(
            f"{name!r} lacks weights of {architecture} ({missing} …): it has not been trained for this task"
        )
    return model, processor or _open_processor(place, kind.processor_class, revision)


def _check_place(name: str, place: str, revision: str | None) -> None:
    """What can be told of a name before transformers, which takes whatever is no folder for a name of the hub."""
    if os.path.isfile(place):
        raise InputError(f"{name!r} is a file: give the folder that holds the model, as save_pretrained wrote it")
    if os.path.isdir(place):
        if revision is not None:
            raise InputError(f"revision={revision!r} is for models of the hub, and {name!r} is a folder: leave it out")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise InputError(f"cannot open {name!r} as a model: there is no such folder")


#: What the classes that open processors open.
_PROCESSORS = {
    "AutoTokenizer": "tokenizer",
    "AutoImageProcessor": "image processor",
    "AutoFeatureExtractor": "feature extractor",
    "AutoProcessor": "processor",
}


def _open_processor(place: str, opener: str, revision: str | None) -> Any:
    import transformers

    kind = _PROCESSORS[opener]
    try:
        opened = getattr(transformers, opener).from_pretrained(place, revision=revision, trust_remote_code=False)
    except _PROBLEMS as problem:
        raise InputError(f"the model is there, but its {kind} is not: {_first_line(problem)}") from None
    # Where a tokenizer's files are missing, transformers makes one that knows no word at all.
    if kind == "tokenizer" and len(opened) <= len(opened.all_special_ids):
        raise InputError(f"the model is there, but its {kind} is not: there is no vocabulary in {place!r}")
    return opened


def _unwrapped(model: Any, processor: Any) -> tuple[nn.Module, Any]:
    """A model and its processor out of a pair or a pipeline."""
    if isinstance(model, tuple):
        if len(model) != 2:
            raise InputError(f"expected (model, processor), but got a tuple of {len(model)}")
        model, processor = model
    if hasattr(model, "model") and hasattr(model, "preprocess"):  # a transformers pipeline
        pipeline = model
        model = pipeline.model
        parts = [
            getattr(pipeline, kind, None) for kind in ("processor", "tokenizer", "image_processor", "feature_extractor")
        ]
        processor = processor or next((part for part in parts if part is not None), None)
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InputError(
            "the model went through torch.compile(model), in which nothing can be listened to: give it as it was "
            "before (model._orig_mod), with compiled=True for the passes that nobody records"
        )
    if not isinstance(model, nn.Module) or not (isinstance(processor, Reader) or hasattr(model, "config")):
        raise InputError(
            f"cannot explain a {type(model).__name__}: give a name, a folder, a transformers model, "
            "(model, processor), a pipeline, or a module of your own with clearhead.Tokens or clearhead.Pictures"
        )
    return model, processor


def _place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a model is, and in which number format: those of its first weight."""
    weight = next((part for part in model.parameters() if part.is_floating_point()), None)
    if weight is None:
        raise Refusal(f"{type(model).__name__} has no weights")
    return getattr(model, "device", weight.device), getattr(model, "dtype", weight.dtype)


def _stays(model: nn.Module, device: Any, dtype: Any) -> bool:
    """Whether a model cannot be moved: it is quantised, or accelerate has spread it over devices."""
    quantised = getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", False)
    if not quantised and getattr(model, "hf_device_map", None) is None:
        return False
    asked = [f"{name}=" for name, value in (("device", device), ("dtype", dtype)) if value not in (None, "auto")]
    if asked:
        kind = "quantised" if quantised else "spread over devices (device_map)"
        raise InputError(f"{type(model).__name__} is {kind} and stays as it is: leave {' and '.join(asked)} out")
    return True


def _as_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise InputError(f"dtype={dtype!r} is not known: say {_NAMED}")
    if found not in DTYPES:
        raise InputError(f"dtype={str(dtype)!r} holds no real numbers that gradients can be taken of: say {_NAMED}")
    return found


def _as_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InputError(f"device={str(device)!r} is not known: say cpu, cuda, cuda:1 or mps") from None
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise InputError(f"device={str(device)!r} cannot be used here: {_first_line(problem)} cpu always can") from None
    return found


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(problem).__name__
