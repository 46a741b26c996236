"""A run's logged values by update, over all its sessions."""

from __future__ import annotations

import csv
import math
from pathlib import Path


def read_curves(run: Path) -> dict[str, dict[int, float]]:
    """What a run's csv/version_N/metrics.csv files hold, one version for each session.

    Args:
        run: the run's folder.

    Returns:
        {name such as "val_perplexity": {update: value}}, updates rising.  Where a session that was killed had gone
        beyond the checkpoint that the next one began at, the later session's value stands (they are equal).
    """
    curves: dict[str, dict[int, float]] = {}
    versions = sorted(run.glob("csv/version_*/metrics.csv"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    for path in versions:
        # The last line of a session that is being written, or was killed while writing, may be cut.
        lines = path.read_bytes().rpartition(b"\n")[0].decode("utf-8").splitlines()
        for row in csv.DictReader(lines):
            for name, text in row.items():
                if name not in ("step", "epoch") and text:
                    curves.setdefault(name, {})[int(row["step"])] = _number(text)
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
