"""Laws 2 and 6 for every registered protocol: the model stays as it was, and a second run gives the same figures."""

import numpy as np
import pytest

from clearhead.bench.data.base import Example
from clearhead.bench.data.evidence import Characters, Mask
from clearhead.bench.job import PROTOCOLS
from clearhead.errors import InputError
from tests import models
from tests.invariants import model_snapshot

#: Signed and unsigned, a control, and one that has perceptions.
METHODS = ["saliency", "generic", "random", "rollout"]
#: Protocols that need another kind of model or of data than a classifier of texts or pictures has.
ELSEWHERE = {
    "detections": "a detector",
    "label-randomisation": "a second model, trained on permuted labels",
    "mosaic": "pictures of two classes side by side",
    "perturb-regions": "regions that a detector found",
}
#: Settings for pictures of 16 × 16 pixels, where the default is for larger ones.
SETTINGS = {"squares": {"sides": (4, 8), "stride": 4}}


def examples(subject):
    """Inputs with a true class and with evidence: some characters, or the upper half of a picture."""
    found = []
    for number, raw in enumerate(models.inputs(subject)):
        if subject.endswith("/image"):
            upper = np.zeros(np.shape(raw)[:2], dtype=bool)
            upper[: len(upper) // 2] = True
            evidence = Mask(upper)
        else:
            evidence = Characters(2, 6)
        found.append(Example(str(number), raw, number % 2, ((evidence,),)))
    return found


def measured(ex, protocol, given):
    targets = [protocol.target(one) for one in given]
    explanations = ex.explain([one.input for one in given], METHODS, target=targets)
    return [repr(one) for one in protocol.measure(ex, given, explanations)]


@pytest.mark.parametrize("name", sorted(PROTOCOLS.keys() - ELSEWHERE.keys()))
def test_the_model_stays_as_it_was_and_a_second_run_gives_the_same(name):
    protocol, counts = PROTOCOLS[name](**SETTINGS.get(name, {})), []
    for subject in ("bert/classify", "vit/image"):
        ex, given = models.explainer(subject), examples(subject)
        ex.subject.model.train()
        before = model_snapshot.of_model(ex.subject.model)
        try:
            once, again = (measured(ex, protocol, given) for _ in range(2))
        except InputError:  # it is for the other kind of input
            once = again = []
        assert model_snapshot.changes(before, model_snapshot.of_model(ex.subject.model)) == []
        assert once == again
        counts.append(len(once))
    assert max(counts) > 0, "it measured nothing here: say in ELSEWHERE what it needs"
