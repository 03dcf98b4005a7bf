"""The logprobs of one prompt on their way to `Started`: gathered whole, sent once, then dropped unless they are kept.

`Started` is one message, so it waits until they are complete; they come before any token of the output. An attempt that
fails before has sent the client none of them, and the next one begins again. Once complete, no worker is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.errors import InternalError
from cluster.pb import generation_pb2, worker_pb2


class PromptLogprobs:
    """`wanted`: alternatives beside each prompt token's own; None: the client did not ask."""

    def __init__(self, num_prompt_tokens: int, wanted: int | None, *, is_kept: bool = False) -> None:
        """`is_kept`: they stay when they are taken, to be sent again."""
        self._num_missing = 0 if wanted is None else num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._wanted = wanted
        self._is_kept = is_kept
        self._gathered: list[generation_pb2.TokenLogprob] = []

    @property
    def is_complete(self) -> bool:
        """No logprobs are missing."""
        return self._num_missing == 0

    @property
    def wanted(self) -> int | None:
        """The number of alternatives to ask a worker for that computes the prompt now."""
        return None if self.is_complete else self._wanted

    def add(self, event: worker_pb2.PromptLogprobs) -> None:
        """Adds what the attempt that runs now sent. Raises InternalError when that is not what comes next."""
        next_index = self._num_prompt_tokens - self._num_missing
        if event.first_token_index != next_index or len(event.logprobs) > self._num_missing:
            raise InternalError(
                f"logprobs of {len(event.logprobs)} prompt tokens came from {event.first_token_index} on; "
                f"expected were {self._num_missing} from {next_index} on"
            )
        self._gathered.extend(event.logprobs)
        self._num_missing -= len(event.logprobs)

    def restart(self) -> None:
        """Another attempt begins: a part is of no use."""
        if not self.is_complete:
            self._gathered.clear()
            self._num_missing = self._num_prompt_tokens

    def restore(self, logprobs: Sequence[generation_pb2.TokenLogprob]) -> None:
        """Takes over those that an earlier router recorded, if they are complete."""
        if len(logprobs) == self._num_missing:
            self._gathered, self._num_missing = list(logprobs), 0

    def take(self) -> list[generation_pb2.TokenLogprob]:
        """Returns all of them; nothing while they are incomplete."""
        taken = self._gathered
        if not self._is_kept:
            self._gathered = []
        return taken if self.is_complete else []
