"""Seeds depend on the content of an input alone, not on the thread that derives them."""

import os
import select
import signal

import pytest

from clearhead.adapters.base import InputOptions
from clearhead.engine import target_batch
from clearhead.engine.target_batch import TargetBatch
from clearhead.targets import make_target
from tests import models


def make_batch(seed: int) -> TargetBatch:
    explainer = models.explainer("bert/classify")
    samples = [explainer.adapter.make_samples(raw, InputOptions())[0] for raw in models.inputs("bert/classify")]
    return TargetBatch(explainer.adapter, samples, [[make_target(0, "logit")]] * len(samples), seed)


def test_seeds_derived_in_background_equal_those_derived_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    on_demand = make_batch(seed=5)
    monkeypatch.setattr(target_batch, "MIN_THREADED_HASH_BYTES", 0)
    in_background = make_batch(seed=5)
    in_background.start_deriving_seeds()
    assert in_background.seeds == on_demand.seeds
    assert in_background.fingerprints == on_demand.fingerprints
    assert len(set(on_demand.seeds)) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_seeds_are_derived_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_batch, "MIN_THREADED_HASH_BYTES", 0)
    expected = make_batch(seed=0).seeds  # starts the threads of this process
    child_batch = make_batch(seed=0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:  # the threads of the parent do not exist here
        os.write(write_end, repr(child_batch.seeds).encode())
        os._exit(0)
    os.close(write_end)
    has_answered = bool(select.select([read_end], [], [], 60)[0])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert has_answered, "the child waits for threads that only its parent has"
    with os.fdopen(read_end) as pipe:
        assert pipe.read() == repr(expected)
