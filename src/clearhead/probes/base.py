"""What every probe starts from: inputs made ready, a clean pass, which row is read, and what a scope reaches.

Scopes, from the single-query attention that the debate was about to all of it:

    S1  the row that is read, in the last layer        S2  the same row in every layer
    S3  all rows of one layer (or of some of its heads)  S4  all rows of all layers
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import How, Sample
from clearhead.adapters.custom.base import QUERY
from clearhead.adapters.decoder import Decoder
from clearhead.adapters.generation import Answered, Answering
from clearhead.adapters.masked_lm import MaskedLanguageModel
from clearhead.adapters.text import TextClassification
from clearhead.engine.batching import batches_of, followed
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError, Refusal, unknown
from clearhead.interventions.attention_patch import Patch, Replacing, Weights, patched
from clearhead.interventions.last_row import LastRow
from clearhead.targets import Target, make_target, probabilities
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: How many rows go through the last layer at a time.
ROWS = 4096
#: How exactly the last row alone must give the model's answer.
EXACT = {torch.float64: 1e-9, torch.float32: 1e-4}
SCOPES = ("S1", "S2", "S3", "S4")
Progress = bool | Callable[[list[Any]], Iterable[Any]]


@dataclass(frozen=True)
class Scope:
    """Which rows of which heads and layers are reached."""

    name: str = "S1"
    layer: int | None = None
    heads: tuple[int, ...] | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        return self.name + layer + ("" if self.heads is None else f", heads {', '.join(map(str, self.heads))}")

    def layers(self, count: int) -> list[int]:
        if self.name in ("S2", "S4"):
            return list(range(count))
        if self.layer is not None and not -count <= self.layer < count:
            raise InputError(f"layer={self.layer} is not possible: the model has {count} layers, counted from 0")
        return [(count - 1 if self.layer is None else self.layer) % count]

    @property
    def only_row(self) -> bool:
        """Whether it reaches the row that is read alone."""
        return self.name in ("S1", "S2")


def scope_of(name: str, layer: int | None = None, heads: Sequence[int] | None = None) -> Scope:
    if name not in SCOPES:
        raise unknown("scope", name, SCOPES)
    if layer is not None and name != "S3":
        raise InputError(
            f"layer={layer} is for scope S3, which is about one layer; {name} says itself which it reaches"
        )
    if layer is None and name == "S3":
        raise InputError("scope S3 is about one layer: say which with layer=")
    return Scope(name, layer, None if heads is None else tuple(heads))


class Probed:
    """A model and the inputs that it is probed on."""

    def __init__(
        self, ex: "Explainer", inputs: Any, target: Any = None, candidates: Sequence[str | int] | None = None
    ) -> None:
        self.ex, self.subject, self.recorder = ex, ex.subject, ex.recorder
        raws = inputs if isinstance(inputs, list) else [inputs]
        if not raws:
            raise InputError("nothing to probe: the list of inputs is empty")
        self.target = make_target(target)
        samples = [sample for raw in raws for sample in self.subject.samples(raw, How())]
        self.tested = ex.examined.test(samples)
        self.pools: bool = getattr(self.subject, "pools", False)
        #: The classes (or masked words) whose probabilities are compared, as shares of theirs; None for all.
        self.candidates = None if candidates is None else [self.subject.label_index(label) for label in candidates]
        if self.candidates is not None and len(set(self.candidates)) < 2:
            raise InputError("candidates= must name at least two different labels or words")
        self._refuse(samples[0])
        self.samples = [self.subject.cut(sample, [self.aim(sample)]) for sample in samples]
        ex.examined.check_readout(self.samples[0], self.aim(self.samples[0]))

    def _refuse(self, sample: Sample) -> None:
        name, subject = type(self.subject.model).__name__, self.subject
        pooled = self.pools and all(place.query_stream == QUERY for place in self.tested.places)
        if (len(sample.axes) > 1 or self.tested.crosses) and not pooled:
            raise Refusal(f"{name} has several streams, and probes are for models of one")
        if subject.regression:
            raise Refusal(f"{name} measures and has no classes, and probes compare probabilities of classes")
        if subject.readout is None:
            raise Refusal(f"no row of the attention of {name} speaks for its answer, and probes are about such rows")
        if subject.answers_whole if isinstance(subject, Answering) else len(subject.steps(sample, self.target)) > 1:
            raise Refusal(f"{name} gives several answers at once, and probes are about one")
        if reason := subject.why_no_attention():
            raise Refusal(reason)
        size = self.ex.examined.lengths[subject.stream]
        if any(place.shape != (1, 1 if pooled else size, size) for place in self.tested.places):
            raise Refusal(f"the attention of {name} does not run over its units in every layer")

    def aim(self, sample: Sample) -> Target:
        """What is asked of one input: of a prompt, the word that comes next."""
        return self.subject.steps(sample, self.target)[0] if isinstance(self.subject, Answering) else self.target

    def units(self, sample: Sample) -> Units:
        return sample.axes[self.subject.stream].parts[0]

    def check(self, scope: Scope) -> None:
        """Whether the model has these heads."""
        if scope.heads is not None and (not scope.heads or not all(0 <= head < self.heads for head in scope.heads)):
            raise InputError(
                f"heads={list(scope.heads)} is not possible: {self.subject.name} has {self.heads} heads, counted from 0"
            )

    @property
    def layers(self) -> int:
        return len(self.tested.places)

    @property
    def heads(self) -> int:
        return self.tested.places[-1].heads

    def batches(self, size: int, progress: Progress = False) -> Iterator[tuple[list[int], "Batch"]]:
        for places in followed(list(batches_of(self.samples, size)), progress):
            yield places, Batch(self, [self.samples[i] for i in places])

    def probabilities(self, output: Any, samples: Sequence[Sample]) -> Float[Tensor, "batch label"]:
        """The probabilities of all classes, or of the candidates among themselves."""
        scores = self.subject.scores(output, samples, [self.aim(sample) for sample in samples])
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return probabilities(scores if self.candidates is None else scores[:, self.candidates], self.multi_label)

    @property
    def multi_label(self) -> bool:
        return self.subject.multi_label

    def label(self, answer: Float[Tensor, "label"]) -> str:
        """What the most likely class is called."""
        best = int(answer.argmax())
        return self.subject.label_name(best if self.candidates is None else self.candidates[best])

    def rows(self, sample: Sample) -> dict[int, float]:
        """The rows of the last layer that are read, and how much each counts."""
        (rows,) = self.subject.readouts(sample, self.aim(sample)).values()
        return rows

    def row(self, sample: Sample) -> int:
        """The row of the last layer that is read."""
        rows = self.rows(sample)
        if len(rows) != 1:
            raise Refusal(
                f"{type(self.subject.model).__name__} reads {len(rows)} rows of its last layer: scopes S1 and S2 are "
                "about a single one; use S3 or S4"
            )
        return next(iter(rows))


class Batch:
    """Some inputs that go through the model together."""

    def __init__(self, probed: Probed, samples: Sequence[Sample]) -> None:
        self.probed, self.samples = probed, list(samples)
        self.plan = Plan(probed.subject, self.samples, [[probed.aim(sample)] for sample in self.samples])
        self.lengths = [len(probed.units(sample)) for sample in self.samples]

    @cached_property
    def clean(self) -> tuple[Float[Tensor, "batch label"], list[Weights]]:
        """The probabilities and the attention of every layer, untouched."""
        with torch.no_grad():
            output, calls, _ = patched(self.probed.recorder, self.plan.batch, [])
        return self.answer(output), [call.attention for call in calls]

    @property
    def probabilities(self) -> Float[Tensor, "batch label"]:
        return self.clean[0]

    @property
    def attention(self) -> list[Weights]:
        return self.clean[1]

    @cached_property
    def valid(self) -> Bool[Tensor, "batch unit"]:
        width = max(self.lengths)
        return torch.arange(width) < torch.tensor(self.lengths)[:, None]

    @cached_property
    def rows(self) -> Bool[Tensor, "batch query"]:
        """The row of each that is read; where a query that is no unit pools them, its own."""
        marked = torch.zeros_like(self.valid[:, :1] if self.probed.pools else self.valid)
        marked[torch.arange(len(self.samples)), [self.probed.row(sample) for sample in self.samples]] = True
        return marked

    @cached_property
    def special(self) -> Bool[Tensor, "batch unit"]:
        marked = torch.zeros_like(self.valid)
        for i, sample in enumerate(self.samples):
            marked[i, : self.lengths[i]] = torch.tensor(self.probed.units(sample).special)
        return marked

    def pooled(self, layer: int = -1) -> Float[Tensor, "batch head key"]:
        """The row that is read, of one layer."""
        return self.attention[layer][torch.arange(len(self.samples)), :, self.rows.long().argmax(1)]

    def answer(self, output: Any) -> Float[Tensor, "batch label"]:
        """The probabilities of all classes."""
        return self.probed.probabilities(output, self.samples)

    def repeated(self, times: int) -> "Batch":
        """Every sample so many times, one after the other."""
        return Batch(self.probed, [sample for sample in self.samples for _ in range(times)])

    def under(
        self, weights: Replacing, scope: Scope, frozen: bool = False, normalised: bool = True
    ) -> Float[Tensor, "batch label"]:
        """The probabilities with other weights in place."""
        rows = self.rows if scope.only_row else None
        patch = Patch(weights, scope.layers(self.probed.layers), scope.heads, rows, normalised)
        clean = self.attention if frozen else None
        output, _, _ = patched(self.probed.recorder, self.plan.batch, [patch], clean)
        return self.answer(output)

    def largest(self, scope: Scope) -> float:
        """The largest weight of the rows in reach, mean over heads; of several rows or layers, their mean."""
        if scope.only_row:
            return float(self.pooled()[0].mean(0).max())
        maps = [self.attention[layer][0].mean(0) for layer in scope.layers(self.probed.layers)]
        return float(torch.stack(maps).amax(-1).mean())

    def name(self, i: int) -> str:
        """What a sample is called in a table."""
        units = self.probed.units(self.samples[i])
        return " / ".join(units.texts) if units.texts else f"{units.kind} × {len(units)}"


def shortens(probed: Probed) -> bool:
    """Whether answers at scope S1 can be had from the last layer's row alone."""
    kind = isinstance(probed.subject, TextClassification | MaskedLanguageModel | Decoder)
    given = all("input_ids" in sample.inputs for sample in probed.samples)
    return kind and given and probed.tested.path == "interface"


class Short:
    """The answers of a batch at scope S1: everything below the last layer is computed once."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.subject = batch, batch.probed.subject
        self.rows = batch.rows.long().argmax(1)
        self.last = LastRow(batch.probed.recorder, batch.plan.batch, self.rows)
        self.attention, self.visible = self.last.attention, self.last.visible
        self.clean = batch.answer(self.last.clean)
        with torch.no_grad():
            gap = float((self.answers(self.attention[:, None])[:, 0] - self.clean).abs().max())
        if not gap <= EXACT.get(self.subject.dtype, 2e-2):
            raise Refusal(
                f"{type(self.subject.model).__name__} gives another answer by the last layer's row alone (gap "
                f"{gap:.1e}): its answer is made from more than that row"
            )

    def answers(self, weights: Float[Tensor, "batch draw head key"]) -> Float[Tensor, "batch draw label"]:
        """The probabilities with each of these weights; gradients flow to them."""
        parts = weights.split(max(1, ROWS // len(weights)), dim=1)
        return torch.cat([self._answers(part) for part in parts], dim=1)

    def _answers(self, weights: Float[Tensor, "batch draw head key"]) -> Float[Tensor, "batch draw label"]:
        output, draws = self.last.output(weights), weights.shape[1]
        # in a sequence of one row, a mask that is to be filled and the row that predicts a word are at the first place
        alone = [replace(sample, masks=(0,) * len(sample.masks)) for sample in self.batch.samples]
        alone = [replace(sample, first=0, kept=()) if isinstance(sample, Answered) else sample for sample in alone]
        samples = [sample for sample in alone for _ in range(draws)]
        return self.batch.probed.probabilities(output, samples).unflatten(0, (len(alone), draws))
