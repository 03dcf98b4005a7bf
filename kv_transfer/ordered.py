"""The numbers of one hand-off stream: each side counts what it says from 1, and checks that it hears the other's count.

Hearing a number again changes nothing; a number that is missing ends the stream, since every later message may build
on what was lost. Pure: it knows nothing of gRPC or of what the messages say.
"""

from __future__ import annotations

from typing import Protocol

from cluster.errors import BatonError


class StreamGap(BatonError):
    """A message of a stream was lost: the stream and its pair must be retired."""

    grpc_code = "UNAVAILABLE"
    reason = "STREAM_GAP"


class Numbered(Protocol):
    """A message that carries its place in its stream."""

    number: int


class Ordered:
    """Both directions of one stream, as one of its sides counts them."""

    def __init__(self) -> None:
        self.num_said = 0
        self.num_heard = 0

    def stamp(self, message: Numbered) -> None:
        """Gives the next message to be said its number."""
        self.num_said += 1
        message.number = self.num_said

    def accept(self, number: int) -> bool:
        """Whether a message is the next one; False: it was heard before. Raises StreamGap."""
        if number == self.num_heard + 1:
            self.num_heard = number
            return True
        if 0 < number <= self.num_heard:
            return False
        raise StreamGap(f"message {self.num_heard + 1} of the stream is missing: number {number} came instead")
