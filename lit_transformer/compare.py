"""`lit-transformer results compare A B`: two runs, or two rows of studies, sentence by sentence."""

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_transformer.rows import check_comparable, read_result
from lit_transformer.sentences import Sentences, extremes, mean_scores, read_sentences
from lit_transformer.significance import RESAMPLES, Comparison, Difference, compare
from lit_transformer.store import write_atomic

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_HEAD = (
    "seed", "sentence", "source", "reference", "output_a", "output_b", "chrf_a", "chrf_b", "chrf_difference",
    "nll_a", "nll_b", "tgt_tokens",
)  # fmt: skip


@dataclass
class Side:
    """One of the two: its results and outputs by seed, or by 0 where it is a single run."""

    name: str
    results: dict[int, dict[str, Any]]
    outputs: dict[int, Sentences]


def read_side(name: str, runs: Path, split: str) -> Side:
    """A run (a folder with its result) or a row (STUDY/VARIANT with its seeds).

    Args:
        split: "valid", what result.json is of; or what `test` has written, "test", "test.average-5" and so on.

    Raises:
        ValueError: neither, or scored without keeping its sentences.
    """
    file, run, row = "result.json" if split == "valid" else f"{split}.json", Path(name), runs / name
    if (run / file).is_file():
        folders = {0: run}
    else:
        seeds = [path for path in row.glob("seed*") if path.name[4:].isdigit() and (path / file).is_file()]
        folders = {int(path.name[4:]): path for path in sorted(seeds, key=lambda path: int(path.name[4:]))}
    if not folders:
        mend = "name a finished run, or STUDY/VARIANT"
        if split != "valid":
            folders_of = [run, *row.glob("seed*")]
            there = sorted({path.stem for folder in folders_of for path in folder.glob("test*.json")})
            mend = f"--split is one of {', '.join(there)}" if there else "run `lit-transformer test` on it first"
        raise ValueError(f"{name}: neither {run / file} nor {row}/seedN/{file} is there: {mend}")
    side = Side(name, {seed: read_result(folder / file, ()) for seed, folder in folders.items()}, {})
    for seed, folder in folders.items():
        found = read_sentences(folder, side.results[seed], split)
        if found is None:
            again = "run `lit-transformer test` again"
            if split == "valid":
                again = "remove result.json and type its command again, only the scoring is repeated"
            raise ValueError(f"{folder} has no sentences.{split}.jsonl (scored by an older version): {again}")
        side.outputs[seed] = found
    return side


def compare_sides(a: Side, b: Side) -> Comparison:
    """B against A over the seeds that both have.

    Raises:
        ValueError: names the field in which the two cannot be compared, or says that no seed is common.
    """
    if (0 in a.outputs) != (0 in b.outputs) and {len(a.outputs), len(b.outputs)} != {1}:
        raise ValueError(f"{a.name} and {b.name}: one is a run, the other a row: give two runs or two rows")
    if len(a.outputs) == len(b.outputs) == 1 and 0 in a.outputs.keys() | b.outputs.keys():
        for side in (a, b):  # two single runs stand side by side whatever their seeds
            side.results = {0: next(iter(side.results.values()))}
            side.outputs = {0: next(iter(side.outputs.values()))}
    check_comparable([(f"{side.name} (seed {r['seed']})", r) for side in (a, b) for r in side.results.values()])
    found = compare(a.outputs, {"b": b.outputs})
    if not found:
        raise ValueError(
            f"{a.name} has seeds {', '.join(map(str, a.outputs))}, {b.name} has {', '.join(map(str, b.outputs))}: "
            "none is common, so name two runs instead"
        )
    return found["b"]


def describe(a: Side, b: Side, found: Comparison, sentences: int) -> str:
    """What is printed: both scores, their difference, and the sentences that differ most."""
    first = next(iter(a.results.values()))
    scores = [mean_scores([side.outputs[seed] for seed in found.seeds]) for side in (a, b)]
    seeds = (
        f", seeds {', '.join(map(str, found.seeds))} (means)" if len(found.seeds) > 1 else f", seed {found.seeds[0]}"
    )
    seeds = "" if found.seeds == [0] else seeds
    together = ", each with all its seeds" if len(found.seeds) > 1 else ""
    lines = [
        f"A: {a.name}",
        f"B: {b.name}",
        f"{first['split']}: {first['bleu']['sentences']:,} sentences{seeds}",
        "",
        f"{'':<12}{'A':>9}{'B':>9}{'B - A':>9}   95% interval",
        _line("BLEU", scores[0][0], scores[1][0], found.bleu) + f"   p {_p(found.p_value)}",
        _line("perplexity", scores[0][1], scores[1][1], found.perplexity),
        "",
        f"BLEU: {first['bleu']['signature']}; p by sacreBLEU's paired bootstrap ({found.signature})",
        f"intervals: {RESAMPLES:,} paired resamples of the sentences{together}",
    ]
    pairs = [(seed, a.outputs[seed], b.outputs[seed]) for seed in found.seeds]
    deltas = np.concatenate([theirs.chrf - ours.chrf for _, ours, theirs in pairs])
    better, worse = int((deltas > 0).sum()), int((deltas < 0).sum())
    lines.append(
        f"by chrF, B is better in {better:,}, worse in {worse:,}, the same in {len(deltas) - better - worse:,}"
    )
    for title, chosen in zip(("B loses most", "B gains most"), extremes(deltas, sentences), strict=True):
        lines += ["", f"{title}:"] if chosen else []
        for i in chosen:
            seed, ours, theirs = pairs[i // len(pairs[0][1])]
            n = i % len(ours)
            where = f"sentence {n + 1}" + (f", seed {seed}" if seeds else "")
            lines.append(f"  {deltas[i]:+.1f} chrF, {where}")
            texts = (ours.sources[n], ours.references[n], ours.hypotheses[n], theirs.hypotheses[n])
            names = ("source", "reference", "A", "B")
            lines += [f"    {name:<10}{' '.join(text.split())}" for name, text in zip(names, texts, strict=True)]
    return "\n".join(lines)


def _line(name: str, a: float, b: float, difference: Difference) -> str:
    shown = f"{name:<12}{a:>9.2f}{b:>9.2f}"
    if difference.value is None:
        return shown
    shown += f"{difference.value + 0.0:>+9.2f}"
    if difference.low is None or difference.high is None:
        return shown
    return shown + f"   {difference.low + 0.0:+.2f} to {difference.high + 0.0:+.2f}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}"


def to_table(a: Side, b: Side, seeds: Sequence[int], separator: str) -> str:
    """Every sentence of every common seed, with its scores under A and B; `seed` is 0 for two single runs."""
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerow(_HEAD)
    for seed in seeds:
        ours, theirs = a.outputs[seed], b.outputs[seed]
        for n, (x, y) in enumerate(zip(ours.chrf, theirs.chrf, strict=True)):
            nlls = [float(side.nll[n]) if math.isfinite(side.nll[n]) else "" for side in (ours, theirs)]
            texts = (ours.sources[n], ours.references[n], ours.hypotheses[n], theirs.hypotheses[n])
            writer.writerow([seed, n + 1, *texts, float(x), float(y), float(y - x), *nlls, int(ours.tgt_tokens[n])])
    return text.getvalue()


def compare_command(args: Sequence[str]) -> int:
    """Scores of two runs or rows, whether they differ, and in which sentences."""
    parser = argparse.ArgumentParser(
        "lit-transformer results compare",
        allow_abbrev=False,
        description="Two runs (folders with a result), or two rows (STUDY/VARIANT, over their common seeds).",
    )
    parser.add_argument("a", metavar="A", help="what is compared with")
    parser.add_argument("b", metavar="B", help="what is compared")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs, for rows")
    parser.add_argument(
        "--split", default="valid", metavar="NAME", help="valid (default), or as `test` named it: test, test.average-5"
    )
    parser.add_argument("--sentences", type=int, default=5, metavar="N", help="show so many of each kind (default 5)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all sentences, as FILE.tsv or FILE.csv")
    options = parser.parse_args(args)
    if options.split != "valid" and options.split.partition(".")[0] != "test":
        raise ValueError(f"--split {options.split}: must be valid, test, or test and more, as its file is called")
    if options.sentences < 0:
        raise ValueError(f"--sentences {options.sentences}: must be at least 0")
    if options.output and options.output.suffix not in _SEPARATORS:
        raise ValueError(f"--output {options.output}: must end in .tsv or .csv")
    a, b = (read_side(name, options.runs, options.split) for name in (options.a, options.b))
    found = compare_sides(a, b)
    shown = describe(a, b, found, options.sentences)
    if options.output:
        table = to_table(a, b, found.seeds, _SEPARATORS[options.output.suffix])
        write_atomic(options.output, table.encode(errors="replace"))
    print(shown)
    if options.output:
        print(f"\nwritten: {options.output}")
    return 0
