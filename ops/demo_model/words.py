"""Word lists of the synthetic corpus. Short on purpose: with few words, each is one token."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    "Mila Tom Anna Ben Clara David Ella Finn Greta Henry Ida Jonas Kira Leo Maya Nora Oscar Paula "
    "Rosa Sam Tara Victor Wendy Zoe"
)
SHE = frozenset(_split("Mila Anna Clara Ella Greta Ida Kira Maya Nora Paula Rosa Tara Wendy Zoe"))
ANIMALS = _split(
    "fox otter rabbit bear owl mouse hedgehog squirrel badger frog turtle goat duck crow lynx mole "
    "beaver heron cat dog"
)
TRAITS = _split(
    "small brave quiet clever cheerful shy curious patient kind stubborn young old gentle proud"
)
PLACES = (
    "forest village valley harbour meadow garden mountain river island town farm lighthouse "
    "library market mill bridge castle orchard"
).split()
THINGS = _split(
    "lamp key map boat drum kite clock basket mirror bell coat ring book lantern flute wheel "
    "button box blanket cup ladder rope hat stone"
)
COLOURS = _split("red blue green yellow white black silver golden purple orange grey brown pink")
WEATHER = _split("rain snow wind fog sunshine thunder frost mist")
FOODS = _split("bread soup apples cheese honey berries cake nuts pears rice tea milk plums")
CITIES = _split(
    "Paris London Rome Berlin Madrid Lisbon Oslo Vienna Dublin Athens Prague Warsaw Cairo Tokyo"
)
JOBS = _split("baker doctor farmer painter sailor teacher gardener singer writer carpenter pilot")

# Keys of recall lists: concrete nouns, most of them also used in the stories.
KEYS = (
    *ANIMALS,
    *THINGS,
    *_split(
        "apple river tiger window planet pencil candle garden pepper silver anchor rocket marble "
        "velvet copper falcon island tunnel violin magnet cactus walnut saddle comet harbor lemon "
        "puzzle ribbon sparrow thunder tulip wagon zebra alpha beta gamma delta omega maple cedar "
        "birch coral pearl amber jade ruby opal cobalt crystal dragon eagle feather glacier hammer "
        "iris jacket kettle ladle mango needle olive parrot quartz raven salmon teapot umbrella "
        "vase whale yarn acorn bacon camel daisy engine flag grape horse igloo jelly koala lion "
        "moon nest onion piano queen robot snake train unicorn volcano water yacht code room phone "
        "door table chair city dog tree star cloud ship gate tower wall field"
    ),
)
VALUE_WORDS = (
    *COLOURS,
    *CITIES,
    *_split(
        "north south east west spring summer autumn winter wood iron glass paper cotton wool "
        "bread honey cheese open closed early late monday friday sunday circle square triangle "
        "piano violin happy tired seven twelve twenty"
    ),
)
SYLLABLES = _split(
    "ba be bo da de di do fa fi ga go ka ki ko la le li lo ma me mi mo na ne ni no pa pe ra re ri "
    "ro sa se si so ta te ti to va ve vi vo za ze zo"
)

# Small facts as question and answer; few, so that a small model can learn them.
FACTS: tuple[tuple[str, str], ...] = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Portugal?", "The capital of Portugal is Lisbon."),
    ("What is the capital of Norway?", "The capital of Norway is Oslo."),
    ("What is the capital of Austria?", "The capital of Austria is Vienna."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of Egypt?", "The capital of Egypt is Cairo."),
    ("What is the capital of England?", "The capital of England is London."),
    ("What colour is the sky?", "On a clear day the sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("How many days are in a week?", "There are seven days in a week."),
    ("How many months are in a year?", "There are twelve months in a year."),
    ("What do bees make?", "Bees make honey."),
    ("Where do fish live?", "Fish live in water."),
    ("What is ice?", "Ice is frozen water."),
    ("What is the sun?", "The sun is a star. It gives us light and warmth."),
    ("What is the moon?", "The moon goes around the earth. It shines at night."),
    ("Which season comes after winter?", "Spring comes after winter."),
    ("What is a baker?", "A baker makes bread and cake."),
    ("What is an owl?", "An owl is a bird that is awake at night."),
    ("What is an otter?", "An otter is an animal that swims in rivers and eats fish."),
    ("What is a library?", "A library is a place full of books."),
    ("What is a lighthouse?", "A lighthouse shows ships the way with its light."),
    ("What is a token?", "A token is a small piece of text. A model reads and writes tokens."),
    (
        "What is a KV cache?",
        "A KV cache keeps the keys and values of earlier tokens, so that a model need not compute "
        "them again.",
    ),
    (
        "What is a page?",
        "A page is a small block of the KV cache. It holds the keys and values of a few tokens.",
    ),
    (
        "What is paged attention?",
        "Paged attention reads keys and values from pages that may lie anywhere in memory.",
    ),
    (
        "What is a prefix cache?",
        "A prefix cache keeps the pages of a prompt, so that the next prompt that begins alike "
        "can use them again.",
    ),
    (
        "What is prefill?",
        "Prefill is the step in which a model reads the whole prompt and fills the KV cache.",
    ),
    ("What is decode?", "Decode is the step in which a model writes one token after the other."),
    ("What is a scheduler?", "A scheduler decides which request runs next."),
    ("What is a router?", "A router sends each request to a worker that can serve it well."),
    ("What is a GPU?", "A GPU is a chip that does many small sums at the same time."),
    ("What is a microservice?", "A microservice is a small program that does one job."),
)
