"""The fuzzer of bodies knows every body that the server reads."""

from __future__ import annotations

from server.app import BODIES
from tests.soak.hostile_bodies import BODY_KINDS, hostile_bodies


def test_every_body_is_filled_in_every_field() -> None:
    assert set(BODY_KINDS) == set(BODIES)
    places = {(body.path, body.name.partition(" of ")[0]) for body in hostile_bodies(0)}
    for kind, path in BODY_KINDS.items():
        names = {field.alias or name for name, field in kind.model_fields.items()}
        assert {(path, name) for name in names} <= places
