"""prepare, fit, validate, test and average as they are typed, on runs of a few updates.

Every target sentence starts with the same four words, so that a model of a few updates has a BLEU between 0 and 100.
"""

import contextlib
import csv
import fcntl
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from sacrebleu.metrics import BLEU, CHRF

from lit_transformer import callbacks, evaluation, module, transformer
from lit_transformer.__main__ import main
from lit_transformer.checkpoint import list_checkpoints, load_checkpoint
from lit_transformer.decode import search_all
from lit_transformer.tokenizer import Tokenizer
from lit_transformer.translate import Translator

WORDS = [consonant + vowel for consonant in "bdkm" for vowel in "aeiou"]
UPDATES = 24


def write_corpus(folder, seed=0, **lines):
    rng = random.Random(seed)
    for split, count in ({"train": 400, "valid": 12, "test": 7} | lines).items():
        source = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(count)]
        write_split(folder, split, [(line, f"so it is as {line}") for line in source])
    return folder


def write_split(folder, split, pairs):
    folder.mkdir(parents=True, exist_ok=True)
    for side, lines in zip(("src", "tgt"), zip(*pairs, strict=True), strict=True):
        (folder / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines))


def arguments(corpus, run, **changes):
    """The arguments of a tiny run; `section__key=value` changes one, None leaves it out."""
    keys = {
        "data.source": "files",
        "data.root": corpus / "store",
        "data.vocab_size": 300,
        "data.tokens_per_update": 250,
        "data.max_tokens": 400,
        "data.num_workers": 0,
        "model.num_layers": 1,
        "model.d_model": 32,
        "model.d_ff": 64,
        "model.num_heads": 2,
        "model.warmup": 10,
        "model.lr_factor": 0.5,
        "model.validate_every": 8,
        "model.bleu_every": 1,
        "model.bleu_sentences": 5,
        "trainer.accelerator": "cpu",
        "trainer.devices": 1,
        "trainer.max_steps": UPDATES,
        "trainer.log_every_n_steps": 1,
        "run.dir": run,
        "run.checkpoint_every": 4,
        "run.keep_checkpoints": 3,
    }
    for split in ("train", "valid", "test"):
        keys[f"data.{split}"] = json.dumps([str(corpus / f"{split}.{side}") for side in ("src", "tgt")])
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for key, value in keys.items() if value is not None for word in (f"--{key}", str(value))]


def fit(corpus, run, **changes):
    return main(["fit", *arguments(corpus, run, **changes)])


def content(folder):
    """All files of a run with their bytes; the lock stays empty and may be touched."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def read_json(path):
    return json.loads(path.read_text(), parse_constant=refuse)


def steps(run):
    return [step for step, _ in list_checkpoints(run / "checkpoints")]


def newest(run):
    return load_checkpoint(list_checkpoints(run / "checkpoints")[-1][1])


def same_weights(one, other):
    one, other = one["state_dict"], other["state_dict"]
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def metrics(run, column):
    """(step, value) of one column over all sessions, as they stand in the files."""
    versions = sorted((run / "csv").glob("version_*"), key=lambda path: int(path.name.split("_")[1]))
    rows = []
    for version in versions:
        if (version / "metrics.csv").is_file():
            with open(version / "metrics.csv", newline="") as file:
                rows += [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if row.get(column)]
    return rows


def lines(path):
    text = path.read_bytes().decode()
    assert text.endswith("\n")
    return text[:-1].split("\n")


def one_error(shown):
    """The one line that a refused command ends in; lines of progress may stand before it."""
    *progress, last = shown.splitlines()
    assert last.startswith("lit-transformer ")
    assert ": error: " in last
    assert not [line for line in progress if "error" in line or "Traceback" in line]
    return last


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of all its updates in one session; nobody may change it."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        assert fit(corpus, run) == 0
    (run.parent / "stdout").write_text(shown.getvalue())
    before = content(run)
    yield run
    assert content(run) == before


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run in a folder of this test's own."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


class Crash(BaseException):
    """What ends a session without any of the handlers for errors of ours."""


def crash_at(monkeypatch, update, error=Crash):
    original = module.LitTransformer.training_step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step + 1 == update:
            if not isinstance(error, FunctionType):
                raise error
            error()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(module.LitTransformer, "training_step", training_step)


# prepare


def test_prepare_prints_its_report_and_last_the_folder(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus")
    with open(corpus / "train.src", "a") as src, open(corpus / "train.tgt", "a") as tgt:
        src.write("\nba\n")
        tgt.write("so\n\n")
    assert main(["prepare", *arguments(corpus, tmp_path / "run")]) == 0
    shown = capsys.readouterr().out.splitlines()
    folder = Path(shown[-1])
    assert folder.parent == corpus / "store"
    assert (folder / "meta.json").is_file()
    assert "402 pairs read" in shown[0]
    assert any("dropped 2: blank (" in line for line in shown)
    assert any("valid 12 pairs" in line for line in shown)
    assert any("300 subwords" in line for line in shown)
    assert not (tmp_path / "run").exists()


def test_prepare_twice_leaves_the_store_as_it_is_and_reports_the_same(tmp_path, capsys):
    args = ["prepare", *arguments(write_corpus(tmp_path), tmp_path / "run")]
    assert main(args) == 0
    first, before = capsys.readouterr().out, content(tmp_path / "store")
    assert main(args) == 0
    assert capsys.readouterr().out == first
    assert content(tmp_path / "store") == before


def test_prepare_with_files_of_different_lengths_ends_in_one_line(tmp_path, capsys):
    corpus = write_corpus(tmp_path)
    (corpus / "train.tgt").write_text("so\n")
    assert main(["prepare", *arguments(corpus, tmp_path / "run")]) == 1
    shown = one_error(capsys.readouterr().err)
    assert "400" in shown
    assert "train.tgt" in shown
    assert not (corpus / "store").exists() or not list((corpus / "store").glob("[!.]*"))


# fit


def test_fit_leaves_what_others_read(finished):
    assert {"config.yaml", "progress.json", "result.json", "hypotheses.valid.txt", "csv"} <= {
        path.name for path in finished.iterdir()
    }
    assert steps(finished) == [UPDATES - 8, UPDATES - 4, UPDATES]
    assert not [name for name in content(finished) if Path(name).name.startswith(".") and name != ".lock"]


def test_config_yaml_says_what_was_run(corpus, finished):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["d_ff"] == 64
    assert config["data"]["train"] == [str(corpus / "train.src"), str(corpus / "train.tgt")]
    assert config["trainer"]["max_steps"] == UPDATES
    assert config["seed_everything"] == 1
    assert read_json(finished / "result.json")["config"] == config


def test_progress_ends_at_the_last_update(finished):
    progress = read_json(finished / "progress.json")
    assert (progress["step"], progress["max_steps"], progress["seconds_left"]) == (UPDATES, UPDATES, 0)
    assert progress["train_perplexity"] == pytest.approx(metrics(finished, "train_perplexity")[-1][1])


def test_every_update_is_logged_once_and_validations_at_their_updates(finished):
    assert [step for step, _ in metrics(finished, "train_loss")] == list(range(1, UPDATES + 1))
    for column in ("val_nll", "val_bleu", "val_bleu_sentences"):
        assert [step for step, _ in metrics(finished, column)] == [8, 16, 24]
    assert {value for _, value in metrics(finished, "val_bleu_sentences")} == {5}


def test_result_names_run_seed_updates_and_tokens(corpus, finished):
    result = read_json(finished / "result.json")
    assert (result["seed"], result["updates"], result["averaged"], result["split"]) == (1, UPDATES, [], "valid")
    assert result["vocab_size"] == 300
    assert result["parameters"] == sum(t.numel() for t in newest(finished)["state_dict"].values())
    tokenizer = Tokenizer(newest(finished)["TranslationDataModule"]["tokenizer_model"])
    references = lines(corpus / "valid.tgt")
    assert result["tokens"] == sum(len(ids) + 1 for ids in tokenizer.encode(references))
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"]))
    assert result["nll"] == pytest.approx(metrics(finished, "val_nll")[-1][1], abs=1e-6)
    assert result["command"][0] == "fit"
    assert result["hours"] > 0
    assert result["flops"] > 0


def test_the_command_in_the_result_makes_the_same_run_again(finished, tmp_path):
    command = read_json(finished / "result.json")["command"]
    again = [str(tmp_path / "again") if word == str(finished) else word for word in command]
    assert main(again) == 0
    assert same_weights(newest(tmp_path / "again"), newest(finished))
    assert (tmp_path / "again" / "hypotheses.valid.txt").read_bytes() == (
        finished / "hypotheses.valid.txt"
    ).read_bytes()


def test_scores_in_the_result_are_sacrebleus_on_the_files(corpus, finished):
    hypotheses, references = lines(finished / "hypotheses.valid.txt"), lines(corpus / "valid.tgt")
    assert len(hypotheses) == len(references) == 12
    result = read_json(finished / "result.json")
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        expected = metric.corpus_score(hypotheses, [references]).score
        assert 0 < expected < 100  # or the comparison says nothing
        assert result[name]["score"] == pytest.approx(expected, abs=1e-9)
        assert result[name]["signature"] == str(metric.get_signature())
        assert result[name]["sentences"] == 12


def test_bleu_in_the_result_is_the_sacrebleu_commands(corpus, finished):
    # A process of its own: the command takes over standard input and output.
    words = [str(corpus / "valid.tgt"), "-i", str(finished / "hypotheses.valid.txt"), "-w", "4"]
    done = subprocess.run([sys.executable, "-m", "sacrebleu", *words], capture_output=True, text=True, check=True)
    theirs, ours = json.loads(done.stdout), read_json(finished / "result.json")["bleu"]
    assert f"{ours['score']:.4f}" == f"{theirs['score']:.4f}"
    assert ours["signature"] == f"{theirs['signature']}"


def test_every_sentence_is_kept_with_what_made_the_scores(corpus, finished):
    """sentences.valid.jsonl holds all that comparisons of two runs need."""
    result = read_json(finished / "result.json")
    rows = [json.loads(line) for line in lines(finished / "sentences.valid.jsonl")]
    assert [row["source"] for row in rows] == lines(corpus / "valid.src")
    assert [row["reference"] for row in rows] == lines(corpus / "valid.tgt")
    assert [row["hypothesis"] for row in rows] == lines(finished / "hypotheses.valid.txt")
    assert sum(row["tgt_tokens"] for row in rows) == result["tokens"]
    assert sum(row["nll"] for row in rows) / result["tokens"] == pytest.approx(result["nll"], rel=1e-6)
    assert sum(not row["finished"] for row in rows) == result["unfinished"]
    tokenizer = Tokenizer(newest(finished)["TranslationDataModule"]["tokenizer_model"])
    for row in rows:
        assert row["src_tokens"] == len(tokenizer.encode([row["source"]])[0]) + 1


def test_an_average_at_the_end_is_what_average_and_validate_find(corpus, copied, tmp_path, capsys):
    run = tmp_path / "averaged"
    assert main(["fit", *arguments(corpus, run, run__average=3)]) == 0
    result = read_json(run / "result.json")
    assert [entry["step"] for entry in result["averaged"]] == [16, 20, 24]
    assert result["updates"] == UPDATES
    assert main(["validate", str(copied), "--average", "3"]) == 0
    assert read_json(copied / "validate.average-3.json")["nll"] == pytest.approx(result["nll"], rel=1e-6)
    assert main(["fit", *arguments(corpus, run)]) == 1
    assert "run.average = 3, this command has 1" in capsys.readouterr().err


def test_more_checkpoints_to_average_than_are_kept_are_refused(corpus, tmp_path, capsys):
    assert main(["fit", *arguments(corpus, tmp_path / "run", run__average=6)]) == 1
    assert "run.average = 6: run.keep_checkpoints = 3 keeps fewer" in one_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_run_of_an_older_version_without_some_key_goes_on(corpus, copied):
    """Its configuration lacks what has come since; it did what the default does."""
    config = yaml.safe_load((copied / "config.yaml").read_text())
    del config["model"]["norm"], config["model"]["warmup_start"], config["run"]["average"]
    (copied / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", *arguments(corpus, copied)]) == 0
    assert main(["fit", *arguments(corpus, copied, model__norm="pre")]) == 1


def test_a_few_sentences_get_a_number_with_a_note(finished):
    assert "few" in read_json(finished / "result.json")["bleu"]["note"]
    assert "few sentences" in (finished.parent / "stdout").read_text()


def test_two_lines_of_two_words_get_numbers(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    write_split(corpus, "valid", [("ba be", "so it"), ("bi bo", "so is")])
    assert fit(corpus, tmp_path / "run", trainer__max_steps=2, run__checkpoint_every=2) == 0
    result = read_json(tmp_path / "run" / "result.json")
    for name in ("bleu", "compound_split_bleu", "chrf"):
        assert math.isfinite(result[name]["score"])
        assert "few" in result[name]["note"]
    assert "few" in result["compound_split_bleu"]["note"]


def test_files_stay_plain_json_when_the_perplexity_is_beyond_a_float(tmp_path, corpus):
    assert fit(corpus, tmp_path / "run", model__lr_factor=1000, model__warmup=1, trainer__max_steps=4) == 0
    assert read_json(tmp_path / "run" / "result.json")["nll"] > 710  # exp of it overflows
    read_json(tmp_path / "run" / "progress.json")


def test_seeds_1_1_2_give_equal_equal_different(corpus, tmp_path):
    short = {"trainer__max_steps": 3, "model__bleu_every": 0}
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert fit(corpus, tmp_path / name, seed_everything=seed, **short) == 0
        results.append(read_json(tmp_path / name / "result.json"))
    assert [result["seed"] for result in results] == [1, 1, 2]
    assert results[0]["nll"] == results[1]["nll"] != results[2]["nll"]
    assert same_weights(newest(tmp_path / "a"), newest(tmp_path / "b"))


def test_a_sentence_longer_than_max_tokens_is_scored_as_a_batch_of_its_own(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    long = " ".join(WORDS * 3)
    write_split(corpus, "valid", [("ba", "so it is as ba"), (long, f"so it is as {long}"), ("be", "so it is as be")])
    run = tmp_path / "run"
    assert fit(corpus, run, data__max_tokens=30, trainer__max_steps=4, model__validate_every=2) == 0
    tokenizer = Tokenizer(newest(run)["TranslationDataModule"]["tokenizer_model"])
    lengths = [len(ids) + 1 for ids in tokenizer.encode(lines(corpus / "valid.tgt"))]
    assert max(lengths) > 30
    result = read_json(run / "result.json")
    assert result["tokens"] == sum(lengths)
    assert result["bleu"]["sentences"] == len(lines(run / "hypotheses.valid.txt")) == 3


def test_blank_validation_lines_keep_their_places(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    write_split(corpus, "valid", [("ba be", "so it is as ba be"), ("", ""), ("bi", "so it is as bi"), ("bo", "")])
    assert fit(corpus, tmp_path / "run", trainer__max_steps=2) == 0
    assert len(lines(tmp_path / "run" / "hypotheses.valid.txt")) == 4


def test_learned_positions_too_few_for_validation_are_found_before_training(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus")
    long = " ".join(WORDS * 3)
    write_split(corpus, "valid", [("ba", "so it is as ba"), (long, f"so it is as {long}")])
    learned = {"model__position": "learned", "model__max_positions": 24}
    assert fit(corpus, tmp_path / "run", **learned, model__validate_every=2) == 1
    assert "max_positions" in capsys.readouterr().err
    assert metrics(tmp_path / "run", "train_loss") == []


def test_learned_positions_too_few_for_training_are_found_before_training(tmp_path, corpus, capsys):
    assert fit(corpus, tmp_path / "run", model__position="learned", model__max_positions=6) == 1
    assert "max_positions = 6" in capsys.readouterr().err
    assert metrics(tmp_path / "run", "train_loss") == []


def test_missing_text_ends_in_one_line(tmp_path, corpus, capsys):
    assert fit(corpus, tmp_path / "run", data__train="[nowhere.src, nowhere.tgt]") == 1
    assert "nowhere.src" in one_error(capsys.readouterr().err)


# fit again


def test_a_finished_run_typed_again_says_so_and_changes_nothing(corpus, copied, capsys):
    assert fit(corpus, copied) == 0
    before = content(copied)
    capsys.readouterr()
    assert fit(corpus, copied) == 0
    assert "is finished: 24 updates" in capsys.readouterr().err
    assert content(copied) == before


def test_a_finished_run_keeps_all_but_its_configuration_where_only_the_machine_changes(corpus, copied):
    before = content(copied)
    changes = {"data__max_tokens": 500, "data__num_workers": 1, "trainer__log_every_n_steps": 7, "run__variant": "b"}
    assert fit(corpus, copied, **changes) == 0
    before.pop("config.yaml")
    assert {name: text for name, text in content(copied).items() if name != "config.yaml"} == before


def test_fewer_updates_than_reached_are_refused_and_leave_the_run_alone(corpus, copied, capsys):
    assert fit(corpus, copied) == 0  # the copy's own configuration, with its own run.dir
    before = content(copied)
    capsys.readouterr()
    assert fit(corpus, copied, trainer__max_steps=UPDATES - 1) == 1
    shown = one_error(capsys.readouterr().err)
    assert "24" in shown
    assert "23" in shown
    after = content(copied)
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model__d_ff": 48}, "model.d_ff"),
        ({"model__num_layers": 2}, "model.num_layers"),
        ({"model__dropout": 0.2}, "model.dropout"),
        ({"model__position": "learned"}, "model.position"),
        ({"model__warmup": 11}, "model.warmup"),
        ({"model__label_smoothing": 0}, "model.label_smoothing"),
        ({"data__tokens_per_update": 260}, "data.tokens_per_update"),
        ({"data__max_length": 100}, "data.max_length"),
        ({"data__vocab_size": 290}, "data.vocab_size"),
        ({"data__tgt_lang": "fr"}, "data.tgt_lang"),
        ({"seed_everything": 2}, "seed_everything"),
        ({"trainer__gradient_clip_val": 1.0}, "trainer.gradient_clip_val"),
        ({"trainer__precision": "bf16-mixed"}, "trainer.precision"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("updates", [UPDATES, UPDATES + 4])
def test_another_experiment_in_the_same_folder_is_refused_by_name(changes, field, updates, corpus, copied, capsys):
    before = content(copied)
    assert fit(corpus, copied, trainer__max_steps=updates, **changes) == 1
    shown = one_error(capsys.readouterr().err)
    assert f"{field} = " in shown
    assert content(copied) == before


def changed_corpus(corpus, folder, split="train"):
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("store"))
    for side in ("src", "tgt"):
        text = lines(folder / f"{split}.{side}")
        (folder / f"{split}.{side}").write_text("\n".join([*text[:-1], text[0] + " du"]) + "\n")
    return folder


@pytest.mark.parametrize("split", ["train", "valid"])
def test_more_updates_on_other_text_are_refused_and_the_result_stays(split, corpus, copied, tmp_path, capsys):
    other = changed_corpus(corpus, tmp_path / "other", split)
    before = content(copied)
    assert fit(other, copied, trainer__max_steps=UPDATES + 4) == 1
    assert "data = " in one_error(capsys.readouterr().err)
    assert steps(copied)[-1] == UPDATES
    assert content(copied).get("result.json") == before["result.json"]


def test_a_finished_run_is_not_called_finished_for_other_text(corpus, copied, tmp_path, capsys):
    other = changed_corpus(corpus, tmp_path / "other")
    assert fit(other, copied) == 1
    assert "is finished" not in capsys.readouterr().err


def test_the_same_text_in_another_place_goes_on(corpus, copied, tmp_path):
    shutil.copytree(corpus, tmp_path / "moved")
    assert fit(tmp_path / "moved", copied, trainer__max_steps=UPDATES + 2) == 0
    assert read_json(copied / "result.json")["updates"] == UPDATES + 2


def test_a_run_that_never_trained_can_be_typed_again_with_what_was_wrong(tmp_path, corpus, capsys):
    assert fit(corpus, tmp_path / "run", data__vocab_size=5000, trainer__max_steps=2) == 1
    assert "vocab_size = 5000" in capsys.readouterr().err
    assert fit(corpus, tmp_path / "run", trainer__max_steps=2) == 0


def test_a_run_in_two_halves_equals_the_straight_one(corpus, finished, tmp_path, capsys):
    run = tmp_path / "run"
    assert fit(corpus, run, trainer__max_steps=12) == 0
    first = read_json(run / "result.json")
    assert first["updates"] == 12
    capsys.readouterr()
    assert fit(corpus, run) == 0
    assert "going on after update 12" in capsys.readouterr().err
    assert [step for step, _ in metrics(run, "train_loss")] == list(range(1, UPDATES + 1))
    assert metrics(run, "train_loss") == metrics(finished, "train_loss")
    assert metrics(run, "val_nll") == metrics(finished, "val_nll")
    assert metrics(run, "val_bleu") == metrics(finished, "val_bleu")
    assert same_weights(newest(run), newest(finished))
    result, straight = (read_json(folder / "result.json") for folder in (run, finished))
    for name in ("updates", "nll", "bleu", "chrf", "src_tokens", "tgt_tokens", "flops", "epochs", "data", "parameters"):
        assert result[name] == straight[name]
    assert result["hours"] > first["hours"]


def test_another_split_into_micro_batches_keeps_updates_and_validations_in_place(corpus, finished, tmp_path):
    run = tmp_path / "run"
    for updates, max_tokens in ((5, 60), (12, 400), (UPDATES, 90)):
        assert fit(corpus, run, trainer__max_steps=updates, data__max_tokens=max_tokens) == 0
    assert [step for step, _ in metrics(run, "train_loss")] == list(range(1, UPDATES + 1))
    # A session's end is no validation of the plan; the sessions here end where none is due.
    assert [step for step, _ in metrics(run, "val_nll")] == [8, 16, 24]
    result, straight = (read_json(folder / "result.json") for folder in (run, finished))
    for name in ("updates", "src_tokens", "tgt_tokens", "epochs"):
        assert result[name] == straight[name]


@pytest.mark.parametrize("update", [1, 9, 14, 24], ids=["at once", "after validation", "in between", "at the last"])
def test_a_crashed_run_goes_on_and_equals_the_straight_one(update, corpus, finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        crash_at(patched, update)
        with pytest.raises(Crash):
            fit(corpus, run)
    assert steps(run)[-1:] == ([(update - 1) // 4 * 4] if update > 4 else [])
    assert not (run / "result.json").exists()
    assert fit(corpus, run) == 0
    assert same_weights(newest(run), newest(finished))
    # Updates behind the last checkpoint may be trained and logged twice, but to the same values, and none is missing.
    rows = metrics(run, "train_loss")
    assert sorted(set(rows)) == metrics(finished, "train_loss")
    repeated = [step for step, count in Counter(step for step, _ in rows).items() if count > 1]
    assert all((update - 1) // 4 * 4 < step < update for step in repeated)
    assert metrics(run, "val_bleu") == metrics(finished, "val_bleu")


def test_no_metric_before_a_checkpoint_is_lost_when_the_process_is_killed(corpus, finished, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(CSVLogger, "finalize", lambda self, status: None)  # a killed process finalizes nothing
        crash_at(patched, 11)
        with pytest.raises(Crash):
            fit(corpus, run)
    assert steps(run) == [4, 8]
    assert fit(corpus, run) == 0
    for column in ("train_loss", "val_nll", "val_bleu"):
        assert metrics(run, column) == metrics(finished, column)


def test_a_run_without_its_result_is_scored_again_without_training(corpus, copied, finished):
    (copied / "result.json").unlink()
    (copied / "hypotheses.valid.txt").unlink()
    checkpoints = content(copied / "checkpoints")
    assert fit(corpus, copied) == 0
    assert content(copied / "checkpoints") == checkpoints
    assert metrics(copied, "train_loss") == metrics(finished, "train_loss")
    ours, theirs = read_json(copied / "result.json"), read_json(finished / "result.json")
    for name in ("updates", "nll", "bleu", "chrf", "src_tokens", "flops", "hours", "epochs", "unfinished"):
        assert ours[name] == theirs[name]
    assert lines(copied / "hypotheses.valid.txt") == lines(finished / "hypotheses.valid.txt")


def test_a_second_interrupt_does_not_wait_for_the_update_and_the_run_goes_on(corpus, finished, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        crash_at(patched, 7, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
        assert fit(corpus, run) == 130
    assert "stopped by SIGINT; the same command goes on" in capsys.readouterr().err
    assert steps(run) == [4]
    assert fit(corpus, run) == 0
    assert same_weights(newest(run), newest(finished))


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("update", [1, 4, 6, 8, UPDATES])
def test_a_signal_in_training_leaves_one_checkpoint_and_the_run_goes_on(
    name, update, corpus, finished, tmp_path, capsys
):
    """Updates between checkpoints, with one, with a validation, and the last."""
    run, number = tmp_path / "run", signal.Signals[name]
    with pytest.MonkeyPatch.context() as patched:
        crash_at(patched, update, lambda: signal.raise_signal(number))
        assert fit(corpus, run) == 128 + number
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"lit-transformer fit: stopped by {name} after update {update}, which is saved; the same command goes on"
    )
    assert steps(run) == [*range(4, update, 4), update][-3:]
    assert fit(corpus, run) == 0
    assert same_weights(newest(run), newest(finished))
    assert steps(run) == steps(finished)
    assert metrics(run, "val_nll") == metrics(finished, "val_nll")


def test_a_signal_while_scoring_ends_at_once(corpus, finished, copied, monkeypatch):
    (copied / "result.json").unlink()
    with monkeypatch.context() as patched:
        step = module.LitTransformer.validation_step
        patched.setattr(
            module.LitTransformer, "validation_step", lambda *a: (signal.raise_signal(signal.SIGTERM), step(*a))[1]
        )
        assert fit(corpus, copied) == 128 + signal.SIGTERM
    assert not (copied / "result.json").exists()
    assert fit(corpus, copied) == 0


def not_finite(monkeypatch, calls):
    """The loss of some micro-batches is not a number."""
    original, done = transformer.vocabulary_losses, itertools.count(1)

    def losses(*given):
        loss, nll = original(*given)
        return (loss * math.nan if next(done) in calls else loss), nll

    monkeypatch.setattr(transformer, "vocabulary_losses", losses)


def test_a_loss_that_stays_not_finite_stops_in_one_line_with_finite_weights(corpus, finished, tmp_path, capsys):
    run = tmp_path / "run"
    # 250 tokens an update fit into one micro-batch of 400, so the eleventh loss is update 11's.
    with pytest.MonkeyPatch.context() as patched:
        not_finite(patched, range(11, 100))
        assert fit(corpus, run) == 1
    error = one_error(capsys.readouterr().err)
    assert "update 15" in error
    assert "no longer finite" in error
    assert steps(run) == [4, 8, 12]
    assert all(torch.isfinite(tensor).all() for tensor in newest(run)["state_dict"].values())
    assert not (run / "result.json").exists()


def test_a_loss_that_is_not_finite_once_is_left_out_said_and_recorded(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        not_finite(patched, {11})
        assert fit(corpus, run) == 0
    assert "1 update was left out" in capsys.readouterr().err
    assert read_json(run / "result.json")["updates_left_out"] == 1


def test_a_rate_that_is_far_too_high_stops_in_one_line(corpus, tmp_path, capsys):
    assert fit(corpus, tmp_path / "run", model__lr_factor=1e30, run__checkpoint_every=1) == 1
    assert "update 6: " in one_error(capsys.readouterr().err)


def test_thirty_saves_leave_the_newest_five_and_the_averages(corpus, tmp_path, monkeypatch):
    run, prune, counts = tmp_path / "run", callbacks.prune_checkpoints, []

    def counted(folder, every, keep):
        prune(folder, every, keep)
        counts.append(len(steps(run)))

    monkeypatch.setattr(callbacks, "prune_checkpoints", counted)
    often = {"run__checkpoint_every": 1, "run__keep_checkpoints": 5, "model__bleu_every": 0}
    assert fit(corpus, run, trainer__max_steps=20, **often) == 0
    assert main(["average", str(run), "--last", "5"]) == 0
    average = run / "checkpoints" / "average-5-step-00000020.ckpt"
    before = average.read_bytes()
    assert fit(corpus, run, trainer__max_steps=30, **often) == 0
    assert counts == [1, 2, 3, 4] + [5] * 26
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        average.name,
        *(f"step-{step:08d}.ckpt" for step in range(26, 31)),
    ]
    assert average.read_bytes() == before


def test_fewer_checkpoints_than_before_are_kept_when_told_so(corpus, copied):
    assert fit(corpus, copied, trainer__max_steps=UPDATES + 4, run__keep_checkpoints=2) == 0
    assert steps(copied) == [UPDATES, UPDATES + 4]


# validate, test, average


def exit_status(args):
    try:
        return main([str(word) for word in args])
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("back", [0, 1], ids=["at the end", "at the validation before"])
def test_validate_gives_the_bleu_that_training_logged(back, corpus, copied, finished):
    step, logged = metrics(finished, "val_bleu")[-1 - back]
    nll = dict(metrics(finished, "val_nll"))[step]
    checkpoint = dict(list_checkpoints(copied / "checkpoints"))[step]
    assert exit_status(["validate", copied, "--checkpoint", checkpoint, "--sentences", 5]) == 0
    found = read_json(copied / f"validate.{checkpoint.stem}.sentences-5.json")
    assert logged > 0
    assert round(found["bleu"]["score"], 2) == round(logged, 2)
    assert found["bleu"]["sentences"] == found["sentences"] == 5
    assert found["bleu"]["signature"] == read_json(finished / "result.json")["bleu"]["signature"]
    assert found["nll"] == pytest.approx(nll, abs=1e-6)
    assert found["updates"] == step
    assert found["checkpoint"] == checkpoint.name


def test_commands_write_into_the_runs_folder_alone_and_scoring_only_its_own_files(
    corpus, copied, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert fit(corpus, copied, trainer__max_steps=UPDATES + 1) == 0
    before = content(copied)
    assert exit_status(["validate", copied]) == 0
    assert exit_status(["test", copied]) == 0
    after = content(copied)
    assert {name: after[name] for name in before} == before
    assert not list((tmp_path / "here").iterdir())


def test_validate_scores_the_newest_checkpoint_as_fit_did(copied, finished):
    assert exit_status(["validate", copied]) == 0
    found, result = read_json(copied / "validate.json"), read_json(finished / "result.json")
    for name in ("nll", "perplexity", "bleu", "compound_split_bleu", "chrf", "tokens", "updates", "data", "seed"):
        assert found[name] == result[name]
    assert found["sentences"] == 12


def test_validate_prints_the_update_that_it_scored(copied, capsys):
    assert exit_status(["validate", copied]) == 0
    assert f"update {UPDATES}" in capsys.readouterr().out


def test_decoding_options_reach_the_search_and_the_record(copied, monkeypatch):
    seen = []

    def search(model, sources, **options):
        seen.append(options)
        return search_all(model, sources, **options)

    monkeypatch.setattr(evaluation, "search_all", search)
    assert exit_status(["validate", copied, "--beam_size", 2, "--length_penalty", 0.1]) == 0
    assert [(options["beam_size"], options["length_penalty"]) for options in seen] == [(2, 0.1)]
    found = read_json(copied / "validate.beam-2.alpha-0.1.json")
    assert (found["beam_size"], found["length_penalty"]) == (2, 0.1)


def test_validating_some_sentences_leaves_the_results_own_hypotheses(copied, finished):
    assert exit_status(["validate", copied, "--sentences", 3, "--beam_size", 1]) == 0
    assert lines(copied / "hypotheses.valid.txt") == lines(finished / "hypotheses.valid.txt")
    assert (copied / "result.json").read_bytes() == (finished / "result.json").read_bytes()


def test_test_with_average_names_its_inputs_and_scores_the_mean(corpus, copied):
    assert exit_status(["test", copied, "--average", 2]) == 0
    found = read_json(copied / "test.average-2.json")
    assert found["split"] == "test"
    assert [entry["name"] for entry in found["averaged"]] == ["step-00000020.ckpt", "step-00000024.ckpt"]
    assert [entry["step"] for entry in found["averaged"]] == [20, 24]
    hypotheses, references = lines(copied / "hypotheses.test.average-2.txt"), lines(corpus / "test.tgt")
    assert len(hypotheses) == 7
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        assert found[name]["score"] == pytest.approx(metric.corpus_score(hypotheses, [references]).score, abs=1e-9)
    mean = load_checkpoint(copied / "checkpoints" / "average-2-step-00000024.ckpt")["state_dict"]
    two = [load_checkpoint(path)["state_dict"] for _, path in list_checkpoints(copied / "checkpoints")[-2:]]
    name = "model.embedding.weight"
    torch.testing.assert_close(mean[name], (two[0][name] + two[1][name]) / 2)
    assert hypotheses == [
        best
        for (best,) in Translator(copied / "checkpoints" / "average-2-step-00000024.ckpt").translate(
            lines(corpus / "test.src")
        )
    ]


def test_an_average_counts_as_a_checkpoint_to_score_but_not_to_go_on_from(corpus, copied):
    assert exit_status(["average", copied, "--last", 3]) == 0
    average = copied / "checkpoints" / "average-3-step-00000024.ckpt"
    assert exit_status(["validate", copied, "--checkpoint", average]) == 0
    assert len(read_json(copied / "validate.average-3-step-00000024.json")["averaged"]) == 3
    assert exit_status(["validate", copied]) == 0
    assert read_json(copied / "validate.json")["averaged"] == []
    assert fit(corpus, copied, trainer__max_steps=UPDATES + 1) == 0
    assert read_json(copied / "result.json")["updates"] == UPDATES + 1


def test_what_a_signal_left_is_not_averaged_unless_the_run_ends_there(corpus, tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        crash_at(patched, 10, lambda: signal.raise_signal(signal.SIGTERM))
        assert fit(corpus, run, run__average=3) == 128 + signal.SIGTERM
    assert steps(run) == [4, 8, 10]
    assert exit_status(["average", run, "--last", 2, "--out", tmp_path / "mean.ckpt"]) == 0
    assert [entry["step"] for entry in load_checkpoint(tmp_path / "mean.ckpt")["averaged"]] == [4, 8]
    capsys.readouterr()
    assert exit_status(["average", run, "--last", 3]) == 1
    assert "holds 2 of the 3 checkpoints" in one_error(capsys.readouterr().err)
    assert fit(corpus, run, trainer__max_steps=10, run__average=3) == 0
    found = read_json(run / "result.json")
    assert [entry["step"] for entry in found["averaged"]] == [4, 8, 10]
    assert found["updates"] == 10
    assert fit(corpus, run, trainer__max_steps=10, run__average=3) == 0
    assert "is finished" in capsys.readouterr().err


def test_average_writes_where_it_is_told_and_prints_the_place(copied, tmp_path, capsys):
    assert exit_status(["average", copied, "--last", 2, "--out", tmp_path / "new" / "mean.ckpt"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "new" / "mean.ckpt")]
    assert load_checkpoint(tmp_path / "new" / "mean.ckpt")["global_step"] == UPDATES


@pytest.mark.parametrize("command", ["average --last", "validate --average", "test --average"])
@pytest.mark.parametrize("count", [4, -1])
def test_averages_of_more_than_there_are_are_refused(command, count, copied, capsys):
    command, flag = command.split()
    before = content(copied)
    assert exit_status([command, copied, flag, count]) == 1
    shown = one_error(capsys.readouterr().err)
    assert "checkpoints to average" in shown
    assert count < 0 or "holds 3 of" in shown
    assert content(copied) == before


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_checkpoint_and_an_average_together_are_refused(command, copied, capsys):
    before = content(copied)
    checkpoint = list_checkpoints(copied / "checkpoints")[-1][1]
    assert exit_status([command, copied, "--checkpoint", checkpoint, "--average", 2]) == 2
    shown = capsys.readouterr().err
    assert "--checkpoint" in shown
    assert "--average" in shown
    assert content(copied) == before


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_folder_that_is_no_run_is_refused(command, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert exit_status([command, tmp_path / "run"]) == 1
    assert "config.yaml" in capsys.readouterr().err
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("command", ["validate", "test", "average"])
def test_a_run_without_a_checkpoint_is_refused(command, finished, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    shutil.copy(finished / "config.yaml", tmp_path / "run")
    assert exit_status([command, tmp_path / "run"]) == 1
    assert "checkpoint" in one_error(capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.fixture(scope="module")
def untested(tmp_path_factory):
    """A run without a test split, and its text."""
    corpus = write_corpus(tmp_path_factory.mktemp("untested"), train=200)
    run = corpus / "run"
    assert fit(corpus, run, data__test=None, trainer__max_steps=8) == 0
    return corpus, run


def test_test_without_a_test_split_is_refused(untested, capsys):
    _, run = untested
    before = content(run)
    assert exit_status(["test", run]) == 1
    assert "no test split" in one_error(capsys.readouterr().err)
    assert content(run) == before


def test_text_given_to_test_later_is_read_with_the_models_own_tokeniser(untested, tmp_path):
    """Even where it overlaps with the training text, which a store of both would drop from the tokeniser's text."""
    corpus, run = untested
    pairs = list(zip(lines(corpus / "train.src"), lines(corpus / "train.tgt"), strict=True))
    common = [pair for pair in pairs if "ba" in pair[0] or "ke" in pair[0] or "mu" in pair[0]]
    write_split(tmp_path, "later", common)
    given = json.dumps([str(tmp_path / f"later.{side}") for side in ("src", "tgt")])
    assert exit_status(["test", run, "--data.test", given]) == 0
    translator = Translator(list_checkpoints(run / "checkpoints")[-1][1])
    assert lines(run / "hypotheses.test.txt") == [best for (best,) in translator.translate([src for src, _ in common])]
    found = read_json(run / "test.json")
    assert found["bleu"]["sentences"] == len(common)
    assert found["tokens"] == sum(len(ids) + 1 for ids in translator.tokenizer.encode([tgt for _, tgt in common]))


@pytest.fixture(scope="module")
def strangers(corpus, tmp_path_factory):
    """Files that are no checkpoint of `finished`, by what is wrong with them."""
    folder = tmp_path_factory.mktemp("strangers")
    assert fit(corpus, folder / "wide", model__d_model=16, trainer__max_steps=1) == 0
    other = write_corpus(folder / "corpus", seed=1)
    for split in ("train", "valid"):
        for side in ("src", "tgt"):
            path = other / f"{split}.{side}"
            path.write_text(path.read_text().replace("a", "y").replace("k", "z"))
    assert fit(other, folder / "text", trainer__max_steps=1) == 0
    (folder / "note.ckpt").write_text("not a checkpoint")
    torch.save({"weights": torch.zeros(3)}, folder / "list.ckpt")
    return {
        "another model": folder / "wide" / "checkpoints" / "step-00000001.ckpt",
        "other text": folder / "text" / "checkpoints" / "step-00000001.ckpt",
        "no checkpoint": folder / "note.ckpt",
        "no model": folder / "list.ckpt",
        "not there": folder / "nowhere.ckpt",
        "a folder": folder,
    }


@pytest.mark.parametrize("kind", ["another model", "other text", "no checkpoint", "no model", "not there", "a folder"])
def test_a_wrong_checkpoint_is_refused_in_one_line(kind, strangers, copied, capsys):
    before = content(copied)
    assert exit_status(["validate", copied, "--checkpoint", strangers[kind]]) == 1
    error = one_error(capsys.readouterr().err)
    assert str(strangers[kind]) in error or "data = " in error or "tokenizer = " in error
    assert content(copied) == before


def cut_short(path):
    path.write_bytes(path.read_bytes()[:1000])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_model(path):
    checkpoint = load_checkpoint(path)
    name = next(iter(checkpoint["state_dict"]))
    checkpoint["state_dict"][name] = torch.zeros(3)
    torch.save(checkpoint, path)


def of_another_seed(path):
    checkpoint = load_checkpoint(path)
    checkpoint["hyper_parameters"]["seed"] = 99
    torch.save(checkpoint, path)


def of_another_update(path):
    shutil.copy(list_checkpoints(path.parent)[0][1], path)


@pytest.mark.parametrize(
    "damage",
    [cut_short, flip_a_bit, of_another_model, of_another_seed, of_another_update, lambda p: p.write_bytes(b"")],
)
def test_a_damaged_checkpoint_is_set_aside_aloud_and_the_one_before_it_is_used(
    damage, corpus, finished, copied, capsys
):
    longer = {"trainer__max_steps": UPDATES + 4}
    assert fit(corpus, copied, **longer) == 0
    expected, before = newest(copied), steps(finished)
    shutil.rmtree(copied)
    shutil.copytree(finished, copied)
    path = list_checkpoints(copied / "checkpoints")[-1][1]
    damage(path)
    capsys.readouterr()
    assert fit(corpus, copied, **longer) == 0
    said = capsys.readouterr().err
    assert f"{path.name} is" in said
    assert f"{path.name}.damaged from now on, and step-{before[-2]:08d}.ckpt is used" in said
    assert f"going on after update {before[-2]}" in said
    assert path.with_name(f"{path.name}.damaged").is_file()
    assert same_weights(newest(copied), expected)


@pytest.mark.parametrize("content", [b": [", b"\xff\xfe", b"", b"- 1"])
def test_a_damaged_configuration_is_named(content, corpus, copied, capsys):
    (copied / "result.json").unlink()
    (copied / "config.yaml").write_bytes(content)
    assert fit(corpus, copied) == 1
    assert f"{copied / 'config.yaml'} is damaged" in one_error(capsys.readouterr().err)


def test_a_run_with_damaged_checkpoints_alone_does_not_start_anew(corpus, copied, capsys):
    for _, path in list_checkpoints(copied / "checkpoints"):
        cut_short(path)
    for _ in range(2):
        assert fit(corpus, copied, trainer__max_steps=UPDATES + 4) == 1
        assert "has no checkpoint to go on from" in one_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        (["--model.d_model", 16], "model"),
        (["--model.num_layers", 2], "model"),
        (["--model.d_modle", 16], "model.d_modle"),
        (["--beam_size", 0], "beam_size"),
        (["--length_penalty", -1], "length_penalty"),
        (["--sentences", -3], "sentences"),
        (["--sentences", 0], "sentences 0: must be at least 1"),
        (["--average", 0], "0 checkpoints to average: must be at least 1"),
        (["--name", "a/b"], "--name 'a/b'"),
        (["--sentence", 3], "--sentence"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_of_validate_end_in_one_line(option, word, copied, capsys):
    before = content(copied)
    assert exit_status(["validate", copied, *option]) == 1
    assert word in one_error(capsys.readouterr().err)
    assert content(copied) == before


def test_a_run_that_was_moved_is_scored_where_it_stands(copied, tmp_path):
    shutil.copytree(copied, tmp_path / "elsewhere")
    shutil.rmtree(copied)
    assert exit_status(["validate", tmp_path / "elsewhere", "--sentences", 2]) == 0
    assert (tmp_path / "elsewhere" / "validate.sentences-2.json").is_file()
    assert not copied.exists()


def test_scores_are_of_the_hypotheses_file_even_where_the_model_writes_newlines(corpus, copied, monkeypatch):
    # What stands in the file is what the sacrebleu command sees; a newline behind a hyphen means a cut word to it.
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: "so it is as ba-\nbe\r\nbi")
    assert exit_status(["test", copied]) == 0
    hypotheses, references = lines(copied / "hypotheses.test.txt"), lines(corpus / "test.tgt")
    assert len(hypotheses) == len(references)
    found = read_json(copied / "test.json")
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        assert found[name]["score"] == pytest.approx(metric.corpus_score(hypotheses, [references]).score, abs=1e-9)


# Several processes


@pytest.mark.slow
def test_a_second_process_waits_for_the_run(corpus, copied):
    command = [sys.executable, "-m", "lit_transformer", "fit", *arguments(corpus, copied)]
    with open(copied / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            assert "waiting for it" in second.stderr.readline()
            assert second.poll() is None
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
            _, rest = second.communicate(timeout=60)
    assert second.returncode == 0
    assert "is finished" in rest


def test_the_lock_is_held_while_training_and_free_afterwards(corpus, tmp_path, monkeypatch):
    run, states = tmp_path / "run", []

    def is_locked():
        with open(run / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    monkeypatch.setattr(module.LitTransformer, "on_train_start", lambda self: states.append(is_locked()))
    crash_at(monkeypatch, 1)
    with pytest.raises(Crash):
        fit(corpus, run)
    assert states == [True]
    assert not is_locked()
