"""The conversations that training samples answer: a built-in mixture of everyday requests, or a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import StartRefused

Message = Mapping[str, object]

_SUBJECTS = """
the water cycle|black holes|how bread rises|the French Revolution|photosynthesis|a balanced diet|vaccines
solar panels|the Roman Empire|earthquakes|electric cars|learning a new language|sleep|the stock market
coffee|chess|volcanoes|the human heart|recycling|jazz music|climate change|computer networks|Shakespeare
yoga|the moon landing|honey bees|inflation|marathon training|the Great Wall of China|machine learning
gardening|dinosaurs|public speaking|the Amazon rainforest|democracy|oil painting|gravity|personal budgets
coral reefs|the printing press|meditation|bicycles|penguins|antibiotics|the Silk Road|time management
databases|cooking pasta|whales|the Renaissance|batteries|job interviews|tea|the internet|trains|cats
renewable energy|football|the Ice Age|houseplants|astronomy|team work|friendship|robots|the ocean
glaciers|the immune system|compound interest|the violin|deserts|elections|wind power|typewriters|spiders
the Industrial Revolution|migration of birds|cheese|swimming|ancient Egypt|encryption|tides|mountains|maps
kites|the digestive system|rainbows|lightning|submarines|libraries|poetry|the guitar|camping|knitting|dogs
insurance|mortgages|start-up companies|remote work|online shopping|social media|video games|photography|film
sculpture|opera|folk dances|fairy tales|Greek mythology|the Vikings|castles|pirates|the Cold War|the Olympics
tennis|basketball|rock climbing|running shoes|nutrition labels|vitamins|allergies|migraine|stress|good posture
the nervous system|genes|evolution|bacteria|mushrooms|trees|rice|chocolate|salt|sugar|olive oil|spices|fishing
farming|irrigation|soil|compost|plastic waste|clean water|air pollution|hurricanes|snow|the seasons
the equator
the solar system|comets|satellites|rockets|aeroplanes|bridges|tunnels|skyscrapers|concrete|glass|steel|paper
the wheel|clocks|calendars|money|taxes|supply and demand|advertising|leadership|negotiation|customer service
project plans|meetings|note taking|exams|homework|kindergarten|universities|scholarships|teachers|museums
algebra|fractions|probability|statistics|geometry|logic puzzles|algorithms|compilers|operating systems
web design
cloud computing|passwords|spam|search engines|smartphones|3D printing|drones|self-driving cars|X-rays|lasers
magnets|atoms|acids and bases|fire|heat pumps|refrigerators|microwaves|bicycles for children|motorcycles
ferries
hotels|airports|road trips|travel insurance|backpacks|beaches|islands|waterfalls|national parks|zoos|horses
owls
frogs|butterflies|ants|sharks|elephants|kangaroos|wolves|pets|moving house|neighbours|weddings|birthdays
parents|grandparents|patience|honesty|courage|gratitude|habits|creativity|kindness|happiness|laws|human rights
""".replace("\n", "|")

_ASK_ABOUT = """
Explain {} to a ten-year-old child.
Write a short paragraph about {}.
What are five interesting facts about {}?
Give me a numbered list of tips about {}.
What are the advantages and disadvantages of {}?
Write a short story that has something to do with {}.
Write a poem about {}.
What should a beginner know about {}?
Summarize what you know about {} in three sentences.
Write an email to a colleague about {}.
What are common misconceptions about {}?
Write a dialogue between a teacher and a student about {}.
Why does {} matter to people today?
Describe the history of {} briefly.
Write three quiz questions about {}, with answers.
Make a table in Markdown with facts about {}.
Write a product description for a book about {}.
How would you start a presentation about {}?
Compare {} with something similar.
Answer with a JSON object that has the keys "title", "summary" and "keywords" for an article about {}.
How does {} work, or how did it come about?
What would you tell someone who has never heard of {}?
What mistakes do people make when they deal with {}?
Why do people care about {}, and should they?
Give me some advice about {}.
Write a letter to a newspaper about {}.
Describe a day in which {} plays a part.
What questions should I ask an expert on {}?
Write the opening scene of a novel about {}.
What has changed about {} over the last hundred years?
"""

_CODE_TASKS = """
reverses a string|checks whether a number is prime|computes the factorial of n|sorts records by a key
counts the words in a text|finds the largest element of a list|merges two sorted lists|reads a CSV file
removes duplicates from a list|checks whether a string is a palindrome|converts Celsius to Fahrenheit
computes the n-th Fibonacci number|flattens a nested list|finds the median of a list|validates an address
generates a random password|implements a stack|implements binary search|parses a date|averages a list
downloads a web page|counts the vowels in a string|transposes a matrix|finds all anagrams in a list of words
computes the greatest common divisor|rotates a list|parses command line options|writes a log file|rolls dice
converts Roman numerals|checks balanced brackets|finds the shortest path in a graph|implements a queue
groups records by month|formats a number with commas|draws a triangle of stars|simulates a coin toss
""".replace("\n", "|")

_ASK_FOR_CODE = """
Write a Python function that {}.
Write a Python function that {}, with a docstring and an example.
Write a JavaScript function that {}.
Explain step by step how to write a program that {}.
Write a unit test for a function that {}.
Write a C program that {}.
"""

_OTHER = """
Hello! How are you today?|Who are you, and what can you help me with?|Tell me a joke.
What is the capital of {country}?|Name three famous people from {country} and what they did.
Plan a three-day trip to {country}.|What food is {country} known for? Give me a recipe.
Translate "Good morning, how much does this cost?" into the language of {country}.
What is {a} plus {b}? Show your work.|What is {a} times {b}? Show your work.
A shop sells {a} apples for {b} dollars. How much does one apple cost?
If a train travels {a} miles in {b} hours, how fast does it go? Explain.
List the numbers from {a} to {c}.|Convert {a} kilometres to miles.
Write a letter of thanks to a friend in {country}.|Write a weather report for {country}.
Rewrite this sentence in a formal tone: hey, our stuff from {country} still isn't here after {b} days.
Correct the grammar: she go to {country} last year and have buyed {b} souvenir.
""".replace("\n", "|")

_COUNTRIES = """
France|Japan|Brazil|Egypt|Canada|India|Germany|Mexico|Italy|Kenya|Australia|Spain|China|Greece|Norway|Peru
""".replace("\n", "|")

_NUM_OTHER = 1500


def builtin_prompts(seed: int) -> list[list[Message]]:
    """About eight thousand conversations of one question each, in an order that `seed` decides."""
    rng = random.Random(seed)
    texts = [ask.format(subject) for ask in _lines(_ASK_ABOUT) for subject in _parts(_SUBJECTS)]
    texts += [ask.format(task) for ask in _lines(_ASK_FOR_CODE) for task in _parts(_CODE_TASKS)]
    texts += [_fill(rng.choice(_parts(_OTHER)), rng) for _ in range(_NUM_OTHER)]
    texts = list(dict.fromkeys(texts))
    rng.shuffle(texts)
    return [[{"role": "user", "content": text}] for text in texts]


def read_prompts(path: Path) -> list[list[Message]]:
    """One conversation a line: plain text, or JSON with `messages` or `prompt`. Raises StartRefused."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON may hold what splitlines cuts at
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefused(f"--prompts {path}: cannot be read ({error}).") from error
    found = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise StartRefused(f"--prompts {path}: there is no prompt in it.")
    return found


def _read_line(path: Path, number: int, line: str) -> list[Message]:
    if not line.lstrip().startswith("{"):
        return [{"role": "user", "content": line.strip()}]
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise StartRefused(f"--prompts {path}, line {number}: not valid JSON ({error}).") from error
    messages = entry.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return list(messages)
    if isinstance(entry.get("prompt"), str):
        return [{"role": "user", "content": entry["prompt"]}]
    raise StartRefused(f"--prompts {path}, line {number}: expected the key messages or prompt.")


def _fill(template: str, rng: random.Random) -> str:
    first = rng.randint(2, 60)
    return template.format(
        country=rng.choice(_parts(_COUNTRIES)), a=first, b=rng.randint(2, 40), c=first + rng.randint(5, 15)
    )


def _lines(text: str) -> Sequence[str]:
    return text.strip().splitlines()


def _parts(text: str) -> Sequence[str]:
    return [part for part in text.split("|") if part]
