"""A concept as an explanation target: how strongly a direction is activated at layer k, at one unit of the input.

`make_concept_explainer` returns an explainer of the model up to that layer, whose single output is h_p·q. Every
method explains it like a class score. Attention above the layer is not captured, because no gradient passes through it.

>>> concept = make_concept_explainer(ex, gender[6], layer=6, position="nurse")            # doctest: +SKIP
>>> concept.explain("The nurse is here.")                                                 # doctest: +SKIP
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, ModelAdapter
from clearhead.concepts.directions import EMBEDDINGS, Direction, Directions, LayerIndex
from clearhead.concepts.hidden_states import read_samples
from clearhead.concepts.layer_hooks import (
    HookPoint,
    find_hook_points,
    find_self_attention_calls,
    get_hook_point_index,
    get_self_test,
    hooked_layers,
    resolve_layer_index,
)
from clearhead.errors import ClearheadWarning, InputError, UnsupportedError
from clearhead.explainer import Explainer
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import Units

#: The index of a unit (negative from the end), a word of the text, or "class" for the model's read-out rows.
UnitPosition = int | str


def make_concept_explainer(
    explainer: Explainer,
    direction: Direction,
    layer: LayerIndex,
    position: UnitPosition = "class",
    name: str | None = None,
) -> Explainer:
    """Make an explainer of a concept: its single output is the activation along a direction, h·q, at one unit.

    Args:
        explainer: Explainer of the whole model.
        direction: Direction at this layer.
        layer: Layer whose output is read, from 0; negative numbers count from the end.
        position: Index of a unit, a word of the text, or "class" for the rows that the model's own output is read from.
        name: Label of the output; default: the direction's first name and the layer.

    Returns:
        An explainer whose methods attribute the activation to the input.

    Raises:
        InputError: Not a Direction, or a layer that does not exist or has no attention below it.
        UnsupportedError: A model with several streams.
    """
    if not isinstance(direction, Direction):
        hint = ", such as densray and TCAV return"
        if isinstance(direction, Directions):
            hint = ", directions[k]"
        raise InputError(f"pass the Direction of one layer{hint}, not {type(direction).__name__}")
    if len(explainer.adapter.input_names) != 1 or get_self_test(explainer).has_cross_attention:
        raise UnsupportedError(
            f"{explainer.adapter.name} has several streams: concepts can be explained only in models with one stream"
        )
    call_indices = find_self_attention_calls(explainer)
    hook_points = find_hook_points(explainer)
    layer_index = resolve_layer_index(layer, len(call_indices))
    if layer_index == EMBEDDINGS:
        raise InputError("there is no attention below the embeddings: use a layer index, counted from 0")
    num_layers = get_hook_point_index(layer_index)
    readout = _ConceptReadout(
        explainer,
        direction,
        hook_points[num_layers],
        call_indices[:num_layers],
        position,
        name or f"{direction.names[0]} at layer {layer_index}",
    )
    return Explainer(_make_concept_adapter(explainer, readout, (explainer, direction, layer, position, name)))


def _rebuild_adapter(*factory_args: Any) -> ModelAdapter:
    """Rebuild an adapter when it is unpickled, from the arguments of `make_concept_explainer`."""
    return make_concept_explainer(*factory_args).adapter


@dataclass
class ConceptSample(Sample):
    """A sample with its read-out positions; by its type, perturbation knows that no unit may be deleted.

    Attributes:
        read_positions: Indices of the units at which the concept is read.
    """

    read_positions: tuple[int, ...] = ()


class _ConceptReadout:
    """Where a concept is read; `thread_states` holds the layer's states of the latest pass of each thread."""

    def __init__(
        self,
        explainer: Explainer,
        direction: Direction,
        hook_point: HookPoint,
        kept_indices: Sequence[int],
        position: UnitPosition,
        name: str,
    ) -> None:
        self.explainer = explainer
        self.direction = direction
        self.hook_point = hook_point
        self.position = position
        self.name = name
        self.thread_states = threading.local()
        occurrences: dict[str, int] = {}
        #: The attention calls below the layer, as (module, occurrence).
        self.kept_calls: set[tuple[str, int]] = set()
        for i, call_site in enumerate(get_self_test(explainer).call_sites):
            occurrence = occurrences.get(call_site.module, 0)
            occurrences[call_site.module] = occurrence + 1
            if i in kept_indices:
                self.kept_calls.add((call_site.module, occurrence))

    def store_states(self, states: Tensor) -> None:
        """Hook of the layer that is read: keep the states of this thread's latest pass."""
        self.thread_states.states = states

    def locate(self, sample: Sample) -> ConceptSample:
        """Copy a sample and add the positions at which the concept is read."""
        return ConceptSample(**vars(sample), read_positions=self._find_positions(sample))

    def _find_positions(self, sample: Sample) -> tuple[int, ...]:
        """Resolve `position` to unit indices: the model's read-out rows, the units of a word, or one index."""
        units = sample.units
        position = self.position
        adapter = self.explainer.adapter
        if position == "class":
            if adapter.masked and not sample.mask_positions:
                raise InputError(
                    "position='class' is the position of the mask, and the text has no mask: use a word or the index "
                    "of a unit"
                )
            return tuple(adapter.find_readouts(sample, Target(lambda output: output))[adapter.stream])
        if isinstance(position, str):
            return _find_word_units(units, position)
        if not -len(units) <= position < len(units):
            raise InputError(f"position={position}, but the input has {len(units)} units, counted from 0")
        return (position % len(units),)


def _get_readout_weights(sample: Sample) -> dict[int, float]:
    """Weight all read-out positions equally, with the sum 1."""
    assert isinstance(sample, ConceptSample)
    return dict.fromkeys(sample.read_positions, 1 / len(sample.read_positions))


def _find_word_units(units: Units, word: str) -> tuple[int, ...]:
    """The units (subword tokens) of the first occurrence of a word; warns if there are further occurrences."""
    if units.kind != "token":
        raise InputError(f"position={word!r} is a word, but the input has no words: use the index of a unit")
    merged, parents = units.merge("word")
    matches = [
        tuple(i for i, parent in enumerate(parents) if parent == word_index)
        for word_index, name in enumerate(merged.names)
        if name.casefold() == word.casefold() and not merged.special[word_index]
    ]
    if not matches:
        words = ", ".join(merged.names)
        raise InputError(f"position={word!r}, but that word is not in the text: its words are {words}")
    if len(matches) > 1:
        first_units = ", ".join(str(match[0]) for match in matches)
        warnings.warn(
            f"{word!r} occurs {len(matches)} times in the text, and the first occurrence is used: for another, use the "
            f"index of its unit ({first_units})",
            ClearheadWarning,
            stacklevel=2,
        )
    return matches[0]


def _make_concept_adapter(
    explainer: Explainer, readout: _ConceptReadout, factory_args: tuple[Any, ...]
) -> ModelAdapter:
    """An adapter of the same class with the concept as its output; `factory_args` rebuild it when it is unpickled."""
    adapter_class = type(explainer.adapter)

    class ConceptAdapter(adapter_class):  # type: ignore[valid-type, misc]
        """A model up to a layer, with the activation along a direction as its output."""

        masked: ClassVar[bool] = False
        score_is_product: ClassVar[bool] = False

        def __reduce__(self) -> Any:  # the class is local and cannot be pickled; `readout` is bound to one model
            return _rebuild_adapter, factory_args

        def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
            return [readout.locate(sample) for sample in read_samples(readout.explainer, raw, options)]

        def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
            return _get_readout_weights(sample)

        def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
            return {self.stream: _get_readout_weights(sample)}

        def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
            if (module, occurrence) not in readout.kept_calls:
                return None
            return adapter_class.find_call_streams(self, module, occurrence)

        def count_expected_calls(self) -> int | None:
            return len(readout.kept_calls)

        def forward_context(self) -> Any:
            model_context = adapter_class.forward_context(self)
            return _capturing_states(model_context, self.model, readout.hook_point, readout.store_states)

        def compute_class_scores(
            self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
        ) -> Float[Tensor, "batch label"]:
            projections = readout.direction.project(readout.thread_states.states)
            weights = torch.zeros(
                len(samples), projections.shape[1], dtype=projections.dtype, device=projections.device
            )
            for i, sample in enumerate(samples):
                rows = _get_readout_weights(sample)
                weights[i, list(rows)] = torch.tensor(list(rows.values())).to(weights)
            return (projections.repeat(len(samples) // len(projections), 1) * weights).sum(1, keepdim=True)

        @property
        def is_regression(self) -> bool:
            return True

        def label_index(self, label: str | int) -> int:
            return ModelAdapter.label_index(self, label)

        def label_name(self, index: int) -> str:
            return ModelAdapter.label_name(self, index)

        def find_head_rows(self, samples: Sequence[Sample], targets: Sequence[Target]) -> None:
            return None

    ConceptAdapter.__name__ = adapter_class.__name__
    adapter = ConceptAdapter(
        explainer.adapter.model, explainer.adapter.processor, explainer.adapter.readout, explainer.adapter.name
    )
    adapter.labels = {0: readout.name}
    adapter.multi_label = False
    return adapter


@contextmanager
def _capturing_states(
    model_context: Any, model: Any, hook_point: HookPoint, store: Callable[[Tensor], None]
) -> Iterator[None]:
    """Inside the `with`, `model_context` is active and `store` receives the states at the hook point."""
    with model_context, hooked_layers(model, {hook_point: store}):
        yield
