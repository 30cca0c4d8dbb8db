"""The Triton kernels against the formula in float64, and whole explanations through them against whole maps.

On a machine with a GPU they are compiled (`make test-gpu`); elsewhere they are interpreted, in a process of its own,
because Triton decides that when it is imported.
"""

from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests import models
from tests.capture.flash_attention import allow
from tests.capture.float64_reference import far_from_whole_maps
from tests.capture.triton_interpreter import COMPILED, DEVICE, apart, here, interpret

pytest.importorskip("triton", reason="Triton is for Linux, and comes with torch for CUDA")


@apart
def test_interpreted():
    interpret(__file__)


def fake(dtype=torch.float32, width=32, queries=8, keys=8, device="cpu", **changed):
    def some(length):
        return torch.zeros(1, 4, length, width, dtype=dtype, device=device)

    parts = {"query": some(queries), "key": some(keys), "value": some(keys), "kernel_saved_tensors": ()}
    how = {"causal": True, "mask": None, "kwargs": {"scaling": 0.2, "softcap": None}, "scaling": 0.2}
    return SimpleNamespace(**{**parts, **how, "sdpa_forward": print, **changed})


REFUSED = {
    "float64": {"dtype": torch.float64},
    "bfloat16 without a GPU, which the interpreter multiplies as integers": {"dtype": torch.bfloat16},
    "float32 heads that are too wide": {"width": 160},
    "eager attention alone is exact": {"sdpa_forward": None},
    "a soft cap, which torch's kernels do not know": {"kwargs": {"scaling": 0.2, "softcap": 30.0}},
    "sinks": {"kwargs": {"s_aux": torch.zeros(4)}},
    "causal with a cache": {"queries": 5},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_left_to_tiles(why):
    from clearhead.capture.kernels.triton.kernel import TritonKernel

    assert TritonKernel().supports(fake(), ())
    assert not TritonKernel().supports(fake(**REFUSED[why]), ())


def test_many_rows_are_left_to_tiles():
    from clearhead.capture.attention.reductions import MapReduction
    from clearhead.capture.kernels.triton.kernel import TritonKernel

    few, many = (MapReduction("attention", torch.zeros(1, count, 8)) for count in (30, 3000))
    assert TritonKernel().supports(fake(), [few]) and not TritonKernel().supports(fake(), [few, many])
    few, many = (MapReduction("attention", column_weights=torch.zeros(1, count, 8)) for count in (30, 300))
    assert TritonKernel().supports(fake(), [few]) and not TritonKernel().supports(fake(), [few, many])


def made(heads=2, shared=1, queries=21, keys=21, width=16, dtype=torch.float32, **how):
    from clearhead.capture.kernels.triton.reductions import BlockConfig, TritonReducer

    def some(count, length):
        return torch.randn(2, length, count, width, device=DEVICE).to(dtype).transpose(1, 2)

    torch.manual_seed(0)
    parts = some(heads, queries), some(shared, keys), some(shared, keys), some(heads, queries)
    return TritonReducer(*parts, None, width**-0.5, blocks=BlockConfig(16, 16, 4, 1), **how)


def maps(call):
    """A and ∂y/∂A as the formulas have them."""
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (call.key, call.value))
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
    "whole, three heads share keys": lambda: made(heads=3),
    "causal": lambda: made(causal=True),
    "causal, half precision, odd width": lambda: made(causal=True, width=24, dtype=torch.float16),
    "causal, more keys than queries": lambda: made(queries=18, keys=37, causal=True),
    "window": lambda: made(queries=37, keys=37, causal=True, window=6),
    "window both ways": lambda: made(queries=37, keys=37, causal=True, window=9, lookahead=4),
    "window both ways, wider than a block, padded": lambda: made(
        queries=53, keys=53, causal=True, window=39, lookahead=19, mask=padding(53)
    ),
    "padded": lambda: made(mask=padding(21)),
    "causal, padded": lambda: made(causal=True, mask=padding(21)),
    "position bias": lambda: made(queries=9, keys=21, mask=torch.randn(1, 2, 9, 21, device=DEVICE)),
    "a sample that sees nothing": lambda: made(
        mask=padding(21) & torch.eye(2, device=DEVICE).bool()[:, :1, None, None]
    ),
}


def close(found, expected):
    assert found.dtype == torch.float32
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=2e-6 * float(expected.abs().max()))


@here
@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_sums_are_those_of_the_maps(name):
    call = CALLS[name]()
    attention, gradient = maps(call)
    call = call.with_computed_lse()
    batch, _, queries, _ = call.map_shape
    weights = torch.rand(batch, 2, queries, device=DEVICE)
    weights[:, :, :3] = 0  # what has no weight is not looked at
    signed = weights[:, 0] - 0.5
    positive = (attention * gradient).clamp(min=0)
    close(
        call.sum_over_queries(weights[:, 0], "positive"), torch.einsum("bi,bhij->bhj", weights[:, 0].double(), positive)
    )
    close(call.sum_over_queries(signed, "product"), torch.einsum("bi,bhij->bhj", signed.double(), attention * gradient))
    close(call.sum_over_keys("positive"), positive.sum(-1))
    columns = torch.rand(batch, call.map_shape[3], device=DEVICE) - 0.3
    columns[:, 3] = 0
    close(call.sum_over_keys("positive", columns), torch.einsum("bj,bhij->bhi", columns.double(), positive))
    close(call.sum_head_mean_over_queries(weights, "attention"), weights.double() @ attention.mean(1))


def encoder_decoder():
    from transformers import BartConfig, BartForConditionalGeneration

    torch.manual_seed(0)
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDE.items()}
    config = BartConfig(d_model=32, vocab_size=40, pad_token_id=0, init_std=0.3, decoder_start_token_id=2, **sides)
    return BartForConditionalGeneration(config).eval().to(DEVICE)


_SIDE = {"layers": 2, "ffn_dim": 32, "attention_heads": 2}


@here
@pytest.mark.gpu
def test_encoder_decoders_are_asked_after_the_pass():
    """Rows pushed down and columns pulled up, of padded sources, for several words."""
    import clearhead

    ex = clearhead.load(encoder_decoder())
    answers = torch.tensor([[2, 5, 9, 11], [2, 30, 21, 4]], device=DEVICE)
    inputs = {**words("after"), "decoder_input_ids": answers}
    methods = ["generic", "rollout"]
    found, expected = (ex.explain(inputs, methods, kernel=kernel) for kernel in ("triton", "materialised"))
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: triton"
            for stream, part in other.by_stream.items():
                gap = abs(e[stream].matrix - part.matrix).max()
                assert gap <= 1e-5 * abs(part.matrix).max() > 0, (name, stream)


@here
@pytest.mark.gpu
def test_chosen_heads():
    call = made(heads=4, shared=2, causal=True)
    attention, _ = maps(call)
    close(call.with_computed_lse().select_heads([3, 0]).sum_over_keys("attention"), attention[:, [3, 0]].sum(-1))


@here
@pytest.mark.gpu
def test_the_same_bytes_whatever_was_there_before():
    call = made(causal=True).with_computed_lse()
    weights = torch.rand(2, 21, device=DEVICE)
    first = call.sum_over_queries(weights, "positive")
    spoilt = [torch.full_like(first, torch.nan) for _ in range(8)]
    del spoilt  # what is allocated next lies where these were
    assert torch.equal(first, call.sum_over_queries(weights, "positive"))


def decoder(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, **more)
    return LlamaForCausalLM(config).eval().to(DEVICE)


def windows(**more):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**shape, num_key_value_heads=2, vocab_size=40, pad_token_id=0, sliding_window=6, **more)
    return MistralForCausalLM(config).eval().to(DEVICE)


def windows_both_ways(**more):
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


@here
@pytest.mark.gpu
@pytest.mark.parametrize(("model", "ahead", "window"), [(windows, 0, 6), (windows_both_ways, 4, 9)])
def test_windows_are_walked_along(model, ahead, window, monkeypatch):
    """The kernels are told how far a query looks back and ahead, in the place of a mask."""
    import clearhead
    from clearhead.capture.kernels.triton import kernel as triton_kernel

    told = []
    real = triton_kernel.TritonReducer
    monkeypatch.setattr(triton_kernel, "TritonReducer", lambda *args, **how: told.append(how) or real(*args, **how))
    clearhead.load(model()).explain({"input_ids": torch.randint(5, 40, (1, 19)).to(DEVICE)}, kernel="triton")
    assert {"causal": True, "lookahead": ahead, "window": window, "mask": None} in told


def words(padding=None, count=19):
    """Two texts; the second is shorter, with `padding` before or after it."""
    ids = torch.randint(5, 40, (2, count), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, {"before": slice(0, 5), "after": slice(count - 5, count), None: slice(0, 0)}[padding]] = 0
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


#: Not padding before a window both ways: the first row, which is read, would see nothing.
PADDED = [
    *((model, padding) for model in (decoder, bert, windows) for padding in (None, "before", "after")),
    *((windows_both_ways, padding) for padding in (None, "after")),
]


@here
@pytest.mark.gpu
@pytest.mark.parametrize(("model", "padding"), PADDED)
def test_explanations_are_those_of_whole_maps(model, padding):
    """Batched and padded, one row and several, sums over queries and over keys, layers computed twice."""
    import clearhead

    ex = clearhead.load(model())
    methods = ["generic", "grad-sam", "attention", "rollout", "attcat", clearhead.Method("grad-sam", received=True)]
    inputs = words(padding)
    found = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: triton, layers computed twice"
            size = abs(other.scores).max()
            assert size > 0 and abs(e.scores - other.scores).max() <= 1e-5 * size


#: How far scores of a model in half precision may lie from those of the same model in float64, of their size.
HALF = [(torch.bfloat16, 0.15), (torch.float16, 0.03)]


def far(found, expected):
    """How far scores lie from each other; where a clamp has left none, none may be there."""
    gaps = [(e.scores - other.scores, other.scores) for e, other in zip(found, expected, strict=True)]
    return max(np.linalg.norm(gap) / (np.linalg.norm(scores) or 1) for gap, scores in gaps)


@here
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="takes minutes, interpreted")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("model", "padding"), PADDED)
def test_half_precision_is_that_of_whole_maps_in_float64(model, padding, dtype, deterministic):
    """Every way to join maps: rows pushed down, sums over queries and keys, tiles where sums are not enough."""
    import clearhead

    ex = clearhead.load(model(initializer_range=0.1).to(dtype))
    methods = ["generic", "grad-sam", clearhead.Method("grad-sam", received=True), "attention", "attention-x-gradient"]
    methods += ["attention-gradcam", "rollout", "cat", "attcat"]
    if (model, dtype) != (bert, torch.float16):  # which has no number for the slope of BERT's first norm at zeros
        methods.append("tam")
    gaps = far_from_whole_maps(ex, words(padding), methods, target=0, kernel="triton")
    assert all(far <= 1e-5 for far in gaps.values()), gaps
    # and in two passes, which have the same output and the same gradients
    found, whole = (ex.explain(words(padding), methods, target=0, kernel=one) for one in ("triton", "materialised"))
    gaps = {name: far(found[name], whole[name]) for name in whole}
    assert all(gap <= 1e-5 for gap in gaps.values()), gaps


@here
@pytest.mark.gpu
def test_rounded_gradients_do_not_depend_on_who_asks(deterministic):
    """In half precision: where sums are wanted, tiles, whole maps, or nothing but gradients."""
    from clearhead.capture.attention.reductions import MapReduction
    from clearhead.capture.attention.tiling import TilingConfig
    from clearhead.capture.kernels.triton.kernel import TritonKernel
    from clearhead.capture.recorder import Recorder

    recorder, folded = Recorder(decoder(initializer_range=0.2).to(torch.float16)), []

    def gradient(asks, tiles):
        made = recorder.record(words(), lambda output: output.logits[:, -1, 7], asks, tiling=tiles)
        return made.input_gradient["input_ids"]

    both = ("attention_gradient", "input_gradient")
    sums = TilingConfig(kernel=TritonKernel(), request_reductions=lambda call: [MapReduction("positive")])
    tiles = TilingConfig(lambda call, queries, sweep: folded.append(queries), kernel=TritonKernel(), tile_rows=4)
    expected = gradient(both, sums)
    assert expected.any() and torch.equal(gradient(both, tiles), expected) and folded
    assert torch.equal(gradient(both, None), expected)
    assert torch.equal(gradient(("input_gradient",), TilingConfig(kernel=TritonKernel(), tile_passes=0)), expected)


@pytest.fixture
def deterministic():
    """torch's own gradients are the same bytes in each pass."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@here
@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(("dtype", "within"), HALF, ids=str)
@pytest.mark.parametrize(("model", "before", "after"), [(windows, 5, 0), (windows_both_ways, 4, 4)])
def test_windows_are_flash_attentions_own(model, before, after, dtype, within, checkpoint, monkeypatch):
    """In half precision, there and back; what comes of it are the scores of whole maps in float64. Without a GPU a slow
    twin stands for it."""
    import clearhead

    if not COMPILED:
        if dtype == torch.bfloat16 or not checkpoint:
            pytest.skip("the interpreter is slow, and multiplies bfloat16 as the integers it is kept in")
        allow(monkeypatch)
    told = windows_told(monkeypatch)
    half = model().to(dtype)
    methods = ["generic", "grad-sam", "attention", "rollout", clearhead.Method("grad-sam", received=True)]
    inputs = words(count=300 if COMPILED else 40)  # flash attention's blocks have 128 places
    found = clearhead.load(half).explain(inputs, methods, target=1, kernel="triton", checkpoint=checkpoint)
    assert {("forward", before, after), ("backward", before, after)} <= set(told)
    exact = clearhead.load(deepcopy(half).double()).explain(inputs, methods, target=1, kernel="materialised")
    for name, explanations in found.items():
        assert all(e.certificate["kernel"].startswith("streaming: triton") for e in explanations)
        assert far(explanations, exact[name]) <= within, name


def windows_told(monkeypatch):
    """Every window that flash attention is told, and which way it goes, as if masks were too large to be whole."""
    from clearhead.capture.attention.lazy_mask import LazyMask
    from clearhead.capture.kernels.fused_sdpa import FusedSDPA

    monkeypatch.setattr(LazyMask, "fits_in_memory", False)
    told = []

    def listening(way, real):
        def listen(kernel, *parts):
            if kernel.window is not None:
                told.append((way, kernel.window.window_before, kernel.window.window_after))
            return real(kernel, *parts)

        return listen

    for way in ("forward", "backward"):
        monkeypatch.setattr(FusedSDPA, way, listening(way, getattr(FusedSDPA, way)))
    return told


@here
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="without a GPU there is nothing to turn off")
def test_flash_attention_that_is_turned_off_is_left_alone(monkeypatch):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import clearhead

    told = windows_told(monkeypatch)
    ex, how = clearhead.load(windows().to(torch.bfloat16)), {"target": 1, "kernel": "triton"}
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        off = ex.explain(words(count=300), "generic", **how)
    assert not told
    assert far(ex.explain(words(count=300), "generic", **how), off) <= 0.15
    assert told


@here
@pytest.mark.gpu
@pytest.mark.skipif(not COMPILED, reason="flash attention is a GPU's")
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_keeps_to_its_window(dtype, width):
    from clearhead.capture.kernels import fused_sdpa

    assert fused_sdpa._is_window_valid(dtype, width, torch.device("cuda", torch.cuda.current_device()))


def beyond_torchs_kernel(family):
    """Soft caps with windows and grouped heads (Gemma 2), and sinks with the same (gpt-oss)."""
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "pad_token_id": 0, "sliding_window": 6}
    own = {
        "Gemma2": {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16, "initializer_range": 0.3},
        "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "initializer_range": 0.3},
    }
    config = getattr(transformers, f"{family}Config")(**shape, **own[family], attn_implementation="eager")
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(DEVICE)


@here
@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_what_torchs_kernel_cannot_make_is_made_of_tiles(family):
    """Triton is asked for, and the certificate says what ran."""
    import clearhead

    ex = clearhead.load(beyond_torchs_kernel(family))
    mask = torch.ones(2, 19, dtype=torch.long)
    mask[1, 14:] = 0
    inputs = {"input_ids": torch.randint(5, 40, (2, 19)).to(DEVICE), "attention_mask": mask.to(DEVICE)}
    methods = ["generic", "grad-sam", "rollout"]
    found = ex.explain(inputs, methods, kernel="triton", checkpoint=True)
    expected = ex.explain(inputs, methods, kernel="materialised")
    for name, explanations in found.items():
        for e, other in zip(explanations, expected[name], strict=True):
            assert e.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
            assert abs(e.scores - other.scores).max() <= 1e-5 * abs(other.scores).max() > 0
