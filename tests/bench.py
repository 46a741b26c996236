"""A study to try sweeps on: most of its trials are a script that plays `fit`.

The script notes that it was started, does what plan.json says of its variant, and leaves a result.json.
"""

import contextlib
import csv
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import optuna
from optuna.trial import TrialState

from lit_transformer.__main__ import main

CORES = len(os.sched_getaffinity(0))
LIMIT = 60  # seconds that nothing here comes near, however busy the machine is
FAKE = """
import json, os, resource, signal, subprocess, sys, time
from pathlib import Path

given = dict(zip(sys.argv, sys.argv[1:]))  # the last of a key wins
folder, variant, seed = Path(given["--run.dir"]), given["--run.variant"], int(given["--seed_everything"])
plan = json.loads(Path(__file__).with_name("plan.json").read_text())
plan = plan.get(variant, plan.get("*", {}))
stores = Path(json.loads(Path(__file__).with_name("base.yaml").read_text())["data"]["root"])
data = json.loads(next(stores.glob("*/meta.json")).read_text())["fingerprint"]
with open(folder / "attempts", "a") as file:
    file.write(f"{os.getpid()}\\n")
attempt = len((folder / "attempts").read_text().split())
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
if "progress" in plan:
    (folder / "progress.json").write_text(plan["progress"])
parent = os.getppid()
if plan.get("child"):
    left = subprocess.Popen(["sleep", "1000"])
    (folder / "child").write_text(str(left.pid))
if "quality" in plan:  # a search: the smaller the key's value, the lower the perplexity
    plan["perplexity"] = float(given[plan["quality"]])
    plan["curve"] = [[step, plan["perplexity"] * 5 / step] for step in range(1, 6)]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if plan.get("stubborn") else signal.default_int_handler)
try:
    for step, value in plan.get("curve", []):
        curve = folder / "csv" / f"version_{attempt - 1}" / "metrics.csv"
        curve.parent.mkdir(parents=True, exist_ok=True)
        with open(curve, "a") as file:
            file.write(("" if file.tell() else "step,val_perplexity\\n") + f"{step},{value}\\n")
        time.sleep(plan.get("pause", 0))
    while "until" in plan and not all((folder.parents[1] / name).exists() for name in plan["until"]):
        if os.getppid() != parent:
            sys.exit(9)  # as a run does whose sweep was killed
        time.sleep(0.05)
except KeyboardInterrupt:
    (folder / "interrupted").touch()
    sys.exit(130)
if plan.get("checkpoints"):  # one update further at each attempt
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"step-{attempt:08d}.ckpt").touch()
if plan.get("fill"):
    with open(folder / "filling", "wb") as file:
        while True:
            file.write(bytes(1 << 12))
            file.flush()
if "memory" in plan:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
    held = bytearray(plan["memory"])
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
        self.forked: list[int] = []
        self.configure(base)
        (root / "fake.py").write_text(FAKE)
        self.plan()

    def configure(self, base: dict) -> None:
        (self.root / "base.yaml").write_text(json.dumps(base))

    def study(self, *variants: str | dict, **more) -> None:
        described = [{"name": v} if isinstance(v, str) else v for v in variants]
        fields = {"name": "s", "config": ["base.yaml"], **({"variants": described} if described else {})}
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

    def fork(self, *more: str, workers: int = 2, host: str = "") -> int:
        """The same in a process of its own, with its own group, as a terminal of this or another host starts it."""
        pid = os.fork()
        if pid:
            self.forked.append(pid)
            return pid
        status = 99
        try:
            os.setsid()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's is ignored
            if host:
                socket.gethostname = lambda: host
            with open(self.root / f"said.{os.getpid()}", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(os.dup(said.fileno()), "w") for _ in range(2))
                try:
                    status = self.sweep(*more, workers=workers)
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(status)

    def kill(self) -> None:
        """What a test that failed would leave; trials end with their sweep."""
        for pid in self.forked:
            with contextlib.suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def said(self, pid: int) -> str:
        file = self.root / f"said.{pid}"
        return file.read_text() if file.is_file() else ""

    def attempts(self) -> dict[str, int]:
        """How often each cell was started."""
        return {
            str(file.parent.relative_to(self.folder)): len(file.read_text().split())
            for file in sorted(self.folder.glob("*/*/attempts"))
        }

    def optuna(self, storage: str = "") -> optuna.Study:
        """The study as Optuna alone reads it."""
        return optuna.load_study(study_name="s", storage=storage or f"sqlite:///{self.folder}/optuna.db")

    def trials(self, storage: str = "") -> dict[str, list[TrialState]]:
        """The states of each cell's trials."""
        found: dict[str, list[TrialState]] = {}
        for trial in self.optuna(storage).trials:
            found.setdefault(trial.user_attrs["cell"], []).append(trial.state)
        return found

    def described(self) -> dict:
        return json.loads((self.folder / "study.json").read_text())

    def rows(self) -> dict[str, dict[str, str]]:
        with open(self.out / "s.csv", newline="") as file:
            return {row["variant"]: row for row in csv.DictReader(file)}

    def tables(self) -> set[str]:
        return {file.name for file in self.out.iterdir() if file.suffix in (".csv", ".md", ".png")}


def wait_for(condition: Callable[[], object], what: str, pause: float = 0.05, limit: float = LIMIT) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(pause)


def ended(pid: int, limit: float = LIMIT) -> int:
    """The exit status of a child, or minus its signal."""
    found: list[int] = []

    def gone() -> bool:
        child, status = os.waitpid(pid, os.WNOHANG)
        found.append(status)
        return child == pid

    try:
        wait_for(gone, f"process {pid} has ended", limit=limit)
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


def assert_done_once(bench: Bench, *cells: str, storage: str = "", ignore: tuple[str, ...] = ()) -> None:
    """Each cell has one result that counts, and nothing is under way."""
    trials = bench.trials(storage)
    assert set(trials) == {*cells, *ignore}
    for cell in cells:
        states = trials[cell]
        assert states.count(TrialState.COMPLETE) == 1, cell
        assert set(states) <= {TrialState.COMPLETE, TrialState.FAIL}, cell
        assert (bench.folder / cell / "result.json").is_file(), cell
