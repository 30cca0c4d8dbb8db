"""Prepare the data of the three code models `code`, `code-clone` and `code-translate`.

    python packages/zoo/train/code_data.py --data ../shared/data --out carry/code

Python functions come from the standard library of the Python that runs this script, Java and C# functions from
`code/` in the data folder (CodeXGLUE code translation). The script trains one byte-level BPE tokenizer on the training
split and stores token ids: a few MB, which is all that the training machine needs. Python is split by file, Java and C#
use the original split. The `test-*` files are only for measuring finished models.
"""

from __future__ import annotations

import argparse
import ast
import io
import lzma
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cards import write_json
from code_rewrites import Rewriter, parse_plain_function
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BOS_ID, PAD_ID, EOS_ID, UNKNOWN_ID, MASK_ID = range(len(SPECIAL_TOKENS))
VOCAB_SIZE = 5_000
SPLITS = ("train", "valid", "test")
LANGUAGES = ("python", "java", "cs")
#: Functions of fewer tokens say little; longer ones are cut into windows.
MIN_FUNCTION_TOKENS, WINDOW_TOKENS = 12, 254
#: A function and its clone stand in one text of 512 tokens.
MAX_PAIR_HALF_TOKENS = 250
#: A piece never crosses a lexeme: words are cut at capitals, brackets and quotes stand alone, operators together.
PRE_TOKENIZER_PATTERN = (
    r"\r?\n[ \t]*| ?[A-Z]?[a-z]+| ?[A-Z]+(?![a-z])| ?[0-9]+|_+"
    r"| ?[\"'`#@:;,.(){}\[\]]| ?[^\s\w\"'`#@:;,.(){}\[\]]+| +"
)
MAX_FORMS, NUM_LOOKALIKES = 3, 6
#: So many Python functions of a split are rewritten.
NUM_REWRITTEN_FUNCTIONS = 5_000


@dataclass(frozen=True)
class EncodedFunctions:
    """Token ids of functions, end to end."""

    ids: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, place: int) -> np.ndarray:
        start = self.ends[place - 1] if place else 0
        return self.ids[start : self.ends[place]]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> EncodedFunctions:
        joined = np.fromiter((one for row in rows for one in row), dtype=np.uint16)
        return cls(joined, np.cumsum([len(row) for row in rows], dtype=np.int64))


@dataclass(frozen=True)
class CloneForms:
    """Versions of functions: those of one row are equivalent; their near misses look similar but are not equivalent.

    forms: for each function, the indices of up to three versions; the first versions of two functions are of the same
        kind (both Java, both as written …), so that the kind of a version does not reveal the label; −1 is none
    lookalikes: functions that look similar to this one; −1 is none
    """

    functions: EncodedFunctions
    forms: np.ndarray
    lookalikes: np.ndarray


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = {split: read_source_functions(options.data, split, options.smoke) for split in SPLITS}
    tokenizer = train_tokenizer([text for part in texts["train"].values() for text in part])
    write_tokenizer(tokenizer, options.out)
    for split, parts in texts.items():
        for language, written in parts.items():
            rows = encode_texts(tokenizer, written)
            save_arrays(options.out / f"{split}-{language}.npz.xz", functions=EncodedFunctions.from_rows(rows))
            print(f"{split} {language}: {len(rows):,} functions, {sum(map(len, rows)):,} tokens", flush=True)
        clones = build_clones(tokenizer, parts)
        save_arrays(
            options.out / f"{split}-clones.npz.xz", clones.functions, forms=clones.forms, near=clones.lookalikes
        )
        print(f"{split} clones: {len(clones.forms):,} functions in several versions", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with code/")
    parser.add_argument("--out", type=Path, default=Path("carry", "code"), help="folder for the prepared files")
    parser.add_argument("--smoke", action="store_true", help="smoke test: a fiftieth of the functions")
    return parser.parse_args()


# -- functions


def read_source_functions(data: Path, split: str, smoke: bool) -> dict[str, list[str]]:
    """Functions by language; Java and C# line by line in parallel."""
    parts = {"python": list(iter_python_functions(split))}
    for language in LANGUAGES[1:]:
        written = (data / "code" / f"{split}.java-cs.txt.{language}").read_text(encoding="utf-8")
        parts[language] = written.rstrip("\n").split("\n")
    if smoke:
        parts = {language: written[::50] for language, written in parts.items()}
    return parts


def iter_python_functions(split: str) -> Iterator[str]:
    """Functions and methods of the standard library, without their indentation, each once."""
    library = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(library.rglob("*.py")):
        place = path.relative_to(library)
        if "site-packages" in place.parts or assign_split(str(place)) != split:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 keeps a few files of Python 2
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                text = extract_unindented(source, node)
                if text not in seen:
                    seen.add(text)
                    yield text


def assign_split(name: str) -> str:
    """By a checksum of the file's name: of twenty, one decides, one measures."""
    return {7: "valid", 17: "test"}.get(zlib.crc32(name.encode()) % 20, "train")


def extract_unindented(source: str, node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] if not line[: node.col_offset].strip() else line for line in lines)


# -- tokens


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token=SPECIAL_TOKENS[UNKNOWN_ID]))
    tokenizer.pre_tokenizer = Steps(
        [Split(Regex(PRE_TOKENIZER_PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        # as RoBERTa's, <mask> takes in the space before it
        special_tokens=[
            AddedToken(token, lstrip=token == SPECIAL_TOKENS[MASK_ID], special=True) for token in SPECIAL_TOKENS
        ],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    start, end = SPECIAL_TOKENS[BOS_ID], SPECIAL_TOKENS[EOS_ID]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {end}",
        pair=f"{start} $A {end} {end} $B {end}",
        special_tokens=[(start, BOS_ID), (end, EOS_ID)],
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 512,
            "padding_side": "right",
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            **dict(zip(names, SPECIAL_TOKENS, strict=True)),
            "cls_token": SPECIAL_TOKENS[BOS_ID],
            "sep_token": SPECIAL_TOKENS[EOS_ID],
        },
    )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


# -- clones


def build_clones(tokenizer: Tokenizer, parts: dict[str, list[str]]) -> CloneForms:
    """The Java and the C# form of one function; a Python function as it is, renamed and rewritten twice."""
    groups = [[java, cs] for java, cs in zip(parts["java"], parts["cs"], strict=True)]
    pairs = len(groups)
    mutants: dict[int, int] = {}
    chosen = parts["python"][:: 1 + len(parts["python"]) // NUM_REWRITTEN_FUNCTIONS]
    rewriter = Rewriter(chosen, seed=0)
    for text in chosen:
        function = parse_plain_function(text)
        if function is None:
            continue
        groups.append([ast.unparse(function), *(rewriter.rewrite(function) for _ in range(MAX_FORMS - 1))])
        mutant = rewriter.mutate(function)
        if mutant is not None:
            mutants[len(groups) - 1] = len(groups)
            mutants[len(groups)] = len(groups) - 1
            groups.append([ast.unparse(mutant), *(rewriter.rewrite(mutant) for _ in range(MAX_FORMS - 1))])
    rows = [encode_texts(tokenizer, forms) for forms in groups]
    kept = [
        place
        for place, forms in enumerate(rows)
        if all(MIN_FUNCTION_TOKENS <= len(form) <= MAX_PAIR_HALF_TOKENS for form in forms)
    ]
    number = {place: new for new, place in enumerate(kept)}
    known = {number[a]: number[b] for a, b in mutants.items() if a in number and b in number}
    java = sum(place < pairs for place in kept)
    looks = [find_lookalikes([rows[place] for place in part]) for part in (kept[:java], kept[java:])]
    near = np.concatenate([looks[0], np.where(looks[1] < 0, -1, looks[1] + java)])
    for place, other in known.items():
        near[place, NUM_LOOKALIKES // 2 :] = other
    forms = np.full((len(kept), MAX_FORMS), -1, np.int32)
    flat: list[list[int]] = []
    for new, place in enumerate(kept):
        forms[new, : len(rows[place])] = range(len(flat), len(flat) + len(rows[place]))
        flat += rows[place]
    return CloneForms(EncodedFunctions.from_rows(flat), forms, near)


def find_lookalikes(rows: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """For each function, the others that share most of its rarer tokens but are not the same in any form."""
    from scipy.sparse import csr_array

    first = [forms[0] for forms in rows]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in first])])
    places = np.concatenate([np.asarray(row) for row in first])
    count = csr_array((np.ones(len(places)), places, starts), shape=(len(first), VOCAB_SIZE))
    count.sum_duplicates()
    count.data = np.minimum(count.data, 3)
    rarity = np.log((1 + len(first)) / (1 + (count > 0).sum(0)))
    weight = count.multiply(rarity[None, :]).tocsr()
    norm = np.sqrt(weight.multiply(weight).sum(1)) + 1e-9
    weight = weight.multiply(1 / norm[:, None]).tocsr()
    same = [{tuple(form) for form in forms} for forms in rows]
    near = np.full((len(first), NUM_LOOKALIKES), -1, np.int32)
    for start in range(0, len(first), 1000):
        likeness = (weight[start : start + 1000] @ weight.T).toarray()
        best = np.argpartition(-likeness, min(4 * NUM_LOOKALIKES, len(first) - 1), axis=1)[:, : 4 * NUM_LOOKALIKES]
        for row, candidates in enumerate(best):
            ordered = sorted(candidates, key=lambda other: -likeness[row, other])
            others = [other for other in ordered if not same[start + row] & same[other]]
            near[start + row, : len(others[:NUM_LOOKALIKES])] = others[:NUM_LOOKALIKES]
    return near


# -- files


def save_arrays(path: Path, functions: EncodedFunctions, **others: np.ndarray) -> None:
    plainly = io.BytesIO()
    np.savez(plainly, ids=functions.ids, ends=functions.ends, **others)  # type: ignore[arg-type]
    path.write_bytes(lzma.compress(plainly.getvalue(), preset=9))


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: create it with python packages/zoo/train/code_data.py")
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as stored:
        return dict(stored)


def read_functions(folder: Path, split: str, language: str) -> EncodedFunctions:
    arrays = load_arrays(folder / f"{split}-{language}.npz.xz")
    return EncodedFunctions(arrays["ids"], arrays["ends"])


def read_clones(folder: Path, split: str) -> CloneForms:
    arrays = load_arrays(folder / f"{split}-clones.npz.xz")
    return CloneForms(EncodedFunctions(arrays["ids"], arrays["ends"]), arrays["forms"], arrays["near"])


if __name__ == "__main__":
    main()
