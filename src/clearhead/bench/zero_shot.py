"""Zero-shot classes: a dual encoder chooses among captions, one for each class of the data.

A picture alone is no input of such a model. It is posed with the caption of the class that is explained (that which the
model finds most alike, the true one, or one by its number), and judged by its logits with the captions of all classes,
whose vectors are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Given, How
from clearhead.adapters.dual_encoder import ImageTextDual
from clearhead.bench.data.base import DataSet, Example
from clearhead.bench.protocols.base import Protocol
from clearhead.capture.session import at_rest
from clearhead.errors import InputError
from clearhead.targets import Label, Target

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Beyond Intuition's words; {one} is the class with its article, {name} without.
TEMPLATE = "a photo of {one}"


@dataclass(frozen=True, eq=False)
class Captions:
    """The captions among which a dual encoder chooses; they stand where the labels of a classifier would."""

    ex: "Explainer"
    texts: tuple[str, ...]

    multi_label = False
    masked = False

    @property
    def subject(self) -> ImageTextDual:
        return cast(ImageTextDual, self.ex.subject)

    @cached_property
    def labels(self) -> dict[int, str]:
        return dict(enumerate(self.texts))

    @cached_property
    def vectors(self) -> Float[Tensor, "caption width"]:
        with torch.no_grad(), at_rest(self.subject.model):
            return self.subject.foils(self.texts)

    def scores(self, output: Any) -> Float[Tensor, "batch caption"]:
        return self.subject.scaled(self.subject.two(output)[1] @ self.vectors.mT)

    def choices(self, scores: Float[Tensor, "caption"]) -> Float[Tensor, "caption"]:
        return scores

    def label_index(self, label: str | int) -> int:
        return self.texts.index(label) if isinstance(label, str) else label

    def label_name(self, index: int) -> str:
        return self.texts[index]

    def predicted(self, picture: Any) -> int:
        """The caption that the model finds most alike."""
        subject = self.ex.subject
        with self.ex.recorder.lock, torch.no_grad(), at_rest(subject.model):
            batch = subject.collate(subject.samples(Given(text=self.texts[0], image=picture), How()))
            return int(self.scores(subject.model(**batch))[0].argmax())

    def posed(self, example: Example, protocol: Protocol) -> Example:
        """The picture with the caption of the class that the protocol wants explained."""
        chosen: Any = protocol.explained
        if chosen == "predicted":
            chosen = self.predicted(example.input)
        elif chosen == "gold":
            chosen = example.label
        if not isinstance(chosen, int) or not 0 <= chosen < len(self.texts):
            raise InputError(f"explained={protocol.explained!r}, but {example.id!r} has no caption of that class")
        return replace(example, input={"text": self.texts[chosen], "image": example.input}, among=self)

    def target(self, text: str) -> "Captioned":
        return Captioned(Label(self.texts.index(text)), captions=self)


@dataclass(frozen=True)
class Captioned(Target):
    """The class of one caption among others."""

    captions: Captions | None = None


def captions_of(ex: "Explainer", data: DataSet, template: str) -> Captions | None:
    """Captions of the data's classes, where the model needs some and the data has only pictures."""
    pictures = len(data) > 0 and not isinstance(data[0].input, dict)
    if not isinstance(ex.subject, ImageTextDual) or not pictures or len(data.labels) < 2:
        return None
    return Captions(ex, tuple(captioned(template, data.labels)))


def captioned(template: str, names: Sequence[str]) -> list[str]:
    """
    >>> captioned("a photo of {one}", ["pug", "english setter"])
    ['a photo of a pug', 'a photo of an english setter']
    """
    try:
        return [
            template.format(one=f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}", name=name) for name in names
        ]
    except (KeyError, IndexError):
        raise InputError(f"template={template!r} is none: write {{one}} or {{name}} where the class stands") from None
