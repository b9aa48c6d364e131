// The library's entry points: they choose the level and dispatch to its kernels. Operations that
// use no vectors are implemented here.
#include "pagemesh_native.h"

#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(PM_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "parallel.h"

namespace {

#if defined(__x86_64__)
// Whether this CPU has tiles of bfloat16 and the system lets this process use them, which has to be
// requested.
bool has_tiles() {
#if defined(PM_HAS_AMX)
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kBfloat16Tiles = 1u << 22, kTiles = 1u << 24;
  if ((d & kBfloat16Tiles) == 0 || (d & kTiles) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_bfloat_products() {
#if defined(PM_HAS_BF16)
  unsigned a, b, c, d;
  constexpr unsigned kBfloatProducts = 1u << 5;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kBfloatProducts);
#else
  return false;
#endif
}

bool has_half_floats() {  // not every compiler's __builtin_cpu_supports knows f16c
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (!has_bfloat_products()) return PM_AVX512;
    return has_tiles() ? PM_AMX : PM_AVX512_BF16;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      has_half_floats()) {
    return PM_AVX2;
  }
#endif
  return PM_PORTABLE;
}

bool is_intel_or_zen_3_or_4() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return false;
  if (b != signature_AMD_ebx) return b == signature_INTEL_ebx;
  constexpr unsigned kFamily = 0x19;  // base family + extended family
  return __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 0xf) + (a >> 20 & 0xff) == kFamily;
#else
  return false;
#endif
}

int chosen_level = PM_PORTABLE;
const pm::Kernels* kernels = &pm::kPortableKernels;

template <typename T>
void pack_panels(const T* weight, long row_stride, T* packed, long n, long k) {
  for (long panel = 0; panel * 16 < n; ++panel) {
    T* to = packed + panel * 16 * k;
    for (long lane = 0; lane < 16; ++lane) {
      const long column = panel * 16 + lane;
      for (long i = 0; i < k; ++i) {
        to[i * 16 + lane] = column < n ? weight[column * row_stride + i] : T{};
      }
    }
  }
}

}  // namespace

const bool pm::fetches_far = is_intel_or_zen_3_or_4();

extern "C" {

PM_EXPORT int pm_abi_version(void) { return 20; }
PM_EXPORT int pm_best_level(void) { return best_level(); }
PM_EXPORT int pm_level(void) { return chosen_level; }

PM_EXPORT int pm_set_level(int level) {
  if (level < 0 || level > best_level()) return 1;
#if defined(__x86_64__)
#if defined(PM_HAS_AMX)
  if (level == PM_AMX) kernels = &pm::kAmxKernels;
#endif
#if defined(PM_HAS_BF16)
  if (level == PM_AVX512_BF16) kernels = &pm::kAvx512Bf16Kernels;
#endif
  if (level == PM_AVX512) kernels = &pm::kAvx512Kernels;
  if (level == PM_AVX2) kernels = &pm::kAvx2Kernels;
#endif
  if (level == PM_PORTABLE) kernels = &pm::kPortableKernels;
  chosen_level = level;
  return 0;
}

PM_EXPORT void pm_linear_pack(const void* weight, long row_stride, void* packed, long n, long k,
                              long item_bytes) {
  if (item_bytes == 2) {
    pack_panels(static_cast<const uint16_t*>(weight), row_stride,
                static_cast<uint16_t*>(packed), n, k);
  } else {
    pack_panels(static_cast<const float*>(weight), row_stride, static_cast<float*>(packed), n, k);
  }
}

PM_EXPORT void pm_linear(const float* x, long x_stride, const PmMatrix* matrix, float* out,
                         long out_stride, long rows, int row_invariant, int threads) {
  kernels->linear(x, x_stride, matrix, out, out_stride, rows, row_invariant, threads);
}

PM_EXPORT void pm_rms_norm(const float* x, long x_stride, const float* weight, float* out,
                           long out_stride, long rows, long width, float epsilon, int threads) {
  kernels->rms_norm(x, x_stride, weight, out, out_stride, rows, width, epsilon, threads);
}

PM_EXPORT void pm_rope(float* x, long row_stride, const float* cosine, const float* sine,
                       long rows, long heads, long head_dim, long rotary_dim, int threads) {
  kernels->rope(x, row_stride, cosine, sine, rows, heads, head_dim, rotary_dim, threads);
}

PM_EXPORT void pm_silu_mul(const float* gate_up, long in_stride, float* out, long out_stride,
                           long rows, long width, int threads) {
  kernels->silu_mul(gate_up, in_stride, out, out_stride, rows, width, threads);
}

PM_EXPORT void pm_log_softmax(const float* x, long x_stride, float* out, long out_stride,
                              long rows, long width, int threads) {
  kernels->log_softmax(x, x_stride, out, out_stride, rows, width, threads);
}

PM_EXPORT long pm_softmax_draw(const float* x, long x_stride, long x_rows, const PmDraws* draws,
                               long width, float* weights, double* sums, int64_t* tokens,
                               int threads) {
  return kernels->softmax_draw(x, x_stride, x_rows, draws, width, weights, sums, tokens, threads);
}

PM_EXPORT long pm_top_scores(const float* x, long x_stride, long x_rows, long width,
                             const PmScored* scored, long top_stride, float* scores,
                             int64_t* top_columns, float* tops, int threads) {
  return kernels->top_scores(x, x_stride, x_rows, width, scored, top_stride, scores, top_columns,
                             tops, threads);
}

PM_EXPORT long pm_paged_attention(const PmPages* pages, const float* q, long q_stride, float* out,
                                  long out_stride, long rows, long q_heads, const int32_t* tables,
                                  const int32_t* table_indptr, long sequences,
                                  const int32_t* row_sequence, const int32_t* row_position,
                                  float scale, float soft_cap, long window_tokens, int threads) {
  return kernels->paged_attention(pages, q, q_stride, out, out_stride, rows, q_heads, tables,
                                  table_indptr, sequences, row_sequence, row_position, scale,
                                  soft_cap, window_tokens, threads);
}

PM_EXPORT long pm_kv_write(const PmPages* pages, const float* k, long k_stride, const float* v,
                           long v_stride, const int64_t* slots, long rows, int threads) {
  return kernels->kv_write(pages, k, k_stride, v, v_stride, slots, rows, threads);
}

PM_EXPORT long pm_kv_gather(const PmPages* pages, const int32_t* table, long table_pages,
                            long first, long count, float* k, float* v, int threads) {
  return kernels->kv_gather(pages, table, table_pages, first, count, k, v, threads);
}

PM_EXPORT long pm_page_copy(uint8_t* base, long page_bytes, long page_count,
                            const uint32_t* sources, const uint32_t* targets, long count,
                            int threads) {
  for (long i = 0; i < count; ++i) {
    if (static_cast<long>(sources[i]) >= page_count || static_cast<long>(targets[i]) >= page_count)
      return 1 + i;
  }
  if (count * page_bytes < (1 << 20)) threads = 1;
  pm::Counter work;
  pm::parallel(threads, [&] {
    long i, end;
    while (work.take(count, 1, &i, &end)) {
      memmove(base + static_cast<long>(targets[i]) * page_bytes,
              base + static_cast<long>(sources[i]) * page_bytes, static_cast<size_t>(page_bytes));
    }
  });
  return 0;
}

PM_EXPORT long pm_decoder_workspace(const PmDecoder* decoder, long rows, int threads) {
  return kernels->decoder_workspace(decoder, rows, threads);
}

PM_EXPORT long pm_decoder_step(const PmDecoder* decoder, const PmPages* const* pages,
                               const PmRows* batch, float* workspace, float* hidden,
                               float* logits, double* phase_us, int threads) {
  return kernels->decoder_step(decoder, pages, batch, workspace, hidden, logits, phase_us,
                               threads);
}

PM_EXPORT float pm_probe_stream(const float* data, long floats, int threads) {
  return kernels->probe_stream(data, floats, threads);
}

PM_EXPORT long pm_probe_arithmetic(long rounds, int threads) {
  return kernels->probe_arithmetic(rounds, threads);
}

}  // extern "C"
