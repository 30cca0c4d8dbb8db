"""Two threads explain with two models, with one, or with two that share a configuration – and others use the model."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import clearhead
from tests import models
from tests.invariants import cases

METHODS = ["generic", "cat", "saliency", "rollout"]
ROUNDS = 15


def same(one, other):
    # Threads may get other kernels, so the last bits may differ.
    return all(cases.gap(one[method].scores, other[method].scores) <= 1e-10 for method in METHODS)


def in_threads(*work):
    """Each function many times in a thread of its own, all started together; what they return, or raise."""
    start = threading.Barrier(len(work))

    def repeat(function):
        start.wait()
        return [function(round_) for round_ in range(ROUNDS)]

    with ThreadPoolExecutor(len(work)) as pool:
        return [task.result() for task in [pool.submit(repeat, function) for function in work]]


def explaining(ex, texts):
    return lambda round_: (round_ % len(texts), ex.explain(texts[round_ % len(texts)], method=METHODS))


@pytest.mark.parametrize("names", [("bert", "bert"), ("bert", "distilbert"), ("deberta", "albert")], ids="+".join)
def test_two_models(names):
    texts = models.TEXTS
    alone = [[models.explainer(f"{n}/classify").explain(text, method=METHODS) for text in texts] for n in names]
    both = [models.explainer(f"{name}/classify") for name in names]
    for expected, results in zip(alone, in_threads(*(explaining(ex, texts) for ex in both)), strict=True):
        assert all(same(got, expected[i]) for i, got in results)


@pytest.mark.parametrize("name", ["bert", "deberta"])
@pytest.mark.parametrize("explainers", [1, 2])
def test_one_model(name, explainers):
    """Also on first use, when both threads come to the self-test with inputs of different lengths."""
    subject = f"{name}/classify"
    expected = [models.explainer(subject).explain(text, method=METHODS) for text in models.TEXTS]
    first = models.explainer(subject)
    second = first if explainers == 1 else clearhead.load(first.adapter.model, first.adapter.processor)
    backwards = models.TEXTS[::-1]
    one, other = in_threads(explaining(first, models.TEXTS), explaining(second, backwards))
    assert all(same(got, expected[i]) for i, got in one)
    assert all(same(got, expected[len(expected) - 1 - i]) for i, got in other)


def test_two_models_that_share_a_configuration():
    """The attention implementation is a flag on the configuration: the two must not switch it under each other."""
    one = models.explainer("bert/classify")
    twin = copy.deepcopy(one.adapter.model)
    for module in twin.modules():
        if hasattr(module, "config"):
            module.config = one.adapter.model.config
    two = clearhead.load(twin, one.adapter.processor)
    assert two.recorder.lock is one.recorder.lock
    expected = [models.explainer("bert/classify").explain(text, method=METHODS) for text in models.TEXTS]
    for results in in_threads(explaining(one, models.TEXTS), explaining(two, models.TEXTS[::-1])):
        lengths = [len(expected[i]["generic"]) for i in range(3)]
        for _, got in results:
            assert same(got, expected[lengths.index(len(got["generic"]))])
    assert one.adapter.model.config._attn_implementation == "sdpa"


def test_truncated_and_whole_texts_at_once():
    """Truncation is a setting of the tokenizer: threads must not see each other's."""
    ex, text = models.explainer("bert/classify"), models.TEXTS[1]
    whole, cut = ex.explain(text), ex.explain(text, max_length=7)
    assert len(cut) == 7 < len(whole)
    one, other = in_threads(lambda _: len(ex.explain(text)), lambda _: len(ex.explain(text, max_length=7)))
    assert set(one) == {len(whole)} and set(other) == {7}


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_plain_pass_beside_a_recorded_one(name, implementation):
    """The user's own padded batches give the right logits while another thread records the same model."""
    ex = models.explainer(f"{name}/classify", torch.float32)
    model, batch = ex.adapter.model, cases.collated(ex, models.TEXTS)
    if name != "deberta":
        model.set_attn_implementation(implementation)

    def plain(_):
        with torch.no_grad():
            return model(**batch).logits

    real, expected = plain(0), ex.explain(models.TEXTS[0], method=METHODS)
    results, logits = in_threads(lambda _: ex.explain(models.TEXTS[0], method=METHODS), plain)
    assert all(cases.gap(got, real) <= 1e-5 for got in logits)
    for got in results:
        assert all(cases.gap(got[method].scores, expected[method].scores) <= 1e-5 for method in METHODS)


@pytest.mark.parametrize("moment", ["masks made before the switch", "masks made after it"])
@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/mask"])
def test_the_flag_switches_in_the_middle_of_a_plain_pass(moment, subject):
    """Another thread's pass stands between its masks and its attention while recording starts, or ends.

    It must go on the way it began: sdpa's masks are of another kind than eager's.
    """
    ex = models.explainer(subject)
    model, raws = ex.adapter.model, models.inputs(subject)
    batch = cases.collated(ex, raws)
    with torch.no_grad():
        real = model(**batch).logits
    ex.explain(raws[0])
    recording, standing, go_on = (threading.Event() for _ in range(3))
    logits, thread_of_user = [], []

    def use():
        thread_of_user.append(threading.get_ident())
        with torch.no_grad():
            logits.append(model(**batch).logits)

    thread = threading.Thread(target=use)
    first_layer = next(m for name, m in model.named_modules() if name.endswith((".layer.0", ".layers.0")))

    def stand(module, args):
        if thread_of_user and threading.get_ident() == thread_of_user[0]:
            standing.set()
            assert go_on.wait(20)
        elif moment == "masks made before the switch":
            go_on.set()  # the recorder is inside its forward pass: the flag is switched
            thread.join(20)

    def inside(module, args):
        if threading.get_ident() == main and moment == "masks made after it" and not recording.is_set():
            recording.set()
            thread.start()
            assert standing.wait(20)

    main = threading.get_ident()
    handles = [first_layer.register_forward_pre_hook(stand), model.register_forward_pre_hook(inside)]
    if moment == "masks made before the switch":
        thread.start()
        assert standing.wait(20)
    got = ex.explain(raws[0])
    go_on.set()
    thread.join(20)
    for handle in handles:
        handle.remove()
    assert len(logits) == 1
    assert cases.gap(logits[0], real) <= cases.tolerance(subject)
    assert np.allclose(got.scores, ex.explain(raws[0]).scores, rtol=1e-9, atol=0)
