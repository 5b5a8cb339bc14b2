// What each instruction set gives: compiled once for each, chosen when the library is loaded.
#pragma once
#include <stddef.h>

#include "network.h"
#include "team.h"

struct Kernels {
  void* (*workspace)(const Network& net);  // null: no memory
  void (*release)(void* workspace);
  bool (*run)(const Network& net, const Pass& pass, void* workspace);  // false: no memory, or no threads
  bool (*chain)(const Network& net, Pass pass, const Chain& chain, void* workspace);  // as run
  void (*settle)(const Network& net, float* row, int length);  // a row's states, which has so many tokens
  bool (*softmax)(const Softmax& softmax);  // false: no memory, or no threads
  void (*draw)(const Draws& draws);
  bool (*verify)(const Verification& verification);  // false: a draft token is none of the V
  // a product by itself; false: no memory
  bool (*product)(const Weight& w, const float* x, int tokens, float* y);
  bool (*join)(const Pairs& pairs);  // as product
  // pieces, for tests: rounding of `tokens` states, a row of a weight, a norm, an activation
  void (*round)(const float* x, int tokens, int n, int8_t* q, float* d, float* s, int32_t* z);
  void (*unpack)(const Weight& w, int output, float* y);
  void (*normalize)(const Norm& norm, const float* x, int n, float* y);
  void (*activate)(int activation, const float* curve, const float* x, int n, float* y);
  // for conversions: `blocks` of 32 weights in four bits
  void (*round_weights)(const float* w, int64_t blocks, int8_t* q, float* scales);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avxvnni_kernels, avx512_kernels;
#endif
