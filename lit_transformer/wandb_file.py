"""The files that wandb keeps of a run on disk: how far its curves stand in them, and what a kill has cut."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEAD = 32_768, 7  # bytes; a file is a chain of blocks, a record is cut where a block ends
_WHOLE, _LAST = 1, 4  # kinds of piece that end a record


def last_update(folder: Path) -> int:
    """The highest update in the history of all sessions in a `wandb` folder; 0 without any.

    A session that was killed has lost what wandb still held in memory, so only its file tells.
    """
    files = folder.glob("*run-*/*.wandb")
    return max((r.history.step.num for path in files for r in records(path) if r.HasField("history")), default=0)


def mend(folder: Path) -> None:
    """Make the sessions of killed processes in a `wandb` folder fit for `wandb sync`.

    It stops at a record that is cut, and sends nothing at all where one file does not even say of which run it is.
    """
    for path in folder.glob("*run-*/*.wandb"):
        found = list(_scan(path.read_bytes()))
        if not any(record.HasField("run") for record, _ in found):
            shutil.rmtree(path.parent)
        elif found[-1][1] < path.stat().st_size:
            os.truncate(path, found[-1][1])


def records(path: Path) -> list[Any]:
    """wandb's records of one session in their order, as far as they are whole."""
    return [record for record, _ in _scan(path.read_bytes())]


def _scan(data: bytes) -> Iterator[tuple[Any, int]]:
    """Each record with the place where it ends."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # made at run time, unknown to type checkers
    at, pieces = _HEAD, b""  # the file has a head of its own, of the same length
    while at + _HEAD <= len(data):
        if at % _BLOCK > _BLOCK - _HEAD:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += _HEAD
        if not kind or at + length > len(data):
            return
        pieces += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            record = messages.Record()
            record.ParseFromString(pieces)
            yield record, at
            pieces = b""
