// Integer sums by AVX2, eight outputs at a time. `maddubs` adds pairs of products in 16 bits: eight of four bits
// fit (8 x 2 x 15 x 127 < 32,768), so eight bits are two halves of four.
#pragma once

enum { TILE = 2 };  // more tokens spill registers

struct Sums {  // of 16 outputs
  __m256i a, b;
};

static inline Sums less(Sums x, int32_t y) {
  const __m256i all = _mm256_set1_epi32(y);
  return {_mm256_sub_epi32(x.a, all), _mm256_sub_epi32(x.b, all)};
}
static inline F numbers(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

// Add the products of chunks `first` up to `last`: of their low or high four bits, or of all eight
template <bool lows, bool highs, int n>
static inline void chunk_sums(const uint8_t* p, const int8_t* q, int stride, int first, int last,
                              int behind, __m256i* sums) {
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  __m256i small[n], large[n];
  for (int t = 0; t < n; t++) small[t] = large[t] = _mm256_setzero_si256();
  for (int c = first; c < last; c++) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(p + c * 64));
    for (int t = 0; t < n; t++) {
      const int32_t* x = (const int32_t*)(q + size_t(t) * stride) + c;
      if (lows)
        small[t] = _mm256_add_epi16(
            small[t], _mm256_maddubs_epi16(_mm256_and_si256(bytes, low), _mm256_set1_epi32(*x)));
      if (highs)
        large[t] = _mm256_add_epi16(
            large[t], _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), low),
                                           _mm256_set1_epi32(x[behind])));
    }
  }
  for (int t = 0; t < n; t++) {
    if (lows && highs && !behind) {  // eight bits
      sums[t] = _mm256_add_epi32(_mm256_madd_epi16(small[t], one),
                                 _mm256_madd_epi16(large[t], _mm256_set1_epi16(16)));
    } else {
      const __m256i both = lows && highs ? _mm256_add_epi16(small[t], large[t])
                                         : lows ? small[t] : large[t];
      sums[t] = _mm256_madd_epi16(both, one);
    }
  }
}

template <int kind, int halves, int n>
static inline void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  for (int side = 0; side < 2; side++, p += 32) {
    __m256i made[halves][n];
    if (kind == INT8) {
      for (int h = 0; h < halves; h++)
        chunk_sums<true, true, n>(p, q, stride, h * 4, halves == 1 ? 8 : h * 4 + 4, 0, made[h]);
    } else if (halves == 1) {
      chunk_sums<true, true, n>(p, q, stride, 0, 4, 4, made[0]);
    } else {
      chunk_sums<true, false, n>(p, q, stride, 0, 4, 4, made[0]);
      chunk_sums<false, true, n>(p, q, stride, 0, 4, 4, made[halves - 1]);
    }
    for (int h = 0; h < halves; h++)
      for (int t = 0; t < n; t++) (side ? sums[h][t].b : sums[h][t].a) = made[h][t];
  }
}
