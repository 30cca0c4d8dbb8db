"""Occlusion equals its reference implementation for all kinds of models, windows and words; provenance."""

import numpy as np
import pytest
import torch

import clearhead
from tests import models
from tests.methods import coalition_values, replica_comparison
from tests.replicas import occlusion

SUBJECTS = ("bert/classify", "roberta/classify", "deberta/classify", "albert/mask", "vit/image", "swin/image")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    raws = models.inputs(subject)
    for e, raw in zip(replica_comparison.explainer(subject).explain(raws, "occlusion"), raws, strict=True):
        players, units, value = coalition_values.game(subject, raw)
        expected = coalition_values.on_units(occlusion.scores(players, value), players, units)
        assert replica_comparison.gap(e.scores, expected) < (
            1e-6 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-10
        )


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
def test_targets_and_scales_equal_reference(target: str) -> None:
    """On every scale, scores are differences of the target on that scale."""
    clearhead_target, scale, of_classes = replica_comparison.TARGETS[target]
    subject, raw = "bert/classify", models.TEXTS[1]
    e = replica_comparison.explainer(subject).explain(raw, "occlusion", clearhead_target, scale=scale)
    games = [coalition_values.game(subject, raw, label) for label in range(3)]
    players, units, _ = games[0]

    def value(present):
        return float(of_classes(torch.tensor([game_value(present) for _, _, game_value in games], dtype=torch.float64)))

    assert (
        replica_comparison.gap(e.scores, coalition_values.on_units(occlusion.scores(players, value), players, units))
        < 1e-10
    )


def test_text_windows_equal_reference() -> None:
    subject, raw = "bert/classify", models.TEXTS[0]
    players, units, value = coalition_values.game(subject, raw)
    windows = [players[i : i + 3] for i in range(len(players) - 2)]
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("occlusion", window=3))
    assert (
        replica_comparison.gap(
            e.scores, coalition_values.on_units(occlusion.windowed(players, value, windows), players, units)
        )
        < 1e-10
    )


def test_image_windows_are_squares_and_equal_reference() -> None:
    subject, raw = "dinov2/image", models.inputs("dinov2/image")[0]
    players, units, value = coalition_values.game(subject, raw)
    grid = np.reshape(players, (4, 4))
    windows = [grid[r : r + 2, c : c + 2].flatten().tolist() for r in range(3) for c in range(3)]
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("occlusion", window=2))
    assert (
        replica_comparison.gap(
            e.scores, coalition_values.on_units(occlusion.windowed(players, value, windows), players, units)
        )
        < 1e-6
    )


def test_window_wider_than_the_text_removes_all_tokens() -> None:
    subject, raw = "bert/classify", models.TEXTS[2]
    players, _, value = coalition_values.game(subject, raw)
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("occlusion", window=50))
    assert e.scores.sum() == pytest.approx(value(players) - value([]), rel=1e-10)
    assert np.ptp(e.scores[players]) < 1e-12


def test_tokens_of_a_word_are_removed_together_and_share_its_score() -> None:
    subject, raw = "bert/classify", models.TEXTS[1]
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("occlusion", unit="word"))
    players, _, value = coalition_values.game(subject, raw)
    words = e.words()
    parents = e.units.find_parents("word")
    assert len(words) < len(e), "the text must have a word of several tokens"
    for index, score in enumerate(words.scores):
        removed = set(np.flatnonzero(parents == index)) & set(players)
        difference = value(players) - value([p for p in players if p not in removed]) if removed else 0.0
        assert score == pytest.approx(difference, abs=1e-10)
        assert len({round(float(e.scores[i]), 10) for i in removed}) <= 1, (
            "each token of a word must have the same score"
        )


def test_target_class_is_that_of_the_full_input() -> None:
    """Without its words the model predicts another class for this text; the target does not change."""
    subject = "bert/classify"
    raw = next(
        text
        for text in models.CORPUS
        for players, _, _ in [coalition_values.game(subject, text)]
        for values in [[coalition_values.game(subject, text, label)[2]([]) for label in range(3)]]
        if int(np.argmax(values)) != replica_comparison.explainer(subject).explain(text, "random").target["index"]
        and players
    )
    players, _, value = coalition_values.game(subject, raw)
    e = replica_comparison.explainer(subject).explain(raw, clearhead.Method("occlusion", window=99))
    assert e.scores.sum() == pytest.approx(value(players) - value([]), rel=1e-9)


def test_provenance_states_replacement_and_players() -> None:
    e = replica_comparison.explainer("bert/classify").explain(models.TEXTS[0], "occlusion")
    assert (e.provenance["replacement"], e.provenance["players"]) == ("mask", "token")
    assert e.certificate["checks"]["evaluations"] == len(e) - 2 + 1


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "two"])
def test_invalid_windows_are_rejected(window) -> None:
    with pytest.raises(clearhead.InputError, match=r"window=.* is not valid"):
        replica_comparison.explainer("bert/classify").explain(
            models.TEXTS[0], clearhead.Method("occlusion", window=window)
        )
