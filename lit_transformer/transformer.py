"""The encoder-decoder Transformer of "Attention Is All You Need", in plain torch.

Shapes: B batch, S source length, T target length, D d_model, H heads, K d_k (d_v for values),
V vocabulary, W beam.  Sections and equations are those of arXiv 1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_transformer.tokenizer import PAD_ID


@dataclass(frozen=True)
class TransformerConfig:
    """The columns of Table 3 that shape the model; the defaults are the paper's base row.

    Args:
        vocab_size: entries of the one vocabulary shared by source, target and output.
        num_layers: N, encoder layers and decoder layers each.
        d_model: width of embeddings and of every sub-layer's output.
        d_ff: inner width of the feed-forward sub-layers.
        num_heads: h, parallel attention heads.
        d_k: width of one head's queries and keys; d_model / num_heads when not given.
        d_v: width of one head's values, independent of d_k; d_model / num_heads when not given.
        dropout: P_drop, on every sub-layer's output and on the sums of embeddings and positions.
        position: "sinusoidal" (section 3.5), "learned" (row E), one table for each stack, or "none".
        max_positions: rows of each learned table, 1,024 when not given; only with "learned".
        norm: "post", the paper's LayerNorm after each addition, or "pre", before each sub-layer and once more
            behind each stack.
        scale_attention: divide dot products by sqrt(d_k), as section 3.2.1 argues for.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    vocab_size: int = 37000
    num_layers: int = 6
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    dropout: float = 0.1
    position: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    max_positions: int | None = None
    norm: Literal["post", "pre"] = "post"
    scale_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "d_model", "d_ff", "num_heads"):
            self._require_positive(name)
        for name in ("d_k", "d_v"):
            if getattr(self, name) is None:
                if self.d_model % self.num_heads:
                    raise ValueError(
                        f"num_heads = {self.num_heads} does not divide d_model = {self.d_model}: choose a "
                        f"num_heads that divides it, or give {name} yourself (the paper keeps "
                        f"num_heads x {name} = d_model)"
                    )
                object.__setattr__(self, name, self.d_model // self.num_heads)
            self._require_positive(name)
        if isinstance(self.dropout, (bool, str)) or not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout!r}: must be a number of at least 0 and less than 1")
        if self.position not in ("sinusoidal", "learned", "none"):
            raise ValueError(f"position = {self.position!r}: must be 'sinusoidal', 'learned' or 'none'")
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm = {self.norm!r}: must be 'post' or 'pre'")
        if not isinstance(self.scale_attention, bool):
            raise ValueError(f"scale_attention = {self.scale_attention!r}: must be true or false")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"d_model = {self.d_model}: sinusoidal positions pair a sine with a cosine, so even")
        if self.position != "learned":
            if self.max_positions is not None:
                raise ValueError(
                    f"max_positions = {self.max_positions}: only position = 'learned' has a table; "
                    f"{self.position} positions have no limit, leave it out"
                )
        elif self.max_positions is None:
            object.__setattr__(self, "max_positions", 1024)
        else:
            self._require_positive("max_positions")

    def _require_positive(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1")

    def forward_flops(self, src_lengths: Any, tgt_lengths: Any) -> Any:
        """Multiply-adds times two of all matrix products in one forward pass, without padding.

        Args:
            src_lengths, tgt_lengths: tokens of each side, numbers or arrays of one shape.

        Returns:
            FLOPs of that shape.  A training step costs three times as much (backward is twice forward).
        """
        s, t = src_lengths * 1.0, tgt_lengths * 1.0  # floats: WMT-sized sums overflow 32-bit integers
        heads, d = self.num_heads, self.d_model
        assert self.d_k is not None and self.d_v is not None
        widths = self.d_k + self.d_v

        def attention(queries: Any, keys: Any) -> Any:
            # projections of queries and output on one side, of keys and values on the other, then the two products
            return 2 * heads * (d * widths * queries + d * widths * keys + widths * queries * keys)

        feed_forward = 4 * d * self.d_ff
        encoder = attention(s, s) + feed_forward * s
        decoder = attention(t, t) + attention(t, s) + feed_forward * t
        return self.num_layers * (encoder + decoder) + 2 * d * self.vocab_size * t


def sinusoidal_positions(length: int, d_model: int) -> Tensor:
    """PE of section 3.5, [length, D]: sines in even columns, cosines in odd ones, positions from 0."""
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    angle = position / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


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
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class Residual(nn.Module):
    """LayerNorm(x + Dropout(Sublayer(x))), sections 3.1 and 5.4; pre-norm x + Dropout(Sublayer(LayerNorm(x)))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


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


class Transformer(nn.Module):
    """The paper's model (Figure 1), one matrix for both embeddings and the output.

    Masks follow from the token ids: padding stands on the right and is never attended to.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, padding_idx=None)
        if config.position == "learned":
            assert config.max_positions is not None
            self.src_positions = nn.Parameter(torch.empty(config.max_positions, config.d_model))
            self.tgt_positions = nn.Parameter(torch.empty(config.max_positions, config.d_model))
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        # Pre-norm leaves a stack's sum unnormalised; the paper's post-norm does not.
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity() for _ in range(2)
        )
        # Not a buffer: it follows from the configuration, so neither checkpoints nor ranks exchange it.
        self._sinusoids = torch.empty(0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for matrices, zero for biases; embeddings such that times sqrt(D) they have unit variance."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for tables in [self.embedding.weight, *self._learned_tables()]:
            nn.init.normal_(tables, std=self.config.d_model**-0.5)

    def _learned_tables(self) -> Sequence[Tensor]:
        return (self.src_positions, self.tgt_positions) if self.config.position == "learned" else ()

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, the tied matrix counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def max_length(self) -> int | None:
        """Longest source or target in tokens, special ones included; None where there is no limit."""
        return self.config.max_positions

    def _embed(self, tokens: Tensor, learned: str, start: int = 0) -> Tensor:
        """[B, T] -> [B, T, D]: section 3.4's scaled embeddings plus positions from `start`."""
        end = start + tokens.size(1)
        if self.config.position == "learned":
            assert self.config.max_positions is not None
            if end > self.config.max_positions:
                raise ValueError(
                    f"a sentence of {end} tokens is longer than the learned table of max_positions = "
                    f"{self.config.max_positions}: raise max_positions, drop such sentences or use sinusoidal positions"
                )
        scaled = self.embedding(tokens) * math.sqrt(self.config.d_model)
        if self.config.position == "none":
            return self.dropout(scaled)
        table = self._sinusoid_table(end, tokens.device) if self.config.position == "sinusoidal" else None
        positions = (getattr(self, learned) if table is None else table)[start:end]
        return self.dropout(scaled + positions.to(scaled.dtype))

    def _sinusoid_table(self, length: int, device: torch.device) -> Tensor:
        if len(self._sinusoids) < length or self._sinusoids.device != device:
            rows = max(512, 2 ** math.ceil(math.log2(length)))  # doubling: few rebuilds, few recompilations
            self._sinusoids = sinusoidal_positions(rows, self.config.d_model).to(device)
        return self._sinusoids

    def memory_mask(self, src: Tensor) -> Tensor:
        """[B, S] -> [B, 1, 1, S], True at real tokens."""
        return (src != PAD_ID)[:, None, None, :]

    def encode(self, src: Tensor) -> Tensor:
        """Source ids [B, S] -> memory [B, S, D]."""
        mask = self.memory_mask(src)
        x = self._embed(src, "src_positions")
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x)

    def decode(self, tgt_in: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        """Teacher forcing: target ids [B, T], memory [B, S, D], mask [B, 1, 1, S] -> logits [B, T, V]."""
        x = self._embed(tgt_in, "tgt_positions")
        for layer in self.decoder:
            x = layer(x, memory, memory_mask)
        return self._project(self.decoder_norm(x))

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight)

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """Source ids [B, S] and target ids [B, T], starting with BOS -> logits [B, T, V]."""
        return self.decode(tgt_in, self.encode(src), self.memory_mask(src))

    def _decoder_layers(self) -> Iterable[DecoderLayer]:
        return cast(Iterable[DecoderLayer], self.decoder)  # torch types a ModuleList's members as any module

    def start(self, src: Tensor) -> DecoderState:
        """Encode [B, S] and compute what every decoding step of these sentences shares."""
        memory = self.encode(src)
        layers = [LayerCache(*layer.cross_attention.keys_values(memory)) for layer in self._decoder_layers()]
        return DecoderState(self.memory_mask(src), layers)

    def step(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """One more token for each beam: ids [B, W] -> logits [B, W, V]; `state` moves on by one position."""
        x = self._embed(tokens.reshape(-1, 1), "tgt_positions", state.length)
        for layer, cache in zip(self._decoder_layers(), state.layers, strict=True):
            x = layer.step(x, cache, state.memory_mask)
        state.length += 1
        return self._project(self.decoder_norm(x)).view(*tokens.shape, -1)
