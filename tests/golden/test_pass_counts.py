"""The number of passes of typical calls equals the golden counts (`make golden`)."""

import pytest

from tests.golden import passes
from tests.golden.storage import GOLDEN_FOLDER, load_json

pytestmark = [pytest.mark.usefixtures("same_transformers"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("name", passes.CALLS)
def test_pass_counts_of_each_call_equal_golden_counts(name: str) -> None:
    golden = load_json(GOLDEN_FOLDER, "passes")
    counted = passes.count_call(name)
    assert counted == {key: golden[key] for key in counted}


def test_pass_counts_of_each_method_equal_golden_counts() -> None:
    golden = load_json(GOLDEN_FOLDER, "passes")
    counted = passes.count_methods()
    assert counted == {key: golden[key] for key in counted}


def test_every_golden_count_belongs_to_a_call() -> None:
    calls = {f"{name}/{time}" for name in passes.CALLS for time in ("first", "again")}
    assert load_json(GOLDEN_FOLDER, "passes").keys() == calls | {f"one text, {name}" for name in passes.METHODS}


def test_every_pass_is_counted() -> None:
    model, *processor = passes.build_model("bert-classifier")
    explainer = passes.load_explainer("bert-classifier", model, *processor)
    with passes.count_passes(model) as once:
        explainer.explain("So boring!", "saliency")
    with passes.count_passes(model) as twice:
        for _ in range(2):
            explainer.explain("So boring!", "saliency")
    assert once.forward > 0 and (twice.forward, twice.backward) == (2, 2)
