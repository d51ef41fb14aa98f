"""Optimizers of libraries over sharded parameters, beside the unsharded. Arguments: cases."""

import copy
import os
import sys

# torch 2.13's compile cache takes one rank's kernel for another's where rows are uneven, and one
# kind of state for another: torchao's steps run as they are written.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch.distributed as dist
from common import finish, report_classes, report_loss
from optimizers import EVEN, UNEVEN, apart, built, raises, resumed, train, whole
from torch.distributed.fsdp import fully_shard


def beside_unsharded(case, make, dims):
    """(apart from the unsharded, the sharded parameters); then a load resumes to the bit."""
    model = built(dims, fully_shard)
    report_classes(case, model)
    optimizer = make(model.parameters())
    found = train(model, optimizer, dims, on_loss=lambda loss: report_loss(case, loss))
    plain = built(dims)
    start = whole(plain)
    expected = train(plain, make(plain.parameters()), dims)
    return apart(found, expected, start), model, optimizer


def low_precision(case, kind):
    """torchao quantizes each rank's rows by themselves, if they are 4,096 elements in whole blocks.

    Whole blocks within rows are the unsharded ones. Otherwise states are codes on some ranks, and
    fp32 on others or unsharded: the course then is as far from AdamW's in fp32 as codes all over
    are, at most.
    """
    from torchao import optim

    def make(params):
        return getattr(optim, kind)(params, lr=1e-2)

    def course(dims, make):
        plain = built(dims)
        start = whole(plain)
        return train(plain, make(plain.parameters()), dims), start

    for dims in (EVEN, UNEVEN):
        far, model, optimizer = beside_unsharded(case, make, dims)
        exact, start = course(dims, lambda params: torch.optim.AdamW(params, lr=1e-2))
        error = apart(whole(model), exact, start)
        if dims is EVEN:
            assert far == 0.0, far
            allowed = error
        else:
            assert far > 0.0, far
            assert error <= allowed, (error, allowed)
        pair = resumed(model, optimizer, lambda dims=dims: built(dims, fully_shard), make, dims)
        assert torch.equal(*pair)
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

    model = built(EVEN, fully_shard)
    report_classes(case, model)
    report_loss(case, 0.0)
    raises("only supports CUDA & XPU", lambda: CPUOffloadOptimizer(model.parameters(), lr=1e-2))


def bitsandbytes(case):
    """Its kernels, of 32 bits or 8, cannot read a DTensor; over torch's FSDP2 DTensor says so."""
    from bitsandbytes import optim

    for kind, words in (("AdamW32bit", "does not have a sharding"), ("AdamW8bit", "got mixed")):
        model = built(EVEN, fully_shard)
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

    def make(params):
        optimizer = AdamWScheduleFree(params, lr=1e-2)
        optimizer.train()
        return optimizer

    for dims in (EVEN, UNEVEN):
        far, model, optimizer = beside_unsharded(case, make, dims)
        assert far == 0.0, far
        plain = built(dims)
        own = make(plain.parameters())
        train(plain, own, dims)
        for each in (optimizer, own):
            each.eval()
        assert torch.equal(whole(model), whole(plain))
        for each in (optimizer, own):
            each.train()
        again, going = resumed(
            model, optimizer, lambda dims=dims: built(dims, fully_shard), make, dims
        )
        assert not torch.equal(again, going)


def heavyball(case):
    """It gathers what looks at whole matrices, on every rank: all are right, to the bit."""
    import heavyball

    heavyball.utils.compile_mode = None
    for kind in ("AdamW", "SOAP", "Muon", "SFAdamW", "ADOPT"):
        for dims in (EVEN, UNEVEN):

            def make(params, kind=kind):
                return getattr(heavyball, kind)(params, lr=1e-2)

            far, model, optimizer = beside_unsharded(case, make, dims)
            assert far == 0.0, (kind, far)
            other = built(dims, fully_shard)
            other.load_state_dict(model.state_dict())
            taker = make(other.parameters())
            taker.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            again = train(other, taker, dims, 4, 2)
            assert torch.equal(again, train(model, optimizer, dims, 4, 2)), kind


dist.init_process_group("gloo")
for name in sys.argv[1:]:
    globals()[name](name)
finish()
