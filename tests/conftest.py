"""Small real runs for tests: a corpus of made-up words, a model of a few thousand parameters."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from bench import Bench
from results_folder import Folder, scores, variant

from lit_transformer import results
from lit_transformer.callbacks import Checkpoints
from lit_transformer.checkpoint import AtomicCheckpointIO, list_checkpoints
from lit_transformer.data import TranslationDataModule
from lit_transformer.module import LitTransformer

torch.set_num_threads(1)  # models this small are slower on two, and much slower beside another process

WORDS = [a + b for a in ("ba", "de", "fi", "go", "lu") for b in ("na", "ro", "si", "te")]


def write_corpus(folder: Path, train=200, valid=20, test=20, longest=12, task=lambda words: words, seed=0):
    """Line-aligned files of random word sequences and what `task` makes of them; returns data options."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    options = {"source": "files", "src_lang": "en", "tgt_lang": "en"}
    seen = set()
    for split, n in (("train", train), ("valid", valid), ("test", test)):
        lines = []
        while len(lines) < n:
            words = tuple(rng.choices(WORDS, k=rng.randint(1, longest)))
            if words not in seen or len(words) < 2:
                seen.add(words)
                lines.append(words)
        for side, make in (("src", lambda words: words), ("tgt", task)):
            text = "".join(" ".join(make(list(words))) + "\n" for words in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
        options[split] = [str(folder / f"{split}.src"), str(folder / f"{split}.tgt")]
    return options


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Options of a copy corpus, and a root for its store."""
    folder = tmp_path_factory.mktemp("corpus")
    return {**write_corpus(folder / "text"), "root": str(folder / "data"), "vocab_size": 300, "num_workers": 0}


def make_data(corpus, **options):
    return TranslationDataModule(**{"tokens_per_update": 200, "max_tokens": 400, **corpus, **options})


def make_module(**options):
    small = {"vocab_size": 300, "num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 10}
    torch.manual_seed(options.get("seed", 1))
    return LitTransformer(**{**small, "validate_every": 10**6, "bleu_every": 0, "dropout": 0.0, **options})


def make_trainer(folder=None, every=10**6, keep=5, max_steps=6, callbacks=(), minutes=None, **options):
    """A Trainer as `fit` builds it; with a folder it writes checkpoints there."""
    ours = [Checkpoints(folder, None if minutes else every, keep, minutes=minutes)] if folder else []
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "log_every_n_steps": 1}
    fixed = {
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        max_steps=max_steps,
        callbacks=[*ours, *callbacks],
        plugins=[AtomicCheckpointIO()],
        **{**defaults, **fixed, **options},
    )


def train(corpus, folder=None, data=None, module=None, **trainer):
    """Fit from the newest checkpoint in the folder, if there is one; returns (module, trainer)."""
    data, module = make_data(corpus, **(data or {})), make_module(**(module or {}))
    fitted = make_trainer(folder, **trainer)
    found = list_checkpoints(folder) if folder else []
    fitted.fit(module, datamodule=data, ckpt_path=found[-1][1] if found else None, weights_only=True)
    return module, fitted


class Seen(pl.Callback):
    """What training did, update by update."""

    def __init__(self):
        self.updates, self.rates, self.losses, self.validated, self.micro_batches = [], [], [], [], 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.micro_batches += 1
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.updates.append(trainer.global_step)
            self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            self.losses.append(module.loss_mean.compute().item())

    def on_validation_end(self, trainer, module):
        self.validated.append(trainer.global_step)


# Sweeps


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Started in the background of a script, Python ignores Ctrl-C, and so would every command under test."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def signals() -> Iterator[None]:
    """A sweep in this process changes them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def small_base(tmp_path_factory) -> dict:
    """A configuration of a run that is as small as can be."""
    folder = tmp_path_factory.mktemp("corpus")
    words = {"de": ["der", "hund", "katze", "sieht", "und"], "en": ["the", "dog", "cat", "sees", "and"]}
    for split, first, lines in (("train", 1000, 60), ("valid", 100_000, 8)):
        for language, vocabulary in words.items():
            text = (" ".join(vocabulary[int(digit) % 5] for digit in str(first + 7 * i)) for i in range(lines))
            (folder / f"{split}.{language}").write_text("".join(f"{line}\n" for line in text))
    files = {split: [str(folder / f"{split}.{language}") for language in words] for split in ("train", "valid")}
    return {
        "model": {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2, "warmup": 2},
        "data": {
            "source": "files",
            "src_lang": "de",
            "tgt_lang": "en",
            **files,
            "vocab_size": 300,
            "tokens_per_update": 200,
            "max_tokens": 400,
            "num_workers": 0,
            "root": str(folder / "data"),
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 4, "log_every_n_steps": 1},
        "run": {"checkpoint_every": 2},
    }


@pytest.fixture
def bench(tmp_path, small_base, signals) -> Iterator[Bench]:
    bench = Bench(tmp_path, small_base)
    yield bench
    bench.kill()


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def whole(folder) -> Folder:
    """Rows of every kind: two seeds, one seed, none, one that the paper does not have, one that failed."""
    folder.study(
        variant("base"),
        variant("one-head", {"num_heads": 1}, "A-h1"),
        variant("late", {"num_layers": 1}, "C-N2"),
        variant("half", {"d_ff": 256, "trainer.max_steps": 9}, "C-ff1024"),
        variant("own", {"warmup": 8}),
        variant("broken", {"d_model": 4096}, "C-d1024", "exit status 1: out of memory"),
        seeds=(1, 2),
    )
    folder.add(
        scores("base", 1, 10.0, 20.0, hours=1.0),
        scores("base", 2, 12.0, 23.0, hours=2.0),
        scores("one-head", 1, 14.5, 18.0),
        scores("one-head", 2, 15.5, 18.5),
        scores("half", 1, 11.25, 21.5, parameters=7654321, updates=9),
        scores("own", 2, 9.0, 25.0),
    )
    folder.build()
    return folder


@pytest.fixture
def unplotted(monkeypatch) -> None:
    """For many small tables: a plot takes longer than all the rest."""
    monkeypatch.setattr(results, "differences", lambda table: b"")
    monkeypatch.setattr(results, "learning_curves", lambda rows: b"")
