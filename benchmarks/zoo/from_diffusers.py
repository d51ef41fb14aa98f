"""Architectures of diffusers, each with the arguments of a small one and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import models
from torch import Tensor

from benchmarks.zoo.instances import BATCH, Inputs, Instance, repeated

_Made = tuple[dict[str, Any], Callable[[], Inputs]]


def _time() -> Tensor:
    return torch.randint(0, 1000, (BATCH,))


def _image(channels: int = 4, size: int = 8) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def _video(channels: int = 4, frames: int = 3, size: int = 8) -> Tensor:
    return torch.randn(BATCH, channels, frames, size, size)


def _text(length: int = 6, dim: int = 32) -> Tensor:
    return torch.randn(BATCH, length, dim)


_UNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 8,
}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def _models() -> dict[str, _Made]:
    down, up = "DownBlock2D", "UpBlock2D"
    unet = {**_UNET, "in_channels": 4, "out_channels": 4}
    cross = {
        **unet,
        "down_block_types": ("CrossAttnDownBlock2D", down),
        "up_block_types": (up, "CrossAttnUpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
    }
    three = {
        **cross,
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    vae = {
        "block_out_channels": (16, 32),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "norm_num_groups": 8,
        "latent_channels": 4,
    }
    dit = {**_HEADS, "num_layers": 2, "in_channels": 4, "sample_size": 8, "patch_size": 2}
    flux = {
        **_HEADS,
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    }

    def at_times(**more: Callable[[], Any]) -> Callable[[], Inputs]:
        return lambda: {
            "sample": _image(),
            "timestep": _time(),
            **{key: make() for key, make in more.items()},
        }

    def hidden(key: str = "timestep", **more: Callable[[], Any]) -> Callable[[], Inputs]:
        return lambda: {
            "hidden_states": _image(),
            key: _time(),
            **{name: make() for name, make in more.items()},
        }

    def flux_inputs() -> Inputs:
        return {
            "hidden_states": torch.randn(BATCH, 16, 16),
            "encoder_hidden_states": _text(),
            "pooled_projections": torch.randn(BATCH, 32),
            "timestep": torch.rand(BATCH),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(6, 3),
        }

    def video_hidden(channels: int = 4, **more: Callable[[], Any]) -> Callable[[], Inputs]:
        return lambda: {
            "hidden_states": _video(channels),
            "timestep": _time(),
            "encoder_hidden_states": _text(),
            **{key: make() for key, make in more.items()},
        }

    return {
        "UNet2DModel": (
            {
                **unet,
                "down_block_types": (down, "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", up),
            },
            at_times(),
        ),
        "UNet2DConditionModel": (cross, at_times(encoder_hidden_states=_text)),
        "UNet1DModel": (
            {
                "block_out_channels": (32, 64),
                "sample_size": 16,
                "in_channels": 4,
                "out_channels": 4,
                "extra_in_channels": 16,
                "use_timestep_embedding": False,
                "down_block_types": ("DownBlock1D", "AttnDownBlock1D"),
                "up_block_types": ("AttnUpBlock1D", "UpBlock1D"),
            },
            lambda: {"sample": torch.randn(BATCH, 4, 32), "timestep": _time()},
        ),
        "UNet3DConditionModel": (
            three,
            lambda: {"sample": _video(), "timestep": _time(), "encoder_hidden_states": _text()},
        ),
        "UNetMotionModel": (
            {
                **_UNET,
                "in_channels": 4,
                "out_channels": 4,
                "cross_attention_dim": 32,
                "num_attention_heads": 2,
                "motion_num_attention_heads": 2,
                "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
                "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
            },
            lambda: {"sample": _video(), "timestep": _time(), "encoder_hidden_states": _text()},
        ),
        "AutoencoderKL": (vae, lambda: {"sample": _image(3, 16)}),
        "AsymmetricAutoencoderKL": (
            {
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "down_block_out_channels": (16, 32),
                "up_block_types": ("UpDecoderBlock2D",) * 2,
                "up_block_out_channels": (16, 32),
                "norm_num_groups": 8,
            },
            lambda: {"sample": _image(3, 16)},
        ),
        "AutoencoderTiny": (
            {
                "encoder_block_out_channels": (16, 16),
                "decoder_block_out_channels": (16, 16),
                "num_encoder_blocks": (1, 2),
                "num_decoder_blocks": (2, 1),
                "upsampling_scaling_factor": 2,
            },
            lambda: {"sample": _image(3, 16)},
        ),
        "AutoencoderOobleck": (
            {
                "encoder_hidden_size": 8,
                "decoder_channels": 8,
                "decoder_input_channels": 8,
                "downsampling_ratios": [2, 4],
                "channel_multiples": [1, 2],
            },
            lambda: {"sample": torch.randn(BATCH, 2, 64)},
        ),
        "VQModel": (
            {**vae, "num_vq_embeddings": 16, "block_out_channels": (16, 32)},
            lambda: {"sample": _image(3, 16)},
        ),
        "DiTTransformer2DModel": (
            {**dit, "norm_num_groups": 8, "num_embeds_ada_norm": 20},
            hidden(class_labels=lambda: torch.randint(0, 5, (BATCH,))),
        ),
        "PixArtTransformer2DModel": (
            {
                **dit,
                "norm_num_groups": 8,
                "caption_channels": 32,
                "cross_attention_dim": 32,
                "out_channels": 8,
            },
            hidden(
                encoder_hidden_states=_text,
                added_cond_kwargs=lambda: {"aspect_ratio": None, "resolution": None},
            ),
        ),
        "Transformer2DModel": (
            {
                **_HEADS,
                "num_layers": 2,
                "in_channels": 32,
                "norm_num_groups": 8,
                "cross_attention_dim": 32,
            },
            lambda: {"hidden_states": _image(32), "encoder_hidden_states": _text()},
        ),
        "TransformerTemporalModel": (
            {**_HEADS, "num_layers": 2, "in_channels": 32, "norm_num_groups": 8},
            lambda: {"hidden_states": _image(32), "num_frames": BATCH},
        ),
        "SD3Transformer2DModel": (
            {
                **dit,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 8,
            },
            hidden(encoder_hidden_states=_text, pooled_projections=lambda: torch.randn(BATCH, 32)),
        ),
        "AuraFlowTransformer2DModel": (
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "num_mmdit_layers": 2,
                "num_single_dit_layers": 2,
                **_HEADS,
                "joint_attention_dim": 32,
                "caption_projection_dim": 32,
                "out_channels": 4,
                "pos_embed_max_size": 64,
            },
            hidden(encoder_hidden_states=_text),
        ),
        "FluxTransformer2DModel": (flux, flux_inputs),
        "HunyuanDiT2DModel": (
            {
                **_HEADS,
                "in_channels": 4,
                "patch_size": 2,
                "num_layers": 2,
                "sample_size": 8,
                "hidden_size": 32,
                "cross_attention_dim": 32,
                "cross_attention_dim_t5": 32,
                "pooled_projection_dim": 16,
                "text_len": 4,
                "text_len_t5": 4,
                "activation_fn": "gelu-approximate",
            },
            hidden(
                encoder_hidden_states=lambda: _text(4),
                text_embedding_mask=lambda: torch.ones(BATCH, 4),
                encoder_hidden_states_t5=lambda: _text(4),
                text_embedding_mask_t5=lambda: torch.ones(BATCH, 4),
                image_meta_size=lambda: torch.ones(BATCH, 6),
                style=lambda: torch.zeros(BATCH, dtype=torch.long),
                image_rotary_emb=lambda: [torch.ones(16, 16), torch.zeros(16, 16)],
            ),
        ),
        "LatteTransformer3DModel": (
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 1,
                "sample_size": 8,
                "patch_size": 2,
                "caption_channels": 32,
                "cross_attention_dim": 32,
                "video_length": 3,
                "norm_elementwise_affine": False,
                "norm_type": "ada_norm_single",
            },
            video_hidden(),
        ),
        "WanTransformer3DModel": (
            {
                "patch_size": (1, 2, 2),
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 32,
                "freq_dim": 32,
                "ffn_dim": 64,
                "num_layers": 2,
            },
            video_hidden(),
        ),
        "MochiTransformer3DModel": (
            {
                **_HEADS,
                "num_layers": 2,
                "pooled_projection_dim": 16,
                "in_channels": 4,
                "text_embed_dim": 32,
                "time_embed_dim": 4,
                "max_sequence_length": 16,
            },
            video_hidden(encoder_attention_mask=lambda: torch.ones(BATCH, 6, dtype=torch.bool)),
        ),
        "AllegroTransformer3DModel": (
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 1,
                "cross_attention_dim": 32,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 3,
                "caption_channels": 32,
            },
            video_hidden(),
        ),
        "CogVideoXTransformer3DModel": (
            {
                **_HEADS,
                "in_channels": 4,
                "out_channels": 4,
                "time_embed_dim": 4,
                "text_embed_dim": 32,
                "num_layers": 2,
                "sample_width": 8,
                "sample_height": 8,
                "sample_frames": 9,
                "patch_size": 2,
                "temporal_compression_ratio": 4,
                "max_text_seq_length": 6,
            },
            lambda: {
                "hidden_states": torch.randn(BATCH, 3, 4, 8, 8),
                "timestep": _time(),
                "encoder_hidden_states": _text(),
            },
        ),
        "CogView3PlusTransformer2DModel": (
            {
                **dit,
                "text_embed_dim": 32,
                "time_embed_dim": 8,
                "condition_dim": 4,
                "pos_embed_max_size": 8,
                "out_channels": 4,
            },
            hidden(
                encoder_hidden_states=_text,
                original_size=lambda: torch.full((BATCH, 2), 8.0),
                target_size=lambda: torch.full((BATCH, 2), 8.0),
                crop_coords=lambda: torch.zeros(BATCH, 2),
            ),
        ),
        "SanaTransformer2DModel": (
            {
                **dit,
                "out_channels": 4,
                "num_cross_attention_heads": 2,
                "cross_attention_head_dim": 16,
                "cross_attention_dim": 32,
                "caption_channels": 32,
                "patch_size": 1,
            },
            hidden(encoder_hidden_states=_text),
        ),
        "Lumina2Transformer2DModel": (
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "hidden_size": 32,
                "num_layers": 2,
                "num_refiner_layers": 1,
                "num_attention_heads": 2,
                "num_kv_heads": 1,
                "multiple_of": 16,
                "axes_dim_rope": (4, 4, 8),
                "axes_lens": (16, 16, 16),
                "cap_feat_dim": 32,
            },
            hidden(
                encoder_hidden_states=_text,
                encoder_attention_mask=lambda: torch.ones(BATCH, 6, dtype=torch.bool),
            ),
        ),
        "LTXVideoTransformer3DModel": (
            {
                **_HEADS,
                "in_channels": 8,
                "out_channels": 8,
                "cross_attention_dim": 32,
                "num_layers": 2,
                "caption_channels": 32,
            },
            lambda: {
                "hidden_states": torch.randn(BATCH, 12, 8),
                "timestep": _time(),
                "encoder_hidden_states": _text(),
                "encoder_attention_mask": torch.ones(BATCH, 6),
                "num_frames": 3,
                "height": 2,
                "width": 2,
            },
        ),
        "QwenImageTransformer2DModel": (
            {
                **_HEADS,
                "patch_size": 2,
                "in_channels": 16,
                "out_channels": 4,
                "num_layers": 2,
                "joint_attention_dim": 32,
                "axes_dims_rope": (4, 4, 8),
            },
            lambda: {
                "hidden_states": torch.randn(BATCH, 16, 16),
                "timestep": torch.rand(BATCH),
                "encoder_hidden_states": _text(),
                "encoder_hidden_states_mask": torch.ones(BATCH, 6, dtype=torch.long),
                "img_shapes": [[(1, 4, 4)]] * BATCH,
            },
        ),
        "PriorTransformer": (
            {
                **_HEADS,
                "num_layers": 2,
                "embedding_dim": 32,
                "num_embeddings": 6,
                "additional_embeddings": 4,
            },
            lambda: {
                "hidden_states": torch.randn(BATCH, 32),
                "timestep": _time(),
                "proj_embedding": torch.randn(BATCH, 32),
                "encoder_hidden_states": _text(),
            },
        ),
        "UVit2DModel": (
            {
                "hidden_size": 32,
                "cond_embed_dim": 32,
                "micro_cond_encode_dim": 8,
                "micro_cond_embed_dim": 40,
                "encoder_hidden_size": 32,
                "vocab_size": 32,
                "codebook_size": 32,
                "in_channels": 32,
                "block_out_channels": 32,
                "num_res_blocks": 1,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "sample_size": 8,
                "block_num_heads": 4,
            },
            lambda: {
                "input_ids": torch.randint(0, 31, (BATCH, 8, 8)),
                "encoder_hidden_states": _text(),
                "pooled_text_emb": torch.randn(BATCH, 32),
                "micro_conds": torch.rand(BATCH, 5),
            },
        ),
        "ControlNetModel": (
            {
                "block_out_channels": (32, 64),
                "layers_per_block": 1,
                "in_channels": 4,
                "down_block_types": (down, "CrossAttnDownBlock2D"),
                "cross_attention_dim": 32,
                "attention_head_dim": 8,
                "norm_num_groups": 8,
                "conditioning_embedding_out_channels": (16, 32),
            },
            at_times(encoder_hidden_states=_text, controlnet_cond=lambda: _image(3, 16)),
        ),
        "T5FilmDecoder": (
            {
                "input_dims": 16,
                "targets_length": 8,
                "d_model": 32,
                "num_layers": 2,
                "num_heads": 2,
                "d_kv": 16,
                "d_ff": 64,
            },
            lambda: {
                "encodings_and_masks": [(_text(), torch.ones(BATCH, 6))],
                "decoder_input_tokens": torch.randn(BATCH, 8, 16),
                "decoder_noise_time": torch.rand(BATCH),
            },
        ),
    }


def names() -> list[str]:
    return [name for name in _models() if hasattr(models, name)]


def build(name: str) -> Instance:
    arguments, inputs = _models()[name]
    model = getattr(models, name)(**arguments)
    return Instance(model, inputs, repeated(model))
