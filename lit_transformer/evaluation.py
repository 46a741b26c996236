"""What a validation or test finds: perplexity over a whole split and BLEU, alike for any number of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_transformer.data import TranslationDataModule
from lit_transformer.decode import search_all
from lit_transformer.metrics import Score, compound_split_bleu, corpus_bleu, corpus_chrf, perplexity
from lit_transformer.progress import reporter
from lit_transformer.sources import one_line
from lit_transformer.strategy import whole
from lit_transformer.transformer import Transformer


@dataclass(frozen=True)
class Evaluation:
    """What a validation or test found.

    Scores, hypotheses and `finished` are of the sentences with numbers in `decoded`; `sentence_nll` is of every
    sentence of the split, in nats and in its order.
    """

    split: str
    step: int
    nll: float  # nats per target token, unsmoothed, end of sentence included
    tokens: int
    decoded: list[int]
    hypotheses: list[str]
    finished: list[bool]  # False where the output was cut at the length limit
    scores: list[Score]
    sentence_nll: list[float]

    @property
    def unfinished(self) -> int:
        return self.finished.count(False)

    @property
    def perplexity(self) -> float:
        return perplexity(self.nll)


def evaluate(
    model: Transformer,
    data: TranslationDataModule,
    split: str,
    step: int,
    batch_nlls: Sequence[Tensor],
    sentences: int,
    beam_size: int,
    length_penalty: float,
) -> Evaluation:
    """Put together what all ranks have found; every rank calls it, and gets the same bits for any number of ranks.

    Args:
        split: "valid" or "test".
        batch_nlls: of this rank's batches, `data.evaluated`: the NLL of each sentence in nats, [B].
        sentences: how many to decode for BLEU, spread evenly over the split; 0 is none.
    """
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
    batches = zip(data.evaluated.batches, batch_nlls, strict=True)
    scored = {i: nll for ids, values in batches for i, nll in zip(ids.tolist(), values.tolist(), strict=False)}
    sources, references = data.sources(split), data.references(split)
    chosen = np.unique(np.linspace(0, len(sources) - 1, min(sentences, len(sources))).round().astype(int)).tolist()
    outputs = search_all(
        whole(model) if chosen else model,  # each rank takes steps of its own
        [sources[i] for i in chosen],
        beam_size=beam_size,
        length_penalty=length_penalty,
        share=(rank, world),
        report=reporter(f"decoding {split}", len(chosen) // world) if rank == 0 else lambda done: None,
    )
    decoded = {
        i: (one_line(data.tokenizer.decode(best[0].ids)), best[0].finished)
        for i, best in zip(chosen, outputs, strict=True)
        if best
    }
    parts: list[Any] = [(scored, decoded)]
    if world > 1:
        parts = [None] * world
        torch.distributed.all_gather_object(parts, (scored, decoded))
    nlls: dict[int, float] = {}
    found: dict[int, tuple[str, bool]] = {}
    for theirs, texts in parts:
        nlls |= theirs
        found |= texts
    targets = data.sentences(split, "tgt")
    tokens = int(targets.lengths.sum()) + len(targets)
    sentence_nll = [nlls[i] for i in range(len(targets))]
    hypotheses, finished = [found[i][0] for i in chosen], [found[i][1] for i in chosen]
    scores = []
    if chosen:
        wanted = [references[i] for i in chosen]
        scores = [
            corpus_bleu(hypotheses, wanted, decoded=True),
            compound_split_bleu(hypotheses, wanted, data.corpus.tgt_lang, decoded=True),
            corpus_chrf(hypotheses, wanted, decoded=True),
        ]
    nll = math.fsum(sentence_nll) / tokens
    return Evaluation(split, step, nll, tokens, chosen, hypotheses, finished, scores, sentence_nll)
