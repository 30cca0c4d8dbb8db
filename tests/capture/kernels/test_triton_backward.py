"""The Triton backward kernels, which compute gradients and a weighted row sum, against float64 autograd; dispatch.

Interpreted with tiny blocks without a GPU, compiled with the real block sizes on one (`make test-gpu`).
"""

from copy import deepcopy
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.capture.triton_interpreter import (
    COMPILED,
    DEVICE,
    INTERPRETED,
    run_interpreted,
    runs_kernels,
    starts_interpreter,
)

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

HAS_DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None
needs_descriptors = pytest.mark.skipif(not HAS_DESCRIPTORS, reason="a Triton without tensor descriptors")
needs_interpreter = pytest.mark.skipif(
    not (INTERPRETED and HAS_DESCRIPTORS),
    reason="needs the interpreter with tensor descriptors: tiny blocks and float32",
)
needs_gpu = pytest.mark.skipif(not COMPILED, reason="block sizes of a GPU take minutes in the interpreter")


@starts_interpreter
def test_passes_in_triton_interpreter():
    run_interpreted(__file__)


def by_token(tensor):
    """Layout of a projection: the heads of a token are adjacent in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def by_head(tensor):
    """Contiguous by head, as after rotary position embeddings."""
    return tensor.contiguous()


def from_fused_qkv(tensor):
    """Layout of a fused QKV projection; the other two thirds are NaN and must not be read."""
    batch, heads, tokens, width = tensor.shape
    fused = torch.full((batch, tokens, heads, 3, width), torch.nan, dtype=tensor.dtype, device=tensor.device)
    fused[:, :, :, 1] = tensor.transpose(1, 2)
    return fused[:, :, :, 1].transpose(1, 2)


def by_width(tensor):
    """The width axis is outermost in memory, so the tensor must be copied."""
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


def make_tensors(heads=2, shared=1, tokens=48, width=16, dtype=torch.float32, lay=by_token, lay_values=None):
    """Queries, keys, values and an output gradient of two samples, and row weights."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(2, count, tokens, width, generator=generator).to(DEVICE, dtype)
        for count in (heads, shared, shared, heads)
    )
    weights = torch.randn(2, tokens, generator=generator).to(DEVICE)
    lay_values = lay_values or lay
    return lay(query), lay(key), lay_values(value), lay_values(gradient), weights


def maps(query, key, causal):
    """Scores and attention in float64."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * query.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores, scores.softmax(-1)


def reference(query, key, value, gradient, weights, causal):
    """Output and log-sum-exp; gradients by autograd, and the weighted row sum by its formula."""
    qkv = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    scores, attention = maps(*qkv[:2], causal)
    output = attention @ qkv[2].repeat_interleave(query.shape[1] // key.shape[1], 1)
    attention_gradient, *gradients = torch.autograd.grad(output, (attention, *qkv), gradient.double())
    row_sum = torch.einsum("bi,bhij->bhj", weights.double(), (attention * attention_gradient).clamp(min=0))
    saved = output.detach().to(query.dtype), scores.logsumexp(-1).float().detach()
    return saved, (*gradients, row_sum.detach())


def run_kernel(query, key, value, gradient, weights, causal, saved, launch_config):
    tensors = (to_descriptor_layout(tensor) for tensor in (query, key, value, saved[0], gradient))
    gradients, row_sum = TritonBackward(*tensors, saved[1], query.shape[3] ** -0.5, causal, launch_config)(weights)
    return *gradients, row_sum


def relative_distances(actual, expected):
    """Relative distances, in the Euclidean norm."""
    return [
        float((tensor - reference).norm() / reference.norm())
        for tensor, reference in zip(actual, expected, strict=True)
    ]


def assert_matches_reference(tensors, causal, launch_config, tolerance):
    """Gradients are exact up to `tolerance`; the row sum is float32."""
    saved, expected = reference(*tensors, causal)
    actual = run_kernel(*tensors, causal, saved, launch_config)
    assert [tensor.dtype for tensor in actual] == [tensors[0].dtype] * 3 + [torch.float32]
    distances = relative_distances(actual, expected)
    assert all(gap < tolerance for gap in distances[:3]) and distances[3] < 2e-6, distances


#: Equal block sizes, and unequal ones in both orders.
EQUAL_BLOCKS = BackwardLaunchConfig(BlockConfig(16, 16, 4, 1), BlockConfig(16, 16, 4, 1))
UNEQUAL_BLOCKS = BackwardLaunchConfig(BlockConfig(16, 32, 4, 2), BlockConfig(32, 16, 4, 2), prefetches_row_values=True)
SWAPPED_BLOCKS = BackwardLaunchConfig(BlockConfig(32, 16, 4, 2), BlockConfig(16, 32, 4, 2))

CASES = {
    "causal": ({}, True, EQUAL_BLOCKS),
    "whole": ({}, False, EQUAL_BLOCKS),
    "causal, ragged, grouped": ({"heads": 4, "shared": 2, "tokens": 53}, True, UNEQUAL_BLOCKS),
    "causal, ragged, three heads share keys": ({"heads": 3, "tokens": 53}, True, SWAPPED_BLOCKS),
    "whole, ragged, grouped": ({"heads": 4, "shared": 2, "tokens": 53}, False, SWAPPED_BLOCKS),
    "one full and one partial block": ({"tokens": 33}, True, UNEQUAL_BLOCKS),
    "half precision, rotary positions": (
        {"dtype": torch.float16, "lay": by_head, "lay_values": by_token},
        True,
        EQUAL_BLOCKS,
    ),
    "rotary positions, ragged": ({"heads": 4, "shared": 2, "tokens": 37, "lay": by_head}, False, UNEQUAL_BLOCKS),
    "queries, keys and values together": ({"shared": 2, "tokens": 37, "lay": from_fused_qkv}, True, UNEQUAL_BLOCKS),
    "copied layout": ({"lay": by_width}, True, EQUAL_BLOCKS),
}


@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_row_sum_match_autograd(name):
    sizes, causal, launch_config = CASES[name]
    tensors = make_tensors(**sizes)
    assert_matches_reference(tensors, causal, launch_config, 1e-3 if tensors[0].dtype == torch.float16 else 1e-6)


@needs_interpreter
@pytest.mark.parametrize("rows", [1, 0])
def test_rows_with_zero_weight_still_get_gradients(rows):
    """In the last layer one row has weight, and another target may have none."""
    *tensors, weights = make_tensors(tokens=37)
    weights[:, : 37 - rows] = 0
    saved, expected = reference(*tensors, weights, True)
    actual = run_kernel(*tensors, weights, True, saved, UNEQUAL_BLOCKS)
    assert all(gap < 1e-6 for gap in relative_distances(actual[:3], expected[:3]))
    torch.testing.assert_close(actual[3], expected[3].float())


@needs_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lay", [by_token, by_head])
def test_nan_sample_does_not_affect_other_samples(lay, causal):
    """The last, partial block reads nothing beyond its own head."""
    tensors = make_tensors(heads=4, shared=2, tokens=37, lay=lay)
    saved, expected = reference(*tensors, causal)
    for tensor in (*tensors[:4], *saved):
        tensor[1] = torch.nan
    actual = run_kernel(*tensors, causal, saved, UNEQUAL_BLOCKS)
    assert all(
        gap < 2e-6 for gap in relative_distances([tensor[0] for tensor in actual], [tensor[0] for tensor in expected])
    )


@needs_descriptors
@pytest.mark.parametrize(
    ("lay", "is_copied"), [(by_token, False), (by_head, False), (from_fused_qkv, False), (by_width, True)]
)
def test_descriptor_layout_copies_only_unsupported_strides(lay, is_copied):
    tensor = lay(torch.randn(2, 4, 37, 16, device=DEVICE).half())
    assert (
        torch.equal(to_descriptor_layout(tensor), tensor)
        and (to_descriptor_layout(tensor).data_ptr() != tensor.data_ptr()) == is_copied
    )
    descriptor = make_tensor_descriptor(to_descriptor_layout(tensor), 16)
    rows, columns = descriptor.shape
    size = descriptor.base.untyped_storage().nbytes() // 2 - descriptor.base.storage_offset()
    assert (rows - 1) * descriptor.strides[0] + columns <= size


def test_descriptor_layout_copies_unaligned_and_expanded_tensors():
    unaligned = torch.zeros(2 * 37 * 4 * 16 + 1, device=DEVICE).half()[1:].view(2, 37, 4, 16).transpose(1, 2)
    assert to_descriptor_layout(unaligned).data_ptr() % 16 == 0 != unaligned.data_ptr() % 16
    expanded = torch.zeros(2, 4, 1, 16, device=DEVICE).half().expand(-1, -1, 37, -1)
    assert 0 not in to_descriptor_layout(expanded).stride()


def make_call(dtype=torch.bfloat16, tokens=2048, keys=None, width=64, value_width=None, saved=(1, 2), **changes):
    keys, value_width = keys or tokens, value_width or width

    def empty(heads, length, size):
        return torch.zeros(1, heads, length, size, dtype=dtype, device="meta")

    tensors = {"query": empty(4, tokens, width), "key": empty(2, keys, width), "value": empty(2, keys, value_width)}
    return SimpleNamespace(**tensors, **{"causal": True, "mask": None, "kernel_saved_tensors": saved, **changes})


UNSUPPORTED = {
    "float32": {"dtype": torch.float32},
    "short": {"tokens": 2047},
    "more keys than queries": {"keys": 4096},
    "heads of a width that was not measured": {"width": 80},
    "values of another width": {"value_width": 128},
    "a mask": {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "no log-sum-exp": {"saved": ()},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_calls_use_torch_backward(case, monkeypatch):
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *config: True)
    assert all(triton_backward.supports_backward(make_call(dtype)) for dtype in (torch.bfloat16, torch.float16))
    assert all(
        triton_backward.supports_backward(make_call(**changes))
        for changes in ({"width": 128}, {"causal": False}, {"tokens": 2051})
    )
    assert not triton_backward.supports_backward(make_call(**UNSUPPORTED[case]))


def test_failed_validation_falls_back_to_torch_backward(monkeypatch):
    validated = []
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *config: validated.append(config[:-1]))
    for changes in ({}, {"tokens": 2**17}, {"tokens": 2051, "width": 128, "causal": False}):
        assert not triton_backward.supports_backward(make_call(**changes))
    assert validated == [
        (LAUNCH_CONFIGS[64], torch.bfloat16, 64, True, False),
        (LONG_LAUNCH_CONFIGS[64], torch.bfloat16, 64, True, False),
        (LAUNCH_CONFIGS[128], torch.bfloat16, 128, False, True),
    ]


def test_tensor_descriptors_need_compute_capability_9(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or (8, 0))
    assert not triton_backward._supports_tensor_descriptors(torch.device("cpu")) and not asked
    assert not triton_backward._supports_tensor_descriptors(torch.device("cuda", 0)) and asked
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert triton_backward._supports_tensor_descriptors(torch.device("cuda", 0))


def validate(monkeypatch, run):
    """The result of the validation with `run` in place of the kernels."""
    monkeypatch.setattr(TritonBackward, "__call__", run)
    return triton_backward.is_backward_validated.__wrapped__(
        EQUAL_BLOCKS, torch.float16, 16, True, True, torch.device("cpu")
    )


def correct(call, weights):
    _, (*gradients, row_sum) = reference(call.query, call.key, call.value, call.gradient, weights, call.causal)
    return tuple(gradients), row_sum


def ignores_causality(call, weights):
    _, (*gradients, row_sum) = reference(call.query, call.key, call.value, call.gradient, weights, False)
    return tuple(gradients), row_sum


def returns_nan(call, weights):
    gradients, row_sum = correct(call, weights)
    return (*gradients[:2], gradients[2] * torch.nan), row_sum


def raises_runtime_error(call, weights):
    raise RuntimeError("out of resources")


def raises_import_error(call, weights):
    raise ImportError("tensor_descriptor")


@pytest.mark.parametrize("run", [ignores_causality, returns_nan, raises_runtime_error, raises_import_error])
def test_validation_warns_and_rejects_wrong_kernels(run, monkeypatch):
    assert validate(monkeypatch, correct)
    warning = "fuse the push of a row with the gradients cannot be used here .*torch's backward"
    with pytest.warns(ClearheadWarning, match=warning):
        assert not validate(monkeypatch, run)


def test_validation_propagates_out_of_memory(monkeypatch):
    def full(call, weights):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        validate(monkeypatch, full)


@pytest.mark.parametrize("name", ["supports", "backward", "reduce_maps"])
def test_kernels_launch_on_device_of_tensors(name, monkeypatch):
    """Triton launches on the current device, and a model may span several GPUs."""
    devices = []

    class FakeDevice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            devices.append(self.device)

        def __exit__(self, *_):
            devices.append(None)

    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    query = SimpleNamespace(is_cuda=True, device="cuda:1")

    def wrapped(self, call):
        assert devices == ["cuda:1"] and call.query is query
        return "done"

    method = kernel._on_call_device(wrapped)
    assert method(TritonKernel(), SimpleNamespace(query=query)) == "done" and devices == ["cuda:1", None]
    assert getattr(TritonKernel, name).__code__ is method.__code__


def test_backward_fuses_one_row_sum_and_keeps_reduction_order(monkeypatch):
    """The other reductions take the usual path, and the results keep their order."""
    monkeypatch.setattr(triton_backward, "supports_backward", lambda call: True)
    monkeypatch.setattr(
        triton_backward,
        "build_backward",
        lambda call, slope: lambda row: (("dq", "dk", "dv"), torch.full((1, 4, 8), 4.0)),
    )
    monkeypatch.setattr(
        TritonKernel, "reduce_maps", lambda self, call, gradient, others: [one_row.quantity for one_row in others]
    )
    one_row, three_rows = torch.zeros(1, 1, 8), torch.zeros(1, 3, 8)
    others = [
        MapReduction("positive", three_rows),
        MapReduction("positive", one_row, heads=[1]),
        MapReduction("attention", one_row),
        MapReduction("product"),
    ]
    for index in range(5):
        reductions = [*others[:index], MapReduction("positive", one_row), *others[index:]]
        gradients, sums = TritonKernel().backward(make_call(), torch.zeros(1, 8, 4, 64), reductions)
        assert gradients == ("dq", "dk", "dv")
        assert torch.equal(sums.pop(index), torch.ones(1, 4, 1, 8)) and sums == [other.quantity for other in others]


@needs_interpreter
@pytest.mark.parametrize("backend", ["flash", "cuDNN"])
def test_backward_accepts_log_sum_exp_of_each_backend(backend, monkeypatch):
    """With the log-sum-exp layout of torch's kernels and the gradient layout of autograd."""
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *config: True)
    monkeypatch.setattr(triton_backward, "MIN_BACKWARD_TOKENS", 32)
    monkeypatch.setattr(triton_backward, "LAUNCH_CONFIGS", {16: UNEQUAL_BLOCKS})
    tensors = make_tensors(heads=4, shared=2, tokens=53, dtype=torch.float16, lay=by_head, lay_values=by_token)
    query, key, value, gradient, weights = tensors
    (output, lse), (*gradients, expected_row_sum) = reference(*tensors, True)
    lse = lse[..., None] if backend == "cuDNN" else torch.nn.functional.pad(lse, (0, 11), value=torch.inf)
    fields = {"query": query, "key": key, "value": value, "kernel_saved_tensors": (output, lse, None, None)}
    call = SimpleNamespace(**fields, causal=True, mask=None, scaling=0.25)
    reductions = [MapReduction("positive"), MapReduction("positive", weights[:, None])]
    actual, (sums, row_sum) = TritonKernel().backward(call, gradient.transpose(1, 2), reductions)
    assert all(gap < 1e-3 for gap in relative_distances(actual, gradients)) and sums.shape == (2, 4, 53)
    torch.testing.assert_close(row_sum[:, :, 0].double() * 4, expected_row_sum, rtol=1e-4, atol=1e-5)


#: Few cases, because each takes seconds to compile.
COMPILED_CASES = {
    f"{dtype}, {'causal' if causal else 'whole'}, {tokens} × {width}": (dtype, causal, tokens, width, ways)
    for dtype, causal, tokens, width, ways in (
        (torch.bfloat16, True, 777, 64, LAUNCH_CONFIGS[64]),
        (torch.float16, True, 777, 64, LAUNCH_CONFIGS[64]),
        (torch.bfloat16, False, 768, 64, LONG_LAUNCH_CONFIGS[64]),
        (torch.bfloat16, True, 777, 128, LAUNCH_CONFIGS[128]),
        (torch.float16, False, 768, 128, LAUNCH_CONFIGS[128]),
    )
}


@runs_kernels
@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPILED_CASES)
def test_compiled_kernels_match_autograd_and_are_deterministic(name):
    dtype, causal, tokens, width, launch_config = COMPILED_CASES[name]
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a GPU without tensor descriptors")
    tensors = make_tensors(4, 2, tokens, width, dtype, lay=by_head, lay_values=by_token)
    assert_matches_reference(tensors, causal, launch_config, 5e-3)
    saved, _ = reference(*tensors, causal)
    first, second = (run_kernel(*tensors, causal, saved, launch_config) for _ in range(2))
    assert all(torch.equal(tensor, reference) for tensor, reference in zip(first, second, strict=True))


class SlowFusedKernel:
    """Stands in for torch's fused kernels without a GPU."""

    def __init__(self, call):
        self.call = call

    def forward(self, query, key, value):
        scores, attention = maps(query.double(), key.double(), self.call.causal)
        output = attention @ value.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
        return output.to(query.dtype), scores.logsumexp(-1).float(), torch.empty(0), torch.empty(0)

    def backward(self, output_gradient, query, key, value, saved):
        with torch.enable_grad():
            _, (*gradients, _) = reference(
                query, key, value, output_gradient, torch.zeros(output_gradient.shape[::2]), self.call.causal
            )
        return tuple(tensor.to(query.dtype) for tensor in gradients)


def use_slow_fused_kernel(monkeypatch):
    """Make a small model use the Triton backward in the interpreter."""
    monkeypatch.setattr(
        fused_sdpa, "select_fused_kernel", lambda call: SlowFusedKernel(call) if call.mask is None else None
    )
    monkeypatch.setattr(fused_sdpa, "get_fused_kernel_used", SlowFusedKernel)
    monkeypatch.setattr(triton_backward, "_supports_tensor_descriptors", lambda device: True)
    monkeypatch.setattr(triton_backward, "is_backward_validated", lambda *config: True)
    monkeypatch.setattr(triton_backward, "MIN_BACKWARD_TOKENS", 32)
    monkeypatch.setattr(triton_backward, "LAUNCH_CONFIGS", {16: UNEQUAL_BLOCKS})


@runs_kernels
@needs_descriptors
@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint", [True, False])
def test_explanation_with_triton_backward_matches_materialised(checkpoint, monkeypatch):
    """The first use, with its validation, happens inside a checkpointed layer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import clearhead

    if COMPILED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("a GPU without tensor descriptors")
    if INTERPRETED:
        use_slow_fused_kernel(monkeypatch)
    tokens, width, dtype, tolerance = (2077, 64, torch.bfloat16, 0.05) if COMPILED else (41, 16, torch.float16, 0.03)
    torch.manual_seed(0)
    shape = {"hidden_size": 4 * width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**shape, num_key_value_heads=2, vocab_size=40, max_position_embeddings=4096)
    model = LlamaForCausalLM(config).eval().to(DEVICE, dtype)
    inputs = {"input_ids": torch.randint(5, 40, (1, tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)}
    calls = []
    original = triton_backward.build_backward
    monkeypatch.setattr(triton_backward, "build_backward", lambda *args: calls.append(args) or original(*args))
    methods = ["generic", "grad-sam"]
    actual = clearhead.load(model).explain(inputs, methods, target=1, kernel="triton", checkpoint=checkpoint)
    assert len(calls) == 3  # two layers, and the last one once more to find its read-out rows
    materialised = clearhead.load(model).explain(inputs, methods, target=1, kernel="materialised")
    float64 = clearhead.load(deepcopy(model).double()).explain(inputs, methods, target=1, kernel="materialised")
    for name, expected in float64.items():
        assert actual[name].certificate["kernel"].startswith("streaming: triton")
        # materialised maps of the same model use the same gradients
        assert (
            abs(actual[name].scores - materialised[name].scores).max() <= 1e-5 * abs(materialised[name].scores).max()
        ), name
        distance = np.linalg.norm(actual[name].scores - expected.scores)
        assert distance <= tolerance * np.linalg.norm(expected.scores) > 0, name
