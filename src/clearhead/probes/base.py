"""Common ground of all probes: prepared inputs, the unpatched pass, the read-out row, and scopes.

Scopes, from the single-query attention that the debate was about to all of it:

    S1  the read-out row in the last layer             S2  the same row in every layer
    S3  all rows of one layer (or of some of its heads)  S4  all rows of all layers
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.adapters.base import InputOptions
from clearhead.adapters.custom.base import QUERY_STREAM
from clearhead.adapters.decoder import CausalLMAdapter
from clearhead.adapters.generation import GenerativeAdapter, PromptSample
from clearhead.adapters.masked_lm import MaskedLMAdapter
from clearhead.adapters.text import TextClassificationAdapter
from clearhead.engine.batching import iter_batch_indices, with_progress
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.interventions.attention_patch import (
    AttentionPatch,
    AttentionWeights,
    ReplacementFunction,
    run_patched_forward,
)
from clearhead.interventions.last_row import LastRowRunner
from clearhead.sample import Sample
from clearhead.targets import Target, compute_probabilities, make_target
from clearhead.units import Units

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Maximum number of rows in a pass through the last layer.
MAX_LAST_LAYER_ROWS = 4096
#: Largest difference allowed between the probabilities of the last row alone and those of the model.
PROBABILITY_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
SCOPE_NAMES = ("S1", "S2", "S3", "S4")
Progress = bool | Callable[[list[Any]], Iterable[Any]]


@dataclass(frozen=True)
class ProbeScope:
    """Which attention rows of which heads and layers a probe changes.

    Attributes:
        name: "S1", "S2", "S3" or "S4".
        layer: The layer of S3, counted from 0.
        heads: The heads; None for all.
    """

    name: str = "S1"
    layer: int | None = None
    heads: tuple[int, ...] | None = None

    def __str__(self) -> str:
        """Format the scope with its layer and heads, e.g. "S3, layer 2"."""
        description = self.name
        if self.layer is not None:
            description += f", layer {self.layer}"
        if self.heads is not None:
            description += f", heads {', '.join(map(str, self.heads))}"
        return description

    def resolve_layers(self, num_layers: int) -> list[int]:
        """Return the layers of the scope in a model of `num_layers` layers.

        Raises:
            InputError: The layer does not exist.
        """
        if self.name in ("S2", "S4"):
            return list(range(num_layers))
        if self.layer is None:
            return [num_layers - 1]
        if not -num_layers <= self.layer < num_layers:
            raise InputError(f"layer={self.layer} does not exist: the model has {num_layers} layers, counted from 0")
        return [self.layer % num_layers]

    @property
    def is_readout_row_only(self) -> bool:
        """Whether only the read-out row is changed."""
        return self.name in ("S1", "S2")


def make_scope(name: str, layer: int | None = None, heads: Sequence[int] | None = None) -> ProbeScope:
    """Make a scope and check that a layer is given for S3 and only for S3.

    Raises:
        InputError: An unknown scope, or a layer that does not go with it.
    """
    if name not in SCOPE_NAMES:
        raise unknown_value_error("scope", name, SCOPE_NAMES)
    if layer is not None and name != "S3":
        raise InputError(f"layer={layer} is for scope S3, which covers one layer; the layers of {name} are fixed")
    if layer is None and name == "S3":
        raise InputError("scope S3 covers one layer: specify it with layer=")
    return ProbeScope(name, layer, None if heads is None else tuple(heads))


class ProbeContext:
    """A model and the inputs that it is probed on."""

    def __init__(
        self, explainer: "Explainer", inputs: Any, target: Any = None, candidates: Sequence[str | int] | None = None
    ) -> None:
        """Prepare the inputs and check that the model can be probed.

        Args:
            explainer: Explainer of the model.
            inputs: One input or a list of inputs.
            target: The target, as in `Explainer.explain`; default: the predicted class.
            candidates: Labels (or masked words) whose probabilities are normalised among themselves; None for all.

        Raises:
            InputError: No inputs, or fewer than two different candidates.
            UnsupportedError: The model has several streams, no classes, no read-out row or several targets.
        """
        self.explainer = explainer
        self.adapter = explainer.adapter
        self.recorder = explainer.recorder
        raw_inputs = inputs if isinstance(inputs, list) else [inputs]
        if not raw_inputs:
            raise InputError("nothing to probe: the list of inputs is empty")
        self.target = make_target(target)
        samples = [sample for raw in raw_inputs for sample in self.adapter.make_samples(raw, InputOptions())]
        self.self_test = explainer.capabilities.run_self_test(samples)
        self.has_pooling_query: bool = getattr(self.adapter, "has_pooling_query", False)
        #: Indices of the classes (or masked words) that are compared among themselves; None for all.
        self.candidate_indices: list[int] | None = None
        if candidates is not None:
            self.candidate_indices = [self.adapter.label_index(label) for label in candidates]
            if len(set(self.candidate_indices)) < 2:
                raise InputError("candidates= must name at least two different labels or words")
        self._check_supported(samples[0])
        self.samples = [self.adapter.truncate_to_targets(sample, [self.get_target(sample)]) for sample in samples]
        explainer.capabilities.check_readout(self.samples[0], self.get_target(self.samples[0]))

    def _check_supported(self, sample: Sample) -> None:
        """Raise `UnsupportedError` for several streams or outputs, regression, or no read-out position."""
        name = type(self.adapter.model).__name__
        adapter = self.adapter
        call_sites = self.self_test.call_sites
        is_pooled = self.has_pooling_query and all(call_site.query_stream == QUERY_STREAM for call_site in call_sites)
        if (len(sample.axes) > 1 or self.self_test.has_cross_attention) and not is_pooled:
            raise UnsupportedError(f"{name} has several streams, but probes need a model with one")
        if adapter.is_regression:
            raise UnsupportedError(
                f"{name} is a regression model without classes, but probes compare class probabilities"
            )
        if adapter.readout is None:
            raise UnsupportedError(f"{name} has no read-out position in its attention, which probes need")
        if self._has_several_targets(sample):
            raise UnsupportedError(f"{name} has several outputs at once, but probes need one")
        if reason := adapter.find_attention_unsupported_reason():
            raise UnsupportedError(reason)
        num_keys = len(self.explainer.capabilities.test_sample.axes[adapter.stream])
        num_queries = 1 if is_pooled else num_keys
        if any(call_site.shape != (1, num_queries, num_keys) for call_site in call_sites):
            raise UnsupportedError(f"the attention of {name} does not run over its units in every layer")

    def _has_several_targets(self, sample: Sample) -> bool:
        """Whether the target has several steps; of a generative model, whether it explains the full output."""
        if isinstance(self.adapter, GenerativeAdapter):
            return self.adapter.explains_full_output
        return len(self.adapter.expand_target(sample, self.target)) > 1

    def get_target(self, sample: Sample) -> Target:
        """Return the target of one input; for a prompt, the next token."""
        if isinstance(self.adapter, GenerativeAdapter):
            return self.adapter.expand_target(sample, self.target)[0]
        return self.target

    def get_units(self, sample: Sample) -> Units:
        """Return the units of the model's own stream; other streams are not probed.

        Args:
            sample: The sample.

        Returns:
            The units, one per row and column of its attention.
        """
        return sample.axes[self.adapter.stream].unit_groups[0]

    def check_heads(self, scope: ProbeScope) -> None:
        """Check that the model has the heads of a scope.

        Raises:
            InputError: A head does not exist, or the list is empty.
        """
        if scope.heads is None:
            return
        if not scope.heads or not all(0 <= head < self.num_heads for head in scope.heads):
            raise InputError(
                f"heads={list(scope.heads)} is not valid: {self.adapter.name} has {self.num_heads} heads, counted from "
                "0"
            )

    @property
    def num_layers(self) -> int:
        """Number of attention calls in a pass."""
        return len(self.self_test.call_sites)

    @property
    def num_heads(self) -> int:
        """Number of heads of the last layer."""
        return self.self_test.call_sites[-1].num_heads

    def iter_batches(self, batch_size: int, progress: Progress = False) -> Iterator[tuple[list[int], "ProbeBatch"]]:
        """Yield batches of samples of similar length, each with the indices of its samples."""
        for indices in with_progress(list(iter_batch_indices(self.samples, batch_size)), progress):
            yield indices, ProbeBatch(self, [self.samples[i] for i in indices])

    def compute_probabilities(self, output: Any, samples: Sequence[Sample]) -> Float[Tensor, "batch label"]:
        """Compute the probabilities of all classes, or of the candidates among themselves."""
        scores = self.adapter.compute_class_scores(output, samples, [self.get_target(sample) for sample in samples])
        if scores.dtype != torch.float64:
            scores = scores.float()
        if self.candidate_indices is not None:
            scores = scores[:, self.candidate_indices]
        return compute_probabilities(scores, self.multi_label)

    @property
    def multi_label(self) -> bool:
        """Whether each label has its own independent probability."""
        return self.adapter.multi_label

    def get_predicted_label(self, probabilities: Float[Tensor, "label"]) -> str:
        """Return the name of the most likely class."""
        index = int(probabilities.argmax())
        if self.candidate_indices is not None:
            index = self.candidate_indices[index]
        return self.adapter.label_name(index)

    def find_readout_rows(self, sample: Sample) -> dict[int, float]:
        """Return the read-out rows of the last layer with their weights."""
        (rows,) = self.adapter.find_readouts(sample, self.get_target(sample)).values()
        return rows

    def find_readout_row(self, sample: Sample) -> int:
        """Return the read-out row of the last layer.

        Raises:
            UnsupportedError: The model reads several rows.
        """
        rows = self.find_readout_rows(sample)
        if len(rows) != 1:
            raise UnsupportedError(
                f"{type(self.adapter.model).__name__} reads {len(rows)} rows of its last layer: scopes S1 and S2 need "
                "a single read-out position; use S3 or S4"
            )
        return next(iter(rows))


class ProbeBatch:
    """Samples that go through the model together, with their unpatched and patched outputs.

    Args:
        context: The model and the targets of the probe.
        samples: The samples of the batch.
    """

    def __init__(self, context: ProbeContext, samples: Sequence[Sample]) -> None:
        self.context = context
        self.samples = list(samples)
        self.target_batch = TargetBatch(
            context.adapter, self.samples, [[context.get_target(sample)] for sample in self.samples]
        )
        self.lengths = [len(context.get_units(sample)) for sample in self.samples]

    @cached_property
    def unpatched_outputs(self) -> tuple[Float[Tensor, "batch label"], list[AttentionWeights]]:
        """The probabilities and the attention of every layer, without a patch."""
        with torch.no_grad():
            output, calls, _ = run_patched_forward(self.context.recorder, self.target_batch.model_inputs, [])
        return self.compute_probabilities(output), [call.attention for call in calls]

    @property
    def probabilities(self) -> Float[Tensor, "batch label"]:
        """The probabilities of the unpatched pass."""
        return self.unpatched_outputs[0]

    @property
    def attention(self) -> list[AttentionWeights]:
        """The attention of every layer in the unpatched pass."""
        return self.unpatched_outputs[1]

    @cached_property
    def valid_mask(self) -> Bool[Tensor, "batch unit"]:
        """Which units are not padding."""
        width = max(self.lengths)
        return torch.arange(width) < torch.tensor(self.lengths)[:, None]

    @cached_property
    def readout_mask(self) -> Bool[Tensor, "batch query"]:
        """The read-out row of each sample; with a pooling query, the row of that query."""
        query_mask = self.valid_mask[:, :1] if self.context.has_pooling_query else self.valid_mask
        mask = torch.zeros_like(query_mask)
        mask[torch.arange(len(self.samples)), [self.context.find_readout_row(sample) for sample in self.samples]] = True
        return mask

    @cached_property
    def special_mask(self) -> Bool[Tensor, "batch unit"]:
        """Which units are special tokens."""
        mask = torch.zeros_like(self.valid_mask)
        for i, sample in enumerate(self.samples):
            mask[i, : self.lengths[i]] = torch.tensor(self.context.get_units(sample).special)
        return mask

    def select_readout_attention(self, layer: int = -1) -> Float[Tensor, "batch head key"]:
        """Return the attention weights of the read-out row in one layer."""
        return self.attention[layer][torch.arange(len(self.samples)), :, self.readout_mask.long().argmax(1)]

    def compute_probabilities(self, output: Any) -> Float[Tensor, "batch label"]:
        """Compute the probabilities of all classes from a model output."""
        return self.context.compute_probabilities(output, self.samples)

    def repeat(self, times: int) -> "ProbeBatch":
        """Return a batch with each sample repeated `times` times in a row."""
        return ProbeBatch(self.context, [sample for sample in self.samples for _ in range(times)])

    def compute_patched_probabilities(
        self, weights: ReplacementFunction, scope: ProbeScope, frozen: bool = False, normalised: bool = True
    ) -> Float[Tensor, "batch label"]:
        """Compute the probabilities with attention weights replaced.

        Args:
            weights: Function that returns the replacement.
            scope: Which rows, heads and layers are replaced.
            frozen: Keep the attention of later layers as in the unpatched pass.
            normalised: Rescale the replaced rows to the sums of the original ones.
        """
        rows = self.readout_mask if scope.is_readout_row_only else None
        patch = AttentionPatch(weights, scope.resolve_layers(self.context.num_layers), scope.heads, rows, normalised)
        clean_attention = self.attention if frozen else None
        output, _, _ = run_patched_forward(
            self.context.recorder, self.target_batch.model_inputs, [patch], clean_attention
        )
        return self.compute_probabilities(output)

    def compute_max_weight(self, scope: ProbeScope) -> float:
        """Compute the largest weight of the rows in scope (mean over heads), averaged over rows and layers."""
        if scope.is_readout_row_only:
            return float(self.select_readout_attention()[0].mean(0).max())
        maps = [self.attention[layer][0].mean(0) for layer in scope.resolve_layers(self.context.num_layers)]
        return float(torch.stack(maps).amax(-1).mean())

    def format_input_name(self, sample_index: int) -> str:
        """Return the name of a sample for tables: its text, or the number of its units."""
        units = self.context.get_units(self.samples[sample_index])
        if units.texts:
            return " / ".join(units.texts)
        return f"{units.kind} × {len(units)}"


def has_last_row_shortcut(context: ProbeContext) -> bool:
    """Whether outputs at scope S1 can be computed from the last layer's read-out row alone."""
    return (
        isinstance(context.adapter, TextClassificationAdapter | MaskedLMAdapter | CausalLMAdapter)
        and all("input_ids" in sample.inputs for sample in context.samples)
        and context.self_test.capture_source.shows_computation
    )


class LastRowEvaluator:
    """Computes the outputs of a batch at scope S1; everything below the last layer is computed once."""

    def __init__(self, batch: ProbeBatch) -> None:
        """Run the layers below and check that the last row alone gives the model's output.

        Raises:
            UnsupportedError: The output depends on more than that row.
        """
        self.batch = batch
        self.adapter = batch.context.adapter
        self.readout_rows = batch.readout_mask.long().argmax(1)
        self.last_row = LastRowRunner(batch.context.recorder, batch.target_batch.model_inputs, self.readout_rows)
        self.attention = self.last_row.attention
        self.visible_mask = self.last_row.visible_keys
        self.unpatched_probabilities = batch.compute_probabilities(self.last_row.clean_output)
        with torch.no_grad():
            last_row_probabilities = self.compute_probabilities(self.attention[:, None])[:, 0]
        difference = float((last_row_probabilities - self.unpatched_probabilities).abs().max())
        if not difference <= PROBABILITY_TOLERANCES.get(self.adapter.dtype, 2e-2):  # NaN is rejected, too
            raise UnsupportedError(
                f"{type(self.adapter.model).__name__} computes a different output from the read-out position of the "
                f"last layer alone (difference {difference:.1e}): its output depends on other positions, too"
            )

    def compute_probabilities(self, weights: Float[Tensor, "batch draw head key"]) -> Float[Tensor, "batch draw label"]:
        """Compute the probabilities with each of these weights in the read-out row; gradients flow to the weights."""
        chunks = weights.split(max(1, MAX_LAST_LAYER_ROWS // len(weights)), dim=1)
        return torch.cat([self._compute_chunk_probabilities(chunk) for chunk in chunks], dim=1)

    def _compute_chunk_probabilities(
        self, weights: Float[Tensor, "batch draw head key"]
    ) -> Float[Tensor, "batch draw label"]:
        """Run the last row with all draws of all inputs as one batch, up to probabilities."""
        output = self.last_row.forward_with_weights(weights)
        num_draws = weights.shape[1]
        row_samples = [_make_one_row_sample(sample) for sample in self.batch.samples]
        samples = [sample for sample in row_samples for _ in range(num_draws)]
        probabilities = self.batch.context.compute_probabilities(output, samples)
        return probabilities.unflatten(0, (len(self.batch.samples), num_draws))


def _make_one_row_sample(sample: Sample) -> Sample:
    """A sample whose mask, or whose predicting row, is at position 0 of a sequence of one row."""
    sample = replace(sample, mask_positions=(0,) * len(sample.mask_positions))
    if isinstance(sample, PromptSample):
        sample = replace(sample, first_predicting_row=0, logit_rows=())
    return sample
