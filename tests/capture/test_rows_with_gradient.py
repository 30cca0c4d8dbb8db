"""Rows with a gradient are found from kernel reductions without tiles, which are too many for long inputs."""

from clearhead.adapters.base import InputOptions
from clearhead.capture.attention.tiled import TiledAttention, TilingConfig
from clearhead.engine.attention_mode import find_rows_with_gradient
from clearhead.engine.target_batch import TargetBatch
from clearhead.targets import make_target
from tests import models
from tests.capture.reference_kernel import WholeMaps


def test_find_rows_with_gradient_gives_same_rows_with_kernel_and_tiles(monkeypatch):
    ex = models.explainer("bert/classify")
    raw = models.inputs("bert/classify")[0]
    ex.explain(raw, method="generic")
    sample = ex.adapter.make_samples(raw, InputOptions())[0]
    target = make_target(0, "logit")
    last = len(ex.recorder.self_test.call_sites) - 1
    batch = TargetBatch(ex.adapter, [sample], [[target]])
    assert find_rows_with_gradient(ex.recorder, batch, last, TilingConfig(tile_rows=2)) == {0}
    monkeypatch.setattr(TiledAttention, "for_each_tile", None)  # tiles would raise
    tiling = TilingConfig(kernel=WholeMaps())
    assert find_rows_with_gradient(ex.recorder, batch, last, tiling) == {0}
    assert find_rows_with_gradient(ex.recorder, batch, last - 1, tiling) == set(range(len(sample.units)))
