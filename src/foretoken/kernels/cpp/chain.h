// Draft tokens one after the other: forward passes of the draft, and sampling from their logits.
#pragma once

// Return the first id with the largest logit, and write that logit to `top`; NaN if any logit is NaN
static int peak_of(const float* x, int V, float* top) {
  const F ones = all(1.0f);
  F numbers = ones;
  for (int i = 0; i < V; i += LANES) {
    const F y = numbers_at(x, i, V);
    numbers = least(numbers, at_least(y, y, ones));
  }
  const bool valid = -largest(sub(all(0.0f), numbers)) == 1.0f;
  *top = valid ? largest_of(x, V) : NAN;
  int found = 0;
  while (valid && found + 1 < V && x[found] != *top) found++;
  return found;
}

// Sample a row's next token from its logits; invalid logits count as all equal. Return false if memory does not suffice
static bool draw_next(const Chain& c, int row, int step, float* logits, int64_t* drawn) {
  const size_t at = size_t(row) * c.steps + step;
  const int best = peak_of(logits, c.choice.V, c.tops + at);
  int64_t own = best;
  c.masses[at] = 1;
  if (c.q) {
    if (!(fabsf(c.tops[at]) < INFINITY)) memset(logits, 0, size_t(c.choice.V) * sizeof(float));
    float* q = c.q + at * c.wide;
    float* p = c.ids ? c.narrow : q;
    if (!softmax_row(c.choice, logits, p)) return false;
    own = locate(c.choice.V, c.u[size_t(step) * c.rows + row], c.masses + at,
                 [&](int i) { return numbers_at(p, i, c.choice.V); });
    for (int i = 0; c.ids && i < c.choice.V; i++) q[c.ids[i]] = p[i];
  }
  c.tokens[at] = c.ids ? c.ids[own] : own;
  *drawn = own;
  return true;
}

// Write the embedding of an id in float32. width: a multiple of 16
INLINE void embed_into(const void* embeddings, int kind, int64_t id, int width, float* to) {
  const size_t first = size_t(id) * width;
  for (int i = 0; i < width; i += LANES) {
    const uint16_t* short_ones = (const uint16_t*)embeddings + first + i;
    const F y = kind == FLOAT32   ? load((const float*)embeddings + first + i)
                : kind == FLOAT16 ? from_half(short_ones)
                                  : from_bfloat16(short_ones);
    store(to + i, y);
  }
}

// Add row b's token to the arrays of the next pass, after `on` other tokens
static void add_to_pass(const Network& net, const Pass& pass, const Chain& c, int b, int step, int64_t drawn, int on) {
  c.pages[on] = c.pages_of[b];
  if (c.sources_of) {
    c.sources[on] = c.sources_of[b];
    c.source_length[on] = c.length_of[b];
  }
  if (c.states_of) c.states[on] = c.states_of[b];
  c.id[on] = int32_t(drawn);
  c.at[on] = c.next[b] + step;
  c.turn[on] = c.at[on] + c.apart[b];
  c.row[on + 1] = on + 1;
  c.need[on] = on;
  c.place[on] = b;
  if (!net.beside) return;
  float* given = c.given + size_t(on) * (net.beside + net.width);
  embed_into(c.embeddings, c.kind, c.tokens[size_t(b) * c.steps + step], net.beside, given);
  memcpy(given + net.beside, pass.hidden + size_t(b) * net.width, size_t(net.width) * sizeof(float));
}

// Run the pass, then for each further step a pass over one token of each row that still drafts, split if there are
// more rows than a pass takes tokens. The last draft token of a row is not run. Return false if memory or threads do
// not suffice
static bool run_chain(const Network& net, Pass pass, const Chain& c, void* workspace) {
  if (!run_pass(net, pass, workspace)) return false;
  pass.ids = c.id;
  pass.given = net.beside ? c.given : nullptr;
  pass.taps = nullptr;
  for (int step = 0; step < c.steps; step++) {
    int on = 0;
    const auto run_those = [&] {
      pass.tokens = pass.needed = pass.rows = on;
      const bool done = !on || run_pass(net, pass, workspace);
      on = 0;
      return done;
    };
    for (int b = 0; b < c.rows; b++) {
      if (c.budget[b] <= step) continue;
      int64_t drawn;
      if (!draw_next(c, b, step, pass.logits + size_t(b) * net.vocabulary, &drawn)) return false;
      if (c.budget[b] == step + 1) continue;
      add_to_pass(net, pass, c, b, step, drawn, on++);
      if (on == net.most_tokens && !run_those()) return false;
    }
    if (!run_those()) return false;
  }
  return true;
}
