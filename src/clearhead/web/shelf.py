"""The models of one process: an allow-list given at the start, each opened once, when it is first asked for."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead.errors import InputError, unknown
from clearhead.methods.base import REGISTRY
from clearhead.web.costs import in_order, passes_of

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

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
    """One model of the list. Its explainer is used by one thread at a time: the worker that has it."""

    name: str
    card: Mapping[str, Any]
    open: Callable[[], "Explainer"]
    guard: threading.Lock = field(default_factory=threading.Lock)
    explainer: "Explainer | None" = None
    methods: list[dict[str, Any]] | None = None

    def opened(self) -> "Explainer":
        with self.guard:
            if self.explainer is None:
                self.explainer = self.open()
            return self.explainer

    def line(self) -> dict[str, Any]:
        """What is known without opening it."""
        known = {key: self.card.get(key) for key in ("task", "summary", "figures") if self.card.get(key)}
        return {"name": self.name, **known, "open": self.explainer is not None}

    def about(self, tried: bool = True) -> dict[str, Any]:
        """What it takes, says, and can be explained by; whether a method applies is known once it was `tried`."""
        from clearhead.subjects.answers import Answering

        subject = self.opened().subject
        words = subject.masked or not subject.labels
        return {
            **self.line(),
            "class": type(subject.model).__name__,
            "kind": type(subject).__name__,
            "takes": list(subject.takes),
            "labels": None if words else [subject.labels[index] for index in sorted(subject.labels)],
            "speaks": isinstance(subject, Answering),
            "scales": list(subject.scales),
            "sample": self._sample(),
            "examples": self._examples(),
            "methods": self._tried() if tried else self.methods or _untried(),
        }

    def _tried(self) -> list[dict[str, Any]]:
        if self.methods is None:
            lines = {line.name: line for line in self.opened().methods()}
            self.methods = [_method(name, lines[name].applies, lines[name].why_not) for name in _ordered()]
        return self.methods

    def _sample(self) -> str | None:
        task = str(self.card.get("task", ""))
        return OWN_SAMPLES.get(self.name) or SAMPLES.get(task) if "text" in self.opened().subject.takes else None

    def _examples(self) -> bool:
        """Whether it comes with ready examples whose reasons are known."""
        if not self.name.startswith("zoo:"):
            return False
        from clearhead_zoo.examples import names

        return self.name.removeprefix("zoo:") in names()


def _ordered() -> list[str]:
    return [name for group in in_order(list(REGISTRY)) for name in group]


def _untried() -> list[dict[str, Any]]:
    return [_method(name, None, "") for name in _ordered()]


def _method(name: str, applies: bool | None, why_not: str) -> dict[str, Any]:
    told = REGISTRY[name].declaration
    return {
        "name": name,
        "family": told.family,
        "cost": told.cost,
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

    def __init__(self, models: "Sequence[str] | Mapping[str, Explainer]") -> None:
        """models: names that `clearhead.load` takes, opened when they are needed; or explainers by name"""
        from clearhead.loading import models as zoo

        cards = {f"zoo:{name}": card for name, card in zoo().items()}
        ready = models if isinstance(models, Mapping) else {}
        self.held = {
            name: Held(name, cards.get(name, {}), _opener(name), explainer=ready.get(name)) for name in models
        }
        if not self.held:
            raise InputError("no model to serve: name one with --model, or pip install clearhead-zoo")

    def __getitem__(self, name: str) -> Held:
        if name not in self.held:
            raise unknown("model", name[:100], self.held)
        return self.held[name]

    def lines(self) -> list[dict[str, Any]]:
        return [held.line() for held in self.held.values()]


def _opener(name: str) -> Callable[[], "Explainer"]:
    def open_it() -> "Explainer":
        import transformers

        from clearhead.loading import load

        transformers.logging.disable_progress_bar()
        return load(name)

    return open_it


def zoo_names() -> list[str]:
    """The models of the zoo, the one for texts first."""
    from clearhead.loading import models as zoo

    return sorted((f"zoo:{name}" for name in zoo()), key=lambda name: (name != "zoo:sentiment", name))
