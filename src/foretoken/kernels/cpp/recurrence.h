// Layers of convolutions and recurrences. A sequence can be rolled back to any of its last tokens: for each token, its
// key, decay and update u are stored, and S = decay S + k u^T advances an earlier state. These are the multiply-adds of
// the token's own pass, so that the bits do not depend on rollbacks.
#pragma once

// Panels of 16 columns of a state that a thread computes at a time: they fit its registers and first-level cache
enum { COLUMNS_OF_STATE = 2 };

// A row's states before and after a pass; all lengths in tokens
struct Course {
  int past, end;  // the row's length before and after the pass
  int from;       // length of the state that is advanced to `past`
  bool from_base; // whether that is the base, else the head
  int base, next; // length of the base before and after the pass
};

// The recurrence of a layer, its own or the one parallel to attention; or null
static const Layer* recurrent(const Layer& layer) { return layer.recurrence.rule ? &layer : layer.beside; }

static RowStates& states_of(const Layer& layer, float* row) { return *(RowStates*)(row + layer.recurrence.at); }

static Course course_of(const Pass& pass, const Layer& layer, int row) {
  const RowStates now = states_of(layer, pass.states[row]);
  const int past = pass.at[pass.row[row]], end = past + pass.row[row + 1] - pass.row[row];
  const bool from_base = now.head > past;
  const int base = int(now.base), kept = past - REWIND > end - REACH ? past - REWIND : end - REACH;
  const int next = end - base > REACH ? kept : base;
  return {past, end, int(from_base ? now.base : now.head), from_base, base, next};
}

// Record the lengths of all rows' base and head states after a pass
static void move_states(const Running& r) {
  for (int row = 0; row < r.pass.rows; row++)
    for (int i = 0; i < r.net.layers; i++) {
      const Layer* layer = recurrent(r.net.layer[i]);
      if (!layer) continue;
      const Course course = course_of(r.pass, *layer, row);
      states_of(*layer, r.pass.states[row]) = {course.next, course.past};
    }
}

// The number of channels of a layer's convolution
static inline int channels_of(const Layer& layer) {
  const Recurrence& c = layer.recurrence;
  return (c.rule == CONVOLUTION ? 0 : 2 * c.key_heads * c.key_width) + layer.heads * layer.width;
}

// A layer's parts in a sequence's memory (RowStates)
struct Kept {
  float *window, *base, *head, *keys, *updates, *decays;
};

static Kept kept_of(const Layer& layer, float* row) {
  const Recurrence& c = layer.recurrence;
  const size_t state = size_t(layer.heads) * layer.width * c.key_width;
  Kept k;
  k.window = row + c.at + HEADER;
  k.base = k.window + size_t(RING) * channels_of(layer);
  k.head = k.base + state;
  k.keys = k.head + state;
  k.updates = k.keys + size_t(RING) * c.key_heads * c.key_width;
  k.decays = k.updates + size_t(RING) * layer.heads * layer.width;
  return k;
}

// Inputs of the convolution of token t, for 16 channels
static F input_of(const Running& r, const Layer& layer, int t, int channel) {
  const float* x = r.work.projected + size_t(t) * layer.qkv.outputs + channel;
  return layer.recurrence.rule == CONVOLUTION ? mul(load(x), load(x + channels_of(layer))) : load(x);
}

// The convolution of token t, for channels c0 to c1 - 1
static void convolve(Running& r, const Layer& layer, int row, int t, int c0, int c1) {
  const Recurrence& c = layer.recurrence;
  const int channels = channels_of(layer), at = r.pass.at[t], past = r.pass.at[r.pass.row[row]];
  const float* window = kept_of(layer, r.pass.states[row]).window;
  for (int i = c0; i < c1; i += LANES) {
    F y = c.filter_bias ? load(c.filter_bias + i) : all(0.0f);
    for (int tap = 0; tap < c.taps; tap++) {
      const int from = at - c.taps + 1 + tap;
      if (from < 0) continue;
      const F x = from < past ? load(window + size_t(from % RING) * channels + i)
                              : input_of(r, layer, t - (at - from), i);
      y = fma(load(c.filters + size_t(tap) * channels + i), x, y);
    }
    if (c.rule != CONVOLUTION) y = mul(y, sigmoid(y));
    store(r.work.mixed + size_t(t) * channels + i, y);
  }
}

// Divide a head of queries or keys by its L2 norm, and multiply it by `scale`
static void make_unit(float* x, int n, float scale) {
  F squares = all(0.0f);
  for (int i = 0; i < n; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  const F inverse = all(1.0f / sqrtf(sum(squares) + 1e-6f) * scale);
  for (int i = 0; i < n; i += LANES) store(x + i, mul(load(x + i), inverse));
}

// Write a token's decays, then its betas (DELTA) or steps (SCAN)
static void find_decays(Running& r, const Layer& layer, int t) {
  const Recurrence& c = layer.recurrence;
  const int heads = whole_vectors(layer.heads);
  const float* x = r.work.steps + size_t(t) * c.steps.outputs;
  float* y = r.work.decays + size_t(t) * 2 * heads;
  for (int h = 0; h < heads; h += LANES) {
    F step = softplus(add(load(x + h), load(c.step_bias + h)));
    if (c.rule == SCAN) step = least(all(c.most_step), most(all(c.least_step), step));
    store(y + h, exponential(mul(load(c.decay + h), step)));
    store(y + heads + h, c.rule == SCAN ? step : mul(sigmoid(load(x + heads + h)), all(c.beta_scale)));
  }
}

// Compute the inputs of the recurrence for all tokens: convolutions, head by head, and decays
static void mix_inputs(Running& r, Team& team, int me, const Layer& layer) {
  const Recurrence& c = layer.recurrence;
  const int keys = c.rule == CONVOLUTION ? 0 : 2 * c.key_heads, heads = keys + layer.heads;
  const int pieces = heads + (c.rule != CONVOLUTION);
  for (int first, last; team.take(me, r.pass.tokens * pieces, TOKENS, &first, &last);)
    for (int i = first; i < last; i++) {
      const int t = i / pieces, head = i % pieces, row = row_of(r.pass, t);
      if (head == heads) {
        find_decays(r, layer, t);
        continue;
      }
      const int n = head < keys ? c.key_width : layer.width;
      const int c0 = head < keys ? head * n : keys * c.key_width + (head - keys) * n;
      convolve(r, layer, row, t, c0, c0 + n);
      if (c.rule == DELTA && head < keys)
        make_unit(r.work.mixed + size_t(t) * channels_of(layer) + c0, n, head < c.key_heads ? c.query_scale : 1.0f);
    }
  team.meet();
}

// Advance n panels of a state by the stored updates of tokens from..to - 1
template <int n>
static void replay(const Layer& layer, const Kept& kept, int head, int column, int from, int to, float* state) {
  const Recurrence& c = layer.recurrence;
  const int D = c.key_width, group = layer.heads / c.key_heads;
  for (int at = from; at < to; at++) {
    const int slot = at % RING;
    const float* k = kept.keys + (size_t(slot) * c.key_heads + head / group) * D;
    const F decay = all(kept.decays[size_t(slot) * whole_vectors(layer.heads) + head]);
    F u[n];
    for (int p = 0; p < n; p++)
      u[p] = load(kept.updates + (size_t(slot) * layer.heads + head) * layer.width + column + p * LANES);
    for (int d = 0; d < D; d++)
      for (int p = 0; p < n; p++) {
        float* s = state + (size_t(p) * D + d) * LANES;
        store(s, fma(all(k[d]), u[p], mul(load(s), decay)));
      }
  }
}

// Compute the recurrence of token t from `state` to `to`, which may be the same, and store the update
template <int n>
static void recur(const Running& r, const Layer& layer, const Kept& kept, int t, int head, int column,
                  const float* state, float* to) {
  const Recurrence& c = layer.recurrence;
  const int D = c.key_width, kv = head / (layer.heads / c.key_heads), heads = whole_vectors(layer.heads);
  float* x = r.work.mixed + size_t(t) * channels_of(layer);
  const float *q = x + kv * D, *k = x + (c.key_heads + kv) * D;
  float* v = x + 2 * c.key_heads * D + head * layer.width + column;
  const float* decays = r.work.decays + size_t(t) * 2 * heads;
  const F decay = all(decays[head]), beta = all(decays[heads + head]);
  F u[n], y[n];
  for (int p = 0; p < n; p++) u[p] = y[p] = all(0.0f);
  if (c.rule == DELTA)
    for (int d = 0; d < D; d++)
      for (int p = 0; p < n; p++) u[p] = fma(all(k[d]), load(state + (size_t(p) * D + d) * LANES), u[p]);
  for (int p = 0; p < n; p++) {
    const F own = load(v + p * LANES);
    u[p] = mul(beta, c.rule == DELTA ? sub(own, mul(u[p], decay)) : own);
  }
  for (int d = 0; d < D; d++)
    for (int p = 0; p < n; p++) {
      const size_t i = (size_t(p) * D + d) * LANES;
      const F s = fma(all(k[d]), u[p], mul(load(state + i), decay));
      store(to + i, s);
      y[p] = fma(all(q[d]), s, y[p]);
    }
  const int slot = r.pass.at[t] % RING;
  for (int p = 0; p < n; p++) {
    store(kept.updates + (size_t(slot) * layer.heads + head) * layer.width + column + p * LANES, u[p]);
    if (c.skip) y[p] = fma(all(c.skip[head]), load(v + p * LANES), y[p]);
    store(v + p * LANES, y[p]);  // replaces the value, which no other thread reads
  }
}

// Advance n panels of a row's state to its length before the pass; return them
template <int n>
static float* bring_forward(const Layer& layer, const Kept& kept, const Course& course, int head, int column) {
  const size_t D = layer.recurrence.key_width, from = (size_t(head) * layer.width + column) * D;
  float* state = kept.head + from;
  if (course.from_base) memcpy(state, kept.base + from, n * D * LANES * sizeof(float));
  replay<n>(layer, kept, head, column, course.from, course.past, state);
  return state;
}

// Advance all states of a sequence to its length
static void settle(const Network& net, float* row, int length) {
  for (int i = 0; i < net.layers; i++) {
    if (!recurrent(net.layer[i])) continue;
    const Layer& layer = *recurrent(net.layer[i]);
    if (layer.recurrence.rule == CONVOLUTION) continue;
    RowStates& now = states_of(layer, row);
    const bool from_base = now.head > length;
    const Course course = {length, length, int(from_base ? now.base : now.head), from_base, 0, 0};
    now.head = length;
    for (int head = 0; head < layer.heads; head++)
      for (int column = 0; column < layer.width; column += LANES)
        bring_forward<1>(layer, kept_of(layer, row), course, head, column);
  }
}

// Compute n panels of a head's state over all new tokens of a row, and the new base
template <int n>
static void run_columns(const Running& r, const Layer& layer, int row, int head, int column, float* scratch) {
  const Course course = course_of(r.pass, layer, row);
  const Kept kept = kept_of(layer, r.pass.states[row]);
  const size_t D = layer.recurrence.key_width, bytes = n * D * LANES * sizeof(float);
  float *base = kept.base + (size_t(head) * layer.width + column) * D;
  const float* state = bring_forward<n>(layer, kept, course, head, column);
  if (course.next <= course.past) replay<n>(layer, kept, head, column, course.base, course.next, base);
  const int begin = r.pass.row[row];
  for (int at = course.past; at < course.end; at++) {
    recur<n>(r, layer, kept, begin + at - course.past, head, column, at == course.past ? state : scratch, scratch);
    if (at + 1 == course.next) memcpy(base, scratch, bytes);
  }
}

// Gate a token's results and norm them in groups
static void gate_results(const Running& r, const Layer& layer, int t, float* y) {
  const Recurrence& c = layer.recurrence;
  const int n = layer.heads * layer.width, channels = channels_of(layer);
  const float* x = r.work.mixed + size_t(t) * channels + channels - n;
  const float* gates = r.work.projected + size_t(t) * layer.qkv.outputs + (c.rule == CONVOLUTION ? 2 * n : channels);
  if (c.rule == CONVOLUTION) {
    for (int i = 0; i < n; i += LANES) store(y + i, mul(load(gates + i), load(x + i)));
    return;
  }
  const auto gated = [&](int i, F one) { return mul(one, mul(load(gates + i), sigmoid(load(gates + i)))); };
  if (!c.norm) {
    for (int i = 0; i < n; i += LANES) store(y + i, gated(i, load(x + i)));
    return;
  }
  const int size = n / c.groups;
  for (int first = 0; first < n; first += size) {
    F squares = all(0.0f);
    for (int i = first; i < first + size; i += LANES) {
      const F one = c.gate_first ? gated(i, load(x + i)) : load(x + i);
      store(y + i, one);
      squares = fma(one, one, squares);
    }
    const F inverse = all(1.0f / sqrtf(sum(squares) / float(c.count) + c.epsilon));
    for (int i = first; i < first + size; i += LANES) {
      const F one = mul(mul(load(y + i), inverse), load(c.norm + i));
      store(y + i, c.gate_first ? one : gated(i, one));
    }
  }
}

// Store a token's convolution inputs, key and decay in the rings, unless later tokens of the pass would overwrite them
static void keep_token(const Running& r, const Layer& layer, int t) {
  const Recurrence& c = layer.recurrence;
  const int row = row_of(r.pass, t), at = r.pass.at[t], end = course_of(r.pass, layer, row).end;
  if (end - at > RING) return;
  const Kept kept = kept_of(layer, r.pass.states[row]);
  const int channels = channels_of(layer), slot = at % RING, heads = whole_vectors(layer.heads);
  for (int i = 0; i < channels; i += LANES)
    store(kept.window + size_t(slot) * channels + i, input_of(r, layer, t, i));
  if (c.rule == CONVOLUTION) return;
  const int n = c.key_heads * c.key_width;
  memcpy(kept.keys + size_t(slot) * n, r.work.mixed + size_t(t) * channels + n, size_t(n) * sizeof(float));
  memcpy(kept.decays + size_t(slot) * heads, r.work.decays + size_t(t) * 2 * heads, size_t(heads) * sizeof(float));
}

// A convolution and recurrence: return the results [tokens, heads * width], quantized if `out` needs that
static States recurred(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  const Recurrence& c = layer.recurrence;
  Workspace& w = r.work;
  const int tokens = r.pass.tokens, panels = layer.qkv.outputs / LANES, more = c.steps.outputs / LANES;
  const int n = layer.heads * layer.width;
  for (int first, last; team.take(me, panels + more, PANELS, &first, &last);) {
    const int middle = first > panels ? first : last < panels ? last : panels;
    product(layer.qkv, a, first, middle,
            [&](int g, int t, F y) { store(w.projected + size_t(t) * layer.qkv.outputs + g * LANES, y); });
    if (middle < last)
      product(c.steps, a, middle - panels, last - panels,
              [&](int g, int t, F y) { store(w.steps + size_t(t) * c.steps.outputs + g * LANES, y); });
  }
  team.meet();
  mix_inputs(r, team, me, layer);
  if (c.rule != CONVOLUTION) {
    const int each = layer.width / LANES, tiles = (each + COLUMNS_OF_STATE - 1) / COLUMNS_OF_STATE;
    for (int first, last; team.take(me, r.pass.rows * layer.heads * tiles, 1, &first, &last);) {
      const int row = first / tiles / layer.heads, head = first / tiles % layer.heads;
      const int panel = first % tiles * COLUMNS_OF_STATE;
      if (panel + COLUMNS_OF_STATE <= each)
        run_columns<COLUMNS_OF_STATE>(r, layer, row, head, panel * LANES, w.scratch[me]);
      else
        run_columns<1>(r, layer, row, head, panel * LANES, w.scratch[me]);
    }
    team.meet();
  }
  return prepared(team, me, tokens, view(w.own_attended[me], n, tokens), view(w.attended, n, tokens),
                  [&](const States& to, int t) {
                    gate_results(r, layer, t, to.x + size_t(t) * to.stride);
                    clear_behind(to, t, n);
                    if (rounded(layer.out)) round_states(to, t, 0, to.stride);
                    if (to.x == w.attended.x || me == 0) keep_token(r, layer, t);
                  });
}
