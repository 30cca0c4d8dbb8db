"""Baselines of path methods by name, as input vectors of the model: embeddings, pixels, or other numbers."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.adapters.base import InputOptions, find_module_device
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.target_batch import TargetBatch
from clearhead.errors import InputError, UnsupportedError
from clearhead.methods._path import EXAMPLE_PREFIX
from clearhead.perturbation.image_fill import blur_image, make_black_image

#: Names of the baselines for tokens, images and other numeric inputs.
TOKEN_BASELINES = ("pad", "mask", "mean", "zero")
IMAGE_BASELINES = ("zero", "black", "mean", "blur")
NUMERIC_BASELINES = ("zero",)


@dataclass(frozen=True, eq=False)
class _FlatChoicesBatch(TargetBatch):
    """A batch with one row of tokens for each row of vectors.

    The inputs of multiple-choice models have an axis of choices, which the model flattens before it looks tokens up.
    """

    flat_inputs: Mapping[str, Tensor] | None = None

    @cached_property
    def model_inputs(self) -> Mapping[str, Any]:
        """The inputs of the model, with flat rows of tokens."""
        return {**super().model_inputs, **(self.flat_inputs or {})}


def build_baselines(
    batch: TargetBatch, inputs: Mapping[str, Tensor], recorder: Recorder, runs_model: bool = True
) -> "Baselines":
    """Return the baselines of the inputs that a pass has recorded.

    Args:
        batch: The batch.
        inputs: Input vectors by leaf, for one target of each sample.
        recorder: Recorder of the model.
        runs_model: Whether the model is run at the baselines.
    """
    token_leaves = [leaf for leaf in inputs if not batch.model_inputs[leaf].is_floating_point()]
    flat_inputs = {leaf: batch.model_inputs[leaf].reshape(inputs[leaf].shape[:-1]) for leaf in token_leaves}
    flat_batch = _FlatChoicesBatch(
        batch.adapter, batch.samples, batch.targets_by_sample, batch.seed, flat_inputs=flat_inputs
    )
    return Baselines(flat_batch, inputs, token_leaves, recorder, runs_model)


class Baselines:
    """The baselines of one batch, each computed once.

    Args:
        batch: The batch.
        inputs: Input vectors by leaf.
        token_inputs: The leaves that are embeddings of tokens.
        recorder: Recorder of the model.
        runs_model: Whether the model is run at the baselines, so that its output there must be defined.
    """

    def __init__(
        self,
        batch: TargetBatch,
        inputs: Mapping[str, Tensor],
        token_inputs: Sequence[str],
        recorder: Recorder,
        runs_model: bool = True,
    ) -> None:
        self.batch = batch
        self.inputs = inputs
        self.recorder = recorder
        self.runs_model = runs_model
        self.adapter = batch.adapter
        self.token_inputs = [*token_inputs, *(leaf for leaf in inputs if leaf == "inputs_embeds")]
        self.cache: dict[tuple[str | None, str], Tensor] = {}

    def get(self, name: str | None, leaf: str) -> Tensor:
        """Return the baseline of one input.

        Args:
            name: Name of the baseline, or an example with `EXAMPLE_PREFIX`; None for the default.
            leaf: Name of the input.

        Raises:
            InputError: The name is unknown, or the model lacks the token.
            UnsupportedError: The model has no defined output at this baseline.
        """
        if (name, leaf) not in self.cache:
            if name is not None and name.startswith(EXAMPLE_PREFIX):
                self.cache[name, leaf] = self._build_from_example(name, leaf)
            else:
                self.cache[name, leaf] = self._build(self._resolve_name(name, leaf), leaf)
        return self.cache[name, leaf]

    def list_names(self, leaf: str) -> tuple[str, ...]:
        """Return the names of the baselines that an input can have."""
        if leaf in self.token_inputs:
            return TOKEN_BASELINES
        if leaf == "pixel_values" and self.inputs[leaf].dim() >= 4:
            return IMAGE_BASELINES
        return NUMERIC_BASELINES

    def _resolve_name(self, name: str | None, leaf: str) -> str:
        """The baseline of an input: its default if the name belongs to another input, such as black for text."""
        accepted = list(dict.fromkeys(known_name for input_ in self.inputs for known_name in self.list_names(input_)))
        if name is not None and name not in accepted:
            raise InputError(
                f"baseline={name!r} is not recognised: the inputs of this model accept {', '.join(accepted)}"
            )
        if name in self.list_names(leaf):
            return str(name)
        return self._find_default_name(leaf)

    def _find_default_name(self, leaf: str) -> str:
        if leaf not in self.token_inputs:
            return "mean" if self._zero_is_padding(leaf) else "zero"
        pad: Any = getattr(_get_text_config(self.adapter), "pad_token_id", None)
        if not isinstance(pad, int) or not 0 <= pad < self._get_vocab_size(leaf):
            return "mean"
        # in many models the embedding of padding is zero, where a subsequent norm is undefined
        return "pad" if bool(self._embed_token(leaf, pad).any()) else "mean"

    def _build(self, name: str, leaf: str) -> Tensor:
        x = self.inputs[leaf]
        if leaf in self.token_inputs:
            return self._build_for_tokens(name, leaf, x)
        if name == "zero":
            baseline = torch.zeros_like(x)
        elif name == "mean":
            baseline = x.mean((-2, -1), keepdim=True).expand_as(x)
        elif name == "black":
            baseline = make_black_image(getattr(self.adapter, "processor", None), x)
        else:
            baseline = blur_image(x)
        if self.runs_model and self._zero_is_padding(leaf) and not baseline.any():
            raise UnsupportedError(
                f"{type(self.recorder.model).__name__} treats an image of zeros as padding, so baseline={name!r} "
                "cannot be used. Choose another, such as 'mean' or 'blur'"
            )
        return baseline

    def _zero_is_padding(self, leaf: str) -> bool:
        layout = getattr(self.adapter, "image_token_layout", None)
        return leaf == "pixel_values" and getattr(layout, "zero_is_padding", False)

    def _build_from_example(self, name: str, leaf: str) -> Tensor:
        """Another input as the baseline; a text is truncated, or padded with the default baseline."""
        if len(self.inputs) > 1:
            raise InputError("examples can be baselines only for models with one input: use names of baselines instead")
        samples = self.adapter.make_samples(name.removeprefix(EXAMPLE_PREFIX), InputOptions())
        example = self.adapter.collate(samples[:1])[leaf]
        x = self.inputs[leaf]
        if leaf not in self.token_inputs:
            if example.shape[1:] != x.shape[1:]:
                raise InputError(
                    f"the example has the size {tuple(example.shape[1:])}, but the input has {tuple(x.shape[1:])}"
                )
            return example.to(x).expand_as(x)
        with torch.no_grad():
            vectors = self._get_embedding_module(leaf)(example).to(x)
        length = min(x.shape[1], vectors.shape[1])
        baseline = self.get(None, leaf).clone()
        baseline[:, :length] = vectors[:, :length]
        return torch.where(self._build_special_token_mask(leaf)[..., None], x, baseline)

    def _build_for_tokens(self, name: str, leaf: str, x: Tensor) -> Tensor:
        if name == "zero":
            vector = x.new_zeros(x.shape[-1])
        elif name == "mean":
            vector = self._compute_mean_embedding(leaf).to(x)
        else:
            vector = self._embed_token(leaf, self._find_special_token_id(name)).to(x)
        if self.runs_model and not vector.any():
            self._reject_zero_vector(name)
        baseline = vector.expand_as(x)
        if name == "zero":
            return baseline
        return torch.where(self._build_special_token_mask(leaf)[..., None], x, baseline)

    def _reject_zero_vector(self, name: str) -> None:
        """Raise an error if the model normalises bare embeddings, so that a zero vector has no defined output."""
        modules = self.adapter.session.topology.modules
        norms = {type(module).__name__ for module in modules if _is_scale_invariant_norm(module)}
        norms |= self._find_norms_on_bare_embeddings()
        if norms:
            raise UnsupportedError(
                f"{type(self.recorder.model).__name__} has {', '.join(sorted(norms))}, which discards the length of a "
                "vector and is applied to embeddings without positions: its output for the zero vector of "
                f"baseline={name!r} is undefined, and nearly all of the change along the path happens next to the "
                "baseline. Choose another baseline, such as 'mean'"
            )

    def _find_norms_on_bare_embeddings(self) -> set[str]:
        """Classes of norms whose input is zero if embeddings are zero, because nothing has been added to them."""
        thread_id = threading.get_ident()
        norm_classes: set[str] = set()

        def zero_embeddings(embedding_module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return torch.zeros_like(output) if threading.get_ident() == thread_id else None

        def check_norm_input(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread_id and args and not args[0].any():
                norm_classes.add(type(norm).__name__)

        norms = [module for module in self.adapter.session.topology.modules if "Norm" in type(module).__name__]
        handles = [norm.register_forward_pre_hook(check_norm_input) for norm in norms]
        handles += [module.register_forward_hook(zero_embeddings) for module in self.recorder.get_embedding_modules()]
        first_sample = TargetBatch(self.adapter, self.batch.samples[:1], [[self.batch.targets[0]]])
        with (
            remove_hooks_on_exit(handles),
        ):
            self.adapter.session.forward(first_sample.model_inputs)
        return norm_classes

    def _build_special_token_mask(self, leaf: str) -> Tensor:
        """True for special tokens, which stay unchanged in a baseline."""
        token_ids = self.batch.model_inputs[leaf]
        if token_ids.is_floating_point():
            return torch.zeros(self.inputs[leaf].shape[:-1], dtype=torch.bool, device=self.inputs[leaf].device)
        tokenizer = getattr(self.adapter, "tokenizer_wrapper", None)
        config = _get_text_config(self.adapter)
        special_ids = set(getattr(tokenizer, "special_ids", ()))
        for token_name in ("pad", "cls", "sep", "bos", "eos", "decoder_start"):
            token_id = getattr(config, f"{token_name}_token_id", None)
            special_ids |= set(token_id if isinstance(token_id, list) else [token_id])
        special_ids.discard(None)
        return torch.isin(token_ids, torch.tensor(sorted(special_ids), device=token_ids.device))

    def _find_special_token_id(self, token_name: str) -> int:
        tokenizer = getattr(self.adapter, "tokenizer_wrapper", None)
        token_id: Any = getattr(_get_text_config(self.adapter), f"{token_name}_token_id", None)
        if token_id is None and tokenizer is not None:
            token_id = tokenizer.get_special_token_id(token_name)
        if not isinstance(token_id, int):
            model_name = type(self.recorder.model).__name__
            raise InputError(
                f"baseline={token_name!r} is not available: {model_name} and its tokenizer have no such token; try "
                "'mean'"
            )
        return token_id

    def _get_embedding_module(self, leaf: str) -> nn.Module:
        embedding_modules = self.recorder.get_embedding_modules()
        token_leaves = [token_leaf for token_leaf in self.token_inputs if token_leaf != "inputs_embeds"]
        if leaf not in token_leaves:
            return embedding_modules[0]
        return embedding_modules[min(token_leaves.index(leaf), len(embedding_modules) - 1)]

    def _get_vocab_size(self, leaf: str) -> int:
        return len(self._get_embedding_module(leaf).weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def _embed_token(self, leaf: str, token_id: int) -> Tensor:
        """Embedding of a token, computed by the module, because some models scale embeddings there."""
        embedding = self._get_embedding_module(leaf)
        return embedding(torch.tensor([[token_id]], device=find_module_device(embedding)))[0, 0].detach()

    @torch.no_grad()
    def _compute_mean_embedding(self, leaf: str) -> Tensor:
        """Mean embedding of the vocabulary."""
        embedding = self._get_embedding_module(leaf)
        weight: Any = embedding.weight
        token_chunks = torch.arange(len(weight), device=find_module_device(embedding)).split(8192)
        sum_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        sums = [embedding(token_ids[None])[0].to(sum_dtype).sum(0) for token_ids in token_chunks]
        return torch.stack(sums).sum(0) / len(weight)


def _is_scale_invariant_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ or type(module).__name__ in ("T5LayerNorm", "MT5LayerNorm")


def _get_text_config(adapter: Any) -> Any:
    config: Any = getattr(adapter.model, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config
