"""The transformers Trainer and trl's, which shard through accelerate. Arguments: cases.

full, accumulated, mixed, resumed, lora     FSDP2
one                                         FSDP1
sft, dpo, grpo, sft_lora, dpo_lora          trl, by FSDP2
"""

import os

import torch
from accelerate.state import AcceleratorState, PartialState
from common import (
    SCRATCH,
    VOCABULARY,
    fsdp1_on_cpu,
    fsdp_on_cpu,
    lora,
    report_classes,
    report_loss,
    run,
    tiny_llama,
)
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 4
LAYERS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


def arguments(case, **others):
    return {
        "output_dir": os.path.join(SCRATCH, case),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": case == "mixed",
        "save_strategy": "no",
        "fsdp": True,
        "fsdp_config": {"version": 2, **LAYERS},
        **others,
    }


def reporting(kind, case):
    """A trainer that prints each micro-batch's loss as it is, where its log rounds it."""

    class Reporting(kind):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            report_loss(case, loss)
            return loss

    return Reporting


# ---- transformers


class Sequences(Dataset):
    """Random tokens, the same for every rank: the Trainer deals them out."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(VOCABULARY, (8,), generator=generator)
        return {"input_ids": row, "labels": row}


def own_options(case):
    if case == "one":
        one = {"use_orig_params": True, "cpu_ram_efficient_loading": False}
        config = {"version": 1, **LAYERS, **one, "sync_module_states": False}
        return {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    kind = "SHARDED_STATE_DICT" if case == "resumed" else "FULL_STATE_DICT"
    config = {"version": 2, **LAYERS, "reshard_after_forward": True, "state_dict_type": kind}
    return {
        "gradient_accumulation_steps": 2 if case == "accumulated" else 1,
        "save_strategy": "steps",
        "save_steps": 2 if case == "resumed" else 1000,
        "fsdp_config": config,
    }


def of_transformers(case):
    model = tiny_llama()
    if case == "lora":
        from peft import get_peft_model

        model = get_peft_model(model, lora())
    given = TrainingArguments(**arguments(case, **own_options(case)))
    if case == "one":
        os.environ["FSDP_SYNC_MODULE_STATES"] = "false"
    made = reporting(Trainer, case)(model=model, args=given, train_dataset=Sequences())
    if case == "one":
        fsdp1_on_cpu()
    return made


# ---- trl


def tokenizer():
    """One word per token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words |= {f"w{index}": index for index in range(3, VOCABULARY)}
    plain = Tokenizer(WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def words(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (count,), generator=generator))


def rows(**lengths):
    """A column per keyword, of that many words."""
    from datasets import Dataset

    columns = enumerate(lengths.items())
    return Dataset.from_dict(
        {name: [words(100 * i + c, n) for i in range(16)] for c, (name, n) in columns}
    )


def llama_of_a_folder(case):
    """DPO loads its reference model from where the model came from."""
    folder = os.path.join(SCRATCH, f"{case}{os.environ['RANK']}")
    tiny_llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def share_of_even_words(completions, **_):
    """A reward for GRPO."""
    numbers = [[int(word[1:]) for word in each.split() if word[0] == "w"] for each in completions]
    return [sum(n % 2 == 0 for n in each) / max(len(each), 1) for each in numbers]


TRL = {
    "sft": ({"max_length": 16}, {"text": 8}),
    "dpo": ({"max_length": 16}, {"prompt": 4, "chosen": 4, "rejected": 4}),
    "grpo": ({"num_generations": 2, "max_completion_length": 4, "beta": 0.1}, {"prompt": 4}),
}
"""Arguments, and how many words each column has."""


def of_trl(case):
    import trl

    kind, _, adapter = case.partition("_")
    options = {"model": llama_of_a_folder(case), "processing_class": tokenizer()}
    if adapter:
        options["peft_config"] = lora()
    if kind == "grpo":
        options["reward_funcs"] = share_of_even_words
    own, columns = TRL[kind]
    others = {"gradient_checkpointing": False, **own}
    given = getattr(trl, f"{kind.upper()}Config")(**arguments(case, **others))
    torch.manual_seed(1)
    made = reporting(getattr(trl, f"{kind.upper()}Trainer"), case)
    return made(args=given, train_dataset=rows(**columns), **options)


def main(case):
    AcceleratorState._reset_state(reset_partial_state=True)
    make = of_trl if case.partition("_")[0] in TRL else of_transformers
    trainer = make(case)
    trainer.train()
    report_classes(case, trainer.model_wrapped if case == "one" else trainer.model)
    if case == "resumed":  # from step 2: the same losses again
        AcceleratorState._reset_state(reset_partial_state=True)
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
run(main)
