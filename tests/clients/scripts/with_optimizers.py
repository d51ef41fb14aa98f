"""Optimizers of libraries over sharded parameters, beside the unsharded. Arguments: cases.

Cases `flat_…` give them to fsdp2's own `FlatOptimizer` and checkpoints. All ranks have the same
batch, so that the mean of their gradients is each one's to the bit.
"""

import copy
import os
from functools import partial
from itertools import pairwise

# torch 2.13's compile cache takes one rank's kernel for another's where rows are uneven, and one
# kind of state for another: torchao's steps run as they are written.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import SCRATCH, report_classes, report_loss, run
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

EVEN = (64, 256, 128, 64)  # on two ranks, weights have whole blocks of 256 elements
UNEVEN = (64, 257, 131, 7)
STEPS = 4


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(dims))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def built(dims):
    torch.manual_seed(0)
    return Net(dims)


def sharded(dims):
    model = built(dims)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model, optimizer, dims, start=0, steps=STEPS, on_loss=lambda loss: None):
    """Steps of a fixed course; those that round by chance do so alike."""
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, dims[0], generator=generator)
        y = torch.randn(16, dims[-1], generator=generator)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean() * 10
        on_loss(loss.detach())
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return whole(model)


def whole(model):
    """Parameters as one tensor."""
    found = (param.detach() for param in model.parameters())
    full = [getattr(param, "full_tensor", param.clone)() for param in found]
    return torch.cat([param.reshape(-1) for param in full])


def apart(found, expected, start):
    """How far two courses are apart, as a part of how far the second has moved."""
    return ((found - expected).norm() / (expected - start).norm()).item()


def resumed(model, optimizer, make, dims):
    """Parameters of another model and optimizer that `torch.distributed.checkpoint` made alike,
    two steps later; and the first ones', which did not stop."""
    folder = f"{SCRATCH}/{type(optimizer).__name__}"
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other = sharded(dims)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    taker = make(other)
    target = {"optimizer": get_optimizer_state_dict(other, taker)}
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(other, taker, target["optimizer"])
    return (train(m, o, dims, STEPS, 2) for m, o in ((other, taker), (model, optimizer)))


def raises(words, function):
    """Assert that an error has these words."""
    said = ""
    try:
        function()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert words in said, said


# ---- over sharded parameters


def course(make, dims):
    """An unsharded model and its optimizer behind their course, and how the model began."""
    model = built(dims)
    start, optimizer = whole(model), make(model)
    train(model, optimizer, dims)
    return model, optimizer, start


def beside_unsharded(case, make, dims):
    """(how far from the unsharded the sharded parameters are, the sharded model, its optimizer)"""
    model = sharded(dims)
    report_classes(case, model)
    optimizer = make(model)
    found = train(model, optimizer, dims, on_loss=lambda loss: report_loss(case, loss))
    plain, _, start = course(make, dims)
    return apart(found, whole(plain), start), model, optimizer


def low_precision(case, kind):
    """torchao quantizes each rank's rows by themselves, if they are 4,096 elements in whole blocks.

    Whole blocks within rows are the unsharded ones. Otherwise states are codes on some ranks, and
    fp32 on others or unsharded: the course then is as far from AdamW's in fp32 as codes all over
    are, at most.
    """
    from torchao import optim

    def make(model):
        return getattr(optim, kind)(model.parameters(), lr=1e-2)

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    for dims in (EVEN, UNEVEN):
        far, model, optimizer = beside_unsharded(case, make, dims)
        exact, _, start = course(adamw, dims)
        error = apart(whole(model), whole(exact), start)
        if dims is EVEN:
            assert far == 0.0, far
            allowed = error
        else:
            assert far > 0.0, far
            assert error <= allowed, (error, allowed)
        assert torch.equal(*resumed(model, optimizer, make, dims))
        report_loss(case, error)


def torchao8(case):
    low_precision(case, "AdamW8bit")


def torchao4(case):
    low_precision(case, "AdamW4bit")


def torchao_fp8(case):
    low_precision(case, "AdamWFp8")


def torchao_offload(case):
    """It asks for an accelerator before it looks at a parameter."""
    from torchao.optim import CPUOffloadOptimizer

    model = sharded(EVEN)
    report_classes(case, model)
    report_loss(case, 0.0)
    raises("only supports CUDA & XPU", lambda: CPUOffloadOptimizer(model.parameters(), lr=1e-2))


def bitsandbytes(case):
    """Its kernels, of 32 bits or 8, cannot read a DTensor; over torch's FSDP2 DTensor says so."""
    from bitsandbytes import optim

    for kind, words in (("AdamW32bit", "does not have a sharding"), ("AdamW8bit", "got mixed")):
        model = sharded(EVEN)
        if fully_shard.__module__.startswith("fsdp2"):
            words = "kernels that cannot read a DTensor"
        optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2)
        raises(words, lambda m=model, o=optimizer: train(m, o, EVEN, 0, 1))
        report_loss(case, 0.0)
    report_classes(case, model)


def schedulefree(case):
    """Right, and evaluated at the averages. `train()` makes torch believe that there is state, so
    that a load into a new optimizer would leave its own out: `fsdp2.checkpoint` does not ask."""
    from schedulefree import AdamWScheduleFree

    def make(model):
        optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2)
        optimizer.train()
        return optimizer

    for dims in (EVEN, UNEVEN):
        far, model, optimizer = beside_unsharded(case, make, dims)
        assert far == 0.0, far
        plain, own, _ = course(make, dims)
        for each in (optimizer, own):
            each.eval()
        assert torch.equal(whole(model), whole(plain))
        for each in (optimizer, own):
            each.train()
        again, going = resumed(model, optimizer, make, dims)
        assert not torch.equal(again, going)


def heavyball(case):
    """It gathers what looks at whole matrices, on every rank: all are right, to the bit."""
    import heavyball

    heavyball.utils.compile_mode = None
    for kind in ("AdamW", "SOAP", "Muon", "SFAdamW", "ADOPT"):
        for dims in (EVEN, UNEVEN):

            def make(model, kind=kind):
                return getattr(heavyball, kind)(model.parameters(), lr=1e-2)

            far, model, optimizer = beside_unsharded(case, make, dims)
            assert far == 0.0, (kind, far)
            other = sharded(dims)
            other.load_state_dict(model.state_dict())
            taker = make(other)
            taker.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            again = train(other, taker, dims, 4, 2)
            assert torch.equal(again, train(model, optimizer, dims, 4, 2)), kind


# ---- over flat shards


def flat(kind, model):
    from fsdp2.optim import FlatOptimizer

    return FlatOptimizer(model, kind, lr=1e-2, elementwise=True)


def flat_bitsandbytes(_):
    """States of 32 bits are right, to the bit; scales of those of 8 cross parameters."""
    from bitsandbytes import optim

    make = partial(flat, optim.AdamW32bit)
    for dims in (EVEN, UNEVEN):
        model = sharded(dims)
        optimizer = make(model)
        found = train(model, optimizer, dims)
        plain, _, _ = course(lambda plain: optim.AdamW32bit(plain.parameters(), lr=1e-2), dims)
        assert torch.equal(found, whole(plain))
        assert torch.equal(*resumed(model, optimizer, make, dims))
        other = sharded(dims)
        step = partial(train, other, flat(optim.AdamW8bit, other), dims)
        raises("AdamW8bit keeps a Tensor", step)


def flat_torchao(_):
    """Refused at its first step; checkpoints of it over the parameters are torch's to write."""
    from torchao import optim

    from fsdp2 import checkpoint
    from fsdp2.optim import FlatOptimizer

    model = sharded(EVEN)
    raises("AdamW8bit keeps", partial(train, model, flat(optim.AdamW8bit, model), EVEN))
    said = "FlatOptimizer does not know whether AdamW8bit"
    raises(said, lambda: FlatOptimizer(model, optim.AdamW8bit))
    optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
    train(model, optimizer, EVEN, 0, 1)
    raises(
        "whose shards are of the tensor subclass OptimState8bit",
        lambda: checkpoint.save(f"{SCRATCH}/torchao", model, optimizer, step=1),
    )


def flat_schedulefree(_):
    """Its own functions switch: they look at groups and states, which are there. A load resumes."""
    from schedulefree import AdamWScheduleFree

    from fsdp2 import checkpoint

    for dims in (EVEN, UNEVEN):
        model, plain = sharded(dims), built(dims)
        optimizer, own = flat(AdamWScheduleFree, model), AdamWScheduleFree(plain.parameters(), 1e-2)
        for each in (optimizer, own):
            AdamWScheduleFree.train(each)
        assert torch.equal(train(model, optimizer, dims), train(plain, own, dims))
        folder = f"{SCRATCH}/schedulefree{dims[-1]}"
        checkpoint.save(folder, model, optimizer, step=1)
        going = train(plain, own, dims, 4, 2)
        other = sharded(dims)
        for taker in (flat(AdamWScheduleFree, other), AdamWScheduleFree(other.parameters(), 1e-2)):
            checkpoint.load(folder, other, taker)
            assert torch.equal(train(other, taker, dims, 4, 2), going)
        train(model, optimizer, dims, 4, 2)
        for each in (optimizer, own):
            AdamWScheduleFree.eval(each)
        assert torch.equal(whole(model), whole(plain))


def flat_heavyball(_):
    """State is in a dict per parameter."""
    import heavyball

    from fsdp2 import checkpoint

    heavyball.utils.compile_mode = None
    model = sharded(EVEN)
    optimizer = flat(heavyball.AdamW, model)
    raises("AdamW keeps a dict as state 0", lambda: train(model, optimizer, EVEN))
    optimizer = heavyball.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, EVEN)
    raises(
        "has the key 0, which load() would return as a string",
        lambda: checkpoint.save(f"{SCRATCH}/heavyball", model, optimizer, step=1),
    )


dist.init_process_group("gloo")
run(lambda case: globals()[case](case))
