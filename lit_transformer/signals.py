"""Signals that end a run: at once outside of training, with a checkpoint at the end of an update during it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any, Self


class Stopped(BaseException):
    """A signal has ended a run; no error, so nothing that handles errors handles it."""

    def __init__(self, number: int, step: int | None = None) -> None:
        self.number, self.step = signal.Signals(number), step
        where = "" if step is None else f" after update {step:,}, which is saved"
        super().__init__(f"stopped by {self.number.name}{where}; the same command goes on")

    @property
    def status(self) -> int:
        """Exit status, as a shell reports it."""
        return 128 + self.number


class Signals:
    """SIGINT, SIGTERM and SIGUSR1: at once outside of training, at the end of an update during it.

    A second Ctrl-C does not wait for that.  A signal that the process was started to ignore stays ignored.

    Attributes:
        number: the signal that has come, or 0.
        training: whether an update is under way.
    """

    def __init__(self) -> None:
        self.number, self.training = 0, False

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number, self.number or number
        if not self.training or (again and number == signal.SIGINT):
            raise Stopped(number)

    def raise_pending(self) -> None:
        """After training: what came too late for its last update."""
        self.training = False
        if self.number:
            raise Stopped(self.number)


def ignore_signals(_: int = 0) -> None:
    """In a worker: a signal to all processes of a run is for the one that started them, which ends its workers."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """A process that Lightning has started for another device ends when the one that started it is gone."""
    if "LOCAL_RANK" not in os.environ or "RANK" in os.environ or os.environ["LOCAL_RANK"] == "0":
        return  # started by a user, or by a launcher that looks after its processes
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)  # every file is written atomically, so this is safe

    threading.Thread(target=watch, daemon=True).start()


def requeue() -> str:
    """Ask SLURM to start this job again; what came of it, in words, "" outside of a job."""
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_JOB_ID")
    if array:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not job:
        return ""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"job {job} is not requeued: scontrol cannot be started ({error.strerror})"
    return f"job {job} is not requeued: {done.stderr.strip()}" if done.returncode else f"job {job} is requeued"
