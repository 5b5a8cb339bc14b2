// Per-layer inputs (Gemma 4), and the MLPs that use them.
#pragma once

// Compute the inputs of all layers for every token, [tokens, layers * width]
static void make_inputs(Running& r, Team& team, int me) {
  const LayerInputs& c = r.net.inputs;
  const int n = c.product.outputs, stride = whole_vectors(r.net.width);
  const States a = normed(r, team, me, Norm(), r.work.x, r.pass.tokens, rounded(c.product), r.work.own[me], r.work.shared);
  for (int first, last; team.take(me, n / LANES, PANELS, &first, &last);)
    product(c.product, a, first, last, [&](int g, int t, F y) {
      store(r.work.inputs + size_t(t) * n + g * LANES, mul(y, all(c.product_factor)));
    });
  team.meet();
  float* row = r.work.scratch[me];
  for (int first, last; team.take(me, r.pass.tokens, 1, &first, &last);)
    for (int t = first; t < last; t++) {
      unpack_row(c.table, r.pass.ids[t], row);
      float* x = r.work.inputs + size_t(t) * n;
      for (int from = 0; from < n; from += c.width) {
        normalize(c.norm, x + from, x + from, c.width);
        for (int i = from; i < from + c.width; i += LANES)
          store(x + i, mul(fma(load(row + i), all(c.table_factor), load(x + i)), all(c.sum_factor)));
      }
    }
  team.meet();
}

// Add norm(out(act(gate x) * part)) to the states; `part` is the layer's slice of the per-layer inputs
static void add_inputs(Running& r, Team& team, int me, const Layer& layer) {
  const Weight& gate = layer.input_gate;
  const int n = r.net.inputs.product.outputs, panels = gate.outputs / LANES;
  const States a = normed(r, team, me, Norm(), r.work.x, r.pass.tokens, rounded(gate), r.work.own[me], r.work.shared);
  const States inner = view(r.work.inner, gate.outputs, r.pass.tokens);
  for (int pair, last; team.take(me, (panels + 1) / 2, 1, &pair, &last);) {
    const int from = 2 * pair, to = from + 2 < panels ? from + 2 : panels;
    product(gate, a, from, to, [&](int g, int t, F y) {
      const float* part = r.work.inputs + size_t(t) * n + layer.input + g * LANES;
      store(inner.x + size_t(t) * inner.stride + g * LANES,
            mul(activated(layer.activation, layer.curve, y), load(part)));
    });
    end_pair(inner, from, to, rounded(layer.input_out));
  }
  team.meet();
  added(r, team, me, layer, layer.after_input, layer.input_out, inner);
}
