// All arithmetic, compiled once for each instruction set (../build.py); FORETOKEN_KERNELS is the name of the set's
// function table. Everything is static, and no template of the standard library is used: the linker would merge the
// code of different sets.
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(FORETOKEN_AVX512)
#include "vector_avx512.h"
#elif defined(FORETOKEN_AVX2)
#include "vector_avx2.h"
#else
#include "vector_portable.h"
#endif
// in this order: each uses the ones before it
#include "functions.h"
#include "states.h"
#include "products.h"
#include "attention.h"
#include "rounding.h"
#include "tokens.h"
#include "pass.h"

const size_t ALIGNED = 64;

template <class T>
bool allot(T** to, size_t count) {
  const size_t bytes = (count * sizeof(T) + ALIGNED - 1) / ALIGNED * ALIGNED;
  *to = (T*)aligned_alloc(ALIGNED, bytes);
  if (*to) memset((void*)*to, 0, bytes);
  return *to != nullptr;
}

bool allot_states(States* a, size_t tokens, int n) {
  *a = States();
  a->stride = n;
  *a = view(*a, n, int(tokens));
  const size_t numbers = tokens * a->stride;
  return allot(&a->x, numbers + LANES) && allot(&a->rounded, numbers / BLOCK_OF_WEIGHTS);
}

void free_states(States* a) {
  for (void* each : {(void*)a->x, (void*)a->rounded}) free(each);
}

// The size of a thread's scratch memory, in floats
size_t scratch_of(const Network& net) {
  size_t most = size_t(net.most_tokens) * 2 * LANES + whole_vectors(net.width);
  for (int i = 0; i < net.layers; i++) {
    const Layer& layer = net.layer[i];
    size_t projected = layer.latent.rank ? 0 : size_t(net.most_tokens) * layer.width * LANES;
    const size_t together = size_t(layer.heads) * layer.width;
    projected = together > projected ? together : projected;
    const size_t parts =
        2 * size_t(TOKENS) * (layer.kv_heads ? layer.heads / layer.kv_heads : 0) * part_floats(layer.width);
    most = projected > most ? projected : most;
    const Layer* mixer = recurrent(layer);
    const size_t tile = mixer ? size_t(mixer->recurrence.key_width) * COLUMNS_OF_STATE * LANES : 0;
    most = tile > most ? tile : most;
    most = parts > most ? parts : most;
  }
  const size_t inputs = net.inputs.width ? net.inputs.product.outputs : 0;
  return (inputs > most ? inputs : most) + LANES;
}

void release(void* memory) {
  Workspace* w = (Workspace*)memory;
  if (!w) return;
  for (void* each : {(void*)w->x, (void*)w->after, (void*)w->queries, (void*)w->parts, (void*)w->pieces,
                     (void*)w->routes, (void*)w->slot_results, (void*)w->projected, (void*)w->mixed, (void*)w->steps,
                     (void*)w->decays, (void*)w->inputs})
    free(each);
  for (States* each : {&w->attended, &w->inner, &w->shared, &w->shared_mlp, &w->slots, &w->slots_inner})
    free_states(each);
  for (int i = 0; i < MOST_THREADS; i++) {
    for (States* each : {&w->own[i], &w->own_mlp[i], &w->own_attended[i]}) free_states(each);
    free(w->scratch[i]);
    free(w->routing[i]);
    free(w->route_weights[i]);
  }
  free(w);
}

// Allocate the workspace of experts, for the layer with the largest of each size
bool room_for_experts(const Network& net, Workspace* w) {
  size_t slots = 0, inner = 0, routes = 0, numbers = 0;
  for (int i = 0; i < net.layers; i++) {
    const Experts& e = net.layer[i].experts;
    if (!e.count) continue;
    const auto grow = [](size_t& x, size_t y) { x = y > x ? y : x; };
    grow(slots, size_t(net.most_tokens) * e.chosen);
    grow(inner, e.up->outputs);
    grow(routes, size_t(net.most_tokens) * e.router.outputs);
    grow(numbers, routing_numbers(e, net.most_tokens));
  }
  if (!slots) return true;
  bool done = allot(&w->routes, routes) && allot_states(&w->slots, slots, net.width) &&
              allot_states(&w->slots_inner, slots, inner) &&
              allot(&w->slot_results, slots * whole_vectors(net.width));
  for (int i = 0; done && i < net.threads; i++)
    done = allot(&w->routing[i], numbers) && allot(&w->route_weights[i], slots);
  return done;
}

// Allocate the workspace of recurrences, attention by latents, gates of attention, and convolutions of blocks
bool room_for_mixers(const Network& net, Workspace* w) {
  size_t projected = 0, mixed = 0, steps = 0;
  for (int i = 0; i < net.layers; i++) {
    const Layer& layer = net.layer[i];
    const auto grow = [](size_t& x, size_t y) { x = y > x ? y : x; };
    grow(projected, layer.attention_gate.outputs);
    for (const BlockConvolution* conv : {&layer.attention_conv, &layer.mlp_conv}) grow(projected, conv->deltas.outputs);
    if (layer.latent.rank) {
      grow(projected, layer.qkv.outputs);
      grow(mixed, layer.latent.queries.outputs);
      grow(mixed, size_t(layer.heads) * layer.latent.values->outputs);
    }
    const Layer* mixer = recurrent(layer);
    if (!mixer) continue;
    grow(projected, mixer->qkv.outputs);
    grow(mixed, channels_of(*mixer));
    grow(steps, 2 * whole_vectors(mixer->heads));  // `decays` has two numbers a head, also for a scan
  }
  const size_t tokens = net.most_tokens, inputs = net.inputs.width ? net.inputs.product.outputs : 0;
  return (!inputs || allot(&w->inputs, tokens * inputs + LANES)) &&
         (!projected || allot(&w->projected, tokens * projected + LANES)) && (!mixed || allot(&w->mixed, tokens * mixed + LANES)) &&
         (!steps || (allot(&w->steps, tokens * steps + LANES) && allot(&w->decays, tokens * steps + LANES)));
}

void* workspace(const Network& net) {
  Workspace* w = (Workspace*)calloc(1, sizeof(Workspace));
  if (!w) return nullptr;
  const size_t tokens = w->tokens = net.most_tokens, width = whole_vectors(net.width);
  const int reads = net.beside + net.width;
  bool done = allot(&w->pieces, tokens) && allot(&w->x, tokens * width + LANES) && allot(&w->after, tokens * width + LANES) &&
              allot(&w->queries, tokens * net.attention + LANES) &&
              allot_states(&w->attended, tokens, net.attention) &&
              allot_states(&w->inner, tokens, net.inner) &&
              allot_states(&w->shared, tokens, reads) &&
              allot_states(&w->shared_mlp, tokens, net.width);
  for (int i = 0; done && i < net.threads; i++) {
    done = allot_states(&w->own[i], ALONE, reads) &&
           allot_states(&w->own_mlp[i], ALONE, net.width) &&
           allot_states(&w->own_attended[i], ALONE, net.attention) &&
           allot(&w->scratch[i], scratch_of(net));
  }
  if (done && room_for_experts(net, w) && room_for_mixers(net, w)) return w;
  release(w);
  return nullptr;
}

// Allocate the parts of attention whose context is divided between threads
bool room_for_parts(const Network& net, const Pass& pass, Workspace* w) {
  size_t most = 0;
  Running r = {net, pass, *w};
  for (int i = 0; i < net.layers; i++) {
    const Layer& layer = net.layer[i];
    // at least 2: the team may have fewer threads than net.threads
    if (!layer.kv_heads || !layer.out.panels || !divided(r, layer, net.threads > 1 ? 2 : 1)) continue;
    const size_t blocks = span_of(r, layer, 0, 0, pass.tokens).blocks();
    const size_t floats = blocks * pass.tokens * layer.heads * part_floats(layer.width);
    most = floats > most ? floats : most;
  }
  if (most * sizeof(float) <= w->part_bytes) return true;
  free(w->parts);
  w->part_bytes = 0;
  if (!allot(&w->parts, 2 * most)) return false;
  w->part_bytes = 2 * most * sizeof(float);
  return true;
}

// Enables subnormals and rounding to nearest while it exists: the caller's thread may flush subnormals to zero
struct Exact {
#if defined(__x86_64__)
  unsigned before = _mm_getcsr();
  Exact() { _mm_setcsr(0x1f80); }
  ~Exact() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  Exact() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    set(0);
  }
  ~Exact() { set(before); }
  static void set(uint64_t to) { __asm__ volatile("msr fpcr, %0" : : "r"(to) : "memory"); }
#else
  Exact() {}
#endif
};

void run_exactly(void* what, Team& team, int me) {
  const Exact exact;
  run(what, team, me);
}

bool run_pass(const Network& net, const Pass& pass, void* memory) {
  Workspace* w = (Workspace*)memory;
  if (!room_for_parts(net, pass, w)) return false;
  cut_into_pieces(pass, w);
  Running r = {net, pass, *w};
  return run_in_team(net.threads, run_exactly, &r);
}

#include "chain.h"

bool run_chain_exactly(const Network& net, Pass pass, const Chain& chain, void* memory) {
  const Exact exact;
  return run_chain(net, pass, chain, memory);
}

void settle_exactly(const Network& net, float* row, int length) {
  const Exact exact;
  settle(net, row, length);
}

void soften_exactly(void* what, Team& team, int me) {
  const Exact exact;
  soften(*(const Softmax*)what, team, me);
}

bool run_softmax(const Softmax& s) {
  if (s.rows > 1 && s.threads > 1)
    return run_in_team(s.rows < s.threads ? s.rows : s.threads, soften_exactly, (void*)&s) && !*s.failed;
  const Exact exact;
  for (int row = 0; row < s.rows; row++)
    if (!softmax_row(s, row_of(s.logits, row), s.p + size_t(row) * s.V)) return false;
  return true;
}

void draw_tokens(const Draws& d) {
  const Exact exact;
  for (int row = 0; row < d.rows; row++) {
    const float* p = row_of(d.p, row);
    d.ids[row] = locate(d.V, d.u[row], d.masses + row, [&](int i) { return numbers_at(p, i, d.V); });
  }
}

bool verify_rows(const Verification& v) {
  const Exact exact;
  bool valid = true;
  for (int row = 0; valid && row < v.rows; row++) valid = verify_row(v, row);
  return valid;
}

bool copy_states(States* a, const float* x, int tokens, int n) {
  if (!allot_states(a, tokens, n)) return false;
  for (int t = 0; t < tokens; t++)
    memcpy(a->x + size_t(t) * a->stride, x + size_t(t) * n, size_t(n) * sizeof(float));
  return true;
}

void try_round(const float* x, int tokens, int n, int8_t* q, float* d, float* s, int32_t* z) {
  const Exact exact;
  States a;
  if (!copy_states(&a, x, tokens, n)) abort();
  for (int t = 0; t < tokens; t++) round_states(a, t, 0, a.stride);
  const int blocks = a.stride / BLOCK_OF_WEIGHTS;
  for (int t = 0; t < tokens; t++) {
    const int begin = t / TILE * TILE, size = tokens - begin < TILE ? tokens - begin : TILE;
    for (int b = 0; b < blocks; b++, q += BLOCK_OF_WEIGHTS, z += 2) {
      const Rounded& block = tile_of(a, begin)[b * size + t - begin];
      memcpy(q, block.q, BLOCK_OF_WEIGHTS);
      *d++ = block.d;
      *s++ = block.s;
      z[0] = (block.sum - block.second) / -8;
      z[1] = block.second / -8;
    }
  }
  free_states(&a);
}

struct Multiplication {
  const Weight& w;
  const States& a;
  float* y;
};

void multiply_exactly(void* what, Team& team, int me) {
  const Exact exact;
  const Multiplication& m = *(const Multiplication*)what;
  for (int first, last; team.take(me, m.w.outputs / LANES, PANELS, &first, &last);)
    product(m.w, m.a, first, last,
            [&](int g, int t, F v) { store(m.y + size_t(t) * m.w.outputs + g * LANES, v); });
}

bool multiply(const Weight& w, const float* x, int tokens, int threads, float* y) {
  const Exact exact;
  States a;
  bool done = copy_states(&a, x, tokens, w.inputs);
  if (done) {
    for (int t = 0; t < tokens && rounded(w); t++) round_states(a, t, 0, a.stride);
    Multiplication m = {w, a, y};
    done = run_in_team(threads, multiply_exactly, &m);
  }
  free_states(&a);
  return done;
}

bool join_pairs(const Pairs& p) {
  const Exact exact;
  if (p.join && !multiply(*p.join, p.states, p.tokens, 1, p.joined)) return false;
  const float* states = p.join ? p.joined : p.states;
  const int stride = p.join ? p.join->outputs : p.width;
  for (int t = 0; t < p.tokens; t++) {
    float* given = p.given + size_t(t) * (p.beside + p.width);
    embed_into(p.embeddings, p.kind, p.ids[t], p.beside, given);
    memcpy(given + p.beside, states + size_t(t) * stride, size_t(p.width) * sizeof(float));
  }
  return true;
}

void try_unpack(const Weight& w, int output, float* y) {
  const Exact exact;
  unpack_row(w, output, y);
}

void try_normalize(const Norm& norm, const float* x, int n, float* y) {
  const Exact exact;
  normalize(norm, x, y, n);
}

void try_activate(int activation, const float* curve, const float* x, int n, float* y) {
  const Exact exact;
  for (int i = 0; i < n; i += LANES) store(y + i, activated(activation, curve, load(x + i)));
}

void round_to_four_bits(const float* w, int64_t blocks, int8_t* q, float* scales) {
  const Exact exact;
  round_weights(w, blocks, q, scales);
}

}  // namespace

const Kernels FORETOKEN_KERNELS = {workspace,  release,       run_pass,     run_chain_exactly, settle_exactly, run_softmax,  draw_tokens, verify_rows, multiply,  join_pairs, try_round,
                                   try_unpack, try_normalize, try_activate, round_to_four_bits};
