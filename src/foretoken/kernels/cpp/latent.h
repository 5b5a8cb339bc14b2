// Attention by latents (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1). A head's keys and values are linear in a
// token's latent c, which is cached instead: K = [keys^T c, k'], V = values c; k' is the rotary key that all heads
// share. As q K = (keys q) c + q' k', `keys` is applied to the query, all heads attend to the latents, and `values` is
// applied to the result.
#pragma once

// Tokens whose queries or results a thread multiplies at a time
enum { LATENT_TOKENS = ALONE };

// Write each token's normed latent and its rotary key into its page, both as key and as value
static void write_latents(Running& r, int me, const Layer& layer) {
  const Latent& c = layer.latent;
  const int whole = whole_vectors(c.rank), from = layer.qkv.outputs - layer.width;
  float* y = r.work.scratch[me];
  for (int t = 0, row = 0; t < r.pass.tokens; t++) {
    while (r.pass.row[row + 1] <= t) row++;
    const float* x = r.work.projected + size_t(t) * layer.qkv.outputs + from;
    normalize(layer.of_keys, x, y, c.rank);
    memcpy(y + whole, x + whole, size_t(layer.width - whole) * sizeof(float));
    if (layer.rotary >= 0)
      rotate(y + whole, r.pass.rotary[layer.rotary] + size_t(r.pass.turn[t]) * layer.rotated, layer.rotated,
             layer.interleaved);
    void* page = r.pass.pages[row][r.pass.at[t] / PAGE];
    write_keys(layer, page, layer.keys, r.pass.at[t] % PAGE, y);
    write_values(layer, page, layer.keys, r.pass.at[t] % PAGE, y);
  }
}

// Multiply a head's numbers of all tokens, `stride` apart, by the head's weight: done(panel, token, 16 outputs)
template <class Done>
static void multiply_head(Running& r, int me, const Weight& w, const float* x, int stride, const Done& done) {
  for (int begin = 0; begin < r.pass.tokens; begin += LATENT_TOKENS) {
    const int left = r.pass.tokens - begin, n = left < LATENT_TOKENS ? left : LATENT_TOKENS;
    const States a = view(r.work.own_attended[me], w.inputs, n);
    for (int t = 0; t < n; t++) {
      memcpy(a.x + size_t(t) * a.stride, x + size_t(begin + t) * stride, size_t(w.inputs) * sizeof(float));
      for (int i = w.inputs; i < a.stride; i++) a.x[size_t(t) * a.stride + i] = 0.0f;
      if (rounded(w)) round_states(a, t, 0, a.stride);
    }
    product(w, a, 0, w.outputs / LANES, [&](int g, int t, F y) { done(g, begin + t, y); });
  }
}

// Write a head's queries of all tokens, in the form that attends to latents
static void absorb_queries(Running& r, int me, const Layer& layer, int h, const float* heads, int stride) {
  const Latent& c = layer.latent;
  const Weight& w = c.keys[h];
  const int whole = whole_vectors(c.rank), turned = layer.width - whole, width = w.inputs;
  const float* x = heads + size_t(h) * (width + turned);
  const auto query = [&](int t) { return r.work.queries + size_t(t) * r.net.attention + size_t(h) * layer.width; };
  multiply_head(r, me, w, x, stride,
                [&](int g, int t, F y) { store(query(t) + g * LANES, mul(y, all(layer.scale))); });
  for (int t = 0; t < r.pass.tokens; t++) {
    float* y = query(t) + whole;
    memcpy(y, x + size_t(t) * stride + width, size_t(turned) * sizeof(float));
    if (layer.query_rotary >= 0)
      rotate(y, r.pass.rotary[layer.query_rotary] + size_t(r.pass.turn[t]) * layer.rotated, layer.rotated,
             layer.interleaved);
    for (int i = 0; i < turned; i++) y[i] *= layer.scale;
  }
}

// Attention by latents: return its results [tokens, heads * values], quantized if `out` needs that
static States attended_latents(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  const Latent& c = layer.latent;
  Workspace& w = r.work;
  const int tokens = r.pass.tokens;
  const auto multiply = [&](const Weight& by, const States& states, float* to) {
    for (int first, last; team.take(me, by.outputs / LANES, PANELS, &first, &last);)
      product(by, states, first, last,
              [&](int g, int t, F y) { store(to + size_t(t) * by.outputs + g * LANES, y); });
    team.meet();
  };
  multiply(layer.qkv, a, w.projected);
  const float* heads = w.projected;
  if (c.queries.panels) {
    const States latents =
        prepared(team, me, tokens, view(w.own_attended[me], c.query_rank, tokens), view(w.attended, c.query_rank, tokens),
                 [&](const States& to, int t) {
                   float* y = to.x + size_t(t) * to.stride;
                   normalize(layer.of_queries, w.projected + size_t(t) * layer.qkv.outputs, y, c.query_rank);
                   clear_behind(to, t, c.query_rank);
                   if (rounded(c.queries)) round_states(to, t, 0, to.stride);
                 });
    multiply(c.queries, latents, w.mixed);
    heads = w.mixed;
  }
  const int stride = c.queries.panels ? c.queries.outputs : layer.qkv.outputs;
  for (int h, last; team.take(me, 1 + layer.heads, 1, &h, &last);) {
    if (h)
      absorb_queries(r, me, layer, h - 1, heads, stride);
    else
      write_latents(r, me, layer);
  }
  team.meet();
  attend_all(r, team, me, layer);
  const int width = layer.heads * layer.width, each = c.values->outputs, n = layer.heads * each;
  const States results = view(w.attended, width, tokens);
  if (divided(r, layer, team.size)) {
    for (int t, last; team.take(me, tokens, 1, &t, &last);) join_blocks(r, layer, t, results);
    team.meet();
  }
  for (int h, last; team.take(me, layer.heads, 1, &h, &last);)
    multiply_head(r, me, c.values[h], results.x + h * layer.width, results.stride,
                  [&](int g, int t, F y) { store(w.mixed + size_t(t) * n + h * each + g * LANES, y); });
  team.meet();
  return prepared(team, me, tokens, view(w.own_attended[me], n, tokens), view(w.attended, n, tokens),
                  [&](const States& to, int t) {
                    float* y = to.x + size_t(t) * to.stride;
                    memcpy(y, w.mixed + size_t(t) * n, size_t(n) * sizeof(float));
                    clear_behind(to, t, n);
                    if (rounded(layer.out)) round_states(to, t, 0, to.stride);
                  });
}
