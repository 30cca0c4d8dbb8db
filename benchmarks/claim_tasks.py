"""The cases of the claim (docs/claim.md): which models are trained, and what is measured on them, on which examples."""

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import clearhead_zoo
from clearhead.bench.data import load_benchmark_dataset
from clearhead.bench.data.base import Example
from clearhead.bench.data.zoo_tasks import ZOO_TASKS
from clearhead.bench.protocols.base import BenchmarkProtocol, Measurement, make_protocol
from clearhead.bench.protocols.known_evidence import KnownEvidence
from clearhead.methods.base import METHOD_REGISTRY, Method

#: Models trained for the claim, one folder per task and seed. They are not committed, because the zoo keeps one seed.
MODELS_DIR = Path("build/claim/models")
#: Scores of the claim, one file per case.
SCORES_DIR = Path("benchmarks/results/claim")
#: Seed of the held-out examples. Methods were developed on the examples of seed 0.
EXAMPLES_SEED = 20261120
NUM_SEEDS = 5
#: Tasks with fewer seeds: one training run takes more than five minutes on an H200.
FEWER_SEEDS = {"shapes-vilt": 3}
#: Tasks whose input is an image alone; their columns have fewer examples, because each takes longer.
IMAGE_TASKS = ("shapes-detr", "pets-hans", "counting", "signs")
NUM_TEXT_EXAMPLES = 200
NUM_IMAGE_EXAMPLES = 100
NUM_REMOVAL_EXAMPLES = 200
#: Methods that run more inputs than this through the model are measured on one seed and on fewer examples.
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

    def count_examples(self, method: str, num_units: int) -> int:
        """Return on how many examples a method is measured; 0 if it is too expensive for this case.

        Args:
            method: Name of the method.
            num_units: Number of units of a typical example.
        """
        if not is_expensive(method, num_units):
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
        return self.seed == read_zoo_seed(self.task)

    @property
    def model_dir(self) -> Path:
        return clearhead_zoo.path(self.task) if self.is_zoo_model else MODELS_DIR / self.name

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
        return list(load_benchmark_dataset("known", task=self.task, count=self.num_examples, seed=EXAMPLES_SEED))

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
    """

    model: str
    data_set: str
    fills: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"removal-{self.model}"

    @property
    def model_dir(self) -> Path:
        return clearhead_zoo.path(self.model)

    @property
    def num_examples(self) -> int:
        return NUM_REMOVAL_EXAMPLES

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
    RemovalCase("rationale", "eraser-movies", ("mask",)),
    RemovalCase("pets", "pets", ("blur",)),
    RemovalCase("pets-mean", "pets", ("mean",)),
    RemovalCase("pets-clip", "pets", ("blur",)),
)


def list_cases() -> list[ClaimCase]:
    """List all cases: each known-answer task with the zoo's seed and the smallest other seeds, then the real models."""
    return [*list_known_answer_cases(), *REMOVAL_CASES]


def list_known_answer_cases() -> list[KnownAnswerCase]:
    """List the models of all known-answer tasks: the zoo's seed, and the smallest other seeds."""
    cases = []
    for task in ZOO_TASKS:
        zoo_seed = read_zoo_seed(task)
        seeds = [zoo_seed, *(seed for seed in range(NUM_SEEDS + 1) if seed != zoo_seed)]
        cases += [KnownAnswerCase(task, seed) for seed in seeds[: FEWER_SEEDS.get(task, NUM_SEEDS)]]
    return cases


def read_zoo_seed(task: str) -> int:
    """Return the seed with which the zoo's model was trained."""
    return int(re.findall(r"--seed (\d+)", clearhead_zoo.card(task)["command"])[0])


def is_expensive(method: str, num_units: int) -> bool:
    """Whether a method runs more than `MAX_CHEAP_INPUTS` inputs, or solves a max-flow problem per unit."""
    cost = METHOD_REGISTRY[method].declaration.cost
    return cost.needs_max_flow or cost.count_inputs(num_units) > MAX_CHEAP_INPUTS


def make_training_command(case: KnownAnswerCase, device: str, data: Path | None) -> list[str]:
    """Return the command that trains a model: that of the zoo's card, with another seed and other folders.

    Args:
        case: The model to train.
        device: Where to train.
        data: Folder of the files that some scripts read.

    Raises:
        FileNotFoundError: The script reads data, and `data` is None.
    """
    words = shlex.split(clearhead_zoo.card(case.task)["command"])
    options = dict(zip(words[2::2], words[3::2], strict=True))
    work_dir = MODELS_DIR.parent / "work" / case.name
    options |= {"--seed": str(case.seed), "--out": str(case.model_dir), "--work": str(work_dir), "--device": device}
    if case.task in DATA_OPTIONS:
        if data is None:
            raise FileNotFoundError(f"{case.task} is trained on data: give its folder with --data")
        options["--data"] = str(data / DATA_OPTIONS[case.task])
    flat = [word for pair in options.items() for word in pair]
    return [*words[1:2], *flat, *(["--resume"] if work_dir.exists() else [])]


@dataclass
class MethodScores:
    """The figures of one method on the first examples of a case.

    Attributes:
        num_measured: Number of examples that were measured.
        seconds: Time that they took.
        columns: Column → figure of each measured example; None where it has none.
    """

    num_measured: int
    seconds: float
    columns: dict[str, list[float | None]]

    def add(self, examples: Sequence[str], values: Mapping[tuple[str, str], float], seconds: float) -> None:
        """Append the values of the next examples.

        Args:
            examples: Ids of the examples.
            values: (Column, example) → figure.
            seconds: Time that they took.
        """
        for column in {column for column, _ in values} - set(self.columns):
            self.columns[column] = [None] * self.num_measured
        for column, figures in self.columns.items():
            new_figures = [values.get((column, example)) for example in examples]
            figures += [None if figure is None else round(figure, 5) for figure in new_figures]
        self.num_measured += len(examples)
        self.seconds = round(self.seconds + seconds, 2)


def read_scores(case: ClaimCase) -> dict[str, MethodScores]:
    """Read the stored scores of a case, by method."""
    if not case.scores_path.exists():
        return {}
    methods = json.loads(case.scores_path.read_text())["methods"]
    return {name: MethodScores(**scores) for name, scores in methods.items()}


def resolve_methods() -> list[str]:
    """Return the names of all methods, the controls last."""
    controls = ["position", "random"]
    names = [name for name in METHOD_REGISTRY if name not in controls]
    return sorted(names, key=lambda name: Method(name).cost.forward) + controls
