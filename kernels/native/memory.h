// Memory of an operation, for as long as it runs. Operations have no other way to fail than what
// their callers did wrong, and may be amid a region of threads that wait for each other: where
// there is no memory, the process ends with a line that says so, rather than write somewhere.
#pragma once

#include <stddef.h>

namespace pm {

// Never null but for 0 bytes; the caller frees it. `alignment`: a power of two.
void* take_memory(size_t bytes);
void* take_memory(size_t bytes, size_t alignment);

namespace {

template <typename T>
T* take(size_t count) {
  return static_cast<T*>(take_memory(sizeof(T) * count));
}

}  // namespace

}  // namespace pm
