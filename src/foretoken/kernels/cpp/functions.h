// exp and functions based on it, on vectors of 16 numbers.
#pragma once

// exp(x) with x clamped to [-87, 88]; NaN for NaN
static inline F exponential(F x) {
  x = least(all(88.0f), most(all(-87.0f), x));
  const F r = whole(mul(x, all(1.44269504f)));
  // ln 2 in two parts, so that `rest` is exact to the last bits
  const F rest = fma(r, all(-1.42860677e-6f), fma(r, all(-0.693145752f), x));
  F p = all(1.98756912e-4f);
  p = fma(p, rest, all(1.39819994e-3f));
  p = fma(p, rest, all(8.33345186e-3f));
  p = fma(p, rest, all(4.16657962e-2f));
  p = fma(p, rest, all(1.66666657e-1f));
  p = fma(p, rest, all(0.5f));
  p = fma(mul(p, rest), rest, rest);
  return mul(add(p, all(1.0f)), power(r));
}
static inline F sigmoid(F x) {
  return quot(all(1.0f), add(all(1.0f), exponential(sub(all(0.0f), x))));
}
static inline F tangent(F x) {  // tanh(x)
  return sub(all(1.0f), quot(all(2.0f), add(all(1.0f), exponential(add(x, x)))));
}
// log(1 + exp(x)) = max(x, 0) + log(1 + y), y = exp(-|x|): log(1 + y) = 2 atanh(z), z = y / (2 + y), by its series
static inline F softplus(F x) {
  const F y = exponential(sub(all(0.0f), magnitude(x)));
  const F z = quot(y, add(all(2.0f), y)), squared = mul(z, z);
  F p = all(0.0769230769f);
  p = fma(p, squared, all(0.0909090909f));
  p = fma(p, squared, all(0.111111111f));
  p = fma(p, squared, all(0.142857143f));
  p = fma(p, squared, all(0.2f));
  p = fma(p, squared, all(0.333333333f));
  p = fma(p, squared, all(1.0f));
  return add(most(all(0.0f), x), mul(add(z, z), p));
}
// erf(x), by Abramowitz and Stegun 7.1.26; the error is at most 1.5e-7
static inline F error_function(F x) {
  const F t = quot(all(1.0f), fma(all(0.3275911f), magnitude(x), all(1.0f)));
  F p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  const F tail = mul(mul(p, t), exponential(sub(all(0.0f), mul(x, x))));
  return signed_as(most(all(0.0f), sub(all(1.0f), tail)), x);
}
static inline F activated(int activation, const float* curve, F x) {
  switch (activation) {
    case GELU:
      return mul(mul(all(0.5f), x), add(all(1.0f), error_function(mul(x, all(0.707106781f)))));
    case GELU_TANH: {
      const F cubed = mul(mul(x, x), x);
      const F inner = mul(all(0.797884561f), fma(all(0.044715f), cubed, x));
      return mul(mul(all(0.5f), x), add(all(1.0f), tangent(inner)));
    }
    case RELU:
      return most(all(0.0f), x);
    case RELU_SQUARED: {
      const F positive = most(all(0.0f), x);
      return mul(positive, positive);
    }
    case XIELU: {
      const F above = most(all(0.0f), x), below = least(all(0.0f), x);
      const F squares = fma(mul(all(curve[0]), above), above, mul(all(curve[2]), x));
      return fma(all(curve[1]), sub(sub(exponential(below), all(1.0f)), below), squares);
    }
    case CLAMPED: {
      const F held = least(all(curve[1]), x);
      return mul(held, sigmoid(mul(all(curve[0]), held)));
    }
    default:
      return mul(x, sigmoid(x));
  }
}
// The factor of an activated gate, given the output x of `up`: for CLAMPED, x clamped, plus 1
static inline F partner(int activation, const float* curve, F x) {
  if (activation != CLAMPED) return x;
  return add(least(all(curve[1]), most(all(-curve[1]), x)), all(1.0f));
}
static inline F capped(F x, float cap) { return mul(all(cap), tangent(quot(x, all(cap)))); }
