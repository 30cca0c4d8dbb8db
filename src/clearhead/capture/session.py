"""`ModelSession`: runs a user's model, and restores whatever changes during a pass."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

_model_locks: WeakValueDictionary[int, Any] = WeakValueDictionary()
_model_locks_guard = threading.Lock()


def get_model_lock(model: nn.Module) -> Any:
    """Return the reentrant lock of a model, one per configuration object.

    The attention implementation is a flag on the configuration, and models may share one. The caller must keep the lock
    alive; two recorders of one model get the same lock.
    """
    config_id = id(getattr(model, "config", model))
    with _model_locks_guard:
        lock = _model_locks.get(config_id)
        if lock is None:
            lock = _model_locks[config_id] = threading.RLock()
    return lock


_original_implementations: dict[int, str] = {}


def get_attention_implementation(config: Any) -> str:
    """Return the attention implementation that the user chose, also while another one is switched in."""
    return _original_implementations.get(id(config)) or config._attn_implementation or "eager"


@contextmanager
def switched_attention_implementation(topology: ModelTopology, implementation: str) -> Iterator[None]:
    """Inside the `with`, all configurations of the model name `implementation`; transformers' checks are bypassed.

    Args:
        topology: The modules of the model, with their configurations.
        implementation: Name of an attention implementation of transformers.

    Yields:
        Nothing: the configurations are restored after the `with`, also after an exception.
    """
    current = [(config, config._attn_implementation_internal) for config in topology.find_configs()]
    switched = [(config, original) for config, original in current if original != implementation]
    try:
        for config, original in switched:
            _original_implementations[id(config)] = original or "eager"
            config._attn_implementation_internal = implementation
        yield
    finally:
        for config, original in switched:
            config._attn_implementation_internal = original
            _original_implementations.pop(id(config), None)


class ModelSession:
    """The only way to run a model: locked, in evaluation mode, with frozen weights, and restored afterwards.

    Args:
        model: The model.
        forward_context: Makes the context in which the model's forward pass runs.
        is_compiled: Whether `forward` runs the model through torch.compile.

    Attributes:
        lock: The model's lock; sessions of one model share it.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        is_compiled: bool = False,
    ) -> None:
        self.model = model
        self.forward_context = forward_context
        self.lock = get_model_lock(model)
        self.is_compiled = is_compiled
        self._topology = ModelTopology(model)
        self._depth = 0  # of nested `running` contexts; only the thread that holds the lock changes it

    @property
    def topology(self) -> ModelTopology:
        """The modules of the model, walked again only if they have changed."""
        if not self._topology.is_current():
            self._topology = ModelTopology(self.model)
        return self._topology

    @contextmanager
    def running(self, with_gradients: bool = False) -> Iterator[None]:
        """Inside the `with`, this thread alone runs the model, in evaluation mode and with frozen weights.

        No weight gradient is ever built. Everything is as before afterwards, also after an exception.

        Args:
            with_gradients: Whether passes build a graph, for gradients to their inputs.

        Yields:
            Nothing: the `with` contains the passes; it may be entered again inside.

        Raises:
            UnsupportedError: The model was created under `torch.inference_mode()`.
        """
        with self.lock, torch.inference_mode(False), torch.set_grad_enabled(with_gradients), ExitStack() as stack:
            if self._depth == 0:
                stack.enter_context(_frozen_eval_mode(self.topology))
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run one forward pass without gradients, in which nothing is captured.

        Args:
            inputs: Keyword arguments of the model.

        Returns:
            The model's output.
        """
        with self.running(), self.forward_context():
            return self._compiled_forward(**inputs) if self.is_compiled else self.model(**inputs)

    @cached_property
    def _compiled_forward(self) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:  # torch.compile marks a module that it is handed, and this one is the user's
            return self.model(**inputs)

        return torch.compile(run, dynamic=True)


@contextmanager
def _frozen_eval_mode(topology: ModelTopology) -> Iterator[None]:
    """Inside the `with`, the model is in evaluation mode, without autocast, and no parameter requires a gradient.

    The user's backward hooks are removed meanwhile: torch gives a module with such a hook copies of its outputs, from
    which no graph edge leads to the target.
    """
    parameters = list(topology.iter_parameters())
    if any(parameter.is_inference() for parameter in parameters):
        raise UnsupportedError(
            f"{type(topology.model).__name__} was created under torch.inference_mode() and cannot have gradients: "
            "load it outside of that context"
        )
    modules = topology.modules
    training_modules = [module for module in modules if module.training]
    trainable_parameters = [parameter for parameter in parameters if parameter.requires_grad]
    hook_tables = [table for module in modules for table in (module._backward_hooks, module._backward_pre_hooks)]
    saved_hooks = [(table, dict(table)) for table in hook_tables if table]
    try:
        for module in training_modules:
            module.training = False
        for parameter in trainable_parameters:
            parameter.requires_grad_(False)
        for table, _ in saved_hooks:
            table.clear()
        # Offloaded weights are on "meta" between passes; the others tell the device that computes.
        device_types = (parameter.device.type for parameter in parameters)
        with (
            torch.autocast(next((type_ for type_ in device_types if type_ != "meta"), "cpu"), enabled=False),
            torch.random.fork_rng(devices=[]),  # ViLT draws random numbers at every pass: keep the user's state
            remove_hooks_on_exit(_register_rope_restore_hooks(topology.rotary_embeddings)),
        ):
            yield
    finally:
        for table, hooks in saved_hooks:
            table.update(hooks)
        for module in training_modules:
            module.training = True
        for parameter in trainable_parameters:
            parameter.requires_grad_(True)


def _register_rope_restore_hooks(modules: Iterable[nn.Module]) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that restore rotary embeddings after each call, where their frequencies depend on the length.

    transformers keeps a dynamic RoPE's frequencies for the longest input so far. Without the hooks, a captured pass
    would change later outputs of the user's model, and explanations would depend on earlier explanations.
    """
    stateful = [module for module in modules if _is_length_dependent_rope(vars(module)["rope_type"])]
    return [module.register_forward_hook(_make_restore_hook(module), always_call=True) for module in stateful]


def _make_restore_hook(module: nn.Module) -> Callable[..., None]:
    """Make a hook that resets the module to the attributes and buffers that it has at present."""
    tables = (vars(module), module._buffers)
    snapshots = [
        (table, {name: value for name, value in table.items() if not name.startswith("_")}) for table in tables
    ]

    def hook(*_: Any) -> None:
        for table, snapshot in snapshots:
            for name in [name for name in table if name not in snapshot and not name.startswith("_")]:
                del table[name]
            table.update(snapshot)

    return hook


def _is_length_dependent_rope(rope_type: Any) -> bool:
    """Whether a RoPE type changes its frequencies with the length of the input."""
    # a mapping has one RoPE type per layer type
    rope_types = rope_type.values() if isinstance(rope_type, Mapping) else [rope_type]
    return any(type_ in ("dynamic", "longrope") for type_ in rope_types)


@contextmanager
def parameters_requiring_grad(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside the `with`, these parameters of a frozen model require gradients, so that the graph starts from them, too.

    Tensors that depend on learned parameters only, and not on the input, get gradients this way.

    Args:
        parameters: Learned parameters of the model, such as object queries; frozen before and after.

    Yields:
        Nothing: the `with` contains the passes.
    """
    try:
        for parameter in parameters:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def register_contiguous_batchnorm_hooks(topology: ModelTopology) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that make the gradients entering batch norms contiguous.

    In evaluation mode on a CPU, torch (2.13) returns a wrong gradient for a batch of one if the incoming gradient is
    in channels-last memory format, as that of `x.flatten(2).transpose(1, 2)` is.
    """

    def make_contiguous(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(torch.Tensor.contiguous)

    return [module.register_forward_hook(make_contiguous) for module in topology.batch_norms]


@contextmanager
def remove_hooks_on_exit(handles: list[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Remove the hooks when the `with` ends, also after an exception.

    Args:
        handles: The handles of registered hooks.

    Yields:
        Nothing: the `with` contains the passes with the hooks.
    """
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
