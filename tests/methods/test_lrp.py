"""Layer-wise relevance propagation against its replica, and what it conserves."""

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
from tests.methods.relevance_models import SUBJECTS, VARIANTS, WITHIN, explained, walked
from tests.replicas import lrp


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str, variant: str) -> None:
    before = replica_comparison.BEFORE.get(subject.split("/")[0], 0)
    own = explained(subject, "lrp", {"rules": variant, "positions": True})
    for e, (found, _, _) in zip(own, walked(subject, variant), strict=True):
        assert replica_comparison.gap(e.scores, lrp.scores(found, positions=True, before=before)) < WITHIN[subject]


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_take_no_share_by_default(variant: str) -> None:
    """Then all that leaves the first layer is the words'."""
    own = explained("bert/classify", "lrp", {"rules": variant})
    for e, (found, _, _) in zip(own, walked("bert/classify", variant), strict=True):
        assert replica_comparison.gap(e.scores, lrp.scores(found)) < 1e-9


def test_relevance_doubles_by_the_rules_that_authors_compare_with() -> None:
    """Two linear maps in the head, and four in each of three layers, one way or another: far more than the one of the
    target arrives, though it is one by our default."""
    both = [clearhead.Method("lrp"), clearhead.Method("lrp", rules="orig")]
    ours, orig = (
        replica_comparison.explainer("bert/classify").explain(replica_comparison.SENTENCES[0], both, target=1).values()
    )
    assert ours.scores.sum() == pytest.approx(1, abs=1e-7)
    assert abs(orig.scores.sum()) > 16


def test_linear_in_the_target_by_those_rules_alone() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), replica_comparison.SENTENCES[0]
    method = clearhead.Method("lrp", rules="orig")
    one, other = (ex.explain(text, method, target=label) for label in (0, 1))
    contrast = ex.explain(text, method, target=clearhead.Contrast(0, 1))
    assert replica_comparison.gap(contrast.scores, one.scores - other.scores) < 1e-9
    assert contrast.provenance["linear_in_target"] and not ex.explain(text, "lrp").provenance["linear_in_target"]


METHODS = ["lrp", "transformer-attribution", clearhead.Method("partial-lrp", rules="ours")]
SUMS_OF_ZERO = [
    {"target": clearhead.Contrast(0, 1)},
    {"target": [None, clearhead.Contrast(0, 1)]},
    {"scale": "probability"},
    {"scale": "log-odds"},
    {"target": lambda output: output.logits[:, 0] - output.logits[:, 1]},
]


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("how", SUMS_OF_ZERO, ids=["contrast", "beside a class", "probability", "log-odds", "own"])
def test_what_starts_with_a_sum_of_zero_is_refused(method: Any, how: dict[str, Any]) -> None:
    """The rules keep it: rounding alone would arrive (scores of 1e-194), one way in a batch and another alone."""
    ex = replica_comparison.explainer("bert/classify")
    texts = replica_comparison.SENTENCES[:2] if isinstance(how.get("target"), list) else replica_comparison.SENTENCES[0]
    with pytest.raises(UnsupportedError, match="relevance then starts with a sum of zero"):
        ex.explain(texts, method, **how)
    own = ex.explain(
        replica_comparison.SENTENCES[0], method, target=lambda output: output.logits[:, 0] - output.logits[:, 1] / 2
    )
    assert np.abs(own.scores).max() > 1e-9


def test_what_starts_with_a_sum_of_zero_beside_a_picture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="relevance then starts with a sum of zero"):
        joint_models.explainer("lxmert").explain(
            **joint_models.inputs("lxmert")[0], method="lrp", target=clearhead.Contrast(0, 1)
        )


def test_a_step_that_starts_with_a_sum_of_zero_hides_behind_no_other() -> None:
    """Of several words of one answer, each by itself."""
    logits = torch.randn(1, 3, 5, dtype=torch.float64, requires_grad=True)
    whole = torch.stack([logits[:, 0, 2], logits[:, 1, 3]])
    _check_nonzero_start(whole, logits)
    with pytest.raises(UnsupportedError, match=r"what is explained \(of 3 targets, those at 2\) takes from"):
        _check_nonzero_start(torch.cat([whole, (logits[:, 2, 0] - logits[:, 2, 1])[None]]), logits)


def test_neighbours_take_nothing() -> None:
    """The authors' sums run over the whole batch; ours over each sample, so that a neighbour changes nothing."""
    ex, texts = replica_comparison.explainer("bert/classify"), models.inputs("bert/classify")
    alone = ex.explain(texts[0], "lrp").scores
    for batch in ([texts[0], texts[1]], [texts[2], texts[0], texts[0]]):
        beside = ex.explain(batch, "lrp")
        assert replica_comparison.gap(beside[batch.index(texts[0])].scores, alone) < 1e-9


def test_pictures_by_the_bounds_of_each() -> None:
    """z^B takes the least and the largest number of each picture: another picture in the batch must not move them."""
    ex, (first, *_) = replica_comparison.explainer("vit/image"), models.inputs("vit/image")
    bright = np.full_like(first, 255)
    bright[::2] = 0
    together, alone = ex.explain([first, bright], "lrp")[0], ex.explain(first, "lrp")
    assert replica_comparison.gap(together.scores, alone.scores) < 1e-4  # the softmax runs in float32


BY_RELEVANCE = [
    clearhead.Method("lrp"),
    clearhead.Method("lrp", rules="orig"),
    clearhead.Method("partial-lrp"),
    clearhead.Method("transformer-attribution"),
    clearhead.Method("generic", lrp=True),
]


@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/classify", "vit/image"])
def test_rounding_is_not_amplified(subject: str) -> None:
    """Passes are made in float64, whatever the model's format: else scores in float32 were those of rounding, and
    batches of other sizes had other ones."""
    single = models.explainer(subject, torch.float32)
    double = clearhead.load((deepcopy(single.adapter.model).double(), single.adapter.processor))
    raws = models.inputs(subject)
    together, exact = (ex.explain(raws, BY_RELEVANCE, target=1) for ex in (single, double))
    for i, raw in enumerate(raws):
        for method, alone in single.explain(raw, BY_RELEVANCE, target=1).items():
            within = 1e-5 if method.startswith(("transformer", "generic")) else 1e-6  # beside an ordinary gradient
            assert alone.scores.dtype == np.float32
            assert replica_comparison.gap(together[method][i].scores, alone.scores) < within, method
            assert replica_comparison.gap(alone.scores, exact[method][i].scores) < within, method


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", [one for one in BY_RELEVANCE if one.name in ("lrp", "partial-lrp")], ids=str)
def test_half_precision_has_the_scores_of_its_weights(method: clearhead.Method, dtype: torch.dtype) -> None:
    """The weights are what they are; nothing that is computed of them is rounded to their format."""
    made, words = models.text_model("bert", dtype=dtype, initializer_range=0.02)
    half, double = clearhead.load((made, words)), clearhead.load((deepcopy(made).double(), words))
    found, exact = (ex.explain(models.TEXTS[1], method, target=1).scores for ex in (half, double))
    assert replica_comparison.gap(found, exact) < 1e-6
    assert next(made.parameters()).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_score_near_zero_is_explained(dtype: torch.dtype) -> None:
    """The rules run in float64, the model does not: of a score near zero, its rounding is no small part."""
    made, words = models.text_model("bert", dtype=dtype, initializer_range=0.2)
    ex = clearhead.load((made, words))
    value = ex.explain(models.TEXTS[1], "attention", target=1).target["value"]
    with torch.no_grad():
        made.classifier.bias -= value
    assert np.abs(clearhead.load((made, words)).explain(models.TEXTS[1], "lrp", target=1).scores).max() > 0


@pytest.mark.parametrize(
    ("device", "wide", "within"), [("cuda", True, 3e-2), ("cuda", False, 1e-4), ("cpu", True, 1e-4)]
)
def test_float64_may_lie_as_far_from_float32_on_a_gpu_as_tf32_does(device: str, wide: bool, within: float) -> None:
    """Pictures on an H200 were refused or not by the luck of their batch: convolutions in TF32 were held to float32."""
    subject: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    family: Any = SimpleNamespace(needs_float64=wide)
    assert _get_tolerance(subject, family) == within


def test_a_model_that_does_not_run_in_float64_is_refused() -> None:
    """XGLM makes a number of the format that torch has by default, where float64's least is too much."""
    made, words = models.text_model("bert", dtype=torch.float32)

    def least(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0 * torch.full((), torch.finfo(output.dtype).min)

    with remove_hooks_on_exit([made.bert.pooler.dense.register_forward_hook(least)]):
        ex = clearhead.load((made, words))
        (line,) = (line for line in ex.methods() if line.name == "lrp")
        assert not line.applies and "passes are in float64" in line.why_not
        said = r"does not run under relevance propagation, whose passes are in float64: RuntimeError: value"
        with pytest.raises(clearhead.UnsupportedError, match=said):
            ex.explain(models.TEXTS[0], "lrp")


def ready() -> tuple[Any, clearhead.Explainer]:
    """A model whose recorder was tested already, and its explainer."""
    made, words = models.text_model("bert", dtype=torch.float64)
    ex = clearhead.load((made, words))
    ex.explain(models.TEXTS[0], "attention")
    return made, ex


@pytest.mark.parametrize("method", ["lrp", "attn-lrp"])
def test_a_model_that_fails_under_rules_alone_says_what_failed(method: str) -> None:
    """In its own words: the format need not be the cause. It is refused from then on, without another pass."""
    made, ex = ready()
    passes = []

    def fail_under_rules(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        passes.append(1)
        if any(isinstance(mode, RuleMode) for mode in _get_current_function_mode_stack()):
            raise RuntimeError("the store is full\nof something")

    with remove_hooks_on_exit([made.bert.pooler.dense.register_forward_hook(fail_under_rules)]):
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"does not run under .*: RuntimeError: the store is full$"):
                ex.explain(models.TEXTS[0], method)
            assert len(passes) == 3  # under the rules, without them, and under them again


BY_RULES = ["lrp", "partial-lrp", "transformer-attribution", "attn-lrp", "deeplift", "deeplift-shap"]


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("the store is full"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
@pytest.mark.parametrize("method", BY_RULES)
def test_an_error_that_passes_is_raised_and_not_remembered(method: str, problem: RuntimeError) -> None:
    made, ex = ready()
    waiting = [problem]

    def fail_once(module: torch.nn.Module, args: Any) -> None:
        if waiting:
            raise waiting.pop()

    with remove_hooks_on_exit([made.bert.pooler.dense.register_forward_pre_hook(fail_once)]):
        with pytest.raises(RuntimeError) as raised:
            ex.explain(models.TEXTS[0], method)
        assert raised.value is problem
        again = ex.explain(models.TEXTS[0], method)
    assert np.array_equal(again.scores, ready()[1].explain(models.TEXTS[0], method).scores)


def test_a_model_that_always_fails_raises_its_error() -> None:
    """Also without rules: nothing is said of them, and the table of methods does not hide it."""
    made, ex = ready()

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("the store is full")

    handle = made.bert.pooler.dense.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the store is full"):
            ex.explain(models.TEXTS[0], "lrp")
    handle.remove()
    assert np.abs(ex.explain(models.TEXTS[0], "lrp").scores).max() > 0


def test_lack_of_memory_under_rules_alone_is_no_property_of_the_model() -> None:
    """Passes in float64 take more than plain ones: repeated or not, that is the machine's."""
    made, ex = ready()

    def fail_in_float64(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        if any(isinstance(mode, RuleMode) for mode in _get_current_function_mode_stack()):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")

    with (
        remove_hooks_on_exit([made.bert.pooler.dense.register_forward_hook(fail_in_float64)]),
        pytest.raises(RuntimeError, match="ALLOC_FAILED"),
    ):
        ex.explain(models.TEXTS[0], "lrp")
    assert np.abs(ex.explain(models.TEXTS[0], "lrp").scores).max() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is a GPU's")
@pytest.mark.parametrize("method", ["lrp", "partial-lrp", "transformer-attribution"])
def test_pictures_on_a_gpu_have_the_scores_of_a_cpu(method: str) -> None:
    """Convolutions run in TF32 there, unless somebody says otherwise."""
    assert torch.backends.cudnn.allow_tf32
    made, processor = models.image_model("vit", torch.float32)
    on_cpu, on_gpu = (clearhead.load((deepcopy(made).to(device), processor)) for device in ("cpu", "cuda"))
    raws = models.inputs("vit/image")
    for found, expected in zip(*(ex.explain(raws, method, target=1) for ex in (on_gpu, on_cpu)), strict=True):
        assert found.certificate["device"].startswith("cuda")
        assert replica_comparison.gap(found.scores, expected.scores) < 1e-3
