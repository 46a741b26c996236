"""A run's scores, and the record of how they came about: result.json."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lit_transformer.batching import UpdatePlan
from lit_transformer.checkpoint import list_checkpoints, load_checkpoint, load_weights
from lit_transformer.cli import ExperimentCLI
from lit_transformer.evaluation import Evaluation
from lit_transformer.progress import say
from lit_transformer.store import write_atomic, write_json
from lit_transformer.transformer import TransformerConfig


def load(cli: ExperimentCLI, checkpoint: Path) -> dict[str, Any]:
    """Take weights and tokeniser from a checkpoint, and return it.

    Raises:
        ValueError: it is of another model, or no checkpoint of ours.
    """
    saved = load_checkpoint(checkpoint)
    load_weights(cli.model, saved, checkpoint)
    if "TranslationDataModule" not in saved:
        raise ValueError(f"{checkpoint} does not carry its tokeniser: use one written by `fit` or `average`")
    cli.datamodule.use_tokenizer(saved["TranslationDataModule"]["tokenizer_model"])
    return saved


def score(
    cli: ExperimentCLI,
    trainer: pl.Trainer,
    split: str,
    saved: dict[str, Any],
    checkpoint: Path,
    sentences: int | None = None,
) -> Evaluation:
    """Perplexity over a whole split and BLEU on so many sentences (all when not given), with what `load` has taken."""
    cli.model.bleu_sentences = sentences or sys.maxsize
    say(f"scoring {split} with {checkpoint}")
    run = trainer.validate if split == "valid" else trainer.test
    run(cli.model, datamodule=cli.datamodule, verbose=False)
    assert cli.model.evaluation is not None
    return replace(cli.model.evaluation, step=saved["global_step"])


def _scores(found: Evaluation) -> dict[str, Any]:
    names = {"sacreBLEU": "bleu", "compound-split BLEU": "compound_split_bleu", "chrF": "chrf"}
    return {
        "split": found.split,
        "nll": found.nll,
        "perplexity": found.perplexity,
        "tokens": found.tokens,
        "unfinished": found.unfinished,
        **{names[score.name]: score.as_dict() for score in found.scores},
    }


def facts(cli: ExperimentCLI, found: Evaluation, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What every result says of the run that it comes from."""
    store = cli.datamodule.store
    assert store is not None
    return {
        "study": cli.run.study,
        "variant": cli.run.variant,
        "seed": cli.seed,
        "updates": checkpoint["global_step"],
        "averaged": checkpoint.get("averaged", []),
        "parameters": cli.model.model.num_parameters,
        "vocab_size": cli.model.config.vocab_size,
        **_scores(found),
        "beam_size": cli.model.beam_size,
        "length_penalty": cli.model.length_penalty,
        "data": store.fingerprint,
        "text": store.meta["report"]["fingerprints"],
        "tokenizer": store.tokenizer_fingerprint,
        "versions": {
            "lit_transformer_commit": _commit(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": pl.__version__,
        },
    }


def training_counts(plan: UpdatePlan, config: TransformerConfig, updates: int) -> dict[str, Any]:
    """What the first so many updates take: tokens of each side, epochs, and FLOPs of their matrix products."""
    uses = plan.uses(updates)
    flops = config.forward_flops(plan.src_lengths, plan.tgt_lengths)
    return {
        "src_tokens": int((uses * plan.src_lengths).sum()),
        "tgt_tokens": int((uses * plan.tgt_lengths).sum()),
        "epochs": updates / plan.updates_per_epoch,
        "flops": float(3 * (uses * flops).sum()),  # backward costs twice a forward pass
    }


def validation_flops(cli: ExperimentCLI, src_lengths: np.ndarray, tgt_lengths: np.ndarray) -> float:
    """FLOPs of the validation losses during a whole training, on sentences of these lengths."""
    times = cli.trainer_config.max_steps // cli.model.validate_every
    return times * float(cli.model.config.forward_flops(src_lengths, tgt_lengths).sum())


def write_result(cli: ExperimentCLI, trainer: pl.Trainer, found: Evaluation, scored: Path, args: Sequence[str]) -> None:
    """result.json of a finished training, and what its sentences came out as; `args` as given to `fit`."""
    step, path = list_checkpoints(cli.folder / "checkpoints")[-1]
    last, checkpoint = load_checkpoint(path), load_checkpoint(scored)
    cli.datamodule.setup("fit")
    device = torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else "CPU"
    left_out = last.get("updates_left_out", [0])[0]
    if left_out:
        updates = "update was" if left_out == 1 else "updates were"
        say(f"{left_out} {updates} left out: the loss or its gradient was not finite there")
    write_outputs(cli.folder, cli, found, "valid")
    write_json(
        cli.folder / "result.json",
        {
            **facts(cli, found, checkpoint),
            **training_counts(cli.datamodule.plan, cli.model.config, step),
            "updates_left_out": left_out,
            "hours": last["training_seconds"] / 3600,
            "max_length": cli.datamodule.corpus.max_length,
            "device": device,
            "processes": trainer.world_size,
            "command": ["fit", *args],
            "config": cli.plain,
        },
    )
    print_scores(found)


def write_outputs(folder: Path, cli: ExperimentCLI, found: Evaluation, name: str) -> None:
    """hypotheses.NAME.txt for other tools, and sentences.NAME.jsonl: all that comparisons of two runs need."""
    write_atomic(folder / f"hypotheses.{name}.txt", "".join(f"{line}\n" for line in found.hypotheses).encode())
    store = cli.datamodule.store
    assert store is not None
    sources, references = store.text(found.split, "src"), store.text(found.split, "tgt")
    lengths = [store.sentences(found.split, side).lengths + 1 for side in ("src", "tgt")]  # end of sentence included
    lines = [
        json.dumps(
            {
                "source": sources[i],
                "reference": references[i],
                "hypothesis": hypothesis,
                "finished": finished,
                "nll": found.sentence_nll[i],
                "src_tokens": int(lengths[0][i]),
                "tgt_tokens": int(lengths[1][i]),
            }
        )
        for i, hypothesis, finished in zip(found.decoded, found.hypotheses, found.finished, strict=True)
    ]
    # ASCII, so one line a sentence for whoever splits at any Unicode line break too.
    write_atomic(folder / f"sentences.{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())


def print_scores(found: Evaluation) -> None:
    print(f"{found.split}: perplexity {found.perplexity:.3f} over {found.tokens:,} subwords, update {found.step:,}")
    for score in found.scores:
        print(f"{found.split}: {score}")
    if found.unfinished:
        print(f"{found.split}: {found.unfinished} outputs were cut at the length limit")


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # installed without its repository
