"""What a request may say, and what `explain` is then called with. Nothing in it is ever a path."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clearhead.errors import InputError, unknown
from clearhead.methods.base import REGISTRY
from clearhead.targets import Answer, Contrast, Generated, Placed, Query, TokenLabel
from clearhead.web.image_upload import File, file_of
from clearhead.web.limits import Limits

if TYPE_CHECKING:
    from clearhead.adapters.base import Subject

Label = Annotated[str, Field(max_length=200)] | Annotated[int, Field(ge=-(2**31), lt=2**31)] | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Input(Strict):
    """One input: a text, two texts, a picture, or a text and a picture; or a ready example of a zoo model."""

    model: str = Field(max_length=300, description="One of the models that GET /api/models lists.")
    text: str | None = Field(None, description="A text, or the prompt of a language model.")
    pair: str | None = Field(None, description="The second text, for models that read two.")
    image: str | None = Field(None, description="The bytes of a PNG, JPEG, WebP, GIF or BMP file in base64.")
    example: int | None = Field(None, ge=0, lt=10_000, description="A ready example instead of an input.")


class Ask(Input):
    """What is to be explained, and how."""

    methods: list[Annotated[str, Field(max_length=60)]] = Field(["generic"], min_length=1, max_length=64)
    target: Label = Field(None, description="A label or its number; without it, what the model predicts.")
    against: Label = Field(None, description="Why the target and not this label: their difference.")
    place: Label = Field(None, description='Of an answer that has many: a step, query or token, or "every".')
    scale: Literal["logit", "probability", "log-odds", "cosine"] | None = None
    answer: str | None = Field(None, description="What a language model is to have said.")
    max_new_tokens: int = Field(32, ge=1, le=64)


class Shown(Strict):
    """Explanations in their JSON form, to be shown or written to a file again, and the pictures that they are about."""

    explanations: list[dict[str, Any]] = Field(min_length=1)
    pictures: list[str | None] = Field([], description="One for each explanation, or none at all.")


class Shared(Shown):
    form: Literal["html", "safetensors"] = "html"


def check(ask: Input, limits: Limits) -> None:
    """What can be said before a model is looked at."""
    for name in ("text", "pair", "answer"):
        said = getattr(ask, name, None)
        if said is not None and len(said) > limits.characters:
            raise InputError(
                f"the {name} has {len(said):,} characters, and {limits.characters:,} are the most that is taken: "
                "shorten it, or explain it with clearhead explain"
            )
    if isinstance(ask, Ask):
        for name in ask.methods:
            if name not in REGISTRY:
                raise unknown("method", name, sorted(REGISTRY))
        if len(set(ask.methods)) > limits.methods:
            raise InputError(f"{len(ask.methods)} methods at once are too many: {limits.methods} are the most")
    if ask.example is not None and not (ask.text is ask.pair is ask.image is None):
        raise InputError("an example is an input of its own: leave out text, pair and image")


def inputs_of(ask: Input, subject: "Subject", picture: Any) -> dict[str, Any]:
    """The streams that `explain` is given, by name. A model of pictures would open a text as a file: it gets none."""
    if ask.example is not None:
        return _example(ask.model, ask.example)
    takes, name = subject.takes, subject.name
    given: dict[str, Any] = {}
    if ask.text is not None or ask.pair is not None:
        if "text" not in takes:
            raise InputError(f"{name} takes {' and '.join(takes)}, and no text")
        if not (ask.text or "").strip():
            raise InputError("the text is empty: write something")
        given["text"] = ask.text if ask.pair is None else (ask.text, ask.pair)
    if picture is not None:
        if "image" not in takes:
            raise InputError(f"{name} takes {' and '.join(takes)}, and no picture")
        given["image"] = picture
    missing = [stream for stream in takes if stream not in given and stream != "regions"]
    if missing:
        said = " and ".join("a picture" if stream == "image" else f"a {stream}" for stream in missing)
        raise InputError(f"{name} takes {' and '.join(takes)}: give it {said}")
    return given


def _example(model: str, number: int) -> dict[str, Any]:
    from clearhead.zoo import has_zoo

    if not model.startswith("zoo:") or not has_zoo():
        raise InputError("ready examples are for models of the zoo alone")
    from clearhead_zoo.examples import example

    try:
        found: dict[str, Any] = example(model.removeprefix("zoo:"), number)
    except LookupError as problem:
        raise InputError(str(problem.args[0])) from None
    return found


def picture_in(ask: Input, limits: Limits) -> File | None:
    """The picture of a request as a file; it is decoded when its turn has come. The text that it came as is let go."""
    if ask.image is None:
        return None
    sent, ask.image = ask.image, None
    return file_of(sent, limits)


def target_of(ask: Ask, subject: "Subject") -> Any:
    """The target in the words of the library."""
    if ask.place is not None:
        place = None if ask.place == "every" else ask.place
        return placed(subject)(place, ask.target, ask.against)
    return ask.target if ask.against is None else Contrast(ask.target, ask.against)


def placed(subject: "Subject") -> type[Placed]:
    """What a place of the answer is, for a kind of model."""
    from clearhead.adapters.detection import ObjectDetection
    from clearhead.adapters.token_heads import QuestionAnswering, TokenClassification

    kinds: dict[type, type[Placed]] = {
        ObjectDetection: Query,
        TokenClassification: TokenLabel,
        QuestionAnswering: Answer,
    }
    return next((made for kind, made in kinds.items() if isinstance(subject, kind)), Generated)
