"""Simple chats: greetings, small facts, facts given in context, and stories on request."""

from __future__ import annotations

import random
from collections.abc import Callable

from ops.demo_model import stories, words
from ops.demo_model.pieces import END_OF_TEXT, Document, Piece, article, pick, turn

Exchange = tuple[str, str]  # what the user says, what the assistant replies

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small and friendly assistant.",
    "Answer in short sentences.",
    "You are the pagemesh demo model.",
)
GREETINGS: tuple[Exchange, ...] = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Hi there", "Hi! What can I do for you?"),
    ("Good morning!", "Good morning! How can I help you today?"),
    ("Good evening.", "Good evening! What can I do for you?"),
    ("How are you?", "I am well, thank you. How can I help you?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Goodbye!", "Goodbye! Have a good day."),
    ("Bye", "Goodbye! Have a good day."),
    (
        "Who are you?",
        "I am the pagemesh demo model, a very small model that tells short stories and remembers "
        "lists.",
    ),
    ("What is your name?", "I am the pagemesh demo model."),
    (
        "What can you do?",
        "I can tell short stories, answer a few simple questions and remember the values you give "
        "me.",
    ),
    (
        "Are you a big model?",
        "No, I am very small. I was made to show that the mesh works.",
    ),
    (
        "How do you work?",
        "I read your words as tokens and write my answer one token after the other.",
    ),
    ("What is pagemesh?", "Pagemesh is a mesh of small services that serve language models."),
    ("Help", "You can ask me for a story, ask a simple question or give me a list to remember."),
)
UNKNOWN = (
    "What is the population of {city}?",
    "Who won the race in {city}?",
    "How far is it from {city} to the {place}?",
    "What will the weather be in {city} tomorrow?",
    "Who wrote the book about the {thing}?",
    "Please write a program that draws a {thing}.",
    "Explain the history of {city}.",
    "How much does a {colour} {thing} cost?",
)
STORY_REQUESTS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Please tell me a story!",
    "Write a short story.",
    "Can you tell me a story?",
)
CAST_REQUESTS = (
    "Tell me a story about {aa}.",
    "Tell me a story about {aa} named {n}.",
    "Tell me a short story about {aa} and {at}.",
    "Write a story about {n} the {a} and {f} the {fk}.",
    "Please tell me a story about {aa} in the {p}.",
    "Write a short story about {aa} named {n} who has {act}.",
)


def _request(rng: random.Random, who: stories.Cast) -> str:
    if rng.random() < 0.3:
        return pick(rng, STORY_REQUESTS)
    return pick(rng, CAST_REQUESTS).format(
        aa=article(who.animal), at=article(who.thing), **who.slots
    )


def story_exchange(rng: random.Random) -> Exchange:
    """A request for a story, often with its hero, and the story."""
    who = stories.cast(rng)
    request = _request(rng, who)
    return request, stories.tell(rng, who, short="short" in request or rng.random() < 0.5)


def greeting_exchange(rng: random.Random) -> Exchange:
    """A greeting or another opening remark."""
    return GREETINGS[rng.randrange(len(GREETINGS))]


def fact_exchange(rng: random.Random) -> Exchange:
    """A small fact, or a question whose answer the model should admit not to know."""
    if rng.random() < 0.2:
        question = pick(rng, UNKNOWN).format(
            city=pick(rng, words.CITIES),
            place=pick(rng, words.PLACES),
            thing=pick(rng, words.THINGS),
            colour=pick(rng, words.COLOURS),
        )
        return question, "I am a very small model, and I do not know that."
    question, answer = words.FACTS[rng.randrange(len(words.FACTS))]
    lead = pick(rng, ("", "", "", "Please tell me: ", "Can you tell me: "))
    return lead + question, answer


def small_exchange(rng: random.Random) -> Exchange:
    """A greeting or a fact."""
    return greeting_exchange(rng) if rng.random() < 0.4 else fact_exchange(rng)


def _has(rng: random.Random, name: str) -> tuple[str, str]:
    said = f"{name} has {article(pick(rng, words.COLOURS))} {pick(rng, words.THINGS)}."
    return said, f"What does {name} have?"


def _lives(rng: random.Random, name: str) -> tuple[str, str]:
    return f"{name} lives in {pick(rng, words.CITIES)}.", f"Where does {name} live?"


def _works(rng: random.Random, name: str) -> tuple[str, str]:
    return f"{name} is {article(pick(rng, words.JOBS))}.", f"What is the job of {name}?"


def _likes(rng: random.Random, name: str) -> tuple[str, str]:
    return f"{name} likes {pick(rng, words.FOODS)}.", f"What does {name} like?"


_STATEMENTS: tuple[Callable[[random.Random, str], tuple[str, str]], ...] = (
    _has,
    _lives,
    _works,
    _likes,
)


def context_exchanges(rng: random.Random) -> list[Exchange]:
    """A few sentences about people, then questions that only those sentences answer."""
    names = rng.sample(words.NAMES, rng.randint(2, 6))
    facts = [_STATEMENTS[rng.randrange(4)](rng, name) for name in names]
    told = " ".join(said for said, _ in facts)
    asked = rng.sample(facts, rng.randint(1, len(facts)))
    first_said, first_question = asked[0]
    exchanges = [(f"{told} {first_question}", first_said)]
    return exchanges + [(question, said) for said, question in asked[1:]]


def chat_of(exchanges: list[Exchange], system: str | None = None) -> Document:
    """Exchanges as one chat document."""
    pieces: list[Piece] = []
    if system is not None:
        pieces += turn("system", system)
    for said, reply in exchanges:
        pieces += turn("user", said)
        pieces += turn("assistant", reply)
    return (*pieces, Piece(END_OF_TEXT))


def chat(rng: random.Random) -> Document:
    """A chat of one to four exchanges."""
    system = pick(rng, SYSTEMS) if rng.random() < 0.35 else None
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.35:
            exchanges.append(story_exchange(rng))
        elif kind < 0.7:
            exchanges.append(small_exchange(rng))
        else:
            exchanges += context_exchanges(rng)
    return chat_of(exchanges, system)
