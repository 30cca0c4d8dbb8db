"""Runs one forward and one backward pass of a model, and hands over its attention calls one by one, last call first."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.capture.activation_checkpointing import checkpointed_layers
from clearhead.capture.attention.tiled import repeat_for_targets
from clearhead.capture.attention.tiling import AttentionKernel, TilingConfig
from clearhead.capture.attention_calls import capture_attention_calls
from clearhead.capture.checks.detached_gradients import IgnoreDetachMode
from clearhead.capture.checks.self_test import (
    CallSite,
    SelfTest,
    count_calls_from_config,
    run_self_test,
    run_tiling_test,
)
from clearhead.capture.context import IMPLEMENTATION_NAME, CapturedCall
from clearhead.capture.dispatch import (
    CallCallback,
    CallDispatcher,
    detach_and_upcast,
    detach_or_zeros,
    release_calls_on_exit,
)
from clearhead.capture.peft_layers import find_wrapping_layer
from clearhead.capture.position_leaves import (
    replace_positions_by_leaves,
    select_position_leaves,
    sum_position_products,
)
from clearhead.capture.session import (
    ModelSession,
    parameters_requiring_grad,
    register_contiguous_batchnorm_hooks,
    remove_hooks_on_exit,
)
from clearhead.capture.tape import (
    CALL_REQUIREMENTS,
    GRADIENT_SOURCES,
    AttentionCall,
    Requirements,
    Tape,
    resolve_requirements,
)
from clearhead.errors import InputError, UnsupportedError

#: Maps the model's output to one value per sample, or to several (target × sample).
TargetFunction = Callable[[Any], Float[Tensor, "*target batch"]]
#: Maps the name of an attention module and the number of its call to the streams of its queries and of its keys; None
#: for a call that is ignored, because nothing that is explained passes through it.
StreamFunction = Callable[[str, int], tuple[str, str] | None]


class BatchedBackwardError(Exception):
    """An operation of the model cannot be differentiated for several targets at once."""


@dataclass
class HeadRows:
    """The rows of the head's input that the targets are computed from, for heads that treat each row by itself.

    Attributes:
        head_module: Module that computes the logits of each row independently of other rows.
        row_indices: The row that the value of each target and sample comes from.
        head_input: Input of the head in the current pass.
    """

    head_module: nn.Module
    row_indices: "Int[Tensor, 'target batch']"
    head_input: Tensor | None = None

    def register_hook(self) -> torch.utils.hooks.RemovableHandle:
        """Register the hook that keeps the head's input; the caller removes it.

        Returns:
            The handle whose `remove` removes the hook.
        """
        thread_id = threading.get_ident()

        def keep_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread_id and args:
                self.head_input = args[0]

        return self.head_module.register_forward_pre_hook(keep_input)

    def compute_target_gradients(
        self, target_values: "Float[Tensor, 'target batch']"
    ) -> "Float[Tensor, 'target batch row model'] | None":
        """Compute ∂value/∂row for all targets with one ordinary backward pass through the head.

        Args:
            target_values: The value of each target and sample, in the graph of the pass.

        Returns:
            The gradient of the head's input for each target; None where a value depends on other rows, too.
        """
        head_input = self.head_input
        targets, samples = self.row_indices.shape
        if head_input is None or not head_input.requires_grad or head_input.dim() != 3 or len(head_input) != samples:
            return None
        (summed_gradient,) = torch.autograd.grad(target_values.sum(), head_input, retain_graph=True)
        target_indices = torch.arange(targets)[:, None]
        sample_indices = torch.arange(samples)[None]
        gradients = summed_gradient.new_zeros(targets, *summed_gradient.shape)
        gradients[target_indices, sample_indices, self.row_indices] = summed_gradient[sample_indices, self.row_indices]
        # a row that several targets share has their gradients added up in the sum
        counts = (self.row_indices[None] == self.row_indices[:, None]).sum(0).to(summed_gradient)
        gradients = gradients / counts[:, :, None, None]
        if not torch.allclose(gradients.sum(0), summed_gradient):
            return None
        return gradients


class Recorder:
    """Captures attention, gradients and inputs of one model's passes.

    The first pass runs the self-test, which raises an error if the capture is not exact for this model.

    Args:
        session: Runs the model, which is in its original state after each pass.
        find_call_streams: Maps an attention call to the streams of its queries and of its keys.
        embedding_modules: The modules that look up token embeddings, if `get_input_embeddings` does not return them.
        grad_parameters: Learned parameters that the graph starts from in addition to the input.
        count_expected_calls: Returns how many attention calls a pass has, if the configuration does not tell.

    Attributes:
        self_test: Result of the self-test; None before the first pass.
        scope: Makes the context in which the model's forward pass runs.
        runs_under_mode: Whether `scope` enters a torch function mode, to which attention must be eager operations.
        tiling_errors: Error of the logits in the tiling test, by kernel.
        tiling_output_kernels: What computed the attention outputs in the tiling test, by kernel.
        tile_rows: Number of queries per tile; None for one that suits the length and the hardware.
        kernel: Kernel for calls that need no tiles; None for one that suits the hardware.
        leaf_dtype: Dtype of the tensors that the graph starts from; None for the model's own.
    """

    def __init__(
        self,
        session: ModelSession,
        find_call_streams: StreamFunction = lambda module, nth: ("text", "text"),
        embedding_modules: Sequence[nn.Module] | None = None,
        grad_parameters: Sequence[nn.Parameter] = (),
        count_expected_calls: Callable[[], int | None] | None = None,
    ) -> None:
        self.session = session
        self.model = session.model
        self.find_call_streams = find_call_streams
        self.embedding_modules = embedding_modules
        self.grad_parameters = grad_parameters
        self.scope: Callable[[], AbstractContextManager[object]] = session.forward_context
        self.runs_under_mode = False
        self.count_expected_calls = count_expected_calls or partial(
            count_calls_from_config, getattr(self.model, "config", None)
        )
        self.self_test: SelfTest | None = None
        self.tiling_errors: dict[str, float] = {}
        self.tiling_output_kernels: dict[str, set[str]] = {}
        self.tile_rows: int | None = None
        self.kernel: AttentionKernel | None = None
        self.leaf_dtype: torch.dtype | None = None

    def under_mode(
        self, make_mode: Callable[[], AbstractContextManager[object]], leaf_dtype: torch.dtype | None = None
    ) -> "Recorder":
        """Return a recorder of the same model whose forward passes run under a torch function mode.

        Args:
            make_mode: Makes the mode; attention is computed by eager operations, which it sees.
            leaf_dtype: Dtype of the tensors that the graph starts from; None for the model's own.

        Returns:
            A copy; the recorder itself is unchanged.
        """
        recorder = copy(self)

        @contextmanager
        def scope() -> Iterator[None]:
            with self.scope(), make_mode():
                yield

        recorder.scope = scope
        recorder.runs_under_mode = True
        recorder.leaf_dtype = leaf_dtype or self.leaf_dtype
        return recorder

    def run(
        self,
        inputs: Mapping[str, Any],
        compute_target: TargetFunction,
        requires: Iterable[str],
        on_call: CallCallback = lambda call: None,
        leaves: Sequence[str] = ("input_ids",),
        call_indices: Collection[int] | None = None,
        head_rows: HeadRows | None = None,
        vectors: Mapping[str, Tensor] | None = None,
        tiling: TilingConfig | None = None,
        keep_maps: bool = True,
        captures_maps: bool = False,
    ) -> Tape:
        """Run one forward pass and, if gradients are required, one backward pass.

        Attention is captured only as far as required: without a tensor of attention calls among the requirements, the
        model's own attention runs, and without attention maps among them its own kernels.

        Args:
            inputs: Keyword arguments of the model.
            compute_target: Maps the model's output to one value per sample, or to several (target × sample): then one
                backward pass serves all of them, and calls have target × sample as their batch.
            requires: Names of the required tensors, see `Requirement`.
            on_call: Receives the calls from the last to the first, each once it is complete.
            leaves: The inputs whose vectors get input gradients.
            call_indices: The calls that are handed over, counted in the order of the forward pass; this also limits how
                far the backward pass goes. All by default.
            head_rows: The row of the head's input that each of several values comes from, if it is one row each.
            vectors: Vectors that the graph starts from, by leaf, in place of the embeddings or the numeric inputs.
            tiling: Settings of a tiled pass, which never holds a full attention map (`tiled.py`): its `on_tile`
                receives the tiles, and `on_call` the calls without maps.
            keep_maps: Whether `on_call` keeps attention maps. If not, their memory is reused.
            captures_maps: Whether attention maps are captured even if they are not required.

        Returns:
            The tape without calls, and without logits.

        Raises:
            UnsupportedError: The self-test failed, or a required tensor cannot be recorded for this model.
            InputError: The target is not differentiable.
        """
        requirements = resolve_requirements(requires)
        self.run_self_test(inputs, leaves)
        with (
            self.session.running(with_gradients=bool(requirements & GRADIENT_SOURCES.keys())),
            parameters_requiring_grad(self.grad_parameters),
        ):
            head_hooks = [head_rows.register_hook()] if head_rows is not None else []
            with remove_hooks_on_exit(head_hooks):
                output, calls, graph_leaves = self.forward(
                    inputs, requirements, leaves, vectors=vectors, tiling=tiling, captures_maps=captures_maps
                )
            with release_calls_on_exit(calls):
                graph_leaves |= {f"learned {i}": parameter for i, parameter in enumerate(self.grad_parameters)}
                target_values = compute_target(output)
                dispatcher = CallDispatcher(
                    calls,
                    locate_calls(calls, self.find_call_streams),
                    sorted(range(len(calls)) if call_indices is None or not calls else call_indices),
                    requirements,
                    on_call,
                    tiling or TilingConfig(),
                    keep_maps,
                )
                input_leaves = {leaf: graph_leaves[leaf] for leaf in leaves if leaf in graph_leaves}
                position_leaves = select_position_leaves(graph_leaves)
                grad_inputs = {**(input_leaves if "input_gradient" in requirements else {}), **position_leaves}
                if target_values.dim() == 1:
                    gradients = _backward(target_values, dispatcher, grad_inputs, graph_leaves)
                elif any(call.tiled is not None for call in calls):
                    gradients = _backward_tiled_targets(target_values, dispatcher, grad_inputs, graph_leaves, head_rows)
                else:
                    gradients = _backward_batched_targets(target_values, dispatcher, grad_inputs, head_rows)
                dispatcher.dispatch_remaining()
        tape = Tape(value=detach_and_upcast(target_values))
        if "inputs" in requirements:
            tape.inputs = {
                leaf: repeat_for_targets(detach_and_upcast(tensor), dispatcher.num_targets)
                for leaf, tensor in input_leaves.items()
            }
        if position_leaves:
            tape.position_x_gradient = sum_position_products(
                position_leaves, {name: gradients.pop(name) for name in position_leaves}, dispatcher.num_targets
            )
        if "input_gradient" in requirements:
            tape.input_gradient = gradients
        return tape

    def record(
        self, inputs: Mapping[str, Any], compute_target: TargetFunction, requires: Iterable[str], **run_kwargs: Any
    ) -> Tape:
        """Run one pass as `run` does, and return a tape with all calls, in the order of the forward pass.

        Args:
            inputs: Keyword arguments of the model.
            compute_target: Computes the values of the targets from the model's output.
            requires: Names of the tensors to record, see `Requirement`.
            **run_kwargs: Further arguments of `run`.

        Returns:
            The tape. It keeps the tensors of all calls; `run` needs less memory, since it hands them over one by one.
        """
        calls: list[AttentionCall] = []
        tape = self.run(inputs, compute_target, requires, calls.append, **run_kwargs)
        tape.calls = calls[::-1]
        return tape

    def run_self_test(
        self,
        inputs: Mapping[str, Any],
        leaves: Sequence[str] = ("input_ids",),
        padded_inputs: Mapping[str, Any] | None = None,
    ) -> SelfTest:
        """Run the self-test on the first call, and return its result.

        It compares the number of calls with the number of layers, each attention output with A·V, and the logits with
        those of the unmodified model.

        Args:
            inputs: Keyword arguments of the model.
            leaves: The inputs that the graph starts from.
            padded_inputs: The same inputs with padding, to test that padding changes nothing.

        Returns:
            The result of the first call, whatever the inputs of this one.

        Raises:
            UnsupportedError: The attention of this model cannot be captured exactly.
        """
        if self.self_test is not None:
            return self.self_test
        with self.session.running():
            if self.self_test is None:  # another thread may have run it in the meantime
                forward = partial(self.forward, requires=frozenset({"attention"}), leaves=leaves)
                locate = partial(locate_calls, find_call_streams=self.find_call_streams)
                self.self_test = run_self_test(
                    self.session.topology, forward, inputs, locate, self.count_expected_calls(), padded_inputs
                )
        return self.self_test

    def run_tiling_test(
        self, inputs: Mapping[str, Any], leaves: Sequence[str] = ("input_ids",), kernel: AttentionKernel | None = None
    ) -> float:
        """Test tiled passes, once for each kernel: with small tiles, the logits must equal those of the model.

        Args:
            inputs: Keyword arguments of the model.
            leaves: The inputs that the graph starts from.
            kernel: The kernel under test; None for the loop over tiles.

        Returns:
            The largest relative error of the logits.

        Raises:
            UnsupportedError: The logits differ.
        """
        kernel_name = "" if kernel is None else kernel.name
        with self.session.running():
            self_test = self.run_self_test(inputs, leaves)
            if kernel_name not in self.tiling_errors:
                tiling = TilingConfig(tile_rows=3, kernel=kernel)
                forward = partial(self.forward, requires=frozenset({"attention"}), leaves=leaves, tiling=tiling)
                self.tiling_errors[kernel_name] = run_tiling_test(self.session.topology, forward, inputs, self_test)
                self.tiling_output_kernels[kernel_name] = tiling.kernel_log.output_kernels
        return self.tiling_errors[kernel_name]

    def forward(
        self,
        inputs: Mapping[str, Any],
        requires: Requirements,
        leaves: Sequence[str],
        implementation: str | None = None,
        zero_attention: bool = False,
        vectors: Mapping[str, Tensor] | None = None,
        tiling: TilingConfig | None = None,
        captures_maps: bool = False,
    ) -> tuple[Any, list[CapturedCall], dict[str, Tensor]]:
        """Run a captured forward pass, and leave the graph to the caller.

        Args:
            inputs: Keyword arguments of the model.
            requires: The required tensors, as `resolve_requirements` returns them.
            leaves: The inputs that the graph starts from.
            implementation: Attention implementation to switch to; by default the one that passed the self-test.
            zero_attention: Whether the outputs of all attention calls are set to zero.
            vectors: Vectors that the graph starts from, by leaf, in place of the inputs' own.
            tiling: Settings of a tiled pass.
            captures_maps: Whether attention maps are captured even if they are not required.

        Returns:
            The model's output, its attention calls, and the tensors that the graph starts from, by leaf. Embeddings of
            an input that is not in `leaves` (a decoder's, where only the source is explained) are among them.

        Raises:
            UnsupportedError: A required tensor cannot be recorded for this model.
        """
        if implementation is None:
            implementation = IMPLEMENTATION_NAME if self.self_test is None else self.self_test.implementation
        graph_leaves: dict[str, Tensor] = {}
        model_kwargs = dict(inputs)
        vectors = vectors or {}
        token_leaves = [leaf for leaf in leaves if leaf in inputs and not inputs[leaf].is_floating_point()]
        with ExitStack() as stack:
            stack.enter_context(remove_hooks_on_exit(register_contiguous_batchnorm_hooks(self.session.topology)))
            if token_leaves:
                token_counts = {leaf: inputs[leaf].numel() for leaf in token_leaves}
                hooks = _register_embedding_leaf_hooks(
                    self.get_embedding_modules(), token_counts, graph_leaves, vectors, self.leaf_dtype
                )
                stack.enter_context(remove_hooks_on_exit(hooks))
            for leaf in leaves:
                if leaf in inputs and leaf not in token_leaves:
                    vector = vectors.get(leaf, inputs[leaf]).to(inputs[leaf])
                    model_kwargs[leaf] = graph_leaves[leaf] = _make_leaf(vector, self.leaf_dtype)
            topology = self.session.topology
            needs_maps = (
                captures_maps or self.runs_under_mode or "attention" in requires or self._masks_become_nan(inputs)
            )
            calls: list[CapturedCall] = []
            if needs_maps or requires & CALL_REQUIREMENTS:
                capture = capture_attention_calls(
                    topology,
                    keep_layer_io=bool(requires & {"block_input", "hidden_state"}),
                    find_projections="output_projection" in requires,
                    needs_maps=needs_maps,
                    implementation=implementation,
                    zero_attention=zero_attention,
                    tiling=tiling,
                    keep_values=tiling is None or bool(requires & {"values", "output_projection"}),
                    use_tiled_gradients=True,
                )
                calls = stack.enter_context(capture)
            elif tiling is not None and tiling.checkpoint_layers and torch.is_grad_enabled():
                stack.enter_context(checkpointed_layers(topology.layers, nullcontext))
                tiling.kernel_log.has_recomputed_layers = True
            stack.enter_context(self.scope())
            if "position_x_gradient" in requires:
                stack.enter_context(replace_positions_by_leaves(topology, leaves, graph_leaves))
            if self.self_test is not None and self.self_test.detaches_gradients and torch.is_grad_enabled():
                stack.enter_context(IgnoreDetachMode())
            output = self.model(**model_kwargs)
        calls = [call for call in calls if self.find_call_streams(call.module, call.occurrence) is not None]
        if requires & {"values", "output_projection"} and any(call.values is None for call in calls):
            raise UnsupportedError(
                f"{type(self.model).__name__} ignores transformers' attention interface: its attention can be "
                "recorded, but not its values and output projection"
            )
        return output, calls, graph_leaves

    def _masks_become_nan(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the model's own attention may have rows of NaN, which captured attention does not have.

        Eager attention of float64 models computes its softmax in float32, in which their masks are -inf. A query whose
        keys are all masked is then NaN: padding on the left, or padding under a sliding window.
        """
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
            return False
        if next(self.model.parameters()).dtype != torch.float64:
            return False
        configs = self.session.topology.find_configs()
        has_windows = any(getattr(config, "sliding_window", None) for config in configs)
        return has_windows or not bool(mask[:, 0].all())

    def get_embedding_modules(self) -> Sequence[nn.Module]:
        """Return the modules that look up token embeddings, in the order in which the model calls them.

        Returns:
            At least one module; several if modules with a shared weight look up tokens.

        Raises:
            UnsupportedError: The model has no input embeddings.
        """
        if self.embedding_modules is not None:
            return self.embedding_modules
        embeddings: Any = getattr(self.model, "get_input_embeddings", lambda: None)()
        if embeddings is None:
            raise UnsupportedError(f"{type(self.model).__name__} has no input embeddings to start from")
        # An encoder–decoder looks up tokens through modules that share one weight: the first look-up is the source.
        topology = self.session.topology
        tied = [module for module in topology.embeddings if module.weight is embeddings.weight]
        # Adapters change the embeddings: the graph starts after them, as it does in the merged model.
        return [find_wrapping_layer(module, topology.peft_layers) for module in tied] or [embeddings]


def locate_calls(calls: Sequence[CapturedCall], find_call_streams: StreamFunction) -> list[CallSite]:
    """Return the call site of each call: its two streams, and its layer among the calls between these streams."""
    layer_counts: Counter[tuple[str, str]] = Counter()
    call_sites = []
    for call in calls:
        streams = find_call_streams(call.module, call.occurrence)
        assert streams is not None
        batch, heads, queries, keys = call.attention.shape
        call_sites.append(CallSite(call.module, *streams, layer_counts[streams], (batch, queries, keys), heads))
        layer_counts[streams] += 1
    return call_sites


def _backward(
    target_values: Float[Tensor, "batch"],
    dispatcher: CallDispatcher,
    grad_inputs: Mapping[str, Tensor],
    graph_leaves: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Backpropagate one target per sample, to the required tensors alone: never to weights."""
    nodes = _select_backward_nodes(target_values, dispatcher, grad_inputs, graph_leaves)
    if not nodes:
        return {}
    with remove_hooks_on_exit(_register_gradient_hooks(dispatcher)):
        gradients = torch.autograd.grad(target_values.sum(), nodes, allow_unused=True)
    return {
        name: detach_or_zeros(gradient, tensor)
        for (name, tensor), gradient in zip(grad_inputs.items(), gradients, strict=False)
    }


def _select_backward_nodes(
    target_values: Tensor,
    dispatcher: CallDispatcher,
    grad_inputs: Mapping[str, Tensor],
    graph_leaves: Mapping[str, Tensor],
) -> list[Any]:
    """The nodes to differentiate by, so that the backward pass reaches every gradient that is waited for.

    `grad_inputs` come first. The list is empty if no gradient is required.
    """
    sources = dispatcher.find_gradient_sources()
    if not grad_inputs and not sources:
        return []
    _check_requires_grad(target_values)
    # With one leaf, a gradient that reaches the first call or the input has passed all other calls. With several it has
    # not: a decoder's first self-attention lies on no path from the encoder's leaf.
    if len(graph_leaves) != 1:
        return [*grad_inputs.values(), *graph_leaves.values()]
    if grad_inputs:
        return list(grad_inputs.values())
    return [node for call_index, _, node in sources if call_index == min(dispatcher.pending)]


def _register_gradient_hooks(dispatcher: CallDispatcher) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that hand the dispatcher the gradients that calls require and tiled attention does not deliver."""
    return [
        node.register_hook(partial(dispatcher.on_gradient_hook, call_index, requirement))
        for call_index, requirement, node in dispatcher.find_gradient_sources()
        if not dispatcher.delivers_own_gradient(call_index, requirement)
    ]


def _backward_tiled_targets(
    target_values: Float[Tensor, "target batch"],
    dispatcher: CallDispatcher,
    grad_inputs: Mapping[str, Tensor],
    graph_leaves: Mapping[str, Tensor],
    head_rows: HeadRows | None,
) -> dict[str, Tensor]:
    """Backpropagate all targets in one backward pass of a tiled pass, whose tiles are computed once for all."""
    dispatcher.num_targets = len(target_values)
    nodes = _select_backward_nodes(target_values, dispatcher, grad_inputs, graph_leaves)
    if not nodes:
        return {}
    differentiated, output_gradients = _split_at_head(target_values, head_rows)

    def compute_input_gradients(output_gradient: Tensor) -> dict[str, Tensor]:
        gradients = torch.autograd.grad(differentiated, nodes, output_gradient, allow_unused=True)
        return {name: gradient for name, gradient in zip(grad_inputs, gradients, strict=False) if gradient is not None}

    with remove_hooks_on_exit(_register_gradient_hooks(dispatcher)):
        try:
            gradients = torch.vmap(compute_input_gradients)(output_gradients)
        except (RuntimeError, NotImplementedError) as error:
            raise BatchedBackwardError from error
    zeros = {name: torch.zeros_like(leaf).expand(len(target_values), *leaf.shape) for name, leaf in grad_inputs.items()}
    return {name: detach_and_upcast(gradients.get(name, zeros[name]).flatten(0, 1)) for name in grad_inputs}


def _backward_batched_targets(
    target_values: Float[Tensor, "target batch"],
    dispatcher: CallDispatcher,
    grad_inputs: Mapping[str, Tensor],
    head_rows: HeadRows | None,
) -> dict[str, Tensor]:
    """Backpropagate all targets in one backward pass, with the target as an additional axis."""
    dispatcher.num_targets = len(target_values)
    sources = dispatcher.find_gradient_sources()
    if not grad_inputs and not sources:
        return {}
    _check_requires_grad(target_values)
    nodes = [*grad_inputs.values(), *(node for _, _, node in sources)]
    differentiated, output_gradients = _split_at_head(target_values, head_rows)
    gradients = _compute_batched_gradients(differentiated, nodes, output_gradients)
    for (call_index, requirement, _), gradient in zip(sources, gradients[len(grad_inputs) :], strict=True):
        if gradient is not None:
            dispatcher.received_gradients[call_index][requirement] = gradient.flatten(0, 1)
    input_gradients = {}
    for (name, leaf), gradient in zip(grad_inputs.items(), gradients, strict=False):
        if gradient is None:
            gradient = torch.zeros_like(leaf).expand(len(target_values), *leaf.shape)
        input_gradients[name] = detach_and_upcast(gradient.flatten(0, 1))
    return input_gradients


def _split_at_head(
    target_values: Float[Tensor, "target batch"], head_rows: HeadRows | None
) -> tuple[Tensor, Float[Tensor, "target ..."]]:
    """The tensor to differentiate, and its gradient for each target.

    Where each value comes from one row of the head's input, the backward pass through the head is already done for all
    targets, and starts from the head's input. Otherwise it starts from the values.
    """
    row_gradients = None if head_rows is None else head_rows.compute_target_gradients(target_values)
    if row_gradients is not None and head_rows is not None and head_rows.head_input is not None:
        return head_rows.head_input, row_gradients
    identity = torch.eye(len(target_values), dtype=target_values.dtype, device=target_values.device)
    return target_values.sum(1), identity


def _compute_batched_gradients(
    differentiated: Tensor, nodes: Sequence[Tensor], output_gradients: Tensor
) -> Sequence[Tensor | None]:
    """One batched backward pass; one pass per target where an operation of the model cannot be batched."""

    def compute_gradients(output_gradient: Tensor) -> dict[int, Tensor]:
        gradients = torch.autograd.grad(differentiated, nodes, output_gradient, retain_graph=True, allow_unused=True)
        return {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # kernels that loop over targets
        try:
            # torch.vmap and not is_grads_batched: the tensors of the latter support no vmap rule of our own functions
            stacked = torch.vmap(compute_gradients)(output_gradients)
        except (RuntimeError, NotImplementedError):
            per_target = [compute_gradients(output_gradient) for output_gradient in output_gradients]
            stacked = {i: torch.stack([gradients[i] for gradients in per_target]) for i in per_target[0]}
    return [stacked.get(i) for i in range(len(nodes))]


def _check_requires_grad(target_values: Tensor) -> None:
    """Check that the target has a gradient, so that a backward pass is possible."""
    if not target_values.requires_grad:
        raise InputError(
            "the target does not depend on the input through differentiable operations, so it has no gradient: "
            "compute it from the model's output, without detach() or item()"
        )


def _register_embedding_leaf_hooks(
    embedding_modules: Sequence[nn.Module],
    token_counts: Mapping[str, int],
    graph_leaves: dict[str, Tensor],
    vectors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> list[torch.utils.hooks.RemovableHandle]:
    """Make the token embeddings the start of the graph; positions and token types are added after them.

    Args:
        embedding_modules: The modules that look up tokens.
        token_counts: Number of tokens of each leaf, in the order in which the model looks them up.
        graph_leaves: Receives the new leaf tensors.
        vectors: Vectors that replace the embeddings, by leaf.
        dtype: Dtype of the leaf tensors.
    """
    thread_id = threading.get_ident()
    pending_leaves = list(token_counts)

    def replace_by_leaf(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if threading.get_ident() != thread_id:
            return output  # another thread uses the same model
        leaf = pending_leaves.pop(0) if pending_leaves else f"look-up {len(graph_leaves)}"
        count = output.shape[:-1].numel()
        if count != token_counts.get(leaf, count):
            raise UnsupportedError(
                f"{leaf} has {token_counts[leaf]} tokens, but the model looked up {count} embeddings instead"
            )
        graph_leaves[leaf] = _make_leaf(vectors.get(leaf, output).to(output), dtype)
        return graph_leaves[leaf].clone()  # some models add positions to it in place (BLIP)

    return [module.register_forward_hook(replace_by_leaf) for module in embedding_modules]


def _make_leaf(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Copy a tensor to a new leaf of the graph, in `dtype` if there is one."""
    return tensor.detach().to(dtype, copy=True).requires_grad_(torch.is_grad_enabled())
