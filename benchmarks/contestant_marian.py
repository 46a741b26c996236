"""Hugging Face's MarianMTModel: in a plain loop, in its Seq2SeqTrainer, and its `generate`."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest import Clock, Turns, padded, serve
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

PAD, UNK, BOS, EOS = range(4)


def build(size: dict[str, int]) -> MarianMTModel:
    n, heads, inner = size["num_layers"], size["num_heads"], size["d_ff"]
    return MarianMTModel(
        MarianConfig(
            vocab_size=size["vocab_size"],
            d_model=size["d_model"],
            encoder_layers=n,
            decoder_layers=n,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=inner,
            decoder_ffn_dim=inner,
            activation_function="relu",
            dropout=0.1,
            scale_embedding=True,
            max_position_embeddings=512,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
    )


def batches(path: str) -> list[dict[str, torch.Tensor]]:
    found = []
    for src, tgt in json.loads(Path(path).read_text()):
        ids, labels = torch.tensor(padded(src, PAD)), torch.tensor(padded(tgt, -100))
        inputs = torch.tensor(padded([[BOS, *row[:-1]] for row in tgt], PAD))
        mask = (ids != PAD).long()
        found.append({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": inputs, "labels": labels})
    return found


def train(given: dict[str, Any]) -> None:
    model = build(given["size"]).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)
    cycle = itertools.cycle(batches(given["batches"]))

    def work() -> dict[str, Any]:
        tokens = 0
        for _ in range(given["updates"]):
            batch = dict(next(cycle))
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits.flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens += int((labels != -100).sum())
        return {"tokens": tokens}

    serve(work)


class Told(TrainerCallback):
    def __init__(self, updates: int, tokens: list[int]) -> None:
        self.updates, self.tokens, self.turns = updates, tokens, Turns()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.turns.ready()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.updates == 0:
            if not self.turns.wait():
                sys.exit()
            self.clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step % self.updates == 0:
            done = sum(self.tokens[n % len(self.tokens)] for n in range(step - self.updates, step))
            self.turns.answer({**self.clock.read(), "tokens": done})


def trainer(given: dict[str, Any]) -> None:
    """Its own loop, with its loader, label smoothing, logging and schedule, over the same batches."""
    made = batches(given["batches"])
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            per_device_train_batch_size=1,  # an item is a whole batch
            max_steps=10**6,
            label_smoothing_factor=0.1,
            max_grad_norm=0.0,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            train_sampling_strategy="sequential",
        )
        told = Told(given["updates"], [int((b["labels"] != -100).sum()) for b in made])
        Seq2SeqTrainer(build(given["size"]), arguments, lambda items: dict(items[0]), made, callbacks=[told]).train()


def load(model: MarianMTModel, path: str) -> None:
    """This project's weights under Marian's names; it has biases where the paper has none."""
    given = {name: torch.from_numpy(value) for name, value in np.load(path).items()}
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    parts = {"w_q": "q_proj", "w_k": "k_proj", "w_v": "v_proj", "w_o": "out_proj"}
    for stack in ("encoder", "decoder"):
        attentions = {"self_attention": "self_attn"} | (
            {"cross_attention": "encoder_attn"} if stack == "decoder" else {}
        )
        norms = {"0": "self_attn_layer_norm", "1": "encoder_attn_layer_norm", "2": "final_layer_norm"}
        if stack == "encoder":
            norms = {"0": "self_attn_layer_norm", "1": "final_layer_norm"}
        for i in range(model.config.encoder_layers):
            mine, theirs = f"{stack}.{i}", f"model.{stack}.layers.{i}"
            for a, b in attentions.items():
                for p, q in parts.items():
                    state[f"{theirs}.{b}.{q}.weight"] = given[f"{mine}.{a}.{p}.weight"]
            for kind in ("weight", "bias"):
                for a, b in (("0", "fc1"), ("2", "fc2")):
                    state[f"{theirs}.{b}.{kind}"] = given[f"{mine}.feed_forward.{a}.{kind}"]
                for a, b in norms.items():
                    state[f"{theirs}.{b}.{kind}"] = given[f"{mine}.residuals.{a}.norm.{kind}"]
        state[f"model.{stack}.embed_positions.weight"] = given["positions"]
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        state[f"{name}.weight"] = given["embedding.weight"]
    model.load_state_dict(state)


def decode(given: dict[str, Any]) -> None:
    model = build(given["size"]).eval()
    load(model, given["weights"])
    calls = itertools.cycle(json.loads(Path(given["sources"]).read_text()))

    def one(sources: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(padded(sources, PAD))
        found = model.generate(
            input_ids=ids,
            attention_mask=(ids != PAD).long(),
            generation_config=GenerationConfig(
                num_beams=4,
                length_penalty=0.6,
                max_new_tokens=ids.size(1) + 50,
                bad_words_ids=[[PAD], [UNK], [BOS]],
                pad_token_id=PAD,
                bos_token_id=BOS,
                eos_token_id=EOS,
                decoder_start_token_id=BOS,
            ),
        )
        return [[i for i in row[1:].tolist() if i not in (PAD, EOS)] for row in found]

    def work() -> dict[str, Any]:
        sources = next(calls)
        rows = given["batch"] or 32
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        outputs: list[list[int]] = [[] for _ in sources]
        with torch.inference_mode():
            for start in range(0, len(order), rows):
                part = order[start : start + rows]
                for i, ids in zip(part, one([sources[i] for i in part]), strict=True):
                    outputs[i] = ids
        return {"tokens": sum(len(i) + 1 for i in outputs), "outputs": outputs}

    serve(work)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    {"train": train, "trainer": trainer, "decode": decode}[sys.argv[1]](json.loads(sys.argv[2]))
