"""GradCAM on attention against its replica."""

import numpy as np
import pytest

from tests.methods import twins


@pytest.mark.parametrize("subject", twins.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    twins.assert_twins("attention-gradcam", subject)


@pytest.mark.parametrize("subject", twins.FEW)
def test_every_row(subject: str) -> None:
    twins.assert_twins("attention-gradcam", subject, every_row=True)


@pytest.mark.parametrize("layers", twins.RANGES, ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "deberta/mask", "beit/image"])
def test_layers(subject: str, layers: tuple) -> None:
    twins.assert_twins("attention-gradcam", subject, layers=layers)


@pytest.mark.parametrize("heads", twins.HEADS, ids=str)
def test_heads(heads: tuple) -> None:
    twins.assert_twins("attention-gradcam", "bert/classify", heads=heads)


@pytest.mark.parametrize("target", twins.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    twins.assert_twins("attention-gradcam", subject, target=target)


def test_clamps_after_the_mean_over_heads() -> None:
    """Each head alone is clamped alone: their mean is not the whole, as it would be with the clamp before the mean."""
    seen, readout = twins.slow("bert/classify", twins.SENTENCES[0])
    replica = twins.replica_of("attention-gradcam")
    last = (seen.attention[-1], seen.attention_gradient[-1])
    alone = np.mean([replica.cam(*(part[head : head + 1] for part in last)) for head in range(seen.heads)], axis=0)
    whole = twins.explainer("bert/classify").explain(twins.SENTENCES[0], "attention-gradcam").scores
    assert twins.gap(whole, readout @ alone) > 0.01


def test_ranking_does_not_depend_on_the_scale_of_the_target() -> None:
    text = twins.SENTENCES[0]
    one, ten = (
        twins.with_classifier_times("bert/classify", factor).explain(text, "attention-gradcam", 1).scores
        for factor in (1, 10)
    )
    assert one.max() > 0
    assert twins.gap(ten, 10 * one) < 1e-12
