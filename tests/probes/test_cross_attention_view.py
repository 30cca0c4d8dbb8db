"""Attention by stream: the maps are the tape's, cut to the units, under names that say who looks at whom."""

from functools import cache
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import clearhead
from clearhead.errors import InputError
from clearhead.probes import AttentionView, StreamsView, by_stream, look
from clearhead.render.mpl import attention
from clearhead.render.view_model import document
from tests import dual_models, joint_models
from tests.models import TEXTS, explainer


def said(found):
    console = Console(width=120, record=True, file=StringIO())
    console.print(found)
    return console.export_text()


@cache
def spell():
    pytest.importorskip("clearhead_zoo")
    return clearhead.load("zoo:spell")


def test_an_encoder_decoder_has_three_maps_and_they_are_the_tapes():
    ex, text = spell(), "phone"
    found = look(ex, {"text": text})
    assert isinstance(found, StreamsView) and list(found.maps) == ["source", "prefix", "prefix → source"]
    tape = ex.record(text, ["attention"])
    for name, ends in (("source", ("source", "source")), ("prefix → source", ("prefix", "source"))):
        own = found[name]
        calls = [call.attention[-1] for call in tape.calls if (call.query_stream, call.key_stream) == ends]
        high, wide = own.attention.shape[2:]
        for layer, call in enumerate(calls):
            assert np.allclose(own.attention[layer], call[:, :high, :wide].detach().numpy(), atol=1e-6)
        assert np.allclose(own.attention.sum(-1), 1, atol=1e-5)  # nothing that was cut off had any weight
        assert np.allclose(own.by_depth["mean of all rows"], own.attention.mean((1, 2)))
    cross = found["prefix → source"]
    assert cross.keys == found["source"].tokens and len(cross.tokens) == cross.attention.shape[2]
    with pytest.raises(InputError, match="map"):
        found["nothing"]
    axes = attention.by_depth(cross).axes[0]
    assert len(axes.get_xticks()) == len(cross.keys) and list(axes.get_yticks()) == [0, 1, 2]  # a tick for each layer
    assert "nan" not in said(found)  # there are no distances between streams
    with pytest.raises(InputError, match="look at another stream"):
        attention.graph(cross)


def test_cross_maps_have_no_patterns_of_places():
    found = by_stream(spell(), text="phone")
    assert "previous token" in found["source"].looks and "previous token" not in found["prefix → source"].looks


def test_one_stream_keeps_the_row_that_is_read_and_lengths_are_bounded():
    ex = explainer("bert/classify")
    assert isinstance(look(ex, {"text": TEXTS[0]}), AttentionView)
    with pytest.raises(InputError, match="heads are shown for up to 3"):
        look(ex, {"text": TEXTS[0]}, most=3)
    with pytest.raises(InputError, match="for one input, and there are 2"):
        by_stream(ex, text=TEXTS[:2])


@pytest.mark.parametrize("kind", ["clip", "vilt", "lxmert"])
def test_joint_and_dual_models(kind):
    if kind == "clip":
        ex, given = dual_models.explainer("clip"), {"text": TEXTS[0], "image": dual_models.pictures()[0]}
    else:
        ex, given = joint_models.explainer(kind), joint_models.inputs(kind)[0]
    found = look(ex, given)
    assert isinstance(found, StreamsView)
    expected = {
        "clip": {"text", "image"},
        "vilt": {"text and image"},
        "lxmert": {"text", "regions", "text → regions", "regions → text"},
    }[kind]
    assert set(found.maps) == expected
    for own in found.maps.values():
        assert len(own.tokens) == own.attention.shape[2] and len(own.keys or own.tokens) == own.attention.shape[3]
    assert all(name in said(found) for name in expected)
    assert document(found)["view"] == "streams" and "<section" in found._repr_html_()
