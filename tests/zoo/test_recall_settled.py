"""`settle` of recall.py: what all answers have in common is chosen, and no probability changes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead

clearhead_zoo = pytest.importorskip("clearhead_zoo")
from clearhead_zoo.tasks import make_generator, recall  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "packages" / "zoo" / "train"
ASKED = recall.sample_lists(make_generator(3, "train"), num_rows=4, num_pairs=20)
IDS = torch.from_numpy(recall.encode_lists(ASKED)[0])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The training scripts import their neighbours by bare name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("recall")


@pytest.fixture
def ex() -> clearhead.Explainer:
    return clearhead.load("zoo:recall-4k", dtype="float32")


def scores(script: Any, model: Any) -> torch.Tensor:
    """Slopes times the answers' vectors: list × score."""
    answers = model.eval().requires_grad_(False).lm_head.weight.requires_grad_()
    model.set_attn_implementation("eager")
    rows = zip(IDS, ASKED.queried_indices[:, 0], strict=True)
    return torch.stack([script.compute_score_slopes(model, *row) @ answers.detach()[row[0][-1]] for row in rows])


def lowered(script: Any, model: Any, goals: list[float]) -> None:
    """Answers are moved together until the scores have these means."""
    found = scores(script, model)
    rows = zip(IDS, ASKED.queried_indices[:, 0], strict=True)
    along = torch.stack([script.compute_score_slopes(model, *row) for row in rows]).mean(0)
    vector = torch.linalg.lstsq(along, torch.tensor(goals) - found.mean(0)).solution
    model.lm_head.weight.requires_grad_(False).add_(vector)


def test_slopes_are_those_of_what_methods_say(script: Any, ex: clearhead.Explainer) -> None:
    heads, tokens = ex.adapter.model.config.num_attention_heads, IDS.shape[1] - 1
    found = scores(script, ex.adapter.model)
    for row, pair, (gradcam, product) in zip(IDS, ASKED.queried_indices[:, 0], found, strict=True):
        text = " ".join(recall.build_vocabulary()[word] for word in row[1:-1])
        answer = recall.build_vocabulary()[row[-1]]
        key, value = 1 + 2 * pair, 2 + 2 * pair
        said = ex.explain(text, ["input-x-gradient", "attention-gradcam"], target=answer)
        assert said["input-x-gradient"].tokens[value] == answer
        assert product.item() == pytest.approx(said["input-x-gradient"].scores[value], rel=1e-4)
        # the method takes the mean over heads and queries, and drops what is below nought (in short lists the key's)
        call = ex.record(text, ("attention", "attention_gradient"), target=answer).calls[-1]
        weights = call.attention_gradient[0].sum((1, 2)) / tokens
        of_key, of_value = weights @ call.attention[0, :, -1, [key, value]]
        assert of_value.item() == pytest.approx(heads * tokens * said["attention-gradcam"].scores[value], rel=1e-4)
        assert gradcam.item() == pytest.approx((of_key + of_value).item(), rel=1e-4)


@pytest.mark.parametrize("goals", [[0.0, 0.0], [1e3, 0.0], [0.0, 1e3]], ids=["both", "one", "the other"])
def test_settled_answers_are_as_likely_as_before(script: Any, ex: clearhead.Explainer, goals: list[float]) -> None:
    model = ex.adapter.model
    probabilities = model(IDS[:, :-1]).logits.softmax(-1)
    lowered(script, model, goals)
    before, found = model.lm_head.weight.detach().clone(), scores(script, model)
    script.shift_output_vectors(model, 2.0, ASKED)
    moved = model.lm_head.weight - before
    assert moved.norm(dim=-1).min() > 0.1 and moved.std(0).max() < 1e-4  # all of them, by one vector
    # logits are in the hundreds where a score was put at a thousand
    torch.testing.assert_close(model(IDS[:, :-1]).logits.softmax(-1), probabilities, rtol=1e-2, atol=1e-3)
    after = scores(script, model).mean(0)
    torch.testing.assert_close(after, torch.maximum(found.mean(0), 2.0 * found.std(0)), rtol=1e-3, atol=1e-2)


def test_what_is_clear_stays_where_it_is(script: Any, ex: clearhead.Explainer) -> None:
    model = ex.adapter.model
    found = scores(script, model)
    before = model.lm_head.weight.detach().clone()
    script.shift_output_vectors(model, 0.9 * float((found.mean(0) / found.std(0)).min()), ASKED)
    assert torch.equal(model.lm_head.weight, before)
