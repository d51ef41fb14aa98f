"""How the sums of a node are sent between nodes in fewer bytes: each rank sums its messages.

    [nodes, n] ── encode ──> a message for each node ══ one all-to-all ══> one of each node
      ── decode, sum in fp32 ──> pieces      marks ══ a separate reduce-scatter ══> marks

It works like `fsdp2.core.reduce.coded` inside a node; each reduction has its own memory for
messages.
"""

from __future__ import annotations

import torch

from fsdp2.core.codecs.codec import NUMBERS
from fsdp2.core.reduce.coded import CODED, CodedReduce
from fsdp2.core.reduce.levels import Crossing, PiecesReduce
from fsdp2.core.reduce.reduction import ReduceContext


class CodedPieces(PiecesReduce):
    """Sums of a node are sent as messages of a codec."""

    carries_marks = False

    def _bind(self, context: ReduceContext) -> None:
        super()._bind(context)
        assert context.spec.between_codec is not None
        assert self.reduce_dtype in NUMBERS
        kind = CODED[context.spec.between_codec]
        assert issubclass(kind, CodedReduce)
        self._codec = kind.codec
        shape = (self.collectives.size, self._codec.nbytes(self.width))
        self._new_messages = self.kernels.bind_empty(shape, torch.uint8, "messages between nodes")

    def prepare(self, job: Crossing, seeks: bool) -> None:
        """As `PiecesReduce.prepare`, and memory for messages."""
        super().prepare(job, seeks)
        job.messages = (self._new_messages(), self._new_messages())

    def send(self, job: Crossing, rows: torch.Tensor, flat: torch.Tensor) -> None:
        """Exchange messages, and sum their contents."""
        sent, received = job.messages
        self.kernels.transform(self._codec.encode, sent, rows)
        work = self.collectives.bind_all_to_all(received, sent)()
        if work is not None:
            work.wait()
        self.kernels.transform(self._codec.total, flat.narrow(0, 0, self.width), received)
        assert self.marks is not None
        marks = self.marks.sent[self.reduce_dtype] if job.marks is None else job.marks[0]
        work = self.scatter(self.marks.within(flat), marks)
        if work is not None:
            work.wait()
