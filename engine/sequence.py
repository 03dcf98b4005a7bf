"""One sequence while an engine works on it: its tokens, its blocks, how far its KV reaches.

Invariant: the KV of tokens [0, num_computed_tokens) lies in block_table; a sequence is fed its tokens from there on,
and once all are computed the logits of the last one give the next. A decode step is the case of one token left.
Knows nothing of hand-offs, routers or the order in which sequences run.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from cluster.request_key import RequestKey
from engine.kv.block_manager import BlockManager
from engine.sampling.sampler import SampledToken, SampleRow, SamplingParams
from engine.step_input import ScoredSpan, SequenceSlice


@dataclass(frozen=True)
class Request:
    """A request as a worker sees it: what to compute, not for whom."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: bytes = b""
    use_prefix_cache: bool = True
    known_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """First output tokens by sequence that an earlier attempt has told already: taken as sampled, not told again."""
    prompt_logprobs: int | None = None
    """Alternatives wanted beside the logprob of each prompt token; None: no logprobs of the prompt."""

    @property
    def known_start(self) -> tuple[int, ...]:
        """Output tokens that are computed, cached and handed over with the prompt, as if they were its end.

        Those that are known of a request of one sequence. Several share a prompt and part after it: each computes what
        is known of its own by itself.
        """
        return self.known_tokens.get(0, ()) if self.params.n == 1 else ()

    def first_output(self, index: int, token_id: int) -> list[int]:
        """Output of sequence `index` once what comes before it is computed and has led to `token_id`.

        That token after the known start; of several sequences, what is known of this one in its place.
        """
        if self.params.n == 1:
            return [*self.known_start, token_id]
        return list(self.known_tokens.get(index, ())) or [token_id]

    @property
    def private_salt(self) -> bytes:
        """Salt under which only attempts of this request find one another's blocks. No client can set it: theirs are
        UTF-8, and this is not."""
        return b"\xffattempts of " + self.key.request_id.encode()


@dataclass(eq=False)
class Sequence:
    """Sequence `index` of a job. `fan_out` sequences are born when its prompt is computed (n of the request)."""

    job: Request
    index: int
    arrival: int
    """Order of arrival at this worker; the largest is the youngest."""
    fan_out: int = 1
    output_token_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_scored_tokens: int = 0
    """Prompt tokens whose logprobs are told, where they are wanted; they are told once, however often computed."""

    @classmethod
    def root(cls, job: Request, arrival: int) -> Self:
        """What is computed first of a job: its prompt with the known start. All its sequences are born of it."""
        return cls(job, 0, arrival, fan_out=job.params.n, output_token_ids=list(job.known_start))

    @property
    def is_fresh(self) -> bool:
        """Nothing has been sampled for it yet: its output is what it began with."""
        return len(self.output_token_ids) == len(self.job.known_start)

    @property
    def was_begun(self) -> bool:
        """Its client has tokens of it and waits for more: another attempt told them, or it was preempted."""
        return bool(self.output_token_ids or self.job.known_tokens)

    @property
    def must_score(self) -> bool:
        """Logprobs of its prompt are wanted and not all told; the first of a job's sequences sees to it."""
        is_wanted = self.job.prompt_logprobs is not None and not self.output_token_ids
        return is_wanted and self.num_scored_tokens < len(self.job.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.job.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens to feed before the next one can be sampled; at least 1 while the sequence lives."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt and output as one run of token ids, [start, end)."""
        prompt = self.job.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + tuple(self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)])

    def slice(self, num_tokens: int) -> SequenceSlice:
        """The next `num_tokens` tokens as a share of a step; asks for logits when they reach the end."""
        start = self.num_computed_tokens
        end = start + num_tokens
        table, is_end = tuple(self.block_table), end == self.num_tokens
        return SequenceSlice(self.tokens(start, end), start, table, is_end, self._scored_span(start, end))

    def take_scores(self, scores: Seq[SampledToken]) -> list[SampledToken]:
        """Of one that `must_score`: takes in what its latest share gave, and returns what is to be told now.

        Those are the next prompt tokens, beginning with the first, which has no logprob.
        """
        first = [] if self.num_scored_tokens else [SampledToken(self.job.prompt_token_ids[0])]
        told = [*first, *scores]
        self.num_scored_tokens += len(told)
        return told

    def _scored_span(self, start: int, end: int) -> ScoredSpan | None:
        """Of the tokens [start, end), those that are followed by a prompt token whose logprob is not told yet."""
        num_top, prompt = self.job.prompt_logprobs, self.job.prompt_token_ids
        if num_top is None or not self.must_score:
            return None
        first, last = max(start, self.num_scored_tokens - 1), min(end, len(prompt) - 1)
        return ScoredSpan(first - start, prompt[first + 1 : last + 1], num_top) if first < last else None

    def sample_rows(self) -> list[SampleRow]:
        """One row for each sequence that the next sampled logits decide."""
        prompt, output = self.job.prompt_token_ids, self.output_token_ids
        return [SampleRow(self.job.params, self.index + i, prompt, output) for i in range(self.fan_out)]


def claim_blocks(sequence: Sequence, blocks: BlockManager) -> bool:
    """Gives a sequence blocks for all its tokens, prefix cache first. False, and nothing held, when they do not fit.

    One whose prompt must be scored is computed from its beginning: tokens that are cached have no logits.
    """
    needed = blocks_for(sequence.num_tokens, blocks.block_size)
    job = sequence.job
    cached: list[int] = []
    if (job.use_prefix_cache or job.key.attempt > 1) and not sequence.must_score:
        salt = job.cache_salt if job.use_prefix_cache else job.private_salt
        cached = blocks.match_prefix(sequence.tokens(0, sequence.num_tokens), salt)
    if not blocks.can_allocate(needed - len(cached)):
        blocks.release(cached)
        return False
    sequence.block_table = cached + blocks.allocate(needed - len(cached))
    sequence.num_computed_tokens = sequence.num_cached_tokens = len(cached) * blocks.block_size
    return True


def publish_blocks(sequence: Sequence, blocks: BlockManager, before: int) -> None:
    """Makes blocks that filled since `before` tokens were computed findable in the prefix cache."""
    if (
        not sequence.job.use_prefix_cache
        or sequence.num_computed_tokens // blocks.block_size == before // blocks.block_size
    ):
        return
    tokens = sequence.tokens(0, sequence.num_computed_tokens)
    blocks.publish(tokens, sequence.block_table, sequence.job.cache_salt, sequence.num_computed_tokens)


def keep_blocks(sequence: Sequence, blocks: BlockManager, num_tokens: int) -> int:
    """Leaves the first `num_tokens` tokens, whose KV is whole, to the next attempt of the request.

    They stay in the prefix cache, where nobody else finds those of a request that bypasses it. Returns how many do.
    """
    job = sequence.job
    num_full = num_tokens // blocks.block_size * blocks.block_size
    salt = job.cache_salt if job.use_prefix_cache else job.private_salt
    blocks.publish(sequence.tokens(0, num_full), sequence.block_table, salt, num_full)
    return num_full


def release_blocks(sequence: Sequence, blocks: BlockManager) -> None:
    """Returns every block; the sequence could be computed anew from its tokens."""
    blocks.release(sequence.block_table)
    sequence.block_table = []
    sequence.num_computed_tokens = 0


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence's share of the next step."""

    sequence: Sequence
    num_tokens: int
