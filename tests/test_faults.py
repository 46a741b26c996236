"""Kills at random moments, full and read-only disks, random runs of two ranks.

`LIT_TRANSFORMER_FAULTS=20 python -m pytest -m faults -s` does twenty times as many and prints how many.
"""

import os
import random
import signal
import subprocess
import time

import pytest
from conftest import write_corpus
from ranks import kill_session, run_ranks
from test_exact import assert_same_run, environment, fit_command, kill_when_past, last, run

from lit_transformer.__main__ import main
from lit_transformer.checkpoint import list_checkpoints, load_checkpoint
from lit_transformer.tokenizer import Tokenizer

TIMES = int(os.environ.get("LIT_TRANSFORMER_FAULTS", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.faults]


def forked(command, folder):
    """The command in a session of its own, without the seconds that Python takes to start."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        with open(folder / "said", "a") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os._exit(main(command[3:]))
    finally:
        os._exit(70)


def test_killed_at_random_moments_the_newest_checkpoint_always_loads_and_the_run_is_the_same(corpus, tmp_path):
    kills, rng = 50 * TIMES, random.Random(0)
    # Checkpoints at every update: many of the moments are in the middle of a save.
    options = {"trainer.max_steps": 4 * kills, "run.checkpoint_every": 1, "model.validate_every": 50}
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    for folder in (killed, straight):
        folder.mkdir()
    command = fit_command(corpus, killed, **options)
    pid, half = 0, 0
    try:
        for _ in range(kills):
            reached = newest(killed)
            pid = forked(command, killed)
            while newest(killed) <= reached:
                assert os.waitpid(pid, os.WNOHANG) == (0, 0), (killed / "said").read_text()[-2000:]
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            step, path = list_checkpoints(killed / "checkpoints")[-1]
            assert load_checkpoint(path)["global_step"] == step
            half += any(path.parent.glob(".step-*"))
    finally:
        kill_session(pid)
    print(f"{kills} kills, {half} of them in the middle of a save, up to update {newest(killed)}")
    assert half
    run(command)
    run(fit_command(corpus, straight, **options))
    assert_same_run(killed, straight, 4 * kills)
    assert not list((killed / "checkpoints").glob(".step-*")), "what a kill left half-written goes"


def newest(folder):
    return max((step for step, _ in list_checkpoints(folder / "checkpoints")), default=0)


RUNS = """
import random, sys
from pathlib import Path
import torch
from conftest import make_data, make_module, make_trainer, write_corpus
from lightning.pytorch.strategies import DDPStrategy
from datetime import timedelta
runs, folder = int(sys.argv[1]), Path(sys.argv[2])
for number in range(runs):
    rng = random.Random(number)
    corpus = {"source": "files", "src_lang": "en", "tgt_lang": "en", "root": str(folder / "data"), "vocab_size": 300}
    text = folder / f"text{number % 20}"
    corpus |= {split: [str(text / f"{split}.{side}") for side in ("src", "tgt")] for split in ("train", "valid")}
    tokens = rng.choice([20, 60, 200, 1000])
    data = make_data(
        corpus, tokens_per_update=tokens, max_tokens=rng.choice([50, 70, 400]), num_workers=rng.choice([0, 0, 0, 1])
    )
    data.use_tokenizer((folder / "tokenizer.model").read_bytes())
    model = make_module(
        validate_every=rng.randint(1, 4), bleu_every=rng.randint(0, 2),
        bleu_sentences=rng.randint(1, 3), dropout=0.1,
    )
    trainer = make_trainer(
        folder / f"run{number}", every=rng.randint(1, 4), keep=2, max_steps=rng.randint(1, 7), devices=2,
        strategy=DDPStrategy(timeout=timedelta(seconds=60)), gradient_clip_val=rng.choice([None, 0.1]),
    )
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)
    weights = sum(p.detach().double().sum() for p in model.parameters()).item()
    accumulation = trainer.accumulate_grad_batches
    print(number, trainer.global_step, accumulation, model.evaluation.nll, weights, flush=True)
"""


def test_random_runs_of_two_ranks_end_without_a_deadlock(tmp_path):
    """Odd sizes, fewer sentences than ranks, accumulation that does not divide, empty micro-batches."""
    runs, rng = 100 * TIMES, random.Random(1)
    for number in range(20):
        sizes = {"train": rng.choice([1, 2, 3, 7, 40, 101]), "valid": rng.choice([1, 1, 2, 3, 5]), "test": 1}
        write_corpus(tmp_path / f"text{number}", **sizes, seed=number)
    everything = "".join((tmp_path / f"text{number}/train.src").read_text() for number in range(20))
    tokenizer, _ = Tokenizer.train(iter(everything.splitlines()), 300)  # one sentence is too little for one of its own
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.model)
    first, second = run_ranks(RUNS, 2, runs, tmp_path, timeout=3000 * TIMES)
    ended = [line.split() for line in first.splitlines() if line[:1].isdigit()]
    assert [int(line[0]) for line in ended] == list(range(runs))
    assert first.splitlines()[-1] in second, "both ranks hold the same weights and scores"
    assert {line for line in second.splitlines() if line[:1].isdigit()} == {" ".join(line) for line in ended}
    accumulations = {int(line[2]) for line in ended}
    print(f"{runs} runs ended; accumulations {sorted(accumulations)}")
    assert len(accumulations) > 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, and what changes it."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)

    if os.getuid() != 0:
        pytest.skip("mounting a small disk needs root")
    made = mount("-t", "tmpfs", "-o", "size=700k", "tmpfs")
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    yield folder, lambda option: mount("-o", f"remount,{option}")
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_up_costs_no_checkpoint_and_the_run_goes_on_when_there_is_space(
    ranks, corpus, small_disk, tmp_path
):
    folder, remount = small_disk
    several = {"trainer.devices": 2, "trainer.strategy": "ddp"} if ranks == 2 else {}
    run(fit_command(corpus, tmp_path / "straight", **several))
    command = fit_command(corpus, folder / "run", **several)
    failed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert failed.returncode == 1
    errors = [line for line in failed.stderr.splitlines() if line.startswith("lit-transformer")]
    assert any("the disk is full; free some space and type the same command again" in line for line in errors), errors
    assert "Traceback" not in failed.stderr
    found = list_checkpoints(folder / "run/checkpoints")
    assert found
    assert all(load_checkpoint(path)["global_step"] == step for step, path in found)
    assert not list((folder / "run/checkpoints").glob(".step-*"))
    assert remount("size=50m").returncode == 0
    run(command)
    assert_same_run(folder / "run", tmp_path / "straight")


def test_a_disk_that_can_only_be_read_is_named(corpus, small_disk):
    folder, remount = small_disk
    remount("size=50m")
    command = fit_command(corpus, folder / "run")
    assert kill_when_past(command, folder / "run", 8)
    assert remount("ro").returncode == 0
    failed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert failed.returncode == 1
    error = failed.stderr.splitlines()[-1]
    assert error.startswith("lit-transformer fit: error: ")
    assert "Read-only file system" in error
    assert str(folder / "run") in error
    assert remount("rw").returncode == 0
    run(command)
    assert last(folder / "run")
