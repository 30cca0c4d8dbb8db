"""Law 2: the user's model is bit-identical before and after, hooks and flags included, also when a call raises."""

import threading
from functools import cache

import pytest
import torch

import clearhead
from clearhead.capture.sources.attention_interface import map_modules_to_layers
from clearhead.capture.tape import Requirement
from clearhead.methods import METHOD_REGISTRY, AttributionMethod, register_method
from tests import models
from tests.invariants import cases, model_snapshot

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["sdpa", "eager"])
SUBJECTS = pytest.mark.parametrize("subject", cases.SUBJECTS)
ERRORS = pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])


class Users:
    """A model as a user has it: in training, partly frozen, with a gradient, hooks and an attribute of their own."""

    def __init__(self, subject, implementation="sdpa"):
        made = models.explainer(subject).adapter
        self.model, self.inputs = made.model, models.inputs(subject)
        name, task = subject.split("/")
        self.processor = made.processor if task == "image" else models.tokenizer(models.TEXT[name][1])
        if self.model.config._attn_implementation != implementation:
            # DeBERTa has no sdpa; it stays as it is.
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
        self.heard = []
        self.model.register_forward_hook(lambda module, args, output: self.heard.append(1))
        self.model.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        self.layers[-1].register_full_backward_hook(lambda module, into, out: None)
        self.model.note = "mine"
        self.before = self.now()

    @property
    def layers(self):
        blocks = {id(block) for block in map_modules_to_layers(self.model).values()}
        inner = [m for m in self.model.modules() if id(m) in blocks]
        return [m for m in inner if any("Attention" in type(part).__name__ for part in m.modules())]

    def now(self):
        return model_snapshot.of_model(self.model) | {"processor": model_snapshot.of_processor(self.processor)}

    def assert_untouched(self):
        assert model_snapshot.changes(self.before, self.now()) == []
        free = []
        lock = clearhead.capture.session.get_model_lock(self.model)
        thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False) and lock.release() is None))
        thread.start()
        thread.join()
        assert free == [True], "the model's lock is still held"


def test_a_snapshot_sees_changes():
    """The measure itself: each kind of change that a recorder could make is seen."""
    users = Users("bert/classify")
    users.assert_untouched()
    model = users.model
    parameter = next(model.parameters())
    trespasses = {
        "tensors": lambda: parameter.data.view(-1)[:1].add_(1e-12),
        "requires_grad": lambda: parameter.requires_grad_(not parameter.requires_grad),
        "gradients": lambda: setattr(parameter, "grad", torch.zeros_like(parameter)),
        "attributes": lambda: setattr(model.bert.encoder, "training", False),
        "hooks": lambda: model.bert.register_forward_pre_hook(lambda *a: None, with_kwargs=True),
        "configs": lambda: setattr(model.config, "_attn_implementation_internal", "clearhead"),
        "processor": lambda: users.processor.backend_tokenizer.enable_truncation(7),
        "random numbers": lambda: torch.rand(1),
    }
    try:
        for kind, trespass in trespasses.items():
            before = users.now()
            trespass()
            assert {change.split(" › ")[0].split(":")[0] for change in model_snapshot.changes(before, users.now())} == {
                kind
            }
    finally:
        users.processor.backend_tokenizer.no_truncation()


@cache
def loaded(subject):
    """A user's model and its explainer, for tests that take a snapshot of their own."""
    users = Users(subject)
    return users, clearhead.load(users.model, users.processor)


@SUBJECTS
@pytest.mark.parametrize("method", cases.METHODS)
def test_every_method(method, subject):
    """Where it explains, and where it refuses. A method does not know which kernel the model runs with: sdpa alone."""
    users, ex = loaded(subject)
    users.before = users.now()
    [asked] = cases.with_few([method])
    if cases.applies(method, subject):
        ex.explain(users.inputs[0], method=asked)
    else:
        with pytest.raises(clearhead.UnsupportedError):
            ex.explain(users.inputs[0], method=asked)
    users.assert_untouched()


@SUBJECTS
@IMPLEMENTATIONS
def test_every_public_call(subject, implementation):
    """All methods in one call among them: they share passes, and the scores are those of each method alone."""
    users = Users(subject, implementation)
    ex = clearhead.load(users.model, users.processor)
    users.assert_untouched()
    ex.methods()
    users.assert_untouched()
    able = cases.applying(subject)
    together = ex.explain(users.inputs, **cases.everything(subject), batch_size=2)
    users.assert_untouched()
    clearhead.compare(ex, users.inputs[0], methods=able[:2])
    users.assert_untouched()
    assert clearhead.verify(able[0], ex, users.inputs[0]).ok
    users.assert_untouched()
    returned = ex.recorder.self_test.capture_source == "returned"
    ex.record(
        users.inputs, [a for a in Requirement.__args__ if not (returned and a in ("values", "output_projection"))]
    )
    users.assert_untouched()
    assert users.heard, "the user's own hooks still run"
    # Training mode is suspended, not obeyed: neither dropout nor the user's hooks play a part in the scores.
    cases.assert_all_alike(together, subject, reference=cases.batched)


@pytest.mark.parametrize("subject", cases.TEXT_SUBJECTS)
def test_truncation_stays_with_the_call(subject):
    """Neither the user's tokenizer nor the next call notices that a call truncated, or from which side."""
    users = Users(subject)
    ex = clearhead.load(users.model, users.processor)
    mask = users.processor.mask_token
    text = f"she {mask} the book because {mask} boring" if subject.endswith("mask") else users.inputs[1]
    target = clearhead.MaskedToken(mask_index=0) if subject.endswith("mask") else None
    first = ex.explain(text, target=target, max_length=7)
    ex.explain(text, target=target, max_length=7, truncation_side="left")
    again = ex.explain(text, target=target, max_length=7)
    assert first.certificate["truncated_tokens"] > 0
    assert again.tokens == first.tokens
    users.assert_untouched()


@pytest.fixture
def raising():
    """Methods whose fold raises, registered for one test."""
    names = []

    def make(name, error, place, asks):
        def fail(self, *args):
            raise error("in the fold")

        cls = type(name.title(), (AttributionMethod,), {place: fail})
        declared = {"family": "control", "cost": "nothing", "citation": "–", "signed": False, "target": "none"}
        register_method(name, requires=asks, **declared)(cls)
        names.append(name)

    yield make
    for name in names:
        METHOD_REGISTRY.pop(name)


@SUBJECTS
@ERRORS
@IMPLEMENTATIONS
def test_a_target_that_raises(subject, error, implementation):
    users = Users(subject, implementation)
    ex = clearhead.load(users.model, users.processor)

    def target(output):
        raise error("in the target")

    with pytest.raises(error, match="in the target"):
        ex.explain(users.inputs, method=cases.applying(subject), target=target)
    users.assert_untouched()
    with pytest.raises(error, match="in the target"):
        ex.record(users.inputs, ("input_gradient", "attention_gradient"), target=target)
    users.assert_untouched()


@SUBJECTS
@ERRORS
@pytest.mark.parametrize("when", ["at first use", "later"])
def test_a_forward_that_raises(subject, error, when):
    """A hook of the user's own that raises in the second layer: in the self-test, and in a recorded pass."""
    users = Users(subject)
    ex = clearhead.load(users.model, users.processor)
    able = cases.with_few(cases.of_each_kind(subject))
    good = ex.explain(users.inputs[0], method=able) if when == "later" else None

    def fail(module, args, output):
        raise error("in the second layer")

    users.before = users.now()
    with users.layers[1].register_forward_hook(fail):
        for asked in (*able, able):
            with pytest.raises(error, match="in the second layer"):
                ex.explain(users.inputs, method=asked)
        with pytest.raises(error, match="in the second layer"):
            ex.record(users.inputs, ("attention_gradient",))
        with pytest.raises(error, match="in the second layer"):
            clearhead.compare(ex, users.inputs[0], methods=able[:2])
        if when == "at first use":
            with pytest.raises(error, match="in the second layer"):
                ex.methods()
    users.assert_untouched()
    again = ex.explain(users.inputs[0], method=able)
    for method in good or ():
        cases.assert_alike(again[method], good[method], 0.0)


@SUBJECTS
@ERRORS
@pytest.mark.parametrize(
    ("place", "asks"),
    [
        ("process_call", ("attention",)),
        ("process_call", ("attention", "attention_gradient")),
        ("compute_scores", ("input_gradient",)),
        ("setup", ()),
    ],
    ids=["process_call", "process_call in the backward pass", "compute_scores", "setup"],
)
def test_a_fold_that_raises(subject, error, place, asks, raising):
    raising("raising", error, place, asks)
    users = Users(subject)
    ex = clearhead.load(users.model, users.processor)
    refused = subject in cases.WINDOWED and place == "process_call"
    with pytest.raises(clearhead.UnsupportedError if refused else error, match="windows" if refused else "in the fold"):
        ex.explain(users.inputs, method=["saliency", "raising", "random"])
    users.assert_untouched()


@SUBJECTS
def test_wrong_input_changes_nothing(subject):
    users = Users(subject)
    ex = clearhead.load(users.model, users.processor)
    for wrong in ({"target": "no such label"}, {"scale": "no such scale"}, {"layers": (7, 9)}, {"batch_size": 0}):
        with pytest.raises(clearhead.ClearheadError):
            ex.explain(users.inputs, method="generic" if subject not in cases.WINDOWED else "saliency", **wrong)
        users.assert_untouched()
