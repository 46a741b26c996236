"""Checkpoints: whole or not at all, plain data only, bounded in number, averaged exactly."""

import contextlib
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from conftest import make_module, train

from lit_transformer import checkpoint as checkpoint_module
from lit_transformer import store
from lit_transformer.checkpoint import (
    AtomicCheckpointIO,
    average_checkpoints,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
)
from lit_transformer.module import LitTransformer


def save(folder, step, weights, **more):
    path = checkpoint_path(folder, step)
    torch.save({"state_dict": weights, "global_step": step, "hyper_parameters": {"a": 1}, **more}, path)
    return path


@pytest.fixture
def three(tmp_path):
    torch.manual_seed(0)
    return [save(tmp_path, step, {"w": torch.randn(40) * 10.0**step, "b": torch.randn(3)}) for step in (1, 2, 3)]


def test_the_average_is_the_exact_mean(three, tmp_path):
    out = average_checkpoints(three, tmp_path / "average.ckpt")
    inputs = [load_checkpoint(path)["state_dict"]["w"].tolist() for path in three]
    exact = [float(sum(map(Fraction, column)) / 3) for column in zip(*inputs, strict=True)]
    expected = torch.tensor(exact, dtype=torch.float64).float()
    torch.testing.assert_close(load_checkpoint(out)["state_dict"]["w"], expected, rtol=1e-7, atol=0)


def test_order_does_not_matter_and_inputs_are_listed(three, tmp_path):
    a = load_checkpoint(average_checkpoints(three, tmp_path / "a.ckpt"))
    b = load_checkpoint(average_checkpoints([str(p) for p in reversed(three)], str(tmp_path / "b.ckpt")))
    assert torch.equal(a["state_dict"]["w"], b["state_dict"]["w"])
    assert a["averaged"] == b["averaged"] == [{"step": n, "name": f"step-{n:08d}.ckpt"} for n in (1, 2, 3)]


def test_bf16_inputs_are_summed_in_more_than_bf16(tmp_path):
    # In bf16, 256 + 1 is 256: twenty ones beside one 256 would vanish.
    values = [256.0] + [1.0] * 19
    paths = [save(tmp_path, n, {"w": torch.tensor([v]).bfloat16()}) for n, v in enumerate(values)]
    averaged = load_checkpoint(average_checkpoints(paths, tmp_path / "out.ckpt"))["state_dict"]["w"]
    assert averaged.dtype == torch.bfloat16
    assert averaged.item() == torch.tensor(275 / 20).bfloat16().item()


def test_training_state_stays_behind(three, tmp_path):
    save(tmp_path, 4, {"w": torch.zeros(40), "b": torch.zeros(3)}, optimizer_states=[1], loops={})
    averaged = load_checkpoint(average_checkpoints([tmp_path / "step-00000004.ckpt"], tmp_path / "out.ckpt"))
    assert "optimizer_states" not in averaged
    assert averaged["hyper_parameters"] == {"a": 1}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weights": {"w": torch.zeros(4)}}, "names or shapes"),
        ({"weights": {"w": torch.zeros(40), "b": torch.zeros(3)}, "hyper_parameters": {"a": 2}}, "hyper_parameters"),
    ],
)
def test_different_models_do_not_average(three, tmp_path, other, words):
    path = save(tmp_path, 9, other.pop("weights"), **other)
    with pytest.raises(ValueError, match=words):
        average_checkpoints([*three, path], tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


def test_nothing_or_the_same_twice_does_not_average(three, tmp_path):
    for paths in ([], [three[0], three[0]]):
        with pytest.raises(ValueError, match="to average"):
            average_checkpoints(paths, tmp_path / "out.ckpt")


def test_an_averaged_checkpoint_of_real_runs_loads_and_is_the_mean(corpus, tmp_path):
    train(corpus, tmp_path, every=1, max_steps=3)
    paths = [path for _, path in list_checkpoints(tmp_path)]
    out = average_checkpoints(paths, tmp_path / "average-3.ckpt")
    mean = LitTransformer.load_from_checkpoint(out, weights_only=True)
    parts = [LitTransformer.load_from_checkpoint(path, weights_only=True) for path in paths]
    for a, *inputs in zip(*(m.parameters() for m in (mean, *parts)), strict=True):
        torch.testing.assert_close(a, torch.stack(inputs).double().mean(0).float(), rtol=1e-6, atol=1e-8)
    assert list_checkpoints(tmp_path)[-1][1] == paths[-1], "an average is no checkpoint to go on from"


class Malicious:
    def __reduce__(self):
        return os.system, ("touch pwned",)


@pytest.mark.parametrize("kind", ["missing", "empty", "text", "truncated", "pickle", "list"])
def test_what_is_no_checkpoint_is_refused_by_name(three, tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.ckpt"
    if kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("hello")
    elif kind == "truncated":
        path.write_bytes(three[0].read_bytes()[:-200])
    elif kind == "pickle":
        torch.save({"state_dict": {}, "evil": Malicious()}, path)
    elif kind == "list":
        torch.save([1, 2], path)
    with pytest.raises(ValueError, match=r"bad\.ckpt"):
        load_checkpoint(path)
    assert not Path("pwned").exists()


def test_a_failed_save_leaves_the_old_file_and_no_other(three, monkeypatch):
    before = three[0].read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        AtomicCheckpointIO().save_checkpoint({"state_dict": {}}, three[0])
    assert three[0].read_bytes() == before
    assert sorted(three[0].parent.iterdir()) == sorted(three)


def test_names_sort_by_number_and_strangers_are_left_alone(tmp_path):
    for step in (5, 40, 300, 123456789):
        checkpoint_path(tmp_path, step).touch()
    for name in ("average-5-step-00000300.ckpt", "step-x.ckpt", "notes.txt"):
        (tmp_path / name).touch()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [5, 40, 300, 123456789]
    prune_checkpoints(tmp_path, 20, 1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [300, 123456789]
    assert (tmp_path / "average-5-step-00000300.ckpt").exists()


@pytest.mark.parametrize(
    ("every", "before", "stopped", "after"),
    [
        (10, [10, 20, 30, 40, 50], [], [10, 20, 30, 40, 50]),
        (10, [10, 20, 30, 40, 50, 53], [53], [10, 20, 30, 40, 50, 53]),  # stopped by a signal: no regular one is lost
        (10, [10, 20, 30, 40, 50, 53, 60], [53], [20, 30, 40, 50, 60]),  # what a run without the stop has
        (10, [10, 20, 30, 33, 35], [33, 35], [10, 20, 30, 35]),  # stopped twice
        (10, [10, 20, 30, 35, 40], [], [10, 20, 30, 40]),  # 35 was the last of a shorter run
        (10, [1], [1], [1]),
        (None, [11, 19, 33, 38, 52, 60], [], [19, 33, 38, 52, 60]),  # by the clock, whatever their numbers are
        (None, [11, 19, 33, 38, 52, 55], [55], [11, 19, 33, 38, 52, 55]),
        (None, [11, 19, 33, 38, 52, 55, 60], [55], [19, 33, 38, 52, 60]),
    ],
)
def test_what_is_kept_does_not_depend_on_when_a_run_was_stopped(every, before, stopped, after, tmp_path):
    for step in before:
        checkpoint_path(tmp_path, step, stopped=step in stopped).touch()
    prune_checkpoints(tmp_path, every, 5)
    assert [step for step, _ in list_checkpoints(tmp_path)] == after


def test_thirty_saves_keep_the_newest_five(corpus, tmp_path):
    train(corpus, tmp_path, every=1, keep=5, max_steps=30)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [26, 27, 28, 29, 30]
    assert len(list(tmp_path.iterdir())) == 5


def test_a_checkpoint_holds_plain_data_and_the_tied_matrix_once(corpus, tmp_path):
    train(corpus, tmp_path, max_steps=2)
    checkpoint = load_checkpoint(list_checkpoints(tmp_path)[0][1])
    shapes = [tuple(t.shape) for t in checkpoint["state_dict"].values()]
    assert shapes.count((300, 16)) == 1
    assert sum(t.numel() for t in checkpoint["state_dict"].values()) == make_module().model.num_parameters


class Full:
    """A file on a disk with little space left."""

    def __init__(self, file, space):
        self.file, self.space = file, space

    def write(self, content):
        self.space -= len(content)
        if self.space < 0:
            raise OSError(28, "No space left on device")
        return self.file.write(content)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_disk_that_fills_up_while_saving_is_named_as_such(three, monkeypatch):
    before = three[0].read_bytes()
    original = store.atomic_file

    @contextlib.contextmanager
    def small(path):
        with original(path) as file:
            yield Full(file, 500)

    monkeypatch.setattr(checkpoint_module, "atomic_file", small)
    with pytest.raises(OSError, match="No space left") as error:
        AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.zeros(1000)}}, three[0])
    assert error.value.filename == str(three[0])
    assert three[0].read_bytes() == before
    assert sorted(three[0].parent.iterdir()) == sorted(three)
