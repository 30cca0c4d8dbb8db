"""A concept as explanation target: its value is h·q, every method type supports it, and layers above have no effect."""

import copy
import pickle

import pytest
import torch

from clearhead.concepts import Directions
from clearhead.concepts.concept_target import make_concept_explainer
from clearhead.concepts.densray import fit_densray
from clearhead.errors import ClearheadWarning, InputError, UnsupportedError
from tests.models import explainer, inputs

#: One method of every type: tape with and without gradients, input gradients, path, rules, perturbation, value zeroing.
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
        batch = ex.adapter.collate(ex.adapter.make_samples(raw, input_options()))
        with torch.no_grad():
            h = copy.deepcopy(ex.adapter.model)(**batch, output_hidden_states=True).hidden_states[2]
        assert e.target["value"] == pytest.approx(float(h[0, 1] @ q.q[0].to(h)), rel=1e-5)
        assert e.target["name"] == "he at layer 1" and len(e.scores) == h.shape[1]


def test_every_method_type_explains_a_concept_and_batch_equals_single():
    ex, raws = explainer("bert/classify"), inputs("bert/classify")
    concept_explainer = make_concept_explainer(ex, direction(), layer=1, position=2)
    batched = concept_explainer.explain(raws, method=METHODS)
    for method in METHODS:
        for raw, e in zip(raws, batched[method], strict=True):
            single = concept_explainer.explain(raw, method=method)
            assert abs(e.scores - single.scores).max() < 1e-9
            assert abs(e.scores).max() > 0


def test_integrated_gradients_are_complete():
    e = make_concept_explainer(explainer("bert/classify"), direction(), layer=2, position=2).explain(
        inputs("bert/classify")[0], method="integrated-gradients"
    )
    assert e.certificate["checks"]["completeness_gap"] < 1e-2


def test_layers_above_the_concept_have_no_effect():
    """Other weights above layer 1 do not change the scores; attention above it is not in the rollout."""
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    modified_ex = explainer("bert/classify")
    with torch.no_grad():
        for parameter in modified_ex.adapter.model.bert.encoder.layer[2].parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(9))
    for method in ("rollout", "generic", "attention"):
        original, modified = (
            make_concept_explainer(source, direction(), layer=1, position=2).explain(raw, method=method)
            for source in (ex, modified_ex)
        )
        assert (original.scores == modified.scores).all()


def test_position_by_word_equals_position_by_index():
    concept_explainer = make_concept_explainer(explainer("bert/mask"), direction(), layer=1, position="boring")
    e = concept_explainer.explain("So boring!", method="grad-sam")
    by_number = make_concept_explainer(explainer("bert/mask"), direction(), layer=1, position=e.tokens.index("boring"))
    assert by_number.explain("So boring!", method="grad-sam").target["value"] == e.target["value"]
    with pytest.raises(InputError, match="position='movie', but that word is not in the text"):
        make_concept_explainer(explainer("bert/mask"), direction(), 1, "movie").explain("So boring!", method="generic")
    with pytest.raises(InputError, match="the text has no mask: use a word or the index of a unit"):
        make_concept_explainer(explainer("bert/mask"), direction(), 1).explain("So boring!", method="generic")


def test_repeated_word_warns():
    ex, text = explainer("bert/classify"), "so boring and so long"
    with pytest.warns(
        ClearheadWarning, match=r"'So' occurs 2 times .* the index of its unit \((\d+), (\d+)\)"
    ) as caught:
        e = make_concept_explainer(ex, direction(), 1, "So").explain(text, method=["grad-sam", "occlusion"])["grad-sam"]
    positions = [position for position, token in enumerate(e.tokens) if token == "so"]
    assert len(caught) == 1 and f"({', '.join(map(str, positions))})" in str(caught[0].message)
    values = [
        make_concept_explainer(ex, direction(), 1, position).explain(text, method="generic").target["value"]
        for position in positions
    ]
    assert e.target["value"] == values[0] != values[1]


@pytest.mark.parametrize(
    "make_copy", [copy.deepcopy, lambda ex: pickle.loads(pickle.dumps(ex))], ids=["copy", "pickle"]
)
def test_copies_capture_states_of_their_own_model(make_copy):
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    concept_explainer = make_concept_explainer(ex, direction(), layer=1, position=1)
    expected, copied_explainer = concept_explainer.explain(raw, method="generic"), make_copy(concept_explainer)
    with torch.no_grad():
        ex.adapter.model.bert.encoder.layer[0].output.dense.weight.zero_()
    result = copied_explainer.explain(raw, method="generic")
    assert (
        result.target == expected.target != concept_explainer.explain(raw, method="generic").target
        and (result.scores == expected.scores).all()
    )


def test_model_is_unchanged():
    ex = explainer("bert/classify")
    make_concept_explainer(ex, direction(), layer=1, position=1).explain(inputs("bert/classify")[0], method="generic")
    model = ex.adapter.model
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert ex.explain(inputs("bert/classify")[0], method="generic").target["kind"] == "predicted"


def test_invalid_requests_raise():
    ex, raw = explainer("bert/classify"), inputs("bert/classify")[0]
    with pytest.raises(InputError, match=r"pass the Direction of one layer, such as densray .*, not Tensor"):
        make_concept_explainer(ex, direction().q, layer=1)
    with pytest.raises(InputError, match=r"one layer, directions\[k\], not Directions"):
        make_concept_explainer(ex, Directions({1: direction()}), layer=1)
    with pytest.raises(InputError, match="there is no attention below the embeddings"):
        make_concept_explainer(ex, direction(), layer="embeddings")
    with pytest.raises(InputError, match="position=99, but the input has"):
        make_concept_explainer(ex, direction(), 0, 99).explain(raw, method="generic")
    with pytest.raises(InputError, match="8 features, but these states have 32"):
        make_concept_explainer(ex, direction(8), 1, 1).explain(raw, method="generic")
    with pytest.raises(InputError, match="would move the tokens"):
        make_concept_explainer(ex, direction(), 1, 1).explain(raw, method=_occlusion("delete"))
    with pytest.raises(UnsupportedError, match="do not pass on one vector"):
        make_concept_explainer(explainer("swin/image"), direction(), 1, 1)


def _occlusion(replacement):
    from clearhead.methods import Method

    return Method("occlusion", replacement=replacement)


def input_options():
    from clearhead.adapters import InputOptions

    return InputOptions()
