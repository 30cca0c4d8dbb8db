"""Invariant 1: batched = single; padded = unpadded; the order of a batch does not matter."""

from functools import cache

import pytest
import torch

import clearhead
from clearhead.methods.base import resolve_layer_range
from tests import models
from tests.invariants import cases

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
#: Methods that group tokens into words and sentences, whose boundaries model inputs do not contain.
BY_TEXT = ("shap",)
#: Every method on every supported subject; test_batched_equals_single checks that others raise.
APPLYING = [(method, subject) for subject in cases.SUBJECTS for method in cases.applying(subject)]
CLASSIFIERS = [subject for subject in cases.TEXT_SUBJECTS if subject.endswith("classify")]


def parametrize_pairs(pairs):
    """Parametrises a test by pairs of method and subject."""
    return pytest.mark.parametrize(("method", "subject"), pairs)


@cache
def model_inputs(subject, extra):
    return cases.model_inputs(subject, extra)


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_inputs_differ_in_length_and_logits_ignore_padding(subject):
    """The precondition of this file: inputs differ in length, and the model's logits do not depend on padding."""
    ex = cases.explainer(subject)
    raws = models.inputs(subject)
    lengths = [len(e) for e in cases.single(subject, "position")["position"]]
    assert max(lengths) > min(lengths) + 2
    batch = cases.collated(ex, raws)
    with torch.no_grad():
        padded = ex.adapter.model(**batch).logits
        for i, raw in enumerate(raws):
            single = ex.adapter.model(**cases.collated(ex, [raw])).logits[0]
            batched = padded[i] if subject.endswith("classify") else padded[i, : lengths[i]]
            assert cases.gap(batched, single) <= cases.tolerance(subject)


@parametrize_pairs([(method, subject) for subject in cases.SUBJECTS for method in cases.METHODS])
@DTYPES
def test_batched_equals_single(method, subject, dtype):
    if cases.applies(method, subject):
        cases.assert_all_alike(cases.batched(subject, method, dtype), subject, dtype)
    else:
        cases.unsupported_reason(method, subject)


@parametrize_pairs(APPLYING)
def test_scores_do_not_depend_on_batch_order(method, subject):
    """Reversed in one batch, and rotated in batches of two, so that each input has other neighbours."""
    raws, arguments = models.inputs(subject), cases.explain_arguments(subject, [method])
    for order, size in (((2, 1, 0), 3), ((1, 2, 0), 2)):
        results = cases.explainer(subject).explain([raws[i] for i in order], **arguments, batch_size=size)
        restored = {
            variant: [explanations[order.index(i)] for i in range(3)] for variant, explanations in results.items()
        }
        cases.assert_all_alike(restored, subject)


@parametrize_pairs(APPLYING)
def test_copies_in_one_batch_get_the_same_scores(method, subject):
    """Samples do not mix: copies in one batch, padded by a longer neighbour, equal a single input."""
    short, long = models.inputs(subject)[2], models.inputs(subject)[1]
    tolerance, expected = cases.method_tolerance(method, subject), cases.single(subject, method)
    for count in (2, 9):
        batch = [short] * count + [long]
        results = cases.explainer(subject).explain(batch, **cases.explain_arguments(subject, [method]))
        for variant, explanations in results.items():
            for e in explanations[:-1]:
                cases.assert_alike(e, expected[variant][2], tolerance, cases.size(expected))


@parametrize_pairs([(method, subject) for method, subject in APPLYING if method not in BY_TEXT])
def test_extra_padding_of_model_inputs_preserves_scores(method, subject):
    """A mapping of model inputs with extra padding gives the scores of the raw inputs."""
    for extra in (0, 1, 6):
        inputs = model_inputs(subject, extra)
        results = cases.explainer(subject).explain(inputs, **cases.explain_arguments(subject, [method]))
        cases.assert_all_alike(results, subject)


@cache
def without_processor(subject):
    """An explainer of the model alone."""
    ex = clearhead.load(cases.explainer(subject).adapter.model)
    if not subject.endswith("/image"):  # the mask to be filled, or the replacement of masked tokens
        ex.adapter.mask_token_id = models.tokenizer(models.TEXT[subject.split("/")[0]][1]).mask_token_id
    return ex


@parametrize_pairs([(method, subject) for method, subject in APPLYING if method not in BY_TEXT])
def test_model_inputs_without_processor_give_the_same_scores(method, subject):
    """The same scores, with numbered units."""
    inputs = {name: tensor[:1] for name, tensor in model_inputs(subject, 3).items()}
    results = without_processor(subject).explain(inputs, **cases.explain_arguments(subject, [method]))
    expected = cases.single(subject, method)
    for variant, e in results.items():
        difference = cases.gap(e.scores, expected[variant][0].scores, cases.size(expected))
        assert difference <= cases.method_tolerance(method, subject), variant


@parametrize_pairs([(method, subject) for method, subject in APPLYING if subject in CLASSIFIERS and method != "random"])
def test_padded_embeddings_equal_unpadded(method, subject):
    """Token embeddings in place of token ids: what the mask hides at the end counts as padding."""
    ex = cases.explainer(subject)
    batch = model_inputs(subject, 4)
    lookup = ex.adapter.model.get_input_embeddings()
    with torch.no_grad():
        embeddings = lookup(batch["input_ids"])
    padded_inputs = {"inputs_embeds": embeddings[2:], "attention_mask": batch["attention_mask"][2:]}
    length = int(padded_inputs["attention_mask"].sum())
    unpadded_inputs = {
        "inputs_embeds": embeddings[2:, :length],
        "attention_mask": padded_inputs["attention_mask"][:, :length],
    }
    padded, plain = (
        ex.explain(inputs, method=cases.with_few([method])[0]) for inputs in (padded_inputs, unpadded_inputs)
    )
    assert len(padded) == length
    cases.assert_alike(padded, plain, cases.method_tolerance(method, subject))


@parametrize_pairs(APPLYING)
def test_matrix_layer_and_head_scores_exist_where_declared(method, subject):
    """rows="all" gives a matrix and per="head" per-head scores where declared, so the tests above cover them."""
    declaration = cases.METHOD_REGISTRY[method].declaration
    for variant in cases.variants(method):
        e = cases.single(subject, method)[str(variant)][0]
        layers = variant.get_option("layers", declaration.layers)
        num_layers = len(resolve_layer_range(layers, cases.explainer(subject).recorder.self_test.num_calls))
        assert (e.matrix is not None) == (variant.get_option("rows") == "all")
        if e.matrix is not None:
            assert e.matrix.shape == (len(e), len(e))
        if declaration.layer_scores and e.matrix is None and variant.get_option("depths", True):
            assert e.per_layer is not None and e.per_layer.shape == (num_layers, len(e))
        wants_heads = declaration.has_head_contributions and variant.get_option("rows") is None
        if wants_heads and declaration.layer_scores == "contributions" and e.matrix is None:
            assert e.per_head is not None and e.per_head.shape[::2] == (num_layers, len(e))
