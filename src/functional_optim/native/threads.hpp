// The threads that torch computes with, as far as they are there.

#pragma once

#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

// In a child of a process that has computed in several threads, they are not: whoever calls for them
// waits for ever.
bool alone_in_child = false;

bool have_threads() {
#ifdef _OPENMP
  return !alone_in_child;
#else
  return false;
#endif
}

}  // namespace
