// Sixteen floats in one register of AVX-512.
#pragma once
#include <immintrin.h>

typedef __m512 F;

INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE F all(float x) { return _mm512_set1_ps(x); }
INLINE F add(F x, F y) { return _mm512_add_ps(x, y); }
INLINE F sub(F x, F y) { return _mm512_sub_ps(x, y); }
INLINE F mul(F x, F y) { return _mm512_mul_ps(x, y); }
INLINE F quot(F x, F y) { return _mm512_div_ps(x, y); }
INLINE F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
INLINE F least(F x, F y) { return _mm512_min_ps(x, y); }  // y if either is NaN
INLINE F most(F x, F y) { return _mm512_max_ps(x, y); }   // y if either is NaN
INLINE F at_least(F x, F least, F y) {  // y where x >= least, else zero
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_GE_OQ), y);
}
INLINE F whole(F x) { return _mm512_roundscale_ps(x, 0); }
INLINE F magnitude(F x) { return _mm512_abs_ps(x); }
INLINE F signed_as(F x, F sign) {
  const __m512i bit = _mm512_set1_epi32(int(0x80000000u));
  return _mm512_castsi512_ps(_mm512_or_si512(
      _mm512_castps_si512(x), _mm512_and_si512(_mm512_castps_si512(sign), bit)));
}
// 2 to the power of integers from -126 to 127
INLINE F power(F r) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(r), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}
// Lanes `from` to `to` - 1 of x, and the other lanes of `other`
INLINE F between(F x, F other, int from, int to) {
  const unsigned below = to >= 16 ? 0xffffu : to <= 0 ? 0u : (1u << to) - 1;
  const unsigned before = from <= 0 ? 0u : from >= 16 ? 0xffffu : (1u << from) - 1;
  return _mm512_mask_mov_ps(other, __mmask16(below & ~before), x);
}
INLINE float sum(F x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float largest(F x) { return _mm512_reduce_max_ps(x); }
INLINE F from_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
INLINE void to_half(F x, uint16_t* p) {  // rounded half to even
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE F from_bytes(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE F from_bfloat16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// The bits of the largest magnitude of 32 numbers; NaN counts as larger than infinity
INLINE uint32_t largest_bits(F x, F y) {
  const __m512i a = _mm512_castps_si512(magnitude(x)), b = _mm512_castps_si512(magnitude(y));
  return uint32_t(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}
// Round 32 numbers in [-127, 127] to bytes, half to even; write the sums of each 16
INLINE void to_bytes(F x, F y, int8_t* q, int32_t* sums) {
  const __m512i a = _mm512_cvtps_epi32(x), b = _mm512_cvtps_epi32(y);
  _mm_storeu_si128((__m128i*)q, _mm512_cvtepi32_epi8(a));
  _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtepi32_epi8(b));
  sums[0] = _mm512_reduce_add_epi32(a);
  sums[1] = _mm512_reduce_add_epi32(b);
}
INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
// For memory that is used once: does not displace other data from the caches
INLINE void prefetch_once(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_NTA); }

enum { TILE = 8 };  // tokens whose sums fit the registers
