// Collectives of ranks that share memory: processes of one machine, or threads of one process.
//
// They go by rounds, which all ranks pass together: in each one a rank fills its slot, says so, waits until all have, and
// reads the slots of the others. A rank has two slots and takes them in turn. One that fills a slot has passed the round
// before, so all have said that they filled theirs there, and whoever does that no longer reads slots of the round before
// it: one wait a round is enough. In the first round of a collective each rank also says which one it is.
//
// A wait begins with looks at the board, for as long as the caller allows, between which it lets others have the
// processor; it goes on in the kernel, and comes back every 50 ms to see whether somebody is gone. Whatever ends a wait
// before its time ends the group: it is written on the board, where every rank finds it. Linux only.

#include "numbers.h"

#ifdef __linux__

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>

namespace {

constexpr int kMaxRanks = 64;
constexpr int64_t kLine = 128;  // what processors fetch at once
constexpr int64_t kTickNs = 50'000'000;
constexpr int64_t kSmall = 32768;  // bytes that every rank sums by itself

enum Outcome : int32_t { kDone, kLeft, kDied, kLate, kDiffers };
enum Kind : int32_t { kSumFloat32, kSumBfloat16, kSumFloat16, kGather, kBroadcast, kExchange, kAllToAll };

// What a rank says of its collective.
struct Said {
  int32_t kind, to, from, unused;
  int64_t bytes;
};

// `SharedRank` of structures.py: the group as one rank sees it.
struct Group {
  uint8_t* memory;
  const int32_t* processes;  // [size] descriptors that can be read once a rank's process has ended, or -1
  int64_t size, rank, chunk_bytes, timeout_ns, spin_ns;
  uint64_t round;
  int64_t blamed;  // why the last call failed: the rank, and what it said
  Said theirs;
};

template <typename T>
struct alignas(kLine) Alone {
  std::atomic<T> value;
};

// The head of the memory. It begins as zeros.
struct Board {
  uint8_t name[kLine];             // not for this file
  Alone<uint32_t> end;             // how the group ended: an outcome, and above it the rank that is to blame
  Alone<uint64_t> arrivals;        // ranks that have filled a slot, over all rounds
  Alone<uint32_t> passed;          // rounds that all have filled theirs in; what sleepers wait for
  Alone<uint32_t> sleepers;
  Alone<uint64_t> rounds[kMaxRanks];  // those that each rank has filled its slot in, to name one that is missing
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics must work between processes");

int64_t slot_bytes(int64_t chunk_bytes) { return kLine + chunk_bytes + chunk_bytes / 2; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The rounds of one collective.
class Rounds {
 public:
  Rounds(Group& group, Said said)
      : size(static_cast<int>(group.size)),
        rank(static_cast<int>(group.rank)),
        chunk_bytes(group.chunk_bytes),
        group_(group),
        board_(*reinterpret_cast<Board*>(group.memory)),
        own_(said) {}

  const int size, rank;
  const int64_t chunk_bytes;

  // The own slot of the round to come; any slot of the one that was passed last. Behind it is room for half as much.
  uint8_t* to_fill() { return slot(rank, group_.round) + kLine; }
  const uint8_t* filled(int of) const { return slot(of, group_.round - 1) + kLine; }
  const Said& said(int by) const { return *reinterpret_cast<const Said*>(filled(by) - kLine); }

  // Says that the slot is filled, and waits for all others.
  Outcome pass() {
    if (board_.end.value.load(std::memory_order_acquire)) return ended();
    if (is_first_) *reinterpret_cast<Said*>(to_fill() - kLine) = own_;
    const uint64_t round = ++group_.round;
    board_.rounds[rank].value.store(round, std::memory_order_relaxed);
    if (board_.arrivals.value.fetch_add(1, std::memory_order_acq_rel) + 1 == round * size) {
      board_.passed.value.store(static_cast<uint32_t>(round));
      if (board_.sleepers.value.load()) futex(board_.passed.value, FUTEX_WAKE, INT_MAX, nullptr);
    } else if (const Outcome outcome = wait(static_cast<uint32_t>(round))) {
      return outcome;
    }
    if (is_first_) {
      is_first_ = false;
      for (int other = 0; other < size; ++other)
        if (!agrees(other)) {
          group_.theirs = said(other);
          return end(kDiffers, other);
        }
    }
    return kDone;
  }

 private:
  Group& group_;
  Board& board_;
  const Said own_;
  bool is_first_ = true;

  uint8_t* slot(int of, uint64_t round) const {
    const int64_t place = 2 * of + static_cast<int64_t>(round & 1);
    return group_.memory + sizeof(Board) + place * slot_bytes(chunk_bytes);
  }

  bool agrees(int other) const {
    const Said& theirs = said(other);
    if (theirs.kind != own_.kind) return false;
    if (own_.kind != kExchange) return theirs.bytes == own_.bytes;
    if ((own_.from == other) != (theirs.to == rank) || (own_.to == other) != (theirs.from == rank)) return false;
    return own_.from != other || theirs.bytes == own_.bytes;
  }

  bool has_passed(uint32_t round) const {
    return static_cast<int32_t>(board_.passed.value.load(std::memory_order_acquire) - round) >= 0;
  }

  Outcome ended() {
    const uint32_t how = board_.end.value.load(std::memory_order_acquire);
    group_.blamed = how >> 8;
    return static_cast<Outcome>(how & 0xff);
  }

  // Ends the group, unless it has ended for another reason. Sleepers find out at their next tick at the latest.
  Outcome end(Outcome how, int blamed) {
    uint32_t none = 0;
    board_.end.value.compare_exchange_strong(none, static_cast<uint32_t>(how) | static_cast<uint32_t>(blamed) << 8);
    futex(board_.passed.value, FUTEX_WAKE, INT_MAX, nullptr);
    group_.blamed = blamed;
    return how;
  }

  Outcome wait(uint32_t round) {
    for (const int64_t began = now_ns(); now_ns() - began < group_.spin_ns;) {
      for (int look = 0; look < 32; ++look) {
        if (has_passed(round)) return kDone;
        relax();
      }
      sched_yield();
    }
    const int64_t tick_ns = std::min(kTickNs, group_.timeout_ns);
    const timespec tick = {tick_ns / 1'000'000'000, tick_ns % 1'000'000'000};
    int64_t waited_ns = 0;  // in ticks, so that a rank that was stopped itself blames nobody for the time
    board_.sleepers.value.fetch_add(1);
    Outcome outcome = kDone;
    while (!has_passed(round)) {
      if (board_.end.value.load(std::memory_order_acquire)) {
        if (!has_passed(round)) outcome = ended();
        break;
      }
      const bool is_tick = futex(board_.passed.value, FUTEX_WAIT, round - 1, &tick) && errno == ETIMEDOUT;
      if (has_passed(round)) break;
      waited_ns += is_tick ? tick_ns : 0;
      if (const int dead = first_dead(); dead >= 0) {
        if (!has_passed(round)) outcome = end(kDied, dead);
        break;
      }
      if (waited_ns >= group_.timeout_ns) {
        outcome = end(kLate, first_missing());
        break;
      }
    }
    board_.sleepers.value.fetch_sub(1);
    return outcome;
  }

  int first_dead() const {
    pollfd polled[kMaxRanks];
    for (int other = 0; other < size; ++other) polled[other] = {group_.processes[other], POLLIN, 0};
    if (poll(polled, size, 0) <= 0) return -1;
    for (int other = 0; other < size; ++other)
      if (polled[other].revents) return other;
    return -1;
  }

  int first_missing() const {
    for (int other = 0; other < size; ++other)
      if (board_.rounds[other].value.load(std::memory_order_relaxed) < group_.round) return other;
    return rank;
  }
};

// Of its own, so that no compiler joins the additions of several ranks, whose order is the sum's.
template <typename T>
__attribute__((noinline)) void add(const T* term, float* total, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += to_float(term[i]);
}

// out [n] = terms[0] + terms[1] + .., in float32.
template <typename T>
void sum(const T* const* terms, int num_terms, T* out, int64_t n) {
  constexpr int64_t kBlock = 1024;
  float total[kBlock];
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = std::min(kBlock, n - first);
    for (int64_t i = 0; i < count; ++i) total[i] = to_float(terms[0][first + i]);
    for (int term = 1; term < num_terms; ++term) add(terms[term] + first, total, count);
    for (int64_t i = 0; i < count; ++i) store(out + first + i, total[i]);
  }
}

// Small tensors are summed by every rank. Of others each one sums its part of a chunk, while the next is copied: a round
// carries what one chunk is and what the one before it adds up to.
template <typename T>
Outcome reduce(Rounds& rounds, T* tensor, int64_t n) {
  const T* terms[kMaxRanks];
  const int size = rounds.size;
  if (n * static_cast<int64_t>(sizeof(T)) <= kSmall) {
    std::memcpy(rounds.to_fill(), tensor, n * sizeof(T));
    if (const Outcome outcome = rounds.pass()) return outcome;
    for (int of = 0; of < size; ++of) terms[of] = reinterpret_cast<const T*>(rounds.filled(of));
    sum(terms, size, tensor, n);
    return kDone;
  }
  const int64_t chunk = rounds.chunk_bytes / sizeof(T), line = kLine / sizeof(T);
  const auto part = [&](int64_t first, int of, int64_t* at) {  // of the chunk that begins there: elements, and how many
    const int64_t count = std::min(chunk, n - first), each = ((count + size - 1) / size + line - 1) / line * line;
    *at = std::min(count, of * each);
    return std::min(count - *at, each);
  };
  int64_t at;
  for (int64_t first = 0; first < n + chunk; first += chunk) {
    const int64_t before = first - chunk;
    const bool has_before = first > 0, has_next = first < n;
    if (has_before) {
      const int64_t count = part(before, rounds.rank, &at);
      for (int of = 0; of < size; ++of) terms[of] = reinterpret_cast<const T*>(rounds.filled(of)) + at;
      terms[rounds.rank] = tensor + before + at;
      sum(terms, size, reinterpret_cast<T*>(rounds.to_fill() + rounds.chunk_bytes), count);
    }
    if (has_next) {
      for (int of = 0; of < size; ++of) {
        const int64_t count = part(first, of, &at);
        if (of != rounds.rank)
          std::memcpy(reinterpret_cast<T*>(rounds.to_fill()) + at, tensor + first + at, count * sizeof(T));
      }
    }
    if (const Outcome outcome = rounds.pass()) return outcome;
    for (int of = 0; of < size && has_before; ++of) {
      const int64_t count = part(before, of, &at);
      std::memcpy(tensor + before + at, rounds.filled(of) + rounds.chunk_bytes, count * sizeof(T));
    }
    if (!has_next) break;
  }
  return kDone;
}

// Each rank's `bytes` come as pieces, between which those of the other ranks lie.
Outcome gather(Rounds& rounds, const uint8_t* in, uint8_t* out, int64_t bytes, int64_t piece) {
  int64_t from = 0;
  do {
    const int64_t until = std::min(bytes, from + rounds.chunk_bytes);
    std::memcpy(rounds.to_fill(), in + from, until - from);
    if (const Outcome outcome = rounds.pass()) return outcome;
    for (int of = 0; of < rounds.size; ++of) {
      const uint8_t* next = rounds.filled(of);
      for (int64_t at = from; at < until;) {
        const int64_t row = at / piece, within = at % piece, count = std::min(piece - within, until - at);
        std::memcpy(out + (row * rounds.size + of) * piece + within, next, count);
        next += count, at += count;
      }
    }
    from = until;
  } while (from < bytes);
  return kDone;
}

Outcome broadcast(Rounds& rounds, uint8_t* data, int64_t bytes) {
  int64_t from = 0;
  do {
    const int64_t count = std::min(bytes - from, rounds.chunk_bytes);
    if (rounds.rank == 0) std::memcpy(rounds.to_fill(), data + from, count);
    if (const Outcome outcome = rounds.pass()) return outcome;
    if (rounds.rank != 0) std::memcpy(data + from, rounds.filled(0), count);
    from += count;
  } while (from < bytes);
  return kDone;
}

// Pairs may exchange different amounts: there are as many rounds as the largest one needs.
Outcome exchange(Rounds& rounds, const uint8_t* in, uint8_t* out, int64_t bytes, int source) {
  int64_t most = bytes, from = 0;
  do {
    const int64_t count = std::max<int64_t>(0, std::min(bytes - from, rounds.chunk_bytes));
    if (count) std::memcpy(rounds.to_fill(), in + from, count);
    if (const Outcome outcome = rounds.pass()) return outcome;
    if (from == 0)
      for (int of = 0; of < rounds.size; ++of) most = std::max(most, rounds.said(of).bytes);
    if (count) std::memcpy(out + from, rounds.filled(source), count);
    from += rounds.chunk_bytes;
  } while (from < most);
  return kDone;
}

// `bytes` go to each rank.
Outcome all_to_all(Rounds& rounds, const uint8_t* in, uint8_t* out, int64_t bytes) {
  const int64_t room = rounds.chunk_bytes / rounds.size / kLine * kLine;
  int64_t from = 0;
  do {
    const int64_t count = std::min(bytes - from, room);
    for (int to = 0; to < rounds.size; ++to)
      std::memcpy(rounds.to_fill() + to * room, in + to * bytes + from, count);
    if (const Outcome outcome = rounds.pass()) return outcome;
    for (int of = 0; of < rounds.size; ++of)
      std::memcpy(out + of * bytes + from, rounds.filled(of) + rounds.rank * room, count);
    from += count;
  } while (from < bytes);
  return kDone;
}

}  // namespace

extern "C" {

int64_t baton_ranks_bytes(int64_t size, int64_t chunk_bytes) {
  return size > kMaxRanks ? 0 : sizeof(Board) + 2 * size * slot_bytes(chunk_bytes);
}

// One collective of `kind`. `bytes`: of a sum, a broadcast and an exchange all, of the others those of (or for) one rank.
int32_t baton_ranks_meet(Group* group, int32_t kind, const void* from, void* to, int64_t bytes, int64_t piece,
                         int32_t destination, int32_t source) {
  Rounds rounds(*group, {kind, destination, source, 0, bytes});
  const auto* in = static_cast<const uint8_t*>(from);
  auto* out = static_cast<uint8_t*>(to);
  switch (kind) {
    case kSumFloat32: return reduce(rounds, static_cast<float*>(to), bytes / 4);
    case kSumBfloat16: return reduce(rounds, static_cast<bfloat16*>(to), bytes / 2);
    case kSumFloat16: return reduce(rounds, static_cast<float16*>(to), bytes / 2);
    case kGather: return gather(rounds, in, out, bytes, piece);
    case kBroadcast: return broadcast(rounds, out, bytes);
    case kExchange: return exchange(rounds, in, out, bytes, source);
    default: return all_to_all(rounds, in, out, bytes);
  }
}

// Ends the group for all ranks.
void baton_ranks_leave(Group* group) {
  Board& board = *reinterpret_cast<Board*>(group->memory);
  uint32_t none = 0;
  board.end.value.compare_exchange_strong(none, kLeft | static_cast<uint32_t>(group->rank) << 8);
  futex(board.passed.value, FUTEX_WAKE, INT_MAX, nullptr);
}
}

#endif
