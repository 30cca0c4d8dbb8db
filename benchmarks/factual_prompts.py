"""Does a method rank the deciding word of a factual prompt among the top two? `factual_prompts.json`, any decoder.

    python benchmarks/factual_prompts.py --model FOLDER_OR_GGUF [--methods ensemble,generic] [--json FILE]

For each prompt, the first token of the answer is explained; the scores of subword tokens are added up to words. A
prompt counts if the deciding word has one of the two highest scores. Printed for each method: the number of prompts
that count, overall and where the model itself predicts the answer, with a 95 % interval, and the drop of the answer's
log-probability when the highest word is removed.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch

import clearhead
from clearhead.stats import RATE_BOUNDS, compute_mean_interval

PROMPTS_PATH = Path(__file__).with_suffix(".json")
DEFAULT_METHODS = "ensemble,generic,saliency,deeplift,attn-lrp,integrated-gradients,rollout,occlusion,position,random"


def load_decoder(name: str) -> clearhead.Explainer:
    """Load a decoder; a GGUF file through transformers, which needs the package gguf."""
    if not name.endswith(".gguf"):
        return clearhead.load(name)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = os.path.split(name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return clearhead.load((model, AutoTokenizer.from_pretrained(folder, gguf_file=file)))


def compute_log_probability(explainer: clearhead.Explainer, text: str, answer: str) -> float:
    """Return the log-probability of the first token of an answer after a text."""
    tokenizer, model = explainer.adapter.processor, explainer.adapter.model
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    answer_id = tokenizer(answer, add_special_tokens=False)["input_ids"][0]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, -1].float()
    return float(logits.log_softmax(-1)[answer_id])


def measure_prompt(explainer: clearhead.Explainer, prompt: dict[str, str], method: str) -> dict[str, Any]:
    """Explain one answer, and say whether the deciding word is among the top two."""
    e = explainer.explain(prompt["text"], method, answer=prompt["answer"], target=clearhead.GeneratedToken(0)).words()
    words = [name.strip() for name in e.tokens]
    order = np.argsort(-e.scores, kind="stable")
    order = [i for i in order if not e.units.special[i]]
    removed = " ".join(word for i, word in enumerate(words) if i != order[0] and not e.units.special[i])
    answer = prompt["answer"]
    drop = compute_log_probability(explainer, prompt["text"], answer) - compute_log_probability(
        explainer, removed, answer
    )
    return {
        "method": method,
        "text": prompt["text"],
        "top": [words[i] for i in order[:2]],
        "is_among_top_two": prompt["deciding"] in [words[i] for i in order[:2]],
        "is_predicted": str(e.prediction.get("label", "")).strip() == answer.strip(),
        "log_probability_drop": drop,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or hub name of a decoder")
    parser.add_argument("--methods", default=DEFAULT_METHODS, help="methods, separated by commas")
    parser.add_argument("--json", type=Path, help="output file for the results of every prompt")
    options = parser.parse_args()
    explainer = load_decoder(options.model)
    prompts = json.loads(PROMPTS_PATH.read_text("utf-8"))["prompts"]
    rows = []
    for method in options.methods.split(","):
        try:
            method_rows = [measure_prompt(explainer, prompt, method) for prompt in prompts]
        except clearhead.UnsupportedError as error:
            print(f"{method}: {error}")
            continue
        rows += method_rows
        hits = np.array([row["is_among_top_two"] for row in method_rows], dtype=float)
        predicted = np.array([row["is_predicted"] for row in method_rows])
        drop = np.mean([row["log_probability_drop"] for row in method_rows])
        print(
            f"{method}: {int(hits.sum())} of {len(hits)}, {compute_mean_interval(hits, bounds=RATE_BOUNDS)}; where the "
            f"model predicts the answer {int(hits[predicted].sum())} of {int(predicted.sum())}; mean drop {drop:.2f}",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
