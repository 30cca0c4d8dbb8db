"""Law 1: batched = single; padded = unpadded; the order of a batch does not matter."""

import pytest
import torch

import clearhead
from clearhead.methods.base import layer_range
from tests import models
from tests.laws import cases

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
#: Methods that take words and sentences together: model inputs alone do not say where these begin and end.
BY_TEXT = ("shap",)
#: Where methods do not apply they refuse, which test_batched_is_single checks.
APPLYING = [
    (subject, method) for subject in cases.SUBJECTS for method in cases.METHODS if cases.applies(method, subject)
]
EVERYWHERE = [pytest.mark.parametrize("method", cases.METHODS), pytest.mark.parametrize("subject", cases.SUBJECTS)]


def everywhere(test):
    """Every method on every subject."""
    for mark in EVERYWHERE:
        test = mark(test)
    return test


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_padding_is_really_tested(subject):
    """The inputs differ in length, and the model's own logits do not depend on padding: so the law may be asked."""
    ex = cases.explainer(subject)
    raws = models.inputs(subject)
    lengths = [len(e) for e in cases.single(subject)["position"]]
    assert max(lengths) > min(lengths) + 2
    batch = cases.collated(ex, raws)
    with torch.no_grad():
        padded = ex.subject.model(**batch).logits
        for i, raw in enumerate(raws):
            alone = ex.subject.model(**cases.collated(ex, [raw])).logits[0]
            together = padded[i] if subject.endswith("classify") else padded[i, : lengths[i]]
            assert cases.gap(together, alone) <= cases.tolerance(subject)


@everywhere
@DTYPES
def test_batched_is_single(method, subject, dtype):
    if not cases.applies(method, subject):
        cases.refusal_of(method, subject)
        return
    batched = cases.batched(subject, dtype)
    cases.assert_all_alike({str(variant): batched[str(variant)] for variant in cases.variants(method)}, subject, dtype)


@pytest.mark.parametrize("subject", cases.SUBJECTS)
@pytest.mark.parametrize(("order", "size"), [((2, 1, 0), 3), ((1, 2, 0), 2)], ids=str)
def test_order_of_a_batch_does_not_matter(subject, order, size):
    """Turned round all together, and shifted by one in pairs: what stands beside an input is another one."""
    raws = models.inputs(subject)
    got = cases.explainer(subject).explain([raws[i] for i in order], **cases.everything(subject), batch_size=size)
    cases.assert_all_alike({name: [part[order.index(i)] for i in range(3)] for name, part in got.items()}, subject)


@pytest.mark.parametrize("subject", cases.SUBJECTS)
@pytest.mark.parametrize("count", [2, 9])
def test_the_same_input_many_times_gets_the_same_scores(subject, count):
    """Samples of a batch never mix: copies in one batch, padded by a longer neighbour, all agree with one alone."""
    short, long = models.inputs(subject)[2], models.inputs(subject)[1]
    got = cases.explainer(subject).explain([short] * count + [long], **cases.everything(subject))
    expected = cases.single(subject)
    for variant, explanations in got.items():
        for e in explanations[:-1]:
            within = cases.allowed(e.provenance["method"], subject)
            cases.assert_alike(e, expected[variant][2], within, cases.size(e, expected))


@pytest.mark.parametrize("subject", cases.SUBJECTS)
@pytest.mark.parametrize("extra", [0, 1, 6])
def test_model_inputs_with_more_padding(subject, extra):
    """A mapping of model inputs, padded further than need be, is explained as the raw inputs are."""
    given = cases.model_inputs(subject, extra)
    got = cases.explainer(subject).explain(given, **cases.everything(subject, without=BY_TEXT))
    cases.assert_all_alike(got, subject)


@pytest.mark.parametrize("subject", cases.SUBJECTS)
def test_one_model_input_without_a_processor(subject):
    """The model alone, model inputs as they are: the same scores, units numbered."""
    bare = clearhead.load(cases.explainer(subject).subject.model)
    if not subject.endswith("/image"):  # the mask to be filled, or to stand where a word is absent
        bare.subject.mask = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token_id
    given = {name: part[:1] for name, part in cases.model_inputs(subject, 3).items()}
    got = bare.explain(given, **cases.everything(subject, without=BY_TEXT))
    expected = cases.single(subject)
    for variant, e in got.items():
        found = cases.gap(e.scores, expected[variant][0].scores, cases.size(e, expected))
        assert found <= cases.allowed(e.provenance["method"], subject), variant


@pytest.mark.parametrize("subject", [s for s in cases.TEXT_SUBJECTS if s.endswith("classify")])
def test_embeddings_given_with_padding(subject):
    """Word vectors in place of words: what the mask hides at the end is padding, too."""
    ex = cases.explainer(subject)
    given = cases.model_inputs(subject, 4)
    lookup = ex.subject.model.get_input_embeddings()
    with torch.no_grad():
        vectors = lookup(given["input_ids"])
    one = {"inputs_embeds": vectors[2:], "attention_mask": given["attention_mask"][2:]}
    length = int(one["attention_mask"].sum())
    cut = {"inputs_embeds": vectors[2:, :length], "attention_mask": one["attention_mask"][:, :length]}
    methods = [method for method in cases.METHODS if method != "random" and cases.applies(method, subject)]
    padded, plain = ex.explain(one, method=methods), ex.explain(cut, method=methods)
    for method in methods:
        assert len(padded[method]) == length
        cases.assert_alike(padded[method], plain[method], cases.allowed(method, subject))


@pytest.mark.parametrize(("subject", "method"), APPLYING)
def test_parts_are_there_where_they_are_declared(subject, method):
    """rows="all" gives a matrix, per="head" heads where a method has them; so the law above was asked of them."""
    declaration = cases.REGISTRY[method].declaration
    by_variant = {variant: cases.single(subject)[str(variant)][0] for variant in cases.variants(method)}
    cases.batched(subject)  # so that the recorder was tested, whichever test comes first
    for variant, e in by_variant.items():
        layers = variant.option("layers", declaration.layers)
        depth = len(layer_range(layers, cases.explainer(subject, torch.float64).recorder.tested.calls))
        assert (e.matrix is not None) == (variant.option("rows") == "all")
        if e.matrix is not None:
            assert e.matrix.shape == (len(e), len(e))
        if declaration.parts and e.matrix is None and variant.option("depths", True):
            assert e.per_layer is not None and e.per_layer.shape == (depth, len(e))
        wants_heads = declaration.has_head_shares and variant.option("rows") is None
        if wants_heads and declaration.parts == "contributions" and e.matrix is None:
            assert e.per_head is not None and e.per_head.shape[::2] == (depth, len(e))
