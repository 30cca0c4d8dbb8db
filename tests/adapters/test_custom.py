"""Models from outside transformers: recorded exactly, explained like their replicas; wrong registrations raise."""

import copy
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.capture.sources import custom_modules
from tests import custom_models as models
from tests.invariants import model_snapshot
from tests.methods.replica_comparison import gap, replica_of

METHODS = ("attention", "rollout", "generic", "attention-gradcam", "grad-sam", "cat", "attcat")
GRADIENT_METHODS = ("saliency", "input-x-gradient")
VIT = "vit, class token"
LENGTH_FIRST = "nn.TransformerEncoder, length first"


@cache
def load_shared_explainer(name: str) -> clearhead.Explainer:
    return models.explainer(name)


@pytest.fixture
def restore_registry() -> Iterator[None]:
    """Restore the registered attention functions after a test."""
    before = dict(custom_modules._CUSTOM_FORWARDS)
    yield
    custom_modules._CUSTOM_FORWARDS.clear()
    custom_modules._CUSTOM_FORWARDS.update(before)


def get_rejection_reasons(name: str) -> dict[str, str]:
    return {line.name: line.why_not for line in load_shared_explainer(name).methods()}


@pytest.mark.parametrize("name", models.CASES)
def test_recorded_logits_and_attention_equal_replica(name: str) -> None:
    ex, model = load_shared_explainer(name), models.made(name)
    for raw in models.inputs(name):
        tape = ex.record(raw, requires=("attention_gradient",))
        expected = models.run_replica(name, model, raw, 0)
        assert tape.logits is not None and gap(tape.logits[0], expected.logits) < 1e-12
        for call, attention in zip(tape.calls, expected.attention, strict=True):
            assert call.attention is not None and gap(call.attention[0], attention) < 1e-12
    assert ex.explain(models.inputs(name)[0], method="generic").certificate["recorder"] == "registered"


@pytest.mark.parametrize("method", [*METHODS, *GRADIENT_METHODS])
@pytest.mark.parametrize("name", [name for name in models.CASES if name != "bilstm"])
def test_methods_equal_their_replicas(name: str, method: str) -> None:
    if get_rejection_reasons(name)[method]:
        assert name == LENGTH_FIRST and method in ("cat", "attcat")
        return
    case, replica = models.CASES[name], replica_of(method)
    model = models.made(name)
    results = load_shared_explainer(name).explain(models.inputs(name), method, target=1)
    for raw, result in zip(models.inputs(name), results, strict=True):
        pass_record = models.run_replica(name, model, raw, 1)
        available: dict[str, Any] = {"readout": case.weights(pass_record.units), "patch": 4, "before": case.before}
        arguments = {key: available[key] for key in inspect.signature(replica.scores).parameters if key in available}
        assert gap(result.scores, replica.scores(pass_record, **arguments)) < 1e-10


def test_single_query_attention_over_lstm_equals_formulas() -> None:
    """Cross-attention rules for one query: R_qt = Ā; rollout and attention are its row; GradCAM clamps its product."""
    model = models.made("bilstm")
    methods = ["generic", "attention", "rollout", "attention-gradcam", *GRADIENT_METHODS]
    results = load_shared_explainer("bilstm").explain(models.TEXTS, methods, target="good")
    for i, raw in enumerate(models.TEXTS):
        pass_record = models.run_replica("bilstm", model, raw, 1)
        a, g = pass_record.attention[0, 0, 0], pass_record.attention_gradient[0, 0, 0]
        expected = {
            "generic": np.maximum(a * g, 0),
            "attention": a,
            "rollout": a,
            "attention-gradcam": np.maximum(a * g.mean(), 0),
            "saliency": np.linalg.norm(pass_record.input_gradient, axis=1),
            "input-x-gradient": (pass_record.inputs * pass_record.input_gradient).sum(1),
        }
        for method in methods:
            result = results[method][i]
            assert result.tokens == raw.split() and result.stream == "text"
            assert gap(result.scores, expected[method]) < 1e-10, method
    assert (
        "attends to" not in get_rejection_reasons("bilstm")["grad-sam"]
        and "attend to each other" in get_rejection_reasons("bilstm")["grad-sam"]
    )


@pytest.mark.parametrize("name", models.CASES)
def test_batch_equals_single_in_any_order(name: str) -> None:
    raws = models.inputs(name)
    candidates = (*METHODS, *GRADIENT_METHODS, "random", "position")
    methods = [method for method in candidates if not get_rejection_reasons(name)[method]]
    together = load_shared_explainer(name).explain(raws, methods, target=0)
    backwards = load_shared_explainer(name).explain(raws[::-1], methods, target=0, batch_size=2)
    alone = models.explainer(name)
    for i, raw in enumerate(raws):
        single = alone.explain(raw, methods, target=0)
        for method in methods:
            expected = single[method].scores
            assert gap(together[method][i].scores, expected) < 1e-9, method
            assert gap(backwards[method][len(raws) - 1 - i].scores, expected) < 1e-9, method


@pytest.mark.parametrize("name", models.CASES)
def test_model_and_fastpath_setting_are_unchanged(name: str) -> None:
    model = models.made(name).train()
    case = models.CASES[name]
    before, fast = model_snapshot.of_model(model), torch.backends.mha.get_fastpath_enabled()
    ex = clearhead.load(model, case.reader(), readout=case.readout)
    ex.explain(models.inputs(name), ["generic", "rollout", "saliency"])
    with pytest.raises(clearhead.InputError):
        ex.explain(models.inputs(name)[0], target=99, method="generic")
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert torch.backends.mha.get_fastpath_enabled() is fast is True


def test_reader_provides_token_names_labels_and_image() -> None:
    ex = load_shared_explainer("bilstm")
    e = ex.explain("w9 w2", method="generic")
    assert e.tokens == ["w9", "w2"] and e.words().tokens == ["w9", "w2"]
    assert e.prediction["label"] in ("bad", "good") and ex.labels == {0: "bad", 1: "good"}
    assert (
        load_shared_explainer("nn.TransformerEncoder").explain("w9 w2", method="generic").prediction["label"] in "012"
    )
    image_explanation = load_shared_explainer(VIT).explain(models.inputs(VIT)[0], target="owl", method="generic")
    assert image_explanation.image.shape == (16, 12, 3) and image_explanation.units.grid == (4, 3)


def test_token_names_accept_list_dict_or_function() -> None:
    model = models.made("textbook, fixed positions")
    numbers, special = torch.tensor([3, 7]), [3]
    for names in (
        models.VOCABULARY,
        dict(enumerate(models.VOCABULARY)),
        {word: i for i, word in enumerate(models.VOCABULARY)},
        models.VOCABULARY.__getitem__,
    ):
        e = clearhead.load(model, clearhead.TokenReader(token_names=names, special_ids=special)).explain(
            numbers, method="generic"
        )
        assert e.tokens == ["w3", "w7"] and e.units.special == (True, False)
    assert clearhead.load(model, clearhead.TokenReader()).explain(numbers, method="generic").tokens == ["3", "7"]
    assert clearhead.load(model, clearhead.TokenReader()).explain(
        numbers, tokens=["a", "b"], method="generic"
    ).tokens == ["a", "b"]


def test_vector_tokens_receive_input_gradients() -> None:
    """A sequence of vectors: gradients are taken at the input itself."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=False)

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 2)

        def forward(self, steps: Tensor) -> dict[str, Tensor]:
            return {"other": steps, "logits": self.head(self.encoder(steps)[-1])}

    model = Series().double().eval()
    reader = clearhead.TokenReader(vector_size=8, inputs=lambda steps, real: {"steps": steps.transpose(0, 1)})
    ex, steps = clearhead.load(model, reader, readout="last"), torch.randn(5, 8, dtype=torch.float64)
    leaf = steps.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf[:, None])["logits"][0, 1], leaf)
    assert gap(ex.explain(steps, "saliency", target=1).scores, gradient.norm(dim=1)) < 1e-10
    assert ex.explain(steps, method="generic").tokens == ["0", "1", "2", "3", "4"]
    with pytest.raises(clearhead.InputError, match="length × 8, without a batch axis"):
        ex.explain(steps[None], method="generic")


def test_load_with_other_dtype_copies_the_model() -> None:
    model = models.made("nn.TransformerEncoder", torch.float32)
    ex = clearhead.load(model, models.encoder_reader(), readout="mean", dtype="float64")
    assert ex.adapter.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    half = clearhead.load(model, models.encoder_reader(), readout="mean", dtype="bfloat16").explain(
        "w3 w7 w20", method="generic"
    )
    assert np.corrcoef(half.scores, ex.explain("w3 w7 w20", method="generic").scores)[0, 1] > 0.9


def test_transformer_encoder_fast_path_is_disabled_while_recording() -> None:
    """In evaluation mode without gradients, nn.TransformerEncoder bypasses its attention modules."""
    model = models.made("nn.TransformerEncoder")
    ids = torch.tensor([[3, 7, 20], [9, 2, 0]])
    with torch.no_grad():
        real = model(ids, ids == 0)
    ex = clearhead.load(model, models.encoder_reader(), readout="mean")
    explanations = ex.explain(["w3 w7 w20", "w9 w2"], "rollout")  # without gradients, with padding
    assert [explanation.prediction["top"][0]["logit"] for explanation in explanations] == pytest.approx(
        real.max(-1).values.tolist()
    )
    assert len(ex.record("w3 w7", requires=("attention",)).calls) == models.LAYERS


def test_bypassed_attention_forward_raises() -> None:
    """One of several layers bypasses its attention module, as a fused layer would."""

    class Bypassing(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            a = self.self_attn
            y, _ = nn.functional.multi_head_attention_forward(
                *(src, src, src, a.embed_dim, a.num_heads, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0),
                *(a.out_proj.weight, a.out_proj.bias, False, kwargs["src_key_padding_mask"], False),
            )
            return self.norm1(src + y)

    model = models.made(LENGTH_FIRST)
    model.encoder.layers[1].__class__ = Bypassing
    message = get_error_message(model, LENGTH_FIRST)
    assert "encoder.layers.1.self_attn computes attention, but its forward method was not called" in message


def test_concurrent_passes_equal_sequential_passes() -> None:
    """The fast-path setting of torch is global to all threads, so it must not be changed."""
    model = models.made("nn.TransformerEncoder")
    ids = torch.tensor([[3, 7, 20], [9, 2, 0]])
    with torch.no_grad():
        real = model(ids, ids == 0)
    explainers = [clearhead.load(model, models.encoder_reader(), readout="mean"), load_shared_explainer(LENGTH_FIRST)]
    expected = [ex.explain(models.TEXTS, "rollout") for ex in explainers]
    problems: list[Any] = []

    def explain(ex: clearhead.Explainer, expected_results: Any) -> None:
        for _ in range(5):
            results = ex.explain(models.TEXTS, "rollout")
            problems.extend(
                a for a, b in zip(results, expected_results, strict=True) if gap(a.scores, b.scores) > 1e-12
            )

    def run() -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(model(ids, ids == 0), real, atol=1e-12):
                    problems.append("a forward pass in another thread was changed")

    def collect_errors(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except Exception as problem:
            problems.append(problem)

    jobs = [
        (run,),
        *((explain, ex, expected_results) for ex, expected_results in zip(explainers, expected, strict=True)),
    ]
    threads = [threading.Thread(target=collect_errors, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# --- wrong registrations ------------------------------------------------------------------------------------------


def get_error_message(model: nn.Module, name: str = VIT) -> str:
    case = models.CASES[name]
    with pytest.raises(clearhead.UnsupportedError) as raised:
        clearhead.load(model, case.reader(), readout=case.readout).explain(models.inputs(name)[0], method="generic")
    return str(raised.value)


def project_qkv(module: Any, x: Tensor) -> Any:
    return module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)


@pytest.mark.usefixtures("restore_registry")
class TestWrongRegistrations:
    def test_different_output_raises(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = project_qkv(module, x)
            attention = (q @ k.mT).softmax(-1)  # without the scale
            return module.proj((attention @ v).transpose(1, 2).flatten(2)), attention, v

        assert "registered for FusedAttention computes a different output than the module" in get_error_message(
            models.made(VIT)
        )

    def test_unused_attention_tensor_raises(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, _ = project_qkv(module, x)
            return models.FusedAttention.forward(module, x), (q @ k.mT * module.scale).softmax(-1)

        message = get_error_message(models.made(VIT))
        assert "does not depend on the tensor returned as the attention of blocks.0.attn" in message

    def test_logits_instead_of_probabilities_raise(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = project_qkv(module, x)
            scores = q @ k.mT * module.scale
            return module.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores

        assert "not a probability distribution" in get_error_message(
            models.made(VIT)
        ) and "after the softmax" in get_error_message(models.made(VIT))

    def test_wrong_values_raise(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = project_qkv(module, x)
            attention = (q @ k.mT * module.scale).softmax(-1)
            return module.proj((attention @ v).transpose(1, 2).flatten(2)), attention, k

        assert "is not its attention times its values" in get_error_message(models.made(VIT))

    def test_attention_before_smoothing_raises(self) -> None:
        """The registered attention is taken before the smoothing that the module applies to it."""

        class Smoothed(models.FusedAttention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = project_qkv(self, x)
                attention = (q @ k.mT * self.scale).softmax(-1) * 0.5 + 0.5 / x.shape[1]
                return self.proj((attention @ v).transpose(1, 2).flatten(2))

        @clearhead.register_attention(Smoothed)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = project_qkv(module, x)
            before = (q @ k.mT * module.scale).softmax(-1)
            return module.proj(((before * 0.5 + 0.5 / x.shape[1]) @ v).transpose(1, 2).flatten(2)), before, v

        model = models.made(VIT)
        for block in model.blocks:
            block.attn = Smoothed().double()
        assert "is not its attention times its values" in get_error_message(model)

    def test_registering_single_heads_raises(self) -> None:
        name = "textbook, fixed positions"
        del custom_modules._CUSTOM_FORWARDS[models.MultiHead]

        @clearhead.register_attention(models.Head)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = (part(x)[:, None] for part in (module.q, module.k, module.v))
            attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return (attention @ v)[:, 0], attention, v

        message = get_error_message(models.made(name), name)
        assert "attend in parallel" in message and "register the module that holds them" in message

    def test_outermost_registration_takes_precedence(self) -> None:
        name = "textbook, fixed positions"

        @clearhead.register_attention(models.Head)
        def attend(module: Any, x: Tensor) -> Any:
            raise AssertionError("the registration of the surrounding module must be used")

        result = models.explainer(name).explain(models.TEXTS[0], method="generic")
        assert gap(result.scores, load_shared_explainer(name).explain(models.TEXTS[0], method="generic").scores) < 1e-12

    def test_missing_mask_raises(self) -> None:
        @clearhead.register_attention(models.AdditiveAttention)
        def attend(module: Any, hidden: Tensor, real: Tensor) -> Any:
            energy = module.u(torch.tanh(module.w(hidden))).squeeze(-1)
            attention, values = energy.softmax(-1)[:, None, None], hidden[:, None]
            return ((attention @ values).flatten(1), attention.flatten(1)), attention, values

        assert "computes a different output than the module" in get_error_message(models.made("bilstm"), "bilstm")

    def test_wrong_return_shapes_raise(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            return module.proj(x), torch.ones(1, 3, 3)

        assert "must return attention as batch × head × query × key, but returned (1, 3, 3)" in get_error_message(
            models.made(VIT)
        )

        @clearhead.register_attention(models.FusedAttention)
        def output_alone(module: Any, x: Tensor) -> Any:
            return module.proj(x)

        assert "must return output, attention" in get_error_message(models.made(VIT))

    def test_unregistered_attention_raises(self) -> None:
        del custom_modules._CUSTOM_FORWARDS[models.FusedAttention]
        assert "clearhead.register_attention" in get_error_message(models.made(VIT))

    def test_partly_unregistered_attention_raises(self) -> None:
        class OtherAttention(models.FusedAttention):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        model = models.made(VIT)
        model.blocks[1].attn = OtherAttention().double()
        assert (
            "blocks.1.attn (OtherAttention) is named attention, but clearhead does not recognise its class"
            in get_error_message(model)
        )

    def test_subclass_with_inherited_forward_uses_parent_registration(self) -> None:
        class Same(models.FusedAttention):
            pass

        model = models.made(VIT)
        for block in model.blocks:
            block.attn.__class__ = Same
        result = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(VIT)[0], method="generic")
        assert (
            gap(result.scores, load_shared_explainer(VIT).explain(models.inputs(VIT)[0], method="generic").scores)
            < 1e-12
        )

    def test_uncalled_attention_module_raises(self) -> None:
        model = models.made(VIT)
        model.spare = models.FusedAttention().double()
        assert "spare computes attention, but its forward method was not called" in get_error_message(model)

    def test_returned_attention_needs_no_registration(self) -> None:
        """An attention module that returns its probabilities (batch × head × query × key) is recorded by them."""

        class ReturningAttention(models.FusedAttention):
            def forward(self, x: Tensor) -> Any:
                q, k, v = project_qkv(self, x)
                attention = (q @ k.mT * self.scale).softmax(-1)
                return self.proj((attention @ v).transpose(1, 2).flatten(2)), attention

        class Wrapped(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)[0]

        model = models.made(VIT)
        for block in model.blocks:
            block.attn.__class__ = ReturningAttention
            block.attn = Wrapped(block.attn)
        result = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(VIT)[0], method="generic")
        assert result.certificate["recorder"] == "returned"
        assert (
            gap(result.scores, load_shared_explainer(VIT).explain(models.inputs(VIT)[0], method="generic").scores)
            < 1e-12
        )


def test_registering_an_instance_raises() -> None:
    with pytest.raises(clearhead.InputError, match="takes a class of modules"):
        clearhead.register_attention(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_replaced_instance_forward_raises() -> None:
    model = models.made(VIT)
    model.blocks[0].attn.forward = lambda x: x
    assert "blocks.0.attn was replaced on the module itself" in get_error_message(model)


def test_accelerate_hooks_do_not_change_scores() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = models.made(VIT)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    before = model_snapshot.of_model(model)
    result = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(VIT)[0], method="generic")
    assert (
        gap(result.scores, load_shared_explainer(VIT).explain(models.inputs(VIT)[0], method="generic").scores) < 1e-12
    )
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))


# --- bad readers and inputs ---------------------------------------------------------------------------------------


def test_invalid_readers_raise() -> None:
    vit, encoder, textbook = models.made(VIT), models.made("nn.TransformerEncoder"), models.made("bilstm")
    raw = models.inputs(VIT)[0]
    bad = clearhead.InputError
    with pytest.raises(bad, match=r"clearhead\.TokenReader or clearhead\.ImageReader"):
        clearhead.load(vit)
    with pytest.raises(bad, match="labels= names 2 classes, but the model has 3"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"], labels=["a", "b"])).explain(
            raw, method="generic"
        )
    with pytest.raises(clearhead.UnsupportedError, match="13 queries and 13 keys"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4)).explain(raw, method="generic")
    with pytest.raises(clearhead.UnsupportedError, match="the target depends on rows 0 of the last layer"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"]), readout="patches").explain(
            raw, method="generic"
        )
    with pytest.raises(bad, match="pooling_module='nothing' is not a module of BiLSTM"):
        clearhead.load(textbook, clearhead.TokenReader(pooling_module="nothing"))
    with pytest.raises(bad, match="leave out readout='first'"):
        clearhead.load(textbook, models.bilstm_reader(), readout="first")
    with pytest.raises(bad, match="must return the model's arguments by name, not Tensor"):
        clearhead.load(encoder, clearhead.TokenReader(inputs=lambda ids, real: ids))  # type: ignore[arg-type,return-value]
    with pytest.raises(bad, match="specify it with embedding_module="):
        clearhead.load(encoder, clearhead.TokenReader(embedding_module="head"))
    named = clearhead.TokenReader(embedding_module="words")
    assert clearhead.load(encoder, named, readout="mean").explain(
        torch.tensor([3, 4]), method="generic"
    ).scores.shape == (2,)
    with pytest.raises(bad, match="must be batch × label"):
        clearhead.load(
            vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"], logits=lambda out: out[None])
        ).explain(raw, method="generic")


def test_padding_that_changes_logits_raises() -> None:
    model = models.made("textbook, fixed positions")
    reader = models.textbook_reader()
    reader.pad_id = 0
    with pytest.raises(
        clearhead.UnsupportedError, match=r"change by .* when its input is padded: mask the padding in inputs="
    ):
        clearhead.load(model, reader).explain(models.TEXTS[:2], method="generic")


def test_invalid_inputs_raise() -> None:
    ex, image_explainer = load_shared_explainer("textbook, fixed positions"), load_shared_explainer(VIT)
    bad = clearhead.InputError
    with pytest.raises(bad, match="one input must be a vector of integers"):
        ex.explain(torch.tensor([[1, 2]]), method="generic")
    with pytest.raises(bad, match="one input must be a vector of integers"):
        ex.explain(torch.tensor([0.5]), method="generic")
    with pytest.raises(bad, match="integers from 0 to 29"):
        ex.explain(torch.tensor([1, 30]), method="generic")
    with pytest.raises(bad, match="truncate the text in the reader's read="):
        ex.explain("w1 w2", max_length=1, method="generic")
    with pytest.raises(bad, match="pass its tokens as a tensor, not str"):
        clearhead.load(models.made("textbook, fixed positions"), clearhead.TokenReader()).explain(
            "w1", method="generic"
        )
    with pytest.raises(bad, match="pass images as tensors"):
        image_explainer.explain(np.zeros((16, 12, 3), np.uint8), method="generic")
    with pytest.raises(bad, match="3 channels of real numbers"):
        image_explainer.explain(torch.zeros(1, 16, 12), method="generic")
    with pytest.raises(bad, match="image patches are named by their positions"):
        image_explainer.explain(torch.zeros(3, 16, 12), tokens=["a"], method="generic")


def test_image_reader_accepts_paths_and_arrays(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), np.uint8)
    Image.fromarray(pixels).save(file)
    reader = models.vit_reader("token")
    reader.read = lambda image: torch.as_tensor(np.asarray(image) / 255).permute(2, 0, 1) * 2 - 1
    reader.mean, reader.std = (0.5,) * 3, (0.5,) * 3
    ex = clearhead.load(models.made(VIT), reader)
    e = ex.explain(str(file), method="generic")
    assert (e.image == pixels).all()
    assert gap(e.scores, ex.explain(pixels, method="generic").scores) == 0


def test_explanation_survives_save_and_load(tmp_path: Path) -> None:
    e = load_shared_explainer("bilstm").explain("w9 w2 w4", method="generic")
    again = clearhead.load_explanation(e.save(tmp_path / "why.safetensors"))
    assert again.tokens == e.tokens and (again.scores == e.scores).all()


def test_deep_copy_gives_equal_scores() -> None:
    """No state is kept on the module: a deep copy made between two calls works."""
    model = models.made(VIT)
    ex = clearhead.load(model, models.vit_reader("token"))
    raw = models.inputs(VIT)[0]
    before = ex.explain(raw, method="generic").scores
    assert (
        gap(
            clearhead.load(copy.deepcopy(model), models.vit_reader("token")).explain(raw, method="generic").scores,
            before,
        )
        == 0
    )


# --- timm ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restore_registry")
@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_timm_vision_transformer_is_supported(pool: str) -> None:
    try:
        import timm  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:  # torchvision, which timm imports, fails in several ways with another version of torch
        pytest.skip(f"timm cannot be imported here: {error}")
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    settings: Any = {"token": {}, "avg": {"global_pool": "avg"}, "map": {"global_pool": "map", "class_token": False}}[
        pool
    ]
    model = timm.create_model("vit_tiny_patch16_224", **sizes, **settings).double().eval()
    attention_class: Any = sys.modules["timm.layers.attention"].Attention

    @clearhead.register_attention(attention_class)
    def attend(module: Any, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Any:
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (module.q_norm(q) @ module.k_norm(k).mT * module.scale).softmax(-1)
        return module.proj(module.norm((attention @ v).transpose(1, 2).flatten(2))), attention, v

    if pool == "map":

        @clearhead.register_attention(type(model.attn_pool))
        def pooled(module: Any, x: Tensor) -> Any:
            q = module.q(module.latent.expand(len(x), -1, -1))
            k, v = module.kv(x).unflatten(-1, (2, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
            q = q.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
            attention = (module.q_norm(q) @ module.k_norm(k).mT * module.scale).softmax(-1)
            y = module.proj((attention @ v).transpose(1, 2).flatten(2))
            y = y + module.mlp(module.norm(y))
            return (y[:, 0] if module.pool == "token" else y), attention, v

    before = ["[CLS]"] if pool != "map" else []
    reader = clearhead.ImageReader(
        patch_size=8, prefix_tokens=before, image_size=32, pooling_module="attn_pool" if pool == "map" else None
    )
    readout = "patches" if pool == "avg" else None
    ex = clearhead.load(model, reader, readout=readout)
    results = ex.explain(torch.randn(3, 32, 32).double(), ["generic", "rollout", "saliency"])
    assert all(np.isfinite(e.scores).all() and e.scores.max() > 0 for e in results.values())
    assert results["generic"].certificate["recorder"] == "registered"


# --- the documentation page -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("restore_registry")
def test_docs_page_code_runs_within_ten_lines_per_block() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "own-models.md", "exec"), namespace)
        code_lines = [
            line for line in block.splitlines() if line and not line.startswith(("import", "assert", "vocabulary"))
        ]
        assert "class " in block or len(code_lines) <= 10
    assert len(blocks) == 8
