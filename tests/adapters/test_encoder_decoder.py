"""Encoder–decoders: source × target in one call, compared with a slow replica that makes one pass per token."""

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
from clearhead.methods import METHOD_REGISTRY, PassType
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
#: Tolerance per family: before T5 used the attention interface, it computed its softmax in float32.
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
class PassRecord:
    """Attention of one pass and its gradients, per head and layer: encoder, decoder and cross-attention."""

    attention: dict[str, list[np.ndarray]]
    gradients: dict[str, list[np.ndarray]]
    vectors: dict[str, np.ndarray]
    vector_gradients: dict[str, np.ndarray]


def run_eager_pass(model: Any, source: torch.Tensor, prefix: torch.Tensor, token_id: int) -> PassRecord:
    """Run one plain pass over a source and the tokens before the target token."""
    eager_model = copy.deepcopy(model)
    eager_model.set_attn_implementation("eager")
    vectors = {
        "source": eager_model.get_encoder().get_input_embeddings()(source[None]).detach().requires_grad_(),
        "prefix": eager_model.get_decoder().get_input_embeddings()(prefix[None]).detach().requires_grad_(),
    }
    output = eager_model(
        inputs_embeds=vectors["source"],
        decoder_inputs_embeds=vectors["prefix"],
        output_attentions=True,
        use_cache=False,
    )
    attention = {
        "source": list(output.encoder_attentions),
        "prefix": list(output.decoder_attentions),
        "across": list(output.cross_attentions),
    }
    flat = [tensor for tensors in attention.values() for tensor in tensors]
    gradients_of_all = torch.autograd.grad(output.logits[0, -1, token_id], [*flat, *vectors.values()])
    remaining = [tensor[0].numpy() for tensor in gradients_of_all]
    gradients: dict[str, list[np.ndarray]] = {}
    for name, tensors in attention.items():
        gradients[name], remaining = remaining[: len(tensors)], remaining[len(tensors) :]
    return PassRecord(
        attention={name: [tensor[0].detach().numpy() for tensor in tensors] for name, tensors in attention.items()},
        gradients=gradients,
        vectors={name: tensor[0].detach().numpy() for name, tensor in vectors.items()},
        vector_gradients=dict(zip(vectors, remaining, strict=True)),
    )


def multiply_matrices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Multiply two matrices by the definition."""
    result = np.zeros((len(a), b.shape[1]))
    for i in range(len(a)):
        for j in range(b.shape[1]):
            result[i, j] = sum(a[i, k] * b[k, j] for k in range(len(b)))
    return result


def fuse_heads(attention: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """Equation 5: E_h[(∇A ⊙ A)⁺]."""
    heads, rows, columns = attention.shape
    fused = np.zeros((rows, columns))
    for i in range(rows):
        for j in range(columns):
            fused[i, j] = sum(max(gradient[h, i, j] * attention[h, i, j], 0.0) for h in range(heads)) / heads
    return fused


def normalise_rows(relevance: np.ndarray) -> np.ndarray:
    """Equations 8 and 9; a row of zeros stays a row of zeros."""
    rest = relevance - np.eye(len(relevance))
    for row in rest:
        total = row.sum()
        if abs(total) > 1e-14:
            row /= total
    return rest + np.eye(len(relevance))


def generic(pass_record: PassRecord) -> dict[str, np.ndarray]:
    """Rules 5 to 10 in layer order (equation 11 needs an encoder that attends to the decoder)."""
    source, prefix = pass_record.attention["across"][0].shape[2], pass_record.attention["across"][0].shape[1]
    r_qq, r_ss, r_sq = np.eye(source), np.eye(prefix), np.zeros((prefix, source))
    for attention, gradient in zip(pass_record.attention["source"], pass_record.gradients["source"], strict=True):
        r_qq = r_qq + multiply_matrices(fuse_heads(attention, gradient), r_qq)
    for layer in range(len(pass_record.attention["prefix"])):
        within = fuse_heads(pass_record.attention["prefix"][layer], pass_record.gradients["prefix"][layer])
        r_ss, r_sq = r_ss + multiply_matrices(within, r_ss), r_sq + multiply_matrices(within, r_sq)
        across = fuse_heads(pass_record.attention["across"][layer], pass_record.gradients["across"][layer])
        r_sq = r_sq + multiply_matrices(multiply_matrices(normalise_rows(r_ss).T, across), normalise_rows(r_qq))
    return {"source": r_sq[-1], "prefix": r_ss[-1] - np.eye(prefix)[-1]}


def rollout(pass_record: PassRecord) -> dict[str, np.ndarray]:
    """R_ssᵀ · E_h A(last) · R_qq, each R a product of (E_h A + I)/2."""
    rolled = {}
    for stream in STREAMS:
        rolled[stream] = np.eye(pass_record.attention[stream][0].shape[1])
        for attention in pass_record.attention[stream]:
            rolled[stream] = multiply_matrices((attention.mean(0) + np.eye(len(rolled[stream]))) / 2, rolled[stream])
    across = multiply_matrices(
        multiply_matrices(rolled["prefix"].T, pass_record.attention["across"][-1].mean(0)), rolled["source"]
    )
    return {"source": across[-1], "prefix": rolled["prefix"][-1]}


def attention(pass_record: PassRecord) -> dict[str, np.ndarray]:
    return {
        "source": pass_record.attention["across"][-1].mean(0)[-1],
        "prefix": pass_record.attention["prefix"][-1].mean(0)[-1],
    }


def attention_gradcam(pass_record: PassRecord) -> dict[str, np.ndarray]:
    def last(name: str) -> np.ndarray:
        pairs = zip(pass_record.attention[name][-1], pass_record.gradients[name][-1], strict=True)
        return np.maximum(np.mean([gradient.mean() * one for one, gradient in pairs], axis=0), 0)[-1]

    return {"source": last("across"), "prefix": last("prefix")}


def saliency(pass_record: PassRecord) -> dict[str, np.ndarray]:
    return {stream: np.sqrt((pass_record.vector_gradients[stream] ** 2).sum(-1)) for stream in STREAMS}


def input_x_gradient(pass_record: PassRecord) -> dict[str, np.ndarray]:
    return {stream: (pass_record.vectors[stream] * pass_record.vector_gradients[stream]).sum(-1) for stream in STREAMS}


REPLICAS = {
    "generic": generic,
    "rollout": rollout,
    "attention": attention,
    "attention-gradcam": attention_gradcam,
    "saliency": saliency,
    "input-x-gradient": input_x_gradient,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_steps_equal_single_step_replicas(family):
    """Three texts of different lengths with answers of different lengths, in one batch."""
    ex = explainer(family)
    results = ex.explain(SOURCES, list(REPLICAS), answer=ANSWERS)
    for i, (source, answer) in enumerate(zip(SOURCES, ANSWERS, strict=True)):
        (sample,) = ex.adapter.make_samples(source, InputOptions(continuation=answer))
        ids, prefix = sample.inputs["input_ids"], sample.inputs["decoder_input_ids"]
        assert sample.continuation_ids == tuple(prefix[sample.first_predicting_row + 1 :].tolist())
        for step, token_id in enumerate(sample.continuation_ids):
            earlier = prefix[: sample.first_predicting_row + step + 1]
            pass_record = run_eager_pass(ex.adapter.model, ids, earlier, token_id)
            for method, replica in REPLICAS.items():
                expected = replica(pass_record)
                for stream in STREAMS:
                    part = results[method][i][stream]
                    row, size = part.matrix[step], np.abs(part.matrix).max()
                    length = len(expected[stream])
                    assert np.abs(row[:length] - expected[stream]).max() <= NEAR[family] * size, (method, stream, step)
                    assert not row[length:].any(), "later tokens must have no score"


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logits_are_exact_and_method_list_gives_reasons(family):
    ex = explainer(family)
    lines = {line.name: line for line in ex.methods()}
    assert all(lines[name].applies for name in (*REPLICAS, "random", "position"))
    assert all(line.applies or len(line.why_not.split()) > 8 for line in lines.values())
    assert "attend to each other" in lines["cat"].why_not
    certificate = ex.explain(SOURCES[0], max_new_tokens=3, method="generic").certificate
    assert certificate["capture_error"] <= 1e-9 and certificate["readout_checked"]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_does_not_change_model_logits(family):
    """The batching tests rely on this."""
    ex = explainer(family)
    samples = [ex.adapter.make_samples(*pair)[0] for pair in zip(SOURCES, map(make_options, ANSWERS), strict=True)]
    with torch.no_grad():
        together = ex.adapter.model(**ex.adapter.collate(samples)).logits
        for i, sample in enumerate(samples):
            alone = ex.adapter.model(**ex.adapter.collate([sample])).logits[0]
            assert (together[i, : len(alone)] - alone).abs().max() <= NEAR[family] * alone.abs().max()


def make_options(answer: str) -> InputOptions:
    return InputOptions(continuation=answer)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_batch_equals_single_for_every_method(family):
    ex = explainer(family)
    methods = [
        line.name
        for line in ex.methods()
        if line.applies and METHOD_REGISTRY[line.name].declaration.pass_type is PassType.TAPE
    ]
    together = ex.explain(SOURCES[::-1], methods, answer=ANSWERS[::-1])
    for source, answer, index in zip(SOURCES, ANSWERS, (2, 1, 0), strict=True):
        for method, e in ex.explain(source, methods, answer=answer).items():
            batched = together[method][index]
            assert batched.steps == e.steps and batched.streams == STREAMS
            for stream in STREAMS:
                single_part, batched_part = e[stream], batched[stream]
                assert single_part.tokens == batched_part.tokens
                assert (
                    np.abs(single_part.matrix - batched_part.matrix).max()
                    <= NEAR[family] * np.abs(single_part.matrix).max()
                ), method


def test_padded_inputs_equal_unpadded_inputs():
    ex = explainer()
    ids = torch.tensor([[0, 40, 41, 42, 2]])
    plain = ex.explain({"input_ids": ids, "decoder_input_ids": torch.tensor([[2, 50, 51]])}, method="generic")
    padded_inputs = {
        "input_ids": torch.cat([ids, torch.ones(1, 2, dtype=torch.long)], 1),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]]),
        "decoder_input_ids": torch.tensor([[2, 50, 51, 1]]),
        "decoder_attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }
    padded = ex.explain(padded_inputs, method="generic")
    for stream in STREAMS:
        assert padded[stream].tokens == plain[stream].tokens
        assert np.allclose(padded[stream].matrix, plain[stream].matrix, rtol=1e-9)


def test_left_padded_prefix_equals_model_logits_or_raises():
    """The positions of T5 are relative. BART counts the padding, so removing it would change the logits."""
    raw_input = {
        "input_ids": torch.tensor([[0, 40, 41, 42, 2]]),
        "decoder_input_ids": torch.tensor([[1, 1, 2, 50, 51]]),
        "decoder_attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    }
    ex = explainer("t5")
    values = [step["value"] for step in ex.explain(raw_input, method="generic").target["steps"]]
    logits = ex.adapter.model(**raw_input).logits[0]
    assert values == pytest.approx([logits[2, 50].item(), logits[3, 51].item()], abs=1e-5)
    with pytest.raises(InputError, match="computes different logits with the 2 padding tokens before"):
        explainer("bart").explain(raw_input, method="generic")
    with pytest.raises(InputError, match="may mask padding around decoder_input_ids, but nothing else"):
        explainer("bart").explain(
            {**raw_input, "decoder_attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, method="generic"
        )


def test_default_target_is_all_generated_tokens():
    ex = explainer()
    e = ex.explain(SOURCES[0], max_new_tokens=4, method="generic")
    generated_ids = ex.adapter.model.generate(
        **WORDS(SOURCES[0], return_tensors="pt"), max_new_tokens=4, do_sample=False
    )[0]
    assert [step["index"] for step in e.target["steps"]] == generated_ids[1:].tolist()
    assert e["source"].tokens == WORDS.convert_ids_to_tokens(WORDS(SOURCES[0])["input_ids"])
    assert e["prefix"].tokens == WORDS.convert_ids_to_tokens(generated_ids.tolist()) and e["prefix"].units.special[0]
    assert e["source"].matrix.shape == (4, len(e["source"])) and e["prefix"].matrix.shape == (4, 5)
    for stream in STREAMS:
        assert np.allclose(e[stream].scores, e[stream].matrix.sum(0))
        second = ex.explain(SOURCES[0], target=GeneratedToken(1), method="generic")[stream].scores
        assert np.allclose(second[: len(e[stream])], e[stream].matrix[1][: len(second)])
    assert e.step(2).target["position"] == 2
    first = ex.explain(SOURCES[0], target=7, method="generic")
    assert first.target["index"] == 7 and first.target["position"] == 0 and len(first["prefix"]) == 1
    assert ex.explain(SOURCES[0], target=Contrast(7, 9), method="generic").target["against"] == ex.adapter.label_name(9)
    foil = ex.explain(SOURCES[0], target=GeneratedToken(1, against=9), answer=ANSWERS[0], method="generic")
    assert foil.target["kind"] == "contrast" and foil.target["position"] == 1


def test_forced_bos_token_is_not_a_step():
    """mBART starts each output with a language token (here <s>), which generation forces."""
    model = made("mbart")
    model.generation_config.forced_bos_token_id = 0
    ex = clearhead.load(model, WORDS)
    generated = ex.explain(SOURCES[0], max_new_tokens=3, method="generic")
    assert generated["prefix"].tokens[:2] == ["</s>", "<s>"] and len(generated.steps) == 3
    continued = ex.explain(SOURCES[0], answer=ANSWERS[0], method="generic")
    assert continued["prefix"].tokens[1] == "<s>" and continued.steps[0] == "a"
    assert continued["prefix"].words().tokens[-3:] == ["and", "the", "book"]
    assert ex.explain(SOURCES[0], target=GeneratedToken(1), method="generic").target["position"] == 1


def test_continuation_accepts_text_or_token_ids():
    ex = explainer("t5")
    text = ex.explain(SOURCES[0], answer=ANSWERS[0], method="generic")
    (sample,) = ex.adapter.make_samples(SOURCES[0], InputOptions(continuation=ANSWERS[0]))
    prefix = sample.inputs["decoder_input_ids"]
    ids = ex.explain(SOURCES[0], answer=prefix[1:], method="generic")
    assert np.array_equal(ids["source"].matrix, text["source"].matrix)
    mapping = {"input_ids": sample.inputs["input_ids"][None], "decoder_input_ids": prefix[None]}
    assert np.array_equal(ex.explain(mapping, method="generic")["source"].matrix, text["source"].matrix)


@pytest.mark.parametrize(
    ("raw_input", "options", "message"),
    [
        ("", {}, "the text is empty"),
        (("a", "b"), {}, "expected a text"),
        ({"attention_mask": torch.ones(1, 3)}, {}, "model inputs must be"),
        ({"input_ids": torch.ones(1, 3, 2)}, {}, "batch × token"),
        ("I like", {"answer": ""}, "answer= is empty"),
        ("I like", {"answer": (2,)}, "contains no token"),
        ("I like", {"answer": "it", "target": "it"}, "Generated"),
        ("I like", {"answer": "it", "target": GeneratedToken(9)}, "step 9 does not exist"),
        ("I like", {"answer": tuple([50] * 80)}, "more than the model's maximum"),
        ("I like", {"target": clearhead.MaskedToken("it")}, "not an output of BartForConditionalGeneration"),
    ],
)
def test_invalid_input_raises(raw_input, options, message):
    with pytest.raises(InputError, match=message):
        explainer().explain(raw_input, **options)


def test_return_dict_false_raises(monkeypatch):
    monkeypatch.setattr(explainer().adapter.model.config, "return_dict", False)
    with pytest.raises(InputError, match=r"set model\.config\.return_dict = True"):
        explainer().explain(SOURCES[0], method="generic")


def test_methods_without_cross_attention_rule_raise():
    with pytest.raises(UnsupportedError, match="attend to each other"):
        explainer().explain(SOURCES[0], "cat", answer=ANSWERS[0])


def test_model_and_generation_config_are_unchanged():
    model = made("bart").train()
    before, settings = model_snapshot.of_model(model), model.generation_config.to_dict()
    clearhead.load(model, WORDS).explain(SOURCES, list(REPLICAS), max_new_tokens=3)
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert model.generation_config.to_dict() == settings


def make_whisper() -> Any:
    settings = {**_BODY, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 30}
    for unused in ("max_position_embeddings", "forced_eos_token_id"):
        settings.pop(unused)
    torch.manual_seed(7)
    overrides = {"decoder_start_token_id": 0, "suppress_tokens": None, "begin_suppress_tokens": None}
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**{**settings, **overrides})
    ).double()


def test_whisper_batched_steps_equal_single_steps():
    """The source of Whisper is frames of audio."""
    ex = clearhead.load(make_whisper().eval())
    features, prefix = (
        torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(3)),
        torch.tensor([[0, 40, 41, 42]]),
    )
    e = ex.explain({"input_features": features[:1]}, max_new_tokens=3, method="generic")
    assert e.streams == STREAMS and e["source"].tokens[:3] == ["0.00s", "0.02s", "0.04s"]
    assert e["source"].matrix.shape == (len(e.steps), 10)
    results = ex.explain({"input_features": features, "decoder_input_ids": prefix.repeat(2, 1)}, list(REPLICAS))
    for step in range(3):
        prefix_inputs = {"input_features": features[1:], "decoder_input_ids": prefix[:, : step + 1]}
        alone = ex.explain(prefix_inputs, list(REPLICAS), GeneratedToken(step, int(prefix[0, step + 1])))
        for method in REPLICAS:
            for stream in STREAMS:
                row, expected = results[method][1][stream].matrix[step], alone[method][stream].scores
                assert np.allclose(row[: len(expected)], expected, rtol=1e-9, atol=1e-12)
                assert not row[len(expected) :].any()
    with pytest.raises(InputError, match="feature extractor"):
        ex.explain(np.zeros(16000, dtype=np.float32), method="generic")


@pytest.mark.parametrize("name", ["NllbMoe", "FSMT"])
def test_streams_are_identified_for_unusual_module_names(name):
    """NLLB-MoE has a `cross_attention`; encoder and decoder of FSMT do not declare their embeddings."""
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    overrides = {
        "NllbMoe": {"num_experts": 2},
        "FSMT": {"langs": ["a", "b"], "src_vocab_size": 60, "tgt_vocab_size": 60},
    }
    torch.manual_seed(7)
    ex = clearhead.load(cls(cls.config_class(**{**_BODY, **overrides[name]})).float().eval())
    ex.explain(
        {"input_ids": torch.arange(4, 10)[None], "decoder_input_ids": torch.tensor([[2, 5, 6]])}, method="generic"
    )
    streams = [(call_site.query_stream, call_site.key_stream) for call_site in ex.recorder.self_test.call_sites]
    assert streams == [("source", "source")] * 2 + [("prefix", "prefix"), ("prefix", "source")] * 3
    assert {line.name for line in ex.methods() if line.applies} >= {"generic", "saliency"}


def test_encoder_with_internal_padding_raises():
    config = transformers.LEDConfig(**_BODY, attention_window=4)
    with pytest.raises(UnsupportedError, match="chunks"):
        clearhead.load(transformers.LEDForConditionalGeneration(config), WORDS)


def test_spell_model_aligns_letters_with_phonemes():
    """The zoo's pronunciation model: the letters of a phoneme get the highest scores."""
    if "spell" not in clearhead.zoo_models():
        pytest.skip("zoo:spell has not landed")
    ex = clearhead.load("zoo:spell")
    e = ex.explain("phone", method="generic")
    assert e["source"].tokens[:5] == list("phone") and e.steps == ("F", "OW", "N")
    letters = e["source"].matrix[:, :5]
    assert letters[0].argmax() in (0, 1) and letters[1].argmax() in (2, 4) and letters[2].argmax() == 3


def test_experts_with_batch_dependent_capacity_raise():
    sizes = {"vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_experts": 2}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.NllbMoeConfig(**sizes, moe_eval_capacity_token_fraction=0.3)
    with pytest.raises(UnsupportedError, match="affect each other"):
        clearhead.load(transformers.NllbMoeForConditionalGeneration(config).eval())
