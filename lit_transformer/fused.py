"""The two stacks, teacher forced, on a CPU in float32: what `layers` computes, in fewer passes over memory.

Positions of a batch stand one below another as rows, filled up with zeros to a multiple of kernels.STEP: oneDNN, whose
products are the fastest here, makes code for each number of rows and keeps it.  Filler has no gradient.

Shapes: B batch, T queries' length, S keys' length, R rows (B*T and filler), D d_model, H heads, K d_k (V for values).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from lit_transformer import kernels
from lit_transformer.kernels import plain_cpu, product
from lit_transformer.layers import DecoderLayer, EncoderLayer, FeedForward, Linear, MultiHeadAttention, Residual

LONG = 96  # beyond it all heads' weights are not kept in memory
# What the functions below stand for; a layer that is sharded, packed or somebody's own is of another class.
WRITTEN = (
    *(nn.ModuleList, nn.LayerNorm, nn.Identity, nn.ReLU),
    *(EncoderLayer, DecoderLayer, MultiHeadAttention, FeedForward, Linear, Residual),
)
HIDDEN = -1e30  # a score; its exponential is zero


def suits(*parts: nn.Module) -> bool:
    """On a CPU in float32, where nobody has a say in how a layer or a part of it is called: here they are not."""
    if torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available() or _has_any_global_hook():
        return False
    modules = [module for part in parts for module in part.modules()]
    weights = (weight for module in modules for weight in module._parameters.values() if weight is not None)
    return all(map(as_written, modules)) and plain_cpu(*weights)


def as_written(module: nn.Module) -> bool:
    """Whether it is one that this project has made, as it was made, with no hook on it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if type(module) not in WRITTEN or any(hooks) or "forward" in vars(module):
        return False
    if isinstance(module, MultiHeadAttention):
        return all(linear.bias is None for linear in (module.w_q, module.w_k, module.w_v, module.w_o))
    if isinstance(module, FeedForward):
        return list(map(type, module)) == [Linear, nn.ReLU, Linear] and module[0].bias is not None is not module[2].bias
    return not isinstance(module, nn.LayerNorm) or module.weight is not None


def as_rows(x: Tensor, value: float = 0) -> Tensor:
    """[B, T, ...] -> [R, ...]"""
    x = x.flatten(0, 1)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % kernels.STEP), value=value)


def _joint(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


class _Linear(torch.autograd.Function):
    """x [R, D] times each of some matrices [O, D], the results side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return product(x, _joint(weights))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        d_weights = (dy.t() @ x).split([len(weight) for weight in weights])
        return product(dy, _joint(weights).t()), *d_weights


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_1: Tensor, b_1: Tensor, w_2: Tensor, b_2: Tensor) -> Tensor:
        inner = product(x, w_1, b_1).relu_()  # oneDNN's own would make zeros of what is not a number
        ctx.save_for_backward(x, inner, w_1, w_2)
        return product(inner, w_2, b_2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, inner, w_1, w_2 = ctx.saved_tensors
        change = product(dy, w_2.t())
        torch.ops.aten.threshold_backward.grad_input(change, inner, 0, grad_input=change)
        return product(change, w_1.t()), change.t() @ x, change.sum(0), product(dy.t(), inner.t()), dy.sum(0)


@dataclass(frozen=True)
class _Heads:
    """How rows are divided into heads."""

    queries: torch.Size  # B, T
    keys: torch.Size  # B, S
    heads: int
    widths: tuple[int, int, int]  # H*K, H*K, H*V
    scale: float

    def split(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """(queries, keys and values side by side) or (queries; keys and values), as rows -> views [B, H, T, K]."""
        widths = [self.widths] if len(rows) == 1 else [self.widths[:1], self.widths[1:]]
        parts = []
        for part, size, wide in zip(rows, (self.queries, self.keys), widths, strict=False):
            parts += [self.view(columns, size) for columns in part.split(wide, 1)]
        return parts

    def view(self, rows: Tensor, size: torch.Size) -> Tensor:
        """[R, H*K] -> [B, H, T, K]"""
        return rows[: size.numel()].unflatten(1, (self.heads, -1)).unflatten(0, size).transpose(1, 2)


def _room(x: Tensor, shape: torch.Size | tuple[int, int], size: torch.Size) -> Tensor:
    """Rows to be written for a batch of some size, their filler zero."""
    y = x.new_empty(shape)
    y[size.numel() :] = 0
    return y


class _Attention(torch.autograd.Function):
    """softmax(Q K' * scale + mask) V of rows that `_Heads` divides -> rows [R, H*V].

    Short ones by products over all heads, which keep the softmax; torch's fused kernel spends most of its time on
    its many small calls there.
    """

    @staticmethod
    def forward(ctx: Any, of: _Heads, mask: Tensor | None, *rows: Tensor) -> Tensor:
        queries, keys, values = of.split(rows)
        shape = (*queries.shape[:3], keys.size(2))
        ctx.of, ctx.shapes = of, [part.shape for part in rows]
        ctx.fused = max(shape[2:]) > LONG and queries.size(3) == values.size(3)
        if ctx.fused:
            mask = None if mask is None else mask.expand(shape)
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, attn_mask=mask, scale=of.scale
            )
            ctx.save_for_backward(*rows, out, sums, mask)
        else:
            q = torch.mul(queries, of.scale, out=queries.new_empty(queries.shape)).flatten(0, 1)
            k, v = keys.flatten(0, 1), values.flatten(0, 1)
            scores = torch.bmm(q, k.transpose(1, 2)).view(shape)
            weights = (scores if mask is None else scores.add_(mask)).softmax(-1).flatten(0, 1)
            out = torch.bmm(weights, v).view((*values.shape[:2], shape[2], -1))
            ctx.save_for_backward(q, k, v, weights)
        y = _room(out, (len(rows[0]), of.widths[2]), of.queries)
        of.view(y, of.queries).copy_(out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of: _Heads = ctx.of
        d_rows = [_room(dy, shape, size) for shape, size in zip(ctx.shapes, (of.queries, of.keys), strict=False)]
        d_queries, d_keys, d_values = of.split(d_rows)
        d_out = of.view(dy, of.queries)
        if ctx.fused:
            *rows, out, sums, mask = ctx.saved_tensors
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, *of.split(rows), out, sums, 0.0, False, attn_mask=mask, scale=of.scale
            )
            for part, change in zip((d_queries, d_keys, d_values), found, strict=True):
                part.copy_(change)
        else:
            q, k, v, weights = ctx.saved_tensors
            d_out = d_out.flatten(0, 1)
            d_values.copy_(torch.bmm(weights.transpose(1, 2), d_out).view_as(d_values))
            d_weights = torch.bmm(d_out, v.transpose(1, 2))
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            torch.mul(torch.bmm(d_scores, k).view_as(d_queries), of.scale, out=d_queries)
            d_keys.copy_(torch.bmm(d_scores.transpose(1, 2), q).view_as(d_keys))
        return None, None, *d_rows


def _attention(
    module: MultiHeadAttention,
    x: Tensor,
    size: torch.Size,
    mask: Tensor | None,
    memory: Tensor | None = None,
    sources: torch.Size | None = None,
) -> Tensor:
    """Rows x of a batch of size (B, T), looking at themselves or at rows of memory of size (B, S) -> rows."""
    w_q, w_k, w_v, w_o = (linear.weight for linear in (module.w_q, module.w_k, module.w_v, module.w_o))
    if memory is None:
        rows = [_Linear.apply(x, w_q, w_k, w_v)]
    else:
        rows = [_Linear.apply(x, w_q), _Linear.apply(memory, w_k, w_v)]
    heads = _Heads(size, sources or size, module.num_heads, (len(w_q), len(w_k), len(w_v)), module.scale)
    return _Linear.apply(_Attention.apply(heads, mask, *rows), w_o)


def _feed_forward(module: FeedForward, x: Tensor) -> Tensor:
    first, second = module[0], module[2]
    return _FeedForward.apply(x, first.weight, first.bias, second.weight, second.bias)


def padding_mask(real: Tensor) -> Tensor | None:
    """True where attention is allowed -> what is added to scores, nothing where there is no padding."""
    return None if real.all() else torch.zeros(real.shape, dtype=torch.float32).masked_fill_(~real, HIDDEN)


def encoded(layers: nn.ModuleList, x: Tensor, size: torch.Size, mask: Tensor | None) -> Tensor:
    """Rows of embeddings [R, D] of a batch of size (B, S) -> the same through the encoder's layers."""
    for layer in cast(Iterable[EncoderLayer], layers):
        x = layer.residuals[0](x, lambda q, of=layer.self_attention: _attention(of, q, size, mask))
        x = layer.residuals[1](x, lambda q, of=layer.feed_forward: _feed_forward(of, q))
    return x


def decoded(
    layers: nn.ModuleList,
    x: Tensor,
    size: torch.Size,
    memory: Tensor,
    sources: torch.Size,
    mask: Tensor | None,
) -> Tensor:
    """Rows of embeddings of (B, T) targets, rows of memory of (B, S) sources and their mask -> rows of states."""
    causal = torch.full((size[1], size[1]), HIDDEN, dtype=torch.float32).triu_(1)
    for layer in cast(Iterable[DecoderLayer], layers):
        x = layer.residuals[0](x, lambda q, of=layer.self_attention: _attention(of, q, size, causal))
        x = layer.residuals[1](x, lambda q, of=layer.cross_attention: _attention(of, q, size, mask, memory, sources))
        x = layer.residuals[2](x, lambda q, of=layer.feed_forward: _feed_forward(of, q))
    return x
