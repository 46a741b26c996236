"""The memory that training takes, for a device of any size: passes are played with tensors that hold no numbers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_transformer.kernels import rows_of_piece, vocabulary_losses
from lit_transformer.speed import saved_bytes
from lit_transformer.transformer import Transformer, TransformerConfig


@dataclass(frozen=True)
class Memory:
    """Bytes of a process that holds the whole model.

    Attributes:
        weights, gradients, moments: of all parameters, in float32; Adam has two moments.
        activations: what the forward pass of a micro-batch, its loss included, keeps for the backward pass.
        temporaries: what comes on top at the fullest moment of both passes, mostly the loss over the vocabulary.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.activations + self.temporaries


class _Layers(Transformer):
    """Goes through its layers on a CPU too, as it does on a card."""

    device = "cpu"  # whose pieces the loss is computed in

    def _losses(self, x: Tensor, targets: Tensor, label_smoothing: float) -> tuple[Tensor, Tensor]:
        rows = rows_of_piece(self.device, self.config.vocab_size)
        return vocabulary_losses(x, self.embedding.weight, targets, label_smoothing, rows)


def memory(
    config: TransformerConfig,
    label_smoothing: float,
    rows: int,
    src_width: int,
    tgt_width: int,
    bf16: bool,
    device: str = "cpu",
) -> Memory:
    """What one micro-batch takes, counted tensor by tensor as the CPU's kernels would make them; nothing is computed.

    Args:
        rows, src_width, tgt_width: sentences, and tokens of the longest one on each side; all are padded to it.
        bf16: precision "bf16-mixed" instead of "32-true"; weights, gradients and moments are in float32 with both.
        device: "cpu", or "cuda" with its larger pieces of the loss.
    """
    with FakeTensorMode():
        model = _Layers(config).train()
        model.device = device
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as in every update but the first
        weights = sum(parameter.nbytes for parameter in model.parameters())
        with _Live() as live, saved_bytes(model) as kept:
            src, tgt_in, tgt_out = (torch.ones(rows, n, dtype=torch.int64) for n in (src_width, tgt_width, tgt_width))
            update_tokens = torch.tensor(rows * tgt_width)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(src, tgt_in, tgt_out, label_smoothing)[0] / update_tokens
            live.backward = True
            loss.backward()
    activations = sum(kept.values())
    return Memory(weights, weights, 2 * weights, activations, live.most - activations)


class _Live(TorchDispatchMode):
    """Bytes of all storages that operations inside have made and that still live, and the most there ever were.

    Attributes:
        backward: whether the backward pass has begun.
    """

    # Autograd does these in place, into their first operand, but not where somebody listens as this class does.
    _IN_PLACE = (torch.ops.aten.scatter_add.default, torch.ops.aten.add.Tensor)

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.backward = False
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before | self._sizes.keys():
                if self.backward and func in self._IN_PLACE and args[0].untyped_storage().nbytes() >= tensor.nbytes:
                    self._gone(args[0].untyped_storage()._cdata)
                self._made(tensor.untyped_storage())
        return results

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)

    def _gone(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage, 0)
