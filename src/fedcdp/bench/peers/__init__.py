"""One file a contestant: how it trains the clients of a task, each as fast as its library reasonably can.

All are run by `worker.py`, in a process and, where need be, an interpreter of their own. A contestant's
`serve(task, turns)` makes everything ready, then answers each turn with the seconds that a client step took. A step is
everything: take the batch, gradients, clip, noise, update. What a round begins and ends with (copy the global weights,
add up what is sent) is in the figure, too.
"""
