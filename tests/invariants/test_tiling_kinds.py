"""Every kind of attention: what streams is what is computed from whole maps, on every method that can."""

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
from tests.invariants.test_tiling import STREAMING, whole

#: What each decoder is here for.
KINDS = {
    "gpt2": "causal",
    "llama": "grouped heads",
    "mistral": "sliding window",
    "gemma2": "soft cap",
    "gpt-oss": "sinks",
}
#: How wide a head is.
WIDTHS = (32, 64, 128, 256)


@cache
def decoder(family: str, **more: Any) -> clearhead.Explainer:
    name, settings = decoders.FAMILIES[family]
    cls = getattr(__import__("transformers"), name)
    torch.manual_seed(3)
    return clearhead.load(cls(cls.config_class(**{**settings, **more})).eval(), decoders.WORDS)


def compared(ex: clearhead.Explainer, raws: Any, methods: list[Any], **how: Any) -> None:
    """The same from tiles of five and of eight rows, and from whole maps; padded, since the inputs are not as long."""
    expected = ex.explain(raws, method=methods, kernel="materialised", **how)
    for rows in (5, 8):
        ex.recorder.tile_rows = rows
        found = ex.explain(raws, method=methods, kernel="tiles", **how)
        for name, parts in expected.items():
            size = max(abs(one.scores).max() for part in parts for one in streams(part))
            for e, other in zip(found[name], parts, strict=True):
                for one, two in zip(streams(e), streams(other), strict=True):
                    assert one.certificate["kernel"] == "streaming: torch tiles"
                    cases.assert_alike(one, two, 1e-5, size)


def streams(e: Any) -> list[Any]:
    return [e[stream] for stream in e.streams] if hasattr(e, "streams") and len(e.streams) > 1 else [e]


@pytest.mark.parametrize("family", KINDS)
def test_decoders(family: str) -> None:
    ex = decoder(family)
    compared(ex, decoders.PROMPTS, streaming(), answer=decoders.ANSWERS, target=GeneratedToken(1))


def streaming() -> list[clearhead.Method]:
    return [method for method in cases.with_few(STREAMING) if not whole(method)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_packed_inputs(family: str) -> None:
    """Two texts in a row, told apart by their positions: no mask in a few words says that."""
    ids = torch.arange(28).reshape(2, 14) * 7 % 37 + 5
    places = torch.tensor([[*range(6), *range(8)], [*range(9), *range(5)]])
    compared(decoder(family), {"input_ids": ids, "position_ids": places}, streaming(), target=7)


def test_position_bias_in_one_stream() -> None:
    models.skip_if_not_yet("t5")
    shape = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    config = transformers.T5Config(**shape, pad_token_id=0, num_labels=3, tie_word_embeddings=False)
    ex = clearhead.load(transformers.T5ForTokenClassification(config).eval())
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    ids = torch.arange(24).reshape(2, 12) * 7 % 50 + 5
    compared(ex, {"input_ids": ids, "attention_mask": mask}, streaming())


def test_streams_side_by_side() -> None:
    """Each looks at itself alone: the backward pass comes to the calls of one before it is through with the other."""
    ex = dual_models.explainer("clip")
    compared(ex, None, streaming(), text=dual_models.TEXTS, image=dual_models.pictures())


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_every_step_of_an_answer(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole prompt × answer matrix is made in one pass."""
    ex, passes = decoder(family), []
    run = type(ex.recorder).run

    def counted(self: Any, *args: Any, **how: Any) -> Any:
        passes.append(how.get("tiling"))
        return run(self, *args, **how)

    ex.explain(decoders.PROMPTS, answer=decoders.ANSWERS)  # tested, its read-out checked
    monkeypatch.setattr(type(ex.recorder), "run", counted)
    methods = ["generic", "grad-sam", "attcat", "attention-gradcam", "rollout", "attention-gradient"]
    found = ex.explain(decoders.PROMPTS, method=methods, answer=decoders.ANSWERS, kernel="tiles")
    assert len(passes) == 1
    expected = ex.explain(decoders.PROMPTS, method=methods, answer=decoders.ANSWERS, kernel="materialised")
    for name, parts in expected.items():
        size = max(abs(one.matrix).max() for one in parts)
        for e, other in zip(found[name], parts, strict=True):
            assert len(e.matrix) > 1
            cases.assert_alike(e, other, 1e-5, size)


@pytest.mark.parametrize("width", WIDTHS)
def test_heads_of_every_width(width: int) -> None:
    ex = decoder("llama", head_dim=width, num_hidden_layers=2)
    compared(ex, decoders.PROMPTS[:2], ["generic", "grad-sam"], answer=decoders.ANSWERS[:2], target=GeneratedToken(0))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_across(family: str) -> None:
    """Rows that are read where they look at another stream, and those that are pushed through both."""
    models.skip_if_not_yet(family)
    ex = encoder_decoders.explainer(family)
    how = {"answer": encoder_decoders.ANSWERS, "target": GeneratedToken(1)}
    compared(ex, encoder_decoders.SOURCES, ["attention", "attention-gradcam", "generic", "rollout"], **how)


def test_weights_on_disk_are_read_once_more(tmp_path: Any) -> None:
    """Layers that accelerate keeps on disk are computed again, one at a time, from what it brings."""
    accelerate = pytest.importorskip("accelerate")
    ex, model = decoder("llama"), decoders.made("llama").float()
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(3)}
    model.load_state_dict(ex.adapter.model.state_dict())
    spread = clearhead.load(
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path), decoders.WORDS
    )
    how = {"method": ["generic", "attcat"], "answer": decoders.ANSWERS, "target": GeneratedToken(1)}
    found = spread.explain(decoders.PROMPTS, kernel="tiles", checkpoint=True, **how)
    expected = ex.explain(decoders.PROMPTS, kernel="materialised", **how)
    for name, parts in expected.items():
        for e, other in zip(found[name], parts, strict=True):
            assert e.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
            cases.assert_alike(e, other, 1e-5, max(abs(one.scores).max() for one in parts))
