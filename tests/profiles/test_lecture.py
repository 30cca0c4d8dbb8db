"""The lecture's profiles equal the shap package, the formula, and, with the lecture's model, the printed values."""

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
from tests.methods.test_parity import explainer as load_author_model

NAME = "textattack/bert-base-uncased-SST-2"
#: Environment variable: a folder with those weights as safetensors (clearhead convert), if the hub's cache has none.
FOLDER = "CLEARHEAD_LECTURE_MODEL"

#: Printed in the lecture (spec/analysis.md, 5.1): label, then tokens with their Grad-SAM scores.
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
#: Printed in the lecture (5.2): base value and SHAP values of class 1, including special tokens.
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
    except clearhead.InputError as error:
        pytest.skip(f"the lecture's model is not available ({FOLDER} may name its folder): {error}"[:300])


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable downloads: the weights are in the hub's cache, or the test is skipped."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("text", GRAD_SAM)
def test_grad_sam_equals_printed_values(text: str, offline: None) -> None:
    label, printed = GRAD_SAM[text]
    e = lecture_model().explain(text, "grad-sam", profile="gradsam_lecture")
    assert e.target["index"] == label and e.tokens == list(printed)
    np.testing.assert_allclose(e.scores, list(printed.values()), atol=1e-6)


@pytest.mark.parametrize("text", SHAP)
def test_shap_equals_printed_values(text: str, offline: None) -> None:
    base, printed = SHAP[text]
    e = lecture_model().explain(text, "shap", profile="shap_lecture")
    assert e.target["index"] == 1
    assert e.base_value == pytest.approx(base, abs=1e-4)
    np.testing.assert_allclose(e.scores, printed, atol=1e-4)


def call_shap_as_in_the_lecture(model: Any, tokenizer: Any, texts: list[str]) -> Any:
    """Call shap as the lecture does: the logit of class 1, every text padded to the maximal length."""
    shap = coalition_values.import_shap()

    def logit(texts: Any) -> np.ndarray:
        rows = tokenizer(list(texts), padding="max_length", max_length=64, return_tensors="pt")
        with torch.no_grad():
            return model(**rows).logits[:, 1].numpy()

    return shap.Explainer(logit, tokenizer)(texts, fixed_context=1, silent=True)


def test_shap_profile_equals_shap_package() -> None:
    """Texts with subwords, commas and two sentences; the package evaluates the same coalitions."""
    ex, texts = (
        replica_comparison.explainer("bert/classify"),
        ["I like the movie", "She isn't here, is she? So boring!", "so"],
    )
    package = call_shap_as_in_the_lecture(ex.adapter.model, ex.adapter.processor, texts)
    for e, values, base in zip(
        ex.explain(texts, "shap", profile="shap_lecture"), package.values, package.base_values, strict=True
    ):
        assert e.target["index"] == 1
        np.testing.assert_allclose(e.scores, values, atol=1e-10)
        assert e.base_value == pytest.approx(float(base), abs=1e-10)
        special = np.abs(e.scores[np.array(e.units.special)]).max()
        assert (special > 1e-6) == (len(e) > 3), "with several words, special tokens get a part of their interaction"


def test_default_target_is_class_one() -> None:
    ex, text = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    assert ex.explain(text, "shap", profile="shap_lecture").target["index"] == 1
    assert ex.explain(text, "shap", profile="shap_lecture", target=2).target["index"] == 2
    with pytest.raises(clearhead.InputError, match="has no settings for grad-sam"):
        ex.explain(text, "grad-sam", profile="shap_lecture")


@pytest.mark.parametrize("case", ["case0", "case1"])
def test_grad_sam_profile_equals_the_formula(case: str) -> None:
    e = load_author_model("bert").explain(bert_inputs(case), "grad-sam", profile="gradsam_lecture")
    assert replica_comparison.gap(e.scores, theirs("bert", "gradsam", case, "pred", "gradsam")) < 1e-10


def test_padding_counts_in_the_number_of_tokens() -> None:
    """The factor 1/N uses the given length N: three tokens of padding reduce every score."""
    ex = load_author_model("bert")
    unpadded = bert_inputs("case0")
    padded = {name: torch.nn.functional.pad(tensor, (0, 3)) for name, tensor in unpadded.items()}
    scores = ex.explain(unpadded, "grad-sam", profile="gradsam_lecture").scores
    padded_scores = ex.explain(padded, "grad-sam", profile="gradsam_lecture").scores
    assert len(padded_scores) == len(scores) + 3 and not np.allclose(scores, padded_scores[: len(scores)])
    np.testing.assert_allclose(padded_scores[: len(scores)] * len(padded_scores), scores * len(scores), rtol=1e-6)


# Running the lecture --------------------------------------------------------------------------------------------------


@cache
def run_zoo_lecture() -> clearhead.LectureResult:
    return clearhead.run_lecture(clearhead.load("zoo:sentiment"))


def test_lecture_predicts_and_ranks_five_sentences() -> None:
    result = run_zoo_lecture()
    assert len(result.sentences) == 5
    assert {sentence.text: sentence.label for sentence in result.sentences} == {
        "I like the movie": "POSITIVE",
        "I cannot wait for next time": "POSITIVE",
        "She hates the book": "NEGATIVE",
        "This is so boring": "NEGATIVE",
        "You look extremely confused": "NEGATIVE",
    }
    for text, word in (("hates", "hates"), ("boring", "boring"), ("confused", "confused")):
        sentence = next(sentence for sentence in result.sentences if text in sentence.text)
        assert sentence.rank_tokens("SHAP")[0] == sentence.rank_tokens("Grad-SAM")[0] == word
        assert sentence.rank_tokens("SHAP") != sentence.grad_sam.tokens, "special tokens are not ranked"


def test_fraction_of_cls_depends_on_the_method() -> None:
    """[CLS] has a large fraction in Grad-SAM by rows, less by columns; zero in SHAP, but not with one context alone."""
    for sentence in run_zoo_lecture().sentences:
        assert (
            sentence.compute_first_special_fraction("Grad-SAM")
            > 0.1
            > sentence.compute_first_special_fraction("Grad-SAM, by columns")
        )
        assert (
            sentence.compute_first_special_fraction("SHAP")
            == 0
            < sentence.compute_first_special_fraction("SHAP, as in the lecture")
        )
        assert list(sentence.compute_special_fractions("Grad-SAM")) == ["[CLS]", "[SEP]"]


def test_shap_as_in_the_lecture_equals_the_profile() -> None:
    """The target is class 1, also if the model predicts class 0."""
    sentence = next(sentence for sentence in run_zoo_lecture().sentences if sentence.label == "NEGATIVE")
    e, ex = sentence.by_method["SHAP, as in the lecture"], clearhead.load("zoo:sentiment")
    assert e.provenance["profile"] == "shap_lecture"
    assert (sentence.shap.target["index"], e.target["index"]) == (0, 1)
    np.testing.assert_allclose(e.scores, ex.explain(sentence.text, "shap", profile="shap_lecture").scores, atol=1e-6)
    methods = sentence.to_dict()["methods"]
    assert [methods[name]["label"] for name in ("SHAP", "SHAP, as in the lecture")] == ["NEGATIVE", "POSITIVE"]


def test_agreement_statistics_equal_their_definition() -> None:
    from scipy.stats import spearmanr

    for sentence in run_zoo_lecture().sentences:
        e, f = sentence.grad_sam, sentence.shap
        expected = spearmanr(e.scores[1:-1], np.abs(f.scores[1:-1])).statistic
        assert sentence.rank_correlation == pytest.approx(float(expected))
        assert (
            sentence.top_overlap
            == len(set(sentence.rank_tokens("SHAP")[:2]) & set(sentence.rank_tokens("Grad-SAM")[:2])) / 2
        )
    assert run_zoo_lecture().mean_rank_correlation == pytest.approx(
        np.mean([sentence.rank_correlation for sentence in run_zoo_lecture().sentences])
    )


def test_plot_contains_texts_and_statistics() -> None:
    from tests.render.test_mpl_explanation import drawn, written

    figure = run_zoo_lecture().plot()
    assert drawn(figure).std() > 0
    plot_text = " ".join(written(figure))
    for sentence in run_zoo_lecture().sentences:
        assert (
            sentence.text in plot_text
            and f"rank correlation {sentence.rank_correlation:.2f}".replace("-", "−") in plot_text
        )
    assert "1  boring" in plot_text and "Share of [CLS]" in plot_text and "SHAP, as in the lecture" in plot_text


@pytest.mark.parametrize("inputs", ["one text", [], [3], [("a", "pair")]], ids=str)
def test_inputs_other_than_sentences_are_rejected(inputs: Any) -> None:
    with pytest.raises(clearhead.InputError, match="list of sentences"):
        clearhead.run_lecture(replica_comparison.explainer("bert/classify"), inputs)


def test_image_classifier_is_rejected() -> None:
    with pytest.raises(clearhead.InputError, match="needs a text classifier"):
        clearhead.run_lecture(replica_comparison.explainer("vit/image"))


def test_model_without_class_one_is_rejected() -> None:
    config = transformers.BertConfig(
        vocab_size=330, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
    )
    ex = clearhead.load(transformers.BertForSequenceClassification(config), models.tokenizer("wordpiece"))
    with pytest.raises(clearhead.InputError, match=r"class 1, counted from 0, but .* has 1"):
        clearhead.run_lecture(ex, ["so"])


def test_single_word_has_no_rank_correlation() -> None:
    (sentence,) = clearhead.run_lecture(replica_comparison.explainer("bert/classify"), ["so"]).sentences
    assert np.isnan(sentence.rank_correlation) and sentence.top_overlap == 1
