"""GradCAM on attention against its replica."""

import numpy as np
import pytest
import torch

import clearhead
from clearhead import Method
from tests import models
from tests.methods import replica_comparison, test_path_methods
from tests.methods import test_parity as parity


@pytest.mark.parametrize("subject", replica_comparison.SUBJECTS)
def test_equals_its_replica(subject: str) -> None:
    replica_comparison.assert_twins("attention-gradcam", subject)


@pytest.mark.parametrize("subject", replica_comparison.FEW)
def test_every_row(subject: str) -> None:
    replica_comparison.assert_twins("attention-gradcam", subject, every_row=True)


@pytest.mark.parametrize("layers", replica_comparison.RANGES, ids=str)
@pytest.mark.parametrize("subject", ["bert/classify", "deberta/mask", "beit/image"])
def test_layers(subject: str, layers: tuple) -> None:
    replica_comparison.assert_twins("attention-gradcam", subject, layers=layers)


@pytest.mark.parametrize("heads", replica_comparison.HEADS, ids=str)
def test_heads(heads: tuple) -> None:
    replica_comparison.assert_twins("attention-gradcam", "bert/classify", heads=heads)


@pytest.mark.parametrize("target", replica_comparison.TARGETS)
@pytest.mark.parametrize("subject", ["bert/classify", "roberta/mask", "vit/image"])
def test_targets(subject: str, target: str) -> None:
    replica_comparison.assert_twins("attention-gradcam", subject, target=target)


def test_clamps_after_the_mean_over_heads() -> None:
    """Each head alone is clamped alone: their mean is not the whole, as it would be with the clamp before the mean."""
    seen, readout = replica_comparison.slow("bert/classify", replica_comparison.SENTENCES[0])
    replica = replica_comparison.replica_of("attention-gradcam")
    last = (seen.attention[-1], seen.attention_gradient[-1])
    alone = np.mean([replica.cam(*(part[head : head + 1] for part in last)) for head in range(seen.heads)], axis=0)
    whole = (
        replica_comparison.explainer("bert/classify")
        .explain(replica_comparison.SENTENCES[0], "attention-gradcam")
        .scores
    )
    assert replica_comparison.gap(whole, readout @ alone) > 0.01


def test_ranking_does_not_depend_on_the_scale_of_the_target() -> None:
    text = replica_comparison.SENTENCES[0]
    one, ten = (
        replica_comparison.with_classifier_times("bert/classify", factor).explain(text, "attention-gradcam", 1).scores
        for factor in (1, 10)
    )
    assert one.max() > 0
    assert replica_comparison.gap(ten, 10 * one) < 1e-12


#: The units that are not special, of each subject.
INSIDE = {
    "bert/classify": slice(1, -1),
    "modernbert/mask": slice(1, -1),
    "dinov2/image": slice(1, None),
    "beit/image": slice(1, None),
}


@pytest.mark.parametrize("subject", INSIDE)
def test_weights_of_the_row_that_is_read(subject: str) -> None:
    ex, replica = replica_comparison.explainer(subject), replica_comparison.replica_of("attention-gradcam")
    method, row = Method("attention-gradcam", region="row"), Method("attention-gradcam", region="row", rows="all")
    size = 1 if subject.startswith("modernbert") else 3
    found = ex.explain(models.inputs(subject), [method, row, "attention-gradcam"], batch_size=size)
    usual = [e.scores for e in found["attention-gradcam"]]
    assert (
        max(replica_comparison.gap(e.scores, other) for e, other in zip(found[str(method)], usual, strict=True)) > 0.01
    )
    for i, (seen, readout) in enumerate(replica_comparison.slow_batch(subject)):
        last, inside = (seen.attention[-1], seen.attention_gradient[-1]), range(seen.units)[INSIDE[subject]]
        e = found[str(method)][i]
        assert replica_comparison.gap(e.scores, replica.of_the_row(*last, readout, inside)) < 1e-6
        third = replica.of_the_row(*last, np.eye(seen.units)[2], inside)
        assert third.max() == 0 or replica_comparison.gap(found[str(row)][i].matrix[2], third) < 1e-6


@pytest.mark.parametrize(("case", "which"), parity.CASES)
class TestAuthors:
    @pytest.mark.parametrize("folder", ["vit_chefer", "vit_beyond"])
    def test_a_vit(self, case: str, which: str, folder: str) -> None:
        e = parity.vit(case, which, "attention-gradcam", profile="te_vit_eval")
        assert np.isnan(e.scores[0])
        assert replica_comparison.gap(e.heat_map(), parity.theirs("vit", folder, case, which, "cam_attn")) < parity.VIT

    def test_a_vit_that_averages_its_patches(self, case: str, which: str) -> None:
        """Along the wrong axis; NaN where the clamp leaves nothing to be scaled."""
        pixels = torch.as_tensor(parity.theirs("vit", "vit_chefer", case, "pixel_values"))
        with np.load(parity.DATA / "gradcam.npz") as file:
            theirs = {name: file[f"vit_beyond/cases_softmax32/{case}/{which}/mae/{name}"] for name in FIGURES}
        both = test_path_methods.averaging().explain(
            {"pixel_values": pixels}, ["attention", "attention-gradcam"], int(theirs["target"]), profile="bi_vit_mae"
        )
        for method, name in (("attention", "attn_last"), ("attention-gradcam", "cam_attn")):
            scores = both[method].scores[1:]
            assert np.isnan(both[method].scores[0]) and np.isnan(scores).all() == np.isnan(theirs[name]).all()
            if not np.isnan(scores).any():
                assert replica_comparison.gap(scores, theirs[name]) < parity.VIT, name


FIGURES = ("cam_attn", "attn_last", "target")


def test_copies_are_the_originals() -> None:
    if not parity.ORIGINALS.is_dir():
        pytest.skip(f"{parity.ORIGINALS} is absent: only the copies are here")
    with np.load(parity.DATA / "gradcam.npz") as file:
        for key in file.files:
            folder, name, inside = key.split("/", 2)
            np.testing.assert_array_equal(file[key], np.load(parity.ORIGINALS / folder / f"{name}.npz")[inside])


def test_the_wrong_axis_is_for_one_stream() -> None:
    from tests import joint_models

    ex = joint_models.explainer("lxmert")
    for method in ("attention", "attention-gradcam"):
        with pytest.raises(clearhead.InputError, match="by_query=True is for models of one stream"):
            ex.explain(**joint_models.inputs("lxmert")[0], method=Method(method, by_query=True))
