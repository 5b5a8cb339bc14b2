// Sixteen floats in an array, for any processor whose fused multiply-add rounds once.
#pragma once
#include <math.h>

struct F {
  float lane[16];
};

#define FORETOKEN_EACH for (int i = 0; i < 16; i++)
static inline F load(const float* p) {
  F x;
  memcpy(x.lane, p, sizeof x.lane);
  return x;
}
static inline void store(float* p, F x) { memcpy(p, x.lane, sizeof x.lane); }
static inline F all(float x) {
  F y;
  FORETOKEN_EACH y.lane[i] = x;
  return y;
}
#define FORETOKEN_BINARY(name, expression)      \
  static inline F name(F x, F y) {              \
    F z;                                        \
    FORETOKEN_EACH {                            \
      const float a = x.lane[i], b = y.lane[i]; \
      z.lane[i] = expression;                   \
    }                                           \
    return z;                                   \
  }
FORETOKEN_BINARY(add, a + b)
FORETOKEN_BINARY(sub, a - b)
FORETOKEN_BINARY(mul, a * b)
FORETOKEN_BINARY(quot, a / b)
FORETOKEN_BINARY(least, a < b ? a : b)
FORETOKEN_BINARY(most, a > b ? a : b)
FORETOKEN_BINARY(signed_as, signbit(b) ? -fabsf(a) : a)
static inline F fma(F x, F y, F z) {
  FORETOKEN_EACH z.lane[i] = fmaf(x.lane[i], y.lane[i], z.lane[i]);
  return z;
}
static inline F at_least(F x, F least, F y) {  // y where x >= least, else zero
  FORETOKEN_EACH if (!(x.lane[i] >= least.lane[i])) y.lane[i] = 0.0f;
  return y;
}
static inline F whole(F x) {
  FORETOKEN_EACH x.lane[i] = rintf(x.lane[i]);
  return x;
}
static inline F magnitude(F x) {
  FORETOKEN_EACH x.lane[i] = fabsf(x.lane[i]);
  return x;
}
// 2 to the power of integers from -126 to 127
static inline F power(F r) {
  FORETOKEN_EACH {
    const float x = r.lane[i];
    const uint32_t bits = uint32_t(x == x ? int32_t(x) + 127 : 127) << 23;
    memcpy(&r.lane[i], &bits, 4);
  }
  return r;
}
// Lanes `from` to `to` - 1 of x, and the other lanes of `other`
static inline F between(F x, F other, int from, int to) {
  FORETOKEN_EACH if (i < from || i >= to) x.lane[i] = other.lane[i];
  return x;
}
static inline float sum(F x) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) x.lane[i] += x.lane[i + n];
  return x.lane[0];
}
static inline float largest(F x) {
  float most = x.lane[0];
  FORETOKEN_EACH most = x.lane[i] > most ? x.lane[i] : most;
  return most;
}
static inline float from_half(uint16_t h) {  // exact: a product with a power of two
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits = rest << 13;
  float x;
  if (rest >= 0x7c00) {
    bits |= 0x7f800000;  // infinity or NaN
    memcpy(&x, &bits, 4);
  } else {
    memcpy(&x, &bits, 4);
    x *= 0x1p112f;
  }
  memcpy(&bits, &x, 4);
  bits |= sign;
  memcpy(&x, &bits, 4);
  return x;
}
static inline F from_half(const uint16_t* p) {
  F x;
  FORETOKEN_EACH x.lane[i] = from_half(p[i]);
  return x;
}
static inline uint16_t to_half(float x) {  // rounded half to even; for magnitudes below 65,520
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;  // NaN
  if (bits < 0x38800000) return sign | uint16_t(rintf(fabsf(x) * 0x1p24f));  // subnormal
  return sign | uint16_t((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}
static inline void to_half(F x, uint16_t* p) { FORETOKEN_EACH p[i] = to_half(x.lane[i]); }
static inline F from_bytes(const int8_t* p) {
  F x;
  FORETOKEN_EACH x.lane[i] = float(p[i]);
  return x;
}
static inline F from_bfloat16(const uint16_t* p) {
  F x;
  FORETOKEN_EACH {
    const uint32_t bits = uint32_t(p[i]) << 16;
    memcpy(&x.lane[i], &bits, 4);
  }
  return x;
}
// The bits of the largest magnitude of 32 numbers; NaN counts as larger than infinity
static inline uint32_t largest_bits(F x, F y) {
  uint32_t most = 0;
  for (const F* each : {&x, &y}) FORETOKEN_EACH {
    uint32_t bits;
    memcpy(&bits, &each->lane[i], 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return most;
}
// Round 32 numbers in [-127, 127] to bytes, half to even; write the sums of each 16
static inline void to_bytes(F x, F y, int8_t* q, int32_t* sums) {
  sums[0] = sums[1] = 0;
  FORETOKEN_EACH {
    q[i] = int8_t(rintf(x.lane[i]));
    q[i + 16] = int8_t(rintf(y.lane[i]));
    sums[0] += q[i];
    sums[1] += q[i + 16];
  }
}
static inline void prefetch(const void*) {}
static inline void prefetch_once(const void*) {}

enum { TILE = 4 };  // tokens whose sums fit the registers
