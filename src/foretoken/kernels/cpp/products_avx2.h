// Integer sums by AVX2, eight outputs at a time. `maddubs` adds pairs of products in 16 bits. Eight results fit for
// weights of four bits (8 x 2 x 15 x 127 < 32,768), four for five bits and FP4, two for six bits; eight bits are
// treated as two halves of four. AVX-VNNI multiplies bytes and adds in 32 bits.
#pragma once

struct Sums {  // of 16 outputs
  __m256i a, b;
};

INLINE Sums integers(int32_t x, int times) {
  const __m256i y = _mm256_mullo_epi32(_mm256_set1_epi32(x), _mm256_set1_epi32(times));
  return {y, y};
}
INLINE F numbers(Sums x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

enum Part { ALL, LOWER, UPPER };  // bits of a weight: all, or the lower or upper four of eight

// Load weights 4 k to 4 k + 3 of eight outputs of the block at p
template <int kind, int part, int k>
INLINE __m256i weights_of(const uint8_t* p) {
  const __m256i low = _mm256_set1_epi8(15);
  constexpr int j = k % 4, shift = kind == INT5 ? j : j % 2 * 2;
  __m256i x = _mm256_loadu_si256((const __m256i*)(p + (kind == INT8 ? k : j) * 64));
  if (kind != INT8) x = _mm256_and_si256(k < 4 ? x : _mm256_srli_epi16(x, 4), low);
  if (coded(kind)) {
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)codes_of(kind)));
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
INLINE void add_four(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  const __m256i u = weights_of<kind, ALL, k>(p), v = weights_of<kind, ALL, k>(p + 32);
  Sums* to = sums[k / 4 % halves];
  for (int t = 0; t < n; t++) {
    const __m256i four = four_bytes(x[t].q + k * 4);
    to[t].a = _mm256_dpbusd_avx_epi32(to[t].a, u, four);
    to[t].b = _mm256_dpbusd_avx_epi32(to[t].b, v, four);
  }
}

template <int kind, int halves, int n, int k = 0>
INLINE void add_products(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  add_four<kind, halves, n, k>(p, x, sums);
  if constexpr (k < 7) add_products<kind, halves, n, k + 1>(p, x, sums);
}

#else

// Keeps the order of additions: compilers would multiply first and then add in a tree, and run out of registers
INLINE __m256i in_order(__m256i x) {
  asm("" : "+x"(x));
  return x;
}

// Add the products of weights 4 k to 4 k + 3 in 16 bits; before these overflow, add them to the sums in 32 bits
template <int kind, int part, int halves, int n, int k>
INLINE void add_four(const uint8_t* p, const Rounded* x, Sums* some, Sums (*sums)[n]) {
  constexpr int fit = kind == INT6 ? 2 : kind == INT5 || kind == FP4 || halves == 2 ? 4 : 8;
  const __m256i u = weights_of<kind, part, k>(p), v = weights_of<kind, part, k>(p + 32);
  for (int t = 0; t < n; t++) {
    const __m256i four = four_bytes(x[t].q + k * 4);
    const __m256i a = _mm256_maddubs_epi16(u, four), b = _mm256_maddubs_epi16(v, four);
    some[t].a = k % fit ? in_order(_mm256_add_epi16(some[t].a, a)) : a;
    some[t].b = k % fit ? in_order(_mm256_add_epi16(some[t].b, b)) : b;
  }
  if (k % fit != fit - 1) return;
  const __m256i factor = _mm256_set1_epi16(part == UPPER ? 16 : 1);
  for (int t = 0; t < n; t++) {
    Sums& to = sums[k / 4 % halves][t];
    to.a = _mm256_add_epi32(to.a, _mm256_madd_epi16(some[t].a, factor));
    to.b = _mm256_add_epi32(to.b, _mm256_madd_epi16(some[t].b, factor));
  }
}

template <int kind, int part, int halves, int n, int k = 0>
INLINE void add_part(const uint8_t* p, const Rounded* x, Sums* some, Sums (*sums)[n]) {
  add_four<kind, part, halves, n, k>(p, x, some, sums);
  if constexpr (k < 7) add_part<kind, part, halves, n, k + 1>(p, x, some, sums);
}

template <int kind, int halves, int n>
INLINE void add_products(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  Sums some[n];  // in 16 bits
  if (kind == INT8 || kind == CODE4) {
    add_part<kind, LOWER, halves, n>(p, x, some, sums);
    add_part<kind, UPPER, halves, n>(p, x, some, sums);
  } else {
    add_part<kind, ALL, halves, n>(p, x, some, sums);
  }
}

#endif
