// A network as the library knows it: plain records, filled by ../library.py. Pointers are to memory that Python
// owns (mapped files, arrays) and keeps for as long as the network.
#pragma once
#include <stdint.h>

#include "arithmetic.h"

// How weights are stored, in panels of 16 outputs (../../models/native/packing.py): numbers k by k, integers by blocks of 32,
// each its 16 scales, its 16 offsets if it has some, and its integers, four of an output together.
enum Kind {
  FLOAT32 = 0,
  BFLOAT16 = 1,
  FLOAT16 = 2,
  INT8 = 3,  // w + zero in a byte
  INT6 = 4,  // the lower four bits as INT4 has them, then the others: of one weight in eight side by side
  INT5 = 5,
  INT4 = 6,  // w + zero in four bits: numbers 0 to 15 of a block low, 16 to 31 high
  CODE4 = 7, // as INT4, of which CODES has the integers
  FP4 = 8    // as INT4, of which FLOATS has the numbers of OCP's E2M1, doubled
};
// The form of rounded weights: flags
enum Form {
  OFFSETS = 1,  // w = scale * integer + offset; the zero is 0, else half the range
  WIDE = 2,     // scales and offsets are float32, else float16
  HALVES = 4,   // a scale and offset for 16 weights, those of the second half behind those of the first
  SUPER = 8     // they are bytes, signed, times a float16 of a super-block of 256, which lies before it
};

struct Weight {
  int32_t kind, outputs, inputs, form;  // outputs: a multiple of 16, those of `rest` included
  const uint8_t* panels;                // null: there is none
  const float* bias;                    // a number for each output, or null
  const Weight* rest;                   // the outputs behind these, stored in another way, or null
};

struct Norm {
  const float* weight;  // null: there is no such norm
  const float* bias;    // of a layer norm, or null
  float epsilon;
  int32_t centred;  // 1: a layer norm, 0: a root-mean-square norm
};

// How queries and keys are normed: flags; without them each head by the same weights, before it is turned
enum HeadNorms {
  EACH = 1,      // each head has weights of its own
  TOGETHER = 2,  // all heads of a token are one
  LAST = 4       // behind the turn
};

enum Activation {
  SILU = 0,
  GELU = 1,
  GELU_TANH = 2,
  RELU = 3,
  RELU_SQUARED = 4,
  XIELU = 5,
  CLAMPED = 6  // of a gate: x * sigmoid(curve[0] x), x at most curve[1]; its partner is held as far and gets 1 added
};

enum { MOST_EXPERTS = 1024 };

// MLPs of which each token has a few, those of the highest scores: the softmax of a router's logits, or their sigmoids.
// The layer's own MLP is one that all tokens have, times the sigmoid of one more logit, or as it is
struct Experts {
  int32_t count, chosen;          // 0: there are none
  int32_t sigmoids;               // 1: scores are sigmoids
  int32_t groups, chosen_groups;  // experts are chosen from the groups whose two best add up to most; 1: all are one
  int32_t normalized;             // 1: the weights of those chosen add up to `scale`, 0: those of all do
  int32_t shared_gate;            // 1: the router has the logit for the layer's own MLP, behind the others
  float scale;
  const float* added;             // to the scores by which experts are chosen, not weighed; or null
  Weight router;
  const Weight *gate, *up, *down; // [count], all of one shape; stored alike, but for their `rest`
};

// Layers that mix tokens by a short convolution and, behind it, by a recurrence, in place of attention. The product
// `qkv` gives queries, keys and values, which the convolution reads, and gates (LFM2: what the convolution reads is
// the product of the first two of three). A head's numbers are whole vectors.
enum Rule {
  ATTENTION = 0,
  CONVOLUTION = 1,  // nothing behind it
  DELTA = 2,        // S = decay S + k (beta (v - decay S^T k))^T, o = S^T q, of normed queries and keys
  SCAN = 3          // S = decay S + k (dt v)^T, o = S^T q + skip v (Mamba2)
};
// Tokens behind the base of a row, at most; the ring of what is kept of them has room for those that a convolution reads
// before them, too. REWIND: how far a row can go back at least, behind a pass of no more tokens
enum { RING = 72, REACH = 64, REWIND = 32 };

struct Recurrence {
  int32_t rule, taps;      // taps: tokens that the convolution reads
  int32_t key_heads, key_width;  // as they are stored: a multiple of 16; heads and width of values are the layer's
  int32_t groups, count;   // of the norm of outputs; numbers of a group that are none of the padding
  int32_t gate_first;      // 1: the norm reads what is gated, 0: its result is
  float epsilon;           // of that norm
  float query_scale;       // of normed queries
  float beta_scale, least_step, most_step;
  const float* filters;    // [taps, channels]
  const float* filter_bias;  // [channels], or null
  const float *decay, *step_bias, *skip;  // [heads], padded to a vector; skip: or null
  const float* norm;       // [heads, width], or null: outputs are gated alone
  Weight steps;            // of the decays (dt), then, at a vector, of beta
  int64_t at;              // where the layer's part of a row's memory begins, in numbers
};

// What a row keeps for a layer of recurrence begins with this, HEADER numbers. Behind it come a ring of the convolution's
// inputs, [RING, channels], then, for each head, of panels of 16 columns, the states [heads, width / 16, key_width, 16]
// behind `base` and behind `head` tokens, then rings of keys [RING, key_heads, key_width], of the updates u of
// S = decay S + k u^T, [RING, heads, width], and of decays [RING, heads in full vectors]
struct RowStates {
  int64_t base, head;  // tokens; a head of more than the row has means nothing
};
enum { HEADER = 16 };

// Attention in which latents are cached in place of keys and values. `qkv` gives queries, or their latents, then the
// latent that `of_keys` norms and a key that is turned, each padded to full vectors; a layer's width is of the last two,
// and it has one head of keys. Queries of a head: those that its `keys` multiply, then those that are turned
struct Latent {
  int32_t rank, query_rank;     // numbers of a latent; of the latents that `of_queries` norms. 0: there are none
  Weight queries;               // of such latents, or panels null: `qkv` gives queries
  const Weight *keys, *values;  // [heads], each [rank, ..] and [.., rank]
};

struct Layer {
  Norm before_attention, after_attention, before_mlp, after_mlp, of_queries, of_keys, of_values;
  Weight qkv, out, gate, up, down;  // gate.panels null: a plain MLP of up and down
  int32_t heads, kv_heads, width;   // width: of a head
  int32_t rotary, query_rotary;     // which table of the pass turns keys and queries, or -1
  int32_t rotated;                  // numbers of a head that are turned
  int32_t interleaved;              // 1: pairs are neighbours, 0: half a head apart
  int32_t window;                   // positions that a token attends to, itself included; 0: all
  int32_t activation;
  int32_t parallel;                 // 1: attention and MLP read the same state
  float scale, softcap, residual;
  float clip;           // queries, keys and values lie between it and its negative; 0: none
  float factor;         // of all states behind the layer
  float curve[3];       // of XIELU: of squares above zero, of exponentials below, and of x; of CLAMPED
  const float* sinks;   // `heads` floats, or null
  const float* slopes;  // of ALiBi, `heads` floats, or null
  // where the first head's keys lie from a page's address, how far behind them its values, and how far the next
  // head's keys: in numbers
  int64_t keys, values, step;
  int32_t norms;        // of queries and keys: flags
  int32_t halved;       // 1: keys and values are stored in float16, 0: in float32
  int32_t source;       // 1: it attends to keys and values that the encoder made of the row's source
  int32_t borrowed;     // 1: to those of an earlier layer, whose place it has
  int32_t added_first;  // 1: the norms behind attention and MLP read what these were added to
  int32_t bias;         // which table of the pass is added to its scores, from 1 on; 0: none
  int32_t gate_of_heads; // 1: a gate of attention for each head, 0: for each number
  Weight attention_gate; // sigmoids of it multiply what attention gives; panels null: none
  Recurrence recurrence;
  Experts experts;
  Latent latent;
  // An MLP of its own part of a token's inputs (see LayerInputs), from number `input` on: out(act(gate x) * part), normed
  Weight input_gate, input_out;  // panels null: it has none
  Norm after_input;
  int32_t input;
  const Layer* beside;  // a recurrence that reads what attention reads, and is added too; or null
};

// What all layers read beside states (Gemma 3n and 4): of each token a row of a table, and a product with its embedding
// whose part for a layer is normed; their sum
struct LayerInputs {
  int32_t width;       // numbers of a layer, a multiple of 16; 0: there are none
  float table_factor, product_factor, sum_factor;
  Weight table, product;
  Norm norm;
};

struct Network {
  int32_t width, layers, vocabulary, threads;  // vocabulary: rows of the head, a multiple of 16
  int32_t inner, attention, most_tokens;  // widest MLP and attention; tokens of a pass at most
  float embedding_factor, logit_factor, logit_cap;
  Weight embeddings, positions, head;  // positions: learned ones, or panels null
  Norm embedding_norm, last;
  // A layer may lack the output of attention (it then only writes keys and values), or the MLP
  const Layer* layer;
  // A decoder of pairs: a pass gives `beside` numbers and a state for each token, and the first layer attends by both
  // side by side, each normed. 0: tokens are ids
  int32_t beside;
  int32_t before_last;  // 1: the states that `hidden` tells are those before the last norm
  Norm beside_norm;
  int32_t encoder;  // 1: tokens attend to all of their row, of which a pass has every token
  LayerInputs inputs;
};

// One pass: tokens of any rows; those of a row lie together, in order.
struct Pass {
  int32_t tokens, needed, rows, tables;
  const int32_t* ids;         // [tokens], or
  const float* given;         // [tokens, beside + width]; of an encoder, states in place of embeddings
  const int32_t* at;          // [tokens], positions
  const int32_t* turn;        // [tokens], each one's row of the rotary tables
  const int32_t* row;         // [rows + 1], where each row's tokens begin
  void* const* const* pages;  // [rows], each a list of pages of PAGE positions
  const float* const* rotary; // [tables], each [.., rotated]: cosines, then sines
  const int32_t* need;        // [needed], tokens whose logits are asked for, ascending
  const int32_t* place;       // [needed], the row of `logits` and of `hidden` for each
  float* logits;              // [.., vocabulary], or null
  float* hidden;              // [.., width], what the head reads, or null
  // [layers + 2], each null or rows of `width` numbers, tap_stride apart, by token: what a layer reads, the last one gives, and that normed
  float* const* taps;
  int64_t tap_stride;
  void* const* const* sources;  // [rows], pages of each row's source, or null
  const int32_t* source_length; // [rows]
  // Tables of biases by distance, [heads, bias_stride]: number bias_reach + d of a head is added to the score of a
  // key d positions behind the query
  const float* const* biases;
  int64_t bias_reach, bias_stride;
  float* const* states;  // [rows], the memory of each row's recurrences, or null
  const int32_t* ends;   // [tokens], the position up to, not including, which each attends, or null: its own, included
  const float* const* added;  // [layers], each null or [tokens, width], added to what a layer gives; or null
};

// Rows of numbers: row r is part r % inner of group r / inner
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
  int32_t* failed;  // 0, or 1 where memory did not suffice
};

struct Draws {  // a token of each row
  int32_t rows, V;
  Matrix p;
  const double* u;  // [rows], in [0, 1)
  int64_t* ids;     // [rows]
  double* masses;   // [rows], of p
};

enum { ALONE_EACH = 0, BLOCKS = 1 };  // rules: each draft token by itself, or the longest block

struct Verification {
  int32_t rule, rows, G, V;
  Matrix p, q;                         // of [rows, G + 1] and [rows, G]; q null: draft tokens are certain
  const int64_t *x, *lengths;          // [rows, G], draft tokens; [rows], how many
  const double *accept, *next;         // [rows], numbers in [0, 1)
  double *survival, *scale;            // [rows, G], [rows, G + 1]
  int64_t *n, *t;                      // [rows]: accepted, and the token after them
  double *beta, *masses;               // [rows, G]: sum min(p, q); [rows]: of what t was drawn from
};

// What a decoder of pairs reads of tokens: their embeddings, and the target's states joined
struct Pairs {
  int32_t tokens, beside, width, kind;  // of an embedding; of states joined; how embeddings are stored
  const Weight* join;
  const int64_t* ids;                   // [tokens]
  const void* embeddings;               // [V, beside]
  const float* states;                  // [tokens, join's inputs]
  float* joined;                        // [tokens, join's outputs]
  float* given;                         // [tokens, beside + width]
};

// The draft tokens of `rows` rows after a pass, whose arrays are used again. Row b's logits and hidden state are
// at place b
struct Chain {
  int32_t rows, steps, wide, kind;  // tokens of a row at most; ids of q; how embeddings are stored
  const int32_t* budget;            // [rows], tokens of each
  const int32_t *next, *apart;      // [rows], the position of its first token; rows of the rotary tables ahead of it
  void* const* const* pages_of;     // [rows]
  void* const* const* sources_of;   // [rows], or null where rows have no sources
  float* const* states_of;          // [rows], or null where rows have no recurrences
  const int32_t* length_of;         // [rows], of these
  Softmax choice;                   // of V ids; its logits and p are not read
  const double* u;                  // [steps, rows], numbers to draw by
  const int64_t* ids;               // [V], the target's ids, or null: the same
  const void* embeddings;           // [wide, beside], of a decoder of pairs
  int64_t* tokens;                  // [rows, steps], the target's ids
  float* tops;                      // [rows, steps], the largest logits
  double* masses;                   // [rows, steps]
  float *q, *narrow;                // [rows, steps, wide], zeros where ids are given, or null: likeliest tokens; [V]
  // those of the pass
  void* const** pages;
  void* const** sources;
  float** states;
  int32_t* source_length;
  int32_t *id, *at, *turn, *row, *need, *place;
  float* given;                     // [rows, beside + width]
};
