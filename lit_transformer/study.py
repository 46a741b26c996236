"""What a study is: a file that names a base configuration, the variants of it, and seeds; checked before it runs."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from lit_transformer.cli import defaults, resolve
from lit_transformer.results import read_paper
from lit_transformer.store import write_json

_OURS = ("run.dir", "run.study", "run.variant", "seed_everything")  # keys that follow from the study itself
_WIDTHS = ("d_model", "d_ff", "d_k", "d_v")  # what a study's width factor scales
_KEPT = ("num_layers", "num_heads", "dropout", "label_smoothing", "position", "norm", "scale_attention")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


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
class Study:
    """One question: a base configuration and what each variant changes in it.

    Args:
        name: of the folder under runs/ and of the files in results/.
        config: configuration files, relative to the study's file, the last wins.
        variants: rows of the table in its order; differences are to the first.
        rows: a study's file whose variants these are, in place of `variants`.
        width: what multiplies d_model, d_ff, d_k and d_v in the rows; trainer.max_steps keeps its proportion to base.
        seeds: each variant runs with each of them.
        metric: what a trial's value in Optuna is.
        set: what all variants change in the base configuration.
        launcher: what starts a trial in place of this Python, such as [torchrun, --nproc_per_node, "2"].
    """

    name: str
    config: list[str]
    variants: list[Variant] = field(default_factory=list)
    rows: str = ""
    width: float = 1.0
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
    for variant in [Variant("all variants", study.set), *study.variants]:
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
    for what, values in (("variant", names), ("seed", study.seeds)):
        if len(set(values)) != len(values) or not values:
            raise ValueError(f"{path}: each {what} must stand there once, and at least one; given: {values}")
    return study


def _scaled_rows(study: Study, path: Path) -> list[Variant]:
    """The variants of another study at this study's size."""
    if study.variants:
        raise ValueError(f"{path}: `rows` takes the variants of {study.rows}: leave `variants` out")
    file = path.parent / study.rows
    theirs = read_study_file(file)
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
    before, given = _resolved_before(folder), defaults()
    for name in sorted(before.keys() & names):
        # The folder may have moved, and a key may be younger than the run: it did what the default does.
        old, new = (
            {part: _over(value, config.get(part)) for part, value in given.items()}
            | {"run": _over(given["run"], config["run"]) | {"dir": ""}}
            for config in (before[name], resolved[name])
        )
        if old != new:
            raise ValueError(
                f"{file}: {name} has a result or is being trained, but {_first_difference(old, new)}: "
                "undo the change, or give the study another name"
            )


def _over(default: Any, value: Any) -> Any:
    return default | value if isinstance(default, dict) and isinstance(value, dict) else value


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
