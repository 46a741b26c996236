"""Preparing text of WMT14's size: time, memory, and encoding beside sentencepiece alone on the same cores.

Synthetic text (wmt_like.py) is written where it is not there yet, prepared by the command that a user types, and
opened again as `fit` does, as one of 8 processes that take batches of 4,096 tokens.  sentencepiece alone encodes some
of the same sentences, one process on each core: the ratio is of one run, by the clock and, for a machine that does
other things too, by CPU time.

    python benchmarks/prepare.py FOLDER --pairs 4500000 [--words EN DE] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import sentencepiece
import wmt_like

from lit_transformer.shards import processes

ALONE_SENTENCES = 400_000  # that each process encodes, half of each language
OPEN = """
import json, resource, sys, time
start = time.monotonic()
from lit_transformer.data import TranslationDataModule, TrainingBatches
imported = time.monotonic()
data = TranslationDataModule(num_workers=0, **json.loads(sys.argv[1]))
data.prepare_data()
data.setup("fit")
batches = TrainingBatches(data.store, data.plan, 4096, data.plan.accumulation(8, 4096), 0, 8)
opened = time.monotonic()
batches[0]
first = time.monotonic()
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
tokens = k = 0
while time.monotonic() < first + 20:
    k += 1
    tokens += int((batches[k].tgt_out != 0).sum())
print(json.dumps({"import": imported - start, "open": opened - imported, "first": first - opened, "GB": memory,
                  "rate": tokens / (time.monotonic() - first)}))
"""


def descendants(pid: int) -> list[int]:
    """The process and all that it has started."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue  # it has just ended
    return found


def memory(pid: int) -> int:
    """Bytes of a process and its descendants, pages that they share counted once."""
    total = 0
    for one in descendants(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        # Pages of files are the system's cache, which it takes back.
        total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem"))) << 10
    return total


def cpu_seconds(pid: int) -> float:
    """What a process and its descendants have computed, those that have ended included."""
    ticks = 0
    for one in descendants(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def prepare(arguments: list[str]) -> dict[str, float]:
    """Seconds of each step, those computed while encoding, and the most memory that stood at a time."""
    command = [sys.executable, "-m", "lit_transformer", "prepare", *arguments]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], memory(process.pid))
            time.sleep(0.5)

    threading.Thread(target=watch).start()
    ends, computed = {"start": 0.0}, {"start": 0.0}
    steps = {"training the tokeniser on": "read", "encoding": "learn", "kept": "encode"}
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        for words, step in steps.items():
            if words in line and step not in ends:
                ends[step], computed[step] = time.monotonic() - start, cpu_seconds(process.pid)
    if process.wait():
        raise SystemExit("prepare failed")
    if "encode" not in ends:
        raise SystemExit(f"{arguments} was prepared before: remove its store")
    names = list(ends)
    seconds = {name: ends[name] - ends[before] for before, name in itertools.pairwise(names)}
    cpu = {f"{name}, CPU": computed[name] - computed[before] for before, name in itertools.pairwise(names)}
    return {**seconds, **cpu, "all": time.monotonic() - start, "GB": peak[0] / 2**30}


def encode(model: bytes, texts: list[str]) -> float:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    start = time.process_time()
    processor.encode(texts)
    return time.process_time() - start


def alone(model: bytes, files: list[Path]) -> tuple[float, float]:
    """Sentences of sentencepiece per second on all cores, nothing else done, and per second computed."""
    texts = []
    for file in files:
        with open(file, encoding="utf-8", newline="\n") as lines:
            texts += [line.rstrip("\n") for line in itertools.islice(lines, ALONE_SENTENCES // 2)]
    with multiprocessing.get_context("spawn").Pool(processes()) as pool:
        pool.starmap(encode, [(model, texts[:1000])] * processes())  # started, the model loaded
        start = time.monotonic()
        computed = pool.starmap(encode, [(model, texts)] * processes())
        sentences = len(texts) * processes()
        return sentences / (time.monotonic() - start), sentences / sum(computed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=4_500_000)
    parser.add_argument("--words", type=Path, nargs=2, metavar=("EN", "DE"))
    parser.add_argument("--output", type=Path, help="JSON")
    options = parser.parse_args()
    text = options.folder / f"text-{options.pairs}"
    if not (text / "done").is_file():
        words = tuple(file.read_text(encoding="utf-8").splitlines() for file in options.words or ()) or ((), ())
        wmt_like.write(text, options.pairs, words, parquet=False)  # type: ignore[arg-type]
        (text / "done").touch()
    names = {"train": "train", "valid": "validation", "test": "test"}
    corpus = {
        "source": "files",
        "src_lang": "en",
        "tgt_lang": "de",
        "vocab_size": 37000,
        "root": str(options.folder / "data"),
        **{split: [str(text / f"{name}.{lang}") for lang in ("en", "de")] for split, name in names.items()},
    }
    arguments = [
        word
        for key, value in corpus.items()
        for word in (f"--data.{key}", json.dumps(value) if isinstance(value, list) else str(value))
    ]
    seconds = prepare(arguments)
    folder = next((options.folder / "data").glob("files-*/meta.json")).parent
    report = json.loads((folder / "meta.json").read_bytes())["report"]
    rate, cpu_rate = alone((folder / "tokenizer.model").read_bytes(), [Path(file) for file in corpus["train"]])
    pairs = report["train"]["read"] - report["train"]["dropped"].get("duplicate", 0)
    busy = seconds["read, CPU"] + seconds["encode, CPU"]
    encoding = 2 * pairs / seconds["encode"]
    again = json.loads(subprocess.run(
        [sys.executable, "-c", OPEN, json.dumps(corpus)], capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip
    rows = {
        "pairs": f"{options.pairs:,}",
        "cores": processes(),
        "read, clean": f"{seconds['read']:.0f} s",
        "learn the tokeniser": f"{seconds['learn']:.0f} s, from {report['tokenizer']['pairs']:,} pairs",
        "encode, write": f"{seconds['encode']:.0f} s",
        "all": f"{seconds['all']:.0f} s",
        "memory, all processes": f"{seconds['GB']:.2f} GB at most",
        "sentencepiece alone": f"{rate:,.0f} sentences/s",
        "encoding, beside it": f"{encoding:,.0f} sentences/s, {encoding / rate:.2f} of it",
        "the same by CPU time": f"{2 * pairs / seconds['encode, CPU'] / cpu_rate:.2f} of it",
        "start, read, clean, encode and write by CPU time": f"{2 * pairs / busy / cpu_rate:.2f} of it",
        "second start: check and plan": f"{again['open']:.1f} s (imports {again['import']:.1f} s before)",
        "second start: first batch": f"{again['first']:.1f} s more",
        "second start: memory": f"{again['GB']:.2f} GB",
        "loader": f"{again['rate']:,.0f} target tokens/s of one process",
    }
    print("\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]))
    if options.output:
        record = {
            "pairs": options.pairs,
            "cores": processes(),
            "seconds": seconds,
            "alone": [rate, cpu_rate],
            "encoding": encoding,
        }
        options.output.write_text(json.dumps({**record, "second start": again}, indent=2) + "\n")


if __name__ == "__main__":
    main()
