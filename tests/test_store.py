"""The store: what is written comes back, whole or not at all, and any change is noticed."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lit_transformer import store
from lit_transformer.store import (
    SplitWriter,
    Store,
    atomic_file,
    atomic_folder,
    seal,
    write_atomic,
    write_json,
    write_text,
)

SRC = [[4, 5, 6], [], [7], [8, 9], []]
TGT = [[], [1, 2], [3], [], [4, 5, 6, 7]]


def fill(folder: Path, *, tokenizer: str = "tok", src=SRC, tgt=TGT, text=("one", "two"), report=None) -> str:
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(b"model")
    for split in ("train", "valid"):
        writer = SplitWriter(folder, split, 100)
        writer.append(src, tgt)
        writer.close()
    for side in store.SIDES:
        write_text(folder, "valid", side, text)
    return seal(folder, tokenizer, report or {})


def back(sentences) -> list[list[int]]:
    ids = [sentences[i].tolist() for i in range(len(sentences))]
    assert ids == [sentence.tolist() for sentence in sentences]
    return ids


@pytest.fixture
def folder(tmp_path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


# Token ids


def test_sentences_come_back_with_empty_ones(folder):
    opened = Store(folder)
    assert back(opened.sentences("train", "src")) == SRC
    assert back(opened.sentences("train", "tgt")) == TGT
    assert opened.sentences("valid", "src").lengths.tolist() == [3, 0, 1, 2, 0]
    assert opened.sentences("valid", "tgt").lengths.tolist() == [0, 2, 1, 0, 4]


@pytest.mark.parametrize("cuts", [[], [0], [2], [1, 1, 3], [5], [0, 0, 5, 5]])
def test_several_appends_equal_one(tmp_path, cuts):
    writer = SplitWriter(tmp_path, "train", 100)
    for start, end in zip([0, *cuts], [*cuts, len(SRC)], strict=True):
        writer.append(SRC[start:end], TGT[start:end])
    writer.close()
    seal(tmp_path, "tok", {})
    opened = Store(tmp_path)
    assert back(opened.sentences("train", "src")) == SRC
    assert back(opened.sentences("train", "tgt")) == TGT
    assert opened.sentences("train", "src").lengths.tolist() == [len(s) for s in SRC]


@pytest.mark.parametrize("sentences", [[], [[]], [[], [], []]])
def test_a_split_without_tokens_comes_back(tmp_path, sentences):
    writer = SplitWriter(tmp_path, "test", 100)
    if sentences:
        writer.append(sentences, sentences)
    writer.close()
    seal(tmp_path, "tok", {})
    opened = Store(tmp_path).sentences("test", "tgt")
    assert (len(opened), back(opened), opened.lengths.tolist()) == (len(sentences), sentences, [0] * len(sentences))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_take_the_smallest_type_that_holds_the_vocabulary(tmp_path, vocab_size, dtype):
    ids = [[0, vocab_size - 1], [vocab_size // 2]]
    writer = SplitWriter(tmp_path, "train", vocab_size)
    writer.append(ids, ids)
    writer.close()
    seal(tmp_path, "tok", {})
    opened = Store(tmp_path).sentences("train", "src")
    assert (opened.tokens.dtype, back(opened)) == (np.dtype(dtype), ids)


@pytest.mark.parametrize("wrong", [65536, -1])
def test_an_id_outside_the_type_is_refused_not_wrapped(tmp_path, wrong):
    with pytest.raises(OverflowError):
        SplitWriter(tmp_path, "train", 65536).append([[wrong]], [[1]])


def test_many_random_sentences_come_back(tmp_path):
    rng = np.random.default_rng(0)
    src, tgt = ([rng.integers(0, 70000, rng.integers(0, 9)).tolist() for _ in range(3000)] for _ in range(2))
    writer = SplitWriter(tmp_path, "train", 70000)
    for start in range(0, 3000, 700):
        writer.append(src[start : start + 700], tgt[start : start + 700])
    writer.close()
    seal(tmp_path, "tok", {})
    opened = Store(tmp_path)
    assert (back(opened.sentences("train", "src")), back(opened.sentences("train", "tgt"))) == (src, tgt)


def test_tokens_are_read_memory_mapped_and_cannot_be_changed(folder):
    sentences = Store(folder).sentences("train", "src")
    assert isinstance(sentences.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        sentences[0][0] = 1


def test_a_closed_split_leaves_only_its_four_arrays(tmp_path):
    writer = SplitWriter(tmp_path, "train", 100)
    writer.append(SRC, TGT)
    writer.close()
    expected = {f"train.{side}{part}.npy" for side in ("src", "tgt") for part in ("", ".ends")}
    assert {file.name for file in tmp_path.iterdir()} == expected


# Text


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["", "", ""],
        ["a\u2028b", "c\u0085d", "e\rf", "g\x0bh\x0ci", "\r", "\ufeffx", "NUL\0", "  two  spaces  ", "„Zitat“"],
    ],
)
def test_text_comes_back_as_it_was(tmp_path, lines):
    fill(tmp_path / "store", text=lines)
    assert Store(tmp_path / "store").text("valid", "tgt") == lines
    assert (tmp_path / "store" / "valid.tgt.txt").read_bytes() == "".join(f"{x}\n" for x in lines).encode()


# Atomic writing


def test_write_atomic_creates_parents_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a" / "b" / "file.bin"
    for content in (b"first", b"", b"\0\xff second"):
        write_atomic(path, content)
        assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file.bin"]
    assert path.stat().st_mode & 0o777 == 0o644  # others may read it, unlike what mkstemp makes


@pytest.mark.parametrize("step", ["replace", "fsync", "chmod"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, step, error, before):
    path = tmp_path / "file.json"
    if before is not None:
        path.write_bytes(before)

    def fail(*args):
        raise error

    monkeypatch.setattr(store.os, step, fail)
    with pytest.raises(type(error)):
        write_atomic(path, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == ({"file.json": before} if before else {})


def test_content_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    calls = []
    for step in ("fsync", "replace"):
        real = getattr(os, step)
        monkeypatch.setattr(store.os, step, lambda *a, step=step, real=real: (calls.append(step), real(*a)))
    write_atomic(tmp_path / "file", b"x")
    assert calls == ["fsync", "replace"]


def test_a_file_whose_block_fails_stays_as_it_was(tmp_path):
    def write_half() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            assert path.read_bytes() == b"old"
            raise RuntimeError("stop")

    path = tmp_path / "file"
    write_atomic(path, b"old")
    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"old"}


def test_json_keeps_any_text(tmp_path):
    content = {"ä\u2028": ["\u0085", "„x“", 1.5, None]}
    write_json(tmp_path / "x.json", content)
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == content
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"bad": object()})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == content


def test_a_folder_appears_only_when_its_block_ends_well(tmp_path):
    with atomic_folder(tmp_path / "deep" / "out") as building:
        (building / "a").write_bytes(b"1")
        assert not (tmp_path / "deep" / "out").exists()
        assert building.parent == tmp_path / "deep"  # the same file system, or the rename would not be atomic
    assert (tmp_path / "deep" / "out" / "a").read_bytes() == b"1"
    assert os.listdir(tmp_path / "deep") == ["out"]
    assert (tmp_path / "deep" / "out").stat().st_mode & 0o777 == 0o755


def fill_half(path: Path, error: BaseException) -> None:
    with atomic_folder(path) as building:
        (building / "a").write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), SystemExit(1)])
def test_a_folder_vanishes_when_its_block_fails(tmp_path, error):
    with pytest.raises(type(error)):
        fill_half(tmp_path / "out", error)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_somebody_else_finished_meanwhile_is_kept(tmp_path):
    with atomic_folder(tmp_path / "out") as building:
        (building / "a").write_bytes(b"mine")
        with atomic_folder(tmp_path / "out") as theirs:
            (theirs / "a").write_bytes(b"theirs")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "a").read_bytes() == b"theirs"


def test_a_folder_that_cannot_be_renamed_is_an_error(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("read-only")

    monkeypatch.setattr(store.os, "rename", fail)
    with pytest.raises(OSError, match="read-only"), atomic_folder(tmp_path / "out") as building:
        (building / "a").write_bytes(b"1")
    assert os.listdir(tmp_path) == []


# Damage


FILES = ["tokenizer.model"]
FILES += [f"{split}.{side}{part}.npy" for split in ("train", "valid") for side in store.SIDES for part in ("", ".ends")]
FILES += ["valid.src.txt", "valid.tgt.txt"]


def test_every_file_of_a_store_is_covered(folder):
    assert {*FILES, "meta.json"} == set(os.listdir(folder))
    assert set(Store(folder).meta["files"]) == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["last byte changed", "cut short", "emptied", "grown", "missing"])
def test_a_damaged_file_is_refused_by_name(folder, name, damage):
    file = folder / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        changed = {"cut short": content[:-1], "emptied": b"", "grown": content + b"\0"}
        file.write_bytes(changed.get(damage, content[:-1] + bytes([content[-1] ^ 1])))
    with pytest.raises(ValueError, match=f"{name} {'is missing' if damage == 'missing' else 'has changed'}"):
        Store(folder)


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_without_meta_is_no_store(tmp_path, make):
    make(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"nothing is no prepared corpus .*meta\.json"):
        Store(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b'{"fingerprint": "00', b"{}", b"[]", b"\xff\xfe"])
def test_a_damaged_meta_is_refused_by_name(folder, content):
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"meta\.json"):
        Store(folder)


@pytest.mark.parametrize("field", ["fingerprint", "tokenizer"])
def test_a_fingerprint_that_does_not_fit_its_files_is_refused(folder, field):
    # Runs are compared by it: one that was copied from another store would let unlike runs be compared.
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    write_json(folder / "meta.json", {**meta, field: "0123456789abcdef"})
    with pytest.raises(ValueError, match=r"meta\.json"):
        Store(folder)


# Fingerprint


def test_fingerprint_is_the_same_for_the_same_content(tmp_path):
    first, second = fill(tmp_path / "a"), fill(tmp_path / "b" / "c", report={"seen": "elsewhere"})
    assert first == second == Store(tmp_path / "a").fingerprint == Store(tmp_path / "b" / "c").fingerprint
    assert Store(tmp_path / "b" / "c").meta["report"] == {"seen": "elsewhere"}
    assert Store(tmp_path / "a").tokenizer_fingerprint == "tok"


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "tok2"},
        {"src": [[4, 5, 6], [], [7], [8, 10], []]},
        {"src": [[4, 5], [6], [7], [8, 9], []]},  # the same tokens in a row, cut elsewhere
        {"tgt": SRC, "src": TGT},
        {"text": ("one", "two ")},
    ],
)
def test_fingerprint_changes_with_content_and_tokenizer(tmp_path, change):
    assert fill(tmp_path / "a") != fill(tmp_path / "b", **change)
