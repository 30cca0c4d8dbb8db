"""The implementations that `performance.py` compares with clearhead: the lower bound, the reference, other libraries.

Each takes a model and a batch of ids and returns batch × token scores, or None where there are none.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BaselineFunction = Callable[[Any, Tensor], "Tensor | None"]


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@contextmanager
def checkpointed_layers(model: Any, enabled: bool) -> Iterator[None]:
    """Activation checkpointing of every layer, as clearhead has it for long inputs."""
    layers = get_layers(model) if enabled else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def get_layers(model: Any) -> list[nn.Module]:
    inner = getattr(model, "bert", None) or model.model
    if hasattr(inner, "decoder"):
        return [*inner.encoder.layers, *inner.decoder.layers]
    return [*(inner.encoder.layer if hasattr(inner, "encoder") else inner.layers)]


def compute_top_logit(model: Any, **inputs: Any) -> Tensor:
    """The explained logit of each sample: of the class, or of the next token."""
    if type(model).__name__.endswith("ForCausalLM"):
        return model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].amax(-1)
    if model.config.is_encoder_decoder:
        return model(**inputs, use_cache=False).logits[:, -1].amax(-1)
    return model(**inputs).logits.amax(-1)


def run_plain_gradient(model: Any, ids: Tensor, use_checkpointing: bool = False, **other_inputs: Tensor) -> None:
    """The lower bound: one forward pass, and the gradient of one logit with respect to the embeddings."""
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    with checkpointed_layers(model, use_checkpointing):
        torch.autograd.grad(compute_top_logit(model, inputs_embeds=vectors, **other_inputs).sum(), vectors)


def run_reference_generic_attention(model: Any, ids: Tensor) -> Tensor:
    """Generic Attention as in the published code: each example separately, weight gradients, full matrices."""
    row = -1 if type(model).__name__.endswith("ForCausalLM") else 0
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    model.requires_grad_(True)
    rows = []
    try:
        for one in ids:
            model.zero_grad()
            output = model(input_ids=one[None], output_attentions=True)
            for attention in output.attentions:
                attention.retain_grad()
            logits = output.logits[:, -1] if row else output.logits
            logits.amax(-1).sum().backward()
            relevance = torch.eye(len(one), device=ids.device)
            for attention in output.attentions:
                added = (attention.detach() * attention.grad).clamp(min=0).mean(1)[0].float()
                relevance = relevance + added @ relevance
            rows.append(relevance[row] - torch.eye(len(one), device=ids.device)[row])
            del output, attention
    finally:
        model.requires_grad_(False)
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation(own)
    return torch.stack(rows)


def run_captum_integrated_gradients(model: Any, ids: Tensor, steps: int = 20) -> Tensor:
    """captum's integrated gradients of the embeddings."""
    from captum.attr import IntegratedGradients

    vectors = model.get_input_embeddings()(ids).detach()
    explainer = IntegratedGradients(lambda given: compute_top_logit(model, inputs_embeds=given))
    return explainer.attribute(vectors, n_steps=steps, internal_batch_size=len(ids)).sum(-1)


def run_shap_partition(model: Any, ids: Tensor, evaluations: int = 500) -> Tensor:
    """shap's partition explainer with its default number of evaluations."""
    import numpy as np
    import shap
    from scipy.cluster.hierarchy import linkage

    def value(rows: Any) -> Any:
        given = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(ids.device)
        with torch.no_grad():
            return (
                torch.cat([compute_top_logit(model, input_ids=part) for part in given.split(16)]).float().cpu().numpy()
            )

    width = ids.shape[1]
    tree = linkage(np.arange(width)[:, None], "complete")  # neighbours first
    explainer = shap.PartitionExplainer(value, shap.maskers.Partition(np.zeros((1, width)), clustering=tree))
    return torch.as_tensor(explainer(ids.cpu().numpy(), max_evals=evaluations, silent=True).values)


def run_inseq_saliency(model: Any, ids: Tensor) -> Tensor | None:
    """inseq's saliency of the next token. It needs a tokenizer: here, the name of each token is its id."""
    import inseq
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if not type(model).__name__.endswith("ForCausalLM"):
        raise NotImplementedError("inseq explains generative models only, and this model is a classifier")
    words = {str(i): i for i in range(model.config.vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "0", "pad_token": "0", "bos_token": "1", "eos_token": "2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    explainer = inseq.load_model(model, "saliency", tokenizer=tokenizer)
    prompts = [" ".join(map(str, one)) for one in ids.tolist()]
    with torch.no_grad():
        following = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
    whole = [f"{prompt} {word}" for prompt, word in zip(prompts, following, strict=True)]
    explainer.attribute(prompts, whole, show_progress=False)
    return None


#: Other libraries, the package of each, and the length from which it is skipped.
LIBRARY_BASELINES: dict[str, tuple[str, int, BaselineFunction]] = {
    "captum integrated gradients, 20 steps": ("captum", 8192, run_captum_integrated_gradients),
    "shap partition, 500 evaluations": ("shap", 256, run_shap_partition),
    "inseq saliency, one token": ("inseq", 2048, run_inseq_saliency),
}


def run_captum(attribute: Callable[..., Tensor], model: Any, inputs: Mapping[str, Tensor], rows: int) -> Tensor:
    """Run a method of captum on the word vectors, or on the pixels, of one input.

    Args:
        attribute: Takes the forward function, the vectors and `rows`, and returns one score per element.
        model: The model.
        inputs: The model's inputs.
        rows: Largest number of inputs in one pass.
    """
    name, tensor = next(iter(inputs.items()))
    if name == "input_ids":
        name, tensor = "inputs_embeds", model.get_input_embeddings()(tensor)
    scores = attribute(lambda vectors: compute_top_logit(model, **{name: vectors}), tensor.detach(), rows)
    return scores.sum(-1).cpu()


def attribute_saliency(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import Saliency

    return Saliency(forward).attribute(vectors)


def attribute_input_x_gradient(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import InputXGradient

    return InputXGradient(forward).attribute(vectors)


def attribute_integrated_gradients(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import IntegratedGradients

    return IntegratedGradients(forward).attribute(vectors, n_steps=76, internal_batch_size=rows)


def attribute_gradient_shap(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import GradientShap

    return GradientShap(forward).attribute(vectors, torch.zeros_like(vectors), n_samples=50)


def attribute_smoothgrad(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import NoiseTunnel, Saliency

    tunnel = NoiseTunnel(Saliency(forward))
    return tunnel.attribute(vectors, nt_type="smoothgrad", nt_samples=50, nt_samples_batch_size=min(rows, 50))


def attribute_occlusion(forward: Callable[[Tensor], Tensor], vectors: Tensor, rows: int) -> Tensor:
    from captum.attr import FeatureAblation

    units = torch.arange(vectors.shape[1], device=vectors.device)[None, :, None].expand(1, -1, vectors.shape[2])
    return FeatureAblation(forward).attribute(vectors, feature_mask=units, perturbations_per_eval=rows)


#: Methods of other libraries by clearhead's name: the package, the label of the row, and the function.
LIBRARY_METHODS: dict[str, tuple[str, str, Callable[[Any, Mapping[str, Tensor], int], Tensor]]] = {
    "saliency": ("captum", "captum saliency", partial(run_captum, attribute_saliency)),
    "input-x-gradient": ("captum", "captum input × gradient", partial(run_captum, attribute_input_x_gradient)),
    "integrated-gradients": (
        "captum",
        "captum integrated gradients, 76 steps",
        partial(run_captum, attribute_integrated_gradients),
    ),
    "gradient-shap": ("captum", "captum gradient SHAP, 50 samples", partial(run_captum, attribute_gradient_shap)),
    "smoothgrad": ("captum", "captum SmoothGrad, 50 samples", partial(run_captum, attribute_smoothgrad)),
    "occlusion": ("captum", "captum feature ablation", partial(run_captum, attribute_occlusion)),
    "shap": (
        "shap",
        "shap partition, 500 evaluations",
        lambda model, inputs, rows: run_shap_partition(model, inputs["input_ids"]),
    ),
}
