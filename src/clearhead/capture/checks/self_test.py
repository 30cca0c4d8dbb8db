"""Self-test of the recorder on first use: A·V must give the attention outputs, and logits must stay the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.capture.attention_calls import find_capture_source
from clearhead.capture.checks.custom_attention import (
    check_custom_attention,
    is_non_transformers_model,
    iter_float_tensors,
)
from clearhead.capture.checks.detached_gradients import detaches_gradients
from clearhead.capture.checks.token_mixing import mixes_tokens_outside_attention
from clearhead.capture.context import IMPLEMENTATION_NAME, CapturedCall
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.sources.base import CaptureSource
from clearhead.capture.sources.custom_modules import CUSTOM_MODULES
from clearhead.capture.sources.returned_attentions import RETURNED_ATTENTIONS
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

#: Largest difference between captured logits and those of the unmodified model, relative to the largest logit.
#: (float64: eager softmaxes and norms of many models compute in float32, which rounds differently between machines.)
RELATIVE_TOLERANCE_BY_DTYPE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}

#: A captured forward pass: maps inputs and options to the model's output, its calls and the leaves of the graph.
CaptureForward = Callable[..., tuple[Any, list[CapturedCall], dict[str, Tensor]]]


@dataclass(frozen=True)
class CallSite:
    """Position of a call in the model: its module, its streams, and its layer.

    Attributes:
        module: Name of the attention module.
        query_stream: Stream of the queries.
        key_stream: Stream of the keys.
        layer: Number of the layer among those that share the two streams, from 0.
        shape: Batch size, number of queries, number of keys.
        num_heads: Number of heads.
    """

    module: str
    query_stream: str
    key_stream: str
    layer: int
    shape: tuple[int, int, int]
    num_heads: int


@dataclass
class SelfTest:
    """Result of the self-test of a model.

    Attributes:
        capture_source: How calls are captured; of several sources, the one that shows least of a call.
        implementation: The attention implementation to switch to during a captured pass.
        capture_error: Largest relative difference of the logits.
        rebuild_error: Largest relative difference between attention outputs and A·V; None if outputs are unknown.
        call_sites: Position of each call.
        mixes_outside_attention: Whether tokens depend on each other through anything but attention.
        detaches_gradients: Whether the model detaches its own gradients, which a captured pass must ignore.
        has_unit_vectors: Whether layers pass on one vector for each unit.
    """

    capture_source: CaptureSource
    implementation: str
    capture_error: float
    rebuild_error: float | None
    call_sites: tuple[CallSite, ...]
    mixes_outside_attention: bool = False
    detaches_gradients: bool = False
    has_unit_vectors: bool = True

    @property
    def num_calls(self) -> int:
        """Number of attention calls in a pass."""
        return len(self.call_sites)

    def count_layers(self, query_stream: str, key_stream: str) -> int:
        """Count the layers of attention from one stream to another.

        Args:
            query_stream: Stream of the queries.
            key_stream: Stream of the keys.

        Returns:
            The number of such attention calls in one pass; 0 if the model has none.
        """
        return sum((site.query_stream, site.key_stream) == (query_stream, key_stream) for site in self.call_sites)

    @property
    def min_layers(self) -> int:
        """The smallest number of layers of any pair of streams."""
        pairs = {(site.query_stream, site.key_stream) for site in self.call_sites}
        return min((self.count_layers(*pair) for pair in pairs), default=0)

    @property
    def has_cross_attention(self) -> bool:
        """Whether one stream attends to another."""
        return any(site.query_stream != site.key_stream for site in self.call_sites)


def run_self_test(
    topology: ModelTopology,
    forward: CaptureForward,
    inputs: Mapping[str, Any],
    locate_calls: Callable[[Sequence[CapturedCall]], list[CallSite]],
    num_expected_calls: int | None,
    padded_inputs: Mapping[str, Any] | None = None,
) -> SelfTest:
    """Compare calls with layers, attention outputs with A·V, and logits with those of the unmodified model.

    The caller has opened the model's session, without gradients.

    Args:
        topology: The modules of the model.
        forward: Captured forward pass.
        inputs: Keyword arguments of the model.
        locate_calls: Returns the call site of each call.
        num_expected_calls: How many calls a pass should have; None if unknown.
        padded_inputs: Inputs with padding, for models whose mask has another name than `attention_mask`.

    Returns:
        The result, if all checks pass.

    Raises:
        UnsupportedError: The attention of this model cannot be captured exactly; the message says why.
    """
    model = topology.model
    implementation, calls = _find_implementation(topology, forward, inputs)
    _check_call_count(model, calls, num_expected_calls)
    rebuild_error = _check_rebuilt_outputs(model, calls)
    switched_forward = partial(forward, implementation=implementation)
    if is_non_transformers_model(topology) or any(call.source is CUSTOM_MODULES for call in calls):
        for batch in (inputs, padded_inputs):
            if batch is not None:
                tolerance = _get_tolerance(calls[0].attention)
                check_custom_attention(topology, switched_forward, batch, locate_calls, tolerance)
    if any(call.source is RETURNED_ATTENTIONS for call in calls):
        _check_returned_attention(model, switched_forward, inputs)
    capture_error = _check_logits(topology, switched_forward, inputs)
    if rebuild_error is not None:
        # a lost padding mask shows only if a token is masked
        padded_inputs = padded_inputs or _mask_last_token(inputs)
    if padded_inputs is not None:
        _check_logits(topology, switched_forward, padded_inputs, " and part of the input is padding")
        _check_rebuilt_outputs(model, switched_forward(padded_inputs)[1])
    mixes_outside_attention = mixes_tokens_outside_attention(topology, switched_forward, inputs)
    is_detaching = detaches_gradients(switched_forward, inputs, _select_comparison_tensor)
    calls_with_layer_io = switched_forward(inputs, requires=frozenset({"attention", "block_input"}))[1]
    return SelfTest(
        capture_source=find_capture_source(calls),
        implementation=implementation,
        capture_error=capture_error,
        rebuild_error=rebuild_error,
        call_sites=tuple(locate_calls(calls)),
        mixes_outside_attention=mixes_outside_attention,
        detaches_gradients=is_detaching,
        has_unit_vectors=_has_unit_vectors(calls_with_layer_io),
    )


def run_tiling_test(
    topology: ModelTopology, forward: CaptureForward, inputs: Mapping[str, Any], self_test: SelfTest
) -> float:
    """Compare the logits of a tiled pass with those of the unmodified model, with and without padding.

    The caller has opened the model's session, without gradients.

    Args:
        topology: The modules of the model.
        forward: Captured forward pass with tiles.
        inputs: Keyword arguments of the model.
        self_test: Result of the self-test.

    Returns:
        The largest relative difference.

    Raises:
        UnsupportedError: The logits differ, or the model cannot be captured tile by tile.
    """
    if not self_test.capture_source.shows_computation:
        raise UnsupportedError(
            f"{type(topology.model).__name__} ignores transformers' attention interface, so its attention cannot be "
            "computed tile by tile: only materialised maps can be captured"
        )
    return max(_check_logits(topology, forward, batch, " tile by tile") for batch in (inputs, _mask_last_token(inputs)))


def _has_unit_vectors(calls: Sequence[CapturedCall]) -> bool:
    """Whether layer inputs are batch × unit × model; hyper-connections pass on several vectors for each unit."""
    for call in calls:
        if call.block_input is None:
            continue
        batch, _, *lengths = call.attention.shape
        layer_input = call.block_input
        if layer_input.dim() != 3 or len(layer_input) != batch or layer_input.shape[1] not in lengths:
            return False
    return True


def _find_implementation(
    topology: ModelTopology, forward: CaptureForward, inputs: Mapping[str, Any]
) -> tuple[str, list[CapturedCall]]:
    """The first attention implementation with which calls are captured, and the calls."""
    for implementation in (IMPLEMENTATION_NAME, "eager"):
        try:
            _, calls, _ = forward(inputs, implementation=implementation)
        except KeyError as error:
            if error.args != (IMPLEMENTATION_NAME,):
                raise
            continue  # the model has its own table of attention functions, as ModernBERT had in transformers 5.0
        if calls:
            return implementation, calls
    hint = "it may be a model without attention"
    if is_non_transformers_model(topology):
        hint = f"register a function for its attention modules with clearhead.register_attention, or {hint}"
    if any("Sdpa" in cls.__name__ for cls in topology.module_classes):  # fixed when the model is built
        hint = "load it with attn_implementation='eager', so that its attention can be captured"
    raise UnsupportedError(f"{type(topology.model).__name__} made no attention call that can be captured: {hint}")


def _check_call_count(model: nn.Module, calls: list[CapturedCall], expected: int | None) -> None:
    """Check that a pass makes the expected number of calls, if it is known."""
    if expected is not None and len(calls) != expected:
        raise UnsupportedError(
            f"{type(model).__name__} has {expected} attention layers but {len(calls)} calls were recorded: "
            + ", ".join(call.module for call in calls)
        )


def _check_rebuilt_outputs(model: nn.Module, calls: Sequence[CapturedCall]) -> float | None:
    """Check that attention outputs equal A·V.

    Returns:
        The largest relative difference; None if no output was captured.
    """
    gaps = []
    for call in calls:
        if call.output is None:
            continue
        gaps.append(call.compute_rebuild_error())
        if not gaps[-1] <= _get_tolerance(call.output):
            _check_finite(model)
            raise UnsupportedError(
                f"{type(model).__name__}: the attention recorded in {call.module} is not the attention that it used "
                f"(relative gap {gaps[-1]:.1e})"
            )
    return max(gaps, default=None)


def _check_returned_attention(model: nn.Module, forward: CaptureForward, inputs: Mapping[str, Any]) -> None:
    """Check that the attention which modules return is a probability distribution, and that the output uses it."""
    gradients: Sequence[Tensor | None] = ()
    with torch.enable_grad():
        output, calls, _ = forward(inputs)
        scalar = _select_comparison_tensor(output).square().sum()
        differentiable_maps = [call.attention for call in calls if call.attention.requires_grad]
        if scalar.requires_grad and differentiable_maps:
            gradients = torch.autograd.grad(scalar, differentiable_maps, allow_unused=True)
    for call in calls:
        attention = call.attention
        if not (bool((attention >= 0).all()) and bool((attention.sum(-1) <= 1.01).all())):
            _check_finite(model)
            raise UnsupportedError(
                f"{type(model).__name__}: the attention that {call.module} returns is not a probability distribution "
                f"(values from {float(attention.min()):.2g} to {float(attention.max()):.2g})"
            )
    if all(gradient is None for gradient in gradients):
        raise UnsupportedError(f"{type(model).__name__}: its output does not depend on the attention that it returns")


def _check_logits(
    topology: ModelTopology, forward: CaptureForward, inputs: Mapping[str, Any], condition: str = ""
) -> float:
    """Check that captured logits equal those of the unmodified model, and return the relative difference.

    `condition` is added to the error message.
    """
    model = topology.model
    logits = _select_comparison_tensor(model(**inputs))
    tolerance = _get_tolerance(logits)
    gap = _compute_relative_gap(_select_comparison_tensor(forward(inputs)[0]), logits)
    if not gap <= tolerance:
        _check_finite(model, logits)
        layer = _find_first_differing_layer(topology, forward, inputs, tolerance)
        raise UnsupportedError(
            f"{type(model).__name__}: logits change by {gap:.1e} (relative) when its attention is recorded{condition}; "
            f"the first layer to differ is {layer}"
        )
    return gap


def _check_finite(model: nn.Module, output: Tensor | None = None) -> None:
    """Raise an error if a difference has its cause in the model itself: weights or outputs that are not finite."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta:
            continue
        if not bool(parameter.isfinite().all()):
            raise UnsupportedError(
                f"{type(model).__name__} has weights that are NaN or infinite, so that it has no valid output: {name}"
            )
    if output is not None and not bool(output.isfinite().all()):
        raise UnsupportedError(
            f"{type(model).__name__} itself outputs NaN or infinity in {output.dtype}: try another dtype or another "
            "input"
        )


def _find_first_differing_layer(
    topology: ModelTopology, forward: CaptureForward, inputs: Mapping[str, Any], tolerance: float
) -> str:
    """Name of the first layer whose output changes when the model is captured."""
    layers = {topology.names[id(layer)]: layer for layer in topology.layers}
    outputs: list[tuple[str, Tensor]] = []

    def keep_output(name: str, module: nn.Module, args: Any, output: Any) -> None:
        hidden_state = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden_state, Tensor):
            outputs.append((name, hidden_state))

    with remove_hooks_on_exit(
        [module.register_forward_hook(partial(keep_output, name)) for name, module in layers.items()]
    ):
        topology.model(**inputs)
        expected_outputs = list(outputs)
        outputs.clear()
        forward(inputs)
    for (name, expected), (_, captured) in zip(expected_outputs, outputs, strict=False):
        if not _compute_relative_gap(captured, expected) <= tolerance:
            return name
    return "none: its head"


def _get_tolerance(tensor: Tensor) -> float:
    """Return the largest relative difference accepted for a tensor's dtype."""
    return RELATIVE_TOLERANCE_BY_DTYPE.get(tensor.dtype, 1e-4)


def _compute_relative_gap(tensor: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest absolute value of `reference`."""
    return float((tensor - reference).abs().max() / reference.abs().max().clamp(min=1e-12))


def _mask_last_token(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same inputs with the last token masked like padding, if they have an attention mask."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2:
        return inputs
    padded_mask = mask.clone()
    padded_mask[:, -1] = 0
    return {**inputs, "attention_mask": padded_mask}


def _select_comparison_tensor(output: Any) -> Tensor:
    """The tensor of a model's output that two passes are compared by: logits, embeddings, or its first tensor."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if not hasattr(output, "items"):  # a custom module may return anything
        return torch.cat([tensor.flatten() for tensor in iter_float_tensors(output)])
    tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
    # A similarity can be close to zero, so that rounding is relatively large: compare the embeddings instead.
    embeddings = [tensor.flatten() for name, tensor in tensors.items() if name.endswith("_embeds")]
    if embeddings:
        return torch.cat(embeddings)
    return next(iter(tensors.values()))


#: Types of layers without attention in configurations: convolutions, recurrences, or no mixing of tokens at all.
_LAYER_TYPES_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp")


def count_calls_from_config(config: Any) -> int | None:
    """Return how many attention calls a forward pass of this configuration has; None if it does not tell.

    Args:
        config: Configuration of a transformers model.

    Returns:
        Encoder layers plus two per decoder layer (self and cross), or the layers with attention of other models.
    """
    if getattr(config, "depths", None) is not None:
        return sum(config.depths)
    layers = getattr(config, "num_hidden_layers", None)
    layer_types = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if layer_types and layers is not None and len(layer_types) == layers:
        layers = sum(layer_type not in _LAYER_TYPES_WITHOUT_ATTENTION for layer_type in layer_types)
    if getattr(config, "is_encoder_decoder", False):
        decoder = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None)
        encoder = getattr(config, "encoder_layers", None) or layers
        return encoder + 2 * decoder if encoder and decoder else None
    if getattr(config, "sub_configs", None):
        sub_configs = [getattr(config, name, None) for name in config.sub_configs]
        counts = [count_calls_from_config(sub_config) for sub_config in sub_configs if sub_config]
        return sum(count or 0 for count in counts) or layers
    return layers
