"""Speech to text: what each word owes to the frames of a sound, and to the words that were said before it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.audio import WhisperClassification
from clearhead.adapters.base import How, Sample, register_subject
from clearhead.adapters.encoder_decoder import EncoderDecoder
from clearhead.adapters.generation import Answered
from clearhead.errors import InputError
from clearhead.units import Axis


@register_subject
class SpeechToText(EncoderDecoder, WhisperClassification):
    """Whisper: the source is thirty seconds of sound. Language and task are those that its tokenizer is set to."""

    endings: ClassVar[tuple[str, ...]] = ("WhisperForConditionalGeneration",)
    processor_class = "AutoProcessor"
    sources = ("input_features",)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", None)

    @property
    def lookups(self) -> list[nn.Module]:  # type: ignore[override]
        return [self.model.get_decoder().get_input_embeddings()]

    def expected_calls(self) -> int | None:
        return int(self.model.config.encoder_layers + 2 * self.model.config.decoder_layers)

    def why_no_attention(self) -> str | None:
        return None

    @property
    def marks(self) -> list[int]:
        """What an answer starts from: the start token, a language, a task."""
        return list(getattr(self.tokenizer, "prefix_tokens", ())) or [self.start]

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if not isinstance(raw, Mapping):
            return [self._heard(sample, None, how) for sample in WhisperClassification.samples(self, raw, how)]
        given = dict(raw)
        prefixes = given.pop("decoder_input_ids", None)
        found = WhisperClassification.samples(self, given, how)
        if prefixes is not None and len(prefixes) != len(found):
            raise InputError(f"decoder_input_ids has {len(prefixes)} rows for {len(found)} sounds")
        said = [None] * len(found) if prefixes is None else [torch.as_tensor(prefix).tolist() for prefix in prefixes]
        return [self._heard(sample, prefix, how) for sample, prefix in zip(found, said, strict=True)]

    def _heard(self, sample: Sample, prefix: list[int] | None, how: How) -> Sample:
        """The sound, and the marks that an answer starts from or what was said already."""
        (frames,) = sample.axes[self.stream].parts if self.stream in sample.axes else sample.axes["audio"].parts
        axes = {self.stream: Axis.of(replace(frames, stream=self.stream))}
        heard = Answered(dict(sample.inputs), axes, alike=sample.alike)
        begun = self.with_prefix(heard, prefix or self.marks)
        given = prefix is not None and bool(begun.answer)
        return self.answered(replace(begun, given=given), replace(how, tokens=None))

    def with_answer(self, sample: Answered, answer: Sequence[int]) -> Answered:
        return self.with_prefix(sample, [*self.marks, *answer])

    def shifted(self, labels: list[int]) -> list[int]:
        """The tokenizer puts the marks before the answer itself."""
        return labels if labels[:1] == self.marks[:1] else [*self.marks, *labels]

    def say(self, sample: Answered, count: int) -> Sequence[int]:
        from transformers import GenerationMixin

        start = torch.tensor(self.marks)
        room = self.words.positions - len(start)
        # Whisper's own generation cuts long sounds and tries again at other temperatures; this is one plain pass.
        said = self.generate(
            sample,
            min(count, room),
            by=GenerationMixin.generate,
            input_features=sample.inputs["input_features"].to(self.dtype),
            decoder_input_ids=start,
        )
        return [one for one in said[len(start) :] if one not in self.ends()]

    def example(self) -> Any:
        prefix = torch.cat([torch.tensor([self.start]), torch.arange(3, 6) % self.vocabulary])
        return {**WhisperClassification.example(self), "decoder_input_ids": prefix[None]}

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_features", "decoder_input_ids"

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        features = torch.stack([sample.inputs["input_features"] for sample in samples])
        return {
            "input_features": features.to(self.device, self.dtype),
            "decoder_input_ids": self.padded_prefixes(samples).to(self.device),
            **self.settings(samples),
        }

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """A frame's share of the spectrogram; a word's embedding."""
        sound = vectors["input_features"].transpose(1, 2).unflatten(1, (-1, self.each)).flatten(2)
        return {self.stream: sound, self.speaking: vectors["decoder_input_ids"]}
