"""What is known of a subject before it is explained: which methods can speak for it, and which rows of its maps do."""

from collections.abc import Mapping, Sequence
from importlib import import_module

import torch

from clearhead.adapters.base import How, Sample, Subject
from clearhead.capture.attention.tiling import Tiles
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import ALONG_UNITS, GRADIENTS
from clearhead.engine import passes
from clearhead.engine.assembly import Request
from clearhead.engine.attention_mode import LIMIT, longest, rows_reached
from clearhead.engine.passes.modified_backward import trial
from clearhead.engine.target_batch import Plan
from clearhead.errors import Refusal
from clearhead.methods.base import ACROSS, Method
from clearhead.targets import Target


class Examined:
    """A subject and its recorder, and what was seen when the recorder was tested on one sample.

    sample: that sample; lengths: of its streams; rounds: whether torch has put layers of whole numbers into the model
    """

    def __init__(self, subject: Subject, recorder: Recorder) -> None:
        self.subject, self.recorder = subject, recorder
        self._tested = self._classes_checked = False

    def test(self, samples: Sequence[Sample]) -> SelfTest:
        """Test the recorder on one sample, the first time it is needed."""
        self.subject.check_answers()
        with self.recorder.lock:  # two threads may come with samples of different lengths
            if not self._tested:
                # Whole maps are compared, so the input is a short one where there is one.
                if longest(samples[:1]) > LIMIT:
                    samples = self.subject.samples(self.subject.example(), How())
                plan = Plan(self.subject, samples[:1], [[Target(lambda output: output)]])
                self.sample = samples[0]
                self.rounds = any(".quantized" in type(module).__module__ for module in self.subject.model.modules())
                self.lengths = {stream: len(axis) for stream, axis in samples[0].axes.items()}
                self.recorder.test(plan.batch, plan.leaves, self.subject.padded(samples[0]))
                self._tested = True
        assert self.recorder.tested is not None
        return self.recorder.tested

    def why_not(self, method: Method) -> str | None:
        """Why a method cannot speak for this model; None if it can."""
        tested = self.recorder.tested
        assert tested is not None
        asks, name = method.declaration.asks, type(self.subject.model).__name__
        package, extra = method.declaration.package, method.declaration.extra
        if package and not _installed(package):
            return f"it needs the package {package}, which is not installed: pip install 'clearhead[{extra}]'"
        if tested.path != "interface" and asks & {"values", "output_projection"}:
            return f"{name} ignores transformers' attention interface, so its values cannot be recorded"
        if reason := self.subject.why_not(method.name):
            return reason
        if asks & GRADIENTS.keys() and self.rounds:
            return f"{name} is quantised by torch, whose layers pass no gradients on; methods that take units away do"
        if asks & ALONG_UNITS:
            if reason := self.subject.why_no_attention():
                return reason
            if tested.mixes:
                return (
                    f"in {name} positions see each other past the attention, too (convolutions, recurrences), which "
                    "its maps do not show; gradients of the input do"
                )
            if not tested.vectors and asks & {"block_input", "hidden_state"}:
                return f"the layers of {name} do not hand on one vector for each unit, which it reads"
            if tested.crosses and method.name not in ACROSS:
                with_it = ", ".join(sorted(ACROSS))
                return f"in {name} streams look at each other, which it has no rule for; methods that have: {with_it}"
            for place in tested.places:
                queries, keys = (self.lengths.get(s, 0) for s in (place.query_stream, place.key_stream))
                if place.shape != (1, queries, keys):
                    return (
                        f"the attention of {name} does not run over its {keys} units: one call has {place.shape[0]} × "
                        f"{place.shape[1]} queries and {place.shape[2]} keys (windows, or a shrinking grid), so rows "
                        "of one layer are not the columns of the next"
                    )
        if tested.crosses and method.option("rows") == "all":
            return f"rows='all' is for streams that look at themselves alone, and in {name} one looks at another"
        if "rows" in method.declaration.has and self.subject.readout is None:
            return f"no row of the attention of {name} speaks for the target"
        return passes.why_not(self.recorder, self.subject, self.sample, method)

    def keeps_apart(self, method: Method) -> bool:
        """Whether a method computes the same for a sample in a batch as for the sample by itself."""
        by_rules = method.kind == "rules"
        return not by_rules or trial(self.recorder, self.subject, self.sample, method).keeps_apart

    def check_readout(self, sample: Sample, target: Target, streaming: Tiles | None = None) -> bool:
        """The rows of the last layer that reach the target must be the rows that are read.

        True if that was seen; False if no row reaches the target, so that nothing could be seen.
        """
        read = self.subject.readouts(sample, target)
        seen = [self._check_rows(sample, target, stream, rows, streaming) for stream, rows in read.items()]
        return bool(seen) and all(seen)

    def _check_rows(
        self, sample: Sample, target: Target, stream: str, rows: Mapping[int, float], streaming: Tiles | None
    ) -> bool:
        tested, plan = self.test([sample]), Plan(self.subject, [sample], [[target]], streaming=streaming)
        last = max(i for i, place in enumerate(tested.places) if place.query_stream == stream)
        used, read = rows_reached(self.recorder, plan, last), set(rows)
        if not used and not read:  # nobody reads this stream's last layer, as was said
            return True
        if not used and tested.path == "returned":
            name = type(self.subject.model).__name__
            raise Refusal(f"the target of {name} does not depend on the attention that it returns: it returns a copy")
        # Half precision can lose a row's gradient altogether; otherwise every row that is read must count.
        missing = bool(used) and used != read and self.subject.dtype in (torch.float32, torch.float64)
        if not used <= read or missing:
            raise Refusal(
                f"the read-out of {type(self.subject.model).__name__} is taken to be {self.subject.readout!r} (rows "
                f"{_some(read)}), but the target depends on rows {_some(used)} of the last layer: "
                "say which is right with load(..., readout=…): a kind such as 'mean', or the number of a row"
            )
        return bool(used)

    def check_readouts(self, plan: Plan, request: Request) -> None:
        """Once for classes, which all read the same rows; once a call for each function that is given."""
        for sample, target in zip(plan.samples, plan.targets, strict=True):
            if target.custom is None:
                if not self._classes_checked:
                    self._classes_checked = self.check_readout(sample, target, plan.streaming)
                request.checked[id(None)] = self._classes_checked
            elif id(target.custom) not in request.checked:
                request.checked[id(target.custom)] = self.check_readout(sample, target, plan.streaming)


def _installed(package: str) -> bool:
    try:
        import_module(package)
    except ImportError:
        return False
    return True


def _some(rows: set[int]) -> str:
    listed = sorted(rows)
    return ", ".join(map(str, listed[:6])) + (f", … ({len(listed)} in all)" if len(listed) > 6 else "")
