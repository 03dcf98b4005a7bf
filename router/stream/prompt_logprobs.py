"""The logprobs of one prompt on their way to `Started`: gathered whole, told once, then forgotten.

`Started` is one message, so it waits until they are complete; they come before any token of the output. An attempt that
ended before has told none of them to the client, and the next begins again. Once complete, no attempt is asked again.
"""

from __future__ import annotations

from cluster.errors import InternalError
from cluster.pb import generation_pb2, worker_pb2


class PromptLogprobs:
    """`wanted`: alternatives beside each prompt token's own; None: the client did not ask."""

    def __init__(self, num_prompt_tokens: int, wanted: int | None) -> None:
        self._num_missing = 0 if wanted is None else num_prompt_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._wanted = wanted
        self._gathered: list[generation_pb2.TokenLogprob] = []

    @property
    def is_complete(self) -> bool:
        """Nothing is waited for."""
        return self._num_missing == 0

    @property
    def wanted(self) -> int | None:
        """What a worker that computes the prompt now is asked for."""
        return None if self.is_complete else self._wanted

    def add(self, told: worker_pb2.PromptLogprobs) -> None:
        """What the attempt that runs now tells next. Raises InternalError when that is not what comes next."""
        next_index = self._num_prompt_tokens - self._num_missing
        if told.first_token_index != next_index or len(told.logprobs) > self._num_missing:
            raise InternalError(
                f"logprobs of {len(told.logprobs)} prompt tokens came from {told.first_token_index} on; expected were "
                f"{self._num_missing} from {next_index} on"
            )
        self._gathered.extend(told.logprobs)
        self._num_missing -= len(told.logprobs)

    def restart(self) -> None:
        """Another attempt begins: a part is of no use."""
        if not self.is_complete:
            self._gathered.clear()
            self._num_missing = self._num_prompt_tokens

    def restore(self, told: list[generation_pb2.TokenLogprob]) -> None:
        """Those that an earlier router was told, if it was told all."""
        if len(told) == self._num_missing:
            self._gathered, self._num_missing = told, 0

    def take(self, *, is_kept: bool = False) -> list[generation_pb2.TokenLogprob]:
        """All of them; nothing of a part. They are forgotten, unless they are kept to be told again."""
        taken = self._gathered
        if not is_kept:
            self._gathered = []
        return taken if self.is_complete else []
