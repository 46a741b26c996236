"""A run's outputs sentence by sentence: what sentences.SPLIT.jsonl holds, and its n-gram counts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

_ORDER = 4  # BLEU's longest n-gram


@dataclass(frozen=True)
class Sentences:
    """The sentences that BLEU was computed on, in their order; arrays have one entry a sentence.

    Args:
        nll: sum over the reference's tokens, in nats.
        src_tokens: pieces of the source, end of sentence included; tgt_tokens the same of the reference.
    """

    file: Path
    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    nll: np.ndarray
    src_tokens: np.ndarray
    tgt_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.hypotheses)

    @cached_property
    def counts(self) -> np.ndarray:
        """Integers [sentences, 10]: lengths of hypothesis and reference, matching n-grams, all n-grams."""
        # Of a single sentence only the counts are used; effective_order keeps sacreBLEU from warning of its score.
        metric = BLEU(effective_order=True, force=True)
        scores = [metric.sentence_score(h, [r]) for h, r in zip(self.hypotheses, self.references, strict=True)]
        return np.array([[s.sys_len, s.ref_len, *s.counts, *s.totals] for s in scores], dtype=np.int64)

    @cached_property
    def chrf(self) -> np.ndarray:
        """chrF of each sentence, 0 to 100: unlike BLEU it tells two single sentences apart."""
        metric = CHRF()
        pairs = zip(self.hypotheses, self.references, strict=True)
        return np.array([metric.sentence_score(h, [r]).score for h, r in pairs], dtype=np.float64)


def extremes(differences: np.ndarray, number: int) -> tuple[list[int], list[int]]:
    """Where it falls most and where it rises most, at most so many each, the largest first, without ties at zero."""
    order = np.argsort(differences, kind="stable")
    lost = [int(i) for i in order[:number] if differences[i] < 0]
    gained = [int(i) for i in np.argsort(-differences, kind="stable")[:number] if differences[i] > 0]
    return lost, gained


def bleu_of(counts: np.ndarray) -> float:
    """Corpus BLEU of summed counts [10], as sacreBLEU's corpus_score computes it."""
    whole = [int(value) for value in counts]
    matches, totals = whole[2 : 2 + _ORDER], whole[2 + _ORDER :]
    return float(BLEU.compute_bleu(matches, totals, whole[0], whole[1], smooth_method="exp").score)


def perplexity_of(nll: float, tokens: float) -> float:
    """exp of the NLL per token; infinite where that is beyond a float, nan where there is no token."""
    try:
        return math.exp(nll / tokens) if tokens else math.nan
    except OverflowError:
        return math.inf


def mean_scores(seeds: Sequence[Sentences]) -> tuple[float, float]:
    """BLEU and perplexity of runs that differ in their seed, the mean over these."""
    bleu = [bleu_of(one.counts.sum(0)) for one in seeds]
    perplexity = [perplexity_of(float(one.nll.sum()), float(one.tgt_tokens.sum())) for one in seeds]
    return sum(bleu) / len(seeds), sum(perplexity) / len(seeds)


def read_sentences(run: Path, result: dict[str, Any], name: str = "") -> Sentences | None:
    """What a run's outputs were, or None where it was scored before such files were written.

    Args:
        run: its folder.
        result: what result.json or test.json says of them.
        name: that of the file, as `score_runs` names it; the split's when not given.

    Raises:
        ValueError: names the file and line, or what it is at odds with.
    """
    file = run / f"sentences.{name or result['split']}.jsonl"
    if not file.is_file():
        return None
    lines = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
        try:
            lines.append(_checked(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}, line {number}: is no sentence ({error!r}): {_mend(result)}") from error
    found = _gather(file, lines)
    if len(found) != result["bleu"]["sentences"]:
        raise ValueError(
            f"{file} holds {len(found)} sentences, {result['bleu']['sentences']} were scored: {_mend(result)}"
        )
    if len(found) and abs(bleu_of(found.counts.sum(0)) - result["bleu"]["score"]) > 1e-6:
        raise ValueError(
            f"{file} scores BLEU {bleu_of(found.counts.sum(0)):.4f} and its result says "
            f"{result['bleu']['score']:.4f}: {_mend(result)}"
        )
    return found


def _mend(result: dict[str, Any]) -> str:
    if result["split"] == "test":
        return "score it again with `lit-transformer test`"
    return "remove it and result.json, and type the run's command again: only the scoring is repeated"


def _checked(line: dict[str, Any]) -> dict[str, Any]:
    for key in ("source", "reference", "hypothesis"):
        if not isinstance(line[key], str):
            raise ValueError(f"{key} is {line[key]!r}: must be text")
    nll = line["nll"]  # null where it was not finite
    return line | {
        "nll": math.nan if nll is None else float(nll),
        "src_tokens": int(line["src_tokens"]),
        "tgt_tokens": int(line["tgt_tokens"]),
    }


def _gather(file: Path, lines: Sequence[dict[str, Any]]) -> Sentences:
    sources, references, hypotheses = ([line[k] for line in lines] for k in ("source", "reference", "hypothesis"))
    nll = np.array([line["nll"] for line in lines], dtype=np.float64)
    src, tgt = (np.array([line[k] for line in lines], dtype=np.int64) for k in ("src_tokens", "tgt_tokens"))
    return Sentences(file, sources, references, hypotheses, nll, src, tgt)
