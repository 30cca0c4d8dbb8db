"""Where h^0 … h^L are in a model: h^0 goes into the first layer, h^k comes out of the k-th; and hooks at them."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import How
from clearhead.capture.checks.self_test import SelfTest
from clearhead.capture.layers import blocks_of
from clearhead.capture.session import hooks
from clearhead.errors import InputError, Refusal
from clearhead.explainer import Explainer

States = Float[Tensor, "batch unit model"]
#: What is done with the states of a layer: others are returned to take their place, or None to leave them.
Act = Callable[[States], States | None]


@dataclass(frozen=True)
class Site:
    """The states that one run of a layer takes in (`before`) or puts out. A shared layer runs several times."""

    block: nn.Module
    run: int
    before: bool = False


def tested_of(ex: Explainer) -> SelfTest:
    return ex.examined.test(ex.subject.samples(ex.subject.example(), How()))


def own_calls(ex: Explainer, stream: str | None = None) -> list[int]:
    """The calls in which a stream looks at itself, one a layer, counted in the order of the pass."""
    tested, stream = tested_of(ex), stream or ex.subject.stream
    own = [i for i, p in enumerate(tested.places) if (p.query_stream, p.key_stream) == (stream, stream)]
    if not own:
        known = sorted({p.query_stream for p in tested.places})
        raise InputError(f"{ex.subject.name} has no layers of the stream {stream!r}: it has {', '.join(known)}")
    if not tested.vectors:
        raise Refusal(
            f"the layers of {ex.subject.name} do not hand on one vector for each unit: they have no direction"
        )
    return own


def layer_number(layer: int, count: int) -> int:
    """k of h^k; negative numbers count from the end, so −1 is what the last layer puts out."""
    if not isinstance(layer, int) or not -count - 1 <= layer <= count:
        raise InputError(f"layer {layer!r} does not exist: give 0 (what goes into the first layer) to {count}")
    return layer % (count + 1)


def sites(ex: Explainer, stream: str | None = None) -> list[Site]:
    """Where h^0 … h^L of a stream are."""
    tested, blocks = tested_of(ex), blocks_of(ex.subject.model)
    seen: Counter[int] = Counter()
    found: list[Site] = []
    own = set(own_calls(ex, stream))
    for i, place in enumerate(tested.places):
        block = blocks.get(id(ex.subject.model.get_submodule(place.module)))
        if block is None:
            raise Refusal(f"{place.module} of {ex.subject.name} sits in no list of layers: its layers are not known")
        if i in own:
            found += [] if found else [Site(block, seen[id(block)], before=True)]
            found.append(Site(block, seen[id(block)]))
        if place.query_stream == place.key_stream:
            seen[id(block)] += 1
    return found


@contextmanager
def acting(model: nn.Module, acts: Mapping[Site, Act]) -> Iterator[None]:
    """In this thread's passes inside the `with`, each act gets the states of its site."""
    thread, runs = threading.get_ident(), Counter[int]()
    by_block = {id(site.block): site.block for site in acts}

    def acted(block: nn.Module, before: bool, states: States) -> States | None:
        run = runs[id(block)] - (0 if before else 1)
        changed = None
        for site, act in acts.items():
            if site.block is block and site.before == before and site.run == run:
                changed = act(states if changed is None else changed)
        return changed

    def begins(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            runs.clear()

    def enters(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        name = "hidden_states" if "hidden_states" in kwargs or not kwargs else next(iter(kwargs))
        changed = acted(block, True, args[0] if args else kwargs[name])
        runs[id(block)] += 1
        if changed is None:
            return None
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, name: changed})

    def leaves(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        several = isinstance(output, tuple)
        changed = acted(block, False, output[0] if several else output)
        return None if changed is None else (changed, *output[1:]) if several else changed

    handles = [model.register_forward_pre_hook(begins)]
    for block in by_block.values():
        handles.append(block.register_forward_pre_hook(enters, with_kwargs=True))
        handles.append(block.register_forward_hook(leaves))
    with hooks(handles):
        yield
