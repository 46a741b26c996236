"""How progress is said: lines on standard error, times as clocks."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """A line for the person who waits; standard output stays for results."""
    print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """12345.6 -> 3:25:45, 83 -> 1:23"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"
