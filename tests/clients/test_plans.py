"""Models of transformers are planned as they are, with and without gradient checkpointing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.planning import Plan

pytestmark = pytest.mark.clients

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
}
GROUPED = {**WIDE, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
TWO_SIDES = {
    **{"d_model": 64, "vocab_size": 128, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "v_head_dim": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "moe_intermediate_size": 32},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 4},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": GROUPED,
    "Qwen3MoeForCausalLM": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 16},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 16},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 16},
    "Phi3ForCausalLM": {**GROUPED, "pad_token_id": 0},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "GPTNeoXForCausalLM": WIDE,
    "OPTForCausalLM": {**WIDE, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "BloomForCausalLM": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "FalconForCausalLM": WIDE,
    "StableLmForCausalLM": GROUPED,
    "Olmo2ForCausalLM": GROUPED,
    "OlmoeForCausalLM": {**EXPERTS, "num_experts": 4},
    "GptOssForCausalLM": {**EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "DeepseekV3ForCausalLM": {**WIDE, "num_experts_per_tok": 2, **LATENT},
    "CohereForCausalLM": GROUPED,
    "MambaForCausalLM": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128},
    "BertForMaskedLM": WIDE,
    "ModernBertForMaskedLM": {**WIDE, **ENDS, "cls_token_id": 1, "sep_token_id": 2},
    "T5ForConditionalGeneration": {
        **{"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16},
        **{"vocab_size": 128, "decoder_start_token_id": 0},
    },
    "BartForConditionalGeneration": TWO_SIDES,
    "WhisperForConditionalGeneration": {
        **{**TWO_SIDES, **ENDS, "max_source_positions": 50, "decoder_start_token_id": 0},
    },
    "ViTForImageClassification": WIDE,
    "Dinov2ForImageClassification": WIDE,
    "SwinForImageClassification": {
        **{"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 64},
    },
}


def _batch(name: str, count: int) -> dict[str, torch.Tensor]:
    if "Image" in name:
        size = 64 if name.startswith("Swin") else 224
        labels = torch.zeros(count, dtype=torch.int64)
        return {"pixel_values": torch.zeros(count, 3, size, size), "labels": labels}
    tokens = torch.zeros(count, 16, dtype=torch.int64)
    if name.startswith("Whisper"):
        return {"input_features": torch.zeros(count, 80, 100), "labels": tokens[:, :8]}
    mask = torch.ones(count, 16, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**batch).loss
    return found


def _planned(name: str, recomputes: bool, **changes: Any) -> Plan:
    os.environ["HF_HUB_OFFLINE"] = "1"
    kind = getattr(pytest.importorskip("transformers"), name)
    config = kind.config_class(**ARCHITECTURES[name])
    for key, value in changes.items():
        setattr(config, key, value)

    def make() -> nn.Module:
        model: Any = kind(config)
        if recomputes:
            model.gradient_checkpointing_enable()
            model.config.use_cache = False
        made: nn.Module = model.train()
        return made

    units = list(getattr(kind, "_no_split_modules", None) or ()) or ["BertLayer"]
    return fsdp2.plan(make, lambda n: _batch(name, n), units=units, mesh=8, loss=_loss)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_planned_as_they_are(name: str) -> None:
    """With checkpointing the same arithmetic counts for MFU, and more is done."""
    plain, recomputing = _planned(name, False), _planned(name, True)
    assert len(plain.rehearsal.units) >= 3
    assert plain.rehearsal.units == recomputing.rehearsal.units
    assert plain.rehearsal.parameters == recomputing.rehearsal.parameters
    assert plain.flops == recomputing.flops > 0
    done = [sum(n.flops for n in p.rehearsal.recording.operations) for p in (plain, recomputing)]
    assert done[0] <= done[1] <= 1.5 * done[0]


def test_flex_attention_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"module 'model.layers.0.self_attn' \(.*calls flex_att"):
        _planned("LlamaForCausalLM", False, _attn_implementation="flex_attention")
