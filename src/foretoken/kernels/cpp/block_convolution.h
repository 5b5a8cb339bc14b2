// Convolutions over the tokens of a block, before and after attention or the MLP (DFlash2).
#pragma once

// Compute token t of the convolution number `which`, 0 or 1, of rows x: done(i, numbers i to i + 15)
template <class Done>
static void convolve(const Running& r, const BlockConvolution& c, int which, const float* x, int stride, int t,
                     const Done& done) {
  const int width = r.net.width, groups = width / c.group, first = r.pass.row[row_of(r.pass, t)];
  const float* deltas = r.work.projected + size_t(t) * c.deltas.outputs;
  for (int i = 0; i < width; i += LANES) {
    F y = all(0.0f);
    for (int tap = 0; tap < c.taps && tap <= t - first; tap++) {
      const int number = which * c.taps + tap;
      float delta[LANES];
      for (int j = 0; j < LANES; j++) delta[j] = deltas[number * groups + (i + j) / c.group];
      const F factor = add(load(c.base + size_t(number) * width + i), load(delta));
      y = fma(factor, load(x + size_t(t - tap) * stride + i), y);
    }
    done(i, y);
  }
}

// Return the inputs of attention or the MLP: normed states after the first convolution, quantized if `round`
static States convolved(Running& r, Team& team, int me, const BlockConvolution& c, const Norm& norm, bool round) {
  Workspace& w = r.work;
  const int tokens = r.pass.tokens, n = r.net.width;
  const States a = normed(r, team, me, norm, w.x, tokens, rounded(c.deltas), w.own[me], w.shared);
  for (int first, last; team.take(me, c.deltas.outputs / LANES, PANELS, &first, &last);)
    product(c.deltas, a, first, last,
            [&](int g, int t, F y) { store(w.projected + size_t(t) * c.deltas.outputs + g * LANES, y); });
  team.meet();
  return prepared(team, me, tokens, view(w.own_mlp[me], n, tokens), view(w.shared_mlp, n, tokens),
                  [&](const States& to, int t) {
                    float* own = to.x + size_t(t) * to.stride;
                    convolve(r, c, 0, a.x, a.stride, t, [&](int i, F y) { store(own + i, y); });
                    clear_behind(to, t, n);
                    if (round) round_states(to, t, 0, to.stride);
                  });
}

// Add the second convolution of the outputs of attention or the MLP to the states
static void add_convolved(Running& r, Team& team, int me, const BlockConvolution& c) {
  const int width = r.net.width;
  for (int first, last; team.take(me, r.pass.tokens, 1, &first, &last);)
    for (int t = first; t < last; t++) {
      float* x = r.work.x + size_t(t) * width;
      convolve(r, c, 1, r.work.after, width, t, [&](int i, F y) { store(x + i, add(load(x + i), y)); });
    }
  team.meet();
}
