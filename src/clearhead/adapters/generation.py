"""Base class of adapters for generative models: generation, the explained tokens, and the row that predicts each."""

import copy
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.adapters.base import ModelAdapter, Readout, unwrap_base_model
from clearhead.adapters.readers.text import TokenizerWrapper
from clearhead.errors import InputError, UnsupportedError
from clearhead.sample import Sample
from clearhead.targets import Contrast, GeneratedToken, Label, Predicted, Target
from clearhead.units import UnitAxis, Units


@dataclass
class PromptSample(Sample):
    """An input and the words that came after it: along the axis of words, row `first` + k predicts word k."""

    first_predicting_row: int = 0
    continuation_ids: tuple[int, ...] = ()
    #: Whether the answer came from the caller; otherwise up to `most` words may be generated.
    is_user_continuation: bool = False
    max_new_tokens: int = 32
    #: The rows whose logits are needed; none where all are.
    logit_rows: tuple[int, ...] = ()
    #: Whether `position_ids` are not the caller's, but what the model computes from padding that was cut off.
    counts_padding: bool = False


class GenerativeAdapter(ModelAdapter):
    """A model that says one word after another. Steps are counted from 0, the first word of the answer.

    A token or a contrast targets the next token; `GeneratedToken(step)` targets one step and `GeneratedToken()` every
    token of the continuation. The explained tokens are the given or generated ones, whichever the model ranks highest.
    """

    #: The axis whose rows predict words, and the inputs that lie along it.
    decoder_stream: ClassVar[str]
    sequence_inputs: ClassVar[tuple[str, ...]]
    #: Whether an input alone asks for the whole answer, and not for its first word.
    explains_full_output: ClassVar[bool]
    tokenizer_wrapper: TokenizerWrapper

    def __post_init__(self) -> None:
        super().__post_init__()
        self.multi_label, self.labels = False, {}  # the labels of a configuration are no words
        head = unwrap_base_model(self.model).get_output_embeddings()  # type: ignore[operator]
        known = getattr(head, "weight", None)
        if isinstance(known, Tensor) and known.is_floating_point():
            self.vocab_size = len(known)
        else:  # that of a quantised head may be packed, or a function
            self.vocab_size = int(self.model.config.get_text_config().vocab_size)
        self.causality_checked = False  # not seen yet

    @abstractmethod
    def generate_ids(self, sample: PromptSample, max_new_tokens: int) -> Sequence[int]:
        """The words that the model generates, up to so many, without the token that ends them."""

    @abstractmethod
    def append_continuation(self, sample: PromptSample, continuation_ids: Sequence[int]) -> PromptSample:
        """The sample continued by these words."""

    @abstractmethod
    def check_causal(self) -> None:
        """Refuse a model whose words look at what comes after them: they cannot be explained together."""

    def choose_default_readout(self) -> Readout | None:
        return "next word"

    @property
    def is_regression(self) -> bool:
        return False

    def label_index(self, label: str | int) -> int:
        return self.tokenizer_wrapper.find_token_id(label, self.vocab_size)

    def label_name(self, index: int) -> str:
        return self.tokenizer_wrapper.decode_token(index)

    def join_step_names(self, names: Sequence[str]) -> str:
        return " ".join(names)

    def resolve_sample(self, sample: Sample, target: Target) -> Sample:
        assert isinstance(sample, PromptSample)
        if not self.causality_checked:
            self.check_causal()
            self.causality_checked = True
        count = self._count_tokens_to_generate(sample, target)
        return self.append_continuation(sample, self.generate_ids(sample, count)) if count else sample

    def _count_tokens_to_generate(self, sample: PromptSample, target: Target) -> int:
        """How many words must be generated before the target can be explained."""
        whole = isinstance(target.spec, Predicted) and self.explains_full_output
        if sample.is_user_continuation or not (whole or isinstance(target.spec, GeneratedToken)):
            return 0
        if (
            isinstance(sample.max_new_tokens, bool)
            or not isinstance(sample.max_new_tokens, int)
            or sample.max_new_tokens < 1
        ):
            raise InputError(f"max_new_tokens={sample.max_new_tokens!r} is not valid: use a positive number of tokens")
        place = target.position
        return place + 1 if isinstance(place, int) and place >= 0 else sample.max_new_tokens

    def expand_target(self, sample: Sample, target: Target) -> list[Target]:
        assert isinstance(sample, PromptSample)
        count = len(sample.continuation_ids)
        if target.function is not None:
            return [target]
        whole = isinstance(target.spec, Predicted) and (sample.is_user_continuation or self.explains_full_output)
        if whole or (isinstance(target.spec, GeneratedToken) and target.position is None):
            if not count:
                raise InputError("the model generates an empty output: pass the text to explain with answer=")
            return [self._make_step_target(sample, target, step) for step in range(count)]
        match target.spec:
            case GeneratedToken(place):
                return [self._make_step_target(sample, target, self._resolve_step(place, count))]
            case Predicted() | Label() | Contrast():
                if count:
                    raise InputError(
                        f"the output has {count} tokens: choose one with target=clearhead.GeneratedToken(step, token)"
                    )
                return [self._make_step_target(sample, target, 0)]
            case wanted:
                raise InputError(
                    f"target={wanted!r} is not an output of {type(self.model).__name__}: pass a token, "
                    "clearhead.Contrast(a, b) or clearhead.GeneratedToken(step, token)"
                )

    def _resolve_step(self, place: Any, count: int) -> int:
        """The step that is meant; one past the last word is what would come next."""
        if not isinstance(place, int) or isinstance(place, bool) or not -count <= place <= count:
            raise InputError(f"step {place!r} does not exist: the output has {count} tokens, counted from 0")
        return place + count if place < 0 else place

    def _make_step_target(self, sample: PromptSample, target: Target, step: int) -> Target:
        """The target at one step, about the word that was said there unless it names another."""
        placed = target.at_position(step, GeneratedToken)
        wanted = placed.spec
        assert isinstance(wanted, GeneratedToken)
        if wanted.label is None and step < len(sample.continuation_ids):
            wanted = GeneratedToken(step, sample.continuation_ids[step], wanted.against)
        return Target(wanted, target.scale)

    def find_readout_row(self, sample: Sample, target: Target) -> int:
        """The row that predicts the word; a function of the output is taken to read the last one."""
        assert isinstance(sample, PromptSample)
        if target.function is not None:
            return len(sample.axes[self.decoder_stream]) - 1
        assert isinstance(target.position, int)
        return sample.first_predicting_row + target.position

    def find_readouts(self, sample: Sample, target: Target) -> dict[str, dict[int, float]]:
        if self.readout != "next word":
            raise InputError(
                f"readout={self.readout!r} does not apply, because each token is predicted at its own position: leave "
                "it out"
            )
        return {self.decoder_stream: {self.find_readout_row(sample, target): 1.0}}

    def truncate_to_targets(self, sample: Sample, targets: Sequence[Target]) -> Sample:
        """No word depends on what comes after the row that predicts it."""
        assert isinstance(sample, PromptSample)
        if any(target.function is not None for target in targets):
            return sample
        rows = sorted({self.find_readout_row(sample, target) for target in targets})
        (units,) = sample.axes[self.decoder_stream].unit_groups
        whole, length = len(units), rows[-1] + 1
        inputs = {
            name: part[:length] if name in self.sequence_inputs and part.shape[:1] == (whole,) else part
            for name, part in sample.inputs.items()
        }
        axes = {**sample.axes, self.decoder_stream: UnitAxis.concat(truncate_units(units, length))}
        return replace(sample, inputs=inputs, axes=axes, logit_rows=tuple(rows))

    def truncate_to_shared_prefix(self, sample: Sample) -> Sample:
        """What was there before the first word was said."""
        return self.truncate_to_targets(sample, [Target(GeneratedToken(0))])

    def make_forward_kwargs(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """What the model is told beside the inputs: no cache, and logits only of the rows that are needed."""
        told: dict[str, Any] = {"use_cache": False} if self.forward_accepts("use_cache") else {}
        kept = self._find_shared_logit_rows(samples)
        if kept is not None:
            told["logits_to_keep"] = torch.tensor(kept, device=self.device)
        return told

    def _find_shared_logit_rows(self, samples: Sequence[Sample]) -> list[int] | None:
        rows = [getattr(sample, "logit_rows", ()) for sample in samples]
        few = bool(rows) and all(rows) and self.forward_accepts("logits_to_keep")
        return sorted({row for own in rows for row in own}) if few else None

    def compute_class_scores(
        self, output: Any, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> Float[Tensor, "batch label"]:
        rows = self._find_logit_rows(samples, targets)
        return output.logits[torch.arange(len(rows)) % len(output.logits), rows]

    def _find_logit_rows(self, samples: Sequence[Sample], targets: Sequence[Target]) -> list[int]:
        rows, kept = (
            [self.find_readout_row(*pair) for pair in zip(samples, targets, strict=True)],
            self._find_shared_logit_rows(samples),
        )
        return rows if kept is None else [kept.index(row) for row in rows]

    def choose_targets_per_pass(self, samples: Sequence[Sample]) -> int | None:
        """A pass for many words is longer than most of them need; one for few is made more often.

        A forward pass costs about what the backward pass of one word does, so n words in chunks of s cost about
        n/s + n·(L + s/2)/L passes of the length L: least at s = √(2L). A GPU has room to spare at these sizes.
        """
        length = max(len(sample.axes[self.decoder_stream]) for sample in samples)
        return None if self.device.type != "cpu" else max(8, round((2 * length) ** 0.5))

    def find_head_rows(
        self, samples: Sequence[Sample], targets: Sequence[Target]
    ) -> tuple[nn.Module, list[int]] | None:
        head = unwrap_base_model(self.model).get_output_embeddings()  # type: ignore[operator]
        custom = any(target.function is not None for target in targets)
        return None if head is None or custom else (head, self._find_logit_rows(samples, targets))

    def encode_continuation(self, continuation: Any, encode: Any) -> tuple[int, ...]:
        """A given answer as ids: a text, or ids already."""
        if isinstance(continuation, str):
            if not continuation:
                raise InputError("answer= is empty: leave it out to explain the text that the model generates")
            ids = encode(continuation)
        else:
            try:
                ids = torch.as_tensor(continuation)
                ids = ids.tolist() if ids.dim() == 1 and not ids.is_floating_point() else None
            except (TypeError, ValueError, RuntimeError):
                ids = None
        if not ids:
            raise InputError(f"answer= must be a text or its token ids, but is {continuation!r:.60}")
        return tuple(self.tokenizer_wrapper.find_token_id(int(one), self.vocab_size) for one in ids)

    def generate_greedily(
        self, sample: PromptSample, max_new_tokens: int, generate_function: Any = None, **inputs: Tensor
    ) -> list[int]:
        """What greedy generation gives, cache and the model's own rules (forced or forbidden words) included.

        `by` stands for a model's own way to generate, where that is not one plain pass.
        """
        if not hasattr(self.model, "generate"):
            raise UnsupportedError(
                f"{type(self.model).__name__} cannot generate text: pass the output text with answer="
            )
        settings = copy.deepcopy(self.model.generation_config)
        given = {"max_new_tokens": max_new_tokens, "do_sample": False, "num_beams": 1, "return_dict_in_generate": False}
        given |= {"num_return_sequences": 1, "penalty_alpha": 0}  # what is None is filled in from the model's own
        unused = ("max_length", "temperature", "top_p", "top_k", "min_p", "typical_p", "num_beam_groups")
        for name, value in {**dict.fromkeys(unused), **given}.items():
            setattr(settings, name, value)
        settings.pad_token_id = (
            self.tokenizer_wrapper.pad_id if settings.pad_token_id is None else settings.pad_token_id
        )
        batch: dict[str, Any] = {name: part[None].to(self.device) for name, part in inputs.items()}
        if settings.stop_strings and self.tokenizer_wrapper.tokenizer is not None:
            batch["tokenizer"] = self.tokenizer_wrapper.tokenizer
        with self.session.running(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                said = (generate_function or type(self.model).generate)(self.model, **batch, generation_config=settings)
            except ValueError as problem:
                raise InputError(f"generation fails with the model's generation_config: {problem}") from None
            return said[0].tolist()

    def find_eos_ids(self) -> set[int]:
        """The tokens that end an answer."""
        known = [
            getattr(part, "eos_token_id", None)
            for part in (getattr(self.model, "generation_config", None), self.model.config)
        ]
        every = [one for part in known for one in (part if isinstance(part, list) else [part])]
        return {one for one in [*every, self.tokenizer_wrapper.get_special_token_id("eos")] if one is not None}

    def logits_agree(self, batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the model's logits agree, but for the last place, on two inputs that differ there alone."""
        one, other = (
            self.session.forward({**batch, **self.make_forward_kwargs(())}).logits[:, :-1].float() for batch in batches
        )
        if not one.isfinite().all():
            raise UnsupportedError(
                f"{type(unwrap_base_model(self.model)).__name__} computes logits that are not finite: its weights "
                f"contain NaN or infinity, or its values exceed the range of {str(self.dtype).removeprefix('torch.')}"
            )
        return bool((one - other).abs().max() <= 1e-3 * one.abs().max())

    def padding_gap(self, inputs: Mapping[str, Tensor], sample: PromptSample, start: int) -> float:
        """How far the logits of a sample are from those of the padded model inputs that it was cut out of.

        Args:
            inputs: One row of model inputs, without batch axis.
            sample: The same row without padding.
            start: How many padding tokens stood in front of it.

        Returns:
            The largest difference at the last position of the sample, relative to the largest logit; NaN where the
            model computes no finite number.
        """
        padded = {name: part[None].to(self.device) for name, part in inputs.items()}
        padded = {name: part.to(self.dtype) if part.is_floating_point() else part for name, part in padded.items()}
        row = len(sample.axes[self.decoder_stream]) - 1
        expected = self._logits_at({**padded, **self.make_forward_kwargs(())}, start + row)
        computed = self._logits_at(self.collate([sample]), row)
        return float((computed - expected).abs().max() / expected.abs().max())

    def padding_error(self, start: int, gap: float) -> InputError:
        """The error for inputs whose padding in front changes what the model computes."""
        name, padding = type(self.model).__name__, f"the {start} padding tokens before this input"
        differs = (
            f"{name} computes different logits with {padding} and without them (difference: {gap:.1e} of the largest "
            "logit)"
        )
        says = f"{name} computes logits that are not finite with {padding}" if gap != gap else differs
        return InputError(f"{says}: remove the padding, pad on the right, or pass the text")

    def _logits_at(self, batch: dict[str, Any], row: int) -> Float[Tensor, "label"]:
        """The logits at one position of a batch of one; the others are not computed where the model can leave them."""
        if not self.forward_accepts("logits_to_keep"):
            return self.session.forward(batch).logits[0, row].double()
        batch = {**batch, "logits_to_keep": torch.tensor([row], device=self.device)}
        return self.session.forward(batch).logits[0, 0].double()

    def make_causality_probe(self) -> tuple[Tensor, Tensor]:
        """Make two token sequences that differ only in their last token: a causal model has equal states before it."""
        ids = torch.arange(3, 9) % self.vocab_size
        other = ids.clone()
        other[-1] = (other[-1] + 1) % self.vocab_size
        return ids.to(self.device), other.to(self.device)


def truncate_units(units: Units, length: int) -> Units:
    return replace(
        units,
        names=units.names[:length],
        special=units.special[:length],
        segments=None if units.segments is None else units.segments[:length],
        offsets=None if units.offsets is None else units.offsets[:length],
    )


def concat_units(units: Units, following: Units) -> Units:
    """Units and those that come after them, of one stream; their texts stand beside each other."""
    joined = replace(units, names=units.names + following.names, special=units.special + following.special)
    if units.offsets is None or following.offsets is None:
        return replace(joined, texts=(), segments=None, offsets=None)
    texts = len(units.texts)
    segments = (units.segments or (0,) * len(units)) + tuple(
        texts + s for s in following.segments or (0,) * len(following)
    )
    return replace(
        joined, texts=units.texts + following.texts, segments=segments, offsets=units.offsets + following.offsets
    )


def make_units_from_ids(tokenizer_wrapper: TokenizerWrapper, ids: Sequence[int], special: Sequence[bool]) -> Units:
    """The units of words that were said, and where they lie in the text that they make.

    Encoding that text again need not give the same tokens, so each token is what it adds to the text before it.
    """
    units = replace(tokenizer_wrapper.make_units(list(ids)), special=tuple(special))
    if units.offsets is not None or tokenizer_wrapper.tokenizer is None:
        return units
    texts = [
        tokenizer_wrapper.call_tokenizer("decode", list(ids[: count + 1]), skip_special_tokens=False)
        for count in range(len(ids))
    ]
    whole = texts[-1]
    ends = [len(text.rstrip("\ufffd")) for text in texts]  # a character may be said in several tokens
    steady = all(text[:end] == whole[:end] for text, end in zip(texts, ends, strict=True))
    if not steady or ends != sorted(ends):
        return units
    offsets = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return replace(units, texts=(whole,), segments=(0,) * len(ids), offsets=offsets)
