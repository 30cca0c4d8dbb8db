"""Tiny networks whose correct scores follow from the maths: interaction, cancellation, conflict, absent features.

The idea is that of XAI-Units (Lee et al. 2025, XAI-Units: Benchmarking explainability methods with unit tests): set the
weights of a network by hand so that one known phenomenon decides its output, and derive what each class of method must
say. Here each feature is a unit: a patch of one pixel, or a vector of size one. An attention layer whose weights are
zero comes first and adds nothing, because clearhead explains models with attention.

The reference x′ is 0 (absent features are 0), f is the explained logit, and v(S) = f with the features of S present.

- Saliency is |∂f/∂x_i|, input × gradient x_i ∂f/∂x_i.
- The complete methods integrate along αx (integrated gradients, expected gradients) or use multipliers Δout/Δin
  (DeepLIFT). For one layer of ReLUs on a straight line both are equal: with z(α) linear in α, the mean of ReLU′(z(α))
  over the line is (ReLU(z(1)) − ReLU(z(0))) / (z(1) − z(0)). For a product of two inputs both give half to each:
  ∫ α b da = ab/2, and Δ(uv) = Δu (v + v′)/2 + Δv (u + u′)/2.
- For two players the Shapley value is φ₁ = (v(1) − v(∅))/2 + (v(12) − v(2))/2.
- Occlusion is v(12) − v(12 without i).
- AttnLRP passes relevance through a ReLU unchanged and gives half of a product to each factor: it is input × gradient
  where there is no product.

Atoms at x = (a, b):

- `product`, f = ab, at (2, 3). Gradient (b, a) = (3, 2). Input × gradient is ab = 6 each, together twice f; complete
  methods and AttnLRP 3 each. v(1) = v(2) = 0: the Shapley values are 3 each. Removal of either factor loses all 6.
- `minimum`, f = b − ReLU(b − a), at (2, 3), f = 2. The gradient is (1, 0) at all points of the line, so every gradient
  and path method gives all 2 to the smaller feature. But v(1) = v(2) = 0: the game is symmetric, so the Shapley values
  are 1 each, and removal of either loses all 2.
- `or`, f = 1 − ReLU(1 − a − b), at (1, 1). Saturated: the gradient is 0. The ReLU falls from 1 to 0 while its input
  falls from 1 to −1: its multiplier is 1/2, and complete methods give 1/2 each. v(1) = v(2) = v(12) = 1: Shapley 1/2
  each. Removal of one loses nothing, because the other does its work.
- `exclusive or`, f = ReLU(a − b) + ReLU(b − a), at (1, 1), f = 0. Both ReLUs are off on the whole line: complete
  methods give 0. φ₁ = (1 − 0)/2 + (0 − 1)/2 = 0. Removal of either feature raises f to 1: −1 each.
- `cancellation`, f = ReLU(a) − ReLU(b), at (3, 3), f = 0. Additive, so every signed method gives 3 and −3: the features
  are used, although the output is that of no features. Sensitivity cannot have the sign: (1, 1).
- `inner cancellation`, f = ReLU(a + b), at (3, −2), f = 1. On for the whole line: gradient (1, 1), so complete methods
  give (3, −2). v(1) = 3, v(2) = 0: φ₁ = 3/2 + (1 − 0)/2 = 2, φ₂ = 0 + (1 − 3)/2 = −1. Removal: (1 − 0, 1 − 3).
- `conflict`, f = ReLU(a − 10 b), at (3, 1), f = 0. b switches a off. Off on the whole line: every gradient and path
  method gives 0 to both. v(1) = 3, v(2) = 0: φ = (3/2, −3/2). Removal of a changes nothing, that of b restores 3.
- `pertinent negative`, f = 2 ReLU(1 − a) + b, at (0, 3), f = 5. The absence of a adds 2. With x′ = 0 it is no change:
  (0, 3) by every method that compares with 0, and only the sensitivity, (2, 1), shows a. With x′ = mean = 1.5 the loss
  is 2 for a, 3 − 1.5 for b, and 3.5 for both: additive, so every method that masks with the mean gives (2, 1.5).

Left out are methods whose scores are random (gradient SHAP, SmoothGrad, LIME) or have no scale (`ensemble`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clearhead

Function = Callable[[Tensor], Tensor]
Features = tuple[float, ...]
relu = torch.relu


@dataclass(frozen=True)
class Atom:
    """A function of features, the features that are explained, and the scores by class of method."""

    function: Function
    features: Features
    saliency: Features
    input_x_gradient: Features
    complete: Features
    attn_lrp: Features
    shapley: Features
    occlusion: Features


ATOMS = {
    "product": Atom(lambda x: x[:, 0] * x[:, 1], (2, 3), (3, 2), (6, 6), (3, 3), (3, 3), (3, 3), (6, 6)),
    "minimum": Atom(
        lambda x: x[:, 1] - relu(x[:, 1] - x[:, 0]), (2, 3), (1, 0), (2, 0), (2, 0), (2, 0), (1, 1), (2, 2)
    ),
    "or": Atom(
        lambda x: 1 - relu(1 - x[:, 0] - x[:, 1]), (1, 1), (0, 0), (0, 0), (0.5, 0.5), (0, 0), (0.5, 0.5), (0, 0)
    ),
    "cancellation": Atom(
        lambda x: relu(x[:, 0]) - relu(x[:, 1]), (3, 3), (1, 1), (3, -3), (3, -3), (3, -3), (3, -3), (3, -3)
    ),
    "inner cancellation": Atom(
        lambda x: relu(x[:, 0] + x[:, 1]), (3, -2), (1, 1), (3, -2), (3, -2), (3, -2), (2, -1), (1, -2)
    ),
    "conflict": Atom(
        lambda x: relu(x[:, 0] - 10 * x[:, 1]), (3, 1), (0, 0), (0, 0), (0, 0), (0, 0), (1.5, -1.5), (0, -3)
    ),
    "exclusive or": Atom(
        lambda x: relu(x[:, 0] - x[:, 1]) + relu(x[:, 1] - x[:, 0]),
        (1, 1), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (-1, -1),
    ),
    "pertinent negative": Atom(
        lambda x: 2 * relu(1 - x[:, 0]) + x[:, 1], (0, 3), (2, 1), (0, 3), (0, 3), (0, 3), (0, 3), (0, 3)
    ),
}  # fmt: skip

#: Methods with zero as the reference, by class.
METHODS = {
    "saliency": [clearhead.Method("saliency")],
    "input_x_gradient": [clearhead.Method("input-x-gradient")],
    "complete": [
        clearhead.Method("integrated-gradients", baseline="zero"),
        clearhead.Method("deeplift", baseline="zero"),
        clearhead.Method("deeplift-shap", baselines="zero"),
    ],
    "attn_lrp": [clearhead.Method("attn-lrp")],
    "shapley": [
        clearhead.Method("shap", replacement="mean", unit="patch"),
        clearhead.Method("kernel-shap", replacement="mean", unit="patch"),
    ],
    "occlusion": [clearhead.Method("occlusion", replacement="mean", unit="patch")],
}
CASES = [
    pytest.param(atom, kind, method, id=f"{atom}-{method.name}")
    for atom in ATOMS
    for kind, methods in METHODS.items()
    for method in methods
]
GRADIENT_CASES = [case for case in CASES if case.values[1] not in ("shapley", "occlusion")]


class AtomModel(nn.Module):
    """Attention that adds nothing, and a function of the features as the second of two logits."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(1, 1, batch_first=True)
        for parameter in self.attention.parameters():
            nn.init.zeros_(parameter)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)[..., None]
        x = x + self.attention(x, x, x)[0]
        y = self.function(x[..., 0])
        return torch.stack([torch.zeros_like(y), y], -1)


@cache
def load_patch_model(function: Function, num_pixels: int) -> clearhead.Explainer:
    """Load an atom whose features are patches of one pixel."""
    reader = clearhead.ImageReader(patch_size=1, image_size=(1, num_pixels), channels=1, labels=["other", "atom"])
    return clearhead.load(AtomModel(function).double().eval(), reader)


@cache
def load_vector_model(function: Function) -> clearhead.Explainer:
    """Load an atom whose features are a sequence of vectors of size one."""
    return clearhead.load(
        AtomModel(function).double().eval(), clearhead.TokenReader(vector_size=1, labels=["other", "atom"])
    )


def explain_patches(function: Function, features: Sequence[float], method: clearhead.Method) -> clearhead.Explanation:
    """Explain an image whose mean is zero: the features, and a pixel that the function does not read."""
    pixels = torch.tensor([*features, -sum(features)], dtype=torch.float64)[None, None]
    return load_patch_model(function, pixels.numel()).explain(image=pixels, method=method, target="atom")


@pytest.mark.parametrize(("atom", "kind", "method"), CASES)
def test_patches_get_the_derived_scores(atom: str, kind: str, method: clearhead.Method) -> None:
    e = explain_patches(ATOMS[atom].function, ATOMS[atom].features, method)
    np.testing.assert_allclose(e.scores, (*getattr(ATOMS[atom], kind), 0), atol=1e-9)


@pytest.mark.parametrize(("atom", "kind", "method"), GRADIENT_CASES)
def test_vectors_get_the_derived_scores(atom: str, kind: str, method: clearhead.Method) -> None:
    vectors = torch.tensor(ATOMS[atom].features, dtype=torch.float64)[:, None]
    e = load_vector_model(ATOMS[atom].function).explain(vectors, method=method, target="atom")
    np.testing.assert_allclose(e.scores, getattr(ATOMS[atom], kind), atol=1e-9)


@pytest.mark.parametrize("atom", ATOMS)
@pytest.mark.parametrize("method", METHODS["complete"] + METHODS["shapley"], ids=lambda method: method.name)
def test_scores_add_up_to_the_change_from_the_reference(atom: str, method: clearhead.Method) -> None:
    """Σ = f(x) − f(0), at inputs where kinks lie anywhere on the line.

    A quadrature misses a kink by at most its largest weight, π/100 for 50 points, times the jump of Σ x_i ∂f/∂x_i. The
    kinks that do not lie at 0 are those of `or`, |a + b| ≤ 4, and of `pertinent negative`, |2a| ≤ 4.
    """
    function = ATOMS[atom].function
    for features in np.random.default_rng(0).uniform(-2, 2, size=(5, 2)):
        e = explain_patches(function, features.tolist(), method)
        change = float((function(torch.tensor(features)[None]) - function(torch.zeros(1, 2, dtype=torch.float64)))[0])
        tolerance = 4 * np.pi / 100 if method.name == "integrated-gradients" else 1e-9
        assert abs(e.scores.sum() - change) <= tolerance


@pytest.mark.parametrize("kind", METHODS)
def test_cancelling_features_differ_only_in_sign(kind: str) -> None:
    """In ReLU(a) − ReLU(b) + c at (3, 3, 0), a and b cancel. Contributions sum to zero, sensitivities do not.

    c is absent: it contributes nothing, but the output responds to it as much as to a.
    """
    expected = (1, 1, 1, 0) if kind == "saliency" else (3, -3, 0, 0)
    for method in METHODS[kind]:
        e = explain_patches(_cancel_with_absent_feature, (3.0, 3.0, 0.0), method)
        np.testing.assert_allclose(e.scores, expected, atol=1e-9, err_msg=method.name)


def _cancel_with_absent_feature(x: Tensor) -> Tensor:
    return relu(x[:, 0]) - relu(x[:, 1]) + x[:, 2]


def test_product_of_three_is_shared_by_the_rule_of_each_method() -> None:
    """(ab)c at (1, 2, 4), f = 8: a third each where only the function counts, half to c where operations count.

    Integrated gradients: ∫ α² bc a dα = abc/3. Shapley values of a game that needs all three players: a third each.
    DeepLIFT and AttnLRP give half to c, and half of the rest to a and b each: they are not implementation invariant.
    `shap` has Owen values: neighbouring players are a group. The groups {a, b} and {c, unread pixel} get half each, and
    {a, b} divides its half, for both ways to write the product.
    """
    features = (1.0, 2.0, 4.0)
    by_function = [METHODS["complete"][0], clearhead.Method("kernel-shap", replacement="mean", unit="patch")]
    by_operation = [*METHODS["complete"][1:], *METHODS["attn_lrp"]]
    for method in by_function:
        scores = explain_patches(_multiply_first_two_first, features, method).scores
        np.testing.assert_allclose(scores, [8 / 3, 8 / 3, 8 / 3, 0], atol=1e-9, err_msg=method.name)
        other = explain_patches(_multiply_last_two_first, features, method).scores
        np.testing.assert_allclose(other, scores, atol=1e-9, err_msg=method.name)
    for function in (_multiply_first_two_first, _multiply_last_two_first):
        scores = explain_patches(function, features, METHODS["shapley"][0]).scores
        np.testing.assert_allclose(scores, [2, 2, 4, 0], atol=1e-9)
    for method in by_operation:
        scores = explain_patches(_multiply_first_two_first, features, method).scores
        np.testing.assert_allclose(scores, [2, 2, 4, 0], atol=1e-9, err_msg=method.name)
        other = explain_patches(_multiply_last_two_first, features, method).scores
        np.testing.assert_allclose(other, [4, 2, 2, 0], atol=1e-9, err_msg=method.name)


def _multiply_first_two_first(x: Tensor) -> Tensor:
    return (x[:, 0] * x[:, 1]) * x[:, 2]


def _multiply_last_two_first(x: Tensor) -> Tensor:
    return x[:, 0] * (x[:, 1] * x[:, 2])


@pytest.mark.parametrize(
    "method",
    [
        clearhead.Method("shap", replacement="mean", unit="patch"),
        clearhead.Method("kernel-shap", replacement="mean", unit="patch"),
        clearhead.Method("occlusion", replacement="mean", unit="patch"),
    ],
    ids=lambda method: method.name,
)
def test_pertinent_negative_has_a_score_relative_to_the_mean(method: clearhead.Method) -> None:
    atom = ATOMS["pertinent negative"]
    pixels = torch.tensor(atom.features, dtype=torch.float64)[None, None]  # no further pixel: the mean is 1.5
    e = load_patch_model(atom.function, 2).explain(image=pixels, method=method, target="atom")
    np.testing.assert_allclose(e.scores, [2, 1.5], atol=1e-9)
