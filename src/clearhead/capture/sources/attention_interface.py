"""Recording through transformers' attention interface: one registered function that delegates to the model's own
eager attention, so position biases, soft caps, sinks, windows and grouped heads stay exact. Modules that ignore the
interface are heard through what they return (`returned_attentions.py`), and registered ones through their function
(`custom_modules.py`)."""

import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from clearhead.capture.activation_checkpointing import layers_again
from clearhead.capture.attention.lazy_mask import Seeing, described
from clearhead.capture.attention.lazy_mask import seeing as seeing_of
from clearhead.capture.attention.materialised import Masks, Memory, as_ever, attend
from clearhead.capture.attention.tiled import Streamed, wide
from clearhead.capture.attention.tiling import Tiles, kernel_for
from clearhead.capture.layers import Run, Watch, blocks_of
from clearhead.capture.session import attention_implementation, hooks, implementation_of
from clearhead.capture.sources import custom_modules, returned_attentions
from clearhead.errors import Refusal

NAME = "clearhead"
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass
class Captured:
    """One attention call as the forward pass made it; its tensors are still in the graph."""

    module: str
    attention: Float[Tensor, "batch head query key"]
    values: Float[Tensor, "batch kv_head key width"] | None = None
    output: Float[Tensor, "batch query head width"] | None = None
    output_projection: Float[Tensor, "model heads"] | None = None
    run: Run | None = None
    nth: int = 0  # a shared module is called several times
    registered: bool = False  # heard through a function that stood in for the module's forward
    #: What makes its maps tile by tile, in a streaming pass; `attention` is then their outline alone.
    streamed: Streamed | None = None
    #: Where the gradient of its attention lies, to be written over once everybody has seen it.
    memory: Memory | None = None
    #: The queries that see something: of others, torch's kernel has no attention, and a softmax has.
    seeing: Seeing = None

    @property
    def block_input(self) -> Float[Tensor, "batch unit model"] | None:
        return self.run.input if self.run is not None else None

    @property
    def hidden_state(self) -> Float[Tensor, "batch unit model"] | None:
        return self.run.output if self.run is not None else None

    @property
    def kind(self) -> Literal["self", "cross"]:
        return "cross" if _CROSS.search(self.module) else "self"

    def values_per_head(self) -> Float[Tensor, "batch head key width"]:
        """Grouped-query heads share values: repeat them so that each attention head has its own."""
        assert self.values is not None
        return self.values.repeat_interleave(self.attention.shape[1] // self.values.shape[1], dim=1)

    def rebuilt(self) -> Float[Tensor, "batch query head width"]:
        """A·V, in the model's format."""
        values = self.values_per_head()
        return (self.attention.to(values.dtype) @ values).transpose(1, 2)

    def rebuild_error(self) -> float:
        """How far A·V lies from the output that the model really used, relative to its size."""
        assert self.output is not None
        rebuilt = self.rebuilt() if self.seeing is None else self.rebuilt() * self.seeing.transpose(1, 2)
        gap = (rebuilt.reshape(-1) - self.output.reshape(-1)).abs().max()
        return float(gap / self.output.abs().max().clamp(min=1e-12))


class Listener:
    """Collects the calls of the pass that runs in this thread."""

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[int, nn.Module],
        watch: Watch,
        silent: bool = False,
        tiles: Tiles | None = None,
        values: bool = True,
        as_streamed: bool = False,
    ) -> None:
        self.model, self.blocks, self.watch, self.silent = type(model).__name__, blocks, watch, silent
        self.tiles, self.values, self.as_streamed = tiles, values, as_streamed
        self.again = False  # whether a layer is computed again that was heard before
        self.names = {id(module): name for name, module in model.named_modules()}
        self.calls: list[Captured] = []
        self.heard: Counter[int] = Counter()  # how often each module was
        self.spare: list[Tensor] = []  # maps that nobody looks at any more

    def name_of(self, module: nn.Module) -> str:
        return self.names.get(id(module), type(module).__name__)

    def hear(
        self,
        module: nn.Module,
        attention: Tensor | None,
        values: Tensor | None = None,
        output: Tensor | None = None,
        registered: bool = False,
        streamed: Streamed | None = None,
        memory: Memory | None = None,
        seeing: Seeing = None,
    ) -> None:
        self.heard[id(module)] += 1
        if attention is None:
            raise Refusal(
                f"{self.model}: the eager attention of {self.name_of(module)} ({type(module).__name__}) returns no "
                "probabilities to record"
            )
        self.calls.append(
            Captured(
                module=self.name_of(module),
                attention=attention,
                values=values,
                output=output,
                run=self.watch.of(self.blocks.get(id(module))),
                nth=self.heard[id(module)] - 1,
                registered=registered,
                streamed=streamed,
                memory=memory,
                seeing=seeing,
            )
        )

    def forget(self) -> None:
        """What was heard is the caller's: layers that are to be computed again know this listener, the graph knows
        them, and a graph that nobody goes through would be held in a circle."""
        self.calls = []
        self.watch.latest.clear()

    def passed_on(self, output: Any) -> Any:
        """What the model gets of an attention's output: in a silent pass, zeros in place of it."""
        if not self.silent:
            return output
        if isinstance(output, tuple | list):
            return type(output)([self.passed_on(output[0]), *output[1:]])
        return torch.zeros_like(output) if isinstance(output, Tensor) else output

    @contextmanager
    def away(self) -> Iterator[None]:
        """Nothing is heard inside the `with`: the pass goes the way it always goes."""
        _active.listener = None
        try:
            yield
        finally:
            _active.listener = self

    @property
    def listening(self) -> bool:
        """Hooks fire in every thread that uses the model; only the recorded pass is listened to."""
        return getattr(_active, "listener", None) is self


_active = threading.local()
#: The masks that eager attention gets in recorded passes: as torch's kernel would get each, as a streaming pass would,
#: and who sees something.
_masks: MutableMapping[Tensor, tuple[Tensor | None, Callable[[], Tensor | None], Seeing]] = WeakIdKeyDictionary()
#: Output, attention, values and mask of a call → the output and the attention that take their place.
Patch = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    listener = getattr(_active, "listener", None)
    edit = getattr(_active, "edit", None)
    instead = getattr(_active, "instead", None)
    if instead is not None:
        return instead(query), None
    if edit is not None:
        masks, kernel = _masks_of(attention_mask), _kernel_of(module, kwargs)
        return as_ever(eager_of(module), kernel, module, query, key, edit(value), masks, kwargs), None
    if listener is None:
        # The flag is switched for every thread; a pass that is not recorded goes the way it always goes.
        own = implementation_of(module.config)
        forward = eager_of(module) if own == "eager" else _attention_function(own)
        return forward(module, query, key, value, attention_mask, **kwargs)
    eager = eager_of(
        module, f"{listener.model}: the attention of {listener.name_of(module)} cannot be recorded exactly: "
    )
    if listener.tiles is not None:
        if (moving := _moving(attention_mask, kwargs)) is not None:
            raise Refusal(
                f"{listener.model}: the attention of {listener.name_of(module)} takes {moving}, which depends on the "
                "input, beside queries, keys and values: it cannot be had tile by tile"
            )
        streamed = _streamed(eager, module, query.shape[2], attention_mask, kwargs, listener.tiles)
        output = streamed.attend(query, key, value)
        if listener.again:
            streamed.release()  # it was made for what autograd keeps of it, and would hold that in a circle
        else:
            value_and_output = (value, output) if listener.values else ()
            listener.hear(module, streamed.outline, *value_and_output, streamed=streamed)
        return listener.passed_on(output), None
    kernel, masks, memory = _kernel_of(module, kwargs), _masks_of(attention_mask), Memory(listener.spare)
    patch = getattr(_active, "patch", None)
    # in half precision gradients are rounded, too, so that it matters what makes them
    rounded = query.dtype != wide(query.dtype) and _moving(attention_mask, kwargs) is None
    as_streamed = None
    if listener.as_streamed and patch is None and rounded:
        tiles = Tiles(kernel=kernel_for(query.device))
        as_streamed = _streamed(eager, module, query.shape[2], masks.tiles(), kwargs, tiles)
    output, attention, seeing = attend(eager, kernel, module, query, key, value, masks, kwargs, memory, as_streamed)
    if patch is not None and attention is not None:
        output, attention = patch(output, attention, value, attention_mask)
    listener.hear(module, attention, value, output, memory=memory, seeing=seeing)
    return listener.passed_on(output), attention


def _streamed(
    eager: Callable[..., tuple[Tensor, Tensor]],
    module: nn.Module,
    queries: int,
    mask: Tensor | None,
    more: dict[str, Any],
    tiles: Tiles,
) -> Streamed:
    """A call of a streaming pass."""
    if _is_eager(module.config):
        return Streamed(eager, None, module, mask, False, more, tiles)
    # As transformers has it: no mask means a causal one, where the module is causal.
    given = more.get("is_causal")
    is_causal = given if given is not None else getattr(module, "is_causal", True)
    causal = mask is None and queries > 1 and bool(is_causal)
    return Streamed(eager, _kernel_of(module, more), module, mask, causal, more, tiles)


def _moving(mask: Tensor | None, more: dict[str, Any]) -> str | None:
    """What depends on the input beside queries, keys and values: in tiles its gradient would be lost."""
    parts = {"mask": mask, **more}
    return next((name for name, part in parts.items() if isinstance(part, Tensor) and part.requires_grad), None)


def _kernel_of(module: nn.Module, more: dict[str, Any]) -> Callable[..., tuple[Tensor, Any]] | None:
    """Torch's own kernel, where the model runs with it, or with another that is not eager (flash, flex): it makes the
    output then. None where the model is eager, or says what torch's kernel does not heed."""
    told = any(more.get(name) is not None for name in ("softcap", "s_aux"))
    return None if told or _is_eager(module.config) else _attention_function("sdpa")


def _masks_of(mask: Tensor | None) -> Masks:
    """What hides keys, in every form. A mask that the model has made, cut or moved itself is taken as it is."""
    if mask is None or mask not in _masks:
        return Masks(mask, mask, lambda: mask)
    return Masks(mask, *_masks[mask])


def _is_eager(config: Any) -> bool:
    return config is not None and implementation_of(config) == "eager"


def _mask(config: Any = None, **kwargs: Any) -> Tensor | None:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    listener = getattr(_active, "listener", None)
    if listener is None and config is not None:
        return AttentionMaskInterface()[implementation_of(config)](config=config, **kwargs)
    if listener is not None and listener.tiles is not None:
        return _described(config, kwargs)
    mask = eager_mask(config=config, **kwargs)
    if mask is not None and mask.dtype == torch.float64:
        # Its least number is −∞ to a softmax in float32, which makes NaN of a padded row that sees nothing else.
        mask = mask.clamp(min=torch.finfo(torch.float32).min)
    if mask is not None and listener is not None:
        kernels = None if _is_eager(config) else AttentionMaskInterface()["sdpa"](config=config, **kwargs)
        _masks[mask] = kernels, cache(partial(_described, config, kwargs)), seeing_of(kernels)
    return mask


def _described(config: Any, named: dict[str, Any]) -> Tensor | None:
    # what comes after each query, torch's kernel leaves out by itself
    skips = named.get("allow_is_causal_skip", True) and not _is_eager(config)
    return described(config=config, **{**named, "allow_is_causal_skip": skips})


def _attention_function(name: str) -> Callable[..., tuple[Tensor, Any]]:
    from transformers.modeling_utils import AttentionInterface

    return AttentionInterface()[name]


@cache
def register_functions() -> None:
    """Makes the attention implementation "clearhead" known to transformers.

    On first use, not on import: importing transformers' model code takes two seconds.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    # Without a mask function of the same name transformers drops the padding mask in silence.
    AttentionMaskInterface.register(NAME, _mask)


def eager_of(module: nn.Module, problem: str = "") -> Callable[..., tuple[Tensor, Tensor]]:
    """The `eager_attention_forward` that stands beside the module's class."""
    for cls in type(module).__mro__:
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            return eager
    raise Refusal(f"{problem}{type(module).__module__} has no eager_attention_forward beside {type(module).__name__}")


@contextmanager
def capture(
    model: nn.Module,
    layers: bool = False,
    projections: bool = False,
    implementation: str = NAME,
    silent: bool = False,
    tiles: Tiles | None = None,
    values: bool = True,
    as_streamed: bool = False,
) -> Iterator[list[Captured]]:
    """Collect every attention call that the model makes in this thread inside the `with`.

    `layers` also keeps what goes into and comes out of each layer; `projections` finds the output projections;
    `implementation` is "eager" for models that have a table of attention functions of their own; in a `silent` pass
    attention is heard, but passes nothing on; with `tiles` no call has maps, and each has what makes them (and its
    `values` only if that is said); `as_streamed`, gradients in half precision are those of a streaming pass where maps
    are whole, too.
    """
    register_functions()
    blocks = blocks_of(model)
    watch = Watch(blocks.values() if layers else ())
    listener = Listener(model, blocks, watch, silent, tiles, values, as_streamed)
    handles = [*watch.handles, *returned_attentions.handles(model, listener)]
    if projections:
        handles += [
            module.register_forward_pre_hook(_recognise_projection(listener))
            for module in model.modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ]
    outer: Listener | None = getattr(_active, "listener", None)
    with ExitStack() as stack:
        stack.enter_context(hooks(handles))
        stack.enter_context(custom_modules.heard(model, listener))
        stack.enter_context(attention_implementation(model, implementation))
        if tiles is not None and tiles.checkpoint and torch.is_grad_enabled():
            again = partial(_again, model, implementation, listener)
            stack.enter_context(layers_again(blocks.values(), again))
        _active.listener = listener
        try:
            yield listener.calls
        finally:
            _active.listener = outer
            listener.forget()


@contextmanager
def _again(model: nn.Module, implementation: str, listener: Listener) -> Iterator[None]:
    """What holds while a layer is computed again on the way back, in whichever thread that is."""
    outer: Listener | None = getattr(_active, "listener", None)
    with attention_implementation(model, implementation):
        _active.listener, listener.again = listener, True
        if listener.tiles is not None:
            listener.tiles.ran.twice = True
        try:
            yield
        finally:
            _active.listener, listener.again = outer, False


@contextmanager
def editing_values(without: int | None) -> Iterator[None]:
    """In this thread's attention inside the `with`, the values of one unit are zero in all heads; nothing is heard."""

    def edit(values: Float[Tensor, "batch kv_head key width"]) -> Float[Tensor, "batch kv_head key width"]:
        if without is None:
            return values
        here = torch.arange(values.shape[2], device=values.device) == without
        return values.masked_fill(here[:, None], 0)

    register_functions()
    outer: Listener | None = getattr(_active, "listener", None)
    _active.listener, _active.edit = None, edit
    try:
        yield
    finally:
        _active.listener, _active.edit = outer, None


@contextmanager
def patching(patch: Patch) -> Iterator[None]:
    """In recorded passes of this thread inside the `with`, what an attention call gives goes through `patch`."""
    outer: Patch | None = getattr(_active, "patch", None)
    _active.patch = patch
    try:
        yield
    finally:
        _active.patch = outer


@contextmanager
def attending(instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In this thread inside the `with`, nothing attends: what each call gives is made from its queries alone."""
    register_functions()
    outer: Listener | None = getattr(_active, "listener", None)
    _active.listener, _active.instead = None, instead
    try:
        yield
    finally:
        _active.listener, _active.instead = outer, None


def _recognise_projection(listener: Listener) -> Callable[..., None]:
    """The linear map that is fed the attention's own output is its output projection, whatever it is called."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        last = listener.calls[-1] if listener.calls else None
        if not listener.listening or last is None or last.output is None or not args:
            return
        fresh = last.output_projection is None and isinstance(args[0], Tensor)
        if fresh and _same_numbers(args[0], last.output):
            weight = module.weight
            assert isinstance(weight, Tensor)
            # GPT-2's Conv1D stores its weight as input × output.
            last.output_projection = weight if isinstance(module, nn.Linear) else weight.T
            last.output = last.output if last.streamed is None else None  # a streaming pass keeps no more than it must

    return hook


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.numel() != other.numel():
        return False
    return one.data_ptr() == other.data_ptr() or torch.equal(one.reshape(-1), other.reshape(-1))
