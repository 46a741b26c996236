"""This project, as a contestant: `fit`'s own Trainer, callbacks, loader and logger; its own search."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from contest import Clock, Turns, peak_mib, serve
from lightning.pytorch.loggers import CSVLogger
from work import MadeData, copying_model

from lit_transformer.callbacks import Checkpoints, Progress
from lit_transformer.cli import TrainerConfig
from lit_transformer.decode import search_all
from lit_transformer.module import LitTransformer


class Told(pl.Callback):
    """Lets training run so many updates each time it is told to."""

    def __init__(self, updates: int, data: MadeData) -> None:
        self.updates, self.data, self.turns = updates, data, Turns()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> int | None:
        if trainer.global_step % self.updates == 0:
            if trainer.global_step == 0:
                self.turns.ready()
            if not self.turns.wait():
                return -1  # Lightning's word for the end of training
            self.clock = Clock()
        return None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step % self.updates == 0:
            seconds = self.clock.read()
            tokens = sum(self.data.plan.update(n).tgt_tokens for n in range(step - self.updates, step))
            self.turns.answer({**seconds, "tokens": tokens, "peak_mib": peak_mib()})


def train(given: dict[str, Any]) -> None:
    data = MadeData(Path(given["store"]), given["size"]["vocab_size"], given["tokens"])
    model = LitTransformer(**given["size"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        # What `fit` builds, without the first word: Told stands last, so all others' work is inside its seconds.
        trainer = TrainerConfig(accelerator="cpu", devices=1, max_steps=10**6).build(
            logger=CSVLogger(path, name="csv"),
            callbacks=[Checkpoints(path / "checkpoints", 10**6, 1), Progress(path), Told(given["updates"], data)],
        )
        trainer.fit(model, datamodule=data)


def decode(given: dict[str, Any], int8: bool = False) -> None:
    model: Any = copying_model(given["size"])
    with contextlib.suppress(ModuleNotFoundError):  # a version before it
        from lit_transformer.packed import for_search

        model = for_search(model, int8)  # once, as a Translator does
    calls = itertools.cycle(json.loads(Path(given["sources"]).read_text()))

    def work() -> dict[str, Any]:
        sources = next(calls)
        if given["batch"]:
            tokens = max(map(len, sources)) * len(sources) * 4  # all of them in one batch
            found = search_all(model, sources, batch_tokens=tokens)
        else:
            found = search_all(model, sources)
        ids = [list(best[0].ids) for best in found]
        return {"tokens": sum(len(i) + 1 for i in ids), "outputs": ids}

    serve(work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    tasks = {"train": train, "decode": decode, "decode-int8": functools.partial(decode, int8=True)}
    tasks[sys.argv[1]](json.loads(sys.argv[2]))
