"""Zero-shot classification for benchmarks: a dual encoder (CLIP) chooses among captions, one for each class.

Such a model needs a caption as well as an image. An example is therefore an image with the caption of the explained
class (the predicted one, the true one, or a class index), and it is judged by the logits of the image with the captions
of all classes, whose embeddings are computed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, NamedInputs
from clearhead.adapters.dual_encoder import ImageTextDualEncoderAdapter
from clearhead.bench.data.base import BenchmarkDataset, Example
from clearhead.bench.protocols.base import BenchmarkProtocol
from clearhead.errors import InputError
from clearhead.targets import Label, Target

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: Beyond Intuition's caption; {name_with_article} is the class name with its article, {name} without.
DEFAULT_CAPTION_TEMPLATE = "a photo of {name_with_article}"


@dataclass(frozen=True, eq=False)
class ZeroShotClasses:
    """The captions among which a dual encoder chooses, with the interface of a classifier's labels.

    Attributes:
        explainer: Explainer of the dual encoder.
        captions: One caption per class.
    """

    explainer: "Explainer"
    captions: tuple[str, ...]

    multi_label = False
    masked = False

    @property
    def adapter(self) -> ImageTextDualEncoderAdapter:
        """The adapter of the dual encoder."""
        return cast(ImageTextDualEncoderAdapter, self.explainer.adapter)

    @cached_property
    def labels(self) -> dict[int, str]:
        """Class index → caption."""
        return dict(enumerate(self.captions))

    @cached_property
    def caption_embeddings(self) -> Float[Tensor, "caption width"]:
        """Text embeddings of all captions."""
        with self.adapter.session.running():
            return self.adapter.embed_contrast_texts(self.captions)

    def compute_scores(self, output: Any) -> Float[Tensor, "batch caption"]:
        """Compute the logits of all captions from the model's output for a batch of images."""
        return self.adapter.to_logit(self.adapter.get_embeddings(output)[1] @ self.caption_embeddings.mT)

    def select_prediction_scores(self, scores: Float[Tensor, "caption"]) -> Float[Tensor, "caption"]:
        """Return the scores unchanged: every caption is a class."""
        return scores

    def label_index(self, label: str | int) -> int:
        """Return the class index of a caption."""
        return self.captions.index(label) if isinstance(label, str) else label

    def label_name(self, index: int) -> str:
        """Return the caption of a class."""
        return self.captions[index]

    def predict_class(self, image: Any) -> int:
        """Return the class whose caption has the highest logit."""
        adapter = self.explainer.adapter
        inputs = NamedInputs(text=self.captions[0], image=image)
        batch = adapter.collate(adapter.make_samples(inputs, InputOptions()))
        return int(self.compute_scores(adapter.session.forward(batch))[0].argmax())

    def add_caption(self, example: Example, protocol: BenchmarkProtocol) -> Example:
        """Return the example with the caption of the class that the protocol explains."""
        label: Any = protocol.explained
        if label == "predicted":
            label = self.predict_class(example.input)
        elif label == "gold":
            label = example.label
        if not isinstance(label, int) or not 0 <= label < len(self.captions):
            raise InputError(f"explained={protocol.explained!r}, but {example.id!r} has no caption of that class")
        return replace(example, input={"text": self.captions[label], "image": example.input}, zero_shot_classes=self)

    def make_target(self, caption: str) -> "ZeroShotTarget":
        """Return the target for the class of a caption."""
        return ZeroShotTarget(Label(self.captions.index(caption)), zero_shot_classes=self)


@dataclass(frozen=True)
class ZeroShotTarget(Target):
    """The class of one caption among others.

    Attributes:
        zero_shot_classes: The captions among which the class is chosen.
    """

    zero_shot_classes: ZeroShotClasses | None = None


def make_zero_shot_classes(explainer: "Explainer", dataset: BenchmarkDataset, template: str) -> ZeroShotClasses | None:
    """Return captions of the data's classes; None unless the model is a dual encoder and the inputs are images only."""
    has_images_only = len(dataset) > 0 and not isinstance(dataset[0].input, dict)
    is_dual_encoder = isinstance(explainer.adapter, ImageTextDualEncoderAdapter)
    if not is_dual_encoder or not has_images_only or len(dataset.labels) < 2:
        return None
    return ZeroShotClasses(explainer, tuple(format_captions(template, dataset.labels)))


def format_captions(template: str, class_names: Sequence[str]) -> list[str]:
    """Fill a caption template with class names.

    >>> format_captions("a photo of {name_with_article}", ["pug", "english setter"])
    ['a photo of a pug', 'a photo of an english setter']
    """
    try:
        return [template.format(name_with_article=f"{_choose_article(name)} {name}", name=name) for name in class_names]
    except (KeyError, IndexError):
        raise InputError(
            f"template={template!r} is not a caption template: write {{name}} or {{name_with_article}} where the class "
            "name belongs"
        ) from None


def _choose_article(name: str) -> str:
    """Return "an" if the first letter is a vowel, else "a"."""
    return "an" if name[0].lower() in "aeiou" else "a"
