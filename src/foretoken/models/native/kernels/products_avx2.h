// Integer sums by AVX2, eight outputs at a time. `maddubs` adds pairs of products in 16 bits: eight of four bits
// fit (8 x 2 x 15 x 127 < 32,768), so eight bits are two halves of four. AVX-VNNI has a product of bytes.
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

// The low or the high four bits of 32 bytes
template <bool high>
INLINE __m256i nibbles(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return _mm256_and_si256(high ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}
INLINE __m256i four_bytes(const int8_t* q) { return _mm256_set1_epi32(*(const int32_t*)q); }

#if !defined(FORETOKEN_AVXVNNI)

// Compilers would multiply first and add in a tree, for which there are not enough registers
INLINE __m256i in_order(__m256i x) {
  asm("" : "+x"(x));
  return x;
}

// The products of `chunks` runs of four weights, the low or the high four bits of their bytes, and numbers of n tokens
template <bool high, int n>
INLINE void add_products(const uint8_t* p, const int8_t* q, int stride, int chunks, __m256i* a, __m256i* b) {
  for (int c = 0; c < chunks; c++, p += 64, q += 4) {
    const __m256i u = nibbles<high>(p), v = nibbles<high>(p + 32);
    for (int t = 0; t < n; t++) {
      const __m256i x = four_bytes(q + size_t(t) * stride);
      a[t] = in_order(_mm256_add_epi16(a[t], _mm256_maddubs_epi16(u, x)));
      b[t] = in_order(_mm256_add_epi16(b[t], _mm256_maddubs_epi16(v, x)));
    }
  }
}

// Widened, times `factor`
INLINE Sums widened(__m256i a, __m256i b, int factor) {
  const __m256i all = _mm256_set1_epi16(int16_t(factor));
  return {_mm256_madd_epi16(a, all), _mm256_madd_epi16(b, all)};
}

template <int kind, int halves, int n>
INLINE void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  const int chunks = kind == INT8 ? 8 / halves : 4;
  for (int h = 0; h < halves; h++) {
    __m256i a[n], b[n];
    for (int t = 0; t < n; t++) a[t] = b[t] = _mm256_setzero_si256();
    if (kind == INT8) {
      const uint8_t* from = p + h * 256;
      add_products<false, n>(from, q + h * 16, stride, chunks, a, b);
      for (int t = 0; t < n; t++) sums[h][t] = widened(a[t], b[t], 1), a[t] = b[t] = _mm256_setzero_si256();
      add_products<true, n>(from, q + h * 16, stride, chunks, a, b);
      for (int t = 0; t < n; t++) {
        const Sums more = widened(a[t], b[t], 16);
        sums[h][t] = {_mm256_add_epi32(sums[h][t].a, more.a), _mm256_add_epi32(sums[h][t].b, more.b)};
      }
      continue;
    }
    if (h == 0) add_products<false, n>(p, q, stride, chunks, a, b);
    if (h == halves - 1) add_products<true, n>(p, q + 16, stride, chunks, a, b);
    for (int t = 0; t < n; t++) sums[h][t] = widened(a[t], b[t], 1);
  }
}

#else  // bytes are multiplied and added in 32 bits at once

template <int bits, bool high, int n>
INLINE void add_products(const uint8_t* p, const int8_t* q, int stride, int chunks, Sums* sums) {
  for (int c = 0; c < chunks; c++, p += 64, q += 4) {
    const __m256i u = bits == 8 ? _mm256_loadu_si256((const __m256i*)p) : nibbles<high>(p);
    const __m256i v = bits == 8 ? _mm256_loadu_si256((const __m256i*)(p + 32)) : nibbles<high>(p + 32);
    for (int t = 0; t < n; t++) {
      const __m256i x = four_bytes(q + size_t(t) * stride);
      sums[t].a = _mm256_dpbusd_avx_epi32(sums[t].a, u, x);
      sums[t].b = _mm256_dpbusd_avx_epi32(sums[t].b, v, x);
    }
  }
}

template <int kind, int halves, int n>
INLINE void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  for (int h = 0; h < halves; h++) {
    for (int t = 0; t < n; t++) sums[h][t] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if (kind == INT8) {
      add_products<8, false, n>(p + h * 256, q + h * 16, stride, 8 / halves, sums[h]);
      continue;
    }
    if (h == 0) add_products<4, false, n>(p, q, stride, 4, sums[h]);
    if (h == halves - 1) add_products<4, true, n>(p, q + 16, stride, 4, sums[h]);
  }
}

#endif
