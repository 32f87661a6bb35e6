"""CapturedMessage messages in a file: one JSON line each, with topic, sequence number and payload in hexadecimal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from understudy.errors import InvalidArgument
from understudy.events.wire import live_frames, parse_frames

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike
    from typing import IO


class CapturedMessage(msgspec.Struct, frozen=True):
    """A received message. `publisher` names its sender in files with messages of several publishers."""

    topic: str
    sequence: int
    payload: str
    publisher: str = ""

    @property
    def frames(self) -> list[bytes]:
        """Frames as a subscriber received them."""
        return live_frames(bytes.fromhex(self.topic), self.sequence, bytes.fromhex(self.payload))


def write_message(file: IO[bytes], frames: Sequence[bytes], publisher: str = "") -> None:
    """Append a message. MalformedBatch when the frames are not a message."""
    topic, sequence, payload = parse_frames(frames)
    file.write(msgspec.json.encode(CapturedMessage(topic.hex(), sequence, payload.hex(), publisher)) + b"\n")


def read_messages(path: str | PathLike[str]) -> Iterator[CapturedMessage]:
    """Yield the messages of a file in order. InvalidArgument names the first line that is not a message."""
    decoder = msgspec.json.Decoder(CapturedMessage)
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    message = decoder.decode(line)
                    _ = message.frames
                except (msgspec.MsgspecError, ValueError, OverflowError) as error:
                    raise InvalidArgument(
                        f"{path}, line {number}: not a captured message: {error}"
                    ) from error
                yield message
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error}") from error
