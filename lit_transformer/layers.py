"""What the Transformer's two stacks are made of: attention, feed-forward, residual connections, and their caches.

Shapes: B batch, S source length, T target length, D d_model, H heads, K d_k (d_v for values), W beam.  Sections and
equations are those of arXiv 1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_transformer.config import TransformerConfig
from lit_transformer.kernels import add_dropped


class Linear(nn.Linear):
    """torch's, then max(0, .) where asked for."""

    with_relu = True

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y.relu_() if relu else y


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) of section 3.2.2; the equations give its projections no bias."""

    def __init__(self, d_model: int, num_heads: int, d_k: int, d_v: int, scale: float) -> None:
        super().__init__()
        self.num_heads, self.scale = num_heads, scale
        self.w_q = Linear(d_model, num_heads * d_k, bias=False)
        self.w_k = Linear(d_model, num_heads * d_k, bias=False)
        self.w_v = Linear(d_model, num_heads * d_v, bias=False)
        self.w_o = Linear(num_heads * d_v, d_model, bias=False)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, H*K] -> [B, H, T, K]"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> keys [B, H, S, K] and values [B, H, S, V]"""
        return self.split(self.w_k(x)), self.split(self.w_v(x))

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Queries from x [B, T, D]; mask broadcasts to [B, H, T, S], True where attention is allowed."""
        queries = self.split(self.w_q(x))
        heads = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal, scale=self.scale)
        return self.w_o(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        return self.attend(x, *self.keys_values(memory), mask, causal)


class FeedForward(nn.Sequential):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2, section 3.3."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(Linear(d_model, d_ff), nn.ReLU(), Linear(d_ff, d_model))

    def forward(self, x: Tensor) -> Tensor:
        if type(self[1]) is nn.ReLU and getattr(self[0], "with_relu", False):
            return self[2](self[0](x, relu=True))
        return super().forward(x)  # parts of somebody's own


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

    def step(self, x: Tensor, cache: LayerCache, state: DecoderState, own: Tensor) -> Tensor:
        """One position of W beams of B sentences: x [B*W, 1, D] -> the same; the beams are a sentence's W queries."""

        def attend(q: Tensor) -> Tensor:
            keys, values = cache.append(*self.self_attention.keys_values(q), state.length, own.size(2))
            return self.self_attention.attend(q.view(len(own), -1, q.size(-1)), keys, values, own).view_as(q)

        def cross(q: Tensor) -> Tensor:
            keys, values = cache.cross_keys, cache.cross_values
            return self.cross_attention.attend(
                q.view(len(own), -1, q.size(-1)), keys, values, state.memory_mask
            ).view_as(q)

        x = self.residuals[0](x, attend)
        x = self.residuals[1](x, cross)
        return self.residuals[2](x, self.feed_forward)


def _attention(config: TransformerConfig) -> MultiHeadAttention:
    assert config.d_k is not None and config.d_v is not None
    scale = 1 / math.sqrt(config.d_k) if config.scale_attention else 1.0
    return MultiHeadAttention(config.d_model, config.num_heads, config.d_k, config.d_v, scale)


class LayerCache:
    """What one decoder layer keeps between steps: keys and values of all beams of a sentence side by side.

    Beams are never moved in it: `DecoderState.own` says which earlier positions belong to which of them.

    Attributes:
        cross_keys, cross_values: [B, H, S, K], computed once a sentence.
    """

    def __init__(self, cross_keys: Tensor, cross_values: Tensor) -> None:
        self.cross_keys, self.cross_values = cross_keys, cross_values
        self._keys = self._values = cross_keys.new_empty(0)  # [B, H, room, W, K]

    def append(self, keys: Tensor, values: Tensor, position: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B*W, H, 1, K] of one more position -> of all positions and beams, [B, H, t*W, K]."""
        self._keys = _written(self._keys, keys, position, width)
        self._values = _written(self._values, values, position, width)
        return self._keys[:, :, : position + 1].flatten(2, 3), self._values[:, :, : position + 1].flatten(2, 3)

    def select(self, sentences: Tensor) -> None:
        """Sentence i becomes what number sentences[i] was; only those that are not in their place are copied."""
        moved = (sentences != torch.arange(len(sentences), device=sentences.device)).nonzero()[:, 0]
        for name in ("_keys", "_values", "cross_keys", "cross_values"):
            room = getattr(self, name)
            room[moved] = room[sentences[moved]]
            setattr(self, name, room[: len(sentences)])


def _written(room: Tensor, new: Tensor, position: int, width: int) -> Tensor:
    new = new.view(-1, width, *new.shape[1:]).transpose(1, 2).squeeze(3)  # [B, H, W, K]
    if not position:
        room = new.new_empty((*new.shape[:2], 32, *new.shape[2:]))
    elif position == room.size(2):
        room = torch.cat((room, torch.empty_like(room)), 2)
    room[:, :, position] = new
    return room


@dataclass
class DecoderState:
    """Everything between two cached decoding steps of B sentences with W beams each."""

    memory_mask: Tensor  # [B, 1, 1, S]
    layers: list[LayerCache]
    length: int = 0  # target positions decoded so far
    own: Tensor | None = None  # [B, 1, W, t*W], True where a beam's own earlier position stands in the caches

    def grow(self, width: int) -> Tensor:
        """One more position, at which each beam's own is its own; returns `own`."""
        here = torch.eye(width, dtype=torch.bool, device=self.memory_mask.device)
        here = here.expand(len(self.memory_mask), 1, width, width)
        self.own = here if self.own is None else torch.cat((self.own, here), 3)
        return self.own

    def select(self, beams: Tensor, sentences: Tensor | None = None) -> None:
        """Keep and reorder: beams are flat indices into B*W, each from its own sentence.

        Args:
            sentences: when some are dropped, the kept ones' indices into B.
        """
        assert self.own is not None
        width = self.own.size(2)
        self.own = self.own.flatten(0, 2)[beams].view(-1, 1, width, self.own.size(3))
        if sentences is not None:
            self.memory_mask = self.memory_mask[sentences]
            for layer in self.layers:
                layer.select(sentences)
