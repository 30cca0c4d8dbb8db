"""`TokenReader` and its adapter: models that are not from transformers and take sequences of tokens or vectors."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.adapters.base import InputOptions, Readout
from clearhead.adapters.custom.base import QUERY_STREAM, CustomModelAdapter, InputReader
from clearhead.adapters.readers.text import pad_to_length
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.errors import InputError, UnsupportedError
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.methods.pass_type import PassType
from clearhead.sample import Sample
from clearhead.units import Units, align_pieces, build_numbered_units


@dataclass
class TokenReader(InputReader):
    """Describes how your own model takes token sequences: token ids of a text, or vectors such as a time series.

    Attributes:
        read: Function from a text (or any other input of `explain`) to its token ids. None if ids are given.
        token_names: Names of the ids: a list, a dict (id → name or name → id) or a function.
        special_ids: Ids of special tokens, which are not part of the text.
        pad_id: Id of the padding token. None if only inputs of equal length share a batch.
        mask_id: Id of the token that replaces masked tokens, for methods that mask parts of the input. None for
            `pad_id`; without both, they do not apply.
        inputs: Function from the ids (batch × length) and the mask of real tokens to the model's arguments by name.
            None if the ids are its only argument.
        embedding_module: Name of the token embedding module, where it cannot be inferred.
        vector_size: Size of the vectors, if the input consists of vectors instead of ids.
    """

    read: Callable[[Any], Any] | None = None
    token_names: Sequence[str] | Mapping[Any, Any] | Callable[[int], str] | None = None
    special_ids: Collection[int] = ()
    pad_id: int | None = None
    mask_id: int | None = None
    inputs: Callable[[Tensor, Tensor], Mapping[str, Any]] | None = None
    embedding_module: str | None = None
    vector_size: int | None = None

    def get_token_name(self, token: int) -> str:
        if callable(self.token_names):
            return str(self.token_names(token))
        if isinstance(self.token_names, Mapping):
            return str(self.token_names[token] if token in self.token_names else self._names_by_id.get(token, token))
        return str(self.token_names[token]) if self.token_names is not None else str(token)

    @cached_property
    def _names_by_id(self) -> dict[Any, Any]:
        """A vocabulary says which number a word has."""
        return (
            {number: word for word, number in self.token_names.items()} if isinstance(self.token_names, Mapping) else {}
        )


class ReaderTokenizer:
    """What masking has to know about the tokens of a `TokenReader`, as `TokenizerWrapper` knows it of a tokenizer."""

    tokenizer = None
    config = None

    def __init__(self, reader: TokenReader) -> None:
        self.special_ids = set(reader.special_ids)
        self._ids_by_role = {"mask": reader.pad_id if reader.mask_id is None else reader.mask_id}

    def get_special_token_id(self, role: str) -> int | None:
        """Return the id of the token with this role, such as "mask"; None if there is none."""
        return self._ids_by_role.get(role)


class CustomTokenAdapter(CustomModelAdapter):
    """A model of one's own that reads a row of tokens."""

    stream = "text"
    input_names: ClassVar[tuple[str, ...]] = ("text",)
    grad_input_name = "tokens"
    processor: TokenReader

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.make_example_input()
        batch = self._collate_tokens([tokens])
        self.embedding_table: nn.Module | None = None
        self.input_argument, self.is_length_first = self._find_input_argument(batch, tokens)
        if self.processor.vector_size is None:
            self.embedding_table, self.is_length_first = self._find_embedding_table(batch, tokens)

    @property
    def embedding_modules(self) -> Sequence[nn.Module] | None:  # type: ignore[override]
        return None if self.embedding_table is None else [self.embedding_table]

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {self.stream: (self, self.input_argument)}

    @property
    def tokenizer_wrapper(self) -> ReaderTokenizer | None:
        """The tokens that have a role; None if there is none that masked tokens can be replaced by."""
        tokenizer = ReaderTokenizer(self.processor)
        return None if tokenizer.get_special_token_id("mask") is None else tokenizer

    def choose_default_readout(self) -> Readout | None:
        return QUERY_STREAM if self.has_pooling_query else "first"

    def make_example_input(self) -> Any:
        if self.processor.vector_size is None:
            return torch.tensor([1, 0, 1, 1])
        return torch.linspace(-3, 3, 4 * self.processor.vector_size).sin().reshape(4, -1)

    def _find_embedding_table(self, batch: Mapping[str, Any], tokens: Tensor) -> tuple[nn.Module, bool]:
        """The module that looks the tokens up, and whether it has the length before the batch."""
        modules, found = dict(self.model.named_modules()), list[tuple[str, Tensor]]()
        if self.processor.embedding_module is None:
            chosen = [name for name, module in modules.items() if isinstance(module, nn.Embedding)]
        else:
            chosen = [self.processor.embedding_module]

        def see(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                given = args[0] if args else None
                fits = isinstance(given, Tensor) and torch.equal(given.detach().cpu().flatten(), tokens)
                if (
                    isinstance(output, Tensor)
                    and output.dim() == 3
                    and (fits or self.processor.embedding_module is not None)
                ):
                    found.append((name, output))

            return hook

        with remove_hooks_on_exit([modules[name].register_forward_hook(see(name)) for name in chosen]):
            self.session.forward(batch)
        if len(found) != 1:
            names = ", ".join(name for name, _ in found) or ", ".join(chosen) or "it has no nn.Embedding"
            raise InputError(
                f"cannot determine which module of {self.model_class_name} embeds the tokens with one call per pass "
                f"({names}): specify it with embedding_module=, or set vector_size="
            )
        ((name, output),) = found
        return modules[name], output.shape[:2] == (len(tokens), 1)

    def _find_input_argument(self, batch: Mapping[str, Any], tokens: Tensor) -> tuple[str, bool]:
        """The argument that the tokens are handed over in, and whether it has the length before the batch."""
        whole = tokens[None].to(self.device)
        whole = whole.to(self.dtype) if whole.is_floating_point() else whole
        for name, part in batch.items():
            for length_first in (False, True):
                if isinstance(part, Tensor) and torch.equal(part, whole.transpose(0, 1) if length_first else whole):
                    return name, length_first
        raise InputError("inputs= must pass on the tokens unchanged, with the batch axis or the length axis first")

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return (self.input_argument,)

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if options.max_length is not None:
            raise InputError(
                "max_length= applies only to transformers tokenizers: truncate the text in the reader's read="
            )
        tokens = self._read_tokens(raw)
        alike = () if self.processor.pad_id is not None else (len(tokens),)
        return [
            Sample(
                {self.input_argument: tokens}, self.build_axes(self._build_units(tokens, raw, options)), batch_key=alike
            )
        ]

    def _read_tokens(self, raw: Any) -> Tensor:
        given = isinstance(raw, Tensor) or (isinstance(raw, np.ndarray) and raw.dtype.kind in "iuf")
        if not given and self.processor.read is None:
            raise InputError(f"the reader has no read=, so pass its tokens as a tensor, not {type(raw).__name__}")
        try:
            tokens = torch.as_tensor(raw if given or self.processor.read is None else self.processor.read(raw))
        except (TypeError, ValueError, RuntimeError) as problem:
            raise InputError(f"the reader's read= must return tokens as a list or tensor ({problem})") from None
        width, shape = self.processor.vector_size, tuple(tokens.shape)
        if width is not None and (tokens.dim() != 2 or shape[1] != width or not shape[0]):
            raise InputError(f"one input must be length × {width}, without a batch axis, but is {shape}")
        if width is None and (tokens.dim() != 1 or not shape[0] or tokens.is_floating_point()):
            raise InputError(
                f"one input must be a vector of integers, without a batch axis, but is {shape} of {tokens.dtype}"
            )
        count = getattr(self.embedding_table, "num_embeddings", None)
        if width is None and (int(tokens.min()) < 0 or (count is not None and int(tokens.max()) >= count)):
            raise InputError(f"tokens must be integers from 0 to {'…' if count is None else count - 1}")
        return tokens if width is not None else tokens.long()

    def _build_units(self, tokens: Tensor, raw: Any, how: InputOptions) -> Units:
        numbers = tokens.tolist() if self.processor.vector_size is None else []
        special = [number in self.processor.special_ids for number in numbers]
        names: Any = how.unit_names or [self.processor.get_token_name(number) for number in numbers] or None
        units = build_numbered_units(len(tokens), self.stream, names, special)
        if how.unit_names is not None or self.processor.token_names is None or not isinstance(raw, str):
            return units
        found = align_pieces([name for name, apart in zip(names, special, strict=True) if not apart], raw)
        if found is None:  # the names are not pieces of the text
            return units
        spans = iter(found)
        offsets = tuple((0, 0) if apart else next(spans) for apart in special)
        count = len(names)
        return Units(self.stream, "token", tuple(names), units.special, (raw,), (0,) * count, offsets)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return self._collate_tokens([sample.inputs[self.input_argument] for sample in samples])

    def _collate_tokens(self, rows: Sequence[Tensor]) -> dict[str, Any]:
        longest = max(map(len, rows))
        tokens = torch.stack([pad_to_length(row, longest, self.processor.pad_id or 0) for row in rows]).to(self.device)
        real: Bool[Tensor, "batch token"] = torch.tensor([[i < len(row) for i in range(longest)] for row in rows])
        tokens = tokens.to(self.dtype) if tokens.is_floating_point() else tokens
        return self.build_forward_kwargs(tokens, real.to(self.device))

    def make_padded_batch(self, sample: Sample) -> dict[str, Any] | None:
        """Two rows of different lengths, if they may share a batch: the model must give the shorter what it gives it
        alone."""
        if self.processor.pad_id is None:
            return None
        tokens = sample.inputs[self.input_argument]
        longer, shorter = (tokens, tokens[:-1]) if len(tokens) > 1 else (torch.cat([tokens, tokens]), tokens)
        batch = self._collate_tokens([longer, shorter])
        together, alone = (
            self.get_logits(self.session.forward(batch))[1],
            self.get_logits(self.session.forward(self._collate_tokens([shorter])))[0],
        )
        gap = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-12))
        if not gap <= RELATIVE_TOLERANCE_BY_DTYPE.get(alone.dtype, 1e-4):
            raise UnsupportedError(
                f"the scores of {self.model_class_name} change by {gap:.1e} (relative) when its input is padded: mask "
                "the padding in inputs=, or leave out pad=, so that only inputs of the same length share a batch"
            )
        return batch

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return self.add_query_vectors(only.transpose(0, 1) if self.is_length_first else only)

    def find_unsupported_reason(self, method: str) -> str | None:
        if self.is_length_first and METHOD_REGISTRY[method].declaration.pass_type is PassType.PATH:
            return (
                f"it interpolates between inputs along the batch axis, but {self.model_class_name} has the length axis "
                "before the batch axis"
            )
        return super().find_unsupported_reason(method)

    def find_layers_unsupported_reason(self) -> str | None:
        if self.is_length_first:
            return (
                f"it needs the input of each layer, in which {self.model_class_name} has the length axis before the "
                "batch axis"
            )
        return super().find_layers_unsupported_reason()


TokenReader.adapter_class = CustomTokenAdapter
