"""The transformers Trainer, FSDP2 through accelerate, full and LoRA. Arguments: cases."""

import os
import sys

import torch
from accelerate.state import AcceleratorState, PartialState
from common import SCRATCH, finish, fsdp_on_cpu, report_classes, report_loss, tiny_llama
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

STEPS = 4


class Sequences(Dataset):
    """Random tokens, the same for every rank: the Trainer deals them out."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(64, (8,), generator=generator)
        return {"input_ids": row, "labels": row}


class Reporting(Trainer):
    """Prints each micro-batch's loss as it is, where the Trainer's log rounds it."""

    case = ""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        report_loss(self.case, loss)
        return loss


def make(case):
    AcceleratorState._reset_state(reset_partial_state=True)
    model = tiny_llama()
    if case == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    arguments = TrainingArguments(
        output_dir=os.path.join(SCRATCH, case),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2 if case == "accumulated" else 1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=case == "mixed",
        save_steps=2 if case == "resumed" else 1000,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "reshard_after_forward": True,
            "state_dict_type": "SHARDED_STATE_DICT" if case == "resumed" else "FULL_STATE_DICT",
        },
    )
    trainer = Reporting(model=model, args=arguments, train_dataset=Sequences())
    trainer.case = case
    return trainer


def main(case):
    trainer = make(case)
    trainer.train()
    report_classes(case, trainer.model)
    if case == "resumed":  # from step 2: the same losses again
        trainer = make(case)
        trainer.train(resume_from_checkpoint=os.path.join(SCRATCH, case, "checkpoint-2"))
    if case == "full":
        trainer.model.eval()
        prompt = torch.arange(4)[None]
        with torch.no_grad():
            out = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False)
        report_loss(case, out.double().sum())
        trainer.save_model()
        if PartialState().is_main_process:
            from safetensors.torch import load_file

            saved = load_file(os.path.join(SCRATCH, case, "model.safetensors"))
            report_loss(case, sum(value.double().abs().sum() for value in saved.values()))


fsdp_on_cpu()
for name in sys.argv[1:]:
    main(name)
finish()
