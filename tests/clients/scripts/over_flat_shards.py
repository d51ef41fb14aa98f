"""Optimizers of libraries through calls of fsdp2's own. Arguments: cases."""

import os
import sys
from functools import partial

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or torchao compiles its step for a minute

import torch
import torch.distributed as dist
from common import SCRATCH, finish
from optimizers import EVEN, UNEVEN, built, raises, resumed, train, whole

import fsdp2
from fsdp2.optim import FlatOptimizer


def flat(model, kind, **options):
    return FlatOptimizer(model, kind, lr=1e-2, elementwise=True, **options)


def bitsandbytes():
    """States of 32 bits are right, to the bit; scales of those of 8 cross parameters."""
    from bitsandbytes import optim

    for dims in (EVEN, UNEVEN):
        model, plain = built(dims, fsdp2.fully_shard), built(dims)
        optimizer = flat(model, optim.AdamW32bit)
        found = train(model, optimizer, dims)
        assert torch.equal(found, train(plain, optim.AdamW32bit(plain.parameters(), lr=1e-2), dims))
        made = []

        def make_model(dims=dims, made=made):
            made.append(built(dims, fsdp2.fully_shard))
            return made[-1]

        def make(params, made=made):
            return flat(made[-1], optim.AdamW32bit)

        assert torch.equal(*resumed(model, optimizer, make_model, make, dims))
        other = built(dims, fsdp2.fully_shard)
        step = partial(train, other, flat(other, optim.AdamW8bit), dims)
        raises("AdamW8bit keeps a Tensor", step)


def torchao():
    """Refused at its first step; checkpoints of it over the parameters are torch's to write."""
    from torchao import optim

    model = built(EVEN, fsdp2.fully_shard)
    raises("AdamW8bit keeps", partial(train, model, flat(model, optim.AdamW8bit), EVEN))
    said = "FlatOptimizer does not know whether AdamW8bit"
    raises(said, lambda: FlatOptimizer(model, optim.AdamW8bit))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, EVEN, 0, 1)
    raises(
        "whose shards are of the tensor subclass OptimState8bit",
        lambda: fsdp2.checkpoint.save(f"{SCRATCH}/torchao", model, optimizer, step=1),
    )


def schedulefree():
    """Its own functions switch: they look at groups and states, which are there. A load resumes."""
    from schedulefree import AdamWScheduleFree

    for dims in (EVEN, UNEVEN):
        model, plain = built(dims, fsdp2.fully_shard), built(dims)
        optimizer, own = flat(model, AdamWScheduleFree), AdamWScheduleFree(plain.parameters(), 1e-2)
        for each in (optimizer, own):
            AdamWScheduleFree.train(each)
        assert torch.equal(train(model, optimizer, dims), train(plain, own, dims))
        folder = f"{SCRATCH}/schedulefree{dims[-1]}"
        fsdp2.checkpoint.save(folder, model, optimizer, step=1)
        going = train(plain, own, dims, 4, 2)
        other = built(dims, fsdp2.fully_shard)
        for taker in (flat(other, AdamWScheduleFree), AdamWScheduleFree(other.parameters(), 1e-2)):
            fsdp2.checkpoint.load(folder, other, taker)
            assert torch.equal(train(other, taker, dims, 4, 2), going)
        train(model, optimizer, dims, 4, 2)
        for each in (optimizer, own):
            AdamWScheduleFree.eval(each)
        assert torch.equal(whole(model), whole(plain))


def heavyball():
    """State is in a dict per parameter."""
    import heavyball

    heavyball.utils.compile_mode = None
    model = built(EVEN, fsdp2.fully_shard)
    optimizer = flat(model, heavyball.AdamW)
    raises("AdamW keeps a dict as state 0", lambda: train(model, optimizer, EVEN))
    optimizer = heavyball.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, EVEN)
    raises(
        "has the key 0, which load() would return as a string",
        lambda: fsdp2.checkpoint.save(f"{SCRATCH}/heavyball", model, optimizer, step=1),
    )


dist.init_process_group("gloo")
for name in sys.argv[1:]:
    globals()[name]()
finish()
