"""Fine-tuning for probes: labelled splits, trainable copies of the model, and how far a copy has moved.

The model itself is never trained, only copies of it. With a folder, each run is saved under a name made from all its
settings, so that an interrupted run is resumed and a finished one is not repeated.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.capture.topology import ModelTopology
from clearhead.engine.batching import iter_batch_indices
from clearhead.errors import InputError, UnsupportedError
from clearhead.interventions.attention_patch import AttentionPatch, run_training_forward
from clearhead.probes.base import ProbeContext, ProbeScope
from clearhead.probes.divergences import compute_js_divergence, compute_total_variation
from clearhead.sample import Sample
from clearhead.training import ExponentialMovingAverage, TrainingBudget, train

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

#: A progress callback: (name of the run, completed fraction).
TrainingProgress = Callable[[str, float], None]
#: Returns the attention patches for some samples.
PatchFactory = Callable[[Sequence[Sample]], list[AttentionPatch]]
#: Number of inputs in a pass without training.
EVALUATION_BATCH_SIZE = 64


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside the `with`, and restore the caller's generators afterwards.

    Args:
        seed: The seed, of the CPU and of the current GPU.

    Yields:
        Nothing: the `with` contains the training.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class FineTuningConfig:
    """Settings of a training run.

    Attributes:
        steps: Number of training steps.
        batch_size: Number of inputs in a step.
        learning_rate: Peak learning rate.
        checkpoint_dir: Folder that keeps runs; None keeps none.
        on_progress: Function that is called with the name of a run and its completed fraction.
    """

    steps: int = 300
    batch_size: int = 32
    learning_rate: float = 5e-5
    checkpoint_dir: str | Path | None = None
    on_progress: TrainingProgress | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or not self.learning_rate > 0:
            raise InputError(
                f"steps={self.steps}, batch_size={self.batch_size}, learning_rate={self.learning_rate} are not valid: "
                "all must be above 0"
            )

    def train_model(
        self,
        name: str,
        model: nn.Module,
        compute_loss: Callable[[int], Tensor],
        seed: int,
        cache_key: Mapping[str, Any],
    ) -> None:
        """Train a model in place and leave it with its averaged weights.

        Args:
            name: Name of the run.
            model: The model; all parameters that require gradients are trained.
            compute_loss: Returns the loss of a step, given its number.
            seed: Seed of dropout.
            cache_key: Everything besides these settings that determines the run.
        """
        optimiser = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=self.learning_rate,
            weight_decay=0.0,
        )
        budget = TrainingBudget(total_steps=self.steps)
        average = ExponentialMovingAverage(model)

        def report_progress(budget: TrainingBudget) -> None:
            if self.on_progress is not None:
                self.on_progress(name, budget.fraction)

        with fixed_seed(seed), torch.enable_grad():
            train(
                lambda: compute_loss(budget.step),
                [optimiser],
                budget,
                average,
                warmup_fraction=0.1,
                max_grad_norm=1.0,
                checkpoint=self._make_checkpoint_path(name, seed, cache_key),
                name=name,
                checkpoint_dtype=None,
                progress=report_progress,
            )
        average.load_weights(average.tensors)

    def _make_checkpoint_path(self, name: str, seed: int, cache_key: Mapping[str, Any]) -> Path | None:
        """Name a checkpoint by the run and a hash of all that affects it; None without a folder."""
        if self.checkpoint_dir is None:
            return None
        run_key = {**cache_key, "steps": self.steps, "batch": self.batch_size, "rate": self.learning_rate, "seed": seed}
        digest = hashlib.blake2b(json.dumps(run_key, sort_keys=True).encode(), digest_size=6).hexdigest()
        return Path(self.checkpoint_dir) / f"{name.replace(' ', '-')}-{digest}.safetensors"


class LabelledSplit:
    """Inputs with labels, split into training and test inputs.

    Attributes:
        context: The model and its inputs.
        base_copy: A copy of the untrained model in evaluation mode.
        labels: The class index of each input; the model's own predictions if none were given.
        label_source: "given" or "its own answers", for the settings of a result.
        train_indices: Indices of the inputs to train on.
        test_indices: Indices of the inputs to measure on.
        cache_key: Everything about the split that determines a training run.
    """

    def __init__(
        self,
        explainer: "Explainer",
        inputs: Any,
        labels: Sequence[str | int] | None,
        held_out: float | int,
        target: Any,
        seed: int,
    ) -> None:
        """Prepare the inputs and split them.

        Args:
            explainer: Explainer of the model.
            inputs: One input or a list of inputs.
            labels: One label for each input; None for the model's own predictions.
            held_out: Fraction of the inputs to measure on, or how many of the last inputs.
            target: The target, as in `Explainer.explain`.
            seed: Seed of the split.

        Raises:
            InputError: The split leaves no input to train or to measure on, or the labels do not fit the inputs.
            UnsupportedError: A multi-label model, or one that cannot be probed.
        """
        self.context = ProbeContext(explainer, inputs, target)
        if self.context.multi_label:
            raise UnsupportedError("this probe cannot train on labels that are not mutually exclusive")
        count = len(self.context.samples)
        if isinstance(held_out, int):
            num_test = int(held_out)
            order = np.arange(count)[::-1]
        else:
            num_test = round(held_out * count)
            order = np.random.default_rng(seed).permutation(count)
        if not 0 < num_test < count:
            raise InputError(
                f"held_out={held_out} leaves no inputs for training or none for evaluation (number of inputs: "
                f"{count}): use more inputs, a fraction between 0 and 1, or the number of inputs to hold out from the "
                "end"
            )
        if labels is not None and len(labels) != count:
            raise InputError(f"{len(labels)} labels for {count} inputs: pass one for each")
        self.base_copy = ModelCopy(self.context).eval()
        if labels is None:
            self.labels = self._predict_labels()
            self.label_source = "its own answers"
        else:
            self.labels = self._resolve_labels(labels)
            self.label_source = "given"
        self.test_indices = np.sort(order[:num_test])
        self.train_indices = np.sort(order[num_test:])
        digest = hashlib.blake2b(digest_size=6)
        for sample in self.context.samples:
            digest.update(str(sample.derive_seed(0)).encode())
        for parameter in self.base_copy.model.parameters():  # another model with the same data is another run
            digest.update(parameter.detach().double().sum().cpu().numpy().tobytes())
        self.cache_key = {
            "data": digest.hexdigest(),
            "labels": self.labels.tolist(),
            # the test inputs of this run must not have been training inputs of a cached one
            "held out": self.test_indices.tolist(),
            "target": str(self.context.target),
        }

    def _predict_labels(self) -> Int[Tensor, "input"]:
        """Predict the class of every input with the unchanged model, as its label."""
        return self.base_copy.predict_probabilities(range(len(self.context.samples)))[0].argmax(-1).cpu()

    def _resolve_labels(self, labels: Sequence[str | int]) -> Int[Tensor, "input"]:
        """Convert label names or indices to a tensor of class indices."""
        return torch.tensor([self.context.adapter.label_index(label) for label in labels])

    def select_batch_indices(self, step: int, batch_size: int, seed: int) -> list[int]:
        """Return the training inputs of one step; the order is shuffled in each epoch."""
        batch_size = min(batch_size, len(self.train_indices))
        steps_per_epoch = len(self.train_indices) // batch_size
        order = np.random.default_rng((seed, step // steps_per_epoch)).permutation(self.train_indices)
        return order[(step % steps_per_epoch) * batch_size :][:batch_size].tolist()

    def compute_correctness(
        self, probabilities: Float[Tensor, "input label"], indices: Sequence[int]
    ) -> Float[np.ndarray, "input"]:
        """Return 1 for each input whose most likely class is its label, else 0."""
        return (probabilities.argmax(-1).cpu() == self.labels[list(indices)]).double().numpy()


class ModelCopy:
    """A trainable copy of the model, in float32."""

    def __init__(self, context: ProbeContext, fresh: int | str | None = None, seed: int = 0) -> None:
        """Copy the model.

        Args:
            context: The model and its inputs.
            fresh: How many of the last layers are reinitialised, or "all"; None for none.
            seed: Seed of the new weights.
        """
        self.context = context
        self.adapter = context.adapter
        self.model = copy.deepcopy(context.adapter.model).float()
        self.model.requires_grad_(True)
        if fresh is not None:
            attention_modules = [call_site.module for call_site in context.self_test.call_sites]
            with fixed_seed(seed):
                reinitialise_layers(self.model, attention_modules, fresh)
        self.topology = ModelTopology(self.model)

    def eval(self) -> "ModelCopy":
        """Switch to evaluation mode and return self."""
        self.model.eval()
        return self

    def train(self) -> "ModelCopy":
        """Switch to training mode and return self."""
        self.model.train()
        return self

    def compute_scores_and_attention(
        self, samples: Sequence[Sample], patches: Sequence[AttentionPatch] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the scores of all classes and the attention of every layer, both in the autograd graph."""
        batch = self.adapter.collate(samples)
        with self.adapter.forward_context():
            output, calls = run_training_forward(self.topology, self.context.self_test, batch, patches)
        targets = [self.context.get_target(sample) for sample in samples]
        return self.adapter.compute_class_scores(output, samples, targets).float(), [call.attention for call in calls]

    def predict_probabilities(
        self,
        indices: Sequence[int],
        scope: ProbeScope | None = None,
        make_patches: PatchFactory | None = None,
    ) -> tuple[Float[Tensor, "input label"], list[Float[Tensor, "layer head row key"]]]:
        """Compute the probabilities of inputs and, with a scope, their attention in that scope, without padding."""
        samples = [self.context.samples[i] for i in indices]
        probabilities: list[Tensor] = [torch.empty(0)] * len(samples)
        attention: list[Tensor] = [torch.empty(0)] * len(samples)
        with torch.no_grad():
            for batch_indices in iter_batch_indices(samples, EVALUATION_BATCH_SIZE):
                batch_samples = [samples[i] for i in batch_indices]
                patches = make_patches(batch_samples) if make_patches else ()
                scores, maps = self.compute_scores_and_attention(batch_samples, patches)
                for n, i in enumerate(batch_indices):
                    probabilities[i] = scores[n].softmax(-1)
                if scope is None:
                    continue
                scope_attention = self.select_attention(maps, batch_samples, scope)
                for n, i in enumerate(batch_indices):
                    num_rows, num_keys = self._count_rows_and_keys(batch_samples[n], scope)
                    attention[i] = scope_attention[n, :, :, :num_rows, :num_keys]
        return torch.stack(probabilities), attention

    def select_attention(
        self, attention_maps: Sequence[Tensor], samples: Sequence[Sample], scope: ProbeScope
    ) -> Float[Tensor, "batch layer head row key"]:
        """Select the attention in a scope from the maps of all layers."""
        layers = scope.resolve_layers(len(attention_maps))
        selected = torch.stack([attention_maps[layer] for layer in layers], dim=1)
        if not scope.is_readout_row_only:
            return selected
        rows = [self.context.find_readout_row(sample) for sample in samples]
        return selected[torch.arange(len(rows)), :, :, rows][:, :, :, None]

    def _count_rows_and_keys(self, sample: Sample, scope: ProbeScope) -> tuple[int, int]:
        """Return the number of rows in scope (1 for the read-out row alone) and of keys."""
        length = len(self.context.get_units(sample))
        if self.context.has_pooling_query or scope.is_readout_row_only:
            return 1, length
        return length, length

    def compute_row_weights(self, samples: Sequence[Sample], scope: ProbeScope) -> Float[Tensor, "batch row"]:
        """Compute a weight for each row: 0 for padding, and equal weights that sum to one for each input."""
        sizes = [self._count_rows_and_keys(sample, scope)[0] for sample in samples]
        return torch.stack([(torch.arange(max(sizes)) < size) / size for size in sizes]).to(self.adapter.device)


def reinitialise_layers(model: nn.Module, attention_modules: Sequence[str], fresh: int | str) -> None:
    """Reinitialise the last layers of a model and everything after them.

    "After" is the order in which parameters are registered.

    Args:
        model: The model.
        attention_modules: Names of the attention modules, in order.
        fresh: Number of layers, or "all" for all weights.

    Raises:
        InputError: The number of layers is not possible.
        UnsupportedError: A module has no `reset_parameters()`.
    """
    order = {id(parameter): index for index, (_, parameter) in enumerate(model.named_parameters())}
    first_index = 0 if fresh == "all" else _find_first_reinitialised(model, attention_modules, fresh, order)
    with torch.no_grad():
        for module in model.modules():
            parameters = list(module.parameters(recurse=False))
            if parameters and all(order.get(id(parameter), -1) >= first_index for parameter in parameters):
                _reset_parameters(model, module)


def _find_first_reinitialised(
    model: nn.Module, attention_modules: Sequence[str], fresh: int | str, order: Mapping[int, int]
) -> int:
    """The index of the first parameter that is reinitialised."""
    layer_of_module = ModelTopology(model).layer_of_module
    layers = [
        layer for name in attention_modules if (layer := layer_of_module.get(id(model.get_submodule(name)))) is not None
    ]
    layers_known = len(layers) == len(attention_modules)
    if not layers_known or isinstance(fresh, bool) or not isinstance(fresh, int) or not 0 <= fresh <= len(layers):
        raise InputError(
            f"fresh={fresh!r} is not valid: use the number of final layers to reinitialise, at most "
            f"{len(attention_modules)} (0: only the modules after them), or 'all', the only choice if attention is "
            "outside of layers"
        )
    selected_layers = layers[len(layers) - fresh :] or layers[-1:]
    indices = [order[id(parameter)] for layer in selected_layers for parameter in layer.parameters()]
    return min(indices) if fresh else max(indices) + 1


def _reset_parameters(model: nn.Module, module: nn.Module) -> None:
    """Reinitialise one module with transformers' `_init_weights`, or PyTorch's `reset_parameters`."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        for parameter in module.parameters(recurse=False):
            # _init_weights skips parameters that were loaded from a checkpoint
            parameter._is_hf_initialized = False  # type: ignore[attr-defined]
        model._init_weights(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]
    else:
        raise UnsupportedError(
            f"{type(module).__name__} has no method to reinitialise its weights: define reset_parameters()"
        )


def compute_attention_divergence(
    attention_maps: Sequence[Float[Tensor, "layer head row key"]],
    reference_maps: Sequence[Float[Tensor, "layer head row key"]],
) -> tuple[Float[np.ndarray, "input"], Float[np.ndarray, "input"]]:
    """Compute the JSD of the attention of two models on each input: the mean over heads, and that of the mean head."""
    head_jsds = []
    mean_head_jsds = []
    for attention, reference in zip(attention_maps, reference_maps, strict=True):
        head_jsds.append(float(compute_js_divergence(attention, reference).mean()))
        mean_head_jsds.append(float(compute_js_divergence(attention.mean(1), reference.mean(1)).mean()))
    return np.array(head_jsds), np.array(mean_head_jsds)


def compute_prediction_shift(
    probabilities: Float[Tensor, "input label"], reference_probabilities: Float[Tensor, "input label"]
) -> Float[np.ndarray, "input"]:
    """Compute the total variation distance of the outputs of two models on each input."""
    return compute_total_variation(probabilities, reference_probabilities).double().cpu().numpy()


def fine_tune_copy(
    split: LabelledSplit,
    run_name: str,
    config: FineTuningConfig,
    seed: int,
    fresh: int | str | None = None,
    make_patches: PatchFactory | None = None,
    extra_cache_key: Mapping[str, Any] | None = None,
) -> ModelCopy:
    """Fine-tune a copy of the model on the labels.

    Args:
        split: Inputs and labels.
        run_name: Name of the run.
        config: Length and learning rate of the training.
        seed: Seed of new weights, dropout and the order of the inputs.
        fresh: How many of the last layers are reinitialised, or "all"; None for none.
        make_patches: Attention patches that are active during the training.
        extra_cache_key: Further settings that determine the run.

    Returns:
        The trained copy in evaluation mode.
    """
    model_copy = ModelCopy(split.context, fresh, seed).train()

    def compute_loss(step: int) -> Tensor:
        indices = split.select_batch_indices(step, config.batch_size, seed)
        samples = [split.context.samples[i] for i in indices]
        patches = make_patches(samples) if make_patches else ()
        scores, _ = model_copy.compute_scores_and_attention(samples, patches)
        return nn.functional.cross_entropy(scores, split.labels[indices].to(scores.device))

    cache_key = {**split.cache_key, "fresh": str(fresh), **(extra_cache_key or {})}
    config.train_model(run_name, model_copy.model, compute_loss, seed, cache_key)
    return model_copy.eval()
