"""Typical calls take as many passes as when the golden counts were written (`make golden`)."""

import pytest

from tests.golden import passes
from tests.golden.storage import GOLDEN_FOLDER, load_json

pytestmark = [pytest.mark.usefixtures("same_transformers"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("name", passes.CALLS)
def test_a_call_takes_the_golden_number_of_passes(name: str) -> None:
    golden = load_json(GOLDEN_FOLDER, "passes")
    counted = passes.count_call(name)
    assert counted == {key: golden[key] for key in counted}


def test_each_method_takes_the_golden_number_of_passes() -> None:
    golden = load_json(GOLDEN_FOLDER, "passes")
    counted = passes.count_methods()
    assert counted == {key: golden[key] for key in counted}


def test_every_golden_count_belongs_to_a_call() -> None:
    calls = {f"{name}/{time}" for name in passes.CALLS for time in ("first", "again")}
    assert load_json(GOLDEN_FOLDER, "passes").keys() == calls | {f"one text, {name}" for name in passes.METHODS}


def test_a_further_pass_is_noticed() -> None:
    model, *processor = passes.build_model("bert-classifier")
    explainer = passes.load_explainer("bert-classifier", model, *processor)
    with passes.count_passes(model) as once:
        explainer.explain("So boring!", "saliency")
    with passes.count_passes(model) as twice:
        for _ in range(2):
            explainer.explain("So boring!", "saliency")
    assert once.forward > 0 and (twice.forward, twice.backward) == (2, 2)
