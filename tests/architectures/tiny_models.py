"""Build tiny models of every class of the installed transformers: all size settings of a config become small."""

import copy
import math
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from clearhead.adapters.base import find_adapter_class
from tests.architectures.config_overrides import CONFIG_OVERRIDES

WIDTH, HEADS, VOCAB_SIZE, MASK = 32, 4, 120, 4
#: Models with more weights are not built.
MAX_WEIGHTS = 6_000_000

_WIDTH_KEYS = (
    *("hidden_size", "d_model", "dim", "n_embd", "emb_dim", "embedding_size", "encoder_hidden_size", "embed_dim"),
    *("projection_dim", "out_hidden_size", "word_embed_proj_dim", "text_hidden_size", "projector_hidden_size"),
    *("encoder_hidden_dim", "decoder_hidden_size", "pooler_hidden_size", "cross_attention_hidden_size", "proj_size"),
    *("attention_hidden_size", "lru_width", "pooler_output_size", "output_hidden_size", "image_text_hidden_size"),
    *("encoder_embed_dim", "decoder_embed_dim", "patch_embeds_hidden_size", "hidden_size_global", "hidden_size_1"),
)
_LAYER_KEYS = (
    *("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_blocks"),
    *("num_decoder_layers", "num_encoder_layers", "l_layers", "r_layers", "x_layers", "layers", "depth"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_adapter_layers", "resampler_depth"),
)
_HEAD_KEYS = (
    *("num_attention_heads", "n_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
    *("attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads", "resampler_n_heads"),
)
_INNER_KEYS = (
    *("intermediate_size", "hidden_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim", "d_inner"),
    *("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_dim", "dim_feedforward"),
    *("intermediate_size_mlp", "shared_intermediate_size", "dff", "dim_ff", "moe_shared_expert_intermediate_size"),
    *("projector_intermediate_size", "dense_intermediate_size", "expert_ffn_hidden_size"),
)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

#: Small values for the size settings of a config, under all their names.
SMALL_VALUES: dict[str, Any] = {
    **dict.fromkeys(_WIDTH_KEYS, WIDTH),
    **dict.fromkeys(_LAYER_KEYS, 2),
    **dict.fromkeys(_HEAD_KEYS, HEADS),
    **dict.fromkeys(_INNER_KEYS, 48),
    **dict.fromkeys(_EXPERT_KEYS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "d_head", "dim_head"), WIDTH // HEADS),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 320),
    "qk_head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
    "sliding_window": 4,
    "initializer_range": 0.1,
}
#: A classifier that reads the last token finds it by the padding token, so every config gets one.
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

#: Small values for settings that are None by default.
DEFAULTS_FOR_NONE = {"head_dim": WIDTH // HEADS, "vocab_size": VOCAB_SIZE, "num_key_value_heads": HEADS}
#: Lists with a width per stage: each is divided by eight; and with a depth per stage: one layer each.
STAGE_WIDTH_KEYS = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "encoder_hidden_sizes")
STAGE_DEPTH_KEYS = ("depths", "num_block_repeats", "stage_num_blocks", "stage_numb_of_layers")

#: Heads, with the mapping of transformers that lists their classes. A class may be in several mappings: the first
#: one, which is the most specific, counts.
MAPPING_OF_HEAD = {
    "image–text decoder": "IMAGE_TEXT_TO_TEXT",
    "visual question answering": "VISUAL_QUESTION_ANSWERING",
    "document question answering": "DOCUMENT_QUESTION_ANSWERING",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "next sentence": "NEXT_SENTENCE_PREDICTION",
    "masked LM": "MASKED_LM",
    "causal LM": "CAUSAL_LM",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "image classification": "IMAGE_CLASSIFICATION",
    "object detection": "OBJECT_DETECTION",
    "zero-shot object detection": "ZERO_SHOT_OBJECT_DETECTION",
    "video classification": "VIDEO_CLASSIFICATION",
    "image and text": "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "text encoder": "TEXT_ENCODING",
}


def list_classes() -> list[tuple[str, str]]:
    """List every class with one of these heads once, with its head; and all other classes that have an adapter."""
    heads: dict[str, str] = {}
    for head, mapping in MAPPING_OF_HEAD.items():
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).values():
            heads.setdefault(names if isinstance(names, str) else names[0], head)
    for name in transformers.__all__:
        if find_adapter_class([name]) is not None and not name.startswith(("AutoModel", "DataCollator")):
            heads.setdefault(name, "base model" if name.endswith("Model") else f"`{name}`")
    return sorted(heads.items())


def build(name: str) -> Any:
    """Build a tiny model of a class in float64, with weights so large that attention is not uniform."""
    cls = getattr(transformers, name)
    with torch.device("meta"):
        config = tiny_config(cls)
        weights = sum(parameter.numel() for parameter in cls(config).parameters())
    if weights > MAX_WEIGHTS:
        raise ValueError(f"{weights / 1e6:.0f} million weights are not tiny")
    torch.manual_seed(0)
    model = cls(tiny_config(cls))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[-1] if parameter.dim() < 4 else math.prod(parameter.shape[1:])
                parameter.normal_(std=fan_in**-0.5)
            else:  # biases, and some gates and scales, are zero by default
                parameter += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return model.double().eval()


def tiny_config(cls: Any) -> Any:
    default_config = cls.config_class()
    arguments = make_small_settings(default_config)
    if cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(default_config, "is_decoder"):
        arguments["is_decoder"] = True
    if "QuestionAnswering" in cls.__name__:
        arguments["num_labels"] = 2
    config = cls.config_class(**arguments)
    config._experts_implementation = "eager"  # the other implementations do not support float64
    config.mask_token_id = MASK  # there is no tokenizer to define it
    return config


def make_small_settings(config: Any) -> dict[str, Any]:
    """Return small settings for a config and its sub-configs."""
    overrides = copy.deepcopy(CONFIG_OVERRIDES.get(config.model_type, {}))  # some configs change their arguments
    result: dict[str, Any] = {"num_labels": 3}
    for key, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool) and key in SMALL_VALUES:
            result[key] = SMALL_VALUES[key]
        if value is None and key in DEFAULTS_FOR_NONE:
            result[key] = DEFAULTS_FOR_NONE[key]
        if key in (*STAGE_WIDTH_KEYS, *STAGE_DEPTH_KEYS) and isinstance(value, list | tuple):
            result[key] = [1 if key in STAGE_DEPTH_KEYS else max(8, size // 8) for size in value]
        if key in TOKEN_IDS and not isinstance(value, list):
            result[key] = TOKEN_IDS[key]
        elif isinstance(value, int) and is_token_id_key(key) and value >= VOCAB_SIZE:
            result[key] = VOCAB_SIZE - 1 - len([name for name in result if is_token_id_key(name)])
    if getattr(config, "num_key_value_heads", None) == getattr(config, "num_attention_heads", 0):
        result["num_key_value_heads"] = HEADS
    result |= choose_layer_types(config)
    for sub_config_name in getattr(config, "sub_configs", {}) or {}:
        sub_config = getattr(config, sub_config_name, None)
        if hasattr(sub_config, "to_dict"):
            result[sub_config_name] = {**make_small_settings(sub_config), "model_type": sub_config.model_type}
    merged = {**result, **overrides}
    if isinstance(merged.get("layer_types"), list):
        merged["num_hidden_layers"] = len(merged["layer_types"])
    return {key: value for key, value in merged.items() if value is not None}


def is_token_id_key(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index"))


def choose_layer_types(config: Any) -> dict[str, Any]:
    """Return one layer of each type, for models with several layer types."""
    layer_types = list(dict.fromkeys(config.to_dict().get("layer_types") or ()))
    if not layer_types:
        return {}
    layer_types = (layer_types * 2)[: max(2, len(layer_types))]
    return {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
