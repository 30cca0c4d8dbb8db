"""Diagnostic: does a classifier without context do better when it is told where to look (Wiegreffe & Pinter, 2019)?

    z_t = tanh(W E[x_t] + b),   ŷ = softmax(U Σ_t w_t z_t + c)

on the model's static embeddings E, with no positions and no context. The weights w are frozen and come from a guide:
uniform, the model's own attention, an adversary's, or the scores of any method of the library (absolute, summing to
one); "own" are learned by the classifier itself. Special tokens get none.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.adapters.base import Sample
from clearhead.errors import InputError, Refusal, unknown
from clearhead.methods.base import REGISTRY
from clearhead.probes.adversarial_training import misled
from clearhead.probes.base import Scope
from clearhead.probes.fine_tuning import Bar, Lessons, Pupil, Training, seeded
from clearhead.probes.probe_result import Finding, ProbeResult
from clearhead.stats import interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Guides that are no methods of the library.
GUIDES = {
    "uniform": "every unit counts the same",
    "own": "learned by the classifier itself",
    "base": "the model's attention in the row that is read, mean over heads",
    "adversary": "the attention of a model that was trained to answer the same and attend elsewhere",
}
SAYS = (
    "A classifier that sees words without their context was told how much each counts. Where a guide makes it better "
    "than uniform weights and than its own, the guide knows which words carry the task. That shows information in the "
    "weights, not that the model's answer was made from them: a guide may be right about the task and wrong about the "
    "model. A guide that helps no more than uniform weights may still be faithful to a model that works by context."
)


class Bag(nn.Module):
    """Words without context, weighed by a guide or, without one, by attention of its own."""

    def __init__(self, table: nn.Module, wide: int, classes: int, width: int, learns: bool) -> None:
        super().__init__()
        self.table = [table]  # not a part that is trained
        self.word, self.out = nn.Linear(wide, width), nn.Linear(width, classes)
        self.query = nn.Linear(width, 1, bias=False) if learns else None

    def forward(
        self, tokens: Int[Tensor, "batch unit"], weights: Float[Tensor, "batch unit"]
    ) -> Float[Tensor, "batch label"]:
        with torch.no_grad():
            vectors = self.table[0](tokens).float()
        z = torch.tanh(self.word(vectors))
        if self.query is not None:
            weights = self.query(z).squeeze(-1).masked_fill(weights == 0, -torch.inf).softmax(-1)
        return self.out((weights[..., None] * z).sum(1))


def diagnostic(
    ex: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    guides: Sequence[str] = ("uniform", "own", "base"),
    width: int = 128,
    strength: float = 1e-2,
    steps: int = 500,
    batch: int = 32,
    rate: float = 3e-3,
    adversary_steps: int = 300,
    adversary_rate: float = 5e-5,
    held_out: float | int = 0.25,
    seed: int = 0,
    target: Any = None,
    folder: str | Path | None = None,
    progress: Bar | None = None,
) -> ProbeResult:
    """Train a classifier without context under each guide, and measure how often it is right.

    guides: "uniform", "own", "base", "adversary" (trained with strength λ), or any method of the library
    """
    for guide in guides:
        if guide not in GUIDES and guide not in REGISTRY:
            raise unknown("guide", guide, [*GUIDES, *sorted(REGISTRY)])
    if not guides:
        raise InputError(f"no guide was given: choose from {', '.join(GUIDES)} and the methods of the library")
    lessons = Lessons(ex, inputs, labels, held_out, target, seed)
    if lessons.probed.samples[0].inputs.get(_argument(lessons)) is None:
        raise Refusal(f"{lessons.probed.subject.name} reads no words, and the diagnostic is for words")
    kept = None if folder is None else Path(folder)
    training = Training(steps, batch, rate, kept, progress)
    misleading = Training(adversary_steps, batch, adversary_rate, kept, progress)
    raws = inputs if isinstance(inputs, list) else [inputs]
    weights = _weights(lessons, raws, guides, partial(misled, lessons, Scope("S1"), strength, misleading, seed))
    of = lessons.measured.tolist()
    classes = torch.unique(lessons.labels, return_inverse=True)[1]
    right: dict[str, Float[np.ndarray, input]] = {}
    scores: dict[str, float] = {}
    for guide in guides:
        bag = _trained(lessons, guide, weights[guide], classes, width, training, seed)
        said = _said(lessons, bag, weights[guide], of)
        right[guide] = (said == classes[of]).double().numpy()
        scores[guide] = macro_f1(said, classes[of])
    of_model = lessons.accuracy(lessons.base.answers(of)[0], of)
    shown = [Finding("the model", interval(of_model), "its own accuracy, for comparison")]
    meant = {guide: GUIDES.get(guide, "absolute scores of this method") for guide in guides}
    shown += [Finding(guide, interval(right[guide]), f"accuracy; {meant[guide]}") for guide in guides]
    names = [" / ".join(lessons.probed.units(lessons.probed.samples[i]).texts) for i in of]
    lines = [
        {"input": name, "the model": float(of_model[n]), **{g: float(right[g][n]) for g in guides}}
        for n, name in enumerate(names)
    ]
    settings: dict[str, Any] = {
        "width": width,
        "steps": steps,
        "batch": batch,
        "rate": rate,
        "learned from": len(lessons.learned),
    }
    settings |= {"labels": "given" if labels is not None else "its own answers"}
    return ProbeResult("diagnostic", lessons.probed.subject.name, settings, lines, shown, SAYS, {"macro F1": scores})


def _argument(lessons: Lessons) -> str:
    return getattr(lessons.probed.subject, "argument", "input_ids")


def _weights(
    lessons: Lessons, raws: Sequence[Any], guides: Sequence[str], misleading: Any
) -> dict[str, list[Float[Tensor, "unit"]]]:
    """What each guide gives the units of each input."""
    probed, every = lessons.probed, range(len(lessons.probed.samples))
    specials = [torch.tensor(probed.units(sample).special) for sample in probed.samples]
    methods = [guide for guide in guides if guide not in GUIDES]
    found: dict[str, list[Tensor]] = {guide: [torch.ones(len(one)) for one in specials] for guide in ("uniform", "own")}
    pupils: dict[str, Any] = {"base": lambda: lessons.base, "adversary": misleading}
    for guide in set(guides) & pupils.keys():
        pupil: Pupil = pupils[guide]()
        found[guide] = [one[0, :, 0].mean(0).cpu() for one in pupil.answers(every, Scope("S1"))[1]]
    if methods:
        explained = probed.ex.explain(list(raws), method=methods, target=probed.target.wanted, batch_size=32)
        for method in methods:
            found[method] = [torch.from_numpy(np.abs(one.scores)).float() for one in explained[method]]
    return {guide: [_shares(*pair) for pair in zip(found[guide], specials, strict=True)] for guide in guides}


def _shares(scores: Float[Tensor, "unit"], special: Tensor) -> Float[Tensor, "unit"]:
    """Without special tokens, summing to one; where a guide says nothing at all, every unit counts the same."""
    kept = scores.nan_to_num().float().masked_fill(special, 0)
    kept = kept if kept.sum() > 0 else (~special).float()
    return kept / kept.sum().clamp(min=1e-12)


def _padded(lessons: Lessons, weights: Sequence[Tensor], of: Sequence[int]) -> tuple[Tensor, Tensor]:
    samples: list[Sample] = [lessons.probed.samples[i] for i in of]
    rows = [sample.inputs[_argument(lessons)] for sample in samples]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    device = lessons.probed.subject.device
    return tokens.to(device), nn.utils.rnn.pad_sequence([weights[i] for i in of], batch_first=True).to(device)


def _trained(
    lessons: Lessons, guide: str, weights: Sequence[Tensor], classes: Tensor, width: int, training: Training, seed: int
) -> Bag:
    table, device = lessons.probed.recorder.lookups()[0], lessons.probed.subject.device
    (wide,) = table(torch.zeros(1, dtype=torch.long, device=device)).shape[1:]
    with seeded(seed):
        bag = Bag(table, wide, int(classes.max()) + 1, width, learns=guide == "own").to(device)

    def loss_of(step: int) -> Tensor:
        chosen = lessons.batch(step, training.batch, seed)
        return nn.functional.cross_entropy(bag(*_padded(lessons, weights, chosen)), classes[chosen].to(device))

    digest = float(sum(float((one * torch.arange(1, len(one) + 1)).sum()) for one in weights))
    facts = {**lessons.facts, "guide": guide, "weights": round(digest, 4), "width": width}
    training.run(f"guided by {guide}", bag, loss_of, seed, facts)
    return bag


def _said(lessons: Lessons, bag: Bag, weights: Sequence[Tensor], of: Sequence[int]) -> Int[Tensor, "input"]:
    with torch.no_grad():
        parts = [list(of)[start : start + 256] for start in range(0, len(of), 256)]
        return torch.cat([bag(*_padded(lessons, weights, part)).argmax(-1).cpu() for part in parts])


def macro_f1(said: Int[Tensor, "input"], true: Int[Tensor, "input"]) -> float:
    """The mean of the F1 of every class that is there.

    >>> macro_f1(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    0.6666666666666666
    """
    each = []
    for label in torch.unique(true):
        hits = float(((said == label) & (true == label)).sum())
        named = float((said == label).sum() + (true == label).sum())
        each.append(2 * hits / named)
    return sum(each) / len(each)
