"""Gradients equal autograd through the model's returned attentions; weights get no gradient."""

import copy

import pytest
import torch
from torch import nn

from clearhead import InputError
from clearhead.capture.recorder import Recorder
from clearhead.capture.session import ModelSession
from tests import models
from tests.invariants import cases

SUBJECTS = [*cases.TEXT_SUBJECTS, "vit/image", "deit/image", "dinov2/image", "beit/image"]
REQUIREMENTS = ("attention_gradient", "block_input_gradient", "input_gradient")


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize(("implementation", "tolerance"), [("eager", 1e-12), ("sdpa", 1e-5)])
def test_recorded_tensors_and_gradients_equal_returned_attentions(subject, implementation, tolerance):
    """In a padded batch: attention, the input of every layer, and the embeddings or pixels, with their gradients. The
    eager attention of some models computes softmax in float32, which torch's kernel does not."""
    ex = cases.explainer(subject)
    raws = models.inputs(subject)[:1] if subject.startswith("modernbert") else models.inputs(subject)
    batch = cases.collated(ex, raws)
    eager_model, model = copy.deepcopy(ex.adapter.model), copy.deepcopy(ex.adapter.model)
    eager_model.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)

    def value(output):
        return output.logits.flatten(1)[:, 1] * 0.7 + output.logits.flatten(1)[:, 2] ** 2

    tape = Recorder(ModelSession(model)).record(batch, value, REQUIREMENTS, leaves=(ex.adapter.grad_input_name,))
    leaves = []
    if ex.adapter.grad_input_name == "input_ids":
        handle = eager_model.get_input_embeddings().register_forward_hook(lambda m, a, out: leaves.append(out) or out)
        output = eager_model(**batch, output_attentions=True, output_hidden_states=True)
        handle.remove()
    else:
        leaves.append(batch["pixel_values"].clone().requires_grad_())
        others = {name: tensor for name, tensor in batch.items() if name != "pixel_values"}
        output = eager_model(pixel_values=leaves[0], **others, output_attentions=True, output_hidden_states=True)
    layers = len(output.attentions)
    expected = [*output.attentions, *output.hidden_states[:layers], leaves[0]]
    expected_gradients = torch.autograd.grad(value(output).sum(), expected)
    actual = [call.attention for call in tape.calls] + [call.block_input for call in tape.calls]
    actual.append(tape.inputs[ex.adapter.grad_input_name])
    actual_gradients = [call.attention_gradient for call in tape.calls]
    actual_gradients += [call.block_input_gradient for call in tape.calls] + [
        tape.input_gradient[ex.adapter.grad_input_name]
    ]
    assert len(actual) == len(expected) == 2 * layers + 1
    for tensor, reference in zip([*actual, *actual_gradients], [*expected, *expected_gradients], strict=True):
        assert reference.any() and torch.isfinite(tensor).all()
        assert (tensor - reference).abs().max() <= tolerance * reference.abs().max()


def _value(output):
    return output.logits[:, 0]


def test_weights_get_no_gradient():
    """Neither in .grad nor during the pass: no weight is part of the graph, though all require gradients."""
    ex = models.explainer("bert/classify")
    model = ex.adapter.model.train()
    requires_grad, weight_gradients = [], []
    handles = [p.register_hook(lambda gradient: weight_gradients.append(gradient)) for p in model.parameters()]

    def check_requires_grad(module, args, output):
        requires_grad.append(module.weight.requires_grad)

    handles += [
        m.register_forward_hook(check_requires_grad) for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm)
    ]
    ex.explain(models.inputs("bert/classify"), method=list(cases.METHODS))
    for handle in handles:
        handle.remove()
    assert requires_grad and not any(requires_grad) and not weight_gradients
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_backward_computes_no_weight_gradient_product():
    """By the profiler: the backward pass of a linear layer is one matrix product (for its input), not two."""
    ex = models.explainer("bert/classify", intermediate_size=53)  # a unique width
    raws = models.inputs("bert/classify")
    ex.explain(raws, method="generic")
    with torch.profiler.profile(record_shapes=True) as profile:
        ex.explain(raws, method=["generic", "saliency", "cat"])
    shapes = [event.input_shapes for event in profile.events() if event.name in ("aten::mm", "aten::addmm")]
    products = {_product_shape(shape) for shape in shapes}
    assert any(53 in product for product in products), "the profiler recorded the layers of this width"
    assert not products & {(53, 32), (32, 53)}


def _product_shape(shapes):
    a, b = [shape for shape in shapes if len(shape) == 2][-2:]
    return a[0], b[1]


@pytest.mark.parametrize("subject", ["bert/classify", "deberta/classify", "albert/classify"])
def test_intermediate_target_gives_zero_gradients_above(subject):
    """Layers above it have zero gradients; calls are still visited from the last to the first."""
    ex = cases.explainer(subject)
    batch = cases.collated(ex, models.inputs(subject))

    def value(output):
        return output.hidden_states[1][:, 0, 3]  # the output of the first layer, and so the input of the second

    visited = []
    Recorder(ModelSession(ex.adapter.model)).run(
        {**batch, "output_hidden_states": True}, value, ("attention_gradient", "block_input_gradient"), visited.append
    )
    assert [call.layer for call in visited] == [2, 1, 0]
    assert [bool(call.attention_gradient.any()) for call in visited] == [False, False, True]
    assert [bool(call.block_input_gradient.any()) for call in visited] == [False, True, True]
    assert all(call.attention.any() for call in visited)


def test_embedding_target_gives_zero_attention_gradients():
    ex = cases.explainer("bert/classify")
    batch = cases.collated(ex, models.inputs("bert/classify"))
    tape = Recorder(ModelSession(ex.adapter.model)).record(
        {**batch, "output_hidden_states": True}, lambda output: output.hidden_states[0][:, 1, 0], REQUIREMENTS
    )
    assert not any(call.attention_gradient.any() for call in tape.calls)
    gradient = tape.input_gradient["input_ids"]
    assert gradient[:, 1].any() and not gradient[:, 2:].any()


def test_detached_target_raises():
    with pytest.raises(InputError, match=r"does not depend on the input .* detach"):
        cases.explainer("bert/classify").explain(
            models.TEXTS[0], target=lambda output: output.logits[:, 0].detach(), method="generic"
        )


def test_call_indices_select_the_same_calls():
    """With fewer layers the backward pass stops earlier and gives the same tensors."""
    ex = cases.explainer("roberta/classify")
    batch = cases.collated(ex, models.inputs("roberta/classify"))
    recorder = Recorder(ModelSession(ex.adapter.model))
    all_calls = recorder.record(batch, _value, REQUIREMENTS[:2]).calls
    for indices in (range(2, 3), range(1, 3), range(0, 2), range(1, 2)):
        selected = recorder.record(batch, _value, REQUIREMENTS[:2], call_indices=indices).calls
        assert [call.layer for call in selected] == list(indices)
        for call in selected:
            assert torch.equal(call.attention_gradient, all_calls[call.layer].attention_gradient)
            assert torch.equal(call.block_input_gradient, all_calls[call.layer].block_input_gradient)
