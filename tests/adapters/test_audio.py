"""Classifiers of sounds: frames and patches of a spectrogram as units."""

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
    with torch.no_grad():  # tokens and gates that would be alike
        for part, parameter in model.named_parameters():
            if part.endswith(("cls_token", "distillation_token", "position_embeddings", "gru_rel_pos_const")):
                parameter.normal_()
    return clearhead.load(model)


def sound(name: str, seed: int = 0, length: int = 61) -> dict[str, Tensor]:
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
class TestLaws:
    def test_batched_is_single(self, name: str) -> None:
        batch = [sound(name, seed) for seed in (1, 2, 3)]
        if name in WAVES:
            batch[1] = sound(name, 2, length=45)  # never padded: it goes by itself
        together, backwards = (explainer(name).explain(some, list(METHODS)) for some in (batch, batch[::-1]))
        for i, given in enumerate(batch):
            for method, alone in explainer(name).explain(given, list(METHODS)).items():
                assert gap(together[method][i].scores, alone.scores) < CLOSE.get(name, 1e-9), method
                assert gap(backwards[method][2 - i].scores, alone.scores) < CLOSE.get(name, 1e-9), method

    def test_recorded_is_real_and_the_model_untouched(self, name: str) -> None:
        ex = explainer(name)
        before = model_snapshot.of_model(ex.adapter.model)
        real = ex.adapter.model(**sound(name)).logits[0].detach()
        e = ex.explain(sound(name), "generic")
        assert e.target["value"] == pytest.approx(float(real.max()), rel=1e-6)
        assert e.certificate["readout_checked"] and e.certificate["capture_error"] < 1e-6
        with pytest.raises(InputError):
            ex.explain(sound(name), target="thunder")
        changes = model_snapshot.changes(before, model_snapshot.of_model(ex.adapter.model))
        # Wav2Vec 2.0 and its kin draw random numbers in every pass of their own, for layers that training drops
        assert [change for change in changes if name not in WAVES or not change.startswith("random numbers")] == []

    def test_gradients_of_the_sound_are_gathered_whole(self, name: str) -> None:
        ((leaf, given),) = sound(name).items()
        wave = given.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(explainer(name).adapter.model(**{leaf: wave}).logits[0, 1], wave)
        e = explainer(name).explain(sound(name), ["saliency", "input-x-gradient", Method("saliency", reduce="abs")], 1)
        assert gap((e["saliency"].scores ** 2).sum(), (gradient**2).sum()) < CLOSE.get(name, 1e-9)
        assert gap(e["saliency(reduce='abs')"].scores.sum(), gradient.abs().sum()) < CLOSE.get(name, 1e-9)
        assert abs(e["input-x-gradient"].scores.sum() - float((gradient * given).sum())) < 1e-6


@pytest.mark.parametrize("name", ["wav2vec2", "hubert", "whisper", "ast"])
def test_against_the_replicas(name: str) -> None:
    ex = explainer(name)
    seen = plain_pass.watch(
        _Leafed(ex.adapter.model), {"pixel_values": next(iter(sound(name).values()))}, lambda o: o.logits[0, 2]
    )
    row = np.ones(seen.units) / seen.units if name != "ast" else np.r_[0.5, 0.5, np.zeros(seen.units - 2)]
    found = ex.explain(sound(name), ["generic", "rollout"], 2)
    for replica in (generic, rollout):
        method = replica.__name__.split(".")[-1]
        assert gap(found[method].scores, replica.scores(seen, row)) < CLOSE.get(name, 1e-9), method


class _Leafed(torch.nn.Module):
    """A model of sounds under the name that the replica's pass gives to real inputs."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.dtype = model, model.dtype

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, pixel_values: Tensor, **more: Any) -> Any:
        return self.model(pixel_values, **more)


class TestUnits:
    def test_frames_have_times(self) -> None:
        e = explainer("wav2vec2").explain(sound("wav2vec2"))
        # 61 numbers: (61 − 5) // 2 + 1 = 29, (29 − 3) // 2 + 1 = 14 frames, 4 numbers apart
        assert len(e) == 14 and e.stream == "audio" and e.units.kind == "frame"
        assert e.tokens[:3] == ["0.0000s", "0.0003s", "0.0005s"]

    def test_each_frame_has_its_own_numbers(self) -> None:
        ex, given = explainer("wav2vec2"), sound("wav2vec2")
        wave = given["input_values"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ex.adapter.model(wave).logits[0, 0], wave)
        e = ex.explain(given, Method("saliency", reduce="abs"), 0)
        ends = [*range(0, 14 * 4, 4), 61]
        parts = [float(gradient[0, a:b].abs().sum()) for a, b in pairwise(ends)]
        assert gap(e.scores, parts) < 1e-9

    def test_patches_of_a_spectrogram(self) -> None:
        ex, given = explainer("ast"), sound("ast")
        e = ex.explain(given, Method("saliency", reduce="abs"), 0)
        assert e.units.grid == (3, 5) and e.tokens[:3] == ["[CLS]", "[DIST]", "0,0"] and e.stream == "audio"
        assert e.image.shape == (11, 18, 3)
        wave = given["input_values"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ex.adapter.model(wave).logits[0, 0], wave)
        assert gap(e.heat_map()[1, 2], gradient[0, 6:9, 3:6].abs().sum()) < 1e-5  # time × frequency
        assert gap(e.heat_map()[2, 4], gradient[0, 12:, 6:].abs().sum()) < 1e-5

    def test_whisper_reads_two_frames_at_a_time(self) -> None:
        e = explainer("whisper").explain(sound("whisper"))
        assert len(e) == 10 and e.tokens[:2] == ["0.00s", "0.02s"]


class TestInputs:
    def test_a_waveform_with_its_extractor(self) -> None:
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000, do_normalize=True)
        ex = clearhead.load(explainer("wav2vec2").adapter.model, extractor)
        wave = np.random.default_rng(0).normal(size=61)
        e = ex.explain(audio=wave)
        assert e == ex.explain((wave, 8000)) == ex.explain(torch.as_tensor(wave))
        values = torch.as_tensor((wave - wave.mean()) / np.sqrt(wave.var() + 1e-7))[None]
        assert gap(e.scores, explainer("wav2vec2").explain({"input_values": values}).scores) < 1e-5
        assert e.tokens[1] == "0.0005s"
        with pytest.raises(InputError, match="16000 numbers per second, and the model takes 8000: resample it"):
            ex.explain((wave, 16000))

    @pytest.mark.parametrize("name", ["whisper", "ast"])
    def test_what_the_extractor_leaves_out_is_told(self, name: str) -> None:
        if name == "whisper":
            extractor: Any = transformers.WhisperFeatureExtractor(feature_size=6, sampling_rate=3200, chunk_length=1)
            most, rate = 3200, 3200
        else:
            extractor = transformers.ASTFeatureExtractor(num_mel_bins=11, max_length=18)
            most, rate = 400 + 17 * 160, 16_000
        ex = clearhead.load(explainer(name).adapter.model, extractor)
        wave = np.random.default_rng(0).normal(size=2 * most)
        for length, dropped in ((most, 0), (2 * most, 1)):
            e = ex.explain((wave[:length], rate), "saliency")
            assert e.certificate["truncated_tokens"] == dropped * len(e.units)
        assert e.scores.tolist() == ex.explain((wave[:most], rate), "saliency").scores.tolist()

    @pytest.mark.parametrize("frames", [7, 10, 18, 1024])
    def test_frames_are_whole_numbers_of_a_waveform(self, frames: int) -> None:
        """A product of fractions may lie just below one, and a sound that fits would be said to be cut."""
        extractor = transformers.ASTFeatureExtractor(num_mel_bins=11, max_length=frames)
        ex = clearhead.load(explainer("ast").adapter.model, extractor)
        assert ex.adapter._max_waveform_length == 400 + 160 * (frames - 1)

    def test_two_sounds_are_no_sound_and_its_rate(self) -> None:
        extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
        wave = np.zeros(61)
        with pytest.raises(InputError, match="a sound must be an array of real numbers over time, one channel"):
            clearhead.load(explainer("wav2vec2").adapter.model, extractor).explain(audio=(wave, wave))

    def test_padding_is_cut_off(self) -> None:
        given = sound("wav2vec2")["input_values"]
        padded = torch.nn.functional.pad(given, (0, 20))
        mask = torch.ones_like(padded).long()
        mask[:, 61:] = 0
        ex = explainer("wav2vec2")
        e = ex.explain({"input_values": padded, "attention_mask": mask})
        assert e == ex.explain({"input_values": given})

    @pytest.mark.parametrize(
        ("name", "given", "message"),
        [
            ("wav2vec2", {"input_values": torch.zeros(1, 4)}, "too few for one frame"),
            ("wav2vec2", {"input_values": torch.zeros(1, 4, 50)}, "must be batch × time"),
            ("wav2vec2", {"input_values": torch.zeros(1, 50, dtype=torch.long)}, "must hold real numbers"),
            ("wav2vec2", {"attention_mask": torch.ones(1, 50)}, "need input_values"),
            (
                "wav2vec2",
                {"input_values": torch.zeros(1, 50), "attention_mask": torch.tensor([[0] + [1] * 49])},
                "all padding at its end",
            ),
            ("wav2vec2", {"input_values": torch.zeros(1, 50), "attention_mask": torch.zeros(1, 50)}, "hides the whole"),
            ("wav2vec2", np.zeros(50), "without a feature extractor"),
            ("whisper", {"input_features": torch.zeros(1, 6, 30)}, "batch × 6 × 20"),
            ("ast", {"input_values": torch.zeros(1, 11, 18)}, "batch × 18 × 11"),
        ],
    )
    def test_bad_model_inputs(self, name: str, given: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            explainer(name).explain(given)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (np.zeros((2, 50)), "one channel"),
            (np.zeros(50, dtype=np.int16), "real numbers over time"),
            (np.full(50, np.nan), "not finite"),
            ("bark.wav", "real numbers over time"),
        ],
    )
    def test_bad_sounds(self, given: Any, message: str) -> None:
        ex = clearhead.load(explainer("wav2vec2").adapter.model, transformers.Wav2Vec2FeatureExtractor())
        with pytest.raises(InputError, match=message):
            ex.explain(audio=given)

    def test_a_tokenizer_is_no_extractor(self) -> None:
        from tests import models

        with pytest.raises(InputError, match="came with a tokenizer"):
            clearhead.load(explainer("wav2vec2").adapter.model, models.tokenizer("wordpiece"))


class TestRefusals:
    def test_classes_that_no_row_speaks_for(self) -> None:
        torch.manual_seed(0)
        config = transformers.Wav2Vec2Config(**_WAVE, use_weighted_layer_sum=True)
        ex = clearhead.load(transformers.Wav2Vec2ForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="read from all layers at once"):
            ex.explain(sound("wav2vec2"))
        assert ex.explain(sound("wav2vec2"), "saliency").scores.max() > 0

    def test_frames_that_convolutions_mix(self) -> None:
        config = transformers.Wav2Vec2ConformerConfig(**_WAVE, conv_depthwise_kernel_size=3)
        ex = clearhead.load(transformers.Wav2Vec2ConformerForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="by convolutions, too"):
            ex.explain(sound("wav2vec2"))
        assert ex.explain(sound("wav2vec2"), "saliency").scores.max() > 0

    def test_attention_on_fewer_frames(self) -> None:
        torch.manual_seed(0)
        config = transformers.SEWConfig(**{**_WAVE, "squeeze_factor": 2})
        ex = clearhead.load(transformers.SEWForSequenceClassification(config).double().eval())
        with pytest.raises(UnsupportedError, match="does not run over its 14 units"):
            ex.explain(sound("wav2vec2"))
        assert ex.explain(sound("wav2vec2"), "saliency").scores.max() > 0


def test_wavlm_attends_as_its_own_forward_pass() -> None:
    (module, *_) = [m for m in explainer("wavlm").adapter.model.modules() if type(m).__name__ == "WavLMAttention"]
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    for given in (None, mask):
        theirs = type(module).forward(module, hidden, given, output_attentions=True)  # transformers 5.0 must be asked
        ours: CustomAttentionResult = attend_with_gated_bias(module, hidden, given)
        for one, other in zip(ours[0], theirs, strict=True):
            assert gap(one.detach(), other.detach()) < 1e-12
