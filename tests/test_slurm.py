"""Runs and studies as jobs of a SLURM cluster, which the tests start themselves."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import assert_done_once, ended
from slurm_cluster import Cluster, missing
from test_exact import STEPS, assert_same_run, fit_command, losses, run

from lit_transformer import commands
from lit_transformer.__main__ import main
from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.cli import TrainerConfig
from lit_transformer.ranks import check_processes

SCRIPT = Path(__file__).parents[1] / "conf" / "slurm.sbatch"
TWO_NODES = ["--nodes", "2", "--ntasks-per-node", "1"]
NO_DROPOUT = {"model.dropout": 0.0}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Jobs take this environment along: the script's `python` is the one that tests.
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin")
        patch.setenv("OMP_NUM_THREADS", "1")
        if reason := missing():
            pytest.skip(reason)
        cluster = Cluster()
        patch.setenv("SLURM_CONF", str(cluster.conf))
        yield cluster
        cluster.stop()


@pytest.fixture(scope="module")
def straight(slurm, corpus, tmp_path_factory) -> Path:
    """A run on two nodes, typed with srun in an interactive allocation."""
    folder = tmp_path_factory.mktemp("straight")
    two_nodes = {"trainer.num_nodes": 2, "trainer.strategy": "ddp"}
    run(["salloc", *TWO_NODES, "srun", *fit_command(corpus, folder, **NO_DROPOUT, **two_nodes)])
    return folder


def newest(folder: Path) -> int:
    return max((step for step, _ in list_checkpoints(folder / "checkpoints")), default=0)


@pytest.mark.slow
def test_two_nodes_train_as_one_process_does(corpus, straight, tmp_path):
    run(fit_command(corpus, tmp_path, **NO_DROPOUT))
    results = [json.loads((folder / "result.json").read_text()) for folder in (tmp_path, straight)]
    assert [result["processes"] for result in results] == [1, 2]
    assert len(losses(tmp_path)) > STEPS
    assert losses(tmp_path) == pytest.approx(losses(straight), rel=1e-5)


@pytest.mark.slow
def test_a_job_that_is_told_of_its_time_limit_goes_on_in_its_next_part(slurm, corpus, straight, tmp_path):
    """The example's script, which asks for the signal; here it comes when training has begun."""
    log = tmp_path / "log"
    small = [*TWO_NODES, "--gres", "none", "--cpus-per-task", "1", "--output", str(log)]
    number = slurm.run("sbatch", "--parsable", *small, str(SCRIPT), *fit_command(corpus, tmp_path, **NO_DROPOUT)[4:])
    slurm.wait_for(lambda: newest(tmp_path), "it trains")
    slurm.run("scancel", "--signal", "USR1", number)  # to srun's tasks and not to the script, as before the limit
    slurm.wait_for(lambda: slurm.job(number).get("Restarts") == "1", "it is in the queue again")
    slurm.wait_for(lambda: not slurm.jobs(), "it has ended", limit=200)
    assert slurm.job(number)["JobState"] == "COMPLETED", log.read_text()
    assert "going on after update" in log.read_text()
    assert_same_run(tmp_path, straight)


@pytest.mark.slow
def test_a_studys_trials_are_jobs_that_end_with_their_sweep(slurm, bench, small_base):
    trainer = {**small_base["trainer"], "max_steps": 30, "num_nodes": 2, "strategy": "ddp"}
    bench.configure({**small_base, "trainer": trainer})
    variants = ["base", {"name": "wide", "set": {"d_ff": 64}}]
    bench.study(*variants, launcher=["srun", *TWO_NODES, sys.executable])
    folder, reached = bench.folder / "base" / "seed1", 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        pid = bench.fork(workers=1)
        slurm.wait_for(lambda past=reached: newest(folder) > past, "it trains")
        os.kill(pid, number)
        assert ended(pid) == status, bench.said(pid)
        slurm.wait_for(lambda: not slurm.jobs(), "no job is left", limit=20)
        reached = newest(folder)
        assert reached < trainer["max_steps"]
    assert bench.sweep(workers=2) == 0
    assert f"going on after update {reached}" in (folder / "log.txt").read_text()
    assert_done_once(bench, "base/seed1", "wide/seed1")
    assert set(bench.rows()) == {"base", "wide"}
    assert not slurm.jobs()


# What srun tells its tasks, without a cluster

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
TASK = {**ALLOCATION, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "2"}
TASK |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS_PER_NODE": "1"}


def build(monkeypatch, environment: dict[str, str], **options):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    trainer = TrainerConfig(accelerator="cpu", **options).build(logger=False)
    check_processes(trainer)
    return trainer


def test_tasks_of_srun_are_one_run_in_an_interactive_job_too(monkeypatch):
    trainer = build(monkeypatch, TASK, devices=1, num_nodes=2, strategy="ddp")
    assert (trainer.world_size, trainer.global_rank) == (2, 1)


@pytest.mark.parametrize(("devices", "more"), [(1, {}), (2, {"SLURM_STEP_NUM_TASKS": "1"})])
@pytest.mark.parametrize("name", ["interactive", "batch"])
def test_a_command_alone_in_an_allocation_waits_for_nobody(monkeypatch, devices, more, name):
    """A batch script without srun, the shell of salloc, of srun --pty: Lightning starts what more there is."""
    alone = {**ALLOCATION, "SLURM_JOB_NAME": name, "SLURM_PROCID": "0", **more}
    trainer = build(monkeypatch, alone, devices=devices, strategy="ddp")
    assert (trainer.world_size, trainer.global_rank) == (devices, 0)


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        (TASK, {"devices": 1}, "a launcher has started 2 processes, and trainer.devices x trainer.num_nodes is 1"),
        (TASK, {"devices": 2, "num_nodes": 2, "strategy": "ddp"}, "trainer.devices x trainer.num_nodes is 4"),
        (ALLOCATION, {"devices": 1, "num_nodes": 2, "strategy": "ddp"}, "trainer.num_nodes = 2: nobody has started"),
    ],
)
def test_another_number_of_processes_than_expected_is_refused(monkeypatch, environment, options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        build(monkeypatch, environment, **options)


def test_a_job_whose_time_ends_while_it_scores_goes_on_as_well(monkeypatch, small_base, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" > "$0.said"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(commands, "score", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    (tmp_path / "base.yaml").write_text(json.dumps(small_base))
    fit = ["fit", "--config", str(tmp_path / "base.yaml"), "--run.dir", str(tmp_path / "run")]
    assert main(fit) == 128 + signal.SIGUSR1
    assert (tmp_path / "scontrol.said").read_text() == "requeue 7\n"


@pytest.mark.parametrize(
    ("variable", "line", "status"), [(True, True, -signal.SIGKILL), (True, False, 0), (False, True, 0)]
)
def test_a_trial_ends_when_the_sweep_that_holds_its_input_is_gone(monkeypatch, variable, line, status):
    """And neither where a launcher gives it nothing to read, nor where `fit` was typed behind a pipe."""
    if variable:
        monkeypatch.setenv(commands.SWEEP_VARIABLE, "1")
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writing)
        os.dup2(reading if line else os.open(os.devnull, os.O_RDONLY), 0)
        commands._stop_with_the_sweep()
        time.sleep(2)
        os._exit(0)
    os.close(reading)
    os.close(writing)
    assert ended(pid) == status


def test_a_sweep_that_is_a_task_of_srun_starts_trials_that_are_none(monkeypatch, bench):
    """As one worker on each node of a job."""
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    bench.study("base")
    assert bench.sweep() == 0
    environment = json.loads((bench.folder / "base/seed1/environment.json").read_text())
    assert environment["SLURM_JOB_ID"] == "7"  # an srun in front of the trial starts it within the same job
    assert not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS"} & set(environment)


def test_why_a_trial_failed_is_not_that_srun_noticed_it(bench):
    bench.study("base")
    reason = "lit-transformer fit: error: no such device\nsrun: error: n2: task 1: Exited with exit code 1"
    bench.plan(base={"failures": 3, "says": [reason] * 3})
    assert bench.sweep() == 1
    assert bench.rows()["base"]["failed"].endswith("lit-transformer fit: error: no such device")
