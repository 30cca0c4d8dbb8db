import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from clearhead import Explanation, InputError
from clearhead.render.mpl.explanation import plot_explanation
from tests import models
from tests.render.conftest import Change, made

TEXT_KINDS = ("bars", "table", "text", "layers", "heads")
IMAGE_KINDS = ("bars", "table", "layers", "overlay", "heads")


def drawn(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a sign that the font lacks is not our concern
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def written(figure: Figure) -> list[str]:
    return [part.get_text() for part in figure.findobj(Text) if isinstance(part, Text)]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_every_kind_draws_texts(kind: str, change: Change, text: dict[str, Explanation]) -> None:
    assert drawn(plot_explanation(change(text["attcat"]), kind)).std() > 0


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_every_kind_draws_pictures(kind: str, change: Change, image: dict[str, Explanation]) -> None:
    assert drawn(plot_explanation(change(image["attcat"]), kind)).std() > 0


def test_the_kind_follows_the_stream(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    assert len(plot_explanation(text["generic"]).axes) == 1
    assert len(plot_explanation(image["generic"]).axes) == 4  # picture, heat map, patches, colours


def test_names_and_scores_are_written_as_they_are() -> None:
    figure = plot_explanation(made(["$x^2$", "50% & _"], [0.5, -0.25]), "bars")
    drawn(figure)
    assert {"$x^2$", "50% & _", "0.500", "−0.250"} <= set(written(figure))


def test_a_text_is_written_whole(text: dict[str, Explanation]) -> None:
    explanation = text["generic"]
    figure = plot_explanation(explanation, "text")
    said = "".join(written(figure))
    assert all(word in said for word in explanation.units.texts[0].split() if word.isalpha())


def test_nasty_names_can_be_drawn(nasty: Explanation) -> None:
    for kind in ("bars", "table", "text", "layers"):
        assert drawn(plot_explanation(nasty, kind)).std() > 0, kind


def test_what_cannot_be_drawn_says_what_to_do(text: dict[str, Explanation], image: dict[str, Explanation]) -> None:
    plain = made(["a", "b"], [1.0, 2.0])
    for explanation, kind, advice in (
        (plain, "heads", "per='head'"),
        (plain, "layers", "generic"),
        (plain, "overlay", "kind='text'"),
        (image["generic"], "text", "kind='overlay'"),
        (plain, "bar", "did you mean 'bars'"),
    ):
        with pytest.raises(InputError, match=advice):
            plot_explanation(explanation, kind)


def test_truncation_is_in_the_figure(cut: Explanation) -> None:
    assert any("tokens truncated" in part for part in written(plot_explanation(cut, "bars")))


def test_a_notebook_shows_a_figure_without_pyplot(text: dict[str, Explanation]) -> None:
    from matplotlib import pyplot

    figure = plot_explanation(text["generic"])
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert pyplot.get_fignums() == []


def test_many_units_keep_the_strongest() -> None:
    figure = plot_explanation(made([f"t{i}" for i in range(200)], np.arange(200.0)), "bars", count=10)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [f"t{i}" for i in range(190, 200)]


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_a_measuring_model_is_drawn(kind: str, regression: Explanation) -> None:
    figure = plot_explanation(regression, kind)
    assert drawn(figure).std() > 0 and any("the predicted value" in part for part in written(figure))


def test_layers_and_heads_have_the_numbers_that_the_model_gives_them() -> None:
    ex = models.explainer("bert/classify", num_hidden_layers=6)
    only = ex.explain("So boring!", "attention")
    assert [label.get_text() for label in only.plot("layers").get_yticklabels()] == ["5"]
    some = ex.explain("So boring!", "generic", layers=(-2, None), heads=[3, 2], per="head").plot("heads")
    assert [label.get_text() for label in some.get_yticklabels()] == ["4", "5"]
    assert [label.get_text() for label in some.get_xticklabels()] == ["3", "2"]
    nameless = made(["a"], [1.0], per_layer=np.ones((2, 1)), per_head=np.ones((2, 3, 1)))
    axes = nameless.plot("heads")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "1", "2"]


def test_plot_returns_the_axes_or_draws_into_given_ones(
    text: dict[str, Explanation], image: dict[str, Explanation]
) -> None:
    axes = text["generic"].plot("bars")
    assert isinstance(axes, Axes) and axes._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    figure = Figure()
    first, second = figure.subplots(1, 2)
    assert text["generic"].plot("bars", ax=second) is second and second.patches and not first.patches
    with pytest.raises(InputError, match="several axes"):
        image["generic"].plot("overlay", ax=first)


def test_vector_files_keep_text_as_text_and_are_the_same_each_time(
    text: dict[str, Explanation], tmp_path: Path
) -> None:
    for name in ("one.svg", "two.svg"):
        text["generic"].plot("bars").get_figure(root=True).savefig(tmp_path / name, metadata={"Date": None})  # type: ignore[union-attr]
    written = (tmp_path / "one.svg").read_text()
    assert "##ca</text>" in written and written == (tmp_path / "two.svg").read_text()
