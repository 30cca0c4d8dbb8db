"""Numerical error of streaming on a trained model with sharp attention, zoo:recall-4k: part `exact` of
`performance.py`.

Streaming is compared with materialised attention twice: in two passes, as a user would compare them; and in the same
pass, with materialised attention in float64 from its own queries, keys, values and gradients. The difference between
passes and a pass in float64 is also reported, streaming and materialised: that is the rounding of the model itself,
which no recorder can remove, and for which this model was trained (`packages/zoo/train/recall.py --noise`). The
attention that transformers itself returns, without clearhead, is reported next to it.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import clearhead
from clearhead import Method

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.capture.float64_reference import far, whole_maps_in_float64

COMPARED_METHODS = [
    *("generic", "grad-sam", "attcat", "attention", "attention-gradcam", "attention-x-gradient", "rollout"),
    *(Method(name, steps=2) for name in ("tam", "beyond-intuition-token")),
]
NUM_EXAMPLES = 8
SAME_PASS_COMPARISON = "streaming against materialised attention in float64, same pass"
TWO_PASS_COMPARISON = "streaming against materialised attention, two passes"
#: Maximum difference of two passes or two computations of one pass, and of a bfloat16 pass from a float64 pass.
MAX_TILING_ERROR, MAX_BFLOAT16_ERROR = 1e-5, 1e-2
TRANSFORMERS_ONLY_COMPARISON = (
    "transformers only, eager, the attention that transformers returns, against the model in float64"
)


def measure_tiling_errors(device: str, tokens: int) -> list[dict[str, Any]]:
    """A row per comparison: the largest difference of a score over some lists, relative to the largest score."""
    from clearhead_zoo.tasks import recall

    gaps: dict[tuple[str, str], dict[str, float]] = {}
    alone: dict[str, float] = {}
    kernels: dict[tuple[str, str], str] = {}
    models = {name: _load_model(device, name) for name in ("float32", "bfloat16", "float64")}
    exact_model = models.pop("float64")
    for example in recall.make_examples(NUM_EXAMPLES, seed=2024, pairs=recall.compute_max_pairs(tokens)):
        exact = exact_model.explain(example.text, COMPARED_METHODS, kernel="materialised")
        looks = _compute_last_token_attention(exact_model, example.text)
        for dtype, ex in models.items():
            gap = float((_compute_last_token_attention(ex, example.text) - looks).abs().max() / looks.max())
            alone[dtype] = max(alone.get(dtype, 0.0), gap)
            streaming, whole = (
                ex.explain(example.text, COMPARED_METHODS, kernel=one) for one in ("streaming", "materialised")
            )
            with whole_maps_in_float64():
                summed = ex.explain(example.text, COMPARED_METHODS, kernel="streaming")
            for way, ran, found in (
                (SAME_PASS_COMPARISON, streaming, _compute_gaps(streaming, summed)),
                (TWO_PASS_COMPARISON, streaming, _compute_gaps(streaming, whole)),
                ("streaming against the model in float64", streaming, _compute_gaps(streaming, exact)),
                ("materialised attention against the model in float64", whole, _compute_gaps(whole, exact)),
            ):
                before = gaps.setdefault((dtype, way), found)
                gaps[dtype, way] = {method: max(gap, before[method]) for method, gap in found.items()}
                kernels[dtype, way] = ran["generic"].certificate["kernel"]
    about = {"part": "exact", "model": "zoo:recall-4k", "tokens": tokens, "batch": 1, "device": device}
    return [
        *(
            {
                **about,
                **{
                    "dtype": dtype,
                    "way": f"clearhead, {len(COMPARED_METHODS)} methods, {way}",
                    "kernel": kernels[dtype, way],
                },
                **{"error": max(found.values()), "by method": found},
                **_get_error_limit(way, dtype),
            }
            for (dtype, way), found in gaps.items()
        ),
        *(
            {
                **about,
                "dtype": dtype,
                "way": TRANSFORMERS_ONLY_COMPARISON,
                "error": gap,
                "by method": {"attention": gap},
            }
            for dtype, gap in alone.items()
        ),
    ]


def _get_error_limit(way: str, dtype: str) -> dict[str, float]:
    if way in (SAME_PASS_COMPARISON, TWO_PASS_COMPARISON):
        return {"bar": MAX_TILING_ERROR}
    return {"bar": MAX_BFLOAT16_ERROR} if dtype == "bfloat16" else {}


def _load_model(device: str, dtype: str) -> Any:
    """Load the model with the bfloat16 weights in every dtype."""
    ex = clearhead.load("zoo:recall-4k", dtype="bfloat16", device=device)
    ex.adapter.model.to(getattr(torch, dtype))
    return ex


def _compute_last_token_attention(ex: Any, text: str) -> Float[Tensor, " token"]:
    """The attention of the last token in the last layer, mean over heads, as the model itself returns it."""
    model = ex.adapter.model
    inputs = ex.adapter.processor(text, return_tensors="pt").to(model.device)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            maps = model(**inputs, output_attentions=True).attentions[-1]
    finally:
        model.set_attn_implementation(before)
    return maps[0, :, -1].double().mean(0)


def _compute_gaps(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    return {method: far(one, expected[method]) for method, one in found.items()}
