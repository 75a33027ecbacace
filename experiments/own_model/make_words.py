"""Write words.jsonl: 400 words, each to be named an animal, a food, a job or a tool.

    python experiments/own_model/make_words.py experiments/own_model/words.jsonl

Each row is a conversation with one example of each kind, which shows the form of an answer, and
ends in a word of its own. No word stands in two rows, so held-out words are new to the policy.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WORDS = {
    "animal": (
        "dog cat horse cow sheep goat pig donkey rabbit mouse rat hamster squirrel beaver otter "
        "badger fox wolf bear deer moose elk bison buffalo camel llama giraffe zebra elephant "
        "rhinoceros hippopotamus lion tiger leopard cheetah panther jaguar hyena jackal monkey "
        "gorilla chimpanzee baboon lemur sloth koala kangaroo wombat panda raccoon skunk hedgehog "
        "mole bat whale dolphin seal walrus shark eel octopus squid jellyfish starfish penguin "
        "ostrich eagle hawk falcon owl vulture raven crow magpie sparrow robin finch swallow "
        "pigeon parrot peacock flamingo pelican stork heron swan snake lizard gecko crocodile "
        "alligator tortoise frog toad spider scorpion beetle butterfly ant"
    ),
    "food": (
        "bread butter cheese yogurt rice pasta spaghetti noodle soup stew salad sandwich pizza "
        "pancake waffle omelet sausage bacon ham steak meatball burger taco burrito curry "
        "porridge cereal oatmeal muffin bagel croissant biscuit cookie cake pie brownie doughnut "
        "pudding custard chocolate candy caramel honey jam marmalade ketchup mustard mayonnaise "
        "vinegar apple pear banana grape cherry peach apricot lemon lime mango papaya pineapple "
        "melon watermelon strawberry raspberry blueberry blackberry cranberry coconut fig raisin "
        "almond walnut peanut cashew potato tomato carrot onion garlic cabbage lettuce spinach "
        "broccoli cauliflower cucumber pumpkin zucchini eggplant radish turnip celery leek "
        "asparagus mushroom lentil chickpea tofu hummus popcorn pretzel"
    ),
    "job": (
        "teacher doctor nurse lawyer judge farmer fisherman butcher carpenter plumber electrician "
        "mechanic engineer architect painter sculptor musician singer dancer actor director "
        "writer journalist editor publisher librarian translator interpreter scientist chemist "
        "physicist biologist geologist astronomer mathematician historian economist accountant "
        "banker cashier salesman merchant manager secretary receptionist clerk waiter waitress "
        "bartender chef hairdresser barber tailor shoemaker jeweler blacksmith locksmith "
        "bricklayer roofer miner welder firefighter policeman detective soldier sailor pilot "
        "astronaut stewardess driver conductor postman courier gardener florist forester "
        "veterinarian dentist surgeon pharmacist psychologist therapist paramedic midwife nanny "
        "janitor housekeeper guard lifeguard coach referee athlete photographer designer "
        "programmer analyst consultant diplomat politician priest professor"
    ),
    "tool": (
        "hammer saw screwdriver wrench pliers chisel drill axe hatchet shovel spade rake hoe "
        "pitchfork wheelbarrow crowbar mallet sledgehammer jackhammer anvil clamp vise file rasp "
        "sandpaper sander planer lathe grinder chainsaw hacksaw jigsaw knife "
        "scalpel tweezers needle thimble awl punch stapler ruler protractor compass caliper "
        "micrometer level plumbline stethoscope thermometer barometer microscope telescope "
        "binoculars magnifier flashlight lantern ladder pulley winch lever wedge crank jack rope "
        "hook funnel sieve ladle spatula whisk tongs peeler grater corkscrew nutcracker broom mop "
        "duster brush paintbrush roller trowel squeegee plunger bucket hose sprinkler sickle "
        "scythe machete pruner lawnmower shredder blowtorch multimeter voltmeter "
        "wirecutter crimper ratchet"
    ),
}

EXAMPLES = {"animal": "pony", "tool": "pump", "food": "egg", "job": "baker"}
QUESTION = "Which kind of thing is it: animal, food, job or tool?"


def with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def row(word: str, kind: str) -> dict[str, object]:
    """Return the conversation that asks for the word's kind, and the kind."""
    messages = [{"role": "system", "content": QUESTION}]
    for example_kind, example in EXAMPLES.items():
        messages.append({"role": "user", "content": f"What is {with_article(example)}?"})
        answer = with_article(example_kind).capitalize()
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": f"What is {with_article(word)}?"})
    return {"prompt": messages, "answer": kind}


def main(path: Path) -> None:
    rows = [row(word, kind) for kind, words in WORDS.items() for word in words.split()]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
