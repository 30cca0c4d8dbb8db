"""Thread safety: two models, one model, models with a shared config, and plain forward passes during recording."""

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


def is_same(actual, expected):
    # Threads may use other kernels, so the last bits may differ.
    return all(cases.gap(actual[method].scores, expected[method].scores) <= 1e-10 for method in METHODS)


def in_threads(*functions):
    """Run each function ROUNDS times in its own thread, started together; return the results or raise."""
    start = threading.Barrier(len(functions))

    def repeat(function):
        start.wait()
        return [function(round_) for round_ in range(ROUNDS)]

    with ThreadPoolExecutor(len(functions)) as pool:
        return [task.result() for task in [pool.submit(repeat, function) for function in functions]]


def explain_texts(ex, texts):
    return lambda round_: (round_ % len(texts), ex.explain(texts[round_ % len(texts)], method=METHODS))


@pytest.mark.parametrize("names", [("bert", "bert"), ("bert", "distilbert"), ("deberta", "albert")], ids="+".join)
def test_two_models_in_threads_equal_sequential(names):
    texts = models.TEXTS
    sequential = [[models.explainer(f"{n}/classify").explain(text, method=METHODS) for text in texts] for n in names]
    explainers = [models.explainer(f"{name}/classify") for name in names]
    for expected, results in zip(sequential, in_threads(*(explain_texts(ex, texts) for ex in explainers)), strict=True):
        assert all(is_same(actual, expected[i]) for i, actual in results)


@pytest.mark.parametrize("name", ["bert", "deberta"])
@pytest.mark.parametrize("explainers", [1, 2])
def test_one_model_in_two_threads_equals_sequential(name, explainers):
    """Also on first use, when both threads run the self-test with inputs of different lengths."""
    subject = f"{name}/classify"
    expected = [models.explainer(subject).explain(text, method=METHODS) for text in models.TEXTS]
    first = models.explainer(subject)
    second = first if explainers == 1 else clearhead.load(first.adapter.model, first.adapter.processor)
    reversed_texts = models.TEXTS[::-1]
    first_results, second_results = in_threads(
        explain_texts(first, models.TEXTS), explain_texts(second, reversed_texts)
    )
    assert all(is_same(actual, expected[i]) for i, actual in first_results)
    assert all(is_same(actual, expected[len(expected) - 1 - i]) for i, actual in second_results)


def test_models_with_shared_config_share_a_lock_and_equal_sequential():
    """The attention implementation is a flag on the config, which the two must not switch concurrently."""
    first = models.explainer("bert/classify")
    copied_model = copy.deepcopy(first.adapter.model)
    for module in copied_model.modules():
        if hasattr(module, "config"):
            module.config = first.adapter.model.config
    second = clearhead.load(copied_model, first.adapter.processor)
    assert second.adapter.session.lock is first.adapter.session.lock
    expected = [models.explainer("bert/classify").explain(text, method=METHODS) for text in models.TEXTS]
    for results in in_threads(explain_texts(first, models.TEXTS), explain_texts(second, models.TEXTS[::-1])):
        lengths = [len(expected[i]["generic"]) for i in range(3)]
        for _, actual in results:
            assert is_same(actual, expected[lengths.index(len(actual["generic"]))])
    assert first.adapter.model.config._attn_implementation == "sdpa"


def test_truncation_does_not_leak_between_threads():
    """Truncation is a setting of the tokenizer, which must not leak between threads."""
    ex, text = models.explainer("bert/classify"), models.TEXTS[1]
    full, truncated = ex.explain(text, method="generic"), ex.explain(text, max_length=7, method="generic")
    assert len(truncated) == 7 < len(full)
    full_lengths, truncated_lengths = in_threads(
        lambda _: len(ex.explain(text, method="generic")),
        lambda _: len(ex.explain(text, max_length=7, method="generic")),
    )
    assert set(full_lengths) == {len(full)} and set(truncated_lengths) == {7}


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_plain_forward_is_correct_during_recording_in_another_thread(name, implementation):
    """The user's own padded batches give the right logits while another thread records the same model."""
    ex = models.explainer(f"{name}/classify", torch.float32)
    model, batch = ex.adapter.model, cases.collated(ex, models.TEXTS)
    if name != "deberta":
        model.set_attn_implementation(implementation)

    def plain(_):
        with torch.no_grad():
            return model(**batch).logits

    expected_logits, expected = plain(0), ex.explain(models.TEXTS[0], method=METHODS)
    results, logits = in_threads(lambda _: ex.explain(models.TEXTS[0], method=METHODS), plain)
    assert all(cases.gap(actual, expected_logits) <= 1e-5 for actual in logits)
    for actual in results:
        assert all(cases.gap(actual[method].scores, expected[method].scores) <= 1e-5 for method in METHODS)


@pytest.mark.parametrize("moment", ["masks before the switch", "masks after the switch"])
@pytest.mark.parametrize("subject", ["bert/classify", "modernbert/mask"])
def test_plain_forward_survives_implementation_switch_between_mask_and_use(moment, subject):
    """Another thread's pass is paused between its masks and its attention while recording starts, or ends.

    It must keep its implementation: sdpa's masks are of another kind than eager's.
    """
    ex = models.explainer(subject)
    model, raws = ex.adapter.model, models.inputs(subject)
    batch = cases.collated(ex, raws)
    with torch.no_grad():
        expected_logits = model(**batch).logits
    ex.explain(raws[0], method="generic")
    recording, paused, resume = (threading.Event() for _ in range(3))
    logits, thread_of_user = [], []

    def run_plain_pass():
        thread_of_user.append(threading.get_ident())
        with torch.no_grad():
            logits.append(model(**batch).logits)

    thread = threading.Thread(target=run_plain_pass)
    first_layer = next(m for name, m in model.named_modules() if name.endswith((".layer.0", ".layers.0")))

    def pause_in_first_layer(module, args):
        if thread_of_user and threading.get_ident() == thread_of_user[0]:
            paused.set()
            assert resume.wait(20)
        elif moment == "masks before the switch":
            resume.set()  # the recorder is inside its forward pass and has switched the flag
            thread.join(20)

    def start_plain_pass(module, args):
        if threading.get_ident() == main and moment == "masks after the switch" and not recording.is_set():
            recording.set()
            thread.start()
            assert paused.wait(20)

    main = threading.get_ident()
    handles = [
        first_layer.register_forward_pre_hook(pause_in_first_layer),
        model.register_forward_pre_hook(start_plain_pass),
    ]
    if moment == "masks before the switch":
        thread.start()
        assert paused.wait(20)
    explanation = ex.explain(raws[0], method="generic")
    resume.set()
    thread.join(20)
    for handle in handles:
        handle.remove()
    assert len(logits) == 1
    assert cases.gap(logits[0], expected_logits) <= cases.tolerance(subject)
    assert np.allclose(explanation.scores, ex.explain(raws[0], method="generic").scores, rtol=1e-9, atol=0)
