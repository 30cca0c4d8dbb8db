"""The profiles idl_bt and idl_ga equal the specification; outputs of InterpretDL itself are not available."""

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
from tests.replicas.path_passes import InputEvaluator
from tests.replicas.plain_pass import Seen, watch

HEAD, TOKEN = "beyond-intuition-head", "beyond-intuition-token"


def select_class_score(label: int, probability: bool) -> Any:
    """Return a function that selects the logit of a class, or its probability."""
    return lambda output: (output.logits.softmax(-1) if probability else output.logits)[0, label]


def record_two_classes(subject: str, raw: Any, probability: bool) -> tuple[Any, Seen, Seen, np.ndarray, int]:
    """Return the model, the passes of the predicted and of another class, the feedback of the latter, and its index."""
    model, inputs = replica_comparison.explainer(subject).adapter.model, replica_comparison.model_inputs(subject, raw)
    arguments = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    with torch.no_grad():
        predicted = int(model(**arguments).logits[0].argmax())
    label = (predicted + 1) % 3
    predicted_pass, target_pass = (
        watch(model, inputs, select_class_score(class_index, probability)) for class_index in (predicted, label)
    )
    feedback = head.compute_feedback(
        InputEvaluator(model, replica_comparison.model_inputs(subject, raw), select_class_score(label, probability))
    )
    return model, predicted_pass, target_pass, feedback, label


def test_vit_scores_equal_reference() -> None:
    ex, raw = replica_comparison.explainer("vit/image"), models.inputs("vit/image")[0]
    model, predicted_pass, target_pass, feedback, label = record_two_classes("vit/image", raw, probability=True)
    expected_scores = {
        ("idl_bt", HEAD): replica.head_wise(predicted_pass, feedback, [1, 2])[0],
        ("idl_bt", TOKEN): token.matrix(model, predicted_pass, feedback, [1, 2])[0],
        ("idl_ga", "generic"): generic.matrix(target_pass, [1, 2], fusion="separate-means")[0],
    }
    for (profile, method), expected in expected_scores.items():
        e = ex.explain(raw, method, target=label, profile=profile, layers=(1, None))
        assert e.target["scale"] == "probability" and e.target["index"] == label and np.isnan(e.scores[0])
        assert replica_comparison.gap(e.scores[1:], expected[1:]) < 1e-5, method
    without_profile = ex.explain(raw, HEAD, target=label, scale="probability", layers=(1, None))
    with_profile = ex.explain(raw, HEAD, target=label, profile="idl_bt", layers=(1, None))
    assert replica_comparison.gap(without_profile.scores[1:], with_profile.scores[1:]) > 1e-3, (
        "head weights of the predicted class must differ"
    )


def test_mean_pooled_image_scores_equal_reference() -> None:
    """The mean over the rows of the patches, including the identity."""
    ex, raw = replica_comparison.explainer("beit/image"), models.inputs("beit/image")[0]
    _, predicted_pass, target_pass, feedback, label = record_two_classes("beit/image", raw, probability=True)
    readout = replica_comparison.record_plain_pass("beit/image", raw)[1]
    e = ex.explain(raw, HEAD, target=label, profile="idl_bt", layers=(0, None))
    assert (
        replica_comparison.gap(e.scores[1:], (readout @ replica.head_wise(predicted_pass, feedback, [0, 1, 2]))[1:])
        < 1e-5
    )
    e = ex.explain(raw, "generic", target=label, profile="idl_ga", layers=(0, None))
    relevance = generic.matrix(target_pass, fusion="separate-means") + np.eye(target_pass.units)
    assert replica_comparison.gap(e.scores[1:], (readout @ relevance)[1:]) < 1e-5


@pytest.mark.parametrize("text", models.TEXTS[:2])
def test_text_scores_equal_reference(text: str) -> None:
    ex = replica_comparison.explainer("bert/classify")
    model, predicted_pass, target_pass, feedback, label = record_two_classes("bert/classify", text, probability=False)
    e = ex.explain(text, HEAD, target=label, profile="idl_bt")
    assert e.provenance["layers"] == [2, 3] and e.target["scale"] == "logit"
    assert replica_comparison.gap(e.scores, replica.head_wise(predicted_pass, feedback, [2])[0]) < 1e-9
    for layers in ((-1, None), (0, None)):
        e = ex.explain(text, TOKEN, target=label, profile="idl_bt", layers=layers)
        layer_list = list(range(3)[slice(*layers)])
        assert (
            replica_comparison.gap(e.scores, replica.token_wise_on_bert(model, target_pass, feedback, layer_list)[0])
            < 1e-9
        )
    # idl_ga explains the predicted class for any target
    with pytest.warns(ClearheadWarning, match=f"target={label} is ignored"):
        e = ex.explain(text, "generic", target=label, profile="idl_ga")
    assert e.provenance["ignored_target"] == str(label)
    assert "ignored_target" not in ex.explain(text, "generic", profile="idl_ga").provenance
    expected = generic.matrix(predicted_pass, [2], fusion="separate-means")[0]
    expected[0] += 1
    assert e.target["index"] != label and replica_comparison.gap(e.scores, expected) < 1e-9


def test_given_padding_is_part_of_the_attention_maps() -> None:
    """Given padding is kept: it receives no attention, but its columns have gradients, which change head weights."""
    ex = replica_comparison.explainer("bert/classify")
    inputs = replica_comparison.model_inputs("bert/classify", models.TEXTS[1])
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in inputs.items()}
    target_pass = watch(ex.adapter.model, padded, select_class_score(1, probability=False))
    feedback = head.compute_feedback(InputEvaluator(ex.adapter.model, padded, select_class_score(1, probability=False)))
    predicted = int(target_pass.logits.argmax())
    predicted_pass = watch(ex.adapter.model, padded, select_class_score(predicted, probability=False))
    e = ex.explain(padded, HEAD, target=1, profile="idl_bt")
    assert replica_comparison.gap(e.scores, replica.head_wise(predicted_pass, feedback, [2])[0]) < 1e-9
    assert not e.scores[-5:].any()
    unpadded = ex.explain(inputs, HEAD, target=1, profile="idl_bt")
    assert replica_comparison.gap(unpadded.scores, e.scores[:-5]) > 1e-3, "head weights must differ"
    e = ex.explain(padded, TOKEN, target=1, profile="idl_bt")
    assert (
        replica_comparison.gap(e.scores, replica.token_wise_on_bert(ex.adapter.model, target_pass, feedback, [2])[0])
        < 1e-9
    )
    assert len(ex.explain(padded, "generic", profile="idl_ga")) == target_pass.units
