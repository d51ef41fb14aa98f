"""Clients of FSDP1: accelerate, the Trainer, Lightning's FSDPStrategy. Arguments: cases."""

import functools
import os
import sys

import torch
from common import SCRATCH, VOCABULARY, finish, fsdp_on_cpu, report_loss, tiny_llama, tokens
from torch.distributed.fsdp import FullyShardedDataParallel

STEPS = 3


def report_wrapper(case, model):
    """Print where the wrapper's class comes from, on each rank."""
    wrapper = next(m for m in model.modules() if isinstance(m, FullyShardedDataParallel))
    classes = (*type(wrapper).__mro__, *type(wrapper.module).__mro__)
    modules = " ".join(f"{c.__module__} {c.__module__.rpartition('.')[0]}" for c in classes)
    rank = torch.distributed.get_rank()
    sys.stdout.write(f"classes {case} {rank} {modules}\n")
    sys.stdout.flush()


def on_plain_cpu():
    """Let accelerate's device be "cpu", not "cpu:0", which torch's FSDP1 takes for another."""
    from accelerate.state import AcceleratorState, PartialState

    for state in (AcceleratorState, PartialState):
        state._shared_state["device"] = torch.device("cpu")


def accelerate(case):
    """Accumulated; recomputed and accumulated; in bf16; in bf16 of a model that was loaded so."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    fsdp_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        use_orig_params=True,
        cpu_ram_efficient_loading=False,
        sync_module_states=False,
        activation_checkpointing=case == "recomputed",
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2,
        mixed_precision="bf16" if case in ("mixed", "upcast") else "no",
    )
    on_plain_cpu()
    model = tiny_llama()
    if case == "upcast":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    report_wrapper(case, model)
    for step in range(STEPS):
        with accelerator.accumulate(model):
            batch = tokens(step)
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            report_loss(case, loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()


mixed = upcast = recomputed = accelerate


def trainer(case):
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    fsdp_on_cpu()

    class Rows(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            row = torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": row, "labels": row}

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in (logs or {}):
                report_loss(case, logs["loss"])

    arguments = TrainingArguments(
        output_dir=os.path.join(SCRATCH, case),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 1,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "use_orig_params": True,
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
        },
    )
    os.environ["FSDP_SYNC_MODULE_STATES"] = "false"
    runner = Trainer(tiny_llama(), arguments, train_dataset=Rows(), callbacks=[Report()])
    on_plain_cpu()
    runner.train()
    report_wrapper(case, runner.model_wrapped)


def on_cpu(connector, strategy):
    """Let Lightning use FSDP on a CPU, whichever: it asks for a GPU by name, and has no device id.

    torch's FSDP1 runs on a CPU that it is told.
    """
    connector._check_strategy_and_fallback = lambda self: None
    strategy.root_device = property(lambda self: torch.device("cpu"))
    original = FullyShardedDataParallel.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def init(self, *args, device_id=None, **kwargs):
        original(self, *args, device_id=torch.device("cpu"), **kwargs)

    FullyShardedDataParallel.__init__ = init


def lightning_trainer(case):
    import lightning as L
    from lightning.pytorch.strategies import FSDPStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from torch.utils.data import DataLoader
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    on_cpu(_AcceleratorConnector, FSDPStrategy)

    class Language(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.llama = None

        def configure_model(self):
            if self.llama is None:
                self.llama = tiny_llama()

        def training_step(self, batch, index):
            loss = self.llama(input_ids=batch, labels=batch).loss
            report_loss(case, loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    def runner_of(steps):
        return L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=FSDPStrategy(
                auto_wrap_policy={LlamaDecoderLayer},
                process_group_backend="gloo",
                state_dict_type="sharded",
            ),
            max_steps=steps,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCABULARY, (64, 8), generator=generator)
    runner = runner_of(STEPS)
    runner.fit(Language(), DataLoader(rows, batch_size=2))
    report_wrapper(case, runner.model)
    path = os.path.join(SCRATCH, "sharded.ckpt")
    runner.save_checkpoint(path)
    runner_of(2 * STEPS).fit(Language(), DataLoader(rows, batch_size=2), ckpt_path=path)


def lightning(case):
    import lightning as L
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import FSDPStrategy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    on_cpu(_Connector, FSDPStrategy)
    strategy = FSDPStrategy(auto_wrap_policy={LlamaDecoderLayer}, process_group_backend="gloo")
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(tiny_llama())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    report_wrapper(case, model)
    for step in range(STEPS):
        for micro in range(2):
            batch = tokens(2 * step + micro)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = model(input_ids=batch, labels=batch).loss
                fabric.backward(loss)
            report_loss(case, loss)
        fabric.clip_gradients(model, optimizer, max_norm=1e9)  # a norm differs by a rounding
        optimizer.step()
        optimizer.zero_grad()


for name in sys.argv[1:]:
    globals()[name](name)
finish()
