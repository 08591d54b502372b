"""How rules write down what is wrong: the keys that they looked at, then the text."""

from tiercel.sections import Problem


class Keys:
    """The key that a problem is told at, and further keys that the judgement looked at."""

    def __init__(self, key: str, *also: str):
        self.key, self.also = key, also

    def problem(self, text: str) -> Problem:
        """Make a problem of these keys. `text`: the value given, what is wrong with it, and what to write instead."""
        return Problem(key=self.key, text=text, also=self.also)
