"""Decoding speed beside peers: beam 4, alpha 0.6, the same weights, sources of WMT-like lengths.

python benchmarks/decoding.py        about 15 minutes; --quick: a few
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import numpy as np
from contest import HERE, WORK, Contestant, environment, machine, median_ratio, race, report, speed_by, table
from training import HUGGINGFACE, JOEYNMT
from work import EOS_ID, SIZES, SPECIAL, copying_model, lengths, save_weights

CTRANSLATE2 = ("ctranslate2", "ctranslate2==4.8.0")
OURS = "this project"
FASTEST = "CTranslate2, float32"
CONTESTANTS = {
    OURS: ("contestant_ours.py", "decode", None),
    "this project, int8": ("contestant_ours.py", "decode-int8", None),
    "Marian, generate": ("contestant_marian.py", "decode", HUGGINGFACE),
    "JoeyNMT, search": ("contestant_joeynmt.py", "decode", JOEYNMT),
    FASTEST: ("contestant_ctranslate2.py", "float32", CTRANSLATE2),
    "CTranslate2, int8": ("contestant_ctranslate2.py", "int8_float32", CTRANSLATE2),
}
TASKS = {"batch 1": (1, 8), "batch 32": (32, 32), "file": (0, 128)}  # rows of a batch, sources of a turn
ROUNDS_OF_FILES = 2  # at most
NOT_IN_FILES = "JoeyNMT"  # without a cache it takes minutes for each batch of a file


def agreement(outputs: list[list[int]], others: list[list[int]]) -> float:
    return statistics.mean(one == other for one, other in zip(outputs, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu where others share the machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), help="contestants, by the start of their names")
    parser.add_argument("--before", help="folder of another version of this project, to measure beside this one")
    parser.add_argument("--quick", action="store_true", help="2 rounds, files of 64 sentences")
    given = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    size, weights = SIZES[given.size], WORK / f"weights-{given.size}.npz"
    save_weights(copying_model(size), weights)
    if given.quick:
        given.rounds = 2
    texts, values = [], {}
    for name in given.tasks:
        batch, number = TASKS[name]
        number = 64 if given.quick and not batch else number
        rounds = given.rounds if batch else min(given.rounds, ROUNDS_OF_FILES)
        sources = WORK / f"sources-{number}.json"
        rng = np.random.default_rng(2)
        calls = [
            [[*map(int, rng.integers(SPECIAL, size["vocab_size"], n - 1)), EOS_ID] for n in lengths(number, rng)[0]]
            for _ in range(rounds + 1)
        ]
        sources.write_text(json.dumps(calls))
        task = {"size": size, "weights": str(weights), "sources": str(sources), "batch": batch}
        contestants = []
        for contestant, (script, what, packages) in CONTESTANTS.items():
            if not batch and contestant.startswith(NOT_IN_FILES):
                continue
            if any(contestant.startswith(start) for start in given.only):
                python = environment(*packages) if packages else sys.executable
                command = [python, str(HERE / script), what, json.dumps(task), str(given.threads)]
                contestants.append(Contestant(contestant, command, given.threads))
                if contestant == OURS and given.before:
                    contestants.append(Contestant("before", command, given.threads, {"PYTHONPATH": given.before}))
        found = race(contestants, rounds)
        texts.append(f"### {name}\n\n" + summary(found, given.clock))
        for answers in found.values():
            for answer in answers:
                del answer["outputs"]
        values[name] = found
    text = (
        f"{machine(given.threads)}; {given.clock} time. "
        f"Beam 4, alpha 0.6, at most 50 tokens more than the source; a file is {number} "
        f"sentences in their order, each contestant sorts them by length itself; medians over {given.rounds} rounds "
        f"({min(given.rounds, ROUNDS_OF_FILES)} of files), contestants in turn.\n\n" + "\n\n".join(texts)
    )
    name = f"decoding-{given.size}" + (f"-{given.threads}threads" if given.threads > 1 else "")
    report(
        name,
        f"Decoding, {given.size} model",
        text,
        {"options": vars(given) | {"before": bool(given.before)}, "found": values},
        not given.quick,
    )


def summary(found: dict[str, list[dict[str, Any]]], clock: str) -> str:
    speed = speed_by(clock)
    rows = []
    for name in sorted(found, key=lambda name: -statistics.median(map(speed, found[name]))):
        same = ratio = ""
        if OURS in found:
            ratio = f"{median_ratio(found, OURS, name, speed):.2f}"
            pairs = zip(found[name], found[OURS], strict=True)
            same = f"{statistics.mean(agreement(a['outputs'], b['outputs']) for a, b in pairs):.0%}"
        rows.append((name, f"{statistics.median(map(speed, found[name])):,.0f}", ratio, same))
    return table(["contestant", "generated tokens/s", "this project is faster by", "outputs equal to ours"], rows)


if __name__ == "__main__":
    main()
