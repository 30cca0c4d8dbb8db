"""TCAV: each step against its definition, known concepts, and the false-positive rate."""

import numpy as np
import pytest
import torch

from clearhead.concepts import Directions
from clearhead.concepts.cav import (
    CLASSIFIERS,
    ConceptActivations,
    compute_activations,
    compute_concept_map,
    compute_sensitivities,
    compute_target_gradients,
    compute_tcav_score,
    fit_concept_vector,
)
from clearhead.concepts.concept_data import (
    TEXTURE_GENERATORS,
    draw_textures,
    overlay_texture,
    read_concept_folder,
    select_texts_with_words,
)
from clearhead.concepts.significance import (
    compute_binomial_interval,
    compute_random_magnitudes,
    correct_concept_tests,
    evaluate_concept,
    fit_against_random_sets,
    fit_random_vectors,
    split_random_sets,
)
from clearhead.concepts.tcav import compute_concept_tests, compute_relative_tcav, run_tcav
from clearhead.errors import ClearheadError, InputError
from tests.models import explainer, inputs


def make_activations(n, shift=None, width=12, seed=0):
    result = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)).double()
    return ConceptActivations(result if shift is None else result + shift, list(range(n)))


def axis(width=12, size=3.0):
    return torch.eye(width).double()[0] * size


@pytest.mark.parametrize("classifier", CLASSIFIERS)
def test_vectors_point_to_the_concept_and_swapped_scores_are_mirrored(classifier):
    concept, counter = make_activations(30, axis(size=5.0)), make_activations(34, seed=1)
    vector = fit_concept_vector(concept, counter, classifier)
    assert vector.q[0, 0] > 0.7 and vector.q[0].norm() == pytest.approx(1)
    assert vector.held_out_metrics.accuracy > 0.8 and vector.held_out_metrics.count == 20
    gradients = [g[None] for g in torch.randn(25, 12, generator=torch.Generator().manual_seed(2)).double()]
    both = compute_relative_tcav({"a": concept, "b": counter}, gradients, classifier)
    assert both["a", "b"] == 1 - both["b", "a"] and 0 < both["a", "b"] < 1


def test_indistinguishable_sets_are_rejected():
    with pytest.raises(InputError, match=r"stripes cannot be distinguished from dots: accuracy 0\.\d\d on 20 held-out"):
        fit_concept_vector(make_activations(30), make_activations(30, seed=1), threshold=0.9, names=("stripes", "dots"))
    with pytest.raises(InputError, match="concept has 2 inputs: a concept vector needs at least 3"):
        fit_concept_vector(make_activations(2), make_activations(30))
    with pytest.raises(InputError, match="different numbers of features: 12 and 5"):
        fit_concept_vector(make_activations(9), make_activations(9, width=5))
    with pytest.raises(InputError, match="unknown classifier 'forest'"):
        fit_concept_vector(make_activations(9), make_activations(9), "forest")


@pytest.mark.parametrize("pool", ["class", "mean", "token", "flat"])
@pytest.mark.parametrize("subject", ["vit/image", "bert/classify"])
def test_sensitivity_is_the_derivative_along_the_concept(subject, pool):
    """Finite differences: the model runs again with the states moved along v."""
    ex, raws = explainer(subject), inputs(subject)[:2]
    raws = [raws[0]] * 2 if pool == "flat" else raws  # of equal length
    layer, eps = 1, 1e-6
    captured = compute_activations(ex, raws * 2, [layer], pool)[layer]
    width = captured.activations.shape[1]
    v = torch.randn(width, generator=torch.Generator().manual_seed(4)).double()
    vector = fit_concept_vector(
        make_activations(9, width=width), make_activations(9, width=width, seed=1), "mean-difference", threshold=None
    )
    vector = type(vector)(**{**vars(vector), "q": (v / v.norm())[None]})
    gradients = compute_target_gradients(ex, raws, [layer], pool, 1)[layer]
    sensitivities, maps = compute_sensitivities(gradients, vector), compute_concept_map(gradients, vector)
    for i, raw in enumerate(raws):
        assert len(maps[i]) == len(gradients[i]) and maps[i].sum() == pytest.approx(float(sensitivities[i]))
        logits = [_compute_logit_with_moved_states(ex, raw, layer, pool, vector.q[0] * step) for step in (eps, -eps)]
        assert float(sensitivities[i]) == pytest.approx((logits[0] - logits[1]) / (2 * eps), rel=1e-3, abs=1e-7)


def _compute_logit_with_moved_states(ex, raw, layer, pool, step):
    """Return the logit of class 1 with the states of the pooled units moved by `step`."""
    from clearhead.adapters import InputOptions
    from clearhead.concepts.layer_hooks import find_hook_points, hooked_layers

    sample = ex.adapter.make_samples(raw, InputOptions())[0]
    is_moved = torch.tensor([not special for special in sample.units.special])
    if pool == "class":
        is_moved = torch.arange(len(is_moved)) == 0

    def move_states(states):
        return states + (step.view(1, len(is_moved), -1) if pool == "flat" else is_moved[:, None] * step)

    with torch.no_grad(), hooked_layers(ex.adapter.model, {find_hook_points(ex)[layer + 1]: move_states}):
        return float(ex.adapter.model(**ex.adapter.collate([sample])).logits[0, 1])


def test_saved_vectors_round_trip(tmp_path):
    vector = fit_concept_vector(make_activations(20, axis()), make_activations(20, seed=1))
    loaded = Directions.load(Directions({3: vector}).save(tmp_path / "v.safetensors"))[3]
    gradients = [torch.ones(1, 12).double()]
    torch.testing.assert_close(
        compute_sensitivities(gradients, loaded), compute_sensitivities(gradients, vector), rtol=1e-14, atol=0
    )
    assert loaded.held_out_metrics == vector.held_out_metrics


def run_trial(seed, shift=None, sets=8, size=10, width=48):
    """Test a concept on gradients that nearly agree, as those of trained models do."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [(axis(width, 1.0) + 0.1 * torch.randn(width, generator=generator).double())[None] for _ in range(20)]
    random_sets = [make_activations(size, width=width, seed=1000 * seed + i) for i in range(1, sets + 1)]
    concept = make_activations(size, shift, width, 1000 * seed)
    random_magnitudes = compute_random_magnitudes(fit_random_vectors(random_sets, "mean-difference"), gradients)
    return evaluate_concept(
        fit_against_random_sets(concept, random_sets, "mean-difference"), gradients, random_magnitudes, threshold=None
    )


def test_random_concepts_are_rarely_significant():
    """At 5 % in 200 trials, more than 19 false positives have probability 0.001."""
    trials = [run_trial(seed) for seed in range(200)]
    assert sum(trial.p < 0.05 for trial in trials) <= 19
    assert sum(trial.p_random < 0.05 for trial in trials) <= 19
    # the uncorrected test, for comparison, has many false positives
    assert sum(trial.p_uncorrected < 0.05 for trial in trials) > 60


def test_concept_aligned_with_class_gradient_is_significant():
    trials = [run_trial(seed, axis(48, 5.0)) for seed in range(5)]
    assert all(trial.is_significant for trial in correct_concept_tests(trials))
    assert all(trial.score > 0.95 and trial.effect > 3 and trial.magnitude > 0 for trial in trials)
    opposite = run_trial(7, -axis(48, 5.0))
    assert opposite.score < 0.05 and opposite.magnitude < 0 and opposite.p < 0.05


def test_absent_concept_has_no_score():
    vectors = fit_against_random_sets(make_activations(20), [make_activations(20, seed=i) for i in (1, 2, 3)])
    line = evaluate_concept(vectors, [torch.ones(1, 12).double()], np.ones(3))
    assert "cannot be distinguished from random inputs" in line.rejection_reason and np.isnan(line.score)
    assert not correct_concept_tests([line])[0].is_significant


def test_tcav_on_an_image_model_end_to_end():
    ex = explainer("vit/image")
    concepts = {kind: draw_textures(kind, 6, 20) for kind in ("striped", "dotted")}
    random = [*draw_textures("bubbly", 12, 20), *draw_textures("checkered", 12, 20)]
    lines = compute_concept_tests(ex, inputs("vit/image"), concepts, random, [0, -1], target=0, runs=4, threshold=None)
    assert [(line.concept, line.layer) for line in lines] == [(c, k) for k in (0, 2) for c in concepts]
    assert all(line.runs == 4 and line.inputs == 3 and 0 <= line.low <= line.score <= line.high <= 1 for line in lines)
    rerun = run_tcav(ex, inputs("vit/image"), concepts, random, [0, -1], target=0, runs=4, threshold=None)
    assert lines == rerun.concept_tests
    for layer, scores in rerun.relative_scores.items():
        assert scores["striped", "dotted"] == 1 - scores["dotted", "striped"]
        q = rerun.concept_vectors["dotted"][layer].q[0]
        gradients = compute_target_gradients(ex, inputs("vit/image"), [layer], "token", 0)[
            layer
        ]  # all units but the class token
        for sensitivity_map, gradient in zip(rerun.sensitivity_maps["dotted"][layer], gradients, strict=True):
            np.testing.assert_allclose(sensitivity_map[1:], (gradient @ q)[1:], atol=1e-12)
            # above the last layer, only the class token is read
            assert layer == 2 or abs(sensitivity_map[1:]).max() > 0


def test_random_sets_do_not_overlap():
    sets = split_random_sets(45, 10, 20)
    assert len(sets) == 4 and len({index for random_set in sets for index in random_set}) == 40
    with pytest.raises(InputError, match="45 random inputs make 2 sets of 20"):
        split_random_sets(45, 20, 20)


def test_tcav_score_of_zeros_and_binomial_interval():
    assert compute_tcav_score(torch.tensor([1.0, 0.0])) == 0.75
    assert compute_binomial_interval(1.0, 10)[0] == pytest.approx(0.025 ** (1 / 10))


def test_textures_differ_and_are_reproducible():
    for kind in TEXTURE_GENERATORS:
        first, second = draw_textures(kind, 2, 32), draw_textures(kind, 2, 32)
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
        assert (first[0] != first[1]).any() and first[0].dtype == np.uint8 and first[0].std() > 15
    with pytest.raises(InputError, match="unknown texture 'stripy': did you mean 'striped'"):
        draw_textures("stripy", 2)


def test_textures_are_blended_into_images():
    image = np.full((20, 30, 3), 100, np.uint8)
    (blended,) = overlay_texture([image], "striped", opacity=0.25)
    assert blended.shape == image.shape and blended.dtype == np.uint8 and abs(blended.astype(int) - 75).max() <= 64
    assert blended.std() > 5
    with pytest.raises(InputError, match="opacity=0 is not valid: it must be above 0"):
        overlay_texture([image], "striped", opacity=0)


def test_concept_sets_from_folders_and_words(tmp_path):
    (tmp_path / "good.txt").write_text("a fine film\n\nso good\n")
    (tmp_path / "bad.txt").write_text("so bad\n")
    assert read_concept_folder(tmp_path, "good") == ["a fine film", "so good"]
    assert select_texts_with_words(["He"], ["the hen", "he is", "if he"], max_texts=1) == ["he is"]
    for call, message in (
        (lambda: read_concept_folder(tmp_path / "no"), "there is no folder"),
        (lambda: read_concept_folder(tmp_path, "x"), "holds no images and no .txt files whose names begin with 'x'"),
        (lambda: select_texts_with_words(["zebra"], ["a cat"]), r"no text contains a word of the list \(zebra\)"),
        (lambda: select_texts_with_words([], ["a cat"]), "the word list is empty"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def test_invalid_requests_raise():
    ex = explainer("bert/classify")
    texts = inputs("bert/classify")
    with pytest.raises(InputError, match="unknown pool 'cls'"):
        compute_activations(ex, texts, [1], "cls")
    with pytest.raises(InputError, match="needs inputs of one length"):
        compute_activations(ex, texts, [1], "flat")
    with pytest.raises(InputError, match="layer 9 does not exist"):
        compute_activations(ex, texts, [9])
    with pytest.raises(InputError, match="no concept was given"):
        compute_concept_tests(ex, texts, {}, texts, [1])
    with pytest.raises(ClearheadError, match="do not pass on one vector"):
        compute_activations(explainer("swin/image"), inputs("swin/image"), [1])


def test_single_text_instead_of_a_list_raises():
    ex = explainer("bert/classify")
    for call in (
        lambda: compute_activations(ex, "superb", [1]),
        lambda: compute_target_gradients(ex, "superb", [1], target=0),
    ):
        with pytest.raises(InputError, match="expected a list of inputs, but 'superb' is one text"):
            call()
