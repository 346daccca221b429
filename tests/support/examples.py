"""How many examples a property is tried with: half of them by default, all of them by `make test-all`.

How long one takes is no part of a property: on a busy machine any may take long. The profile is chosen by
--hypothesis-profile, before test modules are imported.
"""

from __future__ import annotations

from hypothesis import settings

HALF, ALL = "half", "all"


def register_profiles() -> None:
    """Make both profiles known and take the half one, until the command line says otherwise."""
    settings.register_profile(HALF, max_examples=50, deadline=None)
    settings.register_profile(ALL, max_examples=100, deadline=None)
    settings.load_profile(HALF)


def share_of(most: int) -> int:
    """`most` where all examples are tried, else half as many, rounded up."""
    return most if settings.get_current_profile_name() == ALL else -(-most // 2)
