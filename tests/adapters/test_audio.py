"""Audio classifiers: frames, and patches of a spectrogram, as units."""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import clearhead
from clearhead import InputError, Method, UnsupportedError
from clearhead.adapters.audio import attend_with_gated_bias
from clearhead.capture.sources.custom_modules import CustomAttentionResult
from tests.invariants import model_snapshot
from tests.replicas import generic, plain_pass, rollout

LABELS = {"id2label": {0: "bark", 1: "meow", 2: "rain"}}
_CONV = {"conv_dim": (8, 8), "conv_kernel": (5, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2}
_WAVE = {
    **_CONV,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "initializer_range": 0.3,
    "vocab_size": 10,
    **LABELS,
}
_AST = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "patch_size": 4,
    "frequency_stride": 3,
    "time_stride": 3,
    "max_length": 18,
    "num_mel_bins": 11,
    "initializer_range": 0.3,
    **LABELS,
}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 6,
    "max_source_positions": 10,
    "vocab_size": 60,
    "pad_token_id": 0,
    "init_std": 0.3,
    **LABELS,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _WAVE),
    "wav2vec2-layer": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {**_WAVE, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "hubert": ("HubertForSequenceClassification", "HubertConfig", _WAVE),
    "wavlm": ("WavLMForSequenceClassification", "WavLMConfig", {**_WAVE, "num_buckets": 8, "max_bucket_distance": 10}),
    "unispeech-sat": ("UniSpeechSatForSequenceClassification", "UniSpeechSatConfig", _WAVE),
    "data2vec": ("Data2VecAudioForSequenceClassification", "Data2VecAudioConfig", _WAVE),
    "whisper": ("WhisperForAudioClassification", "WhisperConfig", _WHISPER),
    "ast": ("ASTForAudioClassification", "ASTConfig", _AST),
}
WAVES = [name for name, (cls, *_) in MODELS.items() if cls.endswith("SequenceClassification")]
METHODS = ("generic", "attention", "rollout", "attention-gradcam", "grad-sam", "saliency", "input-x-gradient")
#: AST computes its softmax in float32.
CLOSE = {"ast": 1e-5}


@cache
def explainer(name: str) -> clearhead.Explainer:
    cls, config, settings = MODELS[name]
    torch.manual_seed(5)
    model = getattr(transformers, cls)(getattr(transformers, config)(**settings)).double().eval()
    with torch.no_grad():  # without this, special tokens and gates would all be equal
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("cls_token", "distillation_token", "position_embeddings", "gru_rel_pos_const")):
                parameter.normal_()
    return clearhead.load(model)


def make_audio(name: str, seed: int = 0, length: int = 61) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return {"input_features": torch.randn(1, 6, 20, generator=generator, dtype=torch.float64)}
    shape = (1, 18, 11) if name == "ast" else (1, length)
    return {"input_values": torch.randn(shape, generator=generator, dtype=torch.float64)}


def gap(ours: Any, theirs: Any) -> float:
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-300))


@pytest.mark.parametrize("name", MODELS)
class TestInvariants:
    def test_batch_equals_single(self, name: str) -> None:
        batch = [make_audio(name, seed) for seed in (1, 2, 3)]
        if name in WAVES:
            batch[1] = make_audio(name, 2, length=45)  # waveforms are never padded: this one runs in a pass of its own
        together, backwards = (explainer(name).explain(order, list(METHODS)) for order in (batch, batch[::-1]))
        for i, raw_input in enumerate(batch):
            for method, alone in explainer(name).explain(raw_input, list(METHODS)).items():
                assert gap(together[method][i].scores, alone.scores) < CLOSE.get(name, 1e-9), method
                assert gap(backwards[method][2 - i].scores, alone.scores) < CLOSE.get(name, 1e-9), method

    def test_recorded_logits_equal_model_logits_and_model_is_unchanged(self, name: str) -> None:
        ex = explainer(name)
        before = model_snapshot.of_model(ex.adapter.model)
        real = ex.adapter.model(**make_audio(name)).logits[0].detach()
        e = ex.explain(make_audio(name), "generic")
        assert e.target["value"] == pytest.approx(float(real.max()), rel=1e-6)
        assert e.certificate["readout_checked"] and e.certificate["capture_error"] < 1e-6
        with pytest.raises(InputError):
            ex.explain(make_audio(name), target="thunder", method="generic")
        changes = model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model))
        # Wav2Vec 2.0 and related models draw random numbers in every forward pass, for layer dropout in training
        assert [change for change in changes if name not in WAVES or not change.startswith("random numbers")] == []

    def test_unit_gradients_cover_the_whole_input(self, name: str) -> None:
        ((leaf, raw_input),) = make_audio(name).items()
        wave = raw_input.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(explainer(name).adapter.model(**{leaf: wave}).logits[0, 1], wave)
        e = explainer(name).explain(
            make_audio(name), ["saliency", "input-x-gradient", Method("saliency", reduce="abs")], 1
        )
        assert gap((e["saliency"].scores ** 2).sum(), (gradient**2).sum()) < CLOSE.get(name, 1e-9)
        assert gap(e["saliency(reduce='abs')"].scores.sum(), gradient.abs().sum()) < CLOSE.get(name, 1e-9)
        assert abs(e["input-x-gradient"].scores.sum() - float((gradient * raw_input).sum())) < 1e-6


@pytest.mark.parametrize("name", ["wav2vec2", "hubert", "whisper", "ast"])
def test_generic_and_rollout_equal_replicas(name: str) -> None:
    ex = explainer(name)
    pass_record = plain_pass.watch(
        PixelValuesWrapper(ex.adapter.model),
        {"pixel_values": next(iter(make_audio(name).values()))},
        lambda o: o.logits[0, 2],
    )
    row = (
        np.ones(pass_record.units) / pass_record.units
        if name != "ast"
        else np.r_[0.5, 0.5, np.zeros(pass_record.units - 2)]
    )
    results = ex.explain(make_audio(name), ["generic", "rollout"], 2)
    for replica in (generic, rollout):
        method = replica.__name__.split(".")[-1]
        assert gap(results[method].scores, replica.scores(pass_record, row)) < CLOSE.get(name, 1e-9), method


class PixelValuesWrapper(torch.nn.Module):
    """An audio model whose input is called pixel_values, which is what the replica's pass expects."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.dtype = model, model.dtype

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, pixel_values: Tensor, **more: Any) -> Any:
        return self.model(pixel_values, **more)


class TestUnits:
    def test_frame_names_are_times(self) -> None:
        e = explainer("wav2vec2").explain(make_audio("wav2vec2"), method="generic")
        # 61 samples: (61 − 5) // 2 + 1 = 29, (29 − 3) // 2 + 1 = 14 frames, 4 samples apart
        assert len(e) == 14 and e.stream == "audio" and e.units.kind == "frame"
        assert e.tokens[:3] == ["0.0000s", "0.0003s", "0.0005s"]

    def test_frame_score_sums_the_gradients_of_its_samples(self) -> None:
        ex, raw_input = explainer("wav2vec2"), make_audio("wav2vec2")
        wave = raw_input["input_values"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ex.adapter.model(wave).logits[0, 0], wave)
        e = ex.explain(raw_input, Method("saliency", reduce="abs"), 0)
        ends = [*range(0, 14 * 4, 4), 61]
        parts = [float(gradient[0, a:b].abs().sum()) for a, b in pairwise(ends)]
        assert gap(e.scores, parts) < 1e-9

    def test_spectrogram_patches_map_to_time_and_frequency(self) -> None:
        ex, raw_input = explainer("ast"), make_audio("ast")
        e = ex.explain(raw_input, Method("saliency", reduce="abs"), 0)
        assert e.units.grid == (3, 5) and e.tokens[:3] == ["[CLS]", "[DIST]", "0,0"] and e.stream == "audio"
        assert e.image.shape == (11, 18, 3)
        wave = raw_input["input_values"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ex.adapter.model(wave).logits[0, 0], wave)
        assert gap(e.heat_map()[1, 2], gradient[0, 6:9, 3:6].abs().sum()) < 1e-5  # time × frequency
        assert gap(e.heat_map()[2, 4], gradient[0, 12:, 6:].abs().sum()) < 1e-5

    def test_whisper_unit_spans_two_spectrogram_frames(self) -> None:
        e = explainer("whisper").explain(make_audio("whisper"), method="generic")
        assert len(e) == 10 and e.tokens[:2] == ["0.00s", "0.02s"]


class TestInputs:
    def test_waveform_equals_extracted_model_inputs(self) -> None:
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000, do_normalize=True)
        ex = clearhead.load(explainer("wav2vec2").adapter.model, extractor)
        wave = np.random.default_rng(0).normal(size=61)
        e = ex.explain(audio=wave, method="generic")
        assert e == ex.explain((wave, 8000), method="generic") == ex.explain(torch.as_tensor(wave), method="generic")
        values = torch.as_tensor((wave - wave.mean()) / np.sqrt(wave.var() + 1e-7))[None]
        assert gap(e.scores, explainer("wav2vec2").explain({"input_values": values}, method="generic").scores) < 1e-5
        assert e.tokens[1] == "0.0005s"
        with pytest.raises(InputError, match="sampling rate of 16000 Hz, but the model takes 8000 Hz: resample it"):
            ex.explain((wave, 16000), method="generic")

    @pytest.mark.parametrize("name", ["whisper", "ast"])
    def test_truncation_by_the_extractor_is_reported(self, name: str) -> None:
        if name == "whisper":
            extractor: Any = transformers.WhisperFeatureExtractor(feature_size=6, sampling_rate=3200, chunk_length=1)
            max_length, rate = 3200, 3200
        else:
            extractor = transformers.ASTFeatureExtractor(num_mel_bins=11, max_length=18)
            max_length, rate = 400 + 17 * 160, 16_000
        ex = clearhead.load(explainer(name).adapter.model, extractor)
        wave = np.random.default_rng(0).normal(size=2 * max_length)
        for length, dropped in ((max_length, 0), (2 * max_length, 1)):
            e = ex.explain((wave[:length], rate), "saliency")
            assert e.certificate["truncated_tokens"] == dropped * len(e.units)
        assert e.scores.tolist() == ex.explain((wave[:max_length], rate), "saliency").scores.tolist()

    @pytest.mark.parametrize("frames", [7, 10, 18, 1024])
    def test_max_waveform_length_is_exact(self, frames: int) -> None:
        """Rounding must not make the length one sample too short: audio that fits would be reported as truncated."""
        extractor = transformers.ASTFeatureExtractor(num_mel_bins=11, max_length=frames)
        ex = clearhead.load(explainer("ast").adapter.model, extractor)
        assert ex.adapter._max_waveform_length == 400 + 160 * (frames - 1)

    def test_tuple_of_two_waveforms_raises(self) -> None:
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
        wave = np.zeros(61)
        with pytest.raises(InputError, match="audio must be a one-dimensional array of floating-point samples"):
            clearhead.load(explainer("wav2vec2").adapter.model, extractor).explain(audio=(wave, wave), method="generic")

    def test_masked_padding_is_removed(self) -> None:
        raw_input = make_audio("wav2vec2")["input_values"]
        padded = torch.nn.functional.pad(raw_input, (0, 20))
        mask = torch.ones_like(padded).long()
        mask[:, 61:] = 0
        ex = explainer("wav2vec2")
        e = ex.explain({"input_values": padded, "attention_mask": mask}, method="generic")
        assert e == ex.explain({"input_values": raw_input}, method="generic")

    @pytest.mark.parametrize(
        ("name", "raw_input", "message"),
        [
            ("wav2vec2", {"input_values": torch.zeros(1, 4)}, "too few for one frame"),
            ("wav2vec2", {"input_values": torch.zeros(1, 4, 50)}, "must be batch × time"),
            ("wav2vec2", {"input_values": torch.zeros(1, 50, dtype=torch.long)}, "must contain real numbers"),
            ("wav2vec2", {"attention_mask": torch.ones(1, 50)}, "must contain input_values"),
            (
                "wav2vec2",
                {"input_values": torch.zeros(1, 50), "attention_mask": torch.tensor([[0] + [1] * 49])},
                "all padding at the end",
            ),
            (
                "wav2vec2",
                {"input_values": torch.zeros(1, 50), "attention_mask": torch.zeros(1, 50)},
                "excludes all of the audio",
            ),
            ("wav2vec2", np.zeros(50), "without a feature extractor"),
            ("whisper", {"input_features": torch.zeros(1, 6, 30)}, "batch × 6 × 20"),
            ("ast", {"input_values": torch.zeros(1, 11, 18)}, "batch × 18 × 11"),
        ],
    )
    def test_invalid_model_inputs_raise(self, name: str, raw_input: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer(name).explain(raw_input, method="generic")

    @pytest.mark.parametrize(
        ("raw_input", "message"),
        [
            (np.zeros((2, 50)), "one-dimensional"),
            (np.zeros(50, dtype=np.int16), "floating-point samples"),
            (np.full(50, np.nan), "not finite"),
            ("bark.wav", "floating-point samples"),
        ],
    )
    def test_invalid_audio_raises(self, raw_input: Any, message: str) -> None:
        ex = clearhead.load(explainer("wav2vec2").adapter.model, transformers.Wav2Vec2FeatureExtractor())
        with pytest.raises(InputError, match=message):
            ex.explain(audio=raw_input, method="generic")

    def test_tokenizer_as_feature_extractor_raises(self) -> None:
        from tests import models

        with pytest.raises(InputError, match="was loaded with a tokenizer"):
            clearhead.load(explainer("wav2vec2").adapter.model, models.tokenizer("wordpiece"))


class TestUnsupported:
    def test_weighted_layer_sum_supports_gradient_methods_only(self) -> None:
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(**_WAVE, use_weighted_layer_sum=True)
        ex = clearhead.load(transformers.Wav2Vec2ForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="read from all layers at once"):
            ex.explain(make_audio("wav2vec2"), method="generic")
        assert ex.explain(make_audio("wav2vec2"), "saliency").scores.max() > 0

    def test_conformer_convolutions_support_gradient_methods_only(self) -> None:
        config = transformers.Wav2Vec2ConformerConfig(**_WAVE, conv_depthwise_kernel_size=3)
        ex = clearhead.load(transformers.Wav2Vec2ConformerForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="by convolutions, which"):
            ex.explain(make_audio("wav2vec2"), method="generic")
        assert ex.explain(make_audio("wav2vec2"), "saliency").scores.max() > 0

    def test_squeezed_attention_supports_gradient_methods_only(self) -> None:
        torch.manual_seed(0)
        config = transformers.SEWConfig(**{**_WAVE, "squeeze_factor": 2})
        ex = clearhead.load(transformers.SEWForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="does not run over its 14 units"):
            ex.explain(make_audio("wav2vec2"), method="generic")
        assert ex.explain(make_audio("wav2vec2"), "saliency").scores.max() > 0


def test_wavlm_attention_function_equals_module_forward() -> None:
    (module, *_) = [m for m in explainer("wavlm").adapter.model.modules() if type(m).__name__ == "WavLMAttention"]
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    for attention_mask in (None, mask):
        # transformers 5.0 returns attention only with output_attentions
        theirs = type(module).forward(module, hidden, attention_mask, output_attentions=True)
        ours: CustomAttentionResult = attend_with_gated_bias(module, hidden, attention_mask)
        for actual, expected in zip(ours[0], theirs, strict=True):
            assert gap(actual.detach(), expected.detach()) < 1e-12
