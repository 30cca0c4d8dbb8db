"""A concept as a target: the number is h·q, every kind of method explains it, and what lies above does not count."""

import copy
import pickle

import pytest
import torch

from clearhead.concepts import Directions
from clearhead.concepts.concept_target import make_concept_explainer
from clearhead.concepts.densray import fit_densray
from clearhead.errors import ClearheadWarning, InputError, UnsupportedError
from tests.models import explainer, inputs

#: One method of every kind: a tape with and without gradients, inputs, a path, rules, values, edits.
METHODS = [
    "generic",
    "rollout",
    "attention",
    "input-x-gradient",
    "integrated-gradients",
    "lrp",
    "occlusion",
    "value-zeroing",
]


def direction(width=32):
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(40, width, generator=generator).double() for _ in range(2))
    return fit_densray(first + 1, second, names=("he", "she"))


@pytest.mark.parametrize("subject", ["bert/classify", "bert/mask", "albert/classify", "vit/image"])
def test_target_value_is_the_projection_at_layer_and_unit(subject):
    ex, raws, q = explainer(subject), inputs(subject), direction()
    result = make_concept_explainer(ex, q, layer=1, position=1).explain(raws, method="input-x-gradient")
    for raw, e in zip(raws, result, strict=True):
        batch = ex.adapter.collate(ex.adapter.make_samples(raw, how()))
        with torch.no_grad():
            h = copy.deepcopy(ex.adapter.model)(**batch, output_hidden_states=True).hidden_states[2]
        assert e.target["value"] == pytest.approx(float(h[0, 1] @ q.q[0].to(h)), rel=1e-5)
        assert e.target["name"] == "he at layer 1" and len(e.scores) == h.shape[1]


def test_every_method_type_explains_a_concept_and_batch_equals_single():
    ex, raws = explainer("bert/classify"), inputs("bert/classify")
    fires = make_concept_explainer(ex, direction(), layer=1, position=2)
    together = fires.explain(raws, method=METHODS)
    for method in METHODS:
        for raw, e in zip(raws, together[method], strict=True):
            single = fires.explain(raw, method=method)
            assert abs(e.scores - single.scores).max() < 1e-9
            assert abs(e.scores).max() > 0


def test_integrated_gradients_are_complete():
    e = make_concept_explainer(explainer("bert/classify"), direction(), layer=2, position=2).explain(
        inputs("bert/classify")[0], method="integrated-gradients"
    )
    assert e.certificate["checks"]["completeness_gap"] < 1e-2


def test_layers_above_the_concept_have_no_effect():
    """The same model with other weights above layer 1 fires the same; attention above it is not in the rollout."""
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    other = explainer("bert/classify")
    with torch.no_grad():
        for parameter in other.adapter.model.bert.encoder.layer[2].parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(9))
    for method in ("rollout", "generic", "attention"):
        one, two = (
            make_concept_explainer(x, direction(), layer=1, position=2).explain(raw, method=method) for x in (ex, other)
        )
        assert (one.scores == two.scores).all()


def test_position_by_word_and_in_a_text_without_mask():
    fires = make_concept_explainer(explainer("bert/mask"), direction(), layer=1, position="boring")
    e = fires.explain("So boring!", method="grad-sam")
    by_number = make_concept_explainer(explainer("bert/mask"), direction(), layer=1, position=e.tokens.index("boring"))
    assert by_number.explain("So boring!", method="grad-sam").target["value"] == e.target["value"]
    with pytest.raises(InputError, match="position='movie', but that word is not in the text"):
        make_concept_explainer(explainer("bert/mask"), direction(), 1, "movie").explain("So boring!")
    with pytest.raises(InputError, match="the text has none: give a word or a number"):
        make_concept_explainer(explainer("bert/mask"), direction(), 1).explain("So boring!")


def test_repeated_word_warns():
    ex, text = explainer("bert/classify"), "so boring and so long"
    with pytest.warns(
        ClearheadWarning, match=r"'So' occurs 2 times .* the number of its unit \((\d+), (\d+)\)"
    ) as said:
        e = make_concept_explainer(ex, direction(), 1, "So").explain(text, method=["grad-sam", "occlusion"])["grad-sam"]
    places = [place for place, token in enumerate(e.tokens) if token == "so"]
    assert len(said) == 1 and f"({', '.join(map(str, places))})" in str(said[0].message)
    values = [make_concept_explainer(ex, direction(), 1, place).explain(text).target["value"] for place in places]
    assert e.target["value"] == values[0] != values[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ex: pickle.loads(pickle.dumps(ex))], ids=["copy", "pickle"])
def test_copies_capture_states_of_their_own_model(copied):
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    fires = make_concept_explainer(ex, direction(), layer=1, position=1)
    expected, other = fires.explain(raw), copied(fires)
    with torch.no_grad():
        ex.adapter.model.bert.encoder.layer[0].output.dense.weight.zero_()
    result = other.explain(raw)
    assert result.target == expected.target != fires.explain(raw).target and (result.scores == expected.scores).all()


def test_model_is_unchanged():
    ex = explainer("bert/classify")
    make_concept_explainer(ex, direction(), layer=1, position=1).explain(inputs("bert/classify")[0])
    model = ex.adapter.model
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert ex.explain(inputs("bert/classify")[0]).target["kind"] == "predicted"


def test_bad_requests():
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    with pytest.raises(InputError, match=r"the Direction of one layer is needed, such as densray .*, not Tensor"):
        make_concept_explainer(ex, direction().q, layer=1)
    with pytest.raises(InputError, match=r"needed: give directions\[k\], not Directions"):
        make_concept_explainer(ex, Directions({1: direction()}), layer=1)
    with pytest.raises(InputError, match="no attention lies below the embeddings"):
        make_concept_explainer(ex, direction(), layer="embeddings")
    with pytest.raises(InputError, match="position=99, but the input has"):
        make_concept_explainer(ex, direction(), 0, 99).explain(raw)
    with pytest.raises(InputError, match="8 wide, but these states are 32"):
        make_concept_explainer(ex, direction(8), 1, 1).explain(raw)
    with pytest.raises(InputError, match="would move the tokens"):
        make_concept_explainer(ex, direction(), 1, 1).explain(raw, method=_occlusion("delete"))
    with pytest.raises(UnsupportedError, match="do not pass on one vector"):
        make_concept_explainer(explainer("swin/image"), direction(), 1, 1)


def _occlusion(replacement):
    from clearhead.methods import Method

    return Method("occlusion", replacement=replacement)


def how():
    from clearhead.adapters import InputOptions

    return InputOptions()
