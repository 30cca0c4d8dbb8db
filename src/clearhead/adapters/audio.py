"""Sounds: classifiers whose units are frames of a waveform, or patches of a spectrogram.

Sounds of one batch have one length: models that normalise over time answer differently when a sound is padded.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Readout, Sample, Subject, register_subject, split_mapping
from clearhead.adapters.readers.image import as_seen
from clearhead.capture.sources.custom_modules import Attended, register_attention
from clearhead.errors import InputError
from clearhead.units import Units, patches


class AudioSubject(Subject):
    """What all models of sounds share: a waveform and its rate in, an image of the sound for the model."""

    stream = "audio"
    takes: ClassVar[tuple[str, ...]] = ("audio",)
    processor_class = "AutoFeatureExtractor"

    def __post_init__(self) -> None:
        super().__post_init__()
        if hasattr(self.processor, "convert_ids_to_tokens"):
            given = type(self.processor).__name__
            raise InputError(
                f"{type(self.model).__name__} takes sounds, but came with a tokenizer ({given}): give its feature "
                "extractor"
            )

    @property
    def extractor(self) -> Any:
        """The feature extractor, which may sit in a processor."""
        return getattr(self.processor, "feature_extractor", self.processor)

    @property
    def rate(self) -> int:
        """Numbers of a waveform per second."""
        return int(getattr(self.extractor, "sampling_rate", None) or 16_000)

    def default_readout(self) -> Readout | None:
        return "mean"

    def why_no_attention(self) -> str | None:
        if getattr(self.model.config, "use_weighted_layer_sum", False):
            return "its classes are read from all layers at once (use_weighted_layer_sum), so no row of the last speaks"
        return None

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if how.tokens is not None:
            raise InputError("tokens= names tokens of text; the frames of a sound have their times as names")
        if isinstance(raw, Mapping):
            if self.leaf not in raw:
                raise InputError(f"model inputs need {self.leaf}, but hold {', '.join(raw) or 'nothing'}")
            return [self._sample(_unpadded(part, self.leaf)) for part in split_mapping(self, raw)]
        if self.processor is None:
            raise InputError(
                f"the model came without a feature extractor: give {self.leaf}, or load (model, extractor)"
            )
        wave = _waveform(raw, self.rate)
        made = self.extractor(wave, sampling_rate=self.rate, return_tensors="np")[self.leaf][0]
        most = self._most
        cut = 0.0 if most is None else max(0, len(wave) - most) / most
        return [self._sample({self.leaf: torch.as_tensor(np.asarray(made))}, cut)]

    @property
    def _most(self) -> int | None:
        """How many numbers of a waveform the extractor takes: Whisper's says so, and AST's counts frames."""
        if (frames := getattr(self.extractor, "max_length", None)) is not None:
            return round(self.rate * (0.025 + 0.010 * (frames - 1)))
        return getattr(self.extractor, "n_samples", None)

    def _sample(self, inputs: dict[str, Tensor], cut: float = 0.0) -> Sample:
        """`cut`: what was left out, as a share of what is there."""
        for name in set(inputs) - {self.leaf}:
            raise InputError(f"sounds are explained from {self.leaf} (and their attention_mask): leave out {name}")
        given = inputs[self.leaf]
        if not given.is_floating_point() or not given.numel():
            raise InputError(f"{self.leaf} must hold real numbers, not {given.dtype} of shape {tuple(given.shape)}")
        self.check(given)
        units = self.units_of(given)
        picture = None if units.grid is None else as_seen(given.T[None])
        dropped = math.ceil(cut * len(units))
        return Sample.of(inputs, units, dropped=dropped, alike=tuple(given.shape), picture=picture)

    def check(self, given: Tensor) -> None:
        """Refuse what has not the shape of one sound."""
        raise NotImplementedError

    def units_of(self, given: Tensor) -> Units:
        """The frames or patches of one sound."""
        raise NotImplementedError

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {self.leaf: torch.stack([sample.inputs[self.leaf] for sample in samples]).to(self.device, self.dtype)}


@register_subject
class WaveformClassification(AudioSubject):
    """Wav2Vec 2.0 and its kin: convolutions make frames of a waveform, whose mean is classified."""

    leaf = "input_values"
    endings: ClassVar[tuple[str, ...]] = tuple(
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

    def why_no_attention(self) -> str | None:
        if getattr(self.model.config, "model_type", "") == "wav2vec2-conformer":
            return "its layers mix neighbouring frames by convolutions, too, which attention does not show"
        return super().why_no_attention()

    @property
    def hop(self) -> int:
        """How many numbers of the waveform lie between two frames."""
        return math.prod(self.model.config.conv_stride)

    def check(self, given: Tensor) -> None:
        if given.dim() != 1:
            raise InputError(f"input_values must be batch × time, not batch × {tuple(given.shape)}")
        if self._count(given) < 1:
            raise InputError(
                f"{len(given)} numbers are too few for one frame of {type(self.model).__name__}: give more"
            )

    def _count(self, given: Tensor) -> int:
        return int(self.model._get_feat_extract_output_lengths(len(given)))

    def units_of(self, given: Tensor) -> Units:
        return frames(self._count(given), self.hop / self.rate)

    def example(self) -> Any:
        return {"input_values": _waves(12 * self.hop)[None]}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch time']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Each frame's own share of the waveform; what comes after the last hop is the last frame's."""
        wave, count = vectors[self.leaf], len(samples[0].units)
        last = wave[:, (count - 1) * self.hop :]
        wide = max(self.hop, last.shape[1])
        cells = wave.new_zeros(len(wave), count, wide)
        cells[:, :-1, : self.hop] = wave[:, : (count - 1) * self.hop].unflatten(1, (count - 1, self.hop))
        cells[:, -1, : last.shape[1]] = last
        return {self.stream: cells}


@register_subject
class WhisperClassification(AudioSubject):
    """Whisper's encoder reads thirty seconds, two frames of the spectrogram at a time; their mean is classified."""

    leaf = "input_features"
    endings: ClassVar[tuple[str, ...]] = ("WhisperForAudioClassification",)
    each = 2

    def expected_calls(self) -> int | None:
        return int(self.model.config.encoder_layers)

    def check(self, given: Tensor) -> None:
        config = self.model.config
        wanted = (config.num_mel_bins, self.each * config.max_source_positions)
        if tuple(given.shape) != wanted:
            raise InputError(
                f"input_features must be batch × {wanted[0]} × {wanted[1]}, not batch × {tuple(given.shape)}: Whisper "
                "takes sounds of one length, padded by its feature extractor"
            )

    def units_of(self, given: Tensor) -> Units:
        hop = int(getattr(self.extractor, "hop_length", None) or 160)
        return frames(self.model.config.max_source_positions, self.each * hop / self.rate)

    def example(self) -> Any:
        config = self.model.config
        shape = (1, config.num_mel_bins, self.each * config.max_source_positions)
        return {"input_features": _waves(math.prod(shape)).reshape(shape)}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch mel time']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        return {self.stream: vectors[self.leaf].transpose(1, 2).unflatten(1, (-1, self.each)).flatten(2)}


@register_subject
class SpectrogramClassification(AudioSubject):
    """The Audio Spectrogram Transformer: a vision transformer on a spectrogram, whose patches overlap."""

    leaf = "input_values"
    endings: ClassVar[tuple[str, ...]] = ("ASTForAudioClassification",)

    def default_readout(self) -> Readout | None:
        return "first two"

    def check(self, given: Tensor) -> None:
        wanted = (self.model.config.max_length, self.model.config.num_mel_bins)
        if tuple(given.shape) != wanted:
            raise InputError(
                f"input_values must be batch × {wanted[0]} × {wanted[1]}, not batch × {tuple(given.shape)}: the model "
                "takes spectrograms of one size, made by its feature extractor"
            )

    @property
    def strides(self) -> tuple[int, int]:
        return self.model.config.frequency_stride, self.model.config.time_stride

    def units_of(self, given: Tensor) -> Units:
        """Patches in rows of one band of frequencies, the lowest first."""
        size = self.model.config.patch_size
        bands, times = (
            (length - size) // stride + 1 for length, stride in zip(given.T.shape, self.strides, strict=True)
        )
        return patches((bands, times), ["[CLS]", "[DIST]"], self.stream)

    def example(self) -> Any:
        shape = (1, self.model.config.max_length, self.model.config.num_mel_bins)
        return {"input_values": _waves(math.prod(shape)).reshape(shape)}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch time mel']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Every number of the spectrogram in one patch: where patches overlap, in the last that begins before it."""
        grid = samples[0].units.grid
        assert grid is not None
        spectrogram = vectors[self.leaf].transpose(1, 2)
        rows, columns = (
            (torch.arange(length) // stride).clamp(max=count - 1)
            for length, stride, count in zip(spectrogram.shape[1:], self.strides, grid, strict=True)
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


def frames(count: int, seconds: float) -> Units:
    """Frames of a sound, named by when they begin.

    >>> frames(3, 0.02).names
    ('0.00s', '0.02s', '0.04s')
    """
    digits = max(2, math.ceil(-math.log10(seconds)))
    names = tuple(f"{place * seconds:.{digits}f}s" for place in range(count))
    return Units(stream="audio", kind="frame", names=names, special=(False,) * count)


def attend_with_gated_bias(
    module: Any,
    hidden_states: Float[Tensor, "batch frame model"],
    attention_mask: Tensor | None = None,
    position_bias: Float[Tensor, "batch*head frame frame"] | None = None,
    index: int = 0,
    **kwargs: Any,
) -> Attended:
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


def _waveform(raw: Any, rate: int) -> Float[np.ndarray, "time"]:
    """One channel of real numbers at the model's rate; the caller's rate is checked, where it is given."""
    paired = isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[1], Real)
    wave, given = raw if paired else (raw, rate)
    try:
        wave = np.asarray(wave)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(f"a sound must be an array, or (array, rate), not {type(raw).__name__} ({problem})") from None
    if wave.ndim != 1 or wave.dtype.kind != "f" or not wave.size:
        raise InputError(
            f"a sound must be an array of real numbers over time, one channel, or (array, rate), not {wave.dtype} of "
            f"shape {wave.shape}"
        )
    if given != rate:
        raise InputError(f"the sound has {given} numbers per second, and the model takes {rate}: resample it")
    if not np.isfinite(wave).all():
        raise InputError("the sound holds numbers that are not finite")
    return wave


def _unpadded(part: dict[str, Tensor], leaf: str) -> dict[str, Tensor]:
    """Without the padding that an attention mask hides."""
    mask = part.pop("attention_mask", None)
    if mask is None or leaf != "input_values" or part[leaf].dim() != 1:
        return part
    if mask.shape != part[leaf].shape or (mask.diff() > 0).any():
        raise InputError("attention_mask must have the length of input_values, with all padding at its end")
    if not mask.any():
        raise InputError("the attention mask hides the whole sound: there is nothing to explain")
    return {**part, leaf: part[leaf][: int((mask != 0).sum())]}


def _waves(count: int) -> Tensor:
    """Something that is not silent, to test a recorder on."""
    return torch.linspace(0, 40, count).square().mul(0.3).sin()
