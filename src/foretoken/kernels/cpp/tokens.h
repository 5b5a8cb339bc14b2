// Softmax, sampling and verification of draft tokens. Masses are summed in float32 over blocks of MASS ids (16 lanes),
// and over blocks in float64, in order.
#pragma once

enum { MASS = 256 };

// Store numbers i to i + 15 of a row of V, but none after its end
INLINE void put_at(float* row, int i, int V, F y) {
  if (V - i >= LANES) return store(row + i, y);
  float last[LANES];
  store(last, y);
  memcpy(row + i, last, size_t(V - i) * sizeof(float));
}

// Return the sum of V numbers, computed by make(i), 16 at a time, and write them to `out`, if it is not null. Numbers
// from V on count as zero
template <class Make>
INLINE double mass_of(int V, float* out, const Make& make) {
  double total = 0;
  for (int block = 0; block < V; block += MASS) {
    F sums = all(0.0f);
    for (int i = block; i < V && i < block + MASS; i += LANES) {
      const F y = V - i < LANES ? between(make(i), all(0.0f), 0, V - i) : make(i);
      sums = add(sums, y);
      if (out) put_at(out, i, V, y);
    }
    total += double(sum(sums));
  }
  return total;
}
// Load numbers i to i + 15 of a row of V; zeros from V on
INLINE F numbers_at(const float* row, int i, int V) {
  if (V - i >= LANES) return load(row + i);
  float last[LANES] = {};
  memcpy(last, row + i, size_t(V - i) * sizeof(float));
  return load(last);
}
INLINE void scale_row(float* row, int V, float factor) {
  for (int i = 0; i < V; i += LANES) put_at(row, i, V, mul(numbers_at(row, i, V), all(factor)));
}

// Turns logits into masses: exp(factor x - top) - exp(-87); exponential() clamps at -87, so that the least mass is 0
struct Softening {
  F factor, top, floor;
  F mass(F x) const { return sub(exponential(sub(mul(x, factor), top)), floor); }
};

INLINE float largest_of(const float* x, int V) {
  const F lowest = all(-INFINITY);
  F most_of = lowest;
  for (int i = 0; i < V; i += LANES) most_of = most(between(numbers_at(x, i, V), lowest, 0, V - i), most_of);
  return largest(most_of);
}

struct Candidate {
  float x;
  int id;
};

// Order by logit, descending, then by id, descending
static int compare(const void* a, const void* b) {
  const Candidate &one = *(const Candidate*)a, &other = *(const Candidate*)b;
  if (one.x != other.x) return one.x > other.x ? -1 : 1;
  return other.id - one.id;
}

struct Edge {
  float least;  // smallest remaining logit
  int dropped;  // number of ids with this logit that are removed: the lowest ids
};

// Apply top-k, then top-p, to sorted candidates, and write the edge. Return false if more candidates are needed.
// every: no other ids have mass
static bool cut(const Softmax& s, const Softening& soft, const Candidate* found, int count, bool every, double total,
                Edge* edge) {
  int kept = count;
  if (s.top_k && s.top_k <= count) {
    for (kept = s.top_k; kept < count && found[kept].x == found[s.top_k - 1].x;) kept++;
    every = true;
  }
  const auto mass = [&](int i) {
    float lanes[LANES];
    store(lanes, soft.mass(all(found[i].x)));
    return double(lanes[0]);
  };
  if (s.top_k) {
    total = 0;
    for (int i = 0; i < kept; i++) total += mass(i);
  }
  int stay = kept;
  if (s.top_p < 1) {
    double sum = 0;
    for (stay = 0; stay < kept;) {
      sum += mass(stay++);
      if (total - sum <= (1 - s.top_p) * total) break;
      if (stay == kept && !every) return false;
    }
  }
  edge->least = found[stay - 1].x;
  edge->dropped = 0;
  for (int i = stay; i < kept && found[i].x == edge->least; i++) edge->dropped++;
  return true;
}

// Find the edge of a row from its most probable ids, taking more until they suffice. Return false if memory does not
// suffice
static bool find_edge(const Softmax& s, const Softening& soft, const float* x, float top, double total, Edge* edge) {
  Candidate* found = (Candidate*)malloc(size_t(s.V) * sizeof(Candidate));
  if (!found) return false;
  for (float apart = 8;; apart *= 2) {
    const bool every = apart > 88;  // ids further below the largest logit have no mass
    const float least = top - apart * s.temperature;
    int count = 0;
    for (int i = 0; i < s.V; i += 4 * LANES) {
      if (s.V - i >= 4 * LANES) {
        const F a = most(load(x + i), load(x + i + LANES));
        const F b = most(load(x + i + 2 * LANES), load(x + i + 3 * LANES));
        if (!(largest(most(a, b)) >= least)) continue;
      }
      for (int j = i; j < s.V && j < i + 4 * LANES; j++)
        if (x[j] >= least) found[count++] = {x[j], j};
    }
    if (!every && s.top_k > count) continue;
    qsort(found, size_t(count), sizeof(Candidate), compare);
    if (cut(s, soft, found, count, every, total, edge)) break;
  }
  free(found);
  return true;
}

// Write the distribution of logits at a temperature, after top-k, top-p and min-p; all NaN if the logits contain NaN or
// +inf, or only -inf. Return false if memory does not suffice
static bool softmax_row(const Softmax& s, const float* x, float* p) {
  const int V = s.V;
  const float top = largest_of(x, V), factor = 1.0f / s.temperature;
  const Softening soft = {all(factor), all(top * factor), exponential(all(-87.0f))};
  double total = mass_of(V, p, [&](int i) { return soft.mass(numbers_at(x, i, V)); });
  if (!(total > 0)) total = NAN;
  const bool filtered = s.top_k || s.top_p < 1 || s.min_p > 0;
  if (filtered && total > 0) {
    Edge edge = {-INFINITY, 0};
    if ((s.top_k || s.top_p < 1) && !find_edge(s, soft, x, top, total, &edge)) return false;
    const F least = all(edge.least), rarest = all(s.min_p);
    mass_of(V, p, [&](int i) {
      const F y = numbers_at(p, i, V);
      return at_least(y, rarest, at_least(numbers_at(x, i, V), least, y));
    });
    for (int i = 0; edge.dropped; i++)
      if (x[i] == edge.least) p[i] = 0, edge.dropped--;
    total = mass_of(V, nullptr, [&](int i) { return numbers_at(p, i, V); });
  }
  scale_row(p, V, float(1 / total));
  return true;
}

// Return the first id at which the cumulative sum of the masses, computed by `make`, exceeds u times their total, which
// is written to `mass`; an arbitrary id if the total is not positive
template <class Make>
INLINE int locate(int V, double u, double* mass, const Make& make) {
  const double total = *mass = mass_of(V, nullptr, make);
  double mark = u * total < nextafter(total, 0) ? u * total : nextafter(total, 0), before = 0;
  int block = 0;
  for (; block + MASS < V; block += MASS) {
    const double after = before + mass_of(MASS, nullptr, [&](int i) { return make(block + i); });
    if (after > mark) break;
    before = after;
  }
  float inner[MASS] = {};
  const int n = V - block < MASS ? V - block : MASS;
  const double here = mass_of(n, inner, [&](int i) { return make(block + i); });
  double sum = 0, running = 0;
  for (int i = 0; i < n; i++) sum += double(inner[i]);
  mark = (mark - before) / here * sum;  // rescaled: the block's sum in float64 differs a little from that in float32
  mark = mark < nextafter(sum, 0) ? mark : nextafter(sum, 0);
  for (int i = 0; i < n; i++)
    if ((running += double(inner[i])) > mark) return block + i;
  return block + n - 1;
}

// Numbers i to i + 15 of max(0, a p - q); q null: probability 1 for x
INLINE F residual_at(const float* p, const float* q, int x, float a, int i, int V) {
  const F zero = all(0.0f), y = mul(numbers_at(p, i, V), all(a));
  if (q) return most(zero, sub(y, numbers_at(q, i, V)));
  return x >= i && x < i + LANES ? between(zero, y, x - i, x - i + 1) : y;
}

INLINE const float* row_of(const Matrix& m, int row) {
  return m.numbers + row / m.inner * m.of_group + row % m.inner * m.of_part;
}

// The acceptance of a row's draft tokens
struct Judged {
  double *survival, *scale;  // [G]: P(n > i); [G + 1]: factor of p in the residual for each n
};

struct DraftRow {  // of a Verification
  const Verification& v;
  int row, length;
  const float* p(int i) const { return row_of(v.p, row * (v.G + 1) + i); }
  const float* q(int i) const { return v.q.numbers ? row_of(v.q, row * v.G + i) : nullptr; }
  int x(int i) const { return int(v.x[row * v.G + i]); }
  double px(int i) const { return double(p(i)[x(i)]); }
  double qx(int i) const { return v.q.numbers ? double(q(i)[x(i)]) : 1; }
};

// "speculative", algorithm 1 of arXiv 2211.17192: each token is accepted with min(1, p / q)
static void judge_alone(const DraftRow& d, Judged to) {
  double survival = 1;
  for (int i = 0; i < d.v.G; i++) {
    const double px = i < d.length ? d.px(i) : 0, qx = i < d.length ? d.qx(i) : 0;
    survival *= qx > 0 ? (px < qx ? px : qx) / qx : 0;
    to.survival[i] = survival;
  }
  for (int i = 0; i <= d.v.G; i++) to.scale[i] = 1;
}

// "block": block verification (arXiv 2403.10444)
static void judge_block(const DraftRow& d, Judged to) {
  const int V = d.v.V;
  double* a = to.scale;  // a_i = min(1, a_{i-1} p / q)
  a[0] = 1;
  for (int i = 0; i < d.v.G; i++) {
    const double next = i < d.length && d.qx(i) > 0 ? a[i] * d.px(i) / d.qx(i) : 0;
    a[i + 1] = next < 1 ? next : 1;
  }
  double none = 1;  // probability that no longer block is accepted
  for (int i = d.v.G; i > 0; i--) {
    double h = i == d.length ? a[i] : 0;
    if (i < d.length) {
      const float *p = d.p(i), *q = d.q(i), factor = float(a[i]);
      const int x = d.x(i);
      const double mass = mass_of(V, nullptr, [&](int j) { return residual_at(p, q, x, factor, j, V); });
      const double rest = mass + (1 - a[i]);  // the parentheses ensure rest >= mass
      h = rest > 0 ? mass / rest : 1;
    }
    none *= 1 - h;
    to.survival[i - 1] = 1 - none;
  }
}

// Verify a row. Return false if a draft token is outside the vocabulary
static bool verify_row(const Verification& v, int row) {
  const DraftRow d = {v, row, int(v.lengths[row])};
  for (int i = 0; i < d.length; i++)
    if (v.x[row * v.G + i] < 0 || v.x[row * v.G + i] >= v.V) return false;
  const Judged judged = {v.survival + size_t(row) * v.G, v.scale + size_t(row) * (v.G + 1)};
  (v.rule == BLOCKS ? judge_block : judge_alone)(d, judged);
  int n = 0;
  for (int i = 0; i < v.G; i++) n += v.accept[row] < judged.survival[i];
  v.n[row] = n;
  const float *p = d.p(n), *q = n < d.length ? d.q(n) : nullptr, a = float(judged.scale[n]);
  const int V = v.V, x = n < d.length ? d.x(n) : -1;
  double* mass = v.masses + row;
  *mass = 0;
  if (n < d.length)
    v.t[row] = locate(V, v.next[row], mass, [&](int i) { return residual_at(p, q, x, a, i, V); });
  if (!(*mass > 0))  // all were accepted; or, by rounding, one was rejected although its residual is empty
    v.t[row] = locate(V, v.next[row], mass, [&](int i) { return numbers_at(p, i, V); });
  for (int i = 0; i < v.G; i++) {
    double both = i < d.length ? d.px(i) : 0;
    if (i < d.length && v.q.numbers)
      both = mass_of(V, nullptr, [&](int j) { return least(numbers_at(d.p(i), j, V), numbers_at(d.q(i), j, V)); });
    v.beta[row * v.G + i] = both < 1 ? both : 1;
  }
  return true;
}

// Softmax of all rows, divided between threads
static void soften(const Softmax& s, Team& team, int me) {
  for (int row, last; team.take(me, s.rows, 1, &row, &last);)
    if (!softmax_row(s, row_of(s.logits, row), s.p + size_t(row) * s.V)) *s.failed = 1;
}
