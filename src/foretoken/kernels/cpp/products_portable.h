// Integer sums by plain loops.
#pragma once

struct Sums {  // of 16 outputs
  int32_t lane[LANES];
};

INLINE Sums integers(int32_t x, int times) {
  Sums y;
  for (int i = 0; i < LANES; i++) y.lane[i] = x * times;
  return y;
}
INLINE F numbers(Sums x) {
  F y;
  for (int i = 0; i < LANES; i++) y.lane[i] = float(x.lane[i]);
  return y;
}

template <int kind, int halves, int n>
INLINE void add_products(const uint8_t* p, const Rounded* x, Sums (*sums)[n]) {
  for (int t = 0; t < n; t++)
    for (int k = 0; k < BLOCK_OF_WEIGHTS; k++)
      for (int i = 0; i < LANES; i++)
        sums[halves == 2 ? k / 16 : 0][t].lane[i] += stored(kind, p, i, k) * x[t].q[k];
}
