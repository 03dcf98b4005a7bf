"""One sequence while an engine works on it: its tokens, its blocks, how far its KV reaches.

Invariant: the KV of tokens [0, num_computed_tokens) lies in block_table; a sequence is fed its tokens from there on,
and once all are computed the logits of the last one give the next. A decode step is the case of one token left.
Knows nothing of hand-offs, routers or the order in which sequences run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from cluster import prefix_hash
from cluster.kv_groups import KvGroup
from cluster.lifecycle import RequestKey
from cluster.pb import worker_pb2
from engine.kv.block_manager import BlockManager
from engine.kv.kv_tier import KvTierName
from engine.kv.retention import Session, SessionName
from engine.sampling.constraint import Constraint
from engine.sampling.params import SampledToken, SampleRow, SamplingParams
from engine.step_input import BlockTable, ScoredSpan, SequenceSlice, table_of

AHEAD_TOKENS = 2048
"""Tokens for which a window has blocks ahead of those that are computed, and the most of a prompt in one step then."""


@dataclass(frozen=True)
class Request:
    """One attempt of a client's request, as a worker computes it."""

    key: RequestKey
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: bytes = b""
    use_prefix_cache: bool = True
    known_tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """First output tokens by sequence index that an earlier attempt reported: taken as sampled, not reported again."""
    prompt_logprobs: int | None = None
    """Alternatives wanted beside the logprob of each prompt token; None: no logprobs of the prompt."""
    session: Session | None = None
    """For which its KV is kept afterwards; None: as that of any other."""

    @classmethod
    def from_proto(
        cls,
        admit: worker_pb2.Admit,
        *,
        enable_prefix_cache: bool,
        constraint: Constraint | None,
        prompt_token_ids: tuple[int, ...] = (),
    ) -> Self:
        """`constraint`: of the grammar in `admit`, if there is one. `prompt_token_ids`: where `admit` has no prompt."""
        return cls(
            key=RequestKey.of(admit.key),
            prompt_token_ids=prompt_token_ids or tuple(admit.prompt_token_ids[:]),  # a list first: in 3/4 of the time
            params=SamplingParams.from_proto(admit.sampling, constraint),
            cache_salt=admit.cache_salt,
            use_prefix_cache=enable_prefix_cache and not admit.bypass_prefix_cache,
            known_tokens={known.sequence_index: tuple(known.token_ids) for known in admit.known_tokens},
            prompt_logprobs=admit.prompt_logprobs if admit.HasField("prompt_logprobs") else None,
            session=_session_of(admit) if admit.HasField("session") else None,
        )

    def problem(self, vocab_size: int, max_model_len: int) -> str:
        """Why it cannot run, or nothing. The router has checked; one bad id would end the step of everybody."""
        num_prompt_tokens, max_output_tokens = len(self.prompt_token_ids), self.params.max_output_tokens
        known = [token_id for token_ids in self.known_tokens.values() for token_id in token_ids]
        if num_prompt_tokens == 0:
            return "the prompt is empty"
        others = (*known, *self.params.logit_bias, *self.params.allowed_token_ids)
        largest = max(max(self.prompt_token_ids), max(others, default=0))
        if largest >= vocab_size:
            return f"token id {largest} is outside the vocabulary of {vocab_size}"
        if num_prompt_tokens + max_output_tokens > max_model_len:
            total = f"{num_prompt_tokens} prompt + {max_output_tokens} output tokens"
            return f"{total} exceed max_model_len {max_model_len}"
        if len(self.known_start) >= max_output_tokens:
            return f"{len(self.known_start)} output tokens are known, and {max_output_tokens} are the most"
        return ""

    @cached_property
    def known_start(self) -> tuple[int, ...]:
        """Known output tokens that are computed, cached and handed over as if they were the end of the prompt.

        Empty for several sequences: they share the prompt alone, and each computes its own known tokens after it.
        """
        return self.known_tokens.get(0, ()) if self.params.n == 1 else ()

    def first_output(self, index: int, token_id: int) -> list[int]:
        """Output of sequence `index` once its prompt and known start are computed and `token_id` is sampled.

        With several sequences, the known tokens of this one take the place of the sampled one.
        """
        if self.params.n == 1:
            return [*self.known_start, token_id]
        return list(self.known_tokens.get(index, ())) or [token_id]

    @property
    def private_salt(self) -> bytes:
        """Salt under which only attempts of this request find one another's blocks."""
        return prefix_hash.PRIVATE + b"attempts of " + self.key.request_id.encode()


def _session_of(admit: worker_pb2.Admit) -> Session:
    told = admit.session
    return Session(SessionName(told.tenant, told.session_id), told.ttl_s)


@dataclass(eq=False)
class Sequence:
    """Sequence `index` of a request; it becomes `fan_out` sequences (the request's n) once its prompt is computed."""

    request: Request
    index: int
    arrival: int
    """Order of arrival at this worker; the largest is the youngest."""
    fan_out: int = 1
    output_token_ids: list[int] = field(default_factory=list)
    block_table: BlockTable = field(default_factory=table_of)
    """As `engine.kv.block_manager` says: a block of each group of layers in turn, or -1."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    hits: Mapping[KvTierName, int] = field(default_factory=Counter)
    """Its cached tokens, by where they were found."""
    num_landed_tokens: int = 0
    """Tokens that were computed elsewhere: of a window, what the one behind them sees is here."""
    unread_row: int | None = None
    """Row of the step under way that its newest token is sampled from, where that token is still on the device; it is
    counted among the sequence's tokens, so that the step behind can be planned."""
    num_preempted_tokens: int = 0
    """Tokens that were computed when it was preempted; 0 since it has gone on."""
    num_scored_tokens: int = 0
    """Prompt tokens whose logprobs were reported, if wanted; each is reported once, however often it is computed."""

    @classmethod
    def root(cls, request: Request, arrival: int) -> Self:
        """Makes the sequence that computes the prompt and the known start, from which all n sequences branch."""
        return cls(request, 0, arrival, fan_out=request.params.n, output_token_ids=list(request.known_start))

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been sampled for it yet."""
        return len(self.output_token_ids) == len(self.request.known_start)

    @property
    def was_begun(self) -> bool:
        """Whether its client has tokens of it already, from an earlier attempt or from before a preemption."""
        return bool(self.output_token_ids or self.request.known_tokens)

    @property
    def must_score(self) -> bool:
        """Whether prompt logprobs are wanted and not all reported; the request's first sequence computes them."""
        is_wanted = self.request.prompt_logprobs is not None and not self.output_token_ids
        return is_wanted and self.num_scored_tokens < len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids) + (self.unread_row is not None)

    @property
    def num_remaining(self) -> int:
        """Tokens to feed before the next one can be sampled; at least 1 while the sequence lives, but for one whose
        last token by its length is not read yet."""
        return self.num_tokens - self.num_computed_tokens

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt and output as one run of token ids, [start, end)."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        return prompt[start:] + tuple(self.output_token_ids[max(0, start - len(prompt)) : end - len(prompt)])

    def count_ahead(self, num_tokens: int, row: int | None) -> None:
        """Counts the next `num_tokens` tokens as computed while their step is under way. With a row, they lead to the
        token that is sampled from it, which is fed next unless it is the sequence's last one in any case."""
        self.num_computed_tokens += num_tokens
        if row is not None and len(self.output_token_ids) + 1 < self.request.params.max_output_tokens:
            self.unread_row = row

    def slice(self, num_tokens: int) -> SequenceSlice:
        """The next `num_tokens` tokens as a share of a step; asks for logits when they reach the end."""
        start = self.num_computed_tokens
        end = start + num_tokens
        table, is_end = self.block_table[:], end == self.num_tokens
        new = self.tokens(start, end) if self.unread_row is None else (-1 - self.unread_row,)
        return SequenceSlice(new, start, table, is_end, self._scored_span(start, end))

    def take_scores(self, scores: Seq[SampledToken]) -> list[SampledToken]:
        """Takes the scores of the latest step of a sequence that `must_score`; returns the prompt tokens to report now.

        They begin with the prompt's first token, which has no logprob.
        """
        first = [] if self.num_scored_tokens else [SampledToken(self.request.prompt_token_ids[0])]
        scored = [*first, *scores]
        self.num_scored_tokens += len(scored)
        return scored

    def _scored_span(self, start: int, end: int) -> ScoredSpan | None:
        """The tokens among [start, end) that a prompt token follows whose logprob is not reported yet."""
        num_top, prompt = self.request.prompt_logprobs, self.request.prompt_token_ids
        if num_top is None or not self.must_score:
            return None
        first, last = max(start, self.num_scored_tokens - 1), min(end, len(prompt) - 1)
        return ScoredSpan(first - start, prompt[first + 1 : last + 1], num_top) if first < last else None

    def sample_rows(self) -> list[SampleRow]:
        """Returns a row for each sequence whose next token the sampled logits decide."""
        prompt, output = self.request.prompt_token_ids, self.output_token_ids
        num_unread = int(self.unread_row is not None)
        return [SampleRow(self.request.params, self.index + i, prompt, output, num_unread) for i in range(self.fan_out)]


def claim_blocks(sequence: Sequence, blocks: BlockManager, *, is_landing: bool = False, num_beside: int = 0) -> bool:
    """Gives a sequence blocks for all its tokens, prefix cache first. False, and nothing held, when they do not fit, or
    would not leave `num_beside` others.

    Cached ones may still be arriving (`have_arrived`). Of a window those for its next tokens (`cover_blocks` gives it
    more as it goes on), or where the KV `is_landing`, computed elsewhere, those for what the token behind it sees. A
    prompt that must be scored is computed from its beginning: cached tokens have no logits.
    """
    num_tokens, size = sequence.num_tokens, blocks.block_size
    request = sequence.request
    cached: list[int] = []
    was_kept = request.use_prefix_cache or request.key.attempt > 1 or sequence.num_preempted_tokens > 0
    if was_kept and not sequence.must_score:
        salt = request.cache_salt if request.use_prefix_cache else request.private_salt
        cached = blocks.match_prefix(sequence.tokens(0, num_tokens), salt, num_tokens if is_landing else 0)
    num_cached = len(cached) // len(blocks.groups) * size
    end = blocks_for(num_tokens, size)
    spans = []
    for group in blocks.groups:
        first, last = num_cached // size, end
        if group.window is not None and is_landing:
            first = max(first, group.first_seen(num_tokens) // size)
        elif group.window is not None:
            last = min(end, blocks_for(num_cached + AHEAD_TOKENS, size))
        spans.append(range(first, last))
    if not blocks.can_allocate(sum(map(len, spans)) + num_beside):
        blocks.release(cached)
        return False
    sequence.hits = blocks.where_found(cached)
    if is_landing:  # of what is in the pool
        blocks.count_hits(cached, sequence.hits)
    sequence.num_landed_tokens = num_tokens if is_landing else 0
    sequence.block_table = table_of(cached)
    sequence.num_computed_tokens = sequence.num_cached_tokens = num_cached
    blocks.fill(sequence.block_table, end, spans)
    return True


def take_arrived(loading: list[Sequence], blocks: BlockManager) -> tuple[list[Sequence], list[Sequence]]:
    """Takes out of `loading` the sequences that wait for no cached block any more; returns those that have all of them,
    whose hits are counted, and those that have lost some, which hold nothing then and are to claim blocks anew."""
    arrived: list[Sequence] = []
    lost: list[Sequence] = []
    for sequence in loading:
        num_found = sequence.num_cached_tokens // blocks.block_size * len(blocks.groups)
        cached = sequence.block_table[:num_found]
        have_arrived = blocks.have_arrived(cached)
        if have_arrived is not None:
            (arrived if have_arrived else lost).append(sequence)
        if have_arrived:
            blocks.count_hits(cached, sequence.hits)
    for sequence in arrived + lost:
        loading.remove(sequence)
    for sequence in lost:
        release_blocks(sequence, blocks)
    return arrived, lost


def cover_blocks(sequence: Sequence, blocks: BlockManager) -> int:
    """Gives the windows of a sequence blocks for its next tokens, as far as there are any; returns the tokens that
    have theirs, of those that are to be computed."""
    if not blocks.has_windows:
        return sequence.num_remaining
    count, size, table = len(blocks.groups), blocks.block_size, sequence.block_table
    first, most = sequence.num_computed_tokens // size, sequence.num_computed_tokens + AHEAD_TOKENS
    end = min(len(table) // count, blocks_for(most, size))
    windows = [place for place, group in enumerate(blocks.groups) if group.window is not None]
    covered = first
    while covered < end and table[covered * count + windows[0]] >= 0:
        covered += 1
    last = min(end, covered + blocks.num_available // len(windows))
    if covered < last:
        spans = [range(covered, last if place in windows else covered) for place in range(count)]
        blocks.fill(table, len(table) // count, spans)
    return min(sequence.num_remaining, max(0, last * size - sequence.num_computed_tokens))


def settle_blocks(sequence: Sequence, blocks: BlockManager, before: int) -> None:
    """Makes blocks that filled since `before` tokens were computed findable in the prefix cache, releases those behind
    the windows, and takes those for the tokens that are to be computed next."""
    publish_blocks(sequence, blocks, before)
    if blocks.has_windows:
        blocks.leave_windows(sequence.block_table, sequence.num_computed_tokens)
        cover_blocks(sequence, blocks)


def publish_blocks(sequence: Sequence, blocks: BlockManager, before: int) -> None:
    """Makes blocks that filled since `before` tokens were computed findable in the prefix cache."""
    if (
        not sequence.request.use_prefix_cache
        or sequence.num_computed_tokens // blocks.block_size == before // blocks.block_size
    ):
        return
    tokens, num_landed = sequence.tokens(0, sequence.num_computed_tokens), sequence.num_landed_tokens
    blocks.publish(tokens, sequence.block_table, sequence.request.cache_salt, sequence.num_computed_tokens, num_landed)


def keep_blocks(sequence: Sequence, blocks: BlockManager, num_tokens: int) -> int:
    """Keeps the blocks of the first `num_tokens` tokens, whose KV is complete, for the request's next attempt, or for
    when it has been preempted.

    They stay in the prefix cache, under the private salt if the request bypasses it. Returns the tokens kept.
    """
    request = sequence.request
    num_full = num_tokens // blocks.block_size * blocks.block_size
    salt = request.cache_salt if request.use_prefix_cache else request.private_salt
    tokens = sequence.tokens(0, num_full)
    blocks.publish(tokens, sequence.block_table, salt, num_full, sequence.num_landed_tokens)
    return num_full


def release_blocks(sequence: Sequence, blocks: BlockManager) -> None:
    """Returns every block; the sequence can be recomputed from its tokens."""
    if sequence.request.session is not None:
        blocks.retain(sequence.request.session, sequence.block_table)
    blocks.release(sequence.block_table)
    sequence.block_table = table_of()
    sequence.num_computed_tokens = 0


def num_missing(sequence: Sequence, num_tokens: int, blocks: BlockManager) -> int:
    """Blocks that its table lacks for so many tokens, of all groups; 0 or less: none."""
    return blocks_for(num_tokens, blocks.block_size) * len(blocks.groups) - len(sequence.block_table)


def most_blocks(groups: Seq[KvGroup], num_tokens: int, block_size: int) -> int:
    """Blocks that one sequence of so many tokens holds at a time, at most."""
    windows = [num_tokens if group.window is None else group.window + AHEAD_TOKENS + block_size for group in groups]
    return sum(blocks_for(min(num_tokens, window), block_size) for window in windows)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks of one group that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class ScheduledSequence(NamedTuple):
    """A sequence's share of the next step."""

    sequence: Sequence
    num_tokens: int
