"""A Transformer's weights as searches on a CPU want them: laid out once for oneDNN's products, or in 8 bits."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from lit_transformer import fused
from lit_transformer.kernels import keep_memory
from lit_transformer.layers import Linear
from lit_transformer.tokenizer import PAD_ID
from lit_transformer.transformer import Transformer

TOGETHER = 8  # sentences that the encoder takes at a time
ROWS = 32  # that the layout is chosen for; others, 4 to 128 measured, are as fast with it


class _Product(nn.Module):
    """x W' + b of constant weights [out, D], in float32."""

    with_relu = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "relu" if relu else "none", [], "")


class _Int8Product(nn.Module):
    """The same with weights of 8 bits, a scale for each output, and inputs of 8 bits, a scale for each call."""

    with_relu = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach()
        scale = weight.abs().amax(1).clamp_min(1e-12) / 127
        zero = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # Deprecated in torch 2.13 without another way to what linear_prepack takes; constraints.txt pins torch.
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
            rounded = torch.quantize_per_channel(weight, scale.double(), zero, 0, torch.qint8)
        self.weight = torch.ops.quantized.linear_prepack(rounded, bias)

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        product = torch.ops.quantized.linear_relu_dynamic if relu else torch.ops.quantized.linear_dynamic
        return product(x, self.weight, False)


class PackedTransformer(Transformer):
    """What a search needs of a model, with the model's weights of now; it cannot be trained or saved.

    Args:
        model: in float32 on a CPU.
        int8: products of 8-bit integers.
    """

    def __init__(self, model: Transformer, int8: bool = False) -> None:
        with torch.device("meta"):
            super().__init__(model.config)
        self.load_state_dict(model.state_dict(), assign=True)
        product = _Int8Product if int8 else _Product
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, Linear):
                    setattr(module, name, product(child.weight, child.bias))
        self.output = product(self.embedding.weight, None)
        self.eval()

    def encode(self, src: Tensor) -> Tensor:
        """Source ids [B, S] -> memory [B, S, D], a few sentences of like length at a time."""
        lengths = (src != PAD_ID).sum(1)
        memory = self.embedding.weight.new_zeros((*src.shape, self.config.d_model))
        for rows in lengths.argsort().split(TOGETHER):
            longest = max(1, int(lengths[rows].max()))
            memory[rows, :longest] = super().encode(src[rows, :longest])
        return memory

    def _project(self, x: Tensor) -> Tensor:
        return self.output(x)


def for_search(model: Transformer, int8: bool = False) -> Transformer:
    """The model itself, or on a CPU in float32 one that searches faster.

    Models with hooks or layers of somebody's own are searched as they are, as are those whose weights are not finite:
    oneDNN's ReLU would make zeros of what is not a number.

    Raises:
        ValueError: 8 bits are asked for elsewhere.
    """
    parts = (model.encoder, model.decoder, model.encoder_norm, model.decoder_norm)
    if fused.suits(*parts) and all(bool(weight.isfinite().all()) for weight in model.parameters()):
        keep_memory()
        return PackedTransformer(model, int8)
    if int8:
        weight = model.embedding.weight
        raise ValueError(
            f"int8: the model is on {weight.device} in {weight.dtype}, must be on a CPU in float32, with finite "
            "weights, its own layers and no hooks"
        )
    return model
