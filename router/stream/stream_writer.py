"""The messages of one stream on their way to its client, and when a client that does not take them is given up.

gRPC takes a message at once while the client's flow-control window is open, and keeps the one that is not taken; what
comes meanwhile merges into one delta in the request. A client that has taken nothing for a while is given up, and so is
one for which more waits than may be held for it. Knows no dispatcher: it raises.
"""

from __future__ import annotations

import asyncio

from cluster.pb import generation_pb2 as pb
from router.api.call import Call, ClientStalled
from router.stream.stream_reader import StreamReader

MOST_PENDING_BYTES = 128 * 1024
"""Behind the message that gRPC keeps, which was as large at most when it was written."""
LOOK_S = 0.5
"""A write that takes longer is looked after so often."""
_TOKEN_BYTES = 64
_LOGPROB_BYTES, _ALTERNATIVE_BYTES = 64, 32


class StreamWriter:
    """Of one stream. `timeout_s`: how long one message may take."""

    def __init__(self, call: Call, reader: StreamReader, timeout_s: float) -> None:
        self._call = call
        self._output = reader.output
        self._timeout_s = timeout_s
        request, bytes_per_token = reader.live.request, _TOKEN_BYTES
        if request.wants_logprobs:
            bytes_per_token += _LOGPROB_BYTES + request.sampling.top_logprobs * _ALTERNATIVE_BYTES
        self._most_pending = MOST_PENDING_BYTES // bytes_per_token
        """Tokens."""

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        """Returns when the next one may be written. Raises ClientStalled."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                self._timer = loop.call_later(LOOK_S, self._look, limit, loop)
                try:
                    await self._call.write(message)
                finally:
                    self._timer.cancel()
        except TimeoutError:
            raise ClientStalled(
                f"the client does not read: {self._output.num_pending} tokens wait for it, "
                "and its generation was cancelled; call again, and read the stream as it comes"
            ) from None

    def _look(self, limit: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
        if self._output.num_pending > self._most_pending:
            limit.reschedule(loop.time())
        else:
            self._timer = loop.call_later(LOOK_S, self._look, limit, loop)
