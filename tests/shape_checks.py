"""Runtime checks of shape annotations during the tests: a type checker for jaxtyping's import hook.

The hook passes every function of the checked modules to the type checker. Only annotations of tensors and arrays are
checked: `Float[Tensor, "batch head query key"]` or a union with one. mypy checks all other types.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import UnionType
from typing import Any, Union, get_args, get_origin

from jaxtyping import AbstractArray, install_import_hook

#: Without Triton kernels: Triton compiles them from their source, and cannot read a decorated function.
CHECKED_MODULES = (
    "clearhead.methods",
    "clearhead.capture.attention",
    "clearhead.capture.checks",
    "clearhead.capture.dispatch",
    "clearhead.capture.kernels.cpu",
    "clearhead.capture.kernels.fused_sdpa",
    "clearhead.capture.layers",
    "clearhead.capture.recorder",
    "clearhead.capture.sources",
    "clearhead.capture.tape",
    "clearhead.interventions",
    "clearhead.backward_rules",
)


def install_shape_checks() -> Any:
    """Install the checks for `CHECKED_MODULES`, which must not be imported yet; return the hook."""
    return install_import_hook(CHECKED_MODULES, "tests.shape_checks.check_shapes")


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that tensors of other shapes or dtypes than annotated raise a TypeError."""
    if not inspect.isfunction(function):
        return function
    hints = {name: hint for name, hint in inspect.get_annotations(function).items() if _find_array_types(hint)}
    if not hints:
        return function
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if name in hints:
                _check(name, value, hints[name])
        result = function(*args, **kwargs)
        if "return" in hints:
            _check("the result", result, hints["return"])
        return result

    return checked


def _check(name: str, value: Any, hint: Any) -> None:
    if not any(isinstance(value, array_type) for array_type in _find_array_types(hint)) and _is_array(value):
        raise TypeError(f"{name} is {value.dtype} {tuple(value.shape)}, annotated as {hint}")


def _find_array_types(hint: Any) -> list[Any]:
    """Return the array types of an annotation: itself, or the members of a union."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
    return [member for member in members if inspect.isclass(member) and issubclass(member, AbstractArray)]


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
