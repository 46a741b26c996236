"""Is a difference more than chance?  Paired tests and intervals of two rows, and agreement with the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest, Result

from lit_transformer.sentences import Sentences, bleu_of

RESAMPLES = 1000
FEW_ROWS = 4  # below this many, a rank correlation says nothing
_SEED = 12345  # of our own resampling: the same results give the same table


@dataclass(frozen=True)
class Difference:
    """Of two scores over the same sentences, with its 95% interval; None where it is not finite."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """A row against base over the seeds that both have; p_value is that of BLEU, uncorrected."""

    seeds: list[int]
    bleu: Difference
    perplexity: Difference
    p_value: float
    signature: str


def compare(base: Mapping[int, Sentences], rows: Mapping[str, Mapping[int, Sentences]]) -> dict[str, Comparison]:
    """Every row against base, as far as they have seeds in common.

    Args:
        base: the sentences by seed.
        rows: the same for each row.

    Returns:
        By row; rows without a seed that base has too are left out.

    Raises:
        ValueError: two that do not hold the same references in the same order.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name, row in rows.items():
        if seeds := tuple(seed for seed in base if seed in row):
            together.setdefault(seeds, []).append(name)
    found = {}
    for seeds, names in together.items():
        first = base[seeds[0]]
        for other in (row[seed] for row in (base, *(rows[name] for name in names)) for seed in seeds):
            check_same_references(first, other)
        tests = _p_values(base[seeds[0]], {name: rows[name][seeds[0]] for name in names})
        weights = _weights(len(first))
        ours = _Resampled([base[seed] for seed in seeds], weights)
        for name in names:
            theirs = _Resampled([rows[name][seed] for seed in seeds], weights)
            p, signature = tests[name]
            if len(seeds) > 1:
                p = _p_value(theirs.bleu - ours.bleu)
            bleu = _difference(theirs.bleu - ours.bleu)
            found[name] = Comparison(list(seeds), bleu, _difference(theirs.perplexity - ours.perplexity), p, signature)
    return {name: found[name] for name in rows if name in found}


def check_same_references(one: Sentences, other: Sentences) -> None:
    """Raises ValueError naming both files and the first sentence in which sources or references differ."""
    for what in ("sources", "references"):
        mine, theirs = getattr(one, what), getattr(other, what)
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False), 1)
            line = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(theirs)) + 1)
            raise ValueError(
                f"{one.file} and {other.file} cannot be compared: their {what} differ from line {line} on; "
                "score both on the same data"
            )


def _p_values(base: Sentences, rows: Mapping[str, Sentences]) -> dict[str, tuple[float, str]]:
    """sacreBLEU's paired bootstrap on the outputs of one seed, and its signature."""
    outputs = {"": base.hypotheses, **{name: row.hypotheses for name, row in rows.items()}}
    metric = {"BLEU": BLEU(force=True)}
    test = PairedTest(list(outputs.items()), metric, [base.references], "bs", n_samples=RESAMPLES)
    signatures, scores = test()
    signature = str(signatures["BLEU"])
    found = {}
    for name, score in zip(outputs, scores["BLEU"], strict=True):
        if name:
            assert isinstance(score, Result) and score.p_value is not None
            # Where no resample differs sacreBLEU counts none as larger, and calls 1/1001 what is no difference.
            same = bleu_of(base.counts.sum(0)) == bleu_of(rows[name].counts.sum(0))
            found[name] = (1.0 if same else score.p_value, signature)
    return found


def _p_value(differences: np.ndarray) -> float:
    """sacreBLEU's statistic on our resamples: more seeds are not more sentences, so one is drawn with all of them."""
    real, drawn = abs(differences[0]), np.abs(differences[1:])
    if not real:
        return 1.0
    return float(((drawn - drawn.mean() > real).sum() + 1) / (len(drawn) + 1))


def _weights(sentences: int) -> np.ndarray:
    """How often each sentence is drawn [1 + resamples, sentences]; the first row is the corpus as it is."""
    drawn = np.random.default_rng(_SEED).multinomial(sentences, np.full(sentences, 1 / sentences), RESAMPLES)
    return np.vstack([np.ones((1, sentences)), drawn])


class _Resampled:
    """BLEU and perplexity, means over seeds, under every row of weights; a sentence is drawn with all its seeds."""

    def __init__(self, seeds: Sequence[Sentences], weights: np.ndarray) -> None:
        self.bleu = np.mean([[bleu_of(row) for row in weights @ one.counts] for one in seeds], axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            each = [np.exp((weights @ one.nll) / (weights @ one.tgt_tokens)) for one in seeds]
            self.perplexity = np.mean(each, axis=0)


def _difference(values: np.ndarray) -> Difference:
    """Of the corpus (first) and of its resamples."""
    if not np.isfinite(values).all():
        return Difference(float(values[0]) if math.isfinite(values[0]) else None, None, None)
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return Difference(float(values[0]), float(low), float(high))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction for having compared so many."""
    corrected, largest = {}, 0.0
    for i, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, min(1.0, (len(p_values) - i) * p_values[name]))
        corrected[name] = largest
    return {name: corrected[name] for name in p_values}


@dataclass(frozen=True)
class Agreement:
    """Rank correlation of our differences to base with the paper's; `why_not` where there is none."""

    rows: int
    rho: float | None = None
    low: float | None = None
    high: float | None = None
    why_not: str = ""

    def __str__(self) -> str:
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        if self.rho is None:
            return f"{self.why_not} ({rows})"
        interval = f", 95% interval {self.low:+.2f} to {self.high:+.2f}" if self.low is not None else ""
        return f"{self.rho + 0.0:+.2f}{interval} ({rows})"


def agreement(pairs: Sequence[tuple[float, float]]) -> Agreement:
    """Spearman's rank correlation, ties by their mean rank, with a percentile interval from resampled rows.

    Args:
        pairs: our difference and the paper's, one pair a row, base left out.
    """
    if len(pairs) < FEW_ROWS:
        return Agreement(len(pairs), why_not="too few rows")
    values = np.array(pairs, dtype=np.float64)
    if (np.ptp(values, axis=0) == 0).any():
        return Agreement(len(pairs), why_not="no order: all differences are the same")
    from scipy.stats import rankdata, spearmanr  # here: importing it takes longer than most tables

    rho = float(spearmanr(values[:, 0], values[:, 1]).statistic)
    drawn = values[np.random.default_rng(_SEED).integers(len(pairs), size=(RESAMPLES, len(pairs)))]
    drawn = drawn[(np.ptp(drawn, axis=1) > 0).all(axis=1)]  # a resample of one repeated value has no order
    ranks = rankdata(drawn, axis=1)
    ranks -= ranks.mean(axis=1, keepdims=True)
    products = (ranks[:, :, 0] * ranks[:, :, 1]).sum(1)
    rhos = products / np.sqrt((ranks**2).sum(1).prod(1))
    low, high = np.percentile(rhos, [2.5, 97.5])
    return Agreement(len(pairs), rho, float(low), float(high))
