"""Several real processes: signals, ranks that die or hang, and what all of them do together."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import make_data, write_corpus
from ranks import environment, free_port, kill_session, members, run_ranks
from test_exact import assert_same_run, fit_command, last, run

from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.tokenizer import EOS_ID

TWO = {"trainer.devices": 2, "trainer.strategy": "ddp"}


@pytest.fixture(scope="module")
def straight(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    run(fit_command(corpus, folder, **TWO))
    return folder


class Run:
    """A `fit` in a session of its own."""

    def __init__(self, command, folder, **variables):
        self.folder = folder
        self.process = subprocess.Popen(
            command,
            env=environment(**variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_update(self, step):
        end = time.monotonic() + 120
        while time.monotonic() < end and self.process.poll() is None:
            found = list_checkpoints(self.folder / "checkpoints")
            if found and found[-1][0] >= step:
                return
            time.sleep(0.005)
        raise AssertionError(f"no checkpoint of update {step}; {self.end()}")

    def children(self):
        """The processes that the first one has started, loader workers among them."""
        return [pid for pid in members(self.process.pid) if pid != self.process.pid]

    def ranks(self):
        """The other ranks, not the loader's workers: those are their starter's copies."""
        return [pid for pid in self.children() if parent(pid) == self.process.pid and trains(pid)]

    def end(self, timeout=120):
        """(exit status, what it said), once no process of it is left."""
        try:
            _, said = self.process.communicate(timeout=timeout)
            end = time.monotonic() + 30
            while (left := members(self.process.pid)) and time.monotonic() < end:
                time.sleep(0.1)
            assert not left, f"orphans: {left}"
        finally:
            kill_session(self.process.pid)
        return self.process.returncode, said


def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def trains(pid):
    with open(f"/proc/{pid}/environ") as variables:
        return "LOCAL_RANK=1" in variables.read().split("\0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("SIGTERM", "first"),
        ("SIGTERM", "all"),
        ("SIGUSR1", "all"),
        ("SIGUSR1", "other"),
        ("SIGINT", "all"),
    ],
)
def test_a_signal_with_two_ranks_and_two_workers_leaves_one_checkpoint_and_no_orphan(
    name, to, corpus, straight, tmp_path
):
    """C40."""
    command = fit_command(corpus, tmp_path, **TWO, **{"data.num_workers": 2, "run.checkpoint_every": 5})
    number, fitting = signal.Signals[name], Run(command, tmp_path)
    fitting.wait_for_update(5)
    if to == "all":
        os.killpg(fitting.process.pid, number)
    else:
        os.kill(fitting.process.pid if to == "first" else fitting.ranks()[0], number)
    status, said = fitting.end()
    assert status == 128 + number, said
    step, path = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert f"stopped by {name} after update {step}, which is saved; the same command goes on" in said
    assert "Traceback" not in said
    assert [s for s, _ in list_checkpoints(tmp_path / "checkpoints") if s % 5] == [step] * (step % 5 > 0)
    assert sorted(p.name for p in path.parent.iterdir()) == [
        p.name for _, p in list_checkpoints(tmp_path / "checkpoints")
    ]
    run(command)
    assert_same_run(tmp_path, straight)


@pytest.mark.parametrize(
    ("victim", "workers"),
    [
        ("other", 0),
        pytest.param("other", 2, marks=pytest.mark.slow),  # they hold its connections open
        pytest.param("first", 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_and_takes_the_others_with_it(victim, workers, corpus, tmp_path):
    options = {"trainer.max_steps": 10**6, "data.num_workers": workers}
    fitting = Run(fit_command(corpus, tmp_path, **TWO, **options), tmp_path)
    fitting.wait_for_update(4)
    other = fitting.ranks()[0]
    os.kill(other if victim == "other" else fitting.process.pid, signal.SIGKILL)
    status, said = fitting.end(60)
    if victim == "other":
        assert status == 1
        assert re.search(rf"error: rank 1 \(process {other}( on .*)?\) has ended or hangs", said), said[-3000:]
        assert "the same command goes on" in said
    assert list_checkpoints(tmp_path / "checkpoints")


@pytest.mark.slow
def test_a_loaders_worker_that_is_killed_ends_the_run_in_one_line(corpus, tmp_path):
    options = {"trainer.max_steps": 10**6, "data.num_workers": 2}
    fitting = Run(fit_command(corpus, tmp_path, **options), tmp_path)
    fitting.wait_for_update(4)
    os.kill(fitting.children()[0], signal.SIGKILL)
    status, said = fitting.end(60)
    assert status == 1
    assert "fit: error: data.num_workers = 2: a process that makes batches has ended" in said.splitlines()[-1]
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_time_out(corpus, tmp_path):
    options = {**TWO, "trainer.max_steps": 10**6, "trainer.timeout": 20}
    fitting = Run(fit_command(corpus, tmp_path, **options), tmp_path)
    fitting.wait_for_update(4)
    other = fitting.ranks()[0]
    os.kill(other, signal.SIGSTOP)
    status, said = fitting.end(120)
    assert status == 1
    assert f"rank 1 (process {other} on " in said


POISON = """
import sys, torch
from lit_transformer import module
from lit_transformer.__main__ import main
original = module.LitTransformer.training_step
bad = set(range(*map(int, sys.argv[1].split(","))))
def step(self, batch, batch_idx):
    loss = original(self, batch, batch_idx)
    on_one = self.global_rank == 1 and self.trainer.global_step + 1 in bad
    return loss * float("nan") if on_one else loss
module.LitTransformer.training_step = step
status = main(sys.argv[2:])
print("status", status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "status"), [("7,9", 0), ("7,99", 1)])
def test_a_loss_that_is_not_finite_on_one_rank_is_left_out_or_stops_on_all(bad, status, corpus, tmp_path):
    """C33."""
    command = fit_command(corpus, tmp_path, **TWO)[3:]
    printed = run_ranks(POISON, 2, bad, *command)
    assert [out.splitlines()[-1] for out in printed] == [f"status {status}"] * 2
    if status == 0:
        assert json.loads((tmp_path / "result.json").read_text())["updates_left_out"] == 2
    else:
        assert list_checkpoints(tmp_path / "checkpoints")[-1][0] == 8  # stopped in update 11


AGREE = """
import sys
from torch import distributed as dist
from lit_transformer.ranks import must_agree
dist.init_process_group("gloo")
try:
    must_agree("checkpoint", sys.argv[1 + dist.get_rank()])
    print("alike")
except ValueError as error:
    print(error)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("first", "second", "words"), [("a", "a", "alike"), ("a", "b", "rank 1 has found b, rank 0 a")]
)
def test_ranks_that_would_go_on_from_different_checkpoints_are_refused(first, second, words):
    printed = run_ranks(AGREE, 2, first, second)
    assert printed[0].strip() == "alike"
    assert words in printed[1]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def under(launcher, command):
    return [*launcher, *command[1:]]  # -m lit_transformer ... without the interpreter


@pytest.mark.slow
def test_torchrun_on_one_node_is_the_same_run(corpus, straight, tmp_path):
    run(under([*TORCHRUN, "--standalone", "--nproc_per_node", "2"], fit_command(corpus, tmp_path, **TWO)))
    assert_same_run(tmp_path, straight)


@pytest.mark.slow
def test_torchrun_on_two_nodes_is_the_same_run(corpus, straight, tmp_path):
    port = str(free_port())
    nodes = {"trainer.devices": 1, "trainer.num_nodes": 2, "trainer.strategy": "ddp"}
    command = fit_command(corpus, tmp_path, **nodes)
    meeting = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"]
    meeting += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_id", "run"]
    first = Run(under([*TORCHRUN, *meeting], command), tmp_path)
    second = Run(under([*TORCHRUN, *meeting], command), tmp_path)
    for node in (first, second):
        status, said = node.end(200)
        assert status == 0, said[-3000:]
    assert last(tmp_path)["global_step"] == last(straight)["global_step"]
    assert_same_run(tmp_path, straight)


@pytest.mark.slow
def test_torchrun_told_to_end_leaves_one_checkpoint_and_goes_on(corpus, straight, tmp_path):
    command = fit_command(corpus, tmp_path, **TWO, **{"run.checkpoint_every": 5, "data.num_workers": 2})
    fitting = Run(under([*TORCHRUN, "--standalone", "--nproc_per_node", "2"], command), tmp_path)
    fitting.wait_for_update(5)
    os.kill(fitting.process.pid, signal.SIGTERM)
    status, said = fitting.end()
    assert status != 0
    assert "which is saved; the same command goes on" in said
    run(command)
    assert_same_run(tmp_path, straight)


SEEN = """
import json, sys
import lightning.pytorch as pl
from conftest import make_data, make_module, make_trainer
from lit_transformer import module
corpus, world, max_tokens, validate_every, max_steps = json.loads(sys.argv[1])
seen = {"training": [], "validation": [], "test": [], "validated_at": []}
def noted(kind, original):
    def step(self, batch, batch_idx):
        rows = [[i for i in row if i] for row in batch.src.tolist()]
        seen[kind].append([self.trainer.global_step, [row for row in rows if row]])
        return original(self, batch, batch_idx)
    return step
for kind in ("training", "validation", "test"):
    name = f"{kind}_step"
    setattr(module.LitTransformer, name, noted(kind, getattr(module.LitTransformer, name)))
class Validations(pl.Callback):
    def on_validation_end(self, trainer, pl_module):
        seen["validated_at"].append(trainer.global_step)
data = make_data(corpus, tokens_per_update=300, max_tokens=max_tokens)
model = make_module(validate_every=validate_every, bleu_every=1, bleu_sentences=3)
# Lightning's own defaults: what a user does not know of must not be needed.
trainer = pl.Trainer(
    max_steps=max_steps, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto",
    callbacks=[Validations()], logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
)
trainer.fit(model, datamodule=data)
fitted = len(seen["validation"])
trainer.validate(model, datamodule=data)
trainer.test(model, datamodule=data)
seen["accumulation"], seen["fitted"] = trainer.accumulate_grad_batches, fitted
seen["nll"] = model.evaluation.nll
print(json.dumps(seen))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "valid", "max_tokens", "every"),
    [
        (101, 5, 400, 4),  # C12: does not divide; C15: no flag of the user's
        (101, 1, 400, 4),  # C18: a validation set of one line
        (101, 3, 60, 3),  # C13: with accumulation, validations between epochs
    ],
)
def test_two_ranks_get_what_was_planned_each_sentence_once_an_epoch(train, valid, max_tokens, every, tmp_path):
    corpus = {**write_corpus(tmp_path / "text", train=train, valid=valid, test=2), "vocab_size": 300}
    corpus |= {"root": str(tmp_path / "data"), "num_workers": 0}
    data = make_data(corpus, tokens_per_update=300, max_tokens=max_tokens)
    data.prepare_data()
    data.setup("fit")
    epoch = data.plan.updates_per_epoch
    updates = 3 * epoch
    found = {}
    for world in (1, 2):
        arguments = json.dumps([corpus, world, max_tokens, every, updates])
        found[world] = [json.loads(out.splitlines()[-1]) for out in run_ranks(SEEN, world, arguments)]
    for ranks in found.values():
        accumulation = ranks[0]["accumulation"]
        assert all(len(rank["training"]) == updates * accumulation for rank in ranks)
        assert all(rank["validated_at"] == [*range(every, updates + 1, every), updates] for rank in ranks)
        for n in range(updates):
            planned = [[*data.sentences("train", "src")[i].tolist(), EOS_ID] for i in data.plan.update(n).sentences]
            trained = [row for rank in ranks for step, rows in rank["training"] if step == n for row in rows]
            assert sorted(trained) == sorted(planned)
        for e in range(3):
            trained = [row for rank in ranks for step, rows in rank["training"] if step // epoch == e for row in rows]
            assert sorted(trained) == sorted([*ids.tolist(), EOS_ID] for ids in data.sentences("train", "src"))
        for kind, split, times in (("validation", "valid", updates // every + 1), ("test", "test", 1)):
            scored = [row for rank in ranks for _, rows in rank[kind] for row in rows]
            assert sorted(scored) == sorted([[*s.tolist(), EOS_ID] for s in data.sentences(split, "src")] * times)
    assert found[1][0]["nll"] == pytest.approx(found[2][0]["nll"], rel=1e-5)
    if max_tokens == 60:
        assert found[2][0]["accumulation"] > 1
