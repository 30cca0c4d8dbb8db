"""Invariant 5: declared properties of methods hold, on analytic models with known scores and on random models."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import clearhead
from clearhead.methods import METHOD_REGISTRY, PassType
from tests import models
from tests.invariants import cases
from tests.methods import coalition_values

# Analytic models ------------------------------------------------------------------------------------------------------


@cache
def uniform(kind):
    """A model with uniform attention: the weights of queries and keys are zero."""
    model, processor = models.text_model("bert") if kind == "text" else models.image_model("vit")
    for name, module in model.named_modules():
        if name.endswith(("query", "key", "q_proj", "k_proj")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return clearhead.load(model, processor)


@cache
def linear(kind):
    """A model that is linear in its input: uniform attention, no norms, no non-linearity."""
    ex = uniform(kind)
    model, processor = ex.adapter.model, ex.adapter.processor
    if kind == "text":
        model, processor = models.text_model("bert", hidden_act="linear")
    else:
        model, processor = models.image_model("vit", hidden_act="linear")
    model.load_state_dict(ex.adapter.model.state_dict())
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm | nn.Tanh):
                setattr(module, name, nn.Identity())
    return clearhead.load(model, processor)


def raw_inputs(kind):
    return models.inputs("bert/classify" if kind == "text" else "vit/image")


def target_without_unit(kind, ex, raw, unit):
    """The target's value if one unit's input vector is zero (all of them if `unit` is None)."""
    model, batch = ex.adapter.model, cases.collated(ex, [raw])
    label = ex.explain(raw, method="saliency").target["index"]
    with torch.no_grad():
        if kind == "text":
            embeddings = model.get_input_embeddings()(batch.pop("input_ids"))
            embeddings[:, slice(None) if unit is None else unit] = 0
            return float(model(inputs_embeds=embeddings, **batch).logits[0, label])
        pixels, size = batch["pixel_values"].clone(), model.config.patch_size
        if unit is None:
            pixels.zero_()
        elif unit > 0:  # the class token has no pixels
            row, column = divmod(unit - 1, pixels.shape[3] // size)
            pixels[:, :, row * size : (row + 1) * size, column * size : (column + 1) * size] = 0
        return float(model(pixel_values=pixels).logits[0, label])


# Declared axioms ------------------------------------------------------------------------------------------------------


def rows_sum_to_one(method):
    for subject in cases.SUBJECTS:
        if not cases.applies(method, subject):
            continue
        tolerance = 1e-6 if cases.tolerance(subject) > 1e-9 else 1e-12  # a softmax in float32 sums to one in float32
        for variant in cases.variants(method):
            for e in cases.batched(subject, method)[str(variant)]:
                if e.matrix is not None:
                    assert np.abs(e.matrix.sum(1) - 1).max() <= tolerance
                else:
                    assert abs(e.scores.sum() - 1) <= tolerance
                assert e.scores.min() >= 0
    for kind in ("text", "image"):
        # With uniform attention U in all of L layers: ((I + U)/2)^L = I/2^L + (1 − 1/2^L) U, and E_h A = U.
        for e in uniform(kind).explain(raw_inputs(kind), method=method):
            uniform_scores, first = np.full(len(e), 1 / len(e)), np.eye(len(e))[0]
            num_layers = uniform(kind).recorder.self_test.num_calls
            expected = {
                "attention": uniform_scores,
                "rollout": first / 2**num_layers + (1 - 1 / 2**num_layers) * uniform_scores,
            }
            if method in expected:
                assert cases.gap(e.scores, expected[method]) <= 1e-6


def exact_on_linear_models(method):
    """Each score is the loss of the target without the unit, and scores sum to the loss without all units."""
    for kind in ("text", "image"):
        ex = linear(kind)
        for e, raw in zip(ex.explain(raw_inputs(kind), method=method), raw_inputs(kind), strict=True):
            full = e.target["value"]
            losses = np.array([full - target_without_unit(kind, ex, raw, unit) for unit in range(len(e))])
            assert np.abs(losses).max() > 1e-3, "the model is trivial"
            assert cases.gap(e.scores, losses) <= (1e-9 if kind == "text" else 1e-6)
            assert abs(e.scores.sum() - (full - target_without_unit(kind, ex, raw, None))) <= 1e-6 * np.abs(
                losses
            ).max() * len(e)


def complete(method):
    """The scores sum to the target's value minus the base value."""
    for kind in ("text", "image"):
        for e in linear(kind).explain(raw_inputs(kind), method=method):
            assert np.abs(e.scores).max() > 1e-3, "the model is trivial"
            missing = abs(e.base_value + e.scores.sum() - e.target["value"])
            assert missing <= (1e-9 if kind == "text" else 1e-6) * np.abs(e.scores).max()
    for e in cases.explainer("bert/classify").explain(models.inputs("bert/classify"), method=method):
        assert abs(e.base_value + e.scores.sum() - e.target["value"]) <= 1e-6


def complete_in_the_limit(method):
    """Complete on linear models, and elsewhere with an error that decreases with the number of steps."""
    for kind in ("text", "image"):
        for e in linear(kind).explain(raw_inputs(kind), method=method):
            assert np.abs(e.scores).max() > 1e-3, "the model is trivial"
            assert abs(e.base_value + e.scores.sum() - e.target["value"]) <= (1e-9 if kind == "text" else 1e-6)
    ex, raw = cases.explainer("bert/classify"), models.inputs("bert/classify")[0]
    few, many = (ex.explain(raw, method=clearhead.Method(method, steps=steps)) for steps in (20, 160))
    missing, remaining = (abs(e.base_value + e.scores.sum() - e.target["value"]) for e in (few, many))
    assert remaining <= missing / 8 and remaining <= 1e-3 * np.abs(many.scores).max()


def zero_for_irrelevant_units(method):
    """With zero values, attention carries nothing, so no token but the first gets a score."""
    model, tokenizer = models.text_model("bert")
    ex, l2_method = clearhead.load(model, tokenizer), clearhead.Method(method, reduce="l2")
    assert all(e.scores[1:-1].min() > 1e-6 for e in ex.explain(raw_inputs("text"), method=l2_method))
    for layer in model.bert.encoder.layer:
        nn.init.zeros_(layer.attention.self.value.weight)
    for e in ex.explain(raw_inputs("text"), method=l2_method):
        assert not e.scores[1:].any()


def implementation_invariant(method):
    """Rows of attention sum to one, so a shift of all values can be undone in the output bias without any change."""
    plain, tokenizer = models.text_model("bert")
    shifted_model, _ = models.text_model("bert")
    shifted_model.load_state_dict(plain.state_dict())
    for layer in shifted_model.bert.encoder.layer:
        value, output = layer.attention.self.value, layer.attention.output.dense
        with torch.no_grad():
            value.bias += 3
            output.bias -= 3 * output.weight.sum(1)
    original, shifted = (
        clearhead.load(model, tokenizer).explain(raw_inputs("text"), method=method) for model in (plain, shifted_model)
    )
    for a, b in zip(original, shifted, strict=True):
        assert abs(a.target["value"] - b.target["value"]) < 1e-9, "another function"
        assert cases.gap(a.scores, b.scores) <= 1e-9


def exact_on_additive_games(method):
    """On a linear model a unit's score is its marginal contribution, for every coalition."""
    for kind, subject in (("text", "bert/classify"), ("image", "vit/image")):
        ex, raws = linear(kind), raw_inputs(kind)
        for e, raw in zip(ex.explain(raws, method=method), raws, strict=True):
            players, units, value = coalition_values.game(subject, raw, ex=ex)
            contributions = [value([player]) - value([]) for player in players]
            assert np.abs(contributions).max() > 1e-3, "the model is trivial"
            assert cases.gap(e.scores, coalition_values.on_units(contributions, players, units)) <= (
                1e-9 if kind == "text" else 1e-6
            )


def conserves_relevance(method):
    """The relevance at the input tokens sums to the relevance of the target: one."""
    for subject in cases.TEXT_SUBJECTS:
        for e in cases.batched(subject, method)[method]:
            assert abs(e.scores.sum() - 1) <= 1e-5
            assert np.abs(e.scores).max() > 0.01, "relevance must not vanish"
    ex = cases.explainer("bert/classify")
    for e in ex.explain(models.inputs("bert/classify"), method=method, target=_both):
        assert abs(e.scores.sum() - 0.5) <= 1e-5, "one for a class minus one half for the other"


def _both(output):
    return output.logits[:, 0] - output.logits[:, 1] / 2


#: The check of each axiom that a method may declare. A method that declares another one fails.
CHECKS = {
    "rows sum to one": rows_sum_to_one,
    "exact on linear models": exact_on_linear_models,
    "exact on additive games": exact_on_additive_games,
    "complete": complete,
    "complete in the limit": complete_in_the_limit,
    "conserves relevance": conserves_relevance,
    "zero for units without effect": zero_for_irrelevant_units,
    "implementation invariant": implementation_invariant,
}
DECLARED = [(name, axiom) for name in cases.METHODS for axiom in METHOD_REGISTRY[name].declaration.axioms]


@pytest.mark.parametrize(("method", "axiom"), DECLARED, ids=[f"{name} – {axiom}" for name, axiom in DECLARED])
def test_declared_axiom(method, axiom):
    assert axiom in CHECKS, f"{method} declares {axiom!r}, which has no check: write one"
    CHECKS[axiom](method)


def test_checks_reject_methods_without_the_axiom():
    """Checks fail for methods without the property."""
    with pytest.raises(AssertionError):
        rows_sum_to_one("generic")
    with pytest.raises(AssertionError):
        exact_on_linear_models("saliency")
    with pytest.raises(AssertionError):
        exact_on_linear_models("generic")
    with pytest.raises(AssertionError):
        conserves_relevance("attn-lrp")
    with pytest.raises(AssertionError):
        implementation_invariant("generic")
    with pytest.raises(AssertionError):
        complete("gradient-shap")


# Other declared properties --------------------------------------------------------------------------------------------


def declaring(**declared):
    """Parametrises a test by the methods with these declared values."""
    names = [
        name
        for name in cases.METHODS
        if all(getattr(METHOD_REGISTRY[name].declaration, key) == value for key, value in declared.items())
    ]
    return pytest.mark.parametrize("method", names)


def subjects_of(method):
    return [subject for subject in cases.SUBJECTS if cases.applies(method, subject)]


def other_label(subject, e):
    return (e.target["index"] + 1) % cases.explainer(subject).adapter.model.config.num_labels


@declaring(signed=False)
def test_unsigned_scores_are_never_negative(method):
    unsigned = [variant for variant in cases.variants(method) if variant.get_option("reduce") != "sum"]
    for subject in subjects_of(method):
        for variant in unsigned:
            for e in cases.batched(subject, method)[str(variant)]:
                for array in (e.scores, e.matrix, e.per_layer, e.per_head):
                    assert array is None or array.min() >= 0, f"{variant} is declared unsigned, not so on {subject}"


def ignores_target(method, subject):
    """Whether another target gives bitwise the same scores, with all options of a method."""
    targets = [other_label(subject, e) for e in cases.batched(subject, "random")["random"]]
    results = cases.batched(subject, method)
    variants = list(cases.variants(method))
    other = cases.explainer(subject).explain(models.inputs(subject), method=variants, target=targets)
    return all(
        np.array_equal(e.scores, other_e.scores)
        for variant in other
        for e, other_e in zip(results[variant], other[variant], strict=True)
    )


@declaring(target="none")
def test_methods_without_a_target_ignore_it(method):
    for subject in subjects_of(method):
        assert ignores_target(method, subject), (
            f"{method} is declared to need no target, but depends on it on {subject}"
        )


@declaring(target="any")
def test_methods_with_a_target_depend_on_it(method):
    for subject in subjects_of(method):
        assert not ignores_target(method, subject), f"{method} does not depend on its target on {subject}"


#: Relevance of a contrast sums to zero, so these raise an error for it (tests/methods/test_lrp.py).
KEEP_SUMS = ("lrp", "transformer-attribution")


@declaring(target="any")
def test_linear_methods_give_contrast_as_difference(method):
    """If declared, the scores of a contrast are the difference of the two targets' scores."""
    is_linear = METHOD_REGISTRY[method].declaration.linear_in_target
    small_method = cases.with_few([method])[0]
    for subject in subjects_of(method):
        ex, raw = cases.explainer(subject), models.inputs(subject)[1]
        a = ex.explain(raw, method=small_method)
        assert a.provenance["linear_in_target"] == is_linear
        if method in KEEP_SUMS:
            continue
        label, other = a.target["index"], other_label(subject, a)
        b = ex.explain(raw, method=small_method, target=other)
        contrast = ex.explain(raw, method=small_method, target=clearhead.Contrast(label, other))
        size = max(np.abs(a.scores).max(), np.abs(b.scores).max())
        difference = cases.gap(a.scores - b.scores, contrast.scores, size)
        # ModernBERT's and Swin's input × gradient is only rounding, as a norm directly follows the embedding.
        if is_linear and size > 1e-6:
            assert difference <= cases.method_tolerance(method, subject), (
                f"{method} is not linear in the target of {subject}"
            )


@pytest.mark.parametrize("method", cases.METHODS)
def test_head_and_layer_contributions_sum_to_scores(method):
    """For "contributions", heads sum to layers and layers to the scores; for "depths", the last layer is the scores."""
    layer_scores = METHOD_REGISTRY[method].declaration.layer_scores
    for subject in subjects_of(method):
        results = cases.batched(subject, method)
        size = cases.size(results)
        for e in (e for explanations in results.values() for e in explanations):
            if layer_scores is None:
                assert e.per_layer is None and e.per_head is None
            elif e.per_layer is not None:
                total = e.per_layer.sum(0) if layer_scores == "contributions" else e.per_layer[-1]
                assert cases.gap(total, e.scores, size) <= 1e-12, subject
            if e.per_head is not None:
                assert cases.gap(e.per_head.sum(1), e.per_layer, size) <= 1e-12, subject


@pytest.mark.parametrize(
    "method", [name for name in cases.METHODS if "rows" in METHOD_REGISTRY[name].declaration.supports]
)
def test_read_out_row_of_matrix_equals_scores(method):
    """The read-out of the matrix for rows="all" equals the scores without this option."""
    with_rows = [variant for variant in cases.variants(method) if variant.get_option("rows") == "all"]
    for subject in subjects_of(method):
        for variant in with_rows:
            plain = clearhead.Method(method, **{k: v for k, v in variant.options if k != "rows"})
            expected = cases.explainer(subject).explain(models.inputs(subject), method=plain)
            for matrix_explanation, explanation in zip(
                cases.batched(subject, method)[str(variant)], expected, strict=True
            ):
                assert cases.gap(matrix_explanation.scores, explanation.scores) <= cases.method_tolerance(
                    method, subject
                ), (subject, variant)


@pytest.mark.parametrize("name", cases.METHODS)
def test_declarations_are_complete_and_consistent(name):
    declaration = METHOD_REGISTRY[name].declaration
    assert declaration.name == name and declaration.citation and declaration.family and declaration.taxonomy
    components = [component.declaration for component in clearhead.Method(name).components]
    requirements = [requirement for d in (declaration, *components) for requirement in d.requires]
    needs_backward = any(requirement.endswith("gradient") for requirement in requirements)
    assert (declaration.cost.backward > 0) == needs_backward, (
        f"{name}: {declaration.cost} does not match its requirements"
    )
    depends_on_target = needs_backward or declaration.pass_type is PassType.PERTURBATION
    assert depends_on_target == (declaration.target == "any"), (
        f"{name}: a target matters exactly if gradients or values depend on it"
    )
    assert not (declaration.model_agnostic and declaration.requires)
