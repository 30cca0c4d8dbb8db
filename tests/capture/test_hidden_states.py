"""Hidden states h^0 … h^L with their gradients, from both capture sources."""

import copy

import pytest
import torch

from tests.models import explainer, inputs

SUBJECTS = ["bert/classify", "albert/classify", "modernbert/mask", "deberta/classify", "vit/image", "dinov2/image"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_hidden_state_equals_input_of_next_layer(subject):
    tape = explainer(subject).record(inputs(subject), ("block_input_gradient", "hidden_state_gradient"))
    for below, above in zip(tape.calls[:-1], tape.calls[1:], strict=True):
        torch.testing.assert_close(below.hidden_state, above.block_input, rtol=0, atol=0)
        torch.testing.assert_close(below.hidden_state_gradient, above.block_input_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("subject", ["bert/classify", "deberta/classify"])
def test_last_hidden_state_and_gradient_equal_model_output(subject):
    """Its gradient is nonzero at the pooled token only (check 3 of the specification)."""
    ex = explainer(subject)
    raw = inputs(subject)[0]
    last = ex.record(raw, "hidden_state_gradient").calls[-1]
    model = copy.deepcopy(ex.adapter.model)
    batch = {name: tensor[None] for name, tensor in ex.adapter.make_samples(raw, input_options()).pop().inputs.items()}
    expected = model(**batch, output_hidden_states=True)
    torch.testing.assert_close(last.hidden_state, expected.hidden_states[-1], rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected.logits.max(), expected.hidden_states[-1])
    torch.testing.assert_close(last.hidden_state_gradient, gradient, rtol=1e-9, atol=1e-12)
    assert last.hidden_state_gradient[0].abs().sum(-1).nonzero().flatten().tolist() == [0]


def input_options():
    from clearhead.adapters import InputOptions

    return InputOptions()
