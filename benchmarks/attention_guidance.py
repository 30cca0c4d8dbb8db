"""Attention guidance on `zoo:code` → clones: does it move attention to a class, and what is the effect on the task?

    PYTHONPATH=packages/zoo/train python benchmarks/attention_guidance.py --data carry/code --prepare
    PYTHONPATH=packages/zoo/train python benchmarks/attention_guidance.py --data carry/code --out guidance.json

--prepare reads the Java and C# pairs written by code_data.py and stores the class of every token next to them
(tree-sitter, by characters): training needs neither tree-sitter nor the texts. Then the same fine-tuning runs for each
seed, with and without guidance of two of the six heads in every layer to separators, in both functions of a pair.
Reported: accuracy on held-out pairs, and the share of attention on the class by guided and other heads, before and
after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from code_clone import PAIR_FAMILIES, ClonePairSampler, build_config, join_pair_rows
from code_data import PAD_ID, CloneForms, EncodedFunctions, load_arrays, read_clones, save_arrays
from code_model import FunctionRows
from torch.nn import functional as F
from transformers import RobertaConfig, RobertaForSequenceClassification

from clearhead.training import TrainingBudget, compute_warmup_decay, load_checkpoint
from clearhead.training.attention_guidance import (
    HeadGuidance,
    compute_class_attention,
    compute_guidance_loss,
    compute_guidance_weight,
)

GUIDED_CLASS = "separator"
GUIDED_HEADS = (0, 1)
#: So many pairs of functions are read: enough for a comparison, few enough to parse in a minute.
MAX_FUNCTIONS = {"train": 3_000, "valid": 476}


def main() -> None:
    options = parse_options()
    if options.prepare:
        for split in MAX_FUNCTIONS:
            store_token_classes(options.data, split)
        return
    device = torch.device(options.device)
    rows = []
    for seed in range(options.seeds):
        for weight in options.strengths:
            rows.append({"seed": seed, "strength": weight, **fine_tune(options, weight, seed, device)})
            print(json.dumps(rows[-1]), flush=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="output folder of code_data.py")
    parser.add_argument("--base", type=Path, default=Path("packages/zoo/src/clearhead_zoo/models/code"))
    parser.add_argument("--out", type=Path, default=Path("guidance.json"), help="where to write the results")
    parser.add_argument("--prepare", action="store_true", help="parse, store the classes, and stop")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.0, 0.03, 0.3], help="λ at the start")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--count", type=int, default=1000, help="held-out pairs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def store_token_classes(folder: Path, split: str) -> None:
    """The first so many functions in Java and C#, and which of their tokens are of the class."""
    from tokenizers import Tokenizer

    from clearhead.studies.code.syntax import parse_source

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    clones = read_clones(folder, split)
    pairs = int((clones.forms[:, 2] < 0).sum())
    kept = min(MAX_FUNCTIONS[split], pairs)
    rows, member = [], []
    for place in range(kept):
        for form, language in zip(clones.forms[place, :2], ("java", "csharp"), strict=True):
            text = tokenizer.decode(clones.functions[form].tolist(), skip_special_tokens=False)
            found = tokenizer.encode(text, add_special_tokens=False)
            lexemes = [one for one in parse_source(text, language).lexemes if one.token_class == GUIDED_CLASS]
            inside = {at for one in lexemes for at in range(one.start, one.stop)}
            rows.append(found.ids)
            member += [any(at in inside for at in range(*span)) for span in found.offsets]
    forms = np.full((kept, 3), -1, np.int32)
    forms[:, :2] = np.arange(2 * kept).reshape(kept, 2)
    near = np.where(clones.lookalikes[:kept] < kept, clones.lookalikes[:kept], -1)
    functions = EncodedFunctions.from_rows(rows)
    save_arrays(get_guided_path(folder, split), functions, forms=forms, near=near, member=np.array(member, dtype=bool))
    print(f"{split}: {kept} functions, {np.mean(member):.3f} of the tokens are of the class {GUIDED_CLASS}", flush=True)


def get_guided_path(folder: Path, split: str) -> Path:
    return folder / f"{split}-guided.npz.xz"


class GuidedPairs:
    """Pairs with the class of each of their tokens."""

    def __init__(self, folder: Path, split: str, device: torch.device) -> None:
        arrays = load_arrays(get_guided_path(folder, split))
        functions = EncodedFunctions(arrays["ids"], arrays["ends"])
        self.pairs = ClonePairSampler(CloneForms(functions, arrays["forms"], arrays["near"]), device)
        # the same indexing gives ids and membership; special tokens are below the first real id and of no class
        self.class_membership = FunctionRows(
            [EncodedFunctions(arrays["member"].astype(np.uint16) + PAD_ID + 100, arrays["ends"])], device
        )
        self.device = device

    def draw_batch(self, rng: np.random.Generator, count: int) -> tuple[Any, Any, Any]:
        chosen, same = self.pairs.draw(rng, count, PAIR_FAMILIES[0])
        one, other = (torch.from_numpy(chosen[:, side]).to(self.device) for side in range(2))
        inside = join_pair_rows(self.class_membership, one, other) == PAD_ID + 101
        return self.pairs.collate(chosen), inside, torch.from_numpy(same).long().to(self.device)


def fine_tune(options: argparse.Namespace, guidance_weight: float, seed: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = RobertaForSequenceClassification(RobertaConfig(**build_config(options.base)))
    model.set_attn_implementation("eager")  # fused kernels give no attention to guide
    model.load_state_dict(load_checkpoint(options.base / "model.safetensors")[0], strict=False)
    model = model.to(device)
    lessons, held_out = (GuidedPairs(options.data, split, device) for split in MAX_FUNCTIONS)
    before = evaluate(model, held_out, options.count)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
    clock, rng = TrainingBudget(total_steps=options.steps), np.random.default_rng(seed)
    guides = [HeadGuidance("class", GUIDED_HEADS)]
    model.train()
    while clock.fraction < 1:
        ids, inside, same = lessons.draw_batch(rng, options.batch)
        optimiser.param_groups[0]["lr"] = 5e-4 * compute_warmup_decay(clock.fraction)
        out = model(ids, attention_mask=(ids != PAD_ID).long(), output_attentions=True)
        loss = F.cross_entropy(out.logits, same)
        if guidance_weight:
            attention = dict(enumerate(out.attentions))
            loss = loss + compute_guidance_weight(clock.fraction, guidance_weight) * compute_guidance_loss(
                attention, guides, ids != PAD_ID, inside
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        clock.record_step()
    after = evaluate(model, held_out, options.count)
    return {"before": before, "after": after}


@torch.no_grad()
def evaluate(model: Any, pairs: GuidedPairs, count: int) -> dict[str, float]:
    """Accuracy, and the mean share of attention on the class by guided heads and by the others."""
    model.eval()
    rng, right, parts, seen = np.random.default_rng(12345), 0, [], 0
    while seen < count:
        ids, inside, same = pairs.draw_batch(rng, min(100, count - seen))
        out = model(ids, attention_mask=(ids != PAD_ID).long(), output_attentions=True)
        right += int((out.logits.argmax(-1) == same).sum())
        parts.append(torch.stack([compute_class_attention(one, inside, ids != PAD_ID) for one in out.attentions]).cpu())
        seen += len(ids)
    mass = torch.stack(parts).mean((0, 1))
    others = [head for head in range(len(mass)) if head not in GUIDED_HEADS]
    return {
        "accuracy": right / seen,
        "share on the class, guided heads": float(mass[list(GUIDED_HEADS)].mean()),
        "share on the class, other heads": float(mass[others].mean()),
    }


if __name__ == "__main__":
    main()
