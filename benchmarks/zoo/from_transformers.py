"""Architectures of transformers: default configurations with small sizes in their place."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.instances import (
    BATCH,
    CLASSES,
    LENGTH,
    MOST_PARAMETERS,
    VOCABULARY,
    Inputs,
    Instance,
    NotBuiltError,
    repeated,
)

_TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}

# Patterns of attributes of configurations, and what they become; the first that fits counts.
_SMALL: list[tuple[str, int]] = [
    (r"(num_)?(key_value|kv)_heads|num_(global_)?key_value_heads|multi_query_group_num", 2),
    (r".*(num|n)_.*heads?|.*_heads|num_attention_heads_per_layer", 4),
    (r".*(first_k_dense_replace|num_nextn_predict_layers)", 1),
    (r"(num|n)_.*experts_per_tok|.*top_?k(_experts)?|moe_k|num_selected_experts", 2),
    (r".*n_group|.*topk_group", 1),
    (r"(num|n)_.*shared.*", 1),
    (r"(moe_)?(num|n)_.*experts", 4),
    (r"(num|n)_.*layers?|n_layer|depth|.*_layers|.*_depth|num_blocks|n_blocks", 2),
    (r"(qk_nope|qk_rope|v|attention|attn|.*_qk_rope)_head_dim|head_dim|d_kv|kv_channels", 8),
    (r"global_head_dim|head_size|qk_head_dim|attention_head_size", 8),
    (r"rotary_dim|mamba_d_state|state_size|ssm_state_size|d_state", 8),
    (r".*lora_rank|.*_rank", 16),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r".*(intermediate|ffn|inner|ff)_.*(size|dim|dims)|d_ff|n_inner|ffn_.*size|.*_ffn_dim", 64),
    (r".*intermediate_size|ffn_hidden_size|encoder_ffn_dim|decoder_ffn_dim|dim_ff|d_inner", 64),
    (r"(hidden|embedding|d)_(size|dim|model)|.*hidden_size|d_model|n_embd|.*embed_dim|emb_dim", 32),
    (r".*embedding_size|hidden_dim|model_dim|lru_width|conv_dim|d_embed|width|output_dim", 32),
    (r".*vocab_size(_.*)?|.*vocabulary_size", VOCABULARY),
    (r".*max_position_embeddings|n_positions|max_.*_positions|max_seq_len.*", 64),
    (r".*max_sequence_length|n_ctx|max_length|block_size|seq_length", 64),
    (r".*sliding_window|attention_window|.*chunk_size|window_size|local_attention", 8),
    (r"image_size|input_size", 32),
    (r"patch_size", 8),
    (r"num_labels", CLASSES),
]
# What stands for None, and what must fit together in one configuration.
_MISSING = {"head_dim": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
_SPECIAL: dict[str, dict[str, Any]] = {
    "Mamba2Config": {"head_dim": 16},
    # Else the first forward makes other modules, and draws random numbers that no later one draws.
    "BigBirdConfig": {"attention_type": "original_full"},
    "BigBirdPegasusConfig": {"attention_type": "original_full"},
    "XmodConfig": {"default_language": "en_XX"},
    "ReformerConfig": {
        "is_decoder": True,
        "axial_pos_shape": [3, 4],
        "axial_pos_embds_dim": [16, 16],
    },
    "SwinConfig": {"window_size": 2, "image_size": 32, "patch_size": 4},
    "MobileBertConfig": {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "MobileViTV2Config": {"image_size": 64},
    "LevitConfig": {"image_size": 64, "patch_size": 16},
    "WhisperConfig": {"num_mel_bins": 80},
    "Speech2TextConfig": {"input_channels": 1, "input_feat_per_channel": 80},
    "EfficientNetConfig": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 320},
    "Pop2PianoConfig": {"d_model": 512},
}
_OFF = re.compile(
    r".*layerdrop|.*layer_drop|mask_(time|feature)_prob|apply_spec_augment|.*z_loss.*"
)


def names() -> list[str]:
    from transformers.models.auto import modeling_auto

    found: dict[str, None] = {}
    for task, mapping in _TASKS.items():
        for name in getattr(modeling_auto, mapping).values():
            for each in (name,) if isinstance(name, str) else name:
                found.setdefault(f"{task}/{each}")
    return list(found)


def build(name: str) -> Instance:
    import transformers

    task, _, class_name = name.partition("/")
    kind = getattr(transformers, class_name)
    model = _first_that_works(kind, _tiny_configurations(kind.config_class))
    split = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [m for m in model.modules() if type(m).__name__ in split and m is not model]
    return Instance(model, lambda: _inputs(model, task), blocks or repeated(model))


def _first_that_works(kind: Any, configurations: Iterator[Any]) -> nn.Module:
    """A model of the first configuration that makes a small one; counted without its memory."""
    why = "no configuration"
    for configuration in configurations:
        try:
            _fit_tokens(configuration)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(configuration)).parameters())
            if size <= MOST_PARAMETERS:
                return kind(configuration)
            why = f"{size:,} parameters"
        except Exception as error:  # libraries refuse sizes in ways of their own
            why = f"{type(error).__name__}: {error}"
    raise NotBuiltError(why)


def _tiny_configurations(kind: Any) -> Iterator[Any]:
    """Small sizes set where the configuration is made; then set on one that is made; then fewer."""
    default = kind()
    small = _small_values(default)
    for wanted in (small, {k: v for k, v in small.items() if not isinstance(v, (list, dict))}):
        with contextlib.suppress(Exception):  # sizes that this configuration refuses together
            yield kind(**wanted)
    changed = kind()
    for key, value in small.items():
        if not isinstance(value, dict):
            setattr(changed, key, value)
    yield changed
    keys = re.compile(r".*(hidden_size|layers|layer|vocab_size|intermediate_size|d_model|n_embd)")
    yield kind(**{k: v for k, v in small.items() if keys.fullmatch(k)})
    yield kind(**{k: v for k, v in small.items() if re.fullmatch(r".*layers?|.*depth", k)})


def _small_values(config: Any) -> dict[str, Any]:
    """What to give to the configuration's class so that it is small."""
    values: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        if key in ("model_type", "transformers_version", "architectures", "rope_parameters"):
            continue
        nested = _value(config, key)
        if nested is not None and hasattr(nested, "to_dict"):
            values[key] = _small_values(nested)
        elif value is None and key in _MISSING:
            values[key] = _MISSING[key]
        elif isinstance(value, bool) or value is None:
            continue
        elif _OFF.fullmatch(key):
            values[key] = type(value)(0)
        elif isinstance(value, int):
            new = _small(key)
            if new is not None and value > new:
                values[key] = new
    heads, shared = "num_attention_heads", "num_key_value_heads"
    if shared in values and _value(config, heads) == _value(config, shared):
        values[shared] = values.get(heads, values[shared])
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        kinds = _value(config, key)
        if isinstance(kinds, list) and "num_hidden_layers" in values:  # one layer of each kind
            kinds = list(dict.fromkeys(kinds))
            values[key] = (2 * kinds)[: max(2, len(kinds))]
            values["num_hidden_layers"] = len(values[key])
    return {**values, **_SPECIAL.get(type(config).__name__, {})}


def _value(config: Any, key: str) -> Any:
    """None also where the configuration has one value a layer, and raises."""
    try:
        return getattr(config, key, None)
    except Exception:
        return None


def _small(key: str) -> int | None:
    return next((size for pattern, size in _SMALL if re.fullmatch(pattern, key)), None)


def _fit_tokens(config: Any) -> Any:
    """Special tokens inside the small vocabulary; no dropping of whole layers on one rank alone."""
    for number, each in enumerate((config, *_nested(config))):
        for key in ("pad", "bos", "eos", "sep", "cls", "mask", "unk", "decoder_start"):
            if isinstance(_value(each, f"{key}_token_id"), (int, list)):
                setattr(each, f"{key}_token_id", 1 + number % 2)
        if _value(each, "is_encoder_decoder") and _value(each, "decoder_start_token_id") is None:
            each.decoder_start_token_id = 1
        if _value(each, "pad_token_id") is None:
            each.pad_token_id = 0
        each.use_cache = False
    return config


def _nested(config: Any) -> list[Any]:
    return [v for v in vars(config).values() if hasattr(v, "to_dict") and hasattr(v, "model_type")]


def _number(config: Any, *keys: str, default: int) -> int:
    for key in keys:
        for each in (config, *_nested(config)):
            value = _value(each, key)
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return default


def _inputs(model: nn.Module, task: str) -> Inputs:
    config: Any = model.config
    accepts = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    batch: Inputs = {}
    vocabulary = _number(config, "vocab_size", default=VOCABULARY)
    if task == "image" or main == "pixel_values":
        size = _number(config, "image_size", default=32)
        channels = _number(config, "num_channels", default=3)
        batch[main] = torch.randn(BATCH, channels, size, size)
    elif main == "input_features" or "input_features" in accepts:
        bins = _number(config, "num_mel_bins", "input_feat_per_channel", "feature_size", default=80)
        length = 2 * _number(config, "max_source_positions", default=32)
        by_bins = type(config).__name__ == "WhisperConfig"
        shape = (BATCH, bins, length) if by_bins else (BATCH, length, bins)
        batch["input_features"] = torch.randn(shape)
    elif main == "input_values" or "input_values" in accepts:
        batch["input_values"] = _audio(config, task)
    else:
        batch["input_ids"] = torch.randint(3, max(4, min(vocabulary, 90)), (BATCH, LENGTH))
    if "labels" in accepts:
        text = torch.randint(3, max(4, min(vocabulary, 90)), (BATCH, LENGTH))
        classes = torch.randint(0, _number(config, "num_labels", default=2), (BATCH,))
        if task in ("image", "audio"):
            batch["labels"] = classes
        elif task == "ctc":
            batch["labels"] = text[:, :3]
        else:
            batch["labels"] = batch["input_ids"].clone() if task == "causal" else text
    elif "decoder_input_ids" in accepts:
        batch["decoder_input_ids"] = torch.randint(3, 90, (BATCH, LENGTH))
    if "use_cache" in accepts:
        batch["use_cache"] = False
    return batch


def _audio(config: Any, task: str) -> Tensor:
    if hasattr(config, "num_mel_bins"):  # a spectrogram
        length = _number(config, "max_length", default=64)
        return torch.randn(BATCH, length, _number(config, "num_mel_bins", default=80))
    return torch.randn(BATCH, 6000)
