// The C interface, called by ../library.py. Arguments are not checked here.
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels.h"

#define EXPORTED __attribute__((visibility("default")))

namespace {

#if defined(__x86_64__)
// Whether the processor has these features, and the system saves the registers `kept` at context switches.
// __builtin_cpu_supports is not used: in a library that Zig links it reports no features.
bool supports(unsigned of_leaf_1, unsigned ebx_of_leaf_7, unsigned ecx_of_leaf_7, unsigned kept) {
  unsigned a, b, c, d, low, high;
  of_leaf_1 |= bit_OSXSAVE;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & of_leaf_1) != of_leaf_1) return false;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kept) == kept && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
         (b & ebx_of_leaf_7) == ebx_of_leaf_7 && (c & ecx_of_leaf_7) == ecx_of_leaf_7;
}
#endif

// The processor's instruction sets, queried once: in a virtual machine a query takes microseconds
struct Processor {
  bool avx2 = false, avxvnni = false, avx512 = false;
  Processor() {
#if defined(__x86_64__)
    const unsigned basic = bit_AVX | bit_FMA | bit_F16C;
    const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    avx2 = supports(basic, bit_AVX2, 0, 0x06);
    avxvnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bit_AVXVNNI);
    avx512 = avx2 && supports(basic, wide, bit_AVX512VNNI, 0xe6);
#endif
  }
};
const Processor processor;

const Kernels* kernels_named(const char* name) {
#if defined(__x86_64__)
  if (processor.avx512 && !strcmp(name, "avx512")) return &avx512_kernels;
  if (processor.avxvnni && !strcmp(name, "avxvnni")) return &avxvnni_kernels;
  if (processor.avx2 && !strcmp(name, "avx2")) return &avx2_kernels;
#endif
  return strcmp(name, "portable") ? nullptr : &portable_kernels;
}

struct Running {
  const Kernels* kernels;
  Network net;
  void* workspace;
};

}  // namespace

extern "C" {

// The digest of the sources and compiler flags (build.py)
EXPORTED const char* foretoken_digest() { return FORETOKEN_DIGEST; }

// Whether this processor supports an instruction set
EXPORTED int foretoken_has(const char* name) { return kernels_named(name) != nullptr; }

// Open a network on an instruction set; null: not enough memory
EXPORTED void* foretoken_open(const char* name, const Network* net) {
  const Kernels* kernels = kernels_named(name);
  Running* r = (Running*)malloc(sizeof(Running));
  if (!r) return nullptr;
  *r = {kernels, *net, kernels->workspace(*net)};
  if (r->workspace) return r;
  free(r);
  return nullptr;
}

EXPORTED void foretoken_close(void* network) {
  Running* r = (Running*)network;
  r->kernels->release(r->workspace);
  free(r);
}

// 0: not enough memory or threads
EXPORTED int foretoken_run(void* network, const Pass* pass) {
  Running* r = (Running*)network;
  return r->kernels->run(r->net, *pass, r->workspace);
}

EXPORTED int foretoken_chain(void* network, const Pass* pass, const Chain* chain) {
  Running* r = (Running*)network;
  return r->kernels->chain(r->net, *pass, *chain, r->workspace);
}

// Advance a sequence's recurrent states, at `row`, to its last token
EXPORTED void foretoken_settle(void* network, float* row, int length) {
  Running* r = (Running*)network;
  r->kernels->settle(r->net, row, length);
}

// 0: not enough memory or threads
EXPORTED int foretoken_softmax(const char* name, const Softmax* softmax) {
  return kernels_named(name)->softmax(*softmax);
}
EXPORTED void foretoken_draw(const char* name, const Draws* draws) { kernels_named(name)->draw(*draws); }
// 0: a draft token is outside the vocabulary
EXPORTED int foretoken_verify(const char* name, const Verification* verification) {
  return kernels_named(name)->verify(*verification);
}

EXPORTED void foretoken_round(const char* name, const float* x, int tokens, int n, int8_t* q, float* d,
                     float* s, int32_t* z) {
  kernels_named(name)->round(x, tokens, n, q, d, s, z);
}
// 0: not enough memory or threads
EXPORTED int foretoken_product(const char* name, const Weight* w, const float* x, int tokens, int threads, float* y) {
  return kernels_named(name)->product(*w, x, tokens, threads, y);
}
EXPORTED int foretoken_join(const char* name, const Pairs* pairs) { return kernels_named(name)->join(*pairs); }
EXPORTED void foretoken_unpack(const char* name, const Weight* w, int output, float* y) {
  kernels_named(name)->unpack(*w, output, y);
}
EXPORTED void foretoken_normalize(const char* name, const Norm* norm, const float* x, int n, float* y) {
  kernels_named(name)->normalize(*norm, x, n, y);
}
EXPORTED void foretoken_activate(const char* name, int activation, const float* curve, const float* x, int n,
                                 float* y) {
  kernels_named(name)->activate(activation, curve, x, n, y);
}
EXPORTED void foretoken_round_weights(const char* name, const float* w, int64_t blocks, int8_t* q,
                                      float* scales) {
  kernels_named(name)->round_weights(w, blocks, q, scales);
}
}
