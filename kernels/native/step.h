// A whole forward pass as one parallel region with barriers inside. It computes what the operations
// of linear.h, rows.h, kv_write.h and attention.h compute, in the order of the engine's definition
// (pagemesh/engine/forward.py), and with the same bits. It saves a call and a region per operation,
// and prefetches weights from one operation to the next.
#pragma once

#include <stdlib.h>

#include "clock.h"
#include "kv_write.h"
#include "step_memory.h"

namespace {

constexpr long kTurnRows = 64;     // rows rotated and written at a time
constexpr long kLayerCounters = 7;

struct alignas(64) StepCounter {
  pm::Counter value;
};

struct StepCall {
  const PmDecoder& model;
  const PmPages* const* pages;  // one per layer
  const PmRows& batch;
  const StepMemory& memory;
  StepCounter* counters;  // [layer][kLayerCounters], then one for the head
  const AttentionCall& attention;  // of all rows; pages are those of the first layer
  const AttentionPlan& plan;
  const AttentionCall& last_attention;  // of the wanted rows
  const AttentionPlan& last_plan;
  float* hidden;
  float* logits;    // or null
  double* phase_us;  // [PM_PHASES] or null
};

// What one thread of the region works with.
struct Hand {
  int thread, threads;
  bool row_invariant;
  float* formed;
  float* own_formed;
  float* carry;
  float* own;
  Scratch& scratch;
  double* phase_us;  // null except on the first thread, if asked for
  double since_us;
};

// Ends a phase: waits for all threads, and measures.
void end_phase(Hand& hand, PmPhase phase) {
  pm::barrier();
  if (!hand.phase_us) return;
  const double now = pm::now_us();
  hand.phase_us[phase] += now - hand.since_us;
  hand.since_us = now;
}

inline long share_begin(long count, int thread, int threads) { return count * thread / threads; }

// Calls body(i) for this thread's share of [0, count).
template <typename Body>
void share(const Hand& hand, long count, Body body) {
  const long end = share_begin(count, hand.thread + 1, hand.threads);
  for (long i = share_begin(count, hand.thread, hand.threads); i < end; ++i) body(i);
}

// Returns the rows of x, normalised. Few rows are normalised by every thread for itself, which is
// quicker than a barrier.
const float* norm_step(const StepCall& step, Hand& hand, const float* x, long rows,
                       const float* weight) {
  const long width = step.model.hidden;
  const bool alone = rows * width <= kOwnFloats;
  float* to = alone ? hand.own : step.memory.normed;
  auto body = [&](long row) {
    norm_row(x + row * width, weight, to + row * width, width, step.model.norm_epsilon);
  };
  if (alone) {
    for (long row = 0; row < rows; ++row) body(row);
  } else {
    share(hand, rows, body);
    end_phase(hand, PM_ROWS);
  }
  return to;
}

// What this thread reads first in the product that comes after the current one, to be prefetched.
Next first_unit(const PmMatrix& matrix, const LinearPlan& plan, const Hand& hand) {
  return next_unit(plan, weights_of(matrix), hand.thread);
}

Next first_unit(const PmMatrix& matrix, long rows, const Hand& hand) {
  return first_unit(matrix, plan_product(rows, matrix, hand.row_invariant, hand.threads), hand);
}

RowForm form_of(long rows, const PmMatrix& matrix, const Hand& hand) {
  return form_of(rows, matrix, hand.row_invariant);
}

void run_product(Hand& hand, pm::Counter& work, const LinearCall& call, const LinearPlan& plan,
                 Next after) {
  const bool rounds = call.weights.rounds_rows, formed = call.form != RowForm::kPlain;
  const bool alone = call.rows * call.k <= kOwnFloats &&
                     formed_floats(call.rows, call.k, rounds) <= own_formed_floats(rounds);
  float* rows = alone ? hand.own_formed : hand.formed;
  if (formed && alone) {
    for (long row = 0; row < call.rows; ++row) form_row(call, row, rows);
  } else if (formed) {
    share(hand, call.rows, [&](long row) { form_row(call, row, rows); });
    end_phase(hand, PM_ROWS);
  }
  product_share(call, plan, rows, work, hand.thread, hand.threads, hand.carry, after);
  end_phase(hand, PM_PRODUCTS);
}

// out (+)= x * matrix^T + bias, for contiguous rows.
void product_step(Hand& hand, pm::Counter& work, const float* x, const PmMatrix& matrix,
                  float* out, long rows, bool add, Next after) {
  const LinearCall call{x, matrix.k, weights_of(matrix), matrix.bias, out, matrix.n,
                        rows, matrix.n, matrix.k, add, false, form_of(rows, matrix, hand)};
  run_product(hand, work, call, plan_product(rows, matrix, hand.row_invariant, hand.threads),
              after);
}

// For one KV head of rows [begin, end): normalises queries and keys (where the model does that),
// rotates them, and writes keys and values to their pages.
void turn_unit(const StepCall& step, const PmLayer& layer, const PmPages& pages, long head,
               long begin, long end) {
  const PmDecoder& model = step.model;
  const long width = model.head_dim, half = width / 2, group = model.heads / model.kv_heads;
  const long stride = (model.heads + 2 * model.kv_heads) * width;
  for (long row = begin; row < end; ++row) {
    float* q = step.memory.joined + row * stride + head * group * width;
    float* k = step.memory.joined + row * stride + (model.heads + head) * width;
    if (layer.query_norm) {
      for (long i = 0; i < group; ++i) {
        norm_row(q + i * width, layer.query_norm, q + i * width, width, model.norm_epsilon);
      }
      norm_row(k, layer.key_norm, k, width, model.norm_epsilon);
    }
    const float* cosine = model.cosine + step.batch.position[row] * half;
    const float* sine = model.sine + step.batch.position[row] * half;
    turn_heads(q, group, width, cosine, sine, half);
    turn_heads(k, 1, width, cosine, sine, half);
  }
  const float* keys = step.memory.joined + begin * stride + model.heads * width;
  pm::kv_write_head(&pages, keys, stride, keys + model.kv_heads * width, stride,
                    step.batch.slots + begin, end - begin, head);
}

void turn_step(const StepCall& step, Hand& hand, pm::Counter& work, const PmLayer& layer,
               const PmPages& pages) {
  const long heads = step.model.kv_heads;
  const long units = pieces(step.batch.rows, kTurnRows) * heads;
  long unit, end;
  while (work.take(units, 1, &unit, &end)) {
    const long begin = unit / heads * kTurnRows;
    const long limit = begin + kTurnRows < step.batch.rows ? begin + kTurnRows : step.batch.rows;
    turn_unit(step, layer, pages, unit % heads, begin, limit);
  }
  end_phase(hand, PM_ROWS);
}

void attend_step(Hand& hand, AttentionCall call, const AttentionPlan& plan, const PmPages& pages,
                 StepCounter* counters) {
  call.pages = pages;
  attend(call, plan, counters[0].value, counters[1].value, hand.scratch);
  end_phase(hand, PM_ATTENTION);
}

// Copies the wanted rows of x and q, with which the last layer continues after its K and V.
void narrow_step(const StepCall& step, Hand& hand) {
  const PmDecoder& model = step.model;
  const long hidden = model.hidden, query = model.heads * model.head_dim;
  const long stride = query + 2 * model.kv_heads * model.head_dim;
  share(hand, step.batch.wanted_count, [&](long i) {
    const long row = step.batch.wanted[i];
    memcpy(step.memory.last_x + i * hidden, step.memory.x + row * hidden,
           sizeof(float) * static_cast<size_t>(hidden));
    memcpy(step.memory.last_q + i * query, step.memory.joined + row * stride,
           sizeof(float) * static_cast<size_t>(query));
  });
  end_phase(hand, PM_ROWS);
}

// For widths whose halves share a panel: applies the gate after the product.
void gate_step(const StepCall& step, Hand& hand, long rows) {
  const long mlp = step.model.mlp, vectors = pieces(mlp, kLanes);
  const long begin = share_begin(vectors, hand.thread, hand.threads) * kLanes;
  long end = share_begin(vectors, hand.thread + 1, hand.threads) * kLanes;
  end = end < mlp ? end : mlp;
  for (long row = 0; row < rows; ++row) {
    const float* gate = step.memory.gate_up + row * 2 * mlp;
    gate_row(gate + begin, gate + mlp + begin, step.memory.gated + row * mlp + begin, end - begin);
  }
  end_phase(hand, PM_ROWS);
}

// The gated half of the MLP, into memory.gated.
void gated_step(const StepCall& step, Hand& hand, pm::Counter& work, const float* normed,
                const PmLayer& layer, long rows) {
  const PmMatrix& matrix = layer.gate_up;
  const Next after = first_unit(layer.down, rows, hand);
  if (!can_gate(matrix.n)) {
    product_step(hand, work, normed, matrix, step.memory.gate_up, rows, false, after);
    return gate_step(step, hand, rows);
  }
  const LinearCall call{normed, matrix.k, weights_of(matrix), matrix.bias, step.memory.gated,
                        matrix.n / 2, rows, matrix.n, matrix.k, false, true,
                        form_of(rows, matrix, hand)};
  run_product(hand, work, call,
              plan_gated_product(rows, matrix, hand.row_invariant, hand.threads), after);
}

// Computes one layer; returns false if nothing beyond its K and V is wanted.
bool layer_step(const StepCall& step, Hand& hand, long index) {
  const PmDecoder& model = step.model;
  const PmLayer& layer = model.layers[index];
  const bool last = index + 1 == model.layer_count;
  StepCounter* counters = step.counters + index * kLayerCounters;
  long rows = step.batch.rows;
  float* x = step.memory.x;
  const float* normed = norm_step(step, hand, x, rows, layer.attention_norm);
  product_step(hand, counters[0].value, normed, layer.qkv, step.memory.joined, rows, false,
               first_unit(layer.output, rows, hand));
  turn_step(step, hand, counters[1].value, layer, *step.pages[index]);
  if (last && step.batch.wanted_count < rows) {
    if (step.batch.wanted_count == 0) return false;
    rows = step.batch.wanted_count;
    x = step.memory.last_x;
    narrow_step(step, hand);
  }
  const bool narrowed = x != step.memory.x;
  attend_step(hand, narrowed ? step.last_attention : step.attention,
              narrowed ? step.last_plan : step.plan, *step.pages[index], counters + 2);
  const PmMatrix& gate_up = layer.gate_up;
  const LinearPlan gated =
      plan_gated_product(rows, gate_up, hand.row_invariant, hand.threads);
  product_step(hand, counters[4].value, step.memory.mixed, layer.output, x, rows, true,
               first_unit(gate_up, gated, hand));
  normed = norm_step(step, hand, x, rows, layer.mlp_norm);
  gated_step(step, hand, counters[5].value, normed, layer, rows);
  Next after = kNothingNext;
  if (!last) after = first_unit(model.layers[index + 1].qkv, rows, hand);
  else if (step.logits) after = first_unit(model.head, rows, hand);
  product_step(hand, counters[6].value, step.memory.gated, layer.down, x, rows, true, after);
  return true;
}

void embed_row(const PmDecoder& model, int64_t token, float* x) {
  with_weight_type(model.embedding_type, [&](auto type) {
    using T = decltype(type);
    const long hidden = model.hidden;
    const auto* row = static_cast<const typename T::Code*>(model.embedding) + token * hidden;
    long i = 0;
    for (; i + kLanes <= hidden; i += kLanes) store(x + i, T::decode(row + i));
    const int rest = static_cast<int>(hidden - i);
    if (rest) store_some(x + i, T::decode_some(row + i, rest), rest);
  });
}

void step_share(const StepCall& step, Hand& hand) {
  const PmDecoder& model = step.model;
  share(hand, step.batch.rows, [&](long row) {
    embed_row(model, step.batch.tokens[row], step.memory.x + row * model.hidden);
  });
  end_phase(hand, PM_ROWS);
  for (long index = 0; index < model.layer_count; ++index) {
    if (!layer_step(step, hand, index)) return;
  }
  const long wanted = step.batch.wanted_count;
  const float* x = wanted < step.batch.rows ? step.memory.last_x : step.memory.x;
  share(hand, wanted, [&](long row) {
    norm_row(x + row * model.hidden, model.norm, step.hidden + row * model.hidden, model.hidden,
             model.norm_epsilon);
  });
  end_phase(hand, PM_ROWS);
  if (step.logits) {
    product_step(hand, step.counters[model.layer_count * kLayerCounters].value, step.hidden,
                 model.head, step.logits, wanted, false, kNothingNext);
  }
}

// Returns 0 or a PmBad, see pm_decoder_step.
long check_step(const PmDecoder& model, const PmPages& pages, const PmRows& batch,
                const AttentionCall& attention) {
  for (long row = 0; row < batch.rows; ++row) {
    if (batch.tokens[row] < 0 || batch.tokens[row] >= model.vocab) return PM_BAD_TOKEN + row;
    if (batch.position[row] >= model.positions) return PM_BAD_POSITION + row;
    const int64_t slot = batch.slots[row];
    if (slot < 0 || slot >= pages.page_count * pages.page_size) return PM_BAD_SLOT + row;
  }
  for (long i = 0; i < batch.wanted_count; ++i) {
    const long after = i ? batch.wanted[i - 1] : -1;
    if (batch.wanted[i] <= after || batch.wanted[i] >= batch.rows) return PM_BAD_WANTED + i;
  }
  if (const long bad = check_rows(attention, batch.sequences)) return PM_BAD_TABLE + bad - 1;
  return 0;
}

inline long step_weights(const PmDecoder& model) {
  const PmLayer& layer = model.layers[0];
  auto size = [](const PmMatrix& matrix) { return matrix.n * matrix.k; };
  return model.layer_count *
         (size(layer.qkv) + size(layer.output) + size(layer.gate_up) + size(layer.down));
}

// The sequence and the position of each wanted row.
struct Wanted {
  int32_t* sequence;
  int32_t* position;

  explicit Wanted(const PmRows& batch) {
    const size_t count = static_cast<size_t>(batch.wanted_count);
    sequence = pm::take<int32_t>(2 * count);
    position = sequence + count;
    for (size_t i = 0; i < count; ++i) {
      sequence[i] = batch.sequence[batch.wanted[i]];
      position[i] = batch.position[batch.wanted[i]];
    }
  }
  Wanted(const Wanted&) = delete;
  Wanted& operator=(const Wanted&) = delete;
  ~Wanted() { free(sequence); }
};

long decoder_step(const PmDecoder* model, const PmPages* const* pages, const PmRows* batch,
                  float* workspace, float* hidden, float* logits, double* phase_us,
                  int threads) {
  if (batch->rows == 0) return 0;
  const long query = model->heads * model->head_dim;
  const long joined = query + 2 * model->kv_heads * model->head_dim;
  const StepMemory memory(*model, batch->rows, threads, workspace);
  const long width = pieces(model->head_dim, kLanes) * kLanes;
  const AttentionCall attention{
      *pages[0], memory.joined, joined, memory.mixed, query, batch->rows,
      model->heads / model->kv_heads, batch->tables, batch->table_indptr, batch->sequence,
      batch->position, model->attention_scale, width};
  if (const long bad = check_step(*model, *pages[0], *batch, attention)) return bad;
  const Wanted wanted(*batch);
  AttentionCall last = attention;
  last.q = memory.last_q;
  last.q_stride = query;
  last.rows = batch->wanted_count;
  last.row_sequence = wanted.sequence;
  last.row_position = wanted.position;
  if ((batch->rows + kWeightWork) * step_weights(*model) < kSerialWork) threads = 1;
  AttentionPlan plan, last_plan;
  plan_attention(attention, threads, &plan);
  plan_attention(last, threads, &last_plan);
  const size_t counters_bytes =
      sizeof(StepCounter) * static_cast<size_t>(model->layer_count * kLayerCounters + 1);
  auto* counters = static_cast<StepCounter*>(pm::take_memory(counters_bytes, alignof(StepCounter)));
  memset(static_cast<void*>(counters), 0, counters_bytes);  // all of them at 0
  const StepCall step{*model, pages, *batch, memory, counters, attention, plan, last, last_plan,
                      hidden, logits, phase_us};
  pm::parallel(threads, [&] {
    ThreadScratch scratch(attention, plan.unit_queries);  // the last layer's are no larger
    const int thread = pm::thread_index();
    Hand hand{thread, pm::thread_count(), model->row_invariant != 0, memory.formed,
              memory.own_formed + thread * own_formed_floats(rounds_rows(*model)),
              memory.carry + thread * kCarryFloats,
              memory.own + thread * kOwnFloats, scratch.scratch,
              thread == 0 ? phase_us : nullptr, pm::now_us()};
    step_share(step, hand);
  });
  free(counters);
  return 0;
}

long decoder_workspace(const PmDecoder* model, long rows, int threads) {
  return StepMemory(*model, rows, threads, nullptr).floats;
}

}  // namespace
