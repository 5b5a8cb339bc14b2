// States of a pass: [tokens, numbers] in float32, and quantized for products with quantized weights.
#pragma once

struct Rounded {  // a block of 32 numbers
  int8_t q[BLOCK_OF_WEIGHTS];
  float d, s;           // the scale, and the scale times the sum of q
  int32_t sum, second;  // of q, and of the last 16 q: times -8
};

struct States {
  float* x;          // [tokens, stride], or null
  Rounded* rounded;  // tile by tile of up to TILE tokens, each [stride / 32, tokens of the tile]
  int stride;        // a multiple of 32; the padding of a row is zero
  int tokens;
};

// The blocks of the tile that begins with `token`
INLINE Rounded* tile_of(const States& a, int token) {
  return a.rounded + size_t(token) * (a.stride / BLOCK_OF_WEIGHTS);
}

// Quantize numbers k0 to k1 - 1 of a token; k0 and k1 are multiples of 32
static inline void round_states(const States& a, int token, int k0, int k1) {
  const size_t row = size_t(token) * a.stride;
  const int begin = token / TILE * TILE, left = a.tokens - begin, n = left < TILE ? left : TILE;
  Rounded* to = tile_of(a, begin) + token - begin;
  for (int k = k0; k < k1; k += BLOCK_OF_WEIGHTS) {
    Rounded& block = to[size_t(k) / BLOCK_OF_WEIGHTS * n];
    const F u = load(a.x + row + k), v = load(a.x + row + k + LANES);
    const uint32_t bits = largest_bits(u, v);
    float most, inverse;
    memcpy(&most, &bits, 4);
    inverse = 127.0f / most;
    if (bits >= 0x7f800000 || !(inverse <= 3.40282347e38f)) {
      // non-finite numbers make products NaN; numbers too small to divide by become zero
      block = Rounded();
      block.d = block.s = bits >= 0x7f800000 ? NAN : 0.0f;
      continue;
    }
    int32_t sums[2];
    to_bytes(mul(u, all(inverse)), mul(v, all(inverse)), block.q, sums);
    block.d = most / 127.0f;
    block.s = block.d * float(sums[0] + sums[1]);
    block.sum = -8 * (sums[0] + sums[1]);
    block.second = -8 * sums[1];
  }
}

// Write the norm of n numbers at x to y, which may be x; both are padded with zeros to a multiple of 16
static void normalize(const Norm& norm, const float* x, float* y, int n) {
  F mean = all(0.0f), squares = all(0.0f);
  if (norm.centred) {
    F total = all(0.0f);
    for (int i = 0; i < n; i += LANES) total = add(total, load(x + i));
    mean = all(sum(total) / float(n));
  }
  for (int i = 0; i < n; i += LANES) {
    F v = load(x + i);
    if (norm.centred) v = between(sub(v, mean), all(0.0f), 0, n - i);
    squares = fma(v, v, squares);
  }
  const F inverse = all(1.0f / sqrtf(sum(squares) / float(n) + norm.epsilon));
  for (int i = 0; i < n; i += LANES) {
    F v = load(x + i);
    if (norm.centred) v = between(sub(v, mean), all(0.0f), 0, n - i);
    v = mul(mul(v, inverse), load(norm.weight + i));
    store(y + i, norm.bias ? add(v, load(norm.bias + i)) : v);
  }
}

// Rotate the first `rotated` numbers of a head. turns: [rotated / 2] cosines, then as many sines
static void rotate(float* x, const float* turns, int rotated, bool interleaved) {
  const int half = rotated / 2;
  for (int i = 0; i < half; i++) {
    float *a = interleaved ? x + 2 * i : x + i, *b = interleaved ? a + 1 : x + i + half;
    const float c = turns[i], s = turns[half + i], first = *a, second = *b;
    *a = fmaf(first, c, -(second * s));
    *b = fmaf(second, c, first * s);
  }
}

// Norm a head in place. It is not padded, unlike its weights: the next head's numbers must not change
static void normalize_head(const Norm& norm, float* x, int n) {
  float copy[1024];
  const int whole = (n + LANES - 1) / LANES * LANES;
  memcpy(copy, x, size_t(n) * sizeof(float));
  memset(copy + n, 0, size_t(whole - n) * sizeof(float));
  normalize(norm, copy, copy, n);
  memcpy(x, copy, size_t(n) * sizeof(float));
}
