"""A study to try sweeps on: most of its trials are a script that plays `fit`.

The script notes that it was started, does what plan.json says of its variant, and leaves a result.json.
"""

import csv
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.trial import TrialState

from lit_transformer.__main__ import main

CORES = len(os.sched_getaffinity(0))
LIMIT = 60  # seconds that nothing here comes near, however busy the machine is
FAKE = """
import json, os, signal, sys, time
from pathlib import Path

given = dict(zip(sys.argv, sys.argv[1:]))  # the last of a key wins
folder, variant, seed = Path(given["--run.dir"]), given["--run.variant"], int(given["--seed_everything"])
plan = json.loads(Path(__file__).with_name("plan.json").read_text()).get(variant, {})
stores = Path(json.loads(Path(__file__).with_name("base.yaml").read_text())["data"]["root"])
data = json.loads(next(stores.glob("*/meta.json")).read_text())["fingerprint"]
with open(folder / "attempts", "a") as file:
    file.write(f"{os.getpid()}\\n")
attempt = len((folder / "attempts").read_text().split())
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
if "progress" in plan:
    (folder / "progress.json").write_text(plan["progress"])
parent = os.getppid()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if plan.get("stubborn") else signal.default_int_handler)
try:
    while "until" in plan and not all((folder.parents[1] / name).exists() for name in plan["until"]):
        if os.getppid() != parent:
            sys.exit(9)  # as a run does whose sweep was killed
        time.sleep(0.05)
except KeyboardInterrupt:
    (folder / "interrupted").touch()
    sys.exit(130)
if attempt > 9:
    os.kill(parent, signal.SIGINT)  # so that a sweep without end comes to one
    sys.exit("started again and again")
if attempt <= plan.get("failures", 0):
    says = plan.get("says", [])
    if attempt <= len(says):
        print(says[attempt - 1])
        sys.stdout.flush()
    if plan.get("signal"):
        os.kill(os.getpid(), plan["signal"])
    sys.exit(plan.get("status", 3))
if plan.get("result", True):
    scored = {"sentences": 8, "note": ""}
    result = {
        "study": given["--run.study"], "variant": variant, "seed": seed, "updates": 4, "parameters": 1000 + seed,
        "vocab_size": 300, "split": "valid", "nll": 1.0, "perplexity": plan.get("perplexity", 2.0 + seed),
        "bleu": {"name": "sacreBLEU", "score": float(len(variant)), "signature": "tok:13a", **scored},
        "compound_split_bleu": {"name": "split", "score": 50.0, "signature": "tok:moses", **scored},
        "beam_size": 4, "length_penalty": 0.6, "data": data, "tokenizer": "t", "tgt_tokens": 9, "flops": 1e9,
        "hours": 0.1,
    }
    partial = folder / "partial"
    partial.write_text(json.dumps(result))
    os.replace(partial, folder / "result.json")
"""


class Bench:
    """A study file with its folders, what its trials are to do, and what became of them."""

    def __init__(self, root: Path, base: dict) -> None:
        self.root, self.runs, self.out = root, root / "runs", root / "results"
        self.file, self.folder = root / "study.yaml", root / "runs" / "s"
        self.configure(base)
        (root / "fake.py").write_text(FAKE)
        self.plan()

    def configure(self, base: dict) -> None:
        (self.root / "base.yaml").write_text(json.dumps(base))

    def study(self, *variants: str | dict, **more) -> None:
        described = [{"name": v} if isinstance(v, str) else v for v in variants]
        fields = {"name": "s", "config": ["base.yaml"], "variants": described}
        fields["launcher"] = [sys.executable, "-S", str(self.root / "fake.py")]
        self.file.write_text(json.dumps({**fields, **more}))

    def plan(self, **variants: dict) -> None:
        """What each variant's trials do: wait `until` files of the study are there, fail so many times, ..."""
        (self.root / "plan.json").write_text(json.dumps(variants))

    def arguments(self, action: str = "run", *more: str) -> list[str]:
        folders = ["--runs", str(self.runs), "--out", str(self.out)]
        return ["sweep", action, str(self.file), *folders, *more]

    def sweep(self, *more: str, workers: int = 1) -> int:
        return main(self.arguments("run", "--workers", str(workers), *more))

    def fork(self, *more: str, workers: int = 2) -> int:
        """The same in a process of its own, with its own group, as a terminal would start it."""
        pid = os.fork()
        if pid:
            return pid
        status = 99
        try:
            os.setsid()
            with open(self.root / f"said.{os.getpid()}", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(os.dup(said.fileno()), "w") for _ in range(2))
                status = self.sweep(*more, workers=workers)
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(status)

    def said(self, pid: int) -> str:
        file = self.root / f"said.{pid}"
        return file.read_text() if file.is_file() else ""

    def attempts(self) -> dict[str, int]:
        """How often each cell was started."""
        return {
            str(file.parent.relative_to(self.folder)): len(file.read_text().split())
            for file in sorted(self.folder.glob("*/*/attempts"))
        }

    def trials(self) -> dict[str, list[TrialState]]:
        """The states of each cell's trials, by what Optuna alone can read."""
        found: dict[str, list[TrialState]] = {}
        for trial in optuna.load_study(study_name="s", storage=f"sqlite:///{self.folder}/optuna.db").trials:
            found.setdefault(trial.user_attrs["cell"], []).append(trial.state)
        return found

    def described(self) -> dict:
        return json.loads((self.folder / "study.json").read_text())

    def rows(self) -> dict[str, dict[str, str]]:
        with open(self.out / "s.csv", newline="") as file:
            return {row["variant"]: row for row in csv.DictReader(file)}

    def tables(self) -> set[str]:
        return {file.name for file in self.out.iterdir() if file.suffix in (".csv", ".md", ".png")}


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.05)


def ended(pid: int) -> int:
    """The exit status of a child, or minus its signal."""
    found: list[int] = []

    def gone() -> bool:
        child, status = os.waitpid(pid, os.WNOHANG)
        found.append(status)
        return child == pid

    try:
        wait_for(gone, f"process {pid} has ended")
    except AssertionError:
        os.killpg(pid, signal.SIGKILL)
        raise
    return os.waitstatus_to_exitcode(found[-1])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def assert_done_once(bench: Bench, *cells: str) -> None:
    """Each cell has one result that counts, and nothing is under way."""
    trials = bench.trials()
    assert set(trials) == set(cells)
    for cell, states in trials.items():
        assert states.count(TrialState.COMPLETE) == 1, cell
        assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}, cell
        assert (bench.folder / cell / "result.json").is_file(), cell
