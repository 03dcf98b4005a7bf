"""The end of sampling: one program a row puts its tiles together, filters, counts the token and scores it.

Filters need no sort. A row's best token is kept or it is not, and if not, the answer is ahead of it: more likely, or as
likely with a lower id. So the row is searched for what is ahead of one token after another, most often of one. Tiles
have left the largest number of each group of tokens: only groups with something ahead are read again, and their list
shrinks. A top_p within a top_k needs the mass of those k tokens: at least k reach the k-th largest of the groups'
largest numbers, so that about k groups are left, in which the k-th token is found by bisection over its bits. So are
the most likely tokens whose logprobs are wanted. Sums are added in an order that only the row itself decides.

Legend: R rows, V vocabulary, N tiles of a row, G groups of a row, L rows whose logprobs are wanted, K most alternatives
that any of them wants.
"""

import triton
import triton.language as tl

from engine.triton.sampling_batch import FIELDS, NESTED
from engine.triton.sampling_tiles import (
    COUNTS,
    IS_DRAWN,
    IS_FILTERED,
    IS_IDLE,
    IS_SCORED,
    NOTHING,
    POSITION,
    WIDTH,
    finite,
    first_of,
    gumbel,
    key_of,
    number,
    raw_logits,
    ruled,
    tempered_by,
)

_IS_NESTED = tl.constexpr(NESTED)
_TOP_K = tl.constexpr(FIELDS.index("top_k"))
_TOP_P = tl.constexpr(FIELDS.index("top_p"))
_FLOOR = tl.constexpr(FIELDS.index("floor"))
_PLACE = tl.constexpr(FIELDS.index("place"))
_NUM_TOP = tl.constexpr(FIELDS.index("num_top"))


@triton.jit
def _order(values):
    """An int32 for each number: the larger the number, the lower."""
    bits = values.to(tl.int32, bitcast=True)
    return ~tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _number_of(order):
    bits = ~order
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Of two int32, rounded down, without overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _kth_order(orders, k):
    """The k-th lowest of them."""
    low, high = tl.min(orders), tl.max(orders)
    while low < high:
        middle = _middle(low, high)
        if tl.sum((orders <= middle).to(tl.int32)) >= k:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _reached_by(of_groups, k, G: tl.constexpr):
    """A number that at least k numbers of the row reach, and few more, by the largest of its groups."""
    bound = tl.min(of_groups)
    if k <= G:
        bound = _number_of(_kth_order(_order(of_groups), k))
    return bound


@triton.jit
def _list_groups(of_groups, bound, listed, G: tl.constexpr, GROUPS: tl.constexpr):
    """Writes the groups that reach the bound, and returns how many they are."""
    groups = tl.arange(0, GROUPS)
    is_in = (of_groups >= bound) & (groups < G)
    ones = is_in.to(tl.int32)
    tl.debug_barrier()  # what was listed before is read
    tl.store(listed + tl.cumsum(ones, 0) - 1, groups, mask=is_in)
    tl.debug_barrier()
    return tl.sum(ones, 0)


@triton.jit
def _tokens_of(listed, start, count, V: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr):
    """Tokens [LISTED, GROUP] of the groups from `start` on, and whether there are such."""
    at = start + tl.arange(0, LISTED)
    groups = tl.load(listed + at, mask=at < count, other=0)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tokens, (at < count)[:, None] & (tokens < V)


@triton.jit
def _tempered(logits, mine, rules, top, tokens, is_there, V: tl.constexpr, W: tl.constexpr):
    values = raw_logits(logits, tokens, is_there)
    return tempered_by(ruled(values, mine, tokens, is_there, rules, V, W), top, mine)


@triton.jit
def _mass_of_most_likely(
    logits,
    mine,
    rules,
    top,
    of_groups,
    listed,
    k,
    V: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Sum of the weights of the k most likely tokens."""
    bound = _reached_by(of_groups, k, G)
    count = _list_groups(of_groups, bound, listed, G, GROUPS)
    kth, highest = _order(tl.max(of_groups)), _order(bound)
    if count <= LISTED:
        tokens, is_there = _tokens_of(listed, 0, count, V, GROUP, LISTED)
        kth = _kth_order(_order(_tempered(logits, mine, rules, top, tokens, is_there, V, W)), k)
    else:
        while kth < highest:
            middle, reaching = _middle(kth, highest), 0
            for start in range(0, count, LISTED):
                tokens, is_there = _tokens_of(listed, start, count, V, GROUP, LISTED)
                values = _tempered(logits, mine, rules, top, tokens, is_there, V, W)
                reaching += tl.sum((is_there & (_order(values) <= middle)).to(tl.int32))
            if reaching >= k:
                highest = middle
            else:
                kth = middle + 1
    above, mass = 0, 0.0
    for start in range(0, count, LISTED):
        tokens, is_there = _tokens_of(listed, start, count, V, GROUP, LISTED)
        values = _tempered(logits, mine, rules, top, tokens, is_there, V, W)
        is_above = is_there & (_order(values) < kth)
        above += tl.sum(is_above.to(tl.int32))
        mass += tl.sum(tl.where(is_above, tl.exp(values), 0.0))
    return mass + (k - above).to(tl.float32) * tl.exp(_number_of(kth))


@triton.jit
def _kept(
    logits,
    mine,
    rules,
    top,
    of_groups,
    listed,
    token,
    pivot,
    mass,
    V: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """The best token that the filters keep. `token` is the best of all, `pivot` its tempered logit; `mass` is the sum
    of the weights of all, or of the top_k."""
    top_k, floor, wanted = tl.load(mine + _TOP_K), number(mine + _FLOOR), mass * number(mine + _TOP_P)
    low, high = key_of(mine)
    is_open = pivot <= 0.0
    while is_open:
        count = _list_groups(of_groups, pivot, listed, G, GROUPS)
        num_ahead, mass_ahead = 0, 0.0
        best, best_token, best_value = NOTHING, V, NOTHING
        for start in range(0, count, LISTED):
            tokens, is_there = _tokens_of(listed, start, count, V, GROUP, LISTED)
            values = _tempered(logits, mine, rules, top, tokens, is_there, V, W)
            is_ahead = is_there & ((values > pivot) | ((values == pivot) & (tokens < token)))
            num_ahead += tl.sum(is_ahead.to(tl.int32))
            mass_ahead += tl.sum(tl.where(is_ahead, tl.exp(values), 0.0))
            scores = tl.where(is_ahead, values + gumbel(low, high, tokens), NOTHING)
            highest = tl.max(scores)
            if highest > best:
                best, best_token = highest, first_of(is_ahead & (scores == highest), tokens, V)
                best_value = tl.max(tl.where(tokens == best_token, values, NOTHING))
        is_kept = (mass_ahead < wanted) & (num_ahead < top_k) & (pivot >= floor)
        is_open = (num_ahead > 0) & (is_kept == 0) & (best_token < V)
        if is_open:
            token, pivot = best_token, best_value
    return token


@triton.jit
def _score(
    logits,
    mine,
    token,
    raw,
    listed,
    out,
    num_most,
    row,
    V: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Logprob and rank of the chosen token, and the most likely ones, in the model's own distribution."""
    raw_largest, raw_sums, raw_groups = raw
    logprobs, ranks, top_ids, top_logprobs = out
    tile, group = tl.arange(0, TILES), tl.arange(0, GROUPS)
    largest = tl.load(raw_largest + row * N + tile, mask=tile < N, other=NOTHING)
    sums = tl.load(raw_sums + row * N + tile, mask=tile < N, other=0.0)
    of_groups = tl.load(raw_groups + row * G + group, mask=group < G, other=NOTHING)
    top = finite(tl.max(largest, 0))
    total = tl.log(tl.maximum(tl.sum(sums * tl.exp(largest - top), 0), 1e-30))
    own, place = tl.load(logits + token), tl.load(mine + _PLACE).to(tl.int64)
    tl.store(logprobs + place, own - top - total)
    count, ahead = _list_groups(of_groups, own, listed, G, GROUPS), 0
    for start in range(0, count, LISTED):
        tokens, is_there = _tokens_of(listed, start, count, V, GROUP, LISTED)
        ahead += tl.sum((raw_logits(logits, tokens, is_there) > own).to(tl.int32))
    tl.store(ranks + place, ahead + 1)
    num_top = tl.load(mine + _NUM_TOP)
    if num_top > 0:
        count = _list_groups(of_groups, _reached_by(of_groups, num_top, G), listed, G, GROUPS)
        last, last_token = float("inf"), -1
        for nth in range(num_top):
            best, best_token = NOTHING, V
            for start in range(0, count, LISTED):
                tokens, is_there = _tokens_of(listed, start, count, V, GROUP, LISTED)
                values = raw_logits(logits, tokens, is_there)
                is_behind = is_there & ((values < last) | ((values == last) & (tokens > last_token)))
                highest = tl.max(tl.where(is_behind, values, NOTHING))
                first = first_of(is_behind & (values == highest), tokens, V)
                if (highest > best) | ((highest == best) & (first < best_token)):
                    best, best_token = highest, first
            tl.store(top_ids + place * num_most + nth, best_token)
            tl.store(top_logprobs + place * num_most + nth, best - top - total)
            last, last_token = best, best_token


@triton.jit(do_not_specialize=["num_most"])
def settle(
    logits,  # [R, V]
    table,  # [R, F]
    rules,  # as in sampling_tiles
    largest,  # [R, N]
    largest_at,  # [R, N]
    drawn,
    of_groups,
    raw,
    listed,  # [R, G]
    token_ids,  # [R]
    out,  # of L rows: logprobs [L], ranks [L], top ids [L, K], top logprobs [L, K]
    num_most,  # K
    stride,
    V: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Grid: R. `TILES` and `GROUPS`: N and G as powers of two."""
    row = tl.program_id(0).to(tl.int64)
    mine, logits, listed = table + row * WIDTH, logits + row * stride, listed + row * G
    flags, position, counted = tl.load(mine), tl.load(mine + POSITION), tl.load(mine + COUNTS)
    if (flags & IS_IDLE) != 0:
        return
    tile = tl.arange(0, TILES)
    numbers = tl.load(largest + row * N + tile, mask=tile < N, other=NOTHING)
    top = tl.max(numbers, 0)
    token = tl.min(tl.where(numbers == top, tl.load(largest_at + row * N + tile, mask=tile < N, other=V), V), 0)
    if (flags & IS_DRAWN) != 0:
        scores, tokens, pivots, masses = drawn
        numbers = tl.load(scores + row * N + tile, mask=tile < N, other=NOTHING)
        at = tl.load(tokens + row * N + tile, mask=tile < N, other=V)
        token = tl.min(tl.where(numbers == tl.max(numbers, 0), at, V), 0)
        if (flags & IS_FILTERED) != 0:
            pivot = tl.load(pivots + row * N + tile, mask=tile < N, other=NOTHING)
            pivot = tl.max(tl.where(at == token, pivot, NOTHING), 0)
            mass = tl.sum(tl.load(masses + row * N + tile, mask=tile < N, other=0.0), 0)
            group = tl.arange(0, GROUPS)
            tops = tl.load(of_groups + row * G + group, mask=group < G, other=NOTHING)
            if (flags & _IS_NESTED) != 0:
                k = tl.load(mine + _TOP_K)
                mass = _mass_of_most_likely(logits, mine, rules, top, tops, listed, k, V, W, G, GROUPS, GROUP, LISTED)
            token = _kept(logits, mine, rules, top, tops, listed, token, pivot, mass, V, W, G, GROUPS, GROUP, LISTED)
    if (flags & IS_SCORED) != 0:
        _score(logits, mine, token, raw, listed, out, num_most, row, V, N, G, TILES, GROUPS, GROUP, LISTED)
    tl.debug_barrier()  # nothing of the row is read any more
    tl.store(token_ids + row, token)
    tl.store(mine + POSITION, position + 1)
    if counted >= 0:
        counts = rules[1]
        tl.atomic_add(counts + counted.to(tl.int64) * V + token, 1, sem="relaxed")
