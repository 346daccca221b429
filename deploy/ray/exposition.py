"""Several replicas' Prometheus texts as one, each sample with the replica it comes from."""

from __future__ import annotations

from collections.abc import Mapping


def merge_expositions(texts: Mapping[str, str]) -> str:
    """One text of all samples in `texts`, which are by replica; a family stays together under one head."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in filter(None, text.splitlines()):
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                told = heads.setdefault(family, [])
                if line not in told:
                    told.append(line)
            else:
                samples.setdefault(family, []).append(_labelled(line, replica))
    families = [[*told, *samples.get(family, ())] for family, told in heads.items()]
    return "".join(f"{line}\n" for family in families for line in family)


def _labelled(sample: str, replica: str) -> str:
    """`name{a="b"} 1` or `name 1` with the label added in front."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}replica="{replica}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{replica="{replica}"}}{sample[space:]}'
