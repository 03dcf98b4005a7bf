"""The gated delta rule in its two forms, against transformers' and against one another."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next as reference

from engine.layers.delta_rule import advance, advance_chunks, convolve, convolve_next, normalize

SHAPES = [(1, 1, 4, 4), (2, 2, 8, 16), (3, 1, 16, 8)]
"""Key heads, value heads of each, dimensions of a key and of a value."""


def _tokens(count: int, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, ...]:
    heads, ratio, key, value = shape
    torch.manual_seed(count)
    q, k = torch.randn(count, heads, key), torch.randn(count, heads, key)
    v = torch.randn(count, heads, ratio, value)
    return q, k, v, -torch.rand(count, heads, ratio) * 3, torch.rand(count, heads, ratio)


def _ready(tokens: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    q, k, *others = tokens
    return normalize(q) * q.shape[-1] ** -0.5, normalize(k), *others


def _expected(tokens: tuple[torch.Tensor, ...], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = tokens
    out, last = reference.torch_recurrent_gated_delta_rule(
        q[None],
        k[None],
        v.flatten(1, 2)[None],
        g=g.flatten(1)[None],
        beta=beta.flatten(1)[None],
        initial_state=state.flatten(0, 1)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0].view(v.shape), last[0].view(state.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_token_of_many_sequences_is_taken_in_as_transformers_does(shape: tuple[int, int, int, int]) -> None:
    states = torch.randn(5, shape[0], shape[1], shape[2], shape[3])
    tokens = _tokens(5, shape)
    expected = [_expected(tuple(t[s : s + 1] for t in tokens), states[s]) for s in range(5)]
    out = advance(states, *_ready(tokens))
    torch.testing.assert_close(out, torch.cat([read for read, _ in expected]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, torch.stack([state for _, state in expected]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 16), (5, 64), (63, 1), (63, 2), (17, 150)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_from_any_place_on_give_what_token_after_token_gives(
    shape: tuple[int, int, int, int], first: int, count: int, chunk_size: int
) -> None:
    start = torch.randn(shape[0], shape[1], shape[2], shape[3])
    tokens, seen = _tokens(count, shape), {}
    state = start.clone()
    out = advance_chunks(
        state,
        *_ready(tokens),
        first=first,
        chunk_size=chunk_size,
        after_chunk=lambda end, now: seen.update({end: now.clone()}),
    )
    read, last = _expected(tokens, start)
    torch.testing.assert_close(out, read, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, last, atol=2e-5, rtol=1e-4)
    borders = {end for end in range(first + 1, first + count) if end % chunk_size == 0}
    assert set(seen) == borders | {first + count}
    for end, now in seen.items():
        _, expected = _expected(tuple(t[: end - first] for t in tokens), start)
        torch.testing.assert_close(now, expected, atol=2e-5, rtol=1e-4)


def test_strong_decay_over_a_chunk_neither_overflows_nor_gives_nan() -> None:
    shape = 1, 2, 8, 8
    q, k, v, g, beta = _tokens(64, shape)
    state = torch.randn(1, 2, 8, 8)
    start = state.clone()
    tokens = q, k, v, g * 100, beta
    out = advance_chunks(state, *_ready(tokens), first=0, chunk_size=64, after_chunk=lambda end, now: None)
    read, last = _expected(tokens, start)
    torch.testing.assert_close(out, read, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state, last, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("reach", [1, 3])
def test_a_convolution_goes_on_from_the_inputs_before(reach: int) -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(11, 2, 5), torch.randn(2, 5, reach + 1)
    whole = reference.causal_conv1d_fn(inputs.flatten(1).t()[None], weight.flatten(0, 1), activation="silu")
    expected = whole[0].t().view(inputs.shape)
    earlier = torch.zeros(2, 5, reach)
    out, every = convolve(inputs[:4], earlier, weight)
    torch.testing.assert_close(out, expected[:4])
    earlier = every[-reach:].permute(1, 2, 0)
    for token in range(4, 7):
        step, after = convolve_next(inputs[token][None], earlier[None], weight)
        torch.testing.assert_close(step[0], expected[token])
        earlier = after[0]
    torch.testing.assert_close(convolve(inputs[7:], earlier, weight)[0], expected[7:])
