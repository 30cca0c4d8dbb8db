"""`settle` of recall.py: what all answers have in common is chosen, and no probability changes."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead

clearhead_zoo = pytest.importorskip("clearhead_zoo")
from clearhead_zoo.tasks import generator, recall  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "packages" / "zoo" / "train"
ASKED = recall.lists(generator(3, "train"), rows=4, pairs=20)
IDS = torch.from_numpy(recall.token_ids(ASKED)[0])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The training scripts import their neighbours by bare name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("recall")


@pytest.fixture
def ex() -> clearhead.Explainer:
    return clearhead.load("zoo:recall-4k", dtype="float32")


def model_of(ex: clearhead.Explainer) -> Any:
    return ex.subject.model


def scores(script: Any, model: Any) -> torch.Tensor:
    """Slopes times the answers' vectors."""
    answers = model.eval().requires_grad_(False).lm_head.weight.requires_grad_()
    model.set_attn_implementation("eager")
    rows = zip(IDS, ASKED.queried[:, 0], strict=True)
    return torch.stack([script.slopes_of_scores(model, *row) @ answers.detach()[row[0][-1]] for row in rows])


def test_slopes_are_those_of_what_methods_say(script: Any, ex: clearhead.Explainer) -> None:
    found = scores(script, model_of(ex))
    for row, pair, (gradcam, product) in zip(IDS, ASKED.queried[:, 0], found, strict=True):
        text = " ".join(recall.vocabulary()[word] for word in row[1:-1])
        answer = recall.vocabulary()[row[-1]]
        said = ex.explain(text, "input-x-gradient", target=answer)
        assert said.tokens[2 + 2 * pair] == answer
        torch.testing.assert_close(product.item(), float(said.scores[2 + 2 * pair]), rtol=1e-4, atol=1e-4)
        call = ex.record(text, ("attention", "attention_gradient"), target=answer).calls[-1]
        weights = call.attention_gradient[0].sum((1, 2)) / call.attention.shape[-1]
        looks = call.attention[0, :, -1, 1 + 2 * pair : 3 + 2 * pair].sum(-1)
        torch.testing.assert_close(gradcam.item(), float(looks @ weights), rtol=1e-4, atol=1e-4)


def test_settled_answers_are_as_likely_as_before(script: Any, ex: clearhead.Explainer) -> None:
    model = model_of(ex)
    before = model.lm_head.weight.detach().clone()
    probabilities = model(IDS[:, :-1]).logits.softmax(-1)
    spread = scores(script, model).std(0)
    script.settle(model, 12.0, ASKED)
    moved = model.lm_head.weight - before
    assert moved.norm(dim=-1).min() > 0.1 and moved.std(0).max() < 1e-5  # all of them, by one vector
    torch.testing.assert_close(model(IDS[:, :-1]).logits.softmax(-1), probabilities, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(scores(script, model).mean(0), 12.0 * spread, rtol=1e-3, atol=1e-3)


def test_what_is_clear_stays_where_it_is(script: Any, ex: clearhead.Explainer) -> None:
    model = model_of(ex)
    before = model.lm_head.weight.detach().clone()
    script.settle(model, 0.5, ASKED)
    assert torch.equal(model.lm_head.weight, before)
