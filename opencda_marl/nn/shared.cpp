// Sums over processes of one machine that share memory: who has written says so, who needs it looks until it is there.
//
// Two places for each worker's vector are used in turn. A worker that has written its k-th vector has read everything of
// the one before the last, so nobody writes where somebody may still read.

#include <sched.h>

#include <cstdint>

namespace {

constexpr int64_t kApart = 8;  // counters lie on cache lines of their own
constexpr int64_t kPatience = 4000;  // looks, about 0.1 ms, before others are let in

inline void breathe() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

extern "C" {

// Everything written before is seen by whoever sees this.
void opencda_post(int64_t* counters, int32_t rank, int64_t count) {
  __atomic_store_n(counters + rank * kApart, count, __ATOMIC_RELEASE);
}

// 0: all counters have reached `count`; 1: not within `looks`; 2: a worker has left before (its counter is -1 - what it
// had reached).
int32_t opencda_await(const int64_t* counters, int32_t size, int64_t count, int64_t looks) {
  for (int32_t rank = 0; rank < size;) {
    const int64_t there = __atomic_load_n(counters + rank * kApart, __ATOMIC_ACQUIRE);
    if (there < 0 && -there - 1 < count) return 2;
    if (there >= count || there < 0) {
      ++rank;
      continue;
    }
    if (looks-- <= 0) return 1;
    if (looks % kPatience == 0) sched_yield();
    breathe();
  }
  return 0;
}

// out[i] = the sum over ranks of parts[rank][i], rank 0 first.
void opencda_sum(const float* parts, int64_t stride, int32_t size, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = parts[i];
  for (int32_t rank = 1; rank < size; ++rank) {
    const float* __restrict const one = parts + rank * stride;
    for (int64_t i = 0; i < count; ++i) out[i] += one[i];
  }
}
}
