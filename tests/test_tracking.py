"""Weights & Biases: a run there is what the run's own files say, over any number of kills, and nothing waits for it.

Histories are read back from wandb's own files; what `wandb sync` sends is seen by a server of this machine.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_commands import UPDATES, Crash, arguments, content, crash_at, fit, metrics, one_error, read_json, write_corpus
from wandb_server import wandb_server

from lit_transformer import module, transformer
from lit_transformer.__main__ import main
from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.signals import Stopped
from lit_transformer.tracking import FAILED, KILLED
from lit_transformer.wandb_file import last_update, mend, records

EVERY_UPDATE = list(range(1, UPDATES + 1))
VALIDATED = [8, 16, 24]
KEY = "a" * 40


@pytest.fixture(autouse=True)
def no_wandb_of_the_users(monkeypatch, tmp_path_factory):
    for name in os.environ:
        if name.startswith("WANDB"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A tracked run of one session; nobody may change it."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert tracked(corpus, run, run__study="s", run__variant="v") == 0
    return run


def tracked(corpus, run, **changes):
    return fit(corpus, run, **{"run__wandb": "offline", **changes})


def sessions(run):
    """Each session's records; a second session of the same second gets a suffix, so by time of the last change."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [list(records(path)) for path in files]


def history(run):
    """Rows of all sessions in the order in which they would be sent: [(step, {name: value})]."""
    found = []
    for session in sessions(run):
        for record in session:
            if record.HasField("history"):
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                found.append((record.history.step.num, {name: json.loads(text) for name, text in values.items()}))
    return found


def summary(session):
    found = {}
    for record in session:
        for item in record.summary.update:
            found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def ends(run):
    """The exit status of each session, None where it was killed."""
    found = [[record.exit.exit_code for record in session if record.HasField("exit")] for session in sessions(run)]
    return [codes[0] if codes else None for codes in found]


def assert_whole(run):
    """Every update once, none out of its turn, with the values of the run's own files, and validations in place."""
    rows = history(run)
    assert [step for step, _ in rows] == EVERY_UPDATE
    assert all(row["_step"] == row["update"] == step for step, row in rows)
    for name in ("train_loss", "val_nll", "val_bleu"):
        assert [(step, row[name]) for step, row in rows if name in row] == [
            (step, pytest.approx(value)) for step, value in sorted(dict(metrics(run, name)).items())
        ]
    assert [step for step, row in rows if "val_nll" in row] == VALIDATED
    ids = {record.run.run_id for session in sessions(run) for record in session if record.HasField("run")}
    assert ids == {(run / "wandb_id").read_text()}


def services():
    """Process ids of wandb's own processes started under this one, or left by one that was killed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].endswith(b"wandb-core"):
                found.append((int(path.parent.name), int(words[words.index(b"--pid") + 1])))
    return found


def wait_until(true, what):
    for _ in range(3000):
        if true():
            return
        time.sleep(0.1)
    pytest.fail(f"waited in vain until {what}")


# What a run holds


def test_curves_are_by_update_and_those_of_the_csv_files(finished):
    assert_whole(finished)
    axes = [record.metric for record in sessions(finished)[0] if record.HasField("metric")]
    assert [(axis.glob_name, axis.step_metric) for axis in axes if axis.step_metric] == [("*", "update")]


def test_the_run_carries_group_name_id_and_configuration(finished):
    run = next(record.run for record in sessions(finished)[0] if record.HasField("run"))
    assert (run.run_group, run.display_name, run.project) == ("s", "v-seed1", "lit-transformer")
    assert run.run_id == (finished / "wandb_id").read_text()
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {name: config[name] for name in ("model", "data", "trainer", "run", "seed_everything")} == read_json(
        finished / "result.json"
    )["config"]


def test_the_summary_holds_the_figures_of_the_result(finished):
    result, found = read_json(finished / "result.json"), summary(sessions(finished)[0])
    for name in ("perplexity", "parameters", "updates", "src_tokens", "tgt_tokens", "flops", "hours", "data"):
        assert found[f"result/{name}"] == result[name]
    assert found["result/tokenizer"] == result["tokenizer"]
    for name in ("bleu", "compound_split_bleu"):
        assert found[f"result/{name}"] == result[name]["score"]
        assert found[f"result/{name}_signature"] == result[name]["signature"]


def test_sample_translations_are_a_table_of_sentences_spread_over_the_split(finished):
    table = summary(sessions(finished)[0])["result/samples"]
    (path,) = (finished / "wandb").glob(f"offline-run-*/files/{table['path']}")
    found = read_json(path)
    assert found["columns"] == ["source", "reference", "hypothesis"]
    lines = [json.loads(line) for line in (finished / "sentences.valid.jsonl").read_text().splitlines()]
    assert found["data"] == [[line[name] for name in found["columns"]] for line in lines]  # 12, fewer than wanted


def test_the_artifact_holds_the_runs_files(finished):
    (artifact,) = [r.artifact for r in sessions(finished)[0] if r.HasField("artifact") and r.artifact.type == "result"]
    held = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(held) == {"hypotheses.valid.txt", "sentences.valid.jsonl", "result.json", "config.yaml"}
    for name, path in held.items():
        assert path.is_relative_to(finished)  # nothing waits in the home folder
        assert path.read_bytes() == (finished / name).read_bytes()


def test_a_finished_run_typed_again_starts_no_run_and_adds_no_step(corpus, finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # not even looked for
    before = content(finished)
    assert tracked(corpus, finished, run__study="s", run__variant="v") == 0
    assert content(finished) == before
    assert ends(finished) == [0]


def test_nothing_of_wandb_is_left_behind(finished):
    assert not [pid for pid, parent in services() if parent == os.getpid()]
    assert "WANDB_DATA_DIR" not in os.environ


def test_results_do_not_depend_on_tracking(corpus, finished, tmp_path):
    assert fit(corpus, tmp_path) == 0
    assert (tmp_path / "hypotheses.valid.txt").read_bytes() == (finished / "hypotheses.valid.txt").read_bytes()
    assert not (tmp_path / "wandb").exists()


# Sessions that end early


@pytest.mark.parametrize(
    ("update", "error", "status"),
    [
        (19, Crash, KILLED),
        (17, ValueError("no more"), FAILED),
        (2, Stopped(15), KILLED),
        (22, Stopped(15), KILLED),
    ],
)
def test_a_run_that_ends_early_is_marked_and_goes_on_as_the_same_run(
    update, error, status, corpus, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        crash_at(patch, update, error)
        with contextlib.suppress(Crash):
            assert tracked(corpus, tmp_path) != 0
    assert ends(tmp_path) == [status]
    assert tracked(corpus, tmp_path) == 0
    assert ends(tmp_path) == [status, 0]
    assert_whole(tmp_path)


def test_a_loss_that_is_not_finite_is_a_failed_run(corpus, tmp_path, monkeypatch, capsys):
    original = transformer.vocabulary_losses
    monkeypatch.setattr(transformer, "vocabulary_losses", lambda *a: tuple(x * float("nan") for x in original(*a)))
    assert tracked(corpus, tmp_path) == 1
    assert "no longer finite" in one_error(capsys.readouterr().err)  # still the last line, for a sweep to quote
    assert ends(tmp_path) == [FAILED]


def test_an_update_cut_short_between_training_and_validation_is_whole_after_the_resume(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module.LitTransformer, "validation_step", lambda *_: (_ for _ in ()).throw(Stopped(15)))
        assert tracked(corpus, tmp_path) == 143
    assert history(tmp_path)[-1][0] < 8
    assert tracked(corpus, tmp_path) == 0
    assert_whole(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.3, 0.7, 0.99])
def test_what_a_kill_took_from_wandbs_file_comes_from_the_runs_own(share, corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        crash_at(patch, 23)
        with contextlib.suppress(Crash):
            tracked(corpus, tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert last_update(tmp_path / "wandb") < 22
    assert tracked(corpus, tmp_path) == 0
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        before = path.read_bytes()
        mend(tmp_path / "wandb")
        assert path.read_bytes() == before  # nothing is cut any more
    assert_whole(tmp_path)


def test_a_run_killed_while_it_was_scored_gets_its_result(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "result.json").unlink()
    assert tracked(corpus, tmp_path / "run", run__study="s", run__variant="v") == 0
    assert_whole(tmp_path / "run")
    assert summary(sessions(tmp_path / "run")[-1])["result/updates"] == UPDATES


def test_tracking_switched_on_later_has_the_whole_curve(corpus, tmp_path):
    assert fit(corpus, tmp_path, trainer__max_steps=12) == 0
    assert tracked(corpus, tmp_path) == 0
    assert [step for step, _ in history(tmp_path)] == EVERY_UPDATE


# Without wandb


def goes_on(corpus, run, capsys, *words, **changes):
    assert tracked(corpus, run, **changes) == 0
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown
    assert "Traceback" not in shown
    assert read_json(run / "result.json")["updates"] == UPDATES
    assert [step for step, _ in metrics(run, "train_loss")] == EVERY_UPDATE


def test_without_the_package_training_goes_on(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    goes_on(corpus, tmp_path, capsys, "wandb cannot be imported", "going on without it")


def test_without_a_key_online_is_offline_and_nobody_is_asked(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    goes_on(corpus, tmp_path, capsys, "no key found", "wandb sync", run__wandb="online")
    assert_whole(tmp_path)


def test_a_service_that_does_not_start_ends_the_tracking_alone(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wandb.sdk.lib.service.service_process.get_core_path", lambda: "/bin/false")
    goes_on(corpus, tmp_path, capsys, "going on without it")


def test_a_folder_that_cannot_be_written_ends_the_tracking_alone(corpus, tmp_path, capsys):
    (tmp_path / "wandb").write_text("in the way")
    goes_on(corpus, tmp_path, capsys, "going on without it")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_dies_ends_the_tracking_alone(number, corpus, tmp_path, monkeypatch, capsys):
    original = module.LitTransformer.training_step

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 10:
            for pid, parent in services():
                if parent == os.getpid():
                    os.kill(pid, number)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(module.LitTransformer, "training_step", training_step)
    goes_on(corpus, tmp_path, capsys, "wandb")


# Real processes: killed, synced


def command(corpus, run, **changes):
    return [
        sys.executable,
        "-m",
        "lit_transformer",
        "fit",
        *arguments(corpus, run, **{"run__wandb": "offline", **changes}),
    ]


def kill_when_past(words, run, update):
    """Start, kill -9 once a checkpoint of some update is there; wandb's own process ends with it."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    wait_until(lambda: process.poll() is not None or reached(run) >= update, f"update {update}")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    wait_until(lambda: process.pid not in {parent for _, parent in services()}, "the service of a killed run ended")


def reached(run):
    return max((step for step, _ in list_checkpoints(run / "checkpoints")), default=0)


def sync(address, *paths):
    """The documented command, without a terminal."""
    words = [Path(sys.executable).with_name("wandb"), "sync", *paths]
    environment = {**os.environ, "WANDB_BASE_URL": address, "WANDB_API_KEY": KEY}
    done = subprocess.run(
        words, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def assert_received(run, received, updates):
    """On the server: every update once and in its turn, the last session's end, figures, samples and files."""
    assert [row["_step"] for row in received.history] == [row["update"] for row in received.history]
    assert [row["_step"] for row in received.history] == list(range(1, updates + 1))
    assert received.ends[-1] == 0
    assert received.summary["result/perplexity"] == read_json(run / "result.json")["perplexity"]
    assert [name for name in received.files if name.startswith("media/table/result/samples")]
    assert "result" in received.artifacts


@pytest.mark.slow
def test_a_run_killed_between_checkpoints_is_one_continuous_run_here_and_after_its_sync(corpus, tmp_path):
    run, updates = tmp_path / "run", 260
    words = command(corpus, run, trainer__max_steps=updates, run__checkpoint_every=20, model__bleu_every=0)
    for update in (60, 200):
        kill_when_past(words, run, update)
    subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert not services()
    assert [step for step, _ in history(run)] == list(range(1, updates + 1))
    assert ends(run) == [None, None, 0]
    with wandb_server() as (address, runs):
        assert "Syncing 3 run" in sync(address, run / "wandb")
        assert list(runs) == [(run / "wandb_id").read_text()]
        assert_received(run, runs[(run / "wandb_id").read_text()], updates)
        assert "No runs to sync" in sync(address, run / "wandb")
        assert_received(run, runs[(run / "wandb_id").read_text()], updates)


@pytest.mark.parametrize("size", [0, 7, 40])
def test_a_session_killed_before_wandb_wrote_its_name_is_no_session(size, corpus, tmp_path):
    folder = tmp_path / "wandb" / "offline-run-20200101_000000-early"
    folder.mkdir(parents=True)
    (folder / "run-early.wandb").write_bytes((b":W&B\x01\xbe\x00" + bytes(33))[:size])
    assert tracked(corpus, tmp_path) == 0
    assert not folder.exists()  # or `wandb sync` would send none of its neighbours
    assert_whole(tmp_path)


@pytest.mark.slow
def test_the_cut_file_of_a_trial_that_never_went_on_leaves_the_others_their_sync(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "whole", symlinks=True)
    assert tracked(corpus, tmp_path / "cut") == 0
    (path,) = (tmp_path / "cut" / "wandb").glob("offline-run-*/*.wandb")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with wandb_server() as (address, runs):
        sync(address, tmp_path / "whole" / "wandb", tmp_path / "cut" / "wandb")
        assert_received(finished, runs[(finished / "wandb_id").read_text()], UPDATES)


@pytest.mark.slow
def test_online_a_killed_run_goes_on_where_the_server_stands(corpus, tmp_path, monkeypatch):
    with wandb_server() as (address, runs):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        words = command(corpus, tmp_path, trainer__max_steps=200, run__checkpoint_every=20, run__wandb="online")
        kill_when_past(words, tmp_path, 60)
        subprocess.run(words, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        assert_received(tmp_path, runs[(tmp_path / "wandb_id").read_text()], 200)


@pytest.mark.slow
def test_a_server_that_does_not_answer_leaves_a_key_with_an_offline_run(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    goes_on(corpus, tmp_path, capsys, "going on offline", run__wandb="online")
    assert_whole(tmp_path)


@pytest.mark.slow
def test_a_study_of_tracked_trials_with_one_killed_is_complete_and_synced_by_one_command(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "base.yaml"
    updates, printed = 40, io.StringIO()
    changes = {"trainer__max_steps": updates, "run__checkpoint_every": 5, "model__bleu_every": 0}
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["fit", *arguments(corpus, "unused", **changes), "--print_config"])
    config.write_text(printed.getvalue())
    shared = Path(__file__).parents[1] / "conf" / "wandb.yaml"
    Path("s.yaml").write_text(
        json.dumps(
            {
                "name": "s",
                "config": [str(config), str(shared)],
                "seeds": [1, 2],
                "variants": [{"name": "base"}, {"name": "one-head", "set": {"num_heads": 1}}],
            }
        )
    )
    words = [sys.executable, "-m", "lit_transformer", "sweep", "run", "s.yaml", "--workers", "1"]
    sweep = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    victim = Path("runs/s/one-head/seed1")
    wait_until(lambda: sweep.poll() is not None or reached(victim) >= 20, "the trial has passed update 20")
    os.kill(read_json(victim / "progress.json")["pid"], signal.SIGKILL)
    assert sweep.wait() == 0
    wait_until(lambda: not services(), "no service was left")
    folders = [Path("runs/s") / cell for cell in ("base/seed1", "base/seed2", "one-head/seed1", "one-head/seed2")]
    for folder in folders:
        assert [step for step, _ in history(folder)] == list(range(1, updates + 1))
        assert (folder / "hypotheses.valid.txt").is_file()
    assert ends(victim) == [None, 0]
    assert {path.name for path in Path("results").iterdir()} >= {"s.csv", "s.md", "s.png"}
    with wandb_server() as (address, runs):
        sync(address, *Path().glob("runs/s/*/*/wandb"))
        for folder in folders:
            received = runs[(folder / "wandb_id").read_text()]
            assert (received.group, received.display_name) == ("s", "-".join(folder.parts[-2:]))
            assert_received(folder, received, updates)
        assert len(runs) == 4
        assert "No runs to sync" in sync(address, *Path().glob("runs/s/*/*/wandb"))
