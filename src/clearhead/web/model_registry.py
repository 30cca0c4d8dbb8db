"""The models of the server: an allow-list, loaded once at the start."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clearhead import RECOMMENDED_METHOD
from clearhead.errors import InputError, unknown_value_error
from clearhead.methods.base import METHOD_REGISTRY
from clearhead.web.method_groups import estimate_passes, group_by_cost

if TYPE_CHECKING:
    from clearhead.explainer import Explainer

ProgressWrapper = Callable[[Sequence[str]], Iterable[str]]
#: Initial text of the page, by task.
SAMPLE_TEXTS_BY_TASK = {
    "text-classification": "You look extremely confused, but I like the movie",
    "fill-mask": "The capital of France is [MASK].",
    "text2text-generation": "phone",
    "zero-shot-image-classification": "a photo of a cat",
}
SAMPLE_TEXTS_BY_MODEL = {"zoo:topics": "What is the capital of France ?", "zoo:spell": "phone"}


@dataclass
class LoadedModel:
    """A model of the server. The scheduler gives it to one thread at a time.

    Attributes:
        name: Name in the API.
        explainer: Its explainer.
        model_card: Model card, for models of the zoo.
        method_rows: Methods and whether they apply; None until they have been checked.
    """

    name: str
    explainer: "Explainer"
    model_card: Mapping[str, Any] = field(default_factory=dict)
    method_rows: list[dict[str, Any]] | None = None

    def summarise(self) -> dict[str, Any]:
        """Return the name and the entries of the model card that the list of models shows."""
        card = {key: self.model_card[key] for key in ("task", "summary", "figures") if self.model_card.get(key)}
        return {"name": self.name, **card}

    def describe(self, check_applicability: bool = True) -> dict[str, Any]:
        """Describe inputs, labels and methods.

        Args:
            check_applicability: Whether to test which methods apply, which runs the model; otherwise `applies` is
                None where it is not known yet.
        """
        from clearhead.adapters.generation import GenerativeAdapter

        adapter = self.explainer.adapter
        labels: list[str] | None = None
        if adapter.labels and not adapter.masked:  # otherwise the labels are the vocabulary
            labels = [adapter.labels[index] for index in sorted(adapter.labels)]
        if check_applicability:
            methods = self._list_checked_methods()
        else:
            methods = self.method_rows or _list_unchecked_methods()
        return {
            **self.summarise(),
            "model_class": type(adapter.model).__name__,
            "adapter_class": type(adapter).__name__,
            "input_names": list(adapter.input_names),
            "labels": labels,
            "is_generative": isinstance(adapter, GenerativeAdapter),
            "target_scales": list(adapter.target_scales),
            "sample_text": self._find_sample_text(),
            "has_examples": self._has_examples(),
            "methods": methods,
        }

    def _list_checked_methods(self) -> list[dict[str, Any]]:
        """List all methods and whether they apply; the first call runs the model, later ones reuse its result."""
        if self.method_rows is None:
            support = {row.name: row for row in self.explainer.methods()}
            recommended_name = next((row.name for row in support.values() if row.is_recommended), RECOMMENDED_METHOD)
            self.method_rows = [
                _describe_method(name, support[name].applies, support[name].why_not, recommended_name)
                for name in _list_method_names(recommended_name)
            ]
        return self.method_rows

    def _find_sample_text(self) -> str | None:
        """Return a sample text for this model or its task; None for a model that takes no text."""
        if "text" not in self.explainer.adapter.input_names:
            return None
        task = str(self.model_card.get("task", ""))
        return SAMPLE_TEXTS_BY_MODEL.get(self.name) or SAMPLE_TEXTS_BY_TASK.get(task)

    def _has_examples(self) -> bool:
        """Check whether the zoo has examples with ground-truth evidence for the model."""
        if not self.name.startswith("zoo:"):
            return False
        from clearhead_zoo.examples import list_models_with_examples

        return self.name.removeprefix("zoo:") in list_models_with_examples()


def _list_method_names(recommended_name: str) -> list[str]:
    """List all methods: the recommended one first, then the cheapest, controls last."""
    names = [name for group in group_by_cost(list(METHOD_REGISTRY)) for name in group]
    return sorted(
        names, key=lambda name: (name != recommended_name, METHOD_REGISTRY[name].declaration.family == "control")
    )


def _list_unchecked_methods() -> list[dict[str, Any]]:
    """List all methods without running the model: whether they apply is unknown (None)."""
    return [_describe_method(name, None, "", RECOMMENDED_METHOD) for name in _list_method_names(RECOMMENDED_METHOD)]


def _describe_method(name: str, applies: bool | None, why_not: str, recommended_name: str) -> dict[str, Any]:
    """Return the declaration of a method and its estimated cost, as the page shows them."""
    declaration = METHOD_REGISTRY[name].declaration
    return {
        "name": name,
        "family": declaration.family,
        "cost": str(declaration.cost),
        "short_cost": declaration.cost.brief,
        "num_passes": estimate_passes(name),
        "is_signed": declaration.signed,
        "depends_on_target": declaration.target == "any",
        "guidance": declaration.guidance,
        "note": declaration.note,
        "citation": declaration.citation,
        "is_recommended": name == recommended_name,
        "applies": applies,
        "why_not": why_not,
    }


class ModelRegistry:
    """The loaded models by name.

    All models are loaded in the constructor, one after another: while transformers loads a model, it changes defaults
    of the whole process, which would affect threads that compute.

    Args:
        models: Names that `clearhead.load` takes, or explainers by name.
        wrap_progress: Function that wraps the names while the models are loaded, such as `tqdm`.

    Raises:
        InputError: There are no models, or one cannot be loaded.
    """

    def __init__(
        self, models: "Sequence[str] | Mapping[str, Explainer]", wrap_progress: ProgressWrapper = list
    ) -> None:
        from clearhead.zoo import zoo_models

        if isinstance(models, Mapping):
            explainers = dict(models)
        else:
            explainers = {name: _load_explainer(name) for name in wrap_progress(models)}
        model_cards = {f"zoo:{name}": card for name, card in zoo_models().items()}
        self.loaded_models = {
            name: LoadedModel(name, explainer, model_cards.get(name, {})) for name, explainer in explainers.items()
        }
        if not self.loaded_models:
            raise InputError("there is no model to serve: specify one with --model, or run pip install clearhead-zoo")

    def __getitem__(self, name: str) -> LoadedModel:
        """Return a loaded model by name.

        Args:
            name: The name that it was loaded by.

        Returns:
            The model.

        Raises:
            InputError: If the model is not loaded; nothing is loaded on demand.
        """
        if name not in self.loaded_models:
            raise unknown_value_error("model", name[:100], self.loaded_models)
        return self.loaded_models[name]

    def list_summaries(self) -> list[dict[str, Any]]:
        """Return name, task, summary and figures of each model, in the order of loading."""
        return [loaded_model.summarise() for loaded_model in self.loaded_models.values()]


def _load_explainer(name: str) -> "Explainer":
    """Load a model; the progress bars of transformers are switched off for the whole process."""
    import transformers

    from clearhead.loader import load

    transformers.logging.disable_progress_bar()
    return load(name)


def list_zoo_model_names() -> list[str]:
    """List the models of the zoo, the text classifier first.

    Returns:
        Names that `clearhead.load` takes; empty without the package `clearhead-zoo`.
    """
    from clearhead.zoo import zoo_models

    return sorted((f"zoo:{name}" for name in zoo_models()), key=lambda name: (name != "zoo:sentiment", name))
