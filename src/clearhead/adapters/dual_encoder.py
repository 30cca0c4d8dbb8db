"""Adapters for dual encoders (CLIP, SigLIP, CLAP): explain the cosine of a text and an image (or audio).

Two separate towers encode the two inputs and never attend to each other, so each is explained by itself, given the
other. Each pair is one sample: only the diagonal of the model's similarity matrix is explained, and samples do not
affect each other. To explain many texts × many images, give every pair.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import (
    InputOptions,
    NamedInputs,
    Readout,
    list_class_names,
    register_adapter,
    unwrap_base_model,
)
from clearhead.adapters.similarity import Embeddings, PairAdapter, format_units_text
from clearhead.adapters.towers import END_OF_TEXT, POOLING_PROBE, TextTower, split_towers
from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import POOLING_QUERY, UnitAxis, Units

#: Dual encoders whose answer would be wrong, and why.
_UNSUPPORTED_CLASSES = {
    "GroupViTModel": (
        "its image tower assigns patches to groups by discrete choices, so its grid shrinks from stage to stage and no "
        "row of attention covers the image"
    ),
    "XCLIPModel": "it takes videos, and its text vectors depend on all texts and images of a batch",
}


class DualEncoderAdapter(PairAdapter):
    """What all dual encoders share: the text tower, and the pair as an input by name."""

    stream = "text"
    grad_input_name = "input_ids"
    processor_class = "AutoProcessor"
    #: The inputs of the other tower.
    second_input_names: ClassVar[tuple[str, ...]]
    text_tower: TextTower

    def __post_init__(self) -> None:
        name = type(unwrap_base_model(self.model)).__name__
        refused = next(
            (why for kind, why in _UNSUPPORTED_CLASSES.items() if kind in list_class_names(self.model)), None
        )
        if refused is not None:
            raise UnsupportedError(f"{name} cannot be explained: {refused}")
        if self.readout is not None:
            raise InputError(f"each tower of {name} has its own read-out position: leave out readout=")
        self.build_towers()
        super().__post_init__()
        self.embedding_modules = [self.text_tower.embeddings]  # type: ignore[misc]

    def build_towers(self) -> None:
        """The towers as subjects of their own."""
        raise NotImplementedError

    def make_second_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        """The other input as samples."""
        raise NotImplementedError

    def get_subprocessor(self, attribute: str) -> Any:
        """The tokenizer, the image processor … out of a processor that has several, or alone."""
        whole = self.processor
        if whole is None or hasattr(whole, attribute):
            return getattr(whole, attribute, None)
        is_tokenizer = hasattr(whole, "convert_ids_to_tokens")
        return whole if is_tokenizer == (attribute == "tokenizer") else None

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        first, second = self.input_names
        if isinstance(raw, Mapping):
            parts = {name: part for name, part in raw.items() if name not in self.second_input_names}
            texts = self.text_tower.make_samples(parts, options)
            others = self.make_second_samples(
                {name: part for name, part in raw.items() if name in self.second_input_names}, InputOptions()
            )
            if len(texts) != len(others):
                raise InputError(
                    f"there are {len(texts)} texts and {len(others)} inputs for {second}=: they are paired by "
                    "position, so pass the same number of each"
                )
        else:
            if not isinstance(raw, NamedInputs):
                raise InputError(
                    f"{self.name} takes two inputs, each passed by name, not a single one: explain({first}=…, "
                    f"{second}=…)"
                )
            given = raw
            missing = [f"{stream}=" for stream in self.input_names if getattr(given, stream) is None]
            if missing:
                raise InputError(
                    f"{self.name} takes two inputs, {first} and {second}: explain({first}=…, {second}=…); missing: "
                    f"{', '.join(missing)}"
                )
            if options.unit_names is not None:
                raise InputError(
                    "tokens= names the units of model inputs, but the units of a text already have names: leave out "
                    "tokens="
                )
            texts, others = (
                self.text_tower.make_samples(given.text, options),
                self.make_second_samples(getattr(given, second), InputOptions()),
            )
        return [self.build_pair_sample(text, other) for text, other in zip(texts, others, strict=True)]

    def build_pair_sample(self, text: Sample, second: Sample) -> Sample:
        inputs = {**text.inputs, **second.inputs}
        return Sample(inputs, {**text.axes, **second.axes}, num_truncated=text.num_truncated, image=second.image)

    def select_text_sample(self, sample: Sample) -> Sample:
        inputs = {name: part for name, part in sample.inputs.items() if name not in self.second_input_names}
        return Sample(inputs, {"text": sample.axes["text"]})

    def make_example_ids(self) -> Tensor:
        """The numbers of any short text."""
        config, frame = self.text_tower.model.config, self.text_tower.tokenizer_wrapper.special_ids
        plain = [number for number in range(config.vocab_size) if number not in frame]
        ids = (plain * 4)[:4]
        if self.text_tower.readout == END_OF_TEXT:
            highest = self.text_tower.eos_is_highest_id
            ids = [*sorted(ids), config.vocab_size - 1 if highest else config.eos_token_id]
        return torch.tensor(ids)[None]

    def get_compared_text(self, sample: Sample) -> str:
        return format_units_text(sample.axes["text"].unit_groups[0])

    def embed_contrast_texts(self, texts: Sequence[str]) -> Embeddings:
        batch = self.text_tower.collate(
            [sample for text in texts for sample in self.text_tower.make_samples(text, InputOptions())]
        )
        found = unwrap_base_model(self.model).get_text_features(**batch)  # type: ignore[operator]
        pooled = found if isinstance(found, Tensor) else found.pooler_output
        return torch.nn.functional.normalize(pooled, dim=-1)


@register_adapter
class ImageTextDualEncoderAdapter(DualEncoderAdapter):
    """A text and a picture: CLIP and its kin, SigLIP, SigLIP 2."""

    input_names = ("text", "image")
    second_input_names = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
    class_suffixes: ClassVar[tuple[str, ...]] = (
        *("CLIPModel", "MetaClip2Model", "SiglipModel", "Siglip2Model", "VisionTextDualEncoderModel"),
        *("GroupViTModel", "XCLIPModel"),
    )

    def build_towers(self) -> None:
        tokenizer, images = (self.get_subprocessor(kind) for kind in ("tokenizer", "image_processor"))
        self.text_tower, self.image_tower = split_towers(self.model, tokenizer, images)

    def choose_default_readout(self) -> Readout | None:
        return f"{self.text_tower.readout}; {self.image_tower.readout}"

    def count_expected_calls(self) -> int | None:
        parts = [count_calls_from_config(half.model.config) for half in (self.text_tower, self.image_tower)]
        return None if None in parts else sum(filter(None, parts)) + (self.image_tower.readout == POOLING_PROBE)

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str]:
        if "vision_model" not in module:
            return "text", "text"
        return ("probe" if module.endswith("head.attention") else "image"), "image"

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {"text": (self.text_tower, "input_ids"), "image": (self.image_tower, "pixel_values")}

    def make_second_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        return self.image_tower.make_samples(raw, options)

    def build_pair_sample(self, text: Sample, second: Sample) -> Sample:
        sample = super().build_pair_sample(text, second)
        if self.image_tower.readout == POOLING_PROBE:
            probe = Units(stream="probe", kind=POOLING_QUERY, names=("[PROBE]",), special=(True,))
            sample.axes["probe"] = UnitAxis.concat(probe)
        return sample

    def select_image_sample(self, sample: Sample) -> Sample:
        inputs = {name: part for name, part in sample.inputs.items() if name in self.second_input_names}
        return Sample(inputs, {"image": sample.axes["image"]})

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        texts = self.text_tower.collate([self.select_text_sample(sample) for sample in samples])
        return {**texts, **self.image_tower.collate([self.select_image_sample(sample) for sample in samples])}

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "pixel_values"

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        pixels = self.image_tower.to_unit_vectors(vectors, [self.select_image_sample(sample) for sample in samples])
        words = {"text": vectors["input_ids"]}
        nothing = vectors["input_ids"].new_zeros(len(samples), 1, 1)
        return {**words, **pixels, **({"probe": nothing} if self.image_tower.readout == POOLING_PROBE else {})}

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        pooled = self.image_tower.readout == POOLING_PROBE
        image = {"probe": {0: 1.0}} if pooled else {"image": self.image_tower.find_readout_rows(sample)}
        return {"text": self.text_tower.find_readout_rows(sample), **image}

    def make_example_input(self) -> Any:
        return {"input_ids": self.make_example_ids(), **self.image_tower.make_example_input()}

    def get_embeddings(self, output: Any) -> tuple[Embeddings, Embeddings]:
        return output.text_embeds, output.image_embeds

    def to_logit(self, cosine: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        model: Any = unwrap_base_model(self.model)
        return cosine * model.logit_scale.exp() + getattr(model, "logit_bias", 0.0)


@register_adapter
class AudioTextDualEncoderAdapter(DualEncoderAdapter):
    """A text and a sound (CLAP): the text is explained, given the sound.

    The sound is not: its tower attends in windows on grids that shrink, so no row of its attention covers the sound.
    """

    input_names = ("text", "audio")
    second_input_names = ("input_features", "is_longer")
    class_suffixes: ClassVar[tuple[str, ...]] = ("ClapModel",)

    def build_towers(self) -> None:
        self.text_tower = TextTower(unwrap_base_model(self.model).text_model, self.get_subprocessor("tokenizer"))
        self.feature_extractor = self.get_subprocessor("feature_extractor")

    def choose_default_readout(self) -> Readout | None:
        return self.text_tower.readout

    def count_expected_calls(self) -> int | None:
        return count_calls_from_config(self.text_tower.model.config)

    @property
    def stream_readers(self) -> dict[str, tuple[Any, str]]:
        return {"text": (self.text_tower, "input_ids")}

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        return None if "audio_model" in module else ("text", "text")

    def make_second_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            if "input_features" not in raw:
                raise InputError(f"model inputs must contain input_features, but contain {', '.join(raw) or 'nothing'}")
            count = len(raw["input_features"])
            return [Sample({name: torch.as_tensor(part)[i] for name, part in raw.items()}, {}) for i in range(count)]
        if self.feature_extractor is None:
            raise InputError(
                "the model was loaded without a feature extractor: pass input_features, or load (model, processor)"
            )
        sound = np.asarray(raw, dtype=np.float32)
        longest = self.feature_extractor.nb_max_samples
        if sound.ndim != 1 or not sound.size or len(sound) > longest:
            raise InputError(
                f"audio must be a one-dimensional array of up to {longest} samples at "
                f"{self.feature_extractor.sampling_rate} Hz (the model would crop longer audio at random: shorten it), "
                f"not {sound.shape}"
            )
        made = self.feature_extractor(sound, sampling_rate=self.feature_extractor.sampling_rate, return_tensors="pt")
        return [Sample({name: torch.as_tensor(made[name])[0] for name in self.second_input_names if name in made}, {})]

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        texts = self.text_tower.collate([self.select_text_sample(sample) for sample in samples])
        names = [name for name in self.second_input_names if name in samples[0].inputs]
        sounds = {name: torch.stack([sample.inputs[name] for sample in samples]).to(self.device) for name in names}
        return {**texts, **sounds, "input_features": sounds["input_features"].to(self.dtype)}

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return ("input_ids",)

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {"text": vectors["input_ids"]}

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.text_tower.find_readout_rows(sample)}

    def make_example_input(self) -> Any:
        config = self.model.config.audio_config
        channels = 4 if config.enable_fusion else 1
        frames = torch.linspace(-3, 3, channels * 64 * config.num_mel_bins).sin()
        features = frames.reshape(1, channels, 64, config.num_mel_bins)
        return {"input_ids": self.make_example_ids(), "input_features": features, "is_longer": torch.tensor([[False]])}

    def get_embeddings(self, output: Any) -> tuple[Embeddings, Embeddings]:
        return output.text_embeds, output.audio_embeds

    def to_logit(self, cosine: Float[Tensor, "batch"]) -> Float[Tensor, "batch"]:
        return cosine * unwrap_base_model(self.model).logit_scale_a.exp()  # type: ignore[operator]
