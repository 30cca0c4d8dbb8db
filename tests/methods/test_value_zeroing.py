"""Value zeroing against a replica that runs the whole model again for every token and layer."""

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

#: What ends the names of layers, and of the linear maps that make values.
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


def named(model, pattern: str) -> list[str]:
    """The modules with such names, innermost ones; a shared one as often as there are layers."""
    found = [name for name, _ in model.named_modules() if re.search(pattern, name)]
    inner = [name for name in found if not any(other.startswith(f"{name}.") for other in found)]
    return inner * 3 if len(inner) == 1 else inner


@cache
def maps(subject: str, place: int) -> np.ndarray:
    ex, raw = replica_comparison.explainer(subject), models.inputs(subject)[place]
    model = ex.adapter.model
    return value_zeroing.contributions(
        model, replica_comparison.model_inputs(subject, raw), named(model, LAYERS), named(model, VALUES)
    )


def allowed(subject: str) -> float:
    return 1e-4 if subject.split("/")[0] in replica_comparison.FLOAT32_SOFTMAX else 1e-8


@pytest.mark.parametrize("subject", SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    """On a padded batch; the read-out, and what it is after each layer."""
    raws = models.inputs(subject)[:2]
    for place, e in enumerate(replica_comparison.explainer(subject).explain(raws, "value-zeroing")):
        own = maps(subject, place)
        readout = replica_comparison.readout(subject, replica_comparison.model_inputs(subject, raws[place]), len(e))
        assert replica_comparison.gap(e.scores, value_zeroing.scores(own, readout)) < allowed(subject)
        assert replica_comparison.gap(e.per_layer, value_zeroing.depths(own, readout)) < allowed(subject)


@pytest.mark.parametrize("layers", [(0, 1), (1, None), (-1, None)], ids=str)
def test_rows_and_layers(layers: tuple) -> None:
    subject = "bert/classify"
    e = replica_comparison.explainer(subject).explain(
        models.inputs(subject)[1], "value-zeroing", rows="all", layers=layers
    )
    assert replica_comparison.gap(e.matrix, value_zeroing.matrix(maps(subject, 1)[slice(*layers)])) < 1e-8
    np.testing.assert_allclose(e.matrix.sum(1), 1, atol=1e-12)


def test_layers_that_are_not_asked_for_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ex, raw = replica_comparison.explainer("bert/classify"), models.TEXTS[0]
    whole = ex.explain(raw, "value-zeroing")
    runs = [0, 0, 0]
    for number, layer in enumerate(ex.adapter.model.bert.encoder.layer):
        forward = layer.forward

        def counted(*args, forward=forward, number=number, **kwargs):
            runs[number] += 1
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer, "forward", counted)
    ex.explain(raw, "value-zeroing", layers=(1, 2))
    assert runs == [1, 2 + len(whole), 1], "as it is, once more to see that it is the same, and once for each token"


@pytest.mark.parametrize("grouped", [False, True])
def test_a_decoder_sees_no_later_token(grouped: bool) -> None:
    """Of a causal model with shared values, too; and a cache that the layers are handed is not written into twice."""
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
    given = {"input_ids": torch.tensor([[5, 9, 12, 40, 7]])}
    e = ex.explain(given, "value-zeroing", target=3, rows="all")
    assert not np.triu(e.matrix, 1).any()
    assert (np.tril(e.matrix).sum(1) > 0.99).all()
    layers, values = ([f"model.layers.{i}{end}" for i in range(2)] for end in ("", ".self_attn.v_proj"))
    slow = value_zeroing.contributions(ex.adapter.model, given, layers, values)
    assert replica_comparison.gap(e.matrix, value_zeroing.matrix(slow)) < 1e-6


def test_refused_where_values_are_not_seen() -> None:
    with pytest.raises(
        clearhead.UnsupportedError, match=r"value-zeroing cannot explain .* ignores transformers' attention"
    ):
        replica_comparison.explainer("deberta/classify").explain(models.TEXTS[0], "value-zeroing")


def test_refused_where_a_layer_does_not_repeat_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ex = models.explainer("bert/classify")
    ex.explain(models.TEXTS[0], "random")
    layer = ex.adapter.model.bert.encoder.layer[1]
    forward, runs = layer.forward, []

    def drifting(*args, **kwargs):
        runs.append(1)
        return forward(*args, **kwargs) + 0.1 * len(runs)

    monkeypatch.setattr(layer, "forward", drifting)
    with pytest.raises(clearhead.UnsupportedError, match=r"encoder\.layer\.1\..* does not give the same output"):
        ex.explain(models.TEXTS[0], "value-zeroing")
