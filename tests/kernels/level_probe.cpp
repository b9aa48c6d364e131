// Runs kernels of the level that it is given on numbers that are the same anywhere, and prints a
// line for each with a digest of the bits that came out (test_arm.py). Ends with 1 where what came
// out is no number.
#include "pagemesh_native.h"
#include "slim_layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <limits>
#include <vector>

namespace {

uint32_t state = 1;

uint32_t bits() {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}
float number() { return static_cast<float>(bits()) * 0x1p-23f - 1.0f; }
std::vector<float> numbers(long count) {
  std::vector<float> made(static_cast<size_t>(count));
  for (float& each : made) each = number();
  return made;
}

template <typename T>
uint64_t digest(const std::vector<T>& values) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 1099511628211u;
  return hash;
}
bool all_finite = true;

void say(const char* what, long which, const std::vector<uint8_t>& values) {
  printf("%s %ld %016llx\n", what, which, static_cast<unsigned long long>(digest(values)));
}
void say(const char* what, long which, const std::vector<float>& values) {
  for (float each : values) all_finite = all_finite && std::isfinite(each);
  printf("%s %ld %016llx\n", what, which, static_cast<unsigned long long>(digest(values)));
}

// Panels of any weight type, with codes of numbers between about 1/16 and 1 (of int8: any).
std::vector<uint8_t> panels_of(long type, long n, long k) {
  const long item_bytes = type == PM_WEIGHT_FLOAT32 ? 4 : type == PM_WEIGHT_INT8 ? 1 : 2;
  std::vector<uint8_t> made;
  const auto append = [&](const void* from, size_t bytes) {
    const auto* first = static_cast<const uint8_t*>(from);
    made.insert(made.end(), first, first + bytes);
  };
  for (long panel = 0; panel < (n + 15) / 16; ++panel) {
    for (long i = 0; i < k * 16; ++i) {
      const float wide = number();
      uint32_t code;
      memcpy(&code, &wide, sizeof code);
      if (type == PM_WEIGHT_BFLOAT16) code >>= 16;
      if (type == PM_WEIGHT_FLOAT16) code = (bits() & 0x83ffu) | (11 + bits() % 4) << 10;
      if (type == PM_WEIGHT_INT8) code = bits() & 0xffu;
      append(&code, static_cast<size_t>(item_bytes));  // the low bytes come first on both
    }
    for (int i = 0; type == PM_WEIGHT_INT8 && i < 16; ++i) {
      const float scale = number() * 0.01f;
      append(&scale, sizeof scale);
    }
  }
  return made;
}

void products() {
  constexpr long n = 200, k = 130;
  const std::vector<float> weight = numbers(n * k), bias = numbers(n);
  std::vector<float> packed((n + 15) / 16 * 16 * k);
  pm_linear_pack(weight.data(), k, packed.data(), n, k, sizeof(float));
  say("pack", 4, packed);
  for (long type : {PM_WEIGHT_FLOAT32, PM_WEIGHT_INT8, PM_WEIGHT_BFLOAT16, PM_WEIGHT_FLOAT16}) {
    const std::vector<uint8_t> panels = panels_of(type, n, k);
    for (long rounds = 0; rounds <= (type == PM_WEIGHT_INT8 || type == PM_WEIGHT_BFLOAT16); ++rounds) {
      for (long rows : {1, 3, 8, 16, 70}) {
        const std::vector<float> x = numbers(rows * k);
        std::vector<float> out(static_cast<size_t>(rows * n));
        const PmMatrix matrix = {panels.data(), bias.data(), n, k, type, rounds};
        pm_linear(x.data(), k, &matrix, out.data(), n, rows, 0, 1);
        say(rounds ? "linear of rounded rows" : "linear", type * 100 + rows, out);
      }
    }
  }
}

void slim_products() {
  constexpr long n = 200, k = 328;
  const std::vector<float> wide = numbers(n * k), bias = numbers(n);
  std::vector<uint16_t> weight;
  for (float each : wide) {
    uint32_t code;
    memcpy(&code, &each, sizeof code);
    weight.push_back(static_cast<uint16_t>(code >> 16));
  }
  weight[5] = weight[n * k / 2] = 0x7149;  // strays
  std::vector<uint8_t> panels((n + 15) / 16 * pm::slim_panel_bytes(k));
  if (pm_linear_pack_slim(weight.data(), k, panels.data(), n, k, 1)) exit(2);
  say("slim pack", n, panels);
  for (long rows : {1, 2, 3, 8, 70}) {
    const std::vector<float> x = numbers(rows * k);
    std::vector<float> out(static_cast<size_t>(rows * n));
    const PmMatrix matrix = {panels.data(), bias.data(), n, k, PM_WEIGHT_SLIM_BFLOAT16, 0};
    pm_linear(x.data(), k, &matrix, out.data(), n, rows, 0, 1);
    say("slim linear", rows, out);
  }
}

void attention(long kv_type) {
  constexpr long head_dim = 48, kv_heads = 2, page_size = 16, page_count = 8, q_heads = 6;
  constexpr long tokens = 100;
  const bool scaled = kv_type >= PM_KV_INT8;
  const long item_bytes = kv_type == PM_KV_FLOAT32 ? 4 : scaled ? 1 : 2;
  const long codes_bytes = head_dim * page_size * item_bytes;
  const long value_offset = (codes_bytes + (scaled ? 4 * page_size : 0)) / item_bytes;
  const long page_bytes = (kv_heads * 2 * value_offset * item_bytes + 63) / 64 * 64;
  std::vector<uint8_t> pool(static_cast<size_t>(page_count * page_bytes));
  const PmPages pages = {pool.data(), page_bytes / item_bytes, value_offset, 2 * value_offset,
                         page_count, page_size, kv_heads, head_dim, kv_type, codes_bytes};
  const int32_t table[page_count] = {3, 1, 7, 0, 2, 5, 6, 4}, indptr[] = {0, page_count};
  std::vector<int64_t> slots;
  for (long i = 0; i < tokens; ++i) slots.push_back(table[i / 16] * 16 + i % 16);
  const std::vector<float> k = numbers(tokens * kv_heads * head_dim);
  const std::vector<float> v = numbers(tokens * kv_heads * head_dim);
  pm_kv_write(&pages, k.data(), kv_heads * head_dim, v.data(), kv_heads * head_dim, slots.data(),
              tokens, 1);
  say("kv write", kv_type, pool);
  std::vector<float> gathered_k(k.size()), gathered_v(v.size());
  pm_kv_gather(&pages, table, page_count, 0, tokens, gathered_k.data(), gathered_v.data(), 1);
  say("kv gather of k", kv_type, gathered_k);
  say("kv gather of v", kv_type, gathered_v);
  for (long rows : {1, 20}) {  // one that decodes, and a chunk
    for (long window : {std::numeric_limits<long>::max(), 30L}) {
      std::vector<int32_t> sequence(static_cast<size_t>(rows)), position;
      for (long i = 0; i < rows; ++i) position.push_back(static_cast<int32_t>(tokens - rows + i));
      const std::vector<float> q = numbers(rows * q_heads * head_dim);
      std::vector<float> out(q.size());
      pm_paged_attention(&pages, q.data(), q_heads * head_dim, out.data(), q_heads * head_dim, rows,
                         q_heads, table, indptr, 1, sequence.data(), position.data(), 0.14f,
                         window == 30 ? 4.0f : INFINITY, window, 1);
      say(window == 30 ? "attention in a window, capped" : "attention", kv_type * 100 + rows, out);
    }
  }
}

void rows() {
  constexpr long count = 3, width = 1002, heads = 2, head_dim = 32;
  std::vector<float> x = numbers(count * width), out(x.size());
  const std::vector<float> weight = numbers(width);
  pm_rms_norm(x.data(), width, weight.data(), out.data(), width, count, width, 1e-5f, 1);
  say("rms norm", width, out);
  out.assign(out.size(), 0.0f);
  pm_silu_mul(x.data(), width, out.data(), width / 2, count, width / 2, 1);
  say("silu", width, out);
  for (float& each : x) each *= 8.0f;
  pm_log_softmax(x.data(), width, out.data(), width, count, width, 1);
  say("log softmax", width, out);
  std::vector<float> turned = numbers(count * heads * head_dim);
  const std::vector<float> cosine = numbers(count * head_dim), sine = numbers(count * head_dim);
  pm_rope(turned.data(), heads * head_dim, cosine.data(), sine.data(), count, heads, head_dim,
          head_dim, 1);
  say("rope", head_dim, turned);
}

// Greedy, limited and free draws of rows wide enough for two blocks of sums.
void draws() {
  constexpr long count = 4, width = PM_SUM_BLOCK + 200;
  std::vector<float> x = numbers(count * width), weights(x.size());
  for (float& each : x) each *= 8.0f;
  const int64_t rows[count] = {2, 0, 3, 1}, top_k[count] = {0, 20, 0, 300};
  const float temperatures[count] = {1.0f, 0.7f, 2.0f, 1.0f}, min_p[count] = {0, 0.01f, 0, 0};
  const double uniforms[count] = {0.3, 0.9, 0.5, 0.999}, top_p[count] = {1.0, 0.9, 0.8, 0.95};
  std::vector<double> sums(2 * count);
  PmDraws wanted = {};
  wanted.rows = rows;
  wanted.temperatures = temperatures;
  wanted.uniforms = uniforms;
  wanted.min_p = min_p;
  wanted.top_k = top_k;
  wanted.top_p = top_p;
  wanted.count = count;
  int64_t drawn[count] = {};
  pm_softmax_draw(x.data(), width, count, &wanted, width, weights.data(), sums.data(), drawn, 1);
  say("weights to draw by", width, weights);
  for (int64_t token : drawn) printf("drawn %ld %ld\n", width, static_cast<long>(token));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2 || pm_set_level(atoi(argv[1]))) return 1;
  products();
  slim_products();
  for (long type : {PM_KV_FLOAT32, PM_KV_FLOAT16, PM_KV_BFLOAT16, PM_KV_INT8, PM_KV_E4M3}) {
    attention(type);
  }
  rows();
  draws();
  return all_finite ? 0 : 1;
}
