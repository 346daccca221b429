// The threads of a parallel region, whose loops are shared out so that none waits for one that is held up.

#pragma once

#include <atomic>
#include <cstdlib>

#include "numbers.h"

namespace {

// What the threads of one parallel region share. To be made outside of it.
class Shares {
 public:
  Shares() : taken_(2 * omp_get_max_threads()) {}
  ~Shares() { std::free(room_); }
  Shares(const Shares&) = delete;

 private:
  friend class Worker;
  struct alignas(64) Count {
    std::atomic<Index> value{0};
  };
  std::vector<Count> taken_;  // for each thread, in this loop and in the next
  float* room_ = nullptr;
  Index size_ = 0;
};

// One thread of a team. What all of a team call, it calls in the same order as the others.
class Worker {
 public:
  explicit Worker(Shares& shares) : shares_(shares), me_(omp_get_thread_num()), size_(omp_get_num_threads()) {}

  Index team_size() const { return size_; }

  // Calls `work(index)` for every index below `count`, each in some thread; all are done when it returns. A thread
  // takes neighbours one after the other, and in the end some of those that others have not come to.
  template <class Work>
  void each(Index count, Work work) {
    auto* taken = &shares_.taken_[turn_ * size_];
    turn_ = !turn_;
    shares_.taken_[turn_ * size_ + me_].value = 0;  // of the last loop, which all have left
    for (Index i = 0; i < size_; i++) {
      const Index whose = (me_ + i) % size_, first = count * whose / size_, stop = count * (whose + 1) / size_;
      for (Index at; (at = first + taken[whose].value.fetch_add(1, std::memory_order_relaxed)) < stop;) work(at);
    }
#pragma omp barrier
  }

  // Memory for `count` numbers that all threads get, good until the next call.
  float* room(Index count) {
    if (me_ == 0 && shares_.size_ < count) {
      std::free(shares_.room_);
      shares_.room_ = (float*)std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
      shares_.size_ = count;
    }
#pragma omp barrier
    return shares_.room_;
  }

 private:
  Shares& shares_;
  const Index me_, size_;
  bool turn_ = false;
};

// Runs `work(worker)` in every thread of a new team, of one thread unless `is_large`.
template <class Work>
void in_team(bool is_large, Work work) {
  Shares shares;
#pragma omp parallel if (is_large)
  {
    Worker me(shares);
    work(me);
  }
}

}  // namespace
