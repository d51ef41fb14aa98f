"""Architectures of transformers: made on the meta device, sharded, loaded from sharded safetensors.

Compared with ``from_pretrained`` of the unsharded model: buffers that no file has, to the bit, and
logits. Not Mixtral and GPT-NeoX, whose files have other names than the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint, fully_shard
from tests.common.workers import ranks

pytestmark = pytest.mark.clients

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "olmo2": {},
    "starcoder2": {},
    "granite": {},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
}


@ranks(2)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_from_the_meta_device(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **ARCHITECTURES[name]})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path, max_shard_size="16KB")
    dist.barrier()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    model.eval()
    checkpoint.load_pretrained(model, tmp_path)
    expected = dict(whole.named_buffers())
    assert list(dict(model.named_buffers())) == list(expected)
    for key, buffer in model.named_buffers():
        assert buffer.device.type == "cpu", key
        assert torch.equal(buffer, expected[key]), key
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        logits, known = model(input_ids=ids).logits, whole(input_ids=ids).logits
    torch.testing.assert_close(logits, known, rtol=1e-5, atol=1e-6)
    dist.barrier()
