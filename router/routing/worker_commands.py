"""The commands that the router sends to workers. Pure: messages out of a request and its placement."""

from __future__ import annotations

from cluster.pb import worker_pb2
from router.routing.worker_client import WorkerClient
from router.stream.request import LiveRequest


def admit_decode(live: LiveRequest) -> worker_pb2.Command:
    """Reserve, and wait for the hand-off."""
    return _admit(live, worker_pb2.ROLE_DECODE, expect_handoff=True)


def admit_prefill(live: LiveRequest, decode: WorkerClient) -> worker_pb2.Command:
    """Prefill, and hand over to `decode`, which must be ready: its incarnation says which life of it is meant."""
    assert decode.info is not None, f"worker {decode.worker_id} has not said who it is"
    peer = worker_pb2.Peer(worker_id=decode.worker_id, incarnation=decode.info.incarnation, address=decode.address)
    return _admit(live, worker_pb2.ROLE_PREFILL, decode_peer=peer)


def admit_local(live: LiveRequest) -> worker_pb2.Command:
    """Compute the prompt, or what of it is not here yet, and decode."""
    return _admit(live, worker_pb2.ROLE_DECODE)


def _admit(
    live: LiveRequest,
    role: worker_pb2.Role,
    *,
    expect_handoff: bool = False,
    decode_peer: worker_pb2.Peer | None = None,
) -> worker_pb2.Command:
    request = live.request
    return worker_pb2.Command(
        admit=worker_pb2.Admit(
            key=live.key.to_proto(),
            role=role,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            decode_peer=decode_peer,
            expect_handoff=expect_handoff,
            cache_salt=request.cache_salt,
            bypass_prefix_cache=request.bypass_prefix_cache,
            tell_each_token=request.stream_interval_tokens is not None,
            prompt_logprobs=None if expect_handoff else live.output.prompt_logprobs.wanted,
            known_tokens=[
                worker_pb2.KnownTokens(sequence_index=s.index, token_ids=s.known_ids)
                for s in live.sequences
                if s.known_ids
            ],
        )
    )
