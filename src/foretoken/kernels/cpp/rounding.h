// Weights rounded to four bits, with the same bits as `round_weights` of ../reference.py.
#pragma once

// x rounded to float16
static inline float as_half(float x) {
  if (fabsf(x) < 0x1p-14f) return (x + 0.75f) - 0.75f;  // a multiple of 2^-24
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = (bits + 0xfff + (bits >> 13 & 1)) & ~uint32_t(0x1fff);
  memcpy(&x, &bits, 4);
  return fabsf(x) < 65536.0f ? x : x > 0 ? INFINITY : x < 0 ? -INFINITY : x;
}

// The sum of 32 numbers, in NumPy's order
static inline float block_sum(const float* x) {
  float r[8];
  for (int i = 0; i < 8; i++) r[i] = ((x[i] + x[i + 8]) + x[i + 16]) + x[i + 24];
  return ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
}

// Round blocks of 32 weights to integers from -8 to 7. Several scales are tried for the integers, and each is then
// fitted to its integers by least squares; the result with the least squared error is taken
static void round_weights(const float* w, int64_t blocks, int8_t* q, float* scales) {
  for (int64_t b = 0; b < blocks; b++, w += BLOCK_OF_WEIGHTS, q += BLOCK_OF_WEIGHTS) {
    float peak = w[0], least_error = 0.0f;
    for (int i = 1; i < BLOCK_OF_WEIGHTS; i++)
      if (fabsf(w[i]) > fabsf(peak)) peak = w[i];
    if (peak == 0.0f) peak = 1.0f;
    for (const float reach : {1.0f, 0.95f, 0.9f, 0.85f, 0.8f}) {
      const float step = -peak * (reach / 8.0f);
      float k[BLOCK_OF_WEIGHTS], product[BLOCK_OF_WEIGHTS], squares = 0.0f;
      for (int i = 0; i < BLOCK_OF_WEIGHTS; i++) {
        const float whole = rintf(w[i] / step), low = whole > -8.0f ? whole : -8.0f;
        k[i] = low < 7.0f ? low : 7.0f;
        product[i] = w[i] * k[i];
      }
      for (int i = 0; i < BLOCK_OF_WEIGHTS; i++) squares += k[i] * k[i];
      const float scale = as_half(block_sum(product) / (squares > 1.0f ? squares : 1.0f));
      for (int i = 0; i < BLOCK_OF_WEIGHTS; i++) {
        const float error = w[i] - scale * k[i];
        product[i] = error * error;
      }
      const float error = block_sum(product);
      if (reach < 1.0f && !(error < least_error)) continue;
      least_error = error;
      scales[b] = scale;
      for (int i = 0; i < BLOCK_OF_WEIGHTS; i++) q[i] = int8_t(k[i]);
    }
  }
}
