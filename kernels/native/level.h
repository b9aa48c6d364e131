// Everything that is compiled once per level; included only by level_*.cpp. All of it sits in
// anonymous namespaces, so that the linker cannot merge the code of one level with another's.
#pragma once

#include "kernels.h"
#include "parallel.h"
#include "vec.h"

#include "linear.h"
#include "rows.h"
#include "limited_draw.h"
#include "top_scores.h"
#include "product.h"
#include "kv_write.h"
#include "kv_gather.h"
#include "attention.h"
#include "step.h"
#include "probe.h"

namespace pm {

extern const Kernels PM_TABLE = {
    linear, rms_norm, rope, silu_mul, log_softmax, softmax_draw, top_scores, kv_write, kv_gather,
    paged_attention, decoder_workspace, decoder_step, probe_stream, probe_arithmetic,
};

}  // namespace pm
