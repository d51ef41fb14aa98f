"""Parameter shapes of public models, from the values of their config.json; no weights, no tensors.

    model ──> {"root": UnitShapes(1, {name: shape}), "block": UnitShapes(layers, {name: shape})}

A block is one unit, as `fully_shard` is called on each; embedding, head and last norm are the root
unit. The shapes are those of transformers' modules.

    Llama-3-8B     config.json of meta-llama/Meta-Llama-3-8B: hidden 4096, 32 layers, intermediate
                   14336, 32 heads and 8 kv heads of 128, vocab 128256
    Qwen3-4B       of Qwen/Qwen3-4B: hidden 2560, 36 layers, intermediate 9728, 32 heads and 8 kv
                   heads of 128, vocab 151936, embedding and head tied; norms of q and k
    GPT-OSS-120B   of openai/gpt-oss-120b: hidden 2880, 36 layers, 128 experts of intermediate 2880,
                   64 heads and 8 kv heads of 64, vocab 201088; biases, a sink a head
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class UnitShapes:
    """One communication unit: its parameters by name, and how often the model has such a unit."""

    times: int
    params: dict[str, Shape]


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Shape]:
    return {
        "q_proj.weight": (heads * head_dim, hidden),
        "k_proj.weight": (kv_heads * head_dim, hidden),
        "v_proj.weight": (kv_heads * head_dim, hidden),
        "o_proj.weight": (hidden, heads * head_dim),
    }


def _mlp(hidden: int, intermediate: int) -> dict[str, Shape]:
    return {
        "gate_proj.weight": (intermediate, hidden),
        "up_proj.weight": (intermediate, hidden),
        "down_proj.weight": (hidden, intermediate),
    }


def _norms(hidden: int) -> dict[str, Shape]:
    return {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def _root(vocab: int, hidden: int, tied: bool = False) -> UnitShapes:
    head: dict[str, Shape] = {} if tied else {"lm_head.weight": (vocab, hidden)}
    return UnitShapes(1, {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,), **head})


def gpt_oss_experts(experts: int, hidden: int, intermediate: int) -> dict[str, Shape]:
    """Fused experts: dim 0 is the expert."""
    return {
        "experts.gate_up_proj": (experts, hidden, 2 * intermediate),
        "experts.gate_up_proj_bias": (experts, 2 * intermediate),
        "experts.down_proj": (experts, intermediate, hidden),
        "experts.down_proj_bias": (experts, hidden),
    }


def _gpt_oss_block() -> dict[str, Shape]:
    attention = _attention(2880, 64, 8, 64)
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in attention.items()}
    return {
        **attention,
        **biases,
        "sinks": (64,),
        **_norms(2880),
        "router.weight": (128, 2880),
        "router.bias": (128,),
        **gpt_oss_experts(128, 2880, 2880),
    }


MODELS: dict[str, dict[str, UnitShapes]] = {
    "Llama-3-8B": {
        "root": _root(128256, 4096),
        "block": UnitShapes(
            32, {**_attention(4096, 32, 8, 128), **_mlp(4096, 14336), **_norms(4096)}
        ),
    },
    "Qwen3-4B": {
        "root": _root(151936, 2560, tied=True),
        "block": UnitShapes(
            36,
            {
                **_attention(2560, 32, 8, 128),
                "q_norm.weight": (128,),
                "k_norm.weight": (128,),
                **_mlp(2560, 9728),
                **_norms(2560),
            },
        ),
    },
    "GPT-OSS-120B": {
        "root": _root(201088, 2880),
        "block": UnitShapes(36, _gpt_oss_block()),
    },
}
