"""A study's rows as a table beside the paper's figures: every number of it, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_transformer.legend import SUSTAINED, Outputs, explain
from lit_transformer.rows import Row
from lit_transformer.sentences import Sentences, bleu_of, perplexity_of
from lit_transformer.significance import Agreement, Comparison, agreement, compare, holm

COLUMNS = (
    "variant", "set", "seeds", "perplexity", "perplexity_sd", "bleu", "bleu_sd",
    "bleu_difference", "bleu_low", "bleu_high", "p_value", "p_holm",
    "perplexity_difference", "perplexity_low", "perplexity_high", "seeds_compared",
    "compound_split_bleu", "beyond_sentences", "beyond_perplexity", "beyond_bleu",
    "parameters", "vocab_size", "updates", "src_tokens", "tgt_tokens", "flops", "flops_by_time", "hours", "device",
    "processes", "paper_row", "paper_perplexity", "paper_bleu", "paper_perplexity_difference",
    "paper_bleu_difference", "failed",
)  # fmt: skip
_REASON = 120  # characters of why a row was given up; the CSV has all of them


@dataclass(frozen=True)
class Table:
    """A study's table: `rows` are dictionaries of COLUMNS, None where there is nothing to say."""

    study: dict[str, Any]
    rows: list[dict[str, Any]]
    legend: list[str]
    agreement: dict[str, Agreement]  # by measure: perplexity, bleu

    @property
    def by_length(self) -> bool:
        """Whether people want to see how the rows do beyond the lengths that they were trained on."""
        return bool(self.study.get("by_length")) and any(row["beyond_sentences"] for row in self.rows)


def tabulate(
    study: dict[str, Any], rows: Sequence[Row], outputs: Outputs, paper: Mapping[str, Mapping[str, str]]
) -> Table:
    """Everything that is known of a study.

    Differences are to the first row, ours to ours and the paper's to the paper's.

    Raises:
        ValueError: outputs that are not of the same sentences.
    """
    base, *others = rows
    found = compare(outputs.get(base.name, {}), {row.name: outputs.get(row.name, {}) for row in others})
    corrected = holm({name: one.p_value for name, one in found.items()})
    table = [
        _ours(row, base)
        | _compared(found.get(row.name), corrected.get(row.name))
        | _beyond(row, outputs.get(row.name, {}))
        | _papers(row, base, paper)
        for row in rows
    ]
    table = [{column: row[column] for column in COLUMNS} for row in table]
    agreements = {measure: _agreement(table, measure) for measure in ("perplexity", "bleu")}
    return Table(study, table, explain(study, rows, outputs, found, agreements), agreements)


def _ours(row: Row, base: Row) -> dict[str, Any]:
    first = row.results[0] if row.results else {}
    by_time = [flops for result in row.results if (flops := flops_by_time(result)) is not None]
    return {
        "variant": row.name,
        "set": ", ".join(f"{k}={v}" for k, v in row.set.items()),
        "seeds": len(row.results),
        "perplexity": row.mean("perplexity"),
        "perplexity_sd": row.spread("perplexity"),
        "bleu": row.mean("bleu.score"),
        "bleu_sd": row.spread("bleu.score"),
        "bleu_difference": _minus(*_of_common_seeds(row, base, "bleu.score")),
        "perplexity_difference": _minus(*_of_common_seeds(row, base, "perplexity")),
        "compound_split_bleu": row.mean("compound_split_bleu.score"),
        "hours": row.mean("hours"),
        "flops_by_time": statistics.fmean(by_time) if len(by_time) == len(row.results) != 0 else None,
        "failed": row.failed,
        **{key: first.get(key) for key in ("parameters", "vocab_size", "updates", "src_tokens", "tgt_tokens")},
        **{key: first.get(key) for key in ("flops", "device", "processes")},
    }


def _compared(found: Comparison | None, p_holm: float | None) -> dict[str, Any]:
    return {
        "bleu_low": found and found.bleu.low,
        "bleu_high": found and found.bleu.high,
        "perplexity_low": found and found.perplexity.low,
        "perplexity_high": found and found.perplexity.high,
        "p_value": found and found.p_value,
        "p_holm": p_holm,
        "seeds_compared": found and len(found.seeds),
    }


def _beyond(row: Row, outputs: Mapping[int, Sentences]) -> dict[str, Any]:
    """Scores on the sentences whose source is longer than any that was trained on, as means over the seeds."""
    perplexities, bleus, count = [], [], 0
    for result in row.results:
        of_seed, longest = outputs.get(result["seed"]), result.get("max_length")
        if of_seed is None or longest is None:
            continue
        chosen = np.flatnonzero(of_seed.src_tokens - 1 > longest)  # the end of sentence is no piece of the text
        if len(chosen):
            count = len(chosen)
            perplexities.append(perplexity_of(of_seed.nll[chosen].sum(), of_seed.tgt_tokens[chosen].sum()))
            bleus.append(bleu_of(of_seed.counts[chosen].sum(0)))
    return {
        "beyond_sentences": count or None,
        "beyond_perplexity": statistics.fmean(perplexities)
        if count and all(map(math.isfinite, perplexities))
        else None,
        "beyond_bleu": statistics.fmean(bleus) if count else None,
    }


def _papers(row: Row, base: Row, paper: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    def published(of: Row, column: str) -> float | None:
        text = paper.get(of.paper_row, {}).get(column)
        return float(text) if text else None

    return {
        "paper_row": row.paper_row if row.paper_row in paper else "",
        "paper_perplexity": published(row, "PPL"),
        "paper_bleu": published(row, "BLEU"),
        "paper_perplexity_difference": _minus(published(row, "PPL"), published(base, "PPL")),
        "paper_bleu_difference": _minus(published(row, "BLEU"), published(base, "BLEU")),
    }


def _of_common_seeds(row: Row, base: Row, key: str) -> tuple[float | None, float | None]:
    """Both means over the seeds that both have: with others, a difference of seeds would look like one of rows."""
    common = {result["seed"] for result in row.results} & {result["seed"] for result in base.results}
    return row.of(common).mean(key), base.of(common).mean(key)


def _minus(value: float | None, base: float | None) -> float | None:
    # A run that diverged differs from base by no number.
    return value - base if value is not None and base is not None and math.isfinite(value - base) else None


def flops_by_time(result: Mapping[str, Any]) -> float | None:
    """The paper's estimate: time x processes x sustained TFLOPS; None on a device whose rate it does not give."""
    found = re.search(rf"(?<![A-Za-z0-9])({'|'.join(SUSTAINED)})(?!\d)", str(result.get("device", "")))
    if found is None or not result.get("processes"):
        return None
    return float(result["hours"] * 3600 * result["processes"] * SUSTAINED[found[1]] * 1e12)


def _agreement(table: Sequence[Mapping[str, Any]], measure: str) -> Agreement:
    base, *others = table
    keys = (f"{measure}_difference", f"paper_{measure}_difference")
    # A second row that stands for the paper's base has no difference there to agree with.
    pairs = [tuple(row[key] for key in keys) for row in others if row["paper_row"] != base["paper_row"]]
    return agreement([(a, b) for a, b in pairs if None not in (a, b) and math.isfinite(a - b)])


def to_csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return text.getvalue()


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """The main table for people: its head, and a row of texts for each variant."""
    head = ["variant", "sets", "PPL", "BLEU", "dPPL", "dBLEU", "p", "parameters", "paper's row"]
    head += ["paper PPL", "paper BLEU", "paper dPPL", "paper dBLEU"]
    head += ["PPL beyond", "BLEU beyond"] if table.by_length else []
    return head, [_main(row) + (_lengths(row) if table.by_length else []) for row in table.rows]


def _main(row: Mapping[str, Any]) -> list[str]:
    failed = row["failed"] and not row["seeds"]
    return [
        row["variant"],
        row["set"],
        f"failed: {_trimmed(row['failed'])}" if failed else number(row["perplexity"], 2, row["perplexity_sd"]),
        number(row["bleu"], 2, row["bleu_sd"]),
        _interval(row, "perplexity"),
        _interval(row, "bleu"),
        _p(row["p_holm"]),
        f"{row['parameters']:,}" if row["parameters"] else "",
        row["paper_row"],
        number(row["paper_perplexity"], 2),
        number(row["paper_bleu"], 1),
        number(row["paper_perplexity_difference"], 2, sign=True),
        number(row["paper_bleu_difference"], 1, sign=True),
    ]


def _lengths(row: Mapping[str, Any]) -> list[str]:
    return [number(row["beyond_perplexity"], 2), number(row["beyond_bleu"], 2)]


def costs(table: Table) -> tuple[list[str], list[list[str]]]:
    """What each row that ran took: its head, and a row of texts for each variant."""
    head = ["variant", "seeds", "parameters", "vocabulary", "updates", "source tokens", "target tokens", "FLOPs"]
    head += ["FLOPs by time", "hours", "device"]
    whole = ("parameters", "vocab_size", "updates", "src_tokens", "tgt_tokens")
    return head, [
        [
            row["variant"],
            str(row["seeds"]),
            *("" if row[key] is None else f"{row[key]:,}" for key in whole),
            *("" if row[key] is None else f"{row[key]:.3g}" for key in ("flops", "flops_by_time")),
            number(row["hours"], 2),
            f"{row['processes']} x {row['device']}" if row["device"] and row["processes"] else row["device"] or "",
        ]
        for row in table.rows
        if row["seeds"]
    ]


def to_markdown(table: Table) -> str:
    """The table for people, what it cost, and with what it was made below it."""
    parts = [f"# {table.study['name']}", block(*cells(table), right=range(2, 8))]
    parts += ["\n".join(f"- {plain(line)}" for line in table.legend)]
    if any(row["seeds"] for row in table.rows):
        parts += ["## What it took", block(*costs(table), right=range(1, 10))]
    return "\n\n".join(parts) + "\n"


def block(head: Sequence[str], lines: Sequence[Sequence[str]], right: range) -> str:
    """A Markdown table; `right` are the columns of numbers, besides those whose head says so."""
    rule = ["---:" if i in right or head[i].startswith(("paper ", "PPL", "BLEU")) else "---" for i in range(len(head))]
    shown = [head, rule, *([_escaped(cell) for cell in line] for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in shown)


def _escaped(cell: str) -> str:
    return plain(cell).replace("|", "\\|")


def plain(text: str) -> str:
    """Without what Markdown would take for marks or for HTML."""
    return re.sub(r"([\\_*`]|<(?=[A-Za-z/!?]))", r"\\\1", " ".join(text.split()))


def _trimmed(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else line[: _REASON - 1].rstrip() + "…"


def number(value: float | None, digits: int, spread: float | None = None, sign: bool = False) -> str:
    """A value for people, with the spread over its seeds where there is one; blank for None."""
    if value is None:
        return ""
    value = round(value, digits) + 0.0  # no "-0.00"
    return f"{value:{'+' if sign else ''}.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def _interval(row: Mapping[str, Any], measure: str) -> str:
    ends = [row[f"{measure}_low"], row[f"{measure}_high"]]
    shown = number(row[f"{measure}_difference"], 2, sign=True)
    return shown if None in ends else f"{shown} ({', '.join(number(end, 2, sign=True) for end in ends)})"


def _p(value: float | None) -> str:
    return "" if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"
