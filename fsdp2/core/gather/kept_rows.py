"""Rows that outlive their all-gather, for later ones to reuse: see `fsdp2.core.gather.keeping`."""

from __future__ import annotations

from fsdp2.core.gather.program import Gather
from fsdp2.core.gather.segments import SegmentViews, own_row, packed_rows

ROWS = "kept rows"


class KeptRows:
    """The rows of a segment, whose memory stays from the first all-gather on."""

    def __init__(self, place: SegmentViews) -> None:
        self.place = place
        self.rows = packed_rows(place, ROWS)

    def fresh(self) -> Gather:
        """The all-gather that brings them. Called once, while their memory is allocated."""
        place, rows = self.place, self.rows
        pair, copy_in = own_row(place, rows)
        launch = place.collectives.bind_all_gather(*pair)
        found = Gather(place.parameters(), [rows.memory.acquire], copy_in, [launch], rows.put)
        rows.memory.release()
        return found

    @property
    def holds_rows(self) -> bool:
        """Whether a gather has brought rows."""
        return self.rows.memory.allocated

    def follow(self, former: KeptRows) -> None:
        if former.holds_rows:
            # A copy: operations are bound to this memory, and the former's ends with its binding.
            self.rows.memory.acquire()
            self.place.kernels.copy(self.rows.output, former.rows.output)

    def inherit(self, former: KeptRows) -> None:
        """Take over nothing from those that may have been bound to other shards."""

    def lose(self) -> None:
        """Take rows for lost: a gather may have stopped half way."""
