"""Law 1: batched = single; padded = unpadded; the order of a batch does not matter."""

from functools import cache

import pytest
import torch

import clearhead
from clearhead.methods.base import resolve_layer_range
from tests import models
from tests.invariants import cases

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
#: Methods that take words and sentences together: model inputs alone do not say where these begin and end.
BY_TEXT = ("shap",)
#: Every method on every subject where it must work; elsewhere it refuses, which test_batched_is_single checks.
APPLYING = [(method, subject) for subject in cases.SUBJECTS for method in cases.applying(subject)]
CLASSIFIERS = [subject for subject in cases.TEXT_SUBJECTS if subject.endswith("classify")]


def on_pairs(pairs):
    """Parametrises a test by pairs of method and subject."""
    return pytest.mark.parametrize(("method", "subject"), pairs)


@cache
def model_inputs(subject, extra):
    return cases.model_inputs(subject, extra)


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_padding_is_really_tested(subject):
    """The inputs differ in length, and the model's own logits do not depend on padding: so the law may be asked."""
    ex = cases.explainer(subject)
    raws = models.inputs(subject)
    lengths = [len(e) for e in cases.single(subject, "position")["position"]]
    assert max(lengths) > min(lengths) + 2
    batch = cases.collated(ex, raws)
    with torch.no_grad():
        padded = ex.adapter.model(**batch).logits
        for i, raw in enumerate(raws):
            alone = ex.adapter.model(**cases.collated(ex, [raw])).logits[0]
            together = padded[i] if subject.endswith("classify") else padded[i, : lengths[i]]
            assert cases.gap(together, alone) <= cases.tolerance(subject)


@on_pairs([(method, subject) for subject in cases.SUBJECTS for method in cases.METHODS])
@DTYPES
def test_batched_is_single(method, subject, dtype):
    if cases.applies(method, subject):
        cases.assert_all_alike(cases.batched(subject, method, dtype), subject, dtype)
    else:
        cases.refusal_of(method, subject)


@on_pairs(APPLYING)
def test_order_of_a_batch_does_not_matter(method, subject):
    """Turned round all together, and shifted by one in pairs: what stands beside an input is another one."""
    raws, arguments = models.inputs(subject), cases.explain_arguments(subject, [method])
    for order, size in (((2, 1, 0), 3), ((1, 2, 0), 2)):
        got = cases.explainer(subject).explain([raws[i] for i in order], **arguments, batch_size=size)
        restored = {variant: [explanations[order.index(i)] for i in range(3)] for variant, explanations in got.items()}
        cases.assert_all_alike(restored, subject)


@on_pairs(APPLYING)
def test_the_same_input_many_times_gets_the_same_scores(method, subject):
    """Samples of a batch never mix: copies in one batch, padded by a longer neighbour, all agree with one alone."""
    short, long = models.inputs(subject)[2], models.inputs(subject)[1]
    within, expected = cases.allowed(method, subject), cases.single(subject, method)
    for count in (2, 9):
        batch = [short] * count + [long]
        got = cases.explainer(subject).explain(batch, **cases.explain_arguments(subject, [method]))
        for variant, explanations in got.items():
            for e in explanations[:-1]:
                cases.assert_alike(e, expected[variant][2], within, cases.size(expected))


@on_pairs([(method, subject) for method, subject in APPLYING if method not in BY_TEXT])
def test_model_inputs_with_more_padding(method, subject):
    """A mapping of model inputs, padded further than need be, is explained as the raw inputs are."""
    for extra in (0, 1, 6):
        given = model_inputs(subject, extra)
        got = cases.explainer(subject).explain(given, **cases.explain_arguments(subject, [method]))
        cases.assert_all_alike(got, subject)


@cache
def without_processor(subject):
    """An explainer of the model alone."""
    ex = clearhead.load(cases.explainer(subject).adapter.model)
    if not subject.endswith("/image"):  # the mask to be filled, or to stand where a word is absent
        ex.adapter.mask_token_id = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token_id
    return ex


@on_pairs([(method, subject) for method, subject in APPLYING if method not in BY_TEXT])
def test_one_model_input_without_a_processor(method, subject):
    """The model alone, model inputs as they are: the same scores, units numbered."""
    given = {name: tensor[:1] for name, tensor in model_inputs(subject, 3).items()}
    got = without_processor(subject).explain(given, **cases.explain_arguments(subject, [method]))
    expected = cases.single(subject, method)
    for variant, e in got.items():
        difference = cases.gap(e.scores, expected[variant][0].scores, cases.size(expected))
        assert difference <= cases.allowed(method, subject), variant


@on_pairs([(method, subject) for method, subject in APPLYING if subject in CLASSIFIERS and method != "random"])
def test_embeddings_given_with_padding(method, subject):
    """Word vectors in place of words: what the mask hides at the end is padding, too."""
    ex = cases.explainer(subject)
    given = model_inputs(subject, 4)
    lookup = ex.adapter.model.get_input_embeddings()
    with torch.no_grad():
        vectors = lookup(given["input_ids"])
    one = {"inputs_embeds": vectors[2:], "attention_mask": given["attention_mask"][2:]}
    length = int(one["attention_mask"].sum())
    cut = {"inputs_embeds": vectors[2:, :length], "attention_mask": one["attention_mask"][:, :length]}
    padded, plain = (ex.explain(inputs, method=cases.with_few([method])[0]) for inputs in (one, cut))
    assert len(padded) == length
    cases.assert_alike(padded, plain, cases.allowed(method, subject))


@on_pairs(APPLYING)
def test_parts_are_there_where_they_are_declared(method, subject):
    """rows="all" gives a matrix, per="head" heads where a method has them; so the law above was asked of them."""
    declaration = cases.METHOD_REGISTRY[method].declaration
    for variant in cases.variants(method):
        e = cases.single(subject, method)[str(variant)][0]
        layers = variant.get_option("layers", declaration.layers)
        depth = len(resolve_layer_range(layers, cases.explainer(subject).recorder.self_test.num_calls))
        assert (e.matrix is not None) == (variant.get_option("rows") == "all")
        if e.matrix is not None:
            assert e.matrix.shape == (len(e), len(e))
        if declaration.layer_scores and e.matrix is None and variant.get_option("depths", True):
            assert e.per_layer is not None and e.per_layer.shape == (depth, len(e))
        wants_heads = declaration.has_head_contributions and variant.get_option("rows") is None
        if wants_heads and declaration.layer_scores == "contributions" and e.matrix is None:
            assert e.per_head is not None and e.per_head.shape[::2] == (depth, len(e))
