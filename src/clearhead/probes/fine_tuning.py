"""What the probes that train share: inputs with labels, copies of the model that learn, and how far one has moved.

The model itself is never trained: a pupil is a copy of it. With a folder, each run is kept there under a name made from
all that decides it, so that a run that was cut goes on, and one that is there already is not made again.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.adapters.base import Sample
from clearhead.capture.layers import blocks_of
from clearhead.engine.batching import batches_of
from clearhead.errors import InputError, Refusal
from clearhead.interventions.attention_patch import Patch, learning
from clearhead.probes.base import Probed, Scope
from clearhead.probes.divergences import jensen_shannon, total_variation
from clearhead.training import Average, Clock, train

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: A bar: (what is being trained, share of it that is done).
Bar = Callable[[str, float], None]
#: How many inputs share a pass where nothing is learned.
INPUTS = 64


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from this seed inside the `with`; the caller's go on afterwards as if nothing had been drawn."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class Training:
    """How long and how fast: steps of so many inputs, the peak learning rate, and where runs are kept."""

    steps: int = 300
    batch: int = 32
    rate: float = 5e-5
    folder: Path | None = None
    bar: Bar | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.rate > 0:
            raise InputError(f"steps={self.steps}, batch={self.batch}, rate={self.rate}: all must be above 0")

    def run(
        self, name: str, model: nn.Module, loss_of: Callable[[int], Tensor], seed: int, facts: Mapping[str, Any]
    ) -> None:
        """Train the model; it is left with its averaged weights. `loss_of` is told the number of the step."""
        told = {**facts, "steps": self.steps, "batch": self.batch, "rate": self.rate, "seed": seed}
        digest = hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()
        path = None if self.folder is None else self.folder / f"{name.replace(' ', '-')}-{digest}.safetensors"
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimiser, clock = torch.optim.AdamW(learned, lr=self.rate, weight_decay=0.0), Clock(steps=self.steps)
        average = Average(model)

        def shown(clock: Clock) -> None:
            if self.bar is not None:
                self.bar(name, clock.fraction)

        with seeded(seed), torch.enable_grad():
            train(
                lambda: loss_of(clock.step),
                [optimiser],
                clock,
                average,
                warmup=0.1,
                clip=1.0,
                checkpoint=path,
                name=name,
                stored=None,
                progress=shown,
            )
        average.load(average.tensors)


class Lessons:
    """Inputs with labels, some to learn from, the others to measure on: a share of them, or so many of the last.

    Without labels, the model's own answers are the labels.
    """

    def __init__(
        self,
        ex: "Explainer",
        inputs: Any,
        labels: Sequence[str | int] | None,
        held_out: float | int,
        target: Any,
        seed: int,
    ) -> None:
        self.probed = Probed(ex, inputs, target)
        if self.probed.multi_label:
            raise Refusal("labels that do not exclude each other cannot be trained on by this probe")
        count = len(self.probed.samples)
        last = isinstance(held_out, int)
        measured = int(held_out) if last else round(held_out * count)
        if not 0 < measured < count:
            raise InputError(
                f"held_out={held_out} of {count} inputs leaves none to learn from or none to measure on: give more "
                "inputs, a share between 0 and 1, or how many of the last"
            )
        if labels is not None and len(labels) != count:
            raise InputError(f"{len(labels)} labels for {count} inputs: give one for each")
        self.base = Pupil(self.probed).eval()
        self.labels = self._own() if labels is None else self._named(labels)
        order = np.arange(count)[::-1] if last else np.random.default_rng(seed).permutation(count)
        self.measured, self.learned = np.sort(order[:measured]), np.sort(order[measured:])
        digest = hashlib.blake2b(digest_size=6)
        for sample in self.probed.samples:
            digest.update(str(sample.seed(0)).encode())
        for parameter in self.base.model.parameters():  # the same data and another model is another run
            digest.update(parameter.detach().double().sum().cpu().numpy().tobytes())
        self.facts = {
            "data": digest.hexdigest(),
            "labels": self.labels.tolist(),
            "held out": self.measured.tolist(),  # which ones: what was learned must not be measured in another run
            "target": str(self.probed.target),
        }

    def _own(self) -> Int[Tensor, "input"]:
        return self.base.answers(range(len(self.probed.samples)))[0].argmax(-1).cpu()

    def _named(self, labels: Sequence[str | int]) -> Int[Tensor, "input"]:
        return torch.tensor([self.probed.subject.label_index(label) for label in labels])

    def batch(self, step: int, size: int, seed: int) -> list[int]:
        """The inputs of one step: the data in a new order each time they are through."""
        size = min(size, len(self.learned))
        per = len(self.learned) // size
        order = np.random.default_rng((seed, step // per)).permutation(self.learned)
        return order[(step % per) * size :][:size].tolist()

    def accuracy(self, answers: Float[Tensor, "input label"], of: Sequence[int]) -> Float[np.ndarray, "input"]:
        """Whether the most likely class is the label, one by one."""
        return (answers.argmax(-1).cpu() == self.labels[list(of)]).double().numpy()


class Pupil:
    """A copy of the model that learns, and its passes."""

    def __init__(self, probed: Probed, fresh: int | str | None = None, seed: int = 0) -> None:
        self.probed, self.subject = probed, probed.subject
        self.model = copy.deepcopy(probed.subject.model).float()
        self.model.requires_grad_(True)
        if fresh is not None:
            with seeded(seed):
                renew(self.model, [place.module for place in probed.tested.places], fresh)

    def eval(self) -> "Pupil":
        self.model.eval()
        return self

    def train(self) -> "Pupil":
        self.model.train()
        return self

    def scores(self, samples: Sequence[Sample], patches: Sequence[Patch] = ()) -> tuple[Tensor, list[Tensor]]:
        """The scores of all classes, and the attention of every layer, in the graph."""
        batch = self.subject.collate(samples)
        with self.subject.scope():
            output, calls = learning(self.model, self.probed.tested, batch, patches)
        targets = [self.probed.aim(sample) for sample in samples]
        return self.subject.scores(output, samples, targets).float(), [call.attention for call in calls]

    def answers(
        self,
        of: Sequence[int],
        scope: Scope | None = None,
        patches: Callable[[Sequence[Sample]], list[Patch]] | None = None,
    ) -> tuple[Float[Tensor, "input label"], list[Float[Tensor, "layer head row key"]]]:
        """The probabilities of these inputs and, with a scope, what is in its reach of each."""
        samples = [self.probed.samples[i] for i in of]
        found: list[Tensor] = [torch.empty(0)] * len(samples)
        seen: list[Tensor] = [torch.empty(0)] * len(samples)
        with torch.no_grad():
            for places in batches_of(samples, INPUTS):
                own = [samples[i] for i in places]
                scores, maps = self.scores(own, patches(own) if patches else ())
                reach = None if scope is None else self.reach(maps, own, scope)
                for n, i in enumerate(places):
                    found[i] = scores[n].softmax(-1)
                    if reach is not None:
                        rows, length = self._size(own[n], scope)
                        seen[i] = reach[n, :, :, :rows, :length]
        return torch.stack(found), seen

    def reach(
        self, maps: Sequence[Tensor], samples: Sequence[Sample], scope: Scope | None
    ) -> Float[Tensor, "batch layer head row key"]:
        """The attention that a scope reaches."""
        assert scope is not None
        chosen = torch.stack([maps[layer] for layer in scope.layers(len(maps))], dim=1)
        if not scope.only_row:
            return chosen
        rows = [self.probed.row(sample) for sample in samples]
        return chosen[torch.arange(len(rows)), :, :, rows][:, :, :, None]

    def _size(self, sample: Sample, scope: Scope | None) -> tuple[int, int]:
        length = len(self.probed.units(sample))
        only = self.probed.pools or (scope is not None and scope.only_row)
        return (1 if only else length), length

    def real(self, samples: Sequence[Sample], scope: Scope) -> Float[Tensor, "batch row"]:
        """Which rows are no padding, each input's with the same weight in all."""
        sizes = [self._size(sample, scope)[0] for sample in samples]
        return torch.stack([(torch.arange(max(sizes)) < size) / size for size in sizes]).to(self.subject.device)


def renew(model: nn.Module, attending: Sequence[str], fresh: int | str) -> None:
    """Draw the weights of so many of the last layers anew, and of everything after them; "all" for all weights.

    attending: the names of the modules that attend, in order. What comes after is what is registered after.
    """
    order = {id(parameter): place for place, (_, parameter) in enumerate(model.named_parameters())}
    first = 0 if fresh == "all" else _first_anew(model, attending, fresh, order)
    with torch.no_grad():
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if own and all(order.get(id(parameter), -1) >= first for parameter in own):
                _draw(model, module)


def _first_anew(model: nn.Module, attending: Sequence[str], fresh: int | str, order: Mapping[int, int]) -> int:
    """The place of the first parameter that is drawn anew."""
    blocks = blocks_of(model)
    layers = [layer for name in attending if (layer := blocks.get(id(model.get_submodule(name)))) is not None]
    known = len(layers) == len(attending)
    if not known or isinstance(fresh, bool) or not isinstance(fresh, int) or not 0 <= fresh <= len(layers):
        raise InputError(
            f"fresh={fresh!r} is not possible: give how many of the {len(attending)} last layers start anew (0: only "
            "what comes after them), or 'all', the only choice where attention sits in no layer"
        )
    chosen = layers[len(layers) - fresh :] or layers[-1:]
    places = [order[id(parameter)] for layer in chosen for parameter in layer.parameters()]
    return min(places) if fresh else max(places) + 1


def _draw(model: nn.Module, module: nn.Module) -> None:
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = False  # type: ignore[attr-defined]  # what was loaded is never drawn
        model._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    else:
        raise Refusal(f"{type(module).__name__} does not say how its weights are drawn: give it reset_parameters()")


def apart(
    one: Sequence[Float[Tensor, "layer head row key"]], other: Sequence[Float[Tensor, "layer head row key"]]
) -> tuple[Float[np.ndarray, "input"], Float[np.ndarray, "input"]]:
    """How far the attention of two models lies apart on each input: mean over heads, and of the mean head."""
    by_head = [float(jensen_shannon(a, b).mean()) for a, b in zip(one, other, strict=True)]
    of_mean = [float(jensen_shannon(a.mean(1), b.mean(1)).mean()) for a, b in zip(one, other, strict=True)]
    return np.array(by_head), np.array(of_mean)


def moved(one: Float[Tensor, "input label"], other: Float[Tensor, "input label"]) -> Float[np.ndarray, "input"]:
    return total_variation(one, other).double().cpu().numpy()


def taught(
    lessons: Lessons,
    name: str,
    training: Training,
    seed: int,
    fresh: int | str | None = None,
    patches: Callable[[Sequence[Sample]], list[Patch]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Pupil:
    """A pupil that learned the labels; with patches, under them."""
    pupil = Pupil(lessons.probed, fresh, seed).train()

    def loss_of(step: int) -> Tensor:
        chosen = lessons.batch(step, training.batch, seed)
        samples = [lessons.probed.samples[i] for i in chosen]
        scores, _ = pupil.scores(samples, patches(samples) if patches else ())
        return nn.functional.cross_entropy(scores, lessons.labels[chosen].to(scores.device))

    training.run(name, pupil.model, loss_of, seed, {**lessons.facts, "fresh": str(fresh), **(facts or {})})
    return pupil.eval()
