// How products are cut into units at the level PM_LEVEL, for test_shares.py.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "../../kernels/native/vec.h"

#include "../../kernels/native/parallel.h"
#include "../../kernels/native/linear_block.h"

namespace {

// The largest units that are at least four for each thread.
LinearPlan largest(long rows, long panels, int threads, long unit_panels) {
  const long row_blocks = pieces(rows, kUnitRows);
  const long unit_rows = pieces(pieces(rows, row_blocks), kTileRows) * kTileRows;
  while (unit_panels > kTilePanels && pieces(panels, unit_panels) * row_blocks < 4 * threads) {
    unit_panels = unit_panels / 2 > kTilePanels ? unit_panels / 2 : kTilePanels;
  }
  const long units = pieces(panels, unit_panels) * row_blocks;
  return {panels, unit_panels, unit_rows, row_blocks, units, 1};
}

}  // namespace

// Multiply-adds of one row and one panel, the reading of weights counted as they count it, that the
// thread with most of them has, of those who each take the next unit when they are done with one.
// -1: some row of some panel is not in exactly one unit, or a unit is larger than what a thread can
// carry.
extern "C" long probe_longest(long rows, long panels, int threads, long unit_panels, int as_large) {
  const LinearPlan plan = as_large ? largest(rows, panels, threads, unit_panels)
                                   : plan_blocks(rows, panels, threads, unit_panels);
  std::vector<int> seen(static_cast<size_t>(rows * panels));
  std::vector<long> done(static_cast<size_t>(threads));
  for (long number = 0; number < plan.units; ++number) {
    const Unit unit(plan, rows, number);
    const long height = unit.row_end - unit.row, width = unit.last - unit.first;
    if (height <= 0 || width <= 0 || width > unit_panels || unit.row_end > rows) return -1;
    if (width * unit.panel_carry > kCarryFloats || unit.last > panels) return -1;
    for (long row = unit.row; row < unit.row_end; ++row) {
      for (long panel = unit.first; panel < unit.last; ++panel) {
        ++seen[static_cast<size_t>(row * panels + panel)];
      }
    }
    *std::min_element(done.begin(), done.end()) += (height + kWeightWork) * width;
  }
  for (const int times : seen) {
    if (times != 1) return -1;
  }
  return *std::max_element(done.begin(), done.end());
}
