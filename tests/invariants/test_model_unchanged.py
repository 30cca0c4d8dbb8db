"""Invariant 2: the user's model is bitwise identical before and after a call, with hooks and flags, also on errors."""

import threading
from functools import cache

import pytest
import torch

import clearhead
from clearhead.capture.tape import Requirement
from clearhead.capture.topology import ModelTopology
from clearhead.methods import METHOD_REGISTRY, AttributionMethod, register_method
from tests import models
from tests.invariants import cases, model_snapshot

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
SUBJECTS = pytest.mark.parametrize("subject", cases.SUBJECTS)
ERRORS = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


class UserModel:
    """A user's model in training mode: partly frozen, with a gradient, hooks and a custom attribute."""

    def __init__(self, subject, implementation="sdpa"):
        adapter = models.explainer(subject).adapter
        self.model, self.inputs = adapter.model, models.inputs(subject)
        name, task = subject.split("/")
        self.processor = adapter.processor if task == "image" else models.tokenizer(models.TEXT[name][1])
        if self.model.config._attn_implementation != implementation:
            # DeBERTa has no sdpa and stays eager.
            if implementation == "sdpa":
                assert name == "deberta"
            else:
                self.model.set_attn_implementation(implementation)
        self.model.train()
        parameters = list(self.model.parameters())
        for parameter in parameters[::3]:
            parameter.requires_grad_(False)
        parameters[1].grad = torch.ones_like(parameters[1])
        next(m for m in self.model.modules() if isinstance(m, torch.nn.Dropout)).eval()
        self.hook_calls = []
        self.model.register_forward_hook(lambda module, args, output: self.hook_calls.append(1))
        self.model.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        self.layers[-1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
        self.model.note = "mine"
        self.before = self.snapshot()

    @property
    def layers(self):
        return [
            m
            for m in ModelTopology(self.model).layers
            if any("Attention" in type(module).__name__ for module in m.modules())
        ]

    def snapshot(self):
        return model_snapshot.of_model(self.model) | {"processor": model_snapshot.of_processor(self.processor)}

    def assert_unchanged(self):
        assert model_snapshot.changes(self.before, self.snapshot()) == []
        acquired = []
        lock = clearhead.capture.session.get_model_lock(self.model)
        thread = threading.Thread(
            target=lambda: acquired.append(lock.acquire(blocking=False) and lock.release() is None)
        )
        thread.start()
        thread.join()
        assert acquired == [True], "the model's lock is still held"


def test_snapshot_detects_every_kind_of_change():
    """Each kind of change that a recorder could make is detected."""
    user_model = UserModel("bert/classify")
    user_model.assert_unchanged()
    model = user_model.model
    parameter = next(model.parameters())
    changes = {
        "tensors": lambda: parameter.data.view(-1)[:1].add_(1e-12),
        "requires_grad": lambda: parameter.requires_grad_(not parameter.requires_grad),
        "gradients": lambda: setattr(parameter, "grad", torch.zeros_like(parameter)),
        "attributes": lambda: setattr(model.bert.encoder, "training", False),
        "hooks": lambda: model.bert.register_forward_pre_hook(lambda *a: None, with_kwargs=True),
        "configs": lambda: setattr(model.config, "_attn_implementation_internal", "clearhead"),
        "processor": lambda: user_model.processor.backend_tokenizer.enable_truncation(7),
        "random numbers": lambda: torch.rand(1),
    }
    try:
        for kind, apply_change in changes.items():
            before = user_model.snapshot()
            apply_change()
            assert {
                change.split(" › ")[0].split(":")[0] for change in model_snapshot.changes(before, user_model.snapshot())
            } == {kind}
    finally:
        user_model.processor.backend_tokenizer.no_truncation()


@cache
def load_user_model(subject):
    """A user's model and its explainer, for tests that take their own snapshot."""
    user_model = UserModel(subject)
    return user_model, clearhead.load(user_model.model, user_model.processor)


@SUBJECTS
@pytest.mark.parametrize("method", cases.METHODS)
def test_explain_leaves_model_unchanged(method, subject):
    """Also where the method is unsupported. With sdpa only, as methods do not depend on the implementation."""
    user_model, ex = load_user_model(subject)
    user_model.before = user_model.snapshot()
    [small_method] = cases.with_few([method])
    if cases.applies(method, subject):
        ex.explain(user_model.inputs[0], method=small_method)
    else:
        with pytest.raises(clearhead.UnsupportedError):
            ex.explain(user_model.inputs[0], method=small_method)
    user_model.assert_unchanged()


@SUBJECTS
@IMPLEMENTATIONS
def test_public_calls_leave_model_unchanged(subject, implementation):
    """Includes all methods in one call: they share passes, and scores equal those of separate calls."""
    user_model = UserModel(subject, implementation)
    ex = clearhead.load(user_model.model, user_model.processor)
    user_model.assert_unchanged()
    ex.methods()
    user_model.assert_unchanged()
    applicable = cases.applying(subject)
    results = ex.explain(user_model.inputs, **cases.all_explain_arguments(subject), batch_size=2)
    user_model.assert_unchanged()
    clearhead.compare(ex, user_model.inputs[0], methods=applicable[:2])
    user_model.assert_unchanged()
    assert clearhead.verify(applicable[0], ex, user_model.inputs[0]).ok
    user_model.assert_unchanged()
    unavailable = set()
    if ex.recorder.self_test.capture_source.name == "returned":
        unavailable |= {"values", "output_projection"}
    if "pa-lrp" not in applicable:
        unavailable.add("position_x_gradient")
    ex.record(user_model.inputs, [name for name in Requirement.__args__ if name not in unavailable])
    user_model.assert_unchanged()
    assert user_model.hook_calls, "the user's hooks still run"
    # Training mode is suspended: neither dropout nor the user's hooks affect the scores.
    cases.assert_all_alike(results, subject, reference=cases.batched)


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_truncation_does_not_leak_into_tokenizer_or_next_call(subject):
    """Truncation and its side do not leak into the user's tokenizer or into the next call."""
    user_model = UserModel(subject)
    ex = clearhead.load(user_model.model, user_model.processor)
    mask = user_model.processor.mask_token
    text = f"she {mask} the book because {mask} boring" if subject.endswith("mask") else user_model.inputs[1]
    target = clearhead.MaskedToken(mask_index=0) if subject.endswith("mask") else None
    first = ex.explain(text, target=target, max_length=7, method="generic")
    ex.explain(text, target=target, max_length=7, truncation_side="left", method="generic")
    repeated = ex.explain(text, target=target, max_length=7, method="generic")
    assert first.certificate["truncated_tokens"] > 0
    assert repeated.tokens == first.tokens
    user_model.assert_unchanged()


@pytest.fixture
def register_raising():
    """Registers methods that raise, for one test."""
    names = []

    def make(name, error, hook_name, requirements):
        def fail(self, *args):
            raise error("in the method")

        cls = type(name.title(), (AttributionMethod,), {hook_name: fail})
        declared = {"family": "control", "citation": "–", "signed": False, "target": "none"}
        register_method(name, requires=requirements, cost=clearhead.Cost(forward=1), **declared)(cls)
        names.append(name)

    yield make
    for name in names:
        METHOD_REGISTRY.pop(name)


@SUBJECTS
@ERRORS
@IMPLEMENTATIONS
def test_model_is_unchanged_after_target_raises(subject, error, implementation):
    user_model = UserModel(subject, implementation)
    ex = clearhead.load(user_model.model, user_model.processor)

    def target(output):
        raise error("in the target")

    with pytest.raises(error, match="in the target"):
        ex.explain(user_model.inputs, method=cases.applying(subject), target=target)
    user_model.assert_unchanged()
    with pytest.raises(error, match="in the target"):
        ex.record(user_model.inputs, ("input_gradient", "attention_gradient"), target=target)
    user_model.assert_unchanged()


@SUBJECTS
@ERRORS
@pytest.mark.parametrize("when", ["at first use", "later"])
def test_model_is_unchanged_after_forward_raises(subject, error, when):
    """A user hook raises in the second layer, in the self-test or in a recorded pass."""
    user_model = UserModel(subject)
    ex = clearhead.load(user_model.model, user_model.processor)
    applicable = cases.with_few(cases.one_method_per_pass_type(subject))
    expected = ex.explain(user_model.inputs[0], method=applicable) if when == "later" else None

    def fail(module, args, output):
        raise error("in the second layer")

    user_model.before = user_model.snapshot()
    with user_model.layers[1].register_forward_hook(fail):
        for method in (*applicable, applicable):
            with pytest.raises(error, match="in the second layer"):
                ex.explain(user_model.inputs, method=method)
        with pytest.raises(error, match="in the second layer"):
            ex.record(user_model.inputs, ("attention_gradient",))
        with pytest.raises(error, match="in the second layer"):
            clearhead.compare(ex, user_model.inputs[0], methods=applicable[:2])
        if when == "at first use":
            with pytest.raises(error, match="in the second layer"):
                ex.methods()
    user_model.assert_unchanged()
    repeated = ex.explain(user_model.inputs[0], method=applicable)
    for method in expected or ():
        cases.assert_alike(repeated[method], expected[method], 0.0)


@SUBJECTS
@ERRORS
@pytest.mark.parametrize(
    ("hook_name", "requirements"),
    [
        ("process_call", ("attention",)),
        ("process_call", ("attention", "attention_gradient")),
        ("compute_scores", ("input_gradient",)),
        ("setup", ()),
    ],
    ids=["process_call", "process_call in the backward pass", "compute_scores", "setup"],
)
def test_model_is_unchanged_after_method_raises(subject, error, hook_name, requirements, register_raising):
    register_raising("raising", error, hook_name, requirements)
    user_model = UserModel(subject)
    ex = clearhead.load(user_model.model, user_model.processor)
    is_unsupported = subject in cases.WINDOWED and hook_name == "process_call"
    with pytest.raises(
        clearhead.UnsupportedError if is_unsupported else error, match="windows" if is_unsupported else "in the method"
    ):
        ex.explain(user_model.inputs, method=["saliency", "raising", "random"])
    user_model.assert_unchanged()


@SUBJECTS
def test_model_is_unchanged_after_invalid_arguments(subject):
    user_model = UserModel(subject)
    ex = clearhead.load(user_model.model, user_model.processor)
    for wrong in ({"target": "no such label"}, {"scale": "no such scale"}, {"layers": (7, 9)}, {"batch_size": 0}):
        with pytest.raises(clearhead.ClearheadError):
            ex.explain(user_model.inputs, method="generic" if subject not in cases.WINDOWED else "saliency", **wrong)
        user_model.assert_unchanged()
