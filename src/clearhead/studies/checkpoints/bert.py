"""Convert BERT state dicts to BertForSequenceClassification, BertForMaskedLM or BertModel."""

import re
from typing import Any

import torch
import transformers

from clearhead.errors import InputError
from clearhead.studies.checkpoints.reader import CheckpointTensors, ConversionSettings, ConvertedModel

_BERT_NAME_PATTERN = re.compile(r"(bert\.)?(embeddings|encoder\.layer\.\d+|pooler)\.|classifier\.|cls\.predictions\.")


def convert_bert(weights: CheckpointTensors, settings: ConversionSettings) -> ConvertedModel:
    """Convert BERT with a classifier, with a masked-language-model head, or without a head."""
    weights.skip(r"position_ids$")
    _normalise_names(weights)
    source_prefix = "bert." if any(name.startswith("bert.") for name in weights.tensors) else ""
    vocab_size, width = weights.get_shape(f"{source_prefix}embeddings.word_embeddings.weight")
    heads = settings.get_num_heads(width)
    config_options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": weights.count_layers(rf"{re.escape(source_prefix)}encoder\.layer\.(\d+)\."),
        "num_attention_heads": heads,
        "intermediate_size": weights.get_shape(f"{source_prefix}encoder.layer.0.intermediate.dense.weight")[0],
        "max_position_embeddings": weights.get_shape(f"{source_prefix}embeddings.position_embeddings.weight")[0],
        "type_vocab_size": weights.get_shape(f"{source_prefix}embeddings.token_type_embeddings.weight")[0],
        "pad_token_id": 0,
    }
    if "classifier.weight" in weights:
        architecture = "BertForSequenceClassification"
        config_options |= settings.build_label_config(weights.get_shape("classifier.weight")[0])
    elif any(name.startswith("cls.predictions.") for name in weights.tensors):
        architecture = "BertForMaskedLM"
        weights.skip(r"^cls\.seq_relationship\.|^bert\.pooler\.")
        _skip_tied_decoder(weights, f"{source_prefix}embeddings.word_embeddings.weight")
    else:
        architecture = "BertModel"
    if settings.class_names is not None and architecture != "BertForSequenceClassification":
        raise InputError("class names were given, but the file has no classifier")
    config = transformers.BertConfig(**config_options)
    tensors = {}
    for name in weights.remaining_names:
        if not _BERT_NAME_PATTERN.match(name):
            continue
        if architecture == "BertModel":
            new_name = name.removeprefix("bert.")
        elif source_prefix or name.startswith(("classifier.", "cls.")):
            new_name = name
        else:
            new_name = f"bert.{name}"
        tensors[new_name] = weights.pop(name)
    return ConvertedModel(architecture, config, tensors, reads_text=True, assumptions={"num_heads": heads})


def _skip_tied_decoder(weights: CheckpointTensors, embedding_name: str) -> None:
    """Skip the decoder, which is tied to the word embeddings."""
    decoder = weights.tensors.get("cls.predictions.decoder.weight")
    if decoder is not None and not torch.equal(decoder, weights.tensors[embedding_name]):
        raise InputError("cls.predictions.decoder.weight differs from the word embeddings, to which BERT ties it")
    weights.skip(r"^cls\.predictions\.decoder\.")


def _normalise_names(weights: CheckpointTensors) -> None:
    """Remove prefixes of wrapper modules, and rename gamma and beta of TensorFlow's LayerNorm."""
    for prefix in ("model.", "bert_model."):
        weights.strip_prefixes(prefix)
    while any(name.startswith("bert.bert.") for name in weights.tensors):
        weights.tensors = {name.replace("bert.bert.", "bert.", 1): tensor for name, tensor in weights.tensors.items()}
    weights.tensors = {
        re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)): tensor
        for name, tensor in weights.tensors.items()
    }
