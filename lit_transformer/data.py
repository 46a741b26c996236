"""TranslationDataModule: a prepared corpus as the batches that each rank takes, update by update.

Shapes: B sentences of a micro-batch, S source and T target tokens; ids only, masks are the model's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_transformer.batching import UpdatePlan, evaluation_batches
from lit_transformer.corpus import prepare, store_folder
from lit_transformer.signals import ignore_signals
from lit_transformer.sources import CorpusConfig
from lit_transformer.store import Sentences, Store
from lit_transformer.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer

EVALUATION_TOKENS = 2048  # sentences times longest side, padding included


class Batch(NamedTuple):
    """Ids of one micro-batch.

    An empty micro-batch is one sentence of padding alone: it adds nothing to loss or gradients, and keeps every
    rank in step.
    """

    src: Tensor  # [B, S], each row ends with EOS
    tgt_in: Tensor  # [B, T], each row starts with BOS
    tgt_out: Tensor  # [B, T], each row ends with EOS
    update_tokens: Tensor  # [], target tokens of the whole update, over all its micro-batches and ranks


def collate(src: list[np.ndarray], tgt: list[np.ndarray], update_tokens: int) -> Batch:
    """Pad to the longest on each side; both lists as long, may be empty."""
    rows = max(1, len(src))
    width = [max((len(s) for s in side), default=0) + 1 for side in (src, tgt)]
    src_ids, tgt_in, tgt_out = (np.full((rows, w), PAD_ID, np.int64) for w in (width[0], width[1], width[1]))
    for row, (s, t) in enumerate(zip(src, tgt, strict=True)):
        src_ids[row, : len(s)], src_ids[row, len(s)] = s, EOS_ID
        tgt_in[row, 0], tgt_in[row, 1 : len(t) + 1] = BOS_ID, t
        tgt_out[row, : len(t)], tgt_out[row, len(t)] = t, EOS_ID
    src_tensor, in_tensor, out_tensor = (torch.from_numpy(ids) for ids in (src_ids, tgt_in, tgt_out))
    return Batch(src_tensor, in_tensor, out_tensor, torch.tensor(update_tokens))


class _Split(Dataset[Batch]):
    """Batches of one split by number, made by the loader's workers."""

    def __init__(self, store: Store, split: str) -> None:
        self.src, self.tgt = store.sentences(split, "src"), store.sentences(split, "tgt")

    def batch(self, ids: np.ndarray, update_tokens: int) -> Batch:
        rows = ids.tolist()
        return collate([self.src[i] for i in rows], [self.tgt[i] for i in rows], update_tokens)


class TrainingBatches(_Split):
    """Micro-batch k of a rank: slot k % accumulation of update k // accumulation."""

    def __init__(self, store: Store, plan: UpdatePlan, max_tokens: int, accumulation: int, rank: int, world: int):
        super().__init__(store, "train")
        self.plan, self.max_tokens, self.accumulation = plan, max_tokens, accumulation
        self.rank, self.world = rank, world
        self._latest: tuple[int, int, list[np.ndarray]] = (-1, 0, [])

    def __getitem__(self, k: int) -> Batch:
        n, slot = divmod(k, self.accumulation)
        if self._latest[0] != n:
            update = self.plan.update(n)
            parts = self.plan.split(update, self.world * self.accumulation, self.max_tokens)
            self._latest = (n, update.tgt_tokens, parts)
        _, update_tokens, parts = self._latest
        return self.batch(parts[slot * self.world + self.rank], update_tokens)


class EvaluationBatches(_Split):
    """Every sentence of a split once over all ranks, as many batches on each.

    Their size is no option: what shares a batch with a sentence touches the last bits of its score.
    """

    def __init__(self, store: Store, split: str, rank: int, world: int) -> None:
        super().__init__(store, split)
        sizes = np.maximum(self.src.lengths, self.tgt.lengths) + 1
        self.batches = evaluation_batches(sizes, EVALUATION_TOKENS, world)[rank]

    def __getitem__(self, k: int) -> Batch:
        ids = self.batches[k]
        return self.batch(ids, int(self.tgt.lengths[ids].sum()) + len(ids))

    def __len__(self) -> int:
        return len(self.batches)


class Loader:
    """Batches from number `start()` to `length`.

    Not a DataLoader itself, so that Lightning leaves it as it is: it would put a sampler of its own into one
    under several processes, and resume it at the beginning.
    """

    def __init__(self, batches: Dataset[Batch], length: int, start: Callable[[], int], num_workers: int) -> None:
        self.batches, self.length, self.start, self.num_workers = batches, length, start, num_workers

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        return iter(
            DataLoader(
                self.batches,
                batch_size=None,
                sampler=range(self.start(), self.length),
                num_workers=self.num_workers,
                worker_init_fn=ignore_signals,
                pin_memory=torch.cuda.is_available(),
            )
        )


class TranslationDataModule(pl.LightningDataModule):
    """Parallel text for training, validation and test.

    With it, the number of micro-batches that Lightning accumulates follows from the two token budgets and the
    number of processes, and training starts at the update that the trainer has reached.

    Args:
        tokens_per_update: source and target tokens of one optimiser update, over all processes, about that many
            of each (section 5.1: 25,000).
        max_tokens: sentences times longest side of a micro-batch, padding included: what fits into memory.
        num_workers: processes that make batches; 0 makes them in the training process.
        root: folder of the prepared corpora.
        seed: of the order of sentences.
        corpus: the fields of `CorpusConfig`.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    def __init__(
        self,
        tokens_per_update: int = 25000,
        max_tokens: int = 4096,
        num_workers: int = 2,
        root: str = "data",
        seed: int = 1,
        **corpus: Any,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("tokens_per_update", tokens_per_update, 1),
            ("max_tokens", max_tokens, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        self.corpus = CorpusConfig(**corpus)
        self.tokens_per_update, self.max_tokens, self.num_workers = tokens_per_update, max_tokens, num_workers
        self.root, self.seed = Path(root), seed
        self.store: Store | None = None
        self._given: Tokenizer | None = None
        self._prepared: Tokenizer | bool | None = False  # with which tokeniser

    def use_tokenizer(self, model: bytes) -> None:
        """Read the text with the tokeniser of a trained model instead of one learned from this training text."""
        self._given = Tokenizer(model)
        learned = store_folder(self.corpus, self.root)
        if (learned / "meta.json").is_file() and Store(learned).tokenizer_fingerprint == self._given.fingerprint:
            self._given = None  # it is that one

    def prepare_data(self) -> None:
        """Text to store, unless it stands there already; one process does it, others wait, the first speaks."""
        if self._prepared != self._given:
            prepare(self.corpus, self.root, (lambda line: None) if _get_rank() else None, self._given)
            self._prepared = self._given

    def setup(self, stage: str | None = None) -> None:
        """Open the store; for training, plan the updates and tell the trainer how many micro-batches make one."""
        if self.store is None:
            self.store = Store(store_folder(self.corpus, self.root, self._given))
            self.tokenizer = Tokenizer.load(self.store.folder / "tokenizer.model")
            if self.tokenizer.fingerprint != self.store.tokenizer_fingerprint:
                raise ValueError(f"{self.store.folder}: the tokeniser is not the one that the text was encoded with")
        if stage in (None, "fit"):
            train = [self.store.sentences("train", side).lengths + 1 for side in ("src", "tgt")]
            self.plan = UpdatePlan(train[0], train[1], self.tokens_per_update, self.seed)
            if self.trainer is not None:
                self.trainer.accumulate_grad_batches = self.plan.accumulation(self.trainer.world_size, self.max_tokens)

    def sentences(self, split: str, side: str) -> Sentences:
        assert self.store is not None, "setup comes first"
        return self.store.sentences(split, side)

    def sources(self, split: str) -> list[list[int]]:
        """Source ids of "valid" or "test", EOS included, in the order of the text."""
        return [[*ids.tolist(), EOS_ID] for ids in self.sentences(split, "src")]

    def references(self, split: str) -> list[str]:
        """Target text of "valid" or "test" as it was given."""
        assert self.store is not None, "setup comes first"
        return self.store.text(split, "tgt")

    def train_dataloader(self) -> Loader:
        trainer = self.trainer
        assert trainer is not None
        assert self.store is not None
        if trainer.max_steps < 1:
            raise ValueError(f"trainer.max_steps = {trainer.max_steps}: say how many updates to train")
        accumulation = trainer.accumulate_grad_batches
        batches = TrainingBatches(
            self.store, self.plan, self.max_tokens, accumulation, trainer.global_rank, trainer.world_size
        )
        return Loader(
            batches, trainer.max_steps * accumulation, lambda: trainer.global_step * accumulation, self.num_workers
        )

    def _evaluation(self, split: str) -> Loader:
        trainer = self.trainer
        assert trainer is not None
        assert self.store is not None
        self.evaluated = EvaluationBatches(self.store, split, trainer.global_rank, trainer.world_size)
        return Loader(self.evaluated, len(self.evaluated), lambda: 0, 0)

    def val_dataloader(self) -> Loader:
        return self._evaluation("valid")

    def test_dataloader(self) -> Loader:
        return self._evaluation("test")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint says of its data: enough to refuse other data, and to translate without any."""
        assert self.store is not None
        return {
            "data": self.store.fingerprint,
            "tokenizer": self.store.tokenizer_fingerprint,
            "tokens_per_update": self.tokens_per_update,
            "seed": self.seed,
            "tokenizer_model": self.tokenizer.model,
            "max_length": self.corpus.max_length,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError where a checkpoint comes from other data or another token budget."""
        mine = self.state_dict()
        for name in ("data", "tokenizer", "tokens_per_update", "seed"):
            if state_dict[name] != mine[name]:
                raise ValueError(
                    f"the checkpoint was trained with {name} = {state_dict[name]}, this run has {mine[name]}: use the "
                    "same text and options, or another run folder"
                )
