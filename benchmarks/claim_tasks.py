"""The known-answer tasks of the claim (docs/claim.md): which models are trained, and what is measured on them."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import clearhead_zoo
from clearhead.bench.data.zoo_tasks import ZOO_TASKS
from clearhead.methods.base import METHOD_REGISTRY, Method

#: Models trained for the claim, one folder per task and seed. They are not committed, because the zoo keeps one seed.
MODELS_DIR = Path("build/claim/models")
#: Scores of the claim, one file per task and seed.
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
#: Methods that run more inputs than this through the model are measured on one seed and on fewer examples.
MAX_CHEAP_INPUTS = 100
NUM_EXPENSIVE_EXAMPLES = 100
#: Data that a training script reads, by its option, as `prepare_data` finds it in the folder given by --data.
DATA_OPTIONS = {"spell": "spell.tsv", "pets-hans": ""}


@dataclass(frozen=True)
class TrainedModel:
    """One trained model of a task.

    Attributes:
        task: Name of the task, which is that of its zoo model.
        seed: Seed of the training.
    """

    task: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.task}-seed{self.seed}"

    @property
    def is_zoo_model(self) -> bool:
        """Whether the zoo keeps this seed."""
        return self.seed == read_zoo_seed(self.task)

    @property
    def model_dir(self) -> Path:
        """Folder of the weights: in the zoo, or where `claim.py train` writes it."""
        return clearhead_zoo.path(self.task) if self.is_zoo_model else MODELS_DIR / self.name

    @property
    def is_trained(self) -> bool:
        """Whether its training has ended: the card is written last."""
        return (self.model_dir / "card.json").is_file()

    @property
    def scores_path(self) -> Path:
        """File of its scores."""
        return SCORES_DIR / f"{self.name}.json"

    @property
    def num_examples(self) -> int:
        """Number of held-out examples of its columns."""
        return NUM_IMAGE_EXAMPLES if self.task in IMAGE_TASKS else NUM_TEXT_EXAMPLES

    def count_examples(self, method: str, num_units: int) -> int:
        """Return on how many examples a method is measured; 0 for expensive methods on all seeds but the zoo's.

        Args:
            method: Name of the method.
            num_units: Number of units of a typical example.
        """
        if not is_expensive(method, num_units):
            return self.num_examples
        return min(NUM_EXPENSIVE_EXAMPLES, self.num_examples) if self.is_zoo_model else 0


def list_models() -> list[TrainedModel]:
    """List the models of all tasks: the zoo's seed, and the smallest other seeds."""
    models = []
    for task in ZOO_TASKS:
        zoo_seed = read_zoo_seed(task)
        seeds = [zoo_seed, *(seed for seed in range(NUM_SEEDS + 1) if seed != zoo_seed)]
        models += [TrainedModel(task, seed) for seed in seeds[: FEWER_SEEDS.get(task, NUM_SEEDS)]]
    return models


def read_zoo_seed(task: str) -> int:
    """Return the seed with which the zoo's model was trained."""
    return int(re.findall(r"--seed (\d+)", clearhead_zoo.card(task)["command"])[0])


def is_expensive(method: str, num_units: int) -> bool:
    """Whether a method runs more than `MAX_CHEAP_INPUTS` inputs, or solves a max-flow problem per unit."""
    cost = METHOD_REGISTRY[method].declaration.cost
    return cost.needs_max_flow or cost.count_inputs(num_units) > MAX_CHEAP_INPUTS


def make_training_command(model: TrainedModel, device: str, data: Path | None) -> list[str]:
    """Return the command that trains a model: that of the zoo's card, with another seed and other folders.

    Args:
        model: The model.
        device: Where to train.
        data: Folder of the files that some scripts read.

    Raises:
        FileNotFoundError: The script reads data, and `data` is None.
    """
    words = shlex.split(clearhead_zoo.card(model.task)["command"])
    options = dict(zip(words[2::2], words[3::2], strict=True))
    work_dir = MODELS_DIR.parent / "work" / model.name
    options |= {"--seed": str(model.seed), "--out": str(model.model_dir), "--work": str(work_dir), "--device": device}
    if model.task in DATA_OPTIONS:
        if data is None:
            raise FileNotFoundError(f"{model.task} is trained on data: give its folder with --data")
        options["--data"] = str(data / DATA_OPTIONS[model.task])
    flat = [word for pair in options.items() for word in pair]
    return [*words[1:2], *flat, *(["--resume"] if work_dir.exists() else [])]


@dataclass
class MethodScores:
    """The average precision of one method on the first examples of a model.

    Attributes:
        num_measured: Number of examples that were measured.
        seconds: Time that they took.
        streams: Stream → value of each measured example; None where it has none.
    """

    num_measured: int
    seconds: float
    streams: dict[str, list[float | None]]

    def add(self, examples: Sequence[str], values: Mapping[tuple[str, str], float], seconds: float) -> None:
        """Append the values of the next examples.

        Args:
            examples: Ids of the examples.
            values: (Stream, example) → value.
            seconds: Time that they took.
        """
        for stream in {stream for stream, _ in values} - set(self.streams):
            self.streams[stream] = [None] * self.num_measured
        for stream, scores in self.streams.items():
            stream_values = [values.get((stream, example)) for example in examples]
            scores += [None if value is None else round(value, 5) for value in stream_values]
        self.num_measured += len(examples)
        self.seconds = round(self.seconds + seconds, 2)


def read_scores(model: TrainedModel) -> dict[str, MethodScores]:
    """Read the stored scores of a model, by method."""
    if not model.scores_path.exists():
        return {}
    methods = json.loads(model.scores_path.read_text())["methods"]
    return {name: MethodScores(**scores) for name, scores in methods.items()}


def resolve_methods() -> list[str]:
    """Return the names of all methods, the controls last."""
    controls = ["position", "random"]
    names = [name for name in METHOD_REGISTRY if name not in controls]
    return sorted(names, key=lambda name: Method(name).cost.forward) + controls
