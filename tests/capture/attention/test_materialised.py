"""Whole maps, against the formula and against the model's eager attention, beside the output of the model itself."""

from functools import partial

import pytest
import torch
import transformers
from torch.overrides import BaseTorchFunctionMode

import clearhead
from clearhead import GeneratedToken
from clearhead.capture.attention import materialised
from clearhead.capture.attention.materialised import GradientBuffer, attend_inplace_on_cpu
from clearhead.capture.attention.tiled import TiledAttention
from clearhead.capture.attention.tiling import TilingConfig
from clearhead.capture.kernels.cpu import CPUKernel
from clearhead.capture.recorder import Recorder
from clearhead.interventions.attention_patch import run_patched_forward, run_training_forward
from tests import models
from tests.capture.attention import test_tiled as streaming
from tests.capture.float64_reference import far
from tests.capture.test_half_precision import ACROSS
from tests.capture.test_half_precision import METHODS as EVERY_WAY

METHODS = ["generic", "grad-sam", "attention", "rollout", "cat", "attcat", "attention-gradcam", "saliency", "tam"]


def parts(shared=2):
    torch.manual_seed(0)
    shapes = ((2, 7, 4, 8), (2, 9, shared, 8), (2, 9, shared, 5))
    made = [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    mask = torch.zeros(2, 1, 7, 9, dtype=torch.float64)
    mask[1, :, :, 6:] = -1e30
    return [part.requires_grad_() for part in made], mask


def formula(query, key, value, mask, scale):
    key, value = (part.repeat_interleave(4 // part.shape[1], 1) for part in (key, value))
    scores = query @ key.mT * scale
    attention = (scores if mask is None else scores + mask).softmax(-1)
    return (attention @ value).transpose(1, 2), attention


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_the_formula_and_its_gradients(shared, masked, seen):
    """What a hook sees of ∂y/∂A is right, and so is what comes of it, whether or not it is written over."""
    own, mask = parts(shared)
    mask = mask if masked else None
    memory, heard = GradientBuffer(can_overwrite=seen), []
    expected, maps = formula(*own, mask, 0.3)
    made = torch.randn_like(expected)
    found, attention = attend_inplace_on_cpu(made.clone(), *own, mask, 0.3, memory)
    attention.register_hook(lambda slope: heard.append(slope.clone()))
    assert torch.equal(found, made)
    torch.testing.assert_close(attention, maps)
    slope = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, own, slope), torch.autograd.grad(expected, own, slope))
    torch.testing.assert_close(heard[0], slope.transpose(1, 2) @ own[2].repeat_interleave(4 // shared, 1).mT)
    assert len(memory.free_buffers) == (1 if seen else 0)


def test_several_targets_at_once():
    own, mask = parts()
    slopes = torch.randn(3, 2, 7, 4, 5, dtype=torch.float64)
    expected = formula(*own, mask, 8**-0.5)
    made = attend_inplace_on_cpu(expected[0].detach(), *own, mask, None, GradientBuffer())
    found, expected = (
        torch.vmap(partial(torch.autograd.grad, output, [*own, attention]))(slopes)
        for output, attention in (made, expected)
    )
    torch.testing.assert_close(found, expected)


def bert():
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, vocab_size=40, initializer_range=0.3)
    )


def llama():
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **more))


def modernbert():
    """Its attention is told, too, whether flash attention is to be deterministic."""
    models.skip_if_not_yet("modernbert")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")} | {"pad_token_id": 0}
    more = {"local_attention": 8, "global_attn_every_n_layers": 2, "vocab_size": 40, "initializer_range": 0.3}
    return transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(**shape, **tokens, **more))


def given():
    ids = torch.randint(5, 40, (3, 23))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0  # so that padding in a window sees words, too: kernels differ in what it looks at otherwise
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def counted(monkeypatch):
    """How often attention was made in place."""
    calls = []

    def count(*args):
        calls.append(1)
        return attend_inplace_on_cpu(*args)

    monkeypatch.setattr(materialised, "attend_inplace_on_cpu", count)
    return calls


@pytest.mark.parametrize("model", [bert, llama, modernbert])
def test_explanations_are_those_of_eager_attention(model, counted, monkeypatch):
    """Batched, padded, in tiles that a cache would hold: every method that folds maps."""
    monkeypatch.setattr("clearhead.engine.target_batch.CPU_CACHE_TILE_ELEMENTS", 600)
    monkeypatch.setattr("clearhead.engine.target_batch.MIN_TILE_ROWS", 4)
    torch.manual_seed(0)
    own = model().eval()
    inputs = given()
    own.set_attn_implementation("eager")
    expected = clearhead.load(own).explain(inputs, METHODS)
    assert not counted
    own.set_attn_implementation("sdpa")
    found = clearhead.load(own).explain(inputs, METHODS)
    assert counted
    for name in METHODS:
        size = max(abs(other.scores).max() for other in expected[name])
        assert size > 0, name
        for e, other in zip(found[name], expected[name], strict=True):
            assert abs(e.scores - other.scores).max() <= 2e-5 * size, name


def test_a_tape_keeps_its_gradients(counted):
    torch.manual_seed(0)
    own, inputs = bert().eval(), given()
    found = clearhead.load(own).record(inputs, ("attention_gradient", "input_gradient"))
    assert counted
    own.set_attn_implementation("eager")
    expected = clearhead.load(own).record(inputs, ("attention_gradient", "input_gradient"))
    for call, other in zip(found.calls, expected.calls, strict=True):
        assert other.attention_gradient.any()
        torch.testing.assert_close(call.attention_gradient, other.attention_gradient, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.input_gradient["text"], expected.input_gradient["text"], rtol=2e-5, atol=2e-5)


def test_rules_see_the_steps_of_attention(counted):
    """Relevance by rules goes through the model's own operations."""
    ex = clearhead.load(bert().eval())
    ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    before = len(counted)
    with BaseTorchFunctionMode():
        ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    assert len(counted) == before > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "own"), streaming.CASES)
def test_a_recorded_model_answers_as_ever(name, own, dtype):
    """To the last bit: the output of attention is the model's, whoever makes its maps."""
    recorder, inputs = streaming.recorder(name, own, dtype), streaming.batch(name)
    with torch.no_grad():
        output, calls, _ = recorder.forward(inputs, frozenset({"attention"}), ("input_ids",))
        recorded, real = output.logits, recorder.model(**inputs).logits
    assert torch.equal(recorded, real)
    # half precision would round a score of ten by a thirtieth
    assert all(call.attention.dtype == torch.float32 for call in calls)
    assert all(call.compute_rebuild_error() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) for call in calls)
    with torch.no_grad():
        assert torch.equal(run_patched_forward(recorder, inputs, [])[0].logits, real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "own"), streaming.CASES)
def test_a_pass_with_whole_maps_is_one_in_tiles(name, own, dtype):
    """Methods to their end, in two passes."""
    model = streaming.model_of(name, own, dtype)
    model.config.decoder_start_token_id = 2
    across = model.config.is_encoder_decoder
    ex, methods = clearhead.load(model), ACROSS if across else EVERY_WAY
    ex.recorder.tile_rows = 4
    how = {"target": GeneratedToken(2, 7) if across else 1}
    tiles, whole = (ex.explain(streaming.batch(name), methods, kernel=one, **how) for one in ("tiles", "materialised"))
    assert tiles.keys() == whole.keys() and len(whole) == len(methods)
    gaps = {method: max(map(far, tiles[method], whole[method])) for method in whole}
    assert max(gaps.values()) <= 1e-5, gaps


def capped():
    """Gemma 2: soft caps and windows, which its eager attention alone knows."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.2}
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**shape, **more, sliding_window=100, attn_logit_softcapping=5.0)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [0, 100])
@pytest.mark.parametrize(("model", "own"), [(llama, "sdpa"), (llama, "eager"), (capped, "eager")])
def test_rounded_gradients_do_not_depend_on_who_asks(model, own, padded, dtype, monkeypatch):
    """To the last bit, in half precision: from whole maps, from tiles of what is seen or of all, of any size, and from
    none. Among so many numbers sums in another order would round some otherwise."""
    monkeypatch.setattr("clearhead.capture.attention.tiled.MAX_TILE_ELEMENTS", 2**17)
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (2, 400))
    mask = torch.ones_like(ids)
    mask[1, 400 - padded :] = 0
    recorder, inputs = Recorder(model().to(dtype).eval()), {"input_ids": ids, "attention_mask": mask}
    recorder.model.set_attn_implementation(own)

    def gradient(tiles, asks=("attention_gradient", "input_gradient")):
        return recorder.record(inputs, streaming.value, asks, tiling=tiles).input_gradient["input_ids"]

    whole = gradient(None)
    assert whole.any()
    for tiles in (TilingConfig(needs_masked_gradients=True), TilingConfig(tile_rows=70), TilingConfig(tile_passes=0)):
        assert torch.equal(gradient(tiles), whole)
    assert torch.equal(gradient(TilingConfig(), ("input_gradient",)), whole)


@pytest.mark.parametrize("words", [(5,), (5, 7)])
def test_a_model_may_go_on_with_its_maps(words):
    """In half precision, too, where the output's gradients do not go through them: here a target is made of both."""
    torch.manual_seed(0)
    own, inputs = llama().bfloat16().eval(), {**given(), "output_attentions": True}
    own.set_attn_implementation("eager")

    def value(output):
        looks = [part.float().square().flatten(1).sum(1) for part in output.attentions]
        return torch.stack([output.logits[:, -1, word] + (2 + i) * sum(looks) for i, word in enumerate(words)])

    starts = []
    hook = own.get_input_embeddings().register_forward_hook(lambda module, args, out: starts.append(out) or out)
    number = value(own(**inputs))
    expected = torch.cat([torch.autograd.grad(one.sum(), starts, retain_graph=True)[0] for one in number]).float()
    hook.remove()
    own.set_attn_implementation("sdpa")
    found = Recorder(own).record(inputs, value, ("attention_gradient", "input_gradient")).input_gradient["input_ids"]
    assert (found - expected).abs().max() <= 3e-2 * expected.abs().max() > 0


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_made_of_recorded_maps_has_gradients(alone):
    """In half precision as in others, beside what the output is made of or without it."""
    torch.manual_seed(0)
    own, inputs = llama().bfloat16().eval(), given()

    def gradient(dtype):
        output, calls, starts = Recorder(own.to(dtype)).forward(inputs, frozenset({"attention"}), ("input_ids",))
        number = calls[1].attention.square().sum() + (0 if alone else output.logits[:, -1, 5].sum())
        return torch.autograd.grad(number, starts["input_ids"])[0].float()

    found, expected = (gradient(dtype) for dtype in (torch.bfloat16, torch.float32))
    assert (found - expected).abs().max() <= 5e-2 * expected.abs().max() > 0


@pytest.mark.parametrize("words", [(5,), (5, 7)])
def test_maps_are_made_once(words, monkeypatch):
    """Nothing but the output is made of them: on the way back nobody makes them again."""
    made, attend = [], materialised.attend_with_tiled_gradients

    def counting(output, streamed, query, key, value, rebuilt):
        return attend(output, streamed, query, key, value, lambda *parts: made.append(1) or rebuilt(*parts))

    monkeypatch.setattr(materialised, "attend_with_tiled_gradients", counting)
    recorder, inputs = Recorder(llama().bfloat16().eval()), given()
    recorder.run_self_test(inputs)
    made.clear()
    recorder.record(inputs, lambda output: output.logits[:, -1, list(words)].T, streaming.ASKS)
    assert len(made) == recorder.model.config.num_hidden_layers


def test_what_a_kernel_holds_for_the_way_back_is_not_the_models_to_change():
    made = torch.randn(1, 5, 2, 8)

    class Holding(CPUKernel):
        def supports(self, call, reductions):
            return True

        def forward(self, call):
            return made, (made,)

    before, own = made.clone(), [torch.randn(1, 2, 5, 8) for _ in range(3)]
    call = TiledAttention(formula, formula, torch.nn.Module(), None, False, {}, TilingConfig(kernel=Holding()))
    output, _ = materialised.attend_with_tiled_gradients(
        call.prepare_backward(*own), call, *own, lambda query, key: (None, query @ key.mT)
    )
    output.mul_(0)
    assert torch.equal(call.kernel_saved_tensors[0], before)


def blind(name):
    """A batch in which queries of padding see nothing."""
    given = streaming.batch(name)
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    given["attention_mask"][1, slice(4, 9) if name == "window both ways" else slice(0, 3)] = 0
    return given


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["grouped heads", "sliding window", "window both ways"])
def test_gradients_where_queries_see_nothing(name, own, dtype, hidden):
    """Of a number that padding has a part in: what the model's own autograd has, with whole maps and in tiles, which
    leave keys out that nobody sees or do not."""
    recorder, inputs = streaming.recorder(name, own, dtype), blind(name)
    model = recorder.model

    def value(output):
        return output.logits.float().square().flatten(1).mean(1)

    starts = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: starts.append(out) or out)
    real = torch.autograd.grad(value(model(**inputs)).sum(), starts)[0]
    hook.remove()
    together = streaming.Together()
    tiles = recorder.record(
        inputs, value, streaming.ASKS, tiling=TilingConfig(together.fold, tile_rows=4, needs_masked_gradients=hidden)
    )
    whole = recorder.record(inputs, value, streaming.ASKS)
    for tape in (whole, tiles):
        gap = (tape.input_gradient["input_ids"] - real).abs().max() / real.abs().max()
        assert gap <= (1e-5 if dtype == torch.float32 else 5e-3)
    for call in whole.calls:
        torch.testing.assert_close(together.whole(call, "attention"), call.attention, rtol=0, atol=1e-6)
    assert any(bool((call.attention.sum(-1) == 0).any()) for call in whole.calls) == (own == "sdpa")


def test_dropout_leaves_out_the_same_in_output_and_gradient():
    """Of a model that is being trained: the slope is the one by differences."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"vocab_size": 40, "attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0, "initializer_range": 0.3}
    torch.manual_seed(0)
    own, inputs = (
        transformers.BertForSequenceClassification(transformers.BertConfig(**shape, **more)).double().eval(),
        given(),
    )
    tested = Recorder(own).run_self_test(inputs)
    weight = own.train().bert.encoder.layer[0].attention.self.value.weight
    along = torch.randn_like(weight)

    def number(step=0.0):
        torch.manual_seed(1)
        with torch.no_grad():
            weight.add_(step * along)
        return run_training_forward(own, tested, inputs)[0].logits[:, 1].sum()

    slope = (torch.autograd.grad(number(), weight)[0] * along).sum()
    before, after = number(-1e-6), number(2e-6)
    torch.testing.assert_close(slope, (after - before).detach() / 2e-6, rtol=1e-5, atol=0)


def test_maps_that_forget_padding_are_refused(monkeypatch):
    """The answer is the kernel's, and says nothing about maps: those of a padded batch are rebuilt, too."""
    modeling_bert = transformers.models.bert.modeling_bert
    eager = modeling_bert.eager_attention_forward

    def forgetful(module, query, key, value, mask, **more):
        return eager(module, query, key, value, None, **more)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", forgetful)
    monkeypatch.setattr(materialised, "is_formula_exact", lambda *args: False)  # as on a GPU
    one = {name: part[:1] for name, part in given().items()}
    with pytest.raises(clearhead.UnsupportedError, match="is not what it used"):
        Recorder(bert().eval()).run_self_test(one)


def test_a_default_device_is_no_onlooker(counted):
    ex = clearhead.load(bert().eval())
    with torch.device("cpu"):
        ex.record(given(), "attention_gradient")
    assert counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_targets_share_a_pass(dtype):
    """Each as it is by itself, by the formula and by the model's eager attention."""
    torch.manual_seed(0)
    recorder, inputs = Recorder(llama().to(dtype).eval()), given()

    def recorded(*words):
        return recorder.record(inputs, lambda output: output.logits[:, -1, list(words)].T, streaming.ASKS)

    together, apart = recorded(5, 7), [recorded(word) for word in (5, 7)]
    within = 1e-5 if dtype == torch.float32 else 2e-2
    for number, call in enumerate(together.calls):
        expected = torch.cat([tape.calls[number].attention_gradient for tape in apart])
        assert (call.attention_gradient - expected).abs().max() <= within * expected.abs().max()
