// Mixture of experts. The outputs of a token's experts are summed in descending order of their scores, so that the bits
// do not depend on the other tokens of the pass.
#pragma once

// The experts of all tokens; every thread computes its own copy. A slot is a pair of a token and one of its experts;
// slots are ordered by expert, then by token
struct Routing {
  float* weight;  // [tokens, chosen], in descending order of scores
  int* slot;      // [tokens, chosen]
  int* token;     // [slots]
  int* begin;     // [count + 1], each expert's first slot
  int* active;    // [actives], experts with tokens
  int actives;
};

static size_t routing_numbers(const Experts& e, int tokens) { return size_t(tokens) * e.chosen * 3 + 2 * e.count + 1; }

// Mark as taken all experts but those of the groups whose two best scores have the largest sums; of equal sums, the
// first group is chosen
static void choose_groups(const Experts& e, const float* scores, bool* taken) {
  const int size = e.count / e.groups;
  float best[MOST_EXPERTS];
  bool stays[MOST_EXPERTS] = {};
  for (int g = 0; g < e.groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = g * size; i < (g + 1) * size; i++) {
      const float x = scores[i];
      second = x > first ? first : x > second ? x : second;
      first = x > first ? x : first;
    }
    best[g] = first + second;
  }
  for (int j = 0; j < e.chosen_groups; j++) {
    int most = -1;
    for (int g = 0; g < e.groups; g++)
      if (!stays[g] && (most < 0 || best[g] > best[most])) most = g;
    stays[most] = true;
  }
  for (int i = 0; i < e.count; i++) taken[i] = !stays[i / size];
}

// Write a token's experts and their weights, in descending order of scores; of equal scores, the first expert is chosen
static void choose_experts(const Experts& e, const float* logits, int* chosen, float* weight) {
  float masses[MOST_EXPERTS], scores[MOST_EXPERTS], most_of = logits[0], total = 0;
  bool taken[MOST_EXPERTS] = {};
  for (int i = 1; i < e.count; i++) most_of = logits[i] > most_of ? logits[i] : most_of;
  for (int i = 0; i < e.count; i += LANES)
    store(masses + i, e.sigmoids ? sigmoid(load(logits + i)) : exponential(sub(load(logits + i), all(most_of))));
  for (int i = 0; i < e.count && !e.normalized; i++) total += masses[i];
  const float* by = logits;
  if (e.added || e.groups > 1) {
    float whole = 0;
    for (int i = 0; i < e.count; i++) whole += masses[i];
    for (int i = 0; i < e.count; i++)
      scores[i] = (e.sigmoids ? masses[i] : masses[i] / whole) + (e.added ? e.added[i] : 0.0f);
    by = scores;
  }
  if (e.groups > 1) choose_groups(e, by, taken);
  for (int j = 0; j < e.chosen; j++) {
    int best = -1;
    for (int i = 0; i < e.count; i++)
      if (!taken[i] && (best < 0 || by[i] > by[best])) best = i;
    taken[best] = true;
    chosen[j] = best;
    weight[j] = masses[best];
    if (e.normalized) total += masses[best];
  }
  if (e.sigmoids && !e.normalized) total = 1;
  for (int j = 0; j < e.chosen; j++) weight[j] = weight[j] / total * e.scale;
}

// Choose the experts of all tokens by the logits in w.routes
static Routing routed(const Workspace& w, int me, const Experts& e, int tokens) {
  const int slots = tokens * e.chosen;
  Routing r;
  r.weight = w.route_weights[me];
  r.slot = w.routing[me];
  r.token = r.slot + slots;
  int* chosen = r.token + slots;
  r.begin = chosen + slots;
  r.active = r.begin + e.count + 1;
  memset(r.begin, 0, size_t(e.count + 1) * sizeof(int));
  for (int t = 0; t < tokens; t++) {
    choose_experts(e, w.routes + size_t(t) * e.router.outputs, chosen + t * e.chosen, r.weight + t * e.chosen);
    for (int j = 0; j < e.chosen; j++) r.begin[chosen[t * e.chosen + j] + 1]++;
  }
  r.actives = 0;
  for (int i = 0; i < e.count; i++) {
    if (r.begin[i + 1]) r.active[r.actives++] = i;
    r.begin[i + 1] += r.begin[i];
  }
  // fill the slots in the order of tokens: `begin` advances to the next expert's first slot and is then shifted back
  for (int i = 0; i < slots; i++) {
    const int at = r.begin[chosen[i]]++;
    r.slot[i] = at;
    r.token[at] = i / e.chosen;
  }
  for (int i = e.count; i; i--) r.begin[i] = r.begin[i - 1];
  r.begin[0] = 0;
  return r;
}

// The states [slots of the expert, n] of one expert's tokens
static States of_expert(const States& every, const Routing& r, int expert, int n) {
  States some = view(every, n, r.begin[expert + 1] - r.begin[expert]);
  some.x += size_t(r.begin[expert]) * some.stride;
  some.rounded += size_t(r.begin[expert]) * (some.stride / BLOCK_OF_WEIGHTS);
  return some;
}

// Write to y the weighted sum of the outputs of a token's experts, and of the shared MLP if there is one
static void sum_of_experts(Running& r, const Layer& layer, const Routing& route, int t, float* y) {
  const Experts& e = layer.experts;
  const int stride = whole_vectors(r.net.width);
  const float* logits = r.work.routes + size_t(t) * e.router.outputs;
  float gates[LANES];
  store(gates, e.shared_gate ? sigmoid(all(logits[e.count])) : all(1.0f));
  for (int i = 0; i < stride; i += LANES) {
    F total = all(0.0f);
    for (int j = 0; j < e.chosen; j++) {
      const size_t slot = route.slot[t * e.chosen + j];
      total = fma(load(r.work.slot_results + slot * stride + i), all(route.weight[t * e.chosen + j]), total);
    }
    if (layer.up.panels) total = fma(load(r.work.after + size_t(t) * stride + i), all(gates[0]), total);
    store(y + i, total);
  }
}

// Add the weighted outputs of experts, and of the shared MLP, to the states. a: their input, [tokens, width]
static void run_experts(Running& r, Team& team, int me, const Layer& layer, const States& a) {
  const Experts& e = layer.experts;
  Workspace& w = r.work;
  const int tokens = r.pass.tokens, width = r.net.width, stride = whole_vectors(width), inner = e.up->outputs;
  if (layer.up.panels) {  // the shared MLP
    gate(r, team, me, layer, a);
    for (int first, last; team.take(me, layer.down.outputs / LANES, PANELS, &first, &last);)
      product(layer.down, view(w.inner, layer.up.outputs, tokens), first, last,
              [&](int g, int t, F y) { store(w.after + size_t(t) * stride + g * LANES, y); });
    team.meet();
  }
  for (int first, last; team.take(me, e.router.outputs / LANES, 1, &first, &last);)
    product(e.router, a, first, last,
            [&](int g, int t, F y) { store(w.routes + size_t(t) * e.router.outputs + g * LANES, y); });
  team.meet();
  const Routing route = routed(w, me, e, tokens);
  for (int first, last; team.take(me, route.actives, 1, &first, &last);) {
    const int expert = route.active[first];
    const States own = of_expert(w.slots, route, expert, width);
    for (int t = 0; t < own.tokens; t++) {
      const size_t from = route.token[route.begin[expert] + t];
      memcpy(own.x + size_t(t) * own.stride, a.x + from * a.stride, size_t(own.stride) * sizeof(float));
      if (any_rounded(*e.gate, *e.up)) round_states(own, t, 0, own.stride);
    }
  }
  team.meet();
  const int pairs = (inner / LANES + 1) / 2;
  for (int first, last; team.take(me, route.actives * pairs, 1, &first, &last);) {
    const int expert = route.active[first / pairs];
    gate_pair(layer, e.gate[expert], e.up[expert], rounded(e.down[expert]), of_expert(w.slots, route, expert, width),
              of_expert(w.slots_inner, route, expert, inner), first % pairs, w.scratch[me]);
  }
  team.meet();
  const int groups = (e.down->outputs / LANES + PANELS - 1) / PANELS;
  for (int first, last; team.take(me, route.actives * groups, 1, &first, &last);) {
    const int expert = route.active[first / groups], from = first % groups * PANELS;
    const int panels = e.down->outputs / LANES, to = from + PANELS < panels ? from + PANELS : panels;
    float* results = w.slot_results + size_t(route.begin[expert]) * stride;
    product(e.down[expert], of_expert(w.slots_inner, route, expert, inner), from, to,
            [&](int g, int t, F y) { store(results + size_t(t) * stride + g * LANES, y); });
  }
  team.meet();
  float* y = w.scratch[me];
  const F factor = all(layer.residual);
  for (int first, last; team.take(me, tokens, 1, &first, &last);)
    for (int t = first; t < last; t++) {
      float* x = w.x + size_t(t) * stride;
      sum_of_experts(r, layer, route, t, y);
      if (layer.after_mlp.weight) normalize(layer.after_mlp, y, y, width);
      for (int i = 0; i < width; i += LANES) store(x + i, fma(load(y + i), factor, load(x + i)));
    }
  team.meet();
}
