"""Request schemas, and their conversion to arguments of `explain`. No value of a request is ever used as a path."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clearhead import RECOMMENDED_METHOD
from clearhead.errors import InputError, unknown_value_error
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.targets import AnswerSpan, Contrast, DetectionQuery, GeneratedToken, PositionTarget, TokenLabel
from clearhead.web.image_upload import UploadedImage, parse_image_upload
from clearhead.web.limits import Limits

if TYPE_CHECKING:
    from clearhead.adapters.base import ModelAdapter

LabelField = Annotated[str, Field(max_length=200)] | Annotated[int, Field(ge=-(2**31), lt=2**31)] | None


class StrictModel(BaseModel):
    """Base of the schemas: no unknown fields, no type coercion."""

    model_config = ConfigDict(extra="forbid", strict=True)


class InputRequest(StrictModel):
    """One input: a text, two texts, an image, or a text and an image; or an example of a zoo model."""

    model: str = Field(max_length=300, description="Name of a model, as listed by GET /api/models.")
    text: str | None = Field(None, description="Text, or prompt of a language model.")
    text_pair: str | None = Field(None, description="Second text, for models that take a pair of texts.")
    image: str | None = Field(None, description="Bytes of a PNG, JPEG, WebP, GIF or BMP file in base64.")
    example: int | None = Field(None, ge=0, lt=10_000, description="Index of an example, instead of an input.")


class ExplainRequest(InputRequest):
    """An input, the target to explain, and the methods."""

    methods: list[Annotated[str, Field(max_length=60)]] = Field([RECOMMENDED_METHOD], min_length=1, max_length=64)
    target: LabelField = Field(None, description="Label or its index; by default the prediction.")
    against: LabelField = Field(None, description="Contrast: explain the difference of target and this label.")
    position: LabelField = Field(None, description='Position in the output: a step, query or token, or "every".')
    scale: Literal["logit", "probability", "log-odds", "cosine"] | None = None
    answer: str | None = Field(None, description="Continuation to explain; by default the generated one.")
    max_new_tokens: int = Field(32, ge=1, le=64)


class RenderRequest(StrictModel):
    """Explanations in JSON form, to be shown or written to a file, and their images."""

    explanations: list[dict[str, Any]] = Field(min_length=1)
    images: list[str | None] = Field([], description="One image or null for each explanation, or an empty list.")


class ExportRequest(RenderRequest):
    """Explanations to export, and the file format."""

    format: Literal["html", "safetensors"] = "html"


def check_request(request: InputRequest, limits: Limits) -> None:
    """Check what does not depend on the model: lengths, method names, and conflicting fields.

    Raises:
        InputError: The request is invalid or exceeds a limit.
    """
    for name in ("text", "text_pair", "answer"):
        text = getattr(request, name, None)
        if text is not None and len(text) > limits.max_text_characters:
            raise InputError(
                f"the {name} has {len(text):,} characters, but at most {limits.max_text_characters:,} are accepted: "
                "shorten it, or explain it with clearhead explain"
            )
    if isinstance(request, ExplainRequest):
        for name in request.methods:
            if name not in METHOD_REGISTRY:
                raise unknown_value_error("method", name, sorted(METHOD_REGISTRY))
        if len(set(request.methods)) > limits.max_methods:
            raise InputError(
                f"{len(request.methods)} methods are too many for one request: select at most {limits.max_methods}"
            )
    if request.example is not None and not (request.text is request.text_pair is request.image is None):
        raise InputError("an example is a complete input: leave out text, text_pair and image")


def build_explain_inputs(request: InputRequest, adapter: "ModelAdapter", image: Any) -> dict[str, Any]:
    """Build the inputs of `explain` by stream.

    A text is never passed to a model without text input: an image model would open it as a file.

    Args:
        request: The request.
        adapter: Adapter of its model.
        image: Decoded image of the request.

    Raises:
        InputError: The model does not take these inputs, or needs others.
    """
    if request.example is not None:
        return _load_zoo_example(request.model, request.example)
    input_names = adapter.input_names
    accepted = f"{adapter.name} takes {' and '.join(input_names)}"
    inputs: dict[str, Any] = {}
    if request.text is not None or request.text_pair is not None:
        if "text" not in input_names:
            raise InputError(f"{accepted}, not text")
        if not (request.text or "").strip():
            raise InputError("the text is empty: enter a text")
        inputs["text"] = request.text if request.text_pair is None else (request.text, request.text_pair)
    if image is not None:
        if "image" not in input_names:
            raise InputError(f"{accepted}, not an image")
        inputs["image"] = image
    missing = [stream for stream in input_names if stream not in inputs and stream != "regions"]
    if missing:
        needed = " and ".join("an image" if stream == "image" else f"a {stream}" for stream in missing)
        raise InputError(f"{accepted}: provide {needed}")
    return inputs


def _load_zoo_example(model: str, index: int) -> dict[str, Any]:
    """Load the inputs of an example of the zoo."""
    from clearhead.zoo import is_zoo_installed

    if not model.startswith("zoo:") or not is_zoo_installed():
        raise InputError("only models of the zoo have examples")
    from clearhead_zoo.examples import make_example_input

    try:
        inputs: dict[str, Any] = make_example_input(model.removeprefix("zoo:"), index)
    except LookupError as error:
        raise InputError(str(error.args[0])) from None
    return inputs


def take_image_upload(request: InputRequest, limits: Limits) -> UploadedImage | None:
    """Check the image of a request and remove its base64 text, to save memory while the request waits.

    Raises:
        InputError: The image is too large, damaged, or of an unknown format.
    """
    encoded = request.image
    if encoded is None:
        return None
    request.image = None
    return parse_image_upload(encoded, limits)


def build_target(request: ExplainRequest, adapter: "ModelAdapter") -> Any:
    """Build the target of `explain` from the fields target, against and position."""
    if request.position is not None:
        position = None if request.position == "every" else request.position
        return find_position_target_class(adapter)(position, request.target, request.against)
    if request.against is not None:
        return Contrast(request.target, request.against)
    return request.target


def find_position_target_class(adapter: "ModelAdapter") -> type[PositionTarget]:
    """Return the class of targets at a position of the output, for a kind of model."""
    from clearhead.adapters.detection import ObjectDetectionAdapter
    from clearhead.adapters.token_heads import QuestionAnsweringAdapter, TokenClassificationAdapter

    target_classes: dict[type, type[PositionTarget]] = {
        ObjectDetectionAdapter: DetectionQuery,
        TokenClassificationAdapter: TokenLabel,
        QuestionAnsweringAdapter: AnswerSpan,
    }
    for adapter_class, target_class in target_classes.items():
        if isinstance(adapter, adapter_class):
            return target_class
    return GeneratedToken
