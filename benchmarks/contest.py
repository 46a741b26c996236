"""Measure contestants in turn: each in a process of its own, one at work at a time, medians over rounds.

Knows the standard library alone: contestants import it in whatever environment they live.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORK = HERE / ".work"  # what a benchmark makes for its contestants


def environment(name: str, *packages: str) -> str:
    """The Python of a peer's own virtual environment, made at the first call."""
    folder = HERE / ".venvs" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.is_file():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        for wanted in packages:  # one by one: what comes first decides which torch is there
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted.split()], check=True)
        ready.touch()
    return str(python)


class Contestant:
    """A process that works when it is told to.

    Args:
        command: ends in a script that calls `serve` or uses `Turns`.
        more: environment variables beside this process's own.
    """

    def __init__(self, name: str, command: Sequence[str], threads: int, more: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = WORK / f"{name.replace(' ', '_')}.log"
        numbers = {key: str(threads) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **numbers, "PYTHONPATH": str(HERE.parent), **(more or {})},
            )
        self._answer()  # ready

    def turn(self) -> dict[str, Any]:
        """Let it work once."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended: see {self.log}")
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def race(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Every contestant once a round, the order turned by one each time; the first round warms up and is dropped."""
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contestants}
    try:
        for number in range(rounds + 1):
            first = number % len(contestants)
            for one in [*contestants[first:], *contestants[:first]]:
                answer = one.turn()
                if number:
                    found[one.name].append(answer)
                figures = {key: value for key, value in answer.items() if key != "outputs"}
                print(f"round {number}: {one.name} {figures}", file=sys.stderr)
    finally:
        for one in contestants:
            one.end()
    return found


class Clock:
    """Seconds since it was made, by the wall and of the processor."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {"wall": time.perf_counter() - self.wall, "cpu": time.process_time() - self.cpu}


class Turns:
    """A contestant's side: wait to be told, answer.  What libraries print goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        self.answer({})

    def wait(self) -> bool:
        """False when the contest is over."""
        return bool(sys.stdin.readline())

    def answer(self, found: dict[str, Any]) -> None:
        print(json.dumps(found), file=self._out, flush=True)


def serve(work: Callable[[], dict[str, Any]]) -> None:
    """Do `work` whenever told; what it returns goes out beside its seconds."""
    turns = Turns()
    turns.ready()
    while turns.wait():
        clock = Clock()
        found = work()
        turns.answer({**clock.read(), **found})


def median_ratio(found: dict[str, list[dict[str, Any]]], name: str, base: str, value: Callable[[dict], float]) -> float:
    """Median over rounds of one's value over another's in the same round."""
    return statistics.median(value(a) / value(b) for a, b in zip(found[name], found[base], strict=True))


def padded(rows: Sequence[Sequence[int]], pad: int) -> list[list[int]]:
    """Padded on the right to the longest."""
    longest = max(map(len, rows))
    return [[*row, *[pad] * (longest - len(row))] for row in rows]


def speed_by(clock: str) -> Callable[[dict[str, Any]], float]:
    """Tokens per second of an answer by "wall", or by "cpu": fairer where other programs share the machine."""
    return lambda answer: answer["tokens"] / answer[clock]


def peak_mib() -> int:
    """This process's own; getrusage counts its parent's before it began."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def machine(threads: int) -> str:
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":")[1].strip()
                break
    return f"{model}, {os.cpu_count()} cores, {threads} thread(s), {platform.system()}"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown; numbers stand on the right."""
    lines = [columns, ["---" if i == 0 else "---:" for i in range(len(columns))], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def report(name: str, title: str, text: str, values: dict[str, Any], keep: bool) -> None:
    """Print the Markdown; keep it, with JSON of all measurements beside it, under benchmarks/results."""
    print(f"## {title}\n\n{text}")
    if keep:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.md").write_text(f"## {title}\n\n{text}\n")
        (folder / f"{name}.json").write_text(json.dumps({"title": title, **values}, indent=1) + "\n")
