"""OLMo-core's train module, whose model shards itself. Argument: its wrapping strategy."""

import sys

import torch
import torch.distributed as dist
from common import VOCABULARY, finish, report_classes, report_loss, tokens
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig, TransformerDataParallelWrappingStrategy
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module.transformer import (
    TransformerDataParallelConfig,
    TransformerTrainModule,
)

STEPS, LENGTH = 4, 8


def main(case):
    torch.manual_seed(0)
    module = TransformerTrainModule(
        model=TransformerConfig.olmo2_1M(VOCABULARY).build(init_device="meta"),
        optim=AdamWConfig(lr=1e-2),
        rank_microbatch_size=2 * LENGTH,
        max_sequence_length=LENGTH,
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp,
            param_dtype=DType.bfloat16,
            wrapping_strategy=TransformerDataParallelWrappingStrategy(case),
            prefetch_factor=1,
        ),
        device=torch.device("cpu"),
    )
    model = module.model
    report_classes(case, model)
    for step in range(STEPS):
        ids = tokens(step)
        loss = model(ids, labels=ids, loss_reduction="mean", return_logits=False).loss
        report_loss(case, loss)
        loss.backward()
        module.optim.step()  # the module's own clips, and asks a trainer where to log the norm
        report_loss(case, module._clip_grad_norm(1e9))
        module.zero_grads()


dist.init_process_group("gloo")
main(sys.argv[1])  # its mesh can be made once
finish()
