"""Checkpoints by the clock: which updates, over interruptions and over several ranks; the clock is played."""

import json
import types

import pytest
import torch
from conftest import train
from ranks import run_ranks
from test_exact import fit_command, last

from lit_transformer import callbacks, module
from lit_transformer.checkpoint import checkpoint_path, list_checkpoints, load_checkpoint, scheduled
from lit_transformer.signals import Signals, Stopped

# Every update takes 7 seconds and a checkpoint is due every 30: 35, 63, 91, 126 and 154 are the first times past them.
HALF_A_MINUTE = {"minutes": 0.5, "max_steps": 24, "keep": 9}
BY_HAND = [5, 9, 13, 18, 22, 24]


class Crash(BaseException):
    """As if the process had been killed."""


@pytest.fixture
def clock(monkeypatch):
    """Seconds from some beginning, 7 more with each update; `at` holds what happens in the course of an update."""
    played = types.SimpleNamespace(now=1000.0, at={})
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: played.now))
    original = module.LitTransformer.on_before_optimizer_step

    def step(self, optimizer):
        played.now += 7
        played.at.pop(self.trainer.global_step + 1, lambda: None)()
        original(self, optimizer)

    monkeypatch.setattr(module.LitTransformer, "on_before_optimizer_step", step)
    return played


@pytest.fixture
def told(monkeypatch):
    """What the training takes for the signals of its process."""
    signals = Signals()
    monkeypatch.setattr(callbacks, "Signals", lambda: signals)
    return signals


def steps(folder):
    return [step for step, _ in list_checkpoints(folder)]


@pytest.fixture
def straight(corpus, clock, tmp_path):
    train(corpus, tmp_path / "straight", **HALF_A_MINUTE)
    return tmp_path / "straight"


def test_a_checkpoint_every_so_many_minutes_and_at_the_end(straight):
    assert steps(straight) == BY_HAND
    assert all(scheduled(path) for _, path in list_checkpoints(straight))


def test_several_intervals_in_one_update_leave_one_checkpoint(corpus, clock, tmp_path):
    clock.at[4] = lambda: setattr(clock, "now", clock.now + 200)  # 228 s at its end; 240 come with update 6
    train(corpus, tmp_path, **HALF_A_MINUTE | {"max_steps": 8})
    assert steps(tmp_path) == [4, 6, 8]


def test_only_the_newest_stay(corpus, clock, tmp_path):
    train(corpus, tmp_path, **HALF_A_MINUTE | {"keep": 3})
    assert steps(tmp_path) == BY_HAND[-3:]


@pytest.mark.parametrize("update", [7, 9, 12])
def test_a_run_that_a_signal_stopped_has_the_checkpoints_of_one_that_was_not(
    update, corpus, straight, clock, told, tmp_path
):
    clock.at[update] = lambda: setattr(told, "number", 15)
    with pytest.raises(Stopped):
        train(corpus, tmp_path, **HALF_A_MINUTE)
    before = [step for step in BY_HAND if step <= update]
    assert steps(tmp_path) == sorted({*before, update})
    assert [step for step, path in list_checkpoints(tmp_path) if not scheduled(path)] == [update] * (update != 9)
    clock.now += 10_000  # nobody trains
    told.number = 0
    seen = []
    clock.at[BY_HAND[len(before)] + 1] = lambda: seen.append(steps(tmp_path))
    train(corpus, tmp_path, **HALF_A_MINUTE)
    assert seen == [BY_HAND[: len(before) + 1]], "what the signal left goes with the next one"
    assert steps(tmp_path) == BY_HAND
    for (_, one), (_, other) in zip(list_checkpoints(tmp_path), list_checkpoints(straight), strict=True):
        ours, theirs = load_checkpoint(one), load_checkpoint(other)
        assert ours["training_seconds"] == theirs["training_seconds"]
        for name, weight in ours["state_dict"].items():
            assert torch.equal(weight, theirs["state_dict"][name])


def test_a_killed_run_has_the_checkpoints_of_one_that_was_not(corpus, straight, clock, tmp_path):
    def kill():
        raise Crash

    clock.at[12] = kill
    with pytest.raises(Crash):
        train(corpus, tmp_path, **HALF_A_MINUTE)
    assert steps(tmp_path) == [5, 9]
    train(corpus, tmp_path, **HALF_A_MINUTE)
    assert steps(tmp_path) == BY_HAND
    last_two = [load_checkpoint(checkpoint_path(folder, 24))["state_dict"] for folder in (tmp_path, straight)]
    for name, weight in last_two[0].items():
        assert torch.equal(weight, last_two[1][name])


def test_a_run_by_updates_may_go_on_by_the_clock(corpus, clock, tmp_path):
    train(corpus, tmp_path, every=3, max_steps=6)
    train(corpus, tmp_path, **HALF_A_MINUTE | {"max_steps": 14})
    assert steps(tmp_path) == [3, 6, 9, 13, 14]


# Rank 0's updates take 7 s, the other's 1,000: its clock is not asked. argv: the update in which rank 1 is told to end.
RANKS = """
import os, signal, sys, types
import lightning.pytorch as pl
from lit_transformer import module
from lit_transformer.__main__ import main
rank, now, saved = int(os.environ["RANK"]), 0.0, []
module.time = types.SimpleNamespace(monotonic=lambda: now)
step, save = module.LitTransformer.on_before_optimizer_step, pl.Trainer.save_checkpoint
def played(self, optimizer):
    global now
    now += 1000 if rank else 7
    if rank == 1 and self.trainer.global_step + 1 == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
    step(self, optimizer)
def noted(self, path, *arguments, **options):
    saved.append(self.global_step)
    save(self, path, *arguments, **options)
module.LitTransformer.on_before_optimizer_step, pl.Trainer.save_checkpoint = played, noted
main(sys.argv[2:])
print(saved)
"""


@pytest.mark.slow
def test_two_ranks_save_after_the_same_updates_by_the_first_ones_clock_and_go_on(corpus, tmp_path):
    clocked = {
        "trainer.devices": 2,
        "trainer.strategy": "ddp",
        "run.checkpoint_every": "null",
        "run.checkpoint_minutes": 0.5,
        "run.keep_checkpoints": 4,
    }
    commands = {name: fit_command(corpus, tmp_path / name, **clocked)[3:] for name in ("straight", "stopped")}
    # A word travels for an update: due after 5, 9, 13, ... as by hand above, saved after the update that follows.
    straight = [6, 10, 14, 19, 23, 27, 31, 36, 40]
    assert run_ranks(RANKS, 2, 0, *commands["straight"])[0].splitlines()[-1] == str(straight)
    printed = run_ranks(RANKS, 2, 7, *commands["stopped"])
    assert [json.loads(out.splitlines()[-1]) for out in printed] == [[6, 8]] * 2
    found = list_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert [(step, scheduled(path)) for step, path in found] == [(6, True), (8, False)]
    # Told in update 4, they stop after update 5, in which one becomes due that no word can tell of any more.
    commands["at once"] = fit_command(corpus, tmp_path / "at once", **clocked)[3:]
    run_ranks(RANKS, 2, 4, *commands["at once"])
    found = list_checkpoints(tmp_path / "at once" / "checkpoints")
    assert [(step, scheduled(path)) for step, path in found] == [(5, True)]
    printed = run_ranks(RANKS, 2, 0, *commands["stopped"])
    assert [json.loads(out.splitlines()[-1]) for out in printed] == [straight[1:]] * 2
    assert steps(tmp_path / "stopped" / "checkpoints") == steps(tmp_path / "straight" / "checkpoints") == straight[-4:]
    one, other = last(tmp_path / "stopped"), last(tmp_path / "straight")
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name])
