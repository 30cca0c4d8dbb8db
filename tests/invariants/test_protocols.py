"""Invariants of every registered protocol: the model is unchanged, and a second run gives the same measurements."""

import numpy as np
import pytest

from clearhead.bench.data.base import Example
from clearhead.bench.data.evidence import CharSpan, EvidenceMask
from clearhead.bench.job import PROTOCOL_REGISTRY
from clearhead.errors import InputError
from tests import models
from tests.invariants import model_snapshot

#: Signed and unsigned methods, a control, and one with a mixing matrix.
METHODS = ["saliency", "generic", "random", "rollout"]
#: Protocols that need another model or other data than a classifier of texts or images.
NOT_APPLICABLE = {
    "detections": "a detector",
    "label-randomisation": "a second model, trained on permuted labels",
    "mosaic": "images of two classes side by side",
    "perturb-regions": "regions that a detector found",
}
#: Settings for images of 16 × 16 pixels, where the default is for larger ones.
SETTINGS = {"squares": {"sides": (4, 8), "stride": 4}}


def make_examples(model_name):
    """Inputs with a true class and with evidence: some characters, or the upper half of an image."""
    examples = []
    for index, raw_input in enumerate(models.inputs(model_name)):
        if model_name.endswith("/image"):
            upper_half = np.zeros(np.shape(raw_input)[:2], dtype=bool)
            upper_half[: len(upper_half) // 2] = True
            evidence = EvidenceMask(upper_half)
        else:
            evidence = CharSpan(2, 6)
        examples.append(Example(str(index), raw_input, index % 2, ((evidence,),)))
    return examples


def measure(explainer, protocol, examples):
    targets = [protocol.select_target(example) for example in examples]
    explanations = explainer.explain([example.input for example in examples], METHODS, target=targets)
    return [repr(measurement) for measurement in protocol.measure(explainer, examples, explanations)]


@pytest.mark.parametrize("name", sorted(PROTOCOL_REGISTRY.keys() - NOT_APPLICABLE.keys()))
def test_protocol_leaves_model_unchanged_and_is_deterministic(name):
    protocol = PROTOCOL_REGISTRY[name](**SETTINGS.get(name, {}))
    counts = []
    for model_name in ("bert/classify", "vit/image"):
        explainer = models.explainer(model_name)
        examples = make_examples(model_name)
        explainer.adapter.model.train()
        before = model_snapshot.of_model(explainer.adapter.model)
        try:
            first, second = (measure(explainer, protocol, examples) for _ in range(2))
        except InputError:  # the protocol is for the other modality
            first = second = []
        assert model_snapshot.changes(before, model_snapshot.of_model(explainer.adapter.model)) == []
        assert first == second
        counts.append(len(first))
    assert max(counts) > 0, "nothing was measured: state in NOT_APPLICABLE what the protocol needs"
