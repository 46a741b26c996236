"""Running a study: Optuna's storage says who does what, each trial is a `fit` in its own process.

sweeps/NAME.yaml -> Study, every variant checked before anything trains
                 -> one Optuna trial for each (variant, seed)
                 -> runs/NAME/VARIANT/seedN/, filled by the command a user would type
                 -> results/NAME.{csv,md,png}
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from lit_transformer.commands import SWEEP_VARIABLE
from lit_transformer.corpus import prepare
from lit_transformer.progress import clock, say
from lit_transformer.results import build
from lit_transformer.sources import CorpusConfig
from lit_transformer.store import write_atomic
from lit_transformer.study import Cell, check, describe, fit_arguments, note_failures, read_study_file, refuse_changes

MAX_FAILURES = 3
HEARTBEAT_SECONDS = 10
SHOW_SECONDS = 10


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
        self.names = {str(cell): cell for cell in self.study.cells()}
        self.stopping = threading.Event()
        self._storage_url = storage or f"sqlite:///{(self.folder / 'optuna.db').resolve()}"
        self._claiming = threading.Lock()
        self._durations: list[float] = []
        self.crashed: list[Exception] = []

    # Optuna

    def open(self) -> None:
        """Create or join the study in its storage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Workers of one host write into one SQLite file: they wait for each other, up to a minute.
        sqlite = {"connect_args": {"timeout": 60}} if self._storage_url.startswith("sqlite") else {}
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # the heartbeat, since 2021
        with self._folder_lock():
            self.storage = optuna.storages.RDBStorage(
                self._storage_url,
                engine_kwargs=sqlite,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=6 * HEARTBEAT_SECONDS,
            )
            self.trials = optuna.create_study(
                study_name=self.study.name,
                storage=self.storage,
                direction="maximize" if self.study.metric == "bleu" else "minimize",
                load_if_exists=True,
            )

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        with self._claiming, open(self.folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def by_cell(self) -> dict[str, list[FrozenTrial]]:
        """Each cell's trials, oldest first; trials of cells that the file no longer has are left alone."""
        found: dict[str, list[FrozenTrial]] = {name: [] for name in self.names}
        for trial in self.trials.get_trials(deepcopy=False):
            found.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return found

    def failures(self) -> dict[str, str]:
        """Cells given up, with their reasons."""
        failed, forgiven = {}, self.trials.user_attrs.get("forgiven", {})
        for cell, trials in self.by_cell().items():
            reasons = [t.user_attrs["error"] for t in trials if "error" in t.user_attrs][forgiven.get(cell, 0) :]
            if len(reasons) >= MAX_FAILURES and not self._done(cell, trials):
                failed[cell] = reasons[-1]
        return failed

    def retry(self) -> None:
        """Give the cells that were given up another MAX_FAILURES tries."""
        errors = {cell: sum("error" in t.user_attrs for t in trials) for cell, trials in self.by_cell().items()}
        self.trials.set_user_attr("forgiven", errors)

    def _done(self, cell: str, trials: list[FrozenTrial]) -> bool:
        # Both: a folder that somebody removed is run again.
        return any(t.state == TrialState.COMPLETE for t in trials) and (self.folder / cell / "result.json").is_file()

    def claim(self) -> tuple[Cell, FrozenTrial] | None:
        """Take one cell that nobody has done, does, or has given up; None when there is no such cell now."""
        with self._folder_lock():
            self._release_the_dead()
            given_up = self.failures()
            for cell, trials in self.by_cell().items():
                states = {trial.state for trial in trials}
                if cell in given_up or TrialState.RUNNING in states or self._done(cell, trials):
                    continue
                if TrialState.WAITING not in states:
                    self.trials.enqueue_trial({}, user_attrs={"cell": cell})
                    trials = self.by_cell()[cell]
                trial = next(t for t in trials if t.state == TrialState.WAITING)
                # Whose it is comes first: killed right after, it can still be told that its worker is dead.
                self.storage.set_trial_user_attr(trial._trial_id, "worker", f"{socket.gethostname()}:{os.getpid()}")
                if self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING):
                    self.storage.record_heartbeat(trial._trial_id)
                    return self.names[cell], trial
        return None

    def _release_the_dead(self) -> None:
        """Trials of killed workers: at once where they were on this host, after missed heartbeats elsewhere."""
        optuna.storages.fail_stale_trials(self.trials)
        for trial in self.trials.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            host, _, pid = trial.user_attrs.get("worker", "").rpartition(":")
            if host == socket.gethostname() and not _alive(int(pid)):
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)

    # Running

    def work(self) -> None:
        """Claim and run until nothing is left that this worker could do."""
        try:
            while not self.stopping.is_set():
                claimed = self.claim()
                if claimed:
                    try:
                        self.run(*claimed)
                    except optuna.exceptions.UpdateFinishedTrialError:
                        # Its heartbeat had stopped, as in a laptop's sleep, and it was marked failed: claimed anew,
                        # it goes on where it is, or is found finished.
                        say(f"{self.study.name}: {claimed[0]} had been given up for dead; taking it up again")
                elif any(t.state == TrialState.RUNNING for trials in self.by_cell().values() for t in trials):
                    self.stopping.wait(2)  # another worker's trial may yet come free
                else:
                    return
        except Exception as error:  # said by the main thread, once the others have stopped
            self.crashed.append(error)
            self.stopping.set()

    def run(self, cell: Cell, trial: FrozenTrial) -> None:
        """One trial in its own process, with a heartbeat while it lives."""
        folder = self.folder / str(cell)
        folder.mkdir(parents=True, exist_ok=True)
        start = self.study.launcher or [sys.executable]
        command = [*start, "-m", "lit_transformer", "fit", *fit_arguments(self.study, self.file, cell, self.folder)]
        write_atomic(folder / "command", (shlex.join(command) + "\n").encode())
        threads = {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {**os.environ, **threads, SWEEP_VARIABLE: str(os.getpid())}
        started = beat = time.monotonic()
        with open(folder / "log.txt", "ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
            while process.poll() is None:
                if self.stopping.is_set():
                    # By Ctrl-C first; a shell's background jobs ignore it, and then it takes more.
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                        process.send_signal(number)
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(8)
                if time.monotonic() - beat >= HEARTBEAT_SECONDS:
                    beat = time.monotonic()
                    self.storage.record_heartbeat(trial._trial_id)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        if self.stopping.is_set() and process.returncode:
            self.trials.tell(trial.number, state=TrialState.FAIL)  # not its own fault: it is run again
            return
        result = folder / "result.json"
        if process.returncode or not result.is_file():
            self._fail(cell, trial, _last_line(folder / "log.txt", log_start, process.returncode))
            return
        found = json.loads(result.read_text(encoding="utf-8"))
        scores: dict[str, float | None] = {"bleu": found["bleu"]["score"], "perplexity": found["perplexity"]}
        scores = {n: v if v is not None and math.isfinite(v) else None for n, v in scores.items()}
        if scores[self.study.metric] is None:
            self._fail(cell, trial, f"its {self.study.metric} is no number: training has diverged")
            return
        for name, value in scores.items():
            self.storage.set_trial_user_attr(trial._trial_id, name, value)
        self.trials.tell(trial.number, scores[self.study.metric])
        self._durations.append(time.monotonic() - started)
        figures = f"perplexity {_figure(scores['perplexity'])}, BLEU {_figure(scores['bleu'])}"
        say(f"{self.study.name}: {cell} done, {figures}")

    def _fail(self, cell: Cell, trial: FrozenTrial, reason: str) -> None:
        self.storage.set_trial_user_attr(trial._trial_id, "error", reason)
        self.trials.tell(trial.number, state=TrialState.FAIL)
        say(f"{self.study.name}: {cell} failed: {reason} (see {self.folder / str(cell) / 'log.txt'})")

    def grid(self) -> list[tuple[str, str, str]]:
        """(cell, done | running | failed | waiting, details) for every cell."""
        rows, given_up = [], self.failures()
        for name, trials in self.by_cell().items():
            by_state = {trial.state: trial for trial in trials}
            if self._done(name, trials):
                value = by_state[TrialState.COMPLETE].user_attrs.get(self.study.metric)
                rows.append((name, "done", f"{self.study.metric} {_figure(value)}"))
            elif running := by_state.get(TrialState.RUNNING):
                words = _progress(self.folder / name)[0]
                rows.append((name, "running", f"{words}, by {running.user_attrs.get('worker', 'somebody')}"))
            elif name in given_up:
                rows.append((name, "failed", given_up[name]))
            else:
                begun = (self.folder / name / "progress.json").is_file()
                rows.append((name, "waiting", f"begun, {_progress(self.folder / name)[0]}" if begun else ""))
        return rows

    def summary(self) -> str:
        """One line: what is done, what runs how far, and the time left for all."""
        grid = self.grid()
        count = {state: sum(s == state for _, s, _ in grid) for state in ("done", "failed", "waiting")}
        running = {name: _progress(self.folder / name) for name, state, _ in grid if state == "running"}
        line = f"{self.study.name}: {count['done']} of {len(grid)} done"
        line += f", {count['failed']} failed" if count["failed"] else ""
        line += "".join(f" | {name} {words}" for name, (words, _, _) in running.items())
        left = [seconds for _, seconds, _ in running.values() if seconds is not None]
        wholes = self._durations or [whole for _, _, whole in running.values() if whole is not None]
        if wholes and len(left) == len(running):
            waiting = count["waiting"] * sum(wholes) / len(wholes)
            line += f" | about {clock(max([*left, (sum(left) + waiting) / self.workers]))} left"
        return line


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _figure(value: float | None) -> str:
    return "beyond a number" if value is None else f"{value:.2f}"


def _last_line(log: Path, start: int, status: int) -> str:
    text = log.read_bytes()[start:].decode("utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
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
    return f"{share:.0%}, {clock(left)} left", left, left / (1 - share)


def run_study(engine: Engine, out: Path, retry: bool) -> int:
    """All cells of a study, with progress; tables at the end."""
    name = engine.study.name
    resolved = check(engine.study, engine.file, engine.folder)
    engine.open()
    running = {name for name, state, _ in engine.grid() if state == "running"}
    refuse_changes(engine.file, engine.folder, resolved, running)
    if retry:
        engine.retry()
    # Once, here, instead of by several trials at the same time.
    for data in {json.dumps(config["data"], sort_keys=True) for config in resolved.values()}:
        fields = json.loads(data)
        own = {k: v for k, v in fields.items() if k in CorpusConfig.__dataclass_fields__}
        prepare(CorpusConfig(**own), Path(fields["root"]), say)
    describe(engine.study, engine.folder, resolved)
    say(
        f"{name}: {len(engine.names)} runs, {engine.workers} at a time, {engine.threads} "
        f"{'thread' if engine.threads == 1 else 'threads'} each; logs in {engine.folder}/VARIANT/seedN/log.txt"
    )
    workers = [threading.Thread(target=engine.work) for _ in range(engine.workers)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for worker in workers:
            worker.start()
        shown = time.monotonic()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.5)
            if time.monotonic() - shown >= SHOW_SECONDS:
                shown = time.monotonic()
                say(engine.summary())
    except KeyboardInterrupt:
        say(f"{name}: stopping; the same command goes on")
        engine.stopping.set()
        for worker in workers:
            worker.join()
        raise
    if engine.crashed:
        raise engine.crashed[0]
    failed = engine.failures()
    note_failures(engine.folder, {cell.rpartition("/")[0]: why for cell, why in failed.items()})
    print(build(engine.folder.parent, name, out))
    print(f"written: {out / name}.csv, .md, .png")
    for cell, reason in failed.items():
        say(f"{name}: {cell} was given up after {MAX_FAILURES} failures (--retry tries again): {reason}")
    return 1 if failed else 0


def sweep_command(args: Sequence[str]) -> int:
    """Run a study, or say how it stands."""
    parser = argparse.ArgumentParser("lit-transformer sweep", allow_abbrev=False)
    parser.add_argument("action", choices=("run", "status"))
    parser.add_argument("study", type=Path, help="a file such as sweeps/demo.yaml")
    parser.add_argument("--workers", type=int, help="trials at a time; default: one for each core")
    parser.add_argument("--retry", action="store_true", help="try again what was given up after three failures")
    parser.add_argument("--storage", help="Optuna's storage; default: an SQLite file in the study's folder")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the tables")
    options = parser.parse_args(args)
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        parser.error(f"--workers {workers}: must be at least 1")
    engine = Engine(options.study, options.runs, workers, options.storage)
    if options.action == "run":
        return run_study(engine, options.out, options.retry)
    if not (engine.folder / "study.json").is_file():
        raise ValueError(f"{engine.folder} holds no study yet: start it with `lit-transformer sweep run`")
    engine.open()
    for cell, state, details in engine.grid():
        print(f"{cell:<30} {state:<8} {details}".rstrip())
    return 0
