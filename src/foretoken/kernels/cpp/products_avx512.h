// Integer sums by AVX-512 VNNI: one instruction adds four products for each of 16 outputs.
#pragma once

typedef __m512i Sums;  // of 16 outputs

INLINE Sums integers(int32_t x, int times) {
  return _mm512_mullo_epi32(_mm512_set1_epi32(x), _mm512_set1_epi32(times));
}
INLINE F numbers(Sums x) { return _mm512_cvtepi32_ps(x); }

// Add the products of weights 4 j to 4 j + 3 of both halves of a block
template <int kind, int halves, int n, int j>
INLINE void add_four(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  const __m512i low = _mm512_set1_epi8(15);
  const __m512i bytes = _mm512_loadu_si512(p + j * 64);
  __m512i first = _mm512_and_si512(bytes, low);
  __m512i second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
  if (kind == INT8) {
    first = bytes;
    second = _mm512_loadu_si512(p + j * 64 + 256);
  } else if (coded(kind)) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)codes_of(kind)));
    first = _mm512_shuffle_epi8(table, first);
    second = _mm512_shuffle_epi8(table, second);
  } else if (kind == INT5 || kind == INT6) {
    const int shift = kind == INT5 ? j : j % 2 * 2;
    const __m512i upper = _mm512_set1_epi8(kind == INT5 ? 16 : 48);
    const __m512i high = _mm512_loadu_si512(p + 256 + (kind == INT6 ? j / 2 * 64 : 0));
    first = _mm512_or_si512(first, _mm512_and_si512(_mm512_slli_epi16(high, 4 - shift), upper));
    second = _mm512_or_si512(second, _mm512_and_si512(_mm512_srli_epi16(high, shift), upper));
  }
  for (int t = 0; t < n; t++) {
    const int32_t* fours = (const int32_t*)x[t].q + j;
    sums[0][t] = _mm512_dpbusd_epi32(sums[0][t], first, _mm512_set1_epi32(fours[0]));
    Sums& other = sums[halves - 1][t];
    other = _mm512_dpbusd_epi32(other, second, _mm512_set1_epi32(fours[4]));
  }
}

template <int kind, int halves, int n, int j = 0>
INLINE void add_products(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  add_four<kind, halves, n, j>(p, x, sums);
  if constexpr (j < 3) add_products<kind, halves, n, j + 1>(p, x, sums);
}
