"""`ModelCapabilities`: what is known about a model: its self-test, which methods apply, which rows are read out."""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from clearhead.adapters.base import InputOptions, ModelAdapter
from clearhead.backward_rules.base import RuleSet
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.sources.returned_attentions import RETURNED_ATTENTIONS
from clearhead.capture.tape import GRADIENT_SOURCES, UNIT_ALIGNED_REQUIREMENTS
from clearhead.engine.attention_mode import MAX_FULL_LENGTH, compute_max_length, find_rows_with_gradient
from clearhead.engine.passes import STRATEGIES
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods.base import CROSS_STREAM_REGISTRY, Method
from clearhead.methods.pass_type import PassType
from clearhead.sample import Sample
from clearhead.targets import Target

if TYPE_CHECKING:
    from clearhead.engine.passes.modified_backward import RuleTrial

logger = logging.getLogger("clearhead")

#: A self-test that takes at least this long is reported to the user, who waits for it.
MIN_REPORTED_SECONDS = 1.0


class ModelCapabilities:
    """What is known about a model. Each fact is established the first time that it is needed.

    Args:
        adapter: The adapter of the model.
        recorder: The recorder of the model.

    Attributes:
        test_sample: The sample of the self-test.
        test_batch: This sample as a batch.
        rule_trials: Whether the model runs under propagation rules, by method and choice of rules.
        verified_rule_sets: The propagation rules under which the model was seen to compute the same output.
        reference_failure: Why DeepLIFT has no rule for the model; "" if it has, None if it was not tried.
        has_exact_kv_cache: Whether a cache of keys and values changes no output; None if it was not tried.
    """

    def __init__(self, adapter: ModelAdapter, recorder: Recorder) -> None:
        self.adapter = adapter
        self.recorder = recorder
        self.test_sample: Sample
        self.test_batch: TargetBatch
        self.rule_trials: dict[tuple[str, str | None], RuleTrial] = {}
        self.verified_rule_sets: set[RuleSet] = set()
        self.reference_failure: str | None = None
        self.has_exact_kv_cache: bool | None = None
        self._is_tested = False
        self._is_class_readout_checked = False

    def run_self_test(self, samples: Sequence[Sample]) -> SelfTest:
        """Test the recorder the first time it is needed, on the shortest of these samples.

        Args:
            samples: Samples of the model; an example of the adapter replaces them if all are long, because the test
                compares materialised maps.

        Returns:
            The result of the first call, whatever the samples of this one.

        Raises:
            UnsupportedError: The attention of this model cannot be captured exactly.
        """
        self.adapter.check_return_dict()
        with self.adapter.session.lock:  # two threads may come with samples of different lengths
            if not self._is_tested:
                sample = min(samples, key=lambda sample: compute_max_length([sample]))
                if compute_max_length([sample]) > MAX_FULL_LENGTH:
                    sample = self.adapter.make_samples(self.adapter.make_example_input(), InputOptions())[0]
                batch = TargetBatch(self.adapter, [sample], [[Target(lambda output: output)]])
                padded_inputs = self.adapter.make_padded_batch(sample)
                start = time.perf_counter()
                self.recorder.run_self_test(batch.model_inputs, batch.leaves, padded_inputs)
                _log_check_time(time.perf_counter() - start)
                self.test_sample = sample
                self.test_batch = batch
                self._is_tested = True
        assert self.recorder.self_test is not None
        return self.recorder.self_test

    @cached_property
    def has_torch_quantized_layers(self) -> bool:
        """Whether torch has put int8 layers into the model, which have no gradients."""
        return any(".quantized" in cls.__module__ for cls in self.adapter.session.topology.module_classes)

    def find_unsupported_reason(self, method: Method) -> str | None:
        """Return why a method cannot explain this model; None if it can.

        Args:
            method: The method with its options.

        Returns:
            The reason, as a sentence for users. A combined method applies if one of its components does.
        """
        requires = method.declaration.requires
        if reason := _find_missing_package(method):
            return reason
        if method.pass_type is PassType.COMBINED:
            reasons = {component.name: self.find_unsupported_reason(component) for component in method.components}
            if None in reasons.values():
                return None
            return "none of its components applies: " + "; ".join(f"{name}: {why}" for name, why in reasons.items())
        if reason := self._find_missing_tensors_reason(method):
            return reason
        if reason := self.adapter.find_unsupported_reason(method.name):
            return reason
        if requires & GRADIENT_SOURCES.keys() and self.has_torch_quantized_layers:
            return (
                f"{self.adapter.model_class_name} is quantised by torch, whose layers have no gradients; "
                "perturbation-based methods apply"
            )
        if requires & UNIT_ALIGNED_REQUIREMENTS and (reason := self._find_unaligned_reason(method)):
            return reason
        if reason := self._find_readout_reason(method):
            return reason
        return STRATEGIES[method.pass_type].find_unsupported_reason(self, method)

    @property
    def _self_test(self) -> SelfTest:
        assert self.recorder.self_test is not None
        return self.recorder.self_test

    def _find_missing_tensors_reason(self, method: Method) -> str | None:
        """Return why tensors that a method requires cannot be recorded."""
        needs_computation = method.declaration.requires & {"values", "output_projection"}
        if needs_computation and not self._self_test.capture_source.shows_computation:
            return (
                f"{self.adapter.model_class_name} ignores transformers' attention interface, so its values cannot be "
                "recorded"
            )
        return None

    def _find_unaligned_reason(self, method: Method) -> str | None:
        """Return why attention or layer states of this model cannot be read as one row per unit."""
        name = self.adapter.model_class_name
        self_test = self._self_test
        if reason := self.adapter.find_attention_unsupported_reason():
            return reason
        if self_test.mixes_outside_attention:
            return (
                f"positions in {name} also interact outside attention (convolutions, recurrences), which attention "
                "maps do not show; gradients with respect to the input do"
            )
        if not self_test.has_unit_vectors and method.declaration.requires & {"block_input", "hidden_state"}:
            return f"the layers of {name} do not pass on one vector per unit, which the method needs"
        if self_test.has_cross_attention and method.name not in CROSS_STREAM_REGISTRY:
            available = ", ".join(sorted(CROSS_STREAM_REGISTRY))
            return (
                f"streams of {name} attend to each other, for which the method has no rule; methods that have one: "
                f"{available}"
            )
        lengths = {stream: len(axis) for stream, axis in self.test_sample.axes.items()}
        for site in self_test.call_sites:
            num_queries, num_keys = (lengths.get(stream, 0) for stream in (site.query_stream, site.key_stream))
            if site.shape != (1, num_queries, num_keys):
                return (
                    f"the attention of {name} does not run over its {num_keys} units: one call has {site.shape[0]} × "
                    f"{site.shape[1]} queries and {site.shape[2]} keys (windows, or a shrinking grid), so the rows of "
                    "one layer are not the columns of the next"
                )
        return None

    def _find_readout_reason(self, method: Method) -> str | None:
        """Return why the rows that a method reads out do not exist."""
        name = self.adapter.model_class_name
        if self._self_test.has_cross_attention and method.get_option("rows") == "all":
            return f"rows='all' needs streams that attend only to themselves, but in {name} one attends to another"
        if "rows" in method.declaration.supports and self.adapter.readout is None:
            return f"the attention of {name} has no read-out position for the target"
        return None

    def is_batch_safe(self, method: Method) -> bool:
        """Whether a method computes the same for a sample in a batch as for the sample alone.

        Args:
            method: The method with its options.

        Returns:
            False if samples must be run one by one.
        """
        applicable = (c for c in method.components if self.find_unsupported_reason(c) is None)
        if not all(map(self.is_batch_safe, applicable)):
            return False
        if method.pass_type is PassType.COMBINED:
            return True
        return STRATEGIES[method.pass_type].is_batch_safe(self, method)

    def check_readouts(
        self, batch: TargetBatch, tiling: TilingConfig | None, checked_functions: dict[int, bool]
    ) -> None:
        """Check that the read-out rows influence the targets of a batch.

        Classes, which all have the same rows, are checked once per model; functions of the caller once per call.

        Args:
            batch: The batch.
            tiling: Settings of a tiled pass; None for materialised maps.
            checked_functions: Receives the results, by the id of the function (of None for classes).

        Raises:
            UnsupportedError: The target depends on other rows.
        """
        for sample, target in zip(batch.truncated_samples, batch.targets, strict=True):
            if target.function is None:
                if not self._is_class_readout_checked:
                    self._is_class_readout_checked = self.check_readout(sample, target, tiling)
                checked_functions[id(None)] = self._is_class_readout_checked
            elif id(target.function) not in checked_functions:
                checked_functions[id(target.function)] = self.check_readout(sample, target, tiling)

    def check_readout(self, sample: Sample, target: Target, tiling: TilingConfig | None = None) -> bool:
        """Check that the rows of the last layer that influence the target are the read-out rows.

        Args:
            sample: The sample.
            target: A single target.
            tiling: How attention is computed in tiles; None for materialised maps.

        Returns:
            False if no row influences the target, so that nothing was checked.

        Raises:
            UnsupportedError: The target depends on other rows.
        """
        readouts = self.adapter.find_readouts(sample, target)
        checked = [self._check_readout_rows(sample, target, stream, rows, tiling) for stream, rows in readouts.items()]
        return bool(checked) and all(checked)

    def _check_readout_rows(
        self, sample: Sample, target: Target, stream: str, rows: Mapping[int, float], tiling: TilingConfig | None
    ) -> bool:
        """Check the read-out rows of one stream."""
        self_test = self.run_self_test([sample])
        batch = TargetBatch(self.adapter, [sample], [[target]])
        last_call = max(i for i, site in enumerate(self_test.call_sites) if site.query_stream == stream)
        used_rows = find_rows_with_gradient(self.recorder, batch, last_call, tiling)
        readout_rows = set(rows)
        if not used_rows and not readout_rows:  # nothing reads the last layer of this stream, as the adapter says
            return True
        if not used_rows and self_test.capture_source is RETURNED_ATTENTIONS:
            raise UnsupportedError(
                f"the target of {self.adapter.model_class_name} does not depend on the attention that it returns: it "
                "returns a copy"
            )
        # Half precision can lose a row's gradient altogether; otherwise every read-out row must have one.
        has_full_precision = self.adapter.dtype in (torch.float32, torch.float64)
        is_missing = bool(used_rows) and used_rows != readout_rows and has_full_precision
        if not used_rows <= readout_rows or is_missing:
            raise UnsupportedError(
                f"the read-out of {self.adapter.model_class_name} is taken to be {self.adapter.readout!r} (rows "
                f"{_format_rows(readout_rows)}), but the target depends on rows {_format_rows(used_rows)} of the last "
                "layer: choose the correct read-out with load(..., readout=…): a name such as 'mean', or the index of "
                "a row"
            )
        return bool(used_rows)


def _log_check_time(seconds: float) -> None:
    """Log how long the self-test took, which makes the first explanation slower than later ones."""
    level = logging.INFO if seconds >= MIN_REPORTED_SECONDS else logging.DEBUG
    logger.log(level, "checking the model: %.1f s (once after loading)", seconds)


def _find_missing_package(method: Method) -> str | None:
    """Return which package a method needs that is not installed."""
    package = method.declaration.required_package
    if not package or find_spec(package) is not None:
        return None
    extra = method.declaration.pip_extra
    return f"it needs the package {package}, which is not installed: pip install 'clearhead[{extra}]'"


def _format_rows(rows: set[int]) -> str:
    """Format the first rows, and how many there are."""
    listed = sorted(rows)
    return ", ".join(map(str, listed[:6])) + (f", … ({len(listed)} in all)" if len(listed) > 6 else "")
