"""The attention view of one input: the row of a masked token by depth, candidate probabilities, head statistics."""

import numpy as np
import pytest

from clearhead.probes import compute_attention_view
from clearhead.render.mpl.attention import plot_attention_by_layer
from tests.models import TEXTS, explainer, inputs


def test_view_of_a_masked_token_has_its_row_and_candidate_probabilities():
    ex, text = explainer("bert/mask"), inputs("bert/mask")[1]
    result = compute_attention_view(ex, text, candidates=["he", "she"])
    assert result.tokens[result.readout_row] == "[MASK]"
    maps, row = result.attention.mean(1), result.readout_row
    rolled = np.eye(len(result.tokens))
    for layer, attention in enumerate(maps):
        rolled = (attention + np.eye(len(attention))) / 2 @ rolled
        assert np.allclose(result.scores_by_depth["raw"][layer], attention[row], atol=1e-6)
        assert np.allclose(result.scores_by_depth["rollout"][layer], rolled[row], atol=1e-6)
    assert np.allclose(result.scores_by_depth["flow"].sum(-1), 1)
    e = ex.explain(text, target="she", scale="probability", method="generic")
    assert result.candidate_probabilities["she"] == pytest.approx(e.target["value"], rel=1e-4)
    assert (
        len(plot_attention_by_layer(result).axes) == 4
        and len(plot_attention_by_layer(compute_attention_view(ex, text)).axes) == 3
    )


def test_view_has_local_and_mean_head_statistics():
    ex = explainer("bert/classify")
    result = compute_attention_view(ex, TEXTS[0], comparison_inputs=TEXTS[1:])
    entropies = [compute_attention_view(ex, text).head_statistics["entropy"] for text in TEXTS[1:]]
    assert result.mean_head_statistics is not None and np.allclose(
        result.mean_head_statistics["entropy"], np.mean(entropies, axis=0), atol=1e-6
    )
