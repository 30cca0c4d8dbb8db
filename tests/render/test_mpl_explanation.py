import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from clearhead import Explanation, InputError
from clearhead.render.mpl.explanation import plot_explanation
from tests import models
from tests.render.conftest import Change, make_explanation, with_intervals

TEXT_KINDS = ("bars", "table", "text", "layers", "heads")
IMAGE_KINDS = ("bars", "table", "layers", "overlay", "heads")


def drawn(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # glyphs missing in the font do not matter here
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def written(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_every_kind_draws_text_explanations(kind: str, change: Change, text: dict[str, Explanation]) -> None:
    assert drawn(plot_explanation(change(text["attcat"]), kind)).std() > 0


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_every_kind_draws_image_explanations(kind: str, change: Change, image: dict[str, Explanation]) -> None:
    assert drawn(plot_explanation(change(image["attcat"]), kind)).std() > 0


def test_default_kind_depends_on_the_stream(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    assert len(plot_explanation(text["generic"]).axes) == 1
    assert len(plot_explanation(image["generic"]).axes) == 4  # image, heat map, patches, colour bar


def test_names_and_scores_are_drawn_literally() -> None:
    figure = plot_explanation(make_explanation(["$x^2$", "50% & _"], [0.5, -0.25]), "bars")
    drawn(figure)
    assert {"$x^2$", "50% & _", "0.500", "−0.250"} <= set(written(figure))


def test_text_plot_contains_every_word(text: dict[str, Explanation]) -> None:
    explanation = text["generic"]
    figure = plot_explanation(explanation, "text")
    drawn_text = "".join(written(figure))
    assert all(word in drawn_text for word in explanation.units.texts[0].split() if word.isalpha())


def test_hostile_names_are_drawn(hostile: Explanation) -> None:
    for kind in ("bars", "table", "text", "layers"):
        assert drawn(plot_explanation(hostile, kind)).std() > 0, kind


def test_unsupported_kind_raises_with_advice(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    plain = make_explanation(["a", "b"], [1.0, 2.0])
    for explanation, kind, advice in (
        (plain, "heads", "per='head'"),
        (plain, "layers", "generic"),
        (plain, "overlay", "kind='text'"),
        (image["generic"], "text", "kind='overlay'"),
        (plain, "bar", "did you mean 'bars'"),
    ):
        with pytest.raises(InputError, match=advice):
            plot_explanation(explanation, kind)


def test_figure_reports_truncation(truncated: Explanation) -> None:
    assert any("tokens truncated" in line for line in written(plot_explanation(truncated, "bars")))


def test_figure_has_png_repr_without_pyplot(text: dict[str, Explanation]) -> None:
    from matplotlib import pyplot

    figure = plot_explanation(text["generic"])
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert pyplot.get_fignums() == []


def test_bar_plot_keeps_the_strongest_units() -> None:
    figure = plot_explanation(make_explanation([f"t{i}" for i in range(200)], np.arange(200.0)), "bars", count=10)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"t{i}" for i in range(190, 200)]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_regression_explanation_is_drawn(kind: str, regression: Explanation) -> None:
    figure = plot_explanation(regression, kind)
    assert drawn(figure).std() > 0 and any("the predicted value" in line for line in written(figure))


def test_axis_labels_are_layer_and_head_numbers_of_the_model() -> None:
    ex = models.explainer("bert/classify", num_hidden_layers=6)
    last_layer = ex.explain("So boring!", "attention")
    assert [label.get_text() for label in last_layer.plot("layers").get_yticklabels()] == ["5"]
    selected = ex.explain("So boring!", "generic", layers=(-2, None), heads=[3, 2], per="head").plot("heads")
    assert [label.get_text() for label in selected.get_yticklabels()] == ["4", "5"]
    assert [label.get_text() for label in selected.get_xticklabels()] == ["3", "2"]
    without_numbers = make_explanation(["a"], [1.0], per_layer=np.ones((2, 1)), per_head=np.ones((2, 3, 1)))
    axes = without_numbers.plot("heads")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]


def test_plot_returns_axes_or_draws_into_given_axes(
    text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    axes = text["generic"].plot("bars")
    assert isinstance(axes, Axes) and axes._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert text["generic"].plot("bars", ax=second) is second and second.patches and not first.patches
    with pytest.raises(InputError, match="several axes"):
        image["generic"].plot("overlay", ax=first)


def test_svg_keeps_text_and_is_deterministic(text: dict[str, Explanation], tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        text["generic"].plot("bars").get_figure(root=True).savefig(tmp_path / name, metadata={"Date": None})  # type: ignore[union-attr]
    svg = (tmp_path / "one.svg").read_text()
    assert "##ca</text>" in svg and svg == (tmp_path / "two.svg").read_text()


def test_intervals_are_drawn_whole() -> None:
    plain = make_explanation(["good", "bad"], [0.5, 1.0])
    axes = plot_explanation(with_intervals(plain, [0.75, 0.5]), "bars").axes[0]
    (lines,) = [c for c in axes.collections if isinstance(c, LineCollection)]
    bounds = [(segment[0, 0], segment[1, 0]) for segment in lines.get_segments()]
    assert bounds == [(-0.25, 1.25), (0.5, 1.5)]
    assert axes.get_xlim()[0] < -0.25 and axes.get_xlim()[1] > 1.5
    assert axes.get_xlabel() == "score ± 90 % interval"
    assert plot_explanation(plain, "bars").axes[0].get_xlim()[0] == 0
