"""DeepLIFT: its rules, its reference implementation, captum (where captum is complete), and completeness."""

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
from tests.adapters import test_audio as audio_models
from tests.adapters import test_decoder as decoders
from tests.adapters import test_detection as detection_models
from tests.adapters import test_encoder_decoder as encoder_decoders
from tests.adapters import test_token_heads as token_heads
from tests.methods import replica_comparison
from tests.methods import test_parity as parity
from tests.replicas import deeplift as replica

LAYOUTS = ("bert/classify", "vit/image", "gpt2", "llama")
#: The largest completeness gap, relative to the difference that scores sum to.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}


@cache
def explainer(layout: str, dtype: torch.dtype = torch.float64) -> clearhead.Explainer:
    if "/" in layout:
        return models.explainer(layout, dtype)
    return clearhead.load(decoders.made(layout, dtype), decoders.WORDS)


@cache
def load_bert_with_small_weights() -> Any:
    """Load a BERT whose input and baseline activations are near each other, so that the plain rules apply."""
    return clearhead.load(models.text_model("bert", initializer_range=0.12, num_hidden_layers=2))


def embed_with_baseline(ex: clearhead.Explainer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the embeddings of a text and of its default baseline: the mean embedding; special tokens are kept."""
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x = table[ex.adapter.processor(text)["input_ids"]]
    x0 = np.broadcast_to(table.mean(0), x.shape).copy()
    x0[[0, -1]] = x[[0, -1]]
    return x, x0


# Rules ----------------------------------------------------------------------------------------------------------------


def compute_multipliers(function: Callable[[Tensor], Tensor], x: Tensor, x0: Tensor) -> Tensor:
    """Return the multipliers of a weighted sum of the outputs of a function."""
    trace = InputTraceMode()
    start = x.clone().requires_grad_()
    with trace:
        function(start)
    leaf = x0.clone().requires_grad_()
    with DeepLiftMode(trace):
        out = function(leaf)
    mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * mix).sum(), leaf)[0]


def compute_relative_gap(function: Callable[[Tensor], Tensor], x: Tensor, x0: Tensor) -> float:
    """Return the relative difference between Σ m Δin and Δout."""
    mix = torch.linspace(-1, 1, function(x).numel(), dtype=x.dtype).reshape(function(x).shape)
    difference = ((function(x) - function(x0)) * mix).sum()
    return float((((x - x0) * compute_multipliers(function, x, x0)).sum() - difference).abs() / difference.abs())


def make_input_pair(scale: float = 1.0, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x, x0 = torch.randn(2, *(shape or (3, 4, 6)), generator=generator, dtype=torch.float64)
    return x * scale, x0


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "exp": torch.exp,
    "log": lambda x: (x.square() + 0.1).log(),
    "pow": lambda x: x**3 + (x**2 + 0.1) ** 0.5 + (x**2 + 0.2) ** -0.5 + (x**2 + 0.3) ** 1.7,
    "softmax": lambda x: x.softmax(-1),
    "log softmax": lambda x: x.log_softmax(1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: F.layer_norm(x, (6,), torch.arange(6.0).double(), torch.ones(6).double()),
    "rms norm": lambda x: F.rms_norm(x, (6,), eps=1e-6),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "group norm": lambda x: F.group_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "gate": lambda x: F.silu(x[..., :3]) * x[..., 3:],
    "glu": F.glu,
    "matmul": lambda x: x @ x.mT,
    "conv1d and linear": lambda x: F.conv1d(x, x[:2, :, :3]) + F.linear(x, x[0])[:, :2],
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "division": lambda x: x / (x.square().sum(-1, keepdim=True) + 0.1),
    "reciprocal": lambda x: 1 / (x.square() + 0.1),
    "max": lambda x: x.amax(-1) + x.max(1).values.sum(-1, keepdim=True),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 3, 2, 1)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None] * 2, x[None] * 3, is_causal=True)[0],
    "in-place": lambda x: F.relu((x * 2).mul_(x), inplace=True),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1),
}


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e-3], ids=["near", "far", "tiny"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_rule_is_complete(name: str, scale: float) -> None:
    assert compute_relative_gap(FUNCTIONS[name], *make_input_pair(scale)) < 1e-10


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rule_equals_gradient_for_equal_inputs(name: str) -> None:
    """Nearly equal inputs give nearly the gradient: no rule divides by a difference near zero."""
    x, _ = make_input_pair()
    leaf = x.clone().requires_grad_()
    out = FUNCTIONS[name](leaf)
    mix = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (gradient,) = torch.autograd.grad((out * mix).sum(), leaf)
    assert replica_comparison.gap(compute_multipliers(FUNCTIONS[name], x, x), gradient) < 1e-12
    assert replica_comparison.gap(compute_multipliers(FUNCTIONS[name], x + 1e-9, x), gradient) < 1e-6


def test_softmax_and_norm_multipliers_are_bounded_for_distant_inputs() -> None:
    """With the plain formula, multipliers of size e^40 would have to cancel."""
    z, z0 = torch.tensor([[40.0, 1.0, -3.0]]), torch.tensor([[0.5, -2.0, 1.0]])
    assert compute_relative_gap(lambda x: x.softmax(-1), z, z0) < 1e-5
    assert compute_multipliers(lambda x: x.softmax(-1), z, z0).abs().max() < 1
    x, tiny = torch.tensor([[3.0, 1.0, -1.0, 0.5]]), torch.full((1, 4), 1e-7)
    norm = lambda x: F.layer_norm(x, (4,), eps=1e-12)  # noqa: E731
    assert compute_relative_gap(norm, x, tiny) < 1e-5
    assert compute_multipliers(norm, x, tiny).abs().max() < 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_rule_of_a_small_vector_does_not_overflow_in_half_precision(dtype: torch.dtype, centred: bool) -> None:
    """The fourth power of the scale overflows in float16 from 16 on; initialised embeddings have scales of 30."""
    shape, (x, x0) = (6,), (0.03 * tensor for tensor in make_input_pair())

    def normalise(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape) if centred else F.rms_norm(x, shape, eps=1e-6)

    exact, half = compute_multipliers(normalise, x, x0), compute_multipliers(normalise, x.to(dtype), x0.to(dtype))
    assert replica_comparison.gap(half.double(), exact) < (0.01 if dtype == torch.float16 else 0.1)


def test_half_precision_scores_are_close_to_float64() -> None:
    """A BERT as transformers initialises it; on a GPU the weights stay in half precision."""
    model, tokenizer = models.text_model("bert", dtype=torch.float16, initializer_range=0.02)
    half, double = clearhead.load((model, tokenizer)), clearhead.load((deepcopy(model).double(), tokenizer))
    for method in ("deeplift", "deeplift-shap"):
        half_scores, double_scores = (ex.explain(models.TEXTS[1], method, target=1).scores for ex in (half, double))
        assert replica_comparison.gap(half_scores, double_scores) < 0.05


def test_elementwise_rules_keep_float32_precision() -> None:
    z = torch.linspace(-4, 4, 1001)
    for name in ("gelu", "silu", "tanh", "sigmoid", "exp"):
        f = FUNCTIONS[name]
        for distance in (1e-6, 1e-3, 0.09, 0.11, 3.0):
            slope = rules.elementwise_rule(
                f, clearhead.backward_rules.secants.SECANTS[name], z, z - distance, torch.ones_like(z)
            )
            z64, z0_64 = z.double(), (z - distance).double()
            exact = (f(z64) - f(z0_64)) / (z64 - z0_64)
            assert replica_comparison.gap(slope.double(), exact) < 2e-6, (name, distance)


# Rejected models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
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
def test_operation_without_rule_raises_missing_rule_error(function: Callable[[Tensor], Tensor], message: str) -> None:
    x = make_input_pair()[0].abs() + 0.1
    with pytest.raises(MissingRuleError, match=re.escape(message)):
        compute_multipliers(lambda z: function(z.clone()), x, -x.flip(-1))


def test_model_without_rule_is_rejected_and_listed_as_not_applicable() -> None:
    ex = explainer("mixtral")
    with pytest.raises(
        clearhead.UnsupportedError, match=r"deeplift cannot explain .*: in MixtralForCausalLM, .*topk has no rule"
    ):
        ex.explain("I like", "deeplift", answer=" it")
    reasons = {row.name: row.why_not for row in ex.methods()}
    assert "topk" in reasons["deeplift"] and "topk" in reasons["deeplift-shap"]
    assert not reasons["saliency"]


def test_custom_autograd_function_is_rejected() -> None:
    """A function mode does not trace BLOOM's GELU; with its plain derivative, scores would miss half of the target."""
    with pytest.raises(clearhead.UnsupportedError, match="GeLUFunction is a custom autograd function"):
        explainer("bloom").explain("I like", "deeplift", answer=" it")


class TracedActivation(nn.Module):
    """A traced activation, whose operations no torch function mode intercepts."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            self.function = torch.jit.trace(lambda x: torch.exp(x) * 3, torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_untraced_operation_is_detected_by_the_completeness_gap() -> None:
    model, tokenizer = models.text_model("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = TracedActivation()
    with pytest.raises(
        clearhead.UnsupportedError, match=r"deeplift cannot explain .*sum of the scores differs .* no rule applies"
    ):
        clearhead.load(model, tokenizer).explain("I like the movie", "deeplift")


# Scores ---------------------------------------------------------------------------------------------------------------


def test_equals_reference_implementation() -> None:
    ex = load_bert_with_small_weights()
    for target in (None, 1):
        for e, text in zip(ex.explain(models.TEXTS, "deeplift", target=target), models.TEXTS, strict=True):
            expected = replica.scores(ex.adapter.model, *embed_with_baseline(ex, text), e.target["index"])
            assert replica_comparison.gap(e.scores, expected) < 1e-10


@pytest.mark.parametrize(
    ("form", "threshold"), [("path", replica.FAR), ("stabilised", replica.FAR), ("closed", math.inf)]
)
def test_distant_inputs_equal_reference_implementation(form: str, threshold: float) -> None:
    """On the BERT of the parity fixtures, whose weights are large."""
    ex, inputs = parity.explainer("bert"), parity.bert_inputs("case0")
    table = ex.adapter.model.get_input_embeddings().weight.detach().numpy()
    x = table[inputs["input_ids"][0][inputs["attention_mask"][0] > 0]]
    for method in ("deeplift", "deeplift-shap"):
        options = {"baseline": "zero"} if method == "deeplift" else {"baselines": ("zero",)}
        e = ex.explain(inputs, Method(method, rules=form, **options))
        expected = replica.scores(ex.adapter.model, x, np.zeros_like(x), e.target["index"], threshold, form == "path")
        assert replica_comparison.gap(e.scores, expected) < 1e-8


def test_forms_of_rules_in_one_call_do_not_affect_each_other() -> None:
    ex, inputs = parity.explainer("bert"), parity.bert_inputs("case0")
    methods = [Method("deeplift", baseline="zero", rules=form) for form in ("path", "stabilised", "closed")]
    together = [e.scores for e in ex.explain(inputs, methods).values()]
    for i, method in enumerate(methods):
        assert replica_comparison.gap(together[i], ex.explain(inputs, method).scores) < 1e-12
        assert replica_comparison.gap(together[i], together[i - 1]) > 1e-2


def test_closed_rules_are_rejected_with_the_captum_profile() -> None:
    with pytest.raises(clearhead.InputError, match="rules='closed' selects clearhead's rules"):
        load_bert_with_small_weights().explain(models.TEXTS[0], Method("deeplift", rules="closed"), profile="captum")


def test_base_value_equals_the_model_output_for_the_baseline() -> None:
    ex = load_bert_with_small_weights()
    e = ex.explain(models.TEXTS[0], "deeplift")
    _, x0 = embed_with_baseline(ex, models.TEXTS[0])
    with torch.no_grad():
        logit = ex.adapter.model(inputs_embeds=torch.tensor(x0[None])).logits[0, e.target["index"]]
    assert abs(e.base_value - float(logit)) < 1e-12


def explain_layout(ex: clearhead.Explainer, layout: str, method: Any, **how: Any) -> Any:
    if "/" in layout:
        return ex.explain(models.inputs(layout)[1], method, **how)
    return ex.explain("She hates the book", method, clearhead.GeneratedToken(1), answer=" it is", **how)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_sum_to_the_target_minus_the_base_value(layout: str, dtype: torch.dtype) -> None:
    for method in ("deeplift", "deeplift-shap"):
        e = explain_layout(explainer(layout, dtype), layout, method)
        difference = e.target["value"] - e.base_value
        assert abs(difference) > 0.1, "there is nothing to explain"
        assert abs(float(e.scores.sum()) - difference) < TOLERANCES[dtype] * abs(difference)
        assert e.certificate["checks"]["completeness_gap"] * np.abs(e.scores).max() < TOLERANCES[dtype] * abs(
            difference
        )
        assert np.abs(e.scores).max() < 10 * abs(difference), "large scores cancel each other"


MODEL_KINDS: dict[str, Callable[[], clearhead.Explainer]] = {
    "dual encoder": lambda: dual_models.explainer("clip"),
    "encoder-decoder": lambda: encoder_decoders.explainer("t5"),
    "detector": lambda: detection_models.explainer("detr"),
    "image-text decoder": lambda: vision_language_models.explainer("qwen2"),
    "multiple choice": lambda: token_heads.explainer("bert", "ForMultipleChoice"),
    "audio": lambda: audio_models.explainer("wav2vec2"),
}


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_scores_are_complete_over_all_streams(kind: str) -> None:
    if kind == "encoder-decoder":
        models.skip_if_not_yet("t5")
    ex = MODEL_KINDS[kind]()
    e = ex.explain(ex.adapter.make_example_input(), "deeplift")
    explanations = list(e) if isinstance(e, clearhead.MultiStreamExplanation) else [e]
    value, base = explanations[0].target["value"], explanations[0].base_value
    gap = explanations[0].certificate["checks"]["completeness_gap"]
    assert gap < 1e-6 and sum(np.abs(explanation.scores).sum() for explanation in explanations) > 1e-3
    if base is not None:  # absent for several targets
        assert abs(base + sum(explanation.scores.sum() for explanation in explanations) - value) < 1e-6


@pytest.mark.parametrize("scale", ["probability", "log-odds"])
def test_scores_are_complete_on_probability_and_log_odds_scales(scale: str) -> None:
    e = explain_layout(explainer("bert/classify"), "bert/classify", "deeplift", scale=scale)
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12
    assert np.abs(e.scores).max() > 1e-3


@pytest.mark.parametrize("baseline", ["zero", "mask"])
def test_named_baselines_are_complete_and_change_scores(baseline: str) -> None:
    ex = explainer("bert/classify")
    e, default = (ex.explain(models.TEXTS[0], Method("deeplift", baseline=name)) for name in (baseline, None))
    assert abs(e.base_value + e.scores.sum() - e.target["value"]) < 1e-12
    assert replica_comparison.gap(e.scores, default.scores) > 1e-3


def test_continuation_steps_equal_single_steps() -> None:
    ex = explainer("gpt2")
    all_steps = ex.explain("She hates the book", "deeplift", answer=" it is")
    for step, row in enumerate(all_steps.matrix):
        single_step = ex.explain("She hates the book", "deeplift", clearhead.GeneratedToken(step), answer=" it is")
        assert replica_comparison.gap(row[: len(single_step.scores)], single_step.scores) < 1e-10


# captum ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.ELU])
def test_chain_of_linear_layers_and_activations_equals_captum(activation: type[nn.Module]) -> None:
    """Captum is complete on a chain of linear layers and activation modules."""
    from captum.attr import DeepLift

    torch.manual_seed(0)
    chain = nn.Sequential(nn.Linear(6, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1)).double()
    x, x0 = make_input_pair(2.0, 5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = DeepLift(chain).attribute(x, x0, target=0)
    function = lambda inputs: chain.requires_grad_(False)(inputs)  # noqa: E731
    trace = InputTraceMode()
    with trace:
        function(x.clone().requires_grad_())
    leaf = x0.clone().requires_grad_()
    with DeepLiftMode(trace):
        out = function(leaf)
    scores = (x - x0) * torch.autograd.grad(out.sum(), leaf)[0]
    assert replica_comparison.gap(scores, expected.detach()) < 1e-10


class EmbeddingClassifier(nn.Module):
    """A classifier as a function of its input embeddings."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.model(inputs_embeds=embeddings).logits


def test_captum_profile_equals_captum_and_warns_of_the_completeness_gap() -> None:
    from captum.attr import DeepLift

    ex, text = load_bert_with_small_weights(), models.TEXTS[0]
    message = r"captum's deeplift has no rule for .* differs from its expected value, (\S+), by (\S+);"
    with pytest.warns(UserWarning, match=message) as record:
        e = ex.explain(text, "deeplift", profile="captum")
    x, x0 = (torch.tensor(array[None]) for array in embed_with_baseline(ex, text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = DeepLift(EmbeddingClassifier(ex.adapter.model)).attribute(x, x0, target=e.target["index"])
    assert replica_comparison.gap(e.scores, expected.sum(-1)[0].detach()) < 1e-9
    gap = abs(e.target["value"] - e.base_value - e.scores.sum())
    assert abs(e.certificate["checks"]["completeness_gap"] * np.abs(e.scores).max() - gap) < 1e-12
    assert gap > 0.01 * abs(e.target["value"] - e.base_value), "captum's scores are complete on this model"
    assert f"{gap:.2g}" in str(record[0].message)
    assert replica_comparison.gap(e.scores, ex.explain(text, "deeplift").scores) > 1e-3


def test_captum_profile_leaves_the_model_unchanged() -> None:
    ex = load_bert_with_small_weights()
    before = {name: set(vars(module)) for name, module in ex.adapter.model.named_modules()}
    with pytest.warns(UserWarning, match="captum's deeplift"):
        batch = ex.explain(models.TEXTS, "deeplift", profile="captum")
    assert before == {name: set(vars(module)) for name, module in ex.adapter.model.named_modules()}
    assert not any(module._forward_hooks or module._backward_hooks for module in ex.adapter.model.modules())
    for e, text in zip(batch, models.TEXTS, strict=True):
        with pytest.warns(UserWarning, match="captum's deeplift"):
            single = ex.explain(text, "deeplift", profile="captum")
        assert replica_comparison.gap(single.scores, e.scores) < 1e-9
