"""Texts whose drafts are scored: a prompt, and the output that a model is taken to write after it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

HARBOUR = """\
The harbour of Eastwick lies between two low hills. In spring the fishing boats leave before dawn \
and return at noon with herring and mackerel. The old lighthouse on the western hill was built in \
1874 by a shipwright named Thomas Hale, who carried every stone up the slope with his two brothers. \
Today the lighthouse is a small museum. Visitors climb one hundred and twelve steps to the lamp \
room, where a brass telescope still points at the sea. On clear days you can see the island of \
Sorrel and the ferry that crosses to it three times a day. The museum shop sells postcards, honey \
from the hill farms and a little book about the storm of 1911, when forty boats were saved by the \
light."""

LIGHTHOUSE = """\
The lighthouse at Carrow Point was built in 1871 from granite that came by sea, because no road reached \
the cape in those years. Its first keeper, a widower called Amos Tully, lived there with two daughters \
and a cow, and kept a log in which he noted the weather, the ships that passed, and every visitor. There \
were few of the latter. In the winter of 1880 the supply boat could not land for eleven weeks, and the \
family lived on oatmeal, dried fish and the milk of the cow, which by then was almost dry itself.

When the lamp was changed from oil to electricity, in 1934, the tower lost its keeper but not its use. A \
cable was laid across the bay, and a clockwork switch lit the lamp at dusk. Twice a year an engineer \
rowed over to wind the clock and clean the glass. Fishermen who had grown up with the old light \
complained that the new one was too white, and that it made the rocks look closer than they were.

Today the building belongs to the county. The ground floor holds a small museum with the log of Amos \
Tully, open at the page of the eleven weeks, and from the gallery one can see as far as the islands on a \
clear day. The road that was missing in 1871 ends at a car park, and most visitors stay for less than an \
hour.
"""

REPORT = """\
The committee met on the second Tuesday of March to consider the state of the town's bridges. Of the \
fourteen bridges that the town maintains, nine were found to be in good order, three need new railings \
before the summer, and two should be closed to lorries until their foundations have been examined. The \
engineer estimated the cost of the railings at twelve thousand pounds. He declined to estimate the cost \
of the foundations, since nobody has seen them since the flood of 1987.

Mrs Okafor asked whether the bridge at Mill Lane could be replaced by a ford, as it had been before the \
war. The engineer replied that a ford would be cheaper to build and to maintain, but that the ambulance \
could not use it for about thirty days of the year. The committee agreed to keep the bridge. It was \
further agreed to ask the county for half of the cost, to publish the engineer's report in the library, \
and to meet again in May.
"""

PROSE_QUESTION = "Tell me about how bread is made, and why the dough has to rest.\n"

PROSE_ANSWER = """\
Bread begins with very little: flour, water, salt, and something to make it rise. When flour and water \
meet, two proteins in the flour join to form gluten, a stretchy net that can hold bubbles of gas. \
Kneading lines up the strands of that net, so a dough that tore easily after mixing becomes smooth and \
elastic after ten minutes of work. Salt slows the yeast a little and makes the gluten stronger, which is \
why bread without it tastes flat and often collapses.

Yeast feeds on sugars that enzymes free from the starch. As it eats, it gives off carbon dioxide, which \
inflates the net, and alcohol and acids, which give the loaf most of its flavour. This takes time. In a \
warm kitchen a dough may double within an hour; in a refrigerator the same dough needs a night, and \
tastes better for it, because the bacteria that make the acids mind the cold less than the yeast does.

The rest has a second purpose. Gluten that has just been worked is tense, and springs back when you try \
to shape it. Left alone for twenty minutes it relaxes, and the baker can roll it into a tight ball \
without tearing the skin. Meanwhile the flour goes on drinking water, so that a sticky dough becomes \
manageable without adding more flour. Finally the loaf is baked in a hot oven, with steam at the \
beginning: moisture keeps the crust soft long enough for one last rise, and then the outside sets, \
browns, and begins to crackle as it cools on the rack.

If your loaf comes out dense, the usual cause is impatience. Give it another half hour, press it gently \
with a finger, and bake it only when the dent fills slowly. A dough that springs back at once is not \
ready, and one that does not move at all has waited too long.
"""

ESSAY_ANSWER = """\
People often think that a map is a picture of a place, but it is closer to an argument about it. Someone \
had to decide what to show and what to leave out, and those decisions were made for a purpose. A \
sailor's chart names every rock below the water and hardly any village on the shore. A railway plan \
straightens rivers and coasts until the only distances that remain are counted in stations. Neither is \
wrong, and neither would help you find a house.

The earliest surviving maps make this plain. Clay tablets from Babylon show fields and canals, since it \
was fields and canals that were taxed. Medieval scholars put Jerusalem in the middle and east at the \
top, because their maps told a story about salvation rather than a route. When merchants began to need \
routes, they drew something new: coastlines crossed by lines of constant bearing, ugly to look at and \
astonishingly accurate.

What changed in the nineteenth century was not only precision but authority. Governments measured their \
countries triangle by triangle and printed the result in numbered sheets. For the first time a farmer \
could be told that his hedge stood in the wrong place by a person who had never seen it. Disputes that \
had been settled by memory were now settled by paper, and it mattered a great deal who had held the \
pencil.

Our own maps move with us, turn as we turn, and redraw themselves when the traffic does. They seem to \
have no author. Yet somebody still decides which shops appear at which scale, which border is dotted, \
and which road is the fastest. It is worth remembering, when a calm voice tells us to turn left, that \
this too is an argument.
"""

CODE = '''\
class Inventory:
    """Counts of parts, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, count: int) -> None:
        """Put `count` parts of this name on the shelf."""
        if count <= 0:
            raise ValueError(f"count must be positive, not {count}")
        self._counts[name] = self._counts.get(name, 0) + count

    def remove(self, name: str, count: int) -> None:
        """Take `count` parts of this name from the shelf."""
        if count <= 0:
            raise ValueError(f"count must be positive, not {count}")
        if self._counts.get(name, 0) < count:
            raise KeyError(f"only {self._counts.get(name, 0)} of {name} are left")
        self._counts[name] -= count
        if self._counts[name] == 0:
            del self._counts[name]

    def count(self, name: str) -> int:
        """How many parts of this name are on the shelf."""
        return self._counts.get(name, 0)

    def names(self) -> list[str]:
        """The names of all parts on the shelf, sorted."""
        return sorted(self._counts)

    def total(self) -> int:
        """How many parts there are in all."""
        return sum(self._counts.values())
'''

TESTS = """\
import pytest


def test_add_counts_parts() -> None:
    inventory = Inventory()
    inventory.add("bolt", 3)
    inventory.add("bolt", 2)
    assert inventory.count("bolt") == 5
    assert inventory.total() == 5


def test_add_refuses_zero() -> None:
    inventory = Inventory()
    with pytest.raises(ValueError, match="count must be positive, not 0"):
        inventory.add("bolt", 0)


def test_remove_takes_parts() -> None:
    inventory = Inventory()
    inventory.add("bolt", 3)
    inventory.add("nut", 7)
    inventory.remove("bolt", 2)
    assert inventory.count("bolt") == 1
    assert inventory.count("nut") == 7
    assert inventory.total() == 8


def test_remove_refuses_more_than_there_are() -> None:
    inventory = Inventory()
    inventory.add("bolt", 3)
    with pytest.raises(KeyError, match="only 3 of bolt are left"):
        inventory.remove("bolt", 4)


def test_remove_forgets_a_name_without_parts() -> None:
    inventory = Inventory()
    inventory.add("bolt", 3)
    inventory.add("nut", 7)
    inventory.remove("bolt", 3)
    assert inventory.names() == ["nut"]
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One generation with a known output. `prediction` is the caller's guess of it, empty without one."""

    name: str
    prompt: str
    output: str
    prediction: str = ""


def all_cases() -> tuple[Case, ...]:
    """What is drafted for, from pure copies to text that repeats nothing."""
    reworded = LIGHTHOUSE.replace("a widower called Amos Tully", "a retired sailor called Amos Tully")
    edited = CODE.replace("_counts", "_parts_by_name").replace("int = 0", "int")
    return (
        Case(
            "rewrite, one change",
            f"Write 1872 instead of 1871.\n\n{LIGHTHOUSE}\n",
            LIGHTHOUSE.replace("1871", "1872"),
        ),
        Case(
            "rewrite, one phrase", f"Amos Tully was a retired sailor. Correct it.\n\n{LIGHTHOUSE}\n", reworded
        ),
        Case(
            "shorten", f"Leave out the second paragraph.\n\n{LIGHTHOUSE}\n", without_paragraph(LIGHTHOUSE, 1)
        ),
        Case("rename in code", f"Rename _counts to _parts_by_name.\n\n{CODE}\n", edited),
        Case("rename, predicted", "Rename _counts to _parts_by_name.\n", edited, CODE),
        Case(
            "shorten, predicted",
            "Leave out the second paragraph.\n",
            without_paragraph(LIGHTHOUSE, 1),
            LIGHTHOUSE,
        ),
        Case("useless prediction", PROSE_QUESTION, PROSE_ANSWER, LIGHTHOUSE),
        Case("tests for code", f"Write tests for this class.\n\n{CODE}\n", TESTS),
        Case("json records", "List the orders as JSON.\n", records(24)),
        Case("quote a report", f"{REPORT}\nWhat was agreed, and what will it cost?\n", QUOTING_ANSWER),
        Case("prose", PROSE_QUESTION, PROSE_ANSWER),
        Case(
            "prose, long prompt",
            f"{LIGHTHOUSE}\n{REPORT}\n{PROSE_ANSWER}\nNow write about maps.\n",
            ESSAY_ANSWER,
        ),
    )


QUOTING_ANSWER = """\
The committee agreed to keep the bridge at Mill Lane, to ask the county for half of the cost, to publish \
the engineer's report in the library, and to meet again in May. The engineer estimated the cost of the \
railings at twelve thousand pounds. There is no figure for the foundations, because nobody has seen them \
since the flood of 1987.
"""


def without_paragraph(text: str, index: int) -> str:
    """The text less one of its paragraphs."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraphs[:index] + paragraphs[index + 1 :])


def records(count: int) -> str:
    """An indented JSON array of `count` orders, the same every time."""
    draw = random.Random(7)
    orders = [
        {
            "order_id": draw.randrange(10_000, 99_999),
            "customer": draw.choice(("Okafor", "Tully", "Lindqvist", "Marsh", "Adeyemi")),
            "items": [{"part": draw.choice(("bolt", "nut", "washer")), "count": draw.randrange(1, 90)}],
            "shipped": draw.random() < 0.7,
        }
        for _ in range(count)
    ]
    return json.dumps(orders, indent=2)
