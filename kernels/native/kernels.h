// The dispatch table: the kernels of one instruction set level (PmLevel). Each level_*.cpp defines
// the table of its level.
#pragma once

#include "pagemesh_native.h"

namespace pm {

struct Kernels {
  decltype(&::pm_linear) linear;
  decltype(&::pm_rms_norm) rms_norm;
  decltype(&::pm_rope) rope;
  decltype(&::pm_silu_mul) silu_mul;
  decltype(&::pm_log_softmax) log_softmax;
  decltype(&::pm_softmax_draw) softmax_draw;
  decltype(&::pm_top_scores) top_scores;
  decltype(&::pm_kv_write) kv_write;
  decltype(&::pm_kv_gather) kv_gather;
  decltype(&::pm_paged_attention) paged_attention;
  decltype(&::pm_decoder_workspace) decoder_workspace;
  decltype(&::pm_decoder_step) decoder_step;
  decltype(&::pm_probe_stream) probe_stream;
  decltype(&::pm_probe_arithmetic) probe_arithmetic;
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#if defined(PM_HAS_BF16)
extern const Kernels kAvx512Bf16Kernels;
#endif
#if defined(PM_HAS_AMX)
extern const Kernels kAmxKernels;
#endif
#endif

// Whether to prefetch data that a thread reads once into L2 instead of L1. On AMD's Zen 4 and
// Intel's Emerald Rapids, L1 allows too few outstanding misses to keep memory busy during
// arithmetic. On a Zen 5 it allows enough, and data in L1 is used sooner. On Zen 3, which shares
// its CPU family with Zen 4, it made no difference.
extern const bool fetches_far;

}  // namespace pm
