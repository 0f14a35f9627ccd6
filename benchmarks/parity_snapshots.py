"""What the sides of parity_jobs.py share, in environments of any age."""

import time

POINTS = 10  # copies of the policy per run, besides the first


class Snapshots:
    """Copies of the weights of a policy, and how many seconds its training had taken."""

    def __init__(self, updates):
        self.every = max(1, updates // POINTS)
        self.copies = []  # (update, seconds, dict of tensors)
        self.seconds = 0.0
        self.start = None

    def see(self, update, policy):
        """Copy the policy if it is time. The seconds that this takes do not count."""
        now = time.time()
        if self.start is not None:
            self.seconds += now - self.start
        if update % self.every == 0:
            weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
            self.copies.append((update, self.seconds, weights))
        self.start = time.time()
