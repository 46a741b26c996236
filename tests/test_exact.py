"""A run's result does not depend on how often it was killed, nor on how many processes ran it."""

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import make_module

from lit_transformer.checkpoint import list_checkpoints, load_checkpoint

STEPS = 40


def fit_command(corpus, folder, **options):
    """The command as typed; its options are keys with their values."""
    lists = ("train", "valid", "test")
    data = {f"data.{k}": json.dumps(v) if k in lists else v for k, v in corpus.items()}
    small = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 10, "dropout": 0.1}
    keys = {
        **data,
        **{f"model.{k}": v for k, v in small.items()},
        "model.lr_factor": 0.2,  # at the paper's rate so small a model amplifies rounding
        "model.validate_every": 6,
        "model.bleu_every": 0,
        "data.tokens_per_update": 300,
        "data.max_tokens": 100,
        "trainer.max_steps": STEPS,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.log_every_n_steps": 1,
        "run.dir": folder,
        "run.checkpoint_every": 4,
        **options,
    }
    return [sys.executable, "-m", "lit_transformer", "fit", *(str(x) for k, v in keys.items() for x in (f"--{k}", v))]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command):
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def last(folder, steps=STEPS):
    step, path = list_checkpoints(folder / "checkpoints")[-1]
    assert step == steps
    return load_checkpoint(path)


def curves(folder):
    """{(update, column): value} over all sessions of a run, the later one's word on an update counts."""
    values = {}
    versions = (folder / "csv").glob("version_*/metrics.csv")
    for file in sorted(versions, key=lambda path: int(path.parent.name.split("_")[1])):
        with open(file, newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                for column, value in row.items():
                    if value and column not in ("step", "tgt_tokens_per_second"):
                        values[int(row["step"]), column] = value
    return values


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run(fit_command(corpus, folder))
    return folder


def kill_when_past(command, folder, step):
    """Start, kill -9 a moment after the checkpoint of some update, wherever that moment falls."""
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None:
        found = list_checkpoints(folder / "checkpoints")
        if found and found[-1][0] >= step:
            time.sleep(random.uniform(0, 0.05))
            break
        time.sleep(0.002)
    alive = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def assert_same_run(folder, expected, steps=STEPS):
    a, b = last(folder, steps), last(expected, steps)
    assert a["state_dict"].keys() == b["state_dict"].keys()
    for name in a["state_dict"]:
        assert torch.equal(a["state_dict"][name], b["state_dict"][name]), name
    moments = zip(a["optimizer_states"][0]["state"].values(), b["optimizer_states"][0]["state"].values(), strict=True)
    for one, other in moments:
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert curves(folder) == curves(expected)
    results = [json.loads((f / "result.json").read_text()) for f in (folder, expected)]
    for key in ("nll", "bleu", "chrf", "updates", "tgt_tokens", "flops", "data"):
        assert results[0][key] == results[1][key], key


def test_killed_and_typed_again_is_the_same_run_bit_for_bit(corpus, straight, tmp_path):
    command = fit_command(corpus, tmp_path)
    assert kill_when_past(command, tmp_path, random.randint(1, 30)), "it ended before it could be killed"
    run(command)
    assert_same_run(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_many_times_is_the_same_run_bit_for_bit(corpus, straight, tmp_path, workers):
    command = fit_command(corpus, tmp_path, **{"data.num_workers": workers})
    kills = sum(kill_when_past(command, tmp_path, step) for step in (4, 6, 13, 24, 36))
    run(command)
    assert kills >= 3
    assert_same_run(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"data.num_workers": 2}, {"run.checkpoint_every": 7, "data.max_tokens": 60}])
def test_two_ranks_killed_many_times_are_the_same_run_bit_for_bit(corpus, tmp_path, options):
    two_ranks = {"trainer.devices": 2, "trainer.strategy": "ddp", **options}
    run(fit_command(corpus, tmp_path / "straight", **two_ranks))
    killed = tmp_path / "killed"
    command = fit_command(corpus, killed, **two_ranks)
    kills = sum(kill_when_past(command, killed, step) for step in (4, 13, 25))
    run(command)
    assert kills == 3
    assert_same_run(killed, tmp_path / "straight")


def losses(folder):
    return {k: float(v) for k, v in curves(folder).items() if k[1] in ("train_loss", "val_nll", "grad_norm")}


NO_DROPOUT = {"model.dropout": 0.0, "trainer.gradient_clip_val": 0.25}


@pytest.fixture(scope="module")
def one_rank(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(fit_command(corpus, folder, **NO_DROPOUT))
    return folder


@pytest.mark.slow  # tests/test_strategy.py compares one rank and two in any case
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_trains_the_same(corpus, one_rank, tmp_path, ranks):
    """With clipping, which is active in most updates: it acts on the gradient of all ranks."""
    run(fit_command(corpus, tmp_path, **NO_DROPOUT, **{"trainer.devices": ranks, "trainer.strategy": "ddp"}))
    one, several = last(one_rank), last(tmp_path)
    fresh = dict(make_module().named_parameters())
    for name, weight in one["state_dict"].items():
        torch.testing.assert_close(weight, several["state_dict"][name], atol=1e-4, rtol=1e-3, msg=name)
        assert (weight - fresh[name]).abs().max() > 0.01, "trained at all"
    results = [json.loads((f / "result.json").read_text()) for f in (one_rank, tmp_path)]
    assert results[0]["nll"] == pytest.approx(results[1]["nll"], rel=1e-5)
    assert [r["processes"] for r in results] == [1, ranks]
    assert len(losses(one_rank)) == 2 * STEPS + STEPS // 6
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-5)
    assert sum(v > 0.25 for (_, column), v in losses(one_rank).items() if column == "grad_norm") > STEPS / 4


@pytest.mark.slow
def test_the_number_of_ranks_may_change_at_a_resume(corpus, one_rank, tmp_path):
    two_ranks = {"trainer.devices": 2, "trainer.strategy": "ddp"}
    assert kill_when_past(fit_command(corpus, tmp_path, **NO_DROPOUT, **two_ranks), tmp_path, 4)
    run(fit_command(corpus, tmp_path, **NO_DROPOUT))
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["valid", "test"])
def test_scores_are_the_same_bits_for_any_number_of_ranks_and_batch_size(corpus, one_rank, tmp_path, split):
    """Three sentences, fewer than ranks, among the splits."""
    name = {"valid": "validate", "test": "test"}[split]
    few = []
    for side in ("src", "tgt"):
        few.append(tmp_path / f"few.{side}")
        with open(corpus["test"][len(few) - 1], encoding="utf-8") as text:
            few[-1].write_text("".join(text.readlines()[:3]), encoding="utf-8")
    files = json.dumps([str(path) for path in few])
    found = []
    for number, (ranks, max_tokens) in enumerate([(1, 100), (1, 5000), (2, 100), (4, 64)]):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(one_rank, folder)
        command = [sys.executable, "-m", "lit_transformer", name, str(folder), "--trainer.devices", str(ranks)]
        command += ["--trainer.strategy", "ddp"] if ranks > 1 else []
        command += ["--data.test", files, "--name", "few"] if split == "test" else []
        run([*command, "--data.max_tokens", str(max_tokens)])
        said = "test.few" if split == "test" else name
        record = json.loads((folder / f"{said}.json").read_text())
        texts = [
            (folder / f"{kind}.{said}.{end}").read_text()
            for kind, end in (("hypotheses", "txt"), ("sentences", "jsonl"))
        ]
        found.append(({k: record[k] for k in ("nll", "perplexity", "tokens", "bleu", "chrf")}, texts))
    assert found[0][0]["tokens"] > 3
    assert all(other == found[0] for other in found[1:])


@pytest.mark.slow
def test_an_offline_wandb_run_killed_and_resumed_stays_one_run(corpus, tmp_path):
    command = fit_command(corpus, tmp_path, **{"run.wandb": "offline"})
    assert kill_when_past(command, tmp_path, 12)
    run(command)
    identity = (tmp_path / "wandb_id").read_text()
    sessions = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(sessions) == 2
    assert {folder.name.rsplit("-", 1)[1] for folder in sessions} == {identity}
