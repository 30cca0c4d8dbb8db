"""Decoders: the next word, a given continuation, or the words that the model generates, one step after another."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.adapters.base import How, Sample, base_model, device_of, register_subject, split_mapping
from clearhead.adapters.generation import Answered, Answering, first_units, followed, said_units
from clearhead.adapters.readers.text import Tokens
from clearhead.adapters.text import TextSubject
from clearhead.capture.checks.self_test import TOLERANCE
from clearhead.errors import InputError, Refusal
from clearhead.targets import Target
from clearhead.units import Axis, Units


@register_subject
class Decoder(Answering, TextSubject):
    """A prompt and what comes after it are one stream; the row that predicts a word is the one before it.

    `explain("prompt")` explains the next word, `answer="…"` a given continuation (as it stands after the prompt, with
    the space that it starts with), `target=Generated()` what the model generates. A conversation is a list of
    {"role", "content"}.
    """

    endings: ClassVar[tuple[str, ...]] = ("ForCausalLM", "LMHeadModel", "GenerationDecoder")
    speaking = "text"
    along: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
    answers_whole = False

    @property
    def device(self) -> torch.device:
        """Where the words are looked up: a model may be spread over several devices."""
        return device_of(self.embeddings)

    def expected_calls(self) -> int | None:
        """The decoder of an encoder–decoder may stand alone."""
        return getattr(self.model.config, "decoder_layers", None) or super().expected_calls()

    def is_one(self, raws: list[Any]) -> bool:
        return all(isinstance(message, Mapping) and "role" in message for message in raws)

    def samples(self, raw: Any, how: How) -> list[Sample]:
        samples = super().samples(raw, how) if isinstance(raw, Mapping) else [self._prompt(raw, how)]
        return [self._answered(sample, how) for sample in samples if isinstance(sample, Answered)]

    @property
    def known(self) -> tuple[str, ...]:
        """The model inputs that are read."""
        return ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")

    def _given(self, raw: Mapping[str, Any], how: How) -> list[Sample]:
        if {"role", "content"} & raw.keys():
            raise InputError('a conversation is a list of messages, each {"role": …, "content": …}')
        strange = [name for name in raw if name not in self.known]
        if strange:
            name = type(self.model).__name__
            raise InputError(f"{name} is explained by {', '.join(self.known)}: leave out {', '.join(strange)}")
        samples = super()._given(raw, how)
        if how.padding:
            return samples
        pairs = zip(split_mapping(self, raw), samples, strict=True)
        return [self._matched(inputs, sample) for inputs, sample in pairs if isinstance(sample, Answered)]

    def _matched(self, inputs: Mapping[str, Tensor], sample: Answered) -> Answered:
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
        if len(mask) > self.words.positions:
            raise InputError(
                f"{len(mask)} tokens, {start} of them padding in front, are more than the model takes "
                f"({self.words.positions}): cut the padding off"
            )
        tolerance = TOLERANCE.get(self.dtype, 1e-4)
        gap = self.padding_gap(inputs, sample, start)
        if gap <= min(tolerance, TOLERANCE[torch.float32]):
            return sample
        if "position_ids" not in inputs and self.accepts("position_ids"):
            positions = torch.arange(start, start + len(sample.units))
            moved = replace(sample, inputs={**sample.inputs, "position_ids": positions}, counts_padding=True)
            # half precision rounds as much as positions may change: the nearer of the two is taken
            moved_gap = self.padding_gap(inputs, moved, start)
            if moved_gap <= tolerance and not moved_gap >= gap:
                return moved
        if gap <= tolerance:
            return sample
        raise self.padding_error(start, gap)

    def _prompt(self, raw: Any, how: How) -> Answered:
        if isinstance(raw, str):
            text, encoding = raw, {"add_special_tokens": not self._begins(raw)}
        elif isinstance(raw, list) and raw and self.is_one(raw):
            text, encoding = self._rendered(raw), {"add_special_tokens": False}
        else:
            raise InputError(
                'expected a prompt, a conversation (a list of {"role": …, "content": …}) or model inputs, but got '
                f"{type(raw).__name__} ({raw!r:.40})"
            )
        # The next word follows the end of a prompt, so a long one loses its beginning.
        side = how.truncation_side or "left"
        tokens = self._open(self.words.read((text,), replace(how, truncation_side=side), **encoding), text)
        return self._sample({"input_ids": tokens.inputs["input_ids"]}, tokens.units, tokens.dropped)

    def _begins(self, text: str) -> bool:
        """Whether a prompt brings its own start token, as a rendered conversation does: it must not be doubled."""
        start = getattr(self.words.tokenizer, "bos_token", None) or ""
        return start != "" and text.startswith(start)

    def _rendered(self, messages: list[Any]) -> str:
        if getattr(self.words.tokenizer, "chat_template", None) is None:
            raise InputError("the tokenizer has no chat template: give the prompt as one text")
        check_messages(messages)
        last = messages[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if last else {"add_generation_prompt": True}
        try:
            return self.words.ask("apply_chat_template", messages, tokenize=False, **how)
        except Exception as problem:  # templates raise what they like
            raise InputError(f"the tokenizer's chat template refuses this conversation: {problem}") from None

    def _open(self, tokens: Tokens, prompt: str) -> Tokens:
        """Without the end token that some tokenizers append: a prompt is to be continued."""
        ids = tokens.inputs["input_ids"].tolist()
        if not self._closed(ids, prompt):
            return tokens
        inputs = {name: part[:-1] for name, part in tokens.inputs.items()}
        return Tokens(inputs, first_units(tokens.units, len(ids) - 1), tokens.dropped)

    def _closed(self, ids: Sequence[int], prompt: str) -> bool:
        """Whether the tokenizer has put an end token after the prompt. One that the prompt itself ends with is its own:
        where a conversation is rendered, that may be what makes the model answer."""
        if len(ids) < 2 or ids[-1] not in (self.words.token_id("eos"), self.words.token_id("sep")):
            return False
        own = self.words.ask("encode", prompt, add_special_tokens=False)
        return _ending(ids) > (_ending(own) if own and own[-1] == ids[-1] else 0)

    def _without_padding(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Padding on either side is cut off, so that positions count from the first token."""
        mask = part.get("attention_mask")
        if mask is None:
            return part
        seen = mask.nonzero().flatten().tolist()
        if not seen:
            raise InputError("the attention mask hides every token: there is nothing to explain")
        if seen != list(range(seen[0], seen[-1] + 1)):
            raise InputError("the attention mask hides tokens inside the prompt: only padding around it can be hidden")
        return {
            name: value[seen[0] : seen[-1] + 1] if value.shape[:1] == mask.shape else value
            for name, value in part.items()
            if name != "attention_mask"  # nothing is hidden any more
        }

    def _sample(self, inputs: dict[str, Tensor], units: Units, dropped: int = 0) -> Answered:
        if "input_ids" in inputs:
            marks = self._marks()  # once: there may be a hundred thousand tokens
            pairs = zip(units.special, inputs["input_ids"].tolist(), strict=True)
            units = replace(units, special=tuple(special or one in marks for special, one in pairs))
        return Answered(inputs, {self.stream: Axis.of(units)}, dropped=dropped, first=len(units) - 1)

    def _marks(self) -> set[int | None]:
        """Special tokens, those of a conversation among them; unknown and masked words are part of a text."""
        every = set(getattr(self.words.tokenizer, "all_special_ids", ()))
        return (every | self.words.outside) - {self.words.token_id("unk"), self.words.token_id("mask")}

    def _answered(self, sample: Answered, how: How) -> Answered:
        sample = replace(sample, most=how.max_new_tokens)
        if how.answer is None:
            return sample
        answer = self.answer_ids(how.answer, lambda text: self._continuation(sample, text))
        return replace(self.with_answer(sample, answer), given=True)

    def _continuation(self, sample: Answered, answer: str) -> list[int]:
        """The ids of a text after the prompt: those that prompt and answer have together, where the prompt's stay."""
        if self.words.tokenizer is None:
            raise InputError("a text needs the tokenizer: load it together with the model, or give the answer's ids")
        alone = list(self.words.ask("encode", answer, add_special_tokens=False))
        if "input_ids" not in sample.inputs or len(sample.units.texts) != 1 or sample.dropped:
            return alone
        prompt, whole = sample.inputs["input_ids"].tolist(), sample.units.texts[0] + answer
        for special in (True, False):
            together = list(self.words.ask("encode", whole, add_special_tokens=special))
            if self._closed(together, whole):
                together.pop()
            if together[: len(prompt)] == prompt and len(together) > len(prompt):
                return together[len(prompt) :]
        return alone

    def with_answer(self, sample: Answered, answer: Sequence[int]) -> Answered:
        if not answer:
            return sample
        continued = {"input_ids", "position_ids"} if sample.counts_padding else {"input_ids"}
        strange = [name for name in sample.inputs if name not in continued]
        if strange:
            raise InputError(f"an answer cannot be put after {', '.join(strange)}: give the prompt as input_ids alone")
        ids = torch.tensor(answer)
        start = int(sample.inputs["position_ids"][0]) if sample.counts_padding else 0
        length = len(sample.units) + len(ids)
        if start + length > self.words.positions:
            raise InputError(
                f"prompt and answer have {start + len(sample.units)} + {len(ids)} tokens, more than the model takes "
                f"({self.words.positions}): shorten one"
            )
        inputs = {"input_ids": torch.cat([sample.inputs["input_ids"], ids.to(sample.inputs["input_ids"])])}
        if sample.counts_padding:
            inputs["position_ids"] = torch.arange(start, start + length)
        marks = self._marks()
        units = followed(sample.units, said_units(self.words, answer, [one in marks for one in answer]))
        return replace(sample, inputs=inputs, axes={self.stream: Axis.of(units)}, answer=tuple(answer))

    def completed(self, sample: Sample, target: Target) -> Sample:
        """Generated words continue a prompt as `generate` does, which gives padding no positions in any model."""
        if isinstance(sample, Answered) and sample.counts_padding and self._asked(sample, target):
            inputs = {name: part for name, part in sample.inputs.items() if name != "position_ids"}
            sample = replace(sample, inputs=inputs, counts_padding=False)
        return super().completed(sample, target)

    def say(self, sample: Answered, count: int) -> Sequence[int]:
        if "input_ids" not in sample.inputs:
            raise InputError("words can be generated after input_ids only, not after inputs_embeds")
        prompt = sample.inputs["input_ids"]
        room = self.words.positions - len(prompt)
        if room < 1:
            raise InputError(f"the prompt fills all {len(prompt)} tokens that the model takes: shorten it")
        said = self.generate(sample, min(count, room), input_ids=prompt, attention_mask=torch.ones_like(prompt))
        answer = said[len(prompt) :]
        return answer[:-1] if answer and answer[-1] in self.ends() else answer

    def check_causal(self) -> None:
        if not self.compared([{"input_ids": ids[None]} for ids in self.probe()]):
            rounded = any("quantized.dynamic" in type(module).__module__ for module in self.model.modules())
            why = "is config.is_decoder = True missing?"
            if rounded:
                why = "torch's dynamic int8 rounds activations by the range of the whole text"
            raise Refusal(
                f"{type(base_model(self.model)).__name__} is no decoder: its words depend on those after them ({why})"
            )

    def together(self, samples: Sequence[Sample]) -> int | None:
        """Some positions are counted by the length of the whole: there each word needs a pass of its own length."""
        return 1 if self.counts_by_length else super().together(samples)

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**super().collate(samples), **self.settings(samples)}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Templates render what is missing as nothing, or as "None"."""
    for i, message in enumerate(messages):
        if not isinstance(message["role"], str) or not ("tool_calls" in message or message.get("content") is not None):
            raise InputError(f'message {i} of a conversation must be {{"role": …, "content": …}}, not {message!r:.60}')


def _ending(ids: Sequence[int]) -> int:
    """How often the last of these ids stands at their end.

    >>> _ending([4, 2, 5, 2, 2])
    2
    """
    return next((i for i, one in enumerate(reversed(ids)) if one != ids[-1]), len(ids))
