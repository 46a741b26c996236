"""Where a step's time goes, and what grows with what: this project alone.

python benchmarks/overheads.py --size mini        about 5 minutes
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contest import WORK, Clock, machine, report, table
from lightning.pytorch.loggers import CSVLogger
from torch.profiler import ProfilerActivity, profile
from work import SIZES, MadeData, made_store

from lit_transformer.callbacks import Checkpoints, Progress
from lit_transformer.cli import TrainerConfig
from lit_transformer.data import TrainingBatches
from lit_transformer.module import LitTransformer

WARM = 3
# Names of torch's operations; attention's products are inside its kernels.
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "mkldnn::_linear_pointwise"),
    "attention": ("scaled_dot_product",),
    "dropout": ("aten::random_", "aten::ge", "aten::addcmul", "aten::mul", "aten::bernoulli_"),
    "softmax and loss": ("log_softmax", "aten::exp_", "aten::gather", "aten::scatter_add_", "aten::sub_"),
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
        step(WARM + updates)
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
    size, layers, tokens, pairs = code.split(",")
    shape = SIZES[size] | ({"num_layers": int(layers)} if int(layers) else {})
    folder = WORK / f"store-{size}-{pairs}"
    if not folder.is_dir():
        made_store(folder, shape["vocab_size"], int(pairs))
    seconds = fitted(MadeData(folder, shape["vocab_size"], int(tokens)), shape, 3)
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


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
    whole = fitted(data, size, updates)
    loop, making, found = plain(data, size, updates)
    parts = shares(found)
    rows = [("a plain loop's step", f"{loop:.3f} s", f"{loop / whole:.1%}")]
    rows += [(f"... {kind}", "", f"{share * loop / whole:.1%}") for kind, share in parts.items()]
    rows += [
        ("... of it making the batch", f"{making * 1000:.1f} ms", f"{making / whole:.1%}"),
        ("Lightning, logging, callbacks, gradient norm", f"{whole - loop:.3f} s", f"{(whole - loop) / whole:.1%}"),
    ]
    text = f"{machine(1)}; cpu time, {given.size} model, 2,000 target tokens an update.\n\n"
    text += table(["part of an update through `fit`", "time", "share"], rows)
    values: dict[str, Any] = {"update": whole, "loop": loop, "batch": making, "shares": parts}
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
            ("1,000,000 pairs", f"{given.size},0,2000,1000000"),
        ):
            seconds, peak = values["growth"][name] = alone(code)
            lines.append((name, f"{seconds:.3f} s", f"{peak:,.0f} MiB"))
        text += "\n\n" + table(["one thing changed", "an update", "memory at its peak"], lines)
    values["seconds of this benchmark"] = clock.read()
    report(f"overheads-{given.size}", f"Overheads, {given.size} model", text, values)


if __name__ == "__main__":
    main()
