"""Text models: classifiers of one text or a pair, decoders, masked language models, and model inputs."""

import copy
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Contrast, InputError, MaskedToken, UnsupportedError
from tests.models import PAIR, TEXT, TEXTS, explainer, text_model, tokenizer

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 70,
    "initializer_range": 0.3,
}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 70, "initializer_range": 0.3}


def make_classifier(architecture: str, kind: str = "bytes", **settings: Any) -> Any:
    """A tiny classifier of any architecture, with its tokenizer."""
    tok = tokenizer(kind)
    config_arguments = {"vocab_size": len(tok), "num_labels": 3, "pad_token_id": tok.pad_token_id, **settings}
    torch.manual_seed(7)
    config = getattr(transformers, f"{architecture}Config")(**config_arguments)
    return getattr(transformers, f"{architecture}ForSequenceClassification")(config).double().eval(), tok


# --- one text and pairs of texts


@pytest.mark.parametrize("name", TEXT)
def test_text_pair_has_segments_offsets_and_words(name: str) -> None:
    model, tok = text_model(name)
    e = clearhead.load(model, tok).explain(PAIR, method="generic")
    assert e.units.texts == PAIR and e.units.segments is not None and e.units.offsets is not None
    for i in e.units.content_indices():
        start, stop = e.units.offsets[i]
        piece = PAIR[e.units.segments[i]][start:stop].strip().lower()
        assert e.tokens[i].strip("#Ġ▁").lower() in (piece, "")
    words = e.words()
    names = [words.tokens[i] for i in words.units.content_indices()]
    assert "".join(names) == "".join(PAIR).replace(" ", "") and "movie" in names and "hates" in names
    # The logits equal those for the tokenizer's encoding of the pair.
    encoding = tok(*PAIR, return_tensors="pt")
    assert e.prediction["top"][0]["logit"] == pytest.approx(model(**encoding).logits.max().item())


def test_next_sentence_prediction_target_equals_logit() -> None:
    model, tok = text_model("bert", "ForNextSentencePrediction")
    e = clearhead.load(model, tok).explain(PAIR, target="goes on", method="generic")
    with torch.no_grad():
        logits = model(**tok(*PAIR, return_tensors="pt")).logits[0]
    assert e.target["value"] == pytest.approx(float(logits[0]))
    assert e.prediction["label"] == ("goes on", "does not")[int(logits.argmax())]
    assert np.abs(e.scores).max() > 0


def test_token_type_ids_reach_the_model() -> None:
    model, tok = text_model("bert")
    tok = copy.deepcopy(tok)
    tok.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    with torch.no_grad():
        model.bert.embeddings.token_type_embeddings.weight[1] += 1.0
    ex = clearhead.load(model, tok)
    sample = ex.adapter.make_samples(PAIR, clearhead.adapters.InputOptions())[0]
    assert sample.inputs["token_type_ids"].tolist() == tok(*PAIR)["token_type_ids"]
    pair_explanation, text_explanation = (
        ex.explain(PAIR, method="generic"),
        ex.explain(f"{PAIR[0]} [SEP] {PAIR[1]}", method="generic"),
    )
    assert (
        pair_explanation.tokens == text_explanation.tokens
        and np.abs(pair_explanation.scores - text_explanation.scores).max() > 1e-6
    )
    assert text_explanation.units.special == pair_explanation.units.special  # a typed [SEP] is a special token too


def test_unsupported_token_type_ids_are_dropped() -> None:
    for name, settings in (("roberta", {"type_vocab_size": 1}), ("distilbert", {})):
        model, tok = text_model(name, **settings)
        tok = copy.deepcopy(tok)
        tok.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        assert clearhead.load(model, tok).explain(PAIR, method="generic").tokens


def test_list_of_two_texts_is_not_a_pair() -> None:
    explanations = explainer("bert/classify").explain(list(PAIR), method="generic")
    assert isinstance(explanations, list) and [e.units.texts for e in explanations] == [(PAIR[0],), (PAIR[1],)]


def test_multi_label_probability_is_a_sigmoid() -> None:
    ex = explainer("bert/classify", problem_type="multi_label_classification")
    e = ex.explain(TEXTS[0], target=1, scale="probability", method="generic")
    logit = next(line["logit"] for line in e.prediction["top"] if line["index"] == 1)
    assert e.target["value"] == pytest.approx(1 / (1 + np.exp(-logit)))


def test_regression_value_equals_target_and_has_no_probability() -> None:
    ex = explainer("bert/classify", num_labels=1)
    e = ex.explain(TEXTS[0], method="generic")
    assert e.prediction["value"] == pytest.approx(e.target["value"]) and e.prediction["index"] == 0
    for scale in ("probability", "log-odds"):
        with pytest.raises(InputError, match=f"no {scale}"):
            ex.explain(TEXTS[0], scale=scale, method="generic")
    several = explainer("bert/classify", problem_type="regression").explain(TEXTS[0], method="generic")
    assert all("probability" not in line for line in several.prediction["top"])
    assert several.prediction["value"] == max(line["logit"] for line in several.prediction["top"])


# --- truncation


def test_truncation_is_reported_and_tokenizer_is_unchanged() -> None:
    model, tok = text_model("bert")
    before = copy.deepcopy(tok.__dict__.get("init_kwargs")), tok.truncation_side, tok.backend_tokenizer.to_str()
    ex = clearhead.load(model, tok)
    text = "one two three four five six seven eight"
    whole = ex.explain(text, method="generic")
    assert whole.certificate["truncated_tokens"] == 0
    right = ex.explain(text, max_length=8, method="generic")
    left = ex.explain(text, max_length=8, truncation_side="left", method="generic")
    for cut in (left, right):
        assert len(cut) == 8 and cut.certificate["truncated_tokens"] == len(whole) - 8
        assert cut.units.texts == (text,)
    assert right.tokens[1:-1] == whole.tokens[1:7] and left.tokens[1:-1] == whole.tokens[-7:-1]
    assert right.units.offsets[1:-1] == whole.units.offsets[1:7]  # type: ignore[index]
    assert ex.explain(text, max_length=8, method="generic").tokens == right.tokens  # the truncation side is not kept
    after = copy.deepcopy(tok.__dict__.get("init_kwargs")), tok.truncation_side, tok.backend_tokenizer.to_str()
    assert before == after


def test_text_is_truncated_to_the_model_position_limit() -> None:
    for name in ("bert", "roberta"):
        model, tok = text_model(name)
        tok = copy.deepcopy(tok)
        tok.model_max_length = 10**30
        e = clearhead.load(model, tok).explain("boring " * 100, method="generic")
        # RoBERTa numbers positions from its padding index: two of the 70 positions are not usable.
        assert len(e) == (70 if name == "bert" else 70 - tok.pad_token_id - 1) and e.certificate["truncated_tokens"] > 0


def test_truncation_keeps_both_texts_of_a_pair() -> None:
    e = explainer("bert/classify").explain(("good " * 30, "bad " * 30), max_length=20, method="generic")
    assert len(e) == 20 and {e.units.segments[i] for i in e.units.content_indices()} == {0, 1}  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncation": False, "max_length": 6}, "tokens, but the model takes at most 6"),
        ({"max_length": 2}, "leaves no room for the text next to the special tokens"),
        ({"max_length": 0}, "max_length=0 is not valid"),
        ({"max_length": "9"}, "max_length='9' is not valid"),
        ({"truncation_side": "up"}, "use 'left' or 'right'"),
        ({"tokens": ["a"]}, "names the units of model inputs"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        explainer("bert/classify").explain(TEXTS[1], **options)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", "the text is empty"),
        (" \n\t", "the text is empty"),
        (("good", " "), "the text is empty"),
        ("\u200b", "drops all of it"),
        (5, "expected a text"),
        (("a", "b", "c"), "expected a text"),
        ((1, "b"), "expected a text"),
        ([], "the list is empty"),
        (None, "nothing to explain"),
    ],
)
def test_invalid_texts_raise(raw: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        explainer("bert/classify").explain(raw, method="generic")


@pytest.mark.parametrize("invalid_text", ["", 3, "half of a \ud800 pair"])
def test_error_names_the_index_of_the_invalid_input(invalid_text: Any) -> None:
    ex = explainer("bert/classify")
    with pytest.raises(InputError) as alone:
        ex.explain(invalid_text, method="generic")
    for call in (ex.explain, lambda raw_inputs: ex.record(raw_inputs, ("attention",))):
        with pytest.raises(InputError, match=re.escape(f"input 1: {alone.value}")):
            call([TEXTS[0], invalid_text])


def test_tokens_added_after_loading_are_used() -> None:
    model, original = text_model("bert")
    tok = copy.deepcopy(original)
    ex = clearhead.load(model, tok)
    assert ex.explain("zebrafish", method="generic").tokens[1] == "[UNK]"
    tok.add_tokens(["zebrafish"])
    with pytest.raises(InputError, match=r"encodes 'zebrafish' as id \d+, but the model's vocabulary has \d+ tokens"):
        ex.explain("zebrafish", method="generic")
    model.resize_token_embeddings(len(tok))
    assert (
        ex.explain("zebrafish", method="generic").tokens
        == clearhead.load(model, tok).explain("zebrafish", method="generic").tokens
    )
    assert ex.explain("zebrafish", method="generic").tokens[1] == "zebrafish"


def test_quantised_layers_reject_gradient_methods() -> None:
    model, tok = text_model("bert", dtype=torch.float32)
    quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    ex = clearhead.load(quantised, tok)
    for method in ("saliency", "generic", "integrated-gradients"):
        with pytest.raises(UnsupportedError, match="quantised by torch, whose layers have no gradients"):
            ex.explain(TEXTS[0], method=method)
    assert np.abs(ex.explain(TEXTS[0], method="occlusion").scores).max() > 0


def test_progress_that_drops_batches_raises() -> None:
    with pytest.raises(InputError, match="progress= must yield every batch"):
        explainer("bert/classify").explain(TEXTS, batch_size=1, progress=lambda batches: batches[:1], method="generic")


# --- read-out positions


def make_mean_pooled_classifier(config: Any) -> Any:
    """A subclass of the BERT classifier that reads out the mean of all tokens."""

    class MeanPooled(transformers.BertForSequenceClassification):
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **arguments: Any
        ) -> Any:
            hidden = self.bert(input_ids, attention_mask, token_type_ids, **arguments).last_hidden_state
            mask = attention_mask[..., None].to(hidden.dtype)
            logits = self.classifier((hidden * mask).sum(1) / mask.sum(1))
            return transformers.modeling_outputs.SequenceClassifierOutput(logits=logits)

    return MeanPooled(config)


def test_wrong_readout_raises() -> None:
    model, tok = text_model("bert")
    pooled = make_mean_pooled_classifier(model.config).double().eval()
    pooled.load_state_dict(model.state_dict())
    for method in ("generic", "rollout"):
        with pytest.raises(UnsupportedError, match="taken to be 'first'"):
            clearhead.load(pooled, tok).explain(TEXTS[0], method)
    right = clearhead.load(pooled, tok, readout="mean").explain(TEXTS[0], method="generic")
    assert right.certificate["readout"] == "mean" and right.certificate["readout_checked"]
    for wrong in ("mean", "last", "patches"):  # too many positions, and wrong positions
        with pytest.raises(UnsupportedError, match="taken to be"):
            clearhead.load(model, tok, readout=wrong).explain(TEXTS[0], method="generic")
    with pytest.raises(InputError, match="unknown readout 'frist': did you mean 'first'"):
        clearhead.load(model, tok, readout="frist").explain(TEXTS[0], method="generic")


def test_mean_readout_excludes_masked_tokens() -> None:
    model, tok = text_model("modernbert", classifier_pooling="mean")
    ex = clearhead.load(model, tok)
    ids = torch.tensor([[tok.pad_token_id, 9, 10, 11]])
    e = ex.explain({"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1, 1]])}, method="generic")
    assert e.certificate["readout"] == "mean" and e.certificate["readout_checked"] and e.units.special[0]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("GPT2", GPT2),
        ("Llama", {**SMALL, "num_key_value_heads": 2}),
        ("Qwen2", {**SMALL, "num_key_value_heads": 2}),
        ("GPTNeoX", SMALL),
        ("StableLm", {**SMALL, "num_key_value_heads": 4}),
    ],
)
def test_decoder_classifiers_read_out_at_the_last_token(architecture: str, settings: dict[str, Any]) -> None:
    model, tok = make_classifier(architecture, **settings)
    ex = clearhead.load(model, tok)
    singles = [ex.explain(text, ["generic", "input-x-gradient"]) for text in TEXTS]
    together = ex.explain(TEXTS, ["generic", "input-x-gradient"], batch_size=3)
    for i, single in enumerate(singles):
        assert single["generic"].certificate["readout"] == "last" and single["generic"].certificate["readout_checked"]
        for method, e in single.items():
            assert e.scores == pytest.approx(together[method][i].scores, abs=1e-6), method
        assert single["generic"].prediction["top"][0]["logit"] == pytest.approx(
            together["generic"][i].prediction["top"][0]["logit"], abs=1e-6
        )


def test_model_pad_token_id_overrides_the_tokenizer() -> None:
    model, tok = make_classifier("GPT2", **GPT2)
    model.config.pad_token_id = tok.unk_token_id  # not that of the tokenizer
    ex = clearhead.load(model, tok)
    for single, batched in zip(
        [ex.explain(text, method="generic") for text in TEXTS], ex.explain(TEXTS, method="generic"), strict=True
    ):
        assert single.scores == pytest.approx(batched.scores, abs=1e-9)
    # A text that ends with the padding token is read out before it, as in the model.
    e = ex.explain(
        {"input_ids": torch.tensor([[9, 10, 11, tok.unk_token_id]]), "attention_mask": torch.ones(1, 4)},
        method="generic",
    )
    assert e.certificate["readout_checked"] and len(e) == 4


def test_decoder_batch_without_pad_token_raises() -> None:
    model, tok = make_classifier("GPT2", **GPT2)
    model.config.pad_token_id = None
    ex = clearhead.load(model, tok)
    with pytest.raises(InputError, match=r"set model\.config\.pad_token_id"):
        ex.explain(TEXTS, method="generic")
    assert len(ex.explain(TEXTS, batch_size=1, method="generic")) == 3


# --- unsupported models

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "Bart": (
        {
            **{"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 2},
        },
        "encoder–decoder",
    ),
    "T5": (
        {"d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32, "eos_token_id": 2},
        "encoder–decoder",
    ),
    "XLNet": ({"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32}, "a copy that its output does not depend on"),
    "BigBird": (SMALL, "block-sparse attention"),
    "Nystromformer": (SMALL, "landmarks"),
    "Canine": (SMALL, "no table of token embeddings"),
    "IBert": (SMALL, "integers"),
    "CTRL": ({"n_embd": 32, "n_layer": 1, "n_head": 4, "dff": 32}, "in place"),
}


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_unsupported_architectures_raise(architecture: str) -> None:
    settings, message = UNSUPPORTED[architecture]
    with pytest.raises(UnsupportedError, match=message):
        clearhead.load(*make_classifier(architecture, **settings))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Funnel", {"d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 48}),
        ("Longformer", {**SMALL, "attention_window": [4, 4]}),
        ("FNet", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 70}),
    ],
)
def test_attention_not_over_tokens_raises(architecture: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"does not run over its|no attention call|no attention map"):
        clearhead.load(*make_classifier(architecture, **settings)).explain(TEXTS[0], method="generic")


def test_bare_encoder_requires_target_function() -> None:
    model, tok = text_model("bert", "Model")
    ex = clearhead.load(model, tok)
    with pytest.raises(InputError, match="has no classes"):
        ex.explain(TEXTS[0], method="generic")
    e = ex.explain(TEXTS[0], "input-x-gradient", target=lambda output: output.last_hidden_state[:, 0, 0])
    assert e.prediction == {} and e.target["kind"] == "callable" and not e.certificate["readout_checked"]


# --- model inputs instead of a text


def test_model_inputs_equal_raw_text() -> None:
    for name in ("bert", "roberta", "albert"):
        model, tok = text_model(name)
        ex = clearhead.load(model, tok)
        alone = ex.explain(TEXTS, method="generic")
        batch = ex.explain(tok(TEXTS, padding=True, return_tensors="pt"), method="generic")
        for from_text, from_inputs in zip(alone, batch, strict=True):
            assert from_text.tokens == from_inputs.tokens and from_text.units.special == from_inputs.units.special
            assert from_text.scores == pytest.approx(from_inputs.scores, abs=1e-9)
            if name != "bert" or "'" not in from_text.units.texts[0]:  # WordPiece loses the spaces around an apostrophe
                assert [w.lower() for w in from_text.words().tokens] == [w.lower() for w in from_inputs.words().tokens]


def test_model_inputs_of_a_pair_keep_both_texts() -> None:
    model, tok = text_model("roberta")
    e = clearhead.load(model, tok).explain(dict(tok(*PAIR, return_tensors="pt")), method="generic")
    assert e.units.texts == PAIR and e.words().tokens[-4:-1] == ["hates", "the", "book"]


def test_model_inputs_work_without_tokenizer() -> None:
    model, tok = text_model("bert")
    ex = clearhead.load(model)
    ids = tok(TEXTS[0], return_tensors="pt")["input_ids"]
    e = ex.explain({"input_ids": ids}, method="generic")
    assert e.tokens == [str(i) for i in range(ids.shape[1])] and not any(e.units.special)
    names = tok.convert_ids_to_tokens(ids[0])
    named = ex.explain({"input_ids": ids}, tokens=names, method="generic")
    assert named.tokens == names and named.scores == pytest.approx(e.scores)
    assert "movie" in named.words().tokens
    embeds = model.get_input_embeddings()(ids).detach()
    by_vectors = ex.explain({"inputs_embeds": embeds}, ["generic", "input-x-gradient"])
    assert by_vectors["generic"].scores == pytest.approx(e.scores)
    assert by_vectors["input-x-gradient"].scores == pytest.approx(
        ex.explain({"input_ids": ids}, "input-x-gradient").scores
    )
    with pytest.raises(InputError, match="without a tokenizer"):
        ex.explain("text", method="generic")


def test_lists_of_model_inputs_accept_lists_of_token_names() -> None:
    ex = clearhead.load(text_model("bert")[0])
    first, second = {"input_ids": [[5, 6, 7]]}, {"input_ids": torch.tensor([[5, 6], [8, 9]])}
    assert [len(e) for e in ex.explain([first, second], method="generic")] == [3, 2, 2]
    assert isinstance(ex.explain(second, method="generic"), list) and not isinstance(
        ex.explain(first, method="generic"), list
    )
    es = ex.explain([first, first], tokens=[["a", "b", "c"], ["d", "e", "f"]], method="generic")
    assert [e.tokens for e in es] == [["a", "b", "c"], ["d", "e", "f"]]
    assert [e.tokens for e in ex.explain(second, tokens=[["a", "b"], ["c", "d"]], method="generic")] == [
        ["a", "b"],
        ["c", "d"],
    ]
    with pytest.raises(InputError, match="pass a list of lists"):
        ex.explain([first, first], tokens=["a", "b", "c"], method="generic")
    with pytest.raises(InputError, match="names the units of 1 inputs, but there are 2"):
        ex.explain(second, tokens=["a", "b"], method="generic")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "contain nothing"),
        ({"attention_mask": torch.ones(1, 2)}, "but contain attention_mask"),
        ({"input_ids": torch.tensor([5, 6])}, "must be batch × token"),
        ({"input_ids": torch.ones(1, 2, 2).long()}, "must be batch × token"),
        ({"input_ids": torch.ones(1, 0).long()}, "must be batch × token"),
        ({"input_ids": torch.ones(0, 3).long()}, "same batch size"),
        ({"input_ids": torch.tensor(5)}, "batch axis"),
        ({"input_ids": "text"}, "must be tensors"),
        ({"input_ids": [[1, 2], [3]]}, "must be tensors"),
        ({"input_ids": torch.ones(1, 3)}, "integers"),
        ({"input_ids": torch.full((1, 3), 99999)}, "integers from 0"),
        ({"input_ids": torch.full((1, 3), -1)}, "integers from 0"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)}, "for each of the 3 tokens"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(2, 3)}, "have the same batch size"),
        ({"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.zeros(1, 3)}, "excludes every token"),
        ({"input_ids": torch.ones(1, 3).long(), "inputs_embeds": torch.ones(1, 3, 32)}, "either"),
        ({"input_ids": torch.ones(1, 3).long(), "colour": torch.ones(1, 3)}, "does not take colour"),
        ({"inputs_embeds": torch.ones(1, 3, 31)}, "32 features per token, not 31"),
        ({"inputs_embeds": torch.ones(1, 3)}, "token × width"),
        ({"input_ids": torch.ones(1, 71).long()}, "more than the model's maximum"),
    ],
)
def test_invalid_model_inputs_raise(raw: Any, message: str) -> None:
    ex = clearhead.load(text_model("bert")[0])
    with pytest.raises(InputError, match=message):
        ex.explain(raw, method="generic")


# --- slow tokenizers


def test_slow_tokenizer_words_are_aligned_with_the_text() -> None:
    from tests.test_units import sentencepiece

    tok = sentencepiece("slow")
    assert not tok.is_fast
    model, _ = text_model("bert", vocab_size=len(tok), pad_token_id=tok.pad_token_id)
    ex = clearhead.load(model, tok)
    e = ex.explain("I like the wonderful movie, isn't it?", method="generic")
    assert e.units.offsets is not None
    assert [name for name in e.words().tokens if name not in ("<s>", "</s>")] == [
        *("I", "like", "the", "wonderful", "movie", ",", "isn't", "it", "?"),
    ]
    # After truncation the offsets are ambiguous: words are built from the markers of the pieces.
    assert len(ex.explain("I like the wonderful movie", max_length=6, method="generic").words()) < 6


# --- masked language models


@pytest.mark.parametrize("name", TEXT)
def test_masked_position_is_the_readout(name: str) -> None:
    model, tok = text_model(name, "ForMaskedLM")
    ex = clearhead.load(model, tok)
    for text in (f"I like the {tok.mask_token}.", f"{tok.mask_token} is so boring"):
        e = ex.explain(text, method="generic")
        position = e.tokens.index(tok.mask_token)
        assert not e.units.special[position] and e.certificate["readout"] == "mask" and e.certificate["readout_checked"]
        ids = torch.tensor([tok(text)["input_ids"]])
        logits = model(ids).logits[0, position]
        assert e.prediction["index"] == int(logits.argmax())
        assert e.target["value"] == pytest.approx(logits.max().item(), abs=1e-6)
        assert len(e.prediction["top"]) == 5


def test_several_masks_require_mask_index() -> None:
    ex = explainer("bert/mask")
    text = "I [MASK] the [MASK]"
    with pytest.raises(InputError, match="2 masked positions: choose one"):
        ex.explain(text, method="generic")
    first, second = (ex.explain(text, target=MaskedToken(mask_index=mask), method="generic") for mask in (0, 1))
    assert first.target["value"] != second.target["value"]
    assert ex.explain(text, target=MaskedToken(mask_index=-1), method="generic").scores == pytest.approx(second.scores)
    assert ex.explain(text, "cat", target=Contrast("the", "is", mask_index=1)).target["kind"] == "contrast"
    for wrong in (2, -3):
        with pytest.raises(InputError, match="has 2 masked positions"):
            ex.explain(text, target=MaskedToken(mask_index=wrong), method="generic")
    by_function = ex.explain(text, "input-x-gradient", target=lambda output: output.logits[:, 2, 7])
    assert by_function.target["kind"] == "callable"


@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
def test_masked_lm_accepts_word_and_id_targets(name: str) -> None:
    model, tok = text_model(name, "ForMaskedLM")
    ex = clearhead.load(model, tok)
    text = f"I like {tok.mask_token}"
    vocab = tok.get_vocab()
    mark = {"bert": "", "roberta": "Ġ", "albert": "▁"}[name]
    word = next(
        w for w in ("the", "is", "it", "and", "boring") if (mark + w in vocab and w in vocab) or mark + w in vocab
    )
    for target in (word, f" {word}" if name == "roberta" else word, MaskedToken(word), vocab[mark + word]):
        assert ex.explain(text, target=target, method="generic").target["index"] == vocab[mark + word]
    assert ex.explain(text, target=word, method="generic").target["name"] == word
    both = ex.explain(text, "input-x-gradient", target=Contrast(word, vocab[mark + word] + 1), scale="log-odds")
    assert both.target["scale"] == "log-odds"
    with pytest.raises(InputError, match="is not a single token of the vocabulary"):
        ex.explain(text, target="incomprehensibilities", method="generic")
    with pytest.raises(InputError, match="does not exist: the vocabulary has"):
        ex.explain(text, target=10**6, method="generic")


def test_masked_lm_accepts_subword_targets() -> None:
    ex = explainer("bert/mask")
    piece = next(name for name in tokenizer("wordpiece").get_vocab() if name.startswith("##"))
    assert (
        ex.explain("so [MASK]", target=piece, method="generic").target["index"]
        == tokenizer("wordpiece").get_vocab()[piece]
    )
    ex = explainer("roberta/mask")
    half = tokenizer("bytes").get_vocab()["Ã"]  # a token of half a character
    assert ex.explain("so <mask>", target=half, method="generic").target["name"] == "Ã"


def test_missing_mask_raises() -> None:
    ex = explainer("bert/mask")
    with pytest.raises(InputError, match=r"write \[MASK\] where the model should predict"):
        ex.explain("no mask", method="generic")
    with pytest.raises(InputError, match="truncated, possibly including the masked one"):
        ex.explain("so boring a film and so [MASK]", max_length=5, method="generic")
    with pytest.raises(InputError, match="pass input_ids"):
        ex.explain({"inputs_embeds": torch.ones(1, 3, 32)}, method="generic")
    alone = clearhead.load(text_model("bert", "ForMaskedLM")[0])
    with pytest.raises(InputError, match="load the tokenizer"):
        alone.explain({"input_ids": torch.tensor([[5, 6]])}, method="generic")
    with pytest.raises(InputError, match="no masked position"):
        ex.explain({"input_ids": torch.tensor([[5, 6]])}, method="generic")


class OverlapCountingTokenizer:
    """A tokenizer that counts overlapping calls from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self.__dict__.update(tokenizer=tokenizer, inside=0, overlaps=0)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.tokenizer, name)
        return self._count_overlaps(attribute) if callable(attribute) else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.tokenizer, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._count_overlaps(self.tokenizer)(*args, **kwargs)

    def _count_overlaps(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            state = self.__dict__
            state["overlaps"] += state["inside"] > 0
            state["inside"] += 1
            time.sleep(1e-4)  # lets another thread run
            try:
                return function(*args, **kwargs)
            finally:
                state["inside"] -= 1

        return call


def test_threads_do_not_change_each_others_truncation() -> None:
    ex = explainer("bert/mask")
    ex.explain("I [MASK] it.", method="generic")
    counting_tokenizer = ex.adapter.processor = OverlapCountingTokenizer(ex.adapter.processor)
    long = "the [MASK] " + "boring book " * 20
    stop = threading.Event()

    def look_up_labels() -> None:
        while not stop.is_set():
            assert ex.adapter.label_name(ex.adapter.label_index("book")) == "book"

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(look_up_labels)
        lengths = {len(ex.explain(long, max_length=12, method="generic")) for _ in range(15)}
        stop.set()
        other.result()
    assert lengths == {12} and counting_tokenizer.__dict__["overlaps"] == 0


def test_max_length_must_be_a_positive_integer() -> None:
    ex = explainer("bert/classify")
    assert len(ex.explain(TEXTS[1], max_length=np.int64(6), method="generic")) == 6
    for wrong in (True, 6.0, 0, np.int64(0), "6"):
        with pytest.raises(InputError, match=r"max_length=.* is not valid"):
            ex.explain(TEXTS[1], max_length=wrong, method="generic")  # type: ignore[arg-type]


def test_pad_token_id_is_read_from_nested_text_config():
    """Gemma 3 has its pad_token_id in its nested text config."""
    text = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, num_labels=3)
    torch.manual_seed(0)
    ex = clearhead.load(transformers.Gemma3ForSequenceClassification(config).double().eval())
    short, long = {"input_ids": torch.tensor([[5, 6, 7, 8]])}, {"input_ids": torch.arange(9, 16)[None]}
    alone, batched = (
        ex.explain(short, target=1, method="generic"),
        ex.explain([short, long], target=1, method="generic")[0],
    )
    assert np.allclose(batched.scores, alone.scores, rtol=1e-5)
    assert np.isclose(batched.target["value"], alone.target["value"], rtol=1e-5)
