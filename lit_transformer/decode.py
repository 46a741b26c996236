"""Greedy and beam search (section 6.1) over a model's `start` and `step`; knows no training.

Shapes: B sentences still searched, W beams, V vocabulary, t target tokens so far.
The length |Y| counts every generated token, the end of sentence included, for finished and unfinished
hypotheses alike.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_transformer.packed import for_search
from lit_transformer.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lit_transformer.transformer import Transformer

BEAM_SIZE = 4
LENGTH_PENALTY = 0.6
MAX_EXTRA = 50  # output may be this much longer than the input


@dataclass(frozen=True)
class Hypothesis:
    """One output: its ids without BOS and EOS, and why it ended."""

    ids: tuple[int, ...]
    log_prob: float
    score: float  # log_prob / ((5 + |Y|) / 6)^alpha
    finished: bool  # False: cut at the length limit, no end of sentence


class State(Protocol):
    def select(self, beams: Tensor, sentences: Tensor | None = None) -> None: ...


class Steppable(Protocol):
    """What a search needs of a model; `Transformer` is one."""

    @property
    def max_length(self) -> int | None: ...

    def start(self, src: Tensor) -> Any: ...

    def step(self, tokens: Tensor, state: Any) -> Tensor: ...


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """The options of a beam search, with the paper's values."""
    parser.add_argument("--beam_size", type=int, default=BEAM_SIZE)
    parser.add_argument("--length_penalty", type=float, default=LENGTH_PENALTY, help="alpha (section 6.1)")


def length_normaliser(length: int, alpha: float) -> float:
    """lp(Y) = ((5 + |Y|) / 6)^alpha of Wu et al. (2016), equation 14."""
    return ((5 + length) / 6) ** alpha


def _limits(model: Steppable, src: Tensor) -> list[int]:
    longest = model.max_length or math.inf
    return [int(min(n + MAX_EXTRA, longest)) for n in (src != PAD_ID).sum(1).tolist()]


@torch.no_grad()
def greedy_search(
    model: Steppable,
    src: Tensor,
    *,
    bos_id: int = BOS_ID,
    eos_id: int = EOS_ID,
    banned_ids: Sequence[int] = (PAD_ID, UNK_ID, BOS_ID),
) -> list[Hypothesis]:
    """The most probable token at each step.

    Args:
        model: in eval mode, on the device of `src`.
        src: source ids [B, S], padded on the right, ending with EOS.
        banned_ids: ids that are never generated.

    Returns:
        One hypothesis for each row of `src`, in order.
    """
    limits = torch.tensor(_limits(model, src), device=src.device)
    state = model.start(src)
    tokens = src.new_full((len(src), 1), bos_id)
    log_prob = torch.zeros(len(src), device=src.device)
    rows, outputs = list(range(len(src))), [(((), 0.0, False))] * len(src)
    history = tokens[:, :0]
    for length in range(1, max(limits.tolist(), default=0) + 1):
        step_log_prob, tokens = _log_probs(model.step(tokens, state), banned_ids)[:, 0].max(-1, keepdim=True)
        log_prob = log_prob + step_log_prob[:, 0]
        history = torch.cat((history, tokens), 1)
        ended = (tokens[:, 0] == eos_id) | (length >= limits)
        if not ended.any():
            continue
        for i in ended.nonzero()[:, 0].tolist():
            outputs[rows[i]] = (tuple(history[i].tolist()), log_prob[i].item(), tokens[i].item() == eos_id)
        keep = (~ended).nonzero()[:, 0]
        if not len(keep):
            break
        rows = [rows[i] for i in keep.tolist()]
        history, tokens, log_prob, limits = history[keep], tokens[keep], log_prob[keep], limits[keep]
        state.select(keep, keep)
    return [Hypothesis(ids[:-1] if finished else ids, lp, lp, finished) for ids, lp, finished in outputs]


@torch.no_grad()
def beam_search(
    model: Steppable,
    src: Tensor,
    *,
    beam_size: int = BEAM_SIZE,
    length_penalty: float = LENGTH_PENALTY,
    n_best: int = 1,
    bos_id: int = BOS_ID,
    eos_id: int = EOS_ID,
    banned_ids: Sequence[int] = (PAD_ID, UNK_ID, BOS_ID),
) -> list[list[Hypothesis]]:
    """Beam search with the paper's length penalty and limit of input + 50 tokens.

    A sentence's search ends as soon as no live hypothesis can still enter its n_best: log-probabilities only
    fall, so a live one can at most reach its log-probability over the normaliser of the longest length.

    Args:
        model: in eval mode, on the device of `src`.
        src: source ids [B, S], padded on the right, ending with EOS.
        length_penalty: alpha; 0 compares plain log-probabilities.
        n_best: hypotheses wanted for each sentence, at most beam_size.
        banned_ids: ids that are never generated.

    Returns:
        For each row of `src`, in order, n_best hypotheses, best first.  Those cut at the limit, flagged
        `finished=False`, stand behind the finished ones and only where these are too few.

    Raises:
        ValueError: for sizes out of range.
    """
    _check_sizes(beam_size, n_best, length_penalty)
    width, device = beam_size, src.device
    limits = _limits(model, src)
    finished: list[list[Hypothesis]] = [[] for _ in range(len(src))]
    state = model.start(src)
    rows = list(range(len(src)))  # which sentence each still searched one is
    tokens = src.new_full((len(rows), width), bos_id)
    history = src.new_empty((len(rows), width, 0))
    live = torch.full((len(rows), width), -math.inf, device=device)
    live[:, 0] = 0.0  # all beams start alike: only one of them may grow
    for length in range(1, max(limits, default=0) + 1):
        candidates = live.unsqueeze(-1) + _log_probs(model.step(tokens, state), banned_ids)
        vocab_size = candidates.size(-1)
        # Each beam ends at most once, so 2 W candidates hold W that go on.
        values, flat = candidates.flatten(1).topk(min(2 * width, width * vocab_size))
        parents, tokens = flat // vocab_size, flat % vocab_size
        ends = (tokens == eos_id) & values.isfinite()
        normaliser = length_normaliser(length, length_penalty)
        for i, j in ends.nonzero().tolist():
            best, score = finished[rows[i]], values[i, j].item() / normaliser
            if len(best) < n_best or score > best[-1].score:
                ids = tuple(history[i, parents[i, j]].tolist())
                best.append(Hypothesis(ids, values[i, j].item(), score, True))
                best.sort(key=lambda h: -h.score)
                del best[n_best:]
        live, order = values.masked_fill(tokens == eos_id, -math.inf).topk(width)
        parents, tokens = parents.gather(1, order), tokens.gather(1, order)
        history = torch.cat((history.gather(1, parents.unsqueeze(-1).expand(-1, -1, length - 1)), tokens[..., None]), 2)

        keep = []
        for i, top in enumerate(live[:, 0].tolist()):
            best, limit = finished[rows[i]], limits[rows[i]]
            beaten = len(best) == n_best and top / length_normaliser(limit, length_penalty) <= best[-1].score
            if not (beaten or length >= limit or top == -math.inf):
                keep.append(i)
            elif len(best) < n_best:
                for log_prob, ids in zip(live[i].tolist(), history[i].tolist(), strict=True):
                    if log_prob > -math.inf and len(best) < n_best:
                        best.append(Hypothesis(tuple(ids), log_prob, log_prob / normaliser, False))
        if not keep:
            break
        beams = parents + width * torch.arange(len(rows), device=device).unsqueeze(1)
        if len(keep) < len(rows):
            # The last ones fill the gaps: caches of the others stay where they are.
            last = (i for i in keep if i >= len(keep))
            keep = [i if i in keep else next(last) for i in range(len(keep))]
            kept = torch.tensor(keep, device=device)
            tokens, history, live, beams = tokens[kept], history[kept], live[kept], beams[kept]
            rows = [rows[i] for i in keep]
            state.select(beams.flatten(), kept)
        else:
            state.select(beams.flatten())
    for best in finished:
        if not best:  # a model without a number for any token, after training has diverged: still one output each
            best.append(Hypothesis((), -math.inf, -math.inf, False))
    return finished


def _check_sizes(beam_size: int, n_best: int, length_penalty: float) -> None:
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best = {n_best}, beam_size = {beam_size}: 1 <= n_best <= beam_size must hold")
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty = {length_penalty}: must be at least 0")


def _log_probs(logits: Tensor, banned_ids: Sequence[int]) -> Tensor:
    """[B, W, V] -> the same in float32; banned ids keep their share of the mass but cannot be chosen."""
    log_probs = F.log_softmax(logits.float(), dim=-1)
    if banned_ids:
        log_probs[..., list(banned_ids)] = -math.inf
    return log_probs


def pad(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Ids of different lengths -> [B, longest], padded on the right."""
    return nn.utils.rnn.pad_sequence(
        [torch.as_tensor(s, dtype=torch.long) for s in sequences], batch_first=True, padding_value=PAD_ID
    ).to(device)


def search_all(
    model: nn.Module,
    sources: Sequence[Sequence[int]],
    *,
    beam_size: int = BEAM_SIZE,
    length_penalty: float = LENGTH_PENALTY,
    n_best: int = 1,
    batch_tokens: int = 8192,
    share: tuple[int, int] = (0, 1),
    report: Callable[[int], None] = lambda done: None,
) -> list[list[Hypothesis]]:
    """Beam search over any number of sources, batched by length; outputs stand in the order of the inputs.

    The batches are the same for any number of processes that share the work, so their outputs are too.

    Args:
        model: a Transformer; searched in eval mode, its own mode is restored.
        sources: ids of each source, EOS included.
        batch_tokens: padded source tokens in one batch, times beams; a longer sentence is a batch of its own.
        share: (k, n) searches the k-th of every n batches; the other sources' outputs are empty.
        report: told after each batch how many sources are done.

    Raises:
        ValueError: for sizes out of range.
    """
    _check_sizes(beam_size, n_best, length_penalty)
    device = next(model.parameters()).device
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    batches = []
    while order:
        rows = max(1, batch_tokens // (len(sources[order[0]]) * beam_size))
        batches.append(order[:rows])
        order = order[rows:]
    results: list[list[Hypothesis]] = [[] for _ in sources]
    done = 0
    training = model.training
    model.eval()
    try:
        searched = for_search(model) if type(model) is Transformer else model
        for batch in batches[share[0] :: share[1]]:
            found = beam_search(
                searched,  # type: ignore[arg-type]
                pad([sources[i] for i in batch], device),
                beam_size=beam_size,
                length_penalty=length_penalty,
                n_best=n_best,
            )
            for i, hypotheses in zip(batch, found, strict=True):
                results[i] = hypotheses
            done += len(batch)
            report(done)
    finally:
        model.train(training)
    return results
