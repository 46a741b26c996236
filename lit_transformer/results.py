"""`lit-transformer results`: from result files to a study's table, plots and report, and two runs compared.

RUNS/STUDY/                          what `sweep run` left; only read
RESULTS/STUDY.csv, .md               every number, and the table for people
RESULTS/STUDY.png, .curves.svg       differences to base beside the paper's, and learning curves
RESULTS/STUDY.html                   all of it on one page, with sentences
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lit_transformer.compare import compare_command
from lit_transformer.plots import differences, learning_curves
from lit_transformer.report import report
from lit_transformer.rows import read_paper, read_study
from lit_transformer.sentences import Sentences, read_sentences
from lit_transformer.store import atomic_file, write_atomic
from lit_transformer.table import tabulate, to_csv, to_markdown

__all__ = ["ENDINGS", "build", "read_paper", "results_command"]

ENDINGS = ".csv, .md, .png, .curves.svg, .html"


def build(runs: Path, name: str, out: Path) -> str:
    """Write a study's csv, md, png, curves.svg and html: all of them, or none.

    Args:
        runs: folder of all studies' runs, only read.
        name: the study.
        out: folder of the results.

    Returns:
        The Markdown table.

    Raises:
        ValueError: no such study, or runs in it that must not stand in one table.
        OSError: the results cannot be written; what was there is as it was.
    """
    if not (runs / name).is_dir():
        raise ValueError(f"{runs / name} holds no study: run `lit-transformer sweep run` first")
    with _alone(out, name):
        study, rows = read_study(runs / name)
        outputs: dict[str, dict[int, Sentences]] = {row.name: {} for row in rows}
        for row in rows:
            for folder, result in zip(row.folders, row.results, strict=True):
                if (found := read_sentences(folder, result)) is not None:
                    outputs[row.name][result["seed"]] = found
        table = tabulate(study, rows, outputs, read_paper(out))
        markdown = to_markdown(table)
        plots = {"png": differences(table), "curves.svg": learning_curves(rows)}
        page = report(table, rows, outputs, plots)
        texts = {"csv": to_csv(table), "md": markdown, "html": page}
        files = {ending: text.encode(errors="replace") for ending, text in texts.items()} | plots
        write_together({out / f"{name}.{ending}": content for ending, content in files.items()})
    return markdown


@contextlib.contextmanager
def _alone(out: Path, name: str) -> Iterator[None]:
    """One build of a study's results at a time: the one that read last writes last."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: this folder cannot be made ({error.strerror})") from error
    # Beside what is written: the runs may lie on a disk that can only be read.
    with open(out / f".{name}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def write_together(files: Mapping[Path, bytes]) -> None:
    """All of these files, or all of them as they were.

    Raises:
        OSError: one of them cannot be written.
    """
    for path in files:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: move it away, a file of that name is to be written")
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        with contextlib.ExitStack() as stack:
            # Each has its full content on the disk before the first one takes its name.
            for path, content in files.items():
                file = stack.enter_context(atomic_file(path))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        for path, old in before.items():
            with contextlib.suppress(OSError):
                if old is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != old:
                    write_atomic(path, old)
        raise


def results_command(args: Sequence[str]) -> int:
    """Tables, plots and report of a study from its result files; or two runs compared."""
    if args and args[0] == "compare":
        return compare_command(args[1:])
    parser = argparse.ArgumentParser(
        "lit-transformer results",
        allow_abbrev=False,
        description="Table, plots and report of a study. `lit-transformer results compare A B` compares two runs or "
        "rows instead (see `results compare --help`); a study that is named compare: `results -- compare`.",
    )
    parser.add_argument("study", help="the study's name")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the tables")
    options = parser.parse_args(args)
    print(build(options.runs, options.study, options.out))
    print(f"written: {options.out / options.study}{ENDINGS}")
    return 0
