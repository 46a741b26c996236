"""Weights divided among two ranks train as whole ones do, and their checkpoints are nobody's own."""

import json
import shutil

import pytest
import torch
from conftest import make_data, make_module, make_trainer, train
from lightning.pytorch.strategies import ModelParallelStrategy
from test_exact import curves, fit_command, kill_when_past, run

from lit_transformer.__main__ import main
from lit_transformer.checkpoint import checkpoint_path, load_checkpoint
from lit_transformer.cli import TrainerConfig
from lit_transformer.module import LitTransformer
from lit_transformer.strategy import ShardedStrategy, shard, whole
from lit_transformer.translate import Translator

FSDP = {"trainer.devices": 2, "trainer.strategy": "fsdp"}
DDP = {"trainer.devices": 2, "trainer.strategy": "ddp"}
HALF, STEPS = 4, 8
SAME = ("bleu", "chrf", "unfinished", "parameters", "updates", "averaged", "tgt_tokens", "data")


def typed(corpus, folder, **options):
    """A run of every part that ranks could disagree on: uneven shares, clipping, unequal decoding, an average."""
    keys = {
        "model.d_ff": 33,
        "model.norm": "pre",
        "model.position": "learned",
        "model.max_positions": 101,
        "model.dropout": 0.0,
        "model.lr_factor": 0.05,  # an untrained model's outputs are long, and of other lengths on each rank
        "model.validate_every": 3,
        "model.bleu_every": 1,
        "model.bleu_sentences": 19,
        "trainer.gradient_clip_val": 0.3,
        "trainer.max_steps": STEPS,
        "run.checkpoint_every": 2,
        "run.average": 2,
    }
    return fit_command(corpus, folder, **{**keys, **options})


@pytest.fixture(scope="module")
def one(corpus, tmp_path_factory):
    """One process, stopped half way (a copy is in `half`) and gone on with."""
    folder = tmp_path_factory.mktemp("one")
    for steps in (HALF, STEPS):
        assert main(typed(corpus, folder / "whole", **{"trainer.max_steps": steps})[3:]) == 0
        if steps == HALF:
            shutil.copytree(folder / "whole", folder / "half")
    return folder


@pytest.fixture(scope="module")
def sharded(corpus, one, tmp_path_factory):
    """Two ranks that went on from the checkpoint of one process."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    shutil.copytree(one / "half", folder)
    run(typed(corpus, folder, **FSDP))
    return folder


def at(folder, step=STEPS):
    return load_checkpoint(checkpoint_path(folder / "checkpoints", step))


def assert_same_course(folder, expected, rel=1e-5):
    a, b = ({k: float(v) for k, v in curves(f).items()} for f in (folder, expected))
    assert a == pytest.approx(b, rel=rel)
    results = [json.loads((f / "result.json").read_text()) for f in (folder, expected)]
    assert results[0]["nll"] == pytest.approx(results[1]["nll"], rel=rel)
    for key in SAME:
        assert results[0][key] == results[1][key], key
    assert (folder / "hypotheses.valid.txt").read_text() == (expected / "hypotheses.valid.txt").read_text()


def assert_same_state(a, b):
    """Ordinary tensors under the same names, the same numbers up to rounding: weights and Adam's moments."""
    assert list(a["state_dict"]) == list(b["state_dict"])
    a_adam, b_adam = a["optimizer_states"][0], b["optimizer_states"][0]
    assert a_adam["param_groups"] == b_adam["param_groups"]
    assert list(a_adam["state"]) == list(b_adam["state"])
    pairs = [(a["state_dict"], b["state_dict"]), *((a_adam["state"][i], b_adam["state"][i]) for i in a_adam["state"])]
    for mine, theirs in pairs:
        for name, tensor in theirs.items():
            assert type(mine[name]) is torch.Tensor
            torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_two_ranks_with_shares_go_on_as_one_process_does(sharded, one):
    assert json.loads((sharded / "result.json").read_text())["processes"] == 2
    assert len({step for step, column in curves(sharded) if column == "train_loss"}) == STEPS
    norms = [float(v) for (_, column), v in curves(sharded).items() if column == "grad_norm"]
    assert min(norms) > 0.3, "every update was clipped"
    assert_same_course(sharded, one / "whole")


def test_a_checkpoint_of_shares_is_the_file_of_one_process(sharded, one):
    assert at(sharded).keys() == at(one / "whole").keys()
    assert_same_state(at(sharded), at(one / "whole"))
    assert sum("embedding" in name for name in at(sharded)["state_dict"]) == 1, "tied"
    assert not list((sharded / "checkpoints").glob("*.tmp*"))


def test_one_process_goes_on_from_shares(corpus, sharded, one, tmp_path):
    a, b = tmp_path / "shares", tmp_path / "one"
    for folder, source in ((a, sharded), (b, one / "whole")):
        shutil.copytree(source, folder)
        assert main(typed(corpus, folder, **{"trainer.max_steps": STEPS + 2})[3:]) == 0
    assert_same_state(at(a, STEPS + 2), at(b, STEPS + 2))
    assert_same_course(a, b)


def test_a_checkpoint_of_shares_translates_and_loads_in_lightning(sharded, one):
    path = checkpoint_path(sharded / "checkpoints", STEPS)
    lines = ["bana dero", "gosi fite luna", "dete"]
    expected = Translator(checkpoint_path(one / "whole" / "checkpoints", STEPS)).translate(lines)
    assert Translator(path).translate(lines) == expected
    loaded = LitTransformer.load_from_checkpoint(path, weights_only=True)
    assert torch.equal(loaded.model.embedding.weight, at(sharded)["state_dict"]["model.embedding.weight"])


@pytest.mark.slow
def test_a_run_with_shares_killed_and_typed_again_ends_as_ddp_does(corpus, tmp_path):
    steps = {"trainer.max_steps": 40, "run.checkpoint_every": 4, "model.dropout": 0.1, "model.lr_factor": 0.2}
    command = typed(corpus, tmp_path / "fsdp", **steps, **FSDP)
    assert kill_when_past(command, tmp_path / "fsdp", 12), "it ended before it could be killed"
    run(command)
    run(typed(corpus, tmp_path / "ddp", **steps, **DDP))
    assert_same_course(tmp_path / "fsdp", tmp_path / "ddp")


@pytest.mark.slow
def test_shares_are_scored_by_test_as_one_process_does(sharded):
    found = []
    for alone in ((), ("--trainer.strategy", "auto", "--trainer.devices", "1")):
        run([*typed({}, "")[:3], "test", str(sharded), "--average", "2", *alone])
        found.append(json.loads((sharded / "test.average-2.json").read_text()))
        found[-1]["hypotheses"] = (sharded / "hypotheses.test.average-2.txt").read_text()
    assert found[0]["nll"] == pytest.approx(found[1]["nll"], rel=1e-5)
    for key in ("bleu", "unfinished", "averaged", "checkpoint", "hypotheses"):
        assert found[0][key] == found[1][key], key


def test_other_strategies_leave_the_model_as_it_is(corpus):
    module, trainer = train(corpus, max_steps=1)
    before = list(module.model.parameters())
    module.configure_model()
    shard(module.model, trainer.strategy)
    assert all(a is b for a, b in zip(module.model.parameters(), before, strict=True))
    assert whole(module.model) is module.model


def test_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match=r"ModelParallelStrategy, tensor_parallel_size = 2: must be 1.*strategy fsdp"):
        shard(make_module().model, ModelParallelStrategy(tensor_parallel_size=2))


def test_what_shares_cannot_be_combined_with_is_refused_by_its_key(corpus):
    with pytest.raises(ValueError, match=r"trainer.precision = 16-mixed: trainer.strategy = fsdp takes 32-true"):
        TrainerConfig(strategy="fsdp", precision="16-mixed")
    data, module, trainer = make_data(corpus), make_module(compile=True), make_trainer(strategy=ShardedStrategy())
    data.prepare_data()
    data.setup("fit")
    module.trainer, trainer.datamodule = trainer, data
    with pytest.raises(ValueError, match=r"model.compile = true: trainer.strategy = fsdp trains uncompiled"):
        module.setup("fit")
