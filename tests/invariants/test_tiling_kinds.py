"""Streaming scores equal materialised scores, for every kind of attention and every method that streams."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import clearhead
from clearhead import GeneratedToken
from tests import dual_models, models
from tests.adapters import test_decoder as decoders
from tests.adapters import test_encoder_decoder as encoder_decoders
from tests.invariants import cases
from tests.invariants.test_tiling import STREAMING, needs_materialised_maps

#: The kind of attention that each decoder covers.
KINDS = {
    "gpt2": "causal",
    "llama": "grouped heads",
    "mistral": "sliding window",
    "gemma2": "soft cap",
    "gpt-oss": "sinks",
}
#: Head widths.
WIDTHS = (32, 64, 128, 256)


@cache
def decoder(family: str, **options: Any) -> clearhead.Explainer:
    name, settings = decoders.FAMILIES[family]
    cls = getattr(__import__("transformers"), name)
    torch.manual_seed(3)
    return clearhead.load(cls(cls.config_class(**{**settings, **options})).eval(), decoders.WORDS)


def assert_tiles_equal_materialised(ex: clearhead.Explainer, raws: Any, methods: list[Any], **options: Any) -> None:
    """Assert that tiles of five and eight rows give the materialised scores, with inputs of different lengths."""
    expected = ex.explain(raws, method=methods, kernel="materialised", **options)
    for rows in (5, 8):
        ex.recorder.tile_rows = rows
        actual = ex.explain(raws, method=methods, kernel="tiles", **options)
        for name, references in expected.items():
            size = max(
                abs(stream_explanation.scores).max()
                for reference in references
                for stream_explanation in streams(reference)
            )
            for explanation, reference_explanation in zip(actual[name], references, strict=True):
                for stream_explanation, stream_reference in zip(
                    streams(explanation), streams(reference_explanation), strict=True
                ):
                    assert stream_explanation.certificate["kernel"] == "streaming: torch tiles"
                    cases.assert_alike(stream_explanation, stream_reference, 1e-5, size)


def streams(e: Any) -> list[Any]:
    return [e[stream] for stream in e.streams] if hasattr(e, "streams") and len(e.streams) > 1 else [e]


@pytest.mark.parametrize("family", KINDS)
def test_decoder_tiles_equal_materialised(family: str) -> None:
    ex = decoder(family)
    assert_tiles_equal_materialised(
        ex, decoders.PROMPTS, streaming_methods(), answer=decoders.ANSWERS, target=GeneratedToken(1)
    )


def streaming_methods() -> list[clearhead.Method]:
    return [method for method in cases.with_few(STREAMING) if not needs_materialised_maps(method)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_input_tiles_equal_materialised(family: str) -> None:
    """Two packed texts, separated by their positions, so the mask is no band mask."""
    ids = torch.arange(28).reshape(2, 14) * 7 % 37 + 5
    positions = torch.tensor([[*range(6), *range(8)], [*range(9), *range(5)]])
    assert_tiles_equal_materialised(
        decoder(family), {"input_ids": ids, "position_ids": positions}, streaming_methods(), target=7
    )


def test_position_bias_tiles_equal_materialised() -> None:
    models.skip_if_not_yet("t5")
    shape = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    config = transformers.T5Config(**shape, pad_token_id=0, num_labels=3, tie_word_embeddings=False)
    ex = clearhead.load(transformers.T5ForTokenClassification(config).eval())
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    ids = torch.arange(24).reshape(2, 12) * 7 % 50 + 5
    assert_tiles_equal_materialised(ex, {"input_ids": ids, "attention_mask": mask}, streaming_methods())


def test_dual_encoder_tiles_equal_materialised() -> None:
    """Each stream attends to itself only, and the backward pass interleaves their calls."""
    ex = dual_models.explainer("clip")
    assert_tiles_equal_materialised(ex, None, streaming_methods(), text=dual_models.TEXTS, image=dual_models.pictures())


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_continuation_steps_share_one_streaming_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt × continuation matrix takes one pass."""
    ex, passes = decoder(family), []
    run = type(ex.recorder).run

    def record_tiling(self: Any, *args: Any, **options: Any) -> Any:
        passes.append(options.get("tiling"))
        return run(self, *args, **options)

    ex.explain(decoders.PROMPTS, answer=decoders.ANSWERS, method="generic")  # runs the self-test and the read-out check
    monkeypatch.setattr(type(ex.recorder), "run", record_tiling)
    methods = ["generic", "grad-sam", "attcat", "attention-gradcam", "rollout", "attention-gradient"]
    actual = ex.explain(decoders.PROMPTS, method=methods, answer=decoders.ANSWERS, kernel="tiles")
    assert len(passes) == 1
    expected = ex.explain(decoders.PROMPTS, method=methods, answer=decoders.ANSWERS, kernel="materialised")
    for name, references in expected.items():
        size = max(abs(reference.matrix).max() for reference in references)
        for explanation, expected_explanation in zip(actual[name], references, strict=True):
            assert len(explanation.matrix) > 1
            cases.assert_alike(explanation, expected_explanation, 1e-5, size)


@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_equal_materialised_for_every_head_width(width: int) -> None:
    ex = decoder("llama", head_dim=width, num_hidden_layers=2)
    assert_tiles_equal_materialised(
        ex, decoders.PROMPTS[:2], ["generic", "grad-sam"], answer=decoders.ANSWERS[:2], target=GeneratedToken(0)
    )


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_decoder_tiles_equal_materialised(family: str) -> None:
    """Methods that read cross-attention rows, and methods that propagate through both streams."""
    models.skip_if_not_yet(family)
    ex = encoder_decoders.explainer(family)
    options = {"answer": encoder_decoders.ANSWERS, "target": GeneratedToken(1)}
    assert_tiles_equal_materialised(
        ex, encoder_decoders.SOURCES, ["attention", "attention-gradcam", "generic", "rollout"], **options
    )


def test_offloaded_layers_can_be_checkpointed(tmp_path: Any) -> None:
    """Layers that accelerate offloads to disk are recomputed one at a time."""
    accelerate = pytest.importorskip("accelerate")
    ex, model = decoder("llama"), decoders.made("llama").float()
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{i}": "disk" for i in range(3)}
    model.load_state_dict(ex.adapter.model.state_dict())
    offloaded = clearhead.load(
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path), decoders.WORDS
    )
    options = {"method": ["generic", "attcat"], "answer": decoders.ANSWERS, "target": GeneratedToken(1)}
    actual = offloaded.explain(decoders.PROMPTS, kernel="tiles", checkpoint=True, **options)
    expected = ex.explain(decoders.PROMPTS, kernel="materialised", **options)
    for name, references in expected.items():
        for explanation, reference in zip(actual[name], references, strict=True):
            assert explanation.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
            cases.assert_alike(explanation, reference, 1e-5, max(abs(each.scores).max() for each in references))
