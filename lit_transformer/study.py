"""What a study is: a file that names a base configuration, the variants of it, and seeds; checked before it runs."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_transformer.cli import resolve
from lit_transformer.results import read_paper
from lit_transformer.store import write_json

_OURS = ("run.dir", "run.study", "run.variant", "seed_everything")  # keys that follow from the study itself
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Variant:
    """One row of a study.

    Args:
        name: of its folder and its row.
        set: what it changes: fields of the model, or full keys such as trainer.max_steps.
        paper: the row of results/paper_table3.csv it stands for; its own name where that is one.
    """

    name: str
    set: dict[str, Any] = field(default_factory=dict)
    paper: str = ""


@dataclass(frozen=True)
class Study:
    """One question: a base configuration and what each variant changes in it.

    Args:
        name: of the folder under runs/ and of the files in results/.
        config: configuration files, relative to the study's file, the last wins.
        variants: rows of the table in its order; differences are to the first.
        seeds: each variant runs with each of them.
        metric: what a trial's value in Optuna is.
        set: what all variants change in the base configuration.
        launcher: what starts a trial in place of this Python, such as [torchrun, --nproc_per_node, "2"].
    """

    name: str
    config: list[str]
    variants: list[Variant]
    seeds: list[int] = field(default_factory=lambda: [1])
    metric: Literal["bleu", "perplexity"] = "bleu"
    set: dict[str, Any] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        """All runs, the first seed of every variant before the second of any."""
        return [Cell(variant, seed) for seed in self.seeds for variant in self.variants]


@dataclass(frozen=True)
class Cell:
    """One run to do: a variant with a seed."""

    variant: Variant
    seed: int

    def __str__(self) -> str:
        return f"{self.variant.name}/seed{self.seed}"


def read_study_file(path: Path) -> Study:
    """A study from its YAML file, read by the rules of the configuration files.

    Raises:
        ValueError: names the file, the key or variant, and what must hold.
    """
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Study)
    try:
        study: Study = Study(**vars(parser.instantiate(parser.parse_path(str(path)))))
    except (ArgumentError, TypeError, OSError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = [variant.name for variant in study.variants]
    for name in [study.name, *names]:
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"{path}: name {name!r} becomes a folder: letters, digits, dots, dashes, underscores only")
    if study.name == "paper_table3" or {"study.json", "optuna.db"} & set(names):
        raise ValueError(f"{path}: paper_table3, study.json and optuna.db are names of other files: choose another")
    for variant in [Variant("all variants", study.set), *study.variants]:
        if taken := set(_OURS) & variant.set.keys():
            raise ValueError(f"{path}: {variant.name} sets {', '.join(sorted(taken))}, which the study sets itself")
    rows = read_paper(Path("results"))
    for variant in study.variants:
        if rows and variant.paper and variant.paper not in rows:
            raise ValueError(
                f"{path}, variant {variant.name}: paper = {variant.paper!r} is no row of the paper's table; "
                f"its rows are {', '.join(rows)}"
            )
    if any(seed < 0 for seed in study.seeds):
        raise ValueError(f"{path}: seeds are {study.seeds}: must be whole numbers of at least 0")
    for what, values in (("variant", names), ("seed", study.seeds)):
        if len(set(values)) != len(values) or not values:
            raise ValueError(f"{path}: each {what} must stand there once, and at least one; given: {values}")
    return study


def fit_arguments(study: Study, file: Path, cell: Cell, folder: Path) -> list[str]:
    """What follows `lit-transformer fit` for this cell, as a user could type it.

    Args:
        file: the study's file, which its configuration files are relative to.
        folder: of the run.
    """
    arguments: list[str] = []
    for name in study.config:
        arguments += ["--config", os.path.relpath(file.parent / name)]
    for key, value in {**study.set, **cell.variant.set}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += [f"--{key if '.' in key else f'model.{key}'}", text]
    arguments += ["--seed_everything", str(cell.seed), "--run.dir", str(folder / str(cell))]
    return [*arguments, "--run.study", study.name, "--run.variant", cell.variant.name]


def check(study: Study, file: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Resolve every cell before anything trains.

    Args:
        folder: of the study's runs.

    Returns:
        Each cell's configuration by its name.

    Raises:
        ValueError: names the variant and what is wrong with it, or what changed under results that exist.
    """
    for name in study.config:
        try:
            yaml.safe_load((file.parent / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ValueError(f"{file}: {file.parent / name} cannot be read: {error}") from error
    resolved = {}
    for cell in study.cells():
        try:
            resolved[str(cell)] = resolve(fit_arguments(study, file, cell, folder))
        except ValueError as error:
            raise ValueError(f"{file}, variant {cell.variant.name}: {error}") from error
    done = {name for name in resolved if (folder / name / "result.json").is_file()}
    refuse_changes(file, folder, resolved, done)
    return resolved


def refuse_changes(file: Path, folder: Path, resolved: dict[str, Any], names: set[str]) -> None:
    """Raises ValueError where one of these cells, done or under way, was begun with another configuration."""
    before = _resolved_before(folder)
    for name in sorted(before.keys() & names):
        old, new = (config | {"run": config["run"] | {"dir": ""}} for config in (before[name], resolved[name]))
        if old != new:
            raise ValueError(
                f"{file}: {name} has a result or is being trained, but {_first_difference(old, new)}: "
                "undo the change, or give the study another name"
            )


def _resolved_before(folder: Path) -> dict[str, dict[str, Any]]:
    description = folder / "study.json"
    return json.loads(description.read_text(encoding="utf-8"))["resolved"] if description.is_file() else {}


def describe(study: Study, folder: Path, resolved: dict[str, Any]) -> None:
    """Write study.json, which results are built from."""
    variants = [{**asdict(v), "paper": v.paper or v.name, "failed": ""} for v in study.variants]
    write_json(
        folder / "study.json",
        {
            "name": study.name,
            "seeds": study.seeds,
            "variants": variants,
            # Also of variants that the file no longer has: their results still stand.
            "resolved": _resolved_before(folder) | resolved,
        },
    )


def note_failures(folder: Path, failed: dict[str, str]) -> None:
    """Into study.json, as it is now: which variants were given up, and why."""
    described = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    for variant in described["variants"]:
        variant["failed"] = failed.get(variant["name"], "")
    write_json(folder / "study.json", described)


def _first_difference(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> str:
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if a != b:
            if isinstance(a, dict) and isinstance(b, dict):
                return _first_difference(a, b, f"{prefix}{key}.")
            return f"{prefix}{key} was {a} and is {b} now"
    return "nothing"
