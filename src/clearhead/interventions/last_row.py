"""Evaluates many attention patterns of one row of the last layer at the cost of that row.

If the output depends on a single row of the last layer (the read-out position), new attention weights in that row
change neither lower layers nor other rows. The lower layers are computed once. The model then runs on a sequence of
length one: layers below the last return their input, the last receives the row's cached input, and its attention
returns the new weights times the cached values.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clearhead.capture.context import IMPLEMENTATION_NAME
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit, switched_attention_implementation
from clearhead.capture.sources.attention_interface import replaced_attention_output
from clearhead.capture.tape import resolve_requirements
from clearhead.interventions.attention_patch import AttentionPatch, AttentionWeights, VisibleKeys, run_patched_forward


class LastRowRunner:
    """Runs the last layer of one batch for the read-out row of each sample.

    The constructor runs one clean pass.

    Args:
        recorder: Recorder of the model.
        inputs: The model's keyword arguments for the batch.
        readout_rows: The read-out position of each sample.

    Attributes:
        clean_output: The model's output in the clean pass.
        visible_keys: The keys that the read-out row can see.
        attention: The attention weights of the read-out row in the last layer.
    """

    def __init__(self, recorder: Recorder, inputs: Mapping[str, Any], readout_rows: Int[Tensor, "batch"]) -> None:
        self.recorder = recorder
        self.thread_id = threading.get_ident()
        self.model = recorder.model
        batch_size = len(readout_rows)
        samples = torch.arange(batch_size)
        call_sites = recorder.run_self_test(inputs).call_sites
        layer_of_module = recorder.session.topology.layer_of_module
        self.attention_module = call_sites[-1].module
        self.layers = [layer_of_module[id(self.model.get_submodule(site.module))] for site in call_sites]
        self.tuple_lengths: dict[int, int] = {}  # length of the tuple that a layer returns, if it returns one
        hooks = [
            layer.register_forward_hook(self._record_tuple_length)
            for layer in {id(layer): layer for layer in self.layers}.values()
        ]
        visible_keys: list[VisibleKeys] = []

        def record_visible_keys(attention: AttentionWeights, visible: VisibleKeys, layer: int) -> AttentionWeights:
            visible_keys.append(visible)
            return attention

        requirements = resolve_requirements(("attention", "values", "block_input"))
        patches = [AttentionPatch(record_visible_keys, layers=[len(call_sites) - 1], keep_row_sums=False)]
        with recorder.session.running(), remove_hooks_on_exit(hooks):
            self.clean_output, calls, _ = run_patched_forward(recorder, inputs, patches, requires=requirements)
        last_call = calls[-1]
        assert last_call.block_input is not None
        visible_in_batch = visible_keys[0].expand(batch_size, -1, -1, -1)
        self.visible_keys: Bool[Tensor, "batch key"] = visible_in_batch[samples, 0, readout_rows]
        self.attention: Float[Tensor, "batch head key"] = last_call.attention[samples, :, readout_rows]
        self.values: Float[Tensor, "batch head key width"] = last_call.repeat_values_per_head()
        self.layer_input: Float[Tensor, "batch model"] = last_call.block_input[samples, readout_rows]
        num_rows = inputs["input_ids"].shape[1]
        self.row_inputs = {
            name: value[samples, readout_rows][:, None] if _has_rows(value, num_rows) else value
            for name, value in inputs.items()
            if name != "logits_to_keep"  # the sequence has one row, whose logits are kept anyway
        }

    def forward_with_weights(self, weights: Float[Tensor, "batch draw head key"]) -> Any:
        """Run the model with new attention weights in the read-out row of the last layer.

        Args:
            weights: The weights of each sample, one or more draws per sample. Gradients flow to them.

        Returns:
            The model's output for a batch of sample × draw, with the draws of the first sample first.
        """
        context = (weights.transpose(1, 2) @ self.values).transpose(1, 2)  # batch draw head width
        batch, draws, heads, size = context.shape
        attention_output = context.reshape(batch * draws, 1, heads, size)
        inputs = {
            name: value.repeat_interleave(draws, 0) if isinstance(value, Tensor) else value
            for name, value in self.row_inputs.items()
        }
        layer_input = self.layer_input.repeat_interleave(draws, 0)[:, None]
        session = self.recorder.session
        skip_mode = _SkipProjectionsMode(attention_output)
        attention_module = self.model.get_submodule(self.attention_module)
        with (
            session.running(with_gradients=torch.is_grad_enabled()),
            session.forward_context(),
            self._single_row_layers(layer_input),
            switched_attention_implementation(session.topology, IMPLEMENTATION_NAME),
            replaced_attention_output(skip_mode.get_replacement),
            remove_hooks_on_exit([attention_module.register_forward_pre_hook(skip_mode.start_skipping)]),
            skip_mode,
        ):
            return self.model(**inputs)

    @contextmanager
    def _single_row_layers(self, layer_input: Float[Tensor, "row 1 model"]) -> Iterator[None]:
        """Inside the `with`, layers below the last return their input, and the last receives `layer_input`."""
        remaining_skips = Counter(id(layer) for layer in self.layers[:-1])
        layers = {id(layer): layer for layer in self.layers}
        original_forwards = {key: layer.__dict__.get("forward") for key, layer in layers.items()}
        try:
            for layer in layers.values():
                layer.__dict__["forward"] = partial(
                    self._replace_layer_forward, layer, layer.forward, remaining_skips, layer_input
                )
            yield
        finally:
            for key, layer in layers.items():
                del layer.__dict__["forward"]
                if original_forwards[key] is not None:
                    layer.__dict__["forward"] = original_forwards[key]

    def _replace_layer_forward(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        remaining_skips: Counter[int],
        layer_input: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the layer's input while it has skips left, then run it on `layer_input`."""
        if threading.get_ident() != self.thread_id:
            return forward(*args, **kwargs)  # a pass of another thread through the same model
        if not remaining_skips[id(layer)]:
            if args:
                return forward(layer_input, *args[1:], **kwargs)
            return forward(**{**kwargs, "hidden_states": layer_input})
        remaining_skips[id(layer)] -= 1
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if id(layer) not in self.tuple_lengths:
            return hidden_states
        return (hidden_states, *[None] * (self.tuple_lengths[id(layer)] - 1))

    def _record_tuple_length(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Note the length of the tuple that a layer returns, for the layers that are skipped."""
        if isinstance(output, tuple):
            self.tuple_lengths[id(layer)] = len(output)


class _SkipProjectionsMode(TorchFunctionMode):
    """Makes the projections of the last attention cheap while its output is replaced.

    The queries, keys and values are not used, so they are computed for one row and repeated.
    """

    def __init__(self, replacement_output: Tensor) -> None:
        super().__init__()
        self.replacement_output = replacement_output
        self.is_skipping = False
        self.thread_id = threading.get_ident()

    def start_skipping(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the attention module: the projections begin."""
        self.is_skipping = threading.get_ident() == self.thread_id

    def get_replacement(self, query: Tensor) -> Tensor:
        """Return the attention output; the projections before it are done."""
        self.is_skipping = False
        return self.replacement_output

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self.is_skipping or func is not functional.linear:
            return func(*args, **(kwargs or {}))
        x, *parameters = args
        projected = func(x[:1], *parameters, **(kwargs or {}))
        return projected.expand(len(x), *projected.shape[1:])


def _has_rows(value: Any, num_rows: int) -> bool:
    """Whether an input has one entry for each row of the sequence."""
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_rows
