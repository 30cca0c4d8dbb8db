"""Every class of the installed transformers, made tiny: whatever a configuration calls its sizes, they become small."""

import copy
import math
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from clearhead.adapters.base import find_adapter_class
from tests.architectures.config_overrides import OWN

WIDTH, HEADS, WORDS, MASK = 32, 4, 120, 4
#: More weights than these are not tiny.
MOST_WEIGHTS = 6_000_000

_WIDE = (
    *("hidden_size", "d_model", "dim", "n_embd", "emb_dim", "embedding_size", "encoder_hidden_size", "embed_dim"),
    *("projection_dim", "out_hidden_size", "word_embed_proj_dim", "text_hidden_size", "projector_hidden_size"),
    *("encoder_hidden_dim", "decoder_hidden_size", "pooler_hidden_size", "cross_attention_hidden_size", "proj_size"),
    *("attention_hidden_size", "lru_width", "pooler_output_size", "output_hidden_size", "image_text_hidden_size"),
    *("encoder_embed_dim", "decoder_embed_dim", "patch_embeds_hidden_size", "hidden_size_global", "hidden_size_1"),
)
_LAYERS = (
    *("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "l_layers", "r_layers", "x_layers", "layers", "depth"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_adapter_layers", "resampler_depth"),
)
_HEADS = (
    *("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads", "resampler_n_heads"),
)
_INNER = (
    *("intermediate_size", "hidden_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "d_inner"),
    *("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "dim_feedforward"),
    *("intermediate_size_mlp", "shared_intermediate_size", "dff", "dim_ff", "moe_shared_expert_intermediate_size"),
    *("projector_intermediate_size", "dense_intermediate_size", "expert_ffn_hidden_size"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

#: Whatever a configuration calls its sizes, they become these.
SMALL: dict[str, Any] = {
    **dict.fromkeys(_WIDE, WIDTH),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "d_head", "dim_head"), WIDTH // HEADS),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 320),
    "qk_head_dim": 16,
    "vocab_size": WORDS,
    "vocab_size_per_layer_input": WORDS,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "sliding_window": 4,
    "initializer_range": 0.1,
}
#: A classifier that reads the last token finds it by the padding, whether or not its configuration names one.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: These are small numbers even where a configuration leaves them open.
OPEN = {"head_dim": WIDTH // HEADS, "vocab_size": WORDS, "num_key_value_heads": HEADS}
#: Lists of widths, one for each stage: an eighth of each; and of depths: one layer a stage.
WIDTHS = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "encoder_hidden_sizes")
DEPTHS = ("depths", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers")

#: Heads, and the mapping of transformers that lists the classes which have them. A class may be in several: the first
#: is the one that says most about it.
HEADS_OF = {
    "image–text decoder": "IMAGE_TEXT_TO_TEXT",
    "visual question answering": "VISUAL_QUESTION_ANSWERING",
    "document question answering": "DOCUMENT_QUESTION_ANSWERING",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "text to text": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "next sentence": "NEXT_SENTENCE_PREDICTION",
    "masked words": "MASKED_LM",
    "next word": "CAUSAL_LM",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "image classification": "IMAGE_CLASSIFICATION",
    "object detection": "OBJECT_DETECTION",
    "object detection by text": "ZERO_SHOT_OBJECT_DETECTION",
    "video classification": "VIDEO_CLASSIFICATION",
    "image and text": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "text encoder": "TEXT_ENCODING",
}


def classes() -> list[tuple[str, str]]:
    """Every class that has one of these heads, once, with its head; and whatever else a subject stands for."""
    found: dict[str, str] = {}
    for head, mapping in HEADS_OF.items():
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).values():
            found.setdefault(names if isinstance(names, str) else names[0], head)
    for name in transformers.__all__:
        if find_adapter_class([name]) is not None and not name.startswith(("AutoModel", "DataCollator")):
            found.setdefault(name, "bare model" if name.endswith("Model") else f"`{name}`")
    return sorted(found.items())


def build(name: str) -> Any:
    """A class of transformers, tiny, in float64, far from uniform attention."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        config = tiny_config(cls)
        weights = sum(part.numel() for part in cls(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights / 1e6:.0f} million weights are not tiny")
    torch.manual_seed(0)
    model = cls(tiny_config(cls))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[-1] if parameter.dim() < 4 else math.prod(parameter.shape[1:])
                parameter.normal_(std=fan_in**-0.5)
            else:  # biases are born zero, and some gates and scales, too
                parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return model.double().eval()


def tiny_config(cls: Any) -> Any:
    plain = cls.config_class()
    given = settings(plain)
    if cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(plain, "is_decoder"):
        given["is_decoder"] = True
    if "QuestionAnswering" in cls.__name__:
        given["num_labels"] = 2
    config = cls.config_class(**given)
    config._experts_implementation = "eager"  # the others do not know float64
    config.mask_token_id = MASK  # there is no tokenizer that could say it
    return config


def settings(config: Any) -> dict[str, Any]:
    """Small numbers for what a configuration has, its parts included."""
    own = copy.deepcopy(OWN.get(config.model_type, {}))  # some configurations change what they are given
    found: dict[str, Any] = {"num_labels": 3}
    for key, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key in SMALL:
            found[key] = SMALL[key]
        if value is None and key in OPEN:
            found[key] = OPEN[key]
        if key in (*WIDTHS, *DEPTHS) and isinstance(value, list | tuple):
            found[key] = [1 if key in DEPTHS else max(8, size // 8) for size in value]
        if key in TOKENS and not isinstance(value, list):
            found[key] = TOKENS[key]
        elif isinstance(value, int) and _names_token(key) and value >= WORDS:
            found[key] = WORDS - 1 - len([one for one in found if _names_token(one)])
    if getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", 0):
        found["num_key_value_heads"] = HEADS
    found |= _layer_kinds(config)
    for part in getattr(config, "sub_configs", {}) or {}:
        inner = getattr(config, part, None)
        if hasattr(inner, "to_dict"):
            found[part] = {**settings(inner), "model_type": inner.model_type}
    whole = {**found, **own}
    if isinstance(whole.get("layer_types"), list):
        whole["num_hidden_layers"] = len(whole["layer_types"])
    return {key: value for key, value in whole.items() if value is not None}


def _names_token(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index"))


def _layer_kinds(config: Any) -> dict[str, Any]:
    """One layer of each kind, where layers are of several kinds."""
    kinds = list(dict.fromkeys(config.to_dict().get("layer_types") or ()))
    if not kinds:
        return {}
    kinds = (kinds * 2)[: max(2, len(kinds))]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}
