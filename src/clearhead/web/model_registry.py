"""The models of one process: an allow-list given at the start, each opened once, before anyone asks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.errors import InputError, unknown
from clearhead.methods.base import REGISTRY
from clearhead.web.costs import in_brief, in_order, passes_of

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

Follow = Callable[[Sequence[str]], Iterable[str]]
#: Something to begin with, by the model's task.
SAMPLES = {
    "text-classification": "You look extremely confused, but I like the movie",
    "fill-mask": "The capital of France is [MASK].",
    "text2text-generation": "phone",
    "zero-shot-image-classification": "a photo of a cat",
}
OWN_SAMPLES = {"zoo:topics": "What is the capital of France ?", "zoo:spell": "phone"}


@dataclass
class Held:
    """One model of the list. It is used by one thread at a time: the worker that has it."""

    name: str
    explainer: "Explainer"
    card: Mapping[str, Any] = field(default_factory=dict)
    methods: list[dict[str, Any]] | None = None

    def line(self) -> dict[str, Any]:
        known = {key: self.card.get(key) for key in ("task", "summary", "figures") if self.card.get(key)}
        return {"name": self.name, **known}

    def about(self, tried: bool = True) -> dict[str, Any]:
        """What it takes, says, and can be explained by; whether a method applies is known once it was `tried`."""
        from clearhead.adapters.generation import Answering

        subject = self.explainer.subject
        labels = subject.labels
        words = subject.masked or not labels
        return {
            **self.line(),
            "class": type(subject.model).__name__,
            "kind": type(subject).__name__,
            "takes": list(subject.takes),
            "labels": None if words else [labels[index] for index in sorted(labels)],
            "speaks": isinstance(subject, Answering),
            "scales": list(subject.scales),
            "sample": self._sample(),
            "examples": self._examples(),
            "methods": self._tried() if tried else self.methods or _untried(),
        }

    def _tried(self) -> list[dict[str, Any]]:
        if self.methods is None:
            lines = {line.name: line for line in self.explainer.methods()}
            self.methods = [_method(name, lines[name].applies, lines[name].why_not) for name in _ordered()]
        return self.methods

    def _sample(self) -> str | None:
        task = str(self.card.get("task", ""))
        return OWN_SAMPLES.get(self.name) or SAMPLES.get(task) if "text" in self.explainer.subject.takes else None

    def _examples(self) -> bool:
        """Whether it comes with ready examples whose reasons are known."""
        if not self.name.startswith("zoo:"):
            return False
        from clearhead_zoo.examples import names

        return self.name.removeprefix("zoo:") in names()


def _ordered() -> list[str]:
    names = [name for group in in_order(list(REGISTRY)) for name in group]
    return sorted(names, key=lambda name: REGISTRY[name].declaration.family == "control")  # references come last


def _untried() -> list[dict[str, Any]]:
    return [_method(name, None, "") for name in _ordered()]


def _method(name: str, applies: bool | None, why_not: str) -> dict[str, Any]:
    told = REGISTRY[name].declaration
    return {
        "name": name,
        "family": told.family,
        "cost": told.cost,
        "brief": in_brief(name),
        "passes": passes_of(name),
        "signed": told.signed,
        "depends_on_target": told.target == "any",
        "note": told.note,
        "citation": told.citation,
        "applies": applies,
        "why_not": why_not,
    }


class Shelf:
    """The models by name."""

    def __init__(self, models: "Sequence[str] | Mapping[str, Explainer]", follow: Follow = list) -> None:
        """models: names that `clearhead.load` takes, or explainers by name; follow: a bar over the names, such as tqdm

        All are opened here, one after another: transformers changes defaults of the whole process while it opens one,
        which another thread that computes would notice.
        """
        from clearhead.zoo import models as zoo

        cards = {f"zoo:{name}": card for name, card in zoo().items()}
        found = models if isinstance(models, Mapping) else {name: _opened(name) for name in follow(models)}
        self.held = {name: Held(name, explainer, cards.get(name, {})) for name, explainer in found.items()}
        if not self.held:
            raise InputError("no model to serve: name one with --model, or pip install clearhead-zoo")

    def __getitem__(self, name: str) -> Held:
        if name not in self.held:
            raise unknown("model", name[:100], self.held)
        return self.held[name]

    def lines(self) -> list[dict[str, Any]]:
        return [held.line() for held in self.held.values()]


def _opened(name: str) -> "Explainer":
    import transformers

    from clearhead.loader import load

    transformers.logging.disable_progress_bar()
    return load(name)


def zoo_names() -> list[str]:
    """The models of the zoo, the one for texts first."""
    from clearhead.zoo import models as zoo

    return sorted((f"zoo:{name}" for name in zoo()), key=lambda name: (name != "zoo:sentiment", name))
