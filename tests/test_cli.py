"""The parser and main(): what a run resolves to, and wrong calls as one line with nothing left on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lit_transformer import commands
from lit_transformer.__main__ import COMMANDS, main
from lit_transformer.cli import ExperimentCLI, resolve
from lit_transformer.transformer import Transformer

CONF = Path(__file__).resolve().parents[1] / "conf"
FRAGMENTS = sorted(path.name for path in CONF.glob("*.yaml"))

# Typed from the paper (sections 5.1, 5.3, 5.4, first and last rows of Table 3), not taken from the code.
PAPER_BASE = {
    "model.num_layers": 6,
    "model.d_model": 512,
    "model.d_ff": 2048,
    "model.num_heads": 8,
    "model.dropout": 0.1,
    "model.position": "sinusoidal",
    "model.label_smoothing": 0.1,
    "model.warmup": 4000,
    "model.lr_factor": 1.0,
    "data.tokens_per_update": 25000,
    "data.vocab_size": 37000,
    "trainer.max_steps": 100_000,
    "trainer.gradient_clip_val": None,
}


def flat(config, prefix=""):
    values = {}
    for key, value in config.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def part(config, expected):
    return {key: flat(config)[key] for key in expected}


def parsed(*args):
    return ExperimentCLI(args, build=False)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty working folder, where a wrong call must leave nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def exit_status(args):
    """argparse leaves by SystemExit, the other ways through main's return value: the shell sees no difference."""
    try:
        return main(args)
    except SystemExit as stop:
        return stop.code


# What a run resolves to


def test_fit_without_keys_is_the_papers_base(capsys):
    assert exit_status(["fit", "--print_config"]) == 0
    assert part(yaml.safe_load(capsys.readouterr().out), PAPER_BASE) == PAPER_BASE


def test_print_config_shows_what_the_keys_changed_and_writes_nothing(empty, capsys):
    assert exit_status(["fit", "--model.d_ff", "1024", "--print_config"]) == 0
    assert part(yaml.safe_load(capsys.readouterr().out), PAPER_BASE) == PAPER_BASE | {"model.d_ff": 1024}
    assert not list(empty.iterdir())


@pytest.mark.parametrize("args", [[], ["base.yaml"], ["base.yaml", "big.yaml"]])
def test_heads_are_64_wide_in_base_and_big(args):
    config = parsed(*(word for name in args for word in ("--config", str(CONF / name)))).model.config
    assert (config.d_k, config.d_v) == (64, 64)


def test_heads_share_d_model_where_d_k_and_d_v_are_not_given():
    config = parsed("--model.num_heads", "16", "--model.d_v", "64").model.config
    assert (config.d_k, config.d_v) == (32, 64)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_file_in_conf_parses_alone_or_on_top_of_base(name):
    given = flat(yaml.safe_load((CONF / name).read_text()))
    base = [] if "data.source" in given else ["--config", str(CONF / "base.yaml")]
    assert part(resolve([*base, "--config", str(CONF / name)]), given) == given


def test_base_yaml_names_no_model_or_schedule_value_that_differs_from_the_defaults():
    given = flat(yaml.safe_load((CONF / "base.yaml").read_text()))
    same = {k: v for k, v in given.items() if k.split(".")[0] in ("model", "trainer", "seed_everything")}
    same = {k: v for k, v in same.items() if k not in ("model.d_k", "model.d_v")}  # null there: d_model / num_heads
    assert part(resolve([]), same) == same


def test_base_departs_from_the_paper_in_nothing():
    assert parsed().departures() == []
    assert parsed("--config", str(CONF / "base.yaml")).departures() == []


@pytest.mark.parametrize(
    ("key", "value", "departure"),
    [
        ("model.num_layers", "4", "num_layers = 4 (6)"),
        ("model.d_ff", "1024", "d_ff = 1024 (2048)"),
        ("model.d_k", "16", "d_k = 16 (64)"),
        ("model.dropout", "0.2", "dropout = 0.2 (0.1)"),
        ("model.label_smoothing", "0", "label_smoothing = 0.0 (0.1)"),
        ("model.warmup", "100", "warmup = 100 (4000)"),
        ("model.lr_factor", "2", "lr_factor = 2.0 (1.0)"),
        ("data.tokens_per_update", "1000", "tokens_per_update = 1000 (25000)"),
        ("data.vocab_size", "32000", "vocab_size = 32000 (37000)"),
        ("trainer.max_steps", "10", "max_steps = 10 (100000)"),
        ("trainer.gradient_clip_val", "1", "gradient_clip_val = 1.0 (None)"),
    ],
)
def test_each_departure_from_the_paper_is_listed_with_the_papers_value(key, value, departure):
    assert parsed(f"--{key}", value).departures() == [departure]


def test_learned_positions_are_a_departure():
    assert "position = learned (sinusoidal)" in parsed("--model.position", "learned").departures()


def test_the_last_config_wins_and_single_keys_win_over_both(empty):
    (empty / "a.yaml").write_text("model:\n  d_model: 64\n  warmup: 10\n  d_ff: 32\n")
    (empty / "b.yaml").write_text("model:\n  d_model: 128\n  warmup: 20\n")
    model = resolve(["--config", "a.yaml", "--config", "b.yaml", "--model.warmup", "30"])["model"]
    assert (model["d_ff"], model["d_model"], model["warmup"]) == (32, 128, 30)
    swapped = resolve(["--config", "b.yaml", "--config", "a.yaml"])["model"]
    assert (swapped["d_model"], swapped["warmup"]) == (64, 10)


def test_1e_4_is_a_number_in_a_file_and_on_the_command_line(empty):
    # PyYAML alone reads 1e-4 as a string.
    (empty / "a.yaml").write_text("model:\n  lr_factor: 1e-4\n  label_smoothing: 1e-1\n")
    for args in (["--config", "a.yaml"], ["--model.lr_factor", "1e-4"]):
        value = resolve(args)["model"]["lr_factor"]
        assert isinstance(value, float)
        assert value == 0.0001


def test_the_model_has_as_many_entries_as_the_vocabulary():
    cli = parsed("--data.vocab_size", "321", "--model.d_model", "16")
    assert cli.model.config.vocab_size == cli.datamodule.corpus.vocab_size == 321
    assert cli.model.model.embedding.weight.shape == (321, 16)


def test_one_seed_goes_to_data_and_model():
    cli = parsed("--seed_everything", "7")
    assert (cli.datamodule.seed, cli.model.seed) == (7, 7)
    assert (parsed().datamodule.seed, parsed().model.seed) == (1, 1)


def test_a_resolved_configuration_resolves_to_itself(empty):
    args = ["--model.d_ff", "100", "--model.lr_factor", "1e-3", "--data.max_ratio", "3", "--seed_everything", "5"]
    once = resolve(args)
    (empty / "again.yaml").write_text(yaml.safe_dump(once))
    assert resolve(["--config", "again.yaml"]) == once


def test_resolve_takes_no_memory_no_random_numbers_and_no_disk(empty, monkeypatch):
    devices, reset = [], Transformer.reset_parameters

    def recorded(model):
        devices.extend(p.device.type for p in model.parameters())
        reset(model)

    monkeypatch.setattr(Transformer, "reset_parameters", recorded)
    before = torch.get_rng_state()
    resolve(["--data.root", "store", "--run.dir", "run"])
    assert set(devices) == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.zeros(1).device.type == "cpu"  # and the default device is as before
    assert not list(empty.iterdir())


def test_a_built_model_follows_from_the_seed_alone():
    small = ["--model.d_model", "8", "--model.d_ff", "8", "--model.num_layers", "1", "--data.vocab_size", "10"]

    def weights(seed):
        torch.rand(3)  # whatever used up random numbers before
        return ExperimentCLI([*small, "--seed_everything", seed]).model.model.embedding.weight

    assert weights("3").device.type == "cpu"
    assert torch.equal(weights("3"), weights("3"))
    assert not torch.equal(weights("3"), weights("4"))


# Wrong calls

# What is typed, and the words that the message must hold.
WRONG = {
    "unknown key": (["--model.d_modle", "64"], ["model.d_modle"]),
    "unknown group": (["--modle.d_model", "64"], ["modle.d_model"]),
    "abbreviated key": (["--trainer.max_step", "3"], ["trainer.max_step"]),
    "abbreviated group": (["--mod.d_model", "64"], ["mod.d_model"]),
    "word for a number": (["--model.d_model", "abc"], ["model.d_model", "int", "abc"]),
    "fraction for a whole number": (["--trainer.max_steps", "2.5"], ["trainer.max_steps", "2.5"]),
    "bool for a number": (["--model.num_layers", "true"], ["model.num_layers"]),
    "number for a bool": (["--model.compile", "7"], ["model.compile"]),
    "one path for a list": (["--data.train", "7"], ["data.train"]),
    "wrong choice": (["--model.position", "rotary"], ["model.position", "rotary", "sinusoidal", "learned"]),
    "wrong source": (["--data.source", "ted"], ["data.source", "ted", "bible", "files"]),
    "wrong precision": (["--trainer.precision", "half"], ["trainer.precision", "bf16-mixed"]),
    "wrong tracking": (["--run.wandb", "yes"], ["run.wandb", "offline"]),
    "heads that do not divide": (["--model.num_heads", "6"], ["d_model = 512", "num_heads = 6"]),
    "dropout out of range": (["--model.dropout", "1.0"], ["dropout = 1.0"]),
    "negative smoothing": (["--model.label_smoothing", "-0.1"], ["label_smoothing = -0.1"]),
    "no warmup": (["--model.warmup", "0"], ["warmup = 0"]),
    "rate of zero": (["--model.lr_factor", "0"], ["lr_factor = 0"]),
    "rate that is no number": (["--model.lr_factor", ".nan"], ["lr_factor = nan"]),
    "rate without bound": (["--model.lr_factor", ".inf"], ["lr_factor = inf"]),
    "ratio that is no number": (["--data.max_ratio", ".nan"], ["max_ratio = nan"]),
    "ratio below 1": (["--data.max_ratio", "0.5"], ["max_ratio = 0.5"]),
    "no updates": (["--trainer.max_steps", "0"], ["trainer.max_steps = 0"]),
    "unending": (["--trainer.max_steps", "-1"], ["trainer.max_steps = -1"]),
    "no logging": (["--trainer.log_every_n_steps", "0"], ["trainer.log_every_n_steps = 0"]),
    "no nodes": (["--trainer.num_nodes", "0"], ["trainer.num_nodes = 0"]),
    "no checkpoints": (["--run.checkpoint_every", "0"], ["run.checkpoint_every = 0"]),
    "checkpoints by updates and by the clock": (
        ["--run.checkpoint_every", "5", "--run.checkpoint_minutes", "10"],
        ["run.checkpoint_every = 5", "run.checkpoint_minutes = 10.0", "null"],
    ),
    "checkpoints all the time": (["--run.checkpoint_minutes", "0"], ["run.checkpoint_minutes = 0.0"]),
    "checkpoints never": (["--run.checkpoint_minutes", ".inf"], ["run.checkpoint_minutes = inf"]),
    "none kept": (["--run.keep_checkpoints", "0"], ["run.keep_checkpoints = 0"]),
    "empty budget": (["--data.max_tokens", "0"], ["max_tokens = 0"]),
    "empty update": (["--data.tokens_per_update", "0"], ["tokens_per_update = 0"]),
    "table without learned positions": (["--model.max_positions", "64"], ["max_positions = 64", "learned"]),
    "files not named": (["--data.source", "files"], ["train = []"]),
    "files with the bible": (["--data.train", "[a, b]"], ["train = ['a', 'b']"]),
    "a language that the bible lacks": (["--data.src_lang", "xx"], ["src_lang = 'xx'"]),
    "random seed": (["--seed_everything", "true"], ["seed_everything"]),
    "no seed": (["--seed_everything", "false"], ["seed_everything"]),
    "seed that is a word": (["--seed_everything", "abc"], ["seed_everything", "abc"]),
    "size of the model's vocabulary": (["--model.vocab_size", "9"], ["model.vocab_size"]),
    "seed of the model": (["--model.seed", "9"], ["model.seed"]),
    "seed of the data": (["--data.seed", "9"], ["data.seed"]),
    "a word alone": (["conf/base.yaml"], ["conf/base.yaml"]),
    "no such file": (["--config", "nope.yaml"], ["nope.yaml"]),
}
# These follow from the plan of updates, or would break it: Lightning's flags that a run does not take.
OWNED = [
    "accumulate_grad_batches",
    "use_distributed_sampler",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "reload_dataloaders_every_n_epochs",
    "max_epochs",
    "enable_checkpointing",
    "plugins",
]
WRONG |= {f"trainer.{name}": ([f"--trainer.{name}", "1"], [f"trainer.{name}"]) for name in OWNED}


@pytest.fixture
def no_training(monkeypatch):
    """What is wrongly accepted must not train a model of 65 million parameters before the test fails."""

    def started(folder):
        raise AssertionError(f"accepted: work on {folder} would start")

    monkeypatch.setattr(commands, "locked", started)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(("args", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_ends_in_one_line_that_names_the_key_and_leaves_nothing(args, words, empty, capsys):
    assert main(["fit", *args]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lit-transformer fit: error: ")
    for word in words:
        assert word in shown.err
    assert not list(empty.iterdir())
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(("args", "words"), WRONG.values(), ids=WRONG)
def test_resolve_refuses_what_fit_refuses(args, words, empty):
    with pytest.raises(ValueError, match=r".") as caught:
        resolve(args)
    for word in words:
        assert word in str(caught.value)


BAD_FILES = {
    "unknown key": ("model:\n  d_modle: 3\n", "d_modle"),
    "unknown group": ("modle:\n  d_model: 3\n", "modle"),
    "abbreviated key": ("trainer:\n  max_step: 3\n", "max_step"),
    "owned by the plan": ("trainer:\n  accumulate_grad_batches: 2\n", "accumulate_grad_batches"),
    "wrong type": ("model:\n  warmup: soon\n", "model.warmup"),
    "wrong choice": ("model:\n  position: rotary\n", "model.position"),
    "rule broken": ("model:\n  num_heads: 6\n", "num_heads = 6"),
    "linked size": ("model:\n  vocab_size: 6\n", "vocab_size"),
    "linked seed": ("data:\n  seed: 6\n", "seed"),
    "bool seed": ("seed_everything: true\n", "seed_everything"),
    "no YAML": ("model: [\n", "config"),
}


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize(("text", "word"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_wrong_config_file_ends_in_one_line_too(text, word, empty, capsys):
    (empty / "bad.yaml").write_text(text)
    assert main(["fit", "--config", "bad.yaml"]) == 1
    shown = capsys.readouterr().err
    assert word in shown
    assert [path.name for path in empty.iterdir()] == ["bad.yaml"]
    assert len(shown.splitlines()) == 1


# Values that only Lightning's Trainer knows how to judge.
WRONG_FOR_TRAINER = {
    "accelerator": "abacus",
    "strategy": "hope",
    "devices": "0",
    "num_nodes": "0",
}


@pytest.mark.parametrize(("name", "value"), WRONG_FOR_TRAINER.items(), ids=WRONG_FOR_TRAINER)
def test_a_value_that_the_trainer_refuses_ends_in_one_line(name, value, empty, capsys):
    args = ["--model.num_layers", "1", "--model.d_model", "8", "--data.vocab_size", "9", "--trainer.accelerator", "cpu"]
    assert main(["fit", *args, "--run.dir", "run", f"--trainer.{name}", value]) == 1
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("lit-transformer fit: error: ")
    assert name in error or value in error
    assert not [line for line in progress if "error" in line]
    assert not list(empty.rglob("*.ckpt"))


def test_a_run_folder_that_is_a_file_is_refused(empty, capsys):
    (empty / "run").write_text("mine")
    small = ["--model.num_layers", "1", "--model.d_model", "8", "--data.vocab_size", "9"]
    assert main(["fit", *small, "--run.dir", "run"]) == 1
    assert "run" in capsys.readouterr().err
    assert (empty / "run").read_text() == "mine"


# main()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_every_command_exits_0(command, flag, empty, capsys):
    assert exit_status([command, flag]) == 0
    assert f"usage: lit-transformer {command}" in capsys.readouterr().out
    assert not list(empty.iterdir())


def test_help_of_fit_explains_every_key_of_the_papers_base(capsys):
    exit_status(["fit", "--help"])
    shown = capsys.readouterr().out
    assert [key for key in PAPER_BASE if f"--{key} " not in shown] == []


def test_help_alone_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in shown] == []


def test_no_command_shows_the_usage_and_exits_2(capsys):
    assert main([]) == 2
    assert "usage: lit-transformer" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["train", "Fit", "", "--fit", "fi"])
def test_an_unknown_command_is_named_beside_the_usage_and_exits_2(command, capsys):
    assert main([command]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert repr(command) in shown.err
    assert "usage: lit-transformer" in shown.err


@pytest.mark.parametrize(
    "args",
    [
        ["validate"],
        ["test"],
        ["translate"],
        ["average"],
        ["validate", "run", "--average", "many"],
        ["validate", "run", "--checkpoint", "a", "--average", "2"],
        ["translate", "run", "--n_bes", "2"],
        ["average", "run", "--las", "2"],
    ],
    ids=" ".join,
)
def test_a_command_wrongly_called_exits_2(args, empty, capsys):
    assert exit_status(args) == 2
    assert "usage: " in capsys.readouterr().err
    assert not list(empty.iterdir())


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("so"), 1), (FileNotFoundError("so"), 1), (KeyboardInterrupt(), 130)]
)
def test_faults_of_a_user_and_interrupts_end_in_one_line(error, status, monkeypatch, capsys):
    def fail(args):
        raise error

    monkeypatch.setattr(commands, "prepare_command", fail)
    assert main(["prepare"]) == status
    assert capsys.readouterr().err.splitlines()[0].startswith("lit-transformer prepare: ")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "prepare_command", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["prepare"])


def test_the_module_runs_and_its_usage_needs_no_torch():
    code = "import sys; from lit_transformer.__main__ import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    done = subprocess.run([sys.executable, "-m", "lit_transformer", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'nonsense'" in done.stderr
