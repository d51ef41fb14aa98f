"""Libraries around a model that `fully_shard` sharded, called as usual. Arguments: cases."""

import os

import torch
import torch.distributed as dist
from common import (
    SCRATCH,
    VOCABULARY,
    language_loss,
    lora,
    rank,
    report_classes,
    report_loss,
    run,
    tiny_llama,
    tokens,
    train,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 4


def sharded(model, layers, policy=None):
    options = {"mp_policy": policy} if policy else {}
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def llama(policy=None, prepare=None):
    model = tiny_llama()
    if prepare is not None:
        prepare(model)
    return sharded(model, model.model.layers, policy)


def adamw(model):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def course(case, model, optimizer, **options):
    report_classes(case, model)
    train(case, model, optimizer, range(STEPS), **options)


def evaluated(case, model, optimizer, before=None, after=None, loss_of=language_loss):
    """A course whose weights are changed, and evaluated, behind every step."""

    def evaluate():
        if before is not None:
            before()
        with torch.no_grad():
            report_loss(case, loss_of(model, 99))
        model.reshard()  # torch's root keeps what it gathered, and misses what is written next
        if after is not None:
            after()

    course(case, model, optimizer, loss_of=loss_of, after=evaluate)


# ---- optimizers and averages


def schedulefree(case):
    """`eval()` and `train()` write the parameters by hand."""
    from schedulefree import AdamWScheduleFree

    model = llama()
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)
    optimizer.train()
    evaluated(case, model, optimizer, before=optimizer.eval, after=optimizer.train)


def diffusion(case):
    """A Flux of diffusers that learns a flow, evaluated each step with its averaged weights."""
    from diffusers import FluxTransformer2DModel
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )
    sharded(model, [*model.transformer_blocks, *model.single_transformer_blocks])
    average = EMAModel(model.parameters(), decay=0.5)

    def loss_of(model, step):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        image, noise = torch.randn(2, 2, 6, 4, generator=generator)
        time = torch.rand(2, generator=generator)
        flow = model(
            hidden_states=torch.lerp(image, noise, time[:, None, None]),
            encoder_hidden_states=torch.randn(2, 3, 16, generator=generator),
            pooled_projections=torch.randn(2, 16, generator=generator),
            timestep=time,
            img_ids=torch.arange(18.0).view(6, 3),
            txt_ids=torch.zeros(3, 3),
        ).sample
        return torch.nn.functional.mse_loss(flow, noise - image)

    def swap_in():
        average.step(model.parameters())
        average.store(model.parameters())
        average.copy_to(model.parameters())

    def swap_out():
        average.restore(model.parameters())

    evaluated(case, model, adamw(model), before=swap_in, after=swap_out, loss_of=loss_of)


# ---- quantized training


def _quantized(case, config):
    """The reduction's dtype is named: without one torch 2.13 reduces in bf16, fsdp2 in fp32."""
    from torchao import quantize_

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = llama(policy, lambda model: quantize_(model.model.layers, config))
    evaluated(case, model, adamw(model))


def int8(case):
    from torchao.prototype.quantized_training import int8_mixed_precision_training

    _quantized(case, int8_mixed_precision_training())


def bitnet(case):
    from torchao.prototype.quantized_training import bitnet_training

    _quantized(case, bitnet_training())


def float8(case):
    """All-gathers of 8-bit floats. Their products are emulated, because CPUs have none."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = llama(
        policy, lambda model: convert_to_float8_training(model.model.layers, config=config)
    )
    evaluated(
        case, model, adamw(model), before=lambda: precompute_float8_dynamic_scale_for_fsdp(model)
    )


# ---- loaders and models


def torchdata(case):
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = iter(StatefulDataLoader([tokens(step) for step in range(STEPS)], batch_size=None))

    def loss_of(model, _):
        batch = next(rows)
        return model(input_ids=batch, labels=batch).loss

    model = llama()
    course(case, model, adamw(model), loss_of=loss_of)


def sentences(case):
    """A sentence-transformers model of a tiny BERT, with its multiple-negatives loss."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = BertModel(config)

        def forward(self, features):
            hidden = self.bert(features["input_ids"], features["attention_mask"])[0]
            return {**features, "token_embeddings": hidden}

    encoder = Encoder()
    model = SentenceTransformer(modules=[encoder, modules.Pooling(32)], device="cpu")
    sharded(model, encoder.bert.encoder.layer)
    multiple_negatives = losses.MultipleNegativesRankingLoss(model)

    def loss_of(_, step):
        pair = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in (tokens(step, 4), tokens(step + 50, 4))
        ]
        return multiple_negatives(pair, torch.empty(0))

    course(case, model, adamw(model), loss_of=loss_of)


def transformers(case):
    """Its own `fully_shard` path: sharded while it is loaded, on the meta device, then filled."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    way = case.removeprefix("transformers_")
    folder = os.path.join(SCRATCH, case)
    if rank() == 0:
        tiny_llama(tie_word_embeddings=way == "tied").save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(fsdp_size=2, fsdp_mixed_precision=way == "mixed")
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    if way == "lora":  # on a model that is sharded already: adapters stay whole on every rank
        from peft import get_peft_model

        model = get_peft_model(model, lora())
    course(case, model, adamw(model))
    if way == "plain":
        folder = os.path.join(SCRATCH, "saved")
        model.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(fsdp_size=2)
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
        train(case, model, adamw(model), range(STEPS, 2 * STEPS))


transformers_plain = transformers_mixed = transformers_tied = transformers_lora = transformers


def olmo(case):
    """OLMo-core's train module, whose model shards itself by a wrapping strategy."""
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig, TransformerDataParallelWrappingStrategy
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.train_module.transformer import (
        TransformerDataParallelConfig,
        TransformerTrainModule,
    )

    length = 8
    torch.manual_seed(0)
    module = TransformerTrainModule(
        model=TransformerConfig.olmo2_1M(VOCABULARY).build(init_device="meta"),
        optim=AdamWConfig(lr=1e-2),
        rank_microbatch_size=2 * length,
        max_sequence_length=length,
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp,
            param_dtype=DType.bfloat16,
            wrapping_strategy=TransformerDataParallelWrappingStrategy(case.removeprefix("olmo_")),
            prefetch_factor=1,
        ),
        device=torch.device("cpu"),
    )

    def loss_of(model, step):
        ids = tokens(step)
        return model(ids, labels=ids, loss_reduction="mean", return_logits=False).loss

    def clip(_):  # the module's own step clips, and asks a trainer where to log the norm
        return module._clip_grad_norm(1e9)

    course(case, module.model, module.optim, loss_of=loss_of, clip=clip)


olmo_full = olmo_blocks = olmo

dist.init_process_group("gloo")
run(lambda case: globals()[case](case))
