"""validate, test and average: what the checkpoints of a run are worth.

RUN/NAME.json                  what was found, how, and with which options
RUN/hypotheses.NAME.txt        the outputs, one a line
RUN/sentences.NAME.jsonl       the same with source, reference, NLL and lengths
RUN/table2.NAME.md             of a whole test set: the row of the paper's Table 2

NAME is `validate` or `test`, and behind it whatever differs from the newest checkpoint, all sentences and the paper's
beam search, as in test.average-5: one answer never takes the place of another.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_transformer.checkpoint import average_newest, load_checkpoint, newest_checkpoint
from lit_transformer.cli import ExperimentCLI, experiment, first_difference
from lit_transformer.decode import BEAM_SIZE, LENGTH_PENALTY, add_decoding
from lit_transformer.progress import say
from lit_transformer.ranks import check_processes
from lit_transformer.scoring import facts, load, print_scores, score, write_outputs
from lit_transformer.store import write_atomic, write_json
from lit_transformer.table import flops_by_time
from lit_transformer.table2 import identify, to_markdown

_COST = ("flops", "hours", "processes", "device")  # of a training, as result.json says


def evaluate_command(split: str, args: Sequence[str]) -> int:
    """Score a run on its validation or test split."""
    command = "validate" if split == "valid" else "test"
    options, rest = _options(command, args)
    run = Path(options.run)
    cli = ExperimentCLI([*saved_config(run), *rest], command)
    cli.model.beam_size, cli.model.length_penalty = options.beam_size, options.length_penalty
    if split == "test" and "test" not in cli.datamodule.corpus.splits():
        raise ValueError(f"{run} has no test split: give --data.test '[SOURCE, TARGET]'")
    checkpoint = options.checkpoint or newest_checkpoint(run)
    if options.average is not None:
        checkpoint = average_newest(run, options.average, cli.trainer_config.max_steps, say=say)
    if options.checkpoint:
        _must_be_of(run, checkpoint)
    trainer = cli.trainer_config.build(logger=False)
    check_processes(trainer)
    saved = load(cli, checkpoint)
    cli.datamodule.prepare_data()
    cli.datamodule.setup("test")
    name = _name(command, options)
    own = saved["TranslationDataModule"]["data"]
    has_its_own = split in ExperimentCLI(saved_config(run), command, build=False).datamodule.corpus.splits()
    if cli.datamodule.store and cli.datamodule.store.fingerprint != own and has_its_own and not options.name:
        raise ValueError(
            f"this text is not the one that {run} was trained with (data = {cli.datamodule.store.fingerprint}, there "
            f"{own}): give it a --name, which becomes part of the files' names"
        )
    _refuse_other_text(run / f"{name}.json", cli)
    training = _training(run, saved["global_step"]) if split == "test" else None
    found = score(cli, trainer, split, saved, checkpoint, options.sentences)
    if trainer.is_global_zero:
        write_outputs(run, cli, found, name)
        record = {
            **facts(cli, found, saved),
            "checkpoint": checkpoint.name,
            "sentences": len(found.decoded),
            "precision": cli.trainer_config.precision,
        }
        print_scores(found)
        if split == "test":
            record = _table2(run, name, cli, record, training, saved["TranslationDataModule"]["data"])
        write_json(run / f"{name}.json", record)
    return 0


def _options(command: str, args: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        f"lit-transformer {command}",
        allow_abbrev=False,
        description=f"Writes {command}.json, outputs and sentences into the run's folder, under names that say what "
        f"differs from the defaults, as {command}.average-5.json.",
    )
    parser.add_argument("run", help="the run's folder; its own configuration is used, further keys override it")
    parser.add_argument("--checkpoint", type=Path, help="default: the newest one")
    parser.add_argument(
        "--average", type=int, metavar="N", help="average the newest N first (section 6.1: 5 for base, 20 for big)"
    )
    parser.add_argument("--sentences", type=int, metavar="N", help="decode N, evenly spread; default: all")
    parser.add_argument("--name", help="of this text, for the files; needed where --data.test is not the run's own")
    add_decoding(parser)
    options, rest = parser.parse_known_args(args)
    if options.checkpoint and options.average is not None:
        parser.error("--checkpoint names one, --average takes the newest: give one of the two")
    if options.sentences is not None and options.sentences < 1:
        raise ValueError(f"--sentences {options.sentences}: must be at least 1; all are decoded where it is left out")
    if options.name is not None and not re.fullmatch(r"[\w-][\w.-]*", options.name):
        raise ValueError(f"--name {options.name!r}: becomes part of files' names: letters, digits, '.', '_' and '-'")
    if options.name is not None and re.match(r"(average|step|sentences|beam|alpha)-", options.name):
        raise ValueError(f"--name {options.name!r}: files whose names go on so are of other options: take another one")
    return options, rest


def _name(command: str, options: argparse.Namespace) -> str:
    parts = [command, options.name]
    parts += [f"average-{options.average}" if options.average else None]
    parts += [options.checkpoint.stem if options.checkpoint else None]
    parts += [f"sentences-{options.sentences}" if options.sentences else None]
    parts += [f"beam-{options.beam_size}" if options.beam_size != BEAM_SIZE else None]
    parts += [f"alpha-{options.length_penalty:g}" if options.length_penalty != LENGTH_PENALTY else None]
    return ".".join(part for part in parts if part)


def _must_be_of(run: Path, checkpoint: Path) -> None:
    mine, given = (load_checkpoint(path) for path in (newest_checkpoint(run), checkpoint))
    for field in ("data", "tokenizer", "tokens_per_update", "seed"):
        if given.get("TranslationDataModule", {}).get(field) != mine["TranslationDataModule"][field]:
            raise ValueError(f"{checkpoint} is not of this run: its {field} is another one")
    if key := first_difference(*(experiment({"model": each["hyper_parameters"]}) for each in (given, mine))):
        raise ValueError(f"{checkpoint} is not of this run: its {key} is another one")


def _refuse_other_text(file: Path, cli: ExperimentCLI) -> None:
    """Raises ValueError where the scores of another text stand in that file."""
    before = _read(file)
    assert cli.datamodule.store is not None
    if before and before.get("data") != cli.datamodule.store.fingerprint:
        raise ValueError(
            f"{file} holds the scores of other text (data = {before.get('data')}, now "
            f"{cli.datamodule.store.fingerprint}): give this one a --name of its own, or move the file away"
        )


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): remove it") from error


def _training(run: Path, updates: int) -> dict[str, Any] | None:
    """The result.json of a training of so many updates, if it is there."""
    file = run / "result.json"
    result = _read(file)
    if not result or result.get("updates") != updates:
        return None
    if missing := [key for key in _COST if key not in result]:
        raise ValueError(f"{file} does not say {missing[0]}: remove it, and the run's command writes it anew")
    return result


def _table2(
    run: Path,
    name: str,
    cli: ExperimentCLI,
    record: dict[str, Any],
    training: dict[str, Any] | None,
    trained_on: str,
) -> dict[str, Any]:
    """Write the row of Table 2 where the whole set was decoded; what test.json says of the set and of the cost."""
    store, corpus = cli.datamodule.store, cli.datamodule.corpus
    assert store is not None
    tested = identify(store.text("test", "src"), store.text("test", "tgt"), corpus.src_lang, corpus.tgt_lang)
    options = {key: record[key] for key in ("precision", "beam_size", "length_penalty")}
    # The run's own, whatever keys this command has.
    recipe = (
        ExperimentCLI(saved_config(run), "test", build=False).recipe()
        | options
        | {"max_steps": record["updates"], "averaged": len(record["averaged"]) or 1}
    )
    cost = {key: training[key] for key in _COST} | {"flops_by_time": flops_by_time(training)} if training else None
    record = record | {"test_set": tested, "recipe": recipe, "training": cost}
    if record["sentences"] < tested["sentences"]:
        say(f"no row of Table 2: {record['sentences']:,} of {tested['sentences']:,} sentences were decoded")
        return record
    paper = cli.paper_recipe() | {"averaged": 5, "beam_size": 4, "length_penalty": 0.6, "precision": "32-true"}
    report = store.meta["report"]["train"]
    known = f"Trained on {report['kept']:,} pairs"
    if store.fingerprint != trained_on:
        known = (
            f"Trained on data {trained_on}, another preparation than the one with this test set: of the training text "
            f"{report['dropped'].get('overlap', 0):,} pairs hold a sentence of this validation or test set"
        )
    text = to_markdown(record, paper, known)
    write_atomic(run / f"table2{name.removeprefix('test')}.md", text.encode())
    print(f"\n{text}", end="")
    return record


def saved_config(run: Path) -> list[str]:
    """Arguments that make a parser read a run's own configuration."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run} is no run (no config.yaml in it): name the folder given to fit as --run.dir")
    return ["--config", str(path)]


def average_command(args: Sequence[str]) -> int:
    """Average a run's newest checkpoints."""
    parser = argparse.ArgumentParser("lit-transformer average", allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--last", type=int, default=5, help="how many (section 6.1: 5 for base, 20 for big)")
    parser.add_argument("--out", type=Path, help="default: in the run's checkpoints")
    options = parser.parse_args(args)
    end = 0  # checkpoints without their run's configuration will do too
    if (options.run / "config.yaml").is_file():
        end = ExperimentCLI(saved_config(options.run), "average", build=False).trainer_config.max_steps
    print(average_newest(options.run, options.last, end, options.out, say=say))
    return 0
