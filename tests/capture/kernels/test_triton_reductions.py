"""The Triton reduction kernels against the formula in float64, and explanations with them against materialised maps.

On a machine with a GPU they are compiled (`make test-gpu`); elsewhere they are interpreted, in a subprocess, because
Triton decides that at import.
"""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import models
from tests.capture.flash_attention import use_reference_flash_attention
from tests.capture.float64_reference import far_from_whole_maps
from tests.capture.triton_interpreter import COMPILED, DEVICE, run_interpreted, runs_kernels, starts_interpreter

pytest.importorskip("triton", reason="Triton is for Linux, and comes with torch for CUDA")


@starts_interpreter
def test_passes_in_triton_interpreter():
    run_interpreted(__file__)


def make_call(dtype=torch.float32, width=32, queries=8, keys=8, device="cpu", **changes):
    def zeros(length):
        return torch.zeros(1, 4, length, width, dtype=dtype, device=device)

    tensors = {"query": zeros(queries), "key": zeros(keys), "value": zeros(keys), "kernel_saved_tensors": ()}
    options = {"causal": True, "mask": None, "kwargs": {"scaling": 0.2, "softcap": None}, "scaling": 0.2}
    return SimpleNamespace(**{**tensors, **options, "sdpa_forward": print, **changes})


UNSUPPORTED = {
    "float64": {"dtype": torch.float64},
    "bfloat16 without a GPU": {"dtype": torch.bfloat16},
    "float32 with wide heads": {"width": 160},
    "no SDPA forward": {"sdpa_forward": None},
    "soft cap": {"kwargs": {"scaling": 0.2, "softcap": 30.0}},
    "sinks": {"kwargs": {"s_aux": torch.zeros(4)}},
    "causal with a cache": {"queries": 5},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_triton_kernel_rejects_unsupported_calls(case):
    from clearhead.capture.kernels.triton.kernel import TritonKernel

    assert TritonKernel().supports(make_call(), ())
    assert not TritonKernel().supports(make_call(**UNSUPPORTED[case]), ())


def test_triton_kernel_rejects_reductions_with_many_rows_or_columns():
    from clearhead.capture.attention.reductions import MapReduction
    from clearhead.capture.kernels.triton.kernel import TritonKernel

    few, many = (MapReduction("attention", torch.zeros(1, count, 8)) for count in (30, 3000))
    assert TritonKernel().supports(make_call(), [few]) and not TritonKernel().supports(make_call(), [few, many])
    few, many = (MapReduction("attention", column_weights=torch.zeros(1, count, 8)) for count in (30, 300))
    assert TritonKernel().supports(make_call(), [few]) and not TritonKernel().supports(make_call(), [few, many])


def make_reducer(heads=2, shared=1, queries=21, keys=21, width=16, dtype=torch.float32, **options):
    from clearhead.capture.kernels.triton.reductions import BlockConfig, TritonReducer

    def random(count, length):
        return torch.randn(2, length, count, width, device=DEVICE).to(dtype).transpose(1, 2)

    torch.manual_seed(0)
    tensors = random(heads, queries), random(shared, keys), random(shared, keys), random(heads, queries)
    return TritonReducer(*tensors, None, width**-0.5, blocks=BlockConfig(16, 16, 4, 1), **options)


def maps(call):
    """A and ∂y/∂A by their formulas, in float64."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (tensor.double().repeat_interleave(group, 1) for tensor in (call.key, call.value))
    scores = call.query.double() @ key.mT * call.scale
    _, _, queries, keys = scores.shape
    for i in range(queries):
        for j in range(keys):
            last = i + keys - queries + call.lookahead
            if (call.causal and j > last) or (call.window is not None and j <= last - call.window):
                scores[:, :, i, j] = -torch.inf
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -torch.inf)
    elif call.mask is not None:
        scores = scores + call.mask.double()
    return scores.softmax(-1).nan_to_num(0), call.gradient.double() @ value.mT


def padding(keys):
    return (torch.arange(keys, device=DEVICE) < torch.tensor([keys, keys - 4], device=DEVICE)[:, None])[:, None, None]


CALLS = {
    "whole, three heads share keys": lambda: make_reducer(heads=3),
    "causal": lambda: make_reducer(causal=True),
    "causal, half precision, odd width": lambda: make_reducer(causal=True, width=24, dtype=torch.float16),
    "causal, more keys than queries": lambda: make_reducer(queries=18, keys=37, causal=True),
    "window": lambda: make_reducer(queries=37, keys=37, causal=True, window=6),
    "bidirectional window": lambda: make_reducer(queries=37, keys=37, causal=True, window=9, lookahead=4),
    "bidirectional window wider than a block, padded": lambda: make_reducer(
        queries=53, keys=53, causal=True, window=39, lookahead=19, mask=padding(53)
    ),
    "padded": lambda: make_reducer(mask=padding(21)),
    "causal, padded": lambda: make_reducer(causal=True, mask=padding(21)),
    "position bias": lambda: make_reducer(queries=9, keys=21, mask=torch.randn(1, 2, 9, 21, device=DEVICE)),
    "fully masked sample": lambda: make_reducer(
        mask=padding(21) & torch.eye(2, device=DEVICE).bool()[:, :1, None, None]
    ),
}


def assert_close(actual, expected):
    assert actual.dtype == torch.float32
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-6 * float(expected.abs().max()))


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_reductions_match_float64_maps(name):
    call = CALLS[name]()
    attention, gradient = maps(call)
    call = call.with_computed_lse()
    batch, _, queries, _ = call.map_shape
    weights = torch.rand(batch, 2, queries, device=DEVICE)
    weights[:, :, :3] = 0  # rows without weight are skipped
    signed = weights[:, 0] - 0.5
    positive = (attention * gradient).clamp(min=0)
    assert_close(
        call.sum_over_queries(weights[:, 0], "positive"), torch.einsum("bi,bhij->bhj", weights[:, 0].double(), positive)
    )
    assert_close(
        call.sum_over_queries(signed, "product"), torch.einsum("bi,bhij->bhj", signed.double(), attention * gradient)
    )
    assert_close(call.sum_over_keys("positive"), positive.sum(-1))
    columns = torch.rand(batch, call.map_shape[3], device=DEVICE) - 0.3
    columns[:, 3] = 0
    assert_close(call.sum_over_keys("positive", columns), torch.einsum("bj,bhij->bhi", columns.double(), positive))
    assert_close(call.sum_head_mean_over_queries(weights, "attention"), weights.double() @ attention.mean(1))


def encoder_decoder():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _STACK_SIZES.items()}
    config = BartConfig(d_model=32, vocab_size=40, pad_token_id=0, init_std=0.3, decoder_start_token_id=2, **sides)
    return BartForConditionalGeneration(config).eval().to(DEVICE)


_STACK_SIZES = {"layers": 2, "ffn_dim": 32, "attention_heads": 2}


@runs_kernels
@pytest.mark.gpu
def test_encoder_decoder_deferred_reductions_equal_materialised():
    """Deferred row and column sums, with padded sources and several decoder tokens."""
    import clearhead

    ex = clearhead.load(encoder_decoder())
    decoder_ids = torch.tensor([[2, 5, 9, 11], [2, 30, 21, 4]], device=DEVICE)
    inputs = {**make_inputs("after"), "decoder_input_ids": decoder_ids}
    methods = ["generic", "rollout"]
    actual, expected = (ex.explain(inputs, methods, kernel=kernel) for kernel in ("triton", "materialised"))
    for name, explanations in actual.items():
        for e, expected_explanation in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: triton"
            for stream, reference in expected_explanation.by_stream.items():
                gap = abs(e[stream].matrix - reference.matrix).max()
                assert gap <= 1e-5 * abs(reference.matrix).max() > 0, (name, stream)


@runs_kernels
@pytest.mark.gpu
def test_select_heads_reduces_only_those_heads():
    call = make_reducer(heads=4, shared=2, causal=True)
    attention, _ = maps(call)
    assert_close(call.with_computed_lse().select_heads([3, 0]).sum_over_keys("attention"), attention[:, [3, 0]].sum(-1))


@runs_kernels
@pytest.mark.gpu
def test_reduction_does_not_depend_on_uninitialised_memory():
    call = make_reducer(causal=True).with_computed_lse()
    weights = torch.rand(2, 21, device=DEVICE)
    first = call.sum_over_queries(weights, "positive")
    garbage = [torch.full_like(first, torch.nan) for _ in range(8)]
    del garbage  # the next allocation reuses this memory
    assert torch.equal(first, call.sum_over_queries(weights, "positive"))


def decoder(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, **more)
    return LlamaForCausalLM(config).eval().to(DEVICE)


def sliding_window_decoder(**more):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, sliding_window=6, **more)
    return MistralForCausalLM(config).eval().to(DEVICE)


def bidirectional_window_encoder(**more):
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    models.skip_if_not_yet("modernbert")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")} | {"pad_token_id": 0}
    shape |= {"vocab_size": 40, "local_attention": 8, "global_attn_every_n_layers": 2}
    config = ModernBertConfig(**shape, **tokens, **more)
    return ModernBertForSequenceClassification(config).eval().to(DEVICE)


def bert(**more):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**shape, vocab_size=40, **more)).eval().to(DEVICE)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "ahead", "window"), [(sliding_window_decoder, 0, 6), (bidirectional_window_encoder, 4, 9)]
)
def test_sliding_window_is_passed_to_kernel_without_mask(model, ahead, window, monkeypatch):
    """The kernels get the window sizes in place of a mask."""
    import clearhead
    from clearhead.capture.kernels.triton import kernel as triton_kernel

    reducer_options = []
    original = triton_kernel.TritonReducer
    monkeypatch.setattr(
        triton_kernel,
        "TritonReducer",
        lambda *args, **options: reducer_options.append(options) or original(*args, **options),
    )
    clearhead.load(model()).explain(
        {"input_ids": torch.randint(5, 40, (1, 19)).to(DEVICE)}, kernel="triton", method="generic"
    )
    assert {"causal": True, "lookahead": ahead, "window": window, "mask": None} in reducer_options


def make_inputs(padding=None, count=19):
    """Two texts; the second is shorter, with `padding` before or after it."""
    ids = torch.randint(5, 40, (2, count), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, {"before": slice(0, 5), "after": slice(count - 5, count), None: slice(0, 0)}[padding]] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


#: No left padding for a bidirectional window: the first row, which is the read-out row, would be fully masked.
PADDED = [
    *((model, padding) for model in (decoder, bert, sliding_window_decoder) for padding in (None, "before", "after")),
    *((bidirectional_window_encoder, padding) for padding in (None, "after")),
]


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize(("model", "padding"), PADDED)
def test_triton_explanations_equal_materialised(model, padding):
    """Batched and padded, one row and several, sums over queries and over keys, with activation checkpointing."""
    import clearhead

    ex = clearhead.load(model())
    methods = ["generic", "grad-sam", "attention", "rollout", "attcat", clearhead.Method("grad-sam", received=True)]
    inputs = make_inputs(padding)
    actual = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in actual.items():
        for e, reference in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: triton, layers computed twice"
            size = abs(reference.scores).max()
            assert size > 0 and abs(e.scores - reference.scores).max() <= 1e-5 * size


#: Tolerances for scores of a model in half precision, relative to those of the same model in float64.
HALF_TOLERANCES = [(torch.bfloat16, 0.15), (torch.float16, 0.03)]


def max_relative_distance(actual, expected):
    """The largest relative distance of scores; where the reference is zero after a clamp, zero is expected."""
    gaps = [(e.scores - reference.scores, reference.scores) for e, reference in zip(actual, expected, strict=True)]
    return max(np.linalg.norm(gap) / (np.linalg.norm(scores) or 1) for gap, scores in gaps)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="takes minutes, interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("model", "padding"), PADDED)
def test_half_precision_scores_equal_float64_materialised_maps(model, padding, dtype, deterministic):
    """Every aggregation of maps: row sums, sums over queries and keys, and tiles where reductions are not enough."""
    import clearhead

    ex = clearhead.load(model(initializer_range=0.1).to(dtype))
    methods = ["generic", "grad-sam", clearhead.Method("grad-sam", received=True), "attention", "attention-x-gradient"]
    methods += ["attention-gradcam", "rollout", "cat", "attcat"]
    if (model, dtype) != (bert, torch.float16):  # in float16 the gradient of BERT's first norm at zeros is NaN
        methods.append("tam")
    gaps = far_from_whole_maps(ex, make_inputs(padding), methods, target=0, kernel="triton")
    assert all(gap <= 1e-5 for gap in gaps.values()), gaps
    # and in two passes, which have the same output and gradients
    actual, materialised = (
        ex.explain(make_inputs(padding), methods, target=0, kernel=kernel) for kernel in ("triton", "materialised")
    )
    gaps = {name: max_relative_distance(actual[name], materialised[name]) for name in materialised}
    assert all(gap <= 1e-5 for gap in gaps.values()), gaps


@runs_kernels
@pytest.mark.gpu
def test_half_precision_input_gradients_do_not_depend_on_kernel_use(deterministic):
    """In half precision: with reductions, tiles, materialised maps, or gradients only."""
    from clearhead.capture.attention.reductions import MapReduction
    from clearhead.capture.attention.tiling import TilingConfig
    from clearhead.capture.kernels.triton.kernel import TritonKernel
    from clearhead.capture.recorder import Recorder
    from clearhead.capture.session import ModelSession

    recorder, visited = Recorder(ModelSession(decoder(initializer_range=0.2).to(torch.float16))), []

    def gradient(requirements, tiling):
        tape = recorder.record(make_inputs(), lambda output: output.logits[:, -1, 7], requirements, tiling=tiling)
        return tape.input_gradient["input_ids"]

    both = ("attention_gradient", "input_gradient")
    reduced = TilingConfig(kernel=TritonKernel(), request_reductions=lambda call: [MapReduction("positive")])
    tiling = TilingConfig(lambda call, queries, sweep: visited.append(queries), kernel=TritonKernel(), tile_rows=4)
    expected = gradient(both, reduced)
    assert expected.any() and torch.equal(gradient(both, tiling), expected) and visited
    assert torch.equal(gradient(both, None), expected)
    assert torch.equal(gradient(("input_gradient",), TilingConfig(kernel=TritonKernel(), tile_passes=0)), expected)


@pytest.fixture
def deterministic():
    """Makes torch's own gradients bitwise equal in each pass."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), HALF_TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("model", "before", "after"), [(sliding_window_decoder, 5, 0), (bidirectional_window_encoder, 4, 4)]
)
def test_half_precision_windows_use_flash_attention(model, before, after, dtype, tolerance, checkpoint, monkeypatch):
    """In half precision, forward and backward; scores are close to those of float64. Without a GPU the reference
    implementation replaces flash attention."""
    import clearhead

    if not COMPILED:
        if dtype == torch.bfloat16 or not checkpoint:
            pytest.skip("the interpreter is slow, and multiplies the raw bits of bfloat16")
        use_reference_flash_attention(monkeypatch)
    windows_seen = record_flash_windows(monkeypatch)
    half_model = model().to(dtype)
    methods = ["generic", "grad-sam", "attention", "rollout", clearhead.Method("grad-sam", received=True)]
    inputs = make_inputs(count=300 if COMPILED else 40)  # flash attention's blocks have 128 positions
    actual = clearhead.load(half_model).explain(inputs, methods, target=1, kernel="triton", checkpoint=checkpoint)
    assert {("forward", before, after), ("backward", before, after)} <= set(windows_seen)
    expected = clearhead.load(deepcopy(half_model).double()).explain(inputs, methods, target=1, kernel="materialised")
    for name, explanations in actual.items():
        assert all(e.certificate["kernel"].startswith("streaming: triton") for e in explanations)
        assert max_relative_distance(explanations, expected[name]) <= tolerance, name


def record_flash_windows(monkeypatch):
    """Records the direction and the window of every flash attention call; masks count as too large for memory."""
    from clearhead.capture.attention.lazy_mask import LazyMask
    from clearhead.capture.kernels.fused_sdpa import FusedSDPA

    monkeypatch.setattr(LazyMask, "fits_in_memory", False)
    calls = []

    def wrap(direction, original):
        def record_window(kernel, *tensors):
            if kernel.window is not None:
                calls.append((direction, kernel.window.window_before, kernel.window.window_after))
            return original(kernel, *tensors)

        return record_window

    for direction in ("forward", "backward"):
        monkeypatch.setattr(FusedSDPA, direction, wrap(direction, getattr(FusedSDPA, direction)))
    return calls


@runs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="needs a GPU, where flash attention can be disabled")
def test_disabled_flash_attention_is_not_used(monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import clearhead

    windows_seen = record_flash_windows(monkeypatch)
    ex, options = clearhead.load(sliding_window_decoder().to(torch.bfloat16)), {"target": 1, "kernel": "triton"}
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        without_flash = ex.explain(make_inputs(count=300), "generic", **options)
    assert not windows_seen
    assert max_relative_distance(ex.explain(make_inputs(count=300), "generic", **options), without_flash) <= 0.15
    assert windows_seen


@runs_kernels
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="flash attention needs a GPU")
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_flash_attention_passes_window_validation(dtype, width):
    from clearhead.capture.kernels import fused_sdpa

    assert fused_sdpa._is_window_valid(dtype, width, torch.device("cuda", torch.cuda.current_device()))


def make_eager_only_model(family):
    """Soft caps with windows and grouped heads (Gemma 2), and sinks with the same (gpt-oss)."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "pad_token_id": 0, "sliding_window": 6}
    settings = {
        "Gemma2": {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16, "initializer_range": 0.3},
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.3},
    }
    config = getattr(transformers, f"{family}Config")(**shape, **settings[family], attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(DEVICE)


@runs_kernels
@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_attention_unsupported_by_sdpa_falls_back_to_torch_tiles(family):
    """Triton is requested, and the certificate names the kernel that ran."""
    import clearhead

    ex = clearhead.load(make_eager_only_model(family))
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 14:] = 0
    inputs = {"input_ids": torch.randint(5, 40, (2, 19)).to(DEVICE), "attention_mask": mask.to(DEVICE)}
    methods = ["generic", "grad-sam", "rollout"]
    actual = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in actual.items():
        for e, reference in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
            assert abs(e.scores - reference.scores).max() <= 1e-5 * abs(reference.scores).max() > 0
