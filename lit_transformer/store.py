"""The tokenised corpus on disk: one folder, written whole or not at all, read memory-mapped.

FOLDER/meta.json           fingerprint of content and tokeniser, hashes of all files, the cleaning report
FOLDER/tokenizer.model
FOLDER/train.src.npy       token ids of all sentences in a row (uint16 or uint32), without special ids
FOLDER/train.src.ends.npy  where each sentence ends (int64)
FOLDER/valid.src.txt       the text as it was given, for validation and test: references are never tokenised
... the same for tgt, valid and test
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

SIDES = ("src", "tgt")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which becomes `path` when the block ends well; otherwise `path` stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """All of `content` at `path`, or `path` as it was."""
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """`content` as readable JSON, atomically; JSON has no infinity and no NaN, they become null."""
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """A block that one process at a time is in, by the lock on a file; `waiting` is called where another one is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `path` when the block ends well and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield folder
        for file in folder.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        folder.chmod(0o755)
        try:
            os.rename(folder, path)
        except OSError:
            if not path.exists():
                raise
            # Somebody else finished the same content meanwhile: names follow from content, so theirs serves.
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Sentences:
    """Memory-mapped token ids: `sentences[i]` is one sentence as an array, without special ids."""

    tokens: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[self.ends[i - 1] if i else 0 : self.ends[i]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """int64 [number of sentences]"""
        return np.diff(self.ends, prepend=0)


class SplitWriter:
    """Appends pairs of token ids to a split of a store that is being written."""

    def __init__(self, folder: Path, split: str, vocab_size: int) -> None:
        self.folder, self.split = folder, split
        self.dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._files = {side: open(folder / f"{split}.{side}.raw", "wb") for side in SIDES}  # noqa: SIM115
        self._lengths: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}

    def append(self, src: Sequence[np.ndarray], tgt: Sequence[np.ndarray]) -> None:
        """Two lists of sentences of equal length."""
        if len(src) != len(tgt):
            raise ValueError(f"{len(src)} source and {len(tgt)} target sentences: pairs are needed")
        for side, sentences in zip(SIDES, (src, tgt), strict=True):
            lengths = np.fromiter((len(s) for s in sentences), np.int64, len(sentences))
            flat = np.concatenate([np.zeros(0, self.dtype), *sentences])
            limits = np.iinfo(self.dtype)
            if len(flat) and not (limits.min <= flat.min() and flat.max() <= limits.max):
                raise OverflowError(f"ids from {flat.min()} to {flat.max()} in a store of {limits.dtype}")
            self._files[side].write(flat.astype(self.dtype).data)
            self._lengths[side].append(lengths)

    def close(self) -> None:
        """Turn what was appended into .npy files."""
        for side in SIDES:
            self._files[side].close()
            raw = self.folder / f"{self.split}.{side}.raw"
            ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *self._lengths[side]]))
            save_array(self.folder / f"{self.split}.{side}.ends.npy", ends)
            with open(self.folder / f"{self.split}.{side}.npy", "wb") as file:
                header = {"descr": np.dtype(self.dtype).str, "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, {**header, "shape": (int(ends[-1]) if len(ends) else 0,)})
                with open(raw, "rb") as tokens:
                    shutil.copyfileobj(tokens, file, 1 << 24)
            raw.unlink()


def save_array(path: Path, array: np.ndarray) -> None:
    """One dimension as .npy; numpy's own `save` does not say that a disk is full."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def join_splits(source: Path, names: Sequence[str], folder: Path, split: str) -> None:
    """One split of a store from several that stand in `source`, in their order."""
    for side in SIDES:
        ends, size = [np.zeros(0, np.int64)], 0
        for name in names:
            part = np.load(source / f"{name}.{side}.ends.npy")
            ends.append(part + size)
            size += int(part[-1]) if len(part) else 0
        save_array(folder / f"{split}.{side}.ends.npy", np.concatenate(ends))
        with open(folder / f"{split}.{side}.npy", "wb") as file:
            for number, name in enumerate(names):
                tokens = np.load(source / f"{name}.{side}.npy")
                if not number:
                    header = {"descr": tokens.dtype.str, "fortran_order": False, "shape": (size,)}
                    np.lib.format.write_array_header_1_0(file, header)
                file.write(tokens.data)


def write_text(folder: Path, split: str, side: str, lines: Iterable[str]) -> None:
    """The given lines as they are; none of them holds a newline."""
    with open(folder / f"{split}.{side}.txt", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def seal(folder: Path, tokenizer: str, report: dict[str, Any]) -> str:
    """Write meta.json over all that the folder holds.

    Args:
        tokenizer: the tokeniser's fingerprint.
        report: how the content came about, as plain JSON.

    Returns:
        The fingerprint of content and tokeniser.
    """
    hashes = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    digest = _fingerprint(tokenizer, hashes)
    write_json(folder / "meta.json", {"fingerprint": digest, "tokenizer": tokenizer, "report": report, "files": hashes})
    return digest


def _fingerprint(tokenizer: str, hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([tokenizer, hashes], sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """A prepared corpus.

    Args:
        folder: as `corpus.prepare` returns it.

    Raises:
        ValueError: a file is missing or is not what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        meta_path = self.folder / "meta.json"
        if not meta_path.is_file():
            raise ValueError(f"{self.folder} is no prepared corpus (no meta.json): run `lit-transformer prepare`")
        try:
            self.meta: dict[str, Any] = json.loads(meta_path.read_bytes())
            sealed = _fingerprint(self.meta["tokenizer"], self.meta["files"]) == self.meta["fingerprint"]
        except (ValueError, KeyError, TypeError, AttributeError):
            sealed = False
        if not sealed:
            raise ValueError(
                f"{meta_path} is damaged: remove the folder {self.folder} and run `lit-transformer prepare`"
            )
        for name, expected in self.meta["files"].items():
            file = self.folder / name
            if not file.is_file() or sha256(file) != expected:
                state = "has changed since it was written" if file.is_file() else "is missing"
                raise ValueError(f"{file} {state}: remove the folder {self.folder} and run `lit-transformer prepare`")
        self.fingerprint: str = self.meta["fingerprint"]
        self.tokenizer_fingerprint: str = self.meta["tokenizer"]

    def sentences(self, split: str, side: str) -> Sentences:
        """Token ids of "train", "valid" or "test", "src" or "tgt"."""
        tokens, ends = (
            np.load(self.folder / f"{split}.{side}{part}.npy", mmap_mode="r", allow_pickle=False)
            for part in ("", ".ends")
        )
        return Sentences(tokens, ends)

    def text(self, split: str, side: str) -> list[str]:
        """The lines of "valid" or "test" as they were given."""
        # Bytes, not text mode: that would turn a carriage return inside a line into a line of its own.
        return (self.folder / f"{split}.{side}.txt").read_bytes().decode().split("\n")[:-1]
