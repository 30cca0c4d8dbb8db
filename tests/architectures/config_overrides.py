"""Settings by model type that are needed besides small sizes: consistent sizes, and layers of every kind."""

from typing import Any

_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}


def _backbone(model_type: str, *stages: int) -> dict[str, Any]:
    """A small convolutional network instead of one that needs timm."""
    return {"model_type": model_type, **_RESNET, "out_features": [f"stage{stage}" for stage in stages]}


_DETR = {
    **{"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_queries": 5},
    "backbone_config": _backbone("resnet", 1, 2, 3, 4),
    **{
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
    },  # the mask head normalises width + heads in groups of eight
}
_RT_DETR = {
    **{"encoder_in_channels": [16, 16, 16], "encoder_layers": 1, "decoder_in_channels": [32, 32, 32]},
    **{"decoder_n_points": 2, "num_denoising": 0, "num_queries": 5, "feat_strides": [8, 16, 32]},
    "backbone_config": _backbone("rt_detr_resnet", 2, 3, 4),
}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4, "hidden_size": None}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_WAVEFORM = {
    **{"conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16},
}


def _rope(*sections: int) -> dict[str, Any]:
    """The rotary sections of several axes share the width of a head."""
    return {"rope_parameters": {"rope_type": "default", "mrope_section": list(sections), "rope_theta": 10000.0}}


_BOTH_ROPES = {
    model_type: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    for model_type in ("sliding_attention", "full_attention")
}

_CODES = {"base_channels": 32, "channel_multiplier": [1, 1], "embed_dim": 8, "num_embeddings": 20, "latent_channels": 8}

CONFIG_OVERRIDES: dict[str, dict[str, Any]] = {
    # one layer of every kind in two to four layers
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "zamba": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_dt_rank": 4},
        **{"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4},
    },
    "zamba2": {
        **{"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "mamba_headdim": 8},
        **{"attention_hidden_size": 64, "attention_head_dim": 16, "hybrid_layer_ids": None, "chunk_size": 8},
        **{"mamba_d_state": 8, "kv_channels": None, "num_query_groups": None},
    },
    "mamba2": {"num_heads": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8, "head_dim": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1},
    "zaya": {"num_experts_per_tok": 1},
    # full attention instead of block-sparse attention, which is not supported
    **{model_type: {"attention_type": "original_full"} for model_type in ("big_bird", "bigbird_pegasus")},
    # the attention implementation is fixed when the model is built
    "data2vec-vision": {"attn_implementation": "eager", "use_relative_position_bias": True},
    # consistent sizes
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "bit": {"num_groups": 4},
    "bridgetower": {"hidden_size": 64, "contrastive_hidden_size": 8, "logit_scale_init_value": 1.0},
    "bridgetower_text_model": {"hidden_size": 64, "num_hidden_layers": 3},
    "bridgetower_vision_model": {"hidden_size": 64, "num_hidden_layers": 3},
    **{model_type: {"vocabulary_map": {"<image>": 5}, "vq_config": _CODES} for model_type in ("chameleon", "emu3")},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _BOTH_ROPES,
    },
    "dbrx": {
        **{"max_seq_len": 64, "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **{model_type: {"start_n_top": 2, "end_n_top": 2} for model_type in ("xlm", "flaubert")},
    "gemma3n_text": {
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "laurel_rank": 4},
        **{"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 8},
    },
    "neomme": {
        **{"embedding_rank": 16, "per_layer_config": {}},
        "rope_parameters": _BOTH_ROPES,
    },
    "bros": {"dim_bbox_sinusoid_emb_2d": None, "dim_bbox_sinusoid_emb_1d": None, "dim_bbox_projection": None},
    "codegen": {"rotary_dim": 4},
    "convbert": {"embedding_size": 32},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gptj": {"rotary_dim": 4},
    **{
        model_type: {"coordinate_size": 6, "shape_size": 4, "input_size": 32}
        for model_type in ("layoutlmv2", "layoutlmv3")
    },
    "lilt": {"hidden_size": 48, "head_dim": 12},
    "luke": {"entity_vocab_size": 50, "entity_emb_size": 16},
    "longformer": {"attention_window": 4, "sep_token_id": 3},
    "led": {"attention_window": 4},
    "markuplm": {
        "max_xpath_tag_unit_embeddings": 20,
        "max_xpath_subs_unit_embeddings": 20,
        "xpath_unit_hidden_size": 8,
        **{"tag_pad_id": 18, "subs_pad_id": 18},
    },
    "mistral4": {"qk_rope_head_dim": 8, "head_dim": None},
    "musicgen_decoder": {"num_codebooks": 1},
    "perceiver": {
        **{"num_latents": 8, "d_latents": 16, "num_self_attends_per_block": 2, "num_self_attention_heads": 2},
        **{"num_cross_attention_heads": 2},
    },
    "reformer": {
        **{"axial_pos_shape": [4, 16], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"]},
        **{"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "attention_head_size": 8, "num_buckets": 2},
    },
    "roc_bert": {
        "pronunciation_vocab_size": 50,
        "shape_vocab_size": 50,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "vit_mae": {"mask_ratio": 0.0},
    "xmod": {"default_language": "en_XX"},
    # images
    "beit": {"use_relative_position_bias": True},
    "cvt": {"embed_dim": [16, 16, 32], "num_heads": [1, 2, 2], "depth": [1, 2, 3]},
    "hiera": {"embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4], "image_size": [64, 64]},
    "levit": {
        **{"hidden_sizes": [16, 32, 48], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8]},
        **{
            "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 4, 4, 2, 2]],
            "image_size": 64,
            "patch_size": 16,
        },
    },
    "mobilevit": {"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 32, 32]},
    **{model_type: {"image_size": 64, "patch_size": 4} for model_type in ("convnext", "convnextv2")},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 64},
    "vilt": {"num_images": 2},
    "mobilevitv2": {"image_size": 64, "patch_size": 2, "base_attn_unit_dims": [16, 16, 16], "n_attn_blocks": [1, 1, 1]},
    "pvt": {"image_size": 64, "hidden_sizes": [8, 16, 20, 32], "depths": [1, 1, 1, 1]},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), _SWIN),
    # detectors
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), _DETR),
    "deformable_detr": {**_DETR, "backbone_config": _backbone("resnet", 2, 3, 4), "num_feature_levels": 3},
    **dict.fromkeys(("rt_detr", "rt_detr_v2", "d_fine", "deimv2"), _RT_DETR),
    "pp_doclayout_v4": _RT_DETR,
    "lw_detr": {"num_queries": 5, "group_detr": 1, "projector_scale_factors": [1.0]},
    "lw_detr_vit": {
        **{"image_size": 64, "num_windows": 4, "window_block_indices": [0], "out_features": ["stage1", "stage2"]},
    },
    "yolos": {"image_size": [32, 48], "num_detection_tokens": 5},
    # audio
    **dict.fromkeys(
        ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "sew", "sew-d", "wav2vec2-conformer"), _WAVEFORM
    ),
    "data2vec-audio": {**_WAVEFORM, "conv_pos_kernel_size": 3},
    "speecht5": _WAVEFORM,
    "whisper": {"max_source_positions": 24},  # all inputs have this length, and `flow` is slow per unit
    "audio-spectrogram-transformer": {"max_length": 40, "num_mel_bins": 24, "patch_size": 8},
    "clap_audio_model": {
        **{"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "patch_size": 4, "patch_stride": [4, 4]},
        **{"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2, "patch_embeds_hidden_size": 16},
    },
    # images in texts
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"), _rope(1, 1, 2)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "paddleocr_vl_text"), _rope(2, 1, 1)),
    "qwen2_5_vl_vision": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl_vision": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_vision": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "gemma3": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    # encoder–decoders
    "t5": {"decoder_start_token_id": 0},
}
