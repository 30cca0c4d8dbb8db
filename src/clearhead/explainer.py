"""The planner: the union of what methods ask for → the fewest passes → methods → explanations."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from clearhead.adapters.base import Given, How, Sample, Subject
from clearhead.capture.attention.tiling import Tiles
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder, Unbatched
from clearhead.capture.tape import Tape
from clearhead.engine.applicability import Applies, Applying
from clearhead.engine.assembly import Pass, Request, explanations_of
from clearhead.engine.attention_mode import check_kernel, check_streams, streams
from clearhead.engine.batching import batches_of, followed
from clearhead.engine.capabilities import Examined
from clearhead.engine.memory_budget import Budget, OverBudget, bytes_of
from clearhead.engine.passes import run
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import InputError, Refusal, unknown
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import REGISTRY, Method, methods_of
from clearhead.profiles import profile_named
from clearhead.targets import Target, TargetLike, make_target

MethodLike = str | Method
#: How many numbers the gradients of several targets may hold together (2 GiB in float32).
TOGETHER = 2**29
#: How many units the targets of a streaming pass may have together.
UNITS = 2**16


class Explainer:
    """A subject with everything needed to explain it. Made by `clearhead.load`."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.recorder = Recorder(
            subject.model,
            subject.streams_of,
            subject.lookups,
            subject.learned,
            subject.scope,
            subject.expected_calls,
        )
        self.examined = Examined(subject, self.recorder)

    def __reduce__(self) -> Any:  # for copies and pickles: locks cannot be copied, and the copy tests its own recorder
        return type(self), (self.subject,)

    def __repr__(self) -> str:
        return f"Explainer({self.subject.name!r}, {type(self.subject).__name__})"

    @property
    def labels(self) -> dict[int, str]:
        return dict(self.subject.labels)

    def explain(
        self,
        inputs: Any = None,
        method: MethodLike | Sequence[MethodLike] = "generic",
        target: TargetLike | Sequence[TargetLike] = None,
        *,
        text: Any = None,
        image: Any = None,
        audio: Any = None,
        regions: Any = None,
        answer: Any = None,
        max_new_tokens: int = 32,
        scale: str | None = None,
        profile: str | None = None,
        layers: tuple[int | None, int | None] | None = None,
        heads: Sequence[int] | None = None,
        rows: str | None = None,
        per: str | None = None,
        max_length: int | None = None,
        truncation: bool = True,
        truncation_side: str | None = None,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        batch_size: int = 8,
        memory: str | int | None = None,
        kernel: str | None = None,
        checkpoint: bool | None = None,
        seed: int = 0,
        progress: bool | Callable[[list[Any]], Iterable[Any]] = False,
    ) -> Any:
        """Which parts of the input made the model say that.

        One input and one method give one `Explanation`; a list of inputs a list; several methods a dict from method to
        that. Several methods share one forward and one backward pass.

        inputs: a text, a pair of texts (tuple), a picture (path, PIL, uint8 array), a mapping of model inputs; or a
        list of these
        text, image, audio, regions: by name, where a model takes several (lists go together pair by pair)
        answer: what a language model is to have said; without it, what it says (up to max_new_tokens)
        target: a label or index, `Contrast`, `MaskedWord`, a function of the output; a list means one per input
        scale: "logit" (default), "probability" or "log-odds" (log p/(1 − p) of a class, log p_a/p_b of a contrast); of
        two inputs' similarity "cosine" (default) or "logit"; relevance is not scale-free, so it is part of the result
        profile: the settings of an author's released code, quirks included; arguments given beside it win
        layers: half-open, negative from the end; heads: indices; rows: "all" for every row instead of the read-out
        per: "head" to keep every head's share, too, where the method has them (layers' shares are always kept)
        memory: how much passes may take beside the model itself, e.g. "2GiB": inputs, steps and points are then run so
        many at a time as fit; the result is the same
        kernel: how attention is recorded: "materialised" (whole maps, for short inputs) or "streaming" (in memory that
        grows with the length and not its square), by "tiles" in torch or by "triton" on a GPU; chosen by length and
        hardware if it is left out
        checkpoint: whether a streaming pass computes each layer again on the way back, so that it takes the memory of
        one layer (of encoder–decoders, generic and rollout set queries, keys and values of each aside); chosen by
        length if it is left out (True without a kernel means streaming)
        progress: True for a progress bar over the batches, or a function such as tqdm
        """
        check_kernel(kernel, checkpoint)
        raws, single = self._normalised(inputs, text=text, image=image, audio=audio, regions=regions)
        given = methods_of(method)
        options = {"layers": layers, "heads": heads, "rows": rows}
        methods = [one.defaults(**options) for one in given]
        authors = profile_named(profile, self.subject)
        ignored = None
        if authors is not None:
            ignored = target if authors.ignored([method.name for method in methods], target) else None
            methods = [authors.applied(method) for method in methods]
            target, scale = authors.asked([method.name for method in methods], target, scale)
        _check_per(per, methods)
        padding = authors is not None and authors.padding
        how = How(max_length, truncation, _side(truncation_side), tokens, answer, max_new_tokens, padding)
        hows = how.each(len(raws))
        samples = list(self._read(raws, hows))
        single = single and len(samples) == 1
        targets = _targets(target, self._scale(scale), len(samples))
        samples = [self.subject.completed(sample, wanted) for sample, wanted in zip(samples, targets, strict=True)]
        if authors is not None and authors.prepare is not None:
            prepared = [authors.prepare(self.subject, s, t) for s, t in zip(samples, targets, strict=True)]
            samples, targets = [s for s, _ in prepared], [t for _, t in prepared]
        results: list[list[AnyExplanation] | None] = [None] * len(samples)
        batches = list(batches_of(samples, batch_size))
        request = Request(methods, how, per, seed, authors, ignored, kernel, checkpoint)
        budget = None if memory is None else Budget(bytes_of(memory))
        for places in followed(batches, progress):
            found = self._within(budget, [samples[i] for i in places], [targets[i] for i in places], request)
            for i, explanations in zip(places, found, strict=True):
                results[i] = explanations
        whole = [result for result in results if result is not None]
        if len(whole) < len(results):
            raise InputError("progress= must hand on every batch that it is given, as tqdm does, and left some out")
        by_method = [[result[m] for result in whole] for m in range(len(methods))]
        shaped = [explanations[0] if single else explanations for explanations in by_method]
        if isinstance(method, str | Method):
            return shaped[0]
        return {str(one): part for one, part in zip(given, shaped, strict=True)}

    @torch.inference_mode(False)
    def record(
        self,
        inputs: Any = None,
        asks: str | Iterable[str] = (),
        target: TargetLike | Sequence[TargetLike] = None,
        *,
        text: Any = None,
        image: Any = None,
        audio: Any = None,
        regions: Any = None,
        answer: Any = None,
        scale: str | None = None,
        max_length: int | None = None,
        truncation: bool = True,
        truncation_side: str | None = None,
    ) -> Tape:
        """The tape of one recorded pass, for anyone: every call with what was asked for.

        Inputs, targets and how a text is cut are those of `explain`; `tape.truncated_tokens` says what was cut off.
        """
        how = How(max_length, truncation, _side(truncation_side), None, answer)
        streams = {"text": text, "image": image, "audio": audio, "regions": regions}
        plan = self._planned(inputs, target, how, scale, **streams)
        return plan.arranged(self.recorder.record(plan.batch, plan.value, asks, leaves=plan.leaves))

    def _planned(self, inputs: Any, target: Any, how: How, scale: str | None = None, **streams: Any) -> Plan:
        """All inputs with their targets in one batch."""
        raws, _ = self._normalised(inputs, **streams)
        samples = list(self._read(raws, how.each(len(raws))))
        wanted = _targets(target, self._scale(scale), len(samples))
        samples = [self.subject.completed(sample, one) for sample, one in zip(samples, wanted, strict=True)]
        self.examined.test(samples)
        targets = [self.subject.steps(sample, one) for sample, one in zip(samples, wanted, strict=True)]
        if len({len(own) for own in targets}) > 1:
            raise InputError("inputs with different numbers of targets have no tape in common: record them one by one")
        return Plan(self.subject, samples, targets)

    def methods(self) -> Applying:
        """Every registered method: whether it applies to this model, what it costs, and why not; a list of lines that
        shows itself as a table."""
        problem = None
        try:
            self.examined.test(self.subject.samples(self.subject.example(), How()))
        except Refusal as refusal:
            problem = str(refusal)
        lines = Applying()
        for name in sorted(REGISTRY):
            declaration = REGISTRY[name].declaration
            why_not = problem or self.examined.why_not(Method(name)) or ""
            lines.append(Applies(name, declaration.family, declaration.cost, not why_not, why_not, declaration.note))
        return lines

    def _normalised(self, inputs: Any, **streams: Any) -> tuple[list[Any], bool]:
        """A list of raw inputs, and whether there was one alone."""
        self.subject.check_answers()
        takes, name = self.subject.takes, self.subject.name
        named = {stream: value for stream, value in streams.items() if value is not None}
        wanted = " and ".join(takes)
        if named:
            strange = [stream for stream in named if stream not in takes]
            if inputs is not None or strange:
                given = ", ".join(f"{stream}=" for stream in strange or named)
                raise InputError(f"{name} takes {wanted}, but was given {given}")
            if len(takes) > 1:
                return _paired(named, self.subject.is_one)
            inputs = named[takes[0]]
        if inputs is None:
            raise InputError(f"nothing to explain: give {wanted}")
        single = not isinstance(inputs, list) or (bool(inputs) and self.subject.is_one(inputs))
        raws = [inputs] if single else inputs
        if not raws:
            raise InputError("nothing to explain: the list is empty")
        return raws, single

    def _scale(self, given: str | None) -> str:
        scales = self.subject.scales
        if given is not None and given not in scales:
            raise unknown("scale", given, scales)
        return given or scales[0]

    def _read(self, raws: Sequence[Any], hows: Sequence[How]) -> Iterator[Sample]:
        for i, (raw, how) in enumerate(zip(raws, hows, strict=True)):
            try:
                yield from self.subject.samples(raw, how)
            except InputError as problem:
                raise InputError(f"input {i}: {problem}") if len(raws) > 1 else problem from None

    def _within(
        self, budget: Budget | None, samples: list[Sample], targets: list[Target], request: Request
    ) -> list[list[AnyExplanation]]:
        """All methods on one batch, or on parts of it that the budget has room for."""
        if budget is None:
            return self._batch(samples, targets, request)
        kinds = {method.declaration.kind for method in request.methods}
        found: list[list[AnyExplanation]] = []
        while len(found) < len(samples):
            left = slice(len(found), None)
            width = max(sum(map(len, sample.axes.values())) for sample in samples[left])
            room = budget.room(kinds, width)
            part = slice(len(found), len(found) + room)
            try:
                with budget.batch(kinds, width, self.subject.device):
                    found += self._batch(samples[part], targets[part], request, room)
            except OverBudget:
                budget.shrink()
        return found

    @torch.inference_mode(False)  # what is made in inference mode cannot be folded into outside of it
    def _batch(
        self, samples: list[Sample], targets: list[Target], request: Request, rows: int | None = None
    ) -> list[list[AnyExplanation]]:
        """All methods on one batch, in one pass (or a few, where many targets would not fit into memory together).

        rows: how many samples and targets of them a pass may have
        """
        tested = self.examined.test(samples)
        for method in request.methods:
            if reason := self.examined.why_not(method):
                raise Refusal(f"{method.name} cannot explain {self.subject.name}: {reason}")
            if request.profile is not None:
                request.profile.check_depth(method, tested.min_layers, self.subject.name)
        apart = self.subject.counts_by_length or not all(map(self.examined.keeps_apart, request.methods))
        if len(samples) > 1 and apart:
            return [self._batch([s], [t], request)[0] for s, t in zip(samples, targets, strict=True)]
        steps = [self.subject.steps(sample, target) for sample, target in zip(samples, targets, strict=True)]
        if any(len(own) > 1 for own in steps) and any(method.option("rows") for method in request.methods):
            raise InputError("rows='all' is for one target, and there are several: choose one, as Generated(0)")
        tried = Plan(self.subject, [self.examined.sample], [[Target(lambda output: output)]])
        streaming = streams(self.recorder, tried, samples, request.methods, request.kernel, request.checkpoint)
        passes = self._passes(samples, steps, request, tested, streaming, rows)
        return explanations_of(samples, [len(own) for own in steps], passes, request, tested)

    def _passes(
        self,
        samples: list[Sample],
        steps: Sequence[Sequence[Target]],
        request: Request,
        tested: SelfTest,
        streaming: Tiles | None,
        rows: int | None,
    ) -> list[Pass]:
        """So many targets at a time as there is room for; one at a time where a streaming pass can do no more.

        Where one method needs whole maps, there must be room for those of all targets.
        """
        maps = streaming is None or not self._all_stream(samples, steps, request, tested)
        if streaming is not None:
            units = sum(max(len(sample.axes[stream]) for sample in samples) for stream in samples[0].axes)
            # layers that are computed again are so for one target at a time
            most = len(samples) * (1 if streaming.checkpoint else max(1, UNITS // (units * len(samples))))
            rows = most if rows is None else min(rows, most)
        try:
            return self._each_pass(
                samples, self._chunks(steps, samples, tested, rows, maps), request, tested, streaming
            )
        except Unbatched:
            chunks = self._chunks(steps, samples, tested, len(samples), maps)
            return self._each_pass(samples, chunks, request, tested, streaming)

    def _each_pass(
        self,
        samples: list[Sample],
        chunks: Iterable[list[list[Target]]],
        request: Request,
        tested: SelfTest,
        streaming: Tiles | None,
    ) -> list[Pass]:
        done: list[Pass] = []
        for targets in chunks:
            if done:
                done[-1].fetch()  # a GPU holds the scores of one pass at a time
            done.append(self._pass(samples, targets, request, tested, streaming))
        return done

    def _all_stream(
        self, samples: list[Sample], steps: Sequence[Sequence[Target]], request: Request, tested: SelfTest
    ) -> bool:
        """Whether no method needs whole maps, with its options; that matters where there are several targets."""
        if all(len(own) == 1 for own in steps):
            return True
        first = Plan(self.subject, samples[:1], [[steps[0][0]]])
        return all(Reading(method, first, tested).streams for method in request.methods)

    def _pass(
        self,
        samples: list[Sample],
        targets: list[list[Target]],
        request: Request,
        tested: SelfTest,
        streaming: Tiles | None,
    ) -> Pass:
        cut = [self.subject.cut(sample, own) for sample, own in zip(samples, targets, strict=True)]
        plan = Plan(self.subject, cut, targets, request.seed, streaming)
        readings = [Reading(method, plan, tested) for method in request.methods]
        if request.kernel not in (None, "materialised"):
            check_streams(readings)
        if any(reading.any_fold.reads_the_readout for reading in readings):
            self.examined.check_readouts(plan, request)
        return Pass(plan, readings, run(self.recorder, plan, readings, tested), heads=request.per == "head")

    def _chunks(
        self,
        steps: Sequence[Sequence[Target]],
        samples: Sequence[Sample],
        tested: SelfTest,
        rows: int | None,
        maps: bool,
    ) -> Iterator[list[list[Target]]]:
        """The targets of each sample, so many at a time that their gradients fit into memory together."""
        most = max(len(own) for own in steps)
        widest = {stream: max(len(sample.axes[stream]) for sample in samples) for stream in samples[0].axes}
        cells = sum(widest[place.query_stream] * widest[place.key_stream] * place.heads for place in tested.places)
        room = max(1, TOGETHER // max(1, cells * len(samples))) if maps else most
        room = room if rows is None else max(1, min(room, rows // len(samples)))
        size = min(room, self.subject.together(samples) or most)
        for start in range(0, most, size):
            stop = min(start + size, most)
            # samples with fewer targets repeat their last: what is computed for it is not used
            yield [[own[min(step, len(own) - 1)] for step in range(start, stop)] for own in steps]


def _paired(named: dict[str, Any], is_one: Callable[[list[Any]], bool]) -> tuple[list[Given], bool]:
    """Lists of one length go together pair by pair; what is no list (or one conversation) goes with each."""
    lists = {stream: value for stream, value in named.items() if isinstance(value, list)}
    counts = {stream: len(value) for stream, value in lists.items() if not (value and is_one(value))}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise InputError(
            f"lists of inputs must be of one length, but are {counts}: they go pair by pair, so give every pair"
        )
    count = next(iter(counts.values()), 1)
    raws = [Given(**{s: value[i] if s in counts else value for s, value in named.items()}) for i in range(count)]
    return raws, not counts


def _check_per(per: str | None, methods: Sequence[Method]) -> None:
    if per not in (None, "head"):
        raise InputError(f"per={per!r} is not known: say per='head' for every head's share, or leave it out")
    if per == "head" and not any(method.declaration.has_head_shares for method in methods):
        with_it = ", ".join(sorted(name for name, cls in REGISTRY.items() if cls.declaration.has_head_shares))
        given = ", ".join(method.name for method in methods)
        raise InputError(f"per='head', but {given} is no sum over heads: methods that are: {with_it}")


def _targets(given: Any, scale: str, count: int) -> list[Target]:
    if isinstance(given, list):
        if len(given) != count:
            raise InputError(f"target= names {len(given)} targets for {count} inputs")
        return [make_target(one, scale) for one in given]
    return [make_target(given, scale)] * count


def _side(side: str | None) -> str | None:
    if side not in (None, "left", "right"):
        raise InputError(f"truncation_side={side!r} is not known: say 'left' or 'right'")
    return side
