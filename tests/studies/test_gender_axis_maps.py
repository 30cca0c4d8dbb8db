"""Axis maps of a sentence against their definitions, chance levels, and pronoun probabilities without an axis."""

import itertools

import numpy as np
import pytest
import torch

from clearhead.concepts.ablation_cost import compute_masked_lm_cost
from clearhead.concepts.densray import fit_densray
from clearhead.concepts.directions import Directions
from clearhead.errors import InputError
from clearhead.studies.gender.axis_maps import (
    AxisMaps,
    compare_rankings,
    compute_axis_maps,
    compute_chance_rank,
    compute_filler_contribution,
    compute_map_similarity,
    compute_pair_difference,
)
from clearhead.studies.gender.map_similarity import (
    DISTANCE_NAMES,
    compute_chance_distances,
    compute_distances,
    compute_profile_similarity,
)
from clearhead.studies.gender.pronouns import (
    compute_pronoun_probabilities,
    select_single_token_templates,
    summarise_pronouns,
)
from clearhead.studies.gender.templates import (
    ADJECTIVE_AND_SUBJECT_SETS,
    BiasTemplate,
    make_people_sentences,
    read_occupations,
)
from tests.models import explainer

TEXT = "[MASK] is here, it isn't the book."


def axis():
    generator = torch.Generator().manual_seed(3)
    sets = [torch.randn(40, 32, generator=generator).double() for _ in range(2)]
    return Directions({layer: fit_densray(sets[0] + 1, sets[1] + layer + 1) for layer in range(3)})


def test_axis_maps_equal_their_definitions():
    ex, directions = explainer("bert/mask"), axis()
    maps = compute_axis_maps(ex, directions, TEXT, "he")
    model, tok = ex.adapter.model, ex.adapter.processor
    model.set_attn_implementation("eager")
    encoding = tok(TEXT, return_tensors="pt")
    encoding.pop("token_type_ids", None)
    out = model(**encoding, output_hidden_states=True, output_attentions=True)
    y = out.logits[0, 1, tok.convert_tokens_to_ids("he")]
    for layer in range(3):
        (g,) = torch.autograd.grad(y, out.hidden_states[layer], retain_graph=True)
        cat = (g * out.hidden_states[layer])[0].sum(-1)[1:-1]
        row = out.attentions[layer][0].mean(0)[1, 1:-1]
        q = directions[layer]
        dr = ((out.hidden_states[layer + 1][0] @ q.q[0]) - q.centre[0])[1:-1] / q.spread[0]
        for name, expected in (
            ("cat", cat),
            ("attention", row),
            ("dr", dr),
            ("attdr", row * dr),
            ("attcat", row * cat),
        ):
            np.testing.assert_allclose(maps.get_map(name)[layer], expected.detach().numpy(), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(
            maps.get_map("dr_attcat")[layer], (dr * row * cat).detach().numpy(), rtol=1e-6, atol=1e-9
        )
    assert maps.tokens[0] == "[MASK]" and maps.mask_index == 0 and len(maps.tokens) == maps.dr.shape[1]
    assert np.linalg.norm(maps.build_map_with_sum("attdr")) == pytest.approx(1)


def test_sentence_without_mask_has_no_attcat_map():
    ex, directions = explainer("bert/mask"), axis()
    maps = compute_axis_maps(ex, directions, "it isn't the book.")
    assert maps.attcat is None and maps.attdr.shape == maps.dr.shape
    assert compute_pair_difference(maps, 0, -2) == pytest.approx(maps.dr.sum(0)[0] - maps.dr.sum(0)[-2])
    with pytest.raises(InputError, match="attcat requires a masked position"):
        maps.get_map("attcat")
    with pytest.raises(InputError, match=r"no directions for layers \[2\]"):
        compute_axis_maps(ex, Directions({0: directions[0], 1: directions[1]}), TEXT)
    with pytest.raises(InputError, match="is not a masked language model"):
        compute_axis_maps(explainer("bert/classify"), directions, TEXT)


@pytest.mark.parametrize(
    ("n", "expected"),
    [(6, (0.307, 0.308, 0.257, 0.391)), (8, (0.322, 0.276, 0.226, 0.347)), (15, (0.342, 0.211, 0.168, 0.262))],
)
def test_chance_distances_equal_the_specification(n, expected):
    assert compute_chance_distances(n) == pytest.approx(expected, abs=0.01)


def test_profile_similarity_distinguishes_similar_from_unrelated():
    rng = np.random.default_rng(0)
    profiles = [rng.normal(size=7) for _ in range(30)]
    noisy = [profile + 0.3 * rng.normal(size=7) for profile in profiles]
    similar, unrelated = (
        compute_profile_similarity(profiles, noisy),
        compute_profile_similarity(profiles, [rng.normal(size=7) for _ in range(30)]),
    )
    assert similar.p < 0.01 < 0.05 < unrelated.p and similar.spearman > 0.5 > abs(unrelated.spearman) + 0.2
    assert all(similar.distances[name] < similar.chance[name] for name in DISTANCE_NAMES)
    assert compute_distances(profiles[0], -2 * profiles[0])["cosine"] == pytest.approx(0)
    with pytest.raises(InputError, match="a profile of zeros"):
        compute_distances(np.zeros(4), profiles[0][:4])
    with pytest.raises(InputError, match="there are 1 and 0"):
        compute_profile_similarity([profiles[0]], [])


def make_axis_maps(cat, dr, tokens=("[MASK]", "is", "accoun", "##tant", ".")):
    attention = np.full((2, 5), 0.2)
    return AxisMaps(tokens, np.array([dr, dr]), attention, np.array([cat, cat]), 0)


def test_filler_contribution_is_its_share_of_absolute_scores():
    maps = make_axis_maps([9.0, 1.0, -2.0, 1.0, 1.0], [0, 0, 1, 0, 0])
    share, largest = compute_filler_contribution(maps, "accountant")
    assert share == pytest.approx(3 / 5) and largest
    with pytest.raises(InputError, match="the filler 'nurse' is not in the sentence"):
        compute_filler_contribution(maps, "nurse")
    assert compute_map_similarity([maps, make_axis_maps([1.0, 2, 3, 4, 5], [1, 2, 3, 4, 6])]).count == 2


def test_compare_rankings_by_reciprocal_rank_of_listed_words():
    maps = [make_axis_maps([1.0] * 5, [5.0 + i / 10, 1, 2, 1, 1]) for i in range(10)]
    comparison = compare_rankings(maps, [[0]] * 10, ("attdr", "cat"))
    assert comparison["attdr"].mean == 1 and comparison["cat"].mean == 1 and comparison["p"] == 1
    worse = compare_rankings(maps, [[1]] * 10, ("cat", "dr"))
    assert worse["cat"].mean == 1 and worse["dr"].mean == pytest.approx(1 / 3) and worse["p"] < 0.01
    both = compare_rankings(
        maps, [[0], [1]] * 5, ("dr", "cat"), num_versions=2
    )  # first in one version, third in the other
    assert both["dr"].mean == pytest.approx((1 + 1 / 3) / 2) and both["dr"].count == 5


def test_pronoun_probabilities_change_with_removed_directions():
    ex, directions = explainer("bert/mask"), axis()
    templates = [template for group in ADJECTIVE_AND_SUBJECT_SETS for template in group.fill("[MASK]")][:3]
    before, after = (
        compute_pronoun_probabilities(ex, templates),
        compute_pronoun_probabilities(ex, templates, projections=directions),
    )
    with torch.no_grad():
        encoding = ex.adapter.collate(ex.adapter.make_samples(templates[0].text, input_options()))
        p = ex.adapter.model(**encoding).logits[0, 1].softmax(-1)
    assert before[0].first_probability == pytest.approx(float(p[ex.adapter.label_index("he")]))
    assert before[0].bias is not None and before[0].first_probability != after[0].first_probability
    assert compute_pronoun_probabilities(ex, templates)[0] == before[0]
    cost = compute_masked_lm_cost(ex, ["it is the book.", "he is here."], directions)
    assert cost["loss difference"].mean == pytest.approx(cost["loss after"].mean - cost["loss before"].mean) != 0
    summary = summarise_pronouns(before)
    assert summary["sum"].mean == pytest.approx(summary["first"].mean + summary["second"].mean)
    assert summary["apart"].mean >= abs(summary["leaning"].mean) and summary["bias"].count == 3


def test_templates_with_custom_compared_words():
    ex = explainer("bert/mask")
    texts = [
        BiasTemplate("[MASK] is here.", compared_words=("it", "the")),
        BiasTemplate("[MASK] is here.", compared_words=("king", "it")),
    ]
    (kept,) = select_single_token_templates(ex, texts)
    (custom,), (default,) = (
        compute_pronoun_probabilities(ex, [kept]),
        compute_pronoun_probabilities(ex, [BiasTemplate("[MASK] is here.")]),
    )
    assert custom.first_probability != default.first_probability and custom.bias is None
    with pytest.raises(InputError, match="no sentence has both of its words in the vocabulary"):
        select_single_token_templates(ex, texts[1:])
    assert make_people_sentences()[0].text == "The surgeon thanked the nurse."


@pytest.mark.parametrize(("tokens", "listed"), [(5, 1), (5, 2), (4, 4)])
def test_chance_rank_equals_mean_over_all_permutations(tokens, listed):
    orders = itertools.permutations(range(tokens))
    best = [1 / (1 + min(order.index(word) for word in range(listed))) for order in orders]
    assert compute_chance_rank(tokens, listed) == pytest.approx(np.mean(best))


def test_read_occupations_fills_templates(tmp_path):
    (tmp_path / "list.json").write_text('[["air_force_pilot", 0, 1], "nurse"]')
    first, _ = read_occupations(tmp_path / "list.json").fill("[MASK]")
    assert first.text == "[MASK] is the air force pilot in this area." and first.filler == "air force pilot"
    assert first.prior_text == "[MASK] is the [MASK] in this area."
    (tmp_path / "list.json").write_text("{")
    with pytest.raises(InputError, match="not a JSON list of occupations"):
        read_occupations(tmp_path / "list.json")


def input_options():
    from clearhead.adapters import InputOptions

    return InputOptions()
