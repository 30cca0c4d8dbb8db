"""How to get an explanation again: as Python, and as a command."""

import shlex
from typing import Any

from clearhead.explanation import Explanation

#: Stands for a picture: an explanation keeps its pixels, not where it came from.
PICTURE = "picture.jpg"
_MERGED = {"word": "words", "sentence": "sentences"}


def snippet(explanation: Explanation) -> str:
    """Python that gives this explanation again, as far as a file can know."""
    arguments = [_input(explanation), f"method={_method(explanation.provenance)}"]
    arguments += [f"target={wanted}"] if (wanted := _target(explanation)) else []
    arguments += [f"{key}={value!r}" for key, value in _settings(explanation).items()]
    call = f"ex.explain({', '.join(arguments)})"
    if len(call) > 88:
        call = "ex.explain(\n    " + ",\n    ".join(arguments) + ",\n)"
    kind = _MERGED.get(explanation.units.kind)
    lines = ["import clearhead", "", f"ex = {_load(explanation)}", f"e = {call}{f'.{kind}()' if kind else ''}"]
    if "minus" in explanation.provenance:
        lines.insert(0, "# A difference of two explanations; this is the first of them.")
    return "\n".join(lines)


def command(explanation: Explanation) -> str | None:
    """The same on the command line; None where that has no words for it."""
    target, units = explanation.target, explanation.units
    nameable = target.get("kind") in ("predicted", "label", "masked word") or "against" in target
    from_numbers = not units.texts and units.grid is None
    if not nameable or "minus" in explanation.provenance or from_numbers or _from_objects(explanation):
        return None
    words = ["clearhead", "explain", "--model", str(explanation.provenance["model"]), "--method", explanation.method]
    words += ["--target", _name(target)] if target["kind"] != "predicted" else []
    words += ["--against", str(target["against"])] if "against" in target else []
    words += ["--mask", str(target["mask"])] if "mask" in target else []
    words += ["--pair", units.texts[1]] if len(units.texts) > 1 else []
    for key, value in {**_loading(explanation), **_settings(explanation)}.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    words += [f"--{_MERGED[units.kind]}"] if units.kind in _MERGED else []
    # After "--" a text may begin with a dash.
    return shlex.join([*words, "--", units.texts[0] if units.texts else PICTURE])


def _settings(explanation: Explanation) -> dict[str, Any]:
    """What was not left as it is by default."""
    settings: dict[str, Any] = {}
    if explanation.target.get("scale") in ("probability", "log-odds"):
        settings["scale"] = explanation.target["scale"]
    settings |= explanation.provenance.get("reading") or {}
    if explanation.per_head is not None:
        settings["per"] = "head"
    if explanation.certificate.get("seed"):
        settings["seed"] = explanation.certificate["seed"]
    return settings


def _loading(explanation: Explanation) -> dict[str, Any]:
    """How the model was loaded, where not as it is by default."""
    settings = dict(explanation.provenance.get("loading") or {})
    if explanation.certificate.get("dtype") not in (None, "float32"):
        settings["dtype"] = explanation.certificate["dtype"]
    return settings


def _load(explanation: Explanation) -> str:
    if _from_objects(explanation):
        return f"clearhead.load((model, processor))  # your {explanation.provenance.get('model_class', 'model')}"
    given = "".join(f", {key}={value!r}" for key, value in _loading(explanation).items())
    return f"clearhead.load({str(explanation.provenance['model'])!r}{given})"


def _from_objects(explanation: Explanation) -> bool:
    """Whether the model came as an object: then it has the name of its class, and no file can say where it lives."""
    model = explanation.provenance.get("model")
    return model is None or model == explanation.provenance.get("model_class")


def _input(explanation: Explanation) -> str:
    texts = explanation.units.texts
    if texts:
        return repr(texts[0]) if len(texts) == 1 else repr(tuple(texts))
    return repr(PICTURE) if explanation.units.grid is not None else "inputs"


def _method(provenance: Any) -> str:
    method, options = provenance.get("method"), provenance.get("options") or {}
    if not options:
        return repr(method)
    # A file brings tuples back as lists; written as tuples, the snippet is the same before and after.
    given = ", ".join(f"{key}={tuple(v) if isinstance(v, list) else v!r}" for key, v in options.items())
    return f"clearhead.Method({method!r}, {given})"


def _target(explanation: Explanation) -> str | None:
    target = explanation.target
    at_mask = f"mask={target['mask']}" if "mask" in target else ""
    if "against" in target:
        contrast = f"{_name(target)!r}, {target['against']!r}"
        return f"clearhead.Contrast({contrast}{f', {at_mask}' if at_mask else ''})"
    match target.get("kind"):
        case "label":
            return repr(target.get("name"))
        case "masked word":
            return f"clearhead.MaskedWord({target.get('name')!r}, {at_mask})"
        case "predicted" if at_mask:
            return f"clearhead.MaskedWord({at_mask})"
        case "callable":
            return str(target.get("name"))
    return None


def _name(target: Any) -> str:
    """The label explained, without the one that it is held against."""
    return str(target.get("name")).removesuffix(f" − {target.get('against')}")
