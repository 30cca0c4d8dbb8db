"""Looking on while a model runs, in order to say how far it is and to stop it; nothing on the model is changed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Stopped(BaseException):
    """A run was told to stop.

    No `Exception`: whoever tries whether a method can run must not take this for the answer that it cannot.
    """


class Yielded(BaseException):
    """A run makes room for others, and is taken up again later."""


@contextmanager
def watching(model: nn.Module, look: Callable[[int], None]) -> Iterator[None]:
    """Call `look` before every module of the model that runs in this thread, with how many inputs enter the model.

    What `look` raises ends the run at that place.
    """
    inside, thread = {id(module) for module in model.modules()}, threading.get_ident()
    first: list[nn.Module] = []  # the module that inputs enter by, embeddings or a convolution

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != thread or id(module) not in inside:
            return
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if given is not None and not first:
            first.append(module)
        look(len(given) if given is not None and given.dim() and module is first[0] else 0)

    handle = register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()
