// A forward pass of a network. A layer consists of several phases; all threads meet at the end of each.
#pragma once

// Up to this many tokens, each thread norms and quantizes all states itself: cheaper than one more meeting
enum { ALONE = 4 };
// Work that a thread takes at a time
enum { PANELS = 4, TOKENS = 8 };

struct Piece {  // tokens first to last - 1, of one row, that attend together
  int row, first, last;
};

struct Workspace {  // for passes of up to `tokens` tokens; allocated once per network
  int tokens, count;
  Piece* pieces;         // [count], of the current pass
  float *x, *after;      // [tokens, width]: hidden states; outputs of attention or MLP before their norm
  float *queries;        // [tokens, attention]
  States attended, inner;
  States shared, shared_mlp;         // normed states of all tokens
  States own[MOST_THREADS];          // the same, by thread, for up to ALONE tokens
  States own_mlp[MOST_THREADS], own_attended[MOST_THREADS];
  float* scratch[MOST_THREADS];      // a head of all tokens, or parts of attention
  float* parts;                      // of attention that is divided between threads
  size_t part_bytes;
  float* routes;                     // [tokens, router's outputs]: logits of experts
  States slots, slots_inner;         // inputs and inner states of experts, by slot (experts.h)
  float* slot_results;               // [slots, width]
  float* projected;                  // [tokens, outputs]: inputs of convolutions, and gates
  float* mixed;                      // [tokens, channels]: outputs of convolutions, then of recurrences
  float *steps, *decays;             // [tokens, outputs]: logits of decays and betas; decays and betas
  float* inputs;                     // [tokens, per-layer inputs of all layers]
  int* routing[MOST_THREADS];
  float* route_weights[MOST_THREADS];
};

struct Running {
  const Network& net;
  const Pass& pass;
  Workspace& work;
};

static inline bool any_rounded(const Weight& a, const Weight& b) { return rounded(a) || rounded(b); }

static inline States view(const States& a, int n, int tokens) {  // as [tokens, n]
  States b = a;
  b.tokens = tokens;
  b.stride = (n + BLOCK_OF_WEIGHTS - 1) / BLOCK_OF_WEIGHTS * BLOCK_OF_WEIGHTS;
  return b;
}

// Fill states of all tokens by one(states, token). Up to ALONE tokens, each thread fills its own copy; else all threads
// fill the shared one
template <class One>
static States prepared(Team& team, int me, int tokens, const States& own, const States& shared,
                       const One& one) {
  if (tokens <= ALONE) {
    for (int t = 0; t < tokens; t++) one(own, t);
    return own;
  }
  for (int first, last; team.take(me, tokens, TOKENS, &first, &last);)
    for (int t = first; t < last; t++) one(shared, t);
  team.meet();
  return shared;
}

// Set the padding of a token's n numbers to zero
static void clear_behind(const States& a, int token, int n) {
  for (int i = whole_vectors(n); i < a.stride; i++) a.x[size_t(token) * a.stride + i] = 0.0f;
}

// Return the inputs of a product: normed states, quantized if `round`
static States normed(Running& r, Team& team, int me, const Norm& norm, const float* x, int tokens,
                     bool round, const States& own, const States& shared) {
  const int n = r.net.width, stride = whole_vectors(n);
  return prepared(team, me, tokens, view(own, n, tokens), view(shared, n, tokens), [&](const States& a, int t) {
    float* y = a.x + size_t(t) * a.stride;
    if (norm.weight)
      normalize(norm, x + size_t(t) * stride, y, n);
    else
      memcpy(y, x + size_t(t) * stride, size_t(stride) * sizeof(float));
    clear_behind(a, t, n);
    if (round) round_states(a, t, 0, a.stride);
  });
}

// The inputs of a token of a draft of pairs: `beside` numbers of an embedding, then `width` of a hidden state
static const float* given(const Running& r, int token) {
  return r.pass.given + size_t(token) * (r.net.beside + r.net.width);
}

// The inputs of a product of pairs: normed embedding, then normed state, of which token t's is x + t * stride; quantized
// if `round`
static States paired(Running& r, Team& team, int me, const Norm& norm, const float* x, size_t stride, bool round) {
  const int E = r.net.beside, H = r.net.width, tokens = r.pass.tokens;
  const States own = view(r.work.own[me], E + H, tokens), shared = view(r.work.shared, E + H, tokens);
  const auto put = [](const Norm& norm, const float* x, float* y, int n) {
    if (norm.weight)
      normalize(norm, x, y, n);
    else
      memcpy(y, x, size_t(n) * sizeof(float));
  };
  return prepared(team, me, tokens, own, shared, [&](const States& a, int t) {
    float* y = a.x + size_t(t) * a.stride;
    put(r.net.beside_norm, given(r, t), y, E);
    put(norm, x + t * stride, y + E, H);
    clear_behind(a, t, E + H);
    if (round) round_states(a, t, 0, a.stride);
  });
}

// Write the inputs of the first layer of a draft whose pairs are multiplied by a weight (MTP)
static void embed_pairs(Running& r, Team& team, int me) {
  const Network& net = r.net;
  const States a = paired(r, team, me, net.state_norm, r.pass.given + net.beside, net.beside + net.width, rounded(net.pair));
  const int stride = whole_vectors(net.width);
  for (int first, last; team.take(me, stride / LANES, PANELS, &first, &last);)
    product(net.pair, a, first, last, [&](int g, int t, F y) { store(r.work.x + size_t(t) * stride + g * LANES, y); });
  team.meet();
}

// Write the inputs of the first layer, [tokens, width]: given states or embeddings, plus learned positions, normed
static void embed(Running& r, Team& team, int me) {
  const Network& net = r.net;
  const int stride = whole_vectors(net.width);
  for (int first, last; team.take(me, r.pass.tokens, 1, &first, &last);)
    for (int t = first; t < last; t++) {
      float* x = r.work.x + size_t(t) * stride;
      if (r.pass.given)
        memcpy(x, given(r, t) + net.beside, size_t(net.width) * sizeof(float));
      else
        unpack_row(net.embeddings, r.pass.ids[t], x);
      for (int i = net.width; i < stride; i++) x[i] = 0.0f;  // padding may hold NaN of an earlier pass
      const F factor = all(r.pass.given ? 1.0f : net.embedding_factor);
      for (int i = 0; i < net.width; i += LANES) store(x + i, mul(load(x + i), factor));
      if (net.positions.panels) {
        float* learned = r.work.scratch[me];
        memset(learned, 0, size_t(stride) * sizeof(float));
        unpack_row(net.positions, r.pass.at[t], learned);
        for (int i = 0; i < net.width; i += LANES) store(x + i, add(load(x + i), load(learned + i)));
      }
      if (net.embedding_norm.weight) normalize(net.embedding_norm, x, x, net.width);
    }
  team.meet();
}

// Write a head's key or value, its numbers `step` apart; in float16, rounded and clamped to its range, if halved
static void write_head(const Layer& layer, void* page, size_t at, int step, const float* head) {
  if (!layer.halved) {
    for (int d = 0; d < layer.width; d++) ((float*)page)[at + size_t(d) * step] = head[d];
    return;
  }
  uint16_t* to = (uint16_t*)page + at;
  for (int d = 0; d < layer.width; d += LANES) {
    float whole[LANES] = {};
    uint16_t halves[LANES];
    const int n = layer.width - d < LANES ? layer.width - d : LANES;
    memcpy(whole, head + d, size_t(n) * sizeof(float));
    to_half(most(all(-65504.0f), least(all(65504.0f), load(whole))), halves);
    for (int i = 0; i < n; i++) to[size_t(d + i) * step] = halves[i];
  }
}
static void write_keys(const Layer& layer, void* page, size_t keys, int place, const float* head) {
  write_head(layer, page, keys + place, PAGE, head);
}
static void write_values(const Layer& layer, void* page, size_t keys, int place, const float* head) {
  write_head(layer, page, keys + layer.values + size_t(place) * whole_vectors(layer.width), 1, head);
}

// The row of a token
static int row_of(const Pass& pass, int token) {
  int r = 0;
  while (pass.row[r + 1] <= token) r++;
  return r;
}

// Norm and rotate a head of queries, keys or values, and write it to the queries or to its page
static void place_head(Running& r, const Layer& layer, int row, int t, int h, float* x, bool norm) {
  const int D = layer.width, kv = h - layer.heads;
  const bool query = kv < 0, key = !query && kv < layer.kv_heads;
  Norm own = query ? layer.of_queries : key ? layer.of_keys : layer.of_values;
  const int rotary = query ? layer.query_rotary : key ? layer.rotary : -1;
  norm = norm && own.weight;
  if (norm && layer.norms & EACH) own.weight += size_t(query ? h : kv) * whole_vectors(D);
  if (norm && !(layer.norms & LAST)) normalize_head(own, x, D);
  if (rotary >= 0)
    rotate(x, r.pass.rotary[rotary] + size_t(r.pass.turn[t]) * layer.rotated, layer.rotated, layer.interleaved);
  if (norm && layer.norms & LAST) normalize_head(own, x, D);
  if (query) {
    float* to = r.work.queries + size_t(t) * r.net.attention + h * D;
    for (int d = 0; d < D; d++) to[d] = x[d] * layer.scale;
    return;
  }
  const size_t keys = layer.keys + (key ? kv : kv - layer.kv_heads) * layer.step;
  void* page = r.pass.pages[row][r.pass.at[t] / PAGE];
  if (key)
    write_keys(layer, page, keys, r.pass.at[t] % PAGE, x);
  else
    write_values(layer, page, keys, r.pass.at[t] % PAGE, x);
}

// Norm all heads of a token's queries together, and of its keys; `project` has left them unnormed by token
static void norm_together(Running& r, Team& team, int me, const Layer& layer) {
  const int D = layer.width, stride = r.net.attention;
  float* x = r.work.scratch[me];
  for (int first, last; team.take(me, r.pass.tokens, 1, &first, &last);)
    for (int t = first, row = row_of(r.pass, t); t < last; t++) {
      while (r.pass.row[row + 1] <= t) row++;
      for (const bool query : {true, false}) {
        const int heads = query ? layer.heads : layer.kv_heads, n = heads * D;
        memcpy(x, (query ? r.work.queries : r.work.attended.x) + size_t(t) * stride,
               size_t(n) * sizeof(float));
        memset(x + n, 0, size_t(whole_vectors(n) - n) * sizeof(float));
        normalize(query ? layer.of_queries : layer.of_keys, x, x, n);
        for (int h = 0; h < heads; h++)
          place_head(r, layer, row, t, query ? h : layer.heads + h, x + h * D, false);
      }
    }
  team.meet();
}

// Compute queries, keys and values, norm and rotate them, and write them to the queries and pages
static void project(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  const Pass& pass = r.pass;
  const int heads = layer.heads + (layer.source || layer.borrowed ? 0 : 2 * layer.kv_heads);
  const int D = layer.width, stride = r.net.attention;
  float* out = r.work.scratch[me];
  // a panel has 16 outputs: heads that share one are computed together
  const int group = D % LANES == 0 ? 1 : D % 8 == 0 ? 2 : LANES;
  const int panels = group * D / LANES, width = group * D;
  for (int first, last; team.take(me, (heads + group - 1) / group, 1, &first, &last);)
    for (int piece = first; piece < last; piece++) {
      const int from = piece * panels, all_panels = layer.qkv.outputs / LANES;
      product(layer.qkv, a, from, from + panels < all_panels ? from + panels : all_panels,
              [&](int g, int t, F y) {
                if (layer.clip != 0.0f) y = least(all(layer.clip), most(all(-layer.clip), y));
                store(out + size_t(t) * width + (g - from) * LANES, y);
              });
      for (int t = 0, row = row_of(pass, 0); t < pass.tokens; t++) {
        while (pass.row[row + 1] <= t) row++;
        for (int i = 0; i < group && piece * group + i < heads; i++) {
          float* x = out + size_t(t) * width + i * D;
          const int h = piece * group + i, kv = h - layer.heads;
          if (layer.norms & TOGETHER && kv < layer.kv_heads) {
            float* to = kv < 0 ? r.work.queries + size_t(t) * stride + h * D
                               : r.work.attended.x + size_t(t) * stride + kv * D;
            memcpy(to, x, size_t(D) * sizeof(float));
          } else {
            place_head(r, layer, row, t, h, x, true);
          }
        }
      }
    }
  team.meet();
  if (layer.norms & TOGETHER) norm_together(r, team, me, layer);
}

// Positions first to last - 1 without those of blocks gap to after - 1
struct Span {
  int first, last, gap = 0, after = 0;
  bool has(int block) const { return first / BLOCK <= block && block <= (last - 1) / BLOCK && (block < gap || block >= after); }
  int blocks() const { return (last - 1) / BLOCK + 1 - first / BLOCK - (after - gap); }
  int block(int i) const { return i + first / BLOCK + (i + first / BLOCK < gap ? 0 : after - gap); }  // number i
  int pages() const { return (last - 1) / PAGE + 1; }
};

// The positions to which a token attends
static Span span_of(const Running& r, const Layer& layer, int row, int t) {
  if (layer.source) return {0, r.pass.source_length[row]};
  const int at = r.pass.at[t], end = r.pass.at[r.pass.row[row + 1] - 1] + 1;
  if (r.net.encoder) return {0, end};
  const int from = layer.block & FROM_BLOCK_START ? r.pass.at[r.pass.row[row]] : at;
  Span span = {layer.window && from >= layer.window ? from - layer.window + 1 : 0,
               layer.block & TO_BLOCK_END ? end : r.pass.ends ? r.pass.ends[t] : at + 1};
  if (r.net.last_blocks) {
    const int block = span.first / BLOCK, recent = at / BLOCK + 1 - r.net.last_blocks;
    span.gap = block > r.net.first_blocks ? block : r.net.first_blocks;
    span.after = recent > span.gap ? recent : span.gap;
  }
  return span;
}
// The positions to which any of the tokens t0 to t1 - 1 of a row attends
static Span span_of(const Running& r, const Layer& layer, int row, int t0, int t1) {
  Span span = span_of(r, layer, row, t0);
  span.last = span_of(r, layer, row, t1 - 1).last;
  return span;
}

static void* const* pages_of(const Running& r, const Layer& layer, int row) {
  return layer.source ? r.pass.sources[row] : r.pass.pages[row];
}

// Write the queries of tokens t0 to t1 - 1, for one key head, that attend to positions of a block; return their number
static int queries_in(const Running& r, const Layer& layer, int kv, int row, int t0, int t1, int block,
                      float* parts, size_t part, Query* queries) {
  const int group = layer.heads / layer.kv_heads, start = block * BLOCK;
  const float* biases = layer.bias ? r.pass.biases[layer.bias - 1] + r.pass.bias_reach : nullptr;
  int count = 0;
  for (int t = t0; t < t1; t++) {
    const int at = r.pass.at[t];
    const Span span = span_of(r, layer, row, t);
    if (!span.has(block)) continue;
    const int first = span.first > start ? span.first : start;
    const int last = span.last < start + BLOCK ? span.last : start + BLOCK;
    for (int g = 0; g < group; g++) {
      const int h = kv * group + g;
      queries[count++] = {r.work.queries + size_t(t) * r.net.attention + h * layer.width,
                          first, last, layer.slopes ? layer.slopes[h] : 0.0f, at,
                          biases ? biases + h * r.pass.bias_stride - at : nullptr,
                          parts + (size_t(t - t0) * group + g) * part};
    }
  }
  return count;
}

// The result of attention of a token's query head, [width]
static float* result_of(const Running& r, const Layer& layer, int token, int head) {
  const States& to = r.work.attended;
  return to.x + size_t(token) * view(to, layer.heads * layer.width, r.pass.tokens).stride + head * layer.width;
}

// Split the tokens of each row into pieces of up to TOKENS
static void cut_into_pieces(const Pass& pass, Workspace* w) {
  w->count = 0;
  for (int row = 0; row < pass.rows; row++)
    for (int t = pass.row[row], end = pass.row[row + 1]; t < end; t += TOKENS)
      w->pieces[w->count++] = {row, t, t + TOKENS < end ? t + TOKENS : end};
}

// Attention of a piece's tokens with one key head, block after block
static void attend_along(Running& r, int me, const Layer& layer, const Piece& piece, int kv) {
  const int row = piece.row, t0 = piece.first, t1 = piece.last;
  const int group = layer.heads / layer.kv_heads, n = (t1 - t0) * group;
  const size_t part = part_floats(layer.width);
  float *joined = r.work.scratch[me], *parts = joined + size_t(n) * part;
  Query queries[TOKENS * 128];
  bool begun[TOKENS * 128] = {};
  const Span span = span_of(r, layer, row, t0, t1);
  for (int b = 0; b < span.blocks(); b++) {
    const int block = span.block(b);
    const int count = queries_in(r, layer, kv, row, t0, t1, block, parts, part, queries);
    const size_t keys = layer.keys + kv * layer.step;
    attend(layer, pages_of(r, layer, row), span.pages(), keys, block * BLOCK, queries, count);
    for (int i = 0; i < count; i++) {
      const size_t which = size_t(queries[i].part - parts) / part;
      float* to = joined + which * part;
      if (begun[which])
        join(to, queries[i].part, layer.width);
      else
        memcpy(to, queries[i].part, part * sizeof(float));
      begun[which] = true;
    }
  }
  for (int i = 0; i < n; i++) {
    const int h = kv * group + i % group;
    finish(joined + i * part, layer.sinks ? layer.sinks + h : nullptr,
           result_of(r, layer, t0 + i / group, h), layer.width);
  }
}

// Whether to divide the context between threads: a pass over a few tokens of one row would leave threads idle
static bool divided(const Running& r, const Layer& layer, int threads) {
  return threads > 1 && r.pass.rows == 1 && r.pass.tokens <= TOKENS &&
         span_of(r, layer, 0, 0, r.pass.tokens).blocks() * layer.kv_heads >= threads;
}

// Attention of all tokens and heads: one piece and key head at a time; or, if divided, one key head and block at a
// time, whose parts join_blocks() then joins
static void attend_all(Running& r, Team& team, int me, const Layer& layer) {
  const Pass& pass = r.pass;
  if (divided(r, layer, team.size)) {
    const int group = layer.heads / layer.kv_heads, n = pass.tokens * group;
    const Span span = span_of(r, layer, 0, 0, pass.tokens);
    const int blocks = span.blocks();
    const size_t part = part_floats(layer.width);
    Query queries[TOKENS * 128];
    for (int first, last; team.take(me, layer.kv_heads * blocks, 1, &first, &last);) {
      const int kv = first / blocks, block = span.block(first % blocks);
      float* parts = r.work.parts + size_t(first) * n * part;
      const int count =
          queries_in(r, layer, kv, 0, 0, pass.tokens, block, parts, part, queries);
      attend(layer, pages_of(r, layer, 0), span.pages(), layer.keys + kv * layer.step,
             block * BLOCK, queries, count);
    }
    team.meet();
    return;
  }
  for (int first, last; team.take(me, r.work.count * layer.kv_heads, 1, &first, &last);)
    attend_along(r, me, layer, r.work.pieces[first / layer.kv_heads], first % layer.kv_heads);
  team.meet();
}

// Join the parts of a token that `attend_all` has computed in different threads, and write its result
static void join_blocks(const Running& r, const Layer& layer, int t, const States& to) {
  const int group = layer.heads / layer.kv_heads, n = r.pass.tokens * group;
  const Span span = span_of(r, layer, 0, 0, r.pass.tokens), own = span_of(r, layer, 0, t);
  const int blocks = span.blocks();
  const size_t part = part_floats(layer.width);
  int begin = 0;
  while (!own.has(span.block(begin))) begin++;
  float joined[LANES + 1024];
  for (int h = 0; h < layer.heads; h++) {
    const int kv = h / group;
    const auto of = [&](int b) {
      return r.work.parts + (size_t(kv * blocks + b) * n + size_t(t) * group + h % group) * part;
    };
    memcpy(joined, of(begin), part * sizeof(float));
    for (int b = begin + 1; b < blocks; b++)
      if (own.has(span.block(b))) join(joined, of(b), layer.width);
    finish(joined, layer.sinks ? layer.sinks + h : nullptr,
           to.x + size_t(t) * to.stride + h * layer.width, layer.width);
  }
}

// Multiply attention's result of a token by sigmoids of its gates
static void gate_attended(const Running& r, const Layer& layer, int t, float* x) {
  const int D = layer.width, n = layer.heads * D;
  const float* gates = r.work.projected + size_t(t) * layer.attention_gate.outputs;
  if (!layer.gate_of_heads) {
    for (int i = 0; i < n; i += LANES) store(x + i, mul(load(x + i), sigmoid(load(gates + i))));
    return;
  }
  for (int h = 0; h < layer.heads; h += LANES) {
    float own[LANES];
    store(own, sigmoid(load(gates + h)));
    for (int i = 0; i < LANES && h + i < layer.heads; i++)
      for (int d = 0; d < D; d++) x[(h + i) * D + d] *= own[i];
  }
}

// Attention: return its results [tokens, heads * width], gated, and quantized if `out` needs that
static States attended_to(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  Workspace& w = r.work;
  const int tokens = r.pass.tokens, n = layer.heads * layer.width;
  if (layer.attention_gate.panels) {
    const Weight& gates = layer.attention_gate;
    for (int first, last; team.take(me, gates.outputs / LANES, PANELS, &first, &last);)
      product(gates, a, first, last,
              [&](int g, int t, F y) { store(w.projected + size_t(t) * gates.outputs + g * LANES, y); });
    team.meet();
  }
  attend_all(r, team, me, layer);
  const bool apart = divided(r, layer, team.size), round = rounded(layer.out);
  if (!apart && !round && !layer.attention_gate.panels) return view(w.attended, n, tokens);
  return prepared(team, me, tokens, view(w.own_attended[me], n, tokens), view(w.attended, n, tokens),
                  [&](const States& to, int t) {
                    float* x = to.x + size_t(t) * to.stride;
                    if (apart)
                      join_blocks(r, layer, t, to);
                    else if (to.x != w.attended.x)
                      memcpy(x, result_of(r, layer, t, 0), size_t(n) * sizeof(float));
                    if (layer.attention_gate.panels) gate_attended(r, layer, t, x);
                    for (int i = n; i < to.stride; i++) x[i] = 0.0f;
                    if (round) round_states(to, t, 0, to.stride);
                  });
}

#include "block_convolution.h"

// Add the product of w and `a`, the output of attention or MLP, to the states: as it is, after a norm, or, if
// added_first, with the norm after the addition, or after a convolution
static void added(Running& r, Team& team, int me, const Layer& layer, const Norm& norm,
                  const Weight& w, const States& a, const BlockConvolution& conv = BlockConvolution()) {
  const int stride = whole_vectors(r.net.width), tokens = r.pass.tokens;
  const F factor = all(layer.residual);
  for (int first, last; team.take(me, w.outputs / LANES, PANELS, &first, &last);)
    product(w, a, first, last, [&](int g, int t, F y) {
      float* x = r.work.x + size_t(t) * stride + g * LANES;
      if ((norm.weight && !layer.added_first) || conv.taps)
        store(r.work.after + size_t(t) * stride + g * LANES, y);
      else
        store(x, layer.residual == 1.0f ? add(load(x), y) : fma(y, factor, load(x)));
    });
  team.meet();
  if (conv.taps) return add_convolved(r, team, me, conv);
  if (!norm.weight) return;
  for (int first, last; team.take(me, tokens, 1, &first, &last);)
    for (int t = first; t < last; t++) {
      float *y = r.work.after + size_t(t) * stride, *x = r.work.x + size_t(t) * stride;
      normalize(norm, layer.added_first ? x : y, layer.added_first ? x : y, r.net.width);
      if (layer.added_first) continue;
      for (int i = 0; i < r.net.width; i += LANES)
        store(x + i, fma(load(y + i), factor, load(x + i)));
    }
  team.meet();
}

// Complete a block of 32 numbers, of which panels from..to - 1 are written, with zeros, and quantize it
static void end_pair(const States& inner, int from, int to, bool round) {
  for (int t = 0; t < inner.tokens; t++) {
    if (to - from < 2) store(inner.x + size_t(t) * inner.stride + to * LANES, all(0.0f));
    if (round) round_states(inner, t, from * LANES, (from + 2) * LANES);
  }
}

// Compute two panels of an MLP's inner states: a block of 32, which can then be quantized
static void gate_pair(const Layer& layer, const Weight& gate, const Weight& up, bool round, const States& a,
                      const States& inner, int pair, float* gates) {
  const int from = 2 * pair, panels = up.outputs / LANES;
  const int to = from + 2 < panels ? from + 2 : panels;
  if (gate.panels)
    product(gate, a, from, to, [&](int g, int t, F y) {
      store(gates + (size_t(t) * 2 + g - from) * LANES, activated(layer.activation, layer.curve, y));
    });
  product(up, a, from, to, [&](int g, int t, F y) {
    if (gate.panels)
      y = mul(load(gates + (size_t(t) * 2 + g - from) * LANES), partner(layer.activation, layer.curve, y));
    else
      y = activated(layer.activation, layer.curve, y);
    store(inner.x + size_t(t) * inner.stride + g * LANES, y);
  });
  end_pair(inner, from, to, round);
}

// Compute an MLP's inner states act(gate a) * (up a)
static void gate(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  const States inner = view(r.work.inner, layer.up.outputs, r.pass.tokens);
  for (int first, last; team.take(me, (layer.up.outputs / LANES + 1) / 2, 1, &first, &last);)
    for (int pair = first; pair < last; pair++)
      gate_pair(layer, layer.gate, layer.up, rounded(layer.down), a, inner, pair, r.work.scratch[me]);
  team.meet();
}

#include "experts.h"
#include "inputs.h"
#include "latent.h"
#include "recurrence.h"

// Add attention or a recurrence to the states. `mlp`: receives the inputs of the MLP of a parallel layer. Return false
// if the layer only computes keys and values
static bool mix_tokens(Running& r, Team& team, int me, const Layer& layer, bool first_of_pairs, States* mlp) {
  Workspace& w = r.work;
  const int tokens = r.pass.tokens;
  const States a = first_of_pairs ? paired(r, team, me, layer.before_attention, w.x, whole_vectors(r.net.width), rounded(layer.qkv))
                   : layer.attention_conv.taps
                       ? convolved(r, team, me, layer.attention_conv, layer.before_attention, rounded(layer.qkv))
                       : normed(r, team, me, layer.before_attention, w.x, tokens,
                                           rounded(layer.qkv) || (layer.beside && rounded(layer.beside->qkv)),
                                           w.own[me], w.shared);
  if (layer.parallel) {  // before attention is added to the states
    const Weight& first = layer.up.panels ? layer.gate.panels ? layer.gate : layer.up : layer.qkv;
    *mlp = a;
    if (layer.before_mlp.weight || (any_rounded(first, layer.up) && !rounded(layer.qkv)))
      *mlp = normed(r, team, me, layer.before_mlp.weight ? layer.before_mlp : layer.before_attention,
                    w.x, tokens, any_rounded(first, layer.up), w.own_mlp[me], w.shared_mlp);
  }
  States attended;
  if (layer.recurrence.rule) {
    attended = recurred(r, team, me, layer, a);
  } else if (layer.latent.rank) {
    attended = attended_latents(r, team, me, layer, a);
  } else {
    project(r, team, me, layer, a);
    if (!layer.out.panels) return false;
    attended = attended_to(r, team, me, layer, a);
  }
  added(r, team, me, layer, layer.after_attention, layer.out, attended, layer.attention_conv);
  if (layer.beside) added(r, team, me, *layer.beside, Norm(), layer.beside->out, recurred(r, team, me, *layer.beside, a));
  return true;
}

// Run layer `number`
static void layer_of(Running& r, Team& team, int me, int number) {
  const Layer& layer = r.net.layer[number];
  Workspace& w = r.work;
  const int tokens = r.pass.tokens;
  States mlp;
  if (layer.qkv.panels && !mix_tokens(r, team, me, layer, number == 0 && r.net.beside && !r.net.pair.panels, &mlp)) return;
  if (!layer.up.panels && !layer.experts.count) return;
  if (!layer.parallel) {
    const Weight& first = layer.gate.panels ? layer.gate : layer.up;
    const bool round = layer.up.panels && any_rounded(first, layer.up);
    mlp = layer.mlp_conv.taps ? convolved(r, team, me, layer.mlp_conv, layer.before_mlp, round)
                              : normed(r, team, me, layer.before_mlp, w.x, tokens, round, w.own[me], w.shared);
  }
  if (layer.experts.count) {
    run_experts(r, team, me, layer, mlp);
  } else {
    gate(r, team, me, layer, mlp);
    added(r, team, me, layer, layer.after_mlp, layer.down, view(w.inner, layer.up.outputs, tokens), layer.mlp_conv);
  }
  if (layer.input_gate.panels) add_inputs(r, team, me, layer);
  if (layer.factor == 1.0f) return;
  const int stride = whole_vectors(r.net.width);
  for (int first, last; team.take(me, tokens, TOKENS, &first, &last);)
    for (int i = first * stride; i < last * stride; i += LANES)
      store(w.x + i, mul(load(w.x + i), all(layer.factor)));
  team.meet();
}

// Add rows [tokens, width] to the states
static void add_to_states(Running& r, Team& team, int me, const float* rows) {
  const int n = r.net.width;
  for (int first, last; team.take(me, r.pass.tokens, TOKENS, &first, &last);)
    for (int t = first; t < last; t++)
      for (int i = 0; i < n; i++) r.work.x[size_t(t) * whole_vectors(n) + i] += rows[size_t(t) * n + i];
  team.meet();
}

// Copy the hidden states to tap `number`, if it is wanted
static void tap(Running& r, Team& team, int me, int number) {
  float* to = r.pass.taps ? r.pass.taps[number] : nullptr;
  if (!to) return;
  const int stride = whole_vectors(r.net.width);
  for (int first, last; team.take(me, r.pass.tokens, 1, &first, &last);)
    for (int t = first; t < last; t++)
      memcpy(to + size_t(t) * r.pass.tap_stride, r.work.x + size_t(t) * stride,
             size_t(r.net.width) * sizeof(float));
  team.meet();
}

// Write the last tap, and the head's inputs and logits of the needed tokens
static void read_out(Running& r, Team& team, int me) {
  const Network& net = r.net;
  const Pass& pass = r.pass;
  const int stride = whole_vectors(net.width);
  if (float* to = pass.taps ? pass.taps[net.layers + 1] : nullptr) {
    float* y = r.work.scratch[me];
    for (int first, last; team.take(me, pass.tokens, 1, &first, &last);)
      for (int t = first; t < last; t++) {
        const float* x = r.work.x + size_t(t) * stride;
        if (net.last.weight) normalize(net.last, x, y, net.width);
        memcpy(to + size_t(t) * pass.tap_stride, net.last.weight ? y : x, size_t(net.width) * sizeof(float));
      }
    team.meet();
  }
  if (!pass.needed) return;
  if (me == 0)  // compact the rows of needed tokens, which are in ascending order
    for (int i = 0; i < pass.needed; i++)
      if (pass.need[i] != i)
        memcpy(r.work.x + size_t(i) * stride, r.work.x + size_t(pass.need[i]) * stride,
               size_t(stride) * sizeof(float));
  team.meet();
  const States a = normed(r, team, me, net.last, r.work.x, pass.needed, rounded(net.head),
                          r.work.own[me], r.work.shared);
  if (pass.hidden && me == 0)
    for (int i = 0; i < pass.needed; i++)
      memcpy(pass.hidden + size_t(pass.place[i]) * net.width,
             net.before_last ? r.work.x + size_t(i) * stride : a.x + size_t(i) * a.stride,
             size_t(net.width) * sizeof(float));
  if (pass.logits)
    for (int first, last; team.take(me, net.vocabulary / LANES, 2 * PANELS, &first, &last);)
      product(net.head, a, first, last, [&](int g, int t, F y) {
        if (net.logit_factor != 1.0f) y = mul(y, all(net.logit_factor));
        if (net.logit_cap != 0.0f) y = capped(y, net.logit_cap);
        store(pass.logits + size_t(pass.place[t]) * net.vocabulary + g * LANES, y);
      });
  team.meet();
}

// A thread's part of a pass; what: a Running
static void run(void* what, Team& team, int me) {
  Running& r = *(Running*)what;
  if (r.net.pair.panels)
    embed_pairs(r, team, me);
  else
    embed(r, team, me);
  if (r.net.inputs.width) make_inputs(r, team, me);
  for (int i = 0; i < r.net.layers; i++) {
    tap(r, team, me, i);
    layer_of(r, team, me, i);
    if (r.pass.added && r.pass.added[i]) add_to_states(r, team, me, r.pass.added[i]);
  }
  tap(r, team, me, r.net.layers);
  read_out(r, team, me);
  if (me == 0 && r.pass.states) move_states(r);
}
