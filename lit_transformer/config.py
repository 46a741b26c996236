"""TransformerConfig: the columns of Table 3 that shape the model, and what a forward pass of it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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
