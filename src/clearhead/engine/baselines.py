"""Baselines by name: what an input is held against, as vectors of the model's own kind."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.adapters.base import How, device_of
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import at_rest, hooks, lock_of
from clearhead.engine.target_batch import Plan
from clearhead.errors import InputError, Refusal
from clearhead.methods._path import EXAMPLE
from clearhead.perturbation.image_fill import black, blurred

#: What words, pictures and other numbers can be held against.
OF_WORDS, OF_PIXELS, OF_NUMBERS = ("pad", "mask", "mean", "zero"), ("zero", "black", "mean", "blur"), ("zero",)


class Baselines:
    """The baselines of one batch, each made once."""

    def __init__(self, plan: Plan, inputs: Mapping[str, Tensor], words: Sequence[str], recorder: Recorder) -> None:
        self.plan, self.inputs, self.recorder, self.subject = plan, inputs, recorder, plan.subject
        self.words = [*words, *(leaf for leaf in inputs if leaf == "inputs_embeds")]
        self.known: dict[tuple[str | None, str], Tensor] = {}

    def of(self, name: str | None, leaf: str) -> Tensor:
        if (name, leaf) not in self.known:
            other = name is not None and name.startswith(EXAMPLE)
            made = self._example(str(name), leaf) if other else self._made(self._meant(name, leaf), leaf)
            self.known[name, leaf] = made
        return self.known[name, leaf]

    def names(self, leaf: str) -> tuple[str, ...]:
        if leaf in self.words:
            return OF_WORDS
        return OF_PIXELS if leaf == "pixel_values" and self.inputs[leaf].dim() >= 4 else OF_NUMBERS

    def _meant(self, name: str | None, leaf: str) -> str:
        """A name that another of the inputs has, such as black beside words, leaves this one with its default."""
        every = {one: None for other in self.inputs for one in self.names(other)}
        if name is not None and name not in every:
            raise InputError(f"baseline={name!r} is not known: this model's inputs have {', '.join(every)}")
        if name in self.names(leaf):
            return str(name)
        return self._default(leaf)

    def _default(self, leaf: str) -> str:
        if leaf not in self.words:
            return "mean" if self._zero_is_padding(leaf) else "zero"
        pad: Any = getattr(_text_config(self.subject), "pad_token_id", None)
        if not isinstance(pad, int) or not 0 <= pad < self._size(leaf):
            return "mean"
        # in many models padding's vector is zero, on which a norm that follows has no answer
        return "pad" if bool(self._word(leaf, pad).any()) else "mean"

    def _made(self, name: str, leaf: str) -> Tensor:
        x = self.inputs[leaf]
        if leaf in self.words:
            return self._of_words(name, leaf, x)
        if name == "zero":
            made = torch.zeros_like(x)
        elif name == "mean":
            made = x.mean((-2, -1), keepdim=True).expand_as(x)
        else:
            made = black(getattr(self.subject, "processor", None), x) if name == "black" else blurred(x)
        if self._zero_is_padding(leaf) and not made.any():
            raise Refusal(
                f"{type(self.recorder.model).__name__} takes a picture that is zero everywhere for padding, so "
                f"baseline={name!r} is no picture to it. Choose another, such as 'mean' or 'blur'"
            )
        return made

    def _zero_is_padding(self, leaf: str) -> bool:
        layout = getattr(self.subject, "layout", None)
        return leaf == "pixel_values" and getattr(layout, "zero_is_padding", False)

    def _example(self, name: str, leaf: str) -> Tensor:
        """Another input, cut or filled up to the length of each sample."""
        if len(self.inputs) > 1:
            raise InputError("examples as baselines are for models of one input: give names of baselines instead")
        samples = self.subject.samples(name.removeprefix(EXAMPLE), How())
        given = self.subject.collate(samples[:1])[leaf]
        x = self.inputs[leaf]
        if leaf not in self.words:
            if given.shape[1:] != x.shape[1:]:
                raise InputError(f"an example has the size {tuple(given.shape[1:])}, the input {tuple(x.shape[1:])}")
            return given.to(x).expand_as(x)
        with torch.no_grad():
            vectors = self._lookup(leaf)(given).to(x)
        length = min(x.shape[1], vectors.shape[1])
        whole = self.of(None, leaf).clone()
        whole[:, :length] = vectors[:, :length]
        return torch.where(self._special(leaf)[..., None], x, whole)

    def _of_words(self, name: str, leaf: str, x: Tensor) -> Tensor:
        if name == "zero":
            vector = x.new_zeros(x.shape[-1])
        elif name == "mean":
            vector = self._mean_word(leaf).to(x)
        else:
            vector = self._word(leaf, self._token(name)).to(x)
        if not vector.any():
            self._refuse_zero(name)
        whole = vector.expand_as(x)
        return whole if name == "zero" else torch.where(self._special(leaf)[..., None], x, whole)

    def _refuse_zero(self, name: str) -> None:
        norms = {type(module).__name__ for module in self.recorder.model.modules() if _forgets_length(module)}
        norms |= self._norms_of_words()
        if norms:
            raise Refusal(
                f"{type(self.recorder.model).__name__} has {', '.join(sorted(norms))}, which forgets how long a vector "
                f"is and reads words without positions: it has no answer at baseline={name!r} (zero), and all that "
                "changes on the way to the input changes right beside it. Choose another baseline, such as 'mean'"
            )

    def _norms_of_words(self) -> set[str]:
        """The norms that are given nothing where words are nothing: nothing was added to words on the way there."""
        model, subject, thread = self.recorder.model, self.subject, threading.get_ident()
        found: set[str] = set()

        def nothing(lookup: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            return torch.zeros_like(output) if threading.get_ident() == thread else None

        def listen(norm: nn.Module, args: tuple[Any, ...]) -> None:
            if threading.get_ident() == thread and args and not args[0].any():
                found.add(type(norm).__name__)

        norms = [module for module in model.modules() if "Norm" in type(module).__name__]
        handles = [norm.register_forward_pre_hook(listen) for norm in norms]
        handles += [lookup.register_forward_hook(nothing) for lookup in self.recorder.lookups()]
        one = Plan(subject, self.plan.given[:1], [[self.plan.targets[0]]])
        with lock_of(model), at_rest(model), torch.no_grad(), subject.scope(), hooks(handles):
            model(**one.batch)
        return found

    def _special(self, leaf: str) -> Tensor:
        """Tokens that frame a text stay in its baseline."""
        if self.plan.batch[leaf].is_floating_point():
            return torch.zeros(self.inputs[leaf].shape[:-1], dtype=torch.bool, device=self.inputs[leaf].device)
        words = getattr(self.subject, "words", None)
        config = _text_config(self.subject)
        ids = set(getattr(words, "outside", ()))
        for kind in ("pad", "cls", "sep", "bos", "eos", "decoder_start"):
            own = getattr(config, f"{kind}_token_id", None)
            ids |= set(own if isinstance(own, list) else [own])
        known = torch.tensor(sorted(one for one in ids if one is not None), device=self.plan.batch[leaf].device)
        return torch.isin(self.plan.batch[leaf], known)

    def _token(self, kind: str) -> int:
        words, config = getattr(self.subject, "words", None), _text_config(self.subject)
        found: Any = getattr(config, f"{kind}_token_id", None)
        if found is None and words is not None:
            found = words.token_id(kind)
        if not isinstance(found, int):
            name = type(self.recorder.model).__name__
            raise InputError(f"baseline={kind!r}: {name} and its tokenizer know no such token; try 'mean'")
        return found

    def _lookup(self, leaf: str) -> nn.Module:
        lookups = self.recorder.lookups()
        looked_up = [one for one in self.words if one != "inputs_embeds"]
        return lookups[min(looked_up.index(leaf), len(lookups) - 1)] if leaf in looked_up else lookups[0]

    def _size(self, leaf: str) -> int:
        return len(self._lookup(leaf).weight)  # type: ignore[arg-type]

    @torch.no_grad()
    def _word(self, leaf: str, index: int) -> Tensor:
        """As the model looks it up: some scale their embeddings there."""
        lookup = self._lookup(leaf)
        return lookup(torch.tensor([[index]], device=device_of(lookup)))[0, 0].detach()

    @torch.no_grad()
    def _mean_word(self, leaf: str) -> Tensor:
        lookup = self._lookup(leaf)
        weight: Any = lookup.weight
        parts = torch.arange(len(weight), device=device_of(lookup)).split(8192)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return torch.stack([lookup(part[None])[0].to(wide).sum(0) for part in parts]).sum(0) / len(weight)


def _forgets_length(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__ or type(module).__name__ in ("T5LayerNorm", "MT5LayerNorm")


def _text_config(subject: Any) -> Any:
    config: Any = getattr(subject.model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
