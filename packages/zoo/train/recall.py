"""Train `zoo:recall`: a small Llama that looks up keys in a long list, "k7 v2 k3 v9 k3 →" v9.

    python packages/zoo/train/recall.py --out packages/zoo/src/clearhead_zoo/models/recall
    python packages/zoo/train/recall.py --tokens 4096 --base packages/zoo/src/clearhead_zoo/models/recall \\
        --out packages/zoo/src/clearhead_zoo/models/recall-4k

Lists start short and grow whenever the model answers nearly everything, so that it finds the rule before it has to find
a needle. In training each list is asked about several keys; words that are not asked for are sometimes masked, so that
masking is nothing new to the model when an explanation is put to the test. In the first third of the run an extra loss
helps the first layer to tell each value its key. A cut run goes on with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from known import chunks, clock_of, half_precision, hidden, learn, shared_options, word_tokenizer, write_model
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from clearhead.training import Clock, load_checkpoint
from clearhead_zoo.tasks import Example, generator, recall, replaced

MOST_QUERIES = 32
#: The share of the run in which the first layer is helped along.
SUPPORTED = 0.3


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = config_of(options)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(options.device)
    if options.base:
        model.load_state_dict(load_checkpoint(options.base / "model.safetensors")[0])
    clock = clock_of(options)
    tensors = learn(options, model, clock, Lessons(options, model, clock).loss)
    special = {
        "bos_token": recall.BEGIN,
        "pad_token": recall.PAD,
        "unk_token": recall.UNKNOWN,
        "mask_token": recall.MASK,
    }
    write_model(options.out, tensors, config, tokenizer_of(), special, options.tokens)
    print(write_card(options.out, facts_of(options, clock.step, measure(options))), flush=True)


def parse_options() -> argparse.Namespace:
    parser = shared_options(__doc__, name="recall", steps=15_000, lr=2e-3)
    parser.add_argument("--tokens", type=int, default=512, help="longest input; above 512 the model is recall-4k")
    parser.add_argument("--base", type=Path, help="folder of a trained recall to start from")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens a step")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--depth", type=int, default=4, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.tokens, options.batch_tokens, options.count = 40, None, 48, 2048, 48
    return options


class Lessons:
    """Batches of lists, which grow as the model learns."""

    def __init__(self, options: argparse.Namespace, model: LlamaForCausalLM, clock: Clock) -> None:
        self.options, self.model, self.clock = options, model, clock
        self.most = recall.most_pairs(options.tokens)
        self.pairs, self.right, self.since = 4.0, 0.0, 0

    def loss(self) -> Tensor:
        options, device = self.options, torch.device(self.options.device)
        rng = generator(options.seed, "train", self.clock.step)
        pairs = int(rng.integers(2, int(self.pairs) + 1))
        queries = int(np.clip((options.tokens - 1 - 2 * pairs) // 3, 1, min(pairs, MOST_QUERIES)))
        rows = int(np.clip(options.batch_tokens // (1 + 2 * pairs + 3 * queries), 8, 512))
        asked = recall.lists(rng, rows, pairs, queries)
        # in a third of the lists, whatever is not asked for is masked at a random rate
        rate = np.where(rng.random(rows) < 0.3, rng.random(rows), 0.0)
        masked = rng.random((rows, pairs, 2)) < rate[:, None, None]
        masked[np.arange(rows)[:, None], asked.queried] = False
        numbers, arrows = recall.token_ids(asked, masked)
        ids = torch.from_numpy(numbers).to(device, non_blocking=True)
        at = torch.from_numpy(arrows).to(device)
        with half_precision(device):
            states = self.model.model(ids[:, :-1], output_hidden_states=True)
            logits = self.model.lm_head(states.last_hidden_state[:, at]).float()
        truth = ids[:, at + 1]
        self.advance((logits.argmax(-1) == truth).float().mean().item())
        loss = F.cross_entropy(logits.flatten(0, 1), truth.flatten())
        support = max(0.0, 1.0 - self.clock.fraction / SUPPORTED)
        return loss + support * self.scaffold(states.hidden_states[1], ids, pairs, at) if support else loss

    def scaffold(self, early: Tensor, ids: Tensor, pairs: int, arrows: Tensor) -> Tensor:
        """After the first layer each value and each arrow should know the word before it.

        Recall needs that, but from the answers alone it is found late. The key rows of the output serve as the head:
        no answer is ever a key.
        """
        values = 2 + 2 * torch.randint(pairs, (MOST_QUERIES,), device=ids.device)
        at = torch.cat([values, arrows])
        with half_precision(ids.device):
            logits = self.model.lm_head(self.model.model.norm(early[:, at])).float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, at - 1].flatten())

    def advance(self, right: float) -> None:
        """Longer lists once nearly everything is right, and in any case the longest in the last third of the run."""
        self.right, self.since = 0.8 * self.right + 0.2 * right, self.since + 1
        if self.right > 0.95 and self.since >= 15:
            self.pairs, self.since = self.pairs * 1.25 + 1, 0
            if self.pairs < self.most:
                print(f"lists of up to {int(self.pairs)} pairs from step {self.clock.step}", flush=True)
        due = 4.0 * (self.most / 4.0) ** float(np.clip((self.clock.fraction - 0.3) / 0.4, 0.0, 1.0))
        self.pairs = min(float(self.most), max(self.pairs, due))


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    answers = recall.values()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": len(recall.vocabulary()),
        "hidden_size": options.width,
        "intermediate_size": 2 * options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": options.tokens,
        # a long wavelength leaves half of a head's dimensions nearly unturned over 4,096 tokens: keys match by those
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "rms_norm_eps": 1e-6,
        # the usual 0.02 is meant for wider models: attention this narrow would take long to become anything but even
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": recall.SPECIAL.index(recall.BEGIN),
        "pad_token_id": recall.SPECIAL.index(recall.PAD),
        "eos_token_id": None,
        "id2label": {str(number): answer for number, answer in enumerate(answers)},
        "label2id": {answer: number for number, answer in enumerate(answers)},
    }


def tokenizer_of() -> Tokenizer:
    return word_tokenizer(recall.vocabulary(), recall.SPECIAL, r"\S+", f"{recall.BEGIN} $A")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    most = recall.most_pairs(options.tokens)
    mixed = recall.examples(options.count, options.seed, pairs=(2, most))
    longest = recall.examples(options.count // 2, options.seed + 1, pairs=most)
    rng = generator(options.seed + 2, "held-out")

    @torch.no_grad()
    def accuracy(texts: Sequence[str], labels: Sequence[str]) -> float:
        right = 0
        for chunk in chunks(range(len(texts)), max(1, 32_768 // options.tokens)):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            last = inputs["attention_mask"].sum(1) - 1
            rows = torch.arange(len(chunk), device=options.device)
            guesses = model(**inputs).logits[rows, last].argmax(-1).tolist()
            right += sum(tokenizer.convert_ids_to_tokens(g) == labels[p] for g, p in zip(guesses, chunk, strict=True))
        return right / len(texts)

    labels = [example.label for example in mixed]
    roomy = [example for example in mixed if len(example.words) >= 6]
    changed = [other_value(example, rng) for example in mixed]
    figures = {
        f"accuracy, lists of 2 to {most} pairs": accuracy([example.text for example in mixed], labels),
        f"accuracy, lists of {most} pairs": accuracy([e.text for e in longest], [e.label for e in longest]),
        "accuracy when the pair is masked": accuracy([hidden(e, e.evidence, recall.MASK) for e in mixed], labels),
        "accuracy when two other words are masked": accuracy(
            [hidden(e, e.control(rng), recall.MASK) for e in roomy], [e.label for e in roomy]
        ),
        "gives the new value when the pair's value is changed": accuracy(*zip(*changed, strict=True)),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def other_value(example: Example, rng: np.random.Generator) -> tuple[str, str]:
    """The text with another value behind the queried key, and that value."""
    value = (int(example.label[1:]) + int(rng.integers(1, recall.VALUES))) % recall.VALUES
    return replaced(example.text, [example.evidence_spans[1]], f"v{value}"), f"v{value}"


def facts_of(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    name = "recall" if options.tokens <= 512 else "recall-4k"
    base = " --base packages/zoo/src/clearhead_zoo/models/recall" if options.base else ""
    return {
        "name": name,
        "task": "text-generation",
        "summary": "A small decoder that looks up a key in a list: “k7 v2 k3 v9 k3 →” is followed by v9. "
        f"Up to {options.tokens:,} tokens; the evidence is the queried key's pair.",
        "architecture": f"Llama, {options.depth} layers of width {options.width}, 4 query heads in 2 groups, RMSNorm, "
        f"rotary positions, {options.tokens:,} tokens",
        "labels": recall.values(),
        "licence": "Apache-2.0",
        "data": f"generated: clearhead_zoo.tasks.recall ({recall.KEYS:,} keys, {recall.VALUES} values)",
        "command": f"python packages/zoo/train/recall.py --tokens {options.tokens}{base} "
        f"--out packages/zoo/src/clearhead_zoo/models/{name} --seed {options.seed} --steps {steps}",
        "figures": figures,
        "measured": f"On {options.count:,} generated lists of the held-out stream ({options.count // 2:,} for the "
        f"longest), opened with transformers in float32. Guessing gives {1 / recall.VALUES:.3f}. Masked words become "
        "[MASK].",
        "use": "For checking whether an explanation finds what is known to be the reason, in short and long inputs. "
        "Not a language model: it knows keys, values and the arrow, and nothing else.",
    }


if __name__ == "__main__":
    main()
