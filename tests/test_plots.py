"""The plots: images of what the table says, and of what the runs logged."""

import math
import re

import pytest
from results_folder import result, scores, variant

from lit_transformer.plots import learning_curves, mean_curve
from lit_transformer.rows import Row


@pytest.mark.parametrize("finished", [0, 1, 2, 5])
def test_the_plot_is_an_image_that_grows_with_its_rows(folder, finished):
    from matplotlib import image

    names = ["base", "A-h1", "own", "C-N2", "C-N4"]
    folder.study(*map(variant, names))
    folder.add(*(scores(name, 1, 10.0 + i, 20.0 - i) for i, name in enumerate(names[:finished])))
    folder.build()
    file = folder.out / "s.png"
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = image.imread(file).shape
    assert width == 1200
    assert height == pytest.approx(120 * (1.6 + 0.45 * max(finished - 1, 0)), abs=1)


@pytest.fixture
def figures(monkeypatch):
    """Figures stay open to be looked at."""
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield lambda: [pyplot.figure(number) for number in pyplot.get_fignums()]
    monkeypatch.undo()
    pyplot.close("all")


def test_the_plots_bars_are_the_differences_of_the_table(whole, figures):
    before = len(figures())
    whole.build()
    axes = figures()[before].axes
    rows = [row for name, row in whole.csv().items() if name in ("one-head", "half", "own")]
    for axis, measure in zip(axes, ("bleu", "perplexity"), strict=True):
        for bars, source in zip(axis.containers, ("", "paper_"), strict=True):
            texts = [row[f"{source}{measure}_difference"] for row in rows]
            expected = {i: float(text) for i, text in enumerate(texts) if text}
            found = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in bars}
            assert found == pytest.approx(expected)
    assert [text.get_text() for text in axes[0].get_yticklabels()] == [row["variant"] for row in rows]


def test_a_row_that_has_not_learned_leaves_the_others_visible(folder, figures):
    folder.study(*map(variant, ("base", "own", "lost")))
    folder.add(scores("base", 1, 10.0, 20.0), scores("own", 1, 11.0, 19.0), scores("lost", 1, 2000.0, 0.0))
    folder.build()
    bleu, perplexity = figures()[0].axes
    assert (bleu.get_xscale(), perplexity.get_xscale()) == ("symlog", "symlog")
    assert len(perplexity.containers) == 1  # the paper has none of these rows


def test_the_plots_lines_are_the_intervals_of_the_table(folder, figures):
    references = [f"w{i} w{i + 1} w{i + 2} w{i + 3} w{i + 4}" for i in range(30)]
    folder.study(variant("base"), variant("old"), variant("other"))
    folder.sentences(result("base"), references, references, nll=1.0)
    folder.add(result("old", **{"bleu.sentences": 30}))
    folder.sentences(result("other"), [line[3:] if i % 3 else line for i, line in enumerate(references)], references)
    folder.build()
    row = folder.csv()["other"]
    for axis, measure in zip(figures()[0].axes, ("bleu", "perplexity"), strict=True):
        [segment] = axis.collections[0].get_segments()
        assert segment[:, 0] == pytest.approx([float(row[f"{measure}_low"]), float(row[f"{measure}_high"])])
        assert segment[:, 1] == pytest.approx([0.8, 0.8])  # on the second bar, that of `other`


# Learning curves


def curve(folder, values: dict[int, float]):
    (folder / "csv" / "version_0").mkdir(parents=True)
    lines = "".join(f"{update},{value}\n" for update, value in values.items())
    (folder / "csv" / "version_0" / "metrics.csv").write_text(f"step,val_perplexity\n{lines}")
    return folder


def test_a_rows_curve_is_the_mean_over_seeds_at_common_updates(tmp_path):
    seeds = [{100: 50.0, 200: 20.0, 300: 10.0}, {100: 70.0, 200: 30.0, 250: 1.0}]
    folders = [curve(tmp_path / str(i), values) for i, values in enumerate(seeds)]
    assert mean_curve(Row("r", {}, "", folders=folders)) == {100: 60.0, 200: 25.0}


def test_points_without_a_number_are_left_out(tmp_path):
    values = {0: 9.0, 100: math.inf, 200: math.nan, 300: 3.0}
    assert mean_curve(Row("r", {}, "", folders=[curve(tmp_path / "a", values)])) == {300: 3.0}
    assert mean_curve(Row("r", {}, "", folders=[tmp_path / "none"])) == {}
    assert mean_curve(Row("r", {}, "")) == {}


def test_every_row_with_a_curve_is_a_line_of_its_own(tmp_path, figures):
    rows = [Row(f"row{i}_$x$", {}, "", folders=[curve(tmp_path / str(i), {9: 9.0 + i, 90: 2.0})]) for i in range(21)]
    image = learning_curves([*rows, Row("late", {}, "")])
    assert image.startswith(b"<?xml") and b"</svg>" in image
    [axis] = figures()[-1].axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == [row.name for row in rows]
    assert len({(str(line.get_color()), line.get_linestyle()) for line in axis.lines}) == 21
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [list(line.get_xdata()) for line in axis.lines] == [[9, 90]] * 21


def test_curves_need_nothing_beside_them_and_are_the_same_each_time(tmp_path):
    rows = [Row("base", {}, "", folders=[curve(tmp_path / "a", {100: 5.0})])]
    image = learning_curves(rows)
    assert image == learning_curves(rows)
    assert not re.search(rb'(href|src)="(?!#)', image)


def test_no_curve_yet_is_said():
    assert b"</svg>" in learning_curves([Row("base", {}, "")])
