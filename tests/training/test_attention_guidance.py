"""Attention guidance: target rows are distributions, padding is ignored, and only guided heads change."""

import pytest
import torch

from clearhead.errors import InputError
from clearhead.training.attention_guidance import (
    GUIDANCE_PATTERNS,
    HeadGuidance,
    build_target_rows,
    compute_class_attention,
    compute_guidance_loss,
    compute_guidance_weight,
)

VALID = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
CLASS_MEMBER = torch.tensor([[False, True, False, True, False], [False, False, True, True, False]])


def attention(seed=0, heads=3):
    scores = torch.randn(2, heads, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
    return scores.masked_fill(~VALID[:, None, None, :], -torch.inf).softmax(-1)


@pytest.mark.parametrize("pattern", GUIDANCE_PATTERNS)
def test_target_rows_are_distributions_over_valid_tokens(pattern):
    rows, has_target = build_target_rows(pattern, VALID, CLASS_MEMBER)
    torch.testing.assert_close(rows.sum(-1)[has_target], torch.ones(int(has_target.sum())))
    assert not (rows * ~VALID[:, None, :]).any() and not has_target[1, 3:].any()
    # the second text has one valid token of the class; its padded token is ignored
    expected_keys = {"identity": 1, "next": 2, "previous": 0, "first": 0, "class": 2}
    assert rows[1, 1].argmax() == expected_keys[pattern]


@pytest.mark.parametrize("pattern", GUIDANCE_PATTERNS)
def test_loss_is_the_mean_divergence_of_the_guided_heads(pattern):
    maps = {0: attention(0), 1: attention(1)}
    rows, has_target = build_target_rows(pattern, VALID, CLASS_MEMBER)
    head_losses = []
    for layer, head in ((0, 1), (1, 1)):
        divergences = [
            sum(t * torch.log(t / maps[layer][b, head, q, k]) for k, t in enumerate(rows[b, q]) if t > 0)
            for b in range(2)
            for q in range(5)
            if has_target[b, q]
        ]
        head_losses.append(sum(divergences) / len(divergences))
    loss = compute_guidance_loss(maps, [HeadGuidance(pattern, [1])], VALID, CLASS_MEMBER)
    torch.testing.assert_close(loss.double(), sum(head_losses) / 2, rtol=1e-5, atol=1e-6)


def test_loss_is_zero_for_the_target_attention():
    rows, _ = build_target_rows("class", VALID, CLASS_MEMBER)
    assert compute_guidance_loss({0: rows[:, None]}, [HeadGuidance("class", [0])], VALID, CLASS_MEMBER).abs() < 1e-6


def test_guidance_changes_only_the_guided_head():
    scores = torch.randn(2, 2, 5, 5, generator=torch.Generator().manual_seed(2)).requires_grad_()
    before = None
    for _ in range(60):
        maps = scores.masked_fill(~VALID[:, None, None, :], -torch.inf).softmax(-1)
        before = compute_class_attention(maps, CLASS_MEMBER, VALID).detach() if before is None else before
        (gradient,) = torch.autograd.grad(
            compute_guidance_loss({0: maps}, [HeadGuidance("class", [1])], VALID, CLASS_MEMBER), scores
        )
        assert not gradient[1, :, 3:].any(), "padded rows must have no gradient"
        scores = (scores - 20.0 * gradient).detach().requires_grad_()
    after = compute_class_attention(maps.detach(), CLASS_MEMBER, VALID)
    assert after[1] > 0.9 > before[1] and after[0] == pytest.approx(before[0])


def test_weight_schedule_and_rejected_inputs():
    assert (
        compute_guidance_weight(0.0, 0.3) == compute_guidance_weight(0.5, 0.3) == 0.3
        and compute_guidance_weight(1.0, 0.3) == 0.0
    )
    with pytest.raises(InputError, match=r"unknown pattern 'diagonal'.*identity"):
        build_target_rows("diagonal", VALID)
    with pytest.raises(InputError, match="requires class_mask"):
        build_target_rows("class", VALID)
    with pytest.raises(InputError, match="no attention head is guided"):
        compute_guidance_loss({}, [], VALID)
