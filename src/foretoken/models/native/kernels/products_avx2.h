// Integer sums by AVX2, eight outputs at a time. `maddubs` adds pairs of products in 16 bits: eight of four bits
// fit (8 x 2 x 15 x 127 < 32,768), four of five, two of six; eight bits are two halves of four. AVX-VNNI multiplies
// bytes and adds in 32 bits.
#pragma once

enum { TILE = 4 };  // more tokens spill registers

struct Sums {  // of 16 outputs
  __m256i a, b;
};

INLINE Sums less(Sums x, int32_t y) {
  const __m256i all = _mm256_set1_epi32(y);
  return {_mm256_sub_epi32(x.a, all), _mm256_sub_epi32(x.b, all)};
}
INLINE F numbers(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

enum Part { ALL, LOWER, UPPER };  // bits of a weight: all, or four of eight

// Weights 4 k up to 4 k + 4 of eight outputs of a block at p
template <int kind, int part, int k>
INLINE __m256i weights_of(const uint8_t* p) {
  const __m256i low = _mm256_set1_epi8(15);
  constexpr int j = k % 4, shift = kind == INT5 ? j : j % 2 * 2;
  __m256i x = _mm256_loadu_si256((const __m256i*)(p + (kind == INT8 ? k : j) * 64));
  if (kind != INT8) x = _mm256_and_si256(k < 4 ? x : _mm256_srli_epi16(x, 4), low);
  if (kind == CODE4) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)TABLE));
    x = _mm256_shuffle_epi8(table, x);
  }
  if (kind == INT5 || kind == INT6) {
    const __m256i upper = _mm256_set1_epi8(kind == INT5 ? 16 : 48);
    const __m256i high =
        _mm256_loadu_si256((const __m256i*)(p + 256 + (kind == INT6 ? j / 2 * 64 : 0)));
    const __m256i moved = k < 4 ? _mm256_slli_epi16(high, 4 - shift) : _mm256_srli_epi16(high, shift);
    x = _mm256_or_si256(x, _mm256_and_si256(moved, upper));
  }
  if (part == ALL) return x;
  return _mm256_and_si256(part == LOWER ? x : _mm256_srli_epi16(x, 4), low);
}
INLINE __m256i four_bytes(const int8_t* q) { return _mm256_set1_epi32(*(const int32_t*)q); }

#if defined(FORETOKEN_AVXVNNI)

template <int kind, int halves, int n, int k>
INLINE void add_products(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  const __m256i u = weights_of<kind, ALL, k>(p), v = weights_of<kind, ALL, k>(p + 32);
  Sums* to = sums[k / 4 % halves];
  for (int t = 0; t < n; t++) {
    const __m256i x = four_bytes(q + size_t(t) * stride + k * 4);
    to[t].a = _mm256_dpbusd_avx_epi32(to[t].a, u, x);
    to[t].b = _mm256_dpbusd_avx_epi32(to[t].b, v, x);
  }
}

#else

// Compilers would multiply first and add in a tree, for which there are not enough registers
INLINE __m256i in_order(__m256i x) {
  asm("" : "+x"(x));
  return x;
}

template <int n>
struct ShortSums {  // in 16 bits
  __m256i a[n], b[n];
};

template <int kind, int part, int halves, int n, int k>
INLINE void add_short(const uint8_t* p, const int8_t* q, int stride, ShortSums<n>& some,
                      Sums (*sums)[n]) {
  constexpr int fit = kind == INT6 ? 2 : kind == INT5 || halves == 2 ? 4 : 8;
  const __m256i u = weights_of<kind, part, k>(p), v = weights_of<kind, part, k>(p + 32);
  for (int t = 0; t < n; t++) {
    const __m256i x = four_bytes(q + size_t(t) * stride + k * 4);
    const __m256i a = _mm256_maddubs_epi16(u, x), b = _mm256_maddubs_epi16(v, x);
    some.a[t] = k % fit ? in_order(_mm256_add_epi16(some.a[t], a)) : a;
    some.b[t] = k % fit ? in_order(_mm256_add_epi16(some.b[t], b)) : b;
  }
  if (k % fit != fit - 1) return;
  const __m256i factor = _mm256_set1_epi16(part == UPPER ? 16 : 1);
  for (int t = 0; t < n; t++) {
    Sums& to = sums[k / 4 % halves][t];
    to.a = _mm256_add_epi32(to.a, _mm256_madd_epi16(some.a[t], factor));
    to.b = _mm256_add_epi32(to.b, _mm256_madd_epi16(some.b[t], factor));
  }
}

template <int kind, int part, int halves, int n>
INLINE void add_part(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  ShortSums<n> some;
  add_short<kind, part, halves, n, 0>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 1>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 2>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 3>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 4>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 5>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 6>(p, q, stride, some, sums);
  add_short<kind, part, halves, n, 7>(p, q, stride, some, sums);
}

#endif

template <int kind, int halves, int n>
INLINE void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  for (int h = 0; h < halves; h++)
    for (int t = 0; t < n; t++) sums[h][t] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#if defined(FORETOKEN_AVXVNNI)
  add_products<kind, halves, n, 0>(p, q, stride, sums);
  add_products<kind, halves, n, 1>(p, q, stride, sums);
  add_products<kind, halves, n, 2>(p, q, stride, sums);
  add_products<kind, halves, n, 3>(p, q, stride, sums);
  add_products<kind, halves, n, 4>(p, q, stride, sums);
  add_products<kind, halves, n, 5>(p, q, stride, sums);
  add_products<kind, halves, n, 6>(p, q, stride, sums);
  add_products<kind, halves, n, 7>(p, q, stride, sums);
#else
  if (kind == INT8 || kind == CODE4) {
    add_part<kind, LOWER, halves, n>(p, q, stride, sums);
    add_part<kind, UPPER, halves, n>(p, q, stride, sums);
  } else {
    add_part<kind, ALL, halves, n>(p, q, stride, sums);
  }
#endif
}
