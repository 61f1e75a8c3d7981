# SPDX-License-Identifier: Apache-2.0
"""Synthetic chat text for the embedded target model, generated from seeds.

Every conversation is a pure function of ``(seed, domain)``: the text comes from the templates and the small
hand-written tables in this file, nothing is downloaded.  The same generator makes the target's training text
(``train_tiny_target.py``) and the prompt sets that ship with the package::

    python scripts/tiny_target_text.py --out dflash_train/assets/demo

The sets are kept apart by content: a hash of the user's text puts every prompt in one of 50 buckets.
Bucket 0 is for the held-out prompts, buckets 1 to 4 are for the demo prompts, the others are for training the
target.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
from pathlib import Path

DOMAINS = ("arithmetic", "word_problems", "strings", "facts", "code")
N_BUCKETS = 50
HELDOUT_BUCKETS = frozenset({0})
DEMO_BUCKETS = frozenset({1, 2, 3, 4})
TRAIN_BUCKETS = frozenset(range(5, N_BUCKETS))

# --------------------------------------------------------------------------------------------------- tables

NAMES = [
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Iris",
    "Jack",
    "Kate",
    "Leo",
    "Maria",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tina",
    "Victor",
]
ITEMS = [
    "apples",
    "pears",
    "books",
    "pencils",
    "marbles",
    "stickers",
    "coins",
    "cards",
    "shells",
    "buttons",
    "cookies",
    "oranges",
    "stamps",
    "flowers",
    "balloons",
    "stones",
]
BOXES = ["boxes", "bags", "baskets", "jars", "shelves", "trays"]
WORDS = [
    "apple",
    "banana",
    "bread",
    "bridge",
    "brown",
    "butter",
    "candle",
    "carpet",
    "castle",
    "cherry",
    "circle",
    "cloud",
    "coffee",
    "copper",
    "corner",
    "cotton",
    "dance",
    "desert",
    "dinner",
    "doctor",
    "dragon",
    "dream",
    "eagle",
    "earth",
    "engine",
    "farmer",
    "finger",
    "fire",
    "flower",
    "forest",
    "friend",
    "frog",
    "garden",
    "ghost",
    "glass",
    "gold",
    "grape",
    "green",
    "guitar",
    "hammer",
    "happy",
    "honey",
    "horse",
    "house",
    "island",
    "jacket",
    "jungle",
    "kettle",
    "kitchen",
    "ladder",
    "lamp",
    "lemon",
    "letter",
    "light",
    "lion",
    "market",
    "melon",
    "metal",
    "milk",
    "mirror",
    "money",
    "monkey",
    "moon",
    "mountain",
    "music",
    "needle",
    "night",
    "north",
    "ocean",
    "office",
    "onion",
    "orange",
    "paper",
    "parrot",
    "pencil",
    "pepper",
    "piano",
    "picture",
    "pillow",
    "planet",
    "pocket",
    "poem",
    "potato",
    "prince",
    "purple",
    "queen",
    "rabbit",
    "radio",
    "rain",
    "river",
    "robot",
    "rocket",
    "salad",
    "salt",
    "school",
    "season",
    "shadow",
    "sheep",
    "silver",
    "sister",
    "snow",
    "soup",
    "spider",
    "spring",
    "square",
    "star",
    "stone",
    "storm",
    "street",
    "sugar",
    "summer",
    "table",
    "teacher",
    "tiger",
    "tomato",
    "train",
    "travel",
    "tree",
    "turtle",
    "valley",
    "violin",
    "wagon",
    "water",
    "whale",
    "wheel",
    "window",
    "winter",
    "wolf",
    "wood",
    "yellow",
    "zebra",
]
ORDINALS = ("first", "second", "third", "fourth", "fifth")
SHORT_WORDS = [w for w in WORDS if len(w) <= 6]

# country, capital, continent, currency, main language
COUNTRIES = [
    row.split("|")
    for row in """\
France|Paris|Europe|euro|French
Germany|Berlin|Europe|euro|German
Italy|Rome|Europe|euro|Italian
Spain|Madrid|Europe|euro|Spanish
Portugal|Lisbon|Europe|euro|Portuguese
Austria|Vienna|Europe|euro|German
Greece|Athens|Europe|euro|Greek
Ireland|Dublin|Europe|euro|English
Finland|Helsinki|Europe|euro|Finnish
Poland|Warsaw|Europe|zloty|Polish
Hungary|Budapest|Europe|forint|Hungarian
Sweden|Stockholm|Europe|krona|Swedish
Norway|Oslo|Europe|krone|Norwegian
Denmark|Copenhagen|Europe|krone|Danish
Iceland|Reykjavik|Europe|krona|Icelandic
Japan|Tokyo|Asia|yen|Japanese
China|Beijing|Asia|yuan|Chinese
India|New Delhi|Asia|rupee|Hindi
Thailand|Bangkok|Asia|baht|Thai
Vietnam|Hanoi|Asia|dong|Vietnamese
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Egypt|Cairo|Africa|pound|Arabic
Kenya|Nairobi|Africa|shilling|Swahili
Morocco|Rabat|Africa|dirham|Arabic
Ghana|Accra|Africa|cedi|English
Ethiopia|Addis Ababa|Africa|birr|Amharic
Canada|Ottawa|North America|dollar|English
Mexico|Mexico City|North America|peso|Spanish
Cuba|Havana|North America|peso|Spanish
Brazil|Brasilia|South America|real|Portuguese
Argentina|Buenos Aires|South America|peso|Spanish
Chile|Santiago|South America|peso|Spanish
Peru|Lima|South America|sol|Spanish
Australia|Canberra|Oceania|dollar|English""".splitlines()
]

# element, symbol, atomic number, kind, use
ELEMENTS = [
    row.split("|")
    for row in """\
hydrogen|H|1|a light gas|fuel for rockets
helium|He|2|a noble gas|filling balloons
lithium|Li|3|a soft metal|making batteries
carbon|C|6|a solid nonmetal|making steel and pencils
nitrogen|N|7|a gas|making fertiliser
oxygen|O|8|a gas|breathing and burning
neon|Ne|10|a noble gas|bright signs
sodium|Na|11|a soft metal|making table salt
magnesium|Mg|12|a light metal|light alloys
aluminium|Al|13|a light metal|cans and aeroplanes
silicon|Si|14|a hard solid|computer chips
sulfur|S|16|a yellow solid|making acid
chlorine|Cl|17|a green gas|cleaning water
calcium|Ca|20|a metal|building strong bones
titanium|Ti|22|a strong metal|light machine parts
iron|Fe|26|a metal|building bridges and tools
nickel|Ni|28|a metal|coins and alloys
copper|Cu|29|a red metal|electric wires
zinc|Zn|30|a metal|protecting steel from rust
silver|Ag|47|a shiny metal|jewellery and mirrors
tin|Sn|50|a soft metal|coating cans
gold|Au|79|a yellow metal|jewellery and coins
mercury|Hg|80|a liquid metal|old thermometers
lead|Pb|82|a heavy metal|car batteries""".splitlines()
]

# planet, position, kind, feature
PLANETS = [
    row.split("|")
    for row in """\
Mercury|first|a small rocky planet|it is the planet closest to the Sun
Venus|second|a rocky planet|it has a thick and very hot atmosphere
Earth|third|a rocky planet|it has oceans of liquid water
Mars|fourth|a small rocky planet|it looks red because of its rusty soil
Jupiter|fifth|a gas giant|it is the largest planet
Saturn|sixth|a gas giant|it has bright rings of ice
Uranus|seventh|an ice giant|it spins on its side
Neptune|eighth|an ice giant|it is the planet farthest from the Sun""".splitlines()
]

# animal, class, diet, home, young, legs
ANIMALS = [
    row.split("|")
    for row in """\
cat|mammal|meat|houses and farms|kitten|4
dog|mammal|mostly meat|houses and farms|puppy|4
cow|mammal|grass|farms|calf|4
horse|mammal|grass|farms and plains|foal|4
sheep|mammal|grass|farms and hills|lamb|4
goat|mammal|leaves and grass|farms and mountains|kid|4
pig|mammal|plants and scraps|farms|piglet|4
lion|mammal|meat|grassy plains|cub|4
bear|mammal|berries and fish|forests|cub|4
wolf|mammal|meat|forests|pup|4
deer|mammal|leaves and grass|forests|fawn|4
elephant|mammal|leaves and bark|plains and forests|calf|4
kangaroo|mammal|grass|dry plains|joey|2
whale|mammal|small sea animals|the ocean|calf|0
rabbit|mammal|grass and roots|meadows|kit|4
duck|bird|plants and insects|ponds and lakes|duckling|2
goose|bird|grass|lakes and fields|gosling|2
chicken|bird|seeds and insects|farms|chick|2
eagle|bird|meat|mountains|eaglet|2
owl|bird|mice|forests|owlet|2
swan|bird|water plants|lakes and rivers|cygnet|2
penguin|bird|fish|cold coasts|chick|2
frog|amphibian|insects|ponds|tadpole|4
snake|reptile|mice and eggs|deserts and forests|snakelet|0
turtle|reptile|plants and small animals|ponds and seas|hatchling|4
salmon|fish|small sea animals|rivers and the ocean|fry|0
butterfly|insect|nectar|meadows|caterpillar|6
bee|insect|nectar and pollen|hives|larva|6""".splitlines()
]

MONTHS = [
    (m, i + 1, d, s)
    for i, (m, d, s) in enumerate(
        zip(
            [
                "January",
                "February",
                "March",
                "April",
                "May",
                "June",
                "July",
                "August",
                "September",
                "October",
                "November",
                "December",
            ],
            (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31),
            [
                "winter",
                "winter",
                "spring",
                "spring",
                "spring",
                "summer",
                "summer",
                "summer",
                "autumn",
                "autumn",
                "autumn",
                "winter",
            ],
        )
    )
]
NUMBER_NAMES = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

# two colours, their mixture, something of that colour
MIXES = [
    row.split("|")
    for row in """\
red|yellow|orange|a ripe orange
blue|yellow|green|fresh grass
red|blue|purple|a plum
red|white|pink|a pink rose
black|white|grey|a rain cloud
blue|white|light blue|a clear sky
red|green|brown|a tree trunk""".splitlines()
]

OPPOSITES = [
    row.split("-")
    for row in [
        "hot-cold",
        "big-small",
        "fast-slow",
        "old-new",
        "high-low",
        "light-dark",
        "full-empty",
        "early-late",
        "hard-soft",
        "long-short",
        "loud-quiet",
        "open-closed",
        "rich-poor",
        "strong-weak",
        "wet-dry",
        "wide-narrow",
        "clean-dirty",
        "deep-shallow",
        "easy-difficult",
        "happy-sad",
        "heavy-light",
        "near-far",
        "sharp-blunt",
        "thick-thin",
        "true-false",
        "up-down",
        "warm-cool",
        "young-old",
        "brave-afraid",
        "begin-end",
        "buy-sell",
        "give-take",
        "laugh-cry",
    ]
]

# thing, definition, what it is used for
DEFINITIONS = [
    row.split("|")
    for row in """\
thermometer|an instrument that measures temperature|checking whether someone has a fever
compass|an instrument that shows direction|finding the way north
telescope|an instrument that makes distant things look closer|watching the stars
microscope|an instrument that makes tiny things look larger|looking at cells
clock|a device that shows the time|being on time
barometer|an instrument that measures air pressure|forecasting the weather
hammer|a tool with a heavy head|driving nails into wood
ruler|a straight tool with marks|measuring length
scale|a device that measures weight|weighing food
map|a drawing of a place seen from above|planning a journey
dictionary|a book that explains words|looking up a meaning
atlas|a book of maps|finding countries
library|a place that lends books|reading and studying
museum|a place that shows valuable objects|learning about history
bakery|a shop that makes bread|buying bread and cakes
bridge|a structure that crosses a river or road|getting to the other side
harbour|a sheltered place for ships|loading and unloading ships
volcano|a mountain that can release hot lava|studying the inside of the Earth
island|a piece of land surrounded by water|fishing and holidays
desert|a very dry area with little rain|studying plants that need little water
river|a long stream of fresh water|drinking water and transport
glacier|a slow river of ice|studying the climate of the past
engine|a machine that turns energy into motion|moving cars and trains
battery|a device that stores electric energy|powering a torch
computer|a machine that follows instructions|writing and calculating
algorithm|a list of steps that solves a problem|sorting and searching
variable|a name that stores a value|keeping a result for later
triangle|a shape with three sides|building strong roofs
square|a shape with four equal sides|tiling a floor
fraction|a number that describes a part of a whole|sharing a cake""".splitlines()
]

# Last sentences of the facts.
COUNTRY_TAILS = (
    " On a map of {cont} you can find {cap} in {c}.",
    " Visitors from other parts of {cont} often come to {cap}.",
    " A greeting in {lang} is always welcome in {c}.",
)
ELEMENT_TAILS = (" In the periodic table, {e} has place number {num}.", " Chemists write {sym} when they mean {e}.")
ANIMAL_TAILS = (
    " In short, the {a} is found in {home} and eats {food}.",
    " If you see a {young}, a grown {a} may be close.",
)
PLANET_TAILS = (" All eight planets move around the Sun.", " You can learn more about {p} with a telescope.")
MONTH_TAILS = (
    " The whole year has 12 months, from January to December.",
    " After {m} the year goes on with {a}, and before it comes {b}.",
)
DAY_TAILS = (" A week has 7 days, from Monday to Sunday.", " After Sunday the week starts again with Monday.")
MIX_TAILS = (" Try it with a little paint of each colour.", " With more {x} the mixture looks more like {x}.")
OPPOSITE_TAILS = (
    " It is easy to remember both words as a pair: {x} and {y}.",
    ' If you turn it around, the opposite of "{y}" is "{x}".',
)
DEFINITION_TAILS = (
    ' In short, think of {use} when you hear the word "{t}".',
    " If you need help with {use}, remember the {t}.",
)

# Openers and closers: the user's words and the assistant's matching words, so that greedy answers vary with
# the prompt and not by chance.
PREFIXES = [
    ("", ""),
    ("", ""),
    ("", ""),
    ("", ""),
    ("Hi! ", "Hello! "),
    ("Hello. ", "Hello! "),
    ("Quick question: ", ""),
    ("Please help me. ", "Of course. "),
    ("I have a question. ", "Sure. "),
    ("Can you help me with this? ", "Yes, I can. "),
    ("Good morning. ", "Good morning! "),
    ("For my homework: ", "Gladly. "),
    ("I am not sure about this. ", "No problem. "),
]
SUFFIXES = [
    ("", ""),
    ("", ""),
    ("", ""),
    ("", ""),
    ("", ""),
    (" Thanks!", " You are welcome!"),
    (" Please explain.", ""),
    (" Thank you in advance.", " I hope this helps."),
    (" Please answer in full sentences.", ""),
    (" I want to check my answer.", " I hope your answer matches."),
]
FOLLOW_UPS = [
    ("Thanks. ", ""),
    ("And now another one: ", "Next one. "),
    ("Great! ", ""),
    ("One more: ", ""),
    ("Next question: ", ""),
    ("Good. Now tell me this. ", "Of course. "),
    ("", ""),
]
SYSTEMS = [
    ("You are a helpful assistant.", "", ""),
    ("You are a friendly teacher.", "Good question! ", ""),
    ("Answer clearly and politely.", "With pleasure. ", ""),
    ("End every answer with the word Done.", "", " Done."),
    ("Start every answer with the word Certainly.", "Certainly. ", ""),
    ("You help children to learn.", "", " Well done for asking!"),
    ("You are a careful tutor who shows every step.", "Step by step: ", ""),
]

# ------------------------------------------------------------------------------------------------- assembly


def _turn(rng, prompts, answers, check, tails=("",), **values):
    """Fill one prompt template and one answer template, with a last sentence out of ``tails``.

    The wording of the answer usually follows the wording of the prompt (same index), which keeps greedy
    answers varied and predictable; one in eight takes another wording, which leaves something to sample.
    """
    i = rng.randrange(len(prompts))
    j = i % len(answers) if rng.random() < 0.875 else rng.randrange(len(answers))
    return prompts[i].format(**values), (answers[j] + tails[i % len(tails)]).format(**values), check


def _listing(words):
    """'a, b and c'."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _number(value):
    return {"kind": "last_number", "value": str(value)}


def _contains(*values):
    return {"kind": "contains", "value": list(values)}


# ----------------------------------------------------------------------------------------------- arithmetic


def _arithmetic(rng):
    kind = rng.randrange(9)
    if kind <= 1:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        return _turn(
            rng,
            [
                "What is {a} + {b}?",
                "Add {a} and {b}.",
                "Please calculate {a} plus {b}.",
                "How much is {a} + {b}?",
                "Find the sum of {a} and {b}.",
                "Can you work out {a} + {b} step by step?",
            ],
            [
                "Add the tens first: {at} + {bt} = {t}. Then add the ones: {ao} + {bo} = {o}. Finally, {t} + "
                "{o} = {s}. "
                "So {a} + {b} = {s}.",
                "We split both numbers. The tens give {at} + {bt} = {t}, and the ones give {ao} + {bo} = {o}. "
                "Together "
                "that is {t} + {o} = {s}, so the sum of {a} and {b} is {s}.",
                "Start with {a} and add the tens of {b}: {a} + {bt} = {m}. Now add the ones: {m} + {bo} = {s}. "
                "The "
                "answer is {s}.",
            ],
            _number(a + b),
            a=a,
            b=b,
            at=a // 10 * 10,
            bt=b // 10 * 10,
            t=(a // 10 + b // 10) * 10,
            ao=a % 10,
            bo=b % 10,
            o=a % 10 + b % 10,
            s=a + b,
            m=a + b // 10 * 10,
        )
    if kind <= 3:
        b = rng.randint(11, 89)
        a = rng.randint(b + 1, 99)
        return _turn(
            rng,
            [
                "What is {a} - {b}?",
                "Subtract {b} from {a}.",
                "Please calculate {a} minus {b}.",
                "How much is {a} - {b}?",
                "What is the difference between {a} and {b}?",
                "Take {b} away from {a}.",
            ],
            [
                "First subtract the tens: {a} - {bt} = {m}. Then subtract the ones: {m} - {bo} = {s}. So {a} - "
                "{b} = {s}.",
                "We write {b} as {bt} + {bo}. Taking away {bt} leaves {a} - {bt} = {m}. Taking away {bo} as "
                "well leaves "
                "{m} - {bo} = {s}. The difference is {s}.",
                "Start at {a} and go back {bt}: {a} - {bt} = {m}. Go back {bo} more: {m} - {bo} = {s}. To check, "
                "{s} + {b} = {a}. The answer is {s}.",
            ],
            _number(a - b),
            a=a,
            b=b,
            bt=b // 10 * 10,
            bo=b % 10,
            m=a - b // 10 * 10,
            s=a - b,
        )
    if kind == 4:
        a, b = rng.randint(2, 9), rng.randint(11, 49)
        return _turn(
            rng,
            [
                "What is {a} * {b}?",
                "Multiply {b} by {a}.",
                "How much is {a} times {b}?",
                "Please work out {a} * {b}.",
                "Find the product of {a} and {b}.",
                "Calculate {b} * {a} for me.",
            ],
            [
                "Split {b} into {bt} and {bo}. Then {a} * {bt} = {x} and {a} * {bo} = {y}. Adding them gives "
                "{x} + {y} = {s}. So the product is {s}.",
                "We multiply the parts one by one. The tens give {a} * {bt} = {x}. The ones give {a} * {bo} = "
                "{y}. "
                "The total is {x} + {y} = {s}, so the answer is {s}.",
            ],
            _number(a * b),
            a=a,
            b=b,
            bt=b // 10 * 10,
            bo=b % 10,
            x=a * (b // 10 * 10),
            y=a * (b % 10),
            s=a * b,
        )
    if kind == 5:
        b, s = rng.randint(2, 12), rng.randint(2, 12)
        return _turn(
            rng,
            [
                "What is {a} / {b}?",
                "Divide {a} by {b}.",
                "How many times does {b} go into {a}?",
                "Please calculate {a} divided by {b}.",
                "If I divide {a} by {b}, what do I get?",
            ],
            [
                "We need the number that gives {a} when it is multiplied by {b}. Because {b} * {s} = {a}, we "
                "know that "
                "{a} / {b} = {s}.",
                "Think of the table of {b}. We have {b} * {s} = {a}, and nothing is left over. The answer is {s}.",
            ],
            _number(s),
            a=b * s,
            b=b,
            s=s,
        )
    if kind == 6:
        a, b = rng.randint(5, 49), rng.randint(5, 49)
        c = rng.randint(2, min(30, a + b - 1))
        return _turn(
            rng,
            [
                "What is {a} + {b} - {c}?",
                "Calculate ({a} + {b}) - {c}.",
                "Add {a} and {b}, then subtract {c}.",
                "Start with {a}, add {b} and take away {c}. What is left?",
            ],
            [
                "We go from left to right. The first step is {a} + {b} = {m}. The second step is {m} - {c} = "
                "{s}. So the "
                "result is {s}.",
                "First add: {a} + {b} = {m}. Then subtract {c} from {m}: {m} - {c} = {s}. The final answer is {s}.",
            ],
            _number(a + b - c),
            a=a,
            b=b,
            c=c,
            m=a + b,
            s=a + b - c,
        )
    if kind == 7:
        a, d, n = rng.randint(1, 20), rng.randint(2, 10), 4
        seq = [a + d * i for i in range(n)]
        return _turn(
            rng,
            [
                "What is the next number in the sequence {q}?",
                "Continue the sequence {q}.",
                "Which number comes after {q}?",
                "Find the next term: {q}.",
            ],
            [
                "Look at the steps between the numbers. From {a} to {b} the step is {d}, and it stays the same. "
                "The next "
                "number is {z} + {d} = {s}.",
                "Each number is {d} more than the one before, because {a} + {d} = {b}. We add {d} to the last "
                "number: "
                "{z} + {d} = {s}. The next number is {s}.",
            ],
            _number(seq[-1] + d),
            q=", ".join(map(str, seq)),
            a=a,
            b=seq[1],
            d=d,
            z=seq[-1],
            s=seq[-1] + d,
        )
    a, b, c = (rng.randint(2, 40) for _ in range(3))
    word, bigger, smaller = ("larger", max, min) if rng.random() < 0.5 else ("smaller", min, max)
    if a + b == c:
        c += 1
    s = bigger(a + b, c)
    return _turn(
        rng,
        [
            "Which is {w}, {a} + {b} or {c}?",
            "Tell me which is {w}: {c} or {a} + {b}.",
            "I have to compare {a} + {b} with {c}. Which is {w}?",
        ],
        [
            "First we work out the sum: {a} + {b} = {m}. Now compare {m} with {c}. The {w} number is {s}.",
            "The sum is {a} + {b} = {m}. The other number is {c}. If we compare {m} and {c}, the {w} one is {s}.",
        ],
        _number(s),
        w=word,
        a=a,
        b=b,
        c=c,
        m=a + b,
        s=s,
    )


# -------------------------------------------------------------------------------------------- word problems


def _word_problems(rng):
    kind = rng.randrange(10)
    n, o = rng.sample(NAMES, 2)
    i, j = rng.sample(ITEMS, 2)
    box = rng.choice(BOXES)
    a, b, c = rng.randint(5, 40), rng.randint(3, 30), rng.randint(2, 9)
    v = dict(n=n, o=o, i=i, j=j, box=box, a=a, b=b, c=c)
    if kind == 0:
        return _turn(
            rng,
            [
                "{n} has {a} {i}. {o} gives {n} {b} more. How many {i} does {n} have now?",
                "{n} finds {a} {i} in the morning and {b} {i} in the evening. How many {i} is that in total?",
                "There are {a} {i} on the table, and {n} adds {b} {i}. How many {i} are there now?",
            ],
            [
                "{n} starts with {a} {i}. Then {n} gets {b} more, so we add: {a} + {b} = {s}. {n} now has {s} {i}.",
                "We add the two amounts, because all {i} are counted together. The equation is {a} + {b} = {s}. "
                "In total "
                "there are {s} {i}.",
                "At first there are {a} {i}. Adding {b} gives {a} + {b} = {s}. So the number of {i} is now {s}.",
            ],
            _number(a + b),
            s=a + b,
            **v,
        )
    if kind == 1:
        v["a"] = a = a + b
        return _turn(
            rng,
            [
                "{n} has {a} {i} and gives {b} of them to {o}. How many {i} are left?",
                "{n} had {a} {i} but lost {b}. How many {i} does {n} still have?",
                "A shop has {a} {i} and sells {b}. How many {i} remain?",
            ],
            [
                "{n} has {a} {i} at the start. After giving away {b}, we subtract: {a} - {b} = {s}. The number "
                "of {i} "
                "left is {s}.",
                "Losing {i} means that we subtract. The equation is {a} - {b} = {s}. {n} still has {s} {i}.",
                "The shop begins with {a} {i}. It sells {b} of them, so {a} - {b} = {s}. There remain {s} {i}.",
            ],
            _number(a - b),
            s=a - b,
            **v,
        )
    if kind == 2:
        v["d"] = d = rng.randint(3, 12)
        return _turn(
            rng,
            [
                "{n} has {c} {box} with {d} {i} in each. How many {i} does {n} have?",
                "There are {c} {box}. Each holds {d} {i}. How many {i} are there altogether?",
                "{n} fills {c} {box} and puts {d} {i} in each of them. How many {i} are needed?",
            ],
            [
                "There are {c} {box}, and each one has {d} {i}. We multiply: {c} * {d} = {s}. {n} has {s} {i}.",
                "All {box} hold the same number of {i}, so we can multiply. The equation is {c} * {d} = {s}. "
                "Altogether "
                "there are {s} {i}.",
            ],
            _number(c * d),
            s=c * d,
            **v,
        )
    if kind == 3:
        s = rng.randint(2, 12)
        return _turn(
            rng,
            [
                "{n} shares {t} {i} equally among {c} friends. How many {i} does each friend get?",
                "{t} {i} are packed into {c} {box} equally. How many {i} are in each?",
                "{c} children share {t} {i} fairly. How many does each child get?",
            ],
            [
                "Sharing equally means dividing. We divide {t} by {c}: {t} / {c} = {s}. Each friend gets {s} {i}.",
                "The {i} are split into {c} equal parts. Because {c} * {s} = {t}, we have {t} / {c} = {s}. The "
                "number in "
                "each part is {s}.",
            ],
            _number(s),
            t=c * s,
            s=s,
            **v,
        )
    if kind == 4:
        p, q = rng.randint(2, 9), rng.randint(2, 9)
        return _turn(
            rng,
            [
                "{n} buys {p} {i} for {c} dollars each. How much does {n} pay?",
                "One of the {i} costs {c} dollars. What is the price of {p} {i}?",
            ],
            [
                "Each one costs {c} dollars, and {n} buys {p}. We multiply the price by the number: {p} * {c} = "
                "{s}. The "
                "total in dollars is {s}.",
                "The price of one is {c} dollars. For {p} {i} the equation is {p} * {c} = {s}. The price in "
                "dollars is {s}.",
            ],
            _number(p * c),
            p=p,
            q=q,
            s=p * c,
            **v,
        )
    if kind == 5:
        p, q = rng.randint(2, 9), rng.randint(2, 6)
        bill = rng.choice([x for x in (20, 50, 100) if x > p * q])
        return _turn(
            rng,
            [
                "{n} buys {p} {i} at {q} dollars each and pays with a {m} dollar note. How much change does {n} get?",
                "{p} {i} cost {q} dollars each. {n} pays with {m} dollars. What is the change?",
            ],
            [
                "First we find the cost: {p} * {q} = {x} dollars. Then we subtract it from the money paid: "
                "{m} - {x} = {s}. The change in dollars is {s}.",
                "The {i} cost {p} * {q} = {x} dollars. {n} pays {m} dollars, so the change is {m} - {x} = {s}.",
            ],
            _number(bill - p * q),
            p=p,
            q=q,
            m=bill,
            x=p * q,
            s=bill - p * q,
            **v,
        )
    if kind == 6:
        return _turn(
            rng,
            [
                "{n} has {a} {i} and {o} has {b} more than {n}. How many {i} do they have together?",
                "{o} has {b} more {i} than {n}, who has {a}. How many {i} do they have in all?",
            ],
            [
                "First find how many {i} {o} has: {a} + {b} = {m}. Then add both amounts: {a} + {m} = {s}. "
                "Together they "
                "have {s} {i}.",
                "{n} has {a} {i}. {o} has {a} + {b} = {m}. The equation for both is {a} + {m} = {s}. In all "
                "they have {s} {i}.",
            ],
            _number(2 * a + b),
            m=a + b,
            s=2 * a + b,
            **v,
        )
    if kind == 7:
        h, k = rng.randint(2, 9), rng.choice((4, 5, 6, 10, 20, 30, 40, 50))
        return _turn(
            rng,
            [
                "A train travels {k} kilometres every hour. How far does it go in {h} hours?",
                "{n} cycles for {h} hours at {k} kilometres per hour. How many kilometres is that?",
            ],
            [
                "Distance is speed times time. The speed is {k} and the time is {h} hours, so {k} * {h} = {s}. "
                "The "
                "distance in kilometres is {s}.",
                "In one hour {n} covers {k} kilometres. In {h} hours it is {h} * {k} = {s}. The distance in "
                "kilometres is {s}.",
            ],
            _number(h * k),
            h=h,
            k=k,
            s=h * k,
            **v,
        )
    if kind == 8:
        age, d = rng.randint(5, 40), rng.randint(2, 20)
        return _turn(
            rng,
            [
                "{n} is {g} years old. {o} is {d} years older. How old is {o}?",
                "{n} is {g} years old now. How old will {n} be in {d} years?",
            ],
            [
                "{n} is {g} years old. Being older means that we add: {g} + {d} = {s}. The age of {o} is {s}.",
                "The age now is {g}. After {d} years we add {d}: {g} + {d} = {s}. {n} will then be {s}.",
            ],
            _number(age + d),
            g=age,
            d=d,
            s=age + d,
            **v,
        )
    d = rng.randint(3, 9)
    e = rng.randint(1, c * d - 1)
    return _turn(
        rng,
        [
            "{n} has {c} {box} with {d} {i} each. {n} gives {e} {i} to {o}. How many {i} are left?",
            "There are {c} {box} of {d} {i}. {o} takes {e} {i} away. How many {i} remain?",
        ],
        [
            "First multiply to find all {i}: {c} * {d} = {m}. Then subtract the ones given away: {m} - {e} = "
            "{s}. The "
            "number of {i} left is {s}.",
            "At the start there are {c} * {d} = {m} {i}. After {e} are taken, {m} - {e} = {s}. There remain {s} {i}.",
        ],
        _number(c * d - e),
        d=d,
        e=e,
        m=c * d,
        s=c * d - e,
        **v,
    )


# -------------------------------------------------------------------------------------------------- strings


def _strings(rng):
    kind = rng.randrange(13)
    w = rng.choice(WORDS)
    ws = rng.sample(WORDS, rng.randint(3, 5))
    nums = rng.sample(range(1, 60), rng.randint(4, 5))
    v = dict(w=w, ws=", ".join(ws), nums=", ".join(map(str, nums)), sp="-".join(w))
    if kind == 0:
        w = rng.choice(SHORT_WORDS)
        r = w[::-1]
        return _turn(
            rng,
            ['Reverse the word "{w}".', 'How do you spell "{w}" backwards?', "Write the word {w} in reverse order."],
            [
                'The letters of "{w}" are {sp}. Read from the end, they are {rp}. So the reversed word is "{r}".',
                'First spell the word: {sp}. Then take the letters from last to first: {rp}. Backwards it is "{r}".',
            ],
            _contains(f'"{r}"'),
            w=w,
            sp="-".join(w),
            rp="-".join(r),
            r=r,
        )
    if kind == 1:
        return _turn(
            rng,
            [
                'Write "{w}" in capital letters.',
                'Convert the word "{w}" to uppercase.',
                "Put {w} in upper case, please.",
            ],
            [
                'The word "{w}" has the letters {sp}. Each one becomes a capital: {up}. The result is "{u}".',
                'We change every small letter of "{w}" to a capital letter, which gives {up}. In uppercase it '
                'is "{u}".',
            ],
            _contains(f'"{w.upper()}"'),
            u=w.upper(),
            up="-".join(w.upper()),
            **v,
        )
    if kind == 2:
        return _turn(
            rng,
            [
                'How many letters are in the word "{w}"?',
                'Count the letters of "{w}".',
                "What is the length of the word {w}?",
            ],
            [
                'Let us count the letters one by one: {count}. The last count is {n}, so "{w}" has {n} letters.',
                'We spell "{w}" and count: {count}. The number of letters is {n}.',
            ],
            _number(len(w)),
            count=", ".join(f"{x} {i}" for i, x in enumerate(w, 1)),
            n=len(w),
            **v,
        )
    if kind == 3:
        x = rng.choice(w)
        flags = ", ".join(f"{y} yes" if y == x else f"{y} no" for y in w)
        return _turn(
            rng,
            ['How many times does the letter "{x}" occur in "{w}"?', 'Count the letter "{x}" in the word "{w}".'],
            [
                'We look at each letter of "{w}": {flags}. The number of times that "{x}" occurs is {n}.',
                'Go through "{w}" letter by letter: {flags}. Counting the letter "{x}" gives {n}.',
            ],
            _number(w.count(x)),
            x=x,
            flags=flags,
            n=w.count(x),
            **v,
        )
    if kind == 4:
        sep, name = rng.choice([("-", "a hyphen"), ("+", "a plus sign"), ("/", "a slash"), ("_", "an underscore")])
        return _turn(
            rng,
            [
                "Join the words {ws} with {name}.",
                "Put {name} between these words: {ws}.",
                "Make one string from {ws}, separated by {name}.",
            ],
            [
                "There are {k} words: {ws}. We write {name} between each pair of words. The result is {r}.",
                "We take the words in order, {lst}, and put {name} between them. The joined string is {r}.",
            ],
            _contains(sep.join(ws)),
            name=name,
            k=len(ws),
            lst=_listing(ws),
            r=sep.join(ws),
            **v,
        )
    if kind == 5:
        srt = sorted(ws)
        firsts = ", ".join(f"{x[0]} for {x}" for x in srt)
        return _turn(
            rng,
            [
                "Sort these words alphabetically: {ws}.",
                "Put the words {ws} in alphabetical order.",
                "What is the alphabetical order of {ws}?",
            ],
            [
                "We compare the words by their letters: {firsts}. In alphabetical order the list is {r}.",
                "Look at how the words begin, from a to z: {firsts}. The sorted list is {r}.",
            ],
            _contains(", ".join(srt)),
            firsts=firsts,
            r=", ".join(srt),
            **v,
        )
    if kind == 6:
        up = rng.random() < 0.7
        srt = sorted(nums, reverse=not up)
        return _turn(
            rng,
            [
                "Sort the numbers {nums} from {d}.",
                "Order these numbers from {d}: {nums}.",
                "Please arrange {nums} from {d}.",
            ],
            [
                "We pick the {e} number each time. The {e} one is {f}, next comes {g}, and the last one is {z}. "
                "The "
                "sorted list is {r}.",
                "The {e} number is {f} and the last one will be {z}. From {d}, the numbers are {r}.",
            ],
            _contains(", ".join(map(str, srt))),
            d="smallest to largest" if up else "largest to smallest",
            e="smallest" if up else "largest",
            f=srt[0],
            g=srt[1],
            z=srt[-1],
            r=", ".join(map(str, srt)),
            **v,
        )
    if kind == 7:
        few = ws[:3]
        many = few + rng.choices(few, k=rng.randint(1, 2))
        rng.shuffle(many)
        uniq = list(dict.fromkeys(many))
        twice = [x for x in uniq if many.count(x) > 1]
        return _turn(
            rng,
            [
                "Remove the duplicates from this list: {many}.",
                "Which words are left in {many} without repeats?",
                "Delete repeated words and keep the order: {many}.",
            ],
            [
                "We keep a word only the first time that we see it. Seen more than once: {twice}. Without "
                "duplicates the "
                "list is {r}.",
                "Go from left to right and skip words that we already have. Repeated words: {twice}. What "
                "remains is {r}.",
            ],
            _contains(f"is {', '.join(uniq)}."),
            many=", ".join(many),
            twice=_listing(twice),
            r=", ".join(uniq),
        )
    if kind == 8:
        p = rng.randrange(len(ws))
        numbered = ", ".join(f"{i} {x}" for i, x in enumerate(ws, 1))
        return _turn(
            rng,
            [
                "What is the {o} word in the list {ws}?",
                "Give me the {o} item of {ws}.",
                "From the list {ws}, pick the {o} word.",
            ],
            [
                'We number the words: {numbered}. The {o} word is number {p}, and that is "{x}".',
                'Counting from the left gives {numbered}. So the {o} item is "{x}".',
            ],
            _contains(f'"{ws[p]}"'),
            o=ORDINALS[p],
            p=p + 1,
            x=ws[p],
            numbered=numbered,
            **v,
        )
    if kind == 9:
        rev = ", ".join(reversed(ws))
        return _turn(
            rng,
            ["Reverse the list {ws}.", "Write these words in the opposite order: {ws}.", "Turn the list {ws} around."],
            [
                'The last word is "{z}", so it comes first now, and "{f}" goes to the end. The reversed list is {r}.',
                'We start at the end with "{z}" and go back to "{f}". In the opposite order the list is {r}.',
            ],
            _contains(rev),
            z=ws[-1],
            f=ws[0],
            r=rev,
            **v,
        )
    if kind == 10:
        vowels = [x for x in w if x in "aeiou"]
        return _turn(
            rng,
            ['Which vowels are in the word "{w}"?', 'Count the vowels in "{w}".', "How many vowels does {w} have?"],
            [
                'The letters of "{w}" are {sp}. The vowels among them are {lst}. So the number of vowels is {n}.',
                "We spell the word: {sp}. Now we keep only a, e, i, o and u, which gives {lst}. The vowel count "
                "is {n}.",
            ],
            _number(len(vowels)),
            lst=_listing(vowels) if vowels else "none",
            n=len(vowels),
            **v,
        )
    if kind == 11:
        firsts = "".join(x[0] for x in ws).upper()
        return _turn(
            rng,
            [
                "Make an acronym from the words {ws}.",
                "Take the first letter of each word: {ws}.",
                "What do the initials of {ws} spell?",
            ],
            [
                'The first letters are {pairs}. Written together in capitals they give "{r}".',
                'We take one letter from each word: {pairs}. The initials are "{r}".',
            ],
            _contains(f'"{firsts}"'),
            pairs=", ".join(f"{x[0]} from {x}" for x in ws),
            r=firsts,
            **v,
        )
    word, fn = rng.choice([("largest", max), ("smallest", min)])
    best, steps = nums[0], []
    for x in nums[1:]:
        best = fn(best, x)
        steps.append(f"with {x} it is {best}")
    return _turn(
        rng,
        ["What is the {e} number in {nums}?", "Find the {e} of these numbers: {nums}.", "Which of {nums} is the {e}?"],
        [
            "We start with {f} and look at the others: {steps}. So the {e} number is {r}.",
            "Keep the {e} number seen so far. At first it is {f}, {steps}. The answer is {r}.",
        ],
        _number(best),
        e=word,
        f=nums[0],
        steps=", ".join(steps),
        r=best,
        **v,
    )


# ---------------------------------------------------------------------------------------------------- facts


def _facts(rng):
    kind = rng.choices(range(11), weights=(6, 3, 3, 4, 4, 2, 4, 3, 2, 4, 4))[0]
    if kind <= 2:
        c, cap, cont, cur, lang = rng.choice(COUNTRIES)
        v = dict(c=c, cap=cap, cont=cont, cur=cur, lang=lang, tails=COUNTRY_TAILS)
        if kind == 0:
            return _turn(
                rng,
                [
                    "What is the capital of {c}?",
                    "Which city is the capital of {c}?",
                    "Name the capital city of {c}.",
                    "Tell me the capital of {c}.",
                ],
                [
                    "The capital of {c} is {cap}. {c} is a country in {cont}, and its main language is {lang}.",
                    "{cap} is the capital city of {c}. The country lies in {cont}. People there pay with the {cur}.",
                    "The capital city of {c} is {cap}. Many people in {cap} speak {lang}, and they pay with the {cur}.",
                ],
                _contains(cap),
                **v,
            )
        if kind == 1:
            return _turn(
                rng,
                [
                    "What language do people speak in {c}?",
                    "Which language is spoken in {c}?",
                    "What money do people use in {c}?",
                    "What is the currency of {c}?",
                ],
                [
                    "In {c} most people speak {lang}. The country is in {cont}, its capital is {cap}, and its "
                    "currency is "
                    "the {cur}.",
                    "The main language of {c} is {lang}. You can hear it in {cap}, the capital. People there "
                    "pay with the "
                    "{cur}.",
                    "People in {c} use the {cur}. The country is in {cont}, and its capital is {cap}. The main "
                    "language "
                    "is {lang}.",
                    "The currency of {c} is the {cur}. You can spend it in {cap}, the capital city. Most people "
                    "speak {lang}.",
                ],
                _contains(lang, cur),
                **v,
            )
        return _turn(
            rng,
            [
                "On which continent is {c}?",
                "Where is {c}?",
                "Tell me something about {c}.",
                "Which country has the capital {cap}?",
            ],
            [
                "{c} is in {cont}. The capital of the country is {cap}, and the main language is {lang}.",
                "{c} lies in {cont}. If you visit its capital, {cap}, you pay with the {cur}.",
                "{c} is a country in {cont}. Its capital is {cap}. People speak {lang} and pay with the {cur}.",
                "{cap} is the capital of {c}. This country is in {cont}, and its main language is {lang}.",
            ],
            _contains(c, cap, cont),
            **v,
        )
    if kind == 3:
        e, sym, num, what, use = rng.choice(ELEMENTS)
        return _turn(
            rng,
            [
                "What is the chemical symbol of {e}?",
                "What is the atomic number of {e}?",
                "What is {e} used for?",
                "Tell me about the element {e}.",
                "Which element has the symbol {sym}?",
            ],
            [
                "The chemical symbol of {e} is {sym}. It is {what} with the atomic number {num}. People use it "
                "for {use}.",
                "The atomic number of {e} is {num}. Its symbol is {sym}, and it is {what}.",
                "People use {e} for {use}. It is {what}, its symbol is {sym}, and its atomic number is {num}.",
                "The element {e} is {what}. Its symbol is {sym} and its atomic number is {num}. It is used for {use}.",
                "The symbol {sym} stands for {e}. This element is {what} and has the atomic number {num}.",
            ],
            _contains(e, sym, num),
            ELEMENT_TAILS,
            e=e,
            sym=sym,
            num=num,
            what=what,
            use=use,
        )
    if kind == 4:
        a, cls, food, home, young, legs = rng.choice(ANIMALS)
        article = "an" if a[0] in "aeiou" else "a"
        return _turn(
            rng,
            [
                "What does {art} {a} eat?",
                "What is a young {a} called?",
                "Where does {art} {a} live?",
                "Is {art} {a} a mammal or something else?",
                "How many legs does {art} {a} have?",
                "Tell me something about the {a}.",
            ],
            [
                "The {a} eats {food}. It lives in places such as {home}, and its young is called a {young}.",
                "A young {a} is called a {young}. When it grows up, it eats {food}.",
                "The {a} lives in places such as {home}. There it finds its food: {food}.",
                "The {a} belongs to this group: {cls}. It eats {food}, and its young is called a {young}.",
                "The number of legs of the {a} is {legs}. It belongs to this group: {cls}. It lives in places "
                "such as {home}.",
                "The {a} belongs to this group: {cls}. It lives in places such as {home} and eats {food}. Its "
                "young is "
                "called a {young}.",
            ],
            {"kind": "any", "value": [food, young, home, cls]},
            ANIMAL_TAILS,
            art=article,
            a=a,
            cls=cls,
            food=food,
            home=home,
            young=young,
            legs=legs,
        )
    if kind == 5:
        p, pos, what, feature = rng.choice(PLANETS)
        return _turn(
            rng,
            [
                "What kind of planet is {p}?",
                "Which planet is the {pos} from the Sun?",
                "Tell me about the planet {p}.",
                "What is special about {p}?",
            ],
            [
                "{p} is {what}. It is the {pos} planet from the Sun, and {f}.",
                "The {pos} planet from the Sun is {p}. It is {what}, and {f}.",
                "{p} is the {pos} planet from the Sun. It is {what}. One special thing about {p} is that {f}.",
                "One special thing about {p} is that {f}. It is {what} and the {pos} planet from the Sun.",
            ],
            _contains(p, pos, what),
            PLANET_TAILS,
            p=p,
            pos=pos,
            what=what,
            f=feature,
        )
    if kind == 6:
        m, i, d, s = rng.choice(MONTHS)
        before, after = MONTHS[i - 2][0], MONTHS[i % 12][0]
        note = " In a leap year it has 29 days." if m == "February" else ""
        return _turn(
            rng,
            [
                "How many days does {m} have?",
                "Which month comes after {m}?",
                "Which month comes before {m}?",
                "Which number in the year is the month {m}?",
                "In which season is {m}?",
            ],
            [
                "{m} has {d} days.{note} It is the {o} month of the year and comes after {b}.",
                "After {m} comes {a}. {m} is the {o} month of the year and has {d} days.{note}",
                "Before {m} comes {b}. {m} is the {o} month of the year and has {d} days.{note}",
                "{m} is the {o} month of the year. It comes after {b} and before {a}.",
                "In the north, {m} is in {s}. It is the {o} month of the year, and it has {d} days.{note}",
            ],
            {"kind": "any", "value": [f"{d} days", f"the {NUMBER_NAMES[i - 1]} month"]},
            MONTH_TAILS,
            m=m,
            d=d,
            s=s,
            a=after,
            b=before,
            o=NUMBER_NAMES[i - 1],
            note=note,
        )
    if kind == 7:
        i = rng.randrange(7)
        before, after, two = DAYS[i - 1], DAYS[(i + 1) % 7], DAYS[(i + 2) % 7]
        end = "It is part of the weekend." if i >= 5 else "It is a working day for many people."
        return _turn(
            rng,
            [
                "Which day comes after {d}?",
                "Which day comes before {d}?",
                "Today is {d}. What day is it tomorrow?",
                "If today is {d}, what day is the day after tomorrow?",
            ],
            [
                "The day after {d} is {a}. The days of the week go on in order: {b}, {d}, {a}.",
                "The day before {d} is {b}. In order, the days are {b}, {d} and {a}.",
                "If today is {d}, then tomorrow is {a}. Yesterday was {b}. {d} is today's day. {end}",
                "If today is {d}, then tomorrow is {a}, and the day after tomorrow is {t}.",
            ],
            {"kind": "any", "value": [before, after]},
            DAY_TAILS,
            d=DAYS[i],
            a=after,
            b=before,
            t=two,
            end=end,
        )
    if kind == 8:
        x, y, m, thing = rng.choice(MIXES)
        if rng.random() < 0.5:
            x, y = y, x
        return _turn(
            rng,
            [
                "Which colour do you get when you mix {x} and {y}?",
                "What do {x} paint and {y} paint make together?",
                "I mix {x} with {y}. What colour is it?",
            ],
            [
                "If you mix {x} and {y}, you get {m}. You can see this colour in nature: think of {t}.",
                "{X} paint and {y} paint together make {m}. It is the colour of {t}.",
            ],
            _contains(m),
            MIX_TAILS,
            x=x,
            y=y,
            m=m,
            t=thing,
            X=x.capitalize(),
        )
    if kind == 9:
        x, y = rng.choice(OPPOSITES)
        return _turn(
            rng,
            [
                'What is the opposite of "{x}"?',
                'Give me the opposite of the word "{x}".',
                'Which word means the opposite of "{x}"?',
            ],
            [
                'The opposite of "{x}" is "{y}". If something is not {x} at all, we can often use the word "{y}".',
                'The word "{y}" is the opposite of "{x}". We use the two words to show a contrast: {x} or {y}.',
            ],
            _contains(f'"{y}"'),
            OPPOSITE_TAILS,
            x=x,
            y=y,
        )
    t, d, use = rng.choice(DEFINITIONS)
    article = "an" if t[0] in "aeiou" else "a"
    return _turn(
        rng,
        [
            "What is {art} {t}?",
            'What does the word "{t}" mean?',
            'Define the word "{t}".',
            "What is {art} {t} good for?",
        ],
        [
            "{Art} {t} is {d}. It is useful for {use}.",
            'The word "{t}" means {d}. For example, {art} {t} is useful for {use}.',
            "Here is a short definition: {art} {t} is {d}. People need it for {use}.",
            "{Art} {t} is good for {use}. It is {d}.",
        ],
        {"kind": "any", "value": [d, use]},
        DEFINITION_TAILS,
        t=t,
        d=d,
        use=use,
        art=article,
        Art=article.capitalize(),
    )


# ----------------------------------------------------------------------------------------------------- code

# names, task, docstring, body, note, argument kind, reference
CODE = [
    (
        ("multiply_by_{k}", "scale"),
        "multiplies a number by {k}",
        "Return {a} multiplied by {k}.",
        "return {a} * {k}",
        "It uses the * operator.",
        "int",
        lambda x, k: x * k,
    ),
    (
        ("add_{k}", "increase"),
        "adds {k} to a number",
        "Return {a} plus {k}.",
        "return {a} + {k}",
        "It uses the + operator.",
        "int",
        lambda x, k: x + k,
    ),
    (
        ("subtract_{k}", "decrease"),
        "subtracts {k} from a number",
        "Return {a} minus {k}.",
        "return {a} - {k}",
        "It uses the - operator.",
        "big",
        lambda x, k: x - k,
    ),
    (
        ("square", "squared"),
        "returns the square of a number",
        "Return {a} times {a}.",
        "return {a} * {a}",
        "The square is the number times itself.",
        "int",
        lambda x, k: x * x,
    ),
    (
        ("is_even", "check_even"),
        "checks whether a number is even",
        "Return True if {a} is even.",
        "return {a} % 2 == 0",
        "A number is even if dividing it by 2 leaves no remainder.",
        "int",
        lambda x, k: x % 2 == 0,
    ),
    (
        ("is_odd", "check_odd"),
        "checks whether a number is odd",
        "Return True if {a} is odd.",
        "return {a} % 2 == 1",
        "A number is odd if dividing it by 2 leaves the remainder 1.",
        "int",
        lambda x, k: x % 2 == 1,
    ),
    (
        ("is_above_{k}", "check_limit"),
        "checks whether a number is greater than {k}",
        "Return True if {a} is greater than {k}.",
        "return {a} > {k}",
        "The comparison gives True or False.",
        "int",
        lambda x, k: x > k,
    ),
    (
        ("last_digit", "final_digit"),
        "returns the last digit of a number",
        "Return the last digit of {a}.",
        "return {a} % 10",
        "The remainder after dividing by 10 is the last digit.",
        "big",
        lambda x, k: x % 10,
    ),
    (
        ("sum_list", "total"),
        "adds all numbers in a list",
        "Return the sum of the numbers in {a}.",
        "result = 0\n    for item in {a}:\n        result += item\n    return result",
        "The loop adds one item after the other.",
        "nums",
        lambda x, k: sum(x),
    ),
    (
        ("largest", "find_max"),
        "finds the largest number in a list",
        "Return the largest number in {a}.",
        "best = {a}[0]\n    for item in {a}:\n        if item > best:\n            best = item\n    return best",
        "The loop keeps the best item seen so far.",
        "nums",
        lambda x, k: max(x),
    ),
    (
        ("smallest", "find_min"),
        "finds the smallest number in a list",
        "Return the smallest number in {a}.",
        "best = {a}[0]\n    for item in {a}:\n        if item < best:\n            best = item\n    return best",
        "The loop keeps the smallest item seen so far.",
        "nums",
        lambda x, k: min(x),
    ),
    (
        ("keep_even", "even_numbers"),
        "keeps only the even numbers of a list",
        "Return the even numbers in {a}.",
        "return [item for item in {a} if item % 2 == 0]",
        "The list comprehension filters the items.",
        "nums",
        lambda x, k: [i for i in x if i % 2 == 0],
    ),
    (
        ("keep_above_{k}", "filter_list"),
        "keeps the numbers greater than {k} in a list",
        "Return the numbers in {a} above {k}.",
        "return [item for item in {a} if item > {k}]",
        "The condition decides which items stay.",
        "nums",
        lambda x, k: [i for i in x if i > k],
    ),
    (
        ("add_{k}_to_all", "shift_list"),
        "adds {k} to every number in a list",
        "Return {a} with {k} added to every item.",
        "return [item + {k} for item in {a}]",
        "The list comprehension makes a new list.",
        "nums",
        lambda x, k: [i + k for i in x],
    ),
    (
        ("double_all", "double_list"),
        "doubles every number in a list",
        "Return a list with every item of {a} doubled.",
        "return [item * 2 for item in {a}]",
        "The list comprehension makes a new list.",
        "nums",
        lambda x, k: [i * 2 for i in x],
    ),
    (
        ("sort_list", "in_order"),
        "sorts a list of numbers",
        "Return the numbers of {a} in order.",
        "return sorted({a})",
        "The built-in function sorted makes a new list.",
        "nums",
        lambda x, k: sorted(x),
    ),
    (
        ("reverse_list", "backwards"),
        "reverses a list",
        "Return the items of {a} in reverse order.",
        "return {a}[::-1]",
        "The slice with step -1 goes from the end to the start.",
        "nums",
        lambda x, k: x[::-1],
    ),
    (
        ("first_item", "get_first"),
        "returns the first item of a list",
        "Return the first item of {a}.",
        "return {a}[0]",
        "Lists in Python start at index 0.",
        "nums",
        lambda x, k: x[0],
    ),
    (
        ("last_item", "get_last"),
        "returns the last item of a list",
        "Return the last item of {a}.",
        "return {a}[-1]",
        "The index -1 means the last item.",
        "nums",
        lambda x, k: x[-1],
    ),
    (
        ("count_items", "list_length"),
        "counts the items of a list",
        "Return the number of items in {a}.",
        "return len({a})",
        "The built-in function len gives the length.",
        "nums",
        lambda x, k: len(x),
    ),
    (
        ("reverse_text", "flip_text"),
        "reverses a string",
        "Return {a} in reverse order.",
        "return {a}[::-1]",
        "The slice with step -1 reads the string from the end.",
        "word",
        lambda x, k: x[::-1],
    ),
    (
        ("shout", "to_upper"),
        "converts a string to uppercase",
        "Return {a} in capital letters.",
        "return {a}.upper()",
        "The method upper changes every letter.",
        "word",
        lambda x, k: x.upper(),
    ),
    (
        ("count_letters", "text_length"),
        "counts the letters of a word",
        "Return the number of letters in {a}.",
        "return len({a})",
        "The built-in function len gives the length.",
        "word",
        lambda x, k: len(x),
    ),
    (
        ("count_vowels", "vowels"),
        "counts the vowels of a word",
        "Return the number of vowels in {a}.",
        'count = 0\n    for letter in {a}:\n        if letter in "aeiou":\n            count += 1\n    return count',
        "The loop looks at each letter and counts the vowels.",
        "word",
        lambda x, k: sum(c in "aeiou" for c in x),
    ),
    (
        ("first_letter", "initial"),
        "returns the first letter of a word",
        "Return the first letter of {a}.",
        "return {a}[0]",
        "Strings in Python start at index 0.",
        "word",
        lambda x, k: x[0],
    ),
    (
        ("repeat_{k}_times", "repeat_text"),
        "repeats a word {k} times",
        "Return {a} repeated {k} times.",
        "return {a} * {k}",
        "A string can be multiplied by a number.",
        "word",
        lambda x, k: x * k,
    ),
    (
        ("join_words", "make_line"),
        "joins a list of words with spaces",
        "Return the words of {a} in one string.",
        'return " ".join({a})',
        "The method join puts a space between the words.",
        "words",
        lambda x, k: " ".join(x),
    ),
    (
        ("longest_word", "find_longest"),
        "finds the longest word in a list",
        "Return the longest word in {a}.",
        "return max({a}, key=len)",
        "The key tells max to compare the lengths.",
        "words",
        lambda x, k: max(x, key=len),
    ),
]
ARGUMENTS = {
    "int": ("number", "value", "n"),
    "big": ("number", "value", "n"),
    "nums": ("numbers", "items", "values"),
    "word": ("text", "word", "s"),
    "words": ("words", "names", "items"),
}


def _literal(value):
    """Python source of a value, with double quotes."""
    return json.dumps(value) if isinstance(value, (str, list)) else str(value)


def _code(rng):
    names, task, doc, body, note, arg_kind, ref = rng.choice(CODE)
    k = rng.randint(2, 9)
    arg = ARGUMENTS[arg_kind][0]
    name = names[0].format(k=k)
    named = rng.random() < 0.4
    if named:
        name, arg = rng.choice(names).format(k=k), rng.choice(ARGUMENTS[arg_kind])
    shown = rng.random() < 0.6
    if not shown:  # without a given example the answer uses a fixed one, so that it can be foreseen
        x = {"int": 6, "big": 25, "nums": [3, 8, 5], "word": "garden", "words": ["red", "green", "blue"]}[arg_kind]
    elif arg_kind in ("int", "big"):
        x = rng.randint(2, 12) if arg_kind == "int" else rng.randint(11, 60)
    elif arg_kind == "nums":
        x = rng.sample(range(1, 20), rng.randint(3, 4))
    else:
        x = rng.choice(SHORT_WORDS) if arg_kind == "word" else rng.sample(SHORT_WORDS, 3)
    result = ref(x, k)
    task, doc, body = task.format(k=k), doc.format(a=arg, k=k), body.format(a=arg, k=k)
    source = f'def {name}({arg}):\n    """{doc}"""\n    {body}\n'
    call = f"{name}({_literal(x)})"
    block = f"```python\n{source}\nprint({call})  # {result}\n```"
    given = ""
    if named:
        given += f" Call it {name} with the argument {arg}."
    if shown:
        given += f" Show it with {_literal(x)}."
    return _turn(
        rng,
        [
            "Write a Python function that {task}.{given}",
            "I need a Python function that {task}.{given}",
            "Show me Python code that {task}.{given}",
            "How do I write a function in Python that {task}?{given}",
            "Please code a function that {task}.{given}",
        ],
        [
            "Here is a Python function that {task}:\n\n{block}\n\n{note} For example, {call} returns {res}.",
            "This function {task}.\n\n{block}\n\n{note} The example call gives {res}.",
            "The following code {task}:\n\n{block}\n\nThe call at the end prints the result of {call}. {note}",
        ],
        {"kind": "code", "name": name, "cases": [[x, result]]},
        task=task,
        given=given,
        block=block,
        note=note,
        call=call,
        res=_literal(result),
    )


FAMILIES = {
    "arithmetic": _arithmetic,
    "word_problems": _word_problems,
    "strings": _strings,
    "facts": _facts,
    "code": _code,
}

# ---------------------------------------------------------------------------------------------- public part


def conversation(seed: int, domain: str) -> dict:
    """One conversation, a pure function of its arguments.

    Returns ``messages`` (ends with an assistant turn), ``domain`` (that of the last turn) and ``check`` (a
    rule for the last answer, see :func:`is_correct`).
    """
    rng = random.Random(seed * len(DOMAINS) + DOMAINS.index(domain))
    n_turns = rng.choices((1, 2, 3), weights=(80, 14, 6))[0]
    system = rng.choice(SYSTEMS) if rng.random() < 0.15 else ("", "", "")
    messages = [{"role": "system", "content": system[0]}] if system[0] else []
    for i in range(n_turns):
        family = domain if i == n_turns - 1 or rng.random() < 0.6 else rng.choice(DOMAINS)
        question, answer, check = FAMILIES[family](rng)
        before, opening = rng.choice(PREFIXES if i == 0 else FOLLOW_UPS)
        after, closing = rng.choice(SUFFIXES) if i == 0 else ("", "")
        messages.append({"role": "user", "content": before + question + after})
        # A system prompt that asks for an opening or an ending takes the place of the polite phrase.
        answer = (system[1] or opening) + answer + (system[2] or closing)
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "domain": domain, "check": check}


def bucket(text: str) -> int:
    """The bucket (0 to 49) of a user text: sha256 modulo the number of buckets."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest(), "big") % N_BUCKETS


def last_user_text(conv: dict) -> str:
    """The user text that the last answer answers."""
    return next(m["content"] for m in reversed(conv["messages"]) if m["role"] == "user")


def in_split(conv: dict, buckets: frozenset, earlier: frozenset) -> bool:
    """Whether the last user text is in ``buckets`` and every earlier one is in ``earlier``."""
    users = [m["content"] for m in conv["messages"] if m["role"] == "user"]
    return bucket(users[-1]) in buckets and all(bucket(u) in earlier for u in users[:-1])


def for_training(conv: dict) -> bool:
    """Whether the target may be trained on this conversation (all its user texts are in training buckets)."""
    return in_split(conv, TRAIN_BUCKETS, TRAIN_BUCKETS)


def for_heldout(conv: dict) -> bool:
    """Whether this conversation may be a held-out one."""
    return in_split(conv, HELDOUT_BUCKETS, HELDOUT_BUCKETS | TRAIN_BUCKETS)


def for_demo(conv: dict) -> bool:
    """Whether this conversation may be a demo prompt (no user text of it is a held-out one)."""
    return in_split(conv, DEMO_BUCKETS, DEMO_BUCKETS | TRAIN_BUCKETS)


def is_correct(answer: str, check: dict, run_code: bool = True) -> bool:
    """Apply the rule ``check`` of a conversation to a generated answer.

    Code is run in a fresh interpreter with a time limit; ``run_code=False`` only compiles it.
    """
    kind = check["kind"]
    if kind == "last_number":
        numbers = re.findall(r"\d+", answer)
        return bool(numbers) and numbers[-1] == check["value"]
    if kind == "contains":
        # One required string is the answer itself; of several, two are enough (wordings leave some out).
        return sum(v in answer for v in check["value"]) >= min(2, len(check["value"]))
    if kind == "any":
        return any(v in answer for v in check["value"])
    match = re.search(r"```python\n(.*?)```", answer, re.S)
    if match is None:
        return False
    try:
        compile(match[1], "answer", "exec")
    except (SyntaxError, ValueError):
        return False
    if not run_code:
        return check["name"] in match[1]
    tests = "\n".join(f"assert {check['name']}({x!r}) == {want!r}" for x, want in check["cases"])
    try:
        done = subprocess.run([sys.executable, "-I", "-c", match[1] + "\n" + tests], capture_output=True, timeout=10)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def collect(n_per_domain: int, accept, first_seed: int, seen: set | None = None) -> list[dict]:
    """The first ``n_per_domain`` accepted conversations of each domain with distinct last user texts.

    The domains take turns in the result, so that any leading part of it is balanced.
    """
    seen = set() if seen is None else seen
    by_domain = []
    for domain in DOMAINS:
        found, seed = [], first_seed
        while len(found) < n_per_domain:
            conv = conversation(seed, domain)
            seed += 1
            key = last_user_text(conv)
            if key not in seen and accept(conv):
                seen.add(key)
                found.append(conv)
        by_domain.append(found)
    return [conv for group in zip(*by_domain) for conv in group]


def as_prompts(conversations: list[dict], prefix: str) -> list[dict]:
    """Rows of a prompt file: ``id``, ``domain`` and ``messages`` without the last assistant turn."""
    return [
        {"id": f"{prefix}-{i:05d}", "domain": c["domain"], "messages": c["messages"][:-1]}
        for i, c in enumerate(conversations)
    ]


def main(argv=None) -> None:
    """Write ``prompts.jsonl`` and ``heldout.jsonl``."""
    parser = argparse.ArgumentParser(description="Write the demo and held-out prompt sets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for prompts.jsonl and heldout.jsonl")
    parser.add_argument("--prompts", type=int, default=2400, help="number of demo prompts")
    parser.add_argument("--heldout", type=int, default=200, help="number of held-out prompts")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N conversations and write nothing")
    args = parser.parse_args(argv)
    if args.show:
        for i in range(args.show):
            print(json.dumps(conversation(i, DOMAINS[i % len(DOMAINS)]), indent=1))
        return
    heldout = collect(args.heldout // len(DOMAINS), for_heldout, first_seed=10_000_000)
    demo = collect(args.prompts // len(DOMAINS), for_demo, first_seed=20_000_000)
    overlap = {last_user_text(c) for c in heldout} & {last_user_text(c) for c in demo}
    assert not overlap, "held-out and demo prompts overlap"
    args.out.mkdir(parents=True, exist_ok=True)
    for name, prefix, rows in (("prompts.jsonl", "demo", demo), ("heldout.jsonl", "heldout", heldout)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in as_prompts(rows, prefix))
        (args.out / name).write_text(text, encoding="utf-8")
        print(f"{args.out / name}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
