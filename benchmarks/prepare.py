"""Preparing text of WMT14's size: time, memory, and encoding beside sentencepiece alone on the same cores.

Synthetic text (wmt_like.py) is written where it is not there yet, prepared by the command that a user types, and
opened again as `fit` does.  sentencepiece alone encodes some of the same sentences, one process on each core, before
and after: the ratio is of one run.

    python benchmarks/prepare.py FOLDER --pairs 4500000 [--words EN DE] [--parquet] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path

import sentencepiece
import wmt_like

from lit_transformer.shards import processes

ALONE_SENTENCES = 200_000  # that each process encodes, of each language half
OPEN = """
import json, resource, sys, time
start = time.monotonic()
import numpy as np
from lit_transformer.data import TranslationDataModule, TrainingBatches
data = TranslationDataModule(num_workers=0, tokens_per_update=25000, max_tokens=4096, **json.loads(sys.argv[1]))
imported = time.monotonic()
data.prepare_data()
data.setup("fit")
planned = time.monotonic()
batches = TrainingBatches(data.store, data.plan, 4096, data.plan.accumulation(8, 4096), 0, 8)
batches[0]
first = time.monotonic()
tokens, k = 0, 0
while time.monotonic() < first + 20:
    k += 1
    tokens += int((batches[k].tgt_out != 0).sum())
end = time.monotonic()
print(json.dumps({
    "import seconds": imported - start, "opening and planning seconds": planned - imported,
    "first batch seconds": first - planned, "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    "loader target tokens per second and process": tokens / (end - first),
    "updates in an epoch": data.plan.updates_per_epoch,
}))
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


def prepare(arguments: list[str]) -> dict[str, float]:
    """Seconds of each step, and the most memory that stood at a time."""
    command = [sys.executable, "-m", "lit_transformer", "prepare", *arguments]
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], memory(process.pid))
            time.sleep(0.5)

    threading.Thread(target=watch).start()
    marks = {}
    assert process.stderr is not None
    for line in process.stderr:
        print(line, end="", file=sys.stderr)
        now = time.monotonic() - start
        if "training pairs read\n" in line:
            marks["read and clean"] = now
        elif "so far" in line:
            marks["learn"] = now
        elif "encoded" in line:
            marks.setdefault("first encoded", now)
        elif "kept\n" in line:
            marks["encoded and written"] = now
    if process.wait():
        raise SystemExit("prepare failed")
    return {**marks, "all": time.monotonic() - start, "GB": peak[0] / 2**30}


def encode(model: bytes, texts: list[str]) -> int:
    return sum(map(len, sentencepiece.SentencePieceProcessor(model_proto=model).encode(texts)))


def alone(model: bytes, files: list[Path]) -> float:
    """Sentences per second of sentencepiece on all cores, nothing else done."""
    texts = []
    for file in files:
        with open(file, encoding="utf-8", newline="\n") as lines:
            texts += [line.rstrip("\n") for line in itertools.islice(lines, ALONE_SENTENCES // 2)]
    with multiprocessing.get_context("spawn").Pool(processes()) as pool:
        pool.starmap(encode, [(model, texts[:1000])] * processes())  # started, the model loaded
        start = time.monotonic()
        pool.starmap(encode, [(model, texts)] * processes())
        return len(texts) * processes() / (time.monotonic() - start)


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
    corpus = {
        "source": "files", "src_lang": "en", "tgt_lang": "de", "vocab_size": 37000, "root": str(options.folder / "data"),
        **{split: [str(text / f"{name}.{lang}") for lang in ("en", "de")]
           for split, name in (("train", "train"), ("valid", "validation"), ("test", "test"))},
    }  # fmt: skip
    arguments = [
        word
        for key, value in corpus.items()
        for word in (f"--data.{key}", json.dumps(value) if isinstance(value, list) else str(value))
    ]
    seconds = prepare(arguments)
    model = next((options.folder / "data").glob("files-*/tokenizer.model")).read_bytes()
    files = [Path(file) for file in corpus["train"]]
    rate = alone(model, files)
    # TODO


if __name__ == "__main__":
    main()
