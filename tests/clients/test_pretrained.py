"""Architectures of transformers: made on the meta device, sharded, loaded from sharded safetensors.

Compared with ``from_pretrained`` of the unsharded model: buffers that no file has, to the bit, and
logits. Not Mixtral and GPT-NeoX, whose files have other names than the model.

And made by `deferred`, sharded while their own initialisation runs: compared with the unsharded
model of the same seed, to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint, fully_shard, gathered
from fsdp2.wrap import deferred
from tests.common import parity
from tests.common.errors import raises
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


MADE: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "bert": {},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "vit": {"image_size": 32, "patch_size": 8},
    "wav2vec2": {  # with a parametrised weight
        "conv_dim": (16, 16),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "num_feat_extract_layers": 2,
    },
    "mixtral": {"num_local_experts": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "jamba": {"num_experts": 2, "mamba_d_state": 4},
}


def _same(model: Any, whole: Any, after: torch.Tensor | None = None) -> None:
    """Weights, buffers, and the random numbers that come next."""
    assert after is None or torch.equal(after, torch.rand(3))
    parity.assert_equal(
        parity.full_params(model), {name: p.detach() for name, p in whole.named_parameters()}
    )
    parity.assert_equal(dict(model.named_buffers()), dict(whole.named_buffers()))


@ranks(2)
@pytest.mark.parametrize("name", list(MADE))
def test_deferred(name: str) -> None:
    """`post_init` of the outermost model initialises layers that are sharded already."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **MADE[name]})
    torch.manual_seed(0)
    whole = transformers.AutoModel.from_config(config)
    after = torch.rand(3)
    lists = [m for m in whole.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    torch.manual_seed(0)
    with deferred(None, {type(layers[0]) for layers in lists}):
        model = transformers.AutoModel.from_config(config)
    _same(model, whole, after)


def _llama(transformers: Any) -> Any:
    config = transformers.AutoConfig.for_model("llama", **SMALL, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config)


def _again(model: Any, how: str) -> None:
    """Initialise a model once more, by one of the ways that transformers have."""
    for module in model.modules():
        module._is_hf_initialized = False
    if how == "smart_apply":
        model.smart_apply(lambda module, custom: model._initialize_weights(module, custom), False)
    elif how == "_init_weights":
        with torch.no_grad():
            for module in model.modules():
                model._init_weights(module)
    else:
        getattr(model, how)()


@ranks(2)
@pytest.mark.parametrize(
    "how", ["init_weights", "initialize_weights", "smart_apply", "_init_weights"]
)
def test_initialised_again(how: str) -> None:
    """Where the model is deferred still, and after that with `gathered`."""
    transformers = pytest.importorskip("transformers")
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    torch.manual_seed(0)
    whole = _llama(transformers)
    _again(whole, how)
    after = torch.rand(3)
    torch.manual_seed(0)
    with deferred(None, {layer, nn.Embedding}):
        model = _llama(transformers)
        _again(model, how)
    _same(model, whole, after)
    torch.manual_seed(1)
    _again(whole, how)
    after = torch.rand(3)
    torch.manual_seed(1)
    with gathered(model):
        _again(model, how)
    _same(model, whole, after)


@ranks(2)
def test_deferred_models_that_are_loaded(tmp_path: Path) -> None:
    """``from_pretrained`` makes models on the meta device: refused, or loaded with an `init_fn`."""
    transformers = pytest.importorskip("transformers")
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        _llama(transformers).save_pretrained(tmp_path)
    dist.barrier()
    load = transformers.AutoModelForCausalLM.from_pretrained
    with raises("deferred-meta"), deferred(None, {layer}):
        load(tmp_path)
    with deferred(None, {layer}, lambda module: None):
        model = load(tmp_path)
    _same(model, load(tmp_path))
