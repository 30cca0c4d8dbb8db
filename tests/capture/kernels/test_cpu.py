"""CPU kernel with cache-sized tiles: reductions and gradients equal those of materialised maps, under every mask."""

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
from tests.capture.attention import test_tiled as tiled_models

CASES = [name for name, implementation in tiled_models.CASES if implementation == "sdpa" and name != "position bias"]


def query_mask(call: AttentionCall, name: str) -> torch.Tensor:
    """1 for queries that are tokens, 0 for padding, whose rows may be fully masked."""
    seen = {"source": tiled_models.make_batch(name)["attention_mask"], "text": torch.ones(2, 4)}
    return seen[call.query_stream].float()


def make_reductions(call: AttentionCall, name: str) -> list[MapReduction]:
    is_token = query_mask(call, name)
    torch.manual_seed(call.layer)
    one_row, three_rows = (torch.randn(2, count, is_token.shape[1]) * is_token[:, None] for count in (1, 3))
    kinds = ("positive", "product", "attention")
    reductions = [
        MapReduction(quantity, rows, heads)
        for quantity in kinds
        for rows in (None, one_row, three_rows)
        for heads in (None, [1])
    ]
    return [*reductions, MapReduction("positive", one_row, [1, 0])]


def reference_reduction(reduction: MapReduction, call: AttentionCall, name: str) -> torch.Tensor:
    attention, gradient = call.attention.double(), call.attention_gradient.double()
    maps = {"positive": (attention * gradient).clamp(min=0), "product": attention * gradient, "attention": attention}
    selected = maps[reduction.quantity] if reduction.heads is None else maps[reduction.quantity][:, reduction.heads]
    if reduction.row_weights is None:
        return selected.sum(3) * query_mask(call, name)[:, None]
    if reduction.row_weights.shape[1] == 1:
        return torch.einsum("bri,bhij->bhrj", reduction.row_weights.double(), selected) / selected.shape[1]
    return torch.einsum("bri,bhij->brj", reduction.row_weights.double(), selected)[:, None] / selected.shape[1]


@pytest.mark.parametrize("cells", [1, 2**19])
@pytest.mark.parametrize("rows", [1, 4, None])
@pytest.mark.parametrize("name", CASES)
def test_reductions_and_gradients_equal_materialised_maps(
    name: str, rows: int | None, cells: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(cpu, "CPU_TILE_ELEMENTS", cells)  # one head at a time, or all
    actual: dict[str, list[torch.Tensor]] = {}
    tiling = TilingConfig(
        tile_rows=rows,
        kernel=CPUKernel(),
        request_reductions=lambda call: make_reductions(call, name),
        on_reduced=lambda call, sums: actual.update({call.module: sums}),
    )
    recorder = tiled_models.make_recorder(name, "sdpa", torch.float32)
    tape = recorder.record(
        tiled_models.make_batch(name), tiled_models.target_logit, tiled_models.REQUIREMENTS, tiling=tiling
    )
    materialised = tiled_models.record_materialised(name, "sdpa", torch.float32)
    assert tiling.kernel_log.name == "streaming: cached tiles" and len(actual) == len(materialised.calls)
    for call, streamed_call in zip(materialised.calls, tape.calls, strict=True):
        for reduction, total in zip(make_reductions(call, name), actual[call.module], strict=True):
            reference = reference_reduction(reduction, call, name)
            total = total * query_mask(call, name)[:, None] if reduction.row_weights is None else total
            assert total.shape == reference.shape
            assert (total - reference).abs().max() <= 1e-5 * reference.abs().max()
        assert tiled_models.is_close(
            streamed_call.block_input_gradient, call.block_input_gradient, name, "sdpa", torch.float32
        )
    input_gradient, reference = tape.input_gradient["input_ids"], materialised.input_gradient["input_ids"]
    assert tiled_models.is_close(input_gradient, reference, name, "sdpa", torch.float32)


@pytest.mark.parametrize("name", ["causal", "sliding window"])
def test_attention_reductions_without_gradients_equal_materialised_maps(name: str) -> None:
    actual: dict[str, list[torch.Tensor]] = {}
    tiling = TilingConfig(
        tile_rows=4,
        kernel=CPUKernel(),
        request_reductions=lambda call: [
            reduction for reduction in make_reductions(call, name) if reduction.quantity == "attention"
        ],
        on_reduced=lambda call, sums: actual.update({call.module: sums}),
    )
    recorder = tiled_models.make_recorder(name, "sdpa", torch.float32)
    with torch.no_grad():
        recorder.run(tiled_models.make_batch(name), tiled_models.target_logit, ["attention"], tiling=tiling)
    for call in tiled_models.record_materialised(name, "sdpa", torch.float32).calls:
        reductions = [reduction for reduction in make_reductions(call, name) if reduction.quantity == "attention"]
        for reduction, total in zip(reductions, actual[call.module], strict=True):
            reference = reference_reduction(reduction, call, name)
            total = total * query_mask(call, name)[:, None] if reduction.row_weights is None else total
            assert (total - reference).abs().max() <= 1e-5 * reference.abs().max()


def test_cpu_kernel_is_independent_of_default_dtype_and_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    explanation = ex.explain("She hates the book because it isn't good", method="generic")
    torch.set_default_dtype(torch.float64)
    try:
        with ThreadPoolExecutor(1) as thread:  # a thread without scratch buffers
            in_float64_default = thread.submit(
                ex.explain, "She hates the book because it isn't good", "generic"
            ).result()
    finally:
        torch.set_default_dtype(torch.float32)
    assert explanation.certificate["kernel"] == in_float64_default.certificate["kernel"] == "streaming: cached tiles"
    assert abs(explanation.scores - in_float64_default.scores).max() <= 1e-6 * abs(explanation.scores).max()


def test_only_small_scratch_buffers_are_reused_per_thread() -> None:
    def get_buffers() -> tuple[torch.Tensor, ...]:
        return cpu._get_scratch_buffer(cpu.CPU_TILE_ELEMENTS), cpu._get_scratch_buffer(cpu.CPU_TILE_ELEMENTS + 1)

    with ThreadPoolExecutor(1) as thread:  # a thread without scratch buffers
        small, large = thread.submit(get_buffers).result()
        small_again, large_again = thread.submit(get_buffers).result()
    assert small.data_ptr() == small_again.data_ptr() and small.nbytes <= 6 * 2**20
    assert large.data_ptr() != large_again.data_ptr() and large.shape[1] > cpu.CPU_TILE_ELEMENTS
    assert cpu._get_scratch_buffer(1).data_ptr() != small.data_ptr()  # each thread has its own buffer


def make_call(dtype: torch.dtype = torch.float32, queries: int = 8, **changes: Any) -> Any:
    query, key = (torch.zeros(1, 4, count, 16, dtype=dtype) for count in (queries, 8))
    fields = {"query": query, "key": key, "value": key, "causal": True, "mask": None, "sdpa_forward": print}
    return SimpleNamespace(**{**fields, "kwargs": {"scaling": 0.2, "softcap": None}, **changes})


UNSUPPORTED = {
    "float64": {"dtype": torch.float64},
    "half precision": {"dtype": torch.bfloat16},
    "no SDPA forward": {"sdpa_forward": None},
    "a soft cap": {"kwargs": {"scaling": 0.2, "softcap": 30.0}},
    "sinks": {"kwargs": {"s_aux": torch.zeros(4)}},
    "causal with a cache": {"queries": 5},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_cpu_kernel_rejects_unsupported_calls(case: str) -> None:
    assert CPUKernel().supports(make_call(), ())
    assert not CPUKernel().supports(make_call(**UNSUPPORTED[case]), ())


def test_cpu_kernel_is_selected_if_methods_need_only_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    text = "She hates the book because it isn't good"

    def kernel(method: Any, **options: Any) -> str:
        explanations = ex.explain(text, [*method], **options)
        return explanations[method[0]].certificate["kernel"]

    assert kernel(["generic", "saliency"]) == "streaming: cached tiles"
    # attention-gradcam needs the maps of the last layer
    assert kernel(["generic", "attention-gradcam"]) == "streaming: cached tiles and torch tiles"
    all_layers = clearhead.Method("attention-gradcam", layers=(0, None))
    assert ex.explain(text, ["generic", all_layers])["generic"].certificate["kernel"] == "materialised"
    mean_clamp = clearhead.Method("generic", fusion="mean-clamp")
    # heads are averaged before they are clamped
    assert ex.explain(text, mean_clamp).certificate["kernel"] == "materialised"
    assert ex.explain(text, clearhead.Method("tam", steps=2)).certificate["kernel"] == "materialised"
    assert kernel(["generic"], kernel="tiles") == "streaming: torch tiles"
    assert kernel(["generic"], kernel="materialised") == "materialised"
    with pytest.raises(clearhead.UnsupportedError, match="kernel='triton' needs a GPU"):
        ex.explain(text, kernel="triton", method="generic")


@pytest.mark.parametrize(("first", "kernel"), [("generic", "materialised"), ("attention", "streaming: cached tiles")])
def test_cross_attention_methods_share_one_pass(first: str, kernel: str, monkeypatch: Any) -> None:
    """Methods have another rule for cross-attention, and that rule decides whether reductions are enough."""
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 2)
    model = encoder_decoder.made("bart").float()
    model.set_attn_implementation("sdpa")
    ex = clearhead.load(model, encoder_decoder.WORDS)
    arguments: dict[str, Any] = {"method": [first, "saliency"], "answer": encoder_decoder.ANSWERS}
    arguments["target"] = clearhead.GeneratedToken(1)
    ex.explain(encoder_decoder.SOURCES, **arguments)
    passes: list[Any] = []
    run = Recorder.run
    monkeypatch.setattr(
        Recorder, "run", lambda self, *args, **options: passes.append(options) or run(self, *args, **options)
    )
    explanations = ex.explain(encoder_decoder.SOURCES, **arguments)
    assert len(passes) == 1 and explanations[first][0]["source"].certificate["kernel"] == kernel


@pytest.mark.parametrize("rows", [3, None])
def test_fully_masked_query_row_gives_reference_saliency(rows: int | None) -> None:
    """As in torch's kernel, alone or with other methods: the caller's mask makes the read-out row fully masked."""
    ex = models.explainer("modernbert/classify", torch.float32)
    model = ex.adapter.model
    model.set_attn_implementation("sdpa")
    ex.recorder.tile_rows = rows
    ids = torch.randint(5, 40, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :12] = 0
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    logit = model(inputs_embeds=embeddings, attention_mask=mask).logits[1, 1]
    expected = torch.autograd.grad(logit, embeddings)[0][1].norm(dim=-1).numpy()
    kernels = {("saliency",): "not captured", ("saliency", "generic"): "streaming: cached tiles"}
    for method, kernel in kernels.items():
        inputs = {"input_ids": ids, "attention_mask": mask}
        saliency = ex.explain(inputs, [*method], target=1, kernel="streaming")["saliency"][1]
        assert saliency.certificate["kernel"] == kernel
        assert abs(saliency.scores - expected).max() <= 1e-5 * expected.max()


def test_cpu_kernel_is_selected_for_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify", torch.float32)
    ex.adapter.model.set_attn_implementation("sdpa")
    texts = ["She hates the book because it isn't good"] * 3
    materialised = ex.explain(texts, batch_size=3, method="generic")
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_BATCH_UNITS", 2 * len(materialised[0].units))
    tiled = ex.explain(texts, batch_size=2, method="generic")
    assert [e.certificate["kernel"] for e in materialised] == ["materialised"] * 3
    assert [e.certificate["kernel"] for e in tiled] == ["streaming: cached tiles"] * 2 + ["materialised"]
    for actual, reference in zip(tiled, materialised, strict=True):
        assert abs(actual.scores - reference.scores).max() <= 1e-5 * abs(reference.scores).max()


@pytest.mark.parametrize(
    ("implementation", "dtype"), [("eager", torch.float32), ("sdpa", torch.float64), ("sdpa", torch.bfloat16)]
)
def test_unsupported_attention_is_materialised(
    implementation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex = models.explainer("bert/classify", dtype)
    ex.adapter.model.set_attn_implementation(implementation)
    assert (
        ex.explain("She hates the book because it isn't good", method="generic").certificate["kernel"] == "materialised"
    )
