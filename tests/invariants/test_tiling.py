"""The laws hold for streaming as for the rest, and what streams is what is computed from whole maps."""

import pytest
import torch

from clearhead import InputError, Method, UnsupportedError
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.methods import METHOD_REGISTRY
from tests import models
from tests.capture.reference_kernel import WholeMaps
from tests.invariants import cases, model_snapshot


def whole(variant: Method) -> bool:
    """Whether this is said to need whole maps."""
    name, options = variant.name, dict(variant.options)
    return name == "beyond-intuition-head" and options.get("perception", "head") == "head"


def made_by(kernel: str, variant: str) -> str:
    """What makes the maps of a method, where a kernel makes sums, and layers may run twice."""
    again = ", layers computed twice"
    if variant.startswith(("attention-gradcam", "attention-gradient")):  # no sum is enough for them
        return "torch tiles" + again
    if variant.startswith(("tam", "beyond-intuition")) and "feedback='none'" not in variant:
        return " and ".join(sorted(("torch tiles", kernel))) + again  # the points on the path by tiles
    nothing_back = variant.partition("(")[0] in ("attention", "rollout") or "feedback='none'" in variant
    return kernel + ("" if nothing_back else again)


#: Every method that can be computed from tiles, with all its options.
STREAMING = [name for name in cases.METHODS if METHOD_REGISTRY[name].tile_passes]
VARIANTS = [variant for name in STREAMING for variant in cases.variants(name) if not whole(variant)]
SUBJECTS = ("bert/classify", "modernbert/classify", "beit/image")
EACH_METHOD = pytest.mark.parametrize("method", STREAMING)


def by_row(variant: Method) -> bool:
    """Whether each row that is read has a feedback of its own, so that a mean of rows, as BEiT's, needs all of them."""
    return variant.declaration.pass_type == "path" and variant.get_option("rows") is None


def streaming_variants(method: str, subject: str) -> list[Method]:
    """The variants of a method that stream on this subject."""
    variants = [variant for variant in VARIANTS if variant.name == method]
    return [variant for variant in variants if subject != "beit/image" or not by_row(variant)]


def explained(
    subject: str, method: str, kernel: str, dtype: torch.dtype = torch.float64, rows: int | None = None, size: int = 3
):
    """Every variant of a method that streams on this subject, `size` inputs in a batch."""
    ex = models.explainer(subject, dtype)
    ex.recorder.tile_rows = rows
    variants = streaming_variants(method, subject)
    per = "head" if METHOD_REGISTRY[method].declaration.has_head_contributions else None
    return ex.explain(models.inputs(subject), method=variants, kernel=kernel, per=per, batch_size=size)


def test_which_methods_stream():
    families = {"generic", "grad-sam", "attcat", "attention-gradcam", "rollout", "attention"}
    assert set(STREAMING) >= families | {"tam", "beyond-intuition-token"}


@pytest.mark.parametrize(
    ("method", "subject"),
    [(method, subject) for subject in SUBJECTS for method in STREAMING if streaming_variants(method, subject)],
)
def test_batched_and_padded_streaming_is_materialised_one_by_one(method, subject):
    streamed = explained(subject, method, "streaming", rows=3)
    alone = explained(subject, method, "materialised", size=1)
    assert streamed.keys() == alone.keys()
    for variant, found in streamed.items():
        size = max(abs(e.scores).max() for e in alone[variant])
        within = 1e-5 if cases.tolerance(subject) > 1e-9 else 1e-9
        for e, other in zip(found, alone[variant], strict=True):
            assert e.certificate["kernel"] == "streaming: torch tiles"
            assert other.certificate["kernel"] == "materialised"
            cases.assert_alike(e, other, within, size)


@EACH_METHOD
@pytest.mark.parametrize(
    ("kernel", "dtype", "within"),
    [(WholeMaps(), torch.float64, 1e-9), (CPUKernel(), torch.float32, 1e-5)],
    ids=["whole maps", "cached tiles"],
)
def test_sums_made_at_once_are_those_of_tiles(method, kernel, dtype, within):
    """Every method on a kernel that makes sums, where they are enough, is what it is on tiles."""
    raws = models.inputs("bert/classify")
    ex = models.explainer("bert/classify", dtype)
    ex.recorder.kernel, ex.recorder.tile_rows = kernel, 5
    variants = [variant for variant in VARIANTS if variant.name == method]
    per = "head" if METHOD_REGISTRY[method].declaration.has_head_contributions else None
    found = ex.explain(raws, method=variants, kernel="streaming", checkpoint=True, per=per)
    expected = ex.explain(raws, method=variants, kernel="materialised", per=per)
    for variant, parts in expected.items():
        size = max(abs(e.scores).max() for e in parts)
        for e, other in zip(found[variant], parts, strict=True):
            assert e.certificate["kernel"] == f"streaming: {made_by(kernel.name, variant)}"
            cases.assert_alike(e, other, within, size)


@EACH_METHOD
def test_in_float32(method):
    streamed = explained("bert/classify", method, "streaming", torch.float32, rows=5)
    expected = explained("bert/classify", method, "materialised", torch.float32)
    for variant, found in streamed.items():
        size = max(abs(e.scores).max() for e in expected[variant])
        for e, other in zip(found, expected[variant], strict=True):
            cases.assert_alike(e, other, 1e-5, size)


def test_the_same_bytes_and_an_untouched_model():
    ex = models.explainer("bert/classify")
    ex.recorder.tile_rows = 4
    before = model_snapshot.of_model(ex.adapter.model)
    raws = models.inputs("bert/classify")
    ways = [ex.explain(raws, method=VARIANTS, kernel="streaming", checkpoint=twice) for twice in (False, False, True)]
    assert model_snapshot.of_model(ex.adapter.model) == before
    for variant in ways[0]:
        for e, *others in zip(*(way[variant] for way in ways), strict=True):
            assert all(other.scores.tobytes() == e.scores.tobytes() for other in others)


def test_an_untouched_model_after_an_error():
    """A target that raises on the way back, and one that raises before it."""
    ex = models.explainer("bert/classify")
    ex.explain("So boring!")
    before = model_snapshot.of_model(ex.adapter.model)

    def raising(output):
        output.logits.register_hook(lambda gradient: 1 / 0)
        return output.logits[:, 0]

    for target in (raising, lambda output: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            ex.explain("So boring!", target=target, kernel="streaming", checkpoint=True)
        assert model_snapshot.of_model(ex.adapter.model) == before


def test_what_cannot_stream_says_so():
    ex = models.explainer("bert/classify")
    with pytest.raises(UnsupportedError, match="flow cannot be computed tile by tile"):
        ex.explain("So boring!", method="flow", kernel="streaming")
    with pytest.raises(UnsupportedError, match="tam cannot be computed tile by tile"):
        models.explainer("beit/image").explain(models.inputs("beit/image")[0], method="tam", kernel="streaming")
    with pytest.raises(UnsupportedError, match="ignores transformers' attention interface"):
        models.explainer("deberta/classify").explain("So boring!", kernel="streaming")
    with pytest.raises(InputError, match="unknown kernel 'flash'"):
        ex.explain("So boring!", kernel="flash")
    with pytest.raises(InputError, match="checkpoint='no' is not valid: pass True or False"):
        ex.explain("So boring!", checkpoint="no")


def test_layers_computed_again_are_a_streaming_pass():
    """Who asks for them gets them, also where whole maps would be chosen, or hears why not."""
    found = models.explainer("bert/classify").explain("So boring!", ["generic", "flow"], checkpoint=True)
    assert found["generic"].certificate["kernel"] == "streaming: torch tiles, layers computed twice"
    assert found["flow"].certificate["kernel"] == "materialised"  # it needs whole maps
    with pytest.raises(UnsupportedError, match="ignores transformers' attention interface"):
        models.explainer("deberta/classify").explain("So boring!", checkpoint=True)


def test_the_kernel_follows_the_length(monkeypatch):
    monkeypatch.setattr("clearhead.engine.attention_mode.MAX_FULL_LENGTH", 8)
    ex = models.explainer("bert/classify")
    short, long = "So boring!", "She hates the book because it isn't good"
    found = ex.explain([short, long], method=["generic", "flow", Method("saliency")], batch_size=1)
    kernels = {name: [e.certificate["kernel"] for e in part] for name, part in found.items()}
    assert kernels["generic"] == ["materialised", "streaming: torch tiles"]
    assert kernels["flow"] == ["materialised"] * 2
    whole = ex.explain([short, long], kernel="materialised", batch_size=1)
    for e, other in zip(found["generic"], whole, strict=True):
        cases.assert_alike(e, other, 1e-9)
    monkeypatch.setattr("clearhead.engine.attention_mode.MAX_FULL_LENGTH", 100)
    monkeypatch.setattr("clearhead.engine.attention_mode.MIN_REDUCED_LENGTH", 8)
    ex.recorder.kernel = WholeMaps()  # sums made at once are faster at lengths where tiles are not
    assert ex.explain(long).certificate["kernel"] == "streaming: whole maps"
    assert ex.explain(long, method=["generic", "flow"])["generic"].certificate["kernel"] == "materialised"
