"""Short English sentences from a small grammar, for speech without a picture."""

from random import Random

NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty",
)  # fmt: skip

WORDS: dict[str, tuple[str, ...]] = {
    "adverb": ("quietly", "slowly", "quickly", "happily", "carefully", "again", "together"),
    "animals": (
        "horses", "cows", "dogs", "cats", "birds", "foxes", "rabbits", "sheep", "ducks", "elephants", "monkeys",
        "penguins", "squirrels", "dolphins", "butterflies", "hedgehogs", "kangaroos", "lions", "turtles", "wolves",
    ),
    "colour": ("red", "green", "blue", "yellow", "white", "black", "brown", "purple", "orange", "grey", "pink"),
    "day": ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"),
    "direction": ("north", "south", "east", "west"),
    "food": (
        "bread", "cheese", "chocolate", "soup", "honey", "mushrooms", "pancakes", "potatoes", "rice", "spinach",
        "strawberries", "tomatoes", "yoghurt",
    ),
    "instrument": ("piano", "violin", "guitar", "trumpet", "flute", "drum", "cello", "harp", "saxophone", "organ"),
    "material": ("copper", "crystal", "glass", "golden", "leather", "marble", "plastic", "silver", "velvet", "woollen"),
    "month": (
        "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
        "december",
    ),
    "number": NUMBERS,
    "objects": (
        "apples", "books", "bottles", "boxes", "candles", "chairs", "cups", "flowers", "hats", "keys", "lamps",
        "letters", "pencils", "plates", "shoes", "stones", "umbrellas", "windows", "bicycles", "lemons", "baskets",
        "blankets", "buttons", "carrots", "feathers", "jackets", "notebooks", "puzzles", "scissors", "trumpets",
    ),
    "person": (
        "my sister", "my brother", "the teacher", "the doctor", "our neighbour", "the captain", "the farmer",
        "the painter", "the baker", "my grandmother",
    ),
    "place": (
        "garden", "kitchen", "forest", "market", "village", "harbour", "library", "station", "river", "mountain",
        "meadow", "museum", "school", "bridge", "castle", "hospital", "island", "lighthouse", "theatre",
    ),
    "room": ("kitchen", "garden", "bedroom", "cellar", "hallway", "classroom", "office", "workshop"),
    "size": ("enormous", "heavy", "little", "narrow", "round", "short", "thick", "tiny", "long"),
    "surface": ("table", "floor", "shelf", "bench", "window sill", "wooden chair", "carpet"),
    "time": ("in the morning", "at noon", "in the afternoon", "in the evening", "at midnight", "after breakfast"),
    "verb": ("sleep", "run", "play", "walk", "rest", "wait", "sing", "eat", "hide"),
    "weather": ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy", "stormy", "warm", "cold", "dry"),
}  # fmt: skip

TEMPLATES = (
    "there are {number} {colour} {objects} on the {surface}",
    "the weather is {weather} {time}",
    "{number} {animals} {verb} {adverb} near the {place}",
    "on {day} it will be {weather} in the {direction}",
    "{person} plays the {instrument} {time}",
    "{person} has {number} {colour} {objects}",
    "put the {colour} {objects} in the {room}",
    "the train to the {place} leaves at {number} on {day}",
    "in {month} the {animals} {verb} in the {place}",
    "please count to {number} {adverb}",
    "{person} walks {direction} to the {place} {time}",
    "the {size} {material} {objects} are in the {room}",
    "{person} found {number} {size} {objects} near the {place}",
    "we saw {number} {animals} and {number} {animals} {time}",
    "{person} eats {food} with {food} on {day}",
    "{person} buys {number} {objects} and some {food}",
)


def sentence(rng: Random) -> str:
    """One sentence."""
    pieces = rng.choice(TEMPLATES).split("{")
    words = [pieces[0]]
    for piece in pieces[1:]:
        category, rest = piece.split("}")
        words.append(rng.choice(WORDS[category]) + rest)
    return "".join(words)
