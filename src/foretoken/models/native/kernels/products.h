// Products of states with weights in panels of 16 outputs.
#pragma once

// Bytes of 16 factors, scales or offsets
INLINE size_t factor_bytes(int form) { return form & WIDE ? 64 : 32; }
INLINE size_t block_bytes(int kind, int form) {
  const int factors = (form & OFFSETS ? 2 : 1) * (form & HALVES ? 2 : 1);
  return factors * factor_bytes(form) + (kind == INT8 ? 512 : 256);
}
INLINE size_t panel_bytes(const Weight& w) {
  if (w.kind == FLOAT32) return size_t(w.inputs) * LANES * 4;
  if (w.kind == BFLOAT16) return size_t(w.inputs) * LANES * 2;
  return size_t(w.inputs + BLOCK_OF_WEIGHTS - 1) / BLOCK_OF_WEIGHTS * block_bytes(w.kind, w.form);
}
INLINE bool rounded(const Weight& w) { return w.kind >= INT8; }

// What was added to a weight where it is stored
INLINE int zero_of(int kind, int form) {
  return form & OFFSETS ? 0 : kind == INT8 ? 128 : 8;
}
INLINE F factors(const uint8_t* p, int form) {
  return form & WIDE ? load((const float*)p) : from_half((const uint16_t*)p);
}

#if defined(FORETOKEN_AVX512)
#include "products_avx512.h"
#elif defined(FORETOKEN_AVX2)
#include "products_avx2.h"
#else
#include "products_portable.h"
#endif

// Weights that are numbers: `panels` side by side, so that chains of sums do not wait for each other
template <int kind, int n, int panels>
static __attribute__((noinline)) void float_panels(const uint8_t* p, size_t bytes, int K, const States& a, int token,
                                F* out) {
  F y[panels][n];
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < n; t++) y[g][t] = all(0.0f);
  const float* x = a.x + size_t(token) * a.stride;
  for (int k = 0; k < K; k++) {
    F w[panels];
    for (int g = 0; g < panels; g++) {
      if (kind == FLOAT32) {
        const float* from = (const float*)(p + g * bytes) + size_t(k) * LANES;
        prefetch(from + 20 * LANES);
        w[g] = load(from);
      } else {
        const uint16_t* from = (const uint16_t*)(p + g * bytes) + size_t(k) * LANES;
        prefetch(from + 40 * LANES);
        w[g] = from_bfloat16(from);
      }
    }
    for (int t = 0; t < n; t++) {
      const F each = all(x[size_t(t) * a.stride + k]);
      for (int g = 0; g < panels; g++) y[g][t] = fma(w[g], each, y[g][t]);
    }
  }
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < n; t++) out[g * n + t] = y[g][t];
}

// The integer sums of a block become numbers: in halves or as one
template <int halves, int n>
INLINE void add_block(const uint8_t* p, int form, int zero, const States& a, size_t at,
                             int blocks, const Sums (*sums)[n], F* y) {
  const size_t size = factor_bytes(form);
  for (int h = 0; h < halves; h++) {
    const F d = factors(p + h * size, form);
    for (int t = 0; t < n; t++) {
      const size_t block = at + size_t(t) * blocks;
      const int32_t z = halves == 2 ? a.z[2 * block + h] : a.z[2 * block] + a.z[2 * block + 1];
      y[t] = fma(numbers(less(sums[h][t], zero * z)), mul(d, all(a.d[block])), y[t]);
    }
    if (form & OFFSETS) {
      const F m = factors(p + (halves + h) * size, form);
      for (int t = 0; t < n; t++) {
        const size_t block = at + size_t(t) * blocks;
        const float s =
            halves == 2 ? a.d[block] * float(a.z[2 * block + h]) : a.s[block];
        y[t] = fma(m, all(s), y[t]);
      }
    }
  }
}

// A panel times n tokens
template <int kind, int halves, int n>
static __attribute__((noinline)) void integer_panel(const uint8_t* p, const Weight& w, const States& a, int token,
                                 F* out) {
  F y[n];
  for (int t = 0; t < n; t++) y[t] = all(0.0f);
  const int blocks = (w.inputs + BLOCK_OF_WEIGHTS - 1) / BLOCK_OF_WEIGHTS, form = w.form;
  const int zero = zero_of(kind, form), bytes = int(block_bytes(kind, form));
  const int8_t* q = a.q + size_t(token) * a.stride;
  for (int b = 0; b < blocks; b++, p += bytes) {
    for (int ahead = 0; ahead < bytes; ahead += 64) prefetch(p + 1344 + ahead);
    Sums sums[halves][n];
    block_sums<kind, halves, n>(p + bytes - (kind == INT8 ? 512 : 256), q + b * BLOCK_OF_WEIGHTS,
                                a.stride, sums);
    add_block<halves, n>(p, form, zero, a, size_t(token) * blocks + b, blocks, sums, y);
  }
  for (int t = 0; t < n; t++) out[t] = y[t];
}

template <int kind, int n>
INLINE void tile(const uint8_t* p, const Weight& w, const States& a, int token, F* out) {
  if constexpr (kind < INT8)
    float_panels<kind, n, 1>(p, 0, w.inputs, a, token, out);
  else if (w.form & HALVES)
    integer_panel<kind, 2, n>(p, w, a, token, out);
  else
    integer_panel<kind, 1, n>(p, w, a, token, out);
}

template <int kind, int n>
INLINE void tile_of(int count, const uint8_t* p, const Weight& w, const States& a, int token,
                           F* out) {
  if constexpr (n > 1)
    if (count < n) return tile_of<kind, n - 1>(count, p, w, a, token, out);
  tile<kind, n>(p, w, a, token, out);
}

template <int kind, class Done>
static void panels_of(const Weight& w, const States& a, int tokens, int first, int last,
                      const Done& done) {
  const size_t bytes = panel_bytes(w);
  F y[2 * TILE];
  int g = first;
  if constexpr (kind < INT8)
    for (; tokens == 1 && g + 4 <= last; g += 4) {
      float_panels<kind, 1, 4>(w.panels + g * bytes, bytes, w.inputs, a, 0, y);
      for (int i = 0; i < 4; i++) done(g + i, 0, y[i]);
    }
  for (; g < last; g++)
    for (int t = 0; t < tokens; t += TILE) {
      const int n = tokens - t < TILE ? tokens - t : TILE;
      tile_of<kind, TILE>(n, w.panels + g * bytes, w, a, t, y);
      for (int i = 0; i < n; i++) done(g, t + i, y[i]);
    }
}

// Panels `first` up to `last` of w times all tokens of `a`: done(panel, token, 16 outputs, bias included)
template <class Done>
static void product(const Weight& w, const States& a, int tokens, int first, int last,
                    const Done& done) {
  const auto biased = [&](int g, int t, F y) {
    done(g, t, w.bias ? add(y, load(w.bias + g * LANES)) : y);
  };
  switch (w.kind) {
    case FLOAT32: return panels_of<FLOAT32>(w, a, tokens, first, last, biased);
    case BFLOAT16: return panels_of<BFLOAT16>(w, a, tokens, first, last, biased);
    case INT8: return panels_of<INT8>(w, a, tokens, first, last, biased);
    default: return panels_of<INT4>(w, a, tokens, first, last, biased);
  }
}

// Row `output` of w as numbers
static void unpack_row(const Weight& w, int output, float* y) {
  const uint8_t* p = w.panels + size_t(output / LANES) * panel_bytes(w);
  const int lane = output % LANES;
  for (int k = 0; k < w.inputs; k++) {
    if (w.kind == FLOAT32) {
      y[k] = ((const float*)p)[size_t(k) * LANES + lane];
    } else if (w.kind == BFLOAT16) {
      const uint32_t bits = uint32_t(((const uint16_t*)p)[size_t(k) * LANES + lane]) << 16;
      memcpy(y + k, &bits, 4);
    } else {
      const size_t bytes = block_bytes(w.kind, w.form), size = factor_bytes(w.form);
      const uint8_t* block = p + size_t(k / BLOCK_OF_WEIGHTS) * bytes;
      const uint8_t* q = block + bytes - (w.kind == INT8 ? 512 : 256);
      const int i = k % BLOCK_OF_WEIGHTS, halves = w.form & HALVES ? 2 : 1, h = halves == 2 ? i / 16 : 0;
      const int j = w.kind == INT8 ? i : i % 16, byte = q[j / 4 * 64 + lane * 4 + j % 4];
      const int whole = w.kind == INT8 ? byte : i < 16 ? byte & 15 : byte >> 4;
      float d[LANES], m[LANES] = {};
      store(d, factors(block + h * size, w.form));
      if (w.form & OFFSETS) store(m, factors(block + (halves + h) * size, w.form));
      y[k] = fmaf(d[lane], float(whole - zero_of(w.kind, w.form)), m[lane]);
    }
  }
}
