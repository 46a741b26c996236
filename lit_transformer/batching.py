"""Which sentences make up update n, and how an update is split into micro-batches.

Everything here follows from stored lengths, a seed and an update's number: no state to save, and nothing that
depends on the number of processes.  Lengths count tokens with the end of sentence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Update:
    """One optimiser update's sentences.

    Attributes:
        sentences: ids into the training split, sorted by length.
        tgt_tokens: target tokens in them, what the update's loss is divided by.
        epoch: pass over the training split that this update belongs to, from 0.
    """

    sentences: np.ndarray
    tgt_tokens: int
    epoch: int


class UpdatePlan:
    """Groups whole sentences of similar length into updates of near-equal size, anew in each epoch.

    An epoch uses every sentence once.  Which lengths stand together is the same in every epoch; which sentences
    of those lengths, and the order of the updates, are drawn from (seed, epoch).  So the split that one epoch
    needs serves all of them.

    Args:
        src_lengths, tgt_lengths: tokens of each training sentence, end of sentence included.
        tokens_per_update: source tokens and target tokens, about that many of each (section 5.1: 25,000).
        seed: of the shuffling.

    Attributes:
        src_lengths, tgt_lengths: as given.
        updates_per_epoch: an epoch ends with a whole update.

    Raises:
        ValueError: no sentences, or a size out of range.
    """

    def __init__(self, src_lengths: np.ndarray, tgt_lengths: np.ndarray, tokens_per_update: int, seed: int) -> None:
        if len(src_lengths) == 0 or len(src_lengths) != len(tgt_lengths):
            raise ValueError(f"{len(src_lengths)} source and {len(tgt_lengths)} target sentences: must be as many, > 0")
        if tokens_per_update < 1:
            raise ValueError(f"tokens_per_update = {tokens_per_update}: must be at least 1")
        self.seed = seed
        self.src_lengths, self.tgt_lengths = np.asarray(src_lengths, np.int64), np.asarray(tgt_lengths, np.int64)
        costs = self.src_lengths + self.tgt_lengths
        # Near-equal updates instead of full ones and a small last one.
        self.updates_per_epoch = max(1, round(int(costs.sum()) / (2 * tokens_per_update)))
        self._classes = _classes(self.src_lengths, self.tgt_lengths)
        ends = np.cumsum(costs[np.argsort(self._classes, kind="stable")])
        shares = np.linspace(0, ends[-1], self.updates_per_epoch + 1)[1:-1]
        # A sentence longer than an update's share would leave the next update empty: those merge.
        self._bounds = np.unique(np.concatenate([[0], np.searchsorted(ends, shares), [len(costs)]]))
        self.updates_per_epoch = len(self._bounds) - 1
        self._sizes = np.maximum(self.src_lengths, self.tgt_lengths)

    @functools.lru_cache(maxsize=2)  # noqa: B019  (a plan lives as long as its run)
    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, epoch])
        # Where a sentence comes among all says where it comes among those of its lengths.
        places = rng.permutation(len(self._classes))
        shuffled = np.empty_like(places)
        shuffled[places] = np.arange(len(places))
        return (
            shuffled[np.argsort(self._classes[shuffled], kind="stable")],
            rng.permutation(self.updates_per_epoch),
        )

    def update(self, n: int) -> Update:
        """Update number n, counted from 0 over all epochs."""
        epoch, i = divmod(n, self.updates_per_epoch)
        order, turn = self._epoch(epoch)
        sentences = order[self._bounds[turn[i]] : self._bounds[turn[i] + 1]]
        return Update(sentences, int(self.tgt_lengths[sentences].sum()), epoch)

    def uses(self, updates: int) -> np.ndarray:
        """How often each sentence is used in the first so many updates, int64 [number of sentences]."""
        epochs, rest = divmod(updates, self.updates_per_epoch)
        counts = np.full(len(self.src_lengths), epochs, np.int64)
        for n in range(epochs * self.updates_per_epoch, epochs * self.updates_per_epoch + rest):
            counts[self.update(n).sentences] += 1
        return counts

    def split(self, update: Update, parts: int, max_tokens: int) -> list[np.ndarray]:
        """An update in `parts` micro-batches, as equal as whole sentences allow; the last ones may be empty.

        Args:
            max_tokens: a micro-batch's sentences times its longest side, at most.

        Raises:
            ValueError: the update does not fit.
        """
        sizes = self._sizes[update.sentences]
        low, high = max(int(sizes.max()), math.ceil(int(sizes.sum()) / parts)), max_tokens
        if len(_fill(sizes, high)) > parts:
            raise ValueError(
                f"an update of {int(sizes.sum())} tokens does not fit into {parts} micro-batches of {max_tokens}"
            )
        while low < high:  # the smallest budget that still needs no more than `parts`
            middle = (low + high) // 2
            low, high = (low, middle) if len(_fill(sizes, middle)) <= parts else (middle + 1, high)
        pieces = np.split(update.sentences, _fill(sizes, high)[:-1])
        return pieces + [update.sentences[:0]] * (parts - len(pieces))

    def accumulation(self, world_size: int, max_tokens: int) -> int:
        """Micro-batches that each rank takes for one update, the fewest that suffice for every update.

        Raises:
            ValueError: the longest sentence alone exceeds max_tokens.
        """
        longest = int(self._sizes.max())
        if longest > max_tokens:
            raise ValueError(
                f"max_tokens = {max_tokens} is less than the longest training sentence, {longest} tokens: "
                "raise max_tokens or lower max_length"
            )
        sizes = self._sizes[self._epoch(0)[0]]
        most = max(
            len(_fill(sizes[start:end], max_tokens))
            for start, end in zip(self._bounds[:-1].tolist(), self._bounds[1:].tolist(), strict=True)
        )
        return math.ceil(most / world_size)


def _classes(src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    """Numbers of the pairs of lengths, in the order in which they stand in an epoch, one for each sentence.

    By source length; within one, by target length up and down in turn: neighbours are alike on both sides.
    """
    span = int(tgt.max()) + 1
    codes = 2 * span * src + np.where(src % 2 == 0, tgt, -tgt) + span
    there = np.zeros(int(codes.max()) + 1, bool)
    there[codes] = True
    numbers = np.cumsum(there) - 1
    # As small as can be: numpy sorts 16 bits by counting, some ten times faster than it compares.
    return numbers.astype(np.min_scalar_type(int(numbers[-1])))[codes]


def _fill(sizes: np.ndarray, budget: int) -> list[int]:
    """Ends of consecutive runs, each as long as its length times its largest size stays within the budget."""
    ends, start = [], 0
    while start < len(sizes):
        run = np.maximum.accumulate(sizes[start : start + max(1, budget // int(sizes[start]))])
        over = run * np.arange(1, len(run) + 1) > budget
        start += max(1, int(over.argmax()) if over.any() else len(run))
        ends.append(start)
    return ends


def evaluation_batches(lengths: Sequence[int] | np.ndarray, max_tokens: int, world_size: int) -> list[list[np.ndarray]]:
    """Every sentence once, batched by length, for each rank the same number of batches; some may be empty.

    Args:
        lengths: the longer side's tokens.  A sentence beyond max_tokens is a batch of its own.

    Returns:
        [world_size][batches] arrays of sentence ids.
    """
    order = np.argsort(np.asarray(lengths, np.int64), kind="stable")
    batches = np.split(order, _fill(np.asarray(lengths, np.int64)[order], max_tokens)[:-1]) if len(order) else []
    batches += [order[:0]] * (-len(batches) % world_size)
    return [batches[rank::world_size] for rank in range(world_size)]
