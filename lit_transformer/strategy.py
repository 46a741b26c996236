"""`--trainer.strategy fsdp`: weights, gradients and Adam's moments divided among the ranks (FSDP2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lit_transformer.checkpoint import load_weights, share_like
from lit_transformer.transformer import Transformer


class ShardedStrategy(ModelParallelStrategy):
    """Every rank holds its share of each tensor; a checkpoint is the file that one process would write.

    Lightning's own way keeps moments under other names and reads files past this project's checks.  So states are
    those of any other strategy, with the shares gathered before saving and divided after loading.
    """

    lightning_restore_optimizer = True

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.world_size  # not known before
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._gathered(ParallelStrategy.lightning_module_state_dict(self))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._gathered(ParallelStrategy.optimizer_state(self, optimizer))

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """With whole tensors in the CPU's memory of rank 0, which writes them, and empty ones elsewhere."""

        def gather(share: DTensor) -> Tensor:
            whole = share.full_tensor()  # all ranks take part
            return whole.cpu() if self.is_global_zero else whole.new_empty(0)

        return tree_map_only(DTensor, gather, state)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_weights(self.lightning_module, checkpoint, "the checkpoint")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            shares = {
                i: {name: share_like(value, parameters[i]) for name, value in moments.items()}
                for i, moments in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": shares})


def shard(model: Transformer, strategy: Strategy) -> None:
    """Divide a model's weights among the ranks, to be gathered layer by layer; nothing under other strategies.

    Raises:
        ValueError: it is Lightning's strategy itself, which may be tensor parallel and writes folders.
    """
    if not isinstance(strategy, ModelParallelStrategy) or isinstance(model, FSDPModule):
        return
    if not isinstance(strategy, ShardedStrategy):
        raise ValueError(
            f"trainer.strategy = {type(strategy).__name__}, tensor_parallel_size = {strategy._tensor_parallel_size}: "
            "must be 1, with checkpoints in single files; `--trainer.strategy fsdp` is that"
        )
    mesh = strategy.device_mesh["data_parallel"]
    for module in (*model.encoder, *model.decoder, model):
        fully_shard(module, mesh=mesh)


@torch.no_grad()
def whole(model: Transformer) -> Transformer:
    """A model that each rank can call as often as it likes: itself, or a copy with all weights of a divided one.

    All ranks must ask for it together.
    """
    if not isinstance(model, FSDPModule):
        return model
    with torch.device("meta"):
        copy = Transformer(model.config)
    copy.load_state_dict({name: share.full_tensor() for name, share in model.state_dict().items()}, assign=True)
    return copy
