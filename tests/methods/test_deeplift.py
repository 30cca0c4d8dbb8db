"""DeepLIFT: its rules by themselves, against its replica, against captum where captum is right, and complete."""

import math
import re
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead
from clearhead import Method
from clearhead.backward_rules import deeplift as rules
from clearhead.backward_rules.deeplift_operators import MissingRuleError
from clearhead.backward_rules.paired_pass import DeepLiftMode, InputTraceMode
from tests import dual_models, models, vision_language_models
from tests.adapters import test_audio as sounds
from tests.adapters import test_decoder as decoders
from tests.adapters import test_detection as detectors
from tests.adapters import test_encoder_decoder as encoder_decoders
from tests.adapters import test_token_heads as token_heads
from tests.methods import replica_comparison
from tests.methods import test_parity as parity
from tests.replicas import deeplift as replica

LAYOUTS = ("bert/classify", "vit/image", "gpt2", "llama")
#: What scores may miss of what they should add up to.
WITHIN = {torch.float64: 1e-5, torch.float32: 1e-4}


@cache
def explainer(layout: str, dtype: torch.dtype = torch.float64) -> clearhead.Explainer:
    if "/" in layout:
        return models.explainer(layout, dtype)
    return clearhead.load(decoders.made(layout, dtype), decoders.WORDS)


@cache
def near_bert() -> Any:
    """A BERT whose sides are near each other, where the rules are the plain ones."""
    return clearhead.load(models.text_model("bert", initializer_range=0.12, num_hidden_layers=2))


def vectors(ex: clearhead.Explainer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """The words of a text, and its default baseline: the mean word, special tokens as they are."""
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x = table[ex.adapter.processor(text)["input_ids"]]
    x0 = np.broadcast_to(table.mean(0), x.shape).copy()
    x0[[0, -1]] = x[[0, -1]]
    return x, x0


# The rules by themselves ----------------------------------------------------------------------------------------------


def multipliers(function: Callable[[Tensor], Tensor], x: Tensor, x0: Tensor) -> Tensor:
    """Of a function whose outputs are summed with weights of their own."""
    watched = InputTraceMode()
    start = x.clone().requires_grad_()
    with watched:
        function(start)
    leaf = x0.clone().requires_grad_()
    with DeepLiftMode(watched):
        out = function(leaf)
    mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * mix).sum(), leaf)[0]


def lost(function: Callable[[Tensor], Tensor], x: Tensor, x0: Tensor) -> float:
    """How far Σ m Δin is from Δout."""
    mix = torch.linspace(-1, 1, function(x).numel(), dtype=x.dtype).reshape(function(x).shape)
    gained = ((function(x) - function(x0)) * mix).sum()
    return float((((x - x0) * multipliers(function, x, x0)).sum() - gained).abs() / gained.abs())


def two_sides(far: float = 1.0, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, x0 = torch.randn(2, *(shape or (3, 4, 6)), generator=generator, dtype=torch.float64)
    return x * far, x0


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "exp": torch.exp,
    "log": lambda x: (x.square() + 0.1).log(),
    "powers": lambda x: x**3 + (x**2 + 0.1) ** 0.5 + (x**2 + 0.2) ** -0.5 + (x**2 + 0.3) ** 1.7,
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(1),
    "log of sums": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: F.layer_norm(x, (6,), torch.arange(6.0).double(), torch.ones(6).double()),
    "rms norm": lambda x: F.rms_norm(x, (6,), eps=1e-6),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "group norm": lambda x: F.group_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "gate": lambda x: F.silu(x[..., :3]) * x[..., 3:],
    "glu": F.glu,
    "matrices": lambda x: x @ x.mT,
    "weights from the input": lambda x: F.conv1d(x, x[:2, :, :3]) + F.linear(x, x[0])[:, :2],
    "named axes": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "quotient": lambda x: x / (x.square().sum(-1, keepdim=True) + 0.1),
    "one over": lambda x: 1 / (x.square() + 0.1),
    "largest": lambda x: x.amax(-1) + x.max(1).values.sum(-1, keepdim=True),
    "largest of windows": lambda x: F.max_pool2d(x[None], 3, 2, 1)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x[None] * 3, is_causal=True)[0],
    "in place": lambda x: F.relu((x * 2).mul_(x), inplace=True),
    "cosine": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
}


@pytest.mark.parametrize("far", [1.0, 30.0, 1e-3], ids=["near", "far", "next to nothing"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_rule_is_complete(name: str, far: float) -> None:
    assert lost(FUNCTIONS[name], *two_sides(far)) < 1e-10


@pytest.mark.parametrize("name", FUNCTIONS)
def test_between_equal_sides_a_rule_is_the_gradient(name: str) -> None:
    """And next to them it is next to it: nothing is divided by what is next to nothing."""
    x, _ = two_sides()
    leaf = x.clone().requires_grad_()
    out = FUNCTIONS[name](leaf)
    mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (gradient,) = torch.autograd.grad((out * mix).sum(), leaf)
    assert replica_comparison.gap(multipliers(FUNCTIONS[name], x, x), gradient) < 1e-12
    assert replica_comparison.gap(multipliers(FUNCTIONS[name], x + 1e-9, x), gradient) < 1e-6


def test_softmax_and_norm_are_steady_where_sides_are_far_apart() -> None:
    """By the plain formula multipliers of e^40 would have to cancel."""
    z, z0 = torch.tensor([[40.0, 1.0, -3.0]]), torch.tensor([[0.5, -2.0, 1.0]])
    assert lost(lambda x: x.softmax(-1), z, z0) < 1e-5
    assert multipliers(lambda x: x.softmax(-1), z, z0).abs().max() < 1
    x, nothing = torch.tensor([[3.0, 1.0, -1.0, 0.5]]), torch.full((1, 4), 1e-7)
    norm = lambda part: F.layer_norm(part, (4,), eps=1e-12)  # noqa: E731
    assert lost(norm, x, nothing) < 1e-5
    assert multipliers(norm, x, nothing).abs().max() < 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("centred", [True, False])
def test_the_scale_of_a_small_vector_is_not_too_much_for_half_precision(dtype: torch.dtype, centred: bool) -> None:
    """Its fourth power is, in float16, from 16 on; embeddings as they are initialised have scales of 30."""
    shape, (x, x0) = (6,), (0.03 * part for part in two_sides())

    def normed(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape) if centred else F.rms_norm(x, shape, eps=1e-6)

    exact, found = multipliers(normed, x, x0), multipliers(normed, x.to(dtype), x0.to(dtype))
    assert replica_comparison.gap(found.double(), exact) < (0.01 if dtype == torch.float16 else 0.1)


def test_half_precision_has_the_scores_of_double_precision() -> None:
    """A BERT as transformers initialises it; on a GPU half-precision weights stay as they are stored."""
    made, words = models.text_model("bert", dtype=torch.float16, initializer_range=0.02)
    half, double = clearhead.load((made, words)), clearhead.load((deepcopy(made).double(), words))
    for method in ("deeplift", "deeplift-shap"):
        found, exact = (ex.explain(models.TEXTS[1], method, target=1).scores for ex in (half, double))
        assert replica_comparison.gap(found, exact) < 0.05


def test_slopes_lose_no_digits_in_single_precision() -> None:
    z = torch.linspace(-4, 4, 1001)
    for name in ("gelu", "silu", "tanh", "sigmoid", "exp"):
        f = FUNCTIONS[name]
        for apart in (1e-6, 1e-3, 0.09, 0.11, 3.0):
            slope = rules.elementwise_rule(
                f, clearhead.backward_rules.secants.SECANTS[name], z, z - apart, torch.ones_like(z)
            )
            wide, other = z.double(), (z - apart).double()
            exact = (f(wide) - f(other)) / (wide - other)
            assert replica_comparison.gap(slope.double(), exact) < 2e-6, (name, apart)


# What cannot be told is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.sort(-1).values, "operator torch.Tensor.sort has no rule in DeepLIFT"),
        (lambda x: x.erfinv_() if x.is_leaf else x.clone().erfinv_(), "operator torch.Tensor.erfinv_ has no rule"),
        (lambda x: x * (x > 0), "depends on the input without a gradient"),
        (lambda x: x * x.detach(), "depends on the input without a gradient"),
        (lambda x: x[..., x[0, 0].argmax()], "depends on the input without a gradient"),
        (lambda x: x.exp() if x.sum() > 0 else x.tanh(), "runs other operations for the reference"),
        (lambda x: F.dropout(x, 0.5, training=True), "dropout is active"),
        (lambda x: torch.norm(x, p=1, dim=-1), "norm of order 1 has no rule"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(function: Callable[[Tensor], Tensor], said: str) -> None:
    x = two_sides()[0].abs() + 0.1
    with pytest.raises(MissingRuleError, match=re.escape(said)):
        multipliers(lambda part: function(part.clone()), x, -x.flip(-1))


def test_a_model_without_a_rule_is_refused_before_anything_is_computed() -> None:
    ex = explainer("mixtral")
    with pytest.raises(
        clearhead.UnsupportedError, match=r"deeplift cannot explain .*: in MixtralForCausalLM, .*topk has no rule"
    ):
        ex.explain("I like", "deeplift", answer=" it")
    why = {line.name: line.why_not for line in ex.methods()}
    assert "topk" in why["deeplift"] and "topk" in why["deeplift-shap"]
    assert not why["saliency"]


def test_a_derivative_of_the_model_s_own_is_refused() -> None:
    """No mode sees BLOOM's GELU, and its derivative is a plain one: scores would miss half of the target."""
    with pytest.raises(clearhead.UnsupportedError, match="GeLUFunction is a function with a derivative of its own"):
        explainer("bloom").explain("I like", "deeplift", answer=" it")


class Compiled(nn.Module):
    """An activation that no mode sees inside of."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch has other compilers by now
            self.function = torch.jit.trace(lambda x: torch.exp(x) * 3, torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_what_no_mode_sees_is_noticed_by_what_the_scores_miss() -> None:
    model, tokenizer = models.text_model("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = Compiled()
    with pytest.raises(clearhead.UnsupportedError, match=r"deeplift cannot explain .*scores miss .* no rule reaches"):
        clearhead.load(model, tokenizer).explain("I like the movie", "deeplift")


# The method -----------------------------------------------------------------------------------------------------------


def test_equals_its_replica() -> None:
    ex = near_bert()
    for target in (None, 1):
        for e, text in zip(ex.explain(models.TEXTS, "deeplift", target=target), models.TEXTS, strict=True):
            expected = replica.scores(ex.adapter.model, *vectors(ex, text), e.target["index"])
            assert replica_comparison.gap(e.scores, expected) < 1e-10


@pytest.mark.parametrize(("steady", "far"), [(True, replica.FAR), (False, math.inf)], ids=["steady", "plain"])
def test_equals_its_replica_where_sides_are_far_apart(steady: bool, far: float) -> None:
    """On the BERT of the authors' numbers, whose weights are spread out."""
    ex, given = parity.explainer("bert"), parity.bert_inputs("case0")
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x = table[given["input_ids"][0][given["attention_mask"][0] > 0]]
    for method in ("deeplift", "deeplift-shap"):
        option = {"baseline": "zero"} if method == "deeplift" else {"baselines": ("zero",)}
        e = ex.explain(given, Method(method, steady=steady, **option))
        expected = replica.scores(ex.adapter.model, x, np.zeros_like(x), e.target["index"], far)
        assert replica_comparison.gap(e.scores, expected) < 1e-8


def test_steadied_scores_are_others() -> None:
    """In one request: each has its own rules."""
    ex, given = parity.explainer("bert"), parity.bert_inputs("case0")
    methods = [Method("deeplift", baseline="zero", steady=steady) for steady in (True, False)]
    steady, plain = (e.scores for e in ex.explain(given, methods).values())
    assert replica_comparison.gap(steady, plain) > 1e-2
    assert replica_comparison.gap(plain, ex.explain(given, methods[1]).scores) < 1e-12


def test_captum_has_nothing_to_steady() -> None:
    with pytest.raises(clearhead.InputError, match="steady=False selects clearhead's closed forms"):
        near_bert().explain(models.TEXTS[0], Method("deeplift", steady=False), profile="captum")


def test_the_base_value_is_what_the_model_says_of_the_baseline() -> None:
    ex = near_bert()
    e = ex.explain(models.TEXTS[0], "deeplift")
    _, x0 = vectors(ex, models.TEXTS[0])
    with torch.no_grad():
        said = ex.adapter.model(inputs_embeds=torch.tensor(x0[None])).logits[0, e.target["index"]]
    assert abs(e.base_value - float(said)) < 1e-12


def explained(ex: clearhead.Explainer, layout: str, method: Any, **how: Any) -> Any:
    if "/" in layout:
        return ex.explain(models.inputs(layout)[1], method, **how)
    return ex.explain("She hates the book", method, clearhead.GeneratedToken(1), answer=" it is", **how)


@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_complete(layout: str, dtype: torch.dtype) -> None:
    for method in ("deeplift", "deeplift-shap"):
        e = explained(explainer(layout, dtype), layout, method)
        gained = e.target["value"] - e.base_value
        assert abs(gained) > 0.1, "there is nothing to explain"
        assert abs(float(e.scores.sum()) - gained) < WITHIN[dtype] * abs(gained)
        assert e.certificate["checks"]["completeness_gap"] * np.abs(e.scores).max() < WITHIN[dtype] * abs(gained)
        assert np.abs(e.scores).max() < 10 * abs(gained), "scores that cancel are no explanation"


OTHERS: dict[str, Callable[[], clearhead.Explainer]] = {
    "two towers": lambda: dual_models.explainer("clip"),
    "encoder and decoder": lambda: encoder_decoders.explainer("t5"),
    "a detector": lambda: detectors.explainer("detr"),
    "a picture among words": lambda: vision_language_models.explainer("qwen2"),
    "a choice between texts": lambda: token_heads.explainer("bert", "ForMultipleChoice"),
    "sounds": lambda: sounds.explainer("wav2vec2"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_complete_over_all_streams(kind: str) -> None:
    if kind == "encoder and decoder":
        models.skip_if_not_yet("t5")
    ex = OTHERS[kind]()
    e = ex.explain(ex.adapter.make_example_input(), "deeplift")
    parts = list(e) if isinstance(e, clearhead.MultiStreamExplanation) else [e]
    value, base = parts[0].target["value"], parts[0].base_value
    missed = parts[0].certificate["checks"]["completeness_gap"]
    assert missed < 1e-6 and sum(np.abs(part.scores).sum() for part in parts) > 1e-3
    if base is not None:  # of one target alone
        assert abs(base + sum(part.scores.sum() for part in parts) - value) < 1e-6


@pytest.mark.parametrize("scale", ["probability", "log-odds"])
def test_complete_on_every_scale(scale: str) -> None:
    e = explained(explainer("bert/classify"), "bert/classify", "deeplift", scale=scale)
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12
    assert np.abs(e.scores).max() > 1e-3


@pytest.mark.parametrize("baseline", ["zero", "mask"])
def test_baselines_by_name(baseline: str) -> None:
    ex = explainer("bert/classify")
    e, usual = (ex.explain(models.TEXTS[0], Method("deeplift", baseline=name)) for name in (baseline, None))
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12
    assert replica_comparison.gap(e.scores, usual.scores) > 1e-3


def test_all_words_of_an_answer_at_once() -> None:
    ex = explainer("gpt2")
    whole = ex.explain("She hates the book", "deeplift", answer=" it is")
    for step, row in enumerate(whole.matrix):
        alone = ex.explain("She hates the book", "deeplift", clearhead.GeneratedToken(step), answer=" it is")
        assert replica_comparison.gap(row[: len(alone.scores)], alone.scores) < 1e-10


# captum ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.ELU])
def test_equals_captum_where_captum_is_right(activation: type[nn.Module]) -> None:
    """A plain chain of linear layers and activation modules."""
    from captum.attr import DeepLift

    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1)).double()
    x, x0 = two_sides(2.0, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = DeepLift(chain).attribute(x, x0, target=0)
    function = lambda part: chain.requires_grad_(False)(part)  # noqa: E731
    watched = InputTraceMode()
    with watched:
        function(x.clone().requires_grad_())
    leaf = x0.clone().requires_grad_()
    with DeepLiftMode(watched):
        out = function(leaf)
    found = (x - x0) * torch.autograd.grad(out.sum(), leaf)[0]
    assert replica_comparison.gap(found, expected.detach()) < 1e-10


class Taking(nn.Module):
    """A classifier as a function of its words' vectors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.model(inputs_embeds=embeddings).logits


def test_the_profile_is_captum_s_own_result_and_warns_of_its_gap() -> None:
    from captum.attr import DeepLift

    ex, text = near_bert(), models.TEXTS[0]
    with pytest.warns(UserWarning, match=r"captum's deeplift .* miss (\S+) of (\S+)") as told:
        e = ex.explain(text, "deeplift", profile="captum")
    x, x0 = (torch.tensor(part[None]) for part in vectors(ex, text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = DeepLift(Taking(ex.adapter.model)).attribute(x, x0, target=e.target["index"])
    assert replica_comparison.gap(e.scores, expected.sum(-1)[0].detach()) < 1e-9
    gap = abs(e.target["value"] - e.base_value - e.scores.sum())
    assert abs(e.certificate["checks"]["completeness_gap"] * np.abs(e.scores).max() - gap) < 1e-12
    assert gap > 0.01 * abs(e.target["value"] - e.base_value), "captum is complete after all"
    assert f"{gap:.2g}" in str(told[0].message)
    assert replica_comparison.gap(e.scores, ex.explain(text, "deeplift").scores) > 1e-3


def test_the_profile_leaves_the_model_as_it_was() -> None:
    ex = near_bert()
    before = {name: set(vars(module)) for name, module in ex.adapter.model.named_modules()}
    with pytest.warns(UserWarning, match="captum's deeplift"):
        batch = ex.explain(models.TEXTS, "deeplift", profile="captum")
    assert before == {name: set(vars(module)) for name, module in ex.adapter.model.named_modules()}
    assert not any(module._forward_hooks or module._backward_hooks for module in ex.adapter.model.modules())
    for e, text in zip(batch, models.TEXTS, strict=True):
        with pytest.warns(UserWarning, match="captum's deeplift"):
            alone = ex.explain(text, "deeplift", profile="captum")
        assert replica_comparison.gap(alone.scores, e.scores) < 1e-9
