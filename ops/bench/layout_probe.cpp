// Probe for bench_layout.py: the same decode attention, KV write and page copy over pages laid
// out in different ways. Built for this machine by the benchmark; nothing of it is installed.
// Any level of vectors will do for a comparison, so it is left to the compiler and its pragmas.
#include <math.h>
#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

typedef float V __attribute__((vector_size(64), aligned(4)));

struct Shape {
  float* base;
  long page_stride, layer_stride, head_stride, value_offset;  // in floats
  long layers, kv_heads, head_dim, page_size, group;
  long transposed;
};

namespace {

inline V load(const float* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline V splat(float x) { return V{} + x; }
inline float lanes_sum(V v) {
  float s = 0;
  for (int width = 8; width; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  s = v[0];
  return s;
}

// Scores of the page's slots (a multiple of 16, at most 64) for one query head group.
template <int G>
void scores(const Shape& s, const float* k, const float* q, float* out) {
  if (s.transposed) {
    for (long at = 0; at < s.page_size; at += 16) {
      V sum[G] = {};
      for (long d = 0; d < s.head_dim; ++d) {
        V key = load(k + d * s.page_size + at);
        for (int g = 0; g < G; ++g) sum[g] += splat(q[g * s.head_dim + d]) * key;
      }
      for (int g = 0; g < G; ++g) memcpy(out + g * s.page_size + at, &sum[g], sizeof(V));
    }
    return;
  }
  for (long slot = 0; slot < s.page_size; ++slot) {
    V sum[G] = {};
    for (long d = 0; d < s.head_dim; d += 16) {
      V key = load(k + slot * s.head_dim + d);
      for (int g = 0; g < G; ++g) sum[g] += load(q + g * s.head_dim + d) * key;
    }
    for (int g = 0; g < G; ++g) out[g * s.page_size + slot] = lanes_sum(sum[g]);
  }
}

template <int G>
void attend(const Shape& s, const int* table, long pages, const float* q, float* out) {
  float weight[G * 64];
  for (long layer = 0; layer < s.layers; ++layer) {
    for (long head = 0; head < s.kv_heads; ++head) {
      const float* query = q + head * G * s.head_dim;
      V sum[G][8] = {};
      for (long i = 0; i < pages; ++i) {
        const float* k =
            s.base + table[i] * s.page_stride + layer * s.layer_stride + head * s.head_stride;
        const float* v = k + s.value_offset;
        scores<G>(s, k, query, weight);
        // The softmax is the same for all layouts; a cheap stand-in keeps it out of the ratio.
        for (long w = 0; w < G * s.page_size; ++w) weight[w] *= 0.01f;
        for (long slot = 0; slot < s.page_size; ++slot) {
          for (int g = 0; g < G; ++g) {
            V p = splat(weight[g * s.page_size + slot]);
            for (int d = 0; d < 8; ++d) sum[g][d] += p * load(v + slot * s.head_dim + d * 16);
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int d = 0; d < 8; ++d) {
          memcpy(out + (head * G + g) * s.head_dim + d * 16, &sum[g][d], sizeof(V));
        }
      }
    }
  }
}

}  // namespace

// head_dim is 128; group is 1, 2 or 4; every layer is read.
EXPORT void probe_attend(const Shape* s, const int* table, long pages, const float* q,
                         float* out) {
  if (s->group == 1) attend<1>(*s, table, pages, q, out);
  if (s->group == 2) attend<2>(*s, table, pages, q, out);
  if (s->group == 4) attend<4>(*s, table, pages, q, out);
}

EXPORT void probe_write(const Shape* s, const long* slots, long rows, const float* k,
                        const float* v) {
  for (long layer = 0; layer < s->layers; ++layer) {
    for (long head = 0; head < s->kv_heads; ++head) {
      for (long row = 0; row < rows; ++row) {
        float* page = s->base + slots[row] / s->page_size * s->page_stride +
                      layer * s->layer_stride + head * s->head_stride;
        const long slot = slots[row] % s->page_size;
        const float* key = k + (row * s->kv_heads + head) * s->head_dim;
        if (s->transposed) {
          for (long d = 0; d < s->head_dim; ++d) page[d * s->page_size + slot] = key[d];
        } else {
          memcpy(page + slot * s->head_dim, key, sizeof(float) * s->head_dim);
        }
        memcpy(page + s->value_offset + slot * s->head_dim,
               v + (row * s->kv_heads + head) * s->head_dim, sizeof(float) * s->head_dim);
      }
    }
  }
}

// A layer's part of a page is contiguous in every layout; the whole page only when page-major.
EXPORT void probe_copy(const Shape* s, const int* from, const int* to, long pages) {
  const long layer_floats = 2 * s->kv_heads * s->head_dim * s->page_size;
  const bool whole = s->layer_stride == layer_floats;
  for (long i = 0; i < pages; ++i) {
    for (long layer = 0; layer < (whole ? 1 : s->layers); ++layer) {
      memcpy(s->base + to[i] * s->page_stride + layer * s->layer_stride,
             s->base + from[i] * s->page_stride + layer * s->layer_stride,
             sizeof(float) * layer_floats * (whole ? s->layers : 1));
    }
  }
}

EXPORT float probe_stream(const float* base, long floats) {
  V sum[8] = {};
  for (long i = 0; i + 128 <= floats; i += 128) {
    for (int j = 0; j < 8; ++j) sum[j] += load(base + i + j * 16);
  }
  V total = {};
  for (int j = 0; j < 8; ++j) total += sum[j];
  return lanes_sum(total);
}
