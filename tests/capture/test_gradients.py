"""Gradients are those of autograd through the model's own returned attentions; no weight ever gets one."""

import copy

import pytest
import torch
from torch import nn

from clearhead import InputError
from clearhead.capture.recorder import Recorder
from tests import models
from tests.invariants import cases

SUBJECTS = [*cases.TEXT_SUBJECTS, "vit/image", "deit/image", "dinov2/image", "beit/image"]
ASKS = ("attention_gradient", "block_input_gradient", "input_gradient")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("own", "within"), [("eager", 1e-12), ("sdpa", 1e-5)])
def test_equal_to_returned_attentions_under_eager(subject, own, within):
    """In a padded batch: attention, the input of every layer, and the embeddings or pixels, with their gradients. Of
    some models eager attention has a softmax in float32, and torch's kernel has not."""
    ex = cases.explainer(subject)
    raws = models.inputs(subject)[:1] if subject.startswith("modernbert") else models.inputs(subject)
    batch = cases.collated(ex, raws)
    twin, model = copy.deepcopy(ex.adapter.model), copy.deepcopy(ex.adapter.model)
    twin.set_attn_implementation("eager")
    model.set_attn_implementation(own)

    def value(output):
        return output.logits.flatten(1)[:, 1] * 0.7 + output.logits.flatten(1)[:, 2] ** 2

    tape = Recorder(model).record(batch, value, ASKS, leaves=(ex.adapter.grad_input_name,))
    starts = []
    if ex.adapter.grad_input_name == "input_ids":
        starter = twin.get_input_embeddings().register_forward_hook(lambda m, a, out: starts.append(out) or out)
        output = twin(**batch, output_attentions=True, output_hidden_states=True)
        starter.remove()
    else:
        starts.append(batch["pixel_values"].clone().requires_grad_())
        rest = {name: part for name, part in batch.items() if name != "pixel_values"}
        output = twin(pixel_values=starts[0], **rest, output_attentions=True, output_hidden_states=True)
    layers = len(output.attentions)
    real = [*output.attentions, *output.hidden_states[:layers], starts[0]]
    gradients = torch.autograd.grad(value(output).sum(), real)
    got = [call.attention for call in tape.calls] + [call.block_input for call in tape.calls]
    got.append(tape.inputs[ex.adapter.grad_input_name])
    got_gradients = [call.attention_gradient for call in tape.calls]
    got_gradients += [call.block_input_gradient for call in tape.calls] + [
        tape.input_gradient[ex.adapter.grad_input_name]
    ]
    assert len(got) == len(real) == 2 * layers + 1
    for mine, yours in zip([*got, *got_gradients], [*real, *gradients], strict=True):
        assert yours.any() and torch.isfinite(mine).all()
        assert (mine - yours).abs().max() <= within * yours.abs().max()


def _value(output):
    return output.logits[:, 0]


def test_weights_never_get_a_gradient():
    """Not in .grad, and not on the way either: no weight is part of the graph, though all ask for gradients."""
    ex = models.explainer("bert/classify")
    model = ex.adapter.model.train()
    seen, made = [], []
    handles = [p.register_hook(lambda gradient: made.append(gradient)) for p in model.parameters()]

    def look(module, args, output):
        seen.append(module.weight.requires_grad)

    handles += [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    ex.explain(models.inputs("bert/classify"), method=list(cases.METHODS))
    for handle in handles:
        handle.remove()
    assert seen and not any(seen) and not made
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_no_product_of_a_weights_shape_in_the_backward_pass():
    """Counted by the profiler: the backward pass of a linear layer is one product (its input's), not two."""
    ex = models.explainer("bert/classify", intermediate_size=53)  # a width that nothing else has
    raws = models.inputs("bert/classify")
    ex.explain(raws)
    with torch.profiler.profile(record_shapes=True) as profile:
        ex.explain(raws, method=["generic", "saliency", "cat"])
    shapes = [event.input_shapes for event in profile.events() if event.name in ("aten::mm", "aten::addmm")]
    products = {_result(shape) for shape in shapes}
    assert any(53 in product for product in products), "the layers of this width were seen"
    assert not products & {(53, 32), (32, 53)}


def _result(shapes):
    a, b = [shape for shape in shapes if len(shape) == 2][-2:]
    return a[0], b[1]


@pytest.mark.parametrize("subject", ["bert/classify", "deberta/classify", "albert/classify"])
def test_a_target_below_the_upper_layers(subject):
    """It has no gradient above: zero, calls still handed over from the last to the first."""
    ex = cases.explainer(subject)
    batch = cases.collated(ex, models.inputs(subject))

    def value(output):
        return output.hidden_states[1][:, 0, 3]  # the output of the first layer, and so the input of the second

    visited = []
    Recorder(ex.adapter.model).run(
        {**batch, "output_hidden_states": True}, value, ("attention_gradient", "block_input_gradient"), visited.append
    )
    assert [call.layer for call in visited] == [2, 1, 0]
    assert [bool(call.attention_gradient.any()) for call in visited] == [False, False, True]
    assert [bool(call.block_input_gradient.any()) for call in visited] == [False, True, True]
    assert all(call.attention.any() for call in visited)


def test_a_target_of_the_embeddings_alone():
    ex = cases.explainer("bert/classify")
    batch = cases.collated(ex, models.inputs("bert/classify"))
    tape = Recorder(ex.adapter.model).record(
        {**batch, "output_hidden_states": True}, lambda output: output.hidden_states[0][:, 1, 0], ASKS
    )
    assert not any(call.attention_gradient.any() for call in tape.calls)
    gradient = tape.input_gradient["input_ids"]
    assert gradient[:, 1].any() and not gradient[:, 2:].any()


def test_a_target_that_is_cut_off_says_so():
    with pytest.raises(InputError, match=r"does not depend on the input .* detach"):
        cases.explainer("bert/classify").explain(models.TEXTS[0], target=lambda output: output.logits[:, 0].detach())


def test_limited_layers_are_the_same_calls():
    """Fewer layers: the backward pass stops earlier, and hands over the same numbers."""
    ex = cases.explainer("roberta/classify")
    batch = cases.collated(ex, models.inputs("roberta/classify"))
    recorder = Recorder(ex.adapter.model)
    whole = recorder.record(batch, _value, ASKS[:2]).calls
    for chosen in (range(2, 3), range(1, 3), range(0, 2), range(1, 2)):
        some = recorder.record(batch, _value, ASKS[:2], call_indices=chosen).calls
        assert [call.layer for call in some] == list(chosen)
        for call in some:
            assert torch.equal(call.attention_gradient, whole[call.layer].attention_gradient)
            assert torch.equal(call.block_input_gradient, whole[call.layer].block_input_gradient)
