"""Libraries around a model that `fully_shard` sharded, called as usual. Arguments: cases."""

import sys

import torch
import torch.distributed as dist
from common import finish, report_classes, report_loss, tiny_llama, tokens
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


def language(case, model, optimizer, steps=range(STEPS), around=lambda training: None):
    report_classes(case, model)
    for step in steps:
        around(True)
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        report_loss(case, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        around(False)
        with torch.no_grad():
            report_loss(case, model(input_ids=tokens(99), labels=tokens(99)).loss)
        model.reshard()  # torch's root keeps what it gathered, and misses what is written next


def schedulefree(case):
    """Evaluated after every step: `eval()` and `train()` write the parameters by hand."""
    from schedulefree import AdamWScheduleFree

    model = llama()
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)
    language(
        case, model, optimizer, around=lambda on: optimizer.train() if on else optimizer.eval()
    )


def _quantized(case, config):
    """The reduction's dtype is named: without one torch 2.13 reduces in bf16, fsdp2 in fp32."""
    from torchao import quantize_

    def prepare(model):
        quantize_(model.model.layers, config)

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = llama(policy, prepare)
    language(case, model, torch.optim.AdamW(model.parameters(), lr=1e-2))


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

    def prepare(model):
        convert_to_float8_training(model.model.layers, config=config)

    model = llama(MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32), prepare)

    def around(training):
        if not training:
            precompute_float8_dynamic_scale_for_fsdp(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    language(case, model, optimizer, around=around)


def torchdata(case):
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = [tokens(step) for step in range(2 * STEPS)]
    loader = StatefulDataLoader(rows, batch_size=None)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    report_classes(case, model)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        report_loss(case, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sentences(case):
    """A sentence-transformers model of a tiny BERT, with its multiple-negatives loss."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformer = modules.Transformer.__new__(modules.Transformer)
    torch.nn.Module.__init__(transformer)
    bert = BertModel(config)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = bert

        def forward(self, features):
            hidden = self.bert(features["input_ids"], features["attention_mask"])[0]
            return {**features, "token_embeddings": hidden}

    model = SentenceTransformer(modules=[Encoder(), modules.Pooling(32)], device="cpu")
    sharded(model, bert.encoder.layer)
    loss_of = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    report_classes(case, model)
    for step in range(STEPS):
        pair = [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in (tokens(step, 4), tokens(step + 50, 4))
        ]
        loss = loss_of(pair, torch.empty(0))
        report_loss(case, loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = EMAModel(model.parameters(), decay=0.5)
    report_classes(case, model)

    def loss_of(step):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        image, noise = torch.randn(2, 2, 6, 4, generator=generator)
        time = torch.rand(2, generator=generator)
        mixed = torch.lerp(image, noise, time[:, None, None])
        flow = model(
            hidden_states=mixed,
            encoder_hidden_states=torch.randn(2, 3, 16, generator=generator),
            pooled_projections=torch.randn(2, 16, generator=generator),
            timestep=time,
            img_ids=torch.arange(18.0).view(6, 3),
            txt_ids=torch.zeros(3, 3),
        ).sample
        loss = torch.nn.functional.mse_loss(flow, noise - image)
        report_loss(case, loss)
        return loss

    for step in range(STEPS):
        loss_of(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        average.store(model.parameters())
        average.copy_to(model.parameters())
        with torch.no_grad():
            loss_of(99)
        model.reshard()  # torch's root keeps what it gathered, and misses what is written next
        average.restore(model.parameters())


def _heavyball(case, kind):
    import heavyball

    heavyball.utils.compile_mode = None
    model = llama()
    language(case, model, getattr(heavyball, kind)(model.parameters(), lr=1e-2))


def heavyball_adamw(case):
    _heavyball(case, "AdamW")


def heavyball_soap(case):
    _heavyball(case, "SOAP")


def heavyball_muon(case):
    _heavyball(case, "Muon")


dist.init_process_group("gloo")
for name in sys.argv[1:]:
    globals()[name](name)
finish()
