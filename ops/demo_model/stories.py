"""Short stories from a seeded grammar: a hero, a thing, trouble, a friend and a good end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.demo_model import words
from ops.demo_model.pieces import article, pick


@dataclass(frozen=True, slots=True)
class Cast:
    """Who and what a story is about."""

    name: str
    animal: str
    trait: str
    friend: str
    friend_animal: str
    place: str
    thing: str
    colour: str
    food: str
    weather: str

    @property
    def slots(self) -> dict[str, str]:
        """The names that the sentence patterns use."""
        she = self.name in words.SHE
        friend_she = self.friend in words.SHE
        return {
            "n": self.name,
            "a": self.animal,
            "ta": article(f"{self.trait} {self.animal}"),
            "f": self.friend,
            "fa": article(self.friend_animal),
            "fk": self.friend_animal,
            "p": self.place,
            "t": self.thing,
            "ct": f"{self.colour} {self.thing}",
            "act": article(f"{self.colour} {self.thing}"),
            "food": self.food,
            "w": self.weather,
            "he": "she" if she else "he",
            "He": "She" if she else "He",
            "him": "her" if she else "him",
            "his": "her" if she else "his",
            "hers": "hers" if she else "his",
            "fhe": "she" if friend_she else "he",
            "Fhe": "She" if friend_she else "He",
            "fhis": "her" if friend_she else "his",
        }


OPENINGS = (
    "Once upon a time there was {ta} named {n}.",
    "{n} was {ta} who lived near the {p}.",
    "In a little house by the {p} lived {ta} named {n}.",
    "Long ago, {ta} called {n} lived by the {p}.",
    "There was once {ta} called {n}.",
)
HABITS = (
    "Every morning {n} walked to the {p} and ate some {food}.",
    "{n} loved the {p} more than any other place.",
    "{He} liked {food}, warm days and long walks.",
    "Most of all, {n} loved {his} {ct}.",
    "{n} had a good friend, {fa} named {f}.",
    "Each evening {he} sat outside and looked at the stars.",
)
# A plot is a sequence of steps; a story uses one pattern of each step.
PLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "lost": (
        (
            "One day {n} could not find {his} {ct}.",
            "One morning the {ct} of {n} was gone.",
            "Then one day {n} lost {his} {ct} near the {p}.",
        ),
        (
            '"Where is my {t}?" asked {n}.',
            '"Oh no, my {t} is gone!" cried {n}.',
            "{He} looked under the bed and behind the door, but it was not there.",
        ),
        (
            "{n} went to {f} the {fk} and asked for help.",
            "{f} the {fk} heard {him} and came at once.",
            "On the way {he} met {fa} named {f}.",
        ),
        (
            '"Let us look together," said {f}.',
            '"Two pairs of eyes see more than one," said {f}.',
            '"Do not be sad, I will help you," said {f}.',
        ),
        (
            "They looked all day, and at last they saw the {ct} beside an old tree.",
            "They followed some small tracks and found the {ct} under a stone.",
            "In the grass by the {p} something was shining. It was the {ct}!",
        ),
        (
            "{n} was so happy that {he} shared {his} {food} with {f}.",
            "{n} thanked {f} and held the {t} tight.",
            "{n} laughed and gave {f} some {food}.",
        ),
    ),
    "storm": (
        (
            "One night there was a lot of {w}, and the path was hard to see.",
            "One evening {w} came over the {p}.",
            "That winter there was more {w} than ever before.",
        ),
        (
            "{n} heard a small voice outside. It was {f} the {fk}.",
            "{f} the {fk} was far from home and could not find the way.",
            "Someone knocked at the door. It was {fa} named {f}.",
        ),
        (
            '"I am cold and lost," said {f}.',
            '"Please, may I come in?" asked {f}.',
            '"I cannot find my way home," said {f}.',
        ),
        (
            "{n} took {his} {ct} and went out to help.",
            "{n} opened the door and gave {f} warm {food}.",
            "{n} was a little afraid, but {he} wanted to help.",
        ),
        (
            "They sat by the fire and told stories until the morning.",
            "They waited together, and {n} showed {f} the {ct}.",
            "They talked for a long time and were not afraid any more.",
        ),
        (
            "In the morning the sky was clear, and {n} walked home with {f}.",
            "When the sun came up, {f} thanked {n} and went home.",
            "The next day {f} brought {n} a basket of {food}.",
        ),
    ),
    "gift": (
        (
            "It was nearly the birthday of {f} the {fk}.",
            "One day {n} wanted to make {f} the {fk} happy.",
            "{f} the {fk} had been ill for a week.",
        ),
        (
            '"What can I give my friend?" thought {n}.',
            "{n} thought about it all night.",
            '"I need a very good gift," said {n}.',
        ),
        (
            "{He} went to the market and saw {act}.",
            "At the {p} {he} found {act}.",
            "{He} worked for three days and made {act}.",
        ),
        (
            "It cost a lot, so {n} helped the baker and earned some money.",
            "It was old and dirty, so {n} cleaned it until it was bright.",
            "{n} put it in a box with some {food}.",
        ),
        (
            '"This is for you," said {n}.',
            "{n} gave it to {f} and waited quietly.",
            '"I hope you like it," said {n} softly.',
        ),
        (
            '"It is the best gift I have ever had!" said {f}.',
            "{f} smiled and put the {t} by the window.",
            "{f} was so happy that {fhe} began to sing.",
        ),
    ),
    "find": (
        (
            "One day {n} found {act} in the {p}.",
            "One morning there was {act} at the door.",
            "While {he} was walking by the {p}, {n} saw {act}.",
        ),
        (
            "It was not {hers}, and {he} did not know who had lost it.",
            '"Whose {t} is this?" asked {n}.',
            "{n} wanted to keep it, but {he} knew that was not right.",
        ),
        (
            "{He} asked everyone in the village, but nobody knew.",
            "{He} asked an old owl, and the owl pointed to the hill.",
            "{He} carried it from house to house.",
        ),
        (
            "At last {he} met {f} the {fk}, who was crying.",
            "Then {he} saw {fa} named {f} looking for something.",
            "Near the river sat {f} the {fk} with a sad face.",
        ),
        (
            '"That is my {t}!" said {f}. "Thank you for bringing it back."',
            '"You found my {t}!" cried {f}.',
            "{f} saw the {ct} and jumped for joy.",
        ),
        (
            "They ate {food} together and became good friends.",
            "{f} gave {n} some {food}, and they talked until evening.",
            "From then on {n} and {f} met every day.",
        ),
    ),
}
MIDDLES = (
    "The air smelled of {food} and {w}.",
    "A bird was singing somewhere above them.",
    "It was a long way, but {n} did not stop.",
    "The wind was soft, and the leaves were moving.",
    "{n} took a deep breath.",
)
ENDINGS = (
    "That night {n} slept very well.",
    "And {n} never forgot that day.",
    "{n} learned that a good friend is worth more than any {t}.",
    "They were friends for the rest of their lives.",
    "And so the day ended well for {n} and {f}.",
    "After that, nobody at the {p} was ever alone.",
)


def cast(rng: random.Random) -> Cast:
    """A random cast with two different names and two different animals."""
    name, friend = rng.sample(words.NAMES, 2)
    animal, friend_animal = rng.sample(words.ANIMALS, 2)
    return Cast(
        name=name,
        animal=animal,
        trait=pick(rng, words.TRAITS),
        friend=friend,
        friend_animal=friend_animal,
        place=pick(rng, words.PLACES),
        thing=pick(rng, words.THINGS),
        colour=pick(rng, words.COLOURS),
        food=pick(rng, words.FOODS),
        weather=pick(rng, words.WEATHER),
    )


def tell(rng: random.Random, who: Cast, *, short: bool = False) -> str:
    """A story about this cast, about 60 words when short and 120 words otherwise."""
    patterns = [pick(rng, OPENINGS)]
    if not short:
        patterns += rng.sample(HABITS, 2)
    steps = PLOTS[pick(rng, tuple(PLOTS))]
    for number, step in enumerate(steps):
        patterns.append(pick(rng, step))
        if not short and number in (2, 4) and rng.random() < 0.4:
            patterns.append(pick(rng, MIDDLES))
    patterns.append(pick(rng, ENDINGS))
    slots = who.slots
    sentences = [pattern.format(**slots) for pattern in patterns]
    cut = len(sentences) // 2
    if short or rng.random() < 0.5:
        return " ".join(sentences)
    return " ".join(sentences[:cut]) + "\n\n" + " ".join(sentences[cut:])


def story(rng: random.Random) -> str:
    """A random story."""
    return tell(rng, cast(rng), short=rng.random() < 0.4)
