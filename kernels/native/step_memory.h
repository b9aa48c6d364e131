// The buffers in which the operations of a step leave their results for the next ones.
#pragma once

#include "product.h"

namespace {

constexpr long kOwnFloats = 4096;  // up to this many, every thread normalises or forms rows itself

inline long own_formed_floats(bool rounds) { return formed_floats(1, kOwnFloats, rounds); }

// Buffers of a step; `rows` are those of the batch.
struct StepMemory {
  float* x;        // [rows][hidden]
  float* normed;   // [rows][hidden]
  float* joined;   // [rows][query + 2 kv]
  float* mixed;    // [rows][query]
  float* gate_up;  // [rows][2 mlp]
  float* gated;    // [rows][mlp]
  float* last_x;   // [wanted][hidden], if the last layer continues with those alone
  float* last_q;   // [wanted][query]
  float* formed;   // the rows of a product, up to the widest, in the form that it reads (product.h)
  float* own;      // [threads][kOwnFloats]
  float* own_formed;  // [threads][own_formed_floats()]: the same for few rows
  float* carry;    // [threads][kCarryFloats]
  long floats;

  StepMemory(const PmDecoder& model, long rows, int threads, float* base) : floats(0) {
    const long query = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
    auto place = [&](long count) {
      float* at = base ? base + floats : nullptr;
      floats += pieces(count, kLanes) * kLanes;
      return at;
    };
    x = place(rows * model.hidden);
    normed = place(rows * model.hidden);
    joined = place(rows * (query + 2 * kv));
    mixed = place(rows * query);
    gate_up = place(rows * 2 * model.mlp);
    gated = place(rows * model.mlp);
    last_x = place(rows * model.hidden);
    last_q = place(rows * query);
    const long widest = model.mlp > query ? model.mlp : query;
    const bool rounds = rounds_rows(model);
    formed = place(formed_floats(rows, widest > model.hidden ? widest : model.hidden, rounds));
    own = place(threads * kOwnFloats);
    own_formed = place(threads * own_formed_floats(rounds));
    carry = place(threads * kCarryFloats);
  }
};

}  // namespace
