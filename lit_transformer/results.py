"""From result files to tables and plots beside the paper's figures; reads files only.

RUNS/STUDY/study.json                    the study: variants in order, what each sets, the paper's row it stands for
RUNS/STUDY/VARIANT/seedN/result.json     one run
RESULTS/paper_table3.csv                 the paper's figures
RESULTS/STUDY.csv, .md, .png             what comes of them
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_transformer.store import write_atomic

PAPER_TABLE3 = "paper_table3.csv"
# Runs that differ in one of these are never put into one table.
MUST_AGREE = (
    "split", "data", "tokenizer", "beam_size", "length_penalty",
    "bleu.signature", "bleu.sentences", "compound_split_bleu.signature",
)  # fmt: skip
COLUMNS = (
    "variant", "set", "seeds", "perplexity", "perplexity_sd", "bleu", "bleu_sd", "bleu_difference",
    "perplexity_difference", "compound_split_bleu", "parameters", "vocab_size", "updates", "tgt_tokens", "flops",
    "hours", "paper_row", "paper_perplexity", "paper_bleu", "paper_perplexity_difference", "paper_bleu_difference",
    "failed",
)  # fmt: skip


@dataclass
class Row:
    """One variant with the results of its seeds; nothing where none has finished."""

    name: str
    set: dict[str, Any]
    paper_row: str
    results: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""

    def mean(self, key: str) -> float | None:
        values = self._values(key)
        return statistics.fmean(values) if values else None

    def spread(self, key: str) -> float | None:
        values = self._values(key)
        return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

    def _values(self, key: str) -> list[float]:
        # JSON has no infinity: a perplexity beyond a float stands there as null.
        values = (get(result, key) for result in self.results)
        return [math.inf if value is None else float(value) for value in values]


def get(result: dict[str, Any], key: str) -> Any:
    """result["bleu"]["score"] for "bleu.score"."""
    for part in key.split("."):
        result = result[part]
    return result


def read_study(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    """A study's description and its rows in the study's order.

    Raises:
        ValueError: no study there, or runs in it that must not stand in one table.
    """
    path = folder / "study.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no study (no study.json): run `lit-transformer sweep run` first")
    study = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for variant in study["variants"]:
        row = Row(variant["name"], variant["set"], variant["paper"], failed=variant.get("failed", ""))
        for seed in study["seeds"]:
            file = folder / variant["name"] / f"seed{seed}" / "result.json"
            if file.is_file():
                row.results.append(_read_result(file, variant["name"], seed))
        if len({result["updates"] for result in row.results}) > 1:
            raise ValueError(f"{folder / row.name}: its seeds have different updates: run the study to the end first")
        rows.append(row)
    check_comparable([(f"{row.name}/seed{r['seed']}", r) for row in rows for r in row.results])
    return study, rows


def _read_result(file: Path, variant: str, seed: int) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        for key in (*MUST_AGREE, "updates", "bleu.score", "perplexity", "compound_split_bleu.score", "hours"):
            get(result, key)
        for key, here in (("variant", variant), ("seed", seed)):
            if result[key] != here:
                raise ValueError(f"its {key} is {result[key]!r}, it stands where {here!r} belongs")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of `fit` ({error!r}): remove it and run the study again") from error
    return result


def check_comparable(results: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raises ValueError naming the first field in which two results differ that must agree."""
    for name, result in results[1:]:
        first_name, first = results[0]
        for key in MUST_AGREE:
            if get(result, key) != get(first, key):
                raise ValueError(
                    f"{first_name} and {name} cannot be compared: {key} is {get(first, key)!r} in one and "
                    f"{get(result, key)!r} in the other"
                )


def read_paper(folder: Path) -> dict[str, dict[str, str]]:
    """Table 3 by row name; empty where the file is not at hand."""
    for place in (folder, Path(__file__).parents[1] / "results"):
        if (place / PAPER_TABLE3).is_file():
            with open(place / PAPER_TABLE3, newline="", encoding="utf-8") as file:
                return {row["row"]: row for row in csv.DictReader(file)}
    return {}


def tabulate(rows: Sequence[Row], paper: dict[str, dict[str, str]]) -> list[dict[str, Any]]:
    """One dictionary of COLUMNS for each row; None where there is nothing to say.

    Differences are to the first row, ours to ours and the paper's to the paper's.
    """

    def difference(value: float | None, base: float | None) -> float | None:
        return None if value is None or base is None else value - base

    def published(row: Row, column: str) -> float | None:
        text = paper.get(row.paper_row, {}).get(column)
        return float(text) if text else None

    base = rows[0]
    table = []
    for row in rows:
        first = row.results[0] if row.results else {}
        values = {
            "variant": row.name,
            "set": ", ".join(f"{k}={v}" for k, v in row.set.items()),
            "seeds": len(row.results),
            "perplexity": row.mean("perplexity"),
            "perplexity_sd": row.spread("perplexity"),
            "bleu": row.mean("bleu.score"),
            "bleu_sd": row.spread("bleu.score"),
            "bleu_difference": difference(row.mean("bleu.score"), base.mean("bleu.score")),
            "perplexity_difference": difference(row.mean("perplexity"), base.mean("perplexity")),
            "compound_split_bleu": row.mean("compound_split_bleu.score"),
            "hours": row.mean("hours"),
            "paper_row": row.paper_row,
            "paper_perplexity": published(row, "PPL"),
            "paper_bleu": published(row, "BLEU"),
            "paper_perplexity_difference": difference(published(row, "PPL"), published(base, "PPL")),
            "paper_bleu_difference": difference(published(row, "BLEU"), published(base, "BLEU")),
            "failed": row.failed,
            **{key: first.get(key) for key in ("parameters", "vocab_size", "updates", "tgt_tokens", "flops")},
        }
        table.append({column: values[column] for column in COLUMNS})
    return table


def to_csv(table: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_markdown(study: dict[str, Any], table: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    """The table for people, with what it was made from below it."""
    head = ["variant", "sets", "PPL", "BLEU", "dPPL", "dBLEU", "parameters", "paper's row"]
    head += ["paper PPL", "paper BLEU", "paper dPPL", "paper dBLEU"]
    lines = [head, ["---"] * 2 + ["---:"] * 5 + ["---"] + ["---:"] * 4]
    for row in table:
        if row["failed"] and not row["seeds"]:
            lines.append([row["variant"], row["set"], f"failed: {row['failed']}"] + [""] * 9)
            continue
        lines.append(
            [
                row["variant"],
                row["set"].replace("_", "\\_"),
                _number(row["perplexity"], 2, row["perplexity_sd"]),
                _number(row["bleu"], 2, row["bleu_sd"]),
                _number(row["perplexity_difference"], 2, sign=True),
                _number(row["bleu_difference"], 2, sign=True),
                f"{row['parameters']:,}" if row["parameters"] else "",
                row["paper_row"],
                _number(row["paper_perplexity"], 2),
                _number(row["paper_bleu"], 1),
                _number(row["paper_perplexity_difference"], 2, sign=True),
                _number(row["paper_bleu_difference"], 1, sign=True),
            ]
        )
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"# {study['name']}\n\n{text}\n\n" + "\n".join(f"- {line}" for line in _legend(study, rows)) + "\n"


def _number(value: float | None, digits: int, spread: float | None = None, sign: bool = False) -> str:
    if value is None:
        return ""
    value = round(value, digits) + 0.0  # no "-0.00"
    return f"{value:{'+' if sign else ''}.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def _legend(study: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    results = [result for row in rows for result in row.results]
    if not results:
        return ["No run has finished yet."]
    first = results[0]
    finished = sum(len(row.results) for row in rows)
    updates = sorted({result["updates"] for result in results})
    return [
        f"{finished} of {len(rows) * len(study['seeds'])} runs finished; seeds {', '.join(map(str, study['seeds']))}; "
        f"{' or '.join(f'{n:,}' for n in updates)} updates.",
        f"BLEU: {first['bleu']['signature']}, {first['bleu']['sentences']:,} sentences of the {first['split']} split, "
        f"beam {first['beam_size']}, length penalty {first['length_penalty']}, no averaging. The paper's BLEU is on "
        "tokenised text with compounds split and reads higher; only differences to base are to be compared with it.",
        *([f"BLEU: {first['bleu']['note']}."] if first["bleu"].get("note") else []),
        f"PPL: per subword of a vocabulary of {first['vocab_size']:,}, unsmoothed, end of sentence included. "
        "Differences (d) are to the first row.",
        *(f"{row.name}: a seed was given up: {row.failed}" for row in rows if row.failed and row.results),
        f"Parameters are exact, at that vocabulary. Data {first['data']}, tokeniser {first['tokenizer']}.",
    ]


def plot(study: dict[str, Any], table: Sequence[dict[str, Any]]) -> bytes:
    """Differences to base in BLEU and perplexity, ours beside the paper's, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in table[1:] if row["bleu"] is not None]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 1.6 + 0.45 * len(shown)), sharey=True, layout="constrained")
    for axis, measure, better in zip(axes, ("bleu", "perplexity"), ("higher", "lower"), strict=True):
        for shift, source, colour in ((-0.2, "", "#1f77b4"), (0.2, "paper_", "#bbbbbb")):
            values = [row[f"{source}{measure}_difference"] for row in shown]
            axis.barh(
                [i + shift for i, value in enumerate(values) if value is not None and math.isfinite(value)],
                [value for value in values if value is not None and math.isfinite(value)],
                height=0.38,
                color=colour,
                label="the paper" if source else f"this study ({study['name']})",
            )
        axis.axvline(0, color="black", linewidth=0.8)
        name = {"bleu": "BLEU", "perplexity": "perplexity"}[measure]
        axis.set_xlabel(f"difference to base in {name} ({better} is better)")
    axes[0].set_yticks(range(len(shown)), [row["variant"] for row in shown])
    axes[0].invert_yaxis()
    axes[1].legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120, metadata={"Software": None})
    pyplot.close(figure)
    return image.getvalue()


def build(runs: Path, name: str, out: Path) -> str:
    """Write a study's csv, md and png.

    Args:
        runs: folder of all studies' runs.
        name: the study.
        out: folder of the results.

    Returns:
        The Markdown table.
    """
    if not (runs / name).is_dir():
        raise ValueError(f"{runs / name} holds no study: run `lit-transformer sweep run` first")
    with open(runs / name / ".results.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the one that read last writes last
        try:
            study, rows = read_study(runs / name)
            table = tabulate(rows, read_paper(out))
            markdown = to_markdown(study, table, rows)
            files = {"csv": to_csv(table).encode(), "md": markdown.encode(), "png": plot(study, table)}
            for ending, content in files.items():
                write_atomic(out / f"{name}.{ending}", content)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    return markdown


def results_command(args: Sequence[str]) -> int:
    """Tables and plot of a study from its result files."""
    parser = argparse.ArgumentParser("lit-transformer results", allow_abbrev=False)
    parser.add_argument("study", help="the study's name")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the tables")
    options = parser.parse_args(args)
    print(build(options.runs, options.study, options.out))
    print(f"written: {options.out / options.study}.csv, .md, .png")
    return 0
