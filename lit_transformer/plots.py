"""Two plots of a study: differences to base beside the paper's, and learning curves of all rows."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence
from typing import Any

from lit_transformer.curves import read_curves
from lit_transformer.rows import Row
from lit_transformer.table import Table

OURS, PAPERS = "#2166ac", "#bdbdbd"
_FAR = 10  # differences beyond this are drawn by powers of ten
_NAMES = {"bleu": "BLEU", "perplexity": "perplexity"}


def differences(table: Table) -> bytes:
    """Differences to base in BLEU and perplexity with their 95% intervals, ours beside the paper's, as a PNG."""
    pyplot = _pyplot()
    shown = [row for row in table.rows[1:] if row["bleu"] is not None]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 1.6 + 0.45 * len(shown)), sharey=True, layout="constrained")
    for axis, measure, better in zip(axes, ("bleu", "perplexity"), ("higher", "lower"), strict=True):
        for shift, source, colour in ((-0.2, "", OURS), (0.2, "paper_", PAPERS)):
            values = [row[f"{source}{measure}_difference"] for row in shown]
            drawn = [(i, value) for i, value in enumerate(values) if value is not None and math.isfinite(value)]
            if source and not drawn:
                continue  # a study that the paper has no row for
            axis.barh(
                [i + shift for i, _ in drawn],
                [value for _, value in drawn],
                height=0.38,
                color=colour,
                label="the paper" if source else f"this study ({table.study['name']})",
            )
        ends = [(i - 0.2, row[f"{measure}_low"], row[f"{measure}_high"]) for i, row in enumerate(shown)]
        known = [end for end in ends if None not in end]
        if known:
            # Not as errors of the bars: a percentile interval need not hold the value.
            heights, lows, highs = zip(*known, strict=True)
            axis.hlines(heights, lows, highs, color="black", linewidth=1.1, label="95% interval of ours")
            for end in (lows, highs):
                axis.plot(end, heights, "|", color="black", markersize=5)
        beyond = max((abs(x) for x in axis.get_xlim()), default=0) > _FAR
        if beyond:  # a row that has not learned would leave all others invisible
            axis.set_xscale("symlog", linthresh=1)
            axis.xaxis.set_major_formatter("{x:g}")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.grid(axis="x", color="#e5e5e5", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        words = f"difference to {table.rows[0]['variant']} in {_NAMES[measure]} ({better} is better)"
        axis.set_xlabel(f"{words}, log" if beyond else words)
        axis.xaxis.label.set_parse_math(False)
    axes[0].set_yticks(range(len(shown)), [row["variant"] for row in shown], parse_math=False)
    axes[0].set_ylim(max(len(shown), 1) - 0.4, -0.6)
    axes[1].legend(fontsize="small", framealpha=0.9)
    return _image(figure, "png")


def learning_curves(rows: Sequence[Row]) -> bytes:
    """Validation perplexity by update, the mean over a row's seeds, both axes by factors; as an SVG."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    colours, styles = pyplot.get_cmap("tab10").colors, ("-", "--", ":", "-.")
    drawn = 0
    for i, row in enumerate(rows):
        curve = mean_curve(row)
        if curve:
            colour = "black" if i == 0 else colours[(i - 1) % 10]
            style = "-" if i == 0 else styles[(i - 1) // 10 % 4]
            # One point cannot be seen as a line.
            marker = "o" if len(curve) == 1 else ""
            axis.plot(list(curve), list(curve.values()), style, color=colour, marker=marker, label=row.name,
                      linewidth=2.2 if i == 0 else 1.3, zorder=3 if i == 0 else 2)  # fmt: skip
            drawn += 1
    if drawn:
        axis.set(xscale="log", yscale="log")
        for part, values in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
            _plain_numbers(part, values)
        legend = axis.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    else:
        axis.text(0.5, 0.5, "no validation was logged yet", ha="center", transform=axis.transAxes)
    axis.grid(which="both", color="#e5e5e5", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set(xlabel="updates", ylabel="validation perplexity")
    return _image(figure, "svg")


def mean_curve(row: Row) -> dict[int, float]:
    """{update: validation perplexity}, the mean over seeds at the updates that all of them have a finite value for."""
    curves = [curve for folder in row.folders if (curve := read_curves(folder).get("val_perplexity"))]
    if not curves:
        return {}
    common = [update for update in curves[0] if all(update in curve for curve in curves)]
    means = {update: statistics.fmean(curve[update] for curve in curves) for update in common if update > 0}
    return {update: mean for update, mean in means.items() if math.isfinite(mean)}


def _plain_numbers(part: Any, ends: tuple[float, float]) -> None:
    """10, 20, 50, 100 in place of powers; over less than a factor of ten also the numbers between."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    wide = ends[1] / ends[0] > 30
    part.set_major_locator(LogLocator(10, subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 6, 8)))
    part.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    part.set_minor_formatter(NullFormatter())


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # Names from a fixed salt and no date: the same results give the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "lit-transformer"
    from matplotlib import pyplot

    return pyplot


def _image(figure: Any, kind: str) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=120, metadata={"Software": None} if kind == "png" else {"Date": None})
    _pyplot().close(figure)
    return image.getvalue()
