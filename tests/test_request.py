"""`ExplainRequest`: keywords, option objects and their precedence."""

import pytest

import clearhead
from clearhead import ComputeOptions, InputError, InputOptions
from clearhead.request import make_request
from tests import models

TEXTS = ["She hates the book because it isn't good", "So boring!"]


def test_option_objects_equal_keywords():
    ex = models.explainer("bert/classify")
    by_keyword = ex.explain(TEXTS, "smoothgrad", batch_size=1, seed=3, max_length=6)
    by_object = ex.explain(
        TEXTS,
        "smoothgrad",
        input_options=InputOptions(max_length=6),
        compute_options=ComputeOptions(batch_size=1, seed=3),
    )
    for first, second in zip(by_keyword, by_object, strict=True):
        assert first.scores.tobytes() == second.scores.tobytes()
        assert first.certificate["seed"] == 3 and len(first.units) == len(second.units) <= 6


def test_keyword_takes_precedence_over_object():
    request = make_request(
        "explain", "a", "generic", None, seed=5, compute_options=ComputeOptions(seed=3, batch_size=2)
    )
    assert request.compute_options == ComputeOptions(seed=5, batch_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_options": {"seed": 1}}, r"compute_options= must be ComputeOptions\(…\), not {'seed': 1}"),
        ({"input_options": ComputeOptions()}, r"input_options= must be InputOptions"),
        ({"batch_size": 0}, "batch_size=0 is not valid: it must be at least 1"),
        ({"truncation_side": "middle"}, "use 'left' or 'right'"),
        ({"kernel": "materialised", "checkpoint": True}, "checkpoint=True needs a tiled pass"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_request("explain", "a", "generic", None, **options)


def test_unknown_keyword_is_a_type_error_that_lists_the_options():
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'sed'; options: .*seed"):
        models.explainer("bert/classify").explain(TEXTS[0], sed=1, method="generic")


def test_explain_has_few_parameters():
    import inspect

    assert len(inspect.signature(clearhead.Explainer.explain).parameters) - 1 <= 15
