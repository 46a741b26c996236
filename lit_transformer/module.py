"""LitTransformer: loss, optimiser, schedule and validation of the paper's model, under Lightning."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lit_transformer.data import Batch, TranslationDataModule
from lit_transformer.decode import BEAM_SIZE, LENGTH_PENALTY
from lit_transformer.evaluation import Evaluation, evaluate
from lit_transformer.kernels import keep_memory
from lit_transformer.metrics import TokenNLL, perplexity
from lit_transformer.strategy import ShardedStrategy, shard
from lit_transformer.tokenizer import PAD_ID
from lit_transformer.transformer import Transformer, TransformerConfig

MAX_LEFT_OUT = 5


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why in words for a user."""


def learning_rate(step: int, d_model: int, warmup: int, factor: float = 1.0, start: str = "zero") -> float:
    """Equation 3 times a factor; `step` counts optimiser updates from 1.

    Args:
        start: "zero", the paper's linear rise over `warmup` updates; "peak", the rate that it rises to from the
            first update on: the same schedule without warmup.
    """
    rise = step / warmup if start == "zero" else 1.0
    return factor * d_model**-0.5 * min(step**-0.5, rise * warmup**-0.5)


def sentence_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Unsmoothed NLL of each sentence in nats: logits [B, T, V], targets [B, T] -> [B]."""
    log_probs = F.log_softmax(logits.float(), dim=-1)
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return nll.masked_fill(targets == PAD_ID, 0.0).sum(-1)


class _LeftAlone(pl.Callback):
    """What was imported and built before training: Python's collector would walk over half a million objects of it
    again and again, for a twentieth of an update's time."""

    frozen = False  # by this class: what a user has frozen stays so

    def on_train_start(self, *_: Any) -> None:
        if _LeftAlone.frozen or not gc.get_freeze_count():
            gc.freeze()
            _LeftAlone.frozen = True

    def on_train_end(self, *_: Any) -> None:
        if _LeftAlone.frozen:
            gc.unfreeze()
            _LeftAlone.frozen = False

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()


class LitTransformer(pl.LightningModule):
    """The paper's training recipe; every number of steps counts optimiser updates.

    Args:
        label_smoothing: eps_ls; touches the training loss alone.
        warmup: updates of rising learning rate (section 5.3: 4,000); 1 is no warmup.
        warmup_start: "zero" rises to the peak as in the paper, "peak" begins there: no warmup, all else alike.
        lr_factor: multiplies the paper's learning rate.
        validate_every: updates between validations (perplexity over all of the validation split).
        bleu_every: every how many of these validations sentences are decoded for BLEU; 0 is never.
        bleu_sentences: how many, spread evenly over the validation split.
        compile: torch.compile for the training and validation passes.
        seed: of dropout, folded with update and micro-batch.
        transformer: the fields of `TransformerConfig`.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        warmup: int = 4000,
        warmup_start: Literal["zero", "peak"] = "zero",
        lr_factor: float = 1.0,
        validate_every: int = 1000,
        bleu_every: int = 5,
        bleu_sentences: int = 500,
        compile: bool = False,
        seed: int = 1,
        **transformer: Any,
    ) -> None:
        super().__init__()
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing = {label_smoothing}: must be at least 0 and less than 1")
        if warmup_start not in ("zero", "peak"):
            raise ValueError(f"warmup_start = {warmup_start!r}: must be 'zero' or 'peak'")
        if not 0 < lr_factor < math.inf:
            raise ValueError(f"lr_factor = {lr_factor}: must be a number above 0")
        for name, value, least in (
            ("warmup", warmup, 1),
            ("validate_every", validate_every, 1),
            ("bleu_every", bleu_every, 0),
            ("bleu_sentences", bleu_sentences, 1),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        self.config = TransformerConfig(**transformer)
        # Plain values, and only what a loaded model needs: a checkpoint must not override how it is evaluated.
        self.save_hyperparameters(
            {
                "label_smoothing": label_smoothing,
                "warmup": warmup,
                "warmup_start": warmup_start,
                "lr_factor": lr_factor,
                "seed": seed,
            }
            | asdict(self.config)
        )
        self.label_smoothing, self.seed = label_smoothing, seed
        self.warmup, self.warmup_start, self.lr_factor = warmup, warmup_start, lr_factor
        self.validate_every, self.bleu_every, self.bleu_sentences = validate_every, bleu_every, bleu_sentences
        self.compile_model = compile
        self.beam_size, self.length_penalty = BEAM_SIZE, LENGTH_PENALTY
        self.model = Transformer(self.config)
        self.loss_mean, self.nll_mean = TokenNLL(), TokenNLL()
        self.evaluation: Evaluation | None = None  # the latest one
        self._sentence_nll: list[Tensor] = []  # of the evaluation under way, this rank's batches
        self.latest: dict[str, float] = {}  # the latest value of everything logged
        # Updates left out because their gradient was not finite: all of them, and the latest in a row.
        # No buffer: those are sent to all ranks before each forward pass.
        self.left_out = torch.zeros(2, dtype=torch.int64)
        self.training_seconds = 0.0  # over all finished sessions of this run, validations included
        self._window_tokens, self._window_start = 0, time.monotonic()

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """[B, S], [B, T] -> logits [B, T, V]"""
        return self.model(src, tgt_in)

    def setup(self, stage: str) -> None:
        """Refuse text beyond learned positions; turn validate_every into micro-batches, which Lightning counts."""
        splits = {"fit": ("train", "valid"), "validate": ("valid",), "test": ("test",)}.get(stage, ())
        for split in splits:
            longest = max(int(self._data.sentences(split, side).lengths.max()) + 1 for side in ("src", "tgt"))
            if longest > (self.model.max_length or math.inf):
                raise ValueError(
                    f"max_positions = {self.config.max_positions}: the longest {split} sentence has {longest} tokens; "
                    "raise model.max_positions, or use sinusoidal positions"
                )
        if stage == "fit":
            self.trainer.check_val_every_n_epoch = None
            self.trainer.val_check_interval = self.validate_every * self.trainer.accumulate_grad_batches
            if self.compile_model:
                if isinstance(self.trainer.strategy, ShardedStrategy):
                    raise ValueError("model.compile = true: trainer.strategy = fsdp trains uncompiled; leave it out")
                self.model.compile(dynamic=True)  # in place: the names in the state dict stay

    def configure_model(self) -> None:
        """Before each fit or evaluation: under `fsdp`, divide the weights among the ranks, once."""
        if self._trainer is not None:  # `load_from_checkpoint` calls this too
            shard(self.model, self.trainer.strategy)

    @property
    def _data(self) -> TranslationDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, TranslationDataModule):
            raise ValueError("LitTransformer needs a TranslationDataModule: trainer.fit(model, datamodule=...)")
        return data

    # Training

    def configure_callbacks(self) -> list[pl.Callback]:
        given: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [] if any(isinstance(callback, _LeftAlone) for callback in given) else [_LeftAlone()]  # a second `fit`

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam as in section 5.3; its rate is set before each update."""
        # Lightning's float16 scaler unscales gradients itself, which the fused kernel would do a second time.
        fused = self.trainer.precision != "16-mixed"
        return torch.optim.Adam(self.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=fused)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch: its share of the sum over the update, divided by the update's tokens."""
        accumulation, world = self.trainer.accumulate_grad_batches, self.trainer.world_size
        slot = batch_idx % accumulation
        # Dropout follows from (seed, update, micro-batch within the update) alone: no generator state to save, the
        # same masks when the same micro-batches are spread over more ranks.
        place = (self.seed, self.trainer.global_step, slot * world + self.global_rank)
        torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]))
        loss, nll = self.model(batch.src, batch.tgt_in, batch.tgt_out, self.label_smoothing)
        if slot == 0:
            self.loss_mean.reset()
            self.nll_mean.reset()
        tokens = (batch.tgt_out != PAD_ID).sum()
        self.loss_mean.update(loss.detach(), tokens)
        self.nll_mean.update(nll.detach(), tokens)
        # Lightning divides by the accumulation, DDP by the number of ranks.
        return loss / batch.update_tokens * (accumulation * world)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate, leave out an update that is not finite, and log.

        Gradients are those of the whole update, summed over all ranks, so all ranks leave it out together; that it
        is left out is decided where the gradients are, and nobody waits for the answer.

        Raises:
            TrainingError: the latest updates were not finite, MAX_LEFT_OUT of them or more in a row.
        """
        step = self.trainer.global_step + 1
        rate = learning_rate(step, self.config.d_model, self.warmup, self.lr_factor, self.warmup_start)
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.trainer.precision != "16-mixed":  # its scaler does the same, and takes overflows for granted
            bad = ~torch.isfinite(norm)
            self.left_out += bad
            self.left_out[1] *= bad
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]  # fused Adam then changes nothing
        self._window_tokens += self._data.plan.update(step - 1).tgt_tokens
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step % every == 0 or step in (1, self.trainer.max_steps):
            nll = self.nll_mean.compute().item()
            now = time.monotonic()
            values = {
                "train_loss": self.loss_mean.compute().item(),
                "train_nll": nll,
                "train_perplexity": perplexity(nll),
                "learning_rate": rate,
                "grad_norm": norm.item(),
                "updates_left_out": float(self.left_out[0]),
                "tgt_tokens_per_second": self._window_tokens / max(1e-9, now - self._window_start),
            }
            self._window_tokens, self._window_start = 0, now
            self._log(values, step)
            if self.left_out[1] >= MAX_LEFT_OUT:
                raise TrainingError(
                    f"update {step}: the loss or its gradient is no longer finite (loss {values['train_loss']:.4g}, "
                    f"gradient norm {norm.item():.4g}), as in the {int(self.left_out[1])} latest updates, which were "
                    "left out; no weights hold it. Lower model.lr_factor, raise model.warmup, or train in float32"
                )

    def on_fit_start(self) -> None:
        if self.device.type == "cpu":
            keep_memory()

    def on_train_start(self) -> None:
        self._start = time.monotonic()
        self.left_out = self.left_out.to(self.device)
        self._restart_window()

    def on_train_end(self) -> None:
        self.training_seconds = self.trained_seconds

    @property
    def trained_seconds(self) -> float:
        """Over all sessions of this run with the one under way."""
        return self.training_seconds + time.monotonic() - self._start

    def on_validation_end(self) -> None:
        self._restart_window()

    def _restart_window(self) -> None:
        """Validation is no part of the training speed."""
        self._window_tokens, self._window_start = 0, time.monotonic()

    def _log(self, values: dict[str, float], step: int) -> None:
        # Each value is of one update alone, so a curve is the same after a resume; loggers write on rank 0.
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=step)
        self.latest.update(values)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["training_seconds"] = self.trained_seconds
        checkpoint["updates_left_out"] = self.left_out.tolist()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Bring Lightning's count of micro-batches to this run's accumulation, which may be another one."""
        self.training_seconds = checkpoint.get("training_seconds", 0.0)
        self.left_out = torch.tensor(checkpoint.get("updates_left_out", [0, 0]))
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops and self._trainer is not None and self.trainer.state.fn == "fit":
            done = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
            for count in ("total", "current"):
                progress = loops["epoch_loop.batch_progress"][count]
                lag = progress["ready"] - progress["completed"]  # saved before or after the batch was counted
                progress.update(ready=done, started=done, processed=done, completed=done - lag)

    # Evaluation

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._sentence_nll.append(sentence_nll(self.model(batch.src, batch.tgt_in), batch.tgt_out))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Perplexity always; BLEU when its turn has come, on all sentences outside of training."""
        if self.trainer.sanity_checking:
            self._sentence_nll = []
            return
        if self.trainer.state.fn != "fit":
            self._evaluate("valid", self.bleu_sentences)
            return
        turn = self.trainer.global_step // self.validate_every
        self._evaluate("valid", self.bleu_sentences if self.bleu_every and turn % self.bleu_every == 0 else 0)
        assert self.evaluation is not None
        values = {"val_nll": self.evaluation.nll, "val_perplexity": self.evaluation.perplexity}
        if self.evaluation.scores:
            values |= {"val_bleu": self.evaluation.scores[0].score, "val_bleu_sentences": len(self.evaluation.decoded)}
        self._log(values, self.trainer.global_step)

    def on_test_epoch_end(self) -> None:
        self._evaluate("test", self.bleu_sentences)

    def _evaluate(self, split: str, sentences: int) -> None:
        found, self._sentence_nll = self._sentence_nll, []
        self.evaluation = evaluate(
            self.model,
            self._data,
            split,
            self.trainer.global_step,
            found,
            sentences,
            self.beam_size,
            self.length_penalty,
        )
