"""Models of one's own that read rows of tokens."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.adapters.base import How, Readout, Sample
from clearhead.adapters.custom.base import QUERY, OwnSubject, Reader
from clearhead.adapters.readers.text import padded
from clearhead.capture.checks.self_test import TOLERANCE
from clearhead.capture.session import at_rest, hooks
from clearhead.errors import InputError, Refusal
from clearhead.methods.base import REGISTRY
from clearhead.units import Units, located, numbered


@dataclass
class Tokens(Reader):
    """Rows of tokens: the words of a text by their numbers, or vectors such as the steps of a series.

    read: a text (or whatever is given to `explain`) → the numbers of its tokens; without it the numbers are given
    names: what the numbers are called: a list, a dict (either way round) or a function
    special: the numbers that stand for no part of the text
    pad: the number that fills shorter texts up; without it only inputs of one length share a batch
    inputs: tokens (batch × length) and which of them are real (not padding) → the model's arguments by name; without it
    the tokens are its first argument, and its only one
    embedding: the name of the module that looks the tokens up, where that is not plain
    vectors: how wide the vectors are, where tokens are vectors and not numbers
    """

    read: Callable[[Any], Any] | None = None
    names: Sequence[str] | Mapping[Any, Any] | Callable[[int], str] | None = None
    special: Collection[int] = ()
    pad: int | None = None
    inputs: Callable[[Tensor, Tensor], Mapping[str, Any]] | None = None
    embedding: str | None = None
    vectors: int | None = None

    def name(self, token: int) -> str:
        if callable(self.names):
            return str(self.names(token))
        if isinstance(self.names, Mapping):
            return str(self.names[token] if token in self.names else self._turned.get(token, token))
        return str(self.names[token]) if self.names is not None else str(token)

    @cached_property
    def _turned(self) -> dict[Any, Any]:
        """A vocabulary says which number a word has."""
        return {number: word for word, number in self.names.items()} if isinstance(self.names, Mapping) else {}


class OwnTokens(OwnSubject):
    """A model of one's own that reads a row of tokens."""

    stream = "text"
    takes: ClassVar[tuple[str, ...]] = ("text",)
    leaf = "tokens"
    processor: Tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.example()
        batch = self._batch([tokens])
        self.table: nn.Module | None = None
        self.argument, self.length_first = self._leaf(batch, tokens)
        if self.processor.vectors is None:
            self.table, self.length_first = self._look_up(batch, tokens)

    @property
    def lookups(self) -> Sequence[nn.Module] | None:  # type: ignore[override]
        return None if self.table is None else [self.table]

    def default_readout(self) -> Readout | None:
        return QUERY if self.pools else "first"

    def example(self) -> Any:
        if self.processor.vectors is None:
            return torch.tensor([1, 0, 1, 1])
        return torch.linspace(-3, 3, 4 * self.processor.vectors).sin().reshape(4, -1)

    def _look_up(self, batch: Mapping[str, Any], tokens: Tensor) -> tuple[nn.Module, bool]:
        """The module that looks the tokens up, and whether it has the length before the batch."""
        modules, found = dict(self.model.named_modules()), list[tuple[str, Tensor]]()
        if self.processor.embedding is None:
            chosen = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        else:
            chosen = [self.processor.embedding]

        def see(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                given = args[0] if args else None
                fits = isinstance(given, Tensor) and torch.equal(given.detach().cpu().flatten(), tokens)
                if isinstance(output, Tensor) and output.dim() == 3 and (fits or self.processor.embedding is not None):
                    found.append((name, output))

            return hook

        with hooks([modules[name].register_forward_hook(see(name)) for name in chosen]):
            self.run(batch)
        if len(found) != 1:
            names = ", ".join(name for name, _ in found) or ", ".join(chosen) or "it has no nn.Embedding"
            raise InputError(
                f"it is not plain which module of {self.model_class} looks the tokens up, once in a pass ({names}): "
                "say so with embedding=, or give vectors="
            )
        ((name, output),) = found
        return modules[name], output.shape[:2] == (len(tokens), 1)

    def _leaf(self, batch: Mapping[str, Any], tokens: Tensor) -> tuple[str, bool]:
        """The argument that the tokens are handed over in, and whether it has the length before the batch."""
        whole = tokens[None].to(self.device)
        whole = whole.to(self.dtype) if whole.is_floating_point() else whole
        for name, part in batch.items():
            for length_first in (False, True):
                if isinstance(part, Tensor) and torch.equal(part, whole.transpose(0, 1) if length_first else whole):
                    return name, length_first
        raise InputError("inputs= must hand the tokens over as they are, batch first or length first")

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.argument,)

    def run(self, batch: Mapping[str, Any]) -> Any:
        """The model's output, without gradients."""
        with at_rest(self.model), torch.no_grad(), self.scope():
            return self.model(**batch)

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if how.max_length is not None:
            raise InputError("max_length= is for tokenizers of transformers: let the reader's read= cut the text")
        tokens = self._read(raw)
        alike = () if self.processor.pad is not None else (len(tokens),)
        return [Sample({self.argument: tokens}, self.axes(self._units(tokens, raw, how)), alike=alike)]

    def _read(self, raw: Any) -> Tensor:
        given = isinstance(raw, Tensor) or (isinstance(raw, np.ndarray) and raw.dtype.kind in "iuf")
        if not given and self.processor.read is None:
            raise InputError(f"the reader has no read=, so give its tokens as a tensor, not {type(raw).__name__}")
        try:
            tokens = torch.as_tensor(raw if given or self.processor.read is None else self.processor.read(raw))
        except (TypeError, ValueError, RuntimeError) as problem:
            raise InputError(f"the reader's read= must return tokens as a list or tensor ({problem})") from None
        width, shape = self.processor.vectors, tuple(tokens.shape)
        if width is not None and (tokens.dim() != 2 or shape[1] != width or not shape[0]):
            raise InputError(f"one input must be length × {width}, without a batch axis, but is {shape}")
        if width is None and (tokens.dim() != 1 or not shape[0] or tokens.is_floating_point()):
            raise InputError(
                f"one input must be a row of whole numbers, without a batch axis, but is {shape} of {tokens.dtype}"
            )
        count = getattr(self.table, "num_embeddings", None)
        if width is None and (int(tokens.min()) < 0 or (count is not None and int(tokens.max()) >= count)):
            raise InputError(f"tokens must be whole numbers from 0 to {'…' if count is None else count - 1}")
        return tokens if width is not None else tokens.long()

    def _units(self, tokens: Tensor, raw: Any, how: How) -> Units:
        numbers = tokens.tolist() if self.processor.vectors is None else []
        special = [number in self.processor.special for number in numbers]
        names: Any = how.tokens or [self.processor.name(number) for number in numbers] or None
        units = numbered(len(tokens), self.stream, names, special)
        if how.tokens is not None or self.processor.names is None or not isinstance(raw, str):
            return units
        found = located([name for name, apart in zip(names, special, strict=True) if not apart], raw)
        if found is None:  # the names are not pieces of the text
            return units
        spans = iter(found)
        offsets = tuple((0, 0) if apart else next(spans) for apart in special)
        count = len(names)
        return Units(self.stream, "token", tuple(names), units.special, (raw,), (0,) * count, offsets)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return self._batch([sample.inputs[self.argument] for sample in samples])

    def _batch(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        longest = max(map(len, rows))
        tokens = torch.stack([padded(row, longest, self.processor.pad or 0) for row in rows]).to(self.device)
        real: Bool[Tensor, "batch token"] = torch.tensor([[i < len(row) for i in range(longest)] for row in rows])
        tokens = tokens.to(self.dtype) if tokens.is_floating_point() else tokens
        return self.arguments(tokens, real.to(self.device))

    def padded(self, sample: Sample) -> dict[str, Any] | None:
        """Two rows of different lengths, if they may share a batch: the model must give the shorter what it gives it
        alone."""
        if self.processor.pad is None:
            return None
        tokens = sample.inputs[self.argument]
        longer, shorter = (tokens, tokens[:-1]) if len(tokens) > 1 else (torch.cat([tokens, tokens]), tokens)
        batch = self._batch([longer, shorter])
        together, alone = self.logits(self.run(batch))[1], self.logits(self.run(self._batch([shorter])))[0]
        gap = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-12))
        if not gap <= TOLERANCE.get(alone.dtype, 1e-4):
            raise Refusal(
                f"the scores of {self.model_class} change by {gap:.1e} (relative) when its input is padded: hide the "
                "padding with inputs=, or leave pad= out, so that only inputs of one length share a batch"
            )
        return batch

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return self.arranged_with_query(only.transpose(0, 1) if self.length_first else only)

    def why_not(self, method: str) -> str | None:
        if self.length_first and REGISTRY[method].declaration.kind == "path":
            return (
                f"it goes from one input to another row by row, and {self.model_class} has the length before the batch"
            )
        return super().why_not(method)

    def why_no_layers(self) -> str | None:
        if self.length_first:
            return f"it needs what goes into each layer, which {self.model_class} has with the length before the batch"
        return super().why_no_layers()


Tokens.subject = OwnTokens
