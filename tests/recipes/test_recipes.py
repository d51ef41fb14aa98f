"""Each script of docs/recipes trains its `--tiny` model on gloo ranks, as its page says."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from fsdp2 import checkpoint
from tests.common import jobs

pytestmark = pytest.mark.ranks

RECIPES = jobs.ROOT / "docs" / "recipes"


def losses(
    recipe: str, folder: Path, *options: str, ranks: int = 2, what: str = "loss"
) -> dict[int, float]:
    """Losses by step, as rank 0 prints them."""
    folder.mkdir(exist_ok=True)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    script = (str(RECIPES / recipe), "--tiny", *options)
    run = jobs.Run(
        "env", "-C", str(folder), sys.executable, *launcher, *script, OMP_NUM_THREADS="1"
    )
    code, out, err = run.finish()
    assert code == 0, err
    found = re.findall(rf"^step (\d+) {what} ([\d.]+)", out, re.MULTILINE)
    assert found, out
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.clients
def test_llama_8b(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    straight = losses("llama_8b.py", tmp_path, "--steps", "8")
    assert straight[8] < straight[1] - 0.2
    options = ("--weights", "../weights", "--data", "../tokens.bin", "--steps", "8")
    stopped = losses("llama_8b.py", tmp_path / "resumed", *options, "--stop", "4")
    resumed = losses("llama_8b.py", tmp_path / "resumed", *options)
    assert min(resumed) == 5
    assert stopped | resumed == straight
    one = losses("llama_8b.py", tmp_path / "one", *options, ranks=1)
    assert one == pytest.approx(straight, rel=2e-3)  # bf16 products of other batch sizes

    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "weights"))
    checkpoint.load(tmp_path / "out" / "steps", plain)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export-8")
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(plain.bfloat16()(tokens).logits, loaded.bfloat16()(tokens).logits)


@pytest.mark.clients
def test_llama_70b(tmp_path: Path) -> None:
    found = losses("llama_70b.py", tmp_path, "--steps", "4", ranks=8)
    options = ("--weights", "../weights", "--data", "../tokens.bin", "--steps", "4")
    plain = ("--replicate", "1", "--tp", "1")
    one = losses("llama_70b.py", tmp_path / "one", *options, *plain, ranks=1)
    assert one == pytest.approx(found, rel=2e-3)  # bf16 sums of tp in another order


@pytest.mark.clients
def test_lora(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = losses("lora.py", tmp_path, "--steps", "6")
    assert found[6] < found[1] - 0.05
    stopped = losses("lora.py", tmp_path, "--out", "again", "--steps", "3")
    assert stopped | losses("lora.py", tmp_path, "--out", "again", "--steps", "6") == found
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.bfloat16)
    adapted = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter-6").merge_and_unload()
    folder = tmp_path / "out" / "merged-6"
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(adapted(tokens).logits, merged(tokens).logits)


@pytest.mark.clients
def test_qlora(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    found = losses("lora.py", tmp_path, "--steps", "6", "--nf4")
    assert found[6] < found[1] - 0.05


@pytest.mark.extended
def test_experts(tmp_path: Path) -> None:
    options = ("--ep", "2", "--steps")
    stopped = losses("experts.py", tmp_path, *options, "3", ranks=4)
    found = stopped | losses("experts.py", tmp_path, *options, "6", ranks=4)
    assert found[6] < found[1] - 0.5
    one = losses("experts.py", tmp_path, "--steps", "6", "--ep", "1", "--out", "one", ranks=1)
    assert one == pytest.approx(found, rel=5e-3)  # bf16 may route a token to another expert


@pytest.mark.clients
def test_rl(tmp_path: Path) -> None:
    rewards = losses("rl.py", tmp_path, "--steps", "20", ranks=3, what="reward")
    assert sum(rewards[step] for step in (18, 19, 20)) > 3 * 0.56  # from 0.5


@pytest.mark.clients
def test_distill(tmp_path: Path) -> None:
    found = losses("distill.py", tmp_path, "--steps", "6")
    assert found[6] < found[1] - 0.05
    models = ("--teacher", "../teacher", "--student", "../student", "--data", "../tokens.bin")
    one = losses("distill.py", tmp_path / "one", "--steps", "6", *models, ranks=1)
    assert one == pytest.approx(found, rel=2e-3)


@pytest.mark.clients
def test_long_context(tmp_path: Path) -> None:
    found = losses("long_context.py", tmp_path, "--steps", "6", "--context", "2", ranks=4)
    assert found[6] < found[1] - 0.2
    whole = ("--weights", "../weights", "--data", "../tokens.bin", "--context", "1")
    one = losses("long_context.py", tmp_path / "one", "--steps", "6", *whole, ranks=1)
    assert one == pytest.approx(found, rel=2e-3)


@pytest.mark.clients
def test_accelerate(tmp_path: Path) -> None:
    """The page has every key, and its files are read without a key that is not known."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments

    page = (RECIPES / "accelerate.md").read_text(encoding="utf-8")
    table = page.partition("## Every key")[2]
    fields = dataclasses.fields(FullyShardedDataParallelPlugin)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(f.name for f in fields)
    yaml, settings = re.findall(r"^```(?:yaml|json)\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "fsdp2.yaml").write_text(yaml, encoding="utf-8")
    known = load_config_from_file(str(tmp_path / "fsdp2.yaml")).fsdp_config
    trainer = TrainingArguments(
        str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=json.loads(settings)
    )
    assert known["fsdp_version"] == trainer.fsdp_config["version"] == 2
    assert known["fsdp_state_dict_type"] == trainer.fsdp_config["state_dict_type"]


def test_pages_show_their_scripts() -> None:
    for script in RECIPES.glob("*.py"):
        assert f'--8<-- "recipes/{script.name}"' in script.with_suffix(".md").read_text("utf-8")
