"""Scores that never travel without the settings that made them, and perplexity.

Two kinds of BLEU, never in one column: today's cased sacreBLEU, and the paper's on Moses tokens with
compounds split at hyphens, which reads about 0.5 to 1.5 higher on the same output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import sacrebleu
import torch
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

if TYPE_CHECKING:
    import sacremoses

# Below this many, a corpus BLEU says little: its n-gram counts are a handful.
FEW_SENTENCES = 100
# sentencepiece's space, subword-nmt's joint, and a byte piece.
SUBWORD_MARKS = {"U+2581": re.compile("\u2581"), "@@": re.compile("@@( |$)"), "<0x..>": re.compile("<0x[0-9A-F]{2}>")}


@dataclass(frozen=True)
class Score:
    """A corpus score with the settings that made it."""

    name: str
    score: float
    signature: str
    sentences: int
    note: str = ""

    def minus(self, other: Score) -> float:
        """Difference of two scores.

        Raises:
            ValueError: where they were not made the same way.
        """
        for field in ("name", "signature"):
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                raise ValueError(f"scores with another {field} cannot be compared: {mine!r} and {theirs!r}")
        return self.score - other.score

    def as_dict(self) -> dict[str, str | float | int]:
        return asdict(self)

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.name} {self.score:.2f} on {self.sentences} sentences [{self.signature}]{note}"


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str], decoded: bool = False) -> Score:
    """Cased sacreBLEU with 13a tokenisation, on the text as it was given.

    Args:
        decoded: the hypotheses come from a tokeniser's decoder, so what looks like a mark is what the model wrote.

    Raises:
        ValueError: different numbers of lines, none at all, or hypotheses that still hold subword marks.
    """
    _check(hypotheses, references, decoded)
    bleu = BLEU()
    return _score("sacreBLEU", bleu.corpus_score(hypotheses, [references]).score, bleu, len(hypotheses))


def corpus_chrf(hypotheses: Sequence[str], references: Sequence[str], decoded: bool = False) -> Score:
    """chrF2 by sacreBLEU.  Raises ValueError as `corpus_bleu` does."""
    _check(hypotheses, references, decoded)
    chrf = CHRF()
    return _score("chrF", chrf.corpus_score(hypotheses, [references]).score, chrf, len(hypotheses))


def compound_split_bleu(
    hypotheses: Sequence[str], references: Sequence[str], language: str = "de", decoded: bool = False
) -> Score:
    """The paper's BLEU: Moses tokenisation, compounds split at hyphens, no smoothing.

    Args:
        language: the target's two-letter code; it chooses Moses' list of abbreviations.
        decoded: as for `corpus_bleu`.

    Raises:
        ValueError: as `corpus_bleu` does.
    """
    import sacremoses  # here: it compiles patterns for half a second, which every start would wait for

    _check(hypotheses, references, decoded)
    moses = sacremoses.MosesTokenizer(lang=language)
    bleu = BLEU(tokenize="none", smooth_method="none", force=True)
    score = bleu.corpus_score(
        [split_compounds(moses, line) for line in hypotheses], [[split_compounds(moses, line) for line in references]]
    ).score
    scored = _score("compound-split BLEU", score, bleu, len(hypotheses))
    tokens = f"tok:moses-{language}-{sacremoses.__version__}+compounds"
    return Score(scored.name, scored.score, scored.signature.replace("tok:none", tokens), scored.sentences, scored.note)


def split_compounds(moses: sacremoses.MosesTokenizer, line: str) -> str:
    """Moses tokens, hyphens inside words as tokens of their own, joined by spaces."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", moses.tokenize(line, return_str=True))


def _score(name: str, score: float, metric: sacrebleu.metrics.base.Metric, sentences: int) -> Score:
    note = f"few sentences: below {FEW_SENTENCES} the score is hardly more than noise"
    return Score(name, score, str(metric.get_signature()), sentences, note if sentences < FEW_SENTENCES else "")


def _check(hypotheses: Sequence[str], references: Sequence[str], decoded: bool) -> None:
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references: one for each is needed")
    if not hypotheses:
        raise ValueError("no sentence to score")
    if decoded:
        return
    for mark, pattern in SUBWORD_MARKS.items():
        marked = [i for i, line in enumerate(hypotheses, 1) if pattern.search(line)]
        if marked and not any(pattern.search(line) for line in references):
            raise ValueError(
                f"{len(marked)} of {len(hypotheses)} hypotheses hold the subword mark {mark} (first in line "
                f"{marked[0]}): decode them to plain text before scoring"
            )


class TokenNLL(Metric):
    """Unsmoothed negative log-likelihood per target token, end of sentence included, over all batches and ranks."""

    full_state_update = False
    nll: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        # A sum over a corpus in float32 loses digits.
        self.add_state("nll", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = "") -> Module:
        applied = super()._apply(fn, exclude_state)
        self.nll = self.nll.double()  # also where a whole module is cast to a lower precision
        self._defaults["nll"] = self._defaults["nll"].double()  # type: ignore[union-attr]
        return applied

    def update(self, nll: Tensor, tokens: Tensor) -> None:
        """Add a batch: the sum of its NLL in nats, and how many tokens that is the sum of."""
        self.nll += nll.double()
        self.tokens += tokens

    def compute(self) -> Tensor:
        return self.nll / self.tokens


def perplexity(nll: float) -> float:
    """exp of an NLL per token in nats; infinite where that is beyond a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf
