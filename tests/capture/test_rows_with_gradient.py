"""Which rows reach the target, seen without tiles where a kernel makes sums: a long input has too many of them."""

from clearhead.adapters.base import How
from clearhead.capture.attention.tiled import Streamed, Tiles
from clearhead.engine.attention_mode import rows_reached
from clearhead.engine.target_batch import Plan
from clearhead.targets import make_target
from tests import models
from tests.capture.reference_kernel import WholeMaps


def test_by_a_kernel_as_by_tiles(monkeypatch):
    ex = models.explainer("bert/classify")
    raw = models.inputs("bert/classify")[0]
    ex.explain(raw)
    sample = ex.subject.samples(raw, How())[0]
    target = make_target(0, "logit")
    last = len(ex.recorder.tested.places) - 1
    tiled = Plan(ex.subject, [sample], [[target]], streaming=Tiles(rows=2))
    assert rows_reached(ex.recorder, tiled, last) == {0}
    monkeypatch.setattr(Streamed, "sweep", None)  # no tile is made
    summed = Plan(ex.subject, [sample], [[target]], streaming=Tiles(kernel=WholeMaps()))
    assert rows_reached(ex.recorder, summed, last) == {0}
    assert rows_reached(ex.recorder, summed, last - 1) == set(range(len(sample.units)))
