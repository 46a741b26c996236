"""The plots: images of what the table says, and of what the runs logged."""

import pytest
from results_folder import scores, variant


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


def test_the_plots_bars_are_the_differences_of_the_table(whole, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    whole.build()
    rows = [row for name, row in whole.csv().items() if name in ("one-head", "half", "own")]
    try:
        for axis, measure in zip(pyplot.gcf().axes, ("bleu", "perplexity"), strict=True):
            for bars, source in zip(axis.containers, ("", "paper_"), strict=True):
                texts = [row[f"{source}{measure}_difference"] for row in rows]
                expected = {i: float(text) for i, text in enumerate(texts) if text}
                found = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in bars}
                assert found == pytest.approx(expected)
        labels = [text.get_text() for text in pyplot.gcf().axes[0].get_yticklabels()]
        assert labels == [row["variant"] for row in rows]
    finally:
        monkeypatch.undo()
        pyplot.close("all")
