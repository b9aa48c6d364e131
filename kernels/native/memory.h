// Memory that an operation holds while it runs. An operation can report only bad input, and may be
// inside a parallel region whose threads wait for each other. So when an allocation fails, the
// process prints a line that says so and aborts, rather than write through a null pointer.
#pragma once

#include <stddef.h>

namespace pm {

// Never null except for 0 bytes; the caller calls free(). `alignment`: in bytes, a power of two.
void* take_memory(size_t bytes);
void* take_memory(size_t bytes, size_t alignment);

namespace {

template <typename T>
T* take(size_t count) {
  return static_cast<T*>(take_memory(sizeof(T) * count));
}

}  // namespace

}  // namespace pm
