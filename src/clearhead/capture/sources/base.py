"""`CaptureSource`: one way to capture the attention calls of a model."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar

from clearhead.capture.context import CaptureContext


class CaptureSource(ABC):
    """One way to capture attention calls. All sources watch every pass; each sees the calls of some modules.

    A new source is listed in `CAPTURE_SOURCES` of `capture/attention_calls.py`. The self-test checks what it captures.

    Attributes:
        name: Its name in certificates.
        shows_computation: Whether it sees queries, keys, values and outputs of a call, so that values can be recorded
            and maps can be computed tile by tile.
    """

    name: ClassVar[str]
    shows_computation: ClassVar[bool] = False

    @abstractmethod
    def capturing(self, context: CaptureContext) -> AbstractContextManager[None]:
        """Return a context manager: inside the `with`, calls are handed to `context.record_call`.

        Hooks and replaced functions must do nothing where `context.is_active` is false: another thread may run the
        model. Everything is as before after the `with`.

        Args:
            context: Names the model and its modules, and receives the calls.

        Returns:
            The context manager.

        Raises:
            UnsupportedError: The model's modules cannot be watched.
        """
