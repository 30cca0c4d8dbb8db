"""The cases of the claim (docs/claim.md): which models are trained, and what is measured on them, on which examples."""

import hashlib
import json
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import clearhead_zoo
from clearhead.bench.data import load_benchmark_dataset
from clearhead.bench.data.base import Example
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement, make_protocol
from clearhead.bench.protocols.known_evidence import KnownEvidence
from clearhead.methods.base import METHOD_REGISTRY, Method

#: Models trained for the claim, one folder per task and seed. They are not committed, because the zoo keeps one seed.
MODELS_DIR = Path("build/claim/models")
#: Scores of the claim, one file per case.
SCORES_DIR = Path("benchmarks/results/claim")
#: Seed of the held-out examples. Methods were developed on the examples of seed 0.
EXAMPLES_SEED = 20261120
#: The registered tasks, each with the seeds of its models. The zoo keeps `ZOO_SEED`. One training run of `shapes-vilt`
#: takes more than five minutes on an H200.
ZOO_SEED = 0
TASK_SEEDS: dict[str, tuple[int, ...]] = {
    "logic": (0, 1, 2, 3, 4),
    "negation": (0, 1, 2, 3, 4),
    "recall": (0, 1, 2, 3, 4),
    "two-hop": (0, 1, 2, 3, 4),
    "spell": (0, 1, 2, 3, 4),
    "shapes-vqa": (0, 1, 2, 3, 4),
    "shapes-vilt": (0, 1, 2),
    "shapes-detr": (0, 1, 2, 3, 4),
    "pets-hans": (0, 1, 2, 3, 4),
    "counting": (0, 1, 2, 3, 4),
    "signs": (0, 1, 2, 3, 4),
}
#: Tasks whose input is an image alone; their columns have fewer examples, because each takes longer.
IMAGE_TASKS = ("shapes-detr", "pets-hans", "counting", "signs")
NUM_TEXT_EXAMPLES = 200
NUM_IMAGE_EXAMPLES = 100
#: Methods that run more inputs than this through the model, or some for each unit, are measured on the zoo's seed alone
#: and on fewer examples.
MAX_CHEAP_INPUTS = 100
NUM_EXPENSIVE_EXAMPLES = 100
#: Tasks whose training script reads data: the file or folder below that given by --data.
DATA_OPTIONS = {"spell": "spell.tsv", "pets-hans": ""}


class ClaimCase(ABC):
    """One model, its held-out examples, and the figure that is measured on them."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the case and of its files."""

    @property
    @abstractmethod
    def model_dir(self) -> Path:
        """Folder of the model."""

    @property
    @abstractmethod
    def num_examples(self) -> int:
        """Number of held-out examples."""

    @property
    @abstractmethod
    def protocol(self) -> BenchmarkProtocol:
        """What is measured."""

    @abstractmethod
    def load_examples(self, data: Path | None) -> list[Example]:
        """Load the held-out examples.

        Args:
            data: Folder of the data sets.
        """

    @abstractmethod
    def select_values(self, measurements: Iterable[Measurement]) -> dict[tuple[str, str], float]:
        """Return (column, example) → the figure."""

    @property
    def is_trained(self) -> bool:
        """Whether there is a model: its card is written last."""
        return (self.model_dir / "card.json").is_file()

    @property
    def measures_expensive_methods(self) -> bool:
        """Whether methods with many passes are measured, too."""
        return True

    @property
    def scores_path(self) -> Path:
        """File of the scores."""
        return SCORES_DIR / f"{self.name}.json"

    def count_examples(self, method: str) -> int:
        """Return on how many examples a method is measured; 0 if it is too expensive for this case.

        Args:
            method: Name of the method.
        """
        if not is_expensive(method):
            return self.num_examples
        return min(NUM_EXPENSIVE_EXAMPLES, self.num_examples) if self.measures_expensive_methods else 0


@dataclass(frozen=True)
class KnownAnswerCase(ClaimCase):
    """One trained model of a known-answer task: the average precision of the evidence, by stream.

    Attributes:
        task: Name of the task, which is that of its zoo model.
        seed: Seed of the training.
    """

    task: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-seed{self.seed}"

    @property
    def is_zoo_model(self) -> bool:
        """Whether the zoo keeps this seed."""
        return self.seed == ZOO_SEED

    @property
    def model_dir(self) -> Path:
        return clearhead_zoo.MODELS_DIR / self.task if self.is_zoo_model else MODELS_DIR / self.name

    @property
    def num_examples(self) -> int:
        return NUM_IMAGE_EXAMPLES if self.task in IMAGE_TASKS else NUM_TEXT_EXAMPLES

    @property
    def protocol(self) -> BenchmarkProtocol:
        return KnownEvidence()

    @property
    def measures_expensive_methods(self) -> bool:
        """On the zoo's seed alone."""
        return self.is_zoo_model

    def load_examples(self, data: Path | None) -> list[Example]:
        """Generate examples with a seed that no method was developed on."""
        examples = load_benchmark_dataset("known", task=self.task, count=self.num_examples, seed=EXAMPLES_SEED)
        ids = Counter[str]()
        unique = []
        for example in examples:  # two pronunciations of a word have one id
            ids[example.id] += 1
            unique.append(replace(example, id=f"{example.id}#{ids[example.id]}") if ids[example.id] > 1 else example)
        return unique

    def select_values(self, measurements: Iterable[Measurement]) -> dict[tuple[str, str], float]:
        return {(m.part, m.example): m.figures["minimal average precision"] for m in measurements}


@dataclass(frozen=True)
class RemovalCase(ClaimCase):
    """A zoo model of real data: the removal gap, by stream and replacement.

    The gap is the area under the curve of the predicted class's probability as the units with the lowest scores are
    removed first, minus that as the units with the highest scores are.

    Attributes:
        model: Name of the zoo model.
        data_set: Its data set; the examples are the first of a fixed random order of the split "test".
        fills: Replacements of removed units.
        num_examples: Number of examples.
    """

    model: str
    data_set: str
    fills: tuple[str, ...]
    num_examples: int = 200

    @property
    def name(self) -> str:
        return f"removal-{self.model}"

    @property
    def model_dir(self) -> Path:
        return clearhead_zoo.path(self.model)

    @property
    def protocol(self) -> BenchmarkProtocol:
        return make_protocol("perturb-images" if self.data_set == "pets" else "perturb-text", fills=self.fills)

    @property
    def measures_expensive_methods(self) -> bool:
        """The claim compares the gap with methods of few passes."""
        return False

    def load_examples(self, data: Path | None) -> list[Example]:
        if data is None:
            raise FileNotFoundError(f"{self.model} is measured on {self.data_set}: give the folder of data with --data")
        data_set = load_benchmark_dataset(self.data_set, "test", data)
        if len(data_set) < self.num_examples:
            raise ValueError(
                f"{self.data_set} has {len(data_set)} test examples, but {self.num_examples} are registered"
            )
        order = np.random.default_rng(EXAMPLES_SEED).permutation(len(data_set))
        return [data_set[int(index)] for index in order[: self.num_examples]]

    def select_values(self, measurements: Iterable[Measurement]) -> dict[tuple[str, str], float]:
        areas: dict[tuple[str, str], dict[str, float]] = {}
        for measurement in measurements:
            column, _, direction = measurement.part.rpartition("/")
            areas.setdefault((column, measurement.example), {})[direction] = measurement.figures[
                "probability clearhead"
            ]
        return {key: area["negative"] - area["positive"] for key, area in areas.items()}


#: Real models of the zoo, with replacements that they were trained with or that are common for their kind.
REMOVAL_CASES = (
    RemovalCase("sentiment", "sst2", ("mask", "delete")),
    RemovalCase("rationale", "eraser-movies", ("mask",), num_examples=199),  # all of the split
    RemovalCase("pets", "pets", ("blur",)),
    RemovalCase("pets-mean", "pets", ("mean",)),
    RemovalCase("pets-clip", "pets", ("blur",)),
)


def list_cases() -> list[ClaimCase]:
    """List all registered cases: the models of each known-answer task, then the zoo's models of real data."""
    known_answer_cases = [KnownAnswerCase(task, seed) for task, seeds in TASK_SEEDS.items() for seed in seeds]
    return [*known_answer_cases, *REMOVAL_CASES]


def is_expensive(method: str) -> bool:
    """Whether a method runs more than `MAX_CHEAP_INPUTS` inputs or some for each unit, or solves max-flow problems."""
    cost = METHOD_REGISTRY[method].declaration.cost
    return cost.needs_max_flow or cost.per_unit > 0 or cost.forward > MAX_CHEAP_INPUTS


def make_training_command(case: KnownAnswerCase, device: str, data: Path | None) -> list[str]:
    """Return the command that trains a model: that of the zoo's card, with another seed and other folders.

    Args:
        case: The model to train.
        device: Where to train.
        data: Folder of the files that some scripts read.

    Raises:
        FileNotFoundError: The script reads data, and `data` is None; or the zoo has no model of this task yet.
    """
    if case.task not in clearhead_zoo.names():
        raise FileNotFoundError(f"the zoo has no model of {case.task} yet, whose settings the others share")
    words = shlex.split(clearhead_zoo.card(case.task)["command"])
    options = dict(zip(words[2::2], words[3::2], strict=True))
    work_dir = MODELS_DIR.parent / "work" / case.name
    options |= {"--seed": str(case.seed), "--out": str(case.model_dir), "--work": str(work_dir), "--device": device}
    if case.task in DATA_OPTIONS:
        if data is None:
            raise FileNotFoundError(f"{case.task} is trained on data: give its folder with --data")
        options["--data"] = str(data / DATA_OPTIONS[case.task])
    flat = [word for pair in options.items() for word in pair]
    return [*words[1:2], *flat]


@dataclass
class MethodScores:
    """The figures of one method on the first examples of a case.

    Attributes:
        num_expected: Number of examples on which it is to be measured.
        num_measured: Number of examples that were measured.
        seconds: Time that they took.
        columns: Column → figure of each measured example; None where it has none, or where the method failed.
        failures: Example → why the method failed on it.
    """

    num_expected: int
    num_measured: int = 0
    seconds: float = 0.0
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all examples were measured."""
        return self.num_measured >= self.num_expected

    def add(
        self,
        examples: Sequence[str],
        values: Mapping[tuple[str, str], float],
        seconds: float,
        failures: Mapping[str, str] | None = None,
    ) -> None:
        """Append the values of the next examples.

        Args:
            examples: Ids of the examples.
            values: (Column, example) → figure.
            seconds: Time that they took.
            failures: Example → why the method failed on it.
        """
        for column in {column for column, _ in values} - set(self.columns):
            self.columns[column] = [None] * self.num_measured
        for column, figures in self.columns.items():
            new_figures = [values.get((column, example)) for example in examples]
            figures += [None if figure is None else round(figure, 5) for figure in new_figures]
        self.failures |= failures or {}
        self.num_measured += len(examples)
        self.seconds = round(self.seconds + seconds, 2)


def read_scores(case: ClaimCase) -> dict[str, MethodScores]:
    """Read the stored scores of a case, by method."""
    if not case.scores_path.exists():
        return {}
    methods = json.loads(case.scores_path.read_text())["methods"]
    return {name: MethodScores(**scores) for name, scores in methods.items()}


def compute_fingerprint(case: ClaimCase) -> str:
    """Return a hash of what the figures of a case depend on besides the methods: weights, examples, and protocol."""
    card = json.loads((case.model_dir / "card.json").read_text())
    parts = [card["sha256"]["model.safetensors"], str(EXAMPLES_SEED), str(case.num_examples), case.protocol.hash]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def resolve_methods() -> list[str]:
    """Return the names of all methods, the controls last."""
    controls = ["position", "random"]
    names = [name for name in METHOD_REGISTRY if name not in controls]
    return sorted(names, key=lambda name: Method(name).cost.forward) + controls
