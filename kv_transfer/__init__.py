"""Moves the KV cache of token ranges from the ranks of one worker to the ranks of another.

It knows layouts, token ranges and head ranges; it knows no model, no request and no protocol: who may send what, and
when, is decided above it. `layout` says which rank sends which heads to whom, `pages` copies between a paged cache and
a contiguous buffer, `codec` packs a chunk into a slot and checks what landed, `transports` has one module for each
transport, and `transfer_engine` puts them together for one rank.
"""
