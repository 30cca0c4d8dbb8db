"""Encoder–decoders: source × target in one call, held to a slow replica that makes one pass a word."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import clearhead
from clearhead import Contrast, GeneratedToken, InputError, UnsupportedError
from clearhead.adapters import InputOptions
from clearhead.methods import METHOD_REGISTRY
from tests import models
from tests.invariants import model_snapshot

WORDS = models.tokenizer("bytes")
_IDS = {"vocab_size": len(WORDS), "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_BODY = {
    **_IDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 70,
    "init_std": 0.3,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_T5 = {
    **_IDS,
    "d_model": 32,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 4,
    "d_ff": 48,
    "decoder_start_token_id": 1,
    "initializer_factor": 2.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", _BODY),
    "mbart": ("MBartForConditionalGeneration", _BODY),
    "marian": ("MarianMTModel", {**_BODY, "decoder_start_token_id": 1, "share_encoder_decoder_embeddings": False}),
    "pegasus": ("PegasusForConditionalGeneration", {**_BODY, "decoder_start_token_id": 1}),
    "t5": ("T5ForConditionalGeneration", _T5),
}
SOURCES = ["I like the movie", "She hates the book because it is long", "So"]
ANSWERS = ["and the book", "a film", "boring!"]
STREAMS = ("source", "prefix")
#: How near two ways must be: before T5 used the attention interface, it computed its softmax in float32.
NEAR = dict.fromkeys(FAMILIES, 1e-9) | {name: 1e-5 for name in models.NOT_YET if name in FAMILIES}


def made(family: str) -> Any:
    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(7)
    return cls(cls.config_class(**settings)).double().eval()


@cache
def explainer(family: str = "bart") -> clearhead.Explainer:
    return clearhead.load(made(family), WORDS)


@dataclass
class Seen:
    """The maps of one pass and their gradients, head by head: encoder, decoder and across, layer by layer."""

    maps: dict[str, list[np.ndarray]]
    gradients: dict[str, list[np.ndarray]]
    vectors: dict[str, np.ndarray]
    vector_gradients: dict[str, np.ndarray]


def watch(model: Any, source: torch.Tensor, prefix: torch.Tensor, word: int) -> Seen:
    """One plain pass over a source and what was said before the word."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    vectors = {
        "source": twin.get_encoder().get_input_embeddings()(source[None]).detach().requires_grad_(),
        "prefix": twin.get_decoder().get_input_embeddings()(prefix[None]).detach().requires_grad_(),
    }
    output = twin(
        inputs_embeds=vectors["source"],
        decoder_inputs_embeds=vectors["prefix"],
        output_attentions=True,
        use_cache=False,
    )
    maps = {
        "source": list(output.encoder_attentions),
        "prefix": list(output.decoder_attentions),
        "across": list(output.cross_attentions),
    }
    flat = [part for parts in maps.values() for part in parts]
    found = torch.autograd.grad(output.logits[0, -1, word], [*flat, *vectors.values()])
    numbers = [part[0].numpy() for part in found]
    gradients: dict[str, list[np.ndarray]] = {}
    for name, parts in maps.items():
        gradients[name], numbers = numbers[: len(parts)], numbers[len(parts) :]
    return Seen(
        maps={name: [part[0].detach().numpy() for part in parts] for name, parts in maps.items()},
        gradients=gradients,
        vectors={name: part[0].detach().numpy() for name, part in vectors.items()},
        vector_gradients=dict(zip(vectors, numbers, strict=True)),
    )


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A matrix product as it is defined."""
    found = np.zeros((len(a), b.shape[1]))
    for i in range(len(a)):
        for j in range(b.shape[1]):
            found[i, j] = sum(a[i, k] * b[k, j] for k in range(len(b)))
    return found


def bar(attention: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Equation 5: E_h[(∇A ⊙ A)⁺]."""
    heads, rows, columns = attention.shape
    found = np.zeros((rows, columns))
    for i in range(rows):
        for j in range(columns):
            found[i, j] = sum(max(gradient[h, i, j] * attention[h, i, j], 0.0) for h in range(heads)) / heads
    return found


def normalised(relevance: np.ndarray) -> np.ndarray:
    """Equations 8 and 9; a row of zeros stays one."""
    rest = relevance - np.eye(len(relevance))
    for row in rest:
        total = row.sum()
        if abs(total) > 1e-14:
            row /= total
    return rest + np.eye(len(relevance))


def generic(seen: Seen) -> dict[str, np.ndarray]:
    """Rules 5 to 10 in the order of the layers (equation 11 needs an encoder that looks at the decoder)."""
    source, prefix = seen.maps["across"][0].shape[2], seen.maps["across"][0].shape[1]
    r_qq, r_ss, r_sq = np.eye(source), np.eye(prefix), np.zeros((prefix, source))
    for attention, gradient in zip(seen.maps["source"], seen.gradients["source"], strict=True):
        r_qq = r_qq + product(bar(attention, gradient), r_qq)
    for layer in range(len(seen.maps["prefix"])):
        within = bar(seen.maps["prefix"][layer], seen.gradients["prefix"][layer])
        r_ss, r_sq = r_ss + product(within, r_ss), r_sq + product(within, r_sq)
        across = bar(seen.maps["across"][layer], seen.gradients["across"][layer])
        r_sq = r_sq + product(product(normalised(r_ss).T, across), normalised(r_qq))
    return {"source": r_sq[-1], "prefix": r_ss[-1] - np.eye(prefix)[-1]}


def rollout(seen: Seen) -> dict[str, np.ndarray]:
    """R_ssᵀ · E_h A(last) · R_qq, each R a product of (E_h A + I)/2."""
    rolled = {}
    for stream in STREAMS:
        rolled[stream] = np.eye(seen.maps[stream][0].shape[1])
        for attention in seen.maps[stream]:
            rolled[stream] = product((attention.mean(0) + np.eye(len(rolled[stream]))) / 2, rolled[stream])
    across = product(product(rolled["prefix"].T, seen.maps["across"][-1].mean(0)), rolled["source"])
    return {"source": across[-1], "prefix": rolled["prefix"][-1]}


def attention(seen: Seen) -> dict[str, np.ndarray]:
    return {"source": seen.maps["across"][-1].mean(0)[-1], "prefix": seen.maps["prefix"][-1].mean(0)[-1]}


def gradcam(seen: Seen) -> dict[str, np.ndarray]:
    def last(name: str) -> np.ndarray:
        pairs = zip(seen.maps[name][-1], seen.gradients[name][-1], strict=True)
        return np.maximum(np.mean([gradient.mean() * one for one, gradient in pairs], axis=0), 0)[-1]

    return {"source": last("across"), "prefix": last("prefix")}


def saliency(seen: Seen) -> dict[str, np.ndarray]:
    return {stream: np.sqrt((seen.vector_gradients[stream] ** 2).sum(-1)) for stream in STREAMS}


def input_x_gradient(seen: Seen) -> dict[str, np.ndarray]:
    return {stream: (seen.vectors[stream] * seen.vector_gradients[stream]).sum(-1) for stream in STREAMS}


TWINS = {
    "generic": generic,
    "rollout": rollout,
    "attention": attention,
    "attention-gradcam": gradcam,
    "saliency": saliency,
    "input-x-gradient": input_x_gradient,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_word_is_what_a_slow_pass_of_its_own_says(family):
    """Three texts of different lengths with answers of different lengths, in one batch."""
    ex = explainer(family)
    results = ex.explain(SOURCES, list(TWINS), answer=ANSWERS)
    for i, (source, answer) in enumerate(zip(SOURCES, ANSWERS, strict=True)):
        (sample,) = ex.adapter.make_samples(source, InputOptions(continuation=answer))
        ids, prefix = sample.inputs["input_ids"], sample.inputs["decoder_input_ids"]
        assert sample.continuation_ids == tuple(prefix[sample.first_predicting_row + 1 :].tolist())
        for step, word in enumerate(sample.continuation_ids):
            before = prefix[: sample.first_predicting_row + step + 1]
            seen = watch(ex.adapter.model, ids, before, word)
            for method, twin in TWINS.items():
                expected = twin(seen)
                for stream in STREAMS:
                    part = results[method][i][stream]
                    row, size = part.matrix[step], np.abs(part.matrix).max()
                    length = len(expected[stream])
                    assert np.abs(row[:length] - expected[stream]).max() <= NEAR[family] * size, (method, stream, step)
                    assert not row[length:].any(), "words that come later have no say"


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logits_are_real_and_every_line_says_why(family):
    ex = explainer(family)
    lines = {line.name: line for line in ex.methods()}
    assert all(lines[name].applies for name in (*TWINS, "random", "position"))
    assert all(line.applies or len(line.why_not.split()) > 8 for line in lines.values())
    assert "streams look at each other" in lines["cat"].why_not
    certificate = ex.explain(SOURCES[0], max_new_tokens=3).certificate
    assert certificate["capture_error"] <= 1e-9 and certificate["readout_checked"]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_change_the_models_own_logits(family):
    """So the law may be asked."""
    ex = explainer(family)
    samples = [ex.adapter.make_samples(*pair)[0] for pair in zip(SOURCES, map(_how, ANSWERS), strict=True)]
    with torch.no_grad():
        together = ex.adapter.model(**ex.adapter.collate(samples)).logits
        for i, sample in enumerate(samples):
            alone = ex.adapter.model(**ex.adapter.collate([sample])).logits[0]
            assert (together[i, : len(alone)] - alone).abs().max() <= NEAR[family] * alone.abs().max()


def _how(answer: str) -> InputOptions:
    return InputOptions(continuation=answer)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_batched_is_single_for_every_method(family):
    ex = explainer(family)
    methods = [
        line.name
        for line in ex.methods()
        if line.applies and METHOD_REGISTRY[line.name].declaration.pass_type == "tape"
    ]
    together = ex.explain(SOURCES[::-1], methods, answer=ANSWERS[::-1])
    for source, answer, place in zip(SOURCES, ANSWERS, (2, 1, 0), strict=True):
        for method, e in ex.explain(source, methods, answer=answer).items():
            other = together[method][place]
            assert other.steps == e.steps and other.streams == STREAMS
            for stream in STREAMS:
                one, two = e[stream], other[stream]
                assert one.tokens == two.tokens
                assert np.abs(one.matrix - two.matrix).max() <= NEAR[family] * np.abs(one.matrix).max(), method


def test_padded_inputs_are_unpadded_ones():
    ex = explainer()
    ids = torch.tensor([[0, 40, 41, 42, 2]])
    plain = ex.explain({"input_ids": ids, "decoder_input_ids": torch.tensor([[2, 50, 51]])})
    longer = {
        "input_ids": torch.cat([ids, torch.ones(1, 2, dtype=torch.long)], 1),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
        "decoder_input_ids": torch.tensor([[2, 50, 51, 1]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    padded = ex.explain(longer)
    for stream in STREAMS:
        assert padded[stream].tokens == plain[stream].tokens
        assert np.allclose(padded[stream].matrix, plain[stream].matrix, rtol=1e-9)


def test_left_padding_of_the_prefix_is_explained_as_the_model_computes_it():
    """T5's positions are relative. BART counts the padding, so that its words would be others without it."""
    given = {
        "input_ids": torch.tensor([[0, 40, 41, 42, 2]]),
        "decoder_input_ids": torch.tensor([[1, 1, 2, 50, 51]]),
        "decoder_attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    }
    ex = explainer("t5")
    values = [step["value"] for step in ex.explain(given).target["steps"]]
    logits = ex.adapter.model(**given).logits[0]
    assert values == pytest.approx([logits[2, 50].item(), logits[3, 51].item()], abs=1e-5)
    with pytest.raises(InputError, match="computes other logits with the 2 padding tokens in front"):
        explainer("bart").explain(given)
    with pytest.raises(InputError, match="may hide padding around decoder_input_ids, and nothing else"):
        explainer("bart").explain({**given, "decoder_attention_mask": torch.tensor([[1, 1, 0, 1, 1]])})


def test_an_input_alone_asks_for_all_that_the_model_says():
    ex = explainer()
    e = ex.explain(SOURCES[0], max_new_tokens=4)
    said = ex.adapter.model.generate(**WORDS(SOURCES[0], return_tensors="pt"), max_new_tokens=4, do_sample=False)[0]
    assert [step["index"] for step in e.target["steps"]] == said[1:].tolist()
    assert e["source"].tokens == WORDS.convert_ids_to_tokens(WORDS(SOURCES[0])["input_ids"])
    assert e["prefix"].tokens == WORDS.convert_ids_to_tokens(said.tolist()) and e["prefix"].units.special[0]
    assert e["source"].matrix.shape == (4, len(e["source"])) and e["prefix"].matrix.shape == (4, 5)
    for stream in STREAMS:
        assert np.allclose(e[stream].scores, e[stream].matrix.sum(0))
        second = ex.explain(SOURCES[0], target=GeneratedToken(1))[stream].scores
        assert np.allclose(second[: len(e[stream])], e[stream].matrix[1][: len(second)])
    assert e.step(2).target["place"] == 2
    first = ex.explain(SOURCES[0], target=7)
    assert first.target["index"] == 7 and first.target["place"] == 0 and len(first["prefix"]) == 1
    assert ex.explain(SOURCES[0], target=Contrast(7, 9)).target["against"] == ex.adapter.label_name(9)
    foil = ex.explain(SOURCES[0], target=GeneratedToken(1, against=9), answer=ANSWERS[0])
    assert foil.target["kind"] == "contrast" and foil.target["place"] == 1


def test_marks_before_the_first_word_are_no_words_of_the_answer():
    """mBART starts each answer with the mark of its language (here <s>), which generation forces."""
    model = made("mbart")
    model.generation_config.forced_bos_token_id = 0
    ex = clearhead.load(model, WORDS)
    generated = ex.explain(SOURCES[0], max_new_tokens=3)
    assert generated["prefix"].tokens[:2] == ["</s>", "<s>"] and len(generated.steps) == 3
    given = ex.explain(SOURCES[0], answer=ANSWERS[0])
    assert given["prefix"].tokens[1] == "<s>" and given.steps[0] == "a"
    assert given["prefix"].words().tokens[-3:] == ["and", "the", "book"]
    assert ex.explain(SOURCES[0], target=GeneratedToken(1)).target["place"] == 1


def test_an_answer_is_a_text_or_ids():
    ex = explainer("t5")
    text = ex.explain(SOURCES[0], answer=ANSWERS[0])
    (sample,) = ex.adapter.make_samples(SOURCES[0], InputOptions(continuation=ANSWERS[0]))
    prefix = sample.inputs["decoder_input_ids"]
    ids = ex.explain(SOURCES[0], answer=prefix[1:])
    assert np.array_equal(ids["source"].matrix, text["source"].matrix)
    mapping = {"input_ids": sample.inputs["input_ids"][None], "decoder_input_ids": prefix[None]}
    assert np.array_equal(ex.explain(mapping)["source"].matrix, text["source"].matrix)


@pytest.mark.parametrize(
    ("given", "how", "said"),
    [
        ("", {}, "the text is empty"),
        (("a", "b"), {}, "expected a text"),
        ({"attention_mask": torch.ones(1, 3)}, {}, "model inputs must be"),
        ({"input_ids": torch.ones(1, 3, 2)}, {}, "batch × token"),
        ("I like", {"answer": ""}, "the answer is empty"),
        ("I like", {"answer": (2,)}, "holds no word"),
        ("I like", {"answer": "it", "target": "it"}, "Generated"),
        ("I like", {"answer": "it", "target": GeneratedToken(9)}, "step 9 does not exist"),
        ("I like", {"answer": tuple([50] * 80)}, "more than the model takes"),
        ("I like", {"target": clearhead.MaskedToken("it")}, "nothing that BartForConditionalGeneration says"),
    ],
)
def test_bad_input_gets_one_clear_message(given, how, said):
    with pytest.raises(InputError, match=said):
        explainer().explain(given, **how)


def test_a_bare_tuple_is_told_before_the_model_runs(monkeypatch):
    monkeypatch.setattr(explainer().adapter.model.config, "return_dict", False)
    with pytest.raises(InputError, match=r"set model\.config\.return_dict = True"):
        explainer().explain(SOURCES[0])


def test_methods_without_a_rule_for_two_streams_are_refused():
    with pytest.raises(UnsupportedError, match="streams look at each other"):
        explainer().explain(SOURCES[0], "cat", answer=ANSWERS[0])


def test_the_model_is_untouched():
    model = made("bart").train()
    before, settings = model_snapshot.of_model(model), model.generation_config.to_dict()
    clearhead.load(model, WORDS).explain(SOURCES, list(TWINS), max_new_tokens=3)
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert model.generation_config.to_dict() == settings


def whisper() -> Any:
    settings = {**_BODY, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 30}
    for gone in ("max_position_embeddings", "forced_eos_token_id"):
        settings.pop(gone)
    torch.manual_seed(7)
    more = {"decoder_start_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**settings, **more})).double()


def test_a_sound_and_the_words_it_becomes():
    """Whisper: frames of a sound are the source; together = alone here, too."""
    ex = clearhead.load(whisper().eval())
    sounds, prefix = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3)), torch.tensor([[0, 40, 41, 42]])
    e = ex.explain({"input_features": sounds[:1]}, max_new_tokens=3)
    assert e.streams == STREAMS and e["source"].tokens[:3] == ["0.00s", "0.02s", "0.04s"]
    assert e["source"].matrix.shape == (len(e.steps), 10)
    results = ex.explain({"input_features": sounds, "decoder_input_ids": prefix.repeat(2, 1)}, list(TWINS))
    for step in range(3):
        given = {"input_features": sounds[1:], "decoder_input_ids": prefix[:, : step + 1]}
        alone = ex.explain(given, list(TWINS), GeneratedToken(step, int(prefix[0, step + 1])))
        for method in TWINS:
            for stream in STREAMS:
                row, expected = results[method][1][stream].matrix[step], alone[method][stream].scores
                assert np.allclose(row[: len(expected)], expected, rtol=1e-9, atol=1e-12)
                assert not row[len(expected) :].any()
    with pytest.raises(InputError, match="feature extractor"):
        ex.explain(np.zeros(16000, dtype=np.float32))


@pytest.mark.parametrize("name", ["NllbMoe", "FSMT"])
def test_streams_and_look_ups_are_found_whatever_they_are_called(name):
    """NLLB-MoE has a `cross_attention`; FSMT's halves do not say where they look words up."""
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    own = {"NllbMoe": {"num_experts": 2}, "FSMT": {"langs": ["a", "b"], "src_vocab_size": 60, "tgt_vocab_size": 60}}
    torch.manual_seed(7)
    ex = clearhead.load(cls(cls.config_class(**{**_BODY, **own[name]})).float().eval())
    ex.explain({"input_ids": torch.arange(4, 10)[None], "decoder_input_ids": torch.tensor([[2, 5, 6]])})
    places = [(place.query_stream, place.key_stream) for place in ex.recorder.self_test.call_sites]
    assert places == [("source", "source")] * 2 + [("prefix", "prefix"), ("prefix", "source")] * 3
    assert {line.name for line in ex.methods() if line.applies} >= {"generic", "saliency"}


def test_an_encoder_that_pads_its_source_by_itself_is_refused():
    config = transformers.LEDConfig(**_BODY, attention_window=4)
    with pytest.raises(UnsupportedError, match="chunks"):
        clearhead.load(transformers.LEDForConditionalGeneration(config), WORDS)


def test_letters_are_aligned_with_phonemes():
    """The zoo's model that pronounces words: the letters behind a phoneme get the largest scores."""
    if "spell" not in clearhead.zoo_models():
        pytest.skip("zoo:spell has not landed")
    ex = clearhead.load("zoo:spell")
    e = ex.explain("phone")
    assert e["source"].tokens[:5] == list("phone") and e.steps == ("F", "OW", "N")
    letters = e["source"].matrix[:, :5]
    assert letters[0].argmax() in (0, 1) and letters[1].argmax() in (2, 4) and letters[2].argmax() == 3


def test_experts_with_room_for_a_share_of_a_batch_are_refused():
    sizes = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_experts": 2}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.NllbMoeConfig(**sizes, moe_eval_capacity_token_fraction=0.3)
    with pytest.raises(UnsupportedError, match="take room from each other"):
        clearhead.load(transformers.NllbMoeForConditionalGeneration(config).eval())
