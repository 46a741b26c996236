"""What is dropped from parallel text, by which rule, and the store that the rest becomes.

Validation and test text is never cleaned or cut.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_transformer.progress import say as say_on_stderr
from lit_transformer.sources import SPLITS, BibleSource, CorpusConfig, FileSource, Pair, open_source
from lit_transformer.store import SplitWriter, atomic_folder, exclusive, seal, sha256, write_text
from lit_transformer.tokenizer import MAX_LINE_BYTES, PIECE_MARKS, Tokenizer

FORMAT = 1  # raise it when the same text and options would give another store


def is_blank(text: str) -> bool:
    """True where nothing can be seen: spaces of any kind, controls and invisible format characters only."""
    return all(c.isspace() or unicodedata.category(c) in ("Cf", "Cc", "Zs") for c in text)


def _digests(source: FileSource | BibleSource) -> dict[str, list[str]]:
    """Content of the files of each split, in the order of their roles; names do not matter."""
    digests: dict[str, list[str]] = {}
    for split, paths in source.raw_files().items():
        for path in paths:
            try:
                digests.setdefault(split, []).append(sha256(path))
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digests


def store_folder(config: CorpusConfig, root: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Where the store of this text and these options stands, or will stand; the name follows from both.

    Args:
        tokenizer: a given one, instead of one learned from the training text.

    Raises:
        ValueError: the text cannot be read.
    """
    options = {k: v for k, v in asdict(config).items() if k not in SPLITS}
    parts = [FORMAT, options, _digests(open_source(config))] + ([tokenizer.fingerprint] if tokenizer else [])
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return root / f"{config.source}-{config.src_lang}-{config.tgt_lang}-{key}"


def _digest(*texts: str) -> bytes:
    # Eight bytes a sentence: exact duplicates among millions of lines without holding the lines.
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest()


class Cleaner:
    """Drops training pairs by named rules and counts every drop.  Rules on subwords come after tokenising."""

    def __init__(self, held_out: Iterable[Pair]) -> None:
        self.held_out = {_digest(text) for pair in held_out for text in pair}
        self.dropped: Counter[str] = Counter()
        self.marks: Counter[str] = Counter()
        self.read = 0

    def pairs(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """The pairs that stay; one pass, counts start anew."""
        self.dropped.clear()
        self.marks.clear()
        self.read = 0
        seen: set[bytes] = set()
        for src, tgt in pairs:
            self.read += 1
            if rule := self._broken_rule(src, tgt, seen):
                self.dropped[rule] += 1
                continue
            for mark in PIECE_MARKS:
                if mark in src or mark in tgt:
                    self.marks[f"U+{ord(mark.strip()):04X}"] += 1
            yield src, tgt

    def _broken_rule(self, src: str, tgt: str, seen: set[bytes]) -> str | None:
        if is_blank(src) or is_blank(tgt):
            return "empty side"
        if "\0" in src or "\0" in tgt:
            return "NUL character"
        if _digest(src) in self.held_out or _digest(tgt) in self.held_out:
            return "overlap with validation or test"
        pair = _digest(src, tgt)
        if pair in seen:
            return "exact duplicate"
        seen.add(pair)
        return None


def length_rule(src: Sequence[int], tgt: Sequence[int], config: CorpusConfig) -> str | None:
    """The rule that a tokenised pair breaks, if any."""
    longer, shorter = max(len(src), len(tgt)), min(len(src), len(tgt))
    if longer > config.max_length:
        return f"longer than max_length = {config.max_length}"
    if longer > config.max_ratio * shorter:
        return f"length ratio above max_ratio = {config.max_ratio:g}"
    return None


def prepare(
    config: CorpusConfig,
    root: Path,
    say: Callable[[str], None] | None = None,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Text to a store under `root`; where it already stands for the same text and options, nothing is done.

    Args:
        say: takes lines of progress and the report; standard error when not given.
        tokenizer: a given one, instead of one learned from the training text.

    Returns:
        The store's folder.

    Raises:
        ValueError: wrong text or options, in one message; nothing half-written stays.
    """
    say = say or say_on_stderr
    folder = store_folder(config, root, tokenizer)
    with exclusive(root / ".lock", lambda: say(f"corpus: another process prepares text in {root}; waiting for it")):
        if (folder / "meta.json").is_file():
            say(f"corpus: {folder} is up to date")
        else:
            _prepare(config, folder, say, tokenizer)
            say(f"corpus: written to {folder}")
    return folder


def _prepare(config: CorpusConfig, folder: Path, say: Callable[[str], None], tokenizer: Tokenizer | None) -> None:
    source = open_source(config)
    source.check()
    notes: Counter[str] = Counter()
    held_out = {split: list(source.pairs(split, notes)) for split in config.splits()[1:]}
    cleaner = Cleaner(itertools.chain.from_iterable(held_out.values()))
    skipped = 0
    if tokenizer is None:
        say("corpus: training the tokeniser")
        first_pass = cleaner.pairs(source.pairs("train", Counter()))  # what it counts, the second pass counts again
        try:
            tokenizer, skipped = Tokenizer.train(itertools.chain.from_iterable(first_pass), config.vocab_size)
        except ValueError as error:
            if cleaner.read and cleaner.read == cleaner.dropped.total():
                raise _nothing_left(cleaner) from error
            raise
    shutil.rmtree(folder, ignore_errors=True)  # one that lost its meta.json
    with atomic_folder(folder) as building:
        (building / "tokenizer.model").write_bytes(tokenizer.model)
        kept = _write_train(building, cleaner.pairs(source.pairs("train", notes)), cleaner, config, tokenizer, say)
        for split, pairs in held_out.items():
            writer = SplitWriter(building, split, tokenizer.vocab_size)
            writer.append(*(tokenizer.encode([pair[side] for pair in pairs]) for side in (0, 1)))
            writer.close()
            for side, name in enumerate(("src", "tgt")):
                write_text(building, split, name, (pair[side] for pair in pairs))
        report: dict[str, Any] = {
            "source": config.source,
            "raw_files": _digests(source),
            "options": {k: v for k, v in asdict(config).items() if k not in SPLITS},
            "train": {"read": cleaner.read, "dropped": dict(cleaner.dropped), "kept": kept},
            **{split: {"kept": len(pairs)} for split, pairs in held_out.items()},
            "notes": dict(notes),
            "piece_marks": dict(cleaner.marks),
            "tokenizer": {"vocab_size": tokenizer.vocab_size, "skipped_lines": skipped},
        }
        seal(building, tokenizer.fingerprint, report)
    for line in describe(report):
        say(line)


def _write_train(
    folder: Path,
    pairs: Iterable[Pair],
    cleaner: Cleaner,
    config: CorpusConfig,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
) -> int:
    writer, kept, iterator = SplitWriter(folder, "train", tokenizer.vocab_size), 0, iter(pairs)
    while chunk := list(itertools.islice(iterator, 20000)):
        encoded = zip(*(tokenizer.encode([pair[side] for pair in chunk]) for side in (0, 1)), strict=True)
        staying = []
        for src, tgt in encoded:
            if rule := length_rule(src, tgt, config):
                cleaner.dropped[rule] += 1
            else:
                staying.append((src, tgt))
        writer.append([src for src, _ in staying], [tgt for _, tgt in staying])
        kept += len(staying)
        say(f"corpus: {cleaner.read:,} training pairs read, {kept:,} kept")
    writer.close()
    if not kept:
        raise _nothing_left(cleaner)
    return kept


def _nothing_left(cleaner: Cleaner) -> ValueError:
    drops = ", ".join(f"{count} ({rule})" for rule, count in cleaner.dropped.items())
    return ValueError(f"no training pair is left of {cleaner.read}, dropped: {drops}")


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines for people."""
    train = report["train"]
    yield f"corpus: train {train['read']:,} pairs read, {train['kept']:,} kept"
    for rule, count in train["dropped"].items():
        yield f"corpus:   dropped {count:,}: {rule}"
    for split in SPLITS[1:]:
        if split in report:
            yield f"corpus: {split} {report[split]['kept']:,} pairs, as given"
    for note, count in report["notes"].items():
        yield f"corpus:   {note}: {count:,}"
    for mark, count in report["piece_marks"].items():
        yield f"corpus:   {count:,} training pairs hold the tokeniser's own mark {mark}" + (
            "; it comes back as a space" if mark == "U+2581" else ""
        )
    tokenizer = report["tokenizer"]
    yield f"corpus: {tokenizer['vocab_size']:,} subwords"
    if tokenizer["skipped_lines"]:
        yield (
            f"corpus:   the tokeniser's training left out {tokenizer['skipped_lines']:,} lines over "
            f"{MAX_LINE_BYTES:,} bytes or with U+2585"
        )
