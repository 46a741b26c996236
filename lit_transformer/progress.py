"""How progress is said: lines on standard error, times as clocks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def say(line: str) -> None:
    """A line for the person who waits; standard output stays for results."""
    print(line, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """12345.6 -> 3:25:45, 83 -> 1:23"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def in_hours(hours: float) -> str:
    """0.0661 -> 0.066, 12.34 -> 12.3"""
    return f"{hours:,.3f}" if hours < 1 else f"{hours:,.1f}"


def reporter(what: str, total: int, every_seconds: float = 5.0) -> Callable[[int], None]:
    """A function to tell how many of `total` are done; it says so, with the time left, every few seconds."""
    start = shown = time.monotonic()

    def report(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= every_seconds and done < total:
            shown = now
            say(f"{what}: {done:,} of {total:,}, {clock((now - start) / done * (total - done))} left")

    return report
