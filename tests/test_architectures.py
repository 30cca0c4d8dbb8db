"""Every class of the installed transformers that can be built tiny: explained rightly, or refused – never wrongly.

Slow: `make test-slow`.
"""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

import clearhead

#: Whatever a configuration calls its sizes, they become small.
SMALL = {
    "hidden_size": 32,
    "d_model": 32,
    "dim": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "encoder_hidden_size": 32,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_heads": 4,
    "n_head": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "head_dim": 8,
    "intermediate_size": 48,
    "hidden_dim": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MASK = 4
HEADS = {
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "text",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "mask",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
}


def classes() -> list[Any]:
    found = []
    for mapping, task in HEADS.items():
        for kind, names in getattr(modeling_auto, mapping).items():
            for name in [names] if isinstance(names, str) else names:
                found.append(pytest.param(kind, name, task, id=f"{task}-{name}"))
    return found


def build(kind: str, name: str) -> Any:
    """The model, tiny, in float64; a skip where a configuration cannot be made small in this simple way."""
    try:
        config_class = transformers.CONFIG_MAPPING[kind]
        plain = config_class()
        config = config_class(**{key: value for key, value in SMALL.items() if hasattr(plain, key)})
        config.mask_token_id = MASK  # there is no tokenizer that could say it
        with torch.device("meta"):
            weights = sum(part.numel() for part in getattr(transformers, name)(config).parameters())
        torch.manual_seed(0)
        model = getattr(transformers, name)(config) if weights < 20_000_000 else None
    except Exception as problem:
        pytest.skip(f"cannot be built tiny: {type(problem).__name__}: {problem}"[:150])
    if model is None:
        pytest.skip("cannot be built tiny: too many weights")
    return model.double().eval()


def inputs(model: Any, task: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    if task == "image":
        size = model.config.image_size if hasattr(model.config, "image_size") else 32
        high, wide = (size, size) if isinstance(size, int) else size
        channels = getattr(model.config, "num_channels", 3)
        return [{"pixel_values": torch.rand(1, channels, high, wide, generator=generator).double()} for _ in range(2)]
    rows = [torch.randint(5, 100, (1, length), generator=generator) for length in (9, 6)]
    for row in rows:
        row[0, 3], row[0, -1] = MASK, 2  # a mask to fill, and the end that encoder–decoders pool at
    given = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    accepted = inspect.signature(model.forward).parameters
    return [{name: part for name, part in one.items() if name in accepted} for one in given]


def padding_is_harmless(model: Any, given: list[dict[str, torch.Tensor]], real: list[torch.Tensor]) -> bool:
    """Whether the model's own logits stay the same under padding (ConvBERT's convolutions see it, for one)."""
    if "input_ids" not in given[1]:
        return True
    padded = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in given[1].items()}
    with torch.no_grad():
        logits = model(**padded).logits
    return torch.allclose(logits[:, 3] if logits.dim() == 3 else logits, real[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "task"), classes())
def test_explained_or_refused(kind: str, name: str, task: str) -> None:
    model = build(kind, name)
    given = inputs(model, task)
    with torch.no_grad():
        try:
            real = [model(**one).logits for one in given]
        except Exception as problem:
            pytest.skip(f"does not run on plain inputs: {type(problem).__name__}: {problem}"[:150])
    if task == "mask":
        real = [logits[:, 3] for logits in real]
    try:
        ex = clearhead.load(model)
        together = ex.explain(given, method=["generic", "grad-sam", "cat"])
    except clearhead.Refusal:
        return  # what refusals say is tested where they are made
    for place, one in enumerate(given if padding_is_harmless(model, given, real) else given[:1]):
        alone = ex.explain(one, method=["generic", "grad-sam", "cat"])
        assert abs(alone["generic"].target["value"] - float(real[place].max())) < 1e-5 * float(real[place].abs().max())
        for method, explanation in alone.items():
            assert np.isfinite(explanation.scores).all()
            assert np.abs(explanation.scores).max() > 0
            gap = np.abs(explanation.scores - together[method][place].scores).max()
            assert gap <= 1e-5 * np.abs(explanation.scores).max(), method
