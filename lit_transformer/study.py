"""What a study is: a file that names a base configuration, the variants of it, and seeds."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentError, ArgumentParser

from lit_transformer.cli import resolve
from lit_transformer.results import read_paper

_OURS = ("run.dir", "run.study", "run.variant", "seed_everything")  # keys that follow from the study itself
_WIDTHS = ("d_model", "d_ff", "d_k", "d_v")  # what a study's width factor scales
_KEPT = ("num_layers", "num_heads", "dropout", "label_smoothing", "position", "norm", "scale_attention")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Variant:
    """One row of a study.

    Args:
        name: of its folder and its row.
        set: what it changes: fields of the model, or full keys such as trainer.max_steps.
        paper: the row of results/paper_table3.csv it stands for; its own name where that is one.
        trained_by: another variant that trains what this one only scores in its own way.
    """

    name: str
    set: dict[str, Any] = field(default_factory=dict)
    paper: str = ""
    trained_by: str = ""


@dataclass(frozen=True)
class Range:
    """Values that a search may give a key: from low to high, both included, or one of the choices.

    Args:
        low, high: whole numbers where the key takes whole numbers.
        log: draw evenly on a logarithmic scale.
        choices: in place of low and high.

    Raises:
        ValueError: neither or both kinds, or an empty range.
    """

    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    choices: list[str | int | float | bool] | None = None

    def __post_init__(self) -> None:
        if self.choices is not None:
            if self.low is not None or self.high is not None or self.log or not self.choices:
                raise ValueError(f"choices = {self.choices}: at least one, and no low, high or log beside them")
        elif self.low is None or self.high is None or not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(
                f"low = {self.low}, high = {self.high}: both are needed (or choices), low below high, above 0 with log"
            )

    @property
    def ends(self) -> list[Any]:
        return list(self.choices) if self.choices is not None else [self.low, self.high]


@dataclass(frozen=True)
class Search:
    """Look for good values instead of comparing given ones: TPE proposes, the median of earlier trials prunes.

    Args:
        trials: to run in all, pruned ones included.
        space: what each key may be.
        startup: trials before TPE and the pruner begin.
        prune_after: updates before which no trial is pruned.
    """

    trials: int
    space: dict[str, Range]
    startup: int = 5
    prune_after: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1 or self.startup < 1 or self.prune_after < 0 or not self.space:
            raise ValueError(
                f"trials = {self.trials}, startup = {self.startup}, prune_after = {self.prune_after}, space of "
                f"{len(self.space)} keys: at least 1, 1, 0 and 1 are needed"
            )


@dataclass(frozen=True)
class Study:
    """One question: a base configuration and what each variant changes in it.

    Args:
        name: of the folder under runs/ and of the files in results/.
        question: that the study asks, for its report.
        config: configuration files, relative to the study's file, the last wins.
        variants: rows of the table in its order; differences are to the first.
        rows: a study's file whose variants these are, in place of `variants`.
        width: what multiplies d_model, d_ff, d_k and d_v in the rows; trainer.max_steps keeps its proportion to base.
        seeds: each variant runs with each of them.
        metric: what a trial's value in Optuna is.
        set: what all variants change in the base configuration.
        search: trials to look for good values, in place of variants.
        by_length: show results on sentences longer than those trained on.
        launcher: what starts a trial in place of this Python, such as [torchrun, --nproc_per_node, "2"].
    """

    name: str
    config: list[str]
    variants: list[Variant] = field(default_factory=list)
    rows: str = ""
    width: float = 1.0
    question: str = ""
    seeds: list[int] = field(default_factory=lambda: [1])
    metric: Literal["bleu", "perplexity"] = "bleu"
    set: dict[str, Any] = field(default_factory=dict)
    search: Search | None = None
    by_length: bool = False
    launcher: list[str] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """All runs, the first seed of every variant before the second of any; a search's are made as it goes."""
        return [Cell(variant, seed) for seed in self.seeds for variant in self.variants]


@dataclass(frozen=True)
class Cell:
    """One run to do: a variant with a seed."""

    variant: Variant
    seed: int

    def __str__(self) -> str:
        return f"{self.variant.name}/seed{self.seed}"


def read_study_file(path: Path, rows_of: Path | None = None) -> Study:
    """A study from its YAML file, read by the rules of the configuration files.

    Args:
        rows_of: the study's file that takes its rows from this one.

    Raises:
        ValueError: names the file, the key or variant, and what must hold.
    """
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Study)
    try:
        study: Study = Study(**vars(parser.instantiate(parser.parse_path(str(path)))))
    except (ArgumentError, TypeError, ValueError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    if study.rows and rows_of:
        raise ValueError(f"{rows_of}: its rows are those of {path}, which must have variants of its own")
    if not study.config:
        raise ValueError(f"{path}: config is empty: name at least one configuration file")
    if study.rows:
        study = replace(study, variants=_scaled_rows(study, path))
    elif study.width != 1.0:
        raise ValueError(f"{path}: width = {study.width} scales the variants of `rows`: name their study's file there")
    names = [variant.name for variant in study.variants]
    for name in [study.name, *names]:
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"{path}: name {name!r} becomes a folder: letters, digits, dots, dashes, underscores only")
    if study.name == "paper_table3" or {"study.json", "optuna.db"} & set(names):
        raise ValueError(f"{path}: paper_table3, study.json and optuna.db are names of other files: choose another")
    searched = Variant("search.space", dict(study.search.space) if study.search else {})
    for variant in [Variant("all variants", study.set), *study.variants, searched]:
        if len(_full(variant.set)) < len(variant.set):
            raise ValueError(f"{path}: {variant.name} sets a field of the model twice, with and without `model.`")
        if taken := set(_OURS) & variant.set.keys():
            raise ValueError(f"{path}: {variant.name} sets {', '.join(sorted(taken))}, which the study sets itself")
    rows = read_paper(Path("results"))
    for variant in study.variants:
        if variant.trained_by and variant.trained_by not in {v.name for v in study.variants if not v.trained_by}:
            raise ValueError(
                f"{path}, variant {variant.name}: trained_by = {variant.trained_by!r} must name a variant of this "
                "study that trains itself"
            )
        if rows and variant.paper and variant.paper not in rows:
            raise ValueError(
                f"{path}, variant {variant.name}: paper = {variant.paper!r} is no row of the paper's table; "
                f"its rows are {', '.join(rows)}"
            )
    if any(seed < 0 for seed in study.seeds):
        raise ValueError(f"{path}: seeds are {study.seeds}: must be whole numbers of at least 0")
    if study.search and (study.variants or study.rows or len(study.seeds) > 1):
        raise ValueError(
            f"{path}: `search` makes its own variants, with one seed: leave out variants, rows, more seeds"
        )
    for what, values in (("variant", names), ("seed", study.seeds)):
        if len(set(values)) != len(values) or not (values or study.search):
            raise ValueError(f"{path}: each {what} must stand there once, and at least one; given: {values}")
    return study


def full_key(key: str) -> str:
    """ "model.d_ff" for "d_ff"."""
    return key if "." in key or key == "seed_everything" else f"model.{key}"


def _full(fields: dict[str, Any]) -> dict[str, Any]:
    return {full_key(key): value for key, value in fields.items()}


def _scaled_rows(study: Study, path: Path) -> list[Variant]:
    """The variants of another study at this study's size."""
    if study.variants:
        raise ValueError(f"{path}: `rows` takes the variants of {study.rows}: leave `variants` out")
    file = path.parent / study.rows
    theirs = read_study_file(file, rows_of=path)
    ours_base, theirs_base = (_base(s, f) for s, f in ((study, path), (theirs, file)))
    for key in (*_WIDTHS, *_KEPT):
        expected = theirs_base["model"][key]
        if key in _WIDTHS:
            expected = _scaled(path, key, expected, study.width)
        if ours_base["model"][key] != expected:
            raise ValueError(
                f"{path}: the rows of {file} at width {study.width} need a base of model.{key} = {expected}, "
                f"the configuration has {ours_base['model'][key]}: set it under `set`, or change width"
            )
    steps = ours_base["trainer"]["max_steps"] / theirs_base["trainer"]["max_steps"]
    variants = []
    for row in theirs.variants:
        fields = dict(row.set)
        for key, value in row.set.items():
            if key.removeprefix("model.") in _WIDTHS:
                fields[key] = _scaled(path, f"{row.name}: {key}", value, study.width)
            elif key == "trainer.max_steps":
                fields[key] = max(1, round(value * steps))
        variants.append(replace(row, set=fields))
    return variants


def _base(study: Study, file: Path) -> dict[str, Any]:
    bare = replace(study, launcher=[], variants=[Variant("base")], rows="")
    try:
        resolved = resolve(fit_arguments(bare, file, Cell(bare.variants[0], 0), Path("runs")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    for key in ("d_k", "d_v"):
        resolved["model"][key] = resolved["model"][key] or resolved["model"]["d_model"] / resolved["model"]["num_heads"]
    return resolved


def _scaled(path: Path, key: str, value: Any, width: float) -> int:
    scaled = value * width
    if scaled != round(scaled) or scaled < 1:
        raise ValueError(f"{path}: width {width} makes {key} = {value} into {scaled}: must be a whole number above 0")
    return round(scaled)


def fit_arguments(study: Study, file: Path, cell: Cell, folder: Path) -> list[str]:
    """What follows `lit-transformer fit` for this cell, as a user could type it.

    Args:
        file: the study's file, which its configuration files are relative to.
        folder: of the run.
    """
    arguments: list[str] = []
    for name in study.config:
        arguments += ["--config", os.path.relpath(file.parent / name)]
    for key, value in (_full(study.set) | _full(cell.variant.set)).items():
        arguments += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    arguments += ["--seed_everything", str(cell.seed), "--run.dir", str(folder / str(cell))]
    return [*arguments, "--run.study", study.name, "--run.variant", cell.variant.name]
