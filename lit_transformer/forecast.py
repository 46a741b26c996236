"""`lit-transformer plan`: what one run will take, said before it trains and, if need be, before its text is there.

Where the text is prepared, tokens, FLOPs, micro-batches and padding are counted from the plan of updates.  Before that
the lengths of sentences are assumed, and it is said aloud that they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lit_transformer.batching import UpdatePlan
from lit_transformer.cli import ExperimentCLI
from lit_transformer.corpus import store_folder
from lit_transformer.memory import memory
from lit_transformer.progress import in_hours
from lit_transformer.rows import read_table2
from lit_transformer.scoring import training_counts, validation_flops
from lit_transformer.speed import Text, measure

ASSUMED_PAIRS, ASSUMED_VALID = 300_000, 3000
ASSUMED_PIECES = 28  # mean of a side, end of sentence aside
SAMPLE = 200  # updates among which padding is counted
PROCESSES = (1, 2, 4, 8)
_MIB = 2**20


@dataclass(frozen=True)
class Lengths:
    """Tokens of training and validation sentences, end of sentence included.

    Attributes:
        text: None where the lengths are assumed.
        missing: why, then.
    """

    plan: UpdatePlan
    valid: tuple[np.ndarray, np.ndarray]
    text: Text | None = None
    missing: str = ""


def find_lengths(cli: ExperimentCLI) -> Lengths:
    """Those of the prepared text, or assumed ones; nothing is prepared here."""
    data = cli.datamodule
    try:
        folder = store_folder(data.corpus, data.root)
        missing = "" if (folder / "meta.json").is_file() else f"there is no {folder}"
    except ValueError as error:  # the text itself is not at hand
        missing = str(error)
    if not missing:
        text = Text(data)
        src, tgt = (data.sentences("valid", side).lengths + 1 for side in ("src", "tgt"))
        return Lengths(text.plan, (src, tgt), text)
    longest = min(data.corpus.max_length, data.max_tokens - 1)
    src, tgt = assumed_lengths(ASSUMED_PAIRS + ASSUMED_VALID, longest, cli.seed)
    plan = UpdatePlan(src[ASSUMED_VALID:], tgt[ASSUMED_VALID:], data.tokens_per_update, cli.seed)
    return Lengths(plan, (src[:ASSUMED_VALID], tgt[:ASSUMED_VALID]), missing=missing)


def assumed_lengths(pairs: int, longest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of sentences as WMT's might have them, end of sentence included: int64 [pairs] each.

    Sources are drawn from a gamma distribution of shape 2.5, targets lie within some 20% of them.
    """
    rng = np.random.default_rng(seed)
    src = rng.gamma(2.5, min(ASSUMED_PIECES, longest / 2) / 2.5, pairs)
    tgt = src * np.exp(rng.normal(0, 0.2, pairs))
    src_tokens, tgt_tokens = (np.clip(side.round(), 1, longest).astype(np.int64) + 1 for side in (src, tgt))
    return src_tokens, tgt_tokens


def padding_share(plan: UpdatePlan, parts: int, max_tokens: int) -> float:
    """Padding's share of all positions, where an update is split into so many micro-batches; over SAMPLE updates."""
    real = padded = 0
    for n in np.unique(np.linspace(0, plan.updates_per_epoch - 1, SAMPLE).astype(int)).tolist():
        for ids in plan.split(plan.update(n), parts, max_tokens):
            lengths = plan.src_lengths[ids], plan.tgt_lengths[ids]
            real += sum(int(side.sum()) for side in lengths)
            padded += max(1, len(ids)) * sum(int(side.max(initial=1)) for side in lengths)
    return 1 - real / padded


def plan_command(args: Sequence[str]) -> int:
    """Print what a run will take."""
    parser = argparse.ArgumentParser(
        "lit-transformer plan",
        allow_abbrev=False,
        description="What the run that `fit` would train with the same --config files and keys will take: parameters, "
        "micro-batches, memory, FLOPs, hours. Nothing is prepared, kept or written.",
    )
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--measure", action="store_true", help="train for a moment on this machine, for its hours")
    rate.add_argument(
        "--tokens_per_second", type=float, metavar="N", help="hours at N target tokens a second of all processes"
    )
    options, rest = parser.parse_known_args(args)
    if options.tokens_per_second is not None and not options.tokens_per_second > 0:
        raise ValueError(f"--tokens_per_second {options.tokens_per_second}: must be above 0")
    cli = ExperimentCLI(rest, "plan", build=False)
    found = find_lengths(cli)
    if options.measure and not found.text:
        raise ValueError(f"--measure trains on the text, which is not prepared ({found.missing}): `prepare` it first")
    counts = training_counts(found.plan, cli.model.config, cli.trainer_config.max_steps)
    parts = [_run(cli, found), _updates(cli, found, counts), _memory(cli, found), _flops(counts)]
    if options.measure and found.text:
        parts.append(_measured(ExperimentCLI(rest, "plan"), found.text, found.valid, counts))
    else:
        parts.append(_at_rate(counts, cli.trainer_config.max_steps, options.tokens_per_second))
    print("\n\n".join("\n".join(lines) for lines in parts))
    return 0


def _run(cli: ExperimentCLI, found: Lengths) -> list[str]:
    lit, data = cli.model, cli.datamodule
    lines = [
        f"departs from the paper's base in: {', '.join(cli.departures()) or 'nothing'}",
        f"parameters: {lit.model.num_parameters:,}, exact, with {lit.config.vocab_size:,} entries of the vocabulary",
    ]
    if found.text:
        return [*lines, f"text: {len(found.plan.src_lengths):,} training pairs, prepared; tokens and FLOPs are exact"]
    src, tgt = found.plan.src_lengths.mean(), found.plan.tgt_lengths.mean()
    return [
        *lines,
        f"text: NOT PREPARED: {found.missing}",
        f"LENGTHS ARE ASSUMED: {src:.0f} source and {tgt:.0f} target tokens in the mean, at most "
        f"{found.plan.src_lengths.max():,}; updates of data.tokens_per_update",
        f"= {data.tokens_per_update:,} are as given. After `prepare` the same command counts.",
    ]


def _world_size(cli: ExperimentCLI) -> int:
    """Processes as the configuration names them; 1 where that is left to the machine."""
    devices = cli.trainer_config.devices
    if isinstance(devices, str):  # "8" typed on the command line is how many, "0,1" is which
        devices = int(devices) if devices.isdigit() else devices.count(",") + 1
    count = len(devices) if isinstance(devices, list) else devices
    return max(1, count) * cli.trainer_config.num_nodes


def _updates(cli: ExperimentCLI, found: Lengths, counts: Mapping[str, Any]) -> list[str]:
    max_tokens = cli.datamodule.max_tokens
    epochs = f", {counts['epochs']:,.1f} epochs" if found.text else ""
    lines = [
        f"updates: {cli.trainer_config.max_steps:,}{epochs}",
        f"tokens: {counts['src_tokens']:,} source, {counts['tgt_tokens']:,} target",
        f"each update with data.max_tokens = {max_tokens:,}:",
        "  processes  micro-batches of each  padding",
    ]
    alone = found.plan.accumulation(1, max_tokens)
    for world in sorted({*PROCESSES, _world_size(cli)}):
        accumulation = -(-alone // world)
        padding = padding_share(found.plan, world * accumulation, max_tokens)
        lines.append(f"  {world:>9}  {accumulation:>21}  {padding:>7.1%}")
    return lines


def _memory(cli: ExperimentCLI, found: Lengths) -> list[str]:
    if found.text:
        ids = found.text.largest(_world_size(cli), cli.trainer_config.max_steps)
        shape = len(ids), int(found.plan.src_lengths[ids].max()), int(found.plan.tgt_lengths[ids].max())
    else:
        width = min(round(found.plan.src_lengths.mean()), cli.datamodule.max_tokens)
        shape = cli.datamodule.max_tokens // width, width, width
    on_gpu = {"auto": torch.cuda.is_available(), "cpu": False}.get(cli.trainer_config.accelerator, True)
    device = "cuda" if on_gpu else "cpu"
    full, mixed = (
        memory(cli.model.config, cli.model.label_smoothing, *shape, bf16=bf16, device=device) for bf16 in (False, True)
    )
    rows = {
        "weights": "weights",
        "gradients": "gradients",
        "Adam's two moments": "moments",
        "kept for the backward pass": "activations",
        "temporaries at the fullest moment": "temporaries",
        "together": "total",
    }
    shared = f"several processes (ddp): {full.gradients / _MIB:,.0f} MiB more in each, to exchange gradients"
    if cli.trainer_config.strategy == "fsdp":
        shared = "trainer.strategy = fsdp divides weights, gradients and moments by the number of processes"
    return [
        f"memory of a process in MiB, at {shape[0]} sentences of {shape[1]} source and {shape[2]} target tokens, "
        f"{'its largest micro-batch' if found.text else 'data.max_tokens full'}:",
        f"  {'':<34}{'32-true':>10}{'bf16-mixed':>12}",
        *(
            f"  {title:<34}{getattr(full, name) / _MIB:>10,.0f}{getattr(mixed, name) / _MIB:>12,.0f}"
            for title, name in rows.items()
        ),
        f"  {shared}",
        f"  counted from the tensors of a CPU's kernels, the loss in the pieces of a {'GPU' if on_gpu else 'CPU'}; a "
        "GPU's context, workspaces and rounding come on top",
    ]


def _flops(counts: Mapping[str, Any]) -> list[str]:
    paper = {name: row["ende_flops"] for name, row in read_table2().items() if name.startswith("Transformer")}
    said = ", ".join(f"{name} {flops}" for name, flops in paper.items())
    return [
        f"FLOPs: {counts['flops']:.2e}, of all matrix products without padding, backward twice forward",
        f"  the paper's Table 2: {said or 'not at hand, results/paper_table2.csv is not beside the package'}",
        "  (another measure: hours x GPUs x the TFLOPS that a GPU sustains; ours counts the work itself)",
    ]


def _at_rate(counts: Mapping[str, Any], updates: int, rate: float | None) -> list[str]:
    if rate is None:
        return ["hours: --tokens_per_second N for a known rate (`fit` shows its own), --measure for this machine's"]
    seconds = counts["tgt_tokens"] / rate
    return [
        f"hours: {in_hours(seconds / 3600)} at {rate:,.0f} target tokens a second, {seconds / updates:.3f} s an update "
        "(the paper on 8 P100: base 0.4 s,",
        "  big 1.0 s); validations, checkpoints and start-up come on top",
    ]


def _measured(
    cli: ExperimentCLI, text: Text, valid: tuple[np.ndarray, np.ndarray], counts: Mapping[str, Any]
) -> list[str]:
    threads = torch.get_num_threads()
    speed = measure(cli, text, threads)
    hours = speed.hours(counts["flops"] + validation_flops(cli, *valid), cli.trainer_config.max_steps)
    on = f"{speed.processes} x {speed.device}" + (f", threads: {threads}" if speed.device == "CPU" else "")
    return [
        f"hours: {in_hours(hours)} on {on}, from a moment of training here, validation losses included;",
        "  beam search, checkpoints, start-up and communication between processes come on top",
    ]
