"""`ModelSession` runs a model and restores it; `ModelTopology` finds its modules in one walk."""

import ast
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import clearhead
from clearhead.capture import session as session_module
from clearhead.capture.session import ModelSession
from clearhead.capture.topology import ModelTopology
from tests import models

SOURCE_FOLDER = Path(clearhead.__file__).parent
#: The functions outside of `ModelSession` that call a model themselves, inside of a running session, or in training.
KNOWN_CALLERS = {
    "capture/recorder.py:forward",
    "capture/checks/self_test.py:_check_logits",
    "capture/checks/self_test.py:_find_first_differing_layer",
    "engine/passes/captum_deeplift.py:forward",
    "interventions/attention_patch.py:run_training_forward",
    "interventions/last_row.py:forward_with_weights",
}


@pytest.fixture
def model() -> nn.Module:
    return models.explainer("bert/classify").adapter.model


def find_model_calls(path: Path) -> set[str]:
    """The functions of a file that call something named model."""
    callers = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            takes_mapping = isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)
            if takes_mapping and ast.unparse(node.func).split(".")[-1] == "model":
                callers.add(f"{path.relative_to(SOURCE_FOLDER).as_posix()}:{function.name}")
    return callers


def test_models_run_only_through_their_session() -> None:
    callers = set().union(*(find_model_calls(path) for path in SOURCE_FOLDER.rglob("*.py")))
    assert callers - KNOWN_CALLERS == {"capture/session.py:forward", "capture/session.py:_compiled_forward"} | {
        "capture/session.py:run"
    }
    assert callers >= KNOWN_CALLERS


def test_nested_sessions_freeze_once_and_restore_at_the_end(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []
    freeze = session_module._frozen_eval_mode
    monkeypatch.setattr(session_module, "_frozen_eval_mode", lambda topology: entered.append(1) or freeze(topology))
    session = ModelSession(model.train())
    weight = next(model.parameters())
    with session.running(with_gradients=True):
        with session.running():
            assert not torch.is_grad_enabled() and not model.training and not weight.requires_grad
        assert torch.is_grad_enabled() and not model.training
    assert entered == [1] and model.training and weight.requires_grad


def test_session_is_restored_after_an_exception(model: nn.Module) -> None:
    session = ModelSession(model.train())
    with pytest.raises(ZeroDivisionError), session.running(), session.running():
        raise ZeroDivisionError
    assert model.training
    with session.running():
        assert not model.training


def test_threads_wait_for_each_other(model: nn.Module) -> None:
    """A second thread finds the model in evaluation mode only after the first has restored it."""
    first, second = ModelSession(model.train()), ModelSession(model)
    events: list[str] = []

    def run_second() -> None:
        with second.running():
            events.append("second")

    with first.running():
        thread = threading.Thread(target=run_second)
        thread.start()
        thread.join(timeout=0.2)
        events.append("first")
    thread.join()
    assert events == ["first", "second"] and model.training


def test_forward_equals_the_model_without_gradients(model: nn.Module) -> None:
    inputs = {"input_ids": torch.arange(5, 13)[None]}
    output = ModelSession(model).forward(inputs)
    assert not output.logits.requires_grad
    assert (output.logits == model.eval()(**inputs).logits).all()


def test_topology_names_modules_as_torch_does(model: nn.Module) -> None:
    topology = ModelTopology(model)
    assert {name: id(module) for name, module in model.named_modules()} == {
        name: key for key, name in topology.names.items()
    }
    assert topology.modules == list(model.modules())
    assert list(topology.iter_parameters()) == list(model.parameters())
    (first, *_) = topology.attention_modules
    assert topology.names[id(topology.layer_of_module[id(first)])].endswith("layer.0")


def test_modules_are_walked_again_only_after_a_change(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = models.explainer("bert/classify").adapter.processor
    walks = []
    walk = ModelTopology.__init__
    monkeypatch.setattr(ModelTopology, "__init__", lambda self, walked: (walks.append(walked), walk(self, walked))[1])
    ex = clearhead.load(model, processor)
    for method in ("generic", "saliency", "occlusion", "integrated-gradients", "lrp"):
        ex.explain(models.TEXTS[0], method)
    assert walks == [model]
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    assert len(ex.adapter.session.topology.attention_modules) == 1 and len(walks) == 2


def test_shared_and_replaced_modules_are_noticed() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared))
    topology = ModelTopology(model)
    assert topology.modules == [model, shared, model[1]] and topology.is_current()
    del model[1][0]
    assert not topology.is_current()
