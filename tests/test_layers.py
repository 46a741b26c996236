"""Imports go one way: a file may import only from floors below its own."""

import ast
from pathlib import Path

import pytest

import lit_transformer

PACKAGE = Path(lit_transformer.__file__).parent
# What each file may import from the package; the order is that of the floors.
ALLOWED = {
    "tokenizer": set(),
    "store": set(),
    "batching": set(),
    "metrics": set(),
    "progress": set(),
    "curves": set(),
    "signals": set(),
    "ranks": set(),
    "config": set(),
    "kernels": {"tokenizer"},
    "layers": {"config", "kernels"},
    "fused": {"kernels", "layers"},
    "transformer": {"config", "fused", "kernels", "layers", "tokenizer"},
    "checkpoint": {"store"},
    "strategy": {"checkpoint", "transformer"},
    "remote": set(),
    "sources": {"remote"},
    "shards": {"sources", "tokenizer", "store", "signals"},
    "corpus": {"sources", "shards", "tokenizer", "store", "progress"},
    "packed": {"fused", "kernels", "layers", "tokenizer", "transformer"},
    "decode": {"tokenizer", "transformer", "packed"},
    "data": {"sources", "corpus", "tokenizer", "store", "batching", "signals"},
    "evaluation": {"transformer", "strategy", "data", "decode", "metrics", "progress", "sources"},
    "module": {"transformer", "kernels", "strategy", "data", "decode", "metrics", "tokenizer", "evaluation"},
    "callbacks": {"module", "checkpoint", "store", "progress", "ranks", "signals"},
    "translate": {"sources", "module", "checkpoint", "decode", "packed", "tokenizer"},
    "cli": {"module", "data", "checkpoint", "store", "strategy", "transformer", "ranks"},
    "wandb_file": set(),
    "tracking": {"cli", "curves", "store", "progress", "wandb_file"},
    "scoring": {"cli", "evaluation", "batching", "checkpoint", "store", "progress", "transformer"},
    "commands": {
        "tracking", "scoring", "cli", "callbacks", "translate", "module", "checkpoint", "corpus", "decode", "sources",
        "store", "progress", "ranks", "signals",
    },
    "rows": set(),
    "sentences": set(),
    "significance": {"sentences"},
    "legend": {"rows", "sentences", "significance"},
    "table": {"legend", "rows", "sentences", "significance"},
    "table2": {"rows", "table"},
    "score_runs": {
        "table2", "table", "scoring", "cli", "evaluation", "checkpoint", "decode", "store", "progress", "ranks",
    },
    "plots": {"curves", "rows", "table"},
    "report": {"legend", "rows", "sentences", "table"},
    "compare": {"rows", "sentences", "significance", "store"},
    "results": {"rows", "sentences", "table", "plots", "report", "compare", "store"},
    "study": {"cli", "results"},
    "preflight": {"study", "cli", "checkpoint", "store"},
    "speed": {"cli", "module", "data", "tokenizer"},
    "memory": {"kernels", "speed", "transformer"},
    "forecast": {"memory", "speed", "scoring", "cli", "corpus", "batching", "rows", "progress"},
    "plan": {"study", "preflight", "speed", "scoring", "cli", "corpus", "progress"},
    "storage": {"progress"},
    "trials": {"study", "storage", "store"},
    "engine": {"study", "trials", "commands", "curves", "checkpoint", "store", "progress"},
    "sweep": {
        "engine", "preflight", "plan", "trials", "commands", "results", "sources", "corpus", "store", "progress",
        "signals",
    },
    "__main__": {"commands", "score_runs", "forecast", "sweep", "results", "signals"},
    "__init__": {"data", "module", "transformer"},
}  # fmt: skip
# The floor without frameworks: usable where lightning, optuna and wandb are not even imported.
PLAIN = (
    "tokenizer",
    "store",
    "batching",
    "metrics",
    "progress",
    "curves",
    "config",
    "kernels",
    "layers",
    "transformer",
    "packed",
    "remote",
    "sources",
    "shards",
    "corpus",
    "decode",
    "rows",
    "sentences",
    "significance",
    "legend",
    "table",
    "table2",
    "plots",
    "report",
    "compare",
    "results",
)
FRAMEWORKS = {"lightning", "optuna", "wandb", "jsonargparse"}


def imported(name):
    """Top-level modules that a file imports, those of the package without its prefix."""
    own, others = set(), set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            plain = node.module == "lit_transformer"
            names = [f"lit_transformer.{alias.name}" for alias in node.names] if plain else [node.module]
        for module in names:
            head, _, tail = module.partition(".")
            (own if head == "lit_transformer" else others).add(tail if head == "lit_transformer" else head)
    return own, others


def test_every_file_has_its_floor():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_down_only(name):
    assert imported(name)[0] <= ALLOWED[name]


def test_the_floors_have_no_cycle():
    done = set()
    for name, below in ALLOWED.items():
        assert below <= done or name in ("__main__", "__init__"), f"{name} stands before {below - done}"
        done.add(name)


@pytest.mark.parametrize("name", PLAIN)
def test_the_lower_floors_know_no_framework(name):
    assert not imported(name)[1] & FRAMEWORKS


def test_only_cli_knows_lightning_cli_and_only_sweeps_know_optuna():
    text = {path.stem: path.read_text(encoding="utf-8") for path in PACKAGE.glob("*.py")}
    assert {name for name in text if "LightningCLI" in text[name]} == {"cli"}
    assert {name for name in text if "optuna" in imported(name)[1]} == {"storage", "trials", "engine"}


def test_files_stay_readable_in_one_sitting():
    long = {path.name: n for path in PACKAGE.glob("*.py") if (n := len(path.read_text().splitlines())) > 380}
    assert not long
