"""Materialised maps against the formula and against the model's eager attention, with the model's output unchanged."""

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
from clearhead.capture.session import ModelSession
from clearhead.capture.topology import ModelTopology
from clearhead.interventions.attention_patch import run_patched_forward, run_training_forward
from tests import models
from tests.capture.attention import test_tiled as tiled_models
from tests.capture.float64_reference import far
from tests.capture.test_half_precision import CROSS_ATTENTION_METHODS
from tests.capture.test_half_precision import METHODS as AGGREGATION_METHODS

METHODS = ["generic", "grad-sam", "attention", "rollout", "cat", "attcat", "attention-gradcam", "saliency", "tam"]


def make_qkv(shared=2):
    torch.manual_seed(0)
    shapes = ((2, 7, 4, 8), (2, 9, shared, 8), (2, 9, shared, 5))
    qkv = [torch.randn(shape, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    mask = torch.zeros(2, 1, 7, 9, dtype=torch.float64)
    mask[1, :, :, 6:] = -1e30
    return [tensor.requires_grad_() for tensor in qkv], mask


def formula(query, key, value, mask, scale):
    key, value = (tensor.repeat_interleave(4 // tensor.shape[1], 1) for tensor in (key, value))
    scores = query @ key.mT * scale
    attention = (scores if mask is None else scores + mask).softmax(-1)
    return (attention @ value).transpose(1, 2), attention


@pytest.mark.parametrize("shared", [4, 2])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("can_overwrite", [True, False])
def test_attend_inplace_matches_formula_and_gradients(shared, masked, can_overwrite):
    """∂y/∂A in a hook and the gradients after it are right, whether or not its buffer may be overwritten."""
    qkv, mask = make_qkv(shared)
    mask = mask if masked else None
    buffer, attention_gradients = GradientBuffer(can_overwrite=can_overwrite), []
    expected, expected_attention = formula(*qkv, mask, 0.3)
    kernel_output = torch.randn_like(expected)
    output, attention = attend_inplace_on_cpu(kernel_output.clone(), *qkv, mask, 0.3, buffer)
    attention.register_hook(lambda gradient: attention_gradients.append(gradient.clone()))
    assert torch.equal(output, kernel_output)
    torch.testing.assert_close(attention, expected_attention)
    output_gradient = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, qkv, output_gradient), torch.autograd.grad(expected, qkv, output_gradient)
    )
    torch.testing.assert_close(
        attention_gradients[0], output_gradient.transpose(1, 2) @ qkv[2].repeat_interleave(4 // shared, 1).mT
    )
    assert len(buffer.free_buffers) == (1 if can_overwrite else 0)


def test_attend_inplace_gradients_work_under_vmap():
    qkv, mask = make_qkv()
    output_gradients = torch.randn(3, 2, 7, 4, 5, dtype=torch.float64)
    expected = formula(*qkv, mask, 8**-0.5)
    actual = attend_inplace_on_cpu(expected[0].detach(), *qkv, mask, None, GradientBuffer())
    actual_gradients, expected = (
        torch.vmap(partial(torch.autograd.grad, output, [*qkv, attention]))(output_gradients)
        for output, attention in (actual, expected)
    )
    torch.testing.assert_close(actual_gradients, expected)


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
    """Its attention also takes a flag for deterministic flash attention."""
    models.skip_if_not_yet("modernbert")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    tokens = {f"{name}_token_id": 1 for name in ("cls", "sep", "bos", "eos")} | {"pad_token_id": 0}
    more = {"local_attention": 8, "global_attn_every_n_layers": 2, "vocab_size": 40, "initializer_range": 0.3}
    return transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(**shape, **tokens, **more))


def make_inputs():
    ids = torch.randint(5, 40, (3, 23))
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0  # so that padding in a window attends to tokens, too: kernels differ in fully masked rows
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def inplace_calls(monkeypatch):
    """One entry for each in-place computation of attention."""
    calls = []

    def count(*args):
        calls.append(1)
        return attend_inplace_on_cpu(*args)

    monkeypatch.setattr(materialised, "attend_inplace_on_cpu", count)
    return calls


@pytest.mark.parametrize("model", [bert, llama, modernbert])
def test_sdpa_explanations_equal_eager(model, inplace_calls, monkeypatch):
    """Batched, padded, in cache-sized tiles: every method that uses maps."""
    monkeypatch.setattr("clearhead.engine.passes.clean.CPU_CACHE_TILE_ELEMENTS", 600)
    monkeypatch.setattr("clearhead.engine.passes.clean.MIN_TILE_ROWS", 4)
    torch.manual_seed(0)
    loaded = model().eval()
    inputs = make_inputs()
    loaded.set_attn_implementation("eager")
    expected = clearhead.load(loaded).explain(inputs, METHODS)
    assert not inplace_calls
    loaded.set_attn_implementation("sdpa")
    actual = clearhead.load(loaded).explain(inputs, METHODS)
    assert inplace_calls
    for name in METHODS:
        size = max(abs(reference.scores).max() for reference in expected[name])
        assert size > 0, name
        for explanation, reference in zip(actual[name], expected[name], strict=True):
            assert abs(explanation.scores - reference.scores).max() <= 2e-5 * size, name


def test_sdpa_tape_gradients_equal_eager(inplace_calls):
    torch.manual_seed(0)
    model, inputs = bert().eval(), make_inputs()
    actual = clearhead.load(model).record(inputs, ("attention_gradient", "input_gradient"))
    assert inplace_calls
    model.set_attn_implementation("eager")
    expected = clearhead.load(model).record(inputs, ("attention_gradient", "input_gradient"))
    for call, reference in zip(actual.calls, expected.calls, strict=True):
        assert reference.attention_gradient.any()
        torch.testing.assert_close(call.attention_gradient, reference.attention_gradient, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(actual.input_gradient["text"], expected.input_gradient["text"], rtol=2e-5, atol=2e-5)


def test_torch_function_mode_disables_inplace_attention(inplace_calls):
    """Backward rules need the model's own operations, which a torch function mode intercepts."""
    ex = clearhead.load(bert().eval())
    ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    before = len(inplace_calls)
    with BaseTorchFunctionMode():
        ex.record({"input_ids": torch.arange(5, 12)[None]}, "attention_gradient")
    assert len(inplace_calls) == before > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "implementation"), tiled_models.CASES)
def test_recording_preserves_logits_bitwise(name, implementation, dtype):
    """Bitwise: the output of attention is the model's own, however its maps are rebuilt."""
    recorder, inputs = tiled_models.make_recorder(name, implementation, dtype), tiled_models.make_batch(name)
    with torch.no_grad():
        output, calls, _ = recorder.forward(inputs, frozenset({"attention"}), ("input_ids",))
        recorded_logits, expected_logits = output.logits, recorder.model(**inputs).logits
    assert torch.equal(recorded_logits, expected_logits)
    # half precision would round a score of ten by about 0.03
    assert all(call.attention.dtype == torch.float32 for call in calls)
    assert all(call.compute_rebuild_error() <= (1e-2 if dtype == torch.bfloat16 else 1e-5) for call in calls)
    with torch.no_grad():
        assert torch.equal(run_patched_forward(recorder, inputs, [])[0].logits, expected_logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "implementation"), tiled_models.CASES)
def test_materialised_scores_equal_tiled(name, implementation, dtype):
    """Scores of every method, from two separate passes."""
    model = tiled_models.make_model(name, implementation, dtype)
    model.config.decoder_start_token_id = 2
    is_encoder_decoder = model.config.is_encoder_decoder
    ex, methods = clearhead.load(model), CROSS_ATTENTION_METHODS if is_encoder_decoder else AGGREGATION_METHODS
    ex.recorder.tile_rows = 4
    options = {"target": GeneratedToken(2, 7) if is_encoder_decoder else 1}
    tiled_scores, materialised_scores = (
        ex.explain(tiled_models.make_batch(name), methods, kernel=kernel, **options)
        for kernel in ("tiles", "materialised")
    )
    assert tiled_scores.keys() == materialised_scores.keys() and len(materialised_scores) == len(methods)
    gaps = {method: max(map(far, tiled_scores[method], materialised_scores[method])) for method in materialised_scores}
    assert max(gaps.values()) <= 1e-5, gaps


def gemma2():
    """Gemma 2: soft caps and windows, which only its eager attention supports."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.2}
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**shape, **more, sliding_window=100, attn_logit_softcapping=5.0)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [0, 100])
@pytest.mark.parametrize(("model", "implementation"), [(llama, "sdpa"), (llama, "eager"), (gemma2, "eager")])
def test_half_precision_input_gradients_do_not_depend_on_tiling(model, implementation, padded, dtype, monkeypatch):
    """Bitwise, in half precision: with materialised maps, with tiles of unmasked or of all cells, of any size, and with
    no tiles. With this many elements another summation order would round some of them differently."""
    monkeypatch.setattr("clearhead.capture.attention.tiled.MAX_TILE_ELEMENTS", 2**17)
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (2, 400))
    mask = torch.ones_like(ids)
    mask[1, 400 - padded :] = 0
    recorder, inputs = Recorder(ModelSession(model().to(dtype).eval())), {"input_ids": ids, "attention_mask": mask}
    recorder.model.set_attn_implementation(implementation)

    def gradient(tiling, requirements=("attention_gradient", "input_gradient")):
        return recorder.record(inputs, tiled_models.target_logit, requirements, tiling=tiling).input_gradient[
            "input_ids"
        ]

    expected = gradient(None)
    assert expected.any()
    for tiling in (TilingConfig(needs_masked_gradients=True), TilingConfig(tile_rows=70), TilingConfig(tile_passes=0)):
        assert torch.equal(gradient(tiling), expected)
    uncaptured = gradient(None, ("input_gradient",))
    assert torch.equal(gradient(TilingConfig(), ("input_gradient",)), uncaptured), "nothing is captured in either pass"


@pytest.mark.parametrize("token_ids", [(5,), (5, 7)])
def test_target_that_uses_returned_attentions_gets_their_gradients(token_ids):
    """Also in half precision, where the output's gradients bypass the maps: the target uses logits and attentions."""
    torch.manual_seed(0)
    model, inputs = llama().bfloat16().eval(), {**make_inputs(), "output_attentions": True}
    model.set_attn_implementation("eager")

    def value(output):
        squares = [attention.float().square().flatten(1).sum(1) for attention in output.attentions]
        return torch.stack(
            [output.logits[:, -1, token_id] + (2 + i) * sum(squares) for i, token_id in enumerate(token_ids)]
        )

    embeddings = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embeddings.append(out) or out)
    targets = value(model(**inputs))
    expected = torch.cat(
        [torch.autograd.grad(target.sum(), embeddings, retain_graph=True)[0] for target in targets]
    ).float()
    hook.remove()
    model.set_attn_implementation("sdpa")
    actual = (
        Recorder(ModelSession(model))
        .record(inputs, value, ("attention_gradient", "input_gradient"))
        .input_gradient["input_ids"]
    )
    assert (actual - expected).abs().max() <= 3e-2 * expected.abs().max() > 0


@pytest.mark.parametrize("maps_only", [True, False])
def test_target_of_recorded_maps_has_input_gradients(maps_only):
    """In half precision as in float32, with the logits in the target and without them."""
    torch.manual_seed(0)
    model, inputs = llama().bfloat16().eval(), make_inputs()

    def gradient(dtype):
        output, calls, leaves = Recorder(ModelSession(model.to(dtype))).forward(
            inputs, frozenset({"attention"}), ("input_ids",)
        )
        target = calls[1].attention.square().sum() + (0 if maps_only else output.logits[:, -1, 5].sum())
        return torch.autograd.grad(target, leaves["input_ids"])[0].float()

    actual, expected = (gradient(dtype) for dtype in (torch.bfloat16, torch.float32))
    assert (actual - expected).abs().max() <= 5e-2 * expected.abs().max() > 0


@pytest.mark.parametrize("token_ids", [(5,), (5, 7)])
def test_backward_does_not_recompute_maps(token_ids, monkeypatch):
    """Only the output depends on them, so the backward pass does not recompute them."""
    rebuilds, original = [], materialised.attend_with_tiled_gradients

    def counting(output, tiled, query, key, value, rebuild):
        return original(output, tiled, query, key, value, lambda *args: rebuilds.append(1) or rebuild(*args))

    monkeypatch.setattr(materialised, "attend_with_tiled_gradients", counting)
    recorder, inputs = Recorder(ModelSession(llama().bfloat16().eval())), make_inputs()
    recorder.run_self_test(inputs)
    rebuilds.clear()
    recorder.record(inputs, lambda output: output.logits[:, -1, list(token_ids)].T, tiled_models.REQUIREMENTS)
    assert len(rebuilds) == recorder.model.config.num_hidden_layers


def test_inplace_change_of_output_preserves_saved_tensors():
    saved = torch.randn(1, 5, 2, 8)

    class SavesOutput(CPUKernel):
        def supports(self, call, reductions):
            return True

        def forward(self, call):
            return saved, (saved,)

    before, qkv = saved.clone(), [torch.randn(1, 2, 5, 8) for _ in range(3)]
    call = TiledAttention(formula, formula, torch.nn.Module(), None, False, {}, TilingConfig(kernel=SavesOutput()))
    output, _ = materialised.attend_with_tiled_gradients(
        call.prepare_backward(*qkv), call, *qkv, lambda query, key: (None, query @ key.mT)
    )
    output.mul_(0)
    assert torch.equal(call.kernel_saved_tensors[0], before)


def batch_with_masked_rows(name):
    """A batch with fully masked query rows at padding."""
    inputs = tiled_models.make_batch(name)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs["attention_mask"][1, slice(4, 9) if name == "bidirectional window" else slice(0, 3)] = 0
    return inputs


@pytest.mark.parametrize("needs_masked_gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["grouped heads", "sliding window", "bidirectional window"])
def test_gradients_with_fully_masked_rows_equal_autograd(name, implementation, dtype, needs_masked_gradients):
    """Gradients of a target that includes padding positions equal the model's own autograd, with materialised maps and
    in tiles, with fully masked keys skipped or not."""
    recorder, inputs = tiled_models.make_recorder(name, implementation, dtype), batch_with_masked_rows(name)
    model = recorder.model

    def value(output):
        return output.logits.float().square().flatten(1).mean(1)

    embeddings = []
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embeddings.append(out) or out)
    expected = torch.autograd.grad(value(model(**inputs)).sum(), embeddings)[0]
    hook.remove()
    collector = tiled_models.TileCollector()
    tiled = recorder.record(
        inputs,
        value,
        tiled_models.REQUIREMENTS,
        tiling=TilingConfig(collector.fold, tile_rows=4, needs_masked_gradients=needs_masked_gradients),
    )
    materialised_tape = recorder.record(inputs, value, tiled_models.REQUIREMENTS)
    for tape in (materialised_tape, tiled):
        gap = (tape.input_gradient["input_ids"] - expected).abs().max() / expected.abs().max()
        assert gap <= (1e-5 if dtype == torch.float32 else 5e-3)
    for call in materialised_tape.calls:
        torch.testing.assert_close(collector.full_map(call, "attention"), call.attention, rtol=0, atol=1e-6)
    assert any(bool((call.attention.sum(-1) == 0).any()) for call in materialised_tape.calls) == (
        implementation == "sdpa"
    )


def test_training_forward_uses_same_dropout_mask_in_backward():
    """In training mode: the gradient equals the finite difference."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = {
        "vocab_size": 40,
        "attention_probs_dropout_prob": 0.5,
        "hidden_dropout_prob": 0.0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    model, inputs = (
        transformers.BertForSequenceClassification(transformers.BertConfig(**shape, **options)).double().eval(),
        make_inputs(),
    )
    self_test = Recorder(ModelSession(model)).run_self_test(inputs)
    weight = model.train().bert.encoder.layer[0].attention.self.value.weight
    direction = torch.randn_like(weight)

    def logit(step=0.0):
        torch.manual_seed(1)
        with torch.no_grad():
            weight.add_(step * direction)
        return run_training_forward(ModelTopology(model), self_test, inputs)[0].logits[:, 1].sum()

    derivative = (torch.autograd.grad(logit(), weight)[0] * direction).sum()
    before, after = logit(-1e-6), logit(2e-6)
    torch.testing.assert_close(derivative, (after - before).detach() / 2e-6, rtol=1e-5, atol=0)


def test_eager_forward_that_ignores_padding_raises(monkeypatch):
    """The output comes from the kernel and does not check the maps: the self-test rebuilds them for a padded batch."""
    modeling_bert = transformers.models.bert.modeling_bert
    eager = modeling_bert.eager_attention_forward

    def without_mask(module, query, key, value, mask, **kwargs):
        return eager(module, query, key, value, None, **kwargs)

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", without_mask)
    monkeypatch.setattr(materialised, "is_formula_exact", lambda *args: False)  # as on a GPU
    single = {name: tensor[:1] for name, tensor in make_inputs().items()}
    with pytest.raises(clearhead.UnsupportedError, match="is not the attention that it used"):
        Recorder(ModelSession(bert().eval())).run_self_test(single)


def test_default_device_mode_keeps_inplace_attention(inplace_calls):
    ex = clearhead.load(bert().eval())
    with torch.device("cpu"):
        ex.record(make_inputs(), "attention_gradient")
    assert inplace_calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batched_target_gradients_equal_separate_passes(dtype):
    """Each target's gradients equal those of its own pass, in float32 and in bfloat16."""
    torch.manual_seed(0)
    recorder, inputs = Recorder(ModelSession(llama().to(dtype).eval())), make_inputs()

    def record_targets(*token_ids):
        return recorder.record(
            inputs, lambda output: output.logits[:, -1, list(token_ids)].T, tiled_models.REQUIREMENTS
        )

    together, separate = record_targets(5, 7), [record_targets(token_id) for token_id in (5, 7)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for i, call in enumerate(together.calls):
        expected = torch.cat([tape.calls[i].attention_gradient for tape in separate])
        assert (call.attention_gradient - expected).abs().max() <= tolerance * expected.abs().max()
