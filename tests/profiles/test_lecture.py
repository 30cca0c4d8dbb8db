"""The lecture's settings: held to shap itself and to the formula, and to the values it prints where its model is."""

import os
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from tests import models
from tests.methods import coalition_values, replica_comparison
from tests.methods.test_parity import bert_inputs, theirs
from tests.methods.test_parity import explainer as author_model

NAME = "textattack/bert-base-uncased-SST-2"
#: A folder with those weights as safetensors (clearhead convert), where the hub's cache has none.
FOLDER = "CLEARHEAD_LECTURE_MODEL"

#: Printed in the lecture (spec/analysis.md, 5.1): token and Grad-SAM score, in the order of the sentence.
GRAD_SAM = {
    "You look extremely confused": (
        0,
        {
            "[CLS]": 0.00099815,
            "you": 0.00054431,
            "look": 0.00051781,
            "extremely": 0.00039444,
            "confused": 0.00080487,
            "[SEP]": 0.00013036,
        },
    ),
    "I cannot wait for next time": (
        1,
        {
            "[CLS]": 0.00215395,
            "i": 0.00055223,
            "cannot": 0.00151768,
            "wait": 0.00163126,
            "for": 0.00057652,
            "next": 0.00080023,
            "time": 0.00056583,
            "[SEP]": 0.00027473,
        },
    ),
    "This is so boring": (
        0,
        {
            "[CLS]": 0.00047818,
            "this": 0.00012859,
            "is": 0.00013792,
            "so": 0.00017947,
            "boring": 0.00025618,
            "[SEP]": 0.00005025,
        },
    ),
}
#: Printed in the lecture (5.2): base value and SHAP values of class 1, special tokens among them.
SHAP = {
    "I like the movie": (0.06226253, [-0.1295938, 0.56973486, 2.80113666, -0.14384789, 0.32744559, 0.17642172]),
    "She hates the book": (0.06226253, [0.04401805, 0.04553582, -3.53780551, -0.05805362, 0.00513234, 0.29313125]),
    "This is so boring": (0.06226253, [0.30843912, 0.25726233, 0.28962884, 0.28991709, -4.94576939, 0.3164889]),
    "I cannot wait for next time": (
        -0.42705753,
        [-0.10001853, 0.30019138, 1.07011396, 1.28322518, 0.11099461, 0.42985061, 0.22122911, -0.22297784],
    ),
    "You look extremely confused": (
        0.06226253,
        [0.59630368, 0.48589848, 0.27857004, -0.05426301, -4.83736869, 0.56557564],
    ),
}


@cache
def lecture_model() -> clearhead.Explainer:
    try:
        return clearhead.load(os.environ.get(FOLDER) or NAME)
    except clearhead.InputError as problem:
        pytest.skip(f"the lecture's model is not on this machine ({FOLDER} may name its folder): {problem}"[:300])


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched for a test: the weights are in the hub's cache, or they are absent."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("text", GRAD_SAM)
def test_the_printed_values_of_grad_sam(text: str, offline: None) -> None:
    label, printed = GRAD_SAM[text]
    e = lecture_model().explain(text, "grad-sam", profile="gradsam_lecture")
    assert e.target["index"] == label and e.tokens == list(printed)
    np.testing.assert_allclose(e.scores, list(printed.values()), atol=1e-6)


@pytest.mark.parametrize("text", SHAP)
def test_the_printed_values_of_shap(text: str, offline: None) -> None:
    base, printed = SHAP[text]
    e = lecture_model().explain(text, "shap", profile="shap_lecture")
    assert e.target["index"] == 1
    assert e.base_value == pytest.approx(base, abs=1e-4)
    np.testing.assert_allclose(e.scores, printed, atol=1e-4)


def lectures_call(model: Any, tokenizer: Any, texts: list[str]) -> Any:
    """SHAP as the lecture calls it: the logit of class 1, every text padded to the longest there may be."""
    shap = coalition_values.shap_package()

    def logit(texts: Any) -> np.ndarray:
        rows = tokenizer(list(texts), padding="max_length", max_length=64, return_tensors="pt")
        with torch.no_grad():
            return model(**rows).logits[:, 1].numpy()

    return shap.Explainer(logit, tokenizer)(texts, fixed_context=1, silent=True)


def test_shap_as_the_lecture_calls_it() -> None:
    """Words in pieces, commas and two sentences: the package itself, on the same coalitions."""
    ex, texts = (
        replica_comparison.explainer("bert/classify"),
        ["I like the movie", "She isn't here, is she? So boring!", "so"],
    )
    package = lectures_call(ex.adapter.model, ex.adapter.processor, texts)
    for e, values, base in zip(
        ex.explain(texts, "shap", profile="shap_lecture"), package.values, package.base_values, strict=True
    ):
        assert e.target["index"] == 1
        np.testing.assert_allclose(e.scores, values, atol=1e-10)
        assert e.base_value == pytest.approx(float(base), abs=1e-10)
        special = np.abs(e.scores[np.array(e.units.special)]).max()
        assert (special > 1e-6) == (len(e) > 3), "of what several words have together special tokens get a part"


def test_class_one_unless_another_is_asked_for() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    assert ex.explain(text, "shap", profile="shap_lecture").target["index"] == 1
    assert ex.explain(text, "shap", profile="shap_lecture", target=2).target["index"] == 2
    with pytest.raises(clearhead.InputError, match="has no settings for grad-sam"):
        ex.explain(text, "grad-sam", profile="shap_lecture")


@pytest.mark.parametrize("case", ["case0", "case1"])
def test_grad_sam_of_the_lecture_is_the_formula(case: str) -> None:
    e = author_model("bert").explain(bert_inputs(case), "grad-sam", profile="gradsam_lecture")
    assert replica_comparison.gap(e.scores, theirs("bert", "gradsam", case, "pred", "gradsam")) < 1e-10


def test_padding_counts_among_the_tokens() -> None:
    """1/N with N the length that is given: three tokens of padding make every score smaller by that."""
    ex = author_model("bert")
    plain = bert_inputs("case0")
    padded = {name: torch.nn.functional.pad(part, (0, 3)) for name, part in plain.items()}
    one = ex.explain(plain, "grad-sam", profile="gradsam_lecture").scores
    other = ex.explain(padded, "grad-sam", profile="gradsam_lecture").scores
    assert len(other) == len(one) + 3 and not np.allclose(one, other[: len(one)])
    np.testing.assert_allclose(other[: len(one)] * len(other), one * len(one), rtol=1e-6)


# The lecture itself ---------------------------------------------------------------------------------------------------


@cache
def shown() -> clearhead.LectureResult:
    return clearhead.run_lecture(clearhead.load("zoo:sentiment"))


def test_five_sentences_with_the_zoo() -> None:
    found = shown()
    assert len(found.sentences) == 5
    assert {one.text: one.label for one in found.sentences} == {
        "I like the movie": "POSITIVE",
        "I cannot wait for next time": "POSITIVE",
        "She hates the book": "NEGATIVE",
        "This is so boring": "NEGATIVE",
        "You look extremely confused": "NEGATIVE",
    }
    for text, word in (("hates", "hates"), ("boring", "boring"), ("confused", "confused")):
        one = next(one for one in found.sentences if text in one.text)
        assert one.rank_tokens("SHAP")[0] == one.rank_tokens("Grad-SAM")[0] == word
        assert one.rank_tokens("SHAP") != one.grad_sam.tokens, "special tokens are in no ranking"


def test_what_becomes_of_cls() -> None:
    """Much of Grad-SAM by rows, less by columns; nothing of SHAP, and a part of it with one context alone."""
    for one in shown().sentences:
        assert (
            one.compute_first_special_fraction("Grad-SAM")
            > 0.1
            > one.compute_first_special_fraction("Grad-SAM, by columns")
        )
        assert (
            one.compute_first_special_fraction("SHAP")
            == 0
            < one.compute_first_special_fraction("SHAP, as in the lecture")
        )
        assert list(one.compute_special_fractions("Grad-SAM")) == ["[CLS]", "[SEP]"]


def test_as_in_the_lecture_is_the_profile() -> None:
    """Class 1, also where the other one is predicted."""
    one = next(one for one in shown().sentences if one.label == "NEGATIVE")
    e, ex = one.by_method["SHAP, as in the lecture"], clearhead.load("zoo:sentiment")
    assert e.provenance["profile"] == "shap_lecture"
    assert (one.shap.target["index"], e.target["index"]) == (0, 1)
    np.testing.assert_allclose(e.scores, ex.explain(one.text, "shap", profile="shap_lecture").scores, atol=1e-6)
    said = one.to_dict()["methods"]
    assert [said[name]["label"] for name in ("SHAP", "SHAP, as in the lecture")] == ["NEGATIVE", "POSITIVE"]


def test_figures_of_agreement() -> None:
    from scipy.stats import spearmanr

    for one in shown().sentences:
        e, f = one.grad_sam, one.shap
        expected = spearmanr(e.scores[1:-1], np.abs(f.scores[1:-1])).statistic
        assert one.rank_correlation == pytest.approx(float(expected))
        assert one.top_overlap == len(set(one.rank_tokens("SHAP")[:2]) & set(one.rank_tokens("Grad-SAM")[:2])) / 2
    assert shown().mean_rank_correlation == pytest.approx(np.mean([one.rank_correlation for one in shown().sentences]))


def test_the_figure_says_it_all() -> None:
    from tests.render.test_mpl_explanation import drawn, written

    figure = shown().plot()
    assert drawn(figure).std() > 0
    said = " ".join(written(figure))
    for one in shown().sentences:
        assert one.text in said and f"rank correlation {one.rank_correlation:.2f}".replace("-", "−") in said
    assert "1  boring" in said and "Share of [CLS]" in said and "SHAP, as in the lecture" in said


@pytest.mark.parametrize("given", ["one text", [], [3], [("a", "pair")]], ids=str)
def test_only_sentences(given: Any) -> None:
    with pytest.raises(clearhead.InputError, match="list of sentences"):
        clearhead.run_lecture(replica_comparison.explainer("bert/classify"), given)


def test_only_texts_in_classes() -> None:
    with pytest.raises(clearhead.InputError, match="needs a text classifier"):
        clearhead.run_lecture(replica_comparison.explainer("vit/image"))


def test_class_one_must_be_there() -> None:
    config = transformers.BertConfig(
        vocab_size=330, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
    )
    ex = clearhead.load(transformers.BertForSequenceClassification(config), models.tokenizer("wordpiece"))
    with pytest.raises(clearhead.InputError, match=r"class 1, counted from 0, but .* has 1"):
        clearhead.run_lecture(ex, ["so"])


def test_a_word_alone_has_no_rank_correlation() -> None:
    (one,) = clearhead.run_lecture(replica_comparison.explainer("bert/classify"), ["so"]).sentences
    assert np.isnan(one.rank_correlation) and one.top_overlap == 1
