"""How fast a run trains here and how much memory it takes: for a moment, what `fit` does, and nothing of it is kept."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lit_transformer.cli import ExperimentCLI
from lit_transformer.data import Batch, TrainingBatches, TranslationDataModule
from lit_transformer.module import LitTransformer
from lit_transformer.tokenizer import PAD_ID

MEASURE_SECONDS = 3.0  # of training for each row, after one warm-up; at least one micro-batch
FULLEST = 8  # updates among which the largest micro-batch is looked for


@dataclass(frozen=True)
class Speed:
    """What a row's model did in a moment of training, on the device of that name.

    Attributes:
        memory: bytes at the largest micro-batch, of a process that holds the whole model.
        flops_per_second: of one process, padding not counted as work.
        update_seconds: of one step of the optimiser.
        processes: that a run shares its micro-batches among.
    """

    device: str
    memory: int
    flops_per_second: float
    update_seconds: float
    processes: int

    def hours(self, flops: float, updates: int) -> float:
        """Of so much computing, shared by all processes, and so many updates."""
        return (flops / self.processes / self.flops_per_second + updates * self.update_seconds) / 3600


class Text:
    """The prepared corpus of one or more rows, opened once, with its plan of updates."""

    def __init__(self, data: TranslationDataModule) -> None:
        data.setup("fit")
        self.data, self.plan = data, data.plan
        self.accumulation = functools.cache(lambda world: data.plan.accumulation(world, data.max_tokens))
        self.largest = functools.cache(self._largest)

    def _largest(self, world: int, updates: int) -> np.ndarray:
        """Sentences of the largest micro-batch, which one of the fullest updates holds."""
        plan = self.plan
        sizes = np.maximum(plan.src_lengths, plan.tgt_lengths)
        # Which lengths stand together is the same in every epoch, so one epoch shows all there are.
        planned = range(min(updates, plan.updates_per_epoch))
        fullest = sorted(planned, key=lambda n: -int(sizes[plan.update(n).sentences].sum()))[:FULLEST]
        parts = self.accumulation(world) * world
        found = [part for n in fullest for part in plan.split(plan.update(n), parts, self.data.max_tokens) if len(part)]
        return max(found, key=lambda part: len(part) * (plan.src_lengths[part].max() + plan.tgt_lengths[part].max()))


def measure(cli: ExperimentCLI, text: Text, threads: int) -> Speed:
    """Train for a moment with so many threads, on the device and with the precision of the run's trainer.

    Raises:
        ValueError: no such device, sentences beyond max_positions or max_tokens, or not enough memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    gc.collect()  # the row before: Lightning's objects refer to each other
    try:
        return _train_for_a_moment(cli, text)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"a micro-batch of data.max_tokens = {cli.datamodule.max_tokens} does not fit into the device's memory: "
            "lower data.max_tokens, which leaves the updates as they are"
        ) from error
    finally:
        torch.set_num_threads(before)


def _train_for_a_moment(cli: ExperimentCLI, text: Text) -> Speed:
    trainer, lit = cli.trainer_config.build(logger=False), cli.model
    device, world, updates = trainer.strategy.root_device, trainer.world_size, cli.trainer_config.max_steps
    trainer.accumulate_grad_batches = accumulation = text.accumulation(world)
    trainer.datamodule = text.data  # type: ignore[attr-defined]
    lit.trainer = trainer
    lit.setup("fit")
    trainer.precision_plugin.convert_module(lit)
    lit.to(device).train()
    optimizer = lit.configure_optimizers()
    assert text.data.store is not None
    batches = TrainingBatches(text.data.store, text.plan, text.data.max_tokens, accumulation, 0, world)
    ids = text.largest(world, updates)
    largest = _on(device, batches.batch(ids, int(text.plan.tgt_lengths[ids].sum())))

    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.ExitStack() as stack:
        saved = {} if gpu else stack.enter_context(saved_bytes(lit))
        seconds = _timed(device, lambda: _pass(trainer, lit, largest, 0))
    flops = _flops(lit, largest)
    optimizer.step()
    if gpu:
        _pass(trainer, lit, largest, 0)  # beside gradients and moments, as in every update but the first
    # Weights, gradients, and Adam's two moments of them.
    weights = sum(parameter.nbytes for parameter in lit.parameters())
    memory = torch.cuda.max_memory_allocated(device) if gpu else 4 * weights + sum(saved.values())
    # A first pass that long is no more than that by its warming up, unless it compiled.
    if seconds < MEASURE_SECONDS or lit.compile_model:
        seconds, flops, k = 0.0, 0.0, 0
        while not flops or seconds < MEASURE_SECONDS:
            batch = _on(device, batches[k % (updates * accumulation)])
            seconds += _timed(device, functools.partial(_pass, trainer, lit, batch, k))
            flops += _flops(lit, batch)
            k += 1
    name = torch.cuda.get_device_name(device) if gpu else device.type.upper()
    step = min(_timed(device, optimizer.step) for _ in range(3))
    return Speed(name, memory, flops / seconds, step, world)


@contextlib.contextmanager
def saved_bytes(module: nn.Module) -> Iterator[dict[int, int]]:
    """What autograd keeps for the backward pass of what runs inside: bytes of each storage, parameters aside."""
    # Known by what they are, not by where they are: tensors without numbers are nowhere.
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _on(device: torch.device, batch: Batch) -> Batch:
    return Batch(*(ids.to(device) for ids in batch))


def _pass(trainer: pl.Trainer, lit: LitTransformer, batch: Batch, k: int) -> None:
    """Forward and backward of one micro-batch, as Lightning does it."""
    with trainer.precision_plugin.train_step_context():
        loss = lit.training_step(batch, k)
    loss.backward()


def _flops(lit: LitTransformer, batch: Batch) -> float:
    src, tgt = ((ids != PAD_ID).sum(1).double() for ids in (batch.src, batch.tgt_out))
    return 3 * float(lit.config.forward_flops(src, tgt).sum())


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.monotonic() - start
