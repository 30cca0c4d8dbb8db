"""Cost of a method: the number of forward and backward passes that it takes for one input."""

from dataclasses import dataclass

from clearhead.errors import InputError

#: Cost of a backward pass, in forward passes.
_FORWARD_PASSES_PER_BACKWARD = 2
#: Numbers that are written as words.
_NUMBER_WORDS = {1: "one", 2: "two", 3: "three"}


@dataclass(frozen=True)
class Cost:
    """The number of passes that a method takes to explain one target of one input.

    Each input that runs through the layers of the model counts as one pass, altered copies of the input included, no
    matter how many of them share a batch. The clean pass, which runs the unchanged input, is one of them, so the
    smallest cost is `Cost(forward=1)`. A backward pass counts even if it ends before the first layer. What is computed
    again to save memory (tiles of attention, activation checkpointing) does not count.

    Attributes:
        forward: Number of forward passes.
        backward: Number of backward passes.
        per_unit: Number of forward passes for each unit that the method removes, in addition to `forward`.
        is_upper_bound: Whether some inputs take fewer passes.
        needs_max_flow: Whether a max-flow problem is solved for each unit, row and layer after the passes.
        note: What else a user should know about the passes, in a few words: propagation rules, float64.

    Raises:
        InputError: A number is negative or no integer, or there is no forward pass.

    Example:
        >>> print(Cost(forward=1, backward=1))
        one forward and one backward
        >>> print(Cost(forward=501, is_upper_bound=True, note="batched"))
        at most 501 forward passes, batched
        >>> print(Cost(forward=2, per_unit=1))
        two forward plus one for each unit
    """

    forward: int
    backward: int = 0
    per_unit: int = 0
    is_upper_bound: bool = False
    needs_max_flow: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        for name, minimum in (("forward", 1), ("backward", 0), ("per_unit", 0)):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < minimum:
                raise InputError(f"{name}={count!r} is not a number of passes: use an integer of at least {minimum}")

    def count_inputs(self, num_units: int) -> int:
        """Return the number of inputs that run forward, for an input of `num_units` units.

        Args:
            num_units: Number of units of the input.

        Returns:
            The number of forward passes.

        Example:
            >>> Cost(forward=2, per_unit=1).count_inputs(num_units=10)
            12
        """
        return self.forward + self.per_unit * num_units

    def count_passes(self, num_units: int) -> int:
        """Return the number of passes in forward-equivalents, for an input of `num_units` units.

        A backward pass counts as two forward passes, and a max-flow problem as one for each unit.

        Args:
            num_units: Number of units of the input.

        Returns:
            The number of passes, comparable between methods.

        Example:
            >>> Cost(forward=77, backward=76).count_passes(num_units=10)
            229
        """
        num_passes = self.count_inputs(num_units) + _FORWARD_PASSES_PER_BACKWARD * self.backward
        if self.needs_max_flow:
            num_passes += num_units**2
        return num_passes

    @property
    def brief(self) -> str:
        """The cost in two or three words, for a list of many methods.

        >>> Cost(forward=1, backward=1).brief, Cost(forward=1001).brief, Cost(forward=2, per_unit=1).brief
        ('one pass', '1,001 passes', 'one per unit')
        """
        if self.needs_max_flow:
            return "max-flow"
        if self.per_unit:
            return f"{_format_number(self.per_unit)} per unit"
        if self.forward == 1:
            return "one pass"
        return f"{self.forward:,} passes"

    def __str__(self) -> str:
        """Format the cost for the method table, e.g. "one forward and one backward"."""
        text = self._format_passes()
        if self.per_unit:
            text += f" plus {_format_number(self.per_unit)} for each unit"
        if self.is_upper_bound:
            text = f"at most {text}"
        if self.needs_max_flow:
            text += ", then a max-flow problem for each unit, row and layer"
        if self.note:
            text += f", {self.note}"
        return text

    def _format_passes(self) -> str:
        """Format both numbers of passes: as words if all of them are small."""
        if max(self.forward, self.backward) <= max(_NUMBER_WORDS):
            text = f"{_NUMBER_WORDS[self.forward]} forward"
            if self.backward:
                text += f" and {_NUMBER_WORDS[self.backward]} backward"
            return text
        if not self.backward:
            return f"{self.forward} forward passes"
        if self.forward == self.backward:
            return f"{self.forward} forward and backward passes"
        return f"{self.forward} forward and {self.backward} backward passes"


def _format_number(number: int) -> str:
    """Format a number as a word if it is small, else in digits."""
    return _NUMBER_WORDS.get(number, str(number))
