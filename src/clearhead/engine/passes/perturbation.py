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

from clearhead.adapters.base import ModelAdapter, Sample
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.recorder import Recorder
from clearhead.engine.kv_prefix import KVPrefix, iter_prefix_chunks
from clearhead.engine.memory_budget import limit_rows
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.target_batch import MethodRun, TargetBatch
from clearhead.errors import InputError
from clearhead.methods._perturbation import CoalitionGame, CoalitionGenerator, PerturbationMethod, PlayerScores
from clearhead.methods.base import Method, MethodScores
from clearhead.perturbation.multi_stream import MaskablePlayers, make_players
from clearhead.perturbation.multi_stream import find_masking_unsupported_reason as why_not_hidden
from clearhead.targets import Target

#: At most so many inputs, and so many units, go through the model at a time.
MAX_PERTURBED_INPUTS, MAX_PERTURBED_UNITS = 256, 2**14


def run_perturbation_passes(
    recorder: Recorder, batch: TargetBatch, method_runs: Sequence[MethodRun], self_test: SelfTest
) -> list[dict[str, MethodScores]]:
    with recorder.session.running():
        recorder.run(batch.model_inputs, batch.compute_target, (), leaves=batch.leaves)  # what is predicted
        worth = ValueFunction(batch, recorder)
        games = [
            _CoalitionRun(reading, batch, i) for reading in method_runs for i in range(len(batch.truncated_samples))
        ]
        _run_coalitions(games, worth)
    size = len(batch.truncated_samples)
    return [_build_scores(games[m * size : (m + 1) * size], reading, batch) for m, reading in enumerate(method_runs)]


def find_perturbation_unsupported_reason(
    recorder: Recorder, adapter: ModelAdapter, sample: Sample, method: Method
) -> str | None:
    return why_not_hidden(adapter, sample)


class _CoalitionRun:
    """One method at work on one input with one target."""

    def __init__(self, reading: MethodRun, plan: TargetBatch, i: int) -> None:
        fold = next(iter(reading.per_stream.values()))  # the same for every stream: all of them play one game
        assert isinstance(fold, PerturbationMethod)
        self.target_index = i
        self.players = make_players(
            plan.adapter, plan.truncated_samples[i], fold.unit, fold.replacement, fold.default_image_unit
        )
        own = CoalitionGame(
            self.players.num_players,
            fold.unit_context.seeds[i],
            self.players.make_windows,
            self.players.build_hierarchy,
        )
        self.coalitions: CoalitionGenerator = fold.iter_coalitions(own)
        self.requested_coalitions: Bool[Tensor, "coalition player"] | None = next(self.coalitions)
        self.evaluated_keys: set[tuple[Any, ...]] = set()
        self.player_scores: PlayerScores

    def receive(self, worth: Float[Tensor, "coalition"]) -> None:
        try:
            self.requested_coalitions = self.coalitions.send(worth)
        except StopIteration as end:
            self.requested_coalitions, self.player_scores = None, end.value


def _run_coalitions(games: Sequence[_CoalitionRun], worth: "ValueFunction") -> None:
    """Round by round, until no game asks any more."""
    while waiting := [game for game in games if game.requested_coalitions is not None]:
        asked = [
            worth.build_masked_inputs(game.target_index, game.players, game.requested_coalitions)
            for game in waiting
            if game.requested_coalitions is not None
        ]
        worth.evaluate(one for part in asked for one in part)
        for game, part in zip(waiting, asked, strict=True):
            game.evaluated_keys |= {one.key for one in part}
            game.receive(worth.get_values(game.target_index, part))


@dataclass
class _InputGroup:
    """One input, and the targets that it is explained for: they share every pass."""

    sample: Sample
    targets: list[Target] = field(default_factory=list)

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """What inputs of one batch must have in common."""
        inputs = self.sample.inputs
        pixels = tuple(getattr(inputs.get("pixel_values"), "shape", ()))
        return (len(self.targets), pixels, tuple(sorted(inputs)), self.sample.batch_key)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.sample.axes.values())


@dataclass(frozen=True)
class _MaskedInput:
    """One altered input."""

    key: tuple[Any, ...]
    group: _InputGroup = field(compare=False)
    players: MaskablePlayers = field(compare=False)
    keep: Bool[Tensor, "player"] = field(compare=False)
    length: int = field(compare=False)


class ValueFunction:
    """What the targets are worth with some units alone: a table that is filled in full batches."""

    def __init__(self, batch: TargetBatch, recorder: Recorder) -> None:
        self.adapter = batch.adapter
        rows = [None] * len(batch.targets) if batch.class_scores is None else list(batch.class_scores)
        self.groups: dict[Any, _InputGroup] = {}
        self.group_of_target: list[tuple[Any, int]] = []  # the group of each target, and its place there
        for sample, target, row in zip(batch.truncated_samples, batch.targets, rows, strict=True):
            key = _get_input_key(sample)
            group = self.groups.setdefault(key, _InputGroup(sample))
            wanted = target if row is None else target.with_fixed_classes(row, batch.adapter)
            if wanted not in group.targets:
                group.targets.append(wanted)
            self.group_of_target.append((key, group.targets.index(wanted)))
        self.cache: dict[tuple[Any, ...], list[float]] = {}
        self.prefixes = {
            key: KVPrefix(recorder, batch.adapter, group.sample, group.targets) for key, group in self.groups.items()
        }

    def build_masked_inputs(
        self, target_index: int, players: MaskablePlayers, keep: Bool[Tensor, "coalition player"]
    ) -> list[_MaskedInput]:
        group = self.group_of_target[target_index][0]
        pairs = zip(players.compute_mask_keys(keep), keep, players.count_units(keep), strict=True)
        return [
            _MaskedInput((group, *players.cache_key, code), self.groups[group], players, row, n)
            for code, row, n in pairs
        ]

    def evaluate(self, masked_inputs: Iterable[_MaskedInput]) -> None:
        """Evaluate what is not known yet."""
        new = list({one.key: one for one in masked_inputs if one.key not in self.cache}.values())
        for key, prefix in self.prefixes.items():
            if prefix.is_enabled and (own := [one for one in new if one.key[0] == key]):
                self._evaluate_with_prefix(prefix, own)
        for batch in self._iter_batches([one for one in new if one.key not in self.cache]):
            self._store_values(batch, self._compute_values(batch))

    def _evaluate_with_prefix(self, prefix: KVPrefix, asked: Sequence[_MaskedInput]) -> None:
        """Altered inputs of a decoder, the words before the first change run once for all of them."""
        samples = [one.players.keep_only(one.keep) for one in asked]
        starts = [prefix.find_common_length(sample) for sample in samples]
        for places, start in iter_prefix_chunks(
            starts, [one.length for one in asked], MAX_PERTURBED_INPUTS, MAX_PERTURBED_UNITS
        ):
            values = prefix.compute_values([samples[place] for place in places], start)
            self._store_values([asked[place] for place in places], values)

    def _store_values(self, batch: Sequence[_MaskedInput], values: Float[Tensor, "input target"]) -> None:
        if not values.isfinite().all():
            # Padding that sees nothing is NaN in some models, and makes NaN of what looks at it.
            for i, one in enumerate(batch):
                values[i] = self._compute_values([one])[0]
        if not values.isfinite().all():
            raise InputError(
                f"the target is not finite when units are removed (replacement={batch[0].players.replacement}): choose "
                "another target, or another replacement"
            )
        self.cache |= {one.key: own for one, own in zip(batch, values.tolist(), strict=True)}

    def _compute_values(self, batch: Sequence[_MaskedInput]) -> Float[Tensor, "input target"]:
        samples = [one.players.keep_only(one.keep) for one in batch]
        plan = TargetBatch(self.adapter, samples, [one.group.targets for one in batch])
        values = plan.compute_target(self.adapter.session.forward(plan.model_inputs)).detach().double().cpu()
        return values.reshape(plan.targets_per_sample, len(batch)).mT.clone()

    def _iter_batches(self, asked: Iterable[_MaskedInput]) -> Iterator[list[_MaskedInput]]:
        """Inputs of like length together; apart what cannot share a batch."""
        # a model without a padding token cannot tell the end of the shorter ones
        config: Any = getattr(self.adapter.model, "config", None)
        read = config.get_text_config() if hasattr(config, "get_text_config") else config
        exact = self.adapter.positions_depend_on_batch_length or getattr(read, "pad_token_id", None) is None

        def alike(one: _MaskedInput) -> tuple[Any, ...]:
            return (*one.group.batch_key, (*one.group.lengths, one.length) if exact else ())

        batch: list[_MaskedInput] = []
        for one in sorted(asked, key=lambda one: (alike(one), one.length)):
            full = (
                len(batch) >= limit_rows(MAX_PERTURBED_INPUTS, remeasure=True)
                or (len(batch) + 1) * one.length > MAX_PERTURBED_UNITS
            )
            if batch and (full or alike(one) != alike(batch[0])):
                yield batch
                batch = []
            batch.append(one)
        if batch:
            yield batch

    def get_values(self, target_index: int, masked_inputs: Sequence[_MaskedInput]) -> Float[Tensor, "coalition"]:
        target = self.group_of_target[target_index][1]
        return torch.tensor([self.cache[one.key][target] for one in masked_inputs], dtype=torch.float64)


def _get_input_key(sample: Sample) -> Any:
    """What tells inputs apart: the same one given twice is one. A sample that knows more than its inputs is itself."""
    if type(sample) is not Sample:
        return id(sample)
    return (sample.derive_seed(0), *(units.texts for axis in sample.axes.values() for units in axis.unit_groups))


def _build_scores(games: Sequence[_CoalitionRun], reading: MethodRun, plan: TargetBatch) -> dict[str, MethodScores]:
    """The scores along each axis; what was measured is about all of them together."""
    scores = {
        stream: torch.zeros(fold.unit_context.valid_mask.shape).double() for stream, fold in reading.per_stream.items()
    }
    checks: dict[str, list[float]] = {"evaluations": [len(game.evaluated_keys) for game in games]}
    for game in games:
        shares = game.player_scores
        for stream, own in game.players.spread_by_axis(shares.scores, shares.fixed_leaf_scores).items():
            scores[stream][game.target_index, : len(own)] = own
        for name, value in (shares.diagnostics or {}).items():
            checks.setdefault(name, []).append(value)
    bases = [game.player_scores.base_value for game in games if game.player_scores.base_value is not None]
    base, adds_up = torch.tensor(bases, dtype=torch.float64), len(bases) == len(games)
    if adds_up:
        added = torch.stack([part.sum(1) for part in scores.values()]).sum(0)
        missed = base + added - plan.target_values.double().cpu()
        checks["completeness_gap"] = compute_completeness_gap(missed, scores.values()).tolist()
    return {
        stream: MethodScores(
            part[:, None].to(reading.per_stream[stream].unit_context.readout),
            base_value=base.to(reading.per_stream[stream].unit_context.readout) if adds_up else None,
            diagnostics={name: torch.tensor(values, dtype=torch.float64) for name, values in checks.items()},
            resolved_options={
                "replacement": [game.players.replacement for game in games],
                "players": [game.players.unit for game in games],
            },
        )
        for stream, part in scores.items()
    }
