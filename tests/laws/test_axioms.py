"""Law 5: what a method declares holds, on analytic models with known answers and on random ones."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import clearhead
from clearhead.methods import REGISTRY
from tests import models
from tests.laws import cases
from tests.methods import absent

SUBJECTS = pytest.mark.parametrize("subject", cases.SUBJECTS)


# Analytic models ------------------------------------------------------------------------------------------------------


@cache
def uniform(kind):
    """A model whose every query looks at all keys alike: the weights of queries and keys are zero."""
    model, processor = models.text_model("bert") if kind == "text" else models.image_model("vit")
    for name, module in model.named_modules():
        if name.endswith(("query", "key", "q_proj", "k_proj")):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return clearhead.load(model, processor)


@cache
def linear(kind):
    """A model that is linear in its input: uniform attention, no norms, no non-linearity. Values and heads stay."""
    ex = uniform(kind)
    model, processor = ex.subject.model, ex.subject.processor
    if kind == "text":
        model, processor = models.text_model("bert", hidden_act="linear")
    else:
        model, processor = models.image_model("vit", hidden_act="linear")
    model.load_state_dict(ex.subject.model.state_dict())
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm | nn.Tanh):
                setattr(module, name, nn.Identity())
    return clearhead.load(model, processor)


def raw_inputs(kind):
    return models.inputs("bert/classify" if kind == "text" else "vit/image")


def without(kind, ex, raw, unit):
    """The target's value when one unit's input vector is zero (all of them if `unit` is None)."""
    model, batch = ex.subject.model, cases.collated(ex, [raw])
    label = ex.explain(raw, method="saliency").target["index"]
    with torch.no_grad():
        if kind == "text":
            vectors = model.get_input_embeddings()(batch.pop("input_ids"))
            vectors[:, slice(None) if unit is None else unit] = 0
            return float(model(inputs_embeds=vectors, **batch).logits[0, label])
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
        within = 1e-6 if cases.tolerance(subject) > 1e-9 else 1e-12  # a softmax in float32 sums to one in float32
        for variant in cases.variants(method):
            for e in cases.batched(subject)[str(variant)]:
                if e.matrix is not None:
                    assert np.abs(e.matrix.sum(1) - 1).max() <= within
                else:
                    assert abs(e.scores.sum() - 1) <= within
                assert e.scores.min() >= 0
    for kind in ("text", "image"):
        # With uniform attention U in all of L layers: ((I + U)/2)^L = I/2^L + (1 − 1/2^L) U, and E_h A = U.
        for e in uniform(kind).explain(raw_inputs(kind), method=method):
            even, first = np.full(len(e), 1 / len(e)), np.eye(len(e))[0]
            depth = uniform(kind).recorder.tested.calls
            known = {"attention": even, "rollout": first / 2**depth + (1 - 1 / 2**depth) * even}
            if method in known:
                assert cases.gap(e.scores, known[method]) <= 1e-6


def exact_on_linear_models(method):
    """Each score is what the target loses without the unit, and the scores add up to what it loses without all."""
    for kind in ("text", "image"):
        ex = linear(kind)
        for e, raw in zip(ex.explain(raw_inputs(kind), method=method), raw_inputs(kind), strict=True):
            full = e.target["value"]
            lost = np.array([full - without(kind, ex, raw, unit) for unit in range(len(e))])
            assert np.abs(lost).max() > 1e-3, "the model is trivial"
            assert cases.gap(e.scores, lost) <= (1e-9 if kind == "text" else 1e-6)
            assert abs(e.scores.sum() - (full - without(kind, ex, raw, None))) <= 1e-6 * np.abs(lost).max() * len(e)


def complete(method):
    """The scores add up to what the target gains over the base value."""
    for kind in ("text", "image"):
        for e in linear(kind).explain(raw_inputs(kind), method=method):
            assert np.abs(e.scores).max() > 1e-3, "the model is trivial"
            missing = abs(e.base_value + e.scores.sum() - e.target["value"])
            assert missing <= (1e-9 if kind == "text" else 1e-6) * np.abs(e.scores).max()
    for e in cases.explainer("bert/classify").explain(models.inputs("bert/classify"), method=method):
        assert abs(e.base_value + e.scores.sum() - e.target["value"]) <= 1e-6


def complete_in_the_limit(method):
    """Exactly so on linear models, and elsewhere the more so the more steps there are."""
    for kind in ("text", "image"):
        for e in linear(kind).explain(raw_inputs(kind), method=method):
            assert np.abs(e.scores).max() > 1e-3, "the model is trivial"
            assert abs(e.base_value + e.scores.sum() - e.target["value"]) <= (1e-9 if kind == "text" else 1e-6)
    ex, raw = cases.explainer("bert/classify"), models.inputs("bert/classify")[0]
    few, many = (ex.explain(raw, method=clearhead.Method(method, steps=steps)) for steps in (20, 160))
    missing, left = (abs(e.base_value + e.scores.sum() - e.target["value"]) for e in (few, many))
    assert left <= missing / 8 and left <= 1e-3 * np.abs(many.scores).max()


def nothing_for_what_does_not_count(method):
    """Where attention carries nothing, the first token decides alone, and no other unit gets a score."""
    model, tokenizer = models.text_model("bert")
    ex, how = clearhead.load(model, tokenizer), clearhead.Method(method, reduce="l2")
    assert all(e.scores[1:-1].min() > 1e-6 for e in ex.explain(raw_inputs("text"), method=how))
    for layer in model.bert.encoder.layer:
        nn.init.zeros_(layer.attention.self.value.weight)
    for e in ex.explain(raw_inputs("text"), method=how):
        assert not e.scores[1:].any()


def implementation_invariant(method):
    """Rows of attention sum to one: what is added to all values can be taken off after them, and nothing changes."""
    plain, tokenizer = models.text_model("bert")
    other, _ = models.text_model("bert")
    other.load_state_dict(plain.state_dict())
    for layer in other.bert.encoder.layer:
        inside, output = layer.attention.self.value, layer.attention.output.dense
        with torch.no_grad():
            inside.bias += 3
            output.bias -= 3 * output.weight.sum(1)
    one, two = (clearhead.load(model, tokenizer).explain(raw_inputs("text"), method=method) for model in (plain, other))
    for a, b in zip(one, two, strict=True):
        assert abs(a.target["value"] - b.target["value"]) < 1e-9, "another function"
        assert cases.gap(a.scores, b.scores) <= 1e-9


def exact_on_additive_games(method):
    """On a linear model a unit's share is what it brings over what stands in its place, whoever else is there."""
    for kind, subject in (("text", "bert/classify"), ("image", "vit/image")):
        ex, raws = linear(kind), raw_inputs(kind)
        for e, raw in zip(ex.explain(raws, method=method), raws, strict=True):
            players, units, value = absent.game(subject, raw, ex=ex)
            brought = [value([player]) - value([]) for player in players]
            assert np.abs(brought).max() > 1e-3, "the model is trivial"
            assert cases.gap(e.scores, absent.on_units(brought, players, units)) <= (1e-9 if kind == "text" else 1e-6)


def conserves_relevance(method):
    """What arrives at the words of a text is what the target started with: one."""
    for subject in cases.TEXT_SUBJECTS:
        for e in cases.batched(subject)[method]:
            assert abs(e.scores.sum() - 1) <= 1e-5
            assert np.abs(e.scores).max() > 0.01, "relevance is spread, not lost"
    ex = cases.explainer("bert/classify")
    for e in ex.explain(models.inputs("bert/classify"), method=method, target=_both):
        assert abs(e.scores.sum() - 0.5) <= 1e-5, "one for a class, and minus a half for the other"


def _both(output):
    return output.logits[:, 0] - output.logits[:, 1] / 2


#: How each axiom that a method may declare is checked. A method that declares another one fails until it stands here.
CHECKS = {
    "rows sum to one": rows_sum_to_one,
    "exact on linear models": exact_on_linear_models,
    "exact on additive games": exact_on_additive_games,
    "complete": complete,
    "complete in the limit": complete_in_the_limit,
    "conserves relevance": conserves_relevance,
    "nothing for what does not count": nothing_for_what_does_not_count,
    "implementation invariant": implementation_invariant,
}
DECLARED = [(name, axiom) for name in cases.METHODS for axiom in REGISTRY[name].declaration.axioms]


@pytest.mark.parametrize(("method", "axiom"), DECLARED, ids=[f"{name} – {axiom}" for name, axiom in DECLARED])
def test_declared_axiom(method, axiom):
    assert axiom in CHECKS, f"{method} declares {axiom!r}, which nothing checks: write the check"
    CHECKS[axiom](method)


def test_the_checks_can_fail():
    """An axiom is no axiom if every method has it."""
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


# Everything else that a declaration says ------------------------------------------------------------------------------


def able(subject, **declared):
    return [
        name
        for name in cases.METHODS
        if cases.applies(name, subject)
        and all(getattr(REGISTRY[name].declaration, key) == value for key, value in declared.items())
    ]


def other_label(subject, e):
    return (e.target["index"] + 1) % cases.explainer(subject).subject.model.config.num_labels


@SUBJECTS
def test_unsigned_scores_are_never_negative(subject):
    for method in able(subject, signed=False):
        own = [variant for variant in cases.variants(method) if variant.option("reduce") != "sum"]
        for variant in own:
            for e in cases.batched(subject)[str(variant)]:
                for part in (e.scores, e.matrix, e.per_layer, e.per_head):
                    assert part is None or part.min() >= 0, f"{variant} is declared unsigned"


@SUBJECTS
def test_methods_without_a_target_ignore_it(subject):
    """And the others do not."""
    raws, variants = models.inputs(subject), cases.every_variant(subject)
    targets = [other_label(subject, e) for e in cases.batched(subject)["random"]]
    other = cases.explainer(subject).explain(raws, method=variants, target=targets)
    same = {
        variant: all(map(_same_scores, cases.batched(subject)[str(variant)], other[str(variant)]))
        for variant in variants
    }
    for method in able(subject, target="none"):
        assert all(same[variant] for variant in cases.variants(method)), f"{method} is declared to need no target"
    for method in able(subject, target="any"):
        assert not all(same[variant] for variant in cases.variants(method)), f"{method} does not see its target"


def _same_scores(one, other):
    return np.array_equal(one.scores, other.scores)


#: Relevance of a contrast starts with a sum of zero, which these keep: they refuse it (tests/methods/test_lrp.py).
KEEP_SUMS = ("lrp", "transformer-attribution")


@SUBJECTS
def test_linear_in_the_target(subject):
    """The scores of a contrast are the difference of the two targets' scores – and not so for the others."""
    ex, raw = cases.explainer(subject), models.inputs(subject)[1]
    methods = able(subject, target="any")
    a = ex.explain(raw, method=methods)
    label, other = a[methods[0]].target["index"], other_label(subject, a[methods[0]])
    b = ex.explain(raw, method=methods, target=other)
    methods = [method for method in methods if method not in KEEP_SUMS]
    contrast = ex.explain(raw, method=methods, target=clearhead.Contrast(label, other))
    for method in methods:
        size = max(np.abs(a[method].scores).max(), np.abs(b[method].scores).max())
        found = cases.gap(a[method].scores - b[method].scores, contrast[method].scores, size)
        linear_ = REGISTRY[method].declaration.linear_in_target
        # ModernBERT's and Swin's input × gradient is all rounding: a norm follows the embedding at once.
        if linear_ and size > 1e-6:
            assert found <= cases.allowed(method, subject), f"{method} is declared linear in the target"
        assert a[method].provenance["linear_in_target"] == linear_


@SUBJECTS
def test_shares_add_up(subject):
    """parts="contributions": heads add up to their layer, layers to the scores. "depths": the last is the scores."""
    for method in able(subject):
        parts = REGISTRY[method].declaration.parts
        for variant in cases.variants(method):
            for e in cases.batched(subject)[str(variant)]:
                size = cases.size(e, cases.batched(subject))
                if parts is None:
                    assert e.per_layer is None and e.per_head is None
                elif e.per_layer is not None:
                    whole = e.per_layer.sum(0) if parts == "contributions" else e.per_layer[-1]
                    assert cases.gap(whole, e.scores, size) <= 1e-12
                if e.per_head is not None:
                    assert cases.gap(e.per_head.sum(1), e.per_layer, size) <= 1e-12


@SUBJECTS
def test_the_read_out_row_of_the_matrix_is_the_scores(subject):
    """rows="all" shows every row; the read-out of those rows is what one gets without it."""
    for method in able(subject):
        if "rows" not in REGISTRY[method].declaration.has:
            continue
        for variant in (m for m in cases.variants(method) if m.option("rows") == "all"):
            plain = clearhead.Method(method, **{k: v for k, v in variant.options if k != "rows"})
            alone = cases.explainer(subject).explain(models.inputs(subject), method=plain)
            for every, one in zip(cases.batched(subject)[str(variant)], alone, strict=True):
                assert cases.gap(every.scores, one.scores) <= cases.allowed(method, subject), variant


@pytest.mark.parametrize("name", cases.METHODS)
def test_declarations_are_complete(name):
    d = REGISTRY[name].declaration
    assert d.name == name and d.citation and d.cost and d.family and d.taxonomy
    needs_backward = any(ask.endswith("gradient") for ask in d.asks)
    assert ("backward" in d.cost) == needs_backward, f"{name}: {d.cost!r} does not fit what it asks for"
    asks_about_target = needs_backward or d.kind == "values"
    assert asks_about_target == (d.target == "any"), f"{name}: a target matters exactly where it is asked about"
    assert not (d.model_agnostic and d.asks)
