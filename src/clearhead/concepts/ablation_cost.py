"""What a model loses on its own task when directions are removed from its layers: the same inputs, before and after."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from clearhead.adapters.base import How
from clearhead.adapters.masked_lm import MaskedLanguageModel
from clearhead.capture.session import at_rest
from clearhead.concepts.directions import Direction
from clearhead.concepts.hidden_states import check_several
from clearhead.concepts.removal import Map, removed
from clearhead.engine.batching import followed
from clearhead.errors import InputError
from clearhead.explainer import Explainer
from clearhead.stats import Interval, interval

#: What is removed at which layer.
Maps = Mapping[int, Direction | Map]
Values = Float[np.ndarray, "input"]


def cost_at_masks(
    ex: Explainer,
    texts: Sequence[str],
    without: Maps,
    share: float = 0.15,
    seed: int = 0,
    progress: Any = False,
) -> dict[str, Interval]:
    """Of a masked language model: the loss at masked tokens (always the same ones), before, after, and what it grew."""
    if not isinstance(ex.subject, MaskedLanguageModel):
        raise InputError(f"{ex.subject.name} guesses no masked words: its task needs labels, cost_with_labels(…)")
    check_several(texts)
    given = [text for text in texts if text.strip()]
    if not given:
        raise InputError("there is no text to measure the cost on")

    def losses(text: str) -> list[float]:
        return [_loss_at_masks(ex, text, share, seed)]

    before, after = _both(ex, given, without, losses, progress)
    return _compared({"loss": (before[:, 0], after[:, 0])})


def cost_with_labels(
    ex: Explainer, inputs: Sequence[Any], labels: Sequence[str | int], without: Maps, progress: Any = False
) -> dict[str, Interval]:
    """Of a classifier: accuracy and cross-entropy on labelled inputs, before, after, and the difference."""
    check_several(inputs)
    if len(inputs) != len(labels) or not inputs:
        raise InputError(f"each input has one label, but there are {len(inputs)} inputs and {len(labels)} labels")
    pairs = [(raw, ex.subject.label_index(label)) for raw, label in zip(inputs, labels, strict=True)]

    def measured(pair: tuple[Any, int]) -> list[float]:
        raw, label = pair
        (sample,) = ex.subject.samples(raw, How())
        logits = ex.subject.model(**ex.subject.collate([sample])).logits[0].double()
        if logits.dim() != 1 or len(logits) < 2:
            raise InputError(f"{ex.subject.name} has no classes to be right about")
        right = float(int(logits.argmax()) == label)
        return [right, float(-logits.log_softmax(-1)[label])]

    before, after = _both(ex, pairs, without, measured, progress)
    return _compared({name: (before[:, i], after[:, i]) for i, name in enumerate(("accuracy", "loss"))})


@torch.no_grad()
def _both(ex: Explainer, inputs: Sequence[Any], without: Maps, measured: Any, progress: Any) -> list[Any]:
    found = []
    for maps in (None, without):
        with at_rest(ex.subject.model), nullcontext() if maps is None else removed(ex, maps):
            found.append(np.array([measured(raw) for raw in followed(list(inputs), progress)]))
    return found


def _compared(values: Mapping[str, tuple[Values, Values]]) -> dict[str, Interval]:
    found = {}
    for name, (before, after) in values.items():
        for when, own in (("before", before), ("after", after), ("difference", after - before)):
            found[f"{name} {when}"] = interval(own)
    return found


def _loss_at_masks(ex: Explainer, text: str, share: float, seed: int) -> float:
    subject = ex.subject
    assert isinstance(subject, MaskedLanguageModel) and subject.mask is not None
    tokens = subject.words.read((text,), How())
    ids = tokens.inputs["input_ids"]
    inside = np.array([i for i, special in enumerate(tokens.units.special) if not special])
    rng = np.random.default_rng([seed, len(text)])
    chosen = rng.permutation(inside)[: max(1, round(share * len(inside)))]
    given = {name: part[None].to(subject.device) for name, part in tokens.inputs.items() if subject.accepts(name)}
    given["input_ids"] = given["input_ids"].clone()
    given["input_ids"][0, chosen] = subject.mask
    logits = subject.model(**given).logits[0, chosen].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[chosen].to(logits.device)))
