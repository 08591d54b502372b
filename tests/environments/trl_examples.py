"""A text game, tools and a tool that returns a picture, in the forms that TRL documents, without any mention of
tiercel."""

from PIL import Image

WORDS = ("crane", "slate", "mango", "pearl")
TRIES = 2


class WordGame:
    def __init__(self):
        self.games = 0
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.games += 1
        self.word = WORDS[len(kwargs["prompt"]) % len(WORDS)]
        self.left = TRIES
        self.reward = 0.0
        self.done = False
        return f" Guess a word of {len(self.word)} letters. You have {TRIES} tries."

    def guess(self, guess: str) -> str:
        """
        Guess the hidden word.

        Args:
            guess: A word in square brackets, as in '[crane]'

        Returns:
            A letter for each letter of the guess: G where it is right, Y where it stands elsewhere, X where it is not
            in the word.
        """
        if self.done:
            raise ValueError("Game over.")
        word = guess.strip("[]")
        if len(word) != len(self.word):
            raise ValueError(f"{guess} is no word of {len(self.word)} letters.")
        self.left -= 1
        self.reward = float(word == self.word)
        self.done = self.reward == 1.0 or self.left == 0
        pairs = zip(word, self.word, strict=True)
        return " ".join("G" if mine == theirs else "Y" if mine in self.word else "X" for mine, theirs in pairs)

    def get_reward(self) -> float:
        return self.reward


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product.
    """
    return a * b


async def async_add(a: int, b: int) -> int:
    """
    Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The sum.
    """
    return a + b


class Camera:
    """Has no reward of its own."""

    def reset(self, **kwargs) -> None:
        self.shots = 0

    def shoot(self, width: int) -> list:
        """
        Take a picture.

        Args:
            width: Of the picture, in pixels.

        Returns:
            The picture and its number.
        """
        self.shots += 1
        picture = Image.new("RGB", (width, 60), (20 * self.shots, 90, 200))
        return [{"type": "image", "image": picture}, {"type": "text", "text": f"shot {self.shots}"}]
