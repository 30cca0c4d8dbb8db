"""Lift by token class against explicit loops, uniform attention, and end-to-end measurements of tiny models."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead.errors import InputError
from clearhead.studies.code.attention import (
    compute_attribution_lift,
    compute_paid_lift,
    compute_received_lift,
    get_function_ids,
    measure_code_attention,
)
from clearhead.studies.code.tasks import (
    CodeQuestion,
    make_clone_questions,
    make_cloze_questions,
    make_translation_questions,
)
from tests.models import explainer

TEXTS = ["def f(he, it):\n    if he > it:\n        return he\n    return it + 1\n", "so = [the for the in book]\n"]


def make_attention_and_classes(layers=2, heads=3, n=7, seed=0):
    rng = np.random.default_rng(seed)
    scores = np.exp(2 * rng.normal(size=(layers, heads, n, n)))
    member = np.zeros((4, n), dtype=bool)  # the last class has no token
    member[rng.permutation(np.arange(n) % 3), np.arange(n)] = True
    return scores / scores.sum(-1, keepdims=True), member


def test_received_and_paid_lift_equal_loops():
    attention, member = make_attention_and_classes()
    n = attention.shape[-1]
    for layer in range(2):
        for c in range(3):
            inside = [k for k in range(n) if member[c, k]]
            for head in range(3):
                mean = np.mean([sum(attention[layer, head, q, k] for k in inside) for q in range(n)])
                lift = mean / (len(inside) / n)
                assert compute_received_lift(attention, member)[layer, head, c] == pytest.approx(lift)
            for b in range(3):
                rows = [q for q in range(n) if member[b, q]]
                mass = np.mean([attention[layer, h, q, k] for h in range(3) for q in rows for k in inside]) * n
                assert compute_paid_lift(attention, member)[layer, b, c] == pytest.approx(mass)
    assert (
        np.isnan(compute_received_lift(attention, member)[..., 3]).all()
        and np.isnan(compute_paid_lift(attention, member)[:, 3]).all()
    )


@pytest.mark.parametrize("n", [6, 60])
def test_uniform_attention_has_lift_one_for_any_length_and_class(n):
    _, member = make_attention_and_classes(n=n, seed=1)
    uniform = np.full((1, 1, n, n), 1 / n)
    np.testing.assert_allclose(compute_received_lift(uniform, member)[0, 0, :3], 1)
    np.testing.assert_allclose(compute_paid_lift(uniform, member)[0, :3, :3], 1)
    np.testing.assert_allclose(compute_attribution_lift(np.ones(n), member)[:3], 1)


def test_excluding_special_tokens_equals_renormalised_submatrix():
    """Excluding the special token equals removing its row and column and normalising again."""
    attention, _ = make_attention_and_classes(n=5, seed=2)
    member = np.array([[0, 1, 1, 0, 0], [0, 0, 0, 1, 1]], dtype=bool)  # token 0 is special
    inner = attention[..., 1:, 1:]
    inner = inner / inner.sum(-1, keepdims=True)
    np.testing.assert_allclose(
        compute_received_lift(attention, member, include_special=False), compute_received_lift(inner, member[:, 1:])
    )
    np.testing.assert_allclose(
        compute_paid_lift(attention, member, include_special=False), compute_paid_lift(inner, member[:, 1:])
    )


def test_signs_do_not_cancel_in_attribution():
    member = np.array([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=bool)
    np.testing.assert_allclose(compute_attribution_lift(np.array([3.0, -3.0, 1.0, 1.0]), member), [1.5, 0.5])


def test_cloze_questions_mask_code_tokens_and_equal_model_outputs():
    ex = explainer("roberta/mask")
    questions = make_cloze_questions(ex, [*TEXTS, "def broken(:\n"], "python", tokens_per_text=3, seed=1)
    assert [question.function_id for question in questions] == [index for index in range(len(TEXTS)) for _ in range(3)]
    assert len(questions) == 6 and all(question.raw_input.count("<mask>") == 1 for question in questions)
    for question in questions:
        assert question.question_type in ("identifier", "keyword", "operator", "separator", "number")
        word = ex.adapter.processor.decode([question.expected_answer]).strip()
        assert question.raw_input.replace("<mask>", word) in TEXTS
    result = measure_code_attention(ex, questions, methods=["saliency", "integrated-gradients"])
    assert result.received_attention.shape == (6, 3, 4, len(result.classes)) and {"mask", "special"} <= set(
        result.classes
    )
    assert (result.token_counts[:, result.classes.index("mask")] == 1).all()
    assert (result.token_counts[:, result.classes.index("special")] == 2).all()
    # fraction of tokens times lift is the mass of a class; masses of attention and of attribution sum to one
    shares = result.token_counts / result.lengths[:, None]
    np.testing.assert_allclose(np.nansum(result.received_attention * shares[:, None, None], -1), 1, rtol=1e-6)
    for lifts in result.attributions.values():
        np.testing.assert_allclose(np.nansum(lifts * shares, -1), 1, rtol=1e-6)
    model, tok = ex.adapter.model, ex.adapter.processor
    encoding = tok(questions[0].raw_input, return_tensors="pt")
    encoding.pop("token_type_ids", None)
    mask_position = encoding["input_ids"][0].tolist().index(tok.mask_token_id)
    with torch.no_grad():
        probabilities = model(**encoding).logits[0, mask_position].softmax(-1)
    assert result.confidence[0] == pytest.approx(float(probabilities.max()), rel=1e-5)
    assert result.is_correct[0] == (int(probabilities.argmax()) == questions[0].expected_answer)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        first = model(**encoding, output_attentions=True).attentions[1][0, 2]
    mask_class = result.classes.index("mask")
    expected = float(first[:, mask_position].mean() * encoding["input_ids"].shape[1])
    assert result.received_attention[0, 1, 2, mask_class] == pytest.approx(expected, rel=1e-5)


def test_clone_pairs_are_grouped_by_syntax_part():
    ex = explainer("bert/classify")
    questions = make_clone_questions(
        [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[1])], ["LABEL_0", "LABEL_1"], ("python", "python")
    )
    result = measure_code_attention(ex, questions, grouping="part", include_special=False)
    assert "special" not in result.classes and {"declaration", "condition", "return"} <= set(result.classes)
    selected = result.select_classes(["condition", "return"])
    np.testing.assert_array_equal(
        selected.received_attention[..., 1], result.received_attention[..., result.classes.index("return")]
    )
    assert len(result) == 2 and result.confidence.max() <= 1


def test_invalid_input_raises():
    with pytest.raises(InputError, match="not a masked language model"):
        make_cloze_questions(explainer("bert/classify"), TEXTS, "python")
    with pytest.raises(InputError, match="unknown language 'cobol'"):
        make_cloze_questions(explainer("roberta/mask"), TEXTS, "cobol")
    with pytest.raises(InputError, match="none of 1 texts can be used"):
        make_cloze_questions(explainer("roberta/mask"), ["def broken(:"], "python")
    with pytest.raises(InputError, match="2 functions have 1 translations"):
        make_translation_questions(TEXTS, ["x"], "python")
    with pytest.raises(InputError, match="no question"):
        measure_code_attention(explainer("roberta/mask"), [])


def test_translation_is_measured_on_the_source():
    zoo = pytest.importorskip("clearhead_zoo", reason="clearhead-zoo is not installed")
    if "code-translate" not in zoo.names():
        pytest.skip("zoo:code-translate is not installed")
    ex = clearhead.load("zoo:code-translate")
    java, cs = "public int size() {return mSize;}", "public virtual int Size(){return mSize;}"
    result = measure_code_attention(ex, make_translation_questions([java, java], [cs, "something else"], "java"))
    assert result.predictions[0] == result.predictions[1] and result.predictions[0].startswith("public")
    assert result.is_correct.tolist() == [result.predictions[0] == cs, False] and 0 < result.confidence[0] <= 1
    assert result.received_attention.shape[1:3] == (3, 6) and {"modifier", "type", "special"} <= set(result.classes)


def test_questions_about_one_function_share_a_function_id():
    same = "def f(a):\n    return a + 1\n"
    other, third = "def g(b):\n    return b\n", "def h(c):\n    return c - 1\n"
    joined = make_clone_questions(
        [(same, other), (third, "x = 1\n"), (other, third), ("y = 2\n", "z = 3\n")], ["a"] * 4, ("python",) * 2
    )
    assert get_function_ids(joined).tolist() == [0, 0, 0, 1]
    # texts that differ may be forms of one function: f and g, rewritten
    forms = make_clone_questions(
        [(same, third), (other, "x = 1\n")], ["a"] * 2, ("python",) * 2, [("f", "h"), ("f", "x")]
    )
    assert get_function_ids(forms).tolist() == [0, 0]
    with pytest.raises(InputError, match="1 pairs have 2 pairs of function names"):
        make_clone_questions([(same, third)], ["a"], ("python",) * 2, [("f", "h"), ("f", "x")])
    plain = [
        CodeQuestion("a", (), 0),
        CodeQuestion("b", (), 0, function_id=0),
        CodeQuestion("c", (), 0, function_id=0),
        CodeQuestion("d", (), 0),
    ]
    numbers = get_function_ids(plain)
    assert numbers[1] == numbers[2] and len(set(numbers.tolist())) == 3
