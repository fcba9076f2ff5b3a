// Vectors of floats as wide as the processor's, and the nonlinearities of networks on them.
//
// No library but libc, so that a build needs nothing but a compiler.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMostRows = 6;  // 6 rows x 4 vectors = 24 accumulators of 32 registers
#else
constexpr int kLanes = 8;
constexpr int kMostRows = 3;  // 12 accumulators of 16 registers
#endif
typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

enum Bend : int32_t { kNone = 0, kTanh = 1, kRelu = 2 };  // what bends a layer's output, as BENDS in native.py

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// sum + a * b, rounded once where the processor can: said in so many words, because a compiler that is left to join
// products and sums by itself does so in one loop and not in the next, and the same row would come out differently.
inline Vector multiply_add(Vector a, Vector b, Vector sum) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

inline void save(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

// e^x by range reduction to |r| <= ln(2)/2 and a polynomial of degree 6: relative error below 2e-7.
inline Vector exponential(Vector x) {
  x = x > 60.0f ? Vector{} + 60.0f : x;
  x = x < -60.0f ? Vector{} - 60.0f : x;
  const Vector magic = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vector n = (x * 1.44269504f + magic) - magic;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = Vector{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Integers bits = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

inline Vector hyperbolic_tangent(Vector x) { return 1.0f - 2.0f / (1.0f + exponential(2.0f * x)); }

}  // namespace
