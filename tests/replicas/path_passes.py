"""Plain passes at other points than the given input, as in the authors' code: one sample and one point at a time, on a
copy with eager attention. No code of clearhead is used."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tests.replicas.plain_pass import Value

#: The module whose output, embeddings with positions, enters the layers of a model.
EMBEDDINGS = {
    "bert": "bert.embeddings",
    "roberta": "roberta.embeddings",
    "distilbert": "distilbert.embeddings",
    "modernbert": "model.embeddings",
    "albert": "albert.encoder.embedding_hidden_mapping_in",
}


class InputEvaluator:
    """Evaluates one model at points in the input space of one sample."""

    def __init__(self, model: Any, inputs: Mapping[str, Tensor], value: Value) -> None:
        self.model, self.value = copy.deepcopy(model).eval(), value
        self.model.set_attn_implementation("eager")
        self.inputs = dict(inputs)
        self.pixels = "pixel_values" in self.inputs
        if self.pixels:
            self.x = self.inputs.pop("pixel_values").double().numpy()
        else:
            ids = self.inputs.pop("input_ids")
            self.x = self.model.get_input_embeddings()(ids).detach().numpy()

    def _run(self, vectors: Tensor) -> Any:
        name = "pixel_values" if self.pixels else "inputs_embeds"
        return self.model(**{name: vectors}, **self.inputs, output_attentions=True)

    def gradient(self, vectors: np.ndarray) -> tuple[float, Float[np.ndarray, "*leaf"]]:
        """Return the value of the target and its gradient at a point."""
        leaf = torch.tensor(vectors, dtype=torch.float64, requires_grad=True)
        y = self.value(self._run(leaf))
        (gradient,) = torch.autograd.grad(y, leaf)
        return float(y.detach()), gradient.numpy()

    def compute_attention_gradient(
        self, vectors: np.ndarray, factor: float = 1.0
    ) -> Float[np.ndarray, "head query key"]:
        """Return the gradient of the last attention map; `factor` scales the first layer's input, or the pixels."""
        leaf = torch.tensor(vectors, dtype=torch.float64, requires_grad=True)
        handles = []
        if not self.pixels:
            name = EMBEDDINGS[self.model.config.model_type]
            hook: Callable[..., Tensor] = lambda module, args, output: output * factor  # noqa: E731
            handles.append(self.model.get_submodule(name).register_forward_hook(hook))
        output = self._run(leaf * factor if self.pixels else leaf)
        for handle in handles:
            handle.remove()
        (gradient,) = torch.autograd.grad(self.value(output), output.attentions[-1])
        return gradient[0].double().numpy()


def select_predicted_class(scores: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that selects the class with the highest of these scores, also for other inputs."""
    label = int(scores.argmax())
    return lambda logits: logits[label]
