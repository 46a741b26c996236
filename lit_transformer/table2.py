"""A run's scores on newstest2014 as a row of the paper's Table 2, beside its figures where they may be compared.

Which text was scored is known by its sentences, not by the name of a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from lit_transformer.rows import read_table2
from lit_transformer.table import block, number, plain

# The references of newstest2014 that the paper's Table 2 is about, 3,003 sentences each, by `fingerprint`.
NEWSTEST2014 = {"de": "a23c8a6312fea541", "fr": "36a8d3dfa8c9bf93"}
LANGUAGES = {"en": "English", "de": "German", "fr": "French"}
PAIRS = {"de": "about 4.5 million", "fr": "36 million"}  # section 5.1
# What the paper's big model changes in its base, and both for French (sections 5.1, 6.1; Table 3, last row).
_BIG = {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3, "max_steps": 300_000, "averaged": 20}
_FRENCH = {"vocab_size": 32000, "dropout": 0.1}


def fingerprint(lines: Sequence[str]) -> str:
    """Of a text, whatever kinds of spaces stand between its words: two copies of a test set differ in those."""
    return hashlib.sha256("\n".join(" ".join(line.split()) for line in lines).encode()).hexdigest()[:16]


def identify(sources: Sequence[str], references: Sequence[str], src_lang: str, tgt_lang: str) -> dict[str, Any]:
    """What was scored.

    Returns:
        Its sentences' number, languages and fingerprint, with `table2`: whether it is newstest2014 from English into
        German or French; and if it is not, `why_not`.
    """
    found = fingerprint(references)
    table2 = src_lang == "en" and found == NEWSTEST2014.get(tgt_lang)
    why_not = "this is not newstest2014, which is known by the text of its references"
    if found in NEWSTEST2014.values():
        why_not = f"these are references of newstest2014, but the run is from {src_lang} into {tgt_lang}"
    elif fingerprint(sources) in NEWSTEST2014.values():
        why_not = "this is newstest2014 the other way round, from what are the references there"
    return {
        "sentences": len(references),
        "src_lang": src_lang,
        "tgt_lang": tgt_lang,
        "fingerprint": found,
        "table2": table2,
        "why_not": "" if table2 else why_not,
    }


def paper_recipe(base: Mapping[str, Any], size: str, tgt_lang: str) -> dict[str, Any]:
    """The paper's "base" or "big" recipe for a target language, from that of base for German."""
    return {**base, **(_BIG if size == "big" else {}), **(_FRENCH if tgt_lang == "fr" else {})}


def departures(ours: Mapping[str, Any], base: Mapping[str, Any], tgt_lang: str) -> tuple[str, list[str]]:
    """Which of the paper's two models a run is nearer to, and what it has otherwise, with the paper's in brackets."""
    found = {}
    for size in ("base", "big"):
        paper = paper_recipe(base, size, tgt_lang)
        found[size] = [f"{name} = {ours[name]} ({paper[name]})" for name in paper if ours[name] != paper[name]]
    nearer = min(found, key=lambda size: len(found[size]))
    return nearer, found[nearer]


def to_markdown(record: Mapping[str, Any], base: Mapping[str, Any], trained: str) -> str:
    """The table with what it was made from.

    Args:
        record: what test.json says.
        base: the paper's recipe of base, with names as in `record["recipe"]`.
        trained: on what, in words.
    """
    tested, training = record["test_set"], record["training"]
    comparable = tested["table2"]
    nearer, differs = departures(record["recipe"], base, tested["tgt_lang"])
    by_time = training and training["flops_by_time"]
    ours = [
        f"ours: {record['parameters'] / 1e6:.1f}M parameters, {record['updates']:,} updates",
        number(record["compound_split_bleu"]["score"], 2),
        number(record["bleu"]["score"], 2),
        "" if by_time is None else _power(by_time),
        _power(training["flops"]) if training else "",
    ]
    head = ["model", "BLEU, compounds split", "sacreBLEU", "FLOPs by time", "FLOPs counted"]
    rows = [*(_published(tested["tgt_lang"]) if comparable else []), ours]
    way = " to ".join(LANGUAGES.get(tested[key], tested[key]) for key in ("src_lang", "tgt_lang"))
    title = f"{'newstest2014' if comparable else 'Test set'}, {way}"
    notes = [
        f"Test set: {tested['sentences']:,} sentences, references {tested['fingerprint']}.",
        *_about_the_papers_rows(tested),
        f"BLEU, compounds split: {record['compound_split_bleu']['signature']}, as the paper's. sacreBLEU: "
        f"{record['bleu']['signature']}; no figure of the paper is to be compared with it.",
        f"chrF {record['chrf']['score']:.2f} ({record['chrf']['signature']}); perplexity {_perplexity(record)} per "
        f"subword of {record['vocab_size']:,}, unsmoothed.",
        f"Nearest to the paper's {nearer}; differs from it in: {', '.join(differs) or 'none of the fields compared'}.",
        trained
        + (f"; the paper on {PAIRS[tested['tgt_lang']]} of WMT14, which is not checked." if comparable else "."),
        *_cost(training, by_time, record["updates"]),
    ]
    parts = [f"# {title}", block(head, rows, right=range(1, 5)), "\n".join(f"- {plain(note)}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def _published(tgt_lang: str) -> list[list[str]]:
    column = f"en{tgt_lang}"
    rows = [(name, row[f"{column}_bleu"], row[f"{column}_flops"]) for name, row in read_table2().items()]
    return [[name, bleu, "", flops, ""] for name, bleu, flops in rows if bleu]


def _power(value: float) -> str:
    """3.3e18, as the paper's figures stand in their file."""
    return f"{value:.1e}".replace("e+", "e")


def _about_the_papers_rows(tested: Mapping[str, Any]) -> list[str]:
    if not tested["table2"]:
        return [f"The paper's rows are left out, as Table 2 is of newstest2014 from English: {tested['why_not']}."]
    if not read_table2():
        return ["The paper's rows are missing: results/paper_table2.csv is not beside the package."]
    again = "; its 41.8 of big is 41.0 in the first version and in the text of section 6.1"
    return [f"The other rows are the paper's Table 2{again if tested['tgt_lang'] == 'fr' else ''}."]


def _perplexity(record: Mapping[str, Any]) -> str:
    return "beyond all bounds" if record["perplexity"] is None else f"{record['perplexity']:.3f}"


def _cost(training: Mapping[str, Any] | None, by_time: float | None, updates: int) -> list[str]:
    if training is None:
        return [f"FLOPs are blank: no result.json says what a training of {updates:,} updates took; `fit` writes it."]
    line = "FLOPs counted: all matrix products without padding, backward twice forward. By time, as the paper: "
    line += "hours x processes x what the device sustains (K80 2.8, K40 3.7, M40 6.0, P100 9.5 TFLOPS)"
    blank = "" if by_time is not None else f"; blank for {training['device']}, for which it gives none"
    return [f"{line}{blank}. {training['hours']:.2f} hours on {training['processes']} x {training['device']}."]
