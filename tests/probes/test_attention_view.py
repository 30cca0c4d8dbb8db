"""The attention of one input to look at: the row of a masked word, by depth, and what was asked about it."""

import numpy as np
import pytest

from clearhead.probes import view
from clearhead.render.mpl.attention import by_depth
from tests.models import TEXTS, explainer, inputs


def test_a_masked_word_is_seen_by_its_own_row_and_candidates_by_their_probabilities():
    ex, text = explainer("bert/mask"), inputs("bert/mask")[1]
    found = view(ex, text, candidates=["he", "she"])
    assert found.tokens[found.row] == "[MASK]"
    maps, row = found.attention.mean(1), found.row
    rolled = np.eye(len(found.tokens))
    for layer, attention in enumerate(maps):
        rolled = (attention + np.eye(len(attention))) / 2 @ rolled
        assert np.allclose(found.by_depth["raw"][layer], attention[row], atol=1e-6)
        assert np.allclose(found.by_depth["rollout"][layer], rolled[row], atol=1e-6)
    assert np.allclose(found.by_depth["flow"].sum(-1), 1)
    e = ex.explain(text, target="she", scale="probability")
    assert found.candidates["she"] == pytest.approx(e.target["value"], rel=1e-4)
    assert len(by_depth(found).axes) == 4 and len(by_depth(view(ex, text)).axes) == 3


def test_local_stands_beside_global():
    ex = explainer("bert/classify")
    found = view(ex, TEXTS[0], beside=TEXTS[1:])
    each = [view(ex, text).looks["entropy"] for text in TEXTS[1:]]
    assert found.beside is not None and np.allclose(found.beside["entropy"], np.mean(each, axis=0), atol=1e-6)
