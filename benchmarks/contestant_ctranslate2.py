"""CTranslate2 with this project's weights, in float32 or with 8-bit integers in its matrix products."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from contest import serve
from ctranslate2.specs import common_spec, transformer_spec
from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]


def convert(size: dict[str, int], path: str, folder: str) -> list[str]:
    """Write the weights as CTranslate2 reads them; returns its vocabulary."""
    given = dict(np.load(path))
    layers, heads = size["num_layers"], size["num_heads"]
    encoder = TransformerEncoderSpec(layers, heads, pre_norm=False)
    decoder = TransformerDecoderSpec(layers, heads, pre_norm=False)
    spec = transformer_spec.TransformerSpec(encoder, decoder)

    def norm(part: Any, name: str) -> None:
        part.gamma, part.beta = given[f"{name}.weight"], given[f"{name}.bias"]

    def attention(part: Any, name: str, first: tuple[str, ...]) -> None:
        fused = [first, *([("w_k", "w_v")] if len(first) == 1 else []), ("w_o",)]
        for linear, names in zip(part.linear, fused, strict=True):
            linear.weight = np.concatenate([given[f"{name}.{w}.weight"] for w in names])

    for stack, name in ((encoder, "encoder"), (decoder, "decoder")):
        for i, layer in enumerate(stack.layer):
            mine = f"{name}.{i}"
            attention(layer.self_attention, f"{mine}.self_attention", ("w_q", "w_k", "w_v"))
            norm(layer.self_attention.layer_norm, f"{mine}.residuals.0.norm")
            if name == "decoder":
                attention(layer.attention, f"{mine}.cross_attention", ("w_q",))
                norm(layer.attention.layer_norm, f"{mine}.residuals.1.norm")
            for linear, number in ((layer.ffn.linear_0, 0), (layer.ffn.linear_1, 2)):
                linear.weight = given[f"{mine}.feed_forward.{number}.weight"]
                linear.bias = given[f"{mine}.feed_forward.{number}.bias"]
            norm(layer.ffn.layer_norm, f"{mine}.residuals.{2 if name == 'decoder' else 1}.norm")
        stack.position_encodings.encodings = given["positions"]
    for part in (encoder.embeddings[0], decoder.embeddings, decoder.projection):
        assert isinstance(part, (common_spec.EmbeddingsSpec, common_spec.LinearSpec))
        part.weight = given["embedding.weight"]
    words = [*SPECIAL, *(str(i) for i in range(len(SPECIAL), size["vocab_size"]))]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.optimize()
    spec.save(folder)
    return words


def decode(given: dict[str, Any], kind: str, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = convert(given["size"], given["weights"], folder)
        model = ctranslate2.Translator(folder, compute_type=kind, intra_threads=threads, inter_threads=1)
    number = {word: i for i, word in enumerate(words)}
    calls = itertools.cycle(json.loads(Path(given["sources"]).read_text()))

    def work() -> dict[str, Any]:
        sources = [[words[i] for i in row] for row in next(calls)]
        found = model.translate_batch(
            sources,
            max_batch_size=given["batch"] or 32,
            beam_size=4,
            length_penalty=0.6,
            max_decoding_length=max(map(len, sources)) + 50,
            disable_unk=True,
            suppress_sequences=[["<pad>"], ["<s>"]],
        )
        outputs = [[number[token] for token in one.hypotheses[0]] for one in found]
        return {"tokens": sum(len(i) + 1 for i in outputs), "outputs": outputs}

    serve(work)


if __name__ == "__main__":
    decode(json.loads(sys.argv[2]), sys.argv[1], int(sys.argv[3]))
