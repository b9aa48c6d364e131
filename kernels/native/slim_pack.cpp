// Packs weights in the slim format (slim_layout.h).
#include "pagemesh_native.h"
#include "parallel.h"
#include "slim_layout.h"

#include <string.h>

#include <algorithm>

namespace {

constexpr long kColumns = 16;
constexpr long kPackWork = 1 << 16;  // values below which one thread is enough (see parallel.h)
constexpr int kExponentPairs = 128;
constexpr uint8_t kNone = 0xff;

// The `width` columns of a panel, `stride` elements apart, with `k` values each.
struct Panel {
  const uint16_t* weight;
  long stride, k, width;

  uint16_t at(long row, long column) const { return weight[column * stride + row]; }
};

int upper_of(uint16_t bits) { return bits >> 8 & 0x7f; }

// Chooses the most frequent pairs of exponents and gives them codes; `code_of` is kNone for the
// other pairs. Returns how many values are strays.
long choose_uppers(const Panel& panel, uint8_t* uppers, uint8_t* code_of) {
  long counts[kExponentPairs] = {};
  for (long column = 0; column < panel.width; ++column) {
    for (long row = 0; row < panel.k; ++row) ++counts[upper_of(panel.at(row, column))];
  }
  int order[kExponentPairs];
  for (int i = 0; i < kExponentPairs; ++i) order[i] = i;
  std::partial_sort(order, order + pm::kSlimUppers, order + kExponentPairs, [&](int a, int b) {
    return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
  });
  memset(code_of, kNone, kExponentPairs);
  long strays = panel.k * panel.width;
  for (int code = 0; code < pm::kSlimUppers; ++code) {
    const int upper = order[code];
    code_of[upper] = static_cast<uint8_t>(code);
    uppers[code] = static_cast<uint8_t>(upper);
    uppers[code + pm::kSlimUppers] = static_cast<uint8_t>(upper | 0x80);
    strays -= counts[upper];
  }
  return strays;
}

void pack_panel(const Panel& panel, const uint8_t* uppers, const uint8_t* code_of, uint8_t* to) {
  memset(to, 0, static_cast<size_t>(pm::slim_panel_bytes(panel.k)));
  auto* head = reinterpret_cast<pm::SlimHead*>(to);
  auto* const strays = reinterpret_cast<pm::SlimStray*>(head + 1);
  auto* stray = strays;
  memcpy(head->uppers, uppers, sizeof head->uppers);
  uint8_t* const groups = to + pm::slim_groups_at(panel.k);
  for (long column = 0; column < panel.width; ++column) {
    for (long row = 0; row < panel.k; ++row) {
      const uint16_t bits = panel.at(row, column);
      const uint8_t code = code_of[upper_of(bits)];
      if (code == kNone) {
        *stray++ = {static_cast<uint32_t>(row * kColumns + column),
                    static_cast<uint32_t>(bits) << 16};
        continue;
      }
      const long inner = row % pm::kSlimDepth, half = inner / 4;
      const long at = pm::slim_place(inner % 4, column);
      uint8_t* group = groups + row / pm::kSlimDepth * pm::kSlimGroupBytes;
      const int signed_code = code | (bits >> 15 ? pm::kSlimUppers : 0);
      group[64 * half + at] = static_cast<uint8_t>(bits);
      group[pm::kSlimCodesAt + at] |= static_cast<uint8_t>(signed_code << 4 * half);
    }
  }
  std::sort(strays, stray, [](const auto& a, const auto& b) { return a.at < b.at; });
  head->stray_count = static_cast<uint32_t>(stray - strays);
}

}  // namespace

extern "C" PM_EXPORT int pm_linear_pack_slim(const uint16_t* weight, long row_stride, void* packed,
                                             long n, long k, int threads) {
  if (k % pm::kSlimDepth || k > INT32_MAX / kColumns) return 1;
  auto* const to = static_cast<uint8_t*>(packed);
  if (n * k < kPackWork) threads = 1;
  int is_too_wide = 0;
  pm::Counter work;
  pm::parallel(threads, [&] {
    long index, end;
    while (!__atomic_load_n(&is_too_wide, __ATOMIC_RELAXED) &&
           work.take((n + kColumns - 1) / kColumns, 1, &index, &end)) {
      const long column = index * kColumns;
      const Panel panel{weight + column * row_stride, row_stride, k,
                        std::min(kColumns, n - column)};
      uint8_t uppers[2 * pm::kSlimUppers], code_of[kExponentPairs];
      if (choose_uppers(panel, uppers, code_of) > pm::slim_strays_max(k)) {
        __atomic_store_n(&is_too_wide, 1, __ATOMIC_RELAXED);
      } else if (to) {
        pack_panel(panel, uppers, code_of, to + index * pm::slim_panel_bytes(k));
      }
    }
  });
  return is_too_wide;
}
