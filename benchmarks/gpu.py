"""The paper's base and big models on one GPU: tokens per second, share of the card's matrix rate, peak memory.

`fit` itself trains some hundred updates, on text in WMT14's layout (a Parquet folder; some thousand sentences are
enough); the rate is that of the second half of the updates, as `fit` logs it.  The card's own rate is measured on large
square products in the same precision.  A few minutes, most of them for scoring the validation text.

    python benchmarks/gpu.py PARQUET_FOLDER [--updates 300] [--precision bf16-mixed] [--compile] [--vocab_size 8000]
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

CONF = Path(__file__).resolve().parents[1] / "conf"
DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}
FIT = """
import json, sys, torch
from lit_transformer.__main__ import main
status = main(sys.argv[2:])
gpu = torch.cuda.is_available()
open(sys.argv[1], "w").write(json.dumps(torch.cuda.max_memory_allocated() if gpu else None))
sys.exit(status)
"""


def matrix_rate(device: str, dtype: torch.dtype, size: int = 8192) -> float:
    """FLOPs per second of the card on products of square matrices, the best of ten."""
    size = size if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def train(model: str, given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Target tokens per second, FLOPs per second and peak memory of a run of "base" or "big"."""
    run = folder / model
    names = ["base", *(["big"] if model == "big" else []), *(["gpu1"] if torch.cuda.is_available() else [])]
    keys = {
        "data.dataset": given.text, "data.root": folder / "data", "data.vocab_size": given.vocab_size,
        "trainer.max_steps": given.updates, "trainer.precision": given.precision, "trainer.log_every_n_steps": 10,
        "model.bleu_every": 0, "model.validate_every": given.updates, "run.checkpoint_every": given.updates,
        "model.compile": str(given.compile).lower(), "run.dir": run,
    }  # fmt: skip
    configs = [word for name in names for word in ("--config", str(CONF / f"{name}.yaml"))]
    words = ["fit", *configs, *(str(word) for key, value in keys.items() for word in (f"--{key}", value)), *given.more]
    subprocess.run([sys.executable, "-c", FIT, str(folder / "memory"), *words], check=True)
    result = json.loads((run / "result.json").read_text())
    with open(max(run.glob("csv/version_*/metrics.csv")), newline="") as lines:
        rates = [float(row["tgt_tokens_per_second"]) for row in csv.DictReader(lines) if row["tgt_tokens_per_second"]]
    rate = statistics.median(rates[len(rates) // 2 :])
    return {
        "parameters": result["parameters"],
        "tokens": rate,
        "flops": rate * result["flops"] / result["tgt_tokens"],
        "memory": json.loads((folder / "memory").read_text()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a folder in WMT14's layout")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--precision", choices=DTYPES, default="bf16-mixed")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--vocab_size", type=int, default=8000, help="as much as the text is enough for")
    given, given.more = parser.parse_known_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    rate = matrix_rate(device, DTYPES[given.precision])
    print(f"{card}, {given.precision}: {rate / 1e12:,.1f} TFLOPS on square products\n")
    print("| model | parameters | target tokens/s | TFLOPS | share of the card's | peak memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        for model in ("base", "big"):
            found = train(model, given, Path(folder))
            memory = f"{found['memory'] / 2**30:,.1f} GiB" if found["memory"] else ""
            print(
                f"| {model} | {found['parameters']:,} | {found['tokens']:,.0f} | {found['flops'] / 1e12:,.2f} | "
                f"{found['flops'] / rate:.2f} | {memory} |"
            )


if __name__ == "__main__":
    main()
