"""The kind "values": methods that ask what the target is worth without some units.

All games of a batch (every method, input and target) are played together, round by round: what they ask for in one
round is evaluated in full batches of inputs of like length, and nothing is ever evaluated twice. The class that is
explained is the one of the whole input.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import Sample, Subject
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest
from clearhead.engine.kv_prefix import Prefix, chunks
from clearhead.engine.memory_budget import at_most
from clearhead.engine.passes.completeness import completeness_gap
from clearhead.engine.target_batch import Plan, Reading
from clearhead.errors import InputError
from clearhead.methods._perturbation import Game, Perturbation, Play, Shares
from clearhead.methods.base import Method, Scores
from clearhead.perturbation.multi_stream import Players, players_of
from clearhead.perturbation.multi_stream import why_not as why_not_hidden
from clearhead.targets import Target

#: At most so many inputs, and so many units, go through the model at a time.
INPUTS, UNITS = 256, 2**14


def from_values(
    recorder: Recorder, plan: Plan, readings: Sequence[Reading], tested: SelfTest
) -> list[dict[str, Scores]]:
    with recorder.lock, at_rest(recorder.model), torch.no_grad():
        recorder.run(plan.batch, plan.value, (), leaves=plan.leaves)  # what is predicted
        worth = Worth(plan, recorder)
        games = [_Played(reading, plan, i) for reading in readings for i in range(len(plan.samples))]
        _play(games, worth)
    size = len(plan.samples)
    return [_scores(games[m * size : (m + 1) * size], reading, plan) for m, reading in enumerate(readings)]


def why_not(recorder: Recorder, subject: Subject, sample: Sample, method: Method) -> str | None:
    return why_not_hidden(subject, sample)


def _output(subject: Subject, batch: dict[str, Any]) -> Any:
    with subject.scope():
        return subject.unrecorded(**batch)


class _Played:
    """One method at work on one input with one target."""

    def __init__(self, reading: Reading, plan: Plan, i: int) -> None:
        fold = next(iter(reading.folds.values()))  # the same for every stream: all of them play one game
        assert isinstance(fold, Perturbation)
        self.place = i
        self.players = players_of(plan.subject, plan.samples[i], fold.unit, fold.replacement, fold.pictures)
        own = Game(self.players.count, fold.frame.seeds[i], self.players.windows, self.players.hierarchy)
        self.play: Play = fold.play(own)
        self.asked: Bool[Tensor, "coalition player"] | None = next(self.play)
        self.seen: set[tuple[Any, ...]] = set()
        self.shares: Shares

    def hear(self, worth: Float[Tensor, "coalition"]) -> None:
        try:
            self.asked = self.play.send(worth)
        except StopIteration as end:
            self.asked, self.shares = None, end.value


def _play(games: Sequence[_Played], worth: "Worth") -> None:
    """Round by round, until no game asks any more."""
    while waiting := [game for game in games if game.asked is not None]:
        asked = [worth.asked(game.place, game.players, game.asked) for game in waiting if game.asked is not None]
        worth.find(one for part in asked for one in part)
        for game, part in zip(waiting, asked, strict=True):
            game.seen |= {one.key for one in part}
            game.hear(worth.of(game.place, part))


@dataclass
class _Group:
    """One input, and the targets that it is explained for: they share every pass."""

    sample: Sample
    targets: list[Target] = field(default_factory=list)

    @property
    def alike(self) -> tuple[Any, ...]:
        """What inputs of one batch must have in common."""
        inputs = self.sample.inputs
        pixels = tuple(getattr(inputs.get("pixel_values"), "shape", ()))
        return (len(self.targets), pixels, tuple(sorted(inputs)), self.sample.alike)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.sample.axes.values())


@dataclass(frozen=True)
class _Asked:
    """One altered input."""

    key: tuple[Any, ...]
    group: _Group = field(compare=False)
    players: Players = field(compare=False)
    keep: Bool[Tensor, "player"] = field(compare=False)
    length: int = field(compare=False)


class Worth:
    """What the targets are worth with some units alone: a table that is filled in full batches."""

    def __init__(self, plan: Plan, recorder: Recorder) -> None:
        self.subject = plan.subject
        rows = [None] * len(plan.targets) if plan.scores is None else list(plan.scores)
        self.groups: dict[Any, _Group] = {}
        self.at: list[tuple[Any, int]] = []  # the group of each target, and its place there
        for sample, target, row in zip(plan.samples, plan.targets, rows, strict=True):
            key = _content(sample)
            group = self.groups.setdefault(key, _Group(sample))
            wanted = target if row is None else target.pinned(row, plan.subject)
            if wanted not in group.targets:
                group.targets.append(wanted)
            self.at.append((key, group.targets.index(wanted)))
        self.table: dict[tuple[Any, ...], list[float]] = {}
        self.prefixes = {
            key: Prefix(recorder, plan.subject, group.sample, group.targets) for key, group in self.groups.items()
        }

    def asked(self, place: int, players: Players, keep: Bool[Tensor, "coalition player"]) -> list[_Asked]:
        group = self.at[place][0]
        pairs = zip(players.codes(keep), keep, players.lengths(keep), strict=True)
        return [_Asked((group, *players.key, code), self.groups[group], players, row, n) for code, row, n in pairs]

    def find(self, asked: Iterable[_Asked]) -> None:
        """Evaluate what is not known yet."""
        new = list({one.key: one for one in asked if one.key not in self.table}.values())
        for key, prefix in self.prefixes.items():
            if prefix.shares and (own := [one for one in new if one.key[0] == key]):
                self._find_after(prefix, own)
        for batch in self._batches([one for one in new if one.key not in self.table]):
            self._keep(batch, self._values(batch))

    def _find_after(self, prefix: Prefix, asked: Sequence[_Asked]) -> None:
        """Altered inputs of a decoder, the words before the first change run once for all of them."""
        samples = [one.players.without(one.keep) for one in asked]
        starts = [prefix.first_change(sample) for sample in samples]
        for places, start in chunks(starts, [one.length for one in asked], INPUTS, UNITS):
            values = prefix.values([samples[place] for place in places], start)
            self._keep([asked[place] for place in places], values)

    def _keep(self, batch: Sequence[_Asked], values: Float[Tensor, "input target"]) -> None:
        if not values.isfinite().all():
            # Padding that sees nothing is NaN in some models, and makes NaN of what looks at it.
            for i, one in enumerate(batch):
                values[i] = self._values([one])[0]
        if not values.isfinite().all():
            raise InputError(
                "the target is no finite number when units are taken away (replacement="
                f"{batch[0].players.replacement}): choose another target, or another replacement"
            )
        self.table |= {one.key: own for one, own in zip(batch, values.tolist(), strict=True)}

    def _values(self, batch: Sequence[_Asked]) -> Float[Tensor, "input target"]:
        samples = [one.players.without(one.keep) for one in batch]
        plan = Plan(self.subject, samples, [one.group.targets for one in batch])
        values = plan.value(_output(self.subject, plan.batch)).detach().double().cpu()
        return values.reshape(plan.steps, len(batch)).mT.clone()

    def _batches(self, asked: Iterable[_Asked]) -> Iterator[list[_Asked]]:
        """Inputs of like length together; apart what cannot share a batch."""
        # a model without a padding token cannot tell the end of the shorter ones
        config: Any = getattr(self.subject.model, "config", None)
        read = config.get_text_config() if hasattr(config, "get_text_config") else config
        exact = self.subject.counts_by_length or getattr(read, "pad_token_id", None) is None

        def alike(one: _Asked) -> tuple[Any, ...]:
            return (*one.group.alike, (*one.group.lengths, one.length) if exact else ())

        batch: list[_Asked] = []
        for one in sorted(asked, key=lambda one: (alike(one), one.length)):
            full = len(batch) >= at_most(INPUTS, grows=True) or (len(batch) + 1) * one.length > UNITS
            if batch and (full or alike(one) != alike(batch[0])):
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    def of(self, place: int, asked: Sequence[_Asked]) -> Float[Tensor, "coalition"]:
        target = self.at[place][1]
        return torch.tensor([self.table[one.key][target] for one in asked], dtype=torch.float64)


def _content(sample: Sample) -> Any:
    """What tells inputs apart: the same one given twice is one. A sample that knows more than its inputs is itself."""
    if type(sample) is not Sample:
        return id(sample)
    return (sample.seed(0), *(units.texts for axis in sample.axes.values() for units in axis.parts))


def _scores(games: Sequence[_Played], reading: Reading, plan: Plan) -> dict[str, Scores]:
    """The scores along each axis; what was measured is about all of them together."""
    scores = {stream: torch.zeros(fold.frame.valid.shape).double() for stream, fold in reading.folds.items()}
    checks: dict[str, list[float]] = {"evaluations": [len(game.seen) for game in games]}
    for game in games:
        shares = game.shares
        for stream, own in game.players.by_axis(shares.scores, shares.stays).items():
            scores[stream][game.place, : len(own)] = own
        for name, value in (shares.checks or {}).items():
            checks.setdefault(name, []).append(value)
    bases = [game.shares.base_value for game in games if game.shares.base_value is not None]
    base, adds_up = torch.tensor(bases, dtype=torch.float64), len(bases) == len(games)
    if adds_up:
        added = torch.stack([part.sum(1) for part in scores.values()]).sum(0)
        missed = base + added - plan.values.double().cpu()
        checks["completeness_gap"] = completeness_gap(missed, scores.values()).tolist()
    return {
        stream: Scores(
            part[:, None].to(reading.folds[stream].frame.readout),
            base_value=base.to(reading.folds[stream].frame.readout) if adds_up else None,
            checks={name: torch.tensor(values, dtype=torch.float64) for name, values in checks.items()},
            chosen={
                "replacement": [game.players.replacement for game in games],
                "players": [game.players.unit for game in games],
            },
        )
        for stream, part in scores.items()
    }
