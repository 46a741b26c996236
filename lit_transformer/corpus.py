"""Parallel text to a store: cleaned by named rules, the tokeniser learned, encoded, all of it counted.

Validation and test text is never cleaned or cut.  An interrupted preparation keeps what it has done, and goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lit_transformer import shards
from lit_transformer.progress import clock
from lit_transformer.progress import say as say_on_stderr
from lit_transformer.sources import SPLITS, CorpusConfig, Pair, Part, fetch, open_source
from lit_transformer.store import (
    SplitWriter,
    atomic_folder,
    exclusive,
    join_splits,
    seal,
    sha256,
    write_json,
    write_text,
)
from lit_transformer.tokenizer import MAX_LINE_BYTES, Tokenizer

FORMAT = 2  # raise it when the same text and options would give another store
TOKENIZER_PAIRS = 1_000_000  # the tokeniser is learned from so many at most
RULES = {
    "blank": "a side in which nothing can be seen",
    "nul": "a NUL character",
    "overlap": "a side that stands in validation or test",
    "duplicate": "a pair that came before",
    "length": "more than max_length subwords",
    "ratio": "one side more than max_ratio times the other's subwords",
}

Say = Callable[[str], None]


def _digests(parts: dict[str, Part], root: Path) -> dict[str, list[str]]:
    """Content of the files of each split, in the order of their roles; names do not matter."""
    known = _known_digests(root)
    found: dict[str, list[str]] = {}
    for split, part in parts.items():
        for path in part.files:
            try:
                found.setdefault(split, []).append(known.get(_state(path)) or sha256(path))
            except OSError as error:
                raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    return found


def _state(path: Path) -> str:
    """What changes when a file's content does: gigabytes are not read again at every start."""
    stat = path.stat()
    return f"{path.resolve()} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _states(config: CorpusConfig) -> dict[Path, str]:
    return {path: _state(path) for part in open_source(config).values() for path in part.files if path.exists()}


def _known_digests(root: Path) -> dict[str, str]:
    try:
        return dict(json.loads((root / ".digests.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}  # only a saving of time


def _remember_digests(parts: dict[str, Part], root: Path) -> None:
    digests = _digests(parts, root)
    now = {
        _state(path): digest
        for split, part in parts.items()
        for path, digest in zip(part.files, digests[split], strict=True)
        if time.time() - path.stat().st_mtime > 2  # a younger file may yet change within its time stamp
    }
    known = _known_digests(root)
    if not now.items() <= known.items():
        write_json(root / ".digests.json", known | now)


def store_folder(config: CorpusConfig, root: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Where the store of this text and these options stands, or will stand; the name follows from both.

    Args:
        tokenizer: a given one, instead of one learned from the training text.

    Raises:
        ValueError: the text cannot be read, or is not here yet.
    """
    parts = [FORMAT, _options(config), _digests(open_source(config), root)] + (
        [tokenizer.fingerprint] if tokenizer else []
    )
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return root / f"{config.source}-{config.src_lang}-{config.tgt_lang}-{key}"


def _options(config: CorpusConfig) -> dict[str, Any]:
    """Those that say what becomes of the text; where it lies says nothing."""
    return {k: v for k, v in asdict(config).items() if k not in (*SPLITS, "dataset")}


def prepare(config: CorpusConfig, root: Path, say: Say | None = None, tokenizer: Tokenizer | None = None) -> Path:
    """Text to a store under `root`; where it already stands for the same text and options, nothing is done.

    Interrupted, it goes on when it is called again.

    Args:
        say: takes lines of progress and the report; standard error when not given.
        tokenizer: a given one, instead of one learned from the training text.

    Returns:
        The store's folder.

    Raises:
        ValueError: wrong text or options, in one message; nothing half-written stays.
    """
    say = say or say_on_stderr
    with exclusive(root / ".lock", lambda: say(f"corpus: another process prepares text in {root}; waiting for it")):
        fetch(config, say)
        states = _states(config)
        _remember_digests(open_source(config), root)
        folder = store_folder(config, root, tokenizer)
        # What has been cut into shards of another size does not fit.
        work = folder.with_name(f".{folder.name}.{shards.SHARD}.part")
        if (folder / "meta.json").is_file():
            say(f"corpus: {folder} is up to date")
        else:
            try:
                Preparation(config, work, say, states).write(folder, tokenizer, _digests(open_source(config), root))
            except ValueError:  # something is wrong with the text, and so with what has been made of it
                shutil.rmtree(work, ignore_errors=True)
                raise
            say(f"corpus: written to {folder}")
        shutil.rmtree(work, ignore_errors=True)
    return folder


class Preparation:
    """One preparation, its steps in their order; what each has done stands in `work` when the next begins."""

    def __init__(self, config: CorpusConfig, work: Path, say: Say, states: dict[Path, str]) -> None:
        self.config, self.work, self.say, self.states = config, work, say, states
        self.parts = open_source(config)
        self.rules: frozenset[str] = frozenset(config.clean)
        self.dropped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    def write(self, folder: Path, tokenizer: Tokenizer | None, raw: dict[str, list[str]]) -> None:
        """All steps; `raw` are the digests of the files."""
        self.work.mkdir(parents=True, exist_ok=True)
        held_out = {split: list(self.parts[split].pairs(self.notes)) for split in self.config.splits()[1:]}
        read = self._clean(held_out)
        for path, state in _states(self.config).items():
            if state != self.states.get(path):
                raise ValueError(
                    f"{path} has changed while it was read: type the same command again once it stays as it is"
                )
        keep, values = self._without_duplicates()
        if not any(mask.any() for mask in keep.values()):
            raise self._nothing_left(read)
        learned = {"pairs": 0, "skipped_lines": 0}
        if tokenizer is None:
            tokenizer, learned = self._learn(keep, values)
        kept, marks = self._encode(keep, tokenizer)
        if not kept:
            raise self._nothing_left(read)
        shutil.rmtree(folder, ignore_errors=True)  # one that lost its meta.json
        with atomic_folder(folder) as building:
            (building / "tokenizer.model").write_bytes(tokenizer.model)
            join_splits(self.work, self.names, building, "train")
            for split, given in held_out.items():
                self._write_held_out(building, split, given, tokenizer)
            report: dict[str, Any] = {
                "source": self.config.source,
                "raw_files": raw,
                "fingerprints": {"raw": _short(json.dumps(raw).encode()), "cleaned": self._fingerprint(held_out)},
                "options": _options(self.config),
                "train": {"read": read, "dropped": dict(self.dropped), "kept": kept},
                **{split: {"kept": len(given)} for split, given in held_out.items()},
                "notes": dict(self.notes),
                "piece_marks": {mark: count for mark, count in marks.items() if count},
                "tokenizer": {"vocab_size": tokenizer.vocab_size, **learned},
            }
            seal(building, tokenizer.fingerprint, report)
        for line in describe(report):
            self.say(line)

    def _clean(self, held_out: dict[str, list[Pair]]) -> int:
        """Read the training text once, in shards to be cleaned; returns how many pairs there are."""
        done = self.work / "read.json"
        if not done.is_file():
            notes: Counter[str] = Counter()
            sentences = np.unique(
                shards.digests(text for pairs in held_out.values() for pair in pairs for text in pair)
            )
            train, pairs = self.parts["train"], self.parts["train"].pairs(notes)
            names = itertools.count()
            count = 0

            def jobs() -> Iterator[tuple[Any, ...]]:
                nonlocal count
                for chunk in iter(lambda: list(itertools.islice(pairs, shards.SHARD)), []):
                    name = _name(next(names))
                    if counts := shards.counts_of(self.work, name, "cleaned"):
                        count += counts["read"]
                    else:
                        src, tgt = zip(*chunk, strict=True)
                        yield self.work, name, ("\n".join(src), "\n".join(tgt)), self.rules, sentences

            report = _reporter(self.say, "training pairs read")
            for counts in shards.in_parallel(shards.clean, jobs()):
                count += counts["read"]
                report(count, train.share_read())
            write_json(done, {"shards": next(names), "read": count, "notes": dict(notes)})
        summary = json.loads(done.read_bytes())
        self.names = [_name(number) for number in range(summary["shards"])]
        self.notes.update(summary["notes"])
        for name in self.names:
            self.dropped.update((shards.counts_of(self.work, name, "cleaned") or {})["dropped"])
        self.say(f"corpus: {summary['read']:,} training pairs read")
        return int(summary["read"])

    def _without_duplicates(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Which pairs of each shard go on, and the digests of all of them in a row."""
        each = [np.load(self.work / f"{name}.digests.npy") for name in self.names]
        values = np.concatenate(each)
        keep = shards.first_ones(values) if "duplicate" in self.rules else np.ones(len(values), bool)
        self.dropped["duplicate"] = len(values) - int(keep.sum())
        ends = np.cumsum([len(part) for part in each])[:-1]
        return dict(zip(self.names, np.split(keep, ends), strict=True)), values

    def _learn(self, keep: dict[str, np.ndarray], values: np.ndarray) -> tuple[Tokenizer, dict[str, int]]:
        """A tokeniser from a sample of the pairs that go on."""
        path = self.work / "tokenizer.model"
        if shards.counts_of(self.work, "tokenizer", "learned") is None:
            going_on = np.concatenate(list(keep.values()))
            taken = shards.sample(values, going_on, TOKENIZER_PAIRS)
            ends = np.cumsum([len(mask) for mask in keep.values()])[:-1]
            masks = dict(zip(keep, np.split(taken, ends), strict=True))
            self.say(f"corpus: training the tokeniser on {int(taken.sum()):,} of {int(going_on.sum()):,} pairs")
            if len(keep) == 1:
                shards.learn(self.work, masks, self.config.vocab_size)
            else:
                start = time.monotonic()
                shards.in_process(
                    lambda: self.say(f"corpus: training the tokeniser, {clock(time.monotonic() - start)} so far"),
                    shards.learn,
                    self.work,
                    masks,
                    self.config.vocab_size,
                )
        learned = shards.counts_of(self.work, "tokenizer", "learned")
        assert learned is not None
        return Tokenizer.load(path), learned

    def _encode(self, keep: dict[str, np.ndarray], tokenizer: Tokenizer) -> tuple[int, Counter[str]]:
        """Returns how many pairs are kept, and how many hold the tokeniser's own marks."""
        done = {name: shards.counts_of(self.work, name, "encoded") for name in self.names}
        left = [name for name, counts in done.items() if counts is None]
        options = self.rules, self.config.max_length, self.config.max_ratio
        jobs = ((self.work, name, keep[name], tokenizer.model, *options) for name in left)
        total, pairs = sum(map(len, keep.values())), sum(len(keep[name]) for name in self.names if name not in left)
        self.say(f"corpus: encoding {total:,} pairs")
        report = _reporter(self.say, f"of {total:,} pairs encoded")
        for name, counts in zip(left, shards.in_parallel(shards.encode, jobs), strict=True):
            done[name] = counts
            pairs += len(keep[name])
            report(pairs, pairs / total)
        kept, marks = 0, Counter[str]()
        for one in done.values():
            assert one is not None
            kept += one["kept"]
            marks.update(one["marks"])
            self.dropped.update(one["dropped"])
        self.dropped = +self.dropped
        return kept, marks

    def _write_held_out(self, folder: Path, split: str, pairs: list[Pair], tokenizer: Tokenizer) -> None:
        writer = SplitWriter(folder, split, tokenizer.vocab_size)
        writer.append(*(tokenizer.encode_arrays([pair[side] for pair in pairs]) for side in (0, 1)))
        writer.close()
        for side, name in enumerate(("src", "tgt")):
            write_text(folder, split, name, (pair[side] for pair in pairs))

    def _fingerprint(self, held_out: dict[str, list[Pair]]) -> str:
        """Of the text that the store holds, whatever the tokeniser makes of it."""
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(np.load(self.work / f"{name}.kept.npy"))
        digest.update(json.dumps(held_out).encode())
        return digest.hexdigest()[:16]

    def _nothing_left(self, read: int) -> ValueError:
        drops = ", ".join(f"{count} by {rule} ({RULES[rule]})" for rule, count in (+self.dropped).items())
        return ValueError(f"no training pair is left of {read}, dropped: {drops}")


def _name(number: int) -> str:
    return f"{number:05}"


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _reporter(say: Say, what: str, every_seconds: float = 5.0) -> Callable[[int, float], None]:
    """A function to tell how much is done, as a number and as a share; it says so, with the time left, now and then."""
    start = shown = time.monotonic()
    first: float | None = None

    def report(done: int, share: float) -> None:
        nonlocal shown, first
        now = time.monotonic()
        first = share if first is None else first  # what an interrupted preparation had done took no time now
        if now - shown >= every_seconds and first < share < 1:
            shown = now
            say(f"corpus: {done:,} {what}, {clock((now - start) / (share - first) * (1 - share))} left")

    return report


def describe(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines for people."""
    train = report["train"]
    yield f"corpus: train {train['read']:,} pairs read, {train['kept']:,} kept"
    for rule, count in train["dropped"].items():
        yield f"corpus:   dropped {count:,}: {rule} ({RULES[rule]})"
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
    yield f"corpus: {tokenizer['vocab_size']:,} subwords" + (
        f", learned from {tokenizer['pairs']:,} pairs" if tokenizer["pairs"] else ", given"
    )
    if tokenizer["skipped_lines"]:
        yield (
            f"corpus:   the tokeniser's training left out {tokenizer['skipped_lines']:,} lines over "
            f"{MAX_LINE_BYTES:,} bytes or with U+2585"
        )
    yield "corpus: fingerprints " + ", ".join(f"{name} {value}" for name, value in report["fingerprints"].items())
