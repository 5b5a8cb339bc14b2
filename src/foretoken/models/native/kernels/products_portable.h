// Integer sums by plain loops.
#pragma once

enum { TILE = 4 };

struct Sums {  // of 16 outputs
  int32_t lane[LANES];
};

INLINE Sums less(Sums x, int32_t y) {
  for (int i = 0; i < LANES; i++) x.lane[i] -= y;
  return x;
}
INLINE F numbers(Sums x) {
  F y;
  for (int i = 0; i < LANES; i++) y.lane[i] = float(x.lane[i]);
  return y;
}

template <int kind, int halves, int n>
INLINE void block_sums(const uint8_t* p, const int8_t* q, int stride, Sums (*sums)[n]) {
  for (int t = 0; t < n; t++) {
    const int8_t* x = q + size_t(t) * stride;
    for (int h = 0; h < halves; h++) sums[h][t] = Sums();
    for (int k = 0; k < (kind == INT8 ? 32 : 16); k++)
      for (int i = 0; i < LANES; i++) {
        const int byte = p[k / 4 * 64 + i * 4 + k % 4];
        if (kind == INT8) {
          sums[halves == 2 ? k / 16 : 0][t].lane[i] += byte * x[k];
        } else {
          sums[0][t].lane[i] += (byte & 15) * x[k];
          sums[halves - 1][t].lane[i] += (byte >> 4) * x[k + 16];
        }
      }
  }
}
