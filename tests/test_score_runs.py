"""What validate and test leave behind: names that say what was asked, and nothing in the place of something else."""

import gzip
import json
from pathlib import Path

import pytest
from conftest import WORDS, write_corpus

from lit_transformer.__main__ import main
from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.sentences import read_sentences

NEWSTEST = Path(__file__).parents[2] / "shared" / "data" / "newstest"


def configuration(folder, **data):
    keys = {
        "model": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 2, "bleu_every": 0},
        "data": {"root": str(folder / "data"), "vocab_size": 300, "num_workers": 0, "tokens_per_update": 200, **data},
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 4, "log_every_n_steps": 1},
        "run": {"dir": str(folder / "run"), "checkpoint_every": 1},
    }
    (folder / "run.yaml").write_text(json.dumps(keys))
    return ["--config", str(folder / "run.yaml")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert main(["fit", *configuration(folder, **write_corpus(folder / "text"))]) == 0
    return folder / "run"


@pytest.fixture
def run(trained):
    """The run without what other tests have asked of it."""
    before = set(trained.iterdir())
    yield trained
    for path in set(trained.iterdir()) - before:
        path.unlink()


def asked(*args):
    return main([str(word) for word in args])


def new_files(run, ask):
    before = {path.name for path in run.iterdir()}
    assert ask() == 0
    return {path.name for path in run.iterdir()} - before


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], ""),
        (["--average", 2], ".average-2"),
        (["--sentences", 3], ".sentences-3"),
        (["--beam_size", 2], ".beam-2"),
        (["--length_penalty", 1], ".alpha-1"),
        (["--checkpoint", "OLD"], ".step-00000003"),
        (["--name", "again", "--average", 3, "--beam_size", 1], ".again.average-3.beam-1"),
        (["--beam_size", 4, "--length_penalty", 0.6], ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["test", "validate"])
def test_files_are_named_by_what_differs(command, options, name, run):
    old = next(path for step, path in list_checkpoints(run / "checkpoints") if step == 3)
    options = [old if option == "OLD" else option for option in options]
    expected = {f"{command}{name}.json", f"hypotheses.{command}{name}.txt", f"sentences.{command}{name}.jsonl"}
    if command == "test" and "--sentences" not in options:
        expected |= {f"table2{name}.md"}
    assert new_files(run, lambda: asked(command, run, *options)) == expected
    found = json.loads((run / f"{command}{name}.json").read_text())
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert found["beam_size"] == given.get("--beam_size", 4)
    assert found["length_penalty"] == given.get("--length_penalty", 0.6)
    assert found["sentences"] == given.get("--sentences", 20)
    assert len(found["averaged"]) == given.get("--average", 0)
    assert found["updates"] == (3 if "--checkpoint" in given else 4)
    assert len(read_sentences(run, found, f"{command}{name}")) == found["sentences"]


def test_a_part_does_not_take_the_place_of_the_whole(run):
    assert asked("test", run, "--average", 2) == 0
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != ".lock"}
    for options in (["--sentences", 3], ["--average", 2, "--sentences", 3], ["--beam_size", 1], []):
        assert asked("test", run, *options) == 0
    assert all(path.read_bytes() == content for path, content in before.items())


def other_text(tmp_path):
    for side in ("src", "tgt"):
        (tmp_path / f"other.{side}").write_text("".join(f"{word}\n" for word in WORDS[:6]))
    return ["--data.test", json.dumps([str(tmp_path / f"other.{side}") for side in ("src", "tgt")])]


def test_other_text_needs_a_name_of_its_own(run, tmp_path, capsys):
    assert asked("test", run) == 0
    before = (run / "test.json").read_bytes()
    capsys.readouterr()
    assert asked("test", run, *other_text(tmp_path)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"error: this text is not the one that {run} was trained with" in error
    assert "--name" in error
    assert (run / "test.json").read_bytes() == before
    assert asked("test", run, *other_text(tmp_path), "--name", "words") == 0
    assert json.loads((run / "test.words.json").read_text())["sentences"] == 6


def test_two_runs_compare_by_the_name_of_what_was_asked(run, capsys):
    assert asked("test", run, "--average", 2) == 0
    assert asked("results", "compare", run, run, "--split", "test") == 1
    assert "--split is one of test.average-2" in capsys.readouterr().err
    assert asked("results", "compare", run, run, "--split", "test.average-2") == 0
    assert "test: 20 sentences" in capsys.readouterr().out
    assert asked("results", "compare", run, run, "--split", "train") == 1
    assert "--split train: must be valid, test, " in capsys.readouterr().err


def test_what_the_training_took_is_said_where_it_is_known(run, capsys):
    assert asked("test", run) == 0
    result, found = (json.loads((run / name).read_text()) for name in ("result.json", "test.json"))
    assert found["training"] == {key: result[key] for key in ("flops", "hours", "processes", "device")} | {
        "flops_by_time": None
    }
    assert (run / "table2.md").read_text() in capsys.readouterr().out
    kept = (run / "result.json").read_bytes()
    old = list_checkpoints(run / "checkpoints")[-2][1]
    assert asked("test", run, "--checkpoint", old) == 0
    assert json.loads((run / f"test.{old.stem}.json").read_text())["training"] is None
    assert "FLOPs are blank" in (run / f"table2.{old.stem}.md").read_text()
    try:
        (run / "result.json").write_text(json.dumps({key: value for key, value in result.items() if key != "hours"}))
        capsys.readouterr()
        assert asked("test", run, "--name", "again") == 1
        assert "does not say hours" in capsys.readouterr().err
    finally:
        (run / "result.json").write_bytes(kept)
    assert not (run / "test.again.json").exists()


def test_the_recipe_is_that_of_the_weights_that_were_scored(run):
    assert asked("test", run, "--average", 3, "--beam_size", 2) == 0
    recipe = json.loads((run / "test.average-3.beam-2.json").read_text())["recipe"]
    part = {"max_steps": 4, "averaged": 3, "beam_size": 2, "d_model": 16, "warmup": 2, "vocab_size": 300}
    assert {key: recipe[key] for key in part} == part
    assert "differs from it in: " in (run / "table2.average-3.beam-2.md").read_text()


@pytest.mark.slow
def test_newstest2014_stands_beside_the_paper(tmp_path, capsys):
    """The whole way, from the paper's development and test sets: 3,003 sentences decoded by a model of no worth."""
    if not NEWSTEST.is_dir():
        pytest.skip("needs real text, ../shared/data/newstest, beside the repository")
    for split, year in (("valid", 2013), ("test", 2014)):
        for side in ("en", "de"):
            text = gzip.decompress((NEWSTEST / f"newstest{year}.en-de.{side}.gz").read_bytes()).decode()
            (tmp_path / f"{split}.{side}").write_text(text, encoding="utf-8", newline="\n")
    for side in ("en", "de"):  # a few of the development sentences to validate with, the others to train on
        lines = (tmp_path / f"valid.{side}").read_text(encoding="utf-8").split("\n")[:-1]
        (tmp_path / f"train.{side}").write_text("".join(f"{line}\n" for line in lines[20:]), encoding="utf-8")
        (tmp_path / f"valid.{side}").write_text("".join(f"{line}\n" for line in lines[:20]), encoding="utf-8")
    files = {
        split: [str(tmp_path / f"{split}.{side}") for side in ("en", "de")] for split in ("train", "valid", "test")
    }
    arguments = configuration(tmp_path, source="files", src_lang="en", tgt_lang="de", vocab_size=700, **files)
    assert main(["fit", *arguments, "--data.tokens_per_update", "2000"]) == 0
    run = tmp_path / "run"
    assert asked("test", run, "--average", 4, "--beam_size", 1) == 0
    found = json.loads((run / "test.average-4.beam-1.json").read_text())
    assert found["test_set"]["table2"] is True
    assert found["sentences"] == len((run / "hypotheses.test.average-4.beam-1.txt").read_text().split("\n")) - 1 == 3003
    table = (run / "table2.average-4.beam-1.md").read_text()
    assert table in capsys.readouterr().out
    assert "| Transformer (base) | 27.3 |  | 3.3e18 |  |" in table
    assert f"| {found['compound_split_bleu']['score']:.2f} | {found['bleu']['score']:.2f} |" in table
    assert "beam\\_size = 1 (4)" in table


# What must not be taken from the command instead of the run


def test_the_row_is_of_the_runs_own_recipe_whatever_keys_the_command_has(run):
    assert asked("test", run) == 0
    before = json.loads((run / "test.json").read_text())["recipe"]
    assert asked("test", run, "--model.label_smoothing", 0.3, "--model.dropout", 0.5) == 0
    assert json.loads((run / "test.json").read_text())["recipe"] == before


def test_another_preparation_does_not_say_what_was_trained_on(run, tmp_path):
    assert asked("test", run) == 0
    assert "- Trained on " in (run / "table2.md").read_text()
    assert "another preparation" not in (run / "table2.md").read_text()
    assert asked("test", run, *other_text(tmp_path), "--name", "words") == 0
    text = (run / "table2.words.md").read_text()
    assert "another preparation than the one with this test set" in text
    assert "pairs hold a sentence of this validation or test set" in text


def test_another_runs_checkpoint_is_refused_though_its_text_is_the_same(run, tmp_path, capsys):
    config = json.loads((run.parent / "run.yaml").read_text())
    config["model"]["label_smoothing"] = 0.0
    config["run"]["dir"] = str(tmp_path / "other")
    (tmp_path / "other.yaml").write_text(json.dumps(config))
    assert asked("fit", "--config", tmp_path / "other.yaml") == 0
    _, checkpoint = list_checkpoints(tmp_path / "other/checkpoints")[-1]
    assert asked("test", run, "--checkpoint", checkpoint) == 1
    assert "is not of this run: its model.label_smoothing is another one" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["average-2", "beam-1", "step-00000004", "sentences-3", "alpha-1"])
def test_a_name_that_other_options_make_is_refused(run, name, capsys):
    assert asked("test", run, "--name", name) == 1
    assert f"--name {name!r}" in capsys.readouterr().err
