"""Shared code of the training scripts of the known-answer models: options, the training loop, the files of a model."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cards import write_json
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from clearhead.training import (
    ExponentialMovingAverage,
    Muon,
    TrainingBudget,
    build_layerwise_lr_groups,
    save_checkpoint,
    train,
)
from clearhead_zoo.tasks import TaskExample, replace_spans


def make_shared_parser(doc: str | None, name: str, steps: int, lr: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("work", name, "model"), help="folder for the finished model")
    parser.add_argument("--work", type=Path, default=Path("work", name), help="folder for the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work, if there is one")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--steps", type=int, default=steps, help="training steps")
    parser.add_argument("--seconds", type=float, help="training time in seconds, instead of --steps")
    parser.add_argument("--lr", type=float, default=lr, help="peak learning rate")
    parser.add_argument("--count", type=int, default=2000, help="held-out examples to measure on")
    parser.add_argument("--smoke", action="store_true", help="smoke test: a few steps on little data")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    return parser


def build_bert_config(
    options: argparse.Namespace, vocab_size: int, labels: Sequence[str], inner_size: int, max_tokens: int
) -> dict[str, Any]:
    """The configuration of a small BERT classifier; options: its width and depth.

    The texts never repeat, so there is nothing to regularise. The usual initial deviation of 0.02 is meant for wider
    models: a small one would spend most of its steps getting off the ground.
    """
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "dtype": "float16",
        "vocab_size": vocab_size,
        "hidden_size": options.width,
        "intermediate_size": inner_size,
        "num_hidden_layers": options.depth,
        "num_attention_heads": 4,
        "max_position_embeddings": max_tokens,
        "type_vocab_size": 1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "pad_token_id": 0,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def make_training_budget(options: argparse.Namespace) -> TrainingBudget:
    return (
        TrainingBudget(total_seconds=options.seconds) if options.seconds else TrainingBudget(total_steps=options.steps)
    )


def autocast_if_cuda(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def run_training(
    options: argparse.Namespace,
    model: nn.Module,
    budget: TrainingBudget,
    compute_loss: Callable[[], Tensor],
    horizon: int = 200,
    uses_muon: Callable[[str], bool] | None = None,
    weight_decay: float = 0.01,
    check: Callable[[], str] | None = None,
) -> dict[str, Tensor]:
    """Train, and return the averaged weights.

    uses_muon: whether Muon trains the matrix of this name, at ten times the learning rate; AdamW trains all else
    weight_decay: weight decay of those matrices
    check: a description of the quality of the averaged weights so far; called eight times in a run, on training data
    """
    checkpoint = options.work / "checkpoint.safetensors"
    if not options.resume:
        checkpoint.unlink(missing_ok=True)
    inner = [p for name, p in model.named_parameters() if uses_muon is not None and p.ndim == 2 and uses_muon(name)]
    groups = build_layerwise_lr_groups(model.train(), lambda _: 0, options.lr, decay=1.0, weight_decay=0.01)
    for group in groups:
        group["params"] = [p for p in group["params"] if not any(p is other for other in inner)]
    fused = torch.device(options.device).type == "cuda"
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=fused)]
    if inner:
        optimisers.append(Muon(inner, lr=10 * options.lr, weight_decay=weight_decay))
    average = ExponentialMovingAverage(model, horizon)
    due = 0.125

    def step() -> Tensor:
        nonlocal due
        if check is not None and budget.fraction >= due:
            with average.averaged_weights(), torch.no_grad():
                print(f"at {budget.fraction:.0%}: {check()}", flush=True)
            due = budget.fraction + 0.125
        return compute_loss()

    train(
        step,
        optimisers,
        budget,
        average,
        max_grad_norm=1.0,
        report_every=10 if options.smoke else 100,
        checkpoint=checkpoint,
        name="smoke" if options.smoke else "train",
    )
    return average.tensors


def report_target(figures: dict[str, float], minimum: float) -> None:
    """Say so, loudly, if the first figure is not what the zoo asks for; the model is written all the same."""
    name, figure = next(iter(figures.items()))
    print(
        f"{'reached' if figure >= minimum else '!!! TARGET MISSED !!!'}: {name} {figure}, target {minimum}", flush=True
    )


def build_word_tokenizer(
    words: Sequence[str], special: Sequence[str], pattern: str, template: str, lower: bool = False
) -> Tokenizer:
    """One token for each match of the pattern, and special tokens around a text as the template says."""
    number = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(number, unk_token=next(token for token in special if "unk" in token.lower())))
    if lower:
        tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Split(Regex(pattern), "removed", invert=True)
    tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[(token, number[token]) for token in special if token in template]
    )
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_model_files(
    folder: Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    tokenizer: Tokenizer,
    special: dict[str, str],
    max_tokens: int,
) -> None:
    """Weights in half precision, configuration and tokenizer, as transformers opens them."""
    save_checkpoint(folder / "model.safetensors", tensors, dtype=torch.float16)
    write_json(folder / "config.json", config)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_tokens,
            "padding_side": "right",
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )


def iter_chunks(places: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (places[start : start + size] for start in range(0, len(places), size))


def mask_positions(example: TaskExample, positions: Sequence[int], mask: str) -> str:
    """The text with these of its pieces masked."""
    return replace_spans(example.text, [example.spans[position] for position in positions], mask)
