"""`KvView`: the pages and the length of a request for one forward pass, immutable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvalidArgument
from understudy.kv.counts import count

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.kv.layout import KvLayout

_MAX_PAGE = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class KvView:
    """Pages of one request, in position order, and its length *after* the step.

    A kernel derives the length from the number of pages and the rows in the last one, so the constructor requires
    ceil(seq_len / page_size) pages. The array is read-only.
    """

    page_ids: npt.NDArray[np.int32]
    seq_len: int
    page_size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_size", count("page_size", self.page_size, 1))
        object.__setattr__(self, "seq_len", count("seq_len", self.seq_len))
        try:
            given = np.asarray(self.page_ids)
        except ValueError as error:
            raise InvalidArgument(f"page_ids must be a list of ints: {error}") from error
        expected = -(-self.seq_len // self.page_size)
        if given.ndim != 1 or len(given) != expected:
            raise InvalidArgument(
                f"page_ids must have {expected} pages for seq_len={self.seq_len} at page_size={self.page_size}, "
                f"got shape {given.shape}"
            )
        if expected and given.dtype.kind not in "iu":
            raise InvalidArgument(f"page_ids must be ints, got {given.dtype}")
        if expected and not 0 <= int(given.min()) <= int(given.max()) <= _MAX_PAGE:
            raise InvalidArgument(
                f"page_ids must be in 0..{_MAX_PAGE}, got {int(given.min())}..{int(given.max())}"
            )
        # An array over bytes cannot be made writable again.
        object.__setattr__(self, "page_ids", np.frombuffer(given.astype(np.int32).tobytes(), np.int32))

    @classmethod
    def of_step(cls, page_ids: npt.NDArray[np.int32], seq_len: int, page_size: int) -> KvView:
        """Build the view of a scheduled request; checks only the number of pages, because steps are frequent."""
        if len(page_ids) != -(-seq_len // page_size):
            raise InvalidArgument(
                f"page_ids: {len(page_ids)} pages of {page_size} tokens do not match seq_len={seq_len}"
            )
        page_ids.flags.writeable = False
        view = object.__new__(cls)
        object.__setattr__(view, "page_ids", page_ids)
        object.__setattr__(view, "seq_len", seq_len)
        object.__setattr__(view, "page_size", page_size)
        return view

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return len(self.page_ids)

    @property
    def last_page_len(self) -> int:
        """Valid rows in the last page, 1..page_size; 0 if the view is empty."""
        return (self.seq_len - 1) % self.page_size + 1 if self.seq_len else 0

    def positions(self, chunk: int) -> npt.NDArray[np.int32]:
        """Return the absolute positions of the last `chunk` tokens, the rows that this step writes."""
        if count("chunk", chunk) > self.seq_len:
            raise InvalidArgument(f"chunk must be in 0..{self.seq_len}, got {chunk}")
        return np.arange(self.seq_len - chunk, self.seq_len, dtype=np.int32)

    def require_capacity(self, tokens: int) -> None:
        """Raise InvalidArgument unless the pages have room for `tokens` tokens."""
        if count("tokens", tokens) > self.num_pages * self.page_size:
            raise InvalidArgument(
                f"{tokens} tokens do not fit into {self.num_pages} pages of {self.page_size} tokens"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KvView):
            return NotImplemented
        return (self.seq_len, self.page_size) == (other.seq_len, other.page_size) and bool(
            np.array_equal(self.page_ids, other.page_ids)
        )

    def __hash__(self) -> int:
        return hash((self.seq_len, self.page_size, self.page_ids.tobytes()))


@dataclass(frozen=True, slots=True)
class KvViewDesc:
    """Arguments of a kernel call: a view, the layout and an opaque handle of the rank's buffer."""

    view: KvView
    layout: KvLayout
    buffer: object

    def __post_init__(self) -> None:
        if self.view.page_size != self.layout.page_size:
            raise InvalidArgument(
                f"the view has pages of {self.view.page_size} tokens, the layout of {self.layout.page_size}"
            )

    @property
    def seq_len(self) -> int:
        """Length of the request after the step."""
        return self.view.seq_len

    @property
    def last_page_len(self) -> int:
        """Valid rows in the last page."""
        return self.view.last_page_len
