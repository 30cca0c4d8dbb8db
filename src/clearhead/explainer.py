"""The planner: the union of what methods ask for → the fewest passes → methods → explanations."""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import clearhead
from clearhead.errors import InputError, Refusal
from clearhead.explanation import Explanation
from clearhead.methods.base import REGISTRY, Fold, Frame, Method, Scores, layer_range
from clearhead.recording.recorder import Recorder, SelfTest
from clearhead.recording.tape import Asks, Call, Tape
from clearhead.subjects.base import How, Sample, Subject
from clearhead.targets import Target, TargetLike, make_target, probabilities

MethodLike = str | Method
#: Asks whose tensors lie along the units, so that they must have the units' length.
ALONG_UNITS: Asks = frozenset({"attention", "attention_gradient", "block_input", "block_input_gradient"})


@dataclass(frozen=True)
class Applies:
    """One line of `Explainer.methods()`: a method, what it costs, and why not, if not."""

    name: str
    family: str
    cost: str
    applies: bool
    why_not: str = ""


class Explainer:
    """A subject with everything needed to explain it. Made by `clearhead.load`."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.recorder = Recorder(subject.model)
        self._readout_checked = False

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
        scale: str = "logit",
        layers: tuple[int | None, int | None] | None = None,
        heads: Sequence[int] | None = None,
        rows: str | None = None,
        per: str | None = None,
        max_length: int | None = None,
        truncation: bool = True,
        truncation_side: str | None = None,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        batch_size: int = 8,
        seed: int = 0,
        progress: Callable[[Iterable[Any]], Iterable[Any]] | None = None,
    ) -> Any:
        """Which parts of the input made the model say that.

        One input and one method give one `Explanation`; a list of inputs a list; several methods a dict from method to
        that. Several methods share one forward and one backward pass.

        inputs: a text, a pair of texts (tuple), a picture (path, PIL, uint8 array), a mapping of model inputs, or a list
        target: a label or index, `Contrast`, `MaskedWord`, a function of the output; a list means one per input
        scale: "logit", "probability" or "log-odds"; relevance is not scale-free, so it is part of the result
        layers: half-open, negative from the end; heads: indices; rows: "all" for every row instead of the read-out
        per: "head" to keep every head's share, too (layers' shares are kept where the method has them)
        """
        raws, single = self._normalised(inputs, text, image)
        methods, one_method = _methods(method, layers=layers, heads=heads, rows=rows, per=per)
        how = How(max_length, truncation, _side(truncation_side), tokens)
        samples = [sample for raw in raws for sample in self.subject.samples(raw, how)]
        single = single and len(samples) == 1
        targets = _targets(target, scale, len(samples))
        results: list[list[Explanation] | None] = [None] * len(samples)
        batches = list(_batches(samples, batch_size))
        for places in progress(batches) if progress else batches:
            done = self._batch([samples[i] for i in places], [targets[i] for i in places], methods, seed)
            for i, explanations in zip(places, done, strict=True):
                results[i] = explanations
        by_method = [[result[m] for result in results if result is not None] for m in range(len(methods))]
        shaped = [explanations[0] if single else explanations for explanations in by_method]
        return shaped[0] if one_method else {str(m): part for m, part in zip(methods, shaped, strict=True)}

    def record(self, inputs: Any, asks: Iterable[str], target: TargetLike = None, *, scale: str = "logit") -> Tape:
        """The tape of one recorded pass, for anyone: every call with what was asked for."""
        raws, _ = self._normalised(inputs, None, None)
        samples = [sample for raw in raws for sample in self.subject.samples(raw, How())]
        plan = _Plan(self.subject, samples, _targets(target, scale, len(samples)))
        tape = self.recorder.record(plan.batch, plan.value, asks, leaf=plan.leaf, stream=self.subject.stream)
        return plan.arranged(tape)

    def methods(self) -> list[Applies]:
        """Every registered method: whether it applies to this model, what it costs, and why not."""
        problem = None
        try:
            self._test(self.subject.samples(self.subject.example(), How()))
        except Refusal as refusal:
            problem = str(refusal)
        lines = []
        for name in sorted(REGISTRY):
            declaration = REGISTRY[name].declaration
            why_not = problem or self._why_not(Method(name)) or ""
            lines.append(Applies(name, declaration.family, declaration.cost, not why_not, why_not))
        return lines

    def _normalised(self, inputs: Any, text: Any, image: Any) -> tuple[list[Any], bool]:
        streams = {"text": text, "image": image}
        named = {name: value for name, value in streams.items() if value is not None}
        if named:
            if inputs is not None or set(named) != {self.subject.stream}:
                given = ", ".join(f"{name}=" for name in named)
                raise InputError(f"{self.subject.name} takes one {self.subject.stream} input, but was given {given}")
            inputs = named[self.subject.stream]
        if inputs is None:
            raise InputError(f"nothing to explain: give a {self.subject.stream}")
        single = not isinstance(inputs, list)
        raws = [inputs] if single else inputs
        if not raws:
            raise InputError("nothing to explain: the list is empty")
        return raws, single

    def _test(self, samples: Sequence[Sample]) -> SelfTest:
        """Test the recorder on one sample, the first time it is needed."""
        if self.recorder.tested is None:
            plan = _Plan(self.subject, samples[:1], [Target(lambda output: output)])
            self.units_tested = len(samples[0].units)
            self.recorder.test(plan.batch, plan.leaf)
        assert self.recorder.tested is not None
        return self.recorder.tested

    def _why_not(self, method: Method) -> str | None:
        """Why a method cannot speak for this model; None if it can."""
        tested = self.recorder.tested
        assert tested is not None
        asks, name = method.declaration.asks, type(self.subject.model).__name__
        if tested.path != "interface" and asks & {"values", "output_projection"}:
            return f"{name} ignores transformers' attention interface, so its values cannot be recorded"
        if asks & ALONG_UNITS:
            expected = (1, self.units_tested, self.units_tested)
            odd = next((shape for shape in tested.shapes if shape != expected), None)
            if odd is not None:
                return (
                    f"the attention of {name} does not run over its {self.units_tested} units: one call has "
                    f"{odd[0]} × {odd[1]} queries and {odd[2]} keys (windows, or a shrinking grid), so rows of one "
                    "layer are not the columns of the next"
                )
        if "rows" in method.declaration.has and self.subject.readout is None:
            return f"no row of the attention of {name} speaks for the target"
        return None

    def _check_readout(self, sample: Sample, target: Target) -> None:
        """The rows of the last layer that reach the target must be the rows that are read."""
        plan = _Plan(self.subject, [sample], [target])
        last = self._test([sample]).calls - 1
        tape = self.recorder.record(
            plan.batch, plan.value, ("attention_gradient",), leaf=plan.leaf, layers=range(last, last + 1)
        )
        gradient = tape.calls[0].attention_gradient
        assert gradient is not None
        used = set(gradient[0].abs().sum((0, 2)).nonzero().flatten().tolist())
        read = set(self.subject.rows(sample, target))
        if not used <= read:
            raise Refusal(
                f"the read-out of {type(self.subject.model).__name__} is taken to be {self.subject.readout!r} (rows "
                f"{_some(read)}), but its output depends on rows {_some(used)} of the last layer: "
                "say which is right with load(..., readout=…)"
            )
        self._readout_checked = True

    def _batch(
        self, samples: list[Sample], targets: list[Target], methods: list[Method], seed: int
    ) -> list[list[Explanation]]:
        """All methods on one batch, in one pass."""
        tested = self._test(samples)
        for method in methods:
            if reason := self._why_not(method):
                raise Refusal(f"{method.name} cannot explain {self.subject.name}: {reason}")
        reads_rows = any("rows" in method.declaration.has for method in methods)
        if reads_rows and not self._readout_checked and targets[0].custom is None:
            self._check_readout(samples[0], targets[0])
        plan = _Plan(self.subject, samples, targets)
        folds = [_fold(method, plan, seed, tested.calls) for method in methods]
        asks: Asks = frozenset().union(*(method.declaration.asks for method in methods))
        ranges = [fold.frame.layers for fold in folds if fold.declaration.asks & ALONG_UNITS]
        span = range(min(r.start for r in ranges), max(r.stop for r in ranges)) if ranges else None

        def visit(call: Call) -> None:
            for method, fold in zip(methods, folds, strict=True):
                if call.layer in fold.frame.layers and fold.declaration.asks & ALONG_UNITS:
                    heads = method.option("heads")
                    fold.fold(call if heads is None else call.with_heads(_head_list(heads, call)))

        tape = self.recorder.run(
            plan.batch, plan.value, asks, visit, leaf=plan.leaf, layers=span, stream=self.subject.stream
        )
        tape = plan.arranged(tape)
        scores = [fold.finish(tape) for fold in folds]
        return [
            [self._explanation(plan, i, method, part, seed) for method, part in zip(methods, scores, strict=True)]
            for i in range(len(samples))
        ]

    def _explanation(self, plan: "_Plan", i: int, method: Method, part: Scores, seed: int) -> Explanation:
        sample, target, declaration = plan.samples[i], plan.targets[i], method.declaration
        length = len(sample.units)
        logits = plan.scores[i] if plan.scores is not None else None
        every_row = part.scores.shape[1] > 1
        matrix = part.scores[i, :length, :length] if every_row else None
        weights = plan.readout[i, :, :length].to(part.scores.dtype)
        row = (weights @ matrix)[0] if matrix is not None else part.scores[i, 0, :length]

        def cut(values: Tensor | None) -> Any:
            return None if values is None else values[i][..., :length].cpu().numpy()

        tested = self.recorder.tested
        assert tested is not None
        return Explanation(
            units=sample.units,
            scores=row.cpu().numpy(),
            method=str(method),
            target=target.description(logits, self.subject, float(plan.values[i])),
            prediction=_prediction(logits, self.subject),
            certificate={
                "capture_error": tested.capture_error,
                "rebuild_error": tested.rebuild_error,
                "recorder": tested.path,
                "readout": self.subject.readout,
                "readout_checked": self._readout_checked,
                "dtype": str(self.subject.dtype).removeprefix("torch."),
                "device": str(self.subject.device),
                "seed": seed,
                "versions": _versions(),
                "truncated_tokens": sample.dropped,
            },
            provenance={
                "model": self.subject.name,
                "model_class": type(self.subject.model).__name__,
                "method": method.name,
                "options": dict(method.options),
                "citation": declaration.citation,
                "signed": declaration.signed,
                "linear_in_target": declaration.linear_in_target and target.scale == "logit",
                "parts": declaration.parts,
            },
            base_value=None if part.base_value is None else float(part.base_value[i]),
            matrix=None if matrix is None else matrix.cpu().numpy(),
            per_layer=cut(part.per_layer),
            per_head=cut(part.per_head) if method.option("per") == "head" else None,
            picture=sample.picture,
        )


class _Plan:
    """One batch with its targets: what the recorder is called with, and what came out."""

    def __init__(self, subject: Subject, samples: Sequence[Sample], targets: Sequence[Target]) -> None:
        self.subject, self.samples, self.targets = subject, samples, targets
        self.batch = subject.collate(samples)
        self.leaf = subject.leaf if subject.leaf in self.batch else "inputs_embeds"
        self.scores: Float[Tensor, "batch label"] | None = None
        self.values: Float[Tensor, "batch"] = torch.empty(0)

    @property
    def readout(self) -> Float[Tensor, "batch 1 unit"]:
        width = max(len(sample.units) for sample in self.samples)
        wide = torch.float64 if self.subject.dtype == torch.float64 else torch.float32
        weights = torch.zeros(len(self.samples), 1, width, dtype=wide)
        for i, (sample, target) in enumerate(zip(self.samples, self.targets, strict=True)):
            rows = self.subject.rows(sample, target) if self.subject.readout is not None else {}
            for unit, weight in rows.items():
                weights[i, 0, unit] = weight
        return weights.to(self.subject.device)

    def value(self, output: Any) -> Float[Tensor, "batch"]:
        """One number per sample; a target of the caller's own sees the whole output."""
        own = {target.custom for target in self.targets if target.custom is not None}
        computed = {function: _own_value(function, output, len(self.samples)) for function in own}
        if len(own) == 0 or any(target.custom is None for target in self.targets):
            self.scores = self.subject.scores(output, self.samples, self.targets)
        elif getattr(output, "logits", None) is not None and self.subject.labels:
            self.scores = self.subject.scores(output, self.samples, self.targets)
        values = [
            computed[target.custom][i] if target.custom is not None else self._of_classes(target, i)
            for i, target in enumerate(self.targets)
        ]
        number = torch.stack(values)
        self.values = number.detach()
        self.scores = None if self.scores is None else self.scores.detach()
        return number

    def _of_classes(self, target: Target, i: int) -> Float[Tensor, ""]:
        assert self.scores is not None
        if self.scores.shape[1] == 1 and target.scale != "logit" and not self.subject.multi_label:
            raise InputError(f"the model has one output and no classes, so no {target.scale}: use scale='logit'")
        return target.value(self.scores[i], self.subject)

    def arranged(self, tape: Tape) -> Tape:
        """Embeddings or pixels as one vector per unit."""
        parts = {name: getattr(tape, name) for name in ("inputs", "input_gradient")}
        units = {name: self.subject.to_units(part, self.samples) for name, part in parts.items() if part is not None}
        return replace(tape, logits=self.scores, **units)

    def frame(self, seed: int) -> Frame:
        width = max(len(sample.units) for sample in self.samples)
        device = self.subject.device
        valid = torch.zeros(len(self.samples), width, dtype=torch.bool)
        special = torch.zeros_like(valid)
        axes = self.samples[0].units.places.shape[1]
        readout = self.readout
        places = torch.zeros(len(self.samples), width, axes, dtype=readout.dtype)
        for i, sample in enumerate(self.samples):
            units = sample.units
            valid[i, : len(units)] = True
            special[i, : len(units)] = torch.tensor(units.special)
            places[i, : len(units)] = torch.as_tensor(units.places, dtype=places.dtype)
        return Frame(
            readout=readout,
            valid=valid.to(device),
            special=special.to(device),
            seeds=tuple(sample.seed(seed) for sample in self.samples),
            places=places.to(device),
        )


def _fold(method: Method, plan: _Plan, seed: int, count: int) -> Fold:
    """A method, ready to visit the calls of one batch."""
    frame = plan.frame(seed)
    if method.option("rows") == "all":
        width = frame.valid.shape[1]
        every = torch.eye(width, dtype=frame.readout.dtype, device=frame.readout.device)
        frame = replace(frame, readout=every.expand(len(frame.valid), width, width))
    chosen = layer_range(method.option("layers", method.declaration.layers), count)
    return REGISTRY[method.name](frame=replace(frame, layers=chosen), **method.own_options)


def _methods(given: MethodLike | Sequence[MethodLike], **options: Any) -> tuple[list[Method], bool]:
    if options["rows"] not in (None, "all"):
        raise InputError(f"rows={options['rows']!r} is not known: leave it out for the read-out, or say rows='all'")
    if options["per"] not in (None, "layer", "head"):
        raise InputError(f"per={options['per']!r} is not known: say 'layer' or 'head'")
    one = isinstance(given, str | Method)
    names = [given] if one else list(given)  # type: ignore[arg-type, list-item]
    if not names:
        raise InputError("no method was given")
    methods = [name if isinstance(name, Method) else Method(name) for name in names]
    return [method.defaults(**options) for method in methods], one


def _targets(given: Any, scale: str, count: int) -> list[Target]:
    if isinstance(given, list):
        if len(given) != count:
            raise InputError(f"target= names {len(given)} targets for {count} inputs")
        return [make_target(one, scale) for one in given]
    return [make_target(given, scale)] * count


def _own_value(function: Callable[[Any], Tensor], output: Any, count: int) -> Float[Tensor, "batch"]:
    value = function(output)
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the target function must return one number per sample, ({count},), but returned {shape}")
    return value


def _batches(samples: Sequence[Sample], size: int) -> Iterator[list[int]]:
    """Samples of like length together, so that little is padded; pictures of one size."""
    if size < 1:
        raise InputError(f"batch_size={size}: it must be at least 1")

    def shape(i: int) -> tuple[Any, ...]:
        grid = samples[i].units.grid
        return (grid or (), tuple(sorted(samples[i].inputs)), len(samples[i].units))

    order = sorted(range(len(samples)), key=shape)
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) == size or shape(i)[:2] != shape(batch[0])[:2]):
            yield batch
            batch = []
        batch.append(i)
    yield batch


def _head_list(heads: Sequence[int], call: Call) -> list[int]:
    part = call.attention
    if part is None:
        return list(heads)
    count = part.shape[1]
    wrong = [head for head in heads if not -count <= head < count]
    if wrong or not heads:
        raise InputError(f"heads={list(heads)} is not possible: the model has {count} heads, counted from 0")
    return [head % count for head in heads]


def _prediction(logits: Float[Tensor, "label"] | None, subject: Subject) -> dict[str, Any]:
    """The five most likely labels."""
    if logits is None:
        return {}
    if len(logits) == 1 and not subject.multi_label:
        return {"label": subject.label_name(0), "index": 0, "value": float(logits[0])}
    p = probabilities(logits.double(), subject.multi_label)
    top = [
        {
            "label": subject.label_name(int(i)),
            "index": int(i),
            "probability": float(p[i]),
            "logit": float(logits[i]),
        }
        for i in p.topk(min(5, len(p))).indices
    ]
    first = top[0]
    return {"label": first["label"], "index": first["index"], "probability": first["probability"], "top": top}


def _versions() -> dict[str, str]:
    import transformers

    return {
        "clearhead": clearhead.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _side(side: str | None) -> str | None:
    if side not in (None, "left", "right"):
        raise InputError(f"truncation_side={side!r} is not known: say 'left' or 'right'")
    return side


def _some(rows: set[int]) -> str:
    listed = sorted(rows)
    return ", ".join(map(str, listed[:6])) + (f", … ({len(listed)} in all)" if len(listed) > 6 else "")


