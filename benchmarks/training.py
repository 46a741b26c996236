"""Training speed beside peers and beside the floor of the matrix products.

python benchmarks/training.py --size base         about 15 minutes; --quick: a few
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from contest import HERE, WORK, Contestant, environment, machine, median_ratio, race, report, speed_by, table
from work import SIZES, MadeData, made_store, write_batches

HUGGINGFACE = ("huggingface", "torch==2.13.0", "transformers==5.24.0 accelerate==1.15.0")
JOEYNMT = ("joeynmt", "torch==2.13.0", "joeynmt==2.3.0 importlib_metadata")
OURS = "this project (Trainer)"
FLOOR = "floor (matrix products)"
CONTESTANTS = {
    OURS: ("contestant_ours.py", "train", None),
    "nn.Transformer, loop": ("contestant_torch.py", "train", None),
    "Marian, loop": ("contestant_marian.py", "train", HUGGINGFACE),
    "Marian, Seq2SeqTrainer": ("contestant_marian.py", "trainer", HUGGINGFACE),
    "JoeyNMT, its step": ("contestant_joeynmt.py", "train", JOEYNMT),
    FLOOR: ("contestant_floor.py", "floor", None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--tokens", type=int, default=2000, help="target tokens of an update, about")
    parser.add_argument("--pairs", type=int, default=200_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu where others share the machine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, help="in each round; when not given, some seconds' worth")
    parser.add_argument("--only", nargs="*", default=list(CONTESTANTS), help="contestants, by the start of their names")
    parser.add_argument("--before", help="folder of another version of this project, to measure beside this one")
    parser.add_argument("--quick", action="store_true", help="2 rounds of a third of that, 20,000 pairs")
    given = parser.parse_args()
    given.updates = given.updates or {"base": 2, "small": 8, "mini": 25}[given.size]
    if given.quick:
        given.rounds, given.updates, given.pairs = 2, max(1, given.updates // 3), 20_000
    WORK.mkdir(exist_ok=True)
    size, store, batches = SIZES[given.size], WORK / f"store-{given.size}", WORK / f"batches-{given.size}.json"
    made_store(store, size["vocab_size"], given.pairs)
    about = write_batches(
        MadeData(store, size["vocab_size"], given.tokens), (given.rounds + 1) * given.updates, batches
    )
    task = {"size": size, "store": str(store), "batches": str(batches), "tokens": given.tokens}
    task["updates"] = given.updates

    contestants = []
    for name, (script, what, packages) in CONTESTANTS.items():
        if any(name.startswith(start) for start in given.only):
            python = environment(*packages) if packages else sys.executable
            command = [python, str(HERE / script), what, json.dumps(task), str(given.threads)]
            contestants.append(Contestant(name, command, given.threads))
            if name == OURS and given.before:
                contestants.append(Contestant("before", command, given.threads, {"PYTHONPATH": given.before}))
    found = race(contestants, given.rounds)

    speed = speed_by(given.clock)
    ours, floor = (name in found for name in (OURS, FLOOR))
    rows = []
    for name in sorted(found, key=lambda name: -statistics.median(map(speed, found[name]))):
        share = f"{median_ratio(found, name, FLOOR, speed):.2f}" if floor else ""
        ratio = f"{median_ratio(found, OURS, name, speed):.2f}" if ours else ""
        rows.append((name, f"{statistics.median(map(speed, found[name])):,.0f}", share, ratio))
    text = (
        f"{machine(given.threads)}; {given.clock} time. "
        f"{about['sentences']:.0f} sentences, {about['tokens']:,.0f} target tokens an update, "
        f"{about['padding']:.1%} padding; medians over {given.rounds} rounds of {given.updates} update(s), contestants "
        "in turn.\n\n"
    )
    text += table(["contestant", "target tokens/s", "share of the floor", "this project is faster by"], rows)
    name = f"training-{given.size}" + (f"-{given.threads}threads" if given.threads > 1 else "")
    report(
        name,
        f"Training, {given.size} model",
        text,
        {"about": about, "options": vars(given) | {"before": bool(given.before)}, "found": found},
        not given.quick,
    )


if __name__ == "__main__":
    main()
