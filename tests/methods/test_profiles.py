"""Authors' settings on models that the authors' code is for, and on none else."""

import pytest

import clearhead
from tests import models
from tests.methods import test_parity as parity
from tests.methods import twins


@pytest.mark.parametrize(
    ("subject", "profile", "method"),
    [
        ("bert/classify", "bi_clip_c", "beyond-intuition-token"),
        ("bert/classify", "te_vit_eval", "transformer-attribution"),
        ("bert/classify", "bi_vit_h", "beyond-intuition-head"),
        ("bert/classify", "gender_mlm", "attcat"),
        ("bert/mask", "bi_ga", "generic"),
        ("vit/image", "te_bert_eraser", "transformer-attribution"),
        ("vit/image", "mm_detr", "generic"),
    ],
)
def test_models_that_no_author_computed_are_refused(subject: str, profile: str, method: str) -> None:
    with pytest.raises(clearhead.Refusal, match=f"the profile {profile} is what its authors compute for models that"):
        twins.explainer(subject).explain(models.inputs(subject)[0], method, profile=profile)


@pytest.mark.parametrize(("case", "which"), parity.CASES)
def test_beyond_intuitions_generic_attention_of_bert(case: str, which: str) -> None:
    e = parity.bert(case, which, "generic", profile="bi_ga")
    assert parity.gap(e.scores, parity.theirs("bert", "bert_beyond", case, which, "generate_genattr")[0]) < parity.BERT
