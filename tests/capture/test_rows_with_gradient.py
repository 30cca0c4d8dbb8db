"""Which rows reach the target, seen without tiles where a kernel makes sums: a long input has too many of them."""

from clearhead.adapters.base import InputOptions
from clearhead.capture.attention.tiled import TiledAttention, TilingConfig
from clearhead.engine.attention_mode import find_rows_with_gradient
from clearhead.engine.target_batch import TargetBatch
from clearhead.targets import make_target
from tests import models
from tests.capture.reference_kernel import WholeMaps


def test_by_a_kernel_as_by_tiles(monkeypatch):
    ex = models.explainer("bert/classify")
    raw = models.inputs("bert/classify")[0]
    ex.explain(raw)
    sample = ex.adapter.make_samples(raw, InputOptions())[0]
    target = make_target(0, "logit")
    last = len(ex.recorder.self_test.call_sites) - 1
    tiled = TargetBatch(ex.adapter, [sample], [[target]], tiling=TilingConfig(tile_rows=2))
    assert find_rows_with_gradient(ex.recorder, tiled, last) == {0}
    monkeypatch.setattr(TiledAttention, "for_each_tile", None)  # no tile is made
    summed = TargetBatch(ex.adapter, [sample], [[target]], tiling=TilingConfig(kernel=WholeMaps()))
    assert find_rows_with_gradient(ex.recorder, summed, last) == {0}
    assert find_rows_with_gradient(ex.recorder, summed, last - 1) == set(range(len(sample.units)))
