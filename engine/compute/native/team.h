// The threads that compute. They are ours and not OpenMP's: a thread that waits spins for some microseconds and then
// sleeps, and a loop ends when its pieces are done, not when all threads have come to its end. So a thread that lost
// its core to another process delays the one piece that it holds, and sleepers leave their cores to who needs them.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <csignal>
#endif

#include "vector.h"

namespace {

constexpr int SPIN_IN_LOOP = 400;    // looks at what another thread finishes, before sleeping: some ten microseconds
constexpr int SPIN_AT_REST = 3000;   // looks for the next region: what lies between two calls of one step
constexpr int INDEX_BITS = 24;       // of a counter, the others number its loop
constexpr uint64_t LAST_LOOP = 1ull << (63 - INDEX_BITS);  // some months of load; a call numbers far fewer than as many

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Where threads wait for what others change.
class Bell {
 public:
  // Returns once `ready()`; sleeps after `looks` of them. Whoever makes it true rings.
  template <class Ready>
  void wait(int looks, Ready ready) {
    for (int i = 0; i < looks; i++) {
      if (ready()) return;
      pause();
    }
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    for (;;) {
      const uint32_t rung = rung_.load(std::memory_order_seq_cst);
      if (ready()) break;
      rung_.wait(rung, std::memory_order_seq_cst);
    }
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Wakes all who sleep. What they wait for must have been written by a sequentially consistent operation.
  void ring() {
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    rung_.fetch_add(1, std::memory_order_seq_cst);
    rung_.notify_all();
  }

 private:
  alignas(64) std::atomic<uint32_t> asleep_{0};
  std::atomic<uint32_t> rung_{0};
};

// What is taken or done of a numbered loop. It needs no reset: the first who comes with a new number begins it, and
// who comes with an old one learns that his loop is over.
class Count {
 public:
  static constexpr Index OVER = -1;

  // The next piece of loop `number` below `limit`; OVER if there is none.
  Index take(uint64_t number, Index limit) {
    uint64_t found = value_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t of = found >> INDEX_BITS;
      const Index next = of == number ? (Index)(found & MASK) : 0;
      if (of > number || next >= limit) return OVER;
      if (value_.compare_exchange_weak(found, (number << INDEX_BITS) + next + 1, std::memory_order_relaxed)) return next;
    }
  }

  // Adds pieces that are done. True for who completes the `limit` of them.
  bool add(uint64_t number, Index pieces, Index limit) {
    uint64_t found = value_.load(std::memory_order_relaxed);
    for (;;) {
      const Index done = (found >> INDEX_BITS == number ? (Index)(found & MASK) : 0) + pieces;
      const uint64_t wanted = (number << INDEX_BITS) + done;
      if (value_.compare_exchange_weak(found, wanted, std::memory_order_seq_cst)) return done == limit;
    }
  }

  bool is_complete(uint64_t number, Index limit) const {
    return value_.load(std::memory_order_seq_cst) >= (number << INDEX_BITS) + (uint64_t)limit;
  }

  // Forgets all loops, so that numbers may begin anew. Nobody may be in one.
  void clear() { value_.store(0, std::memory_order_relaxed); }

 private:
  static constexpr uint64_t MASK = (1u << INDEX_BITS) - 1;
  alignas(64) std::atomic<uint64_t> value_{0};
};

class Team;

// One thread in a region. What all threads of a region call, they call in the same order; some may come late, and
// find that the others have done the work.
class Worker {
 public:
  Worker(Team* team, Index me, uint64_t loop) : team_(team), me_(me), loop_(loop) {}

  inline Index team_size() const;

  // Calls `work(index)` for every index below `count`, each in some thread; all are done when it returns. A thread
  // takes neighbours one after the other, and in the end some of those that others have not come to.
  template <class Work>
  void each(Index count, Work work);

  uint64_t loop() const { return loop_; }

 private:
  Team* const team_;  // null for a thread that computes alone
  const Index me_;
  uint64_t loop_;  // the number of the next loop
};

// A set of threads that one caller at a time has; who comes while another has it computes alone, which gives the
// same bits.
class Team {
 public:
  explicit Team(Index size, uint64_t first_loop = 1)
      : size_(size), taken_(new Count[size]), members_(size), next_loop_(first_loop) {}

  ~Team() {
    is_over_.store(true, std::memory_order_seq_cst);
    bell_.ring();
    spare_.ring();
    for (auto& thread : threads_) thread.join();
  }

  Team(const Team&) = delete;

  Index size() const { return size_; }

  // Has so many of the threads take part from the next region on, the caller of `run` among them; the others sleep.
  // Any thread may say so at any time.
  void limit(Index members) {
    if (members_.exchange(members, std::memory_order_seq_cst) < members) spare_.ring();
  }

  // Runs `work(worker)` in the calling thread and in those of the others that come in time; alone unless `is_large`.
  template <class Work>
  void run(bool is_large, Work work) {
    std::unique_lock<std::mutex> mine(mutex_, std::defer_lock);
    if (!is_large || size_ == 1 || members_.load(std::memory_order_relaxed) == 1 || !mine.try_lock()) {
      Worker alone(nullptr, 0, 0);
      work(alone);
      return;
    }
    begin();
    if (next_loop_ > LAST_LOOP) number_anew();
    call_ = [](void* given, Worker& worker) { (*(Work*)given)(worker); };
    given_ = &work;
    door_.store((++regions_ << INDEX_BITS) | OPEN, std::memory_order_seq_cst);
    bell_.ring();
    Worker me(this, 0, next_loop_);
    work(me);
    door_.fetch_and(~OPEN, std::memory_order_seq_cst);
    bell_.wait(SPIN_IN_LOOP, [&] { return (door_.load(std::memory_order_seq_cst) & INSIDE) == 0; });
    next_loop_ = me.loop();
  }

 private:
  friend class Worker;
  static constexpr uint64_t OPEN = 1u << (INDEX_BITS - 1), INSIDE = OPEN - 1;

  // Has the threads there; they live as long as the team.
  void begin() {
    if (!threads_.empty()) return;
#if defined(__unix__) || defined(__APPLE__)
    sigset_t all, before;  // signals are for the threads that the process had
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    for (Index i = 1; i < size_; i++) threads_.emplace_back([this, i] { live(i); });
#if defined(__unix__) || defined(__APPLE__)
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
  }

  // Between two regions: no thread is inside one, and who comes late finds the door shut.
  void number_anew() {
    for (Index i = 0; i < size_; i++) taken_[i].clear();
    done_.clear();
    next_loop_ = 1;
  }

  // What thread `me` does until the team ends: the regions in whose time it comes.
  void live(Index me) {
    const auto is_over = [&] { return is_over_.load(std::memory_order_seq_cst); };
    const auto is_member = [&] { return me < members_.load(std::memory_order_seq_cst); };
    uint64_t door = 0, done = 0;
    const auto is_called = [&] {
      door = door_.load(std::memory_order_seq_cst);
      return (door & OPEN) && door >> INDEX_BITS > done;
    };
    for (;;) {
      spare_.wait(0, [&] { return is_member() || is_over(); });
      bell_.wait(SPIN_AT_REST, [&] { return is_called() || !is_member() || is_over(); });
      if (is_over()) return;
      if (!is_member() || !is_called()) continue;
      if (!door_.compare_exchange_strong(door, door + 1, std::memory_order_seq_cst)) continue;
      done = door >> INDEX_BITS;
      Worker worker(this, me, next_loop_);
      call_(given_, worker);
      if ((door_.fetch_sub(1, std::memory_order_seq_cst) & INSIDE) == 1) bell_.ring();
    }
  }

  const Index size_;
  const std::unique_ptr<Count[]> taken_;  // of each thread's share
  Count done_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
  Bell bell_, spare_;  // where members wait for a region, and where the others wait to be members again
  std::atomic<Index> members_;
  alignas(64) std::atomic<uint64_t> door_{0};  // which region, whether it is open, how many threads are inside
  std::atomic<bool> is_over_{false};
  // Written while nobody is inside:
  uint64_t regions_ = 0, next_loop_;
  void (*call_)(void*, Worker&) = nullptr;
  void* given_ = nullptr;
};

inline Index Worker::team_size() const { return team_ ? team_->size_ : 1; }

template <class Work>
void Worker::each(Index count, Work work) {
  if (!team_) {
    for (Index at = 0; at < count; at++) work(at);
    return;
  }
  const uint64_t loop = loop_++;
  if (count == 0) return;
  const Index size = team_->size_;
  Index pieces = 0;
  for (Index i = 0; i < size; i++) {
    const Index whose = (me_ + i) % size, first = count * whose / size, stop = count * (whose + 1) / size;
    for (Index at; (at = team_->taken_[whose].take(loop, stop - first)) != Count::OVER; pieces++) work(first + at);
  }
  if (pieces && team_->done_.add(loop, pieces, count))
    team_->bell_.ring();
  else
    team_->bell_.wait(SPIN_IN_LOOP, [&] { return team_->done_.is_complete(loop, count); });
}

}  // namespace

extern "C" {

// A team of `size` threads, the caller among them; slip_end_team ends it.
Team* slip_team(int64_t size) { return new Team(size); }
void slip_end_team(Team* team) { delete team; }

// So many of its threads take part from now on.
void slip_limit_team(Team* team, int64_t members) { team->limit(members); }

}  // extern "C"
