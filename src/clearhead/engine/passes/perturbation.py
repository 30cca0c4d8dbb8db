"""Perturbation-based methods: the value of the target with parts of the input masked.

The coalition games of a batch (one for each method, input and target) are played together, round by round: the masked
inputs that they request in one round are evaluated in full batches of similar lengths, and none is evaluated twice. The
explained class is that of the whole input.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.engine.kv_prefix import KVPrefix, iter_prefix_chunks
from clearhead.engine.memory_budget import limit_rows, start_budgeted_pass
from clearhead.engine.method_run import MethodResult, MethodRun
from clearhead.engine.passes.base import CleanPass, PassContext, PassCount, PassStrategy
from clearhead.engine.passes.completeness import compute_completeness_gap
from clearhead.engine.target_batch import TargetBatch, TargetValues
from clearhead.errors import InputError
from clearhead.methods._perturbation import CoalitionGame, CoalitionGenerator, PerturbationMethod, PlayerScores
from clearhead.methods.base import Method, MethodScores
from clearhead.methods.pass_type import PassType
from clearhead.perturbation.multi_stream import MaskablePlayers, find_masking_unsupported_reason, make_players
from clearhead.sample import Sample
from clearhead.targets import Target

if TYPE_CHECKING:
    from clearhead.engine.capabilities import ModelCapabilities

#: Largest number of masked inputs of one pass.
MAX_PERTURBED_INPUTS = 256
#: Largest number of units of one pass.
MAX_PERTURBED_UNITS = 2**14


class PerturbationStrategy(PassStrategy):
    """Methods that mask parts of the input."""

    pass_type = PassType.PERTURBATION
    uses_clean_pass = True
    supports_tiling = True  # attention is not captured

    def find_unsupported_reason(self, capabilities: "ModelCapabilities", method: Method) -> str | None:
        """Return why parts of this model's inputs cannot be masked."""
        return find_masking_unsupported_reason(capabilities.adapter, capabilities.test_sample)

    def count_passes(self, context: PassContext, method_runs: Sequence[MethodRun]) -> list[PassCount]:
        """Masked inputs in full batches; how many exactly, the games decide round by round."""
        batch = context.batch
        num_inputs = sum(
            _get_instance(method_run).count_masked_inputs(sum(map(len, sample.axes.values())))
            for method_run in method_runs
            for sample in batch.truncated_samples
        )
        rows = min(num_inputs, MAX_PERTURBED_INPUTS, max(1, MAX_PERTURBED_UNITS // batch.max_units))
        return [
            PassCount(
                "masked inputs",
                method_runs,
                -(-num_inputs // rows),
                rows=rows,
                num_inputs=num_inputs,
                is_at_most=True,
            )
        ]

    def run(
        self, context: PassContext, method_runs: Sequence[MethodRun], clean_pass: CleanPass | None
    ) -> list[MethodResult]:
        """Play the games of all methods together."""
        assert clean_pass is not None
        batch = context.batch
        with context.recorder.session.running():
            value_function = ValueFunction(context, clean_pass.values)
            games = [_CoalitionRun(method_run, batch, i) for method_run in method_runs for i in range(batch.num_rows)]
            _run_coalitions(games, value_function)
        games_by_method = [games[m * batch.num_rows : (m + 1) * batch.num_rows] for m in range(len(method_runs))]
        return [
            MethodResult(_build_scores(method_games, method_run, clean_pass.values), clean_pass.values)
            for method_games, method_run in zip(games_by_method, method_runs, strict=True)
        ]


def _get_instance(method_run: MethodRun) -> PerturbationMethod:
    """The instance of a method: the streams of an input play one game."""
    instance = next(iter(method_run.per_stream.values()))
    assert isinstance(instance, PerturbationMethod)
    return instance


class _CoalitionRun:
    """One method on one input with one target."""

    def __init__(self, method_run: MethodRun, batch: TargetBatch, row: int) -> None:
        instance = _get_instance(method_run)
        self.row = row
        self.players = make_players(
            batch.adapter,
            batch.truncated_samples[row],
            instance.unit,
            instance.replacement,
            instance.default_image_unit,
        )
        game = CoalitionGame(
            self.players.num_players,
            instance.unit_context.seeds[row],
            self.players.make_windows,
            self.players.build_hierarchy,
            {name: self._add_up_scores(result) for name, result in method_run.component_results.items()},
        )
        self.coalitions: CoalitionGenerator = instance.iter_coalitions(game)
        self.requested_coalitions: Bool[Tensor, "coalition player"] | None = next(self.coalitions)
        self.evaluated_keys: set[tuple[Any, ...]] = set()
        self.player_scores: PlayerScores

    def _add_up_scores(self, result: MethodResult) -> Float[Tensor, "player"]:
        """The scores of the players by a component; missing ones are zero."""
        by_axis = {stream: scores.scores[self.row, 0].double().cpu() for stream, scores in result.scores.items()}
        return self.players.add_up_axes(by_axis).nan_to_num(0, 0, 0)

    def receive(self, values: Float[Tensor, "coalition"]) -> None:
        """Hand the values of the requested coalitions to the method, which requests others or returns the scores."""
        try:
            self.requested_coalitions = self.coalitions.send(values)
        except StopIteration as stop:
            self.requested_coalitions = None
            self.player_scores = stop.value


def _run_coalitions(games: Sequence[_CoalitionRun], value_function: "ValueFunction") -> None:
    """Evaluate round by round, until no game requests any more coalitions."""
    while waiting := [game for game in games if game.requested_coalitions is not None]:
        requests = [
            value_function.build_masked_inputs(game.row, game.players, game.requested_coalitions)
            for game in waiting
            if game.requested_coalitions is not None
        ]
        value_function.evaluate(masked_input for request in requests for masked_input in request)
        for game, request in zip(waiting, requests, strict=True):
            game.evaluated_keys |= {masked_input.key for masked_input in request}
            game.receive(value_function.get_values(game.row, request))


@dataclass
class _InputGroup:
    """One input with the targets that it is explained for, which share every pass."""

    sample: Sample
    targets: list[Target] = field(default_factory=list)

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """What inputs of one batch must have in common."""
        inputs = self.sample.inputs
        pixel_shape = tuple(getattr(inputs.get("pixel_values"), "shape", ()))
        return (len(self.targets), pixel_shape, tuple(sorted(inputs)), self.sample.batch_key)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.sample.axes.values())


@dataclass(frozen=True)
class _MaskedInput:
    """One input with some players masked."""

    key: tuple[Any, ...]
    group: _InputGroup = field(compare=False)
    players: MaskablePlayers = field(compare=False)
    keep: Bool[Tensor, "player"] = field(compare=False)
    length: int = field(compare=False)


class ValueFunction:
    """The value of each target for masked inputs: a cache that is filled in full batches.

    Args:
        context: The batch, and how to run it.
        values: The values of the targets for the whole input.
    """

    def __init__(self, context: PassContext, values: TargetValues) -> None:
        batch = context.batch
        self.adapter = batch.adapter
        self.groups: dict[Any, _InputGroup] = {}
        self.group_of_row: list[tuple[Any, int]] = []  # the group of each row, and the index of its target there
        for i, (sample, target) in enumerate(zip(batch.truncated_samples, batch.targets, strict=True)):
            key = _get_input_key(sample)
            group = self.groups.setdefault(key, _InputGroup(sample))
            if values.class_scores is not None:
                target = target.with_fixed_classes(values.class_scores[i], batch.adapter)
            if target not in group.targets:
                group.targets.append(target)
            self.group_of_row.append((key, group.targets.index(target)))
        self.cache: dict[tuple[Any, ...], list[float]] = {}
        self.prefixes = {
            key: KVPrefix(context.capabilities, group.sample, group.targets) for key, group in self.groups.items()
        }

    def build_masked_inputs(
        self, row: int, players: MaskablePlayers, keep: Bool[Tensor, "coalition player"]
    ) -> list[_MaskedInput]:
        """Describe the masked input of each coalition."""
        group_key = self.group_of_row[row][0]
        coalitions = zip(players.compute_mask_keys(keep), keep, players.count_units(keep), strict=True)
        return [
            _MaskedInput((group_key, *players.cache_key, mask_key), self.groups[group_key], players, kept, length)
            for mask_key, kept, length in coalitions
        ]

    def evaluate(self, masked_inputs: Iterable[_MaskedInput]) -> None:
        """Evaluate the masked inputs that are not in the cache."""
        new = list({item.key: item for item in masked_inputs if item.key not in self.cache}.values())
        for key, prefix in self.prefixes.items():
            if prefix.is_enabled and (group_inputs := [item for item in new if item.key[0] == key]):
                self._evaluate_with_prefix(prefix, group_inputs)
        for batch in self._iter_batches([item for item in new if item.key not in self.cache]):
            self._store_values(batch, self._compute_values(batch))

    def _evaluate_with_prefix(self, prefix: KVPrefix, masked_inputs: Sequence[_MaskedInput]) -> None:
        """Evaluate masked inputs of a decoder; the tokens before the first change are computed once."""
        samples = [item.players.keep_only(item.keep) for item in masked_inputs]
        starts = [prefix.find_common_length(sample) for sample in samples]
        lengths = [item.length for item in masked_inputs]
        for indices, start in iter_prefix_chunks(starts, lengths, MAX_PERTURBED_INPUTS, MAX_PERTURBED_UNITS):
            start_budgeted_pass(len(indices) * len(prefix.targets))
            values = prefix.compute_values([samples[i] for i in indices], start)
            self._store_values([masked_inputs[i] for i in indices], values)

    def _store_values(self, batch: Sequence[_MaskedInput], values: Float[Tensor, "input target"]) -> None:
        if not values.isfinite().all():
            # In some models, padding that attends to nothing is NaN, and so is what attends to it.
            for i, masked_input in enumerate(batch):
                values[i] = self._compute_values([masked_input])[0]
        if not values.isfinite().all():
            raise InputError(
                f"the target is not finite when units are removed (replacement={batch[0].players.replacement}): choose "
                "another target, or another replacement"
            )
        self.cache |= {item.key: row for item, row in zip(batch, values.tolist(), strict=True)}

    def _compute_values(self, masked_inputs: Sequence[_MaskedInput]) -> Float[Tensor, "input target"]:
        """Run one pass."""
        samples = [item.players.keep_only(item.keep) for item in masked_inputs]
        batch = TargetBatch(self.adapter, samples, [item.group.targets for item in masked_inputs])
        start_budgeted_pass(batch.num_rows)
        return batch.compute_values_by_sample(self.adapter.session.forward(batch.model_inputs))

    def _iter_batches(self, masked_inputs: Iterable[_MaskedInput]) -> Iterator[list[_MaskedInput]]:
        """Group masked inputs into batches of similar lengths, and separate those that cannot share a batch."""
        # a model without a padding token cannot tell the end of the shorter ones
        config: Any = getattr(self.adapter.model, "config", None)
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        has_no_padding = getattr(text_config, "pad_token_id", None) is None
        needs_equal_lengths = self.adapter.positions_depend_on_batch_length or has_no_padding

        def get_batch_key(item: _MaskedInput) -> tuple[Any, ...]:
            return (*item.group.batch_key, (*item.group.lengths, item.length) if needs_equal_lengths else ())

        batch: list[_MaskedInput] = []
        for item in sorted(masked_inputs, key=lambda item: (get_batch_key(item), item.length)):
            is_full = (
                len(batch) >= limit_rows(MAX_PERTURBED_INPUTS, remeasure=True)
                or (len(batch) + 1) * item.length > MAX_PERTURBED_UNITS
            )
            if batch and (is_full or get_batch_key(item) != get_batch_key(batch[0])):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def get_values(self, row: int, masked_inputs: Sequence[_MaskedInput]) -> Float[Tensor, "coalition"]:
        """Return the values of a row's target for evaluated inputs."""
        target_index = self.group_of_row[row][1]
        return torch.tensor([self.cache[item.key][target_index] for item in masked_inputs], dtype=torch.float64)


def _get_input_key(sample: Sample) -> Any:
    """A key that equal inputs share. A sample that holds more than its inputs is its own key."""
    if type(sample) is not Sample:
        return id(sample)
    return (sample.derive_seed(0), *(units.texts for axis in sample.axes.values() for units in axis.unit_groups))


def _build_scores(
    games: Sequence[_CoalitionRun], method_run: MethodRun, values: TargetValues
) -> dict[str, MethodScores]:
    """Build the scores of each stream; diagnostics concern all streams together."""
    scores = {
        stream: torch.zeros(instance.unit_context.valid_mask.shape).double()
        for stream, instance in method_run.per_stream.items()
    }
    diagnostics: dict[str, list[float]] = {"evaluations": [len(game.evaluated_keys) for game in games]}
    for game in games:
        player_scores = game.player_scores
        by_stream = game.players.spread_by_axis(player_scores.scores, player_scores.fixed_leaf_scores)
        for stream, unit_scores in by_stream.items():
            scores[stream][game.row, : len(unit_scores)] = unit_scores
        for name, value in (player_scores.diagnostics or {}).items():
            diagnostics.setdefault(name, []).append(value)
    base_values = [game.player_scores.base_value for game in games if game.player_scores.base_value is not None]
    base_value = torch.tensor(base_values, dtype=torch.float64)
    is_complete = len(base_values) == len(games)
    if is_complete:
        total = torch.stack([stream_scores.sum(1) for stream_scores in scores.values()]).sum(0)
        residual = base_value + total - values.values.double().cpu()
        diagnostics["completeness_gap"] = compute_completeness_gap(residual, scores.values()).tolist()
    resolved_options: dict[str, list[Any]] = {
        "replacement": [game.players.replacement for game in games],
        "players": [game.players.unit for game in games],
    }
    for name in games[0].player_scores.resolved_options:
        resolved_options[name] = [game.player_scores.resolved_options[name] for game in games]
    covariances = _compute_covariances(games, scores)
    if games[0].player_scores.intervals is not None:
        all_intervals = [game.player_scores.intervals for game in games if game.player_scores.intervals is not None]
        resolved_options["interval_level"] = [intervals.level for intervals in all_intervals]
        resolved_options["interval_multiplier"] = [intervals.multiplier for intervals in all_intervals]
    results = {}
    for stream, stream_scores in scores.items():
        readout = method_run.per_stream[stream].unit_context.readout
        results[stream] = MethodScores(
            stream_scores[:, None].to(readout),
            base_value=base_value.to(readout) if is_complete else None,
            diagnostics={name: torch.tensor(figures, dtype=torch.float64) for name, figures in diagnostics.items()},
            resolved_options=resolved_options,
            covariances=covariances.get(stream),
        )
    return results


def _compute_covariances(
    games: Sequence[_CoalitionRun], streams: Iterable[str]
) -> "dict[str, list[Float[Tensor, 'unit unit']]]":
    """The covariances of the scores of the units of each stream, one per game; none without intervals."""
    covariances: dict[str, list[Tensor]] = {stream: [] for stream in streams}
    for game in games:
        intervals = game.player_scores.intervals
        if intervals is None:
            return {}
        # the score of a unit is a weighted sum of those of the players
        columns = [game.players.spread_by_axis(row, None) for row in torch.eye(game.players.num_players).double()]
        for stream, stream_covariances in covariances.items():
            groups = torch.stack([column[stream] for column in columns], dim=1)
            stream_covariances.append(intervals.compute_covariance(groups))
    return covariances
