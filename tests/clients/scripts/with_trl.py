"""trl's trainers, which shard through accelerate: SFT, DPO and GRPO, whole and with LoRA."""

import os
import sys

import torch
from accelerate.state import AcceleratorState
from common import SCRATCH, VOCABULARY, finish, fsdp_on_cpu, report_classes, report_loss, tiny_llama
from datasets import Dataset
from transformers import LlamaForCausalLM

STEPS = 3


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
    columns = enumerate(lengths.items())
    return Dataset.from_dict(
        {name: [words(100 * i + c, n) for i in range(16)] for c, (name, n) in columns}
    )


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
        "bf16": False,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        **others,
    }


def reporting(kind, case):
    """A trainer that prints each micro-batch's loss as it is."""

    class Reporting(kind):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            report_loss(case, loss)
            return loss

    return Reporting


def llama_of_a_folder(case):
    """DPO loads its reference model from where the model came from."""
    folder = os.path.join(SCRATCH, f"{case}{os.environ['RANK']}")
    tiny_llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def share_of_even_words(completions, **_):
    """A reward for GRPO."""
    numbers = [[int(word[1:]) for word in each.split() if word[0] == "w"] for each in completions]
    return [sum(n % 2 == 0 for n in each) / max(len(each), 1) for each in numbers]


def main(case):
    import trl

    AcceleratorState._reset_state(reset_partial_state=True)
    kind, _, adapter = case.partition("_")
    options = {"model": llama_of_a_folder(case), "processing_class": tokenizer()}
    if adapter:
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if kind == "grpo":
        given = trl.GRPOConfig(
            **arguments(case, num_generations=2, max_completion_length=4, beta=0.1)
        )
        data = rows(prompt=4)
        options["reward_funcs"] = share_of_even_words
    elif kind == "sft":
        given, data = trl.SFTConfig(**arguments(case, max_length=16)), rows(text=8)
    else:
        given = trl.DPOConfig(**arguments(case, max_length=16))
        data = rows(prompt=4, chosen=4, rejected=4)
    torch.manual_seed(1)
    trainer = reporting(getattr(trl, f"{kind.upper()}Trainer"), case)(
        args=given, train_dataset=data, **options
    )
    trainer.train()
    report_classes(case, trainer.model)


fsdp_on_cpu()
for name in sys.argv[1:]:
    main(name)
finish()
