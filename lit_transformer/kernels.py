"""Operations of the model that have a faster way on a CPU, each with plain torch beside it for everything else.

The fast ways compute the same in float32, with other rounding.  They are not for other precisions, autocast,
`torch.compile` and other devices, whose own kernels do these things well.

Shapes: N rows (positions of a batch in a row), D width, V vocabulary.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from lit_transformer.tokenizer import PAD_ID

STEP = 64  # rows of a batch are filled up to a multiple of it: oneDNN keeps code for each number of rows
ROWS = 256  # of one piece of the vocabulary loss on a CPU: enough for fast products, few enough for its caches
PIECE_ON_GPU = 1 << 27  # logits


def plain_cpu(*tensors: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W' + b of x [N, D] and a weight [O, D], by oneDNN on a CPU; autograd does not know it there."""
    if plain_cpu(x, weight) and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


if torch.backends.mkldnn.is_available():

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _product_flops(x_shape: torch.Size, weight_shape: torch.Size, *_: Any, **__: Any) -> int:
        """For torch's FlopCounterMode, which knows only its own products."""
        return 2 * math.prod(x_shape) * weight_shape[0]


def _mask(x: Tensor, p: float, fill: bool = False) -> tuple[Tensor, float]:
    """Ones where x is kept, zeros elsewhere, and what to multiply by.

    16 random bits an element, cut from the generator's words of 64, are twenty times faster than torch's own mask on
    a CPU.  So p is rounded to a multiple of 2^-16.

    Args:
        fill: draw as for x's rows filled up to a multiple of STEP, so that filling changes no later mask.
    """
    drawn = x.numel()
    if fill:
        drawn += -(drawn // x.size(-1)) % STEP * x.size(-1)
    words = torch.empty(math.ceil(drawn / 4), dtype=torch.int64).random_(-(2**63), None)
    dropped = min(round(p * 65536), 65535)
    mask = torch.ge(
        words.view(torch.int16)[: x.numel()].view(x.shape), dropped - 32768, out=torch.empty(x.shape, dtype=x.dtype)
    )
    return mask, 65536 / (65536 - dropped)


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Section 5.4: elements become zero with probability p, the others are divided by 1 - p."""
    if not training or not p or not plain_cpu(x):
        return F.dropout(x, p, training)
    mask, scale = _mask(x, p)
    return x * mask.mul_(scale)


def add_dropped(x: Tensor, y: Tensor, p: float, training: bool) -> Tensor:
    """x + Dropout(y), in one pass on a CPU."""
    if not training or not p or not plain_cpu(x, y):
        return x + F.dropout(y, p, training)
    mask, scale = _mask(y, p, fill=True)
    return torch.addcmul(x, y, mask.mul_(scale))


def token_losses(logits: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Sums over the real tokens of a batch, in float32.

    Args:
        logits: [B, T, V].
        targets: ids [B, T]; padding does not count.
        label_smoothing: eps_ls of section 5.4, spread over all V entries.

    Returns:
        The smoothed loss, and the unsmoothed negative log-likelihood, both in nats.
    """
    real = targets != PAD_ID
    log_probs = F.log_softmax(logits.float(), dim=-1)
    nll = -log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1).masked_fill(~real, 0.0).sum()
    if not label_smoothing:
        return nll, nll
    uniform = -log_probs.mean(-1).masked_fill(~real, 0.0).sum()
    return (1 - label_smoothing) * nll + label_smoothing * uniform, nll


class _VocabularyLosses(torch.autograd.Function):
    """`token_losses` of x W' without all logits at once: each piece's gradients are made beside its loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, eps: float, rows: int) -> tuple[Tensor, Tensor]:
        size = weight.size(0)
        wanted = any(ctx.needs_input_grad[:2])
        loss, nll = x.new_zeros((2,), dtype=torch.float32).unbind()
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(x), rows):
            part, ids = x[start : start + rows], targets[start : start + rows].unsqueeze(1)
            logits = product(part, weight).float()
            real = ids != PAD_ID
            # One pass of exponentials: the largest share tells their sum, log_sum is that of exp(logits - top).
            top, right, mean = logits.amax(1, keepdim=True), logits.gather(1, ids), logits.mean(1, keepdim=True)
            change = logits.softmax(1)
            log_sum = -change.amax(1, keepdim=True).log()
            part_nll = ((top - right + log_sum) * real).sum()
            nll = nll + part_nll
            loss = loss + (1 - eps) * part_nll + eps * ((top - mean + log_sum) * real).sum()
            if wanted:
                # d loss / d logits = softmax - (1 - eps) [target] - eps / V
                change.sub_(eps / size)
                change.scatter_add_(1, ids, change.new_full((1, 1), eps - 1).expand_as(ids))
                change = change.mul_(real).to(weight.dtype)
                dx[start : start + rows] = product(change, weight.t())
                if dweight.dtype == part.dtype == change.dtype and not torch.is_autocast_enabled(x.device.type):
                    dweight.addmm_(change.t(), part)
                else:
                    dweight += change.t() @ part
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a model called with targets has first derivatives only: for create_graph=True take its logits, "
                "model(src, tgt_in), and token_losses of them"
            )
        dx, dweight = ctx.saved_tensors
        return dx * gradients[0].to(dx.dtype), dweight * gradients[0].to(dweight.dtype), None, None, None


def rows_of_piece(device: str, entries: int) -> int:
    """Of `vocabulary_losses` on a type of device, for so many entries of the vocabulary."""
    return ROWS if device == "cpu" else max(ROWS, PIECE_ON_GPU // entries)


def vocabulary_losses(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """`token_losses` of the logits x W', of which only a piece stands in memory at a time.

    Args:
        x: [N, D].
        weight: the output matrix [V, D].
        targets: ids [N].
        rows: of a piece; `rows_of_piece` of x's device when not given.
    """
    half = torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) == torch.float16
    if half or torch.compiler.is_compiling():  # float16's gradients need the scaled loss; the compiler fuses by itself
        return token_losses(F.linear(x, weight), targets, label_smoothing)
    rows = rows or rows_of_piece(x.device.type, len(weight))
    return _VocabularyLosses.apply(x, weight, targets, label_smoothing, rows)


@functools.cache
def keep_memory() -> None:
    """Let glibc keep what is freed for the next allocation, instead of getting each large block anew, page by page."""
    with_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if with_mallopt is not None:
        # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h
        for parameter, value in ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28)):
            with_mallopt(parameter, value)
