"""What is computed of every logit of a batch: rules, temperature and noise, by two kernels with one program a tile.

A tile is `TILE` neighbouring tokens of one row, whatever the batch: a row has the same bits alone and among any others.
Rules are applied wherever a logit is read, so only a few numbers a tile are written. The order of the rules and their
roundings are `engine.sampling.sampler.LogitRules`', the noise is `engine.sampling.rng`'s, in the same integers. A logit
that is not a number is taken for -inf.

A tile also leaves the largest number of each group of neighbouring tokens, so that what is large can be found later
without reading all. What a row wants stands in the table of `sampling_batch`.

Legend: R rows, V vocabulary, N tiles of a row, G groups of a row, F fields, W words of a mask.
"""

import triton
import triton.language as tl

from engine.triton.sampling_batch import DRAWN, FIELDS, FILTERED, IDLE, SCORED

TILE = 4096

POSITION = tl.constexpr(FIELDS.index("position"))
WIDTH = tl.constexpr(len(FIELDS))
_KEY_LOW = tl.constexpr(FIELDS.index("key_low"))
_KEY_HIGH = tl.constexpr(FIELDS.index("key_high"))
_TEMPERATURE = tl.constexpr(FIELDS.index("temperature"))
COUNTS = tl.constexpr(FIELDS.index("counts"))
_REPETITION = tl.constexpr(FIELDS.index("repetition"))
_PRESENCE = tl.constexpr(FIELDS.index("presence"))
_FREQUENCY = tl.constexpr(FIELDS.index("frequency"))
_BIAS = tl.constexpr(FIELDS.index("bias"))
_MASK = tl.constexpr(FIELDS.index("mask"))
_EARLY_MASK = tl.constexpr(FIELDS.index("early_mask"))
_EARLY_UNTIL = tl.constexpr(FIELDS.index("early_until"))
IS_DRAWN = tl.constexpr(DRAWN)
IS_FILTERED = tl.constexpr(FILTERED)
IS_SCORED = tl.constexpr(SCORED)
IS_IDLE = tl.constexpr(IDLE)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def number(column):
    """A float of the table."""
    return tl.load(column).to(tl.float32, bitcast=True)


@triton.jit
def raw_logits(logits, tokens, is_there):
    values = tl.load(logits + tokens, mask=is_there, other=NOTHING)
    return tl.where(values == values, values, NOTHING)


@triton.jit
def ruled(values, mine, tokens, is_there, rules, V: tl.constexpr, W: tl.constexpr):
    """Raw logits after every rule."""
    bias, counts, masks, own_masks = rules
    position = tl.load(mine + POSITION)
    biased = tl.load(mine + _BIAS)
    if biased >= 0:
        values += tl.load(bias + biased.to(tl.int64) * V + tokens, mask=is_there, other=0.0)
    mask = tl.where(position < tl.load(mine + _EARLY_UNTIL), tl.load(mine + _EARLY_MASK), tl.load(mine + _MASK))
    if mask != -1:
        if mask >= 0:
            words = tl.load(masks + mask.to(tl.int64) * W + tokens // 32, mask=is_there, other=0)
        else:
            words = tl.load(own_masks + (-2 - mask).to(tl.int64) * W + tokens // 32, mask=is_there, other=0)
        values = tl.where(((words >> (tokens % 32)) & 1) != 0, values, NOTHING)
    counted = tl.load(mine + COUNTS)
    if counted >= 0:
        count = tl.load(counts + counted.to(tl.int64) * V + tokens, mask=is_there, other=0)
        repetition = tl.full(values.shape, 1.0, tl.float32) * number(mine + _REPETITION)
        penalized = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(count != 0, penalized, values)
        times = count & 0x7FFFFFFF
        values -= tl.where(times != 0, number(mine + _PRESENCE), 0.0)
        values -= number(mine + _FREQUENCY) * times.to(tl.float32)
    return values


@triton.jit
def finite(largest):
    """What is subtracted from numbers of which this is the largest: 0 where all are -inf."""
    return tl.where(largest > NOTHING, largest, 0.0)


@triton.jit
def tempered_by(values, largest, mine):
    """Ruled logits less the largest of the row, over the temperature: 0 at most."""
    temperature = tl.full(values.shape, 1.0, tl.float32) * number(mine + _TEMPERATURE)
    return tl.div_rn(values - finite(largest), temperature)


@triton.jit
def _mixed(x):
    """splitmix64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def key_of(mine):
    """Halves of the row's key at its position, uint32; the table has that of its seed and sequence."""
    low = tl.load(mine + _KEY_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(mine + _KEY_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _mixed(((high << 32) | low) ^ tl.load(mine + POSITION).to(tl.uint64))
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def gumbel(low, high, tokens):
    """`engine.sampling.rng.gumbel`."""
    bits = tokens.to(tl.uint32) * 0x9E3779B1 + low
    bits = (bits ^ (bits >> 17)) * 0xED5AD4BB
    bits = ((bits ^ (bits >> 11)) + high) * 0xAC4C1B51
    bits = (bits ^ (bits >> 15)) * 0x31848BAB
    bits = (bits ^ (bits >> 14)) >> 1
    uniform = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # log1p(-uniform): what 1 - uniform loses by rounding is put right by the quotient.
    rest = 1.0 - uniform
    lost = tl.where(rest < 1.0, 1.0 - rest, 1.0)
    exponential = tl.where(rest < 1.0, -tl.log(rest) * (uniform / lost), uniform)
    return -tl.log(exponential)


@triton.jit
def first_of(is_one, tokens, V: tl.constexpr):
    """The lowest token for which it is true; V where there is none."""
    return tl.min(tl.where(is_one, tokens, V))


@triton.jit
def tokens_of_tile(tile, TILE: tl.constexpr, GROUP: tl.constexpr):
    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    return groups, groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def find_largest(
    logits,  # [R, V]
    table,  # [R, F]
    rules,  # bias [., V], counts [., V], masks [., W], masks of this step [., W]
    largest,  # [R, N]
    largest_at,  # [R, N]
    raw,  # largest [R, N], sum of the exponentials of what others are less than it [R, N], largest of groups [R, G]
    stride,
    V: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Grid: R, N. The largest logit of each tile after all rules; for rows that want logprobs, numbers before them."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = table + row * WIDTH
    flags = tl.load(mine)
    if (flags & IS_IDLE) != 0:
        return
    groups, tokens = tokens_of_tile(tile, TILE, GROUP)
    is_there = tokens < V
    values = raw_logits(logits + row * stride, tokens, is_there)
    if (flags & IS_SCORED) != 0:
        raw_largest, raw_sums, raw_groups = raw
        of_groups = tl.max(values, 1)
        top = tl.max(of_groups, 0)
        tl.store(raw_groups + row * G + groups, of_groups, mask=groups < G)
        tl.store(raw_largest + row * N + tile, top)
        tl.store(raw_sums + row * N + tile, tl.sum(tl.exp(values - finite(top))))
    values = ruled(values, mine, tokens, is_there, rules, V, W)
    top = tl.max(values)
    tl.store(largest + row * N + tile, top)
    tl.store(largest_at + row * N + tile, first_of(values == top, tokens, V))


@triton.jit
def draw(
    logits,  # [R, V]
    table,  # [R, F]
    rules,
    largest,  # [R, N]
    drawn,  # best score [R, N], its token [R, N], that one's tempered logit [R, N], sum of weights [R, N]
    of_groups,  # [R, G] largest tempered logit
    stride,
    V: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    G: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid: R, N. The token of each tile that is best with its noise, before filters. `TILES`: N as a power of two."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = table + row * WIDTH
    flags = tl.load(mine)
    if (flags & IS_DRAWN) != 0:
        every = tl.arange(0, TILES)
        top = tl.max(tl.load(largest + row * N + every, mask=every < N, other=NOTHING), 0)
        groups, tokens = tokens_of_tile(tile, TILE, GROUP)
        is_there = tokens < V
        values = raw_logits(logits + row * stride, tokens, is_there)
        values = tempered_by(ruled(values, mine, tokens, is_there, rules, V, W), top, mine)
        low, high = key_of(mine)
        scores = values + gumbel(low, high, tokens)
        best = tl.max(scores)
        token = first_of(scores == best, tokens, V)
        best_scores, best_tokens, pivots, masses = drawn
        at = row * N + tile
        tl.store(best_scores + at, best)
        tl.store(best_tokens + at, token)
        if (flags & IS_FILTERED) != 0:
            tl.store(pivots + at, tl.max(tl.where(tokens == token, values, NOTHING)))
            tl.store(masses + at, tl.sum(tl.exp(values)))
            tl.store(of_groups + row * G + groups, tl.max(values, 1), mask=groups < G)
