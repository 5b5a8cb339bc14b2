// The records of the C interface, filled by ../library.py. Pointers are to memory that Python owns (mapped files,
// arrays), for as long as the network exists.
#pragma once
#include <stdint.h>

#include "arithmetic.h"

// Storage of weights, in panels of 16 outputs (../../models/native/packing.py). Floats: [inputs, 16]. Integers: blocks
// of 32 inputs, each with 16 scales, 16 offsets if there are any, and its integers, groups of four per output.
enum Kind {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  FLOAT16 = 2,
  INT8 = 3,  // w + zero in a byte
  INT6 = 4,  // the lower four bits as in INT4, then the upper ones
  INT5 = 5,
  INT4 = 6,  // w + zero in four bits: weights 0 to 15 of a block in the low half of a byte, 16 to 31 in the high half
  CODE4 = 7, // as INT4, but indices into CODES
  FP4 = 8    // as INT4, but indices into FLOATS: OCP's E2M1, doubled
};
// The form of quantized weights: flags
enum Form {
  OFFSETS = 1,  // w = scale * integer + offset, with zero 0; else the zero is half the range
  WIDE = 2,     // scales and offsets are float32, else float16
  HALVES = 4,   // scales and offsets for 16 weights: those of the first half of a block, then of the second
  SUPER = 8     // scales and offsets are int8, times a float16 of their super-block of 256 weights, which precedes it
};

struct Weight {
  int32_t kind, outputs, inputs, form;  // outputs: a multiple of 16, those of `rest` included
  const uint8_t* panels;                // null: there is none
  const float* bias;                    // [outputs], or null
  const Weight* rest;                   // the last outputs, in another storage, or null
};

struct Norm {
  const float* weight;  // null: there is no such norm
  const float* bias;    // of a layer norm, or null
  float epsilon;
  int32_t centred;  // 1: a layer norm, 0: a root-mean-square norm
};

// Norms of queries and keys: flags. Without any, all heads have the same weights and are normed before the rotation
enum HeadNorms {
  EACH = 1,      // each head has its own weights
  TOGETHER = 2,  // one norm over all heads of a token
  LAST = 4       // after the rotation
};

enum Activation {
  SILU = 0,
  GELU = 1,
  GELU_TANH = 2,
  RELU = 3,
  RELU_SQUARED = 4,
  XIELU = 5,
  CLAMPED = 6  // x * sigmoid(curve[0] x) of a gate, x at most curve[1]; `up` is clamped to +-curve[1], plus 1
};

enum { MOST_EXPERTS = 1024 };

// A mixture of experts. A token's experts are those with the highest scores: the softmax of the router's logits, or
// their sigmoids. If the layer also has an MLP, it is shared by all tokens
struct Experts {
  int32_t count, chosen;          // experts, experts of a token; 0: none
  int32_t sigmoids;               // 1: scores are sigmoids
  int32_t groups, chosen_groups;  // experts are chosen from the groups whose two best scores have the largest sums
  int32_t normalized;             // 1: the weights of the chosen experts add up to `scale`; 0: not normalized
  int32_t shared_gate;            // 1: the router's last logit, after a sigmoid, multiplies the shared MLP's output
  float scale;
  const float* added;             // [count], to the scores, for the choice but not for the weights; or null
  Weight router;
  const Weight *gate, *up, *down; // [count], all of the same shape and storage, but for their `rest`
};

// Layers with a short convolution and a recurrence in place of attention. `qkv` gives queries, keys and values, which
// are the convolution's inputs, and gates (LFM2: the convolution's input is the product of the first two of three
// parts). Heads are padded to full vectors.
enum Rule {
  ATTENTION = 0,
  CONVOLUTION = 1,  // without a recurrence
  DELTA = 2,        // S = decay S + k (beta (v - decay S^T k))^T, o = S^T q, of normed queries and keys
  SCAN = 3          // S = decay S + k (dt v)^T, o = S^T q + skip v (Mamba2)
};
// REACH: maximum number of tokens after the base state, whose updates are stored. RING: size of the rings of updates
// and of the convolution's inputs, which also hold earlier tokens in the convolution's window. REWIND: after a pass of
// at most REWIND tokens, a sequence can be rolled back to REWIND tokens before it
enum { RING = 72, REACH = 64, REWIND = 32 };

struct Recurrence {
  int32_t rule, taps;      // taps: tokens in the convolution's window
  int32_t key_heads, key_width;  // width padded to a multiple of 16; heads and width of values are the layer's
  int32_t groups, count;   // groups of the norm of outputs; numbers of a group without padding
  int32_t gate_first;      // 1: outputs are gated before that norm, 0: after it
  float epsilon;           // of that norm
  float query_scale;       // of normed queries
  float beta_scale, least_step, most_step;
  const float* filters;    // [taps, channels]
  const float* filter_bias;  // [channels], or null
  const float *decay, *step_bias, *skip;  // [heads], padded to full vectors; skip may be null
  const float* norm;       // [heads, width], or null: outputs are gated but not normed
  Weight steps;            // logits of decays (dt), then, from the next full vector on, of beta
  int64_t at;              // offset of the layer's part in a sequence's memory, in numbers
};

// A sequence's memory for a recurrent layer begins with this header of HEADER numbers. Then follow: a ring of the
// convolution's inputs [RING, channels]; the states S after `base` and after `head` tokens, each
// [heads, width / 16, key_width, 16]; rings of keys [RING, key_heads, key_width], of the updates u in
// S = decay S + k u^T [RING, heads, width], and of decays [RING, heads padded to full vectors]
struct RowStates {
  int64_t base, head;  // numbers of tokens; the head state is invalid if `head` exceeds the sequence's length
};
enum { HEADER = 16 };

// Attention by latents (latent.h), which are cached in place of keys and values. `qkv` gives queries or their latents,
// then a token's latent, normed by `of_keys`, and its rotary key, each padded to full vectors. The layer has one key
// head; its width is that of latent and rotary key. A head's query is the part that `keys` multiplies, then the rotary
// part
struct Latent {
  int32_t rank, query_rank;     // size of a latent (0: other attention); of latents of queries, normed by `of_queries`
  Weight queries;               // makes queries from their latents; panels null: `qkv` gives queries
  const Weight *keys, *values;  // [heads], each [rank, ..] and [.., rank]
};

// Attention of a block of tokens, all of one row and in one pass, as block drafts have it: flags
enum BlockAttention {
  TO_BLOCK_END = 1,      // each token attends to all tokens of the block
  FROM_BLOCK_START = 2   // the window is counted from the block's first token
};

// Two convolutions over the tokens of a block, before and after attention or the MLP, whose filters depend on the
// token (DFlash2): number i of token t is the sum over taps k of (base[k][i] + delta[k][i / group]) * x[t - k][i]
struct BlockConvolution {
  int32_t taps, group;  // taps: 0: there is none; group: numbers that share a delta
  const float* base;    // [2, taps, width]
  Weight deltas;        // its outputs are deltas [2, taps, width / group]
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys, of_values;
  Weight qkv, out, gate, up, down;  // gate.panels null: a plain MLP of up and down
  int32_t heads, kv_heads, width;   // width: of a head
  int32_t rotary, query_rotary;     // rotary table of keys and of queries, an index in Pass::rotary; -1: no rotation
  int32_t rotated;                  // numbers of a head that are rotated
  int32_t interleaved;              // 1: pairs are neighbours, 0: half a head apart
  int32_t window;                   // positions that a token attends to, itself included; 0: all
  int32_t activation;
  int32_t parallel;                 // 1: attention and MLP have the same input
  float scale, softcap, residual;   // of scores; of scores, 0: none; factor of the outputs of attention and MLP
  float clip;           // queries, keys and values are clamped to +-clip; 0: not
  float factor;         // multiplies the layer's output
  float curve[3];       // XIELU: factors of squares above zero, of exponentials below, and of x; CLAMPED: slope, limit
  const float* sinks;   // `heads` floats, or null
  const float* slopes;  // of ALiBi, `heads` floats, or null
  // offsets in numbers: of the first head's keys from a page's address, of a head's values from its keys, of the next
  // head's keys from a head's keys
  int64_t keys, values, step;
  int32_t norms;        // of queries and keys: flags of HeadNorms
  int32_t halved;       // 1: keys and values are stored in float16, 0: in float32
  int32_t source;       // 1: cross-attention, to the pages of the row's source
  int32_t borrowed;     // 1: it reads the keys and values of an earlier layer, whose offsets it has
  int32_t added_first;  // 1: the norms after attention and MLP come after the residual addition
  int32_t bias;         // table of Pass::biases that is added to scores, counted from 1; 0: none
  int32_t block;        // flags of BlockAttention
  int32_t gate_of_heads; // 1: a gate of attention for each head, 0: for each number
  Weight attention_gate; // its sigmoids multiply attention's result; panels null: none
  Recurrence recurrence;
  Experts experts;
  Latent latent;
  // It adds norm(out(act(gate x) * part)); `part` is the token's LayerInputs from number `input` on
  Weight input_gate, input_out;  // panels null: none
  Norm after_input;
  int32_t input;
  BlockConvolution attention_conv, mlp_conv;
  const Layer* beside;  // a recurrence parallel to attention, with the same input; or null
};

// Per-layer inputs (Gemma 4): of each token, the sum of a row of a table and of a projection of its embedding, which is
// normed layer by layer
struct LayerInputs {
  int32_t width;       // numbers of one layer, a multiple of 16; 0: none
  float table_factor, product_factor, sum_factor;
  Weight table, product;
  Norm norm;
};

struct Network {
  int32_t width, layers, vocabulary, threads;  // vocabulary: padded to a multiple of 16
  int32_t inner, attention, most_tokens;  // widest MLP and attention; maximum number of tokens in a pass
  float embedding_factor, logit_factor, logit_cap;
  Weight embeddings, positions, head;  // positions: learned ones, or panels null
  Norm embedding_norm, last;
  // A layer may lack `out` (it then only writes keys and values), or the MLP
  const Layer* layer;
  // A draft of pairs: a token's input is an embedding of `beside` numbers and a hidden state. The first layer's
  // attention takes both, normed; or, if there is a weight `pair`, the first layer takes its product of both, normed.
  // 0: inputs are ids
  int32_t beside;
  int32_t before_last;  // 1: Pass::hidden receives states before the last norm
  Norm beside_norm, state_norm;  // state_norm: before `pair`
  Weight pair;
  int32_t encoder;  // 1: tokens attend to all tokens of their row, which are all in the same pass
  // A token attends only to the first blocks of BLOCK positions and the last ones, its own included; last_blocks 0: all
  int32_t first_blocks, last_blocks;
  LayerInputs inputs;
};

// One forward pass over the new tokens of some sequences, the rows; tokens of a row are consecutive.
struct Pass {
  int32_t tokens, needed, rows, tables;
  const int32_t* ids;         // [tokens]
  const float* given;         // [tokens, beside + width], inputs in place of ids; or null
  const int32_t* at;          // [tokens], positions
  const int32_t* turn;        // [tokens], each token's row of the rotary tables
  const int32_t* row;         // [rows + 1], first token of each row
  void* const* const* pages;  // [rows], each a table of addresses of pages of PAGE positions
  const float* const* rotary; // [tables], each [.., rotated]: cosines, then sines
  const int32_t* need;        // [needed], tokens whose logits are wanted, ascending
  const int32_t* place;       // [needed], their rows in `logits` and `hidden`
  float* logits;              // [.., vocabulary], or null
  float* hidden;              // [.., width], inputs of the head, or null
  // [layers + 2], each null or the hidden states of all tokens, `width` numbers, tap_stride apart: the input of each
  // layer, the output of the last one, and that after the last norm
  float* const* taps;
  int64_t tap_stride;
  void* const* const* sources;  // [rows], pages of each row's source, or null
  const int32_t* source_length; // [rows]
  // Tables of biases by distance, [heads, bias_stride]: number bias_reach + d of a head is added to the score of a
  // key d positions after the query
  const float* const* biases;
  int64_t bias_reach, bias_stride;
  float* const* states;  // [rows], the memory of each row's recurrent states, or null
  const int32_t* ends;   // [tokens], each attends to positions before this one; or null: causal
  const float* const* added;  // [layers], each null or [tokens, width], added to the layer's output; or null
};

// A strided matrix: row r is row r % inner of group r / inner
struct Matrix {
  const float* numbers;  // or null
  int64_t of_group, of_part;
  int32_t inner;
};

struct Softmax {
  int32_t rows, V, threads, top_k;  // 0: no top-k
  float temperature, min_p;
  double top_p;
  Matrix logits;
  float* p;         // [rows, V]
  int32_t* failed;  // 1: not enough memory, else 0
};

struct Draws {  // sampling of a token from each distribution
  int32_t rows, V;
  Matrix p;
  const double* u;  // [rows], in [0, 1)
  int64_t* ids;     // [rows]
  double* masses;   // [rows], of p
};

enum { ALONE_EACH = 0, BLOCKS = 1 };  // rules: "speculative", each draft token by itself; "block"

struct Verification {
  int32_t rule, rows, G, V;
  Matrix p, q;                         // [rows, G + 1, V], [rows, G, V]; q null: draft tokens have probability 1
  const int64_t *x, *lengths;          // [rows, G], draft tokens; [rows], their numbers
  const double *accept, *next;         // [rows], random numbers in [0, 1)
  double *survival, *scale;            // [rows, G], [rows, G + 1], workspace
  int64_t *n, *t;                      // [rows]: number of accepted tokens, and the token after them
  double *beta, *masses;               // [rows, G]: sum min(p, q); [rows]: of the distributions of t
};

// The inputs of a draft of pairs: token embeddings, and the target's hidden states, times `join` unless that is null
struct Pairs {
  int32_t tokens, beside, width, kind;  // beside: width of an embedding; width: of a state; kind: Kind of embeddings
  const Weight* join;
  const int64_t* ids;                   // [tokens]
  const void* embeddings;               // [V, beside]
  const float* states;                  // [tokens, join's inputs]
  float* joined;                        // [tokens, join's outputs]
  float* given;                         // [tokens, beside + width]
};

// The draft tokens of `rows` rows after a pass. The pass writes the logits and hidden state of row b to row b of its
// buffers; its other arrays are reused by the passes after it
struct Chain {
  int32_t rows, steps, wide, kind;  // steps: maximum budget; wide: target's vocabulary; kind: Kind of embeddings
  const int32_t* budget;            // [rows], draft tokens of each
  const int32_t *next, *apart;      // [rows], position of the first draft token; row of the rotary tables less position
  void* const* const* pages_of;     // [rows]
  void* const* const* sources_of;   // [rows], or null: no cross-attention
  float* const* states_of;          // [rows], or null: no recurrences
  const int32_t* length_of;         // [rows], of sources
  Softmax choice;                   // of V ids, the draft's; its `logits` and `p` are not used
  const double* u;                  // [steps, rows], random numbers in [0, 1)
  const int64_t* ids;               // [V], the target's id of each draft id; null: the same
  const void* embeddings;           // [wide, beside], of a draft of pairs
  int64_t* tokens;                  // [rows, steps], the target's ids
  float* tops;                      // [rows, steps], largest logits
  double* masses;                   // [rows, steps], of the distributions
  // q: [rows, steps, wide], zeros on entry if `ids`; null: take the most probable token. narrow: [V], if `ids`
  float *q, *narrow;
  // arrays of the pass
  void* const** pages;
  void* const** sources;
  float** states;
  int32_t* source_length;
  int32_t *id, *at, *turn, *row, *need, *place;
  float* given;                     // [rows, beside + width]
};
