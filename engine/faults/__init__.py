"""Faults for tests: parts that go wrong by plan, in the place of the plain ones, which know nothing of it."""
