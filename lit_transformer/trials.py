"""Who does what: a study's trials in Optuna's storage, shared by every worker on every host.

A cell is one run to do.  It ends with exactly one finished trial; what was killed or failed before that stands there
as failed trials of the same cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import DBAPIError

from lit_transformer.storage import PatientStorage, is_address, without_password
from lit_transformer.store import write_atomic
from lit_transformer.study import Cell, Range, Study, Variant

MAX_FAILURES = 3
HEARTBEAT_SECONDS = 10
CONNECT_SECONDS = 10  # a server that takes connections and says nothing is one that is away


class Trials:
    """A study in its storage.

    Args:
        study: what is to be run.
        folder: of the study's runs, the same for all workers on all hosts.
        url: an SQLite file (one host), or postgresql+psycopg://... (several).
        stopping: set when the user wants to end.

    Raises:
        ValueError: an address of another kind, or a storage whose study has its runs in another folder.
    """

    def __init__(self, study: Study, folder: Path, url: str | None, stopping: threading.Event) -> None:
        self.study, self.folder, self.stopping = study, folder, stopping
        self.url = url or f"sqlite:///{(folder / 'optuna.db').resolve()}"
        if not self.url.startswith(("sqlite:///", "postgresql+psycopg://")) or not is_address(self.url):
            raise ValueError(
                f"--storage {without_password(self.url)}: must be sqlite:///FILE, for workers on one host, or "
                "postgresql+psycopg://USER:PASSWORD@HOST:PORT/DATABASE for several"
            )
        self.names = {str(cell): cell for cell in study.cells()}  # a search adds to them as it goes
        self._one_at_a_time = threading.Lock()

    def open(self) -> None:
        """Create or join the study in its storage."""
        self.folder.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)  # the heartbeat, since 2021
        # Workers of one host write into one SQLite file: they wait for each other, up to a minute.
        sqlite = self.url.startswith("sqlite")
        connect = {"timeout": 60} if sqlite else {"connect_timeout": CONNECT_SECONDS}
        options: dict[str, Any] = {"connect_args": connect, "pool_pre_ping": not sqlite}
        with self._folder_lock():  # workers that start together make one set of tables
            self.storage = PatientStorage(
                self.url,
                self.stopping,
                engine_kwargs=options,
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=6 * HEARTBEAT_SECONDS,
            )
            self._server = (
                None
                if sqlite
                else sqlalchemy.create_engine(self.url, poolclass=sqlalchemy.NullPool, connect_args=connect)
            )
            search = self.study.search
            self.optuna = optuna.create_study(
                study_name=self.study.name,
                storage=self.storage,
                direction="maximize" if self.study.metric == "bleu" else "minimize",
                pruner=optuna.pruners.MedianPruner(search.startup, search.prune_after) if search else None,
                load_if_exists=True,
            )
            self._same_folder()

    def _same_folder(self) -> None:
        """Hosts that share the storage but not the folder would each miss the other's results."""
        mark = self.folder / ".storage"
        here = mark.read_text() if mark.is_file() else None
        known = self.optuna.user_attrs.get("folder")
        if known is None:
            if here:
                raise ValueError(
                    f"{self.folder} belongs to a study in another storage: give the --storage that it was begun with; "
                    f"if that one is lost, remove {mark}, and what has finished is taken over"
                )
            known = uuid.uuid4().hex
            write_atomic(mark, known.encode())
            self.optuna.set_user_attr("folder", known)
        elif here != known:
            raise ValueError(
                f"{self.folder} is not the folder in which study {self.study.name} of this storage keeps its runs: all "
                "workers need one folder, on several hosts a shared one; if it was removed, give the study another name"
            )

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        with self._one_at_a_time, open(self.folder / ".lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _lock(self) -> Iterator[Callable[[], bool]]:
        """One worker at a time, on this host or, with a server, on all; yields a check that it is still held."""
        with self._folder_lock():
            if self._server is None:
                yield lambda: True
                return
            connection = self.storage.patiently(self._locked_connection)
            try:
                yield lambda: _answers(connection)
            finally:
                with contextlib.suppress(DBAPIError):
                    connection.close()

    def _locked_connection(self) -> sqlalchemy.Connection:
        """A connection to the server that holds the study's lock: both end together, and with this process."""
        assert self._server is not None
        connection = self._server.connect()
        try:
            name = {"name": f"lit-transformer {self.study.name}"}
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(hashtext(:name))"), name)
        except BaseException:
            connection.close()
            raise
        return connection

    # What stands in the storage

    def by_cell(self) -> dict[str, list[FrozenTrial]]:
        """Each cell's trials, oldest first; trials of cells that the file no longer has are left alone."""
        trials = self.optuna.get_trials(deepcopy=False)
        if self.study.search:
            self._learn_cells(trials)
        found: dict[str, list[FrozenTrial]] = {name: [] for name in self.names}
        for trial in trials:
            found.get(trial.user_attrs.get("cell", ""), []).append(trial)
        return found

    def _learn_cells(self, trials: list[FrozenTrial]) -> None:
        """A search's cells are made as it goes: by this worker and by others."""
        for trial in trials:
            name, params = trial.user_attrs.get("cell", ""), trial.params
            if len(params) == len(self.study.search.space) and name not in self.names:  # type: ignore[union-attr]
                variant = name.partition("/")[0]
                self.names[name] = Cell(Variant(variant, dict(params)), self.study.seeds[0])

    def failures(self) -> dict[str, str]:
        """Cells given up, with their reasons: MAX_FAILURES in a row that came no further than the first of them."""
        failed, forgiven = {}, self.optuna.user_attrs.get("forgiven", {})
        cells = self.by_cell()
        for cell, trials in cells.items():
            errors = [t for t in trials if "error" in t.user_attrs][forgiven.get(cell, 0) :]
            furthest = max((t.user_attrs.get("reached", 0) for t in errors), default=0)
            same = [t for t in errors if t.user_attrs.get("reached", 0) == furthest]
            if len(same) >= MAX_FAILURES and not self.done(cell, trials):
                failed[cell] = same[-1].user_attrs["error"]
        for cell, trials in cells.items():
            if (trainer := self.trainer_of(cell)) in failed and cell not in failed and not self.done(cell, trials):
                failed[cell] = f"{trainer}, which trains it, was given up"
        return failed

    def retry(self) -> None:
        """Give the cells that were given up another MAX_FAILURES tries."""
        errors = {cell: sum("error" in t.user_attrs for t in trials) for cell, trials in self.by_cell().items()}
        self.optuna.set_user_attr("forgiven", errors)

    def done(self, cell: str, trials: list[FrozenTrial]) -> bool:
        # Both: a folder that somebody removed is run again.
        complete = (
            any(t.state == TrialState.COMPLETE for t in trials) and (self.folder / cell / "result.json").is_file()
        )
        return complete or any(t.state == TrialState.PRUNED for t in trials)

    def trainer_of(self, cell: str) -> str | None:
        """The cell that trains what this one only scores."""
        variant = self.names[cell].variant
        return f"{variant.trained_by}/seed{self.names[cell].seed}" if variant.trained_by else None

    def all_done(self) -> bool:
        """Whether nothing is left to do, by whomever."""
        cells, given_up = self.by_cell(), self.failures()
        return not self._more_to_search(cells) and all(c in given_up or self.done(c, t) for c, t in cells.items())

    def _more_to_search(self, cells: dict[str, list[FrozenTrial]]) -> bool:
        return self.study.search is not None and len(cells) < self.study.search.trials

    def ranking(self) -> list[Variant]:
        """A search's trials, the best first, pruned ones behind the finished."""

        def key(cell: str) -> tuple[bool, float]:
            values = [t.value for t in cells[cell] if t.state == TrialState.COMPLETE and t.value is not None]
            sign = -1 if self.study.metric == "bleu" else 1
            return not values, sign * values[-1] if values else 0.0

        cells = self.by_cell()
        return [self.names[cell].variant for cell in sorted(cells, key=key)]

    # Claiming

    def claim(self) -> tuple[Cell, Trial] | None:
        """Take one cell that nobody has done, does, or has given up; None when there is no such cell now."""
        with self._lock() as held:
            self.release_the_dead()
            cells, given_up = self.by_cell(), self.failures()
            free: str | None = None
            for cell, trials in cells.items():
                busy = any(trial.state == TrialState.RUNNING for trial in trials)
                trainer = self.trainer_of(cell)
                ready = trainer is None or self.done(trainer, cells[trainer])
                if ready and not busy and cell not in given_up and not self.done(cell, trials):
                    free = cell
                    break
            if free is None and self._more_to_search(cells):
                free = f"trial-{len(cells):03d}/seed{self.study.seeds[0]}"
            trial = self._take(free) if free else None
            if free is None or trial is None:
                return None
            if not held():  # the connection broke: another worker may have taken the same cell
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
                return None
            if free not in self.names:
                self.names[free] = Cell(Variant(free.partition("/")[0], dict(trial.params)), self.study.seeds[0])
            return self.names[free], trial

    def _take(self, cell: str) -> Trial | None:
        def of_this_cell(*states: TrialState) -> list[FrozenTrial]:
            trials = self.optuna.get_trials(deepcopy=False, states=states or None)
            return [t for t in trials if t.user_attrs.get("cell") == cell]

        if not of_this_cell(TrialState.WAITING):
            before = next((t.params for t in of_this_cell() if t.params), {})  # a search's cell keeps its values
            self.optuna.enqueue_trial(before, user_attrs={"cell": cell})
        waiting = of_this_cell(TrialState.WAITING)
        number = waiting[0]._trial_id
        # Whose it is comes first: killed right after, it can still be told that its worker is dead.
        self.storage.set_trial_user_attr(number, "worker", worker())
        if not self.storage.set_trial_state_values(number, TrialState.RUNNING) and not self._is_mine(number):
            return None
        self.storage.record_heartbeat(number)
        if self.study.search:
            # By the number of trials: workers do not draw the same, and a search can be repeated.
            self.optuna.sampler = optuna.samplers.TPESampler(
                seed=waiting[0].number, n_startup_trials=self.study.search.startup, constant_liar=True
            )
        trial = Trial(self.optuna, number)
        for key, values in self.study.search.space.items() if self.study.search else ():
            suggest(trial, key, values)
        return trial

    def _is_mine(self, number: int) -> bool:
        """The answer to our own change was lost with the connection, and the change asked for again."""
        trial = self.storage.get_trial(number)
        return trial.state == TrialState.RUNNING and trial.user_attrs.get("worker") == worker()

    def release_the_dead(self) -> None:
        """Trials of killed workers: at once where they were on this host, after missed heartbeats elsewhere."""
        optuna.storages.fail_stale_trials(self.optuna)
        for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if is_dead(trial.user_attrs.get("worker", "")):
                self.storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def suggest(trial: Trial, key: str, values: Range) -> None:
    """Draw one hyper-parameter of a search."""
    if values.choices is not None:
        trial.suggest_categorical(key, values.choices)
        return
    low, high = values.low, values.high
    assert low is not None and high is not None
    if isinstance(low, int) and isinstance(high, int):
        trial.suggest_int(key, low, high, log=values.log)
    else:
        trial.suggest_float(key, low, high, log=values.log)


def worker() -> str:
    """This process, among all hosts."""
    return f"{socket.gethostname()}:{os.getpid()}"


def is_dead(name: str) -> bool:
    """Whether a worker was on this host and is no more."""
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _answers(connection: sqlalchemy.Connection) -> bool:
    try:
        connection.execute(sqlalchemy.text("SELECT 1"))
    except DBAPIError:
        return False
    return True
