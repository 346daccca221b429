"""How many examples a property is tried with: a quarter of them by default, all of them by `make test-all`.

How long one takes is no part of a property: on a busy machine any may take long. The profile is chosen by
--hypothesis-profile, before test modules are imported.
"""

from __future__ import annotations

from hypothesis import settings

QUARTER, ALL = "quarter", "all"


def register_profiles() -> None:
    """Make both profiles known and take that of a quarter, until the command line says otherwise."""
    settings.register_profile(QUARTER, max_examples=25, deadline=None)
    settings.register_profile(ALL, max_examples=100, deadline=None)
    settings.load_profile(QUARTER)


def share_of(most: int, part: int = 4) -> int:
    """`most` where all examples are tried, else a quarter of them or another part, rounded up."""
    return most if settings.get_current_profile_name() == ALL else -(-most // part)
