// Attention over pages of 16 positions. Keys of a head are [width, 16], so that a vector holds the scores of 16
// positions; values are [16, width padded to full vectors].
//
// Positions are taken in blocks of BLOCK, counted from position 0 in every pass. Of each block and query, a "part" is
// computed: the maximum score, the sum of weights and the weighted sum of values. Parts are joined in order.
//
// Keys and values are float32, or float16 if the model's weights are quantized.
#pragma once

// Computed at a time: queries for each loaded key or value, pages of keys, vectors of values
#if defined(FORETOKEN_AVX512)
enum { QUERIES = 6, PAGES = 2, COLUMNS = 2 };
#else
enum { QUERIES = 4, PAGES = 1, COLUMNS = 1 };
#endif

INLINE F stored(const float* p) { return load(p); }
INLINE F stored(const uint16_t* p) { return from_half(p); }

static inline int whole_vectors(int n) { return (n + LANES - 1) / LANES * LANES; }

// Size of a part: maximum, sum of weights, and, from number LANES on, weighted sums of values
static inline size_t part_floats(int width) { return LANES + whole_vectors(width); }

// Join the part of the next block, `later`, to `memory`, that of all blocks before it
static void join(float* memory, const float* later, int width) {
  const float most = memory[0] > later[0] ? memory[0] : later[0];
  float factors[2 * LANES];
  store(factors, exponential(all(memory[0] - most)));
  store(factors + LANES, exponential(all(later[0] - most)));
  const F before = all(factors[0]), after = all(factors[LANES]);
  memory[0] = most;
  memory[1] = fmaf(later[1], factors[LANES], memory[1] * factors[0]);
  for (int i = LANES; i < LANES + whole_vectors(width); i += LANES)
    store(memory + i, fma(load(later + i), after, mul(load(memory + i), before)));
}

// Write the result of a query: the weighted values divided by the sum of weights, including the sink's
static void finish(const float* memory, const float* sink, float* result, int width) {
  float total = memory[1], factor = 1.0f;
  if (sink) {
    const float most = memory[0] > *sink ? memory[0] : *sink;
    float factors[2 * LANES];
    store(factors, exponential(all(memory[0] - most)));
    store(factors + LANES, exponential(all(*sink - most)));
    factor = factors[0];
    total = fmaf(total, factor, factors[LANES]);
  }
  const F inverse = all(factor / total);
  float last[LANES];
  for (int i = 0; i < width; i += LANES) {
    const F y = mul(load(memory + LANES + i), inverse);
    if (i + LANES <= width) {
      store(result + i, y);
    } else {
      store(last, y);
      memcpy(result + i, last, size_t(width - i) * sizeof(float));
    }
  }
}

struct Query {
  const float* x;  // [width], scaled
  int first, last; // it attends to positions first to last - 1 of the block
  float slope;     // of ALiBi
  int at;          // its position
  const float* bias;  // [positions], or null
  float* part;        // result for the block
};

// The scores of n queries with the keys of `count` pages, from page `page` on. The processor cannot predict where the
// next page is: while keys are loaded, the values of the same page are prefetched, and while values are loaded, the
// keys of the next block
template <class T, int n, int count>
INLINE void scores_of_pages(const Layer& layer, T* const* pages, size_t keys, int start,
                            const Query* queries, int page, float* scores) {
  F y[count][n];
  const T* k[count];
  const int width = layer.width;
  for (int p = 0; p < count; p++) {
    k[p] = pages[page + p] + keys;
    for (int i = 0; i < n; i++) y[p][i] = all(0.0f);
  }
  for (int d = 0; d < width; d++)
    for (int p = 0; p < count; p++) {
      if (sizeof(T) == sizeof(float) || d % 2 == 0) prefetch(k[p] + layer.values + size_t(d) * PAGE);
      const F each = stored(k[p] + size_t(d) * PAGE);
      for (int i = 0; i < n; i++) y[p][i] = fma(all(queries[i].x[d]), each, y[p][i]);
    }
  for (int p = 0; p < count; p++)
    for (int i = 0; i < n; i++) {
      F each = y[p][i];
      if (layer.softcap != 0.0f) each = capped(each, layer.softcap);
      if (layer.slopes) {
        float distance[LANES];
        for (int j = 0; j < LANES; j++) distance[j] = float((page + p) * PAGE + j - queries[i].at);
        each = fma(all(queries[i].slope), load(distance), each);
      }
      if (queries[i].bias) each = add(each, load(queries[i].bias + (page + p) * PAGE));
      store(scores + i * BLOCK + ((page + p) * PAGE - start), each);
    }
}

// The scores [n, BLOCK] of n queries in the block that begins at position `start`
template <class T, int n>
INLINE void scores_of(const Layer& layer, T* const* pages, size_t keys, int start,
                      const Query* queries, int first, int last, float* scores) {
  int page = first / PAGE;
  const int end = (last + PAGE - 1) / PAGE;
  for (; page + PAGES <= end; page += PAGES)
    scores_of_pages<T, n, PAGES>(layer, pages, keys, start, queries, page, scores);
  for (; page < end; page++)
    scores_of_pages<T, n, 1>(layer, pages, keys, start, queries, page, scores);
}

// Replace scores by weights, and write the part's maximum and sum
static void weigh(const Query& query, int start, float* scores) {
  const int from = query.first - start, to = query.last - start;
  const F lowest = all(-INFINITY);
  F highest = lowest;
  for (int j = from / LANES * LANES; j < to; j += LANES)
    highest = most(highest, between(load(scores + j), lowest, from - j, to - j));
  const float maximum = largest(highest);
  F total = all(0.0f);
  for (int j = from / LANES * LANES; j < to; j += LANES) {
    const F e = exponential(sub(load(scores + j), all(maximum)));
    const F weight = between(e, all(0.0f), from - j, to - j);
    store(scores + j, weight);
    total = add(total, weight);
  }
  query.part[0] = maximum;
  query.part[1] = sum(total);
}

// Add the weighted values of positions first to last - 1 to the parts: `columns` vectors, from number `column` on.
// there: number of pages of the sequence
template <class T, int n, int columns>
INLINE void values_of(int stride, T* const* pages, int there, size_t keys, size_t values, int start,
                      const Query* queries, int first, int last, const float* scores, int column) {
  F y[n][columns];
  for (int i = 0; i < n; i++)
    for (int c = 0; c < columns; c++) y[i][c] = load(queries[i].part + LANES + column + c * LANES);
  for (int j = first; j < last;) {
    const size_t from = size_t(j % PAGE) * stride + column;
    const int later = j / PAGE + BLOCK / PAGE;
    const T* v = pages[j / PAGE] + values + from;
    const T* next = pages[later < there ? later : j / PAGE] + keys + from;
    const int end = (j / PAGE + 1) * PAGE < last ? (j / PAGE + 1) * PAGE : last;
    for (; j < end; j++, v += stride, next += stride) {
      for (int c = 0; c < columns * LANES; c += 64 / int(sizeof(T))) prefetch(next + c);
      F each[columns];
      for (int c = 0; c < columns; c++) each[c] = stored(v + c * LANES);
      for (int i = 0; i < n; i++) {
        const F weight = all(scores[i * BLOCK + j - start]);
        for (int c = 0; c < columns; c++) y[i][c] = fma(weight, each[c], y[i][c]);
      }
    }
  }
  for (int i = 0; i < n; i++)
    for (int c = 0; c < columns; c++)
      store(queries[i].part + LANES + column + c * LANES, y[i][c]);
}

template <class T, int n>
INLINE void all_values(int stride, T* const* pages, int there, size_t keys, size_t values, int start,
                       const Query* queries, int first, int last, const float* scores) {
  if (first >= last) return;
  int column = 0;
  for (; column + COLUMNS * LANES <= stride; column += COLUMNS * LANES)
    values_of<T, n, COLUMNS>(stride, pages, there, keys, values, start, queries, first, last, scores, column);
  for (; column < stride; column += LANES)
    values_of<T, n, 1>(stride, pages, there, keys, values, start, queries, first, last, scores, column);
}

template <class T>
static __attribute__((noinline)) void values_of_one(int stride, T* const* pages, int there, size_t keys,
                                                    size_t values, int start, const Query& query, int first,
                                                    int last, const float* scores) {
  all_values<T, 1>(stride, pages, there, keys, values, start, &query, first, last, scores);
}

template <class T, int n>
static __attribute__((noinline)) void attend_some(const Layer& layer, T* const* pages, int there, size_t keys,
                                                  int start, const Query* queries) {
  float scores[n * BLOCK];
  const int stride = whole_vectors(layer.width);
  const size_t values = keys + layer.values;
  // some queries attend to first..last - 1, all attend to from..to - 1
  int first = queries[0].first, last = queries[0].last, from = first, to = last;
  for (int i = 1; i < n; i++) {
    first = queries[i].first < first ? queries[i].first : first;
    from = queries[i].first > from ? queries[i].first : from;
    last = queries[i].last > last ? queries[i].last : last;
    to = queries[i].last < to ? queries[i].last : to;
  }
  from = from < to ? from : to;
  scores_of<T, n>(layer, pages, keys, start, queries, first, last, scores);
  for (int i = 0; i < n; i++) {
    const Query& q = queries[i];
    weigh(q, start, scores + i * BLOCK);
    for (int c = 0; c < stride; c += LANES) store(q.part + LANES + c, all(0.0f));
    const int before = from < q.first ? q.first : from;
    values_of_one<T>(stride, pages, there, keys, values, start, q, q.first, before, scores + i * BLOCK);
  }
  // positions to which not all queries attend are not given the weight 0: their values may be infinite
  all_values<T, n>(stride, pages, there, keys, values, start, queries, from, to, scores);
  for (int i = 0; i < n; i++) {
    const Query& q = queries[i];
    const int after = to > q.first ? to : q.first;
    values_of_one<T>(stride, pages, there, keys, values, start, q, after, q.last, scores + i * BLOCK);
  }
}

template <class T, int n>
static void attend_up_to(const Layer& layer, T* const* pages, int there, size_t keys, int start,
                         const Query* queries, int count) {
  if constexpr (n > 1)
    if (count < n) return attend_up_to<T, n - 1>(layer, pages, there, keys, start, queries, count);
  attend_some<T, n>(layer, pages, there, keys, start, queries);
}

// Compute the parts of `count` queries for one block, to which each of them attends. there: pages of the sequence
static void attend(const Layer& layer, void* const* pages, int there, size_t keys, int start,
                   const Query* queries, int count) {
  // groups of equal size: each group loads all keys again
  for (int left = (count + QUERIES - 1) / QUERIES; left; left--) {
    const int n = (count + left - 1) / left;
    if (layer.halved)
      attend_up_to<uint16_t, QUERIES>(layer, (uint16_t* const*)pages, there, keys, start, queries, n);
    else
      attend_up_to<float, QUERIES>(layer, (float* const*)pages, there, keys, start, queries, n);
    count -= n;
    queries += n;
  }
}
