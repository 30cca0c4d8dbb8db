"""Adapters for audio classifiers; units are frames of the waveform or patches of the spectrogram.

All audio in a batch has the same length, because padding changes the output of models that normalise over time.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, ModelAdapter, Readout, register_adapter, unbatch_inputs
from clearhead.adapters.readers.image import denormalize_image
from clearhead.capture.sources.custom_modules import CustomAttentionResult, register_attention
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.units import Units, build_patch_units


class AudioAdapter(ModelAdapter):
    """What all models of sounds share: a waveform and its rate in, an image of the sound for the model."""

    stream = "audio"
    input_names: ClassVar[tuple[str, ...]] = ("audio",)
    processor_class = "AutoFeatureExtractor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.processor, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(
                f"{type(self.model).__name__} takes audio, but was loaded with a tokenizer ({given}): pass its feature "
                "extractor instead"
            )

    @property
    def feature_extractor(self) -> Any:
        """The feature extractor, which may sit in a processor."""
        return getattr(self.processor, "feature_extractor", self.processor)

    @property
    def sampling_rate(self) -> int:
        """Numbers of a waveform per second."""
        return int(getattr(self.feature_extractor, "sampling_rate", None) or 16_000)

    def choose_default_readout(self) -> Readout | None:
        return "mean"

    def find_attention_unsupported_reason(self) -> str | None:
        if getattr(self.model.config, "use_weighted_layer_sum", False):
            return (
                "its classes are read from all layers at once (use_weighted_layer_sum), so its last layer has no "
                "read-out position"
            )
        return None

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if options.unit_names is not None:
            raise InputError(
                "tokens= names the tokens of a text, but audio frames are named by their times: leave out tokens="
            )
        if isinstance(raw, Mapping):
            if self.grad_input_name not in raw:
                raise InputError(
                    f"model inputs must contain {self.grad_input_name}, but contain {', '.join(raw) or 'nothing'}"
                )
            return [
                self._build_sample(_remove_audio_padding(part, self.grad_input_name))
                for part in unbatch_inputs(self, raw)
            ]
        if self.processor is None:
            raise InputError(
                f"the model was loaded without a feature extractor: pass {self.grad_input_name}, or load (model, "
                "extractor)"
            )
        wave = _read_waveform(raw, self.sampling_rate)
        made = self.feature_extractor(wave, sampling_rate=self.sampling_rate, return_tensors="np")[
            self.grad_input_name
        ][0]
        most = self._max_waveform_length
        cut = 0.0 if most is None else max(0, len(wave) - most) / most
        return [self._build_sample({self.grad_input_name: torch.as_tensor(np.asarray(made))}, cut)]

    @property
    def _max_waveform_length(self) -> int | None:
        """How many numbers of a waveform the extractor takes: Whisper's says so, and AST's counts frames."""
        if (frames := getattr(self.feature_extractor, "max_length", None)) is not None:
            return round(self.sampling_rate * (0.025 + 0.010 * (frames - 1)))
        return getattr(self.feature_extractor, "n_samples", None)

    def _build_sample(self, inputs: dict[str, Tensor], cut: float = 0.0) -> Sample:
        """`cut`: what was left out, as a share of what is there."""
        for name in set(inputs) - {self.grad_input_name}:
            raise InputError(
                f"audio models accept only {self.grad_input_name} (and its attention_mask) as model inputs: leave out "
                f"{name}"
            )
        given = inputs[self.grad_input_name]
        if not given.is_floating_point() or not given.numel():
            raise InputError(
                f"{self.grad_input_name} must contain real numbers, not {given.dtype} of shape {tuple(given.shape)}"
            )
        self.check_input(given)
        units = self.make_units(given)
        picture = None if units.grid is None else denormalize_image(given.T[None])
        dropped = math.ceil(cut * len(units))
        return Sample.from_units(inputs, units, num_truncated=dropped, batch_key=tuple(given.shape), image=picture)

    def check_input(self, values: Tensor) -> None:
        """Refuse what has not the shape of one sound."""
        raise NotImplementedError

    def make_units(self, values: Tensor) -> Units:
        """The frames or patches of one sound."""
        raise NotImplementedError

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {
            self.grad_input_name: torch.stack([sample.inputs[self.grad_input_name] for sample in samples]).to(
                self.device, self.dtype
            )
        }


@register_adapter
class WaveformClassificationAdapter(AudioAdapter):
    """Wav2Vec 2.0 and its kin: convolutions make frames of a waveform, whose mean is classified."""

    grad_input_name = "input_values"
    class_suffixes: ClassVar[tuple[str, ...]] = tuple(
        f"{family}ForSequenceClassification"
        for family in (
            *("Wav2Vec2", "Hubert", "WavLM", "UniSpeech", "UniSpeechSat", "Data2VecAudio", "SEW", "SEWD"),
            "Wav2Vec2Conformer",
        )
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self.model.config, "model_type", "") == "wavlm":
            from transformers.models.wavlm.modeling_wavlm import WavLMAttention

            register_attention(WavLMAttention)(attend_with_gated_bias)

    def find_attention_unsupported_reason(self) -> str | None:
        if getattr(self.model.config, "model_type", "") == "wav2vec2-conformer":
            return "its layers also mix neighbouring frames by convolutions, which attention does not show"
        return super().find_attention_unsupported_reason()

    @property
    def hop_length(self) -> int:
        """How many numbers of the waveform lie between two frames."""
        return math.prod(self.model.config.conv_stride)

    def check_input(self, values: Tensor) -> None:
        if values.dim() != 1:
            raise InputError(f"input_values must be batch × time, not batch × {tuple(values.shape)}")
        if self._count_frames(values) < 1:
            raise InputError(
                f"{len(values)} audio samples are too few for one frame of {type(self.model).__name__}: use longer "
                "audio"
            )

    def _count_frames(self, given: Tensor) -> int:
        return int(self.model._get_feat_extract_output_lengths(len(given)))

    def make_units(self, values: Tensor) -> Units:
        return make_frame_units(self._count_frames(values), self.hop_length / self.sampling_rate)

    def make_example_input(self) -> Any:
        return {"input_values": _make_test_signal(12 * self.hop_length)[None]}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch time']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Each frame's own share of the waveform; what comes after the last hop is the last frame's."""
        wave, count = vectors[self.grad_input_name], len(samples[0].units)
        last = wave[:, (count - 1) * self.hop_length :]
        wide = max(self.hop_length, last.shape[1])
        cells = wave.new_zeros(len(wave), count, wide)
        cells[:, :-1, : self.hop_length] = wave[:, : (count - 1) * self.hop_length].unflatten(
            1, (count - 1, self.hop_length)
        )
        cells[:, -1, : last.shape[1]] = last
        return {self.stream: cells}


@register_adapter
class WhisperClassificationAdapter(AudioAdapter):
    """Whisper's encoder reads thirty seconds, two frames of the spectrogram at a time; their mean is classified."""

    grad_input_name = "input_features"
    class_suffixes: ClassVar[tuple[str, ...]] = ("WhisperForAudioClassification",)
    spectrogram_frames_per_unit = 2

    def count_expected_calls(self) -> int | None:
        return int(self.model.config.encoder_layers)

    def check_input(self, values: Tensor) -> None:
        config = self.model.config
        wanted = (config.num_mel_bins, self.spectrogram_frames_per_unit * config.max_source_positions)
        if tuple(values.shape) != wanted:
            raise InputError(
                f"input_features must be batch × {wanted[0]} × {wanted[1]}, not batch × {tuple(values.shape)}: Whisper "
                "requires audio of a fixed length, and its feature extractor pads shorter audio"
            )

    def make_units(self, values: Tensor) -> Units:
        hop = int(getattr(self.feature_extractor, "hop_length", None) or 160)
        return make_frame_units(
            self.model.config.max_source_positions, self.spectrogram_frames_per_unit * hop / self.sampling_rate
        )

    def make_example_input(self) -> Any:
        config = self.model.config
        shape = (1, config.num_mel_bins, self.spectrogram_frames_per_unit * config.max_source_positions)
        return {"input_features": _make_test_signal(math.prod(shape)).reshape(shape)}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch mel time']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {
            self.stream: vectors[self.grad_input_name]
            .transpose(1, 2)
            .unflatten(1, (-1, self.spectrogram_frames_per_unit))
            .flatten(2)
        }


@register_adapter
class SpectrogramClassificationAdapter(AudioAdapter):
    """The Audio Spectrogram Transformer: a vision transformer on a spectrogram, whose patches overlap."""

    grad_input_name = "input_values"
    class_suffixes: ClassVar[tuple[str, ...]] = ("ASTForAudioClassification",)

    def choose_default_readout(self) -> Readout | None:
        return "first two"

    def check_input(self, values: Tensor) -> None:
        wanted = (self.model.config.max_length, self.model.config.num_mel_bins)
        if tuple(values.shape) != wanted:
            raise InputError(
                f"input_values must be batch × {wanted[0]} × {wanted[1]}, not batch × {tuple(values.shape)}: the model "
                "requires spectrograms of a fixed size, as computed by its feature extractor"
            )

    @property
    def patch_strides(self) -> tuple[int, int]:
        return self.model.config.frequency_stride, self.model.config.time_stride

    def make_units(self, values: Tensor) -> Units:
        """Patches in rows of one band of frequencies, the lowest first."""
        size = self.model.config.patch_size
        bands, times = (
            (length - size) // stride + 1 for length, stride in zip(values.T.shape, self.patch_strides, strict=True)
        )
        return build_patch_units((bands, times), ["[CLS]", "[DIST]"], self.stream)

    def make_example_input(self) -> Any:
        shape = (1, self.model.config.max_length, self.model.config.num_mel_bins)
        return {"input_values": _make_test_signal(math.prod(shape)).reshape(shape)}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch time mel']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Every number of the spectrogram in one patch: where patches overlap, in the last that begins before it."""
        grid = samples[0].units.grid
        assert grid is not None
        spectrogram = vectors[self.grad_input_name].transpose(1, 2)
        rows, columns = (
            (torch.arange(length) // stride).clamp(max=count - 1)
            for length, stride, count in zip(spectrogram.shape[1:], self.patch_strides, grid, strict=True)
        )
        cells = [
            spectrogram[:, rows == row][:, :, columns == column].flatten(1)
            for row in range(grid[0])
            for column in range(grid[1])
        ]
        wide = max(cell.shape[1] for cell in cells)
        special = spectrogram.new_zeros(len(spectrogram), wide)
        filled = [torch.nn.functional.pad(cell, (0, wide - cell.shape[1])) for cell in cells]
        return {self.stream: torch.stack([special, special, *filled], dim=1)}


def make_frame_units(count: int, seconds_per_frame: float) -> Units:
    """Frames of a sound, named by when they begin.

    >>> make_frame_units(3, 0.02).names
    ('0.00s', '0.02s', '0.04s')
    """
    digits = max(2, math.ceil(-math.log10(seconds_per_frame)))
    names = tuple(f"{place * seconds_per_frame:.{digits}f}s" for place in range(count))
    return Units(stream="audio", kind="frame", names=names, special=(False,) * count)


def attend_with_gated_bias(
    module: Any,
    hidden_states: Float[Tensor, "batch frame model"],
    attention_mask: Tensor | None = None,
    position_bias: Float[Tensor, "batch*head frame frame"] | None = None,
    index: int = 0,
    **kwargs: Any,
) -> CustomAttentionResult:
    """WavLM's attention: how much a bias by distance counts is decided by the frame that looks.

    What its own forward pass returns is the mean of its heads, beside the computation.
    """
    batch, length, _ = hidden_states.shape
    heads = module.num_heads
    if position_bias is None:
        position_bias = module.compute_bias(length, length).repeat(batch, 1, 1)
    apart = hidden_states.unflatten(-1, (heads, -1)).transpose(1, 2)  # batch head frame width
    gate, strength = module.gru_rel_pos_linear(apart).unflatten(-1, (2, 4)).sum(-1).sigmoid().chunk(2, dim=-1)
    gate = gate * (strength * module.gru_rel_pos_const - 1) + 2
    bias = gate * position_bias.unflatten(0, (batch, heads))
    projected = (project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in projected)
    scores = q @ k.mT * module.scaling + bias
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask.ne(1)[:, None, None], -torch.inf)
    attention = scores.softmax(-1)
    output = module.out_proj((attention @ v).transpose(1, 2).flatten(2))
    returned = attention.mean(1, keepdim=True).expand_as(attention)
    return (output, returned, position_bias), attention, v


def _read_waveform(raw: Any, rate: int) -> Float[np.ndarray, "time"]:
    """One channel of real numbers at the model's rate; the caller's rate is checked, where it is given."""
    paired = isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[1], Real)
    wave, given = raw if paired else (raw, rate)
    try:
        wave = np.asarray(wave)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(
            f"audio must be an array or (array, sampling rate), not {type(raw).__name__} ({problem})"
        ) from None
    if wave.ndim != 1 or wave.dtype.kind != "f" or not wave.size:
        raise InputError(
            "audio must be a one-dimensional array of floating-point samples (mono), or (array, sampling rate), not "
            f"{wave.dtype} of shape {wave.shape}"
        )
    if given != rate:
        raise InputError(f"the audio has a sampling rate of {given} Hz, but the model takes {rate} Hz: resample it")
    if not np.isfinite(wave).all():
        raise InputError("the audio contains values that are not finite")
    return wave


def _remove_audio_padding(part: dict[str, Tensor], leaf: str) -> dict[str, Tensor]:
    """Without the padding that an attention mask hides."""
    mask = part.pop("attention_mask", None)
    if mask is None or leaf != "input_values" or part[leaf].dim() != 1:
        return part
    if mask.shape != part[leaf].shape or (mask.diff() > 0).any():
        raise InputError("attention_mask must have the same length as input_values, with all padding at the end")
    if not mask.any():
        raise InputError("the attention mask excludes all of the audio: there is nothing to explain")
    return {**part, leaf: part[leaf][: int((mask != 0).sum())]}


def _make_test_signal(count: int) -> Tensor:
    """Something that is not silent, to test a recorder on."""
    return torch.linspace(0, 40, count).square().mul(0.3).sin()
