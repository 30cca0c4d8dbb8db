"""Which calls go to which of torch's kernels, that these are called as they want it, and how a window is proven."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clearhead.capture.attention.lazy_mask import BandMask, LazyMask
from clearhead.capture.kernels import fused_sdpa
from clearhead.capture.kernels.fused_sdpa import FusedSDPA
from clearhead.errors import ClearheadWarning
from tests.capture.attention.test_lazy_mask import FEW_WORDS, LENGTH, NAMES, asked
from tests.capture.flash_attention import Flash, allow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if masks were too large to be whole."""
    monkeypatch.setattr(LazyMask, "fits_in_memory", False)


def call(mask: Any = None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **changed: Any) -> Any:
    """Four heads, of which two share keys."""
    sizes = {"queries": LENGTH, "keys": LENGTH, "width": 16, "value_width": 16, **changed}

    def some(heads: int, length: str, width: str) -> torch.Tensor:
        return torch.zeros(2, heads, sizes[length], sizes[width], dtype=dtype, device=device)

    parts = {"key": some(2, "keys", "width"), "value": some(2, "keys", "value_width")}
    how = {"causal": mask is None, "mask": mask, "scaling": 0.2, "kernel_saved_tensors": ()}
    return SimpleNamespace(query=some(4, "queries", "width"), **parts, **how)


@pytest.mark.parametrize("backend", ["FLASH", "CUDNN", "EFFICIENT", "WINDOW"])
def test_torchs_kernels_are_called_as_they_want_it(backend: str) -> None:
    """Without numbers, and so without a GPU."""
    window = backend == "WINDOW"
    given = call(
        LazyMask(asked("window", False)) if window else None,
        torch.float32 if backend == "EFFICIENT" else torch.bfloat16,
        "meta",
    )
    whole = (given.query, given.key, given.value)
    if backend == "EFFICIENT":  # which has no way to share keys
        whole = (given.query,) * 3
    told: dict[str, Any] = {"window": given.mask.band_mask} if window else {"causal": True}
    kernel = FusedSDPA(fused_sdpa.FLASH if window else getattr(fused_sdpa, backend), 0.2, **told)
    given.kernel_saved_tensors = kernel.forward(*whole)
    assert given.kernel_saved_tensors[0].shape == given.query.shape and len(given.kernel_saved_tensors) == 4
    found = kernel.backward(given.query, *whole, given.kernel_saved_tensors)
    assert [part.shape for part in found] == [part.shape for part in whole]
    if backend != "CUDNN":  # whose log-sum-exp has another shape on a GPU than without numbers
        assert fused_sdpa.get_fused_kernel_used(given) == kernel


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_is_all_that_a_mask_says_is_flash_attentions(
    name: str, dtype: torch.dtype, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch)
    monkeypatch.setattr(fused_sdpa, "_is_window_valid", lambda dtype, width, device: True)
    found = fused_sdpa.select_fused_kernel(call(LazyMask(asked(name, padded)), dtype))
    words = FEW_WORDS.get(name, (None, None))
    if padded or dtype == torch.float32 or words == (None, None):
        assert found is None
    else:
        assert found == FusedSDPA(fused_sdpa.FLASH, 0.2, window=BandMask(None, *words))


LEFT_TO_PIECES: dict[str, dict[str, Any]] = {
    "more keys than queries": {"queries": LENGTH - 2},
    "an odd width": {"width": 12, "value_width": 12},
    "values of another width": {"value_width": 32},
    "a mask that is there": {"mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("why", LEFT_TO_PIECES)
def test_what_is_left_to_the_attention_that_the_model_runs_with(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    window = LazyMask(asked("window", False))
    assert fused_sdpa.select_fused_kernel(call(window)) is not None
    assert fused_sdpa.select_fused_kernel(call(**{"mask": window, **LEFT_TO_PIECES[why]})) is None


def test_a_mask_that_may_be_whole_goes_to_the_attention_that_the_model_runs_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(monkeypatch)
    assert fused_sdpa.select_fused_kernel(call(LazyMask(asked("window", False)))) is not None
    monkeypatch.setattr(LazyMask, "fits_in_memory", True)
    assert fused_sdpa.select_fused_kernel(call(LazyMask(asked("window", False)))) is None


def test_whether_flash_attention_may_be_used_is_for_torch_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the GPU, and what the user has turned off. It is asked about a pass that goes back."""
    allow(monkeypatch)
    told: list[Any] = []
    monkeypatch.setattr(fused_sdpa, "can_use_flash_attention", lambda params: told.append(params))
    with torch.no_grad():
        assert fused_sdpa.select_fused_kernel(call(LazyMask(asked("window", False)))) is None
    (params,) = told
    assert params.query.requires_grad and params.enable_gqa and params.attn_mask is None and not params.is_causal


def test_without_a_gpu_nothing_is_torchs() -> None:
    assert (
        fused_sdpa.select_fused_kernel(call()) is None
        and fused_sdpa.select_fused_kernel(call(LazyMask(asked("window", False)))) is None
    )


WRONG = {
    "a key too early": Flash(early=1),
    "a key too few": Flash(early=-1),
    "a key ahead": Flash(late=1),
    "to the base 2": Flash(base=2.0),
    "gradients of shared keys one by one": Flash(shared=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [(37, 0), (20, 9), (None, 0), (5, None)])
def test_what_keeps_to_its_window_is_proven(
    window: tuple[int | None, int | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the slow twin, whose every cell is asked whether it is seen."""
    flash = allow(monkeypatch)
    assert fused_sdpa._matches_reference(BandMask(None, *window), dtype, 16, CPU)
    said = [-1 if count is None else count for count in window]
    assert flash.windows == [("forward", *said), ("backward", *said)]


@pytest.mark.parametrize("how", WRONG)
def test_what_does_not_is_not_trusted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, WRONG[how])
    with pytest.warns(ClearheadWarning, match="own windows cannot be used here"):
        assert not fused_sdpa._is_window_valid(torch.bfloat16, 16, CPU)
    assert fused_sdpa.select_fused_kernel(call(LazyMask(asked("window", False)))) is None


def test_what_does_not_run_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch)
    monkeypatch.setattr(fused_sdpa, "aten", torch.ops.aten)  # there is no such operation for a CPU
    with pytest.warns(ClearheadWarning, match="own windows cannot be used here .NotImplementedError"):
        assert not fused_sdpa._is_window_valid(torch.bfloat16, 16, CPU)


@pytest.mark.parametrize("how", ["right", "to the base 2", "a key ahead"])
def test_a_log_sum_exp_is_proven(how: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    allow(monkeypatch, WRONG.get(how))
    assert fused_sdpa._is_lse_valid(fused_sdpa.FLASH, torch.bfloat16, 16, CPU) == (how == "right")
    told = [str(one.message) for one in recwarn if issubclass(one.category, ClearheadWarning)]
    assert len(told) == (how != "right")
    assert all(one.startswith("the log-sum-exp of flash attention cannot be used here") for one in told)
