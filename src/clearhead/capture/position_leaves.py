"""Position embeddings as further starts of the graph, so that a pass has gradients with respect to them.

Three kinds are found: modules that look positions up, learned parameters that are added to patches, and rotary modules,
whose cosines and sines multiply queries and keys. Each becomes a leaf with a row for each sample, though models compute
one for all of them. Biases of relative positions, which are added to attention scores, belong to pairs of units and are
left alone.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clearhead.capture.peft_layers import find_wrapping_layer
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.capture.topology import ModelTopology
from clearhead.errors import UnsupportedError

#: Names of modules and parameters with positions: `position_embeddings`, `embed_positions`, `pos_embed`, GPT-2's `wpe`.
_POSITION_NAME = re.compile(r"(^|_)(pos|positions?|positional)(_|$)|^wpe$")
#: Biases and tables of relative positions.
_RELATIVE_NAME = re.compile(r"(^|_)rel(ative)?_|bias")
_LEAF_PREFIX = "position "


class MissingPositionsError(UnsupportedError):
    """A model without position embeddings that belong to its units."""


@contextmanager
def replace_positions_by_leaves(
    topology: ModelTopology, input_names: Sequence[str], graph_leaves: dict[str, Tensor]
) -> Iterator[None]:
    """Inside the `with`, position embeddings of the forward pass in this thread are leaves of the graph.

    Args:
        topology: The modules of the model.
        input_names: The inputs that the graph starts from.
        graph_leaves: The leaves of the pass, by name. The first is that of the input, and has a row for each sample.
            Receives the new ones.

    Raises:
        MissingPositionsError: There are several inputs, each with positions of its own, or no position embeddings.
    """
    if len(input_names) > 1:
        raise MissingPositionsError(
            f"there are several inputs ({', '.join(input_names)}), and position embeddings cannot be assigned to them. "
            "Choose attn-lrp, which does without"
        )
    thread_id = threading.get_ident()

    def make_leaf(positions: Tensor) -> Tensor:
        first = next(iter(graph_leaves.values()), None)
        if first is None or positions.dim() != 3 or len(positions) not in (1, len(first)):
            raise MissingPositionsError(
                f"its positions have the shape {tuple(positions.shape)} instead of batch × position × feature, so they "
                "cannot be assigned to units"
            )
        leaf = positions.detach().expand(len(first), -1, -1).clone().requires_grad_(torch.is_grad_enabled())
        graph_leaves[f"{_LEAF_PREFIX}{len(graph_leaves)}"] = leaf
        return leaf

    def replace_output(module: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() != thread_id:
            return None
        if isinstance(output, Tensor):
            return make_leaf(output).clone()  # some models add other embeddings to it in place
        return tuple(make_leaf(tensor).clone() for tensor in output)

    handles = [module.register_forward_hook(replace_output) for module in _find_position_modules(topology)]
    parameters = {id(parameter) for parameter in _iter_position_parameters(topology)}
    with remove_hooks_on_exit(handles), _ParameterLeafMode(parameters, make_leaf):
        yield
    if not select_position_leaves(graph_leaves):
        raise MissingPositionsError(
            "no position embeddings were found, neither added to its input nor rotary: there is nothing that relevance "
            "of positions could go to (biases of relative positions belong to pairs of units). Choose attn-lrp, which "
            "does without"
        )


def check_position_count(num_positions: int, num_units: int) -> None:
    """Check that there is one position for each unit.

    Args:
        num_positions: The number of positions of a pass.
        num_units: The number of its units.

    Raises:
        MissingPositionsError: There is not.
    """
    if num_positions != num_units:
        raise MissingPositionsError(
            f"position embeddings cover {num_positions} positions, but there are {num_units} units (positions may be "
            "interpolated, or some units may have none). Choose attn-lrp, which does without"
        )


def select_position_leaves(graph_leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the leaves that are position embeddings."""
    return {name: leaf for name, leaf in graph_leaves.items() if name.startswith(_LEAF_PREFIX)}


def sum_position_products(
    leaves: Mapping[str, Float[Tensor, "sample position feature"]],
    gradients: Mapping[str, Float[Tensor, "batch position feature"]],
    num_targets: int,
) -> Float[Tensor, "batch position"]:
    """Return P ⊙ ∂y/∂P of each position, summed over its features and all leaves.

    Args:
        leaves: The leaves, by name.
        gradients: Their gradients, by the same names; the batch is target × sample.
        num_targets: Number of targets of each sample.

    Raises:
        MissingPositionsError: The leaves have different numbers of positions.
    """
    lengths = {leaf.shape[1] for leaf in leaves.values()}
    if len(lengths) > 1:
        raise MissingPositionsError(
            f"its position embeddings cover {' and '.join(map(str, sorted(lengths)))} positions, so they belong to "
            "different sequences"
        )
    products = [(leaf.detach().repeat(num_targets, 1, 1) * gradients[name]).sum(-1) for name, leaf in leaves.items()]
    # Sorted, so that rounding does not depend on the order of the leaves: ModernBERT and Gemma 3 make rotary embeddings
    # for each item of a set, whose order differs between processes.
    return torch.stack(products).sort(0).values.sum(0)


def _find_position_modules(topology: ModelTopology) -> list[nn.Module]:
    """The rotary modules, and those that look positions up."""
    rotary = [module for module in topology.modules if "RotaryEmbedding" in type(module).__name__]
    # Adapters change the embeddings: the graph starts after them, as it does in the merged model.
    embeddings = [find_wrapping_layer(module, topology.peft_layers) for module in topology.embeddings]
    looked_up = [module for module in embeddings if _is_position_name(_get_last_name(topology, module))]
    return [*rotary, *looked_up]


def _iter_position_parameters(topology: ModelTopology) -> Iterator[nn.Parameter]:
    """Iterate over the parameters that are position embeddings themselves, not tables of a module."""
    for module in topology.modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_position_name(name):
                yield parameter


def _get_last_name(topology: ModelTopology, module: nn.Module) -> str:
    """The name of a module in its parent."""
    return topology.names[id(module)].rpartition(".")[2]


def _is_position_name(name: str) -> bool:
    return _POSITION_NAME.search(name) is not None and _RELATIVE_NAME.search(name) is None


class _ParameterLeafMode(TorchFunctionMode):
    """Replaces parameters by leaves wherever an operation receives them.

    Args:
        parameter_ids: The parameters, by `id`.
        make_leaf: Makes the leaf that replaces a parameter; called once for each.
    """

    def __init__(self, parameter_ids: set[int], make_leaf: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.parameter_ids = parameter_ids
        self.make_leaf = make_leaf
        self.leaves: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # an attribute, such as the shape, which the parameter has for all samples
            return func(*args, **(kwargs or {}))
        return func(*map(self._replace, args), **{name: self._replace(arg) for name, arg in (kwargs or {}).items()})

    def _replace(self, arg: Any) -> Any:
        if isinstance(arg, list | tuple) and any(id(item) in self.parameter_ids for item in arg):
            return type(arg)(map(self._replace, arg))
        if id(arg) not in self.parameter_ids:
            return arg
        if id(arg) not in self.leaves:
            self.leaves[id(arg)] = self.make_leaf(arg)
        return self.leaves[id(arg)]
