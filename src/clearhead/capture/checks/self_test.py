"""Recorded = real, or a loud refusal: what the recorder checks about a model on first use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clearhead.capture.checks.custom_attention import check_own, is_foreign, tensors_of
from clearhead.capture.checks.detached_gradients import gradients_are_cut
from clearhead.capture.checks.token_mixing import mixes_elsewhere
from clearhead.capture.layers import blocks_of
from clearhead.capture.session import at_rest, hooks
from clearhead.capture.sources.attention_interface import NAME, Captured
from clearhead.errors import Refusal

#: How far recorded logits may lie from the untouched model's, relative to the largest logit (float64: eager softmaxes
#: and norms of many models compute in float32 all the same, which rounds differently from machine to machine).
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}

#: A recorded forward pass: inputs and implementation → the model's output, its calls, the starts of the graph.
Forward = Callable[..., tuple[Any, list[Captured], dict[str, Tensor]]]


@dataclass(frozen=True)
class Place:
    """Where a call stands: whose queries look at whose keys, in which layer of those that these two share."""

    module: str
    query_stream: str
    key_stream: str
    layer: int
    shape: tuple[int, int, int]  # batch, queries and keys
    heads: int


@dataclass
class SelfTest:
    """What the recorder found out about a model on first use."""

    path: Literal["interface", "returned", "registered"]
    implementation: str
    capture_error: float
    rebuild_error: float | None
    places: tuple[Place, ...]
    mixes: bool = False  # whether positions see each other past the attention
    cuts: bool = False  # whether the model cuts its own gradients off, so that they must be made whole
    vectors: bool = True  # whether layers hand on one vector for each unit

    @property
    def calls(self) -> int:
        return len(self.places)

    def layers(self, query_stream: str, key_stream: str) -> int:
        """How many layers of attention these two streams share."""
        return sum((place.query_stream, place.key_stream) == (query_stream, key_stream) for place in self.places)

    @property
    def min_layers(self) -> int:
        """The smallest number of layers that any pair of streams shares."""
        pairs = {(place.query_stream, place.key_stream) for place in self.places}
        return min((self.layers(*pair) for pair in pairs), default=0)

    @property
    def crosses(self) -> bool:
        """Whether one stream looks at another."""
        return any(place.query_stream != place.key_stream for place in self.places)


def self_test(
    model: nn.Module,
    forward: Forward,
    inputs: Mapping[str, Any],
    placed: Callable[[Sequence[Captured]], list[Place]],
    expected: int | None,
    padded: Mapping[str, Any] | None = None,
) -> SelfTest:
    """Count calls against layers, rebuild each attention output, compare logits with those of the untouched model.

    `padded` is a batch with padding in it, for models that have other names for what hides it than transformers.
    """
    with at_rest(model), torch.no_grad():
        implementation, calls = _find_implementation(model, forward, inputs)
        _check_count(model, calls, expected)
        rebuild_error = _check_rebuilt(model, calls)
        chosen = partial(forward, implementation=implementation)
        if is_foreign(model) or any(call.registered for call in calls):
            for batch in (inputs, padded):
                if batch is not None:
                    check_own(model, chosen, batch, placed, _tolerance(calls[0].attention))
        if any(call.output is None and not call.registered for call in calls):
            _check_returned(model, chosen, inputs)
        capture_error = _check_logits(model, chosen, inputs)
        if rebuild_error is not None:
            # A padding mask that gets lost shows only where something is hidden.
            padded = padded or _last_hidden(inputs)
        if padded is not None:
            _check_logits(model, chosen, padded, " and part of the input is padding")
            _check_rebuilt(model, chosen(padded)[1])
        mixes = mixes_elsewhere(model, chosen, inputs)
        cuts = gradients_are_cut(chosen, inputs, _first_tensor)
        vectors = _hands_on_vectors(chosen(inputs, asks=frozenset({"attention", "block_input"}))[1])
    places = tuple(placed(calls))
    return SelfTest(_path(calls), implementation, capture_error, rebuild_error, places, mixes, cuts, vectors)


def streaming_test(model: nn.Module, forward: Forward, inputs: Mapping[str, Any], tested: SelfTest) -> float:
    """Compare the logits of a streaming pass with those of the untouched model, with and without padding."""
    if tested.path != "interface":
        raise Refusal(
            f"{type(model).__name__} ignores transformers' attention interface, so its attention cannot be had tile by "
            "tile: its maps are recorded whole, or not at all"
        )
    with at_rest(model), torch.no_grad():
        when = " tile by tile"
        gaps = [_check_logits(model, forward, batch, when) for batch in (inputs, _last_hidden(inputs))]
    return max(gaps)


def _hands_on_vectors(calls: Sequence[Captured]) -> bool:
    """Whether what goes into layers is batch × unit × model; hyper-connections hand on several vectors for each."""
    inputs = [(call.block_input, call.attention.shape) for call in calls if call.block_input is not None]
    return all(part.dim() == 3 and len(part) == shape[0] and part.shape[1] in shape[2:] for part, shape in inputs)


def _path(calls: Sequence[Captured]) -> Literal["interface", "returned", "registered"]:
    """The way that calls were heard on; of several ways, the one that says least."""
    if all(call.output is not None for call in calls):
        return "interface"
    return "registered" if all(call.registered or call.output is not None for call in calls) else "returned"


def _find_implementation(model: nn.Module, forward: Forward, inputs: Mapping[str, Any]) -> tuple[str, list[Captured]]:
    for implementation in (NAME, "eager"):
        try:
            _, calls, _ = forward(inputs, implementation=implementation)
        except KeyError as problem:
            if problem.args != (NAME,):
                raise
            continue  # a table of attention functions of its own, as ModernBERT had in transformers 5.0
        if calls:
            return implementation, calls
    hint = "say how its attention modules attend with clearhead.register_attention; or " if is_foreign(model) else ""
    if any("Sdpa" in type(module).__name__ for module in model.modules()):  # chosen for good when it was built
        hint = "load it with attn_implementation='eager', so that its attention can be seen; or "
    raise Refusal(
        f"{type(model).__name__} made no attention call that could be recorded: {hint}is it a model without attention?"
    )


def _check_count(model: nn.Module, calls: list[Captured], expected: int | None) -> None:
    if expected is not None and len(calls) != expected:
        raise Refusal(
            f"{type(model).__name__} has {expected} attention layers but {len(calls)} calls were recorded: "
            + ", ".join(call.module for call in calls)
        )


def _check_rebuilt(model: nn.Module, calls: Sequence[Captured]) -> float | None:
    """How far outputs lie from what recorded attention makes of the values, at most; None where neither was heard."""
    gaps = []
    for call in calls:
        if call.output is None:
            continue
        gaps.append(call.rebuild_error())
        if not gaps[-1] <= _tolerance(call.output):
            _check_numbers(model)
            raise Refusal(
                f"{type(model).__name__}: the attention recorded in {call.module} is not what it used (relative gap "
                f"{gaps[-1]:.1e})"
            )
    return max(gaps, default=None)


def _check_returned(model: nn.Module, forward: Forward, inputs: Mapping[str, Any]) -> None:
    """What modules return as their attention is what they attended with: shares of one, which the output comes from."""
    with torch.enable_grad():
        output, calls, _ = forward(inputs)
        maps = [call.attention for call in calls]
        number = _first_tensor(output).square().sum()
        used = [part for part in maps if part.requires_grad] if number.requires_grad else []
        gradients = torch.autograd.grad(number, used, allow_unused=True) if used else ()
    for call, part in zip(calls, maps, strict=True):
        if not (bool((part >= 0).all()) and bool((part.sum(-1) <= 1.01).all())):
            _check_numbers(model)
            least, most = float(part.min()), float(part.max())
            raise Refusal(
                f"{type(model).__name__}: what {call.module} returns as its attention are no shares of one (from "
                f"{least:.2g} to {most:.2g})"
            )
    if all(gradient is None for gradient in gradients):
        raise Refusal(f"{type(model).__name__}: its output does not come from what it returns as its attention")


def _check_logits(model: nn.Module, forward: Forward, inputs: Mapping[str, Any], when: str = "") -> float:
    real = _first_tensor(model(**inputs))
    gap = _gap(_first_tensor(forward(inputs)[0]), real)
    if not gap <= _tolerance(real):
        _check_numbers(model, real)
        raise Refusal(
            f"{type(model).__name__}: logits change by {gap:.1e} (relative) when its attention is recorded{when}; the "
            f"first layer to differ is {_first_to_differ(model, forward, inputs, _tolerance(real))}"
        )
    return gap


def _check_numbers(model: nn.Module, output: Tensor | None = None) -> None:
    """Where something differs: does recording change the model, or does the model not give numbers by itself?"""
    here = [(name, part) for name, part in model.named_parameters() if part.is_floating_point() and not part.is_meta]
    broken = [name for name, part in here if not bool(part.isfinite().all())]
    if broken:
        raise Refusal(f"{type(model).__name__} has weights that are NaN or infinite, so has no answer: {broken[0]}")
    if output is not None and not bool(output.isfinite().all()):
        raise Refusal(
            f"{type(model).__name__} itself answers NaN or infinity in {output.dtype}: try another dtype, or input"
        )


def _first_to_differ(model: nn.Module, forward: Forward, inputs: Mapping[str, Any], tolerance: float) -> str:
    """The first layer whose output changes when the model is recorded."""
    blocks = {id(block) for block in blocks_of(model).values()}
    layers = {name: module for name, module in model.named_modules() if id(module) in blocks}
    seen: list[tuple[str, Tensor]] = []

    def remember(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            seen.append((name, first))

    with hooks([module.register_forward_hook(partial(remember, name)) for name, module in layers.items()]):
        model(**inputs)
        real = list(seen)
        seen.clear()
        forward(inputs)
    pairs = zip(real, seen, strict=False)
    return next((name for (name, one), (_, two) in pairs if not _gap(two, one) <= tolerance), "none: its head")


def _tolerance(tensor: Tensor) -> float:
    return TOLERANCE.get(tensor.dtype, 1e-4)


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the size of `other`."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))


def _last_hidden(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same input with its last token hidden as padding is, where it has tokens to hide."""
    mask = inputs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < 2:
        return inputs
    hidden = mask.clone()
    hidden[:, -1] = 0
    return {**inputs, "attention_mask": hidden}


def _first_tensor(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if not hasattr(output, "items"):  # a module of one's own may return anything
        return torch.cat([part.flatten() for part in tensors_of(output)])
    parts = {name: part for name, part in output.items() if isinstance(part, Tensor)}
    # A similarity can be next to nothing, and any rounding large beside it: compare the vectors that it is made of.
    embeds = [part.flatten() for name, part in parts.items() if name.endswith("_embeds")]
    return torch.cat(embeds) if embeds else next(iter(parts.values()))


#: What configurations call layers that have no attention: convolutions, recurrences, or no look at others at all.
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp")


def expected_calls(config: Any) -> int | None:
    """How many attention calls one forward pass of this configuration should make; None where it does not say."""
    if getattr(config, "depths", None) is not None:
        return sum(config.depths)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None)
    if kinds and layers is not None and len(kinds) == layers:
        layers = sum(kind not in _WITHOUT_ATTENTION for kind in kinds)
    if getattr(config, "is_encoder_decoder", False):
        decoder = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None)
        encoder = getattr(config, "encoder_layers", None) or layers
        return encoder + 2 * decoder if encoder and decoder else None
    if getattr(config, "sub_configs", None):
        parts = [expected_calls(getattr(config, name)) for name in config.sub_configs if getattr(config, name, None)]
        return sum(part or 0 for part in parts) or layers
    return layers
