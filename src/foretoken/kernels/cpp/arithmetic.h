// The arithmetic. ../reference.py defines it; every instruction set gives the same bits.
//
// 1. All numbers are float32. A multiply-add rounds once (fma). Neither compiler nor processor contracts, reorders or
//    approximates anything, or flushes subnormals to zero.
// 2. A vector has 16 lanes. Its sum adds lane i + 8 to lane i, then i + 4, i + 2, i + 1. A longer sum is one fma
//    chain per lane, vector after vector, then that sum.
// 3. Activations are quantized in blocks of 32: d = max|x| / 127, q = x * (127 / max|x|), rounded half to even.
// 4. A product with quantized weights takes their blocks in order: the exact integer sum of q * w, then
//    fma(sum, d_w * d, y), then, for weights with an offset m, fma(m, d * sum(q), y). A scale d_w of two levels,
//    a small integer times the float16 of a super-block, is exact in float32.
// 5. A product with float weights is one chain of fma along k.
// 6. Attention: a score is one chain of fma along the head's dimension. Positions are taken in blocks of BLOCK,
//    each with its own maximum, and the blocks are joined in order (attention.h).
// 7. exp is a polynomial of degree 5 after reduction by powers of two; tanh, sigmoid, gelu and erf are based on it.
// 8. A recurrence is computed token by token (recurrence.h). After a rollback, a state is recomputed from stored
//    updates by the same multiply-adds.
// The results for a token therefore depend on its sequence alone: not on the other rows of the batch, the split into
// passes, the number of threads, tile sizes, or the processor.
#pragma once
#include <stdint.h>

enum { LANES = 16, BLOCK_OF_WEIGHTS = 32, PAGE = 16, BLOCK = 128 };

// Without this, compilers do not inline the parts of inner loops, and sums pass through memory
#define INLINE static inline __attribute__((always_inline))
