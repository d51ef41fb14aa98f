"""LSTMs of a CPU, which are oneDNN's: what they compute, keep for backward and allocate inside.

Outside of ``meta`` torch runs each layer and direction as ``aten::mkldnn_rnn_layer``. It keeps a
workspace for backward, a tensor of bytes, which is twice as large as what the formula of an LSTM
saves, or more. Its size is oneDNN's layout of buffers (src/cpu/rnn, version 3): rows padded to 64
bytes, buffers to pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdp2.core.pieces import round_up

_aten = torch.ops.aten
_VF: Any = torch._VF  # what torch.nn calls
_theirs: Any = _VF.lstm

FORWARD, BACKWARD = "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"
GATES = 4
_PAGE = 4096
_REST = 4664  # of the scratchpad: a page, and what aligns it
_LARGE = 128  # a batch from which on a forward multiplies inputs step by step
_LSTM = 2  # among oneDNN's kinds of cells


@contextmanager
def onednns() -> Iterator[None]:
    """Let LSTMs of ``torch.nn`` run inside as a CPU runs them."""
    _VF.lstm = _lstm
    try:
        yield
    finally:
        del _VF.lstm  # what is looked up then is torch's


def _lstm(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``torch._VF.lstm``, as a CPU runs it: layer by layer, unless sequences are packed."""
    if isinstance(args[1], torch.Tensor) or not _is_onednns(args[0], args[2]):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _theirs(*args)
        return made
    return _by_layers(*args)


def _is_onednns(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Torch's condition; the kernel for projections is another, and of low precision unknown."""
    rows, width = weights[1].shape
    projects = rows != GATES * width
    enabled = bool(torch.backends.mkldnn.enabled) and torch.backends.mkldnn.is_available()
    return enabled and not projects and x.dtype is torch.float32 and x.numel() > 0


def _by_layers(
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = states[0].shape[-1]
    options: tuple[Any, ...] = ([], _LSTM, width, layers, has_biases, both, batch_first, train)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    hidden, cell = (state.contiguous() for state in states)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    each, given = 4 if has_biases else 2, list(weights)
    for layer in range(layers):
        outputs = []
        for direction in range(1 + both):
            index = layer * (1 + both) + direction
            own = given[index * each : (index + 1) * each]
            if not has_biases:
                own += [x.new_zeros(weight.shape) for weight in own]
            made = _aten.mkldnn_rnn_layer(
                x, *own, hidden[index], cell[index], bool(direction), *options
            )
            outputs.append(made[0])
            found.append((made[1], made[2]))
        x = torch.cat(outputs, -1) if both else outputs[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train)
    last = [torch.stack(kind) for kind in zip(*found, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), last[0], last[1]


def run(name: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The results of the operators on ``meta``; torch's own have no workspace there."""
    x, hidden, cell = args[0], args[5], args[6]
    if name == FORWARD:
        size = _workspace(args) if args[15] else 0
        outputs = x.new_empty((*x.shape[:2], hidden.shape[-1]))
        workspace = x.new_empty(size, dtype=torch.uint8)
        return outputs, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape), workspace
    bias = x.new_empty(GATES * hidden.shape[-1])
    rows = [args[place].new_empty(args[place].shape) for place in (0, 1, 2)]
    return *rows, bias, bias, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)


def flops(name: str, args: Sequence[Any]) -> int:
    """Products of each step's input and state with all gates; two of each in backward."""
    x, hidden = args[0], args[5].shape[-1]
    steps = x.shape[0] * x.shape[1]
    return 2 * steps * GATES * hidden * (x.shape[2] + hidden) * (2 if name == BACKWARD else 1)


def scratch(name: str, args: Sequence[Any]) -> int:
    """Bytes inside of an operator: weights, or their gradients, in oneDNN's format; and gates."""
    steps, batch, inputs, width = _sizes(args)
    gates = _padded(GATES * width)
    numel = (inputs + width) * gates + GATES * width  # with the sum of both biases
    if name == BACKWARD:  # which reads weights by row: a copy where rows are padded
        numel += sum(GATES * width * _padded(n) for n in (inputs, width) if _padded(n) != n)
    elif batch >= _LARGE:
        steps = 1
    pad = _paged(steps * batch * gates * 4) + 2 * _paged(batch * _padded(width) * 4)
    return numel * 4 + pad + _REST


def _workspace(args: Sequence[Any]) -> int:
    """Gates, outputs, states, and gradients of states, for an input layer and one more."""
    steps, batch, inputs, width = _sizes(args)
    rows, around = steps * batch, 2 * (steps + 1) * batch
    widest = around * _padded(max(inputs, width))
    numels = [rows * _padded(GATES * width), rows * _padded(width)]
    numels += [widest, widest, widest, around * width, around * width]
    return sum(_paged(numel * 4) for numel in numels)


def _sizes(args: Sequence[Any]) -> tuple[int, int, int, int]:
    steps, batch, inputs = args[0].shape
    return steps, batch, inputs, args[5].shape[-1]


def _padded(numel: int) -> int:
    """A row, of 64 bytes, and not of 1024: those would share lines of the cache."""
    padded = round_up(numel, 16)
    return padded + 16 if padded % 256 == 0 else padded


def _paged(nbytes: int) -> int:
    return round_up(nbytes, _PAGE)
