"""Synthetic parallel text of WMT14's shape, as large as asked for: no corpus of that size can be fetched by a test.

Sentences have a log-normal number of words (mean 24 on the source and 23 on the target side, as in WMT14 EN-DE, 1 to
about 250), words follow Zipf's law over 600,000 types on each side: the commonest are the words of real text where
some is given, the others are made of two to four of their syllables.  One pair in 50 repeats an earlier one, one in
500 has an empty side.

    python benchmarks/wmt_like.py FOLDER --pairs 4500000 [--words FILE ...] [--parquet]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

TYPES = 600_000
CHUNK = 50_000
SYLLABLES = list("aeioubdfgklmnprstvz")


def vocabulary(seed: int, texts: Sequence[str]) -> np.ndarray:
    """Word types, the commonest first."""
    rng = np.random.default_rng(seed)
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text))
    words = [word for word, _ in counts.most_common()]
    parts = [part for word in words for part in re.findall(r"[^aeiouäöü]*[aeiouäöü]+[^aeiouäöü]?", word)] or SYLLABLES
    seen = dict.fromkeys(words)
    while len(seen) < TYPES:
        sizes = rng.choice([2, 3, 4], p=[0.45, 0.35, 0.2], size=TYPES)
        picks = iter(rng.integers(0, len(parts), size=int(sizes.sum())).tolist())
        for size in sizes.tolist():
            seen["".join(parts[next(picks)] for _ in range(size))] = None
    return np.array(list(seen)[:TYPES], dtype=object)


def sentences(words: np.ndarray, mean: float, rng: np.random.Generator, count: int, sizes: np.ndarray) -> list[str]:
    """`count` sentences; `sizes` are relative lengths, shared by both sides of a pair."""
    lengths = np.clip(np.rint(mean * sizes * rng.lognormal(0, 0.15, count)), 1, 250).astype(int)
    # Zipf with exponent 1 by inversion: rank = TYPES ** u.
    ranks = np.minimum((TYPES ** rng.random(int(lengths.sum()))).astype(int) - 1, TYPES - 1)
    picked = words[ranks].tolist()
    ends = np.cumsum(lengths).tolist()
    return [" ".join(picked[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def pairs(count: int, seed: int, texts: tuple[Sequence[str], Sequence[str]] = ((), ())) -> Iterator[tuple[list, list]]:
    """Chunks of source and target sentences."""
    rng = np.random.default_rng(seed)
    src_words, tgt_words = (vocabulary(seed + side, text) for side, text in enumerate(texts))
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        sizes = rng.lognormal(-0.18, 0.6, size)  # mean 1
        src, tgt = sentences(src_words, 24, rng, size, sizes), sentences(tgt_words, 23, rng, size, sizes)
        for i in rng.integers(1, size, size // 50).tolist():
            src[i], tgt[i] = src[i - 1], tgt[i - 1]
        for i in rng.integers(0, size, size // 500).tolist():
            tgt[i] = ""
        yield src, tgt


def write(folder: Path, count: int, texts: tuple[Sequence[str], Sequence[str]], parquet: bool) -> None:
    """train, validation and test (3,000 pairs each), as text or in WMT14's Parquet layout (folder/de-en)."""
    for number, (split, size) in enumerate({"train": count, "validation": 3000, "test": 3000}.items()):
        chunks = pairs(size, 1 + number, texts)
        if parquet:
            write_parquet(folder / "de-en" / f"{split}-00000-of-00001.parquet", chunks)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{split}.en", "w") as src_file, open(folder / f"{split}.de", "w") as tgt_file:
            for src, tgt in chunks:
                src_file.writelines(f"{line}\n" for line in src)
                tgt_file.writelines(f"{line}\n" for line in tgt)


def write_parquet(path: Path, chunks: Iterator[tuple[list, list]]) -> None:
    """English and German in one column `translation`, as the published files have them."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pyarrow.schema({"translation": pyarrow.struct({"de": pyarrow.string(), "en": pyarrow.string()})})
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for en, de in chunks:
            column = pyarrow.StructArray.from_arrays([pyarrow.array(de), pyarrow.array(en)], ["de", "en"])
            writer.write_table(pyarrow.Table.from_arrays([column], schema=schema), row_group_size=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=4_500_000)
    parser.add_argument("--words", type=Path, nargs=2, metavar=("EN", "DE"), help="plain text whose words come first")
    parser.add_argument("--parquet", action="store_true", help="as folder/de-en/SPLIT-00000-of-00001.parquet")
    options = parser.parse_args()
    texts = (
        tuple(path.read_text(encoding="utf-8").splitlines() for path in options.words) if options.words else ((), ())
    )
    write(options.folder, options.pairs, texts, options.parquet)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
