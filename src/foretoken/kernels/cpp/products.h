// Products of states [tokens, inputs] with weights in panels of 16 outputs.
#pragma once

// Prefetch weights; past the caches if one tile of tokens uses them only once
INLINE void prefetch_weights(const States& a, const void* p) {
  if (a.tokens <= TILE)
    prefetch_once(p);
  else
    prefetch(p);
}
// AHEAD: distance of the prefetch in bytes; about what a core loads during the latency of memory
enum { BLOCKS_OF_SUPER = 8, AHEAD = 4096 };

// Bytes of 16 scales or offsets; of the integers of a block; of a block; of the head of a super-block
INLINE int factor_bytes(int form) { return form & SUPER ? 16 : form & WIDE ? 64 : 32; }
static constexpr int integer_bytes(int kind) {
  return kind == INT8 ? 512 : kind == INT6 ? 384 : kind == INT5 ? 320 : 256;
}
INLINE int block_bytes(int kind, int form) {
  return (form & OFFSETS ? 2 : 1) * (form & HALVES ? 2 : 1) * factor_bytes(form) + integer_bytes(kind);
}
INLINE int super_bytes(int form) { return form & SUPER ? (form & OFFSETS ? 64 : 32) : 0; }
// Whether w, or one of its parts, is quantized: a product with it needs quantized states
INLINE bool rounded(const Weight& w) {
  for (const Weight* part = &w; part; part = part->rest)
    if (part->kind >= INT8) return true;
  return false;
}
INLINE size_t panel_bytes(const Weight& w) {
  if (w.kind < INT8) return size_t(w.inputs) * LANES * (w.kind == FLOAT32 ? 4 : 2);
  const size_t blocks = (w.inputs + BLOCK_OF_WEIGHTS - 1) / BLOCK_OF_WEIGHTS;
  return blocks * block_bytes(w.kind, w.form) +
         (blocks + BLOCKS_OF_SUPER - 1) / BLOCKS_OF_SUPER * super_bytes(w.form);
}

// The integers of the codes of IQ4_NL and IQ4_XS, and of MXFP4, plus zero_of()
static const uint8_t CODES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                  129, 141, 153, 166, 181, 197, 217, 241};
static const uint8_t FLOATS[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
static constexpr bool coded(int kind) { return kind == CODE4 || kind == FP4; }
INLINE const uint8_t* codes_of(int kind) { return kind == FP4 ? FLOATS : CODES; }

// The number that was added to make stored integers unsigned
static constexpr int zero_of(int kind, int form) {
  return form & OFFSETS ? 0 : kind == INT6 ? 32 : kind == INT5 || kind == FP4 ? 16 : kind == INT4 ? 8 : 128;
}
// Load 16 scales or offsets; `super`: the factors of their super-block
INLINE F factors(const uint8_t* p, int form, F super) {
  if (form & SUPER) return mul(from_bytes((const int8_t*)p), super);
  return form & WIDE ? load((const float*)p) : from_half((const uint16_t*)p);
}
// The stored integer of weight k of a block, for output `lane`
INLINE int stored(int kind, const uint8_t* p, int lane, int k) {
  const int at = k % 16 / 4 * 64 + lane * 4 + k % 4, c = k / 4;
  if (kind == INT8) return p[at + k / 16 * 256];
  const int low = k < 16 ? p[at] & 15 : p[at] >> 4;
  if (kind == INT5) return low | (p[256 + at % 64] >> c & 1) << 4;
  if (kind == INT6)
    return low | (p[256 + c % 4 / 2 * 64 + at % 64] >> (c % 2 * 2 + c / 4 * 4) & 3) << 4;
  return coded(kind) ? codes_of(kind)[low] : low;
}

#if defined(FORETOKEN_AVX512)
#include "products_avx512.h"
#elif defined(FORETOKEN_AVX2)
#include "products_avx2.h"
#else
#include "products_portable.h"
#endif

// Products with float weights. Several panels at a time, so that independent fma chains overlap
template <int kind, int n, int panels>
INLINE void float_panels(const uint8_t* p, size_t bytes, int K, const States& a, int token,
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
        prefetch_weights(a, from + 20 * LANES);
        w[g] = load(from);
      } else {
        const uint16_t* from = (const uint16_t*)(p + g * bytes) + size_t(k) * LANES;
        prefetch_weights(a, from + 40 * LANES);
        w[g] = kind == FLOAT16 ? from_half(from) : from_bfloat16(from);
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

struct Super {  // float16 factors of a super-block's scales and offsets
  F scale, offset;
};

// Start the integer sums of a block, at -zero * sum(q): stored weights include the zero. With offsets the zero is 0
template <int kind, bool offsets, int halves, int n>
INLINE void begin_sums(const Rounded* x, Sums (*sums)[n]) {
  constexpr int eighths = zero_of(kind, 0) / 8;
  for (int h = 0; h < halves; h++)
    for (int t = 0; t < n; t++)
      if (offsets)
        sums[h][t] = integers(0, 1);
      else
        sums[h][t] = integers(halves == 1 ? x[t].sum : h ? x[t].second : x[t].sum - x[t].second, eighths);
}

// Add the integer sums of a block, or of each of its halves, times scales, to y; and the offsets' products
template <bool offsets, int halves, int n>
INLINE void add_block(const uint8_t* p, int form, const Super& super, const Rounded* x,
                      const Sums (*sums)[n], F* y) {
  const int size = factor_bytes(form);
  for (int h = 0; h < halves; h++) {
    const F d = factors(p + h * size, form, super.scale);
    for (int t = 0; t < n; t++) y[t] = fma(numbers(sums[h][t]), mul(d, all(x[t].d)), y[t]);
    if (offsets) {
      const F m = factors(p + (halves + h) * size, form, super.offset);
      for (int t = 0; t < n; t++) {
        const int32_t sum = h ? x[t].second : x[t].sum - x[t].second;
        y[t] = fma(m, all(halves == 2 ? x[t].d * (float(sum) * -0.125f) : x[t].s), y[t]);
      }
    }
  }
}

// The product of a panel with n tokens
template <int kind, bool offsets, int halves, int n>
INLINE void integer_panel(const uint8_t* p, const Weight& w, const States& a, int token,
                                 F* out) {
  F y[n];
  for (int t = 0; t < n; t++) y[t] = all(0.0f);
  const int blocks = (w.inputs + BLOCK_OF_WEIGHTS - 1) / BLOCK_OF_WEIGHTS, form = w.form;
  const int bytes = block_bytes(kind, form);
  const Rounded* x = tile_of(a, token);
  Super super = {all(0.0f), all(0.0f)};
  for (int b = 0; b < blocks; b++, p += bytes, x += n) {
    if (form & SUPER && b % BLOCKS_OF_SUPER == 0) {
      super.scale = from_half((const uint16_t*)p);
      if (offsets) super.offset = from_half((const uint16_t*)p + LANES);
      p += super_bytes(form);
    }
    for (int ahead = 0; ahead < bytes; ahead += 64) prefetch_weights(a, p + AHEAD + ahead);
    Sums sums[halves][n];
    begin_sums<kind, offsets, halves, n>(x, sums);
    add_products<kind, halves, n>(p + bytes - integer_bytes(kind), x, sums);
    add_block<offsets, halves, n>(p, form, super, x, sums, y);
  }
  for (int t = 0; t < n; t++) out[t] = y[t];
}

// Not inlined: compiled once, not for each caller of `product`
template <int kind, int n>
static __attribute__((noinline)) void tile(const uint8_t* p, const Weight& w, const States& a, int token, F* out) {
  if constexpr (kind < INT8)
    float_panels<kind, n, 1>(p, 0, w.inputs, a, token, out);
  else if (w.form & HALVES && w.form & OFFSETS)
    integer_panel<kind, true, 2, n>(p, w, a, token, out);
  else if (w.form & HALVES)
    integer_panel<kind, false, 2, n>(p, w, a, token, out);
  else if (w.form & OFFSETS)
    integer_panel<kind, true, 1, n>(p, w, a, token, out);
  else
    integer_panel<kind, false, 1, n>(p, w, a, token, out);
}

template <int kind, int n>
INLINE void tile_up_to(int count, const uint8_t* p, const Weight& w, const States& a, int token,
                           F* out) {
  if constexpr (n > 1)
    if (count < n) return tile_up_to<kind, n - 1>(count, p, w, a, token, out);
  tile<kind, n>(p, w, a, token, out);
}

template <int kind, class Done>
static void panels_of(const Weight& w, const States& a, int first, int last, const Done& done) {
  const int tokens = a.tokens;
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
      tile_up_to<kind, TILE>(n, w.panels + g * bytes, w, a, t, y);
      for (int i = 0; i < n; i++) done(g, t + i, y[i]);
    }
}

// The product of panels first to last - 1 of w with all tokens of `a`: done(panel, token, 16 outputs including bias)
template <class Done>
static void product(const Weight& w, const States& a, int first, int last, const Done& done) {
  int begin = 0;  // first panel of `part`
  for (const Weight* part = &w; part && begin < last; part = part->rest) {
    const int panels = (part->outputs - (part->rest ? part->rest->outputs : 0)) / LANES;
    const int from = first > begin ? first - begin : 0;
    const int to = last - begin < panels ? last - begin : panels;
    const auto biased = [&](int g, int t, F y) {
      done(begin + g, t, part->bias ? add(y, load(part->bias + g * LANES)) : y);
    };
    switch (part->kind) {
      case FLOAT32: panels_of<FLOAT32>(*part, a, from, to, biased); break;
      case BFLOAT16: panels_of<BFLOAT16>(*part, a, from, to, biased); break;
      case FLOAT16: panels_of<FLOAT16>(*part, a, from, to, biased); break;
      case INT8: panels_of<INT8>(*part, a, from, to, biased); break;
      case INT6: panels_of<INT6>(*part, a, from, to, biased); break;
      case INT5: panels_of<INT5>(*part, a, from, to, biased); break;
      case CODE4: panels_of<CODE4>(*part, a, from, to, biased); break;
      case FP4: panels_of<FP4>(*part, a, from, to, biased); break;
      default: panels_of<INT4>(*part, a, from, to, biased);
    }
    begin += panels;
  }
}

// Write row `output` of w in float32
static void unpack_row(const Weight& w, int output, float* y) {
  const uint8_t* p = w.panels + size_t(output / LANES) * panel_bytes(w);
  const int lane = output % LANES, form = w.form;
  if (w.kind < INT8) {
    for (int k = 0; k < w.inputs; k++) {
      const uint16_t* short_ones = (const uint16_t*)p + size_t(k) * LANES;
      const F x = w.kind == FLOAT32   ? load((const float*)p + size_t(k) * LANES)
                  : w.kind == FLOAT16 ? from_half(short_ones)
                                      : from_bfloat16(short_ones);
      float column[LANES];
      store(column, x);
      y[k] = column[lane];
    }
    return;
  }
  const int bytes = block_bytes(w.kind, form), size = factor_bytes(form), halves = form & HALVES ? 2 : 1;
  Super super = {all(0.0f), all(0.0f)};
  float d[LANES], m[LANES] = {};
  for (int k = 0; k < w.inputs; k++) {
    if (k % (BLOCKS_OF_SUPER * BLOCK_OF_WEIGHTS) == 0 && form & SUPER) {
      super.scale = from_half((const uint16_t*)p);
      if (form & OFFSETS) super.offset = from_half((const uint16_t*)p + LANES);
      p += super_bytes(form);
    }
    const int i = k % BLOCK_OF_WEIGHTS, h = halves == 2 ? i / 16 : 0;
    if (i % 16 == 0) {
      store(d, factors(p + h * size, form, super.scale));
      if (form & OFFSETS) store(m, factors(p + (halves + h) * size, form, super.offset));
    }
    const int whole = stored(w.kind, p + bytes - integer_bytes(w.kind), lane, i);
    y[k] = fmaf(d[lane], float(whole - zero_of(w.kind, form)), m[lane]);
    if (i == BLOCK_OF_WEIGHTS - 1) p += bytes;
  }
}
