"""Frontier: models trained to answer as this one does while attending elsewhere (Wiegreffe & Pinter, 2019).

    loss = mean TVD(ŷ_a, ŷ_b) − λ · mean KL(A_a ‖ A_b)

starting from the model's own weights, all parameters trained. Each λ gives a point: how far answers moved (TVD) and how
far attention did (JSD). λ = 0 gives the model back; seeds and uniform attention are points of reference.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.probes.base import Scope, scope_of
from clearhead.probes.divergences import total_variation
from clearhead.probes.fine_tuning import Bar, Lessons, Pupil, Training, apart, moved, taught
from clearhead.probes.probe_result import Finding, ProbeResult
from clearhead.probes.uniform_attention import levelled
from clearhead.stats import interval

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

STRENGTHS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
#: What stands in for nothing inside a logarithm.
TINY = 1e-10
SAYS = (
    "Whole models were trained to give the same answers with other attention. A point far up and near the left edge "
    "is a model that answers as this one does and attends elsewhere: attention is then not the only one that goes "
    "with these answers. Points that only come up as answers move away say that attention is bound to them. Compare "
    "with the seeds: what lies below them is no farther than chance takes it. That another model can attend elsewhere "
    "says nothing about whether this one uses its own attention."
)


def frontier(
    ex: "Explainer",
    inputs: Any,
    labels: Sequence[str | int] | None = None,
    *,
    strengths: Sequence[float] = STRENGTHS,
    seeds: int = 2,
    fresh: int | str = 0,
    scope: str = "S1",
    steps: int = 300,
    batch: int = 32,
    rate: float = 5e-5,
    held_out: float | int = 0.25,
    seed: int = 0,
    target: Any = None,
    folder: str | Path | None = None,
    progress: Bar | None = None,
) -> ProbeResult:
    """Train adversaries of several strengths λ, and measure answers against attention.

    seeds: how many models from other seeds are put beside them, with `fresh` layers drawn anew
    scope: "S1", the row that is read, or "S4", all attention
    """
    if not strengths or any(strength < 0 for strength in strengths):
        raise InputError(f"strengths={list(strengths)}: give at least one, none below 0")
    if scope not in ("S1", "S2", "S4"):
        raise InputError(f"scope={scope!r}: adversaries are trained on S1, S2 or S4")
    lessons, reach = Lessons(ex, inputs, labels, held_out, target, seed), scope_of(scope)
    training = Training(steps, batch, rate, None if folder is None else Path(folder), progress)
    of = lessons.measured.tolist()
    clean, own = lessons.base.answers(of, reach)
    points: list[tuple[str, float | None, Tensor, list[Tensor]]] = []
    for strength in strengths:
        pupil = misled(lessons, reach, strength, training, seed)
        points.append((f"λ {strength:g}", strength, *pupil.answers(of, reach)))
    for number in range(seed + 1, seed + 1 + seeds):
        pupil = taught(lessons, f"seed {number}", training, number, fresh)
        points.append((f"seed {number}", None, *pupil.answers(of, reach)))
    for name, pupil in {"uniform": lessons.base, "uniform, trained": _level(lessons, reach, training, seed)}.items():
        points.append(
            (name, None, *pupil.answers(of, reach, lambda samples: [levelled(lessons.probed, reach, samples)]))
        )
    lines, shown = [], []
    for name, at, answers, maps in points:
        by_head, of_mean = apart(maps, own)
        each = {"TVD": moved(answers, clean), "JSD": by_head, "accuracy": lessons.accuracy(answers, of)}
        figures = {figure: float(values.mean()) for figure, values in each.items()}
        lines.append({"point": name, "strength": at, **figures, "JSD of the mean head": float(of_mean.mean())})
        shown += [Finding(f"{name}: {figure}", interval(values), _MEANT[figure]) for figure, values in each.items()]
    before = Finding("the model: accuracy", interval(lessons.accuracy(clean, of)), _MEANT["accuracy"])
    settings = {"scope": str(reach), "steps": steps, "batch": batch, "rate": rate, "learned from": len(lessons.learned)}
    settings |= {"fresh": fresh, "labels": "given" if labels is not None else "its own answers"}
    return ProbeResult("frontier", lessons.probed.subject.name, settings, lines, [before, *shown], SAYS)


_MEANT = {
    "TVD": "how far answers lie from the model's",
    "JSD": "how far attention lies from the model's, mean over heads",
    "accuracy": "share of inputs it gets right",
}


def misled(lessons: Lessons, scope: Scope, strength: float, training: Training, seed: int) -> Pupil:
    """A pupil that learned to answer as the model does and to attend elsewhere."""
    pupil = Pupil(lessons.probed).eval()  # without dropout: λ = 0 must give the model back

    def loss_of(step: int) -> Tensor:
        chosen = lessons.batch(step, training.batch, seed)
        samples = [lessons.probed.samples[i] for i in chosen]
        with torch.no_grad():
            clean, every = lessons.base.scores(samples)
            own = lessons.base.reach(every, samples, scope)
        scores, maps = pupil.scores(samples)
        away = total_variation(scores.softmax(-1), clean.softmax(-1)).mean()
        return away - strength * divergence(pupil.reach(maps, samples, scope), own, pupil.real(samples, scope))

    facts = {**lessons.facts, "scope": str(scope), "strength": strength}
    training.run(f"adversary {strength:g}", pupil.model, loss_of, seed, facts)
    return pupil


def divergence(
    one: Float[Tensor, "batch layer head row key"],
    other: Float[Tensor, "batch layer head row key"],
    real: Float[Tensor, "batch row"],
) -> Float[Tensor, ""]:
    """KL(one ‖ other), mean over inputs, layers, heads and the rows that are real, with slopes that stay finite."""
    gap = (one * (one.clamp(min=TINY).log() - other.clamp(min=TINY).log())).sum(-1)
    return (gap.mean((1, 2)) * real).sum(-1).mean()


def _level(lessons: Lessons, scope: Scope, training: Training, seed: int) -> Pupil:
    facts = {"uniform": str(scope)}
    return taught(
        lessons, "uniform", training, seed, None, lambda samples: [levelled(lessons.probed, scope, samples)], facts
    )
