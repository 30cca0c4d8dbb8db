"""Multi-stream and multi-step explanations of tiny models: one of every shape that can be rendered."""

from functools import cache
from typing import Any

import numpy as np
import torch
import transformers

import clearhead
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.units import Units
from tests import dual_models, joint_models, models
from tests.render.conftest import make_explanation

TEXT = "I like the movie."
STEPS = ("F", "OW1", "N")


def decoder(dtype: torch.dtype = torch.float64) -> Any:
    """A tiny GPT-2 with its tokenizer."""
    tokenizer = models.tokenizer("bytes")
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 70, "initializer_range": 0.3}
    torch.manual_seed(7)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**ids, **size)).to(dtype).eval(), tokenizer


def bart(dtype: torch.dtype = torch.float64) -> Any:
    """A tiny BART with its tokenizer."""
    tokenizer = models.tokenizer("bytes")
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    size = {"d_model": 32, "max_position_embeddings": 70, "init_std": 0.3, "decoder_start_token_id": 2}
    half = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    halves = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in half.items()}
    torch.manual_seed(7)
    config = transformers.BartConfig(**ids, **size, **halves, forced_eos_token_id=None)
    return transformers.BartForConditionalGeneration(config).to(dtype).eval(), tokenizer


def detector(dtype: torch.dtype = torch.float64) -> Any:
    """A tiny DETR with its image processor."""
    layers = {"layers": 2, "attention_heads": 4, "ffn_dim": 32}
    halves = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in layers.items()}
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "layer_type": "basic"}
    config = transformers.DetrConfig(
        **halves,
        d_model=32,
        num_queries=5,
        init_std=0.3,
        init_xavier_std=2.0,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(**sizes, out_features=["stage4"]),
        id2label={0: "circle", 1: "square", 2: "star"},
    )
    torch.manual_seed(7)
    model = transformers.DetrForObjectDetection(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name:  # they are initialised to zero
                parameter.normal_()
    processor = transformers.DetrImageProcessor(size={"height": 96, "width": 128})
    return model.to(dtype).eval(), processor


def picture(size: tuple[int, int] = (48, 64)) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)


#: The keys of `every()`, for parametrised tests: the results are computed at the first use.
KINDS = (
    "text and picture",
    "text and regions",
    "regions without a picture",
    "objects",
    "one object",
    "continuation",
    "source and prefix",
    "sound",
    "sound, step by step",
)


@cache
def every() -> dict[str, AnyExplanation]:
    """Return multi-stream and multi-step explanations by name."""
    lxmert = joint_models.explainer("lxmert")
    regions = joint_models.regions(4)
    detr = clearhead.load(detector())
    num_streams = len(detr.explain(picture(), target=clearhead.DetectionQuery(0), method="generic").streams)
    assert num_streams == 2
    detr.adapter.threshold = 0.0  # an untrained detector has low confidence
    results = {
        "text and picture": dual_models.explainer("clip").explain(text=TEXT, image=picture(), method="generic"),
        "text and regions": lxmert.explain(text=TEXT, regions=regions, image=picture(), method="generic"),
        "regions without a picture": lxmert.explain(text=TEXT, regions=regions, method="generic"),
        "objects": detr.explain(picture(), method="generic"),
        "one object": detr.explain(picture(), target=clearhead.DetectionQuery(2, "star"), method="generic"),
        "continuation": clearhead.load(decoder()).explain(TEXT, answer=" It is boring", method="generic"),
        "source and prefix": clearhead.load(bart()).explain(TEXT, answer="She hates it", method="generic"),
        "sound": make_audio_explanation(),
        "sound, step by step": make_stepped_audio_explanation(),
    }
    assert tuple(results) == KINDS
    return results


def make_audio_explanation(count: int = 60) -> clearhead.Explanation:
    scores = np.sin(np.arange(count) / 5) * np.linspace(1, 0, count)
    return make_explanation([], scores, units=frames(count))


def make_stepped_audio_explanation(count: int = 60) -> clearhead.Explanation:
    matrix = np.abs(np.stack([np.roll(make_audio_explanation(count).scores, 9 * step) for step in range(3)]))
    return make_explanation([], matrix.sum(0), units=frames(count), matrix=matrix, steps=STEPS)


def frames(count: int) -> Units:
    names = tuple(f"{index * 0.02:.2f}s" for index in range(count))
    return Units(stream="audio", kind="frame", names=names, special=(False,) * count)
