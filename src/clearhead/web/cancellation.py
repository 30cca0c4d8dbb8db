"""Progress reporting and cancellation of model passes, through a global forward pre-hook; the model is not changed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class RunCancelledError(BaseException):
    """A run was cancelled.

    Not an `Exception`: code that tests whether a method applies catches those, and must not take a cancellation for a
    negative result.
    """


class RunPreemptedError(BaseException):
    """A run is interrupted in favour of other jobs, and repeated later."""


@contextmanager
def watched_forward_calls(model: nn.Module, on_module_call: Callable[[int], None]) -> Iterator[None]:
    """Call a function before the forward pass of every module of the model in this thread.

    Args:
        model: Model to watch.
        on_module_call: Called with the number of inputs that enter the model, 0 except for the first module. An
            exception that it raises ends the run.
    """
    module_ids = {id(module) for module in model.modules()}
    thread_id = threading.get_ident()
    entry_modules: list[nn.Module] = []  # the first module that takes a tensor: embeddings or a convolution

    def pre_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread_id or id(module) not in module_ids:
            return
        num_inputs = 0
        if args and isinstance(args[0], Tensor):
            if not entry_modules:
                entry_modules.append(module)
            if module is entry_modules[0] and args[0].dim():
                num_inputs = len(args[0])
        on_module_call(num_inputs)

    handle = register_module_forward_pre_hook(pre_hook)
    try:
        yield
    finally:
        handle.remove()
