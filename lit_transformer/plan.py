"""What a study will take, said before anything trains: parameters, FLOPs, tokens, memory, hours.

Tokens and FLOPs are counted from the plan of updates, exactly as result.json will hold them; memory and hours come
from a moment of training.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_transformer.cli import ExperimentCLI
from lit_transformer.corpus import prepare
from lit_transformer.preflight import check
from lit_transformer.progress import in_hours, say
from lit_transformer.scoring import training_counts, validation_flops
from lit_transformer.speed import Speed, Text, measure
from lit_transformer.study import Cell, Study, Variant, fit_arguments


@dataclass(frozen=True)
class Row:
    """What one run will take.

    Attributes:
        done: it has a result already.
        parameters: trainable numbers, exact, with this vocab_size.
        src_tokens, tgt_tokens, flops: of all `updates`, as in result.json; 0 where another variant does the training.
        validation_flops: of the validation losses during training.
        speed: None where nothing is left to be trained.
    """

    cell: Cell
    done: bool
    parameters: int
    vocab_size: int
    updates: int
    src_tokens: int
    tgt_tokens: int
    flops: float
    validation_flops: float
    speed: Speed | None

    @property
    def hours(self) -> float:
        """Of training and its validation losses, without beam search, checkpoints and start-up."""
        return self.speed.hours(self.flops + self.validation_flops, self.updates) if self.speed else 0.0


def plan_study(study: Study, file: Path, folder: Path, threads: int) -> list[Row]:
    """What each run of a study will take.  Text is prepared where it is not yet; nothing is written to `folder`.

    Args:
        file: the study's file.
        folder: of the study's runs, for which of them have a result.
        threads: that a run would have; speed is measured with as many.

    Returns:
        One row a run, in the order of `study.cells()`; a row a trial of a search.

    Raises:
        ValueError: names the variant that cannot be trained and why, or what is wrong with the text.
    """
    check(study, file, folder)
    texts: dict[str, Text] = {}
    speeds: dict[str, Speed] = {}
    rows, prepared = [], set()
    # A search's trials are made as it goes: each is taken to cost what its base does, and none to be pruned.
    trial = Cell(Variant("each trial"), study.seeds[0])
    cells = {str(cell): cell for cell in study.cells()}
    cells |= {f"trial-{n:03d}/seed{trial.seed}": trial for n in range(study.search.trials if study.search else 0)}
    variants = list(dict.fromkeys(cell.variant.name for cell in cells.values()))
    for place, cell in cells.items():
        arguments = fit_arguments(study, file, cell, folder)
        cli = ExperimentCLI(arguments, build=False)
        data = json.dumps(cli.plain["data"], sort_keys=True)
        if data not in prepared:
            prepare(cli.datamodule.corpus, cli.datamodule.root, say)
            prepared.add(data)
        key = f"{cli.seed} {data}"
        text = texts.setdefault(key, texts.get(key) or Text(cli.datamodule))
        name, done = cell.variant.name, (folder / place / "result.json").is_file()
        trains = not cell.variant.trained_by
        if trains and not done and name not in speeds:
            say(f"{study.name}: measuring {name}, {variants.index(name) + 1} of {len(variants)}")
            try:
                speeds[name] = measure(ExperimentCLI(arguments), text, threads)
            except ValueError as error:
                raise ValueError(f"{file}, variant {name}: {error}") from error
        rows.append(_row(cell, cli, text, done, speeds[name] if trains and not done else None))
    return rows


def _row(cell: Cell, cli: ExperimentCLI, text: Text, done: bool, speed: Speed | None) -> Row:
    updates, config = 0 if cell.variant.trained_by else cli.trainer_config.max_steps, cli.model.config
    counts = training_counts(text.plan, config, updates)
    del counts["epochs"]
    valid = [text.data.sentences("valid", side).lengths + 1 for side in ("src", "tgt")]
    validation = validation_flops(cli, *valid) if updates else 0.0
    parameters = cli.model.model.num_parameters
    return Row(cell, done, parameters, config.vocab_size, updates, **counts, validation_flops=validation, speed=speed)


def hours_until_done(hours: Sequence[float], workers: int) -> float:
    """When the last run ends, where each is taken up in turn by the first worker that is free."""
    free = [0.0] * workers
    for each in hours:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def table(rows: Sequence[Row], workers: int, threads: int) -> str:
    """The rows as text: a line for each variant, totals over all runs and over those to do, the hours in all."""
    lines = [["variant", "runs", "vocabulary", "parameters", "FLOPs", "src tokens", "tgt tokens", "memory", "hours"]]
    for name in dict.fromkeys(row.cell.variant.name for row in rows):
        runs = [row for row in rows if row.cell.variant.name == name]
        # Seeds differ in little: the figures of one run, the first that is left where some are done.
        row = next((row for row in runs if not row.done), runs[0])
        done, by = sum(row.done for row in runs), row.cell.variant.trained_by
        state = f"{done} of {len(runs)} done" if 0 < done < len(runs) else "done" if done else f"{len(runs)} to do"
        figures = ["", "", f"by {by}"] if by else _sums([row])
        measured = [f"{row.speed.memory / 2**20:,.0f} MiB", in_hours(row.hours)] if row.speed else ["", ""]
        lines.append([name, state, f"{row.vocab_size:,}", f"{row.parameters:,}", *figures, *measured])
    left = [row for row in rows if not row.done]
    lines.append(["all runs", str(len(rows)), "", "", *_sums(rows), "", ""])
    lines.append(["to do", str(len(left)), "", "", *_sums(left), "", in_hours(sum(row.hours for row in left))])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    return "\n".join([*text[:-2], "", *text[-2:], "", *_words(left, workers, threads)])


def _sums(rows: Sequence[Row]) -> list[str]:
    src, tgt = sum(row.src_tokens for row in rows), sum(row.tgt_tokens for row in rows)
    return [f"{sum(row.flops for row in rows):.3e}", f"{src:,}", f"{tgt:,}"]


def _words(left: Sequence[Row], workers: int, threads: int) -> list[str]:
    devices = sorted({row.speed.device for row in left if row.speed})
    if not devices:
        return ["Nothing is left to be trained."]
    # Trials on a GPU share it: more of them at a time are not done sooner.
    at_once = workers if devices == ["CPU"] else 1
    hours = hours_until_done([row.hours for row in left], at_once)
    words = f"About {in_hours(hours)} hours on {', '.join(devices)}, {workers} runs at a time, {threads} threads each"
    return [
        words.replace(" 1 runs", " 1 run").replace(" 1 threads", " 1 thread") + ".",
        "Figures of a line are of one run; one that has begun counts whole.  FLOPs and tokens are what result.json",
        "will hold.  Memory is of one process on its device at the largest micro-batch: a GPU's measured peak; on CPUs",
        "weights, gradients, Adam's moments and kept activations, temporaries and libraries aside.  Hours are from a",
        "moment of training on this machine as busy as it is now, validation losses included; beam search,",
        "checkpoints, start-up and communication between processes come on top.",
    ]
