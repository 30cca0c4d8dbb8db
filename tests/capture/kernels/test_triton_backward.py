"""Gradients and the row push from one pair of kernels, against autograd in float64; and which calls are theirs.

Interpreted with tiny blocks where there is no GPU, compiled with the real ones where there is (`make test-gpu`).
"""

from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.capture.triton_interpreter import COMPILED, DEVICE, INTERPRETED, apart, here, interpret

pytest.importorskip("triton", reason="Triton is for Linux, and comes with torch for CUDA")

from clearhead.capture.attention.reductions import MapReduction
from clearhead.capture.kernels import fused_sdpa
from clearhead.capture.kernels.triton import backward as triton_backward
from clearhead.capture.kernels.triton import kernel
from clearhead.capture.kernels.triton.backward import (
    LAUNCH_CONFIGS,
    LONG_LAUNCH_CONFIGS,
    BackwardLaunchConfig,
    TritonBackward,
    make_tensor_descriptor,
    to_descriptor_layout,
)
from clearhead.capture.kernels.triton.kernel import TritonKernel
from clearhead.capture.kernels.triton.reductions import BlockConfig
from clearhead.errors import ClearheadWarning

DESCRIBES = find_spec("triton.tools.tensor_descriptor") is not None
describing = pytest.mark.skipif(not DESCRIBES, reason="a Triton without tensor descriptors")
interpreted = pytest.mark.skipif(
    not (INTERPRETED and DESCRIBES), reason="tiny blocks, and float32, are the interpreter's, if it has descriptors"
)
compiled = pytest.mark.skipif(not COMPILED, reason="blocks of a GPU take minutes, interpreted")


@apart
def test_interpreted():
    interpret(__file__)


def beside(part):
    """As a projection leaves it: the heads of a token beside one another."""
    return part.transpose(1, 2).contiguous().transpose(1, 2)


def after(part):
    """One head after another, as rotary positions may leave it."""
    return part.contiguous()


def among(part):
    """As a projection leaves queries, keys and values together; what is not asked for is not to be read."""
    batch, heads, tokens, width = part.shape
    every = torch.full((batch, tokens, heads, 3, width), torch.nan, dtype=part.dtype, device=part.device)
    every[:, :, :, 1] = part.transpose(1, 2)
    return every[:, :, :, 1].transpose(1, 2)


def across(part):
    """The numbers of a vector far from one another, which must be copied."""
    return part.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def some(heads=2, shared=1, tokens=48, width=16, dtype=torch.float32, lay=beside, lay_values=None):
    """Queries, keys, values and a gradient of two samples, and weights, most of which may be zero."""
    draw = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, count, tokens, width, generator=draw).to(DEVICE, dtype)
        for count in (heads, shared, shared, heads)
    )
    weights = torch.randn(2, tokens, generator=draw).to(DEVICE)
    lay_values = lay_values or lay
    return lay(query), lay(key), lay_values(value), lay_values(gradient), weights


def maps(query, key, causal):
    """Scores and attention in float64."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * query.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores, scores.softmax(-1)


def exact(query, key, value, gradient, weights, causal):
    """The output and the log-sum-exp; and what autograd makes of them, with the push as its formula has it."""
    parts = [part.double().requires_grad_() for part in (query, key, value)]
    scores, attention = maps(*parts[:2], causal)
    output = attention @ parts[2].repeat_interleave(query.shape[1] // key.shape[1], 1)
    slope, *gradients = torch.autograd.grad(output, (attention, *parts), gradient.double())
    push = torch.einsum("bi,bhij->bhj", weights.double(), (attention * slope).clamp(min=0))
    saved = output.detach().to(query.dtype), scores.logsumexp(-1).float().detach()
    return saved, (*gradients, push.detach())


def made_of(query, key, value, gradient, weights, causal, saved, ways):
    parts = (to_descriptor_layout(part) for part in (query, key, value, saved[0], gradient))
    gradients, push = TritonBackward(*parts, saved[1], query.shape[3] ** -0.5, causal, ways)(weights)
    return *gradients, push


def gaps(several, others):
    """How far they lie from each other, of their size."""
    return [float((one - other).norm() / other.norm()) for one, other in zip(several, others, strict=True)]


def check(given, causal, ways, rounded):
    """Gradients are `rounded` as their type has it; the push is in float32."""
    saved, expected = exact(*given, causal)
    made = made_of(*given, causal, saved, ways)
    assert [part.dtype for part in made] == [given[0].dtype] * 3 + [torch.float32]
    far = gaps(made, expected)
    assert all(gap < rounded for gap in far[:3]) and far[3] < 2e-6, far


#: Blocks that are alike, and that divide each other or not.
TINY = BackwardLaunchConfig(BlockConfig(16, 16, 4, 1), BlockConfig(16, 16, 4, 1))
UNLIKE = BackwardLaunchConfig(BlockConfig(16, 32, 4, 2), BlockConfig(32, 16, 4, 2), prefetches_row_values=True)
OTHERS = BackwardLaunchConfig(BlockConfig(32, 16, 4, 2), BlockConfig(16, 32, 4, 2))

CASES = {
    "causal": ({}, True, TINY),
    "whole": ({}, False, TINY),
    "causal, ragged, grouped": ({"heads": 4, "shared": 2, "tokens": 53}, True, UNLIKE),
    "causal, ragged, three heads share keys": ({"heads": 3, "tokens": 53}, True, OTHERS),
    "whole, ragged, grouped": ({"heads": 4, "shared": 2, "tokens": 53}, False, OTHERS),
    "one block, and one that is not whole": ({"tokens": 33}, True, UNLIKE),
    "half precision, rotary positions": ({"dtype": torch.float16, "lay": after, "lay_values": beside}, True, TINY),
    "rotary positions, ragged": ({"heads": 4, "shared": 2, "tokens": 37, "lay": after}, False, UNLIKE),
    "queries, keys and values together": ({"shared": 2, "tokens": 37, "lay": among}, True, UNLIKE),
    "copied": ({"lay": across}, True, TINY),
}


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_push_are_those_of_autograd(name):
    sizes, causal, ways = CASES[name]
    given = some(**sizes)
    check(given, causal, ways, 1e-3 if given[0].dtype == torch.float16 else 1e-6)


@interpreted
@pytest.mark.parametrize("rows", [1, 0])
def test_rows_without_weight_have_gradients(rows):
    """The last layer starts with one row, and another target may have none."""
    *parts, weights = some(tokens=37)
    weights[:, : 37 - rows] = 0
    saved, expected = exact(*parts, weights, True)
    made = made_of(*parts, weights, True, saved, UNLIKE)
    assert all(gap < 1e-6 for gap in gaps(made[:3], expected[:3]))
    torch.testing.assert_close(made[3], expected[3].float())


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lay", [beside, after])
def test_a_sample_without_numbers_leaves_the_others_alone(lay, causal):
    """A last block reads nothing of what lies behind its own head."""
    given = some(heads=4, shared=2, tokens=37, lay=lay)
    saved, expected = exact(*given, causal)
    for part in (*given[:4], *saved):
        part[1] = torch.nan
    made = made_of(*given, causal, saved, UNLIKE)
    assert all(gap < 2e-6 for gap in gaps([part[0] for part in made], [part[0] for part in expected]))


@describing
@pytest.mark.parametrize(("lay", "copied"), [(beside, False), (after, False), (among, False), (across, True)])
def test_what_a_descriptor_can_have_is_not_copied(lay, copied):
    part = lay(torch.randn(2, 4, 37, 16, device=DEVICE).half())
    assert (
        torch.equal(to_descriptor_layout(part), part)
        and (to_descriptor_layout(part).data_ptr() != part.data_ptr()) == copied
    )
    whole = make_tensor_descriptor(to_descriptor_layout(part), 16)
    rows, columns = whole.shape
    size = whole.base.untyped_storage().nbytes() // 2 - whole.base.storage_offset()
    assert (rows - 1) * whole.strides[0] + columns <= size


def test_what_is_not_aligned_is_copied():
    part = torch.zeros(2 * 37 * 4 * 16 + 1, device=DEVICE).half()[1:].view(2, 37, 4, 16).transpose(1, 2)
    assert to_descriptor_layout(part).data_ptr() % 16 == 0 != part.data_ptr() % 16
    expanded = torch.zeros(2, 4, 1, 16, device=DEVICE).half().expand(-1, -1, 37, -1)
    assert 0 not in to_descriptor_layout(expanded).stride()


def fake(dtype=torch.bfloat16, tokens=2048, keys=None, width=64, value_width=None, saved=(1, 2), **changed):
    keys, value_width = keys or tokens, value_width or width

    def part(heads, length, wide):
        return torch.zeros(1, heads, length, wide, dtype=dtype, device="meta")

    parts = {"query": part(4, tokens, width), "key": part(2, keys, width), "value": part(2, keys, value_width)}
    return SimpleNamespace(**parts, **{"causal": True, "mask": None, "kernel_saved_tensors": saved, **changed})


LEFT_TO_TORCH = {
    "float32": {"dtype": torch.float32},
    "short": {"tokens": 2047},
    "more keys than queries": {"keys": 4096},
    "heads of a width that was not measured": {"width": 80},
    "values of another width": {"value_width": 128},
    "a mask": {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "no log-sum-exp": {"saved": ()},
}


@pytest.mark.parametrize("why", LEFT_TO_TORCH)
def test_what_is_left_to_torchs_backward(why, monkeypatch):
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *how: True)
    assert all(triton_backward.supports_backward(fake(dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert all(
        triton_backward.supports_backward(fake(**more))
        for more in ({"width": 128}, {"causal": False}, {"tokens": 2051})
    )
    assert not triton_backward.supports_backward(fake(**LEFT_TO_TORCH[why]))


def test_what_is_not_proven_is_left_to_torch(monkeypatch):
    told = []
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *how: told.append(how[:-1]))
    for more in ({}, {"tokens": 2**17}, {"tokens": 2051, "width": 128, "causal": False}):
        assert not triton_backward.supports_backward(fake(**more))
    assert told == [
        (LAUNCH_CONFIGS[64], torch.bfloat16, 64, True, False),
        (LONG_LAUNCH_CONFIGS[64], torch.bfloat16, 64, True, False),
        (LAUNCH_CONFIGS[128], torch.bfloat16, 128, False, True),
    ]


def test_a_gpu_without_descriptors_is_left_to_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, 0))
    assert not triton_backward._supports_tensor_descriptors(torch.device("cpu")) and not asked
    assert not triton_backward._supports_tensor_descriptors(torch.device("cuda", 0)) and asked
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert triton_backward._supports_tensor_descriptors(torch.device("cuda", 0))


def proof(monkeypatch, run):
    """What comes of a proof with this in the place of the kernels."""
    monkeypatch.setattr(TritonBackward, "__call__", run)
    return triton_backward.is_backward_validated.__wrapped__(TINY, torch.float16, 16, True, True, torch.device("cpu"))


def formulas(call, weights):
    _, (*gradients, push) = exact(call.query, call.key, call.value, call.gradient, weights, call.causal)
    return tuple(gradients), push


def without_causality(call, weights):
    _, (*gradients, push) = exact(call.query, call.key, call.value, call.gradient, weights, False)
    return tuple(gradients), push


def without_numbers(call, weights):
    gradients, push = formulas(call, weights)
    return (*gradients[:2], gradients[2] * torch.nan), push


def not_compiled(call, weights):
    raise RuntimeError("out of resources")


def not_there(call, weights):
    raise ImportError("tensor_descriptor")


@pytest.mark.parametrize("run", [without_causality, without_numbers, not_compiled, not_there])
def test_kernels_that_are_wrong_are_not_trusted(run, monkeypatch):
    assert proof(monkeypatch, formulas)
    warning = "fuse the push of a row with the gradients cannot be used here .*torch's backward"
    with pytest.warns(ClearheadWarning, match=warning):
        assert not proof(monkeypatch, run)


def test_a_full_gpu_proves_nothing(monkeypatch):
    def full(call, weights):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        proof(monkeypatch, full)


@pytest.mark.parametrize("name", ["supports", "backward", "reduce_maps"])
def test_kernels_are_launched_where_their_tensors_are(name, monkeypatch):
    """A model may have several GPUs, and Triton launches on the current one."""
    chosen = []

    class Chosen:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            chosen.append(self.device)

        def __exit__(self, *_):
            chosen.append(None)

    monkeypatch.setattr(torch.cuda, "device", Chosen)
    query = SimpleNamespace(is_cuda=True, device="cuda:1")

    def seen(self, call):
        assert chosen == ["cuda:1"] and call.query is query
        return "done"

    method = kernel._on_call_device(seen)
    assert method(TritonKernel(), SimpleNamespace(query=query)) == "done" and chosen == ["cuda:1", None]
    assert getattr(TritonKernel, name).__code__ is method.__code__


def test_only_one_row_of_all_heads_is_made_beside(monkeypatch):
    """The other sums are made as ever, and all keep their places."""
    monkeypatch.setattr(triton_backward, "supports_backward", lambda call: True)
    monkeypatch.setattr(
        triton_backward,
        "build_backward",
        lambda call, slope: lambda row: (("dq", "dk", "dv"), torch.full((1, 4, 8), 4.0)),
    )
    monkeypatch.setattr(
        TritonKernel, "reduce_maps", lambda self, call, gradient, others: [one.quantity for one in others]
    )
    one, many = torch.zeros(1, 1, 8), torch.zeros(1, 3, 8)
    others = [
        MapReduction("positive", many),
        MapReduction("positive", one, heads=[1]),
        MapReduction("attention", one),
        MapReduction("product"),
    ]
    for at in range(5):
        wanted = [*others[:at], MapReduction("positive", one), *others[at:]]
        gradients, sums = TritonKernel().backward(fake(), torch.zeros(1, 8, 4, 64), wanted)
        assert gradients == ("dq", "dk", "dv")
        assert torch.equal(sums.pop(at), torch.ones(1, 4, 1, 8)) and sums == [each.quantity for each in others]


@interpreted
@pytest.mark.parametrize("said", ["flash", "cuDNN"])
def test_a_call_is_handed_over_whole(said, monkeypatch):
    """With the log-sum-exp as torch's kernels say it, and a gradient as autograd gives it."""
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *how: True)
    monkeypatch.setattr(triton_backward, "MIN_BACKWARD_TOKENS", 32)
    monkeypatch.setattr(triton_backward, "LAUNCH_CONFIGS", {16: UNLIKE})
    given = some(heads=4, shared=2, tokens=53, dtype=torch.float16, lay=after, lay_values=beside)
    query, key, value, gradient, weights = given
    (output, lse), (*gradients, push) = exact(*given, True)
    lse = lse[..., None] if said == "cuDNN" else torch.nn.functional.pad(lse, (0, 11), value=torch.inf)
    parts = {"query": query, "key": key, "value": value, "kernel_saved_tensors": (output, lse, None, None)}
    call = SimpleNamespace(**parts, causal=True, mask=None, scaling=0.25)
    wanted = [MapReduction("positive"), MapReduction("positive", weights[:, None])]
    made, (sums, pushed) = TritonKernel().backward(call, gradient.transpose(1, 2), wanted)
    assert all(gap < 1e-3 for gap in gaps(made, gradients)) and sums.shape == (2, 4, 53)
    torch.testing.assert_close(pushed[:, :, 0].double() * 4, push, rtol=1e-4, atol=1e-5)


#: Few, because each takes seconds to compile.
COMPILED_WAYS = {
    f"{dtype}, {'causal' if causal else 'whole'}, {tokens} × {width}": (dtype, causal, tokens, width, ways)
    for dtype, causal, tokens, width, ways in (
        (torch.bfloat16, True, 777, 64, LAUNCH_CONFIGS[64]),
        (torch.float16, True, 777, 64, LAUNCH_CONFIGS[64]),
        (torch.bfloat16, False, 768, 64, LONG_LAUNCH_CONFIGS[64]),
        (torch.bfloat16, True, 777, 128, LAUNCH_CONFIGS[128]),
        (torch.float16, False, 768, 128, LAUNCH_CONFIGS[128]),
    )
}


@here
@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED_WAYS)
def test_compiled_kernels_are_autograd_and_the_same_bytes(name):
    dtype, causal, tokens, width, ways = COMPILED_WAYS[name]
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a GPU without tensor descriptors")
    given = some(4, 2, tokens, width, dtype, lay=after, lay_values=beside)
    check(given, causal, ways, 5e-3)
    saved, _ = exact(*given, causal)
    first, again = (made_of(*given, causal, saved, ways) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


class Saying:
    """In the place of torch's kernels where there is no GPU, slowly."""

    def __init__(self, call):
        self.call = call

    def forward(self, query, key, value):
        scores, attention = maps(query.double(), key.double(), self.call.causal)
        output = attention @ value.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        return output.to(query.dtype), scores.logsumexp(-1).float(), torch.empty(0), torch.empty(0)

    def backward(self, slope, query, key, value, saved):
        with torch.enable_grad():
            _, (*gradients, _) = exact(query, key, value, slope, torch.zeros(slope.shape[::2]), self.call.causal)
        return tuple(part.to(query.dtype) for part in gradients)


def stand_in(monkeypatch):
    """So that a small model goes this way in the interpreter."""
    monkeypatch.setattr(fused_sdpa, "select_fused_kernel", lambda call: Saying(call) if call.mask is None else None)
    monkeypatch.setattr(fused_sdpa, "get_fused_kernel_used", Saying)
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *how: True)
    monkeypatch.setattr(triton_backward, "MIN_BACKWARD_TOKENS", 32)
    monkeypatch.setattr(triton_backward, "LAUNCH_CONFIGS", {16: UNLIKE})


@here
@describing
@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_explanation_goes_this_way_and_is_that_of_whole_maps(checkpoint, monkeypatch):
    """Proven, at first, in the middle of a layer that is computed twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import clearhead

    if COMPILED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a GPU without tensor descriptors")
    if INTERPRETED:
        stand_in(monkeypatch)
    tokens, width, dtype, within = (2077, 64, torch.bfloat16, 0.05) if COMPILED else (41, 16, torch.float16, 0.03)
    torch.manual_seed(0)
    shape = {"hidden_size": 4 * width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, max_position_embeddings=4096)
    model = LlamaForCausalLM(config).eval().to(DEVICE, dtype)
    inputs = {"input_ids": torch.randint(5, 40, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)}
    taken = []
    real = triton_backward.build_backward
    monkeypatch.setattr(triton_backward, "build_backward", lambda *given: taken.append(given) or real(*given))
    methods = ["generic", "grad-sam"]
    found = clearhead.load(model).explain(inputs, methods, target=1, kernel="triton", checkpoint=checkpoint)
    assert len(taken) == 3  # layers, and the last one by itself: to see which of its rows are read
    same = clearhead.load(model).explain(inputs, methods, target=1, kernel="materialised")
    whole = clearhead.load(deepcopy(model).double()).explain(inputs, methods, target=1, kernel="materialised")
    for name, expected in whole.items():
        assert found[name].certificate["kernel"].startswith("streaming: triton")
        # whole maps of the same model have gradients of these kernels, too
        assert abs(found[name].scores - same[name].scores).max() <= 1e-5 * abs(same[name].scores).max(), name
        far = np.linalg.norm(found[name].scores - expected.scores)
        assert far <= within * np.linalg.norm(expected.scores) > 0, name
