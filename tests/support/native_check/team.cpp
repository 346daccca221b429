// Teams whose loops come near the last number: every index is computed once all the same. Prints what is wrong.

#include "../../../engine/compute/native/team.h"

#include <cstdio>

namespace {

int failures_from(uint64_t first_loop) {
  constexpr Index REGIONS = 200, LOOPS = 3, COUNT = 50;
  Team team(4, first_loop);
  std::vector<std::atomic<int>> times(REGIONS * LOOPS * COUNT);
  for (Index region = 0; region < REGIONS; region++)
    team.run(true, [&](Worker& me) {
      for (Index loop = 0; loop < LOOPS; loop++)
        me.each(COUNT, [&](Index i) { times[(region * LOOPS + loop) * COUNT + i]++; });
    });
  int failures = 0;
  for (auto& each : times) failures += each != 1;
  return failures;
}

}  // namespace

int main() {
  int failures = 0;
  for (uint64_t loop : {LAST_LOOP - 100, 2 * LAST_LOOP - 100}) failures += failures_from(loop);
  if (failures) std::printf("%d were not computed once\n", failures);
  return failures != 0;
}
