// Integer sums by AVX-512 VNNI: four bytes a lane, sixteen outputs an instruction.
#pragma once

enum { TILE = 8 };  // tokens whose sums the registers hold

typedef __m512i Sums;  // of 16 outputs

INLINE Sums less(Sums x, int32_t y) { return _mm512_sub_epi32(x, _mm512_set1_epi32(y)); }
INLINE F numbers(Sums x) { return _mm512_cvtepi32_ps(x); }

template <int kind, int halves, int n>
INLINE void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int h = 0; h < halves; h++)
    for (int t = 0; t < n; t++) sums[h][t] = _mm512_setzero_si512();
  for (int c = 0; c < (kind == INT8 ? 8 : 4); c++, p += 64) {
    const __m512i bytes = _mm512_loadu_si512(p);
    if (kind == INT8) {
      Sums* to = sums[halves == 2 ? c / 4 : 0];
      for (int t = 0; t < n; t++) {
        const int32_t* x = (const int32_t*)(q + size_t(t) * stride) + c;
        to[t] = _mm512_dpbusd_epi32(to[t], bytes, _mm512_set1_epi32(*x));
      }
    } else {
      const __m512i first = _mm512_and_si512(bytes, low);
      const __m512i second = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
      for (int t = 0; t < n; t++) {
        const int32_t* x = (const int32_t*)(q + size_t(t) * stride) + c;
        sums[0][t] = _mm512_dpbusd_epi32(sums[0][t], first, _mm512_set1_epi32(x[0]));
        Sums& other = sums[halves - 1][t];
        other = _mm512_dpbusd_epi32(other, second, _mm512_set1_epi32(x[4]));
      }
    }
  }
}
