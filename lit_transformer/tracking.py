"""A run in Weights & Biases, where it asks for one: never prompts, never blocks, and no result depends on it."""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import Logger

from lit_transformer.cli import ExperimentCLI
from lit_transformer.curves import read_curves
from lit_transformer.progress import say
from lit_transformer.store import write_atomic
from lit_transformer.wandb_file import last_update, mend, records

SAMPLES = 20
FILES = ("hypotheses.valid.txt", "sentences.valid.jsonl", "result.json", "config.yaml")
FAILED, KILLED = 1, 255  # exit statuses that wandb shows as such


class WandbRun(Logger):
    """Curves by update and, at the end, the result; whatever goes wrong with wandb ends the tracking alone.

    A step of wandb is an update, and its steps only rise. So updates that an earlier session has put down already are
    not logged again, and what that session lost when it was killed comes from the csv files.

    Args:
        run: wandb's.
        logged: the last update in its history.
        folder: wandb's, in that of the run.
    """

    def __init__(self, run: Any, logged: int, folder: Path) -> None:
        super().__init__()
        self._run, self._logged, self._folder = run, logged, folder
        self._update, self._row = 0, {}  # type: int, dict[str, float]
        self._try(lambda run: run.define_metric("*", step_metric="update"))

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def version(self) -> None:
        return None

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The whole configuration went in at the start."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Collect all values of an update before it is sent: what is sent is not sent again after a resume."""
        assert step is not None
        if step != self._update:
            self.save()
        self._update = step
        self._row.update(metrics)

    def save(self) -> None:
        """Send the update that is being collected; called before a checkpoint, when nothing of it is to come."""
        update, row = self._update, {**self._row, "update": self._update}
        if self._row and update > self._logged:
            self._try(lambda run: run.log(row, step=update))
            self._logged = update
        self._row = {}

    def finalize(self, status: str) -> None:
        """Scoring is still to come; and what an interrupted update has so far is not sent."""

    def catch_up(self, folder: Path, reached: int) -> None:
        """Log from the csv files what stands before the checkpoint that the run goes on from, and not yet in wandb."""
        rows: dict[int, dict[str, float]] = {}
        for name, curve in read_curves(folder).items():
            for update, value in curve.items():
                rows.setdefault(update, {})[name] = value
        for update in sorted(rows):
            if update <= reached:
                self.log_metrics(rows[update], update)
        self.save()

    def log_result(self, folder: Path) -> None:
        """What a finished run's files say: the figures of its table row, some translations, and the files."""
        self._try(lambda run: _log_result(run, folder))

    def finish(self, status: int) -> None:
        """End the run and wandb's own process; a failed one leaves out the update that it did not complete."""
        import wandb

        if not status:
            self.save()
        self._try(lambda run: run.finish(exit_code=status))
        with contextlib.suppress(Exception):
            wandb.teardown(exit_code=status)
        with contextlib.suppress(Exception):
            mend(self._folder)  # a full disk cuts files too

    def _try(self, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            say(f"wandb: {_plain(error)}; the run goes on without it")


@contextlib.contextmanager
def tracked(cli: ExperimentCLI, reached: int) -> Iterator[WandbRun | None]:
    """The run in wandb while a session lasts, marked as failed or killed where it ends so.

    Args:
        reached: the update of the checkpoint that the session goes on from.
    """
    if cli.run.wandb == "none" or _get_rank():  # one process writes for all
        yield None
        return
    # Files that wait to be sent stay with the run, not in the home folder; wandb's own faults are reported to nobody.
    ours = {"WANDB_DATA_DIR": str((cli.folder / "wandb").resolve()), "WANDB_ERROR_REPORTING": "false"}
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    tracker, status = None, FAILED
    try:
        tracker = _start(cli)
        if tracker:
            tracker.catch_up(cli.folder, reached)
        yield tracker
        status = 0
    except BaseException as error:
        if not isinstance(error, Exception):  # a signal's
            status = KILLED
        raise
    finally:
        if tracker:
            tracker.finish(status)
        for name in ours:
            os.environ.pop(name, None)


def _start(cli: ExperimentCLI) -> WandbRun | None:
    try:
        import wandb
    except ImportError as error:
        say(f"wandb cannot be imported ({_plain(error)}): going on without it")
        return None
    identity = cli.folder / "wandb_id"
    if not identity.is_file():
        write_atomic(identity, uuid.uuid4().hex[:8].encode())
    modes: list[Literal["online", "offline"]] = ["offline"]
    if cli.run.wandb == "online":
        if _key_exists():
            modes = ["online", "offline"]
        else:
            say("wandb: no key found, writing offline")
    for mode in modes:
        try:
            mend(cli.folder / "wandb")
            run = wandb.init(
                mode=mode,
                id=identity.read_text(),  # the same run after a resume
                resume="allow",
                name=f"{cli.run.variant or cli.folder.name}-seed{cli.seed}",
                group=cli.run.study or None,
                project=cli.run.wandb_project,
                dir=cli.folder,
                config=cli.plain,
                settings=wandb.Settings(
                    init_timeout=30,
                    finish_timeout=60,
                    silent=True,  # a sweep takes a trial's last line for the reason of its failure
                    console="off",
                    x_transaction_log_flush_interval=0.2,  # seconds that a killed run may lose
                ),
            )
            _wait_for_its_name(Path(run.settings.sync_file))
            logged = run.step - 1 if mode == "online" else last_update(cli.folder / "wandb")
        except Exception as error:
            say(f"wandb: {_plain(error)}; going on {'offline' if mode != modes[-1] else 'without it'}")
            with contextlib.suppress(Exception):
                wandb.teardown(exit_code=FAILED)
            continue
        if mode == "offline":
            say(f"wandb: writing offline; `wandb sync {cli.folder / 'wandb'}` sends it later")
        return WandbRun(run, logged, cli.folder / "wandb")
    return None


def _wait_for_its_name(file: Path) -> None:
    """Killed before it stands on disk of which run this is, the session would keep all others from being sent."""
    for _ in range(50):
        if file.is_file() and any(record.HasField("run") for record in records(file)):
            return
        time.sleep(0.1)


def _log_result(run: Any, folder: Path) -> None:
    import wandb

    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    figures = {name: result[name] for name in ("perplexity", "parameters", "updates", "src_tokens", "tgt_tokens")}
    figures |= {name: result[name] for name in ("flops", "hours", "data", "tokenizer")}
    for name in ("bleu", "compound_split_bleu", "chrf"):
        figures |= {name: result[name]["score"], f"{name}_signature": result[name]["signature"]}
    run.summary.update({f"result/{name}": value for name, value in figures.items()})
    sentences = (folder / "sentences.valid.jsonl").read_text(encoding="ascii").splitlines()
    chosen = np.unique(np.linspace(0, len(sentences) - 1, min(SAMPLES, len(sentences))).round().astype(int))
    columns: list[str | int] = ["source", "reference", "hypothesis"]
    rows = [json.loads(sentences[i]) for i in chosen]
    # In the summary, not in the history: a run that is scored again has that step behind it.
    run.summary["result/samples"] = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
    artifact = wandb.Artifact(f"result-{run.id}", type="result")
    for name in FILES:
        artifact.add_file(str(folder / name))
    run.log_artifact(artifact)


def _plain(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _key_exists() -> bool:
    """Where wandb itself looks; its own functions for this prompt, warn or change how a later run starts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
