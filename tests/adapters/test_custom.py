"""Models that are not from transformers: recorded exactly, explained as their replicas say; wrong ways are refused."""

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
INPUTS = ("saliency", "input-x-gradient")
PICTURE = "vit, class token"
LENGTH_FIRST = "nn.TransformerEncoder, length first"


@cache
def shared(name: str) -> clearhead.Explainer:
    return models.explainer(name)


@pytest.fixture
def registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(custom_modules._CUSTOM_FORWARDS)
    yield
    custom_modules._CUSTOM_FORWARDS.clear()
    custom_modules._CUSTOM_FORWARDS.update(before)


def applies(name: str) -> dict[str, str]:
    return {line.name: line.why_not for line in shared(name).methods()}


@pytest.mark.parametrize("name", models.CASES)
def test_recorded_is_real(name: str) -> None:
    ex, model = shared(name), models.made(name)
    for raw in models.inputs(name):
        tape = ex.record(raw, requires=("attention_gradient",))
        seen = models.seen(name, model, raw, 0)
        assert tape.logits is not None and gap(tape.logits[0], seen.logits) < 1e-12
        for call, attention in zip(tape.calls, seen.attention, strict=True):
            assert call.attention is not None and gap(call.attention[0], attention) < 1e-12
    assert ex.explain(models.inputs(name)[0]).certificate["recorder"] == "registered"


@pytest.mark.parametrize("method", [*METHODS, *INPUTS])
@pytest.mark.parametrize("name", [name for name in models.CASES if name != "bilstm"])
def test_methods_equal_their_replicas(name: str, method: str) -> None:
    if applies(name)[method]:
        assert name == LENGTH_FIRST and method in ("cat", "attcat")
        return
    case, replica = models.CASES[name], replica_of(method)
    model = models.made(name)
    results = shared(name).explain(models.inputs(name), method, target=1)
    for raw, result in zip(models.inputs(name), results, strict=True):
        seen = models.seen(name, model, raw, 1)
        known: dict[str, Any] = {"readout": case.weights(seen.units), "patch": 4, "before": case.before}
        taken = {key: known[key] for key in inspect.signature(replica.scores).parameters if key in known}
        assert gap(result.scores, replica.scores(seen, **taken)) < 1e-10


def test_one_query_over_a_recurrent_network() -> None:
    """The rules across streams, by hand: R_qt = Ā; rollout and attention are the query's row; GradCAM its clamp."""
    model = models.made("bilstm")
    methods = ["generic", "attention", "rollout", "attention-gradcam", *INPUTS]
    results = shared("bilstm").explain(models.TEXTS, methods, target="good")
    for i, raw in enumerate(models.TEXTS):
        seen = models.seen("bilstm", model, raw, 1)
        a, g = seen.attention[0, 0, 0], seen.attention_gradient[0, 0, 0]
        wanted = {
            "generic": np.maximum(a * g, 0),
            "attention": a,
            "rollout": a,
            "attention-gradcam": np.maximum(a * g.mean(), 0),
            "saliency": np.linalg.norm(seen.input_gradient, axis=1),
            "input-x-gradient": (seen.inputs * seen.input_gradient).sum(1),
        }
        for method in methods:
            found = results[method][i]
            assert found.tokens == raw.split() and found.stream == "text"
            assert gap(found.scores, wanted[method]) < 1e-10, method
    assert "attends to" not in applies("bilstm")["grad-sam"] and "streams look" in applies("bilstm")["grad-sam"]


@pytest.mark.parametrize("name", models.CASES)
def test_batched_is_single_in_any_order(name: str) -> None:
    raws = models.inputs(name)
    tried = (*METHODS, *INPUTS, "random", "position")
    methods = [method for method in tried if not applies(name)[method]]
    together = shared(name).explain(raws, methods, target=0)
    backwards = shared(name).explain(raws[::-1], methods, target=0, batch_size=2)
    alone = models.explainer(name)
    for i, raw in enumerate(raws):
        single = alone.explain(raw, methods, target=0)
        for method in methods:
            wanted = single[method].scores
            assert gap(together[method][i].scores, wanted) < 1e-9, method
            assert gap(backwards[method][len(raws) - 1 - i].scores, wanted) < 1e-9, method


@pytest.mark.parametrize("name", models.CASES)
def test_the_model_is_untouched(name: str) -> None:
    model = models.made(name).train()
    case = models.CASES[name]
    before, fast = model_snapshot.of_model(model), torch.backends.mha.get_fastpath_enabled()
    ex = clearhead.load(model, case.reader(), readout=case.readout)
    ex.explain(models.inputs(name), ["generic", "rollout", "saliency"])
    with pytest.raises(clearhead.InputError):
        ex.explain(models.inputs(name)[0], target=99)
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))
    assert torch.backends.mha.get_fastpath_enabled() is fast is True


def test_names_labels_words_and_prediction() -> None:
    ex = shared("bilstm")
    e = ex.explain("w9 w2")
    assert e.tokens == ["w9", "w2"] and e.words().tokens == ["w9", "w2"]
    assert e.prediction["label"] in ("bad", "good") and ex.labels == {0: "bad", 1: "good"}
    assert shared("nn.TransformerEncoder").explain("w9 w2").prediction["label"] in "012"
    picture = shared(PICTURE).explain(models.inputs(PICTURE)[0], target="owl")
    assert picture.image.shape == (16, 12, 3) and picture.units.grid == (4, 3)


def test_names_of_tokens_in_any_form() -> None:
    model = models.made("textbook, fixed positions")
    numbers, special = torch.tensor([3, 7]), [3]
    for names in (
        models.VOCABULARY,
        dict(enumerate(models.VOCABULARY)),
        {word: i for i, word in enumerate(models.VOCABULARY)},
        models.VOCABULARY.__getitem__,
    ):
        e = clearhead.load(model, clearhead.TokenReader(token_names=names, special_ids=special)).explain(numbers)
        assert e.tokens == ["w3", "w7"] and e.units.special == (True, False)
    assert clearhead.load(model, clearhead.TokenReader()).explain(numbers).tokens == ["3", "7"]
    assert clearhead.load(model, clearhead.TokenReader()).explain(numbers, tokens=["a", "b"]).tokens == ["a", "b"]


def test_vectors_as_tokens() -> None:
    """A series of vectors: the input itself is what gradients go to."""
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
    assert ex.explain(steps).tokens == ["0", "1", "2", "3", "4"]
    with pytest.raises(clearhead.InputError, match="length × 8, without a batch axis"):
        ex.explain(steps[None])


def test_half_precision_and_another_dtype() -> None:
    model = models.made("nn.TransformerEncoder", torch.float32)
    ex = clearhead.load(model, models.encoder_reader(), readout="mean", dtype="float64")
    assert ex.adapter.dtype == torch.float64 and next(model.parameters()).dtype == torch.float32
    half = clearhead.load(model, models.encoder_reader(), readout="mean", dtype="bfloat16").explain("w3 w7 w20")
    assert np.corrcoef(half.scores, ex.explain("w3 w7 w20").scores)[0, 1] > 0.9


def test_the_fused_fast_path_is_switched_off_in_scope() -> None:
    """In evaluation mode without gradients nn.TransformerEncoder calls no attention at all."""
    model = models.made("nn.TransformerEncoder")
    ids = torch.tensor([[3, 7, 20], [9, 2, 0]])
    with torch.no_grad():
        real = model(ids, ids == 0)
    ex = clearhead.load(model, models.encoder_reader(), readout="mean")
    e = ex.explain(["w3 w7 w20", "w9 w2"], "rollout")  # no gradients, and padding
    assert [one.prediction["top"][0]["logit"] for one in e] == pytest.approx(real.max(-1).values.tolist())
    assert len(ex.record("w3 w7", requires=("attention",)).calls) == models.LAYERS


def test_attention_whose_forward_is_bypassed_is_refused() -> None:
    """As a fused layer would, in one layer of several."""

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
    said = refusal(model, LENGTH_FIRST)
    assert "encoder.layers.1.self_attn attends, but was not called: something bypasses its forward" in said


def test_threads_do_not_disturb_each_other() -> None:
    """Torch's switch of the fast path is one for all threads, so it stays where it is."""
    model = models.made("nn.TransformerEncoder")
    ids = torch.tensor([[3, 7, 20], [9, 2, 0]])
    with torch.no_grad():
        real = model(ids, ids == 0)
    explainers = [clearhead.load(model, models.encoder_reader(), readout="mean"), shared(LENGTH_FIRST)]
    wanted = [ex.explain(models.TEXTS, "rollout") for ex in explainers]
    problems: list[Any] = []

    def explain(ex: clearhead.Explainer, known: Any) -> None:
        for _ in range(5):
            found = ex.explain(models.TEXTS, "rollout")
            problems.extend(a for a, b in zip(found, known, strict=True) if gap(a.scores, b.scores) > 1e-12)

    def run() -> None:
        with torch.no_grad():
            for _ in range(50):
                if not torch.allclose(model(ids, ids == 0), real, atol=1e-12):
                    problems.append("another's pass was disturbed")

    def safely(work: Any, *args: Any) -> None:
        try:
            work(*args)
        except Exception as problem:
            problems.append(problem)

    works = [(run,), *((explain, ex, known) for ex, known in zip(explainers, wanted, strict=True))]
    threads = [threading.Thread(target=safely, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


# --- wrong registrations ------------------------------------------------------------------------------------------


def refusal(model: nn.Module, name: str = PICTURE) -> str:
    case = models.CASES[name]
    with pytest.raises(clearhead.UnsupportedError) as refused:
        clearhead.load(model, case.reader(), readout=case.readout).explain(models.inputs(name)[0])
    return str(refused.value)


def parts(module: Any, x: Tensor) -> Any:
    return module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)


@pytest.mark.usefixtures("registry")
class TestWrongRegistrations:
    def test_another_output(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = parts(module, x)
            attention = (q @ k.mT).softmax(-1)  # the scale is forgotten
            return module.proj((attention @ v).transpose(1, 2).flatten(2)), attention, v

        assert "registered for FusedAttention computes a different output than the module" in refusal(
            models.made(PICTURE)
        )

    def test_attention_that_is_not_used(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, _ = parts(module, x)
            return models.FusedAttention.forward(module, x), (q @ k.mT * module.scale).softmax(-1)

        said = refusal(models.made(PICTURE))
        assert "does not depend on the tensor returned as the attention of blocks.0.attn" in said

    def test_scores_in_place_of_attention(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = parts(module, x)
            scores = q @ k.mT * module.scale
            return module.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores

        assert "not a probability distribution" in refusal(models.made(PICTURE)) and "after the softmax" in refusal(
            models.made(PICTURE)
        )

    def test_values_that_are_not_the_values(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = parts(module, x)
            attention = (q @ k.mT * module.scale).softmax(-1)
            return module.proj((attention @ v).transpose(1, 2).flatten(2)), attention, k

        assert "is not its attention times its values" in refusal(models.made(PICTURE))

    def test_attention_of_part_of_the_output(self) -> None:
        """Attention before it is mixed with something else."""

        class Smoothed(models.FusedAttention):
            def forward(self, x: Tensor) -> Tensor:
                q, k, v = parts(self, x)
                attention = (q @ k.mT * self.scale).softmax(-1) * 0.5 + 0.5 / x.shape[1]
                return self.proj((attention @ v).transpose(1, 2).flatten(2))

        @clearhead.register_attention(Smoothed)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = parts(module, x)
            before = (q @ k.mT * module.scale).softmax(-1)
            return module.proj(((before * 0.5 + 0.5 / x.shape[1]) @ v).transpose(1, 2).flatten(2)), before, v

        model = models.made(PICTURE)
        for block in model.blocks:
            block.attn = Smoothed().double()
        assert "is not its attention times its values" in refusal(model)

    def test_heads_in_place_of_the_module_that_holds_them(self) -> None:
        name = "textbook, fixed positions"
        del custom_modules._CUSTOM_FORWARDS[models.MultiHead]

        @clearhead.register_attention(models.Head)
        def attend(module: Any, x: Tensor) -> Any:
            q, k, v = (part(x)[:, None] for part in (module.q, module.k, module.v))
            attention = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            return (attention @ v)[:, 0], attention, v

        said = refusal(models.made(name), name)
        assert "attend in parallel" in said and "register the module that holds them" in said

    def test_the_outermost_registration_counts(self) -> None:
        name = "textbook, fixed positions"

        @clearhead.register_attention(models.Head)
        def attend(module: Any, x: Tensor) -> Any:
            raise AssertionError("it is part of another")

        found = models.explainer(name).explain(models.TEXTS[0])
        assert gap(found.scores, shared(name).explain(models.TEXTS[0]).scores) < 1e-12

    def test_a_mask_that_gets_lost(self) -> None:
        @clearhead.register_attention(models.AdditiveAttention)
        def attend(module: Any, hidden: Tensor, real: Tensor) -> Any:
            energy = module.u(torch.tanh(module.w(hidden))).squeeze(-1)
            attention, values = energy.softmax(-1)[:, None, None], hidden[:, None]
            return ((attention @ values).flatten(1), attention.flatten(1)), attention, values

        assert "computes a different output than the module" in refusal(models.made("bilstm"), "bilstm")

    def test_wrong_shapes(self) -> None:
        @clearhead.register_attention(models.FusedAttention)
        def attend(module: Any, x: Tensor) -> Any:
            return module.proj(x), torch.ones(1, 3, 3)

        assert "must return attention as batch × head × query × key, but returned (1, 3, 3)" in refusal(
            models.made(PICTURE)
        )

        @clearhead.register_attention(models.FusedAttention)
        def output_alone(module: Any, x: Tensor) -> Any:
            return module.proj(x)

        assert "must return output, attention" in refusal(models.made(PICTURE))

    def test_nothing_registered(self) -> None:
        del custom_modules._CUSTOM_FORWARDS[models.FusedAttention]
        assert "clearhead.register_attention" in refusal(models.made(PICTURE))

    def test_some_attention_not_registered(self) -> None:
        class OtherAttention(models.FusedAttention):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        model = models.made(PICTURE)
        model.blocks[1].attn = OtherAttention().double()
        assert "blocks.1.attn (OtherAttention) is called attention, but how it attends is not known" in refusal(model)

    def test_a_module_that_inherits_its_forward_inherits_its_function(self) -> None:
        class Same(models.FusedAttention):
            pass

        model = models.made(PICTURE)
        for block in model.blocks:
            block.attn.__class__ = Same
        found = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(PICTURE)[0])
        assert gap(found.scores, shared(PICTURE).explain(models.inputs(PICTURE)[0]).scores) < 1e-12

    def test_attention_that_is_never_called(self) -> None:
        model = models.made(PICTURE)
        model.spare = models.FusedAttention().double()
        assert "spare attends, but was not called" in refusal(model)

    def test_returned_attention_needs_no_registration(self) -> None:
        """A module called attention that returns its maps (batch × head × query × key) is heard through them."""

        class TellingAttention(models.FusedAttention):
            def forward(self, x: Tensor) -> Any:
                q, k, v = parts(self, x)
                attention = (q @ k.mT * self.scale).softmax(-1)
                return self.proj((attention @ v).transpose(1, 2).flatten(2)), attention

        class Wrapped(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)[0]

        model = models.made(PICTURE)
        for block in model.blocks:
            block.attn.__class__ = TellingAttention
            block.attn = Wrapped(block.attn)
        found = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(PICTURE)[0])
        assert found.certificate["recorder"] == "returned"
        assert gap(found.scores, shared(PICTURE).explain(models.inputs(PICTURE)[0]).scores) < 1e-12


def test_registering_something_else() -> None:
    with pytest.raises(clearhead.InputError, match="takes a class of modules"):
        clearhead.register_attention(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_replaced_forward_is_refused() -> None:
    model = models.made(PICTURE)
    model.blocks[0].attn.forward = lambda x: x
    assert "blocks.0.attn was replaced on the module itself" in refusal(model)


def test_modules_that_accelerate_moves_between_devices() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = models.made(PICTURE)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    before = model_snapshot.of_model(model)
    found = clearhead.load(model, models.vit_reader("token")).explain(models.inputs(PICTURE)[0])
    assert gap(found.scores, shared(PICTURE).explain(models.inputs(PICTURE)[0]).scores) < 1e-12
    assert not model_snapshot.changes(before, model_snapshot.of_model(model))


# --- bad readers and inputs ---------------------------------------------------------------------------------------


def test_bad_readers() -> None:
    vit, encoder, textbook = models.made(PICTURE), models.made("nn.TransformerEncoder"), models.made("bilstm")
    raw = models.inputs(PICTURE)[0]
    bad = clearhead.InputError
    with pytest.raises(bad, match=r"clearhead\.TokenReader or clearhead\.ImageReader"):
        clearhead.load(vit)
    with pytest.raises(bad, match="labels= names 2 classes, but the model has 3"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"], labels=["a", "b"])).explain(
            raw
        )
    with pytest.raises(clearhead.UnsupportedError, match="13 queries and 13 keys"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4)).explain(raw)
    with pytest.raises(clearhead.UnsupportedError, match="the target depends on rows 0 of the last layer"):
        clearhead.load(vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"]), readout="patches").explain(
            raw
        )
    with pytest.raises(bad, match="pooling_module='nothing' is no module of BiLSTM"):
        clearhead.load(textbook, clearhead.TokenReader(pooling_module="nothing"))
    with pytest.raises(bad, match="leave readout='first' out"):
        clearhead.load(textbook, models.bilstm_reader(), readout="first")
    with pytest.raises(bad, match="must return the model's arguments by name, not Tensor"):
        clearhead.load(encoder, clearhead.TokenReader(inputs=lambda ids, real: ids))  # type: ignore[arg-type,return-value]
    with pytest.raises(bad, match="say so with embedding_module="):
        clearhead.load(encoder, clearhead.TokenReader(embedding_module="head"))
    named = clearhead.TokenReader(embedding_module="words")
    assert clearhead.load(encoder, named, readout="mean").explain(torch.tensor([3, 4])).scores.shape == (2,)
    with pytest.raises(bad, match="must be batch × label"):
        clearhead.load(
            vit, clearhead.ImageReader(patch_size=4, prefix_tokens=["[CLS]"], logits=lambda out: out[None])
        ).explain(raw)


def test_padding_that_changes_the_scores_is_refused() -> None:
    model = models.made("textbook, fixed positions")
    reader = models.textbook_reader()
    reader.pad_id = 0
    with pytest.raises(
        clearhead.UnsupportedError, match=r"change by .* when its input is padded: hide the padding with inputs="
    ):
        clearhead.load(model, reader).explain(models.TEXTS[:2])


def test_bad_inputs() -> None:
    ex, picture = shared("textbook, fixed positions"), shared(PICTURE)
    bad = clearhead.InputError
    with pytest.raises(bad, match="one input must be a row of whole numbers"):
        ex.explain(torch.tensor([[1, 2]]))
    with pytest.raises(bad, match="one input must be a row of whole numbers"):
        ex.explain(torch.tensor([0.5]))
    with pytest.raises(bad, match="whole numbers from 0 to 29"):
        ex.explain(torch.tensor([1, 30]))
    with pytest.raises(bad, match="let the reader's read= cut the text"):
        ex.explain("w1 w2", max_length=1)
    with pytest.raises(bad, match="give its tokens as a tensor, not str"):
        clearhead.load(models.made("textbook, fixed positions"), clearhead.TokenReader()).explain("w1")
    with pytest.raises(bad, match="give pictures as tensors"):
        picture.explain(np.zeros((16, 12, 3), np.uint8))
    with pytest.raises(bad, match="3 channels of real numbers"):
        picture.explain(torch.zeros(1, 16, 12))
    with pytest.raises(bad, match="a picture's patches have their places as names"):
        picture.explain(torch.zeros(3, 16, 12), tokens=["a"])


def test_pictures_are_read_by_the_reader(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 256, (16, 12, 3), np.uint8)
    Image.fromarray(pixels).save(file)
    reader = models.vit_reader("token")
    reader.read = lambda picture: torch.as_tensor(np.asarray(picture) / 255).permute(2, 0, 1) * 2 - 1
    reader.mean, reader.std = (0.5,) * 3, (0.5,) * 3
    ex = clearhead.load(models.made(PICTURE), reader)
    e = ex.explain(str(file))
    assert (e.image == pixels).all()
    assert gap(e.scores, ex.explain(pixels).scores) == 0


def test_saved_and_reopened(tmp_path: Path) -> None:
    e = shared("bilstm").explain("w9 w2 w4")
    again = clearhead.load_explanation(e.save(tmp_path / "why.safetensors"))
    assert again.tokens == e.tokens and (again.scores == e.scores).all()


def test_a_copy_is_explained_alike() -> None:
    """Nothing is kept on the module: a deep copy made between two calls works."""
    model = models.made(PICTURE)
    one = clearhead.load(model, models.vit_reader("token"))
    raw = models.inputs(PICTURE)[0]
    before = one.explain(raw).scores
    assert gap(clearhead.load(copy.deepcopy(model), models.vit_reader("token")).explain(raw).scores, before) == 0


# --- timm ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_the_real_timm(pool: str) -> None:
    try:
        import timm  # type: ignore[import-not-found,unused-ignore]
    except Exception as problem:  # torchvision, which timm imports, fails in its own ways beside another torch
        pytest.skip(f"timm cannot be imported here: {problem}")
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 16, "num_heads": 4, "num_classes": 3}
    how: Any = {"token": {}, "avg": {"global_pool": "avg"}, "map": {"global_pool": "map", "class_token": False}}[pool]
    model = timm.create_model("vit_tiny_patch16_224", **sizes, **how).double().eval()
    kind: Any = sys.modules["timm.layers.attention"].Attention

    @clearhead.register_attention(kind)
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


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("registry")
def test_the_python_of_the_page_runs_and_what_clearhead_is_told_has_ten_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "own-models.md", "exec"), names)
        told = [line for line in block.splitlines() if line and not line.startswith(("import", "assert", "vocabulary"))]
        assert "class " in block or len(told) <= 10
    assert len(blocks) == 8
