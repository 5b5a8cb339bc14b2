// Integer sums by AVX2, eight outputs at a time. `maddubs` adds pairs of products in 16 bits: eight of four bits
// fit (8 x 2 x 15 x 127 < 32,768), four of five, two of six; eight bits are two halves of four.
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

// Sums of one side's 8 outputs in 16 bits: of the first and the second half of a block, of the weights' lower (or
// all) bits and of the upper four of eight
template <int n>
struct ShortSums {
  __m256i small[2][n], large[2][n];
};

// Add the products of weights 4 j up to 4 j + 4 of both halves of a block
template <int kind, int parts, int n, int j>
static inline void add_products(const uint8_t* p, const int8_t* q, int stride, ShortSums<n>& sums) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)(p + j * 64));
  __m256i whole[2] = {_mm256_and_si256(bytes, low),
                      _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low)};
  if (kind == INT8) {
    whole[0] = bytes;
    whole[1] = _mm256_loadu_si256((const __m256i*)(p + j * 64 + 256));
  } else if (kind == CODE4) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE));
    for (__m256i& each : whole) each = _mm256_shuffle_epi8(table, each);
  } else if (kind == INT5 || kind == INT6) {
    const int shift = kind == INT5 ? j : j % 2 * 2;
    const __m256i upper = _mm256_set1_epi8(kind == INT5 ? 16 : 48);
    const __m256i high =
        _mm256_loadu_si256((const __m256i*)(p + 256 + (kind == INT6 ? j / 2 * 64 : 0)));
    whole[0] = _mm256_or_si256(whole[0], _mm256_and_si256(_mm256_slli_epi16(high, 4 - shift), upper));
    whole[1] = _mm256_or_si256(whole[1], _mm256_and_si256(_mm256_srli_epi16(high, shift), upper));
  }
  for (int h = 0; h < 2; h++) {
    const __m256i lower = kind == INT8 || kind == CODE4 ? _mm256_and_si256(whole[h], low) : whole[h];
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(whole[h], 4), low);
    __m256i *small = sums.small[h % parts], *large = sums.large[h % parts];
    for (int t = 0; t < n; t++) {
      const __m256i x = _mm256_set1_epi32(((const int32_t*)(q + size_t(t) * stride))[j + h * 4]);
      small[t] = _mm256_add_epi16(small[t], _mm256_maddubs_epi16(lower, x));
      if (kind == INT8 || kind == CODE4)
        large[t] = _mm256_add_epi16(large[t], _mm256_maddubs_epi16(upper, x));
    }
  }
}

template <int n>
static inline void clear(ShortSums<n>& sums) {
  for (int h = 0; h < 2; h++)
    for (int t = 0; t < n; t++) sums.small[h][t] = sums.large[h][t] = _mm256_setzero_si256();
}

template <int kind, int halves, int n>
static inline void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  const __m256i one = _mm256_set1_epi16(1);
  // both halves of a block in one sum where that fits 16 bits
  constexpr int parts = halves == 2 || kind == INT5 || kind == INT6 ? 2 : 1;
  for (int side = 0; side < 2; side++, p += 32) {
    ShortSums<n> some;
    __m256i made[2][n];
    clear(some);
    add_products<kind, parts, n, 0>(p, q, stride, some);
    add_products<kind, parts, n, 1>(p, q, stride, some);
    if (kind == INT6) {
      for (int h = 0; h < parts; h++)
        for (int t = 0; t < n; t++) made[h][t] = _mm256_madd_epi16(some.small[h][t], one);
      clear(some);
    }
    add_products<kind, parts, n, 2>(p, q, stride, some);
    add_products<kind, parts, n, 3>(p, q, stride, some);
    for (int h = 0; h < parts; h++)
      for (int t = 0; t < n; t++) {
        const __m256i last = _mm256_madd_epi16(some.small[h][t], one);
        const __m256i large = _mm256_madd_epi16(some.large[h][t], _mm256_set1_epi16(16));
        made[h][t] = kind == INT6                    ? _mm256_add_epi32(made[h][t], last)
                     : kind == INT8 || kind == CODE4 ? _mm256_add_epi32(last, large)
                                                     : last;
      }
    for (int t = 0; t < n; t++) {
      if (halves == 1 && parts == 2) made[0][t] = _mm256_add_epi32(made[0][t], made[1][t]);
      for (int h = 0; h < halves; h++) (side ? sums[h][t].b : sums[h][t].a) = made[h][t];
    }
  }
}
