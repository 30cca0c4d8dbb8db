"""`load`: opens a model from a name, a folder or objects and returns an `Explainer`.

Only safetensors weights are opened, and no code from model repositories is run.
"""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from clearhead import zoo
from clearhead.adapters.base import ModelAdapter, find_adapter_class, format_supported_suffixes, make_adapter
from clearhead.adapters.custom.base import InputReader
from clearhead.errors import InputError, UnsupportedError
from clearhead.explainer import Explainer

#: The dtypes in which a model can be run and differentiated.
SUPPORTED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_DTYPE_NAMES = "float32, float64, float16 or bfloat16"
#: Half-precision weights of models with fewer parameters are converted to float32 by default, on every device.
MAX_FLOAT32_PARAMETERS = 1_000_000_000

#: Errors of transformers for files that are missing or damaged, or that need another package.
_LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def load(
    model: Any,
    processor: Any = None,
    *,
    readout: str | int | None = None,
    task: str | None = None,
    detector: Callable[[Any], tuple[Any, Any]] | None = None,
    device: str | torch.device | None = "auto",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    compiled: bool = False,
) -> Explainer:
    """Load a model and return an `Explainer` for it.

    Args:
        model: A zoo model ("zoo:sentiment"), a folder written by `save_pretrained`, a Hugging Face hub name, a
            transformers model, a pair (model, processor) or a pipeline. A PyTorch module of your own needs a reader as
            `processor`.
        processor: The tokenizer or processor of a model given as an object, or the `TokenReader` or `ImageReader` of a
            module of your own (docs/own-models.md).
        readout: Token position that the classifier reads: "first", "last", "mean" or an index. Needed for unknown
            architectures.
        task: "similarity" for a bare text encoder that compares two texts; `readout` is then its pooling.
        detector: Region detector for models that read image regions (LXMERT, VisualBERT): a function from a PIL image
            to features (region × feature) and boxes (region × 4: left, top, right, bottom, in pixels or as fractions).
        device: Where a model opened by name runs: "auto" (a CUDA GPU where there is one, otherwise the CPU), "cpu",
            "cuda:1" and so on. A model given as an object stays where it is, unless a device is named; then a copy of
            it is moved.
        dtype: The dtype of the weights, or "auto" for the stored one. By default, half-precision weights of models
            with fewer than one billion parameters are converted to float32, and larger models stay as stored.
        revision: Revision of a model of the hub.
        compiled: Whether passes that record nothing (those of shap, kernel-shap, lime and occlusion) use
            `torch.compile`, which takes a while the first time. Recorded passes never do, since hooks and attention
            capture run Python code inside the model.

    Returns:
        The explainer.

    Raises:
        InputError: If the model cannot be opened, or an option is invalid.
        UnsupportedError: If clearhead does not support the architecture.

    Example:
        >>> ex = clearhead.load("zoo:sentiment")  # doctest: +SKIP
        >>> ex = clearhead.load((model, tokenizer))  # doctest: +SKIP
    """
    # Checked before the model is opened, which can take a while.
    named_device = None if device in (None, "auto") else resolve_device(device)
    named_dtype = None if dtype in (None, "auto") else _parse_dtype(dtype)
    name = ""
    if isinstance(model, str | Path):
        name = str(model)
        model, processor = _open_pretrained(name, revision, processor, task)
        if not _is_immovable(model, device, dtype):
            model = model.to(resolve_device(device), resolve_dtype(dtype, model.dtype, _count_parameters(model)))
        model = model.eval()
    else:
        model, processor = _unwrap_model(model, processor)
        model_device, model_dtype = _get_device_and_dtype(model)
        is_moved = named_device is not None and not str(model_device).startswith(str(named_device))
        is_converted = named_dtype not in (None, model_dtype)
        # The caller's own model is not changed: a copy is.
        if (is_moved or is_converted) and not _is_immovable(model, device, dtype):
            model = copy.deepcopy(model).to(named_device or model_device, named_dtype or model_dtype)
    if isinstance(processor, InputReader):
        adapter: ModelAdapter = processor.adapter_class(model, processor, readout, name, is_compiled=compiled)
    else:
        adapter = make_adapter(model, processor, readout, name, detector, task, compiled)
    if detector is not None and "regions" not in adapter.input_names:
        raise InputError(
            f"{adapter.name} takes {' and '.join(adapter.input_names)}, but no regions: leave out detector="
        )
    adapter.check_return_dict()
    return Explainer(adapter)


def _open_pretrained(name: str, revision: str | None, processor: Any, task: str | None = None) -> tuple[Any, Any]:
    """Open the model and the processor of a zoo model, a folder or a hub name."""
    import transformers

    path = name
    if name.startswith("zoo:"):
        path = zoo.zoo_model_path(name.removeprefix("zoo:"))
    _check_model_path(name, path, revision)
    try:
        # The config is first read as plain data: opening it with AutoConfig can run the code that it names.
        config_dict, _ = transformers.PretrainedConfig.get_config_dict(path, revision=revision)
        if config_dict.get("auto_map"):
            raise UnsupportedError(
                f"{name!r} contains its own code (auto_map in its config.json), which clearhead never runs: if you "
                "trust the code, load the model with transformers and pass (model, processor)"
            )
        if not config_dict.get("model_type"):
            raise ValueError("it has no config.json with a model_type.")
        config = transformers.AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        for value in (config, *vars(config).values()):
            if isinstance(value, transformers.PretrainedConfig):
                value.return_dict = True  # a file may set False, but clearhead needs named outputs
    except _LOADING_ERRORS as error:
        if (Path(path) / "adapter_config.json").is_file():
            raise InputError(
                f"{name!r} contains adapters: load them into their base model with peft and pass that model"
            ) from None
        raise InputError(
            f"cannot open {name!r} as a model: {_format_first_line(error)} Specify a zoo model (see clearhead "
            "models), a folder written by save_pretrained, or a hub name"
        ) from None
    architecture = (getattr(config, "architectures", None) or ["model of unknown architecture"])[0]
    model_class = getattr(transformers, architecture, None)
    adapter_class = None
    if model_class is not None:
        adapter_class = find_adapter_class([cls.__name__ for cls in model_class.__mro__], task)
    if model_class is None or adapter_class is None:
        raise UnsupportedError(
            f"{name} is a {architecture}, which clearhead does not support: {format_supported_suffixes()}"
        )
    try:
        options = {"config": config, "revision": revision, "use_safetensors": True, "dtype": "auto"}
        model, report = model_class.from_pretrained(path, output_loading_info=True, trust_remote_code=False, **options)
    except _LOADING_ERRORS as error:
        raise InputError(
            f"cannot load the weights of {name!r}: {_format_first_line(error)} Only safetensors files are loaded, "
            "because unpickling can execute code; convert them with clearhead convert, or transformers' save_pretrained"
        ) from None
    if report["missing_keys"]:  # transformers initialises them randomly
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InputError(
            f"{name!r} lacks weights of {architecture} ({missing} …): it has not been trained for this task"
        )
    return model, processor or _open_processor(path, adapter_class.processor_class, revision)


def _check_model_path(name: str, path: str, revision: str | None) -> None:
    """Check a path before transformers, which takes everything that is not a folder for a hub name."""
    if os.path.isfile(path):
        raise InputError(f"{name!r} is a file: pass the folder that contains the model, as written by save_pretrained")
    if os.path.isdir(path):
        if revision is not None:
            raise InputError(f"revision={revision!r} is only for hub models, but {name!r} is a folder: leave it out")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise InputError(f"cannot open {name!r} as a model: there is no such folder")


#: The names of transformers' processor classes in messages.
_PROCESSOR_DESCRIPTIONS = {
    "AutoTokenizer": "tokenizer",
    "AutoImageProcessor": "image processor",
    "AutoFeatureExtractor": "feature extractor",
    "AutoProcessor": "processor",
}


def _open_processor(path: str, auto_class: str, revision: str | None) -> Any:
    """Load a tokenizer or processor; one without a vocabulary is an error."""
    import transformers

    description = _PROCESSOR_DESCRIPTIONS[auto_class]
    try:
        processor = getattr(transformers, auto_class).from_pretrained(path, revision=revision, trust_remote_code=False)
    except _LOADING_ERRORS as error:
        raise InputError(f"cannot load the model's {description}: {_format_first_line(error)}") from None
    # Where a tokenizer's files are missing, transformers creates one with an empty vocabulary.
    if description == "tokenizer" and len(processor) <= len(processor.all_special_ids):
        raise InputError(f"cannot load the model's {description}: {path!r} contains no vocabulary")
    return processor


def _unwrap_model(model: Any, processor: Any) -> tuple[nn.Module, Any]:
    """Split a (model, processor) pair or a pipeline into model and processor."""
    if isinstance(model, tuple):
        if len(model) != 2:
            raise InputError(f"expected (model, processor), but got a tuple of {len(model)}")
        model, processor = model
    if hasattr(model, "model") and hasattr(model, "preprocess"):  # a transformers pipeline
        pipeline = model
        model = pipeline.model
        names = ("processor", "tokenizer", "image_processor", "feature_extractor")
        candidates = [getattr(pipeline, name, None) for name in names]
        processor = processor or next((candidate for candidate in candidates if candidate is not None), None)
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InputError(
            "the model was compiled with torch.compile(model), so its attention cannot be captured: pass the original "
            "model (model._orig_mod), and set compiled=True to compile the passes that record no tensors"
        )
    if not isinstance(model, nn.Module) or not (isinstance(processor, InputReader) or hasattr(model, "config")):
        raise InputError(
            f"cannot explain an object of type {type(model).__name__}: pass a name, a folder, a transformers model, "
            "(model, processor), a pipeline, or your own module with clearhead.TokenReader or clearhead.ImageReader"
        )
    return model, processor


def _get_device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype of a model, by default those of its first floating-point weight."""
    weight = next((weight for weight in model.parameters() if weight.is_floating_point()), None)
    if weight is None:
        raise UnsupportedError(f"{type(model).__name__} has no weights")
    return getattr(model, "device", weight.device), getattr(model, "dtype", weight.dtype)


def _is_immovable(model: nn.Module, device: Any, dtype: Any) -> bool:
    """Return whether a model cannot be moved because it is quantised or distributed over devices by accelerate."""
    quantised = getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", False)
    if not quantised and getattr(model, "hf_device_map", None) is None:
        return False
    requested = [f"{name}=" for name, value in (("device", device), ("dtype", dtype)) if value not in (None, "auto")]
    if requested:
        reason = "quantised" if quantised else "distributed over devices (device_map)"
        raise InputError(
            f"{type(model).__name__} is {reason} and cannot be moved or converted: leave out {' and '.join(requested)}"
        )
    return True


def resolve_device(device: str | torch.device | None = "auto") -> torch.device:
    """Choose the device of a model opened by name: "auto" is a CUDA GPU where there is one, otherwise the CPU.

    Args:
        device: "auto" (None means the same), or a device by name, such as "cpu", "cuda:1" or "mps".

    Returns:
        The device.

    Raises:
        InputError: If the name is unknown, or the device cannot be used on this machine.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if device is None or device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _parse_device(device)


def resolve_dtype(dtype: str | torch.dtype | None, stored_dtype: torch.dtype, num_parameters: int) -> torch.dtype:
    """Choose the dtype of a model opened by name.

    Args:
        dtype: None for the default: float32 for half-precision weights of models with fewer than one billion
            parameters, otherwise as stored. "auto" for the stored dtype, or a dtype by name.
        stored_dtype: The dtype of the weights in the file.
        num_parameters: The number of parameters of the model.

    Returns:
        The dtype.

    Raises:
        InputError: If the name is unknown, or the dtype does not support gradients.

    Example:
        >>> resolve_dtype(None, torch.float16, num_parameters=110_000_000)
        torch.float32
        >>> resolve_dtype(None, torch.bfloat16, num_parameters=8_000_000_000)
        torch.bfloat16
    """
    if dtype == "auto":
        return stored_dtype
    if dtype is not None:
        return _parse_dtype(dtype)
    is_half = stored_dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if is_half and num_parameters < MAX_FLOAT32_PARAMETERS else stored_dtype


def _count_parameters(model: nn.Module) -> int:
    """Return the number of weights of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Convert a name or dtype to a torch dtype; one without gradients of real numbers is an error."""
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype):
        raise InputError(f"dtype={dtype!r} is not recognised: use {_DTYPE_NAMES}")
    if parsed not in SUPPORTED_DTYPES:
        raise InputError(f"dtype={str(dtype)!r} is not a supported floating-point dtype: use {_DTYPE_NAMES}")
    return parsed


def _parse_device(device: str | torch.device) -> torch.device:
    """Convert a name to a device, and allocate an empty tensor there to check that it is usable."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise InputError(f"device={str(device)!r} is not recognised: use auto, cpu, cuda, cuda:1 or mps") from None
    try:
        torch.empty(0, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise InputError(
            f"device={str(device)!r} cannot be used here: {_format_first_line(problem)} Use cpu instead"
        ) from None
    return parsed


def _format_first_line(error: Exception) -> str:
    """Return the first line of an error, with a full stop; the class name of one without a message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0].rstrip(".") + "."
