"""Before anything trains: every cell of a study checked, against the others and against what was done before."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from lit_transformer.checkpoint import list_checkpoints
from lit_transformer.cli import experiment, first_difference, resolve
from lit_transformer.store import write_json
from lit_transformer.study import Cell, Study, Variant, fit_arguments, full_key

SEARCH_BASE = "base"  # in study.json: what all trials of a search begin with
_FREE_DATA = ("data.tokens_per_update",)  # may differ within a study: the text stays the same
_FILES = ("train", "valid", "test", "dataset")


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
    # A search makes its variants later; what they all begin with is known now.
    for cell in study.cells() or [Cell(Variant(SEARCH_BASE), study.seeds[0])]:
        try:
            resolved[str(cell)] = resolve(fit_arguments(study, file, cell, folder))
        except ValueError as error:
            raise ValueError(f"{file}, variant {cell.variant.name}: {error}") from error
    if study.search:
        _check_search(study, file, folder)
        has_results = any(folder.glob("trial-*/*/result.json"))
        refuse_changes(file, folder, resolved, set(resolved) if has_results else set())
        return resolved
    _check_together(study, file, resolved)
    begun = {
        name
        for name in resolved
        if (folder / name / "result.json").is_file() or list_checkpoints(folder / name / "checkpoints")
    }
    refuse_changes(file, folder, resolved, begun)
    return resolved


def _check_together(study: Study, file: Path, resolved: dict[str, dict[str, Any]]) -> None:
    """Raises ValueError where cells could not stand in one table, or not do what is asked of them together."""
    for cell in study.cells():
        mine, first = (experiment(resolved[str(each)]) for each in (cell, study.cells()[0]))
        if key := first_difference(_data(mine), _data(first)):
            raise ValueError(
                f"{file}, variant {cell.variant.name}: {key} = {mine[key]} is other data than the first variant's "
                f"{first[key]}, and results on other data cannot stand in one table: make it a study of its own"
            )
        if cell.variant.trained_by:
            other = experiment(resolved[f"{cell.variant.trained_by}/seed{cell.seed}"])
            if key := first_difference(mine, other | {"run.average": mine["run.average"]}):
                raise ValueError(
                    f"{file}, variant {cell.variant.name}: {cell.variant.trained_by} trains it, but {key} = "
                    f"{other[key]} there and {mine[key]} here: only run.average may differ"
                )


def _data(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key.startswith("data.") and key not in _FREE_DATA}


def _check_search(study: Study, file: Path, folder: Path) -> None:
    """Both ends, or every choice, of each range must be a run that could be done; trials so far were of this space."""
    assert study.search is not None
    before, space = _described_before(folder).get("space", {}), asdict(study.search)["space"]
    if before and before != space:
        raise ValueError(
            f"{file}: search.space was {json.dumps(before)}, and trials of it exist: undo the change, or give the "
            "study another name"
        )
    for key, values in study.search.space.items():
        for value in values.ends:
            try:
                cell = Cell(Variant("trial", {key: value}), study.seeds[0])
                config = resolve(fit_arguments(study, file, cell, folder))
            except ValueError as error:
                raise ValueError(f"{file}, search.space, {key} = {value}: {error}") from error
            group, _, field = full_key(key).partition(".")
            if group == "data" and full_key(key) not in _FREE_DATA:
                raise ValueError(f"{file}, search.space, {key}: trials on other data cannot be compared: leave it out")
            if isinstance(value, int) and isinstance(config[group][field], float):
                raise ValueError(
                    f"{file}, search.space, {key} = {value}: the key takes decimals, and whole numbers alone would be "
                    f"drawn: write {float(value)}"
                )
            if study.metric == "bleu" and not config["model"]["bleu_every"]:
                raise ValueError(
                    f"{file}: a search by BLEU prunes by the BLEU of validations, and model.bleu_every = 0 has none: "
                    "set it to 1, or search by perplexity"
                )


def refuse_changes(file: Path, folder: Path, resolved: dict[str, Any], names: set[str]) -> None:
    """Raises ValueError where one of these cells, done or under way, was begun with another configuration."""
    before = _described_before(folder)["resolved"]
    for name in sorted(before.keys() & names):
        old, new = (
            experiment(config)
            | {f"data.{name}": config["data"].get(name) for name in _FILES}
            | {"trainer.max_steps": config["trainer"]["max_steps"]}
            for config in (before[name], resolved[name])
        )
        if key := first_difference(old, new):
            raise ValueError(
                f"{file}: {name} has a result or has begun to train, but {key} was {old.get(key)} and is "
                f"{new.get(key)} now: undo the change, or give the study another name"
            )


def _described_before(folder: Path) -> dict[str, Any]:
    description = folder / "study.json"
    return json.loads(description.read_text(encoding="utf-8")) if description.is_file() else {"resolved": {}}


def describe(study: Study, folder: Path, resolved: dict[str, Any]) -> None:
    """Write study.json, which results are built from."""
    variants = [{**asdict(v), "paper": v.paper or v.name, "failed": ""} for v in study.variants]
    write_json(
        folder / "study.json",
        {
            "name": study.name,
            "question": study.question,
            "by_length": study.by_length,
            "seeds": study.seeds,
            "variants": variants,
            # Also of variants that the file no longer has: their results still stand.
            "resolved": _described_before(folder)["resolved"] | resolved,
            "space": asdict(study.search)["space"] if study.search else {},
        },
    )


def note_failures(folder: Path, failed: dict[str, str]) -> None:
    """Into study.json, as it is now: which variants were given up, and why."""
    described = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    for variant in described["variants"]:
        variant["failed"] = failed.get(variant["name"], "")
    write_json(folder / "study.json", described)


def refuse_other_data(file: Path, folder: Path, names: list[str], data: str) -> None:
    """Raises ValueError where a cell has a result on other text than `data`, the fingerprint of what there is now."""
    for name in names:
        path = folder / name / "result.json"
        if not path.is_file():
            continue
        try:
            before = json.loads(path.read_text(encoding="utf-8"))["data"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): remove it, and its run is scored again") from error
        if before != data:
            raise ValueError(
                f"{file}: {name} has a result on data {before}, and the text is {data} now: bring the text back, or "
                "give the study another name"
            )
