"""GradCAM on attention equals its reference implementation and the authors' code."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, test_path_methods
from tests.methods import test_parity as parity


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_reference_implementation(subject: str) -> None:
    replica_comparison.assert_equals_reference("attention-gradcam", subject)


@pytest.mark.parametrize("subject", replica_comparison.ONE_PER_READOUT)
def test_all_rows_equal_reference(subject: str) -> None:
    replica_comparison.assert_equals_reference("attention-gradcam", subject, all_rows=True)


@pytest.mark.parametrize("layers", replica_comparison.LAYER_RANGES, ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "deberta/mask", "beit/image"])
def test_selected_layers_equal_reference(subject: str, layers: tuple) -> None:
    replica_comparison.assert_equals_reference("attention-gradcam", subject, layers=layers)


@pytest.mark.parametrize("heads", replica_comparison.HEADS, ids=str)
def test_selected_heads_equal_reference(heads: tuple) -> None:
    replica_comparison.assert_equals_reference("attention-gradcam", "bert/classify", heads=heads)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets_and_scales_equal_reference(subject: str, target: str) -> None:
    replica_comparison.assert_equals_reference("attention-gradcam", subject, target=target)


def test_clamp_is_applied_after_the_mean_over_heads() -> None:
    """The mean of single heads, each clamped, differs; with the clamp before the mean it would be the same."""
    seen, readout = replica_comparison.record_plain_pass("bert/classify", replica_comparison.SENTENCES[0])
    replica = replica_comparison.replica_of("attention-gradcam")
    last = (seen.attention[-1], seen.attention_gradient[-1])
    mean_of_heads = np.mean(
        [replica.cam(*(maps[head : head + 1] for maps in last)) for head in range(seen.heads)], axis=0
    )
    scores = (
        replica_comparison.explainer("bert/classify")
        .explain(replica_comparison.SENTENCES[0], "attention-gradcam")
        .scores
    )
    assert replica_comparison.gap(scores, readout @ mean_of_heads) > 0.01


def test_scores_scale_linearly_with_the_target() -> None:
    text = replica_comparison.SENTENCES[0]
    scores, scaled_scores = (
        replica_comparison.load_with_scaled_classifier("bert/classify", factor)
        .explain(text, "attention-gradcam", 1)
        .scores
        for factor in (1, 10)
    )
    assert scores.max() > 0
    assert replica_comparison.gap(scaled_scores, 10 * scores) < 1e-12


#: The units of each subject that are not special tokens.
NON_SPECIAL_UNITS = {
    "bert/classify": slice(1, -1),
    "modernbert/mask": slice(1, -1),
    "dinov2/image": slice(1, None),
    "beit/image": slice(1, None),
}


@pytest.mark.parametrize("subject", NON_SPECIAL_UNITS)
def test_region_row_equals_reference_and_differs_from_default(subject: str) -> None:
    ex, replica = replica_comparison.explainer(subject), replica_comparison.replica_of("attention-gradcam")
    method, all_rows_method = (
        Method("attention-gradcam", region="row"),
        Method("attention-gradcam", region="row", rows="all"),
    )
    batch_size = 1 if subject.startswith("modernbert") else 3
    results = ex.explain(models.inputs(subject), [method, all_rows_method, "attention-gradcam"], batch_size=batch_size)
    default_scores = [e.scores for e in results["attention-gradcam"]]
    assert (
        max(
            replica_comparison.gap(e.scores, other)
            for e, other in zip(results[str(method)], default_scores, strict=True)
        )
        > 0.01
    )
    for i, (seen, readout) in enumerate(replica_comparison.record_plain_passes(subject)):
        last, units = (seen.attention[-1], seen.attention_gradient[-1]), range(seen.units)[NON_SPECIAL_UNITS[subject]]
        e = results[str(method)][i]
        assert replica_comparison.gap(e.scores, replica.compute_row_cam(*last, readout, units)) < 1e-6
        third_row = replica.compute_row_cam(*last, np.eye(seen.units)[2], units)
        assert (
            third_row.max() == 0 or replica_comparison.gap(results[str(all_rows_method)][i].matrix[2], third_row) < 1e-6
        )


@pytest.mark.parametrize(("case", "which"), parity.CASES)
class TestAuthors:
    @pytest.mark.parametrize("folder", ["vit_chefer", "vit_beyond"])
    def test_vit_equals_authors(self, case: str, which: str, folder: str) -> None:
        e = parity.vit(case, which, "attention-gradcam", profile="te_vit_eval")
        assert np.isnan(e.scores[0])
        assert replica_comparison.gap(e.heat_map(), parity.theirs("vit", folder, case, which, "cam_attn")) < parity.VIT

    def test_mean_pooled_vit_equals_authors(self, case: str, which: str) -> None:
        """The authors average along the query axis; scores are NaN where the clamp leaves only zeros to be scaled."""
        pixels = torch.as_tensor(parity.theirs("vit", "vit_chefer", case, "pixel_values"))
        with np.load(parity.DATA / "gradcam.npz") as file:
            theirs = {name: file[f"vit_beyond/cases_softmax32/{case}/{which}/mae/{name}"] for name in ARRAY_NAMES}
        results = test_path_methods.load_mean_pooled_vit().explain(
            {"pixel_values": pixels}, ["attention", "attention-gradcam"], int(theirs["target"]), profile="bi_vit_mae"
        )
        for method, name in (("attention", "attn_last"), ("attention-gradcam", "cam_attn")):
            scores = results[method].scores[1:]
            assert np.isnan(results[method].scores[0]) and np.isnan(scores).all() == np.isnan(theirs[name]).all()
            if not np.isnan(scores).any():
                assert replica_comparison.gap(scores, theirs[name]) < parity.VIT, name


ARRAY_NAMES = ("cam_attn", "attn_last", "target")


def test_copied_files_equal_original_fixtures() -> None:
    if not parity.ORIGINALS.is_dir():
        pytest.skip(f"{parity.ORIGINALS} is absent: only the copies are available")
    with np.load(parity.DATA / "gradcam.npz") as file:
        for key in file.files:
            folder, name, inside = key.split("/", 2)
            np.testing.assert_array_equal(file[key], np.load(parity.ORIGINALS / folder / f"{name}.npz")[inside])


def test_by_query_is_rejected_for_multi_stream_models() -> None:
    from tests import joint_models

    ex = joint_models.explainer("lxmert")
    for method in ("attention", "attention-gradcam"):
        with pytest.raises(clearhead.InputError, match="by_query=True needs a model with one stream"):
            ex.explain(**joint_models.inputs("lxmert")[0], method=Method(method, by_query=True))
