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

from clearhead.adapters.base import (
    InputOptions,
    NamedInputs,
    list_class_names,
    register_adapter,
    unwrap_base_model,
)
from clearhead.adapters.decoder import CausalLMAdapter, check_messages
from clearhead.adapters.generation import PromptSample, concat_units, make_units_from_ids, truncate_units
from clearhead.adapters.readers.image import open_image
from clearhead.adapters.readers.image_tokens import (
    ImageTokenLayout,
    NoGeometryLayout,
    QwenGridLayout,
    SingleImageLayout,
    SingleTileLayout,
)
from clearhead.adapters.readers.text import TokenizerWrapper, pad_to_length
from clearhead.capture.checks.self_test import count_calls_from_config
from clearhead.errors import InputError, UnsupportedError
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.sample import Sample
from clearhead.targets import Target
from clearhead.units import UnitAxis, Units

#: The families that are explained, and how each lays out a picture.
_IMAGE_TOKEN_LAYOUTS: dict[str, type[ImageTokenLayout]] = {
    **dict.fromkeys(("Llava", "VipLlava", "PaliGemma", "Gemma3", "InternVL", "Mistral3"), SingleImageLayout),
    **dict.fromkeys(("AyaVision", "Cohere2Vision", "DeepseekVL", "LightOnOcr"), SingleImageLayout),
    **dict.fromkeys(("Idefics3", "SmolVLM"), SingleTileLayout),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v", "Glm46V", "GlmOcr"), QwenGridLayout),
    "Idefics2": NoGeometryLayout,
}
#: Image–text decoders whose answer would be wrong, and why.
_TILED_IMAGE_REASON = (
    "it splits an image into tiles and inserts newlines between their patches, which is not supported yet"
)
_CROSS_ATTENTION_REASON = "images are not part of its sequence: its layers attend to them through cross-attention"
_QFORMER_REASON = (
    "the learned queries of a Q-Former represent the image, and attend to the image and the text on a separate path"
)
_UNSUPPORTED_FAMILIES = {
    **dict.fromkeys(("LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Ovis2", "PerceptionLM"), _TILED_IMAGE_REASON),
    **dict.fromkeys(("Mllama",), _CROSS_ATTENTION_REASON),
    **dict.fromkeys(("Blip2", "InstructBlip", "InstructBlipVideo"), _QFORMER_REASON),
    "VideoLlava": "videos are not supported yet",
    "Kosmos2": "its image tokens are learned queries that attend to the whole image, so they have no position in it",
    "Chameleon": "it quantises images into codebook tokens, and this discrete step has no gradients",
    "Emu3": "it quantises images into codebook tokens, and this discrete step has no gradients",
}
_CLASS_SUFFIX = "ForConditionalGeneration"


@register_adapter
class VisionLanguageAdapter(CausalLMAdapter):
    """A picture, a prompt and what comes after them are one sequence: `explain(text="USER: <image> …", image=…)`.

    Relevance is that over the decoder's own sequence, and a patch is the token that holds its place there (four merged
    patches share one in Qwen2-VL). By then the tower that sees the picture has mixed patches with each other; its calls
    are not followed. Gradients of the input go further, to the pixels of each patch through the tower.

    Targets are those of decoders. A conversation is a list of {"role", "content"}; a picture that its content does not
    place stands before the text of the first message of the user.
    """

    class_suffixes: ClassVar[tuple[str, ...]] = tuple(
        f"{name}{_CLASS_SUFFIX}" for name in (*_IMAGE_TOKEN_LAYOUTS, *_UNSUPPORTED_FAMILIES)
    )
    stream = "joint"
    decoder_stream = "joint"
    input_names: ClassVar[tuple[str, ...]] = ("text", "image")
    processor_class = "AutoProcessor"
    sequence_inputs: ClassVar[tuple[str, ...]] = ("input_ids", "token_type_ids")

    def __post_init__(self) -> None:
        kinds = [
            name.removesuffix(_CLASS_SUFFIX) for name in list_class_names(self.model) if name.endswith(_CLASS_SUFFIX)
        ]
        kind = next((kind for kind in kinds if kind in _IMAGE_TOKEN_LAYOUTS or kind in _UNSUPPORTED_FAMILIES), "")
        if kind not in _IMAGE_TOKEN_LAYOUTS:
            why = _UNSUPPORTED_FAMILIES.get(kind, "its image layout is not known")
            raise UnsupportedError(f"{kind or kinds[0]}{_CLASS_SUFFIX} cannot be explained: {why}")
        self.copied_processor = copy.deepcopy(
            self.processor
        )  # to call a processor is to change its tokenizer's settings
        whole, self.processor = self.processor, getattr(self.processor, "tokenizer", self.processor)
        super().__post_init__()
        self.processor = whole
        config = self.model.config
        tokenizer = getattr(self.copied_processor, "tokenizer", self.copied_processor)
        self.tokenizer_wrapper = TokenizerWrapper(tokenizer, self.model, "text", config.get_text_config())
        self.image_token_layout, self.image_token_id = _IMAGE_TOKEN_LAYOUTS[kind](config), int(config.image_token_id)
        decoder = unwrap_base_model(self.model).get_decoder()  # type: ignore[operator]
        self.decoder_module_name = next(name for name, module in self.model.named_modules() if module is decoder)
        # In PaliGemma's first part every word looks at every other; what is said after it is of another type.
        self.has_bidirectional_prefix = kind == "PaliGemma"

    def find_call_streams(self, module: str, occurrence: int) -> tuple[str, str] | None:
        return (self.stream, self.stream) if module.startswith(f"{self.decoder_module_name}.") else None

    def count_expected_calls(self) -> int | None:
        return count_calls_from_config(self.model.config.get_text_config())

    def find_unsupported_reason(self, method: str) -> str | None:
        vectors = METHOD_REGISTRY[method].declaration.requires & {"inputs", "input_gradient"}
        return self.image_token_layout.missing_geometry_reason if vectors else None

    def is_single_input(self, raw_inputs: list[Any]) -> bool:
        return bool(raw_inputs) and super().is_single_input(raw_inputs)

    @property
    def supported_inputs(self) -> tuple[str, ...]:
        """The model inputs that are read."""
        return (
            "input_ids",
            "attention_mask",
            "token_type_ids",
            "mm_token_type_ids",
            *self.image_token_layout.input_names,
        )

    # Reading

    def make_samples(self, raw: Any, options: InputOptions) -> list[Sample]:
        if isinstance(raw, Mapping):
            samples = self._samples_from_joint_inputs(raw, options)
        elif isinstance(raw, NamedInputs) and raw.text is not None and raw.image is not None:
            samples = [self._sample_from_raw(raw, options)]
        else:
            raise InputError(f"{self.name} takes a text and an image, each passed by name: explain(text=…, image=…)")
        return [self._apply_continuation_options(sample, options) for sample in samples]

    def _sample_from_raw(self, raw: NamedInputs, how: InputOptions) -> PromptSample:
        """A text and a picture, as the processor reads them."""
        if not (hasattr(self.copied_processor, "tokenizer") and hasattr(self.copied_processor, "image_processor")):
            raise InputError("the model was loaded without a processor: pass model inputs, or load (model, processor)")
        if how.unit_names is not None:
            raise InputError(
                "tokens= names the units of model inputs, but the units of a text already have names: leave out tokens="
            )
        prompt, picture = self._render_prompt(raw.text), open_image(raw.image)
        # A rendered conversation brings its own start token, which must not be doubled.
        begun = {"add_special_tokens": False} if self._starts_with_bos(prompt) else {}
        try:
            with self.tokenizer_wrapper.lock:
                made = self.copied_processor(text=[prompt], images=[picture], return_tensors="pt", **begun)
        except (ValueError, TypeError, IndexError) as problem:
            raise InputError(f"the processor does not accept this text with one image: {problem}") from None
        inputs = {name: made[name] for name in self.supported_inputs if name in made and self.forward_accepts(name)}
        (sample,) = self._samples_from_joint_inputs(self._strip_end_token_from_inputs(inputs, prompt), how)
        most = min(self.tokenizer_wrapper.max_positions, how.max_length or self.tokenizer_wrapper.max_positions)
        if sample.first_predicting_row + 1 > most:
            raise InputError(
                f"the text and the image have {sample.first_predicting_row + 1} tokens, more than the model's maximum "
                f"({most}): texts with images are not truncated, so shorten the text"
            )
        return sample

    def _strip_end_token_from_inputs(self, inputs: dict[str, Tensor], prompt: str) -> dict[str, Tensor]:
        """Without the end token that some tokenizers append: a prompt is to be continued."""
        if not self._has_appended_end_token(inputs["input_ids"][0].tolist(), prompt):
            return inputs
        return {
            name: part if name in self.image_token_layout.input_names else part[:, :-1] for name, part in inputs.items()
        }

    def _render_prompt(self, text: Any) -> str:
        if isinstance(text, str) and text:
            mark = str(getattr(self.copied_processor, "image_token", ""))
            return mark + text if self.has_bidirectional_prefix and mark not in text else text
        if not (isinstance(text, list) and self.is_single_input(text)):
            raise InputError(
                f'text= must be a text or a conversation (a list of {{"role", "content"}}), not {text!r:.40}'
            )
        check_messages(text)
        last = text[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if last else {"add_generation_prompt": True}
        try:
            with self.tokenizer_wrapper.lock:
                return self.copied_processor.apply_chat_template(insert_image_content(text), tokenize=False, **how)
        except Exception as problem:  # templates raise what they like
            raise InputError(f"the processor's chat template rejects this conversation: {problem}") from None

    def _samples_from_joint_inputs(self, raw: Mapping[str, Any], how: InputOptions) -> list[PromptSample]:
        """Model inputs, sample by sample."""
        taken = [name for name in self.supported_inputs if self.forward_accepts(name)]
        strange = [name for name in raw if name not in taken]
        if strange:
            name = type(self.model).__name__
            raise InputError(f"{name} accepts only {', '.join(taken)} as model inputs: leave out {', '.join(strange)}")
        given = {name: torch.as_tensor(part) for name, part in raw.items() if part is not None}
        if "input_ids" not in given or "pixel_values" not in given:
            raise InputError(
                f"model inputs must contain input_ids and pixel_values, but contain {', '.join(given) or 'nothing'}"
            )
        if self.has_bidirectional_prefix and "token_type_ids" not in given:
            raise InputError(
                "model inputs must contain token_type_ids (0 for the prompt): without them, the attention "
                "implementation decides whether prompt tokens attend to later tokens"
            )
        ids = given["input_ids"]
        texts = {name: part for name, part in given.items() if name not in self.image_token_layout.input_names}
        wrong = [name for name, part in texts.items() if part.shape != ids.shape]
        if ids.dim() != 2 or not ids.numel() or wrong:
            shapes = {name: tuple(part.shape) for name, part in texts.items()}
            raise InputError(f"{', '.join(texts)} must be batch × token, not {shapes}")
        pictures = self.image_token_layout.split_samples(
            {name: given[name] for name in given if name in self.image_token_layout.input_names}, len(ids)
        )
        names: Any = (
            [how.unit_names]
            if how.unit_names and isinstance(how.unit_names[0], str)
            else how.unit_names or [None] * len(ids)
        )
        if len(names) != len(ids):
            raise InputError(f"tokens= names the units of {len(names)} inputs, but there are {len(ids)}")
        each = ({name: part[i] for name, part in texts.items()} for i in range(len(ids)))
        return [self._build_joint_sample(*parts) for parts in zip(each, pictures, names, strict=True)]

    def _build_joint_sample(self, text: dict[str, Tensor], picture: dict[str, Tensor], names: Any) -> PromptSample:
        """The one sequence of a text and a picture."""
        holds = text["input_ids"] == self.image_token_id  # its number may lie outside of the vocabulary
        text = self._validate_inputs(
            {**text, "input_ids": text["input_ids"].masked_fill(holds, 0), "holds": holds}, "input_ids"
        )
        holds = text.pop("holds")
        ids = text["input_ids"].masked_fill(holds, self.image_token_id)
        units = self.image_token_layout.make_units(picture, self._count_image_tokens(holds))
        # Qwen-VL's types follow from the numbers of the tokens, and its positions from them: see `_positions`.
        inputs = {name: text[name] for name in self.sequence_inputs if name in text}
        at = holds.nonzero().flatten().tolist()
        words = (~holds).nonzero().flatten().tolist()
        return PromptSample(
            {**inputs, "input_ids": ids, **picture},
            {self.stream: UnitAxis((self._build_text_units(ids, words, names), units), (tuple(words), tuple(at)))},
            batch_key=(len(at),),
            image=self.image_token_layout.make_display_image(
                picture, getattr(self.copied_processor, "image_processor", None)
            ),
            first_predicting_row=len(ids) - 1,
        )

    def _count_image_tokens(self, holds: Tensor) -> int:
        count = int(holds.sum())
        if not count:
            mark = getattr(self.copied_processor, "image_token", None)
            shown = f", {mark!r}" if mark else ""
            raise InputError(
                f"the text does not mark the position of the image: insert the model's image token{shown} (id "
                f"{self.image_token_id}), or pass a conversation"
            )
        if count == len(holds):
            raise InputError("there is an image, but no text: pass a prompt about the image")
        return count

    def _build_text_units(self, ids: Tensor, at: list[int], names: Any) -> Units:
        """The words around the picture; what stands before and after it are texts of their own."""
        if names is not None:
            special = tuple(one in self._find_special_ids() for one in ids[at].tolist())
            return replace(self.tokenizer_wrapper.make_units(ids[at].tolist(), names), special=special)
        runs = [[i for _, i in run] for _, run in groupby(enumerate(at), lambda pair: pair[1] - pair[0])]
        return reduce(concat_units, (self._build_units_from_ids(ids[run].tolist()) for run in runs))

    def _build_units_from_ids(self, ids: Sequence[int]) -> Units:
        return make_units_from_ids(self.tokenizer_wrapper, ids, [one in self._find_special_ids() for one in ids])

    def _encode_after_prompt(self, sample: PromptSample, answer: str) -> list[int]:
        """The ids of an answer: those that it has together with the words after the picture, where theirs stay."""
        if self.tokenizer_wrapper.tokenizer is None:
            raise InputError(
                "a text for answer= needs the tokenizer: load it together with the model, or pass token ids"
            )
        alone = list(self.tokenizer_wrapper.call_tokenizer("encode", answer, add_special_tokens=False))
        ids, special = sample.inputs["input_ids"].tolist(), sample.axes[self.stream].special
        start = max((i + 1 for i, one in enumerate(ids) if special[i] or one == self.image_token_id), default=0)
        if start == len(ids):
            return alone
        text = self.tokenizer_wrapper.call_tokenizer("decode", ids[start:])
        together = list(self.tokenizer_wrapper.call_tokenizer("encode", text + answer, add_special_tokens=False))
        kept = together[: len(ids) - start] == ids[start:] and len(together) > len(ids) - start
        return together[len(ids) - start :] if kept else alone

    # Answers

    def append_continuation(self, sample: PromptSample, continuation_ids: Sequence[int]) -> PromptSample:
        if not continuation_ids:
            return sample
        if self.image_token_id in continuation_ids:
            raise InputError("answer= contains the image token, but there is no image for it")
        ids = torch.tensor(continuation_ids)
        (text, units), (words, at) = sample.axes[self.stream].unit_groups, sample.axes[self.stream].indices
        length = len(text) + len(units)
        if length + len(ids) > self.tokenizer_wrapper.max_positions:
            raise InputError(
                f"the prompt and answer= have {length} + {len(ids)} tokens, more than the model's maximum "
                f"({self.tokenizer_wrapper.max_positions}): shorten one of them"
            )
        text = concat_units(text, self._build_units_from_ids(continuation_ids))
        words = (*words, *range(length, length + len(ids)))
        more = {"input_ids": ids, "token_type_ids": torch.full_like(ids, int(self.has_bidirectional_prefix))}
        grown = {name: torch.cat([part, more[name].to(part)]) for name, part in sample.inputs.items() if name in more}
        axes = {self.stream: UnitAxis((text, units), (words, at))}
        return replace(sample, inputs={**sample.inputs, **grown}, axes=axes, continuation_ids=tuple(continuation_ids))

    def truncate_to_targets(self, sample: Sample, targets: Sequence[Target]) -> Sample:
        """No word depends on what comes after the row that predicts it; the picture stands before them all."""
        assert isinstance(sample, PromptSample)
        if any(target.function is not None for target in targets):
            return sample
        rows = sorted({self.find_readout_row(sample, target) for target in targets})
        (text, units), (words, at) = sample.axes[self.stream].unit_groups, sample.axes[self.stream].indices
        length = rows[-1] + 1
        left = length - len(units)
        inputs = {name: part[:length] if name in self.sequence_inputs else part for name, part in sample.inputs.items()}
        axes = {self.stream: UnitAxis((truncate_units(text, left), units), (words[:left], at))}
        return replace(sample, inputs=inputs, axes=axes, logit_rows=tuple(rows))

    def generate_ids(self, sample: PromptSample, max_new_tokens: int) -> Sequence[int]:
        prompt = sample.inputs["input_ids"]
        room = self.tokenizer_wrapper.max_positions - len(prompt)
        if room < 1:
            raise InputError(f"the prompt already has {len(prompt)} tokens, the maximum of this model: shorten it")
        inputs = {**sample.inputs, "attention_mask": torch.ones_like(prompt)}
        if self.forward_accepts("mm_token_type_ids"):
            inputs["mm_token_type_ids"] = (prompt == self.image_token_id).long()
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        with self.session.lock, self._restore_rope_deltas():
            said = self.generate_greedily(sample, min(max_new_tokens, room), **inputs)
        answer = said[len(prompt) :]
        return answer[:-1] if answer and answer[-1] in self.find_eos_ids() else answer

    @contextmanager
    def _restore_rope_deltas(self) -> Iterator[None]:
        """Qwen-VL remembers how far its last picture moved the positions."""
        inner: Any = unwrap_base_model(self.model).model
        before = getattr(inner, "rope_deltas", None)
        try:
            yield
        finally:
            if hasattr(inner, "rope_deltas"):
                inner.rope_deltas = before

    def check_causal(self) -> None:
        (sample,) = self._samples_from_joint_inputs(self.make_example_input(), InputOptions())
        one, other = [word for word in range(self.vocab_size) if word != self.image_token_id][:2]
        batches = [self.collate_inputs([self.append_continuation(sample, [one, last])]) for last in (one, other)]
        if not self.logits_agree(batches):
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} is not a decoder: its predictions depend on later "
                "tokens"
            )

    # Model inputs

    def collate(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**self.collate_inputs(samples), **self.make_forward_kwargs(samples)}

    def make_forward_kwargs(self, samples: Sequence[Sample]) -> dict[str, Any]:
        return {**super().make_forward_kwargs(samples), "use_cache": False}  # all of them hand it on to their decoder

    def collate_inputs(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """The samples' inputs alone."""
        held = {(*sorted(sample.inputs), tuple(sample.inputs["pixel_values"].shape)) for sample in samples}
        if len(held) != 1:
            raise InputError(
                "the inputs of one batch must contain the same tensors, and their images must have the same size"
            )
        longest = max(len(sample.inputs["input_ids"]) for sample in samples)
        masks = [torch.ones_like(sample.inputs["input_ids"]) for sample in samples]
        fills = {"input_ids": self.tokenizer_wrapper.pad_id, "token_type_ids": int(self.has_bidirectional_prefix)}
        texts = {
            name: torch.stack([pad_to_length(sample.inputs[name], longest, fill) for sample in samples])
            for name, fill in fills.items()
            if name in samples[0].inputs
        }
        texts["attention_mask"] = torch.stack([pad_to_length(mask, longest, 0) for mask in masks])
        names = [name for name in self.image_token_layout.input_names if name in samples[0].inputs]
        pictures = self.image_token_layout.batch_inputs(
            [{name: sample.inputs[name] for name in names} for sample in samples]
        )
        batch = {name: part.to(self.device) for name, part in {**texts, **pictures}.items()}
        batch["pixel_values"] = batch["pixel_values"].to(self.dtype)
        return {**batch, **self._compute_position_ids(batch)}

    def _compute_position_ids(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Qwen-VL's positions, as it would compute them itself, and remember."""
        if not isinstance(self.image_token_layout, QwenGridLayout):
            return {}
        inner: Any = unwrap_base_model(self.model).model
        given = {"image_grid_thw": batch["image_grid_thw"], "attention_mask": batch["attention_mask"]}
        if "mm_token_type_ids" in inspect.signature(inner.get_rope_index).parameters:
            # transformers 5.0 looks for pictures by itself, where the marks of their start are
            given["mm_token_type_ids"] = (batch["input_ids"] == self.image_token_id).int()
        found, _ = inner.get_rope_index(batch["input_ids"], **given)
        return {"position_ids": found}

    def find_grad_input_names(self, batch: Mapping[str, Any]) -> tuple[str, ...]:
        return "input_ids", "pixel_values"

    def to_unit_vectors(
        self, vectors: "Mapping[str, Float[Tensor, 'collate_inputs *leaf']]", samples: Sequence[Sample]
    ) -> "dict[str, Float[Tensor, 'batch unit feature']]":
        """Words' embeddings and patches' pixels along the one axis; the shorter ones are filled up with zeros."""
        axes = [sample.axes[self.stream] for sample in samples]
        words, cells = (
            vectors["input_ids"],
            self.image_token_layout.group_pixels_by_unit(vectors["pixel_values"], axes[0].unit_groups[1], len(axes)),
        )
        joint = words.new_zeros(*words.shape[:2], max(words.shape[2], cells.shape[2]))
        joint[..., : words.shape[2]] = words
        for i, axis in enumerate(axes):
            at = list(axis.indices[1])
            joint[i, at] = 0
            joint[i, at, : cells.shape[2]] = cells[i].to(joint)
        return {self.stream: joint}

    def make_example_input(self) -> Any:
        picture, count = self.image_token_layout.make_example_inputs()
        before, *after = [word for word in range(self.vocab_size) if word != self.image_token_id][3:7]
        ids = torch.tensor([[before, *[self.image_token_id] * count, *after]])
        types = {"token_type_ids": torch.zeros_like(ids)} if self.has_bidirectional_prefix else {}
        return {"input_ids": ids, **types, **picture}


def insert_image_content(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation in which every content is a list of parts, and one of them is the picture.

    >>> insert_image_content([{"role": "user", "content": "What is it?"}])[0]["content"]
    [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]
    """
    said = [{**message, "content": _normalize_content(message.get("content"))} for message in messages]
    if not any(part.get("type") == "image" for message in said for part in message["content"]):
        asked = next((message for message in said if message["role"] == "user"), said[0])
        asked["content"] = [{"type": "image"}, *asked["content"]]
    return said


def _normalize_content(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    # where a picture stands is all that its part says: the picture itself comes by name
    return [{"type": "image"} if part.get("type") == "image" else dict(part) for part in content or ()]
