"""Encoder–decoders: what each word of an answer owes to the source, and to the words that were said before it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import How, Sample, base_model, register_subject, split_mapping
from clearhead.adapters.generation import Answered, Answering, said_units
from clearhead.adapters.readers.text import Words, padded
from clearhead.capture.checks.self_test import TOLERANCE
from clearhead.errors import InputError, Refusal
from clearhead.units import Axis, Units

_CROSS = re.compile(r"encoder_attn|encdec|cross", re.IGNORECASE)


class TargetWords(Words):
    """The same tokenizer, as it reads what the model is to say."""

    def ask(self, verb: str, *given: Any, **how: Any) -> Any:
        if verb == "encode":
            return super().ask("__call__", text_target=given[0], **how)["input_ids"]
        return super().ask(verb, *given, **how)


class EncoderDecoder(Answering):
    """What is common to them: the source is one stream, the prefix (the start token and the answer) another.

    An input alone asks for all that the model says about it; `answer="…"` explains what it is to have said.
    """

    stream = "source"
    speaking = "prefix"
    along = ("decoder_input_ids",)
    answers_whole = True
    #: What of the inputs belongs to the source.
    sources: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = str(getattr(self.model.config, "model_type", ""))
        if kind in _REFUSED:
            raise Refusal(f"{type(base_model(self.model)).__name__} cannot be explained: {_REFUSED[kind]}")
        if getattr(self.model.config, "moe_eval_capacity_token_fraction", 1.0) < 1.0:
            raise Refusal(
                f"the experts of {type(base_model(self.model)).__name__} have room for a share of a batch only, so "
                "inputs would take room from each other: set config.moe_eval_capacity_token_fraction = 1.0"
            )
        self.words = TargetWords(self.tokenizer, self.model, self.speaking)
        self.specials = set(getattr(self.tokenizer, "all_special_ids", ())) | self.words.outside

    @property
    def tokenizer(self) -> Any:
        return self.processor

    @property
    def lookups(self) -> list[nn.Module]:  # type: ignore[override]
        """Where words are looked up, the source's first."""
        model: Any = base_model(self.model)
        tables = [_table_of(half) for half in (model.get_encoder(), model.get_decoder())]
        return list({id(table): table for table in tables}.values())

    @property
    def start(self) -> int:
        """The token that an answer starts from."""
        for part in (getattr(self.model, "generation_config", None), self.model.config):
            for kind in ("decoder_start_token_id", "bos_token_id"):
                known = getattr(part, kind, None)
                if isinstance(known, int):
                    return known
        raise InputError("the model does not say which token starts an answer: set config.decoder_start_token_id")

    def streams_of(self, module: str, nth: int) -> tuple[str, str]:
        if "decoder" not in module.split("."):
            return self.stream, self.stream
        return self.speaking, self.stream if _CROSS.search(module) else self.speaking

    def with_answer(self, sample: Answered, answer: Sequence[int]) -> Answered:
        return self.with_prefix(sample, [int(sample.inputs["decoder_input_ids"][0]), *answer])

    def with_prefix(self, sample: Answered, prefix: list[int]) -> Answered:
        """The sample with what was said, start token first; marks around the answer are no words of it."""
        while len(prefix) > 1 and prefix[-1] in self.ends():
            prefix = prefix[:-1]
        lead = 0
        while lead + 1 < len(prefix) and prefix[lead + 1] in self.specials:
            lead += 1
        if len(prefix) > self.words.positions:
            raise InputError(
                f"the answer has {len(prefix)} tokens, more than the model takes ({self.words.positions}): shorten it"
            )
        inputs = {**sample.inputs, "decoder_input_ids": torch.tensor(prefix)}
        axes = {**sample.axes, self.speaking: Axis.of(self._prefix_units(prefix))}
        return replace(sample, inputs=inputs, axes=axes, first=lead, answer=tuple(prefix[lead + 1 :]))

    def _prefix_units(self, prefix: list[int]) -> Units:
        return said_units(self.words, prefix, [not place or one in self.specials for place, one in enumerate(prefix)])

    def answered(self, sample: Answered, how: How) -> Answered:
        """The sample as `answer=` and `max_new_tokens=` have it."""
        sample = replace(sample, most=how.max_new_tokens)
        if how.answer is None:
            return sample
        if isinstance(how.answer, str):
            prefix = self.shifted(list(self.answer_ids(how.answer, lambda text: self.words.ask("encode", text))))
        else:
            prefix = [self.start, *self.answer_ids(how.answer, None)]
        sample = self.with_prefix(sample, prefix)
        if not sample.answer:
            raise InputError(f"answer={how.answer!r:.60} holds no word: leave it out to explain what the model says")
        return replace(sample, given=True)

    def shifted(self, labels: list[int]) -> list[int]:
        """What the decoder has seen before each label: each family puts its start tokens in its own way."""
        if labels[-1] not in self.specials:
            labels = [*labels, self.words.token_id("eos") or self.start]
        shift = getattr(base_model(self.model), "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            return [self.start, *labels[:-1]]
        return shift(labels=torch.tensor([labels]))[0].tolist()

    def say(self, sample: Answered, count: int) -> Sequence[int]:
        room = self.words.positions - 1
        marks = 3  # a language's mark and its like come before the first word
        source = {name: sample.inputs[name] for name in self.sources if name in sample.inputs}
        said = self.generate(sample, min(count + marks, room), **source)[1:]
        lead = next((place for place, one in enumerate(said) if one not in self.specials), len(said))
        return said[: lead + count]

    def check_causal(self) -> None:
        (sample,) = self.samples(self.example(), How())
        batch = self.collate([sample])
        one, other = self.probe()
        if not self.compared([{**batch, "decoder_input_ids": ids[None]} for ids in (one, other)]):
            raise Refusal(
                f"{type(base_model(self.model)).__name__}: the words of its answer depend on those after them"
            )

    def padded_prefixes(self, samples: Sequence[Sample]) -> Tensor:
        longest = max(len(sample.inputs["decoder_input_ids"]) for sample in samples)
        fill = self.words.pad
        return torch.stack([padded(sample.inputs["decoder_input_ids"], longest, fill) for sample in samples])


def _table_of(half: Any) -> nn.Module:
    """Where one half looks its words up; FSMT's halves are plain modules, which do not say."""
    return half.get_input_embeddings() if hasattr(half, "get_input_embeddings") else half.embed_tokens


@register_subject
class TextToText(EncoderDecoder):
    """Texts in, texts out: translation, summaries, spelling."""

    takes = ("text",)
    processor_class = "AutoTokenizer"
    leaf = "input_ids"
    sources = ("input_ids", "attention_mask")
    endings: ClassVar[tuple[str, ...]] = (
        *(f"{name}ForConditionalGeneration" for name in ("Bart", "T5", "T5Gemma", "Pegasus", "PegasusX", "M2M100")),
        *(f"{name}ForConditionalGeneration" for name in ("Blenderbot", "BlenderbotSmall", "Mvp", "FSMT", "LED")),
        *(f"{name}ForConditionalGeneration" for name in ("ProphetNet", "SwitchTransformers", "NllbMoe")),
        "MarianMTModel",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.processor is not None and not hasattr(self.processor, "convert_ids_to_tokens"):
            raise InputError(
                f"{type(base_model(self.model)).__name__} takes texts, but came with a "
                f"{type(self.processor).__name__}, which is no tokenizer: give its tokenizer"
            )
        self.reader = Words(self.processor, self.model, self.stream)

    def example(self) -> Any:
        # Not as long as the prefix, or a stream that is taken for the other would go unnoticed.
        ids = torch.arange(3, 8)[None] % self.vocabulary
        return {"input_ids": ids, "decoder_input_ids": torch.cat([torch.tensor([[self.start]]), ids[:, :3]], 1)}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [self.answered(self._given(part, how), how) for part in split_mapping(self, raw)]
        if not isinstance(raw, str):
            raise InputError(f"expected a text or model inputs, but got {type(raw).__name__} ({raw!r:.40})")
        tokens = self.reader.read((raw,), how)
        inputs = {name: part for name, part in tokens.inputs.items() if name in self.sources}
        return [self.answered(self._sample(inputs, tokens.units, tokens.dropped), how)]

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Answered:
        special = [
            flag or one in self.specials for flag, one in zip(units.special, inputs["input_ids"].tolist(), strict=True)
        ]
        units = replace(units, special=tuple(special))
        start = {"decoder_input_ids": torch.tensor([self.start])}
        axes = {self.stream: Axis.of(units), self.speaking: Axis.of(self._prefix_units([self.start]))}
        return Answered({**inputs, **start}, axes, dropped=dropped)

    def _given(self, part: dict[str, Tensor], how: How) -> Answered:
        """One sample of the caller's own model inputs."""
        known = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"}
        if "input_ids" not in part or part.keys() - known:
            raise InputError(f"model inputs must be {', '.join(sorted(known))}, but are {', '.join(part) or 'nothing'}")
        ids, mask = part["input_ids"], part.get("attention_mask")
        if ids.dim() != 1 or ids.is_floating_point():
            raise InputError(f"input_ids must be batch × token whole numbers, but one sample is {tuple(ids.shape)}")
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
        if seen.shape != ids.shape or not seen.any():
            raise InputError("the attention mask must have the tokens of input_ids, and hide not all of them")
        # Padding after the source is cut off; what else is hidden stays so.
        length = int(seen.nonzero().max()) + 1
        inputs = {name: part[name][:length] for name in self.sources if name in part}
        names = how.tokens if how.tokens is None or isinstance(how.tokens[0], str) else how.tokens[0]
        sample = self._sample(inputs, self.reader.units_of(ids[:length].tolist(), names, (~seen[:length]).tolist()))  # type: ignore[arg-type]
        prefix = part.get("decoder_input_ids")
        if prefix is None:
            return sample
        kept = part.get("decoder_attention_mask")
        if kept is None:
            return replace(self.with_prefix(sample, prefix.tolist()), given=len(prefix) > 1)
        seen_prefix = kept.nonzero().flatten().tolist()
        if not seen_prefix or seen_prefix != list(range(seen_prefix[0], seen_prefix[-1] + 1)):
            raise InputError("decoder_attention_mask may hide padding around decoder_input_ids, and nothing else")
        start, prefix = seen_prefix[0], prefix[kept != 0]
        sample = replace(self.with_prefix(sample, prefix.tolist()), given=len(prefix) > 1)
        gap = self.padding_gap(part, sample, start) if start else 0.0
        if not gap <= TOLERANCE.get(self.dtype, 1e-4):
            raise self.padding_error(start, gap)
        return sample

    @property
    def readers(self) -> dict[str, tuple[Any, str]]:
        about = {"model": self.model, "model_class": self.model_class, "readout": None}
        source, said = (SimpleNamespace(words=words, **about) for words in (self.reader, self.words))
        return {self.stream: (source, "input_ids"), self.speaking: (said, "decoder_input_ids")}

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "decoder_input_ids"

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        longest = max(len(sample.inputs["input_ids"]) for sample in samples)
        ids = [padded(sample.inputs["input_ids"], longest, self.reader.pad) for sample in samples]
        ones = [s.inputs.get("attention_mask", torch.ones_like(s.inputs["input_ids"])) for s in samples]
        batch = {
            "input_ids": torch.stack(ids),
            "attention_mask": torch.stack([padded(mask, longest, 0) for mask in ones]),
            "decoder_input_ids": self.padded_prefixes(samples),
        }
        return {**{name: part.to(self.device) for name, part in batch.items()}, **self.settings(samples)}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: vectors["input_ids"], self.speaking: vectors["decoder_input_ids"]}


#: Models whose answer would be wrong, and why.
_REFUSED = {
    "led": "it attends in chunks and pads its input to whole ones, so no map of its attention covers the text",
    "prophetnet": "it predicts several words at once, in streams that its attention does not tell apart",
}
