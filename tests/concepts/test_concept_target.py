"""A concept as a target: the number is h·q, every kind of method explains it, and what lies above does not count."""

import copy
import pickle

import pytest
import torch

from clearhead.concepts import Directions
from clearhead.concepts.concept_target import firing
from clearhead.concepts.densray import densray
from clearhead.errors import ClearheadWarning, InputError, Refusal
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
    return densray(first + 1, second, names=("he", "she"))


@pytest.mark.parametrize("subject", ["bert/classify", "bert/mask", "albert/classify", "vit/image"])
def test_its_number_is_the_projection_at_that_layer_and_unit(subject):
    ex, raws, q = explainer(subject), inputs(subject), direction()
    found = firing(ex, q, layer=2, position=1).explain(raws, method="input-x-gradient")
    for raw, e in zip(raws, found, strict=True):
        batch = ex.subject.collate(ex.subject.samples(raw, how()))
        with torch.no_grad():
            h = copy.deepcopy(ex.subject.model)(**batch, output_hidden_states=True).hidden_states[2]
        assert e.target["value"] == pytest.approx(float(h[0, 1] @ q.q[0].to(h)), rel=1e-5)
        assert e.target["name"] == "he at layer 2" and len(e.scores) == h.shape[1]


def test_every_kind_of_method_explains_it_and_batches_do_not_matter():
    ex, raws = explainer("bert/classify"), inputs("bert/classify")
    fires = firing(ex, direction(), layer=2, position=2)
    together = fires.explain(raws, method=METHODS)
    for method in METHODS:
        for raw, e in zip(raws, together[method], strict=True):
            alone = fires.explain(raw, method=method)
            assert abs(e.scores - alone.scores).max() < 1e-9
            assert abs(e.scores).max() > 0


def test_completeness_holds_for_it():
    e = firing(explainer("bert/classify"), direction(), layer=3, position=2).explain(
        inputs("bert/classify")[0], method="integrated-gradients"
    )
    assert e.certificate["checks"]["completeness_gap"] < 1e-2


def test_what_lies_above_the_layer_does_not_count():
    """The same model with other weights above layer 2 fires the same; attention above it is not in the rollout."""
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    other = explainer("bert/classify")
    with torch.no_grad():
        for parameter in other.subject.model.bert.encoder.layer[2].parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(9))
    for method in ("rollout", "generic", "attention"):
        one, two = (firing(x, direction(), layer=2, position=2).explain(raw, method=method) for x in (ex, other))
        assert (one.scores == two.scores).all()


def test_a_word_by_name_and_a_text_without_a_mask():
    fires = firing(explainer("bert/mask"), direction(), layer=2, position="boring")
    e = fires.explain("So boring!", method="grad-sam")
    by_number = firing(explainer("bert/mask"), direction(), layer=2, position=e.tokens.index("boring"))
    assert by_number.explain("So boring!", method="grad-sam").target["value"] == e.target["value"]
    with pytest.raises(InputError, match="position='movie', but that word is not in the text"):
        firing(explainer("bert/mask"), direction(), 2, "movie").explain("So boring!")
    with pytest.raises(InputError, match="the text has none: give a word or a number"):
        firing(explainer("bert/mask"), direction(), 2).explain("So boring!")


def test_a_word_that_stands_twice_is_said():
    ex, text = explainer("bert/classify"), "so boring and so long"
    with pytest.warns(
        ClearheadWarning, match=r"'So' stands 2 times .* the number of its unit \((\d+), (\d+)\)"
    ) as said:
        e = firing(ex, direction(), 2, "So").explain(text, method=["grad-sam", "occlusion"])["grad-sam"]
    places = [place for place, token in enumerate(e.tokens) if token == "so"]
    assert len(said) == 1 and f"({', '.join(map(str, places))})" in str(said[0].message)
    values = [firing(ex, direction(), 2, place).explain(text).target["value"] for place in places]
    assert e.target["value"] == values[0] != values[1]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ex: pickle.loads(pickle.dumps(ex))], ids=["copy", "pickle"])
def test_copies_listen_to_their_own_model(copied):
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    fires = firing(ex, direction(), layer=2, position=1)
    expected, other = fires.explain(raw), copied(fires)
    with torch.no_grad():
        ex.subject.model.bert.encoder.layer[0].output.dense.weight.zero_()
    found = other.explain(raw)
    assert found.target == expected.target != fires.explain(raw).target and (found.scores == expected.scores).all()


def test_the_model_is_untouched():
    ex = explainer("bert/classify")
    firing(ex, direction(), layer=2, position=1).explain(inputs("bert/classify")[0])
    model = ex.subject.model
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert ex.explain(inputs("bert/classify")[0]).target["kind"] == "predicted"


def test_bad_requests():
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    with pytest.raises(InputError, match=r"the Direction of one layer is wanted, as densray .*, not Tensor"):
        firing(ex, direction().q, layer=2)
    with pytest.raises(InputError, match=r"wanted: give directions\[k\], not Directions"):
        firing(ex, Directions({2: direction()}), layer=2)
    with pytest.raises(InputError, match="no attention lies below it"):
        firing(ex, direction(), layer=0)
    with pytest.raises(InputError, match="position=99, but the input has"):
        firing(ex, direction(), 1, 99).explain(raw)
    with pytest.raises(InputError, match="8 wide, but these states are 32"):
        firing(ex, direction(8), 1, 1).explain(raw)
    with pytest.raises(InputError, match="would move the words"):
        firing(ex, direction(), 1, 1).explain(raw, method=_occlusion("delete"))
    with pytest.raises(Refusal, match="do not hand on one vector"):
        firing(explainer("swin/image"), direction(), 1, 1)


def _occlusion(replacement):
    from clearhead.methods import Method

    return Method("occlusion", replacement=replacement)


def how():
    from clearhead.adapters import How

    return How()
