"""What is known of a subject before it is explained: which methods can speak for it, and which rows of its maps do."""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from clearhead.adapters.base import InputOptions, ModelAdapter, Sample
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import GRADIENT_SOURCES, UNIT_ALIGNED_REQUIREMENTS
from clearhead.engine import passes
from clearhead.engine.assembly import BatchRequest
from clearhead.engine.attention_mode import MAX_FULL_LENGTH, compute_max_length, find_rows_with_gradient
from clearhead.engine.passes.modified_backward import get_rule_trial
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import UnsupportedError
from clearhead.methods.base import CROSS_STREAM_REGISTRY, Method
from clearhead.targets import Target


class ModelCapabilities:
    """A subject and its recorder, and what was seen when the recorder was tested on one sample.

    sample: that sample; lengths: of its streams; rounds: whether torch has put layers of whole numbers into the model
    """

    def __init__(self, adapter: ModelAdapter, recorder: Recorder) -> None:
        self.adapter, self.recorder = adapter, recorder
        self._self_test_done = self._class_readout_checked = False

    def run_self_test(self, samples: Sequence[Sample]) -> SelfTest:
        """Test the recorder on one sample, the first time it is needed."""
        self.adapter.check_return_dict()
        with self.adapter.session.lock:  # two threads may come with samples of different lengths
            if not self._self_test_done:
                # Whole maps are compared, so the input is a short one where there is one.
                if compute_max_length(samples[:1]) > MAX_FULL_LENGTH:
                    samples = self.adapter.make_samples(self.adapter.make_example_input(), InputOptions())
                plan = TargetBatch(self.adapter, samples[:1], [[Target(lambda output: output)]])
                self.test_sample = samples[0]
                self.has_torch_quantized_layers = any(
                    ".quantized" in type(module).__module__ for module in self.adapter.model.modules()
                )
                self.stream_lengths = {stream: len(axis) for stream, axis in samples[0].axes.items()}
                self.recorder.run_self_test(plan.model_inputs, plan.leaves, self.adapter.make_padded_batch(samples[0]))
                self._self_test_done = True
        assert self.recorder.self_test is not None
        return self.recorder.self_test

    def find_unsupported_reason(self, method: Method) -> str | None:
        """Why a method cannot speak for this model; None if it can."""
        tested = self.recorder.self_test
        assert tested is not None
        asks, name = method.declaration.requires, type(self.adapter.model).__name__
        package, extra = method.declaration.required_package, method.declaration.pip_extra
        if package and not _is_installed(package):
            return f"it needs the package {package}, which is not installed: pip install 'clearhead[{extra}]'"
        if tested.capture_source != "interface" and asks & {"values", "output_projection"}:
            return f"{name} ignores transformers' attention interface, so its values cannot be recorded"
        if reason := self.adapter.find_unsupported_reason(method.name):
            return reason
        if asks & GRADIENT_SOURCES.keys() and self.has_torch_quantized_layers:
            return f"{name} is quantised by torch, whose layers have no gradients; perturbation-based methods apply"
        if asks & UNIT_ALIGNED_REQUIREMENTS:
            if reason := self.adapter.find_attention_unsupported_reason():
                return reason
            if tested.mixes_outside_attention:
                return (
                    f"positions in {name} also interact outside attention (convolutions, recurrences), which attention "
                    "maps do not show; gradients with respect to the input do"
                )
            if not tested.has_unit_vectors and asks & {"block_input", "hidden_state"}:
                return f"the layers of {name} do not pass on one vector per unit, which the method needs"
            if tested.has_cross_attention and method.name not in CROSS_STREAM_REGISTRY:
                with_it = ", ".join(sorted(CROSS_STREAM_REGISTRY))
                return (
                    f"streams of {name} attend to each other, for which the method has no rule; methods that have one: "
                    f"{with_it}"
                )
            for place in tested.call_sites:
                queries, keys = (self.stream_lengths.get(s, 0) for s in (place.query_stream, place.key_stream))
                if place.shape != (1, queries, keys):
                    return (
                        f"the attention of {name} does not run over its {keys} units: one call has {place.shape[0]} × "
                        f"{place.shape[1]} queries and {place.shape[2]} keys (windows, or a shrinking grid), so the "
                        "rows of one layer are not the columns of the next"
                    )
        if tested.has_cross_attention and method.get_option("rows") == "all":
            return f"rows='all' needs streams that attend only to themselves, but in {name} one attends to another"
        if "rows" in method.declaration.supports and self.adapter.readout is None:
            return f"the attention of {name} has no read-out position for the target"
        return passes.find_pass_unsupported_reason(self.recorder, self.adapter, self.test_sample, method)

    def is_batch_safe(self, method: Method) -> bool:
        """Whether a method computes the same for a sample in a batch as for the sample by itself."""
        by_rules = method.pass_type == "rules"
        return not by_rules or get_rule_trial(self.recorder, self.adapter, self.test_sample, method).is_batch_safe

    def check_readout(self, sample: Sample, target: Target, tiling: TilingConfig | None = None) -> bool:
        """The rows of the last layer that reach the target must be the rows that are read.

        True if that was seen; False if no row reaches the target, so that nothing could be seen.
        """
        read = self.adapter.find_readouts(sample, target)
        seen = [self._check_readout_rows(sample, target, stream, rows, tiling) for stream, rows in read.items()]
        return bool(seen) and all(seen)

    def _check_readout_rows(
        self, sample: Sample, target: Target, stream: str, rows: Mapping[int, float], streaming: TilingConfig | None
    ) -> bool:
        tested, plan = self.run_self_test([sample]), TargetBatch(self.adapter, [sample], [[target]], tiling=streaming)
        last = max(i for i, place in enumerate(tested.call_sites) if place.query_stream == stream)
        used, read = find_rows_with_gradient(self.recorder, plan, last), set(rows)
        if not used and not read:  # nobody reads this stream's last layer, as was said
            return True
        if not used and tested.capture_source == "returned":
            name = type(self.adapter.model).__name__
            raise UnsupportedError(
                f"the target of {name} does not depend on the attention that it returns: it returns a copy"
            )
        # Half precision can lose a row's gradient altogether; otherwise every row that is read must count.
        missing = bool(used) and used != read and self.adapter.dtype in (torch.float32, torch.float64)
        if not used <= read or missing:
            raise UnsupportedError(
                f"the read-out of {type(self.adapter.model).__name__} is taken to be {self.adapter.readout!r} (rows "
                f"{_format_rows(read)}), but the target depends on rows {_format_rows(used)} of the last layer: choose "
                "the correct read-out with load(..., readout=…): a name such as 'mean', or the index of a row"
            )
        return bool(used)

    def check_readouts(self, batch: TargetBatch, request: BatchRequest) -> None:
        """Once for classes, which all read the same rows; once a call for each function that is given."""
        for sample, target in zip(batch.truncated_samples, batch.targets, strict=True):
            if target.function is None:
                if not self._class_readout_checked:
                    self._class_readout_checked = self.check_readout(sample, target, batch.tiling)
                request.readout_checks[id(None)] = self._class_readout_checked
            elif id(target.function) not in request.readout_checks:
                request.readout_checks[id(target.function)] = self.check_readout(sample, target, batch.tiling)


def _is_installed(package: str) -> bool:
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def _format_rows(rows: set[int]) -> str:
    listed = sorted(rows)
    return ", ".join(map(str, listed[:6])) + (f", … ({len(listed)} in all)" if len(listed) > 6 else "")
