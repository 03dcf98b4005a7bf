"""The gated delta rule (arXiv 2412.06464) and the short convolution before it, as functions of tensors.

A head's state is a matrix from keys to values. Each token lets it fade, reads what the state has for the token's key,
and corrects that towards the token's value. The recurrent form takes one token of many sequences, the chunked form many
tokens of one sequence; both compute in float32 and give the same up to rounding. Knows no pages, weights or steps.

Legend: S sequences, T tokens, C tokens of a chunk, N chunks, U key heads, R value heads of each key head, K and V
dimensions of a key and of a value, Q channels of one key head, W inputs that the convolution reaches back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_CHUNK_TOKENS = 64
_EPS = 1e-6


def convolve_next(inputs: Tensor, earlier: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolves one token of each sequence: [S, U, Q], the W inputs before it [S, U, Q, W] and a weight [U, Q, W + 1].

    Returns silu of the outputs, float32 [S, U, Q], and the last W inputs, [S, U, Q, W].
    """
    window = torch.cat([earlier, inputs.float().unsqueeze(-1)], dim=-1)  # [S, U, Q, W + 1]
    return F.silu((window * weight).sum(dim=-1)), window[..., 1:]


def convolve(inputs: Tensor, earlier: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convolves the tokens of one sequence: [T, U, Q], the W inputs before them [U, Q, W] and a weight [U, Q, W + 1].

    Returns silu of the outputs, float32 [T, U, Q], and every input from W before the first on, [W + T, U, Q].
    """
    every = torch.cat([earlier.permute(2, 0, 1), inputs.float()])  # [W + T, U, Q]
    channels = every.flatten(1).t().unsqueeze(0)  # [1, U * Q, W + T]
    out = F.conv1d(channels, weight.flatten(0, 1).unsqueeze(1), groups=channels.shape[1])  # [1, U * Q, T]
    return F.silu(out[0].t()).view(inputs.shape), every


def normalize(heads: Tensor) -> Tensor:
    """Divides float32 vectors by their length."""
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + _EPS)


def advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Takes one token of each sequence into its state [S, U, R, K, V], in place; returns what it reads, [S, U, R, V].

    q and k are [S, U, K], normalised and q scaled; v is [S, U, R, V]; log_decay and beta are [S, U, R]. All float32.
    """
    decay = log_decay.exp().unsqueeze(-1)
    found = torch.matmul(torch.stack([k, q], dim=2).unsqueeze(2), state)  # [S, U, R, 2, V]
    correction = (v - decay * found[..., 0, :]) * beta.unsqueeze(-1)  # [S, U, R, V]
    overlap = (q * k).sum(dim=-1)[..., None, None]
    state.mul_(decay.unsqueeze(-1)).addcmul_(k[:, :, None, :, None], correction.unsqueeze(-2))
    return torch.addcmul(decay * found[..., 1, :], overlap, correction)


def advance_chunks(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    first: int,
    chunk_size: int,
    after_chunk: Callable[[int, Tensor], None],
) -> Tensor:
    """Takes many tokens of one sequence into its state [U, R, K, V], in place; returns what they read, [T, U, R, V].

    Shapes are those of `advance` with T for S. Chunks end where `chunk_size` divides the token's place in the sequence,
    which is `first` for the first of these, and behind the last token. `after_chunk(end, state)` is called with the
    tokens that the state has taken in then.
    """
    num_tokens, lead = len(q), first % chunk_size
    count = -(-(lead + num_tokens) // chunk_size)
    rest = count * chunk_size - lead - num_tokens

    def chunks(rows: Tensor) -> Tensor:
        """[T, ...] as [N, ..., C, last]: tokens of zeros change nothing, since they neither fade nor correct."""
        padding = (0, 0) * (rows.dim() - 1) + (lead, rest)
        return F.pad(rows, padding).view(count, chunk_size, *rows.shape[1:]).movedim(1, -2)

    q, k, v = chunks(q).unsqueeze(2), chunks(k).unsqueeze(2), chunks(v)  # [N, U, 1, C, K], [N, U, R, C, V]
    beta = chunks(beta.unsqueeze(-1))  # [N, U, R, C, 1]
    faded = chunks(log_decay.unsqueeze(-1)).squeeze(-1).cumsum(dim=-1)  # [N, U, R, C] since the chunk's beginning
    between = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).tril_().exp_().tril_()  # [N, U, R, C, C] from column to row
    system = torch.matmul(k, k.mT) * between * beta  # its diagonal is not read
    since = faded.exp().unsqueeze(-1)  # [N, U, R, C, 1]
    wanted = torch.cat([v, k * since], dim=-1) * beta
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    own, reads = solved.tensor_split((v.shape[-1],), dim=-1)  # [N, U, R, C, V], [N, U, R, C, K]
    inner = torch.matmul(q, k.mT) * between
    late = k * (faded[..., -1:] - faded).exp().unsqueeze(-1)
    outer, total = q * since, faded[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for n in range(count):
        correction = own[n] - torch.matmul(reads[n], state)
        torch.add(torch.matmul(outer[n], state), torch.matmul(inner[n], correction), out=out[n])
        state.mul_(total[n]).add_(torch.matmul(late[n].mT, correction))
        end = min((n + 1) * chunk_size - lead, num_tokens)
        after_chunk(first + end, state)
    rows = out.movedim(-2, 1).flatten(0, 1)  # [N * C, U, R, V]
    return rows[lead : lead + num_tokens]
