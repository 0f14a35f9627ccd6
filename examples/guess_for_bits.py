"""Guess a number, with a reward for each guess: how many bits it tells about the number.

For the change of lines "Reward per turn" in docs/grpo_tools.md. Except for `total` and the end of the game,
it is the environment of the recipe guess.

    python benchmarks/turn_rewards.py    # applies the change and trains
"""

import math

MOST_GUESSES = 8


class GuessForBits:
    """A secret number from 1 to 31, and what the guesses have told so far."""

    def reset(self, secret, **columns):
        """Start a game, in which all numbers are possible."""
        self.secret = secret
        self.low, self.high = 1, 31  # the numbers that are possible
        self.num_guesses = 0
        self.is_found = False
        self.total = 0.0  # the sum of the rewards so far: the bits of the number that are known, 5 at most

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        if self.is_over():
            raise ValueError("the game is over")
        self.num_guesses += 1
        if number == self.secret:
            self.is_found = True
            self.total = 5.0
            return "right"
        if number < self.secret:
            self.low = max(self.low, number + 1)
        else:
            self.high = min(self.high, number - 1)
        # The middle of 31 numbers leaves 15: 1 bit is known. A guess that could not be right tells nothing.
        num_left = self.high - self.low + 1
        self.total = 5 - math.log2(num_left + 1)
        return "higher" if number < self.secret else "lower"

    def is_over(self):
        """The game ends with the number, or with the last guess."""
        return self.is_found or self.num_guesses == MOST_GUESSES

    def get_reward(self):
        """As in the recipe guess: 0 if the number was not found, else from 1 to 2, more for fewer guesses."""
        if not self.is_found:
            return 0.0
        return 1.0 + (MOST_GUESSES - self.num_guesses) / MOST_GUESSES
