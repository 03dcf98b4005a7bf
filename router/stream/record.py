"""The journal entries of one generation, written from a live request and read back into another. Pure.

A record is enough to go on from scratch: the validated request with its seed, and every token that its client may have
been sent. A generation has the same tokens however often they are computed, so entries may overlap; tokens behind a gap
do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from cluster.pb import generation_pb2, worker_pb2
from cluster.pb.journal_pb2 import JournalEntry, JournalOrigin
from cluster.protocol import check_protocol, spoken
from router.stream.journal import Source
from router.stream.request import LiveRequest

_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


@dataclass(frozen=True)
class Extent:
    """The extent of a generation that there is, or that is stored."""

    num_tokens: tuple[int, ...]
    """Tokens of each sequence."""
    has_ended: tuple[bool, ...]
    has_prompt_logprobs: bool
    num_crashes: int = 0
    """Workers that ended by themselves in a step with it."""
    weights_revision: str = ""

    @classmethod
    def of(cls, live: LiveRequest) -> Extent:
        ends = tuple(s.end is not None and s.end.finish_reason != _CANCELLED for s in live.sequences)
        has_prompt = live.request.prompt_logprobs is not None and live.output.prompt_logprobs.is_complete
        num_tokens = tuple(s.num_tokens for s in live.sequences)
        return cls(num_tokens, ends, has_prompt, live.retry.num_crashes_in_all, live.weights_revision)

    @classmethod
    def nothing(cls, num_sequences: int) -> Extent:
        return cls((0,) * num_sequences, (False,) * num_sequences, False)


def digest_of(spec: generation_pb2.GenerationSpec) -> bytes:
    """Hashes everything that decides what is generated and sent: not the client's own name for it."""
    bare = generation_pb2.GenerationSpec()
    bare.CopyFrom(spec)
    bare.ClearField("resume")
    bare.ClearField("request_id")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()


def origin_of(live: LiveRequest, spec: generation_pb2.GenerationSpec) -> JournalOrigin:
    """The first part of a record. `spec`: as the client sent it."""
    origin = JournalOrigin(
        spec=spec,
        sampling=live.request.sampling,
        tenant=live.principal.tenant,
        arrival_time_s=live.arrival_time_s,
        spec_digest=digest_of(spec),
        traceparent=live.traceparent,
        protocol=spoken(),
    )
    origin.spec.ClearField("resume")
    if spec.HasField("chat"):
        origin.prompt_token_ids.extend(live.request.prompt_token_ids)
    else:
        origin.spec.token_ids.ids[:] = live.request.prompt_token_ids
        origin.spec.ClearField("suffix")  # which is among those ids
    origin.spec.sampling.seed = live.request.sampling.params.seed
    origin.spec.model = live.model
    return origin


def source_of(live: LiveRequest, origin: JournalOrigin) -> Source[Extent]:
    """Returns what the journal writes down of a request."""
    return Source(lambda: Extent.of(live), lambda since: entry_of(live, origin, since).SerializeToString())


def entry_of(live: LiveRequest, origin: JournalOrigin, since: Extent | None = None) -> JournalEntry:
    """The entry with what is known now and was not at `since`; None: a whole entry, with the origin."""
    now, last, entry = Extent.of(live), since or Extent.nothing(len(live.sequences)), JournalEntry()
    for index, sequence in enumerate(live.sequences):
        first = last.num_tokens[index]
        if now.num_tokens[index] > first or (now.has_ended[index] and not last.has_ended[index]):
            tokens = sequence.known(first)
            if not now.has_ended[index]:
                tokens.ClearField("finish_reason")
            entry.tokens.append(tokens)
    if now.has_prompt_logprobs and not last.has_prompt_logprobs:
        entry.prompt_logprobs.extend(live.output.prompt_logprobs.take())
    if now.num_crashes > last.num_crashes:
        entry.num_crashes = now.num_crashes
    if now.weights_revision != last.weights_revision:
        entry.weights_revision = now.weights_revision
    if entry.ByteSize():
        entry.num_cached_tokens, entry.num_moves = live.num_cached_tokens, live.num_moves
        if live.first_token_at is not None:
            entry.first_token_after_s = live.first_token_at - live.arrived_at
    if since is None:
        entry.origin.CopyFrom(origin)
        entry.origin.protocol = spoken()  # of one taken over from another router: who writes it now
        entry.num_moves = live.num_moves
    return entry


def read_record(entries: Sequence[bytes]) -> JournalEntry | None:
    """Adds up the entries of a generation to a whole one. None when they are not a record. Raises IncompatibleProtocol
    for one whose writer speaks no version of this router's."""
    try:
        parsed = [JournalEntry.FromString(data) for data in entries]
    except DecodeError:
        return None
    if not parsed or not parsed[0].HasField("origin"):
        return None
    check_protocol("the router that wrote it", parsed[0].origin.protocol, "this router")
    record = JournalEntry(origin=parsed[0].origin)
    known = [record.tokens.add(sequence_index=index) for index in range(record.origin.sampling.params.n)]
    for entry in parsed:
        if entry.prompt_logprobs:
            del record.prompt_logprobs[:]
            record.prompt_logprobs.extend(entry.prompt_logprobs)
        record.num_cached_tokens = entry.num_cached_tokens or record.num_cached_tokens
        record.num_moves = max(record.num_moves, entry.num_moves)
        record.num_crashes = max(record.num_crashes, entry.num_crashes)
        record.weights_revision = entry.weights_revision or record.weights_revision
        if entry.HasField("first_token_after_s"):
            record.first_token_after_s = entry.first_token_after_s
        for tokens in entry.tokens:
            if tokens.sequence_index < len(known):
                _extend(known[tokens.sequence_index], tokens)
    return record


def _extend(known: worker_pb2.Tokens, more: worker_pb2.Tokens) -> None:
    """Adds tokens; those that begin behind a gap do not count."""
    num_overlapping = len(known.token_ids) - more.first_token_index
    if num_overlapping < 0 or known.finish_reason:
        return
    known.token_ids.extend(more.token_ids[num_overlapping:])
    known.logprobs.extend(more.logprobs[num_overlapping:])
    if more.finish_reason:
        known.finish_reason = more.finish_reason
        if more.HasField("stop_token_id"):
            known.stop_token_id = more.stop_token_id


def restore(live: LiveRequest, record: JournalEntry) -> None:
    """Fills a new request with what is known of it. Only before it is submitted."""
    for tokens in record.tokens:
        sequence = live.sequences[tokens.sequence_index]
        sequence.add(tokens)
        if sequence.end is not None:
            live.output.add_end(sequence)
    live.output.heartbeat()
    live.output.prompt_logprobs.restore(record.prompt_logprobs)
    live.num_cached_tokens = record.num_cached_tokens
    live.num_moves = record.num_moves + 1
    live.placed_revision = record.weights_revision
    live.retry.restore(record.num_crashes, live.num_tokens)
    if record.HasField("first_token_after_s"):
        live.first_token_at = live.arrived_at + record.first_token_after_s
