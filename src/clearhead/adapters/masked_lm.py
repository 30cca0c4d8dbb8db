"""Masked language models: the word at a masked position, of a text alone or beside a picture."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.adapters.base import Readout, Sample, register_subject
from clearhead.adapters.cross_attention import BridgeTower
from clearhead.adapters.joint_sequence import Vilt
from clearhead.adapters.text import TextSubject
from clearhead.adapters.text_with_visual import Sight, TextBeside
from clearhead.errors import InputError
from clearhead.targets import Target
from clearhead.units import Units


class MaskedWords(TextSubject):
    """The word at a masked position; the position is found, not assumed."""

    masked = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.multi_label = False
        self.mask = self.words.token_id("mask")
        if self.mask is None:  # the configuration of a model's texts may leave it to that of the whole
            self.mask = getattr(self.model.config, "mask_token_id", None)

    def default_readout(self) -> Readout | None:
        return "mask"

    def ids_with_mask(self) -> Int[Tensor, "1 token"]:
        # Not all alike: where every token is the same, any attention gives the same output, and nothing is tested.
        mask, size = self.mask or 0, len(self.embeddings.weight)
        return torch.tensor([[(mask + step) % size for step in (1, 2, 0, 3, 4)]])

    def masks_in(self, inputs: dict[str, Tensor], dropped: int = 0) -> tuple[int, ...]:
        """The masked positions of one text."""
        if self.mask is None:
            raise InputError("the id of the mask token is not known: load the tokenizer together with the model")
        if "input_ids" not in inputs:
            raise InputError("the masked position cannot be found in inputs_embeds: give input_ids")
        masks = (inputs["input_ids"] == self.mask).nonzero().flatten().tolist()
        if not masks:
            token = getattr(self.words.tokenizer, "mask_token", f"id {self.mask}")
            cut = f" ({dropped} tokens were cut off, the masked one may be among them)" if dropped else ""
            raise InputError(f"no masked position: put {token} where the model should guess a word{cut}")
        return tuple(masks)

    @property
    def regression(self) -> bool:
        return False

    def position(self, sample: Sample, target: Target) -> int:
        which = target.mask or 0
        if target.mask is None and len(sample.masks) > 1:
            raise InputError(
                f"the text has {len(sample.masks)} masked positions: "
                "choose one with target=clearhead.MaskedWord(word, mask=0)"
            )
        if not -len(sample.masks) <= which < len(sample.masks):
            raise InputError(f"mask={which}, but the text has {len(sample.masks)} masked positions, counted from 0")
        return sample.masks[which]

    def scores(self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]) -> Float[Tensor, "batch label"]:
        places = [
            sample.masks[0] if target.custom is not None else self.position(sample, target)
            for sample, target in zip(samples, targets, strict=True)
        ]
        return output.logits[torch.arange(len(places)) % len(output.logits), places]

    def rows(self, sample: Sample, target: Target) -> dict[int, float]:
        if self.readout != "mask":
            return super().rows(sample, target)
        if target.custom is not None:  # a function of the output may read any of them
            return dict.fromkeys(sample.masks, 1 / len(sample.masks))
        return {self.position(sample, target): 1.0}

    def label_index(self, label: str | int) -> int:
        return self.words.word_id(label, self.model.config.get_text_config().vocab_size)

    def label_name(self, index: int) -> str:
        return self.words.word(index)


@register_subject
class MaskedLanguageModel(MaskedWords):
    """A text alone."""

    endings: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)

    def example(self) -> Any:
        if self.processor is not None:
            return f"a {self.processor.mask_token} example"
        return {"input_ids": self.ids_with_mask()}

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Sample:
        return Sample.of(inputs, units, dropped=dropped, masks=self.masks_in(inputs, dropped))


class MaskedBeside(MaskedWords, TextBeside):
    """A text beside something that it is about."""

    def joined_sample(self, inputs: dict[str, Tensor], units: Units, sight: Sight, dropped: int = 0) -> Sample:
        # mixed into a class that has it
        sample = super().joined_sample(inputs, units, sight, dropped)  # type: ignore[safe-super]
        return replace(sample, masks=self.masks_in(inputs, dropped))

    def example(self) -> Any:
        return {**super().example(), "input_ids": self.ids_with_mask()}


@register_subject
class MaskedVilt(MaskedBeside, Vilt):
    """Words of a text and patches of a picture in one sequence, the text first."""

    endings: ClassVar[tuple[str, ...]] = ("ViltForMaskedLM",)


@register_subject
class MaskedBridgeTower(MaskedBeside, BridgeTower):
    """The head reads the text's stream alone."""

    endings: ClassVar[tuple[str, ...]] = ("BridgeTowerForMaskedLM",)
    outputs: ClassVar[dict[int, str]] = {}

    def readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.rows(sample, target), "image": {}}
