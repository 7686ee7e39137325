// Copies of many pieces of memory, shared among the threads that torch computes with.

#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "threads.hpp"

namespace {

constexpr size_t kShared = 1 << 20;  // bytes from which they are shared

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};

void copy_all(const std::vector<Copy>& copies, size_t first, size_t last) {
  for (size_t i = first; i < last; ++i) {
    if (i + 2 < last) {
      __builtin_prefetch(copies[i + 2].from);
    }
    if (copies[i].bytes != 0) {
      std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
    }
  }
}

// Where to cut them into neighbours of about as many bytes for each thread.
std::vector<size_t> shares_of(const std::vector<Copy>& copies, size_t threads) {
  size_t total = 0;
  for (const Copy& one : copies) {
    total += one.bytes;
  }
  threads = total < kShared ? 1 : threads;
  std::vector<size_t> cuts{0};
  size_t done = 0;
  for (size_t i = 0; i + 1 < copies.size(); ++i) {
    done += copies[i].bytes;
    if (cuts.size() < threads && done * threads >= total * cuts.size()) {
      cuts.push_back(i + 1);
    }
  }
  cuts.push_back(copies.size());
  return cuts;
}

// The threads are those that torch computes with, and as many: others would have to share the
// processors with them, as they wait for work in a loop for some milliseconds; fewer, and the
// library would end some of them and start them anew.
void copy_shares(const std::vector<Copy>& copies, const std::vector<size_t>& cuts) {
#ifdef _OPENMP
  if (cuts.size() > 2 && have_threads()) {
#pragma omp parallel
    for (size_t part = omp_get_thread_num(); part + 1 < cuts.size();
         part += omp_get_num_threads()) {
      copy_all(copies, cuts[part], cuts[part + 1]);
    }
  } else
#endif
  {
    copy_all(copies, 0, copies.size());
  }
}

}  // namespace
