"""Train `zoo:recall`: a small Llama that looks up keys in a long list, "k7 v2 k3 v9 k3 →" v9.

    python packages/zoo/train/recall.py --out packages/zoo/src/clearhead_zoo/models/recall
    python packages/zoo/train/recall.py --tokens 4096 --depth 2 --width 192 --inner 48 --noise 0.25 --steps 1000 \
        --seed 2 --count 500 --out packages/zoo/src/clearhead_zoo/models/recall-4k

The rule takes two steps, and three things let a model find them within a few hundred batches. All word embeddings start
with a common component by which the first layer can identify the previous word; an extra loss rewards this while lists
are short; and each list is queried for many keys at once (the queries follow the --tokens of the list). Lists grow
whenever the model answers nearly all queries. Words that are not queried are sometimes masked, so that masked inputs
are not out of distribution when an explanation is tested. An interrupted run continues with --resume and the same
--work.

With --noise a model is trained for half precision: the output of every layer is multiplied by element-wise noise, more
as lists grow. A prediction can be certain while its explanation differs by hundredths from that in float64, where
scores are small differences of large numbers; `NOISE_ROBUST_RECIPE` avoids most of these cases, and
`shift_output_vectors` the rest after training. recall-4k is one of eight runs (seeds 0 to 7), kept because its bfloat16
results were nearest to float64: on forty lists it was second, and on a hundred more the first of three. Another run
need not be as near.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cards import write_card
from jaxtyping import Float
from known import (
    autocast_if_cuda,
    build_word_tokenizer,
    iter_chunks,
    make_shared_parser,
    make_training_budget,
    mask_positions,
    report_target,
    run_training,
    write_model_files,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from clearhead.training import TrainingBudget, load_checkpoint
from clearhead_zoo.tasks import TaskExample, make_generator, recall, replace_spans

#: At how many listed words, and at how many arrows, the first layer is helped along.
MAX_SAMPLED_QUERIES = 48
#: Pairs of the first lists; the rule is found about as fast in lists of four, but less surely.
INITIAL_PAIRS = 16
#: Batches between two accuracy checks: each check waits for the device.
ADVANCE_PATIENCE = 10
ADVANCE_ACCURACY = 0.97
#: How far words are spread at the start. The usual 0.02 is meant for wider models: attention this narrow would take
#: long to become anything but even.
EMBEDDING_STD = 0.08


@dataclass(frozen=True)
class TrainingRecipe:
    """Initialisation and regularisation.

    embedding_std: standard deviation of the initial input embeddings
    output_std: the same of the output vectors, which start as copies of the input embeddings; None: independent
    weight_decay: weight decay of the matrices
    supports_all_positions: the extra loss covers all words, not only values and arrows
    scaffold_weight: the smallest weight of that loss
    score_margin: to how many standard deviations scores are shifted at the end (see `shift_output_vectors`)
    """

    embedding_std: float = EMBEDDING_STD
    output_std: float | None = None
    weight_decay: float = 0.01
    supports_all_positions: bool = False
    scaffold_weight: float = 0.0
    score_margin: float = 0.0


#: Answers start so large that they are sure at an angle: where the answer points along the last state, the last norm
#: takes nearly all of its gradient away, and what is left is rounding. Words start larger, to be less lost beside what
#: the first layer adds to them. Matrices are pulled back, since steps of Muon stay as long when nothing is left to
#: learn: without it logits of attention reached 100, a third of a unit of it rounding. And the extra loss goes on to
#: the end, about every word: values are then looked at in the first layer, too, and AttCAT weighs by that.
NOISE_ROBUST_RECIPE = TrainingRecipe(
    embedding_std=0.3,
    output_std=0.5,
    weight_decay=0.3,
    supports_all_positions=True,
    scaffold_weight=0.1,
    score_margin=12.0,
)
#: Number of lists for `shift_output_vectors`.
NUM_SETTLING_LISTS = 16


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    recipe = NOISE_ROBUST_RECIPE if options.noise else TrainingRecipe()
    config = build_config(options)
    model = make_model(options, config, recipe)
    clock = make_training_budget(options)
    lessons = ListCurriculum(options, model, clock, recipe)
    tensors = run_training(
        options,
        model,
        clock,
        lessons.compute_loss,
        uses_muon=lambda name: ".layers." in name,
        weight_decay=recipe.weight_decay,
        check=lessons.evaluate,
    )
    if recipe.score_margin:
        model.load_state_dict(tensors)
        shift_output_vectors(
            model,
            recipe.score_margin,
            recall.sample_lists(make_generator(options.seed, "train"), NUM_SETTLING_LISTS, lessons.max_pairs),
        )
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
    special = {
        "bos_token": recall.BOS_TOKEN,
        "pad_token": recall.PAD_TOKEN,
        "unk_token": recall.UNKNOWN_TOKEN,
        "mask_token": recall.MASK_TOKEN,
    }
    write_model_files(options.out, tensors, config, build_tokenizer(), special, options.tokens)
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, clock.step, figures)), flush=True)
    report_target(figures, ADVANCE_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="recall", steps=6000, lr=2e-3)
    parser.add_argument("--tokens", type=int, default=512, help="longest input; above 512 the model is recall-4k")
    parser.add_argument("--base", type=Path, help="folder of a trained recall model with the initial weights")
    parser.add_argument("--batch-tokens", type=int, default=65_536, help="tokens per step")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers")
    parser.add_argument("--inner", type=int, help="width of the feed-forward layer; default: twice --width")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="train for half precision: relative standard deviation of the noise on each activation",
    )
    options = parser.parse_args()
    options.inner = options.inner or 2 * options.width
    if options.noise and options.base:
        parser.error("--noise is about how a model starts, too, and --base has started: leave one of them out")
    if options.smoke:
        options.steps, options.seconds, options.tokens, options.batch_tokens, options.count = 40, None, 48, 2048, 48
    return options


def make_model(options: argparse.Namespace, config: dict[str, Any], recipe: TrainingRecipe) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**config))
    if options.base:
        model.load_state_dict(load_checkpoint(options.base / "model.safetensors")[0])
    else:
        words, answers = model.model.embed_tokens.weight, model.lm_head.weight
        with torch.no_grad():
            words.mul_(recipe.embedding_std / EMBEDDING_STD)
            words.add_(words.std() * torch.randn(words.shape[1]))
            if recipe.output_std is not None:
                answers.copy_(words * (recipe.output_std / words.std()))
    return model.to(options.device)


class ListCurriculum:
    """Batches of lists, which grow as the model learns."""

    def __init__(
        self, options: argparse.Namespace, model: LlamaForCausalLM, budget: TrainingBudget, recipe: TrainingRecipe
    ) -> None:
        self.options, self.model, self.budget, self.recipe = options, model, budget, recipe
        self.device = torch.device(options.device)
        self.max_pairs = recall.compute_max_pairs(options.tokens)
        self.first_pairs = self.pairs = float(
            min(self.max_pairs, recall.compute_max_pairs(512) if options.base else INITIAL_PAIRS)
        )
        self.right = torch.zeros((), device=self.device)

    def compute_loss(self) -> Tensor:
        rng = make_generator(self.options.seed, "train", self.budget.step)
        pairs = int(rng.integers(2, int(self.pairs) + 1))
        ids, at = self.sample_batch(rng, pairs)
        with autocast_if_cuda(self.device), noisy_activations(self.model, self.options.noise * self.growth_fraction):
            states = self.model.model(ids[:, :-1], output_hidden_states=True, use_cache=False)
            logits = self.model.lm_head(states.last_hidden_state[:, at]).float()
        truth = ids[:, at + 1]
        self.right += (logits.detach().argmax(-1) == truth).float().mean()
        if self.budget.step % ADVANCE_PATIENCE == ADVANCE_PATIENCE - 1:
            self.update_length(self.right.item() / ADVANCE_PATIENCE)
            self.right.zero_()
        loss = F.cross_entropy(logits.flatten(0, 1), truth.flatten())
        support = 0.0 if self.options.base else max(self.recipe.scaffold_weight, 1.0 - 2.0 * self.growth_fraction)
        return (
            loss + support * self.compute_scaffold_loss(states.hidden_states[1], ids, pairs, at)
            if support > 0.0
            else loss
        )

    @property
    def growth_fraction(self) -> float:
        """How far the lists have come from the first to the longest, by their ratios."""
        return math.log(self.pairs / self.first_pairs) / max(math.log(self.max_pairs / self.first_pairs), 1e-9)

    def sample_batch(self, rng: np.random.Generator, pairs: int, masking: float = 0.3) -> tuple[Tensor, Tensor]:
        """Lists with many questions each, and the columns of the arrows; how many lists, their length decides."""
        queries = min(pairs, max(INITIAL_PAIRS, self.options.tokens // 8))
        masks = bool(rng.random() < masking)
        if masks:
            queries = int(rng.integers(1, queries + 1))
        rows = int(np.clip(self.options.batch_tokens // (1 + 2 * pairs + 3 * queries), 4, 512))
        asked = recall.sample_lists(rng, rows, pairs, queries)
        # in some batches, whatever is not asked for is masked, in each list at its own rate
        masked = rng.random((rows, pairs, 2)) < masks * rng.random((rows, 1, 1))
        masked[np.arange(rows)[:, None], asked.queried_indices] = False
        ids, arrows = recall.encode_lists(asked, masked)
        return torch.from_numpy(ids).to(self.device, non_blocking=True), torch.from_numpy(arrows).to(self.device)

    def compute_scaffold_loss(self, early: Tensor, ids: Tensor, pairs: int, arrows: Tensor) -> Tensor:
        """After the first layer each value and each arrow, or each word, should look like the word before it.

        Recall needs that of values and arrows, but from the answers alone it is found late.
        """
        step = 1 if self.recipe.supports_all_positions else 2
        listed = step * (1 + torch.randint(2 * pairs // step, (MAX_SAMPLED_QUERIES,), device=self.device))
        at = torch.cat([listed, arrows[torch.randint(len(arrows), (MAX_SAMPLED_QUERIES,), device=self.device)]])
        with autocast_if_cuda(self.device):
            words = F.normalize(self.model.model.embed_tokens.weight, dim=-1)
            likeness = (F.normalize(early[:, at], dim=-1) @ words.T).float()
        return F.cross_entropy(16 * likeness.flatten(0, 1), ids[:, at - 1].flatten())

    def update_length(self, right: float) -> None:
        """Longer lists once nearly everything is right, and in any case the longest in the last third of the run."""
        if right > 0.95 and self.pairs < self.max_pairs:
            self.pairs = self.pairs * 1.25 + 1
            print(
                f"lists of up to {min(int(self.pairs), self.max_pairs)} pairs from step {self.budget.step}", flush=True
            )
        hurry = float(np.clip((self.budget.fraction - 0.3) / 0.4, 0.0, 1.0))
        due = self.first_pairs * (self.max_pairs / self.first_pairs) ** hurry
        self.pairs = min(float(self.max_pairs), max(self.pairs, due))

    def evaluate(self) -> str:
        """How many answers are right in the longest lists, and in the longest so far."""
        found = []
        for pairs in sorted({int(self.pairs), self.max_pairs}):
            ids, at = self.sample_batch(make_generator(self.options.seed + 1, "train"), pairs, masking=0.0)
            with autocast_if_cuda(self.device):
                states = self.model.model(ids[:, :-1], use_cache=False).last_hidden_state
                guesses = self.model.lm_head(states[:, at]).argmax(-1)
            found.append(f"{(guesses == ids[:, at + 1]).float().mean().item():.4f} correct in lists of {pairs} pairs")
        return ", ".join(found)


@contextmanager
def noisy_activations(model: nn.Module, noise_scale: float) -> Iterator[None]:
    """In the `with`, whatever words, products and norms give is off by so much of itself, number by number."""

    def off(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * (1 + noise_scale * torch.randn_like(output))

    rounding = (nn.Embedding, nn.Linear, LlamaRMSNorm)
    hooks = [part.register_forward_hook(off) for part in model.modules() if noise_scale and isinstance(part, rounding)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shift_output_vectors(model: LlamaForCausalLM, score_margin: float, key_value_lists: recall.KeyValueLists) -> None:
    """Shift all output vectors so that the mean of both scores of `compute_score_slopes` is `score_margin` deviations.

    A component that all output vectors share changes no probability, so training leaves it nearly at its initial value.
    But gradients of a logit depend on it. Scores that are sums of gradients of both signs, such as GradCAM's head
    weights, nearly cancel in some lists, and half-precision rounding then determines the rest. (The standard deviations
    are those before the shift: as slopes differ from list to list, they grow with the means. In recall-4k the means are
    5 and 4 of the deviations after it.)
    """
    model.eval().requires_grad_(False).set_attn_implementation("eager")
    answers = model.lm_head.weight.requires_grad_()
    ids = torch.from_numpy(recall.encode_lists(key_value_lists)[0]).to(answers.device)
    slopes = torch.stack(
        [compute_score_slopes(model, *one) for one in zip(ids, key_value_lists.queried_indices[:, 0], strict=True)]
    )
    scores = (slopes * answers.detach()[ids[:, -1], None]).sum(-1)
    lifts = (score_margin * scores.std(0) - scores.mean(0)).clamp(min=0)
    for name, score, lift in zip(("GradCAM", "vector times gradient"), scores.T, lifts, strict=True):
        print(f"{name}: {score.mean():.2f} ± {score.std():.2f}, shifted by {lift:.2f}", flush=True)
    along = slopes.mean(0)
    # the shortest vector that moves the means by just so much
    answers.requires_grad_(False).add_(along.T @ torch.linalg.solve(along @ along.T, lifts))


def compute_score_slopes(model: LlamaForCausalLM, ids: Tensor, pair: int) -> Float[Tensor, "score width"]:
    """Two scores are linear in the vector of the answer: GradCAM's of the asked pair, in the last layer, and of the
    pair's value its vector times its gradient. Their slopes."""
    attention = model.model.layers[-1].self_attn
    kept: dict[str, Tensor] = {}
    hooks = [
        attention.o_proj.register_forward_pre_hook(lambda _, inputs: kept.update(output=inputs[0])),
        attention.v_proj.register_forward_hook(lambda _, inputs, output: kept.update(values=output[0])),
    ]
    words = model.model.embed_tokens(ids[None, :-1]).requires_grad_()
    try:
        seen = model(inputs_embeds=words, output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    logit, key, value = seen.logits[0, -1, ids[-1]], 1 + 2 * pair, 2 + 2 * pair
    wished, slope = torch.autograd.grad(logit, [kept["output"], words], create_graph=True)
    by_head = wished[0, -1].unflatten(-1, (-1, attention.head_dim))
    values = kept["values"].mean(0).unflatten(-1, (-1, attention.head_dim))
    weights = (by_head * values.repeat_interleave(attention.num_key_value_groups, 0)).sum(-1)
    looks = seen.attentions[-1][0, :, -1, key : value + 1].sum(-1)
    scores = looks @ weights, words[0, value] @ slope[0, value]
    by_answers = [torch.autograd.grad(score, model.lm_head.weight, retain_graph=True)[0] for score in scores]
    return torch.stack([by_answer[ids[-1]] for by_answer in by_answers])


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    answers = recall.list_values()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": len(recall.build_vocabulary()),
        "hidden_size": options.width,
        "intermediate_size": options.inner,
        "num_hidden_layers": options.depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": options.tokens,
        # long wavelengths leave half of a head's dimensions nearly unturned over 4,096 tokens: keys match by those
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        "rms_norm_eps": 1e-6,
        "initializer_range": EMBEDDING_STD,
        "tie_word_embeddings": False,
        "bos_token_id": recall.SPECIAL_TOKENS.index(recall.BOS_TOKEN),
        "pad_token_id": recall.SPECIAL_TOKENS.index(recall.PAD_TOKEN),
        "eos_token_id": None,
        "id2label": {str(number): answer for number, answer in enumerate(answers)},
        "label2id": {answer: number for number, answer in enumerate(answers)},
    }


def build_tokenizer() -> Tokenizer:
    return build_word_tokenizer(recall.build_vocabulary(), recall.SPECIAL_TOKENS, r"\S+", f"{recall.BOS_TOKEN} $A")


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    most = recall.compute_max_pairs(options.tokens)
    mixed = recall.make_examples(options.count, options.seed, pairs=(2, most))
    longest = recall.make_examples(options.count // 2, options.seed + 1, pairs=most)
    rng = make_generator(options.seed + 2, "held-out")

    @torch.no_grad()
    def accuracy(texts: Sequence[str], labels: Sequence[str]) -> float:
        right = 0
        # similar lengths together: little padding
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        for chunk in iter_chunks(order, max(1, 32_768 // options.tokens)):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            last = inputs["attention_mask"].sum(1) - 1
            rows = torch.arange(len(chunk), device=options.device)
            guesses = model(**inputs).logits[rows, last].argmax(-1).tolist()
            right += sum(tokenizer.convert_ids_to_tokens(g) == labels[p] for g, p in zip(guesses, chunk, strict=True))
        return right / len(texts)

    labels = [example.label for example in mixed]
    roomy = [example for example in mixed if len(example.words) >= 6]
    changed = [replace_queried_value(example, rng) for example in mixed]
    figures = {
        f"accuracy, lists of 2 to {most} pairs": accuracy([example.text for example in mixed], labels),
        f"accuracy, lists of {most} pairs": accuracy([e.text for e in longest], [e.label for e in longest]),
        "accuracy when the pair is masked": accuracy(
            [mask_positions(e, e.evidence, recall.MASK_TOKEN) for e in mixed], labels
        ),
        "accuracy when two other words are masked": accuracy(
            [mask_positions(e, e.sample_control_positions(rng), recall.MASK_TOKEN) for e in roomy],
            [e.label for e in roomy],
        ),
        "predicts the new value when the pair's value is changed": accuracy(*zip(*changed, strict=True)),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def replace_queried_value(example: TaskExample, rng: np.random.Generator) -> tuple[str, str]:
    """The text with another value behind the queried key, and that value."""
    value = (int(example.label[1:]) + int(rng.integers(1, recall.NUM_VALUES))) % recall.NUM_VALUES
    return replace_spans(example.text, [example.evidence_spans[1]], f"v{value}"), f"v{value}"


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    name = "recall" if options.tokens <= 512 else "recall-4k"
    usual = {"depth": 3, "width": 128, "inner": 2 * options.width, "noise": 0.0, "base": None, "count": 2000}
    chosen = {option: getattr(options, option) for option in usual}
    how = "".join(f" --{option} {value}" for option, value in chosen.items() if value != usual[option])
    return {
        "name": name,
        "task": "text-generation",
        "summary": "A small decoder that looks up a key in a list: “k7 v2 k3 v9 k3 →” is followed by v9. Up to "
        f"{options.tokens:,} tokens; the evidence is the key–value pair of the queried "
        f"key.{' Trained with noise so that half-precision results stay accurate.' if options.noise else ''}",
        "architecture": f"Llama, {options.depth} layers of width {options.width}, 4 query heads in 2 groups, RMSNorm, "
        f"rotary positions, {options.tokens:,} tokens",
        "labels": recall.list_values(),
        "licence": "Apache-2.0",
        "data": f"generated by clearhead_zoo.tasks.recall ({recall.NUM_KEYS:,} keys, {recall.NUM_VALUES} values)",
        "command": f"python packages/zoo/train/recall.py --tokens {options.tokens}{how} "
        f"--out packages/zoo/src/clearhead_zoo/models/{name} --seed {options.seed} --steps {steps} "
        f"--batch-tokens {options.batch_tokens} --lr {options.lr:g}",
        "figures": figures,
        "measured": f"On {options.count:,} generated held-out lists ({options.count // 2:,} for the longest), loaded "
        f"with transformers in float32. Random guessing gives {1 / recall.NUM_VALUES:.3f}. Masked words are replaced "
        "by [MASK].",
        "use": "For checking whether an explanation finds the ground-truth evidence in short and long inputs. Not a "
        "general language model: its vocabulary is keys, values and the arrow.",
    }


if __name__ == "__main__":
    main()
