"""Dual encoders: a text and a picture (or a sound) go through towers of their own, and meet in one cosine.

The towers never look at each other, so each is explained by itself, given the other. Each pair of a batch is a sample
of its own: only the diagonal of the model's similarities is explained, and no sample sees another. Many texts × many
pictures are explained by giving every pair.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Given, How, Readout, Sample, base_model, class_names, register_subject
from clearhead.adapters.similarity import Pairs, Vectors, said
from clearhead.adapters.towers import END, POOLED, TextHalf, halves_of
from clearhead.capture.checks.self_test import expected_calls
from clearhead.errors import InputError, Refusal
from clearhead.targets import Target
from clearhead.units import PROBE, Axis, Units

#: Dual encoders whose answer would be wrong, and why.
_REFUSED = {
    "GroupViTModel": "its picture tower sorts patches into groups by hard choices, so its grid shrinks from stage to "
    "stage and no row of attention covers the picture",
    "XCLIPModel": "it reads videos, and its text vectors depend on all texts and pictures of a batch together",
}


class Dual(Pairs):
    """What all dual encoders share: the text tower, and the pair as an input by name."""

    stream = "text"
    leaf = "input_ids"
    processor_class = "AutoProcessor"
    #: The inputs of the other tower.
    others: ClassVar[tuple[str, ...]]
    texts: TextHalf

    def __post_init__(self) -> None:
        name = type(base_model(self.model)).__name__
        refused = next((why for kind, why in _REFUSED.items() if kind in class_names(self.model)), None)
        if refused is not None:
            raise Refusal(f"{name} cannot be explained: {refused}")
        if self.readout is not None:
            raise InputError(f"each tower of {name} is read at a place of its own: leave readout= out")
        self.open_halves()
        super().__post_init__()
        self.lookups = [self.texts.embeddings]  # type: ignore[misc]

    def open_halves(self) -> None:
        """The towers as subjects of their own."""
        raise NotImplementedError

    def of_other(self, raw: Any, how: How) -> list[Sample]:
        """The other input as samples."""
        raise NotImplementedError

    def part_of_processor(self, kind: str) -> Any:
        """The tokenizer, the image processor … out of a processor that has several, or alone."""
        whole = self.processor
        if whole is None or hasattr(whole, kind):
            return getattr(whole, kind, None)
        is_tokenizer = hasattr(whole, "convert_ids_to_tokens")
        return whole if is_tokenizer == (kind == "tokenizer") else None

    def samples(self, raw: Any, how: How) -> list[Sample]:
        first, second = self.takes
        if isinstance(raw, Mapping):
            parts = {name: part for name, part in raw.items() if name not in self.others}
            texts = self.texts.samples(parts, how)
            others = self.of_other({name: part for name, part in raw.items() if name in self.others}, How())
            if len(texts) != len(others):
                raise InputError(
                    f"there are {len(texts)} texts and {len(others)} inputs of the other kind ({second}): they go pair "
                    "by pair, so give every pair"
                )
        else:
            if not isinstance(raw, Given):
                raise InputError(
                    f"{self.name} takes two inputs, each by name: explain({first}=…, {second}=…), not one alone"
                )
            given = raw
            missing = [f"{stream}=" for stream in self.takes if getattr(given, stream) is None]
            if missing:
                raise InputError(
                    f"{self.name} takes a text and {second}: explain({first}=…, {second}=…); missing: "
                    f"{', '.join(missing)}"
                )
            if how.tokens is not None:
                raise InputError("tokens= names the units of model inputs; a text's units have names of their own")
            texts, others = self.texts.samples(given.text, how), self.of_other(getattr(given, second), How())
        return [self.joined_sample(text, other) for text, other in zip(texts, others, strict=True)]

    def joined_sample(self, text: Sample, other: Sample) -> Sample:
        inputs = {**text.inputs, **other.inputs}
        return Sample(inputs, {**text.axes, **other.axes}, dropped=text.dropped, picture=other.picture)

    def text_sample(self, sample: Sample) -> Sample:
        inputs = {name: part for name, part in sample.inputs.items() if name not in self.others}
        return Sample(inputs, {"text": sample.axes["text"]})

    def example_ids(self) -> Tensor:
        """The numbers of any short text."""
        config, frame = self.texts.model.config, self.texts.words.outside
        plain = [number for number in range(config.vocab_size) if number not in frame]
        ids = (plain * 4)[:4]
        if self.texts.readout == END:
            highest = self.texts.ends_at_highest
            ids = [*sorted(ids), config.vocab_size - 1 if highest else config.eos_token_id]
        return torch.tensor(ids)[None]

    def compared(self, sample: Sample) -> str:
        return said(sample.axes["text"].parts[0])

    def foils(self, texts: Sequence[str]) -> Vectors:
        batch = self.texts.collate([sample for text in texts for sample in self.texts.samples(text, How())])
        found = base_model(self.model).get_text_features(**batch)  # type: ignore[operator]
        pooled = found if isinstance(found, Tensor) else found.pooler_output
        return torch.nn.functional.normalize(pooled, dim=-1)


@register_subject
class ImageTextDual(Dual):
    """A text and a picture: CLIP and its kin, SigLIP, SigLIP 2."""

    takes = ("text", "image")
    others = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    endings: ClassVar[tuple[str, ...]] = (
        *("CLIPModel", "MetaClip2Model", "SiglipModel", "Siglip2Model", "VisionTextDualEncoderModel"),
        *("GroupViTModel", "XCLIPModel"),
    )

    def open_halves(self) -> None:
        tokenizer, images = (self.part_of_processor(kind) for kind in ("tokenizer", "image_processor"))
        self.texts, self.images = halves_of(self.model, tokenizer, images)

    def default_readout(self) -> Readout | None:
        return f"{self.texts.readout}; {self.images.readout}"

    def expected_calls(self) -> int | None:
        parts = [expected_calls(half.model.config) for half in (self.texts, self.images)]
        return None if None in parts else sum(filter(None, parts)) + (self.images.readout == POOLED)

    def streams_of(self, module: str, nth: int) -> tuple[str, str]:
        if "vision_model" not in module:
            return "text", "text"
        return ("probe" if module.endswith("head.attention") else "image"), "image"

    @property
    def readers(self) -> dict[str, tuple[Any, str]]:
        return {"text": (self.texts, "input_ids"), "image": (self.images, "pixel_values")}

    def of_other(self, raw: Any, how: How) -> list[Sample]:
        return self.images.samples(raw, how)

    def joined_sample(self, text: Sample, other: Sample) -> Sample:
        sample = super().joined_sample(text, other)
        if self.images.readout == POOLED:
            probe = Units(stream="probe", kind=PROBE, names=("[PROBE]",), special=(True,))
            sample.axes["probe"] = Axis.of(probe)
        return sample

    def image_sample(self, sample: Sample) -> Sample:
        inputs = {name: part for name, part in sample.inputs.items() if name in self.others}
        return Sample(inputs, {"image": sample.axes["image"]})

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        texts = self.texts.collate([self.text_sample(sample) for sample in samples])
        return {**texts, **self.images.collate([self.image_sample(sample) for sample in samples])}

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "pixel_values"

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        pixels = self.images.arranged(vectors, [self.image_sample(sample) for sample in samples])
        words = {"text": vectors["input_ids"]}
        nothing = vectors["input_ids"].new_zeros(len(samples), 1, 1)
        return {**words, **pixels, **({"probe": nothing} if self.images.readout == POOLED else {})}

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        pooled = self.images.readout == POOLED
        image = {"probe": {0: 1.0}} if pooled else {"image": self.images.rows(sample)}
        return {"text": self.texts.rows(sample), **image}

    def example(self) -> Any:
        return {"input_ids": self.example_ids(), **self.images.example()}

    def two(self, output: Any) -> tuple[Vectors, Vectors]:
        return output.text_embeds, output.image_embeds

    def scaled(self, cosine: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        model: Any = base_model(self.model)
        return cosine * model.logit_scale.exp() + getattr(model, "logit_bias", 0.0)


@register_subject
class AudioTextDual(Dual):
    """A text and a sound (CLAP): the text is explained, given the sound.

    The sound is not: its tower attends in windows on grids that shrink, so no row of its attention covers the sound.
    """

    takes = ("text", "audio")
    others = ("input_features", "is_longer")
    endings: ClassVar[tuple[str, ...]] = ("ClapModel",)

    def open_halves(self) -> None:
        self.texts = TextHalf(base_model(self.model).text_model, self.part_of_processor("tokenizer"))
        self.sounds = self.part_of_processor("feature_extractor")

    def default_readout(self) -> Readout | None:
        return self.texts.readout

    def expected_calls(self) -> int | None:
        return expected_calls(self.texts.model.config)

    @property
    def readers(self) -> dict[str, tuple[Any, str]]:
        return {"text": (self.texts, "input_ids")}

    def streams_of(self, module: str, nth: int) -> tuple[str, str] | None:
        return None if "audio_model" in module else ("text", "text")

    def of_other(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            if "input_features" not in raw:
                raise InputError(f"model inputs need input_features, but hold {', '.join(raw) or 'nothing'}")
            count = len(raw["input_features"])
            return [Sample({name: torch.as_tensor(part)[i] for name, part in raw.items()}, {}) for i in range(count)]
        if self.sounds is None:
            raise InputError(
                "the model came without a feature extractor: give input_features, or load (model, processor)"
            )
        sound = np.asarray(raw, dtype=np.float32)
        longest = self.sounds.nb_max_samples
        if sound.ndim != 1 or not sound.size or len(sound) > longest:
            raise InputError(
                f"a sound is a row of up to {longest} samples at {self.sounds.sampling_rate} Hz (of a longer one a "
                f"piece would be taken at random: cut it), not {sound.shape}"
            )
        made = self.sounds(sound, sampling_rate=self.sounds.sampling_rate, return_tensors="pt")
        return [Sample({name: torch.as_tensor(made[name])[0] for name in self.others if name in made}, {})]

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        texts = self.texts.collate([self.text_sample(sample) for sample in samples])
        names = [name for name in self.others if name in samples[0].inputs]
        sounds = {name: torch.stack([sample.inputs[name] for sample in samples]).to(self.device) for name in names}
        return {**texts, **sounds, "input_features": sounds["input_features"].to(self.dtype)}

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return ("input_ids",)

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": vectors["input_ids"]}

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.texts.rows(sample)}

    def example(self) -> Any:
        config = self.model.config.audio_config
        channels = 4 if config.enable_fusion else 1
        frames = torch.linspace(-3, 3, channels * 64 * config.num_mel_bins).sin()
        features = frames.reshape(1, channels, 64, config.num_mel_bins)
        return {"input_ids": self.example_ids(), "input_features": features, "is_longer": torch.tensor([[False]])}

    def two(self, output: Any) -> tuple[Vectors, Vectors]:
        return output.text_embeds, output.audio_embeds

    def scaled(self, cosine: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        return cosine * base_model(self.model).logit_scale_a.exp()  # type: ignore[operator]
