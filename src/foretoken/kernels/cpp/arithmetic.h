// The arithmetic, defined in ../reference.py to the bit; every instruction set computes the same.
//
// 1. All numbers are float32. A multiply-add rounds once (fma); nothing is contracted, reordered or
//    approximated by the compiler or the processor; subnormals are kept.
// 2. A vector has 16 lanes. Its sum adds lane i + 8 to lane i, then i + 4, i + 2, i + 1. A longer sum is one fma
//    chain per lane, vector after vector, then that sum.
// 3. Activations are rounded by blocks of 32: d = max|x| / 127, q = x * (127 / max|x|) to the nearest even.
// 4. A product with rounded weights goes through its blocks in order: the integer sum of q * w, exact, then
//    fma(sum, d_w * d, y), then, for weights with an offset m, fma(m, d * sum(q), y). A scale d_w of two levels,
//    a small integer times the float16 of a super-block, is exact in float32.
// 5. A product with float32 or bfloat16 weights is one chain of fma along k.
// 6. Attention: a score is one chain of fma along the head's dimension; positions go in blocks of BLOCK,
//    each with its own maximum, and blocks are joined in order (attention.h).
// 7. exp is a polynomial of degree 5 after reduction by powers of two; tanh, sigmoid, gelu and erf come from it.
// 8. A recurrence goes token by token (recurrence.h); a state that a row goes back to is made of the updates that are
//    kept, by the same multiply-adds.
// So what is computed of a token depends on its sequence alone: not on the pass, the rows beside it, threads,
// tiles, or the processor.
#pragma once
#include <stdint.h>

enum { LANES = 16, BLOCK_OF_WEIGHTS = 32, PAGE = 16, BLOCK = 128 };

// Left to itself, a compiler calls the inner loops' parts, whose sums then go through memory
#define INLINE static inline __attribute__((always_inline))
