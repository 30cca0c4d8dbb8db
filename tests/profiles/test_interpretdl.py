"""The profiles idl_bt and idl_ga against the specification: no outputs of InterpretDL's own are at hand."""

from typing import Any

import numpy as np
import pytest
import torch

from clearhead.errors import ClearheadWarning
from tests import models
from tests.methods import replica_comparison
from tests.replicas import beyond_intuition_head as head
from tests.replicas import beyond_intuition_token as token
from tests.replicas import generic
from tests.replicas import interpretdl as replica
from tests.replicas.path_passes import Walker
from tests.replicas.plain_pass import Seen, watch

HEAD, TOKEN = "beyond-intuition-head", "beyond-intuition-token"


def of(label: int, probability: bool) -> Any:
    """The logit of a class, or its probability."""
    return lambda output: (output.logits.softmax(-1) if probability else output.logits)[0, label]


def both(subject: str, raw: Any, probability: bool) -> tuple[Any, Seen, Seen, np.ndarray, int]:
    """The model, what the predicted class and another one show, that other one's feedback, and its number."""
    model, inputs = replica_comparison.explainer(subject).adapter.model, replica_comparison.model_inputs(subject, raw)
    given = {name: part.double() if part.is_floating_point() else part for name, part in inputs.items()}
    with torch.no_grad():
        predicted = int(model(**given).logits[0].argmax())
    label = (predicted + 1) % 3
    mine, other = (watch(model, inputs, of(one, probability)) for one in (predicted, label))
    wished = head.feedback(Walker(model, replica_comparison.model_inputs(subject, raw), of(label, probability)))
    return model, mine, other, wished, label


def test_on_pictures() -> None:
    ex, raw = replica_comparison.explainer("vit/image"), models.inputs("vit/image")[0]
    model, mine, other, wished, label = both("vit/image", raw, probability=True)
    known = {
        ("idl_bt", HEAD): replica.head_wise(mine, wished, [1, 2])[0],
        ("idl_bt", TOKEN): token.matrix(model, mine, wished, [1, 2])[0],
        ("idl_ga", "generic"): generic.matrix(other, [1, 2], fusion="separate-means")[0],
    }
    for (profile, method), expected in known.items():
        e = ex.explain(raw, method, target=label, profile=profile, layers=(1, None))
        assert e.target["scale"] == "probability" and e.target["index"] == label and np.isnan(e.scores[0])
        assert replica_comparison.gap(e.scores[1:], expected[1:]) < 1e-5, method
    honest = ex.explain(raw, HEAD, target=label, scale="probability", layers=(1, None))
    theirs = ex.explain(raw, HEAD, target=label, profile="idl_bt", layers=(1, None))
    assert replica_comparison.gap(honest.scores[1:], theirs.scores[1:]) > 1e-3, (
        "weights of the predicted class are other weights"
    )


def test_on_pictures_whose_patches_are_averaged() -> None:
    """The mean over the patches' rows, identity included."""
    ex, raw = replica_comparison.explainer("beit/image"), models.inputs("beit/image")[0]
    _, mine, other, wished, label = both("beit/image", raw, probability=True)
    rows = replica_comparison.slow("beit/image", raw)[1]
    e = ex.explain(raw, HEAD, target=label, profile="idl_bt", layers=(0, None))
    assert replica_comparison.gap(e.scores[1:], (rows @ replica.head_wise(mine, wished, [0, 1, 2]))[1:]) < 1e-5
    e = ex.explain(raw, "generic", target=label, profile="idl_ga", layers=(0, None))
    whole = generic.matrix(other, fusion="separate-means") + np.eye(other.units)
    assert replica_comparison.gap(e.scores[1:], (rows @ whole)[1:]) < 1e-5


@pytest.mark.parametrize("text", models.TEXTS[:2])
def test_on_texts(text: str) -> None:
    ex = replica_comparison.explainer("bert/classify")
    model, mine, other, wished, label = both("bert/classify", text, probability=False)
    e = ex.explain(text, HEAD, target=label, profile="idl_bt")
    assert e.provenance["layers"] == [2, 3] and e.target["scale"] == "logit"
    assert replica_comparison.gap(e.scores, replica.head_wise(mine, wished, [2])[0]) < 1e-9
    for layers in ((-1, None), (0, None)):
        e = ex.explain(text, TOKEN, target=label, profile="idl_bt", layers=layers)
        chosen = list(range(3)[slice(*layers)])
        assert replica_comparison.gap(e.scores, replica.token_wise_on_bert(model, other, wished, chosen)[0]) < 1e-9
    # GA explains the predicted class, whichever one is asked for
    with pytest.warns(ClearheadWarning, match=f"target={label} is ignored"):
        e = ex.explain(text, "generic", target=label, profile="idl_ga")
    assert e.provenance["ignored_target"] == str(label)
    assert "ignored_target" not in ex.explain(text, "generic", profile="idl_ga").provenance
    expected = generic.matrix(mine, [2], fusion="separate-means")[0]
    expected[0] += 1
    assert e.target["index"] != label and replica_comparison.gap(e.scores, expected) < 1e-9


def test_padding_is_part_of_the_maps() -> None:
    """Given padding stays: nobody looks at it, but maps' gradients have its columns, and heads are weighed by all."""
    ex = replica_comparison.explainer("bert/classify")
    given = replica_comparison.model_inputs("bert/classify", models.TEXTS[1])
    padded = {name: torch.nn.functional.pad(part, (0, 5)) for name, part in given.items()}
    mine = watch(ex.adapter.model, padded, of(1, probability=False))
    wished = head.feedback(Walker(ex.adapter.model, padded, of(1, probability=False)))
    predicted = int(mine.logits.argmax())
    weighed = watch(ex.adapter.model, padded, of(predicted, probability=False))
    e = ex.explain(padded, HEAD, target=1, profile="idl_bt")
    assert replica_comparison.gap(e.scores, replica.head_wise(weighed, wished, [2])[0]) < 1e-9
    assert not e.scores[-5:].any()
    short = ex.explain(given, HEAD, target=1, profile="idl_bt")
    assert replica_comparison.gap(short.scores, e.scores[:-5]) > 1e-3, "their weights are others"
    e = ex.explain(padded, TOKEN, target=1, profile="idl_bt")
    assert replica_comparison.gap(e.scores, replica.token_wise_on_bert(ex.adapter.model, mine, wished, [2])[0]) < 1e-9
    assert len(ex.explain(padded, "generic", profile="idl_ga")) == mine.units
