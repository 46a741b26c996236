"""What the commands do: prepare, fit, validate, test, translate, average."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import netrc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from lit_transformer.callbacks import Checkpoints, Progress
from lit_transformer.checkpoint import average_checkpoints, list_checkpoints, load_checkpoint
from lit_transformer.cli import ExperimentCLI
from lit_transformer.corpus import describe, prepare
from lit_transformer.decode import BEAM_SIZE, LENGTH_PENALTY
from lit_transformer.module import Evaluation
from lit_transformer.progress import say
from lit_transformer.sources import read_lines
from lit_transformer.store import Store, atomic_file, write_atomic, write_json
from lit_transformer.translate import Translator, best_device, one_line

SWEEP_VARIABLE = "LIT_TRANSFORMER_SWEEP"  # process id of the sweep that a trial belongs to


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time works on a run; a second one waits, which a killed one's orphan may make needed."""
    folder.mkdir(parents=True, exist_ok=True)
    if _get_rank():  # the first process holds the lock for all of them
        yield
        return
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder} is being worked on by another process; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def prepare_command(args: Sequence[str]) -> int:
    """Text to a tokenised store."""
    cli = ExperimentCLI(args, "prepare", build=False)
    folder = prepare(cli.datamodule.corpus, cli.datamodule.root, say)
    for line in describe(Store(folder).meta["report"]):
        print(line)
    print(folder)
    return 0


def fit_command(args: Sequence[str]) -> int:
    """Train, or go on; at the end score the whole validation split and write result.json."""
    _stop_with_the_sweep()
    cli = ExperimentCLI(args, "fit")
    folder, max_steps = cli.folder, cli.trainer_config.max_steps
    with locked(folder):
        if not _get_rank():
            cli.keep_config()
        checkpoints = list_checkpoints(folder / "checkpoints")
        reached = checkpoints[-1][0] if checkpoints else 0
        if reached > max_steps:
            raise ValueError(
                f"{folder} has already trained {reached:,} updates, more than trainer.max_steps = {max_steps:,}: "
                "use another --run.dir for a shorter run"
            )
        result = folder / "result.json"
        if reached == max_steps and result.is_file():
            say(f"{folder} is finished: {reached:,} updates, see {result}")
            return 0
        if not _get_rank():
            departures = f"departs from the paper's base in: {', '.join(cli.departures())}"
            say(
                f"{cli.model.model.num_parameters:,} parameters; "
                f"{departures if cli.departures() else 'the base model and training of the paper'}"
            )
        result.unlink(missing_ok=True)  # of fewer updates, where a finished run is extended
        trainer = cli.trainer_config.build(
            logger=_loggers(cli),
            callbacks=[
                Checkpoints(folder / "checkpoints", cli.run.checkpoint_every, cli.run.keep_checkpoints),
                Progress(folder),
            ],
        )
        if reached < max_steps:
            if reached:
                say(f"{folder}: going on after update {reached:,}")
            newest = checkpoints[-1][1] if checkpoints else None
            try:
                trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=newest, weights_only=True)
            except SystemExit:
                if trainer.interrupted:  # Lightning turns an interrupt into an exit of its own
                    raise KeyboardInterrupt from None
                raise
        found = _score(cli, trainer, "valid", list_checkpoints(folder / "checkpoints")[-1][1])
        if trainer.is_global_zero:
            _write_result(cli, trainer, found, args)
    return 0


def _stop_with_the_sweep() -> None:
    """A trial whose sweep was killed ends too: nothing goes on where nobody sees it."""
    parent = int(os.environ.get(SWEEP_VARIABLE, "0"))

    def watch() -> None:
        while True:
            time.sleep(2)
            try:
                os.kill(parent, 0)
            except ProcessLookupError:
                os.kill(os.getpid(), signal.SIGKILL)  # every file is written atomically, so this is safe

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def _loggers(cli: ExperimentCLI) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(cli.folder, name="csv")]
    if cli.run.wandb == "no":
        return loggers
    try:
        import wandb
    except ImportError:
        say("wandb is not installed: going on without it")
        return loggers
    online = cli.run.wandb == "online" and _wandb_key_exists()
    if cli.run.wandb == "online" and not online:
        say("wandb: no key found, writing offline; `wandb sync` sends it later")
    identity = cli.folder / "wandb_id"
    if not identity.is_file() and not _get_rank():
        write_atomic(identity, uuid.uuid4().hex[:8].encode())
    options: dict[str, Any] = {
        "name": f"{cli.run.variant or cli.folder.name}-seed{cli.config['seed_everything']}",
        "save_dir": cli.folder,
        "project": cli.run.wandb_project,
        "group": cli.run.study or None,
        "id": identity.read_text() if identity.is_file() else None,  # the same run after a resume
        "resume": "allow",
        "config": cli.plain,
        "settings": wandb.Settings(init_timeout=30),
    }
    logger = WandbLogger(offline=not online, **options)
    if online and not _get_rank():
        try:
            _ = logger.experiment  # connects now, so that no training waits for a network that is not there
        except wandb.errors.Error as error:
            say(f"wandb: {error}; writing offline, `wandb sync` sends it later")
            wandb.teardown()
            logger = WandbLogger(offline=True, **options)
    return [*loggers, logger]


def _wandb_key_exists() -> bool:
    """Where wandb itself looks; its own functions for this prompt, warn or change how a later run starts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


def _score(cli: ExperimentCLI, trainer: pl.Trainer, split: str, checkpoint: Path, sentences: int = 0) -> Evaluation:
    """Perplexity over a whole split and BLEU on so many sentences (0: all), with the weights of a checkpoint."""
    cli.model.load_state_dict(load_checkpoint(checkpoint)["state_dict"])
    cli.model.bleu_sentences = sentences or sys.maxsize
    say(f"scoring {split} with {checkpoint}")
    run = trainer.validate if split == "valid" else trainer.test
    run(cli.model, datamodule=cli.datamodule, verbose=False)
    assert cli.model.evaluation is not None
    return cli.model.evaluation


def _scores(found: Evaluation) -> dict[str, Any]:
    names = {"sacreBLEU": "bleu", "compound-split BLEU": "compound_split_bleu", "chrF": "chrf"}
    return {
        "split": found.split,
        "nll": found.nll,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "unfinished": found.unfinished,
        **{names[score.name]: score.as_dict() for score in found.scores},
    }


def _facts(cli: ExperimentCLI, found: Evaluation, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What every result says of the run that it comes from."""
    data = checkpoint["TranslationDataModule"]
    return {
        "study": cli.run.study,
        "variant": cli.run.variant,
        "seed": cli.config["seed_everything"],
        "updates": checkpoint["global_step"],
        "averaged": checkpoint.get("averaged", []),
        "parameters": cli.model.model.num_parameters,
        "vocab_size": cli.model.config.vocab_size,
        **_scores(found),
        "beam_size": cli.model.beam_size,
        "length_penalty": cli.model.length_penalty,
        "data": data["data"],
        "tokenizer": data["tokenizer"],
        "versions": {
            "lit_transformer_commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": pl.__version__,
        },
    }


def _write_result(cli: ExperimentCLI, trainer: pl.Trainer, found: Evaluation, args: Sequence[str]) -> None:
    step, path = list_checkpoints(cli.folder / "checkpoints")[-1]
    checkpoint = load_checkpoint(path)
    cli.datamodule.setup("fit")
    plan = cli.datamodule.plan
    uses = plan.uses(step)
    flops = cli.model.config.forward_flops(plan.src_lengths, plan.tgt_lengths)
    device = torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "CPU"
    _write_hypotheses(cli.folder, found)
    write_json(
        cli.folder / "result.json",
        {
            **_facts(cli, found, checkpoint),
            "src_tokens": int((uses * plan.src_lengths).sum()),
            "tgt_tokens": int((uses * plan.tgt_lengths).sum()),
            "epochs": step / plan.updates_per_epoch,
            "flops": float(3 * (uses * flops).sum()),  # backward costs twice a forward pass
            "hours": checkpoint["training_seconds"] / 3600,
            "device": device,
            "processes": trainer.world_size,
            "command": ["fit", *args],
            "config": cli.plain,
        },
    )
    _print_scores(found)


def _write_hypotheses(folder: Path, found: Evaluation) -> None:
    text = "".join(f"{one_line(line)}\n" for line in found.hypotheses)
    write_atomic(folder / f"hypotheses.{found.split}.txt", text.encode())


def _print_scores(found: Evaluation) -> None:
    print(f"{found.split}: perplexity {found.perplexity:.3f} over {found.tokens:,} subwords, update {found.step:,}")
    for score in found.scores:
        print(f"{found.split}: {score}")
    if found.unfinished:
        print(f"{found.split}: {found.unfinished} outputs were cut at the length limit")


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed without its repository


def evaluate_command(split: str, args: Sequence[str]) -> int:
    """Score a run on its validation or test split."""
    name = "validate" if split == "valid" else "test"
    parser = argparse.ArgumentParser(f"lit-transformer {name}", allow_abbrev=False)
    parser.add_argument("run", help="the run's folder; its own configuration is used, further keys override it")
    parser.add_argument("--checkpoint", type=Path, help="default: the newest one")
    parser.add_argument("--average", type=int, default=0, metavar="N", help="average the newest N checkpoints first")
    parser.add_argument("--sentences", type=int, default=0, help="decode so many, evenly spread; default: all")
    _add_decoding(parser)
    options, rest = parser.parse_known_args(args)
    if options.checkpoint and options.average:
        parser.error("--checkpoint names one, --average takes the newest: give one of the two")
    cli = ExperimentCLI([*_saved_config(options.run), *rest], name)
    cli.model.beam_size, cli.model.length_penalty = options.beam_size, options.length_penalty
    if split == "test" and "test" not in cli.datamodule.corpus.splits():
        raise ValueError(f"{options.run} has no test split: give --data.test '[SOURCE, TARGET]'")
    checkpoint = options.checkpoint or (
        _average(Path(options.run), options.average) if options.average else _newest(Path(options.run))
    )
    trainer = cli.trainer_config.build(logger=False)
    found = _score(cli, trainer, split, checkpoint, options.sentences)
    if trainer.is_global_zero:
        folder = Path(options.run)
        _write_hypotheses(folder, found)
        facts = _facts(cli, found, load_checkpoint(checkpoint))
        write_json(folder / f"{name}.json", {**facts, "checkpoint": checkpoint.name, "sentences": len(found.decoded)})
        _print_scores(found)
    return 0


def _saved_config(run: str) -> list[str]:
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run} is no run (no config.yaml in it): name the folder given to fit as --run.dir")
    return ["--config", str(path)]


def _newest(run: Path) -> Path:
    checkpoints = list_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise ValueError(f"{run} has no checkpoint yet: train it with `fit`")
    return checkpoints[-1][1]


def _average(run: Path, last: int, out: Path | None = None) -> Path:
    checkpoints = list_checkpoints(run / "checkpoints")[-last:]
    if last < 1 or len(checkpoints) < last:
        raise ValueError(
            f"{run} holds {len(checkpoints)} of the {last} checkpoints to average: at least 1, at most what "
            "run.keep_checkpoints keeps"
        )
    out = out or run / "checkpoints" / f"average-{last}-step-{checkpoints[-1][0]:08d}.ckpt"
    average_checkpoints([path for _, path in checkpoints], out)
    say(f"averaged {', '.join(path.name for _, path in checkpoints)} into {out}")
    return out


def average_command(args: Sequence[str]) -> int:
    """Average a run's newest checkpoints."""
    parser = argparse.ArgumentParser("lit-transformer average", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--last", type=int, default=5, help="how many (section 6.1: 5 for base, 20 for big)")
    parser.add_argument("--out", type=Path, help="default: in the run's checkpoints")
    options = parser.parse_args(args)
    print(_average(options.run, options.last, options.out))
    return 0


def translate_command(args: Sequence[str]) -> int:
    """One line out for each line in."""
    parser = argparse.ArgumentParser("lit-transformer translate", allow_abbrev=False)
    parser.add_argument("model", type=Path, help="a run's folder (its newest checkpoint) or a checkpoint")
    parser.add_argument("--input", type=Path, default=Path("/dev/stdin"), help="default: standard input")
    parser.add_argument("--output", type=Path, help="default: standard output")
    parser.add_argument("--n_best", type=int, default=1, help="so many lines for each line")
    parser.add_argument("--device", default=best_device())
    _add_decoding(parser)
    options = parser.parse_args(args)
    checkpoint = _newest(options.model) if options.model.is_dir() else options.model
    translator = Translator(checkpoint, options.device, warn=say)
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


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beam_size", type=int, default=BEAM_SIZE)
    parser.add_argument("--length_penalty", type=float, default=LENGTH_PENALTY, help="alpha (section 6.1)")


def quiet() -> None:
    """Silence what Lightning and torch say about themselves; what concerns the run stays."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*", ".*is not resumable.*"):
        warnings.filterwarnings("ignore", message)
