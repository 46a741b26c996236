"""What happens around training: checkpoints by update, and progress with time left."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_transformer.checkpoint import checkpoint_path, prune_checkpoints, remove_unfinished
from lit_transformer.module import LitTransformer
from lit_transformer.progress import clock, say
from lit_transformer.ranks import TIMEOUT_SECONDS, Agreement, must_agree, sign_in
from lit_transformer.signals import Signals, Stopped
from lit_transformer.store import write_json


class Checkpoints(pl.Callback):
    """Every so many updates or minutes, at the last update, and where a signal ends the training, a checkpoint.

    Where a validation falls on the same update, the checkpoint comes after it: a resumed run then neither loses
    nor repeats the validation.

    By the clock, one is saved after the update in which the run's training time, over all of its sessions and with
    its validations, has reached the next multiple of `minutes`; with several ranks it is the first one's time, and all
    save after the update that follows.  Which updates are saved then depends on the machine, and so do the averages of
    them (section 6.1); the weights of each update do not.

    Args:
        folder: where they go.
        every: updates from one to the next; None where the clock decides.
        keep: the newest so many stay.
        signals: what ends the training.
        timeout: seconds that ranks wait for each other.
        minutes: of training from one to the next, in place of `every`.
    """

    def __init__(
        self,
        folder: Path,
        every: int | None,
        keep: int,
        signals: Signals | None = None,
        timeout: int = TIMEOUT_SECONDS,
        minutes: float | None = None,
    ) -> None:
        assert (every is None) != (minutes is None)
        self.folder, self.every, self.keep, self.minutes = folder, every, keep, minutes
        self.signals, self.timeout = signals or Signals(), timeout

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        sign_in()
        if stage == "fit":
            must_agree("checkpoint", str(trainer.ckpt_path))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LitTransformer)
        self.agreement = Agreement(self.timeout)
        self._intervals = self._reached(pl_module.training_seconds)
        if trainer.is_global_zero:
            remove_unfinished(self.folder)

    def on_train_batch_start(self, *_: Any) -> None:
        self.signals.training = True  # what comes from here on waits for the end of the update

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        interval = trainer.val_check_batch
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done % trainer.accumulate_grad_batches == 0 and not (interval and done % interval == 0):
            self._end_of_update(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._end_of_update(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if number := self.agreement.settle()[0]:
            raise Stopped(number, trainer.global_step)

    def _reached(self, seconds: float) -> int:
        """Whole intervals of the clock's schedule in so many seconds of training."""
        # No state to save: the training time that a checkpoint holds says which intervals are past.
        return int(seconds / (60 * self.minutes)) if self.minutes else 0

    def _due(self, trainer: pl.Trainer) -> bool:
        """Whether the first rank's clock has reached another interval since the update before."""
        assert isinstance(trainer.lightning_module, LitTransformer)
        before, self._intervals = self._intervals, self._reached(trainer.lightning_module.trained_seconds)
        return trainer.is_global_zero and self._intervals > before

    def _end_of_update(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        mine = self._due(trainer)
        signal, due = self.agreement.after_update(self.signals.number, mine)
        # Where a signal ends the training, the first rank's word on this update does not travel any more; it is the
        # first rank that writes.
        due = due or (mine and signal != 0)
        on_schedule = due or step == trainer.max_steps or (self.every is not None and step % self.every == 0)
        if on_schedule or signal:
            for logger in trainer.loggers:
                logger.save()  # what a checkpoint says is past must stand on disk before it
            path = checkpoint_path(self.folder, step, stopped=not on_schedule)
            trainer.save_checkpoint(path, weights_only=False)  # with the training state
            if trainer.is_global_zero:
                prune_checkpoints(self.folder, self.every, self.keep)
        if signal:
            raise Stopped(signal, step)


class Progress(pl.Callback):
    """One line with the time left, on a terminal and in a log alike, and the same in `progress.json`."""

    def __init__(self, folder: Path, every_seconds: float = 5.0) -> None:
        self.file, self.every_seconds = folder / "progress.json", every_seconds

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start, self.first, self.shown = time.monotonic(), trainer.global_step, 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        now = time.monotonic()
        done = trainer.global_step - self.first
        if not trainer.is_global_zero or not done:
            return
        if now - self.shown >= self.every_seconds or trainer.global_step == trainer.max_steps:
            self.shown = now
            left = (now - self.start) / done * (trainer.max_steps - trainer.global_step)
            self._show(trainer, pl_module, left)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, LitTransformer)
        found = pl_module.evaluation
        assert found is not None
        scores = "".join(f", {score.name} {score.score:.2f}" for score in found.scores[:1])
        scores += f" on {len(found.decoded)} sentences" if scores else ""
        say(f"validation at update {found.step}: perplexity {found.perplexity:.2f}{scores}")
        for logger in trainer.loggers:
            logger.save()  # a sweep reads it there

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule, left: float) -> None:
        assert isinstance(pl_module, LitTransformer)
        step, total, latest = trainer.global_step, trainer.max_steps, pl_module.latest
        speed = latest.get("tgt_tokens_per_second", 0.0)
        write_json(
            self.file,
            {
                "step": step,
                "max_steps": total,
                "seconds_left": left,
                "tgt_tokens_per_second": speed,
                "train_perplexity": latest.get("train_perplexity"),
                "pid": os.getpid(),
            },
        )
        figures = ""
        if "train_perplexity" in latest:  # not yet, right after a resume
            figures = f"training perplexity {latest['train_perplexity']:.1f}, {speed:,.0f} target tokens/s, "
        say(f"update {step:,} of {total:,} ({step / total:.0%}), {figures}{clock(left)} left")
