"""torch.nn.Transformer in a plain loop: the same model, tied embeddings, Adam, label smoothing, no logging."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from contest import padded, serve
from torch import Tensor, nn
from torch.nn import functional as F

PAD, BOS = 0, 2


class Model(nn.Module):
    def __init__(self, size: dict[str, int], dropout: float = 0.1) -> None:
        super().__init__()
        d = size["d_model"]
        self.embedding = nn.Embedding(size["vocab_size"], d)
        nn.init.normal_(self.embedding.weight, std=d**-0.5)
        n = size["num_layers"]
        self.transformer = nn.Transformer(d, size["num_heads"], n, n, size["d_ff"], dropout, batch_first=True)
        # The paper's post-norm stack ends in its last layer's norm, and its dropout is on sub-layers' outputs alone.
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = 0.0
        self.dropout = nn.Dropout(dropout)
        angle = torch.arange(512).unsqueeze(1) / 10000 ** (torch.arange(0, d, 2) / d)
        self.register_buffer("positions", torch.stack((angle.sin(), angle.cos()), -1).flatten(1))

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[: ids.size(1)])

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt_in.size(1), dtype=torch.bool)
        hidden = src == PAD
        x = self.transformer(
            self.embed(src),
            self.embed(tgt_in),
            tgt_mask=causal,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_is_causal=True,
        )
        return F.linear(x, self.embedding.weight)


def tensors(path: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """[B, S], [B, T], [B, T] of each batch"""
    found = []
    for src, tgt in json.loads(Path(path).read_text()):
        inputs = [[BOS, *row[:-1]] for row in tgt]
        found.append(tuple(torch.tensor(padded(side, PAD)) for side in (src, inputs, tgt)))
    return found


def train(given: dict[str, Any]) -> None:
    model = Model(given["size"]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    batches = itertools.cycle(tensors(given["batches"]))

    def work() -> dict[str, Any]:
        tokens = 0
        for _ in range(given["updates"]):
            src, tgt_in, tgt_out = next(batches)
            logits = model(src, tgt_in).flatten(0, 1)
            loss = F.cross_entropy(logits, tgt_out.flatten(), ignore_index=PAD, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens += int((tgt_out != PAD).sum())
        return {"tokens": tokens}

    serve(work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    train(json.loads(sys.argv[2]))
