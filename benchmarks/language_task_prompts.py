"""Write subject_verb.json and needle.json, the prompts of two tasks of `language_tasks.py`, from two small grammars.

    python benchmarks/language_task_prompts.py

The grammars and their seeds determine the files; a test compares them. No model is needed. The prompts are in random
order, so that the first n are a random sample.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NUM_PAIRS_PER_CONSTRUCTION = 30
NUM_NEEDLE_PROMPTS = 120
MIN_FILLER_SENTENCES, MAX_FILLER_SENTENCES = 10, 22
Prompt = dict[str, Any]

# --- subject–verb agreement ---------------------------------------------------------------------------------------

SUBJECT_VERB_DESCRIPTION = (
    "Sentence beginnings that end before the verb, in pairs that differ only in the number of the head noun (marked). "
    "The log-odds of the verb form that agrees with it against the other form are explained. A second noun (the "
    "attractor) has the other number in one sentence of each pair. Written before any method was run on them."
)
VERB_FORMS = [(" is", " are"), (" was", " were"), (" has", " have")]
PERSONS = [
    ("nurse", "nurses"), ("pilot", "pilots"), ("farmer", "farmers"), ("singer", "singers"), ("lawyer", "lawyers"),
    ("painter", "painters"), ("student", "students"), ("teacher", "teachers"), ("doctor", "doctors"),
    ("driver", "drivers"), ("guard", "guards"), ("writer", "writers"), ("dancer", "dancers"), ("miner", "miners"),
]  # fmt: skip
#: Singular and plural of a head noun, a preposition, and the singular and plural of nouns that may follow.
PHRASES = [
    (("key", "keys"), "to", [("cabinet", "cabinets"), ("door", "doors"), ("drawer", "drawers"), ("gate", "gates")]),
    (("road", "roads"), "to", [("village", "villages"), ("lake", "lakes"), ("farm", "farms"), ("tower", "towers")]),
    (("label", "labels"), "on", [("bottle", "bottles"), ("jar", "jars"), ("box", "boxes"), ("suitcase", "suitcases")]),
    (("picture", "pictures"), "of", [("horse", "horses"), ("bridge", "bridges"), ("garden", "gardens")]),
    (("window", "windows"), "of", [("house", "houses"), ("shop", "shops"), ("train", "trains"), ("room", "rooms")]),
    (("letter", "letters"), "from", PERSONS),
    (("report", "reports"), "about", [("river", "rivers"), ("school", "schools"), ("accident", "accidents")]),
    (("tree", "trees"), "behind", [("church", "churches"), ("wall", "walls"), ("barn", "barns")]),
    (("chair", "chairs"), "near", [("table", "tables"), ("lamp", "lamps"), ("desk", "desks"), ("bed", "beds")]),
    (("price", "prices"), "of", [("ticket", "tickets"), ("carpet", "carpets"), ("watch", "watches")]),
]
ADJECTIVES = ["old", "small", "red", "heavy", "new", "dirty", "expensive", "quiet"]
PERSON_ADJECTIVES = ["old", "young", "tall", "famous", "friendly", "tired"]
OPENINGS = ["In the morning", "After the storm", "As far as we know", "According to the mayor", "On Sunday"]
PAST_VERBS = ["admired", "visited", "called", "followed", "remembered", "avoided", "helped", "noticed"]


def build_prepositional(rng: random.Random) -> tuple[tuple[str, str], str]:
    """Return a head noun and "The {head} to the old cabinet" with the attractor still to be chosen."""
    head, preposition, attractors = rng.choice(PHRASES)
    attractor = rng.choice(attractors)[rng.randrange(2)]
    return head, f"The {{head}} {preposition} the {rng.choice(ADJECTIVES)} {attractor}"


def build_fronted(rng: random.Random) -> tuple[tuple[str, str], str]:
    """Return a prepositional phrase after an opening: "On Sunday, the {head} to the old cabinet"."""
    head, text = build_prepositional(rng)
    return head, f"{rng.choice(OPENINGS)}, t{text[1:]}"


def build_subject_relative(rng: random.Random) -> tuple[tuple[str, str], str]:
    """Return "The {head} who admired the old pilots"."""
    head, other = rng.sample(PERSONS, 2)
    return (
        head,
        f"The {{head}} who {rng.choice(PAST_VERBS)} the {rng.choice(PERSON_ADJECTIVES)} {other[rng.randrange(2)]}",
    )


def build_object_relative(rng: random.Random) -> tuple[tuple[str, str], str]:
    """Return "The {head} that the old pilots admired"."""
    head, other = rng.sample(PERSONS, 2)
    return (
        head,
        f"The {{head}} that the {rng.choice(PERSON_ADJECTIVES)} {other[rng.randrange(2)]} {rng.choice(PAST_VERBS)}",
    )


CONSTRUCTIONS = {
    "prepositional phrase": build_prepositional,
    "opening and prepositional phrase": build_fronted,
    "subject relative clause": build_subject_relative,
    "object relative clause": build_object_relative,
}


def generate_subject_verb_prompts(seed: int = 1) -> list[Prompt]:
    """Generate pairs of sentence beginnings that differ in the number of the head noun."""
    rng = random.Random(seed)
    plurals = {noun[1] for noun in PERSONS} | {noun[1] for _, _, nouns in PHRASES for noun in nouns}
    pairs, seen = [], set()
    for construction, build in CONSTRUCTIONS.items():
        num_built = 0
        while num_built < NUM_PAIRS_PER_CONSTRUCTION:
            head, template = build(rng)
            if template.format(head=head[0]) in seen:
                continue
            seen.add(template.format(head=head[0]))
            num_built += 1
            verb = rng.choice(VERB_FORMS)
            is_attractor_plural = any(word in plurals for word in template.split())
            pairs.append(
                [
                    {
                        "text": template.format(head=head[number]),
                        "answer": verb[number],
                        "against": verb[1 - number],
                        "marked": head[number],
                        "construction": construction,
                        "attractor": "other number" if is_attractor_plural != bool(number) else "same number",
                    }
                    for number in (0, 1)
                ]
            )
    rng.shuffle(pairs)
    return [{"pair": index, **prompt} for index, pair in enumerate(pairs) for prompt in pair]


# --- a fact in a long text ----------------------------------------------------------------------------------------

NEEDLE_DESCRIPTION = (
    "Passages of unrelated sentences with one that states a fact (the needle), and a question about it. The first "
    "token of the answer is explained. Marked is the value of the fact: with another value there, another answer is "
    "right. The other words of the needle are not marked: the question repeats them, and no second fact of the same "
    "form makes them necessary. Written before any method was run on them."
)
NAMES = ["Anna", "Peter", "Maria", "Thomas", "Laura", "Martin", "Julia", "Simon", "Clara", "Oscar"]
CITIES = ["Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Chicago", "Tokyo", "Boston", "Dublin"]
INSTRUMENTS = ["violin", "piano", "guitar", "trumpet", "flute", "drums", "cello", "organ"]
PLACES = ["kitchen", "cellar", "garage", "attic", "closet", "barn", "basement", "shed"]
DISHES = ["pizza", "soup", "fish", "salad", "rice", "pasta", "chicken", "pancakes"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
PASSWORDS = ["tiger", "silver", "thunder", "apple", "dragon", "winter", "pepper", "rocket", "coffee", "diamond"]
COLOURS = ["red", "green", "yellow", "purple", "orange", "white", "black", "pink"]
#: Needle, question, beginning of the answer, values, and the other word that is filled in.
FACTS = [
    ("The password of the {key} door is {value}.", "What is the password of the {key} door?",
     "The password of the {key} door is", PASSWORDS, ["front", "blue", "second", "iron", "left", "wooden"]),
    ("{key} moved to {value} last year.", "Where did {key} move last year?", "{key} moved to", CITIES, NAMES),
    ("{key} plays the {value} every evening.", "What does {key} play every evening?", "{key} plays the", INSTRUMENTS,
     NAMES),
    ("{key} keeps the ladder in the {value}.", "Where does {key} keep the ladder?", "{key} keeps the ladder in the",
     PLACES, NAMES),
    ("{key} ordered {value} for dinner.", "What did {key} order for dinner?", "{key} ordered", DISHES, NAMES),
    ("The exam of {key} is on {value}.", "When is the exam of {key}?", "The exam of {key} is on", DAYS, NAMES),
    ("The bicycle of {key} is {value}.", "What colour is the bicycle of {key}?", "The bicycle of {key} is", COLOURS,
     NAMES),
]  # fmt: skip
FILLER_SUBJECTS = [
    "The baker", "A young clerk", "The mayor", "The old gardener", "A group of visitors", "The postman",
    "The librarian", "A tall stranger", "The owner of the hotel", "The captain", "Nobody in the office",
    "The night watchman", "Every member of the club", "The new engineer", "A boy with a hat", "The judge",
]  # fmt: skip
FILLER_VERBS = [
    "looked at the clock", "wrote a long letter", "repaired the fence", "talked about the weather",
    "read the newspaper", "walked along the river", "waited for the bus", "cleaned the stairs", "opened the windows",
    "counted the chairs", "forgot the umbrella", "carried a heavy bag", "asked for directions", "painted the wall",
    "slept on the bench", "told a funny story", "fed the ducks", "searched for a pencil",
]  # fmt: skip
FILLER_ENDINGS = [
    "before the meeting started", "while the rain fell on the roof", "because there was nothing else to do",
    "and then went home", "without saying a word", "as on most days of the month", "near the market",
    "after a short break", "although it was already late", "for almost an hour", "with great care",
    "and nobody seemed to notice", "until the lights went out",
]  # fmt: skip


def generate_needle_prompts(seed: int = 2) -> list[Prompt]:
    """Generate passages of filler sentences with one fact, each with a question about the fact."""
    rng = random.Random(seed)
    prompts = []
    for index in range(NUM_NEEDLE_PROMPTS):
        needle, question, answer_start, values, keys = FACTS[index % len(FACTS)]
        filled = {"key": rng.choice(keys), "value": rng.choice(values)}
        sentences: list[str] = []
        num_filler = rng.randint(MIN_FILLER_SENTENCES, MAX_FILLER_SENTENCES)
        while len(sentences) < num_filler:
            words = [rng.choice(options) for options in (FILLER_SUBJECTS, FILLER_VERBS, FILLER_ENDINGS)]
            sentence = " ".join(words) + "."
            if sentence not in sentences:
                sentences.append(sentence)
        depth = rng.randint(0, num_filler)
        sentences.insert(depth, needle.format(**filled))
        passage = " ".join(sentences)
        text = f"{passage}\n\nQuestion: {question.format(**filled)}\nAnswer: {answer_start.format(**filled)}"
        prompts.append(
            {
                "text": text,
                "answer": " " + filled["value"],
                "marked": filled["value"],
                "passage_length": len(passage),
                "needle": needle.format(**filled),
                "depth": round(depth / num_filler, 3),
            }
        )
    rng.shuffle(prompts)
    return prompts


def write_prompts(name: str, description: str, prompts: list[Prompt]) -> None:
    """Write the prompts of a task, one on each line, after checking that each marked word occurs once."""
    for prompt in prompts:
        words = re.findall(r"\w+", prompt["text"])
        if words.count(prompt["marked"]) != 1:
            raise ValueError(f"the marked word must occur once: {prompt}")
    lines = ",\n".join("  " + json.dumps(prompt, ensure_ascii=False) for prompt in prompts)
    text = f'{{\n "description": {json.dumps(description, ensure_ascii=False)},\n "prompts": [\n{lines}\n ]\n}}\n'
    (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_prompts("subject_verb.json", SUBJECT_VERB_DESCRIPTION, generate_subject_verb_prompts())
    write_prompts("needle.json", NEEDLE_DESCRIPTION, generate_needle_prompts())
