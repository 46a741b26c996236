"""What the commands do: prepare, fit, translate."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger

from lit_transformer.callbacks import Checkpoints, Progress
from lit_transformer.checkpoint import average_newest, newest_checkpoint, usable_checkpoint
from lit_transformer.cli import ExperimentCLI
from lit_transformer.corpus import describe, prepare
from lit_transformer.decode import add_decoding
from lit_transformer.module import TrainingError
from lit_transformer.progress import say
from lit_transformer.ranks import check_processes, leave_children_alone, naming_who_is_missing
from lit_transformer.scoring import load, score, write_result
from lit_transformer.signals import Signals, Stopped, end_with_parent, requeue
from lit_transformer.sources import read_lines
from lit_transformer.store import Store, atomic_file, exclusive
from lit_transformer.tracking import tracked
from lit_transformer.translate import Translator, best_device

SWEEP_VARIABLE = "LIT_TRANSFORMER_SWEEP"  # process id of the sweep that a trial belongs to


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works on a run; a second one waits, which a killed one's orphan may make needed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.dir = {folder}: this folder cannot be made ({error.strerror})") from error
    if _get_rank():  # the first process holds the lock for all of them
        yield
        return
    with exclusive(folder / ".lock", lambda: say(f"{folder} is being worked on by another process; waiting for it")):
        yield


def prepare_command(args: Sequence[str]) -> int:
    """Text to a tokenised store."""
    cli = ExperimentCLI(args, "prepare", build=False)
    folder = prepare(cli.datamodule.corpus, cli.datamodule.root, say)
    for line in describe(Store(folder).meta["report"]):
        print(line)  # progress went to standard error, this is the result
    print(folder)
    return 0


def fit_command(args: Sequence[str]) -> int:
    """Train, or go on; at the end score the whole validation split and write result.json."""
    _stop_with_the_sweep()
    end_with_parent()
    with Signals() as signals:
        cli = ExperimentCLI(args, "fit")
        with locked(cli.folder), contextlib.ExitStack() as at_the_end:
            try:
                with naming_who_is_missing():
                    return _fit(cli, args, signals, at_the_end)
            except Stopped as stopped:
                for child in leave_children_alone():
                    if stopped.step is None:  # not told of it, and there is nothing that it could finish
                        child.kill()
                if stopped.number == signal.SIGUSR1 and not _get_rank() and (answer := requeue()):
                    say(answer)
                raise
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise TrainingError(
                    f"data.num_workers = {cli.datamodule.num_workers}: a process that makes batches has ended "
                    f"({' '.join(str(error).split())[:120]}); if it was for want of memory, lower data.num_workers; "
                    "the same command goes on from the last checkpoint"
                ) from error
            finally:
                for worker in multiprocessing.active_children():
                    worker.kill()  # it ignores the signal by which Python would end it, and then wait for it


def _fit(cli: ExperimentCLI, args: Sequence[str], signals: Signals, at_the_end: contextlib.ExitStack) -> int:
    folder, max_steps, first = cli.folder, cli.trainer_config.max_steps, not _get_rank()
    cli.refuse_another_experiment()
    reached, newest = usable_checkpoint(folder, cli.model, say, set_aside=first)
    if reached > max_steps:
        raise ValueError(
            f"{folder} has already trained {reached:,} updates, more than trainer.max_steps = {max_steps:,}: "
            "use another --run.dir for a shorter run"
        )
    run, timeout = cli.run, cli.trainer_config.timeout
    trainer = cli.trainer_config.build(
        logger=False,
        callbacks=[
            Checkpoints(
                folder / "checkpoints",
                run.checkpoint_every,
                run.keep_checkpoints,
                signals,
                timeout,
                run.checkpoint_minutes,
            ),
            Progress(folder),
        ],
    )
    check_processes(trainer)
    if first:
        cli.keep_config()
    if _has_result(cli, reached):
        say(f"{folder} is finished: {max_steps:,} updates, see {folder / 'result.json'}")
        return 0
    if first:
        departures = ", ".join(cli.departures()) or "nothing"
        say(f"{cli.model.model.num_parameters:,} parameters; departs from the paper's base in: {departures}")
    wandb_run = at_the_end.enter_context(tracked(cli, reached))
    if reached < max_steps:
        # Before the processes meet: they wait for each other for so long, and for text as long as it takes.
        cli.datamodule.prepare_data()
        if reached and first:
            say(f"{folder}: going on after update {reached:,}")
        trainer.loggers = [CSVLogger(folder, name="csv"), *([wandb_run] if wandb_run else [])]
        trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=newest, weights_only=True)
        signals.raise_pending()
    scored = newest_checkpoint(folder)
    if run.average > 1:
        scored = average_newest(folder, run.average, max_steps, write=trainer.is_global_zero, say=say)
        trainer.strategy.barrier()
    found = score(cli, trainer, "valid", load(cli, scored), scored)
    if trainer.is_global_zero:
        write_result(cli, trainer, found, scored, args)
    if wandb_run:
        wandb_run.log_result(folder)
    return 0


def _has_result(cli: ExperimentCLI, reached: int) -> bool:
    """Whether the run has been scored after its last update; refuses text that it was not trained on."""
    path, step = cli.folder / "result.json", cli.trainer_config.max_steps
    if not path.is_file():
        return False
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        updates, data = result["updates"], result["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, and the same command writes it anew") from error
    if updates != step and not reached:
        raise ValueError(
            f"{cli.folder} holds the result of {updates:,} updates but no checkpoint to go on from: use another "
            "--run.dir, or remove result.json to train anew"
        )
    cli.datamodule.prepare_data()
    cli.datamodule.setup("validate")
    assert cli.datamodule.store is not None
    if updates == step and data != cli.datamodule.store.fingerprint:
        raise ValueError(
            f"{cli.folder} was trained with data = {data}, this text is {cli.datamodule.store.fingerprint}: "
            "use the same text and options, or another --run.dir"
        )
    return bool(updates == step)


def _stop_with_the_sweep() -> None:
    """A trial whose sweep was killed ends too, on whatever host it runs: nothing goes on where nobody sees it."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGKILL)  # every file is written atomically, so this is safe

    # Standard input is a line that the sweep holds and never writes into; srun and torchrun pass its end on to every
    # process.  A launcher that does not gives /dev/null instead.
    if SWEEP_VARIABLE in os.environ and not stat.S_ISCHR(os.fstat(0).st_mode):
        threading.Thread(target=watch, daemon=True).start()


def translate_command(args: Sequence[str]) -> int:
    """One line out for each line in."""
    parser = argparse.ArgumentParser("lit-transformer translate", allow_abbrev=False)
    parser.add_argument("model", type=Path, help="a run's folder (its newest checkpoint) or a checkpoint")
    parser.add_argument("--input", type=Path, default=Path("/dev/stdin"), help="default: standard input")
    parser.add_argument("--output", type=Path, help="default: standard output")
    parser.add_argument("--n_best", type=int, default=1, help="so many lines for each line")
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--int8", action="store_true", help="on a CPU: faster, and now and then another translation")
    add_decoding(parser)
    options = parser.parse_args(args)
    translator = Translator(options.model, options.device, say, options.int8)
    lines = translator.translate_lines(
        read_lines(options.input), options.beam_size, options.length_penalty, options.n_best
    )
    if options.output:
        with atomic_file(options.output) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
    else:
        for line in lines:
            sys.stdout.buffer.write(f"{line}\n".encode())
            sys.stdout.buffer.flush()
    return 0


def quiet() -> None:
    """Silence what Lightning and torch say about themselves; what concerns the run stays."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for words in ("many workers", "treespec, LeafSpec", "is not resumable", "logging interval", "srun. command"):
        warnings.filterwarnings("ignore", f".*{words}.*")
