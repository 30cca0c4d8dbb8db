"""Models that choose one of several texts: why this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import How, Readout, Sample, register_subject, split_mapping
from clearhead.adapters.text import TextSubject
from clearhead.adapters.token_heads import TextHead
from clearhead.errors import InputError
from clearhead.targets import Contrast, Label, Predicted, Target


@dataclass
class Choice(Sample):
    """One of several texts, with all of them and their scores."""

    texts: tuple[Sample, ...] = ()
    logits: Float[Tensor, "choice"] = field(default_factory=lambda: torch.empty(0))
    chosen: int = 0


@register_subject
class MultipleChoice(TextHead):
    """Which of several continuations fits: (beginning, [choice, choice, …]), or model inputs of batch × choice × token.

    Each choice is a text of its own, and its score depends on that text alone: so the text of the choice that is asked
    about is what is explained (by default the one that the model chooses). Where the scores of the other choices count
    (probabilities, contrasts), they are held fixed.
    """

    endings: ClassVar[tuple[str, ...]] = ("ForMultipleChoice",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.labels, self.multi_label = {}, False

    @property
    def regression(self) -> bool:
        return False

    def default_readout(self) -> Readout | None:
        """Some summarise a text in a way that they are told, the last token by default."""
        kinds = [
            getattr(m, "summary_type", None) for m in self.model.modules() if "SequenceSummary" in type(m).__name__
        ]
        return kinds[0] if kinds and kinds[0] in ("first", "last", "mean") else super().default_readout()

    def example(self) -> Any:
        if self.processor is not None:
            return "a small", ["example", "apple"]
        return {"input_ids": torch.arange(1, 9).reshape(1, 2, 4) % self.model.config.vocab_size}

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [self._of_choices(part, how) for part in split_mapping(self, raw)]
        fits = isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[0], str) and isinstance(raw[1], list | tuple)
        if not fits or not all(isinstance(choice, str) for choice in raw[1]):
            raise InputError("expected a text and its choices, (text, [choice, choice, …]), or model inputs")
        if not raw[1]:
            raise InputError("there is no choice to explain: the list of choices is empty")
        texts = [TextSubject.samples(self, (raw[0], choice), how)[0] for choice in raw[1]]
        return [self._asked(texts)]

    def _of_choices(self, part: dict[str, Tensor], how: How) -> Sample:
        flat = [name for name, value in part.items() if value.dim() < 2]
        if flat:
            raise InputError(f"model inputs must be batch × choice × token, but {', '.join(flat)} has fewer axes")
        count = len(next(iter(part.values())))
        return self._asked([self._given({k: value[[i]] for k, value in part.items()}, how)[0] for i in range(count)])

    def _asked(self, texts: list[Sample]) -> Choice:
        logits = torch.stack([self.look(text).logits[0, 0] for text in texts])
        return _choice(tuple(texts), logits, int(logits.argmax()))

    def completed(self, sample: Sample, target: Target) -> Sample:
        assert isinstance(sample, Choice)
        match target.wanted:
            case Label(label) | Contrast(int() | str() as label, _):
                sample = _choice(sample.texts, sample.logits, self._index(label, len(sample.texts)))
        # A summary by the last token or the mean does not leave padding out: only texts of one length share a batch.
        return sample if self.readout == "first" else replace(sample, alike=(len(sample.units),))

    def steps(self, sample: Sample, target: Target) -> list[Target]:
        assert isinstance(sample, Choice)
        count = len(sample.texts)
        match target.wanted:
            case Contrast(_, other):
                return [Target(Contrast(sample.chosen, self._index(other, count)), target.scale)]
            case Predicted() | Label():
                return [Target(Label(sample.chosen), target.scale)]
            case _ if target.custom is not None:
                return [target]
        raise InputError(f"{target.wanted!r} is no target of {type(self.model).__name__}: give the number of a choice")

    def _index(self, label: str | int, count: int) -> int:
        number = self.label_index(label)
        if not -count <= number < count:
            raise InputError(f"choice {label} does not exist: there are {count}, counted from 0")
        return number % count

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One choice for each sample, so that no text shares a row with another."""
        return {name: part[:, None] for name, part in super().collate(samples).items()}

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *one unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return {self.stream: only.reshape(len(only), *only.shape[-2:])}

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        size, rows = len(output.logits), []
        most = max(len(sample.logits) for sample in samples if isinstance(sample, Choice))
        for i, sample in enumerate(samples):
            assert isinstance(sample, Choice)
            row = torch.cat([sample.logits, sample.logits.new_full((most - len(sample.logits),), -torch.inf)])
            own = torch.arange(most, device=row.device) == sample.chosen
            rows.append(torch.where(own, output.logits[i % size, 0], row))
        return torch.stack(rows)

    def label_index(self, label: str | int) -> int:
        number = str(label).removeprefix("choice ")
        if not number.lstrip("-").isdigit():
            raise InputError(f"choice {label!r} does not exist: give its number, counted from 0")
        return int(number)

    def label_name(self, index: int) -> str:
        return f"choice {index}"


def _choice(texts: tuple[Sample, ...], logits: Float[Tensor, "choice"], chosen: int) -> Choice:
    """All choices, one of them asked about."""
    one = texts[chosen]
    return Choice(one.inputs, one.axes, one.dropped, texts=texts, logits=logits, chosen=chosen)
