"""Checkpoints on disk: written whole or not at all, loaded without running code, averaged."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.distributed.tensor import DTensor, distribute_tensor

from lit_transformer.store import atomic_file

_NAME = re.compile(r"step-(\d+)(?:\.stopped)?\.ckpt")


def checkpoint_path(folder: Path, step: int, stopped: bool = False) -> Path:
    """Where the checkpoint of an update stands; `stopped` where a signal left it, between two of the schedule."""
    return folder / f"step-{step:08d}{'.stopped' if stopped else ''}.ckpt"


def scheduled(path: Path) -> bool:
    """Whether a run that nobody stopped would have this checkpoint too."""
    return ".stopped" not in path.name


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of the training checkpoints in a folder, oldest first; averages are not among them."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.ckpt"))
    return sorted((int(match[1]), path) for match, path in found if match)


def newest_checkpoint(run: Path) -> Path:
    """The newest training checkpoint of a run's folder.

    Raises:
        ValueError: there is none.
    """
    checkpoints = list_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise ValueError(f"{run} has no checkpoint: train it with `fit`")
    return checkpoints[-1][1]


def prune_checkpoints(folder: Path, every: int | None, keep: int) -> None:
    """Remove all but the newest, and the newest `keep` of those on schedule.

    One that a signal left between two others goes with the next: which ones are averaged does not depend on when a
    run was interrupted.

    Args:
        every: updates from one to the next of the schedule: what lies between goes, as the last one of a run that
            was made longer; None where the clock decides, and all stay that no signal left.
    """

    def regular(step: int, path: Path) -> bool:
        return scheduled(path) and (every is None or step % every == 0)

    *older, newest = list_checkpoints(folder)
    on_schedule = [path for step, path in older if regular(step, path)]
    beside = keep - 1 if regular(*newest) else keep
    stay = on_schedule[max(0, len(on_schedule) - beside) :]
    for _, path in older:
        if path not in stay:
            path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """What a process that was killed while it saved has left."""
    for path in folder.glob(".step-*.ckpt.*"):
        path.unlink(missing_ok=True)


class DamagedCheckpoint(ValueError):
    """A file that is no checkpoint, or one of another model; the message names it and says why."""


def load_checkpoint(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """A checkpoint as plain data.

    Raises:
        ValueError: the file is missing or cannot be read.
        DamagedCheckpoint: it is cut short, has other bits than were written, or holds anything but tensors and
            plain values.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if changed := archive.testzip():  # torch itself does not look at the checksums
                raise zipfile.BadZipFile(f"{changed} has changed since it was written")
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such checkpoint") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # torch raises many kinds for a file that is no checkpoint
        # torch's own message recommends unsafe loading, so it is not passed on.
        raise DamagedCheckpoint(
            f"{path} is damaged, or no checkpoint of plain data ({type(error).__name__})"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise DamagedCheckpoint(f"{path} holds no model: a checkpoint written by `fit` or `average` is needed")
    return checkpoint


def usable_checkpoint(
    run: Path, module: torch.nn.Module, say: Callable[[str], None], set_aside: bool
) -> tuple[int, Path | None]:
    """The newest checkpoint of a run that can be gone on from, with its step; (0, None) where there is none at all.

    Args:
        module: the model that its weights must fit.
        say: told of each one that cannot be used.
        set_aside: give those another name.

    Raises:
        ValueError: there are some, and none can be used; or one cannot be read.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for step, path in reversed(list_checkpoints(run / "checkpoints")):
        try:
            _must_fit(module, load_checkpoint(path), step, path)
        except DamagedCheckpoint as error:
            damaged.append((path, error))
        except ValueError as error:
            if path.is_file():
                raise
            damaged.append((path, DamagedCheckpoint(str(error))))  # another process of this run has set it aside
        else:
            for bad, why in damaged if set_aside else []:
                bad.rename(bad.with_name(f"{bad.name}.damaged"))
                say(f"{why}; it is {bad.name}.damaged from now on, and {path.name} is used")
            return step, path
    if damaged:
        raise ValueError(
            f"{run} has no checkpoint to go on from: {damaged[0][1]}; put a good copy there, or remove the folder to "
            "train anew"
        )
    return 0, None


def _must_fit(module: torch.nn.Module, checkpoint: dict[str, Any], step: int, path: Path) -> None:
    """Raises DamagedCheckpoint where it is of another model, run or update than its place says."""
    if checkpoint.get("global_step") != step:
        raise DamagedCheckpoint(f"{path} is of another run: it holds update {checkpoint.get('global_step')}")
    ours, theirs = dict(getattr(module, "hparams", {})), checkpoint.get("hyper_parameters", {})
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            raise DamagedCheckpoint(f"{path} is of another run: {name} is {ours[name]} here, {theirs[name]} there")
    for name, weight in module.state_dict().items():
        other = checkpoint["state_dict"].get(name)
        if other is None or other.shape != weight.shape:
            has = "none" if other is None else list(other.shape)
            raise DamagedCheckpoint(f"{path} is of another model: {name} is {list(weight.shape)} here, {has} there")


def _save(checkpoint: dict[str, Any], path: Path) -> None:
    try:
        with atomic_file(path) as file:
            torch.save(checkpoint, file)
    except RuntimeError as error:
        # On a full disk torch fails once more while it closes the file, and hides the first failure.
        cause: BaseException | None = error
        while cause is not None:
            cause = cause.__context__
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def share_like(tensor: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
    """This rank's share of a whole tensor, where `mine` of the same shape is divided among ranks (FSDP)."""
    if isinstance(mine, DTensor) and tensor.shape == mine.shape:
        # Every rank has read the file: nothing is sent.
        return distribute_tensor(tensor, mine.device_mesh, mine.placements, src_data_rank=None)
    return tensor


def load_weights(module: torch.nn.Module, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Raises ValueError where the weights are those of another model."""
    mine = module.state_dict()
    try:
        module.load_state_dict({k: share_like(tensor, mine.get(k)) for k, tensor in checkpoint["state_dict"].items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} holds the weights of another model: {reason}") from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the disk: temporary file, fsync, rename; loading is `load_checkpoint`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        _save(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Callable | None = lambda storage, _: storage, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_checkpoint(Path(path), map_location)


def average_newest(
    run: Path, last: int, end: int, out: Path | None = None, write: bool = True, say: Callable[[str], None] = print
) -> Path:
    """Average the newest so many checkpoints of a run's schedule.

    Args:
        end: the run's last update; only there a checkpoint that a signal left is one of the schedule.
        out: where the average goes; among the run's checkpoints when not given.
        write: False only says where, as all processes but the first ask.
        say: told which ones they are.

    Returns:
        The average.

    Raises:
        ValueError: there are not so many.
    """
    if last < 1:
        raise ValueError(f"{last} checkpoints to average: must be at least 1")
    found = list_checkpoints(run / "checkpoints")
    checkpoints = [(step, path) for step, path in found if scheduled(path) or step == end][-last:]
    if len(checkpoints) < last:
        raise ValueError(
            f"{run} holds {len(checkpoints)} of the {last} checkpoints to average: at most what "
            "run.keep_checkpoints keeps, and none that a signal left"
        )
    out = out or run / "checkpoints" / f"average-{last}-step-{checkpoints[-1][0]:08d}.ckpt"
    if write:
        average_checkpoints([path for _, path in checkpoints], out)
        say(f"averaged {', '.join(path.name for _, path in checkpoints)} into {out}")
    return out


def average_checkpoints(paths: Sequence[str | Path], out: str | Path) -> Path:
    """The mean of the weights of several checkpoints of one run, as a checkpoint without training state.

    Sums are in float64 over sorted inputs, so the order given does not matter.

    Args:
        paths: checkpoints of equal shapes (section 6.1: the last 5, or 20).
        out: where the average goes; its "averaged" entry lists the inputs' steps and names.

    Returns:
        `out`.

    Raises:
        ValueError: no input, the same file twice, or checkpoints of different models or data.
    """
    files = sorted({Path(path).resolve() for path in paths}, key=lambda path: path.name)
    if not files or len(files) != len(paths):
        raise ValueError(f"{len(paths)} checkpoints to average, {len(files)} of them different: name each once")
    sums: dict[str, torch.Tensor] = {}
    first: dict[str, Any] = {}
    steps = []
    for path in files:
        checkpoint = load_checkpoint(path)
        first = first or checkpoint
        for entry in ("hyper_parameters", "TranslationDataModule"):
            if checkpoint.get(entry) != first.get(entry):
                raise ValueError(f"{path} and {files[0]} differ in {entry}: only checkpoints of one run average")
        weights = checkpoint["state_dict"]
        if {k: v.shape for k, v in weights.items()} != {k: v.shape for k, v in first["state_dict"].items()}:
            raise ValueError(f"{path} and {files[0]} hold tensors of different names or shapes")
        for name, tensor in weights.items():
            sums[name] = sums[name] + tensor.double() if name in sums else tensor.double()
        steps.append(checkpoint.get("global_step", 0))
    dtypes = {name: tensor.dtype for name, tensor in first["state_dict"].items()}
    averaged: dict[str, Any] = {
        "state_dict": {name: (total / len(files)).to(dtypes[name]) for name, total in sums.items()},
        "averaged": [{"step": step, "name": path.name} for step, path in zip(steps, files, strict=True)],
        "global_step": max(steps),
    }
    for entry in ("hyper_parameters", "TranslationDataModule", "pytorch-lightning_version"):
        if entry in first:
            averaged[entry] = first[entry]
    _save(averaged, Path(out))
    return Path(out)
