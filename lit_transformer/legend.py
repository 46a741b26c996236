"""What a study's table was made from, in sentences: what is compared how, and why a cell is blank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_transformer.rows import Row
from lit_transformer.sentences import Sentences
from lit_transformer.significance import RESAMPLES, Agreement, Comparison

# Sustained single-precision TFLOPS that the paper's footnote gives.
SUSTAINED = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5}
Outputs = Mapping[str, Mapping[int, Sentences]]  # by row and seed, where the files are there


def explain(
    study: Mapping[str, Any],
    rows: Sequence[Row],
    outputs: Outputs,
    found: Mapping[str, Comparison],
    agreements: Mapping[str, Agreement],
) -> list[str]:
    """The lines below a table.

    Args:
        found: what was compared with base.
        agreements: with the paper, by measure.
    """
    results = [result for row in rows for result in row.results]
    if not results:
        return ["No run has finished yet.", *_given_up(rows)]
    first = results[0]
    return [
        f"{len(results)} of {len(rows) * len(study['seeds'])} runs finished; seeds "
        f"{', '.join(map(str, study['seeds']))}; {budget(rows)}.",
        f"BLEU: {first['bleu']['signature']}, {first['bleu']['sentences']:,} sentences of the {first['split']} split, "
        f"beam {first['beam_size']}, length penalty {first['length_penalty']}, {_averaging(rows)}. The paper's BLEU is "
        "on tokenised text with compounds split and reads higher; only differences to base are to be compared with it.",
        *([f"BLEU: {first['bleu']['note']}."] if first["bleu"].get("note") else []),
        f"PPL: per subword of a vocabulary of {first['vocab_size']:,}, unsmoothed, end of sentence included. "
        f"± is the standard deviation over seeds; differences (d) are to the first row, {rows[0].name}, over the seeds "
        "that both have.",
        *(
            ["The rows are a search's trials, the best first: it was picked by its result, which favours it."]
            if study.get("space")
            else []
        ),
        *_intervals(found),
        *_not_compared(rows, outputs, found),
        f"Agreement with the paper (Spearman's rank correlation of our differences to base with its): "
        f"perplexity {agreements['perplexity']}; BLEU {agreements['bleu']}; at {budget(rows)}, the paper's at "
        "100,000 or 300,000 updates of about 25,000 target tokens.",
        *_beyond(study, rows, outputs),
        *_given_up([row for row in rows if row.results]),
        "FLOPs: of all training tokens, counted from the model's shape, backward twice the forward. By time: the "
        "paper's estimate, hours x processes x what the device sustains (K80 2.8, K40 3.7, M40 6.0, P100 9.5 TFLOPS)"
        f"{_unknown_devices(results)}.",
        f"Parameters are exact, at that vocabulary. Data {first['data']}, tokeniser {first['tokenizer']}.",
    ]


def budget(rows: Sequence[Row]) -> str:
    """ "1,500 updates, 1,073,769 target tokens": what the rows were trained for, each figure that occurs."""
    results = [result for row in rows for result in row.results]
    updates = sorted({result["updates"] for result in results})
    tokens = sorted({result["tgt_tokens"] for result in results if result.get("tgt_tokens")})
    shown = [" or ".join(f"{n:,}" for n in updates) + " updates"]
    if tokens:
        # Every seed draws its own sentences, so the counts differ in their last digits.
        shown += [
            f"{tokens[0]:,} target tokens"
            if tokens[0] == tokens[-1]
            else f"{tokens[0]:,} to {tokens[-1]:,} target tokens"
        ]
    return ", ".join(shown)


def _averaging(rows: Sequence[Row]) -> str:
    averaged = [row.name for row in rows if any(result.get("averaged") for result in row.results)]
    return f"averaged checkpoints in {', '.join(averaged)} alone" if averaged else "no averaging"


def _intervals(found: Mapping[str, Comparison]) -> list[str]:
    if not found:
        return []
    of = f"{len(found)} rows" if len(found) > 1 else "1 row"
    return [
        f"In brackets: 95% interval of the difference, over the seeds that both rows have, by {RESAMPLES:,} paired "
        "resamples of the sentences, each with all its seeds; how far seeds differ is in ±, not in it. p: of the "
        f"difference in BLEU by sacreBLEU's paired bootstrap ({next(iter(found.values())).signature}), of several "
        "seeds by its statistic on the resamples in brackets, as more seeds are not more sentences; Holm-corrected for "
        f"{of} compared."
    ]


def _not_compared(rows: Sequence[Row], outputs: Outputs, found: Mapping[str, Comparison]) -> list[str]:
    base, *others = rows
    lines = []
    incomplete = [row.name for row in rows if len(outputs.get(row.name, {})) < len(row.results)]
    if incomplete:
        split = next(result["split"] for row in rows for result in row.results)
        lines.append(
            f"Without intervals and p, or with those of fewer seeds: {', '.join(incomplete)}, for want of "
            f"sentences.{split}.jsonl beside the result (runs of an older version; remove their result.json and run "
            "the study again: only the scoring is repeated)."
        )
    apart = [row.name for row in others if outputs.get(row.name) and row.name not in found]
    if apart and outputs.get(base.name):
        lines.append(f"Without intervals and p, having no seed in common with {base.name}: {', '.join(apart)}.")
    if not base.results:
        lines.append(f"{base.name} has not finished, so there are no differences to it yet.")
    return lines


def _beyond(study: Mapping[str, Any], rows: Sequence[Row], outputs: Outputs) -> list[str]:
    results = [result for row in rows for result in row.results if outputs.get(row.name)]
    longest = {int(result["max_length"]) for result in results if result.get("max_length") is not None}
    if not study.get("by_length") or not longest:
        return []
    return [
        f"Beyond: on the sentences of more than {' or '.join(f'{n:,}' for n in sorted(longest))} source pieces, "
        "longer than any that was trained on."
    ]


def _given_up(rows: Sequence[Row]) -> list[str]:
    return [f"{row.name}: a seed was given up: {row.failed}" for row in rows if row.failed]


def _unknown_devices(results: Sequence[Mapping[str, Any]]) -> str:
    unknown = {str(result.get("device")) for result in results}
    unknown = {device for device in unknown if not any(name in device for name in SUSTAINED)}
    return f"; blank for {', '.join(sorted(unknown))}, for which it gives none" if unknown else ""
