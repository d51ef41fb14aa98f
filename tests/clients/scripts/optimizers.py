"""What scripts about optimizers share: a model of even or uneven rows, and its course.

All ranks have the same batch, so that the mean of their gradients is each one's to the bit.
"""

import copy
from itertools import pairwise

import torch
import torch.distributed.checkpoint as dcp
from common import SCRATCH
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

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


def built(dims, fully_shard=None):
    torch.manual_seed(0)
    model = Net(dims)
    if fully_shard is not None:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


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


def resumed(model, optimizer, make_model, make_optimizer, dims):
    """Parameters of another model and optimizer that `torch.distributed.checkpoint` made alike,
    two steps later; and the first ones', which did not stop."""
    folder = f"{SCRATCH}/{type(optimizer).__name__}"
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other = make_model()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    taker = make_optimizer(other.parameters())
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
