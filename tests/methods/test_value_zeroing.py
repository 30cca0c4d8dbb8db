"""Value zeroing equals a reference implementation that runs the full model again for every token and layer."""

import re
from functools import cache

import numpy as np
import pytest
import torch
import transformers

import clearhead
from tests import models
from tests.methods import replica_comparison
from tests.replicas import value_zeroing

#: Patterns for the end of the names of layers and of value projections.
LAYERS = r"(layers?|layer_groups|albert_layers)\.\d+$"
VALUES = r"\.(value|v_lin|v_proj)$"
SUBJECTS = (
    "bert/classify",
    "roberta/mask",
    "distilbert/classify",
    "albert/classify",
    "electra/mask",
    "vit/image",
    "dinov2-registers/image",
)


def list_modules(model, pattern: str) -> list[str]:
    """Return the innermost modules with such names; a shared module as often as there are layers."""
    names = [name for name, _ in model.named_modules() if re.search(pattern, name)]
    inner = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return inner * 3 if len(inner) == 1 else inner


@cache
def compute_reference_maps(subject: str, index: int) -> np.ndarray:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[index]
    model = ex.adapter.model
    return value_zeroing.compute_maps(
        model, replica_comparison.model_inputs(subject, raw), list_modules(model, LAYERS), list_modules(model, VALUES)
    )


def get_tolerance(subject: str) -> float:
    return 1e-4 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-8


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    """On a padded batch: the scores of the read-out, and the scores after each layer."""
    raws = models.inputs(subject)[:2]
    for index, e in enumerate(replica_comparison.explainer(subject).explain(raws, "value-zeroing")):
        expected_maps = compute_reference_maps(subject, index)
        readout = replica_comparison.compute_readout(
            subject, replica_comparison.model_inputs(subject, raws[index]), len(e)
        )
        assert replica_comparison.gap(e.scores, value_zeroing.scores(expected_maps, readout)) < get_tolerance(subject)
        assert replica_comparison.gap(e.per_layer, value_zeroing.depths(expected_maps, readout)) < get_tolerance(
            subject
        )


@pytest.mark.parametrize("layers", [(0, 1), (1, None), (-1, None)], ids=str)
def test_all_rows_and_selected_layers_equal_reference(layers: tuple) -> None:
    subject = "bert/classify"
    e = replica_comparison.explainer(subject).explain(
        models.inputs(subject)[1], "value-zeroing", rows="all", layers=layers
    )
    assert (
        replica_comparison.gap(e.matrix, value_zeroing.matrix(compute_reference_maps(subject, 1)[slice(*layers)]))
        < 1e-8
    )
    np.testing.assert_allclose(e.matrix.sum(1), 1, atol=1e-12)


def test_unselected_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    e = ex.explain(raw, "value-zeroing")
    runs = [0, 0, 0]
    for index, layer in enumerate(ex.adapter.model.bert.encoder.layer):
        forward = layer.forward

        def count_forward(*args, forward=forward, index=index, **kwargs):
            runs[index] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", count_forward)
    ex.explain(raw, "value-zeroing", layers=(1, 2))
    assert runs == [1, 2 + len(e), 1], "the plain pass, a repetition to check determinism, and one run for each token"


@pytest.mark.parametrize("grouped", [False, True])
def test_decoder_matrix_is_causal_and_equals_reference(grouped: bool) -> None:
    """Also with grouped key-value heads; a key-value cache that layers receive is not written twice."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2 if grouped else 4,
        initializer_range=0.3,
    )
    ex = clearhead.load(transformers.LlamaForCausalLM(config).double().eval())
    inputs = {"input_ids": torch.tensor([[5, 9, 12, 40, 7]])}
    e = ex.explain(inputs, "value-zeroing", target=3, rows="all")
    assert not np.triu(e.matrix, 1).any()
    assert (np.tril(e.matrix).sum(1) > 0.99).all()
    layers, values = ([f"model.layers.{i}{end}" for i in range(2)] for end in ("", ".self_attn.v_proj"))
    expected_maps = value_zeroing.compute_maps(ex.adapter.model, inputs, layers, values)
    assert replica_comparison.gap(e.matrix, value_zeroing.matrix(expected_maps)) < 1e-6


def test_model_without_recorded_values_is_rejected() -> None:
    with pytest.raises(
        clearhead.UnsupportedError, match=r"value-zeroing cannot explain .* ignores transformers' attention"
    ):
        replica_comparison.explainer("deberta/classify").explain(models.TEXTS[0], "value-zeroing")


def test_nondeterministic_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify")
    ex.explain(models.TEXTS[0], "random")
    layer = ex.adapter.model.bert.encoder.layer[1]
    forward, runs = layer.forward, []

    def add_drift(*args, **kwargs):
        runs.append(1)
        return forward(*args, **kwargs) + 0.1 * len(runs)

    monkeypatch.setattr(layer, "forward", add_drift)
    with pytest.raises(clearhead.UnsupportedError, match=r"encoder\.layer\.1\..* does not return the same output"):
        ex.explain(models.TEXTS[0], "value-zeroing")
