"""Adapter for speech to text (Whisper): attribute each output token to audio frames and to previous output tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.audio import WhisperClassificationAdapter
from clearhead.adapters.base import InputOptions, register_adapter
from clearhead.adapters.encoder_decoder import EncoderDecoderAdapter
from clearhead.adapters.generation import PromptSample
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.units import UnitAxis


@register_adapter
class SpeechToTextAdapter(EncoderDecoderAdapter, WhisperClassificationAdapter):
    """Whisper: the source is thirty seconds of sound. Language and task are those that its tokenizer is set to."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("WhisperForConditionalGeneration",)
    processor_class = "AutoProcessor"
    source_inputs = ("input_features",)

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", None)

    @property
    def embedding_modules(self) -> list[nn.Module]:  # type: ignore[override]
        return [self.model.get_decoder().get_input_embeddings()]

    def count_expected_calls(self) -> int | None:
        return int(self.model.config.encoder_layers + 2 * self.model.config.decoder_layers)

    def find_attention_unsupported_reason(self) -> str | None:
        return None

    @property
    def decoder_prefix_ids(self) -> list[int]:
        """What an answer starts from: the start token, a language, a task."""
        return list(getattr(self.tokenizer, "prefix_tokens", ())) or [self.decoder_start_token_id]

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if not isinstance(raw, Mapping):
            return [
                self._add_decoder_prefix(sample, None, options)
                for sample in WhisperClassificationAdapter.make_samples(self, raw, options)
            ]
        given = dict(raw)
        prefixes = given.pop("decoder_input_ids", None)
        found = WhisperClassificationAdapter.make_samples(self, given, options)
        if prefixes is not None and len(prefixes) != len(found):
            raise InputError(f"decoder_input_ids has {len(prefixes)} rows for {len(found)} audio inputs")
        said = [None] * len(found) if prefixes is None else [torch.as_tensor(prefix).tolist() for prefix in prefixes]
        return [self._add_decoder_prefix(sample, prefix, options) for sample, prefix in zip(found, said, strict=True)]

    def _add_decoder_prefix(self, sample: Sample, prefix: list[int] | None, how: InputOptions) -> Sample:
        """The sound, and the marks that an answer starts from or what was said already."""
        (frames,) = (
            sample.axes[self.stream].unit_groups if self.stream in sample.axes else sample.axes["audio"].unit_groups
        )
        axes = {self.stream: UnitAxis.concat(replace(frames, stream=self.stream))}
        heard = PromptSample(dict(sample.inputs), axes, batch_key=sample.batch_key)
        begun = self.set_decoder_prefix(heard, prefix or self.decoder_prefix_ids)
        given = prefix is not None and bool(begun.continuation_ids)
        return self.apply_continuation_options(
            replace(begun, is_user_continuation=given), replace(how, unit_names=None)
        )

    def append_continuation(self, sample: PromptSample, continuation_ids: Sequence[int]) -> PromptSample:
        return self.set_decoder_prefix(sample, [*self.decoder_prefix_ids, *continuation_ids])

    def shift_labels_right(self, labels: list[int]) -> list[int]:
        """The tokenizer puts the marks before the answer itself."""
        return labels if labels[:1] == self.decoder_prefix_ids[:1] else [*self.decoder_prefix_ids, *labels]

    def generate_ids(self, sample: PromptSample, max_new_tokens: int) -> Sequence[int]:
        from transformers import GenerationMixin

        start = torch.tensor(self.decoder_prefix_ids)
        room = self.tokenizer_wrapper.max_positions - len(start)
        # Whisper's own generation cuts long sounds and tries again at other temperatures; this is one plain pass.
        said = self.generate_greedily(
            sample,
            min(max_new_tokens, room),
            generate_function=GenerationMixin.generate,
            input_features=sample.inputs["input_features"].to(self.dtype),
            decoder_input_ids=start,
        )
        return [one for one in said[len(start) :] if one not in self.find_eos_ids()]

    def make_example_input(self) -> Any:
        prefix = torch.cat([torch.tensor([self.decoder_start_token_id]), torch.arange(3, 6) % self.vocab_size])
        return {**WhisperClassificationAdapter.make_example_input(self), "decoder_input_ids": prefix[None]}

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_features", "decoder_input_ids"

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        features = torch.stack([sample.inputs["input_features"] for sample in samples])
        return {
            "input_features": features.to(self.device, self.dtype),
            "decoder_input_ids": self.pad_prefixes(samples).to(self.device),
            **self.make_forward_kwargs(samples),
        }

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """A frame's share of the spectrogram; a word's embedding."""
        sound = (
            vectors["input_features"].transpose(1, 2).unflatten(1, (-1, self.spectrogram_frames_per_unit)).flatten(2)
        )
        return {self.stream: sound, self.decoder_stream: vectors["decoder_input_ids"]}
