"""JoeyNMT 2.3.0: its model and loss in its own way of one training step, and its `search`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from contest import padded, serve
from joeynmt.batch import Batch
from joeynmt.model import Model, build_model
from joeynmt.search import search
from joeynmt.transformer_layers import MultiHeadedAttention, PositionwiseFeedForward
from joeynmt.vocabulary import Vocabulary

PAD, UNK, BOS, EOS = range(4)


def vocabulary(size: int) -> Vocabulary:
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    ids = {"unk_id": 0, "pad_id": 1, "bos_id": 2, "eos_id": 3}
    made = Vocabulary([], SimpleNamespace(**special, **ids, lang_tags=[], sep_token=None, sep_id=None))
    # Its add_tokens looks for each token in a list; only the number of entries matters here.
    words = [f"w{i}" for i in range(size - 4)]
    made._itos.extend(words)
    made._stoi.update((word, i + 4) for i, word in enumerate(words))
    return made


def build(size: dict[str, int]) -> Model:
    stack = {
        "type": "transformer",
        "num_layers": size["num_layers"],
        "num_heads": size["num_heads"],
        "hidden_size": size["d_model"],
        "ff_size": size["d_ff"],
        "dropout": 0.1,
        "layer_norm": "post",
        "embeddings": {"embedding_dim": size["d_model"], "scale": True, "dropout": 0.1},
    }
    words = vocabulary(size["vocab_size"])
    config = {"encoder": stack, "decoder": stack, "tied_embeddings": True, "tied_softmax": True}
    model = build_model(config, words, words)
    model.loss_function = ("crossentropy", 0.1)
    for module in model.modules():  # the paper's dropout is on sub-layers' outputs alone
        if isinstance(module, MultiHeadedAttention):
            module.dropout.p = 0.0
        if isinstance(module, PositionwiseFeedForward):
            module.pwff_layer[2].p = 0.0
    return model


def batch(src: list[list[int]], tgt: list[list[int]] | None) -> Batch:
    """JoeyNMT has padding and unknown the other way round."""
    swap = {PAD: 1, UNK: 0}
    sources = torch.tensor(padded([[swap.get(i, i) for i in row] for row in src], 1))
    targets = torch.tensor(padded([[BOS, *row] for row in tgt], 1)) if tgt else None
    long = torch.tensor([len(row) for row in src])
    device = torch.device("cpu")
    return Batch(sources, long, None, targets, None, torch.arange(len(src)), device, 1, EOS, is_train=bool(tgt))


def train(given: dict[str, Any]) -> None:
    model = build(given["size"]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)  # its "adam" is this
    cycle = itertools.cycle(json.loads(Path(given["batches"]).read_text()))

    def work() -> dict[str, Any]:
        tokens = 0
        for _ in range(given["updates"]):
            made = batch(*next(cycle))
            made.sort_by_src_length()
            loss, _, _, correct = model(return_type="loss", **vars(made))
            made.normalize(loss, normalization="tokens").backward()
            correct.item()
            optimizer.step()
            optimizer.zero_grad()
            tokens += made.ntokens
        return {"tokens": tokens}

    serve(work)


def load(model: Model, path: str) -> None:
    """This project's weights under its names; it has biases where the paper has none."""
    given = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    parts = {"w_q": "q_layer", "w_k": "k_layer", "w_v": "v_layer", "w_o": "output_layer"}
    attentions = {
        "encoder": {"self_attention": "src_src_att"},
        "decoder": {"self_attention": "trg_trg_att", "cross_attention": "src_trg_att"},
    }
    norms = {
        "encoder": {"0": "layer_norm", "1": "feed_forward.layer_norm"},
        "decoder": {"0": "x_layer_norm", "1": "dec_layer_norm", "2": "feed_forward.layer_norm"},
    }
    for stack in ("encoder", "decoder"):
        for i in range(len(model.encoder.layers)):
            mine, theirs = f"{stack}.{i}", f"{stack}.layers.{i}"
            for a, b in attentions[stack].items():
                for p, q in parts.items():
                    state[f"{theirs}.{b}.{q}.weight"] = given[f"{mine}.{a}.{p}.weight"]
            for kind in ("weight", "bias"):
                for a, b in (("0", "0"), ("2", "3")):
                    state[f"{theirs}.feed_forward.pwff_layer.{b}.{kind}"] = given[f"{mine}.feed_forward.{a}.{kind}"]
                for a, b in norms[stack].items():
                    state[f"{theirs}.{b}.{kind}"] = given[f"{mine}.residuals.{a}.norm.{kind}"]
        state[f"{stack}.pe.pe"] = model.state_dict()[f"{stack}.pe.pe"]
    embedding = given["embedding.weight"].clone()
    embedding[[0, 1]] = embedding[[1, 0]]
    for name in ("src_embed.lut", "trg_embed.lut", "decoder.output_layer"):
        state[f"{name}.weight"] = embedding
    model.load_state_dict(state)


def decode(given: dict[str, Any]) -> None:
    model = build(given["size"]).eval()
    load(model, given["weights"])
    calls = itertools.cycle(json.loads(Path(given["sources"]).read_text()))

    def work() -> dict[str, Any]:
        sources = next(calls)
        rows = given["batch"] or 32
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        outputs: list[list[int]] = [[] for _ in sources]
        for start in range(0, len(order), rows):
            part = order[start : start + rows]
            made = batch([sources[i] for i in part], None)
            found, _, _ = search(
                model, made, made.src.size(1) + 50, beam_size=4, beam_alpha=0.6, n_best=1, generate_unk=False
            )
            for i, row in zip(part, found.tolist(), strict=True):
                outputs[i] = row[: row.index(EOS)] if EOS in row else [x for x in row if x != 1]
        return {"tokens": sum(len(i) + 1 for i in outputs), "outputs": outputs}

    serve(work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    {"train": train, "decode": decode}[sys.argv[1]](json.loads(sys.argv[2]))
