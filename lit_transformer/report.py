"""A study on one page: a static HTML file that needs nothing beside it, neither network nor other files."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from lit_transformer.legend import Outputs, budget
from lit_transformer.rows import Row
from lit_transformer.sentences import extremes
from lit_transformer.table import Table, cells, costs

_TEMPLATE = Path(__file__).with_name("report.html")
_SENTENCES = 5
_TYPES = {"png": "image/png", "curves.svg": "image/svg+xml"}
_QUESTION = "What does each change do to base, and does it do the same in the paper?"


def report(table: Table, rows: Sequence[Row], outputs: Outputs, plots: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        outputs: sentences by row and seed; without those of base and another row there is no part on them.
        plots: the images by the ending of their file.
    """
    # Escaping is on for everything: sentences and reasons are other people's text.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    head, lines = cells(table)
    cost_head, cost_lines = costs(table)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=table.study["name"],
        question=table.study.get("question") or _QUESTION,
        finished=sum(len(row.results) for row in rows),
        planned=len(rows) * len(table.study["seeds"]),
        budget=budget(rows) if any(row.results for row in rows) else "",
        head=head,
        rows=[
            {
                # The interval below its difference: side by side the table is wider than a page.
                "cells": [cell.partition(" (") if i in (4, 5) else (cell, "", "") for i, cell in enumerate(line)],
                "failed": bool(row["failed"]) and not row["seeds"],
                "certain": row["p_holm"] is not None and row["p_holm"] < 0.05,
            }
            for line, row in zip(lines, table.rows, strict=True)
        ],
        paper_columns=sum(title.startswith("paper") for title in head),
        legend=table.legend,
        agreement={"BLEU": table.agreement["bleu"], "perplexity": table.agreement["perplexity"]},
        cost_head=cost_head,
        cost_lines=cost_lines,
        images={
            kind: f"data:{_TYPES[kind]};base64,{base64.b64encode(image).decode()}" for kind, image in plots.items()
        },
        details=[_details(row) for row in rows if row.results],
        sentences=_side_by_side(table, outputs),
    )


def _details(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "set": ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.set.items()),
        "runs": [
            {
                "seed": result["seed"],
                "facts": _facts(result),
                "command": shlex.join(["lit-transformer", *map(str, result.get("command", []))]),
            }
            for result in row.results
        ],
    }


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    versions = result.get("versions", {})
    facts = {
        "BLEU": f"{result['bleu']['score']:.2f}",
        "perplexity": "infinite" if result["perplexity"] is None else f"{result['perplexity']:.3f}",
        "compound-split BLEU": f"{result['compound_split_bleu']['score']:.2f}",
        "updates": f"{result['updates']:,}",
        "device": f"{result.get('processes', 1)} x {result.get('device', 'unknown')}",
        "hours": f"{result['hours']:.2f}",
        "cut at the length limit": f"{result['unfinished']:,}" if "unfinished" in result else "",
        "updates left out": str(result.get("updates_left_out") or ""),
        "commit": versions.get("lit_transformer_commit", ""),
        "versions": ", ".join(f"{k} {v}" for k, v in versions.items() if k != "lit_transformer_commit"),
    }
    return {name: value for name, value in facts.items() if value}


def _side_by_side(table: Table, outputs: Outputs) -> dict[str, Any] | None:
    """Base and the row whose BLEU is furthest from it: the sentences where that row loses and wins most."""
    base, *others = table.rows
    known = [row for row in others if row["bleu_low"] is not None]
    if not known:
        return None
    row = max(known, key=lambda row: abs(row["bleu_difference"]))
    of_base, of_row = outputs[base["variant"]], outputs[row["variant"]]
    seed = next(seed for seed in of_base if seed in of_row)
    ours, theirs = of_base[seed], of_row[seed]
    deltas = theirs.chrf - ours.chrf
    lost, gained = (
        [
            {
                "number": i + 1,
                "source": ours.sources[i],
                "reference": ours.references[i],
                "base": ours.hypotheses[i],
                "row": theirs.hypotheses[i],
                "difference": f"{deltas[i]:+.1f}",
            }
            for i in chosen
        ]
        for chosen in extremes(deltas, _SENTENCES)
    )
    return {
        "base": base["variant"],
        "row": row["variant"],
        "seed": seed,
        "parts": [(f"Where {row['variant']} loses most", lost), (f"Where {row['variant']} wins most", gained)],
    }
