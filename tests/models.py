"""Tiny models and tokenizers of every architecture, built from configs; nothing is downloaded."""

import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

import clearhead

CORPUS = [
    "I like the movie, it is a wonderful and moving film.",
    "She hates the book because it is boring and far too long.",
    "This is so boring! You look extremely confused.",
    "I cannot wait for next time; he said the doctor asked her about it.",
    "Don't panic. The well-known author isn't here, is she?",
    "naïve café — déjà vu 😀 once, twice.",
]
TEXTS = ["I like the movie.", "She hates the book because it isn't good", "So boring!"]
MASKED_TEXTS = ["I like the {mask}.", "She {mask} the book because it isn't good", "So {mask}!"]
PAIR = ("I like the movie.", "She hates the book")
# Fixed vocabularies: the trainers of these two kinds break ties differently in each process.
_WORDPIECES = (
    "the is it he she and an be book boring mov look you so for her here isn like too don on fi fa ha kno li lon ne "
    "nai ca canno con ext au as ab wel won wai tw ti th pa sai de do vu ##he ##or ##on ##oo ##in ##ai ##ing ##ie ##tes "
    "##ca ##use ##ook ##no ##xt ##re ##me ##mel ##ly ##ful ##der ##wn ##ce ##ct ##nic ##ed"
)
_UNIGRAMS = (
    "he ▁is on or ▁it ▁f ▁w ▁s nd ng ▁t ▁a ext ▁Th ▁movi ▁boring ▁her ▁lo use ▁ca me ic no ke ai ce ut an fu is bo ca "
    "▁b el ou re er th ▁n ▁c ▁bo ▁h oo ▁l ▁he au it ed ▁the ▁and"
)


@cache
def tokenizer(kind: str) -> Any:
    """Build a small tokenizer: "wordpiece" (BERT), "bytes" (RoBERTa, GPT-2) or "unigram" (SentencePiece)."""
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        normal = normalizers.BertNormalizer(lowercase=True)
        signs = sorted(set(normal.normalize_str("".join(CORPUS))) - {" "})
        pieces = [*special, *signs, *(f"##{sign}" for sign in signs), *_WORDPIECES.split()]
        backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
        backend.normalizer = normal
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
    elif kind == "bytes":
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(CORPUS * 3, trainer)
    else:
        special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
        signs = sorted(set(unicodedata.normalize("NFKC", "".join(CORPUS))) - {" "})
        pieces = [(piece, -4.0) for piece in _UNIGRAMS.split()] + [(sign, -6.0) for sign in ["▁", *signs]]
        backend = Tokenizer(models.Unigram([*((name, 0.0) for name in special), *pieces], unk_id=1))
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    names = {name.strip("[]<>").lower(): name for name in special}
    first, last = names.get("cls", names.get("s")), names.get("sep", names.get("/s"))
    ids = [(token, backend.token_to_id(token)) for token in (first, last)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=ids
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=names["pad"],
        unk_token=names["unk"],
        mask_token=names["mask"],
        cls_token=first,
        sep_token=last,
        model_max_length=64,
    )


def on_interface(name: str) -> bool:
    """Return whether this version of transformers runs the architecture through its attention interface.

    The source is searched, because importing it would slow down every test collection by seconds.
    """
    source = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    return "ALL_ATTENTION_FUNCTIONS" in source.read_text()


#: Architectures that transformers 5.0 does not support fully; later versions do.
NOT_YET = {
    name: reason
    for name, reason in {
        "beit": "this transformers' BEiT cannot be switched to eager attention once it is built",
        "modernbert": "this transformers' ModernBERT gives NaN to padded batches in float64",
        "t5": "this transformers' T5 does not use the attention interface, and adds position biases in place",
        "swin": "this transformers' Swin does not say what each of its layers attends to",
    }.items()
    if not on_interface(name)
}


def skip_if_not_yet(name: str) -> None:
    if name in NOT_YET:
        pytest.skip(NOT_YET[name])


_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "initializer_range": 0.3,  # so that attention is not uniform
    "num_labels": 3,
}
_IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
    "initializer_range": 0.3,
}
#: Architecture, tokenizer and configuration of each text model.
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "wordpiece", {}),
    "roberta": ("Roberta", "bytes", {}),
    "distilbert": ("DistilBert", "wordpiece", {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}),
    "albert": ("Albert", "unigram", {"embedding_size": 16}),
    "electra": ("Electra", "wordpiece", {"embedding_size": 16}),
    "modernbert": ("ModernBert", "bytes", {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "deberta": ("DebertaV2", "unigram", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
}
#: Class and configuration of each image model.
IMAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {"intermediate_size": 48}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {"intermediate_size": 48}),
    "deit-distilled": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", {"intermediate_size": 48}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {}),
    "dinov2-registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", {}),
    "beit": ("BeitForImageClassification", "BeitConfig", {"intermediate_size": 48, "use_relative_position_bias": True}),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
    ),
}


def _fresh(cls: Callable[[Any], nn.Module], config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(7)
    return cls(config).to(dtype).eval()


def text_model(
    name: str, head: str = "ForSequenceClassification", dtype: torch.dtype = torch.float64, **more: Any
) -> Any:
    """Build a tiny text model with its tokenizer."""
    skip_if_not_yet(name)
    architecture, kind, settings = TEXT[name]
    tok = tokenizer(kind)
    ids = {f"{k}_token_id": getattr(tok, f"{k}_token_id") for k in ("pad", "cls", "sep")}
    ids |= {"bos_token_id": tok.cls_token_id, "eos_token_id": tok.sep_token_id}
    config = getattr(transformers, f"{architecture}Config")(
        **{**_TEXT, **settings, **ids, "vocab_size": len(tok), **more}
    )
    return _fresh(getattr(transformers, f"{architecture}{head}"), config, dtype), tok


def image_model(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Build a tiny image classifier with a processor for its image size."""
    skip_if_not_yet(name)
    cls, config_cls, overrides = IMAGE[name]
    if config_cls.startswith("Dinov2"):
        overrides = {**overrides, "mlp_ratio": 2}
    settings = {**_IMAGE, **overrides, **more}
    if name == "swin":
        for unused in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            settings.pop(unused)
    config = getattr(transformers, config_cls)(**settings)
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    processor = transformers.ViTImageProcessor(size={"height": height, "width": width})
    return _fresh(getattr(transformers, cls), config, dtype), processor


#: All models of the invariant tests.
SUBJECTS = (
    *(f"{name}/classify" for name in TEXT if name not in NOT_YET),
    *(f"{name}/mask" for name in TEXT if name not in NOT_YET),
    *(f"{name}/image" for name in IMAGE if name not in NOT_YET),
)


def explainer(subject: str, dtype: torch.dtype = torch.float64, **more: Any) -> "clearhead.Explainer":
    """Build a new explainer for one of `SUBJECTS`."""
    name, task = subject.split("/")
    if task == "image":
        return clearhead.load(image_model(name, dtype, **more))
    head = "ForSequenceClassification" if task == "classify" else "ForMaskedLM"
    return clearhead.load(text_model(name, head, dtype, **more))


def inputs(subject: str) -> list[Any]:
    """Return three inputs: texts of different lengths, or different images."""
    name, task = subject.split("/")
    if task == "image":
        generator = torch.Generator().manual_seed(3)
        return [(torch.rand(20, 20, 3, generator=generator) * 255).to(torch.uint8).numpy() for _ in range(3)]
    if task == "mask":
        mask = tokenizer(TEXT[name][1]).mask_token
        return [text.format(mask=mask) for text in MASKED_TEXTS]
    return list(TEXTS)
