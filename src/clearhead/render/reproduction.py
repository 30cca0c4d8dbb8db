"""Reproduces an explanation: the Python code and the command line that compute it again."""

import shlex
from collections.abc import Mapping
from typing import Any

from clearhead.explanation.multi_stream import AnyExplanation

#: File names for image and audio inputs: an explanation stores pixels and scores, not the path of the file.
IMAGE_PLACEHOLDER = "image.jpg"
AUDIO_PLACEHOLDER = "audio.wav"
_MERGE_METHOD_NAMES = {"word": "words", "sentence": "sentences"}
#: Target kind of one output position → its class in Python and its word on the command line.
_POSITION_TARGETS = {
    "generated_token": ("GeneratedToken", "step"),
    "detection": ("DetectionQuery", "query"),
    "token_label": ("TokenLabel", "token"),
    "answer": ("AnswerSpan", "answer"),
}


def format_python_snippet(explanation: AnyExplanation) -> str:
    """Return Python code that computes an explanation again.

    Args:
        explanation: The explanation. What it does not store (image files, model objects) becomes a placeholder.

    Returns:
        The source code.
    """
    call = _format_explain_call(explanation)
    merge_method = _find_merge_method(explanation)
    if merge_method:
        merge_arguments = "absolute=True" if explanation.provenance.get("absolute") else ""
        call = f"{call}.{merge_method}({merge_arguments})"
    lines = ["import clearhead", "", f"ex = {_format_load_call(explanation)}", f"e = {call}"]
    if _has_merged_regions(explanation):
        lines.append("# then merged into regions of the image, with e.regions(…)")
    if "minus" in explanation.provenance:
        lines.insert(0, "# A difference of two explanations; this is the first of them.")
    return "\n".join(lines)


def _format_explain_call(explanation: AnyExplanation) -> str:
    """The call of `ex.explain`, on several lines if it is long."""
    arguments = [*_format_input_arguments(explanation), f"method={_format_method_argument(explanation.provenance)}"]
    target = _format_python_target(explanation)
    if target:
        arguments.append(f"target={target}")
    for key, value in _collect_explain_settings(explanation).items():
        # JSON turns tuples into lists, and a list of answers would mean one for each input.
        arguments.append(f"{key}={_convert_list_to_tuple(value)!r}")
    call = f"ex.explain({', '.join(arguments)})"
    if len(call) > 88:
        return "ex.explain(\n    " + ",\n    ".join(arguments) + ",\n)"
    return call


def _convert_list_to_tuple(value: Any) -> Any:
    """Convert a list to a tuple, and return anything else unchanged."""
    return tuple(value) if isinstance(value, list) else value


def format_cli_command(explanation: AnyExplanation) -> str | None:
    """Return the command that computes an explanation again.

    Args:
        explanation: The explanation.

    Returns:
        The command; None if the command line cannot express the inputs, the target or the model.
    """
    settings = {**_collect_load_settings(explanation), **_collect_explain_settings(explanation)}
    inputs = _collect_inputs(explanation)
    target_text = _format_cli_target(explanation)
    if target_text is None or not isinstance(settings.get("answer", ""), str):
        return None
    if "minus" in explanation.provenance or "absolute" in explanation.provenance:
        return None
    if _has_merged_regions(explanation) or _was_loaded_from_objects(explanation) or not _is_typeable(inputs):
        return None
    target = explanation.target
    words = ["clearhead", "explain", "--model", str(explanation.provenance["model"]), "--methods", explanation.method]
    if target_text:
        words += ["--target", target_text]
    if "against" in target:
        words += ["--against", str(target["against"])]
    if "mask" in target:
        words += ["--mask", str(target["mask"])]
    for key, value in settings.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    merge_method = _find_merge_method(explanation)
    if merge_method:
        words.append(f"--{merge_method}")
    if len(inputs) > 1:
        # After "=" a text may begin with a dash; below, after "--".
        return shlex.join([*words, *(f"--{stream}={texts[0]}" for stream, texts in inputs.items())])
    (texts,) = inputs.values()
    if len(texts) > 1:
        words.append(f"--pair={texts[1]}")
    return shlex.join([*words, "--", texts[0]])


def _find_merge_method(explanation: AnyExplanation) -> str | None:
    """The name of the method that merged the units, such as "words"."""
    unit_kinds = (stream.units.kind for stream in explanation.by_stream.values())
    return next((_MERGE_METHOD_NAMES[kind] for kind in unit_kinds if kind in _MERGE_METHOD_NAMES), None)


def _has_merged_regions(explanation: AnyExplanation) -> bool:
    """Whether patches were merged into regions; the regions of the stream "regions" are the model's own input."""
    return any(stream.units.kind == "region" and name != "regions" for name, stream in explanation.by_stream.items())


def _collect_explain_settings(explanation: AnyExplanation) -> dict[str, Any]:
    """The arguments of `explain` that differ from the defaults."""
    settings: dict[str, Any] = {}
    scale = explanation.target.get("scale")
    is_similarity = explanation.prediction.get("label") == "similarity"
    if scale in ("probability", "log-odds") or (scale == "logit" and is_similarity):
        settings["scale"] = scale
    if explanation.provenance.get("profile"):
        settings["profile"] = explanation.provenance["profile"]
    settings |= explanation.provenance.get("input_options") or {}
    if any(stream.per_head is not None for stream in explanation.by_stream.values()):
        settings["per"] = "head"
    if explanation.certificate.get("seed"):
        settings["seed"] = explanation.certificate["seed"]
    return settings


def _collect_load_settings(explanation: AnyExplanation) -> dict[str, Any]:
    """The arguments of `load` that differ from the defaults."""
    settings = dict(explanation.provenance.get("load_options") or {})
    if explanation.certificate.get("dtype") not in (None, "float32"):
        settings["dtype"] = explanation.certificate["dtype"]
    return settings


def _format_load_call(explanation: AnyExplanation) -> str:
    """Write the `clearhead.load` call; a model that was given as an object stays the variable `model`."""
    if _was_loaded_from_objects(explanation):
        return f"clearhead.load((model, processor))  # your {explanation.provenance.get('model_class', 'model')}"
    arguments = "".join(f", {key}={value!r}" for key, value in _collect_load_settings(explanation).items())
    return f"clearhead.load({str(explanation.provenance['model'])!r}{arguments})"


def _was_loaded_from_objects(explanation: AnyExplanation) -> bool:
    """Whether the model was passed as an object: it has the name of its class, and its path is unknown."""
    model = explanation.provenance.get("model")
    return model is None or model == explanation.provenance.get("model_class")


def _collect_inputs(explanation: AnyExplanation) -> dict[str, tuple[str, ...]]:
    """The inputs by name, as texts and file names; an empty tuple for tensors, which have no name."""
    streams = explanation.by_stream
    inputs: dict[str, tuple[str, ...]] = {}
    for name, stream in streams.items():
        if name in ("prefix", "queries") or (name == "other" and "text" in streams):
            continue  # generated by the model, or learned; the second of two texts
        texts = stream.units.texts
        if name == "image":
            is_image = stream.image is not None or stream.units.grid is not None
            inputs["image"] = (IMAGE_PLACEHOLDER,) if is_image else ()
        elif name == "audio":
            inputs["audio"] = (AUDIO_PLACEHOLDER,)
        elif name == "regions":
            inputs["regions"] = ()
        elif _find_target_kinds(explanation) == {"generated_token"}:
            inputs["text"] = texts[:1]
        else:
            second = streams["other"].units.texts if "other" in streams else texts[1:]
            inputs["text"] = (*texts[:1], *second)
    return inputs


def _is_typeable(inputs: dict[str, tuple[str, ...]]) -> bool:
    """Whether all inputs can be typed on the command line."""
    return bool(inputs) and all(inputs.values())


def _format_input_arguments(explanation: AnyExplanation) -> list[str]:
    """The inputs as arguments of `explain`: positional if there is one, else by name."""
    literals = {
        name: "(features, boxes)" if name == "regions" else _format_input_literal(texts)
        for name, texts in _collect_inputs(explanation).items()
    }
    if len(literals) == 1:
        return list(literals.values())
    return [f"{name}={literal}" for name, literal in literals.items()]


def _format_input_literal(texts: tuple[str, ...]) -> str:
    """Return one text, or a tuple of several, as a Python literal; no text gives the variable name `inputs`."""
    if not texts:
        return "inputs"
    if len(texts) == 1:
        return repr(texts[0])
    return repr(texts)


def _format_method_argument(provenance: Any) -> str:
    """The method's name, or a `clearhead.Method` with its options."""
    method = provenance.get("method")
    options = provenance.get("options")
    if not options:
        return repr(method)
    # JSON turns tuples into lists; written as tuples, the snippet is the same before and after.
    arguments = ", ".join(f"{key}={_convert_list_to_tuple(value)!r}" for key, value in options.items())
    return f"clearhead.Method({method!r}, {arguments})"


def _find_target_kinds(explanation: AnyExplanation) -> set[str]:
    """The target kinds of all steps; the kind of a contrast at one position is inferred from its other fields."""
    return {_find_step_kind(explanation, step) for step in explanation.target.get("steps") or [explanation.target]}


def _find_step_kind(explanation: AnyExplanation, step: Mapping[str, Any]) -> str:
    """Return the target kind of a step; that of a contrast at a position is inferred from other fields."""
    kind = str(step.get("kind"))
    if kind != "contrast" or "position" not in step:
        return kind
    if isinstance(step["position"], str):
        return "answer"
    if "box" in step:
        return "detection"
    if str(explanation.provenance.get("model_class")).endswith("ForTokenClassification"):
        return "token_label"
    return "generated_token"


def _format_cli_target(explanation: AnyExplanation) -> str | None:
    """The value of --target; "" if the default means the same, None if the target cannot be typed."""
    target = explanation.target
    kinds = _find_target_kinds(explanation)
    kind = kinds.pop() if len(kinds) == 1 else ""
    if target.get("kind") == "multiple":
        if kind == "detection":
            return _find_common_label(explanation) or ""
        return {"generated_token": "every step", "token_label": "every token", "answer": ""}.get(kind)
    if kind == "generated_token" and _is_next_token(explanation):
        return "" if _is_predicted_token(explanation) else _get_target_label(target)
    if kind in _POSITION_TARGETS:
        label = target["index"] if kind == "answer" else _get_target_label(target)
        return f"{_POSITION_TARGETS[kind][1]} {target['position']} = {label}"
    if kind in ("predicted", "similarity"):
        return ""
    if kind in ("label", "masked_token") or "against" in target:
        return _get_target_label(target)
    return None


def _is_next_token(explanation: AnyExplanation) -> bool:
    """Whether the target is the first token after the prompt, without a given or generated continuation."""
    streams = explanation.by_stream
    if any(len(stream.units.texts) > 1 for stream in streams.values()):
        return False
    if "answer" in _collect_explain_settings(explanation):
        return False
    return "prefix" not in streams or not len(streams["prefix"].units.content_indices())


def _is_predicted_token(explanation: AnyExplanation) -> bool:
    """Whether the target is the predicted token, without a contrast."""
    return "against" not in explanation.target and (
        explanation.target.get("index") == explanation.prediction.get("index")
    )


def _find_common_label(explanation: AnyExplanation) -> str | None:
    """The class that all detected objects have in common, if there is one."""
    labels = {str(step.get("label")) for step in explanation.target.get("steps") or ()}
    return labels.pop() if len(labels) == 1 else None


def _format_python_target(explanation: AnyExplanation) -> str | None:
    """The target as Python source; None for the default target."""
    target = explanation.target
    kinds = _find_target_kinds(explanation)
    if target.get("kind") == "multiple":
        return _format_python_steps(explanation, kinds)
    if kinds == {"generated_token"} and _is_next_token(explanation):
        if "against" in target:
            return f"clearhead.Contrast({target.get('index')!r}, {target['against']!r})"
        return None if _is_predicted_token(explanation) else repr(target.get("index"))
    if "position" in target and len(kinds) == 1 and (kind := kinds.pop()) in _POSITION_TARGETS:
        label = _get_target_label(target)
        # Tokens go by id: the tokenizer may not encode a token's text as the same token.
        if kind in ("generated_token", "answer") and "index" in target:
            label = target["index"]
        against = f", {target['against']!r}" if "against" in target else ""
        return f"clearhead.{_POSITION_TARGETS[kind][0]}({target['position']!r}, {label!r}{against})"
    mask_argument = f"mask_index={target['mask']}" if "mask" in target else ""
    if "against" in target:
        arguments = [repr(_get_target_label(target)), repr(target["against"])]
        if mask_argument:
            arguments.append(mask_argument)
        return f"clearhead.Contrast({', '.join(arguments)})"
    match target.get("kind"):
        case "label":
            return repr(target.get("name"))
        case "masked_token":
            return f"clearhead.MaskedToken({target.get('name')!r}, {mask_argument})"
        case "predicted" if mask_argument:
            return f"clearhead.MaskedToken({mask_argument})"
        case "callable":
            return str(target.get("name"))
    return None


def _format_python_steps(explanation: AnyExplanation, kinds: set[str]) -> str | None:
    """A target of several steps as Python source."""
    if kinds == {"detection"}:
        label = _find_common_label(explanation)
        return None if label is None else repr(label)
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    if kind not in _POSITION_TARGETS:
        return None
    return f"clearhead.{_POSITION_TARGETS[kind][0]}()"


def _get_target_label(target: Any) -> str:
    """The explained label, without the label of a contrast and the token of a token label."""
    if "label" in target:
        return str(target["label"])
    return str(target.get("name")).removesuffix(f" − {target.get('against')}")
