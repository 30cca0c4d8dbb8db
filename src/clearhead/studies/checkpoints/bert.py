"""BERT as authors save it with torch.save → BertForSequenceClassification, BertForMaskedLM or BertModel."""

import re
from typing import Any

import torch
import transformers

from clearhead.errors import InputError
from clearhead.studies.checkpoints.reader import Converted, Settings, Weights


def convert(weights: Weights, settings: Settings) -> Converted:
    weights.leave_out(r"position_ids$")
    _rename(weights)
    inside = "bert." if any(name.startswith("bert.") for name in weights.tensors) else ""
    words, width = weights.shape(f"{inside}embeddings.word_embeddings.weight")
    heads = settings.head_count(width)
    sizes: dict[str, Any] = {
        "vocab_size": words,
        "hidden_size": width,
        "num_hidden_layers": weights.count(rf"{re.escape(inside)}encoder\.layer\.(\d+)\."),
        "num_attention_heads": heads,
        "intermediate_size": weights.shape(f"{inside}encoder.layer.0.intermediate.dense.weight")[0],
        "max_position_embeddings": weights.shape(f"{inside}embeddings.position_embeddings.weight")[0],
        "type_vocab_size": weights.shape(f"{inside}embeddings.token_type_embeddings.weight")[0],
        "pad_token_id": 0,
    }
    if "classifier.weight" in weights:
        architecture = "BertForSequenceClassification"
        sizes |= settings.named(weights.shape("classifier.weight")[0])
    elif any(name.startswith("cls.predictions.") for name in weights.tensors):
        architecture = "BertForMaskedLM"
        weights.leave_out(r"^cls\.seq_relationship\.|^bert\.pooler\.")
        _leave_out_tied(weights, f"{inside}embeddings.word_embeddings.weight")
    else:
        architecture = "BertModel"
    if settings.labels is not None and architecture != "BertForSequenceClassification":
        raise InputError("labels were given, but the file has no classifier")
    config = transformers.BertConfig(**sizes)
    prefix = "" if inside or architecture == "BertModel" else "bert."
    found = {}
    for name in weights.unused:
        known = re.match(r"(bert\.)?(embeddings|encoder\.layer\.\d+|pooler)\.|classifier\.|cls\.predictions\.", name)
        if known:
            own = "" if name.startswith(("classifier.", "cls.")) else prefix
            new = name.removeprefix("bert.") if architecture == "BertModel" else f"{own}{name}"
            found[new] = weights.take(name)
    return Converted(architecture, config, found, reads_text=True, assumed={"heads": heads})


def _leave_out_tied(weights: Weights, words: str) -> None:
    """The words' table is its own decoder."""
    decoder = weights.tensors.get("cls.predictions.decoder.weight")
    if decoder is not None and not torch.equal(decoder, weights.tensors[words]):
        raise InputError("cls.predictions.decoder.weight is not the table of word embeddings, which it is in BERT")
    weights.leave_out(r"^cls\.predictions\.decoder\.")


def _rename(weights: Weights) -> None:
    """What authors wrap BERT in goes, and TensorFlow's names of a norm's weights become torch's."""
    for prefix in ("model.", "bert_model."):
        weights.without_prefix(prefix)
    while any(name.startswith("bert.bert.") for name in weights.tensors):
        weights.tensors = {name.replace("bert.bert.", "bert.", 1): part for name, part in weights.tensors.items()}
    old = {".gamma": ".weight", ".beta": ".bias"}
    for ending, new in old.items():
        weights.tensors = {
            name.removesuffix(ending) + new if name.endswith(f"LayerNorm{ending}") else name: part
            for name, part in weights.tensors.items()
        }
