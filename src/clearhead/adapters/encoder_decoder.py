"""Adapters for encoder–decoders: attribute each output token to source tokens and to previous output tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import InputOptions, register_adapter, unbatch_inputs, unwrap_base_model
from clearhead.adapters.generation import GenerativeAdapter, PromptSample, make_units_from_ids
from clearhead.adapters.readers.text import TokenizerWrapper, pad_to_length
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.units import UnitAxis, Units

_CROSS_ATTENTION_PATTERN = re.compile(r"encoder_attn|encdec|cross", re.IGNORECASE)


class TargetTokenizerWrapper(TokenizerWrapper):
    """The same tokenizer, as it reads what the model is to say."""

    def call_tokenizer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "encode":
            return super().call_tokenizer("__call__", text_target=args[0], **kwargs)["input_ids"]
        return super().call_tokenizer(method, *args, **kwargs)


class EncoderDecoderAdapter(GenerativeAdapter):
    """What is common to them: the source is one stream, the prefix (the start token and the answer) another.

    An input alone asks for all that the model says about it; `answer="…"` explains what it is to have said.
    """

    stream = "source"
    decoder_stream = "prefix"
    sequence_inputs = ("decoder_input_ids",)
    explains_full_output = True
    #: What of the inputs belongs to the source.
    source_inputs: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = str(getattr(self.model.config, "model_type", ""))
        if kind in _UNSUPPORTED_MODEL_TYPES:
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} cannot be explained: {_UNSUPPORTED_MODEL_TYPES[kind]}"
            )
        if getattr(self.model.config, "moe_eval_capacity_token_fraction", 1.0) < 1.0:
            raise UnsupportedError(
                f"the experts of {type(unwrap_base_model(self.model)).__name__} have a limited capacity per batch, so "
                "the inputs of a batch would affect each other: set config.moe_eval_capacity_token_fraction = 1.0"
            )
        self.tokenizer_wrapper = TargetTokenizerWrapper(self.tokenizer, self.model, self.decoder_stream)
        self.special_ids = set(getattr(self.tokenizer, "all_special_ids", ())) | self.tokenizer_wrapper.special_ids

    @property
    def tokenizer(self) -> Any:
        return self.processor

    @property
    def embedding_modules(self) -> list[nn.Module]:  # type: ignore[override]
        """Where words are looked up, the source's first."""
        model: Any = unwrap_base_model(self.model)
        tables = [_get_embedding_table(half) for half in (model.get_encoder(), model.get_decoder())]
        return list({id(table): table for table in tables}.values())

    @property
    def decoder_start_token_id(self) -> int:
        """The token that an answer starts from."""
        for part in (getattr(self.model, "generation_config", None), self.model.config):
            for kind in ("decoder_start_token_id", "bos_token_id"):
                known = getattr(part, kind, None)
                if isinstance(known, int):
                    return known
        raise InputError("the model does not define the start token of its output: set config.decoder_start_token_id")

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        if "decoder" not in module.split("."):
            return self.stream, self.stream
        return self.decoder_stream, self.stream if _CROSS_ATTENTION_PATTERN.search(module) else self.decoder_stream

    def append_continuation(self, sample: PromptSample, continuation_ids: Sequence[int]) -> PromptSample:
        return self.set_decoder_prefix(sample, [int(sample.inputs["decoder_input_ids"][0]), *continuation_ids])

    def set_decoder_prefix(self, sample: PromptSample, prefix_ids: list[int]) -> PromptSample:
        """The sample with what was said, start token first; marks around the answer are no words of it."""
        while len(prefix_ids) > 1 and prefix_ids[-1] in self.find_eos_ids():
            prefix_ids = prefix_ids[:-1]
        lead = 0
        while lead + 1 < len(prefix_ids) and prefix_ids[lead + 1] in self.special_ids:
            lead += 1
        if len(prefix_ids) > self.tokenizer_wrapper.max_positions:
            raise InputError(
                f"the continuation has {len(prefix_ids)} tokens, more than the model's maximum "
                f"({self.tokenizer_wrapper.max_positions}): shorten it"
            )
        inputs = {**sample.inputs, "decoder_input_ids": torch.tensor(prefix_ids)}
        axes = {**sample.axes, self.decoder_stream: UnitAxis.concat(self._build_prefix_units(prefix_ids))}
        return replace(
            sample, inputs=inputs, axes=axes, first_predicting_row=lead, continuation_ids=tuple(prefix_ids[lead + 1 :])
        )

    def _build_prefix_units(self, prefix: list[int]) -> Units:
        return make_units_from_ids(
            self.tokenizer_wrapper, prefix, [not place or one in self.special_ids for place, one in enumerate(prefix)]
        )

    def apply_continuation_options(self, sample: PromptSample, options: InputOptions) -> PromptSample:
        """The sample as `answer=` and `max_new_tokens=` have it."""
        sample = replace(sample, max_new_tokens=options.max_new_tokens)
        if options.continuation is None:
            return sample
        if isinstance(options.continuation, str):
            prefix = self.shift_labels_right(
                list(
                    self.encode_continuation(
                        options.continuation, lambda text: self.tokenizer_wrapper.call_tokenizer("encode", text)
                    )
                )
            )
        else:
            prefix = [self.decoder_start_token_id, *self.encode_continuation(options.continuation, None)]
        sample = self.set_decoder_prefix(sample, prefix)
        if not sample.continuation_ids:
            raise InputError(
                f"answer={options.continuation!r:.60} contains no token: leave it out to explain the text that the "
                "model generates"
            )
        return replace(sample, is_user_continuation=True)

    def shift_labels_right(self, labels: list[int]) -> list[int]:
        """What the decoder has seen before each label: each family puts its start tokens in its own way."""
        if labels[-1] not in self.special_ids:
            labels = [*labels, self.tokenizer_wrapper.get_special_token_id("eos") or self.decoder_start_token_id]
        shift = getattr(unwrap_base_model(self.model), "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            return [self.decoder_start_token_id, *labels[:-1]]
        return shift(labels=torch.tensor([labels]))[0].tolist()

    def generate_ids(self, sample: PromptSample, max_new_tokens: int) -> Sequence[int]:
        room = self.tokenizer_wrapper.max_positions - 1
        marks = 3  # a language's mark and its like come before the first word
        source = {name: sample.inputs[name] for name in self.source_inputs if name in sample.inputs}
        said = self.generate_greedily(sample, min(max_new_tokens + marks, room), **source)[1:]
        lead = next((place for place, one in enumerate(said) if one not in self.special_ids), len(said))
        return said[: lead + max_new_tokens]

    def check_causal(self) -> None:
        (sample,) = self.make_samples(self.make_example_input(), InputOptions())
        batch = self.collate([sample])
        one, other = self.make_causality_probe()
        if not self.logits_agree([{**batch, "decoder_input_ids": ids[None]} for ids in (one, other)]):
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} cannot be explained: its output tokens depend on "
                "later tokens"
            )

    def pad_prefixes(self, samples: Sequence[Sample]) -> Tensor:
        longest = max(len(sample.inputs["decoder_input_ids"]) for sample in samples)
        fill = self.tokenizer_wrapper.pad_id
        return torch.stack([pad_to_length(sample.inputs["decoder_input_ids"], longest, fill) for sample in samples])


def _get_embedding_table(half: Any) -> nn.Module:
    """Where one half looks its words up; FSMT's halves are plain modules, which do not say."""
    return half.get_input_embeddings() if hasattr(half, "get_input_embeddings") else half.embed_tokens


@register_adapter
class TextToTextAdapter(EncoderDecoderAdapter):
    """Texts in, texts out: translation, summaries, spelling."""

    input_names = ("text",)
    processor_class = "AutoTokenizer"
    grad_input_name = "input_ids"
    source_inputs = ("input_ids", "attention_mask")
    class_suffixes: ClassVar[tuple[str, ...]] = (
        *(f"{name}ForConditionalGeneration" for name in ("Bart", "T5", "T5Gemma", "Pegasus", "PegasusX", "M2M100")),
        *(f"{name}ForConditionalGeneration" for name in ("Blenderbot", "BlenderbotSmall", "Mvp", "FSMT", "LED")),
        *(f"{name}ForConditionalGeneration" for name in ("ProphetNet", "SwitchTransformers", "NllbMoe")),
        "MarianMTModel",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processor is not None and not hasattr(self.processor, "convert_ids_to_tokens"):
            raise InputError(
                f"{type(unwrap_base_model(self.model)).__name__} takes texts, but was loaded with a "
                f"{type(self.processor).__name__}, which is not a tokenizer: pass its tokenizer instead"
            )
        self.source_tokenizer_wrapper = TokenizerWrapper(self.processor, self.model, self.stream)

    def make_example_input(self) -> Any:
        # Not as long as the prefix, or a stream that is taken for the other would go unnoticed.
        ids = torch.arange(3, 8)[None] % self.vocab_size
        return {
            "input_ids": ids,
            "decoder_input_ids": torch.cat([torch.tensor([[self.decoder_start_token_id]]), ids[:, :3]], 1),
        }

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [
                self.apply_continuation_options(self._sample_from_model_inputs(part, options), options)
                for part in unbatch_inputs(self, raw)
            ]
        if not isinstance(raw, str):
            raise InputError(f"expected a text or model inputs, but got {type(raw).__name__} ({raw!r:.40})")
        tokens = self.source_tokenizer_wrapper.encode_texts((raw,), options)
        inputs = {name: part for name, part in tokens.inputs.items() if name in self.source_inputs}
        return [
            self.apply_continuation_options(self._build_sample(inputs, tokens.units, tokens.num_truncated), options)
        ]

    def _build_sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> PromptSample:
        special = [
            flag or one in self.special_ids
            for flag, one in zip(units.special, inputs["input_ids"].tolist(), strict=True)
        ]
        units = replace(units, special=tuple(special))
        start = {"decoder_input_ids": torch.tensor([self.decoder_start_token_id])}
        axes = {
            self.stream: UnitAxis.concat(units),
            self.decoder_stream: UnitAxis.concat(self._build_prefix_units([self.decoder_start_token_id])),
        }
        return PromptSample({**inputs, **start}, axes, num_truncated=dropped)

    def _sample_from_model_inputs(self, part: dict[str, Tensor], how: InputOptions) -> PromptSample:
        """One sample of the caller's own model inputs."""
        known = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
        if "input_ids" not in part or part.keys() - known:
            raise InputError(f"model inputs must be {', '.join(sorted(known))}, but are {', '.join(part) or 'nothing'}")
        ids, mask = part["input_ids"], part.get("attention_mask")
        if ids.dim() != 1 or ids.is_floating_point():
            raise InputError(
                f"input_ids must be integers, batch × token, but one sample has the shape {tuple(ids.shape)}"
            )
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        if seen.shape != ids.shape or not seen.any():
            raise InputError(
                "attention_mask must have one value for each token of input_ids and must not exclude all tokens"
            )
        # Padding after the source is cut off; what else is hidden stays so.
        length = int(seen.nonzero().max()) + 1
        inputs = {name: part[name][:length] for name in self.source_inputs if name in part}
        names = how.unit_names if how.unit_names is None or isinstance(how.unit_names[0], str) else how.unit_names[0]
        hidden = (~seen[:length]).tolist()
        units = self.source_tokenizer_wrapper.make_units(ids[:length].tolist(), names, hidden)  # type: ignore[arg-type]
        sample = self._build_sample(inputs, units)
        prefix = part.get("decoder_input_ids")
        if prefix is None:
            return sample
        kept = part.get("decoder_attention_mask")
        if kept is None:
            return replace(self.set_decoder_prefix(sample, prefix.tolist()), is_user_continuation=len(prefix) > 1)
        seen_prefix = kept.nonzero().flatten().tolist()
        if not seen_prefix or seen_prefix != list(range(seen_prefix[0], seen_prefix[-1] + 1)):
            raise InputError("decoder_attention_mask may mask padding around decoder_input_ids, but nothing else")
        start, prefix = seen_prefix[0], prefix[kept != 0]
        sample = replace(self.set_decoder_prefix(sample, prefix.tolist()), is_user_continuation=len(prefix) > 1)
        gap = self.padding_gap(part, sample, start) if start else 0.0
        if not gap <= RELATIVE_TOLERANCE_BY_DTYPE.get(self.dtype, 1e-4):
            raise self.padding_error(start, gap)
        return sample

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        about = {"model": self.model, "model_class_name": self.model_class_name, "readout": None}
        source, said = (
            SimpleNamespace(tokenizer_wrapper=wrapper, **about)
            for wrapper in (self.source_tokenizer_wrapper, self.tokenizer_wrapper)
        )
        return {self.stream: (source, "input_ids"), self.decoder_stream: (said, "decoder_input_ids")}

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "decoder_input_ids"

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.inputs["input_ids"]) for sample in samples)
        ids = [
            pad_to_length(sample.inputs["input_ids"], longest, self.source_tokenizer_wrapper.pad_id)
            for sample in samples
        ]
        ones = [s.inputs.get("attention_mask", torch.ones_like(s.inputs["input_ids"])) for s in samples]
        batch = {
            "input_ids": torch.stack(ids),
            "attention_mask": torch.stack([pad_to_length(mask, longest, 0) for mask in ones]),
            "decoder_input_ids": self.pad_prefixes(samples),
        }
        return {**{name: part.to(self.device) for name, part in batch.items()}, **self.make_forward_kwargs(samples)}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: vectors["input_ids"], self.decoder_stream: vectors["decoder_input_ids"]}


#: Models whose answer would be wrong, and why.
_UNSUPPORTED_MODEL_TYPES = {
    "led": "it attends within chunks and pads its input to whole chunks, so no attention map covers the text",
    "prophetnet": "it predicts several tokens at once, in streams that its attention does not distinguish",
}
