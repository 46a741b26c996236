"""Running a study: Optuna's storage says who does what, each trial is a `fit` in its own process.

sweeps/NAME.yaml -> Study, every variant checked before anything trains
                 -> one finished Optuna trial for each (variant, seed), or so many trials of a search
                 -> runs/NAME/VARIANT/seedN/, filled by the command a user would type
                 -> results/NAME.{csv,md,png,curves.svg,html}
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_transformer.commands import quiet
from lit_transformer.corpus import prepare
from lit_transformer.engine import Engine
from lit_transformer.plan import plan_study, table
from lit_transformer.preflight import check, describe, note_failures, refuse_changes, refuse_other_data
from lit_transformer.progress import say
from lit_transformer.results import ENDINGS, build
from lit_transformer.signals import Signals, Stopped
from lit_transformer.sources import CorpusConfig
from lit_transformer.store import Store
from lit_transformer.trials import MAX_FAILURES

SHOW_SECONDS = 10


def run_study(engine: Engine, out: Path, retry: bool) -> int:
    """All cells of a study, with progress; tables at the end."""
    name, trials = engine.study.name, engine.trials
    resolved = check(engine.study, engine.file, engine.folder)
    trials.open()
    running = {name for name, state, _ in engine.grid() if state == "running"}
    refuse_changes(engine.file, engine.folder, resolved, running)
    if retry:
        trials.retry()
    # Once, here, instead of by several trials at the same time.
    for data in {json.dumps(config["data"], sort_keys=True) for config in resolved.values()}:
        fields = json.loads(data)
        own = {k: v for k, v in fields.items() if k in CorpusConfig.__dataclass_fields__}
        store = Store(prepare(CorpusConfig(**own), Path(fields["root"]), say))
        refuse_other_data(engine.file, engine.folder, list(trials.names), store.fingerprint)
    _describe(engine, resolved)
    runs = engine.study.search.trials if engine.study.search else len(trials.names)
    say(
        f"{name}: {runs} runs, {engine.workers} at a time, {engine.threads} "
        f"{'thread' if engine.threads == 1 else 'threads'} each; logs in {engine.folder}/VARIANT/seedN/log.txt"
    )
    workers = [threading.Thread(target=engine.work) for _ in range(engine.workers)]
    try:
        for worker in workers:
            worker.start()
        shown = time.monotonic()
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.1)  # not join: Python takes a thread for ended when an interrupt comes in its join
            if time.monotonic() - shown >= SHOW_SECONDS:
                shown = time.monotonic()
                say(engine.summary())
                if engine.study.search:
                    _describe(engine, resolved)
    except BaseException as error:
        engine.stopping.set()
        if isinstance(error, Stopped):
            say(f"{name}: stopping; the same command goes on")
        raise
    finally:  # `stopping` stays unset at an ordinary end: what is read below is waited for too
        for worker in workers:
            worker.join()
    if engine.crashed:
        raise engine.crashed[0]
    failed = trials.failures()
    if engine.study.search:  # other studies may have been described by a sweep of a longer file meanwhile
        _describe(engine, resolved)
    without = failed | {cell: why for cell, state, why in engine.grid() if state == "pruned"}
    note_failures(engine.folder, {cell.rpartition("/")[0]: why for cell, why in without.items()})
    print(build(engine.folder.parent, name, out))
    print(f"written: {out / name}{ENDINGS}")
    for cell, reason in failed.items():
        say(f"{name}: {cell} was given up after {MAX_FAILURES} failures (--retry tries again): {reason}")
    return 1 if failed else 0


def _describe(engine: Engine, resolved: dict[str, Any]) -> None:
    """study.json as things stand: a search has the variants that it has made so far."""
    study = engine.study
    if study.search:
        study = replace(study, variants=engine.trials.ranking())
    describe(study, engine.folder, resolved)


def sweep_command(args: Sequence[str]) -> int:
    """Run a study, say how it stands, or what it will take."""
    parser = argparse.ArgumentParser("lit-transformer sweep", allow_abbrev=False)
    parser.add_argument("action", choices=("run", "status", "plan"))
    parser.add_argument("study", type=Path, help="a file such as sweeps/demo.yaml")
    parser.add_argument("--workers", type=int, help="trials at a time; default: one for each core")
    parser.add_argument("--retry", action="store_true", help="try again what was given up after three failures")
    parser.add_argument("--storage", help="Optuna's storage; default: an SQLite file in the study's folder")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the tables")
    options = parser.parse_args(args)
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        parser.error(f"--workers {workers}: must be at least 1")
    engine = Engine(options.study, options.runs, workers, options.storage)
    if options.action == "run":
        with Signals():
            return run_study(engine, options.out, options.retry)
    if options.action == "plan":
        quiet()
        rows = plan_study(engine.study, engine.file, engine.folder, engine.threads)
        print(table(rows, engine.workers, engine.threads))
        return 0
    if not (engine.folder / "study.json").is_file():
        raise ValueError(f"{engine.folder} holds no study yet: start it with `lit-transformer sweep run`")
    engine.trials.open()
    for cell, state, details in engine.grid():
        print(f"{cell:<30} {state:<8} {details}".rstrip())
    return 0
