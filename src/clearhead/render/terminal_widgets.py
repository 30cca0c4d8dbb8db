"""What a terminal can draw: pixels as half blocks, step × unit as coloured cells, a sound as a line of blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from clearhead.explanation.explanation import Explanation
from clearhead.render import text_labels
from clearhead.render.colours import (
    COLOUR_LEVELS_PER_SIGN,
    DARK_THEME,
    NO_SCORE_LEVEL,
    compute_colour_levels,
    compute_vmax,
    format_hex_colour,
    get_level_colour,
)
from clearhead.render.text_layout import escape_invisible

# Whether a terminal is dark cannot be asked, so coloured text brings its own dark paper and is the same on both.
BACKGROUND_COLOUR = get_level_colour(0, DARK_THEME)
POSITIVE_COLOUR, NEGATIVE_COLOUR = (
    format_hex_colour(get_level_colour(sign * COLOUR_LEVELS_PER_SIGN * 3 // 4, DARK_THEME)) for sign in (1, -1)
)
#: How many steps are shown, and how many cells the name of a step or unit takes at most.
MAX_SHOWN_STEPS, MAX_LABEL_CELLS = 24, 12
SHADE_CHARACTERS = " ·░▒▓█"


def get_shade_character(level: int) -> str:
    """A level as a sign, for a terminal that has no colours."""
    return (
        SHADE_CHARACTERS[min(5, int(np.ceil(abs(level) / COLOUR_LEVELS_PER_SIGN * 5)))]
        if level != NO_SCORE_LEVEL
        else "?"
    )


@dataclass(frozen=True)
class TerminalHeatmap:
    """Step × unit as coloured cells, for the terminal: the units with the largest scores, and the first steps.

    Attributes:
        explanation: An explanation with several steps.
    """

    explanation: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        matrix = self.explanation.matrix
        assert matrix is not None
        rows = [_truncate_label(row) for row in text_labels.format_row_names(self.explanation)][:MAX_SHOWN_STEPS]
        names = [
            _truncate_label(text_labels.format_unit_label(self.explanation, place))
            for place in range(len(self.explanation))
        ]
        shown = self._select_fitting_units(names, options.max_width - max(map(cell_len, rows)) - 2)
        steps = compute_colour_levels(matrix, compute_vmax(self.explanation, matrix))
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_row("", *(Text(names[place], style="dim", justify="center") for place in shown))
        for row, step in enumerate(rows):
            table.add_row(
                Text(step, justify="right"), *(self._render_cell(int(steps[row, i]), names[i]) for i in shown)
            )
        yield table
        left_out = [f"the {len(shown)} strongest of {len(names)} units"] if len(shown) < len(names) else []
        left_out += [f"the first {len(rows)} of {len(matrix)} steps"] if len(rows) < len(matrix) else []
        if left_out:
            yield Text(f"shown: {', '.join(left_out)}", style="dim")

    def _render_cell(self, level: int, label: str) -> Text:
        colour = format_hex_colour(get_level_colour(level, DARK_THEME))
        return Text(get_shade_character(level) * max(cell_len(label), 2), style=Style(color=colour, bgcolor=colour))

    def _select_fitting_units(self, names: Sequence[str], room: int) -> list[int]:
        """The units that have room, the strongest first, in the order of the input."""
        assert self.explanation.matrix is not None
        sizes = np.nan_to_num(np.abs(self.explanation.matrix), nan=0.0).max(0)
        chosen: list[int] = []
        for place in np.argsort(-sizes, kind="stable"):
            room -= max(cell_len(names[place]), 2) + 1
            if room < 0 and chosen:
                break
            chosen.append(int(place))
        return sorted(chosen)


def _truncate_label(text: str) -> str:
    made = Text(text)
    made.truncate(MAX_LABEL_CELLS, overflow="ellipsis")
    return made.plain


@dataclass(frozen=True)
class AudioStrip:
    """The scores of audio frames as one line of blocks, for the terminal, with the times of its start and end.

    Attributes:
        explanation: An explanation of audio.
    """

    explanation: Explanation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = text_labels.summarise_audio_segments(self.explanation, min(options.max_width, 100))
        full = compute_vmax(self.explanation)
        line = Text(style=f"on {format_hex_colour(BACKGROUND_COLOUR)}")
        for _, value in found:
            high = 0.0 if np.isnan(value) else min(abs(value) / full, 1.0)
            line.append(" ▁▂▃▄▅▆▇█"[round(8 * high)], style=NEGATIVE_COLOUR if value < 0 else POSITIVE_COLOUR)
        yield line
        first, last = (escape_invisible(self.explanation.units.names[place]) for place in (0, -1))
        yield Text(first + last.rjust(max(len(found) - cell_len(first), cell_len(last) + 1)), style="dim")


@dataclass(frozen=True)
class HalfBlockImage:
    """An image as half blocks, for the terminal: two rows of pixels in each line; characters without colours.

    Attributes:
        pixels: RGB values (height, width, 3).
        caption: The line below the image.
        monochrome_lines: Lines of characters for terminals without colours; nothing is printed there if it is empty.
    """

    pixels: np.ndarray
    caption: str
    monochrome_lines: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.color_system is None:
            yield from (
                Text(line) for line in (*self.monochrome_lines, *([self.caption] if self.monochrome_lines else []))
            )
            return
        even = self.pixels if len(self.pixels) % 2 == 0 else np.vstack([self.pixels, self.pixels[-1:]])
        for top, bottom in zip(even[::2], even[1::2], strict=True):
            for above, below in zip(top, bottom, strict=True):
                yield Segment("▀", Style(color=_to_rich_colour(above), bgcolor=_to_rich_colour(below)))
            yield Segment.line()
        yield Text(self.caption, style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lines = [*self.monochrome_lines, self.caption if self.monochrome_lines else ""]
        width = max(map(cell_len, lines)) if console.color_system is None else self.pixels.shape[1]
        return Measurement(width, width)


def _to_rich_colour(pixel: np.ndarray) -> Color:
    return Color.from_rgb(*(int(part) for part in pixel))
