"""A study's finished runs as the rows of a table, and the paper's figures to stand beside them; reads files only.

RUNS/STUDY/study.json                    the study: variants in order, what each sets, the paper's row it stands for
RUNS/STUDY/VARIANT/seedN/result.json     one run
RESULTS/paper_table3.csv                 the paper's figures
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

PAPER_TABLE2, PAPER_TABLE3 = "paper_table2.csv", "paper_table3.csv"
_RESULTS = Path(__file__).parents[1] / "results"
# Runs that differ in one of these are never put into one table.
MUST_AGREE = (
    "split", "data", "tokenizer", "beam_size", "length_penalty",
    "bleu.signature", "bleu.sentences", "compound_split_bleu.signature",
)  # fmt: skip


@dataclass
class Row:
    """One variant with the results of its seeds and the folders they lie in; nothing where none has finished."""

    name: str
    set: dict[str, Any]
    paper_row: str
    results: list[dict[str, Any]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    failed: str = ""

    def of(self, seeds: Collection[int]) -> Row:
        """The same row with the results of these seeds alone."""
        return replace(self, results=[result for result in self.results if result["seed"] in seeds])

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
    if not study["variants"]:
        raise ValueError(f"{folder}: no trial of this search has finished yet")
    for variant in study["variants"]:
        row = Row(variant["name"], variant["set"], variant["paper"], failed=variant.get("failed", ""))
        for seed in study["seeds"]:
            run = folder / variant["name"] / f"seed{seed}"
            if (run / "result.json").is_file():
                result = read_result(run / "result.json")
                _check_place(run / "result.json", result, variant=variant["name"], seed=seed)
                row.results.append(result)
                row.folders.append(run)
        if len({result["updates"] for result in row.results}) > 1:
            raise ValueError(f"{folder / row.name}: its seeds have different updates: run the study to the end first")
        rows.append(row)
    check_comparable([(f"{row.name}/seed{r['seed']}", r) for row in rows for r in row.results])
    return study, rows


def read_result(file: Path, keys: Sequence[str] = ("compound_split_bleu.score", "hours")) -> dict[str, Any]:
    """A result.json or test.json, with all that tables and comparisons read from it.

    Args:
        keys: what must be there besides what every result holds.

    Raises:
        ValueError: names the file and what it lacks.
    """
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        for key in (*MUST_AGREE, "updates", "bleu.score", "perplexity", "seed", "variant", *keys):
            get(result, key)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no result of `fit` ({error!r}): remove it and type its command again") from error
    return result


def _check_place(file: Path, result: dict[str, Any], **expected: Any) -> None:
    for key, here in expected.items():
        if result[key] != here:
            raise ValueError(
                f"{file} is no result of this run (its {key} is {result[key]!r}, it stands where {here!r} belongs): "
                "remove it and run the study again"
            )


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
    for place in (folder, _RESULTS):
        if (place / PAPER_TABLE3).is_file():
            return _by_name(place / PAPER_TABLE3, "row")
    return {}


def read_table2() -> dict[str, dict[str, str]]:
    """Table 2 by model, in its order; empty where the file is not beside the package."""
    return _by_name(_RESULTS / PAPER_TABLE2, "model") if (_RESULTS / PAPER_TABLE2).is_file() else {}


def _by_name(path: Path, column: str) -> dict[str, dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return {row[column]: row for row in csv.DictReader(file)}
