"""Perceptions: how well does a method's mixing matrix stand for what a block does? (Beyond Intuition's error.)

Rollout and both methods of Beyond Intuition replace a block by a mixing of its tokens, with Z what enters the block and
A, V, W_o its attention, values and output projection:

    Z + Σ_h A_h V_h W_oᵀ  ≈  (I + Ã) Z        Ã: E_h A of rollout, Σ_h θ_h A_h head-wise, E_h A · diag(ρ) token-wise

    error           ‖left − right‖ / ‖left‖, the mean over blocks; each block's is kept as a curve
    unmixed error   the same with Ã = 0: what a mixing must beat to say anything
    block cosine    of the rows of (I + Ã) Z with those of the block's output, the MLP included: mean over rows, blocks

Only methods with a mixing of that kind are measured; special units count, as they take part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.bench.chunk_explanations import given, method_of
from clearhead.bench.data import Example
from clearhead.bench.protocols.base import Explained, Explanations, Measurement, Protocol, register
from clearhead.capture.tape import Ask, Call
from clearhead.errors import InputError
from clearhead.methods._perception import PerceptionFold
from clearhead.methods.base import REGISTRY, Frame

if TYPE_CHECKING:
    from clearhead.bench.output_cache import Looks
    from clearhead.explainer import Explainer

ROLLOUT = "rollout"
PERCEIVING = (ROLLOUT, "beyond-intuition-head", "beyond-intuition-token")
ASKS: tuple[Ask, ...] = (
    *("attention", "attention_gradient", "values", "output_projection", "block_input", "hidden_state"),
)


@register("perceptions")
@dataclass(frozen=True)
class Perceptions(Protocol):
    about: ClassVar[str] = "How well does a method’s mixing of tokens stand for what a block does?"
    headline: ClassVar[tuple[str, ...]] = ("error", "block cosine")
    smaller_is_better: ClassVar[frozenset[str]] = frozenset({"error", "unmixed error"})

    explained: Explained = "predicted"

    def measure(
        self,
        ex: "Explainer",
        examples: Sequence[Example],
        explanations: Explanations,
        looks: "Looks | None" = None,
    ) -> list[Measurement]:
        methods = [name for name in explanations if method_of(name).name in PERCEIVING]
        if not methods:
            raise InputError(f"perceptions are those of {', '.join(PERCEIVING)}: none of them is among the methods")
        made = []
        for example in examples:
            tape = ex.record(**given([example]), asks=ASKS, target=self.target(example))
            calls = [call for call in tape.calls if call.query_stream == call.key_stream]
            for method in methods:
                for stream in dict.fromkeys(call.query_stream for call in calls):
                    own = [call for call in calls if call.query_stream == stream]
                    figures = [_compared(call, mixing(method, call)) for call in own]
                    means = {name: float(np.mean([one[name] for one in figures])) for name in figures[0]}
                    curve = tuple(one["error"] for one in figures)
                    made.append(Measurement(example.id, method, stream, means, {"error": curve}))
        return made


def mixing(method: str, call: Call) -> Float[Tensor, "query key"]:
    """Ã of one block, by the method itself."""
    made = method_of(method)
    if made.name == ROLLOUT:
        return call.mean_attention[0]
    assert call.attention is not None
    length = call.attention.shape[-1]
    like = torch.ones(1, length, dtype=torch.bool, device=call.attention.device)
    one = Frame(readout=like[:, None].float(), valid=like, seeds=(0,), layers=range(1))
    fold = cast(PerceptionFold, REGISTRY[made.name](frame=one, **made.own_options))
    return fold.mixing(call)[0]


def _compared(call: Call, mixed: Float[Tensor, "query key"]) -> dict[str, float]:
    if call.values is None or call.output_projection is None or call.block_input is None:
        raise InputError(f"what attention takes from tokens was not found in {call.module}: no perception is measured")
    assert call.attention is not None and call.hidden_state is not None
    tokens, after = call.block_input[0].double(), call.hidden_state[0].double()
    heads = (call.attention[0].double() @ call.values[0].double()).transpose(0, 1).flatten(1)
    true = tokens + heads @ call.output_projection.double().mT
    perceived = tokens + mixed.double() @ tokens
    return {
        "error": float((true - perceived).norm() / true.norm()),
        "unmixed error": float((true - tokens).norm() / true.norm()),
        "block cosine": float(torch.cosine_similarity(perceived, after, dim=-1).mean()),
    }
