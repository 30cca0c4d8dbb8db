"""Layer-wise relevance propagation equals its reference implementation; conservation, precision and errors."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import clearhead
from clearhead.backward_rules.mode import RuleMode
from clearhead.capture.session import remove_hooks_on_exit
from clearhead.engine.passes.modified_backward import _check_nonzero_start, _get_tolerance
from clearhead.errors import UnsupportedError
from tests import joint_models, models
from tests.methods import replica_comparison
from tests.methods.relevance_models import SUBJECTS, TOLERANCES, VARIANTS, explain_batch, walk_batch
from tests.replicas import lrp


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str, variant: str) -> None:
    num_prefix_tokens = replica_comparison.NUM_PREFIX_TOKENS.get(subject.split("/")[0], 0)
    results = explain_batch(subject, "lrp", {"rules": variant, "positions": True})
    for e, (relevance, _, _) in zip(results, walk_batch(subject, variant), strict=True):
        assert (
            replica_comparison.gap(e.scores, lrp.scores(relevance, positions=True, before=num_prefix_tokens))
            < TOLERANCES[subject]
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_default_scores_exclude_the_relevance_of_positions(variant: str) -> None:
    """By default all relevance that leaves the first layer is assigned to the tokens."""
    results = explain_batch("bert/classify", "lrp", {"rules": variant})
    for e, (relevance, _, _) in zip(results, walk_batch("bert/classify", variant), strict=True):
        assert replica_comparison.gap(e.scores, lrp.scores(relevance)) < 1e-9


def test_only_default_rules_conserve_relevance() -> None:
    """With `rules="orig"`, which the authors compare with, every linear map roughly doubles relevance: far more than
    the initial one arrives at the inputs. With the default rules, exactly one arrives."""
    methods = [clearhead.Method("lrp"), clearhead.Method("lrp", rules="orig")]
    ours, orig = (
        replica_comparison.explainer("bert/classify")
        .explain(replica_comparison.SENTENCES[0], methods, target=1)
        .values()
    )
    assert ours.scores.sum() == pytest.approx(1, abs=1e-7)
    assert abs(orig.scores.sum()) > 16


def test_only_orig_rules_are_linear_in_the_target() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    method = clearhead.Method("lrp", rules="orig")
    first, second = (ex.explain(text, method, target=label) for label in (0, 1))
    contrast = ex.explain(text, method, target=clearhead.Contrast(0, 1))
    assert replica_comparison.gap(contrast.scores, first.scores - second.scores) < 1e-9
    assert contrast.provenance["linear_in_target"] and not ex.explain(text, "lrp").provenance["linear_in_target"]


METHODS = ["lrp", "transformer-attribution", clearhead.Method("partial-lrp", rules="ours")]
ZERO_SUM_TARGETS = [
    {"target": clearhead.Contrast(0, 1)},
    {"target": [None, clearhead.Contrast(0, 1)]},
    {"scale": "probability"},
    {"scale": "log-odds"},
    {"target": lambda output: output.logits[:, 0] - output.logits[:, 1]},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize(
    "arguments", ZERO_SUM_TARGETS, ids=["contrast", "contrast in a batch", "probability", "log-odds", "callable"]
)
def test_target_with_zero_sum_relevance_is_rejected(method: Any, arguments: dict[str, Any]) -> None:
    """The rules conserve the sum of zero: only rounding would arrive (scores of 1e-194), other than in a batch."""
    ex = replica_comparison.explainer("bert/classify")
    texts = (
        replica_comparison.SENTENCES[:2]
        if isinstance(arguments.get("target"), list)
        else replica_comparison.SENTENCES[0]
    )
    with pytest.raises(UnsupportedError, match="initial relevance sums to zero"):
        ex.explain(texts, method, **arguments)
    e = ex.explain(
        replica_comparison.SENTENCES[0], method, target=lambda output: output.logits[:, 0] - output.logits[:, 1] / 2
    )
    assert np.abs(e.scores).max() > 1e-9


def test_zero_sum_target_is_rejected_for_multi_stream_models() -> None:
    with pytest.raises(UnsupportedError, match="initial relevance sums to zero"):
        joint_models.explainer("lxmert").explain(
            **joint_models.inputs("lxmert")[0], method="lrp", target=clearhead.Contrast(0, 1)
        )


def test_zero_sum_step_is_detected_among_other_steps() -> None:
    """Each of several tokens of one continuation is checked by itself."""
    logits = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.stack([logits[:, 0, 2], logits[:, 1, 3]])
    _check_nonzero_start(targets, logits)
    with pytest.raises(UnsupportedError, match=r"the target \(of 3 targets, those at 2\) subtracts"):
        _check_nonzero_start(torch.cat([targets, (logits[:, 2, 0] - logits[:, 2, 1])[None]]), logits)


def test_batch_equals_single() -> None:
    """The authors' sums run over the batch; ours run over each sample, so that other samples change nothing."""
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    single = ex.explain(texts[0], "lrp").scores
    for batch in ([texts[0], texts[1]], [texts[2], texts[0], texts[0]]):
        results = ex.explain(batch, "lrp")
        assert replica_comparison.gap(results[batch.index(texts[0])].scores, single) < 1e-9


def test_pixel_bounds_are_per_sample() -> None:
    """z^B uses the smallest and the largest value of each image: another image in the batch must not change them."""
    ex, (first, *_) = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    other_image = np.full_like(first, 255)
    other_image[::2] = 0
    batched, single = ex.explain([first, other_image], "lrp")[0], ex.explain(first, "lrp")
    assert replica_comparison.gap(batched.scores, single.scores) < 1e-4  # the softmax runs in float32


RELEVANCE_METHODS = [
    clearhead.Method("lrp"),
    clearhead.Method("lrp", rules="orig"),
    clearhead.Method("partial-lrp"),
    clearhead.Method("transformer-attribution"),
    clearhead.Method("generic", lrp=True),
]


@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/classify", "vit/image"])
def test_float32_batch_equals_single_and_float64(subject: str) -> None:
    """Passes run in float64 for any dtype of the model: in float32, rounding dominated the scores, and batches of other
    sizes had other scores."""
    float32 = models.explainer(subject, torch.float32)
    float64 = clearhead.load((deepcopy(float32.adapter.model).double(), float32.adapter.processor))
    raws = models.inputs(subject)
    batched, exact = (ex.explain(raws, RELEVANCE_METHODS, target=1) for ex in (float32, float64))
    for i, raw in enumerate(raws):
        for method, single in float32.explain(raw, RELEVANCE_METHODS, target=1).items():
            is_combined_with_gradient = method.startswith(("transformer", "generic"))
            tolerance = 1e-5 if is_combined_with_gradient else 1e-6
            assert single.scores.dtype == np.float32
            assert replica_comparison.gap(batched[method][i].scores, single.scores) < tolerance, method
            assert replica_comparison.gap(single.scores, exact[method][i].scores) < tolerance, method


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "method", [method for method in RELEVANCE_METHODS if method.name in ("lrp", "partial-lrp")], ids=str
)
def test_half_precision_scores_equal_float64_scores_of_the_same_weights(
    method: clearhead.Method, dtype: torch.dtype
) -> None:
    """Only the weights have half precision; nothing computed from them is rounded to their dtype."""
    model, tokenizer = models.text_model("bert", dtype=dtype, initializer_range=0.02)
    half, double = clearhead.load((model, tokenizer)), clearhead.load((deepcopy(model).double(), tokenizer))
    half_scores, double_scores = (ex.explain(models.TEXTS[1], method, target=1).scores for ex in (half, double))
    assert replica_comparison.gap(half_scores, double_scores) < 1e-6
    assert next(model.parameters()).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_value_near_zero_is_explained(dtype: torch.dtype) -> None:
    """The rules run in float64, the model does not: its rounding is large relative to a target value near zero."""
    model, tokenizer = models.text_model("bert", dtype=dtype, initializer_range=0.2)
    ex = clearhead.load((model, tokenizer))
    value = ex.explain(models.TEXTS[1], "attention", target=1).target["value"]
    with torch.no_grad():
        model.classifier.bias -= value
    assert np.abs(clearhead.load((model, tokenizer)).explain(models.TEXTS[1], "lrp", target=1).scores).max() > 0


@pytest.mark.parametrize(
    ("device", "needs_float64", "tolerance"), [("cuda", True, 3e-2), ("cuda", False, 1e-4), ("cpu", True, 1e-4)]
)
def test_tolerance_allows_tf32_only_for_float64_passes_on_a_gpu(
    device: str, needs_float64: bool, tolerance: float
) -> None:
    """On an H200, images were rejected depending on their batch: TF32 convolutions exceeded the float32 tolerance."""
    adapter: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    family: Any = SimpleNamespace(needs_float64=needs_float64)
    assert _get_tolerance(adapter, family) == tolerance


def test_model_that_fails_in_float64_is_rejected() -> None:
    """XGLM creates a scalar in the default dtype of torch, where the minimum of float64 overflows."""
    model, tokenizer = models.text_model("bert", dtype=torch.float32)

    def add_float_minimum(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0 * torch.full((), torch.finfo(output.dtype).min)

    with remove_hooks_on_exit([model.bert.pooler.dense.register_forward_hook(add_float_minimum)]):
        ex = clearhead.load((model, tokenizer))
        (row,) = (row for row in ex.methods() if row.name == "lrp")
        assert not row.applies and "passes are in float64" in row.why_not
        message = r"does not run under relevance propagation, whose passes are in float64: RuntimeError: value"
        with pytest.raises(clearhead.UnsupportedError, match=message):
            ex.explain(models.TEXTS[0], "lrp")


def load_checked_model() -> tuple[Any, clearhead.Explainer]:
    """Return a model whose recorder has passed its self-test, and its explainer."""
    model, tokenizer = models.text_model("bert", dtype=torch.float64)
    ex = clearhead.load((model, tokenizer))
    ex.explain(models.TEXTS[0], "attention")
    return model, ex


@pytest.mark.parametrize("method", ["lrp", "attn-lrp", "pa-lrp"])
def test_failure_under_rules_only_is_reported_with_its_cause(method: str) -> None:
    """The message quotes the error, whose cause need not be the dtype. The second call is rejected without a pass."""
    model, ex = load_checked_model()
    passes = []

    def fail_under_rules(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        passes.append(1)
        if any(isinstance(mode, RuleMode) for mode in _get_current_function_mode_stack()):
            raise RuntimeError("the store is full\nof something")

    with remove_hooks_on_exit([model.bert.pooler.dense.register_forward_hook(fail_under_rules)]):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"does not run under .*: RuntimeError: the store is full$"):
                ex.explain(models.TEXTS[0], method)
            assert len(passes) == 3  # under the rules, without them, and under them again


RULE_METHODS = [
    *("lrp", "partial-lrp", "transformer-attribution", "attn-lrp", "cp-lrp", "pa-lrp", "libragrad", "gim"),
    *("deeplift", "deeplift-shap"),
]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the store is full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
@pytest.mark.parametrize("method", RULE_METHODS)
def test_transient_error_is_raised_and_not_cached(method: str, error: RuntimeError) -> None:
    model, ex = load_checked_model()
    errors = [error]

    def fail_once(module: torch.nn.Module, args: Any) -> None:
        if errors:
            raise errors.pop()

    with remove_hooks_on_exit([model.bert.pooler.dense.register_forward_pre_hook(fail_once)]):
        with pytest.raises(RuntimeError) as raised:
            ex.explain(models.TEXTS[0], method)
        assert raised.value is error
        repeated = ex.explain(models.TEXTS[0], method)
    assert np.array_equal(repeated.scores, load_checked_model()[1].explain(models.TEXTS[0], method).scores)


def test_error_that_also_occurs_without_rules_is_raised_unchanged() -> None:
    """The error is not attributed to the rules, and the method works again when the error is gone."""
    model, ex = load_checked_model()

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("the store is full")

    handle = model.bert.pooler.dense.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the store is full"):
            ex.explain(models.TEXTS[0], "lrp")
    handle.remove()
    assert np.abs(ex.explain(models.TEXTS[0], "lrp").scores).max() > 0


def test_out_of_memory_under_rules_is_raised_and_not_cached() -> None:
    """Passes in float64 need more memory than plain ones: a lack of memory is a property of the machine."""
    model, ex = load_checked_model()

    def fail_in_float64(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if any(isinstance(mode, RuleMode) for mode in _get_current_function_mode_stack()):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")

    with (
        remove_hooks_on_exit([model.bert.pooler.dense.register_forward_hook(fail_in_float64)]),
        pytest.raises(RuntimeError, match="ALLOC_FAILED"),
    ):
        ex.explain(models.TEXTS[0], "lrp")
    assert np.abs(ex.explain(models.TEXTS[0], "lrp").scores).max() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 needs a GPU")
@pytest.mark.parametrize("method", ["lrp", "partial-lrp", "transformer-attribution"])
def test_gpu_image_scores_equal_cpu_scores(method: str) -> None:
    """Convolutions run in TF32 on a GPU by default."""
    assert torch.backends.cudnn.allow_tf32
    model, processor = models.image_model("vit", torch.float32)
    on_cpu, on_gpu = (clearhead.load((deepcopy(model).to(device), processor)) for device in ("cpu", "cuda"))
    raws = models.inputs("vit/image")
    for gpu_explanation, cpu_explanation in zip(
        *(ex.explain(raws, method, target=1) for ex in (on_gpu, on_cpu)), strict=True
    ):
        assert gpu_explanation.certificate["device"].startswith("cuda")
        assert replica_comparison.gap(gpu_explanation.scores, cpu_explanation.scores) < 1e-3
