"""Torch-function mode that intercepts every operation of a forward pass and gives it the rule of its kind.

An operation that only moves values (reshape, index, concatenate …) keeps its ordinary gradient. One of a kind that the
rule set covers gets its rule (`operators.py`). Any other operation that the target depends on raises `MissingRuleError`
with its name. The mode is active in one thread, inside one `with`; the model is not patched.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from clearhead.backward_rules.base import MissingRuleError, RuleSet, depends_on_input, flatten_args
from clearhead.backward_rules.float64_mode import cast_call_to_float64, mixes_dtypes
from clearhead.backward_rules.operators import IDENTITY_OPS, INDEXING_OPS, MOVEMENT_OPS, OPERATION_HANDLERS
from clearhead.backward_rules.peft_merging import run_merged_layers
from clearhead.capture.session import remove_hooks_on_exit


class RuleMode(TorchFunctionMode):
    """Applies a rule set to one forward pass of `batch_size` samples.

    Args:
        rule_set: The rules of the backward pass.
        batch_size: Number of samples along the first axis of every tensor.
    """

    def __init__(self, rule_set: RuleSet, batch_size: int) -> None:
        super().__init__()
        self.rule_set = rule_set
        self.batch_size = batch_size
        #: How many operations have used each tensor so far; its values are the rule set's.
        self.tensor_uses = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        active_inputs = _list_active_inputs(args, kwargs)
        if self.rule_set.needs_float64 and (active_inputs or mixes_dtypes(func, args, kwargs)):
            func, args, kwargs = cast_call_to_float64(func, args, kwargs)
            if active_inputs:
                active_inputs = list(filter(depends_on_input, flatten_args((args, kwargs))))
        if not active_inputs:
            return func(*args, **kwargs)
        name = func.__name__
        if name in OPERATION_HANDLERS:
            self._record_uses(active_inputs, name)
            return self._apply_rule(func, args, kwargs)
        output = func(*args, **kwargs)
        if not any(map(depends_on_input, flatten_args(output))) or any(output is tensor for tensor in active_inputs):
            return output
        if name not in MOVEMENT_OPS | self.rule_set.unmodified_ops:
            raise MissingRuleError(f"the operator {resolve_name(func) or name} has no rule in {self.rule_set.name}")
        self._record_uses(active_inputs, name)
        if name in INDEXING_OPS and isinstance(output, Tensor):
            return self.rule_set.on_index(output)
        return output

    def _apply_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call the operation's handler; arguments that it does not accept raise `MissingRuleError`."""
        try:
            return OPERATION_HANDLERS[func.__name__](self, func, *args, **kwargs)
        except TypeError as problem:  # the handler does not accept these arguments
            raise MissingRuleError(
                f"the operator {func.__name__}, with the arguments of this call, has no rule in {self.rule_set.name}"
            ) from problem

    def _record_uses(self, tensors: list[Tensor], name: str) -> None:
        """Report the use of each tensor to the rule set; identities (dropout) are not uses."""
        if name in IDENTITY_OPS:
            return
        for tensor in tensors:
            self.rule_set.on_use(tensor, self.tensor_uses, name)


def _list_active_inputs(args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments of an operation that depend on the model's input; none while gradients are off."""
    if not torch.is_grad_enabled():
        return []
    return list(filter(depends_on_input, flatten_args((args, kwargs))))


@contextmanager
def apply_rules(model: nn.Module, rule_set: RuleSet, batch_size: int) -> Iterator[None]:
    """Differentiate the forward passes that run in this thread inside the `with` by a rule set.

    Args:
        model: The model whose passes run.
        rule_set: The rules of the backward pass.
        batch_size: The number of samples along the first axis of every tensor.

    Yields:
        Nothing: the `with` contains the forward passes.

    Raises:
        UnmergeableAdapterError: If the rule set needs merged LoRA layers and one of them cannot be merged.
        MissingRuleError: If an operation inside the `with` has no rule.
    """
    merged = run_merged_layers(model) if rule_set.splits_maps else []
    with remove_hooks_on_exit([*merged, *_hook_activations(model, rule_set)]), RuleMode(rule_set, batch_size):
        yield


def _hook_activations(model: nn.Module, rule_set: RuleSet) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Treat each activation module of transformers as one function, though some consist of several operations.

    The module runs on a detached input; the rule reconnects its output to the graph.
    """
    thread = threading.get_ident()
    inputs_by_module: dict[int, Tensor] = {}

    def detach_input(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if threading.get_ident() == thread and args and depends_on_input(args[0]):
            inputs_by_module[id(module)] = args[0]
            return (args[0].detach(), *args[1:])
        return None

    def reconnect_output(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        if threading.get_ident() != thread or id(module) not in inputs_by_module:
            return None
        return rule_set.activation(module.forward, inputs_by_module.pop(id(module)))

    for module in model.modules():
        if type(module).__module__ == "transformers.activations" or type(module).__name__ == "BloomGelu":
            yield module.register_forward_pre_hook(detach_input)
            yield module.register_forward_hook(reconnect_output)
