"""What one walk over a model's modules finds: their names, their layers, attention modules, and configurations."""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

from torch import nn

from clearhead.capture.peft_layers import is_peft_layer


class ModelTopology:
    """The modules of a model, found in one walk.

    Args:
        model: The model.

    Attributes:
        model: The model.
        modules: Every module once, the model itself first, in the order of `model.modules()`.
        names: The name of each module, by the module's id.
        layer_of_module: The layer of each module, by the module's id: its innermost ancestor that is an item of a
            ModuleList. A module outside every ModuleList belongs to the item of a Sequential, as in timm's models.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []
        self.names: dict[int, str] = {}
        self.layer_of_module: dict[int, nn.Module] = {}
        self._parents: list[tuple[nn.Module, nn.Module | None]] = []  # every occurrence of a module, parents first
        self._walk(model, "", None, None, False)
        self._children = [(module, dict(module._modules)) for module in self.modules]

    def _walk(
        self, module: nn.Module, name: str, parent: nn.Module | None, layer: nn.Module | None, in_module_list: bool
    ) -> None:
        self._parents.append((module, parent))
        if id(module) not in self.names:
            self.names[id(module)] = name
            self.modules.append(module)
        if layer is not None:
            self.layer_of_module[id(module)] = layer
        is_module_list = isinstance(module, nn.ModuleList)
        starts_layers = is_module_list or (isinstance(module, nn.Sequential) and not in_module_list)
        for child_name, child in module.named_children():
            child_layer = child if starts_layers else layer
            full_name = f"{name}.{child_name}" if name else child_name
            self._walk(child, full_name, module, child_layer, in_module_list or is_module_list)

    def is_current(self) -> bool:
        """Whether every module still has the children that it had during the walk.

        Returns:
            False if a module was added, removed or replaced, so that the model must be walked again.
        """
        return all(module._modules == children for module, children in self._children)

    @property
    def layers(self) -> list[nn.Module]:
        """Every layer once."""
        return list({id(layer): layer for layer in self.layer_of_module.values()}.values())

    @cached_property
    def attention_modules(self) -> list[nn.Module]:
        """The innermost modules whose class is named attention (and not attention output)."""
        containing_attention: set[int] = set()
        attention_modules: dict[int, nn.Module] = {}
        for module, parent in reversed(self._parents):  # a module comes after everything that it contains
            is_attention = _is_named_attention(type(module).__mro__) and not is_deformable_attention(module)
            if is_attention and id(module) not in containing_attention:
                attention_modules[id(module)] = module
            if parent is not None and (is_attention or id(module) in containing_attention):
                containing_attention.add(id(parent))
        return [module for module in self.modules if id(module) in attention_modules]

    @cached_property
    def matrix_modules(self) -> list[nn.Module]:
        """The modules whose weight is a matrix, among which is the output projection of each attention."""
        return [module for module in self.modules if getattr(getattr(module, "weight", None), "ndim", 0) == 2]

    @cached_property
    def batch_norms(self) -> list[nn.BatchNorm2d]:
        """The two-dimensional batch norms, whose statistics are those of channels of an image."""
        return [module for module in self.modules if isinstance(module, nn.BatchNorm2d)]

    @cached_property
    def peft_layers(self) -> list[nn.Module]:
        """The layers of peft that wrap other layers, outer ones first."""
        return [module for module in self.modules if is_peft_layer(module)]

    @cached_property
    def embeddings(self) -> list[nn.Embedding]:
        """The modules that look up vectors."""
        return [module for module in self.modules if isinstance(module, nn.Embedding)]

    @cached_property
    def rotary_embeddings(self) -> list[nn.Module]:
        """The modules that have a type of rotary embedding."""
        return [module for module in self.modules if "rope_type" in vars(module)]

    @cached_property
    def module_classes(self) -> frozenset[type[nn.Module]]:
        """The class of every module."""
        return frozenset(map(type, self.modules))

    @cached_property
    def _configured_modules(self) -> list[nn.Module]:
        return [module for module in self.modules if hasattr(module, "config")]

    def find_configs(self) -> list[Any]:
        """Return every distinct configuration object in the model, sub-configurations included.

        Returns:
            Configurations that name an attention implementation, each once.
        """
        configs: dict[int, Any] = {}
        queue: list[Any] = [module.config for module in self._configured_modules]
        while queue:
            config = queue.pop()
            if id(config) in configs or not hasattr(config, "_attn_implementation"):
                continue
            configs[id(config)] = config
            queue += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
        return list(configs.values())

    def iter_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters; one that several modules share comes several times.

        Yields:
            The parameters of each module, in the order of the walk.
        """
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter


@cache
def _is_named_attention(classes: tuple[type, ...]) -> bool:
    """Whether a class or one of its base classes is named attention; `classes` is its method resolution order."""
    return any("Attention" in cls.__name__ and "Output" not in cls.__name__ for cls in classes)


def is_deformable_attention(module: nn.Module) -> bool:
    """Whether a module attends to a few sampled points of an image: the weights it returns are no map over patches.

    Args:
        module: Any module.

    Returns:
        Whether its class is a multi-scale deformable attention, by its name.
    """
    return "multiscaledeformable" in type(module).__name__.lower()
