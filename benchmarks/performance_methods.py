"""Cost of every method against the passes that its plan lists, and of the first explanation of a process.

Two parts of `performance.py`. The first compares each method with "plain": as many forward passes and gradients of one
logit, on as many rows, in batches of the same size as in the plan (`Explainer.plan`), by the model's own attention. The
second starts processes: one runs a forward pass and a gradient, the other one explanation.

    methods     a decoder in the shape of Llama-3.1-8B on a GPU (a small one on a CPU), ViT-B, BERT-base
    first       the first explanation in a fresh process, and the model's own first forward pass and gradient there
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from performance_ways import LIBRARY_METHODS, is_installed
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import clearhead
from clearhead.methods.base import METHOD_REGISTRY

if TYPE_CHECKING:
    from performance import PerformanceBenchmark

#: Methods that read one recorded pass.
ONE_PASS_METHODS = [
    "saliency",
    "input-x-gradient",
    "generic",
    "attention",
    "rollout",
    "attention-gradcam",
    "grad-sam",
    "cat",
]
ONE_PASS_METHODS += ["attcat", "attention-gradient", "attention-x-gradient"]
RULE_METHODS = ["attn-lrp", "deeplift"]
PATH_METHODS = ["integrated-gradients", "smoothgrad", "gradient-shap"]
#: Controls, which read no pass, are not measured.
CONTROLS = {"random", "position"}
#: Largest accepted ratios, by model, number of tokens and method.
MAX_RATIOS: dict[tuple[str, int], dict[str, float]] = {
    ("Llama-8B", 512): {"saliency": 1.1, "input-x-gradient": 1.1, "generic": 1.5, "integrated-gradients": 1.1},
    ("Llama-8B", 4096): {"saliency": 1.1, "generic": 1.1},
    ("ViT-B", 197): {"saliency": 1.15, "generic": 1.3},
    ("BERT-base", 128): {"generic": 1.15},
}
#: Largest accepted seconds of a first explanation beyond the model's own first pass.
MAX_FIRST_SECONDS = 3.0


def make_llama(device: str, tiny: bool = False) -> Any:
    """Make a decoder in the shape of Llama-3.1-8B in bfloat16, or a small one in float32."""
    torch.manual_seed(0)
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128_256}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8}
    if tiny:
        shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1000}
        shape |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, max_position_embeddings=131_072, attn_implementation="sdpa", pad_token_id=0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)
    return model.eval().requires_grad_(False)


def make_vit(device: str, tiny: bool = False) -> Any:
    """Make an image classifier in the shape of ViT-B/16."""
    torch.manual_seed(0)
    config = ViTConfig(attn_implementation="sdpa", num_labels=1000, num_hidden_layers=2 if tiny else 12)
    return ViTForImageClassification(config).eval().requires_grad_(False).to(device)


def make_bert(device: str, tiny: bool = False) -> Any:
    """Make a text classifier in the shape of BERT-base."""
    torch.manual_seed(0)
    config = BertConfig(attn_implementation="sdpa", num_hidden_layers=2 if tiny else 12)
    return BertForSequenceClassification(config).eval().requires_grad_(False).to(device)


MODELS: dict[str, Callable[..., Any]] = {"Llama-8B": make_llama, "ViT-B": make_vit, "BERT-base": make_bert}


def make_inputs(model: Any, batch: int, tokens: int) -> dict[str, Tensor]:
    """Make random token ids, or images for models that read images."""
    torch.manual_seed(tokens)
    if isinstance(model, ViTForImageClassification):
        return {"pixel_values": torch.rand(batch, 3, 224, 224, device=model.device) * 2 - 1}
    return {"input_ids": torch.randint(5, model.config.vocab_size, (batch, tokens), device=model.device)}


def run_plain(model: Any, inputs: Mapping[str, Tensor], with_gradient: bool = True) -> Tensor:
    """Run a forward pass, and take the gradient of the largest logit of each row with respect to its input vectors."""
    name, tensor = next(iter(inputs.items()))
    if name == "pixel_values":
        vectors = {"pixel_values": tensor.clone()}
    else:
        vectors = {"inputs_embeds": model.get_input_embeddings()(tensor).detach()}
    with torch.set_grad_enabled(with_gradient):
        (leaf,) = vectors.values()
        leaf.requires_grad_(with_gradient)
        keep_last = {"logits_to_keep": 1, "use_cache": False} if isinstance(model, LlamaForCausalLM) else {}
        logits = model(**vectors, **keep_last).logits
        values = logits.reshape(len(leaf), -1).amax(1)
        if not with_gradient:
            return values.cpu()
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return gradient.norm(dim=-1).cpu()


def run_plain_passes(model: Any, inputs: Mapping[str, Tensor], plan: Any) -> None:
    """Run the passes that a plan lists, by the model's own attention and without a method."""
    for batch_plan in plan:
        for count in batch_plan.counts:
            num_inputs = count.forward * count.rows if count.num_inputs is None else count.num_inputs
            num_rows = len(next(iter(inputs.values())))
            remaining = num_inputs
            while remaining > 0:
                rows = min(remaining, count.rows)
                repeats = -(-rows // num_rows)
                batch = {
                    name: tensor.repeat(repeats, *(1,) * (tensor.dim() - 1))[:rows] for name, tensor in inputs.items()
                }
                run_plain(model, batch, with_gradient=count.backward > 0)
                remaining -= rows


def measure_methods(bench: "PerformanceBenchmark", quick: bool) -> None:
    """Measure methods on three models, the targets first, and every method on one of them."""
    on_cpu = bench.device == "cpu"
    every_method = [name for name in METHOD_REGISTRY if name not in CONTROLS]
    cases = [("Llama-8B", 1, 128 if on_cpu else 512, [*ONE_PASS_METHODS[:3], *PATH_METHODS[:1]])]
    cases += [] if on_cpu else [("Llama-8B", 1, 4096, ONE_PASS_METHODS[:3])]
    cases += [("Llama-8B", 1, 128 if on_cpu else 512, [*ONE_PASS_METHODS[3:], *RULE_METHODS, *PATH_METHODS[1:]])]
    cases += [("ViT-B", 2 if on_cpu else 32, 197, [*ONE_PASS_METHODS, *RULE_METHODS])]
    cases += [("BERT-base", 4 if on_cpu else 64, 128, [*ONE_PASS_METHODS, *RULE_METHODS])]
    cases += [("BERT-base", 1, 128, every_method)]
    model_name, model, explainer = "", None, None
    for name, batch, tokens, methods in cases:
        if bench.models and name not in bench.models:
            continue
        if name != model_name:
            model = explainer = None
            bench.free_memory()
            model = MODELS[name](bench.device, quick or (on_cpu and name == "Llama-8B"))
            explainer = clearhead.load(model)
            model_name = name
        model_label = "small Llama" if on_cpu and name == "Llama-8B" else name
        assert explainer is not None
        inputs = make_inputs(model, batch, tokens)
        for method in methods:
            if bench.methods and method not in bench.methods:
                continue
            configured = clearhead.Method(method)
            if bench.steps is not None and "steps" in configured.option_names(method):
                configured = clearhead.Method(method, steps=bench.steps)
            try:
                plan = explainer.plan(inputs, configured, batch_size=batch)
            except clearhead.UnsupportedError as error:
                print(f"{name}: {error}", flush=True)
                continue
            label = "clearhead " + method
            limit = MAX_RATIOS.get((name, tokens), {}).get(method)
            runs: dict[str, Callable[[], Any]] = {
                "plain": partial(run_plain_passes, model, inputs, plan),
                label: partial(explainer.explain, inputs, configured, batch_size=batch),
            }
            if batch == 1 and method in LIBRARY_METHODS and bench.steps is None:
                package, library_label, run_library = LIBRARY_METHODS[method]
                rows = max((count.rows for batch_plan in plan for count in batch_plan.counts), default=1)
                if is_installed(package):
                    runs[library_label] = partial(run_library, model, inputs, rows)
            cost = str(configured.cost)
            bench.compare(
                "methods",
                {"model": model_label, "tokens": tokens, "batch": batch, "method": method, "passes": cost},
                runs,
                {} if limit is None or on_cpu else {label: limit},
                max_seconds=40,
            )


def time_first_call(model_name: str, tokens: int, device: str, tiny: bool, explains: bool) -> float:
    """Seconds of the first explanation, or of the first plain pass, in this process."""
    model = MODELS[model_name](device, tiny)
    inputs = make_inputs(model, 1, tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    if explains:
        clearhead.load(model).explain(inputs, "generic")
    else:
        run_plain(model, inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_first_call(bench: "PerformanceBenchmark", quick: bool) -> None:
    """Measure first calls in processes of their own."""
    for name, tokens in (("Llama-8B", 128), ("Llama-8B", 512), ("ViT-B", 197), ("BERT-base", 128)):
        if bench.models and name not in bench.models:
            continue
        tiny = quick or (bench.device == "cpu" and name == "Llama-8B")
        seconds = {}
        for kind in ("plain", "explain"):
            command = [sys.executable, __file__, name, str(tokens), bench.device, kind, *(["--tiny"] if tiny else [])]
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                print(f"{name} {kind}: {finished.stderr[-500:]}", flush=True)
                break
            seconds[kind] = json.loads(finished.stdout.splitlines()[-1])
        else:
            row = {"part": "first", "model": name, "tokens": tokens, "batch": 1, "device": bench.device}
            added = seconds["explain"] - seconds["plain"]
            bench.add_row({**row, "way": "plain", "seconds": seconds["plain"]})
            bench.add_row(
                {
                    **row,
                    "way": "clearhead generic",
                    "seconds": seconds["explain"],
                    "added": added,
                    "bar": MAX_FIRST_SECONDS,
                }
            )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description="Print the seconds of one first call.")
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("tokens", type=int)
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("kind", choices=("plain", "explain"))
    parser.add_argument("--tiny", action="store_true", help="a small model")
    chosen = parser.parse_args()
    print(
        json.dumps(time_first_call(chosen.model, chosen.tokens, chosen.device, chosen.tiny, chosen.kind == "explain"))
    )
