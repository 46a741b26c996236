"""Where curves go: CSV files always, Weights & Biases where a run asks for it; it never prompts and never blocks."""

from __future__ import annotations

import netrc
import os
import urllib.parse
import uuid
from typing import Any

from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from lit_transformer.cli import ExperimentCLI
from lit_transformer.progress import say
from lit_transformer.store import write_atomic


def loggers(cli: ExperimentCLI) -> list[Logger]:
    found: list[Logger] = [CSVLogger(cli.folder, name="csv")]
    if cli.run.wandb == "none":
        return found
    try:
        import wandb
    except ImportError:
        say("wandb is not installed: going on without it")
        return found
    online = cli.run.wandb == "online" and _wandb_key_exists()
    if cli.run.wandb == "online" and not online:
        say("wandb: no key found, writing offline; `wandb sync` sends it later")
    identity = cli.folder / "wandb_id"
    if not identity.is_file() and not _get_rank():
        write_atomic(identity, uuid.uuid4().hex[:8].encode())
    options: dict[str, Any] = {
        "name": f"{cli.run.variant or cli.folder.name}-seed{cli.seed}",
        "save_dir": cli.folder,
        "project": cli.run.wandb_project,
        "group": cli.run.study or None,
        "id": identity.read_text() if identity.is_file() else None,  # the same run after a resume
        "resume": "allow",
        "config": cli.plain,
        "settings": wandb.Settings(init_timeout=30),
    }
    logger = WandbLogger(offline=not online, **options)
    if online and not _get_rank():
        try:
            _ = logger.experiment  # connects now, so that no training waits for a network that is not there
        except wandb.errors.Error as error:
            say(f"wandb: {error}; writing offline, `wandb sync` sends it later")
            wandb.teardown()
            logger = WandbLogger(offline=True, **options)
    return [*found, logger]


def _wandb_key_exists() -> bool:
    """Where wandb itself looks; its own functions for this prompt, warn or change how a later run starts."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urllib.parse.urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
