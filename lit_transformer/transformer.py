"""The encoder-decoder Transformer of "Attention Is All You Need", in plain torch.

Shapes: B batch, S source length, T target length, D d_model, V vocabulary, W beam.  Sections and equations are those of
arXiv 1706.03762.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_transformer import fused
from lit_transformer.config import TransformerConfig
from lit_transformer.kernels import dropout, vocabulary_losses
from lit_transformer.layers import DecoderLayer, DecoderState, EncoderLayer, LayerCache
from lit_transformer.tokenizer import PAD_ID

__all__ = ["Transformer", "TransformerConfig", "sinusoidal_positions"]


def sinusoidal_positions(length: int, d_model: int) -> Tensor:
    """PE of section 3.5, [length, D]: sines in even columns, cosines in odd ones, positions from 0."""
    position = torch.arange(length, dtype=torch.float64).unsqueeze(1)
    angle = position / 10000 ** (torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


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
            return dropout(scaled, self.config.dropout, self.training)
        table = self._sinusoid_table(end, tokens.device) if self.config.position == "sinusoidal" else None
        positions = (getattr(self, learned) if table is None else table)[start:end]
        return dropout(scaled + positions.to(scaled.dtype), self.config.dropout, self.training)

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
        """Teacher forcing: target ids [B, T], memory [B, S, D], mask [B, 1, 1, S] -> states [B, T, D]."""
        x = self._embed(tgt_in, "tgt_positions")
        for layer in self.decoder:
            x = layer(x, memory, memory_mask)
        return self.decoder_norm(x)

    def _project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight)

    def forward(
        self, src: Tensor, tgt_in: Tensor, tgt_out: Tensor | None = None, label_smoothing: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits, or with targets the losses, which need no logits of the whole batch at once.

        Args:
            src, tgt_in: ids [B, S] and [B, T], targets starting with BOS.
            tgt_out: what to predict, ids [B, T].
            label_smoothing: eps_ls of section 5.4.

        Returns:
            Logits [B, T, V]; with targets what `kernels.token_losses` returns of them.
        """
        if tgt_out is not None and self._fused(src):
            return self._losses(self._states(src, tgt_in), fused.as_rows(tgt_out, PAD_ID), label_smoothing)
        x = self.decode(tgt_in, self.encode(src), self.memory_mask(src))
        if tgt_out is None:
            return self._project(x)
        return self._losses(x.flatten(0, 1), tgt_out.flatten(), label_smoothing)

    def _losses(self, x: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        return vocabulary_losses(x, self.embedding.weight, targets, label_smoothing)

    def _fused(self, src: Tensor) -> bool:
        """Whether `_states` is `decode` of `encode`; another class, a sharded model's too, may have its own of them."""
        parts = (self.encoder, self.decoder, self.encoder_norm, self.decoder_norm)
        own = type(self) is Transformer and not {"encode", "decode"} & vars(self).keys()
        return own and fused.suits(*parts) and bool((src[:, 0] != PAD_ID).all())  # nothing looks at an empty source

    def _states(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """`decode` of `encode` on a CPU: [B, S], [B, T] -> rows of the decoder's states [R, D]."""
        mask = fused.padding_mask(self.memory_mask(src))
        x = fused.as_rows(self._embed(src, "src_positions"))
        memory = self.encoder_norm(fused.encoded(self.encoder, x, src.shape, mask))
        x = fused.as_rows(self._embed(tgt_in, "tgt_positions"))
        return self.decoder_norm(fused.decoded(self.decoder, x, tgt_in.shape, memory, src.shape, mask))

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
        own = state.grow(tokens.size(1))
        for layer, cache in zip(self._decoder_layers(), state.layers, strict=True):
            x = layer.step(x, cache, state, own)
        state.length += 1
        return self._project(self.decoder_norm(x)).view(*tokens.shape, -1)
