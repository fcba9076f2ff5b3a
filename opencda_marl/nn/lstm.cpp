// The last hidden state of an LSTM over rows of different lengths, for acting (no gradients).
//
// Sequences are sorted by length, so that at each time step the ones still running are a prefix. One pass
// over the weights per time step makes the four gates of a block of units for a few sequences at a time and
// applies the nonlinearities while the sums are still in registers: nothing is written but h and c.
//
// Plain C interface and no library but libc: a build takes a second, needs no headers but the compiler's,
// and does not depend on the versions of torch or Python.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

namespace {

struct Step {
  const float* weights;  // of this block of units: [1 + features + hidden, gates, lanes]; row 0 is the bias
  const float* const* inputs;  // one row of features per sequence
  const float* before;  // [sequences, hidden]
  float* after;  // [sequences, hidden]
  float* cell;  // [sequences, hidden]
  int features;
  int hidden;
  int first_unit;
};

template <int Rows>
void advance(const Step& step, int first) {
  Vector sums[Rows][4];
  for (int row = 0; row < Rows; ++row)
    for (int gate = 0; gate < 4; ++gate) sums[row][gate] = load(step.weights + gate * kLanes);
  const float* weights = step.weights + 4 * kLanes;
  const float* sources[Rows];
  for (int row = 0; row < Rows; ++row) sources[row] = step.inputs[first + row];
  int length = step.features;
  for (int part = 0; part < 2; ++part) {
    for (int k = 0; k < length; ++k, weights += 4 * kLanes) {
      const Vector w0 = load(weights), w1 = load(weights + kLanes);
      const Vector w2 = load(weights + 2 * kLanes), w3 = load(weights + 3 * kLanes);
#pragma GCC unroll 6
      for (int row = 0; row < Rows; ++row) {
        const Vector x = Vector{} + sources[row][k];
        sums[row][0] += w0 * x;
        sums[row][1] += w1 * x;
        sums[row][2] += w2 * x;
        sums[row][3] += w3 * x;
      }
    }
    if (step.before == nullptr) break;  // first time step: the state is zero
    for (int row = 0; row < Rows; ++row) sources[row] = step.before + int64_t(first + row) * step.hidden;
    length = step.hidden;
  }
  for (int row = 0; row < Rows; ++row) {
    const int64_t at = int64_t(first + row) * step.hidden + step.first_unit;
    const Vector kept = step.before == nullptr ? Vector{} : sigmoid(sums[row][1]) * load(step.cell + at);
    const Vector cell = kept + sigmoid(sums[row][0]) * hyperbolic_tangent(sums[row][2]);
    save(step.cell + at, cell);
    save(step.after + at, sigmoid(sums[row][3]) * hyperbolic_tangent(cell));
  }
}

void advance_tile(const Step& step, int first, int rows) {
  switch (rows) {
    case 1: return advance<1>(step, first);
    case 2: return advance<2>(step, first);
    case 3: return advance<3>(step, first);
#if defined(__AVX512F__)
    case 4: return advance<4>(step, first);
    case 5: return advance<5>(step, first);
    case 6: return advance<6>(step, first);
#endif
  }
}

}  // namespace

extern "C" {

// Units are handled in blocks of so many; `hidden` must be a multiple of it.
int opencda_lstm_lanes() { return kLanes; }

// Last hidden state of each sequence, read from its last row to its first (farthest neighbour first).
//   neighbours [sequences, longest, features]; counts [sequences], 0 <= counts <= longest
//   weights    [hidden / lanes, 1 + features + hidden, 4 gates (i f g o), lanes]
//   order      [sequences] int32, scratch;  inputs [sequences] pointers, scratch
//   scratch    [3, sequences, hidden];  out [sequences, hidden], zero where a count is 0
void opencda_lstm_last(const float* neighbours, const int32_t* counts, const float* weights, int32_t* order,
                       const float** inputs, float* scratch, float* out, int32_t sequences, int32_t longest,
                       int32_t features, int32_t hidden) {
  for (int i = 0; i < sequences; ++i) order[i] = i;
  std::stable_sort(order, order + sequences, [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
  const int64_t size = int64_t(sequences) * hidden;
  float* cell = scratch;
  float* before = scratch + size;
  float* after = scratch + 2 * size;
  int active = sequences;
  while (active > 0 && counts[order[active - 1]] <= 0) {
    --active;
    std::memset(out + int64_t(order[active]) * hidden, 0, sizeof(float) * hidden);
  }
  const int64_t block = int64_t(1 + features + hidden) * 4 * kLanes;
  for (int t = 0; active > 0; ++t) {
    for (int i = 0; i < active; ++i)
      inputs[i] = neighbours + (int64_t(order[i]) * longest + counts[order[i]] - 1 - t) * features;
    const int tiles = (active + kMostRows - 1) / kMostRows;
    Step step{weights, inputs, t == 0 ? nullptr : before, after, cell, features, hidden, 0};
    for (; step.first_unit < hidden; step.first_unit += kLanes, step.weights += block)
      for (int tile = 0, first = 0; tile < tiles; ++tile) {
        const int rows = (active - first + tiles - tile - 1) / (tiles - tile);  // tiles of nearly equal size
        advance_tile(step, first, rows);
        first += rows;
      }
    std::swap(before, after);
    while (active > 0 && counts[order[active - 1]] <= t + 1) {
      --active;
      std::memcpy(out + int64_t(order[active]) * hidden, before + int64_t(active) * hidden, sizeof(float) * hidden);
    }
  }
}
}
