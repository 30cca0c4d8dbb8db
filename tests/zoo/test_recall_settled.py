"""`shift_output_vectors` of recall.py: one vector is added to all output vectors, and no probability changes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead

clearhead_zoo = pytest.importorskip("clearhead_zoo")
from clearhead_zoo.tasks import make_generator, recall  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "packages" / "zoo" / "train"
LISTS = recall.sample_lists(make_generator(3, "train"), num_rows=4, num_pairs=20)
IDS = torch.from_numpy(recall.encode_lists(LISTS)[0])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The recall training script; training scripts import each other by bare name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("recall")


@pytest.fixture
def ex() -> clearhead.Explainer:
    return clearhead.load("zoo:recall-4k", dtype="float32")


def compute_scores(script: Any, model: Any) -> torch.Tensor:
    """Return slopes times output vectors, of shape (list, score)."""
    output_vectors = model.eval().requires_grad_(False).lm_head.weight.requires_grad_()
    model.set_attn_implementation("eager")
    rows = zip(IDS, LISTS.queried_indices[:, 0], strict=True)
    return torch.stack([script.compute_score_slopes(model, *row) @ output_vectors.detach()[row[0][-1]] for row in rows])


def shift_scores_to(script: Any, model: Any, target_means: list[float]) -> None:
    """Shift all output vectors by one vector, so that the scores have these means."""
    current = compute_scores(script, model)
    rows = zip(IDS, LISTS.queried_indices[:, 0], strict=True)
    slopes = torch.stack([script.compute_score_slopes(model, *row) for row in rows]).mean(0)
    vector = torch.linalg.lstsq(slopes, torch.tensor(target_means) - current.mean(0)).solution
    model.lm_head.weight.requires_grad_(False).add_(vector)


def test_score_slopes_equal_method_scores(script: Any, ex: clearhead.Explainer) -> None:
    heads, tokens = ex.adapter.model.config.num_attention_heads, IDS.shape[1] - 1
    computed = compute_scores(script, ex.adapter.model)
    for row, pair_index, (gradcam, product) in zip(IDS, LISTS.queried_indices[:, 0], computed, strict=True):
        text = " ".join(recall.build_vocabulary()[word] for word in row[1:-1])
        answer = recall.build_vocabulary()[row[-1]]
        key, value = 1 + 2 * pair_index, 2 + 2 * pair_index
        explanations = ex.explain(text, ["input-x-gradient", "attention-gradcam"], target=answer)
        assert explanations["input-x-gradient"].tokens[value] == answer
        assert product.item() == pytest.approx(explanations["input-x-gradient"].scores[value], rel=1e-4)
        # the method takes the mean over heads and queries, and drops negative values (in short lists those of the key)
        call = ex.record(text, ("attention", "attention_gradient"), target=answer).calls[-1]
        weights = call.attention_gradient[0].sum((1, 2)) / tokens
        of_key, of_value = weights @ call.attention[0, :, -1, [key, value]]
        assert of_value.item() == pytest.approx(
            heads * tokens * explanations["attention-gradcam"].scores[value], rel=1e-4
        )
        assert gradcam.item() == pytest.approx((of_key + of_value).item(), rel=1e-4)


@pytest.mark.parametrize("target_means", [[0.0, 0.0], [1e3, 0.0], [0.0, 1e3]], ids=["both", "one", "the other"])
def test_shifting_output_vectors_preserves_probabilities(
    script: Any, ex: clearhead.Explainer, target_means: list[float]
) -> None:
    model = ex.adapter.model
    probabilities = model(IDS[:, :-1]).logits.softmax(-1)
    shift_scores_to(script, model, target_means)
    before, scores_before = model.lm_head.weight.detach().clone(), compute_scores(script, model)
    script.shift_output_vectors(model, 2.0, LISTS)
    shift = model.lm_head.weight - before
    assert shift.norm(dim=-1).min() > 0.1 and shift.std(0).max() < 1e-4  # all of them by the same vector
    # logits are in the hundreds where a score was set to a thousand
    torch.testing.assert_close(model(IDS[:, :-1]).logits.softmax(-1), probabilities, rtol=1e-2, atol=1e-3)
    means_after = compute_scores(script, model).mean(0)
    torch.testing.assert_close(
        means_after, torch.maximum(scores_before.mean(0), 2.0 * scores_before.std(0)), rtol=1e-3, atol=1e-2
    )


def test_clear_scores_are_not_shifted(script: Any, ex: clearhead.Explainer) -> None:
    model = ex.adapter.model
    current = compute_scores(script, model)
    before = model.lm_head.weight.detach().clone()
    script.shift_output_vectors(model, 0.9 * float((current.mean(0) / current.std(0)).min()), LISTS)
    assert torch.equal(model.lm_head.weight, before)
