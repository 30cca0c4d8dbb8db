"""Tiles that stay in a CPU's cache: their sums and gradients are those of whole maps, under masks of every kind."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import clearhead
from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.kernels import cpu
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import AttentionCall
from tests import models
from tests.adapters import test_encoder_decoder as encoder_decoder
from tests.capture.attention import test_tiled as streaming

CASES = [name for name, own in streaming.CASES if own == "sdpa" and name != "position bias"]


def queries_of(call: AttentionCall, name: str) -> torch.Tensor:
    """Which queries are words: padding may see nothing, and nobody reads what it looks at."""
    seen = {"source": streaming.batch(name)["attention_mask"], "text": torch.ones(2, 4)}
    return seen[call.query_stream].float()


def wanted(call: AttentionCall, name: str) -> list[MapReduction]:
    words = queries_of(call, name)
    torch.manual_seed(call.layer)
    one, three = (torch.randn(2, count, words.shape[1]) * words[:, None] for count in (1, 3))
    kinds = ("positive", "product", "attention")
    every = [MapReduction(of, rows, heads) for of in kinds for rows in (None, one, three) for heads in (None, [1])]
    return [*every, MapReduction("positive", one, [1, 0])]


def expected(one: MapReduction, call: AttentionCall, name: str) -> torch.Tensor:
    attention, gradient = call.attention.double(), call.attention_gradient.double()
    maps = {"positive": (attention * gradient).clamp(min=0), "product": attention * gradient, "attention": attention}
    chosen = maps[one.quantity] if one.heads is None else maps[one.quantity][:, one.heads]
    if one.row_weights is None:
        return chosen.sum(3) * queries_of(call, name)[:, None]
    if one.row_weights.shape[1] == 1:
        return torch.einsum("bri,bhij->bhrj", one.row_weights.double(), chosen) / chosen.shape[1]
    return torch.einsum("bri,bhij->brj", one.row_weights.double(), chosen)[:, None] / chosen.shape[1]


@pytest.mark.parametrize("cells", [1, 2**19])
@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("name", CASES)
def test_sums_and_gradients_are_those_of_whole_maps(name: str, rows: int | None, cells: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(cpu, "CPU_TILE_ELEMENTS", cells)  # one head at a time, or all
    found: dict[str, list[torch.Tensor]] = {}
    tiles = TilingConfig(
        tile_rows=rows,
        kernel=CPUKernel(),
        request_reductions=lambda call: wanted(call, name),
        on_reduced=lambda call, sums: found.update({call.module: sums}),
    )
    record = streaming.recorder(name, "sdpa", torch.float32)
    tape = record.record(streaming.batch(name), streaming.value, streaming.ASKS, tiling=tiles)
    whole = streaming.materialised(name, "sdpa", torch.float32)
    assert tiles.kernel_log.name == "streaming: cached tiles" and len(found) == len(whole.calls)
    for call, mine in zip(whole.calls, tape.calls, strict=True):
        for one, total in zip(wanted(call, name), found[call.module], strict=True):
            true = expected(one, call, name)
            total = total * queries_of(call, name)[:, None] if one.row_weights is None else total
            assert total.shape == true.shape
            assert (total - true).abs().max() <= 1e-5 * true.abs().max()
        assert streaming.near(mine.block_input_gradient, call.block_input_gradient, name, "sdpa", torch.float32)
    into, true = tape.input_gradient["input_ids"], whole.input_gradient["input_ids"]
    assert streaming.near(into, true, name, "sdpa", torch.float32)


@pytest.mark.parametrize("name", ["causal", "sliding window"])
def test_attention_alone(name: str) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    tiles = TilingConfig(
        tile_rows=4,
        kernel=CPUKernel(),
        request_reductions=lambda call: [one for one in wanted(call, name) if one.quantity == "attention"],
        on_reduced=lambda call, sums: found.update({call.module: sums}),
    )
    record = streaming.recorder(name, "sdpa", torch.float32)
    with torch.no_grad():
        record.run(streaming.batch(name), streaming.value, ["attention"], tiling=tiles)
    for call in streaming.materialised(name, "sdpa", torch.float32).calls:
        every = [one for one in wanted(call, name) if one.quantity == "attention"]
        for one, total in zip(every, found[call.module], strict=True):
            true = expected(one, call, name)
            total = total * queries_of(call, name)[:, None] if one.row_weights is None else total
            assert (total - true).abs().max() <= 1e-5 * true.abs().max()


def test_whatever_format_torch_makes_tensors_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    e = ex.explain("She hates the book because it isn't good")
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as thread:  # which has no room for tiles yet
            same = thread.submit(ex.explain, "She hates the book because it isn't good").result()
    finally:
        torch.set_default_dtype(torch.float32)
    assert e.certificate["kernel"] == same.certificate["kernel"] == "streaming: cached tiles"
    assert abs(e.scores - same.scores).max() <= 1e-6 * abs(e.scores).max()


def test_what_is_kept_for_the_next_tile_is_small() -> None:
    def made() -> tuple[torch.Tensor, ...]:
        return cpu._get_scratch_buffer(cpu.CPU_TILE_ELEMENTS), cpu._get_scratch_buffer(cpu.CPU_TILE_ELEMENTS + 1)

    with ThreadPoolExecutor(1) as thread:  # which has kept nothing yet
        small, large = thread.submit(made).result()
        again, once_more = thread.submit(made).result()
    assert small.data_ptr() == again.data_ptr() and small.nbytes <= 6 * 2**20
    assert large.data_ptr() != once_more.data_ptr() and large.shape[1] > cpu.CPU_TILE_ELEMENTS
    assert cpu._get_scratch_buffer(1).data_ptr() != small.data_ptr()  # another thread's


def fake(dtype: torch.dtype = torch.float32, queries: int = 8, **changed: Any) -> Any:
    query, key = (torch.zeros(1, 4, count, 16, dtype=dtype) for count in (queries, 8))
    how = {"query": query, "key": key, "value": key, "causal": True, "mask": None, "sdpa_forward": print}
    return SimpleNamespace(**{**how, "kwargs": {"scaling": 0.2, "softcap": None}, **changed})


REFUSED = {
    "float64, whose softmax is the model's": {"dtype": torch.float64},
    "half precision": {"dtype": torch.bfloat16},
    "eager attention alone is exact": {"sdpa_forward": None},
    "a soft cap": {"kwargs": {"scaling": 0.2, "softcap": 30.0}},
    "sinks": {"kwargs": {"s_aux": torch.zeros(4)}},
    "causal with a cache": {"queries": 5},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_to_the_models_own_attention(why: str) -> None:
    assert CPUKernel().supports(fake(), ())
    assert not CPUKernel().supports(fake(**REFUSED[why]), ())


def test_they_are_chosen_where_sums_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    text = "She hates the book because it isn't good"

    def kernel(method: Any, **how: Any) -> str:
        found = ex.explain(text, [*method], **how)
        return found[method[0]].certificate["kernel"]

    assert kernel(["generic", "saliency"]) == "streaming: cached tiles"
    # which wants the maps themselves, of the last layer
    assert kernel(["generic", "attention-gradcam"]) == "streaming: cached tiles and torch tiles"
    deep = clearhead.Method("attention-gradcam", layers=(0, None))
    assert ex.explain(text, ["generic", deep])["generic"].certificate["kernel"] == "materialised"
    wide = clearhead.Method("generic", fusion="mean-clamp")
    assert ex.explain(text, wide).certificate["kernel"] == "materialised"  # heads are joined before they are clamped
    assert ex.explain(text, clearhead.Method("tam", steps=2)).certificate["kernel"] == "materialised"
    assert kernel(["generic"], kernel="tiles") == "streaming: torch tiles"
    assert kernel(["generic"], kernel="materialised") == "materialised"
    with pytest.raises(clearhead.UnsupportedError, match="kernel='triton' needs a GPU"):
        ex.explain(text, kernel="triton")


@pytest.mark.parametrize(("first", "kernel"), [("generic", "materialised"), ("attention", "streaming: cached tiles")])
def test_streams_that_look_at_each_other_share_one_pass(first: str, kernel: str, monkeypatch: Any) -> None:
    """A method has another rule for them than for one stream, and whether sums are enough for it is that rule's."""
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 2)
    model = encoder_decoder.made("bart").float()
    model.set_attn_implementation("sdpa")
    ex = clearhead.load(model, encoder_decoder.WORDS)
    given: dict[str, Any] = {"method": [first, "saliency"], "answer": encoder_decoder.ANSWERS}
    given["target"] = clearhead.GeneratedToken(1)
    ex.explain(encoder_decoder.SOURCES, **given)
    passes: list[Any] = []
    run = Recorder.run
    monkeypatch.setattr(Recorder, "run", lambda self, *args, **how: passes.append(how) or run(self, *args, **how))
    found = ex.explain(encoder_decoder.SOURCES, **given)
    assert len(passes) == 1 and found[first][0]["source"].certificate["kernel"] == kernel


@pytest.mark.parametrize("rows", [3, None])
def test_a_query_that_sees_nothing_has_no_attention(rows: int | None) -> None:
    """As in torch's kernel, whatever else is asked for: by a mask of the caller's, the row that is read is padding."""
    ex = models.explainer("modernbert/classify", torch.float32)
    model = ex.adapter.model
    model.set_attn_implementation("sdpa")
    ex.recorder.tile_rows = rows
    ids = torch.randint(5, 40, (2, 20), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    seen[1, :12] = 0
    vectors = model.get_input_embeddings()(ids).detach().requires_grad_()
    logit = model(inputs_embeds=vectors, attention_mask=seen).logits[1, 1]
    true = torch.autograd.grad(logit, vectors)[0][1].norm(dim=-1).numpy()
    for method in (["saliency"], ["saliency", "generic"]):
        given = {"input_ids": ids, "attention_mask": seen}
        found = ex.explain(given, method, target=1, kernel="streaming")["saliency"][1]
        assert found.certificate["kernel"] == "streaming: cached tiles"
        assert abs(found.scores - true).max() <= 1e-5 * true.max()


def test_a_batch_of_many_tokens_together_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    texts = ["She hates the book because it isn't good"] * 3
    alone = ex.explain(texts, batch_size=3)
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_BATCH_UNITS", 2 * len(alone[0].units))
    together = ex.explain(texts, batch_size=2)
    assert [e.certificate["kernel"] for e in alone] == ["materialised"] * 3
    assert [e.certificate["kernel"] for e in together] == ["streaming: cached tiles"] * 2 + ["materialised"]
    for mine, whole in zip(together, alone, strict=True):
        assert abs(mine.scores - whole.scores).max() <= 1e-5 * abs(whole.scores).max()


@pytest.mark.parametrize(
    ("own", "dtype"), [("eager", torch.float32), ("sdpa", torch.float64), ("sdpa", torch.bfloat16)]
)
def test_attention_that_they_do_not_take_keeps_its_maps(
    own: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", dtype)
    ex.adapter.model.set_attn_implementation(own)
    assert ex.explain("She hates the book because it isn't good").certificate["kernel"] == "materialised"
