"""Training text piece by piece, on all cores: each shard is cleaned, later encoded, by one process.

FOLDER/00012.src.txt, .tgt.txt   what the rules on text have left
FOLDER/00012.digests.npy         64 bits of each of those pairs, by which duplicates among all shards are found
FOLDER/00012.cleaned.json        counts; it comes last, so a shard that has it is not cleaned again
FOLDER/00012.src.npy, ...        as in a store
FOLDER/00012.kept.npy            digests of the pairs that were encoded
FOLDER/00012.encoded.json        counts; the same holds
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from lit_transformer.signals import ignore_signals
from lit_transformer.sources import is_blank
from lit_transformer.store import SIDES, SplitWriter, save_array, write_atomic, write_json
from lit_transformer.tokenizer import PIECE_MARKS, Tokenizer

SHARD = 50_000  # pairs: a few seconds of one core, and what is lost of each when a preparation is interrupted
_ODD = np.uint64(0x9E3779B97F4A7C15)

Counts = dict[str, Any]


def digests(texts: Iterable[str]) -> np.ndarray:
    """uint64 [number of texts]: equal texts have equal ones, and others as good as never."""
    raw = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(raw, np.uint64)


def pair_digests(src: np.ndarray, tgt: np.ndarray) -> np.ndarray:
    """Of pairs, from those of their sides."""
    return src * _ODD + tgt


def clean(folder: Path, name: str, sides: tuple[str, str], rules: frozenset[str], held_out: np.ndarray) -> Counts:
    """Write what the rules on text leave of a shard.

    Args:
        sides: source and target sentences, each a line: one string each goes from process to process at no cost.
        held_out: digests of all sentences of validation and test.

    Returns:
        read: pairs given; dropped: by rule.
    """
    src, tgt = (side.split("\n") for side in sides)
    by_side = digests(src), digests(tgt)
    overlap = np.isin(by_side[0], held_out) | np.isin(by_side[1], held_out)
    dropped: Counter[str] = Counter()
    keep = np.ones(len(src), bool)
    for i, (s, t) in enumerate(zip(src, tgt, strict=True)):
        if "blank" in rules and (is_blank(s) or is_blank(t)):
            rule = "blank"
        elif "nul" in rules and ("\0" in s or "\0" in t):
            rule = "nul"
        elif "overlap" in rules and overlap[i]:
            rule = "overlap"
        else:
            continue
        dropped[rule] += 1
        keep[i] = False
    for side, texts in zip(SIDES, (src, tgt), strict=True):
        kept = "".join(f"{text}\n" for text in itertools.compress(texts, keep))
        (folder / f"{name}.{side}.txt").write_bytes(kept.encode())
    save_array(folder / f"{name}.digests.npy", pair_digests(*by_side)[keep])
    counts = {"read": len(src), "dropped": dict(dropped)}
    write_json(folder / f"{name}.cleaned.json", counts)
    return counts


def read_text(folder: Path, name: str, keep: np.ndarray) -> list[list[str]]:
    """Source and target sentences of a cleaned shard, those where `keep` is true."""
    texts = []
    for side in SIDES:
        lines = (folder / f"{name}.{side}.txt").read_bytes().decode().split("\n")[:-1]
        texts.append(list(itertools.compress(lines, keep)))
    return texts


@functools.lru_cache(maxsize=1)
def _tokenizer(model: bytes) -> Tokenizer:
    return Tokenizer(model)


def encode(
    folder: Path, name: str, keep: np.ndarray, model: bytes, rules: frozenset[str], max_length: int, max_ratio: float
) -> Counts:
    """Write the token ids of a cleaned shard.

    Args:
        keep: bool [pairs of the cleaned shard], False for duplicates.
        model: of the tokeniser.

    Returns:
        kept: pairs written; dropped: by the rules on subwords; marks: pairs with the tokeniser's own marks.
    """
    tokenizer = _tokenizer(model)
    texts = read_text(folder, name, keep)
    marks = {
        f"U+{ord(mark.strip()):04X}": sum(mark in s or mark in t for s, t in zip(*texts, strict=True))
        for mark in PIECE_MARKS
    }
    ids = [tokenizer.encode_arrays(side) for side in texts]
    src, tgt = (np.fromiter(map(len, side), np.int64, len(side)) for side in ids)
    longer, shorter = np.maximum(src, tgt), np.minimum(src, tgt)
    long = longer > (max_length if "length" in rules else np.inf)
    uneven = ~long & (longer > (max_ratio * shorter if "ratio" in rules else np.inf))
    stays = ~(long | uneven)
    writer = SplitWriter(folder, name, tokenizer.vocab_size)
    writer.append(*(list(itertools.compress(side, stays)) for side in ids))
    writer.close()
    save_array(folder / f"{name}.kept.npy", np.load(folder / f"{name}.digests.npy")[keep][stays])
    counts = {
        "kept": int(stays.sum()),
        "dropped": {"length": int(long.sum()), "ratio": int(uneven.sum())},
        "marks": marks,
    }
    write_json(folder / f"{name}.encoded.json", counts)
    return counts


def learn(folder: Path, masks: dict[str, np.ndarray], vocab_size: int) -> Counts:
    """Write a tokeniser learned from the pairs of cleaned shards where the masks are true.

    Returns:
        pairs: so many; skipped_lines: left out by the trainer.

    Raises:
        ValueError: as `Tokenizer.train`.
    """

    def lines() -> Iterator[str]:
        for name, mask in masks.items():
            yield from itertools.chain.from_iterable(zip(*read_text(folder, name, mask), strict=True))

    tokenizer, skipped = Tokenizer.train(lines(), vocab_size)
    write_atomic(folder / "tokenizer.model", tokenizer.model)
    counts = {"pairs": int(sum(mask.sum() for mask in masks.values())), "skipped_lines": skipped}
    write_json(folder / "tokenizer.learned.json", counts)
    return counts


def first_ones(values: np.ndarray) -> np.ndarray:
    """bool: True where a value stands for the first time."""
    order = np.argsort(values, kind="stable")
    found = values[order]
    first = np.ones(len(values), bool)
    first[order[1:]] = found[1:] != found[:-1]
    return first


def sample(values: np.ndarray, keep: np.ndarray, size: int) -> np.ndarray:
    """bool: `size` of the kept pairs, the same ones for the same text whatever its order; all where there are fewer."""
    if int(keep.sum()) <= size:
        return keep
    mixed = (values ^ (values >> np.uint64(29))) * _ODD
    return keep & (mixed < np.partition(mixed[keep], size)[size])


def counts_of(folder: Path, name: str, stage: str) -> Counts | None:
    """What `clean` ("cleaned") or `encode` ("encoded") has counted of a shard, None where it is not done."""
    try:
        counts: Counts = json.loads((folder / f"{name}.{stage}.json").read_bytes())
    except FileNotFoundError:
        return None
    return counts


def processes() -> int:
    """How many can work at a time: the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parallel(work: Callable[..., Counts], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Counts]:
    """Results of `work` in the order of the jobs, few of which are in memory at a time; one alone is done here.

    Raises:
        ChildProcessError: a process has been killed.
    """
    waiting = iter(jobs)
    first = list(itertools.islice(waiting, 2))
    if len(first) < 2:
        yield from (work(*job) for job in first)
        return
    with _pool(processes()) as pool:
        running: deque[Future[Counts]] = deque()
        for job in itertools.chain(first, waiting):
            running.append(pool.submit(work, *job))
            if len(running) > processes() + 1:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def in_process(waiting: Callable[[], None], work: Callable[..., Counts], *arguments: Any) -> Counts:
    """`work` in a process of its own: code outside of Python looks for no signals, and this process does.

    Args:
        waiting: called every ten seconds.

    Raises:
        ChildProcessError: the process has been killed.
    """
    with _pool(1) as pool:
        future = pool.submit(work, *arguments)
        while not wait([future], 10).done:
            waiting()
        return future.result()


@contextlib.contextmanager
def _pool(size: int) -> Iterator[ProcessPoolExecutor]:
    # Spawned, not forked: what training has started in this process does not live in a copy of it.
    context = multiprocessing.get_context("spawn")
    end, held = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(size, context, _begin, (end,))
    try:
        yield pool
    except BaseException as error:
        held.close()  # whoever interrupts does not wait for what is under way
        if isinstance(error, BrokenProcessPool):
            raise ChildProcessError(
                "a process that prepares text has been killed, perhaps for want of memory; the same command goes on"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()


def _begin(end: Connection) -> None:
    """A process of a pool ends when the other end of this pipe is closed, which it also is when its holder dies."""
    ignore_signals()

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            end.recv()
        os._exit(1)  # what is half done has no counts yet, so it is done anew

    threading.Thread(target=watch, daemon=True).start()
