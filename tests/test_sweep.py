"""Sweeps: every cell is done once, whatever is killed meanwhile, and its trial is a command that anybody can type.

Most trials here are the script of bench.py that plays `fit`.
"""

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import types
from pathlib import Path

import optuna
import pytest
from bench import CORES, LIMIT, Bench, alive, assert_done_once, ended, wait_for
from optuna.trial import TrialState

from lit_transformer import sweep
from lit_transformer.__main__ import main
from lit_transformer.commands import SWEEP_VARIABLE
from lit_transformer.engine import Engine
from lit_transformer.store import Store

pytestmark = pytest.mark.usefixtures("signals")


@pytest.fixture(scope="module")
def base(small_base) -> dict:
    return small_base


# A study that goes well


@pytest.fixture(scope="module")
def good(tmp_path_factory, base) -> types.SimpleNamespace:
    """Three variants, two seeds, three workers."""
    bench = Bench(tmp_path_factory.mktemp("good"), base)
    bench.study(
        "base", {"name": "narrow", "set": {"d_ff": 8, "lr_factor": 1e-5}, "paper": "C-ff1024"}, "third", seeds=[1, 5]
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = bench.sweep(workers=3)
    return types.SimpleNamespace(bench=bench, status=status, out=out.getvalue(), err=err.getvalue())


CELLS = [f"{variant}/seed{seed}" for seed in (1, 5) for variant in ("base", "narrow", "third")]


def test_every_cell_runs_once(good):
    assert good.status == 0
    assert good.bench.attempts() == dict.fromkeys(CELLS, 1)
    assert good.bench.trials() == {key: [TrialState.COMPLETE] for key in CELLS}


def test_the_study_is_a_plain_optuna_study(good):
    storage = f"sqlite:///{good.bench.folder}/optuna.db"
    study = optuna.load_study(study_name="s", storage=storage)
    assert study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert {trial.user_attrs["cell"]: trial.value for trial in study.trials} == {
        cell: float(len(cell.split("/")[0])) for cell in CELLS
    }
    for trial in study.trials:
        seed = int(trial.user_attrs["cell"].rpartition("seed")[2])
        assert trial.user_attrs["perplexity"] == 2.0 + seed
        assert trial.user_attrs["bleu"] == trial.value
        assert "error" not in trial.user_attrs
        assert trial.duration is not None


def test_a_study_of_perplexities_is_minimised(bench):
    bench.study("base", metric="perplexity")
    bench.plan(base={"perplexity": 7.5})
    assert bench.sweep() == 0
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{bench.folder}/optuna.db")
    assert (study.direction, study.best_value) == (optuna.study.StudyDirection.MINIMIZE, 7.5)
    assert study.best_trial.user_attrs["bleu"] == 4.0


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_divide_the_cores(good, bench, workers):
    if workers == 3:
        bench = good.bench
    else:
        bench.study("base", seeds=[1])
        assert bench.sweep(workers=workers) == 0
    for file in bench.folder.glob("*/*/environment.json"):
        environment = json.loads(file.read_text())
        assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(max(1, CORES // workers))


def test_a_trial_knows_the_sweep_that_it_belongs_to(good):
    environment = json.loads((good.bench.folder / CELLS[0] / "environment.json").read_text())
    assert environment[SWEEP_VARIABLE] == str(os.getpid())


def test_each_trials_command_stands_in_its_folder(good):
    for cell in CELLS:
        variant, _, seed = cell.partition("/seed")
        command = shlex.split((good.bench.folder / cell / "command").read_text())
        assert command[:2] == [sys.executable, "-S"]
        assert command[3:6] == ["-m", "lit_transformer", "fit"]
        given = dict(itertools.pairwise(command))
        assert Path(given["--config"]).resolve() == good.bench.root / "base.yaml"
        assert given["--run.dir"] == str(good.bench.folder / cell)
        assert (given["--run.study"], given["--run.variant"]) == ("s", variant)
        assert given["--seed_everything"] == seed
        assert ("--model.d_ff" in given) == (variant == "narrow")
    assert float(given["--seed_everything"]) == 5


def test_the_tables_stand_beside_each_other_in_the_studys_order(good):
    assert good.bench.tables() == {"s.csv", "s.md", "s.png"}
    rows = good.bench.rows()
    assert list(rows) == ["base", "narrow", "third"]
    assert [row["seeds"] for row in rows.values()] == ["2", "2", "2"]
    assert rows["narrow"]["perplexity"] == "5.0"  # the mean of 2 + 1 and 2 + 5
    assert rows["narrow"]["paper_row"] == "C-ff1024"


def test_the_end_of_a_sweep_says_what_there_is(good):
    assert (good.bench.out / "s.md").read_text() in good.out
    assert f"written: {good.bench.out / 's'}.csv" in good.out
    assert "6 runs, 3 at a time" in good.err
    assert all(re.search(rf"{cell} done, perplexity \d+\.\d\d, BLEU \d+\.\d\d", good.err) for cell in CELLS)


def test_typed_again_it_runs_nothing_and_writes_the_tables(good):
    for file in good.bench.out.iterdir():
        file.unlink()
    assert good.bench.sweep() == 0
    assert good.bench.attempts() == dict.fromkeys(CELLS, 1)
    assert good.bench.tables() == {"s.csv", "s.md", "s.png"}
    assert good.bench.trials() == {key: [TrialState.COMPLETE] for key in CELLS}


def test_what_is_added_runs_alone(bench):
    """C55: variants, then a seed."""
    bench.study("base", "last")
    assert bench.sweep() == 0
    bench.study("base", "between", "last")
    assert bench.sweep() == 0
    assert bench.attempts() == {"base/seed1": 1, "between/seed1": 1, "last/seed1": 1}
    assert list(bench.rows()) == ["base", "between", "last"]
    bench.study("base", "last", seeds=[1, 2])
    assert bench.sweep() == 0
    assert bench.attempts() == dict.fromkeys(
        ("base/seed1", "base/seed2", "between/seed1", "last/seed1", "last/seed2"), 1
    )
    assert list(bench.rows()) == ["base", "last"]
    assert [row["seeds"] for row in bench.rows().values()] == ["2", "2"]


def test_a_changed_configuration_under_results_stops_the_sweep_and_leaves_its_tables(bench, base, capsys):
    bench.study("base")
    assert bench.sweep() == 0
    before = {file: file.read_bytes() for file in (bench.folder / "study.json", *bench.out.iterdir())}
    bench.configure({**base, "trainer": {**base["trainer"], "max_steps": 5}})
    capsys.readouterr()
    assert bench.sweep() == 1
    message = capsys.readouterr().err
    assert "base/seed1" in message and "trainer.max_steps was 4 and is 5 now" in message
    assert len(message.splitlines()) == 1
    assert {file: file.read_bytes() for file in before} == before
    assert bench.attempts() == {"base/seed1": 1}


def test_a_study_that_changes_its_metric_does_not_show_one_as_the_other(bench, capsys):
    """Refused, or really changed: Optuna's value of a finished trial is what it was told."""
    bench.study("base")
    assert bench.sweep() == 0
    bench.study("base", metric="perplexity")
    if bench.sweep() == 0:
        capsys.readouterr()
        assert main(bench.arguments("status")) == 0
        assert "perplexity 3.00" in capsys.readouterr().out


def test_two_studies_share_folders_but_nothing_else(bench):
    """Each has its own runs and tables, whatever its variants are called."""
    bench.study("base")
    assert bench.sweep() == 0
    bench.study("base", "more", name="t")
    assert bench.sweep() == 0
    assert bench.attempts() == {"base/seed1": 1}
    assert bench.tables() == {"s.csv", "s.md", "s.png", "t.csv", "t.md", "t.png"}
    assert list(bench.rows()) == ["base"]


def test_the_storage_can_be_another_one(bench):
    storage = f"sqlite:///{bench.root}/elsewhere.db"
    bench.study("base")
    assert bench.sweep("--storage", storage) == 0
    assert [t.state for t in optuna.load_study(study_name="s", storage=storage).trials] == [TrialState.COMPLETE]
    assert not (bench.folder / "optuna.db").exists()


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(bench, capsys, workers):
    bench.study("base")
    with pytest.raises(SystemExit) as ending:
        main(bench.arguments("run", "--workers", workers))
    assert ending.value.code == 2
    assert workers in capsys.readouterr().err
    assert not bench.runs.exists()


def test_missing_text_is_said_before_anything_trains(bench, base, capsys):
    bench.configure({**base, "data": {**base["data"], "valid": ["nowhere.de", "nowhere.en"]}})
    bench.study("base")
    assert bench.sweep() == 1
    message = capsys.readouterr().err
    assert "nowhere.de" in message and len(message.splitlines()) == 1
    assert not bench.attempts()


def test_free_workers_go_on_beside_a_long_trial(bench):
    """C57: the long one ends only when all the others have ended."""
    short = [f"short{i}" for i in range(5)]
    bench.study("long", *short)
    bench.plan(long={"until": [f"{name}/seed1/result.json" for name in short]})
    assert ended(bench.fork()) == 0
    assert bench.attempts() == dict.fromkeys(["long/seed1", *(f"{name}/seed1" for name in short)], 1)


def test_data_is_prepared_once_for_all(bench, base, tmp_path):
    bench.configure({**base, "data": {**base["data"], "root": str(tmp_path / "data")}})
    bench.study("base", {"name": "batch", "set": {"data.tokens_per_update": 100}}, seeds=[1, 2])
    assert bench.sweep() == 0
    [store] = (tmp_path / "data").glob("[!.]*")
    assert Store(store).fingerprint


def test_a_variant_on_other_data_is_refused_before_anything_trains(bench, capsys):
    bench.study("base", {"name": "shorter", "set": {"data.max_length": 20}})
    assert bench.sweep() == 1
    assert "shorter: data.max_length = 20 is other data than the first variant's" in capsys.readouterr().err
    assert not bench.attempts()


def test_another_text_under_results_is_refused_before_anything_trains(bench, base, tmp_path, capsys):
    files = {}
    for split in ("train", "valid"):
        files[split] = [str(tmp_path / Path(file).name) for file in base["data"][split]]
        for old, new in zip(base["data"][split], files[split], strict=True):
            Path(new).write_bytes(Path(old).read_bytes())
    bench.configure({**base, "data": {**base["data"], **files, "root": str(tmp_path / "data")}})
    bench.study("base")
    assert bench.sweep() == 0
    for file in files["train"]:
        Path(file).write_text(Path(file).read_text() + "one more\n")
    bench.study("base", "more")
    capsys.readouterr()
    assert bench.sweep() == 1
    assert re.search(r"base/seed1 has a result on data \w+, and the text is \w+ now", capsys.readouterr().err)
    assert bench.attempts() == {"base/seed1": 1}


# Trials that fail


@pytest.fixture(scope="module")
def lame(tmp_path_factory, base) -> types.SimpleNamespace:
    """One cell never works, one works the second time, one is killed each time, one leaves no result."""
    bench = Bench(tmp_path_factory.mktemp("lame"), base)
    bench.study("base", "never", "once", "killed", "empty", "last")
    bench.plan(
        never={"failures": 99, "says": ["first reason", "second reason", "third | reason"], "status": 7},
        once={"failures": 1, "says": ["hiccup"]},
        killed={"failures": 99, "says": ["an old reason"], "signal": signal.SIGKILL},
        empty={"result": False},
    )
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = bench.sweep(workers=2)
    return types.SimpleNamespace(bench=bench, status=status, out=out.getvalue(), err=err.getvalue())


def test_a_cell_that_fails_three_times_is_given_up_and_the_others_finish(lame):
    assert lame.status == 1
    assert lame.bench.attempts() == {
        "base/seed1": 1,
        "never/seed1": 3,
        "once/seed1": 2,
        "killed/seed1": 3,
        "empty/seed1": 3,
        "last/seed1": 1,
    }


def test_a_cell_that_fails_once_is_finished_the_second_time(lame):
    assert lame.bench.trials()["once/seed1"] == [TrialState.FAIL, TrialState.COMPLETE]
    assert lame.bench.rows()["once"]["bleu"] == "4.0"
    assert lame.bench.rows()["once"]["failed"] == ""


def test_the_reason_stands_everywhere_one_would_look(lame):
    failed = {variant["name"]: variant["failed"] for variant in lame.bench.described()["variants"]}
    assert failed["never"] == "exit status 7: third | reason"
    assert failed["base"] == failed["once"] == failed["last"] == ""
    assert lame.bench.rows()["never"]["failed"] == failed["never"]
    assert "reason" in next(line for line in lame.out.splitlines() if line.startswith("| never"))
    assert re.search(r"never/seed1 was given up after 3 failures.*: exit status 7: third \| reason", lame.err)
    assert "never/seed1/log.txt" in lame.err
    trials = optuna.load_study(study_name="s", storage=f"sqlite:///{lame.bench.folder}/optuna.db").trials
    reasons = [trial.user_attrs["error"] for trial in trials if trial.user_attrs["cell"] == "never/seed1"]
    assert reasons == [f"exit status 7: {which} reason" for which in ("first", "second", "third |")]


def test_a_reason_is_never_that_of_an_earlier_try(lame):
    """The log goes on from try to try, and a killed one says nothing."""
    failed = {variant["name"]: variant["failed"] for variant in lame.bench.described()["variants"]}
    assert failed["killed"] == "killed by signal 9"


def test_a_trial_without_a_result_has_failed(lame):
    failed = {variant["name"]: variant["failed"] for variant in lame.bench.described()["variants"]}
    assert failed["empty"]
    assert lame.bench.trials()["empty/seed1"] == [TrialState.FAIL] * 3
    assert lame.bench.rows()["empty"]["bleu"] == ""


def test_the_log_holds_every_try(lame):
    log = (lame.bench.folder / "never" / "seed1" / "log.txt").read_text()
    assert log.split("\n")[:3] == ["first reason", "second reason", "third | reason"]


def test_given_up_is_given_up_when_typed_again(lame, capsys):
    before = lame.bench.attempts()
    assert lame.bench.sweep() == 1
    assert lame.bench.attempts() == before
    assert "never/seed1 was given up" in capsys.readouterr().err
    assert lame.bench.described()["variants"][1]["failed"] == "exit status 7: third | reason"


def test_what_was_given_up_gets_three_more_tries_when_asked_for(bench):
    bench.study("base", "odd", "never")
    bench.plan(odd={"failures": 4}, never={"failures": 99})
    assert bench.sweep() == 1
    assert bench.attempts() == {"base/seed1": 1, "odd/seed1": 3, "never/seed1": 3}
    assert bench.sweep("--retry") == 1
    assert bench.attempts() == {"base/seed1": 1, "odd/seed1": 5, "never/seed1": 6}
    assert [variant["failed"] for variant in bench.described()["variants"]] == ["", "", "exit status 3"]
    assert (bench.rows()["odd"]["bleu"], bench.rows()["odd"]["failed"]) == ("3.0", "")


def test_a_variant_that_was_given_up_can_be_changed_and_retried(bench):
    """Or a mistake in the file could only be put right under another name."""
    bench.study("base", {"name": "odd", "set": {"d_ff": 8}})
    bench.plan(odd={"failures": 3})
    assert bench.sweep() == 1
    bench.study("base", {"name": "odd", "set": {"d_ff": 16}})
    assert bench.sweep("--retry") == 0
    assert bench.attempts() == {"base/seed1": 1, "odd/seed1": 4}
    assert (bench.rows()["odd"]["failed"], bench.rows()["odd"]["set"]) == ("", "d_ff=16")


@pytest.mark.parametrize(("metric", "perplexity"), [("bleu", None), ("perplexity", None), ("perplexity", "nan")])
def test_a_perplexity_that_is_no_number_is_neither_a_crash_nor_an_endless_loop(bench, metric, perplexity):
    """C50: a run that diverged has its BLEU; as a perplexity it is done once, or given up, but never a number."""
    bench.study("hot", "base", metric=metric)
    bench.plan(hot={"perplexity": float(perplexity) if perplexity else None})
    pid = bench.fork(workers=1)
    status = ended(pid)
    assert "Traceback" not in bench.said(pid)
    assert status in ((0,) if metric == "bleu" else (0, 1))
    assert bench.attempts()["base/seed1"] == 1
    assert bench.attempts()["hot/seed1"] <= (1 if metric == "bleu" else sweep.MAX_FAILURES)
    assert bench.tables() == {"s.csv", "s.md", "s.png"}
    if status == 1:
        assert bench.described()["variants"][0]["failed"]


def test_a_launcher_that_is_not_there_is_a_plain_error_and_can_be_put_right(bench):
    bench.study("base", "more", launcher=[str(bench.root / "nowhere")])
    pid = bench.fork(workers=1)
    assert ended(pid) == 1
    assert str(bench.root / "nowhere") in bench.said(pid)
    assert "Traceback" not in bench.said(pid)
    bench.study("base", "more")
    assert ended(bench.fork(workers=1)) == 0
    assert_done_once(bench, "base/seed1", "more/seed1")


def test_a_results_folder_that_cannot_be_written_is_a_plain_error_and_costs_no_result(bench, capfd):
    """C60"""
    bench.study("base")
    bench.out.write_text("mine")
    assert bench.sweep() == 1
    message = capfd.readouterr().err
    assert str(bench.out) in message and "Traceback" not in message
    bench.out.unlink()
    assert bench.sweep() == 0
    assert bench.tables() == {"s.csv", "s.md", "s.png"}
    assert bench.attempts() == {"base/seed1": 1}


def test_a_result_that_was_removed_is_made_again(bench):
    """A result is a file: what Optuna remembers is no row of a table."""
    bench.study("base", "more")
    assert bench.sweep() == 0
    (bench.folder / "more" / "seed1" / "result.json").unlink()
    assert bench.sweep() == 0
    assert bench.attempts() == {"base/seed1": 1, "more/seed1": 2}
    assert bench.rows()["more"]["seeds"] == "1"


# Sweeps that are stopped or killed


@pytest.mark.parametrize(
    ("number", "whom", "status"),
    [
        pytest.param(signal.SIGKILL, os.kill, -signal.SIGKILL, id="kill -9 of the sweep"),
        pytest.param(signal.SIGTERM, os.kill, 143, id="a batch system's SIGTERM to the sweep"),
        pytest.param(signal.SIGUSR1, os.kill, 138, id="a batch system's warning"),
        pytest.param(signal.SIGINT, os.killpg, 130, id="Ctrl-C, which reaches the trials too"),
    ],
)
def test_stopped_in_the_middle_it_goes_on_where_it_was(bench, monkeypatch, number, whom, status):
    # So that a stop taken for a failure of the trial would show after one.
    monkeypatch.setattr(sweep, "MAX_FAILURES", 1)
    bench.study("base", "slow", "late")
    bench.plan(slow={"until": ["go"]}, late={"until": ["go"]})
    pid = bench.fork()
    wait_for(lambda: set(bench.attempts()) == {"base/seed1", "slow/seed1", "late/seed1"}, "two wait")
    whom(pid, number)
    assert ended(pid) == status
    if status > 0:
        said = bench.said(pid).splitlines()
        assert "s: stopping; the same command goes on" in said
        assert said[-1] == f"lit-transformer sweep: stopped by {number.name}; the same command goes on"
        assert bench.trials()["slow/seed1"] == bench.trials()["late/seed1"] == [TrialState.FAIL]
        for file in bench.folder.glob("*/*/attempts"):
            assert not alive(int(file.read_text())), "a trial outlives its sweep"
            assert file.with_name("interrupted").exists() != (file.parts[-3] == "base"), "it could not end well"
    assert not (bench.folder / "slow" / "seed1" / "result.json").exists()
    (bench.folder / "go").touch()
    assert ended(bench.fork(workers=1)) == 0
    assert bench.attempts() == {"base/seed1": 1, "slow/seed1": 2, "late/seed1": 2}
    assert_done_once(bench, "base/seed1", "slow/seed1", "late/seed1")
    assert set(bench.rows()) == {"base", "slow", "late"}


@pytest.mark.slow
def test_a_trial_that_does_not_listen_is_killed_with_its_sweep(bench):
    bench.study("deaf")
    bench.plan(deaf={"until": ["go"], "stubborn": True})
    pid = bench.fork()
    wait_for(lambda: bench.attempts() == {"deaf/seed1": 1}, "it runs")
    time.sleep(1)  # so that it does not listen any more
    os.kill(pid, signal.SIGTERM)
    assert ended(pid) == 143
    assert not alive(int((bench.folder / "deaf" / "seed1" / "attempts").read_text()))
    assert bench.trials()["deaf/seed1"] == [TrialState.FAIL]


@pytest.mark.slow
def test_the_real_command_goes_on_after_kill_9_and_after_an_interrupt(bench):
    """As above, with what a fork of this process does not have: its own start and its own end."""
    bench.study("base", "slow", "late")
    bench.plan(slow={"until": ["go"]}, late={"until": ["go"]})
    command = [sys.executable, "-m", "lit_transformer", *bench.arguments("run", "--workers", "2")]
    for attempt, (number, expected) in enumerate(((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)), 1):
        with open(bench.root / "said", "w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
        try:
            counts = {"base/seed1": 1, "slow/seed1": attempt, "late/seed1": attempt}
            wait_for(lambda counts=counts: bench.attempts() == counts, f"the trials run: {counts}")
            process.send_signal(number)
            assert process.wait(LIMIT) == expected
        finally:
            process.kill()
            process.wait()
    said = (bench.root / "said").read_text()
    assert said.splitlines()[-1] == "lit-transformer sweep: stopped by SIGINT; the same command goes on"
    assert "Traceback" not in said
    (bench.folder / "go").touch()
    assert subprocess.run(command, check=False).returncode == 0
    assert bench.attempts() == {"base/seed1": 1, "slow/seed1": 3, "late/seed1": 3}
    assert_done_once(bench, "base/seed1", "slow/seed1", "late/seed1")


def test_two_sweeps_at_once_share_a_study(bench):
    """C54: eight workers in two processes that start together, while somebody looks on."""
    cells = [f"v{i}/seed{seed}" for i in range(12) for seed in (1, 2)]
    bench.study(*(f"v{i}" for i in range(12)), seeds=[1, 2])
    pids = [bench.fork(workers=4) for _ in range(2)]
    looks, left = 0, set(pids)
    statuses = {}
    end = time.monotonic() + 2 * LIMIT
    while left and time.monotonic() < end:
        for pid in list(left):
            child, status = os.waitpid(pid, os.WNOHANG)
            if child:
                left.remove(pid)
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if (bench.folder / "study.json").is_file():
            looks += sum(map(len, bench.trials().values())) > 0
        time.sleep(0.1)
    for pid in left:
        os.killpg(pid, signal.SIGKILL)
    assert [statuses.get(pid) for pid in pids] == [0, 0], "".join(bench.said(pid) for pid in pids)
    assert bench.attempts() == dict.fromkeys(cells, 1)
    assert bench.trials() == {cell: [TrialState.COMPLETE] for cell in cells}
    assert looks
    ran = ["".join(re.findall(r"(v\d+/seed\d) done", bench.said(pid))) for pid in pids]
    assert all(ran), "both took part"
    assert len(bench.rows()) == 12 and {row["seeds"] for row in bench.rows().values()} == {"2"}


def test_a_sweep_takes_over_what_another_one_leaves(bench):
    """It waits for the other's trial, though nothing else is left to do."""
    bench.study("slow", "quick")
    bench.plan(slow={"until": ["go"]})
    first = bench.fork(workers=1)
    wait_for(lambda: bench.attempts() == {"slow/seed1": 1}, "the first sweep runs it")
    second = bench.fork(workers=1)
    wait_for(lambda: "quick/seed1 done" in bench.said(second), "the second has done the rest")
    time.sleep(1)  # so that it has looked for more
    os.kill(first, signal.SIGKILL)
    assert ended(first) == -signal.SIGKILL
    (bench.folder / "go").touch()
    assert ended(second) == 0
    assert bench.attempts() == {"slow/seed1": 2, "quick/seed1": 1}
    assert_done_once(bench, "slow/seed1", "quick/seed1")


def test_two_sweeps_of_one_name_with_other_configurations_never_mix(bench, base):
    """C60: the first has no result yet, so that nothing but its trial says that it is there."""
    bench.study("base", "more")
    bench.plan(base={"until": ["go"]})
    first = bench.fork(workers=1)
    wait_for(lambda: bench.attempts().get("base/seed1"), "the first sweep trains")
    bench.configure({**base, "trainer": {**base["trainer"], "max_steps": 5}})
    second = bench.fork(workers=1)
    try:
        wait_for(lambda: "max_steps" in bench.said(second) or bench.attempts().get("more/seed1"), "the second acts")
        said, attempts = bench.said(second), bench.attempts()
    finally:
        (bench.folder / "go").touch()
        statuses = ended(first), ended(second)
    assert "max_steps" in said
    assert attempts == {"base/seed1": 1}
    assert statuses == (0, 1)


def test_a_variant_that_is_changed_while_a_sweep_runs_is_shown_as_what_ran(bench):
    """The first sweep knows the file as it was; the second takes a cell of it with another value, and ends first."""
    bench.study("base", {"name": "more", "set": {"d_ff": 8}}, "tail")
    bench.plan(base={"until": ["go"]}, tail={"until": ["end"]})
    first = bench.fork(workers=1)
    wait_for(lambda: bench.attempts().get("base/seed1"), "the first sweep trains")
    bench.study("base", {"name": "more", "set": {"d_ff": 16}})
    second = bench.fork(workers=1)
    wait_for(lambda: "d_ff" in bench.said(second) or "more/seed1 done" in bench.said(second), "the second acts")
    (bench.folder / "go").touch()
    ended(second)
    (bench.folder / "end").touch()
    ended(first)
    command = shlex.split((bench.folder / "more" / "seed1" / "command").read_text())
    assert bench.rows()["more"]["set"] == f"d_ff={command[command.index('--model.d_ff') + 1]}"


def test_a_trial_that_optuna_gave_up_meanwhile_does_not_end_the_sweep(bench):
    """As after a laptop's sleep: its heartbeat is old, somebody marks it failed, and yet it comes to its end."""
    bench.study("slow", "late")
    bench.plan(slow={"until": ["go"]}, late={"until": ["slow/seed1/result.json"]})
    pid = bench.fork()
    wait_for(lambda: bench.attempts().get("slow/seed1") == 1 and bench.attempts().get("late/seed1") == 1, "both run")
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{bench.folder}/optuna.db")
    for trial in study.trials:
        if trial.user_attrs["cell"] == "slow/seed1":
            study.tell(trial.number, state=TrialState.FAIL)
    (bench.folder / "go").touch()
    assert ended(pid) == 0, bench.said(pid)
    assert_done_once(bench, "slow/seed1", "late/seed1")


@pytest.mark.parametrize(
    ("worker", "fresh", "free"),
    [
        pytest.param("elsewhere:{dead}", True, False, id="lives on another host"),
        pytest.param("elsewhere:{dead}", False, True, id="was lost on another host"),
        pytest.param(f"{socket.gethostname()}:{{dead}}", True, True, id="was killed on this host"),
        pytest.param(f"{socket.gethostname()}:{{alive}}", True, False, id="lives on this host"),
        pytest.param(f"{socket.gethostname()}:{{alive}}", False, True, id="was lost and its number taken since"),
    ],
)
def test_a_cell_comes_free_when_its_worker_is_dead(bench, worker, fresh, free):
    gone = subprocess.Popen(["true"])
    gone.wait()
    bench.study("base")
    engine = Engine(bench.file, bench.runs, 1, None)
    trials = engine.trials
    trials.open()
    claimed = trials.claim()
    assert claimed is not None
    assert trials.claim() is None
    name = worker.format(dead=gone.pid, alive=os.getpid())
    trials.storage.set_trial_user_attr(claimed[1]._trial_id, "worker", name)
    if not fresh:
        with sqlite3.connect(bench.folder / "optuna.db") as database:
            database.execute("UPDATE trial_heartbeats SET heartbeat = datetime('now', '-10 minutes')")
    again = trials.claim()
    assert (again is not None) == free
    states = bench.trials()["base/seed1"]
    assert states == ([TrialState.FAIL, TrialState.RUNNING] if free else [TrialState.RUNNING])
    running = [cell for cell, state, _ in engine.grid() if state == "running"]
    assert running == (["base/seed1"] if free or "{dead}" not in worker or "elsewhere" in worker else [])


# Looking on


def test_status_shows_how_each_cell_stands(bench, capsys):
    bench.study("base", "never", "slow", "late", "later", seeds=[1])
    bench.plan(
        never={"failures": 99, "says": ["out of luck"] * 3},
        slow={"until": ["go"], "progress": '{"step": 3, "max_steps": 4, "seconds_left": 83.2}'},
        late={"until": ["go"], "progress": "{"},
    )
    pid = bench.fork()
    try:
        wait_for(lambda: bench.attempts().get("late/seed1"), "both workers wait")
        capsys.readouterr()
        assert main(bench.arguments("status")) == 0
    finally:
        os.kill(pid, signal.SIGTERM)
        ended(pid)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    by = f"by {socket.gethostname()}:{pid}"
    assert {cell: re.split(r"\s{2,}", line.replace(" ", "  ", 1))[0] for cell, line in lines.items()} == {
        "base/seed1": "done",
        "never/seed1": "failed",
        "slow/seed1": "running",
        "late/seed1": "running",
        "later/seed1": "waiting",
    }
    assert "bleu 4.00" in lines["base/seed1"]
    assert "exit status 3: out of luck" in lines["never/seed1"]
    assert "update 3 of 4, 1:23 left" in lines["slow/seed1"] and by in lines["slow/seed1"]
    assert "starting" in lines["late/seed1"] and by in lines["late/seed1"]


def test_status_of_a_study_that_has_not_begun_says_so_and_begins_nothing(bench, capsys):
    bench.study("base")
    assert main(bench.arguments("status")) == 1
    assert "sweep run" in capsys.readouterr().err
    assert not bench.runs.exists()


def test_a_sweep_says_how_far_it_is(bench, monkeypatch):
    monkeypatch.setattr(sweep, "SHOW_SECONDS", 0)
    bench.study("base", "slow", "late")
    bench.plan(slow={"until": ["go"], "progress": '{"step": 1, "max_steps": 4, "seconds_left": 30.0}'})
    pid = bench.fork(workers=1)
    try:
        wait_for(lambda: "slow/seed1 update 1 of 4" in bench.said(pid), "progress is said")
    finally:
        (bench.folder / "go").touch()
    assert ended(pid) == 0
    line = next(line for line in bench.said(pid).splitlines() if "slow/seed1 update 1 of 4" in line)
    assert re.fullmatch(r"s: 1 of 3 done \| slow/seed1 update 1 of 4, 0:30 left \| about [\d:]+ left", line)


# The real thing


@pytest.fixture(scope="module")
def real(tmp_path_factory, base) -> types.SimpleNamespace:
    """Two variants, really trained."""
    bench = Bench(tmp_path_factory.mktemp("real"), base)
    bench.study(
        "base", {"name": "one-head", "set": {"num_heads": 1, "d_k": 4}, "paper": "A-h1"}, launcher=[], seeds=[3]
    )
    status = bench.sweep(workers=2)
    results = {
        name: json.loads(file.read_text())
        for name in ("base", "one-head")
        if (file := bench.folder / name / "seed3" / "result.json").is_file()
    }
    return types.SimpleNamespace(bench=bench, status=status, results=results)


def test_a_real_study_ends_with_results_and_tables(real):
    assert real.status == 0
    assert set(real.results) == {"base", "one-head"}
    assert real.bench.tables() == {"s.csv", "s.md", "s.png"}
    assert_done_once(real.bench, "base/seed3", "one-head/seed3")


def test_a_real_result_says_what_its_run_was(real):
    store = Store(next(Path(real.results["base"]["config"]["data"]["root"]).glob("[!.]*")))
    for name, result in real.results.items():
        assert (result["study"], result["variant"], result["seed"], result["updates"]) == ("s", name, 3, 4)
        assert (result["split"], result["bleu"]["sentences"], result["vocab_size"]) == ("valid", 8, 300)
        assert (result["data"], result["tokenizer"]) == (store.fingerprint, store.tokenizer_fingerprint)
        assert result["bleu"]["signature"].startswith("nrefs:1|case:mixed") and "tok:13a" in result["bleu"]["signature"]
        assert "few sentences" in result["bleu"]["note"]
        assert result["compound_split_bleu"]["signature"] != result["bleu"]["signature"]
        assert result["tokens"] == int((store.sentences("valid", "tgt").lengths + 1).sum())
        assert result["config"]["model"]["num_heads"] == (1 if name == "one-head" else 2)
        assert result["flops"] > 0 and result["tgt_tokens"] > 0 and result["averaged"] == []


def test_a_real_results_parameters_are_those_of_its_variant(real):
    """One head's query and key are 4 wide, in place of two of 8 each; its value is 16, in place of two of 8."""
    widths = {name: result["parameters"] for name, result in real.results.items()}
    assert widths["base"] - widths["one-head"] == 3 * (2 * 16 * (2 * 8 - 4))


def test_a_real_csv_holds_the_numbers_of_its_files(real):
    for name, row in real.bench.rows().items():
        result = real.results[name]
        assert float(row["perplexity"]) == result["perplexity"]
        assert float(row["bleu"]) == result["bleu"]["score"]
        assert float(row["compound_split_bleu"]) == result["compound_split_bleu"]["score"]
        assert int(row["parameters"]) == result["parameters"]
        assert (int(row["updates"]), int(row["tgt_tokens"])) == (4, result["tgt_tokens"])


def test_a_real_run_leaves_its_whole_record(real):
    folder = real.bench.folder / "base" / "seed3"
    assert {"config.yaml", "command", "log.txt", "result.json", "checkpoints", "hypotheses.valid.txt"} <= {
        file.name for file in folder.iterdir()
    }
    assert len((folder / "hypotheses.valid.txt").read_text().split("\n")) == 8 + 1
    assert "update 4 of 4" in (folder / "log.txt").read_text()


def test_a_real_trials_command_can_be_typed_by_hand(real, capsys):
    program, *command = shlex.split((real.bench.folder / "one-head" / "seed3" / "command").read_text())
    assert (program, command[:2]) == (sys.executable, ["-m", "lit_transformer"])
    assert main(command[2:]) == 0
    assert "is finished: 4 updates" in capsys.readouterr().err
    assert command[2:] == real.results["one-head"]["command"]


@pytest.mark.slow
def test_a_real_trial_ends_by_itself_when_its_sweep_is_killed(bench, base):
    bench.configure({**base, "trainer": {**base["trainer"], "max_steps": 1_000_000}})
    bench.study("base", launcher=[])
    pid = bench.fork(workers=1)
    progress = bench.folder / "base" / "seed1" / "progress.json"
    wait_for(progress.is_file, "it trains")
    trial = json.loads(progress.read_text())["pid"]
    assert alive(trial)
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL
    wait_for(lambda: not alive(trial), "the trial has ended")


@pytest.mark.slow
def test_trials_of_several_processes_are_one_trial_each_and_do_not_clash(bench, base):
    """C51, C53: over heads and dropout, two at a time on one host, each with two processes."""
    trainer = {**base["trainer"], "devices": 2, "strategy": "ddp"}
    bench.configure({**base, "trainer": trainer})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    changes = {"base": {}, "one-head": {"num_heads": 1}, "dropout": {"dropout": 0.3}}
    bench.study(*({"name": name, "set": change} for name, change in changes.items()), launcher=launcher)
    assert bench.sweep(workers=2) == 0
    assert bench.trials() == {f"{name}/seed1": [TrialState.COMPLETE] for name in changes}
    assert sorted(path.name for path in bench.folder.iterdir() if path.is_dir()) == sorted(changes)
    for name, change in changes.items():
        folder = bench.folder / name / "seed1"
        result = json.loads((folder / "result.json").read_text())
        assert (result["processes"], result["updates"]) == (2, 4)
        # Both ranks are started by one command, so they cannot have been given different values.
        command = (folder / "command").read_text()
        assert all(f"--model.{key} {value}" in command for key, value in change.items())
        assert {key: result["config"]["model"][key] for key in change} == change
