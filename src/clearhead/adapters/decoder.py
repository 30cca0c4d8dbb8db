"""Adapter for decoder-only language models: explains the next token, a given continuation, or generated tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.adapters.base import (
    InputOptions,
    find_module_device,
    register_adapter,
    unbatch_inputs,
    unwrap_base_model,
)
from clearhead.adapters.generation import (
    GenerativeAdapter,
    PromptSample,
    concat_units,
    make_units_from_ids,
    truncate_units,
)
from clearhead.adapters.readers.text import EncodedText
from clearhead.adapters.text import TextAdapter
from clearhead.capture.checks.self_test import RELATIVE_TOLERANCE_BY_DTYPE
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import UnitAxis, Units


@register_adapter
class CausalLMAdapter(GenerativeAdapter, TextAdapter):
    """A prompt and what comes after it are one stream; the row that predicts a word is the one before it.

    `explain("prompt")` explains the next word, `answer="…"` a given continuation (as it stands after the prompt, with
    the space that it starts with), `target=GeneratedToken()` what the model generates. A conversation is a list of
    {"role", "content"}.
    """

    class_suffixes: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")
    decoder_stream = "text"
    sequence_inputs: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
    explains_full_output = False

    @property
    def device(self) -> torch.device:
        """Where the words are looked up: a model may be spread over several devices."""
        return find_module_device(self.embeddings)

    def count_expected_calls(self) -> int | None:
        """The decoder of an encoder–decoder may stand alone."""
        return getattr(self.model.config, "decoder_layers", None) or super().count_expected_calls()

    def is_single_input(self, raw_inputs: list[Any]) -> bool:
        return all(isinstance(message, Mapping) and "role" in message for message in raw_inputs)

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        samples = (
            super().make_samples(raw, options) if isinstance(raw, Mapping) else [self._encode_prompt(raw, options)]
        )
        return [
            self._apply_continuation_options(sample, options) for sample in samples if isinstance(sample, PromptSample)
        ]

    @property
    def supported_inputs(self) -> tuple[str, ...]:
        """The model inputs that are read."""
        return ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")

    def _samples_from_model_inputs(self, raw: Mapping[str, Any], how: InputOptions) -> list[Sample]:
        if {"role", "content"} & raw.keys():
            raise InputError('a conversation is a list of messages, each {"role": …, "content": …}')
        strange = [name for name in raw if name not in self.supported_inputs]
        if strange:
            name = type(self.model).__name__
            raise InputError(
                f"{name} accepts only {', '.join(self.supported_inputs)} as model inputs: leave out "
                f"{', '.join(strange)}"
            )
        samples = super()._samples_from_model_inputs(raw, how)
        if how.keep_padding:
            return samples
        pairs = zip(unbatch_inputs(self, raw), samples, strict=True)
        return [self._matched(inputs, sample) for inputs, sample in pairs if isinstance(sample, PromptSample)]

    def _matched(self, inputs: Mapping[str, Tensor], sample: PromptSample) -> PromptSample:
        """Make the model compute the same logits for a sample as for the left-padded inputs that it was cut out of.

        Padding in front of a prompt moves the positions of models that count them from the first column (GPT-2), and of
        others not (rotary positions are relative, OPT counts by the mask). So both ways are computed and compared.

        Args:
            inputs: One row of the caller's model inputs, without batch axis.
            sample: The same row without padding.

        Returns:
            The sample itself, or the sample with the `position_ids` that the model gives its tokens.

        Raises:
            InputError: If neither gives the logits that the model computes for the padded inputs.
        """
        mask = inputs.get("attention_mask")
        start = 0 if mask is None else int(mask.nonzero()[0])
        if not start:
            return sample
        assert mask is not None
        if len(mask) > self.tokenizer_wrapper.max_positions:
            raise InputError(
                f"the input has {len(mask)} tokens (the first {start} are padding), more than the model's maximum "
                f"({self.tokenizer_wrapper.max_positions}): remove the padding"
            )
        tolerance = RELATIVE_TOLERANCE_BY_DTYPE.get(self.dtype, 1e-4)
        gap = self.padding_gap(inputs, sample, start)
        if gap <= min(tolerance, RELATIVE_TOLERANCE_BY_DTYPE[torch.float32]):
            return sample
        if "position_ids" not in inputs and self.forward_accepts("position_ids"):
            positions = torch.arange(start, start + len(sample.units))
            moved = replace(sample, inputs={**sample.inputs, "position_ids": positions}, counts_padding=True)
            # half precision rounds as much as positions may change: the nearer of the two is taken
            moved_gap = self.padding_gap(inputs, moved, start)
            if moved_gap <= tolerance and not moved_gap >= gap:
                return moved
        if gap <= tolerance:
            return sample
        raise self.padding_error(start, gap)

    def _encode_prompt(self, raw: Any, how: InputOptions) -> PromptSample:
        if isinstance(raw, str):
            text, encoding = raw, {"add_special_tokens": not self._starts_with_bos(raw)}
        elif isinstance(raw, list) and raw and self.is_single_input(raw):
            text, encoding = self._apply_chat_template(raw), {"add_special_tokens": False}
        else:
            raise InputError(
                'expected a prompt, a conversation (a list of {"role": …, "content": …}) or model inputs, but got '
                f"{type(raw).__name__} ({raw!r:.40})"
            )
        # The next word follows the end of a prompt, so a long one loses its beginning.
        side = how.truncation_side or "left"
        tokens = self._strip_end_token(
            self.tokenizer_wrapper.encode_texts((text,), replace(how, truncation_side=side), **encoding), text
        )
        return self._build_sample({"input_ids": tokens.inputs["input_ids"]}, tokens.units, tokens.num_truncated)

    def _starts_with_bos(self, text: str) -> bool:
        """Whether a prompt brings its own start token, as a rendered conversation does: it must not be doubled."""
        start = getattr(self.tokenizer_wrapper.tokenizer, "bos_token", None) or ""
        return start != "" and text.startswith(start)

    def _apply_chat_template(self, messages: list[Any]) -> str:
        if getattr(self.tokenizer_wrapper.tokenizer, "chat_template", None) is None:
            raise InputError("the tokenizer has no chat template: pass the prompt as one text")
        check_messages(messages)
        last = messages[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if last else {"add_generation_prompt": True}
        try:
            return self.tokenizer_wrapper.call_tokenizer("apply_chat_template", messages, tokenize=False, **how)
        except Exception as problem:  # templates raise what they like
            raise InputError(f"the tokenizer's chat template rejects this conversation: {problem}") from None

    def _strip_end_token(self, tokens: EncodedText, prompt: str) -> EncodedText:
        """Without the end token that some tokenizers append: a prompt is to be continued."""
        ids = tokens.inputs["input_ids"].tolist()
        if not self._has_appended_end_token(ids, prompt):
            return tokens
        inputs = {name: part[:-1] for name, part in tokens.inputs.items()}
        return EncodedText(inputs, truncate_units(tokens.units, len(ids) - 1), tokens.num_truncated)

    def _has_appended_end_token(self, ids: Sequence[int], prompt: str) -> bool:
        """Whether the tokenizer has put an end token after the prompt. One that the prompt itself ends with is its own:
        where a conversation is rendered, that may be what makes the model answer."""
        if len(ids) < 2 or ids[-1] not in (
            self.tokenizer_wrapper.get_special_token_id("eos"),
            self.tokenizer_wrapper.get_special_token_id("sep"),
        ):
            return False
        own = self.tokenizer_wrapper.call_tokenizer("encode", prompt, add_special_tokens=False)
        return _count_trailing_repeats(ids) > (_count_trailing_repeats(own) if own and own[-1] == ids[-1] else 0)

    def _remove_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Padding on either side is cut off, so that positions count from the first token."""
        mask = part.get("attention_mask")
        if mask is None:
            return part
        seen = mask.nonzero().flatten().tolist()
        if not seen:
            raise InputError("the attention mask excludes every token: there is nothing to explain")
        if seen != list(range(seen[0], seen[-1] + 1)):
            raise InputError(
                "the attention mask excludes tokens inside the prompt: only padding around it can be masked"
            )
        return {
            name: value[seen[0] : seen[-1] + 1] if value.shape[:1] == mask.shape else value
            for name, value in part.items()
            if name != "attention_mask"  # nothing is hidden any more
        }

    def _build_sample(self, inputs: dict[str, Tensor], units: Units, num_truncated: int = 0) -> PromptSample:
        if "input_ids" in inputs:
            marks = self._find_special_ids()  # once: there may be a hundred thousand tokens
            pairs = zip(units.special, inputs["input_ids"].tolist(), strict=True)
            units = replace(units, special=tuple(special or one in marks for special, one in pairs))
        return PromptSample(
            inputs,
            {self.stream: UnitAxis.concat(units)},
            num_truncated=num_truncated,
            first_predicting_row=len(units) - 1,
        )

    def _find_special_ids(self) -> set[int | None]:
        """Special tokens, those of a conversation among them; unknown and masked words are part of a text."""
        every = set(getattr(self.tokenizer_wrapper.tokenizer, "all_special_ids", ()))
        return (every | self.tokenizer_wrapper.special_ids) - {
            self.tokenizer_wrapper.get_special_token_id("unk"),
            self.tokenizer_wrapper.get_special_token_id("mask"),
        }

    def _apply_continuation_options(self, sample: PromptSample, how: InputOptions) -> PromptSample:
        sample = replace(sample, max_new_tokens=how.max_new_tokens)
        if how.continuation is None:
            return sample
        answer = self.encode_continuation(how.continuation, lambda text: self._encode_after_prompt(sample, text))
        return replace(self.append_continuation(sample, answer), is_user_continuation=True)

    def _encode_after_prompt(self, sample: PromptSample, answer: str) -> list[int]:
        """The ids of a text after the prompt: those that prompt and answer have together, where the prompt's stay."""
        if self.tokenizer_wrapper.tokenizer is None:
            raise InputError(
                "a text for answer= needs the tokenizer: load it together with the model, or pass token ids"
            )
        alone = list(self.tokenizer_wrapper.call_tokenizer("encode", answer, add_special_tokens=False))
        if "input_ids" not in sample.inputs or len(sample.units.texts) != 1 or sample.num_truncated:
            return alone
        prompt, whole = sample.inputs["input_ids"].tolist(), sample.units.texts[0] + answer
        for special in (True, False):
            together = list(self.tokenizer_wrapper.call_tokenizer("encode", whole, add_special_tokens=special))
            if self._has_appended_end_token(together, whole):
                together.pop()
            if together[: len(prompt)] == prompt and len(together) > len(prompt):
                return together[len(prompt) :]
        return alone

    def append_continuation(self, sample: PromptSample, continuation_ids: Sequence[int]) -> PromptSample:
        if not continuation_ids:
            return sample
        continued = {"input_ids", "position_ids"} if sample.counts_padding else {"input_ids"}
        strange = [name for name in sample.inputs if name not in continued]
        if strange:
            raise InputError(f"answer= cannot be appended to {', '.join(strange)}: pass the prompt as input_ids only")
        ids = torch.tensor(continuation_ids)
        start = int(sample.inputs["position_ids"][0]) if sample.counts_padding else 0
        length = len(sample.units) + len(ids)
        if start + length > self.tokenizer_wrapper.max_positions:
            raise InputError(
                f"the prompt and answer= have {start + len(sample.units)} + {len(ids)} tokens, more than the model's "
                f"maximum ({self.tokenizer_wrapper.max_positions}): shorten one of them"
            )
        inputs = {"input_ids": torch.cat([sample.inputs["input_ids"], ids.to(sample.inputs["input_ids"])])}
        if sample.counts_padding:
            inputs["position_ids"] = torch.arange(start, start + length)
        marks = self._find_special_ids()
        units = concat_units(
            sample.units,
            make_units_from_ids(self.tokenizer_wrapper, continuation_ids, [one in marks for one in continuation_ids]),
        )
        return replace(
            sample, inputs=inputs, axes={self.stream: UnitAxis.concat(units)}, continuation_ids=tuple(continuation_ids)
        )

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        """Generated words continue a prompt as `generate` does, which gives padding no positions in any model."""
        if (
            isinstance(sample, PromptSample)
            and sample.counts_padding
            and self._count_tokens_to_generate(sample, target)
        ):
            inputs = {name: part for name, part in sample.inputs.items() if name != "position_ids"}
            sample = replace(sample, inputs=inputs, counts_padding=False)
        return super().resolve_sample(sample, target)

    def generate_ids(self, sample: PromptSample, max_new_tokens: int) -> Sequence[int]:
        if "input_ids" not in sample.inputs:
            raise InputError("text can only be generated from input_ids, not from inputs_embeds")
        prompt = sample.inputs["input_ids"]
        room = self.tokenizer_wrapper.max_positions - len(prompt)
        if room < 1:
            raise InputError(f"the prompt already has {len(prompt)} tokens, the maximum of this model: shorten it")
        said = self.generate_greedily(
            sample, min(max_new_tokens, room), input_ids=prompt, attention_mask=torch.ones_like(prompt)
        )
        answer = said[len(prompt) :]
        return answer[:-1] if answer and answer[-1] in self.find_eos_ids() else answer

    def check_causal(self) -> None:
        if not self.logits_agree([{"input_ids": ids[None]} for ids in self.make_causality_probe()]):
            rounded = any("quantized.dynamic" in type(module).__module__ for module in self.model.modules())
            why = "is config.is_decoder = True missing?"
            if rounded:
                why = "torch's dynamic int8 quantisation rounds activations by the range over the whole text"
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} is not a decoder: its predictions depend on later "
                f"tokens ({why})"
            )

    def choose_targets_per_pass(self, samples: Sequence[Sample]) -> int | None:
        """Some positions are counted by the length of the whole: there each word needs a pass of its own length."""
        return 1 if self.positions_depend_on_batch_length else super().choose_targets_per_pass(samples)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**super().collate(samples), **self.make_forward_kwargs(samples)}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Templates render what is missing as nothing, or as "None"."""
    for i, message in enumerate(messages):
        if not isinstance(message["role"], str) or not ("tool_calls" in message or message.get("content") is not None):
            raise InputError(f'message {i} of a conversation must be {{"role": …, "content": …}}, not {message!r:.60}')


def _count_trailing_repeats(ids: Sequence[int]) -> int:
    """How often the last of these ids stands at their end.

    >>> _count_trailing_repeats([4, 2, 5, 2, 2])
    2
    """
    return next((i for i, one in enumerate(reversed(ids)) if one != ids[-1]), len(ids))
