"""Image–text decoders: one sequence of words in which placeholder tokens stand for the patches of a picture."""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from itertools import groupby
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.adapters.base import Given, How, Sample, base_model, class_names, register_subject
from clearhead.adapters.decoder import Decoder, check_messages
from clearhead.adapters.generation import Answered, first_units, followed, said_units
from clearhead.adapters.readers.image import open_picture
from clearhead.adapters.readers.image_tokens import Layout, OnePicture, OneTile, Rows, Unplaced
from clearhead.adapters.readers.text import Words, padded
from clearhead.capture.checks.self_test import expected_calls
from clearhead.capture.session import lock_of
from clearhead.errors import InputError, Refusal
from clearhead.methods.base import REGISTRY
from clearhead.targets import Target
from clearhead.units import Axis, Units

#: The families that are explained, and how each lays out a picture.
_LAYOUTS: dict[str, type[Layout]] = {
    **dict.fromkeys(("Llava", "VipLlava", "PaliGemma", "Gemma3", "InternVL", "Mistral3"), OnePicture),
    **dict.fromkeys(("AyaVision", "Cohere2Vision", "DeepseekVL", "LightOnOcr"), OnePicture),
    **dict.fromkeys(("Idefics3", "SmolVLM"), OneTile),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v", "Glm46V", "GlmOcr"), Rows),
    "Idefics2": Unplaced,
}
#: Image–text decoders whose answer would be wrong, and why.
_TILES = "it cuts a picture into tiles and puts newlines between their patches, whose places are not known yet"
_ASIDE = "pictures do not stand in its sequence: its layers look at them through cross-attention"
_QUERIES = "a Q-Former's learned queries stand for the picture, and look at it and at the text on a way of their own"
_REFUSED = {
    **dict.fromkeys(("LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Ovis2", "PerceptionLM"), _TILES),
    **dict.fromkeys(("Mllama",), _ASIDE),
    **dict.fromkeys(("Blip2", "InstructBlip", "InstructBlipVideo"), _QUERIES),
    "VideoLlava": "films are not explained yet",
    "Kosmos2": "its tokens are learned queries that each look at the whole picture, so none has a place in it",
    "Chameleon": "it turns pictures into words of a code book by hard choices, which have no gradients",
    "Emu3": "it turns pictures into words of a code book by hard choices, which have no gradients",
}
_ENDING = "ForConditionalGeneration"


@register_subject
class ImageTextDecoder(Decoder):
    """A picture, a prompt and what comes after them are one sequence: `explain(text="USER: <image> …", image=…)`.

    Relevance is that over the decoder's own sequence, and a patch is the token that holds its place there (four merged
    patches share one in Qwen2-VL). By then the tower that sees the picture has mixed patches with each other; its calls
    are not followed. Gradients of the input go further, to the pixels of each patch through the tower.

    Targets are those of decoders. A conversation is a list of {"role", "content"}; a picture that its content does not
    place stands before the text of the first message of the user.
    """

    endings: ClassVar[tuple[str, ...]] = tuple(f"{name}{_ENDING}" for name in (*_LAYOUTS, *_REFUSED))
    stream = "joint"
    speaking = "joint"
    takes: ClassVar[tuple[str, ...]] = ("text", "image")
    processor_class = "AutoProcessor"
    along: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids")

    def __post_init__(self) -> None:
        kinds = [name.removesuffix(_ENDING) for name in class_names(self.model) if name.endswith(_ENDING)]
        kind = next((kind for kind in kinds if kind in _LAYOUTS or kind in _REFUSED), "")
        if kind not in _LAYOUTS:
            why = _REFUSED.get(kind, "how it lays out a picture is not known")
            raise Refusal(f"{kind or kinds[0]}{_ENDING} cannot be explained: {why}")
        self.reader = copy.deepcopy(self.processor)  # to call a processor is to change its tokenizer's settings
        whole, self.processor = self.processor, getattr(self.processor, "tokenizer", self.processor)
        super().__post_init__()
        self.processor = whole
        config = self.model.config
        tokenizer = getattr(self.reader, "tokenizer", self.reader)
        self.words = Words(tokenizer, self.model, "text", config.get_text_config())
        self.layout, self.image = _LAYOUTS[kind](config), int(config.image_token_id)
        decoder = base_model(self.model).get_decoder()  # type: ignore[operator]
        self.decoder = next(name for name, module in self.model.named_modules() if module is decoder)
        # In PaliGemma's first part every word looks at every other; what is said after it is of another type.
        self.prefixed = kind == "PaliGemma"

    def streams_of(self, module: str, nth: int) -> tuple[str, str] | None:
        return (self.stream, self.stream) if module.startswith(f"{self.decoder}.") else None

    def expected_calls(self) -> int | None:
        return expected_calls(self.model.config.get_text_config())

    def why_not(self, method: str) -> str | None:
        vectors = REGISTRY[method].declaration.asks & {"inputs", "input_gradient"}
        return self.layout.nowhere if vectors else None

    def is_one(self, raws: list[Any]) -> bool:
        return bool(raws) and super().is_one(raws)

    @property
    def known(self) -> tuple[str, ...]:
        """The model inputs that are read."""
        return ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", *self.layout.inputs)

    # Reading

    def samples(self, raw: Any, how: How) -> list[Sample]:
        if isinstance(raw, Mapping):
            samples = self._of_inputs(raw, how)
        elif isinstance(raw, Given) and raw.text is not None and raw.image is not None:
            samples = [self._of_raw(raw, how)]
        else:
            raise InputError(f"{self.name} takes a text and a picture, each by name: explain(text=…, image=…)")
        return [self._answered(sample, how) for sample in samples]

    def _of_raw(self, raw: Given, how: How) -> Answered:
        """A text and a picture, as the processor reads them."""
        if not (hasattr(self.reader, "tokenizer") and hasattr(self.reader, "image_processor")):
            raise InputError("the model came without a processor: give model inputs, or load (model, processor)")
        if how.tokens is not None:
            raise InputError("tokens= names the units of model inputs; a text's units have names of their own")
        prompt, picture = self._prompted(raw.text), open_picture(raw.image)
        # A rendered conversation brings its own start token, which must not be doubled.
        begun = {"add_special_tokens": False} if self._begins(prompt) else {}
        try:
            with self.words.lock:
                made = self.reader(text=[prompt], images=[picture], return_tensors="pt", **begun)
        except (ValueError, TypeError, IndexError) as problem:
            raise InputError(f"the processor does not take this text with one picture: {problem}") from None
        inputs = {name: made[name] for name in self.known if name in made and self.accepts(name)}
        (sample,) = self._of_inputs(self._open_ended(inputs, prompt), how)
        most = min(self.words.positions, how.max_length or self.words.positions)
        if sample.first + 1 > most:
            raise InputError(
                f"text and picture have {sample.first + 1} tokens, more than {most}: a text with a picture is not "
                "truncated, shorten it"
            )
        return sample

    def _open_ended(self, inputs: dict[str, Tensor], prompt: str) -> dict[str, Tensor]:
        """Without the end token that some tokenizers append: a prompt is to be continued."""
        if not self._closed(inputs["input_ids"][0].tolist(), prompt):
            return inputs
        return {name: part if name in self.layout.inputs else part[:, :-1] for name, part in inputs.items()}

    def _prompted(self, text: Any) -> str:
        if isinstance(text, str) and text:
            mark = str(getattr(self.reader, "image_token", ""))
            return mark + text if self.prefixed and mark not in text else text
        if not (isinstance(text, list) and self.is_one(text)):
            raise InputError(
                f'text= must be a text or a conversation (a list of {{"role", "content"}}), not {text!r:.40}'
            )
        check_messages(text)
        last = text[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if last else {"add_generation_prompt": True}
        try:
            with self.words.lock:
                return self.reader.apply_chat_template(with_picture(text), tokenize=False, **how)
        except Exception as problem:  # templates raise what they like
            raise InputError(f"the processor's chat template refuses this conversation: {problem}") from None

    def _of_inputs(self, raw: Mapping[str, Any], how: How) -> list[Answered]:
        """Model inputs, sample by sample."""
        taken = [name for name in self.known if self.accepts(name)]
        strange = [name for name in raw if name not in taken]
        if strange:
            name = type(self.model).__name__
            raise InputError(f"{name} is explained by {', '.join(taken)}: leave out {', '.join(strange)}")
        given = {name: torch.as_tensor(part) for name, part in raw.items() if part is not None}
        if "input_ids" not in given or "pixel_values" not in given:
            raise InputError(f"model inputs need input_ids and pixel_values, but hold {', '.join(given) or 'nothing'}")
        if self.prefixed and "token_type_ids" not in given:
            raise InputError(
                "model inputs need token_type_ids (0 for the prompt): without them it depends on the implementation of "
                "attention which way the words of the prompt look"
            )
        ids = given["input_ids"]
        texts = {name: part for name, part in given.items() if name not in self.layout.inputs}
        wrong = [name for name, part in texts.items() if part.shape != ids.shape]
        if ids.dim() != 2 or not ids.numel() or wrong:
            shapes = {name: tuple(part.shape) for name, part in texts.items()}
            raise InputError(f"{', '.join(texts)} must be batch × token, not {shapes}")
        pictures = self.layout.split({name: given[name] for name in given if name in self.layout.inputs}, len(ids))
        names: Any = [how.tokens] if how.tokens and isinstance(how.tokens[0], str) else how.tokens or [None] * len(ids)
        if len(names) != len(ids):
            raise InputError(f"tokens= names the units of {len(names)} inputs, but there are {len(ids)}")
        each = ({name: part[i] for name, part in texts.items()} for i in range(len(ids)))
        return [self._joint(*parts) for parts in zip(each, pictures, names, strict=True)]

    def _joint(self, text: dict[str, Tensor], picture: dict[str, Tensor], names: Any) -> Answered:
        """The one sequence of a text and a picture."""
        holds = text["input_ids"] == self.image  # its number may lie outside of the vocabulary
        text = self._checked(
            {**text, "input_ids": text["input_ids"].masked_fill(holds, 0), "holds": holds}, "input_ids"
        )
        holds = text.pop("holds")
        ids = text["input_ids"].masked_fill(holds, self.image)
        units = self.layout.units(picture, self._count(holds))
        # Qwen-VL's types follow from the numbers of the tokens, and its positions from them: see `_positions`.
        inputs = {name: text[name] for name in self.along if name in text}
        at = holds.nonzero().flatten().tolist()
        words = (~holds).nonzero().flatten().tolist()
        return Answered(
            {**inputs, "input_ids": ids, **picture},
            {self.stream: Axis((self._text_units(ids, words, names), units), (tuple(words), tuple(at)))},
            alike=(len(at),),
            picture=self.layout.seen(picture, getattr(self.reader, "image_processor", None)),
            first=len(ids) - 1,
        )

    def _count(self, holds: Tensor) -> int:
        count = int(holds.sum())
        if not count:
            mark = getattr(self.reader, "image_token", None)
            shown = f", {mark!r}" if mark else ""
            raise InputError(
                f"the text does not say where the picture stands: write the model's token for it{shown} (number "
                f"{self.image}), or give a conversation"
            )
        if count == len(holds):
            raise InputError("there is no text beside the picture: nothing is asked about it")
        return count

    def _text_units(self, ids: Tensor, at: list[int], names: Any) -> Units:
        """The words around the picture; what stands before and after it are texts of their own."""
        if names is not None:
            special = tuple(one in self._marks() for one in ids[at].tolist())
            return replace(self.words.units_of(ids[at].tolist(), names), special=special)
        runs = [[i for _, i in run] for _, run in groupby(enumerate(at), lambda pair: pair[1] - pair[0])]
        return reduce(followed, (self._said(ids[run].tolist()) for run in runs))

    def _said(self, ids: Sequence[int]) -> Units:
        return said_units(self.words, ids, [one in self._marks() for one in ids])

    def _continuation(self, sample: Answered, answer: str) -> list[int]:
        """The ids of an answer: those that it has together with the words after the picture, where theirs stay."""
        if self.words.tokenizer is None:
            raise InputError("a text needs the tokenizer: load it together with the model, or give the answer's ids")
        alone = list(self.words.ask("encode", answer, add_special_tokens=False))
        ids, special = sample.inputs["input_ids"].tolist(), sample.axes[self.stream].special
        start = max((i + 1 for i, one in enumerate(ids) if special[i] or one == self.image), default=0)
        if start == len(ids):
            return alone
        text = self.words.ask("decode", ids[start:])
        together = list(self.words.ask("encode", text + answer, add_special_tokens=False))
        kept = together[: len(ids) - start] == ids[start:] and len(together) > len(ids) - start
        return together[len(ids) - start :] if kept else alone

    # Answers

    def with_answer(self, sample: Answered, answer: Sequence[int]) -> Answered:
        if not answer:
            return sample
        if self.image in answer:
            raise InputError("the answer holds the token that stands for a picture: there is no picture to put there")
        ids = torch.tensor(answer)
        (text, units), (words, at) = sample.axes[self.stream].parts, sample.axes[self.stream].at
        length = len(text) + len(units)
        if length + len(ids) > self.words.positions:
            raise InputError(
                f"prompt and answer have {length} + {len(ids)} tokens, more than the model takes "
                f"({self.words.positions}): shorten one"
            )
        text = followed(text, self._said(answer))
        words = (*words, *range(length, length + len(ids)))
        more = {"input_ids": ids, "token_type_ids": torch.full_like(ids, int(self.prefixed))}
        grown = {name: torch.cat([part, more[name].to(part)]) for name, part in sample.inputs.items() if name in more}
        axes = {self.stream: Axis((text, units), (words, at))}
        return replace(sample, inputs={**sample.inputs, **grown}, axes=axes, answer=tuple(answer))

    def cut(self, sample: Sample, targets: Sequence[Target]) -> Sample:
        """No word depends on what comes after the row that predicts it; the picture stands before them all."""
        assert isinstance(sample, Answered)
        if any(target.custom is not None for target in targets):
            return sample
        rows = sorted({self.row(sample, target) for target in targets})
        (text, units), (words, at) = sample.axes[self.stream].parts, sample.axes[self.stream].at
        length = rows[-1] + 1
        left = length - len(units)
        inputs = {name: part[:length] if name in self.along else part for name, part in sample.inputs.items()}
        axes = {self.stream: Axis((first_units(text, left), units), (words[:left], at))}
        return replace(sample, inputs=inputs, axes=axes, kept=tuple(rows))

    def say(self, sample: Answered, count: int) -> Sequence[int]:
        prompt = sample.inputs["input_ids"]
        room = self.words.positions - len(prompt)
        if room < 1:
            raise InputError(f"the prompt fills all {len(prompt)} tokens that the model takes: shorten it")
        inputs = {**sample.inputs, "attention_mask": torch.ones_like(prompt)}
        if self.accepts("mm_token_type_ids"):
            inputs["mm_token_type_ids"] = (prompt == self.image).long()
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        with lock_of(self.model), self._positions_kept():
            said = self.generate(sample, min(count, room), **inputs)
        answer = said[len(prompt) :]
        return answer[:-1] if answer and answer[-1] in self.ends() else answer

    @contextmanager
    def _positions_kept(self) -> Iterator[None]:
        """Qwen-VL remembers how far its last picture moved the positions."""
        inner: Any = base_model(self.model).model
        before = getattr(inner, "rope_deltas", None)
        try:
            yield
        finally:
            if hasattr(inner, "rope_deltas"):
                inner.rope_deltas = before

    def check_causal(self) -> None:
        (sample,) = self._of_inputs(self.example(), How())
        one, other = [word for word in range(self.vocabulary) if word != self.image][:2]
        batches = [self.batch([self.with_answer(sample, [one, last])]) for last in (one, other)]
        if not self.compared(batches):
            raise Refusal(
                f"{type(base_model(self.model)).__name__} is no decoder: its words depend on those after them"
            )

    # Model inputs

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**self.batch(samples), **self.settings(samples)}

    def settings(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**super().settings(samples), "use_cache": False}  # all of them hand it on to their decoder

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The samples' inputs alone."""
        held = {(*sorted(sample.inputs), tuple(sample.inputs["pixel_values"].shape)) for sample in samples}
        if len(held) != 1:
            raise InputError("inputs of one batch must hold the same, and pictures must have one size")
        longest = max(len(sample.inputs["input_ids"]) for sample in samples)
        masks = [torch.ones_like(sample.inputs["input_ids"]) for sample in samples]
        fills = {"input_ids": self.words.pad, "token_type_ids": int(self.prefixed)}
        texts = {
            name: torch.stack([padded(sample.inputs[name], longest, fill) for sample in samples])
            for name, fill in fills.items()
            if name in samples[0].inputs
        }
        texts["attention_mask"] = torch.stack([padded(mask, longest, 0) for mask in masks])
        names = [name for name in self.layout.inputs if name in samples[0].inputs]
        pictures = self.layout.joined([{name: sample.inputs[name] for name in names} for sample in samples])
        batch = {name: part.to(self.device) for name, part in {**texts, **pictures}.items()}
        batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        return {**batch, **self._positions(batch)}

    def _positions(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Qwen-VL's positions, as it would compute them itself, and remember."""
        if not isinstance(self.layout, Rows):
            return {}
        inner: Any = base_model(self.model).model
        given = {"image_grid_thw": batch["image_grid_thw"], "attention_mask": batch["attention_mask"]}
        if "mm_token_type_ids" in inspect.signature(inner.get_rope_index).parameters:
            # transformers 5.0 looks for pictures by itself, where the marks of their start are
            given["mm_token_type_ids"] = (batch["input_ids"] == self.image).int()
        found, _ = inner.get_rope_index(batch["input_ids"], **given)
        return {"position_ids": found}

    def leaves(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "pixel_values"

    def arranged(
        self, vectors: "Mapping[str, Float[Tensor, 'batch *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Words' embeddings and patches' pixels along the one axis; the shorter ones are filled up with zeros."""
        axes = [sample.axes[self.stream] for sample in samples]
        words, cells = vectors["input_ids"], self.layout.cells(vectors["pixel_values"], axes[0].parts[1], len(axes))
        joint = words.new_zeros(*words.shape[:2], max(words.shape[2], cells.shape[2]))
        joint[..., : words.shape[2]] = words
        for i, axis in enumerate(axes):
            at = list(axis.at[1])
            joint[i, at] = 0
            joint[i, at, : cells.shape[2]] = cells[i].to(joint)
        return {self.stream: joint}

    def example(self) -> Any:
        picture, count = self.layout.example()
        before, *after = [word for word in range(self.vocabulary) if word != self.image][3:7]
        ids = torch.tensor([[before, *[self.image] * count, *after]])
        types = {"token_type_ids": torch.zeros_like(ids)} if self.prefixed else {}
        return {"input_ids": ids, **types, **picture}


def with_picture(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which every content is a list of parts, and one of them is the picture.

    >>> with_picture([{"role": "user", "content": "What is it?"}])[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    """
    said = [{**message, "content": _parts(message.get("content"))} for message in messages]
    if not any(part.get("type") == "image" for message in said for part in message["content"]):
        asked = next((message for message in said if message["role"] == "user"), said[0])
        asked["content"] = [{"type": "image"}, *asked["content"]]
    return said


def _parts(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    # where a picture stands is all that its part says: the picture itself comes by name
    return [{"type": "image"} if part.get("type") == "image" else dict(part) for part in content or ()]
