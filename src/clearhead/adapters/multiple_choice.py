"""Models that choose one of several texts: why this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import InputOptions, Readout, register_adapter, unbatch_inputs
from clearhead.adapters.text import TextAdapter
from clearhead.adapters.token_heads import TextHeadAdapter
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.targets import Contrast, Label, Predicted, Target, describe_spec


@dataclass
class MultipleChoiceSample(Sample):
    """One of several texts, with all of them and their scores."""

    choice_samples: tuple[Sample, ...] = ()
    choice_logits: Float[Tensor, "choice"] = field(default_factory=lambda: torch.empty(0))
    choice_index: int = 0


@register_adapter
class MultipleChoiceAdapter(TextHeadAdapter):
    """Which of several continuations fits: (beginning, [choice, choice, …]), or model inputs of batch × choice × token.

    Each choice is a text of its own, and its score depends on that text alone: so the text of the choice that is asked
    about is what is explained (by default the one that the model chooses). Where the scores of the other choices count
    (probabilities, contrasts), they are held fixed.
    """

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForMultipleChoice",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.labels, self.multi_label = {}, False

    @property
    def is_regression(self) -> bool:
        return False

    def choose_default_readout(self) -> Readout | None:
        """Some summarise a text in a way that they are told, the last token by default."""
        kinds = [
            getattr(m, "summary_type", None) for m in self.model.modules() if "SequenceSummary" in type(m).__name__
        ]
        return kinds[0] if kinds and kinds[0] in ("first", "last", "mean") else super().choose_default_readout()

    def make_example_input(self) -> Any:
        if self.processor is not None:
            return "a small", ["example", "apple"]
        return {"input_ids": torch.arange(1, 9).reshape(1, 2, 4) % self.model.config.vocab_size}

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            return [self._sample_from_model_inputs(part, options) for part in unbatch_inputs(self, raw)]
        fits = isinstance(raw, tuple) and len(raw) == 2 and isinstance(raw[0], str) and isinstance(raw[1], list | tuple)
        if not fits or not all(isinstance(choice, str) for choice in raw[1]):
            raise InputError("expected a text and its choices, (text, [choice, choice, …]), or model inputs")
        if not raw[1]:
            raise InputError("there is no choice to explain: the list of choices is empty")
        texts = [TextAdapter.make_samples(self, (raw[0], choice), options)[0] for choice in raw[1]]
        return [self._score_choices(texts)]

    def _sample_from_model_inputs(self, part: dict[str, Tensor], how: InputOptions) -> Sample:
        flat = [name for name, value in part.items() if value.dim() < 2]
        if flat:
            raise InputError(f"model inputs must be batch × choice × token, but {', '.join(flat)} has fewer axes")
        count = len(next(iter(part.values())))
        return self._score_choices(
            [
                self._samples_from_model_inputs({k: value[[i]] for k, value in part.items()}, how)[0]
                for i in range(count)
            ]
        )

    def _score_choices(self, texts: list[Sample]) -> MultipleChoiceSample:
        logits = torch.stack([self.session.forward(self.collate([text])).logits[0, 0] for text in texts])
        return _make_choice_sample(tuple(texts), logits, int(logits.argmax()))

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        assert isinstance(sample, MultipleChoiceSample)
        match target.spec:
            case Label(label) | Contrast(int() | str() as label, _):
                sample = _make_choice_sample(
                    sample.choice_samples, sample.choice_logits, self._resolve_choice(label, len(sample.choice_samples))
                )
        # A summary by the last token or the mean does not leave padding out: only texts of one length share a batch.
        return sample if self.readout == "first" else replace(sample, batch_key=(len(sample.units),))

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        assert isinstance(sample, MultipleChoiceSample)
        count = len(sample.choice_samples)
        match target.spec:
            case Contrast(_, other):
                return [Target(Contrast(sample.choice_index, self._resolve_choice(other, count)), target.scale)]
            case Predicted() | Label():
                return [Target(Label(sample.choice_index), target.scale)]
            case _ if target.function is not None:
                return [target]
        raise InputError(
            f"{describe_spec(target.spec)} is not a target of {type(self.model).__name__}: pass the index of a choice"
        )

    def _resolve_choice(self, label: str | int, count: int) -> int:
        number = self.label_index(label)
        if not -count <= number < count:
            raise InputError(f"choice {label} does not exist: there are {count} choices, counted from 0")
        return number % count

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """One choice for each sample, so that no text shares a row with another."""
        return {name: part[:, None] for name, part in super().collate(samples).items()}

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *one unit feature']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        (only,) = vectors.values()
        return {self.stream: only.reshape(len(only), *only.shape[-2:])}

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        size, rows = len(output.logits), []
        most = max(len(sample.choice_logits) for sample in samples if isinstance(sample, MultipleChoiceSample))
        for i, sample in enumerate(samples):
            assert isinstance(sample, MultipleChoiceSample)
            row = torch.cat(
                [sample.choice_logits, sample.choice_logits.new_full((most - len(sample.choice_logits),), -torch.inf)]
            )
            own = torch.arange(most, device=row.device) == sample.choice_index
            rows.append(torch.where(own, output.logits[i % size, 0], row))
        return torch.stack(rows)

    def label_index(self, label: str | int) -> int:
        number = str(label).removeprefix("choice ")
        if not number.lstrip("-").isdigit():
            raise InputError(f"choice {label!r} does not exist: use its index, counted from 0")
        return int(number)

    def label_name(self, index: int) -> str:
        return f"choice {index}"


def _make_choice_sample(
    texts: tuple[Sample, ...], logits: Float[Tensor, "choice"], chosen: int
) -> MultipleChoiceSample:
    """All choices, one of them asked about."""
    one = texts[chosen]
    return MultipleChoiceSample(
        one.inputs, one.axes, one.num_truncated, choice_samples=texts, choice_logits=logits, choice_index=chosen
    )
