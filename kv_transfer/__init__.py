"""Moves the KV cache of token ranges from the ranks of one worker to the ranks of another.

It knows layouts, token and layer ranges and head ranges; it knows no model and no request, and of the protocol only what
both sides share (`actions`, `ordered`): who may send what, and when, is decided above it.

    layout               which rank sends which heads to whom, and what can be bridged
    pages                copies between a paged cache and a contiguous buffer
    codec, header,       what lies in a slot: a header, the KV in a wire format, a digest over both
      wire, digest
    transport, pairs     a pair of ranks and its slots, over `shm` and `cuda_ipc` (both a `ring`), `gloo` or `nccl`;
      choose, faults     which of them fits, and one that fails on purpose
    link, mover          the pairs of one rank with one other worker, and what a rank does with them
"""
