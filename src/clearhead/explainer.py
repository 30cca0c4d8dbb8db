"""`Explainer`: runs attribution methods on a model and returns explanations.

One call of `explain` collects what all its methods require, runs as few forward and backward passes as possible, and
hands the recorded tensors to every method.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch

from clearhead.adapters.base import InputOptions, ModelAdapter, NamedInputs
from clearhead.adapters.generation import GenerativeAdapter
from clearhead.capture.recorder import Recorder
from clearhead.capture.tape import Tape
from clearhead.engine.applicability_table import ApplicabilityTable, MethodApplicability
from clearhead.engine.assembly import BatchRequest
from clearhead.engine.batching import iter_batch_indices, with_progress
from clearhead.engine.capabilities import ModelCapabilities
from clearhead.engine.execution import check_methods, explain_batch, find_pass_names, iter_batch_plans, must_run_alone
from clearhead.engine.memory_budget import MemoryBudget, MemoryBudgetExceededError, parse_bytes
from clearhead.engine.plan import ExecutionPlan
from clearhead.engine.recommendation import Recommendation, recommend_method
from clearhead.engine.target_batch import TargetBatch, TargetFunction
from clearhead.errors import InputError, UnsupportedError, unknown_value_error
from clearhead.explanation.multi_stream import AnyExplanation
from clearhead.methods.base import METHOD_REGISTRY, Method, parse_methods
from clearhead.profiles import get_profile
from clearhead.request import ExplainOptions, ExplainRequest, make_request
from clearhead.sample import Sample
from clearhead.targets import Target, TargetLike, make_target

MethodLike = str | Method


class Explainer:
    """A model with everything needed to explain its predictions. Create it with `clearhead.load`.

    Attributes:
        adapter: The model, its processor and what clearhead knows about its architecture.
        recorder: Runs forward and backward passes and captures attention.
        capabilities: Results of the self-test and which methods apply to the model.

    Args:
        adapter: The adapter of the model. `clearhead.load` chooses it.

    Example:
        >>> import clearhead
        >>> ex = clearhead.load("zoo:sentiment")  # doctest: +SKIP
        >>> e = ex.explain("You look extremely confused", method="generic")  # doctest: +SKIP
        >>> e.top(3)  # doctest: +SKIP
    """

    def __init__(self, adapter: ModelAdapter) -> None:
        self.adapter = adapter
        self.recorder = Recorder(
            adapter.session,
            adapter.find_call_streams,
            adapter.embedding_modules,
            adapter.grad_parameters,
            adapter.count_expected_calls,
        )
        self.capabilities = ModelCapabilities(adapter, self.recorder)

    def __reduce__(
        self,
    ) -> Any:  # copies and pickles create a new recorder: locks cannot be copied, and its self-test must run again
        return type(self), (self.adapter,)

    def __repr__(self) -> str:
        return f"Explainer({self.adapter.name!r}, {type(self.adapter).__name__})"

    @property
    def labels(self) -> dict[int, str]:
        """The model's class names by index (empty for models without classes)."""
        return dict(self.adapter.labels)

    def explain(
        self,
        inputs: Any = None,
        method: MethodLike | Sequence[MethodLike] | None = None,
        target: TargetLike | Sequence[TargetLike] = None,
        *,
        text: Any = None,
        image: Any = None,
        audio: Any = None,
        regions: Any = None,
        answer: Any = None,
        scale: str | None = None,
        profile: str | None = None,
        layers: tuple[int | None, int | None] | None = None,
        heads: Sequence[int] | None = None,
        rows: str | None = None,
        per: str | None = None,
        **options: Unpack[ExplainOptions],
    ) -> Any:
        """Compute attribution scores of the input's units for the model's prediction, or for another target.

        Several methods share one forward and one backward pass where possible.

        Args:
            inputs: One input: a text, a pair of texts (tuple), an image (path, PIL image or uint8 array) or a mapping
                of model inputs. A list of these is a batch.
            method: A method name, a `Method` with options, or a list of them. `methods()` lists which ones apply.
                Default: the recommended method (see `recommended`), or "generic" with `profile`, `layers`, `heads`,
                `rows`, `per`, `kernel` or `checkpoint`, which apply to methods that read attention.
            target: The output to explain: a label or class index, `Contrast`, `MaskedToken` or another target class,
                or a function of the model output. Default: the predicted class. A list gives one target per input.
            text: Input text by name, for models that take several inputs (lists are paired by position).
            image: Input image by name.
            audio: Input audio by name.
            regions: Precomputed image regions by name, for models that read regions.
            answer: Continuation to explain for a language model, as a text or token ids. Default: the model's own
                generation.
            scale: Scale of the target value: "logit" (default), "probability" or "log-odds" (log p/(1 − p) of a class,
                log p_a/p_b of a contrast). For the similarity of two inputs: "cosine" (default) or "logit". Scores
                depend on the scale, so it is part of the result.
            profile: Settings of an author's released code, including its implementation deviations. Arguments passed
                explicitly take precedence.
            layers: Half-open range of layers, (start, stop); negative values count from the end.
            heads: Indices of the attention heads to use.
            rows: "all" for the full token-to-token matrix instead of the read-out row.
            per: "head" to also keep the contribution of every head, for methods that have them. Contributions of
                layers are always kept.
            **options: The fields of `InputOptions` (`max_length`, `truncation`, `truncation_side`, `tokens`,
                `max_new_tokens`) and of `ComputeOptions` (`batch_size`, `memory`, `kernel`, `checkpoint`, `seed`,
                `progress`), or these objects as `input_options` and `compute_options`.

        Returns:
            For one input and one method an `Explanation`, or a `MultiStreamExplanation` where the model takes several
            inputs. A list of inputs gives a list of explanations. A list of methods gives a dict from method to that.

        Raises:
            InputError: If an input, target or option is invalid.
            UnsupportedError: If a method cannot be applied to this model.

        Example:
            >>> ex.explain("A wonderful film", method="attn-lrp")  # doctest: +SKIP
            >>> ex.explain(["good", "bad"], method=["generic", "grad-sam"])  # doctest: +SKIP
            >>> ex.explain(["good", "bad"], target=["positive", "negative"])  # doctest: +SKIP
        """
        request = make_request(
            "explain",
            inputs,
            method,
            target,
            text=text,
            image=image,
            audio=audio,
            regions=regions,
            answer=answer,
            scale=scale,
            profile=profile,
            layers=layers,
            heads=heads,
            rows=rows,
            per=per,
            **options,
        )
        call = self._prepare_call(request)
        memory = request.compute_options.memory
        budget = None if memory is None else MemoryBudget(parse_bytes(memory))
        results: list[list[AnyExplanation] | None] = [None] * len(call.samples)
        for indices in with_progress(call.batches, request.compute_options.progress):
            samples = [call.samples[i] for i in indices]
            targets = [call.targets[i] for i in indices]
            batch_results = self._explain_within_budget(budget, samples, targets, call.batch_request)
            for i, explanations in zip(indices, batch_results, strict=True):
                results[i] = explanations
        completed = [result for result in results if result is not None]
        if len(completed) < len(results):
            raise InputError("progress= must yield every batch that it receives, as tqdm does, but it skipped some")
        results_by_method: list[Any] = [[result[m] for result in completed] for m in range(len(call.requested_methods))]
        if call.is_single:
            results_by_method = [explanations[0] for explanations in results_by_method]
        if method is None or isinstance(method, str | Method):
            return results_by_method[0]
        return dict(zip(map(str, call.requested_methods), results_by_method, strict=True))

    def plan(
        self,
        inputs: Any = None,
        method: MethodLike | Sequence[MethodLike] | None = None,
        target: TargetLike | Sequence[TargetLike] = None,
        **arguments: Any,
    ) -> ExecutionPlan:
        """Plan the passes of a call of `explain` without running them. Print the result to see them.

        The model runs only where it must to make the plan: for its self-test, and to generate an answer.

        Args:
            inputs: As in `explain`.
            method: As in `explain`.
            target: As in `explain`.
            **arguments: The other arguments of `explain`, without `memory`.

        Raises:
            InputError: An argument is invalid, or there is a memory budget, which divides batches while they run.

        Returns:
            The plan of each batch: which passes run, what they record, how attention is computed in them, and why.

        Example:
            >>> print(ex.plan("A wonderful film", method=["generic", "shap"]))  # doctest: +SKIP
        """
        request = make_request("plan", inputs, method, target, **arguments)
        if request.compute_options.memory is not None:
            raise InputError(
                "a plan cannot take memory= into account, because memory= divides batches during execution: leave it "
                "out"
            )
        call = self._prepare_call(request)
        plans = ExecutionPlan()
        for indices in call.batches:
            samples = [call.samples[i] for i in indices]
            targets = [self.adapter.expand_target(call.samples[i], call.targets[i]) for i in indices]
            plans.extend(iter_batch_plans(self.capabilities, samples, targets, call.batch_request))
        return plans

    def _prepare_call(self, request: ExplainRequest) -> "_PreparedCall":
        """Check the arguments of `explain`, encode the inputs, and divide them into batches."""
        raw_inputs, is_single = self._normalise_inputs(request.inputs, **request.streams)
        input_options = request.input_options
        profile = get_profile(request.profile, self.adapter)
        requested_methods: list[Method] = []
        if request.method is not None:
            requested_methods = parse_methods(request.method)
        elif profile is not None or request.has_attention_options:
            requested_methods = [Method("generic")]
        target = request.target
        scale = request.scale
        overridden_target = None
        if profile is not None:
            input_options = replace(input_options, keep_padding=profile.keeps_padding)
            method_names = [method.name for method in requested_methods]
            if profile.overrides_target(method_names, target):
                overridden_target = target
            target, scale = profile.resolve_target(method_names, target, scale)
        samples = list(self._read_samples(raw_inputs, input_options.split_per_input(len(raw_inputs))))
        targets = _make_targets(target, self._resolve_scale(scale), len(samples))
        samples = [self.adapter.resolve_sample(sample, target) for sample, target in zip(samples, targets, strict=True)]
        if profile is not None and profile.prepare_sample is not None:
            prepare_sample = profile.prepare_sample
            prepared = [prepare_sample(self.adapter, s, t) for s, t in zip(samples, targets, strict=True)]
            samples = [sample for sample, _ in prepared]
            targets = [target for _, target in prepared]
        if not requested_methods:
            self.capabilities.run_self_test(samples)
            requested_methods = [Method(recommend_method(self.capabilities, samples).method)]
        methods = [requested.with_defaults(**request.method_options) for requested in requested_methods]
        if profile is not None:
            methods = [profile.configure_method(method) for method in methods]
        _check_per_option(request.per, methods)
        compute_options = request.compute_options
        batches = list(iter_batch_indices(samples, compute_options.batch_size))
        selection = check_methods(self.capabilities, samples, methods, profile)
        batch_request = BatchRequest(selection, input_options, compute_options, request.per, profile, overridden_target)
        if must_run_alone(self.capabilities, selection.pass_methods):
            batches = [[i] for batch in batches for i in batch]
        return _PreparedCall(
            samples, targets, batch_request, batches, requested_methods, is_single and len(samples) == 1
        )

    @torch.inference_mode(False)
    def record(
        self,
        inputs: Any = None,
        requires: str | Iterable[str] = (),
        target: TargetLike | Sequence[TargetLike] = None,
        *,
        text: Any = None,
        image: Any = None,
        audio: Any = None,
        regions: Any = None,
        answer: Any = None,
        scale: str | None = None,
        max_length: int | None = None,
        truncation: bool = True,
        truncation_side: str | None = None,
    ) -> Tape:
        """Run one recorded forward and backward pass and return its tape: every attention call with its tensors.

        Args:
            inputs: As in `explain`.
            requires: Names of the tensors to record, e.g. ("attention", "attention_gradient").
            target: As in `explain`; its value is what gradients are taken of.
            text: Input text by name.
            image: Input image by name.
            audio: Input audio by name.
            regions: Precomputed image regions by name.
            answer: Continuation to explain for a language model.
            scale: Scale of the target value, as in `explain`.
            max_length: Maximum number of tokens.
            truncation: Whether longer texts are truncated; if False, they are refused.
            truncation_side: "left" or "right".

        Returns:
            The tape. `tape.truncated_tokens` holds the number of tokens cut off from each input.

        Raises:
            InputError: If an input, target or option is invalid, or the inputs differ in their number of targets.

        Example:
            >>> tape = ex.record("A wonderful film", requires=("attention", "attention_gradient"))  # doctest: +SKIP
            >>> tape.calls[0].attention.shape  # batch, head, query, key  # doctest: +SKIP
        """
        input_options = InputOptions(max_length, truncation, truncation_side, None, answer)
        streams = {"text": text, "image": image, "audio": audio, "regions": regions}
        batch = self._build_target_batch(inputs, target, input_options, scale, **streams)
        target_function = TargetFunction(batch)
        tape = self.recorder.record(batch.model_inputs, target_function, requires, leaves=batch.leaves)
        tape.logits = target_function.result.class_scores
        return batch.to_unit_vectors(tape)

    def _build_target_batch(
        self, inputs: Any, target: Any, input_options: InputOptions, scale: str | None = None, **streams: Any
    ) -> TargetBatch:
        """Put all inputs with their targets into one batch."""
        raw_inputs, _ = self._normalise_inputs(inputs, **streams)
        samples = list(self._read_samples(raw_inputs, input_options.split_per_input(len(raw_inputs))))
        targets = _make_targets(target, self._resolve_scale(scale), len(samples))
        samples = [self.adapter.resolve_sample(sample, target) for sample, target in zip(samples, targets, strict=True)]
        self.capabilities.run_self_test(samples)
        expanded = [self.adapter.expand_target(sample, target) for sample, target in zip(samples, targets, strict=True)]
        if len(set(map(len, expanded))) > 1:
            raise InputError("inputs with different numbers of targets cannot share a tape: record them one by one")
        return TargetBatch(self.adapter, samples, expanded)

    @property
    def recommended(self) -> Recommendation:
        """The method that `explain` uses by default for this model, and why, with figures. Prints as a sentence.

        For inputs too long for it, `explain` chooses another one; the explanation says which (`e.method`).

        Example:
            >>> print(ex.recommended)  # doctest: +SKIP
        """
        samples = self.adapter.make_samples(self.adapter.make_example_input(), InputOptions())
        self.capabilities.run_self_test(samples)
        return recommend_method(self.capabilities, samples)

    def methods(self) -> ApplicabilityTable:
        """List every registered method with its cost and whether it applies to this model.

        Returns:
            A list with one row per method (`name`, `family`, `cost`, `applies`, `why_not`, `guidance`, `note`,
            `is_recommended`) that displays as a table in notebooks and terminals: the recommended method first,
            controls last.

        Example:
            >>> [row.name for row in ex.methods() if row.applies]  # doctest: +SKIP
        """
        problem = ""
        recommended_name = ""
        try:
            recommended_name = self.recommended.method
        except UnsupportedError as error:
            problem = str(error)
        table = ApplicabilityTable()
        for name in sorted(METHOD_REGISTRY):
            declaration = METHOD_REGISTRY[name].declaration
            why_not = problem or self.capabilities.find_unsupported_reason(Method(name)) or ""
            table.append(
                MethodApplicability(
                    name=name,
                    family=declaration.family,
                    cost=declaration.cost,
                    applies=not why_not,
                    why_not=why_not,
                    guidance=declaration.guidance,
                    note=declaration.note,
                    is_recommended=name == recommended_name,
                )
            )
        table.sort(key=lambda row: (not row.is_recommended, row.family == "control", row.name))
        return table

    def _normalise_inputs(self, inputs: Any, **streams: Any) -> tuple[list[Any], bool]:
        """Return the raw inputs as a list, and whether a single input was given."""
        self.adapter.check_return_dict()
        accepted = self.adapter.input_names
        accepted_text = " and ".join(accepted)
        named = {stream: value for stream, value in streams.items() if value is not None}
        if named:
            unaccepted = [stream for stream in named if stream not in accepted]
            if inputs is not None or unaccepted:
                received = ", ".join(f"{stream}=" for stream in unaccepted or named)
                raise InputError(f"{self.adapter.name} takes {accepted_text}, but was given {received}")
            if len(accepted) > 1:
                return _pair_named_inputs(named, self.adapter.is_single_input)
            inputs = named[accepted[0]]
        if inputs is None:
            raise InputError(f"nothing to explain: pass {accepted_text}")
        if not isinstance(inputs, list) or (inputs and self.adapter.is_single_input(inputs)):
            return [inputs], True
        if not inputs:
            raise InputError("nothing to explain: the list is empty")
        return inputs, False

    def _resolve_scale(self, scale: str | None) -> str:
        """Check the scale of the target; None selects the adapter's first one."""
        scales = self.adapter.target_scales
        if scale is not None and scale not in scales:
            raise unknown_value_error("scale", scale, scales)
        return scale or scales[0]

    def _read_samples(self, raw_inputs: Sequence[Any], input_options: Sequence[InputOptions]) -> Iterator[Sample]:
        """Encode raw inputs; an error names the input where there are several."""
        for options in input_options:
            _check_generation_options(self.adapter, options)
        for i, (raw_input, options) in enumerate(zip(raw_inputs, input_options, strict=True)):
            try:
                yield from self.adapter.make_samples(raw_input, options)
            except InputError as error:
                if len(raw_inputs) > 1:
                    raise InputError(f"input {i}: {error}") from None
                raise

    def _explain_within_budget(
        self, budget: MemoryBudget | None, samples: list[Sample], targets: list[Target], request: BatchRequest
    ) -> list[list[AnyExplanation]]:
        """Run all methods on one batch, split into as many smaller batches as the memory budget requires."""
        if budget is None:
            return explain_batch(self.capabilities, samples, targets, request)
        pass_names = find_pass_names(request.selection.pass_methods)
        results: list[list[AnyExplanation]] = []
        while len(results) < len(samples):
            start = len(results)
            max_units = max(sum(map(len, sample.axes.values())) for sample in samples[start:])
            max_rows = budget.compute_batch_rows(pass_names, max_units)
            selection = slice(start, start + max_rows)
            try:
                with budget.measure_batch(pass_names, max_units, self.adapter.device):
                    results += explain_batch(
                        self.capabilities, samples[selection], targets[selection], request, max_rows
                    )
            except MemoryBudgetExceededError:
                budget.shrink_after_exceeding()
        return results


def _check_generation_options(adapter: ModelAdapter, options: InputOptions) -> None:
    """Raise `InputError` for options of generation if the model generates no text."""
    if isinstance(adapter, GenerativeAdapter):
        return
    rejected = []
    if options.continuation is not None:
        rejected.append("answer= (--answer)")
    if options.max_new_tokens != InputOptions.max_new_tokens:
        rejected.append("max_new_tokens= (--max-new-tokens)")
    if rejected:
        raise InputError(
            f"{adapter.name} ({type(adapter.model).__name__}) generates no text: leave out {' and '.join(rejected)}"
        )


@dataclass(frozen=True)
class _PreparedCall:
    """A call of `explain` with checked arguments and encoded inputs.

    Attributes:
        samples: The inputs.
        targets: The target of each input.
        batch_request: The methods, and the other options.
        batches: The indices of the inputs of each batch.
        requested_methods: The methods as they were given, without options that apply to all of them.
        is_single: Whether one input was given, and not a list.
    """

    samples: list[Sample]
    targets: list[Target]
    batch_request: BatchRequest
    batches: list[list[int]]
    requested_methods: list[Method]
    is_single: bool


def _pair_named_inputs(
    named: dict[str, Any], is_single_input: Callable[[list[Any]], bool]
) -> tuple[list[NamedInputs], bool]:
    """Pair lists of equal length by position; a value that is not a list (or is one conversation) goes with each."""
    lists = {stream: value for stream, value in named.items() if isinstance(value, list)}
    counts = {stream: len(value) for stream, value in lists.items() if not (value and is_single_input(value))}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise InputError(
            f"lists of inputs are paired by position and must have the same length, but have the lengths {counts}: "
            "add the missing inputs"
        )
    num_inputs = next(iter(counts.values()), 1)
    shared = {stream: value for stream, value in named.items() if stream not in counts}
    raw_inputs = [NamedInputs(**shared, **{stream: lists[stream][i] for stream in counts}) for i in range(num_inputs)]
    return raw_inputs, not counts


def _check_per_option(per: str | None, methods: Sequence[Method]) -> None:
    """Check that `per` is None or "head", and that for "head" a method has contributions of heads."""
    if per not in (None, "head"):
        raise InputError(
            f"per={per!r} is not valid: use per='head' for the contribution of every head, or leave it out"
        )
    if per == "head" and not any(method.declaration.has_head_contributions for method in methods):
        available = sorted(name for name, cls in METHOD_REGISTRY.items() if cls.declaration.has_head_contributions)
        requested = ", ".join(method.name for method in methods)
        raise InputError(
            f"per='head': the scores of {requested} cannot be split by head; methods whose scores can be: "
            f"{', '.join(available)}"
        )


def _make_targets(target: Any, scale: str, num_inputs: int) -> list[Target]:
    """One target per input: a list gives them one by one, any other value holds for all."""
    if not isinstance(target, list):
        return [make_target(target, scale)] * num_inputs
    if len(target) != num_inputs:
        raise InputError(f"target= has {len(target)} targets for {num_inputs} inputs: pass one for each")
    return [make_target(input_target, scale) for input_target in target]
