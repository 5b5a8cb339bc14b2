// The functions of one instruction set. kernels.cpp is compiled once for each set; callers choose one by name.
#pragma once
#include <stddef.h>

#include "network.h"
#include "team.h"

struct Kernels {
  void* (*workspace)(const Network& net);  // null: not enough memory
  void (*release)(void* workspace);
  bool (*run)(const Network& net, const Pass& pass, void* workspace);  // false: not enough memory or threads
  bool (*chain)(const Network& net, Pass pass, const Chain& chain, void* workspace);  // false: as run
  // advance a sequence's recurrent states, at `row`, to its last token
  void (*settle)(const Network& net, float* row, int length);
  bool (*softmax)(const Softmax& softmax);  // false: not enough memory or threads
  void (*draw)(const Draws& draws);
  bool (*verify)(const Verification& verification);  // false: a draft token is outside the vocabulary
  // x [tokens, inputs] times w: y [tokens, outputs]; false: not enough memory or threads
  bool (*product)(const Weight& w, const float* x, int tokens, int threads, float* y);
  bool (*join)(const Pairs& pairs);  // false: as product
  // for tests: quantization of states, a weight row in float32, a norm, an activation
  void (*round)(const float* x, int tokens, int n, int8_t* q, float* d, float* s, int32_t* z);
  void (*unpack)(const Weight& w, int output, float* y);
  void (*normalize)(const Norm& norm, const float* x, int n, float* y);
  void (*activate)(int activation, const float* curve, const float* x, int n, float* y);
  // for conversions: round blocks of 32 weights to four bits
  void (*round_weights)(const float* w, int64_t blocks, int8_t* q, float* scales);
};

extern const Kernels portable_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels, avxvnni_kernels, avx512_kernels;
#endif
