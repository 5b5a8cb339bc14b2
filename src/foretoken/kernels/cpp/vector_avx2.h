// Sixteen floats in two registers of AVX2; needs FMA and F16C.
#pragma once
#include <immintrin.h>

struct F {
  __m256 a, b;
};

INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F quot(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE F least(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F most(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F at_least(F x, F least, F y) {  // y where x >= least, else zero
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ), y.b)};
}
INLINE F whole(F x) { return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)}; }
INLINE F magnitude(F x) {
  const __m256 bits = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, bits), _mm256_and_ps(x.b, bits)};
}
INLINE F signed_as(F x, F sign) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(x.a, _mm256_and_ps(sign.a, bit)),
          _mm256_or_ps(x.b, _mm256_and_ps(sign.b, bit))};
}
INLINE __m256 power(__m256 r) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// 2 to the power of integers from -126 to 127
INLINE F power(F r) { return {power(r.a), power(r.b)}; }
INLINE __m256 between(__m256 x, __m256 other, int from, int to) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
  const __m256i reached = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1));
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_and_si256(below, reached)));
}
// Lanes `from` to `to` - 1 of x, and the other lanes of `other`
INLINE F between(F x, F other, int from, int to) {
  return {between(x.a, other.a, from, to), between(x.b, other.b, from - 8, to - 8)};
}
INLINE float sum(F x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float largest(F x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
}
INLINE F from_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
INLINE void to_half(F x, uint16_t* p) {  // rounded half to even
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE __m256 from_bytes_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
INLINE F from_bytes(const int8_t* p) { return {from_bytes_half(p), from_bytes_half(p + 8)}; }
INLINE __m256 from_bfloat16_half(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE F from_bfloat16(const uint16_t* p) {
  return {from_bfloat16_half(p), from_bfloat16_half(p + 8)};
}
INLINE int32_t sum_of(__m256i x) {
  __m128i z = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  z = _mm_add_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(z, _mm_shuffle_epi32(z, 0xb1)));
}
// The bits of the largest magnitude of 32 numbers; NaN counts as larger than infinity
INLINE uint32_t largest_bits(F x, F y) {
  const F a = magnitude(x), b = magnitude(y);
  const __m256i one = _mm256_max_epi32(_mm256_castps_si256(a.a), _mm256_castps_si256(a.b));
  const __m256i two = _mm256_max_epi32(_mm256_castps_si256(b.a), _mm256_castps_si256(b.b));
  const __m256i eight = _mm256_max_epi32(one, two);
  __m128i z = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  z = _mm_max_epi32(z, _mm_shuffle_epi32(z, 0x4e));
  return uint32_t(_mm_cvtsi128_si32(_mm_max_epi32(z, _mm_shuffle_epi32(z, 0xb1))));
}
// Round 32 numbers in [-127, 127] to bytes, half to even; write the sums of each 16
INLINE void to_bytes(F x, F y, int8_t* q, int32_t* sums) {
  const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  const __m256i c = _mm256_cvtps_epi32(y.a), d = _mm256_cvtps_epi32(y.b);
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(bytes, order));
  sums[0] = sum_of(_mm256_add_epi32(a, b));
  sums[1] = sum_of(_mm256_add_epi32(c, d));
}
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// For memory that is used once: does not displace other data from the caches
INLINE void prefetch_once(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }

enum { TILE = 4 };  // tokens whose sums fit the registers
