"""The parser of a run: LightningCLI with this project's classes, and nothing that the plan of updates decides."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import yaml
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy

from lit_transformer.checkpoint import AtomicCheckpointIO, list_checkpoints
from lit_transformer.data import TranslationDataModule
from lit_transformer.module import LitTransformer
from lit_transformer.ranks import TIMEOUT_SECONDS, slurm
from lit_transformer.store import write_atomic
from lit_transformer.strategy import ShardedStrategy
from lit_transformer.transformer import TransformerConfig

# Where a run differs in these, it is not the same run; everything else may change at a resume.
_NOT_THE_EXPERIMENT = {
    "model.validate_every",
    "model.bleu_every",
    "model.bleu_sentences",
    "model.compile",
    "data.max_tokens",
    "data.num_workers",
    "data.root",
    "data.train",  # files are known by their content: a checkpoint refuses other text
    "data.valid",
    "data.test",
    "data.dataset",
}
_ALSO_THE_EXPERIMENT = {"trainer.precision", "trainer.gradient_clip_val", "run.average"}
# Beside the model's shape, what the paper says of a training.
_RECIPE = {
    "model": ("label_smoothing", "warmup", "warmup_start", "lr_factor"),
    "data": ("vocab_size", "tokens_per_update"),
    "trainer": ("max_steps", "gradient_clip_val"),
}


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and what it leaves behind.

    Args:
        dir: the run's folder; the same command with the same folder goes on where it was.
        study, variant: names under which results compare it.
        checkpoint_every: updates between checkpoints; 1,000 where no checkpoint_minutes are given.
        checkpoint_minutes: minutes of training between checkpoints instead (section 6.1: 10), over all sessions of a
            run; which updates these are depends on the machine.
        keep_checkpoints: the newest so many stay.
        average: score the average of the newest so many (section 6.1: 5 for base, 20 for big; Table 3: none).
        wandb: track in Weights & Biases too; "online" needs a key and is "offline" without one.
        wandb_project: its project there.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    dir: str = "runs/default"
    study: str = ""
    variant: str = ""
    checkpoint_every: int | None = None
    checkpoint_minutes: float | None = None
    keep_checkpoints: int = 5
    average: int = 1
    wandb: Literal["none", "offline", "online"] = "none"
    wandb_project: str = "lit-transformer"

    def __post_init__(self) -> None:
        if self.checkpoint_minutes is None:
            if self.checkpoint_every is None:
                object.__setattr__(self, "checkpoint_every", 1000)
        elif self.checkpoint_every is not None:
            raise ValueError(
                f"run.checkpoint_every = {self.checkpoint_every}, run.checkpoint_minutes = {self.checkpoint_minutes}: "
                "updates or the clock decide; set the other one to null"
            )
        elif not 0 < self.checkpoint_minutes < math.inf:
            raise ValueError(f"run.checkpoint_minutes = {self.checkpoint_minutes}: must be a number above 0")
        for name in ("checkpoint_every", "keep_checkpoints", "average"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"run.{name} = {getattr(self, name)}: must be at least 1")
        if self.average > self.keep_checkpoints:
            raise ValueError(
                f"run.average = {self.average}: run.keep_checkpoints = {self.keep_checkpoints} keeps fewer; raise it"
            )


@dataclass(frozen=True)
class TrainerConfig:
    """What a user decides about Lightning's Trainer; the rest follows from the plan of updates.

    Args:
        accelerator: "cpu", "gpu", "auto", as in Lightning.
        strategy: "auto"; "ddp"; "fsdp", which also divides weights and optimiser states among the processes; or a
            strategy's class with its own arguments.
        devices: how many devices of a node, or which.
        num_nodes: how many nodes.
        timeout: seconds that processes wait for each other before the run ends with an error.
        precision: of the computation; weights stay in float32 with the mixed ones.
        max_steps: optimiser updates to train.
        gradient_clip_val: largest norm of the global gradient; the paper does not clip.
        log_every_n_steps: updates between logged values.
        deterministic: let torch use only algorithms that give the same bits each time.
        profiler: print where the time went.

    Raises:
        ValueError: names the field, its value and the rule it breaks.
    """

    accelerator: str = "auto"
    strategy: str | Strategy = "auto"
    devices: list[int] | str | int = "auto"
    num_nodes: int = 1
    timeout: int = TIMEOUT_SECONDS
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true"] = "32-true"
    max_steps: int = 100_000
    gradient_clip_val: float | None = None
    log_every_n_steps: int = 50
    deterministic: bool = False
    profiler: Literal["simple", "advanced"] | None = None

    def __post_init__(self) -> None:
        for name in ("max_steps", "log_every_n_steps", "timeout", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} = {getattr(self, name)}: must be at least 1")
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            raise ValueError(f"trainer.gradient_clip_val = {self.gradient_clip_val}: must be above 0, or null")
        if self.strategy == "fsdp" and self.precision in ("16-mixed", "64-true"):
            raise ValueError(
                f"trainer.precision = {self.precision}: trainer.strategy = fsdp takes 32-true, bf16-mixed or bf16-true"
            )

    def build(self, **ours: Any) -> pl.Trainer:
        """A Trainer that leaves batches, checkpoints and progress to this project."""
        try:
            return self._trainer(**ours)
        except (MisconfigurationException, TypeError) as error:
            given = ", ".join(f"{name} = {getattr(self, name)}" for name in ("accelerator", "strategy", "devices"))
            raise ValueError(
                f"trainer: {' '.join(str(error).split())} (given {given}; there must be such devices, at least one, "
                'and the strategy is "auto", "ddp" or "fsdp")'
            ) from error

    def _trainer(self, **ours: Any) -> pl.Trainer:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "timeout"}
        if self.strategy == "fsdp":
            given["strategy"] = ShardedStrategy()
        trainer = pl.Trainer(
            **given,
            plugins=[AtomicCheckpointIO(), *slurm()],
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **ours,
        )
        # Lightning's handlers save in the middle of an update, and wait for other ranks while they handle a signal.
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        if isinstance(self.strategy, str) and hasattr(trainer.strategy, "_timeout"):
            trainer.strategy._timeout = timedelta(seconds=self.timeout)
        return trainer


class ExperimentCLI(LightningCLI):
    """Parses a run's configuration: `--config` files, the last wins, then single keys.

    Args:
        args: as typed after the command's name.
        command: shown in messages.
        build: make the model and data; False only parses and checks.
    """

    model: LitTransformer
    datamodule: TranslationDataModule

    def __init__(self, args: Sequence[str], command: str = "fit", build: bool = True) -> None:
        self._build = build
        super().__init__(
            LitTransformer,
            TranslationDataModule,
            save_config_callback=None,
            seed_everything_default=1,
            parser_kwargs={
                "prog": f"lit-transformer {command}",
                "description": "Every key can stand in a --config file as well.",
                "exit_on_error": False,
                "allow_abbrev": False,  # or a misspelt key is taken for a longer one
            },
            # At the end, or it would print what stands before it only.
            args=sorted(args, key=lambda arg: arg.startswith("--print_config")),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # What one key decides is no key a second time: the vocabulary is the data's, the seed stands at the top.
        parser.add_class_arguments(RunConfig, "run")
        parser.add_class_arguments(TranslationDataModule, "data", sub_configs=True, instantiate=False, skip={"seed"})
        parser.add_class_arguments(
            LitTransformer, "model", sub_configs=True, instantiate=False, skip={"seed", "vocab_size"}
        )
        parser.add_class_arguments(TrainerConfig, "trainer", sub_configs=True)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            raise ValueError(f"{error}; `lit-transformer fit --help` lists the keys") from error

    def instantiate_classes(self) -> None:
        init = self.parser.instantiate(self.config)
        self.run: RunConfig = init["run"]
        self.trainer_config: TrainerConfig = init["trainer"]
        self.folder = Path(self.run.dir)
        self.seed: int = self.config["seed_everything"]
        if isinstance(self.seed, bool) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed_everything = {self.seed}: must be a whole number from 0, for runs to be repeated")
        data, model = vars(init["data"]), vars(init["model"])
        self.datamodule = TranslationDataModule(**data, seed=self.seed)
        # Without memory where nothing is to be trained: that checks a configuration of any size at once.
        with torch.device("cpu" if self._build else "meta"):
            if self._build:
                pl.seed_everything(self.seed, verbose=False)
            self.model = LitTransformer(**model, seed=self.seed, vocab_size=self.datamodule.corpus.vocab_size)

    def _set_seed(self) -> None:
        """Done where the model is built, so that nothing in between can use up random numbers."""

    @property
    def plain(self) -> dict[str, Any]:
        """The resolved configuration as plain values, as it would stand in a file."""
        return yaml.safe_load(self.parser.dump(self.config, skip_unset=False, format="yaml"))

    def recipe(self) -> dict[str, Any]:
        """What makes up the model and its training, by the names of the fields."""
        return asdict(self.model.config) | {
            name: self.config[group][name] for group, names in _RECIPE.items() for name in names
        }

    def paper_recipe(self) -> dict[str, Any]:
        """The paper's base in the same fields: the defaults."""
        paper = self.parser.get_defaults()
        return asdict(TransformerConfig()) | {
            name: paper[group][name] for group, names in _RECIPE.items() for name in names
        }

    def departures(self) -> list[str]:
        """What differs from the paper's base model and training, each with the paper's value in brackets."""
        ours, paper = self.recipe(), self.paper_recipe()
        return [f"{name} = {ours[name]} ({paper[name]})" for name in paper if ours[name] != paper[name]]

    def refuse_another_experiment(self) -> None:
        """Raises ValueError where the folder holds a run with another value of a field that makes the experiment."""
        path, result = self.folder / "config.yaml", self.folder / "result.json"
        before = None
        if path.is_file() and (result.is_file() or list_checkpoints(self.folder / "checkpoints")):
            before = _read_config(path)
        elif result.is_file():
            with contextlib.suppress(ValueError, KeyError):  # a damaged result is refused where it is read
                before = json.loads(result.read_text(encoding="utf-8"))["config"]
        if before:  # until there is a checkpoint, nothing is decided
            old, new = experiment(before), experiment(self.plain)
            if key := first_difference(old, new):
                raise ValueError(
                    f"{self.folder} holds a run with {key} = {old.get(key)}, this command has {new.get(key)}: "
                    "another experiment needs another --run.dir"
                )

    def keep_config(self) -> None:
        """Save the configuration with the run."""
        write_atomic(
            self.folder / "config.yaml", self.parser.dump(self.config, skip_unset=False, format="yaml").encode()
        )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        config, reason = None, " ".join(str(error).split())[:120]
    else:
        reason = "no keys in it"
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged ({reason}): remove it, and the same command writes it anew")
    return config


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


@functools.cache
def _defaults() -> dict[str, Any]:
    return _flat(resolve([]))


def experiment(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a resolved configuration that make it the experiment it is, with their values.

    Where it was resolved by a version that did not have some key yet, the run did what the default does.
    """
    flat = _defaults() | _flat(config)
    return {
        key: value
        for key, value in flat.items()
        if key not in _NOT_THE_EXPERIMENT
        and (key in _ALSO_THE_EXPERIMENT or key.split(".")[0] in ("model", "data", "seed_everything"))
    }


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """The first key, in the order of the alphabet, that two flat configurations do not share with its value."""
    return next((key for key in sorted(one.keys() | other.keys()) if one.get(key) != other.get(key)), None)


def resolve(args: Sequence[str]) -> dict[str, Any]:
    """What `fit` would run with these arguments, as plain values; nothing is built.

    Raises:
        ValueError: an unknown key, a value of the wrong kind, or one that breaks a rule.
    """
    return ExperimentCLI(args, "fit", build=False).plain
