"""The result: units and their scores, what was explained, what was predicted, and how we know."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8

from clearhead.data.atomic_file import whole
from clearhead.errors import InputError, unknown
from clearhead.explanation.display import Shown
from clearhead.explanation.validation import frozen, problems
from clearhead.units import Units, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from clearhead.explanation.regions import Where

#: Name and version of the JSON form and of the file; a reader refuses a newer one.
SCHEMA = "clearhead/explanation"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Explanation(Shown):
    """Scores for the units of one stream.

    `scores` are raw and signed as the method gave them; scaling happens when they are shown. `matrix` has one row of
    scores per row that was read: for each of `steps` (the words of an answer, the objects of a picture), whose sum the
    scores are, or for each unit (`rows="all"`). `per_layer` and `per_head` are the shares of layers and heads.
    """

    units: Units
    scores: Float[np.ndarray, "unit"]
    method: str
    target: Mapping[str, Any]
    prediction: Mapping[str, Any]
    certificate: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    base_value: float | None = None
    matrix: Float[np.ndarray, "row unit"] | None = None
    per_layer: Float[np.ndarray, "layer unit"] | None = None
    per_head: Float[np.ndarray, "layer head unit"] | None = None
    #: What the scores are a product of, for methods that have it; `provenance["factors"]` names them.
    factors: Float[np.ndarray, "factor unit"] | None = None
    picture: UInt8[np.ndarray, "height width 3"] | None = None
    steps: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Explanation):
            return NotImplemented
        same = self.picture is None if other.picture is None else np.array_equal(self.picture, other.picture)  # type: ignore[arg-type]
        return same and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    @property
    def stream(self) -> str:
        return self.units.stream

    @property
    def tokens(self) -> list[str]:
        """The names of the units."""
        return list(self.units.names)

    @property
    def signed(self) -> bool:
        """Whether the method's scores can speak against the target."""
        return bool(self.provenance.get("signed", (self.scores < 0).any()))

    def __len__(self) -> int:
        return len(self.units)

    @property
    def streams(self) -> tuple[str, ...]:
        return (self.stream,)

    @property
    def parts(self) -> "dict[str, Explanation]":
        """By stream: itself alone, where a result of several streams has several."""
        return {self.stream: self}

    def step(self, which: int) -> "Explanation":
        """The explanation of one of several steps alone."""
        if self.steps is None or self.matrix is None:
            raise InputError("this explanation has one target, and no steps")
        if not -len(self.steps) <= which < len(self.steps):
            raise InputError(f"step {which} does not exist: there are {len(self.steps)}, counted from 0")
        described = self.target.get("steps")  # a difference of two explanations has none
        target = described[which] if described else {**self.target, "name": self.steps[which], "value": None}
        return replace(self, scores=self.matrix[which], matrix=None, steps=None, target=target)

    def __getitem__(self, stream: str) -> "Explanation":
        if stream != self.stream:
            raise unknown("stream", stream, [self.stream])
        return self

    def words(self, absolute: bool = False) -> "Explanation":
        """Word pieces merged into words, their scores (or, if `absolute`, the sizes of their scores) added up."""
        return self._merged("word", absolute)

    def sentences(self, absolute: bool = False) -> "Explanation":
        """Units merged into sentences, their scores (or, if `absolute`, the sizes of their scores) added up."""
        return self._merged("sentence", absolute)

    def regions(self, where: "Where", absolute: bool = False) -> "Explanation":
        """Patches merged into regions of the picture; a patch that lies in two of them is divided by area.

        where: (rows, columns); boxes (left, top, right, bottom) by name or in a list, in fractions of the picture or
        its pixels; or a map of whole numbers that says of each pixel, or patch, where it lies
        """
        from clearhead.explanation.regions import in_regions

        size = None if self.picture is None else self.picture.shape[:2]
        return self._into(*in_regions(self.units, where, size), absolute)

    def _merged(self, kind: str, absolute: bool) -> "Explanation":
        units, parents = self.units.merged(kind)
        into = np.zeros((len(self.units), len(units)))
        into[np.arange(len(parents)), parents] = 1
        return self._into(units, into, absolute)

    def _into(self, units: Units, shares: Float[np.ndarray, "unit larger"], absolute: bool) -> "Explanation":
        """Scores handed to larger units, each unit's by its shares."""
        into = shares.astype(self.scores.dtype)

        def added(part: np.ndarray | None) -> Any:
            return None if part is None else _summed(np.abs(part) if absolute else part, into)

        matrix = added(self.matrix)
        if matrix is not None and self.steps is None:  # the row of a word is the mean of its pieces' rows
            matrix = _summed(matrix.T, into / into.sum(0)).T
        made = replace(
            self,
            units=units,
            scores=added(self.scores),
            matrix=matrix,
            per_layer=added(self.per_layer),
            per_head=added(self.per_head),
            factors=None,  # a sum of products is no product of sums
        )
        if not absolute:
            return made
        changed = {"signed": False, "linear_in_target": False, "absolute": True}
        return replace(made, base_value=None, provenance={**self.provenance, **changed})

    def top(self, count: int = 5, special: bool = False) -> list[tuple[str, float]]:
        """The units with the largest scores, special tokens left out unless asked for.

        Ties keep the order of the input.
        """
        kept = np.arange(len(self)) if special else self.units.drop_special()
        order = kept[np.argsort(-self.scores[kept], kind="stable")][:count]
        return [(self.units.names[i], float(self.scores[i])) for i in order]

    def heat_map(self) -> Float[np.ndarray, "row column"]:
        """The scores of a picture's patches, laid out as they lie in it."""
        if self.units.grid is None:
            raise InputError(f"{plural(self.units.kind)} lie on no grid, so they make no heat map")
        return self.scores[self.units.drop_special()].reshape(self.units.grid)

    def mask(self) -> Bool[np.ndarray, "height width"]:
        """The pixels that the scores single out: the heat map scaled up to the picture, cut at Otsu's threshold."""
        from clearhead.explanation.otsu_mask import mask_of

        heat = self.heat_map()
        return mask_of(heat, *(heat.shape if self.picture is None else self.picture.shape[:2]))

    def __sub__(self, other: "Explanation") -> "Explanation":
        """The difference of two explanations of one input.

        For methods linear in the target it explains the contrast of the two; otherwise it is a difference of scores,
        and says so. On the scale "log-odds" it is always a difference of scores: the log-odds of one class against
        another are not the difference of their log-odds against all others (`clearhead.Contrast`).
        """
        if not isinstance(other, Explanation):
            return NotImplemented
        if self.units != other.units or self.provenance.get("input") != other.provenance.get("input"):
            raise InputError(
                "only explanations of the same input can be subtracted: these have different units or content"
            )
        alike = all(one == two for one, two in zip(self._made_by, other._made_by, strict=True))
        linear = bool(self.provenance.get("linear_in_target")) and self.target.get("scale") != "log-odds"
        explains_contrast = linear and alike and self._same_model(other)
        values = [side.target.get("value") for side in (self, other)]
        target = {
            "kind": "contrast" if explains_contrast else "difference of scores",
            "name": f"{self.target.get('name')} − {other.target.get('name')}",
            "scale": self.target.get("scale") if self.target.get("scale") == other.target.get("scale") else None,
            "value": None if values[0] is None or values[1] is None else float(values[0]) - float(values[1]),
        }

        def minus(one: Any, two: Any) -> Any:
            return None if one is None or two is None or np.shape(one) != np.shape(two) else one - two

        return replace(
            self,
            method=self.method if self.method == other.method else f"{self.method} − {other.method}",
            scores=self.scores - other.scores,
            target=target,
            provenance={**self.provenance, "signed": True, "minus": dict(other.provenance)},
            base_value=minus(self.base_value, other.base_value),
            matrix=minus(self.matrix, other.matrix),
            per_layer=minus(self.per_layer, other.per_layer),
            per_head=minus(self.per_head, other.per_head),
            factors=None,
        )

    @property
    def _made_by(self) -> tuple[Any, ...]:
        """What two explanations must share for their difference to explain the difference of their targets."""
        return self.method, self.provenance.get("model"), self.target.get("scale"), self.provenance.get("minus")

    def _same_model(self, other: "Explanation") -> bool:
        """Whether one model made both. Models given as objects all go by the name of their class: logits tell them."""
        found = [{row.get("index"): row.get("logit") for row in e.prediction.get("top") or ()} for e in (self, other)]
        logits = [np.asarray([one[index] for index in sorted(one)], dtype=float) for one in found]
        if not found[0] and not found[1]:
            return self.provenance.get("model") != self.provenance.get("model_class")
        # The last bits depend on what shares a batch.
        close = 1e-4 if self.certificate.get("dtype", "float32") in ("float32", "float64") else 2e-2
        return found[0].keys() == found[1].keys() and bool(
            np.abs(logits[0] - logits[1]).max() <= close * max(np.abs(logits[0]).max(), 1)
        )

    def to_dict(self, short: bool = False) -> dict[str, Any]:
        """The JSON form, as `explanation.schema.json` describes it; a number that is not finite is null.

        Pictures stay in the file form. short: figures no longer than their precision, as in a page
        """
        form = {
            "schema": SCHEMA,
            "version": VERSION,
            "stream": self.stream,
            "units": {name: part for name, part in asdict(self.units).items() if part is not None},
            "scores": self.scores,
            "method": self.method,
            "target": self.target,
            "prediction": self.prediction,
            "base_value": self.base_value,
            "certificate": self.certificate,
            "provenance": self.provenance,
            **({} if self.steps is None else {"steps": self.steps}),
            **{name: part for name in _ARRAYS if (part := getattr(self, name)) is not None},
        }
        made: dict[str, Any] = plain(form, short)
        return made

    def as_parts(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The JSON form without its arrays, and the arrays: what a file holds."""
        names = ("scores", "picture", *_ARRAYS)
        arrays = {name: part for name in names if (part := getattr(self, name)) is not None}
        return {key: value for key, value in self.to_dict().items() if key not in names}, arrays

    def save(self, path: str | Path) -> Path:
        """Write one safetensors file: arrays as tensors, the rest as JSON metadata."""
        from safetensors.numpy import save

        about, arrays = self.as_parts()
        content = save(
            {name: np.ascontiguousarray(part) for name, part in arrays.items()},
            metadata={"clearhead": json.dumps(about, ensure_ascii=False, allow_nan=False)},
        )
        with whole(path) as partial:
            partial.write_bytes(content)
        return Path(path)

    def plot(
        self,
        kind: Literal["bars", "table", "text", "layers", "overlay", "heads", "matrix", "steps", "regions", "frames"]
        | None = None,
        ax: "Axes | None" = None,
        **options: Any,
    ) -> "Axes":
        """Draw with matplotlib and return the axes; without a kind, what says most about these units.

        ax: axes of your own to draw into; otherwise `e.plot().figure.savefig("why.pdf")` keeps the whole figure
        """
        from clearhead.render.mpl.explanation import main_axes, plot

        return main_axes(plot(self, kind, ax, **options), ax)

    def latex(self, special: bool = False) -> str:
        """The text for a paper, each unit on its colour, as LaTeX; special: also tokens such as [CLS]."""
        from clearhead.render.latex import latex

        return latex(self, special)

    def __repr__(self) -> str:
        top = ", ".join(f"{name} {score:.3g}" for name, score in self.top(3))
        kinds = plural(self.units.kind)
        return f"Explanation({self.method} of {self.target.get('name')!r}: {len(self)} {kinds}; top: {top})"


_ARRAYS = ("matrix", "per_layer", "per_head", "factors")
_PLAIN = ("method", "target", "prediction", "base_value", "certificate", "provenance")


def _summed(
    scores: Float[np.ndarray, "*part unit"], shares: Float[np.ndarray, "unit larger"]
) -> Float[np.ndarray, "*part larger"]:
    """What larger units get; of a unit that has no score (NaN) nobody has one who holds any of it, and nobody else."""
    missing = np.isnan(scores)
    sums = np.where(missing, 0, scores) @ shares
    return np.where(missing @ (shares != 0), np.nan, sums)


def load(path: str | Path) -> Any:
    """Open a file that `save` wrote: an `Explanation`, or a `JointExplanation` of several streams."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            found = (file.metadata() or {}).get("clearhead")
            if found is None:
                raise ValueError("it holds tensors of something else")
            about = json.loads(found)
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        if isinstance(about, Mapping) and about.get("schema") == "clearhead/joint-explanation":
            from clearhead.explanation.multi_stream import joint_from

            return joint_from(about, arrays)
        return from_parts(about, arrays)
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}") from None
    except InputError as problem:
        raise InputError(f"{str(path)!r} cannot be read: {problem}") from None
    except (SafetensorError, ValueError, TypeError, OSError) as problem:
        raise InputError(f"{str(path)!r} is not an explanation that clearhead saved ({problem})") from None


def from_dict(data: Mapping[str, Any]) -> Any:
    """The explanation whose `to_dict()` this is, of one stream or several; null among its numbers is NaN."""
    if isinstance(data, Mapping) and data.get("schema") == "clearhead/joint-explanation":
        from clearhead.explanation.multi_stream import joint_of

        return joint_of(data, lambda stream: from_dict(data["parts"][stream]))
    found = {name: data.get(name) for name in ("scores", *_ARRAYS)} if isinstance(data, Mapping) else {}
    try:
        arrays = {name: np.asarray(part, dtype=float) for name, part in found.items() if part is not None}
    except (TypeError, ValueError) as problem:
        raise InputError(f"this is not an explanation that clearhead wrote ({problem})") from None
    return from_parts(data, arrays)


def from_parts(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Explanation:
    """An explanation from its JSON form and its arrays: the one border where types and lengths are checked."""
    if not isinstance(about, Mapping) or about.get("schema") != SCHEMA or not isinstance(about.get("version"), int):
        raise InputError("this is not an explanation that clearhead wrote")
    if about["version"] > VERSION:
        raise InputError(f"written by a newer clearhead (form {about['version']}, this one reads up to {VERSION})")
    try:
        units = Units(**{key: frozen(value) for key, value in about["units"].items()})
        plain = {name: about[name] for name in _PLAIN}
        steps = None if about.get("steps") is None else frozen(about["steps"])
        made = Explanation(units=units, steps=steps, **plain, **arrays)  # type: ignore[arg-type]
    except (KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"this explanation is damaged: {type(problem).__name__} {problem}") from None
    for wrong in problems(made):
        raise InputError(f"this explanation is damaged: {wrong}")
    return made


def plain(value: Any, short: bool = False) -> Any:
    """Only what JSON knows: a number that is not finite becomes null.

    short: arrays with no more digits than their precision has, nine for a float32 where exactness takes seventeen

    >>> plain({"scores": np.array([0.1, np.nan], dtype=np.float32)}, short=True)
    {'scores': [0.1, None]}
    """
    if short and isinstance(value, np.ndarray) and value.dtype.kind == "f":
        value = value.astype(str).astype(float)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item, short) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [plain(item, short) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
