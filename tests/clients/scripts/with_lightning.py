"""Lightning's FSDP2 strategy, and in cases `one_…` that of FSDP1. Arguments: cases.

fabric, one_fabric                    Fabric
trainer, accumulated, one_trainer     the Trainer
"""

import functools
import os

import lightning
import torch
from common import (
    SCRATCH,
    VOCABULARY,
    language_loss,
    report_classes,
    report_loss,
    run,
    tiny_llama,
)
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import FSDPStrategy as FabricStrategy1
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy2
from lightning.pytorch.strategies import FSDPStrategy as TrainerStrategy1
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy2
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS = 3
MICROBATCHES = 2
ONE = {"auto_wrap_policy": {LlamaDecoderLayer}, "process_group_backend": "gloo"}
TWO = {"data_parallel_size": 2, "tensor_parallel_size": 1}


def shard(model, mesh):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    return model


def one_on_cpu():
    """Let Lightning use FSDP1 on a CPU: it asks for a GPU by name, and has no device id.

    torch's FSDP1 runs on a CPU that it is told.
    """
    for connector in (_Connector, _AcceleratorConnector):
        connector._check_strategy_and_fallback = lambda self: None
    for strategy in (FabricStrategy1, TrainerStrategy1):
        strategy.root_device = property(lambda self: torch.device("cpu"))
    original = FullyShardedDataParallel.__init__

    @functools.wraps(original)
    def init(self, *args, device_id=None, **kwargs):
        original(self, *args, device_id=torch.device("cpu"), **kwargs)

    FullyShardedDataParallel.__init__ = init


# ---- Fabric


def set_up(fabric):
    model = fabric.setup(tiny_llama())
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(case, fabric, model, optimizer, steps):
    one = case == "one_fabric"
    for step in steps:
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            with fabric.no_backward_sync(model, enabled=not last):
                loss = language_loss(model, MICROBATCHES * step + micro)
                fabric.backward(loss)
            report_loss(case, loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1e9 if one else 0.5)
        if not one:  # FSDP1's differs by a rounding
            report_loss(case, norm)
        optimizer.step()
        optimizer.zero_grad()


def fabric(case):
    if case == "one_fabric":
        strategy = FabricStrategy1(**ONE)
    else:
        strategy = FabricStrategy2(
            parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"]), **TWO
        )
    runner = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    runner.launch()
    model, optimizer = set_up(runner)
    report_classes(case, model)
    train(case, runner, model, optimizer, range(STEPS))
    if case == "one_fabric":
        return
    folder = os.path.join(SCRATCH, "fabric")
    runner.save(folder, {"model": model, "optimizer": optimizer})
    train(case, runner, model, optimizer, range(STEPS, 2 * STEPS))
    model, optimizer = set_up(runner)
    runner.load(folder, {"model": model, "optimizer": optimizer})
    train(case, runner, model, optimizer, range(STEPS, 2 * STEPS))


# ---- Trainer


class Language(lightning.LightningModule):
    """A Llama that shards itself where Lightning asks for it, unless the strategy does."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.llama = None

    def configure_model(self):
        if self.llama is None:
            self.llama = tiny_llama()
            if self.case != "one_trainer":
                shard(self.llama, self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = self.llama(input_ids=batch, labels=batch).loss
        report_loss(self.case, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)


def fitted(case, steps, **options):
    """A trainer that has come to a step, resumed from what ``ckpt_path`` says."""
    one = case == "one_trainer"
    runner = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TrainerStrategy1(state_dict_type="sharded", **ONE)
        if one
        else TrainerStrategy2(**TWO),
        max_steps=steps,
        accumulate_grad_batches=2 if case != "trainer" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (64, 8), generator=generator)
    runner.fit(Language(case), DataLoader(rows, batch_size=2), **options)
    return runner


def trainer(case):
    runner = fitted(case, STEPS)
    report_classes(case, runner.model)
    path = os.path.join(SCRATCH, case)
    runner.save_checkpoint(path)
    fitted(case, 2 * STEPS, ckpt_path=path)


def main(case):
    if case.startswith("one_"):
        one_on_cpu()
    (fabric if case.endswith("fabric") else trainer)(case)


run(main)
