"""The invariants hold for streaming passes, and streaming scores equal materialised ones."""

import pytest
import torch

from clearhead import InputError, Method, UnsupportedError
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.methods import METHOD_REGISTRY, PassType
from tests import models
from tests.capture.reference_kernel import WholeMaps
from tests.invariants import cases, model_snapshot


def needs_materialised_maps(variant: Method) -> bool:
    """Whether the variant is documented to need materialised maps."""
    name, options = variant.name, dict(variant.options)
    return name == "beyond-intuition-head" and options.get("perception", "head") == "head"


def expected_kernel(kernel: str, variant: str) -> str:
    """The expected kernel of a method, with a reducing kernel and activation checkpointing."""
    checkpointed = ", layers computed twice"
    if variant.startswith(("attention-gradcam", "attention-gradient")):  # they need the maps
        return "torch tiles" + checkpointed
    if variant.startswith(("tam", "beyond-intuition")) and "feedback='none'" not in variant:
        return " and ".join(sorted(("torch tiles", kernel))) + checkpointed  # tiles for the points on the path
    needs_no_backward = variant.partition("(")[0] in ("attention", "rollout") or "feedback='none'" in variant
    return kernel + ("" if needs_no_backward else checkpointed)


#: Every method that can be computed from tiles, with all its options.
STREAMING = [name for name in cases.METHODS if METHOD_REGISTRY[name].tile_passes]
VARIANTS = [variant for name in STREAMING for variant in cases.variants(name) if not needs_materialised_maps(variant)]
SUBJECTS = ("bert/classify", "modernbert/classify", "beit/image")
EACH_METHOD = pytest.mark.parametrize("method", STREAMING)


def needs_feedback_per_row(variant: Method) -> bool:
    """Whether each read-out row needs its own feedback, so that BEiT's mean of rows needs all of them."""
    return variant.declaration.pass_type is PassType.PATH and variant.get_option("rows") is None


def streaming_variants(method: str, subject: str) -> list[Method]:
    """The variants of a method that stream on this subject."""
    variants = [variant for variant in VARIANTS if variant.name == method]
    return [variant for variant in variants if subject != "beit/image" or not needs_feedback_per_row(variant)]


def explain_variants(
    subject: str, method: str, kernel: str, dtype: torch.dtype = torch.float64, rows: int | None = None, size: int = 3
):
    """Every variant of a method that streams on this subject, `size` inputs in a batch."""
    ex = models.explainer(subject, dtype)
    ex.recorder.tile_rows = rows
    variants = streaming_variants(method, subject)
    per = "head" if METHOD_REGISTRY[method].declaration.has_head_contributions else None
    return ex.explain(models.inputs(subject), method=variants, kernel=kernel, per=per, batch_size=size)


def test_expected_methods_stream():
    families = {"generic", "grad-sam", "attcat", "attention-gradcam", "rollout", "attention"}
    assert set(STREAMING) >= families | {"tam", "beyond-intuition-token"}


@pytest.mark.parametrize(
    ("method", "subject"),
    [(method, subject) for subject in SUBJECTS for method in STREAMING if streaming_variants(method, subject)],
)
def test_batched_streaming_equals_single_materialised(method, subject):
    streamed = explain_variants(subject, method, "streaming", rows=3)
    single = explain_variants(subject, method, "materialised", size=1)
    assert streamed.keys() == single.keys()
    for variant, explanations in streamed.items():
        size = max(abs(explanation.scores).max() for explanation in single[variant])
        tolerance = 1e-5 if cases.tolerance(subject) > 1e-9 else 1e-9
        for explanation, reference in zip(explanations, single[variant], strict=True):
            assert explanation.certificate["kernel"] == "streaming: torch tiles"
            assert reference.certificate["kernel"] == "materialised"
            cases.assert_alike(explanation, reference, tolerance, size)


@EACH_METHOD
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [(WholeMaps(), torch.float64, 1e-9), (CPUKernel(), torch.float32, 1e-5)],
    ids=["whole maps", "cached tiles"],
)
def test_reducing_kernels_equal_materialised(method, kernel, dtype, tolerance):
    """Methods on a kernel that computes reductions, where these are enough, give the materialised scores."""
    raws = models.inputs("bert/classify")
    ex = models.explainer("bert/classify", dtype)
    ex.recorder.kernel, ex.recorder.tile_rows = kernel, 5
    variants = [variant for variant in VARIANTS if variant.name == method]
    per = "head" if METHOD_REGISTRY[method].declaration.has_head_contributions else None
    actual = ex.explain(raws, method=variants, kernel="streaming", checkpoint=True, per=per)
    expected = ex.explain(raws, method=variants, kernel="materialised", per=per)
    for variant, references in expected.items():
        size = max(abs(e.scores).max() for e in references)
        for e, reference in zip(actual[variant], references, strict=True):
            assert e.certificate["kernel"] == f"streaming: {expected_kernel(kernel.name, variant)}"
            cases.assert_alike(e, reference, tolerance, size)


@EACH_METHOD
def test_float32_streaming_equals_materialised(method):
    streamed = explain_variants("bert/classify", method, "streaming", torch.float32, rows=5)
    expected = explain_variants("bert/classify", method, "materialised", torch.float32)
    for variant, explanations in streamed.items():
        size = max(abs(e.scores).max() for e in expected[variant])
        for e, reference in zip(explanations, expected[variant], strict=True):
            cases.assert_alike(e, reference, 1e-5, size)


def test_streaming_is_deterministic_and_leaves_model_unchanged():
    ex = models.explainer("bert/classify")
    ex.recorder.tile_rows = 4
    before = model_snapshot.of_model(ex.adapter.model)
    raws = models.inputs("bert/classify")
    runs = [
        ex.explain(raws, method=VARIANTS, kernel="streaming", checkpoint=checkpoint)
        for checkpoint in (False, False, True)
    ]
    assert model_snapshot.of_model(ex.adapter.model) == before
    for variant in runs[0]:
        for e, *repeats in zip(*(run[variant] for run in runs), strict=True):
            assert all(repeat.scores.tobytes() == e.scores.tobytes() for repeat in repeats)


def test_model_is_unchanged_after_streaming_target_raises():
    """A target that raises in the backward pass, and one that raises in the forward pass."""
    ex = models.explainer("bert/classify")
    ex.explain("So boring!", method="generic")
    before = model_snapshot.of_model(ex.adapter.model)

    def raise_in_backward(output):
        output.logits.register_hook(lambda gradient: 1 / 0)
        return output.logits[:, 0]

    for target in (raise_in_backward, lambda output: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            ex.explain("So boring!", target=target, kernel="streaming", checkpoint=True, method="generic")
        assert model_snapshot.of_model(ex.adapter.model) == before


def test_unsupported_streaming_raises_with_reason():
    ex = models.explainer("bert/classify")
    with pytest.raises(UnsupportedError, match="flow cannot be computed tile by tile"):
        ex.explain("So boring!", method="flow", kernel="streaming")
    with pytest.raises(UnsupportedError, match="tam cannot be computed tile by tile"):
        models.explainer("beit/image").explain(models.inputs("beit/image")[0], method="tam", kernel="streaming")
    with pytest.raises(UnsupportedError, match="ignores transformers' attention interface"):
        models.explainer("deberta/classify").explain("So boring!", kernel="streaming", method="generic")
    with pytest.raises(InputError, match="unknown kernel 'flash'"):
        ex.explain("So boring!", kernel="flash", method="generic")
    with pytest.raises(InputError, match="checkpoint='no' is not valid: pass True or False"):
        ex.explain("So boring!", checkpoint="no", method="generic")


def test_checkpointing_selects_streaming_kernel():
    """checkpoint=True selects streaming also for short inputs, or raises if that is unsupported."""
    ex = models.explainer("bert/classify")
    streamed = ex.explain("So boring!", "generic", checkpoint=True)
    assert streamed.certificate["kernel"] == "streaming: torch tiles, layers computed twice"
    shared = ex.explain("So boring!", ["generic", "flow"], checkpoint=True)  # flow needs maps, and the pass is shared
    assert {e.certificate["kernel"] for e in shared.values()} == {"materialised"}
    with pytest.raises(UnsupportedError, match="ignores transformers' attention interface"):
        models.explainer("deberta/classify").explain("So boring!", checkpoint=True, method="generic")


def test_default_kernel_depends_on_input_length(monkeypatch):
    monkeypatch.setattr("clearhead.engine.attention_mode.MAX_FULL_LENGTH", 8)
    ex = models.explainer("bert/classify")
    short, long = "So boring!", "She hates the book because it isn't good"
    explanations = ex.explain([short, long], method=["generic", Method("saliency")], batch_size=1)
    kernels = {name: [e.certificate["kernel"] for e in results] for name, results in explanations.items()}
    assert kernels["generic"] == kernels["saliency"] == ["materialised", "streaming: torch tiles"]
    assert ex.explain(long, method=["generic", "flow"])["generic"].certificate["kernel"] == "materialised"
    materialised = ex.explain([short, long], kernel="materialised", batch_size=1, method="generic")
    for e, reference in zip(explanations["generic"], materialised, strict=True):
        cases.assert_alike(e, reference, 1e-9)
    monkeypatch.setattr("clearhead.engine.attention_mode.MAX_FULL_LENGTH", 100)
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex.recorder.kernel = WholeMaps()  # reductions are faster than maps at lengths where tiles are not
    assert ex.explain(long, method="generic").certificate["kernel"] == "streaming: whole maps"
    assert ex.explain(long, method=["generic", "flow"])["generic"].certificate["kernel"] == "materialised"
