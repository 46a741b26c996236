"""Hand-made results of a study on the disk, and what is built from them."""

import csv
import json
import re
from pathlib import Path

from sacrebleu.metrics import BLEU

from lit_transformer.results import build

SACRE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
SPLIT = "nrefs:1|case:mixed|eff:no|tok:moses-en-0.1.1+compounds|smooth:none|version:2.6.0"
ENDINGS = ("csv", "md", "png", "curves.svg", "html")


def result(variant: str, seed: int = 1, **fields) -> dict:
    """A result.json; keys with dots reach inside, as in {"bleu.score": 3}."""
    found = {
        "study": "s",
        "variant": variant,
        "seed": seed,
        "updates": 1500,
        "averaged": [],
        "parameters": 1234567,
        "vocab_size": 2000,
        "split": "valid",
        "nll": 2.0,
        "perplexity": 7.389,
        "tokens": 4000,
        "unfinished": 0,
        "bleu": {"name": "sacreBLEU", "score": 10.0, "signature": SACRE, "sentences": 700, "note": ""},
        "compound_split_bleu": {
            "name": "compound-split BLEU",
            "score": 90.0,
            "signature": SPLIT,
            "sentences": 700,
            "note": "",
        },
        "chrf": {"name": "chrF", "score": 30.0, "signature": "chrF2", "sentences": 700, "note": ""},
        "beam_size": 4,
        "length_penalty": 0.6,
        "data": "0123456789abcdef",
        "tokenizer": "fedcba9876543210",
        "src_tokens": 90000,
        "tgt_tokens": 80000,
        "epochs": 1.5,
        "flops": 1.5e12,
        "hours": 0.25,
        "device": "CPU",
        "processes": 1,
    }
    for key, value in fields.items():
        *path, last = key.split(".")
        part = found
        for name in path:
            part = part[name]
        part[last] = value
    return found


def scores(variant: str, seed: int, perplexity: float, bleu: float, **fields) -> dict:
    return result(variant, seed, perplexity=perplexity, **{"bleu.score": bleu}, **fields)


def variant(name: str, changes: dict | None = None, paper: str = "", failed: str = "") -> dict:
    return {"name": name, "set": changes or {}, "paper": paper or name, "failed": failed}


class Folder:
    """runs/s with its study and hand-made results, and what is built from it."""

    def __init__(self, root: Path) -> None:
        self.runs, self.out = root / "runs", root / "results"

    def study(self, *variants: dict, seeds: tuple[int, ...] = (1,), **fields) -> None:
        (self.runs / "s").mkdir(parents=True, exist_ok=True)
        described = {"name": "s", "seeds": list(seeds), "variants": list(variants), "resolved": {}, **fields}
        (self.runs / "s" / "study.json").write_text(json.dumps(described), encoding="utf-8")

    def add(self, *found: dict) -> None:
        for one in found:
            file = self.runs / "s" / one["variant"] / f"seed{one['seed']}" / "result.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(one), encoding="utf-8")

    def sentences(
        self, run: dict, hypotheses: list[str], references: list[str], nll: float | list | None = 3.0, **fields
    ) -> None:
        """A run with its outputs, and the scores that follow from them; `fields` are lists of one value a sentence."""
        n = len(hypotheses)
        given = {
            "source": [f"Satz {i}" for i in range(n)],
            "nll": nll if isinstance(nll, list) else [nll] * n,
            "src_tokens": [5] * n,
        }
        given = {"reference": references, "hypothesis": hypotheses, "tgt_tokens": [4] * n, **given, **fields}
        lines = [{key: values[i] for key, values in given.items()} | {"finished": True} for i in range(n)]
        score = BLEU().corpus_score(hypotheses, [references]).score
        self.add({**run, "bleu": {**run["bleu"], "score": score, "sentences": n}})
        folder = self.runs / "s" / run["variant"] / f"seed{run['seed']}"
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"sentences.{run['split']}.jsonl").write_text(text, encoding="utf-8")

    def build(self) -> None:
        self.markdown = build(self.runs, "s", self.out)

    def csv(self) -> dict[str, dict[str, str]]:
        with open(self.out / "s.csv", newline="", encoding="utf-8") as file:
            return {row["variant"]: row for row in csv.DictReader(file)}

    def table(self, number: int = 0) -> dict[str, dict[str, str]]:
        """The rows of a Markdown table, which must have as many cells as its head: 0 the results, 1 what they took."""
        text = (self.out / "s.md").read_text(encoding="utf-8")
        blocks = [block for block in text.split("\n\n") if block.startswith("|")]
        lines = blocks[number].strip("\n").split("\n")
        head, rule, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
        assert all(re.fullmatch(r"-{3,}:?", cell) for cell in rule)
        assert len(head) == len(set(head))
        assert all(len(row) == len(head) for row in (rule, *rows))
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows}

    def files(self) -> dict[str, bytes]:
        found = self.out.iterdir() if self.out.is_dir() else ()
        return {file.name: file.read_bytes() for file in found if "lock" not in file.name}
