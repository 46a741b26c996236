"""Where a step's time goes, and what grows with what: this project alone.

python benchmarks/overheads.py --size mini        about 5 minutes
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from contest import WORK, Clock, machine, peak_mib, report, table
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile
from work import EOS_ID, SIZES, SPECIAL, MadeData, copying_model, lengths, made_store

from lit_transformer.callbacks import Checkpoints, Progress
from lit_transformer.cli import TrainerConfig
from lit_transformer.data import EvaluationBatches, TrainingBatches
from lit_transformer.decode import search_all
from lit_transformer.kernels import keep_memory
from lit_transformer.module import LitTransformer, sentence_nll

WARM = 3
PROFILED = 3
ROUNDS = 3
# Names of torch's operations, or parts of names without a colon.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise"),
    "softmax, of attention and loss": ("softmax", "aten::exp_", "aten::amax", "aten::gather", "aten::scatter_add_"),
    "dropout, scales": ("aten::random_", "aten::ge", "aten::addcmul", "aten::mul", "aten::mul_"),
    "layer norm": ("layer_norm",),
    "copies, filling": ("aten::copy_", "aten::cat", "aten::fill_", "aten::constant_pad_nd"),
    "sums, ReLU": ("aten::add", "aten::add_", "aten::sum", "aten::threshold_backward"),
    "optimiser": ("_fused_adam", "_foreach", "Optimizer"),
}


class Timed(pl.Callback):
    """Seconds of processor time of `updates` updates behind the first few."""

    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM:
            self.clock = Clock()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM + self.updates:
            self.seconds = self.clock.read()["cpu"] / self.updates


def fitted(data: MadeData, size: dict[str, int], updates: int) -> float:
    """Seconds of one update, through `fit`'s own Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        path, timed = Path(folder), Timed(updates)
        trainer = TrainerConfig(accelerator="cpu", devices=1, max_steps=WARM + updates + 1).build(
            logger=CSVLogger(path, name="csv"),
            callbacks=[timed, Checkpoints(path / "checkpoints", 10**6, 1), Progress(path)],
        )
        trainer.fit(LitTransformer(**size), datamodule=data)
    return timed.seconds


def plain(data: MadeData, size: dict[str, int], updates: int) -> tuple[float, float, Any]:
    """The same updates in a plain loop: seconds of one, of making its batch, and a profile."""
    data.setup("fit")
    assert data.store is not None
    batches = TrainingBatches(data.store, data.plan, data.max_tokens, 1, 0, 1)
    model = LitTransformer(**size).model.train()
    keep_memory()
    gc.freeze()
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def step(k: int) -> float:
        clock = Clock()
        batch = batches[k]
        making = clock.read()["cpu"]
        loss, _ = model(batch.src, batch.tgt_in, batch.tgt_out, 0.1)
        (loss / batch.update_tokens).backward()
        adam.step()
        adam.zero_grad()
        return making

    for k in range(WARM):
        step(k)
    clock = Clock()
    making = sum(step(WARM + k) for k in range(updates))
    seconds = clock.read()["cpu"] / updates
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for k in range(PROFILED):
            step(WARM + updates + k)
    return seconds, making / updates, found


def shares(found: Any) -> dict[str, float]:
    events = found.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    counted = {
        kind: sum(
            e.self_cpu_time_total for e in events if any(n == e.key or (":" not in n and n in e.key) for n in names)
        )
        for kind, names in KINDS.items()
    }
    return {kind: seconds / whole for kind, seconds in counted.items()} | {"rest": 1 - sum(counted.values()) / whole}


def alone(code: str) -> list[float]:
    """Numbers that a process of its own prints: its memory and its start are its own."""
    command = [sys.executable, __file__, "--measure", code]
    return [float(x) for x in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]]


def measure(code: str) -> None:
    if code == "imports":
        return
    if code.startswith("start"):
        return start(code.split(",")[1])
    size, layers, tokens, pairs = code.split(",")
    shape = SIZES[size] | ({"num_layers": int(layers)} if int(layers) else {})
    folder = WORK / f"store-{size}-{pairs}"
    if not folder.is_dir():
        made_store(folder, shape["vocab_size"], int(pairs))
    seconds = fitted(MadeData(folder, shape["vocab_size"], int(tokens)), shape, 3)
    print(seconds, peak_mib())


def start(folder: str) -> None:
    """`fit` until its first forward pass."""
    from lit_transformer.__main__ import main as command

    def first(*_: Any) -> None:
        Path(folder, "started").write_text(str(time.time()))
        os._exit(0)

    LitTransformer.training_step = first  # type: ignore[method-assign, assignment]
    raise SystemExit(command(["fit", "--config", f"{folder}/run.yaml"]) or "fit has ended without a forward pass")


def start_up(size: str) -> list[tuple[str, float]]:
    """Seconds of imports alone, of `fit`'s first start with its text, and of one that finds it prepared."""
    folder = WORK / "start"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    for name, lines in (("train", 20_000), ("valid", 500)):
        for side in ("src", "tgt"):
            text = (" ".join(rng.choices(words, k=rng.randint(3, 30))) for _ in range(lines))
            (folder / f"{name}.{side}").write_text("\n".join(text) + "\n")
    files = {name: [str(folder / f"{name}.{side}") for side in ("src", "tgt")] for name in ("train", "valid")}
    data = {"source": "files", "src_lang": "en", "tgt_lang": "de", "root": str(folder / "data"), "vocab_size": 2000}
    run = {"data": data | files, "model": {**SIZES[size]}, "run": {"dir": str(folder / "run")}}
    del run["model"]["vocab_size"]
    run["trainer"] = {"accelerator": "cpu", "devices": 1, "max_steps": 10}
    (folder / "run.yaml").write_text(json.dumps(run))
    found = []
    for name, code in (
        ("imports alone", "imports"),
        ("`fit` on 20,000 new pairs, to its first batch", f"start,{folder}"),
        ("`fit` on prepared text, to its first batch", f"start,{folder}"),
    ):
        begun = time.time()
        # Not through pipes: the loader's workers, which outlive it for some seconds, would hold them open.
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([sys.executable, __file__, "--measure", code], check=True, **quiet)
        ended = time.time() if code == "imports" else float((folder / "started").read_text())
        found.append((name, ended - begun))
    return found


def validation(data: MadeData, size: dict[str, int], update: float) -> dict[str, float]:
    """Seconds of validating 3,000 sentences and of decoding 500 of them, as shares of training with base's settings."""
    assert data.store is not None
    model = LitTransformer(**size).model.eval()
    batches = EvaluationBatches(data.store, "valid", 0, 1)
    clock = Clock()
    with torch.no_grad():
        for k in range(len(batches)):
            batch = batches[k]
            sentence_nll(model(batch.src, batch.tgt_in), batch.tgt_out)
    scoring = clock.read()["cpu"] * 3000 / len(data.store.sentences("valid", "src"))
    rng = np.random.default_rng(1)
    some = [[*map(int, rng.integers(SPECIAL, size["vocab_size"], n - 1)), EOS_ID] for n in lengths(64, rng)[0]]
    copying = copying_model(size)
    clock = Clock()
    search_all(copying, some)
    decoding = clock.read()["cpu"] * 500 / 64
    training = 1000 * update * 25_000 / 2_000  # from one validation to the next
    return {"perplexity": scoring / training, "decoding": decoding / 5 / training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="mini")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="5 updates, no growth")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # this script, in a process of its own
    given = parser.parse_args()
    torch.set_num_threads(1)
    WORK.mkdir(exist_ok=True)
    if given.measure:
        return measure(given.measure)
    updates = 5 if given.quick else given.updates
    size = SIZES[given.size]
    folder = WORK / f"store-{given.size}"
    made_store(folder, size["vocab_size"], 20_000)
    clock = Clock()
    data = MadeData(folder, size["vocab_size"], 2000)
    rounds = [(fitted(data, size, updates), *plain(data, size, updates)) for _ in range(1 if given.quick else ROUNDS)]
    whole, loop, making = (statistics.median(one[i] for one in rounds) for i in range(3))
    parts = shares(rounds[-1][3])
    beside = validation(data, size, whole)
    rows = [("a plain loop's step", f"{loop:.3f} s", f"{loop / whole:.1%}")]
    rows += [(f"... {kind}", "", f"{share * loop / whole:.1%}") for kind, share in parts.items()]
    rows += [
        ("... of it making the batch", f"{making * 1000:.1f} ms", f"{making / whole:.1%}"),
        ("Lightning, logging, callbacks, gradient norm", f"{whole - loop:.3f} s", f"{(whole - loop) / whole:.1%}"),
    ]
    rows += [
        (f"validation: {name}, beside 1,000 updates of 25,000 tokens", "", f"{share:.2%}")
        for name, share in beside.items()
    ]
    text = f"{machine(1)}; cpu time, {given.size} model, 2,000 target tokens an update.\n\n"
    text += table(["part of an update through `fit`", "time", "share"], rows)
    values: dict[str, Any] = {"update": whole, "loop": loop, "batch": making, "shares": parts, "validation": beside}
    values["start"] = dict(start_up(given.size))
    text += "\n\n" + table(
        ["start", "seconds"], [(name, f"{seconds:.1f}") for name, seconds in values["start"].items()]
    )
    if not given.quick:
        values["growth"] = {}
        lines = []
        for name, code in (
            ("as above", f"{given.size},0,2000,20000"),
            ("3 layers", f"{given.size},3,2000,20000"),
            ("12 layers", f"{given.size},12,2000,20000"),
            ("512 tokens", f"{given.size},0,512,20000"),
            ("4,096 tokens", f"{given.size},0,4096,20000"),
            ("10,000 pairs", f"{given.size},0,2000,10000"),
            ("4,000,000 pairs", f"{given.size},0,2000,4000000"),
        ):
            seconds, peak = values["growth"][name] = alone(code)
            lines.append((name, f"{seconds:.3f} s", f"{peak:,.0f} MiB"))
        text += "\n\n" + table(["one thing changed", "an update", "memory at its peak"], lines)
    values["seconds of this benchmark"] = clock.read()
    report(f"overheads-{given.size}", f"Overheads, {given.size} model", text, values, not given.quick)


if __name__ == "__main__":
    main()
