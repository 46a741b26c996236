"""What the Transformer's two stacks are made of: attention, feed-forward, residual connections, and their caches.

Shapes: B batch, S source length, T target length, D d_model, H heads, K d_k (d_v for values), W beam.  Sections and
equations are those of arXiv 1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_transformer.config import TransformerConfig
from lit_transformer.kernels import add_dropped, linear


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) of section 3.2.2; the equations give its projections no bias."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.w_q = nn.Linear(d_model, num_heads * d_k, bias=False)
        self.w_k = nn.Linear(d_model, num_heads * d_k, bias=False)
        self.w_v = nn.Linear(d_model, num_heads * d_v, bias=False)
        self.w_o = nn.Linear(num_heads * d_v, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H*K] -> [B, H, T, K]"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> keys [B, H, S, K] and values [B, H, S, V]"""
        return self.split(linear(x, self.w_k.weight)), self.split(linear(x, self.w_v.weight))

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Queries from x [B, T, D]; mask broadcasts to [B, H, T, S], True where attention is allowed."""
        queries = self.split(linear(x, self.w_q.weight))
        heads = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal, scale=self.scale)
        return linear(heads.transpose(1, 2).flatten(2), self.w_o.weight)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        return self.attend(x, *self.keys_values(memory), mask, causal)


class FeedForward(nn.Sequential):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, section 3.3."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x: Tensor) -> Tensor:
        w_1, _, w_2 = cast(tuple[nn.Linear, nn.ReLU, nn.Linear], tuple(self))
        return linear(linear(x, w_1.weight, w_1.bias, relu=True), w_2.weight, w_2.bias)


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), sections 3.1 and 5.4; pre-norm x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout, self.pre = config.dropout, config.norm == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return add_dropped(x, sublayer(self.norm(x)), self.dropout, self.training)
        return self.norm(add_dropped(x, sublayer(x), self.dropout, self.training))


class EncoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attention = _attention(config)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.residuals[0](x, lambda q: self.self_attention(q, q, mask))
        return self.residuals[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.self_attention = _attention(config)
        self.cross_attention = _attention(config)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        # Padding stands on the right, so the causal mask alone keeps it out of every real position.
        x = self.residuals[0](x, lambda q: self.self_attention(q, q, None, causal=True))
        x = self.residuals[1](x, lambda q: self.cross_attention(q, memory, memory_mask))
        return self.residuals[2](x, self.feed_forward)

    def step(self, x: Tensor, cache: LayerCache, memory_mask: Tensor) -> Tensor:
        """One position of W beams of B sentences: x [B*W, 1, D] -> the same."""

        def attend(q: Tensor) -> Tensor:
            keys, values = cache.append(*self.self_attention.keys_values(q))
            return self.self_attention.attend(q, keys, values, None)

        def cross(q: Tensor) -> Tensor:
            # All beams of a sentence share its memory, so they are its W queries: no copy of keys for each beam.
            queries = q.view(len(cache.cross_keys), -1, q.size(-1))
            return self.cross_attention.attend(queries, cache.cross_keys, cache.cross_values, memory_mask).view_as(q)

        x = self.residuals[0](x, attend)
        x = self.residuals[1](x, cross)
        return self.residuals[2](x, self.feed_forward)


def _attention(config: TransformerConfig) -> MultiHeadAttention:
    assert config.d_k is not None and config.d_v is not None
    scale = 1 / math.sqrt(config.d_k) if config.scale_attention else 1.0
    return MultiHeadAttention(config.d_model, config.num_heads, config.d_k, config.d_v, scale)


@dataclass
class LayerCache:
    """What one decoder layer keeps between steps."""

    cross_keys: Tensor  # [B, H, S, K], computed once a sentence
    cross_values: Tensor  # [B, H, S, V]
    self_keys: Tensor | None = None  # [B*W, H, t, K]
    self_values: Tensor | None = None  # [B*W, H, t, V]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.self_keys is not None and self.self_values is not None:
            keys = torch.cat((self.self_keys, keys), dim=2)
            values = torch.cat((self.self_values, values), dim=2)
        self.self_keys, self.self_values = keys, values
        return keys, values

    def select(self, beams: Tensor, sentences: Tensor | None) -> None:
        assert self.self_keys is not None and self.self_values is not None
        self.self_keys, self.self_values = self.self_keys[beams], self.self_values[beams]
        if sentences is not None:
            self.cross_keys, self.cross_values = self.cross_keys[sentences], self.cross_values[sentences]


@dataclass
class DecoderState:
    """Everything between two cached decoding steps of B sentences with W beams each."""

    memory_mask: Tensor  # [B, 1, 1, S]
    layers: list[LayerCache]
    length: int = 0  # target positions decoded so far

    def select(self, beams: Tensor, sentences: Tensor | None = None) -> None:
        """Keep and reorder: beams are flat indices into B*W; sentences, when some are dropped, indices into B."""
        for layer in self.layers:
            layer.select(beams, sentences)
        if sentences is not None:
            self.memory_mask = self.memory_mask[sentences]
