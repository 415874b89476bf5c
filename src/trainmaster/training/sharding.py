"""FSDP where there is no GPU: accelerate leaves it out there without a word, and trains whole models instead."""

from __future__ import annotations

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer


class ShardingAnywhere(Trainer):
    """A `Trainer` that shards when it is told to, also over gloo."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the loop's; then what accelerate does on a GPU alone."""
        super().create_accelerator_and_postprocess()
        if not self.args.fsdp or self.is_fsdp_enabled:
            return
        state = self.accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        if state.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(state.mixed_precision)
        state.distributed_type = DistributedType.FSDP
        self.is_fsdp_enabled = True
