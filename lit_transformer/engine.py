"""A study's trials on this machine: each is a `fit` in its own process, watched, reported and brought to an end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial, TrialState

from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.commands import SWEEP_VARIABLE
from lit_transformer.curves import read_curves
from lit_transformer.progress import clock, say
from lit_transformer.store import write_atomic
from lit_transformer.study import Cell, fit_arguments, read_study_file
from lit_transformer.trials import HEARTBEAT_SECONDS, Trials, is_dead

CURVES = {"perplexity": "val_perplexity", "bleu": "val_bleu"}  # what a trial reports on its way to its value
# Of processes that belong together; what a user's shell or an outer launcher set must not reach a trial.
_OF_A_GROUP = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"),
)


class Engine:
    """A study's trials on this machine.

    Args:
        path: the study's file.
        runs: folder of all studies' runs.
        workers: trials at a time; they share the cores.
        storage: Optuna's; an SQLite file in the study's folder when not given.
    """

    def __init__(self, path: Path, runs: Path, workers: int, storage: str | None) -> None:
        self.file, self.study = path, read_study_file(path)
        self.folder = runs / self.study.name
        self.workers = workers
        self.threads = max(1, len(os.sched_getaffinity(0)) // workers)
        self.stopping = threading.Event()
        self.trials = Trials(self.study, self.folder, storage, self.stopping)
        self._durations: list[float] = []
        self.crashed: list[Exception] = []

    def work(self) -> None:
        """Claim and run until nothing is left that this worker could do."""
        try:
            while not self.stopping.is_set():
                claimed = self.trials.claim()
                if claimed:
                    try:
                        self.run(*claimed)
                    except optuna.exceptions.UpdateFinishedTrialError:
                        # Its heartbeat had stopped, as in a laptop's sleep, and it was marked failed: claimed anew,
                        # it goes on where it is, or is found finished.
                        say(f"{self.study.name}: {claimed[0]} had been given up for dead; taking it up again")
                elif any(t.state == TrialState.RUNNING for trials in self.trials.by_cell().values() for t in trials):
                    self.stopping.wait(2)  # another worker's trial may yet come free
                elif self.trials.all_done():
                    return
                else:
                    self.stopping.wait(0.5)  # another worker was quicker, or a variant's trainer has just finished
        except Exception as error:  # said by the main thread, once the others have stopped
            self.crashed.append(error)
            self.stopping.set()

    def run(self, cell: Cell, trial: Trial) -> None:
        """One trial in its own process, with a heartbeat while it lives."""
        folder = self.folder / str(cell)
        folder.mkdir(parents=True, exist_ok=True)
        if trainer := self.trials.trainer_of(str(cell)):
            _take_checkpoints(self.folder / trainer, folder)
        program, *its = self.study.launcher or [sys.executable]
        # torchrun stands beside this Python, which is on nobody's PATH when the environment is not activated.
        beside = Path(sys.executable).parent / program
        command = [
            str(beside) if beside.is_file() else program,
            *its,
            "-m",
            "lit_transformer",
            "fit",
            *fit_arguments(self.study, self.file, cell, self.folder),
        ]
        write_atomic(folder / "command", (shlex.join(command) + "\n").encode())
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        outside = {name: value for name, value in os.environ.items() if name not in _OF_A_GROUP}
        # The last: srun passes an interrupt on at once, instead of showing its state and waiting for a second one.
        environment = {**outside, **threads, SWEEP_VARIABLE: str(os.getpid()), "SLURM_DISABLE_STATUS": "1"}
        started = time.monotonic()
        with open(folder / "log.txt", "ab") as log:
            log_start = log.tell()
            # A group of its own: all processes of the trial end together, whoever started them. Its input tells those
            # on other hosts when this process is gone.
            try:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.PIPE, env=environment, start_new_session=True
                )
            except OSError as error:
                raise ValueError(
                    f"{self.file}: launcher = {self.study.launcher}: {command[0]} cannot be started "
                    f"({error.strerror}): give its whole path, or install it"
                ) from error
            reported: set[int] = set()
            try:
                pruned = self._watch(process, trial, folder, reported)
            finally:
                _end(process)
        finished = (folder / "result.json").is_file()
        if pruned and not finished:  # it may have come to its end just then
            self._pruned(cell, trial)
            return
        self._report(trial, folder, reported)
        if self.stopping.is_set() and process.returncode and not finished:
            trial.study.tell(trial.number, state=TrialState.FAIL)  # not its own fault: it is run again
        elif not finished or (process.returncode and not pruned):
            self._fail(cell, trial, _last_line(folder / "log.txt", log_start, process.returncode))
        else:
            self._complete(cell, trial, json.loads((folder / "result.json").read_text(encoding="utf-8")))
            self._durations.append(time.monotonic() - started)

    def _watch(self, process: subprocess.Popen, trial: Trial, folder: Path, reported: set[int]) -> bool:
        """Until the trial ends or is to end, with heartbeats; True where a search had better go on without it."""
        beat = time.monotonic()
        while process.poll() is None and not self.stopping.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
            if time.monotonic() - beat >= HEARTBEAT_SECONDS:
                beat = time.monotonic()
                self.trials.storage.record_heartbeat(trial._trial_id)
            if self._report(trial, folder, reported) and self.study.search and trial.should_prune():
                return True
        return False

    def _report(self, trial: Trial, folder: Path, reported: set[int]) -> bool:
        """What the trial has found on its way, by update, once each; whether there was anything new."""
        # From here, not from the trial: with several ranks, and with every storage, one process speaks to Optuna.
        curve = read_curves(folder).get(CURVES[self.study.metric], {})
        new = [step for step in curve if step not in reported]
        for step in new:
            trial.report(curve[step] if math.isfinite(curve[step]) else math.nan, step)
        reported.update(new)
        return bool(new)

    def _complete(self, cell: Cell, trial: Trial, found: dict[str, Any]) -> None:
        scores: dict[str, float | None] = {"bleu": found["bleu"]["score"], "perplexity": found["perplexity"]}
        scores = {n: v if v is not None and math.isfinite(v) else None for n, v in scores.items()}
        if scores[self.study.metric] is None:
            self._fail(cell, trial, f"its {self.study.metric} is no number: training has diverged")
            return
        for name, value in scores.items():
            trial.set_user_attr(name, value)
        trial.study.tell(trial.number, scores[self.study.metric])
        figures = f"perplexity {_figure(scores['perplexity'])}, BLEU {_figure(scores['bleu'])}"
        say(f"{self.study.name}: {cell} done, {figures}")

    def _pruned(self, cell: Cell, trial: Trial) -> None:
        values = self.trials.storage.get_trial(trial._trial_id).intermediate_values
        step = max(values)
        reason = f"pruned at update {step:,} with {self.study.metric} {_figure(values[step])}"
        trial.set_user_attr("pruned", reason)
        trial.study.tell(trial.number, state=TrialState.PRUNED)
        say(f"{self.study.name}: {cell} {reason}")

    def _fail(self, cell: Cell, trial: Trial, reason: str) -> None:
        if _disk_is_full(self.folder, reason):
            # Not its own fault, and every other trial would fail as well.
            with contextlib.suppress(OSError):
                trial.study.tell(trial.number, state=TrialState.FAIL)
            raise OSError(errno.ENOSPC, f"{cell} could not be written: {reason}")
        checkpoints = list_checkpoints(self.folder / str(cell) / "checkpoints")
        trial.set_user_attr("reached", checkpoints[-1][0] if checkpoints else 0)
        trial.set_user_attr("error", reason)
        trial.study.tell(trial.number, state=TrialState.FAIL)
        say(f"{self.study.name}: {cell} failed: {reason} (see {self.folder / str(cell) / 'log.txt'})")

    def grid(self) -> list[tuple[str, str, str]]:
        """(cell, done | pruned | running | failed | waiting, details) for every cell."""
        rows, given_up = [], self.trials.failures()
        for name, trials in self.trials.by_cell().items():
            by_state = {trial.state: trial for trial in trials}
            running = by_state.get(TrialState.RUNNING)
            words = _progress(self.folder / name)[0]
            begun = f"begun, {words}" if (self.folder / name / "progress.json").is_file() else ""
            if TrialState.PRUNED in by_state:
                rows.append((name, "pruned", by_state[TrialState.PRUNED].user_attrs.get("pruned", "")))
            elif self.trials.done(name, trials):
                value = by_state[TrialState.COMPLETE].user_attrs.get(self.study.metric)
                rows.append((name, "done", f"{self.study.metric} {_figure(value)}"))
            elif running and not is_dead(running.user_attrs.get("worker", "")):
                rows.append((name, "running", f"{words}, by {running.user_attrs.get('worker', 'somebody')}"))
            elif name in given_up:
                rows.append((name, "failed", given_up[name]))
            else:
                rows.append((name, "waiting", begun))
        return rows

    def summary(self) -> str:
        """One line: what is done, what runs how far, and the time left for all."""
        grid = self.grid()
        states = ("done", "pruned", "failed", "waiting")
        count = {state: sum(s == state for _, s, _ in grid) for state in states}
        running = {name: _progress(self.folder / name) for name, state, _ in grid if state == "running"}
        total = max(len(grid), self.study.search.trials if self.study.search else 0)
        line = f"{self.study.name}: {count['done']} of {total} done"
        line += "".join(f", {count[state]} {state}" for state in ("pruned", "failed") if count[state])
        line += "".join(f" | {name} {words}" for name, (words, _, _) in running.items())
        left = [seconds for _, seconds, _ in running.values() if seconds is not None]
        wholes = self._durations or [whole for _, _, whole in running.values() if whole is not None]
        if wholes and len(left) == len(running):
            waiting = (count["waiting"] + total - len(grid)) * sum(wholes) / len(wholes)
            line += f" | about {clock(max([*left, (sum(left) + waiting) / self.workers]))} left"
        return line


def _take_checkpoints(trained: Path, folder: Path) -> None:
    """Those of the run that trained for this one, without a second copy of them."""
    (folder / "checkpoints").mkdir(exist_ok=True)
    for _, path in list_checkpoints(trained / "checkpoints"):
        with contextlib.suppress(FileExistsError):
            os.link(path, folder / "checkpoints" / path.name)


def _end(process: subprocess.Popen) -> None:
    """No process of the trial stays: by Ctrl-C first, then by what it takes."""
    assert process.stdin is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8)
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)  # a launcher of processes on other hosts, before it is killed, hangs up on them
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it started and left; every file is written atomically
    process.wait()


def _disk_is_full(folder: Path, reason: str) -> bool:
    if any(words in reason for words in ("No space left on device", "disk is full", "Disk quota exceeded")):
        return True
    try:
        probe = folder / f".probe.{os.getpid()}.{threading.get_ident()}"
        with open(probe, "wb") as file:
            file.write(bytes(1 << 20))
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def _figure(value: float | None) -> str:
    return "beyond a number" if value is None else f"{value:.2f}"


def _last_line(log: Path, start: int, status: int) -> str:
    text = log.read_bytes()[start:].decode("utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("srun: ", "slurmstepd"))] or lines  # only that one failed
    ended = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{ended}: {lines[-1].strip()[:300]}" if lines else ended


def _progress(folder: Path) -> tuple[str, float | None, float | None]:
    """What a run says of itself: words, seconds left, seconds of a whole run."""
    try:
        state = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "starting", None, None
    share, left = state["step"] / state["max_steps"], state["seconds_left"]
    if share >= 1:
        return "scoring", 0.0, None
    return f"update {state['step']:,} of {state['max_steps']:,}, {clock(left)} left", left, left / (1 - share)
