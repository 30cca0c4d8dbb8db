"""Train `zoo:two-hop`: a small Llama that follows two pairs of a list, "n5 n8 ; n2 n5 ; n2 ⇒" n8.

    python packages/zoo/train/two_hop.py --out packages/zoo/src/clearhead_zoo/models/two-hop

New lists are generated at each step, and each is queried for several nodes, one hop or two. Questions of one hop are
the curriculum: the second hop repeats the first. As in `recall.py`, word embeddings start with a common component, and
an extra loss, which fades out over the first third of the run, rewards a first layer that identifies the previous word
and a layer before the last that identifies the node after one hop.

In part of the lists, words are masked at a random rate: any words, all but those of the first chain that is asked for,
or also one of these. Where a word of the chain is masked, the answer is "?". So masked inputs are in distribution, and
the model cannot guess the answer from the other words. An interrupted run continues with --resume and the same --work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from cards import write_card
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
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from clearhead.training import TrainingBudget
from clearhead_zoo.tasks import TaskExample, make_generator, replace_spans, two_hop

NUM_QUERIES = 8
MAX_TOKENS = 1 + two_hop.PAIR_LENGTH * two_hop.MAX_PAIRS + two_hop.QUERY_LENGTH * NUM_QUERIES
#: Standard deviation of the initial weights: the usual 0.02 is meant for wider models.
INITIAL_STD = 0.08
#: Probability that words of a list are masked.
MASKING_PROBABILITY = 0.5
MIN_ACCURACY = 0.99


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    config = build_config(options)
    model = make_model(options, config)
    budget = make_training_budget(options)
    tensors = run_training(
        options,
        model,
        budget,
        lambda: compute_loss(options, model, budget),
        uses_muon=lambda name: ".layers." in name,
        check=lambda: evaluate(options, model),
    )
    special = {
        "bos_token": two_hop.BOS_TOKEN,
        "pad_token": two_hop.PAD_TOKEN,
        "unk_token": two_hop.UNKNOWN_TOKEN,
        "mask_token": two_hop.MASK_TOKEN,
    }
    tokenizer = build_word_tokenizer(
        two_hop.build_vocabulary(), two_hop.SPECIAL_TOKENS, r"\S+", f"{two_hop.BOS_TOKEN} $A"
    )
    write_model_files(options.out, tensors, config, tokenizer, special, MAX_TOKENS)
    figures = measure_stored_model(options)
    print(write_card(options.out, build_card_facts(options, budget.step, figures)), flush=True)
    report_target(figures, MIN_ACCURACY)


def parse_options() -> argparse.Namespace:
    parser = make_shared_parser(__doc__, name="two-hop", steps=4000, lr=2e-3)
    parser.add_argument("--batch", type=int, default=512, help="lists per step")
    parser.add_argument("--width", type=int, default=64, help="width of the model")
    parser.add_argument("--depth", type=int, default=3, help="layers")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seconds, options.batch, options.count = 40, None, 16, 48
    return options


def make_model(options: argparse.Namespace, config: dict[str, Any]) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**config))
    words = model.model.embed_tokens.weight
    with torch.no_grad():
        words.add_(words.std() * torch.randn(words.shape[1]))
    return model.to(options.device)


def sample_batch(
    rng: np.random.Generator, num_rows: int, masking_probability: float = MASKING_PROBABILITY
) -> tuple[Tensor, Tensor]:
    """Lists of one length with several questions each, and the columns of the arrows."""
    num_pairs = int(rng.integers(two_hop.MIN_PAIRS, two_hop.MAX_PAIRS + 1))
    num_queries = min(num_pairs, NUM_QUERIES)
    lists = two_hop.sample_lists(rng, num_rows, num_pairs)
    ids = two_hop.encode_lists(lists)
    # sources are in random order, so the first of them are a random choice, but not at random places
    chosen = rng.permuted(np.tile(np.arange(num_pairs), (num_rows, 1)), axis=1)[:, :num_queries]
    queried = np.take_along_axis(lists.sources, chosen, axis=1) + two_hop.FIRST_NODE_ID
    ids = two_hop.encode_lists(lists, sample_masks(rng, ids, queried, masking_probability))
    hops = rng.choice([1, 2], p=[0.3, 0.7], size=queried.shape)
    ids, arrows = two_hop.append_queries(ids, queried, hops)
    return torch.from_numpy(ids), torch.from_numpy(arrows)


def sample_masks(
    rng: np.random.Generator, ids: NDArray[np.int64], queried: NDArray[np.int64], masking_probability: float
) -> NDArray[np.bool_]:
    """Words of lists to mask, in some lists: any, all but the first query's chain, or one word of the chain, too."""
    num_rows, length = len(ids), ids.shape[1] - 1
    middle, first_pair = two_hop.follow_hop(ids, queried[:, :1])
    _, second_pair = two_hop.follow_hop(ids, middle)
    columns = np.arange(length)
    pair_index = columns // two_hop.PAIR_LENGTH
    is_chain = (pair_index == first_pair) | (pair_index == second_pair)
    # a source or a target of the chain; of the first pair, if there is no second
    chosen_pair = np.where((rng.random((num_rows, 1)) < 0.5) & (second_pair >= 0), second_pair, first_pair)
    chosen_word = two_hop.PAIR_LENGTH * chosen_pair + rng.integers(2, size=(num_rows, 1))
    way = rng.random((num_rows, 1)) / masking_probability if masking_probability else np.full((num_rows, 1), np.inf)
    masked = (rng.random((num_rows, length)) < rng.random((num_rows, 1))) & (way < 1)
    masked &= ~(is_chain & (way > 1 / 3))
    return masked | ((columns == chosen_word) & (way > 2 / 3) & (way < 1))


def compute_loss(options: argparse.Namespace, model: LlamaForCausalLM, budget: TrainingBudget) -> Tensor:
    ids, arrows = sample_batch(make_generator(options.seed, "train", budget.step), options.batch)
    ids, arrows = ids.to(options.device, non_blocking=True), arrows.to(options.device, non_blocking=True)
    with autocast_if_cuda(torch.device(options.device)):
        states = model.model(ids[:, :-2], output_hidden_states=True, use_cache=False)
        logits = model.lm_head(states.last_hidden_state[:, arrows]).float()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, arrows + 1].flatten())
    support = max(0.0, 1.0 - 3.0 * budget.fraction)
    return loss + support * compute_scaffold_loss(model, states.hidden_states, ids, arrows) if support else loss


def compute_scaffold_loss(
    model: LlamaForCausalLM, hidden_states: Sequence[Tensor], ids: Tensor, arrows: Tensor
) -> Tensor:
    """After the first layer, targets and arrows should look like the word before them.

    And before the last layer, an arrow should look like the node after one hop.
    """
    words = F.normalize(model.model.embed_tokens.weight.float(), dim=-1)
    first_arrow = int(arrows[0])
    columns = torch.cat([torch.arange(2, first_arrow - 1, two_hop.PAIR_LENGTH, device=ids.device), arrows])
    previous = 16 * F.normalize(hidden_states[1][:, columns].float(), dim=-1) @ words.T
    middle, _ = two_hop.follow_hop(ids[:, : first_arrow - 1].cpu().numpy(), ids[:, arrows - 1].cpu().numpy())
    after_hop = 16 * F.normalize(hidden_states[-2][:, arrows].float(), dim=-1) @ words.T
    return F.cross_entropy(previous.flatten(0, 1), ids[:, columns - 1].flatten()) + F.cross_entropy(
        after_hop.flatten(0, 1), torch.from_numpy(middle).to(ids.device).flatten()
    )


def evaluate(options: argparse.Namespace, model: LlamaForCausalLM) -> str:
    """Accuracy on new lists of the training stream, without and with masked words."""
    figures = []
    for name, masking in (("unmasked", 0.0), ("masked", 1.0)):
        ids, arrows = sample_batch(make_generator(options.seed + 1, "train"), 256, masking)
        ids, arrows = ids.to(options.device), arrows.to(options.device)
        with autocast_if_cuda(torch.device(options.device)):
            guesses = model.lm_head(model.model(ids[:, :-2], use_cache=False).last_hidden_state[:, arrows]).argmax(-1)
        is_correct = (guesses == ids[:, arrows + 1]).float()
        is_answered = ids[:, arrows + 1] != two_hop.UNKNOWN_ANSWER_ID
        for hops, arrow in enumerate(two_hop.ARROW_TOKENS, start=1):
            asked = is_answered & (ids[:, arrows] == two_hop.FIRST_ARROW_ID + hops - 1)
            figures.append(f"{is_correct[asked].mean().item():.4f} {arrow} {name}")
        figures.append(f"{is_correct[~is_answered].mean().item():.4f} ? {name}")
    return ", ".join(figures)


def build_config(options: argparse.Namespace) -> dict[str, Any]:
    answers = two_hop.list_answers()
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": len(two_hop.build_vocabulary()),
        "hidden_size": options.width,
        "intermediate_size": 2 * options.width,
        "num_hidden_layers": options.depth,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": options.width // 4,
        "max_position_embeddings": MAX_TOKENS,
        # long wavelengths leave half of a head's dimensions nearly unturned: nodes match by those
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "initializer_range": INITIAL_STD,
        "tie_word_embeddings": False,
        "bos_token_id": two_hop.BOS_ID,
        "pad_token_id": two_hop.SPECIAL_TOKENS.index(two_hop.PAD_TOKEN),
        "eos_token_id": None,
        "id2label": {str(number): answer for number, answer in enumerate(answers)},
        "label2id": {answer: number for number, answer in enumerate(answers)},
    }


def measure_stored_model(options: argparse.Namespace) -> dict[str, float]:
    """What the stored files do, opened the way a user opens them."""
    torch.set_float32_matmul_precision("highest")
    model = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32).to(options.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.out)
    examples = two_hop.make_examples(options.count, options.seed)
    longest = two_hop.make_examples(options.count // 2, options.seed + 1, pairs=two_hop.MAX_PAIRS)
    rng = make_generator(options.seed + 2, "held-out")

    @torch.no_grad()
    def predict(texts: Sequence[str]) -> list[str]:
        answers: list[str] = []
        for chunk in iter_chunks(range(len(texts)), 250):
            inputs = tokenizer([texts[place] for place in chunk], return_tensors="pt", padding=True).to(options.device)
            last = inputs["attention_mask"].sum(1) - 1
            rows = torch.arange(len(chunk), device=options.device)
            answers += tokenizer.convert_ids_to_tokens(model(**inputs).logits[rows, last].argmax(-1).tolist())
        return answers

    def accuracy(texts: Sequence[str], labels: Sequence[str]) -> float:
        return float(np.mean([guess == label for guess, label in zip(predict(texts), labels, strict=True)]))

    def mask_each(positions: Sequence[Sequence[int]]) -> list[str]:
        return [mask_positions(e, p, two_hop.MASK_TOKEN) for e, p in zip(examples, positions, strict=True)]

    labels = [example.label for example in examples]
    unknown = [two_hop.UNKNOWN_ANSWER] * len(examples)
    one_word_masked = [mask_each([[e.evidence[number]] for e in examples]) for number in range(4)]
    rest = [list_other_positions(example) for example in examples]
    at_random = mask_each([[p for p in range(len(e.spans) - 2) if rng.random() < 0.5] for e in examples])
    changed = [replace_answer(example, rng) for example in examples]
    figures = {
        "accuracy": accuracy([example.text for example in examples], labels),
        f"accuracy, lists of {two_hop.MAX_PAIRS} pairs": accuracy(
            [e.text for e in longest], [e.label for e in longest]
        ),
        "accuracy when the evidence is masked": accuracy(mask_each([e.evidence for e in examples]), labels),
        "says ? when one word of the evidence is masked": float(
            np.mean([accuracy(texts, unknown) for texts in one_word_masked])
        ),
        "accuracy when as many other words are masked": accuracy(
            mask_each([e.sample_control_positions(rng) for e in examples]), labels
        ),
        "accuracy when all but the evidence and the question is masked": accuracy(mask_each(rest), labels),
        "accuracy with each word masked with probability 0.5": accuracy(
            at_random, [two_hop.find_answer(text) for text in at_random]
        ),
        "predicts the new node when the second pair's target is changed": accuracy(*zip(*changed, strict=True)),
    }
    return {name: round(figure, 4) for name, figure in figures.items()}


def list_other_positions(example: TaskExample) -> list[int]:
    """Positions that are neither evidence nor the question."""
    needed = {*example.evidence, *example.question_positions}
    return [position for position in range(len(example.spans)) if position not in needed]


def replace_answer(example: TaskExample, rng: np.random.Generator) -> tuple[str, str]:
    """The text with another node at the end of the chain, and that node."""
    (end,) = (position for position in example.evidence[1::2] if example.words[position] == example.label)
    node = f"n{(int(example.label[1:]) + int(rng.integers(1, two_hop.NUM_NODES))) % two_hop.NUM_NODES}"
    return replace_spans(example.text, [example.spans[end]], node), node


def build_card_facts(options: argparse.Namespace, steps: int, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "two-hop",
        "task": "text-generation",
        "summary": "A small decoder that follows two pairs of a list: “n5 n8 ; n2 n5 ; n2 ⇒” is followed by n8, since "
        "n2 leads to n5 and n5 to n8. The evidence is the sources and targets of both pairs.",
        "architecture": f"Llama, {options.depth} layers of width {options.width}, 4 query heads in 2 groups, RMSNorm, "
        f"rotary positions, {MAX_TOKENS} tokens",
        "labels": two_hop.list_answers(),
        "licence": "Apache-2.0",
        "data": f"generated by clearhead_zoo.tasks.two_hop ({two_hop.NUM_NODES} nodes, lists of {two_hop.MIN_PAIRS} to "
        f"{two_hop.MAX_PAIRS} pairs in random order). Other chains, chains that go on after two hops, and pairs with "
        "the same targets are distractors",
        "command": "python packages/zoo/train/two_hop.py --out packages/zoo/src/clearhead_zoo/models/two-hop "
        f"--seed {options.seed} --steps {steps} --batch {options.batch} --lr {options.lr:g} "
        f"--width {options.width} --depth {options.depth}",
        "figures": figures,
        "measured": f"On {options.count:,} generated held-out lists ({options.count // 2:,} for the longest), loaded "
        "with transformers in float32. The nodes of a chain are three different ones. The model was trained on masked "
        "lists, too, where “?” is the answer if any word of the chain is masked: each of the four words is needed, and "
        "by construction no other word matters. Masked words are replaced by [MASK].",
        "use": "For checking whether an explanation finds both hops of a chain, where only the second one contains the "
        "answer. Not a general language model: its vocabulary is nodes, arrows and separators.",
    }


if __name__ == "__main__":
    main()
