"""How to get an explanation again: as Python, and as a command."""

import shlex
from typing import Any

from clearhead.explanation.multi_stream import AnyExplanation

#: Stand for a picture and a sound: an explanation keeps pixels and scores, not where they came from.
PICTURE, SOUND = "picture.jpg", "sound.wav"
_MERGED = {"word": "words", "sentence": "sentences"}
#: What a target at one place of an answer is called in Python, and in words.
_PLACED = {
    "generated word": ("Generated", "step"),
    "detection": ("Query", "query"),
    "token label": ("TokenLabel", "token"),
    "answer": ("Answer", "answer"),
}


def snippet(explanation: AnyExplanation) -> str:
    """Python that gives this explanation again, as far as a file can know."""
    arguments = [*_inputs(explanation), f"method={_method(explanation.provenance)}"]
    arguments += [f"target={wanted}"] if (wanted := _target(explanation)) else []
    # A file brings tuples back as lists, and a list of answers would be one for each input.
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in _settings(explanation).items()}
    arguments += [f"{key}={value!r}" for key, value in settings.items()]
    call = f"ex.explain({', '.join(arguments)})"
    if len(call) > 88:
        call = "ex.explain(\n    " + ",\n    ".join(arguments) + ",\n)"
    kind, sizes = _merged(explanation), "absolute=True" if explanation.provenance.get("absolute") else ""
    lines = ["import clearhead", "", f"ex = {_load(explanation)}", f"e = {call}{f'.{kind}({sizes})' if kind else ''}"]
    if _has_regions(explanation):
        lines.append("# then merged into regions of the picture, with e.regions(…)")
    if "minus" in explanation.provenance:
        lines.insert(0, "# A difference of two explanations; this is the first of them.")
    return "\n".join(lines)


def command(explanation: AnyExplanation) -> str | None:
    """The same on the command line; None where that has no words for it."""
    target, settings = explanation.target, {**_loading(explanation), **_settings(explanation)}
    given, wanted = _given(explanation), _in_words(explanation)
    nameable = wanted is not None and isinstance(settings.get("answer", ""), str)
    plain = "minus" not in explanation.provenance and "absolute" not in explanation.provenance
    if not nameable or not plain or _has_regions(explanation) or _from_objects(explanation) or not _can_be_typed(given):
        return None
    words = ["clearhead", "explain", "--model", str(explanation.provenance["model"]), "--method", explanation.method]
    words += ["--target", wanted] if wanted else []
    words += ["--against", str(target["against"])] if "against" in target else []
    words += ["--mask", str(target["mask"])] if "mask" in target else []
    for key, value in settings.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    words += [f"--{kind}"] if (kind := _merged(explanation)) else []
    if len(given) > 1:
        # With "=" a text may begin with a dash, and after "--".
        return shlex.join([*words, *(f"--{stream}={texts[0]}" for stream, texts in given.items())])
    (texts,) = given.values()
    words += [f"--pair={texts[1]}"] if len(texts) > 1 else []
    return shlex.join([*words, "--", texts[0]])


def _merged(explanation: AnyExplanation) -> str | None:
    kinds = (part.units.kind for part in explanation.parts.values())
    return next((_MERGED[kind] for kind in kinds if kind in _MERGED), None)


def _has_regions(explanation: AnyExplanation) -> bool:
    """Whether patches were merged afterwards; regions that a model itself reads are a stream of their own."""
    return any(part.units.kind == "region" and stream != "regions" for stream, part in explanation.parts.items())


def _settings(explanation: AnyExplanation) -> dict[str, Any]:
    """What was not left as it is by default."""
    settings: dict[str, Any] = {}
    scale, alike = explanation.target.get("scale"), explanation.prediction.get("label") == "similarity"
    if scale in ("probability", "log-odds") or (scale == "logit" and alike):
        settings["scale"] = scale
    if explanation.provenance.get("profile"):
        settings["profile"] = explanation.provenance["profile"]
    settings |= explanation.provenance.get("reading") or {}
    if any(part.per_head is not None for part in explanation.parts.values()):
        settings["per"] = "head"
    if explanation.certificate.get("seed"):
        settings["seed"] = explanation.certificate["seed"]
    return settings


def _loading(explanation: AnyExplanation) -> dict[str, Any]:
    """How the model was loaded, where not as it is by default."""
    settings = dict(explanation.provenance.get("loading") or {})
    if explanation.certificate.get("dtype") not in (None, "float32"):
        settings["dtype"] = explanation.certificate["dtype"]
    return settings


def _load(explanation: AnyExplanation) -> str:
    if _from_objects(explanation):
        return f"clearhead.load((model, processor))  # your {explanation.provenance.get('model_class', 'model')}"
    given = "".join(f", {key}={value!r}" for key, value in _loading(explanation).items())
    return f"clearhead.load({str(explanation.provenance['model'])!r}{given})"


def _from_objects(explanation: AnyExplanation) -> bool:
    """Whether the model came as an object: then it has the name of its class, and no file can say where it lives."""
    model = explanation.provenance.get("model")
    return model is None or model == explanation.provenance.get("model_class")


def _given(explanation: AnyExplanation) -> dict[str, tuple[str, ...]]:
    """What was given, by name, as texts and files; an empty tuple for numbers that no file can name."""
    parts = explanation.parts
    given: dict[str, tuple[str, ...]] = {}
    for stream, part in parts.items():
        if stream in ("prefix", "queries") or (stream == "other" and "text" in parts):
            continue  # what the model said itself, or has learned; the second of two texts
        texts = part.units.texts
        if stream == "image":
            given["image"] = (PICTURE,) if part.picture is not None or part.units.grid is not None else ()
        elif stream == "audio":
            given["audio"] = (SOUND,)
        elif stream == "regions":
            given["regions"] = ()
        else:
            second = parts["other"].units.texts if "other" in parts else texts[1:]
            given["text"] = texts[:1] if _kinds(explanation) == {"generated word"} else (*texts[:1], *second)
    return given


def _can_be_typed(given: dict[str, tuple[str, ...]]) -> bool:
    return bool(given) and all(given.values())


def _inputs(explanation: AnyExplanation) -> list[str]:
    given = _given(explanation)
    said = {stream: "(features, boxes)" if stream == "regions" else _python(texts) for stream, texts in given.items()}
    return list(said.values()) if len(said) == 1 else [f"{stream}={text}" for stream, text in said.items()]


def _python(texts: tuple[str, ...]) -> str:
    return "inputs" if not texts else repr(texts[0]) if len(texts) == 1 else repr(texts)


def _method(provenance: Any) -> str:
    method, options = provenance.get("method"), provenance.get("options") or {}
    if not options:
        return repr(method)
    # A file brings tuples back as lists; written as tuples, the snippet is the same before and after.
    given = ", ".join(f"{key}={tuple(v) if isinstance(v, list) else v!r}" for key, v in options.items())
    return f"clearhead.Method({method!r}, {given})"


def _kinds(explanation: AnyExplanation) -> set[str]:
    """The kinds of place that the targets have; a contrast does not say which, and is told by other signs."""
    found = set()
    for step in explanation.target.get("steps") or [explanation.target]:
        kind = str(step.get("kind"))
        if kind == "contrast" and "place" in step:
            token = str(explanation.provenance.get("model_class")).endswith("ForTokenClassification")
            kind = "detection" if "box" in step else "token label" if token else "generated word"
            kind = "answer" if isinstance(step["place"], str) else kind
        found.add(kind)
    return found


def _in_words(explanation: AnyExplanation) -> str | None:
    """The target as one types it; "" for what is meant anyway, None where there are no words for it."""
    target, kinds = explanation.target, _kinds(explanation)
    kind = kinds.pop() if len(kinds) == 1 else ""
    if target.get("kind") == "several":
        if kind == "detection":
            return _one_label(explanation) or ""
        return {"generated word": "every step", "token label": "every token", "answer": ""}.get(kind)
    if kind == "generated word" and _is_next(explanation):
        return "" if _is_predicted(explanation) else _name(target)
    if kind in _PLACED:
        label = target["index"] if kind == "answer" else _name(target)
        return f"{_PLACED[kind][1]} {target['place']} = {label}"
    if kind in ("predicted", "similarity"):
        return ""
    return _name(target) if kind in ("label", "masked word") or "against" in target else None


def _is_next(explanation: AnyExplanation) -> bool:
    """Whether a word was explained after which, and before which, nothing was said: the next one."""
    parts = explanation.parts
    said = any(len(part.units.texts) > 1 for part in parts.values()) or "answer" in _settings(explanation)
    return not said and not ("prefix" in parts and len(parts["prefix"].units.drop_special()))


def _is_predicted(explanation: AnyExplanation) -> bool:
    return "against" not in explanation.target and (
        explanation.target.get("index") == explanation.prediction.get("index")
    )


def _one_label(explanation: AnyExplanation) -> str | None:
    """The class of all objects that were found together, if there is one."""
    labels = {str(step.get("label")) for step in explanation.target.get("steps") or ()}
    return labels.pop() if len(labels) == 1 else None


def _target(explanation: AnyExplanation) -> str | None:
    target, kinds = explanation.target, _kinds(explanation)
    if target.get("kind") == "several":
        if kinds == {"detection"}:
            label = _one_label(explanation)
            return None if label is None else repr(label)
        made = [f"clearhead.{_PLACED[kind][0]}()" for kind in kinds if kind in _PLACED]
        return made[0] if len(made) == 1 and len(kinds) == 1 else None
    if kinds == {"generated word"} and _is_next(explanation):
        if "against" in target:
            return f"clearhead.Contrast({target.get('index')!r}, {target['against']!r})"
        return None if _is_predicted(explanation) else repr(target.get("index"))
    if "place" in target and len(kinds) == 1 and (kind := kinds.pop()) in _PLACED:
        # Words of an answer go by number: what a tokenizer makes of a piece's name need not be that piece again.
        label = target["index"] if kind in ("generated word", "answer") and "index" in target else _name(target)
        against = f", {target['against']!r}" if "against" in target else ""
        return f"clearhead.{_PLACED[kind][0]}({target['place']!r}, {label!r}{against})"
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
    """The label explained, without the one that it is held against, and without the token that has it."""
    if "label" in target:
        return str(target["label"])
    return str(target.get("name")).removesuffix(f" − {target.get('against')}")
