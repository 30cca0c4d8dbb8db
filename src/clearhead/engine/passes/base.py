"""`PassStrategy`: how the methods of one pass type are run; and what strategies have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from clearhead.capture.attention.tiling import KernelLog, TilingConfig
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Requirements, Tape
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.target_batch import TargetBatch, TargetValues
from clearhead.methods.base import Method
from clearhead.methods.pass_type import PassType

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities


@dataclass(frozen=True)
class CleanPass:
    """The pass at the input itself, which all methods share that need one.

    Attributes:
        tape: Its tape; `inputs` and `input_gradient` as the model has them, not by unit.
        values: The values of the targets.
        requires: The tensors that were recorded.
        kernel_log: The kernels of a tiled pass; None if attention was materialised or not captured.
    """

    tape: Tape
    values: TargetValues
    requires: Requirements
    kernel_log: KernelLog | None = None


@dataclass(frozen=True)
class PassContext:
    """What all passes over one batch share.

    Attributes:
        capabilities: What is known about the model, with its recorder.
        batch: The batch.
        tiling: Settings of tiled passes; None where attention is materialised or not captured.
    """

    capabilities: "ModelCapabilities"
    batch: TargetBatch
    tiling: TilingConfig | None = None

    @property
    def recorder(self) -> Recorder:
        """Runs the model."""
        return self.capabilities.recorder

    @property
    def self_test(self) -> SelfTest:
        """Result of the recorder's self-test."""
        assert self.recorder.self_test is not None
        return self.recorder.self_test


@dataclass(frozen=True)
class PassCount:
    """Passes of one kind that a strategy runs over a batch.

    Attributes:
        purpose: What they are for.
        method_runs: The methods that need them.
        forward: Number of forward passes.
        backward: Number of backward passes.
        rows: Largest number of inputs in one pass.
        num_inputs: Number of inputs of all passes together; None for `forward` × `rows`.
        requires: The tensors that are recorded.
        is_at_most: Whether the numbers are upper bounds, because later passes depend on the results of earlier ones.
    """

    purpose: str
    method_runs: Sequence[MethodRun]
    forward: int
    backward: int = 0
    rows: int = 1
    requires: Requirements = frozenset()
    num_inputs: int | None = None
    is_at_most: bool = False


class PassStrategy(ABC):
    """Runs the methods of one pass type on a batch.

    Attributes:
        pass_type: The pass type.
        supports_tiling: Whether attention can be captured in tiles.
        uses_clean_pass: Whether methods read the clean pass.
    """

    pass_type: ClassVar[PassType]
    supports_tiling: ClassVar[bool] = False
    uses_clean_pass: ClassVar[bool] = False

    def get_clean_requirements(self, method_run: MethodRun) -> Requirements:
        """Return the tensors that a method needs from the clean pass, if it uses the clean pass."""
        return frozenset()

    def find_unsupported_reason(self, capabilities: "ModelCapabilities", method: Method) -> str | None:
        """Return why the passes of a method cannot be run on a model, after its self-test; None if they can."""
        return None

    def is_batch_safe(self, capabilities: "ModelCapabilities", method: Method) -> bool:
        """Whether a method computes the same for a sample in a batch as for the sample alone."""
        return True

    def during_clean_pass(
        self, context: PassContext, method_runs: Sequence[MethodRun]
    ) -> AbstractContextManager[object]:
        """Return the context in which the clean pass runs, for strategies that observe it."""
        return nullcontext()

    @abstractmethod
    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """Return the passes that `run` will make in addition to the clean pass."""

    @abstractmethod
    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Run the passes.

        Args:
            context: The batch, and how to run it.
            method_runs: The methods, all of this pass type.
            clean_pass: The clean pass; None if no method of the batch uses it.

        Returns:
            One result per method.
        """
