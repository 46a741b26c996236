"""How far a run's curves stand in the files that wandb keeps on disk."""

from __future__ import annotations

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


def records(path: Path) -> Iterator[Any]:
    """wandb's records of one session in their order; a file cut by a kill ends where it was cut."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # made at run time, unknown to type checkers
    data = path.read_bytes()
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
            yield record
            pieces = b""
