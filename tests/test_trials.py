"""Trials in Optuna's storage: shared by hosts, over a database that comes and goes, and searches with pruning."""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import psycopg
import pytest
import sqlalchemy
from bench import Bench, alive, assert_done_once, ended, wait_for
from optuna.trial import TrialState

from lit_transformer import engine, trials
from lit_transformer import storage as storage_module
from lit_transformer.__main__ import main

pytestmark = pytest.mark.usefixtures("signals")


class Server:
    """A PostgreSQL server of the tests' own."""

    def __init__(self, root: Path, programs: Path) -> None:
        self.programs, self.data = programs, root / "data"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # It refuses to run as root.
        self.user = "postgres" if os.getuid() == 0 else None
        self.data.mkdir()
        if self.user:
            for folder in (root, self.data):
                shutil.chown(folder, self.user)
        self._run("initdb", "-D", self.data, "-U", "tester", "--auth=trust", "-N")
        self.start()

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self.programs / program), *map(str, arguments)]
        # To files, not pipes: the server that it leaves would hold a pipe open.
        with open(os.devnull, "w") as nowhere:
            subprocess.run(command, check=True, user=self.user, stdout=nowhere, stderr=nowhere, cwd="/")

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._run("pg_ctl", "-D", self.data, "-w", "-o", options, "-l", self.data / "log", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-w", "stop")

    def address(self, database: str = "postgres") -> str:
        return f"postgresql+psycopg://tester@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str) -> None:
        with psycopg.connect(f"host=127.0.0.1 port={self.port} user=tester dbname=postgres", autocommit=True) as found:
            found.execute(statement)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = shutil.which("initdb") or next(iter(sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")))), "")
    if not found:
        pytest.skip("PostgreSQL's server is not installed: apt-get install postgresql")
    # Not below pytest's own folder, which the server's user may not enter.
    root = Path(subprocess.run(["mktemp", "-d"], check=True, capture_output=True, text=True).stdout.strip())
    server = Server(root, Path(found).parent)
    yield server
    server.stop()
    shutil.rmtree(root)


@pytest.fixture
def database(server, request) -> str:
    """The address of an empty database."""
    name = f"t{abs(hash(request.node.name))}"
    server.execute(f"CREATE DATABASE {name}")
    return server.address(name)


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Heartbeats in seconds instead of tens of them."""
    monkeypatch.setattr(trials, "HEARTBEAT_SECONDS", 1)
    monkeypatch.setattr(engine, "HEARTBEAT_SECONDS", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request) -> str:
    """The address of each supported storage; "" is the default one."""
    return request.getfixturevalue("database") if request.param == "postgresql" else ""


def given(storage: str) -> list[str]:
    return ["--storage", storage] if storage else []


def test_a_password_is_never_printed(bench, capsys):
    bench.study("base")
    for address in (
        "postgresql+psycopg://me:s3cret@127.0.0.1:1/none",
        "postgresql+psycopg://me:s3cret@127.0.0.1:port/none",
        "mysql://me:s3cret@somewhere/db",
    ):
        assert bench.sweep("--storage", address) == 1
        said = capsys.readouterr()
        assert "s3cret" not in said.out + said.err and "error: --storage" in said.err and "me:***@" in said.err


# Several hosts


def test_hosts_share_a_study_on_postgresql(bench, database):
    names = [f"v{i}" for i in range(8)]
    bench.study(*names, seeds=[1, 2])
    pids = [bench.fork("--storage", database, host=f"node{i}") for i in range(3)]
    assert [ended(pid) for pid in pids] == [0, 0, 0], "".join(map(bench.said, pids))
    cells = [f"{name}/seed{seed}" for name in names for seed in (1, 2)]
    assert bench.attempts() == dict.fromkeys(cells, 1)
    assert bench.trials(database) == {cell: [TrialState.COMPLETE] for cell in cells}
    hosts = {t.user_attrs["worker"].partition(":")[0] for t in bench.optuna(database).trials}
    assert len(hosts) > 1
    assert len(bench.rows()) == 8 and {row["seeds"] for row in bench.rows().values()} == {"2"}


def test_another_host_takes_over_from_one_that_was_killed(bench, database, hasty):
    bench.study("slow", "quick")
    bench.plan(slow={"until": ["go"]})
    first = bench.fork("--storage", database, workers=1, host="node1")
    wait_for(lambda: bench.attempts() == {"slow/seed1": 1}, "the first host trains")
    second = bench.fork("--storage", database, workers=1, host="node2")
    wait_for(lambda: "quick/seed1 done" in bench.said(second), "the second host has done the rest")
    os.kill(first, signal.SIGKILL)
    ended(first)
    (bench.folder / "go").touch()
    assert ended(second) == 0, bench.said(second)
    assert bench.attempts() == {"slow/seed1": 2, "quick/seed1": 1}
    assert_done_once(bench, "slow/seed1", "quick/seed1", storage=database)


def test_a_host_without_the_shared_folder_is_refused(bench, database, tmp_path, capsys):
    bench.study("base")
    assert bench.sweep("--storage", database) == 0
    elsewhere = ["--runs", str(tmp_path / "elsewhere"), "--storage", database]
    capsys.readouterr()
    assert main([*bench.arguments("run", "--workers", "1"), *elsewhere]) == 1
    assert "elsewhere/s is not the folder in which study s of this storage keeps its runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("mysql://somewhere/db", "must be sqlite:///FILE"),
        ("study.db", "must be sqlite:///FILE"),
        ("postgresql+psycopg://tester@127.0.0.1:1/none", "cannot be used"),
        ("sqlite:////nowhere/at/all.db", "unable to open database file; start it, or correct the address"),
        ("sqlite:////dev/null", "cannot be used"),
    ],
)
def test_a_storage_that_cannot_be_used_is_a_plain_error(bench, capsys, address, words):
    bench.study("base")
    assert bench.sweep("--storage", address) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert not bench.attempts()


def test_a_database_that_is_not_there_is_not_waited_for(bench, server, capsys):
    bench.study("base")
    assert bench.sweep("--storage", server.address("nobody_made_it")) == 1
    assert 'database "nobody_made_it" does not exist' in capsys.readouterr().err


def test_another_storage_for_the_same_folder_is_refused(bench, tmp_path, capsys):
    bench.study("base")
    assert bench.sweep() == 0
    capsys.readouterr()
    assert main(bench.arguments("status", "--storage", f"sqlite:///{tmp_path}/other.db")) == 1
    assert "belongs to a study in another storage" in capsys.readouterr().err
    (bench.folder / "optuna.db").unlink()  # lost; what has finished is taken over
    (bench.folder / ".storage").unlink()
    assert bench.sweep() == 0
    assert_done_once(bench, "base/seed1")


# A database that comes and goes


def test_a_server_that_never_answers_is_given_up(bench, capsys, monkeypatch):
    bench.study("base")
    monkeypatch.setattr(trials, "CONNECT_SECONDS", 2)  # the least that libpq takes
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql+psycopg://tester@127.0.0.1:{silent.getsockname()[1]}/none"
        assert bench.sweep("--storage", address) == 1
    assert "cannot be used: connection timeout expired; start it" in capsys.readouterr().err


def test_trials_go_on_while_the_server_is_away(bench, server, database, hasty):
    bench.study("slow", "late", "last")
    bench.plan(slow={"until": ["go"]}, late={"until": ["go"]})
    pid = bench.fork("--storage", database)
    wait_for(lambda: len(bench.attempts()) == 2, "two trials run")
    server.stop()
    try:
        wait_for(lambda: "database is away" in bench.said(pid), "the loss is said")
        (bench.folder / "go").touch()
        wait_for(lambda: (bench.folder / "slow/seed1/result.json").is_file(), "a trial ends meanwhile")
    finally:
        server.start()
    assert ended(pid) == 0, bench.said(pid)
    assert bench.attempts() == {"slow/seed1": 1, "late/seed1": 1, "last/seed1": 1}
    assert_done_once(bench, "slow/seed1", "late/seed1", "last/seed1", storage=database)


BREAK = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 't%'"


def test_a_connection_that_breaks_at_first_contact_is_made_again(bench, server, database):
    bench.study("base")
    first = [True]

    @sqlalchemy.event.listens_for(sqlalchemy.Engine, "before_cursor_execute")
    def break_once(*_):
        if first and first.pop():
            server.execute(BREAK)

    try:
        assert bench.sweep("--storage", database) == 0
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", break_once)
    assert not first
    assert_done_once(bench, "base/seed1", storage=database)


def test_a_connection_that_breaks_while_it_is_made_is_made_again(bench, server, database, monkeypatch):
    """SQLAlchemy still asks what the server can, and does not say that it has been connected."""
    bench.study("base")
    first, fetch = [True], psycopg.types.TypeInfo.fetch

    def breaks_once(*arguments):
        if first and first.pop():
            server.execute(BREAK)
        return fetch(*arguments)

    monkeypatch.setattr(psycopg.types.TypeInfo, "fetch", breaks_once)
    assert bench.sweep("--storage", database) == 0
    assert not first
    assert_done_once(bench, "base/seed1", storage=database)


@pytest.mark.parametrize(
    ("error", "patience"),
    [
        # Who looks at a study makes its tables too, without our lock; on a crowded machine that may take long.
        (sqlalchemy.exc.IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed")), 0.1),
        # The server's own word for it is waited for beyond that.
        (sqlalchemy.exc.OperationalError("SELECT", {}, psycopg.errors.AdminShutdown("terminating connection")), 0),
    ],
)
def test_a_first_contact_that_fails_late_is_repeated(bench, monkeypatch, error, patience):
    bench.study("base")
    make, tries = optuna.storages.RDBStorage.__init__, []

    def late(self, *arguments, **options):
        tries.append(arguments)
        if len(tries) == 1:
            time.sleep(0.2)
            raise error
        make(self, *arguments, **options)

    monkeypatch.setattr(storage_module, "CONTACT_SECONDS", patience)
    monkeypatch.setattr(optuna.storages.RDBStorage, "__init__", late)
    assert bench.sweep() == 0
    assert len(tries) == 2


def test_connections_that_break_all_the_time_lose_and_double_nothing(bench, server, database):
    names = [f"v{i}" for i in range(10)]
    bench.study(*names)
    pids = [bench.fork("--storage", database, host=f"node{i}") for i in range(2)]
    over = threading.Event()

    def harass() -> None:
        while not over.wait(0.7):
            server.execute(BREAK)

    trouble = threading.Thread(target=harass)
    trouble.start()
    try:
        statuses = [ended(pid) for pid in pids]
    finally:
        over.set()
        trouble.join()
    assert statuses == [0, 0], "".join(map(bench.said, pids))
    assert_done_once(bench, *(f"{name}/seed1" for name in names), storage=database)


def test_ctrl_c_while_the_database_is_away_leaves_no_process(bench, server, database, hasty):
    bench.study("slow")
    bench.plan(slow={"until": ["never"]})
    pid = bench.fork("--storage", database, workers=1)
    wait_for(bench.attempts, "the trial runs")
    server.stop()
    try:
        wait_for(lambda: "database is away" in bench.said(pid), "the loss is said")
        os.kill(pid, signal.SIGINT)
        assert ended(pid) in (1, 130)
    finally:
        server.start()
    assert not alive(int((bench.folder / "slow/seed1/attempts").read_text()))
    bench.plan()
    assert bench.sweep("--storage", database) == 0  # typed again
    assert_done_once(bench, "slow/seed1", storage=database)


# Failures that are the trial's own, and others


def test_a_trial_that_gets_further_each_time_is_not_given_up(bench):
    """Killed from outside again and again, as on machines that may be taken away: it ends all the same."""
    bench.study("base")
    bench.plan(base={"failures": 5, "signal": int(signal.SIGKILL), "checkpoints": True})
    assert bench.sweep() == 0
    assert bench.attempts() == {"base/seed1": 6}
    assert_done_once(bench, "base/seed1")


def test_c56_one_trial_out_of_memory_costs_that_trial_alone(bench):
    """Twenty trials, the fifth needs more memory than there is; what the sweep itself holds does not grow."""
    names = [f"v{i:02d}" for i in range(20)]
    bench.study(*names)
    bench.plan(v04={"memory": 1 << 40})
    pid = bench.fork(workers=1)
    held = {}

    def look() -> bool:
        with contextlib.suppress(OSError, IndexError):
            done = bench.said(pid).count(" done, ")
            held[done] = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return done >= 19

    wait_for(look, "all but one are done", pause=0.01)
    assert ended(pid) == 1
    assert_done_once(bench, *(f"{name}/seed1" for name in names if name != "v04"), ignore=("v04/seed1",))
    assert bench.trials()["v04/seed1"] == [TrialState.FAIL] * 3
    assert "MemoryError" in bench.rows()["v04"]["failed"]
    assert held[max(held)] < 1.05 * held[min(step for step in held if step >= 2)]


def test_a_full_disk_stops_the_sweep_and_counts_against_nobody(bench, tmp_path):
    """On a real file system that is really full."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("only root may mount the small file system that this fills")
    bench.runs, bench.folder = small, small / "s"
    try:
        bench.study("base", "more")
        bench.plan(base={"fill": True})
        first = bench.fork(workers=1)
        assert ended(first) == 1
        assert "the disk is full; free some space and type the same command again" in bench.said(first)
        (bench.folder / "base/seed1/filling").unlink()
        bench.plan()
        assert bench.sweep() == 0
        states = bench.trials()
        assert {cell: found.count(TrialState.COMPLETE) for cell, found in states.items()} == {
            "base/seed1": 1,
            "more/seed1": 1,
        }
        assert not any(TrialState.RUNNING in found for found in states.values())
        assert not any("error" in trial.user_attrs for trial in bench.optuna().trials)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_a_trial_of_several_processes_leaves_none_when_it_is_stopped(bench):
    bench.study("slow")
    bench.plan(slow={"until": ["never"], "child": True, "stubborn": False})
    pid = bench.fork(workers=1)
    wait_for(lambda: (bench.folder / "slow/seed1/child").is_file() and bench.attempts(), "it runs")
    child = int((bench.folder / "slow/seed1/child").read_text())
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143
    wait_for(lambda: not alive(child), "the trial's own child has ended")


# Eight workers


@pytest.mark.slow
def test_c54_eight_workers_and_a_dashboard_on_the_default_storage(bench):
    """Eight workers, twenty trials each; somebody reads all the time."""
    names = [f"v{i:03d}" for i in range(160)]
    bench.study(*names)
    pids = [bench.fork(workers=1) for _ in range(8)]
    reads, refused, over = [], [], threading.Event()

    def dashboard() -> None:
        while not over.wait(0.2):
            try:
                reads.append(len(bench.optuna().trials))
            except Exception as error:
                refused.extend([error] if reads else [])  # before that, there is nothing to read yet

    reader = threading.Thread(target=dashboard)
    reader.start()
    try:
        statuses = [ended(pid, limit=400) for pid in pids]
    finally:
        over.set()
        reader.join()
    assert statuses == [0] * 8, "".join(map(bench.said, pids))
    assert bench.attempts() == dict.fromkeys([f"{name}/seed1" for name in names], 1)
    assert bench.trials() == {f"{name}/seed1": [TrialState.COMPLETE] for name in names}
    assert reads[-1] > 0 and not refused


# What a trial reports, and searches


def test_c52_intermediate_values_stand_at_their_updates_also_after_a_resume(bench, storage):
    bench.study("base", metric="perplexity")
    curve = [[50, 9.0], [100, 7.5], [150, 7.0], [200, 6.5]]
    bench.plan(base={"curve": curve[:2], "until": ["never"]})
    pid = bench.fork(*given(storage))
    wait_for(bench.attempts, "it runs")
    wait_for(lambda: sum(len(t.intermediate_values) for t in bench.optuna(storage).trials) == 2, "two are reported")
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    bench.plan(base={"curve": curve[1:]})  # it goes on from a checkpoint at 50
    assert bench.sweep(*given(storage)) == 0
    finished = [t for t in bench.optuna(storage).trials if t.state == TrialState.COMPLETE]
    assert [t.intermediate_values for t in finished] == [dict(map(tuple, curve))]


SPACE = {"lr_factor": {"low": 1.0, "high": 100.0, "log": True}}


def search(bench: Bench, **more) -> None:
    fields = {"trials": 12, "startup": 3, "space": SPACE, **more}
    bench.study(search=fields, metric="perplexity")
    bench.plan(**{"*": {"quality": "--model.lr_factor", "pause": 0.2, "child": True}})


@pytest.mark.parametrize("storage", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_search_finds_prunes_and_leaves_no_process(bench, storage):
    search(bench)
    assert bench.sweep(*given(storage), workers=2) == 0
    found = bench.optuna(storage).trials
    states = [trial.state for trial in found]
    assert len(found) == 12 and set(states) == {TrialState.COMPLETE, TrialState.PRUNED}
    for trial in found:
        folder = bench.folder / trial.user_attrs["cell"]
        value = trial.params["lr_factor"]
        assert f"--model.lr_factor {value}" in (folder / "command").read_text()
        if trial.state == TrialState.PRUNED:
            assert not (folder / "result.json").is_file()
            assert 1 <= len(trial.intermediate_values) <= 5
            assert not alive(int((folder / "attempts").read_text()))
        else:
            assert trial.value == pytest.approx(value)
            assert trial.intermediate_values == {s: pytest.approx(5 * value / s) for s in range(1, 6)}
        wait_for(lambda folder=folder: not alive(int((folder / "child").read_text())), "no process is left")
    rows = list(bench.rows().values())
    perplexities = [float(row["perplexity"]) for row in rows if row["perplexity"]]
    assert perplexities == sorted(perplexities) and len(rows) == 12
    assert all("pruned at update" in row["failed"] for row in rows if not row["perplexity"])
    drawn = [trial.params["lr_factor"] for trial in found]
    assert min(drawn[3:]) < min(drawn[:3])  # better than chance alone


def test_a_killed_search_goes_on_with_the_same_values(bench):
    search(bench, trials=4)
    pid = bench.fork(workers=2)
    wait_for(lambda: len(bench.attempts()) >= 2, "two trials run")
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    before = {t.user_attrs["cell"]: t.params for t in bench.optuna().trials if t.params}
    assert bench.sweep() == 0
    after: dict[str, list] = {}
    for trial in bench.optuna().trials:
        after.setdefault(trial.user_attrs["cell"], []).append(trial)
    assert len(after) == 4
    for cell, attempts in after.items():
        assert all(trial.params == before.get(cell, attempts[0].params) for trial in attempts)
        ends = [t.state for t in attempts if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        assert len(ends) == 1 and not any(t.state == TrialState.RUNNING for t in attempts)


def test_a_searchs_first_trials_are_the_same_each_time(bench, tmp_path, small_base):
    values = []
    for root in (tmp_path / "a", tmp_path / "b"):
        root.mkdir()
        one = Bench(root, small_base)
        search(one, trials=3)
        assert one.sweep() == 0
        values.append([trial.params for trial in one.optuna().trials])
    assert values[0] == values[1] and len({str(v) for v in values[0]}) == 3


def test_a_search_may_not_change_its_space_or_base_under_results(bench, small_base, capsys):
    search(bench, trials=2)
    assert bench.sweep() == 0
    bench.study(search={"trials": 2, "space": {"dropout": {"low": 0.0, "high": 0.2}}}, metric="perplexity")
    assert bench.sweep() == 1
    assert "search.space was" in capsys.readouterr().err
    search(bench, trials=2)
    bench.configure({**small_base, "model": {**small_base["model"], "d_ff": 64}})
    assert bench.sweep() == 1
    assert "model.d_ff was 32 and is 64 now" in capsys.readouterr().err
    bench.configure(small_base)
    search(bench, trials=3)  # more of the same is fine
    assert bench.sweep() == 0
    assert len(bench.rows()) == 3


@pytest.mark.slow
def test_one_training_scored_in_two_ways_is_trained_once(bench, small_base, capsys):
    """The real command: the second variant takes the first one's checkpoints."""
    bench.configure({**small_base, "run": {"checkpoint_every": 1, "keep_checkpoints": 3}})
    averaged = {"name": "average", "trained_by": "base", "set": {"run.average": 3}}
    bench.study("base", averaged, launcher=[sys.executable])
    assert bench.sweep(workers=2) == 0
    assert "update 1 of" not in (bench.folder / "average/seed1/log.txt").read_text()
    assert (bench.folder / "average/seed1/checkpoints/average-3-step-00000004.ckpt").is_file()
    rows = bench.rows()
    assert rows["base"]["perplexity"] != rows["average"]["perplexity"]


def test_a_variant_whose_trainer_was_given_up_says_so(bench):
    bench.study("base", "lost", {"name": "average", "trained_by": "lost", "set": {"run.average": 2}})
    bench.plan(lost={"failures": 99, "says": ["hopeless"] * 3})
    assert bench.sweep() == 1
    assert "lost/seed1, which trains it, was given up" in bench.rows()["average"]["failed"]


# All at once


@pytest.mark.slow
def test_any_mixture_of_faults_ends_with_one_result_for_each_cell(bench, server, database, hasty):
    """kill -9 of sweeps and trials, memory that runs out once, a database that goes away and comes back."""
    names = [f"v{i}" for i in range(12)]
    cells = [f"{name}/seed{seed}" for name in names for seed in (1, 2)]
    bench.study(*names, seeds=[1, 2])
    plan = {name: {"curve": [[s, 9.0 - s] for s in range(1, 6)], "pause": 0.2} for name in names}
    bench.plan(**{**plan, "v3": {**plan["v3"], "failures": 1, "says": ["MemoryError"]}})
    hosts = {f"node{i}": bench.fork("--storage", database, host=f"node{i}") for i in range(3)}
    for round_ in range(4):
        time.sleep(1.5)
        victim = f"node{round_ % 3}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(hosts[victim], signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(hosts[victim], 0)
        if round_ == 1:
            server.stop()
            time.sleep(1)
            server.start()
        for file in list(bench.folder.glob("*/*/attempts"))[round_::5]:
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text().split()[-1]), signal.SIGKILL)
        hosts[victim] = bench.fork("--storage", database, host=victim)
    for host, pid in hosts.items():
        assert ended(pid, limit=200) == 0, (host, bench.said(pid))
    assert_done_once(bench, *cells, storage=database)
    assert len(bench.rows()) == 12 and {row["seeds"] for row in bench.rows().values()} == {"2"}


def test_the_engine_reports_what_optuna_refuses_to_call_a_number(bench):
    bench.study("base", metric="perplexity")
    bench.plan(base={"curve": [[1, "inf"], [2, 5.0]]})
    assert bench.sweep() == 0
    [trial] = bench.optuna().trials
    assert math.isnan(trial.intermediate_values[1]) and trial.intermediate_values[2] == 5.0


@pytest.mark.slow
def test_a_search_prunes_trials_of_two_ranks(bench, small_base, monkeypatch):
    """The real command under torchrun: one process speaks to Optuna, and no rank of a pruned trial stays."""
    here = Path(sys.executable).parent  # as when the environment is not activated
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != here]
    monkeypatch.setenv("PATH", os.pathsep.join(others))
    model = {**small_base["model"], "validate_every": 20, "bleu_every": 0}
    trainer = {**small_base["trainer"], "max_steps": 160, "devices": 2, "strategy": "ddp", "log_every_n_steps": 20}
    bench.configure({**small_base, "model": model, "trainer": trainer, "run": {"checkpoint_every": 80}})
    launcher = ["torchrun", "--standalone", "--nproc_per_node", "2"]
    space = {"lr_factor": {"low": 1e-7, "high": 0.02, "log": True}}
    bench.study(search={"trials": 4, "startup": 1, "space": space}, metric="perplexity", launcher=launcher)
    assert bench.sweep(workers=1) == 0
    found = bench.optuna().trials
    assert len(found) == 4
    for trial in found:
        folder = bench.folder / trial.user_attrs["cell"]
        assert (trial.state == TrialState.COMPLETE) == (folder / "result.json").is_file()
        steps = sorted(trial.intermediate_values)
        assert steps == list(range(20, 20 * len(steps) + 1, 20))
        if trial.state == TrialState.COMPLETE:
            assert len(steps) == 8
    pruned = [trial for trial in found if trial.state == TrialState.PRUNED]
    assert pruned and min(t.value for t in found) not in [t.value for t in pruned]
    running = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    for process in running:
        with contextlib.suppress(OSError):
            assert str(bench.folder) not in process.read_bytes().decode(errors="replace")


def test_a_table_can_be_built_while_a_search_runs_and_before(bench, capsys):
    search(bench, trials=3)
    pid = bench.fork(workers=1)
    wait_for(lambda: (bench.folder / "study.json").is_file(), "it has begun")
    build = ["results", "s", "--runs", str(bench.runs), "--out", str(bench.out)]
    assert main(build) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err
    assert ended(pid) == 0
    assert main(build) == 0


def test_a_variant_that_was_killed_in_training_cannot_be_changed(bench, capsys):
    bench.study("base", {"name": "x", "set": {"dropout": 0.0}})
    bench.plan(x={"until": ["never"], "checkpoints": True})
    pid = bench.fork(workers=2)
    folder = bench.folder / "x" / "seed1" / "checkpoints"
    wait_for(lambda: (bench.folder / "x/seed1/attempts").is_file(), "it trains")
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    folder.mkdir(exist_ok=True)
    (folder / "step-00000002.ckpt").touch()
    bench.plan()
    bench.study("base", {"name": "x", "set": {"dropout": 0.2}})
    assert bench.sweep() == 1
    assert "x/seed1 has a result or has begun to train, but model.dropout was 0.0" in capsys.readouterr().err
    bench.study("base", {"name": "x", "set": {"dropout": 0.0}})
    assert bench.sweep() == 0
    assert_done_once(bench, "base/seed1", "x/seed1")


def test_a_launcher_whose_processes_are_not_the_trainers_is_refused(bench, small_base, monkeypatch):
    """Two processes that each believe they are alone would write into one folder."""
    monkeypatch.setattr(trials, "MAX_FAILURES", 1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    bench.study("base", launcher=launcher)
    assert bench.sweep(workers=1) == 1
    log = (bench.folder / "base/seed1/log.txt").read_text()
    assert "a launcher has started 2 processes, and trainer.devices x trainer.num_nodes is 1" in log
    assert not (bench.folder / "base/seed1/checkpoints").exists()
