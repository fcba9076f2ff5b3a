// What stands between the matrix products of an update: bends, sets, and the optimiser's step, with their gradients.
//
// Each is one pass over memory where torch makes five to fifteen. Products stay torch's. One thread: what is here is a
// few percent of an update once it is one pass.

#include <cmath>

#include "lanes.h"

namespace {

// As near as a float can tell, near zero too: where gradients flow a relative error counts.
inline Vector precise_tanh(Vector x) {
  const Vector z = x * x;
  Vector p = Vector{} - 0.005501060846f;  // least squares of (tanh(x) / x - 1) / x^2 over |x| < 0.65
  p = p * z + 0.02045441766f;
  p = p * z - 0.05368245329f;
  p = p * z + 0.1333074709f;
  p = p * z - 0.3333325581f;
  const Vector small = x + x * z * p;
  const Vector large = 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
  return z < 0.4225f ? small : large;  // NaN: large, which is NaN
}

inline Vector bent(Vector x, int32_t bend) {
  if (bend == kTanh) return precise_tanh(x);
  return x < 0.0f ? Vector{} : x;  // this way round NaN stays NaN
}

}  // namespace

extern "C" {

// x[size] becomes bend(x).
void opencda_bend(float* x, int64_t size, int32_t bend) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) save(x + i, bent(load(x + i), bend));
  if (i < size) {
    Vector rest{};
    std::memcpy(&rest, x + i, sizeof(float) * (size - i));
    rest = bent(rest, bend);
    std::memcpy(x + i, &rest, sizeof(float) * (size - i));
  }
}

// The gradient before a bend from that after it, and its sum over rows, the bias's.
//   y [rows, width]  what came out of the bend;  given [rows, width]  gradient by y
//   out [rows, width]  gradient by what went in: may be `given`;  bias [width]: may be null
void opencda_bend_back(const float* y, const float* given, float* out, float* __restrict bias, int64_t rows,
                       int64_t width, int32_t bend) {
  if (bias != nullptr) std::memset(bias, 0, sizeof(float) * width);
  for (int64_t row = 0; row < rows; ++row, y += width, given += width, out += width) {
    if (bend == kTanh)
      for (int64_t j = 0; j < width; ++j) out[j] = given[j] * (1.0f - y[j] * y[j]);
    else if (bend == kRelu)
      for (int64_t j = 0; j < width; ++j) out[j] = y[j] > 0.0f ? given[j] : 0.0f;
    else if (out != given)
      std::memcpy(out, given, sizeof(float) * width);
    if (bias != nullptr)
      for (int64_t j = 0; j < width; ++j) bias[j] += out[j];
  }
}

// The real rows of all sets one after the other, each with a 1 behind it.
//   neighbours [rows, longest, features];  counts [rows];  out [sum of counts, features + 1]
void opencda_gather(const float* neighbours, const int32_t* counts, float* out, int64_t rows, int64_t longest,
                    int64_t features) {
  for (int64_t i = 0; i < rows; ++i, neighbours += longest * features)
    for (int32_t k = 0; k < counts[i]; ++k, out += features + 1) {
      std::memcpy(out, neighbours + k * features, sizeof(float) * features);
      out[features] = 1.0f;
    }
}

// Of each set's lines, none of them negative: maximum, then mean; zero where there are none.
//   lines [sum of counts, hidden];  out [rows, 2 * hidden]
void opencda_pool(const float* lines, const int32_t* counts, float* out, int64_t rows, int64_t hidden) {
  for (int64_t i = 0; i < rows; ++i, out += 2 * hidden) {
    float* __restrict const most = out;
    float* __restrict const mean = out + hidden;
    std::memset(out, 0, sizeof(float) * 2 * hidden);
    for (int32_t k = 0; k < counts[i]; ++k, lines += hidden)
      for (int64_t j = 0; j < hidden; ++j) {
        most[j] = lines[j] > most[j] ? lines[j] : most[j];
        mean[j] += lines[j];  // NaN arrives here
      }
    const float share = 1.0f / float(counts[i] > 0 ? counts[i] : 1);
    for (int64_t j = 0; j < hidden; ++j) mean[j] *= share;
  }
}

// The gradient before the relu whose output was pooled; equal maxima share theirs, as torch has it.
//   lines, counts as above;  pooled, given [rows, 2 * hidden];  out [sum of counts, hidden];  scratch [hidden]
void opencda_pool_back(const float* __restrict lines, const int32_t* counts, const float* __restrict pooled,
                       const float* __restrict given, float* __restrict out, float* __restrict scratch, int64_t rows,
                       int64_t hidden) {
  for (int64_t i = 0; i < rows; ++i, pooled += 2 * hidden, given += 2 * hidden) {
    const int32_t count = counts[i];
    const float share = 1.0f / float(count > 0 ? count : 1);
    std::memset(scratch, 0, sizeof(float) * hidden);
    for (int32_t k = 0; k < count; ++k)
      for (int64_t j = 0; j < hidden; ++j) scratch[j] += lines[k * hidden + j] == pooled[j] ? 1.0f : 0.0f;
    for (int64_t j = 0; j < hidden; ++j) {  // a quotient of each, wanted or not: no branch
      const float quotient = given[j] / scratch[j];
      scratch[j] = scratch[j] > 0.0f ? quotient : 0.0f;
    }
    for (int32_t k = 0; k < count; ++k, lines += hidden, out += hidden)
      for (int64_t j = 0; j < hidden; ++j) {
        const float most = scratch[j];
        const float both = given[hidden + j] * share + (lines[j] == pooled[j] ? most : 0.0f);
        out[j] = lines[j] > 0.0f ? both : 0.0f;
      }
  }
}

// A step of Adam; `size` and `floor` are the rate and epsilon with both corrections in them (nn/optimiser.py).
void opencda_adam(const float* theta, const float* gradient, const float* m, const float* v, float* __restrict to,
                  float* __restrict to_m, float* __restrict to_v, int64_t count, float size, float floor,
                  float fresh_m, float fresh_v) {
  for (int64_t i = 0; i < count; ++i) {
    const float g = gradient[i];
    const float mean = m[i] + fresh_m * (g - m[i]);
    const float square = v[i] + fresh_v * (g * g - v[i]);
    to_m[i] = mean;
    to_v[i] = square;
    to[i] = theta[i] - size * (mean / (std::sqrt(square) + floor));
  }
}
}
