"""Attention by stream: maps equal the tape, cut to the units; their names state query and key stream."""

from functools import cache
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import clearhead
from clearhead.errors import InputError
from clearhead.probes import AttentionView, MultiStreamAttentionView, compute_multi_stream_view, view_attention
from clearhead.render.mpl import attention
from clearhead.render.view_model import build_view_model
from tests import dual_models, joint_models
from tests.models import TEXTS, explainer


def render_text(result):
    console = Console(width=120, record=True, file=StringIO())
    console.print(result)
    return console.export_text()


@cache
def load_spell():
    pytest.importorskip("clearhead_zoo")
    return clearhead.load("zoo:spell")


def test_encoder_decoder_has_three_maps_equal_to_the_tape():
    ex, text = load_spell(), "phone"
    result = view_attention(ex, {"text": text})
    assert isinstance(result, MultiStreamAttentionView) and list(result.views) == [
        "source",
        "prefix",
        "prefix → source",
    ]
    tape = ex.record(text, ["attention"])
    for name, streams in (("source", ("source", "source")), ("prefix → source", ("prefix", "source"))):
        view = result[name]
        calls = [call.attention[-1] for call in tape.calls if (call.query_stream, call.key_stream) == streams]
        rows, columns = view.attention.shape[2:]
        for layer, call in enumerate(calls):
            assert np.allclose(view.attention[layer], call[:, :rows, :columns].detach().numpy(), atol=1e-6)
        assert np.allclose(view.attention.sum(-1), 1, atol=1e-5)  # removed columns had zero weight
        assert np.allclose(view.scores_by_depth["mean of all rows"], view.attention.mean((1, 2)))
    cross = result["prefix → source"]
    assert cross.key_names == result["source"].tokens and len(cross.tokens) == cross.attention.shape[2]
    with pytest.raises(InputError, match="map"):
        result["nothing"]
    axes = attention.plot_attention_by_layer(cross).axes[0]
    assert len(axes.get_xticks()) == len(cross.key_names) and list(axes.get_yticks()) == [
        0,
        1,
        2,
    ]  # a tick for each layer
    assert "nan" not in render_text(result)  # distances are undefined between streams
    with pytest.raises(InputError, match="attend to units of another stream"):
        attention.plot_attention_graph(cross)


def test_cross_attention_has_no_positional_patterns():
    result = compute_multi_stream_view(load_spell(), text="phone")
    assert (
        "previous_token" in result["source"].head_statistics
        and "previous_token" not in result["prefix → source"].head_statistics
    )


def test_single_stream_keeps_the_readout_row_and_max_units_is_enforced():
    ex = explainer("bert/classify")
    assert isinstance(view_attention(ex, {"text": TEXTS[0]}), AttentionView)
    with pytest.raises(InputError, match="heads are shown for up to 3"):
        view_attention(ex, {"text": TEXTS[0]}, max_units=3)
    with pytest.raises(InputError, match="for one input, but there are 2"):
        compute_multi_stream_view(ex, text=TEXTS[:2])


@pytest.mark.parametrize("kind", ["clip", "vilt", "lxmert"])
def test_joint_and_dual_models_have_a_view_for_each_pair_of_streams(kind):
    if kind == "clip":
        ex, inputs = dual_models.explainer("clip"), {"text": TEXTS[0], "image": dual_models.pictures()[0]}
    else:
        ex, inputs = joint_models.explainer(kind), joint_models.inputs(kind)[0]
    result = view_attention(ex, inputs)
    assert isinstance(result, MultiStreamAttentionView)
    expected = {
        "clip": {"text", "image"},
        "vilt": {"text and image"},
        "lxmert": {"text", "regions", "text → regions", "regions → text"},
    }[kind]
    assert set(result.views) == expected
    for view in result.views.values():
        assert (
            len(view.tokens) == view.attention.shape[2]
            and len(view.key_names or view.tokens) == view.attention.shape[3]
        )
    assert all(name in render_text(result) for name in expected)
    assert build_view_model(result)["view"] == "multi_stream_attention" and "<section" in result._repr_html_()
