"""Lightning's ModelParallelStrategy (its FSDP2), in Fabric and in the Trainer. Arguments: cases."""

import os
import sys

import lightning
import torch
from common import SCRATCH, VOCABULARY, finish, report_classes, report_loss, tiny_llama, tokens
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

STEPS = 3
MICROBATCHES = 2


def shard(model, mesh, policy=None):
    policy = policy or MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    return model


# ---- Fabric


def fabric_of():
    strategy = FabricStrategy(
        parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"]),
        data_parallel_size=2,
        tensor_parallel_size=1,
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    return fabric


def set_up(fabric):
    model = fabric.setup(tiny_llama())
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def train(case, fabric, model, optimizer, steps):
    for step in steps:
        for micro in range(MICROBATCHES):
            last = micro == MICROBATCHES - 1
            batch = tokens(MICROBATCHES * step + micro)
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(input_ids=batch, labels=batch).loss
                fabric.backward(loss)
            report_loss(case, loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        report_loss(case, getattr(norm, "full_tensor", lambda norm=norm: norm)())
        optimizer.step()
        optimizer.zero_grad()


def fabric(case):
    runner = fabric_of()
    model, optimizer = set_up(runner)
    report_classes(case, model.module)
    train(case, runner, model, optimizer, range(STEPS))
    folder = os.path.join(SCRATCH, "fabric")
    runner.save(folder, {"model": model, "optimizer": optimizer})
    train(case, runner, model, optimizer, range(STEPS, 2 * STEPS))
    model, optimizer = set_up(runner)
    runner.load(folder, {"model": model, "optimizer": optimizer})
    train(case, runner, model, optimizer, range(STEPS, 2 * STEPS))


# ---- Trainer


class Language(lightning.LightningModule):
    """A Llama that shards itself where Lightning asks for it."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.llama = None

    def configure_model(self):
        if self.llama is None:
            self.llama = shard(tiny_llama(), self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = self.llama(input_ids=batch, labels=batch).loss
        report_loss(self.case, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (64, 8), generator=generator)


def trainer_of(case, steps):
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TrainerStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=steps,
        accumulate_grad_batches=2 if case == "accumulated" else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )


def trainer(case):
    module = Language(case)
    runner = trainer_of(case, STEPS)
    runner.fit(module, DataLoader(rows(), batch_size=2))
    report_classes(case, module.llama)
    folder = os.path.join(SCRATCH, case)
    runner.save_checkpoint(folder)
    trainer_of(case, 2 * STEPS).fit(
        Language(case), DataLoader(rows(), batch_size=2), ckpt_path=folder
    )


for name in sys.argv[1:]:
    fabric(name) if name == "fabric" else trainer(name)
finish()
