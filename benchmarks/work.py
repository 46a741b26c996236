"""The work that all contestants get: model sizes, made-up text of WMT-like lengths, batches, weights that copy."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_transformer.data import TranslationDataModule, collate
from lit_transformer.store import SplitWriter, Store, seal
from lit_transformer.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lit_transformer.transformer import Transformer, TransformerConfig, sinusoidal_positions

SPECIAL = 4  # the lowest ids are no words
assert {PAD_ID, UNK_ID, BOS_ID, EOS_ID} == set(range(SPECIAL))
SIZES = {
    "base": {"vocab_size": 8000, "num_layers": 6, "d_model": 512, "d_ff": 2048, "num_heads": 8},
    "small": {"vocab_size": 8000, "num_layers": 3, "d_model": 256, "d_ff": 1024, "num_heads": 4},
    "mini": {"vocab_size": 2000, "num_layers": 2, "d_model": 128, "d_ff": 512, "num_heads": 4},
}


def lengths(pairs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Source and target tokens, end of sentence included: mean 27, 5 to 80, alike on both sides as in WMT."""
    src = rng.lognormal(math.log(23.4), 0.55, pairs)
    tgt = src * rng.lognormal(0, 0.15, pairs)
    return tuple(np.clip(side.round(), 5, 80).astype(np.int64) for side in (src, tgt))  # type: ignore[return-value]


def made_store(folder: Path, vocab_size: int, pairs: int) -> Store:
    """A prepared corpus of random words with those lengths."""
    rng = np.random.default_rng(1)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for split, number in (("train", pairs), ("valid", 200)):
        writer = SplitWriter(folder, split, vocab_size)
        for start in range(0, number, 50_000):
            sides = lengths(min(50_000, number - start), rng)
            writer.append(*([rng.integers(SPECIAL, vocab_size, n - 1) for n in side] for side in sides))
        writer.close()
    seal(folder, "none", {})
    return Store(folder)


class MadeData(TranslationDataModule):
    """The project's own batches, of made-up text."""

    def __init__(self, folder: Path, vocab_size: int, tokens: int, num_workers: int = 0) -> None:
        # One micro-batch an update: max_tokens counts the padding too.
        super().__init__(tokens, 3 * tokens, num_workers, vocab_size=vocab_size)
        self.folder = folder

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str | None = None) -> None:
        self.store = Store(self.folder)
        super().setup(stage)

    def state_dict(self) -> dict[str, Any]:
        return {}


def write_batches(data: MadeData, number: int, path: Path) -> dict[str, float]:
    """The first updates' sentences as JSON, for peers: a list of [sources, targets], each ending with EOS.

    Returns:
        Target tokens in the mean, and the share of padding among all positions.
    """
    data.setup("fit")
    assert data.store is not None
    batches, tokens, positions = [], 0, 0
    for n in range(number):
        ids = data.plan.update(n).sentences.tolist()
        pair = [[[*map(int, data.store.sentences("train", side)[i]), EOS_ID] for i in ids] for side in ("src", "tgt")]
        batches.append(pair)
        for side in pair:
            tokens += sum(map(len, side))
            positions += len(side) * max(map(len, side))
    path.write_text(json.dumps(batches))
    mean = sum(len(row) for _, tgt in batches for row in tgt) / number
    return {"sentences": sum(len(b[0]) for b in batches) / number, "tokens": mean, "padding": 1 - tokens / positions}


def collated(batch: list) -> Any:
    src, tgt = ([np.asarray(row[:-1]) for row in side] for side in batch)
    return collate(src, tgt, sum(map(len, batch[1])))


def copying_model(size: dict[str, int], seed: int = 1) -> Transformer:
    """A model that repeats its source, built instead of trained, for decoding of realistic length.

    Where the first decoder layer's queries and keys are the positions alone, cross-attention looks at the source
    token of the same position; its values carry that token's embedding, which the tied output matrix turns into the
    token, the end of sentence included.  Everything else is random and small: it costs what it always costs.
    """
    torch.manual_seed(seed)
    model = Transformer(TransformerConfig(**size, dropout=0.0)).eval()
    d, heads = size["d_model"], size["num_heads"]
    k = d // heads
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("w_o.weight", "feed_forward.2.weight")):
                weight.mul_(0.05)
        model.embedding.weight.mul_(0.25)  # beside them positions must be heard
        cross = model.decoder[0].cross_attention
        # The fastest-turning sinusoids tell neighbours apart; every head looks at them.
        sharp = torch.zeros(k, d)
        sharp[:, :k] = 5 * torch.eye(k)
        cross.w_q.weight.copy_(sharp.repeat(heads, 1))
        cross.w_k.weight.copy_(sharp.repeat(heads, 1))
        cross.w_v.weight.copy_(torch.eye(d))
        cross.w_o.weight.copy_(10 * torch.eye(d))
        last = model.decoder[-1].residuals[2].norm
        last.weight.fill_(12.0)  # a decided model, as a trained one is
    return model


def save_weights(model: Transformer, path: Path) -> None:
    """As arrays by name, with the table of positions."""
    arrays = {name: value.numpy() for name, value in model.state_dict().items()}
    np.savez(path, positions=sinusoidal_positions(512, model.config.d_model).numpy(), **arrays)
