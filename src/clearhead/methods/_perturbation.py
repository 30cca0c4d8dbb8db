"""What methods that take units away are made of: they ask what the target is worth with some players alone."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.errors import InputError
from clearhead.methods.base import Fold

#: A singular value of so little, relative to the largest, is a rounding error of none: coalitions have some of 1e-3
#: and more, but where one says what others say it is zero, and comes out as up to 1e-13.
NOTHING = 1e-9
#: Yields coalitions (who is there), is sent what each is worth, returns what each player gets.
Play = Generator[Bool[Tensor, "coalition player"], Float[Tensor, "coalition"], "Shares"]


@dataclass
class Shares:
    """What a method gives each player, and what it adds up from, if it does so; `stays` is given to leaves
    of the hierarchy that are never absent."""

    scores: Float[Tensor, "player"]
    base_value: float | None = None
    stays: Float[Tensor, "leaf"] | None = None
    #: What is worth knowing about how they were found.
    checks: dict[str, float] | None = None


@dataclass(frozen=True)
class Game:
    """One input with one target, as such a method sees it; `seed` belongs to the content of the input."""

    players: int
    seed: int
    windows: Callable[[int], Bool[Tensor, "window player"]]
    hierarchy: Callable[[], Any]

    @property
    def nobody(self) -> Bool[Tensor, "player"]:
        return torch.zeros(self.players, dtype=torch.bool)

    @property
    def everybody(self) -> Bool[Tensor, "player"]:
        return ~self.nobody

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


@dataclass
class Perturbation(Fold):
    """Base of these methods: `unit` are the players, `replacement` is what stands where one is absent."""

    #: Who plays in a picture, unless that is said.
    pictures: ClassVar[str] = "patch"

    replacement: str | None = None
    unit: str | None = None

    def play(self, game: Game) -> Play:
        raise NotImplementedError


def whole_number(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise InputError(f"{name}={given!r} is not possible: give a whole number, {least} or more")
    return given
