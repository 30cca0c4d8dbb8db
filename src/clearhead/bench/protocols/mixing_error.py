"""Mixing error: how well does a method's token-mixing matrix approximate an attention block? (Beyond Intuition)

Rollout and both methods of Beyond Intuition replace a block by a mixing of its tokens ("perception"). With Z the
block's input and A, V, W_o its attention, values and output projection:

    Z + Σ_h A_h V_h W_oᵀ  ≈  (I + Ã) Z        Ã: E_h A of rollout, Σ_h θ_h A_h head-wise, E_h A · diag(ρ) token-wise

    error           ‖left − right‖ / ‖left‖, the mean over blocks; the error of each block is stored as a curve
    unmixed error   the same with Ã = 0: the level that a mixing matrix must improve on
    block cosine    cosine of the rows of (I + Ã) Z with those of the block's output (MLP included), averaged

Only methods with such a mixing matrix are measured; special units count, because they take part in attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.bench.chunk_explanations import build_explain_kwargs, parse_method
from clearhead.bench.data import Example
from clearhead.bench.protocols.base import (
    BenchmarkProtocol,
    ExplainedClass,
    ExplanationsByMethod,
    Measurement,
    register_protocol,
)
from clearhead.capture.tape import AttentionCall, Requirement
from clearhead.errors import InputError
from clearhead.methods._perception import PerceptionMethod
from clearhead.methods.base import METHOD_REGISTRY, UnitContext

if TYPE_CHECKING:
    from clearhead.bench.output_cache import OutputCache
    from clearhead.explainer import Explainer

ROLLOUT_METHOD = "rollout"
MIXING_METHODS = (ROLLOUT_METHOD, "beyond-intuition-head", "beyond-intuition-token")
REQUIRED_TENSORS: tuple[Requirement, ...] = (
    *("attention", "attention_gradient", "values", "output_projection", "block_input", "hidden_state"),
)


@register_protocol("perceptions")
@dataclass(frozen=True)
class MixingError(BenchmarkProtocol):
    """Approximation error of the mixing matrices of rollout and Beyond Intuition."""

    description: ClassVar[str] = "How well does a method’s mixing of tokens approximate an attention block?"
    headline_metrics: ClassVar[tuple[str, ...]] = ("error", "block cosine")
    smaller_is_better_metrics: ClassVar[frozenset[str]] = frozenset({"error", "unmixed error"})

    explained: ExplainedClass = "predicted"

    def measure(
        self,
        explainer: "Explainer",
        examples: Sequence[Example],
        explanations: ExplanationsByMethod,
        output_cache: "OutputCache | None" = None,
    ) -> list[Measurement]:
        """Record each example once and measure the self-attention blocks of each stream."""
        methods = [name for name in explanations if parse_method(name).name in MIXING_METHODS]
        if not methods:
            raise InputError(f"perceptions needs at least one of the methods {', '.join(MIXING_METHODS)}")
        measurements = []
        for example in examples:
            tape = explainer.record(
                **build_explain_kwargs([example]), requires=REQUIRED_TENSORS, target=self.select_target(example)
            )
            self_attention_calls = [call for call in tape.calls if call.query_stream == call.key_stream]
            streams = list(dict.fromkeys(call.query_stream for call in self_attention_calls))
            for method in methods:
                for stream in streams:
                    block_errors = [
                        _compute_block_errors(call, compute_mixing_matrix(method, call))
                        for call in self_attention_calls
                        if call.query_stream == stream
                    ]
                    means = {
                        name: float(np.mean([errors[name] for errors in block_errors])) for name in block_errors[0]
                    }
                    curves = {"error": tuple(errors["error"] for errors in block_errors)}
                    measurements.append(Measurement(example.id, method, stream, means, curves))
        return measurements


def compute_mixing_matrix(method: str, call: AttentionCall) -> Float[Tensor, "query key"]:
    """Compute Ã of one block with the method's own code."""
    parsed_method = parse_method(method)
    if parsed_method.name == ROLLOUT_METHOD:
        return call.mean_attention[0]
    assert call.attention is not None
    length = call.attention.shape[-1]
    valid_mask = torch.ones(1, length, dtype=torch.bool, device=call.attention.device)
    unit_context = UnitContext(readout=valid_mask[:, None].float(), valid_mask=valid_mask, seeds=(0,), layers=range(1))
    method_class = METHOD_REGISTRY[parsed_method.name]
    instance = cast(PerceptionMethod, method_class(unit_context=unit_context, **parsed_method.constructor_kwargs))
    return instance.compute_mixing_map(call)[0]


def _compute_block_errors(call: AttentionCall, mixing_matrix: Float[Tensor, "query key"]) -> dict[str, float]:
    """Return ‖output − mixed‖ / ‖output‖ of the attention, the same without mixing, and the block's cosine."""
    if call.values is None or call.output_projection is None or call.block_input is None:
        raise InputError(
            f"{call.module}: values, output projection or block input were not recorded; perceptions cannot be measured"
        )
    assert call.attention is not None and call.hidden_state is not None
    tokens = call.block_input[0].double()
    block_output = call.hidden_state[0].double()
    heads = (call.attention[0].double() @ call.values[0].double()).transpose(0, 1).flatten(1)
    attention_output = tokens + heads @ call.output_projection.double().mT
    mixed_tokens = tokens + mixing_matrix.double() @ tokens
    return {
        "error": float((attention_output - mixed_tokens).norm() / attention_output.norm()),
        "unmixed error": float((attention_output - tokens).norm() / attention_output.norm()),
        "block cosine": float(torch.cosine_similarity(mixed_tokens, block_output, dim=-1).mean()),
    }
