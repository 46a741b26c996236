"""Which processes are one run, and what they tell each other beside gradients: that one was stopped, or is gone."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from torch import distributed as dist

TIMEOUT_SECONDS = 600  # how long ranks wait for each other
ROLL_CALL_SECONDS = 5  # for a sign of life, once something has gone wrong
# What torch's plain RuntimeError says where another process is the cause.
_CONNECTION = re.compile(r"gloo|nccl|connection|pair closure|timed out", re.IGNORECASE)


def _started() -> int:
    """How many processes a launcher has started as one run, 0 where Lightning itself starts those of this node."""
    if "RANK" in os.environ:  # torchrun's and its like; also inside a SLURM job
        return int(os.environ.get("WORLD_SIZE", "0"))
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "0"))
    return tasks if tasks > 1 else 0


def slurm() -> list[ClusterEnvironment]:
    """For Lightning's plugins: whether srun has started this process as one of several.

    The signs that Lightning goes by stand in an allocation's shell too: a `fit` typed there, or in a batch script
    without srun, would wait for processes that nobody starts.  And in a job called "interactive", as salloc's are, each
    process that srun starts would be alone.
    """
    if "SLURM_JOB_ID" not in os.environ or "RANK" in os.environ:
        return []
    if not _started():
        return [LightningEnvironment()]
    os.environ["SLURM_JOB_NAME"] = "lit-transformer"
    # Lightning insists on this option of srun, however else the same number was asked for.
    os.environ["SLURM_NTASKS_PER_NODE"] = re.split(r"\D", os.environ["SLURM_STEP_TASKS_PER_NODE"])[0]
    return [SLURMEnvironment()]


def check_processes(trainer: pl.Trainer) -> None:
    """Raises ValueError where processes would each be alone in one folder, or wait for others that nobody starts."""
    started, expected = _started(), trainer.num_devices * trainer.num_nodes
    if started and started != expected:
        raise ValueError(
            f"a launcher has started {started} processes, and trainer.devices x trainer.num_nodes is {expected}: "
            "set trainer.devices to the processes of a node and trainer.strategy to ddp"
        )
    if trainer.num_nodes > 1 and not started and ("SLURM_JOB_ID" in os.environ or "MASTER_ADDR" not in os.environ):
        raise ValueError(
            f"trainer.num_nodes = {trainer.num_nodes}: nobody has started the processes of the other nodes: put srun "
            "before the command, or start it on each node by torchrun"
        )


class RankLost(RuntimeError):
    """A process of this run has ended or hangs; the message names it."""


class Agreement:
    """All ranks learn after the same update that one of them has been told to stop, or that a checkpoint is due.

    Each rank's word on update n travels while update n + 1 is computed, on the CPU whatever the device is, so that
    nothing waits for it.  It also notices at once when a rank is gone.

    Args:
        timeout: seconds to wait for another rank.
    """

    def __init__(self, timeout: int) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if _several() else None
        self._words, self._work = torch.zeros(2, dtype=torch.int64), None  # type: Any, Any

    def after_update(self, signal: int, due: bool) -> tuple[int, bool]:
        """Called once after every update with what this rank knows.

        Args:
            signal: that this rank has been sent, or 0.
            due: whether by its clock a checkpoint is due.

        Returns:
            The same for all ranks together: the signal to stop by now, or 0; whether to save one now.
        """
        if self._group is None:
            return signal, due
        agreed = self.settle()
        self._words = torch.tensor([signal, int(due)])
        self._work = dist.all_reduce(self._words, dist.ReduceOp.MAX, self._group, async_op=True)
        return agreed

    def settle(self) -> tuple[int, bool]:
        """What the update before has brought; nothing is under way after it."""
        if self._work is None:
            return 0, False
        self._work.wait()
        self._work = None
        signal, due = self._words.tolist()
        return signal, bool(due)


def sign_in() -> None:
    """Leave this rank's name where the ranks have met, for the day when it does not answer."""
    if _several():
        name = f"rank {dist.get_rank()} (process {os.getpid()} on {socket.gethostname()})"
        _store().set(f"name/{dist.get_rank()}", name)


def must_agree(what: str, mine: str) -> None:
    """Raises ValueError where another rank than the first has found something else than it."""
    if _several():
        if dist.get_rank() == 0:
            _store().set(what, mine)
        elif (theirs := _store().get(what).decode()) != mine:
            raise ValueError(
                f"{what}: rank {dist.get_rank()} has found {mine}, rank 0 {theirs}, so one was still being written: "
                "type the same command again; on several nodes they need the same folder"
            )


@contextlib.contextmanager
def naming_who_is_missing() -> Iterator[None]:
    """Where ranks work together: a failed connection becomes an error that says whose.

    Raises:
        RankLost: which ranks do not answer.
    """
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        if not _several() or not (isinstance(error, dist.DistError) or _CONNECTION.search(reason)):
            raise
        children = leave_children_alone()
        if absent := _roll_call():
            for child in children:
                child.kill()  # one that hangs would stay
            raise RankLost(_without(absent, reason)) from error
        raise


def _end_with_child(observer: _ChildProcessObserver) -> None:
    """Lightning's own end of all processes says nothing; this is for a rank whose connections do not break at once.

    Those are held open by the loader's workers that a killed rank has left, for seconds.
    """
    children = list(enumerate(observer._child_processes, 1))
    lost = " and ".join(f"rank {rank} (process {child.pid})" for rank, child in children if child.returncode)
    for _, child in children:
        child.kill()
    if lost:
        print(f"lit-transformer: error: {_without(lost)}", file=sys.stderr, flush=True)
        os._exit(1)  # every file is written atomically, so this is safe


_ChildProcessObserver._terminate_all = _end_with_child  # type: ignore[method-assign, assignment]


def _without(lost: str, reason: str = "") -> str:
    return (
        f"{lost} has ended or hangs, and the others cannot go on without it: look for its own words above, or whether "
        f"it was killed for want of memory{reason and f' ({reason[:80]})'}; the same command goes on from the last "
        "checkpoint"
    )


def leave_children_alone() -> list[subprocess.Popen]:
    """Lightning kills all processes that it has started, and this one, seconds after one ended badly: no more.

    Returns:
        Those processes.
    """
    children = []
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            children, thread._child_processes = thread._child_processes, []
    return children


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _store() -> Any:
    # The ranks' connections to each other break together; each has one of its own to the store that they met at.
    return dist.distributed_c10d._get_default_store()


def _roll_call() -> str:
    """The names of the ranks that give no sign of life."""
    absent, end = list(range(dist.get_world_size())), time.monotonic() + ROLL_CALL_SECONDS
    try:
        store = _store()
        store.set(f"alive/{dist.get_rank()}", "")
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not store.check([f"alive/{rank}"])]
            time.sleep(0.1)
        return " and ".join(store.get(f"name/{rank}").decode() for rank in absent)
    except RuntimeError:
        return "rank 0"  # the store goes with it
