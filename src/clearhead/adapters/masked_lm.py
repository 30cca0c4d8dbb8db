"""Masked language models: the word at a masked position, of a text alone or beside a picture."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.adapters.base import Readout, register_adapter
from clearhead.adapters.cross_attention import BridgeTowerAdapter
from clearhead.adapters.joint_sequence import ViltAdapter
from clearhead.adapters.text import TextAdapter
from clearhead.adapters.text_with_visual import TextWithVisualAdapter, VisualInput
from clearhead.errors import InputError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import Units


class MaskedTokenAdapter(TextAdapter):
    """The word at a masked position; the position is found, not assumed."""

    masked = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.multi_label = False
        self.mask_token_id = self.tokenizer_wrapper.get_special_token_id("mask")
        if self.mask_token_id is None:  # the configuration of a model's texts may leave it to that of the whole
            self.mask_token_id = getattr(self.model.config, "mask_token_id", None)

    def choose_default_readout(self) -> Readout | None:
        return "mask"

    def make_masked_example_ids(self) -> Int[Tensor, "1 token"]:
        # Not all alike: where every token is the same, any attention gives the same output, and nothing is tested.
        mask, size = self.mask_token_id or 0, len(self.embeddings.weight)
        return torch.tensor([[(mask + step) % size for step in (1, 2, 0, 3, 4)]])

    def find_mask_positions(self, inputs: dict[str, Tensor], num_truncated: int = 0) -> tuple[int, ...]:
        """The masked positions of one text."""
        if self.mask_token_id is None:
            raise InputError("the id of the mask token is not known: load the tokenizer together with the model")
        if "input_ids" not in inputs:
            raise InputError("the masked position cannot be found in inputs_embeds: pass input_ids")
        masks = (inputs["input_ids"] == self.mask_token_id).nonzero().flatten().tolist()
        if not masks:
            token = getattr(self.tokenizer_wrapper.tokenizer, "mask_token", f"id {self.mask_token_id}")
            cut = (
                f" ({num_truncated} tokens were truncated, possibly including the masked one)" if num_truncated else ""
            )
            raise InputError(
                f"the text has no masked position: write {token} where the model should predict a token{cut}"
            )
        return tuple(masks)

    @property
    def is_regression(self) -> bool:
        return False

    def get_mask_position(self, sample: Sample, target: Target) -> int:
        which = target.mask_index or 0
        if target.mask_index is None and len(sample.mask_positions) > 1:
            raise InputError(
                f"the text has {len(sample.mask_positions)} masked positions: "
                "choose one with target=clearhead.MaskedToken(token, mask_index=0)"
            )
        if not -len(sample.mask_positions) <= which < len(sample.mask_positions):
            raise InputError(
                f"mask_index={which}, but the text has {len(sample.mask_positions)} masked positions, counted from 0"
            )
        return sample.mask_positions[which]

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        places = [
            sample.mask_positions[0] if target.function is not None else self.get_mask_position(sample, target)
            for sample, target in zip(samples, targets, strict=True)
        ]
        return output.logits[torch.arange(len(places)) % len(output.logits), places]

    def find_readout_rows(self, sample: Sample, target: Target) -> dict[int, float]:
        if self.readout != "mask":
            return super().find_readout_rows(sample, target)
        if target.function is not None:  # a function of the output may read any of them
            return dict.fromkeys(sample.mask_positions, 1 / len(sample.mask_positions))
        return {self.get_mask_position(sample, target): 1.0}

    def label_index(self, label: str | int) -> int:
        return self.tokenizer_wrapper.find_token_id(label, self.model.config.get_text_config().vocab_size)

    def label_name(self, index: int) -> str:
        return self.tokenizer_wrapper.decode_token(index)


@register_adapter
class MaskedLMAdapter(MaskedTokenAdapter):
    """A text alone."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForMaskedLM",)

    def make_example_input(self) -> Any:
        if self.processor is not None:
            return f"a {self.processor.mask_token} example"
        return {"input_ids": self.make_masked_example_ids()}

    def _build_sample(self, inputs: dict[str, Tensor], units: Units, num_truncated: int = 0) -> Sample:
        return Sample.from_units(
            inputs, units, num_truncated=num_truncated, mask_positions=self.find_mask_positions(inputs, num_truncated)
        )


class MaskedTextWithVisualAdapter(MaskedTokenAdapter, TextWithVisualAdapter):
    """A text beside something that it is about."""

    def build_joint_sample(
        self, inputs: dict[str, Tensor], units: Units, visual: VisualInput, num_truncated: int = 0
    ) -> Sample:
        # mixed into a class that has it
        sample = super().build_joint_sample(inputs, units, visual, num_truncated)  # type: ignore[safe-super]
        return replace(sample, mask_positions=self.find_mask_positions(inputs, num_truncated))

    def make_example_input(self) -> Any:
        return {**super().make_example_input(), "input_ids": self.make_masked_example_ids()}


@register_adapter
class MaskedViltAdapter(MaskedTextWithVisualAdapter, ViltAdapter):
    """Words of a text and patches of a picture in one sequence, the text first."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("ViltForMaskedLM",)


@register_adapter
class MaskedBridgeTowerAdapter(MaskedTextWithVisualAdapter, BridgeTowerAdapter):
    """The head reads the text's stream alone."""

    class_suffixes: ClassVar[tuple[str, ...]] = ("BridgeTowerForMaskedLM",)
    default_labels: ClassVar[dict[int, str]] = {}

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        return {"text": self.find_readout_rows(sample, target), "image": {}}
