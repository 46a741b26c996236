"""lit-transformer: ablate and reproduce the Transformer of "Attention Is All You Need"."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_transformer.data import TranslationDataModule
    from lit_transformer.module import LitTransformer
    from lit_transformer.transformer import Transformer, TransformerConfig

__all__ = ["LitTransformer", "Transformer", "TransformerConfig", "TranslationDataModule"]

_HOME = {
    "LitTransformer": "module",
    "Transformer": "transformer",
    "TransformerConfig": "transformer",
    "TranslationDataModule": "data",
}


def __getattr__(name: str) -> Any:
    # On demand: the results of a study, and --help, need neither torch nor lightning.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
