"""Selection of torch's fused SDPA kernels, their call conventions, and validation of windows and log-sum-exp."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearhead.capture.attention.lazy_mask import BandMask, LazyMask
from clearhead.capture.kernels import fused_sdpa
from clearhead.capture.kernels.fused_sdpa import FusedSDPA
from clearhead.errors import ClearheadWarning
from tests.capture.attention.test_lazy_mask import LENGTH, NAMES, WINDOWS, mask_arguments
from tests.capture.flash_attention import ReferenceFlashAttention, use_reference_flash_attention

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def large_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks count as too large to be materialised."""
    monkeypatch.setattr(LazyMask, "fits_in_memory", False)


def make_call(mask: Any = None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **changes: Any) -> Any:
    """A call with four query heads and two key heads."""
    sizes = {"queries": LENGTH, "keys": LENGTH, "width": 16, "value_width": 16, **changes}

    def zeros(heads: int, length: str, width: str) -> torch.Tensor:
        return torch.zeros(2, heads, sizes[length], sizes[width], dtype=dtype, device=device)

    tensors = {"key": zeros(2, "keys", "width"), "value": zeros(2, "keys", "value_width")}
    fields = {"causal": mask is None, "mask": mask, "scaling": 0.2, "kernel_saved_tensors": ()}
    return SimpleNamespace(query=zeros(4, "queries", "width"), **tensors, **fields)


@pytest.mark.parametrize("backend", ["FLASH", "CUDNN", "EFFICIENT", "WINDOW"])
def test_fused_kernels_run_on_meta_tensors_with_expected_shapes(backend: str) -> None:
    """On the meta device, so without a GPU."""
    window = backend == "WINDOW"
    sdpa_call = make_call(
        LazyMask(mask_arguments("window", False)) if window else None,
        torch.float32 if backend == "EFFICIENT" else torch.bfloat16,
        "meta",
    )
    qkv = (sdpa_call.query, sdpa_call.key, sdpa_call.value)
    if backend == "EFFICIENT":  # the efficient kernel does not support grouped heads
        qkv = (sdpa_call.query,) * 3
    options: dict[str, Any] = {"window": sdpa_call.mask.band_mask} if window else {"causal": True}
    kernel = FusedSDPA(fused_sdpa.FLASH if window else getattr(fused_sdpa, backend), 0.2, **options)
    sdpa_call.kernel_saved_tensors = kernel.forward(*qkv)
    assert sdpa_call.kernel_saved_tensors[0].shape == sdpa_call.query.shape and len(sdpa_call.kernel_saved_tensors) == 4
    gradients = kernel.backward(sdpa_call.query, *qkv, sdpa_call.kernel_saved_tensors)
    assert [tensor.shape for tensor in gradients] == [tensor.shape for tensor in qkv]
    if backend != "CUDNN":  # whose log-sum-exp has another shape on a GPU than on the meta device
        assert fused_sdpa.get_fused_kernel_used(sdpa_call) == kernel


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_flash_attention_is_selected_if_mask_is_only_a_window(
    name: str, dtype: torch.dtype, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_reference_flash_attention(monkeypatch)
    monkeypatch.setattr(fused_sdpa, "_is_window_valid", lambda dtype, width, device: True)
    kernel = fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments(name, padded)), dtype))
    window = WINDOWS.get(name, (None, None))
    if padded or dtype == torch.float32 or window == (None, None):
        assert kernel is None
    else:
        assert kernel == FusedSDPA(fused_sdpa.FLASH, 0.2, window=BandMask(None, *window))


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "more keys than queries": {"queries": LENGTH - 2},
    "width not a multiple of 8": {"width": 12, "value_width": 12},
    "values of another width": {"value_width": 32},
    "materialised mask": {"mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_no_fused_kernel_is_selected_for_unsupported_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_flash_attention(monkeypatch)
    window = LazyMask(mask_arguments("window", False))
    assert fused_sdpa.select_fused_kernel(make_call(window)) is not None
    assert fused_sdpa.select_fused_kernel(make_call(**{"mask": window, **UNSUPPORTED[case]})) is None


def test_no_fused_kernel_is_selected_if_mask_fits_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_reference_flash_attention(monkeypatch)
    assert fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments("window", False)))) is not None
    monkeypatch.setattr(LazyMask, "fits_in_memory", True)
    assert fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments("window", False)))) is None


def test_flash_attention_is_selected_only_if_torch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch knows the GPU and the backends that the user disabled. It gets tensors that require gradients."""
    use_reference_flash_attention(monkeypatch)
    asked_params: list[Any] = []
    monkeypatch.setattr(fused_sdpa, "can_use_flash_attention", lambda params: asked_params.append(params))
    with torch.no_grad():
        assert fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments("window", False)))) is None
    (params,) = asked_params
    assert params.query.requires_grad and params.enable_gqa and params.attn_mask is None and not params.is_causal


def test_no_fused_kernel_is_selected_on_cpu() -> None:
    assert (
        fused_sdpa.select_fused_kernel(make_call()) is None
        and fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments("window", False)))) is None
    )


WRONG = {
    "one key too early": ReferenceFlashAttention(early=1),
    "one key too few": ReferenceFlashAttention(early=-1),
    "one key ahead": ReferenceFlashAttention(late=1),
    "base-2 log-sum-exp": ReferenceFlashAttention(base=2.0),
    "key gradients not summed over groups": ReferenceFlashAttention(shared=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(37, 0), (20, 9), (None, 0), (5, None)])
def test_window_validation_accepts_correct_flash_attention(
    window: tuple[int | None, int | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reference implementation of flash attention."""
    flash = use_reference_flash_attention(monkeypatch)
    assert fused_sdpa._matches_reference(BandMask(None, *window), dtype, 16, CPU)
    sizes = [-1 if count is None else count for count in window]
    assert flash.windows == [("forward", *sizes), ("backward", *sizes)]


@pytest.mark.parametrize("case", WRONG)
def test_window_validation_warns_and_rejects_wrong_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_flash_attention(monkeypatch, WRONG[case])
    with pytest.warns(ClearheadWarning, match="own windows cannot be used here"):
        assert not fused_sdpa._is_window_valid(torch.bfloat16, 16, CPU)
    assert fused_sdpa.select_fused_kernel(make_call(LazyMask(mask_arguments("window", False)))) is None


def test_window_validation_warns_and_rejects_kernels_that_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference_flash_attention(monkeypatch)
    monkeypatch.setattr(fused_sdpa, "aten", torch.ops.aten)  # there is no such operation for a CPU
    with pytest.warns(ClearheadWarning, match="own windows cannot be used here .NotImplementedError"):
        assert not fused_sdpa._is_window_valid(torch.bfloat16, 16, CPU)


@pytest.mark.parametrize("case", ["right", "base-2 log-sum-exp", "one key ahead"])
def test_lse_validation_accepts_only_natural_log_of_correct_scores(
    case: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    use_reference_flash_attention(monkeypatch, WRONG.get(case))
    assert fused_sdpa._is_lse_valid(fused_sdpa.FLASH, torch.bfloat16, 16, CPU) == (case == "right")
    messages = [str(message.message) for message in recwarn if issubclass(message.category, ClearheadWarning)]
    assert len(messages) == (case != "right")
    assert all(message.startswith("the log-sum-exp of flash attention cannot be used here") for message in messages)
