"""Seeds: the same training from other seeds, and how far its attention comes out apart (Wiegreffe & Pinter, 2019).

    per input: median over seeds of JSD(A of the model, A of the seed's model)

It sets the scale for "different": an adversary's attention that lies no farther than another seed's shows nothing.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from clearhead.errors import InputError
from clearhead.probes.base import scope_of
from clearhead.probes.fine_tuning import Bar, Lessons, Training, apart, moved, taught
from clearhead.probes.probe_result import ProbeResult, findings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clearhead.explainer import Explainer

MEANINGS = {
    "median JSD": "median over seeds, how far their attention lies from the model's, mean over heads: 0 to 0.693",
    "median JSD of the mean head": "the same of the mean over heads, which can cancel out",
    "median TVD": "how far their answers lie from the model's",
    "largest weight": "of the rows in reach, mean over heads",
    "accuracy": "share of inputs that the model gets right",
    "accuracy of seeds": "the same of the models from other seeds, mean over them",
}
SAYS = (
    "Copies of the model were trained from other seeds on the same inputs. Where their answers agree and their "
    "attention does not, attention depends on the seed more than on the task, and a single model's map is one of "
    "several that training could have given. Where attention agrees, too, the task and the start fix it, which is not "
    "yet to say that it explains the answer: seeds share layers that were not drawn anew. Other attention by an "
    "adversary must lie farther than this to count."
)


def seeds(
    ex: "Explainer",
    inputs: Any,
    labels: "Sequence[str | int] | None" = None,
    *,
    seeds: int = 5,
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
    """Train copies of the model from several seeds, and measure how far their attention lies from the model's.

    labels: one for each input; without them the model's own answers are learned
    fresh: how many of the last layers start anew, beside what comes after them; "all" for the whole model
    folder: where runs are kept, so that they can be resumed
    """
    if seeds < 1:
        raise InputError(f"seeds={seeds}: it must be at least 1")
    lessons, reach = Lessons(ex, inputs, labels, held_out, target, seed), scope_of(scope)
    training = Training(steps, batch, rate, None if folder is None else Path(folder), progress)
    of = lessons.measured.tolist()
    clean, own = lessons.base.answers(of, reach)
    far, far_of_mean, shifts, right, table = [], [], [], [], []
    for number in range(seed + 1, seed + 1 + seeds):
        answers, maps = taught(lessons, f"seed {number}", training, number, fresh).answers(of, reach)
        by_head, of_mean = apart(maps, own)
        far.append(by_head)
        far_of_mean.append(of_mean)
        shifts.append(moved(answers, clean))
        right.append(lessons.accuracy(answers, of))
        means = {"JSD": by_head.mean(), "TVD": shifts[-1].mean(), "accuracy": right[-1].mean()}
        table.append({"seed": number, **{name: float(mean) for name, mean in means.items()}})
    correct = lessons.accuracy(clean, of)
    units = [lessons.probed.units(lessons.probed.samples[i]) for i in of]
    lines = [
        {
            "input": " / ".join(units[n].texts),
            "prediction": lessons.probed.label(clean[n]),
            "median JSD": float(np.median(far, axis=0)[n]),
            "median JSD of the mean head": float(np.median(far_of_mean, axis=0)[n]),
            "median TVD": float(np.median(shifts, axis=0)[n]),
            "largest weight": float(own[n].mean(1).amax(-1).mean()),
            "accuracy": float(correct[n]),
            "accuracy of seeds": float(np.mean(right, axis=0)[n]),
        }
        for n in range(len(of))
    ]
    settings = {"scope": str(reach), "seeds": seeds, "fresh": fresh, "steps": steps, "batch": batch, "rate": rate}
    settings |= {"learned from": len(lessons.learned), "labels": "given" if labels is not None else "its own answers"}
    shown = findings(lines, MEANINGS)
    return ProbeResult("seeds", lessons.probed.subject.name, settings, lines, shown, SAYS, {"seeds": table})
