#include "memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace {

void* or_end(void* memory, size_t bytes) {
  if (memory || bytes == 0) return memory;
  char line[160];
  const int length = snprintf(
      line, sizeof line,
      "pagemesh: no memory for %zu bytes of a kernel: give the process more, or fewer workers\n",
      bytes);
  if (write(STDERR_FILENO, line, static_cast<size_t>(length)) < 0) abort();  // stderr is closed
  abort();
}

}  // namespace

namespace pm {

void* take_memory(size_t bytes) { return or_end(malloc(bytes), bytes); }

void* take_memory(size_t bytes, size_t alignment) {
  const size_t whole = (bytes + alignment - 1) / alignment * alignment;
  return or_end(aligned_alloc(alignment, whole), bytes);
}

}  // namespace pm
