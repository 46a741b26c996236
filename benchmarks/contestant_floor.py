"""The floor: the matrix products alone of the same updates, into memory that is there already.

Forward y = x W', backward dx = dy W and dW = dy' x, for every linear map; in attention the two products of each head
and the four of their backward pass.  Shapes are those of the batches, padding dropped but where attention needs it.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from contest import Clock, serve
from contestant_torch import PAD, tensors
from torch import Tensor


@functools.cache
def buffer(*shape: int, use: str = "") -> Tensor:
    return torch.randn(shape)


def linear(rows: int, inside: int, outside: int) -> None:
    x, w, dy = buffer(rows, inside), buffer(outside, inside), buffer(rows, outside, use="gradient")
    torch.mm(x, w.t(), out=buffer(rows, outside, use="out"))
    torch.mm(dy, w, out=buffer(rows, inside, use="out"))
    torch.mm(dy.t(), x, out=buffer(outside, inside, use="out"))


def attention(products: int, queries: int, keys: int, width: int) -> None:
    q, k = buffer(products, queries, width), buffer(products, keys, width)
    weights = buffer(products, queries, keys)
    for _ in range(2):  # scores and their gradient to the values; output and its gradient to the weights are alike
        torch.bmm(q, k.transpose(1, 2), out=buffer(products, queries, keys, use="out"))
        torch.bmm(weights, k, out=buffer(products, queries, width, use="out"))
    for _ in range(2):
        torch.bmm(weights.transpose(1, 2), q, out=buffer(products, keys, width, use="out"))


def parts(size: dict[str, int], src: Tensor, tgt: Tensor) -> list[tuple[int, Callable[[], None]]]:
    """(how often, what): one layer of each stack stands for all."""
    d, heads, inner, n = size["d_model"], size["num_heads"], size["d_ff"], size["num_layers"]
    (b, s), t, k = src.shape, tgt.size(1), d // heads
    sources, targets = (int((ids != PAD).sum()) for ids in (src, tgt))

    def layer(rows: int, memory: int, attentions: Sequence[tuple[int, int]]) -> None:
        for _ in attentions:
            linear(rows, d, d)  # queries
            linear(rows, d, d)  # output
        for keys in filter(None, (rows, memory)):
            linear(keys, d, 2 * d)
        linear(rows, d, inner)
        linear(rows, inner, d)
        for queries, keys in attentions:
            attention(b * heads, queries, keys, k)

    return [
        (n, functools.partial(layer, sources, 0, [(s, s)])),
        (n, functools.partial(layer, targets, sources, [(t, t), (t, s)])),
        (1, functools.partial(linear, targets, d, size["vocab_size"])),
    ]


def floor(given: dict[str, Any]) -> None:
    cycle = itertools.cycle(tensors(given["batches"]))

    def work() -> dict[str, Any]:
        tokens, seconds = 0, {"wall": 0.0, "cpu": 0.0}
        for _ in range(given["updates"]):
            src, _, tgt = next(cycle)
            for times, run in parts(given["size"], src, tgt):
                run()  # so that no time is spent on new memory
                clock = Clock()
                run()
                for name, passed in clock.read().items():
                    seconds[name] += times * passed
            tokens += int((tgt != PAD).sum())
            buffer.cache_clear()
        return {"tokens": tokens, **seconds}

    serve(work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    floor(json.loads(sys.argv[2]))
