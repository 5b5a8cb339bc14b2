// The C interface, called by ../library.py, which has checked every number before.
#include <string.h>

#include "kernels.h"

#define EXPORTED __attribute__((visibility("default")))

namespace {

const Kernels* kernels_named(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (avx512 && !strcmp(name, "avx512")) return &avx512_kernels;
  if (avx2 && __builtin_cpu_supports("avxvnni") && !strcmp(name, "avxvnni")) return &avxvnni_kernels;
  if (avx2 && !strcmp(name, "avx2")) return &avx2_kernels;
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

// A digest of the sources that this was compiled from
EXPORTED const char* foretoken_digest() { return FORETOKEN_DIGEST; }

// Whether this processor has an instruction set
EXPORTED int foretoken_has(const char* name) { return kernels_named(name) != nullptr; }

// A network on an instruction set; null where memory does not suffice
EXPORTED void* foretoken_open(const char* name, const Network* net) {
  const Kernels* kernels = kernels_named(name);
  void* workspace = kernels->workspace(*net);
  return workspace ? new Running{kernels, *net, workspace} : nullptr;
}

EXPORTED void foretoken_close(void* network) {
  Running* r = (Running*)network;
  r->kernels->release(r->workspace);
  delete r;
}

// 0 where memory does not suffice
EXPORTED int foretoken_run(void* network, const Pass* pass) {
  Running* r = (Running*)network;
  return r->kernels->run(r->net, *pass, r->workspace);
}

EXPORTED void foretoken_round(const char* name, const float* x, int tokens, int n, int8_t* q, float* d,
                     float* s, int32_t* z) {
  kernels_named(name)->round(x, tokens, n, q, d, s, z);
}
EXPORTED void foretoken_product(const char* name, const Weight* w, const float* x, int tokens, float* y) {
  kernels_named(name)->product(*w, x, tokens, y);
}
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
