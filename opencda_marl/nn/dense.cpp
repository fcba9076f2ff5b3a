// Dense layers and sets of neighbour rows, for acting (no gradients): x W + b with W [inputs, outputs] as it is trained.
//
// Weights are read where they lie, so that new ones cost nothing. A tile of a few rows times a few vectors of
// outputs is summed in registers over all inputs, in order: what comes out for a row does not depend on the
// rows beside it. One thread: a few dozen rows are done before a second one would have woken up.

#include "lanes.h"

namespace {

constexpr int kMostVectors = 4;  // of outputs in a tile

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Compiled once, not into every tile: there a compiler may join products and sums in one way here and another there.
__attribute__((noinline)) Vector bent(Vector x, int32_t bend) {
  if (bend == kTanh) return hyperbolic_tangent(x);
  if (bend == kRelu) return x < 0.0f ? Vector{} : x;  // this way round NaN stays NaN
  return x;
}

struct Product {
  const float* x;
  int64_t x_stride;
  const float* weight;
  int64_t weight_stride;
  const float* bias;  // null: none
  float* out;
  int64_t out_stride;
  int inputs;
  int32_t bend;
  int valid;  // outputs to write of each vector
};

template <int Rows, int Vectors>
void tile(const Product& p) {
  Vector sums[Rows][Vectors];
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < Vectors; ++v) sums[row][v] = p.bias == nullptr ? Vector{} : load(p.bias + v * kLanes);
  const float* weight = p.weight;
  for (int k = 0; k < p.inputs; ++k, weight += p.weight_stride) {
    Vector w[Vectors];
    for (int v = 0; v < Vectors; ++v) w[v] = load(weight + v * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < Rows; ++row) {
      const Vector x = Vector{} + p.x[row * p.x_stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[row][v] = multiply_add(w[v], x, sums[row][v]);
    }
  }
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < Vectors; ++v) {
      const Vector y = bent(sums[row][v], p.bend);
      float* to = p.out + row * p.out_stride + v * kLanes;
      if (p.valid == kLanes)
        save(to, y);
      else
        std::memcpy(to, &y, sizeof(float) * p.valid);
    }
}

template <int Rows>
void tile_of(const Product& p, int vectors) {
  switch (vectors) {
    case 1: return tile<Rows, 1>(p);
    case 2: return tile<Rows, 2>(p);
    case 3: return tile<Rows, 3>(p);
    case 4: return tile<Rows, 4>(p);
  }
}

// All rows times a block of at most kMostVectors vectors of outputs.
void block(Product p, int64_t rows, int vectors) {
  const int64_t tiles = (rows + kMostRows - 1) / kMostRows;
  for (int64_t left = tiles; left > 0; --left) {
    const int64_t some = (rows + left - 1) / left;  // tiles of nearly equal size
    switch (some) {
      case 1: tile_of<1>(p, vectors); break;
      case 2: tile_of<2>(p, vectors); break;
      case 3: tile_of<3>(p, vectors); break;
#if defined(__AVX512F__)
      case 4: tile_of<4>(p, vectors); break;
      case 5: tile_of<5>(p, vectors); break;
      case 6: tile_of<6>(p, vectors); break;
#endif
    }
    p.x += some * p.x_stride;
    p.out += some * p.out_stride;
    rows -= some;
  }
}

// y = bend(x W + b) for all rows. `panel` [1 + inputs, lanes] is used where there are fewer outputs than lanes.
void dense(const float* x, int64_t x_stride, const float* weight, const float* bias, float* out, int64_t rows,
           int inputs, int outputs, int32_t bend, float* panel) {
  Product p{x, x_stride, weight, outputs, bias, out, outputs, inputs, bend, kLanes};
  if (outputs < kLanes) {
    std::memset(panel, 0, sizeof(float) * (1 + inputs) * kLanes);
    if (bias != nullptr) std::memcpy(panel, bias, sizeof(float) * outputs);
    for (int k = 0; k < inputs; ++k)
      std::memcpy(panel + (1 + k) * kLanes, weight + int64_t(k) * outputs, sizeof(float) * outputs);
    p.bias = panel;
    p.weight = panel + kLanes;
    p.weight_stride = kLanes;
    p.valid = outputs;
    return block(p, rows, 1);
  }
  for (int done = 0; done < outputs;) {
    const int whole = (outputs - done) / kLanes;
    const int vectors = whole == 0 ? 1 : int(least(whole, kMostVectors));
    const int first = whole == 0 ? outputs - kLanes : done;  // the last ones of a ragged width once more
    p.weight = weight + first;
    p.bias = bias == nullptr ? nullptr : bias + first;
    p.out = out + first;
    block(p, rows, vectors);
    done = first + vectors * kLanes;
  }
}

// Of the rows [count, hidden] of one vehicle, none of them negative: maximum, then mean, zero where there are none.
void pool(const float* rows, int count, int hidden, float* __restrict out) {
  float* __restrict const most = out;
  float* __restrict const mean = out + hidden;
  std::memset(out, 0, sizeof(float) * 2 * hidden);
  for (int i = 0; i < count; ++i, rows += hidden)
    for (int j = 0; j < hidden; ++j) {
      most[j] = rows[j] > most[j] ? rows[j] : most[j];
      mean[j] += rows[j];  // NaN arrives here
    }
  const float number = float(count > 0 ? count : 1);
  for (int j = 0; j < hidden; ++j) mean[j] /= number;
}

}  // namespace

extern "C" {

struct Layer {
  const float* weight;  // [inputs, outputs]
  const float* bias;  // [outputs]
  int32_t inputs;
  int32_t outputs;
  int32_t bend;
};

int opencda_dense_lanes() { return kLanes; }

// Layers one after the other.
//   x [rows, inputs of the first]; out [rows, outputs of the last]
//   scratch [(1 + widest) * lanes + 2 * rows * widest], with the widest of all layers, in and out
void opencda_mlp(const Layer* layers, int32_t count, const float* x, float* out, float* scratch, int64_t rows,
                 int32_t widest) {
  float* const panel = scratch;
  float* const halves[2] = {panel + int64_t(1 + widest) * kLanes, panel + int64_t(1 + widest) * kLanes + rows * widest};
  for (int i = 0; i < count; ++i) {
    const Layer& layer = layers[i];
    float* to = i == count - 1 ? out : halves[i % 2];
    dense(x, layer.inputs, layer.weight, layer.bias, to, rows, layer.inputs, layer.outputs, layer.bend, panel);
    x = to;
  }
}

// Contexts of sets: relu(relu([row, 1] row0) row1) of each real row, maximum and mean, a layer over both.
//   neighbours [rows, longest, features]; counts [rows]; row0 [features + 1, hidden]; row1 [hidden, hidden]
//   last       from 2 * hidden to the size of a context;  out [rows, size]
//   scratch    [(1 + widest) * lanes + 2 * longest * hidden + rows * 2 * hidden], widest of features and 2 * hidden
// Returns 0; 1 and nothing done where a count is not in [0, longest].
int32_t opencda_sets(const float* neighbours, const int32_t* counts, const float* row0, const float* row1,
                     const Layer* last, float* out, float* scratch, int64_t rows, int32_t longest, int32_t features,
                     int32_t hidden, int32_t widest) {
  for (int64_t i = 0; i < rows; ++i)
    if (counts[i] < 0 || counts[i] > longest) return 1;
  float* const panel = scratch;
  float* const below = panel + int64_t(1 + widest) * kLanes;
  float* const above = below + int64_t(longest) * hidden;
  float* const pooled = above + int64_t(longest) * hidden;
  const float* bias = row0 + int64_t(features) * hidden;  // the weights of the mask, which is 1
  for (int64_t i = 0; i < rows; ++i) {
    const float* seen = neighbours + i * longest * features;
    dense(seen, features, row0, bias, below, counts[i], features, hidden, kRelu, panel);
    dense(below, hidden, row1, nullptr, above, counts[i], hidden, hidden, kRelu, panel);
    pool(above, counts[i], hidden, pooled + i * 2 * hidden);
  }
  dense(pooled, 2 * hidden, last->weight, last->bias, out, rows, 2 * hidden, last->outputs, last->bend, panel);
  return 0;
}
}
